//! `check`: the proof that a plan and its program are correct, or all that is wrong.

use crate::args::CheckArgs;
use crate::failure::Failure;
use crate::{plan_file, report, software};
use checker::Violation;
use cost_model::StepWork;
use cost_model::simulate::SimulateOptions;
use ir::Figure;
use ir::plan::{Plan, Prediction};
use ir::program::Program;
use ir::training::TrainingGraph;
use serde_json::json;

pub fn run(args: &CheckArgs) -> Result<(), Failure> {
    let name = args.plan.display().to_string();
    let (plan, _) = plan_file::read(&args.plan)?;
    let violations = plan_file::violations(&plan);
    if !violations.is_empty() {
        list(args, &violations)?;
        return Err(plan_file::refused(&name, &plan, &violations));
    }
    let (training, program) = plan_file::lower(&plan)?;
    let violations = checker::check_program(&plan, &training, &program);
    if !violations.is_empty() {
        list(args, &violations)?;
        let what = format!("{name}: the program of the plan");
        return Err(plan_file::rejected(&what, &violations));
    }
    let violations = played_otherwise(&plan, &training, &program)?;
    if !violations.is_empty() {
        list(args, &violations)?;
        return Err(plan_file::rejected(
            &format!("{name}: the plan"),
            &violations,
        ));
    }
    let instructions: usize = program
        .roles
        .iter()
        .flat_map(|r| &r.templates)
        .map(|t| t.instructions.len())
        .sum();
    let buffers: usize = program.roles.iter().map(|r| r.buffers.len()).sum();
    let (stages, meshes) = (plan.stages.len(), program.roles.len());
    let ranks: u32 = program.roles.iter().map(|r| r.mesh.n_devices()).sum();
    if args.json {
        return report::print_json(&json!({
            "correct": true, "violations": [], "stages": stages, "meshes": meshes, "ranks": ranks,
            "instructions": instructions, "buffers": buffers, "transfers": program.transfers.len(),
        }));
    }
    report::out(&format!(
        "{name}: correct. {} on {}{}, {instructions} instructions, {buffers} buffers, {}:\nevery op sees the shards it needs, every send meets its receive, no rank deadlocks, memory fits.{}",
        ir::counted(stages as u64, "stage"),
        match meshes == stages {
            true => String::new(),
            false => format!("{meshes} meshes of "),
        },
        ir::counted(ranks, "rank"),
        ir::counted(program.transfers.len() as u64, "transfer"),
        match &plan.made_for {
            Some(software) => format!(
                "\nThat is the memory of Meshwright's own program; inspect says what {} holds.",
                software.name
            ),
            None => String::new(),
        }
    ))
}

/// Figures that differ by a smaller share are the same: a plan may have been rewritten with five digits.
const ROUNDING: f64 = 1e-4;

/// Lists predicted figures that are not those of the plan's program, played on the plan's cluster: one of
/// them was edited, or the cluster was.
fn played_otherwise(
    plan: &Plan,
    training: &TrainingGraph,
    program: &Program,
) -> Result<Vec<Violation>, Failure> {
    let work = StepWork::of(training, &plan.train);
    let options = SimulateOptions::new(work);
    let (played, _) = software::played(plan, program, &plan.cluster, &options)?;
    let figures = |p: &Prediction| {
        let mut all = vec![
            ("step_time_s".to_string(), Some(p.step_time_s.0)),
            ("tokens_per_s".into(), Some(p.tokens_per_s)),
            ("mfu".into(), Some(p.mfu)),
            ("hfu".into(), Some(p.hfu)),
            ("bubble".into(), Some(p.bubble)),
        ];
        for (i, s) in p.stages.iter().enumerate() {
            let of_stage = [
                ("forward_s", s.forward_s.0),
                ("backward_s", s.backward_s.0),
                ("step_s", s.step_s.0),
                ("compute_s", s.compute_s.0),
                ("collective_s", s.collective_s.0),
                ("transfer_s", s.transfer_s.0),
                ("persistent_bytes", s.persistent_bytes.0 as f64),
                ("step_bytes", s.step_bytes.0 as f64),
                ("activation_bytes", s.activation_bytes.0 as f64),
                ("transient_bytes", s.transient_bytes.0 as f64),
                ("peak_bytes", s.peak_bytes.0 as f64),
            ];
            let named = of_stage.map(|(key, x)| (format!("stages[{i}].{key}"), Some(x)));
            all.extend(named);
        }
        let checkpoint = p.checkpoint.as_ref();
        let seconds = |s: Option<ir::Seconds>| s.map(|s| s.0);
        all.extend([
            (
                "checkpoint.bytes".into(),
                checkpoint.map(|c| c.bytes.0 as f64),
            ),
            (
                "checkpoint.copy_s".into(),
                seconds(checkpoint.and_then(|c| c.copy_s)),
            ),
            (
                "checkpoint.write_s".into(),
                seconds(checkpoint.and_then(|c| c.write_s)),
            ),
        ]);
        all
    };
    let (stated, played) = (figures(&plan.predicted), figures(&played.prediction));
    let differ = |x: Option<f64>, y: Option<f64>| match (x, y) {
        (Some(x), Some(y)) => (x - y).abs() > ROUNDING * x.abs().max(y.abs()).max(1e-9),
        (x, y) => x.is_some() != y.is_some(),
    };
    let shown = |x: Option<f64>| x.map_or("none".to_string(), |x| Figure(x).to_string());
    let both = stated.into_iter().zip(played);
    let differing = both.filter(|((_, x), (_, y))| differ(*x, *y));
    let violations = differing.map(|((key, x), (_, y))| Violation {
        place: format!("predicted.{key}"),
        rule: "simulation",
        expected: format!("{}, as the program takes on the plan's cluster", shown(y)),
        actual: shown(x),
    });
    Ok(violations.collect())
}

/// Prints the violations as JSON, where that is asked for.
fn list(args: &CheckArgs, violations: &[Violation]) -> Result<(), Failure> {
    if args.json {
        let list: Vec<_> = violations.iter().map(|v| json!({ "place": v.place, "rule": v.rule, "expected": v.expected, "actual": v.actual })).collect();
        report::print_json(&json!({ "correct": false, "violations": list }))?;
    }
    Ok(())
}
