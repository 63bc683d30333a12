//! The plan: what was decided, as a self-contained document.
//!
//! It embeds the forward graph (as text, equal layers once), what is trained, and the
//! cluster. Lowering rebuilds the training graph from them ([`Plan::training_graph`], pass
//! versions recorded) and replays the decisions; it never searches.
//!
//! Strategies are kept per *distinct* layer: layers that are equal and treated equally share
//! one [`LayerStrategy`]. Its keys are op paths in which the layer's name is written `{}`
//! (`grad.{}.attn.qkv.lhs`).

pub use crate::made_for::MadeFor;
pub use crate::schedule::ScheduleKind;

use crate::cluster::Cluster;
use crate::offload::Spaces;
use crate::op::OpStrategy;
use crate::reshard::{CrossPath, LayoutStep};
use crate::training::{TrainingGraph, recompute, training_graph};
use crate::{Bytes, Graph, GraphError, LayerId, LogicalMesh, OpId, Seconds, StageId, TrainSpec};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Version of the plan format that this crate reads and writes.
pub const PLAN_VERSION: u32 = 1;
/// Version of the passes replayed on a plan's graph (boundaries, autodiff, shared layouts,
/// recomputation) and of lowering, where programs of one plan changed.
pub const PASSES_VERSION: u32 = 10;

/// A parallel plan of a step of training or inference.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Format version, [`PLAN_VERSION`].
    pub version: u32,
    /// Pass version, [`PASSES_VERSION`].
    pub passes: u32,
    /// Name of the model.
    pub name: String,
    /// The forward graph in text form.
    pub graph: String,
    /// The training.
    pub train: TrainSpec,
    /// The cluster.
    pub cluster: Cluster,
    /// Samples per microbatch over a whole stage mesh.
    pub microbatch: u64,
    /// Microbatches per step; `microbatch * n_microbatches = global_batch`.
    pub n_microbatches: u32,
    /// Order of passes; of inference `forward`.
    pub schedule: ScheduleKind,
    /// The stages in pipeline order. Where stages share meshes, [`Plan::mesh_of`] says which.
    pub stages: Vec<StagePlan>,
    /// The distinct layer strategies that stages refer to.
    pub layer_strategies: Vec<LayerStrategy>,
    /// Layout changes between meshes, by `value@stage` (value name, the first stage of the
    /// receiving mesh).
    pub transfers: BTreeMap<String, CrossPath>,
    /// Layout changes that differ from their layer strategy's, by absolute edge key.
    pub edges: BTreeMap<String, Vec<LayoutStep>>,
    /// Decisions that the user fixed.
    pub pins: Vec<String>,
    /// Share of each device's memory that the plan leaves free, from 0 to below 1; none where it is
    /// that of the devices' file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headroom: Option<f64>,
    /// Other software that the plan is made for; none where it is Meshwright's own runtime.
    #[serde(default, rename = "for", skip_serializing_if = "Option::is_none")]
    pub made_for: Option<MadeFor>,
    /// Predictions of the simulator; where the plan is made for other software, what that takes.
    pub predicted: Prediction,
    /// Proofs of its quality.
    pub proof: Proof,
}

impl Plan {
    /// Meshes that the stages run on: as many as stages, unless stages are interleaved.
    pub fn n_meshes(&self) -> usize {
        self.stages.len() / (self.schedule.virtual_stages().max(1) as usize)
    }

    /// The meshes, each once, in the order of their first stages.
    pub fn meshes(&self) -> impl Iterator<Item = &LogicalMesh> {
        self.stages.iter().take(self.n_meshes()).map(|s| &s.mesh)
    }

    /// The mesh of stage `stage`, named by its first stage.
    pub fn mesh_of(&self, stage: StageId) -> StageId {
        StageId::new(
            self.schedule
                .route()
                .mesh_of(stage.index(), self.n_meshes()),
        )
    }

    /// The stages of the mesh whose first stage is `mesh`, ascending.
    pub fn stages_on(&self, mesh: StageId) -> impl Iterator<Item = StageId> {
        let (route, n, p) = (self.schedule.route(), self.stages.len(), self.n_meshes());
        route.stages_of(mesh.index(), p, n).map(StageId::new)
    }

    /// Which of its mesh's stages stage `stage` is, from 0.
    pub fn chunk_of(&self, stage: StageId) -> u32 {
        (stage.index() / self.n_meshes().max(1)) as u32
    }

