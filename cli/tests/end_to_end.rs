//! From a config to a comparison, through the binary.

#![allow(clippy::unwrap_used)] // A test may stop where it likes.

mod support;

use serde_json::Value;
use std::path::PathBuf;
use support::{Done, Place, repository};

fn train(place: &Place, more: &[&str]) -> Done {
    let mut args = vec![
        "run",
        "plan.json",
        "--data",
        "text.txt",
        "--steps",
        "3",
        "--lr",
        "1e-3",
        "--profile",
        "1",
    ];
    args.extend(more);
    place.run(&args)
}

fn losses(place: &Place, run: &str) -> Vec<f64> {
    let run: serde_json::Value = serde_json::from_slice(&place.read(run)).unwrap();
    run["steps"]
        .as_array()
        .unwrap()
        .iter()
        .map(|s| s["loss"].as_f64().unwrap())
        .collect()
}

#[test]
fn a_model_is_compiled_checked_played_trained_and_compared() {
    let place = Place::new();
    let done = place
        .run(&[
            "compile",
            "config.json",
            "--cluster",
            "cpu-default",
            "--global-batch",
            "4",
            "--pin",
            "pipeline=2 data=2 zero=1",
            "--verbose",
        ])
        .expect(0);
    for words in [
        "Pipeline: 2 stages",
        "data (2): data parallel",
        "ZeRO-1",
        "Predicted:",
        "MFU",
        "peak of 4 devices",
        "gap",
        "The checker accepts",
    ] {
        assert!(
            done.out.contains(words),
            "`{words}` is not in:\n{}",
            done.out
        );
    }
    assert!(
        place
            .run(&["check", "plan.json"])
            .expect(0)
            .out
            .contains("correct")
    );
    let inspected = place.run(&["inspect", "plan.json", "--layers"]).expect(0);
    for words in [
        "send",
        "receive",
        "world_sum",
        "all_reduce",
        "{}.attn",
        "batch",
    ] {
        assert!(
            inspected.out.contains(words),
            "`{words}` is not in:\n{}",
            inspected.out
        );
    }
    let lowered = place.run(&["lower", "plan.json"]).expect(0).out;
    let program = ir::text::program::parse(&lowered).unwrap();
    assert_eq!(ir::text::program::print(&program), lowered);
    place
        .run(&["lower", "plan.json", "-o", "program.txt"])
        .expect(0);
    assert_eq!(place.read("program.txt"), lowered.as_bytes());
    let rank = place
        .run(&["lower", "plan.json", "--rank", "1"])
        .expect(0)
        .out;
    for words in ["rank1 of stage", " holds [", " local f32["] {
        assert!(rank.contains(words), "`{words}` is not in:\n{rank}");
    }
    place
        .run(&["simulate", "plan.json", "--trace", "trace.json"])
        .expect(0);
    let trace: serde_json::Value = serde_json::from_slice(&place.read("trace.json")).unwrap();
    assert!(trace["traceEvents"].as_array().unwrap().len() > 100);
    let done = train(
        &place,
        &["--validate-every", "2", "--validation-fraction", "0.2"],
    )
    .expect(0);
    assert!(
        done.out.contains("validation loss") && done.out.contains("compare plan.json run.json"),
        "{}",
        done.out
    );
    let losses = losses(&place, "run.json");
    assert_eq!(losses.len(), 3);
    // The first loss of random weights is that of a guess among 256 tokens.
    assert!(
        (losses[0] - 256f64.ln()).abs() < 0.1 && losses[2] < losses[0],
        "{losses:?}"
    );
    let brief = place.run(&["compare", "plan.json", "run.json"]).expect(0);
    assert!(
        brief.out.contains("in seconds of the step"),
        "{}",
        brief.out
    );
    for line in brief.out.lines() {
        assert!(line.chars().count() <= 100, "{line}");
    }
    let compared = place.run(&["compare", "plan.json", "run.json", "-v"]);
    let compared = compared.expect(0);
    assert!(compared.out.len() > brief.out.len());
    for words in [
        "step time",
        "tokens/s",
        "MFU",
        "peak memory",
        "predicted/measured",
        "all",
        "waiting",
        "in seconds of the step",
        "largest difference",
    ] {
        assert!(
            compared.out.contains(words),
            "`{words}` is not in:\n{}",
            compared.out
        );
    }
    // This cluster was not measured: there is nothing to refine, and that is said.
    assert!(
        compared
            .out
            .contains("not measured here. Next: `meshwright calibrate"),
        "{}",
        compared.out
    );
    let args = [
        "compare",
        "plan.json",
        "run.json",
        "--recalibrate",
        "new.toml",
    ];
    place.run(&args).expect(3);
}

