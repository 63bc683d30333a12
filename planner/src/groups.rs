//! Decision groups: the ops of a layer that are decided together, and their choices.
//!
//! * A forward op, its gradient ops and its recomputed twin form one group: an axis that
//!   shards a factor of the forward op shards the same factor of the twin and the
//!   corresponding factor of each gradient op (found by matching the dims of the tensors
//!   that both touch).
//! * A parameter, its moments, its prepared copy, its accumulators and its update form one
//!   group; its choices are the layouts in compute times a ZeRO variant per idle axis.
//! * Gradient sums, shared layouts, and gradients of parameters owned elsewhere stand alone.
//!
//! A choice fixes a strategy for every op of its group, so its time and bytes are sums.

use crate::pins::{AxisRole, Pins, ZeroLevels};
use crate::prices::Buckets;
use cost_model::compute;
use forward::forward_group;
use ir::cluster::Cluster;
use ir::op::{Assignment, OpStrategy, ShardingRule};
use ir::training::TrainingGraph;
use ir::{DType, LogicalMesh, Op, OpId, OpKind, Pass, Region, ShardingSpec, TrainSpec, ValueId};
pub(crate) use members::forward_of;
use members::parameter_members;
use parameter::parameter_group;
use std::collections::{BTreeMap, BTreeSet};

mod forward;
mod members;
mod parameter;

/// Everything that is fixed while groups are made.
pub(crate) struct Setting<'a> {
    pub training: &'a TrainingGraph,
    pub train: &'a TrainSpec,
    pub cluster: &'a Cluster,
    pub mesh: &'a LogicalMesh,
    pub roles: &'a [AxisRole],
    pub pins: &'a Pins,
    /// Samples of a microbatch.
    pub batch: u64,
    /// Forward values that a later pass uses, and recomputed ones that a gradient uses.
    pub saved: &'a [bool],
    /// Which tensors travel together.
    pub buckets: &'a Buckets,
    /// By value, whether it is made of parameters alone ([`made_of_parameters`]).
    ///
    /// [`made_of_parameters`]: crate::pins::whole::made_of_parameters
    pub of_parameters: &'a [bool],
}

/// A decision group.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    /// Its ops in graph order.
    pub ops: Vec<OpId>,
    /// Its choices, never empty once made.
    pub choices: Vec<Choice>,
    /// True for the group of a layer boundary.
    pub boundary: bool,
}

/// One choice of a group.
#[derive(Clone, Debug)]
pub(crate) struct Choice {
    /// Per op of the group.
    pub strategies: Vec<OpStrategy>,
    /// Specs that the strategies imply.
    pub specs: Vec<Assignment>,
    /// Seconds of one forward, one backward, and per step.
    pub time: Phases,
    /// Bytes that live for the whole step.
    pub static_bytes: u64,
    /// Bytes saved for backward, per microbatch in flight.
    pub saved_bytes: u64,
    /// Bytes recomputed for backward: they live during the backward of the layer.
    pub recomputed_bytes: u64,
    /// ZeRO levels that it keeps to.
    pub levels: ZeroLevels,
}

/// Seconds by phase: once per microbatch forward, backward, and once per step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Phases {
    pub forward: f64,
    pub backward: f64,
    pub step: f64,
}

impl Phases {
    pub(crate) fn add(&mut self, op: &Op, seconds: f64) {
        match (op.region, op.pass) {
            (Region::Microbatch, Pass::F) => self.forward += seconds,
            (Region::Microbatch, _) => self.backward += seconds,
            _ => self.step += seconds,
        }
    }
    pub(crate) fn plus(self, o: Phases) -> Phases {
        Phases {
            forward: self.forward + o.forward,
            backward: self.backward + o.backward,
            step: self.step + o.step,
        }
    }
}

/// Splits the ops of one layer into groups with their choices.
pub(crate) fn make_groups(s: &Setting<'_>, ops: &[OpId]) -> Vec<Group> {
    let graph = &s.training.graph;
    let params = parameter_members(s.training, ops);
    let mut groups: Vec<Group> = params
        .values()
        .map(|members| parameter_group(s, members))
        .collect();
    let taken: BTreeSet<OpId> = params.values().flatten().copied().collect();
    let mut by_forward: BTreeMap<OpId, Vec<OpId>> = BTreeMap::new();
    for &id in ops.iter().filter(|id| !taken.contains(id)) {
        let head = forward_of(graph, &id).unwrap_or(id);
        by_forward.entry(head).or_default().push(id);
    }
    groups.extend(
        by_forward
            .into_values()
            .map(|members| forward_group(s, members)),
    );
    groups
}

