//! The ops: one enum, and a file for each family of them with shape rule, sharding rule, work
//! and gradient.
//!
//! To add an op: a variant here with its attributes, name, numbers of operands and results and
//! family; its arms in the family's file; a kernel in `runtime`; and a row in the table test of
//! `tests/`, which fails until all are present.
//!
//! Conventions: dims are outermost first; activations are `[batch, sequence, ...]`;
//! attention heads are their own dims (`heads = kv_heads x groups`), so that sharding heads
//! never splits a head. Elementwise operands of lower rank broadcast over leading dims.

mod attention;
mod blocks;
mod bounds;
mod conv;
mod einsum;
mod elementwise;
mod embedding;
mod experts;
mod family;
mod group_norm;
mod keys;
mod loss;
mod matmul;
mod movement;
mod norm;
mod order;
mod rule;
mod shape;
mod source;
mod state_space;
mod update;
mod work;

pub use blocks::Blocks;
pub use bounds::{Bounds, alibi_slope};
pub use einsum::Einsum;
pub(crate) use family::Family;
pub use keys::Keys;
pub use order::{Run, SequenceOrder};
pub use rule::{
    Assignment, AxisUse, DimFactor, Factor, FactorRole, OpStrategy, ShardingRule, StrategyError,
};
pub use source::MOST_FURTHER;
pub use work::{MatmulShape, Work};

use crate::sharding::ReduceKind;
use crate::{DType, Dim, TensorType};
use serde::{Deserialize, Serialize};
use std::ops::RangeInclusive;

/// How a parameter is initialised when no weights are given. Values depend on the seed, the
/// parameter's name and the element's global index only, never on the layout.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Init {
    /// Every element zero.
    Zeros,
    /// Every element one.
    Ones,
    /// Normal with mean 0 and this standard deviation.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// The logarithm of one more than the element's index: 0, ln 2, ln 3, .. (the decay of state
    /// spaces, Gu & Dao 2023).
    LogCount,
    /// Numbers whose softplus is log-uniform in `low..high` (the time steps of state spaces, Gu & Dao
    /// 2023).
    TimeStep {
        /// The least time step.
        low: f64,
        /// The largest one.
        high: f64,
    },
}

/// The content of a per-rank or per-microbatch input.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum InputKind {
    /// Token ids `[batch, sequence]`.
    Tokens,
    /// Next-token ids `[batch, sequence]`; negative values are ignored by the loss.
    Labels,
    /// Synthetic images `f32[batch, height, width, channels]`: noise that each sample's first
    /// token names. A sample of an image model has one position, so its label is the next token.
    Images,
    /// Token ids `[batch, sequence]`, of each position those `by` positions on: what a module for
    /// multi-token prediction embeds. Together with the tokens a sample then has more of them than
    /// `sequence + 1` ([`InputKind::shift`]).
    FurtherTokens {
        /// How far on, at least 1.
        by: u32,
    },
    /// Next-token ids `[batch, sequence]`, of each position those `by` positions on.
    FurtherLabels {
        /// How far on, at least 1.
        by: u32,
    },
}

impl InputKind {
    /// Returns which token of a sample comes first: `[.., i]` is the sample's token `i + shift`. An
    /// image is named by the first.
    pub fn shift(self) -> u64 {
        match self {
            InputKind::Tokens | InputKind::Images => 0,
            InputKind::Labels => 1,
            InputKind::FurtherTokens { by } => u64::from(by),
            InputKind::FurtherLabels { by } => 1 + u64::from(by),
        }
    }
    /// Returns how many tokens a sample has behind its last label, `sequence + 1 + further` in all,
    /// for inputs of these kinds.
    pub fn further(kinds: impl IntoIterator<Item = InputKind>) -> u64 {
        let most = kinds.into_iter().map(InputKind::shift).max();
        most.unwrap_or(0).saturating_sub(1)
    }
}

/// Frequencies of a rotary embedding, as in Hugging Face `modeling_rope_utils`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RopeScaling {
    /// Plain frequencies `theta^(-2i/d)`.
    None,
    /// All frequencies divided by `factor`.
    Linear {
        /// Divisor of every frequency.
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided by `factor`, high ones kept, a ramp between.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Wavelengths above `original_max_position / low_freq_factor` are scaled.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_position / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context length of pre-training.
        original_max_position: u64,
    },
    /// YaRN (Peng et al. 2023): frequencies that turn more than `beta_fast` times within the
    /// context of pre-training are kept, those that turn less than `beta_slow` times divided by
    /// `factor`, a ramp over the pairs between; sines and cosines are multiplied by `magnitude`.
    Yarn {
        /// Divisor of low frequencies.
        factor: f64,
        /// Turns above which a frequency is kept.
        beta_fast: f64,
        /// Turns below which a frequency is divided.
        beta_slow: f64,
        /// Context length of pre-training.
        original_max_position: u64,
        /// Whether the ends of the ramp are whole pairs.
        truncate: bool,
        /// Factor of sines and cosines.
        magnitude: f64,
    },
}

/// The function of a router's logits before a token's experts are chosen.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Scores {
    /// The softmax over all experts.
    #[default]
    Softmax,
    /// A sigmoid for each expert (DeepSeek-V3).
    Sigmoid,
}

impl Scores {
    /// Whether scores are a softmax.
    pub fn are_softmax(&self) -> bool {
        *self == Scores::Softmax
    }
}

