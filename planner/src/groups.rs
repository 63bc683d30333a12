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
pub(crate) use chains::Chains;
use forward::forward_group;
pub(crate) use index::Index;
use ir::cluster::Cluster;
use ir::op::{Assignment, OpStrategy, ShardingRule};
use ir::training::TrainingGraph;
use ir::{
    DType, Graph, LogicalMesh, Op, OpId, OpKind, Pass, Region, ShardingSpec, TrainSpec, ValueId,
};
pub(crate) use members::forward_of;
use members::parameter_members;
use parameter::parameter_group;
pub(crate) use resting::staged;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

mod chains;
mod forward;
mod index;
mod members;
mod parameter;
mod resting;
mod ring;

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
    /// Lookups in the training graph.
    pub index: &'a Index,
    /// Ops that are one call with a product; none where each is priced by itself.
    pub chains: Option<&'a Chains>,
    /// True where the traffic of activations' gradients counts among what may hide
    /// ([`Assumed`](crate::layer_model::Assumed)).
    pub gradients_hide: bool,
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
    pub ops: Vec<Arc<Part>>,
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

/// An op under one of its strategies. Choices that agree on it share it: axes multiply the choices
/// of a group, but not what each of its ops can do.
#[derive(Debug)]
pub(crate) struct Part {
    pub strategy: OpStrategy,
    /// Specs that the strategy implies.
    pub specs: Assignment,
    seconds: f64,
    /// Seconds that it takes more where this operand is laid out anew: it is no part of the call
    /// that makes the operand then.
    pub apart: Option<(usize, f64)>,
    /// Bytes of the first result.
    bytes: u64,
    /// Bytes of the results that later passes use.
    kept_bytes: u64,
    /// Bytes that go around a ring beside operands and results.
    pub passing_bytes: u64,
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
    pub(crate) fn times(self, factor: f64) -> Phases {
        Phases {
            forward: self.forward * factor,
            backward: self.backward * factor,
            step: self.step * factor,
        }
    }
}

/// The ops of a group, before it has choices.
pub(crate) struct Members {
    /// In graph order.
    pub ops: Vec<OpId>,
    pub is_parameter: bool,
}

/// Splits the ops of one layer into groups, those of parameters first.
pub(crate) fn members(s: &Setting<'_>, ops: &[OpId]) -> Vec<Members> {
    let graph = &s.training.graph;
    let params = parameter_members(graph, s.index, ops);
    let taken: BTreeSet<OpId> = params.iter().flatten().copied().collect();
    let mut by_forward: BTreeMap<OpId, Vec<OpId>> = BTreeMap::new();
    for &id in ops.iter().filter(|id| !taken.contains(id)) {
        let head = forward_of(graph, &id).unwrap_or(id);
        by_forward.entry(head).or_default().push(id);
    }
    let group = |is_parameter| move |ops| Members { ops, is_parameter };
    let forward = by_forward.into_values().map(group(false));
    params.into_iter().map(group(true)).chain(forward).collect()
}

impl Members {
    /// Whether they are the group of a layer boundary.
    pub(crate) fn are_boundary(&self, graph: &Graph) -> bool {
        !self.is_parameter && graph.op(self.ops[0]).origin == ir::Origin::Boundary
    }

    /// The group with its choices.
    pub(crate) fn group(self, s: &Setting<'_>) -> Group {
        let mut group = match self.is_parameter {
            true => parameter_group(s, &self.ops),
            false => forward_group(s, self.ops),
        };
        resting::rest(s, &mut group);
        group
    }
}

/// Orders of the axes that split experts. Of several, that over which tokens travel has to come
/// last, as it moves from their samples to the experts; which one that is, the layouts say.
fn orders(n_axes: usize) -> &'static [bool] {
    if n_axes > 1 { &[false, true] } else { &[false] }
}

/// Makes the choices of a group, working out once what each of its ops does.
struct Maker<'a> {
    s: &'a Setting<'a>,
    ops: &'a [OpId],
    rules: &'a [ShardingRule],
    /// By op: its strategies so far, with `None` for what rule or pins do not allow.
    parts: Vec<FxHashMap<OpStrategy, Option<Arc<Part>>>>,
}

