//! The files of each target for plans of every kind, and what is listed as said otherwise.
//!
//! Golden files are whole exports: `MESHWRIGHT_BLESS=1` writes them again. `scripts/check_export.py`
//! gives such files to the software itself.

mod support;

use export::{Export, ExportError, Target};
use ir::offload::TensorClass;
use ir::program::Space;
use std::path::Path;
use support::*;

/// The plans that every target is asked for: name, model, pins.
const PLANS: [(&str, &str, &[&str]); 11] = [
    (
        "data",
        "gpt2",
        &["data=8", "tensor=1", "pipeline=1", "zero=0"],
    ),
    (
        "tensor",
        "llama",
        &["data=4", "tensor=2", "pipeline=1", "zero=1"],
    ),
    (
        "pipeline",
        "llama",
        &[
            "data=2",
            "tensor=1",
            "pipeline=4",
            "microbatch=4",
            "schedule=1f1b",
            "zero=1",
        ],
    ),
    (
        "interleaved",
        "llama",
        &[
            "data=4",
            "pipeline=2",
            "virtual=2",
            "microbatch=4",
            "zero=0",
        ],
    ),
    (
        "zero_1",
        "llama",
        &["data=8", "tensor=1", "pipeline=1", "zero=1"],
    ),
    (
        "zero_2",
        "llama",
        &["data=8", "tensor=1", "pipeline=1", "zero=2", "microbatch=8"],
    ),
    (
        "zero_3",
        "llama",
        &["data=8", "tensor=1", "pipeline=1", "zero=3"],
    ),
    (
        "full",
        "llama",
        &[
            "data=8",
            "tensor=1",
            "pipeline=1",
            "zero=3",
            "recompute=full",
        ],
    ),
    (
        "selective",
        "llama",
        &[
            "data=8",
            "tensor=1",
            "pipeline=1",
            "zero=1",
            "recompute=selective",
        ],
    ),
    (
        "experts",
        "mixtral",
        &["data=8", "expert=4", "tensor=1", "pipeline=1", "zero=1"],
    ),
    (
        "context",
        "llama",
        &[
            "data=4",
            "context=2",
            "tensor=1",
            "pipeline=1",
            "zero=1",
            "context_attention=ring",
        ],
    ),
];

fn planned(name: &str) -> planner::Planned {
    let (_, model, pins) = PLANS.iter().find(|p| p.0 == name).expect("a plan");
    let forward = match *model {
        "gpt2" => gpt2(),
        "mixtral" => mixtral(),
        _ => llama(),
    };
    plan(&forward, &train(), pins)
}

fn of(name: &str, target: Target) -> Export {
    exported(&planned(name), target)
}

/// The value of a key in TOML.
fn toml(export: &Export, section: &str, key: &str) -> toml::Value {
    let all: toml::Table = export.files[0].text.parse().expect("it is TOML");
    all[section]
        .get(key)
        .cloned()
        .unwrap_or(toml::Value::Boolean(false))
}

fn json(export: &Export) -> serde_json::Value {
    serde_json::from_str(&export.files[0].text).expect("it is JSON")
}

fn number(value: &toml::Value) -> u64 {
    value
        .as_integer()
        .and_then(|n| n.try_into().ok())
        .expect("a number")
}

