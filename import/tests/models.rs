//! The published configurations in `models/`, and the graphs of all sizes.

#![allow(clippy::unwrap_used)]

use import::{BuildOptions, ModelConfig, model_graph};
use ir::op::{Init, OpKind};
use ir::{Graph, Pass, Region};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models")
}

fn graph(config: &ModelConfig, sequence: u64, dropout: f64) -> Graph {
    model_graph(config, &BuildOptions { sequence, dropout }).unwrap()
}

#[test]
fn parameter_counts_are_the_published_ones() {
    for (name, expected) in [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        // 96 layers of 12 h^2 + 13 h, the two tables, the last norm; h = 12288.
        (
            "gpt3-175b",
            96 * (12 * 12288 * 12288 + 13 * 12288) + (50257 + 2048 + 2) * 12288,
        ),
        // The same sum.
        (
            "gpt3-6.7b",
            32 * (12 * 4096 * 4096 + 13 * 4096) + (50257 + 2048 + 2) * 4096,
        ),
        // Table 1 of the paper has 18.4, 529.6 and 1008.0 billion.
        ("megatron-18b", 18_449_756_160),
        ("megatron-530b", 529_600_819_200),
        ("megatron-1t", 1_008_038_758_400),
        ("llama-2-7b", 6_738_415_616),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-3.2-1b", 1_235_814_400),
        ("mixtral-8x7b", 46_702_792_704),
        ("mixtral-8x22b", 140_630_071_296),
        ("mistral-7b", 7_241_732_096),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-8b", 8_190_735_360),
        ("qwen1.5-moe-a2.7b", 14_315_784_192),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("gemma-2b", 2_506_172_416),
        ("gemma-7b", 8_537_680_896),
        ("opt-6.7b", 6_658_473_984),
        ("opt-66b", 65_719_701_504),
        ("pythia-6.9b", 6_857_302_016),
        ("gpt-neox-20b", 20_554_567_680),
        ("nemotron-4-340b", 341_029_195_776),
        // Published as 31.6 and 120.6 billion, 3.2 (without the embedding) and 12.7 of them for a token.
        ("nemotron-3-nano-30b-a3b", 31_577_940_288),
        ("nemotron-3-super-120b-a12b", 120_668_707_840),
        ("nemotron-3-ultra-550b-a55b", 549_308_993_536),
        ("nemotron-h-8b", 8_100_852_736),
        ("mamba2-2.7b", 2_702_599_680),
        // Attention 26,555,904, a router 2,881 and an expert 24,891,840 for each; two tables, the last norm.
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
        // A table with a norm, layers of 12 h^2 + 13 h, the last norm.
        ("bloom-560m", 559_214_592),
        ("bloom-7b1", 7_069_016_064),
        ("bloom-176b", 176_247_271_424),
        ("phi-3-mini", 3_821_079_552),
        ("phi-3-medium", 13_960_238_080),
        ("gemma-2-2b", 2_614_341_888),
        ("gemma-2-9b", 9_241_705_984),
        ("gemma-2-27b", 27_227_128_320),
        ("gemma-3-1b", 999_885_952),
        ("gemma-3-27b", 27_009_346_304),
        ("deepseek-v2-lite", 15_706_484_224),
        ("deepseek-v2", 235_741_434_880),
        ("deepseek-v3", 671_026_419_200),
        // 61 layers of attention, 384 experts, a router and norms; two tables, the last norm.
        (
            "moe-1t",
            61 * (2 * 7168 * (8192 + 1024) + 2 * 128 + 384 * (3 * 2048 + 1) * 7168 + 2 * 7168)
                + (2 * 163_840 + 1) * 7168,
        ),
        (
            "tiny-gpt2",
            4 * (12 * 128 * 128 + 13 * 128) + (256 + 128 + 2) * 128,
        ),
        (
            "tiny-llama",
            4 * ((4 + 2) * 64 * 128 + 3 * 384 * 128 + 2 * 128) + (2 * 256 + 1) * 128,
        ),
        ("wide-resnet-250m", wide_resnet(160, 2, [3, 4, 6, 3])),
        ("wide-resnet-13b", wide_resnet(320, 16, [3, 4, 23, 3])),
        // Convolutions with their norms: 7 x 7, then two blocks with a projection each.
        (
            "tiny-wide-resnet",
            49 * 3 * 16
                + 2 * 16
                + (16 * 16 + 9 * 16 * 32 + 32 * 64 + 16 * 64 + 2 * (16 + 32 + 64 + 64))
                + (64 * 32 + 9 * 32 * 64 + 64 * 128 + 64 * 128 + 2 * (32 + 64 + 128 + 128))
                + 129 * 256,
        ),
    ] {
        let config = ModelConfig::load(&models().join(name)).unwrap();
        assert_eq!(config.n_parameters(), expected, "{name}");
        let readme = std::fs::read_to_string(models().join("README.md")).unwrap();
        let row = readme
            .lines()
            .find(|l| l.starts_with(&format!("| `{name}` |")))
            .unwrap();
        assert!(
            row.replace(',', "").contains(&format!("| {expected} |")),
            "{row}: {expected}"
        );
    }
}

