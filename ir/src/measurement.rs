//! The measurements of a run: the document `run.json`.

use crate::{Bytes, Seconds};
use serde::{Deserialize, Serialize};

/// Version of the measurement format.
pub const MEASUREMENT_VERSION: u32 = 1;

/// A measured run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Measurement {
    /// Format version, [`MEASUREMENT_VERSION`].
    pub version: u32,
    /// Name of the plan's model.
    pub name: String,
    /// Backend: `cpu-threads`.
    pub backend: String,
    /// The processors and threads that executed it, in words: `4 threads on 2 CPU processors`.
    /// Empty in documents of builds that did not say.
    #[serde(default)]
    pub executed_on: String,
    /// Fingerprint of the plan document that was run.
    pub plan_hash: String,
    /// Ranks.
    pub n_ranks: u32,
    /// Training steps, in order.
    pub steps: Vec<StepMeasurement>,
    /// Validation losses: (step, loss).
    pub validation: Vec<(u64, f64)>,
    /// Per stage, from the profiling steps.
    pub stages: Vec<StageMeasurement>,
    /// Per rank, in the order of ranks; empty where the host does not see when a rank waits, as on
    /// GPUs, and in documents of builds that did not say.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<RankMeasurement>,
    /// Per instruction, from the profiling steps; empty when nothing was profiled.
    pub instructions: Vec<InstructionMeasurement>,
    /// Median step time without warm-up and profiling steps.
    pub step_time_s: Seconds,
    /// Tokens per second at the median step time.
    pub tokens_per_s: f64,
}

/// One step of training or inference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StepMeasurement {
    /// Step number, from 0.
    pub step: u64,
    /// Loss of the step's batch before the update; no number (`null` in JSON) where it
    /// overflowed, as in some steps that f16's loss scaling skips.
    #[serde(deserialize_with = "null_is_nan")]
    #[schemars(with = "Option<f64>")]
    pub loss: f64,
    /// Global gradient norm before clipping; no number where it overflowed, as in all steps
    /// that f16's loss scaling skips, in inference, which makes no gradients, and where stages
    /// update by themselves.
    #[serde(deserialize_with = "null_is_nan")]
    #[schemars(with = "Option<f64>")]
    pub grad_norm: f64,
    /// Learning rate; 0 in inference.
    pub lr: f64,
    /// Wall time, from the first rank's start to the last rank's end.
    pub seconds: f64,
    /// Whether instructions were timed in this step.
    pub profiled: bool,
}

/// One stage over the profiled steps (mean per step, mean over its ranks).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StageMeasurement {
    /// Time in compute instructions.
    pub compute_s: f64,
    /// Time in collectives, waiting included.
    pub collective_s: f64,
    /// Time in stage-to-stage exchanges, waiting included.
    pub transfer_s: f64,
    /// Mean time of one forward template.
    pub forward_s: f64,
    /// Mean time of one backward template.
    pub backward_s: f64,
    /// `StepBegin` and `StepEnd`.
    pub step_s: f64,
    /// Peak bytes of a rank: arena plus scratch space actually used.
    pub peak_bytes: Bytes,
}

/// One rank over the steps that are neither warm-up nor profiled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RankMeasurement {
    /// Its number.
    pub rank: u32,
    /// Mean seconds of a step in which it worked.
    pub work_s: f64,
    /// Mean seconds of a step in which it waited for other ranks.
    pub wait_s: f64,
    /// The work of the fastest rank that does the same over its own, from 0 to 1: one that is twice
    /// as slow has 0.5. Absent where no other rank does the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub score: Option<f64>,
}

/// One instruction over the profiled steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct InstructionMeasurement {
    /// Stage.
    pub stage: u32,
    /// Template index in the role.
    pub template: u32,
    /// Instruction index in the template.
    pub instruction: u32,
    /// Op path or collective name.
    pub what: String,
    /// Executions per rank and step.
    pub count: u32,
    /// Mean seconds of one execution, over ranks and executions.
    pub mean_s: f64,
    /// Seconds on a processor among these: the rest waited, for other ranks or for a processor.
    /// Absent in documents of builds that did not measure it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy_s: Option<f64>,
}

/// JSON has no infinities and NaNs: serde_json writes them as `null`.
fn null_is_nan<'de, D: serde::Deserializer<'de>>(d: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(d)?.unwrap_or(f64::NAN))
}
