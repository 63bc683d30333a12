//! Fields of `LlamaConfig` and of its relatives with experts, and the rotary embedding in both
//! spellings: `rope_theta` with `rope_scaling` (transformers 4), `rope_parameters` (transformers 5).

use super::document::Fields;
use super::{EPSILONS, FACTORS, FREQUENCIES, MSCALES, Numbers, PROBABILITIES, SHARES, THETAS};
use super::{Family, HARMLESS_FIELDS, HEADS, LAYERS, LlamaConfig, POSITIONS, VOCAB, WIDTHS};
use super::{activation, check_common, check_full_attention, experts, init_std};
use crate::ImportError;
use ir::op::{RopeScaling, Unary};
use serde_json::{Value, json};

/// The default base of the rotary frequencies in transformers, and Mixtral's.
const DEFAULT_THETA: f64 = 10_000.0;
const MIXTRAL_THETA: f64 = 1_000_000.0;
/// The default window of `MistralConfig`.
const MISTRAL_WINDOW: u64 = 4096;

pub(super) fn read(mut f: Fields, family: Family) -> Result<LlamaConfig, ImportError> {
    check_common(&mut f)?;
    let hidden = f.required("hidden_size", WIDTHS)?;
    let intermediate = f.required("intermediate_size", WIDTHS)?;
    let layers = f.required("num_hidden_layers", LAYERS)?;
    let heads = f.required("num_attention_heads", HEADS)?;
    let vocab = f.required("vocab_size", VOCAB)?;
    let positions = f.required("max_position_embeddings", POSITIONS)?;
    // Absent it means all heads in Llama only; the others' defaults are sizes of one model.
    let is_absent = !f.has("num_key_value_heads") && family != Family::Llama;
    let kv_heads = match is_absent {
        true => f.required("num_key_value_heads", HEADS)?,
        false => f
            .nullable_integer("num_key_value_heads", HEADS)?
            .unwrap_or(heads),
    };
    if !heads.is_multiple_of(kv_heads) {
        let problem = format!("{heads} is not a multiple of {kv_heads}");
        return Err(f.contradiction("num_attention_heads", "num_key_value_heads", problem));
    }
    // Absent it means the hidden size over the heads, but in Qwen3 and Gemma the size of one model.
    if matches!(family, Family::Qwen3 | Family::Gemma) {
        f.required("head_dim", WIDTHS)?;
    }
    let head_dim = match f.nullable_integer("head_dim", WIDTHS)? {
        Some(d) if d % 2 == 1 => {
            return Err(f.error(
                "head_dim",
                format!("is {d}; the rotary embedding needs an even number"),
            ));
        }
        Some(d) => d,
        None if !hidden.is_multiple_of(heads) => {
            let problem =
                format!("{hidden} is not a multiple of {heads}, and there is no `head_dim`");
            return Err(f.contradiction("hidden_size", "num_attention_heads", problem));
        }
        None if (hidden / heads) % 2 == 1 => {
            let problem = format!(
                "the head dim {hidden} / {heads} is odd; the rotary embedding needs an even number"
            );
            return Err(f.contradiction("hidden_size", "num_attention_heads", problem));
        }
        None => hidden / heads,
    };
    if !WIDTHS.contains(&(heads * head_dim)) {
        let problem = format!(
            "all heads together are {} wide; at most {}",
            heads * head_dim,
            WIDTHS.end()
        );
        return Err(f.contradiction("num_attention_heads", "head_dim", problem));
    }
    check_fixed(&mut f)?;
    check_padding(&mut f, family)?;
    let window = window(&mut f, family)?;
    let (qkv_bias, out_bias) = biases(&mut f, family)?;
    let is_mixtral = family == Family::Mixtral;
    let (default_theta, default_epsilon) = match is_mixtral {
        true => (MIXTRAL_THETA, 1e-5),
        false => (DEFAULT_THETA, 1e-6),
    };
    let Rope {
        theta: rope_theta,
        scaling: rope_scaling,
        ..
    } = rope(
        &mut f,
        &Rotations {
            theta: ("rope_theta", default_theta),
            is_partial: false,
            has_yarn: false,
        },
    )?;
    let config = LlamaConfig {
        family,
        experts: experts::read(&mut f, family, layers)?,
        qk_norm: family.normalises_heads(),
        layers,
        heads,
        kv_heads,
        head_dim,
        hidden,
        intermediate,
        vocab,
        positions,
        window,
        activation: match family {
            Family::Gemma => gemma_activation(&mut f)?,
            _ => activation(&mut f, "hidden_act", "silu")?,
        },
        epsilon: f
            .number("rms_norm_eps", EPSILONS)?
            .unwrap_or(default_epsilon),
        tied: f
            .boolean("tie_word_embeddings")?
            .unwrap_or(family == Family::Gemma),
        qkv_bias,
        out_bias,
        mlp_bias: family == Family::Llama && f.boolean("mlp_bias")?.unwrap_or(false),
        rope_theta,
        rope_scaling,
        init_std: init_std(&mut f)?,
    };
    f.finish(HARMLESS_FIELDS)?;
    Ok(config)
}

