//! Hugging Face `config.json` of `model_type` `gpt2`, `llama` and its relatives (`gemma`, `gemma2`, `gemma3_text`, `gpt_oss`, `mistral`, `mixtral`,
//! `qwen2`, `qwen2_moe`, `qwen3`, `qwen3_moe`), `deepseek_v2` and `deepseek_v3`, and `opt`, `gpt_neox`,
//! `nemotron` and `bloom`, `mamba2` and `nemotron_h`, in the spellings of transformers 4 and 5; and of `wide_resnet`, in fields of ours.
//!
//! A field is read, has one accepted value, is on the list [`HARMLESS_FIELDS`], or is an
//! error. Absent fields take the defaults of transformers, except those that size the model,
//! which must be there. The model's dropout probabilities are checked but not used: training
//! takes them from `TrainSpec::dropout`, which applies wherever the model has dropout.
//!
//! Invariant: a config that exists is valid. Its fields are private to the crate, so that no
//! other can make one.

mod decoder;
mod document;
mod experts;
mod further;
mod gpt2;
mod hybrid;
mod latent;
mod llama;
mod sparse;
mod wide_resnet;

pub use decoder::DecoderConfig;
pub(crate) use decoder::{Plain, Rotation};
pub(crate) use document::without_position;
pub(crate) use further::FurtherConfig;
pub use hybrid::HybridConfig;
pub(crate) use hybrid::{Mixer, ScanConfig};
pub use latent::LatentConfig;
pub(crate) use latent::{LATENT_EPSILON, Version};
pub(crate) use sparse::of_sequence as blocks_of_sequence;
pub(crate) use wide_resnet::Bottleneck;
pub use wide_resnet::WideResnetConfig;

use crate::ImportError;
use document::{Document, Fields};
use ir::op::{Blocks, ExpertGroups, RopeScaling, Scores, Unary};
use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::path::Path;

/// Fields that do not change loss or gradients of a language model's training and are
/// ignored: names and provenance, the stored element type (weights are read by their own),
/// generation, other heads (`summary_*`, labels), output options, caching.
pub const HARMLESS_FIELDS: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "_num_labels",
    "architectures",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "cache_implementation",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "id2label",
    "is_llama_config",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "name_or_path",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "output_scores",
    "predict_special_tokens",
    "prefix",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
];

/// Numbers of layers; up to ten times the deepest published models.
pub(crate) const LAYERS: RangeInclusive<u64> = 1..=10_000;
/// Numbers of heads and of KV heads.
pub(crate) const HEADS: RangeInclusive<u64> = 1..=65_536;
/// Widths (hidden, MLP, head, all heads together). With the most layers, a model of such
/// widths stays below 2^58 parameters: sums of sizes in bytes do not overflow.
pub(crate) const WIDTHS: RangeInclusive<u64> = 1..=1_048_576;
/// Numbers of positions.
pub(crate) const POSITIONS: RangeInclusive<u64> = 1..=134_217_728;
/// Numbers of experts in a layer.
pub(crate) const EXPERTS: RangeInclusive<u64> = 1..=4096;
/// Sizes of the vocabulary; with the widest hidden, a table of 2^44 elements.
pub(crate) const VOCAB: RangeInclusive<u64> = 1..=16_777_216;

