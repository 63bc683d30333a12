//! The group of a parameter: each axis shards one of its dims in compute, or is idle there and
//! splits what lies between uses by a ZeRO variant.

use super::members::prepares;
use super::{Choice, Group, Maker, Part, Setting, orders, product};
use crate::pins::{AxisRole, GradientUses, ZeroLevels, ZeroVariant, zero_variants};
use ir::op::{AxisUse, FactorRole, OpStrategy, ShardingRule};
use ir::training::StateRole;
use ir::{FactorId, Graph, LogicalMesh, Op, OpId, OpKind, Pass, Region, ValueId};
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;
use std::collections::hash_map::Entry;
use std::sync::Arc;

/// The role of an axis for a parameter: it shards a dim in compute, or stays idle with a ZeRO
/// variant.
#[derive(Clone, Copy, Debug)]
enum ParamUse {
    Shard(usize),
    Idle(ZeroVariant),
}

pub(super) fn parameter_group(s: &Setting<'_>, ops: &[OpId]) -> Group {
    let graph = &s.training.graph;
    let state = ops
        .iter()
        .map(|&id| graph.op(id))
        .find(|op| matches!(op.kind, OpKind::State { .. }))
        .map(|op| op.outputs[0]);
    let lens = state
        .map(|v| graph.ty(v).shape.bind(s.batch))
        .unwrap_or_default();
    let rules: Vec<ShardingRule> = ops.iter().map(|&id| graph.rule(graph.op(id))).collect();
    let forward = forward_uses(s, ops);
    let expert_dim = dim_used_as(graph, &forward, FactorRole::Expert);
    let gradient = GradientUses {
        // Parts are taken of it, or it is moved, as a table of positions is cut to the sequence and
        // stored in its order.
        is_cut: dim_used_as(graph, &forward, FactorRole::Sequence).is_some()
            || forward.iter().any(|(op, _)| op.kind.only_moves()),
        is_rounded: forward
            .iter()
            .any(|(op, _)| matches!(op.kind, OpKind::Cast { .. })),
    };
    let per_axis: Vec<Vec<ParamUse>> = s
        .mesh
        .axis_ids()
        .map(|a| {
            let (n, role) = (s.mesh.size(a), s.roles[a.index()]);
            if n == 1 {
                return vec![ParamUse::Idle(ZeroVariant::Whole)];
            }
            let mut uses = Vec::new();
            if role == AxisRole::Expert
                && let Some(dim) = expert_dim.filter(|&d| lens[d] >= n)
            {
                return vec![ParamUse::Shard(dim)];
            }
            if matches!(role, AxisRole::Free | AxisRole::Tensor) {
                uses.extend(
                    (0..lens.len())
                        .filter(|&d| lens[d] >= n)
                        .map(ParamUse::Shard),
                );
            }
            uses.extend(
                zero_variants(s.pins.zero, role, gradient, s.train)
                    .into_iter()
                    .map(ParamUse::Idle),
            );
            uses
        })
        .collect();
    // Gradients that come from other layers arrive reduced: their sum is then taken in the
    // optimizer's layout.
    let foreign = has_foreign_gradient(graph, ops);
    let mut choices: Vec<Choice> = Vec::new();
    let mut maker = Maker::new(s, ops, &rules);
    let mut known: FxHashMap<Vec<*const Part>, usize> = FxHashMap::default();
    for (uses, reverse) in product(&per_axis).into_iter().flat_map(|uses| {
        let experts = |u: &&ParamUse| matches!(u, ParamUse::Shard(d) if expert_dim == Some(*d));
        let orders = orders(uses.iter().filter(experts).count());
        orders.iter().map(move |&reverse| (uses.clone(), reverse))
    }) {
        let mut layout = ParamLayout::new(s.mesh, &lens, &uses);
        layout.reverse |= reverse;
        // Two ZeRO axes in one dim: the inner axis first, so that its fast links reduce what
        // the outer one then has less of.
        let several = [AxisRole::Expert, AxisRole::Context];
        layout.reverse |= expert_dim.is_none() && several.iter().any(|role| s.roles.contains(role));
        let strategies = ops
            .iter()
            .map(|&id| layout.strategy(s, graph.op(id), foreign));
        let Some(mut choice) = maker.choice(strategies.collect()) else {
            continue;
        };
        choice.levels = levels(s, gradient, &uses);
        let key = choice.ops.iter().map(Arc::as_ptr).collect();
        match known.entry(key) {
            Entry::Occupied(same) => {
                let same = &mut choices[*same.get()];
                same.levels = same.levels.or(choice.levels);
            }
            Entry::Vacant(new) => {
                new.insert(choices.len());
                choice.static_bytes = layout.static_bytes(s, ops, &choice);
                choices.push(choice);
            }
        }
    }
    Group {
        ops: ops.to_vec(),
        choices,
        boundary: false,
    }
}

