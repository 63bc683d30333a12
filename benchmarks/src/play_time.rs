//! Time of lowering, pricing and playing one step of a plan of many ranks.
//!
//! `play_time MODEL CLUSTER HOSTS GLOBAL_BATCH [PIN ...]`
//!
//! Plans under the pins, then takes each phase several times and prints the least and the
//! median of its seconds: `lower` (plan to program), `classes` (which ranks are equal),
//! `price` (durations of all instructions) and `simulate`, which prices and plays.

use cost_model::classes::classes;
use cost_model::costs::costs;
use cost_model::{SimulateOptions, simulate};
use ir::{Precision, TrainSpec};
use planner::{Pins, PlanOptions, Planned};
use std::path::Path;
use std::time::Instant;

/// The number of times that each phase is taken.
const REPEATS: usize = 7;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, cluster, hosts, batch, pins @ ..] = &args[..] else {
        eprintln!("usage: play_time MODEL CLUSTER HOSTS GLOBAL_BATCH [PIN ...]");
        std::process::exit(2);
    };
    if let Err(message) = run(model, cluster, hosts, batch, pins) {
        eprintln!("{message}");
        std::process::exit(1);
    }
}

fn run(
    model: &str,
    cluster: &str,
    hosts: &str,
    batch: &str,
    pins: &[String],
) -> Result<(), String> {
    let number = |text: &str| -> Result<u32, String> {
        text.parse().map_err(|_| format!("`{text}` is no number"))
    };
    let config = import::ModelConfig::load(Path::new(model)).map_err(|e| e.to_string())?;
    let sequence = config.max_sequence().min(2048);
    let options = import::BuildOptions {
        sequence,
        dropout: 0.0,
    };
    let forward = import::model_graph(&config, &options).map_err(|e| e.to_string())?;
    let cluster = cost_model::presets::load(cluster, number(hosts)?).map_err(|e| e.to_string())?;
    let train = TrainSpec {
        global_batch: number(batch)?.into(),
        sequence,
        precision: Precision::Bf16,
        ..TrainSpec::default()
    };
    let options = PlanOptions {
        pins: Pins::parse(pins).map_err(|e| e.to_string())?,
        ..PlanOptions::default()
    };
    let began = Instant::now();
    let made = planner::plan(&forward, &train, &cluster, &options).map_err(|e| e.to_string())?;
    println!("plan: {:.3} s", began.elapsed().as_secs_f64());
    describe(&made);

    let program = phase("lower", || lowering::lower(&made.plan)).map_err(|e| e.to_string())?;
    let found: usize = phase("classes", || {
        program
            .roles
            .iter()
            .map(|r| classes(r, &cluster).len())
            .sum()
    });
    println!("  {found} classes of ranks");
    phase("price", || costs(&program, &cluster)).map_err(|e| e.to_string())?;
    let work = cost_model::StepWork::of(&made.training, &train);
    let options = SimulateOptions::new(work);
    let played = phase("simulate", || simulate(&program, &cluster, &options));
    let played = played.map_err(|e| e.to_string())?;
    println!("step {}", played.step_time);
    if played.step_time.0 != made.simulation.step_time.0 {
        return Err(format!("the planner found {}", made.simulation.step_time));
    }
    Ok(())
}

fn describe(made: &Planned) {
    let program = &made.program;
    let n_ranks: u32 = program.roles.iter().map(|r| r.mesh.n_devices()).sum();
    let instructions = |r: &ir::program::RoleProgram| -> usize {
        let of = |t: &ir::program::Slot| r.template(t.template).instructions.len();
        r.trace.iter().map(of).sum()
    };
    println!(
        "{n_ranks} ranks, {} roles, {} microbatches, {} instructions per step of one rank per role",
        program.roles.len(),
        program.n_microbatches,
        program.roles.iter().map(instructions).sum::<usize>(),
    );
}

/// Runs the phase [`REPEATS`] times and prints how long that took.
fn phase<T>(name: &str, act: impl Fn() -> T) -> T {
    let mut seconds = Vec::new();
    loop {
        let began = Instant::now();
        let result = act();
        seconds.push(began.elapsed().as_secs_f64());
        if seconds.len() == REPEATS {
            seconds.sort_by(f64::total_cmp);
            let (least, median) = (seconds[0], seconds[REPEATS / 2]);
            println!("{name}: least {least:.4} s, median {median:.4} s of {REPEATS}");
            return result;
        }
    }
}
