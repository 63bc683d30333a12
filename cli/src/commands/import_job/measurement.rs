//! The measurement of a job: given as a number, read from a log or from a profiler's trace, or in
//! the job's own file.

use super::request::Priced;
use crate::args::ImportJobArgs;
use crate::failure::{Exit, Failure};
use crate::files;
use crate::quantity::{Amount, Unit};
use crate::report::percent;
use crate::software;
use cost_model::{SimulateOptions, StepWork};
use ir::cluster::Cluster;
use ir::{Bytes, Seconds};
use jobs::{Measured, Reading, measured};
use serde::Serialize;

/// A measured step beside the predicted one.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Recalibration {
    /// Seconds of the measured step.
    pub step_s: f64,
    /// The measured step over the predicted one.
    pub factor: f64,
    /// Where it is from.
    pub from: String,
    /// Measured bytes of the fullest rank, and those that were predicted of the same kind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<[Bytes; 2]>,
    /// The single causes that could be at fault.
    pub causes: Vec<Cause>,
    /// The parts that the predicted bytes leave out, in words.
    #[serde(skip)]
    pub memory_words: &'static str,
}

/// Figures of the cluster that could be at fault alone.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cause {
    /// The things at fault: kernels or links.
    pub what: &'static str,
    /// How many times as slow as the cluster says they would have to be.
    pub slower: f64,
    /// The share of the step that the plan which was found would save then.
    pub saves: Option<f64>,
}

/// Reads what was measured.
pub fn read(args: &ImportJobArgs, reading: &Reading) -> Result<Option<Measured>, Failure> {
    if let Some(text) = &args.measured {
        let amount = Unit::Seconds.parse("--measured", text)?;
        let Amount::To(seconds) = amount else {
            let what = format!("--measured {text}: a step takes seconds, not a multiple");
            return Err(Failure::new(Exit::Usage, what).help("give it as 7.3s or 7300ms"));
        };
        return Ok(Some(Measured {
            step_s: Some(seconds),
            steps: 1,
            from: "given with --measured".into(),
            ..Measured::default()
        }));
    }
    if let Some(path) = &args.log {
        let text = files::read_text(path, "log", files::LARGE)?;
        return match measured::of_log(&text) {
            Some(found) => Ok(Some(found)),
            None => {
                let what = format!("{}: no line of it states a step's time", path.display());
                Err(Failure::new(Exit::BadInput, what).help("lines that are read are Megatron-LM's `elapsed time per iteration (ms)`, torchtitan's `tps` and DeepSpeed's `CurrSamplesPerSec`; --measured 7.3s gives the time itself"))
            }
        };
    }
    if let Some(path) = &args.trace {
        let text = files::read_text(path, "trace", files::LARGE)?;
        return measured::of_trace(&text).map(Some).map_err(|e| {
            Failure::new(Exit::BadInput, format!("{}: {e}", path.display()))
                .help("a trace is what torch.profiler writes with export_chrome_trace, not compressed; --measured 7.3s gives the time itself")
        });
    }
    Ok(reading.measured.clone())
}

