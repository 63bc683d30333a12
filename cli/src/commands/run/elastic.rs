//! `--elastic`: a run that has lost processes plans again for the ranks that are left. It goes on
//! from the states that these have in memory, where they have all of them, or from its newest
//! checkpoint.
//!
//! Process 0 becomes another program: the same command with what has changed in a file beside the
//! run's output. So nothing of the old run is left in it, and the processes that it starts then
//! find the same file. What becomes of a run whose process 0 is lost is in `keeper` and `journal`.

use super::among::Company;
use super::journal::{self, Journal, Part};
use super::{keeper, left};
use crate::args::RunArgs;
use crate::commands::again;
use crate::failure::{Exit, Failure};
use crate::plan_file::Loaded;
use crate::report::degrees::Degrees;
use crate::{document, files, outputs, report};
use ir::counted;
use runtime::checkpoint::{Rescued, Unrescued};
use runtime::record;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// All that is otherwise than on the command line.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Continued {
    /// The plan.
    pub plan: PathBuf,
    /// Steps that are left.
    pub steps: u64,
    /// Where the learning rate's decay ends.
    pub total_steps: Option<u64>,
    /// The checkpoint to go on from; none where there is none yet.
    pub resume: Option<PathBuf>,
    /// The processes that it has; the ones that a launcher started are not counted.
    pub processes: usize,
    /// How often ranks were lost.
    pub losses: u32,
    /// When the last one was, in milliseconds since 1970; none where nobody knows.
    pub lost_at_ms: Option<u64>,
    /// The name of the run.
    pub run: Option<String>,
    /// The folder of the records that it has unasked.
    #[serde(default)]
    pub records: Option<PathBuf>,
}

/// The arguments of a run that goes on after a loss; of any other those of the command line.
pub fn continued(args: &RunArgs) -> Result<RunArgs, Failure> {
    let mut args = args.clone();
    let Some(path) = &args.continued else {
        return Ok(args);
    };
    let text = files::read_text(path, "continuation", files::SMALL)?;
    let c: Continued = document::json(&path.display().to_string(), &text, "continuation")?;
    args.plan = c.plan;
    args.steps = c.steps;
    args.total_steps = c.total_steps;
    args.resume = c.resume.or(args.resume);
    args.processes = args.processes.map(|_| c.processes);
    args.losses = c.losses;
    args.lost_at_ms = c.lost_at_ms;
    args.run = c.run;
    if let (None, Some(records)) = (&args.record, c.records) {
        args.record = Some(records);
        args.records_by_default = true;
    }
    Ok(args)
}

/// Refuses an elastic run of processes that an MPI library ends together, and one of hosts that are
/// not all equal, for a part of which nothing is planned.
pub fn check(args: &RunArgs, loaded: &Loaded) -> Result<(), Failure> {
    let usage = |what: String, help: &str| Err(Failure::new(Exit::Usage, what).help(help));
    if args.elastic && args.mpi {
        let help = "leave --mpi out: processes that mpirun starts then talk over TCP";
        let what = "--elastic: an MPI library ends all processes with the first that dies";
        return usage(what.into(), help);
    }
    match left::cluster_of(loaded.plan.cluster.clone(), 1) {
        Err(why) if args.elastic => {
            let what = format!(
                "--elastic: nothing can be planned for a part of {}: {why}",
                loaded.plan.cluster.name
            );
            usage(
                what,
                "leave --elastic out, and compile for what is left when ranks are lost",
            )
        }
        _ => Ok(()),
    }
}

/// The processes with which a run went on last, and how often it had lost some by then, by the file
/// that told it so: its journal may not have been written, as on a full disk. Nothing where there
/// is no such file, or it is another run's.
pub fn went_on_with(args: &RunArgs, run: &str) -> Option<(usize, u32)> {
    let text = files::read_text(&file(args), "continuation", files::SMALL).ok()?;
    let c: Continued = serde_json::from_str(&text).ok()?;
    (c.run.as_deref() == Some(run)).then_some((c.processes, c.losses))
}

