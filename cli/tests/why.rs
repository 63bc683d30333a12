//! `explain`, `what-if`, `sweep` and `fits`, and what `compile` says where there is no plan.

#![allow(clippy::unwrap_used)] // A test may stop where it likes.

mod support;

use serde_json::Value;
use support::Place;

/// The exposed seconds of each mesh of an account.
fn sums(report: &Value) -> Vec<f64> {
    let meshes = report["account"]["meshes"].as_array().unwrap().iter();
    let sum = |mesh: &Value| {
        let lines = mesh["lines"].as_array().unwrap().iter();
        lines.map(|l| l["exposed_s"].as_f64().unwrap()).sum()
    };
    meshes.map(sum).collect()
}

#[test]
fn explain_accounts_for_the_whole_step() {
    let place = Place::with_plan();
    let report = place
        .run(&["explain", "plan.json", "--json"])
        .expect(0)
        .json();
    let step_s = report["step_time_s"].as_f64().unwrap();
    let inspected = place
        .run(&["inspect", "plan.json", "--json"])
        .expect(0)
        .json();
    let predicted = inspected["predicted"]["step_time_s"].as_f64().unwrap();
    assert!((predicted / step_s - 1.0).abs() < 1e-9);
    let sums = sums(&report);
    assert_eq!(sums.len(), 2);
    for sum in sums {
        assert!((sum / step_s - 1.0).abs() < 1e-6, "{sum} of {step_s}");
    }
    assert_eq!(report["degrees"]["data"], serde_json::json!([2, 2]));
    assert_eq!(report["degrees"]["pipeline"], 2);
    let words = place.run(&["explain", "plan.json"]).expect(0).out;
    assert!(
        words.starts_with("For Meshwright's own runtime: the step of "),
        "{words}"
    );
    for part in [
        "is bound by",
        "sets the pace",
        "h.*",
        "transfers over",
        "No runners-up",
    ] {
        assert!(words.contains(part), "`{part}` is not in:\n{words}");
    }
}

#[test]
fn a_roofline_counts_every_instruction() {
    let place = Place::new();
    let mut args = vec!["compile", "config.json", "--cluster", "h200-sxm*1+pcie5"];
    args.extend(["--global-batch", "4", "--precision", "bf16"]);
    place.run(&args).expect(0);
    let ask = ["explain", "plan.json", "--roofline", "--json"];
    let report = place.run(&ask).expect(0).json();
    let mesh = &report["roofline"]["meshes"][0];
    let rows = mesh["rows"].as_array().unwrap();
    let number = |row: &Value, key: &str| row[key].as_f64().unwrap_or(0.0);
    for key in [
        "count",
        "launches",
        "flops",
        "bytes",
        "floor_s",
        "predicted_s",
    ] {
        let sum: f64 = rows.iter().map(|row| number(row, key)).sum();
        let total = number(&mesh["total"], key);
        assert!(
            (sum - total).abs() <= 1e-9 * total,
            "{key}: {sum}, not {total}"
        );
    }
    for row in rows {
        let (floor, predicted) = (number(row, "floor_s"), number(row, "predicted_s"));
        assert!(floor <= predicted, "{row}");
    }
    let row = |kind: &str| rows.iter().find(|r| r["kind"] == kind).unwrap();
    // Two layers with two norms each, and one behind them; a norm is one kernel, the sums of its
    // weights' gradients are three.
    assert_eq!(row("layer_norm")["count"], 5);
    assert_eq!(row("layer_norm")["launches"], 5);
    assert_eq!(row("layer_norm_grad_weight")["launches"], 15);
    // All parameters at once; the parts of squares, then their sums.
    assert!(number(row("adam_w"), "count") > 20.0);
    for (kind, launches) in [("adam_w", 1), ("cast", 1), ("sum_squares", 2)] {
        assert_eq!(row(kind)["launches"], launches, "{kind}");
    }
    // Four samples of 16 tokens with 16 features by 256 words: 2 * 64 * 16 * 256 of the products.
    assert!(number(row("dot_general"), "flops") > 2.0 * 64.0 * 16.0 * 256.0);
    let words = place.run(&ask[..3]).expect(0).out;
    for part in [
        "For Meshwright's own runtime: ",
        "launches.",
        "layer_norm",
        "floor",
    ] {
        assert!(words.contains(part), "`{part}` is not in:\n{words}");
    }
    assert!(words.lines().all(|l| l.chars().count() <= 100), "{words}");
    let both = ["explain", "plan.json", "--roofline", "--why-not", "zero=1"];
    place.refuses(&both, &[2]);
}