#[test]
fn machines_get_json() {
    let place = Place::with_plan();
    let compiled = place
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
            "--json",
        ])
        .expect(0)
        .json();
    assert_eq!(
        (
            compiled["devices"].as_u64(),
            compiled["stages"][0]["mesh"][0][1].as_u64()
        ),
        (Some(4), Some(4))
    );
    let inspected = place
        .run(&["inspect", "plan.json", "--json", "--layers"])
        .expect(0)
        .json();
    assert_eq!(inspected["stages"].as_array().unwrap().len(), 2);
    assert!(
        inspected["communication"]
            .as_array()
            .unwrap()
            .iter()
            .any(|t| t["kind"] == "send" && t["bytes"].as_u64() > Some(0))
    );
    assert!(inspected["ops"].as_array().unwrap().len() > 20);
    assert_eq!(
        place
            .run(&["check", "plan.json", "--json"])
            .expect(0)
            .json()["correct"],
        true
    );
    let played = place
        .run(&["simulate", "plan.json", "--json"])
        .expect(0)
        .json();
    // The plan's prediction is what the simulator says of the plan as a document.
    let plan: serde_json::Value = serde_json::from_slice(&place.read("plan.json")).unwrap();
    assert_eq!(
        played["predicted"]["step_time_s"],
        plan["predicted"]["step_time_s"]
    );
    let ran = train(&place, &["--json"]).expect(0).json();
    assert_eq!(
        (ran["steps"].as_u64(), &ran["plan_hash"]),
        (Some(3), &inspected["plan_hash"])
    );
    let compared = place
        .run(&["compare", "plan.json", "run.json", "--json"])
        .expect(0)
        .json();
    assert!(compared["comparison"]["step_time_s"]["ratio"].as_f64() > Some(0.0));
    assert!(
        !place
            .run(&["presets", "--json"])
            .expect(0)
            .json()
            .as_array()
            .unwrap()
            .is_empty()
    );
}

/// Where the link between hosts is slow, the plan for all of them says that one alone is faster, and
/// how fast it is; a plan for one host, and one for hosts with fast links, say nothing.
#[test]
fn fewer_hosts_that_are_faster_are_said() {
    let place = Place::new();
    let compile = |cluster: &str, hosts: &str, batch: &str| {
        let model = [
            "compile",
            "gpt2",
            "--sequence",
            "512",
            "--precision",
            "bf16",
        ];
        let on = [
            "--cluster",
            cluster,
            "--hosts",
            hosts,
            "--global-batch",
            batch,
        ];
        let done = place.run(&[&model[..], &on, &["-o", "plan.json", "--json"]].concat());
        let said = done.expect(0).json();
        let notes = said["search"]["notes"].as_array().unwrap().iter();
        let note = notes
            .filter_map(Value::as_str)
            .find(|n| n.contains("--hosts"));
        let step_s = said["predicted"]["step_time_s"].as_f64().unwrap();
        (note.map(str::to_string), step_s)
    };
    let slow = "l4*2+pcie4+ethernet-10";
    let (note, step_s) = compile(slow, "1", "32");
    assert_eq!(note, None);
    let (note, both_s) = compile(slow, "2", "32");
    assert!(both_s > step_s, "{both_s} against {step_s}");
    let words = format!(
        "one of the 2 hosts alone takes {:.3} ms a step (--hosts 1)",
        step_s * 1e3
    );
    assert!(
        note.as_ref().is_some_and(|n| n.contains(&words)),
        "{note:?}"
    );
    let (note, _) = compile("dgx-h100", "2", "2048");
    assert_eq!(note, None);
}

/// The norm overflows in steps that f16's loss scaling skips, and JSON has no infinities.
#[test]
fn a_step_without_a_gradient_norm_can_be_compared() {
    let place = Place::with_plan();
    train(&place, &[]).expect(0);
    let mut run: serde_json::Value = serde_json::from_slice(&place.read("run.json")).unwrap();
    run["steps"][1]["grad_norm"] = serde_json::Value::Null;
    run["steps"][2]["loss"] = serde_json::Value::Null;
    place.write("run.json", run.to_string().as_bytes());
    place.run(&["compare", "plan.json", "run.json"]).expect(0);
}