/// The numbers that a field may hold, and the words of a message for those that it may not.
pub(crate) type Numbers = (fn(f64) -> bool, &'static str);
/// Numbers that are added to a variance or mean square: from 1 on nothing would be normalised.
pub(crate) const EPSILONS: Numbers = (|x| x > 0.0 && x < 1.0, "expected a number between 0 and 1");
/// Standard deviations of initial weights.
const DEVIATIONS: Numbers = (
    |x| (0.0..=100.0).contains(&x),
    "expected a number from 0 to 100",
);
/// Dropout probabilities, which are checked and not used.
pub(crate) const PROBABILITIES: Numbers = (
    |x| (0.0..1.0).contains(&x),
    "expected a probability in [0, 1)",
);
/// Bases of the rotary frequencies; published models have 1e4 to 1e8.
pub(crate) const THETAS: Numbers = (
    |x| x > 1.0 && x <= 1e15,
    "expected a number above 1, up to 1e15",
);
/// Shares of a head that turn.
pub(crate) const SHARES: Numbers = (
    |x| x > 0.0 && x <= 1.0,
    "expected a share above 0, at most 1",
);
/// Bounds of scores or logits.
pub(crate) const CAPS: Numbers = (
    |x| x > 0.0 && x <= 1e6,
    "expected a positive number up to 1e6",
);
/// Numbers whose root divides the scores.
pub(crate) const SCALARS: Numbers = (
    |x| x > 0.0 && x <= 1e9,
    "expected a positive number up to 1e9",
);
/// Factors that stretch rotary positions.
pub(crate) const FACTORS: Numbers = (
    |x| (1.0..=1e6).contains(&x),
    "expected a positive number from 1 to 1e6",
);
/// Factors that bound the frequencies which Llama 3 stretches.
pub(crate) const FREQUENCIES: Numbers = (
    |x| x > 0.0 && x <= 1e6,
    "expected a positive number up to 1e6",
);
/// Shares of YaRN's logarithm; 0 stands for none.
pub(crate) const MSCALES: Numbers = (
    |x| (0.0..=1e3).contains(&x),
    "expected a number from 0 to 1000",
);
/// Factors of the gates of experts.
pub(crate) const GATE_SCALES: Numbers = (
    |x| x > 0.0 && x <= 1e6,
    "expected a positive number up to 1e6",
);
/// Coefficients of a loss, which are checked and not used.
pub(crate) const COEFFICIENTS: Numbers = (
    |x| (0.0..=1e6).contains(&x),
    "expected a number from 0 to 1e6",
);

/// A GPT-2 model.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpt2Config {
    pub(crate) layers: u64,
    pub(crate) heads: u64,
    pub(crate) hidden: u64,
    pub(crate) positions: u64,
    pub(crate) inner: u64,
    pub(crate) vocab: u64,
    pub(crate) activation: Unary,
    pub(crate) epsilon: f64,
    pub(crate) tied: bool,
    /// True when scores are divided by the root of the head dim.
    pub(crate) scale_attention: bool,
    /// The blocks that attention sees.
    pub(crate) sparse: Option<Blocks>,
    pub(crate) init_std: f64,
}

/// The family of a [`LlamaConfig`], which decides names in files and what is optional.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    /// Gemma, whose embedding is scaled and whose gains are stored less one (Gemma team 2024).
    Gemma,
    /// Gemma 2, with norms behind attention and MLP too, windows in every other layer, and bounds of
    /// scores and logits (Gemma team 2024).
    Gemma2,
    /// Gemma 3, with norms of queries and keys, and a base of the rotation of its own in layers with
    /// windows (Gemma team 2025).
    Gemma3,
    /// gpt-oss, with attention sinks, windows in every other layer, and experts with biases whose
    /// activation is clamped (OpenAI 2025).
    GptOss,
    /// Llama, with dense layers.
    Llama,
    /// Mistral, whose attention may have a window (Jiang et al. 2023).
    Mistral,
    /// Mixtral, with experts in every layer (Jiang et al. 2024).
    Mixtral,
    /// Phi-3, whose files have queries, keys and values in one matrix (Abdin et al. 2024).
    Phi3,
    /// Qwen2, Qwen2.5 among them, with biases of queries, keys and values (Yang et al. 2024).
    Qwen2,
    /// Qwen2-MoE: a Qwen2 with experts in some layers, one of them shared by all tokens.
    Qwen2Moe,
    /// Qwen3, with norms of queries and keys in place of the biases (Yang et al. 2025).
    Qwen3,
    /// Qwen3-MoE, with experts in some layers, and norms of queries and keys (Yang et al. 2025).
    Qwen3Moe,
}

impl Family {
    const ALL: [Family; 12] = [
        Family::Gemma,
        Family::Gemma2,
        Family::Gemma3,
        Family::GptOss,
        Family::Llama,
        Family::Mistral,
        Family::Mixtral,
        Family::Phi3,
        Family::Qwen2,
        Family::Qwen2Moe,
        Family::Qwen3,
        Family::Qwen3Moe,
    ];

