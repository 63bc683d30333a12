//! The words and figures of a run on its way and at its end.

use super::fabric::Chosen;
use super::matmuls;
use crate::args::{BackendArg, RunArgs};
use crate::failure::Failure;
use crate::plan_file::Loaded;
use crate::{cluster, report};
use cost_model::StepWork;
use cost_model::utilisation::peak_flops_per_s;
use ir::measurement::Measurement;
use ir::{Seconds, Task};
use runtime::device::cuda;
use runtime::measure::EMULATED_GPU;
use runtime::stragglers::Finding;
use serde_json::json;
use std::path::Path;

/// Losses of batches that are printed: two lines of them.
const SHOWN_LOSSES: usize = 20;

/// The words of a finding about what holds a run up.
pub fn of_finding(finding: Finding) -> String {
    match finding {
        Finding::SlowRank {
            rank,
            times,
            is_host_busy: true,
        } => format!(
            "{rank} works {times:.1} times as long as the ranks that do the same, as something else keeps the processors of its host busy"
        ),
        Finding::SlowRank { rank, times, .. } => format!(
            "{rank} works {times:.1} times as long as the ranks that do the same: its processor is slow or shared, not the link"
        ),
        Finding::Recovered(rank) => format!("{rank} is as fast as the others again"),
        Finding::SlowLink { times } => format!(
            "all ranks wait {times:.1} times as long for each other as at first, and none works longer or stands in line for a processor: the link is slow"
        ),
        Finding::BusyHost { times, in_line_s } => format!(
            "all ranks wait {times:.1} times as long for each other as at first: one of them stands in line for a processor {} of a step longer, so something else keeps the host busy; whether a link is slow as well cannot be told meanwhile",
            Seconds(in_line_s)
        ),
        Finding::LinkRecovered => "ranks wait for each other no longer than at first".into(),
    }
}

/// Whether devices of the kind that the plan was made for run it; an emulated GPU is none of them.
fn runs_as_planned(args: &RunArgs, loaded: &Loaded) -> bool {
    let is_for_cpu = cluster::is_of_cpu_ranks(&loaded.plan.cluster);
    match args.backend {
        BackendArg::Cpu => is_for_cpu,
        BackendArg::Cuda => !is_for_cpu && cuda::name().is_ok_and(|name| name != EMULATED_GPU),
    }
}

/// The work of a step, which turns its time into rates.
pub struct Rates {
    pub tokens: f64,
    model_flops: f64,
    hardware_flops: f64,
    peak: Option<f64>,
}

impl Rates {
    pub fn of(args: &RunArgs, loaded: &Loaded) -> Self {
        let work = StepWork::of(&loaded.training, &loaded.plan.train);
        let devices = report::plan::used_devices(&loaded.plan);
        Rates {
            tokens: work.tokens as f64,
            model_flops: work.model_flops.0,
            hardware_flops: work.hardware_flops.0,
            // The peak of devices that did not do the work says nothing about the run.
            peak: Some(&loaded.plan.cluster)
                .filter(|_| runs_as_planned(args, loaded))
                .and_then(|c| peak_flops_per_s(c, work.dtype, devices)),
        }
    }
    pub fn mfu(&self, seconds: f64) -> Option<f64> {
        self.peak
            .filter(|p| *p > 0.0 && seconds > 0.0)
            .map(|p| self.model_flops / seconds / p)
    }
    fn hfu(&self, seconds: f64) -> Option<f64> {
        let model = self.model_flops.max(f64::MIN_POSITIVE);
        self.mfu(seconds).map(|m| m * self.hardware_flops / model)
    }
    pub fn mfu_words(&self, seconds: f64) -> String {
        let (mfu, hfu) = (self.mfu(seconds), self.hfu(seconds));
        let words = |(m, h)| report::percent(m) + &report::plan::hfu(m, h);
        mfu.zip(hfu).map_or("unknown".into(), words)
    }
}

/// The mean of the batches' losses.
fn mean_loss(m: &Measurement) -> f64 {
    m.steps.iter().map(|s| s.loss).sum::<f64>() / m.steps.len().max(1) as f64
}

/// The loss of each batch; of many, those of the first.
fn losses(m: &Measurement, output: &Path) -> String {
    let shown = m.steps.iter().take(SHOWN_LOSSES);
    let shown: Vec<String> = shown.map(|s| format!("{:.4}", s.loss)).collect();
    let more = match m.steps.len() > SHOWN_LOSSES {
        true => format!(", ... ({} has all)", output.display()),
        false => String::new(),
    };
    report::wrapped(&format!("Loss by batch: {}{more}", shown.join(", ")))
}

