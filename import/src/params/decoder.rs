//! The parameters of decoders with layer norms and an MLP without a gate.

use super::{Param, Table};
use crate::config::{DecoderConfig, Plain};
use ir::op::Init;

/// Names in files: of a block's parts, of what stands around the blocks.
struct Names {
    prefix: &'static str,
    layers: &'static str,
    embedding: &'static str,
    norm_1: &'static str,
    norm_2: &'static str,
    attention: &'static str,
    out: &'static str,
    up: &'static str,
    down: &'static str,
    last_norm: &'static str,
}

fn names(family: Plain) -> Names {
    match family {
        Plain::Opt => Names {
            prefix: "model.decoder.",
            layers: "layers",
            embedding: "embed_tokens",
            norm_1: "self_attn_layer_norm",
            norm_2: "final_layer_norm",
            attention: "self_attn",
            out: "out_proj",
            up: "fc1",
            down: "fc2",
            last_norm: "final_layer_norm",
        },
        Plain::GptNeox => Names {
            prefix: "gpt_neox.",
            layers: "layers",
            embedding: "embed_in",
            norm_1: "input_layernorm",
            norm_2: "post_attention_layernorm",
            attention: "attention",
            out: "dense",
            up: "mlp.dense_h_to_4h",
            down: "mlp.dense_4h_to_h",
            last_norm: "final_layer_norm",
        },
        Plain::Nemotron => Names {
            prefix: "model.",
            layers: "layers",
            embedding: "embed_tokens",
            norm_1: "input_layernorm",
            norm_2: "post_attention_layernorm",
            attention: "self_attn",
            out: "o_proj",
            up: "mlp.up_proj",
            down: "mlp.down_proj",
            last_norm: "norm",
        },
        Plain::Bloom => Names {
            prefix: "transformer.",
            layers: "h",
            embedding: "word_embeddings",
            norm_1: "input_layernorm",
            norm_2: "post_attention_layernorm",
            attention: "self_attention",
            out: "dense",
            up: "mlp.dense_h_to_4h",
            down: "mlp.dense_4h_to_h",
            last_norm: "ln_f",
        },
    }
}

pub(super) fn decoder(c: &DecoderConfig) -> Vec<Param> {
    let (h, kv, d) = (c.hidden, c.kv_heads, c.head_dim);
    let normal = Init::Normal { std: c.init_std };
    let n = names(c.family);
    let query: &[u64] = match c.heads / kv {
        1 => &[kv, d],
        groups => &[kv, groups, d],
    };
    let mut t = Table {
        prefix: n.prefix,
        params: Vec::new(),
    };
    let table = [c.vocab, h];
    let name = format!("{}.weight", n.embedding);
    t.add("embed.wte.weight", &table, &name, &table, normal);
    if c.learns_positions() {
        let table = [c.positions + c.family.position_offset(), h];
        let name = "embed_positions.weight";
        t.add("embed.wpe.weight", &table, name, &table, normal);
    }
    if c.family.normalises_embeddings() {
        let theirs = format!("{}_layernorm", n.embedding);
        t.layer_norm(("embed.norm".into(), theirs), h);
    }
    for i in 0..c.layers {
        let at = |ours: &str, theirs: &str| {
            let theirs = format!("{}.{i}.{theirs}", n.layers);
            (format!("h.{i}.{ours}"), theirs)
        };
        let of_attention =
            |ours: &str, theirs: &str| at(ours, &format!("{}.{theirs}", n.attention));
        t.layer_norm(at("norm_1", n.norm_1), h);
        match c.family.is_fused() {
            true => t.linear(
                of_attention("attn.qkv", "query_key_value"),
                &[h],
                &[kv, 3, d],
                c.attention_bias,
                normal,
            ),
            false => {
                for (ours, theirs, outs) in [
                    ("attn.q", "q_proj", query),
                    ("attn.k", "k_proj", &[kv, d][..]),
                    ("attn.v", "v_proj", &[kv, d][..]),
                ] {
                    let names = of_attention(ours, theirs);
                    t.linear(names, &[h], outs, c.attention_bias, normal);
                }
            }
        }
        let names = of_attention("attn.out", n.out);
        t.linear(names, query, &[h], c.attention_bias, normal);
        t.layer_norm(at("norm_2", n.norm_2), h);
        t.linear(at("mlp.up", n.up), &[h], &[c.inner], c.mlp_bias, normal);
        t.linear(at("mlp.down", n.down), &[c.inner], &[h], c.mlp_bias, normal);
    }
    t.layer_norm(("head.norm".into(), n.last_norm.into()), h);
    if !c.tied {
        t.add_head(&table, normal);
        if c.family == Plain::GptNeox
            && let Some(head) = t.params.last_mut()
        {
            head.hf_name = "embed_out.weight".into();
        }
    }
    t.params
}
