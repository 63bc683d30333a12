//! Fields of `OPTConfig`, `GPTNeoXConfig`, `NemotronConfig` and `BloomConfig`: decoders with layer norms and an MLP
//! without a gate.

use super::document::Fields;
use super::llama::{Rotations, rope};
use super::{DEVIATIONS, EPSILONS, HARMLESS_FIELDS, HEADS, LAYERS, POSITIONS};
use super::{PROBABILITIES, SHARES, VOCAB, WIDTHS};
use super::{activation, check_common, check_full_attention, init_std, sized, sparse};
use crate::ImportError;
use ir::op::{Blocks, RopeScaling, Unary};
use serde_json::{Value, json};

/// The family of a [`DecoderConfig`], which decides names in files and how blocks are put together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plain {
    /// OPT, with learned positions (Zhang et al. 2022).
    Opt,
    /// GPT-NeoX and Pythia, with attention and MLP beside each other (Black et al. 2022).
    GptNeox,
    /// Nemotron, with squared ReLU and gains stored less one (Parmar et al. 2024).
    Nemotron,
    /// BLOOM, whose scores fall with the distance, with a norm behind the embedding (BigScience 2022).
    Bloom,
}

impl Plain {
    const ALL: [Plain; 4] = [Plain::Opt, Plain::GptNeox, Plain::Nemotron, Plain::Bloom];

    /// The `model_type` of its configurations.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Plain::Opt => "opt",
            Plain::GptNeox => "gpt_neox",
            Plain::Nemotron => "nemotron",
            Plain::Bloom => "bloom",
        }
    }
    pub(super) fn of(name: &str) -> Option<Plain> {
        Plain::ALL.into_iter().find(|f| f.name() == name)
    }
    /// The positions that the table of learned ones holds before the first: OPT's first two rows are
    /// never used.
    pub(crate) fn position_offset(self) -> u64 {
        match self {
            Plain::Opt => 2,
            Plain::GptNeox | Plain::Nemotron | Plain::Bloom => 0,
        }
    }
    /// Says whether queries, keys and values are one matrix in files, head by head.
    pub(crate) fn is_fused(self) -> bool {
        matches!(self, Plain::GptNeox | Plain::Bloom)
    }
    /// Says whether scores fall with the distance (ALiBi), by which tokens know where they stand.
    pub(crate) fn has_slopes(self) -> bool {
        self == Plain::Bloom
    }
    /// Says whether a norm stands behind the embedding.
    pub(crate) fn normalises_embeddings(self) -> bool {
        self == Plain::Bloom
    }
    /// Says whether files hold the gains of norms less one.
    pub(crate) fn has_centred_gains(self) -> bool {
        self == Plain::Nemotron
    }
}

/// The rotation of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rotation {
    /// The base of the frequencies.
    pub(crate) theta: f64,
    /// Their scaling.
    pub(crate) scaling: RopeScaling,
    /// The elements of a head that turn, the first of them; even.
    pub(crate) dims: u64,
}

/// A decoder with layer norms and an MLP without a gate.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    pub(crate) family: Plain,
    pub(crate) layers: u64,
    pub(crate) heads: u64,
    pub(crate) kv_heads: u64,
    pub(crate) head_dim: u64,
    pub(crate) hidden: u64,
    pub(crate) inner: u64,
    pub(crate) vocab: u64,
    pub(crate) positions: u64,
    /// The rotation of queries and keys; where there is none, positions are learned or scores fall with
    /// the distance.
    pub(crate) rotation: Option<Rotation>,
    pub(crate) activation: Unary,
    /// True when the activation is squared.
    pub(crate) is_squared: bool,
    pub(crate) epsilon: f64,
    pub(crate) tied: bool,
    /// True when attention and MLP read the same residual and are added together.
    pub(crate) is_parallel: bool,
    /// True when the projections of attention have biases.
    pub(crate) attention_bias: bool,
    /// True when the MLP has biases.
    pub(crate) mlp_bias: bool,
    /// The blocks that attention sees.
    pub(crate) sparse: Option<Blocks>,
    pub(crate) init_std: f64,
}

