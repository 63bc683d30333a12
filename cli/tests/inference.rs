//! Inference, through the binary: from a config to losses and a comparison.

#![allow(clippy::unwrap_used)] // A test may stop where it likes.

mod support;

use serde_json::json;
use support::{Done, Place};

fn compile(place: &Place, more: &[&str]) -> Done {
    let mut args = vec!["compile", "config.json", "--cluster", "cpu-default"];
    args.extend(["--global-batch", "4", "--inference"]);
    args.extend(more);
    place.run(&args)
}

fn run(place: &Place, more: &[&str]) -> Done {
    let mut args = vec!["run", "plan.json", "--data", "text.txt", "--steps", "3"];
    args.extend(more);
    place.run(&args)
}

#[test]
fn a_model_is_compiled_checked_played_run_and_compared() {
    let place = Place::new();
    let pins = ["--pin", "pipeline=2 data=2 microbatch=2", "--verbose"];
    let done = compile(&place, &pins).expect(0);
    for words in [
        "Inference: global batch 4",
        "schedule forward",
        "of the forward pass",
    ] {
        assert!(done.out.contains(words), "no `{words}`:\n{}", done.out);
    }
    for words in ["backward", "AdamW", "Checkpoint", "gradients"] {
        assert!(!done.out.contains(words), "`{words}`:\n{}", done.out);
    }
    for verb in ["check", "inspect", "explain", "lower", "simulate"] {
        place.run(&[verb, "plan.json"]).expect(0);
    }
    let done = run(&place, &[]).expect(0);
    assert!(done.out.contains("inference of 3 batches on 4 ranks"));
    assert!(done.out.contains("Loss by batch: 5."), "{}", done.out);
    let said = run(&place, &["--json"]).expect(0).json();
    let losses = said["losses"].as_array().unwrap();
    assert_eq!(losses.len(), 3);
    let first = losses[0].as_f64().unwrap();
    // Random weights guess among 256 bytes.
    assert!((first - 256f64.ln()).abs() < 0.1, "{first}");
    let measured: serde_json::Value = serde_json::from_slice(&place.read("run.json")).unwrap();
    assert_eq!(measured["steps"][0]["loss"], losses[0]);
    assert!(measured["steps"][0]["grad_norm"].is_null());
    let done = place.run(&["compare", "plan.json", "run.json"]).expect(0);
    assert!(done.out.contains("step time"), "{}", done.out);
}

/// A trained model is evaluated: the loss of the first batch is that which training goes on with.
#[test]
fn a_trained_checkpoint_is_evaluated() {
    let place = Place::new();
    let train = ["--global-batch", "4", "--pin", "data=2", "-o", "train.json"];
    let mut args = vec!["compile", "config.json", "--cluster", "cpu-default"];
    args.extend(train);
    args.extend(["--ranks", "2"]);
    place.run(&args).expect(0);
    let on = ["--data", "text.txt", "--steps", "2", "--json"];
    let training = |more: &[&str]| {
        let args: Vec<&str> = ["run", "train.json"]
            .iter()
            .chain(&on)
            .chain(more)
            .copied()
            .collect();
        place.run(&args).expect(0).json()
    };
    training(&["--checkpoint", "state"]);
    let next = training(&["--resume", "state"])["first_loss"]
        .as_f64()
        .unwrap();
    compile(&place, &["--ranks", "1"]).expect(0);
    let said = run(&place, &["--resume", "state", "--json"])
        .expect(0)
        .json();
    let loss = said["losses"][0].as_f64().unwrap();
    assert!((loss - next).abs() < 1e-5 * next, "{loss} against {next}");
}

