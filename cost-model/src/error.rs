//! Why a program cannot be played.

use ir::{BufferId, StageId, TransferId};

/// Why a program cannot be played on a cluster.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SimError {
    /// The cluster's figures are not usable.
    #[error("cluster `{name}`: {}", problems.join("; "))]
    Cluster {
        /// Name of the cluster.
        name: String,
        /// `Cluster::problems`.
        problems: Vec<String>,
    },
    /// The program uses more ranks than the cluster has.
    #[error("the program uses rank {rank}, the cluster has {devices} devices")]
    Ranks {
        /// The highest rank of the program.
        rank: u32,
        /// Devices of the cluster.
        devices: u32,
    },
    /// Streams that overlap are not modelled on devices that share processors.
    #[error("concurrent streams are not modelled on devices that share processors")]
    StreamsOnPool,
    /// An instruction names a buffer, template or instruction that does not exist, or stands
    /// where it may not.
    #[error("{stage}, template {template}, instruction {instruction}: {problem}")]
    Malformed {
        /// The role's stage.
        stage: StageId,
        /// Template index.
        template: usize,
        /// Instruction index.
        instruction: usize,
        /// The problem.
        problem: String,
    },
    /// A transfer's buffer on one of its sides does not fit, or a side is not a role.
    #[error("transfer {transfer} of {buffer:?}: {problem}")]
    Transfer {
        /// The transfer.
        transfer: TransferId,
        /// The buffer, if it is known.
        buffer: Option<BufferId>,
        /// The problem.
        problem: String,
    },
    /// No role can go on.
    #[error("deadlock: {}", waiting.iter().map(|(s, slot, what)| format!("{s} waits in slot {slot} for {what}")).collect::<Vec<_>>().join("; "))]
    Deadlock {
        /// Stage, slot of its trace, and what it waits for.
        waiting: Vec<(StageId, usize, String)>,
    },
}
