//! Orders of the sequence: where it is long, causal attention is shared evenly by context ranks
//! that store it in zigzag order, which is a property of the model and not of its layout. So each
//! number of such ranks is a search of its own, over meshes with an axis for them.

use crate::Planned;
use crate::pins::Pins;
use ir::cluster::Cluster;
use ir::op::{OpKind, SequenceOrder};
use ir::{Graph, TrainSpec};

/// Tokens of a sequence from which on zigzag orders are tried: below, attention is a small part of
/// a step, and an axis for it has little to win.
const LONG: u64 = 32_768;
/// Tokens of a context rank at least: with fewer, its keys and values take longer to arrive than
/// to attend to.
const TOKENS: u64 = 4_096;

/// The pins of further searches: those that were asked for, with a number of context ranks.
pub(super) fn others(
    forward: &Graph,
    train: &TrainSpec,
    cluster: &Cluster,
    pins: &Pins,
) -> Vec<Pins> {
    if pins.fixes_mesh() || !pins.tensors.is_empty() || train.sequence < LONG {
        return Vec::new();
    }
    let orders = forward.ops().iter().filter_map(|op| match &op.kind {
        OpKind::Attention { order, .. } => Some(*order),
        _ => None,
    });
    let orders: Vec<SequenceOrder> = orders.collect();
    if orders.is_empty() {
        return Vec::new();
    }
    // A graph that is in zigzag order already is for so many ranks.
    let fixed = orders.iter().find_map(|order| match order {
        SequenceOrder::Zigzag { ranks } => u32::try_from(*ranks).ok(),
        SequenceOrder::Natural => None,
    });
    if let Some(ranks) = fixed {
        let of_graph = Pins {
            context: Some(ranks),
            ..pins.clone()
        };
        return [of_graph].into_iter().filter(|_| ranks > 1).collect();
    }
    let most = u64::from(cluster.n_devices()).min(train.sequence / TOKENS);
    let powers = std::iter::successors(Some(2u32), |n| n.checked_mul(2));
    let powers = powers.take_while(|n| u64::from(*n) <= most);
    let fits = |n: &u32| {
        train.sequence.is_multiple_of(2 * u64::from(*n)) && cluster.n_devices().is_multiple_of(*n)
    };
    let with = |n: u32| Pins {
        context: Some(n),
        zigzag: true,
        ..pins.clone()
    };
    powers.filter(fits).map(with).collect()
}

/// The better of two plans: the second only if it is faster by more than the tolerance, as it has
/// an axis more. What is proved and told is of both.
pub(super) fn better(first: Planned, second: Planned, context: u32, tolerance: f64) -> Planned {
    let step_s = |p: &Planned| p.plan.predicted.step_time_s.0;
    let is_second = (1.0 + tolerance) * step_s(&second) < step_s(&first);
    let (mut best, other) = match is_second {
        true => (second, first),
        false => (first, second),
    };
    let proof = &mut best.plan.proof;
    let lower = proof.lower_bound_s.0.min(other.plan.proof.lower_bound_s.0);
    proof.lower_bound_s.0 = lower;
    proof.gap = match proof.objective_s.0 > 0.0 {
        true => (proof.objective_s.0 - lower) / proof.objective_s.0,
        false => 0.0,
    };
    proof.candidates += other.plan.proof.candidates;
    let of = |is_second: bool| match is_second {
        true => format!(", {context} context ranks"),
        false => String::new(),
    };
    let named = |p: &Planned, suffix: String| {
        let all = p.stats.alternatives.iter();
        all.map(move |(what, s)| (format!("{what}{suffix}"), *s))
            .collect::<Vec<_>>()
    };
    let mut alternatives = named(&best, of(is_second));
    alternatives.extend(named(&other, of(!is_second)));
    best.stats.alternatives = alternatives;
    best.stats
        .simulated_plans
        .extend(other.stats.simulated_plans);
    best.stats.candidates += other.stats.candidates;
    best.stats.simulated += other.stats.simulated;
    best
}
