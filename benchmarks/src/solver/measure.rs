//! Measures one solve in a process of its own.

use clap::Args;
use intra_op::{IlpBackend, SolveOptions, SolveStatus, read_problem, solve};
use serde_json::{Value, json};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// The parts that can be switched off: reductions of presolve, then phases.
pub const SWITCHES: [&str; 12] = [
    "propagate",
    "minima",
    "ties",
    "fold",
    "follow",
    "dominance",
    "times",
    "prices",
    "elimination",
    "tighten",
    "search",
    "ilp",
];

/// The effort that a solve may spend.
#[derive(Args, Clone)]
pub struct Limits {
    /// Wall-clock limit in seconds, reading included.
    #[arg(long)]
    time_limit: Option<f64>,
    /// Limit in amounts of work.
    #[arg(long)]
    work_limit: Option<u64>,
    /// Number of threads.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Seed of everything random.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

#[derive(Args)]
pub struct OneArgs {
    instance: PathBuf,
    #[command(flatten)]
    limits: Limits,
    /// Reductions and phases to leave out.
    #[arg(long, value_delimiter = ',')]
    without: Vec<String>,
}

/// A measurement.
pub struct Row {
    /// The instance's file name without its ending.
    pub name: String,
    /// The measurements: see [`one`].
    pub json: Value,
}

impl Row {
    /// Returns a number of the measurement.
    pub fn number(&self, key: &str) -> Option<f64> {
        self.json[key].as_f64()
    }

    /// Returns the points of the trace: seconds, objective, bound.
    pub fn trace(&self) -> Vec<(f64, Option<f64>, Option<f64>)> {
        let points = self.json["trace"].as_array();
        let point = |p: &Value| (p[0].as_f64().unwrap_or(0.0), p[1].as_f64(), p[2].as_f64());
        points.map_or_else(Vec::new, |list| list.iter().map(point).collect())
    }
}

/// Lists the instance, or those of the folder, in order of their names.
pub fn instances(path: &Path) -> Result<Vec<PathBuf>, String> {
    if path.is_file() {
        return Ok(vec![path.to_path_buf()]);
    }
    let bad = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
    let mut found = Vec::new();
    for entry in std::fs::read_dir(path).map_err(|e| bad(&e))? {
        let path = entry.map_err(|e| bad(&e))?.path();
        let name = path.to_string_lossy();
        if name.ends_with(".json") || name.ends_with(".json.gz") {
            found.push(path);
        }
    }
    if found.is_empty() {
        return Err(bad(&"has no instances (.json, .json.gz)"));
    }
    found.sort();
    Ok(found)
}

/// Solves an instance in a new process.
pub fn in_process(path: &Path, limits: &Limits, without: &[&str]) -> Result<Row, String> {
    let program = std::env::current_exe().map_err(|e| format!("this program: {e}"))?;
    let mut command = Command::new(program);
    command.arg("one").arg(path);
    if let Some(s) = limits.time_limit {
        command.arg(format!("--time-limit={s}"));
    }
    if let Some(n) = limits.work_limit {
        command.arg(format!("--work-limit={n}"));
    }
    command.arg(format!("--threads={}", limits.threads));
    command.arg(format!("--seed={}", limits.seed));
    if !without.is_empty() {
        command.arg(format!("--without={}", without.join(",")));
    }
    let output = command
        .output()
        .map_err(|e| format!("{}: {e}", path.display()))?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{}: {}", path.display(), why.trim()));
    }
    let json = serde_json::from_slice(&output.stdout)
        .map_err(|e| format!("{}: unexpected output: {e}", path.display()))?;
    let name = path
        .file_name()
        .map_or_else(String::new, |n| n.to_string_lossy().into_owned());
    let name = name.trim_end_matches(".gz").trim_end_matches(".json");
    Ok(Row {
        name: name.to_string(),
        json,
    })
}

