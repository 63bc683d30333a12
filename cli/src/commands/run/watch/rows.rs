//! Rows of figures in a file: JSON lines, or CSV.
//!
//! A run that goes on from a checkpoint of n steps keeps the rows of these, and the validation
//! after them, unless it begins with one. What follows is of steps that were lost with the run that
//! made them, and is made again; so is a line that was cut off.

use super::{Appender, Described, Row, aside};
use crate::failure::{Exit, Failure};
use serde::Deserialize;
use serde_json::json;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;

/// How rows are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// An object a line.
    JsonLines,
    /// A header, then a line of values a step.
    Csv,
}

/// The columns.
const HEADER: &str =
    "step,loss,grad_norm,lr,tokens_per_s,step_time_s,mfu,peak_bytes,skipped_steps\n";
/// Longest line that can be one of ours.
const LONGEST: usize = 1 << 12;

/// A file of rows.
pub struct Rows {
    form: Form,
    file: Appender,
}

impl Rows {
    /// Opens it, with the rows before the run's first step, and says how many steps were skipped in
    /// those.
    pub fn open(path: &Path, form: Form, run: &Described<'_>) -> Result<(Self, u64), Failure> {
        let failed = |e: io::Error| {
            let what = format!("--metrics {}: {e}", path.display());
            Failure::new(Exit::BadInput, what)
        };
        let mut kept = Kept::default();
        if path.is_file() {
            kept = keep(path, form, run)?;
            if !run.resumes && kept.rows > 0 {
                let other = aside(path);
                std::fs::rename(path, &other).map_err(failed)?;
                crate::say(format_args!(
                    "note: {} has the steps of an earlier run; it is called {} now",
                    path.display(),
                    other.display()
                ));
                kept = Kept::default();
            }
        }
        let mut file = Appender::open(path, kept.bytes).map_err(failed)?;
        if form == Form::Csv && kept.bytes == 0 {
            file.append(HEADER.as_bytes());
        }
        Ok((Rows { form, file }, kept.skipped))
    }

    /// Writes a step.
    pub fn step(&mut self, row: &Row) {
        let line = match self.form {
            Form::JsonLines => serde_json::to_string(row).unwrap_or_default() + "\n",
            Form::Csv => {
                let figures = row.figures().into_iter();
                let values = figures.map(|(_, _, value)| value.map_or(String::new(), shown));
                published::csv::line([row.step.to_string()].into_iter().chain(values))
            }
        };
        self.file.append(line.as_bytes());
    }

    /// Writes a validation loss, for which CSV has no column.
    pub fn validation(&mut self, step: u64, loss: f64) {
        if self.form == Form::JsonLines {
            let line = json!({ "step": step, "validation_loss": loss });
            self.file.append(format!("{line}\n").as_bytes());
        }
    }

    /// Ends the file.
    pub fn finish(&mut self) {
        self.file.finish();
    }
}

/// A number as short as can be read back.
fn shown(value: f64) -> String {
    format!("{value}")
}

/// The part of a file that stays.
#[derive(Default)]
struct Kept {
    /// Up to the first row that does not.
    bytes: u64,
    /// Rows that there are, whether they stay or not.
    rows: u64,
    /// Skipped steps in those that stay.
    skipped: u64,
}

/// The fields by which rows are told apart.
#[derive(Deserialize)]
struct Known {
    step: u64,
    #[serde(default)]
    skipped_steps: Option<u64>,
    /// Given for a validation alone, which comes after so many steps as its number says.
    #[serde(default)]
    validation_loss: Option<f64>,
}

impl Known {
    /// Whether the run makes it again.
    fn is_to_come(&self, run: &Described<'_>) -> bool {
        match self.validation_loss {
            Some(_) if !run.validates => self.step > run.step,
            _ => self.step >= run.step,
        }
    }
}

/// Finds what stays in a file of rows when `run` goes on with it.
///
/// Fails where a line is none of ours.
fn keep(path: &Path, form: Form, run: &Described<'_>) -> Result<Kept, Failure> {
    let shown = path.display();
    let unread = |e: io::Error| Failure::new(Exit::BadInput, format!("--metrics {shown}: {e}"));
    let mut from = BufReader::new(File::open(path).map_err(unread)?);
    let mut kept = Kept::default();
    let (mut at, mut is_over, mut number) = (0u64, false, 0u64);
    let mut line = Vec::new();
    loop {
        line.clear();
        let n = io::Read::take(&mut from, LONGEST as u64)
            .read_until(b'\n', &mut line)
            .map_err(unread)?;
        if n == 0 {
            return Ok(kept);
        }
        number += 1;
        let is_whole = line.ends_with(b"\n");
        let is_header = form == Form::Csv && number == 1;
        let known = match is_header {
            true => None,
            false => parse(&line, form),
        };
        let fits = known.is_some() || is_header && line == HEADER.as_bytes();
        if !fits && is_whole || line.len() == LONGEST {
            let what = format!("--metrics {shown}: line {number} is no row of metrics");
            let help = "name another file; this one is left as it is";
            return Err(Failure::new(Exit::BadInput, what).help(help));
        }
        // A line that was cut off goes.
        if !is_whole {
            return Ok(kept);
        }
        at += n as u64;
        kept.rows += u64::from(known.is_some());
        is_over |= known.as_ref().is_some_and(|k| k.is_to_come(run));
        if !is_over {
            kept.bytes = at;
            let skipped = known.and_then(|k| k.skipped_steps);
            kept.skipped = kept.skipped.max(skipped.unwrap_or(0));
        }
    }
}

fn parse(line: &[u8], form: Form) -> Option<Known> {
    match form {
        Form::JsonLines => serde_json::from_slice(line).ok(),
        Form::Csv => {
            let mut rows = csv::ReaderBuilder::new();
            let mut rows = rows.has_headers(false).from_reader(line);
            let columns: csv::StringRecord = HEADER.trim_end().split(',').collect();
            let row = rows.records().next()?.ok()?;
            row.deserialize(Some(&columns)).ok()
        }
    }
}
