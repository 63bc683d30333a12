//! Good inputs of each target, from real files where they are small and from the tools that
//! write them otherwise.

use super::{ModelConfig, Plan};
use crate::plans::{Random, Recomputed, SEQUENCE, Setup, mlp, random_plan};
use ir::testing::{GraphOptions, random_graph};
use ir::training::Recompute;
use ir::{Graph, TrainSpec};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::json;
use std::collections::HashMap;
use std::convert::Infallible;
use std::path::Path;

/// A model small enough to write out its weights.
pub const TINY_CONFIG: &str = r#"{"model_type":"gpt2","vocab_size":8,"n_positions":4,"n_embd":4,"n_layer":1,"n_head":2,
"n_inner":null,"activation_function":"gelu_new","layer_norm_epsilon":1e-05,"tie_word_embeddings":true}"#;
/// Name of an index of sharded weights.
pub const TINY_INDEX: &str = "model.safetensors.index.json";
/// Name of its one shard.
pub(super) const TINY_SHARD: &str = "model-00001-of-00001.safetensors";
/// A text to tokenise.
pub(super) const TEXT: &str =
    "It was a dark night. The 3 ships didn't\nsail: \u{e9}t\u{e9}, \u{4f60}\u{597d}!\n";

/// A forward graph that is planned in milliseconds.
pub fn tiny_forward() -> Graph {
    mlp(1)
}

/// Its training spec.
pub fn tiny_train() -> TrainSpec {
    TrainSpec {
        global_batch: 4,
        sequence: SEQUENCE,
        ..TrainSpec::default()
    }
}