    /// Why the stages and microbatches cannot be scheduled as the plan says: a schedule of
    /// training for inference or the other way round, the schedule's own reason, or stages on another mesh than those that they should share one with.
    pub fn schedule_problem(&self) -> Option<String> {
        let (n, p) = (self.stages.len(), self.n_meshes());
        let schedule = self.schedule.schedule();
        let other_task = schedule.task() != self.train.task;
        let other_task = other_task.then(|| {
            format!(
                "{} is a schedule of {}, the plan is one of {}",
                schedule.name(),
                schedule.task().name(),
                self.train.task.name()
            )
        });
        let own = other_task
            .or_else(|| self.minibatch_problem())
            .or_else(|| schedule.problem(n, self.n_microbatches));
        own.or_else(|| {
            let mut shared = (p..n).map(|i| (i, schedule.route().mesh_of(i, p)));
            let (i, with) =
                shared.find(|&(i, with)| self.stages[i].mesh != self.stages[with].mesh)?;
            Some(format!(
                "stage {i} on another mesh than stage {with}, with which it is interleaved"
            ))
        })
    }

    /// Why updates are not made when the schedule makes them.
    fn minibatch_problem(&self) -> Option<String> {
        let schedule = self.schedule.schedule();
        match (schedule.is_asynchronous(), self.train.minibatch) {
            (true, Some(n)) if n == self.microbatch => None,
            (false, None) => None,
            (true, found) => Some(format!(
                "{} updates weights after every microbatch of {}, the plan is to update them after {}",
                schedule.name(),
                self.microbatch,
                found.map_or("every step".into(), |n| format!("every {n} samples")),
            )),
            (false, Some(n)) => Some(format!(
                "{} updates weights once a step, the plan is to update them after every {n} samples",
                schedule.name()
            )),
        }
    }

    /// The training graph of the plan: that of `forward` (the plan's graph) as it is trained,
    /// with what the layers recompute.
    ///
    /// Fails as `training::training_graph` does, and when a layer recomputes an op that it does
    /// not have or that cannot be recomputed. Runs of layers that do not exist are left out.
    pub fn training_graph(&self, forward: &Graph) -> Result<TrainingGraph, GraphError> {
        self.recomputing(&training_graph(forward, &self.train)?)
    }

    /// The same, of the training graph in which nothing is recomputed.
    ///
    /// # Errors
    ///
    /// Fails when a layer recomputes an op that it does not have or that cannot be recomputed.
    pub fn recomputing(&self, kept: &TrainingGraph) -> Result<TrainingGraph, GraphError> {
        let chosen = self.recomputed(&kept.graph)?;
        recompute(kept, &chosen)
    }

    /// The ops of a graph in which nothing is recomputed that the plan recomputes.
    fn recomputed(&self, graph: &Graph) -> Result<BTreeSet<OpId>, GraphError> {
        let mut chosen = BTreeSet::new();
        for run in self.stages.iter().flat_map(|s| &s.runs) {
            let Some(strategy) = self.layer_strategies.get(run.strategy as usize) else {
                continue;
            };
            if strategy.recompute.is_empty() {
                continue;
            }
            let layers = graph.layers.iter().enumerate().skip(run.first.index());
            for (layer, name) in layers.take(run.count as usize) {
                for relative in &strategy.recompute {
                    let path = absolute_path(relative, name);
                    let op = graph
                        .find(&path)
                        .filter(|&id| graph.op(id).layer == Some(LayerId::new(layer)));
                    chosen.insert(op.ok_or(GraphError::Recompute {
                        path,
                        problem: "is no op of the layer that recomputes it",
                    })?);
                }
            }
        }
        Ok(chosen)
    }
}

/// One stage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StagePlan {
    /// Where it runs.
    pub mesh: LogicalMesh,
    /// Its layers in order, as runs that share a strategy.
    pub runs: Vec<LayerRun>,
}

/// Consecutive layers with one strategy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LayerRun {
    /// First layer.
    pub first: LayerId,
    /// Number of layers.
    pub count: u32,
    /// Index into [`Plan::layer_strategies`].
    pub strategy: u32,
}

