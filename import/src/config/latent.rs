//! Fields of `DeepseekV2Config` and `DeepseekV3Config`: latent attention, and experts of which some
//! are shared.
//!
//! Some fields are of DeepSeek's own code and not of transformers'; those are read where they say
//! what is done here, and refused where they ask for something else. The losses that balance the
//! experts (`aux_loss_alpha`) are not computed, as transformers does not. The bias of the choice of
//! V3 is read with the weights and stays as it is: what moves it in DeepSeek's training is not there.

use super::document::Fields;
use super::further::{self, FurtherConfig};
use super::llama::{Rotations, rope};
use super::{COEFFICIENTS, EPSILONS, EXPERTS, GATE_SCALES, HARMLESS_FIELDS, HEADS, LAYERS};
use super::{ExpertsConfig, POSITIONS, PROBABILITIES, VOCAB, WIDTHS};
use super::{activation, check_common, check_full_attention, init_std, sized, sparse};
use crate::ImportError;
use ir::op::{Blocks, ExpertGroups, RopeScaling, Scores, Unary};
use serde_json::{Value, json};

/// The version of a [`LatentConfig`], which decides how experts are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Version {
    /// DeepSeek-V2, whose routers are softmaxes (DeepSeek 2024).
    V2,
    /// DeepSeek-V3, whose routers are sigmoids with a bias of the choice (DeepSeek 2024).
    V3,
}

impl Version {
    /// The `model_type` of its configurations.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Version::V2 => "deepseek_v2",
            Version::V3 => "deepseek_v3",
        }
    }
}

/// A decoder with latent attention.
#[derive(Clone, Debug, PartialEq)]
pub struct LatentConfig {
    pub(crate) version: Version,
    /// The experts; none where all layers are dense.
    pub(crate) experts: Option<ExpertsConfig>,
    pub(crate) layers: u64,
    pub(crate) heads: u64,
    pub(crate) hidden: u64,
    pub(crate) intermediate: u64,
    pub(crate) vocab: u64,
    pub(crate) positions: u64,
    /// The width that queries are compressed to; none where they are not.
    pub(crate) query_rank: Option<u64>,
    /// The width that keys and values are compressed to.
    pub(crate) rank: u64,
    /// The elements of a head's keys that turn, which all heads share; even.
    pub(crate) turned: u64,
    /// The elements of a head's keys that do not.
    pub(crate) still: u64,
    /// The elements of a head's values.
    pub(crate) value_dim: u64,
    /// True when files hold the elements that turn pair by pair.
    pub(crate) interleaved: bool,
    /// The blocks that attention sees.
    pub(crate) sparse: Option<Blocks>,
    /// The modules that predict further tokens: a norm of what they predict from and one of the
    /// next token's embedding, their projections, and a layer like the last.
    pub(crate) further: Option<FurtherConfig>,
    /// The factor of the scores.
    pub(crate) scale: f64,
    pub(crate) activation: Unary,
    pub(crate) epsilon: f64,
    pub(crate) tied: bool,
    /// True when the compressions and the projection out of attention have biases.
    pub(crate) attention_bias: bool,
    /// True when MLPs have biases, of the shared expert too.
    pub(crate) mlp_bias: bool,
    pub(crate) rope_theta: f64,
    pub(crate) rope_scaling: RopeScaling,
    pub(crate) init_std: f64,
}

/// The epsilon that the norms of the compressed queries, keys and values add: transformers takes it
/// from no field.
pub(crate) const LATENT_EPSILON: f64 = 1e-6;