/// Reads the window of attention, where it has one: by default in transformers, Mistral's does.
fn window(f: &mut Fields, family: Family) -> Result<Option<u64>, ImportError> {
    match family {
        Family::Llama | Family::Mixtral => check_full_attention(f)?,
        Family::Gemma => {
            check_full_attention(f)?;
            f.only(
                "use_bidirectional_attention",
                &[Value::Bool(false), Value::Null],
                "attention is full and causal",
            )?;
        }
        Family::Mistral if f.is_null("sliding_window") => {}
        Family::Mistral => {
            let found = f.integer("sliding_window", POSITIONS)?;
            return Ok(Some(found.unwrap_or(MISTRAL_WINDOW)));
        }
        Family::Qwen2 | Family::Qwen2Moe | Family::Qwen3 | Family::Qwen3Moe => {
            experts::check_window(f)?;
            let why = "attention is full and causal";
            f.only_in_list("layer_types", "full_attention", why)?;
        }
    }
    Ok(None)
}

/// Reads Gemma's activation: older files say `gelu`, by which its authors mean the approximation.
fn gemma_activation(f: &mut Fields) -> Result<Unary, ImportError> {
    let why = "Gemma's is the tanh approximation";
    let (old, new) = (json!("gelu"), json!("gelu_pytorch_tanh"));
    f.only("hidden_act", &[old, new.clone()], why)?;
    f.only("hidden_activation", &[new, Value::Null], why)?;
    Ok(Unary::GeluTanh)
}

/// Reads whether queries, keys and values have biases, and whether the projection out of attention
/// has one.
fn biases(f: &mut Fields, family: Family) -> Result<(bool, bool), ImportError> {
    match family {
        Family::Mistral | Family::Mixtral => Ok((false, false)),
        Family::Qwen2 => Ok((true, false)),
        Family::Qwen2Moe => Ok((f.boolean("qkv_bias")?.unwrap_or(true), false)),
        Family::Gemma | Family::Llama | Family::Qwen3 | Family::Qwen3Moe => {
            let all = f.boolean("attention_bias")?.unwrap_or(false);
            Ok((all, all))
        }
    }
}

/// Checks the fields that have one accepted value.
fn check_fixed(f: &mut Fields) -> Result<(), ImportError> {
    f.number("attention_dropout", PROBABILITIES)?;
    f.only(
        "pretraining_tp",
        &[json!(1)],
        "matmuls in slices are not supported",
    )?;
    f.only(
        "partial_rotary_factor",
        &[json!(1), json!(1.0)],
        "the whole head is rotated",
    )?;
    f.only(
        "use_mrope",
        &[Value::Bool(false)],
        "positions are those of one text",
    )?;
    f.only(
        "rope_interleaved",
        &[Value::Bool(false)],
        "rotary pairs are (i, i + head_dim/2)",
    )
}

/// Checks that no row of the embedding is left out of training. Every published Gemma has a padding
/// token, whose row data without padding never looks up.
fn check_padding(f: &mut Fields, family: Family) -> Result<(), ImportError> {
    if family == Family::Gemma {
        f.nullable_integer("pad_token_id", 0..=*VOCAB.end())?;
        return Ok(());
    }
    let why = "with a padding id PyTorch's embedding withholds gradients from that row, which is not supported; \
               null trains every row";
    f.only("pad_token_id", &[Value::Null], why)
}