/// Orders of the axes that split experts. Of several, that over which tokens travel has to come
/// last, as it moves from their samples to the experts; which one that is, the layouts say.
fn orders(n_axes: usize) -> &'static [bool] {
    if n_axes > 1 { &[false, true] } else { &[false] }
}

fn make_choice(
    s: &Setting<'_>,
    ops: &[OpId],
    rules: &[ShardingRule],
    strategies: Vec<OpStrategy>,
) -> Option<Choice> {
    let graph = &s.training.graph;
    let mut specs = Vec::with_capacity(ops.len());
    let mut time = Phases::default();
    let (mut saved_bytes, mut recomputed_bytes) = (0u64, 0u64);
    for ((&id, rule), strategy) in ops.iter().zip(rules).zip(&strategies) {
        let op = graph.op(id);
        let assignment = rule.assign(strategy).ok()?;
        if !pins_hold(s, op, &assignment) {
            return None;
        }
        time.add(op, op_seconds(s, op, &assignment));
        let kept = match op.pass {
            Pass::F if op.region == Region::Microbatch => Some(&mut saved_bytes),
            Pass::Recompute => Some(&mut recomputed_bytes),
            _ => None,
        };
        if let Some(bytes) = kept.filter(|_| !op.kind.is_source()) {
            for (v, spec) in op.outputs.iter().zip(&assignment.results) {
                if s.saved[v.index()] {
                    *bytes = bytes.saturating_add(local_bytes(s, *v, spec));
                }
            }
        }
        specs.push(assignment);
    }
    let static_bytes = ops
        .iter()
        .zip(&specs)
        .filter(|(id, _)| {
            matches!(graph.op(**id).kind, OpKind::Accumulate { .. })
                || graph.op(**id).region == Region::StepBegin
        })
        .map(|(id, a)| local_bytes(s, graph.op(*id).outputs[0], &a.results[0]))
        .fold(0, u64::saturating_add);
    Some(Choice {
        strategies,
        specs,
        time,
        static_bytes,
        saved_bytes,
        recomputed_bytes,
        levels: ZeroLevels::ALL,
    })
}

/// Seconds of an op on one rank under an assignment.
pub(crate) fn op_seconds(s: &Setting<'_>, op: &Op, a: &Assignment) -> f64 {
    let graph = &s.training.graph;
    let local = |vs: &[ValueId], specs: &[ShardingSpec]| -> Vec<(DType, Vec<u64>)> {
        vs.iter()
            .zip(specs)
            .map(|(&v, spec)| {
                (
                    graph.ty(v).dtype,
                    spec.local_shape(&graph.ty(v).shape.bind(s.batch), s.mesh),
                )
            })
            .collect()
    };
    compute::op_time(
        s.cluster,
        &op.kind,
        &local(&op.inputs, &a.operands),
        &local(&op.outputs, &a.results),
    )
    .0
}

/// Bytes of a value's padded shard.
pub(crate) fn local_bytes(s: &Setting<'_>, v: ValueId, spec: &ShardingSpec) -> u64 {
    let ty = s.training.graph.ty(v);
    spec.local_elements(&ty.shape.bind(s.batch), s.mesh)
        .saturating_mul(ty.dtype.bytes())
}

fn pins_hold(s: &Setting<'_>, op: &Op, a: &Assignment) -> bool {
    let graph = &s.training.graph;
    op.outputs
        .iter()
        .zip(&a.results)
        .all(|(&v, spec)| match s.pins.tensor(&graph.value_name(v)) {
            None => true,
            Some(pin) => {
                let names = |axes: &[ir::AxisId]| -> Vec<String> {
                    axes.iter()
                        .filter(|x| s.mesh.size(**x) > 1)
                        .map(|&x| s.mesh.name(x).to_string())
                        .collect()
                };
                let size = |name: &str| s.mesh.axes.iter().find(|a| a.name == name).map(|a| a.size);
                // An axis of one rank splits nothing; one that does not exist cannot be met.
                let known = pin.dims.iter().flatten().all(|n| size(n).is_some());
                let wanted = pin.dims.iter().map(|d| {
                    d.iter()
                        .filter(|n| size(n) != Some(1))
                        .cloned()
                        .collect::<Vec<_>>()
                });
                known
                    && spec.partial.is_empty()
                    && pin.dims.len() == spec.dims.len()
                    && spec
                        .dims
                        .iter()
                        .zip(wanted)
                        .all(|(d, w)| names(&d.axes) == w)
            }
        })
}

fn product<T: Copy>(sets: &[Vec<T>]) -> Vec<Vec<T>> {
    sets.iter().fold(vec![Vec::new()], |acc, set| {
        acc.iter()
            .flat_map(|prefix| {
                set.iter().map(move |&x| {
                    let mut p = prefix.clone();
                    p.push(x);
                    p
                })
            })
            .collect()
    })
}
