//! The errors of a run, with the rank, stage and instruction where they occurred.

use crate::data::DataError;
use ir::likeness::Difference;
use ir::{Rank, StageId};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Why a run stopped. Ranks tell it to their coordinator, but for what only that can find.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
pub enum RuntimeError {
    /// An op cannot run on the tensors it was given.
    #[error("op `{op}`: {problem}")]
    Kernel {
        /// Path or name of the op.
        op: String,
        /// The part that does not fit.
        problem: String,
    },
    /// An instruction failed on a rank.
    #[error("{rank} ({stage}), {instruction}: {source}")]
    Instruction {
        /// The rank.
        rank: Rank,
        /// Its stage.
        stage: StageId,
        /// Template, index and what it is.
        instruction: String,
        /// Why.
        #[source]
        source: Box<RuntimeError>,
    },
    /// A collective states more than the fabric by which ranks meet keeps.
    #[error("{what} states {stated}, and the ranks' fabric makes {made}")]
    Contract {
        /// The collective.
        what: String,
        /// Its contract.
        stated: String,
        /// The contract that the fabric keeps.
        made: String,
    },
    /// A rank's thread panicked: a mistake of the runtime or of the program.
    #[error("{rank} panicked: {message}")]
    Panic {
        /// The rank.
        rank: Rank,
        /// The panic's message.
        message: String,
    },
    /// A rank waited too long for others: they never came, or are very slow.
    #[error("{rank} waited {seconds} s in {what} for {}", list(waiting_for))]
    Watchdog {
        /// The rank that waited.
        rank: Rank,
        /// The collective or exchange.
        what: String,
        /// Who had not arrived.
        waiting_for: Vec<Rank>,
        /// How long it waited.
        seconds: u64,
    },
    /// Ranks came to the same meeting with different things: their programs, or the orders of
    /// them, do not fit.
    #[error("{rank} brings {brings} to a meeting to which {other} brought {brought}")]
    Mismatch {
        /// The rank that noticed.
        rank: Rank,
        /// The operation that it came with.
        brings: String,
        /// Another one.
        other: Rank,
        /// The operation that that one came with.
        brought: String,
    },
    /// A rank's process is gone, or does not answer.
    #[error("{rank} is lost: process {process} (pid {pid} on {host}): {how}")]
    Gone {
        /// The rank.
        rank: Rank,
        /// The process that had it.
        process: usize,
        /// Its number there.
        pid: u32,
        /// Its host.
        host: String,
        /// How it ended, as far as is known.
        how: String,
        /// Whether the process is there for all that is known, and does not answer.
        is_silent: bool,
    },
    /// Another rank failed first; that rank's error tells why.
    #[error("{rank} stopped because {by} failed: {reason}")]
    Aborted {
        /// The rank that stopped.
        rank: Rank,
        /// The rank that failed first.
        by: Rank,
        /// Its error.
        reason: String,
    },
    /// A device, its driver or the compiler of its kernels failed.
    #[error("the device failed: {problem}")]
    Device {
        /// The call that failed, and how.
        problem: String,
    },
    /// There is no device of the kind that was asked for, or a library for it is missing.
    #[error("{problem}")]
    NoDevice {
        /// The missing part.
        problem: String,
        /// How to go on.
        way_out: String,
    },
    /// The ranks are gone after an earlier error.
    #[error("the run has ended already, with this error: {0}")]
    Ended(String),
    /// Process 0 ended the run, in which nothing went wrong with this process' ranks as far as it
    /// knows.
    #[error("process 0 has ended the run, because of this error: {0}")]
    EndedByFirst(String),
    /// The batch is not what the program was made for.
    #[error("batch: {0}")]
    Batch(String),
    /// A parameter or optimizer state does not fit.
    #[error("state `{path}`: {problem}")]
    State {
        /// Its path.
        path: String,
        /// The problem.
        problem: String,
    },
    /// The program or training graph is not one that this runtime can execute.
    #[error("program: {0}")]
    Program(String),
    /// A loss or a gradient norm is no number, and no smaller loss scale can help.
    #[error("the {figure} of step {step} is {value}{}: training diverged{}", of_scale(*loss_scale), first_words(first))]
    Diverged {
        /// The step.
        step: u64,
        /// The name of the figure that is no number.
        figure: String,
        /// NaN or an infinity.
        value: f64,
        /// The loss scale of the step, with f16.
        loss_scale: Option<f64>,
        /// The first tensor that is no number, where that is known.
        first: Option<String>,
    },
    /// Data cannot be read.
    #[error(transparent)]
    Data(
        #[from]
        #[serde(with = "told")]
        DataError,
    ),
    /// A checkpoint holds other states than the plan has.
    #[error("{}: a checkpoint of another model or optimizer: {problem}", path.display())]
    OtherCheckpoint {
        /// The file.
        path: PathBuf,
        /// The first state that differs.
        problem: String,
    },
    /// A checkpoint is of a model that has the same states and computes something else.
    #[serde(skip)]
    #[error(
        "{}: a checkpoint of another model: {difference} is {} there, {} in the plan",
        path.display(), difference.first, difference.second
    )]
    OtherModel {
        /// The checkpoint.
        path: PathBuf,
        /// Where the checkpoint's model differs from the plan's.
        difference: Difference,
    },
    /// A state that was to be written is no number: training diverged.
    #[error("state `{path}` has {value}: training diverged, and this is no state to go on from")]
    NotFinite {
        /// Its path.
        path: String,
        /// NaN or an infinity.
        value: f32,
    },
    /// Ranks that keep the same part of a state have other bits of it.
    #[error(
        "after {}, state `{path}` of {} is not that of {}, which {} the same part of it{}",
        ir::counted(*step, "step"), list(odd), list(others), if others.len() == 1 { "keeps" } else { "keep" },
        if *is_known { "" } else { "; which of them is wrong cannot be told" }
    )]
    Replicas {
        /// Steps done.
        step: u64,
        /// The state's path.
        path: String,
        /// The ranks that are fewest to have their bits.
        odd: Vec<Rank>,
        /// The others.
        others: Vec<Rank>,
        /// Whether the former are fewer.
        is_known: bool,
    },
    /// The record of a rank cannot be read or written.
    #[error("{}: {problem}", path.display())]
    Record {
        /// The file, or its folder.
        path: PathBuf,
        /// Why.
        problem: String,
    },
    /// A folder of checkpoints is another run's by now.
    #[error(
        "{}: somebody has removed the folder while this run went on, and another run writes its \
         checkpoints there since: this one writes none there any more",
        path.display()
    )]
    Taken {
        /// The folder.
        path: PathBuf,
    },
    /// None of several checkpoints is whole.
    #[error("{}: none of its {} checkpoints is whole, newest first:{}", path.display(), problems.len(), listed(problems))]
    NoneWhole {
        /// The folder.
        path: PathBuf,
        /// The first problem of each, the newest first.
        problems: Vec<RuntimeError>,
    },
    /// A checkpoint cannot be read or written.
    #[error("{}: {problem}", path.display())]
    Checkpoint {
        /// The file.
        path: PathBuf,
        /// Why.
        problem: String,
    },
}

