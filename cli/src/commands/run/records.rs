//! The records of a run's ranks, and what the run itself says by them when it fails.
//!
//! A run has them unasked, in a [folder](super::folder) beside its output, as nobody asks for them
//! before a rank hangs or its process is killed. Such a folder ends no run: where it cannot be
//! written, there are none. It goes when the run has ended in order.

use super::among::Company;
use super::elastic::SoFar;
use crate::args::{DecayArg, RunArgs};
use crate::commands::doctor::{activity, few, names, when};
use crate::failure::{DIVERGED, Failure};
use crate::plan_file::Loaded;
use crate::report::place::{in_words, without_empty};
use ir::Rank;
use runtime::RuntimeError;
use runtime::record::{self, Doing, Fate, Finder, Recording, Seen, Verdict};
use std::collections::BTreeMap;
use std::path::Path;

/// Lost ranks whose places are said: more make no sentence that anybody reads.
const MOST_LOST: usize = 2;
/// Ranks that are named as waiting for one.
const MOST_WAITING: usize = 4;

/// Where the ranks of this process write what they are doing.
pub fn of_ranks(args: &RunArgs, loaded: &Loaded) -> Option<Recording> {
    args.record.clone().map(|folder| Recording {
        folder,
        plan: loaded.hash.clone(),
        is_asked_for: !args.records_by_default,
        without: warn_of_none,
    })
}

/// Warns that ranks of this process leave no record, and says why.
fn warn_of_none(ranks: &[Rank], why: &RuntimeError) {
    let whose = few(ranks);
    crate::say(format_args!(
        "warning: no record of {whose}, by which `meshwright doctor` says where a run hangs: {why}"
    ));
}

/// The words of an error that ended the steps, with where the ranks that it names were by their
/// records, and who waited for them. Writes down beside the records what the run has found, for
/// `doctor`.
pub fn explained(
    args: &RunArgs,
    loaded: &Loaded,
    (error, company): (&RuntimeError, Option<&Company>),
) -> String {
    let (words, verdict) = examined(args, loaded, (error, company));
    let (Some(folder), Some(verdict)) = (&args.record, verdict) else {
        return words;
    };
    // All that this process sees once it goes on follows from its own silence. A process that is cut
    // off has ended alone.
    let is_cut_off = |others: &Verdict| {
        let finder = others.by.as_ref().zip(company);
        finder.is_some_and(|(by, company)| company.has_cut_off(by))
    };
    if let Some(others) = without_this(folder).filter(|others| !is_cut_off(others)) {
        return format!(
            "process 0 stood still, or could not be heard: the others have ended without it ({}), and so {words}",
            others.error
        );
    }
    // The error is said all the same.
    let _ = verdict.write(folder);
    words
}

/// The finding of other processes of the run that this one does not answer; none where they have
/// not found that. Where its connections broke, this one has found so, too, and knows better.
fn without_this(folder: &Path) -> Option<Verdict> {
    let verdict = Verdict::read(folder)?;
    let seen = record::read(folder).ok()?.seen;
    let (pid, host) = (std::process::id(), record::host());
    // The records are of another run where this one's was begun again meanwhile.
    let mut own = seen.iter().filter(|s| s.pid == pid && s.host == host);
    let is_silent = |s: &Seen| matches!(verdict.found.get(&s.rank), Some(Fate::Lost(how)) if how == record::SILENT);
    own.any(is_silent).then_some(verdict)
}

/// The same words, in a process that has lost process 0 and leaves the finding to
/// [`without_first`].
pub fn told(
    args: &RunArgs,
    loaded: &Loaded,
    (error, company): (&RuntimeError, Option<&Company>),
) -> String {
    examined(args, loaded, (error, company)).0
}

