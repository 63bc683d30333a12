//! The instances that planning the model zoo solves: models x clusters x memory pressures.
//!
//! Each case is planned first with all the memory of its cluster; then again on devices with a
//! part of what that plan's fullest stage needs, so that memory binds. The problems of the
//! stages that were solved whole are written.

use clap::Args;
use intra_op::write_problem;
use ir::{Bytes, Precision, TrainSpec};
use planner::{Pins, PlanOptions, Planned};
use std::path::{Path, PathBuf};

/// The cases: model, preset, hosts, global batch, sequence.
const CASES: [(&str, &str, u32, u64, u64); 6] = [
    ("gpt2", "dgx-a100-40gb", 1, 64, 1024),
    ("gpt2-medium", "dgx-a100-40gb", 1, 64, 1024),
    ("gpt2-xl", "dgx-a100-80gb", 1, 32, 1024),
    ("llama-3.2-1b", "dgx-h100", 1, 32, 2048),
    ("llama-2-7b", "dgx-a100-80gb", 1, 32, 2048),
    ("llama-3.1-8b", "dgx-h100", 2, 64, 2048),
];
/// The parts of the free plan's memory that devices get.
const PRESSURES: [f64; 3] = [0.9, 0.7, 0.5];

#[derive(Args)]
pub struct ZooArgs {
    /// Folder to write the instances to.
    output: PathBuf,
    /// Folder of the models.
    #[arg(long, default_value = "models")]
    models: PathBuf,
    /// Take only models whose name contains this.
    #[arg(long)]
    only: Option<String>,
}

/// Writes the set.
pub fn run(args: &ZooArgs) -> Result<(), String> {
    std::fs::create_dir_all(&args.output).map_err(|e| format!("{}: {e}", args.output.display()))?;
    let wanted = |name: &str| args.only.as_ref().is_none_or(|only| name.contains(only));
    for case in CASES.iter().filter(|case| wanted(case.0)) {
        one(args, case)?;
    }
    Ok(())
}

fn one(args: &ZooArgs, case: &(&str, &str, u32, u64, u64)) -> Result<(), String> {
    let &(model, preset, hosts, batch, sequence) = case;
    let name = format!("{model}-{preset}-{hosts}");
    let free = plan(&args.models, case, None)?;
    let needed = free.program.roles.iter().map(|r| r.arena_bytes).max();
    let needed = needed.unwrap_or(0);
    println!(
        "{name}: batch {batch}, sequence {sequence}: {}",
        Bytes(needed)
    );
    for pressure in PRESSURES {
        let memory = (needed as f64 * pressure) as u64;
        let percent = (pressure * 100.0).round();
        match plan(&args.models, case, Some(memory)) {
            Err(why) => println!("  {percent}%: {why}"),
            Ok(planned) => {
                let problems = &planned.stats.problems;
                println!("  {percent}%: {} problems", problems.len());
                for (i, problem) in problems.iter().enumerate() {
                    let file = format!("{name}-{percent}-{i}.json");
                    let mut bytes = Vec::new();
                    write_problem(problem, &mut bytes).map_err(|e| e.to_string())?;
                    crate::measure::write(&args.output.join(file), &bytes)?;
                }
            }
        }
    }
    Ok(())
}

/// Plans a case, on devices with `memory` bytes for programs if given.
fn plan(
    models: &Path,
    &(model, preset, hosts, global_batch, sequence): &(&str, &str, u32, u64, u64),
    memory: Option<u64>,
) -> Result<Planned, String> {
    let config = import::ModelConfig::load(&models.join(model)).map_err(|e| e.to_string())?;
    let options = import::BuildOptions {
        sequence,
        dropout: 0.0,
    };
    let forward = import::model_graph(&config, &options).map_err(|e| e.to_string())?;
    let mut cluster = cost_model::presets::load(preset, hosts).map_err(|e| e.to_string())?;
    if let Some(memory) = memory {
        cluster.device.memory_bytes = Bytes(memory + cluster.device.memory_reserved_bytes.0);
    }
    let train = TrainSpec {
        global_batch,
        sequence,
        precision: Precision::Bf16,
        ..TrainSpec::default()
    };
    let pins = Pins::parse(&Vec::<String>::new()).map_err(|e| e.to_string())?;
    planner::plan(
        &forward,
        &train,
        &cluster,
        &PlanOptions {
            pins,
            ..PlanOptions::default()
        },
    )
    .map_err(|e| e.to_string())
}
