//! The parameters of models whose blocks are a mixer each: state spaces, attention, MLPs and experts.
//!
//! Files have in one matrix what a state space reads: its gate, inputs, directions of writing and reading,
//! and time steps, in this order; and in one convolution inputs and directions. Each has a matrix of its
//! own here, with the groups of heads first, so that a shard cuts none of them. A convolution's weight is
//! `[channels, 1, taps]` in files.

use super::{Param, Rows, Table, further};
use crate::config::{ExpertsConfig, HybridConfig, Mixer, ScanConfig};
use ir::op::Init;

pub(super) fn hybrid(c: &HybridConfig) -> Vec<Param> {
    let h = c.hidden;
    let normal = Init::Normal { std: c.init_std };
    let mut t = Table {
        prefix: "backbone.",
        params: Vec::new(),
    };
    let table = [c.vocab, h];
    t.add(
        "embed.wte.weight",
        &table,
        "embeddings.weight",
        &table,
        normal,
    );
    for (i, mixer) in c.blocks.iter().enumerate() {
        let (ours, theirs) = (format!("h.{i}"), format!("layers.{i}"));
        block(&mut t, c, *mixer, (&ours, &theirs));
    }
    // Files count the blocks of all modules, outside the model's prefix.
    let of_model = std::mem::take(&mut t.prefix);
    let each = c.further_blocks.len() as u64;
    for k in 0..c.further.map_or(0, |f| f.modules) {
        further::begin(&mut t, (h, normal), k, &format!("mtp.layers.{}", k * each));
        for (j, mixer) in (0..).zip(&c.further_blocks) {
            let stored = format!("mtp.layers.{}", k * each + j);
            block(&mut t, c, *mixer, (&format!("h.mtp.{k}.h.{j}"), &stored));
        }
        let last = format!("mtp.layers.{}", k * each + each.saturating_sub(1));
        t.gain(
            (format!("h.mtp.{k}.norm"), format!("{last}.final_layernorm")),
            h,
        );
    }
    t.prefix = of_model;
    t.gain(("head.norm".into(), "norm_f".into()), h);
    if !c.tied {
        t.add_head(&table, normal);
    }
    t.params
}

/// Adds a block of this mixer; `(layer, stored)` is where it is here and in files.
fn block(t: &mut Table, c: &HybridConfig, mixer: Mixer, (layer, stored): (&str, &str)) {
    let h = c.hidden;
    let normal = Init::Normal { std: c.init_std };
    let at = |ours: &str, theirs: &str| (format!("{layer}.{ours}"), format!("{stored}.{theirs}"));
    t.gain(at("norm", "norm"), h);
    match mixer {
        Mixer::Mamba => state_space(t, (h, normal), &c.scan, (layer, stored)),
        Mixer::Attention => {
            let (kv, d) = (c.kv_heads, c.head_dim);
            let query: &[u64] = match c.heads / kv {
                1 => &[kv, d],
                groups => &[kv, groups, d],
            };
            for (ours, theirs, outs) in [
                ("attn.q", "mixer.q_proj", query),
                ("attn.k", "mixer.k_proj", &[kv, d][..]),
                ("attn.v", "mixer.v_proj", &[kv, d][..]),
            ] {
                t.linear(at(ours, theirs), &[h], outs, false, normal);
            }
            t.linear(at("attn.out", "mixer.o_proj"), query, &[h], false, normal);
        }
        Mixer::Mlp => {
            let inner = [c.intermediate];
            t.linear(at("mlp.up", "mixer.up_proj"), &[h], &inner, false, normal);
            t.linear(
                at("mlp.down", "mixer.down_proj"),
                &inner,
                &[h],
                false,
                normal,
            );
        }
        Mixer::Experts => {
            if let Some(e) = &c.experts {
                experts(t, (h, c.latent, normal), e, (layer, stored));
            }
        }
    }
}

