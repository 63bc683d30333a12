//! Which columns a table of runs may have: those that a plan is made of, those that say which
//! run it was, and those that are only known. A column that is none of these is not read, so one
//! that is nearly the name of one that is read, or another word for it, is refused: its cells
//! would go missing unseen.

use crate::mixture;

/// Columns without which no row can be modelled.
pub const REQUIRED_COLUMNS: [&str; 12] = [
    "gpu",
    "gpus_total",
    "gpus_per_node",
    "interconnect",
    "framework",
    "layers",
    "hidden",
    "ffn_hidden",
    "vocab",
    "seq_len",
    "global_batch",
    "mlp_type",
];

/// Columns of which the plan of a row is made beside them, where it is stated.
const OPTIONAL: [&str; 14] = [
    "precision",
    "heads",
    "kv_heads",
    "head_dim",
    "micro_batch",
    "tp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "dp",
    "sequence_parallel",
    "zero_stage",
    "recompute",
];

/// Columns that name a row, and by which facts of releases and recipes are found.
const NAMING: [&str; 5] = ["row_id", "source", "date", "model", "notes"];

/// Columns that tables of published runs have besides; measurements among them are checked, not
/// read.
const KNOWN: [&str; 12] = [
    "url",
    "exactness",
    "params_b",
    "step_time_s",
    "tokens_per_s_per_gpu",
    "tflops_per_gpu",
    "mfu",
    "hfu",
    "peak_mem_gb",
    "tier",
    "group",
    "split",
];

/// Other words for columns: flags of frameworks, keys of configurations, our pins.
const SYNONYMS: [(&str, &str); 44] = [
    ("gpus", "gpus_total"),
    ("num_gpus", "gpus_total"),
    ("world_size", "gpus_total"),
    ("gpus_per_host", "gpus_per_node"),
    ("num_layers", "layers"),
    ("n_layers", "layers"),
    ("num_hidden_layers", "layers"),
    ("hidden_size", "hidden"),
    ("d_model", "hidden"),
    ("ffn", "ffn_hidden"),
    ("ffn_hidden_size", "ffn_hidden"),
    ("intermediate_size", "ffn_hidden"),
    ("vocab_size", "vocab"),
    ("sequence", "seq_len"),
    ("sequence_length", "seq_len"),
    ("seq_length", "seq_len"),
    ("gbs", "global_batch"),
    ("global_batch_size", "global_batch"),
    ("dtype", "precision"),
    ("num_heads", "heads"),
    ("n_heads", "heads"),
    ("num_attention_heads", "heads"),
    ("query_groups", "kv_heads"),
    ("num_query_groups", "kv_heads"),
    ("num_key_value_heads", "kv_heads"),
    ("mbs", "micro_batch"),
    ("micro_batch_size", "micro_batch"),
    ("tensor", "tp"),
    ("tensor_parallel", "tp"),
    ("pipeline", "pp"),
    ("pipeline_parallel", "pp"),
    ("vp", "vpp"),
    ("virtual", "vpp"),
    ("virtual_pipeline", "vpp"),
    ("context_parallel", "cp"),
    ("expert", "ep"),
    ("expert_parallel", "ep"),
    ("data_parallel", "dp"),
    ("sp", "sequence_parallel"),
    ("zero", "zero_stage"),
    ("zero_level", "zero_stage"),
    ("recomputation", "recompute"),
    ("activation_checkpointing", "recompute"),
    ("first_k_dense_replace", "dense_layers"),
];

/// Words that are one slip from a column and mean something else.
const OTHER_WORDS: [&str; 5] = ["data", "rate", "mode", "nodes", "compute"];

/// Columns of a table that are not read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unread {
    /// Names with the column that each nearly is, or is another word for, and that the table
    /// lacks.
    pub misspelt: Vec<(String, &'static str)>,
    /// All others that are not known.
    pub unknown: Vec<String>,
}

/// Those of a table's columns that nothing reads and nobody knows.
pub fn unread(header: &[String]) -> Unread {
    let mut unread = Unread::default();
    let has = |column: &str| header.iter().any(|h| h == column);
    let optional = OPTIONAL.iter().chain(&mixture::COLUMNS);
    let read = REQUIRED_COLUMNS.iter().chain(optional).chain(&NAMING);
    for name in header {
        let is_known = read.clone().chain(&KNOWN).any(|k| k == name);
        // Tools that write an index of the rows give it no name.
        if is_known || name.is_empty() || name.starts_with("derived_") {
            continue;
        }
        let lacks = |column: &&str| !has(column);
        let nearly = |column: &&str| is_nearly(name, column);
        let meant = read.clone().copied().filter(lacks).find(nearly);
        match meant.or_else(|| synonym(name).filter(lacks)) {
            Some(column) if !OTHER_WORDS.contains(&plain(name).as_str()) => {
                unread.misspelt.push((name.clone(), column));
            }
            _ => unread.unknown.push(name.clone()),
        }
    }
    unread
}