/// How a family says its rotary embedding.
pub(super) struct Rotations {
    /// The field of the base that is not in an object, and the default.
    pub(super) theta: (&'static str, f64),
    /// True when a part of a head may turn.
    pub(super) is_partial: bool,
    /// True when the scaling may be YaRN's, whose reference values are those of such a family.
    pub(super) has_yarn: bool,
}

/// A rotary embedding as configurations say it.
pub(super) struct Rope {
    pub(super) theta: f64,
    pub(super) scaling: RopeScaling,
    /// The share of a head that turns, where an object says it.
    pub(super) part: Option<f64>,
    /// What scores are multiplied by beside the usual, twice: YaRN's `mscale_all_dim`.
    pub(super) score_scale: f64,
}

/// Reads base and scaling of the rotary embedding, wherever they stand; all that are given must
/// agree.
pub(super) fn rope(f: &mut Fields, of: &Rotations) -> Result<Rope, ImportError> {
    let (own, default_theta) = of.theta;
    let mut theta: Option<(&str, f64)> = f.number(own, THETAS)?.map(|t| (own, t));
    let mut part = None;
    let mut scaling: Option<(&str, RopeScaling)> = None;
    let mut score_scale = 1.0;
    // transformers 5 takes an absent type for "default"; transformers 4 wants one.
    for (name, default) in [("rope_parameters", Some("default")), ("rope_scaling", None)] {
        let Some(mut inner) = f.object(name)? else {
            continue;
        };
        let found = scaling_of(&mut inner, default, of.has_yarn)?;
        if let RopeScaling::Yarn { factor, .. } = found {
            let all = inner.number("mscale_all_dim", MSCALES)?;
            score_scale = all.map_or(1.0, |m| magnitude(factor, m));
        }
        match of.is_partial {
            true => part = inner.number("partial_rotary_factor", SHARES)?.or(part),
            false => inner.only(
                "partial_rotary_factor",
                &[json!(1), json!(1.0)],
                "the whole head is rotated",
            )?,
        }
        if let Some((other, s)) = scaling
            && s != found
        {
            return Err(f.contradiction(other, name, "they give different rotary scalings".into()));
        }
        scaling = Some((name, found));
        if let Some(t) = inner.number("rope_theta", THETAS)? {
            if let Some((other, known)) = theta
                && known != t
            {
                return Err(f.contradiction(
                    other,
                    name,
                    format!("they give rope_theta {known} and {t}"),
                ));
            }
            theta = Some((name, t));
        }
        inner.finish(&[])?;
    }
    Ok(Rope {
        theta: theta.map_or(default_theta, |(_, t)| t),
        scaling: scaling.map_or(RopeScaling::None, |(_, s)| s),
        part,
        score_scale,
    })
}

/// YaRN's factor for a stretch of `factor` (Peng et al. 2023, section 3.4), whose logarithm counts
/// `share` times.
fn magnitude(factor: f64, share: f64) -> f64 {
    0.1 * share * factor.ln() + 1.0
}

/// Reads YaRN's scaling, as transformers reads it.
fn yarn(f: &mut Fields) -> Result<RopeScaling, ImportError> {
    let stretch = factor(f, "factor", FACTORS)?;
    let beta_fast = f.number("beta_fast", FREQUENCIES)?.unwrap_or(32.0);
    let beta_slow = f.number("beta_slow", FREQUENCIES)?.unwrap_or(1.0);
    if beta_slow >= beta_fast {
        let problem = format!("{beta_slow} is not below {beta_fast}");
        return Err(f.contradiction("beta_slow", "beta_fast", problem));
    }
    let original_max_position = f.required("original_max_position_embeddings", POSITIONS)?;
    let own = f.number("mscale", MSCALES)?;
    let all = f.number("mscale_all_dim", MSCALES)?;
    let given = f.number("attention_factor", FREQUENCIES)?;
    let inferred = match (own, all) {
        (Some(own), Some(all)) if own > 0.0 && all > 0.0 => {
            magnitude(stretch, own) / magnitude(stretch, all)
        }
        _ => magnitude(stretch, 1.0),
    };
    Ok(RopeScaling::Yarn {
        factor: stretch,
        beta_fast,
        beta_slow,
        original_max_position,
        truncate: f.boolean("truncate")?.unwrap_or(true),
        magnitude: given.unwrap_or(inferred),
    })
}

/// Reads the scaling that an object describes; `type` is the older name of `rope_type`.
fn scaling_of(
    f: &mut Fields,
    default: Option<&'static str>,
    has_yarn: bool,
) -> Result<RopeScaling, ImportError> {
    let accepted = match has_yarn {
        true => "\"default\", \"linear\" or \"yarn\"",
        false => "\"default\", \"linear\" or \"llama3\"",
    };
    let kind = match (f.string("rope_type")?, f.string("type")?) {
        (Some(a), Some(b)) if a != b => {
            return Err(f.contradiction("rope_type", "type", format!("{a:?} and {b:?}")));
        }
        (Some(kind), _) | (None, Some(kind)) => kind,
        (None, None) => default.ok_or_else(|| f.missing("rope_type", accepted))?,
    };
    match kind {
        "default" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear {
            factor: factor(f, "factor", FACTORS)?,
        }),
        "yarn" if has_yarn => yarn(f),
        "llama3" if !has_yarn => {
            let factor_all = factor(f, "factor", FACTORS)?;
            let low = factor(f, "low_freq_factor", FREQUENCIES)?;
            let high = factor(f, "high_freq_factor", FREQUENCIES)?;
            if low >= high {
                let problem = format!("{low} is not below {high}");
                return Err(f.contradiction("low_freq_factor", "high_freq_factor", problem));
            }
            let original_max_position =
                f.required("original_max_position_embeddings", POSITIONS)?;
            Ok(RopeScaling::Llama3 {
                factor: factor_all,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position,
            })
        }
        other => {
            let name = if f.has("rope_type") {
                "rope_type"
            } else {
                "type"
            };
            Err(f.error(name, format!("is {other:?}; accepted: {accepted}")))
        }
    }
}

/// Reads a factor that must be there.
fn factor(f: &mut Fields, name: &'static str, numbers: Numbers) -> Result<f64, ImportError> {
    let found = f.number(name, numbers)?;
    found.ok_or_else(|| f.missing(name, "a positive number"))
}