/// Nothing after a loss that is no number means anything: the run ends where it is, and what was
/// written before stays.
#[test]
fn a_run_that_diverges_stops_and_keeps_what_was_good() {
    let place = Place::with_plan();
    train(&place, &["--checkpoint", "state"]).expect(0);
    let state = place.path("state/0001-step-3");
    let written = || -> Vec<(PathBuf, Vec<u8>)> {
        let entries = std::fs::read_dir(&state).unwrap();
        let mut files: Vec<PathBuf> = entries.map(|e| e.unwrap().path()).collect();
        files.push(place.path("run.json"));
        files.sort();
        let read = |path: PathBuf| (path.clone(), std::fs::read(path).unwrap());
        files.into_iter().map(read).collect()
    };
    let good = written();
    let args = "run plan.json --data text.txt --steps 3 --schedule constant --lr 1e30 \
                --resume state --checkpoint state";
    let done = place
        .run(&args.split_whitespace().collect::<Vec<_>>())
        .expect(6);
    for words in ["of step ", ": training diverged", "lower --lr"] {
        assert!(
            done.err.contains(words),
            "`{words}` is not in:\n{}",
            done.err
        );
    }
    assert!(written() == good);
    assert_eq!(std::fs::read_dir(place.path("state")).unwrap().count(), 1);
}

#[test]
fn the_same_input_gives_the_same_bytes() {
    let place = Place::new();
    let compile = |out: &str| {
        place
            .run(&[
                "compile",
                "config.json",
                "--cluster",
                "cpu-default",
                "--global-batch",
                "4",
                "-o",
                out,
            ])
            .expect(0)
    };
    compile("a.json");
    compile("b.json");
    assert!(place.read("a.json") == place.read("b.json"));
}

#[test]
fn a_graph_in_text_form_is_a_model() {
    let place = Place::with_plan();
    let plan: serde_json::Value = serde_json::from_slice(&place.read("plan.json")).unwrap();
    place.write("model.mw", plan["graph"].as_str().unwrap().as_bytes());
    place
        .run(&[
            "compile",
            "model.mw",
            "--cluster",
            "cpu-default",
            "--global-batch",
            "4",
            "--pin",
            "pipeline=2",
            "--pin",
            "data=2",
            "-o",
            "again.json",
        ])
        .expect(0);
    assert!(place.read("again.json") == place.read("plan.json"));
    place
        .refuses(
            &[
                "compile",
                "model.mw",
                "--cluster",
                "cpu-default",
                "--sequence",
                "8",
                "-o",
                "x.json",
            ],
            &[2],
        )
        .says(&["--sequence is 8"]);
}

#[test]
fn a_resumed_run_goes_on_as_if_it_had_not_stopped() {
    let place = Place::with_plan();
    let run = |more: &[&str]| {
        let mut args = vec![
            "run",
            "plan.json",
            "--data",
            "text.txt",
            "--schedule",
            "cosine",
            "--total-steps",
            "4",
            "--warmup",
            "1",
        ];
        args.extend(more);
        place.run(&args).expect(0)
    };
    run(&["--steps", "4", "-o", "whole.json"]);
    run(&["--steps", "2", "-o", "first.json", "--checkpoint", "state"]);
    run(&["--steps", "2", "-o", "second.json", "--resume", "state"]);
    let parts = [losses(&place, "first.json"), losses(&place, "second.json")].concat();
    assert_eq!(losses(&place, "whole.json"), parts);
}

#[test]
fn saved_weights_are_read_back() {
    let place = Place::with_plan();
    std::fs::create_dir(place.path("model")).unwrap();
    place.write("model/config.json", support::CONFIG.as_bytes());
    // No learning to speak of: the weights written are those drawn from the seed.
    place
        .run(&[
            "run",
            "plan.json",
            "--data",
            "text.txt",
            "--steps",
            "1",
            "--lr",
            "1e-30",
            "--config",
            "config.json",
            "--save",
            "model/model.safetensors",
        ])
        .expect(0);
    assert!(
        !place.names().iter().any(|n| n.starts_with(".meshwright")),
        "{:?}",
        place.names()
    );
    place
        .run(&[
            "run",
            "plan.json",
            "--data",
            "text.txt",
            "--steps",
            "2",
            "-o",
            "from_file.json",
            "--weights",
            "model",
        ])
        .expect(0);
    place
        .run(&[
            "run",
            "plan.json",
            "--data",
            "text.txt",
            "--steps",
            "2",
            "-o",
            "drawn.json",
        ])
        .expect(0);
    assert_eq!(
        losses(&place, "from_file.json"),
        losses(&place, "drawn.json")
    );
}

