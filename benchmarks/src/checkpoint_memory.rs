//! Memory that saving and loading a checkpoint takes beside the states themselves.
//!
//! `checkpoint_memory MODEL FOLDER [PINS_OF_SAVER] [PINS_OF_LOADER]`
//!
//! Starts two CPU ranks with the initial states of a model, saves them to a folder that must not
//! exist, and loads them on two ranks under another plan. Of both it prints what the process held
//! before, the most that it held meanwhile, and after. The optimizer is SGD, whose states are
//! parameters and momentum. Linux only: the figures are `VmRSS` and `VmHWM` of `/proc/self/status`.

use cost_model::presets;
use ir::{Bytes, Optimizer, TrainSpec};
use planner::{Pins, PlanOptions, Planned};
use runtime::checkpoint;
use runtime::execute::{Session, SessionOptions};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let result = match &args[..] {
        [model, folder] => run(model, folder, "tensor=2", "pipeline=2"),
        [model, folder, saver, loader] => run(model, folder, saver, loader),
        _ => {
            eprintln!("usage: checkpoint_memory MODEL FOLDER [PINS_OF_SAVER PINS_OF_LOADER]");
            std::process::exit(2);
        }
    };
    if let Err(message) = result {
        eprintln!("{message}");
        std::process::exit(1);
    }
}

fn run(model: &str, folder: &str, saver: &str, loader: &str) -> Result<(), String> {
    let words = |e: &dyn std::error::Error| e.to_string();
    let folder = Path::new(folder);
    if folder.exists() {
        return Err(format!("{} exists", folder.display()));
    }
    std::fs::create_dir(folder).map_err(|e| words(&e))?;
    let planned = planned(model, saver)?;
    let (spec, training) = (&planned.plan.train, &planned.training);
    let initial = runtime::init::from_graph(training, spec.seed);
    let options = SessionOptions::default;
    let mut session =
        Session::new(&planned.program, spec, options(), initial).map_err(|e| words(&e))?;
    println!("{model}, {saver} to {loader}, two ranks of one process\n");
    println!("| | before | most | after | beside the states | seconds |");
    println!("|---|---:|---:|---:|---:|---:|");
    let saved = measured("save", || checkpoint::save(folder, &mut session, "", ""));
    let path = saved?.map_err(|e| words(&e))?;
    drop(session);
    let written: u64 = std::fs::read_dir(&path)
        .map_err(|e| words(&e))?
        .filter_map(|entry| Some(entry.ok()?.metadata().ok()?.len()))
        .sum();

    let planned = self::planned(model, loader)?;
    let found = measured("verify", || checkpoint::find(folder))?.map_err(|e| words(&e))?;
    let found = Arc::new(found.checkpoint);
    let (program, spec) = (&planned.program, &planned.plan.train);
    let session = measured("load", || Session::resume(program, spec, options(), &found));
    session?.map_err(|e| words(&e))?;
    println!("\nThe checkpoint has {}.", Bytes(written));
    Ok(())
}

fn planned(model: &str, pins: &str) -> Result<Planned, String> {
    let config = import::ModelConfig::load(Path::new(model)).map_err(|e| e.to_string())?;
    let options = import::BuildOptions {
        sequence: 8,
        dropout: 0.0,
    };
    let forward = import::model_graph(&config, &options).map_err(|e| e.to_string())?;
    let mut cluster = presets::load("cpu-default", 1).map_err(|e| e.to_string())?;
    cluster.devices_per_host = 2;
    cluster.levels.iter_mut().for_each(|l| l.devices = 2);
    if let Some(pool) = &mut cluster.pool {
        (pool.devices, pool.memory_bytes) = (2, Bytes(1 << 40));
    }
    // What fits this machine is what is looked at here.
    cluster.device.memory_bytes = Bytes(1 << 40);
    let train = TrainSpec {
        global_batch: 2,
        sequence: 8,
        optimizer: Optimizer::Sgd {
            momentum: 0.9,
            weight_decay: 0.0,
        },
        ..TrainSpec::default()
    };
    let options = PlanOptions {
        pins: Pins::parse(&[pins]).map_err(|e| e.to_string())?,
        ..PlanOptions::default()
    };
    planner::plan(&forward, &train, &cluster, &options).map_err(|e| e.to_string())
}

/// Does something and prints a row of what the process held.
fn measured<T>(name: &str, act: impl FnOnce() -> T) -> Result<T, String> {
    // 5 sets the most of memory so far to what is held now (proc(5), clear_refs).
    std::fs::write("/proc/self/clear_refs", "5").map_err(|e| format!("clear_refs: {e}"))?;
    let (before, began) = (held("VmRSS")?, Instant::now());
    let done = act();
    let seconds = began.elapsed().as_secs_f64();
    let (most, after) = (held("VmHWM")?, held("VmRSS")?);
    let beside = Bytes(most.0.saturating_sub(before.0.max(after.0)));
    println!("| {name} | {before} | {most} | {after} | {beside} | {seconds:.1} |");
    Ok(done)
}

/// A figure of the process, in bytes.
fn held(key: &str) -> Result<Bytes, String> {
    let status = std::fs::read_to_string("/proc/self/status").map_err(|e| e.to_string())?;
    let line = status.lines().find_map(|l| l.strip_prefix(key));
    let kib = line.and_then(|l| l.trim_start_matches(':').split_whitespace().next());
    let kib: Option<u64> = kib.and_then(|k| k.parse().ok());
    kib.map(|k| Bytes(1024 * k))
        .ok_or_else(|| format!("/proc/self/status has no {key}"))
}
