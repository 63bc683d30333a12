//! Every file that the user gives, broken in every way that files break: a clear error, the
//! right exit code, nothing written, no panic.

#![allow(clippy::unwrap_used)] // A test may stop where it likes.

mod support;

use serde_json::{Value, json};
use std::collections::BTreeSet;
use support::{Done, Place, assert_no_panic};

/// A kind of file, and a command that reads it under the name `bad`.
struct Kind {
    what: &'static str,
    /// The name it is given, as its ending may matter.
    name: &'static str,
    valid: Vec<u8>,
    args: Vec<&'static str>,
}

/// The ways in which a file is broken whatever is in it.
fn broken_ways(place: &Place, kind: &Kind) {
    let refuse = |codes: &[i32]| -> Done { place.refuses(&kind.args, codes) };
    refuse(&[3]).says(&[kind.name]);
    std::fs::create_dir(place.path(kind.name)).unwrap();
    refuse(&[3]).says(&[kind.name.split('.').next().unwrap()]);
    std::fs::remove_dir(place.path(kind.name)).unwrap();
    // A pipe that nobody writes to would be waited for.
    let pipe = place.path(kind.name);
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());
    let done = refuse(&[3]);
    assert!(done.err.contains("a pipe"), "{}", done.err);
    done.says(&[kind.name]);
    std::fs::remove_file(pipe).unwrap();
    for content in [
        &b""[..],
        b"  \n\t\n",
        b"\xff\xfe\x00\x01nonsense",
        b"nonsense",
        b"[1, 2",
        b"{}",
        b"[]",
        b"null",
        b"{\"a\": NaN}",
        b"{\"version\": 1e999}",
    ] {
        place.write(kind.name, content);
        refuse(&[3]).says(&[kind.name]);
    }
    let n = kind.valid.len();
    assert!(n > 20, "{}", kind.what);
    for cut in [1, n / 10, n / 4, n / 2, n - n / 10, n - 3] {
        place.write(kind.name, &kind.valid[..cut]);
        refuse(&[3]).says(&[kind.name]);
    }
    // The valid file is not refused: what was refused above was for the damage.
    place.write(kind.name, &kind.valid);
    place.run(&kind.args).expect(0);
    std::fs::remove_file(place.path(kind.name)).unwrap();
}

/// Paths of the scalars of a document.
fn scalars(value: &Value, path: &mut Vec<String>, found: &mut Vec<Vec<String>>) {
    let mut inside = |key: String, v: &Value| {
        path.push(key);
        scalars(v, path, found);
        path.pop();
    };
    match value {
        Value::Object(map) => map.iter().for_each(|(k, v)| inside(k.clone(), v)),
        Value::Array(list) => list
            .iter()
            .enumerate()
            .for_each(|(i, v)| inside(i.to_string(), v)),
        _ => found.push(path.clone()),
    }
}

fn at<'a>(value: &'a mut Value, path: &[String]) -> &'a mut Value {
    path.iter().fold(value, |v, key| match v {
        Value::Array(list) => &mut list[key.parse::<usize>().unwrap()],
        other => &mut other[key],
    })
}

/// Replaces every `stride`-th scalar by others; each result is refused or still makes sense.
fn scalars_replaced(place: &Place, kind: &Kind, codes: &[i32], stride: usize) {
    let valid: Value = serde_json::from_slice(&kind.valid).unwrap();
    let mut paths = Vec::new();
    scalars(&valid, &mut Vec::new(), &mut paths);
    let mut refused = 0;
    let others = [
        json!("words"),
        json!(-1),
        json!(1e308),
        json!(u64::MAX),
        json!([]),
        json!(null),
    ];
    for (i, path) in paths.iter().enumerate().step_by(stride) {
        let other = &others[(i / stride) % others.len()];
        let mut document = valid.clone();
        *at(&mut document, path) = other.clone();
        place.write(
            kind.name,
            serde_json::to_string_pretty(&document).unwrap().as_bytes(),
        );
        let done = place.run(&kind.args);
        assert_no_panic(&done);
        assert!(
            done.code == 0 || codes.contains(&done.code),
            "{path:?} = {other}: {}\n{}",
            done.code,
            done.err
        );
        refused += usize::from(done.code != 0);
    }
    assert!(
        refused * 2 > paths.len() / stride,
        "{refused} of {} were refused",
        paths.len() / stride
    );
    let mut document = valid.clone();
    document["surprise"] = json!(1);
    place.write(
        kind.name,
        serde_json::to_string_pretty(&document).unwrap().as_bytes(),
    );
    place.run(&kind.args).expect(3).says(&["surprise"]);
    std::fs::remove_file(place.path(kind.name)).unwrap();
}

#[test]
fn models() {
    let place = Place::new();
    let compile = Kind {
        what: "model",
        name: "bad.json",
        valid: support::CONFIG.as_bytes().to_vec(),
        args: vec![
            "compile",
            "bad.json",
            "--cluster",
            "cpu-default",
            "--global-batch",
            "4",
            "--pin",
            "data=4",
            "-o",
            "bad.plan",
        ],
    };
    broken_ways(&place, &compile);
    std::fs::remove_file(place.path("bad.plan")).unwrap();
    let valid: Value = serde_json::from_slice(&compile.valid).unwrap();
    for key in [
        "vocab_size",
        "n_positions",
        "n_embd",
        "n_layer",
        "n_head",
        "layer_norm_epsilon",
    ] {
        for value in [
            json!("words"),
            json!(-1),
            json!(0),
            json!(1e308),
            json!(u64::MAX),
            json!([]),
            json!(true),
        ] {
            let mut document = valid.clone();
            document[key] = value;
            place.write("bad.json", document.to_string().as_bytes());
            place.refuses(&compile.args, &[3]).says(&["bad.json", key]);
        }
    }
    let mut document = valid.clone();
    document["n_embed"] = json!(16);
    place.write(
        "bad.json",
        serde_json::to_string_pretty(&document).unwrap().as_bytes(),
    );
    place
        .refuses(&compile.args, &[3])
        .says(&["unknown field `n_embed`", "bad.json:"]);
    place
        .refuses(
            &[
                "compile",
                "config.json",
                "--cluster",
                "cpu-default",
                "--sequence",
                "17",
            ],
            &[3],
        )
        .says(&["sequence 17", "16 positions"]);
}

#[test]
fn graphs() {
    let place = Place::with_plan();
    let plan: Value = serde_json::from_slice(&place.read("plan.json")).unwrap();
    let text = plan["graph"].as_str().unwrap().to_string();
    let args = [
        "compile",
        "bad.mw",
        "--cluster",
        "cpu-default",
        "--global-batch",
        "4",
        "-o",
        "none.json",
    ];
    place.refuses(&args, &[3]).says(&["bad.mw"]);
    for n in (0..text.len() - 10).step_by(text.len() / 25) {
        place.write("bad.mw", &text.as_bytes()[..n]);
        place.refuses(&args, &[3]).says(&["bad.mw"]);
    }
    for (from, to) in [
        ("layer_norm", "layer_form"),
        ("f32[", "f31["),
        ("%0", "%999"),
        ("microbatch", "macrobatch"),
        ("\"bsh", "\"qqq"),
    ] {
        let edited = text.replacen(from, to, 1);
        if edited != text {
            place.write("bad.mw", edited.as_bytes());
            place.refuses(&args, &[3]).says(&["bad.mw"]);
        }
    }
}