/// Asynchronous updates are asked for by name, said in words, checked, played, trained and compared;
/// what they exclude is refused with what to do.
#[test]
fn asynchronous_updates_are_said_and_trained() {
    let place = Place::new();
    let mut config: serde_json::Value = serde_json::from_slice(&place.read("config.json")).unwrap();
    let own = ["compile", "config.json", "--cluster", "cpu-default"];
    let pins = [
        "--global-batch",
        "8",
        "--pin",
        "schedule=pipedream pipeline=2",
    ];
    let clipless = ["--clip-norm", "none"];
    let sized = ["--pin", "microbatch=2"];
    config["tie_word_embeddings"] = true.into();
    place.write("config.json", config.to_string().as_bytes());
    let tied = [&own[..], &pins, &clipless, &sized].concat();
    let refuses = |args: &[&str], word: &str| {
        place.refuses(args, &[1, 2, 3, 4]).says(&[word]);
    };
    refuses(&tied, "tie_word_embeddings");
    config["tie_word_embeddings"] = false.into();
    place.write("config.json", config.to_string().as_bytes());
    refuses(&[&own[..], &pins, &clipless].concat(), "microbatch=N");
    refuses(&[&own[..], &pins, &sized].concat(), "--clip-norm");
    let done = place.run(&tied).expect(0);
    let out = done.out.split_whitespace().collect::<Vec<_>>().join(" ");
    for words in [
        "schedule pipedream, 4 microbatches of 2 samples",
        "every microbatch makes an update, 4 a step, from weights up to 1 update old",
        "Stage 0 keeps 2 versions of its weights, the last stage 1",
    ] {
        assert!(out.contains(words), "`{words}` is not in:\n{out}");
    }
    place.run(&["check", "plan.json"]).expect(0);
    place.run(&["simulate", "plan.json"]).expect(0);
    place.run(&["inspect", "plan.json"]).expect(0);
    place.run(&["explain", "plan.json"]).expect(0);
    let why = ["explain", "plan.json", "--why-not", "schedule=1f1b"];
    place.run(&why).expect(0);
    train(&place, &["-o", "run.json", "--checkpoint", "kept"]).expect(0);
    assert_eq!(losses(&place, "run.json").len(), 3);
    place.run(&["compare", "plan.json", "run.json"]).expect(0);
    train(&place, &["-o", "more.json", "--resume", "kept"]).expect(0);
}

#[test]
fn training_files_and_flags_say_the_same() {
    let place = Place::new();
    place.write(
        "train.toml",
        b"global_batch = 4\nclip_norm = \"none\"\n[optimizer.sgd]\nmomentum = 0.5\n",
    );
    let compile = |out: &str, more: &[&str]| {
        let mut args = vec![
            "compile",
            "config.json",
            "--cluster",
            "cpu-default",
            "--pin",
            "data=4",
            "-o",
            out,
        ];
        args.extend(more);
        place.run(&args).expect(0)
    };
    compile("file.json", &["--train", "train.toml"]);
    compile(
        "flags.json",
        &[
            "--global-batch",
            "4",
            "--clip-norm",
            "none",
            "--optimizer",
            "sgd",
            "--momentum",
            "0.5",
        ],
    );
    assert!(place.read("file.json") == place.read("flags.json"));
    place.write("train.toml", b"global_batch = 4\nlr = 0.1\n");
    place
        .refuses(
            &[
                "compile",
                "config.json",
                "--cluster",
                "cpu-default",
                "--train",
                "train.toml",
            ],
            &[3],
        )
        .says(&["train.toml:2:1", "unknown field `lr`"]);
    place.write("train.toml", b"dropout = 1.5\n");
    place
        .refuses(
            &[
                "compile",
                "config.json",
                "--cluster",
                "cpu-default",
                "--train",
                "train.toml",
            ],
            &[3],
        )
        .says(&["dropout is 1.5"]);
}

