//! Fields of `LlamaConfig` and of its relatives with experts, and the rotary embedding in both
//! spellings: `rope_theta` with `rope_scaling` (transformers 4), `rope_parameters` (transformers 5).

use super::document::Fields;
use super::{CAPS, SCALARS};
use super::{EPSILONS, FACTORS, FREQUENCIES, MSCALES, Numbers, PROBABILITIES, SHARES, THETAS};
use super::{Family, HARMLESS_FIELDS, HEADS, LAYERS, LlamaConfig, POSITIONS, VOCAB, WIDTHS};
use super::{activation, check_common, check_full_attention, experts, init_std, sparse};
use crate::ImportError;
use ir::op::{RopeScaling, Unary};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// The default base of the rotary frequencies in transformers, and Mixtral's.
const DEFAULT_THETA: f64 = 10_000.0;
const MIXTRAL_THETA: f64 = 1_000_000.0;
/// The default base of `Gemma3TextConfig`, in layers that look back over all tokens.
const GEMMA3_THETA: f64 = 1_000_000.0;
/// The default window of `Gemma2Config` and `Gemma3TextConfig`.
const GEMMA_WINDOW: u64 = 4096;
/// The default base and window of `GptOssConfig`.
const GPT_OSS_THETA: f64 = 150_000.0;
const GPT_OSS_WINDOW: u64 = 128;
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
    let has_default = matches!(family, Family::Llama | Family::Phi3);
    let is_absent = !f.has("num_key_value_heads") && !has_default;
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
    // Absent it means the hidden size over the heads, but in Qwen3, Gemma and gpt-oss the size of one
    // model.
    if matches!(family, Family::Qwen3 | Family::GptOss) || family.is_gemma() {
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
    check_fixed(&mut f, family)?;
    check_padding(&mut f, family)?;
    let window = window(&mut f, family)?;
    let whole = whole_layers(&mut f, family, layers)?;
    let (qkv_bias, out_bias) = biases(&mut f, family)?;
    let is_mixtral = family == Family::Mixtral;
    let (default_theta, default_epsilon) = match is_mixtral {
        true => (MIXTRAL_THETA, 1e-5),
        false if family == Family::Gemma3 => (GEMMA3_THETA, 1e-6),
        false if family == Family::Phi3 => (DEFAULT_THETA, 1e-5),
        false if family == Family::GptOss => (GPT_OSS_THETA, 1e-5),
        false => (DEFAULT_THETA, 1e-6),
    };
    let (found, local_theta) = match family {
        Family::Gemma3 => two_bases(&mut f)?,
        _ => {
            let rotations = Rotations {
                theta: ("rope_theta", default_theta),
                is_partial: family == Family::Phi3,
                has_yarn: family == Family::GptOss,
            };
            let mut found = rope(&mut f, &rotations)?;
            let says = ["rope_parameters", "rope_scaling"];
            let is_silent = says.iter().all(|name| !f.has(name) && !f.is_null(name));
            if family == Family::GptOss && is_silent {
                // As transformers does where nothing is said, which is what the published sizes have.
                found.scaling = gpt_oss_scaling();
            }
            (found, None)
        }
    };
    let scale = match family {
        Family::Gemma2 | Family::Gemma3 => {
            let found = f.number("query_pre_attn_scalar", SCALARS)?;
            found.ok_or_else(|| f.missing("query_pre_attn_scalar", "a positive number"))?
        }
        _ => head_dim as f64,
    };
    let (score_cap, logit_cap) = caps(&mut f, family)?;
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
        whole,
        sparse: sparse::read(&mut f)?,
        scale: scale.sqrt().recip(),
        score_cap,
        logit_cap,
        activation: match family.is_gemma() {
            true => gemma_activation(&mut f)?,
            false if family == Family::GptOss => {
                let why = "experts have a gated SiLU, clamped";
                f.only("hidden_act", &[json!("silu")], why)?;
                Unary::Silu
            }
            false => activation(&mut f, "hidden_act", "silu")?,
        },
        epsilon: f
            .number("rms_norm_eps", EPSILONS)?
            .unwrap_or(default_epsilon),
        tied: f
            .boolean("tie_word_embeddings")?
            .unwrap_or(family.is_gemma()),
        qkv_bias,
        out_bias,
        mlp_bias: family == Family::Llama && f.boolean("mlp_bias")?.unwrap_or(false),
        rope_theta: found.theta,
        rope_scaling: found.scaling,
        turned: turned(&mut f, family, found.part, head_dim)?,
        local_theta,
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
        Family::GptOss => {
            if !f.is_null("sliding_window") {
                let found = f.integer("sliding_window", POSITIONS)?;
                return Ok(Some(found.unwrap_or(GPT_OSS_WINDOW)));
            }
        }
        Family::Gemma2 | Family::Gemma3 => {
            f.only(
                "use_bidirectional_attention",
                &[Value::Bool(false), Value::Null],
                "attention is causal",
            )?;
            if !f.is_null("sliding_window") {
                let found = f.integer("sliding_window", POSITIONS)?;
                return Ok(Some(found.unwrap_or(GEMMA_WINDOW)));
            }
        }
        Family::Phi3 => return f.nullable_integer("sliding_window", POSITIONS),
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

/// Reads which layers look back over all tokens although the model has a window: by `layer_types`, by
/// one in `sliding_window_pattern`, or as the family has them.
fn whole_layers(f: &mut Fields, family: Family, layers: u64) -> Result<BTreeSet<u64>, ImportError> {
    let every = match family {
        Family::Gemma2 | Family::GptOss => 2,
        Family::Gemma3 => {
            let found = f.integer("sliding_window_pattern", LAYERS)?;
            let saved = f.integer("_sliding_window_pattern", LAYERS)?;
            found.or(saved).unwrap_or(6)
        }
        _ => return Ok(BTreeSet::new()),
    };
    let words = f.words("layer_types", &["sliding_attention", "full_attention"])?;
    let Some(words) = words else {
        return Ok((0..layers)
            .filter(|i| (i + 1).is_multiple_of(every))
            .collect());
    };
    if words.len() as u64 != layers {
        let problem = format!("{} types of {layers} layers", words.len());
        return Err(f.contradiction("layer_types", "num_hidden_layers", problem));
    }
    let all = words
        .iter()
        .zip(0..)
        .filter(|(word, _)| **word == "full_attention");
    Ok(all.map(|(_, i)| i).collect())
}

/// Reads what scores and logits stay below.
fn caps(f: &mut Fields, family: Family) -> Result<(Option<f64>, Option<f64>), ImportError> {
    let of = |f: &mut Fields, name, default| match f.is_null(name) {
        true => Ok(None),
        false => f.number(name, CAPS).map(|found| found.or(default)),
    };
    match family {
        Family::Gemma2 => Ok((
            of(f, "attn_logit_softcapping", Some(50.0))?,
            of(f, "final_logit_softcapping", Some(30.0))?,
        )),
        Family::Gemma3 => {
            f.only(
                "attn_logit_softcapping",
                &[Value::Null],
                "scores of gemma3_text have no bound in transformers",
            )?;
            Ok((None, of(f, "final_logit_softcapping", None)?))
        }
        _ => Ok((None, None)),
    }
}

/// Reads the rotation of Gemma 3 in both spellings: that of layers that look back over all tokens, and
/// the base of the others.
fn two_bases(f: &mut Fields) -> Result<(Rope, Option<f64>), ImportError> {
    let Some(mut both) = f.object("rope_parameters")? else {
        let rotations = Rotations {
            theta: ("rope_theta", GEMMA3_THETA),
            is_partial: false,
            has_yarn: false,
        };
        let local = f.number("rope_local_base_freq", THETAS)?;
        return Ok((rope(f, &rotations)?, Some(local.unwrap_or(DEFAULT_THETA))));
    };
    let whole = "the whole head is rotated";
    let mut found = Rope {
        theta: GEMMA3_THETA,
        scaling: RopeScaling::None,
        part: None,
        score_scale: 1.0,
    };
    let mut local = DEFAULT_THETA;
    if let Some(mut inner) = both.object("full_attention")? {
        found.scaling = scaling_of(&mut inner, Some("default"), false)?;
        found.theta = inner.number("rope_theta", THETAS)?.unwrap_or(GEMMA3_THETA);
        inner.only("partial_rotary_factor", &[json!(1), json!(1.0)], whole)?;
        inner.finish(&[])?;
    }
    if let Some(mut inner) = both.object("sliding_attention")? {
        let why = "layers with a window turn by plain frequencies";
        inner.only("rope_type", &[json!("default")], why)?;
        local = inner.number("rope_theta", THETAS)?.unwrap_or(DEFAULT_THETA);
        inner.only("partial_rotary_factor", &[json!(1), json!(1.0)], whole)?;
        inner.finish(&[])?;
    }
    both.finish(&[])?;
    Ok((found, Some(local)))
}

/// Reads how many elements of a head turn: all, but in Phi-3, where `partial_rotary_factor` says which
/// share does, in an object or beside it.
fn turned(
    f: &mut Fields,
    family: Family,
    inner: Option<f64>,
    head_dim: u64,
) -> Result<u64, ImportError> {
    if family != Family::Phi3 {
        return Ok(head_dim);
    }
    let own = f.number("partial_rotary_factor", SHARES)?;
    if let (Some(a), Some(b)) = (own, inner)
        && a != b
    {
        let problem = format!("they give {a} and {b}");
        return Err(f.contradiction("partial_rotary_factor", "rope_parameters", problem));
    }
    let turned = (head_dim as f64 * own.or(inner).unwrap_or(1.0)) as u64;
    if turned == 0 || turned % 2 == 1 {
        let problem = format!(
            "turns {turned} of the {head_dim} elements of a head; the rotary embedding needs an even number"
        );
        return Err(f.error("partial_rotary_factor", problem));
    }
    Ok(turned)
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
        Family::Phi3 => {
            let why = "projections have no biases";
            f.only("attention_bias", &[Value::Bool(false)], why)?;
            Ok((false, false))
        }
        Family::GptOss => {
            let all = f.boolean("attention_bias")?.unwrap_or(true);
            Ok((all, all))
        }
        Family::Qwen2 => Ok((true, false)),
        Family::Qwen2Moe => Ok((f.boolean("qkv_bias")?.unwrap_or(true), false)),
        Family::Gemma
        | Family::Gemma2
        | Family::Gemma3
        | Family::Llama
        | Family::Qwen3
        | Family::Qwen3Moe => {
            let all = f.boolean("attention_bias")?.unwrap_or(false);
            Ok((all, all))
        }
    }
}

