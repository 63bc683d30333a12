//! The models and layouts of the benchmark.

use import::{BuildOptions, ModelConfig, model_graph};
use ir::cluster::Cluster;
use ir::{Graph, TrainSpec};
use planner::{Pins, PlanOptions, Planned};
use std::path::Path;

/// The numbers of ranks that are calibrated.
pub const RANKS: [u32; 3] = [2, 4, 8];

/// The samples of a step.
const GLOBAL_BATCH: u64 = 16;
/// The tokens of a sample.
const SEQUENCE: u64 = 128;

/// The layouts: number of ranks and pins.
const LAYOUTS: [(u32, &[&str]); 4] = [
    (4, &["data=4", "tensor=1", "pipeline=1"]),
    (2, &["data=1", "tensor=2", "pipeline=1"]),
    (4, &["data=1", "tensor=1", "pipeline=4", "microbatch=2"]),
    (8, &["data=2", "tensor=2", "pipeline=2", "microbatch=4"]),
];

/// A GPT-2 of three million parameters, with wider heads than the tiny one.
const WIDE: &str = r#"{"model_type": "gpt2", "vocab_size": 512, "n_positions": 128, "n_ctx": 128,
    "n_embd": 256, "n_layer": 4, "n_head": 4, "n_inner": null, "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-05, "initializer_range": 0.02, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "resid_pdrop": 0.0, "tie_word_embeddings": true}"#;

/// A model under a layout.
pub struct Case {
    model: String,
    layout: Vec<String>,
    /// The number of ranks.
    pub n_ranks: u32,
    /// The number of tokens in the vocabulary.
    pub vocab: u64,
    forward: Graph,
}

/// Returns all cases, model by model.
pub fn cases() -> Result<Vec<Case>, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models");
    let load = |name: &str| ModelConfig::load(&root.join(name)).map_err(|e| e.to_string());
    let wide = ModelConfig::parse("wide-gpt2", WIDE.as_bytes()).map_err(|e| e.to_string())?;
    let models = [
        ("tiny-gpt2", load("tiny-gpt2")?),
        ("tiny-llama", load("tiny-llama")?),
        ("wide-gpt2", wide),
    ];
    let mut all = Vec::new();
    for (name, config) in models {
        let options = BuildOptions {
            sequence: SEQUENCE,
            dropout: 0.0,
        };
        let forward = model_graph(&config, &options).map_err(|e| e.to_string())?;
        for (n_ranks, pins) in LAYOUTS {
            all.push(Case {
                model: name.into(),
                layout: pins.iter().map(|p| p.to_string()).collect(),
                n_ranks,
                vocab: config.vocab(),
                forward: forward.clone(),
            });
        }
    }
    Ok(all)
}

impl Case {
    /// Names model and layout; degrees of one are left out.
    pub fn name(&self) -> String {
        let degrees = self.layout.iter().filter(|p| !p.ends_with("=1"));
        let words: Vec<&str> = degrees.map(String::as_str).collect();
        format!("{} {}", self.model, words.join(" "))
    }

    /// Finds the best plan of this layout on a cluster of its ranks.
    pub fn plan(&self, cluster: &Cluster) -> Result<Planned, String> {
        let train = TrainSpec {
            global_batch: GLOBAL_BATCH,
            sequence: SEQUENCE,
            ..TrainSpec::default()
        };
        let options = PlanOptions {
            pins: Pins::parse(&self.layout).map_err(|e| e.to_string())?,
            ..PlanOptions::default()
        };
        planner::plan(&self.forward, &train, cluster, &options)
            .map_err(|e| format!("{}: {e}", self.name()))
    }
}
