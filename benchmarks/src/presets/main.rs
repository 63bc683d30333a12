//! The free plan against the best point of all presets of pins, case by case.
//!
//! `cargo run --release -p benchmarks --bin presets -- [--case TEXT].. [--other CASE]..
//! [--seconds N] [--limit-points N] [--preset NAME].. [--json FILE] [--known FILE] [--list]`
//!
//! Prints a Markdown table, a row as soon as its case is done. A ratio above 1 is a case in which
//! somebody who knows the preset has a faster plan, by the simulator, than the search finds. With
//! `--known`, only those points are planned that an earlier `--json` file has among the best: a
//! check of a change to the free search that takes seconds.

mod cases;
mod measure;
mod report;

use cases::{CASES, Case};
use clap::Parser;
use measure::{Budget, Measured};
use planner::Recipe;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A plan is millions of small vectors and maps: with the system's allocator a third of the time of
/// planning goes into it, with this one a tenth.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Plans cases freely and by presets of pins, and compares the predicted steps.
#[derive(Parser)]
struct Args {
    /// Take the cases whose name has this text; may be repeated.
    #[arg(long, value_name = "TEXT")]
    case: Vec<String>,
    /// Take a case of your own instead, as `llama-2-7b dgx-a100-40gb:4 b128 s4096`; may be
    /// repeated.
    #[arg(long, value_name = "CASE", conflicts_with = "case")]
    other: Vec<String>,
    /// Begin no more points of a case after so many seconds.
    #[arg(long)]
    seconds: Option<u64>,
    /// Plan at most so many points of a case, promising ones first.
    #[arg(long, value_name = "N")]
    limit_points: Option<usize>,
    /// Plan the points of this preset alone; may be repeated.
    #[arg(long, value_name = "NAME")]
    preset: Vec<String>,
    /// Write the results to this file, again after each case.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Plan only the best points of an earlier --json file.
    #[arg(long, value_name = "FILE")]
    known: Option<PathBuf>,
    /// The folder of the models.
    #[arg(long, value_name = "DIR", default_value = "models")]
    models: PathBuf,
    /// List the cases and end.
    #[arg(long)]
    list: bool,
}

fn main() {
    if let Err(message) = run(&Args::parse()) {
        eprintln!("{message}");
        std::process::exit(1);
    }
}

fn run(args: &Args) -> Result<(), String> {
    let is_asked = |name: &str| args.case.is_empty() || args.case.iter().any(|c| name.contains(c));
    let asked: Vec<Case> = match args.other.is_empty() {
        true => {
            let all = CASES.iter().filter(|c| is_asked(&c.name()));
            all.cloned().collect()
        }
        false => {
            let named = args.other.iter().map(|name| Case::named(name));
            named.collect::<Result<_, _>>()?
        }
    };
    if args.list {
        for case in asked {
            println!("{}", case.name());
        }
        return Ok(());
    }
    let recipe = |name: &String| {
        let names = Recipe::NAMES.join(", ");
        Recipe::named(name).ok_or_else(|| format!("there is no preset `{name}`; {names} are"))
    };
    let recipes = match args.preset.is_empty() {
        true => Recipe::ALL.to_vec(),
        false => args.preset.iter().map(recipe).collect::<Result<_, _>>()?,
    };
    let known = args.known.as_deref().map(read).transpose()?;
    let budget = Budget {
        time: args.seconds.map(Duration::from_secs),
        points: args.limit_points,
    };
    let mut done: Vec<Measured> = Vec::new();
    println!("{}", report::HEADER);
    for case in &asked {
        let points = known.as_ref().map(|k| report::best_points(k, &case.name()));
        let points = points.transpose()?;
        let measured = measure::measure(case, &args.models, &recipes, points, &budget)?;
        println!("{}", report::row(&measured));
        done.push(measured);
        if let Some(path) = &args.json {
            let text = format!("{:#}\n", report::json(&done));
            std::fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()))?;
        }
    }
    println!("\n{}", report::summary(&done));
    Ok(())
}

fn read(path: &Path) -> Result<Value, String> {
    let text = std::fs::read(path).map_err(|e| format!("{}: {e}", path.display()))?;
    serde_json::from_slice(&text).map_err(|e| format!("{}: {e}", path.display()))
}
