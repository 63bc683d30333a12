//! The journal of an elastic run, in its folder of checkpoints: what a run that ends before it is
//! done leaves to the one that goes on. Who starts that does not matter: the keeper of the run, a
//! launcher that has fewer hosts left or more again, or somebody who gives the same command once more.

use super::among::Setting;
use super::elastic::{self, Continued};
use super::left;
use crate::args::RunArgs;
use crate::commands::again;
use crate::failure::{Exit, Failure};
use crate::plan_file::Loaded;
use crate::{document, files, outputs, report};
use ir::counted;
use serde::{Deserialize, Serialize};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const NAME: &str = "elastic.json";
/// Least that a process waits for process 0 to say what it goes on with: that may have to plan first.
const LEAST_TO_BE_TOLD: Duration = Duration::from_secs(120);
/// How often it looks.
const LOOK: Duration = Duration::from_millis(50);

/// The facts of a run that the next one needs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Journal {
    /// What decides what is trained, by the name of its flag: another run has something else.
    job: Vec<(String, String)>,
    /// With what it began.
    began: Part,
    /// With what it was made last.
    pub now: Part,
    /// The step after its last one.
    last: u64,
    /// Where the learning rate's decay ends.
    total_steps: Option<u64>,
    /// Steps before its first one.
    first: u64,
    /// The number of the newest checkpoint that was in the folder before: those up to it are another
    /// run's.
    before: Option<u64>,
    /// How often processes were lost.
    pub losses: u32,
}

/// A plan, and who plays it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// The plan's file.
    pub plan: PathBuf,
    /// Its ranks.
    pub ranks: usize,
    /// The processes that have them.
    pub processes: usize,
}

/// Everything that decides what is trained.
fn job(args: &RunArgs, loaded: &Loaded) -> Vec<(String, String)> {
    let path = |p: &Option<PathBuf>| {
        p.as_ref()
            .map_or("none".into(), |p| p.display().to_string())
    };
    let all = [
        ("the plan", loaded.hash.clone()),
        ("--data", args.data.display().to_string()),
        ("--tokenizer", path(&args.tokenizer)),
        ("--steps", args.steps.to_string()),
        ("--weights", path(&args.weights)),
        ("--resume", path(&args.resume)),
    ];
    all.map(|(name, value)| (name.to_string(), value)).into()
}

/// The folder of checkpoints of an elastic run that was not told how it goes on.
fn folder(args: &RunArgs) -> Option<&Path> {
    let folder = args.checkpoint.as_deref();
    folder.filter(|_| args.elastic && args.continued.is_none())
}

impl Journal {
    /// The journal in a folder of checkpoints, where a run there is not done.
    pub fn read(folder: &Path) -> Result<Option<Self>, Failure> {
        let path = folder.join(NAME);
        if !path.exists() {
            return Ok(None);
        }
        let text = files::read_text(&path, "journal", files::SMALL)?;
        document::json(&path.display().to_string(), &text, "journal").map(Some)
    }

    /// Writes it, whole or not at all.
    pub fn write(&self, folder: &Path) -> Result<(), Failure> {
        outputs::write_atomic(&folder.join(NAME), document::to_json(self)?.as_bytes())
    }

    /// Begins the journal of a run whose first step has `first` before it.
    pub fn begin(
        args: &RunArgs,
        setting: &Setting,
        (loaded, first): (&Loaded, u64),
    ) -> Result<(), Failure> {
        let Some(folder) = folder(args) else {
            return Ok(());
        };
        let ranks = left::ranks_of(loaded);
        let began = Part {
            plan: args.plan.clone(),
            ranks,
            processes: setting.counts(ranks).0,
        };
        let last = first + args.steps;
        let newest = runtime::checkpoint::numbered(folder)
            .into_iter()
            .next_back();
        let journal = Journal {
            job: job(args, loaded),
            now: began.clone(),
            began,
            last,
            total_steps: args.total_steps.or(args.resume.is_none().then_some(last)),
            first,
            before: newest.map(|(number, _)| number),
            losses: 0,
        };
        journal.write(folder)
    }

