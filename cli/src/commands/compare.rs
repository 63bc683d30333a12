//! `compare`: what a plan predicted beside what its run measured.
//!
//! A plan for GPUs can be run on CPU threads; its prediction and that measurement are of
//! different devices, so they are shown without ratios and with the reason.

mod recalibrate;

use crate::args::CompareArgs;
use crate::document;
use crate::failure::{Exit, Failure};
use crate::plan_file::{self, Loaded};
use crate::software::whose_own;
use crate::{cluster, files, outputs, report};
use cost_model::compare::{
    Cause, Compared, Comparison, StageComparison, Waterfall, compare, expected_instructions,
};
use cost_model::{SimulateOptions, StepWork, simulate};
use ir::measurement::{MEASUREMENT_VERSION, Measurement};
use ir::plan::{Prediction, ScheduleKind};
use ir::{Bytes, Figure, Seconds};
use serde_json::json;
use std::path::Path;

pub fn run(args: &CompareArgs) -> Result<(), Failure> {
    let loaded = plan_file::load(&args.plan)?;
    let runs = args
        .run
        .iter()
        .map(|path| read(path, &loaded))
        .collect::<Result<Vec<_>, _>>()?;
    let Some(measured) = runs.first() else {
        return Err(Failure::new(Exit::Usage, "no run to compare with"));
    };
    let expected = expected_instructions(&loaded.program, &loaded.plan.cluster)?;
    let predicted = of_own_runtime(&loaded)?;
    let mut comparison = compare(&predicted, &expected, measured);
    let different = different_devices(&loaded, measured);
    if different.is_some() {
        without_ratios(&mut comparison);
    }
    if let Some(path) = &args.recalibrate {
        let inputs = args.run.iter().chain([&args.plan]).map(|p| p.as_path());
        outputs::check(&[path], &inputs.collect::<Vec<_>>())?;
    }
    let refined = match (&args.recalibrate, &different) {
        (Some(_), Some(words)) => return Err(Failure::new(Exit::Usage, words.clone())),
        (Some(path), None) => Some(recalibrate::recalibrate(path, &loaded, &runs)?),
        (None, _) => None,
    };
    if args.json {
        return report::print_json(&json!({
            "name": loaded.plan.name,
            "plan_hash": loaded.hash,
            "different_devices": different,
            "comparison": comparison,
            "next": next(args, &loaded, &comparison),
            "recalibrated": refined,
        }));
    }
    let different = different.as_deref();
    print_words(&loaded, measured, &comparison, different, args.verbose)?;
    if let Some(words) = next(args, &loaded, &comparison) {
        report::out(&format!("\n{words}"))?;
    }
    refined.map_or(Ok(()), |r| r.print())
}

/// The prediction for Meshwright's own runtime, which made the run, whatever the plan is made for.
fn of_own_runtime(loaded: &Loaded) -> Result<Prediction, Failure> {
    if loaded.plan.made_for.is_none() {
        return Ok(loaded.plan.predicted.clone());
    }
    let work = StepWork::of(&loaded.training, &loaded.plan.train);
    let options = SimulateOptions::new(work);
    Ok(simulate(&loaded.program, &loaded.plan.cluster, &options)?.prediction)
}

/// The share by which a prediction may be off before the cluster should be measured again.
const FAR_OFF: f64 = 0.2;

