//! Plans whose parameters' traffic hides beside compute: chosen for what is seen of it, proved for
//! all of it.

#![allow(clippy::unwrap_used)] // A test may stop at what it does not expect.

mod common;

use ir::cluster::Cluster;
use ir::{Precision, TrainSpec};
use planner::{Pins, PlanOptions, Planned};

/// GPT-2 XL on one host whose links are slow.
fn planned(pins: &[&str]) -> Planned {
    let train = common::train(64, 1024, Precision::F16);
    planned_on("gpt2-xl v100-pcie-32gb:1", &train, pins, 0.01)
}

/// A model on a cluster, both by name.
fn planned_on(names: &str, train: &TrainSpec, pins: &[&str], tolerance: f64) -> Planned {
    let (model, cluster) = names.split_once(' ').unwrap();
    let cluster: Cluster = cost_model::presets::find(cluster).unwrap().unwrap();
    let forward = common::model(model, train.sequence);
    let options = PlanOptions {
        pins: Pins::parse(pins).unwrap(),
        tolerance,
        ..PlanOptions::default()
    };
    planner::plan(&forward, train, &cluster, &options).unwrap()
}

#[test]
fn gathers_that_hide_are_chosen_and_proved_in_full() {
    let free = planned(&[]);
    let zero = planned(&["data=8", "zero=3"]);
    let (free_s, zero_s) = (free.simulation.step_time.0, zero.simulation.step_time.0);
    assert!(free_s <= 1.01 * zero_s, "{free_s} s, with pins {zero_s} s");

    // One stage: what is proved about it is its part of the objective, not what a discount left.
    let proof = &free.plan.proof;
    let [stage] = &proof.stages[..] else {
        panic!("one stage: {:?}", proof.stages);
    };
    let (of_stage, of_plan) = (stage.objective_s.0, proof.objective_s.0);
    assert!(
        (of_stage - of_plan).abs() < 1e-3 * of_plan,
        "the stage's objective is {of_stage} s, the plan's {of_plan} s"
    );
    assert!(stage.lower_bound_s.0 <= of_stage);
}

/// Where traffic is slow, what layers recompute hides behind it. The objective does not know, and
/// has only as many of them recompute as memory asks for; all of them take less time.
#[test]
fn the_fastest_is_no_slower_than_what_a_tolerance_takes() {
    let cluster = cost_model::presets::find("a100-pcie-40gb:2")
        .unwrap()
        .unwrap();
    let train = common::train(512, 1024, Precision::Bf16);
    let forward = common::model("gpt2-xl", train.sequence);
    let step_s = |tolerance: f64| {
        let options = PlanOptions {
            tolerance,
            ..PlanOptions::default()
        };
        let made = planner::plan(&forward, &train, &cluster, &options).unwrap();
        made.plan.predicted.step_time_s.0
    };
    let fastest = step_s(0.0);
    let tolerance = 0.01;
    let simpler = step_s(tolerance);
    assert!(fastest <= simpler, "{fastest} s, {simpler} s");
    assert!(simpler <= (1.0 + tolerance) * fastest);
}

/// All that is reduced at the step's end hides behind the backward pass of a single microbatch. The
/// objective charges it in full, so by it parameters are always split, and other shapes are best.
#[test]
fn whole_parameters_are_found_without_a_pin() {
    for names in ["gpt2-xl a100-pcie-40gb:2", "llama-3.2-1b h100-pcie:1"] {
        let train = match names.starts_with("gpt2") {
            true => common::train(128, 1024, Precision::Bf16),
            false => common::train(64, 4096, Precision::Bf16),
        };
        let step_s = |pins: &[&str]| {
            let made = planned_on(names, &train, pins, 0.0);
            made.simulation.step_time.0
        };
        let (free, whole) = (step_s(&[]), step_s(&["zero=0"]));
        assert!(free <= 1.001 * whole, "{names}: {free} s, pinned {whole} s");
    }
}

/// More of an all-gather and a reduce-scatter hides than of one all-reduce, which the objective
/// does not know: by it, tensor parallelism splits no sequences where memory is ample.
#[test]
fn sequences_are_split_where_their_traffic_hides() {
    let train = common::train(128, 4096, Precision::Bf16);
    let step_s = |pins: &[&str]| {
        let made = planned_on("llama-3.1-8b dgx-h100:2", &train, pins, 0.0);
        made.simulation.step_time.0
    };
    let pins = ["tensor=8", "data=2"];
    let specs = ["residual_1", "residual_2"].map(|v| format!("spec:h.*.{v}=[data,tensor,_]"));
    let more: Vec<&str> = (pins.into_iter().chain(specs.iter().map(String::as_str))).collect();
    let (free, pinned) = (step_s(&pins), step_s(&more));
    assert!(free <= 1.001 * pinned, "{free} s, pinned {pinned} s");
}

/// The objective does not know what tied parameters move between stages, nor that ranks with the
/// same values all send them. Over slow links it is far off, and thinks little of one stage.
#[test]
fn one_stage_is_found_where_the_objective_thinks_little_of_it() {
    let train = common::train(84, 2048, Precision::Bf16);
    let names = "llama-3.2-1b a100-pcie-40gb*7+pcie4+ethernet-25*1:6";
    let step_s = |pins: &[&str]| planned_on(names, &train, pins, 0.0).simulation.step_time.0;
    let (free, one) = (step_s(&[]), step_s(&["pipeline=1"]));
    assert!(free <= 1.001 * one, "{free} s, pinned {one} s");
}
