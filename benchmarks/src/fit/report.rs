//! The fit in words and tables.

use crate::problem::Problem;
use benchmarks::score::{COUNTED_ROWS, mean, median};
use cost_model::presets::Parameters;
use published::Figure;
use published::quantity::MOST;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// The derivative from which on a row supports a parameter.
const SAYS_SOMETHING: f64 = 0.02;

/// The errors by row: with all rows fitted, with the group held out, with the source held out.
pub struct Errors {
    pub before: Vec<f64>,
    pub fitted: Vec<f64>,
    pub by_group: Vec<f64>,
    pub by_source: Vec<f64>,
}

/// Lists the support of every parameter: rows of tier A whose step it changes, and sources.
pub fn support(problem: &Problem, slopes: &[Vec<f64>]) -> Vec<String> {
    slopes
        .iter()
        .map(|by_row| {
            let said: Vec<&crate::problem::Item> = by_row
                .iter()
                .zip(&problem.items)
                .filter(|(slope, _)| slope.abs() > SAYS_SOMETHING)
                .map(|(_, item)| item)
                .collect();
            let sources: BTreeSet<&str> = said.iter().map(|i| i.source.as_str()).collect();
            let names: Vec<&str> = sources.into_iter().collect();
            format!("{} rows of {}", said.len(), names.join(", "))
        })
        .collect()
}

/// Writes the report.
pub fn text(
    problem: &Problem,
    figures: &[Figure],
    parameters: &Parameters,
    errors: &Errors,
    seconds: f64,
) -> String {
    let mut out = String::from("# Figures fitted to published runs\n\n");
    push(
        &mut out,
        format!(
            "Made by `cargo run --release -p benchmarks --bin fit` in {seconds:.0} s: {} figures fitted to {} rows. What each means, its bounds and its default are in `clusters/training.toml` and `published/data/parameters.toml`. \"Group\": every row predicted by one of five fits that had not seen its group; \"source\": by a fit that had seen nothing of its source. Each of these fits starts at the defaults. What is a fact in `published/data`, and the structure of the model, were chosen with all rows in sight, which cross-validation does not undo. Errors are in percent of the measured step time.\n",
            parameters.list().iter().filter(|p| p.is_fitted()).count(),
            problem.items.len()
        ),
    );
    for (tier, title) in [
        ('A', "Rows that say everything (tier A)"),
        ('B', "Rows of which something had to be assumed (tier B)"),
    ] {
        push(&mut out, format!("## {title}\n"));
        strata(&mut out, problem, errors, tier);
    }
    table(&mut out, figures, parameters);
    out
}

/// Writes every figure that no source states, whatever it was fitted to.
fn table(out: &mut String, figures: &[Figure], parameters: &Parameters) {
    push(out, "## All figures\n".into());
    push(
        out,
        format!(
            "{} figures that no source states, of at most {MOST}. A figure marked \"at a bound\" lies where its meaning ends.\n",
            figures.len()
        ),
    );
    push(out, "| name | of | unit | found | default | bounds | value | support |\n|---|---|---|---|---:|---:|---:|---|".into());
    for f in figures {
        let own = parameters.list().iter().find(|p| p.name == f.name);
        let bounds = f.bounds.filter(|(low, high)| low < high);
        let bounds = bounds.map_or("–".into(), |(low, high)| {
            format!("{} to {}", figure(low), figure(high))
        });
        let values: Vec<String> = f.values.iter().map(|x| figure(*x)).collect();
        let mark = if f.is_at_a_bound() {
            ", at a bound"
        } else {
            ""
        };
        push(
            out,
            format!(
                "| {} | {} | {} | {} | {} | {bounds} | {}{mark} | {} |",
                f.name,
                f.of.join(", "),
                f.unit,
                f.found.words(),
                own.map_or("–".into(), |p| figure(p.default)),
                values.join(", "),
                f.support
            ),
        );
    }
}

fn strata(out: &mut String, problem: &Problem, errors: &Errors, tier: char) {
    let columns = [
        &errors.before,
        &errors.fitted,
        &errors.by_group,
        &errors.by_source,
    ];
    let mut rows: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (i, item) in problem.items.iter().enumerate() {
        if item.tier == tier {
            rows.entry(&item.stratum).or_default().push(i);
        }
    }
    push(out, "| stratum | rows | before | fitted | median error | group | source |\n|---|---:|---:|---:|---:|---:|---:|".into());
    let mut counted: Vec<Vec<f64>> = vec![Vec::new(); columns.len()];
    for (name, members) in &rows {
        let mapes: Vec<f64> = columns
            .iter()
            .map(|c| mean(&members.iter().map(|&i| c[i].abs()).collect::<Vec<_>>()).unwrap_or(0.0))
            .collect();
        if members.len() >= COUNTED_ROWS {
            for (all, mape) in counted.iter_mut().zip(&mapes) {
                all.push(*mape);
            }
        }
        let bias = median(
            &members
                .iter()
                .map(|&i| errors.fitted[i])
                .collect::<Vec<_>>(),
        );
        push(
            out,
            format!(
                "| {name} | {} | {} | {} | {:+.1}% | {} | {} |",
                members.len(),
                percent(mapes[0]),
                percent(mapes[1]),
                100.0 * bias.unwrap_or(0.0),
                percent(mapes[2]),
                percent(mapes[3])
            ),
        );
    }
    let means: Vec<String> = counted
        .iter()
        .map(|all| format!("**{}**", percent(mean(all).unwrap_or(0.0))))
        .collect();
    push(
        out,
        format!(
            "| **mean over strata of {COUNTED_ROWS} or more** | | {} | {} | | {} | {} |\n",
            means[0], means[1], means[2], means[3]
        ),
    );
}

fn figure(x: f64) -> String {
    if x < 1e-2 {
        format!("{x:.2e}")
    } else {
        format!("{x:.3}")
    }
}

fn percent(share: f64) -> String {
    format!("{:.1}%", 100.0 * share)
}

fn push(out: &mut String, line: String) {
    // Writing to a string cannot fail.
    let _ = writeln!(out, "{line}");
}
