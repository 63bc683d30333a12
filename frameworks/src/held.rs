//! The memory of a rank's process on its device, as data: what the software keeps instead of
//! and beside the buffers of a program. The bytes are counted in `process`.

use ir::Bytes;
use serde::Deserialize;

/// Memory that a generation of software uses to execute a program.
///
/// Bytes "per element" multiply the elements that a rank holds of a tensor, so sharding is the
/// program's.
#[derive(Clone, Debug, PartialEq)]
pub struct ProcessMemory {
    /// Context of the device's driver with the kernels that it loaded.
    pub context_bytes: Bytes,
    /// Buffers of one communicator; a rank has one for each mesh axis it communicates over,
    /// one for its neighbours in the pipeline and one for all ranks.
    pub communicator_bytes: Bytes,
    /// Gradients that are kept until the update, per element.
    pub gradient_bytes: f64,
    /// Gradients beside them that every backward pass makes anew, per element.
    pub pass_gradient_bytes: f64,
    /// Whether a rank that holds shards of the parameters keeps them in the compute type too,
    /// or casts them as it gathers them.
    pub sharded_copies: bool,
    /// A gradient beside the one that it is added to or cast from, per element of the largest
    /// parameter.
    pub largest_gradient_bytes: f64,
    /// Bytes that only the update needs, per element of the optimizer's states.
    pub update_bytes: f64,
    /// Buckets of collectives over gradients and parameters; no more than the parameters.
    pub bucket_bytes: Bytes,
    /// Logits, their casts, softmax and gradients, per logit.
    pub logit_bytes: f64,
    /// Scores of unfused attention with what is made of them, per score, from forward (or
    /// recomputation) to backward.
    pub score_bytes: f64,
    /// A dropout mask from forward to backward, per element.
    pub mask_bytes: f64,
    /// How many microbatches keep their activations.
    pub in_flight: InFlight,
    /// Whether a stage of a pipeline has buffers of its own for what every microbatch of a step
    /// receives, and keeps what it gave the next stage until the backward pass of that
    /// microbatch.
    pub keeps_transfers: bool,
    /// Which freed bytes serve again.
    pub reuse: Reuse,
    /// Share of activations, temporaries and gradients of one pass that the allocator holds
    /// beside them.
    pub slack: f64,
}

/// Which bytes that a phase of a step has freed serve another phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reuse {
    /// Blocks got from the driver are kept and may be split, never joined: temporaries, the
    /// loss and the update share the large ones, the many small ones of activations serve
    /// nothing else.
    Blocks,
    /// Places are computed from lifetimes: gradients and the update take the place of
    /// activations. Where a step accumulates over microbatches, what runs once does not share
    /// with what runs for each, nor the two passes with each other.
    Lifetimes,
}

/// Microbatches whose activations a stage of a pipeline keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum InFlight {
    /// As many as the schedule has begun and not ended.
    Schedule,
    /// More than that.
    More {
        /// By so many.
        microbatches: u32,
    },
    /// The last stage as many as the schedule says; every other stage, in buffers of fixed
    /// number, so many for each stage of the pipeline, and one.
    Buffered {
        /// Buffers for each stage.
        per_stage: u32,
    },
}
