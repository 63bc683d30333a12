//! Safetensors in and out: layouts, round trips, and every way in which files can be wrong.

#![allow(clippy::unwrap_used)]

use half::{bf16, f16};
use import::{ModelConfig, Weights, export, export_order, map_param_to_hf, to_hf};
use safetensors::tensor::{Dtype, TensorView};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const CASES: [&str; 30] = [
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

/// Dtype, shape and bytes of each tensor.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn reference(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/reference")
        .join(case)
}

fn config(case: &str) -> ModelConfig {
    ModelConfig::load(&reference(case)).unwrap()
}

/// The tensors of a case's weights, read with the format's own library.
fn tensors(case: &str) -> Tensors {
    let bytes = std::fs::read(reference(case).join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    file.tensors()
        .into_iter()
        .map(|(n, t)| (n, (t.dtype(), t.shape().to_vec(), t.data().to_vec())))
        .collect()
}

fn write(path: &Path, tensors: &Tensors) {
    let views = tensors
        .iter()
        .map(|(n, (d, s, b))| (n, TensorView::new(*d, s.clone(), b).unwrap()));
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// Opens the case's weights after `change` and returns the message of the error.
fn open_changed(case: &str, change: impl FnOnce(&mut Tensors)) -> Result<Weights, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let mut all = tensors(case);
    change(&mut all);
    write(&path, &all);
    Weights::open(&path, &config(case))
        .map_err(|e| e.to_string().replace(&format!("{}: ", path.display()), ""))
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
        .collect()
}

#[test]
fn import_then_export_gives_the_same_file() {
    for case in CASES {
        let config = config(case);
        let original = reference(case).join("model.safetensors");
        let weights = Weights::open(&original, &config).unwrap();
        let mut written = Vec::new();
        let mut asked = Vec::new();
        let supply = |path: &str| {
            asked.push(path.to_string());
            weights.param(path)
        };
        export("out", &mut written, &config, supply).unwrap();
        assert_eq!(asked, export_order(&config), "{case}");
        assert!(
            written == std::fs::read(&original).unwrap(),
            "{case}: the files differ"
        );
    }
}

#[test]
fn to_hf_inverts_param() {
    for case in CASES {
        let (config, stored) = (config(case), tensors(case));
        let weights = Weights::open(reference(case), &config).unwrap();
        let mut seen: BTreeMap<String, Vec<f32>> = BTreeMap::new();
        for path in weights.paths() {
            for (name, shape, values) in
                to_hf(&config, path, &weights.param(path).unwrap()).unwrap()
            {
                assert_eq!(shape, stored[&name].1, "{case} {path}");
                assert!(map_param_to_hf(&config, path).unwrap().contains(&name));
                // Several parameters may have rows of one tensor, and zeros in the others'.
                let sum = seen.entry(name).or_insert_with(|| vec![0.0; values.len()]);
                sum.iter_mut().zip(values).for_each(|(s, x)| *s += x);
            }
        }
        assert!(
            seen.keys().eq(stored.keys()),
            "{case}: every tensor is of parameters"
        );
        for (name, values) in seen {
            assert_eq!(values, floats(&stored[&name].2), "{case} {name}");
        }
    }
}

#[test]
fn experts_are_stacked() {
    // Ours [experts, hidden, width], stored [width, hidden] each; hidden 32, width 24.
    let (config, stored) = (config("mixtral"), tensors("mixtral"));
    let weights = Weights::open(reference("mixtral"), &config).unwrap();
    let ours = weights.param("h.1.moe.up.weight").unwrap();
    let theirs = |e: usize| {
        floats(&stored[&format!("model.layers.1.block_sparse_moe.experts.{e}.w3.weight")].2)
    };
    let (e, h, f) = (2, 5, 7);
    assert_eq!(ours[(e * 32 + h) * 24 + f], theirs(e)[f * 32 + h]);
    assert_eq!(ours.len(), 4 * 32 * 24);
    let names = map_param_to_hf(&config, "h.1.moe.down.weight").unwrap();
    assert_eq!(
        names[3],
        "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    );
    let missing = open_changed("mixtral", |t| {
        t.remove("model.layers.0.block_sparse_moe.experts.1.w1.weight");
    });
    let text = missing.unwrap_err();
    assert!(
        text.contains("model.layers.0.block_sparse_moe.experts.1.w1.weight"),
        "{text}"
    );
    let more = open_changed("mixtral", |t| {
        let one = t["model.layers.0.block_sparse_moe.experts.1.w1.weight"].clone();
        t.insert(
            "model.layers.0.block_sparse_moe.experts.4.w1.weight".into(),
            one,
        );
    });
    let text = more.unwrap_err();
    assert!(text.contains("experts.4.w1.weight"), "{text}");
}

/// The matrix that joins embeddings and what the model gave; copies of the embedding and the head,
/// which published files have with each module, are passed over, and nothing else is.
#[test]
fn modules_for_further_tokens_are_layers_behind_the_last() {
    let case = "deepseek_v3_further";
    let weights = Weights::open(reference(case), &config(case)).unwrap();
    let stored = tensors(case);
    let file = floats(&stored["model.layers.3.eh_proj.weight"].2);
    let (h, out) = (5, 9);
    for (part, ours) in [
        (0, "h.mtp.1.embed_proj.weight"),
        (1, "h.mtp.1.hidden_proj.weight"),
    ] {
        let ours = weights.param(ours).unwrap();
        assert_eq!(ours[h * 32 + out], file[out * 64 + part * 32 + h]);
    }
    let add = |name: &'static str| {
        open_changed(case, move |t| {
            let table = t["model.embed_tokens.weight"].clone();
            t.insert(name.into(), table);
        })
    };
    add("model.layers.2.embed_tokens.weight").unwrap();
    add("model.layers.3.shared_head.head.weight").unwrap();
    for name in ["model.layers.3.other.weight", "model.layers.4.enorm.weight"] {
        assert!(add(name).unwrap_err().contains(name));
    }
    let missing = open_changed("nemotron_h_further", |t| {
        t.remove("mtp.layers.1.final_layernorm.weight");
    });
    assert!(
        missing
            .unwrap_err()
            .contains("mtp.layers.1.final_layernorm.weight")
    );
    // A file that has all else says so.
    let without = open_changed(case, |t| {
        t.retain(|name, _| !name.contains("layers.2.") && !name.contains("layers.3."))
    });
    let text = without.unwrap_err();
    assert!(
        text.contains("the file has none: no `model.layers.2."),
        "{text}"
    );
    // Without them in the configuration the file is that of the model alone.
    let alone = config(case).without_further_tokens();
    Weights::open(reference(case), &alone).unwrap();
}

/// Files count the blocks of all modules of Nemotron-H.
#[test]
fn blocks_of_several_modules_follow_each_other() {
    let mut text: serde_json::Value = serde_json::from_slice(
        &std::fs::read(reference("nemotron_h_further").join("config.json")).unwrap(),
    )
    .unwrap();
    text["num_nextn_predict_layers"] = 2.into();
    text["mtp_use_repeated_layer"] = false.into();
    let config = ModelConfig::parse("config.json", text.to_string().as_bytes()).unwrap();
    for (ours, theirs) in [
        ("h.mtp.0.embed_norm.weight", "mtp.layers.0.enorm.weight"),
        ("h.mtp.0.norm.weight", "mtp.layers.1.final_layernorm.weight"),
        ("h.mtp.1.hidden_proj.weight", "mtp.layers.2.eh_proj.weight"),
        (
            "h.mtp.1.h.0.attn.q.weight",
            "mtp.layers.2.mixer.q_proj.weight",
        ),
        (
            "h.mtp.1.h.1.moe.router.weight",
            "mtp.layers.3.mixer.gate.weight",
        ),
        ("h.mtp.1.norm.weight", "mtp.layers.3.final_layernorm.weight"),
    ] {
        assert_eq!(map_param_to_hf(&config, ours).unwrap(), [theirs]);
    }
}

/// A matrix of a file that holds several of ours: its rows go to each of them, and what is wrong
/// with it is said once.
#[test]
fn parts_of_a_matrix_are_parameters() {
    let case = "deepseek_v3";
    let weights = Weights::open(reference(case), &config(case)).unwrap();
    let stored = tensors(case);
    let theirs = |name: &str| floats(&stored[&format!("model.layers.1.self_attn.{name}.weight")].2);
    // Four heads of 6 elements that do not turn and 8 that do, pair by pair; ours turn first, one
    // side of the pairs before the other.
    let (ours, file) = (
        weights.param("h.1.attn.q_up.weight").unwrap(),
        theirs("q_b_proj"),
    );
    let (head, h) = (2, 13);
    for (own, row) in [(0, 6), (1, 8), (3, 12), (4, 7), (7, 13), (8, 0), (13, 5)] {
        let expected = file[(head * 14 + row) * 20 + h];
        assert_eq!(ours[(h * 4 + head) * 14 + own], expected, "element {own}");
    }
    // Sixteen rows of the compression, then the 8 of the keys that turn.
    let file = theirs("kv_a_proj_with_mqa");
    let down = weights.param("h.1.attn.kv_down.weight").unwrap();
    assert_eq!(down[5 * 16 + 9], file[9 * 32 + 5]);
    let turned = weights.param("h.1.attn.k_turned.weight").unwrap();
    assert_eq!(turned[5 * 8 + 5], file[(16 + 3) * 32 + 5]);
    // Each head has 6 rows of keys, then 10 of values.
    let file = theirs("kv_b_proj");
    let values = weights.param("h.1.attn.v_up.weight").unwrap();
    assert_eq!(
        values[(3 * 4 + 2) * 10 + 7],
        file[(2 * 16 + 6 + 7) * 16 + 3]
    );
    let name = "model.layers.1.self_attn.kv_b_proj.weight";
    let missing = open_changed(case, |all| drop(all.remove(name))).unwrap_err();
    assert_eq!(
        missing,
        format!("the model's tensors are missing: `{name}`")
    );
    let short = open_changed(case, |all| {
        let (_, shape, bytes) = all.get_mut(name).unwrap();
        shape[0] = 63;
        bytes.truncate(63 * 16 * 4);
    });
    assert_eq!(
        short.unwrap_err(),
        format!("tensor `{name}` is [63, 16], the model's is [64, 16]")
    );
    // Layers behind the last predict further tokens, and are not read.
    open_changed(case, |all| {
        let one = all["model.layers.1.input_layernorm.weight"].clone();
        all.insert("model.layers.2.eh_proj.weight".into(), one);
    })
    .unwrap();
}

/// Experts in one tensor, where gates and ups take turns, and quantized ones.
#[test]
fn stacked_experts_are_taken_apart() {
    // Ours [experts, hidden, width], stored [experts, hidden, 2 width]; hidden 32, width 20.
    let case = "gpt_oss";
    let weights = Weights::open(reference(case), &config(case)).unwrap();
    let stored = tensors(case);
    let theirs = |name: &str| floats(&stored[&format!("model.layers.1.{name}")].2);
    let file = theirs("mlp.experts.gate_up_proj");
    let (e, h, f) = (2, 5, 7);
    for (name, parity) in [("gate", 0), ("up", 1)] {
        let ours = weights.param(&format!("h.1.moe.{name}.weight")).unwrap();
        assert_eq!(ours.len(), 4 * 32 * 20);
        assert_eq!(
            ours[(e * 32 + h) * 20 + f],
            file[(e * 32 + h) * 40 + 2 * f + parity]
        );
    }
    let ours = weights.param("h.1.moe.up.bias").unwrap();
    let file = theirs("mlp.experts.gate_up_proj_bias");
    assert_eq!(ours[e * 20 + f], file[e * 40 + 2 * f + 1]);
    let ours = weights.param("h.1.moe.down.weight").unwrap();
    assert_eq!(ours, theirs("mlp.experts.down_proj"));
    assert_eq!(
        weights.param("h.1.attn.sinks").unwrap(),
        theirs("self_attn.sinks")
    );
    let router = weights.param("h.1.moe.router.weight").unwrap();
    assert_eq!(router[5 * 4 + 3], theirs("mlp.router.weight")[3 * 32 + 5]);
    // As published: blocks of numbers of four bits, and their scales.
    let quantized = open_changed(case, |all| {
        let name = "model.layers.0.mlp.experts.gate_up_proj";
        all.remove(name);
        let blocks = (Dtype::U8, vec![4, 40, 1, 16], vec![0; 4 * 40 * 16]);
        all.insert(format!("{name}_blocks"), blocks);
        all.insert(
            format!("{name}_scales"),
            (Dtype::U8, vec![4, 40, 1], vec![0; 4 * 40]),
        );
    });
    let said = quantized.unwrap_err();
    let expected = "`model.layers.0.mlp.experts.gate_up_proj_blocks` is quantized (MXFP4)";
    assert!(
        said.contains(expected) && said.contains("dequantize=True"),
        "{said}"
    );
}

#[test]
fn elements_are_where_the_layout_says() {
    // Llama: ours [hidden, kv, groups, d], stored [heads * d, hidden]; hidden 32, kv 2, d 8.
    let case = "llama_tied";
    let weights = Weights::open(reference(case), &config(case)).unwrap();
    let ours = weights.param("h.1.attn.q.weight").unwrap();
    let theirs = floats(&tensors(case)["model.layers.1.self_attn.q_proj.weight"].2);
    let (h, kv, g, d) = (5, 1, 0, 3);
    assert_eq!(
        ours[((h * 2 + kv) * 2 + g) * 8 + d],
        theirs[((kv * 2 + g) * 8 + d) * 32 + h]
    );
    let ours = weights.param("h.1.attn.out.weight").unwrap();
    let theirs = floats(&tensors(case)["model.layers.1.self_attn.o_proj.weight"].2);
    assert_eq!(
        ours[((kv * 2 + g) * 8 + d) * 32 + h],
        theirs[h * 32 + (kv * 2 + g) * 8 + d]
    );
    // GPT-2: ours [hidden, 3, heads, d], stored [hidden, 3 * hidden]; hidden 32, heads 4, d 8.
    let case = "gpt2_small_tied";
    let weights = Weights::open(reference(case), &config(case)).unwrap();
    let ours = weights.param("h.0.attn.qkv.weight").unwrap();
    let theirs = floats(&tensors(case)["transformer.h.0.attn.c_attn.weight"].2);
    let (key, head) = (1, 2);
    assert_eq!(
        ours[((h * 3 + key) * 4 + head) * 8 + d],
        theirs[h * 96 + key * 32 + head * 8 + d]
    );
}

#[test]
fn halves_are_converted() {
    let narrow = |all: &mut Tensors, dtype: Dtype| {
        for (d, _, bytes) in all.values_mut() {
            let halves = floats(bytes).into_iter().flat_map(|x| match dtype {
                Dtype::F16 => f16::from_f32(x).to_le_bytes(),
                _ => bf16::from_f32(x).to_le_bytes(),
            });
            (*bytes, *d) = (halves.collect(), dtype);
        }
    };
    let original = Weights::open(reference("llama_tied"), &config("llama_tied")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for (dtype, round) in [
        (
            Dtype::F16,
            (|x| f16::from_f32(x).to_f32()) as fn(f32) -> f32,
        ),
        (Dtype::BF16, |x| bf16::from_f32(x).to_f32()),
    ] {
        let mut all = tensors("llama_tied");
        narrow(&mut all, dtype);
        let path = folder.path().join("half.safetensors");
        write(&path, &all);
        let weights = Weights::open(&path, &config("llama_tied")).unwrap();
        for p in weights.paths() {
            let expected: Vec<f32> = original.param(p).unwrap().into_iter().map(round).collect();
            assert_eq!(weights.param(p).unwrap(), expected, "{p} as {dtype:?}");
        }
    }
}

#[test]
fn names_without_prefix_and_old_buffers_are_accepted() {
    let strip = |prefix: &'static str| {
        move |all: &mut Tensors| {
            *all = std::mem::take(all)
                .into_iter()
                .map(|(n, t)| (n.trim_start_matches(prefix).to_string(), t))
                .collect()
        }
    };
    open_changed("gpt2_small_tied", strip("transformer.")).unwrap();
    open_changed("llama_tied", strip("model.")).unwrap();
    open_changed("gpt2_small_tied", |all| {
        for name in [
            "transformer.h.1.attn.bias",
            "transformer.h.0.attn.masked_bias",
        ] {
            all.insert(name.into(), (Dtype::BOOL, vec![2], vec![1, 1]));
        }
    })
    .unwrap();
    open_changed("llama_tied", |all| {
        all.insert(
            "model.layers.1.self_attn.rotary_emb.inv_freq".into(),
            (Dtype::F32, vec![1], vec![0; 4]),
        );
    })
    .unwrap();
    let twice = open_changed("gpt2_small_tied", |all| {
        let table = all["transformer.wte.weight"].clone();
        all.insert("wte.weight".into(), table);
    });
    assert_eq!(
        twice.unwrap_err(),
        "`transformer.wte.weight` and `wte.weight` are the same tensor of the model"
    );
}

#[test]
fn a_tied_head_may_be_stored_if_equal() {
    let store = |change: fn(&mut Vec<u8>)| {
        open_changed("llama_tied", move |all| {
            let mut head = all["model.embed_tokens.weight"].clone();
            change(&mut head.2);
            all.insert("lm_head.weight".into(), head);
        })
    };
    store(|_| ()).unwrap();
    assert_eq!(
        store(|bytes| bytes[1] ^= 1).unwrap_err(),
        "`lm_head.weight` differs from `model.embed_tokens.weight`, but the config ties them (`tie_word_embeddings`)"
    );
}

#[test]
fn tensors_must_be_the_models() {
    let error = |case, change: fn(&mut Tensors)| open_changed(case, change).unwrap_err();
    assert_eq!(
        error("gpt2_small_tied", |all| {
            all.remove("transformer.h.1.ln_2.bias");
            all.remove("transformer.wpe.weight");
        }),
        "the model's tensors are missing: `transformer.wpe.weight`, `transformer.h.1.ln_2.bias`"
    );
    assert_eq!(
        error("llama_untied_rope", |all| drop(
            all.remove("lm_head.weight")
        )),
        "the model's tensors are missing: `lm_head.weight`"
    );
    assert_eq!(
        error("llama_tied", |all| {
            all.insert(
                "model.layers.2.mlp.up_proj.weight".into(),
                (Dtype::F32, vec![1], vec![0; 4]),
            );
        }),
        "the model has no such tensors: `model.layers.2.mlp.up_proj.weight`"
    );
    assert_eq!(
        error("llama_tied", |all| all
            .get_mut("model.layers.0.mlp.up_proj.weight")
            .unwrap()
            .1
            .reverse()),
        "tensor `model.layers.0.mlp.up_proj.weight` is [32, 48], the model's is [48, 32]"
    );
    assert_eq!(
        error("llama_tied", |all| all
            .get_mut("model.norm.weight")
            .unwrap()
            .0 = Dtype::I32),
        "tensor `model.norm.weight` has dtype I32; accepted: F32, F16, BF16"
    );
}

#[test]
fn values_must_be_finite() {
    for (bits, shown) in [
        (f32::NAN.to_bits(), "NaN"),
        (f32::INFINITY.to_bits(), "inf"),
        (f32::NEG_INFINITY.to_bits(), "-inf"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w.safetensors");
        let mut all = tensors("llama_tied");
        let bytes = &mut all
            .get_mut("model.layers.1.mlp.down_proj.weight")
            .unwrap()
            .2;
        let at = 4 * (7 * 48 + 11);
        bytes[at..at + 4].copy_from_slice(&bits.to_le_bytes());
        write(&path, &all);
        let weights = Weights::open(&path, &config("llama_tied")).unwrap();
        let error = weights
            .param("h.1.mlp.down.weight")
            .unwrap_err()
            .to_string();
        assert_eq!(
            error,
            format!(
                "{}: tensor `model.layers.1.mlp.down_proj.weight` is {shown} at [7, 11]",
                path.display()
            )
        );
        weights.param("h.1.mlp.up.weight").unwrap();
    }
}

#[test]
fn wrong_parameters_are_errors() {
    let config = config("llama_tied");
    let weights = Weights::open(reference("llama_tied"), &config).unwrap();
    let no = "the model has no parameter `h.9.attn.q.weight`";
    assert_eq!(
        weights.param("h.9.attn.q.weight").unwrap_err().to_string(),
        no
    );
    assert_eq!(
        to_hf(&config, "h.9.attn.q.weight", &[])
            .unwrap_err()
            .to_string(),
        no
    );
    assert_eq!(
        map_param_to_hf(&config, "h.9.attn.q.weight")
            .unwrap_err()
            .to_string(),
        no
    );
    assert_eq!(
        to_hf(&config, "h.0.attn.q.weight", &[0.0; 3])
            .unwrap_err()
            .to_string(),
        "parameter `h.0.attn.q.weight` has 3 values, its shape [32, 2, 2, 8] needs 1024"
    );
    let mut out = Vec::new();
    let error = export("out", &mut out, &config, |_| {
        Err::<Vec<f32>, _>("no such buffer")
    });
    let error = error.unwrap_err().to_string();
    assert_eq!(error, "parameter `embed.wte.weight`: no such buffer");
    let short = |_: &str| Ok::<_, std::fmt::Error>(vec![0.0; 3]);
    assert!(export("out", &mut out, &config, short).is_err());
    // Nothing more fits.
    let mut full = &mut [0; 100][..];
    let error = export("out", &mut full, &config, |p| weights.param(p));
    assert!(matches!(error, Err(import::ImportError::Io { path, .. }) if path == Path::new("out")));
}

/// Opens a file with this header (and its length before it) and `data` zero bytes behind.
fn open_header(header: &str, data: usize) -> String {
    let bytes = [
        &(header.len() as u64).to_le_bytes()[..],
        header.as_bytes(),
        &vec![0; data],
    ]
    .concat();
    open_bytes(&bytes)
}

fn open_bytes(bytes: &[u8]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    std::fs::write(&path, bytes).unwrap();
    let error = Weights::open(&path, &config("llama_tied"))
        .unwrap_err()
        .to_string();
    error.replace(&format!("{}: ", path.display()), "")
}

#[test]
fn hostile_headers_are_errors() {
    let two = |a: &str, b: &str| {
        format!(
            r#"{{"a":{{"dtype":"F32","shape":[1],"data_offsets":{a}}},"b":{{"dtype":"F32","shape":[1],"data_offsets":{b}}}}}"#
        )
    };
    for (found, expected) in [
        (
            open_bytes(b"1234567"),
            "7 bytes; a safetensors file starts with 8 bytes of header length",
        ),
        (
            open_bytes(&[255; 20]),
            "the header would be 18446744073709551615 bytes; at most 12 fit (truncated, or not a safetensors file)",
        ),
        (
            open_header("{", 0),
            "header, line 1 column 1: EOF while parsing an object",
        ),
        (
            open_header("[]", 0),
            "header, line 1 column 0: invalid type: sequence, expected an object of tensors",
        ),
        (
            open_header(&two("[0,4]", "[2,6]"), 6),
            "tensor `b` starts at byte 2 of the data, expected 4: overlaps the one before",
        ),
        (
            open_header(&two("[0,4]", "[8,12]"), 12),
            "tensor `b` starts at byte 8 of the data, expected 4: leaves a gap before it",
        ),
        (
            open_header(&two("[0,4]", "[4,8]"), 7),
            "tensor `b` ends at byte 8 of the data, which has 7 (truncated file?)",
        ),
        (
            open_header(&two("[0,4]", "[4,8]"), 9),
            "the data has 9 bytes, the tensors cover 8",
        ),
        (
            open_header(&two("[4,0]", "[4,8]"), 8),
            "tensor `a` has offsets 4 to 0",
        ),
        (
            open_header(&two("[0,4]", "[4,8]").replace('b', "a"), 8),
            "header, line 1 column 57: tensor `a` occurs twice",
        ),
        (
            open_header(
                r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}"#,
                4,
            ),
            "tensor `a`, F32 [4294967296, 4294967296], needs more than 2^64 bytes but has 4 (offsets 0 to 4)",
        ),
        (
            open_header(
                r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#,
                4,
            ),
            "tensor `a`, F32 [2], needs 8 bytes but has 4 (offsets 0 to 4)",
        ),
        (
            open_header(
                r#"{"a":{"dtype":"Q4","shape":[1],"data_offsets":[0,4]}}"#,
                4,
            ),
            "tensor `a` has unknown dtype `Q4`",
        ),
        (
            open_header(
                r#"{"a":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,18446744073709551615]}}"#,
                4,
            ),
            "tensor `a`, F32 [18446744073709551615], needs more than 2^64 bytes but has 18446744073709551615 (offsets 0 to 18446744073709551615)",
        ),
        (
            open_header(
                r#"{"a":{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,18446744073709551615]}}"#,
                4,
            ),
            "tensor `a` ends at byte 18446744073709551615 of the data, which has 4 (truncated file?)",
        ),
    ] {
        assert_eq!(found, expected);
    }
    let negative = open_header(
        r#"{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#,
        4,
    );
    assert!(
        negative.contains("invalid value: integer `-1`"),
        "{negative}"
    );
    let extra = open_header(
        r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"stride":[1]}}"#,
        4,
    );
    assert!(extra.contains("unknown field `stride`"), "{extra}");
}

