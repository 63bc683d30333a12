//! `import-job` from the command line on: the verdict, the flags to change, measurements, and that what
//! `export` writes is read back as the plan that it was.

#![allow(clippy::unwrap_used)] // A test may stop where it likes.

mod support;

use serde_json::Value;
use support::Place;

/// A small Llama by Megatron-LM on a host of eight: more is recomputed than has to be.
const SCRIPT: &str = r#"#!/bin/bash
MODEL=(
  --num-layers 4 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16
  --group-query-attention --num-query-groups 8 --seq-length 1024 --max-position-embeddings 1024
  --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
  --untie-embeddings-and-output-weights --vocab-size 51200
  --attention-dropout 0 --hidden-dropout 0
)
torchrun --nproc-per-node 8 --nnodes ${NNODES} pretrain_gpt.py "${MODEL[@]}" \
  --tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 2 \
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --tp-comm-overlap \
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
  --micro-batch-size 1 --global-batch-size 32 --bf16 --grad-reduce-in-bf16 \
  --data-path "$DATA" --make-it-fast 3
"#;

fn place() -> Place {
    let place = Place::new();
    place.write("train.sh", SCRIPT.as_bytes());
    place
}

const IMPORT: [&str; 6] = [
    "import-job",
    "train.sh",
    "--cluster",
    "dgx-h100",
    "--set",
    "NNODES=1",
];

fn import(place: &Place, more: &[&str]) -> support::Done {
    let args: Vec<&str> = IMPORT.iter().chain(more).copied().collect();
    place.run(&args)
}