/// The words, and the finding where there are records.
fn examined(
    args: &RunArgs,
    loaded: &Loaded,
    (error, company): (&RuntimeError, Option<&Company>),
) -> (String, Option<Verdict>) {
    let plain = plain(loaded, error);
    // There may be none, as where no folder could be made.
    let records = args.record.as_ref().map(|folder| record::read(folder));
    let has_records = matches!(records, Some(Ok(_)));
    let mut seen = records.and_then(Result::ok).unwrap_or_default().seen;
    seen.retain(|s| s.plan == loaded.hash);
    let doing = record::diagnose(&loaded.program, &seen).map(|d| d.ranks);
    let doing = doing.unwrap_or_default();
    let verdict = Verdict {
        error: error.to_string(),
        found: found(error, (&seen, &doing), company),
        by: Some(Finder::me()),
        plan: Some(loaded.hash.clone()),
    };
    let plain = match lost_too(error, &verdict.found, company) {
        Some(others) => format!("{plain}. {others}"),
        None => plain,
    };
    let named = match error {
        RuntimeError::Gone { rank, .. } => Some(*rank),
        _ => None,
    };
    let words = match account(loaded, (named, &verdict.found), (&seen, &doing)) {
        Some(account) => format!("{plain}. {account}"),
        None => plain,
    };
    (words, has_records.then_some(verdict))
}

/// The ranks of other processes that are lost with the one that an error names, in words; nothing
/// where there are none.
fn lost_too(
    error: &RuntimeError,
    found: &BTreeMap<Rank, Fate>,
    company: Option<&Company>,
) -> Option<String> {
    let (RuntimeError::Gone { process, .. }, Some(company)) = (error, company) else {
        return None;
    };
    let mut all: BTreeMap<&String, Vec<Rank>> = BTreeMap::new();
    for other in company.gone().into_keys().filter(|p| p != process) {
        let ranks = company.processes.ranks_of(other);
        let how = ranks.first().and_then(|r| found.get(r));
        if let Some(Fate::Lost(how)) = how {
            all.entry(how).or_default().extend(ranks);
        }
    }
    let words = |(how, ranks): (&String, Vec<Rank>)| match &ranks[..] {
        [rank] => format!("{rank} is lost, too: {how}"),
        _ => format!("{} are lost, too (each: {how})", names(ranks)),
    };
    let words: Vec<String> = all.into_iter().map(words).collect();
    (!words.is_empty()).then(|| words.join(". "))
}

/// The words of an error, with the place of an instruction as people call it.
fn plain(loaded: &Loaded, error: &RuntimeError) -> String {
    match error {
        RuntimeError::Instruction {
            rank,
            stage,
            instruction,
            source,
        } => {
            let place = in_words(loaded, *rank, instruction);
            format!("{rank} ({stage}), in {place}: {}", plain(loaded, source))
        }
        other => without_empty(&other.to_string()),
    }
}

/// The failure of a run whose steps ended with an error, explained by these words, with the way to
/// learn more and to go on. `so_far` is what this process knows of the run.
pub fn failure(
    args: &RunArgs,
    (error, words): (RuntimeError, String),
    so_far: Option<&SoFar>,
) -> Failure {
    let there = args.record.as_ref().filter(|f| record::read(f).is_ok());
    let doctor = there.map(|folder| {
        let (plan, folder) = (args.plan.display(), folder.display());
        format!("`meshwright doctor {plan} {folder}` says where each rank was")
    });
    let is_watchdog = error.is_watchdog();
    let is_gone = matches!(error, RuntimeError::Gone { .. });
    let has_diverged = matches!(error, RuntimeError::Diverged { .. });
    let is_turned = matches!(error, RuntimeError::Replicas { .. });
    let failure = Failure::from(error);
    let failure = match words == failure.to_string() {
        true => failure,
        false => failure.saying(words),
    };
    match doctor {
        doctor if is_gone => {
            let doctor = doctor.map(|words| format!("{words}; "));
            let doctor = doctor.unwrap_or_default();
            let way_on = way_on(args, so_far);
            failure.help(format!(
                "its own message, where it wrote one, is above; {doctor}{way_on}"
            ))
        }
        _ if has_diverged && args.elastic => failure.help(format!(
            "{DIVERGED}: that is another run, so give it another --checkpoint folder, and to go on from a checkpoint of this one --resume"
        )),
        _ if is_turned => failure.help(format!("{TURNED}; {}", way_on(args, so_far))),
        Some(doctor) if is_watchdog => failure.help(format!(
            "on a busy machine give ranks longer with --time-out SECONDS; {doctor}"
        )),
        _ => failure,
    }
}