impl<'a> Maker<'a> {
    fn new(s: &'a Setting<'a>, ops: &'a [OpId], rules: &'a [ShardingRule]) -> Self {
        let parts = vec![FxHashMap::default(); ops.len()];
        Maker {
            s,
            ops,
            rules,
            parts,
        }
    }

    /// The choice of these strategies, if rules and pins allow it.
    fn choice(&mut self, strategies: Vec<OpStrategy>) -> Option<Choice> {
        let graph = &self.s.training.graph;
        let mut choice = Choice {
            ops: Vec::with_capacity(strategies.len()),
            time: Phases::default(),
            static_bytes: 0,
            saved_bytes: 0,
            recomputed_bytes: 0,
            levels: ZeroLevels::ALL,
        };
        for (k, strategy) in strategies.into_iter().enumerate() {
            let part = self.part(k, strategy)?;
            let op = graph.op(self.ops[k]);
            choice.time.add(op, part.seconds);
            let kept = match op.pass {
                Pass::F if op.region == Region::Microbatch => Some(&mut choice.saved_bytes),
                Pass::Recompute => Some(&mut choice.recomputed_bytes),
                _ => None,
            };
            if let Some(bytes) = kept.filter(|_| !op.kind.is_source()) {
                *bytes = bytes.saturating_add(part.kept_bytes);
            }
            let is_sum = matches!(op.kind, OpKind::Accumulate { .. });
            if is_sum || op.region == Region::StepBegin {
                choice.static_bytes = choice.static_bytes.saturating_add(part.bytes);
            }
            choice.ops.push(part);
        }
        Some(choice)
    }

    fn part(&mut self, k: usize, strategy: OpStrategy) -> Option<Arc<Part>> {
        if let Some(known) = self.parts[k].get(&strategy) {
            return known.clone();
        }
        let (s, op) = (self.s, self.s.training.graph.op(self.ops[k]));
        let specs = self.rules[k].assign(&strategy).ok();
        let specs = specs.filter(|specs| pins_hold(s, op, specs));
        let part = specs.map(|specs| {
            let results = op.outputs.iter().zip(&specs.results);
            let bytes: Vec<u64> = results.map(|(v, spec)| local_bytes(s, *v, spec)).collect();
            let saved = op.outputs.iter().map(|v| s.saved[v.index()]);
            let kept = saved.zip(&bytes).filter(|(saved, _)| *saved);
            let around = ring::around(s, op, &strategy, &specs);
            let (seconds, apart) = match &around {
                Some(around) => (around.seconds, None),
                None => chains::op_seconds(s, (self.ops[k], op), &specs),
            };
            Arc::new(Part {
                strategy: strategy.clone(),
                seconds,
                apart,
                passing_bytes: around.map_or(0, |around| around.bytes),
                bytes: bytes.first().copied().unwrap_or(0),
                kept_bytes: kept.map(|(_, b)| *b).fold(0, u64::saturating_add),
                specs,
            })
        });
        self.parts[k].insert(strategy, part.clone());
        part
    }
}

impl Choice {
    /// Whether it is the same as another choice of its group: ops share their parts.
    fn does_as(&self, other: &Choice) -> bool {
        let mut ops = self.ops.iter().zip(&other.ops);
        ops.all(|(a, b)| Arc::ptr_eq(a, b))
    }
}

/// Types and padded lengths of the shards of some values.
fn local_types(s: &Setting<'_>, vs: &[ValueId], specs: &[ShardingSpec]) -> Vec<(DType, Vec<u64>)> {
    let graph = &s.training.graph;
    let one = |(&v, spec): (&ValueId, &ShardingSpec)| {
        let lens = graph.ty(v).shape.bind(s.batch);
        (graph.ty(v).dtype, spec.local_shape(&lens, s.mesh))
    };
    vs.iter().zip(specs).map(one).collect()
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