/// A text without the ends of its lines, which are where the width of the page has them.
fn flat(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn the_verdict_comes_first_and_flags_are_the_jobs_own() {
    let place = place();
    let more = ["-o", "job.json", "--best", "best.json", "--price", "2.5"];
    let said = import(&place, &more).expect(0).out;
    let first = said.lines().next().unwrap();
    assert!(
        first.starts_with("For Megatron-Core (2025, grads-bf16): the job should take "),
        "{said}"
    );
    assert!(said.lines().all(|l| l.chars().count() <= 100), "{said}");
    for part in [
        "it fits, with",
        "The search finds a plan that takes",
        "That saves",
        "Where the step's time goes",
        "--recompute-granularity",
        "(take it out)",
        "Not known here, so nothing is said of what they do --make-it-fast 3 (line 14)",
    ] {
        assert!(flat(&said).contains(part), "`{part}` is not in:\n{said}");
    }
    let json = import(&place, &["--json", "--measured", "100ms"])
        .expect(0)
        .json();
    let step_s = json["predicted"]["step_time_s"].as_f64().unwrap();
    let better = &json["search"]["by_flags"];
    let new_s = better["predicted"]["step_time_s"].as_f64().unwrap();
    let saves = better["saves"].as_f64().unwrap();
    assert!(
        saves > 0.05 && (1.0 - new_s / step_s - saves).abs() < 1e-9,
        "{better}"
    );
    let factor = json["measured"]["factor"].as_f64().unwrap();
    // Kernels or links alone may be at fault; either would have to be slower than the step is longer.
    let causes = json["measured"]["causes"].as_array().unwrap();
    assert!(!causes.is_empty());
    for cause in causes {
        assert!(cause["slower"].as_f64().unwrap() > factor, "{cause}");
        assert!(cause["saves"].as_f64().unwrap() > 0.05, "{cause}");
    }
    assert!((factor * step_s - 0.1).abs() < 1e-9);
    let again = better["recalibrated_step_time_s"].as_f64().unwrap();
    assert!((again - factor * new_s).abs() < 1e-9);
    let flag = |name: &str| {
        let flags = better["flags"].as_array().unwrap();
        flags
            .iter()
            .find(|f| f["name"] == name)
            .cloned()
            .unwrap_or(Value::Null)
    };
    assert_eq!(flag("--recompute-granularity")["old"], "full");
    assert_eq!(flag("--recompute-granularity")["new"], Value::Null);
    // What goes on from the job's plan has its figures.
    let inspected = place
        .run(&["inspect", "job.json", "--json"])
        .expect(0)
        .json();
    assert_eq!(inspected["predicted"]["step_time_s"].as_f64(), Some(step_s));
    place.run(&["check", "job.json"]).expect(0);
    place.run(&["explain", "job.json"]).expect(0);
    place
        .run(&["export", "best.json", "--to", "megatron-core"])
        .expect(0);
}

#[test]
fn overlap_that_a_job_leaves_out_is_priced_and_a_flag_to_change() {
    let place = Place::new();
    let without = SCRIPT.replace(
        "--overlap-grad-reduce --overlap-param-gather --tp-comm-overlap",
        "",
    );
    assert_ne!(without, SCRIPT);
    let step_s = |json: &Value| json["predicted"]["step_time_s"].as_f64().unwrap();
    // Data ranks besides, so that there are gradients to reduce.
    let data = |script: &str| {
        script.replace(
            "--pipeline-model-parallel-size 2",
            "--pipeline-model-parallel-size 1",
        )
    };
    place.write("train.sh", data(&without).as_bytes());
    let json = import(&place, &["--json"]).expect(0).json();
    let left_out = [
        "no-tensor-overlap",
        "no-gradient-overlap",
        "no-parameter-overlap",
        "grads-bf16",
    ];
    assert_eq!(json["for"]["options"], serde_json::json!(left_out));
    place.write("train.sh", data(SCRIPT).as_bytes());
    let all = import(&place, &["--json", "--no-search"]).expect(0).json();
    let saves = 1.0 - step_s(&all) / step_s(&json);
    assert!(saves > 0.01, "{saves}");
    let said = json["search"]["overlap_saves"].as_f64().unwrap();
    assert!((said - saves).abs() < 1e-9, "{said} {saves}");
    let flags = json["search"]["by_flags"]["flags"].to_string();
    assert!(flags.contains("--overlap-grad-reduce"), "{flags}");
}

#[test]
fn what_is_missing_or_wrong_says_how_to_go_on() {
    let place = place();
    let bare = ["import-job", "train.sh", "--cluster", "dgx-h100"];
    let done = place.run(&bare).expect(3);
    done.says(&["`NNODES`, which nothing sets", "--set NNODES=VALUE"]);
    import(&place, &["--set", "NNODES"])
        .expect(2)
        .says(&["expected NAME=VALUE"]);
    import(&place, &["--hosts", "3"])
        .expect(3)
        .says(&["no multiple of 1 samples x 3 data ranks"]);
    import(&place, &["--measured", "soon"])
        .expect(2)
        .says(&["--measured"]);
    import(&place, &["--price", "much"])
        .expect(2)
        .says(&["no price"]);
    import(&place, &["--trace", "text.txt"])
        .expect(3)
        .says(&["text.txt: it is no JSON"]);
    import(&place, &["--log", "text.txt"])
        .expect(3)
        .says(&["no line of it states a step's time"]);
    let done = import(&place, &["--model", "gpt2"]).expect(3);
    done.says(&["--model gpt2 has 12 layers, and the job 4"]);
    place.write(
        "ds.json",
        br#"{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}"#,
    );
    let mut of_json = vec!["import-job", "ds.json", "--cluster", "dgx-h100"];
    place
        .run(&of_json)
        .expect(3)
        .says(&["does not say its model", "--model"]);
    of_json.extend(["--model", "gpt2"]);
    place.run(&of_json).expect(3).says(&["--sequence 4096"]);
    assert!(!place.exists("job.json"));
}

#[test]
fn a_measured_step_of_a_log_is_that_of_its_batch() {
    let place = place();
    let line = |i: u32, ms: u32, batch: u32| {
        format!(
            " iteration {i}/ 9 | elapsed time per iteration (ms): {ms} | global batch size: {batch} |\n"
        )
    };
    place.write(
        "run.log",
        (line(1, 900, 32) + &line(2, 80, 32) + &line(3, 90, 32)).as_bytes(),
    );
    let json = import(&place, &["--log", "run.log", "--no-search", "--json"])
        .expect(0)
        .json();
    let measured = json["measured"]["step_s"].as_f64().unwrap();
    assert!((measured - 0.085).abs() < 1e-9, "{measured}");
    assert_eq!(json["search"], Value::Null);
    let said = import(&place, &["--log", "run.log", "--no-search"])
        .expect(0)
        .out;
    assert!(
        flat(&said).contains("One step time gives one factor"),
        "{said}"
    );
    // No device computes so fast: the unit is wrong.
    import(&place, &["--measured", "80us", "--no-search"])
        .expect(3)
        .says(&["faster than the devices can compute"]);
    let cost = import(&place, &["--price", "2", "--no-search"]).expect(0);
    assert!(flat(&cost.out).contains("A thousand steps of the job cost"));
    place.write("other.log", line(1, 900, 64).as_bytes());
    let done = import(&place, &["--log", "other.log", "--no-search"]).expect(3);
    done.says(&["the log's steps have 64 samples, and the job's 32"]);
}

#[test]
fn a_job_that_does_not_fit_is_predicted_all_the_same() {
    let place = Place::new();
    let script = SCRIPT.replace("--num-layers 4", "--num-layers 64").replace(
        "--hidden-size 1024 --ffn-hidden-size 2816",
        "--hidden-size 16384 --ffn-hidden-size 53248",
    );
    place.write("train.sh", script.as_bytes());
    let done = import(&place, &["--no-search"]).expect(0);
    assert!(
        done.out
            .contains("does not fit: the fullest process would hold"),
        "{}",
        done.out
    );
    import(&place, &["--no-search", "-o", "job.json"])
        .expect(4)
        .says(&["cannot be executed here"]);
    assert!(!place.exists("job.json"));
}

/// Compiles a plan, exports it, and reads the export as a job: both plans.
fn round_trip(compile: &[&str], to: &str, file: &str, more: &[&str]) -> [Value; 2] {
    let place = Place::new();
    let cluster = [
        "--cluster",
        "dgx-h100",
        "--precision",
        "bf16",
        "--for",
        to,
        "-o",
        "plan.json",
    ];
    let args: Vec<&str> = ["compile"]
        .iter()
        .chain(compile)
        .chain(&cluster)
        .copied()
        .collect();
    place.run(&args).expect(0);
    let exported = ["export", "plan.json", "--to", to, "-o", "out", "--json"];
    let mut exported = place.run(&exported).expect(0).json();
    exported["script"] = String::from_utf8(place.read(file)).unwrap().into();
    let import = [
        "import-job",
        file,
        "--cluster",
        "dgx-h100",
        "--no-search",
        "--json",
    ];
    let import: Vec<&str> = import.iter().chain(more).copied().collect();
    let imported = place.run(&import).expect(0).json();
    [exported, imported]
}

fn assert_same([exported, imported]: [Value; 2]) {
    assert_eq!(exported["summary"]["degrees"], imported["degrees"]);
    let [before, after] = [
        &exported["step_time_s"],
        &imported["predicted"]["step_time_s"],
    ];
    let [before, after] = [before, after].map(|s| s.as_f64().unwrap());
    assert!((before / after - 1.0).abs() < 1e-9, "{before} {after}");
    let notes = imported["notes"].as_array().unwrap();
    let unknown: Vec<&Value> = notes.iter().filter(|n| n["kind"] == "unknown").collect();
    assert_eq!(unknown.len(), 0, "{unknown:?}");
}

#[test]
fn an_export_for_megatron_is_read_back_as_its_plan() {
    let pins = "data=2 tensor=2 pipeline=2 virtual=2 zero=1 microbatch=2 recompute=full";
    let compile = [
        "llama-3.1-8b",
        "--global-batch",
        "16",
        "--sequence",
        "4096",
        "--pin",
        pins,
    ];
    assert_same(round_trip(&compile, "megatron-core", "out/launch.sh", &[]));
    let pins = "data=4 tensor=2 pipeline=1 zero=0 microbatch=4 recompute=none";
    let compile = [
        "gpt2-large",
        "--global-batch",
        "16",
        "--sequence",
        "1024",
        "--pin",
        pins,
    ];
    let [exported, imported] = round_trip(&compile, "megatron-core", "out/launch.sh", &[]);
    // Megatron-LM pads the table of tokens, which the export lists.
    assert_eq!(exported["summary"]["degrees"], imported["degrees"]);
    assert_eq!(
        imported["remarks"].as_array().unwrap().len(),
        1,
        "{}",
        imported["remarks"]
    );
}

#[test]
fn slots_of_experts_are_read_back_and_dropped_tokens_are_said() {
    // 1.3 times 2 x 1000 / 16 tokens are 163 slots: as a factor, 1.304.
    for (capacity, stated, sequence, pins) in [
        (
            "1.25",
            "1.25",
            "2048",
            "data=4 expert=4 tensor=2 pipeline=1 zero=1 microbatch=4",
        ),
        (
            "1.3",
            "1.304",
            "1000",
            "data=8 expert=8 tensor=1 pipeline=1 zero=1 microbatch=8",
        ),
        (
            "2",
            "2",
            "1024",
            "data=4 expert=2 tensor=1 pipeline=2 zero=1 microbatch=4",
        ),
    ] {
        let model = Place::new();
        model.write("moe.json", MIXTURE);
        let file = model.path("moe.json").display().to_string();
        let compile = [
            file.as_str(),
            "--global-batch",
            "16",
            "--sequence",
            sequence,
            "--expert-capacity",
            capacity,
            "--pin",
            pins,
            "--pin",
            "recompute=full",
        ];
        let [exported, imported] = round_trip(&compile, "megatron-core", "out/launch.sh", &[]);
        let dropped = exported["not_expressed"].to_string();
        let said = "tokens beyond them are dropped";
        assert!(dropped.contains(said), "{exported}");
        let remarks = imported["remarks"].to_string();
        let said = format!("slots for {stated} times the tokens that it gets on average");
        assert!(remarks.contains(&said), "{remarks}");
        let notes = imported["notes"].as_array().unwrap();
        let uncounted = notes.iter().filter(|n| n["kind"] == "not_modelled");
        assert_eq!(uncounted.count(), 0, "{notes:?}");
        assert_same([exported, imported]);
    }
}

/// A mixture of sixteen experts in four blocks.
const MIXTURE: &str = r#"{
  "model_type": "mixtral", "vocab_size": 32768, "max_position_embeddings": 4096, "hidden_size": 1024,
  "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8,
  "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "num_local_experts": 16,
  "num_experts_per_tok": 2, "tie_word_embeddings": false
}"#;