/// The meaning of a difference between replicas for what was written.
const TURNED: &str = "a memory or a processor has turned a bit, so have the hosts of these ranks looked at before they are used again. States are compared with every checkpoint: no checkpoint of this run has that bit";

/// How a run that lost a process goes on from its newest checkpoint, in words.
fn way_on(args: &RunArgs, so_far: Option<&SoFar>) -> String {
    if args.elastic {
        return "the same command goes on from the newest checkpoint, with the processes that there are".into();
    }
    let Some(path) = &args.checkpoint else {
        return "a run with --checkpoint DIR and --checkpoint-every N can go on from its newest checkpoint".into();
    };
    let folder = path.display();
    let Some(so_far) = so_far else {
        return format!(
            "--resume {folder} goes on from the newest checkpoint, whose step `meshwright checkpoint inspect {folder}` says; --steps counts the steps from there"
        );
    };
    let end = so_far.first.saturating_add(args.steps);
    match (so_far.newest_step(path), args.checkpoint_every) {
        (Some(step), _) if step >= end => format!(
            "the newest checkpoint in {folder} has all of its steps, and `meshwright checkpoint convert` makes weights of it"
        ),
        (Some(step), _) => {
            let total = total_steps(args, so_far.first);
            let left = end - step;
            format!("to go on, give the same command with --resume {folder} --steps {left}{total}")
        }
        (None, None) => {
            "it had written no checkpoint: --checkpoint-every N writes some on the way".into()
        }
        (None, Some(_)) => {
            "it had written no checkpoint yet, so the same command begins it again".into()
        }
    }
}

/// The flag with which a run that goes on has the learning rates of one that is not broken, behind
/// others: this one has begun with this step.
pub fn total_steps(args: &RunArgs, first: u64) -> String {
    let end = first.saturating_add(args.steps);
    match args.schedule {
        DecayArg::Constant => String::new(),
        _ => format!(" --total-steps {}", args.total_steps.unwrap_or(end)),
    }
}

/// Writes down that a rank is lost, before it is looked at where it was.
#[cfg(feature = "mpi")]
pub fn lost((folder, plan): (Option<&Path>, &str), rank: Rank, error: &RuntimeError) {
    let RuntimeError::Gone { how, .. } = error else {
        return;
    };
    let verdict = Verdict {
        error: error.to_string(),
        found: BTreeMap::from([(rank, Fate::Lost(how.clone()))]),
        by: Some(Finder::me()),
        plan: Some(plan.into()),
    };
    let _ = folder.map(|folder| verdict.write(folder));
}

/// Writes down, for a process that is left without process 0, that this is lost.
pub fn without_first(
    (folder, plan): (Option<&Path>, &str),
    (error, company): (&RuntimeError, &Company),
) {
    let is_of_first = matches!(error, RuntimeError::Gone { process: 0, .. });
    let Some(folder) = folder.filter(|_| is_of_first) else {
        return;
    };
    // Process 0 knows better, where it could still say so.
    if Verdict::read(folder).is_none() {
        let seen = record::read(folder).unwrap_or_default().seen;
        let verdict = Verdict {
            error: error.to_string(),
            found: found(error, (&seen, &BTreeMap::new()), Some(company)),
            by: Some(Finder::me()),
            plan: Some(plan.into()),
        };
        let _ = verdict.write(folder);
    }
}