/// Checks the fields that have one accepted value.
fn check_fixed(f: &mut Fields, family: Family) -> Result<(), ImportError> {
    f.number("attention_dropout", PROBABILITIES)?;
    if family == Family::Phi3 {
        // Microsoft's own code, of which transformers has its own by now.
        f.has("auto_map");
        for name in ["resid_pdrop", "embd_pdrop"] {
            f.number(name, PROBABILITIES)?;
        }
        // Where long positions begin, of which `rope_scaling` would say how they turn.
        f.nullable_integer("original_max_position_embeddings", POSITIONS)?;
    } else {
        f.only(
            "partial_rotary_factor",
            &[json!(1), json!(1.0)],
            "the whole head is rotated",
        )?;
    }
    f.only(
        "pretraining_tp",
        &[json!(1)],
        "matmuls in slices are not supported",
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

/// Checks that no row of the embedding is left out of training. Every published Gemma, Phi-3 and gpt-oss has a padding
/// token, whose row data without padding never looks up.
fn check_padding(f: &mut Fields, family: Family) -> Result<(), ImportError> {
    if family.is_gemma() || matches!(family, Family::Phi3 | Family::GptOss) {
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
    /// The factor of scores beside the usual, twice: YaRN's `mscale_all_dim`.
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

/// The default scaling of `GptOssConfig`.
fn gpt_oss_scaling() -> RopeScaling {
    let factor = 32.0;
    RopeScaling::Yarn {
        factor,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_max_position: 4096,
        truncate: false,
        magnitude: magnitude(factor, 1.0),
    }
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
            let accepted = match other {
                "longrope" | "su" | "dynamic" => format!(
                    "{accepted}; frequencies that depend on the length of a sequence are not there, and \
                     null plans the model as it is up to the positions of its pre-training"
                ),
                _ => accepted.to_string(),
            };
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
