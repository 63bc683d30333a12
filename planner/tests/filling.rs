//! With few microbatches a pipeline fills and drains for longer than it is full, and strategies
//! that take less time for each microbatch are worth more than the objective of a stage says.

#![allow(clippy::unwrap_used)] // A test may stop at what it does not expect.

mod common;

use ir::Precision;
use planner::{Pins, PlanOptions};

/// GPT-2 XL as four stages with two microbatches, on one host whose links are slow.
#[test]
fn few_microbatches_are_planned_for_what_fills_the_pipeline() {
    let cluster = cost_model::presets::find("a100-pcie-40gb:1");
    let cluster = cluster.unwrap().unwrap();
    let train = common::train(64, 1024, Precision::F16);
    let forward = common::model("gpt2-xl", train.sequence);
    let options = PlanOptions {
        pins: Pins::parse(&["pipeline=4", "microbatch=32"]).unwrap(),
        tolerance: 0.0,
        ..PlanOptions::default()
    };
    let made = planner::plan(&forward, &train, &cluster, &options).unwrap();
    let step_s = made.plan.predicted.step_time_s.0;
    let is_filling = |what: &str| what.contains("fills the pipeline");
    let fastest = |is_one: &dyn Fn(&str) -> bool| {
        let all = made.stats.alternatives.iter();
        let own = all.filter(|(what, _)| is_one(what));
        own.map(|(_, s)| s.0).fold(f64::INFINITY, f64::min)
    };
    assert_eq!(fastest(&is_filling), step_s);
    // Traffic hides by the simulator, so that others may be as fast.
    // What is proved of the stages is about their own objective: two microbatches, filling apart.
    let (m, p) = (2.0, 4.0);
    let stages = made.plan.proof.stages.iter();
    for (proof, times) in stages.zip(&made.plan.predicted.stages) {
        assert!(proof.lower_bound_s.0 <= proof.objective_s.0);
        let of_microbatch = times.forward_s.0 + times.backward_s.0;
        let own = m * of_microbatch + times.step_s.0;
        let filled = (m + p - 1.0) * of_microbatch + times.step_s.0;
        let objective = proof.objective_s.0;
        assert!(
            (objective / own - 1.0).abs() < 0.2,
            "{objective} s, {own} s"
        );
        assert!(objective < 0.7 * filled, "{objective} s, {filled} s");
    }
}
