//! The report in words and tables.

use crate::memory;
use crate::ranking::{Ranked, rankings};
use crate::score::{
    COUNTED_ROWS, Scored, Stratum, mean, median, memory_over_strata, over_strata, strata_among,
};
use published::{Outcome, Row};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Writes the report.
///
/// `first` is the table that stands before all others.
pub fn text(
    rows: &[Row],
    outcomes: &[Outcome],
    scored: &[Scored<'_>],
    seconds: f64,
    first: &str,
) -> String {
    let [a, b] = ['A', 'B'].map(|tier| strata_among(scored, tier, rows));
    let mut out = String::from("# Predictions against published runs\n\n");
    let predicted = outcomes.iter().filter(|o| o.is_ok()).count();
    push(
        &mut out,
        format!(
            "Made by `cargo run --release -p benchmarks --bin published`: {predicted} of {} rows predicted in {seconds:.1} s. Step time is the target; errors are in percent of the measured value. Noise is the median spread of repeated configurations; no skill is the error of assuming the stratum's median MFU. Strata count in a mean by their rows with a measurement, predicted or not.\n",
            rows.len()
        ),
    );
    out += first;
    push(
        &mut out,
        "![predicted against measured](published.svg)\n".into(),
    );
    push(&mut out, "## Rows that say everything (tier A)\n".into());
    table(&mut out, &a);
    push(
        &mut out,
        "\n## Rows of which something had to be assumed (tier B)\n".into(),
    );
    table(&mut out, &b);
    let both: Vec<Stratum> = a.iter().chain(&b).cloned().collect();
    push(
        &mut out,
        format!(
            "\nMean over the strata of {COUNTED_ROWS} rows or more of both tiers: {} (no skill {}).\n",
            percent(over_strata(&both, |s| Some(s.mape))),
            percent(over_strata(&both, |s| s.no_skill))
        ),
    );
    families(&mut out, scored);
    out += &memory::text(scored);
    let of_a: Vec<Scored<'_>> = scored.iter().filter(|s| s.tier == 'A').cloned().collect();
    ranked(&mut out, &rankings(&of_a));
    missing(&mut out, rows, outcomes);
    out
}

/// Writes one line per row: stratum, id, measured, predicted, error in percent.
pub fn errors(scored: &[Scored<'_>]) -> String {
    let mut out = String::new();
    for s in scored {
        push(
            &mut out,
            format!(
                "{}\t{}\t{}\t{:.4}\t{:.4}\t{:+.1}",
                s.stratum,
                s.row.id(),
                s.row.text("model").unwrap_or(""),
                s.measured_s,
                s.predicted_s,
                100.0 * s.error()
            ),
        );
    }
    out
}

/// Writes the worth of every term: the mean error of tier A and of both tiers without it, and the
/// strata that change most. Strata are of tier A and of tier B.
pub fn ablation(full: &[Vec<Stratum>; 2], without: &[(&str, [Vec<Stratum>; 2])]) -> String {
    let mut out = String::from("\n## What each term is worth\n\n");
    push(&mut out, "Step time MAPE in percent, mean over strata of both tiers, without one term at a time, the other figures unchanged; what that is over the mean with all terms; and the strata that change most.\n".into());
    push(
        &mut out,
        "| without | tier A | worth | both tiers | worth | most in |\n|---|---:|---:|---:|---:|---|".into(),
    );
    let mean = |strata: &[Vec<Stratum>]| -> f64 {
        let all: Vec<Stratum> = strata.concat();
        100.0 * over_strata(&all, |s| Some(s.mape)).unwrap_or(0.0)
    };
    let (a, both) = (mean(&full[..1]), mean(full));
    push(&mut out, format!("| nothing | {a:.2} | | {both:.2} | | |"));
    for (term, strata) in without {
        let mut changes: Vec<(f64, &str)> = full
            .iter()
            .flatten()
            .zip(strata.iter().flatten())
            .filter(|(all, _)| all.counts())
            .map(|(all, s)| (100.0 * (s.mape - all.mape), all.name.as_str()))
            .filter(|c| c.0.abs() >= 0.05)
            .collect();
        changes.sort_by(|x, y| y.0.abs().total_cmp(&x.0.abs()));
        let most: Vec<String> = changes
            .iter()
            .take(4)
            .map(|c| format!("{} {:+.1}", c.1, c.0))
            .collect();
        let (in_a, in_both) = (mean(&strata[..1]), mean(strata));
        push(
            &mut out,
            format!(
                "| {term} | {in_a:.2} | {:+.2} | {in_both:.2} | {:+.2} | {} |",
                in_a - a,
                in_both - both,
                most.join("; ")
            ),
        );
    }
    out
}

fn table(out: &mut String, strata: &[Stratum]) {
    push(out, "| stratum | rows | step time MAPE | median error | no skill | noise | memory MAPE (rows) |".into());
    push(out, "|---|---:|---:|---:|---:|---:|---:|".into());
    for s in strata {
        let memory = s.memory.map_or(String::new(), |(n, e)| {
            format!("{} ({n})", percent(Some(e)))
        });
        push(
            out,
            format!(
                "| {}{} | {}{} | {} | {:+.1}% | {} | {} | {memory} |",
                s.name,
                if s.is_diagnostic {
                    ", a diagnostic"
                } else {
                    ""
                },
                s.n,
                match s.measured > s.n {
                    true => format!(" of {}", s.measured),
                    false => String::new(),
                },
                percent(Some(s.mape)),
                100.0 * s.bias,
                percent(s.no_skill),
                percent(s.noise)
            ),
        );
    }
    push(
        out,
        format!(
            "| **mean over strata of {COUNTED_ROWS} or more** | {} | **{}** | | {} | | {} |",
            strata
                .iter()
                .filter(|s| s.counts())
                .map(|s| s.n)
                .sum::<usize>(),
            percent(over_strata(strata, |s| Some(s.mape))),
            percent(over_strata(strata, |s| s.no_skill)),
            percent(memory_over_strata(strata))
        ),
    );
}

fn families(out: &mut String, scored: &[Scored<'_>]) {
    push(out, "## Median signed error by GPU family\n".into());
    let mut by_family: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for s in scored.iter().filter(|s| !s.is_diagnostic()) {
        by_family.entry(s.family()).or_default().push(s.error());
    }
    push(
        out,
        "| family | rows | median error |\n|---|---:|---:|".into(),
    );
    for (family, errors) in by_family {
        let bias = median(&errors).unwrap_or(0.0);
        push(
            out,
            format!("| {family} | {} | {:+.1}% |", errors.len(), 100.0 * bias),
        );
    }
}

fn ranked(out: &mut String, groups: &[Ranked]) {
    push(out, "\n## Order of plans\n".into());
    push(out, "Groups of five plans or more of one model on one cluster; pairs measured within 2% of each other are not compared. The first tau is over all other pairs, where a plan that was measured more than once cannot be put in order by its columns and counts as chance; the second over pairs of different plans. Beside it, the highest that the first can be for any prediction which is a function of a plan's columns; those that know releases may exceed it. Regret: how much longer than the fastest plan the predicted fastest takes.\n".into());
    push(
        out,
        "| stratum | plans of | n | Kendall's tau | of different plans | highest by columns | regret |\n|---|---|---:|---:|---:|---:|---:|".into(),
    );
    for g in groups {
        push(
            out,
            format!(
                "| {} | {} | {} | {:.2} | {} | {:.2} | {} |",
                g.stratum,
                g.what,
                g.n,
                g.tau,
                g.tau_of_plans.map_or("–".into(), |tau| format!("{tau:.2}")),
                g.best_tau_of_columns,
                percent(Some(g.regret))
            ),
        );
    }
    let tau: Vec<f64> = groups.iter().map(|g| g.tau).collect();
    let of_plans: Vec<f64> = groups.iter().filter_map(|g| g.tau_of_plans).collect();
    let highest: Vec<f64> = groups.iter().map(|g| g.best_tau_of_columns).collect();
    let regret: Vec<f64> = groups.iter().map(|g| g.regret).collect();
    push(
        out,
        format!(
            "| **mean** | | | **{:.2}** | **{:.2}** | **{:.2}** | **{}** |",
            mean(&tau).unwrap_or(0.0),
            mean(&of_plans).unwrap_or(0.0),
            mean(&highest).unwrap_or(0.0),
            percent(mean(&regret))
        ),
    );
}

fn missing(out: &mut String, rows: &[Row], outcomes: &[Outcome]) {
    let mut reasons: BTreeMap<(&str, String), usize> = BTreeMap::new();
    let mut n_rows: BTreeMap<&str, usize> = BTreeMap::new();
    for (row, outcome) in rows.iter().zip(outcomes) {
        let tier = row.text("tier").unwrap_or("?");
        *n_rows.entry(tier).or_default() += 1;
        if let Err(e) = outcome {
            *reasons.entry((tier, e.to_string())).or_default() += 1;
        }
    }
    push(out, "\n## Rows without a prediction\n".into());
    push(out, "| tier | rows | reason |\n|---|---:|---|".into());
    for ((tier, reason), n) in &reasons {
        push(
            out,
            format!(
                "| {tier} | {n} of {} | {} |",
                n_rows[tier],
                reason.replace('|', "/")
            ),
        );
    }
}

/// Shows a share in percent.
pub fn percent(share: Option<f64>) -> String {
    share.map_or("–".into(), |x| format!("{:.1}%", 100.0 * x))
}

/// Adds a line.
pub fn push(out: &mut String, line: String) {
    // Writing to a string cannot fail.
    let _ = writeln!(out, "{line}");
}