/// Micro-batch times accumulation times data ranks is the global batch, as the files say it.
#[test]
fn batches_multiply_to_the_global_batch() {
    for (name, _, _) in PLANS {
        let planned = planned(name);
        let n =
            |text: Option<String>| -> u64 { text.expect("an argument").parse().expect("a number") };
        let e = exported(&planned, Target::MegatronCore);
        let d = e.summary.degrees.clone().expect("degrees");
        let model: u64 = [
            "tensor-model-parallel-size",
            "pipeline-model-parallel-size",
            "context-parallel-size",
        ]
        .map(|a| n(argument(&e, a)))
        .iter()
        .product();
        let data = u64::from(DEVICES) / model;
        let micro = n(argument(&e, "micro-batch-size"));
        assert_eq!(data, u64::from(d.data), "{name}");
        assert_eq!(micro * e.summary.accumulation * data, 32, "{name}");
        assert_eq!(n(argument(&e, "global-batch-size")), 32);

        let e = exported(&planned, Target::DeepSpeed);
        let of = |key: &str| json(&e)[key].as_u64().expect("a number");
        let product =
            of("train_micro_batch_size_per_gpu") * of("gradient_accumulation_steps") * data;
        assert_eq!(product, of("train_batch_size"), "{name}");
        assert_eq!(of("train_batch_size"), 32);

        if let Ok(e) = export(&planned, Target::TorchTitan) {
            let degree = |key: &str| number(&toml(&e, "parallelism", key));
            let replicas =
                degree("data_parallel_replicate_degree") * degree("data_parallel_shard_degree");
            let others = degree("tensor_parallel_degree")
                * degree("context_parallel_degree")
                * degree("pipeline_parallel_degree");
            assert_eq!(replicas, data, "{name}");
            assert_eq!(replicas * others, u64::from(DEVICES), "{name}");
            let local = number(&toml(&e, "training", "local_batch_size"));
            let steps = if d.pipeline > 1 {
                1
            } else {
                e.summary.accumulation
            };
            assert_eq!(local * steps * data, 32, "{name}");
        }
    }
}

#[test]
fn the_same_plan_is_written_alike() {
    let planned = planned("tensor");
    for target in Target::ALL {
        assert_eq!(
            exported(&planned, target).files,
            exported(&planned, target).files
        );
    }
}

#[test]
fn megatron_has_the_degrees() {
    let e = of("tensor", Target::MegatronCore);
    for (name, value) in [
        ("tensor-model-parallel-size", "2"),
        ("num-query-groups", "2"),
        ("normalization", "RMSNorm"),
        ("swiglu", ""),
        ("use-distributed-optimizer", ""),
        ("bf16", ""),
    ] {
        assert_eq!(argument(&e, name).as_deref(), Some(value), "{name}");
    }
    let e = of("data", Target::MegatronCore);
    assert_eq!(argument(&e, "use-distributed-optimizer"), None);
    assert_eq!(
        argument(&e, "position-embedding-type").as_deref(),
        Some("learned_absolute")
    );
    let e = of("interleaved", Target::MegatronCore);
    let even = argument(&e, "num-virtual-stages-per-pipeline-rank");
    let layout = argument(&e, "pipeline-model-parallel-layout");
    assert!(even.is_some() != layout.is_some(), "{even:?} {layout:?}");
    let e = of("experts", Target::MegatronCore);
    assert_eq!(
        argument(&e, "expert-model-parallel-size").as_deref(),
        Some("4")
    );
    assert_eq!(argument(&e, "moe-router-topk").as_deref(), Some("2"));
    let e = of("context", Target::MegatronCore);
    assert_eq!(argument(&e, "cp-comm-type").as_deref(), Some("p2p"));
    assert!(places(&e).contains(&"the order of sequences over context ranks"));
}

#[test]
fn megatron_has_zero_and_recomputation() {
    let of = |name| of(name, Target::MegatronCore);
    let strategy = |name| argument(&of(name), "data-parallel-sharding-strategy");
    assert_eq!(strategy("zero_1"), None);
    assert_eq!(strategy("zero_2").as_deref(), Some("optim_grads"));
    assert_eq!(strategy("zero_3").as_deref(), Some("optim_grads_params"));
    let full = of("full");
    assert_eq!(
        argument(&full, "recompute-granularity").as_deref(),
        Some("full")
    );
    assert_eq!(
        argument(&full, "recompute-method").as_deref(),
        Some("uniform")
    );
    let selective = of("selective");
    assert_eq!(
        argument(&selective, "recompute-modules").as_deref(),
        Some("layernorm")
    );
    assert!(places(&selective).contains(&"recomputation of blocks"));
    let pins = selective.pins.expect("pins");
    assert!(
        pins.contains(&"recompute:h.*.norm_1=yes".to_string()),
        "{pins:?}"
    );
}

