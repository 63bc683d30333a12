//! `solve`: an intra-op problem in the form of the IOPDDL benchmark.

use super::spinner;
use crate::args::SolveArgs;
use crate::failure::{Exit, Failure};
use crate::report;
use crate::{files, interrupt, outputs};
use intra_op::presolve::Infeasibility;
use intra_op::{SolveOptions, SolveResult, SolveStatus, read_problem, solve, write_solution};
use ir::Figure;
use runtime::files::{Input, open_input};
use serde_json::{Value, json};
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub fn run(args: &SolveArgs) -> Result<(), Failure> {
    // The time limit counts from here and so covers reading, and an interrupt works from here on.
    let start = Instant::now();
    let cancel = interrupt::flag("ending with what is known")?;
    let options = options(args, start, &cancel)?;
    if let Some(path) = &args.output {
        outputs::check(&[path], &[&args.instance])?;
    }
    let problem = read(&args.instance, &cancel)?;
    report::out(&format!(
        "{}: {} nodes, {} edges, usage limit {}",
        problem.name,
        problem.nodes.len(),
        problem.edges.len(),
        problem.usage_limit.map_or("none".into(), |l| l.to_string())
    ))?;
    report::out(&format!("{:9.3} s  read", start.elapsed().as_secs_f64()))?;
    let bar = spinner("solving");
    let solved = solve(&problem, &options);
    bar.finish_and_clear();
    let result = solved
        .map_err(|e| Failure::new(Exit::BadInput, format!("{}: {e}", args.instance.display())))?;
    if let (Some(path), Some(choice)) = (&args.output, &result.choice) {
        let mut text = Vec::new();
        write_solution(choice, &mut text).map_err(|e| Failure::new(Exit::Internal, e))?;
        outputs::write_atomic(path, &text)?;
    }
    for t in result.trace.iter().filter(|t| !t.note.is_empty()) {
        report::out(&format!("{:9.3} s  {}: {}", t.seconds, t.phase, t.note))?;
    }
    let line = line(&result, problem.usage_limit, options.backend.name());
    report::document(&line.to_string())?;
    verdict(args, &result, cancel.load(Ordering::Relaxed))
}

fn options(
    args: &SolveArgs,
    start: Instant,
    cancel: &Arc<AtomicBool>,
) -> Result<SolveOptions, Failure> {
    if !(0.0..1.0).contains(&args.gap) {
        let what = format!(
            "--gap is {}, expected at least 0 and below 1",
            Figure(args.gap)
        );
        return Err(Failure::new(Exit::Usage, what));
    }
    Ok(SolveOptions {
        time_limit: args.time_limit.map(seconds).transpose()?,
        work_limit: args.work_limit,
        start: Some(start),
        cancel: Some(Arc::clone(cancel)),
        threads: usize::from(args.threads),
        seed: args.seed,
        gap: args.gap,
        ..SolveOptions::default()
    })
}

/// Prints the result as one JSON object.
fn line(result: &SolveResult, usage_limit: Option<u64>, solver: &str) -> Value {
    let status = match &result.status {
        SolveStatus::Optimal => "optimal",
        SolveStatus::Feasible { .. } => "feasible",
        SolveStatus::Infeasible(_) => "infeasible",
        SolveStatus::Timeout => "timeout",
    };
    let infeasible = match &result.status {
        SolveStatus::Infeasible(Infeasibility::Memory { time, by_bytes }) => {
            json!({ "time": time, "by_bytes": by_bytes })
        }
        SolveStatus::Infeasible(Infeasibility::NoStrategy { node }) => json!({ "node": node }),
        _ => Value::Null,
    };
    // Sums of costs are below 2^61, or the solver refuses the problem; so is the peak.
    let number = |x: u128| u64::try_from(x).unwrap_or(u64::MAX);
    let mut trace: Vec<Value> = Vec::new();
    let mut last = (None, None);
    for t in &result.trace {
        let now = (t.objective, t.lower_bound);
        if now != last {
            trace.push(json!([t.seconds, now.0.map(number), now.1.map(number)]));
            last = now;
        }
    }
    json!({
        "status": status,
        "objective": result.objective.map(number),
        "lower_bound": number(result.lower_bound),
        "gap": result.gap,
        "seconds": result.seconds,
        "peak_usage": result.peak_usage.map(number),
        "usage_limit": usage_limit,
        "infeasible": infeasible,
        "integer_programs": solver,
        "trace": trace,
    })
}

