//! Fields of `GPT2Config`.

use super::document::Fields;
use super::{
    EPSILONS, PROBABILITIES, activation, check_common, check_full_attention, init_std, sized,
    sparse,
};
use super::{Gpt2Config, HARMLESS_FIELDS, HEADS, LAYERS, POSITIONS, VOCAB, WIDTHS};
use crate::ImportError;
use serde_json::Value;

pub(super) fn read(mut f: Fields) -> Result<Gpt2Config, ImportError> {
    check_common(&mut f)?;
    check_full_attention(&mut f)?;
    let layers = sized(&mut f, "n_layer", "num_hidden_layers", LAYERS)?;
    let heads = sized(&mut f, "n_head", "num_attention_heads", HEADS)?;
    let hidden = sized(&mut f, "n_embd", "hidden_size", WIDTHS)?;
    let positions = sized(&mut f, "n_positions", "max_position_embeddings", POSITIONS)?;
    let vocab = f.required("vocab_size", VOCAB)?;
    if let Some(n_ctx) = f.integer("n_ctx", POSITIONS)?
        && n_ctx != positions
    {
        return Err(f.contradiction(
            "n_ctx",
            "n_positions",
            format!("{n_ctx} and {positions}; accepted: the same number"),
        ));
    }
    if !hidden.is_multiple_of(heads) {
        return Err(f.contradiction(
            "n_embd",
            "n_head",
            format!("{hidden} is not a multiple of {heads}"),
        ));
    }
    let inner = f.nullable_integer("n_inner", WIDTHS)?.unwrap_or(4 * hidden);
    for name in ["scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"] {
        f.only(
            name,
            &[Value::Bool(false)],
            "scores are scaled by the head dim only, in the compute dtype",
        )?;
    }
    for name in ["embd_pdrop", "attn_pdrop", "resid_pdrop"] {
        f.number(name, PROBABILITIES)?;
    }
    // GPT-2's embedding has no padding row, so a padding id changes nothing.
    f.has("pad_token_id");
    let config = Gpt2Config {
        layers,
        heads,
        hidden,
        positions,
        inner,
        vocab,
        activation: activation(&mut f, "activation_function", "gelu_new")?,
        epsilon: f.number("layer_norm_epsilon", EPSILONS)?.unwrap_or(1e-5),
        tied: f.boolean("tie_word_embeddings")?.unwrap_or(true),
        sparse: sparse::read(&mut f)?,
        scale_attention: f.boolean("scale_attn_weights")?.unwrap_or(true),
        init_std: init_std(&mut f)?,
    };
    f.finish(HARMLESS_FIELDS)?;
    Ok(config)
}