/// Adds the state space of a block, of a model as wide as `h`.
fn state_space(
    t: &mut Table,
    (h, normal): (u64, Init),
    s: &ScanConfig,
    (layer, stored): (&str, &str),
) {
    let at = |ours: &str, theirs: &str| {
        (
            format!("{layer}.mamba.{ours}"),
            format!("{stored}.mixer.{theirs}"),
        )
    };
    let (inner, shared) = (s.inner(), s.groups * s.state);
    let (head, direction) = ([s.groups, s.heads, s.width], [s.groups, s.state]);
    let convolved = inner + 2 * shared;
    let all = inner + convolved + s.groups * s.heads;
    for (ours, outs, start) in [
        ("z", &head[..], 0),
        ("x", &head[..], inner),
        ("b", &direction[..], 2 * inner),
        ("c", &direction[..], 2 * inner + shared),
        ("dt", &head[..2], inner + convolved),
    ] {
        let rows = Rows::run(1, all, (start, outs.iter().product()));
        t.linear_of(at(ours, "in_proj"), &[h], outs, s.bias, (&rows, normal));
    }
    let window = Init::Normal {
        std: (3.0 * s.taps as f64).sqrt().recip(),
    };
    for (ours, outs, start) in [
        ("conv_x", &head[..], 0),
        ("conv_b", &direction[..], inner),
        ("conv_c", &direction[..], inner + shared),
    ] {
        let rows = Rows::run(1, convolved, (start, outs.iter().product()));
        let (ours, theirs) = at(ours, "conv1d");
        let mut add = |leaf: &str, shape: &[u64], stored: &[u64], init| {
            let (ours, theirs) = (format!("{ours}.{leaf}"), format!("{theirs}.{leaf}"));
            t.add(&ours, shape, &theirs, stored, init);
            if let Some(param) = t.params.last_mut() {
                param.rows = Some(rows.clone());
            }
        };
        let weight = [outs, &[s.taps]].concat();
        add("weight", &weight, &[convolved, 1, s.taps], window);
        if s.conv_bias {
            add("bias", outs, &[convolved], Init::Zeros);
        }
    }
    let (low, high) = s.times;
    for (ours, theirs, init) in [
        ("a_log", "A_log", Init::LogCount),
        ("d", "D", Init::Ones),
        ("dt_bias", "dt_bias", Init::TimeStep { low, high }),
    ] {
        let (ours, theirs) = at(ours, theirs);
        t.add(&ours, &head[..2], &theirs, &[s.groups * s.heads], init);
    }
    let (ours, theirs) = at("group_norm.weight", "norm.weight");
    let group = [s.groups, s.heads * s.width];
    t.add(&ours, &group, &theirs, &[inner], Init::Ones);
    t.linear(at("out", "out_proj"), &group, &[h], s.bias, normal);
}

/// Adds the router and the experts of a block, of a model as wide as `h`.
fn experts(
    t: &mut Table,
    (h, latent, normal): (u64, Option<u64>, Init),
    e: &ExpertsConfig,
    (layer, stored): (&str, &str),
) {
    let at = |ours: &str, theirs: &str| {
        (
            format!("{layer}.moe.{ours}"),
            format!("{stored}.mixer.{theirs}"),
        )
    };
    t.linear(at("router", "gate"), &[h], &[e.count], false, normal);
    let (ours, theirs) = at("choice.bias", "gate.e_score_correction_bias");
    t.add(&ours, &[e.count], &theirs, &[e.count], Init::Zeros);
    let wide = latent.unwrap_or(h);
    if latent.is_some() {
        t.linear(
            at("latent_down", "fc1_latent_proj"),
            &[h],
            &[wide],
            false,
            normal,
        );
    }
    for (ours, n_in, n_out) in [("up", wide, e.intermediate), ("down", e.intermediate, wide)] {
        let (path, name) = at(
            &format!("{ours}.weight"),
            &format!("experts.*.{ours}_proj.weight"),
        );
        t.add(
            &path,
            &[e.count, n_in, n_out],
            &name,
            &[n_out, n_in],
            normal,
        );
        if let Some(last) = t.params.last_mut() {
            (last.transposed, last.pieces) = (true, Some(e.count));
        }
    }
    if latent.is_some() {
        t.linear(
            at("latent_up", "fc2_latent_proj"),
            &[wide],
            &[h],
            false,
            normal,
        );
    }
    let Some(inner) = e.shared else { return };
    for (ours, n_in, n_out) in [("up", h, inner), ("down", inner, h)] {
        let names = at(
            &format!("shared.{ours}"),
            &format!("shared_experts.{ours}_proj"),
        );
        t.linear(names, &[n_in], &[n_out], false, normal);
    }
}