/// ZeRO levels that leave all of a parameter's uses, by axis; an axis of one rank is idle at any.
fn levels(s: &Setting<'_>, gradient: GradientUses, uses: &[ParamUse]) -> ZeroLevels {
    let axes = s.mesh.axis_ids().zip(uses);
    let idle = axes.filter_map(|(a, u)| match u {
        ParamUse::Idle(variant) if s.mesh.size(a) > 1 => Some((a, *variant)),
        _ => None,
    });
    idle.fold(ZeroLevels::ALL, |levels, (a, variant)| {
        let role = s.roles[a.index()];
        levels.and(ZeroLevels::of(variant, role, gradient, s.train))
    })
}

/// The uses of a parameter in the forward pass: ops, and the first operand of each that is made of it.
fn forward_uses<'g>(s: &'g Setting<'_>, ops: &[OpId]) -> Vec<(&'g Op, usize)> {
    let graph = &s.training.graph;
    let made: BTreeSet<ValueId> = ops
        .iter()
        .map(|&id| graph.op(id))
        .filter(|op| prepares(op))
        .flat_map(|op| op.outputs.iter().copied())
        .collect();
    let users: BTreeSet<OpId> = made
        .iter()
        .flat_map(|&v| s.index.users(v))
        .copied()
        .collect();
    let uses = users.into_iter().map(|id| graph.op(id));
    let uses = uses.filter_map(|op| {
        let operand = op.inputs.iter().position(|v| made.contains(v))?;
        Some((op, operand))
    });
    uses.collect()
}

/// The dim of a parameter that its uses have in this role: experts, or the sequence of a table of
/// positions.
fn dim_used_as(graph: &Graph, uses: &[(&Op, usize)], role: FactorRole) -> Option<usize> {
    uses.iter().find_map(|&(op, operand)| {
        let rule = graph.rule(op);
        let has_role = |d: &ir::op::DimFactor| rule.factors[d.factor.index()].role == role;
        rule.operands[operand].iter().position(has_role)
    })
}

fn has_foreign_gradient(graph: &Graph, ops: &[OpId]) -> bool {
    ops.iter()
        .map(|&id| graph.op(id))
        .filter(|op| op.region == Region::StepEnd && matches!(op.kind, OpKind::Binary { .. }))
        .any(|op| {
            op.inputs.iter().any(|&v| {
                let producer = graph.value(v).producer;
                matches!(graph.op(producer).kind, OpKind::Accumulate { .. })
                    && !ops.contains(&producer)
            })
        })
}

/// Specs of a parameter's tensors: at rest, prepared, accumulated gradient, optimizer state.
struct ParamLayout {
    rest: Vec<AxisPlace>,
    prepared: Vec<AxisPlace>,
    gradient: Vec<AxisPlace>,
    optimizer: Vec<AxisPlace>,
    reverse: bool,
}

/// Where one axis stands in one of a parameter's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AxisPlace {
    Dim(usize),
    Idle,
    Partial,
}

