//! Fields of `Mamba2Config` and `NemotronHConfig`: models whose blocks are one mixer each, a state space
//! (Mamba-2), attention, an MLP or experts, in the order of a pattern.
//!
//! Nemotron-H says its blocks letter by letter (`hybrid_override_pattern`: `M`, `*`, `-` and `E`) or word by
//! word (`layers_block_type`), and so those of a module that predicts further tokens
//! (`mtp_hybrid_override_pattern`, `mtp_layers_block_type`).

use super::document::Fields;
use super::further::{self, FurtherConfig};
use super::{EPSILONS, EXPERTS, GATE_SCALES, HARMLESS_FIELDS, HEADS, LAYERS, POSITIONS};
use super::{ExpertsConfig, PROBABILITIES, VOCAB, WIDTHS};
use super::{check_common, check_full_attention, init_std, sparse};
use crate::ImportError;
use ir::op::{Blocks, ExpertGroups, Scores};
use serde_json::{Value, json};

/// The mixer of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mixer {
    /// A state space.
    Mamba,
    /// Attention without positions.
    Attention,
    /// An MLP with squared ReLU.
    Mlp,
    /// A mixture of such MLPs.
    Experts,
}

/// The state space of a block.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ScanConfig {
    /// The groups of heads, each with a pair of directions of its own.
    pub(crate) groups: u64,
    /// The heads of a group.
    pub(crate) heads: u64,
    /// The elements of a head.
    pub(crate) width: u64,
    /// The rows of a head's state.
    pub(crate) state: u64,
    /// The tokens that the convolution looks at.
    pub(crate) taps: u64,
    /// The tokens of a chunk.
    pub(crate) chunk: u64,
    /// The least time step.
    pub(crate) dt_min: f64,
    /// The range of initial time steps.
    pub(crate) times: (f64, f64),
    /// True when the convolution has biases.
    pub(crate) conv_bias: bool,
    /// True when the projections into and out of the block have biases.
    pub(crate) bias: bool,
}

impl ScanConfig {
    /// The width of all heads together.
    pub(crate) fn inner(&self) -> u64 {
        self.groups * self.heads * self.width
    }
}

/// A model of blocks with one mixer each.
#[derive(Clone, Debug, PartialEq)]
pub struct HybridConfig {
    /// True for `nemotron_h`, false for `mamba2`.
    pub(crate) is_nemotron: bool,
    /// The mixers of the blocks.
    pub(crate) blocks: Vec<Mixer>,
    /// The modules that predict further tokens.
    pub(crate) further: Option<FurtherConfig>,
    /// The mixers of the blocks of each such module.
    pub(crate) further_blocks: Vec<Mixer>,
    pub(crate) hidden: u64,
    pub(crate) vocab: u64,
    pub(crate) positions: u64,
    pub(crate) scan: ScanConfig,
    pub(crate) heads: u64,
    pub(crate) kv_heads: u64,
    pub(crate) head_dim: u64,
    /// The blocks that attention sees.
    pub(crate) sparse: Option<Blocks>,
    /// The width inside an MLP.
    pub(crate) intermediate: u64,
    /// The experts, where there are blocks of them.
    pub(crate) experts: Option<ExpertsConfig>,
    /// The width that experts work in, where it is another than the model's.
    pub(crate) latent: Option<u64>,
    pub(crate) epsilon: f64,
    pub(crate) tied: bool,
    pub(crate) init_std: f64,
}

/// Fields that change no figure of a model with weights: how it is run, and what its initial values are
/// like. Training from scratch starts from ours, which neither scale what a block adds by the number of
/// blocks (`rescale_prenorm_residual`) nor have a least time step (`time_step_floor`). Residuals are in
/// the compute type (`residual_in_fp32`).
const EXECUTION: [&str; 12] = [
    "auto_map",
    "mamba_ssm_cache_dtype",
    "moe_shared_expert_overlap",
    "num_logits_to_keep",
    "use_mamba_kernels",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "time_step_rank",
    "time_step_floor",
    "norm_eps",
    "partial_rotary_factor",
    "rope_theta",
];
/// Time steps that heads begin with.
const TIMES: super::Numbers = (
    |x| x > 0.0 && x <= 1e3,
    "expected a positive number up to 1000",
);

