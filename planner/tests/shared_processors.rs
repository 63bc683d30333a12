//! Ranks that share processors: what is proved there holds for all that the simulator plays, which
//! knows that they do.

#![allow(clippy::unwrap_used)] // A test may stop at what it does not expect.

mod common;

use ir::TrainSpec;
use planner::{Pins, PlanOptions, Planned};

/// Tiny GPT-2 on ranks of the default CPU cluster, whose pool has two processors.
fn planned(ranks: u32, global_batch: u64, pins: &[&str]) -> Planned {
    let train = TrainSpec {
        global_batch,
        sequence: 128,
        ..TrainSpec::default()
    };
    let forward = common::model("tiny-gpt2", train.sequence);
    let cluster = cost_model::presets::load("cpu-default", 1).unwrap();
    let cluster = cost_model::presets::with_ranks(cluster, ranks).unwrap();
    let options = PlanOptions {
        pins: Pins::parse(pins).unwrap(),
        ..PlanOptions::default()
    };
    planner::plan(&forward, &train, &cluster, &options).unwrap()
}

#[test]
fn no_simulated_step_is_shorter_than_the_bound_where_processors_are_shared() {
    let pinned: [&[&str]; 5] = [
        &[],
        &["pipeline=1"],
        &["data=2", "tensor=2"],
        &["pipeline=2", "microbatch=2"],
        &["pipeline=2", "virtual=2", "microbatch=2"],
    ];
    for (ranks, pins) in [2, 4, 8].into_iter().flat_map(|n| pinned.map(|p| (n, p))) {
        if pins.contains(&"data=2") && ranks == 2 {
            continue;
        }
        let made = planned(ranks, 16, pins);
        let bound = made.plan.proof.lower_bound_s.0;
        assert!(!made.stats.alternatives.is_empty());
        for (what, step) in &made.stats.alternatives {
            let of = format!("{ranks} ranks, {pins:?}, {what}");
            assert!(bound <= step.0 * (1.0 + 1e-9), "{of}: {step}, {bound} s");
        }
    }
}

/// Four ranks on two processors have twice the work of four on four: a bound that gives each its
/// own proves half.
#[test]
fn the_gap_on_shared_processors_is_not_that_of_processors_that_are_not_there() {
    let proof = planned(4, 16, &[]).plan.proof;
    assert!(proof.gap < 0.15, "{proof:?}");
}
