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

use crate::pins::{AxisRole, Pins, ZeroLevels, ZeroVariant, zero_variants};
use crate::prices::Buckets;
use cost_model::compute;
use ir::cluster::Cluster;
use ir::op::{Assignment, AxisUse, FactorRole, OpStrategy, ShardingRule};
use ir::training::{StateRole, TrainingGraph, source_path, source_value};
use ir::{
    DType, FactorId, Graph, LogicalMesh, Op, OpId, OpKind, Pass, Region, ShardingSpec, TrainSpec,
    ValueId,
};
use std::collections::{BTreeMap, BTreeSet};

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

/// Members of each parameter that this layer owns: states, preparation, sum of gradients,
/// update, and the accumulators that lie in this layer.
fn parameter_members(training: &TrainingGraph, ops: &[OpId]) -> BTreeMap<String, Vec<OpId>> {
    let graph = &training.graph;
    let here: BTreeSet<OpId> = ops.iter().copied().collect();
    let owner: BTreeMap<ValueId, &str> = training
        .states
        .iter()
        .filter(|s| s.role != StateRole::Scalar)
        .map(|s| (s.read, s.param.as_str()))
        .collect();
    let mut members: BTreeMap<String, BTreeSet<OpId>> = BTreeMap::new();
    for &id in ops {
        let op = graph.op(id);
        match &op.kind {
            OpKind::State { .. } => {
                if let Some(p) = owner.get(&op.outputs[0]) {
                    members.entry(p.to_string()).or_default().insert(id);
                }
            }
            OpKind::AdamW { .. } | OpKind::Sgd { .. } => {
                if let Some(p) = owner.get(&op.inputs[0]) {
                    let set = members.entry(p.to_string()).or_default();
                    set.insert(id);
                    gradient_chain(graph, op.inputs[1], &here, set);
                }
            }
            OpKind::SumSquares => {}
            OpKind::Cast { .. } | OpKind::Layout if op.region == Region::StepBegin => {
                if let Some(p) = parameter_source(graph, op.inputs[0], &owner)
                    .filter(|_| local_source(graph, op, &here))
                {
                    members.entry(p.to_string()).or_default().insert(id);
                }
            }
            _ => {}
        }
    }
    // The norm of a parameter reads the gradient that its update reads.
    for &id in ops
        .iter()
        .filter(|&&id| matches!(graph.op(id).kind, OpKind::SumSquares))
    {
        let gradient = graph.op(id).inputs[0];
        let update = ops.iter().map(|&u| graph.op(u)).find(|u| {
            matches!(u.kind, OpKind::AdamW { .. } | OpKind::Sgd { .. }) && u.inputs[1] == gradient
        });
        if let Some(p) = update.and_then(|u| owner.get(&u.inputs[0])) {
            members.entry(p.to_string()).or_default().insert(id);
        }
    }
    members
        .into_iter()
        .map(|(p, set)| (p, set.into_iter().collect()))
        .collect()
}

fn gradient_chain(graph: &Graph, v: ValueId, here: &BTreeSet<OpId>, set: &mut BTreeSet<OpId>) {
    let id = graph.value(v).producer;
    let op = graph.op(id);
    if here.contains(&id) {
        match op.kind {
            OpKind::Accumulate { .. } => {
                set.insert(id);
            }
            OpKind::Binary { .. } if op.region == Region::StepEnd => {
                set.insert(id);
                op.inputs
                    .iter()
                    .for_each(|&v| gradient_chain(graph, v, here, set));
            }
            _ => {}
        }
    }
}

fn parameter_source<'a>(
    graph: &Graph,
    v: ValueId,
    owner: &BTreeMap<ValueId, &'a str>,
) -> Option<&'a str> {
    let op = graph.op(graph.value(v).producer);
    match op.kind {
        OpKind::State { .. } => owner.get(&v).copied(),
        OpKind::Cast { .. } | OpKind::Layout if op.region == Region::StepBegin => {
            parameter_source(graph, op.inputs[0], owner)
        }
        _ => None,
    }
}

fn local_source(graph: &Graph, op: &Op, here: &BTreeSet<OpId>) -> bool {
    here.contains(&graph.value(op.inputs[0]).producer)
}

