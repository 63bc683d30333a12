//! The shape of a language model, read off its forward graph.

use ir::op::{Blocks, Bounds, RopeScaling, Unary};
use ir::{Graph, LayerId, Op, OpKind};
use serde::Serialize;
use std::collections::BTreeMap;

/// The shape of a decoder of equal blocks: an embedding, blocks with one attention each, a head.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelShape {
    /// The model's type (`gpt2`, `llama`, `mixtral`, ...).
    pub family: String,
    /// Blocks.
    pub layers: u64,
    /// Width of the residual stream.
    pub hidden: u64,
    /// Rows of the table of tokens.
    pub vocab: u64,
    /// Query heads.
    pub heads: u64,
    /// Heads of keys and values.
    pub kv_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Width of a dense MLP; none where all have experts.
    pub ffn: Option<u64>,
    /// Activation function of the MLP.
    pub activation: Option<Activation>,
    /// Whether the MLP has a gate.
    pub gated: bool,
    /// The norm.
    pub norm: Norm,
    /// Added to the variance in norms.
    pub norm_eps: f64,
    /// Whether gains of norms are stored less one.
    pub centred: bool,
    /// Tokens that a query looks back over, its own among them; all where there is none.
    pub window: Option<u64>,
    /// Rotary positions; none where they are learned.
    pub rotary: Option<Rotary>,
    /// Rows of the table of positions; none where they are rotary.
    pub positions: Option<u64>,
    /// Whether matmuls have biases.
    pub bias: bool,
    /// Whether queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether queries and keys are normed.
    pub qk_norm: bool,
    /// Whether the head reads the table of tokens.
    pub tied: bool,
    /// The mixture of experts, where there is one.
    pub experts: Option<Experts>,
}

