//! The safety of files: nothing that fails replaces what was good, what is damaged or of another
//! model is refused, and what dead writers left goes.

#![allow(clippy::unwrap_used)]
#![cfg(target_os = "linux")]

mod support;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{Done, Place, flat};

/// `run` of the plan at hand, with `more` words.
fn run(place: &Place, more: &[&str]) -> Done {
    place.run(&[&["run", "plan.json", "--data", "text.txt"], more].concat())
}

/// The number of the first step of a measurement.
fn first_step(place: &Place, name: &str) -> u64 {
    let run: serde_json::Value = serde_json::from_slice(&place.read(name)).unwrap();
    run["steps"][0]["step"].as_u64().unwrap()
}

/// All files below a folder, in order of their paths.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => all.extend(files(&path)),
            false => all.push(path),
        }
    }
    all.sort();
    all
}

/// The process as a shell starts it after `before`.
fn after(place: &Place, before: &str, args: &[&str]) -> std::process::Output {
    Command::new("sh")
        .args(["-c", &format!("{before}; exec \"$0\" \"$@\"")])
        .arg(env!("CARGO_BIN_EXE_meshwright"))
        .args(args)
        .current_dir(place.path("."))
        .output()
        .unwrap()
}

/// A diverged run used to replace the training state that it went on from.
#[test]
fn a_run_that_diverges_leaves_the_checkpoint_that_it_went_on_from() {
    let place = Place::with_plan();
    run(&place, &["--steps", "2", "--checkpoint", "state"]).expect(0);
    let on = ["--resume", "state", "--checkpoint", "state"];
    // The loss of later steps is no number; that of the only step is one, but not what it leaves.
    for steps in ["5", "1"] {
        let wild = ["--steps", steps, "--lr", "1e40", "-o", "wild.json"];
        run(&place, &[&on[..], &wild].concat()).expect(6);
    }
    run(&place, &[&on[..], &["--steps", "1"]].concat()).expect(0);
    assert_eq!(first_step(&place, "run.json"), 2);
}

/// A checkpoint that could not be written used to take weights and measurement with it.
#[test]
fn a_checkpoint_that_fails_discards_nothing_else() {
    let place = Place::with_plan();
    let saved = ["--save", "w.safetensors", "--config", "config.json"];
    let words = ["--steps", "1000", "--checkpoint", "state"];
    let child = Command::new(env!("CARGO_BIN_EXE_meshwright"))
        .args(["run", "plan.json", "--data", "text.txt"])
        .args([&saved[..], &words].concat())
        .current_dir(place.path("."))
        .stderr(std::process::Stdio::piped())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    while !place.exists("state") {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    // Its outputs have been looked at, and it trains; a step takes milliseconds.
    std::thread::sleep(std::time::Duration::from_millis(300));
    // A file stands where the folder was.
    std::fs::remove_dir_all(place.path("state")).unwrap();
    place.write("state", b"no folder");
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("state"), "{said}");
    assert_eq!(first_step(&place, "run.json"), 0);
    std::fs::create_dir(place.path("model")).unwrap();
    for (from, to) in [
        ("w.safetensors", "model/model.safetensors"),
        ("config.json", "model/config.json"),
    ] {
        std::fs::rename(place.path(from), place.path(to)).unwrap();
    }
    run(&place, &["--steps", "1", "--weights", "model"]).expect(0);
}

/// Every file of a checkpoint is covered: cut off, with a bit of its middle turned, with zeros
/// for its second half, empty, missing.
#[test]
fn damaged_checkpoints_are_refused() {
    let place = Place::with_plan();
    run(&place, &["--steps", "1", "--checkpoint", "state"]).expect(0);
    let on = ["--steps", "1", "--resume", "state"];
    for file in files(&place.path("state")) {
        let good = std::fs::read(&file).unwrap();
        let half = good.len() / 2;
        let mut turned = good.clone();
        turned[half] ^= 1;
        let mut zeros = good.clone();
        zeros[half..].fill(0);
        for bad in [
            &turned[..],
            &zeros,
            // The last byte of the manifest ends a line.
            &good[..good.len() - 2],
            &good[..half],
            b"",
        ] {
            // The last moments of some ranks are zeros anyway.
            if bad == good {
                continue;
            }
            std::fs::write(&file, bad).unwrap();
            let name = file.file_name().unwrap().to_string_lossy().into_owned();
            run(&place, &on)
                .expect(3)
                .says(&[&name, "checkpoint verify"]);
        }
        std::fs::remove_file(&file).unwrap();
        run(&place, &on).expect(3);
        std::fs::write(&file, &good).unwrap();
    }
    run(&place, &on).expect(0);
}

