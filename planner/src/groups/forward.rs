//! The group of a forward op: what each axis may do in it, and what the gradient ops and the twin
//! then do.

use super::{Group, Maker, Setting, orders, product};
use crate::pins::{AxisRole, ContextAttention};
use ir::op::{AxisUse, FactorRole, OpStrategy, ShardingRule};
use ir::training::source_value;
use ir::{FactorId, Graph, Op, OpId, OpKind, Pass, Region};
use std::collections::BTreeMap;

pub(super) fn forward_group(s: &Setting<'_>, ops: Vec<OpId>) -> Group {
    let graph = &s.training.graph;
    let head = graph.op(ops[0]);
    let rules: Vec<ShardingRule> = ops.iter().map(|&id| graph.rule(graph.op(id))).collect();
    let maps: Vec<BTreeMap<FactorId, FactorId>> = ops
        .iter()
        .zip(&rules)
        .map(|(&id, rule)| factor_map(graph, ops[0], &rules[0], id, rule))
        .collect();
    let boundary = head.origin == ir::Origin::Boundary;
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
    let mut maker = Maker::new(s, &ops, &rules);
    let is_expert = |f: &FactorId| rules[0].factors[f.index()].role == FactorRole::Expert;
    for (uses, addends, shape) in product(&per_axis).into_iter().flat_map(|uses| {
        let experts = |u: &&AxisUse| matches!(u, AxisUse::Factor(f) if is_expert(f));
        let orders = match shares_heads(s, &rules[0], &uses) {
            true => &[true][..],
            false => orders(uses.iter().filter(experts).count()),
        };
        let rings = rings(s, &rules[0], &uses);
        let shapes = orders.iter().flat_map(|&reverse| {
            let of = move |&ring: &bool| Shape { reverse, ring };
            rings.iter().map(of)
        });
        let shapes: Vec<Shape> = shapes.collect();
        product(&addends).into_iter().flat_map(move |a| {
            let uses = uses.clone();
            let shapes = shapes.clone().into_iter();
            shapes.map(move |shape| (uses.clone(), a.clone(), shape))
        })
    }) {
        let strategies: Vec<OpStrategy> = maps
            .iter()
            .zip(&ops)
            .zip(&rules)
            .map(|((map, &id), rule)| {
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
                    reverse: shape.reverse,
                    ring: shape.ring && rule.ring.is_some(),
                }
            })
            .collect();
        let mut strategies = strategies;
        strategies[0].uses = uses;
        choices.extend(maker.choice(strategies));
    }
    choices.dedup_by(|a, b| a.does_as(b));
    Group {
        ops,
        choices,
        boundary,
    }
}

/// The attributes of a strategy beside the uses of axes.
#[derive(Clone, Copy)]
struct Shape {
    reverse: bool,
    ring: bool,
}

/// Tokens of a context rank from which on keys and values may go around unless that is pinned: of
/// fewer a part is done before the next ones have arrived.
const RING_TOKENS: u64 = 4_096;

/// Whether keys and values of an attention whose queries are split may go around, be gathered, or
/// either.
fn rings(s: &Setting<'_>, rule: &ShardingRule, uses: &[AxisUse]) -> &'static [bool] {
    let Some((queries, _)) = rule.ring else {
        return &[false];
    };
    let of = |role: AxisRole| s.roles.iter().zip(uses).filter(move |(r, _)| **r == role);
    let splits = |(_, u): (&AxisRole, &AxisUse)| *u == AxisUse::Factor(queries);
    let n_axes = uses
        .iter()
        .filter(|u| **u == AxisUse::Factor(queries))
        .count();
    if n_axes != 1 || !of(AxisRole::Context).any(splits) {
        return &[false];
    }
    match s.pins.context_attention {
        Some(ContextAttention::Ring) => &[true],
        Some(_) => &[false],
        None => {
            let axis = uses.iter().position(|u| *u == AxisUse::Factor(queries));
            let ranks = axis.map_or(1, |a| s.mesh.size(ir::AxisId::new(a)));
            let tokens = rule.factors[queries.index()].size.bind(s.batch) / ranks.max(1);
            match tokens >= RING_TOKENS {
                true => &[false, true],
                false => &[false],
            }
        }
    }
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
            AxisRole::Data | AxisRole::Replica | AxisRole::Expert | AxisRole::Context
        );
        match passes && splits_tokens && s.mesh.size(a) > 1 && ops.len() > 1 {
            true => vec![false, true],
            false => vec![false],
        }
    });
    options.collect()
}