#[test]
fn clusters() {
    let place = Place::new();
    let json = {
        let presets = place.run(&["presets", "--json"]).expect(0).json();
        presets
            .as_array()
            .unwrap()
            .iter()
            .find(|p| p["name"] == "cpu-default")
            .unwrap()["cluster"]
            .clone()
    };
    let kind = |name, valid| Kind {
        what: "cluster",
        name,
        valid,
        args: vec![
            "compile",
            "config.json",
            "--cluster",
            name,
            "--global-batch",
            "4",
            "--pin",
            "data=4",
            "-o",
            "bad.plan",
        ],
    };
    let as_json = kind("bad.json", serde_json::to_vec_pretty(&json).unwrap());
    broken_ways(&place, &as_json);
    scalars_replaced(&place, &as_json, &[3, 4], 1);
    let text =
        std::fs::read_to_string(support::repository().join("clusters/cpu-default.toml")).unwrap();
    let as_toml = kind("bad.toml", text.as_bytes().to_vec());
    let _ = std::fs::remove_file(place.path("bad.plan"));
    for n in [0, 1, 300, text.len() / 2] {
        place.write("bad.toml", &text.as_bytes()[..n]);
        place.refuses(&as_toml.args, &[3]).says(&["bad.toml"]);
    }
    for (from, to, said) in [
        ("launch_s = 5.0e-6", "launch_s = nan", "launch_s is NaN"),
        ("launch_s = 5.0e-6", "launch_s = -1.0", "launch_s is -1"),
        (
            "vector_flops_per_s = 1.0e9",
            "vector_flops_per_s = inf",
            "vector_flops_per_s is inf",
        ),
        (
            "compute_devices = 2.0",
            "compute_devices = 0.0",
            "pool.compute_devices is 0",
        ),
        (
            "devices_per_host = 4\n",
            "devices_per_host = 4294967295\n",
            "expected 1 to",
        ),
        (
            "launch_s = 5.0e-6",
            "launch_s = 5.0e-6\nlunch_s = 1.0",
            "unknown field `lunch_s`",
        ),
        (
            "launch_s = 5.0e-6",
            "launch_s = \"fast\"",
            "is \"fast\", expected a number",
        ),
        (
            "memory_efficiency = 0.6",
            "memory_efficiency = 0.0",
            "memory_efficiency is 0, expected more than 0, at most 1",
        ),
        (
            "launch_s = 5.0e-6",
            "launch_s = 5.0e-6\nsustained_share_of = { f8e4m3 = 0.9 }",
            "sustained_share_of.f8e4m3 is a share of no rate: device.peak_flops_per_s has",
        ),
    ] {
        let edited = text.replacen(from, to, 1);
        assert_ne!(edited, text, "{from}");
        place.write("bad.toml", edited.as_bytes());
        let help = "meshwright schema cluster";
        place
            .refuses(&as_toml.args, &[3])
            .says(&["bad.toml", said, help]);
    }
}

/// A cluster file's facts about other software are refused: published runs are predicted with it,
/// and plans are not.
#[test]
fn clusters_say_nothing_of_software() {
    let place = Place::new();
    let file = support::repository().join("clusters/cpu-default.toml");
    let text = std::fs::read_to_string(file).unwrap();
    place.write(
        "c.toml",
        format!("{text}\n[software]\nname = \"x\"\n").as_bytes(),
    );
    let args = ["compile", "config.json", "--cluster", "c.toml"];
    place
        .refuses(&args, &[3])
        .says(&["c.toml", "unknown field `software`"]);
}

/// A mistake inside a list of a cluster file is named by key, index and line.
#[test]
fn places_inside_lists_are_named() {
    let place = Place::new();
    let text = place.run(&["presets", "dgx-h100"]).expect(0).out;
    let json = place.run(&["presets", "dgx-h100", "--json"]).expect(0).out;
    let said = |name: &str, text: &str, from: &str, to: &str, words: &[&str]| {
        // The last one: of the third protocol of the second level.
        let at = text.rfind(from).unwrap();
        let edited = format!("{}{to}{}", &text[..at], &text[at + from.len()..]);
        place.write(name, edited.as_bytes());
        let args = ["compile", "config.json", "--cluster", name];
        let line = text[..at].matches('\n').count() + 1;
        let done = place.refuses(&args, &[3]).says(words);
        assert!(
            done.err.contains(&format!("{name}:{line}:")),
            "{}",
            done.err
        );
    };
    let step = "ring_step_s = 0.000042658000000000004";
    let protocol = "levels[1].protocols[2]";
    let key = format!("{protocol}.ring_step_s");
    said(
        "c.toml",
        &text,
        step,
        "ring_step_s = \"x\"",
        &[&format!("`{key}`: is \"x\", expected a number")],
    );
    said(
        "c.toml",
        &text,
        step,
        "ring_step_s = -1.0",
        &[&format!("{key} is -1")],
    );
    said(
        "c.toml",
        &text,
        step,
        "ring_stp_s = 1.0",
        &[
            &format!("`{protocol}.ring_stp_s`: unknown field"),
            "did you mean `ring_step_s`?",
        ],
    );
    let step = "\"ring_step_s\": 0.000042658000000000004";
    said(
        "c.json",
        &json,
        step,
        "\"ring_step_s\": -1.0",
        &[&format!("{key} is -1")],
    );
    // A key of a table that is missing is said with the table.
    let without = text.replacen("name = \"LL\"\n", "", 1);
    place.write("c.toml", without.as_bytes());
    let args = ["compile", "config.json", "--cluster", "c.toml"];
    place
        .refuses(&args, &[3])
        .says(&["`levels[0].protocols[0]`: missing field `name`"]);
}

/// The short file of the documents makes a plan, with guesses that are named; of one with less all
/// that is missing is said at once.
#[test]
fn the_short_cluster_file_of_the_documents_is_whole() {
    let place = Place::new();
    let page = std::fs::read_to_string(support::repository().join("docs/cost_model.md")).unwrap();
    let is_whole = |block: &&str| block.starts_with("\nversion = ");
    let text = page.split("```toml").find(is_whole).unwrap();
    let text = text.split("```").next().unwrap();
    place.write("c.toml", text);
    let args = ["compile", "config.json", "--cluster", "c.toml"];
    let done = place.run(&args).expect(0).says(&[
        "warning: c.toml does not say device.matmul_half_size, device.matmul_efficiency, \
         levels[0].half_bytes, levels[1].half_bytes, sources: they are guessed",
    ]);
    assert!(
        done.out
            .contains("Network: ethernet, 1 x 10 Gb/s card a host for 4 devices"),
        "{}",
        done.out
    );
    // Devices that add nothing are said with the prediction that they put into doubt.
    let mut below = done.out.lines();
    assert!(below.any(|l| l.starts_with("Predicted: ")), "{}", done.out);
    let note = "Note: the 8 ranks along axis x of stage 0 all do the same work: ";
    assert!(below.next().unwrap().starts_with(note), "{}", done.out);
    let plan: serde_json::Value = serde_json::from_slice(&place.read("plan.json")).unwrap();
    let sources = &plan["cluster"]["sources"];
    assert!(
        sources["levels.pcie.half_bytes"]
            .as_str()
            .unwrap()
            .contains("guess")
    );
    std::fs::remove_file(place.path("plan.json")).unwrap();
    let is_left_out = |line: &&str| {
        ["launch_s", "memory_", "latency_s", "efficiency", "n_hosts"]
            .iter()
            .any(|key| line.starts_with(key))
    };
    let less: Vec<&str> = text.lines().filter(|line| !is_left_out(line)).collect();
    place.write("c.toml", less.join("\n"));
    place.refuses(&args, &[3]).says(&[
        "c.toml: 10 fields are missing:",
        "`n_hosts`",
        "`device`: `memory_bytes`, `memory_reserved_bytes`, `memory_bandwidth_bytes_per_s`, \
         `memory_efficiency`, `launch_s`",
        "`levels[0]`: `latency_s`, `efficiency`",
        "`levels[1]`: `latency_s`, `efficiency`",
        "docs/cost_model.md has a short file that is whole",
    ]);
}

