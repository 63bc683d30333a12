//! Mamba-2 (Dao & Gu 2024) and Nemotron-H (NVIDIA 2025): pre-norm blocks of one mixer each, a state space,
//! attention without positions, an MLP with a squared ReLU, or experts that are such MLPs. Experts of
//! Nemotron 3 Super work in a **latent space**: tokens are made narrower before they travel, and sums
//! of experts wide again; the router and the expert of all tokens read them as they are.
//!
//! ```text
//! x ─┬ z ─ silu ──────────────────────────────────────────┐
//!    ├ x ─ conv ─ silu ─┐                                 │
//!    ├ b ─ conv ─ silu ─┼ scan ─────────────────────────── mul ─ norm of each group ─ out
//!    ├ c ─ conv ─ silu ─┤
//!    └ dt ──────────────┘
//! ```

use super::Builder;
use super::further::{self, Parts};
use super::llama::{DENSE, EXPERTS, route};
use crate::ImportError;
use crate::config::{ExpertsConfig, HybridConfig, Mixer, blocks_of_sequence};
use ir::op::{Binary, Bounds, InputKind, OpKind, SequenceOrder, Unary};
use ir::{DType, Dim, Place, Shape, TensorType, ValueId};

pub(super) fn build(b: &mut Builder, c: &HybridConfig) -> Result<(), ImportError> {
    b.start_layer("embed");
    let tokens = b.input("tokens", InputKind::Tokens)?;
    let table = b.param("embed.wte.weight")?;
    let mut x = b.op("embed.wte", OpKind::Embedding, &[table, tokens])?;
    for (i, mixer) in c.blocks.iter().enumerate() {
        b.start_layer(format!("h.{i}"));
        x = block(b, c, *mixer, &format!("h.{i}"), x)?;
    }
    further::finish(b, c, c.further, (table, c.tied), x)
}

impl Parts for HybridConfig {
    fn norm(&self, b: &mut Builder, path: &str, x: ValueId) -> Result<ValueId, ImportError> {
        norm(b, self, path, x)
    }
    fn block(
        &self,
        b: &mut Builder,
        scope: &str,
        _: u64,
        x: ValueId,
    ) -> Result<ValueId, ImportError> {
        let mut x = x;
        for (i, mixer) in self.further_blocks.iter().enumerate() {
            x = block(b, self, *mixer, &format!("{scope}.h.{i}"), x)?;
        }
        Ok(x)
    }
}

/// A block of this mixer, whose paths begin with `h`.
fn block(
    b: &mut Builder,
    c: &HybridConfig,
    mixer: Mixer,
    h: &str,
    x: ValueId,
) -> Result<ValueId, ImportError> {
    let normed = norm(b, c, &format!("{h}.norm"), x)?;
    let y = match mixer {
        Mixer::Mamba => state_space(b, c, &format!("{h}.mamba"), normed)?,
        Mixer::Attention => attention(b, c, &format!("{h}.attn"), normed)?,
        Mixer::Mlp => mlp(b, &format!("{h}.mlp"), DENSE, normed)?,
        Mixer::Experts => match &c.experts {
            Some(e) => mixture(b, c, e, &format!("{h}.moe"), normed)?,
            None => normed,
        },
    };
    b.add(format!("{h}.residual"), x, y)
}

fn unary(b: &mut Builder, path: String, f: Unary, x: ValueId) -> Result<ValueId, ImportError> {
    b.op(path, OpKind::Unary { f }, &[x])
}

fn state_space(
    b: &mut Builder,
    c: &HybridConfig,
    m: &str,
    x: ValueId,
) -> Result<ValueId, ImportError> {
    let s = &c.scan;
    let gate = b.linear(&format!("{m}.z"), "bsh,hgrp->bsgrp", x)?;
    let input = b.linear(&format!("{m}.x"), "bsh,hgrp->bsgrp", x)?;
    let write = b.linear(&format!("{m}.b"), "bsh,hgn->bsgn", x)?;
    let read = b.linear(&format!("{m}.c"), "bsh,hgn->bsgn", x)?;
    let dt = b.linear(&format!("{m}.dt"), "bsh,hgr->bsgr", x)?;
    let input = convolved(b, c, &format!("{m}.conv_x"), input)?;
    let write = convolved(b, c, &format!("{m}.conv_b"), write)?;
    let read = convolved(b, c, &format!("{m}.conv_c"), read)?;
    let mut operands = vec![input, dt, write, read];
    for name in ["a_log", "d", "dt_bias"] {
        operands.push(b.param(&format!("{m}.{name}"))?);
    }
    let scan = OpKind::StateSpace {
        chunk: s.chunk,
        dt_min: s.dt_min,
    };
    let y = b.op(format!("{m}.scan"), scan, &operands)?;
    let gate = unary(b, format!("{m}.gate"), Unary::Silu, gate)?;
    let mul = OpKind::Binary { f: Binary::Mul };
    let y = b.op(format!("{m}.mul"), mul.clone(), &[y, gate])?;
    let width = s.heads * s.width;
    let sequence = b.options.sequence;
    let dims = [sequence, s.groups, width].map(Dim::Fixed);
    let shape = [&[Dim::Batch], &dims[..]].concat();
    let y = b.op(format!("{m}.groups"), OpKind::Reshape { shape }, &[y])?;
    // Gains differ from group to group, so that they are a product of their own.
    let ones = ones(b, &format!("{m}.group_norm"), width)?;
    let norm = OpKind::RmsNorm { eps: c.epsilon };
    let y = b.op(format!("{m}.group_norm"), norm, &[y, ones])?;
    let gain = b.param(&format!("{m}.group_norm.weight"))?;
    let y = b.op(format!("{m}.group_norm.gain"), mul, &[y, gain])?;
    b.linear(&format!("{m}.out"), "bsgk,gkh->bsh", y)
}

