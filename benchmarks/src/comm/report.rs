//! The report of a fit: errors by table, fitted figures, every row.

use super::fit::{figure, fit, parameters};
use super::{Case, Row, predict};
use cost_model::presets::{Catalogue, Fitted};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Errors of a set of rows, as shares.
struct Errors {
    n: usize,
    median: f64,
    mean: f64,
}

impl Errors {
    fn of(pairs: impl Iterator<Item = (f64, f64)>) -> Errors {
        let mut all: Vec<f64> = pairs.map(|(p, m)| (p / m - 1.0).abs()).collect();
        all.sort_by(f64::total_cmp);
        let n = all.len().max(1);
        let middle = |i: usize| all.get(i).copied().unwrap_or(0.0);
        Errors {
            n: all.len(),
            median: (middle((n - 1) / 2) + middle(n / 2)) / 2.0,
            mean: all.iter().sum::<f64>() / n as f64,
        }
    }
}

/// Writes the report in Markdown, with the catalogue's figures and with each table left out of the
/// fit in turn. The rows of `comm.csv` are also summed up without those of the plots.
pub fn report(
    catalogue: &Catalogue,
    cases: &[Case],
    left: &[(Row, &'static str)],
) -> Result<String, String> {
    let all: Vec<&Case> = cases.iter().collect();
    let shipped = predict(catalogue, &catalogue.fitted, &all)?;
    let refit = fit(catalogue, &all)?;
    let mut tables: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (i, case) in cases.iter().enumerate() {
        tables.entry(&case.table).or_default().push(i);
    }
    let mut crossed = vec![0.0; cases.len()];
    for indices in tables.values() {
        let rest: Vec<&Case> = cases
            .iter()
            .enumerate()
            .filter(|(i, _)| !indices.contains(i))
            .map(|(_, c)| c)
            .collect();
        let without = fit(catalogue, &rest)?;
        let these: Vec<&Case> = indices.iter().map(|&i| &cases[i]).collect();
        let predicted = predict(catalogue, &without, &these)?;
        indices
            .iter()
            .zip(predicted)
            .for_each(|(&i, p)| crossed[i] = p);
    }
    let mut out = String::new();
    let say = |out: &mut String, line: &str| {
        out.push_str(line);
        out.push('\n');
    };
    say(
        &mut out,
        "| table | rows | median | mean | median, left out | mean, left out |",
    );
    say(&mut out, "|---|---:|---:|---:|---:|---:|");
    let is_published = |i: &usize| !cases[*i].table.contains("plot") && !is_all_to_all(&cases[*i]);
    let every: Vec<usize> = (0..cases.len()).collect();
    let published: Vec<usize> = every.iter().copied().filter(is_published).collect();
    let lines = [("**comm.csv**", &published), ("**both files**", &every)];
    for (name, indices) in tables.iter().map(|(name, i)| (*name, i)).chain(lines) {
        let errors = |p: &[f64]| Errors::of(indices.iter().map(|&i| (p[i], cases[i].seconds)));
        let (inside, outside) = (errors(&shipped), errors(&crossed));
        let percent = |x: f64| format!("{:.1}%", 100.0 * x);
        say(
            &mut out,
            &format!(
                "| {name} | {} | {} | {} | {} | {} |",
                inside.n,
                percent(inside.median),
                percent(inside.mean),
                percent(outside.median),
                percent(outside.mean)
            ),
        );
    }
    say(&mut out, "\n## Fitted figures\n");
    say(
        &mut out,
        "| figure | in `clusters/links.toml` | fitted now | bounds | prior |",
    );
    say(&mut out, "|---|---:|---:|---:|---:|");
    let (mut now, mut then) = (refit, catalogue.fitted.clone());
    for p in parameters() {
        let name = [p.name.0, p.name.1].join(".");
        let line = format!(
            "| {} | {} | {} | {} to {} | {} |",
            name.trim_start_matches('.'),
            short(*figure(&mut then, &p)?),
            short(*figure(&mut now, &p)?),
            short(p.bounds.0),
            short(p.bounds.1),
            short(p.prior)
        );
        say(&mut out, &line);
    }
    say(&mut out, "\n## Rows\n");
    say(
        &mut out,
        "Microseconds; \"left out\" is predicted by a fit without the row's table.\n",
    );
    say(
        &mut out,
        "| table | what | ranks | bytes | measured | predicted | ratio | left out |",
    );
    say(&mut out, "|---|---|---:|---:|---:|---:|---:|---:|");
    for (i, case) in cases.iter().enumerate() {
        let algo = match case.row.algo.as_str() {
            "" => String::new(),
            algo => format!(", {algo}"),
        };
        let line = format!(
            "| {} | {}{algo} | {} | {} | {:.1} | {:.1} | {:.2} | {:.1} |",
            case.table,
            case.row.collective,
            case.ranks,
            case.bytes,
            case.seconds * 1e6,
            shipped[i] * 1e6,
            shipped[i] / case.seconds,
            crossed[i] * 1e6
        );
        say(&mut out, &line);
    }
    say(&mut out, "\nNot predicted:\n");
    for (row, why) in left {
        say(
            &mut out,
            &format!("- {}, {}: {why}.", row.gpu, row.collective),
        );
    }
    Ok(out)
}

fn is_all_to_all(case: &Case) -> bool {
    case.row.collective == "all_to_all"
}

/// Shows three digits.
fn short(x: f64) -> String {
    if x < 1e-2 {
        format!("{x:.2e}")
    } else {
        format!("{x:.3}")
    }
}

/// Prints the `[fitted]` section as it stands in `clusters/links.toml`, without its comments.
pub fn section(fitted: &Fitted) -> Result<String, String> {
    let mut fitted = fitted.clone();
    let mut out = String::from("[fitted]\n");
    let mut table = "";
    for p in parameters() {
        if p.name.0 != table {
            table = p.name.0;
            writeln!(out, "\n[fitted.{table}]").map_err(|e| e.to_string())?;
        }
        let x = short(*figure(&mut fitted, &p)?);
        writeln!(out, "{} = {x}", p.name.1).map_err(|e| e.to_string())?;
    }
    Ok(out)
}