    /// The `model_type` of its configurations.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Family::Gemma => "gemma",
            Family::Gemma2 => "gemma2",
            Family::Gemma3 => "gemma3_text",
            Family::GptOss => "gpt_oss",
            Family::Llama => "llama",
            Family::Mistral => "mistral",
            Family::Mixtral => "mixtral",
            Family::Phi3 => "phi3",
            Family::Qwen2 => "qwen2",
            Family::Qwen2Moe => "qwen2_moe",
            Family::Qwen3 => "qwen3",
            Family::Qwen3Moe => "qwen3_moe",
        }
    }
    fn of(name: &str) -> Option<Family> {
        Family::ALL.into_iter().find(|f| f.name() == name)
    }
    /// Says whether it is a Gemma, of any version.
    pub(crate) fn is_gemma(self) -> bool {
        matches!(self, Family::Gemma | Family::Gemma2 | Family::Gemma3)
    }
    /// Says whether files hold the gains of norms less one.
    pub(crate) fn has_centred_gains(self) -> bool {
        self.is_gemma()
    }
    /// Says whether embeddings are multiplied by the root of the hidden size.
    pub(crate) fn scales_embeddings(self) -> bool {
        self.is_gemma()
    }
    /// Says whether norms stand behind attention and MLP too.
    pub(crate) fn has_post_norms(self) -> bool {
        matches!(self, Family::Gemma2 | Family::Gemma3)
    }
    /// Says whether files have queries, keys and values in one matrix, and gate and up in another.
    pub(crate) fn is_fused(self) -> bool {
        self == Family::Phi3
    }
    /// Says whether each head has a logit that takes a share of every row of its attention.
    pub(crate) fn has_sinks(self) -> bool {
        self == Family::GptOss
    }
    /// Says whether queries and keys are normalised head by head.
    pub(crate) fn normalises_heads(self) -> bool {
        matches!(self, Family::Gemma3 | Family::Qwen3 | Family::Qwen3Moe)
    }
}

/// The mixture of experts that stands for the MLP of some layers.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ExpertsConfig {
    /// The number of experts in a layer.
    pub(crate) count: u64,
    /// The number of experts that a token goes to.
    pub(crate) top_k: u64,
    /// The width inside an expert.
    pub(crate) intermediate: u64,
    /// The width inside the expert that every token goes to, beside the chosen ones.
    pub(crate) shared: Option<u64>,
    /// True when a gate of its own scales what that expert gives, token by token.
    pub(crate) shared_gate: bool,
    /// The function that the router applies to its logits.
    pub(crate) scores: Scores,
    /// The groups of experts that a token chooses first.
    pub(crate) groups: Option<ExpertGroups>,
    /// True when a bias, which training leaves as it is, is added to the scores for the choice.
    pub(crate) choice_bias: bool,
    /// True when the gates of a token sum to one, before they are scaled.
    pub(crate) normalize: bool,
    /// The factor of the gates.
    pub(crate) gate_scale: f64,
    /// The bounded activation of experts, which have biases then, and so has the router.
    pub(crate) clamp: Option<Clamp>,
    /// One layer in this many has experts.
    pub(crate) every: u64,
    /// The layers that have none all the same.
    pub(crate) dense: BTreeSet<u64>,
    /// The capacity factor: an expert's slots over the tokens that it gets on average.
    pub(crate) capacity_factor: f64,
}

/// The figures of a gated activation whose operands are kept within bounds (gpt-oss).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Clamp {
    /// Factor within the sigmoid.
    pub(crate) alpha: f64,
    /// The bound.
    pub(crate) limit: f64,
}

