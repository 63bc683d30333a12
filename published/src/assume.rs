//! Cells that a row leaves empty and without which nothing can be predicted: what its notes state,
//! else what its framework's generation does, else the usual value. All of it is listed.

use crate::Unmodelled;
use crate::facts::Facts;
use crate::model::FURTHER;
use crate::row::{Row, RowError};
use crate::{hybrid, mixture, named};

/// The width of a head of most published models (GPT-3 175B, Llama, and Megatron-LM's tables).
const HEAD_DIM: u64 = 128;
/// The type that nearly all rows of the last years train in.
const PRECISION: &str = "bf16";

/// Returns the row with `heads`, `kv_heads`, `precision` and the widths of latent attention filled in where they
/// are not stated, and what was filled in, as in `heads=64`; widths are those of the published model
/// that the row names, with the place of its configuration as `shape_of`.
///
/// Fails where the cells that these follow from make no sense, and where the model states no shape
/// and is of a family that cannot be modelled.
pub fn completed(row: &Row, facts: &Facts) -> Result<(Row, Vec<String>), Unmodelled> {
    let (mut all, mut assumed) = (row.clone(), Vec::new());
    let mut fill = |all: &mut Row, column: &str, value: String| {
        assumed.push(format!("{column}={value}"));
        all.set(column, value);
    };
    let stated = |column: &str| row.text(column).is_some();
    if !stated("hidden")
        && let Some(why) = named::unsupported(row)
    {
        return Err(why);
    }
    if !stated("hidden")
        && let Some((shape, (name, config))) =
            named::shape(row).and_then(|s| Some((s, s.built_in()?)))
    {
        for (column, value) in hybrid::cells(&config) {
            if !stated(column) {
                all.set(column, value);
            }
        }
        fill(&mut all, hybrid::CONFIG, name.to_string());
        if shape.further_tokens > 0 {
            fill(&mut all, FURTHER, shape.further_tokens.to_string());
        }
        assumed.push(format!("shape_of={}", shape.source));
        if !stated("precision") {
            let (_, generation) = facts.generation(row)?;
            let own = generation.precision.as_deref();
            let value = own.unwrap_or(PRECISION).to_string();
            assumed.push(format!("precision={value}"));
            all.set("precision", value);
        }
        return Ok((all, assumed));
    }
    if !stated("heads") && !stated("head_dim") && stated("hidden") {
        fill(&mut all, "heads", heads(row)?.to_string());
    }
    if !stated("kv_heads")
        && !mixture::experts(row)?.is_some_and(|e| e.latent)
        && let Ok(heads) = crate::model::heads(&all)
    {
        fill(&mut all, "kv_heads", heads.to_string());
    }
    if !stated("precision") {
        let (_, generation) = facts.generation(row)?;
        let own = generation.precision.as_deref();
        fill(&mut all, "precision", own.unwrap_or(PRECISION).to_string());
    }
    if mixture::experts(row)?.is_some_and(|e| e.latent)
        && let Some(shape) = named::shape(row)
    {
        let empty = mixture::COLUMNS.iter().filter(|c| !stated(c));
        let known: Vec<(&str, u64)> = empty
            .filter_map(|column| Some((*column, shape.value(column)?)))
            .collect();
        for (column, value) in &known {
            fill(&mut all, column, value.to_string());
        }
        if !known.is_empty() {
            assumed.push(format!("shape_of={}", shape.source));
        }
    }
    Ok((all, assumed))
}

/// Returns the heads that the notes state, else those whose width is nearest to the usual one.
fn heads(row: &Row) -> Result<u64, RowError> {
    let hidden = row.required_count("hidden")?;
    if let Some(n) = noted_heads(row.text("notes").unwrap_or("")) {
        return Ok(n);
    }
    let width = (1..=HEAD_DIM)
        .flat_map(|d| [HEAD_DIM - d + 1, HEAD_DIM + d])
        .find(|w| hidden.is_multiple_of(*w));
    Ok(hidden / width.unwrap_or(1))
}

