//! `calibrate`: this machine's CPU ranks as a cluster file.

use super::spinner;
use crate::args::CalibrateArgs;
use crate::failure::{Exit, Failure};
use crate::{outputs, report};
use cost_model::fit::{Machine, fit};
use cost_model::presets;
use ir::cluster::{Cluster, MeasuredPoint};
use ir::{Bytes, Seconds};
use runtime::calibrate::{CalibrateOptions, measure};
use std::path::Path;

/// The approximate seconds that measuring takes: quick, and thorough.
const SECONDS: (f64, f64) = (5.0, 20.0);

pub fn run(args: &CalibrateArgs) -> Result<(), Failure> {
    outputs::check(&[&args.output], &[])?;
    let machine = machine(args.ranks)?;
    let options = CalibrateOptions {
        n_ranks: args.ranks,
        quick: args.quick,
        seconds: if args.quick { SECONDS.0 } else { SECONDS.1 },
    };
    let bar = spinner("measuring");
    let measured = measure(options, &mut |what| {
        bar.set_message(format!("measuring {what}"))
    });
    bar.finish_and_clear();
    let points = measured?;
    let failed = |e: &dyn std::fmt::Display| {
        Failure::new(
            Exit::RunFailed,
            format!("the measurements do not make a cluster: {e}"),
        )
        .help("measure again while nothing else runs, without --quick")
    };
    let cluster = fit(&points, &machine).map_err(|e| failed(&e))?;
    let text = document(&args.output, cluster.n_devices(), &cluster).map_err(|e| failed(&e))?;
    outputs::write_atomic(&args.output, text.as_bytes())?;
    if args.json {
        return report::print_json(&cluster);
    }
    print_words(args, &cluster)
}

/// Prints the cluster as a file, in the form that the file's ending asks for.
pub fn document(path: &Path, ranks: u32, cluster: &Cluster) -> Result<String, String> {
    if path.extension().is_some_and(|e| e == "json") {
        return serde_json::to_string_pretty(cluster)
            .map(|t| t + "\n")
            .map_err(|e| e.to_string());
    }
    Ok(format!(
        "# This machine's CPU as {ranks} ranks, measured by `meshwright calibrate`.\n{}",
        presets::print(cluster)?
    ))
}

/// Collects the facts of the machine that need no measuring.
fn machine(n_ranks: u32) -> Result<Machine, Failure> {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get()) as u32;
    let memory = super::free_memory().ok_or_else(|| {
        Failure::new(
            Exit::RunFailed,
            "cannot tell how much memory is free: /proc/meminfo has no MemAvailable",
        )
    })?;
    Ok(Machine {
        cores,
        memory_bytes: Bytes(memory),
        n_ranks,
        attention_block_rows: runtime::cpu::attention::BLOCK as u32,
    })
}

fn print_words(args: &CalibrateArgs, cluster: &Cluster) -> Result<(), Failure> {
    if args.verbose {
        print_points(cluster)?;
    }
    print_fitted(args, cluster)
}

/// Prints the points that were measured, those of one size together.
fn print_points(cluster: &Cluster) -> Result<(), Failure> {
    // Points of one size are the forms of a matmul, or probes of the same thing.
    let same = |a: &MeasuredPoint, b: &MeasuredPoint| a.what == b.what && a.size == b.size;
    let rows = cluster.measured.chunk_by(same).map(|points| {
        let mut points: Vec<&MeasuredPoint> = points.iter().collect();
        points.sort_by(|a, b| a.median_s.total_cmp(&b.median_s));
        let p = points[points.len() / 2];
        let size: Vec<String> = p.size.iter().map(u64::to_string).collect();
        let spread = if p.median_s > 0.0 {
            report::percent(p.spread_s / p.median_s)
        } else {
            "-".into()
        };
        vec![
            p.what.clone(),
            size.join(" x "),
            Seconds(p.median_s).to_string(),
            spread,
            points.len().to_string(),
            p.n.to_string(),
            rate(p),
        ]
    });
    report::out(&report::table(
        &["what", "size", "median", "spread", "points", "n", "rate"],
        rows.collect(),
        1,
    ))?;
    report::out(
        "(size of a matmul: m x n x k; of attention: FLOPs in products, other FLOPs, bytes, and queries x keys x features of a head; of a vector kernel: FLOPs x bytes; of a conversion: the same x elements; of a copy, send or write: bytes; of a collective: bytes x ranks of a group x ranks at work\n median: time of one execution; spread: median absolute deviation, as a share of the median; points: how many have this size, such as the forms of a matmul in a forward pass and its gradients, of which the median one is shown; n: executions that were timed\n rate: FLOPs of a matmul, attention, vector kernel or conversion, or bytes of copies, sends and collectives, per second of the median)",
    )?;
    report::out("")
}