impl ExpertsConfig {
    /// Experts in every layer, chosen by the plainest of routers.
    pub(crate) fn plain(count: u64, intermediate: u64) -> Self {
        ExpertsConfig {
            count,
            top_k: 1,
            intermediate,
            shared: None,
            shared_gate: false,
            scores: Scores::Softmax,
            groups: None,
            choice_bias: false,
            normalize: true,
            gate_scale: 1.0,
            clamp: None,
            every: 1,
            dense: BTreeSet::new(),
            capacity_factor: DEFAULT_EXPERT_CAPACITY,
        }
    }
    /// Says whether a layer has experts.
    pub(crate) fn are_in(&self, layer: u64) -> bool {
        (layer + 1).is_multiple_of(self.every) && !self.dense.contains(&layer)
    }
    /// Returns an expert's slots for a sample of `tokens`: `ceil(factor * top_k * tokens / count)`,
    /// and at most the tokens, as a token chooses an expert once.
    pub(crate) fn capacity(&self, tokens: u64) -> u64 {
        let mean = self.top_k as f64 * tokens as f64 / self.count as f64;
        ((self.capacity_factor * mean).ceil() as u64).clamp(1, tokens.max(1))
    }
}

/// A Llama model, or one of its relatives with experts.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    pub(crate) family: Family,
    pub(crate) experts: Option<ExpertsConfig>,
    /// True when queries and keys are normalised head by head.
    pub(crate) qk_norm: bool,
    pub(crate) layers: u64,
    pub(crate) heads: u64,
    pub(crate) kv_heads: u64,
    pub(crate) head_dim: u64,
    pub(crate) hidden: u64,
    pub(crate) intermediate: u64,
    pub(crate) vocab: u64,
    pub(crate) positions: u64,
    /// The tokens that attention looks back over, the present one among them; `None` is all.
    pub(crate) window: Option<u64>,
    /// The layers whose attention looks back over all tokens all the same.
    pub(crate) whole: BTreeSet<u64>,
    /// The blocks that attention sees, of those of its window.
    pub(crate) sparse: Option<Blocks>,
    /// The factor of the scores.
    pub(crate) scale: f64,
    /// The bound of scores.
    pub(crate) score_cap: Option<f64>,
    /// The bound of logits.
    pub(crate) logit_cap: Option<f64>,
    pub(crate) activation: Unary,
    pub(crate) epsilon: f64,
    pub(crate) tied: bool,
    /// True when queries, keys and values have biases.
    pub(crate) qkv_bias: bool,
    /// True when the projection out of attention has a bias.
    pub(crate) out_bias: bool,
    pub(crate) mlp_bias: bool,
    pub(crate) rope_theta: f64,
    pub(crate) rope_scaling: RopeScaling,
    /// The elements of a head that turn, the first of them; even.
    pub(crate) turned: u64,
    /// The base of the rotation in layers with a window, where it is another, without scaling.
    pub(crate) local_theta: Option<f64>,
    pub(crate) init_std: f64,
}

impl LlamaConfig {
    /// The tokens that attention looks back over in a layer, of sequences of that length: none where
    /// it is all of them.
    pub(crate) fn window_in(&self, layer: u64, sequence: u64) -> Option<u64> {
        let window = self.window.filter(|_| !self.whole.contains(&layer));
        window.filter(|w| *w < sequence)
    }
    /// Base and scaling of the rotation in a layer.
    pub(crate) fn rotation_in(&self, layer: u64) -> (f64, RopeScaling) {
        let is_local = !self.whole.contains(&layer);
        match self.local_theta.filter(|_| is_local) {
            Some(theta) => (theta, RopeScaling::None),
            None => (self.rope_theta, self.rope_scaling),
        }
    }
}

/// A model that can be built; valid by construction.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelConfig {
    /// `model_type` `gpt2`.
    Gpt2(Gpt2Config),
    /// `model_type` `llama`, or one of its relatives.
    Llama(LlamaConfig),
    /// `model_type` `opt`, `gpt_neox`, `nemotron` or `bloom`.
    Decoder(DecoderConfig),
    /// `model_type` `deepseek_v2` or `deepseek_v3`.
    Latent(LatentConfig),
    /// `model_type` `mamba2` or `nemotron_h`.
    Hybrid(HybridConfig),
    /// `model_type` `wide_resnet`.
    WideResnet(WideResnetConfig),
}

