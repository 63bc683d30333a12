//! The first table of the report: for every stratum the error in sample, with groups left out and
//! with sources left out side by side, and rows without a prediction as what they are, failures.

use crate::report::{percent, push};
use benchmarks::held_out::HeldOut;
use benchmarks::score::{COUNTED_ROWS, Scored, mean, median, stratum};
use published::figures::{Figure, Found};
use published::{Outcome, Row};
use std::collections::BTreeMap;

/// The error that a row without a prediction counts as.
const FAILED: f64 = 1.0;

/// One stratum of one tier.
#[derive(Debug, Default)]
struct Line {
    /// Rows with a measurement, predicted or not.
    n: usize,
    unpredicted: usize,
    in_sample: Vec<f64>,
    group: Vec<f64>,
    source: Vec<f64>,
    memory: Vec<f64>,
    is_diagnostic: bool,
}

impl Line {
    /// The mean of some errors with each row that was not predicted as a failure; none where there
    /// are no such errors.
    fn with_failures(&self, errors: &[f64]) -> Option<f64> {
        let failed = vec![FAILED; self.unpredicted];
        let all = [errors, &failed].concat();
        (!errors.is_empty() || self.unpredicted == self.n).then(|| mean(&all))?
    }
}

/// Writes the table, and the names of the figures to be wary of.
pub fn text(
    rows: &[Row],
    outcomes: &[Outcome],
    scored: &[Scored<'_>],
    held_out: Option<&BTreeMap<String, HeldOut>>,
    figures: &[Figure],
) -> String {
    let mut out = String::from("## In one table\n\n");
    let explained = "Step time MAPE of every stratum that has a measurement, in percent: in sample, by fits that had not seen the row's group, by fits that had seen nothing of its source, and in sample with every row that has no prediction as a failure of 100%. The last two columns are the error of peak memory, where rows state it. Structure and facts were chosen with all rows in sight, which leaving rows out of a fit does not undo.\n";
    push(&mut out, explained.into());
    push(&mut out, "| stratum | tier | rows | not predicted | in sample | groups left out | sources left out | with failures | memory | rows |".into());
    push(&mut out, format!("|---|---{}|", "|---:".repeat(8)));
    let lines = lines(rows, outcomes, scored, held_out);
    for ((tier, name), line) in &lines {
        let apart = if line.is_diagnostic {
            ", a diagnostic"
        } else {
            ""
        };
        let memory = match line.memory.len() {
            0 => " | ".to_string(),
            n => format!("{} | {n}", percent(mean(&line.memory))),
        };
        push(
            &mut out,
            format!(
                "| {name}{apart} | {tier} | {} | {} | {} | {} | {} | {} | {memory} |",
                line.n,
                line.unpredicted,
                percent(mean(&line.in_sample)),
                percent(mean(&line.group)),
                percent(mean(&line.source)),
                percent(line.with_failures(&line.in_sample)),
            ),
        );
    }
    for (tiers, what) in [("A", "tier A"), ("B", "tier B"), ("AB", "both")] {
        let counted: Vec<&Line> = lines
            .iter()
            .filter(|((tier, _), l)| {
                tiers.contains(*tier) && l.n >= COUNTED_ROWS && !l.is_diagnostic
            })
            .map(|(_, l)| l)
            .collect();
        let over = |of: &dyn Fn(&Line) -> Option<f64>| {
            let known: Vec<f64> = counted.iter().filter_map(|l| of(l)).collect();
            percent(mean(&known))
        };
        let memory = |l: &Line| (l.memory.len() >= COUNTED_ROWS).then(|| mean(&l.memory))?;
        push(
            &mut out,
            format!(
                "| **mean over strata of {COUNTED_ROWS} or more, {what}** | | {} | {} | **{}** | **{}** | **{}** | **{}** | **{}** | {} |",
                counted.iter().map(|l| l.n).sum::<usize>(),
                counted.iter().map(|l| l.unpredicted).sum::<usize>(),
                over(&|l| mean(&l.in_sample)),
                over(&|l| mean(&l.group)),
                over(&|l| mean(&l.source)),
                over(&|l| l.with_failures(&l.in_sample)),
                over(&memory),
                counted.iter().map(|l| l.memory.len()).sum::<usize>(),
            ),
        );
    }
    if let Some(unseen) = held_out.and_then(|known| unseen(scored, known)) {
        push(&mut out, format!("\n{unseen}"));
    }
    push(&mut out, format!("\n{}\n", wary(figures)));
    out
}

/// Says how far off the rows are that no fit has had; none where there are none.
fn unseen(scored: &[Scored<'_>], known: &BTreeMap<String, HeldOut>) -> Option<String> {
    let is_unseen = |s: &&Scored<'_>| {
        matches!(s.tier, 'A' | 'B') && !s.is_diagnostic() && !known.contains_key(s.row.id())
    };
    let errors: Vec<f64> = scored.iter().filter(is_unseen).map(Scored::error).collect();
    let sizes: Vec<f64> = errors.iter().map(|e| e.abs()).collect();
    Some(format!(
        "{} rows were in no fit, so that they stand under \"in sample\" alone: MAPE {}, median error {:+.1}%.",
        errors.len(),
        percent(mean(&sizes)),
        100.0 * median(&errors)?
    ))
}

/// Says how many figures there are and which of them lie at a bound.
fn wary(figures: &[Figure]) -> String {
    let count = |found: Found| figures.iter().filter(|f| f.found == found).count();
    let at: Vec<String> = figures
        .iter()
        .filter(|f| f.is_at_a_bound())
        .map(|f| format!("{} ({})", f.name, f.values[0]))
        .collect();
    let at = match at.is_empty() {
        true => "None of them lies at a bound.".to_string(),
        false => format!(
            "At a bound, so that measurements ask for more than the figure means: {}.",
            at.join(", ")
        ),
    };
    format!(
        "All predictions rest on {} figures that no source states: {} fitted to measured steps, {} to measured collectives, {} to measured memory by hand, {} assumed ([all of them](fit.md#all-figures)). {at}",
        figures.len(),
        count(Found::Steps),
        count(Found::Collectives),
        count(Found::Memory),
        count(Found::Hand),
    )
}

fn lines(
    rows: &[Row],
    outcomes: &[Outcome],
    scored: &[Scored<'_>],
    held_out: Option<&BTreeMap<String, HeldOut>>,
) -> BTreeMap<(char, String), Line> {
    let mut lines: BTreeMap<(char, String), Line> = BTreeMap::new();
    for (row, outcome) in rows.iter().zip(outcomes) {
        let tier = row.text("tier").and_then(|t| t.chars().next());
        let measured = row.measured("derived_step_time_s");
        let (Some(tier @ ('A' | 'B')), Some(_)) = (tier, measured) else {
            continue;
        };
        let line = lines.entry((tier, stratum(row))).or_default();
        line.n += 1;
        line.unpredicted += usize::from(outcome.is_err());
    }
    for s in scored {
        let line = lines.entry((s.tier, s.stratum.clone())).or_default();
        line.is_diagnostic = s.is_diagnostic();
        line.in_sample.push(s.error().abs());
        if let Some((measured, predicted)) = s.memory_gb {
            line.memory.push((predicted / measured - 1.0).abs());
        }
        if let Some(e) = held_out.and_then(|all| all.get(s.row.id())) {
            line.group.push(e.group.abs());
            line.source.push(e.source.abs());
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_without_a_prediction_is_a_failure() {
        let line = Line {
            n: 4,
            unpredicted: 1,
            in_sample: vec![0.1, 0.2, 0.3],
            ..Line::default()
        };
        let with = line.with_failures(&line.in_sample).unwrap();
        assert!((with - 0.4).abs() < 1e-12);
        let none = Line {
            n: 2,
            unpredicted: 2,
            ..Line::default()
        };
        assert_eq!(none.with_failures(&none.in_sample), Some(1.0));
        assert_eq!(line.with_failures(&line.group), None);
    }
}