/// Flags that describe a model: windows of attention, and the blocks of Nemotron.
#[test]
fn models_beside_llama_are_read_back_as_their_plans() {
    let pins = "data=8 tensor=1 pipeline=1 zero=1 microbatch=8 recompute=full";
    for (model, flags) in [
        ("mistral.json", &["--window-size 1023,0 "][..]),
        (
            "nemotron.json",
            &[
                "--squared-relu ",
                "--apply-layernorm-1p ",
                "--rotary-percent 0.5 ",
            ],
        ),
    ] {
        let place = Place::new();
        place.write("nemotron.json", NEMOTRON);
        place.write("mistral.json", MISTRAL);
        let model = place.path(model).display().to_string();
        let args = [
            &model,
            "--global-batch",
            "16",
            "--sequence",
            "4096",
            "--pin",
            pins,
        ];
        let [exported, imported] = round_trip(&args, "megatron-core", "out/launch.sh", &[]);
        let script = exported["script"].as_str().unwrap();
        for flag in flags {
            assert!(script.contains(flag), "{flag}: {script}");
        }
        assert_same([exported, imported]);
    }
}

/// A Mistral of four blocks with a window.
const MISTRAL: &str = r#"{
  "model_type": "mistral", "vocab_size": 32768, "max_position_embeddings": 4096, "hidden_size": 2048,
  "intermediate_size": 8192, "num_hidden_layers": 4, "num_attention_heads": 16,
  "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
  "sliding_window": 1024, "tie_word_embeddings": false
}"#;