/// The accepted values of `model_type`.
pub const MODEL_TYPES: [&str; 22] = [
    "bloom",
    "deepseek_v2",
    "deepseek_v3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "llama",
    "mamba2",
    "mistral",
    "mixtral",
    "nemotron",
    "nemotron_h",
    "opt",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "wide_resnet",
];

/// The accepted families, as messages list them.
fn families() -> String {
    let quoted: Vec<String> = MODEL_TYPES.iter().map(|t| format!("{t:?}")).collect();
    let (last, others) = quoted.split_last().expect("there are families");
    format!("{} or {last}", others.join(", "))
}

/// The default capacity factor of experts (slots over the tokens that an expert gets on average),
/// as in training with the Switch transformer (Fedus et al. 2021).
pub const DEFAULT_EXPERT_CAPACITY: f64 = 1.25;

impl ModelConfig {
    /// Reads a `config.json`, or the one in a folder.
    ///
    /// Fails as [`ModelConfig::parse`] does, and when the file cannot be read.
    pub fn load(path: &Path) -> Result<Self, ImportError> {
        let path = if path.is_dir() {
            path.join("config.json")
        } else {
            path.to_path_buf()
        };
        let io = |source| ImportError::Io {
            path: path.clone(),
            source,
        };
        let mut bytes = Vec::new();
        let file = crate::input::open(&path).map_err(io)?;
        // One byte more than accepted, so that `parse` sees that a larger file is too large.
        std::io::Read::read_to_end(
            &mut std::io::Read::take(file, document::MAX_BYTES as u64 + 1),
            &mut bytes,
        )
        .map_err(io)?;
        Self::parse(&path.display().to_string(), &bytes)
    }

    /// Parses the bytes of a `config.json`; `file` is its name in messages.
    ///
    /// Fails on malformed JSON, on fields of a wrong type, out of range, unknown or
    /// contradictory, each with its name, line and column.
    pub fn parse(file: &str, bytes: &[u8]) -> Result<Self, ImportError> {
        let document = Document::parse(file, bytes)?;
        let mut fields = document.fields();
        match fields.string("model_type")? {
            Some("gpt2") => gpt2::read(fields).map(ModelConfig::Gpt2),
            Some("deepseek_v2") => latent::read(fields, Version::V2).map(ModelConfig::Latent),
            Some("deepseek_v3") => latent::read(fields, Version::V3).map(ModelConfig::Latent),
            Some("mamba2") => hybrid::read_mamba2(fields).map(ModelConfig::Hybrid),
            Some("nemotron_h") => hybrid::read_nemotron_h(fields).map(ModelConfig::Hybrid),
            Some("wide_resnet") => wide_resnet::read(fields).map(ModelConfig::WideResnet),
            Some("gemma3") => {
                let problem = "is \"gemma3\", a model of images and text; the object in its `text_config` is a model of \
                               text alone (\"gemma3_text\"), and is accepted as a file of its own";
                Err(fields.error("model_type", problem.into()))
            }
            Some(other @ ("big_bird" | "bigbird_pegasus" | "led" | "longformer")) => {
                let problem = format!(
                    "is {other:?}, a model whose tokens see later ones too; models here are causal decoders, \
                     which have such blocks by an object `sparse_attention` (docs/ir.md)"
                );
                Err(fields.error("model_type", problem))
            }
            Some(other) => match (Family::of(other), Plain::of(other)) {
                (Some(family), _) => llama::read(fields, family).map(ModelConfig::Llama),
                (None, Some(family)) => decoder::read(fields, family).map(ModelConfig::Decoder),
                (None, None) => {
                    let problem = format!(
                        "is {other:?}; accepted: {}; the graph of another model can be written in the text form of docs/ir.md",
                        families()
                    );
                    Err(fields.error("model_type", problem))
                }
            },
            None => Err(ImportError::MissingField {
                file: document.file().into(),
                field: "model_type".into(),
                expected: families(),
            }),
        }
    }

