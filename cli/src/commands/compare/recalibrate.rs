//! `compare --recalibrate`: the plan's cluster refined by its runs, and whether another plan is
//! better on it.

use crate::commands::calibrate::document;
use crate::commands::spinner;
use crate::failure::{Exit, Failure};
use crate::plan_file::{self, Loaded};
use crate::{outputs, report};
use cost_model::fit::{AtEnd, Change, Kept, points_of_run, refine};
use cost_model::{SimulateOptions, StepWork, simulate};
use ir::Seconds;
use ir::measurement::Measurement;
use planner::{Pins, PlanOptions, Planned};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// The share by which another plan must be predicted to be faster to count as better.
const BETTER: f64 = 0.01;

/// The results of a recalibration.
#[derive(Debug, Serialize)]
pub struct Refined {
    /// The file to which the new cluster was written.
    cluster: PathBuf,
    /// The number of points that the runs gave.
    points: usize,
    /// The figures that changed.
    changes: Vec<Change>,
    /// The figures that stayed, and why.
    kept: Vec<Kept>,
    /// The fitted figures that lie at an end of their range.
    at_end: Vec<AtEnd>,
    /// The predicted step time of this plan on the old cluster, in seconds.
    before_s: f64,
    /// The predicted step time of this plan on the new cluster, in seconds.
    this_plan_s: f64,
    /// The predicted step time of the best plan on the new cluster under the same pins, in seconds.
    best_plan_s: f64,
    /// The shape of the best plan.
    best_plan: String,
    /// True when the best plan is another one.
    best_plan_changes: bool,
}

/// Refines the cluster of `loaded` by `runs` and writes it to `path`.
pub fn recalibrate(path: &Path, loaded: &Loaded, runs: &[Measurement]) -> Result<Refined, Failure> {
    let plan = &loaded.plan;
    let points: Vec<_> = runs
        .iter()
        .flat_map(|m| points_of_run(&loaded.program, m))
        .collect();
    if points.is_empty() {
        let what = "the runs say nothing about single instructions";
        return Err(Failure::new(Exit::BadInput, what)
            .help("run the plan again with --profile 2 and this build of meshwright"));
    }
    let refined = refine(&plan.cluster, &points).map_err(|e| {
        Failure::new(Exit::BadInput, format!("the plan's cluster: {e}"))
            .help("make the cluster with `meshwright calibrate`, and the plan and its runs with it")
    })?;
    let new = refined.cluster;
    let options = SimulateOptions::new(StepWork::of(&loaded.training, &plan.train));
    let played = simulate(&loaded.program, &new, &options)?;
    let forward = plan_file::forward(plan)?;
    let mut pins = Pins::parse(&plan.pins).map_err(|e| Failure::new(Exit::CheckFailed, e))?;
    // The plan's graph is in that order already.
    pins.zigzag = false;
    let options = PlanOptions {
        pins,
        // A plan that was taken for its simplicity is not beaten by less than that may cost.
        tolerance: plan.proof.simpler.as_ref().map_or(0.0, |s| s.tolerance),
        ..PlanOptions::default()
    };
    let bar = spinner("searching for the best plan on the new cluster");
    let best = planner::plan(&forward, &plan.train, &new, &options);
    bar.finish_and_clear();
    let best = best?;
    let text = document(path, plan.cluster.n_devices(), &new).map_err(|e| {
        Failure::new(
            Exit::Internal,
            format!("the cluster cannot be written: {e}"),
        )
    })?;
    outputs::write_atomic(path, text.as_bytes())?;
    let (this_plan_s, best_plan_s) = (played.step_time.0, best.plan.predicted.step_time_s.0);
    Ok(Refined {
        cluster: path.to_path_buf(),
        points: points.len(),
        changes: refined.changes,
        kept: refined.kept,
        at_end: refined.at_end,
        before_s: plan.predicted.step_time_s.0,
        this_plan_s,
        best_plan_s,
        best_plan: shape(&best),
        best_plan_changes: best_plan_s < (1.0 - BETTER) * this_plan_s,
    })
}

/// Describes a plan in a few words.
fn shape(planned: &Planned) -> String {
    let plan = &planned.plan;
    let meshes: Vec<String> = plan
        .stages
        .iter()
        .map(|s| {
            let axes = s.mesh.axes.iter().filter(|a| a.size > 1);
            let words: Vec<String> = axes.map(|a| format!("{}={}", a.name, a.size)).collect();
            match words.is_empty() {
                true => "one rank".into(),
                false => words.join(" "),
            }
        })
        .collect();
    format!(
        "{} of {}, {} of {}",
        ir::counted(meshes.len() as u64, "stage"),
        meshes.join(" | "),
        ir::counted(plan.n_microbatches, "microbatch"),
        plan.microbatch
    )
}

impl Refined {
    /// Prints the results in words.
    pub fn print(&self) -> Result<(), Failure> {
        report::out(&format!(
            "\nRecalibrated by {} points of the runs; written to {}",
            self.points,
            self.cluster.display()
        ))?;
        let figure = |x: Option<f64>, unit: &str| match (x, unit) {
            (None, _) => "-".into(),
            (Some(x), "s") => Seconds(x).to_string(),
            (Some(x), "") => format!("{x:.3}"),
            (Some(x), unit) => format!("{}{unit}", report::count(x)),
        };
        let rows = self.changes.iter().map(|c| {
            let ratio = c.old.zip(c.new).filter(|(old, _)| *old != 0.0);
            vec![
                c.key.clone(),
                figure(c.old, c.unit),
                figure(c.new, c.unit),
                ratio.map_or("-".into(), |(old, new)| format!("{:.2}", new / old)),
            ]
        });
        report::out(&report::table(
            &["figure", "old", "new", "new/old"],
            rows.collect(),
            1,
        ))?;
        for end in &self.at_end {
            report::out(&format!(
                "At an end of its range: {} is {}",
                end.key, end.what
            ))?;
        }
        let (refused, unmeasured): (Vec<_>, Vec<_>) = self.kept.iter().partition(|k| k.refused);
        for kept in refused {
            report::out(&format!(
                "Refused, so unchanged: {}: {}",
                kept.key, kept.why
            ))?;
        }
        if !unmeasured.is_empty() {
            let keys: Vec<&str> = unmeasured.iter().map(|k| k.key.as_str()).collect();
            report::out(&format!(
                "Not measured by the runs' instructions, so unchanged: {}",
                keys.join(", ")
            ))?;
        }
        report::out(&format!(
            "This plan: {} predicted before, {} on the new cluster. Found there under the same pins: {}, {}. {}",
            Seconds(self.before_s),
            Seconds(self.this_plan_s),
            Seconds(self.best_plan_s),
            self.best_plan,
            match self.best_plan_changes {
                true => "The best plan changes: compile again with the new cluster.",
                false if self.best_plan_s > self.this_plan_s => "This plan remains the best.",
                false => "The best plan does not change.",
            }
        ))
    }
}