/// Bandwidths in GB/s and times in microseconds make plans that nobody wants.
#[test]
fn figures_in_other_units_are_warned_of() {
    let place = Place::new();
    let text = place.run(&["presets", "dgx-h100"]).expect(0).out;
    let compile = |from: &str, to: &str| {
        let edited = text.replacen(from, to, 1);
        place.write("cluster.toml", edited.as_bytes());
        let args = ["compile", "config.json", "--cluster", "cluster.toml"];
        place.run(&args).expect(0).err
    };
    assert_eq!(compile("", ""), "");
    let said = compile("launch_s = 0.000004", "launch_s = 4.0");
    assert!(said.contains("device.launch_s = 4:"), "{said}");
    let bandwidth = "bandwidth_bytes_per_s = 450000000000.0";
    let said = compile(bandwidth, "bandwidth_bytes_per_s = 450.0");
    assert!(
        said.contains("levels[0].bandwidth_bytes_per_s = 450:"),
        "{said}"
    );
}

#[test]
fn plans() {
    let place = Place::with_plan();
    let valid = place.read("plan.json");
    let kind = Kind {
        what: "plan",
        name: "bad.json",
        valid,
        args: vec!["check", "bad.json"],
    };
    broken_ways(&place, &kind);
    scalars_replaced(&place, &kind, &[3, 5], 7);
}

/// Plans, runs and clusters are told from each other where one is given for another.
#[test]
fn documents_of_another_kind_are_called_what_they_are() {
    let place = Place::with_plan();
    let presets = place.run(&["presets", "--json"]).expect(0).json();
    place.write("cluster.json", presets[0]["cluster"].to_string().as_bytes());
    for verb in ["inspect", "check", "simulate"] {
        let said = ["this is a cluster; expected a plan"];
        place.refuses(&[verb, "cluster.json"], &[3]).says(&said);
    }
    let args = ["compile", "config.json", "--cluster", "plan.json"];
    let said = ["this is a plan; expected a cluster"];
    place
        .refuses(&[&args[..], &["-o", "p.json"]].concat(), &[3])
        .says(&said);
    let args = ["compare", "plan.json", "plan.json"];
    place
        .refuses(&args, &[3])
        .says(&["this is a plan; expected a run"]);
}

#[test]
fn a_plan_edited_into_nonsense_is_refused_by_every_verb() {
    let place = Place::with_plan();
    let valid: Value = serde_json::from_slice(&place.read("plan.json")).unwrap();
    let mut edits: Vec<(&str, Value)> = Vec::new();
    let mut edit = |said: &'static str, change: &dyn Fn(&mut Value)| {
        let mut plan = valid.clone();
        change(&mut plan);
        assert!(plan != valid, "{said}");
        edits.push((said, plan));
    };
    edit("version", &|p| p["version"] = json!(99));
    edit("microbatch", &|p| p["microbatch"] = json!(3));
    edit("stages", &|p| p["stages"] = json!([]));
    edit("layers", &|p| {
        p["stages"][0]["runs"][0]["count"] = json!(1000)
    });
    edit("strategies", &|p| {
        p["stages"][0]["runs"][0]["strategy"] = json!(77)
    });
    edit("mesh", &|p| {
        p["stages"][1]["mesh"]["devices"]["first_rank"] = json!(0)
    });
    edit("cluster", &|p| {
        p["cluster"]["device"]["launch_s"] = json!(-1.0)
    });
    edit("strategy", &|p| p["layer_strategies"][0]["ops"] = json!({}));
    edit("transfer", &|p| p["transfers"] = json!({}));
    edit("graph", &|p| p["graph"] = json!("graph \"x\" {}"));
    for (said, plan) in edits {
        place.write(
            "bad.json",
            serde_json::to_string_pretty(&plan).unwrap().as_bytes(),
        );
        for args in [
            &["check", "bad.json"][..],
            &["inspect", "bad.json"],
            &["simulate", "bad.json", "--trace", "trace.json"],
            &["lower", "bad.json", "-o", "program.txt"],
            &["run", "bad.json", "--data", "text.txt"],
            &["compare", "bad.json", "bad.json"],
        ] {
            place.refuses(args, &[5]).says(&["bad.json", said]);
        }
    }
}

#[test]
fn a_rank_that_no_mesh_has_is_refused() {
    let place = Place::with_plan();
    let plan: Value = serde_json::from_slice(&place.read("plan.json")).unwrap();
    let stages = plan["stages"].as_array().unwrap().iter();
    let devices = |s: &Value| s["mesh"]["devices"]["n_devices"].as_u64().unwrap();
    let n: u64 = stages.map(devices).sum();
    for rank in [n, 4_000_000_000] {
        let args = [
            "lower",
            "plan.json",
            "--rank",
            &rank.to_string(),
            "-o",
            "p.txt",
        ];
        let said = [
            &format!("plan.json: there is no rank {rank}: the plan has {n} ranks")[..],
            &format!("name a rank from 0 to {}", n - 1),
        ];
        place.refuses(&args, &[2]).says(&said);
    }
    let args = ["lower", "plan.json", "-o", "plan.json"];
    place.refuses(&args, &[2]).says(&["plan.json: is an input"]);
}

/// A plan that another version made was not edited: what is told is to make it again.
#[test]
fn a_plan_of_another_version_is_called_so() {
    let place = Place::with_plan();
    let valid: Value = serde_json::from_slice(&place.read("plan.json")).unwrap();
    let with = |key: &str, value: u64| {
        let mut plan = valid.clone();
        plan[key] = json!(plan[key].as_u64().unwrap() + value);
        plan
    };
    for plan in [with("passes", 1), with("version", 7)] {
        place.write("bad.json", plan.to_string().as_bytes());
        for verb in ["check", "inspect", "simulate"] {
            let said = [
                "bad.json: the plan was made by another version of Meshwright",
                "make the plan again",
            ];
            let done = place.refuses(&[verb, "bad.json"], &[5]).says(&said);
            assert!(!done.err.contains("edited"), "{}", done.err);
        }
    }
    // A key that this version does not know may be one of the other one.
    let mut plan = with("version", 1);
    plan["news"] = json!(1);
    place.write("bad.json", plan.to_string().as_bytes());
    place.refuses(&["inspect", "bad.json"], &[3]).says(&[
        "unknown field",
        "news",
        "another version of Meshwright",
    ]);
    let mut plan = valid.clone();
    plan["news"] = json!(1);
    place.write("bad.json", plan.to_string().as_bytes());
    let done = place.refuses(&["inspect", "bad.json"], &[3]);
    assert!(!done.err.contains("another version"), "{}", done.err);
}