/// A Nemotron of four blocks.
const NEMOTRON: &str = r#"{
  "model_type": "nemotron", "vocab_size": 32768, "max_position_embeddings": 4096, "hidden_size": 2048,
  "intermediate_size": 8192, "num_hidden_layers": 4, "num_attention_heads": 16,
  "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "relu2", "norm_eps": 1e-05,
  "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "attention_bias": false, "mlp_bias": false,
  "tie_word_embeddings": false
}"#;

#[test]
fn an_export_for_torchtitan_is_read_back_as_its_plan() {
    let pins = "data=4 tensor=2 pipeline=1 zero=3 microbatch=4 recompute=full";
    let compile = [
        "llama-3.1-8b",
        "--global-batch",
        "16",
        "--sequence",
        "4096",
        "--pin",
        pins,
    ];
    let hosts = ["--hosts", "1"];
    assert_same(round_trip(
        &compile,
        "torchtitan",
        "out/torchtitan.toml",
        &hosts,
    ));
}

#[test]
fn an_export_for_deepspeed_is_read_back_as_its_plan() {
    let pins = "data=8 zero=3 microbatch=8 recompute=none";
    let compile = [
        "llama-3.2-1b",
        "--global-batch",
        "16",
        "--sequence",
        "2048",
        "--pin",
        pins,
    ];
    let more = [
        "--hosts",
        "1",
        "--for",
        "deepspeed",
        "--model",
        "llama-3.2-1b",
        "--sequence",
        "2048",
    ];
    assert_same(round_trip(
        &compile,
        "deepspeed",
        "out/ds_config.json",
        &more,
    ));
}

