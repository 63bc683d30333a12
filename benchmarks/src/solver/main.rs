//! The intra-op solver on folders of instances.
//!
//! * `solver run FOLDER`: solves every instance (`.json`, `.json.gz`), prints a table and
//!   writes the bound traces as drawings.
//! * `solver ablate FOLDER`: what each reduction of presolve and each phase contributes.
//! * `solver zoo FOLDER`: the instances that planning the model zoo solves, under memory
//!   pressure.
//! * `solver generate FILE`: an instance of a given size.
//!
//! Every solve is a process of its own, so that its peak memory is its own.

mod draw;
mod generate;
mod measure;
mod table;
mod zoo;

use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;

#[derive(Parser)]
#[command(about = "Benchmarks of the intra-op solver")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Solve every instance of a folder; print a table, draw the traces.
    Run(RunArgs),
    /// Solve every instance without one reduction or phase at a time.
    Ablate(RunArgs),
    /// Write the intra-op problems of the model zoo.
    Zoo(zoo::ZooArgs),
    /// Write a problem of a given size.
    Generate(generate::GenerateArgs),
    /// Solve one instance and print the measurement as JSON; used by the others.
    #[command(hide = true)]
    One(measure::OneArgs),
}

#[derive(Args)]
struct RunArgs {
    /// Folder of instances, or one instance.
    instances: PathBuf,
    #[command(flatten)]
    limits: measure::Limits,
    /// Where to write measurements and drawings.
    #[arg(short, long)]
    output: Option<PathBuf>,
}

fn main() {
    let outcome = match Cli::parse().verb {
        Verb::Run(a) => run(&a),
        Verb::Ablate(a) => ablate(&a),
        Verb::Zoo(a) => zoo::run(&a),
        Verb::Generate(a) => generate::run(&a),
        Verb::One(a) => measure::one(&a),
    };
    if let Err(message) = outcome {
        eprintln!("{message}");
        std::process::exit(1);
    }
}

fn run(args: &RunArgs) -> Result<(), String> {
    let mut rows = Vec::new();
    println!("{}", table::HEADER);
    for path in measure::instances(&args.instances)? {
        let row = measure::in_process(&path, &args.limits, &[])?;
        println!("{}", table::line(&row));
        rows.push(row);
    }
    if let Some(folder) = &args.output {
        std::fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
        for row in &rows {
            let path = folder.join(format!("{}.svg", row.name));
            measure::write(&path, draw::trace(row).as_bytes())?;
        }
        let text: Vec<String> = rows.iter().map(|r| r.json.to_string()).collect();
        measure::write(
            &folder.join("runs.jsonl"),
            (text.join("\n") + "\n").as_bytes(),
        )?;
    }
    Ok(())
}

fn ablate(args: &RunArgs) -> Result<(), String> {
    println!("{}", table::ABLATION_HEADER);
    for path in measure::instances(&args.instances)? {
        for without in std::iter::once(None).chain(measure::SWITCHES.map(Some)) {
            let off: Vec<&str> = without.into_iter().collect();
            let row = measure::in_process(&path, &args.limits, &off)?;
            println!("{}", table::ablation_line(&row, without));
        }
    }
    Ok(())
}