/// The forward op whose group a gradient op or a twin joins; `None` when it stands alone.
pub(crate) fn forward_of(graph: &Graph, id: &OpId) -> Option<OpId> {
    let op = graph.op(*id);
    if op.region != Region::Microbatch || op.pass == Pass::F {
        return None;
    }
    if op.pass == Pass::Recompute {
        return graph.find(source_path(&op.path));
    }
    let path = op.path.strip_prefix("grad.")?;
    let (forward, what) = path.rsplit_once('.')?;
    // Sums over uses choose for themselves whether addends stay partial.
    if what.starts_with("sum") || what.contains("-sum") {
        return None;
    }
    let forward = graph.find(forward)?;
    (graph.op(forward).layer == op.layer).then_some(forward)
}

fn forward_group(s: &Setting<'_>, ops: Vec<OpId>) -> Group {
    let graph = &s.training.graph;
    let head = graph.op(ops[0]);
    let rules: Vec<ShardingRule> = ops.iter().map(|&id| graph.rule(graph.op(id))).collect();
    let maps: Vec<BTreeMap<FactorId, FactorId>> = ops
        .iter()
        .zip(&rules)
        .map(|(&id, rule)| factor_map(graph, ops[0], &rules[0], id, rule))
        .collect();
    let boundary = head.path.starts_with(ir::boundary::BOUNDARY);
    let per_axis: Vec<Vec<AxisUse>> = s
        .mesh
        .axis_ids()
        .map(|a| {
            axis_options(
                s,
                head,
                &rules[0],
                s.mesh.size(a),
                s.roles[a.index()],
                boundary,
            )
        })
        .collect();
    let addends = addend_options(s, &ops, &rules);
    let mut choices = Vec::new();
    let is_expert = |f: &FactorId| rules[0].factors[f.index()].role == FactorRole::Expert;
    for (uses, addends, reverse) in product(&per_axis).into_iter().flat_map(|uses| {
        let experts = |u: &&AxisUse| matches!(u, AxisUse::Factor(f) if is_expert(f));
        let orders = orders(uses.iter().filter(experts).count());
        product(&addends).into_iter().flat_map(move |a| {
            let uses = uses.clone();
            orders
                .iter()
                .map(move |&reverse| (uses.clone(), a.clone(), reverse))
        })
    }) {
        let strategies: Vec<OpStrategy> = maps
            .iter()
            .zip(&ops)
            .map(|(map, &id)| {
                let is_gradient = !matches!(graph.op(id).pass, Pass::F | Pass::Recompute);
                let follow = |(u, &addend): (&AxisUse, &bool)| match u {
                    AxisUse::Factor(f) => map
                        .get(f)
                        .map_or(AxisUse::Replicate, |&g| AxisUse::Factor(g)),
                    _ if addend && is_gradient => AxisUse::Partial(0),
                    _ => AxisUse::Replicate,
                };
                OpStrategy {
                    uses: uses.iter().zip(&addends).map(follow).collect(),
                    reverse,
                }
            })
            .collect();
        let mut strategies = strategies;
        strategies[0] = OpStrategy { uses, reverse };
        if let Some(choice) = make_choice(s, &ops, &rules, strategies) {
            choices.push(choice);
        }
    }
    choices.dedup_by(|a, b| a.strategies == b.strategies);
    Group {
        ops,
        choices,
        boundary,
    }
}

/// Orders of the axes that split experts. Of several, that over which tokens travel has to come
/// last, as it moves from their samples to the experts; which one that is, the layouts say.
fn orders(n_axes: usize) -> &'static [bool] {
    if n_axes > 1 { &[false, true] } else { &[false] }
}

/// Per axis, whether the gradient ops of a forward group may pass addends on. So they may where
/// the forward op only moves elements of a parameter, as the rows of a table of positions: its
/// gradient is a sum over the ranks that have other samples, and can wait for the step's end.
fn addend_options(s: &Setting<'_>, ops: &[OpId], rules: &[ShardingRule]) -> Vec<Vec<bool>> {
    let graph = &s.training.graph;
    let of_parameter = |rule: &ShardingRule| {
        let mut factors = rule.factors.iter();
        factors.all(|f| f.role == FactorRole::Feature) && !rule.linear.is_empty()
    };
    let passes = graph.op(ops[0]).region == Region::Microbatch
        && graph.op(ops[0]).pass == Pass::F
        && rules.iter().all(of_parameter);
    let options = s.mesh.axis_ids().map(|a| {
        let splits_tokens = matches!(
            s.roles[a.index()],
            AxisRole::Data | AxisRole::Expert | AxisRole::Context
        );
        match passes && splits_tokens && s.mesh.size(a) > 1 && ops.len() > 1 {
            true => vec![false, true],
            false => vec![false],
        }
    });
    options.collect()
}