/// Advises on better predictions, where the cluster was not measured or the prediction is far off.
fn next(args: &CompareArgs, loaded: &Loaded, c: &Comparison) -> Option<String> {
    // Without a ratio the two sides are of different devices, which the heading says.
    let off = c.step_time_s.ratio? - 1.0;
    let cluster = &loaded.plan.cluster;
    let share = c.waterfall.as_ref().and_then(of_work);
    if args.recalibrate.is_some() {
        let waits = off.abs() > FAR_OFF && share.is_some_and(|s| s < OF_WORK);
        return waits.then(|| "Most of the difference is waiting, which no figure of the cluster causes: the refined figures may be those of a busy machine.".into());
    }
    if cluster.measured.is_empty() {
        return Some(format!(
            "The figures of {} were not measured here. Next: `meshwright calibrate -o cluster.toml` measures this machine; compile with --cluster cluster.toml.",
            cluster.name
        ));
    }
    let runs: Vec<String> = args.run.iter().map(|r| r.display().to_string()).collect();
    (off.abs() > FAR_OFF).then(|| {
        let said = format!(
            "The step was predicted {} too {}.",
            report::percent(off.abs()),
            if off > 0.0 { "long" } else { "short" }
        );
        let again = "`meshwright calibrate` measures the cluster again, on a machine that does nothing else";
        match c.waterfall.as_ref().map(of_work) {
            // A run without timed instructions gives nothing to which figures could be fitted.
            None => format!("{said} Next: `meshwright run {} --data FILE --profile 2` times instructions, which shows where; {again}.", args.plan.display()),
            Some(None) => format!("{said} The steps whose instructions were timed took as long as predicted; the others did not. Next: run again on a machine that does nothing else; {again}."),
            Some(Some(share)) if share < OF_WORK => format!("{said} Most of that is waiting, which no figure of the cluster causes: ranks waited for each other, or for processors that others used. Next: run again on a machine that does nothing else; {again}."),
            Some(Some(_)) => format!(
                "{said} Next: `meshwright compare {} {} --recalibrate refined.toml` fits the cluster's figures to the run; {again}.",
                args.plan.display(),
                runs.join(" ")
            ),
        }
    })
}

/// Fitting the cluster to a run helps where work causes at least this share of the difference.
const OF_WORK: f64 = 0.5;

/// Returns the share of work in the difference, beside waiting; work is what figures of the cluster
/// predict. That other steps took longer than those that were timed counts as neither; `None` where
/// that is the largest part.
fn of_work(w: &Waterfall) -> Option<f64> {
    let off = |of: fn(Cause) -> bool| -> f64 {
        let parts = w.parts.iter().filter(|p| of(p.cause));
        parts.map(|p| p.difference_s.abs()).sum()
    };
    let work = off(|c| matches!(c, Cause::Compute | Cause::Collectives | Cause::Transfers));
    let all = work + off(|c| c == Cause::Waiting);
    (all > 0.0 && all >= off(|c| c == Cause::Profiling)).then(|| work / all)
}

/// Explains, where it is so, that the plan and the run are of different devices, and what to do.
fn different_devices(loaded: &Loaded, measured: &Measurement) -> Option<String> {
    let c = &loaded.plan.cluster;
    let is_same = match measured.backend.as_str() {
        runtime::measure::BACKEND => cluster::is_of_cpu_ranks(c),
        runtime::measure::EMULATED_BACKEND => false,
        _ => !cluster::is_of_cpu_ranks(c),
    };
    if is_same {
        return None;
    }
    let executed_on = match measured.executed_on.as_str() {
        "" => &measured.backend,
        said => said,
    };
    Some(format!(
        "These figures are of different devices and cannot be compared: predicted for {} of {}, measured on {executed_on}. Instead: {}.",
        c.device.name,
        c.name,
        cluster::PLAN_FOR_THIS_MACHINE
    ))
}

/// Takes out what relates the two sides: ratios, the causes of the difference, and the instructions
/// that differ most.
fn without_ratios(c: &mut Comparison) {
    let whole = [
        &mut c.step_time_s,
        &mut c.tokens_per_s,
        &mut c.mfu,
        &mut c.peak_bytes,
    ];
    whole.into_iter().for_each(|x| x.ratio = None);
    for s in c.stages.iter_mut().chain([&mut c.total]) {
        let all = [
            &mut s.forward_s,
            &mut s.backward_s,
            &mut s.step_s,
            &mut s.compute_s,
            &mut s.collective_s,
            &mut s.transfer_s,
            &mut s.waiting_s,
            &mut s.peak_bytes,
        ];
        all.into_iter().for_each(|x| x.ratio = None);
    }
    c.worst.clear();
    c.waits.clear();
    c.waterfall = None;
}

/// The largest time in seconds, or rate in tokens per second, that is accepted, so that sums of
/// measured figures stay finite.
const MOST: f64 = 1e15;

