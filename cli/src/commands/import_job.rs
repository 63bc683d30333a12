//! `import-job`: a job of other software, read from its own files: what it should take, where its time
//! goes, and what the search would change of it.

mod changes;
mod measurement;
mod request;
mod words;

use super::{again, spinner};
use crate::args::ImportJobArgs;
use crate::failure::{Exit, Failure};
use crate::report::account::Accounted;
use crate::{files, outputs, report};
use changes::Changes;
use frameworks::Framework;
use ir::counted;
use ir::plan::Plan;
use ir::training::TrainingGraph;
use jobs::{Given, JobError, Reading, Variables};
use measurement::Recalibration;
use request::{Priced, Request};
use serde::Serialize;
use std::path::Path;

/// A job is the best of its kind where nothing is faster by more than this share.
const BEST: f64 = 0.01;

/// Everything that is known of a job.
struct Imported {
    reading: Reading,
    request: Request,
    job: Priced,
    accounted: Accounted,
    measured: Option<Recalibration>,
    /// The finding of the search by flags alone, and with other code where that is faster; none
    /// where nothing was searched.
    found: Option<Found>,
    /// The price of a device for an hour.
    price: Option<f64>,
}

/// The result of a search.
struct Found {
    /// The share of the step that overlaps alone save, where the job has left some out.
    overlap_saves: Option<f64>,
    by_flags: Result<Better, String>,
    /// The gain of other code beside flags, and which code.
    with_code: Option<(Better, String)>,
}

/// A plan of the same software.
struct Better {
    plan: Priced,
    changes: Changes,
    /// The share of the job's step that it saves; below zero where it is slower.
    saves: f64,
}

/// The worth of a change, in the price's currency.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Worth {
    /// The cost of a thousand steps of the job.
    thousand_steps: f64,
    /// The saving by the change.
    saved: f64,
}

pub fn run(args: &ImportJobArgs) -> Result<(), Failure> {
    let mut inputs = vec![args.job.as_path()];
    let more = [&args.model, &args.log, &args.trace];
    inputs.extend(more.into_iter().flatten().map(|p| p.as_path()));
    let written = [&args.output, &args.best].into_iter().flatten();
    outputs::check(&written.map(|p| p.as_path()).collect::<Vec<_>>(), &inputs)?;
    let price = args.price.as_deref().map(price).transpose()?;
    let reading = read(args)?;
    let request = request::request(args, &reading.job)?;
    let bar = spinner("pricing the job");
    let job = request.described(&request.pins, &request.other)?;
    let plan = &job.loaded.plan;
    possible(plan, &job.loaded.training)?;
    let accounted = Accounted::of(&job.loaded)?;
    let measured = measurement::read(args, &reading)?;
    let measured = measured
        .map(|m| measurement::compared(&m, &job))
        .transpose()?;
    bar.set_message("searching for something better");
    let found = match args.no_search {
        true => None,
        false => Some(search(&reading, &request, &job)?),
    };
    let mut measured = measured;
    if let Some(m) = measured.as_mut().filter(|m| (m.factor - 1.0).abs() > BEST) {
        bar.set_message("looking for what could be at fault");
        let better = found.as_ref().and_then(|f| f.by_flags.as_ref().ok());
        m.causes = measurement::causes(m.step_s, &job, better.map(|b| &b.plan))?;
    }
    bar.finish_and_clear();
    let imported = Imported {
        reading,
        request,
        job,
        accounted,
        measured,
        found,
        price,
    };
    write(args, &imported)?;
    match args.json {
        true => words::json(args, &imported),
        false => words::print(args, &imported),
    }
}

/// Refuses a job that would compute faster than the devices can: its sizes are beyond those whose times
/// are known.
fn possible(plan: &Plan, training: &TrainingGraph) -> Result<(), Failure> {
    let step_s = plan.predicted.step_time_s.0;
    let Some(mistake) = report::plan::mistake(plan, training, step_s, "predicted") else {
        return Ok(());
    };
    let what = format!(
        "the job cannot be predicted: with {} of {} tokens a step it is beyond the sizes whose times are known, and its MFU would be {} ({})",
        counted(plan.train.global_batch, "sample"),
        plan.train.sequence,
        report::percent(plan.predicted.mfu),
        mistake.strip_prefix("mistake: ").unwrap_or(&mistake)
    );
    Err(Failure::new(Exit::BadInput, what).help(
        "look at the length of sequences, the batch and the sizes of the model in the file, and at the peak of the cluster's devices",
    ))
}

/// Whether software that is named with its version is of 2024 or before: Megatron-Core 0.18 is of 2026.
fn is_older(software: &str) -> bool {
    published::software::parse(software).is_ok_and(|of| of.version.as_str() < "2025")
}