/// Gradients of a plan for Megatron-Core are summed and sent in the types that its figures have.
#[test]
fn megatron_sums_and_sends_gradients_as_the_plan_is_priced() {
    let flags = |name: &str, options: &[&str]| {
        let mut planned = planned(name);
        planned.plan.made_for = Some(ir::plan::MadeFor {
            name: "megatron-core".into(),
            version: "2025".into(),
            options: options.iter().map(|o| o.to_string()).collect(),
        });
        let e = exported(&planned, Target::MegatronCore);
        let of = |name: &str| argument(&e, name);
        [
            of("grad-reduce-in-bf16"),
            of("ddp-param-name-patterns-for-fp32-local-accumulation"),
            of("megatron-fsdp-main-grads-dtype"),
            of("megatron-fsdp-grad-comm-dtype"),
        ]
        .map(|value| value.unwrap_or("-".into()))
    };
    assert_eq!(flags("zero_1", &[]), ["-", "-", "-", "-"]);
    assert_eq!(flags("zero_1", &["grads-bf16"]), ["", "-", "-", "-"]);
    assert_eq!(flags("zero_1", &["grads-sent-bf16"]), ["", "all", "-", "-"]);
    // Megatron-FSDP sums in the parameters' type unless it is told.
    assert_eq!(flags("zero_3", &[]), ["-", "-", "fp32", "-"]);
    assert_eq!(flags("zero_3", &["grads-bf16"]), ["-", "-", "bf16", "-"]);
    assert_eq!(
        flags("zero_3", &["grads-sent-bf16"]),
        ["-", "-", "fp32", "bf16"]
    );
}

/// Level 2 does not go with a pipeline there, and the schedule is another.
#[test]
fn megatron_lists_what_it_does_otherwise() {
    let pins = [
        "data=4",
        "pipeline=2",
        "microbatch=4",
        "schedule=gpipe",
        "zero=2",
    ];
    let planned = plan(&llama(), &train(), &pins);
    let e = exported(&planned, Target::MegatronCore);
    let all = places(&e);
    assert!(all.contains(&"the schedule"), "{all:?}");
    assert!(all.contains(&"parameters and gradients"), "{all:?}");
    let pins = e.pins.expect("pins");
    assert!(pins.contains(&"zero=1".to_string()), "{pins:?}");
    assert!(pins.contains(&"schedule=1f1b".to_string()), "{pins:?}");
}

#[test]
fn the_first_blocks_of_each_stage_may_recompute() {
    let pins = [
        "data=8",
        "tensor=1",
        "pipeline=1",
        "recompute:h.0.*=yes",
        "recompute:h.1.*=yes",
        "recompute=none",
    ];
    let planned = plan(&llama(), &train(), &pins);
    let e = exported(&planned, Target::MegatronCore);
    assert_eq!(argument(&e, "recompute-method").as_deref(), Some("block"));
    assert_eq!(argument(&e, "recompute-num-layers").as_deref(), Some("2"));
    assert!(
        !places(&e).iter().any(|p| p.contains("recomputation")),
        "{:?}",
        places(&e)
    );
    let pins = e.pins.expect("pins");
    assert!(
        pins.contains(&"recompute:h.1.*=yes".to_string()),
        "{pins:?}"
    );
    let e = exported(&planned, Target::TorchTitan);
    assert_eq!(
        toml(&e, "activation_checkpoint", "mode").as_str(),
        Some("full")
    );
    assert!(places(&e).contains(&"recomputation of blocks 2 to 3"));
    let e = exported(&planned, Target::Fsdp2);
    assert!(e.files[0].text.contains("FULL = [*range(0, 2)]"));
}

