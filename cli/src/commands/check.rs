//! `check`: the proof that a plan and its program are correct, or all that is wrong.

use crate::args::CheckArgs;
use crate::failure::Failure;
use crate::plan_file;
use crate::report;
use checker::Violation;
use serde_json::json;

pub fn run(args: &CheckArgs) -> Result<(), Failure> {
    let name = args.plan.display().to_string();
    let (plan, _) = plan_file::read(&args.plan)?;
    let violations = checker::check_plan(&plan);
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

/// Prints the violations as JSON, where that is asked for.
fn list(args: &CheckArgs, violations: &[Violation]) -> Result<(), Failure> {
    if args.json {
        let list: Vec<_> = violations.iter().map(|v| json!({ "place": v.place, "rule": v.rule, "expected": v.expected, "actual": v.actual })).collect();
        report::print_json(&json!({ "correct": false, "violations": list }))?;
    }
    Ok(())
}
