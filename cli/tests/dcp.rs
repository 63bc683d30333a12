//! Checkpoints as PyTorch's `torch.distributed.checkpoint` has them, there and back.

#![allow(clippy::unwrap_used)]

mod support;

use std::process::Command;
use support::{Place, repository};

const RUN: [&str; 5] = ["run", "plan.json", "--data", "text.txt", "--steps"];

/// A place with a checkpoint of two ranks in `state`, whose moments lie in two parts.
fn trained() -> Place {
    let place = Place::new();
    let compile = ["compile", "config.json", "--cluster", "cpu-default"];
    let pins = ["--ranks", "2", "--global-batch", "2", "--pin", "data=2"];
    let zero = ["--pin", "zero=1"];
    place.run(&[&compile[..], &pins, &zero].concat()).expect(0);
    let state = ["3", "--checkpoint", "state"];
    place.run(&[&RUN[..], &state].concat()).expect(0);
    place
}

/// The files of the checkpoint that comes of one more step.
fn one_step(place: &Place, from: &str, to: &str) -> Vec<Vec<u8>> {
    let more = ["1", "--resume", from, "--checkpoint", to];
    place.run(&[&RUN[..], &more].concat()).expect(0);
    let name = place.names_in(to).pop().unwrap();
    let shards = ["rank-0.safetensors", "rank-1.safetensors"];
    let read = |shard| place.read(&format!("{to}/{name}/{shard}"));
    shards.map(read).into()
}

#[test]
fn a_checkpoint_goes_to_pytorch_s_form_and_back() {
    let place = trained();
    let convert = |args: &[&str]| place.run(&[&["checkpoint", "convert"], args].concat());
    let to = convert(&["state", "--to", "dcp", "-o", "there"]).expect(0);
    assert!(to.out.contains("after 3 steps"), "{}", to.out);
    assert_eq!(
        place.names_in("there"),
        [".metadata", "__0_0.distcp", "__1_0.distcp"]
    );
    let back = ["there", "--plan", "plan.json", "-o", "again", "--json"];
    let said = convert(&back).expect(0).json();
    assert_eq!(
        (&said["step"], &said["left_out"]),
        (&3.into(), &serde_json::json!([]))
    );
    assert_eq!(
        one_step(&place, "again", "a"),
        one_step(&place, "state", "b")
    );

    // What cannot be is said, and nothing is written.
    let says = |args: &[&str], code, words: &[&str]| {
        let before = place.names();
        convert(args).expect(code).says(words);
        assert_eq!(place.names(), before);
    };
    says(&["state", "-o", "x"], 2, &["--config", "--to dcp"]);
    says(
        &["state", "--to", "dcp", "-o", "there"],
        2,
        &["there is something in it"],
    );
    says(
        &["there", "-o", "x"],
        2,
        &["checkpoint of PyTorch", "--plan"],
    );
    // Where a training state is wanted, the way to make one is said.
    let how = "meshwright checkpoint convert there --plan PLAN -o NEW";
    let run = [&RUN[..], &["1", "--resume", "there"]].concat();
    for args in [&run[..], &["checkpoint", "verify", "there"]] {
        place
            .run(args)
            .expect(3)
            .says(&["checkpoint of PyTorch", how]);
    }
    says(
        &["state", "--plan", "plan.json", "-o", "x"],
        2,
        &["is no checkpoint of PyTorch"],
    );
    std::fs::write(place.path("there/.metadata"), b"\x80\x02cos\nsystem\n.").unwrap();
    says(
        &["there", "--plan", "plan.json", "-o", "again"],
        3,
        &["`os.system`", "nothing of it was executed"],
    );
}

/// Attention in blocks is said wherever other software would see all, and what it changes in the report
/// of the plan.
#[test]
fn attention_in_blocks_is_said() {
    let place = Place::new();
    let mut config: serde_json::Value = serde_json::from_slice(&place.read("config.json")).unwrap();
    config["sparse_attention"] = serde_json::json!({"mode": "bslongformer", "block": 4,
        "attention": "unidirectional"});
    place.write("config.json", config.to_string().as_bytes());
    let compile = ["compile", "config.json", "--cluster", "cpu-default"];
    let pins = ["--ranks", "2", "--global-batch", "2", "--pin", "data=2"];
    let said = place.run(&[&compile[..], &pins].concat()).expect(0).out;
    let line = "Attention: a query sees blocks of 4 tokens: the last 2, and the first 1;";
    let flat = support::flat(&said);
    assert!(flat.contains(line), "{said}");
    assert!(
        flat.contains("so losses differ from those of full attention"),
        "{said}"
    );
    support::assert_fits(&said);
    let state = ["1", "--checkpoint", "state"];
    place.run(&[&RUN[..], &state].concat()).expect(0);
    let hf = ["checkpoint", "convert", "state", "--config", "config.json"];
    let said = place.run(&[&hf[..], &["-o", "hf"]].concat()).expect(0).out;
    let there = "transformers has no such attention: there it sees all tokens.";
    assert!(support::flat(&said).contains(there), "{said}");
    support::assert_fits(&said);
    // What is there is none of DeepSpeed's patterns.
    config["sparse_attention"]["mode"] = "strided".into();
    place.write("config.json", config.to_string().as_bytes());
    place
        .run(&[&compile[..], &pins].concat())
        .expect(3)
        .says(&["sparse_attention.mode", "\"bslongformer\""]);
}