    /// Returns the `model_type` field, which is also the graph's name.
    pub fn model_type(&self) -> &'static str {
        match self {
            ModelConfig::Gpt2(_) => "gpt2",
            ModelConfig::Llama(c) => c.family.name(),
            ModelConfig::Decoder(c) => c.family.name(),
            ModelConfig::Latent(c) => c.version.name(),
            ModelConfig::Hybrid(c) if c.is_nemotron => "nemotron_h",
            ModelConfig::Hybrid(_) => "mamba2",
            ModelConfig::WideResnet(_) => "wide_resnet",
        }
    }
    /// Returns the same model with another capacity factor of its experts: slots over the tokens
    /// that an expert gets on average, [`DEFAULT_EXPERT_CAPACITY`] unless set. With the number of
    /// experts over the experts of a token no token is dropped, as in transformers; experts compute
    /// and communicate all their slots, filled or not.
    ///
    /// Fails when the factor is not a positive number, or the model has no experts.
    pub fn with_expert_capacity(mut self, factor: f64) -> Result<Self, ImportError> {
        let error = |problem: &str| ImportError::Option {
            option: "expert-capacity",
            value: factor.to_string(),
            problem: problem.into(),
        };
        if !(factor > 0.0 && factor <= 4096.0) {
            return Err(error("accepted: a number above 0, up to 4096"));
        }
        let experts = match &mut self {
            ModelConfig::Llama(c) => c.experts.as_mut(),
            ModelConfig::Latent(c) => c.experts.as_mut(),
            ModelConfig::Hybrid(c) => c.experts.as_mut(),
            ModelConfig::Gpt2(_) | ModelConfig::Decoder(_) | ModelConfig::WideResnet(_) => None,
        };
        match experts {
            Some(e) => e.capacity_factor = factor,
            None => return Err(error("the model has no experts; leave it out")),
        }
        Ok(self)
    }
    /// Returns the same model without the modules that predict further tokens, which inference does
    /// not use.
    pub fn without_further_tokens(mut self) -> Self {
        match &mut self {
            ModelConfig::Latent(c) => c.further = None,
            ModelConfig::Hybrid(c) => c.further = None,
            ModelConfig::Gpt2(_)
            | ModelConfig::Llama(_)
            | ModelConfig::Decoder(_)
            | ModelConfig::WideResnet(_) => {}
        }
        self
    }
    /// Returns how many tokens behind the next one the model predicts as well (multi-token
    /// prediction).
    pub fn further_tokens(&self) -> u64 {
        self.further().map_or(0, |f| f.depth)
    }
    /// Returns the modules that predict further tokens.
    pub(crate) fn further(&self) -> Option<FurtherConfig> {
        match self {
            ModelConfig::Latent(c) => c.further,
            ModelConfig::Hybrid(c) => c.further,
            ModelConfig::Gpt2(_)
            | ModelConfig::Llama(_)
            | ModelConfig::Decoder(_)
            | ModelConfig::WideResnet(_) => None,
        }
    }
    /// Returns the number of transformer layers, or of residual blocks; modules that predict
    /// further tokens do not count.
    pub fn n_layers(&self) -> u64 {
        match self {
            ModelConfig::Gpt2(c) => c.layers,
            ModelConfig::Llama(c) => c.layers,
            ModelConfig::Decoder(c) => c.layers,
            ModelConfig::Latent(c) => c.layers,
            ModelConfig::Hybrid(c) => c.blocks.len() as u64,
            ModelConfig::WideResnet(c) => c.depths.iter().sum(),
        }
    }
    /// Returns the number of token ids, or of classes.
    pub fn vocab(&self) -> u64 {
        match self {
            ModelConfig::Gpt2(c) => c.vocab,
            ModelConfig::Llama(c) => c.vocab,
            ModelConfig::Decoder(c) => c.vocab,
            ModelConfig::Latent(c) => c.vocab,
            ModelConfig::Hybrid(c) => c.vocab,
            ModelConfig::WideResnet(c) => c.classes,
        }
    }
    /// Returns the longest sequence that is accepted, in tokens: that which the model is made for; one
    /// where a sample is an image.
    pub fn max_sequence(&self) -> u64 {
        match self {
            ModelConfig::Gpt2(c) => c.positions,
            ModelConfig::Decoder(c) => c.positions,
            ModelConfig::Latent(c) => c.positions,
            ModelConfig::Hybrid(c) => c.positions,
            ModelConfig::Llama(c) => c.positions,
            ModelConfig::WideResnet(_) => 1,
        }
    }
    /// Returns the blocks of keys that queries see, where attention leaves others out; of sequences
    /// that are no longer than the local ones all is seen.
    pub fn sparse(&self) -> Option<Blocks> {
        match self {
            ModelConfig::Gpt2(c) => c.sparse,
            ModelConfig::Llama(c) => c.sparse,
            ModelConfig::Decoder(c) => c.sparse,
            ModelConfig::Latent(c) => c.sparse,
            ModelConfig::Hybrid(c) => c.sparse,
            ModelConfig::WideResnet(_) => None,
        }
    }
    /// Says whether the head uses the embedding table.
    pub fn tied(&self) -> bool {
        match self {
            ModelConfig::Gpt2(c) => c.tied,
            ModelConfig::Llama(c) => c.tied,
            ModelConfig::Decoder(c) => c.tied,
            ModelConfig::Latent(c) => c.tied,
            ModelConfig::Hybrid(c) => c.tied,
            ModelConfig::WideResnet(_) => false,
        }
    }
}

