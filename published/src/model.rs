//! The model of a row as a configuration that `import` reads: the same door that users' models
//! come through.

use crate::facts::Generation;
use crate::hybrid;
use crate::mixture::{self, MLP_TYPES};
use crate::row::{Row, RowError};
use import::{ImportError, ModelConfig};
use serde_json::json;

/// The cell that says how many tokens behind the next one a row's model predicts; no table has it.
pub const FURTHER: &str = "further_tokens";

/// Heads of a row's model: as stated, or as many as `head_dim` gives.
pub fn heads(row: &Row) -> Result<u64, RowError> {
    let not_stated = || RowError::NotStated {
        column: "heads".into(),
    };
    if let Some(heads) = row.count("heads")? {
        return Ok(heads);
    }
    let width = row.count("head_dim")?.ok_or_else(not_stated)?;
    let hidden = row.required_count("hidden")?;
    match hidden.is_multiple_of(width) {
        true => Ok(hidden / width),
        false => Err(RowError::Malformed {
            column: "head_dim".into(),
            value: width.to_string(),
            expected: "a divisor of `hidden`, or `heads` beside it",
        }),
    }
}

/// The configuration of a row's model: of the `gpt2` family where the MLP is GELU, `qwen3_moe`
/// where it has experts, `deepseek_v3` where it has latent attention as well, else `llama`, as the
/// framework's generation builds it: the vocabulary padded, the output layer tied or not. Experts have places for the tokens that they get on average: benchmarks of
/// such models route evenly by force.
///
/// Fails where a size is not stated or the sizes contradict each other.
pub fn config(row: &Row, generation: &Generation) -> Result<ModelConfig, crate::Unmodelled> {
    let tied = generation.tied;
    let hidden = row.required_count("hidden")?;
    let heads = heads(row)?;
    let layers = row.required_count("layers")?;
    let tensor = row.count("tp")?.unwrap_or(1);
    let vocab = row.required_count("vocab")?;
    let vocab = vocab.next_multiple_of(generation.vocab_multiple * tensor);
    if let Some(config) = hybrid::config(row, vocab)? {
        return Ok(config);
    }
    let sequence = row.required_count("seq_len")?;
    let inner = row.required_count("ffn_hidden")?;
    let head_dim = row.count("head_dim")?.unwrap_or(hidden / heads.max(1));
    let kv_heads = row.count("kv_heads")?.unwrap_or(heads);
    let kind = row.required("mlp_type")?;
    let experts = mixture::experts(row)?;
    let document = match kind {
        _ if let Some(experts) = experts.filter(|e| e.latent) => {
            mixture::latent_config(row, experts, vocab)?
        }
        _ if let Some(experts) = experts => json!({
            "model_type": "qwen3_moe", "hidden_size": hidden, "intermediate_size": inner,
            "moe_intermediate_size": inner, "num_experts": experts.count,
            "num_experts_per_tok": experts.top_k,
            "norm_topk_prob": true, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": vocab,
            "max_position_embeddings": sequence, "tie_word_embeddings": false,
        }),
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
                expected: MLP_TYPES,
            }
            .into());
        }
    };
    let made = ModelConfig::parse("the row's model", document.to_string().as_bytes());
    let made = match experts {
        Some(_) => made.and_then(|model| model.with_expert_capacity(1.0)),
        None => made,
    };
    made.map_err(|e| crate::Unmodelled::Model(in_columns(&e)))
}

/// The fault of a configuration, in the words of the table: its fields by their columns,
/// without the file that the user never saw.
fn in_columns(error: &ImportError) -> String {
    // A name that holds another one stands before it.
    const COLUMNS: [(&str, &str); 18] = [
        ("first_k_dense_replace", "dense_layers"),
        ("n_routed_experts", "mlp_type"),
        ("n_shared_experts", "mlp_type"),
        ("num_experts_per_tok", "mlp_type"),
        ("num_experts", "mlp_type"),
        ("moe_intermediate_size", "ffn_hidden"),
        ("intermediate_size", "ffn_hidden"),
        ("n_inner", "ffn_hidden"),
        ("num_attention_heads", "heads"),
        ("num_key_value_heads", "kv_heads"),
        ("n_head", "heads"),
        ("num_hidden_layers", "layers"),
        ("n_layer", "layers"),
        ("hidden_size", "hidden"),
        ("n_embd", "hidden"),
        ("vocab_size", "vocab"),
        ("max_position_embeddings", "seq_len"),
        ("n_positions", "seq_len"),
    ];
    let said = match error {
        ImportError::Field { field, problem, .. } => format!("`{field}` {problem}"),
        ImportError::Contradiction {
            first,
            second,
            problem,
            ..
        } => format!("`{first}` and `{second}` contradict each other: {problem}"),
        other => other.to_string(),
    };
    COLUMNS
        .iter()
        .fold(said, |said, (field, column)| said.replace(field, column))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heads_of(cells: &str) -> String {
        let table = crate::csv::parse(&format!("hidden,heads,head_dim\n{cells}\n")).unwrap();
        heads(&crate::row::rows(&table)[0]).map_or_else(|e| e.to_string(), |n| n.to_string())
    }

    #[test]
    fn problems_are_told_by_column() {
        let header = "framework,hidden,heads,kv_heads,layers,vocab,seq_len,ffn_hidden,mlp_type";
        let of = |cells: &str| {
            let table = crate::csv::parse(&format!("{header}\n{cells}\n")).unwrap();
            let row = &crate::row::rows(&table)[0];
            let facts = crate::Facts::built_in();
            let (_, generation) = facts.generation(row).unwrap();
            config(row, generation).unwrap_err().to_string()
        };
        let said = of("Megatron-LM,1000,7,3,2,1000,128,4000,swiglu");
        assert!(
            said.contains("`heads`") && said.contains("kv_heads"),
            "{said}"
        );
        assert!(
            !said.contains("num_") && !said.contains("row's model"),
            "{said}"
        );
    }

    #[test]
    fn heads_are_stated_by_number_or_width() {
        assert_eq!(heads_of("14400,64,"), "64");
        assert_eq!(heads_of("14400,?,150"), "96");
        assert_eq!(heads_of("14400,,"), "`heads` is not stated");
        let said = heads_of("14400,,149");
        assert!(
            said.starts_with("`head_dim` is `149`, expected a divisor"),
            "{said}"
        );
    }
}
