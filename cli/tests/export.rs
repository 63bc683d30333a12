//! `export`: files that appear whole or not at all, and clear words for what is refused.

#![allow(clippy::unwrap_used)] // A test may stop where it likes.

mod support;

use support::Place;

#[test]
fn a_plan_is_written_for_each_software() {
    let place = Place::with_plan();
    let files = [
        ("megatron-core", "launch.sh"),
        ("deepspeed", "ds_config.json"),
        ("fsdp2", "fsdp2_plan.py"),
        ("jax", "jax_plan.py"),
    ];
    for (to, file) in files {
        let done = place.run(&["export", "plan.json", "--to", to]).expect(0);
        assert!(place.exists(&format!("export-{to}/{file}")), "{}", done.out);
        assert!(done.out.contains("= global batch 4"), "{}", done.out);
    }
    let done = place.run(&[
        "export",
        "plan.json",
        "--to",
        "deepspeed",
        "-o",
        "ds.json",
        "--json",
    ]);
    let said = done.expect(0).json();
    assert_eq!(said["files"][0], "ds.json");
    assert_eq!(said["summary"]["degrees"]["pipeline"], 2);
    let written: serde_json::Value = serde_json::from_slice(&place.read("ds.json")).unwrap();
    assert_eq!(written["train_batch_size"], 4);
}

#[test]
fn the_nearest_plan_is_predicted() {
    let place = Place::with_plan();
    let args = [
        "export",
        "plan.json",
        "--to",
        "deepspeed",
        "-o",
        "d",
        "--nearest",
        "--json",
    ];
    let said = place.run(&args).expect(0).json();
    assert!(
        said["nearest"]["step_time_s"].as_f64().unwrap() > 0.0,
        "{said}"
    );
}

#[test]
fn unknown_software_has_a_suggestion() {
    let place = Place::with_plan();
    let refuse = |to: &str| place.refuses(&["export", "plan.json", "--to", to], &[2]);
    refuse("megatron").says(&["did you mean `megatron-core`?"]);
    refuse("deepsped").says(&["did you mean `deepspeed`?"]);
    refuse("fsdp").says(&["did you mean `fsdp2`?"]);
    refuse("tensorflow").says(&["plans are exported to megatron-core, deepspeed"]);
}

#[test]
fn a_missing_plan_has_a_suggestion() {
    let place = Place::with_plan();
    place
        .refuses(&["export", "plam.json", "--to", "jax"], &[3])
        .says(&["plam.json", "did you mean `plan.json`?"]);
}

/// A plan whose cluster was made smaller by hand.
#[test]
fn a_plan_that_does_not_fit_its_cluster_is_refused() {
    let place = Place::with_plan();
    let mut plan: serde_json::Value = serde_json::from_slice(&place.read("plan.json")).unwrap();
    plan["cluster"]["devices_per_host"] = 2.into();
    plan["cluster"]["n_hosts"] = 1.into();
    place.write("small.json", plan.to_string());
    place
        .refuses(&["export", "small.json", "--to", "megatron-core"], &[3, 5])
        .says(&["small.json"]);
}

#[test]
fn what_cannot_be_expressed_leaves_nothing() {
    let place = Place::with_plan();
    let to = |to| place.refuses(&["export", "plan.json", "--to", to], &[4]);
    to("accelerate").says(&["accelerate cannot express the plan", "without pipelines"]);
    to("torchtitan").says(&["no model of the family gpt2"]);
}

#[test]
fn no_file_is_replaced_by_mistake() {
    let place = Place::with_plan();
    let before = place.read("plan.json");
    place
        .refuses(
            &[
                "export",
                "plan.json",
                "--to",
                "deepspeed",
                "-o",
                "plan.json",
            ],
            &[2],
        )
        .says(&["is an input of this command"]);
    // Two files do not fit into one.
    place
        .refuses(
            &[
                "export",
                "plan.json",
                "--to",
                "megatron-core",
                "-o",
                "one.sh",
            ],
            &[2],
        )
        .says(&["launch.sh and args.yaml"]);
    assert_eq!(place.read("plan.json"), before);
}
