//! The work of a training step: the numerators of MFU, which no plan changes, and of HFU,
//! which counts what a plan recomputes.

use crate::routing::{self, Routing};
use ir::op::Work;
use ir::training::TrainingGraph;
use ir::{DType, Flops, Pass, Region, TrainSpec};

/// The work of one step of training, for rates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepWork {
    /// Model FLOPs, see [`model_flops`].
    pub model_flops: Flops,
    /// Hardware FLOPs, see [`hardware_flops`].
    pub hardware_flops: Flops,
    /// Attention's part of them, without the causal mask.
    pub hardware_attention_flops: Flops,
    /// Tokens of the global batch.
    pub tokens: u64,
    /// Compute dtype, whose peak MFU is measured against.
    pub dtype: DType,
}

impl StepWork {
    /// The work of a training graph under a spec.
    pub fn of(training: &TrainingGraph, spec: &TrainSpec) -> Self {
        StepWork {
            model_flops: model_flops(training, spec.global_batch),
            hardware_flops: hardware_flops(training, spec.global_batch),
            hardware_attention_flops: counted(
                training,
                spec.global_batch,
                |pass| pass != Pass::Update,
                Work::counted_attention_flops,
            ),
            tokens: spec.global_batch.saturating_mul(spec.sequence),
            dtype: spec.precision.compute(),
        }
    }
}

/// FLOPs of the matmuls and of attention in the forward and backward passes of one step with
/// `global_batch` samples: PaLM's convention (Chowdhery et al. 2022, appendix B), which knows no
/// causal mask. Attention with a window counts as many keys for each query as the window has.
/// Recomputation and the optimizer do not count, and of the slots of experts those alone that are
/// filled where routers choose all equally often ([`Routing::filled`]).
///
/// Work is linear in the samples, so all microbatches count as one of `global_batch` samples.
pub fn model_flops(training: &TrainingGraph, global_batch: u64) -> Flops {
    let graph = &training.graph;
    let routings = Routing::all(graph);
    let ops = graph.ops().iter().filter(|op| {
        let is_model = matches!(op.pass, Pass::F | Pass::BI | Pass::BW);
        op.region == Region::Microbatch && is_model
    });
    ops.map(|op| {
        let flops = graph.work(op, 1).model_flops() * global_batch as f64;
        Flops(flops * routing::filled(graph, op, &routings))
    })
    .sum()
}

/// [`model_flops`] with those of recomputed forward ops and of empty slots: what HFU counts. What a
/// fused attention or a scan recomputes inside its own gradient counts in neither.
pub fn hardware_flops(training: &TrainingGraph, global_batch: u64) -> Flops {
    counted(
        training,
        global_batch,
        |pass| pass != Pass::Update,
        Work::model_flops,
    )
}

fn counted(
    training: &TrainingGraph,
    global_batch: u64,
    counts: impl Fn(Pass) -> bool,
    flops: impl Fn(&Work) -> f64,
) -> Flops {
    let ops = training
        .graph
        .ops()
        .iter()
        .filter(|op| op.region == Region::Microbatch && counts(op.pass));
    ops.map(|op| Flops(flops(&training.graph.work(op, 1)) * global_batch as f64))
        .sum()
}