/// A writer, a disk or a copy may stop anywhere: a shard and the manifest are cut off at some forty
/// places each, spread over all of it, and at those of the lengths that a shard begins with.
#[test]
fn a_file_that_is_cut_off_anywhere_is_damaged() {
    let place = Place::with_plan();
    run(&place, &["--steps", "1", "--checkpoint", "state"]).expect(0);
    let verify = ["checkpoint", "verify", "state"];
    let all = files(&place.path("state")).into_iter();
    let is_wanted = |f: &PathBuf| {
        let name = f.file_name().unwrap().to_string_lossy().into_owned();
        name == "manifest.json" || name.contains("rank-0.")
    };
    let wanted: Vec<PathBuf> = all.filter(is_wanted).collect();
    assert_eq!(wanted.len(), 2, "{wanted:?}");
    for file in wanted {
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        let good = std::fs::read(&file).unwrap();
        // The last byte of the manifest ends a line.
        let last = good.len() - 2;
        let cuts = (0..=last).step_by((last / 40).max(1));
        for cut in cuts.chain(1..10).chain([last]) {
            std::fs::write(&file, &good[..cut]).unwrap();
            let done = place.run(&verify);
            let words = format!("{} {}", flat(&done.out), flat(&done.err));
            assert_eq!(done.code, 5, "{name} cut off at {cut}: {words}");
            support::assert_no_panic(&done);
            assert!(words.contains(&name), "cut off at {cut}: {words}");
        }
        std::fs::write(&file, &good).unwrap();
        place.run(&verify).expect(0);
    }
}

/// The newest checkpoint that is whole is what a run goes on from.
#[test]
fn a_run_goes_on_from_the_newest_checkpoint_that_is_whole() {
    let place = Place::with_plan();
    let kept = ["--steps", "1", "--checkpoint", "state"];
    run(&place, &kept).expect(0);
    let older = files(&place.path("state"));
    run(&place, &[&kept[..], &["--resume", "state"]].concat()).expect(0);
    let newer = files(&place.path("state"));
    let newest = newer.iter().rfind(|f| !older.contains(f)).unwrap();
    std::fs::write(newest, b"").unwrap();
    let name = newest.file_name().unwrap().to_string_lossy().into_owned();
    run(&place, &["--steps", "1", "--resume", "state"])
        .expect(0)
        .says(&["passed over", &name]);
    assert_eq!(first_step(&place, "run.json"), 1);
}

/// Where no checkpoint is whole, all of them are named, the newest first.
#[test]
fn a_run_that_cannot_go_on_names_all_damaged_checkpoints() {
    let place = Place::with_plan();
    let kept = ["--steps", "1", "--checkpoint", "state"];
    run(&place, &kept).expect(0);
    run(&place, &[&kept[..], &["--resume", "state"]].concat()).expect(0);
    for file in files(&place.path("state")) {
        if file.to_string_lossy().contains("rank-0") {
            std::fs::write(&file, b"").unwrap();
        }
    }
    let done = run(&place, &["--steps", "1", "--resume", "state"]).expect(3);
    let all = "none of its 2 checkpoints is whole, newest first";
    let done = done.says(&[all]);
    let at = |name: &str| {
        done.err
            .find(name)
            .unwrap_or_else(|| panic!("{name}: {}", done.err))
    };
    assert!(at("0002-step-2") < at("0001-step-1"), "{}", done.err);
}

