//! Scores predictions against measurements: errors by stratum, with the no-skill baseline and the
//! noise beside them.
//!
//! A stratum is a GPU family and a source: the first two parts of the `group` column. Means
//! are over strata of four rows or more, so that no source decides by its number of rows.

use frameworks::MemoryUse;
use published::{Outcome, Row};
use std::collections::BTreeMap;

/// The rows that a stratum needs to count in the mean over strata.
pub const COUNTED_ROWS: usize = 4;
/// The mark of the rows that are shown apart: they are linear in the number of microbatches to
/// 1e-5 and look composed from a few constants of one layer rather than measured one by one.
const DIAGNOSTIC: &str = "(single-node)";

/// A measured run with its prediction.
#[derive(Clone, Debug)]
pub struct Scored<'a> {
    /// The row.
    pub row: &'a Row,
    /// The GPU family and the source.
    pub stratum: String,
    /// The tier: rows of `A` say everything, for rows of `B` something had to be assumed.
    pub tier: char,
    /// The measured seconds of a step.
    pub measured_s: f64,
    /// The predicted seconds of a step.
    pub predicted_s: f64,
    /// The measured and the predicted gigabytes, where measured.
    pub memory_gb: Option<(f64, f64)>,
    /// The parts of the predicted peak.
    pub memory: MemoryUse,
    /// The measured MFU against the peak of bf16.
    pub measured_mfu: Option<f64>,
}

impl Scored<'_> {
    /// Returns the relative error of the step time, signed.
    pub fn error(&self) -> f64 {
        self.predicted_s / self.measured_s - 1.0
    }
    /// Returns the GPU family.
    pub fn family(&self) -> &str {
        self.stratum.split('/').next().unwrap_or("")
    }
    /// Says whether the row is shown apart.
    pub fn is_diagnostic(&self) -> bool {
        is_diagnostic(&self.stratum)
    }
}

/// Says whether a stratum is shown apart, and fitted to nothing.
pub fn is_diagnostic(stratum: &str) -> bool {
    stratum.ends_with(DIAGNOSTIC)
}

/// Collects the rows of tiers A and B that have a measurement and a prediction.
pub fn scored<'a>(rows: &'a [Row], outcomes: &[Outcome]) -> Vec<Scored<'a>> {
    let one = |(row, outcome): (&'a Row, &Outcome)| {
        let predicted = outcome.as_ref().ok()?;
        let tier = row
            .text("tier")?
            .chars()
            .next()
            .filter(|t| "AB".contains(*t))?;
        Some(Scored {
            row,
            stratum: stratum(row),
            tier,
            measured_s: row.measured("derived_step_time_s")?,
            predicted_s: predicted.step_time_s,
            memory_gb: row
                .measured("peak_mem_gb")
                .map(|gb| (gb, predicted.reported_memory_gb)),
            memory: predicted.memory,
            measured_mfu: row.measured("derived_mfu_bf16peak"),
        })
    };
    rows.iter().zip(outcomes).filter_map(one).collect()
}

/// Returns GPU family and source of a row.
pub fn stratum(row: &Row) -> String {
    let group = row.text("group").unwrap_or("?");
    let parts: Vec<&str> = group.splitn(3, '/').take(2).collect();
    let apart = row.text("source").is_some_and(|s| s.contains(DIAGNOSTIC));
    if apart {
        format!("{} {DIAGNOSTIC}", parts.join("/"))
    } else {
        parts.join("/")
    }
}

/// The errors of one stratum, as shares.
#[derive(Clone, Debug)]
pub struct Stratum {
    /// The GPU family and the source.
    pub name: String,
    /// The number of rows that have a prediction.
    pub n: usize,
    /// The number of rows that have a measurement, predicted or not, by which it counts.
    pub measured: usize,
    /// The mean absolute error of the step time.
    pub mape: f64,
    /// The median signed error of the step time.
    pub bias: f64,
    /// The mean absolute error of assuming the stratum's median MFU.
    pub no_skill: Option<f64>,
    /// The median of (slowest over fastest - 1) over repeated configurations.
    pub noise: Option<f64>,
    /// The number of rows with measured memory, and the mean absolute error of memory.
    pub memory: Option<(usize, f64)>,
    /// True when the stratum is shown apart and counts in no mean.
    pub is_diagnostic: bool,
}

impl Stratum {
    /// Says whether the stratum counts in the mean over strata.
    pub fn counts(&self) -> bool {
        self.measured >= COUNTED_ROWS && !self.is_diagnostic
    }
}

