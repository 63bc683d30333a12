//! Decoders with layer norms and an MLP without a gate: OPT (Zhang et al. 2022), whose positions are
//! learned; GPT-NeoX (Black et al. 2022), whose attention and MLP read the same residual; Nemotron
//! (Parmar et al. 2024), whose activation is a squared ReLU; BLOOM (BigScience 2022), whose scores fall
//! with the distance and whose embedding is normalised.

use super::Builder;
use crate::ImportError;
use crate::config::{DecoderConfig, Rotation, blocks_of_sequence};
use ir::ValueId;
use ir::op::{Bounds, InputKind, OpKind, Unary};

pub(super) fn build(b: &mut Builder, c: &DecoderConfig) -> Result<(), ImportError> {
    b.start_layer("embed");
    let tokens = b.input("tokens", InputKind::Tokens)?;
    let table = b.param("embed.wte.weight")?;
    let mut x = b.op("embed.wte", OpKind::Embedding, &[table, tokens])?;
    if c.learns_positions() {
        let positions = b.param("embed.wpe.weight")?;
        let slice = OpKind::Slice {
            dim: 0,
            start: c.family.position_offset(),
            len: b.options.sequence,
        };
        let positions = b.op("embed.positions", slice, &[positions])?;
        x = b.add("embed.add", x, positions)?;
    }
    if c.family.normalises_embeddings() {
        x = norm(b, c, "embed.norm", x)?;
    }
    for i in 0..c.layers {
        b.start_layer(format!("h.{i}"));
        x = block(b, c, &format!("h.{i}"), x)?;
    }
    b.start_layer("head");
    let x = norm(b, c, "head.norm", x)?;
    b.loss(x, c.tied.then_some(table))
}

fn block(b: &mut Builder, c: &DecoderConfig, h: &str, x: ValueId) -> Result<ValueId, ImportError> {
    let normed = norm(b, c, &format!("{h}.norm_1"), x)?;
    let y = attention(b, c, h, normed)?;
    let y = b.dropout(&format!("{h}.attn.dropout"), y)?;
    let after = b.add(format!("{h}.residual_1"), x, y)?;
    // Beside each other, both read what came in, and both are added to it.
    let read = if c.is_parallel { x } else { after };
    let normed = norm(b, c, &format!("{h}.norm_2"), read)?;
    let y = mlp(b, c, &format!("{h}.mlp"), normed)?;
    let y = b.dropout(&format!("{h}.mlp.dropout"), y)?;
    b.add(format!("{h}.residual_2"), after, y)
}

fn mlp(
    b: &mut Builder,
    c: &DecoderConfig,
    scope: &str,
    x: ValueId,
) -> Result<ValueId, ImportError> {
    let y = b.linear(&format!("{scope}.up"), "bsh,hf->bsf", x)?;
    let unary = |f| OpKind::Unary { f };
    let mut y = b.op(format!("{scope}.act"), unary(c.activation), &[y])?;
    if c.is_squared {
        y = b.op(format!("{scope}.square"), unary(Unary::Square), &[y])?;
    }
    b.linear(&format!("{scope}.down"), "bsf,fh->bsh", y)
}

fn attention(
    b: &mut Builder,
    c: &DecoderConfig,
    h: &str,
    x: ValueId,
) -> Result<ValueId, ImportError> {
    let (into, out_of) = match c.heads / c.kv_heads {
        1 => ("bsh,hkd->bskd", "bskd,kdh->bsh"),
        _ => ("bsh,hkgd->bskgd", "bskgd,kgdh->bsh"),
    };
    let (q, k, v) = match c.family.is_fused() {
        true => {
            let all = b.linear(&format!("{h}.attn.qkv"), "bsh,hkcd->bskcd", x)?;
            let split = OpKind::Unstack { dim: 3 };
            let parts = b.ops(format!("{h}.attn.split"), split, &[all])?;
            (parts[0], parts[1], parts[2])
        }
        false => (
            b.linear(&format!("{h}.attn.q"), into, x)?,
            b.linear(&format!("{h}.attn.k"), "bsh,hkd->bskd", x)?,
            b.linear(&format!("{h}.attn.v"), "bsh,hkd->bskd", x)?,
        ),
    };
    let (q, k) = match &c.rotation {
        Some(r) => (
            rotated(b, c, r, &format!("{h}.attn.rotary_q"), q)?,
            rotated(b, c, r, &format!("{h}.attn.rotary_k"), k)?,
        ),
        None => (q, k),
    };
    let attend = OpKind::Attention {
        scale: (c.head_dim as f64).sqrt().recip(),
        dropout: b.options.dropout,
        key: String::new(),
        order: ir::op::SequenceOrder::Natural,
        keys: Default::default(),
        bounds: Bounds {
            blocks: blocks_of_sequence(c.sparse, b.options.sequence),
            alibi: c.family.has_slopes(),
            ..Bounds::default()
        },
    };
    let y = b.op(format!("{h}.attn.attend"), attend, &[q, k, v])?;
    b.linear(&format!("{h}.attn.out"), out_of, y)
}

/// Turns the first elements of every head.
fn rotated(
    b: &mut Builder,
    c: &DecoderConfig,
    r: &Rotation,
    path: &str,
    x: ValueId,
) -> Result<ValueId, ImportError> {
    let rotary = OpKind::Rotary {
        theta: r.theta,
        scaling: r.scaling,
        inverse: false,
        part: (r.dims < c.head_dim).then_some(r.dims),
        order: ir::op::SequenceOrder::Natural,
    };
    b.op(path, rotary, &[x])
}

/// A layer norm; where files hold gains less one, one is added.
fn norm(
    b: &mut Builder,
    c: &DecoderConfig,
    path: &str,
    x: ValueId,
) -> Result<ValueId, ImportError> {
    let mut gain = b.param(&format!("{path}.weight"))?;
    if c.family.has_centred_gains() {
        gain = b.centred(path, gain)?;
    }
    let bias = b.param(&format!("{path}.bias"))?;
    b.op(path, OpKind::LayerNorm { eps: c.epsilon }, &[x, gain, bias])
}