/// The column that a name is another word for.
fn synonym(name: &str) -> Option<&'static str> {
    let name = plain(name);
    let found = SYNONYMS.iter().find(|(word, _)| *word == name);
    found.map(|(_, column)| *column)
}

/// A name without capitals, blanks and hyphens.
fn plain(name: &str) -> String {
    let letter = |c: char| match c {
        ' ' | '-' | '.' => '_',
        c => c.to_ascii_lowercase(),
    };
    name.trim().chars().map(letter).collect()
}

/// Whether a name is a column's but for capitals, blanks and hyphens, or but for one slip in four
/// letters and two in nine. Among names of two and three letters everything is one slip away.
fn is_nearly(name: &str, column: &str) -> bool {
    let plain = plain(name);
    let squeezed = |text: &str| text.replace('_', "");
    let slips = match column.len() {
        0..=3 => 0,
        4..=8 => 1,
        _ => 2,
    };
    squeezed(&plain) == squeezed(column) || within(&plain, column, slips)
}

/// Whether at most `most` letters were added, left out, replaced or swapped with the next one
/// (Damerau 1964, without edits of what was swapped).
fn within(a: &str, b: &str, most: usize) -> bool {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    // A long header field is not compared letter by letter.
    if a.len().abs_diff(b.len()) > most {
        return false;
    }
    // Row by row: slips between the first letters of `a` and those of `b`.
    let mut rows = vec![(0..=b.len()).collect::<Vec<usize>>()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()] <= most
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(header: &str) -> Unread {
        let names: Vec<String> = header.split(',').map(str::to_string).collect();
        unread(&names)
    }

    #[test]
    fn slips_are_told_from_other_columns() {
        let misspelt = |header: &str| {
            let found = of(header).misspelt;
            found.first().map_or("", |(_, column)| column)
        };
        for (name, column) in [
            ("micro_bacth", "micro_batch"),
            ("Micro Batch", "micro_batch"),
            ("microbatch", "micro_batch"),
            ("micro_batches", "micro_batch"),
            ("TP", "tp"),
            ("zero_stge", "zero_stage"),
            ("head", "heads"),
            ("recomptue", "recompute"),
        ] {
            assert_eq!(misspelt(name), column, "{name}");
        }
        // Other words for a column.
        for (name, column) in [
            ("recomputation", "recompute"),
            ("zero", "zero_stage"),
            ("vp", "vpp"),
            ("Global-Batch-Size", "global_batch"),
            ("note", "notes"),
            ("soruce", "source"),
        ] {
            assert_eq!(misspelt(name), column, "{name}");
        }
        // Everything is near to two letters; what is far is another column.
        for name in ["op", "batch", "learning_rate", "seed", "nodes", "data", ""] {
            assert_eq!(of(name).misspelt, [], "{name}");
        }
        // A table that has the column may have one like it, or another word for it.
        let both = of("micro_batch,micro_batch2,mbs");
        assert_eq!(
            (both.misspelt, both.unknown),
            (Vec::new(), vec!["micro_batch2".into(), "mbs".into()])
        );
    }

    /// A word that is no word for what the table may have, and one that is a column itself, would
    /// never be said.
    #[test]
    fn other_words_are_for_columns_that_are_read() {
        let optional = OPTIONAL.into_iter().chain(mixture::COLUMNS);
        let read: Vec<&str> = REQUIRED_COLUMNS.into_iter().chain(optional).collect();
        let all: Vec<&str> = read.iter().copied().chain(NAMING).chain(KNOWN).collect();
        for (word, column) in SYNONYMS {
            assert!(read.contains(&column), "{column}");
            assert!(!all.contains(&word), "{word}");
            assert_eq!(plain(word), word);
        }
        for word in OTHER_WORDS {
            assert_eq!(of(word).misspelt, []);
            assert!(of(word).unknown.contains(&word.to_string()), "{word}");
        }
    }

    #[test]
    fn columns_of_published_tables_are_known() {
        let header = "source,url,exactness,date,gpu,gpus_total,gpus_per_node,interconnect,framework,model,params_b,layers,hidden,heads,kv_heads,ffn_hidden,vocab,seq_len,global_batch,micro_batch,tp,pp,vpp,cp,ep,dp,sequence_parallel,zero_stage,recompute,precision,step_time_s,tokens_per_s_per_gpu,tflops_per_gpu,mfu,hfu,peak_mem_gb,notes,row_id,tier,group,split,mlp_type,head_dim,derived_step_time_s,derived_model_tflops_per_gpu,derived_mfu_bf16peak";
        assert_eq!(of(header), Unread::default());
        let required = REQUIRED_COLUMNS.join(",");
        assert_eq!(of(&required), Unread::default());
    }
}
