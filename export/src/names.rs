//! Names and shapes of parameters in Hugging Face's models, and the dims that tensor parallelism
//! splits everywhere.
//!
//! Meshwright stores a matrix with its inputs first and heads in dims of their own; a `Linear` of
//! PyTorch stores the transpose with all outputs as one dim, GPT-2's `Conv1D` the same order with
//! dims merged. A split of the first of merged dims is a split of the merged one; splits of others
//! are not, because their parts do not lie one after the other.

use crate::layout::Parameter;

/// The form of a parameter in a model of Hugging Face.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stored {
    /// Its name; `*` is the index of the expert, where each has a tensor of its own.
    pub name: String,
    /// For each of our dims, the stored dim that it is the first part of; none of others.
    pub dims: Vec<Option<usize>>,
}

impl Stored {
    /// The length of a stored dim of a parameter of shape `ours`: of all of our dims that it merges.
    pub fn len_of(&self, dim: usize, ours: &[u64]) -> u64 {
        let first = self.dims.iter().position(|d| *d == Some(dim));
        let rest = first.map_or(self.dims.len(), |f| f + 1);
        let merged = self.dims.iter().skip(rest).take_while(|d| d.is_none());
        let lens = ours.iter().skip(first.unwrap_or(ours.len()));
        lens.take(1 + merged.count()).product()
    }
}

/// The ends of parameters' paths with their names in a block of Hugging Face's.
const BLOCK: [(&str, &str); 26] = [
    ("ln_1.weight", "ln_1.weight"),
    ("ln_1.bias", "ln_1.bias"),
    ("ln_2.weight", "ln_2.weight"),
    ("ln_2.bias", "ln_2.bias"),
    ("attn.qkv.weight", "attn.c_attn.weight"),
    ("attn.qkv.bias", "attn.c_attn.bias"),
    ("mlp.fc.weight", "mlp.c_fc.weight"),
    ("mlp.fc.bias", "mlp.c_fc.bias"),
    ("mlp.proj.weight", "mlp.c_proj.weight"),
    ("mlp.proj.bias", "mlp.c_proj.bias"),
    ("norm_1.weight", "input_layernorm.weight"),
    ("norm_2.weight", "post_attention_layernorm.weight"),
    ("attn.q.weight", "self_attn.q_proj.weight"),
    ("attn.k.weight", "self_attn.k_proj.weight"),
    ("attn.v.weight", "self_attn.v_proj.weight"),
    ("attn.q.bias", "self_attn.q_proj.bias"),
    ("attn.k.bias", "self_attn.k_proj.bias"),
    ("attn.v.bias", "self_attn.v_proj.bias"),
    ("attn.q_norm.weight", "self_attn.q_norm.weight"),
    ("attn.k_norm.weight", "self_attn.k_norm.weight"),
    ("mlp.gate.weight", "mlp.gate_proj.weight"),
    ("mlp.up.weight", "mlp.up_proj.weight"),
    ("mlp.down.weight", "mlp.down_proj.weight"),
    (
        "moe.shared.gate.weight",
        "mlp.shared_expert.gate_proj.weight",
    ),
    ("moe.shared.up.weight", "mlp.shared_expert.up_proj.weight"),
    (
        "moe.shared.down.weight",
        "mlp.shared_expert.down_proj.weight",
    ),
];

/// Whether the model is a GPT-2, which stores matrices as `Conv1D` does.
fn is_gpt2(family: &str) -> bool {
    family == "gpt2"
}

/// The prefix of a block in Hugging Face's names, without its number.
pub(crate) fn block_prefix(family: &str) -> &'static str {
    match is_gpt2(family) {
        true => "transformer.h",
        false => "model.layers",
    }
}

/// The class of a block in `transformers`.
pub(crate) fn block_class(family: &str) -> Option<&'static str> {
    Some(match family {
        "gemma" => "GemmaDecoderLayer",
        "gemma2" => "Gemma2DecoderLayer",
        "gemma3_text" => "Gemma3DecoderLayer",
        "gpt2" => "GPT2Block",
        "llama" => "LlamaDecoderLayer",
        "mistral" => "MistralDecoderLayer",
        "mixtral" => "MixtralDecoderLayer",
        "qwen2" => "Qwen2DecoderLayer",
        "qwen3" => "Qwen3DecoderLayer",
        "qwen2_moe" => "Qwen2MoeDecoderLayer",
        "qwen3_moe" => "Qwen3MoeDecoderLayer",
        _ => return None,
    })
}