/// Where a part of a run began, and how far it came.
pub struct SoFar {
    /// The step at which it began.
    pub first: u64,
    /// The checkpoint that it goes on from.
    pub resumed: Option<PathBuf>,
    /// The steps that are known to be done, by this part and those before it.
    pub done: u64,
    /// The number of the newest checkpoint that was in its folder before.
    pub before: Option<u64>,
    /// The checkpoints that it wrote, with their steps, newest last: another run's in the same
    /// folder is not what goes on.
    pub written: Vec<(PathBuf, u64)>,
    /// The checkpoint of what the ranks that are left had in memory, or why there is none.
    pub rescued: Option<Result<Rescued, Unrescued>>,
    /// Whether somebody has asked the run to end.
    pub is_asked_to_end: Arc<AtomicBool>,
    /// The run's journal, by which the same command goes on with it.
    pub journal: Option<Journal>,
}

impl SoFar {
    /// Nothing so far of a run whose steps begin with this one.
    pub fn begin(args: &RunArgs, first: u64) -> Self {
        let folder = args.checkpoint.as_deref();
        let before = folder.and_then(|f| Some(runtime::checkpoint::numbered(f).last()?.0));
        SoFar {
            first,
            resumed: None,
            done: first,
            before,
            written: Vec::new(),
            rescued: None,
            is_asked_to_end: Arc::default(),
            journal: folder
                .filter(|_| args.elastic)
                .and_then(|folder| Journal::read(folder).ok()?),
        }
    }
    /// The same in a process that leaves it to process 0 to read what the run goes on from; none
    /// where that does not say of which step it is.
    pub fn begin_elsewhere(args: &RunArgs) -> Option<Self> {
        let first = match &args.resume {
            None => 0,
            Some(path) => {
                let newest = runtime::checkpoint::all(path).into_iter().next()?;
                runtime::checkpoint::summary(&newest).ok()?.origin.step
            }
        };
        Some(Self::begin(args, first))
    }
    /// The step of the newest checkpoint that the run wrote to this folder. It may have been finished
    /// when nobody asked for it any more.
    pub fn newest_step(&self, folder: &Path) -> Option<u64> {
        let newest_first = runtime::checkpoint::numbered(folder).into_iter().rev();
        let mut own = newest_first.take_while(|(n, _)| Some(*n) > self.before);
        own.find_map(|(_, path)| runtime::checkpoint::summary(&path).ok())
            .map(|of| of.origin.step)
    }
    /// The newest checkpoint and what it does not have, in words, where no later one could be
    /// written to this folder.
    pub fn without_last(&self, folder: &Path) -> String {
        let lost = |step: u64| match self.done.saturating_sub(step) {
            0 => "no step is lost".to_string(),
            1 => "the step after it is lost".to_string(),
            n => format!("the {n} steps after it are lost"),
        };
        let resumed = self.resumed.iter().map(|path| (path.clone(), self.first));
        let rescued = self.rescued.iter().flatten();
        let rescued = rescued.map(|r| (r.path.clone(), r.step));
        let all = resumed.chain(self.written.iter().cloned()).chain(rescued);
        match newest_whole(all.collect()).0 {
            Some((path, step)) => format!(
                "the newest whole checkpoint is {}, of step {step}: {}",
                path.display(),
                lost(step)
            ),
            None => {
                let n = self.done.saturating_sub(self.first);
                format!(
                    "{} has no whole checkpoint of this run: its {} lost",
                    folder.display(),
                    match n {
                        1 => "step is".to_string(),
                        n => format!("{n} steps are"),
                    }
                )
            }
        }
    }
    /// The checkpoint to go on from and its step, and where its states are from, in words.
    ///
    /// Fails where it wrote some, and none of them is whole.
    fn source(&self, args: &RunArgs) -> Result<(Option<PathBuf>, u64, String), Failure> {
        let reason = match &self.rescued {
            Some(Ok(Rescued { step, path })) => {
                let words = format!(
                    "The ranks that are left had all states in memory: no step is lost ({}).",
                    path.display()
                );
                return Ok((Some(path.clone()), *step, words));
            }
            Some(Err(reason)) => unrescued(reason),
            None => "do not have all states in memory".into(),
        };
        let not = format!("The ranks that are left {reason}");
        let (newest, damaged) = newest_whole(self.written.clone());
        let whole = if damaged.is_empty() {
            ""
        } else {
            "that is whole "
        };
        let passed_over: String = (damaged.iter())
            .map(|d| format!(" Passed over {d}."))
            .collect();
        let began = self.first;
        let lost = |step: u64| steps_lost(self.done, step);
        Ok(match (newest, &args.resume) {
            (Some((path, step)), _) => {
                let words = format!(
                    "{not}.{passed_over} The newest checkpoint {whole}is {}.{}",
                    path.display(),
                    lost(step)
                );
                (Some(path), step, words)
            }
            (None, _) if !damaged.is_empty() => return Err(none_whole(&not, &damaged)),
            (None, Some(path)) => {
                let words = format!(
                    "{not}. The run begins again with {}.{}",
                    path.display(),
                    lost(began)
                );
                (Some(path.clone()), began, words)
            }
            (None, None) => {
                let words = format!(
                    "{not}. There is no checkpoint yet: the run begins anew.{}",
                    lost(began)
                );
                (None, began, words)
            }
        })
    }
}

