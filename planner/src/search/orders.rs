//! Further searches, over meshes of named axes.
//!
//! Where the sequence is long, causal attention is shared evenly by context ranks that store it in
//! zigzag order, which is a property of the model and not of its layout. So each number of such
//! ranks is a search of its own, over meshes with an axis for them.
//!
//! Where the model has experts, three axes may be of use: tokens travel over one to their experts,
//! another splits matmuls, and the third replicates both. The free search looks at two axes, so
//! numbers of expert ranks about the size of a host are searches of their own.

use crate::Planned;
use crate::pins::Pins;
use ir::cluster::Cluster;
use ir::op::{OpKind, SequenceOrder};
use ir::plan::Simpler;
use ir::{Graph, TrainSpec};

/// Tokens of a sequence from which on zigzag orders are tried: below, attention is a small part of
/// a step, and an axis for it has little to win.
const LONG: u64 = 32_768;
/// Tokens of a context rank at least: with fewer, its keys and values take longer to arrive than
/// to attend to.
const TOKENS: u64 = 4_096;

/// The axis that a further search has beside those for samples and matmuls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Further {
    Context(u32),
    Expert(u32),
}

impl Further {
    /// How many ranks of what.
    pub(super) fn words(self) -> String {
        match self {
            Further::Context(n) => format!("{n} context ranks"),
            Further::Expert(n) => format!("{n} expert ranks"),
        }
    }
}

/// The space that further searches add, in words.
pub(super) fn spaces(tried: &[Further]) -> String {
    let numbers = |of: fn(&Further) -> Option<u32>| -> Vec<String> {
        let found = tried.iter().filter_map(of);
        found.map(|n| n.to_string()).collect()
    };
    let context = numbers(|f| match f {
        Further::Context(n) => Some(*n),
        Further::Expert(_) => None,
    });
    let expert = numbers(|f| match f {
        Further::Context(_) => None,
        Further::Expert(n) => Some(*n),
    });
    let mut words = String::new();
    if !context.is_empty() {
        words += &format!(
            "; and with the sequence in zigzag order for {} context ranks, on logical meshes of axes data, context, tensor",
            context.join(", ")
        );
    }
    if !expert.is_empty() {
        words += &format!(
            "; and with {} expert ranks, on logical meshes of axes data, expert, tensor",
            expert.join(", ")
        );
    }
    words
}

/// The pins of further searches: those that were asked for, with a number of ranks of an axis.
pub(super) fn others(
    forward: &Graph,
    train: &TrainSpec,
    cluster: &Cluster,
    pins: &Pins,
) -> Vec<(Further, Pins)> {
    let orders = orders(forward, train, cluster, pins).into_iter();
    let orders = orders.map(|pins| (Further::Context(pins.context.unwrap_or(1)), pins));
    let experts = experts(forward, cluster, pins).into_iter();
    let experts = experts.map(|n| {
        let own = Pins {
            expert: Some(n),
            ..pins.clone()
        };
        (Further::Expert(n), own)
    });
    orders.chain(experts).collect()
}

/// Numbers of expert ranks: those of a host and half as many, where a stage may have more hosts
/// than one and the experts can be split so.
fn experts(forward: &Graph, cluster: &Cluster, pins: &Pins) -> Vec<u32> {
    let experts = forward.ops().iter().filter_map(|op| match op.kind {
        OpKind::Dispatch { experts, .. } => Some(experts),
        _ => None,
    });
    let (Some(fewest), per_host) = (experts.min(), cluster.devices_per_host) else {
        return Vec::new();
    };
    let is_pinned = pins.fixes_mesh() || !pins.tensors.is_empty();
    if is_pinned || !cluster.is_equal() || cluster.n_devices() <= per_host {
        return Vec::new();
    }
    let splits = |n: &u32| *n > 1 && fewest.is_multiple_of(u64::from(*n));
    let of_host = [per_host / 2, per_host].into_iter();
    of_host.filter(splits).collect()
}

