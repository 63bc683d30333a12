//! `compile --preset`: a recipe's best point, and what is refused.

#![allow(clippy::unwrap_used)] // A test may stop where it likes.

mod support;

use support::Place;

fn args<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec!["compile", "config.json", "--cluster", "cpu-default"];
    args.extend(["--global-batch", "8"]);
    args.extend(more);
    args
}

#[test]
fn every_preset_gives_a_plan_that_the_checker_accepts_and_says_its_pins() {
    let place = Place::new();
    for name in planner::Recipe::NAMES {
        // `compile` refuses a plan that the checker does.
        let done = place.run(&args(&["--preset", name, "--json"])).expect(0);
        let report: serde_json::Value = serde_json::from_str(&done.out).unwrap();
        let first = planner::Recipe::named(name).unwrap().name();
        assert_eq!(report["preset"]["name"], first);
        assert_eq!(report["preset"]["pins"], report["pins"], "{name}");
        assert!(report["preset"]["points"].as_u64() > Some(0), "{name}");
        place.run(&["check", "plan.json"]).expect(0);
        // The pins alone give the same plan.
        let plan = place.read("plan.json");
        let pins: Vec<&str> = report["pins"]
            .as_array()
            .unwrap()
            .iter()
            .map(|p| p.as_str().unwrap())
            .collect();
        place.run(&args(&["--pin", &pins.join(" ")])).expect(0);
        assert!(place.read("plan.json") == plan, "{name}: {pins:?}");
    }
}

#[test]
fn a_preset_is_told_in_words_and_takes_pins() {
    let place = Place::new();
    let done = place.run(&args(&["--preset", "ddp"])).expect(0);
    assert!(
        done.out
            .contains("Preset ddp: data=4 tensor=1 pipeline=1 zero=0 recompute="),
        "{}",
        done.out
    );
    let pinned = [
        "--preset",
        "megatron",
        "--pin",
        "tensor=2 zero=1 recompute=none",
    ];
    let done = place.run(&args(&pinned)).expect(0);
    assert!(done.out.contains("tensor=2"), "{}", done.out);
    // Without a preset there is no word of one.
    let done = place.run(&args(&["--json"])).expect(0);
    let report: serde_json::Value = serde_json::from_str(&done.out).unwrap();
    assert!(report["preset"].is_null());
}

#[test]
fn what_no_preset_is_and_what_none_of_its_points_agrees_with_is_refused() {
    let place = Place::new();
    let refused = |more: &[&str]| place.refuses(&args(more), &[2]);
    let all = ["ddp, zero-1, zero-2, zero-3, fsdp, hsdp, megatron, deepspeed-3d, alpa"];
    refused(&["--preset", "zero-4"]).says(&all);
    refused(&["--preset", "megatrn"]).says(&["did you mean `megatron`?"]);
    refused(&["--preset", "ddp", "--pin", "zero=3"]).says(&[
        "no point of preset ddp agrees with all pins",
        "contradict points of it: zero",
        "leave out --preset",
    ]);
    // Two samples for four ranks.
    let mut few = args(&["--preset", "fsdp"]);
    few.retain(|arg| !["--global-batch", "8"].contains(arg));
    few.extend(["--global-batch", "2"]);
    place.refuses(&few, &[2]).says(&["pin data=2 or less"]);
}