#[test]
fn the_schemas_in_the_documents_are_current() {
    let place = Place::new();
    for document in ["plan", "run", "cluster"] {
        let printed = place.run(&["schema", document]).expect(0).out;
        let committed = std::fs::read_to_string(
            repository().join(format!("docs/schema/{document}.schema.json")),
        )
        .unwrap();
        assert!(
            printed == committed,
            "docs/schema/{document}.schema.json is stale: meshwright schema {document} > it"
        );
    }
}

#[test]
fn small_problems_are_solved() {
    let place = Place::new();
    // Two nodes with two strategies each; 1 + 2 + the edge's 0 fits 10 bytes, 0 + 0 + 5 does not pay.
    place.write(
        "problem.json",
        br#"{"problem":{"name":"two","nodes":{"intervals":[[0,1],[0,1]],"costs":[[1,0],[2,0]],"usages":[[5,5],[5,5]]},"edges":{"nodes":[[0,1]],"costs":[[0,9,9,5]]},"usage_limit":10}}"#,
    );
    let done = place
        .run(&["solve", "problem.json", "-o", "solution.json"])
        .expect(0);
    let line: serde_json::Value =
        serde_json::from_str(done.out.trim().lines().last().unwrap()).unwrap();
    assert_eq!(
        (
            line["status"].as_str(),
            line["objective"].as_u64(),
            line["lower_bound"].as_u64(),
            line["gap"].as_f64()
        ),
        (Some("optimal"), Some(3), Some(3), Some(0.0))
    );
    assert_eq!(
        (line["peak_usage"].as_u64(), line["usage_limit"].as_u64()),
        (Some(10), Some(10))
    );
    assert_eq!(place.read("solution.json"), b"[0,0]\n");
    let zipped = {
        use std::io::Write;
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gz.write_all(&place.read("problem.json")).unwrap();
        gz.finish().unwrap()
    };
    place.write("problem.json.gz", &zipped);
    place.run(&["solve", "problem.json.gz"]).expect(0);
    let tight = String::from_utf8(place.read("problem.json"))
        .unwrap()
        .replace("\"usage_limit\":10", "\"usage_limit\":9");
    place.write("tight.json", tight.as_bytes());
    let done = place
        .refuses(&["solve", "tight.json", "-o", "none.json"], &[4])
        .says(&["no choice fits"]);
    assert!(
        done.out.contains("\"status\":\"infeasible\""),
        "{}",
        done.out
    );
}

/// A grid of `n x n` nodes under memory pressure; a large one is not proved at once.
fn hard_problem(n: u32) -> Vec<u8> {
    use intra_op::{Cost, Edge, IntraOpProblem, Node, Table, write_problem};
    let mut state = 1u64;
    let mut random = |below: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) % below
    };
    let nodes = (0..n * n)
        .map(|v| {
            let usages: Vec<u64> = (0..5).map(|_| random(100)).collect();
            Node {
                costs: usages.iter().map(|u| Cost::finite(1000 - 8 * u)).collect(),
                usages,
                interval: [u64::from(v), u64::from(v + n)],
            }
        })
        .collect();
    let ends = (0..n * n).flat_map(|v| [(v, v + 1), (v, v + n)]);
    let edges = ends
        .filter(|&(a, b)| b < n * n && (b != a + 1 || b % n != 0))
        .map(|(a, b)| {
            let cells: Vec<Cost> = (0..25).map(|_| Cost::finite(random(1000))).collect();
            let table = std::sync::Arc::new(Table::new(5, 5, cells).unwrap());
            Edge { a, b, table }
        })
        .collect();
    let problem = IntraOpProblem {
        name: "grid".into(),
        nodes,
        edges,
        usage_limit: Some(u64::from(n) * 35),
    };
    let mut bytes = Vec::new();
    write_problem(&problem, &mut bytes).unwrap();
    bytes
}

fn last_line(out: &str) -> serde_json::Value {
    serde_json::from_str(out.trim().lines().last().unwrap()).unwrap()
}

#[test]
fn the_example_of_the_documents_is_solved() {
    let place = Place::new();
    let example = repository().join("examples/intra_op/two_matmuls.json");
    let done = place.run(&["solve", example.to_str().unwrap(), "-o", "s.json"]);
    let done = done.expect(0);
    // 400 + 0 + 260: the first replicated, the second by columns; 2 + 4 of 11 bytes.
    let line = last_line(&done.out);
    assert_eq!(line["status"], "optimal");
    assert_eq!(line["objective"], 400 + 260);
    assert_eq!(line["peak_usage"], 2 + 4);
    assert_eq!(place.read("s.json"), b"[0,1]\n");
    let trace = line["trace"].as_array().unwrap();
    assert_eq!(trace.last().unwrap()[1], 660, "{trace:?}");
}

