//! Why a plan has no program.

use ir::op::StrategyError;
use ir::{GraphError, LayerId, StageId};

/// Why a plan cannot be lowered. Every variant names what to change in the plan.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LowerError {
    /// The embedded graph does not parse.
    #[error("the plan's graph does not parse: {0}")]
    Graph(#[from] ir::text::ParseError),
    /// The embedded graph cannot be trained.
    #[error("the plan's graph cannot be trained: {0}")]
    Training(#[from] GraphError),
    /// The plan is of another format or pass version.
    #[error("the plan has {what} {found}, this build reads {expected}")]
    Version {
        /// Which version.
        what: &'static str,
        /// The number in the plan.
        found: u32,
        /// The number that this build reads.
        expected: u32,
    },
    /// Microbatches do not make up the global batch, or there are none or too many.
    #[error("{n_microbatches} microbatches of {microbatch} samples do not make a step: {problem}")]
    Microbatches {
        /// Number of microbatches.
        n_microbatches: u32,
        /// Samples in each.
        microbatch: u64,
        /// The problem.
        problem: String,
    },
    /// Stages or microbatches that the schedule cannot order.
    #[error("the schedule is {name}: {problem}")]
    Schedule {
        /// Its name.
        name: &'static str,
        /// The problem.
        problem: String,
    },
    /// The runs of the stages are not all layers in order, once each.
    #[error("{stage}: {problem}")]
    Layers {
        /// The stage.
        stage: StageId,
        /// The problem.
        problem: String,
    },
    /// The axes of a stage's mesh do not multiply to its devices.
    #[error("the mesh of {stage} has {n_devices} devices, its axes do not multiply to that")]
    Mesh {
        /// The stage.
        stage: StageId,
        /// Devices of the mesh.
        n_devices: u32,
    },
    /// An op has no strategy.
    #[error("layer strategy {strategy} has none for op `{relative}` of {layer}")]
    MissingStrategy {
        /// Index of the layer strategy.
        strategy: u32,
        /// Relative path of the op.
        relative: String,
        /// The layer.
        layer: LayerId,
    },
    /// A strategy names another number of axes than the mesh has.
    #[error("the strategy of op `{path}` has {found} axes, its mesh {expected}")]
    StrategyAxes {
        /// The op.
        path: String,
        /// Axes of the strategy.
        found: usize,
        /// Axes of the mesh.
        expected: usize,
    },
    /// A strategy is not allowed by the op's rule.
    #[error("op `{path}`: {source}")]
    Strategy {
        /// The op.
        path: String,
        /// The broken rule.
        #[source]
        source: StrategyError,
    },
    /// A layout change has no recorded path.
    #[error("edge `{key}` on {stage} has no recorded path from {from} to {to}")]
    MissingPath {
        /// Absolute key of the edge.
        key: String,
        /// The stage.
        stage: StageId,
        /// Spec of the value.
        from: String,
        /// Spec that is wanted.
        to: String,
    },
    /// A recorded path does not lead where it must.
    #[error("edge `{key}` on {stage}: its recorded path does not lead from {from} to {to}")]
    WrongPath {
        /// Absolute key of the edge, or of the transfer.
        key: String,
        /// The stage.
        stage: StageId,
        /// Spec of the value.
        from: String,
        /// Spec that is wanted.
        to: String,
    },
    /// Keys and values go around a single rank.
    #[error("op `{path}` on {stage} goes around a ring of one rank, its strategy needs no `ring`")]
    Ring {
        /// The op.
        path: String,
        /// The stage.
        stage: StageId,
    },
    /// A value that another stage needs has no recorded transfer.
    #[error("transfer `{key}` has no recorded path")]
    MissingTransfer {
        /// Key of the transfer.
        key: String,
    },
    /// Data or a constant is wanted as addends over an axis.
    #[error("op `{path}` wants `{value}` partial, which is whole on every rank")]
    PartialSource {
        /// The op.
        path: String,
        /// Its operand.
        value: String,
    },
    /// A stage needs a value of a stage that itself waits for it.
    #[error("the schedule cannot go on after {played} slots: {waiting}")]
    Stuck {
        /// Compute slots and exchanges that were ordered.
        played: usize,
        /// A slot that waits, and for what.
        waiting: String,
    },
    /// Layouts were asked about another plan or graph than they were made of: a mistake of the
    /// caller, not of the plan.
    #[error("these layouts were made of a plan with other {what}")]
    OtherLayouts {
        /// The name of the difference.
        what: &'static str,
    },
    /// A buffer or the arena does not fit 64 bits.
    #[error("`{name}` on {stage} exceeds 2^63 bytes")]
    TooLarge {
        /// Name of the buffer.
        name: String,
        /// The stage.
        stage: StageId,
    },
}