/// A misspelt key is no key that was left out.
#[test]
fn unknown_keys_are_refused_wherever_they_stand_in_a_plan() {
    let place = Place::with_plan();
    let valid: Value = serde_json::from_slice(&place.read("plan.json")).unwrap();
    let mut kinds = BTreeSet::new();
    for path in objects(&valid) {
        let names = path.iter().filter(|key| key.parse::<usize>().is_err());
        if !kinds.insert(names.cloned().collect::<Vec<_>>()) {
            continue;
        }
        let mut plan = valid.clone();
        at(&mut plan, &path)["news"] = json!(1);
        place.write("bad.json", plan.to_string().as_bytes());
        let done = place.refuses(&["inspect", "bad.json"], &[3]);
        assert!(
            done.err.contains("news"),
            "{}: {}",
            path.join("."),
            done.err
        );
    }
    assert!(kinds.len() > 20, "{kinds:?}");
}

/// The places of all objects in `value`, the outermost first.
fn objects(value: &Value) -> Vec<Vec<String>> {
    let (here, parts): (Vec<Vec<String>>, Vec<(String, &Value)>) = match value {
        Value::Object(map) => (
            vec![Vec::new()],
            map.iter().map(|(key, part)| (key.clone(), part)).collect(),
        ),
        Value::Array(list) => (
            Vec::new(),
            (list.iter().enumerate())
                .map(|(i, part)| (i.to_string(), part))
                .collect(),
        ),
        _ => (Vec::new(), Vec::new()),
    };
    let inside = parts.into_iter().flat_map(|(key, part)| {
        let below = objects(part).into_iter();
        below.map(move |path| [vec![key.clone()], path].concat())
    });
    here.into_iter().chain(inside).collect()
}

/// 300 digits tell nobody anything.
#[test]
fn figures_out_of_all_range_are_shown_with_an_exponent() {
    let place = Place::new();
    let text = place.run(&["presets", "dgx-h100"]).expect(0).out;
    let edited = text.replacen("launch_s = 0.000004", "launch_s = 1e300", 1);
    assert_ne!(edited, text);
    place.write("bad.toml", edited.as_bytes());
    let args = ["compile", "config.json", "--cluster", "bad.toml"];
    let said = ["device.launch_s is 1e300, expected 0 to 1e30"];
    place.refuses(&args, &[3]).says(&said);
    let args = ["compile", "config.json", "--cluster", "dgx-h100", "--eps"];
    place
        .refuses(&[&args[..], &["-1e300"]].concat(), &[2, 3])
        .says(&["-1e300"]);
}

/// Names that reports would leave a gap for.
#[test]
fn names_in_cluster_files_are_not_empty() {
    let place = Place::new();
    let text = place.run(&["presets", "dgx-h100"]).expect(0).out;
    let args = ["compile", "config.json", "--cluster", "bad.toml"];
    let refuse = |file: &str, said: &str| {
        place.write("bad.toml", file.as_bytes());
        place.refuses(&args, &[3]).says(&["bad.toml", said]);
    };
    let name = text.lines().find(|l| l.starts_with("name = ")).unwrap();
    refuse(&text.replacen(name, "name = \"\"", 1), "name is empty");
}

/// Advice against a lack of memory was tried, and what leaves no plan is named.
#[test]
fn where_there_is_no_plan_the_conflict_is_named_and_the_ways_out_work() {
    let place = Place::new();
    let text = place.run(&["presets", "dgx-h100"]).expect(0).out;
    let of = |key: &str| text.lines().find(|l| l.starts_with(key)).unwrap();
    let small = text.replacen(of("memory_bytes = "), "memory_bytes = 600000", 1);
    let reserved = of("memory_reserved_bytes");
    let small = small.replacen(reserved, "memory_reserved_bytes = 0", 1);
    place.write("small.toml", small.as_bytes());
    let asked = [
        "compile",
        "config.json",
        "--cluster",
        "small.toml",
        "--global-batch",
        "64",
        "--pin",
        "microbatch=64",
        "--pin",
        "recompute=none",
    ];
    let limit = ["--ways-out", "600"];
    let said = place
        .refuses(&[&asked[..], &limit].concat(), &[4])
        .says(&["out of memory", "What leaves no plan together: "])
        .says(&["1 host with 8 devices; training in f32; the pin microbatch=64; the pin"])
        .err;
    let said = support::flat(&said);
    // Filling the memory to the last byte is no way out here, and is not named as one.
    let (_, help) = said.split_once("help: ").unwrap();
    assert!(help.starts_with("each of these was tried and has a plan: "));
    assert!(!help.contains("--headroom"), "{help}");
    let ways: [(&str, &[&str]); 4] = [
        ("no --pin microbatch=64 (", &asked[..6]),
        ("no --pin recompute=none (", &asked[..8]),
        ("--precision bf16 (", &[]),
        ("--hosts 2 (", &[]),
    ];
    for (words, args) in ways {
        assert!(help.contains(words), "`{words}` is not in: {help}");
        let args: Vec<&str> = match args.is_empty() {
            false => args.to_vec(),
            true => {
                let change = words.trim_end_matches(" (").split(' ');
                asked.into_iter().chain(change).collect()
            }
        };
        place.run(&args).expect(0);
        std::fs::remove_file(place.path("plan.json")).unwrap();
    }
    // Nothing is advised that was not tried.
    place
        .refuses(&[&asked[..], &["--ways-out", "0"]].concat(), &[4])
        .says(&["help: --ways-out 60 tries"]);
}

/// A step that takes more samples than the data has is told how often it repeats them.
#[test]
fn a_step_that_repeats_the_data_is_warned_of() {
    let place = Place::with_plan();
    let run = |file: &str| {
        let args = ["run", "plan.json", "--data", file, "--steps", "1"];
        place.run(&args).expect(0)
    };
    assert!(!run("text.txt").err.contains("repeats"));
    // 36 tokens for training are two samples of 16, of which a step takes four.
    place.write("short.txt", [b'a'; 40]);
    run("short.txt").says(&[
        "warning: every step repeats the data 2.0 times: it takes 4 samples of 16 tokens, \
         and the part of short.txt for training has 2 of them",
    ]);
}

/// A file that is no JSON may be meant for any of the models that there are.
#[test]
fn all_model_types_are_listed_where_a_configuration_is_broken() {
    let place = Place::new();
    place.write("bad.json", "{");
    let args = ["compile", "bad.json", "--cluster", "cpu-default"];
    let done = place.refuses(&args, &[3]);
    for model_type in import::MODEL_TYPES {
        assert!(done.err.contains(model_type), "{model_type}: {}", done.err);
    }
}

#[test]
fn data() {
    let place = Place::with_plan();
    let run = |file: &str, more: &[&str]| {
        let mut args = vec!["run", "plan.json", "--data", file, "--steps", "1"];
        args.extend(more);
        place.refuses(&args, &[3])
    };
    run("none.txt", &[]).says(&["none.txt"]);
    run("texts.txt", &[]).says(&["texts.txt", "did you mean `text.txt`?"]);
    std::fs::create_dir(place.path("folder")).unwrap();
    run("folder", &[]).says(&["folder", "not a regular file"]);
    place.write("empty.txt", b"");
    run("empty.txt", &[]).says(&["empty.txt", "empty"]);
    place.write("short.txt", b"abc");
    run("short.txt", &[]).says(&["short.txt", "tokens"]);
    place.write("latin.txt", [&[b'a'; 100][..], b"\xe9t\xe9"].concat());
    run("latin.txt", &[]).says(&["latin.txt", "not UTF-8 at byte 100"]);
    place.write("odd.bin", [7u8; 1001]);
    run("odd.bin", &[]).says(&["odd.bin", "truncated"]);
    place.write("huge.bin", [0xffu8; 4000]);
    run("huge.bin", &[]).says(&[
        "huge.bin",
        "not below the vocabulary size 256",
        "--tokenizer",
    ]);
    run(
        "text.txt",
        &["--validation-fraction", "0", "--validate-every", "1"],
    )
    .says(&["validation"]);
    for content in [&b""[..], b"{", b"{}", b"[1]", b"\xff\xff"] {
        place.write("tokenizer.json", content);
        run("text.txt", &["--tokenizer", "tokenizer.json"]).says(&["tokenizer.json"]);
    }
    run("text.txt", &["--tokenizer", "none.json"]).says(&["none.json"]);
}

