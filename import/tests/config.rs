//! `config.json`: what is read, and the message for everything that is not.

#![allow(clippy::unwrap_used)]

use import::ModelConfig;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn reference(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/reference")
        .join(case)
}

fn gpt2() -> Value {
    json!({"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 16, "vocab_size": 96})
}

fn llama() -> Value {
    json!({"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 96, "max_position_embeddings": 16})
}

/// Parses `base` with the fields of `changes` set, or removed where they are the string "-".
fn parse(base: Value, changes: Value) -> Result<ModelConfig, String> {
    let mut object = base.as_object().unwrap().clone();
    for (name, value) in changes.as_object().unwrap() {
        match value.as_str() {
            Some("-") => drop(object.remove(name)),
            _ => drop(object.insert(name.clone(), value.clone())),
        }
    }
    // One line: the column is what the test of positions is for.
    ModelConfig::parse("c", Value::Object(object).to_string().as_bytes()).map_err(|e| {
        let text = e.to_string();
        match text.strip_prefix("c:1:") {
            Some(rest) => rest.split_once(": ").unwrap().1.to_string(),
            None => text.strip_prefix("c: ").unwrap().to_string(),
        }
    })
}

#[track_caller]
fn rejects(base: Value, changes: Value, expected: &str) {
    assert_eq!(
        parse(base, changes.clone()).expect_err(&format!("{changes} was accepted")),
        expected
    );
}

#[track_caller]
fn same(base: Value, changes: Value) {
    assert_eq!(parse(base.clone(), changes), parse(base, json!({})));
}

#[test]
fn both_spellings_are_the_same_model() {
    for case in ["llama_tied", "llama_untied_rope", "llama_linear_rope"] {
        let folder = reference(case);
        let v5 = ModelConfig::load(&folder.join("config.json")).unwrap();
        assert_eq!(
            v5,
            ModelConfig::load(&folder.join("config.v4.json")).unwrap(),
            "{case}"
        );
        assert_eq!(v5, ModelConfig::load(&folder).unwrap());
        assert_eq!(v5.model_type(), "llama");
    }
    let tied = ModelConfig::load(&reference("llama_tied")).unwrap();
    let untied = ModelConfig::load(&reference("llama_untied_rope")).unwrap();
    assert!(tied.tied() && !untied.tied());
    assert_ne!(
        ModelConfig::load(&reference("gpt2_small_tied")).unwrap(),
        ModelConfig::load(&reference("gpt2_untied_gelu")).unwrap()
    );
}

fn mixtral() -> Value {
    json!({"model_type": "mixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 16,
        "num_local_experts": 8, "num_experts_per_tok": 2})
}

fn qwen3_moe() -> Value {
    json!({"model_type": "qwen3_moe", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 16,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24})
}

#[test]
fn experts_are_read() {
    same(
        mixtral(),
        json!({"rope_theta": 1e6, "rms_norm_eps": 1e-5, "output_router_logits": false, "router_aux_loss_coef": 0.02,
            "router_jitter_noise": 0.0, "sliding_window": null, "num_experts": 8}),
    );
    same(
        qwen3_moe(),
        json!({"rope_theta": 1e4, "rms_norm_eps": 1e-6, "norm_topk_prob": false, "decoder_sparse_step": 1,
            "mlp_only_layers": [], "use_sliding_window": false, "sliding_window": 4096, "max_window_layers": 4,
            "attention_bias": false, "num_local_experts": 8}),
    );
    let n = |base, changes| parse(base, changes).unwrap().n_parameters();
    // 8 experts of three matrices and a router, in place of one MLP of three matrices.
    let dense = |inner: u64| 3 * 32 * inner;
    let all = n(mixtral(), json!({}));
    assert_eq!(
        n(mixtral(), json!({"num_local_experts": 9})) - all,
        2 * (dense(48) + 32)
    );
    // Layers 0 and 2 have MLPs, layer 3 for another reason.
    let step = json!({"decoder_sparse_step": 2, "mlp_only_layers": [3]});
    let sparse = 8 * dense(24) + 8 * 32;
    assert_eq!(
        n(qwen3_moe(), json!({})) - n(qwen3_moe(), step),
        3 * (sparse - dense(48))
    );
    assert_ne!(
        parse(qwen3_moe(), json!({"norm_topk_prob": true})),
        parse(qwen3_moe(), json!({}))
    );
    let capacity = |factor: f64| {
        let model = parse(mixtral(), json!({})).unwrap();
        model
            .with_expert_capacity(factor)
            .map_err(|e| e.to_string())
    };
    assert_ne!(capacity(2.0), capacity(1.0));
    assert!(capacity(0.0).unwrap_err().contains("above 0"));
    let dense = parse(llama(), json!({})).unwrap().with_expert_capacity(1.0);
    assert!(dense.unwrap_err().to_string().contains("no experts"));
}

fn relative(model_type: &str) -> Value {
    let mut relative = llama();
    relative["model_type"] = json!(model_type);
    relative["num_key_value_heads"] = json!(2);
    relative["head_dim"] = json!(8);
    relative
}

fn qwen2_moe() -> Value {
    let mut model = qwen3_moe();
    model["model_type"] = json!("qwen2_moe");
    model["shared_expert_intermediate_size"] = json!(40);
    model
}

/// Queries 4 x 8, keys and values 2 x 8 wide.
#[test]
fn relatives_of_llama_differ_in_biases_and_norms() {
    let n = |base, changes| parse(base, changes).unwrap().n_parameters();
    let layers = llama()["num_hidden_layers"].as_u64().unwrap();
    let plain = n(relative("llama"), json!({}));
    assert_eq!(n(relative("mistral"), json!({})), plain);
    let biases = 4 * 8 + 2 * 2 * 8;
    assert_eq!(n(relative("qwen2"), json!({})), plain + layers * biases);
    assert_eq!(n(relative("qwen3"), json!({})), plain + layers * 2 * 8);
    let qwen3 = n(relative("qwen3"), json!({"attention_bias": true}));
    assert_eq!(qwen3, plain + layers * (2 * 8 + biases + 32));
    // The shared expert: three matrices, and a number for each input of its gate.
    let shared = n(qwen2_moe(), json!({})) - n(qwen3_moe(), json!({}));
    assert_eq!(shared + 4 * 2 * 8, 4 * (biases + 3 * 32 * 40 + 32));
    let without = n(qwen2_moe(), json!({"qkv_bias": false}));
    assert_eq!(n(qwen2_moe(), json!({})) - without, 4 * biases);
    same(
        relative("qwen2"),
        json!({"use_sliding_window": false, "layer_types": ["full_attention", "full_attention"], "use_mrope": false}),
    );
}

fn opt() -> Value {
    json!({"model_type": "opt", "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "vocab_size": 96, "max_position_embeddings": 16})
}

fn gpt_neox() -> Value {
    json!({"model_type": "gpt_neox", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 96, "max_position_embeddings": 16, "rotary_pct": 0.25})
}

fn nemotron() -> Value {
    let mut model = relative("nemotron");
    model["partial_rotary_factor"] = json!(0.5);
    model
}

fn mamba2() -> Value {
    json!({"model_type": "mamba2", "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16,
        "state_size": 6, "n_groups": 2, "vocab_size": 96})
}

fn nemotron_h() -> Value {
    json!({"model_type": "nemotron_h", "hidden_size": 32, "hybrid_override_pattern": "M-*E",
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "mamba_num_heads": 6,
        "mamba_head_dim": 8, "ssm_state_size": 7, "n_groups": 2, "intermediate_size": 40, "n_routed_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 20,
        "max_position_embeddings": 16, "vocab_size": 96})
}

#[test]
fn state_spaces_are_read_as_they_are_published_and_as_they_are_saved() {
    let n = |model, changes| parse(model, changes).unwrap().n_parameters();
    // Into a block: gates, inputs, two directions of two groups, time steps; a convolution of four taps with
    // biases; three numbers for a head, gains, out of it, a norm.
    let block = |heads: u64, width: u64, state: u64| {
        let (inner, shared) = (heads * width, 2 * 2 * state);
        32 * (2 * inner + shared + heads)
            + 5 * (inner + shared)
            + 3 * heads
            + inner
            + 32 * inner
            + 32
    };
    assert_eq!(
        n(mamba2(), json!({})),
        2 * block(4, 16, 6) + (2 * 96 + 1) * 32
    );
    let attention = 32 * (2 * 40 + 2 * 20) + 32;
    // A router with a bias of the choice, two matrices for each expert and for that of all, a norm.
    let experts = 8 * (32 + 1) + (8 * 12 + 20) * 2 * 32 + 32;
    let all = block(6, 8, 7) + (2 * 32 * 40 + 32) + attention + experts + (2 * 96 + 1) * 32;
    assert_eq!(n(nemotron_h(), json!({})), all);
    same(
        nemotron_h(),
        json!({"hybrid_override_pattern": null, "layers_block_type": ["mamba", "mlp", "attention", "moe"]}),
    );
    same(
        nemotron_h(),
        json!({"num_hidden_layers": 4, "use_mamba_kernels": true, "rescale_prenorm_residual": true,
            "time_step_limit": [0.0, 1.0], "mtp_hybrid_override_pattern": "*E", "norm_eps": 1e-5,
            "num_nextn_predict_layers": 0, "rope_theta": 10000, "partial_rotary_factor": 1.0}),
    );
    for (model, changes, field) in [
        (mamba2(), json!({"n_groups": 3}), "num_heads"),
        (mamba2(), json!({"expand": 3}), "num_heads"),
        (
            mamba2(),
            json!({"time_step_limit": [0.0, 1.0]}),
            "time_step_limit",
        ),
        (mamba2(), json!({"hidden_act": "gelu"}), "hidden_act"),
        (
            nemotron_h(),
            json!({"hybrid_override_pattern": "MX"}),
            "hybrid_override_pattern",
        ),
        (
            nemotron_h(),
            json!({"num_hidden_layers": 5}),
            "hybrid_override_pattern",
        ),
        (
            nemotron_h(),
            json!({"num_nextn_predict_layers": 1}),
            "mtp_hybrid_override_pattern",
        ),
        (
            nemotron_h(),
            json!({"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*X"}),
            "mtp_hybrid_override_pattern",
        ),
        (
            nemotron_h(),
            json!({"num_nextn_predict_layers": 64, "mtp_hybrid_override_pattern": "*".repeat(157)}),
            "num_nextn_predict_layers",
        ),
        (nemotron_h(), json!({"n_group": 3}), "n_routed_experts"),
        (
            nemotron_h(),
            json!({"mlp_hidden_act": "silu"}),
            "mlp_hidden_act",
        ),
    ] {
        let said = parse(model, changes).unwrap_err().to_string();
        assert!(said.contains(&format!("`{field}`")), "{said}");
    }
}

fn gpt_oss() -> Value {
    json!({"model_type": "gpt_oss", "hidden_size": 32, "intermediate_size": 20, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96,
        "max_position_embeddings": 64, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 6,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}})
}

#[test]
fn gpt_oss_is_read_as_it_is_published_and_as_it_is_saved() {
    let n = |changes| parse(gpt_oss(), changes).unwrap().n_parameters();
    // Queries, keys, values and what comes out of them with biases, a sink for each head, two norms; a
    // router with biases; experts of three matrices with biases.
    let attention = (32 + 16 + 16) * (32 + 1) + 32 * (32 + 1) + 4 + 2 * 32;
    let experts = 8 * (32 + 1) + 8 * (2 * 20 * (32 + 1) + 32 * (20 + 1));
    assert_eq!(n(json!({})), 2 * 96 * 32 + 4 * (attention + experts) + 32);
    let bare = n(json!({"attention_bias": false}));
    assert_eq!(n(json!({})) - bare, 4 * (32 + 16 + 16 + 32));
    same(
        gpt_oss(),
        json!({"attention_bias": true, "experts_per_token": 2, "num_experts": 8, "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702, "initial_context_length": 16, "rope_theta": 150000, "hidden_act": "silu",
            "rms_norm_eps": 1e-5, "pad_token_id": 3, "router_aux_loss_coef": 0.9, "output_router_logits": false,
            "quantization_config": null, "tie_word_embeddings": false, "attention_dropout": 0.0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}),
    );
    let yarn = json!({"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "original_max_position_embeddings": 16, "truncate": true});
    same(
        gpt_oss(),
        json!({"rope_scaling": "-", "rope_parameters": yarn}),
    );
    let model = parse(gpt_oss(), json!({})).unwrap();
    assert_eq!(windows(&model, 16), [Some(6), None, Some(6), None]);
    let all = parse(gpt_oss(), json!({"sliding_window": null})).unwrap();
    assert_eq!(windows(&all, 16), [None; 4]);
    // Where nothing is said of the scaling, it is that of the published sizes, as in transformers.
    let published = json!({"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 4096, "truncate": false});
    let [silent, stated] = [json!("-"), published]
        .map(|scaling| parse(gpt_oss(), json!({"rope_scaling": scaling})).unwrap());
    assert_eq!(silent, stated);
    assert_ne!(
        silent,
        parse(gpt_oss(), json!({"rope_scaling": null})).unwrap()
    );
    // By the names that the file has.
    let error = parse(gpt_oss(), json!({"num_experts_per_tok": 9})).unwrap_err();
    let named =
        "fields `num_experts_per_tok` and `num_local_experts` contradict each other: 9 of 8";
    assert!(error.contains(named), "{error}");
    for (changes, field) in [
        (json!({"head_dim": "-"}), "head_dim"),
        (json!({"hidden_act": "gelu"}), "hidden_act"),
        (json!({"swiglu_limit": 0}), "swiglu_limit"),
        (json!({"experts_per_token": 4}), "experts_per_token"),
        (
            json!({"output_router_logits": true}),
            "output_router_logits",
        ),
        (json!({"layer_types": ["full_attention"]}), "layer_types"),
        (json!({"num_shared_experts": 1}), "num_shared_experts"),
        (
            json!({"quantization_config": {"quant_method": "mxfp4"}}),
            "quantization_config",
        ),
    ] {
        let error = parse(gpt_oss(), changes).unwrap_err();
        assert!(error.contains(field), "{field}: {error}");
    }
}

fn bloom() -> Value {
    json!({"model_type": "bloom", "hidden_size": 36, "n_layer": 2, "n_head": 6, "vocab_size": 96, "seq_length": 16})
}

/// The table with its norm, blocks with biases and an MLP of four times the width, the last norm.
#[test]
fn bloom_is_read_under_the_names_of_all_its_versions() {
    let n = |changes| parse(bloom(), changes).unwrap().n_parameters();
    let block = 12 * 36 * 36 + 13 * 36;
    assert_eq!(n(json!({})), 96 * 36 + 2 * 36 + 2 * block + 2 * 36);
    let untied = n(json!({"tie_word_embeddings": false}));
    assert_eq!(untied - n(json!({})), 96 * 36);
    // As the published files spell it, the fields that transformers leaves alone among them.
    same(
        bloom(),
        json!({"hidden_size": "-", "n_embed": 36, "n_layer": "-", "num_hidden_layers": 2, "n_head": "-",
            "num_attention_heads": 6, "n_inner": null, "layer_norm_epsilon": 1e-5, "initializer_range": 0.02,
            "attention_softmax_in_fp32": true, "bias_dropout_fusion": true, "masked_softmax_fusion": true,
            "skip_bias_add": true, "skip_bias_add_qkv": false, "slow_but_exact": false, "offset_alibi": 100,
            "pretraining_tp": 4, "pad_token_id": 3, "unk_token_id": 0, "hidden_dropout": 0.1, "attention_dropout": 0.0,
            "apply_residual_connection_post_layernorm": false}),
    );
    assert_eq!(
        parse(bloom(), json!({"n_inner": 144})),
        parse(bloom(), json!({}))
    );
    // Nothing but what it was trained on limits the sequence.
    let longest = |changes| parse(bloom(), changes).unwrap().max_sequence();
    assert_eq!(longest(json!({"seq_length": "-"})), 2048);
    assert_eq!(longest(json!({"seq_length": 4096})), 4096);
    let slopes = import::model_graph(
        &parse(bloom(), json!({})).unwrap(),
        &import::BuildOptions {
            sequence: 16,
            dropout: 0.0,
        },
    );
    let slopes = slopes.unwrap();
    let slopes = slopes.ops().iter().filter_map(|op| match op.kind {
        ir::OpKind::Attention { bounds, .. } => Some(bounds.alibi),
        _ => None,
    });
    assert_eq!(slopes.collect::<Vec<_>>(), [true, true]);
}

/// A block: projections with biases or without, two norms with both.
#[test]
fn decoders_without_a_gate_are_read() {
    let n = |base, changes| parse(base, changes).unwrap().n_parameters();
    let block = |inner: u64| 4 * (32 * 32 + 32) + 2 * 32 * inner + inner + 32 + 4 * 32;
    // The table of positions has two rows more.
    assert_eq!(
        n(opt(), json!({})),
        (96 + 16 + 2) * 32 + 2 * block(48) + 2 * 32
    );
    let untied = n(opt(), json!({"tie_word_embeddings": false}));
    assert_eq!(untied - n(opt(), json!({})), 96 * 32);
    let neox = 2 * 96 * 32 + 2 * block(48) + 2 * 32;
    assert_eq!(n(gpt_neox(), json!({})), neox);
    let bare = n(gpt_neox(), json!({"attention_bias": false}));
    assert_eq!(neox - bare, 2 * 4 * 32);
    let inner = llama()["intermediate_size"].as_u64().unwrap();
    let layers = llama()["num_hidden_layers"].as_u64().unwrap();
    let (hidden, vocab) = (
        llama()["hidden_size"].as_u64().unwrap(),
        llama()["vocab_size"].as_u64().unwrap(),
    );
    // Queries 4 x 8, keys and values 2 x 8 wide.
    let of_layer = hidden * (2 * 32 + 2 * 16) + 2 * hidden * inner + 4 * hidden;
    let all = 2 * vocab * hidden + layers * of_layer + 2 * hidden;
    assert_eq!(
        n(
            nemotron(),
            json!({"hidden_act": "relu2", "tie_word_embeddings": false})
        ),
        all
    );
    same(
        opt(),
        json!({"do_layer_norm_before": true, "_remove_final_layer_norm": false, "word_embed_proj_dim": 32,
            "enable_bias": true, "layer_norm_elementwise_affine": true, "layerdrop": 0.0, "dropout": 0.1,
            "attention_dropout": 0.0, "pad_token_id": 1, "activation_function": "relu", "init_std": 0.02}),
    );
    // transformers 5 has the rotation in one object.
    let of = |changes| parse(gpt_neox(), changes).unwrap();
    let rope =
        json!({"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25});
    assert_eq!(
        of(json!({"rotary_pct": "-", "rope_parameters": rope})),
        of(json!({"rotary_emb_base": 10000}))
    );
    assert_ne!(of(json!({"rotary_pct": 0.5})), of(json!({})));
    assert_ne!(of(json!({"use_parallel_residual": false})), of(json!({})));
}

#[test]
fn gemma_has_the_sizes_of_a_llama_and_a_tied_head() {
    let n = |base, changes| parse(base, changes).unwrap().n_parameters();
    let act = |name: &str| json!({"hidden_act": name, "tie_word_embeddings": true});
    let gemma = n(relative("gemma"), act("gelu_pytorch_tanh"));
    assert_eq!(gemma, n(relative("llama"), act("silu")));
    same_as(
        relative("gemma"),
        act("gelu_pytorch_tanh"),
        json!({"hidden_act": "gelu", "tie_word_embeddings": "-", "pad_token_id": 0, "hidden_activation": null,
            "use_bidirectional_attention": null}),
    );
    for (changes, field) in [
        (json!({"hidden_act": "silu"}), "hidden_act"),
        (
            json!({"hidden_act": "gelu", "use_bidirectional_attention": true}),
            "use_bidirectional_attention",
        ),
        (
            json!({"hidden_act": "gelu", "sliding_window": 8}),
            "sliding_window",
        ),
        (json!({"hidden_act": "gelu", "head_dim": "-"}), "head_dim"),
    ] {
        let error = parse(relative("gemma"), changes).unwrap_err();
        assert!(error.contains(field), "{field}: {error}");
    }
}

/// The published configuration of a model of ours, with fields that DeepSeek's own code has.
fn deepseek(version: u32) -> Value {
    let names = ["deepseek-v2", "deepseek-v3"];
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models");
    let file = folder.join(names[version as usize - 2]).join("config.json");
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

#[test]
fn deepseek_is_read_as_it_is_published() {
    let own = json!({"auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM"}, "ep_size": 1,
        "aux_loss_alpha": 0.001, "seq_aux": true, "pretraining_tp": 1, "use_cache": true});
    same(deepseek(2), own.clone());
    same(deepseek(3), own);
    // As transformers 5 says it.
    let mut rope = deepseek(3)["rope_scaling"].clone();
    rope["rope_theta"] = json!(10000.0);
    rope["rope_type"] = rope["type"].take();
    rope.as_object_mut().unwrap().remove("type");
    same(
        deepseek(3),
        json!({"rope_scaling": "-", "rope_theta": "-", "rope_parameters": rope, "head_dim": 64, "qk_head_dim": 192,
            "num_nextn_predict_layers": "-", "num_mtp_layers": 0, "moe_layer_freq": "-", "scoring_func": "-",
            "topk_method": "-"}),
    );
    // The layers of experts are all dense where there are as many of those as layers.
    let dense = parse(deepseek(3), json!({"first_k_dense_replace": 61})).unwrap();
    assert!(dense.clone().with_expert_capacity(1.0).is_err());
    let sum = |v: &Value, of: &[&str]| of.iter().map(|f| v[f].as_u64().unwrap()).product::<u64>();
    let model = deepseek(3);
    let mlp = 61 * 3 * sum(&model, &["hidden_size", "intermediate_size"]);
    assert!((mlp..mlp + 61 * 200_000_000 + 2_000_000_000).contains(&dense.n_parameters()));
}

/// A module of DeepSeek-V3 has a layer like the last, two norms more, a matrix of twice the width,
/// and a norm behind: 11.5 billion parameters, of which the published 14 count embedding and head
/// as well.
#[test]
fn modules_for_further_tokens_are_read() {
    let n = |changes| parse(deepseek(3), changes).unwrap();
    let alone = n(json!({}));
    let one = n(json!({"num_nextn_predict_layers": 1, "mtp_loss_scaling_factor": 0.3}));
    let layers = |count: u64| n(json!({"num_hidden_layers": count})).n_parameters();
    let layer = layers(62) - layers(61);
    let h = 7_168;
    assert_eq!(
        one.n_parameters() - alone.n_parameters(),
        layer + 2 * h * h + 3 * h
    );
    assert_eq!((one.further_tokens(), one.n_layers()), (1, 61));
    assert_eq!(one.without_further_tokens(), alone);
    let twice = n(
        json!({"num_mtp_layers": 1, "num_nextn_predict_layers": "-", "mtp_use_repeated_layer": true,
        "mtp_num_layers": 2}),
    );
    assert_eq!(twice.further_tokens(), 2);
    let nulls = json!({"mtp_use_repeated_layer": null, "mtp_num_layers": null, "mtp_loss_scaling_factor": null});
    assert_eq!(n(nulls), alone);
    // A module has experts where all layers are dense.
    let experts = |changes| n(changes).n_parameters();
    let dense = json!({"first_k_dense_replace": 61, "num_nextn_predict_layers": 1});
    let added = experts(dense) - experts(json!({"first_k_dense_replace": 61}));
    assert_eq!(added, layer + 2 * h * h + 3 * h);
    let nemotron =
        json!({"num_nextn_predict_layers": 2, "mtp_layers_block_type": ["full_attention", "moe"]});
    let nemotron = parse(nemotron_h(), nemotron).unwrap();
    assert_eq!(nemotron.further_tokens(), 2);
    let options = import::BuildOptions {
        sequence: 16,
        dropout: 0.0,
    };
    let graph = import::model_graph(&nemotron, &options).unwrap();
    let last = graph.layers.iter().rev().take(3).rev();
    assert_eq!(last.collect::<Vec<_>>(), ["h.mtp.0", "h.mtp.1", "head"]);
}

#[test]
fn deepseek_that_is_not_supported_is_refused() {
    for (version, changes, expected) in [
        (
            3,
            json!({"num_nextn_predict_layers": 1, "num_mtp_layers": 2}),
            "1 and 2; they mean the same",
        ),
        (
            3,
            json!({"num_nextn_predict_layers": 65}),
            "`num_nextn_predict_layers` is 65",
        ),
        (
            2,
            json!({"num_nextn_predict_layers": 1}),
            "DeepSeek-V2 has no modules for further tokens",
        ),
        (
            3,
            json!({"num_hidden_layers": 10_000, "num_nextn_predict_layers": 1}),
            "10000 and 1 layers; at most 10000 in all",
        ),
        (
            3,
            json!({"mtp_num_layers": 2}),
            "2 further tokens without a module that predicts them",
        ),
        (
            3,
            json!({"num_nextn_predict_layers": 1, "mtp_num_layers": 2}),
            "with `mtp_use_repeated_layer` true one module predicts all",
        ),
        (
            3,
            json!({"num_nextn_predict_layers": 2, "mtp_use_repeated_layer": true}),
            "one module is used for all further tokens, of 2",
        ),
        (
            3,
            json!({"num_nextn_predict_layers": 1, "mtp_loss_scaling_factor": 0}),
            "`mtp_loss_scaling_factor`",
        ),
        (
            3,
            json!({"quantization_config": {"quant_method": "fp8"}}),
            "plans and trains the model as if it had never",
        ),
        (
            3,
            json!({"scoring_func": "softmax"}),
            "`scoring_func` is \"softmax\"; accepted: \"sigmoid\"",
        ),
        (
            2,
            json!({"scoring_func": "sigmoid"}),
            "`scoring_func` is \"sigmoid\"; accepted: \"softmax\"",
        ),
        (
            2,
            json!({"topk_method": "noaux_tc"}),
            "accepted: \"greedy\" or \"group_limited_greedy\"",
        ),
        (
            2,
            json!({"norm_topk_prob": true}),
            "`norm_topk_prob` is true",
        ),
        (2, json!({"moe_layer_freq": 2}), "`moe_layer_freq` is 2"),
        (3, json!({"ep_size": 8}), "pin expert=N"),
        (3, json!({"n_group": 7}), "256 experts in 7 equal groups"),
        (
            3,
            json!({"topk_group": 9}),
            "8 experts from 9 of 8 groups of 32",
        ),
        (
            3,
            json!({"n_group": 256, "topk_group": 8}),
            "256 equal groups of at least 2",
        ),
        (
            2,
            json!({"n_group": 80, "topk_group": 2}),
            "6 experts from 2 of 80 groups of 2",
        ),
        (3, json!({"num_experts_per_tok": 300}), "300 of 256 experts"),
        (3, json!({"qk_rope_head_dim": 63}), "needs an even number"),
        (
            3,
            json!({"num_key_value_heads": 8}),
            "`num_key_value_heads` is 8; accepted: 128 or null",
        ),
        (3, json!({"q_lora_rank": "-"}), "`q_lora_rank` is missing"),
        (
            3,
            json!({"rope_scaling": {"type": "longrope"}}),
            "accepted: \"default\", \"linear\" or \"yarn\"",
        ),
        (
            3,
            json!({"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 16, "beta_fast": 1, "beta_slow": 2}}),
            "2 is not below 1",
        ),
    ] {
        let error = parse(deepseek(version), changes).unwrap_err();
        assert!(error.contains(expected), "{expected}: {error}");
    }
    let yarn = json!({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}});
    let error = parse(llama(), yarn).unwrap_err();
    assert!(
        error.contains("accepted: \"default\", \"linear\" or \"llama3\""),
        "{error}"
    );
}

#[test]
fn gemma_2_and_3_are_read_in_both_spellings() {
    let rope = json!({"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}});
    same_as(
        windowed("gemma3_text"),
        json!({"rope_theta": "-", "rope_parameters": rope}),
        json!({"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    );
    same(
        windowed("gemma2"),
        json!({"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "cache_implementation": "hybrid",
            "pad_token_id": 0, "tie_word_embeddings": true}),
    );
    let plain = json!({"attn_logit_softcapping": null, "final_logit_softcapping": null});
    assert_ne!(
        parse(windowed("gemma2"), plain),
        parse(windowed("gemma2"), json!({}))
    );
    for (name, changes, expected) in [
        (
            "gemma2",
            json!({"query_pre_attn_scalar": "-"}),
            "`query_pre_attn_scalar` is missing",
        ),
        (
            "gemma2",
            json!({"attn_logit_softcapping": -1}),
            "`attn_logit_softcapping` is -1",
        ),
        (
            "gemma3_text",
            json!({"attn_logit_softcapping": 50.0}),
            "`attn_logit_softcapping` is 50.0; accepted: null",
        ),
        (
            "gemma3_text",
            json!({"use_bidirectional_attention": true}),
            "`use_bidirectional_attention` is true",
        ),
        (
            "gemma3_text",
            json!({"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}),
            "plain frequencies",
        ),
        ("gemma3", json!({}), "the object in its `text_config`"),
    ] {
        let error = parse(windowed(name), changes).unwrap_err();
        assert!(error.contains(expected), "{expected}: {error}");
    }
}

#[test]
fn phi3_is_a_llama_whose_part_of_a_head_may_turn() {
    let n = |name, changes| parse(relative(name), changes).unwrap().n_parameters();
    let untied = || json!({"tie_word_embeddings": false});
    assert_eq!(n("phi3", untied()), n("llama", untied()));
    same(
        relative("phi3"),
        json!({"original_max_position_embeddings": 16, "resid_pdrop": 0.1, "embd_pdrop": 0.0, "pad_token_id": 32000,
            "attention_bias": false, "sliding_window": null}),
    );
    let inside = json!({"rope_theta": "-", "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}});
    same_as(
        relative("phi3"),
        json!({"rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
        inside,
    );
    for (changes, expected) in [
        (
            json!({"rope_scaling": {"type": "longrope"}}),
            "null plans the model as it is up to the positions",
        ),
        (
            json!({"partial_rotary_factor": 0.2}),
            "needs an even number",
        ),
        (
            json!({"attention_bias": true}),
            "projections have no biases",
        ),
    ] {
        let error = parse(relative("phi3"), changes).unwrap_err();
        assert!(error.contains(expected), "{expected}: {error}");
    }
}

/// Two ways to say the same model.
fn same_as(base: Value, one: Value, other: Value) {
    assert_eq!(parse(base.clone(), one), parse(base, other));
}

#[test]
fn decoders_that_are_not_supported_are_refused() {
    for (base, changes, field) in [
        (
            opt(),
            json!({"do_layer_norm_before": false}),
            "do_layer_norm_before",
        ),
        (
            opt(),
            json!({"word_embed_proj_dim": 16}),
            "word_embed_proj_dim",
        ),
        (opt(), json!({"enable_bias": false}), "enable_bias"),
        (opt(), json!({"layerdrop": 0.1}), "layerdrop"),
        (gpt_neox(), json!({"rotary_pct": 0.1}), "rotary_pct"),
        (gpt_neox(), json!({"rotary_pct": 1.5}), "rotary_pct"),
        (
            gpt_neox(),
            json!({"num_attention_heads": 5}),
            "num_attention_heads",
        ),
        (bloom(), json!({"n_inner": 36}), "n_inner"),
        (bloom(), json!({"n_embed": 32}), "n_embed"),
        (bloom(), json!({"n_head": 5}), "n_head"),
        (bloom(), json!({"alibi": false}), "alibi"),
        (
            bloom(),
            json!({"hidden_size": 1_048_576, "n_head": 1}),
            "hidden_size",
        ),
        (
            bloom(),
            json!({"apply_residual_connection_post_layernorm": true}),
            "apply_residual_connection_post_layernorm",
        ),
        (nemotron(), json!({"hidden_act": "silu"}), "hidden_act"),
        (
            nemotron(),
            json!({"num_key_value_heads": 3}),
            "num_key_value_heads",
        ),
        (nemotron(), json!({"pad_token_id": 0}), "pad_token_id"),
        (nemotron(), json!({"rms_norm_eps": 1e-6}), "rms_norm_eps"),
    ] {
        let error = parse(base, changes).unwrap_err();
        assert!(error.contains(field), "{field}: {error}");
    }
    let both = json!({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}});
    let error = parse(gpt_neox(), both).unwrap_err();
    assert!(error.contains("they give 0.25 and 0.5"), "{error}");
}

/// The patterns of blocks of a graph's attentions, layer by layer.
fn patterns(model: &ModelConfig, sequence: u64) -> Vec<Option<ir::op::Blocks>> {
    let options = import::BuildOptions {
        sequence,
        dropout: 0.0,
    };
    let graph = import::model_graph(model, &options).unwrap();
    let bounds = graph.ops().iter().filter_map(|op| op.kind.bounds());
    bounds.map(|b| b.blocks).collect()
}

#[test]
fn blocks_are_read_in_the_words_of_deepspeed() {
    let of = |pattern: Value| {
        let model = parse(llama(), json!({"sparse_attention": pattern})).unwrap();
        let all = patterns(&model, 16);
        assert!(all.len() == 2 && all[0] == all[1], "{all:?}");
        all[0].map(|b| (b.size, b.local, b.aligned, b.first, b.last))
    };
    let one_way = |mut pattern: Value| {
        pattern["attention"] = json!("unidirectional");
        of(pattern)
    };
    assert_eq!(
        one_way(json!({"mode": "fixed", "block": 2, "num_local_blocks": 4,
            "num_global_blocks": 2, "different_layout_per_head": true})),
        Some((2, 4, true, 0, 2))
    );
    assert_eq!(
        one_way(json!({"mode": "bigbird", "block": 2, "num_random_blocks": 0})),
        Some((2, 2, false, 1, 0))
    );
    assert_eq!(
        one_way(
            json!({"mode": "bigbird", "block": 1, "num_sliding_window_blocks": 6,
            "num_global_blocks": 0})
        ),
        Some((1, 4, false, 0, 0))
    );
    assert_eq!(
        one_way(json!({"mode": "bslongformer", "block": 2, "global_block_indices": [0, 1]})),
        Some((2, 2, false, 2, 0))
    );
    assert_eq!(
        one_way(json!({"mode": "bslongformer", "block": 2, "global_block_indices": []})),
        Some((2, 2, false, 0, 0))
    );
    assert_eq!(
        one_way(
            json!({"mode": "variable", "block": 2, "local_window_blocks": [3],
            "global_block_indices": [0, 1], "global_block_end_indices": [1, 3]})
        ),
        Some((2, 3, true, 3, 0))
    );
    // All of it is seen.
    assert_eq!(of(json!({"mode": "dense"})), None);
    assert_eq!(of(Value::Null), None);
    // Four blocks of 16 tokens, by default.
    assert_eq!(one_way(json!({"mode": "fixed"})), None);
    // Every family of decoders has it.
    for base in [gpt_neox(), bloom(), nemotron(), relative("mistral")] {
        let pattern = json!({"mode": "fixed", "block": 2, "attention": "unidirectional"});
        let model = parse(base, json!({"sparse_attention": pattern})).unwrap();
        assert!(patterns(&model, 16).iter().all(Option::is_some));
        assert_eq!(model.sparse().map(|b| b.local), Some(4));
    }
}

#[test]
fn patterns_that_are_not_there_are_refused() {
    for (changes, expected) in [
        (
            json!({"mode": "-"}),
            "field `sparse_attention.mode` is missing; expected \"bigbird\", \"bslongformer\", \"dense\", \
             \"fixed\" or \"variable\"",
        ),
        (
            json!({"mode": "strided"}),
            "field `sparse_attention.mode` is \"strided\"; accepted: \"bigbird\", \"bslongformer\", \"dense\", \
             \"fixed\" or \"variable\"",
        ),
        (
            json!({"attention": "bidirectional"}),
            "field `sparse_attention.attention` is \"bidirectional\"; accepted: \"unidirectional\", as queries \
             see no later keys here (DeepSpeed's default is \"bidirectional\")",
        ),
        (
            json!({"attention": "-"}),
            "field `sparse_attention.attention` is missing; expected \"unidirectional\", as queries \
             see no later keys here (DeepSpeed's default is \"bidirectional\")",
        ),
        (
            json!({"num_different_global_patterns": 4}),
            "field `sparse_attention.num_different_global_patterns` is 4; accepted: 1 (all heads have one pattern)",
        ),
        (
            json!({"num_local_blocks": 4, "num_global_blocks": 3}),
            "fields `sparse_attention.num_local_blocks` and `sparse_attention.num_global_blocks` contradict \
             each other: 4 is not a multiple of 3",
        ),
        (
            json!({"horizontal_global_attention": true}),
            "field `sparse_attention.horizontal_global_attention` is true; accepted: false (queries see no \
             later keys)",
        ),
        (
            json!({"block": 0}),
            "field `sparse_attention.block` is 0; expected a whole number from 1 to 134217728",
        ),
        (
            json!({"mode": "bigbird", "num_random_blocks": 3}),
            "field `sparse_attention.num_random_blocks` is 3; accepted: 0 (random blocks are drawn when a run \
             of DeepSpeed begins, and no file says which)",
        ),
        (
            json!({"mode": "bslongformer", "global_block_indices": [0, 2]}),
            "field `sparse_attention.global_block_indices` has other blocks than the first ones; accepted: a \
             list such as [0, 1], in order and without gaps, as blocks that all see begin the sequence",
        ),
        (
            json!({"mode": "bslongformer", "global_block_end_indices": [1, 2]}),
            "fields `sparse_attention.global_block_indices` and `sparse_attention.global_block_end_indices` \
             contradict each other: 1 and 2 numbers",
        ),
        (
            json!({"mode": "variable", "local_window_blocks": [2, 4]}),
            "field `sparse_attention.local_window_blocks` has 2 numbers; accepted: one, as all windows of \
             blocks are as long",
        ),
    ] {
        let mut pattern = json!({"mode": "fixed", "block": 2, "attention": "unidirectional"});
        for (name, value) in changes.as_object().unwrap() {
            match value.as_str() {
                Some("-") => drop(pattern.as_object_mut().unwrap().remove(name)),
                _ => pattern[name] = value.clone(),
            }
        }
        rejects(llama(), json!({"sparse_attention": pattern}), expected);
    }
    let unknown = json!({"mode": "bigbird", "attention": "unidirectional", "num_local_blocks": 2});
    let error = parse(llama(), json!({"sparse_attention": unknown})).unwrap_err();
    assert!(
        error.contains("sparse_attention.num_local_blocks"),
        "{error}"
    );
    for name in ["big_bird", "longformer"] {
        let error = parse(llama(), json!({"model_type": name})).unwrap_err();
        assert!(error.contains("whose tokens see later ones too"), "{error}");
        assert!(error.contains("`sparse_attention`"), "{error}");
    }
    // A state space has no attention.
    let mamba = ModelConfig::load(&reference("mamba2")).unwrap();
    assert_eq!(mamba.sparse(), None);
}

/// The windows of a graph's attentions, layer by layer.
fn windows(model: &ModelConfig, sequence: u64) -> Vec<Option<u64>> {
    let options = import::BuildOptions {
        sequence,
        dropout: 0.0,
    };
    let graph = import::model_graph(model, &options).unwrap();
    let windows = graph.ops().iter().filter_map(|op| match op.kind {
        ir::OpKind::Attention { bounds, .. } => Some(bounds.window),
        _ => None,
    });
    windows.collect()
}

/// Gemma 2 and 3, with five layers.
fn windowed(name: &str) -> Value {
    let mut model = relative(name);
    let own = json!({"num_hidden_layers": 5, "sliding_window": 6, "query_pre_attn_scalar": 24,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"});
    for (field, value) in own.as_object().unwrap() {
        model[field] = value.clone();
    }
    model
}

#[test]
fn windows_are_those_of_the_layers() {
    let mistral = |changes| parse(relative("mistral"), changes).unwrap();
    let positions = llama()["max_position_embeddings"].as_u64().unwrap();
    assert_eq!(
        mistral(json!({"sliding_window": 8})).max_sequence(),
        positions
    );
    let model = mistral(json!({"sliding_window": 8}));
    assert_eq!(windows(&model, 9), [Some(8), Some(8)]);
    // Where it looks back over the whole sequence, it is none.
    assert_eq!(windows(&model, 8), [None, None]);
    assert_eq!(
        windows(&mistral(json!({"sliding_window": null})), 9),
        [None, None]
    );
    let of = |name, changes| windows(&parse(windowed(name), changes).unwrap(), 9);
    let (w, all) = (Some(6), None);
    assert_eq!(of("gemma2", json!({})), [w, all, w, all, w]);
    assert_eq!(of("gemma3_text", json!({})), [w; 5]);
    assert_eq!(
        of("gemma3_text", json!({"sliding_window_pattern": 3})),
        [w, w, all, w, w]
    );
    let types = [
        "full_attention",
        "sliding_attention",
        "full_attention",
        "full_attention",
        "full_attention",
    ];
    assert_eq!(
        of("gemma2", json!({"layer_types": types})),
        [all, w, all, all, all]
    );
    rejects(
        windowed("gemma2"),
        json!({"layer_types": types[..4]}),
        "fields `layer_types` and `num_hidden_layers` contradict each other: 4 types of 5 layers",
    );
    rejects(
        windowed("gemma2"),
        json!({"layer_types": ["chunked_attention"]}),
        "field `layer_types` is an array; expected a list of \"sliding_attention\" and \"full_attention\"",
    );
    rejects(
        relative("qwen2"),
        json!({"layer_types": ["full_attention", "sliding_attention"]}),
        "field `layer_types` has \"sliding_attention\"; accepted: \"full_attention\" (attention is full and causal)",
    );
}

#[test]
fn experts_that_are_not_supported_are_refused() {
    rejects(
        mixtral(),
        json!({"output_router_logits": true}),
        "field `output_router_logits` is true; accepted: false (with true the routers' balancing loss is added, which is not supported)",
    );
    rejects(
        mixtral(),
        json!({"router_jitter_noise": 0.1}),
        "field `router_jitter_noise` is 0.1; accepted: 0 or 0.0 or null (noise on the routers' inputs is not supported)",
    );
    rejects(
        qwen3_moe(),
        json!({"use_sliding_window": true}),
        "field `use_sliding_window` is true; accepted: false (attention is full and causal)",
    );
    rejects(
        qwen3_moe(),
        json!({"mlp_only_layers": [4]}),
        "field `mlp_only_layers` is an array; expected a list of whole numbers from 0 to 3",
    );
    for (base, name) in [
        (mixtral(), "num_local_experts"),
        (mixtral(), "num_experts_per_tok"),
        (mixtral(), "num_key_value_heads"),
        (qwen3_moe(), "num_experts"),
        (qwen3_moe(), "moe_intermediate_size"),
        (qwen2_moe(), "shared_expert_intermediate_size"),
        (relative("qwen3"), "head_dim"),
    ] {
        let error = parse(base, json!({name: "-"})).unwrap_err();
        assert!(
            error.starts_with(&format!(
                "field `{name}` is missing; expected a whole number"
            )),
            "{error}"
        );
    }
    let error = parse(mixtral(), json!({"num_experts_per_tok": 9})).unwrap_err();
    assert!(error.contains("9 of 8 experts"), "{error}");
    let error = parse(mixtral(), json!({"attention_bias": false})).unwrap_err();
    assert!(error.contains("attention_bias"), "{error}");
}

#[test]
fn absent_fields_have_the_defaults_of_transformers() {
    same(
        gpt2(),
        json!({"n_ctx": 16, "n_inner": 128, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
            "initializer_range": 0.02, "tie_word_embeddings": true, "scale_attn_weights": true,
            "scale_attn_by_inverse_layer_idx": false, "reorder_and_upcast_attn": false, "add_cross_attention": false}),
    );
    same(
        llama(),
        json!({"num_key_value_heads": 4, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-6, "initializer_range": 0.02,
            "tie_word_embeddings": false, "rope_theta": 10000, "rope_scaling": null, "attention_bias": false,
            "mlp_bias": false, "pretraining_tp": 1, "attention_dropout": 0.0, "pad_token_id": null}),
    );
    same(
        llama(),
        json!({"num_key_value_heads": null, "head_dim": null}),
    );
    same(llama(), json!({"rope_parameters": {"rope_theta": 1e4}}));
    same(
        llama(),
        json!({"rope_theta": 1e4, "rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "default"}}),
    );
}

#[test]
fn fields_change_the_model() {
    for changes in [
        json!({"n_layer": 3}),
        json!({"n_head": 8}),
        json!({"n_inner": 64}),
        json!({"activation_function": "gelu"}),
        json!({"activation_function": "relu"}),
        json!({"activation_function": "silu"}),
        json!({"layer_norm_epsilon": 1e-6}),
        json!({"tie_word_embeddings": false}),
        json!({"scale_attn_weights": false}),
        json!({"initializer_range": 0.01}),
    ] {
        assert_ne!(
            parse(gpt2(), changes.clone()).unwrap(),
            parse(gpt2(), json!({})).unwrap(),
            "{changes}"
        );
    }
    for changes in [
        json!({"num_key_value_heads": 2}),
        json!({"head_dim": 16}),
        json!({"rope_theta": 5e5}),
        json!({"rope_scaling": {"rope_type": "linear", "factor": 2}}),
        json!({"attention_bias": true}),
        json!({"mlp_bias": true}),
        json!({"hidden_act": "gelu_pytorch_tanh"}),
        json!({"rms_norm_eps": 1e-5}),
    ] {
        assert_ne!(
            parse(llama(), changes.clone()).unwrap(),
            parse(llama(), json!({})).unwrap(),
            "{changes}"
        );
    }
}

#[test]
fn biases_add_parameters() {
    let n = |changes| parse(llama(), changes).unwrap().n_parameters();
    let plain = n(json!({}));
    // Two layers; q, k, v, o are 32 wide, gate and up 48, down 32.
    assert_eq!(n(json!({"attention_bias": true})), plain + 2 * 4 * 32);
    assert_eq!(n(json!({"mlp_bias": true})), plain + 2 * (48 + 48 + 32));
}

#[test]
fn harmless_fields_are_ignored() {
    for name in import::config::HARMLESS_FIELDS {
        same(gpt2(), json!({*name: {"anything": [1]}}));
        same(llama(), json!({*name: 7}));
    }
    same(
        gpt2(),
        json!({"pad_token_id": 50256, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0}),
    );
    same(
        gpt2(),
        json!({"is_encoder_decoder": false, "is_decoder": true, "pruned_heads": {}, "chunk_size_feed_forward": 0}),
    );
}

#[test]
fn wrong_values_name_the_field() {
    let layers = "expected a whole number from 1 to 10000";
    for (value, shown) in [
        (json!(0), "0"),
        (json!(-1), "-1"),
        (json!(2.0), "2.0"),
        (json!("2"), "\"2\""),
        (json!(true), "true"),
        (json!(null), "null"),
        (json!([2]), "an array"),
        (json!({}), "an object"),
        (json!(10_001), "10001"),
        (json!(u64::MAX), "18446744073709551615"),
        (json!(1e300), "1e+300"),
    ] {
        rejects(
            gpt2(),
            json!({"n_layer": value}),
            &format!("field `n_layer` is {shown}; {layers}"),
        );
        rejects(
            llama(),
            json!({"num_hidden_layers": value}),
            &format!("field `num_hidden_layers` is {shown}; {layers}"),
        );
    }
    for value in [json!(0), json!(-1e-5), json!(1), json!("1e-5"), json!(null)] {
        let message = format!("is {value}; expected a number between 0 and 1");
        rejects(
            gpt2(),
            json!({"layer_norm_epsilon": value}),
            &format!("field `layer_norm_epsilon` {message}"),
        );
        rejects(
            llama(),
            json!({"rms_norm_eps": value}),
            &format!("field `rms_norm_eps` {message}"),
        );
    }
    rejects(
        gpt2(),
        json!({"resid_pdrop": 1}),
        "field `resid_pdrop` is 1; expected a probability in [0, 1)",
    );
    rejects(
        llama(),
        json!({"attention_dropout": -0.5}),
        "field `attention_dropout` is -0.5; expected a probability in [0, 1)",
    );
    rejects(
        gpt2(),
        json!({"tie_word_embeddings": 1}),
        "field `tie_word_embeddings` is 1; expected true or false",
    );
    rejects(
        gpt2(),
        json!({"activation_function": 1}),
        "field `activation_function` is 1; expected a string",
    );
    rejects(
        gpt2(),
        json!({"activation_function": "quick_gelu"}),
        "field `activation_function` is \"quick_gelu\"; accepted: gelu_new, gelu_fast, gelu_pytorch_tanh (tanh approximation), gelu (error function), relu, silu, swish",
    );
    rejects(
        gpt2(),
        json!({"initializer_range": -1}),
        "field `initializer_range` is -1; expected a number from 0 to 100",
    );
    rejects(
        llama(),
        json!({"rope_theta": 0}),
        "field `rope_theta` is 0; expected a number above 1, up to 1e15",
    );
    rejects(
        llama(),
        json!({"head_dim": 7}),
        "field `head_dim` is 7; the rotary embedding needs an even number",
    );
    rejects(
        llama(),
        json!({"rope_scaling": 2.0}),
        "field `rope_scaling` is 2.0; expected an object or null",
    );
    rejects(
        gpt2(),
        json!({"model_type": "gptj"}),
        "field `model_type` is \"gptj\"; accepted: \"bloom\", \"deepseek_v2\", \"deepseek_v3\", \"gemma\", \"gemma2\", \"gemma3_text\", \"gpt2\", \"gpt_neox\", \"gpt_oss\", \"llama\", \"mamba2\", \"mistral\", \"mixtral\", \"nemotron\", \"nemotron_h\", \"opt\", \"phi3\", \"qwen2\", \"qwen2_moe\", \"qwen3\", \"qwen3_moe\" or \"wide_resnet\"; \
         the graph of another model can be written in the text form of docs/ir.md",
    );
}

fn wide_resnet() -> Value {
    json!({"model_type": "wide_resnet", "image_size": 32, "base_channels": 16, "width_factor": 2,
        "depths": [1, 1], "num_classes": 10, "norm_groups": 4})
}

#[test]
fn wide_resnets_are_checked() {
    assert!(parse(wide_resnet(), json!({})).is_ok());
    for (change, problem) in [
        (
            json!({"depths": []}),
            "field `depths` has 0 blocks in 0 stages; accepted: 1 to 8 stages of 1 to 10000 blocks together",
        ),
        (
            json!({"depths": [6000, 6000]}),
            "field `depths` has 12000 blocks in 2 stages; accepted: 1 to 8 stages of 1 to 10000 blocks together",
        ),
        (
            json!({"depths": "-"}),
            "field `depths` is missing; expected the list of the stages' numbers of blocks",
        ),
        (
            json!({"depths": 3}),
            "field `depths` is 3; expected a list of whole numbers from 1 to 10000",
        ),
        (
            json!({"norm_groups": 5}),
            "fields `base_channels` and `norm_groups` contradict each other: 16 is not a multiple of 5",
        ),
        (
            json!({"width_factor": 65536}),
            "fields `base_channels` and `width_factor` contradict each other: the last stage has 2097152 channels; accepted: at most 1048576",
        ),
        (
            json!({"hidden_act": "gelu"}),
            "field `hidden_act` is \"gelu\"; accepted: \"relu\" (blocks have ReLUs)",
        ),
        (
            json!({"image_size": 0}),
            "field `image_size` is 0; expected a whole number from 1 to 65536",
        ),
    ] {
        rejects(wide_resnet(), change, problem);
    }
}

#[test]
fn missing_fields_are_named() {
    for name in ["n_layer", "n_head", "n_embd", "n_positions", "vocab_size"] {
        let error = parse(gpt2(), json!({name: "-"})).unwrap_err();
        assert!(
            error.starts_with(&format!(
                "field `{name}` is missing; expected a whole number from 1 to "
            )),
            "{error}"
        );
    }
    for name in [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
    ] {
        let error = parse(llama(), json!({name: "-"})).unwrap_err();
        assert!(
            error.starts_with(&format!(
                "field `{name}` is missing; expected a whole number from 1 to "
            )),
            "{error}"
        );
    }
    rejects(
        gpt2(),
        json!({"model_type": "-"}),
        "field `model_type` is missing; expected \"bloom\", \"deepseek_v2\", \"deepseek_v3\", \"gemma\", \"gemma2\", \"gemma3_text\", \"gpt2\", \"gpt_neox\", \"gpt_oss\", \"llama\", \"mamba2\", \"mistral\", \"mixtral\", \"nemotron\", \"nemotron_h\", \"opt\", \"phi3\", \"qwen2\", \"qwen2_moe\", \"qwen3\", \"qwen3_moe\" or \"wide_resnet\"",
    );
}

#[test]
fn unsupported_features_name_the_field() {
    for (name, value, accepted) in [
        (
            "scale_attn_by_inverse_layer_idx",
            json!(true),
            "false (scores are scaled by the head dim only, in the compute dtype)",
        ),
        (
            "reorder_and_upcast_attn",
            json!(true),
            "false (scores are scaled by the head dim only, in the compute dtype)",
        ),
        (
            "add_cross_attention",
            json!(true),
            "false (the model is one causal decoder)",
        ),
        (
            "is_encoder_decoder",
            json!(true),
            "false (the model is one causal decoder)",
        ),
        (
            "chunk_size_feed_forward",
            json!(8),
            "0 (chunked feed-forward is not supported)",
        ),
        (
            "sliding_window",
            json!(4096),
            "null (attention is full and causal)",
        ),
    ] {
        rejects(
            gpt2(),
            json!({name: value}),
            &format!("field `{name}` is {value}; accepted: {accepted}"),
        );
    }
    rejects(
        gpt2(),
        json!({"quantization_config": {"bits": 4}}),
        "field `quantization_config` is an object; accepted: null (quantized weights are not trained: remove the field, which plans \
         and trains the model as if it had never been quantized; for --weights, save them in bf16 with transformers \
         first (from_pretrained with dequantize=True, then save_pretrained))",
    );
    rejects(
        llama(),
        json!({"pretraining_tp": 2}),
        "field `pretraining_tp` is 2; accepted: 1 (matmuls in slices are not supported)",
    );
    assert!(
        parse(llama(), json!({"pad_token_id": 0}))
            .unwrap_err()
            .starts_with("field `pad_token_id` is 0; accepted: null (")
    );
}

#[test]
fn unknown_fields_are_errors() {
    for (base, name) in [
        (gpt2(), "attn_temperature"),
        (llama(), "auto_map"),
        (gpt2(), "rope_theta"),
        (llama(), "n_embd"),
        (llama(), ""),
    ] {
        let error = parse(base, json!({name: null})).unwrap_err();
        assert!(
            error.starts_with(&format!(
                "unknown field `{name}`, which may change the model; accepted: "
            )),
            "{error}"
        );
    }
    let error = parse(
        llama(),
        json!({"rope_scaling": {"rope_type": "linear", "factor": 2, "beta_fast": 32}}),
    )
    .unwrap_err();
    assert!(
        error.starts_with("unknown field `rope_scaling.beta_fast`"),
        "{error}"
    );
    assert!(
        error.ends_with("accepted: factor, partial_rotary_factor, rope_theta, rope_type, type"),
        "{error}"
    );
}

#[test]
fn contradictions_name_both_fields() {
    let contradiction = |a: &str, b: &str, why: &str| {
        format!("fields `{a}` and `{b}` contradict each other: {why}")
    };
    rejects(
        gpt2(),
        json!({"n_ctx": 8}),
        &contradiction(
            "n_ctx",
            "n_positions",
            "8 and 16; accepted: the same number",
        ),
    );
    rejects(
        gpt2(),
        json!({"n_head": 5}),
        &contradiction("n_embd", "n_head", "32 is not a multiple of 5"),
    );
    rejects(
        gpt2(),
        json!({"hidden_size": 64}),
        &contradiction("n_embd", "hidden_size", "32 and 64; they mean the same"),
    );
    same(gpt2(), json!({"n_embd": "-", "hidden_size": 32}));
    rejects(
        llama(),
        json!({"num_attention_heads": 5}),
        &contradiction(
            "hidden_size",
            "num_attention_heads",
            "32 is not a multiple of 5, and there is no `head_dim`",
        ),
    );
    rejects(
        llama(),
        json!({"num_attention_heads": 32}),
        &contradiction(
            "hidden_size",
            "num_attention_heads",
            "the head dim 32 / 32 is odd; the rotary embedding needs an even number",
        ),
    );
    parse(llama(), json!({"num_attention_heads": 5, "head_dim": 6})).unwrap();
    for kv in [3, 8] {
        let why = format!("4 is not a multiple of {kv}");
        rejects(
            llama(),
            json!({"num_key_value_heads": kv}),
            &contradiction("num_attention_heads", "num_key_value_heads", &why),
        );
    }
    rejects(
        llama(),
        json!({"num_attention_heads": 65536, "head_dim": 1024}),
        &contradiction(
            "num_attention_heads",
            "head_dim",
            "all heads together are 67108864 wide; at most 1048576",
        ),
    );
}

#[test]
fn rotary_scalings_are_checked() {
    let reject = |scaling: Value, expected: &str| {
        rejects(llama(), json!({"rope_scaling": scaling}), expected)
    };
    for kind in ["yarn", "dynamic", "longrope", "su"] {
        let way_out = match kind {
            "yarn" => "",
            _ => {
                "; frequencies that depend on the length of a sequence are not there, and null plans the model \
                 as it is up to the positions of its pre-training"
            }
        };
        reject(
            json!({"rope_type": kind, "factor": 2}),
            &format!(
                "field `rope_scaling.rope_type` is {kind:?}; accepted: \"default\", \"linear\" or \"llama3\"{way_out}"
            ),
        );
    }
    reject(
        json!({"type": "yarn"}),
        "field `rope_scaling.type` is \"yarn\"; accepted: \"default\", \"linear\" or \"llama3\"",
    );
    reject(
        json!({"factor": 2}),
        "field `rope_scaling.rope_type` is missing; expected \"default\", \"linear\" or \"llama3\"",
    );
    reject(
        json!({"rope_type": "linear"}),
        "field `rope_scaling.factor` is missing; expected a positive number",
    );
    reject(
        json!({"rope_type": "linear", "factor": 0.5}),
        "field `rope_scaling.factor` is 0.5; expected a positive number from 1 to 1e6",
    );
    reject(
        json!({"rope_type": "linear", "type": "dynamic", "factor": 2}),
        "fields `rope_scaling.rope_type` and `rope_scaling.type` contradict each other: \"linear\" and \"dynamic\"",
    );
    let llama3 = |low: f64, high: f64| json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": 8});
    parse(llama(), json!({"rope_scaling": llama3(1.0, 4.0)})).unwrap();
    reject(
        llama3(4.0, 4.0),
        "fields `rope_scaling.low_freq_factor` and `rope_scaling.high_freq_factor` contradict each other: 4 is not below 4",
    );
    rejects(
        llama(),
        json!({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
        "fields `rope_theta` and `rope_parameters` contradict each other: they give rope_theta 10000 and 500000",
    );
    rejects(
        llama(),
        json!({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "default"}}),
        "fields `rope_parameters` and `rope_scaling` contradict each other: they give different rotary scalings",
    );
}

#[test]
fn errors_have_positions() {
    let error = |text: &str| {
        ModelConfig::parse("config.json", text.as_bytes())
            .unwrap_err()
            .to_string()
    };
    assert_eq!(error(""), "config.json:1:0: EOF while parsing a value");
    assert_eq!(
        error("[]"),
        "config.json:1:1: is an array, expected an object"
    );
    assert_eq!(
        error("{\n  \"n_layer\": NaN\n}"),
        "config.json:2:14: expected value"
    );
    assert_eq!(
        error("{\n  \"n_layer\": 1e400\n}"),
        "config.json:2:18: number out of range"
    );
    assert_eq!(
        error("{\n  \"n_layer\": 2,\n  \"n_layer\": 3\n}"),
        "config.json:3:3: field `n_layer` occurs twice"
    );
    assert_eq!(
        error(
            "{\"model_type\": \"llama\", \"rope_scaling\": {\n \"factor\": 1, \"f\\u0061ctor\": 2}}"
        ),
        "config.json:2:15: field `rope_scaling.factor` occurs twice"
    );
    let nested = "{\n \"task_specific_params\": {\"n_head\": \"{\\\"n_head\\\": [\"},\n \"model_type\": \"gpt2\",\n \"n_layer\": 1,\n  \"n_head\": 0}";
    assert_eq!(
        error(nested),
        "config.json:5:3: field `n_head` is 0; expected a whole number from 1 to 65536"
    );
    let bytes = b"{\n\"a\": \"\xff\"}";
    assert_eq!(
        ModelConfig::parse("c", bytes).unwrap_err().to_string(),
        "c:2:7: is not UTF-8"
    );
    let long = vec![b' '; 2 << 20];
    assert_eq!(
        ModelConfig::parse("c", &long).unwrap_err().to_string(),
        "c:1:1: 2097152 bytes; a config has at most 1048576"
    );
    let deep = "[".repeat(100_000);
    assert!(error(&format!("{{\"a\": {deep}")).ends_with("recursion limit exceeded"));
}

#[test]
fn unreadable_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = ModelConfig::load(folder.path()).unwrap_err().to_string();
    assert!(
        error.starts_with(&folder.path().join("config.json").display().to_string()),
        "{error}"
    );
}
