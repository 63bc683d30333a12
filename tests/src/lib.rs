//! The helpers of the end-to-end tests: reference cases, small clusters, and one way to plan, check
//! and run a case on in-process ranks.

pub mod all_ranks;
pub mod fuzz;
pub mod plans;

use ir::cluster::Cluster;
use ir::plan::Plan;
use ir::program::Program;
use ir::training::{LOSS_SCALE, TrainingGraph};
use ir::{Bytes, Graph, Optimizer, TensorType, TrainSpec};
use runtime::RuntimeError;
use runtime::device::Backend;
use runtime::execute::{Session, SessionOptions};
use runtime::fabric::Meets;
use runtime::reference::Reference;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A case of `reference/`: a model with weights, batches and what PyTorch made of them.
pub struct Case {
    /// Its folder.
    pub folder: PathBuf,
    /// The model.
    pub config: import::ModelConfig,
    /// The forward graph.
    pub forward: Graph,
    /// The training spec.
    pub train: TrainSpec,
    /// Learning rate.
    pub lr: f64,
    /// Batches of samples of `sequence + 1` tokens and those further ones that the model predicts,
    /// one per step.
    pub batches: Vec<Vec<Vec<u32>>>,
    /// The results of PyTorch.
    pub reference: Value,
    /// The configuration of the weights in the folder.
    stored: import::ModelConfig,
}

/// Names of the reference cases.
pub const CASES: [&str; 30] = [
    "gpt2_small_tied",
    "gpt2_untied_gelu",
    "llama_tied",
    "llama_untied_rope",
    "llama_linear_rope",
    "mixtral",
    "qwen3_moe",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "opt",
    "gpt_neox",
    "gpt_neox_serial",
    "nemotron",
    "gemma",
    "deepseek_v2",
    "deepseek_v2_groups",
    "deepseek_v3",
    "phi3",
    "gemma2",
    "gemma3",
    "mistral_window",
    "bloom",
    "gpt_oss",
    "mamba2",
    "nemotron_h",
    "nemotron_h_latent",
    "deepseek_v3_further",
    "nemotron_h_further",
];

impl Case {
    /// Reads a case.
    pub fn load(name: &str) -> Case {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("reference")
            .join(name);
        let json = |file: &str| -> Value {
            serde_json::from_slice(&std::fs::read(folder.join(file)).expect(file)).expect(file)
        };
        let reference = json("reference.json");
        let config = import::ModelConfig::load(&folder.join("config.json"))
            .expect("the case's config is valid");
        // PyTorch drops no token.
        let config = config
            .clone()
            .with_expert_capacity(4096.0)
            .unwrap_or(config);
        let sequence = reference["seq"].as_u64().expect("seq");
        let forward = import::model_graph(
            &config,
            &import::BuildOptions {
                sequence,
                dropout: 0.0,
            },
        )
        .expect("the model builds");
        let hyper = &reference["hyper"];
        let number = |v: &Value| v.as_f64().expect("a number");
        let train = TrainSpec {
            global_batch: reference["batch"].as_u64().expect("batch"),
            sequence,
            optimizer: Optimizer::AdamW {
                beta1: number(&hyper["betas"][0]),
                beta2: number(&hyper["betas"][1]),
                eps: number(&hyper["eps"]),
                weight_decay: number(&hyper["weight_decay"]),
            },
            clip_norm: Some(number(&hyper["clip_norm"])),
            ..TrainSpec::default()
        };
        let batches =
            serde_json::from_value(json("batches.json")["tokens"].clone()).expect("tokens");
        Case {
            folder,
            stored: config.clone(),
            config,
            forward,
            train,
            lr: number(&hyper["lr"]),
            batches,
            reference,
        }
    }

