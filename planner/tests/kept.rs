//! Pins that a plan states and does not keep: for each kind one that is kept, and one that is not.

#![allow(clippy::unwrap_used)] // A test may stop at what it does not expect.

use ir::plan::{Plan, ScheduleKind};
use ir::{Graph, TrainSpec};
use planner::{Pins, PlanOptions};
use std::path::Path;

fn forward() -> Graph {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models");
    let config = import::ModelConfig::load(&models.join("tiny-gpt2")).unwrap();
    let build = import::BuildOptions {
        sequence: 64,
        dropout: 0.0,
    };
    import::model_graph(&config, &build).unwrap()
}

/// A plan of tiny-gpt2 (an embedding, four blocks, a head) for eight devices under pins.
fn plan(pins: &str) -> Plan {
    let train = TrainSpec {
        global_batch: 16,
        sequence: 64,
        ..TrainSpec::default()
    };
    let cluster = cost_model::presets::find("dgx-a100-80gb").unwrap().unwrap();
    let options = PlanOptions {
        pins: Pins::parse(&[pins]).unwrap(),
        ..PlanOptions::default()
    };
    planner::plan(&forward(), &train, &cluster, &options)
        .unwrap()
        .plan
}

/// Pins that a plan does not keep, with what it has in their place.
fn unkept(plan: &Plan, pins: &str) -> Vec<(String, String)> {
    Pins::parse(&[pins]).unwrap().unkept(plan)
}

/// One pin that is not kept, with what the plan has.
fn one(plan: &Plan, pin: &str) -> String {
    match &unkept(plan, pin)[..] {
        [(stated, has)] if stated == pin => has.clone(),
        other => panic!("{pin}: {other:?}"),
    }
}

#[test]
fn degrees_stages_and_microbatches_are_those_of_the_plan() {
    let pins = "data=2 tensor=2 pipeline=2 split=3/3 microbatch=4 schedule=1f1b recompute=none";
    let plan = plan(pins);
    assert_eq!(unkept(&plan, pins), []);
    assert_eq!(unkept(&plan, "virtual=1"), []);
    for (pin, has) in [
        ("data=4", "data=2"),
        ("tensor=1", "tensor=2"),
        ("context=2", "context=1"),
        ("expert=2", "expert=1"),
        ("pipeline=4", "pipeline=2"),
        ("split=2/4", "split=3/3"),
        ("microbatch=8", "microbatch=4"),
        ("schedule=gpipe", "schedule=1f1b"),
    ] {
        assert_eq!(one(&plan, pin), has);
    }
    // All that is not kept is listed, the degrees first.
    let all = unkept(&plan, "data=4 tensor=1 microbatch=8 pipeline=2");
    let stated: Vec<&str> = all.iter().map(|(pin, _)| pin.as_str()).collect();
    assert_eq!(stated, ["data=4", "tensor=1", "microbatch=8"]);
}

#[test]
fn interleaved_stages_are_1f1b_too() {
    let pins = "data=4 pipeline=2 virtual=3 split=1/1/1/1/1/1 schedule=1f1b microbatch=4";
    let plan = plan(pins);
    assert_eq!(
        plan.schedule,
        ScheduleKind::Interleaved { virtual_stages: 3 }
    );
    assert_eq!(unkept(&plan, pins), []);
    assert_eq!(one(&plan, "virtual=1"), "virtual=3");
    let two = unkept(&plan, "virtual=2");
    assert_eq!(two, [("virtual=2".to_string(), "virtual=3".to_string())]);
    assert_eq!(one(&plan, "schedule=zb_h1"), "schedule=interleaved_1f1b");
}

#[test]
fn what_is_recomputed_contradicts_a_pin_of_nothing() {
    let plan = plan("data=8 recompute=full");
    let has = one(&plan, "recompute=none");
    assert!(has.ends_with(" recomputed"), "{has}");
    // A pin of single ops says which are.
    assert_eq!(
        unkept(&plan, "recompute=none recompute:h.*.attn.attend=yes"),
        []
    );
    // What is left open by other pins is not looked at.
    assert_eq!(
        unkept(&plan, "recompute=full zero=3 spec:h.*.ln_1=[data,_,_]"),
        []
    );
}
