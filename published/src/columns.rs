//! Which columns a table of runs may have: those that a plan is made of, those that say which
//! run it was, and those that are only known. A column that is none of these is not read, so one
//! that is nearly the name of one that is read is named: its cells would go missing unseen.

/// Columns without which no row can be modelled.
pub const REQUIRED_COLUMNS: [&str; 13] = [
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
    "precision",
    "mlp_type",
];

/// What the plan of a row is made of beside them, where it is stated.
const OPTIONAL: [&str; 13] = [
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

/// What names a row, and by what facts of releases and recipes are found.
const NAMING: [&str; 5] = ["row_id", "source", "date", "model", "notes"];

/// What tables of published runs have besides; measurements among them are checked, not read.
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

/// Columns of a table that are not read though they may have been meant to be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unread {
    /// Names with a column of plans that each nearly is, and that the table lacks.
    pub misspelt: Vec<(String, &'static str)>,
    /// The same of columns that only name a row.
    pub perhaps: Vec<(String, &'static str)>,
    /// All others that are not known.
    pub unknown: Vec<String>,
}

/// Those of a table's columns that nothing reads and nobody knows.
pub fn unread(header: &[String]) -> Unread {
    let mut unread = Unread::default();
    let has = |column: &str| header.iter().any(|h| h == column);
    let plan = REQUIRED_COLUMNS.iter().chain(&OPTIONAL).copied();
    for name in header {
        let is_known = plan.clone().chain(NAMING).chain(KNOWN).any(|k| k == name);
        // Tools that write an index of the rows give it no name.
        if is_known || name.is_empty() || name.starts_with("derived_") {
            continue;
        }
        let absent = |column: &&str| !has(column) && is_nearly(name, column);
        if let Some(column) = plan.clone().find(absent) {
            unread.misspelt.push((name.clone(), column));
        } else if let Some(column) = NAMING.into_iter().find(absent) {
            unread.perhaps.push((name.clone(), column));
        } else {
            unread.unknown.push(name.clone());
        }
    }
    unread
}

/// Whether a name is a column's but for capitals, blanks and hyphens, or but for one slip in four
/// letters and two in nine. Among names of two and three letters everything is one slip away.
fn is_nearly(name: &str, column: &str) -> bool {
    let plain: String = name
        .trim()
        .chars()
        .map(|c| match c {
            ' ' | '-' | '.' => '_',
            c => c.to_ascii_lowercase(),
        })
        .collect();
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
        // Everything is near to two letters; what is far is another column.
        for name in ["sp", "op", "vp", "batch", "learning_rate", "seed", ""] {
            assert_eq!(of(name).misspelt, [], "{name}");
        }
        // A table that has the column may have one like it.
        assert_eq!(of("micro_batch,micro_batch2").unknown, ["micro_batch2"]);
        assert_eq!(
            of("data,soruce,lr"),
            Unread {
                misspelt: Vec::new(),
                perhaps: vec![("data".into(), "date"), ("soruce".into(), "source")],
                unknown: vec!["lr".into()],
            }
        );
    }

    #[test]
    fn columns_of_published_tables_are_known() {
        let header = "source,url,exactness,date,gpu,gpus_total,gpus_per_node,interconnect,framework,model,params_b,layers,hidden,heads,kv_heads,ffn_hidden,vocab,seq_len,global_batch,micro_batch,tp,pp,vpp,cp,ep,dp,sequence_parallel,zero_stage,recompute,precision,step_time_s,tokens_per_s_per_gpu,tflops_per_gpu,mfu,hfu,peak_mem_gb,notes,row_id,tier,group,split,mlp_type,head_dim,derived_step_time_s,derived_model_tflops_per_gpu,derived_mfu_bf16peak";
        assert_eq!(of(header), Unread::default());
        let required = REQUIRED_COLUMNS.join(",");
        assert_eq!(of(&required), Unread::default());
    }
}