/// Parameters of Alpa's sizes, stage by stage: the first block of a stage takes what the one before
/// gives and is projected, the others take their own result.
fn wide_resnet(base: u64, width: u64, depths: [u64; 4]) -> u64 {
    let (mut n, mut input) = (49 * 3 * base + 2 * base, base);
    for (stage, depth) in (0..).zip(depths) {
        let (narrow, wide, out) = (base << stage, (base << stage) * width, (base << stage) * 4);
        let inner = 9 * narrow * wide + wide * out + 2 * (narrow + wide + out);
        n += input * narrow + inner + input * out + 2 * out;
        n += (depth - 1) * (out * narrow + inner);
        input = out;
    }
    n + (input + 1) * 1024
}

#[test]
fn every_model_in_the_folder_builds() {
    let mut n = 0;
    for entry in std::fs::read_dir(models()).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            let config = ModelConfig::load(&path).unwrap();
            let g = graph(&config, config.max_sequence().min(2048), 0.0);
            assert_eq!(ir::verify::verify(&g), [], "{}", path.display());
            assert_eq!(ir::verify::dead_ops(&g), [], "{}", path.display());
            assert_eq!(
                g.layers.len() as u64,
                config.n_layers() + 2,
                "{}",
                path.display()
            );
            n += 1;
        }
    }
    assert_eq!(n, 55);
}

#[test]
fn gpt3_builds_without_its_weights() {
    let config = ModelConfig::load(&models().join("gpt3-175b")).unwrap();
    let start = Instant::now();
    let g = graph(&config, 2048, 0.0);
    // It takes about 2 ms; weights alone would be 700 GB.
    assert!(
        start.elapsed() < Duration::from_secs(1),
        "{:?}",
        start.elapsed()
    );
    assert_eq!(g.layers.first().map(String::as_str), Some("embed"));
    assert_eq!(
        g.layers[1..97],
        (0..96).map(|i| format!("h.{i}")).collect::<Vec<_>>()
    );
    assert_eq!(g.layers.last().map(String::as_str), Some("head"));
}

#[test]
fn states_are_the_parameters_in_order() {
    for (name, sequence) in [
        ("tiny-gpt2", 16),
        ("tiny-llama", 16),
        ("llama-3.2-1b", 16),
        ("llama-2-7b", 16),
        ("tiny-wide-resnet", 1),
    ] {
        let config = ModelConfig::load(&models().join(name)).unwrap();
        let g = graph(&config, sequence, 0.0);
        let states: Vec<_> = g
            .ops()
            .iter()
            .filter(|op| matches!(op.kind, OpKind::State { .. }))
            .collect();
        let params = config.params();
        assert_eq!(states.len(), params.len());
        for (op, p) in states.iter().zip(&params) {
            assert_eq!(op.path, p.path);
            assert_eq!((op.pass, op.region), (Pass::Update, Region::StepBegin));
            assert_eq!(
                op.kind,
                OpKind::State {
                    init: p.init,
                    decay: p.decay()
                }
            );
            assert_eq!(g.ty(op.outputs[0]).shape.bind(1), p.shape, "{}", p.path);
            let layer = &g.layers[op.layer.unwrap().index()];
            assert!(
                p.path.starts_with(&format!("{layer}.")),
                "{} in {layer}",
                p.path
            );
        }
    }
}

#[test]
fn gpt2_graph_is_the_one_of_the_conventions() {
    let config = ModelConfig::load(&models().join("tiny-gpt2")).unwrap();
    let g = graph(&config, 64, 0.1);
    let ty = |path: &str| {
        let op = g.op(g.find(path).unwrap_or_else(|| panic!("no op {path}")));
        op.outputs
            .iter()
            .map(|&v| g.ty(v).to_string())
            .collect::<Vec<_>>()
            .join(" ")
    };
    for (path, expected) in [
        ("tokens", "i32[B,64]"),
        ("embed.wpe.weight", "f32[128,128]"),
        ("embed.positions", "f32[64,128]"),
        ("embed.dropout", "f32[B,64,128]"),
        ("h.0.ln_1", "f32[B,64,128] f32[B,64] f32[B,64]"),
        ("h.0.attn.qkv.weight", "f32[128,3,4,32]"),
        ("h.0.attn.qkv.bias", "f32[3,4,32]"),
        ("h.0.attn.qkv", "f32[B,64,3,4,32]"),
        (
            "h.0.attn.split",
            "f32[B,64,4,32] f32[B,64,4,32] f32[B,64,4,32]",
        ),
        ("h.0.attn.attend", "f32[B,64,4,32] f32[B,64,4]"),
        ("h.0.attn.out.weight", "f32[4,32,128]"),
        ("h.3.mlp.act", "f32[B,64,512]"),
        ("h.3.residual_2", "f32[B,64,128]"),
        ("labels", "i32[B,64]"),
        ("head.logits", "f32[B,64,256]"),
        ("nll_sum", "f32[]"),
    ] {
        assert_eq!(ty(path), expected, "{path}");
    }
    assert_eq!(
        g.outputs
            .iter()
            .map(|&v| g.value_name(v))
            .collect::<Vec<_>>(),
        ["nll_sum"]
    );
    // Tied: the head multiplies with the embedding's own value.
    let table = g.op(g.find("embed.wte.weight").unwrap()).outputs[0];
    assert_eq!(g.op(g.find("head.logits").unwrap()).inputs[1], table);
    assert!(g.find("head.lm_head.weight").is_none());
    // Radford et al. 2019: projections into the residual stream are narrower.
    let init = |path: &str| match g.op(g.find(path).unwrap()).kind {
        OpKind::State {
            init: Init::Normal { std },
            decay,
        } => (std, decay),
        ref other => panic!("{path}: {other:?}"),
    };
    assert_eq!(init("h.0.attn.qkv.weight"), (0.02, true));
    assert_eq!(init("h.0.attn.out.weight"), (0.02 / 8f64.sqrt(), true));
    assert_eq!(init("h.2.mlp.proj.weight"), (0.02 / 8f64.sqrt(), true));
    assert_eq!(
        g.op(g.find("h.0.attn.qkv.bias").unwrap()).kind,
        OpKind::State {
            init: Init::Zeros,
            decay: false
        },
        "three dims here, one in the file: not decayed"
    );
}