#[test]
fn runners_up_are_plans_and_are_listed() {
    let place = Place::new();
    let args = [
        "compile",
        "config.json",
        "--cluster",
        "cpu-default",
        "--global-batch",
        "4",
    ];
    place.run(&args).expect(0);
    let plain = place.read("plan.json");
    let mut with = args.to_vec();
    with.extend(["--runners-up", "others"]);
    place.run(&with).expect(0);
    let plan: Value = serde_json::from_slice(&place.read("plan.json")).unwrap();
    let listed = plan["proof"]["runners_up"].as_array().unwrap().clone();
    assert!(!listed.is_empty());
    let mut degrees = Vec::new();
    for (i, runner) in listed.iter().enumerate() {
        let file = format!("others/{}.json", i + 1);
        assert_eq!(runner["file"], file.as_str());
        place.run(&["check", &file]).expect(0);
        let own: Value = serde_json::from_slice(&place.read(&file)).unwrap();
        assert_eq!(own["predicted"]["step_time_s"], runner["step_time_s"]);
        degrees.push(runner["what"].as_str().unwrap().to_string());
    }
    let n = degrees.len();
    degrees.sort();
    degrees.dedup();
    assert_eq!(degrees.len(), n, "runners-up differ in their degrees");
    let words = place.run(&["explain", "plan.json"]).expect(0).out;
    assert!(words.contains("others/1.json"), "{words}");
    // Nothing else of the plan changes because they were asked for.
    let mut without = plan;
    without["proof"]
        .as_object_mut()
        .unwrap()
        .remove("runners_up");
    assert_eq!(without, serde_json::from_slice::<Value>(&plain).unwrap());
    // The plan itself may not be one of the files.
    with.extend(["-o", "others/1.json"]);
    place.refuses(&with, &[2]).says(&["named for two outputs"]);
}

#[test]
fn why_not_says_what_a_pin_costs() {
    let place = Place::new();
    let args = [
        "compile",
        "config.json",
        "--cluster",
        "cpu-default",
        "--global-batch",
        "4",
    ];
    place.run(&args).expect(0);
    let ask = [
        "explain",
        "plan.json",
        "--why-not",
        "tensor=2 data=2 pipeline=1",
    ];
    let mut json = ask.to_vec();
    json.extend(["--json", "-o", "other.json"]);
    let report = place.run(&json).expect(0).json();
    assert_eq!(report["feasible"], true);
    assert_eq!(report["degrees"][1]["tensor"], serde_json::json!([2, 2]));
    let seconds = |i: usize| report["step_time_s"][i].as_f64().unwrap();
    let terms = report["terms"].as_array().unwrap().iter();
    let more: f64 = terms
        .map(|t| t["seconds"][1].as_f64().unwrap() - t["seconds"][0].as_f64().unwrap())
        .sum();
    let difference = seconds(1) - seconds(0);
    assert!(difference > 0.0);
    assert!(
        (more - difference).abs() < 1e-6 * seconds(1),
        "{more} of {difference}"
    );
    place.run(&["check", "other.json"]).expect(0);
    let words = place.run(&ask).expect(0).out;
    assert!(
        words.starts_with(
            "For Meshwright's own runtime: With tensor=2 data=2 pipeline=1 the step takes"
        ),
        "{words}"
    );
    assert!(words.contains("longer:"), "{words}");
    // A pin that the plan keeps already costs nothing.
    let microbatch = report["degrees"][0]["microbatch"].as_u64().unwrap();
    let same = format!("microbatch={microbatch}");
    let words = place
        .run(&["explain", "plan.json", "--why-not", &same])
        .expect(0)
        .out;
    assert!(words.contains("the plan is the same"), "{words}");
    let first = "For Meshwright's own runtime: the plan already has these degrees. The plan that";
    assert!(words.starts_with(first), "{words}");
    assert!(
        support::flat(&words).contains("finds under them differs in no degree"),
        "{words}"
    );
    // The other plan of before has degrees that a search without its pins does not take.
    let own = [
        "explain",
        "other.json",
        "--why-not",
        "tensor=2 data=2 pipeline=1",
        "--json",
    ];
    let report = place.run(&own).expect(0).json();
    let verdict = report["verdict"].as_str().unwrap();
    assert!(verdict.starts_with(first), "{verdict}");
}