/// Computes the errors by stratum of a tier, which count by all rows of `all` that have a measurement: a
/// row without a prediction makes no stratum smaller.
pub fn strata_among(rows: &[Scored<'_>], tier: char, all: &[Row]) -> Vec<Stratum> {
    let is_measured = |row: &&Row| {
        let own = row.text("tier").and_then(|t| t.chars().next());
        own == Some(tier) && row.measured("derived_step_time_s").is_some()
    };
    let mut measured: BTreeMap<String, usize> = BTreeMap::new();
    for row in all.iter().filter(is_measured) {
        *measured.entry(stratum(row)).or_default() += 1;
    }
    let of_tier: Vec<Scored<'_>> = rows.iter().filter(|s| s.tier == tier).cloned().collect();
    let mut strata = strata(&of_tier);
    for s in &mut strata {
        s.measured = measured.get(&s.name).copied().unwrap_or(s.n);
    }
    strata
}

/// Computes the errors by stratum, sorted by name; all of their rows have a prediction.
pub fn strata(rows: &[Scored<'_>]) -> Vec<Stratum> {
    let mut by_name: BTreeMap<&str, Vec<&Scored<'_>>> = BTreeMap::new();
    for row in rows {
        by_name.entry(&row.stratum).or_default().push(row);
    }
    by_name
        .into_iter()
        .map(|(name, rows)| {
            let errors: Vec<f64> = rows.iter().map(|r| r.error()).collect();
            let memory: Vec<f64> = rows
                .iter()
                .filter_map(|r| r.memory_gb.map(|(m, p)| (p / m - 1.0).abs()))
                .collect();
            Stratum {
                name: name.to_string(),
                n: rows.len(),
                measured: rows.len(),
                mape: mean(&errors.iter().map(|e| e.abs()).collect::<Vec<_>>()).unwrap_or(0.0),
                bias: median(&errors).unwrap_or(0.0),
                no_skill: no_skill(&rows),
                noise: noise(&rows),
                memory: mean(&memory).map(|e| (memory.len(), e)),
                is_diagnostic: rows[0].is_diagnostic(),
            }
        })
        .collect()
}

/// Returns the mean of a figure over the strata that count and have it.
pub fn over_strata(strata: &[Stratum], figure: impl Fn(&Stratum) -> Option<f64>) -> Option<f64> {
    let figures: Vec<f64> = strata
        .iter()
        .filter(|s| s.counts())
        .filter_map(figure)
        .collect();
    mean(&figures)
}

/// Returns the mean error of peak memory over the strata in which enough rows state it.
pub fn memory_over_strata(strata: &[Stratum]) -> Option<f64> {
    let known = strata.iter().filter(|s| !s.is_diagnostic);
    let known = known.filter_map(|s| s.memory);
    let counted = known.filter(|(n, _)| *n >= COUNTED_ROWS);
    mean(&counted.map(|(_, error)| error).collect::<Vec<_>>())
}

/// Returns the error of predicting every row with the median MFU of its stratum: the step time goes
/// with the inverse of MFU.
fn no_skill(rows: &[&Scored<'_>]) -> Option<f64> {
    let known: Vec<f64> = rows.iter().filter_map(|r| r.measured_mfu).collect();
    let constant = median(&known)?;
    let errors: Vec<f64> = known
        .iter()
        .map(|mfu| (mfu / constant - 1.0).abs())
        .collect();
    mean(&errors)
}

/// The columns that say what was run; rows that agree in all of them are repetitions.
const CONFIGURATION: [&str; 24] = [
    "gpu",
    "gpus_total",
    "gpus_per_node",
    "interconnect",
    "framework",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn_hidden",
    "vocab",
    "seq_len",
    "global_batch",
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
    "precision",
];

fn noise(rows: &[&Scored<'_>]) -> Option<f64> {
    let mut repeated: BTreeMap<Vec<&str>, Vec<f64>> = BTreeMap::new();
    for r in rows {
        let key = CONFIGURATION
            .iter()
            .map(|c| r.row.text(c).unwrap_or(""))
            .collect();
        repeated.entry(key).or_default().push(r.measured_s);
    }
    let spreads: Vec<f64> = repeated
        .values()
        .filter(|times| times.len() > 1)
        .map(|times| {
            let slowest = times.iter().copied().fold(f64::MIN, f64::max);
            let fastest = times.iter().copied().fold(f64::MAX, f64::min);
            slowest / fastest - 1.0
        })
        .collect();
    median(&spreads)
}

/// Returns the mean, or `None` for no values.
pub fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// Returns the median (the mean of the middle two of an even number), or `None` for no values.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    (n > 0).then(|| (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test may stop at what it does not expect.

    use super::*;

    /// Two tables used to count by other rows, and had other means: one by those that have a
    /// measurement, one by those that have a prediction, too.
    #[test]
    fn a_row_without_a_prediction_makes_no_stratum_smaller() {
        let header = "row_id,tier,group,derived_step_time_s";
        let cells: Vec<String> = (0..4).map(|i| format!("R{i},A,H100/source,2")).collect();
        let table = format!("{header}\n{}\nR9,B,H100/source,2\n", cells.join("\n"));
        let rows = published::row::rows(&published::csv::parse(&table).unwrap());
        let predicted: Vec<Scored<'_>> = rows[..3]
            .iter()
            .map(|row| Scored {
                row,
                stratum: stratum(row),
                tier: 'A',
                measured_s: 2.0,
                predicted_s: 3.0,
                memory_gb: None,
                memory: MemoryUse::default(),
                measured_mfu: None,
            })
            .collect();
        let alone = strata(&predicted);
        assert_eq!((alone[0].n, alone[0].counts()), (3, false));
        let among = strata_among(&predicted, 'A', &rows);
        assert_eq!((among[0].n, among[0].measured), (3, 4));
        assert_eq!(over_strata(&among, |s| Some(s.mape)), Some(0.5));
        assert!(strata_among(&predicted, 'B', &rows).is_empty());
    }
}
