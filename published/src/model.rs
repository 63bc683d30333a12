//! The model of a row as a configuration that `import` reads: the same door that users' models
//! come through.

use crate::facts::Generation;
use crate::row::{Row, RowError};
use import::ModelConfig;
use serde_json::json;

/// The configuration of a row's model: of the `gpt2` family where the MLP is GELU, else
/// `llama`, as the framework's generation builds it: the vocabulary padded, the output layer
/// tied or not.
///
/// Fails where a size is not stated or the sizes contradict each other.
pub fn config(row: &Row, generation: &Generation) -> Result<ModelConfig, crate::Unmodelled> {
    let tied = generation.tied;
    let hidden = row.required_count("hidden")?;
    let heads = row.required_count("heads")?;
    let layers = row.required_count("layers")?;
    let tensor = row.count("tp")?.unwrap_or(1);
    let vocab = row
        .required_count("vocab")?
        .next_multiple_of(generation.vocab_multiple * tensor);
    let sequence = row.required_count("seq_len")?;
    let inner = row.required_count("ffn_hidden")?;
    let head_dim = row.count("head_dim")?.unwrap_or(hidden / heads.max(1));
    let kv_heads = row.count("kv_heads")?.unwrap_or(heads);
    let document = match row.required("mlp_type")? {
        "gelu" if kv_heads == heads && head_dim * heads == hidden => json!({
            "model_type": "gpt2", "n_layer": layers, "n_head": heads, "n_embd": hidden,
            "n_positions": sequence, "vocab_size": vocab, "n_inner": inner,
            "tie_word_embeddings": tied,
        }),
        "swiglu" => json!({
            "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
            "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": vocab,
            "max_position_embeddings": sequence, "tie_word_embeddings": false,
        }),
        "gelu" => {
            return Err(crate::Unmodelled::Feature(
                "a GELU model with grouped or narrower heads".into(),
            ));
        }
        other => {
            return Err(RowError::Malformed {
                column: "mlp_type".into(),
                value: other.into(),
                expected: "gelu or swiglu",
            }
            .into());
        }
    };
    ModelConfig::parse("the row's model", document.to_string().as_bytes())
        .map_err(|e| crate::Unmodelled::Model(e.to_string()))
}
