//! What was measured of a job: given as a number, read from a log or from a profiler's trace, or in the
//! job's own file.

use super::request::Priced;
use crate::args::ImportJobArgs;
use crate::failure::{Exit, Failure};
use crate::files;
use crate::quantity::{Amount, Unit};
use ir::Bytes;
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
    /// What the predicted bytes leave out, in words.
    #[serde(skip)]
    pub memory_words: &'static str,
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
        factor: step_s / job.step_s(),
        from: found.from.clone(),
        memory: found.peak_bytes.map(|b| [Bytes(b), Bytes(like)]),
        memory_words: words,
    })
}