    /// The case with more blocks, so that its graph has `n_layers` layers; they begin with the
    /// weights of the case's own blocks, in turn. PyTorch has not trained it.
    pub fn with_layers(name: &str, n_layers: u32) -> Case {
        let case = Case::with_config(name, |config| {
            // All but the embedding and the head are blocks.
            let (n_blocks, layers) = (n_layers - 2, ["n_layer", "num_hidden_layers"]);
            let key = layers.into_iter().find(|key| config.get(key).is_some());
            config[key.expect("a number of layers")] = n_blocks.into();
        });
        assert_eq!(case.forward.layers.len(), n_layers as usize);
        case
    }

    /// The case with a pattern of blocks that attention sees, as `sparse_attention` of a configuration
    /// has it. PyTorch has not trained it.
    pub fn in_blocks(name: &str, pattern: Value) -> Case {
        Case::with_config(name, |config| config["sparse_attention"] = pattern)
    }

    /// The case with the embedding for its head. PyTorch has not trained it.
    pub fn tied(name: &str) -> Case {
        Case::with_config(name, |config| config["tie_word_embeddings"] = true.into())
    }

    /// The case with another configuration, but for its weights.
    fn with_config(name: &str, change: impl FnOnce(&mut Value)) -> Case {
        let mut case = Case::load(name);
        let text = std::fs::read(case.folder.join("config.json")).expect("config.json");
        let mut config: Value = serde_json::from_slice(&text).expect("config.json");
        change(&mut config);
        let text = config.to_string();
        case.config = import::ModelConfig::parse("config.json", text.as_bytes())
            .expect("the changed config is valid");
        let options = import::BuildOptions {
            sequence: case.train.sequence,
            dropout: case.train.dropout,
        };
        case.forward = import::model_graph(&case.config, &options).expect("the model builds");
        case
    }

    /// The initial value of a state: the case's weights, zero moments, a loss scale at its unit.
    pub fn initial(&self) -> impl FnMut(&str, usize) -> Result<Vec<f32>, RuntimeError> + use<> {
        let weights = import::Weights::open(&self.folder, &self.stored).expect("the weights open");
        let params: BTreeSet<String> = self.config.params().into_iter().map(|p| p.path).collect();
        let block = |path: &str| {
            path.strip_prefix("h.")?
                .split('.')
                .next()?
                .parse::<usize>()
                .ok()
        };
        let stored = self.stored.params();
        let n_blocks = stored
            .iter()
            .filter_map(|p| block(&p.path))
            .max()
            .map_or(1, |last| last + 1);
        let stored = move |path: &str| match block(path).filter(|i| *i >= n_blocks) {
            Some(i) => path.replacen(&format!("h.{i}."), &format!("h.{}.", i % n_blocks), 1),
            None => path.into(),
        };
        move |path, elements| match params.contains(path) {
            true => Ok(weights.param(&stored(path)).expect("the weight exists")),
            false if path == LOSS_SCALE => Ok(vec![1.0]),
            false => Ok(vec![0.0; elements]),
        }
    }

    /// The single-device reference with the case's weights.
    pub fn single(&self, training: &TrainingGraph, microbatch: u64) -> Reference {
        let mut initial = self.initial();
        let m = (self.train.global_batch / microbatch) as u32;
        Reference::new(
            training,
            &self.train,
            microbatch,
            m,
            |path: &str, ty: &TensorType| {
                initial(path, ty.shape.bind(1).iter().product::<u64>() as usize)
            },
        )
        .expect("the reference starts")
    }

    /// Ranks that play a program with the case's weights.
    pub fn session(&self, program: &Program) -> Session {
        self.session_with(program, SessionOptions::default())
    }

    /// The same whose every step plays the streams in another order, drawn from `seed`.
    pub fn session_in_orders(&self, program: &Program, seed: u64) -> Session {
        let options = SessionOptions {
            orders: Some(seed),
            ..SessionOptions::default()
        };
        self.session_with(program, options)
    }