/// The reason why nothing of what ranks have in memory is gone on from, in words that follow them.
pub fn unrescued(reason: &Unrescued) -> String {
    match reason {
        Unrescued::Missing(why) => format!("do not have all states in memory, as {why}"),
        Unrescued::Differing(e) => {
            format!("have all states in memory, but not all the same ones: {e}")
        }
        Unrescued::Unwritten(e) => {
            format!("have all states in memory, but these cannot be written: {e}")
        }
    }
}

/// The failure of an elastic run all of whose checkpoints are damaged: to begin again would have them
/// go in time, with what is still good in them.
pub fn none_whole(why: &str, damaged: &[String]) -> Failure {
    let what = format!(
        "{why}, and none of the run's checkpoints is whole: {}",
        damaged.join("; ")
    );
    Failure::new(Exit::BadInput, what).help(
        "put a whole copy of one of them in its place, and give the same command again; to begin again instead, move all of them to another folder first",
    )
}

/// The failure of an elastic run that cannot write what it goes on with, and how it stands, in
/// words.
pub fn without_room(failure: Failure, standing: &str) -> Failure {
    let what = format!("{failure}; {standing}");
    failure.saying(what).help(ROOM)
}

/// The way on of an elastic run that cannot write something.
pub const ROOM: &str = "make room there, or let files be written there again: the same command then goes on with the run";

/// The steps that are lost where a run had made so many and goes on from this one, as a sentence
/// behind others; nothing where there are none.
pub fn steps_lost(done: u64, step: u64) -> String {
    let lost = match done.saturating_sub(step) {
        0 => return String::new(),
        1 => "1 step is".to_string(),
        n => format!("{n} steps are"),
    };
    format!(
        " {lost} lost, which the run makes again: it had come to step {done}, and goes on from step {step}."
    )
}

/// Milliseconds since 1970.
fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |t| t.as_millis() as u64)
}

/// The time that a loss has held a run up until the step that was just made, in words; none where
/// nobody knows when it was.
pub fn held_up(args: &RunArgs, step: u64) -> Option<String> {
    let seconds = now_ms().checked_sub(args.lost_at_ms?)? as f64 / 1e3;
    Some(format!(
        "note: the loss has held the run up for {seconds:.1} s, until step {step} was made"
    ))
}

/// The degrees of a plan, and what it was predicted to take.
pub fn described(loaded: &Loaded) -> String {
    let degrees = Degrees::of(&loaded.plan, &loaded.training);
    let predicted = loaded.plan.predicted.step_time_s;
    format!("{degrees}, {predicted} predicted")
}

/// The newest of these checkpoints that is whole, and what is wrong with those after it.
fn newest_whole(mut written: Vec<(PathBuf, u64)>) -> (Option<(PathBuf, u64)>, Vec<String>) {
    let mut damaged = Vec::new();
    while let Some((path, _)) = written.last() {
        match runtime::checkpoint::verify(path) {
            Ok(_) => break,
            // Older ones have gone, as newer ones came.
            Err(_) if !path.exists() => {}
            Err(all) => damaged.extend(all.first().map(ToString::to_string)),
        }
        written.pop();
    }
    (written.pop(), damaged)
}

/// Plans for what is left and goes on, which does not come back. `lost` says who was lost.
pub fn go_on(
    args: &RunArgs,
    loaded: &Loaded,
    company: Company,
    (lost, from): (String, SoFar),
) -> Failure {
    let is_asked_to_end = Arc::clone(&from.is_asked_to_end);
    match prepared(args, loaded, company, (&lost, from)) {
        Ok(_) if is_asked_to_end.load(Ordering::Relaxed) => {
            let what = format!("interrupted after a loss: {lost}");
            Failure::new(Exit::Interrupted, what).help("to go on, give the same command again")
        }
        Ok(mut command) => {
            let e = command.exec();
            Failure::new(Exit::RunFailed, format!("{lost}; to go on failed: {e}"))
        }
        Err(failure) => {
            let what = format!("{lost}; the run could not go on without it: {failure}");
            failure.saying(what)
        }
    }
}