/// The form in which Hugging Face stores a parameter of a family; none where it is not known.
/// Blocks' names begin with `{}`, which stands for the block.
pub(crate) fn stored(family: &str, parameter: &Parameter) -> Option<Stored> {
    block_class(family)?;
    let rank = parameter.shape.len();
    let plain = (0..rank).map(Some).collect();
    let ends = match is_gpt2(family) {
        true => ["transformer.wte.weight", "transformer.ln_f.weight"],
        false => ["model.embed_tokens.weight", "model.norm.weight"],
    };
    let of_ends = match parameter.path.as_str() {
        "embed.wte.weight" => Some(ends[0]),
        "embed.wpe.weight" => Some("transformer.wpe.weight"),
        "head.ln_f.weight" | "head.norm.weight" => Some(ends[1]),
        "head.ln_f.bias" => Some("transformer.ln_f.bias"),
        "head.lm_head.weight" => Some("lm_head.weight"),
        _ => None,
    };
    let as_is = |name: &str| Stored {
        name: name.to_string(),
        dims: plain,
    };
    if let Some(name) = of_ends {
        return Some(as_is(name));
    }
    let tail = parameter.relative.strip_prefix("{}.")?;
    let (expert_scope, experts) = match family {
        "mixtral" => ("block_sparse_moe", ["w1", "w3", "w2"]),
        _ => ("mlp", ["gate_proj", "up_proj", "down_proj"]),
    };
    let name = match tail {
        "attn.out.weight" if is_gpt2(family) => "attn.c_proj.weight".into(),
        "attn.out.bias" if is_gpt2(family) => "attn.c_proj.bias".into(),
        // These have a norm before and behind each half of a block.
        "post_1.weight" => "post_attention_layernorm.weight".into(),
        "norm_2.weight" if matches!(family, "gemma2" | "gemma3_text") => {
            "pre_feedforward_layernorm.weight".into()
        }
        "post_2.weight" => "post_feedforward_layernorm.weight".into(),
        "attn.out.weight" => "self_attn.o_proj.weight".into(),
        "attn.out.bias" => "self_attn.o_proj.bias".into(),
        "moe.router.weight" => format!("{expert_scope}.gate.weight"),
        "moe.shared.router.weight" => "mlp.shared_expert_gate.weight".into(),
        "moe.gate.weight" => format!("{expert_scope}.experts.*.{}.weight", experts[0]),
        "moe.up.weight" => format!("{expert_scope}.experts.*.{}.weight", experts[1]),
        "moe.down.weight" => format!("{expert_scope}.experts.*.{}.weight", experts[2]),
        _ => {
            let of_block = BLOCK.iter().find(|(ours, _)| *ours == tail);
            of_block.map(|(_, theirs)| theirs.to_string())?
        }
    };
    Some(Stored {
        name: format!("{{}}.{name}"),
        dims: dims(family, tail, rank),
    })
}

/// For each of our dims, the stored dim that a split of it splits.
fn dims(family: &str, tail: &str, rank: usize) -> Vec<Option<usize>> {
    let n_inputs = if tail == "attn.out.weight" {
        rank - 1
    } else {
        1
    };
    let is_matrix = tail.ends_with(".weight") && rank >= 2;
    match (tail, is_matrix) {
        // A row for the one number of a token.
        ("moe.shared.router.weight", _) => vec![Some(1)],
        ("attn.qkv.bias", _) => vec![Some(0), None, None],
        (_, false) => (0..rank).map(|d| (d == 0).then_some(0)).collect(),
        // Experts' tensors are apart: their dim is no dim of a stored tensor.
        ("moe.gate.weight" | "moe.up.weight" | "moe.down.weight", _) => {
            vec![None, Some(1), Some(0)]
        }
        _ => {
            let (inputs, outputs) = match is_gpt2(family) {
                true => (0, 1),
                false => (1, 0),
            };
            (0..rank)
                .map(|d| match d {
                    0 => Some(inputs),
                    d if d == n_inputs => Some(outputs),
                    _ => None,
                })
                .collect()
        }
    }
}

