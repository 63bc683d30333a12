//! Time, memory and result of planning a model, against every pinned plan of the same cluster.
//!
//! `plan_time MODEL PRESET HOSTS GLOBAL_BATCH [--pinned] [PIN ...]`
//!
//! Prints one line for the free plan (or the plan under the pins given). With `--pinned` it
//! also plans every data x tensor x pipeline x ZeRO combination of powers of two on the
//! cluster, and says whether any is predicted faster than the free plan.

use ir::{Precision, TrainSpec};
use planner::{Pins, PlanOptions, Planned};
use std::path::Path;
use std::time::Instant;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, preset, hosts, batch, rest @ ..] = &args[..] else {
        eprintln!("usage: plan_time MODEL PRESET HOSTS GLOBAL_BATCH [--pinned] [PIN ...]");
        std::process::exit(2);
    };
    if let Err(message) = run(model, preset, hosts, batch, rest) {
        eprintln!("{message}");
        std::process::exit(1);
    }
}

fn run(model: &str, preset: &str, hosts: &str, batch: &str, rest: &[String]) -> Result<(), String> {
    let config = import::ModelConfig::load(Path::new(model)).map_err(|e| e.to_string())?;
    let sequence = config.max_sequence().min(2048);
    let options = import::BuildOptions {
        sequence,
        dropout: 0.0,
    };
    let forward = import::model_graph(&config, &options).map_err(|e| e.to_string())?;
    let hosts: u32 = hosts
        .parse()
        .map_err(|_| format!("`{hosts}` is no number of hosts"))?;
    let cluster = cost_model::presets::load(preset, hosts).map_err(|e| e.to_string())?;
    let global_batch = batch
        .parse()
        .map_err(|_| format!("`{batch}` is no global batch"))?;
    let train = TrainSpec {
        global_batch,
        sequence,
        precision: Precision::Bf16,
        ..TrainSpec::default()
    };
    let pinned = rest.iter().any(|a| a == "--pinned");
    let pins: Vec<&String> = rest.iter().filter(|a| *a != "--pinned").collect();
    let plan = |pins: &[String]| -> Result<(Planned, f64), String> {
        let started = Instant::now();
        let pins = Pins::parse(pins).map_err(|e| e.to_string())?;
        let made = planner::plan(
            &forward,
            &train,
            &cluster,
            &PlanOptions {
                pins,
                ..PlanOptions::default()
            },
        )
        .map_err(|e| e.to_string())?;
        Ok((made, started.elapsed().as_secs_f64()))
    };
    let pins: Vec<String> = pins.into_iter().cloned().collect();
    let (free, seconds) = plan(&pins)?;
    print_line("free", &free, seconds);
    let started = Instant::now();
    let violations = checker::check_plan(&free.plan).len()
        + checker::check_program(&free.plan, &free.training, &free.program).len();
    let [made, useful] = free.stats.choices;
    println!("choices of the layers that were modelled: {made}, of use {useful}");
    println!(
        "checked in {:.1} s: {violations} violations; plan {} bytes",
        started.elapsed().as_secs_f64(),
        serde_json::to_vec(&free.plan).map_or(0, |v| v.len())
    );
    if pinned {
        let n = cluster.n_devices();
        let (mut feasible, mut faster) = (0, 0);
        let powers = |limit: u32| (0..).map(|k| 1u32 << k).take_while(move |x| *x <= limit);
        for tensor in powers(cluster.devices_per_host) {
            for pipeline in powers(n / tensor).take_while(|p| *p as usize <= forward.layers.len()) {
                let data = n / tensor / pipeline;
                for zero in 0..=3 {
                    let pins = [
                        format!("data={data}"),
                        format!("tensor={tensor}"),
                        format!("pipeline={pipeline}"),
                        format!("zero={zero}"),
                    ];
                    match plan(&pins) {
                        Ok((made, seconds)) => {
                            feasible += 1;
                            faster += u32::from(
                                made.simulation.step_time.0 < free.simulation.step_time.0,
                            );
                            print_line(&pins.join(" "), &made, seconds);
                        }
                        Err(e) => println!("{}: {e}", pins.join(" ")),
                    }
                }
            }
        }
        println!("{feasible} feasible pinned plans, {faster} predicted faster than the free plan");
    }
    Ok(())
}

fn print_line(name: &str, made: &Planned, seconds: f64) {
    let p = &made.plan;
    let meshes: Vec<String> = p
        .stages
        .iter()
        .take(1)
        .map(|s| {
            s.mesh
                .axes
                .iter()
                .map(|a| format!("{}={}", a.name, a.size))
                .collect::<Vec<_>>()
                .join(",")
        })
        .collect();
    println!(
        "{name}: step {} mfu {:.3} stages {} mesh {} microbatch {} m {} arena {} gap {:.4} | {seconds:.1} s, peak memory {}",
        made.simulation.step_time,
        p.predicted.mfu,
        p.stages.len(),
        meshes.join(" "),
        p.microbatch,
        p.n_microbatches,
        ir::Bytes(
            made.program
                .roles
                .iter()
                .map(|r| r.arena_bytes)
                .max()
                .unwrap_or(0)
        ),
        p.proof.gap,
        benchmarks::peak_memory().map_or("unknown".into(), |b| b.to_string()),
    );
}