    /// Fails where it is of a run that other arguments asked for.
    fn is_of(&self, args: &RunArgs, loaded: &Loaded, folder: &Path) -> Result<(), Failure> {
        let now = job(args, loaded);
        let pairs = self.job.iter().zip(&now);
        let Some(((name, before), (_, now))) = pairs.into_iter().find(|(a, b)| a != b) else {
            return Ok(());
        };
        let shown = folder.display();
        let what = format!(
            "--checkpoint {shown}: the folder has an elastic run that is not done and is another one: {name} was {before}, and is {now} here"
        );
        Err(Failure::new(Exit::Usage, what).help(format!(
            "give the arguments of that run to go on with it, name another folder, or remove {} to leave it as it is",
            folder.join(NAME).display()
        )))
    }

    /// The newest checkpoint that is whole, with its step, and what is wrong with those after it.
    fn newest(&self, folder: &Path) -> (Option<(PathBuf, u64)>, Vec<String>) {
        let mut damaged = Vec::new();
        let all = runtime::checkpoint::numbered(folder).into_iter().rev();
        for (_, path) in all.filter(|(n, _)| self.before.is_none_or(|b| *n > b)) {
            match runtime::checkpoint::verify(&path) {
                Ok(found) => return (Some((path, found.step())), damaged),
                Err(all) => damaged.extend(all.first().map(ToString::to_string)),
            }
        }
        (None, damaged)
    }
}

/// Goes on with the run whose journal is in the folder of checkpoints, which does not come back.
/// Does nothing where there is none.
pub fn go_on(args: &RunArgs, setting: &Setting, loaded: &Loaded) -> Result<(), Failure> {
    let Some(folder) = folder(args) else {
        return Ok(());
    };
    let Some(mut journal) = Journal::read(folder)? else {
        return Ok(());
    };
    journal.is_of(args, loaded, folder)?;
    let before = journal.now.clone();
    let processes = match args.after_loss {
        true => before.processes.saturating_sub(1),
        false => setting.counts(journal.began.ranks).0,
    };
    if processes == 0 {
        return Err(Failure::new(
            Exit::RunFailed,
            "no process of the run is left",
        ));
    }
    if processes < before.processes {
        journal.losses += 1;
    }
    // Before anything that takes long: who is killed meanwhile is lost, too.
    journal.now.processes = processes;
    journal.write(folder)?;
    let (newest, damaged) = journal.newest(folder);
    let step = newest.as_ref().map_or(journal.first, |(_, step)| *step);
    if step >= journal.last {
        return finished(folder, newest);
    }
    let began = Instant::now();
    let mut planned = String::new();
    journal.now = if processes == journal.began.processes {
        journal.began.clone()
    } else if processes == before.processes {
        before.clone()
    } else {
        let ranks = journal.began.ranks * processes / journal.began.processes.max(1);
        let new = left::plan_for(ranks.max(1), loaded)?;
        let ranks = left::ranks_of(&new);
        let plan = args
            .output
            .with_extension(format!("plan-{}-of-{ranks}-ranks.json", journal.losses));
        again::write(Some(&plan), &new)?;
        planned = format!(
            ", planned again in {:.1} s ({})",
            began.elapsed().as_secs_f64(),
            plan.display()
        );
        Part {
            plan,
            ranks,
            processes: match setting {
                Setting::Starts(_) => processes.min(ranks),
                _ => processes,
            },
        }
    };
    journal.write(folder)?;
    let continued = Continued {
        plan: journal.now.plan.clone(),
        steps: journal.last - step,
        total_steps: journal.total_steps,
        resume: newest.as_ref().map(|(path, _)| path.clone()),
        processes: journal.now.processes,
        losses: journal.losses,
    };
    let damaged: String = (damaged.iter())
        .map(|d| format!(" Passed over {d}."))
        .collect();
    let source = match (&newest, &args.resume) {
        (Some((path, _)), _) => {
            let path = path.display();
            format!("The newest checkpoint that is whole is {path}.")
        }
        (None, Some(path)) => format!(
            "There is no checkpoint yet: the run begins again with {}.",
            path.display()
        ),
        (None, None) => "There is no checkpoint yet: the run begins anew.".into(),
    };
    let of = match before.ranks == journal.now.ranks {
        true => String::new(),
        false => format!(" in place of {}", before.ranks),
    };
    let aside = elastic::records_aside(args, journal.losses);
    crate::say(format_args!(
        "going on with the run of {}, with {}{of}, from step {step}{planned}.\n{}{aside}",
        folder.join(NAME).display(),
        counted(journal.now.ranks as u64, "rank"),
        report::wrapped(&format!("  {source}{damaged}")),
    ));
    let e = elastic::again(args, &continued)?.exec();
    let what = format!("the run could not go on: {e}");
    Err(Failure::new(Exit::RunFailed, what))
}