/// Advises on a run of another plan: names that plan where it is beside the run, as after a loss of
/// an elastic run, which goes on by a plan of its own.
fn its_plan(run: &Path, hash: &str) -> String {
    let folder = run.parent().filter(|f| !f.as_os_str().is_empty());
    let found = files::with_fingerprint(folder.unwrap_or(Path::new(".")), hash);
    match found.as_deref() {
        Some(plan) => {
            let plan = plan.strip_prefix(".").unwrap_or(plan).display();
            format!("its plan is {plan}: meshwright compare {plan} {}", run.display())
        }
        None => "compare a run with the plan it was made by; a plan that was changed or compiled again must be run again, and the plan with which an elastic run went on was beside its output".into(),
    }
}

/// Reads the measurement at `path`, and checks that it is one of this plan.
fn read(path: &Path, loaded: &Loaded) -> Result<Measurement, Failure> {
    let name = path.display().to_string();
    let text = files::read_text(path, "run", files::LARGE)?;
    let m: Measurement = document::json(&name, &text, "run")?;
    let bad = |problem: String| Err(Failure::new(Exit::BadInput, format!("{name}: {problem}")));
    if m.version != MEASUREMENT_VERSION {
        return bad(format!(
            "version is {}, this build reads {MEASUREMENT_VERSION}",
            m.version
        ));
    }
    if m.plan_hash != loaded.hash {
        return match bad(format!(
            "is a run of the plan {}, not of this one, {}",
            m.plan_hash, loaded.hash
        )) {
            Err(failure) => Err(failure.help(its_plan(path, &m.plan_hash))),
            ok => ok,
        };
    }
    if m.stages.len() != loaded.program.roles.len() {
        return bad(format!(
            "has {}, the plan has {}",
            ir::counted(m.stages.len() as u64, "stage"),
            loaded.program.roles.len()
        ));
    }
    let of_steps = m.steps.iter().map(|s| ("steps: seconds", s.seconds));
    let of_stages = m
        .stages
        .iter()
        .flat_map(|s| {
            [
                s.compute_s,
                s.collective_s,
                s.transfer_s,
                s.forward_s,
                s.backward_s,
                s.step_s,
            ]
        })
        .map(|x| ("stages: a time", x));
    let of_instructions = m.instructions.iter().flat_map(|i| {
        [
            ("instructions: mean_s", i.mean_s),
            ("instructions: busy_s", i.busy_s.unwrap_or(0.0)),
        ]
    });
    let totals = [
        ("step_time_s", m.step_time_s.0),
        ("tokens_per_s", m.tokens_per_s),
    ];
    if let Some((key, x)) = totals
        .into_iter()
        .chain(of_steps)
        .chain(of_stages)
        .chain(of_instructions)
        .find(|(_, x)| !(0.0..=MOST).contains(x))
    {
        return bad(format!(
            "{key} is {x}, expected 0 to {MOST:e}",
            x = Figure(x)
        ));
    }
    Ok(m)
}