/// Solves an instance in this process and prints the measurement.
pub fn one(args: &OneArgs) -> Result<(), String> {
    let start = Instant::now();
    let name = args.instance.display();
    let file = File::open(&args.instance).map_err(|e| format!("{name}: {e}"))?;
    let problem = read_problem(file).map_err(|e| format!("{name}: {e}"))?;
    let read_s = start.elapsed().as_secs_f64();
    let options = options(args, start)?;
    let result = solve(&problem, &options).map_err(|e| format!("{name}: {e}"))?;
    let status = match result.status {
        SolveStatus::Optimal => "optimal",
        SolveStatus::Feasible { .. } => "feasible",
        SolveStatus::Infeasible(_) => "infeasible",
        SolveStatus::Timeout => "timeout",
    };
    let presolved = result.trace.iter().find(|t| t.phase == "presolve");
    let number = |x: Option<u128>| x.map(|x| u64::try_from(x).unwrap_or(u64::MAX));
    let trace: Vec<Value> = result
        .trace
        .iter()
        .map(|t| json!([t.seconds, number(t.objective), number(t.lower_bound)]))
        .collect();
    let line = json!({
        "instance": problem.name,
        "status": status,
        "objective": number(result.objective),
        "lower_bound": number(Some(result.lower_bound)),
        "gap": result.gap,
        "read_s": read_s,
        "presolved_s": presolved.map(|t| t.seconds),
        "presolved": presolved.map(|t| t.note.clone()),
        "seconds": start.elapsed().as_secs_f64(),
        "cpu_s": cpu_seconds(),
        "peak_bytes": benchmarks::peak_memory().map(|b| b.0),
        "nodes": problem.nodes.len(),
        "edges": problem.edges.len(),
        "without": args.without,
        "threads": args.limits.threads,
        "seed": args.limits.seed,
        "time_limit": args.limits.time_limit,
        "work_limit": args.limits.work_limit,
        "trace": trace,
    });
    println!("{line}");
    Ok(())
}

fn options(args: &OneArgs, start: Instant) -> Result<SolveOptions, String> {
    let limit = args.limits.time_limit.map(Duration::try_from_secs_f64);
    let mut options = SolveOptions {
        time_limit: limit
            .transpose()
            .map_err(|e| format!("--time-limit: {e}"))?,
        work_limit: args.limits.work_limit,
        start: Some(start),
        threads: args.limits.threads.max(1),
        seed: args.limits.seed,
        ..SolveOptions::default()
    };
    for name in &args.without {
        let (presolve, phases) = (&mut options.presolve, &mut options.phases);
        let switch = match name.as_str() {
            "propagate" => &mut presolve.propagate,
            "minima" => &mut presolve.minima,
            "ties" => &mut presolve.ties,
            "fold" => &mut presolve.fold,
            "follow" => &mut presolve.follow,
            "dominance" => &mut presolve.dominance,
            "times" => &mut presolve.times,
            "prices" => &mut phases.prices,
            "elimination" => &mut phases.elimination,
            "tighten" => &mut phases.tighten,
            "search" => &mut phases.search,
            "ilp" => {
                options.backend = IlpBackend::None;
                continue;
            }
            other => return Err(format!("--without: {other}, expected {SWITCHES:?}")),
        };
        *switch = false;
    }
    Ok(options)
}

/// Reads the processor time of this process in user mode, all threads, from the kernel's
/// accounting, which counts in fixed ticks of a hundredth of a second.
fn cpu_seconds() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The command's name, in parentheses, may have blanks; what follows has not.
    let ticks: u64 = stat
        .rsplit(')')
        .next()?
        .split_whitespace()
        .nth(11)?
        .parse()
        .ok()?;
    Some(ticks as f64 / 100.0)
}

/// Writes a file, whole.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), String> {
    std::fs::write(path, bytes).map_err(|e| format!("{}: {e}", path.display()))
}