impl DecoderConfig {
    /// Says whether positions have a table of their own.
    pub(crate) fn learns_positions(&self) -> bool {
        self.rotation.is_none() && !self.family.has_slopes()
    }
}

pub(super) fn read(mut f: Fields, family: Plain) -> Result<DecoderConfig, ImportError> {
    check_common(&mut f)?;
    check_full_attention(&mut f)?;
    let sparse = sparse::read(&mut f)?;
    let config = match family {
        Plain::Opt => opt(&mut f)?,
        Plain::GptNeox => gpt_neox(&mut f)?,
        Plain::Nemotron => nemotron(&mut f)?,
        Plain::Bloom => bloom(&mut f)?,
    };
    f.finish(HARMLESS_FIELDS)?;
    Ok(DecoderConfig { sparse, ..config })
}

/// The fields that all but BLOOM have in common, read by the names that they share.
struct Sizes {
    hidden: u64,
    layers: u64,
    heads: u64,
    vocab: u64,
    positions: u64,
}

fn sizes(f: &mut Fields) -> Result<Sizes, ImportError> {
    Ok(Sizes {
        hidden: f.required("hidden_size", WIDTHS)?,
        layers: f.required("num_hidden_layers", LAYERS)?,
        heads: f.required("num_attention_heads", HEADS)?,
        vocab: f.required("vocab_size", VOCAB)?,
        positions: f.required("max_position_embeddings", POSITIONS)?,
    })
}

/// The width of a head of all heads together as wide as the hidden size.
fn whole_heads(f: &Fields, hidden: u64, heads: u64) -> Result<u64, ImportError> {
    match hidden.is_multiple_of(heads) {
        true => Ok(hidden / heads),
        false => {
            let problem = format!("{hidden} is not a multiple of {heads}");
            Err(f.contradiction("hidden_size", "num_attention_heads", problem))
        }
    }
}

fn opt(f: &mut Fields) -> Result<DecoderConfig, ImportError> {
    let s = sizes(f)?;
    let head_dim = whole_heads(f, s.hidden, s.heads)?;
    f.only(
        "do_layer_norm_before",
        &[Value::Bool(true)],
        "norms stand before attention and MLP; of the published sizes opt-350m alone has them behind",
    )?;
    f.only(
        "_remove_final_layer_norm",
        &[Value::Bool(false)],
        "a norm stands before the head",
    )?;
    f.only(
        "word_embed_proj_dim",
        &[json!(s.hidden), Value::Null],
        "the embedding is as wide as the layers; of the published sizes opt-350m alone has a narrower one",
    )?;
    f.only(
        "enable_bias",
        &[Value::Bool(true)],
        "all projections have biases",
    )?;
    f.only(
        "layer_norm_elementwise_affine",
        &[Value::Bool(true)],
        "norms have gains and biases",
    )?;
    f.only(
        "layerdrop",
        &[json!(0), json!(0.0)],
        "layers are not left out at random",
    )?;
    for name in ["dropout", "attention_dropout", "activation_dropout"] {
        f.number(name, PROBABILITIES)?;
    }
    // PyTorch withholds the lookup's gradient from the row of the padding token; data without
    // padding never looks it up.
    f.nullable_integer("pad_token_id", 0..=*VOCAB.end())?;
    Ok(DecoderConfig {
        sparse: None,
        family: Plain::Opt,
        layers: s.layers,
        heads: s.heads,
        kv_heads: s.heads,
        head_dim,
        hidden: s.hidden,
        inner: f.required("ffn_dim", WIDTHS)?,
        vocab: s.vocab,
        positions: s.positions,
        rotation: None,
        activation: activation(f, "activation_function", "relu")?,
        is_squared: false,
        epsilon: 1e-5,
        tied: f.boolean("tie_word_embeddings")?.unwrap_or(true),
        is_parallel: false,
        attention_bias: true,
        mlp_bias: true,
        init_std: f.number("init_std", DEVIATIONS)?.unwrap_or(0.02),
    })
}