/// What an axis may do in a forward op, alone op or boundary.
fn axis_options(
    s: &Setting<'_>,
    op: &Op,
    rule: &ShardingRule,
    n: u64,
    role: AxisRole,
    boundary: bool,
) -> Vec<AxisUse> {
    if n == 1 {
        return vec![AxisUse::Replicate];
    }
    let fits = |f: &FactorId| rule.factors[f.index()].size.bind(s.batch) >= n;
    let of = |role: FactorRole| -> Vec<AxisUse> {
        rule.shardable()
            .filter(fits)
            .filter(|f| rule.factors[f.index()].role == role)
            .map(AxisUse::Factor)
            .collect()
    };
    let (batch, sequence, expert) = (
        of(FactorRole::Batch),
        of(FactorRole::Sequence),
        of(FactorRole::Expert),
    );
    let feature = [expert.clone(), of(FactorRole::Feature)].concat();
    // Between tokens and experts either side can be split: the layout changes after or before.
    let moves = matches!(op.kind, OpKind::Dispatch { .. } | OpKind::Combine);
    let heavy = matches!(
        op.kind,
        OpKind::DotGeneral { .. }
            | OpKind::Attention { .. }
            | OpKind::Embedding
            | OpKind::CrossEntropy
            | OpKind::LogSumExp
    );
    // Addends may stay partial through a sum of gradients, to be reduced once.
    let sum = op.region == Region::Microbatch
        && op.pass != Pass::F
        && matches!(op.kind, OpKind::Binary { .. });
    let mut options = vec![AxisUse::Replicate];
    match role {
        AxisRole::Data => {
            if !batch.is_empty() {
                options = batch;
            }
        }
        AxisRole::Expert => {
            if !expert.is_empty() && !moves {
                options = expert;
            } else if !batch.is_empty() {
                options = [batch, expert].concat();
            }
        }
        // Every op that has positions, attention too: keys and values are gathered for it.
        AxisRole::Context => {
            // Token ids are small, and whole where they are put into another order.
            let is_ids = op
                .outputs
                .iter()
                .all(|&v| !s.training.graph.ty(v).dtype.is_float());
            match sequence.is_empty() {
                false if is_ids => options.extend(sequence),
                false => options = sequence,
                true => {}
            }
        }
        AxisRole::Tensor => {
            if heavy && !feature.is_empty() {
                options = feature;
            } else {
                options.extend(sequence);
                if !boundary {
                    options.extend(feature);
                }
            }
        }
        AxisRole::Free => {
            options.extend(batch);
            options.extend(sequence);
            if !boundary {
                options.extend(feature);
            }
        }
    }
    if sum {
        options.push(AxisUse::Partial(0));
    }
    if matches!(op.kind, OpKind::Accumulate { .. }) {
        options.push(AxisUse::Partial(0));
    }
    options
}

