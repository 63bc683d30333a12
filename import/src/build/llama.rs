//! Llama: pre-norm decoder with RMS norms, rotary positions, grouped KV heads and a gated
//! MLP (Touvron et al. 2023; grouped heads of Ainslie et al. 2023; SwiGLU of Shazeer 2020).
//! Mixtral and Qwen3-MoE: the same with a mixture of gated MLPs, each token's best few of which
//! a router chooses (Jiang et al. 2024; Yang et al. 2025). Its tokens go to slots of the experts
//! and back; those that find no slot pass by on the residual. In Qwen2-MoE every token goes to one
//! more MLP, the shared expert, whose result is scaled by a gate of its own (Qwen team 2024). Gemma
//! scales what it looks up and stores gains less one (Gemma team 2024). Gemma 2 and 3 have norms behind
//! attention and MLP too, and layers whose queries look back over a window of tokens alone. So does
//! gpt-oss, whose heads have **sinks**: a logit each that joins the softmax of every row and has no value
//! (OpenAI 2025). With `l` the log-sum-exp of a row, it leaves the share `e^l / (e^l + e^sink)` of what
//! attention gives, so attention knows nothing of it:
//!
//! ```text
//! q, k, v ─ attend ─┬ o ────────────────────────── scale rows ─ out
//!                   └ lse ─ minus sinks ─ sigmoid ─┘
//! ```

use super::Builder;
use crate::ImportError;
use crate::config::{Clamp, ExpertsConfig, Family, LlamaConfig, blocks_of_sequence};
use ir::ValueId;
use ir::op::{Binary, Bounds, InputKind, OpKind, Unary};

pub(super) fn build(b: &mut Builder, c: &LlamaConfig) -> Result<(), ImportError> {
    b.start_layer("embed");
    let tokens = b.input("tokens", InputKind::Tokens)?;
    let table = b.param("embed.wte.weight")?;
    let mut x = b.op("embed.wte", OpKind::Embedding, &[table, tokens])?;
    if c.family.scales_embeddings() {
        let f = Unary::Scale {
            by: (c.hidden as f64).sqrt(),
        };
        x = b.op("embed.scale", OpKind::Unary { f }, &[x])?;
    }
    for i in 0..c.layers {
        b.start_layer(format!("h.{i}"));
        let experts = c.experts.as_ref().filter(|e| e.are_in(i));
        x = block(b, c, experts, i, x)?;
    }
    b.start_layer("head");
    let x = norm(b, c, "head.norm", x)?;
    b.bounded_loss(x, c.tied.then_some(table), c.logit_cap)
}

fn block(
    b: &mut Builder,
    c: &LlamaConfig,
    experts: Option<&ExpertsConfig>,
    layer: u64,
    x: ValueId,
) -> Result<ValueId, ImportError> {
    let h = &format!("h.{layer}");
    let normed = norm(b, c, &format!("{h}.norm_1"), x)?;
    let y = attention(b, c, layer, normed)?;
    let y = behind(b, c, h, ("post_1", "attn.dropout"), y)?;
    let x = b.add(format!("{h}.residual_1"), x, y)?;
    let normed = norm(b, c, &format!("{h}.norm_2"), x)?;
    let y = match experts {
        None => gated_mlp(b, c.activation, &format!("{h}.mlp"), DENSE, normed)?,
        Some(e) => mixture(b, c.activation, e, &format!("{h}.moe"), normed)?,
    };
    let y = behind(b, c, h, ("post_2", "mlp.dropout"), y)?;
    b.add(format!("{h}.residual_2"), x, y)
}

/// The op behind attention and MLP: a norm in Gemma 2 and 3, dropout in Phi-3.
fn behind(
    b: &mut Builder,
    c: &LlamaConfig,
    h: &str,
    (post, dropout): (&str, &str),
    y: ValueId,
) -> Result<ValueId, ImportError> {
    match c.family {
        _ if c.family.has_post_norms() => norm(b, c, &format!("{h}.{post}"), y),
        Family::Phi3 => b.dropout(&format!("{h}.{dropout}"), y),
        _ => Ok(y),
    }
}