/// An order that the plan's graph is not in yet is asked for, and one that it is in stays.
#[test]
fn why_not_takes_orders_of_the_sequence() {
    let place = Place::with_plan();
    let pins = "data=1 context=2 context_order=zigzag";
    let args = [
        "explain",
        "plan.json",
        "--why-not",
        pins,
        "--json",
        "-o",
        "zigzag.json",
    ];
    let report = place.run(&args).expect(0).json();
    assert_eq!(report["degrees"][1]["context"], serde_json::json!([2, 2]));
    let pinned = report["pins"].as_array().unwrap();
    assert!(
        pinned.iter().any(|p| p == "context_order=zigzag"),
        "{report}"
    );
    let args = ["explain", "zigzag.json", "--why-not", "zero=3", "--json"];
    let report = place.run(&args).expect(0).json();
    assert_eq!(report["degrees"][1]["context"], serde_json::json!([2, 2]));
}

#[test]
fn why_not_says_why_there_is_no_such_plan() {
    let place = Place::with_plan();
    let done = place
        .run(&["explain", "plan.json", "--why-not", "tensor=3"])
        .expect(0);
    assert!(
        done.out
            .starts_with("For Meshwright's own runtime: There is no plan with tensor=3: "),
        "{}",
        done.out
    );
    let stay = "The plan's other pins stay: data=2, pipeline=2.";
    assert!(support::flat(&done.out).contains(stay), "{}", done.out);
    let refused = place.refuses(&["explain", "plan.json", "--why-not", "tp=2"], &[2]);
    refused.says(&["did you mean `tensor`?"]);
    place.refuses(&["explain", "plan.json", "-o", "x.json"], &[2]);
    place.refuses(&["explain", "none.json"], &[3]);
}

#[test]
fn what_if_shows_the_new_plan_and_what_this_one_would_do() {
    let place = Place::with_plan();
    let ask = ["what-if", "plan.json", "--set", "link.inside=2x"];
    let mut json = ask.to_vec();
    json.extend(["--json", "-o", "new.json"]);
    let report = place.run(&json).expect(0).json();
    assert_eq!(report["this_plan"]["outcome"], "fits");
    let kept = report["this_plan"]["step_time_s"].as_f64().unwrap();
    let before = report["step_time_s"][0].as_f64().unwrap();
    assert!(
        kept < before,
        "a faster link makes this plan's step shorter"
    );
    // The new plan is the plan for the changed cluster.
    place.run(&["check", "new.json"]).expect(0);
    let new: serde_json::Value = serde_json::from_slice(&place.read("new.json")).unwrap();
    let old: serde_json::Value = serde_json::from_slice(&place.read("plan.json")).unwrap();
    let link = |p: &serde_json::Value| {
        p["cluster"]["levels"][0]["bandwidth_bytes_per_s"]
            .as_f64()
            .unwrap()
    };
    assert_eq!(link(&new), 2.0 * link(&old));
    let words = place.run(&ask).expect(0).out;
    assert!(
        words.starts_with("For Meshwright's own runtime: With link.inside "),
        "{words}"
    );
    assert!(words.contains("Kept as it is,"), "{words}");
    assert!(
        words.contains("The plan's pins stay: data=2, pipeline=2."),
        "{words}"
    );
    assert_eq!(report["pins"], serde_json::json!(["data=2", "pipeline=2"]));
    // Twice as many samples: the plan is kept with more microbatches.
    let twice = ["what-if", "plan.json", "--global-batch", "2x", "--json"];
    let report = place.run(&twice).expect(0).json();
    assert_eq!(report["this_plan"]["outcome"], "fits");
    assert!(report["this_plan"]["step_time_s"].as_f64().unwrap() > before);
    // What simplicity cost was said of the old facts: it does not keep a slower step from being
    // one.
    let mut simple = old;
    let strategies = simple["layer_strategies"].as_array().unwrap().len();
    simple["proof"]["simpler"] = serde_json::json!({
        "tolerance": 0.01, "fastest_s": 0.995 * before, "fastest_strategies": strategies + 1,
    });
    place.write("plan.json", simple.to_string());
    let report = place.run(&twice).expect(0).json();
    assert_eq!(
        report["this_plan"]["outcome"], "fits",
        "{}",
        report["this_plan"]
    );
}

