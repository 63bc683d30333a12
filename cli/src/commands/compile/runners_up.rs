//! `compile --runners-up`: the best plans that were simulated beside the one that was taken.

use super::super::again;
use crate::document;
use crate::failure::{Exit, Failure};
use crate::report::degrees::Degrees;
use crate::{outputs, plan_file};
use ir::counted;
use ir::plan::{Plan, RunnerUp};
use planner::Planned;
use std::path::{Path, PathBuf};

/// The most runners-up that are written.
const MOST: usize = 5;

/// Makes the folder, and names the files that may be written there.
pub fn paths(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    outputs::check_folder(folder)?;
    let name = |n: usize| folder.join(format!("{n}.json"));
    Ok((1..=MOST).map(name).collect())
}

/// Writes the fastest plan of each set of degrees other than that of the plan, proved as the plan
/// is, as `1.json`, `2.json` and so on from the fastest one.
pub fn write(paths: &[PathBuf], planned: &Planned) -> Result<Vec<RunnerUp>, Failure> {
    let mut others: Vec<&Plan> = planned.stats.simulated_plans.iter().collect();
    others.sort_by(|a, b| {
        let seconds = |p: &Plan| p.predicted.step_time_s.0;
        seconds(a).total_cmp(&seconds(b))
    });
    let mut known = vec![Degrees::of(&planned.plan, &planned.training)];
    let mut written = Vec::new();
    for plan in others {
        let Some(path) = paths.get(written.len()) else {
            break;
        };
        let training = plan.training_graph(&plan_file::forward(plan)?);
        let training = training.map_err(|e| Failure::new(Exit::Internal, e))?;
        let degrees = Degrees::of(plan, &training);
        if known.contains(&degrees) {
            continue;
        }
        let loaded = again::replayed(plan.clone())?.map_err(|violations| {
            let what = format!("a runner-up ({degrees})");
            plan_file::rejected(&what, &violations)
        })?;
        outputs::write_atomic(path, document::to_json(&loaded.plan)?.as_bytes())?;
        written.push(RunnerUp {
            file: path.display().to_string(),
            what: degrees.to_string(),
            step_time_s: plan.predicted.step_time_s,
        });
        known.push(degrees);
    }
    Ok(written)
}

/// Says what was written.
pub fn words(folder: &Path, plan: &Plan) -> String {
    match plan.proof.runners_up.len() {
        0 => format!(
            "No runner-up was written to {}: no plan of other degrees was simulated.",
            folder.display()
        ),
        n => format!(
            "Wrote the next best {} to {}; meshwright explain lists them.",
            counted(n as u64, "plan"),
            folder.display()
        ),
    }
}
