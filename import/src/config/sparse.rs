//! The object `sparse_attention`: attention in blocks, in the words of DeepSpeed's sparse attention.
//!
//! Queries of these models see no later keys, so a pattern has to be `unidirectional`. Patterns that
//! differ from head to head, or that are drawn at random when a run begins, are refused.

use super::POSITIONS;
use super::document::Fields;
use crate::ImportError;
use ir::op::Blocks;
use serde_json::{Value, json};

/// DeepSpeed's defaults of `block`, of `num_local_blocks` and of `num_sliding_window_blocks`.
const BLOCK: u64 = 16;
const LOCAL: u64 = 4;
const SLIDING: u64 = 3;

/// Returns the pattern for sequences of this length: none where all of it is seen.
pub(crate) fn of_sequence(blocks: Option<Blocks>, sequence: u64) -> Option<Blocks> {
    blocks.filter(|b| b.size.saturating_mul(b.local) < sequence)
}

/// Reads the pattern of all layers; none where the field is absent or null, or says `dense`.
pub(super) fn read(f: &mut Fields) -> Result<Option<Blocks>, ImportError> {
    let Some(mut f) = f.object("sparse_attention")? else {
        return Ok(None);
    };
    let modes = "\"bigbird\", \"bslongformer\", \"dense\", \"fixed\" or \"variable\"";
    let Some(mode) = f.string("mode")? else {
        return Err(f.missing("mode", modes));
    };
    let size = f.integer("block", 1..=*POSITIONS.end())?.unwrap_or(BLOCK);
    // Where all heads have one pattern, those that they could have each are that pattern.
    f.boolean("different_layout_per_head")?;
    if mode == "dense" {
        f.has("attention");
        f.finish(&[])?;
        return Ok(None);
    }
    let one_way = "\"unidirectional\", as queries see no later keys here (DeepSpeed's default is \
                   \"bidirectional\")";
    match f.string("attention")? {
        Some("unidirectional") => {}
        Some(other) => {
            let problem = format!("is {other:?}; accepted: {one_way}");
            return Err(f.error("attention", problem));
        }
        None => return Err(f.missing("attention", one_way)),
    }
    let (aligned, local) = match mode {
        "fixed" => (true, count(&mut f, "num_local_blocks", LOCAL)?),
        "variable" => (true, one_stretch(&mut f)?),
        // Half of them stand behind the query's own.
        "bigbird" | "bslongformer" => {
            let both = count(&mut f, "num_sliding_window_blocks", SLIDING)?;
            (false, both / 2 + 1)
        }
        other => {
            return Err(f.error("mode", format!("is {other:?}; accepted: {modes}")));
        }
    };
    let (first, last) = match mode {
        "fixed" => (0, last_of_each(&mut f, local)?),
        "bigbird" => {
            let found = f.integer("num_global_blocks", 0..=*POSITIONS.end())?;
            (found.unwrap_or(1), 0)
        }
        _ => (first_blocks(&mut f)?, 0),
    };
    if matches!(mode, "fixed" | "variable") {
        let why = "queries see no later keys";
        f.only("horizontal_global_attention", &[Value::Bool(false)], why)?;
    }
    if matches!(mode, "bigbird" | "variable") {
        let why = "random blocks are drawn when a run of DeepSpeed begins, and no file says which";
        f.only("num_random_blocks", &[json!(0)], why)?;
    }
    f.finish(&[])?;
    Ok(Some(Blocks {
        size,
        local,
        aligned,
        first,
        last,
    }))
}

/// Reads a number of blocks.
fn count(f: &mut Fields, name: &'static str, default: u64) -> Result<u64, ImportError> {
    Ok(f.integer(name, 1..=*POSITIONS.end())?.unwrap_or(default))
}

/// Reads the blocks at the end of each stretch that all later queries see.
fn last_of_each(f: &mut Fields, local: u64) -> Result<u64, ImportError> {
    let why = "all heads have one pattern";
    f.only("num_different_global_patterns", &[json!(1)], why)?;
    let last = count(f, "num_global_blocks", 1)?;
    if !local.is_multiple_of(last) {
        let problem = format!("{local} is not a multiple of {last}");
        return Err(f.contradiction("num_local_blocks", "num_global_blocks", problem));
    }
    Ok(last)
}

/// Reads the length of all stretches.
fn one_stretch(f: &mut Fields) -> Result<u64, ImportError> {
    let name = "local_window_blocks";
    match f.integers(name, 1..=*POSITIONS.end())?.as_deref() {
        None => Ok(LOCAL),
        Some([local]) => Ok(*local),
        Some(other) => {
            let problem = format!(
                "has {} numbers; accepted: one, as all windows of blocks are as long",
                other.len()
            );
            Err(f.error(name, problem))
        }
    }
}

/// Reads how many of the first blocks all queries see, from their numbers, or from the numbers of the
/// first of each run and of those behind.
fn first_blocks(f: &mut Fields) -> Result<u64, ImportError> {
    let (name, ends) = ("global_block_indices", "global_block_end_indices");
    let starts = f.integers(name, 0..=*POSITIONS.end())?;
    let starts = starts.unwrap_or_else(|| vec![0]);
    let runs: Vec<(u64, u64)> = match f.integers(ends, 0..=*POSITIONS.end())? {
        None => starts.iter().map(|&i| (i, i + 1)).collect(),
        Some(ends) if ends.len() == starts.len() => starts.into_iter().zip(ends).collect(),
        Some(both) => {
            let problem = format!("{} and {} numbers", starts.len(), both.len());
            return Err(f.contradiction(name, ends, problem));
        }
    };
    let mut first = 0;
    for (start, end) in runs {
        if start != first || end <= start {
            let problem = "has other blocks than the first ones; accepted: a list such as [0, 1], \
                           in order and without gaps, as blocks that all see begin the sequence";
            return Err(f.error(name, problem.into()));
        }
        first = end;
    }
    Ok(first)
}