#[test]
fn what_if_finds_where_the_choice_changes() {
    let place = Place::with_plan();
    // On a link that is a thousand times slower the plan reduces gradients in another way.
    let ask = [
        "what-if",
        "plan.json",
        "--set",
        "link.inside=0.001x",
        "--searches",
        "3",
    ];
    let mut json = ask.to_vec();
    json.push("--json");
    let report = place.run(&json).expect(0).json();
    assert_ne!(report["degrees"][0], report["degrees"][1]);
    let flip = &report["flip"];
    assert_eq!(flip["searches"], 3);
    let [keeps, changes] = ["keeps_at", "changes_at"].map(|k| flip[k].as_f64().unwrap());
    // Three halvings of the ratio, whose logarithm is then an eighth.
    let plan: Value = serde_json::from_slice(&place.read("plan.json")).unwrap();
    let old = plan["cluster"]["levels"][0]["bandwidth_bytes_per_s"]
        .as_f64()
        .unwrap();
    assert!(keeps <= old && changes >= 0.999e-3 * old && changes < keeps);
    assert!(((keeps / changes).ln() - 1000f64.ln() / 8.0).abs() < 1e-6);
    // At both ends the searches give what is said of them.
    for (value, same) in [(keeps, true), (changes, false)] {
        let set = format!("link.inside={value}B/s");
        let args = [
            "what-if",
            "plan.json",
            "--set",
            &set,
            "--searches",
            "0",
            "--json",
        ];
        let report = place.run(&args).expect(0).json();
        assert_eq!(
            report["degrees"][0] == report["degrees"][1],
            same,
            "{value}"
        );
        assert!(report["flip"].is_null());
    }
    let words = place.run(&ask).expect(0).out;
    assert!(
        words.contains("The choice changes between link.inside"),
        "{words}"
    );
}

#[test]
fn what_if_refuses_what_is_no_fact() {
    let place = Place::with_plan();
    let refused = |more: &[&str], codes: &[i32]| {
        let mut args = vec!["what-if", "plan.json"];
        args.extend(more);
        place.refuses(&args, codes)
    };
    refused(&[], &[2]).says(&["nothing is changed"]);
    refused(&["--set", "memry=2x"], &[2]).says(&["did you mean `memory`?"]);
    refused(&["--set", "memory"], &[2]).says(&["expected KEY=VALUE"]);
    refused(&["--set", "memory=400Gb/s"], &[2]).says(&["96GiB"]);
    refused(&["--set", "link.between=2x"], &[2]).says(&["no link between hosts", "link."]);
    refused(&["--sequence", "2x"], &[2]).says(&["--model"]);
    refused(&["--global-batch", "0.3x"], &[2]).says(&["no whole number"]);
    refused(&["--hosts", "2"], &[2]).says(&["--hosts 2"]);
    refused(&["--set", "memory=1B"], &[2]).says(&["reserves 1.00 MiB of its memory, so 1 B leave"]);
    // Too little memory for any plan is an answer: infeasible.
    refused(&["--set", "memory=0.0001x"], &[2, 4]);
}