/// Reads the job, with the files that it names.
fn read(args: &ImportJobArgs) -> Result<Reading, Failure> {
    let text = files::read_text(&args.job, "job", files::LARGE)?;
    let name = args.job.display().to_string();
    let given = Given {
        variables: settings(&args.set)?,
        sequence: args.sequence,
        has_model: args.model.is_some(),
        is_older: args.made_for.as_deref().is_some_and(is_older),
    };
    let folder = args.job.parent().unwrap_or(Path::new(""));
    // From the folder of the script, else from here.
    let open = |path: &str| {
        let near = folder.join(path);
        let path = if near.is_file() {
            near.as_path()
        } else {
            Path::new(path)
        };
        files::read_text(path, "configuration", files::SMALL).map_err(|e| e.to_string())
    };
    let read = jobs::read(&name, &text, &given, &open);
    let mut reading = read.map_err(|e| refused(e, &name, &text, &args.set))?;
    if args.made_for.is_some() {
        // A version that is named is taken as it is.
        reading.job.usual.clear();
        reading.notes.retain(|n| n.name != "attention");
    }
    Ok(reading)
}

/// The failure of a job that cannot be read, with its line. Where what is wrong there came from a
/// variable that a flag set, the flag is to be corrected and not the file.
fn refused(e: JobError, name: &str, text: &str, set: &[String]) -> Failure {
    let line = e.line.filter(|_| e.file == name);
    let words = line.and_then(|line| text.lines().nth(line.saturating_sub(1)));
    let of_flag = words.and_then(|words| {
        let is_at_fault = |set: &&String| gave_it(words, set, &e.problem);
        set.iter().find(is_at_fault)
    });
    let exit = match e.file.as_str() {
        "--set" => Exit::Usage,
        _ if of_flag.is_some() => Exit::Usage,
        _ => Exit::BadInput,
    };
    let failure = Failure::new(exit, &e).help(match of_flag {
        Some(set) => {
            format!("the value came from a variable that a flag sets: correct --set {set}")
        }
        None => e.help.clone(),
    });
    match line {
        None => failure,
        Some(line) => {
            let before = text.split_inclusive('\n').take(line.saturating_sub(1));
            let start: usize = before.map(str::len).sum();
            let length = text
                .get(start..)
                .and_then(|t| t.lines().next())
                .map_or(0, str::len);
            failure.place(name, text, start, length, "here")
        }
    }
}

/// Whether a problem with a line of a script came with the variable of `NAME=VALUE`: where it names
/// arguments, the variable is the value of one of them, else it has the variable's value.
fn gave_it(line: &str, set: &str, problem: &str) -> bool {
    let value = set.split_once('=').map_or("", |(_, value)| value);
    let quoted: Vec<&str> = problem.split('`').skip(1).step_by(2).collect();
    let names_arguments = quoted.iter().any(|q| q.starts_with('-'));
    let mut argument = "";
    line.split(|c: char| c.is_whitespace() || matches!(c, '"' | '\''))
        .any(|word| {
            if word.starts_with('-') {
                argument = word.split('=').next().unwrap_or(word);
            }
            let at_fault = if names_arguments { argument } else { value };
            has_variable(word, set) && quoted.contains(&at_fault)
        })
}

