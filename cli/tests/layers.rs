//! Layers that are found: graphs without layers through every verb, and `--layers`.

#![allow(clippy::unwrap_used)]

mod support;

use support::Place;

/// The model of a plan as a text without layers.
fn erased(place: &Place) -> String {
    let plan: serde_json::Value = serde_json::from_slice(&place.read("plan.json")).unwrap();
    let text = plan["graph"].as_str().unwrap().to_string();
    let lines = text.lines().filter(|l| !l.starts_with("  layers "));
    let lines = lines.map(|l| l.rsplit_once(" layer ").map_or(l, |(op, _)| op));
    lines.collect::<Vec<_>>().join("\n")
}

fn compile<'a>(out: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec![
        "compile",
        "model.mw",
        "--cluster",
        "cpu-default",
        "--global-batch",
        "4",
        "-o",
        out,
    ];
    args.extend(more);
    args
}

#[test]
fn a_graph_without_layers_goes_through_every_verb() {
    let place = Place::with_plan();
    place.write("model.mw", erased(&place).as_bytes());
    let pins = ["--pin", "pipeline=2", "--pin", "data=2"];
    let done = place.run(&compile("found.json", &pins)).expect(0);
    let said: Vec<&str> = done.out.split_whitespace().collect();
    assert!(said.join(" ").contains("cut into 4 layers"), "{}", done.out);
    assert!(place.read("found.json") == place.read("plan.json"));
    for verb in ["check", "inspect", "simulate"] {
        place.run(&[verb, "found.json"]).expect(0);
    }
    let run = [
        "run",
        "found.json",
        "--data",
        "text.txt",
        "--steps",
        "2",
        "-o",
        "run.json",
    ];
    place.run(&run).expect(0);
    place.run(&["compare", "found.json", "run.json"]).expect(0);
}

#[test]
fn the_flag_chooses_the_layers() {
    let place = Place::with_plan();
    place.write("model.mw", erased(&place).as_bytes());
    let layers = |flag: &str| -> usize {
        let done = place
            .run(&compile("some.json", &["--layers", flag, "--json"]))
            .expect(0);
        let plan: serde_json::Value = serde_json::from_slice(&place.read("some.json")).unwrap();
        let runs = plan["stages"].as_array().unwrap().iter();
        let counts = runs.flat_map(|s| s["runs"].as_array().unwrap());
        place.run(&["check", "some.json"]).expect(0);
        assert!(done.json()["search"]["notes"].is_array());
        counts.map(|r| r["count"].as_u64().unwrap() as usize).sum()
    };
    assert_eq!(layers("declared"), 1);
    assert_eq!(layers("auto"), 4);
    assert_eq!(layers("3"), 3);
    assert_eq!(layers("6"), 6);
}

#[test]
fn impossible_layers_are_refused() {
    let place = Place::with_plan();
    place.write("model.mw", erased(&place).as_bytes());
    for flag in ["0", "-1", "some", "1.5", ""] {
        let flag = format!("--layers={flag}");
        place.refuses(&compile("x.json", &[&flag]), &[2]);
    }
    place
        .refuses(&compile("x.json", &["--layers", "99"]), &[2])
        .says(&[
            "99 layers were asked for",
            "the graph can be cut into 1 to",
            "--layers",
        ]);
    place
        .refuses(&compile("x.json", &["--layers", "4000"]), &[2])
        .says(&["at most 400"]);
    place.refuses(
        &compile("x.json", &["--layers", "declared", "--pin", "pipeline=2"]),
        &[2],
    );
}
