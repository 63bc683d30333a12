//! Small models, and their plans on one host of eight GPUs.

#![allow(dead_code)] // Each test binary uses a part of it.

use export::{Export, ExportError, Target};
use ir::{Graph, Precision, TrainSpec};
use planner::{Pins, PlanOptions, Planned};
use serde_json::{Value, json};

/// Devices of the cluster.
pub const DEVICES: u32 = 8;

/// A GPT-2 of four blocks.
pub fn gpt2() -> Graph {
    model(json!({
        "model_type": "gpt2", "n_layer": 4, "n_head": 4, "n_embd": 32, "n_positions": 64,
        "vocab_size": 256, "tie_word_embeddings": false,
    }))
}

/// A Llama of four blocks.
pub fn llama() -> Graph {
    model(json!({
        "model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 256,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": false, "hidden_act": "silu",
    }))
}

/// The same whose queries see two blocks of eight tokens and the first.
pub fn llama_in_blocks() -> Graph {
    model(json!({
        "model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 256,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": false, "hidden_act": "silu",
        "sparse_attention": {"mode": "bigbird", "block": 8, "attention": "unidirectional"},
    }))
}

/// A Mixtral of two blocks with four experts.
pub fn mixtral() -> Graph {
    model(json!({
        "model_type": "mixtral", "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "hidden_size": 32, "intermediate_size": 32,
        "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 256,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": false, "hidden_act": "silu",
    }))
}

fn model(config: Value) -> Graph {
    let text = config.to_string();
    let config = import::ModelConfig::parse("config.json", text.as_bytes()).expect("a config");
    let options = import::BuildOptions {
        sequence: 64,
        dropout: 0.0,
    };
    import::model_graph(&config, &options).expect("the model builds")
}

/// The training: 32 samples of 64 tokens in bf16.
pub fn train() -> TrainSpec {
    TrainSpec {
        global_batch: 32,
        sequence: 64,
        precision: Precision::Bf16,
        ..TrainSpec::default()
    }
}

/// The plan of a model under pins.
pub fn plan(forward: &Graph, train: &TrainSpec, pins: &[&str]) -> Planned {
    try_plan(forward, train, pins).unwrap_or_else(|e| panic!("{pins:?}: {e}"))
}

/// The plan of a model under pins, where there is one.
pub fn try_plan(
    forward: &Graph,
    train: &TrainSpec,
    pins: &[&str],
) -> Result<Planned, planner::PlanError> {
    let cluster = cost_model::presets::load("dgx-a100-80gb", 1).expect("the preset is there");
    let options = PlanOptions {
        pins: Pins::parse(pins).expect("the pins are well-formed"),
        ..PlanOptions::default()
    };
    planner::plan(forward, train, &cluster, &options)
}

/// A plan for a target.
pub fn export(planned: &Planned, target: Target) -> Result<Export, ExportError> {
    export::export(&planned.plan, &planned.training, target)
}

/// A plan for a target that expresses it.
pub fn exported(planned: &Planned, target: Target) -> Export {
    export(planned, target).unwrap_or_else(|e| panic!("{e}"))
}

/// The places of what a target does otherwise.
pub fn places(export: &Export) -> Vec<&str> {
    let all = export.not_expressed.iter();
    all.map(|n| n.place.as_str()).collect()
}

/// The value of a Megatron argument in the launch script; empty of a flag.
pub fn argument(export: &Export, name: &str) -> Option<String> {
    let lines = export.files[0].text.lines();
    let of = |line: &str| {
        let rest = line.trim().strip_prefix("--")?.strip_prefix(name)?;
        let rest = rest.trim_end_matches('\\');
        (rest.is_empty() || rest.starts_with(' ')).then(|| rest.trim().to_string())
    };
    lines.filter_map(of).next()
}