pub(super) fn read_mamba2(mut f: Fields) -> Result<HybridConfig, ImportError> {
    check_common(&mut f)?;
    let hidden = f.required("hidden_size", WIDTHS)?;
    let layers = f.required("num_hidden_layers", LAYERS)?;
    let heads = f.required("num_heads", HEADS)?;
    let scan = scan(&mut f, heads, ["head_dim", "state_size"], 256, false)?;
    let expand = f.integer("expand", 1..=1024)?.unwrap_or(2);
    if scan.inner() != hidden * expand {
        let inner = scan.inner();
        let problem = format!("{inner} in all heads is not {expand} (`expand`) times {hidden}");
        return Err(f.contradiction("num_heads", "hidden_size", problem));
    }
    let why = "the state space has no other";
    f.only("hidden_act", &[json!("silu"), json!("swish")], why)?;
    let unbounded = json!([0.0, {"__float__": "Infinity"}]);
    let why = "time steps have no bounds, as in every published size";
    f.only("time_step_limit", &[unbounded, Value::Null], why)?;
    f.nullable_integer("pad_token_id", 0..=*VOCAB.end())?;
    EXECUTION.iter().for_each(|name| {
        f.has(name);
    });
    let config = HybridConfig {
        is_nemotron: false,
        blocks: vec![Mixer::Mamba; layers as usize],
        further: None,
        further_blocks: Vec::new(),
        hidden,
        vocab: f.required("vocab_size", VOCAB)?,
        positions: *POSITIONS.end(),
        scan,
        heads: 1,
        kv_heads: 1,
        head_dim: 1,
        sparse: None,
        intermediate: 1,
        experts: None,
        latent: None,
        epsilon: f.number("layer_norm_epsilon", EPSILONS)?.unwrap_or(1e-5),
        tied: f.boolean("tie_word_embeddings")?.unwrap_or(false),
        init_std: init_std(&mut f)?,
    };
    f.finish(HARMLESS_FIELDS)?;
    Ok(config)
}

pub(super) fn read_nemotron_h(mut f: Fields) -> Result<HybridConfig, ImportError> {
    check_common(&mut f)?;
    check_full_attention(&mut f)?;
    let hidden = f.required("hidden_size", WIDTHS)?;
    let blocks = blocks(&mut f)?;
    let further = further::read(&mut f)?;
    let further_blocks = further_blocks(&mut f, further.is_some())?;
    let more = further.map_or(0, |f| f.depth) * further_blocks.len() as u64;
    if blocks.len() as u64 + more > *LAYERS.end() {
        let (n, most) = (blocks.len(), LAYERS.end());
        let problem = format!("{n} blocks and {more} for further tokens; at most {most} in all");
        return Err(f.error("num_nextn_predict_layers", problem));
    }
    let heads = f.required("num_attention_heads", HEADS)?;
    let kv_heads = f.required("num_key_value_heads", HEADS)?;
    if !heads.is_multiple_of(kv_heads) {
        let problem = format!("{heads} is not a multiple of {kv_heads}");
        return Err(f.contradiction("num_attention_heads", "num_key_value_heads", problem));
    }
    let head_dim = f.required("head_dim", WIDTHS)?;
    if !WIDTHS.contains(&(heads * head_dim)) {
        let (all, most) = (heads * head_dim, WIDTHS.end());
        let problem = format!("all heads together are {all} wide; at most {most}");
        return Err(f.contradiction("num_attention_heads", "head_dim", problem));
    }
    let mamba_heads = f.required("mamba_num_heads", HEADS)?;
    let mut scan = scan(
        &mut f,
        mamba_heads,
        ["mamba_head_dim", "ssm_state_size"],
        128,
        true,
    )?;
    // Its least time step is that of the initial values, in transformers.
    scan.dt_min = scan.times.0;
    f.has("time_step_limit");
    f.integer("expand", 1..=1024)?;
    check_fixed(&mut f)?;
    let has_experts = blocks
        .iter()
        .chain(&further_blocks)
        .any(|b| *b == Mixer::Experts);
    let experts = match has_experts {
        true => Some(experts(&mut f, &blocks)?),
        false => {
            for name in EXPERT_FIELDS {
                f.has(name);
            }
            None
        }
    };
    let config = HybridConfig {
        is_nemotron: true,
        hidden,
        vocab: f.required("vocab_size", VOCAB)?,
        positions: f.required("max_position_embeddings", POSITIONS)?,
        scan,
        heads,
        kv_heads,
        head_dim,
        sparse: sparse::read(&mut f)?,
        intermediate: f.required("intermediate_size", WIDTHS)?,
        latent: f.nullable_integer("moe_latent_size", WIDTHS)?,
        experts,
        blocks,
        further,
        further_blocks,
        epsilon: f.number("layer_norm_epsilon", EPSILONS)?.unwrap_or(1e-5),
        tied: f.boolean("tie_word_embeddings")?.unwrap_or(false),
        init_std: init_std(&mut f)?,
    };
    f.finish(HARMLESS_FIELDS)?;
    Ok(config)
}