pub(super) fn read(mut f: Fields, version: Version) -> Result<LatentConfig, ImportError> {
    check_common(&mut f)?;
    check_full_attention(&mut f)?;
    let hidden = f.required("hidden_size", WIDTHS)?;
    let layers = f.required("num_hidden_layers", LAYERS)?;
    let heads = f.required("num_attention_heads", HEADS)?;
    let vocab = f.required("vocab_size", VOCAB)?;
    let positions = f.required("max_position_embeddings", POSITIONS)?;
    let intermediate = f.required("intermediate_size", WIDTHS)?;
    f.only(
        "num_key_value_heads",
        &[json!(heads), Value::Null],
        "every head has keys and values of its own, made of what all share",
    )?;
    // Its default is the size of one model.
    if !f.is_null("q_lora_rank") {
        f.required("q_lora_rank", WIDTHS)?;
    }
    let query_rank = f.nullable_integer("q_lora_rank", WIDTHS)?;
    let rank = f.required("kv_lora_rank", WIDTHS)?;
    let turned = f.required("qk_rope_head_dim", WIDTHS)?;
    let still = f.required("qk_nope_head_dim", WIDTHS)?;
    let value_dim = f.required("v_head_dim", WIDTHS)?;
    if turned % 2 == 1 {
        let problem = format!("is {turned}; the rotary embedding needs an even number");
        return Err(f.error("qk_rope_head_dim", problem));
    }
    f.only(
        "head_dim",
        &[json!(turned), Value::Null],
        "it repeats `qk_rope_head_dim`",
    )?;
    f.only(
        "qk_head_dim",
        &[json!(turned + still), Value::Null],
        "it is the sum of `qk_rope_head_dim` and `qk_nope_head_dim`",
    )?;
    let widest = heads * (turned + still).max(value_dim);
    if !WIDTHS.contains(&widest) {
        let most = WIDTHS.end();
        let problem = format!("all heads together are {widest} wide; at most {most}");
        return Err(f.contradiction("num_attention_heads", "v_head_dim", problem));
    }
    check_fixed(&mut f)?;
    let found = rope(
        &mut f,
        &Rotations {
            theta: ("rope_theta", 10_000.0),
            is_partial: false,
            has_yarn: true,
        },
    )?;
    let interleaved = match version {
        Version::V2 => true,
        Version::V3 => f.boolean("rope_interleave")?.unwrap_or(true),
    };
    let further = match version {
        Version::V2 => {
            let why = "DeepSeek-V2 has no modules for further tokens";
            for name in ["num_nextn_predict_layers", "num_mtp_layers"] {
                f.only(name, &[json!(0), Value::Null], why)?;
            }
            None
        }
        Version::V3 => further::read(&mut f)?,
    };
    let depth = further.map_or(0, |f| f.depth);
    if layers + depth > *LAYERS.end() {
        let problem = format!(
            "{layers} and {depth} layers; at most {} in all",
            LAYERS.end()
        );
        return Err(f.contradiction("num_hidden_layers", "num_nextn_predict_layers", problem));
    }
    let config = LatentConfig {
        version,
        experts: experts(&mut f, version, (layers, depth))?,
        layers,
        heads,
        hidden,
        intermediate,
        vocab,
        positions,
        query_rank,
        rank,
        turned,
        still,
        value_dim,
        interleaved,
        sparse: sparse::read(&mut f)?,
        further,
        scale: found.score_scale.powi(2) / ((turned + still) as f64).sqrt(),
        activation: activation(&mut f, "hidden_act", "silu")?,
        epsilon: f.number("rms_norm_eps", EPSILONS)?.unwrap_or(1e-6),
        tied: f.boolean("tie_word_embeddings")?.unwrap_or(false),
        attention_bias: f.boolean("attention_bias")?.unwrap_or(false),
        mlp_bias: version == Version::V2 && f.boolean("mlp_bias")?.unwrap_or(false),
        rope_theta: found.theta,
        rope_scaling: found.scaling,
        init_std: init_std(&mut f)?,
    };
    f.finish(HARMLESS_FIELDS)?;
    Ok(config)
}

/// Checks the fields that have one accepted value.
fn check_fixed(f: &mut Fields) -> Result<(), ImportError> {
    // DeepSeek's own code, of which transformers has its own by now.
    f.has("auto_map");
    f.number("attention_dropout", PROBABILITIES)?;
    f.only(
        "pretraining_tp",
        &[json!(1), Value::Null],
        "matmuls in slices are not supported",
    )?;
    let why = "with a padding id PyTorch's embedding withholds gradients from that row, which is not supported; \
               null trains every row";
    f.only("pad_token_id", &[Value::Null], why)?;
    f.only(
        "ep_size",
        &[json!(1), Value::Null],
        "the plan says how experts are spread; pin expert=N to choose",
    )
}