fn prepared(
    args: &RunArgs,
    loaded: &Loaded,
    company: Company,
    (lost, from): (&str, SoFar),
) -> Result<Command, Failure> {
    let (began, lost_at_ms) = (Instant::now(), now_ms());
    crate::say(format_args!("lost: {lost}"));
    let (gone, of) = company.lost();
    let all: Vec<usize> = gone.into_iter().collect();
    if let [some @ .., last] = &all[..]
        && !some.is_empty()
    {
        let some: Vec<String> = some.iter().map(usize::to_string).collect();
        crate::say(format_args!(
            "lost in all: processes {} and {last} of {of}, which were killed or do not answer",
            some.join(", ")
        ));
    }
    let gone = all.len().max(1);
    let n_ranks = left::ranks_of(loaded);
    // Ranks are shared evenly; a process that has more counts for what the others have.
    let left = (of - gone.min(of - 1)) * n_ranks / of;
    let new = left::plan_for(left.max(1), loaded)?;
    let searched = began.elapsed().as_secs_f64();
    let n_new = left::ranks_of(&new);
    let since = args.lost_at_ms.filter(|_| from.done <= from.first);
    let last = from.first + args.steps;
    let (resume, step, source) = from.source(args)?;
    let losses = args.losses + 1;
    let beside = |what: String| args.output.with_extension(what);
    let plan = beside(format!("plan-{losses}-of-{n_new}-ranks.json"));
    let without_room = |failure: Failure| match &args.checkpoint {
        Some(folder) => without_room(failure, &from.without_last(folder)),
        None => failure,
    };
    again::write(Some(&plan), &new).map_err(without_room)?;
    let total = args.total_steps.or(args.resume.is_none().then_some(last));
    let continued = Continued {
        plan: plan.clone(),
        steps: last.saturating_sub(step),
        total_steps: total,
        resume,
        processes: (of - gone.min(of - 1)).min(n_new),
        losses,
        // Counted from the first loss where no step was made since.
        lost_at_ms: Some(since.unwrap_or(lost_at_ms)),
        run: args.run.clone(),
        records: unasked(args),
    };
    journal::change(args, |journal| {
        journal.processes = continued.processes;
        journal.planned = Part {
            plan: plan.clone(),
            hash: new.hash.clone(),
            ranks: n_new,
            processes: continued.processes,
        };
        journal.losses = losses;
    });
    let [before, after] = [loaded, &new].map(described);
    let records = records_aside(args, losses);
    crate::say(format_args!(
        "going on with {} in place of {n_ranks}, from step {step}: planned again in {searched:.1} s ({}).\n{}\n  Before: {before}\n  Now:    {after}{records}",
        counted(n_new as u64, "rank"),
        plan.display(),
        report::wrapped(&format!("  {source}"))
    ));
    again(args, &continued).map_err(without_room)
}

/// Keeps what the ranks of a part of a run were doing, in words: of use when all is over, too.
pub fn records_aside(args: &RunArgs, losses: u32) -> String {
    // Nobody asked for a folder that is not there, as where a run of threads goes on.
    let is_there = |folder: &&PathBuf| !args.records_by_default || folder.is_dir();
    let Some(folder) = args.record.as_ref().filter(is_there) else {
        return String::new();
    };
    match record::set_aside(folder, &format!("before-loss-{losses}")) {
        Ok(aside) => {
            let until = match args.records_by_default {
                true => ", until the run is done (--record DIR keeps them)",
                false => "",
            };
            format!(
                "\n  records of the ranks before: {}{until}",
                aside.display()
            )
        }
        // No reason to end a run that goes on.
        Err(e) => format!("\n  records of the ranks before are not kept: {e}"),
    }
}

/// The folder of the records that a run has unasked.
pub fn unasked(args: &RunArgs) -> Option<PathBuf> {
    args.record.clone().filter(|_| args.records_by_default)
}

