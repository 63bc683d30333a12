//! Time of a search over layers, over devices and over distinct ops, as a table and a picture.
//!
//! `cargo run --release -p benchmarks --bin plan_scaling -- [--out DIR] [--seconds N]
//! [--series NAME]..`
//!
//! Each series changes one size and keeps all others. A series ends before the point that would,
//! by the growth from the last point but one to the last, take longer than `--seconds`; the table
//! says so. Peak memory is not in it, as points share a process: [`plan_time`](../plan_time.rs) and
//! `compile` say that of one.

mod draw;
mod series;

use clap::Parser;
use planner::{PlanOptions, Planned};
use series::{Point, SERIES, Series};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// A plan is millions of small vectors and maps: with the system's allocator a third of the time of
/// planning goes into it, with this one a tenth.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Measures how the time of a search grows with layers, devices and distinct ops.
#[derive(Parser)]
struct Args {
    /// Write the picture and the table to this folder.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// End a series before a point that is likely to take longer.
    #[arg(long, default_value_t = 120)]
    seconds: u64,
    /// Take this series alone; may be repeated.
    #[arg(long, value_name = "NAME")]
    series: Vec<String>,
    /// The folder of the models.
    #[arg(long, value_name = "DIR", default_value = "models")]
    models: PathBuf,
}

/// The measurements of a point.
struct Measured {
    /// The value of the size that the series changes.
    size: u64,
    /// Where it is drawn.
    x: usize,
    layers: usize,
    ops: usize,
    /// Ops of which no other has the kind, attributes and types.
    distinct: usize,
    devices: u32,
    /// Seconds of the search.
    wall_s: f64,
    /// Seconds of processors, all threads together.
    processor_s: f64,
    step_s: f64,
    gap: f64,
}

fn main() {
    if let Err(message) = run(&Args::parse()) {
        eprintln!("{message}");
        std::process::exit(1);
    }
}

fn run(args: &Args) -> Result<(), String> {
    for name in &args.series {
        if !SERIES.iter().any(|s| s.name == name) {
            let names: Vec<&str> = SERIES.iter().map(|s| s.name).collect();
            return Err(format!(
                "--series {name}: there is no such series; there are {}",
                names.join(", ")
            ));
        }
    }
    let is_asked = |s: &&Series| args.series.is_empty() || args.series.iter().any(|n| n == s.name);
    let mut table = String::from(HEADER);
    print!("{HEADER}");
    let mut done = Vec::new();
    for series in SERIES.iter().filter(is_asked) {
        let mut points: Vec<Measured> = Vec::new();
        for &size in series.sizes {
            let next = match &points[..] {
                [.., before, last] => last.wall_s * (last.wall_s / before.wall_s).max(1.0),
                _ => 0.0,
            };
            if next > args.seconds as f64 {
                let line = format!(
                    "| {} | {size} | not tried, likely {next:.0} s |\n",
                    series.name
                );
                print!("{line}");
                table += &line;
                break;
            }
            let point = series.point(size, &args.models)?;
            let measured = measure(series, size, &point)
                .map_err(|e| format!("{} {size}: {e}", series.name))?;
            let line = row(series, &measured);
            print!("{line}");
            table += &line;
            points.push(measured);
        }
        done.push((series, points));
    }
    if let Some(out) = &args.out {
        let failed = |path: &Path, e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
        std::fs::create_dir_all(out).map_err(|e| failed(out, &e))?;
        let path = out.join("plan_scaling.txt");
        std::fs::write(&path, table).map_err(|e| failed(&path, &e))?;
        let path = out.join("plan_scaling.svg");
        let picture = draw::svg(&done)?;
        std::fs::write(&path, picture).map_err(|e| failed(&path, &e))?;
    }
    Ok(())
}

const HEADER: &str = "| series | size | layers | ops | distinct | devices | search, s | processor, s | step, s | gap |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n";

fn row(series: &Series, m: &Measured) -> String {
    format!(
        "| {} | {} | {} | {} | {} | {} | {:.2} | {:.2} | {:.4} | {:.1}% |\n",
        series.name,
        m.size,
        m.layers,
        m.ops,
        m.distinct,
        m.devices,
        m.wall_s,
        m.processor_s,
        m.step_s,
        100.0 * m.gap
    )
}

fn measure(series: &Series, size: u64, point: &Point) -> Result<Measured, String> {
    let Point {
        forward,
        train,
        cluster,
    } = point;
    let (started, processor) = (Instant::now(), processor_s());
    let Planned {
        plan, simulation, ..
    } = planner::plan(forward, train, cluster, &PlanOptions::default())
        .map_err(|e| e.to_string())?;
    let (wall_s, processor_s) = (started.elapsed().as_secs_f64(), processor_s() - processor);
    let kinds = forward.ops().iter().map(|op| {
        let types = (forward.operand_types(op), forward.result_types(op));
        format!("{:?} {types:?}", op.kind)
    });
    let distinct = kinds.collect::<HashSet<String>>().len();
    Ok(Measured {
        size,
        x: match series.counts_ops() {
            true => distinct,
            false => size as usize,
        },
        layers: forward.layers.len(),
        ops: forward.ops().len(),
        distinct,
        devices: cluster.n_devices(),
        wall_s,
        processor_s,
        step_s: simulation.step_time.0,
        gap: plan.proof.gap,
    })
}

/// Seconds of processors that this process has taken, from the kernel's accounting; not a number
/// where there is none.
fn processor_s() -> f64 {
    // User and system time are the 14th and the 15th field, in hundredths of a second; the second
    // field is in brackets and may have blanks.
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = text.rsplit_once(") ").map_or("", |(_, rest)| rest);
    let mut fields = fields.split(' ').skip(11);
    let mut next = || fields.next()?.parse::<f64>().ok();
    next()
        .zip(next())
        .map_or(f64::NAN, |(user, system)| (user + system) / 100.0)
}
