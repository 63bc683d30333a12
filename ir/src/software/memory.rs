//! The memory of a rank's process on its device, as data: what the software keeps instead of
//! and beside the buffers of a program. The bytes are counted in `cost_model::memory`.

use crate::{Bytes, Figure};
use serde::{Deserialize, Serialize};

/// Memory that a generation of software uses to execute a program.
///
/// Bytes "per element" multiply the elements that a rank holds of a tensor, so sharding is the
/// program's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
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
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keeps_transfers: bool,
    /// Which freed bytes serve again.
    pub reuse: Reuse,
    /// Share of activations, temporaries and gradients of one pass that the allocator holds
    /// beside them.
    pub slack: f64,
}

/// Which bytes that a phase of a step has freed serve another phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
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

/// Most microbatches, or buffers, that a stage is believed to keep beyond its schedule.
const MOST_IN_FLIGHT: u32 = 1024;

impl ProcessMemory {
    /// Lists the problems of the figures; empty when they make sense.
    pub fn problems(&self) -> Vec<String> {
        let figures = [
            ("gradient_bytes", self.gradient_bytes, 16.0),
            ("pass_gradient_bytes", self.pass_gradient_bytes, 16.0),
            ("largest_gradient_bytes", self.largest_gradient_bytes, 16.0),
            ("update_bytes", self.update_bytes, 16.0),
            ("logit_bytes", self.logit_bytes, 64.0),
            ("score_bytes", self.score_bytes, 64.0),
            ("mask_bytes", self.mask_bytes, 4.0),
            ("slack", self.slack, 1.0),
        ];
        let mut problems: Vec<String> = figures
            .into_iter()
            .filter(|&(_, x, most)| !(0.0..=most).contains(&x))
            .map(|(key, x, most)| {
                format!(
                    "software.memory.{key} is {x}, expected 0 to {most}",
                    x = Figure(x)
                )
            })
            .collect();
        let most = Bytes(1 << 40);
        for (key, bytes) in [
            ("context_bytes", self.context_bytes),
            ("communicator_bytes", self.communicator_bytes),
            ("bucket_bytes", self.bucket_bytes),
        ] {
            if bytes.0 > most.0 {
                problems.push(format!(
                    "software.memory.{key} is {bytes}, expected no more than {most}"
                ));
            }
        }
        let in_flight = match self.in_flight {
            InFlight::Schedule => None,
            InFlight::More { microbatches } => Some(("more.microbatches", microbatches)),
            InFlight::Buffered { per_stage } => Some(("buffered.per_stage", per_stage)),
        };
        if let Some((key, n)) = in_flight.filter(|(_, n)| *n > MOST_IN_FLIGHT) {
            problems.push(format!(
                "software.memory.in_flight.{key} is {n}, expected 0 to {MOST_IN_FLIGHT}"
            ));
        }
        problems
    }
}