/// The einsums of a gated MLP, into it and out of it: for one MLP, and for all experts at once.
pub(super) const DENSE: [&str; 2] = ["bsh,hf->bsf", "bsf,fh->bsh"];
pub(super) const EXPERTS: [&str; 2] = ["ebch,ehf->ebcf", "ebcf,efh->ebch"];

pub(super) fn gated_mlp(
    b: &mut Builder,
    activation: Unary,
    scope: &str,
    [into, out_of]: [&str; 2],
    x: ValueId,
) -> Result<ValueId, ImportError> {
    let gate = b.linear(&format!("{scope}.gate"), into, x)?;
    let gate = b.op(
        format!("{scope}.act"),
        OpKind::Unary { f: activation },
        &[gate],
    )?;
    let up = b.linear(&format!("{scope}.up"), into, x)?;
    let y = b.op(
        format!("{scope}.mul"),
        OpKind::Binary { f: Binary::Mul },
        &[gate, up],
    )?;
    b.linear(&format!("{scope}.down"), out_of, y)
}

/// The gates and slots of each token's experts.
pub(super) fn route(
    b: &mut Builder,
    e: &ExpertsConfig,
    scope: &str,
    x: ValueId,
) -> Result<(ValueId, ValueId), ImportError> {
    let capacity = e.capacity(b.options.sequence);
    let logits = b.linear(&format!("{scope}.router"), "bsh,he->bse", x)?;
    let route = OpKind::Route {
        top_k: e.top_k,
        capacity,
        normalize: e.normalize,
        scores: e.scores,
        groups: e.groups,
    };
    let mut operands = vec![logits];
    if e.choice_bias {
        operands.push(b.param(&format!("{scope}.choice.bias"))?);
    }
    let routed = b.ops(format!("{scope}.route"), route, &operands)?;
    let (mut gates, slots) = (routed[0], routed[1]);
    if e.gate_scale != 1.0 {
        let f = Unary::Scale { by: e.gate_scale };
        gates = b.op(format!("{scope}.gate_scale"), OpKind::Unary { f }, &[gates])?;
    }
    Ok((gates, slots))
}

pub(super) fn mixture(
    b: &mut Builder,
    activation: Unary,
    e: &ExpertsConfig,
    scope: &str,
    x: ValueId,
) -> Result<ValueId, ImportError> {
    let capacity = e.capacity(b.options.sequence);
    let (gates, slots) = route(b, e, scope, x)?;
    let dispatch = OpKind::Dispatch {
        experts: e.count,
        capacity,
    };
    let y = b.op(format!("{scope}.dispatch"), dispatch, &[x, slots])?;
    let y = match e.clamp {
        None => gated_mlp(b, activation, scope, EXPERTS, y)?,
        Some(clamp) => clamped_mlp(b, clamp, scope, y)?,
    };
    let combine = format!("{scope}.combine");
    let y = b.op(combine, OpKind::Combine, &[y, slots, gates])?;
    if e.shared.is_none() {
        return Ok(y);
    }
    let shared = format!("{scope}.shared");
    let shared = match e.shared_gate {
        true => scaled_expert(b, activation, &shared, x)?,
        false => gated_mlp(b, activation, &shared, DENSE, x)?,
    };
    b.add(format!("{scope}.add_shared"), y, shared)
}

/// Experts with biases, whose gate and up are kept within bounds.
fn clamped_mlp(
    b: &mut Builder,
    Clamp { alpha, limit }: Clamp,
    scope: &str,
    x: ValueId,
) -> Result<ValueId, ImportError> {
    let [into, out_of] = EXPERTS;
    let gate = biased(b, &format!("{scope}.gate"), into, x)?;
    let up = biased(b, &format!("{scope}.up"), into, x)?;
    let act = OpKind::ClampedSwiglu { alpha, limit };
    let y = b.op(format!("{scope}.act"), act, &[gate, up])?;
    biased(b, &format!("{scope}.down"), out_of, y)
}

/// A matmul of all experts, and their biases.
fn biased(b: &mut Builder, scope: &str, einsum: &str, x: ValueId) -> Result<ValueId, ImportError> {
    let weight = b.param(&format!("{scope}.weight"))?;
    let y = b.dot(scope, einsum, x, weight)?;
    let bias = b.param(&format!("{scope}.bias"))?;
    b.op(format!("{scope}.add_bias"), OpKind::ExpertBias, &[y, bias])
}