#[test]
fn sweep_has_a_row_for_every_point() {
    let place = Place::new();
    let args = [
        "sweep",
        "config.json",
        "--cluster",
        "a100-sxm-80gb*2+nvlink3+infiniband-hdr*2,dgx-h100",
        "--hosts",
        "1,2",
        "--global-batch",
        "16",
        "--tokens",
        "1M",
        "--price",
        "dgx-h100=3/device-hour",
        "--csv",
        "sweep.csv",
        "--svg",
        "sweep.svg",
        "--json",
    ];
    let report = place.run(&args).expect(0).json();
    let rows = report["rows"].as_array().unwrap();
    let devices: Vec<u64> = rows
        .iter()
        .map(|r| r["devices"].as_u64().unwrap())
        .collect();
    assert_eq!(devices, [2, 4, 8, 16]);
    for row in rows {
        let speed = row["point"]["tokens_per_s"].as_f64().unwrap();
        let days = row["days"].as_f64().unwrap();
        assert!((days * 86400.0 * speed / 1e6 - 1.0).abs() < 1e-9);
        let cost = row["cost"].as_f64();
        match row["cluster"] == "dgx-h100" {
            true => {
                let hours = days * 24.0 * row["devices"].as_f64().unwrap();
                assert!((cost.unwrap() / (3.0 * hours) - 1.0).abs() < 1e-9);
            }
            false => assert_eq!(cost, None),
        }
    }
    let csv = String::from_utf8(place.read("sweep.csv")).unwrap();
    let table = published::csv::parse(&csv).unwrap();
    assert_eq!(table.records.len(), 4);
    let of = |key: &str| table.header.iter().position(|h| h == key).unwrap();
    for (record, row) in table.records.iter().zip(rows) {
        let step_time_s: f64 = record[of("step_time_s")].parse().unwrap();
        assert_eq!(row["point"]["step_time_s"], step_time_s);
        assert_eq!(record[of("reason")], "");
    }
    let svg = String::from_utf8(place.read("sweep.svg")).unwrap();
    // Four speeds and the two costs that have a price.
    assert_eq!(svg.matches("<circle").count(), 6);
    // A point is what `compile` plans.
    let compile = [
        "compile",
        "config.json",
        "--cluster",
        "dgx-h100",
        "--hosts",
        "2",
        "--global-batch",
        "16",
        "--json",
    ];
    let plan = place.run(&compile).expect(0).json();
    assert_eq!(
        plan["predicted"]["step_time_s"],
        rows[3]["point"]["step_time_s"]
    );
}

#[test]
fn sweep_says_why_points_have_no_plan() {
    let place = Place::new();
    let args = [
        "sweep",
        "config.json",
        "--cluster",
        "cpu-default",
        "--ranks",
        "1,3",
        "--global-batch",
        "4",
        "--pin",
        "tensor=1 data=1 pipeline=1",
    ];
    let words = place.run(&args).expect(0).out;
    assert!(words.contains("points have no plan."), "{words}");
    assert!(words.contains("cpu-default on 3 devices: "), "{words}");
    let mut none = args.to_vec();
    none[5] = "3";
    place
        .refuses(&none, &[4])
        .says(&["no point has a plan", "cpu-default on 3 devices"]);
    let refused = |more: &[&str]| {
        let mut all = args.to_vec();
        all.extend(more);
        place.refuses(&all, &[2])
    };
    refused(&["--price", "cpu-default=1"]).says(&["--tokens"]);
    refused(&["--tokens", "1T", "--price", "cpu-defalt=1"]).says(&["did you mean `cpu-default`"]);
    refused(&["--tokens", "1T", "--price", "cpu-default=x"]).says(&["is no price"]);
    refused(&["--tokens", "2x"]).says(&["300B or 1T"]);
}

