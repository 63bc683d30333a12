//! GPT-2: pre-norm decoder with learned positions (Radford et al. 2019; GPT-3, Brown et al.
//! 2020, with dense attention in every layer).

use super::Builder;
use crate::ImportError;
use crate::config::{Gpt2Config, blocks_of_sequence};
use ir::ValueId;
use ir::op::{Bounds, InputKind, OpKind};

pub(super) fn build(b: &mut Builder, c: &Gpt2Config) -> Result<(), ImportError> {
    b.start_layer("embed");
    let tokens = b.input("tokens", InputKind::Tokens)?;
    let table = b.param("embed.wte.weight")?;
    let embedded = b.op("embed.wte", OpKind::Embedding, &[table, tokens])?;
    let mut positions = b.param("embed.wpe.weight")?;
    let len = b.options.sequence;
    if len < c.positions {
        positions = b.op(
            "embed.positions",
            OpKind::Slice {
                dim: 0,
                start: 0,
                len,
            },
            &[positions],
        )?;
    }
    let sum = b.add("embed.add", embedded, positions)?;
    let mut x = b.dropout("embed.dropout", sum)?;
    for i in 0..c.layers {
        b.start_layer(format!("h.{i}"));
        x = block(b, c, &format!("h.{i}"), x)?;
    }
    b.start_layer("head");
    let x = norm(b, c, "head.ln_f", x)?;
    b.loss(x, c.tied.then_some(table))
}

fn block(b: &mut Builder, c: &Gpt2Config, h: &str, x: ValueId) -> Result<ValueId, ImportError> {
    let normed = norm(b, c, &format!("{h}.ln_1"), x)?;
    let y = attention(b, c, h, normed)?;
    let y = b.dropout(&format!("{h}.attn.dropout"), y)?;
    let x = b.add(format!("{h}.residual_1"), x, y)?;
    let normed = norm(b, c, &format!("{h}.ln_2"), x)?;
    let y = b.linear(&format!("{h}.mlp.fc"), "bsh,hf->bsf", normed)?;
    let y = b.op(
        format!("{h}.mlp.act"),
        OpKind::Unary { f: c.activation },
        &[y],
    )?;
    let y = b.linear(&format!("{h}.mlp.proj"), "bsf,fh->bsh", y)?;
    let y = b.dropout(&format!("{h}.mlp.dropout"), y)?;
    b.add(format!("{h}.residual_2"), x, y)
}

fn attention(b: &mut Builder, c: &Gpt2Config, h: &str, x: ValueId) -> Result<ValueId, ImportError> {
    let qkv = b.linear(&format!("{h}.attn.qkv"), "bsh,hcnd->bscnd", x)?;
    let qkv = b.ops(
        format!("{h}.attn.split"),
        OpKind::Unstack { dim: 2 },
        &[qkv],
    )?;
    let head_dim = (c.hidden / c.heads) as f64;
    let scale = if c.scale_attention {
        head_dim.sqrt().recip()
    } else {
        1.0
    };
    let attend = OpKind::Attention {
        scale,
        dropout: b.options.dropout,
        key: String::new(),
        order: ir::op::SequenceOrder::Natural,
        keys: Default::default(),
        bounds: Bounds {
            blocks: blocks_of_sequence(c.sparse, b.options.sequence),
            ..Bounds::default()
        },
    };
    let y = b.op(format!("{h}.attn.attend"), attend, &qkv)?;
    b.linear(&format!("{h}.attn.out"), "bsnd,ndh->bsh", y)
}

fn norm(b: &mut Builder, c: &Gpt2Config, path: &str, x: ValueId) -> Result<ValueId, ImportError> {
    let gain = b.param(&format!("{path}.weight"))?;
    let bias = b.param(&format!("{path}.bias"))?;
    b.op(path, OpKind::LayerNorm { eps: c.epsilon }, &[x, gain, bias])
}
