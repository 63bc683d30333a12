//! Watching a run: a row of figures for every step, in files that others read while it goes on, on an
//! endpoint of this host, and as lines where there is no terminal.
//!
//! None of this can end the run. A file that cannot be written is said once, and what is missing
//! is written when it can be again, up to a limit.

mod appender;
mod endpoint;
mod events;
mod rows;

use crate::args::RunArgs;
use crate::failure::{Exit, Failure};
use crate::{outputs, report};
use appender::Appender;
use endpoint::Endpoint;
use events::Events;
use ir::measurement::StepMeasurement;
use rows::{Form, Rows};
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The figures of a step. Those that the run does not have, or that are no number, are `None`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The number of the step, counted from the first of all runs.
    pub step: u64,
    /// Mean loss over the tokens of the batch.
    pub loss: Option<f64>,
    /// Norm of the gradient before clipping.
    pub grad_norm: Option<f64>,
    /// Learning rate.
    pub lr: f64,
    /// Tokens per second of this step.
    pub tokens_per_s: Option<f64>,
    /// Seconds of this step.
    pub step_time_s: f64,
    /// Model FLOPs utilisation of this step, a share of 1.
    pub mfu: Option<f64>,
    /// Most bytes that a rank had so far.
    pub peak_bytes: u64,
    /// Steps so far, in all runs, that f16's loss scaling skipped.
    pub skipped_steps: u64,
}

impl Row {
    /// The figures by the names that all outputs give them, in order.
    fn figures(&self) -> [(&'static str, &'static str, Option<f64>); 8] {
        [
            ("loss", "Mean loss over the tokens of the batch.", self.loss),
            (
                "grad_norm",
                "Norm of the gradient before clipping.",
                self.grad_norm,
            ),
            ("lr", "Learning rate.", Some(self.lr)),
            ("tokens_per_s", "Tokens per second.", self.tokens_per_s),
            (
                "step_time_s",
                "Seconds of the step.",
                Some(self.step_time_s),
            ),
            ("mfu", "Model FLOPs utilisation, a share of 1.", self.mfu),
            (
                "peak_bytes",
                "Most bytes that a rank had so far.",
                Some(self.peak_bytes as f64),
            ),
            (
                "skipped_steps",
                "Steps so far that loss scaling skipped.",
                Some(self.skipped_steps as f64),
            ),
        ]
    }

    /// The row as a line for people.
    fn words(&self, unit: &str) -> String {
        let number = |value: Option<f64>, digits: usize| {
            value.map_or("-".into(), |v| format!("{v:.digits$}"))
        };
        let mut words = format!("step {}: loss {}", self.step, number(self.loss, 4));
        if let Some(norm) = self.grad_norm {
            words += &format!(", gradient norm {norm:.4}");
        }
        let rate = self.tokens_per_s.map_or("-".into(), report::count);
        words += &format!(
            ", lr {:.3e}, {} {unit}/s, {:.1} ms",
            self.lr,
            rate.trim_end(),
            1e3 * self.step_time_s
        );
        if let Some(mfu) = self.mfu {
            words += &format!(", MFU {}", report::percent(mfu));
        }
        if self.skipped_steps > 0 {
            words += &format!(", {} skipped", self.skipped_steps);
        }
        words
    }
}

/// A step as the run reports it.
#[derive(Clone, Copy, Debug)]
pub struct Figures {
    /// The measured step.
    pub measured: StepMeasurement,
    /// Tokens per second.
    pub tokens_per_s: f64,
    /// Model FLOPs utilisation, where the peak is known.
    pub mfu: Option<f64>,
    /// Most bytes of a rank so far.
    pub peak_bytes: u64,
    /// Whether the step updated nothing.
    pub skipped: bool,
}

/// A file of `--metrics`.
enum Sink {
    Rows(Rows),
    Events(Events),
}

/// All that watches a run.
pub struct Watch {
    sinks: Vec<Sink>,
    endpoint: Option<Endpoint>,
    lines: Option<Lines>,
    skipped: u64,
    /// The unit that its rates are counted in.
    unit: &'static str,
}

/// Lines on standard error.
struct Lines {
    every: Duration,
    last: Option<Instant>,
}

impl Watch {
    /// Opens all outputs of a run whose first step is `step`, and whose rates are of `unit`. Of files that have rows of an earlier
    /// run, a run that goes on (`resumes`) keeps those of the steps before, and any other puts the
    /// file aside.
    ///
    /// Fails when one cannot be opened, or is no file of metrics.
    pub fn open(args: &RunArgs, run: &Described<'_>, unit: &'static str) -> Result<Self, Failure> {
        let mut sinks = Vec::new();
        let mut skipped = 0;
        for path in &args.metrics {
            sinks.push(match kind(path)? {
                Kind::Rows(form) => {
                    let (rows, before) = Rows::open(path, form, run)?;
                    skipped = skipped.max(before);
                    Sink::Rows(rows)
                }
                Kind::Events => Sink::Events(Events::open(path, run.step)?),
            });
        }
        let endpoint = args
            .prometheus
            .map(|port| Endpoint::open(port, run))
            .transpose()?;
        let lines = (!std::io::stderr().is_terminal()).then(|| Lines {
            every: Duration::from_secs(args.log_every),
            last: Some(Instant::now()).filter(|_| args.log_every > 0),
        });
        Ok(Watch {
            sinks,
            endpoint,
            lines,
            skipped,
            unit,
        })
    }