fn read(path: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

pub(super) fn configs() -> Vec<Vec<u8>> {
    let cases = [
        "gpt2_untied_gelu/config.json",
        "llama_untied_rope/config.json",
        "llama_linear_rope/config.v4.json",
        "mixtral/config.json",
        "qwen3_moe/config.json",
        "qwen2_moe/config.json",
        "gemma/config.json",
        "opt/config.json",
        "gpt_neox/config.json",
        "nemotron/config.json",
        "bloom/config.json",
        "gpt_oss/config.json",
        "deepseek_v2_groups/config.json",
        "deepseek_v3/config.json",
        "phi3/config.json",
        "gemma2/config.json",
        "gemma3/config.json",
    ];
    let mut all: Vec<Vec<u8>> = cases
        .iter()
        .map(|c| read(&format!("tests/reference/{c}")))
        .collect();
    all.extend(
        ["tiny-gpt2", "tiny-llama", "llama-3.2-1b"]
            .map(|m| read(&format!("models/{m}/config.json"))),
    );
    all.push(TINY_CONFIG.into());
    all
}

pub(super) fn tiny_weights() -> Vec<u8> {
    let mut written = Vec::new();
    let config = ModelConfig::parse("config.json", TINY_CONFIG.as_bytes())
        .expect("the tiny config is valid");
    let elements: std::collections::BTreeMap<String, u64> = config
        .params()
        .into_iter()
        .map(|p| (p.path.clone(), p.elements()))
        .collect();
    import::export("model.safetensors", &mut written, &config, |p| {
        Ok::<_, Infallible>(vec![0.5; elements[p] as usize])
    })
    .expect("weights can be written");
    written
}

pub(super) fn weights() -> Vec<Vec<u8>> {
    vec![tiny_weights()]
}

pub(super) fn weight_indices() -> Vec<Vec<u8>> {
    let config = ModelConfig::parse("config.json", TINY_CONFIG.as_bytes())
        .expect("the tiny config is valid");
    let map: serde_json::Map<String, serde_json::Value> = config
        .params()
        .into_iter()
        .map(|p| (p.hf_name, TINY_SHARD.into()))
        .collect();
    vec![
        serde_json::json!({ "metadata": { "total_size": 100 }, "weight_map": map })
            .to_string()
            .into_bytes(),
    ]
}

pub(super) fn graphs() -> Vec<Vec<u8>> {
    let mut all = small_graphs();
    for text in [
        "models/tiny-gpt2/config.json",
        "models/tiny-llama/config.json",
    ] {
        let config = ModelConfig::parse("config.json", &read(text)).expect("the model is valid");
        let graph = import::model_graph(
            &config,
            &import::BuildOptions {
                sequence: 8,
                dropout: 0.1,
            },
        );
        all.push(ir::text::print(&graph.expect("the model builds")).into_bytes());
    }
    let equal = GraphOptions {
        n_layers: 4,
        equal_layers: true,
        ..GraphOptions::default()
    };
    all.extend((0..4).map(|seed| ir::text::print(&random_graph(seed, &equal)).into_bytes()));
    all
}

pub(super) fn small_graphs() -> Vec<Vec<u8>> {
    let options = GraphOptions {
        n_layers: 1,
        blocks_per_layer: 1,
        dropout: true,
        ..GraphOptions::default()
    };
    let mut all = vec![
        ir::text::print(&mlp(1)).into_bytes(),
        ir::text::print(&mlp(3)).into_bytes(),
    ];
    all.extend((0..6).map(|seed| ir::text::print(&random_graph(seed, &options)).into_bytes()));
    all
}

fn searched_plan() -> Plan {
    let made = planner::plan(
        &tiny_forward(),
        &tiny_train(),
        &crate::cluster(2),
        &Default::default(),
    );
    made.expect("the tiny model is planned").plan
}

pub(super) fn programs() -> Vec<Vec<u8>> {
    let program = |plan: &Plan| {
        let forward = ir::text::parse(&plan.graph).expect("a plan holds its graph");
        let training = plan
            .training_graph(&forward)
            .expect("a plan can be trained");
        let program = lowering::lower_training(plan, &training).expect("a plan has a program");
        ir::text::program::print(&program).into_bytes()
    };
    small_plans().iter().map(program).collect()
}

pub(super) fn plans() -> Vec<Vec<u8>> {
    let bytes = |plan: &Plan| serde_json::to_vec(plan).expect("a plan can be written");
    small_plans().iter().map(bytes).collect()
}

fn small_plans() -> [Plan; 5] {
    let setup = |stages: &[(u32, &[u32])], precision| Setup {
        stages: stages.iter().map(|(n, axes)| (*n, axes.to_vec())).collect(),
        microbatch: 2,
        n_microbatches: 2,
        train: TrainSpec {
            sequence: SEQUENCE,
            precision,
            ..TrainSpec::default()
        },
        ..Setup::default()
    };
    let random = |s: &Setup| random_plan(&mlp(1), s, &mut Random(7)).0;
    [
        searched_plan(),
        random(&setup(&[(3, &[2])], ir::Precision::F32)),
        random(&setup(&[(1, &[1]), (2, &[2])], ir::Precision::Bf16)),
        random(&setup(&[(2, &[2, 2]), (1, &[1])], ir::Precision::F16)),
        random(&Setup {
            recompute: Recomputed::Named(Recompute::Full),
            ..setup(&[(3, &[2])], ir::Precision::F32)
        }),
    ]
}

fn small_clusters() -> Vec<ir::cluster::Cluster> {
    let cpu = cost_model::presets::load("cpu-default", 1).expect("the preset loads");
    let hosts = |name: &str| {
        let mut c = cost_model::presets::load(name, 1).expect("the preset loads");
        c.devices_per_host = 2;
        c.levels
            .iter_mut()
            .for_each(|l| l.devices = l.devices.min(2));
        c.levels.dedup_by_key(|l| l.devices);
        cost_model::presets::with_hosts(c, 1).expect("two devices are a cluster")
    };
    vec![cpu, hosts("dgx-h100"), crate::cluster(2)]
}

pub(super) fn clusters_toml() -> Vec<Vec<u8>> {
    small_clusters()
        .iter()
        .map(|c| {
            cost_model::presets::print(c)
                .expect("a cluster can be written")
                .into_bytes()
        })
        .collect()
}

pub(super) fn clusters_json() -> Vec<Vec<u8>> {
    small_clusters()
        .iter()
        .map(|c| serde_json::to_vec(c).expect("a cluster can be written"))
        .collect()
}

pub(super) fn pins() -> Vec<Vec<u8>> {
    [
        "data=2\ntensor=2",
        "pipeline=2\nschedule=gpipe\nmicrobatch=2",
        "data=4,zero=3",
        "tensor=2 pipeline=2 schedule=1f1b",
        "pipeline=2 virtual=2 microbatch=1",
        "tensor=4\nspec:h.*.up=[_,tensor]",
        "context=2 context_order=zigzag data=2 zero=1",
        "context=2 context_attention=gather data=2",
    ]
    .map(|t| t.as_bytes().to_vec())
    .to_vec()
}

pub(super) fn data_bins() -> Vec<Vec<u8>> {
    let tokens: Vec<u8> = (0..400u16)
        .flat_map(|t| (t * 37 % 256).to_le_bytes())
        .collect();
    let header = |magic: u32, version: u32, n: u32| -> Vec<u8> {
        let mut h = vec![0u32; 256];
        h[..3].copy_from_slice(&[magic, version, n]);
        h.iter().flat_map(|x| x.to_le_bytes()).collect()
    };
    let wide: Vec<u8> = (0..400u32)
        .flat_map(|t| (t * 37 % 256).to_le_bytes())
        .collect();
    vec![
        tokens.clone(),
        [header(20240520, 1, 400), tokens].concat(),
        [header(20240801, 7, 400), wide].concat(),
    ]
}

pub(super) fn data_texts() -> Vec<Vec<u8>> {
    vec![TEXT.repeat(3).into_bytes()]
}

pub(super) fn tokenizers() -> Vec<Vec<u8>> {
    // The example's vocabulary is larger than the 256 tokens that the target accepts.
    let mut json: serde_json::Value = serde_json::from_slice(&read("examples/data/tokenizer.json"))
        .expect("the tokenizer is JSON");
    json["model"]["merges"] = serde_json::json!([]);
    if let Some(vocab) = json["model"]["vocab"].as_object_mut() {
        vocab.retain(|_, id| id.as_u64().is_some_and(|id| id < 256));
    }
    let words = serde_json::json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "It": 1, "was": 2, "a": 3}, "unk_token": "[UNK]"}});
    [json, words]
        .iter()
        .map(|j| j.to_string().into_bytes())
        .collect()
}