/// Prints the figures that were fitted, and the next command.
fn print_fitted(args: &CalibrateArgs, cluster: &Cluster) -> Result<(), Failure> {
    let d = &cluster.device;
    let mut fitted: Vec<Vec<String>> = d
        .peak_flops_per_s
        .iter()
        .map(|(t, peak)| {
            vec![
                format!("matmul {}, of one rank at work", t.name()),
                format!(
                    "{}FLOP/s at best",
                    report::count(*peak * d.matmul_efficiency.get(t).copied().unwrap_or(1.0))
                ),
            ]
        })
        .collect();
    fitted.push(vec![
        "other arithmetic".into(),
        format!("{}FLOP/s", report::count(d.vector_flops_per_s)),
    ]);
    fitted.push(vec![
        "memory".into(),
        format!(
            "{}B/s, of which {} are reached",
            report::count(d.memory_bandwidth_bytes_per_s),
            report::percent(d.memory_efficiency)
        ),
    ]);
    fitted.push(vec![
        "a kernel's fixed time".into(),
        Seconds(d.launch_s).to_string(),
    ]);
    for (t, seconds) in &d.conversion_s_per_element {
        fitted.push(vec![
            format!("{} to f32 or back", t.name()),
            format!("{} per 1000 elements", Seconds(1000.0 * seconds)),
        ]);
    }
    for l in &cluster.levels {
        fitted.push(vec![
            format!("{} between ranks", l.name),
            format!(
                "{}B/s, latency {}",
                report::count(l.bandwidth_bytes_per_s),
                Seconds(l.latency_s)
            ),
        ]);
    }
    if let Some(pool) = &cluster.pool {
        fitted.push(vec![
            format!("{} ranks on processors", pool.devices),
            format!("{:.2}, {}", pool.compute_devices, pool.memory_bytes),
        ]);
    }
    report::out(&report::table(&["fitted", ""], fitted, 1))?;
    report::out(
        "(the figures of the cluster file, fitted to all points; a matmul reaches its rate when it is large; between ranks: of one message; ranks on processors: the processors that the ranks keep busy together, and their memory)",
    )?;
    report::out(&format!(
        "Written to {}. Next: meshwright compile MODEL --cluster {} --ranks {}",
        args.output.display(),
        args.output.display(),
        args.ranks
    ))
}

/// Returns FLOP/s or bytes per second, where the point's sizes say what was done.
fn rate(p: &MeasuredPoint) -> String {
    let per_second = |amount: f64, unit: &str| {
        if p.median_s > 0.0 {
            format!("{}{unit}/s", report::count(amount / p.median_s))
        } else {
            "-".into()
        }
    };
    let size = |i: usize| p.size.get(i).copied().unwrap_or(0) as f64;
    match p.what.split(' ').next().unwrap_or_default() {
        "matmul" => per_second(2.0 * size(0) * size(1) * size(2), "FLOP"),
        "attention" | "attention_grad" | "vector" | "convert" => per_second(size(0), "FLOP"),
        "copy" | "send" | "all_reduce" | "all_gather" | "reduce_scatter" => {
            per_second(size(0), "B")
        }
        _ => "-".into(),
    }
}