#[test]
fn what_is_offloaded_is_counted_where_it_rests() {
    let place = Place::new();
    let json = |optimizer: &str| {
        format!(
            r#"{{"zero_optimization": {{"stage": 2{optimizer}}}, "train_micro_batch_size_per_gpu": 1, "bf16": {{"enabled": true}}}}"#
        )
    };
    let import = |more: &[&str]| {
        let args = [
            "import-job",
            "ds.json",
            "--cluster",
            "dgx-a100-40gb",
            "--sequence",
            "512",
        ];
        let set = [
            "--no-search",
            "--model",
            "gpt2-xl",
            "--set",
            "gradient_checkpointing=true",
        ];
        let all: Vec<&str> = args.iter().chain(&set).chain(more).copied().collect();
        place.run(&all).expect(0)
    };
    place.write("ds.json", json("").as_bytes());
    let whole = import(&["--json"]).json();
    let offload = r#", "offload_optimizer": {"device": "cpu"}"#;
    place.write("ds.json", json(offload).as_bytes());
    let moved = import(&["--json"]).json();
    let bytes = |json: &Value, key: &str| json["memory"][key].as_u64().unwrap();
    let gone = bytes(&whole, "peak_bytes") - bytes(&moved, "peak_bytes");
    assert!(gone > 0);
    assert_eq!(bytes(&whole, "host_bytes"), 0);
    assert_eq!(
        bytes(&moved, "host_bytes"),
        8 * gone,
        "eight processes on a host"
    );
    let said = flat(&import(&[]).out);
    assert!(
        said.contains("with what it offloads it fits, with"),
        "{said}"
    );
    assert!(said.contains("in the memory of a host"), "{said}");
    assert!(said.contains("which the cluster does not state"), "{said}");
    assert!(said.contains("on the host"), "{said}");
}