/// Pipes that nobody writes to, in the place of files that are read: they would be waited for. One
/// that somebody writes to is read where a file is read once.
#[cfg(unix)]
#[test]
fn pipes_are_refused_or_read_and_never_waited_for() {
    let place = Place::with_plan();
    let pipe = |name: &str| {
        let mut made = std::process::Command::new("mkfifo");
        assert!(made.arg(place.path(name)).status().unwrap().success());
    };
    let run = ["run", "plan.json", "--steps", "1", "--data"];
    pipe("pipe");
    let refused = |args: &[&str], words: &[&str]| {
        let done = place.refuses(&[&run[..], args].concat(), &[3]);
        done.says(words);
    };
    refused(&["pipe"], &["pipe", "not a regular file"]);
    refused(&["text.txt", "--tokenizer", "pipe"], &["pipe", "nobody"]);
    std::fs::create_dir(place.path("weights")).unwrap();
    place.write("weights/config.json", support::CONFIG);
    pipe("weights/model.safetensors");
    let weights = ["text.txt", "--weights", "weights/model.safetensors"];
    refused(&weights, &["model.safetensors", "no regular file"]);
    let state = ["text.txt", "--checkpoint", "state"];
    place.run(&[&run[..], &state].concat()).expect(0);
    let verify = ["checkpoint", "verify", "state"];
    for (name, code) in [("rank-0.safetensors", 5), ("manifest.json", 5)] {
        let name = format!("state/0001-step-1/{name}");
        std::fs::remove_file(place.path(&name)).unwrap();
        pipe(&name);
        let done = place.run(&verify).expect(code);
        assert!(done.out.contains("no regular file"), "{}", done.out);
    }
    let check = |script: &str| {
        let mut bash = std::process::Command::new("bash");
        let bash = bash.args(["-c", script, "check", env!("CARGO_BIN_EXE_meshwright")]);
        let output = bash.current_dir(place.path(".")).output().unwrap();
        let words = support::said(&output);
        (output.status.code(), words)
    };
    for from in [
        "<(cat plan.json)",
        "<(sleep 3; cat plan.json)",
        "/dev/stdin < <(cat plan.json)",
        "/dev/stdin < plan.json",
    ] {
        let (code, words) = check(&format!("\"$1\" check {from}"));
        assert_eq!(code, Some(0), "{from}: {words}");
    }
    let (code, words) = check("\"$1\" check /dev/zero");
    assert_eq!(code, Some(3), "{words}");
    assert!(
        words.contains("/dev/zero: it is a pipe or a device"),
        "{words}"
    );
}