#[test]
fn deepspeed_has_levels_and_lists_the_rest() {
    for (name, level) in [("data", 0), ("zero_1", 1), ("zero_2", 2), ("zero_3", 3)] {
        let e = of(name, Target::DeepSpeed);
        assert_eq!(json(&e)["zero_optimization"]["stage"], level, "{name}");
        assert_eq!(json(&e)["bf16"]["enabled"], true);
        // The script makes the optimizer.
        assert_eq!(places(&e), ["the optimizer"], "{name}");
        assert!(
            e.not_expressed[0]
                .what
                .starts_with("AdamW with betas 0.9 and ")
        );
    }
    let planned = plan(&llama(), &train(), &["data=4", "tensor=2", "pipeline=1"]);
    let e = exported(&planned, Target::DeepSpeed);
    let splits = e
        .summary
        .degrees
        .as_ref()
        .is_some_and(|d| d.sequence_parallel);
    assert_eq!(places(&e).contains(&"norms and residuals"), splits);
    let e = of("pipeline", Target::DeepSpeed);
    assert_eq!(json(&e)["pipeline"]["stages"], 4);
    assert!(places(&e).contains(&"the pipeline"));
    let e = of("experts", Target::DeepSpeed);
    assert!(places(&e).contains(&"experts"));
    let e = of("context", Target::DeepSpeed);
    assert_eq!(json(&e)["sequence_parallel_size"], 2);
    assert!(places(&e).contains(&"attention over context ranks"));
}

#[test]
fn states_on_the_host_are_offloaded() {
    let mut planned = planned("zero_1");
    // The cluster says nothing of its hosts' memory, so no search puts anything there.
    for strategy in &mut planned.plan.layer_strategies {
        let (class, space) = (TensorClass::Optimizer, Space::Host);
        strategy.spaces.insert(class, space);
    }
    let e = exported(&planned, Target::DeepSpeed);
    let zero = &json(&e)["zero_optimization"];
    assert_eq!(zero["offload_optimizer"]["device"], "cpu");
    let e = exported(&planned, Target::MegatronCore);
    assert_eq!(argument(&e, "optimizer-cpu-offload").as_deref(), Some(""));
    let e = exported(&planned, Target::TorchTitan);
    assert!(places(&e).contains(&"optimizer states"));
}

#[test]
fn half_precision_has_its_loss_scale() {
    let f16 = ir::TrainSpec {
        precision: ir::Precision::F16,
        ..train()
    };
    let planned = plan(&llama(), &f16, &["data=8", "tensor=1", "pipeline=1"]);
    let e = exported(&planned, Target::DeepSpeed);
    assert_eq!(json(&e)["fp16"]["initial_scale_power"], 16);
    let e = exported(&planned, Target::MegatronCore);
    assert_eq!(argument(&e, "initial-loss-scale").as_deref(), Some("65536"));
    let e = exported(&planned, Target::TorchTitan);
    assert!(places(&e).contains(&"precision"));
}

/// Flags of Megatron and torchtitan have no words for blocks; where the model's code is the user's, it
/// has to have them.
#[test]
fn blocks_of_keys_are_never_left_out_silently() {
    let planned = plan(&llama_in_blocks(), &train(), &["data=8", "tensor=1"]);
    for target in [Target::MegatronCore, Target::TorchTitan] {
        let e = export(&planned, target).expect_err("it has no blocks");
        assert!(matches!(e, ExportError::Model { .. }), "{e}");
    }
    let e = export(&planned, Target::MegatronCore).expect_err("it has no blocks");
    assert!(
        e.to_string().contains("see some blocks of keys alone"),
        "{e}"
    );
    for target in [Target::DeepSpeed, Target::Fsdp2, Target::Jax] {
        let e = exported(&planned, target);
        let said = e.not_expressed.iter().find(|n| n.place == "attention");
        let what = said.map(|n| n.what.as_str());
        assert_eq!(
            what,
            Some("a query sees blocks of 8 tokens: the last 2, and the first 1"),
            "{target:?}"
        );
    }
    // A model that sees all is not told so.
    assert!(!places(&of("data", Target::DeepSpeed)).contains(&"attention"));
}