fn gpt_neox(f: &mut Fields) -> Result<DecoderConfig, ImportError> {
    let s = sizes(f)?;
    let head_dim = whole_heads(f, s.hidden, s.heads)?;
    for name in ["attention_dropout", "hidden_dropout", "classifier_dropout"] {
        if f.has(name) {
            f.number(name, PROBABILITIES)?;
        }
    }
    f.nullable_integer("pad_token_id", 0..=*VOCAB.end())?;
    let rotation = rotation(f, head_dim, "rotary_emb_base", "rotary_pct", 0.25)?;
    Ok(DecoderConfig {
        sparse: None,
        family: Plain::GptNeox,
        layers: s.layers,
        heads: s.heads,
        kv_heads: s.heads,
        head_dim,
        hidden: s.hidden,
        inner: f.required("intermediate_size", WIDTHS)?,
        vocab: s.vocab,
        positions: s.positions,
        rotation: Some(rotation),
        activation: activation(f, "hidden_act", "gelu")?,
        is_squared: false,
        epsilon: f.number("layer_norm_eps", EPSILONS)?.unwrap_or(1e-5),
        tied: f.boolean("tie_word_embeddings")?.unwrap_or(false),
        is_parallel: f.boolean("use_parallel_residual")?.unwrap_or(true),
        attention_bias: f.boolean("attention_bias")?.unwrap_or(true),
        mlp_bias: true,
        init_std: init_std(f)?,
    })
}

fn nemotron(f: &mut Fields) -> Result<DecoderConfig, ImportError> {
    let s = sizes(f)?;
    let kv_heads = f.nullable_integer("num_key_value_heads", HEADS)?;
    let kv_heads = kv_heads.unwrap_or(s.heads);
    if !s.heads.is_multiple_of(kv_heads) {
        let problem = format!("{} is not a multiple of {kv_heads}", s.heads);
        return Err(f.contradiction("num_attention_heads", "num_key_value_heads", problem));
    }
    let head_dim = match f.nullable_integer("head_dim", WIDTHS)? {
        Some(d) => d,
        None => whole_heads(f, s.hidden, s.heads)?,
    };
    if !WIDTHS.contains(&(s.heads * head_dim)) {
        let wide = s.heads * head_dim;
        let problem = format!(
            "all heads together are {wide} wide; at most {}",
            WIDTHS.end()
        );
        return Err(f.contradiction("num_attention_heads", "head_dim", problem));
    }
    f.number("attention_dropout", PROBABILITIES)?;
    f.only(
        "hidden_act",
        &[json!("relu2")],
        "the activation is a squared ReLU",
    )?;
    let why = "with a padding id PyTorch's embedding withholds gradients from that row, which is not supported; \
               null trains every row";
    f.only("pad_token_id", &[Value::Null], why)?;
    let rotation = rotation(f, head_dim, "rope_theta", "partial_rotary_factor", 0.5)?;
    Ok(DecoderConfig {
        sparse: None,
        family: Plain::Nemotron,
        layers: s.layers,
        heads: s.heads,
        kv_heads,
        head_dim,
        hidden: s.hidden,
        inner: f.required("intermediate_size", WIDTHS)?,
        vocab: s.vocab,
        positions: s.positions,
        rotation: Some(rotation),
        activation: Unary::Relu,
        is_squared: true,
        epsilon: f.number("norm_eps", EPSILONS)?.unwrap_or(1e-5),
        tied: f.boolean("tie_word_embeddings")?.unwrap_or(false),
        is_parallel: false,
        attention_bias: f.boolean("attention_bias")?.unwrap_or(false),
        mlp_bias: f.boolean("mlp_bias")?.unwrap_or(false),
        init_std: f.number("initializer_range", DEVIATIONS)?.unwrap_or(0.0134),
    })
}