/// The pins of searches for other orders of the sequence.
fn orders(forward: &Graph, train: &TrainSpec, cluster: &Cluster, pins: &Pins) -> Vec<Pins> {
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

/// The fastest plan that a search found, which it may have left for a simpler one.
fn fastest(p: &Planned) -> Simpler {
    let own = || Simpler {
        tolerance: 0.0,
        fastest_s: p.plan.predicted.step_time_s,
        fastest_strategies: p.plan.layer_strategies.len() as u64,
    };
    p.plan.proof.simpler.clone().unwrap_or_else(own)
}

/// The better of two plans: the first if it takes hardly longer than the fastest that either
/// search found, as it has an axis less. What is proved and told is of both.
pub(super) fn better(first: Planned, second: Planned, further: Further, tolerance: f64) -> Planned {
    let step_s = |p: &Planned| p.plan.predicted.step_time_s.0;
    let fastest = [&first, &second].into_iter().map(fastest);
    let fastest = fastest.min_by(|a, b| a.fastest_s.0.total_cmp(&b.fastest_s.0));
    let fastest = fastest.map(|f| Simpler { tolerance, ..f });
    let limit = fastest
        .as_ref()
        .map_or(f64::INFINITY, |f| (1.0 + tolerance) * f.fastest_s.0);
    let is_second = step_s(&first) > limit && step_s(&second) < step_s(&first);
    let (mut best, other) = match is_second {
        true => (second, first),
        false => (first, second),
    };
    best.plan.proof.simpler = fastest.filter(|f| f.fastest_s.0 < step_s(&best));
    let proof = &mut best.plan.proof;
    let lower = proof.lower_bound_s.0.min(other.plan.proof.lower_bound_s.0);
    proof.lower_bound_s.0 = lower;
    proof.gap = match proof.objective_s.0 > 0.0 {
        true => (proof.objective_s.0 - lower) / proof.objective_s.0,
        false => 0.0,
    };
    proof.candidates += other.plan.proof.candidates;
    let of = |is_second: bool| match is_second {
        true => format!(", {}", further.words()),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PlanOptions;
    use ir::Precision;
    use std::path::Path;

    fn model(name: &str, sequence: u64) -> Graph {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models");
        let config = import::ModelConfig::load(&models.join(name)).unwrap();
        let options = import::BuildOptions {
            sequence,
            dropout: 0.0,
        };
        import::model_graph(&config, &options).unwrap()
    }

    fn cluster(name: &str) -> Cluster {
        cost_model::presets::find(name).unwrap().unwrap()
    }

    #[test]
    fn experts_are_split_over_a_host_and_half_of_one() {
        let of = |model: &Graph, name: &str, pins: &[&str]| {
            experts(model, &cluster(name), &Pins::parse(pins).unwrap())
        };
        let (mixtral, dense) = (model("mixtral-8x7b", 512), model("tiny-llama", 64));
        assert_eq!(of(&mixtral, "dgx-h100:2", &[]), [4, 8]);
        // Sixty experts cannot be split by eight.
        let sixty = model("qwen1.5-moe-a2.7b", 512);
        assert_eq!(of(&sixty, "dgx-h100:2", &[]), [4]);
        // On one host two axes say it all, and who pins the mesh has decided.
        assert!(of(&mixtral, "dgx-h100:1", &[]).is_empty());
        assert!(of(&mixtral, "dgx-h100:2", &["tensor=2", "data=8"]).is_empty());
        assert!(of(&dense, "dgx-h100:2", &[]).is_empty());
    }

    #[test]
    fn spaces_name_the_numbers_that_were_searched() {
        assert_eq!(spaces(&[]), "");
        let both = [Further::Context(2), Further::Expert(4), Further::Expert(8)];
        let words = spaces(&both);
        assert!(
            words.contains("zigzag order for 2 context ranks"),
            "{words}"
        );
        assert!(words.contains("with 4, 8 expert ranks"), "{words}");
    }

    /// The better of two searches: the second has to be faster by more than the tolerance; what is proved is of
    /// both.
    #[test]
    fn a_further_axis_has_to_be_worth_it() {
        let train = TrainSpec {
            global_batch: 64,
            sequence: 256,
            precision: Precision::Bf16,
            ..TrainSpec::default()
        };
        let forward = model("gpt2", train.sequence);
        let planned = |pins: &[&str]| {
            let options = PlanOptions {
                pins: Pins::parse(pins).unwrap(),
                ..PlanOptions::default()
            };
            crate::plan(&forward, &train, &cluster("dgx-h100:1"), &options).unwrap()
        };
        let (slow, fast) = (planned(&["tensor=4"]), planned(&["data=8"]));
        let step_s = |p: &Planned| p.plan.predicted.step_time_s.0;
        let share = step_s(&slow) / step_s(&fast) - 1.0;
        assert!(share > 0.05, "{share}");
        let bound = |p: &Planned| p.plan.proof.lower_bound_s.0;
        let least = bound(&slow).min(bound(&fast));
        let further = Further::Expert(4);
        for (tolerance, is_second) in [(0.01, true), (2.0 * share, false)] {
            let made = better(slow.clone(), fast.clone(), further, tolerance);
            let taken = if is_second { &fast } else { &slow };
            assert_eq!(made.plan.stages, taken.plan.stages);
            assert_eq!(bound(&made), least);
            let candidates = slow.plan.proof.candidates + fast.plan.proof.candidates;
            assert_eq!(made.plan.proof.candidates, candidates);
            // The fastest is told where it was left for one with an axis less.
            let simpler = made.plan.proof.simpler.as_ref();
            assert_eq!(
                simpler.is_some_and(|s| s.fastest_s.0 < step_s(&slow)),
                !is_second
            );
            let named = made.stats.alternatives.iter();
            let named = named.filter(|(what, _)| what.contains("4 expert ranks"));
            assert_eq!(named.count(), fast.stats.alternatives.len());
        }
        // A slower one is not taken.
        let kept = better(fast.clone(), slow, further, 0.01);
        assert_eq!(kept.plan.stages, fast.plan.stages);
    }
}
