//! `predict`: a table of training runs to predicted step times and memory.

use super::spinner;
use crate::args::PredictArgs;
use crate::failure::{Exit, Failure};
use crate::{files, report};
use published::{Facts, csv, output, predict, row};
use std::collections::BTreeMap;
use std::time::Instant;

/// Reasons that a failure lists.
const REASONS_SHOWN: usize = 10;

/// Runs the verb.
pub fn run(args: &PredictArgs) -> Result<(), Failure> {
    let text = files::read_text(&args.rows, "table of runs", files::LARGE)?;
    let table = csv::parse(&text).map_err(|e| {
        Failure::new(Exit::BadInput, format!("{}: {e}", args.rows.display())).help(
            "expected comma-separated values with a header; docs/published.md lists the columns",
        )
    })?;
    let missing: Vec<&str> = published::REQUIRED_COLUMNS
        .into_iter()
        .filter(|c| !table.header.iter().any(|h| h == c))
        .collect();
    if !missing.is_empty() {
        return Err(Failure::new(
            Exit::BadInput,
            format!("{}: no column {}", args.rows.display(), missing.join(", ")),
        )
        .help("docs/published.md lists the columns"));
    }
    files::check_not_input(&args.output, &[&args.rows])?;
    files::check_writable(&args.output)?;
    let started = Instant::now();
    let bar = spinner("predicting");
    let rows = row::rows(&table);
    if rows.is_empty() {
        bar.finish_and_clear();
        let what = format!(
            "{}: the table has no rows under its header",
            args.rows.display()
        );
        return Err(Failure::new(Exit::BadInput, what)
            .help("a row is a training run; docs/published.md lists the columns"));
    }
    let outcomes = predict(&rows, &Facts::built_in());
    bar.finish_and_clear();
    let predicted = outcomes.iter().filter(|o| o.is_ok()).count();
    let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
    for unmodelled in outcomes.iter().filter_map(|o| o.as_ref().err()) {
        *reasons.entry(unmodelled.to_string()).or_default() += 1;
    }
    let reasons = reasons
        .into_iter()
        .map(|(reason, n)| format!("  {n} not predicted: {reason}"));
    if predicted == 0 {
        let reasons: Vec<String> = reasons.take(REASONS_SHOWN).collect();
        let what = format!(
            "none of {} runs could be predicted\n{}",
            rows.len(),
            reasons.join("\n")
        );
        return Err(
            Failure::new(Exit::Infeasible, format!("{}: {what}", args.rows.display()))
                .help("docs/published.md lists the columns and what they may say"),
        );
    }
    files::write_atomic(&args.output, output(&rows, &outcomes).as_bytes())?;
    report::out(&format!(
        "{predicted} of {} runs predicted in {:.1} s. Written to {}.",
        rows.len(),
        started.elapsed().as_secs_f64(),
        args.output.display()
    ))?;
    for reason in reasons {
        report::out(&reason)?;
    }
    Ok(())
}