/// The same command with what has changed, in a file beside the run's output.
pub fn again(args: &RunArgs, continued: &Continued) -> Result<Command, Failure> {
    let file = file(args);
    outputs::write_atomic(&file, document::to_json(continued)?.as_bytes())?;
    let program = std::env::current_exe();
    let program = program.map_err(|e| Failure::new(Exit::RunFailed, e))?;
    let mut command = Command::new(program);
    let flag = OsString::from("--continued");
    let given: Vec<OsString> = std::env::args_os().skip(1).collect();
    let verb = given.first().cloned();
    command
        .args(verb)
        .arg(flag)
        .arg(&file)
        .args(without_continued(&given));
    Ok(command)
}

/// Removes the file with what had changed, once the run is done: nobody goes on with it any more.
pub fn forget(args: &RunArgs) {
    let _ = std::fs::remove_file(file(args));
    // Those of earlier runs, too: the folder is this one's.
    let folder = args.checkpoint.as_deref().filter(|_| args.elastic);
    let entries = folder.and_then(|folder| std::fs::read_dir(folder).ok());
    for entry in entries.into_iter().flatten().flatten() {
        let name = entry.file_name();
        let run = name
            .to_str()
            .and_then(|n| n.strip_prefix(MEASURED)?.strip_suffix(".json"));
        if run.is_some_and(|run| run.bytes().all(|b| b.is_ascii_hexdigit())) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// The beginning of the name of a file with a run's measurement.
const MEASURED: &str = "measured-";

/// The file in the folder of checkpoints that has the measurement of an elastic run until that is
/// written where it belongs.
fn measured(args: &RunArgs) -> Option<PathBuf> {
    let folder = args.checkpoint.as_deref().filter(|_| args.elastic)?;
    Some(folder.join(format!("{MEASURED}{}.json", args.run.as_deref()?)))
}

/// Keeps the measurement of an elastic run whose steps are all made, before its last checkpoint says
/// so: the same command finds it there if it does not get to its place.
pub fn keep_measurement(args: &RunArgs, text: &str) {
    // A folder that has no room for it may have room for the checkpoint, and the output has some, too.
    if let Some(path) = measured(args)
        && let Err(failure) = outputs::write_atomic(&path, text.as_bytes())
    {
        crate::say(format_args!("warning: {failure}"));
    }
}

/// The measurement that was kept.
pub fn kept_measurement(args: &RunArgs) -> Option<Vec<u8>> {
    std::fs::read(measured(args)?).ok()
}

fn file(args: &RunArgs) -> PathBuf {
    args.output.with_extension("continued.json")
}

/// Begins the run again without processes that were lost before all had met: what the others had to
/// do was nothing yet. Does not come back but with a failure.
pub fn begin_again(args: &RunArgs, what: &str, n_lost: usize) -> Failure {
    let folder = args.checkpoint.as_deref().unwrap_or(Path::new(""));
    if let Err(failure) = keeper::may_go_on(folder, what, n_lost) {
        return failure;
    }
    crate::say(format_args!("lost: {what}"));
    let failed =
        |e: std::io::Error| Failure::new(Exit::RunFailed, format!("{what}; to go on failed: {e}"));
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(e) => return failed(e),
    };
    let given: Vec<OsString> = std::env::args_os().skip(1).collect();
    let keeper = args.kept.map(|keeper| format!("--kept={keeper}"));
    let mut command = Command::new(program);
    command
        .args(given.first())
        .args(keeper)
        .arg(format!("--after-loss={n_lost}"))
        .args(as_given(&given));
    failed(command.exec())
}

/// The words that were given behind the verb, without those that a keeper or an earlier loss put there.
fn as_given(given: &[OsString]) -> &[OsString] {
    let mut rest = given.get(1..).unwrap_or_default();
    loop {
        let is_put = |w: &OsString| {
            let word = w.to_string_lossy();
            word.starts_with("--kept=") || word.starts_with("--after-loss=")
        };
        rest = match rest.first() {
            Some(w) if w == "--continued" => rest.get(2..).unwrap_or_default(),
            Some(w) if is_put(w) => &rest[1..],
            _ => return rest,
        };
    }
}

/// The words behind the verb, without what an earlier continuation put there.
fn without_continued(given: &[OsString]) -> &[OsString] {
    let rest = given.get(1..).unwrap_or_default();
    match rest.first().is_some_and(|w| w == "--continued") {
        true => rest.get(2..).unwrap_or_default(),
        false => rest,
    }
}
