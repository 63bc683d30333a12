//! `solve`: an intra-op problem in the form of the IOPDDL benchmark.

use super::spinner;
use crate::args::SolveArgs;
use crate::failure::{Exit, Failure};
use crate::files;
use crate::report;
use planner::intra_op::presolve::Infeasibility;
use planner::intra_op::{SolveOptions, SolveStatus, read_problem, solve, write_solution};
use serde_json::json;
use std::fs::File;
use std::path::Path;
use std::time::Duration;

/// Runs the verb.
pub fn run(args: &SolveArgs) -> Result<(), Failure> {
    let time_limit = args.time_limit.map(seconds).transpose()?;
    if let Some(path) = &args.output {
        files::check_writable(path)?;
    }
    let problem = read(&args.instance)?;
    report::out(&format!(
        "{}: {} nodes, {} edges, usage limit {}",
        problem.name,
        problem.nodes.len(),
        problem.edges.len(),
        problem.usage_limit.map_or("none".into(), |l| l.to_string())
    ))?;
    let options = SolveOptions {
        time_limit,
        threads: usize::from(args.threads),
        seed: args.seed,
        ..SolveOptions::default()
    };
    let bar = spinner("solving");
    let solved = solve(&problem, &options);
    bar.finish_and_clear();
    let result = solved
        .map_err(|e| Failure::new(Exit::BadInput, format!("{}: {e}", args.instance.display())))?;
    for t in &result.trace {
        report::out(&format!("{:9.3} s  {}: {}", t.seconds, t.phase, t.note))?;
    }
    let status = match &result.status {
        SolveStatus::Optimal => "optimal",
        SolveStatus::Feasible { .. } => "feasible",
        SolveStatus::Infeasible(_) => "infeasible",
        SolveStatus::Timeout => "timeout",
    };
    if let (Some(path), Some(choice)) = (&args.output, &result.choice) {
        let mut text = Vec::new();
        write_solution(choice, &mut text).map_err(|e| Failure::new(Exit::Internal, e))?;
        files::write_atomic(path, &text)?;
    }
    let line = json!({
        "status": status,
        // Sums are below 2^61, or the solver refuses the problem.
        "objective": result.objective.map(|x| x as u64),
        "lower_bound": result.lower_bound as u64,
        "gap": result.gap,
        "seconds": result.seconds,
        "peak_usage": result.peak_usage.map(|x| x as u64),
        "usage_limit": problem.usage_limit,
    });
    report::out(&line.to_string())?;
    match &result.status {
        SolveStatus::Infeasible(why) => Err(Failure::new(
            Exit::Infeasible,
            format!(
                "{}: no choice fits: {}",
                args.instance.display(),
                reason(why)
            ),
        )
        .help(
            "raise the instance's usage_limit, or allow more strategies (costs of 10^18 forbid)",
        )),
        SolveStatus::Timeout => Err(Failure::new(
            Exit::Infeasible,
            format!(
                "{}: no choice that fits was found in time",
                args.instance.display()
            ),
        )
        .help("give it more time with --time-limit")),
        SolveStatus::Optimal | SolveStatus::Feasible { .. } => Ok(()),
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

fn seconds(s: f64) -> Result<Duration, Failure> {
    match Duration::try_from_secs_f64(s) {
        Ok(d) if s > 0.0 => Ok(d),
        _ => Err(Failure::new(
            Exit::Usage,
            format!("--time-limit is {s}, expected a positive number of seconds"),
        )),
    }
}

fn read(path: &Path) -> Result<planner::intra_op::IntraOpProblem, Failure> {
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
    let file = File::open(path).map_err(|e| bad(&format!("cannot read the instance: {e}")))?;
    read_problem(file).map_err(|e| bad(&e).help(INSTANCES_ARE))
}