/// Errors as indented lines.
fn listed(problems: &[RuntimeError]) -> String {
    problems.iter().map(|p| format!("\n  {p}")).collect()
}

impl RuntimeError {
    /// True for the errors of ranks that waited too long.
    pub fn is_watchdog(&self) -> bool {
        match self {
            RuntimeError::Watchdog { .. } => true,
            RuntimeError::Instruction { source, .. } => source.is_watchdog(),
            _ => false,
        }
    }
    /// True where ranks were lost, or waited too long for each other: then none can go on.
    pub fn is_loss(&self) -> bool {
        self.is_watchdog() || matches!(self, RuntimeError::Gone { .. })
    }
    /// True for the errors of writing or reading files, wherever that was.
    pub(crate) fn is_of_files(&self) -> bool {
        match self {
            RuntimeError::Checkpoint { .. } => true,
            RuntimeError::Instruction { source, .. } => source.is_of_files(),
            _ => false,
        }
    }
    /// True for the errors that ranks find at work, and for those of ranks that are lost, in contrast
    /// to what a run is refused for.
    pub fn is_of_work(&self) -> bool {
        match self {
            RuntimeError::Instruction { .. }
            | RuntimeError::Panic { .. }
            | RuntimeError::Mismatch { .. }
            | RuntimeError::Aborted { .. }
            | RuntimeError::Device { .. }
            | RuntimeError::Diverged { .. }
            | RuntimeError::Replicas { .. } => true,
            e => e.is_loss(),
        }
    }
    /// True for the errors of ranks that waited too long for this one.
    pub(crate) fn misses(&self, rank: Rank) -> bool {
        match self {
            RuntimeError::Watchdog { waiting_for, .. } => waiting_for.contains(&rank),
            RuntimeError::Instruction { source, .. } => source.misses(rank),
            _ => false,
        }
    }
    /// The rank that failed first, of the error of one that stopped because of that.
    pub(crate) fn cause(&self) -> Option<Rank> {
        match self {
            RuntimeError::Aborted { by, .. } => Some(*by),
            RuntimeError::Instruction { source, .. } => source.cause(),
            _ => None,
        }
    }
    /// True for the errors of ranks that stopped because another one failed.
    pub fn is_consequence(&self) -> bool {
        match self {
            RuntimeError::Aborted { .. } => true,
            RuntimeError::Instruction { source, .. } => source.is_consequence(),
            _ => false,
        }
    }
}

/// An error of data as another process hears it: its words.
mod told {
    use crate::data::DataError;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(e: &DataError, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(e)
    }
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<DataError, D::Error> {
        String::deserialize(from).map(DataError::Elsewhere)
    }
}

fn of_scale(scale: Option<f64>) -> String {
    scale.map_or(String::new(), |s| format!(" at a loss scale of {s}"))
}

fn first_words(first: &Option<String>) -> String {
    let words = |f: &String| format!("; the first tensor that is no number: {f}");
    first.as_ref().map_or(String::new(), words)
}

fn list(ranks: &[Rank]) -> String {
    ranks
        .iter()
        .map(Rank::to_string)
        .collect::<Vec<_>>()
        .join(", ")
}