/// A process that is killed in the middle of a file leaves it; the next run removes it.
#[test]
fn leftovers_of_dead_writers_are_removed() {
    let place = Place::with_plan();
    let library = support::faults(&place);
    let before = place.names();
    let words = ["run", "plan.json", "--data", "text.txt", "--steps", "1"];
    for more in [
        &["--save", "w.safetensors", "--config", "config.json"][..],
        &["--checkpoint", "."],
    ] {
        // Behind the looks at whether it can be written, in the middle of the writing.
        let output = Command::new(env!("CARGO_BIN_EXE_meshwright"))
            .args([&words, more].concat())
            .current_dir(place.path("."))
            .env("LD_PRELOAD", &library)
            .env("FAULT_IN", ".meshwright-tmp-")
            .env("FAULT_AT", "5")
            .output()
            .unwrap();
        assert_eq!(output.status.code(), None, "{output:?}");
        let left = place.names().iter().filter(|n| !before.contains(n)).count();
        assert!(left > 0, "nothing is left to remove");
        place.run(&[&words, more].concat()).expect(0);
        let hidden = place.names().into_iter().filter(|n| n.starts_with('.'));
        assert_eq!(hidden.collect::<Vec<_>>(), [""; 0]);
        for name in place.names().iter().filter(|n| !before.contains(n)) {
            match place.path(name).is_dir() {
                true => std::fs::remove_dir_all(place.path(name)).unwrap(),
                false => std::fs::remove_file(place.path(name)).unwrap(),
            }
        }
    }
}

/// Outputs have the mode of any new file.
#[test]
fn modes_follow_the_umask() {
    let place = Place::with_plan();
    let before = place.names();
    let words = ["run", "plan.json", "--data", "text.txt", "--steps", "1"];
    let outputs = ["--save", "w.safetensors", "--config", "config.json"];
    let kept = ["--checkpoint", "state"];
    let output = after(&place, "umask 027", &[&words[..], &outputs, &kept].concat());
    assert!(output.status.success(), "{output:?}");
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    for file in files(&place.path(".")) {
        let new = file.strip_prefix(place.path(".")).unwrap();
        let name = new.components().next().unwrap().as_os_str();
        if before.contains(&name.to_string_lossy().into_owned()) {
            continue;
        }
        assert_eq!(mode(&file), 0o640, "{}", file.display());
        let folder = file.parent().unwrap();
        if folder.starts_with(place.path("state")) {
            assert_eq!(mode(folder), 0o750, "{}", folder.display());
        }
    }
}

const LLAMA: &str = r#"{
  "model_type": "llama",
  "vocab_size": 256,
  "max_position_embeddings": 16,
  "hidden_size": 16,
  "intermediate_size": 32,
  "num_hidden_layers": 1,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "rms_norm_eps": 1e-05,
  "rope_theta": 10000.0,
  "hidden_act": "silu",
  "tie_word_embeddings": false
}
"#;

/// Weights of a model that differs from the plan's in what their shapes do not show.
#[test]
fn weights_of_another_configuration_are_refused() {
    let place = Place::new();
    let gpt2 = [
        (
            "\"layer_norm_epsilon\": 1e-05",
            "\"layer_norm_epsilon\": 1e-06",
            "layer_norm_epsilon",
        ),
        ("\"gelu_new\"", "\"relu\"", "activation_function"),
        ("\"n_head\": 2", "\"n_head\": 4", "n_head"),
        (
            "\"n_head\": 2",
            "\"n_head\": 2, \"tie_word_embeddings\": false",
            "tie_word_embeddings",
        ),
        (
            "\"n_head\": 2",
            "\"n_head\": 2, \"scale_attn_weights\": false",
            "scale_attn_weights",
        ),
    ];
    let llama = [
        ("10000.0", "500000.0", "rope_theta"),
        ("1e-05", "1e-06", "rms_norm_eps"),
        ("\"silu\"", "\"gelu\"", "hidden_act"),
        ("_heads\": 4", "_heads\": 8", "num_attention_heads"),
        ("false", "true", "tie_word_embeddings"),
        (
            "\"rope_theta\"",
            "\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 2.0}, \"rope_theta\"",
            "rope_scaling",
        ),
    ];
    for (config, cases) in [(support::CONFIG, &gpt2[..]), (LLAMA, &llama)] {
        for (i, (from, to, field)) in cases.iter().enumerate() {
            assert!(config.contains(from), "{from}");
            std::fs::create_dir_all(place.path("model")).unwrap();
            let other = config.replace(from, to);
            place.write("config.json", config.as_bytes());
            place.write("model/config.json", other.as_bytes());
            // Weights of the other model, as it saves them itself.
            let compile = ["--cluster", "cpu-default", "--global-batch", "4"];
            let compile = |of: &str, plan: &str| {
                let words = [&["compile", of], &compile[..], &["-o", plan]].concat();
                place.run(&words).expect(0);
            };
            compile("model", "other.plan");
            compile("config.json", "plan.json");
            let saved = [
                "--config",
                "model/config.json",
                "--save",
                "model/model.safetensors",
                "--force",
            ];
            let words = ["run", "other.plan", "--data", "text.txt", "--steps", "1"];
            place.run(&[&words[..], &saved].concat()).expect(0);
            let done = run(
                &place,
                &["--steps", "1", "--weights", "model", "-o", "no.json"],
            );
            done.expect(3).says(&[field, "the plan"]);
            assert!(!place.exists("no.json"), "case {i}");
        }
    }
}