/// The ranks that an error names, with those of their processes and of others that were killed.
fn found(
    error: &RuntimeError,
    (seen, doing): (&[Seen], &BTreeMap<Rank, Doing>),
    company: Option<&Company>,
) -> BTreeMap<Rank, Fate> {
    let mut found = BTreeMap::new();
    match error {
        RuntimeError::Gone {
            rank,
            process,
            pid,
            host,
            how,
            ..
        } => {
            found.insert(*rank, Fate::Lost(how.clone()));
            let mut lose = |ranks: Vec<Rank>, how: &String| {
                for rank in ranks {
                    found.entry(rank).or_insert_with(|| Fate::Lost(how.clone()));
                }
            };
            let of_process = seen.iter().filter(|s| s.pid == *pid && s.host == *host);
            lose(of_process.map(|s| s.rank).collect(), how);
            if let Some(company) = company {
                lose(company.processes.ranks_of(*process), how);
                for (process, how) in company.gone() {
                    lose(company.processes.ranks_of(process), &how);
                }
            }
        }
        RuntimeError::Watchdog {
            rank,
            waiting_for,
            seconds,
            ..
        } => {
            let (by, seconds) = (*rank, *seconds);
            // Whoever waits, too, is held up by others, and may be where one has no record.
            let waits = |r: &Rank| {
                let doing = doing.get(r);
                matches!(doing, Some(Doing::Waiting { .. } | Doing::Unclear { .. }))
            };
            let missed = waiting_for.iter().filter(|r| !waits(r));
            found.extend(missed.map(|r| (*r, Fate::Missed { by, seconds })));
        }
        RuntimeError::Instruction { source, .. } if error.is_watchdog() => {
            return self::found(source, (seen, doing), company);
        }
        RuntimeError::Instruction { rank, .. } | RuntimeError::Panic { rank, .. } => {
            found.insert(*rank, Fate::Failed);
        }
        _ => {}
    }
    found
}

/// Where ranks that were lost or missed had come to, and who waited for them, in words; nothing
/// where no record says so.
fn account(
    loaded: &Loaded,
    (named, found): (Option<Rank>, &BTreeMap<Rank, Fate>),
    (seen, doing): (&[Seen], &BTreeMap<Rank, Doing>),
) -> Option<String> {
    let of = |rank: Rank| seen.iter().find(|s| s.rank == rank);
    let sentence = |(&rank, fate): (&Rank, &Fate)| {
        let (seen, own) = (of(rank)?, doing.get(&rank)?);
        let waiting = doing.iter().filter_map(|(&other, doing)| match doing {
            Doing::Waiting { what, missing } => {
                let is_one = !found.contains_key(&other) && missing.contains(&rank);
                is_one.then_some((other, what))
            }
            _ => None,
        });
        let waiting: Vec<(Rank, &String)> = waiting.collect();
        // One that came late, after others had given it up, is where they are by now.
        let is_told = match fate {
            Fate::Lost(_) => true,
            Fate::Missed { .. } => !waiting.is_empty(),
            Fate::Failed => false,
        };
        let who = match waiting.len() {
            n if n > MOST_WAITING => format!("{n} ranks"),
            _ => names(waiting.iter().map(|(other, _)| *other)),
        };
        let place_of = |(rank, what): &(Rank, &String)| in_words(loaded, *rank, what);
        let waited = match &waiting[..] {
            [] => String::new(),
            [one] => format!("; {who} waited for it in {}", place_of(one)),
            [one, ..] => format!("; {who} waited for it, {} in {}", one.0, place_of(one)),
        };
        let place = format!(
            "{rank}{} {}{waited}",
            when(seen),
            activity(loaded, rank, own)
        );
        is_told.then_some(place)
    };
    // Whom the error names comes first.
    let is_named = |rank: &Rank| named == Some(*rank);
    let (first, others): (Vec<_>, Vec<_>) = found.iter().partition(|(rank, _)| is_named(rank));
    let told = first.into_iter().chain(others).filter_map(sentence);
    let all: Vec<String> = told.take(MOST_LOST).collect();
    (!all.is_empty()).then(|| all.join(". "))
}