/// Whether a line of a script uses the variable of `NAME=VALUE`.
fn has_variable(line: &str, set: &str) -> bool {
    let name = set.split('=').next().unwrap_or_default();
    let mut uses = line.match_indices('$').map(|(at, _)| &line[at + 1..]);
    uses.any(|rest| {
        let rest = rest.strip_prefix('{').unwrap_or(rest);
        let after = rest.strip_prefix(name).filter(|_| !name.is_empty());
        after.is_some_and(|a| !a.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_'))
    })
}

/// Reads `--set NAME=VALUE`.
fn settings(texts: &[String]) -> Result<Variables, Failure> {
    let one = |text: &String| {
        let found = text.split_once('=').filter(|(name, _)| !name.is_empty());
        let (name, value) = found.ok_or_else(|| {
            Failure::new(Exit::Usage, format!("--set {text}: expected NAME=VALUE"))
                .help("give a variable as --set NNODES=8")
        })?;
        Ok((name.to_string(), value.to_string()))
    };
    texts.iter().map(one).collect()
}

/// Reads a price of a device for an hour.
fn price(text: &str) -> Result<f64, Failure> {
    let number = text.strip_suffix("/device-hour").unwrap_or(text).trim();
    let price = number.parse::<f64>().ok();
    price.filter(|p| p.is_finite() && *p >= 0.0).ok_or_else(|| {
        Failure::new(
            Exit::Usage,
            format!("--price {text}: `{number}` is no price"),
        )
        .help("give the price of one device for an hour, as --price 2.50")
    })
}

/// The part that the model's code says under some software, as keys of pins: flags do not change
/// it.
fn in_code(reading: &Reading, framework: Framework) -> Option<(&'static str, &'static str)> {
    let is_flag = |name: &String| name.replace('_', "-").contains("gradient-checkpointing");
    match framework {
        Framework::DeepSpeed if !reading.settings.keys().any(is_flag) => Some((
            "recompute",
            "which blocks are recomputed (deepspeed.checkpointing.checkpoint, or gradient_checkpointing_enable() of a Hugging Face model)",
        )),
        _ => None,
    }
}

fn search(reading: &Reading, request: &Request, job: &Priced) -> Result<Found, Failure> {
    let framework = reading.job.framework;
    let code = in_code(reading, framework);
    let fixed = request.pins.iter();
    let fixed = fixed
        .filter(|p| code.is_some_and(|(key, _)| p.starts_with(key)))
        .cloned();
    let fixed: Vec<String> = fixed.collect();
    let better = |plan: Priced| {
        let saves = 1.0 - plan.step_s() / job.step_s().max(f64::MIN_POSITIVE);
        Better {
            changes: changes::changes(&reading.settings, job, &plan),
            plan,
            saves,
        }
    };
    let by_flags = request.searched(&fixed)?;
    let by_flags = by_flags.map(better).map_err(|e| e.to_string());
    let with_code = match code {
        None => None,
        Some((_, what)) => request
            .searched(&[])?
            .ok()
            .map(|p| (better(p), what.to_string())),
    };
    let step_s = |b: &Better| b.plan.step_s();
    let limit = by_flags
        .as_ref()
        .map_or(f64::INFINITY, |b| step_s(b) * (1.0 - BEST));
    let overlap = request.overlapping.as_ref();
    let overlap = overlap
        .map(|all| request.described(&request.pins, all))
        .transpose()?;
    let overlap = overlap.filter(Priced::fits);
    Ok(Found {
        overlap_saves: overlap.map(|p| 1.0 - p.step_s() / job.step_s().max(f64::MIN_POSITIVE)),
        by_flags,
        with_code: with_code.filter(|(b, _)| step_s(b) < limit),
    })
}

fn write(args: &ImportJobArgs, imported: &Imported) -> Result<(), Failure> {
    if let Some(path) = &args.output {
        if let Some(first) = imported.job.violations.first() {
            let what = format!(
                "{}: the job's plan is not written, for it cannot be executed here: {first}",
                path.display()
            );
            return Err(Failure::new(Exit::Infeasible, what)
                .help("without -o the job is predicted all the same; --best writes what the search finds in its place"));
        }
        again::write(Some(path), &imported.job.loaded)?;
    }
    if let (Some(path), Some(found)) = (&args.best, &imported.found) {
        match &found.by_flags {
            Ok(better) => again::write(Some(path), &better.plan.loaded)?,
            Err(e) => {
                let what = format!("{}: there is no plan to write: {e}", path.display());
                return Err(Failure::new(Exit::Infeasible, what).help("use more hosts (--hosts)"));
            }
        }
    }
    Ok(())
}

impl Imported {
    /// The measured step over the predicted one; 1 where nothing was measured.
    fn factor(&self) -> f64 {
        self.measured.as_ref().map_or(1.0, |m| m.factor)
    }

    /// The worth of saving a share of the job's step.
    fn worth(&self, saves: f64) -> Option<Worth> {
        let devices = f64::from(self.request.cluster.n_devices());
        let hours = 1e3 * self.job.step_s() * self.factor() / 3600.0;
        let thousand_steps = self.price? * devices * hours;
        Some(Worth {
            thousand_steps,
            saved: saves * thousand_steps,
        })
    }

    /// The finding of the search by flags, where it is worth a change.
    fn change(&self) -> Option<&Better> {
        let better = self.found.as_ref()?.by_flags.as_ref().ok()?;
        (better.saves > BEST || !self.job.fits()).then_some(better)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_is_at_fault_for_its_own_value_alone() {
        let line = "--tensor-model-parallel-size $TP --hidden-size abc --seq-length=${SEQ}";
        let of = |set: &str, problem: &str| gave_it(line, set, problem);
        let size = "`--hidden-size` is `abc`, expected a whole number from 1";
        assert!(!of("TP=2", size) && !of("TP=abc", size) && !of("SEQ=1", size));
        let degree = "`--tensor-model-parallel-size` is `x`, expected a whole number from 1";
        assert!(of("TP=x", degree) && !of("SEQ=x", degree));
        let length = "`--seq-length` is `x`, expected a whole number from 1";
        assert!(of("SEQ=x", length) && !of("TP=x", length));
        // No argument is named, so it is told by the value.
        let hosts = "the number of hosts is `x`, expected a whole number from 1";
        assert!(gave_it("torchrun --nnodes $N train.py", "N=x", hosts));
        assert!(!gave_it("torchrun --nnodes x --a $N", "N=2", hosts));
    }

    #[test]
    fn variables_are_told_by_their_whole_name() {
        let has = |line| has_variable(line, "TP=x");
        assert!(has("--tensor-model-parallel-size $TP \\") && has("${TP} 1") && has("${TP:-2}"));
        assert!(!has("$TP2") && !has("TP=4") && !has("$T") && !has_variable("$ 1", "=1"));
    }
}
