//! Predictions against published training runs: `cargo run --release -p benchmarks --bin
//! published`. Reads `$MESHWRIGHT_DATA/published/calibration.csv` (or the file named by the
//! first argument), prints the errors and writes `benchmarks/results/published.md` and
//! `published.svg` beside it.

mod explain;
mod figure;
mod free;
mod headline;
mod memory;
mod ranking;
mod report;

use benchmarks::{held_out, score};
use published::cluster::machine;
use published::{Facts, Machine, Outcome, Predicted, TERMS, csv, lower, predict, price, row};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// A plan is millions of small vectors and maps: with the system's allocator a third of the time of
/// planning goes into it, with this one a tenth.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> Result<(), String> {
    let Some(path) = rows_file() else {
        println!("skipped: MESHWRIGHT_DATA is not set, so there is no published/calibration.csv");
        return Ok(());
    };
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(e) => {
            println!("skipped: {}: {e}", path.display());
            return Ok(());
        }
    };
    let table = csv::parse(&text).map_err(|e| format!("{}: {e}", path.display()))?;
    let rows = row::rows(&table);
    let started = Instant::now();
    let facts = benchmarks::facts::facts()?;
    if let Some(names) = std::env::args().skip_while(|a| a != "--explain").nth(1) {
        print!("{}", explain::text(&rows, &names, &facts));
        return Ok(());
    }
    if let Some(names) = free_rows() {
        let named: Vec<&str> = names.split(',').collect();
        if let Some(name) = named.iter().find(|n| !rows.iter().any(|r| r.id() == **n)) {
            return Err(format!("--free: there is no row `{name}`"));
        }
        let rows: Vec<row::Row> = rows
            .into_iter()
            .filter(|r| named.contains(&r.id()))
            .collect();
        if let Some(other) = rows.iter().find(|r| !free::is_of_class(r)) {
            return Err(format!(
                "--free: {} is not of the GPT-3 175B class, 96 layers of hidden size 12288",
                other.id()
            ));
        }
        let outcomes = predict(&rows, &facts);
        print!("{}", free::text(&score::scored(&rows, &outcomes), &facts));
        return Ok(());
    }
    let outcomes = predict(&rows, &facts);
    let seconds = started.elapsed().as_secs_f64();
    let scored = score::scored(&rows, &outcomes);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("results");
    let left = folder.join("fit.csv");
    let left = match left.exists() {
        true => Some(held_out::read(&left)?),
        false => None,
    };
    let figures = facts.figures();
    let first = headline::text(&rows, &outcomes, &scored, left.as_ref(), &figures);
    let mut report = report::text(&rows, &outcomes, &scored, seconds, &first);
    if std::env::args().any(|a| a == "--free") {
        report += &free::text(&scored, &facts);
    }
    let points = path.with_file_name("memory.csv");
    if let Ok(text) = std::fs::read_to_string(&points) {
        report +=
            &memory::points(&text, &facts).map_err(|e| format!("{}: {e}", points.display()))?;
    }
    if std::env::args().any(|a| a == "--ablate") {
        report += &ablation(&facts, &scored);
    }
    println!("{report}");
    if std::env::args().any(|a| a == "--errors") {
        print!("{}", report::errors(&scored));
    }
    let shown: Vec<score::Scored<'_>> = scored
        .iter()
        .filter(|s| !s.is_diagnostic())
        .cloned()
        .collect();
    write(&folder.join("published.md"), &report)?;
    write(&folder.join("published.svg"), &figure::svg(&shown))
}

/// Returns the rows that `--free ROW,ROW` names; with it nothing else is printed.
fn free_rows() -> Option<String> {
    let next = std::env::args().skip_while(|a| a != "--free").nth(1);
    next.filter(|names| !names.starts_with("--"))
}

/// Writes the errors without each term of the model of execution, in-sample, without fitting again.
fn ablation(facts: &Facts, full: &[score::Scored<'_>]) -> String {
    let kept: Vec<row::Row> = full
        .iter()
        .filter(|s| "AB".contains(s.tier) && !s.is_diagnostic())
        .map(|s| s.row.clone())
        .collect();
    // The programs stay the same; only their instructions are priced again.
    let (whole, programs) = (predict(&kept, facts), lower(&kept, facts));
    let machines: Vec<_> = kept.iter().map(|row| machine(row, facts).ok()).collect();
    let columns = TERMS.iter().map(|(term, leave_out)| {
        let without = |machine: &Option<Machine>| {
            let mut changed = machine.clone()?;
            leave_out(&mut changed);
            Some((changed != *machine.as_ref()?, changed))
        };
        let asked: Vec<_> = machines
            .iter()
            .zip(&programs)
            .map(|(c, p)| Some((&**p.as_ref().ok()?, without(c)?)))
            .collect();
        // What the term says nothing of stays as it is.
        let changed = asked.iter().flatten().filter(|(_, (changed, _))| *changed);
        let priced: Vec<_> = changed.map(|(p, (_, c))| (*p, c.clone())).collect();
        let mut times = price(&priced).into_iter();
        let outcomes: Vec<Outcome> = whole
            .iter()
            .zip(&asked)
            .map(|(o, asked)| match (asked, o) {
                (Some((_, (true, _))), Ok(p)) => Ok(Predicted {
                    step_time_s: times.next().unwrap_or(Ok(p.step_time_s))?,
                    ..p.clone()
                }),
                _ => o.clone(),
            })
            .collect();
        (*term, by_tier(&score::scored(&kept, &outcomes)))
    });
    let whole = by_tier(&score::scored(&kept, &whole));
    report::ablation(&whole, &columns.collect::<Vec<_>>())
}

/// Strata of tier A, then of tier B.
fn by_tier(scored: &[score::Scored<'_>]) -> [Vec<score::Stratum>; 2] {
    ['A', 'B'].map(|tier| {
        let of: Vec<_> = scored.iter().filter(|s| s.tier == tier).cloned().collect();
        score::strata(&of)
    })
}

fn rows_file() -> Option<PathBuf> {
    let named = std::env::args().nth(1).filter(|a| !a.starts_with("--"));
    named.map(PathBuf::from).or_else(|| {
        let data = PathBuf::from(std::env::var_os("MESHWRIGHT_DATA")?);
        Some(data.join("published").join("calibration.csv"))
    })
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    std::fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()))
}
