//! Fits the cost model's parameters to published training runs: `cargo run --release -p
//! benchmarks --bin fit`. Reads `$MESHWRIGHT_DATA/published/calibration.csv` (or the file named
//! by the first argument), prints what it finds with cross-validation and writes
//! `benchmarks/results/fit.md` and `fit.csv`; with `--write` also `clusters/training.toml` and
//! `published/data/parameters.toml`.
//! `--facts DIR` reads other data files than the built-in ones, `--quick` leaves cross-validation
//! out, `--errors` lists rows.

mod least_squares;
mod problem;
mod report;
mod validate;

use benchmarks::held_out::{self, HeldOut};
use cost_model::presets::parameters::OF_HARDWARE;
use problem::Problem;
use published::{csv, row};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// A plan is millions of small vectors and maps: with the system's allocator a third of the time of
/// planning goes into it, with this one a tenth.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The steps after which the derivatives are computed anew; later steps are small and go on with the
/// last ones.
const FRESH_SLOPES: usize = 2;

fn main() -> Result<(), String> {
    let asked = |flag: &str| std::env::args().any(|a| a == flag);
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
    let started = Instant::now();
    let problem = Problem::new(&row::rows(&table), &benchmarks::facts::facts()?);
    let since = || started.elapsed().as_secs_f64();
    eprintln!(
        "{} rows planned after {:.0} s",
        problem.items.len(),
        since()
    );
    let (bounds, weights) = (problem.bounds(), problem.weights());
    let start = problem.start();
    eprintln!(
        "start {:.1} after {:.0} s",
        bounds.objective(&weights, &start.at, &start.residuals),
        since()
    );
    let before = errors(&start.residuals);
    let fresh = std::cell::Cell::new(FRESH_SLOPES);
    let full = least_squares::minimise(
        &bounds,
        &weights,
        start,
        |at| problem.residuals(at),
        |at, residuals| {
            eprintln!(
                "{:.1} after {:.0} s",
                bounds.objective(&weights, at, residuals),
                since()
            );
            fresh.set(fresh.get().checked_sub(1)?);
            Some(problem.slopes(at, residuals))
        },
    );
    let fitted = errors(&full.residuals);
    let (by_group, by_source) = if asked("--quick") {
        (fitted.clone(), fitted.clone())
    } else {
        let defaults = problem.defaults();
        (
            validate::by_group(&problem, &defaults, &bounds, &weights),
            validate::by_source(&problem, &defaults, &bounds, &weights),
        )
    };
    let all = report::Errors {
        before,
        fitted: fitted.clone(),
        by_group,
        by_source,
    };
    let parameters = problem
        .at(&full.at)
        .with_support(report::support(&problem, &full.slopes));
    let figures = problem.with(&parameters).figures();
    let report = report::text(&problem, &figures, &parameters, &all, since());
    println!("{report}");
    if asked("--errors") {
        for (item, error) in problem.items.iter().zip(&fitted) {
            println!(
                "{}\t{}\t{}\t{:+.1}",
                item.stratum,
                item.tier,
                item.row.id(),
                100.0 * error
            );
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    if !asked("--quick") {
        let results = root.join("results");
        write(&results.join("fit.md"), &report)?;
        write(&results.join("fit.csv"), &held_out(&problem, &all))?;
    }
    if asked("--write") {
        let is_hardware = |q: &str| OF_HARDWARE.contains(&q);
        rewrite(
            &root.join("../clusters/training.toml"),
            &parameters.print_only(is_hardware)?,
        )?;
        let own = parameters.print_only(|q| !is_hardware(q))?;
        rewrite(&root.join("../published/data/parameters.toml"), &own)?;
    }
    Ok(())
}

/// Lists the errors of every row with its group and with its source left out.
fn held_out(problem: &Problem, errors: &report::Errors) -> String {
    let rows = problem.items.iter().enumerate().map(|(i, item)| {
        let left = HeldOut {
            group: errors.by_group[i],
            source: errors.by_source[i],
        };
        (item.row.id(), left)
    });
    held_out::print(&rows.collect::<Vec<_>>())
}

/// Writes figures below the comment that a file begins with.
fn rewrite(file: &Path, figures: &str) -> Result<(), String> {
    let old = std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
    let header: Vec<&str> = old.lines().take_while(|l| l.starts_with('#')).collect();
    write(file, &format!("{}\n\n{figures}", header.join("\n")))
}

fn errors(residuals: &[f64]) -> Vec<f64> {
    residuals.iter().map(|r| r.exp() - 1.0).collect()
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