#[test]
fn fits_finds_the_smallest_number_and_what_was_tried() {
    let place = Place::new();
    // Devices so small that the states need several of them.
    let device = "a100-sxm-80gb*4+nvlink3+infiniband-hdr*2";
    let printed = place.run(&["presets", device]).expect(0).out;
    let key = "memory_bytes = ";
    let small = printed.lines().map(|line| match line {
        l if l.starts_with(key) => format!("{key}200000"),
        l if l.starts_with("memory_reserved_bytes = ") => "memory_reserved_bytes = 0".into(),
        l => l.to_string(),
    });
    let small: Vec<String> = small.collect();
    place.write("small.toml", small.join("\n"));
    let args = [
        "fits",
        "config.json",
        "--device",
        "small.toml",
        "--global-batch",
        "8",
    ];
    let mut json = args.to_vec();
    json.extend(["--next", "1", "--json"]);
    let report = place.run(&json).expect(0).json();
    let smallest = report["smallest"]["devices"].as_u64().unwrap();
    let least = report["states"]["least_devices"].as_u64().unwrap();
    assert!(smallest > 1 && least <= smallest, "{report}");
    let tried = report["tried"].as_array().unwrap();
    for row in tried {
        let n = row["devices"].as_u64().unwrap();
        assert!(n >= least, "{n} devices cannot hold the states");
        assert_eq!(row["plan"].is_object(), n >= smallest, "{row}");
        assert_eq!(row["reason"].is_string(), n < smallest, "{row}");
    }
    let larger = tried
        .iter()
        .filter(|r| r["devices"].as_u64().unwrap() > smallest)
        .count();
    assert!(larger >= 1, "{report}");
    let mut only = args.to_vec();
    only.extend(["--next", "0"]);
    let words = place.run(&only).expect(0).out;
    assert!(
        words.contains("The smallest number of devices of small.toml with a plan"),
        "{words}"
    );
    let mut few = args.to_vec();
    few.extend(["--most-devices", "1"]);
    place
        .refuses(&few, &[4])
        .says(&["no plan was found on up to 1 device", "--most-devices"]);
    place
        .refuses(&["fits", "config.json", "--device", "cpu-default"], &[2])
        .says(&["GPUs"]);
}

/// A change of nothing used to be answered with the plan that there is, and two changes of one fact
/// multiplied.
#[test]
fn what_if_refuses_what_changes_nothing_or_one_fact_twice() {
    let place = Place::with_plan();
    let refuses = |args: &[&str]| place.refuses(&[&["what-if", "plan.json"], args].concat(), &[2]);
    refuses(&["--global-batch", "4"]).says(&[
        "--global-batch 4 changes nothing: the plan is for 4 samples",
        "another value",
    ]);
    refuses(&["--global-batch", "1x"]).says(&["--global-batch 1x changes nothing"]);
    refuses(&["--hosts", "1"]).says(&["--hosts 1 changes nothing: the plan is for 1 host"]);
    refuses(&["--set", "memory=4GiB"])
        .says(&["--set memory=4GiB changes nothing: the plan is for 4.00 GiB"]);
    refuses(&["--set", "peak=1x"]).says(&["--set peak=1x changes nothing"]);
    refuses(&["--set", "memory=2x", "--set", "memory=2x"])
        .says(&["--set memory=2x and --set memory=2x change the same fact"]);
    let plan: Value = serde_json::from_slice(&place.read("plan.json")).unwrap();
    let link = plan["cluster"]["levels"][0]["name"].as_str().unwrap();
    let by_name = format!("link.{link}=3x");
    refuses(&["--set", "link.inside=2x", "--set", &by_name]).says(&["change the same fact"]);
    // Amounts, in words.
    for (amount, why) in [
        ("12GBB", "`12GBB` ends in `GBB`, which is no unit of bytes"),
        ("1e400", "`1e400` is larger than any amount"),
        ("-3GiB", "`-3GiB` is below zero"),
        ("5 parsecs", "`5 parsecs` ends in `parsecs`"),
        ("96", "`96` has no unit"),
    ] {
        let set = format!("memory={amount}");
        refuses(&["--set", &set]).says(&["--set memory", why, "give it as 96GiB, 80GB or 2x"]);
    }
}

/// On one host the link between hosts joins nothing, and is not the one inside.
#[test]
fn the_link_inside_a_single_host_is_found() {
    let place = Place::new();
    let compile = [
        "compile",
        "config.json",
        "--cluster",
        "dgx-h100",
        "--hosts",
        "1",
    ];
    place
        .run(&[&compile[..], &["--global-batch", "8"]].concat())
        .expect(0);
    let args = ["what-if", "plan.json", "--searches", "0", "--set"];
    let done = place
        .run(&[&args[..], &["link.inside=2x"]].concat())
        .expect(0);
    let said = support::flat(&done.out);
    assert!(
        said.contains("link.inside 900.00 GB/s in place of 450.00 GB/s"),
        "{said}"
    );
    // Memory that leaves nothing is said in GiB.
    place
        .refuses(&[&args[..], &["memory=1GiB"]].concat(), &[2])
        .says(&["a device reserves 3.00 GiB of its memory, so 1.00 GiB leave nothing"]);
}