pub(super) fn instances() -> Vec<Vec<u8>> {
    let two = r#"{"problem":{"name":"two","nodes":{"intervals":[[0,1],[0,1]],"costs":[[1,0],[2,0]],"usages":[[5,5],[5,5]]},"edges":{"nodes":[[0,1]],"costs":[[0,9,9,5]]},"usage_limit":10}}"#;
    let ring = serde_json::json!({"problem": {"name": "ring", "nodes": {
        "intervals": (0..6).map(|i| [i, i + 2]).collect::<Vec<_>>(),
        "costs": (0..6).map(|i| [i, 5 - i, 3]).collect::<Vec<_>>(),
        "usages": (0..6).map(|i| [8, 4 + i, 2]).collect::<Vec<_>>()},
        "edges": {"nodes": (0..5).map(|i| [i, i + 1]).collect::<Vec<_>>(), "costs": vec![[0, 4, 1_000_000_000_000_000_000u64, 2, 0, 7, 9, 1, 0]; 5]},
        "usage_limit": 20}});
    vec![two.into(), ring.to_string().into_bytes()]
}

pub(super) fn measurements() -> Vec<Vec<u8>> {
    use ir::measurement::{
        InstructionMeasurement, MEASUREMENT_VERSION, Measurement, StageMeasurement, StepMeasurement,
    };
    let step = |step| StepMeasurement {
        step,
        loss: 3.5,
        grad_norm: if step == 1 { f64::NAN } else { 1.25 },
        lr: 1e-3,
        seconds: 0.01,
        profiled: step == 2,
    };
    let m = Measurement {
        version: MEASUREMENT_VERSION,
        name: "tiny".into(),
        backend: "cpu-threads".into(),
        plan_hash: "0123456789abcdef".into(),
        n_ranks: 2,
        steps: (0..3).map(step).collect(),
        validation: vec![(2, 3.25)],
        stages: vec![
            StageMeasurement {
                compute_s: 0.5,
                ..StageMeasurement::default()
            };
            2
        ],
        instructions: vec![
            InstructionMeasurement {
                what: "h.0.fc".into(),
                count: 2,
                mean_s: 1e-4,
                ..InstructionMeasurement::default()
            };
            3
        ],
        ..Measurement::default()
    };
    vec![serde_json::to_vec(&m).expect("a measurement can be written")]
}

pub(super) fn checkpoints() -> Vec<Vec<u8>> {
    let values = |n: usize| [0.25f32.to_le_bytes()].repeat(n).concat();
    let (table, scalar) = (values(8), values(1));
    let view = |shape: &[usize], data| {
        TensorView::new(Dtype::F32, shape.to_vec(), data).expect("as many values as that")
    };
    let states = [
        ("embed.table", view(&[4, 2], &table)),
        ("loss_scale", view(&[], &scalar)),
        ("moment1.embed.table", view(&[4, 2], &table)),
    ];
    let step = HashMap::from([("step".to_string(), "17".to_string())]);
    vec![safetensors::serialize(states, Some(step)).expect("a file can be written")]
}

/// Name of the one file of the checkpoint that the manifests are of.
pub(super) const RANK_FILE: &str = "rank-0.safetensors";