#[test]
fn torchtitan_has_its_own_models() {
    let e = export(&planned("data"), Target::TorchTitan).expect_err("it has no GPT-2");
    assert!(matches!(e, ExportError::Model { .. }), "{e}");
    assert!(e.to_string().contains("no model of the family gpt2"), "{e}");
    let e = of("zero_2", Target::TorchTitan);
    assert_eq!(
        number(&toml(&e, "parallelism", "data_parallel_shard_degree")),
        8
    );
    assert_eq!(
        toml(&e, "parallelism", "fsdp_reshard_after_forward").as_str(),
        Some("never")
    );
    assert!(
        places(&e).contains(&"the model"),
        "flavors are torchtitan's"
    );
    let e = of("pipeline", Target::TorchTitan);
    let parts = toml(&e, "parallelism", "module_fqns_per_model_part");
    assert_eq!(parts.as_array().map(Vec::len), Some(4));
}

#[test]
fn accelerate_has_no_pipelines() {
    let e = export(&planned("pipeline"), Target::Accelerate).expect_err("pipelines");
    assert!(e.to_string().contains("without pipelines"), "{e}");
    let text = |name| of(name, Target::Accelerate).files[0].text.clone();
    assert!(text("data").contains("distributed_type: MULTI_GPU\n"));
    assert!(text("zero_1").contains("zero_stage: 1\n"));
    assert!(text("zero_3").contains("fsdp_reshard_after_forward: true\n"));
    assert!(text("tensor").contains("parallelism_config_tp_size: 2\n"));
}

#[test]
fn placements_are_the_plans() {
    let e = of("tensor", Target::Fsdp2);
    let text = &e.files[0].text;
    for line in [
        "\"{}.self_attn.q_proj.weight\": (Shard(0), ",
        "\"{}.self_attn.o_proj.weight\": (Shard(1), ",
        "\"{}.mlp.down_proj.weight\": (Shard(1), ",
        "\"{}.input_layernorm.weight\": (Replicate(), ",
    ] {
        assert!(text.contains(line), "`{line}` is not in\n{text}");
    }
    let e = of("tensor", Target::Jax);
    assert!(
        e.files[0]
            .text
            .contains("\"{}.attn.out.weight\": ((2, 2, 8, 32), P(\"tensor\"), ")
    );
}

/// `ParallelismConfig` refuses copies of the model beside tensor ranks.
#[test]
fn accelerate_splits_states_beside_tensor_ranks() {
    let pins = ["data=4", "tensor=2", "pipeline=1", "zero=0"];
    let planned = plan(&llama(), &train(), &pins);
    let e = exported(&planned, Target::Accelerate);
    let text = &e.files[0].text;
    assert!(text.contains("dp_replicate_size: 1\n"), "{text}");
    assert!(text.contains("dp_shard_size: 4\n"), "{text}");
    assert!(places(&e).contains(&"states and gradients"));
}

/// A plan of data and context ranks at a ZeRO level that splits states over both.
fn with_context(zero: u8) -> planner::Planned {
    let zero = format!("zero={zero}");
    let pins = ["data=4", "context=2", "tensor=1", "pipeline=1", &zero];
    plan(&llama(), &train(), &pins)
}

/// The distributed optimizer, FSDP's meshes and DeepSpeed's ZeRO split over data and context ranks,
/// and so does the plan: nothing of that is done otherwise.
#[test]
fn states_are_split_over_context_ranks_as_the_software_does() {
    let planned = with_context(1);
    let about_states = |e: &Export| {
        let all = e
            .not_expressed
            .iter()
            .map(|n| format!("{} {}", n.place, n.instead));
        all.filter(|words| words.contains("states") || words.contains("context ranks too"))
            .collect::<Vec<_>>()
    };
    for target in [
        Target::MegatronCore,
        Target::DeepSpeed,
        Target::TorchTitan,
        Target::Accelerate,
    ] {
        let e = exported(&planned, target);
        let d = e.summary.degrees.as_ref().expect("degrees");
        assert_eq!((d.zero, d.shards()), (1, 8));
        assert!(
            about_states(&e).is_empty(),
            "{target:?}: {:?}",
            e.not_expressed
        );
    }
    let e = exported(&planned, Target::MegatronCore);
    assert_eq!(argument(&e, "num-distributed-optimizer-instances"), None);
    // Gradients are summed over context ranks too, so they are in the mesh of `fully_shard`.
    let e = exported(&planned, Target::Fsdp2);
    let text = &e.files[0].text;
    assert!(
        text.contains("(\"shard\", 8)") && text.contains("CONTEXT = 2"),
        "{text}"
    );
}

