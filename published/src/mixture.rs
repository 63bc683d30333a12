//! Experts and latent attention of a row's model: what its `mlp_type` says, and the columns that
//! give their widths.

use crate::row::{Row, RowError};
use crate::{Unmodelled, model};

/// Columns of latent attention and of layers without experts, as `config.json` has them but for
/// the last two, which are `first_k_dense_replace` and `intermediate_size` there.
pub const COLUMNS: [&str; 7] = [
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "dense_layers",
    "dense_ffn_hidden",
];

/// Experts of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// Experts that a router chooses among.
    pub count: u64,
    /// Experts of each token.
    pub top_k: u64,
    /// Experts that every token goes to besides.
    pub shared: u64,
    /// Whether attention makes keys and values of a latent vector (MLA).
    pub latent: bool,
}

/// The words that `mlp_type` may be.
pub const MLP_TYPES: &str = "gelu, swiglu, or experts such as moe128top8 or moe256top8+1shared MLA";

/// Experts of a row's model: what `moe128top8` or `moe256top8+1shared MLA` says; none of a dense
/// model.
///
/// Fails where the mixture is of another kind.
pub fn experts(row: &Row) -> Result<Option<Experts>, Unmodelled> {
    let Some(text) = row.text("mlp_type") else {
        return Ok(None);
    };
    let Some(rest) = text.strip_prefix("moe") else {
        return Ok(None);
    };
    let malformed = || RowError::Malformed {
        column: "mlp_type".into(),
        value: text.into(),
        expected: MLP_TYPES,
    };
    let (rest, latent) = match rest.split_once(' ') {
        Some((rest, "MLA")) => (rest, true),
        Some(_) => return Err(malformed().into()),
        None => (rest, false),
    };
    let (routed, shared) = match rest.split_once('+') {
        Some((routed, shared)) => (routed, number(shared.strip_suffix("shared"))),
        None => (rest, Some(0)),
    };
    let numbers = routed.split_once("top");
    let count = number(numbers.map(|n| n.0));
    let top_k = number(numbers.map(|n| n.1));
    let found = (count, top_k, shared);
    let (Some(count), Some(top_k), Some(shared)) = found else {
        return Err(malformed().into());
    };
    if top_k > count {
        return Err(malformed().into());
    }
    match (shared, latent) {
        (0, true) => Err(Unmodelled::Feature(format!(
            "multi-head latent attention without shared experts (`{text}`)"
        ))),
        (1.., false) => Err(Unmodelled::Feature(format!(
            "shared experts without multi-head latent attention (`{text}`)"
        ))),
        _ => Ok(Some(Experts {
            count,
            top_k,
            shared,
            latent,
        })),
    }
}

fn number(digits: Option<&str>) -> Option<u64> {
    let n = digits?.parse().ok()?;
    (1..=4096).contains(&n).then_some(n)
}

/// Layers before those with experts, whose MLP is dense; none where it is not stated.
pub fn dense_layers(row: &Row) -> Result<u64, RowError> {
    Ok(row.count("dense_layers")?.unwrap_or(0))
}

/// The configuration of a model with latent attention, in the form of `deepseek_v3`; `vocab` is
/// padded already. How groups of experts are chosen costs nothing, so there is one.
///
/// Fails where a width is not stated.
pub fn latent_config(
    row: &Row,
    experts: Experts,
    vocab: u64,
) -> Result<serde_json::Value, RowError> {
    let width = |column: &str| row.required_count(column);
    let dense = dense_layers(row)?;
    let inner = width("ffn_hidden")?;
    let heads = model::heads(row)?;
    let further = row.count(model::FURTHER)?.unwrap_or(0);
    Ok(serde_json::json!({
        "model_type": "deepseek_v3", "vocab_size": vocab,
        "hidden_size": width("hidden")?, "num_hidden_layers": width("layers")?,
        "intermediate_size": if dense > 0 { width("dense_ffn_hidden")? } else { inner },
        "moe_intermediate_size": inner, "first_k_dense_replace": dense,
        "n_routed_experts": experts.count, "num_experts_per_tok": experts.top_k,
        "n_shared_experts": experts.shared, "n_group": 1, "topk_group": 1,
        "num_attention_heads": heads, "num_key_value_heads": heads,
        "q_lora_rank": row.count("q_lora_rank")?, "kv_lora_rank": width("kv_lora_rank")?,
        "qk_nope_head_dim": width("qk_nope_head_dim")?,
        "qk_rope_head_dim": width("qk_rope_head_dim")?,
        "v_head_dim": width("v_head_dim")?,
        "max_position_embeddings": width("seq_len")?, "tie_word_embeddings": false,
        "num_nextn_predict_layers": further,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_are_read_or_refused() {
        let of = |cell: &str| {
            let table = crate::csv::parse(&format!("mlp_type\n{cell}\n")).unwrap();
            experts(&crate::row::rows(&table)[0]).map_err(|e| e.to_string())
        };
        let found = |count, top_k, shared, latent| {
            Ok(Some(Experts {
                count,
                top_k,
                shared,
                latent,
            }))
        };
        assert_eq!(of("moe128top8"), found(128, 8, 0, false));
        assert_eq!(of("moe256top8+1shared MLA"), found(256, 8, 1, true));
        assert_eq!((of("swiglu"), of("?")), (Ok(None), Ok(None)));
        assert_eq!(
            of("moe60top4+4shared").unwrap_err(),
            "not supported: shared experts without multi-head latent attention \
             (`moe60top4+4shared`)"
        );
        assert!(
            of("moe8top2 MLA")
                .unwrap_err()
                .contains("without shared experts")
        );
        for wrong in [
            "moe8top9",
            "moe",
            "moe0top0",
            "moe8top2+shared MLA",
            "moe8top2 mla",
        ] {
            let said = of(wrong).unwrap_err();
            assert!(said.contains("such as moe128top8"), "{wrong}: {said}");
        }
    }
}