/// Finds `heads 64` in a text.
fn noted_heads(notes: &str) -> Option<u64> {
    let words: Vec<&str> = notes
        .split(|c: char| !c.is_alphanumeric())
        .filter(|w| !w.is_empty())
        .collect();
    let mut pairs = words.windows(2);
    pairs.find_map(|w| (w[0] == "heads").then(|| w[1].parse().ok())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(cells: &str) -> String {
        let header = "framework,hidden,heads,head_dim,precision,notes";
        let table = crate::csv::parse(&format!("{header}\n{cells}\n")).unwrap();
        let row = &crate::row::rows(&table)[0];
        let done = completed(row, &Facts::built_in());
        done.map_or_else(|e| e.to_string(), |(_, assumed)| assumed.join(" "))
    }

    #[test]
    fn notes_come_first_then_the_generation_then_what_is_usual() {
        let noted = "Megatron-LM,14400,,,fp16,Mem of nvidia-smi; heads 64 unless column given";
        assert_eq!(of(noted), "heads=64 kv_heads=64");
        assert_eq!(of("Megatron-LM,12288,,,fp16,"), "heads=96 kv_heads=96");
        // 128 is no divisor; 120 is nearer than 144.
        let unknown = "Megatron-LM,14400,,,fp16,heads unknown";
        assert_eq!(of(unknown), "heads=120 kv_heads=120");
        assert_eq!(
            of("Megatron-LM,4096,?,,?,"),
            "heads=32 kv_heads=32 precision=bf16"
        );
        assert_eq!(
            of("Megatron-DeepSpeed (Sailor),1024,16,,,"),
            "kv_heads=16 precision=fp32"
        );
        assert_eq!(of("Megatron-LM,14400,,150,fp16,"), "kv_heads=96");
        assert_eq!(of("Megatron-LM,12288,96,,fp8,heads 64"), "kv_heads=96");
        let said = of("Megatron-LM,many,,,fp16,");
        assert!(said.starts_with("`hidden` is `many`"), "{said}");
    }

    #[test]
    fn widths_of_latent_attention_are_those_of_the_model_that_is_named() {
        let of = |cells: &str| {
            let header = "framework,hidden,heads,precision,mlp_type,model,kv_lora_rank";
            let table = crate::csv::parse(&format!("{header}\n{cells}\n")).unwrap();
            let row = &crate::row::rows(&table)[0];
            let done = completed(row, &Facts::built_in());
            done.map_or_else(|e| e.to_string(), |(_, assumed)| assumed.join(" "))
        };
        let latent = "moe256top8+1shared MLA";
        assert_eq!(
            of(&format!(
                "Megatron-Core,7168,128,bf16,{latent},DeepSeekV3,256"
            )),
            "q_lora_rank=1536 qk_nope_head_dim=128 qk_rope_head_dim=64 v_head_dim=128 \
             dense_layers=3 dense_ffn_hidden=18432 \
             shape_of=huggingface.co/deepseek-ai/DeepSeek-V3"
        );
        assert_eq!(
            of(&format!("Megatron-Core,7168,128,bf16,{latent},mine,")),
            ""
        );
        let grouped = of("Megatron-Core,7168,128,bf16,moe256top8,DeepSeekV3,");
        assert_eq!(grouped, "kv_heads=128");
        let built_in = of("Megatron-Core,,,bf16,,Nemotron_3_Nano,");
        let config = "built_in_config=nemotron-3-nano-30b-a3b";
        assert!(built_in.contains(config), "{built_in}");
        let said = of("Megatron-Core,,,bf16,,DeepSeek_V4,");
        assert!(said.contains("compressed sparse attention"), "{said}");
        // A row that states its shape says what is to be predicted.
        assert_eq!(
            of("Megatron-Core,7168,128,bf16,swiglu,DeepSeek_V4,"),
            "kv_heads=128"
        );
    }
}