/// Modules that predict further tokens are trained, on samples with more tokens than others have,
/// and left out of inference, to which a checkpoint of the training goes all the same; one without
/// them does not go on as one with them.
#[test]
fn modules_for_further_tokens_are_of_training_alone() {
    let place = Place::new();
    let model = |more: serde_json::Value| {
        let mut config = json!({
            "model_type": "deepseek_v3", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 2, "intermediate_size": 16, "q_lora_rank": 8, "kv_lora_rank": 8,
            "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4,
            "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 1,
            "topk_group": 1, "first_k_dense_replace": 1, "vocab_size": 256, "max_position_embeddings": 32,
        });
        let more = more.as_object().unwrap().clone();
        config.as_object_mut().unwrap().extend(more);
        place.write("config.json", config.to_string());
    };
    let compiled = |plan: &str, more: &[&str]| {
        let mut args = vec![
            "compile",
            "config.json",
            "--cluster",
            "cpu-default",
            "--ranks",
            "1",
        ];
        args.extend(["--global-batch", "4", "-o", plan]);
        args.extend(more);
        place.run(&args).expect(0)
    };
    model(json!({"num_nextn_predict_layers": 1}));
    place.write("with.json", place.read("config.json"));
    compiled("train.json", &[]);
    let out = compiled("plan.json", &["--inference"]).out;
    assert!(!out.contains("mtp"), "{out}");
    let train = |plan: &str, more: &[&str]| {
        let mut args = vec!["run", plan, "--data", "text.txt", "--steps", "2", "--json"];
        args.extend(more);
        place.run(&args)
    };
    let said = train("train.json", &["--checkpoint", "state"])
        .expect(0)
        .json();
    let first = said["first_loss"].as_f64().unwrap();
    // A tenth of a second loss.
    assert!((first - 1.1 * 256f64.ln()).abs() < 0.1, "{first}");
    let said = run(&place, &["--resume", "state", "--json"])
        .expect(0)
        .json();
    let loss = said["losses"][0].as_f64().unwrap();
    assert!((loss - 256f64.ln()).abs() < 0.1, "{loss}");
    // 32 inputs, their last label, and the token behind it.
    place.write("short.txt", b"a".repeat(33));
    let args = [
        "run",
        "train.json",
        "--data",
        "short.txt",
        "--validation-fraction",
        "0",
        "--steps",
        "1",
    ];
    place.run(&args).expect(3).says(&["32 + 2"]);
    // How much further tokens count may change on the way.
    model(json!({"num_nextn_predict_layers": 1, "mtp_loss_scaling_factor": 0.3}));
    compiled("later.json", &[]);
    train("later.json", &["--resume", "state"]).expect(0);
    model(json!({"num_nextn_predict_layers": 0}));
    compiled("alone.json", &[]);
    train("alone.json", &["--checkpoint", "alone"]).expect(0);
    for (plan, state) in [("train.json", "alone"), ("alone.json", "state")] {
        let refused = train(plan, &["--resume", state]).expect(3);
        refused.says(&["h.mtp.0", "num_nextn_predict_layers"]);
    }
    // Two uses of the embedding in different stages.
    let pins = [
        "--pin",
        "schedule=pipedream",
        "--pin",
        "pipeline=2",
        "--pin",
        "microbatch=2",
        "--ranks",
        "2",
    ];
    let mut args = vec![
        "compile",
        "with.json",
        "--cluster",
        "cpu-default",
        "--global-batch",
        "4",
    ];
    args.extend(pins);
    args.extend(["--clip-norm", "none"]);
    place.run(&args).says(&["num_nextn_predict_layers"]);
}

#[test]
fn what_is_of_training_is_refused_by_name() {
    let place = Place::new();
    for (args, code, said) in [
        (
            &["--pin", "schedule=zb_h1"][..],
            2,
            "pinned schedule=zb_h1 makes no sense",
        ),
        (
            &["--pin", "recompute=full"],
            2,
            "pinned recompute=full makes no sense",
        ),
        (&["--pin", "zero=2"], 2, "pinned zero=2 makes no sense"),
        (
            &["--pin", "offload=optimizer"],
            2,
            "pinned offload=optimizer makes no sense",
        ),
        (
            &["--preset", "ddp"],
            2,
            "preset ddp is a recipe of training",
        ),
        (
            &["--optimizer", "sgd"],
            2,
            "--optimizer has no meaning in inference",
        ),
        (
            &["--clip-norm", "1"],
            2,
            "--clip-norm has no meaning in inference",
        ),
        (
            &["--dropout", "0.1"],
            2,
            "dropout is 0.1, expected 0 in inference",
        ),
    ] {
        compile(&place, args).expect(code).says(&[said]);
    }
    compile(&place, &[]).expect(0);
    for (args, said) in [
        (&["--lr", "1e-3"][..], "--lr is of training"),
        (&["--warmup", "2"], "--warmup is of training"),
        (&["--schedule", "cosine"], "--schedule is of training"),
        (&["--checkpoint", "state"], "--checkpoint is of training"),
        (
            &["--validate-every", "1"],
            "--validate-every is of training",
        ),
    ] {
        run(&place, args)
            .expect(2)
            .says(&[said, "plan.json is a plan for inference"]);
    }
}

/// A file of what is trained may say it too, and without the word nothing changes.
#[test]
fn a_file_asks_for_inference() {
    let place = Place::new();
    place.write("train.toml", b"task = \"inference\"\nglobal_batch = 2\n");
    let args = [
        "compile",
        "config.json",
        "--cluster",
        "cpu-default",
        "--train",
        "train.toml",
    ];
    let done = place.run(&args).expect(0);
    assert!(
        done.out.contains("Inference: global batch 2"),
        "{}",
        done.out
    );
    place.write("train.toml", b"task = \"dreaming\"\n");
    place.run(&args).expect(3).says(&["train.toml", "dreaming"]);
    place.run(&args[..4]).expect(0);
    let plan = String::from_utf8(place.read("plan.json")).unwrap();
    assert!(!plan.contains("\"task\""));
}