/// A plan that recomputes and offloads nothing is not had by changing the stage alone.
#[test]
fn recomputation_and_offload_are_among_the_changes() {
    let place = Place::new();
    place.write(
        "ds.json",
        br#"{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": false}, "offload_param": {"device": "none"}}, "train_micro_batch_size_per_gpu": 1, "train_batch_size": 16, "bf16": {"enabled": true}}"#,
    );
    place.write(
        "train.sh",
        b"deepspeed --num_gpus 8 train.py --deepspeed ds.json --gradient_checkpointing True\n",
    );
    let import = |more: &[&str]| {
        let args = [
            "import-job",
            "train.sh",
            "--cluster",
            "dgx-a100-40gb",
            "--model",
            "gpt2",
        ];
        let all = [&args[..], &["--sequence", "512"], more].concat();
        place.run(&all).expect(0)
    };
    let flags = import(&["--json"]).json()["search"]["by_flags"]["flags"].clone();
    let flag = |name: &str| {
        let mut flags = flags.as_array().unwrap().iter();
        let found = flags.find(|f| f["name"] == name);
        found
            .unwrap_or_else(|| panic!("{name} is not in {flags:?}"))
            .clone()
    };
    let recompute = flag("--gradient_checkpointing");
    assert_eq!(
        (&recompute["old"], &recompute["new"]),
        (&"True".into(), &"none".into())
    );
    let offload = flag("zero_optimization.offload_optimizer");
    assert_eq!(
        (&offload["old"], &offload["new"]),
        (&"cpu".into(), &Value::Null)
    );
    assert!(!flags.to_string().contains("offload_param"), "{flags}");
}

#[test]
fn a_model_of_the_hub_is_the_one_that_is_built_in() {
    let place = Place::new();
    place.write(
        "ds.json",
        br#"{"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}}"#,
    );
    let script = |model: &str| {
        format!(
            "deepspeed --num_gpus 8 train.py --deepspeed ds.json --max_seq_length 512 --model_name_or_path {model}\n"
        )
    };
    let import = [
        "import-job",
        "train.sh",
        "--cluster",
        "dgx-h100",
        "--no-search",
    ];
    place.write(
        "train.sh",
        script("meta-llama/Llama-3.2-1B-Instruct").as_bytes(),
    );
    let said = flat(&place.run(&import).expect(0).out);
    assert!(said.contains("llama of 16 blocks, 2048 wide"), "{said}");
    assert!(
        said.contains("the model is llama-3.2-1b, as --model_name_or_path"),
        "{said}"
    );
    place.write("train.sh", script("nobody/llama-3.2-1c").as_bytes());
    place.run(&import).expect(3).says(&[
        "nobody/llama-3.2-1c is none that is built in",
        "did you mean --model llama-3.2-1b?",
    ]);
}

#[test]
fn recomputation_is_told_in_words() {
    let place = place();
    let some = SCRIPT.replace(
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--recompute-granularity selective --recompute-modules core_attn layernorm",
    );
    assert_ne!(some, SCRIPT);
    place.write("train.sh", some.as_bytes());
    let said = import(&place, &["--no-search"]).expect(0).out;
    let line = said.lines().find(|l| l.contains("recomputation ")).unwrap();
    assert!(line.contains("attention and norms"), "{line}");
    // What is no job says so.
    place.write("empty.sh", b"");
    let empty = ["import-job", "empty.sh", "--cluster", "dgx-h100"];
    place
        .run(&empty)
        .expect(3)
        .says(&["empty.sh", "a job is a script"]);
}
