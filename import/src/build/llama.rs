//! Llama: pre-norm decoder with RMS norms, rotary positions, grouped KV heads and a gated
//! MLP (Touvron et al. 2023; grouped heads of Ainslie et al. 2023; SwiGLU of Shazeer 2020).

use super::Builder;
use crate::ImportError;
use crate::config::LlamaConfig;
use ir::ValueId;
use ir::op::{Binary, InputKind, OpKind};

pub(super) fn build(b: &mut Builder, c: &LlamaConfig) -> Result<(), ImportError> {
    b.start_layer("embed");
    let tokens = b.input("tokens", InputKind::Tokens)?;
    let table = b.param("embed.wte.weight")?;
    let mut x = b.op("embed.wte", OpKind::Embedding, &[table, tokens])?;
    for i in 0..c.layers {
        b.start_layer(format!("h.{i}"));
        x = block(b, c, &format!("h.{i}"), x)?;
    }
    b.start_layer("head");
    let x = norm(b, c, "head.norm", x)?;
    b.loss(x, c.tied.then_some(table))
}

fn block(b: &mut Builder, c: &LlamaConfig, h: &str, x: ValueId) -> Result<ValueId, ImportError> {
    let normed = norm(b, c, &format!("{h}.norm_1"), x)?;
    let y = attention(b, c, h, normed)?;
    let x = b.add(format!("{h}.residual_1"), x, y)?;
    let normed = norm(b, c, &format!("{h}.norm_2"), x)?;
    let gate = b.linear(&format!("{h}.mlp.gate"), "bsh,hf->bsf", normed)?;
    let gate = b.op(
        format!("{h}.mlp.act"),
        OpKind::Unary { f: c.activation },
        &[gate],
    )?;
    let up = b.linear(&format!("{h}.mlp.up"), "bsh,hf->bsf", normed)?;
    let y = b.op(
        format!("{h}.mlp.mul"),
        OpKind::Binary { f: Binary::Mul },
        &[gate, up],
    )?;
    let y = b.linear(&format!("{h}.mlp.down"), "bsf,fh->bsh", y)?;
    b.add(format!("{h}.residual_2"), x, y)
}

fn attention(
    b: &mut Builder,
    c: &LlamaConfig,
    h: &str,
    x: ValueId,
) -> Result<ValueId, ImportError> {
    let (into, out_of) = match c.heads / c.kv_heads {
        1 => ("bsh,hkd->bskd", "bskd,kdh->bsh"),
        _ => ("bsh,hkgd->bskgd", "bskgd,kgdh->bsh"),
    };
    let q = b.linear(&format!("{h}.attn.q"), into, x)?;
    let k = b.linear(&format!("{h}.attn.k"), "bsh,hkd->bskd", x)?;
    let v = b.linear(&format!("{h}.attn.v"), "bsh,hkd->bskd", x)?;
    let rotary = OpKind::Rotary {
        theta: c.rope_theta,
        scaling: c.rope_scaling,
        inverse: false,
    };
    let q = b.op(format!("{h}.attn.rotary_q"), rotary.clone(), &[q])?;
    let k = b.op(format!("{h}.attn.rotary_k"), rotary, &[k])?;
    let attend = OpKind::Attention {
        scale: (c.head_dim as f64).sqrt().recip(),
        dropout: b.options.dropout,
    };
    let y = b.op(format!("{h}.attn.attend"), attend, &[q, k, v])?;
    b.linear(&format!("{h}.attn.out"), out_of, y)
}

fn norm(b: &mut Builder, c: &LlamaConfig, path: &str, x: ValueId) -> Result<ValueId, ImportError> {
    let gain = b.param(&format!("{path}.weight"))?;
    b.op(path, OpKind::RmsNorm { eps: c.epsilon }, &[x, gain])
}