/// Groups of experts, of which a token chooses few first: `count` groups of neighbours, of equal
/// size. The `kept` ones are those in which the `best` largest scores sum to most (DeepSeek-V2,
/// section 2.2.2, has the largest alone).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct ExpertGroups {
    /// How many there are.
    pub count: u64,
    /// How many a token's experts come from.
    pub kept: u64,
    /// The scores of a group that are added up.
    pub best: u64,
}

/// Elementwise functions of one operand.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Unary {
    /// `-x`.
    Neg,
    /// `by * x`.
    Scale {
        /// The constant factor.
        by: f64,
    },
    /// GELU with the error function (Hendrycks & Gimpel 2016).
    GeluErf,
    /// GELU, tanh approximation.
    GeluTanh,
    /// `x * sigmoid(x)`.
    Silu,
    /// `max(x, 0)`.
    Relu,
    /// `exp(x)`.
    Exp,
    /// `tanh(x)`.
    Tanh,
    /// `x * x`.
    Square,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
}

/// Elementwise functions of two operands; the second may have lower rank and then broadcasts
/// over the leading dims.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Binary {
    /// `a + b`.
    Add,
    /// `a - b`.
    Sub,
    /// `a * b`.
    Mul,
    /// Gradient of GELU (erf): operands `(x, dy)`, result `dy * gelu'(x)`.
    GeluErfGrad,
    /// Gradient of GELU (tanh): operands `(x, dy)`.
    GeluTanhGrad,
    /// Gradient of SiLU: operands `(x, dy)`.
    SiluGrad,
    /// Gradient of ReLU: operands `(x, dy)`.
    ReluGrad,
}