/// Compares what was measured with the job's prediction.
pub fn compared(found: &Measured, job: &Priced) -> Result<Recalibration, Failure> {
    let plan = &job.loaded.plan;
    let (batch, tokens) = (plan.train.global_batch, plan.train.sequence);
    if let Some(stated) = found.global_batch.filter(|b| *b != batch) {
        let what = format!("the log's steps have {stated} samples, and the job's {batch}");
        return Err(Failure::new(Exit::BadInput, what)
            .help("give the log of a run of this job, behind its rampup of the batch"));
    }
    let devices = u64::from(plan.cluster.n_devices());
    let step_s = found.seconds(batch, tokens, devices);
    let step_s = step_s
        .filter(|s| s.is_finite() && *s > 0.0)
        .ok_or_else(|| {
            Failure::new(
                Exit::BadInput,
                "no step time can be read from what was measured",
            )
            .help("give it as --measured 7.3s")
        })?;
    let factor = step_s / job.step_s();
    let mfu = plan.predicted.mfu / factor;
    if mfu > 1.0 {
        let what = format!(
            "a step of {} is faster than the devices can compute: its MFU would be {}",
            Seconds(step_s),
            percent(mfu)
        );
        return Err(Failure::new(Exit::BadInput, what)
            .help("look at the unit of the time, and at the job's batch, sequence and devices"));
    }
    let m = &job.memory;
    let all = m.total().0;
    let (like, words) = match found.is_reserved {
        true => (all - m.context.0, "without the driver's context"),
        false => (
            all - m.context.0 - m.slack.0,
            "without the driver's context and what the allocator keeps",
        ),
    };
    Ok(Recalibration {
        step_s,
        factor,
        from: found.from.clone(),
        causes: Vec::new(),
        memory: found.peak_bytes.map(|b| [Bytes(b), Bytes(like)]),
        memory_words: words,
    })
}

/// Steps that are this near to the measured one count as it.
const NEAR: f64 = 2e-3;
/// The most times that a step is played to find what makes it as long as measured.
const PLAYS: usize = 8;
/// Figures are not looked for beyond so many times what the cluster says.
const MOST: f64 = 50.0;

/// How far kernels alone, or links alone, would have to be off for the job to take as long as it did,
/// and what `better` would save then. What cannot be at fault alone is left out.
pub fn causes(
    measured_s: f64,
    job: &Priced,
    better: Option<&Priced>,
) -> Result<Vec<Cause>, Failure> {
    let mut all = Vec::new();
    type Slow = fn(&mut Cluster, f64);
    let figures: [(&'static str, Slow); 2] = [("kernels", slow_kernels), ("links", slow_links)];
    for (what, slow) in figures {
        let step_s = |priced: &Priced, factor: f64| {
            let mut cluster = job.loaded.plan.cluster.clone();
            slow(&mut cluster, factor);
            step_on(priced, &cluster)
        };
        // Steps grow with the figures nearly in proportion, so the secant finds the factor at once.
        let (mut last, mut last_s) = (1.0, job.step_s());
        let mut next = (measured_s / last_s).clamp(1.0 / MOST, MOST);
        let mut found = None;
        for _ in 0..PLAYS {
            let next_s = step_s(job, next)?;
            if (next_s / measured_s - 1.0).abs() < NEAR {
                found = Some(next);
                break;
            }
            let slope = (next_s - last_s) / (next - last);
            if !slope.is_finite() || slope <= 0.0 {
                break;
            }
            (last, last_s) = (next, next_s);
            next = (next + (measured_s - next_s) / slope).clamp(1.0 / MOST, MOST);
            if next == last {
                break;
            }
        }
        let Some(slower) = found else { continue };
        let better_s = better.map(|b| step_s(b, slower)).transpose()?;
        all.push(Cause {
            what,
            slower,
            saves: better_s.map(|s| 1.0 - s / measured_s),
        });
    }
    Ok(all)
}

/// Seconds of a plan's step on a cluster of the same shape.
fn step_on(priced: &Priced, cluster: &Cluster) -> Result<f64, Failure> {
    let loaded = &priced.loaded;
    let work = StepWork::of(&loaded.training, &loaded.plan.train);
    let options = SimulateOptions::new(work);
    let (played, _) = software::played(&loaded.plan, &loaded.program, cluster, &options)?;
    Ok(played.step_time.0)
}

fn slow_kernels(cluster: &mut Cluster, factor: f64) {
    let device = &mut cluster.device;
    device
        .peak_flops_per_s
        .values_mut()
        .for_each(|rate| *rate /= factor);
    device.memory_bandwidth_bytes_per_s /= factor;
    device.launch_s *= factor;
}

fn slow_links(cluster: &mut Cluster, factor: f64) {
    for level in &mut cluster.levels {
        level.bandwidth_bytes_per_s /= factor;
        level.latency_s *= factor;
    }
}
