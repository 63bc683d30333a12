//! Checks that the specs of an op's operands and results belong together, by the op's rule and the
//! specs alone; what the plan says plays no part.
//!
//! Each mesh axis does one thing in the op ([`AxisUse`]). For every axis the uses are listed
//! under which each operand and result would have what it has on that axis; a choice of one
//! per axis then has to give the specs exactly, order of axes and units included.

use ir::op::{AxisUse, DimFactor, OpStrategy, ShardingRule};
use ir::{AxisId, FactorId, ReduceKind, ShardingSpec};

/// The most combinations of uses that are tried. An axis is ambiguous only where it makes no
/// difference which use is meant.
const MAX_COMBINATIONS: usize = 256;

/// How one mesh axis lays out a tensor.
#[derive(Clone, Copy, PartialEq, Eq)]
enum On {
    Nothing,
    Dim(usize),
    Partial(ReduceKind),
}

fn on(axis: AxisId, spec: &ShardingSpec) -> On {
    match (spec.dim_of(axis), spec.partial.get(&axis)) {
        (Some(d), _) => On::Dim(d),
        (None, Some(k)) => On::Partial(*k),
        (None, None) => On::Nothing,
    }
}

/// Says whether some strategy of the rule over `n_axes` axes gives exactly these specs.
pub(crate) fn consistent(
    rule: &ShardingRule,
    n_axes: usize,
    operands: &[&ShardingSpec],
    results: &[&ShardingSpec],
) -> bool {
    if operands.len() != rule.operands.len() || results.len() != rule.results.len() {
        return false;
    }
    let uses: Vec<Vec<AxisUse>> = (0..n_axes)
        .map(|a| uses_of(rule, AxisId::new(a), operands, results))
        .collect();
    if uses.iter().any(Vec::is_empty) {
        return false;
    }
    let mut choice = vec![0usize; n_axes];
    for _ in 0..MAX_COMBINATIONS {
        let uses_now: Vec<AxisUse> = choice.iter().zip(&uses).map(|(&c, u)| u[c]).collect();
        if gives(rule, uses_now, operands, results) {
            return true;
        }
        if !advance(&mut choice, &uses) {
            return false;
        }
    }
    false
}

/// Says whether some strategy of the rule gives these specs in which keys are sharded as queries are:
/// the rule of an op in which both are one factor.
pub(crate) fn consistent_in_ring(
    rule: &ShardingRule,
    n_axes: usize,
    operands: &[ShardingSpec],
    results: &[ShardingSpec],
) -> bool {
    let Some((queries, keys)) = rule.ring else {
        return false;
    };
    let mut joint = rule.clone();
    let sides = joint.operands.iter_mut().chain(&mut joint.results);
    for dim in sides.flatten().filter(|d| d.factor == keys) {
        dim.factor = queries;
    }
    let [operands, results] = [operands, results].map(|specs| specs.iter().collect::<Vec<_>>());
    consistent(&joint, n_axes, &operands, &results)
}

fn gives(
    rule: &ShardingRule,
    uses: Vec<AxisUse>,
    operands: &[&ShardingSpec],
    results: &[&ShardingSpec],
) -> bool {
    let mut strategy = OpStrategy {
        uses,
        ..OpStrategy::replicate(0)
    };
    for reverse in [false, true] {
        strategy.reverse = reverse;
        if let Ok(a) = rule.assign(&strategy)
            && a.operands.iter().eq(operands.iter().copied())
            && a.results.iter().eq(results.iter().copied())
        {
            return true;
        }
    }
    false
}

/// Advances `choice` to the next combination, as a counter does; false after the last one.
fn advance(choice: &mut [usize], uses: &[Vec<AxisUse>]) -> bool {
    for (c, u) in choice.iter_mut().zip(uses) {
        *c += 1;
        if *c < u.len() {
            return true;
        }
        *c = 0;
    }
    false
}

fn uses_of(
    rule: &ShardingRule,
    axis: AxisId,
    operands: &[&ShardingSpec],
    results: &[&ShardingSpec],
) -> Vec<AxisUse> {
    let factors = rule.shardable().map(AxisUse::Factor);
    let sets = (0..rule.linear.len())
        .filter_map(|i| u32::try_from(i).ok())
        .map(AxisUse::Partial);
    std::iter::once(AxisUse::Replicate)
        .chain(factors)
        .chain(sets)
        .filter(|&u| {
            operands
                .iter()
                .enumerate()
                .all(|(i, s)| on(axis, s) == operand_on(rule, u, i))
                && results
                    .iter()
                    .enumerate()
                    .all(|(i, s)| on(axis, s) == result_on(rule, u, i))
        })
        .collect()
}

fn dim_of(dims: &[DimFactor], factor: FactorId) -> Option<usize> {
    dims.iter().position(|d| d.factor == factor)
}

fn operand_on(rule: &ShardingRule, u: AxisUse, i: usize) -> On {
    match u {
        AxisUse::Replicate => On::Nothing,
        AxisUse::Factor(f) => dim_of(&rule.operands[i], f).map_or(On::Nothing, On::Dim),
        AxisUse::Partial(set) => match rule.linear[set as usize].contains(&i) {
            true => On::Partial(ReduceKind::Sum),
            false => On::Nothing,
        },
    }
}

fn result_on(rule: &ShardingRule, u: AxisUse, i: usize) -> On {
    match u {
        AxisUse::Replicate => On::Nothing,
        AxisUse::Factor(f) => {
            dim_of(&rule.results[i], f).map_or(On::Partial(rule.factors[f.index()].reduce), On::Dim)
        }
        AxisUse::Partial(_) => On::Partial(ReduceKind::Sum),
    }
}