    /// Takes a step.
    pub fn step(&mut self, of: Figures) {
        let finite = |x: f64| Some(x).filter(|x| x.is_finite());
        self.skipped += u64::from(of.skipped);
        let m = of.measured;
        let row = Row {
            step: m.step,
            loss: finite(m.loss),
            grad_norm: finite(m.grad_norm),
            lr: m.lr,
            tokens_per_s: finite(of.tokens_per_s),
            step_time_s: m.seconds,
            mfu: of.mfu.and_then(finite),
            peak_bytes: of.peak_bytes,
            skipped_steps: self.skipped,
        };
        for sink in &mut self.sinks {
            match sink {
                Sink::Rows(rows) => rows.step(&row),
                Sink::Events(events) => events.step(&row),
            }
        }
        if let Some(endpoint) = &self.endpoint {
            endpoint.step(&row);
        }
        if let Some(lines) = &mut self.lines {
            lines.step(&row, self.unit);
        }
    }

    /// Takes a validation loss after so many steps.
    pub fn validation(&mut self, step: u64, loss: f64) {
        for sink in &mut self.sinks {
            match sink {
                Sink::Rows(rows) => rows.validation(step, loss),
                Sink::Events(events) => events.validation(step, loss),
            }
        }
        if let Some(endpoint) = &self.endpoint {
            endpoint.validation(loss);
        }
    }

    /// Says something between the lines of steps, where there is no terminal to show it on.
    pub fn line(&self, words: std::fmt::Arguments<'_>) {
        if self.lines.is_some() {
            crate::say(words);
        }
    }
}

impl Drop for Watch {
    /// Writes what is missing, and all of it through to the disk.
    fn drop(&mut self) {
        for sink in &mut self.sinks {
            match sink {
                Sink::Rows(rows) => rows.finish(),
                Sink::Events(events) => events.finish(),
            }
        }
    }
}

impl Lines {
    fn step(&mut self, row: &Row, unit: &str) {
        if self.last.is_none_or(|last| last.elapsed() >= self.every) {
            crate::say(format_args!("{}", row.words(unit)));
            self.last = Some(Instant::now());
        }
    }
}

/// The run as outputs name it, and where it begins.
pub struct Described<'a> {
    /// The name of the model.
    pub name: &'a str,
    /// The fingerprint of the plan.
    pub plan: &'a str,
    /// The first step.
    pub step: u64,
    /// Whether it goes on from a checkpoint.
    pub resumes: bool,
    /// Whether it begins with a validation.
    pub validates: bool,
}

/// The kind of a path of `--metrics`.
enum Kind {
    Rows(Form),
    Events,
}

/// Tells files from folders: what is there, or else the ending of the name.
fn kind(path: &Path) -> Result<Kind, Failure> {
    let ending = path.extension().and_then(OsStr::to_str);
    let ends_as_folder = path.as_os_str().as_encoded_bytes().ends_with(b"/");
    if path.is_dir() || ends_as_folder {
        return Ok(Kind::Events);
    }
    match ending {
        Some("jsonl" | "ndjson" | "json") => Ok(Kind::Rows(Form::JsonLines)),
        Some("csv") => Ok(Kind::Rows(Form::Csv)),
        None if !path.exists() => Ok(Kind::Events),
        _ => Err(Failure::new(
            Exit::Usage,
            format!("--metrics {}: of what form?", path.display()),
        )
        .help("name a file that ends in .jsonl (JSON lines) or .csv, or a folder for TensorBoard")),
    }
}

/// Checks the outputs before any work, as `run` does with all of its files.
pub fn check(args: &RunArgs, inputs: &[&Path], others: &[&Path]) -> Result<(), Failure> {
    let mut files = others.to_vec();
    for path in &args.metrics {
        match kind(path)? {
            Kind::Rows(_) => files.push(path),
            Kind::Events => outputs::check_folder(path)?,
        }
    }
    outputs::check(&files, inputs)
}

/// A name beside a file's own that nothing has: `loss.csv` becomes `loss.1.csv`.
fn aside(path: &Path) -> PathBuf {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let ending = path.extension().unwrap_or_default().to_string_lossy();
    let names = (1u64..).map(|n| path.with_file_name(format!("{stem}.{n}.{ending}")));
    let mut free = names.filter(|p| !p.exists());
    free.next().unwrap_or_else(|| path.to_path_buf())
}
