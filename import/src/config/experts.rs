//! Fields of mixtures of experts: of `MixtralConfig`, `Qwen2MoeConfig`, `Qwen3MoeConfig` and
//! `GptOssConfig`.
//!
//! The loss that balances the routers is not computed: transformers adds it only where
//! `output_router_logits` is true, which is refused.

use super::document::Fields;
use super::{CAPS, COEFFICIENTS, Clamp, EXPERTS, ExpertsConfig, Family, LAYERS};
use super::{POSITIONS, WIDTHS, sized};
use crate::ImportError;
use serde_json::{Value, json};

/// Reads the experts of a model of `layers` layers; dense families have none.
pub(super) fn read(
    f: &mut Fields,
    family: Family,
    layers: u64,
) -> Result<Option<ExpertsConfig>, ImportError> {
    let mut experts = match family {
        Family::Gemma
        | Family::Gemma2
        | Family::Gemma3
        | Family::Llama
        | Family::Mistral
        | Family::Phi3
        | Family::Qwen2
        | Family::Qwen3 => return Ok(None),
        Family::GptOss => gpt_oss(f)?,
        Family::Mixtral => mixtral(f)?,
        Family::Qwen2Moe => ExpertsConfig {
            shared: Some(f.required("shared_expert_intermediate_size", WIDTHS)?),
            shared_gate: true,
            ..qwen(f, layers)?
        },
        Family::Qwen3Moe => qwen(f, layers)?,
    };
    f.only(
        "output_router_logits",
        &[Value::Bool(false)],
        "with true the routers' balancing loss is added, which is not supported",
    )?;
    f.number("router_aux_loss_coef", COEFFICIENTS)?;
    let per_token = "num_experts_per_tok";
    experts.top_k = match family {
        Family::GptOss => sized(f, per_token, "experts_per_token", EXPERTS)?,
        _ => f.required(per_token, EXPERTS)?,
    };
    if experts.top_k > experts.count {
        // By the names that the file has.
        let names = |own: &'static str, other: &'static str, f: &mut Fields| match f.has(own) {
            true => own,
            false => other,
        };
        let few = names(per_token, "experts_per_token", f);
        let all = names("num_local_experts", "num_experts", f);
        let problem = format!("{} of {} experts", experts.top_k, experts.count);
        return Err(f.contradiction(few, all, problem));
    }
    Ok(Some(experts))
}

/// Reads experts that are in every layer and as wide as the MLPs that they stand for.
fn mixtral(f: &mut Fields) -> Result<ExpertsConfig, ImportError> {
    f.only(
        "router_jitter_noise",
        &[json!(0), json!(0.0), Value::Null],
        "noise on the routers' inputs is not supported",
    )?;
    let count = sized(f, "num_local_experts", "num_experts", EXPERTS)?;
    let intermediate = f.required("intermediate_size", WIDTHS)?;
    Ok(ExpertsConfig::plain(count, intermediate))
}

/// Reads experts with biases, in every layer, whose activation is clamped.
fn gpt_oss(f: &mut Fields) -> Result<ExpertsConfig, ImportError> {
    // Where long positions begin, which `rope_scaling` says too.
    f.nullable_integer("initial_context_length", POSITIONS)?;
    let count = sized(f, "num_local_experts", "num_experts", EXPERTS)?;
    let intermediate = f.required("intermediate_size", WIDTHS)?;
    let clamp = Clamp {
        alpha: f.number("swiglu_alpha", CAPS)?.unwrap_or(1.702),
        limit: f.number("swiglu_limit", CAPS)?.unwrap_or(7.0),
    };
    Ok(ExpertsConfig {
        clamp: Some(clamp),
        ..ExpertsConfig::plain(count, intermediate)
    })
}

/// Reads experts that are in every n-th layer and have a width of their own.
fn qwen(f: &mut Fields, layers: u64) -> Result<ExpertsConfig, ImportError> {
    let dense = f.integers("mlp_only_layers", 0..=layers - 1)?;
    let count = sized(f, "num_experts", "num_local_experts", EXPERTS)?;
    let intermediate = f.required("moe_intermediate_size", WIDTHS)?;
    Ok(ExpertsConfig {
        normalize: f.boolean("norm_topk_prob")?.unwrap_or(false),
        every: f.integer("decoder_sparse_step", LAYERS)?.unwrap_or(1),
        dense: dense.unwrap_or_default().into_iter().collect(),
        ..ExpertsConfig::plain(count, intermediate)
    })
}

/// Checks that no window applies: one does only with `use_sliding_window`, from layer
/// `max_window_layers` on.
pub(super) fn check_window(f: &mut Fields) -> Result<(), ImportError> {
    f.only(
        "use_sliding_window",
        &[Value::Bool(false)],
        "attention is full and causal",
    )?;
    f.nullable_integer("sliding_window", 0..=u64::MAX)?;
    f.nullable_integer("max_window_layers", 0..=*LAYERS.end())?;
    Ok(())
}