/// Reads the experts and how they are chosen.
fn experts(
    f: &mut Fields,
    version: Version,
    (layers, depth): (u64, u64),
) -> Result<Option<ExpertsConfig>, ImportError> {
    let first = f.integer("first_k_dense_replace", 0..=*LAYERS.end())?;
    let dense = match (first, version) {
        (Some(n), _) => n,
        (None, Version::V2) => 0,
        (None, Version::V3) => f.required("first_k_dense_replace", 0..=*LAYERS.end())?,
    };
    f.only(
        "output_router_logits",
        &[Value::Bool(false)],
        "with true the routers' balancing loss is added, which is not supported",
    )?;
    for name in ["aux_loss_alpha", "router_aux_loss_coef"] {
        f.number(name, COEFFICIENTS)?;
    }
    f.boolean("seq_aux")?;
    f.only(
        "moe_layer_freq",
        &[json!(1)],
        "every layer behind the first `first_k_dense_replace` has experts",
    )?;
    let count = sized(f, "n_routed_experts", "num_experts", EXPERTS)?;
    let top_k = f.required("num_experts_per_tok", EXPERTS)?;
    if top_k > count {
        let problem = format!("{top_k} of {count} experts");
        return Err(f.contradiction("num_experts_per_tok", "n_routed_experts", problem));
    }
    let intermediate = f.required("moe_intermediate_size", WIDTHS)?;
    let shared = f.required("n_shared_experts", 1..=*EXPERTS.end())? * intermediate;
    if !WIDTHS.contains(&shared) {
        let problem = format!("shared experts are {shared} wide; at most {}", WIDTHS.end());
        return Err(f.contradiction("n_shared_experts", "moe_intermediate_size", problem));
    }
    let (scores, groups, normalize) = match version {
        Version::V2 => softmaxes(f, count, top_k)?,
        Version::V3 => sigmoids(f, count, top_k)?,
    };
    let default_scale = match version {
        Version::V2 => 1.0,
        Version::V3 => 2.5,
    };
    let gate_scale = f.number("routed_scaling_factor", GATE_SCALES)?;
    // Modules behind the last layer have experts whatever the layers have.
    if dense >= layers && depth == 0 {
        return Ok(None);
    }
    Ok(Some(ExpertsConfig {
        top_k,
        shared: Some(shared),
        scores,
        groups,
        choice_bias: version == Version::V3,
        normalize,
        gate_scale: gate_scale.unwrap_or(default_scale),
        dense: (0..dense.min(layers)).collect(),
        ..ExpertsConfig::plain(count, intermediate)
    }))
}

/// Scores, groups, and whether gates are divided by their sum.
type Choice = (Scores, Option<ExpertGroups>, bool);

/// Reads how V2 chooses.
fn softmaxes(f: &mut Fields, count: u64, top_k: u64) -> Result<Choice, ImportError> {
    f.only(
        "scoring_func",
        &[json!("softmax")],
        "the routers of deepseek_v2 are softmaxes",
    )?;
    f.only(
        "norm_topk_prob",
        &[Value::Bool(false), Value::Null],
        "transformers does not read it, and gates stay as they are",
    )?;
    let groups = match f.string("topk_method")?.unwrap_or("greedy") {
        "greedy" => {
            for name in ["n_group", "topk_group"] {
                f.nullable_integer(name, EXPERTS)?;
            }
            None
        }
        "group_limited_greedy" => Some(groups(f, (count, top_k), 1)?),
        other => {
            let accepted = "accepted: \"greedy\" or \"group_limited_greedy\"";
            return Err(f.error("topk_method", format!("is {other:?}; {accepted}")));
        }
    };
    Ok((Scores::Softmax, groups, false))
}

/// Reads how V3 chooses.
fn sigmoids(f: &mut Fields, count: u64, top_k: u64) -> Result<Choice, ImportError> {
    f.only(
        "scoring_func",
        &[json!("sigmoid")],
        "the routers of deepseek_v3 are sigmoids",
    )?;
    f.only(
        "topk_method",
        &[json!("noaux_tc")],
        "groups by their two best experts, with a bias of the choice",
    )?;
    let groups = groups(f, (count, top_k), 2)?;
    let normalize = f.boolean("norm_topk_prob")?.unwrap_or(true);
    Ok((Scores::Sigmoid, Some(groups), normalize))
}

/// Reads the groups that a token chooses first, by their `best` largest scores.
fn groups(
    f: &mut Fields,
    (experts, top_k): (u64, u64),
    best: u64,
) -> Result<ExpertGroups, ImportError> {
    let count = f.required("n_group", EXPERTS)?;
    let kept = f.required("topk_group", EXPERTS)?;
    if !experts.is_multiple_of(count) || experts / count < best {
        let problem = format!("{experts} experts in {count} equal groups of at least {best}");
        return Err(f.contradiction("n_routed_experts", "n_group", problem));
    }
    if kept > count || kept * (experts / count) < top_k {
        let each = experts / count;
        let problem = format!("{top_k} experts from {kept} of {count} groups of {each}");
        return Err(f.contradiction("num_experts_per_tok", "topk_group", problem));
    }
    Ok(ExpertGroups { count, kept, best })
}