pub(super) fn manifests() -> Vec<Vec<u8>> {
    let file = checkpoints().remove(0);
    let part = |start: [u64; 2], shape: [u64; 2]| json!({ "file": RANK_FILE, "start": start, "shape": shape });
    let table = json!({ "shape": [4, 2], "parts": [part([0, 0], [4, 2])] });
    let manifest = json!({
        "version": 1,
        "origin": {
            "plan_hash": "fnv1a64:0", "model": "", "step": 17, "seed": 1, "next_sample": 68,
            "global_batch": 4, "sequence": 8,
        },
        "files": {
            RANK_FILE: { "bytes": file.len(), "blake3": blake3::hash(&file).to_string() },
        },
        "states": {
            "embed.table": table,
            "loss_scale": { "shape": [], "parts": [{ "file": RANK_FILE, "start": [], "shape": [] }] },
            "moment1.embed.table": table,
        },
        "blake3": "",
    });
    vec![manifest.to_string().into_bytes()]
}

/// A distributed checkpoint of PyTorch: its metadata and its file of chunks.
fn dcp() -> [Vec<u8>; 2] {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let (state, made) = (
        dir.path().join("state.safetensors"),
        dir.path().join("made"),
    );
    std::fs::write(&state, checkpoints().remove(0)).expect("a temporary file");
    let from = runtime::checkpoint::find(&state).expect("a good checkpoint");
    runtime::checkpoint::dcp::export(&from.checkpoint, "", &made).expect("a temporary folder");
    [".metadata", "__0_0.distcp"].map(|name| std::fs::read(made.join(name)).expect("a file"))
}

pub(super) fn dcp_metadata() -> Vec<Vec<u8>> {
    let [metadata, _] = dcp();
    vec![metadata]
}

pub(super) fn dcp_chunks() -> Vec<Vec<u8>> {
    let [_, chunks] = dcp();
    vec![chunks]
}

/// The states of it.
pub(super) fn dcp_states() -> std::collections::BTreeMap<String, Vec<u64>> {
    let table = |path: &str| (path.to_string(), vec![4, 2]);
    [table("embed.table"), table("moment1.embed.table")].into()
}

pub(super) fn train_files() -> Vec<Vec<u8>> {
    [
        "global_batch = 16 # samples\nsequence = 128\nprecision = \"bf16\"\ndropout = 0.1\nclip_norm = 1.0\nseed = 1337\n\n[optimizer.adam_w]\nbeta1 = 0.9\nbeta2 = 0.95\neps = 1e-8\nweight_decay = 0.1\n",
        "clip_norm = \"none\"\nprecision = \"f16\"\n[optimizer.sgd]\nmomentum = 0.9\nweight_decay = 0.01\n",
        "clip_norm = 2\noptimizer = { adam_w = {} }\n",
        "task = \"inference\"\nprecision = \"bf16\"\n",
    ]
    .map(|t| t.as_bytes().to_vec())
    .to_vec()
}

/// A DeepSpeed file.
pub(super) const DEEPSPEED: &str = include_str!("../../../examples/jobs/zero3-deepspeed.json");

/// Jobs of every form.
pub(super) fn jobs() -> Vec<Vec<u8>> {
    let log = " > setting tensor model parallel\n------------------------ arguments ------------------------\n  bf16 ............................................ True\n  global_batch_size ............................... 32\n  hidden_size ..................................... 1024\n  micro_batch_size ................................ 1\n  num_attention_heads ............................. 16\n  num_layers ...................................... 4\n  padded_vocab_size ............................... 51200\n  position_embedding_type ......................... rope\n  seq_length ...................................... 1024\n  world_size ...................................... 8\n-------------------- end of arguments ---------------------\n iteration 2/ 9 | elapsed time per iteration (ms): 80.0 | global batch size: 32 |\n iteration 3/ 9 | elapsed time per iteration (ms): 81.0 | global batch size: 32 |\n";
    let trainer = "deepspeed --num_gpus 8 train.py --deepspeed ds.json --model_name_or_path meta-llama/Llama-3.1-8B --max_seq_length 2048 --bf16 true\n";
    [
        include_str!("../../../examples/jobs/llama-70b-megatron.sbatch"),
        include_str!("../../../examples/jobs/gpt-2.7b-megatron.sh"),
        include_str!("../../../examples/jobs/llama-8b-torchtitan.toml"),
        DEEPSPEED,
        log,
        trainer,
    ]
    .map(|text| text.as_bytes().to_vec())
    .to_vec()
}