/// Prints the figures of a run as JSON.
pub fn print_json(
    args: &RunArgs,
    loaded: &Loaded,
    m: &Measurement,
    chosen: &Chosen,
) -> Result<(), Failure> {
    let rates = Rates::of(args, loaded);
    let mut said = json!({
        "run": args.output,
        "plan_hash": m.plan_hash,
        "planned_for": loaded.plan.cluster.name,
        "executed_on": m.executed_on,
        "predictions_apply": runs_as_planned(args, loaded),
        "steps": m.steps.len(),
        "first_loss": m.steps.first().map(|s| s.loss),
        "last_loss": m.steps.last().map(|s| s.loss),
        "validation": m.validation,
        "step_time_s": m.step_time_s,
        "tokens_per_s": m.tokens_per_s,
        "mfu": rates.mfu(m.step_time_s.0),
        "hfu": rates.hfu(m.step_time_s.0),
        "peak_bytes": m.stages.iter().map(|s| s.peak_bytes).collect::<Vec<_>>(),
    });
    if args.backend == BackendArg::Cuda {
        said["matmuls"] = json!(cuda::multiplier(matmuls(args)));
        said["fabric"] = json!(chosen.by);
    }
    if loaded.plan.train.task == Task::Inference {
        said["losses"] = m.steps.iter().map(|s| s.loss).collect();
        said["mean_loss"] = json!(mean_loss(m));
    }
    report::print_json(&said)
}

/// Prints the figures of a run in words.
pub fn print_words(
    args: &RunArgs,
    loaded: &Loaded,
    m: &Measurement,
    chosen: &Chosen,
) -> Result<(), Failure> {
    let rates = Rates::of(args, loaded);
    let (first, last) = (m.steps.first(), m.steps.last());
    if let (Some(a), Some(b)) = (first, last) {
        let last = match m.steps.len() {
            1 => String::new(),
            _ => format!(" to {:.4} at step {}", b.loss, b.step),
        };
        let n_ranks = ir::counted(m.n_ranks, "rank");
        let n_steps = m.steps.len() as u64;
        report::out(&match loaded.plan.train.task {
            Task::Training => format!(
                "{}: {} on {n_ranks}, loss {:.4} at step {}{last}",
                m.name,
                ir::counted(n_steps, "step"),
                a.loss,
                a.step,
            ),
            Task::Inference => format!(
                "{}: inference of {} on {n_ranks}, mean loss {:.4}\n{}",
                m.name,
                ir::counted(n_steps, "batch"),
                mean_loss(m),
                losses(m, &args.output),
            ),
        })?;
    }
    for (step, loss) in &m.validation {
        let steps = ir::counted(*step, "step");
        report::out(&format!("  validation loss after {steps}: {loss:.4}"))?;
    }
    report::out(&format!(
        "Measured: {} per step (median), {} {}/s, MFU {}",
        m.step_time_s,
        report::count(m.tokens_per_s).trim_end(),
        report::plan::unit(&loaded.plan),
        rates.mfu_words(m.step_time_s.0)
    ))?;
    let cluster = &loaded.plan.cluster;
    let devices = report::plan::used_devices(&loaded.plan);
    report::out(&match runs_as_planned(args, loaded) {
        true => format!(
            "  {}",
            report::plan::mfu_convention(cluster, &loaded.plan.train, devices)
        ),
        false => format!(
            "  Executed by {}; the plan is for {}, whose peak says nothing about this run.",
            m.executed_on, cluster.name
        ),
    })?;
    let seconds = m.step_time_s.0;
    let mistake = report::plan::mistake(&loaded.plan, &loaded.training, seconds, "measured");
    if let Some(words) = mistake.filter(|_| runs_as_planned(args, loaded)) {
        report::out(&format!("  {words}"))?;
    }
    let peaks: Vec<String> = m
        .stages
        .iter()
        .enumerate()
        .map(|(i, s)| {
            let stages = m.stages.len();
            let stage = report::plan::stages_of_mesh(i, stages, loaded.plan.schedule);
            format!("stage {stage}: {}", s.peak_bytes)
        })
        .collect();
    report::out(&format!("Peak memory of a rank: {}", peaks.join(", ")))?;
    if args.backend == BackendArg::Cuda {
        let by = cuda::multiplier(matmuls(args));
        report::out(&format!("Matrices were multiplied by {by}."))?;
    }
    if let Some(by) = &chosen.by {
        report::out(&format!("Ranks met by {by}."))?;
    }
    report::out(&format!(
        "Next: meshwright compare {} {}",
        args.plan.display(),
        args.output.display()
    ))
}
