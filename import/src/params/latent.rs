//! The parameters of decoders with latent attention.
//!
//! Files have in one matrix what attention takes apart: the compression of keys and values with the
//! part of the keys that turns, the expansions of keys and of values. Each has a matrix of its own
//! here, so that heads are split without cutting either. Of a head's queries the elements that turn
//! come first here and last in files, which hold them pair by pair where they are interleaved;
//! those of one side of the pairs come first here, as the rotation wants it. Scores are sums over
//! all elements of a head, whatever their order.

use super::{DEEPSEEK, Param, Rows, Stretch, Table, experts, further};
use crate::config::LatentConfig;
use ir::op::Init;

/// The elements of a head that turn, from `start` on in a file, in our order.
fn turned(c: &LatentConfig, start: u64) -> Vec<Stretch> {
    let stretch = |start, count, step| Stretch { start, count, step };
    match c.interleaved {
        true => vec![
            stretch(start, c.turned / 2, 2),
            stretch(start + 1, c.turned / 2, 2),
        ],
        false => vec![stretch(start, c.turned, 1)],
    }
}

pub(super) fn latent(c: &LatentConfig) -> Vec<Param> {
    let h = c.hidden;
    let normal = Init::Normal { std: c.init_std };
    let mut t = Table {
        prefix: "model.",
        params: Vec::new(),
    };
    let table = [c.vocab, h];
    t.add(
        "embed.wte.weight",
        &table,
        "embed_tokens.weight",
        &table,
        normal,
    );
    for i in 0..c.layers {
        layer(&mut t, c, i, (&format!("h.{i}"), &format!("layers.{i}")));
    }
    for k in 0..c.further.map_or(0, |f| f.modules) {
        // Files count modules on from the layers.
        let i = c.layers + k;
        let (ours, theirs) = (format!("h.mtp.{k}"), format!("layers.{i}"));
        further::begin(&mut t, (h, normal), k, &theirs);
        layer(&mut t, c, i, (&ours, &theirs));
        t.gain(
            (format!("{ours}.norm"), format!("{theirs}.shared_head.norm")),
            h,
        );
    }
    t.gain(("head.norm".into(), "norm".into()), h);
    if !c.tied {
        t.add_head(&table, normal);
    }
    t.params
}

/// Adds layer `i`; `(layer, stored)` is where it is here and in files.
fn layer(t: &mut Table, c: &LatentConfig, i: u64, (layer, stored): (&str, &str)) {
    let (h, n) = (c.hidden, c.heads);
    let normal = Init::Normal { std: c.init_std };
    let head = c.turned + c.still;
    let mut of_queries = turned(c, c.still);
    of_queries.push(Stretch {
        start: 0,
        count: c.still,
        step: 1,
    });
    let of_queries = Rows {
        groups: n,
        each: head,
        ours: of_queries,
    };
    let compressed = c.rank + c.turned;
    let of_turned = Rows {
        groups: 1,
        each: compressed,
        ours: turned(c, c.rank),
    };
    let expanded = c.still + c.value_dim;
    let at = |ours: &str, theirs: &str| (format!("{layer}.{ours}"), format!("{stored}.{theirs}"));
    let bias = c.attention_bias;
    t.gain(at("norm_1", "input_layernorm"), h);
    let (queries, from, names) = match c.query_rank {
        None => ((&of_queries, normal), h, at("attn.q", "self_attn.q_proj")),
        Some(rank) => {
            let names = at("attn.q_down", "self_attn.q_a_proj");
            t.linear(names, &[h], &[rank], bias, normal);
            t.gain(at("attn.q_norm", "self_attn.q_a_layernorm"), rank);
            let names = at("attn.q_up", "self_attn.q_b_proj");
            ((&of_queries, normal), rank, names)
        }
    };
    t.linear_of(names, &[from], &[n, head], false, queries);
    let theirs = "self_attn.kv_a_proj_with_mqa";
    let rows = Rows::run(1, compressed, (0, c.rank));
    t.linear_of(
        at("attn.kv_down", theirs),
        &[h],
        &[c.rank],
        bias,
        (&rows, normal),
    );
    let rows = (&of_turned, normal);
    t.linear_of(at("attn.k_turned", theirs), &[h], &[c.turned], bias, rows);
    t.gain(at("attn.kv_norm", "self_attn.kv_a_layernorm"), c.rank);
    let theirs = "self_attn.kv_b_proj";
    for (ours, start, width) in [("k_up", 0, c.still), ("v_up", c.still, c.value_dim)] {
        let rows = Rows::run(n, expanded, (start, width));
        let names = at(&format!("attn.{ours}"), theirs);
        t.linear_of(names, &[c.rank], &[n, width], false, (&rows, normal));
    }
    let names = at("attn.out", "self_attn.o_proj");
    t.linear(names, &[n, c.value_dim], &[h], bias, normal);
    t.gain(at("norm_2", "post_attention_layernorm"), h);
    if let Some(e) = c.experts.as_ref().filter(|e| e.are_in(i)) {
        experts(t, (h, normal), &DEEPSEEK, e, (layer, stored));
        if c.mlp_bias {
            shared_biases(t, e.shared.unwrap_or(0), h, (layer, stored));
        }
        return;
    }
    for (ours, theirs, from, to) in [
        ("mlp.gate", "mlp.gate_proj", h, c.intermediate),
        ("mlp.up", "mlp.up_proj", h, c.intermediate),
        ("mlp.down", "mlp.down_proj", c.intermediate, h),
    ] {
        t.linear(at(ours, theirs), &[from], &[to], c.mlp_bias, normal);
    }
}

/// Adds the biases of the shared expert of a layer.
fn shared_biases(t: &mut Table, inner: u64, h: u64, (layer, stored): (&str, &str)) {
    for (part, n) in [("gate", inner), ("up", inner), ("down", h)] {
        let ours = format!("{layer}.moe.shared.{part}.bias");
        let theirs = format!("{stored}.mlp.shared_experts.{part}_proj.bias");
        t.add(&ours, &[n], &theirs, &[n], Init::Zeros);
    }
}
