//! More effort proves more and finds nothing worse.
#![allow(clippy::unwrap_used)]

use ir::{Precision, TrainSpec};
use planner::{Effort, PlanOptions, Planned};

/// A deep GPT-2 on two hosts with so little memory that it binds: pipelines, interleaved or not,
/// recompute parts of it.
#[test]
fn more_effort_leaves_a_smaller_gap() {
    let mut cluster = cost_model::presets::load("dgx-h100", 2).unwrap();
    cluster.device.memory_bytes.0 /= 8;
    let train = TrainSpec {
        global_batch: 128,
        sequence: 2048,
        precision: Precision::Bf16,
        ..TrainSpec::default()
    };
    let forward = tests::gpt2(40, 2048, train.sequence, 50257);
    let planned = |effort: u8| -> Planned {
        let options = PlanOptions {
            tolerance: 0.0,
            effort: Effort::new(effort).unwrap(),
            ..PlanOptions::default()
        };
        planner::plan(&forward, &train, &cluster, &options).unwrap()
    };
    let (little, more) = (planned(1), planned(3));
    let step_s = |p: &Planned| p.plan.predicted.step_time_s.0;
    let bound = |p: &Planned| p.plan.proof.lower_bound_s.0;
    assert!(step_s(&more) <= step_s(&little) * (1.0 + 1e-9));
    assert!(
        bound(&more) > bound(&little),
        "{} {}",
        bound(&more),
        bound(&little)
    );
    assert!(more.stats.simulated > little.stats.simulated);
    assert_eq!(more.plan.proof.space, little.plan.proof.space);
    tests::assert_checked(&more.plan, &more.training, &more.program);
}

#[test]
fn effort_is_from_one_to_eight() {
    assert_eq!(Effort::new(1), Some(Effort::default()));
    assert!(Effort::new(Effort::MOST).is_some());
    assert!(Effort::new(0).is_none() && Effort::new(Effort::MOST + 1).is_none());
}