/// The roles that an axis may have in a forward op, alone op or boundary.
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
    let moves = matches!(
        op.kind,
        OpKind::Dispatch { .. } | OpKind::Combine | OpKind::Layout
    );
    let heavy = matches!(
        op.kind,
        OpKind::DotGeneral { .. }
            | OpKind::Conv2d { .. }
            | OpKind::Attention { .. }
            | OpKind::StateSpace { .. }
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
        AxisRole::Data | AxisRole::Replica => {
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
        // Every op that has positions, attention too: keys and values are gathered for it, or it
        // has all tokens of some heads.
        AxisRole::Context => {
            // Token ids are small, and whole where they are put into another order.
            let is_ids = op
                .outputs
                .iter()
                .all(|&v| !s.training.graph.ty(v).dtype.is_float());
            match sequence.is_empty() {
                false if is_ids => options.extend(sequence),
                false => options = context_options(s, op, rule, sequence, of(FactorRole::Feature)),
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

/// The roles of a context axis in an op with positions: it may split the sequence, and in attention,
/// or in an op that makes its operands without looking at other tokens or heads, the heads instead.
///
/// Then the layout changes once, before the rotation of queries and keys or where they are taken
/// apart, and what is kept for the backward pass lies as its attention wants it.
fn context_options(
    s: &Setting<'_>,
    op: &Op,
    rule: &ShardingRule,
    sequence: Vec<AxisUse>,
    features: Vec<AxisUse>,
) -> Vec<AxisUse> {
    let pinned = s.pins.context_attention;
    let is_attention = matches!(op.kind, OpKind::Attention { .. });
    let is_beside = matches!(
        op.kind,
        OpKind::Rotary { .. } | OpKind::Unstack { .. } | OpKind::Join
    );
    let may_exchange = pinned.is_none_or(|p| p == ContextAttention::Ulysses);
    if !may_exchange || !(is_attention || is_beside) {
        return sequence;
    }
    // The elements of a head stay together.
    let is_head = |u: &AxisUse| {
        let last = rule.results[0].last().map(|d| d.factor);
        !matches!(u, AxisUse::Factor(f) if Some(*f) == last)
    };
    let heads = features.into_iter().filter(is_head);
    match pinned == Some(ContextAttention::Ulysses) && is_attention {
        true => heads.collect(),
        false => sequence.into_iter().chain(heads).collect(),
    }
}

/// Whether a context axis splits the heads that another axis splits too. Tokens come to the heads
/// that a rank of the other one has, so the context axis, although it is the outer one, splits
/// inside.
fn shares_heads(s: &Setting<'_>, rule: &ShardingRule, uses: &[AxisUse]) -> bool {
    let feature = |u: AxisUse| match u {
        AxisUse::Factor(f) if rule.factors[f.index()].role == FactorRole::Feature => Some(f),
        _ => None,
    };
    let of = |role: AxisRole| {
        let used = s.roles.iter().zip(uses).filter(move |(r, _)| **r == role);
        used.filter_map(move |(_, &u)| feature(u))
    };
    of(AxisRole::Context).any(|f| of(AxisRole::Tensor).any(|g| f == g))
}

/// Corresponding factors of a forward op and one op of its group, by the tensors they share:
/// a forward value used by both, a gradient with the shape of a forward result or operand
/// (operands) or of a forward operand (results).
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
        } else if let Some(i) = fwd
            .inputs
            .iter()
            .position(|w| graph.ty(*w).shape == graph.ty(v).shape)
        {
            pair(&head_rule.operands[i], &rule.operands[k]);
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