fn verdict(args: &SolveArgs, result: &SolveResult, interrupted: bool) -> Result<(), Failure> {
    let instance = args.instance.display();
    match &result.status {
        SolveStatus::Optimal | SolveStatus::Feasible { .. } => Ok(()),
        SolveStatus::Infeasible(why) => Err(Failure::new(
            Exit::Infeasible,
            format!("{instance}: no choice fits: {}", reason(why)),
        )
        .help(
            "raise the instance's usage_limit, or allow more strategies (costs of 10^18 forbid)",
        )),
        SolveStatus::Timeout if interrupted => Err(Failure::new(
            Exit::Interrupted,
            format!("{instance}: interrupted before a choice that fits was found"),
        )),
        SolveStatus::Timeout => Err(Failure::new(
            Exit::Infeasible,
            format!("{instance}: no choice that fits was found before the limit"),
        )
        .help("give it more time with --time-limit, or more work with --work-limit")),
    }
}

fn reason(why: &Infeasibility) -> String {
    match why {
        Infeasibility::Memory { time, by_bytes } => {
            format!("at time {time} at least {by_bytes} more than the usage limit must be in use")
        }
        Infeasibility::NoStrategy { node } => format!(
            "every strategy of node {node} is ruled out by forbidden costs and the usage limit"
        ),
        Infeasibility::Searched => "all choices were searched".into(),
    }
}

/// The longest time limit, in seconds.
const LONGEST_S: f64 = 1e12;

fn seconds(s: f64) -> Result<Duration, Failure> {
    match Duration::try_from_secs_f64(s) {
        // Clocks do not count further than some 10^11 years, and a sum with now is one too.
        Ok(d) if s > 0.0 && s <= LONGEST_S => Ok(d),
        _ => Err(Failure::new(
            Exit::Usage,
            format!(
                "--time-limit is {s}, expected a positive number of seconds, up to {LONGEST_S:e}",
                s = Figure(s)
            ),
        )),
    }
}

/// A file that cannot be read further once the user asked to stop.
struct Interruptible<'a> {
    file: Input,
    cancel: &'a AtomicBool,
}

impl Read for Interruptible<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.cancel.load(Ordering::Relaxed) {
            return Err(io::Error::other("interrupted"));
        }
        self.file.read(into)
    }
}

fn read(path: &Path, cancel: &AtomicBool) -> Result<intra_op::IntraOpProblem, Failure> {
    let name = path.display();
    let bad = |e: &dyn std::fmt::Display| Failure::new(Exit::BadInput, format!("{name}: {e}"));
    const INSTANCES_ARE: &str =
        "expected the JSON of the IOPDDL benchmark (google/iopddl), plain or gzip";
    let meta = std::fs::metadata(path).map_err(|e| {
        bad(&format!("cannot read the instance: {e}")).help(match path.exists() {
            true => "check the file's permissions".into(),
            false => files::missing_help(path),
        })
    })?;
    if meta.is_dir() {
        return Err(bad(&"is a folder, expected an instance file").help(INSTANCES_ARE));
    }
    if meta.is_file() && meta.len() == 0 {
        return Err(bad(&"is empty, expected an instance").help(INSTANCES_ARE));
    }
    let file = open_input(path).map_err(|e| bad(&format!("cannot read the instance: {e}")))?;
    let problem = read_problem(Interruptible { file, cancel });
    if cancel.load(Ordering::Relaxed) {
        let what = format!("{name}: interrupted while the instance was read");
        return Err(Failure::new(Exit::Interrupted, what));
    }
    problem.map_err(|e| bad(&e).help(INSTANCES_ARE))
}