/// A vector of ones.
fn ones(b: &mut Builder, path: &str, width: u64) -> Result<ValueId, ImportError> {
    let ty = TensorType::new(DType::F32, Shape::fixed(&[]));
    let place = Place::forward(format!("{path}.one"), b.layer);
    let one = b
        .graph
        .add_source(OpKind::Constant { value: 1.0 }, ty, place)?;
    let leading = vec![Dim::Fixed(width)];
    b.op(
        format!("{path}.ones"),
        OpKind::Broadcast { leading },
        &[one],
    )
}

/// The causal convolution with its bias and activation.
fn convolved(
    b: &mut Builder,
    c: &HybridConfig,
    path: &str,
    x: ValueId,
) -> Result<ValueId, ImportError> {
    let weight = b.param(&format!("{path}.weight"))?;
    let mut y = b.op(path, OpKind::CausalConv, &[x, weight])?;
    if c.scan.conv_bias {
        let bias = b.param(&format!("{path}.bias"))?;
        y = b.add(format!("{path}.add_bias"), y, bias)?;
    }
    unary(b, format!("{path}.act"), Unary::Silu, y)
}

fn attention(
    b: &mut Builder,
    c: &HybridConfig,
    a: &str,
    x: ValueId,
) -> Result<ValueId, ImportError> {
    let (into, out_of) = match c.heads / c.kv_heads {
        1 => ("bsh,hkd->bskd", "bskd,kdh->bsh"),
        _ => ("bsh,hkgd->bskgd", "bskgd,kgdh->bsh"),
    };
    let q = b.linear(&format!("{a}.q"), into, x)?;
    let k = b.linear(&format!("{a}.k"), "bsh,hkd->bskd", x)?;
    let v = b.linear(&format!("{a}.v"), "bsh,hkd->bskd", x)?;
    let attend = OpKind::Attention {
        scale: (c.head_dim as f64).sqrt().recip(),
        dropout: b.options.dropout,
        key: String::new(),
        order: SequenceOrder::Natural,
        keys: Default::default(),
        bounds: Bounds {
            blocks: blocks_of_sequence(c.sparse, b.options.sequence),
            ..Bounds::default()
        },
    };
    let y = b.op(format!("{a}.attend"), attend, &[q, k, v])?;
    b.linear(&format!("{a}.out"), out_of, y)
}

fn mlp(
    b: &mut Builder,
    scope: &str,
    [into, out_of]: [&str; 2],
    x: ValueId,
) -> Result<ValueId, ImportError> {
    let y = b.linear(&format!("{scope}.up"), into, x)?;
    let y = unary(b, format!("{scope}.act"), Unary::Relu, y)?;
    let y = unary(b, format!("{scope}.square"), Unary::Square, y)?;
    b.linear(&format!("{scope}.down"), out_of, y)
}

fn mixture(
    b: &mut Builder,
    c: &HybridConfig,
    e: &ExpertsConfig,
    scope: &str,
    x: ValueId,
) -> Result<ValueId, ImportError> {
    let (gates, slots) = route(b, e, scope, x)?;
    let narrow = match c.latent {
        None => x,
        Some(_) => b.linear(&format!("{scope}.latent_down"), "bsh,hl->bsl", x)?,
    };
    let dispatch = OpKind::Dispatch {
        experts: e.count,
        capacity: e.capacity(b.options.sequence),
    };
    let y = b.op(format!("{scope}.dispatch"), dispatch, &[narrow, slots])?;
    let y = mlp(b, scope, EXPERTS, y)?;
    let mut y = b.op(
        format!("{scope}.combine"),
        OpKind::Combine,
        &[y, slots, gates],
    )?;
    if c.latent.is_some() {
        y = b.linear(&format!("{scope}.latent_up"), "bsl,lh->bsh", y)?;
    }
    let shared = mlp(b, &format!("{scope}.shared"), DENSE, x)?;
    b.add(format!("{scope}.add_shared"), y, shared)
}

fn norm(b: &mut Builder, c: &HybridConfig, path: &str, x: ValueId) -> Result<ValueId, ImportError> {
    let gain = b.param(&format!("{path}.weight"))?;
    b.op(path, OpKind::RmsNorm { eps: c.epsilon }, &[x, gain])
}