/// Ends the journal of a run that was killed between its last step and its end.
fn finished(folder: &Path, newest: Option<(PathBuf, u64)>) -> Result<(), Failure> {
    end(folder);
    let path = newest.map_or(folder.to_path_buf(), |(path, _)| path);
    let what = format!(
        "the run was killed after its last step: {} has the training state, and what else it was to write is not there",
        path.display()
    );
    let help = "`meshwright checkpoint convert` makes weights of a training state; the same command now begins another run";
    Err(Failure::new(Exit::RunFailed, what).help(help))
}

/// Removes the journal of a run that is done.
pub fn end(folder: &Path) {
    // One that stays is found by the next run, which says what it is.
    let _ = std::fs::remove_file(folder.join(NAME));
}

/// Says to the processes of a launcher with what process 0 goes on, until it is dropped.
pub struct Told(PathBuf);

impl Drop for Told {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The file by which the processes of this run of a launcher are told.
fn told_in(args: &RunArgs, setting: &Setting) -> Option<PathBuf> {
    let Setting::Launched(launched) = setting else {
        return None;
    };
    let folder = args.checkpoint.as_deref().filter(|_| args.elastic)?;
    let hash = blake3::hash(launched.key.as_bytes()).to_hex();
    Some(folder.join(format!("elastic-{}.json", &hash[..16])))
}

/// Removes what an earlier process 0 of the same name may have left.
pub fn untell(args: &RunArgs, setting: &Setting) {
    if let Some(path) = told_in(args, setting) {
        let _ = std::fs::remove_file(path);
    }
}

/// Tells the other processes of a launcher what process 0 was told, or found in the journal.
pub fn tell(args: &RunArgs, setting: &Setting) -> Result<Option<Told>, Failure> {
    let Some(path) = told_in(args, setting) else {
        return Ok(None);
    };
    let told = Continued {
        plan: args.plan.clone(),
        steps: args.steps,
        total_steps: args.total_steps,
        resume: args.resume.clone(),
        processes: args.processes.unwrap_or(1),
        losses: args.losses,
    };
    outputs::write_atomic(&path, document::to_json(&told)?.as_bytes())?;
    Ok(Some(Told(path)))
}

/// The arguments of a process with a number above 0: those that process 0 of an elastic run tells it,
/// once it does, and its own of any other run.
pub fn told(args: &RunArgs, setting: &Setting) -> Result<RunArgs, Failure> {
    let Some(path) = told_in(args, setting) else {
        return Ok(args.clone());
    };
    let until = Instant::now() + Duration::from_secs(args.time_out).max(LEAST_TO_BE_TOLD);
    while !path.exists() {
        if Instant::now() > until {
            let what = format!(
                "process 0 did not say what it goes on with, by the file {}",
                path.display()
            );
            let help =
                "see its messages; the folder of --checkpoint must be one that all hosts have";
            return Err(Failure::new(Exit::RunFailed, what).help(help));
        }
        std::thread::sleep(LOOK);
    }
    let mut args = args.clone();
    args.continued = Some(path);
    elastic::continued(&args)
}