/// Checks the fields of every `PretrainedConfig` that have one accepted value.
fn check_common(f: &mut Fields) -> Result<(), ImportError> {
    use serde_json::{Value, json};
    let none = "the model is one causal decoder";
    for name in [
        "is_encoder_decoder",
        "add_cross_attention",
        "tie_encoder_decoder",
    ] {
        f.only(name, &[Value::Bool(false)], none)?;
    }
    f.only("is_decoder", &[Value::Bool(false), Value::Bool(true)], none)?;
    f.only("cross_attention_hidden_size", &[Value::Null], none)?;
    f.only(
        "pruned_heads",
        &[json!({}), Value::Null],
        "pruned heads are not supported",
    )?;
    f.only(
        "chunk_size_feed_forward",
        &[json!(0)],
        "chunked feed-forward is not supported",
    )?;
    f.only(
        "quantization_config",
        &[Value::Null],
        "quantized weights are not trained: remove the field, which plans and trains the model as if it \
         had never been quantized; for --weights, save them in bf16 with transformers first \
         (from_pretrained with dequantize=True, then save_pretrained)",
    )
}

/// Checks that attention has no window.
fn check_full_attention(f: &mut Fields) -> Result<(), ImportError> {
    f.only(
        "sliding_window",
        &[serde_json::Value::Null],
        "attention is full and causal",
    )
}

/// Reads a size that must be there, under either of two names.
fn sized(
    f: &mut Fields,
    name: &'static str,
    alias: &'static str,
    range: RangeInclusive<u64>,
) -> Result<u64, ImportError> {
    match (
        f.integer(name, range.clone())?,
        f.integer(alias, range.clone())?,
    ) {
        (Some(a), Some(b)) if a != b => {
            Err(f.contradiction(name, alias, format!("{a} and {b}; they mean the same")))
        }
        (Some(n), _) | (None, Some(n)) => Ok(n),
        (None, None) => f.required(name, range),
    }
}

/// Reads an activation function by its name in transformers.
fn activation(f: &mut Fields, name: &'static str, default: &str) -> Result<Unary, ImportError> {
    match f.string(name)?.unwrap_or(default) {
        "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" => Ok(Unary::GeluTanh),
        "gelu" => Ok(Unary::GeluErf),
        "relu" => Ok(Unary::Relu),
        "silu" | "swish" => Ok(Unary::Silu),
        other => {
            let accepted = "accepted: gelu_new, gelu_fast, gelu_pytorch_tanh (tanh approximation), gelu (error function), relu, silu, swish";
            Err(f.error(name, format!("is {other:?}; {accepted}")))
        }
    }
}

/// Reads the standard deviation of the initial weights.
fn init_std(f: &mut Fields) -> Result<f64, ImportError> {
    Ok(f.number("initializer_range", DEVIATIONS)?.unwrap_or(0.02))
}