#[test]
fn dropout_stands_where_the_models_have_it() {
    let drops = |name: &str, p: f64| {
        let config = ModelConfig::load(&models().join(name)).unwrap();
        let g = graph(&config, 16, p);
        let ops = g.ops().iter().filter(|op| matches!(&op.kind, OpKind::Dropout { p: q, key, .. } if *q == p && *key == op.path)).count();
        let attention = g
            .ops()
            .iter()
            .filter(|op| matches!(op.kind, OpKind::Attention { dropout, .. } if dropout > 0.0))
            .count();
        (ops, attention)
    };
    assert_eq!(drops("tiny-gpt2", 0.0), (0, 0));
    assert_eq!(drops("tiny-gpt2", 0.1), (1 + 4 * 2, 4));
    assert_eq!(drops("tiny-llama", 0.0), (0, 0));
    assert_eq!(drops("tiny-llama", 0.1), (0, 4));
}

#[test]
fn full_sequence_needs_no_slice() {
    let config = ModelConfig::load(&models().join("tiny-gpt2")).unwrap();
    assert!(graph(&config, 128, 0.0).find("embed.positions").is_none());
}

#[test]
fn options_out_of_range_are_errors() {
    let config = ModelConfig::load(&models().join("tiny-llama")).unwrap();
    let error = |sequence, dropout| {
        model_graph(&config, &BuildOptions { sequence, dropout })
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        error(129, 0.0),
        "sequence 129: the model has 128 positions; accepted: 1 to 128"
    );
    assert_eq!(
        error(0, 0.0),
        "sequence 0: the model has 128 positions; accepted: 1 to 128"
    );
    for p in [1.0, -0.1, f64::NAN, f64::INFINITY] {
        assert_eq!(
            error(8, p),
            format!("dropout {p}: accepted: a probability in [0, 1)")
        );
    }
}

/// FLOPs of attention that MFU counts in a forward pass of one sample.
fn counted_attention_flops(name: &str, sequence: u64) -> f64 {
    let config = ModelConfig::load(&models().join(name)).unwrap();
    let graph = graph(&config, sequence, 0.0);
    let works = graph.ops().iter().map(|op| graph.work(op, 1));
    works.map(|w| w.counted_attention_flops()).sum()
}

#[test]
fn attention_with_a_window_counts_as_many_keys_as_the_window_has() {
    // Two products of 2 FLOPs for each query, key and element of a head.
    let of = |layers: u64, queries: u64, keys: u64, heads: u64| {
        (2 * 2 * layers * queries * keys * heads) as f64
    };
    // 32 layers with a window of 4,096; one that reaches back over the whole sequence is none.
    let mistral = counted_attention_flops("mistral-7b", 16_384);
    assert_eq!(mistral, of(32, 16_384, 4_096, 32 * 128));
    let short = counted_attention_flops("mistral-7b", 2_048);
    assert_eq!(short, of(32, 2_048, 2_048, 32 * 128));
    // Every second of 26 layers, and five of six of 26.
    let gemma2 = counted_attention_flops("gemma-2-2b", 8_192);
    let heads = 8 * 256;
    assert_eq!(
        gemma2,
        of(13, 8_192, 4_096, heads) + of(13, 8_192, 8_192, heads)
    );
    let gemma3 = counted_attention_flops("gemma-3-1b", 4_096);
    let heads = 4 * 256;
    assert_eq!(
        gemma3,
        of(22, 4_096, 512, heads) + of(4, 4_096, 4_096, heads)
    );
}
