//! `simulate`: one training step played on the cluster's description.

use crate::args::SimulateArgs;
use crate::failure::Failure;
use crate::outputs;
use crate::plan_file;
use crate::report;
use crate::software::{self, whose_plan};
use cost_model::simulate::{SimulateOptions, TimelineDetail};
use cost_model::{StepWork, trace};
use serde_json::json;

/// The most events of a trace file; Perfetto opens as many in seconds.
const MAX_EVENTS: usize = 500_000;

pub fn run(args: &SimulateArgs) -> Result<(), Failure> {
    if let Some(path) = &args.trace {
        outputs::check(&[path], &[&args.plan])?;
    }
    let loaded = plan_file::load(&args.plan)?;
    let plan = &loaded.plan;
    let work = StepWork::of(&loaded.training, &plan.train);
    let mut options = SimulateOptions {
        max_events: MAX_EVENTS,
        ..SimulateOptions::new(work)
    };
    if args.trace.is_some() {
        options.timeline = TimelineDetail::Instructions;
    }
    let (played, _) = software::played(plan, &loaded.program, &plan.cluster, &options)?;
    let events = played.timeline.as_deref().unwrap_or_default();
    if let Some(path) = &args.trace {
        outputs::write_atomic(path, trace::chrome_trace(events, MAX_EVENTS).as_bytes())?;
    }
    if args.json {
        return report::print_json(
            &json!({ "name": plan.name, "for": plan.made_for, "plan_hash": loaded.hash, "predicted": played.prediction, "slowdown": played.slowdown, "trace": args.trace, "events": events.len() }),
        );
    }
    report::out(&format!(
        "{}{} on {}: one step\n",
        whose_plan(plan),
        plan.name,
        plan.cluster.name
    ))?;
    report::out(report::plan::predicted(plan, &played.prediction).trim_end())?;
    let step_s = played.prediction.step_time_s.0;
    if let Some(words) = report::plan::mistake(plan, &loaded.training, step_s, "predicted") {
        report::out(&words)?;
    }
    if let Some(path) = &args.trace {
        report::out(&format!(
            "{} events written to {}; open it at https://ui.perfetto.dev",
            events.len(),
            path.display()
        ))?;
    }
    Ok(())
}