#[test]
fn every_truncation_is_an_error() {
    let config = config("llama_linear_rope");
    let bytes = std::fs::read(reference("llama_linear_rope").join("model.safetensors")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    for len in (0..1300)
        .chain((1300..bytes.len()).step_by(997))
        .chain([bytes.len() - 1])
    {
        std::fs::write(&path, &bytes[..len]).unwrap();
        assert!(
            matches!(
                Weights::open(&path, &config),
                Err(import::ImportError::Format { .. })
            ),
            "{len} bytes"
        );
    }
    std::fs::write(&path, &bytes).unwrap();
    Weights::open(&path, &config).unwrap();
}

#[test]
fn indices_must_fit_their_shards() {
    let config = config("llama_tied");
    let sharded = reference("llama_tied").join("sharded");
    let index = std::fs::read_to_string(sharded.join("model.safetensors.index.json")).unwrap();
    let open = |change: &dyn Fn(String) -> String| {
        let folder = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(&sharded).unwrap() {
            let path = entry.unwrap().path();
            std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
        }
        std::fs::write(
            folder.path().join("model.safetensors.index.json"),
            change(index.clone()),
        )
        .unwrap();
        let error = Weights::open(folder.path(), &config)
            .err()
            .map(|e| e.to_string());
        error.map(|e| {
            e.split_once("index.json")
                .map_or(e.clone(), |(_, message)| message.to_string())
        })
    };
    assert_eq!(open(&|i| i), None);
    for (from, to, expected) in [
        (
            "model.norm.weight",
            "model.norm.bias",
            ": tensor `model.norm.weight` is in",
        ),
        (
            "\"model-00001-of",
            "\"../model-00001-of",
            ": shard \"../model-00001-of-00004.safetensors\" is not the name of",
        ),
        (
            "\"model-00001-of",
            "\"/etc/model-00001-of",
            ": shard \"/etc/model-00001-of-00004.safetensors\" is not the name of",
        ),
        (
            "00001-of-00004.safetensors",
            "00001-of-00004.bin",
            ": shard \"model-00001-of-00004.bin\" is not the name of",
        ),
        ("weight_map", "weights", ":"),
    ] {
        let error = open(&|i| i.replace(from, to)).unwrap_or_else(|| panic!("{to} was accepted"));
        assert!(error.starts_with(expected), "{error}");
    }
    let absent = open(&|i| {
        i.replacen(
            "\"model.embed_tokens.weight\"",
            "\"ghost\": \"model-00001-of-00004.safetensors\",\n\"model.embed_tokens.weight\"",
            1,
        )
    });
    assert_eq!(
        absent.unwrap(),
        ": tensor `ghost` is not in model-00001-of-00004.safetensors, where the index says it is"
    );
    let moved = open(&|i| i.replacen("00001-of", "00002-of", 1)).unwrap();
    assert!(moved.contains("the index says"), "{moved}");
    let missing_shard = open(&|i| i.replace("00001-of", "00009-of")).unwrap();
    assert!(
        missing_shard.contains("model-00009-of-00004.safetensors"),
        "{missing_shard}"
    );
}

#[test]
fn folders_and_files_of_other_kinds_are_errors() {
    let config = config("llama_tied");
    let folder = tempfile::tempdir().unwrap();
    let error = |path: &Path| Weights::open(path, &config).unwrap_err().to_string();
    assert!(
        error(folder.path())
            .ends_with("the folder has neither model.safetensors nor model.safetensors.index.json")
    );
    let pickled = folder.path().join("pytorch_model.bin");
    assert!(error(&pickled).ends_with("there is no such file or folder"));
    std::fs::write(&pickled, b"x").unwrap();
    assert!(error(&pickled).contains("neither a .safetensors file nor an index"));
    let absent = folder.path().join("absent.safetensors");
    assert!(error(&absent).starts_with(&format!("{}: ", absent.display())));
}
