//! `predict`: a table of training runs to predicted step times and memory.

use super::spinner;
use crate::args::PredictArgs;
use crate::failure::{Exit, Failure};
use crate::{files, outputs, report};
use published::columns::{REQUIRED_COLUMNS, Unread, unread};
use published::{Facts, Outcome, Predicted, Row, csv, output, predict, row};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

/// The most reasons that a failure lists.
const REASONS_SHOWN: usize = 10;
/// The most rows, or columns, that a line names.
const NAMES_SHOWN: usize = 5;

pub fn run(args: &PredictArgs) -> Result<(), Failure> {
    let text = files::read_text(&args.rows, "table of runs", files::LARGE)?;
    let table = csv::parse(&text).map_err(|e| {
        Failure::new(Exit::BadInput, format!("{}: {e}", args.rows.display())).help(
            "expected comma-separated values with a header; docs/published.md lists the columns",
        )
    })?;
    check_columns(&args.rows, &table.header)?;
    outputs::check(&[&args.output], &[&args.rows])?;
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
    let reasons = reasons(&rows, &outcomes);
    if predicted == 0 {
        let shown = &reasons[..reasons.len().min(REASONS_SHOWN)];
        let more = match reasons.len() - shown.len() {
            0 => String::new(),
            n => format!("\nand {n} more; predict them apart to see why"),
        };
        let what = format!(
            "none of {} could be predicted\n{}{more}",
            ir::counted(rows.len() as u64, "run"),
            shown.join("\n")
        );
        let help = format!(
            "nothing was written to {}; docs/published.md lists the columns and what they may say, with a table that works",
            args.output.display()
        );
        let failure = Failure::new(Exit::Infeasible, format!("{}: {what}", args.rows.display()));
        return Err(failure.help(help));
    }
    outputs::write_atomic(&args.output, output(&rows, &outcomes).as_bytes())?;
    report::out(&format!(
        "{predicted} of {} predicted in {:.1} s. Written to {}.",
        ir::counted(rows.len() as u64, "run"),
        started.elapsed().as_secs_f64(),
        args.output.display()
    ))?;
    for remark in REMARKS {
        if let Some(line) = remarked(&rows, &outcomes, &remark) {
            report::out(&line)?;
        }
    }
    for reason in reasons {
        report::out(&reason)?;
    }
    Ok(())
}

/// Refuses a table that lacks a needed column, or has one whose name is nearly that of a column
/// that is read, or another word for it, and would be left out unseen. Notes which other columns
/// are not read.
fn check_columns(file: &Path, header: &[String]) -> Result<(), Failure> {
    let Unread { misspelt, unknown } = unread(header);
    let bad = |what: String| Failure::new(Exit::BadInput, format!("{}: {what}", file.display()));
    if !misspelt.is_empty() {
        let pair = |(name, column): &(String, &str)| format!("`{name}` (did you mean `{column}`?)");
        let names = some_of(misspelt.iter().map(pair).collect());
        return Err(bad(format!("columns that nothing reads: {names}"))
            .help("correct their names, or take these columns out where they are something else; docs/published.md lists the columns"));
    }
    let missing: Vec<&str> = REQUIRED_COLUMNS
        .into_iter()
        .filter(|c| !header.iter().any(|h| h == c))
        .collect();
    if !missing.is_empty() {
        return Err(bad(format!("no column {}", missing.join(", ")))
            .help("docs/published.md lists the columns"));
    }
    if !unknown.is_empty() {
        let quoted = unknown.into_iter().map(|name| format!("`{name}`"));
        crate::say(format_args!(
            "note: {}: columns that are not read: {}",
            file.display(),
            some_of(quoted.collect())
        ));
    }
    Ok(())
}

/// Lists why rows have no prediction: a line for each reason, with how many rows and which.
fn reasons(rows: &[Row], outcomes: &[Outcome]) -> Vec<String> {
    let mut of: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (i, outcome) in outcomes.iter().enumerate() {
        if let Err(unmodelled) = outcome {
            of.entry(unmodelled.to_string())
                .or_default()
                .push(name_of(rows, i));
        }
    }
    of.into_iter()
        .map(|(reason, names)| {
            format!(
                "  {} not predicted ({}): {reason}",
                names.len(),
                some_of(names)
            )
        })
        .collect()
}

/// A remark on predictions: its words, the test whether one is concerned, and where to see more.
type Remark = (&'static str, fn(&Predicted) -> bool, &'static str);

/// The remarks that a user should read before using predictions.
const REMARKS: [Remark; 3] = [
    (
        "predicted with more memory than the GPU has",
        |p| !p.fits(),
        "`fits` is no",
    ),
    (
        "predicted with a network that `interconnect` does not name",
        |p| p.assumed.iter().any(|a| a.starts_with("between=")),
        "`assumed` has it as `between`",
    ),
    (
        "predicted with parts that do not come out even",
        |p| p.assumed.iter().any(|a| a.ends_with("=uneven")),
        "`assumed` names them; Megatron refuses most of such plans",
    ),
];

/// Returns the line of a remark, where it concerns a prediction.
fn remarked(rows: &[Row], outcomes: &[Outcome], (what, is, see): &Remark) -> Option<String> {
    let names: Vec<String> = (0..rows.len())
        .filter(|&i| outcomes[i].as_ref().is_ok_and(is))
        .map(|i| name_of(rows, i))
        .collect();
    let n = names.len();
    (n > 0).then(|| format!("  {n} {what} ({}): {see}", some_of(names)))
}

/// Returns a row's identifier, or its place among the rows.
fn name_of(rows: &[Row], i: usize) -> String {
    match rows[i].id() {
        "" => format!("row {}", i + 1),
        id => id.to_string(),
    }
}

/// Lists the first of some names, and how many more there are.
fn some_of(names: Vec<String>) -> String {
    let more = names.len().saturating_sub(NAMES_SHOWN);
    let shown = names[..names.len() - more].join(", ");
    match more {
        0 => shown,
        n => format!("{shown} and {n} more"),
    }
}
