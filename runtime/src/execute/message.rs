//! Messages between the coordinator of a run and the workers. All of it is plain data: a
//! channel takes it as it is, and a wire could. (A wire must keep numbers that are not finite.)

use super::rank::RankTimings;
use super::rank::spoiled::Found;
use crate::arena::Bytes;
use crate::checkpoint::{Checkpoint, Shard};
use crate::data::Batch;
use crate::error::RuntimeError;
use crate::stragglers::Spent;
use ir::BufferId;
use ir::program::StateBuffer;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;

/// A request to a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Plays a step or a validation.
    Play(Play),
    /// Says what its part of a state is.
    Read(BufferId),
    /// Replaces its part of a state.
    Write(BufferId, Bytes),
    /// Writes its parts of these states to a file of its own in a folder.
    Save(PathBuf, Vec<StateBuffer>),
    /// Copies its parts of these states, and writes the copies as for [`Request::Save`] while it goes
    /// on.
    Snapshot(PathBuf, Vec<StateBuffer>),
    /// Waits until they are written, and says how that went.
    Written,
    /// Hashes its parts of the states.
    Hash,
    /// Says which step its states are of.
    Stands,
    /// Reads its parts of the states that a checkpoint has.
    Load(Arc<Checkpoint>),
}

/// The part of the program to play.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Play {
    /// The samples of the global batch.
    pub samples: Samples,
    /// Training step.
    pub step: u64,
    /// Learning rate.
    pub lr: f64,
    /// False: only what the loss needs.
    pub training: bool,
    /// Whether to time instructions.
    pub profile: bool,
    /// Whether to look for values that are no numbers in everything that is written.
    pub looks: bool,
}

/// Where the samples of a step come from.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Samples {
    /// The run's data.
    Of(Batch),
    /// These, `sequence + 1` tokens each and those further ones that the program loads.
    Given(Arc<Vec<Vec<u32>>>),
}

/// The reply to a request.
pub(crate) type Answer = Result<Reply, RuntimeError>;

/// The answer of a rank that did as it was asked.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// The figures that it saw.
    Played(Box<Played>),
    /// Its part of a state.
    Part(Bytes),
    /// The shard that it wrote. A rank that cannot write a file can still go on.
    Shard(Result<Shard, RuntimeError>),
    /// The hash of each of its states, in the order of its role.
    Hashes(Vec<String>),
    /// How many steps its states are of; none where an update of them has ended early.
    Stands(Option<u64>),
    /// Nothing.
    Done,
}

/// The figures that a rank saw in a step.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Played {
    /// When it began, on its process' clock.
    pub began_s: f64,
    /// When it ended, on the same clock.
    pub ended_s: f64,
    /// How long it worked and waited in between.
    pub spent: Spent,
    pub loss: Option<f32>,
    pub grad_norm: Option<f64>,
    pub loss_scale: Option<f64>,
    pub timings: Option<RankTimings>,
    pub peak_bytes: u64,
    /// Whether it gave the step up before its update, as the gradient's norm is no number.
    pub given_up: bool,
    /// The first value that is no number, where it looked for some.
    pub found: Option<Found>,
    /// Whether copies of its states are still being written.
    pub is_writing: bool,
}