#[test]
fn a_work_limit_gives_the_same_solution_twice() {
    let place = Place::new();
    place.write("hard.json", hard_problem(6));
    for output in ["a.json", "b.json"] {
        place
            .run(&[
                "solve",
                "hard.json",
                "--threads",
                "2",
                "--work-limit",
                "1",
                "--seed",
                "5",
                "-o",
                output,
            ])
            .expect(0);
    }
    assert_eq!(place.read("a.json"), place.read("b.json"));
}

#[test]
fn a_time_limit_and_an_interrupt_give_the_best_so_far() {
    let place = Place::new();
    place.write("hard.json", hard_problem(30));
    let begun = std::time::Instant::now();
    let done = place.run(&["solve", "hard.json", "--time-limit", "2", "-o", "t.json"]);
    // The limit covers the whole command; starting it on a busy machine takes a while.
    assert!(begun.elapsed().as_secs_f64() < 4.0, "{:?}", begun.elapsed());
    assert_eq!(last_line(&done.expect(0).out)["status"], "feasible");
    assert!(place.exists("t.json"));
    #[cfg(unix)]
    {
        let child = std::process::Command::new(env!("CARGO_BIN_EXE_meshwright"))
            .args(["solve", "hard.json", "--threads", "2", "-o", "i.json"])
            .current_dir(place.path("."))
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        std::thread::sleep(std::time::Duration::from_secs(4));
        let id = child.id().to_string();
        let sent = std::process::Command::new("kill")
            .args(["-INT", &id])
            .status();
        assert!(sent.unwrap().success());
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        let line = last_line(std::str::from_utf8(&output.stdout).unwrap());
        assert_eq!(line["status"], "feasible");
        assert!(place.exists("i.json"));
    }
}

/// An instance from a pipe that is never written to the end: the interrupt comes while it is
/// read.
#[cfg(unix)]
#[test]
fn an_interrupt_while_the_instance_is_read_ends_with_a_message() {
    use std::io::{BufRead, BufReader, Read, Write};
    let place = Place::new();
    let made = std::process::Command::new("mkfifo")
        .arg(place.path("pipe.json"))
        .status();
    assert!(made.unwrap().success());
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_meshwright"))
        .args(["solve", "pipe.json", "-o", "none.json"])
        .current_dir(place.path("."))
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    // Opens when the command does.
    let mut pipe = std::fs::File::create(place.path("pipe.json")).unwrap();
    pipe.write_all(b"{\"problem\": {").unwrap();
    let sent = std::process::Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status();
    assert!(sent.unwrap().success());
    let mut errors = BufReader::new(child.stderr.take().unwrap());
    let mut said = String::new();
    errors.read_line(&mut said).unwrap();
    assert!(said.starts_with("interrupted: "), "{said}");
    drop(pipe);
    errors.read_to_string(&mut said).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{said}");
    assert!(
        said.contains("interrupted while the instance was read"),
        "{said}"
    );
    assert!(!place.exists("none.json"));
}

#[test]
fn within_a_gap_is_feasible_with_exit_code_0() {
    let place = Place::new();
    place.write("grid.json", hard_problem(5));
    let line = |gap: &str| {
        let done = place.run(&["solve", "grid.json", "--gap", gap, "-o", "g.json"]);
        last_line(&done.expect(0).out)
    };
    let (rough, exact) = (line("0.9"), line("0"));
    assert_eq!(exact["status"], "optimal");
    assert_eq!(
        (&exact["gap"], &exact["objective"]),
        (&0.0.into(), &exact["lower_bound"])
    );
    assert_eq!(rough["status"], "feasible");
    let gap = rough["gap"].as_f64().unwrap();
    assert!(gap > 0.0 && gap <= 0.9, "{rough}");
}