/// The MLP of all tokens, scaled token by token.
fn scaled_expert(
    b: &mut Builder,
    activation: Unary,
    scope: &str,
    x: ValueId,
) -> Result<ValueId, ImportError> {
    let y = gated_mlp(b, activation, scope, DENSE, x)?;
    let gate = b.linear(&format!("{scope}.router"), "bsh,h->bs", x)?;
    let sigmoid = OpKind::Unary { f: Unary::Sigmoid };
    let gate = b.op(format!("{scope}.router_act"), sigmoid, &[gate])?;
    b.op(format!("{scope}.scale"), OpKind::ScaleRows, &[y, gate])
}

fn attention(
    b: &mut Builder,
    c: &LlamaConfig,
    layer: u64,
    x: ValueId,
) -> Result<ValueId, ImportError> {
    let h = &format!("h.{layer}");
    let (into, out_of) = match c.heads / c.kv_heads {
        1 => ("bsh,hkd->bskd", "bskd,kdh->bsh"),
        _ => ("bsh,hkgd->bskgd", "bskgd,kgdh->bsh"),
    };
    let q = b.linear(&format!("{h}.attn.q"), into, x)?;
    let k = b.linear(&format!("{h}.attn.k"), "bsh,hkd->bskd", x)?;
    let v = b.linear(&format!("{h}.attn.v"), "bsh,hkd->bskd", x)?;
    let (q, k) = match c.qk_norm {
        true => (
            norm(b, c, &format!("{h}.attn.q_norm"), q)?,
            norm(b, c, &format!("{h}.attn.k_norm"), k)?,
        ),
        false => (q, k),
    };
    let (theta, scaling) = c.rotation_in(layer);
    let rotary = OpKind::Rotary {
        theta,
        scaling,
        inverse: false,
        part: (c.turned < c.head_dim).then_some(c.turned),
        order: ir::op::SequenceOrder::Natural,
    };
    let q = b.op(format!("{h}.attn.rotary_q"), rotary.clone(), &[q])?;
    let k = b.op(format!("{h}.attn.rotary_k"), rotary, &[k])?;
    let attend = OpKind::Attention {
        scale: c.scale,
        dropout: b.options.dropout,
        key: String::new(),
        order: ir::op::SequenceOrder::Natural,
        keys: Default::default(),
        bounds: Bounds {
            window: c.window_in(layer, b.options.sequence),
            blocks: blocks_of_sequence(c.sparse, b.options.sequence),
            cap: c.score_cap,
            alibi: false,
        },
    };
    let attended = b.ops(format!("{h}.attn.attend"), attend, &[q, k, v])?;
    let y = match c.family.has_sinks() {
        false => attended[0],
        true => sunk(b, &format!("{h}.attn"), &attended)?,
    };
    b.linear(&format!("{h}.attn.out"), out_of, y)
}

/// The share of an attention's result and log-sum-exp that the heads' sinks leave.
fn sunk(b: &mut Builder, scope: &str, attended: &[ValueId]) -> Result<ValueId, ImportError> {
    let sinks = b.param(&format!("{scope}.sinks"))?;
    let minus = OpKind::Binary { f: Binary::Sub };
    let gap = b.op(format!("{scope}.sink_gap"), minus, &[attended[1], sinks])?;
    let sigmoid = OpKind::Unary { f: Unary::Sigmoid };
    let share = b.op(format!("{scope}.sink_share"), sigmoid, &[gap])?;
    b.op(
        format!("{scope}.sink"),
        OpKind::ScaleRows,
        &[attended[0], share],
    )
}

fn norm(b: &mut Builder, c: &LlamaConfig, path: &str, x: ValueId) -> Result<ValueId, ImportError> {
    let mut gain = b.param(&format!("{path}.weight"))?;
    if c.family.has_centred_gains() {
        gain = b.centred(path, gain)?;
    }
    b.op(path, OpKind::RmsNorm { eps: c.epsilon }, &[x, gain])
}