/// The dim of a parameter that tensor ranks split in Megatron-LM and torchtitan: outputs of the
/// matmuls that begin an attention or an MLP, inputs of those that end them, and the vocabulary.
/// The outer option is none for parameters that they do not have, the inner one where every rank
/// has the whole.
pub(crate) fn tensor_dim(parameter: &Parameter) -> Option<Option<usize>> {
    let path = parameter.path.as_str();
    let of_ends = match path {
        "embed.wte.weight" | "head.lm_head.weight" => Some(Some(0)),
        "embed.wpe.weight" | "head.ln_f.weight" | "head.ln_f.bias" | "head.norm.weight" => {
            Some(None)
        }
        _ => None,
    };
    if of_ends.is_some() {
        return of_ends;
    }
    let tail = parameter.relative.strip_prefix("{}.")?;
    let tail = tail.strip_prefix("moe.shared.").unwrap_or(tail);
    Some(match tail {
        "attn.qkv.weight" => Some(2),
        "attn.qkv.bias" => Some(1),
        "attn.q.weight" | "attn.k.weight" | "attn.v.weight" => Some(1),
        "attn.q.bias" | "attn.k.bias" | "attn.v.bias" => Some(0),
        "attn.out.weight" | "mlp.proj.weight" | "mlp.down.weight" | "down.weight" => Some(0),
        "mlp.fc.weight" | "mlp.gate.weight" | "mlp.up.weight" | "gate.weight" | "up.weight" => {
            Some(1)
        }
        "mlp.fc.bias" => Some(0),
        "moe.gate.weight" | "moe.up.weight" => Some(2),
        "moe.down.weight" => Some(1),
        "ln_1.weight" | "ln_1.bias" | "ln_2.weight" | "ln_2.bias" | "norm_1.weight"
        | "norm_2.weight" | "attn.q_norm.weight" | "attn.k_norm.weight" | "attn.out.bias"
        | "mlp.proj.bias" | "moe.router.weight" | "router.weight" => None,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameter(path: &str, shape: &[u64]) -> Parameter {
        let whole = ir::ShardingSpec::replicated(shape.len());
        Parameter {
            path: format!("h.0.{path}"),
            relative: format!("{{}}.{path}"),
            shape: shape.into(),
            at_rest: whole.clone(),
            prepared: whole.clone(),
            in_use: whole,
            zero: Vec::new(),
        }
    }

    /// A `Linear` has its outputs first, `Conv1D` its inputs; only the first of merged dims is a
    /// dim of the stored matrix.
    #[test]
    fn splits_of_merged_dims_are_splits_of_the_first() {
        let q = parameter("attn.q.weight", &[32, 2, 4, 8]);
        let q = stored("llama", &q).expect("a name");
        assert_eq!(q.name, "{}.self_attn.q_proj.weight");
        assert_eq!(q.dims, [Some(1), Some(0), None, None]);
        assert_eq!(
            (q.len_of(0, &[32, 2, 4, 8]), q.len_of(1, &[32, 2, 4, 8])),
            (64, 32)
        );
        let out = parameter("attn.out.weight", &[2, 4, 8, 32]);
        let out = stored("llama", &out).expect("a name");
        assert_eq!(out.dims, [Some(1), None, None, Some(0)]);
        assert_eq!(out.len_of(1, &[2, 4, 8, 32]), 64);
        let qkv = parameter("attn.qkv.weight", &[32, 3, 4, 8]);
        let qkv = stored("gpt2", &qkv).expect("a name");
        assert_eq!(qkv.dims, [Some(0), Some(1), None, None]);
        // The same norm has another name where there are four of them.
        let norm = parameter("norm_2.weight", &[32]);
        let names = ["gemma", "gemma3_text"].map(|f| stored(f, &norm).expect("a name").name);
        assert_eq!(
            names,
            [
                "{}.post_attention_layernorm.weight",
                "{}.pre_feedforward_layernorm.weight"
            ]
        );
        let expert = parameter("moe.down.weight", &[4, 64, 32]);
        let expert = stored("mixtral", &expert).expect("a name");
        assert_eq!(expert.name, "{}.block_sparse_moe.experts.*.w2.weight");
        assert_eq!(expert.dims, [None, Some(1), Some(0)]);
    }
}