#[test]
fn weights() {
    let place = Place::with_plan();
    let run = |more: &[&str]| {
        let mut args = vec!["run", "plan.json", "--data", "text.txt", "--steps", "1"];
        args.extend(more);
        place.refuses(&args, &[3])
    };
    place
        .run(&[
            "run",
            "plan.json",
            "--data",
            "text.txt",
            "--steps",
            "1",
            "--config",
            "config.json",
            "--save",
            "good.safetensors",
            "-o",
            "good.json",
        ])
        .expect(0);
    let good = place.read("good.safetensors");
    // The path is blamed, not the configuration that would lie beside it.
    let expected = ["a .safetensors file", "a folder with model.safetensors"];
    for path in ["none.safetensors", "nowhere", "text.txt"] {
        let refused = run(&["--weights", path]).says(&[&format!("--weights {path}")]);
        let refused = refused.says(&expected);
        assert!(!refused.err.contains("config"), "{}", refused.err);
    }
    std::fs::create_dir(place.path("folder")).unwrap();
    run(&["--weights", "folder"])
        .says(&["--weights folder", "neither model.safetensors nor"])
        .says(&expected);
    place.write("folder/model.safetensors", &good);
    run(&["--weights", "folder"]).says(&["folder/config.json", "name it with --config"]);
    std::fs::remove_file(place.path("folder/model.safetensors")).unwrap();
    run(&["--weights", "folder", "--config", "config.json"]).says(&["folder"]);
    let mut huge_header = good.clone();
    huge_header[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let mut not_a_number = good.clone();
    let n = good.len();
    not_a_number[n - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    for bytes in [
        &b""[..],
        b"nonsense",
        &good[..7],
        &good[..100],
        &good[..n / 2],
        &good[..n - 1],
        &huge_header,
        &not_a_number,
    ] {
        place.write("bad.safetensors", bytes);
        run(&["--weights", "bad.safetensors"]).says(&["bad.safetensors"]);
    }
    let text = String::from_utf8_lossy(&good).into_owned();
    let renamed = text
        .split('"')
        .find(|name| name.ends_with("wte.weight"))
        .unwrap()
        .to_string();
    let mut bytes = good.clone();
    let place_of = good
        .windows(renamed.len())
        .position(|w| w == renamed.as_bytes())
        .unwrap();
    bytes[place_of] = b'X';
    place.write("bad.safetensors", &bytes);
    run(&["--weights", "bad.safetensors"]).says(&["bad.safetensors", "missing"]);
    // The state of another form is no checkpoint, and a missing one says so.
    run(&["--resume", "good.safetensors"]).says(&["good.safetensors"]);
    run(&["--resume", "none"]).says(&["--resume none: there is no", "run --checkpoint"]);
    run(&["--resume", "folder"]).says(&["the folder has no checkpoint", "run --checkpoint"]);
}

#[test]
fn checkpoints_of_other_models() {
    let place = Place::with_plan();
    let run = ["run", "plan.json", "--data", "text.txt", "--steps", "1"];
    let with = |more: &[&'static str]| [&run[..], more].concat();
    place.run(&with(&["--checkpoint", "state"])).expect(0);
    place
        .run(&with(&["--resume", "state", "--schedule", "constant"]))
        .expect(0);
    let says = [
        "state/0001-step-1: a checkpoint of another model: ",
        "leave --resume out",
    ];
    for (from, to, said) in [
        (
            "\"n_embd\": 16",
            "\"n_embd\": 32",
            "[256,16] there, [256,32] in the plan (vocab_size, n_embd of",
        ),
        (
            "\"n_layer\": 2",
            "\"n_layer\": 3",
            "op of `h.2.ln_1.weight` is none there, state in the plan (n_layer of",
        ),
        (
            "\"n_layer\": 2",
            "\"n_layer\": 1",
            "op of `h.1.ln_1.weight` is state there, none in the plan (n_layer of",
        ),
    ] {
        place.write("other.json", support::CONFIG.replace(from, to).as_bytes());
        let compile = ["compile", "other.json", "--cluster", "cpu-default"];
        let more = ["--global-batch", "4", "--pin", "data=4"];
        place.run(&[&compile[..], &more[..]].concat()).expect(0);
        place
            .refuses(
                &with(&["--resume", "state", "--schedule", "constant"]),
                &[3],
            )
            .says(&says)
            .says(&[said]);
    }
    // The same model under another optimizer has other states.
    let compile = ["compile", "config.json", "--cluster", "cpu-default"];
    let sgd = ["--optimizer", "sgd", "--global-batch", "4"];
    place.run(&[&compile[..], &sgd[..]].concat()).expect(0);
    let resumed = with(&["--resume", "state", "--schedule", "constant"]);
    place.refuses(&resumed, &[3]).says(&[
        "state/0001-step-1: a checkpoint of another model or optimizer: the plan has no state `",
    ]);
}

#[test]
fn runs() {
    let place = Place::with_plan();
    place
        .run(&[
            "run",
            "plan.json",
            "--data",
            "text.txt",
            "--steps",
            "2",
            "--profile",
            "1",
        ])
        .expect(0);
    let kind = Kind {
        what: "run",
        name: "bad.json",
        valid: place.read("run.json"),
        args: vec!["compare", "plan.json", "bad.json"],
    };
    broken_ways(&place, &kind);
    scalars_replaced(&place, &kind, &[3], 23);
    place
        .run(&[
            "compile",
            "config.json",
            "--cluster",
            "cpu-default",
            "--global-batch",
            "4",
            "--pin",
            "data=4",
            "-o",
            "other.json",
        ])
        .expect(0);
    place
        .refuses(&["compare", "other.json", "run.json"], &[3])
        .says(&["is a run of the plan"])
        .says(&["its plan is plan.json: meshwright compare plan.json run.json"]);
    // Where that is not at hand, its name cannot be said.
    std::fs::remove_file(place.path("plan.json")).unwrap();
    place
        .refuses(&["compare", "other.json", "run.json"], &[3])
        .says(&["compare a run with the plan it was made by"]);
}

#[test]
fn instances() {
    let place = Place::new();
    let valid = br#"{"problem":{"name":"two","nodes":{"intervals":[[0,1],[0,1]],"costs":[[1,0],[2,0]],"usages":[[5,5],[5,5]]},"edges":{"nodes":[[0,1]],"costs":[[0,9,9,5]]},"usage_limit":10}}"#;
    let kind = Kind {
        what: "instance",
        name: "bad.json",
        valid: valid.to_vec(),
        args: vec!["solve", "bad.json"],
    };
    broken_ways(&place, &kind);
    let text = String::from_utf8(valid.to_vec()).unwrap();
    for (from, to) in [
        ("[0,1]]}", "[0,7]]}"),
        ("[[1,0],", "[[1,0,3],"),
        ("[0,9,9,5]", "[0,9,9]"),
        ("\"usages\"", "\"usage\""),
        ("10}}", "-10}}"),
        ("[1,0]", "[1,\"x\"]"),
    ] {
        let edited = text.replacen(from, to, 1);
        if edited != text {
            place.write("bad.json", edited.as_bytes());
            place.refuses(&kind.args, &[3]).says(&["bad.json"]);
        }
    }
    place.write("bad.json.gz", b"\x1f\x8b\x08nonsense");
    place
        .refuses(&["solve", "bad.json.gz"], &[3])
        .says(&["bad.json.gz"]);
}

#[test]
fn outputs_that_cannot_be_written_are_refused_before_the_work() {
    let place = Place::with_plan();
    place
        .refuses(
            &[
                "compile",
                "config.json",
                "--cluster",
                "cpu-default",
                "-o",
                "nowhere/plan.json",
            ],
            &[3],
        )
        .says(&["nowhere"]);
    place
        .refuses(
            &[
                "run",
                "plan.json",
                "--data",
                "text.txt",
                "-o",
                "nowhere/run.json",
            ],
            &[3],
        )
        .says(&["nowhere"]);
    place
        .refuses(
            &["simulate", "plan.json", "--trace", "nowhere/trace.json"],
            &[3],
        )
        .says(&["nowhere"]);
    std::fs::create_dir(place.path("folder")).unwrap();
    place
        .refuses(
            &[
                "compile",
                "config.json",
                "--cluster",
                "cpu-default",
                "-o",
                "folder",
            ],
            &[3],
        )
        .says(&["folder"]);
}

#[test]
fn a_run_that_does_not_fit_this_machine_is_refused() {
    let place = Place::new();
    place
        .run(&[
            "compile",
            "config.json",
            "--cluster",
            "dgx-h100",
            "--hosts",
            "256",
            "--global-batch",
            "4096",
            "--pin",
            "data=2048",
        ])
        .expect(0);
    place
        .refuses(&["run", "plan.json", "--data", "text.txt"], &[6])
        .says(&["2048 ranks"]);
}

const RUNS: &str = "row_id,gpu,gpus_total,gpus_per_node,interconnect,framework,layers,hidden,heads,ffn_hidden,vocab,seq_len,global_batch,micro_batch,tp,pp,dp,cp,zero_stage,recompute,precision,mlp_type
R1,A100-80GB-SXM4,2,8,NVLink3+NVSwitch,Megatron-LM,2,1024,16,4096,51200,1024,8,2,2,1,1,1,0,full,fp16,gelu
";

#[test]
fn tables_of_runs() {
    let place = Place::new();
    let args = ["predict", "rows.csv", "-o", "out.csv"];
    for bytes in [&b""[..], b" \n", b"\xff\xfe\x00\x01nonsense"] {
        place.write("rows.csv", bytes);
        place
            .refuses(&args, &[3])
            .says(&["rows.csv", "comma-separated"]);
    }
    place.write("rows.csv", b"gpu,layers\nA100,2\n");
    place.refuses(&args, &[3]).says(&["no column gpus_total"]);
    // A cell that makes no sense is named; a table without a row to predict is no table of runs.
    place.write("rows.csv", RUNS.replace(",full,", ",foo,").as_bytes());
    place
        .refuses(&args, &[4])
        .says(&["none of 1 run ", "`recompute` is `foo`"])
        .says(&["nothing was written to out.csv", "docs/published.md"]);
    assert!(!place.path("out.csv").exists());
    let header = RUNS.lines().next().unwrap();
    place.write("rows.csv", header.as_bytes());
    place.refuses(&args, &[3]).says(&["no rows"]);
    let two = format!(
        "{RUNS}{}",
        RUNS.lines().nth(1).unwrap().replace("fp16", "int8")
    );
    place.write("rows.csv", two.as_bytes());
    let done = place.run(&args).expect(0);
    assert!(done.out.contains("1 of 2 runs predicted"), "{}", done.out);
    assert!(
        done.out
            .contains("1 not predicted (R1): not supported: the precision int8; known are fp32")
    );
    // A column that is nearly one that plans are made of is refused, others are named once.
    let with = |name: &str, value: &str| {
        let mut lines = RUNS.lines();
        let (header, row) = (lines.next().unwrap(), lines.next().unwrap());
        format!("{header},{name}\n{row},{value}\n").replace("micro_batch", "weather")
    };
    for (name, column) in [
        ("micro_bacth", "micro_batch"),
        ("mbs", "micro_batch"),
        ("note", "notes"),
        ("vp", "vpp"),
    ] {
        place.write("rows.csv", with(name, "2").as_bytes());
        let said = format!("`{name}` (did you mean `{column}`?)");
        let said = [said.as_str(), "docs/published.md"];
        place.refuses(&args, &[3]).says(&said);
    }
    // So is another word for a column.
    let renamed = RUNS.replace("zero_stage", "zero");
    place.write(
        "rows.csv",
        renamed.replace("recompute", "recomputation").as_bytes(),
    );
    place.refuses(&args, &[3]).says(&[
        "`zero` (did you mean `zero_stage`?)",
        "`recomputation` (did you mean `recompute`?)",
    ]);
    place.write("rows.csv", with("seed", "x").as_bytes());
    let done = place.run(&args).expect(0);
    let said = "note: rows.csv: columns that are not read: `weather`, `seed`";
    assert_eq!(done.err.trim(), said);
    // An unknown name is answered with the known ones.
    place.write(
        "rows.csv",
        RUNS.replace("A100-80GB-SXM4", "P100").as_bytes(),
    );
    place
        .refuses(&args, &[4])
        .says(&["the device `P100`; known are", "V100, A100"]);
    place.write(
        "rows.csv",
        RUNS.replace("NVLink3+NVSwitch", "PCIe").as_bytes(),
    );
    place
        .refuses(&args, &[4])
        .says(&["the interconnect `PCIe`; known are", "NVLink4"]);
    // A word that speaks against the board, and hosts that nobody builds.
    place.write(
        "rows.csv",
        RUNS.replace("A100-80GB-SXM4", "A100-PCIE-80GB").as_bytes(),
    );
    place
        .refuses(&args, &[4])
        .says(&["it says PCIe", "a100-pcie-80gb"]);
    place.write(
        "rows.csv",
        RUNS.replace(",2,8,NVLink3", ",2,64,NVLink3").as_bytes(),
    );
    place
        .refuses(&args, &[4])
        .says(&["`gpus_per_node` is 64", "8 at most"]);
    // A model that differs from its cell is in `assumed`.
    let assumed = |from: &str, to: &str| {
        place.write("rows.csv", RUNS.replace(from, to).as_bytes());
        place.run(&args).expect(0);
        let text = String::from_utf8(place.read("out.csv")).unwrap();
        let table = published::csv::parse(&text).unwrap();
        let i = table.header.iter().position(|h| h == "assumed").unwrap();
        table.records[0][i].clone()
    };
    assert_eq!(assumed("fp16", "fp16"), "kv_heads=16 sequence_parallel=no");
    let volta =
        "V100-32GB,2,8,NVLink2,Megatron-LM,2,1024,16,4096,51200,1024,8,2,2,1,1,1,0,full,bf16";
    let ampere = "A100-80GB-SXM4,2,8,NVLink3+NVSwitch,Megatron-LM,2,1024,16,4096,51200,1024,8,2,2,1,1,1,0,full,fp16";
    assert_eq!(
        assumed(ampere, volta),
        "kv_heads=16 sequence_parallel=no bf16_rate=f32"
    );
    // Columns of published tables are known, though nothing reads them.
    place.write("rows.csv", RUNS.replace("row_id", "url").as_bytes());
    assert_eq!(place.run(&args).expect(0).err, "");
}

#[test]
fn predictions_that_no_gpu_has_memory_for_say_so() {
    let place = Place::new();
    let large = RUNS.replace(",2,1024,16,4096,", ",24,12288,96,49152,");
    place.write("rows.csv", large.as_bytes());
    let done = place
        .run(&["predict", "rows.csv", "-o", "out.csv"])
        .expect(0);
    let said = "1 predicted with more memory than the GPU has (R1): `fits` is no";
    assert!(done.out.contains(said), "{}", done.out);
    let text = String::from_utf8(place.read("out.csv")).unwrap();
    let table = published::csv::parse(&text).unwrap();
    let cell = |column: &str| {
        let i = table.header.iter().position(|h| h == column).unwrap();
        table.records[0][i].as_str()
    };
    assert_eq!((cell("device_mem_gb"), cell("fits")), ("85.899", "no"));
    // A network that is not the one that was named.
    let hosts = RUNS
        .replace(
            ",2,8,NVLink3+NVSwitch,",
            ",16,8,NVLink3+NVSwitch; 8x 25Gb/s Ethernet,",
        )
        .replace(",1024,8,2,2,1,1,1,0,", ",1024,16,2,2,1,8,1,0,");
    place.write("rows.csv", hosts.as_bytes());
    let done = place
        .run(&["predict", "rows.csv", "-o", "out.csv"])
        .expect(0);
    let said = "1 predicted with a network that `interconnect` does not name (R1): `assumed`";
    assert!(done.out.contains(said), "{}", done.out);
}

/// Figures that other figures of the plan contradict, and pins that are none.
#[test]
fn plans_whose_figures_disagree_are_refused() {
    let place = Place::with_plan();
    place.run(&["check", "plan.json"]).expect(0);
    let plan: serde_json::Value = serde_json::from_slice(&place.read("plan.json")).unwrap();
    for (pointer, value, key) in [
        ("/predicted/mfu", json!(50), "predicted.mfu"),
        ("/predicted/bubble", json!(7), "predicted.bubble"),
        (
            "/predicted/tokens_per_s",
            json!(1),
            "predicted.tokens_per_s",
        ),
        (
            "/predicted/stages/1/peak_bytes",
            json!(1),
            "predicted.stages[1].persistent_bytes",
        ),
        ("/proof/lower_bound_s", json!(10), "proof.lower_bound_s"),
        ("/proof/gap", json!(0.5), "proof.gap"),
        ("/proof/stages/0/gap", json!(0.5), "proof.stages[0].gap"),
        (
            "/proof/stages/1/lower_bound_s",
            json!(5),
            "proof.stages[1].lower_bound_s",
        ),
        ("/pins", json!(["dta=4"]), "dta=4"),
    ] {
        let mut edited = plan.clone();
        *edited.pointer_mut(pointer).unwrap() = value;
        place.write("edited.json", edited.to_string().as_bytes());
        for verb in ["check", "inspect"] {
            place.run(&[verb, "edited.json"]).expect(5).says(&[key]);
        }
    }
}

/// Links that join some devices of a host with some of another.
#[test]
fn levels_that_cut_through_hosts_are_refused() {
    let place = Place::new();
    let printed = place.run(&["presets", "dgx-h100"]).expect(0).out;
    let edited = printed.replacen("devices_per_host = 8", "devices_per_host = 6", 1);
    assert_ne!(printed, edited);
    place.write("cut.toml", edited.as_bytes());
    let words = [
        "compile",
        "config.json",
        "--cluster",
        "cut.toml",
        "--hosts",
        "4",
    ];
    let said = ["levels[0].devices is 8, which cuts through hosts of 6"];
    place.run(&words).expect(2).says(&said);
    let edited = edited.replacen("n_hosts = 1", "n_hosts = 4", 1);
    place.write("cut.toml", edited.as_bytes());
    place.run(&words[..4]).expect(3).says(&said);
}

/// ZeRO levels that are pinned are those of the plan, whatever the level, the mesh and the
/// precision, and one that was edited is refused.
#[test]
fn another_zero_level_than_the_plans_is_refused() {
    let place = Place::new();
    let meshes = [
        "data=4",
        "data=2 tensor=2",
        "data=2 context=2",
        "pipeline=2 data=2",
    ];
    let sgd = ["--optimizer", "sgd"];
    for (i, level) in (0..4)
        .flat_map(|level| meshes.map(|m| (m, level)))
        .enumerate()
    {
        let (mesh, level) = level;
        let pins = format!("{mesh} zero={level}");
        let precision = ["f32", "bf16"][i % 2];
        let mut args = vec![
            "compile",
            "config.json",
            "--cluster",
            "cpu-default",
            "--global-batch",
            "4",
            "--precision",
            precision,
            "--pin",
            &pins,
        ];
        if i % 5 == 4 {
            args.extend(sgd);
        }
        place.run(&args).expect(0);
        let plan: Value = serde_json::from_slice(&place.read("plan.json")).unwrap();
        let has_moments = i % 5 != 4;
        for other in (0..4).filter(|other| *other != level && has_moments) {
            let mut edited = plan.clone();
            let pins = edited["pins"].as_array_mut().unwrap();
            let pin = pins
                .iter_mut()
                .find(|p| p.as_str().unwrap().starts_with("zero="));
            *pin.unwrap() = json!(format!("zero={other}"));
            place.write("bad.json", edited.to_string());
            let refused = place.refuses(&["check", "bad.json"], &[5]);
            refused.says(&[&format!("found zero={other}"), &format!("as zero={level}")]);
        }
    }
}

/// A plan that was edited so that what it states is not what it does.
#[test]
fn what_a_plan_states_and_does_not_do_is_refused() {
    let place = Place::new();
    let compile = [
        "compile",
        "config.json",
        "--cluster",
        "cpu-default",
        "--global-batch",
        "4",
    ];
    let pins = [
        "--dropout",
        "0.1",
        "--pin",
        "pipeline=2 data=2 recompute=none microbatch=2",
    ];
    place.run(&[&compile[..], &pins].concat()).expect(0);
    place.run(&["check", "plan.json"]).expect(0);
    let plan: Value = serde_json::from_slice(&place.read("plan.json")).unwrap();
    type Edit = fn(&mut Value);
    let by_every_verb: [(Edit, &[&str]); 7] = [
        (
            |p| p["pins"] = json!(["data=4"]),
            &["pins", "found data=4", "data=2"],
        ),
        (
            |p| p["pins"] = json!(["pipeline=1"]),
            &["found pipeline=1", "pipeline=2"],
        ),
        (
            |p| p["pins"] = json!(["microbatch=4"]),
            &["found microbatch=4", "microbatch=2"],
        ),
        (
            |p| p["pins"] = json!(["split=1/1"]),
            &["found split=1/1", "as split="],
        ),
        (
            |p| p["train"]["dropout"] = json!(0.3),
            &[
                "train.dropout",
                "expected 0.1, which the ops of the graph have",
                "found 0.3",
            ],
        ),
        (
            |p| p["stages"][0]["mesh"]["axes"][0]["name"] = json!(""),
            &["stages[0].mesh", "axes with names"],
        ),
        (
            |p| p["predicted"]["stages"] = json!([]),
            &["predicted.stages", "an entry for each of 2 meshes"],
        ),
    ];
    for (edit, said) in by_every_verb {
        let mut edited = plan.clone();
        edit(&mut edited);
        place.write("bad.json", edited.to_string());
        for verb in ["check", "inspect"] {
            place.refuses(&[verb, "bad.json"], &[5]).says(said);
        }
    }
    // Figures that agree with each other, and not with the program on the plan's cluster.
    let by_check: [(Edit, &str); 6] = [
        (
            |p| p["predicted"]["checkpoint"]["bytes"] = json!(1),
            "predicted.checkpoint.bytes",
        ),
        (
            |p| drop(p["predicted"].as_object_mut().unwrap().remove("checkpoint")),
            "predicted.checkpoint.bytes",
        ),
        (
            |p| {
                let stage = &mut p["predicted"]["stages"][0];
                let moved = stage["step_bytes"].as_u64().unwrap();
                let others = stage["transient_bytes"].as_u64().unwrap();
                stage["step_bytes"] = json!(0);
                stage["transient_bytes"] = json!(others + moved);
            },
            "predicted.stages[0].step_bytes",
        ),
        (
            |p| scale(&mut p["cluster"]["device"]["peak_flops_per_s"]["f32"], 0.5),
            "predicted.step_time_s",
        ),
        (
            |p| scale(&mut p["predicted"]["stages"][1]["forward_s"], 1.2),
            "predicted.stages[1].forward_s",
        ),
        (
            |p| {
                scale(&mut p["predicted"]["step_time_s"], 2.0);
                scale(&mut p["predicted"]["tokens_per_s"], 0.5);
                p["proof"].as_object_mut().unwrap().remove("simpler");
            },
            "predicted.step_time_s: simulation: expected",
        ),
    ];
    for (edit, said) in by_check {
        let mut edited = plan.clone();
        edit(&mut edited);
        place.write("bad.json", edited.to_string());
        let done = place
            .refuses(&["check", "bad.json"], &[5])
            .says(&[said, "on the plan's cluster"]);
        let json = place.run(&["check", "bad.json", "--json"]);
        assert_eq!(json.code, done.code);
        assert_eq!(json.json()["correct"], false);
    }
}

fn scale(value: &mut Value, factor: f64) {
    *value = json!(value.as_f64().unwrap() * factor);
}

/// Text of a document does nothing to a terminal.
#[test]
fn a_terminal_obeys_no_document() {
    let place = Place::with_plan();
    let mut plan: Value = serde_json::from_slice(&place.read("plan.json")).unwrap();
    let wild = "\u{1b}[31mred\u{1b}[0m\u{7}\u{9b}2J\u{202e}";
    plan["name"] = json!(wild);
    plan["cluster"]["name"] = json!(wild);
    plan["cluster"]["device"]["name"] = json!(wild);
    plan["cluster"]["sources"]["device.peak_flops_per_s"] = json!(wild);
    place.write("wild.json", plan.to_string());
    let is_obeyed = |c: char| c.is_control() && c != '\n' || c == '\u{202e}';
    let harmless = |args: &[&str], codes: &[i32]| {
        let done = place.run(args);
        assert!(codes.contains(&done.code), "{args:?}: {}", done.err);
        let said = done.out + &done.err;
        assert!(!said.contains(is_obeyed), "{args:?}: {said:?}");
        said
    };
    for verb in ["inspect", "explain", "simulate", "check", "lower"] {
        let said = harmless(&[verb, "wild.json"], &[0]);
        let is_shown = said.contains("\\u{1b}[31mred");
        assert!(
            is_shown || ["check", "lower", "explain"].contains(&verb),
            "{verb}: {said}"
        );
    }
    let json = harmless(&["inspect", "wild.json", "--json"], &[0]);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["name"], wild);
    // The name of a file, a key, a place in a file, and what stands there.
    place.write(
        "bad\u{1b}[1m.json",
        "{\"model_type\": \"gpt2\",\n  \"a\u{1b}[31mb\": \u{7}}",
    );
    let args = ["compile", "bad\u{1b}[1m.json", "--cluster", "cpu-default"];
    let said = harmless(&args, &[3]);
    assert!(said.contains("\\u{1b}[31mb"), "{said}");
    let args = [
        "compile",
        "config.json",
        "--cluster",
        "no\u{1b}[1mne",
        "--pin",
        "data=2",
    ];
    harmless(&args, &[3]);
    let args = [
        "compile",
        "config.json",
        "--cluster",
        "cpu-default",
        "--global-batch",
        "\u{1b}[1m",
    ];
    harmless(&args, &[2]);
}