/// Activation functions that frameworks have a name for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// GELU with the error function.
    Gelu,
    /// GELU, tanh approximation.
    GeluTanh,
    /// `x * sigmoid(x)`.
    Silu,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)^2`.
    SquaredRelu,
}

/// Norms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Norm {
    /// With mean and bias.
    Layer,
    /// Root mean square.
    Rms,
}

/// Rotary positions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Rotary {
    /// Base of the frequencies.
    pub theta: f64,
    /// How they are scaled.
    pub scaling: RopeScaling,
    /// The share of a head's elements that turn, the first of them: above 0, at most 1.
    pub share: f64,
}

/// A mixture of experts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Experts {
    /// Experts of a layer.
    pub count: u64,
    /// Experts of a token.
    pub top_k: u64,
    /// Whether the gates of a token sum to one.
    pub normalized: bool,
    /// Slots of an expert over the tokens that it gets on average.
    pub capacity_factor: f64,
    /// Width of an expert.
    pub ffn: u64,
    /// Width of the shared expert, where there is one.
    pub shared_ffn: Option<u64>,
    /// Which blocks have experts.
    pub in_layer: Vec<bool>,
}

impl ModelShape {
    /// Reads the shape off a forward graph; none where it is no such decoder.
    pub fn of(forward: &Graph, sequence: u64) -> Option<ModelShape> {
        let by_layer = layers(forward);
        let attends = |op: &&&Op| matches!(op.kind, OpKind::Attention { .. });
        let blocks: Vec<&Vec<&Op>> = by_layer
            .values()
            .filter(|ops| ops.iter().filter(attends).count() == 1)
            .collect();
        let first = *blocks.first()?;
        let lens = |path: &str| lens(forward, path);
        let tokens = table_of_tokens(forward)?;
        let attention = *first.iter().find(attends)?;
        let dims = |k: usize| {
            let ty = forward.ty(*attention.inputs.get(k)?);
            Some(ty.shape.bind(1))
        };
        let (queries, keys) = (dims(0)?, dims(1)?);
        let (&head_dim, &kv_heads) = (queries.last()?, keys.get(2)?);
        let heads = queries.get(2..queries.len() - 1)?.iter().product();
        let name = forward.layers.get(first.first()?.layer?.index())?;
        let of = |tail: &str| lens(&format!("{name}.{tail}"));
        let norm = first.iter().find_map(|op| match op.kind {
            OpKind::LayerNorm { eps } => Some((Norm::Layer, eps)),
            OpKind::RmsNorm { eps } => Some((Norm::Rms, eps)),
            _ => None,
        })?;
        let in_any = |tail: &str| {
            let mut names = blocks.iter().filter_map(|ops| {
                let name = forward.layers.get(ops.first()?.layer?.index())?;
                lens(&format!("{name}.{tail}"))
            });
            names.next()
        };
        let last = |tail: &str| in_any(tail).and_then(|l| l.last().copied());
        let gated = in_any("mlp.gate.weight").is_some() || in_any("moe.gate.weight").is_some();
        // Blocks of OPT, GPT-NeoX and BLOOM are put together otherwise, and so are Gemma's, whose gains of
        // root-mean-square norms are stored less one: no target knows them.
        let adds_one = |op: &&Op| matches!(op.kind, OpKind::Constant { .. });
        let centred = first.iter().any(adds_one);
        let squares = |op: &&Op| matches!(op.kind, OpKind::Unary { f: Unary::Square });
        let is_squared = first.iter().any(squares);
        let is_plain = !gated && in_any("mlp.up.weight").is_some();
        // Of latent attention no target's flags are written.
        let is_latent = first.iter().any(|op| matches!(op.kind, OpKind::Join));
        // Nor of state spaces, which stand in the place of attention in some blocks or all.
        let has_states = has_state_spaces(forward);
        // Nor of windows, which some blocks have and others have not, of blocks of keys, of scores with a
        // cap, and of those that fall with the distance.
        let bounds = bounds(&blocks)?;
        if centred && norm.0 == Norm::Rms
            || is_latent
            || has_states
            || (Bounds {
                window: None,
                ..bounds
            }) != Bounds::default()
            || is_sunk(forward)
            || forward.further() > 0
            || is_plain && !is_squared
        {
            return None;
        }
        let rotary = first.iter().find_map(|op| match op.kind {
            OpKind::Rotary {
                theta,
                scaling,
                part,
                ..
            } => Some(Rotary {
                theta,
                scaling,
                share: part.map_or(1.0, |part| part as f64 / head_dim as f64),
            }),
            _ => None,
        });
        Some(ModelShape {
            family: forward.name.clone(),
            layers: blocks.len() as u64,
            hidden: tokens.1,
            vocab: tokens.0,
            heads,
            kv_heads,
            head_dim,
            ffn: ["mlp.gate.weight", "mlp.fc.weight", "mlp.up.weight"]
                .into_iter()
                .find_map(last),
            activation: match is_squared {
                true => Some(Activation::SquaredRelu),
                false => first.iter().find_map(|op| activation(&op.kind)),
            },
            gated,
            norm: norm.0,
            norm_eps: norm.1,
            centred,
            window: bounds.window,
            rotary,
            positions: lens("embed.wpe.weight").and_then(|l| l.first().copied()),
            bias: of("attn.out.bias").is_some(),
            qkv_bias: of("attn.q.bias").is_some() || of("attn.qkv.bias").is_some(),
            qk_norm: of("attn.q_norm.weight").is_some(),
            tied: lens("head.lm_head.weight").is_none(),
            experts: experts(
                &blocks,
                sequence,
                last("moe.gate.weight"),
                last("moe.shared.gate.weight"),
            ),
        })
    }
}

/// Whether something reads the log-sum-exp of an attention, as sinks do.
fn is_sunk(forward: &Graph) -> bool {
    let attends = |op: &&Op| matches!(op.kind, OpKind::Attention { .. });
    let sums: Vec<_> = forward
        .ops()
        .iter()
        .filter(attends)
        .map(|op| op.outputs[1])
        .collect();
    let mut read = forward.ops().iter().flat_map(|op| &op.inputs);
    read.any(|v| sums.contains(v))
}

/// Whether a block has a state space.
fn has_state_spaces(forward: &Graph) -> bool {
    let mut ops = forward.ops().iter();
    ops.any(|op| matches!(op.kind, OpKind::StateSpace { .. }))
}

/// The bounds that the attention of all blocks has; none where blocks differ.
fn bounds(blocks: &[&Vec<&Op>]) -> Option<Bounds> {
    let mut all = blocks
        .iter()
        .flat_map(|ops| ops.iter().copied().filter_map(bounds_of));
    let first = all.next()?;
    all.all(|b| b == first).then_some(first)
}

/// The bounds of an op, where it is an attention.
fn bounds_of(op: &Op) -> Option<Bounds> {
    match op.kind {
        OpKind::Attention { bounds, .. } => Some(bounds),
        _ => None,
    }
}

/// The patterns of blocks that queries of the model's attentions see, each once.
pub(crate) fn seen_blocks(forward: &Graph) -> Vec<Blocks> {
    let mut all: Vec<Blocks> = Vec::new();
    let patterns = forward.ops().iter().filter_map(bounds_of);
    for blocks in patterns.filter_map(|b| b.blocks) {
        if !all.contains(&blocks) {
            all.push(blocks);
        }
    }
    all
}

/// The reason why a model has no shape, in a sentence's words.
pub(crate) fn why_unknown(forward: &Graph) -> &'static str {
    let has = |is: &dyn Fn(&OpKind) -> bool| forward.ops().iter().any(|op| is(&op.kind));
    let any = |is: &dyn Fn(Bounds) -> bool| forward.ops().iter().filter_map(bounds_of).any(is);
    if has_state_spaces(forward) {
        "the model has state spaces (Mamba-2), whose flags are not written"
    } else if any(&|b| b.alibi) {
        "scores of the model's attention fall with the distance (ALiBi), for which there are no flags"
    } else if any(&|b| b.blocks.is_some()) {
        "queries of the model's attention see some blocks of keys alone, for which there are no flags"
    } else if any(&|b| b.cap.is_some()) {
        "scores of the model's attention are capped, for which there are no flags"
    } else if is_sunk(forward) {
        "the model's attention has sinks, whose flags are not written"
    } else if any(&|b| b.window.is_some()) {
        "some of the model's blocks attend within a window and others do not, whose flags are not written"
    } else if forward.further() > 0 {
        "modules of the model predict further tokens, whose flags are not written"
    } else if has(&|kind| matches!(kind, OpKind::Join)) {
        "the model's attention is latent, whose flags are not written"
    } else {
        "the model's blocks are put together otherwise than those that flags describe"
    }
}

/// The ops of each layer.
fn layers(graph: &Graph) -> BTreeMap<LayerId, Vec<&Op>> {
    let mut all: BTreeMap<LayerId, Vec<&Op>> = BTreeMap::new();
    for op in graph.ops() {
        if let Some(layer) = op.layer {
            all.entry(layer).or_default().push(op);
        }
    }
    all
}

/// The lengths of the parameter at `path`.
fn lens(graph: &Graph, path: &str) -> Option<Vec<u64>> {
    let op = graph.op(graph.find(path)?);
    let is_state = matches!(op.kind, OpKind::State { .. });
    let value = op.outputs.first().filter(|_| is_state)?;
    Some(graph.ty(*value).shape.bind(1))
}

/// Rows and width of the table in which tokens are looked up: that of the first lookup.
fn table_of_tokens(graph: &Graph) -> Option<(u64, u64)> {
    let mut ops = graph.ops().iter();
    let lookup = ops.find(|op| matches!(op.kind, OpKind::Embedding))?;
    match graph.ty(*lookup.inputs.first()?).shape.bind(1)[..] {
        [rows, width] => Some((rows, width)),
        _ => None,
    }
}

fn activation(kind: &OpKind) -> Option<Activation> {
    match kind {
        OpKind::Unary { f } => match f {
            Unary::GeluErf => Some(Activation::Gelu),
            Unary::GeluTanh => Some(Activation::GeluTanh),
            Unary::Silu => Some(Activation::Silu),
            Unary::Relu => Some(Activation::Relu),
            _ => None,
        },
        _ => None,
    }
}

fn experts(
    blocks: &[&Vec<&Op>],
    sequence: u64,
    ffn: Option<u64>,
    shared_ffn: Option<u64>,
) -> Option<Experts> {
    let route = |ops: &Vec<&Op>| {
        ops.iter().find_map(|op| match op.kind {
            OpKind::Route {
                top_k,
                capacity,
                normalize,
                ..
            } => Some((top_k, capacity, normalize)),
            _ => None,
        })
    };
    let count = |ops: &Vec<&Op>| {
        ops.iter().find_map(|op| match op.kind {
            OpKind::Dispatch { experts, .. } => Some(experts),
            _ => None,
        })
    };
    let (top_k, capacity, normalized) = blocks.iter().find_map(|ops| route(ops))?;
    let count = blocks.iter().find_map(|ops| count(ops))?;
    let on_average = (top_k * sequence) as f64 / count as f64;
    Some(Experts {
        count,
        top_k,
        normalized,
        capacity_factor: capacity as f64 / on_average,
        ffn: ffn?,
        shared_ffn,
        in_layer: blocks.iter().map(|ops| route(ops).is_some()).collect(),
    })
}