/// Reads the state space, whose names differ.
fn scan(
    f: &mut Fields,
    heads: u64,
    [width, state]: [&'static str; 2],
    chunk: u64,
    is_nemotron: bool,
) -> Result<ScanConfig, ImportError> {
    let width = f.required(width, WIDTHS)?;
    let state = f.required(state, WIDTHS)?;
    let groups = f.required("n_groups", HEADS)?;
    if !heads.is_multiple_of(groups) {
        let problem = format!("{heads} heads do not make {groups} equal groups");
        let name = if is_nemotron {
            "mamba_num_heads"
        } else {
            "num_heads"
        };
        return Err(f.contradiction(name, "n_groups", problem));
    }
    if !WIDTHS.contains(&(heads * width)) || !WIDTHS.contains(&(groups * state)) {
        let most = WIDTHS.end();
        let problem = format!("makes heads or groups wider than {most} in all");
        return Err(f.error("n_groups", problem));
    }
    let low = f.number("time_step_min", TIMES)?.unwrap_or(0.001);
    let high = f.number("time_step_max", TIMES)?.unwrap_or(0.1);
    if low > high {
        let problem = format!("{low} is above {high}");
        return Err(f.contradiction("time_step_min", "time_step_max", problem));
    }
    Ok(ScanConfig {
        groups,
        heads: heads / groups,
        width,
        state,
        taps: f.integer("conv_kernel", 1..=64)?.unwrap_or(4),
        chunk: f.integer("chunk_size", POSITIONS)?.unwrap_or(chunk),
        dt_min: 0.0,
        times: (low, high),
        conv_bias: f.boolean("use_conv_bias")?.unwrap_or(true),
        bias: f.boolean("use_bias")?.unwrap_or(false),
    })
}

/// Reads the order of the mixers.
fn blocks(f: &mut Fields) -> Result<Vec<Mixer>, ImportError> {
    const PATTERN: &str = "hybrid_override_pattern";
    let words = match f.has("layers_block_type") {
        true => "layers_block_type",
        false => "layer_types",
    };
    let Some((field, blocks)) = mixers(f, words, PATTERN)? else {
        return Err(f.missing(PATTERN, "a letter for each layer"));
    };
    if let Some(layers) = f.integer("num_hidden_layers", LAYERS)?
        && layers != blocks.len() as u64
    {
        let problem = format!("{} layers are listed, of {layers}", blocks.len());
        return Err(f.contradiction(field, "num_hidden_layers", problem));
    }
    Ok(blocks)
}

/// Reads the order of the mixers of a module that predicts further tokens; none where no module
/// does.
fn further_blocks(f: &mut Fields, is_there: bool) -> Result<Vec<Mixer>, ImportError> {
    const WORDS: &str = "mtp_layers_block_type";
    const PATTERN: &str = "mtp_hybrid_override_pattern";
    if !is_there {
        for name in [WORDS, PATTERN] {
            f.has(name);
        }
        return Ok(Vec::new());
    }
    match mixers(f, WORDS, PATTERN)? {
        Some((_, blocks)) => Ok(blocks),
        None => Err(f.missing(PATTERN, "a letter for each block of a module")),
    }
}

/// Reads an order of mixers that is listed word by word or letter by letter, and by which field.
fn mixers(
    f: &mut Fields,
    name: &'static str,
    letters: &'static str,
) -> Result<Option<(&'static str, Vec<Mixer>)>, ImportError> {
    const WORDS: [&str; 6] = [
        "mamba",
        "linear_attention",
        "attention",
        "full_attention",
        "mlp",
        "moe",
    ];
    let of_word = |word: &&str| match *word {
        "attention" | "full_attention" => Mixer::Attention,
        "mlp" => Mixer::Mlp,
        "moe" => Mixer::Experts,
        _ => Mixer::Mamba,
    };
    let words = f.words(name, &WORDS)?;
    let listed: Option<Vec<Mixer>> = words.map(|words| words.iter().map(of_word).collect());
    let pattern = match f.has(letters) {
        true => f.string(letters)?,
        false => None,
    };
    let of_letter = |letter| match letter {
        'M' => Some(Mixer::Mamba),
        '*' => Some(Mixer::Attention),
        '-' => Some(Mixer::Mlp),
        'E' => Some(Mixer::Experts),
        _ => None,
    };
    let spelled = match pattern.map(|p| p.chars().map(of_letter).collect::<Option<Vec<Mixer>>>()) {
        Some(None) => {
            let expected = "expected a letter for each layer: M (Mamba-2), * (attention), - (MLP) or E (experts)";
            return Err(f.error(letters, expected.into()));
        }
        Some(spelled) => spelled,
        None => None,
    };
    let field = if listed.is_some() { name } else { letters };
    let blocks = match (listed, spelled) {
        (Some(listed), Some(spelled)) if listed != spelled => {
            let problem = "the two list other layers; leave one of them out".to_string();
            return Err(f.contradiction(name, letters, problem));
        }
        (Some(blocks), _) | (None, Some(blocks)) => blocks,
        (None, None) => return Ok(None),
    };
    let n = blocks.len() as u64;
    if !LAYERS.contains(&n) {
        let problem = format!(
            "has {n} layers; expected {} to {}",
            LAYERS.start(),
            LAYERS.end()
        );
        return Err(f.error(field, problem));
    }
    Ok(Some((field, blocks)))
}

/// Checks the fields that have one accepted value.
fn check_fixed(f: &mut Fields) -> Result<(), ImportError> {
    for name in ["attention_dropout", "hidden_dropout"] {
        f.number(name, PROBABILITIES)?;
    }
    let why = "transformers gives attention, MLPs and experts none";
    for name in ["attention_bias", "mlp_bias", "mamba_proj_bias"] {
        f.only(name, &[Value::Bool(false)], why)?;
    }
    f.only("mlp_hidden_act", &[json!("relu2")], "a squared ReLU")?;
    let why = "the state space has no other";
    f.only("mamba_hidden_act", &[json!("silu"), json!("swish")], why)?;
    // The row of the padding token is trained like every other, in transformers too.
    f.nullable_integer("pad_token_id", 0..=*VOCAB.end())?;
    EXECUTION.iter().for_each(|name| {
        f.has(name);
    });
    Ok(())
}

/// Fields of experts, which a model without them may have all the same.
const EXPERT_FIELDS: [&str; 10] = [
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "n_shared_experts",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "routed_scaling_factor",
    "output_router_logits",
];

/// Reads the experts, which one expert for all tokens stands beside.
fn experts(f: &mut Fields, blocks: &[Mixer]) -> Result<ExpertsConfig, ImportError> {
    f.only(
        "output_router_logits",
        &[Value::Bool(false)],
        "with true the routers' balancing loss is added, which is not supported",
    )?;
    let count = f.required("n_routed_experts", EXPERTS)?;
    let top_k = f.required("num_experts_per_tok", EXPERTS)?;
    if top_k > count {
        let problem = format!("{top_k} of {count} experts");
        return Err(f.contradiction("num_experts_per_tok", "n_routed_experts", problem));
    }
    let intermediate = f.required("moe_intermediate_size", WIDTHS)?;
    let shared = f.required("moe_shared_expert_intermediate_size", WIDTHS)?;
    f.only(
        "n_shared_experts",
        &[json!(1)],
        "one expert that all tokens go to, as wide as `moe_shared_expert_intermediate_size`",
    )?;
    let n_groups = f.integer("n_group", EXPERTS)?.unwrap_or(1);
    let kept = f.integer("topk_group", EXPERTS)?.unwrap_or(1);
    let groups = (n_groups > 1).then_some(ExpertGroups {
        count: n_groups,
        kept,
        best: 2,
    });
    let each = count / n_groups;
    if !count.is_multiple_of(n_groups) || n_groups > 1 && each < 2 {
        let problem = format!("{count} experts in {n_groups} equal groups of at least 2");
        return Err(f.contradiction("n_routed_experts", "n_group", problem));
    }
    if kept > n_groups || kept * each < top_k {
        let problem = format!("{top_k} experts from {kept} of {n_groups} groups of {each}");
        return Err(f.contradiction("num_experts_per_tok", "topk_group", problem));
    }
    let others = blocks
        .iter()
        .zip(0..)
        .filter(|(b, _)| **b != Mixer::Experts);
    Ok(ExpertsConfig {
        top_k,
        shared: Some(shared),
        scores: Scores::Sigmoid,
        groups,
        choice_bias: true,
        normalize: f.boolean("norm_topk_prob")?.unwrap_or(true),
        gate_scale: f
            .number("routed_scaling_factor", GATE_SCALES)?
            .unwrap_or(1.0),
        dense: others.map(|(_, i)| i).collect(),
        ..ExpertsConfig::plain(count, intermediate)
    })
}