/// torchtitan and accelerate have no level 0 beside context ranks: FSDP splits over them.
#[test]
fn nothing_is_whole_on_context_ranks_of_fsdp() {
    let planned = with_context(0);
    for target in [Target::TorchTitan, Target::Accelerate] {
        let e = exported(&planned, target);
        let whole = e
            .not_expressed
            .iter()
            .find(|n| n.what.contains("whole on every data and context rank"));
        assert!(whole.is_some(), "{target:?}: {:?}", e.not_expressed);
        let pins = e.pins.expect("pins");
        assert!(pins.contains(&"zero=2".to_string()), "{pins:?}");
    }
    let e = exported(&planned, Target::TorchTitan);
    let shard = number(&toml(&e, "parallelism", "data_parallel_shard_degree"));
    assert_eq!(
        shard, 4,
        "the whole mesh, as the pins of the nearest plan have it"
    );
    let e = exported(&planned, Target::MegatronCore);
    assert_eq!(argument(&e, "use-distributed-optimizer"), None);
    let e = exported(&planned, Target::Fsdp2);
    assert!(
        e.files[0].text.contains("(\"replicate\", 8)"),
        "{}",
        e.files[0].text
    );
}

/// A fused matrix of queries, keys and values is split inside of each, for which DTensor has no
/// public placement.
#[test]
fn parts_of_a_fused_matrix_are_listed() {
    let planned = plan(
        &gpt2(),
        &train(),
        &["data=4", "tensor=2", "pipeline=1", "zero=0"],
    );
    let e = exported(&planned, Target::Fsdp2);
    let fused = places(&e).iter().any(|p| p.starts_with("attn.qkv.weight"));
    assert!(fused, "{:?}", places(&e));
}

/// Dims that do not divide are whole in JAX.
#[test]
fn uneven_dims_are_listed_for_jax() {
    let pins = ["data=1", "tensor=3", "pipeline=1"];
    let Ok(planned) = try_plan(&llama(), &train(), &pins) else {
        return;
    };
    let e = exported(&planned, Target::Jax);
    let uneven = e
        .not_expressed
        .iter()
        .any(|n| n.what.contains("split unevenly"));
    assert!(uneven, "{:?}", e.not_expressed);
}

fn golden(name: &str, target: Target) {
    let e = of(name, target);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut found = String::new();
    for file in &e.files {
        found += &format!("== {}\n{}", file.name, file.text);
    }
    found += "== otherwise\n";
    for n in &e.not_expressed {
        found += &format!("{}: {}; instead: {}\n", n.place, n.what, n.instead);
    }
    let path = folder.join(format!("{name}-{}.txt", target.name()));
    if std::env::var("MESHWRIGHT_BLESS").is_ok_and(|v| v == "1") {
        return std::fs::write(&path, found).expect("the file can be written");
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        expected == found,
        "{} differs; if that is meant, run MESHWRIGHT_BLESS=1 ./test.sh -p export\n{found}",
        path.display()
    );
}

#[test]
fn golden_files() {
    let all = [
        ("tensor", Target::MegatronCore),
        ("tensor", Target::DeepSpeed),
        ("tensor", Target::TorchTitan),
        ("tensor", Target::Fsdp2),
        ("tensor", Target::Accelerate),
        ("tensor", Target::Jax),
        ("pipeline", Target::MegatronCore),
        ("interleaved", Target::TorchTitan),
        ("experts", Target::MegatronCore),
        ("context", Target::TorchTitan),
        ("zero_3", Target::Accelerate),
    ];
    for (name, target) in all {
        golden(name, target);
    }
}