    /// The same on the GPUs that the driver sees.
    pub fn session_on_gpus(&self, program: &Program, orders: Option<u64>, meets: Meets) -> Session {
        let options = SessionOptions {
            backend: Backend::Cuda,
            orders,
            meets,
            ..SessionOptions::default()
        };
        self.session_with(program, options)
    }

    /// A session with these options, from the case's states.
    pub fn session_with(&self, program: &Program, options: SessionOptions) -> Session {
        let mut initial = self.initial();
        Session::new(program, &self.train, options, |request| {
            initial(request.path, request.lens.iter().product::<u64>() as usize)
        })
        .expect("the ranks start")
    }
}

/// A GPT-2 with 128 features per head and untied embeddings, without dropout.
pub fn gpt2(layers: u64, hidden: u64, sequence: u64, vocab: u64) -> Graph {
    let config = serde_json::json!({
        "model_type": "gpt2", "n_layer": layers, "n_head": hidden / 128, "n_embd": hidden,
        "n_positions": sequence, "vocab_size": vocab, "tie_word_embeddings": false,
    });
    let config = import::ModelConfig::parse("config.json", config.to_string().as_bytes())
        .expect("the config is valid");
    import::model_graph(
        &config,
        &import::BuildOptions {
            sequence,
            dropout: 0.0,
        },
    )
    .expect("the model builds")
}

/// A GPU-like cluster of one host, for plans that run on CPU ranks.
pub fn cluster(n_devices: u32) -> Cluster {
    let mut cluster = cost_model::presets::load("dgx-a100-80gb", 1).expect("the preset loads");
    cluster.devices_per_host = n_devices;
    for level in &mut cluster.levels {
        level.devices = n_devices;
    }
    cluster.levels.truncate(1);
    cluster
}

/// The same with little memory.
pub fn cluster_with_memory(n_devices: u32, usable: u64) -> Cluster {
    let mut c = cluster(n_devices);
    c.device.memory_reserved_bytes = Bytes(0);
    c.device.memory_headroom = 0.0;
    c.device.memory_bytes = Bytes(usable);
    c
}

/// Plans with pins, and asserts that the checker finds nothing.
pub fn planned(
    forward: &Graph,
    train: &TrainSpec,
    cluster: &Cluster,
    pins: &[&str],
) -> Result<planner::Planned, planner::PlanError> {
    let pins = planner::Pins::parse(pins).expect("the pins are well-formed");
    let made = planner::plan(
        forward,
        train,
        cluster,
        &planner::PlanOptions {
            pins,
            ..Default::default()
        },
    )?;
    assert_checked(&made.plan, &made.training, &made.program);
    Ok(made)
}

/// Asserts that the checker proves plan and program, and that the program's text form has all of
/// it.
pub fn assert_checked(plan: &Plan, training: &TrainingGraph, program: &Program) {
    let mut violations: Vec<String> = checker::check_plan(plan)
        .iter()
        .map(ToString::to_string)
        .collect();
    violations.extend(
        checker::check_program(plan, training, program)
            .iter()
            .map(ToString::to_string),
    );
    violations.truncate(10);
    assert!(
        violations.is_empty(),
        "the checker rejects the plan:\n{}",
        violations.join("\n")
    );
    let text = ir::text::program::print(program);
    let parsed = ir::text::program::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    assert!(parsed == *program, "read as another program:\n{text}");
}

/// Relative distance of two numbers.
pub fn relative(a: f64, b: f64) -> f64 {
    (a - b).abs() / b.abs().max(1e-30)
}

/// Norm of the difference over the norm of the second.
pub fn distance(a: &[f32], b: &[f32]) -> (f64, f64) {
    assert_eq!(a.len(), b.len(), "tensors differ in size");
    let sum = |f: &dyn Fn(usize) -> f64| (0..a.len()).map(f).sum::<f64>();
    (
        sum(&|i| f64::from(a[i] - b[i]).powi(2)),
        sum(&|i| f64::from(b[i]).powi(2)),
    )
}
