//! DeepSeek-V2 and V3: pre-norm decoders with latent attention and experts (DeepSeek 2024).
//!
//! Keys and values of all heads are made of one vector for each token, much narrower than they are;
//! queries too where they are compressed. Positions turn a part of each query and of each key, the
//! first elements of a head here. The turned elements of the keys are the same in all heads, and are
//! joined to those of each:
//!
//! ```text
//! x ─ q_down ─ norm ─ q_up ─ [B,S,n,r+d] ─ rotary of r ───────────────── q
//! x ─ kv_down ─ norm ─┬ k_up ─ [B,S,n,d] ─┐
//!                     └ v_up ─ [B,S,n,v]  │                              v
//! x ─ k_turned ─ [B,S,r] ─ rotary ────────┴ join ─ [B,S,n,r+d] ───────── k
//! ```

use super::Builder;
use super::further::{self, Parts};
use super::llama::{DENSE, gated_mlp, mixture};
use crate::ImportError;
use crate::config::{LATENT_EPSILON, LatentConfig, blocks_of_sequence};
use ir::ValueId;
use ir::op::{Bounds, InputKind, OpKind, SequenceOrder};

pub(super) fn build(b: &mut Builder, c: &LatentConfig) -> Result<(), ImportError> {
    b.start_layer("embed");
    let tokens = b.input("tokens", InputKind::Tokens)?;
    let table = b.param("embed.wte.weight")?;
    let mut x = b.op("embed.wte", OpKind::Embedding, &[table, tokens])?;
    for i in 0..c.layers {
        b.start_layer(format!("h.{i}"));
        x = block(b, c, &format!("h.{i}"), i, x)?;
    }
    further::finish(b, c, c.further, (table, c.tied), x)
}

impl Parts for LatentConfig {
    fn norm(&self, b: &mut Builder, path: &str, x: ValueId) -> Result<ValueId, ImportError> {
        norm(b, self.epsilon, path, x)
    }
    fn block(
        &self,
        b: &mut Builder,
        scope: &str,
        k: u64,
        x: ValueId,
    ) -> Result<ValueId, ImportError> {
        block(b, self, scope, self.layers + k, x)
    }
}

/// Layer `i`, whose paths begin with `h`.
fn block(
    b: &mut Builder,
    c: &LatentConfig,
    h: &str,
    i: u64,
    x: ValueId,
) -> Result<ValueId, ImportError> {
    let normed = norm(b, c.epsilon, &format!("{h}.norm_1"), x)?;
    let y = attention(b, c, &format!("{h}.attn"), normed)?;
    let x = b.add(format!("{h}.residual_1"), x, y)?;
    let normed = norm(b, c.epsilon, &format!("{h}.norm_2"), x)?;
    let y = match c.experts.as_ref().filter(|e| e.are_in(i)) {
        None => gated_mlp(b, c.activation, &format!("{h}.mlp"), DENSE, normed)?,
        Some(e) => mixture(b, c.activation, e, &format!("{h}.moe"), normed)?,
    };
    b.add(format!("{h}.residual_2"), x, y)
}

fn attention(
    b: &mut Builder,
    c: &LatentConfig,
    a: &str,
    x: ValueId,
) -> Result<ValueId, ImportError> {
    let q = match c.query_rank {
        None => b.linear(&format!("{a}.q"), "bsh,hnd->bsnd", x)?,
        Some(_) => {
            let q = b.linear(&format!("{a}.q_down"), "bsh,hr->bsr", x)?;
            let q = norm(b, LATENT_EPSILON, &format!("{a}.q_norm"), q)?;
            b.linear(&format!("{a}.q_up"), "bsr,rnd->bsnd", q)?
        }
    };
    let q = b.op(format!("{a}.rotary_q"), rotary(c, Some(c.turned)), &[q])?;
    let latent = b.linear(&format!("{a}.kv_down"), "bsh,hr->bsr", x)?;
    let latent = norm(b, LATENT_EPSILON, &format!("{a}.kv_norm"), latent)?;
    let k = b.linear(&format!("{a}.k_up"), "bsr,rnd->bsnd", latent)?;
    let v = b.linear(&format!("{a}.v_up"), "bsr,rnd->bsnd", latent)?;
    let shared = b.linear(&format!("{a}.k_turned"), "bsh,hd->bsd", x)?;
    let shared = b.op(format!("{a}.rotary_k"), rotary(c, None), &[shared])?;
    let k = b.op(format!("{a}.join_k"), OpKind::Join, &[shared, k])?;
    let attend = OpKind::Attention {
        scale: c.scale,
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
    b.linear(&format!("{a}.out"), "bsnd,ndh->bsh", y)
}

fn rotary(c: &LatentConfig, part: Option<u64>) -> OpKind {
    OpKind::Rotary {
        theta: c.rope_theta,
        scaling: c.rope_scaling,
        inverse: false,
        part,
        order: SequenceOrder::Natural,
    }
}

fn norm(b: &mut Builder, eps: f64, path: &str, x: ValueId) -> Result<ValueId, ImportError> {
    let gain = b.param(&format!("{path}.weight"))?;
    b.op(path, OpKind::RmsNorm { eps }, &[x, gain])
}