impl ParamLayout {
    fn new(mesh: &LogicalMesh, lens: &[u64], uses: &[ParamUse]) -> Self {
        use AxisPlace::*;
        let mut l = ParamLayout {
            rest: vec![],
            prepared: vec![],
            gradient: vec![],
            optimizer: vec![],
            reverse: false,
        };
        let mut sharded: Vec<u64> = vec![1; lens.len()];
        for (a, u) in uses.iter().enumerate() {
            if let ParamUse::Shard(d) = u {
                sharded[*d] *= u64::from(mesh.axes[a].size);
            }
        }
        for (a, u) in uses.iter().enumerate() {
            let n = u64::from(mesh.axes[a].size);
            let variant = match u {
                ParamUse::Shard(d) => {
                    for list in [
                        &mut l.rest,
                        &mut l.prepared,
                        &mut l.gradient,
                        &mut l.optimizer,
                    ] {
                        list.push(Dim(*d));
                    }
                    continue;
                }
                ParamUse::Idle(v) => *v,
            };
            // A free dim that divides, else any that is long enough, else inside a sharded one.
            let free = (0..lens.len()).find(|&d| sharded[d] == 1 && lens[d].is_multiple_of(n));
            let any = || (0..lens.len()).find(|&d| lens[d] / sharded[d] >= n);
            let dim = free.or_else(any).filter(|_| n > 1);
            let split = dim.map_or(Idle, Dim);
            if let Some(d) = dim
                && !matches!(variant, ZeroVariant::Whole | ZeroVariant::WholeDeferred)
            {
                // The ZeRO axis stands inside (minor to) an axis that shards the dim in compute.
                let outer_inside = uses
                    .iter()
                    .enumerate()
                    .any(|(b, u)| b > a && matches!(u, ParamUse::Shard(e) if *e == d));
                l.reverse |= outer_inside;
                sharded[d] *= n;
            }
            let (rest, prepared, gradient, optimizer) = match variant {
                ZeroVariant::Whole => (Idle, Idle, Idle, Idle),
                ZeroVariant::WholeDeferred => (Idle, Idle, Partial, Idle),
                ZeroVariant::Optimizer => (Idle, Idle, Idle, split),
                ZeroVariant::OptimizerDeferred => (Idle, Idle, Partial, split),
                ZeroVariant::Gradient => (Idle, Idle, split, split),
                ZeroVariant::Parameter => (split, split, split, split),
                ZeroVariant::Master => (split, Idle, split, split),
                ZeroVariant::MasterDeferred => (split, Idle, Partial, split),
            };
            l.rest.push(rest);
            l.prepared.push(prepared);
            l.gradient.push(gradient);
            l.optimizer.push(optimizer);
        }
        l
    }

    /// The strategy of a member op; all members' factors are the parameter's dims in order.
    fn strategy(&self, s: &Setting<'_>, op: &Op, foreign: bool) -> OpStrategy {
        let role = |v: ValueId| Some(s.index.state(s.training, v)?.role);
        let places = match &op.kind {
            OpKind::State { .. } => match role(op.outputs[0]) {
                Some(StateRole::Parameter) => &self.rest,
                _ => &self.optimizer,
            },
            // An update in a microbatch accumulates nothing, so nothing stays partial; casts round.
            _ if op.region == Region::Microbatch && op.pass == Pass::Update => &self.optimizer,
            OpKind::Cast { .. } => &self.rest,
            OpKind::Layout => &self.prepared,
            OpKind::Accumulate { .. } => &self.gradient,
            OpKind::Binary { .. } if foreign => &self.optimizer,
            OpKind::Binary { .. } => &self.gradient,
            _ => &self.optimizer,
        };
        let uses = places
            .iter()
            .map(|p| match p {
                AxisPlace::Dim(d) => AxisUse::Factor(FactorId::new(*d)),
                AxisPlace::Idle => AxisUse::Replicate,
                AxisPlace::Partial => AxisUse::Partial(0),
            })
            .collect();
        OpStrategy {
            uses,
            reverse: self.reverse,
            ring: false,
        }
    }

    /// Bytes that live through the step; a prepared copy equal to the parameter is a view.
    fn static_bytes(&self, s: &Setting<'_>, ops: &[OpId], choice: &Choice) -> u64 {
        let graph = &s.training.graph;
        let mut bytes = 0u64;
        for (&id, part) in ops.iter().zip(&choice.ops) {
            let counted = match graph.op(id).kind {
                OpKind::State { .. } | OpKind::Accumulate { .. } => true,
                // Versions of microbatches are saved, as activations are.
                _ if graph.op(id).region == Region::Microbatch => false,
                // A Layout with the spec of its operand is a view of it.
                OpKind::Layout => self.prepared != self.rest,
                OpKind::Cast { .. } => true,
                _ => false,
            };
            if counted {
                bytes = bytes.saturating_add(part.bytes);
            }
        }
        bytes
    }
}
