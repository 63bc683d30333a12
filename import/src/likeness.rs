//! Compares a plan's model with that of a `config.json`, and names the fields that differ there.

use crate::config::MODEL_TYPES;
use crate::{BuildOptions, ImportError, ModelConfig, model_graph};
use ir::likeness::{Difference, difference};
use ir::{Graph, Task};

/// The fields of `config.json` that decide attributes of a graph: the end of an op's path, the
/// attribute, the field of GPT-2, the field of Llama and its relatives.
const FIELDS: [(&str, &str, &str, &str); 17] = [
    ("", "eps", "layer_norm_epsilon", "rms_norm_eps"),
    ("", "theta", "", "rope_theta"),
    ("", "scaling", "", "rope_scaling"),
    (".act", "", "activation_function", "hidden_act"),
    (".attend", "scale", "scale_attn_weights", "head_dim"),
    (
        "embed.wte.weight",
        "shape",
        "vocab_size, n_embd",
        "vocab_size, hidden_size",
    ),
    ("embed.wpe.weight", "shape", "n_positions", ""),
    (
        "head.lm_head.weight",
        "",
        "tie_word_embeddings",
        "tie_word_embeddings",
    ),
    (".attn.qkv.weight", "shape", "n_head", ""),
    (
        ".attn.q.weight",
        "shape",
        "",
        "num_attention_heads, num_key_value_heads, head_dim",
    ),
    (".mlp.fc.weight", "shape", "n_inner", ""),
    (".mlp.gate.weight", "shape", "", "intermediate_size"),
    (".route", "top_k", "", "num_experts_per_tok"),
    (".route", "normalize", "", "norm_topk_prob"),
    (
        ".moe.router.weight",
        "shape",
        "",
        "num_local_experts, num_experts",
    ),
    (
        ".moe.gate.weight",
        "shape",
        "",
        "intermediate_size, moe_intermediate_size",
    ),
    (
        ".moe.shared.gate.weight",
        "shape",
        "",
        "shared_expert_intermediate_size",
    ),
];

impl ModelConfig {
    /// Finds where this model differs from a plan's, of which `graph` is the forward graph and
    /// samples have `sequence` tokens and which is for that task; `None` where it is the plan's
    /// model.
    pub fn difference(
        &self,
        graph: &Graph,
        sequence: u64,
        task: Task,
    ) -> Result<Option<Difference>, ImportError> {
        if self.model_type() != graph.name && MODEL_TYPES.contains(&graph.name.as_str()) {
            return Ok(Some(Difference {
                op: "model".into(),
                attribute: "model_type".into(),
                first: self.model_type().into(),
                second: graph.name.clone(),
            }));
        }
        let options = BuildOptions {
            sequence: sequence.min(self.max_sequence()),
            dropout: 0.0,
        };
        Ok(difference(&model_graph(self, &options)?, graph, task))
    }
}

/// Returns the field of a `config.json` that makes a difference, or the several that may; `None`
/// where the model is not of a configuration. `model_type` is the graph's name.
pub fn config_field(model_type: &str, d: &Difference) -> Option<&'static str> {
    if d.attribute == "model_type" {
        return Some("model_type");
    }
    if ["h.mtp.", "head.mtp."]
        .iter()
        .any(|scope| d.op.starts_with(scope))
        && d.attribute == "op"
    {
        return Some("num_nextn_predict_layers");
    }
    let is_layer = d.attribute == "op" && d.op.starts_with("h.");
    let is_row = |(end, attribute, ..): &&(&str, &str, _, _)| {
        d.op.ends_with(end) && (attribute.is_empty() || *attribute == d.attribute)
    };
    let row = FIELDS.iter().find(is_row).map(|&(.., a, b)| (a, b));
    let (gpt2, llama) = row.or(is_layer.then_some(("n_layer", "num_hidden_layers")))?;
    let field = match model_type {
        "gpt2" => gpt2,
        // Of the names that both have, one is of a size that GPT-2 calls otherwise.
        "bloom" if gpt2.ends_with("n_embd") => llama,
        "bloom" => gpt2,
        "wide_resnet" if is_layer => "depths",
        "wide_resnet" => "",
        _ if MODEL_TYPES.contains(&model_type) => llama,
        _ => "",
    };
    (!field.is_empty()).then_some(field)
}