/// Corresponding factors of a forward op and one op of its group, by the tensors they share:
/// a forward value used by both, a gradient with the shape of a forward result (operands) or
/// of a forward operand (results).
fn factor_map(
    graph: &Graph,
    head: OpId,
    head_rule: &ShardingRule,
    id: OpId,
    rule: &ShardingRule,
) -> BTreeMap<FactorId, FactorId> {
    let (fwd, op) = (graph.op(head), graph.op(id));
    // A twin has the rule of its source.
    if head == id || op.pass == Pass::Recompute {
        return (0..rule.factors.len())
            .map(|i| (FactorId::new(i), FactorId::new(i)))
            .collect();
    }
    let mut map = BTreeMap::new();
    let mut pair = |from: &[ir::op::DimFactor], to: &[ir::op::DimFactor]| {
        for (a, b) in from.iter().zip(to) {
            if head_rule.factors[a.factor.index()].shardable
                && rule.factors[b.factor.index()].shardable
                && a.unit == b.unit
            {
                map.entry(a.factor).or_insert(b.factor);
            }
        }
    };
    let inputs = op.inputs.iter().map(|&v| source_value(graph, v));
    for (k, v) in inputs.enumerate() {
        if let Some(i) = fwd.inputs.iter().position(|w| *w == v) {
            pair(&head_rule.operands[i], &rule.operands[k]);
        } else if let Some(i) = fwd.outputs.iter().position(|w| *w == v) {
            pair(&head_rule.results[i], &rule.operands[k]);
        } else if let Some(i) = fwd
            .outputs
            .iter()
            .position(|w| graph.ty(*w).shape == graph.ty(v).shape)
        {
            pair(&head_rule.results[i], &rule.operands[k]);
        }
    }
    for (k, v) in op.outputs.iter().enumerate() {
        if let Some(i) = fwd
            .inputs
            .iter()
            .position(|w| graph.ty(*w).shape == graph.ty(*v).shape)
        {
            pair(&head_rule.operands[i], &rule.results[k]);
        }
    }
    map
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

/// What an axis does to a parameter: shards a dim in compute, or stays idle with a ZeRO variant.
#[derive(Clone, Copy, Debug)]
enum ParamUse {
    Shard(usize),
    Idle(ZeroVariant),
}

fn parameter_group(s: &Setting<'_>, ops: &[OpId]) -> Group {
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
    let expert_dim = expert_dim(graph, ops);
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
            if !matches!(role, AxisRole::Data | AxisRole::Expert | AxisRole::Context) {
                uses.extend(
                    (0..lens.len())
                        .filter(|&d| lens[d] >= n)
                        .map(ParamUse::Shard),
                );
            }
            uses.extend(
                zero_variants(s.pins.zero, role, s.train.precision)
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
        let made = ops
            .iter()
            .zip(&rules)
            .map(|(&id, _)| layout.strategy(s, graph.op(id), foreign))
            .collect::<Option<Vec<_>>>();
        if let Some(mut choice) =
            made.and_then(|strategies| make_choice(s, ops, &rules, strategies))
        {
            choice.static_bytes = layout.static_bytes(s, ops, &choice);
            choice.levels = levels(s, &uses);
            let mut known = choices.iter_mut();
            match known.find(|c| c.strategies == choice.strategies) {
                Some(same) => same.levels = same.levels.or(choice.levels),
                None => choices.push(choice),
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
fn levels(s: &Setting<'_>, uses: &[ParamUse]) -> ZeroLevels {
    let axes = s.mesh.axis_ids().zip(uses);
    let idle = axes.filter_map(|(a, u)| match u {
        ParamUse::Idle(variant) if s.mesh.size(a) > 1 => Some((a, *variant)),
        _ => None,
    });
    idle.fold(ZeroLevels::ALL, |levels, (a, variant)| {
        let role = s.roles[a.index()];
        levels.and(ZeroLevels::of(variant, role, s.train.precision))
    })
}

/// The dim of a parameter that its uses in the forward pass have as experts.
fn expert_dim(graph: &Graph, ops: &[OpId]) -> Option<usize> {
    let made: BTreeSet<ValueId> = ops
        .iter()
        .map(|&id| graph.op(id))
        .filter(|op| op.region == Region::StepBegin)
        .flat_map(|op| op.outputs.iter().copied())
        .collect();
    let forward = |op: &&Op| op.region == Region::Microbatch && op.pass == Pass::F;
    graph.ops().iter().filter(forward).find_map(|op| {
        let operand = op.inputs.iter().position(|v| made.contains(v))?;
        let rule = graph.rule(op);
        let is_expert =
            |d: &ir::op::DimFactor| rule.factors[d.factor.index()].role == FactorRole::Expert;
        rule.operands[operand].iter().position(is_expert)
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
    fn strategy(&self, s: &Setting<'_>, op: &Op, foreign: bool) -> Option<OpStrategy> {
        let states = &s.training.states;
        let role = |v: ValueId| states.iter().find(|st| st.read == v).map(|st| st.role);
        let places = match &op.kind {
            OpKind::State { .. } => match role(op.outputs[0]) {
                Some(StateRole::Parameter) => &self.rest,
                _ => &self.optimizer,
            },
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
        Some(OpStrategy {
            uses,
            reverse: self.reverse,
        })
    }

    /// Bytes that live through the step; a prepared copy equal to the parameter is a view.
    fn static_bytes(&self, s: &Setting<'_>, ops: &[OpId], choice: &Choice) -> u64 {
        let graph = &s.training.graph;
        let mut bytes = 0u64;
        for (&id, a) in ops.iter().zip(&choice.specs) {
            let op = graph.op(id);
            let size = local_bytes(s, op.outputs[0], &a.results[0]);
            let counted = match op.kind {
                OpKind::State { .. } | OpKind::Accumulate { .. } => true,
                // A Layout with the spec of its operand is a view of it.
                OpKind::Layout => self.prepared != self.rest,
                OpKind::Cast { .. } => true,
                _ => false,
            };
            if counted {
                bytes = bytes.saturating_add(size);
            }
        }
        bytes
    }
}
