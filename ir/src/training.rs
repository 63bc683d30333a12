//! The training graph: the forward graph, its gradients, and the optimizer, as one graph.
//!
//! Regions and passes (see `graph::{Region, Pass}`):
//! * `StepBegin`: `State` ops (parameters, moments), `cast.<param>` to the compute dtype (absent
//!   where that is f32) and `prepare.<param>`, a `Layout`. A parameter gathered here is
//!   gathered once per step; gathered at its uses, once per microbatch.
//! * `Microbatch`: forward ops under their own paths, `loss`, `grad.<path>.<what>` ops (see
//!   `autodiff`), one `accumulate.<use path>.<operand>` per use of a parameter, plus
//!   `accumulate.loss`; `layout.<first user>.<operand>` ops, the layout changes
//!   that several matrix multiplications share; `recompute.<path>`, forward ops run again for
//!   the gradients of their layer (see `recompute`).
//! * `StepEnd`: `grad_sum.<param>`, the sum of a parameter's accumulators in use order (none
//!   where there is one use), `sum_squares.<param>`, the world ops `global_norm` and
//!   `clip_coefficient` (layer `None`), `update.<param>`.
//!
//! With f16 the world scalars `loss_scale` (stored relative to 2^16, so that it starts at
//! one), `loss_scale.good_steps` and `loss_scale.updates` are states too; `loss_scale.value` is
//! the scale itself, the seed of the gradients, and `update_loss_scale` with `loss_scale.next`
//! writes it. AdamW corrects its bias by `loss_scale.updates`, the steps that an overflow did
//! not skip, as with `torch.amp.GradScaler`.
//!
//! Where every microbatch makes an update ([`TrainSpec::minibatch`]) the copies of the parameters
//! (`cast.<param>`, `prepare.<param>`) are ops of its forward pass: its own, which its backward pass
//! reads too, whatever is updated in between. Nothing is accumulated but the loss. Behind the
//! gradients stand, in the pass of updates, `cast.gradient.<use path>.<operand>`, `grad_sum.<param>`
//! and `update.<param>`, whose coefficient is a constant `coefficient.<layer>`, the number of
//! updates a step. There is no norm. The `read` of a state is what the microbatch before left.
//!
//! These paths are labels, with `-2` or more behind them where the model has an op of that path.
//! Every op says what it is by its [`Origin`](crate::Origin).
//!
//! For inference ([`Task::Inference`](crate::Task)) the graph has of all this the parameters, which
//! rest in the compute dtype and are never written, and the forward pass to `accumulate.loss`.
//!
//! Ops stand in the order of their regions. [`problems`] checks these invariants.
//!
//! Every value that crosses from one region to a later one is explicit in the graph. The
//! carried value of a state (its next step's content) is named by [`State::write`].

mod build;
mod layouts;
mod problems;
mod recompute;
mod shared;

pub use build::build;
pub use problems::problems;
pub use recompute::{Recompute, can_recompute, choose, recompute, source_value};

use crate::{Graph, GraphError, TrainSpec, ValueId};
use serde::{Deserialize, Serialize};

/// The state whose value times [`LOSS_SCALE_UNIT`] is f16's dynamic loss scale.
pub const LOSS_SCALE: &str = "loss_scale";
/// The loss scale's initial value, and the unit in which its state is stored. As in
/// `torch.amp.GradScaler`.
pub const LOSS_SCALE_UNIT: f64 = 65536.0;
/// The loss scale below which none goes: gradients that overflow without any scale will overflow
/// with every other one. As in Megatron-LM and DeepSpeed.
pub const LOWEST_LOSS_SCALE: f64 = 1.0;
/// The state that counts f16's updates, which are fewer than its steps. Exact up to 2^24, long
/// after which bias corrections are one.
pub const UPDATES: &str = "loss_scale.updates";

/// The role of a persistent tensor.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum StateRole {
    /// A model parameter (f32 master copy).
    Parameter,
    /// AdamW's first moment, or SGD's momentum buffer.
    Moment1,
    /// AdamW's second moment.
    Moment2,
    /// A world scalar: loss scale, its count of good steps or that of updates.
    Scalar,
}

/// A persistent tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// Path of its `State` op. Moments are `moment1.<param>`, `moment2.<param>`.
    pub path: String,
    /// Its kind.
    pub role: StateRole,
    /// Path of the parameter it belongs to (its own for a parameter, empty for scalars).
    pub param: String,
    /// The value it has during the step: result of its `State` op.
    pub read: ValueId,
    /// The value it has in the next step, or microbatch where each makes an update; `read` where
    /// nothing changes it.
    pub write: ValueId,
}

/// A training graph, or the part of it that inference is.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingGraph {
    /// All ops of a step; `layers` as in the forward graph.
    pub graph: Graph,
    /// Persistent tensors: parameters in graph order, then their moments, then scalars.
    pub states: Vec<State>,
    /// The step's loss (f32 scalar, mean over the tokens of the global batch): the result of
    /// `accumulate.loss`.
    pub loss: ValueId,
    /// The global gradient norm before clipping (unscaled for f16 only by the coefficient); none
    /// where no gradients are made, or each stage updates by itself.
    pub grad_norm: Option<ValueId>,
}

impl TrainingGraph {
    /// Whether every microbatch updates the states by itself.
    pub fn is_asynchronous(&self) -> bool {
        let writer = |s: &State| self.graph.op(self.graph.value(s.write).producer);
        let in_microbatch = |s| writer(s).region == crate::Region::Microbatch;
        self.states.first().is_some_and(in_microbatch)
    }
    /// Returns how many tokens a sample has behind its last label ([`Graph::further`]).
    pub fn further(&self) -> u64 {
        self.graph.further()
    }
}

/// The training graph that plans are made for: layer boundaries made explicit (`boundary`),
/// then [`build`], then parameters of other layers shared through one op each
/// (`shared.<layer>.<param>`). `forward` as in [`build`]. Nothing is recomputed in it: that a
/// plan decides, so the graph that a plan is replayed on is `Plan::training_graph`. A change
/// here, there or in [`recompute()`] is a new `plan::PASSES_VERSION`.
pub fn training_graph(forward: &Graph, spec: &TrainSpec) -> Result<TrainingGraph, GraphError> {
    let marked = crate::boundary::mark_boundaries(forward)?;
    shared::share_parameters(build(&marked, spec)?)
}