/// How the ops of a layer are parallelised.
#[derive(
    Clone,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    schemars::JsonSchema,
)]
#[serde(deny_unknown_fields)]
pub struct LayerStrategy {
    /// Strategy of every op of the layer in the training graph, by relative path.
    pub ops: BTreeMap<String, OpStrategy>,
    /// Forward ops whose results are not kept for the backward pass but recomputed in it, by
    /// relative path. Each has a twin `recompute.<path>` among `ops`.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub recompute: BTreeSet<String>,
    /// The memories that classes of the layer's tensors rest in, where it is not the device's.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub spaces: Spaces,
    /// Layout changes on the way into an operand, by relative edge key
    /// (`<consumer path>#<operand>`, `<state path>#write` for what a state keeps). An edge
    /// whose specs are equal has no entry.
    pub edges: BTreeMap<String, Vec<LayoutStep>>,
}

/// The key of the edge into an operand of an op.
pub fn edge_key(consumer: &str, operand: usize) -> String {
    format!("{consumer}#{operand}")
}

/// The key of the edge that carries a state's next value.
pub fn write_key(state: &str) -> String {
    format!("{state}#write")
}

/// The key of a transfer.
pub fn transfer_key(value: &str, to: StageId) -> String {
    format!("{value}@{}", to.0)
}

/// Writes the layer's name in a path as `{}`: `grad.h.3.attn` in layer `h.3` becomes
/// `grad.{}.attn`. Only whole dotted components match; the first match is replaced. A layer
/// without a name leaves the path as it is.
pub fn relative_path(path: &str, layer: &str) -> String {
    if layer.is_empty() {
        return path.to_string();
    }
    let starts = std::iter::once(0).chain(path.match_indices('.').map(|(dot, _)| dot + 1));
    for at in starts {
        let Some(behind) = path[at..].strip_prefix(layer) else {
            continue;
        };
        if behind.is_empty() || behind.starts_with(['.', '#', ':', '@']) {
            let mut relative = String::with_capacity(path.len() + 2);
            relative.push_str(&path[..at]);
            relative.push_str("{}");
            relative.push_str(behind);
            return relative;
        }
    }
    path.to_string()
}

/// Returns the last two parts of a path, as in `attn.qkv`, or the last one behind a number.
pub fn leaf(path: &str) -> &str {
    let Some((before, last)) = path.rsplit_once('.') else {
        return path;
    };
    let second = before.rsplit('.').next().unwrap_or(before);
    match second.bytes().all(|b| b.is_ascii_digit()) {
        true => last,
        false => &path[before.len() - second.len()..],
    }
}

/// Inverse of [`relative_path`].
pub fn absolute_path(relative: &str, layer: &str) -> String {
    relative.replacen("{}", layer, 1)
}

/// The simulator's prediction of one step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Prediction {
    /// Step time.
    pub step_time_s: Seconds,
    /// Tokens per second over the whole cluster.
    pub tokens_per_s: f64,
    /// Model FLOPs utilisation: matmul and attention (full) FLOPs of forward and, in training,
    /// backward, over step time and the peak of the compute dtype, pools counted once.
    pub mfu: f64,
    /// Hardware FLOPs utilisation: `mfu` with the FLOPs of recomputation counted too.
    #[serde(default)]
    pub hfu: f64,
    /// Share of the step in which the average stage waits for others.
    pub bubble: f64,
    /// Per mesh, its stages together.
    pub stages: Vec<StagePrediction>,
    /// A checkpoint of the training state; none in inference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<CheckpointPrediction>,
}

/// The prediction of one checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CheckpointPrediction {
    /// Parameters and optimizer states, each once.
    pub bytes: Bytes,
    /// Seconds that steps wait while devices copy their share to their hosts; absent where the
    /// cluster does not say how fast they do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy_s: Option<Seconds>,
    /// Seconds that hosts then write, beside later steps: the least between two checkpoints.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_s: Option<Seconds>,
}

/// The simulator's prediction for the stages of one mesh.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StagePrediction {
    /// Forward of one microbatch.
    pub forward_s: Seconds,
    /// Backward of one microbatch.
    pub backward_s: Seconds,
    /// `StepBegin` and `StepEnd` together.
    pub step_s: Seconds,
    /// Computation per step.
    pub compute_s: Seconds,
    /// Collectives per step, whether hidden or not.
    pub collective_s: Seconds,
    /// Stage-to-stage transfers per step.
    pub transfer_s: Seconds,
    /// Bytes that live for the whole run: parameters, optimizer states.
    pub persistent_bytes: Bytes,
    /// Bytes that live for a step: prepared parameters, gradients.
    pub step_bytes: Bytes,
    /// Saved activations and boundary tensors, all microbatches in flight.
    pub activation_bytes: Bytes,
    /// The largest set of transient buffers.
    pub transient_bytes: Bytes,
    /// Peak bytes on every rank of the stage: the arena and the runtime's own overhead.
    pub peak_bytes: Bytes,
}