fn print_words(
    loaded: &Loaded,
    measured: &Measurement,
    c: &Comparison,
    different: Option<&str>,
    verbose: bool,
) -> Result<(), Failure> {
    let plan = &loaded.plan;
    if let Some(words) = different {
        report::out(&format!("{words}\n"))?;
    }
    report::out(&format!(
        "{}{} on {} of {}: {} measured\n",
        whose_own(),
        plan.name,
        ir::counted(measured.n_ranks, "rank"),
        plan.cluster.name,
        ir::counted(measured.steps.len() as u64, "step")
    ))?;
    if let Some(made_for) = &plan.made_for {
        report::out(&format!(
            "The plan is made for {}, of which it predicts {} a step; the run is Meshwright's own, and so are the predictions here.\n",
            published::software::title(Some(made_for)),
            plan.predicted.step_time_s
        ))?;
    }
    let mut rows = vec![
        row("step time", c.step_time_s, &seconds),
        row(
            &format!("{}/s", report::plan::unit(plan)),
            c.tokens_per_s,
            &report::count,
        ),
        row("MFU", c.mfu, &report::percent),
        row("peak memory of a rank", c.peak_bytes, &bytes),
    ];
    if !report::plan::hfu(c.mfu.predicted, c.hfu.predicted).is_empty() {
        rows.insert(3, row("HFU", c.hfu, &report::percent));
    }
    if different.is_some() {
        // The run's utilisation would refer to a peak that is not its own.
        rows.retain(|r| !r[0].ends_with("FU"));
    }
    report::out(&report::table(
        &["", "predicted", "measured", "predicted/measured"],
        rows,
        1,
    ))?;
    if !verbose && different.is_none() {
        return match &c.waterfall {
            Some(w) => print_causes(w, c.stages.len(), plan.schedule),
            None => Ok(()),
        };
    }
    report::out(&report::plan::mfu_convention(
        &plan.cluster,
        &plan.train,
        report::plan::used_devices(plan),
    ))?;
    let steps = [
        ("predicted", c.step_time_s.predicted),
        ("measured", c.step_time_s.measured),
    ];
    for (what, seconds) in steps {
        let relevant = what == "predicted" || different.is_none();
        if let Some(words) =
            report::plan::mistake(plan, &loaded.training, seconds, what).filter(|_| relevant)
        {
            report::out(&words)?;
        }
    }
    report::out(
        "Peak memory, predicted: the arena and what the cluster reserves for the runtime; measured: the arena and the scratch space in use.",
    )?;
    report::out("")?;
    let mut rows: Vec<Vec<String>> = c
        .stages
        .iter()
        .enumerate()
        .flat_map(|(i, s)| {
            let stages = report::plan::stages_of_mesh(i, c.stages.len(), plan.schedule);
            stage_rows(&stages, s)
        })
        .collect();
    if c.stages.len() > 1 {
        rows.extend(stage_rows("all", &c.total));
    }
    report::out(&report::table(
        &["stage", "", "predicted", "measured", "predicted/measured"],
        rows,
        2,
    ))?;
    report::out(
        "(forward and backward: of one microbatch, waiting included; all else: per step. Work: the time that a rank takes when nobody disturbs it. Waiting: for other ranks or for a processor; `inspect` counts it as part of compute and collectives where ranks share processors)",
    )?;
    if different.is_some() {
        return Ok(());
    }
    if c.worst.is_empty() {
        return report::out(
            "\nNo step was timed instruction by instruction; run with --profile 2 for that.",
        );
    }
    if let Some(w) = &c.waterfall {
        print_waterfall(w, c.stages.len(), plan.schedule)?;
    }
    report::out("\nThe instructions with the largest difference per step")?;
    let worst = c.worst.iter().map(|w| {
        let place = format!("{}.{}.{}", w.stage, w.template, w.instruction);
        let mut cells = vec![place, short_name(&w.what), w.count.to_string()];
        cells.extend(row("", w.seconds, &seconds).into_iter().skip(1));
        cells.push(signed(-w.error_s));
        cells
    });
    report::out(&report::table(
        &[
            "stage.template.instruction",
            "what",
            "per step",
            "predicted",
            "measured",
            "predicted/measured",
            "difference per step",
        ],
        worst.collect(),
        2,
    ))?;
    print_waits(c)
}

/// Prints the instructions in which ranks waited longest.
fn print_waits(c: &Comparison) -> Result<(), Failure> {
    if c.waits.is_empty() {
        return Ok(());
    }
    report::out(
        "\nThe instructions in which ranks waited longest, for other ranks, links or a processor",
    )?;
    let rows = c.waits.iter().map(|w| {
        let place = format!("{}.{}.{}", w.stage, w.template, w.instruction);
        let mut cells = vec![place, short_name(&w.what), w.count.to_string()];
        cells.extend(row("", w.seconds, &seconds).into_iter().skip(1).take(2));
        cells.push(seconds(w.waited_s));
        cells
    });
    report::out(&report::table(
        &[
            "stage.template.instruction",
            "what",
            "per step",
            "predicted",
            "took",
            "waited per step",
        ],
        rows.collect(),
        2,
    ))
}

/// Prints the causes of the difference between predicted and measured step time.
fn print_causes(w: &Waterfall, meshes: usize, schedule: ScheduleKind) -> Result<(), Failure> {
    report::out(&format!(
        "\nFrom {} predicted to {} measured, in seconds of the step\n(work: divided by the {:.2} processors that the ranks keep busy)",
        seconds(w.predicted_s),
        seconds(w.measured_s),
        w.processors
    ))?;
    let mut rows: Vec<Vec<String>> = w
        .parts
        .iter()
        .map(|p| {
            let of_mesh = |s| report::plan::stages_of_mesh(s as usize, meshes, schedule);
            let stage = p.stage.map_or("all".into(), of_mesh);
            let times = times(p.predicted_s, p.measured_s).to_vec();
            [vec![p.cause.name().to_string(), stage], times].concat()
        })
        .collect();
    let step = times(w.predicted_s, w.measured_s).to_vec();
    rows.push([vec!["step".into(), "all".into()], step].concat());
    report::out(&report::table(
        &["cause", "stage", "predicted", "measured", "difference"],
        rows,
        2,
    ))
}

