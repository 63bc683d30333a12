//! Fits the communication model to published measurements and compares it with them.
//!
//! `fit_comm [RESULT.md]`, in the repository's root: prints the fitted section of
//! `clusters/links.toml`, and writes the errors and all rows to `RESULT.md`
//! (`benchmarks/results/comm.md` unless named).

use benchmarks::comm::{cases, fit, report, rows, section};
use cost_model::presets;

fn main() {
    let path = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "benchmarks/results/comm.md".into());
    if let Err(message) = run(&path) {
        eprintln!("{message}");
        std::process::exit(1);
    }
}

fn run(path: &str) -> Result<(), String> {
    let mut all = Vec::new();
    for file in ["comm.csv", "comm_plots.csv"] {
        let file = format!("benchmarks/published/{file}");
        let text = std::fs::read_to_string(&file).map_err(|e| format!("{file}: {e}"))?;
        all.extend(rows(&text).map_err(|e| format!("{file}: {e}"))?);
    }
    let (cases, left) = cases(&all);
    let catalogue = presets::catalogue().map_err(|e| e.to_string())?;
    let found = fit(catalogue, &cases.iter().collect::<Vec<_>>())?;
    println!("{}", section(&found)?);
    let text = format!("{HEAD}{}", report(catalogue, &cases, &left)?);
    std::fs::write(path, text).map_err(|e| format!("{path}: {e}"))
}

const HEAD: &str = "# Communication model against published measurements

Command: `cargo run --release -p benchmarks --bin fit_comm`. Figures come from `clusters/links.toml`;
measurements from [published/](../published/README.md). \"Left out\": predicted by a fit that has
not seen the table, so that a link which only that table measures falls back to its prior.

All rows of `comm.csv` but three are all-reduces. Reduce-scatter and all-gather are tested by one
row each, all-to-all by nine labels of a slide (large messages only), sends by one; broadcast is
not tested. Error: |predicted / measured - 1| of the time.

";