/// The proof of the plan's quality, for the additive objective of ILP and DP.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Proof {
    /// Objective of the pipeline that the DP chose: latency from stage times, seconds; where ranks
    /// share processors no less than those need for the work of all ranks. Refining its stages
    /// (see `stages`) comes after and is not in this figure.
    pub objective_s: Seconds,
    /// No plan of the searched space has a smaller objective than this.
    pub lower_bound_s: Seconds,
    /// `(objective - lower_bound) / objective`.
    pub gap: f64,
    /// The least objective of a plan that was found and fits, where it is less than this one's:
    /// this one takes less time by simulation, which hides traffic that the objective charges, or
    /// hardly more and is simpler.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub least_objective_s: Option<Seconds>,
    /// The space of plans that the bound speaks of, in words.
    pub space: String,
    /// Candidates that were searched.
    pub candidates: u64,
    /// True when the search was ended early, or a watchdog stopped a solver: the bound is what was
    /// proved until then.
    pub stopped: bool,
    /// Per stage, what was proved about its intra-op choice given layers, mesh and budget.
    pub stages: Vec<StageProof>,
    /// The price of simplicity, where a simpler plan was taken than the fastest that was found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub simpler: Option<Simpler>,
    /// Other plans that were simulated and saved, the fastest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub runners_up: Vec<RunnerUp>,
}

/// A plan that was found beside the one that was taken, and saved.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RunnerUp {
    /// The file that it was written to, as named on the command line.
    pub file: String,
    /// Its degrees of parallelism, and what it recomputes, in the words of pins.
    pub what: String,
    /// Predicted time of its step, seconds.
    pub step_time_s: Seconds,
}

/// The fastest plan that was found, where a simpler one took its place.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Simpler {
    /// How much longer a step may take for the sake of simplicity: 0.01 is one percent.
    pub tolerance: f64,
    /// Predicted time of the fastest plan's step, seconds.
    pub fastest_s: Seconds,
    /// Distinct layer strategies that it has.
    pub fastest_strategies: u64,
}

/// The proof of one stage's intra-op choice.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StageProof {
    /// How: `elimination` (memory does not bind), `integer program`, or `priced elimination`;
    /// ` at ZeRO level N` behind it where the stage was made at a level, of whose choices alone
    /// the bound is.
    pub method: String,
    /// Time of the stage's ops and layout changes in one step, seconds.
    pub objective_s: Seconds,
    /// No choice within the memory budget takes less.
    pub lower_bound_s: Seconds,
    /// `(objective - lower_bound) / objective`.
    pub gap: f64,
}

#[cfg(test)]
mod tests {
    use super::{absolute_path, leaf, relative_path};

    #[test]
    fn leaves_are_named_without_numbers() {
        for (path, name) in [
            ("h.3.attn.qkv", "attn.qkv"),
            ("h.mtp.0.embed_proj", "embed_proj"),
            ("head.logits", "head.logits"),
            ("embed", "embed"),
            ("ä.b", "ä.b"),
            (".b", "b"),
        ] {
            assert_eq!(leaf(path), name);
        }
    }

    #[test]
    fn the_layer_is_found_as_whole_components_of_a_path() {
        for (path, layer, relative) in [
            ("grad.h.3.attn", "h.3", "grad.{}.attn"),
            ("grad.h.31.attn", "h.3", "grad.h.31.attn"),
            ("oh.3.h.3", "h.3", "oh.3.{}"),
            ("head#0", "head", "{}#0"),
            ("äh.ä.x", "ä", "äh.{}.x"),
            ("head.param_1", "", "head.param_1"),
            ("a.a.a.b", "a.a", "{}.a.b"),
            ("xa.a.a.b", "a.a", "xa.{}.b"),
            ("h.3", "h.3", "{}"),
            (".h.3.", "h.3", ".{}."),
        ] {
            assert_eq!(relative_path(path, layer), relative);
            assert_eq!(absolute_path(relative, layer), path);
        }
    }
}