/// The kind of an op with its attributes. Operand and result shapes are in each doc line;
/// `f(...)` marks a float of any dtype.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OpKind {
    /// Data of a microbatch: `() -> i32[B, S]`, images `() -> f32[B, H, W, C]`.
    Input {
        /// Which data.
        kind: InputKind,
    },
    /// A persistent tensor (parameter, moment, scalar): `() -> ty`. Its value is what the
    /// last step's write left.
    State {
        /// Initial value.
        init: Init,
        /// Whether weight decay applies: true for parameters that model files store with two
        /// or more dims.
        decay: bool,
    },
    /// A constant scalar: `() -> f32[]`.
    Constant {
        /// The value.
        value: f64,
    },
    /// The same tensor; exists so that a layout change is a value that consumers share:
    /// `(x) -> x`.
    Layout,
    /// Conversion: `(x) -> x` as `dtype`.
    Cast {
        /// Element type of the result.
        dtype: DType,
    },
    /// Elementwise: `(x) -> x`.
    Unary {
        /// The function.
        f: Unary,
    },
    /// Elementwise with trailing-aligned broadcast of the second operand: `(a, b) -> a`.
    Binary {
        /// The function.
        f: Binary,
    },
    /// Rows times a number each: `(x[.., H], scales[..]) -> x * scales`, where `scales` has the dims
    /// of `x` but the last, and its type or f32 (the gate of Qwen2-MoE's shared expert; the share of an
    /// attention that its sink leaves).
    ScaleRows,
    /// A gated activation whose operands are kept within bounds: `(gate, up) -> y` of one shape, with
    /// `g = min(gate, limit)` and `u = min(max(up, -limit), limit)`: `y = (u + 1) g sigmoid(alpha g)`
    /// (gpt-oss, OpenAI 2025).
    ClampedSwiglu {
        /// Factor within the sigmoid.
        alpha: f64,
        /// The bound, above zero.
        limit: f64,
    },
    /// Gradient of `ClampedSwiglu`: `(gate, up, dy) -> (dgate, dup)`, with its attributes. Zero beyond
    /// the bounds, not on them.
    ClampedSwigluGrad {
        /// Factor within the sigmoid.
        alpha: f64,
        /// The bound, above zero.
        limit: f64,
    },
    /// Copies over new leading dims: `(x[..]) -> [leading.., x..]`.
    Broadcast {
        /// The leading dims (may contain the batch).
        #[serde(with = "dims_serde")]
        #[schemars(with = "Vec<String>")]
        leading: Vec<Dim>,
    },
    /// Reduction over `dims` (removed): `(x) -> y`. Only `sum` and `max`.
    Reduce {
        /// Sum or max.
        kind: ReduceKind,
        /// Dims to reduce, ascending.
        dims: Vec<usize>,
    },
    /// Same elements in row-major order, another shape: `(x) -> y`. The batch dim stays
    /// first and alone.
    Reshape {
        /// The new shape.
        #[serde(with = "dims_serde")]
        #[schemars(with = "Vec<String>")]
        shape: Vec<Dim>,
    },
    /// Dims permuted: result dim `i` is operand dim `perm[i]`.
    Transpose {
        /// The permutation.
        perm: Vec<usize>,
    },
    /// Elements `start..start+len` along `dim`: `(x) -> y`.
    Slice {
        /// The dim.
        dim: usize,
        /// First element.
        start: u64,
        /// Number of elements.
        len: u64,
    },
    /// Inverse of `Slice`, zeros elsewhere: `(y) -> x` with `len` elements along `dim`.
    Pad {
        /// The dim.
        dim: usize,
        /// Where the operand's first element goes.
        start: u64,
        /// Length of the result along `dim`.
        len: u64,
    },
    /// Takes a dim of length n apart: `(x) -> n tensors` without `dim`.
    Unstack {
        /// The dim that disappears.
        dim: usize,
    },
    /// Inverse of `Unstack`: `(n tensors) -> x` with a new dim `dim` of length n.
    Stack {
        /// Where the new dim goes.
        dim: usize,
    },
    /// Matrix multiplication in general, `(lhs, rhs) -> out`, XLA's dot-general as an einsum.
    DotGeneral {
        /// Labels of the dims of both operands and the result.
        einsum: Einsum,
    },
    /// Rows of a table: `(table[V, H], ids i32[B, S]) -> [B, S, H]`. A split `V` gives
    /// partial sums (ids of other shards give zero rows).
    Embedding,
    /// Gradient of `Embedding` for the table: `(ids i32[B, S], dy[B, S, H]) -> [V, H]`.
    EmbeddingGrad {
        /// Number of rows `V`.
        vocab: u64,
    },
    /// Layer normalisation over the last dim: `(x[.., H], gamma[H], beta[H]) ->
    /// (y[.., H], mean f32[..], rstd f32[..])` (Ba, Kiros & Hinton 2016).
    LayerNorm {
        /// Added to the variance.
        eps: f64,
    },
    /// Input gradient: `(dy, x, gamma, mean, rstd) -> dx`.
    LayerNormGradInput,
    /// Weight gradient: `(dy, x, mean, rstd) -> (dgamma[H], dbeta[H])`.
    LayerNormGradWeight,
    /// Root-mean-square normalisation over the last dim: `(x[.., H], gamma[H]) ->
    /// (y[.., H], rstd f32[..])` (Zhang & Sennrich 2019).
    RmsNorm {
        /// Added to the mean square.
        eps: f64,
    },
    /// Input gradient: `(dy, x, gamma, rstd) -> dx`.
    RmsNormGradInput,
    /// Weight gradient: `(dy, x, rstd) -> dgamma[H]`.
    RmsNormGradWeight,
    /// Group normalisation of images whose channels are groups of `C`: `(x[N, .., G, C],
    /// gamma[G, C], beta[G, C]) -> (y like x, mean f32[N, G], rstd f32[N, G])`, statistics of each
    /// sample and group (Wu & He 2018). They do not depend on other samples, so neither on ranks
    /// nor on microbatches, as those of a batch norm would.
    GroupNorm {
        /// Added to the variance.
        eps: f64,
    },
    /// Input gradient: `(dy, x, gamma, mean, rstd) -> dx`.
    GroupNormGradInput,
    /// Weight gradient: `(dy, x, mean, rstd) -> (dgamma[G, C], dbeta[G, C])`.
    GroupNormGradWeight,
    /// Convolution of images, channels last: `(x[N, H, W, in..], w[KH, KW, in.., out..]) ->
    /// y[N, OH, OW, out..]` with `OH = (H + 2 padding - KH) / stride + 1`, zeros around the
    /// image. Input and output channels may be several dims each, as groups of channels are.
    Conv2d {
        /// Pixels from one window to the next.
        stride: u64,
        /// Pixels of zeros on each side.
        padding: u64,
    },
    /// Gradient of `Conv2d` for the image: `(w, dy) -> dx`, with its attributes.
    Conv2dGradInput {
        /// Pixels from one window to the next.
        stride: u64,
        /// Pixels of zeros on each side.
        padding: u64,
        /// Height and width of the image.
        size: [u64; 2],
    },
    /// Gradient of `Conv2d` for the weight: `(x, dy) -> dw`, with its attributes.
    Conv2dGradWeight {
        /// Pixels from one window to the next.
        stride: u64,
        /// Pixels of zeros on each side.
        padding: u64,
        /// Height and width of a window.
        kernel: [u64; 2],
    },
    /// Largest element of each square window, channel by channel: `(x[N, H, W, ..]) ->
    /// y[N, OH, OW, ..]`. What lies outside of the image is no candidate.
    MaxPool2d {
        /// Height and width of a window.
        kernel: u64,
        /// Pixels from one window to the next.
        stride: u64,
        /// Pixels around the image on each side that windows may cover; at most half of one.
        padding: u64,
    },
    /// Gradient of `MaxPool2d`: `(x, dy) -> dx`. A window's gradient goes to its first largest
    /// element, row by row.
    MaxPool2dGrad {
        /// Height and width of a window.
        kernel: u64,
        /// Pixels from one window to the next.
        stride: u64,
        /// Pixels around the image on each side that windows may cover.
        padding: u64,
    },
    /// Rotary position embedding, rotate-half convention, on `x[B, S, .., D]`: `(x) -> y`
    /// (Su et al. 2021). `inverse` rotates back: the gradient. A scaling's `magnitude` multiplies
    /// both ways, as a gradient wants it.
    Rotary {
        /// Base of the frequencies.
        theta: f64,
        /// Frequency scaling.
        scaling: RopeScaling,
        /// Rotate by the negative angle.
        inverse: bool,
        /// The elements of a head that turn, the first of them, an even number; all where absent.
        /// Element `i` of their first half is paired with element `i + part / 2`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        part: Option<u64>,
        /// How the sequence is stored.
        #[serde(default, skip_serializing_if = "SequenceOrder::is_natural")]
        order: SequenceOrder,
    },
    /// Causal attention with grouped KV heads: `(q[B,S,K,D] or [B,S,K,G,D], k[B,S,K,D],
    /// v[B,S,K,V]) -> (o[B,S,K,V] or [B,S,K,G,V], lse f32[B,S,K] or [B,S,K,G])`. Values are as wide
    /// as keys but in latent attention. Saves no scores (FlashAttention, Dao et al. 2022).
    Attention {
        /// Multiplies the scores.
        scale: f64,
        /// Dropout probability on the attention weights.
        dropout: f64,
        /// Path of the forward op: the key of its dropout mask. Empty in a model, where it is
        /// the op's own.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        key: String,
        /// How the sequence is stored.
        #[serde(default, skip_serializing_if = "SequenceOrder::is_natural")]
        order: SequenceOrder,
        /// The keys that an instruction looks at.
        #[serde(default, skip_serializing_if = "Keys::are_all")]
        keys: Keys,
        /// The bounds of scores.
        #[serde(default, skip_serializing_if = "Bounds::are_none")]
        bounds: Bounds,
    },
    /// Gradient of `Attention`: `(q, k, v, o, lse, do) -> (dq, dk, dv)`, with a seventh operand `dlse`
    /// like `lse` where the loss depends on the log-sum-exp too.
    AttentionGrad {
        /// Multiplies the scores.
        scale: f64,
        /// Dropout probability of the forward op.
        dropout: f64,
        /// Path of the forward op: the key of its dropout mask.
        key: String,
        /// How the sequence is stored.
        #[serde(default, skip_serializing_if = "SequenceOrder::is_natural")]
        order: SequenceOrder,
        /// The keys that an instruction looks at.
        #[serde(default, skip_serializing_if = "Keys::are_all")]
        keys: Keys,
        /// The bounds of scores.
        #[serde(default, skip_serializing_if = "Bounds::are_none")]
        bounds: Bounds,
    },
    /// Elements of each token in front of the elements of each of its rows: `(x[B,S,N],
    /// y[B,S,..,M]) -> [B,S,..,N+M]`. The dims of `x` but the last are the first of `y` (the part of
    /// the keys that all heads share, in latent attention: DeepSeek-V2, 2024).
    Join,
    /// Convolution of each channel with its own past: `(x[B, S, channels..], w[channels.., K]) -> y`
    /// like `x`, the sum over `i < K` of `w[i]` times the token `K - 1 - i` before; zeros before the
    /// first token (Mamba, Gu & Dao 2023).
    CausalConv,
    /// Gradient of `CausalConv` for its input: `(w, dy) -> dx`.
    CausalConvGradInput,
    /// Gradient of `CausalConv` for its weight: `(x, dy) -> dw`.
    CausalConvGradWeight {
        /// Weights of a channel.
        kernel: u64,
    },
    /// Scan of a state space over the sequence: `(x[B,S,G,R,P], dt[B,S,G,R], b[B,S,G,N], c[B,S,G,N],
    /// a_log[G,R], d[G,R], dt_bias[G,R]) -> y` like `x`, of one type, for `R` heads in each of `G` groups
    /// (Mamba-2, Dao & Gu 2024; the recurrence is in the family's file). Keeps no states.
    StateSpace {
        /// Tokens of a chunk.
        chunk: u64,
        /// The least time step.
        dt_min: f64,
    },
    /// Gradient of `StateSpace`: `(x, dt, b, c, a_log, d, dt_bias, dy) -> (dx, ddt, db, dc, da_log, dd,
    /// ddt_bias)`, with its attributes. Makes the states again.
    StateSpaceGrad {
        /// Tokens of a chunk.
        chunk: u64,
        /// The least time step.
        dt_min: f64,
    },
    /// Counter-based dropout of activations `x[B, ..]`: `(x) -> x * mask / (1 - p)`. It is its
    /// own gradient: the backward op carries the same `key`.
    Dropout {
        /// Probability of zeroing.
        p: f64,
        /// Path of the forward op: the key of the mask.
        key: String,
        /// How dim 1 is stored: masks are named by position.
        #[serde(default, skip_serializing_if = "SequenceOrder::is_natural")]
        order: SequenceOrder,
    },
    /// `log(sum(exp(x)))` over the last dim: `(x[.., V]) -> f32[..]`. A split `V` gives
    /// log-sum-exp partials. Not differentiated: see `CrossEntropy`.
    LogSumExp,
    /// Negative log-likelihood of each label: `(logits[.., V], lse f32[..], labels i32[..])
    /// -> f32[..]`, `lse` being `LogSumExp(logits)`. A split `V` gives partial sums: the
    /// shard that holds the label gives `lse - logit`, the others zero. Labels < 0 give zero.
    /// Its gradient covers the dependence through `lse` too.
    CrossEntropy,
    /// `(logits, lse, labels, dnll f32[..]) -> dlogits`: `(softmax - onehot) * dnll`.
    CrossEntropyGrad,
    /// Chooses each token's experts: `(logits f[B,S,E]) -> (gates f32[B,S,k], slots i32[B,S,k])`,
    /// with a second operand `bias f[E]` by scores plus bias.
    ///
    /// A token's `k` choices are its largest scores, ties to the lower index, out of the groups that
    /// it keeps where there are groups. Its gates are the scores at the choices, without bias, or,
    /// with `normalize`, these over their sum. The bias balances the experts' loads and is no
    /// parameter (Wang et al. 2024): its gradient is zero. The tokens of one
    /// sample are a group, in which an expert takes `capacity` of them: all first choices in
    /// order of the tokens, then all second choices, and so on (GShard, Lepikhin et al. 2020,
    /// algorithm 1). A choice that is taken has the slot `expert * capacity + place`, one that
    /// is dropped `-(expert + 1)`.
    Route {
        /// Experts of each token.
        top_k: u64,
        /// Tokens that an expert takes of a sample.
        capacity: u64,
        /// Whether the gates of a token sum to one.
        normalize: bool,
        /// The kind of scores.
        #[serde(default, skip_serializing_if = "Scores::are_softmax")]
        scores: Scores,
        /// The groups of experts, where a token chooses groups first.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        groups: Option<ExpertGroups>,
    },
    /// Gradient of `Route`: `(logits, slots, dgates) -> dlogits`, with its attributes.
    RouteGrad {
        /// Tokens that an expert takes of a sample.
        capacity: u64,
        /// Whether the gates of a token sum to one.
        normalize: bool,
        /// The kind of scores.
        #[serde(default, skip_serializing_if = "Scores::are_softmax")]
        scores: Scores,
    },
    /// Tokens to their experts' slots, zeros in empty ones: `(x[B,S,H], slots i32[B,S,k]) ->
    /// [E,B,C,H]`; with a third operand `gates f32[B,S,k]` each row times its gate. Experts
    /// stand before the samples: their dim is the batch of the experts' matmuls.
    Dispatch {
        /// Number of experts `E`.
        experts: u64,
        /// Slots `C` of an expert for each sample.
        capacity: u64,
    },
    /// Sums of each token's slots, the transpose of `Dispatch`: `(y[E,B,C,H], slots i32[B,S,k])
    /// -> [B,S,H]`; with a third operand `gates f32[B,S,k]` each row times its gate. Dropped
    /// choices add nothing.
    Combine,
    /// A bias for each expert, added to all its slots, empty ones too: `(y[E,B,C,H], bias[E,H]) -> y`.
    ExpertBias,
    /// Gradient of `Dispatch` and `Combine` for the gates: `(y[E,B,C,H], x[B,S,H], slots
    /// i32[B,S,k]) -> f32[B,S,k]`, products of slots and tokens; zero for dropped choices.
    GateGrad,
    /// Sum over the microbatches of a step: `(x) -> acc`, an f32 (or `dtype`) value that
    /// `StepEnd` reads. The accumulator is zero at `StepBegin`.
    Accumulate {
        /// Element type of the accumulator.
        dtype: DType,
    },
    /// Sum of squares of all elements: `(x) -> f32[]`.
    SumSquares,
    /// Root of the sum of its operands, in operand order; a world op, its operands come from
    /// every stage: `(f32[] ..) -> f32[]`.
    GlobalNorm,
    /// Gradient coefficient from the global norm: `(norm f32[], loss_scale f32[]) -> f32[]`:
    /// `min(1, max_norm / (norm + 1e-6)) / loss_scale`, with `norm` unscaled first; NaN when
    /// the norm is not finite, which makes every update keep its old values.
    ClipCoefficient {
        /// Largest norm; none clips nothing.
        max_norm: Option<f64>,
    },
    /// Dynamic loss scale: `(scale f32[], good_steps f32[], updates f32[], norm f32[]) -> (scale',
    /// good_steps', updates')`. Halves on a non-finite norm, down to
    /// [`training::LOWEST_LOSS_SCALE`](crate::training::LOWEST_LOSS_SCALE), and doubles after
    /// `growth_interval` good steps. Steps with a finite norm count as updates.
    UpdateLossScale {
        /// Good steps before the scale doubles.
        growth_interval: u64,
    },
    /// AdamW (Loshchilov & Hutter 2019) as in `torch.optim.AdamW`: `(p, g, m, v, coef f32[])
    /// -> (p', m', v')`. The learning rate comes from the run, and so does the number of updates
    /// done, unless a sixth operand `updates f32[]` has it: some steps may update nothing.
    AdamW {
        /// Decay of the first moment.
        beta1: f64,
        /// Decay of the second moment.
        beta2: f64,
        /// Added to the root of the second moment.
        eps: f64,
        /// Decoupled weight decay of this parameter.
        weight_decay: f64,
    },
    /// SGD with momentum as in `torch.optim.SGD`: `(p, g, m, coef f32[]) -> (p', m')`.
    Sgd {
        /// Momentum.
        momentum: f64,
        /// L2 penalty of this parameter (added to the gradient).
        weight_decay: f64,
    },
}