#[test]
fn this_machine_is_measured_and_planned_for() {
    let place = Place::new();
    let done = place
        .run(&["calibrate", "--quick", "--ranks", "2", "--verbose"])
        .expect(0);
    for words in [
        "matmul f32",
        "all_reduce",
        "spread",
        "fitted",
        "Written to cluster.toml",
    ] {
        assert!(
            done.out.contains(words),
            "`{words}` is not in:\n{}",
            done.out
        );
    }
    place
        .run(&[
            "compile",
            "config.json",
            "--cluster",
            "cpu",
            "--ranks",
            "4",
            "--global-batch",
            "4",
            "--pin",
            "data=4",
        ])
        .expect(0);
    let plan: serde_json::Value = serde_json::from_slice(&place.read("plan.json")).unwrap();
    assert_eq!(plan["cluster"]["pool"]["devices"], 4);
    assert!(!plan["cluster"]["sources"].as_object().unwrap().is_empty());
}

#[test]
fn a_plan_for_gpus_runs_here_with_a_warning_and_is_not_compared() {
    let place = Place::new();
    let compile = ["compile", "config.json", "--cluster", "dgx-h100"];
    let more = ["--global-batch", "8", "--pin", "data=8"];
    place.run(&[&compile[..], &more[..]].concat()).expect(0);
    let done = train(&place, &[]).expect(0).says(&[
        "warning: this plan is for NVIDIA H100",
        "CPU threads",
        "do not apply",
        "meshwright calibrate",
    ]);
    assert!(done.out.contains("MFU unknown"), "{}", done.out);
    let run: serde_json::Value = serde_json::from_slice(&place.read("run.json")).unwrap();
    let said = run["executed_on"].as_str().unwrap();
    assert!(said.starts_with("8 threads on "), "{said}");
    let compared = place.run(&["compare", "plan.json", "run.json"]).expect(0);
    assert!(
        compared
            .out
            .starts_with("These figures are of different devices")
            && compared.out.contains(said)
            && compared.out.contains("meshwright calibrate")
            && !compared.out.contains("largest difference"),
        "{}",
        compared.out
    );
    let json = place.run(&["compare", "plan.json", "run.json", "--json"]);
    let json = json.expect(0).json();
    assert!(json["different_devices"].is_string());
    assert!(json["comparison"]["step_time_s"]["ratio"].is_null());
    // A plan for CPU ranks is compared without reservations.
    let place = Place::with_plan();
    let done = train(&place, &[]).expect(0);
    assert!(!done.err.contains("warning"), "{}", done.err);
    let json = place.run(&["compare", "plan.json", "run.json", "--json"]);
    let json = json.expect(0).json();
    assert!(json["different_devices"].is_null());
    assert!(json["comparison"]["step_time_s"]["ratio"].is_number());
}

/// The explanations of a plan in words: why stages are interleaved, which share a mesh, and what the gap
/// and the simulated time are to the objective.
#[test]
fn a_plan_explains_itself() {
    let place = Place::new();
    let compile = |cluster: &str, pins: &str| {
        let args = ["compile", "config.json", "--cluster", cluster];
        let more = ["--global-batch", "8", "--pin", pins];
        place.run(&[&args[..], &more[..]].concat()).expect(0);
        let inspected = place.run(&["inspect", "plan.json"]).expect(0).out;
        place.run(&["simulate", "plan.json"]).expect(0);
        inspected
    };
    // Two meshes, two stages on each, eight microbatches of one sample.
    let said = compile("cpu-default", "pipeline=2 virtual=2 microbatch=1");
    // Sentences, wherever their lines are broken.
    let flat = said.split_whitespace().collect::<Vec<_>>().join(" ");
    for words in [
        "waits for 1 / (2 x 8 + 1) = 5.9% of the step",
        "with one stage on each mesh, for 1 / (8 + 1) = 11.1%",
        "Stages 0 to 2: 2 ranks each, mesh y 2",
        "shared by stages 1+3",
        "(0+2 are stages of one mesh",
        "a microbatch",
        "a step",
        "a rank",
        "  gap: ",
        "  simulated: ",
    ] {
        assert!(
            said.contains(words) || flat.contains(words),
            "`{words}` is not in:\n{said}"
        );
    }
    // The part of the peak beside the arena has its column, and the proof's words are explained.
    for words in ["outside the arena; peak", "(elimination: "] {
        assert!(
            said.contains(words) || flat.contains(words),
            "`{words}` is not in:\n{said}"
        );
    }
    let said = compile("cpu-default", "pipeline=2");
    for word in ["Interleaved", "shared by"] {
        assert!(!said.contains(word), "`{word}` is in:\n{said}");
    }
}