#[test]
fn weights_go_to_pytorch_s_form_as_transformers_call_them_and_back() {
    let place = trained();
    let convert = |args: &[&str]| place.run(&[&["checkpoint", "convert"], args].concat());
    let config = ["--config", "config.json"];
    let to = ["state", "--to", "dcp", "--prefix", "model.", "-o", "there"];
    let done = convert(&[&to[..], &config].concat()).expect(0);
    assert!(done.out.contains("transformers' names"), "{}", done.out);
    let names = String::from_utf8_lossy(&place.read("there/.metadata")).into_owned();
    for name in [
        "model.transformer.wte.weight",
        "model.transformer.h.1.attn.c_attn.weight",
    ] {
        assert!(names.contains(name), "{names}");
    }
    assert!(!names.contains("moment"), "{names}");
    convert(&[&["there", "-o", "again"], &config[..]].concat()).expect(0);
    convert(&[&["state", "-o", "straight"], &config[..]].concat()).expect(0);
    // Headers may be written otherwise.
    let values = |folder: &str| {
        let file = place.read(&format!("{folder}/model.safetensors"));
        let header = u64::from_le_bytes(*file.first_chunk().unwrap()) as usize;
        file[8 + header..].to_vec()
    };
    assert_eq!(values("again"), values("straight"));
    let run = [&RUN[..], &["1", "--weights", "again"]].concat();
    place.run(&run).expect(0);
    // Nothing is left beside, and the weights of another form are no states.
    assert!(place.names().iter().all(|n| !n.starts_with(".meshwright")));
    // What is called otherwise is refused, with the flag for it, and leaves no folder.
    convert(&["there", "--plan", "plan.json", "-o", "x/y"])
        .expect(3)
        .says(&["it has no tensor"]);
    convert(&["state", "--to", "dcp", "-o", "own"]).expect(0);
    let refused = convert(&["own", "--config", "config.json", "-o", "x/y"]).expect(3);
    let refused = refused.says(&[
        "it has no tensor",
        "transformers' names",
        "give --plan PLAN",
    ]);
    assert!(!refused.err.contains("plan's states"), "{}", refused.err);
    let other: serde_json::Value = serde_json::from_slice(&place.read("config.json")).unwrap();
    let mut other = other;
    other["n_layer"] = 1.into();
    place.write("other.json", other.to_string().as_bytes());
    let to = [
        "state",
        "--to",
        "dcp",
        "--config",
        "other.json",
        "-o",
        "x/y",
    ];
    convert(&to).expect(3).says(&["in the checkpoint"]);
    assert!(!place.exists("x"));
    convert(&[
        "state",
        "--prefix",
        "model.",
        "--config",
        "config.json",
        "-o",
        "x",
    ])
    .expect(2)
    .says(&["--prefix", "--to dcp"]);
}

/// PyTorch reads what is written here, and what it writes is read, to the bit.
#[test]
fn pytorch_reads_and_writes_the_same() {
    if std::env::var("RUN_SLOW_TESTS").is_err() {
        eprintln!("skipped: RUN_SLOW_TESTS is not set");
        return;
    }
    let python = std::env::var("PYTHON").unwrap_or("python3".into());
    let torch = ["-c", "import torch.distributed.checkpoint"];
    let found = Command::new(&python).args(torch).output();
    if !found.is_ok_and(|o| o.status.success()) {
        eprintln!("skipped: {python} has no PyTorch (PYTHON names another one)");
        return;
    }
    let place = trained();
    let convert = |args: &[&str]| place.run(&[&["checkpoint", "convert"], args].concat());
    convert(&["state", "--to", "dcp", "-o", "there"]).expect(0);
    let step = place.names_in("state").pop().unwrap();
    let done = Command::new(&python)
        .arg(repository().join("cli/tests/support/dcp.py"))
        .args(["there", &format!("state/{step}"), "from-pytorch"])
        .current_dir(place.path("."))
        .output()
        .unwrap();
    let words = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{words}");
    let back = [
        "from-pytorch",
        "--plan",
        "plan.json",
        "-o",
        "again",
        "--json",
    ];
    let said = convert(&back).expect(0).json();
    assert_eq!(said["step"], 3);
    assert_eq!(said["left_out"], serde_json::json!(["epoch", "notes"]));
    assert_eq!(
        one_step(&place, "again", "a"),
        one_step(&place, "state", "b")
    );
}