/// A shape or dtype rule that an op's operands break.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{op}: {problem}")]
pub struct OpError {
    /// Name of the op.
    pub op: &'static str,
    /// The broken rule, with the shapes.
    pub problem: String,
}

impl OpKind {
    /// Name in the text form.
    pub fn name(&self) -> &'static str {
        match self {
            OpKind::Input { .. } => "input",
            OpKind::State { .. } => "state",
            OpKind::Constant { .. } => "constant",
            OpKind::Layout => "layout",
            OpKind::Cast { .. } => "cast",
            OpKind::Unary { .. } => "unary",
            OpKind::Binary { .. } => "binary",
            OpKind::ScaleRows => "scale_rows",
            OpKind::ClampedSwiglu { .. } => "clamped_swiglu",
            OpKind::ClampedSwigluGrad { .. } => "clamped_swiglu_grad",
            OpKind::Broadcast { .. } => "broadcast",
            OpKind::Reduce { .. } => "reduce",
            OpKind::Reshape { .. } => "reshape",
            OpKind::Transpose { .. } => "transpose",
            OpKind::Slice { .. } => "slice",
            OpKind::Pad { .. } => "pad",
            OpKind::Unstack { .. } => "unstack",
            OpKind::Stack { .. } => "stack",
            OpKind::DotGeneral { .. } => "dot_general",
            OpKind::Embedding => "embedding",
            OpKind::EmbeddingGrad { .. } => "embedding_grad",
            OpKind::LayerNorm { .. } => "layer_norm",
            OpKind::LayerNormGradInput => "layer_norm_grad_input",
            OpKind::LayerNormGradWeight => "layer_norm_grad_weight",
            OpKind::RmsNorm { .. } => "rms_norm",
            OpKind::RmsNormGradInput => "rms_norm_grad_input",
            OpKind::RmsNormGradWeight => "rms_norm_grad_weight",
            OpKind::GroupNorm { .. } => "group_norm",
            OpKind::GroupNormGradInput => "group_norm_grad_input",
            OpKind::GroupNormGradWeight => "group_norm_grad_weight",
            OpKind::Conv2d { .. } => "conv2d",
            OpKind::Conv2dGradInput { .. } => "conv2d_grad_input",
            OpKind::Conv2dGradWeight { .. } => "conv2d_grad_weight",
            OpKind::MaxPool2d { .. } => "max_pool2d",
            OpKind::MaxPool2dGrad { .. } => "max_pool2d_grad",
            OpKind::Rotary { .. } => "rotary",
            OpKind::Join => "join",
            OpKind::Attention { .. } => "attention",
            OpKind::AttentionGrad { .. } => "attention_grad",
            OpKind::CausalConv => "causal_conv",
            OpKind::CausalConvGradInput => "causal_conv_grad_input",
            OpKind::CausalConvGradWeight { .. } => "causal_conv_grad_weight",
            OpKind::StateSpace { .. } => "state_space",
            OpKind::StateSpaceGrad { .. } => "state_space_grad",
            OpKind::Dropout { .. } => "dropout",
            OpKind::LogSumExp => "log_sum_exp",
            OpKind::CrossEntropy => "cross_entropy",
            OpKind::CrossEntropyGrad => "cross_entropy_grad",
            OpKind::Route { .. } => "route",
            OpKind::RouteGrad { .. } => "route_grad",
            OpKind::Dispatch { .. } => "dispatch",
            OpKind::Combine => "combine",
            OpKind::ExpertBias => "expert_bias",
            OpKind::GateGrad => "gate_grad",
            OpKind::Accumulate { .. } => "accumulate",
            OpKind::SumSquares => "sum_squares",
            OpKind::GlobalNorm => "global_norm",
            OpKind::ClipCoefficient { .. } => "clip_coefficient",
            OpKind::UpdateLossScale { .. } => "update_loss_scale",
            OpKind::AdamW { .. } => "adam_w",
            OpKind::Sgd { .. } => "sgd",
        }
    }

    /// Name of the kernel: the op's, or the elementwise function's, each of which takes its own
    /// time.
    pub fn kernel_name(&self) -> &'static str {
        match self {
            OpKind::Unary { f } => match f {
                Unary::Neg => "neg",
                Unary::Scale { .. } => "scale",
                Unary::GeluErf => "gelu_erf",
                Unary::GeluTanh => "gelu_tanh",
                Unary::Silu => "silu",
                Unary::Relu => "relu",
                Unary::Exp => "exp",
                Unary::Tanh => "tanh",
                Unary::Square => "square",
                Unary::Sigmoid => "sigmoid",
            },
            OpKind::Binary { f } => match f {
                Binary::Add => "add",
                Binary::Sub => "sub",
                Binary::Mul => "mul",
                Binary::GeluErfGrad => "gelu_erf_grad",
                Binary::GeluTanhGrad => "gelu_tanh_grad",
                Binary::SiluGrad => "silu_grad",
                Binary::ReluGrad => "relu_grad",
            },
            other => other.name(),
        }
    }

    /// Which file knows of it.
    pub(crate) fn family(&self) -> &'static Family {
        match self {
            OpKind::Input { .. } | OpKind::State { .. } | OpKind::Constant { .. } => {
                &source::FAMILY
            }
            OpKind::Layout
            | OpKind::Cast { .. }
            | OpKind::Unary { .. }
            | OpKind::Binary { .. }
            | OpKind::ScaleRows
            | OpKind::ClampedSwiglu { .. }
            | OpKind::ClampedSwigluGrad { .. }
            | OpKind::Dropout { .. }
            | OpKind::Accumulate { .. } => &elementwise::FAMILY,
            OpKind::Broadcast { .. }
            | OpKind::Reduce { .. }
            | OpKind::Reshape { .. }
            | OpKind::Transpose { .. }
            | OpKind::Slice { .. }
            | OpKind::Pad { .. }
            | OpKind::Unstack { .. }
            | OpKind::Stack { .. }
            | OpKind::Join => &movement::FAMILY,
            OpKind::DotGeneral { .. } => &matmul::FAMILY,
            OpKind::Embedding | OpKind::EmbeddingGrad { .. } => &embedding::FAMILY,
            OpKind::LayerNorm { .. }
            | OpKind::LayerNormGradInput
            | OpKind::LayerNormGradWeight
            | OpKind::RmsNorm { .. }
            | OpKind::RmsNormGradInput
            | OpKind::RmsNormGradWeight => &norm::FAMILY,
            OpKind::GroupNorm { .. } | OpKind::GroupNormGradInput | OpKind::GroupNormGradWeight => {
                &group_norm::FAMILY
            }
            OpKind::Conv2d { .. }
            | OpKind::Conv2dGradInput { .. }
            | OpKind::Conv2dGradWeight { .. }
            | OpKind::MaxPool2d { .. }
            | OpKind::MaxPool2dGrad { .. } => &conv::FAMILY,
            OpKind::Rotary { .. } | OpKind::Attention { .. } | OpKind::AttentionGrad { .. } => {
                &attention::FAMILY
            }
            OpKind::CausalConv
            | OpKind::CausalConvGradInput
            | OpKind::CausalConvGradWeight { .. }
            | OpKind::StateSpace { .. }
            | OpKind::StateSpaceGrad { .. } => &state_space::FAMILY,
            OpKind::LogSumExp | OpKind::CrossEntropy | OpKind::CrossEntropyGrad => &loss::FAMILY,
            OpKind::Route { .. }
            | OpKind::RouteGrad { .. }
            | OpKind::Dispatch { .. }
            | OpKind::Combine
            | OpKind::ExpertBias
            | OpKind::GateGrad => &experts::FAMILY,
            OpKind::SumSquares
            | OpKind::GlobalNorm
            | OpKind::ClipCoefficient { .. }
            | OpKind::UpdateLossScale { .. }
            | OpKind::AdamW { .. }
            | OpKind::Sgd { .. } => &update::FAMILY,
        }
    }

    /// An attention, or the gradient of one, that looks at other keys; other ops as they are.
    pub fn with_keys(&self, of: Keys) -> OpKind {
        let mut kind = self.clone();
        if let OpKind::Attention { keys, .. } | OpKind::AttentionGrad { keys, .. } = &mut kind {
            *keys = of;
        }
        kind
    }
    /// The keys that an attention, or the gradient of one, looks at.
    pub fn keys(&self) -> Keys {
        match self {
            OpKind::Attention { keys, .. } | OpKind::AttentionGrad { keys, .. } => *keys,
            _ => Keys::All,
        }
    }
    /// The bounds of an attention's scores, or of those of the gradient of one.
    pub fn bounds(&self) -> Option<Bounds> {
        match self {
            OpKind::Attention { bounds, .. } | OpKind::AttentionGrad { bounds, .. } => {
                Some(*bounds)
            }
            _ => None,
        }
    }

    /// How many operands it takes; `usize::MAX` stands for any number.
    pub fn arity(&self) -> RangeInclusive<usize> {
        match self {
            OpKind::Input { .. } | OpKind::State { .. } | OpKind::Constant { .. } => 0..=0,
            OpKind::Stack { .. } | OpKind::GlobalNorm => 1..=usize::MAX,
            OpKind::Binary { .. }
            | OpKind::ScaleRows
            | OpKind::ClampedSwiglu { .. }
            | OpKind::ExpertBias
            | OpKind::Join
            | OpKind::DotGeneral { .. }
            | OpKind::Conv2d { .. }
            | OpKind::Conv2dGradInput { .. }
            | OpKind::Conv2dGradWeight { .. }
            | OpKind::MaxPool2dGrad { .. }
            | OpKind::Embedding
            | OpKind::EmbeddingGrad { .. }
            | OpKind::RmsNorm { .. }
            | OpKind::CausalConv
            | OpKind::CausalConvGradInput
            | OpKind::CausalConvGradWeight { .. }
            | OpKind::ClipCoefficient { .. } => 2..=2,
            // A bias of the choice may be left out, and gates may.
            OpKind::Route { .. } => 1..=2,
            OpKind::Dispatch { .. } | OpKind::Combine => 2..=3,
            OpKind::LayerNorm { .. }
            | OpKind::GroupNorm { .. }
            | OpKind::ClampedSwigluGrad { .. }
            | OpKind::RmsNormGradWeight
            | OpKind::CrossEntropy
            | OpKind::RouteGrad { .. }
            | OpKind::GateGrad => 3..=3,
            OpKind::LayerNormGradWeight
            | OpKind::GroupNormGradWeight
            | OpKind::RmsNormGradInput
            | OpKind::CrossEntropyGrad
            | OpKind::UpdateLossScale { .. }
            | OpKind::Sgd { .. } => 4..=4,
            OpKind::LayerNormGradInput | OpKind::GroupNormGradInput => 5..=5,
            // The number of updates may be left out.
            OpKind::AdamW { .. } => 5..=6,
            OpKind::StateSpace { .. } => 7..=7,
            OpKind::StateSpaceGrad { .. } => 8..=8,
            // What the part before has summed up comes last.
            OpKind::Attention { keys, .. } if keys.continues() => 5..=5,
            OpKind::Attention { .. } => 3..=3,
            // The gradient of the log-sum-exp may be left out.
            OpKind::AttentionGrad { keys, .. } if keys.continues() => 7..=8,
            OpKind::AttentionGrad { .. } => 6..=7,
            _ => 1..=1,
        }
    }
    /// How many results it has; none where operands decide.
    pub fn n_results(&self) -> Option<usize> {
        match self {
            OpKind::Unstack { .. } => None,
            OpKind::StateSpaceGrad { .. } => Some(7),
            OpKind::LayerNorm { .. }
            | OpKind::GroupNorm { .. }
            | OpKind::AttentionGrad { .. }
            | OpKind::UpdateLossScale { .. }
            | OpKind::AdamW { .. } => Some(3),
            OpKind::LayerNormGradWeight
            | OpKind::GroupNormGradWeight
            | OpKind::ClampedSwigluGrad { .. }
            | OpKind::RmsNorm { .. }
            | OpKind::Attention { .. }
            | OpKind::Route { .. }
            | OpKind::Sgd { .. } => Some(2),
            _ => Some(1),
        }
    }
    /// Results that are written over an operand's old value: pairs (operand, result).
    pub fn in_place(&self) -> &'static [(usize, usize)] {
        match self {
            OpKind::AdamW { .. } => &[(0, 0), (2, 1), (3, 2)],
            OpKind::Sgd { .. } => &[(0, 0), (2, 1)],
            _ => &[],
        }
    }

    /// Whether results may be written over an operand that nothing reads afterwards and that has their
    /// dims and type: a result's element depends on that very element of the operand, and on no
    /// other one of it.
    ///
    /// Kernels of every device guarantee that whoever writes an element of a result has read the
    /// operand's element before, and that nobody reads that afterwards: a thread reads and writes the
    /// same range of bytes, however wide its loads are, and no load goes through a cache that
    /// stores pass by. A kernel that cannot works on a copy of the operand.
    pub fn may_overwrite(&self, operand: usize) -> bool {
        match self {
            OpKind::Unary { .. }
            | OpKind::Binary { .. }
            | OpKind::ClampedSwiglu { .. }
            | OpKind::ClampedSwigluGrad { .. }
            | OpKind::Dropout { .. } => true,
            OpKind::ScaleRows | OpKind::ExpertBias | OpKind::CrossEntropyGrad => operand == 0,
            _ => false,
        }
    }

    /// Result types for the given operand types. `state_ty` is the declared type of `Input`
    /// and `State`, which nothing else determines.
    pub fn infer(
        &self,
        operands: &[TensorType],
        declared: Option<&TensorType>,
    ) -> Result<Vec<TensorType>, OpError> {
        let operands = shape::Operands {
            kind: self,
            x: operands,
            declared,
        };
        operands.check_arity()?;
        (self.family().infer)(&operands)
    }
    /// The sharding rule for operands and results of these types.
    pub fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> ShardingRule {
        let mut builder = rule::Builder::new();
        (self.family().rule)(&mut builder, self, operands, results);
        builder.finish()
    }
    /// Floating-point work and bytes moved for operands and results of these concrete
    /// lengths: pass local (padded) shapes for one rank's share.
    pub fn work(&self, operands: &[(DType, Vec<u64>)], results: &[(DType, Vec<u64>)]) -> Work {
        (self.family().work)(&work::Lengths {
            kind: self,
            x: operands,
            y: results,
        })
    }
    /// True for ops that only rename or view their operand when no layout changes.
    pub fn is_view(&self) -> bool {
        matches!(self, OpKind::Layout)
    }
    /// True for ops whose results are elements of their operand in other places, and zeros.
    pub fn only_moves(&self) -> bool {
        matches!(
            self,
            OpKind::Broadcast { .. }
                | OpKind::Reshape { .. }
                | OpKind::Transpose { .. }
                | OpKind::Slice { .. }
                | OpKind::Pad { .. }
                | OpKind::Unstack { .. }
                | OpKind::Stack { .. }
                | OpKind::Join
        )
    }
    /// True for ops without operands.
    pub fn is_source(&self) -> bool {
        matches!(
            self,
            OpKind::Input { .. } | OpKind::State { .. } | OpKind::Constant { .. }
        )
    }
    /// True for ops that take a few operations per element: elementwise functions, norms, short causal
    /// convolutions, and copies in another order. Running one again costs less than keeping its result.
    pub fn is_cheap(&self) -> bool {
        matches!(
            self,
            OpKind::Cast { .. }
                | OpKind::Unary { .. }
                | OpKind::Binary { .. }
                | OpKind::ScaleRows
                | OpKind::ClampedSwiglu { .. }
                | OpKind::ExpertBias
                | OpKind::LayerNorm { .. }
                | OpKind::RmsNorm { .. }
                | OpKind::GroupNorm { .. }
                | OpKind::Rotary { .. }
                | OpKind::CausalConv
                | OpKind::Dropout { .. }
        ) || self.only_moves()
    }
}

/// Dims as strings (`"B"`, `"1024"`) in JSON.
mod dims_serde {
    use crate::Dim;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(dims: &[Dim], s: S) -> Result<S::Ok, S::Error> {
        s.collect_seq(dims.iter().map(|d| d.to_string()))
    }
    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<Dim>, D::Error> {
        Vec::<String>::deserialize(d)?
            .iter()
            .map(|s| match s.as_str() {
                "B" => Ok(Dim::Batch),
                n => n
                    .parse()
                    .map(Dim::Fixed)
                    .map_err(|_| D::Error::custom(format!("`{n}` is not a dim"))),
            })
            .collect()
    }
}