/// A run that could not save its weights used to say so after all of its steps.
#[test]
fn weights_are_not_saved_as_those_of_another_model() {
    let place = Place::with_plan();
    place.write("llama.json", LLAMA.as_bytes());
    // So many steps would not end.
    let words = [
        "--steps",
        "1000000000",
        "--save",
        "w.safetensors",
        "--config",
    ];
    run(&place, &[&words[..], &["llama.json"]].concat())
        .expect(3)
        .says(&["model_type", "gpt2", "llama"]);
    let wider = support::CONFIG.replace("\"n_embd\": 16", "\"n_embd\": 32");
    place.write("wider.json", wider.as_bytes());
    run(&place, &[&words[..], &["wider.json"]].concat())
        .expect(3)
        .says(&["n_embd", "32", "16"]);
}

/// A checkpoint of a model that has the same states and computes something else.
#[test]
fn checkpoints_of_another_activation_are_refused() {
    let place = Place::with_plan();
    run(&place, &["--steps", "1", "--checkpoint", "state"]).expect(0);
    let relu = support::CONFIG.replace("gelu_new", "relu");
    place.write("config.json", relu.as_bytes());
    let compile = ["compile", "config.json", "--cluster", "cpu-default"];
    place
        .run(&[&compile[..], &["--global-batch", "4"]].concat())
        .expect(0);
    run(
        &place,
        &["--steps", "1", "--resume", "state", "-o", "no.json"],
    )
    .expect(3)
    .says(&["another model", "activation_function", "gelu_tanh", "relu"]);
    assert!(!place.exists("no.json"));
}

/// Other data, another tokenizer or another share for validation are said before anything else.
#[test]
fn a_run_that_goes_on_with_other_data_says_so_first() {
    let place = Place::with_plan();
    run(&place, &["--steps", "2", "--checkpoint", "state"]).expect(0);
    let seen = place.run(&["checkpoint", "inspect", "state"]).expect(0).out;
    assert!(
        seen.contains("data text.txt (3.91 KiB), 3600 tokens of it for training"),
        "{seen}"
    );
    let seen = place
        .run(&["checkpoint", "inspect", "state", "--json"])
        .expect(0)
        .json();
    let data = seen["checkpoints"][0]["data"].as_object();
    assert_eq!(data.unwrap()["bytes"], 4000, "{seen}");
    let on = |data: &str, more: &[&str]| {
        let args = [
            "run",
            "plan.json",
            "--data",
            data,
            "--resume",
            "state",
            "--steps",
            "1",
        ];
        place.run(&[&args[..], more].concat()).expect(0)
    };
    let same = on("text.txt", &[]);
    assert!(!same.err.contains("was trained on"), "{}", same.err);
    // A copy elsewhere is the same data.
    place.write("moved.txt", place.read("text.txt"));
    assert!(!on("moved.txt", &[]).err.contains("was trained on"));
    place.write("other.txt", place.read("text.txt").repeat(2));
    let other = on("other.txt", &[]);
    assert!(
        other
            .err
            .starts_with("warning: state/0001-step-2 was trained on other data: text.txt"),
        "{}",
        other.err
    );
    other.says(&["other.txt (7.81 KiB) now", "goes on at sample 8"]);
    let share = on("text.txt", &["--validation-fraction", "0.5"]);
    assert!(share.err.starts_with("warning: "), "{}", share.err);
    // The file is the same: how much of each is trained on tells them apart.
    share.says(&[
        "was trained with another share of the data kept for validation",
        "3600 tokens of it for training, then",
        "2000 tokens of it for training, now",
    ]);
}
