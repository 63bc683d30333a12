//! Hybrids of state spaces, attention and experts, whose tables state no sizes: the built-in model that
//! a row names says them, and how its tensors lie over tensor ranks.

use crate::Unmodelled;
use crate::model::FURTHER;
use crate::row::Row;
use import::ModelConfig;
use serde_json::Value;

/// The cell that names the built-in model of a row; no table has it.
pub const CONFIG: &str = "built_in_config";

/// The blocks of a module that predicts further tokens: attention and experts, in every published
/// one.
const FURTHER_BLOCKS: &str = "*E";

/// Sizes of a configuration by column, for what else of a row depends on them.
pub fn cells(config: &Value) -> Vec<(&'static str, String)> {
    let number = |field: &str| config[field].as_u64().unwrap_or(0).to_string();
    let pattern = config["hybrid_override_pattern"].as_str().unwrap_or("");
    let experts = format!(
        "moe{}top{}",
        number("n_routed_experts"),
        number("num_experts_per_tok")
    );
    vec![
        ("layers", pattern.len().to_string()),
        ("hidden", number("hidden_size")),
        ("heads", number("num_attention_heads")),
        ("kv_heads", number("num_key_value_heads")),
        ("head_dim", number("head_dim")),
        ("ffn_hidden", number("moe_intermediate_size")),
        ("vocab", number("vocab_size")),
        ("mlp_type", experts),
    ]
}

/// The configuration of a row whose sizes are those of a built-in model; none of another. Experts have
/// places for the tokens that they get on average.
pub fn config(row: &Row, vocab: u64) -> Result<Option<ModelConfig>, Unmodelled> {
    let Some((name, text)) = row.text(CONFIG).and_then(import::builtin::find) else {
        return Ok(None);
    };
    let said = |e: &dyn std::fmt::Display| Unmodelled::Model(e.to_string());
    let mut document: Value = serde_json::from_str(text).map_err(|e| said(&e))?;
    document["vocab_size"] = vocab.into();
    // One module predicts all further tokens, as in Megatron-Core with `mtp_use_repeated_layer`.
    if let Some(further) = row.count(FURTHER)? {
        document["num_nextn_predict_layers"] = 1.into();
        document["mtp_num_layers"] = further.into();
        document["mtp_use_repeated_layer"] = true.into();
        document["mtp_hybrid_override_pattern"] = FURTHER_BLOCKS.into();
    }
    let made = ModelConfig::parse(name, document.to_string().as_bytes());
    let made = made.and_then(|model| model.with_expert_capacity(1.0));
    made.map(Some).map_err(|e| said(&e))
}

/// Whether the row's model is a hybrid.
pub fn is_hybrid(row: &Row) -> bool {
    row.text(CONFIG).is_some()
}

/// Pins by which tensor ranks have some of the heads of attention and of state spaces, and some of the
/// hidden values of the expert that every token goes to: Megatron-Core's layout. `samples` are the axes
/// of samples.
pub fn column_pins(samples: &str) -> Vec<String> {
    let of = |op: &str, rest: &str| format!("spec:h.*.{op}=[{samples},_,tensor{rest}]");
    let mut pins = vec![of("attn.q", ",_,_"), of("attn.k", ",_"), of("attn.v", ",_")];
    pins.extend(["x", "z"].map(|op| of(&format!("mamba.{op}"), ",_,_")));
    pins.extend(["b", "c", "dt"].map(|op| of(&format!("mamba.{op}"), ",_")));
    pins.push(of("moe.shared.up", ""));
    pins
}