/// Fields of BLOOM's configurations that transformers does not read, or that say how the same numbers
/// are computed: by which kernels, and in slices for as many ranks as the model was trained on.
const BLOOM_EXECUTION: [&str; 7] = [
    "attention_softmax_in_fp32",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "skip_bias_add",
    "skip_bias_add_qkv",
    "slow_but_exact",
    "unk_token_id",
];

fn bloom(f: &mut Fields) -> Result<DecoderConfig, ImportError> {
    let hidden = sized(f, "hidden_size", "n_embed", WIDTHS)?;
    let layers = sized(f, "n_layer", "num_hidden_layers", LAYERS)?;
    let heads = sized(f, "n_head", "num_attention_heads", HEADS)?;
    let vocab = f.required("vocab_size", VOCAB)?;
    // Nothing in the model limits the positions: these are the tokens that it was trained on.
    let positions = f.nullable_integer("seq_length", POSITIONS)?.unwrap_or(2048);
    if !hidden.is_multiple_of(heads) {
        let problem = format!("{hidden} is not a multiple of {heads}");
        return Err(f.contradiction("hidden_size", "n_head", problem));
    }
    let inner = 4 * hidden;
    if !WIDTHS.contains(&inner) {
        let problem = format!(
            "{inner}, four times of it, is the width of the MLP; at most {}",
            WIDTHS.end()
        );
        return Err(f.error("hidden_size", problem));
    }
    f.only(
        "n_inner",
        &[Value::Null, json!(inner)],
        "the MLP is four times as wide as the layers",
    )?;
    f.only(
        "apply_residual_connection_post_layernorm",
        &[Value::Bool(false)],
        "what is added to is what the norms read; no published size has it otherwise",
    )?;
    for name in ["hidden_dropout", "attention_dropout"] {
        f.number(name, PROBABILITIES)?;
    }
    // The row of the padding token is trained like every other, in transformers too.
    f.nullable_integer("pad_token_id", 0..=*VOCAB.end())?;
    f.nullable_integer("pretraining_tp", 1..=*HEADS.end())?;
    f.nullable_integer("offset_alibi", 0..=*POSITIONS.end())?;
    for name in BLOOM_EXECUTION {
        f.has(name);
    }
    Ok(DecoderConfig {
        sparse: None,
        family: Plain::Bloom,
        layers,
        heads,
        kv_heads: heads,
        head_dim: hidden / heads,
        hidden,
        inner,
        vocab,
        positions,
        rotation: None,
        activation: Unary::GeluTanh,
        is_squared: false,
        epsilon: f.number("layer_norm_epsilon", EPSILONS)?.unwrap_or(1e-5),
        tied: f.boolean("tie_word_embeddings")?.unwrap_or(true),
        is_parallel: false,
        attention_bias: true,
        mlp_bias: true,
        init_std: init_std(f)?,
    })
}

/// Reads the rotation of heads, of which a share turns: under `share` itself or in
/// `rope_parameters`.
fn rotation(
    f: &mut Fields,
    head_dim: u64,
    theta: &'static str,
    share: &'static str,
    default: f64,
) -> Result<Rotation, ImportError> {
    let own = f.number(share, SHARES)?;
    let found = rope(
        f,
        &Rotations {
            theta: (theta, 10_000.0),
            is_partial: true,
            has_yarn: false,
        },
    )?;
    let part = match (own, found.part) {
        (Some(a), Some(b)) if a != b => {
            let problem = format!("they give {a} and {b}");
            return Err(f.contradiction(share, "rope_parameters", problem));
        }
        (Some(part), _) | (None, Some(part)) => part,
        (None, None) => default,
    };
    let dims = (head_dim as f64 * part) as u64;
    if dims == 0 || dims % 2 == 1 {
        let problem = format!(
            "turns {dims} of the {head_dim} elements of a head; the rotary embedding needs an even number"
        );
        return Err(f.error(share, problem));
    }
    Ok(Rotation {
        theta: found.theta,
        scaling: found.scaling,
        dims,
    })
}