/// Prints these causes, and then the kinds of instruction behind them.
fn print_waterfall(w: &Waterfall, meshes: usize, schedule: ScheduleKind) -> Result<(), Failure> {
    print_causes(w, meshes, schedule)?;
    let rows = w.kinds.iter().filter(|p| p.kind.is_some()).map(|p| {
        let kind = p.kind.clone().unwrap_or_default();
        let times = times(p.predicted_s, p.measured_s).to_vec();
        [vec![kind, p.cause.name().to_string()], times].concat()
    });
    report::out(&report::table(
        &["kind", "cause", "predicted", "measured", "difference"],
        rows.collect(),
        2,
    ))
}

/// Shows a predicted and a measured time, and their difference.
fn times(predicted: f64, measured: f64) -> [String; 3] {
    let difference = signed(measured - predicted);
    [seconds(predicted), seconds(measured), difference]
}

/// Shows seconds with their sign.
fn signed(s: f64) -> String {
    match s < 0.0 && s.abs() >= 5e-13 {
        true => format!("-{}", seconds(-s)),
        false => format!("+{}", seconds(s)),
    }
}

fn stage_rows(stage: &str, s: &StageComparison) -> Vec<Vec<String>> {
    let times = [
        ("forward", s.forward_s),
        ("backward", s.backward_s),
        ("step begin and end", s.step_s),
        ("work in compute", s.compute_s),
        ("work in collectives", s.collective_s),
        ("work in transfers", s.transfer_s),
        ("waiting", s.waiting_s),
    ];
    let there = times
        .into_iter()
        .filter(|(_, c)| c.predicted != 0.0 || c.measured != 0.0);
    let mut rows: Vec<Vec<String>> = there.map(|(name, c)| row(name, c, &seconds)).collect();
    rows.push(row("peak memory", s.peak_bytes, &bytes));
    rows.iter_mut().for_each(|r| r.insert(0, stage.to_string()));
    rows
}

fn row(name: &str, c: Compared, show: &dyn Fn(f64) -> String) -> Vec<String> {
    vec![
        name.to_string(),
        show(c.predicted),
        show(c.measured),
        c.ratio.map_or("-".into(), |r| format!("{r:.2}")),
    ]
}

fn seconds(s: f64) -> String {
    Seconds(s).to_string()
}

fn bytes(b: f64) -> String {
    Bytes(b as u64).to_string()
}

/// Shortens a name so that it fits a table: a coalesced collective lists all its tensors, of which
/// the first is shown and the rest counted (`--json` has them all).
fn short_name(what: &str) -> String {
    match what.split_once('+') {
        Some((first, rest)) => format!("{first} and {} more", rest.split('+').count()),
        None => what.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cost_model::compare::Part;

    #[test]
    fn waiting_is_no_work() {
        let part = |cause, difference_s: f64| Part {
            cause,
            stage: None,
            kind: None,
            predicted_s: 1.0,
            measured_s: 1.0 + difference_s,
            difference_s,
        };
        let of = |parts: &[(Cause, f64)]| {
            let parts = parts.iter().map(|&(cause, d)| part(cause, d)).collect();
            of_work(&Waterfall {
                parts,
                ..Waterfall::default()
            })
        };
        assert_eq!(
            of(&[(Cause::Compute, 0.1), (Cause::Waiting, 0.9)]),
            Some(0.1)
        );
        // Kernels that are too slow and collectives that are too fast are both work.
        let both = [
            (Cause::Compute, 0.5),
            (Cause::Collectives, -0.25),
            (Cause::Waiting, 0.25),
            (Cause::Profiling, 0.5),
        ];
        assert_eq!(of(&both), Some(0.75));
        // Steps that were not timed took longer: neither.
        assert_eq!(of(&[(Cause::Compute, 0.1), (Cause::Profiling, 7.0)]), None);
        assert_eq!(of(&[]), None);
    }
}