/// Two plans side by side: what they predict, what differs, and nothing where they are the same.
#[test]
fn a_plan_is_shown_against_another() {
    let place = Place::new();
    let compile = |name: &str, more: &[&str]| {
        let args = ["compile", "config.json", "-o", name, "--cluster"];
        place.run(&[&args[..], more].concat()).expect(0)
    };
    let one = ["cpu-default", "--pin", "data=1,pipeline=1,microbatch=8"];
    let said = compile("a.json", &[&one[..], &["--ranks", "1"]].concat()).out;
    // One of a thing is no plural.
    assert!(
        said.contains("1 stage, schedule") && said.contains("1 microbatch of 8 samples"),
        "{said}"
    );
    for words in [
        "1 stages",
        "1 microbatches",
        "1 candidates",
        "1 devices",
        "1 plans",
    ] {
        assert!(
            !said.contains(&format!(" {words}")),
            "`{words}` is in:\n{said}"
        );
    }
    compile(
        "b.json",
        &["cpu-default", "--pin", "pipeline=2", "--seed", "7"],
    );
    let against = |a: &str, b: &str| {
        let args = ["inspect", a, "--against", b];
        place.run(&args).expect(0).out
    };
    let said = against("a.json", "b.json");
    for words in [
        "a.json",
        "b.json",
        "step time",
        "MFU",
        "peak memory",
        "collectives",
        "change",
        "layers of the stages",
        "train.seed",
        "pipeline=2",
    ] {
        assert!(said.contains(words), "`{words}` is not in:\n{said}");
    }
    let same = against("a.json", "a.json");
    assert!(same.contains("decide the same."), "{same}");
    let args = ["inspect", "a.json", "--against", "b.json", "--json"];
    let json = place.run(&args).expect(0).json();
    assert_eq!(json["plans"], serde_json::json!(["a.json", "b.json"]));
    assert_eq!(json["predicted"][0]["what"], "step time");
    let differences = json["differences"].as_array().unwrap();
    let of = |what: &str| {
        let found = differences.iter().find(|d| d["what"] == what);
        found.map(|d| d["values"].clone())
    };
    assert_eq!(of("train.seed"), Some(serde_json::json!(["1337", "7"])));
    assert_eq!(of("stages"), Some(serde_json::json!(["1", "2"])));
    assert_eq!(of("model"), None);
    assert_eq!((of("graph"), of("strategies")), (None, None));
    assert_eq!(json["notes"], serde_json::json!([]));
    // One stage sends nothing, and nothing is no negative number.
    let transfers = |json: &serde_json::Value, side: usize| {
        let all = json["predicted"].as_array().unwrap();
        let found = all.iter().find(|q| q["what"] == "transfers").unwrap();
        found["values"][side].as_f64().unwrap()
    };
    let none = transfers(&json, 0);
    assert!(none == 0.0 && none.is_sign_positive(), "{none}");
    assert!(transfers(&json, 1) > 0.0);
    // Another model of the same name.
    let wider = support::CONFIG.replace("\"n_embd\": 16", "\"n_embd\": 32");
    place.write("wide.json", wider.as_bytes());
    let args = ["compile", "wide.json", "-o", "c.json", "--cluster"];
    place
        .run(&[&args[..], &one, &["--ranks", "1"]].concat())
        .expect(0);
    let said = against("a.json", "c.json");
    for words in [
        "graph",
        "parameters of",
        "Both plans are of `gpt2`",
        "different models of the same name",
    ] {
        assert!(said.contains(words), "`{words}` is not in:\n{said}");
    }
    // Plans that differ in single ops alone name them.
    let of_ranks = |name: &str, spec: &str| {
        let pins = ["--pin", "tensor=2 pipeline=1 microbatch=8", "--pin", spec];
        compile(
            name,
            &[&["cpu-default", "--ranks", "2"][..], &pins].concat(),
        )
    };
    of_ranks("d.json", "spec:h.*.mlp.fc.weight=[_,tensor]");
    of_ranks("e.json", "spec:h.*.mlp.fc.weight=[tensor,_]");
    let said = against("d.json", "e.json");
    assert!(!said.contains("fnv1a64"), "{said}");
    assert!(
        said.contains("single ops") || said.contains("axes"),
        "{said}"
    );
    place.refuses(&["inspect", "a.json", "--against", "none.json"], &[3]);
    let both = ["inspect", "a.json", "--layers", "--against", "b.json"];
    place.refuses(&both, &[2]);
}
