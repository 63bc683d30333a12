//! The journal of an elastic run, in its folder of checkpoints: what a run that ends before it is
//! done leaves to the one that goes on. Who starts that does not matter: the keeper of the run, a
//! launcher that has fewer hosts left or more again, or somebody who gives the same command once more.

use super::among::{Setting, ends_of};
use super::elastic::{self, Continued};
use super::left;
use crate::args::RunArgs;
use crate::commands::again;
use crate::failure::{Exit, Failure};
use crate::interrupt::{Interrupts, Made};
use crate::plan_file::{self, Loaded};
use crate::{document, files, outputs, report};
use ir::counted;
use runtime::RuntimeError;
use runtime::checkpoint::{Rescued, Unrescued};
use runtime::record::{self, Doing};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

const NAME: &str = "elastic.json";

/// The facts of a run that the next one needs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Journal {
    /// Whether all its steps are made and all that it was to write is there.
    is_done: bool,
    /// Everything that decides what is trained, by the name of its flag: another run has something
    /// else.
    job: BTreeMap<String, String>,
    /// With what it began.
    began: Part,
    /// With what it was planned last.
    pub planned: Part,
    /// The processes that it has now: those that it was planned for, but for losses since.
    pub processes: usize,
    /// Steps before its first one.
    first: u64,
    /// Steps after its last one.
    end: u64,
    /// Where the learning rate's decay ends.
    total_steps: Option<u64>,
    /// Its name, which is in its checkpoints: others in the folder are another run's.
    pub run: String,
    /// How often processes were lost.
    pub losses: u32,
}

/// A plan, and who plays it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// The plan's file.
    pub plan: PathBuf,
    /// Its hash: another file may be there by now.
    pub hash: String,
    /// Its ranks.
    pub ranks: usize,
    /// The processes that have them.
    pub processes: usize,
}

/// Everything that decides what is trained.
fn job(args: &RunArgs, loaded: &Loaded) -> BTreeMap<String, String> {
    let path = |p: &Option<PathBuf>| {
        p.as_ref()
            .map_or("none".into(), |p| p.display().to_string())
    };
    let number = |n: Option<String>| n.unwrap_or_else(|| "none".into());
    let data = ends_of(&args.data).unwrap_or_else(|e| e.to_string());
    let all = [
        ("the plan", loaded.hash.clone()),
        ("--data", format!("{} ({data})", args.data.display())),
        ("--tokenizer", path(&args.tokenizer)),
        ("--steps", args.steps.to_string()),
        ("--weights", path(&args.weights)),
        ("--resume", path(&args.resume)),
        ("--lr", number(args.lr.map(|x| x.to_string()))),
        ("--warmup", args.warmup.to_string()),
        ("--schedule", format!("{:?}", args.schedule).to_lowercase()),
        ("--min-lr", args.min_lr.to_string()),
        (
            "--total-steps",
            number(args.total_steps.map(|n| n.to_string())),
        ),
        (
            "--validation-fraction",
            args.validation_fraction.to_string(),
        ),
        (
            "--validate-every",
            number(args.validate_every.map(|n| n.to_string())),
        ),
    ];
    all.map(|(name, value)| (name.to_string(), value)).into()
}

/// The folder of checkpoints of an elastic run that was not told how it goes on.
fn folder(args: &RunArgs) -> Option<&Path> {
    let folder = args.checkpoint.as_deref();
    folder.filter(|_| args.elastic && args.continued.is_none())
}

impl Journal {
    /// The journal in a folder of checkpoints, where there is one.
    pub fn read(folder: &Path) -> Result<Option<Self>, Failure> {
        let path = folder.join(NAME);
        if !path.exists() {
            return Ok(None);
        }
        let text = files::read_text(&path, "journal", files::SMALL)?;
        let found = document::json(&path.display().to_string(), &text, "journal");
        let help = format!(
            "remove {} to begin the run anew, or with --resume",
            path.display()
        );
        found.map(Some).map_err(|failure| failure.help(help))
    }

    /// Writes it, whole or not at all.
    pub fn write(&self, folder: &Path) -> Result<(), Failure> {
        outputs::write_atomic(&folder.join(NAME), document::to_json(self)?.as_bytes())
    }

    /// Begins the journal of an elastic run whose first step has `first` before it, and gives its name.
    ///
    /// Fails for any other run where the folder has an elastic one that is not done.
    pub fn begin(
        args: &RunArgs,
        (setting, interrupts): (&Setting, &Interrupts),
        (loaded, first): (&Loaded, u64),
    ) -> Result<Option<String>, Failure> {
        let Some(folder) = args
            .checkpoint
            .as_deref()
            .filter(|_| args.continued.is_none())
        else {
            return Ok(None);
        };
        // An elastic run has looked whether it is the one that is not done.
        if !args.elastic {
            return match Journal::read(folder)?.filter(|j| !j.is_done) {
                Some(other) => Err(other.refusal(folder, "this run is not --elastic")),
                None => Ok(None),
            };
        }
        let ranks = left::ranks_of(loaded);
        let began = Part {
            plan: args.plan.clone(),
            hash: loaded.hash.clone(),
            ranks,
            processes: setting.counts(ranks).0,
        };
        let end = first + args.steps;
        let journal = Journal {
            is_done: false,
            job: job(args, loaded),
            planned: began.clone(),
            processes: began.processes,
            began,
            first,
            end,
            total_steps: args.total_steps.or(args.resume.is_none().then_some(end)),
            run: drawn()?,
            losses: 0,
        };
        interrupts.making(|made| {
            let path = folder.join(NAME);
            // That of a run that is done comes back where this one comes to nothing.
            made.push(match std::fs::read(&path) {
                Ok(before) => Made::Replaced(path, before),
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => Made::File(path),
                Err(e) => {
                    let what = format!("{}: {e}", path.display());
                    return Err(Failure::new(Exit::BadInput, what));
                }
            });
            if runtime::checkpoint::is_left(folder) && !is_in(folder) {
                crate::say(format_args!(
                    "warning: {} is removed: no journal says of which run the states are that ranks have left there",
                    runtime::checkpoint::place_of_left(folder).display()
                ));
            }
            runtime::checkpoint::forget(folder);
            journal.write(folder)
        })?;
        Ok(Some(journal.run))
    }

    /// The first thing that another run asks for and this one did not, in words; nothing where it is
    /// this one.
    fn difference(&self, args: &RunArgs, loaded: &Loaded) -> Option<String> {
        let now = job(args, loaded);
        let none = || "unknown".to_string();
        let names: BTreeSet<&String> = self.job.keys().chain(now.keys()).collect();
        names.into_iter().find_map(|name| {
            let [before, now] =
                [&self.job, &now].map(|j| j.get(name).cloned().unwrap_or_else(none));
            (before != now).then(|| format!("{name} was {before}, and is {now} here"))
        })
    }

    fn refusal(&self, folder: &Path, why: &str) -> Failure {
        let what = format!(
            "--checkpoint {}: the folder has an elastic run that is not done, and {why}",
            folder.display()
        );
        Failure::new(Exit::Usage, what).help(format!(
            "give the command of that run to go on with it, name another folder, or remove {} to leave it as it is",
            folder.join(NAME).display()
        ))
    }

    /// The failure of a run whose ranks left all states, which no checkpoint can be made of as yet:
    /// to go on from an older one would lose steps that room may save.
    fn unsalvaged(&self, folder: &Path, e: &RuntimeError) -> Failure {
        let left = runtime::checkpoint::place_of_left(folder);
        let what = format!(
            "the run of {} is not done: the ranks that were left had left all states, but no checkpoint can be made of these: {e}; they stay in {}",
            folder.join(NAME).display(),
            left.display()
        );
        Failure::new(Exit::BadInput, what).help(format!(
            "{}; to go on from an older checkpoint instead, remove {}",
            elastic::ROOM,
            left.display()
        ))
    }

    /// Takes the counts of a part of the run that went on when the journal could not be written.
    fn catch_up(&mut self, found: Option<(usize, u32)>) {
        if let Some((processes, losses)) = found.filter(|(_, losses)| *losses > self.losses) {
            (self.processes, self.losses) = (processes, losses);
        }
    }

    /// The newest checkpoint of the run, and those that are passed over. One that was just made of
    /// what ranks left was verified then, and is not read for it again.
    fn newest(&self, folder: &Path, salvaged: Option<&Result<Rescued, Unrescued>>) -> Newest {
        let mut newest = Newest::default();
        if let Some(Ok(Rescued { step, path })) = salvaged {
            newest.whole = Some((path.clone(), (*step).min(self.end)));
            return newest;
        }
        let all = runtime::checkpoint::numbered(folder).into_iter().rev();
        for (_, path) in all {
            // Without a manifest nobody knows whose it is.
            let found = runtime::checkpoint::summary(&path).ok();
            if found.is_some_and(|found| found.origin.run.as_ref() != Some(&self.run)) {
                continue;
            }
            match runtime::checkpoint::verify(&path) {
                Ok(found) => {
                    newest.whole = Some((path, found.step().min(self.end)));
                    break;
                }
                Err(all) => newest.damaged.extend(all.first().map(ToString::to_string)),
            }
        }
        newest
    }
}

/// The checkpoints of a run that stand in its folder.
#[derive(Debug, Default, PartialEq)]
struct Newest {
    /// The newest checkpoint that is whole, with its step.
    whole: Option<(PathBuf, u64)>,
    /// The errors of those after it.
    damaged: Vec<String>,
}

/// A name that no other run has.
fn drawn() -> Result<String, Failure> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|e| {
        let what = format!("the run cannot be given a name: {e}");
        Failure::new(Exit::RunFailed, what).help("see that /dev/urandom can be read")
    })?;
    Ok(bytes.iter().map(|b| format!("{b:02x}")).collect())
}

/// Whether a folder of checkpoints has a run's journal.
pub fn is_in(folder: &Path) -> bool {
    folder.join(NAME).exists()
}

/// The standing of the run that is asked for, by the journal in its folder of checkpoints.
pub enum Standing {
    /// There is none, or one that was told how it goes on: it is made as its arguments say.
    New,
    /// It is done: nothing is left to do.
    Done,
}

/// Goes on with the run whose journal is in the folder of checkpoints, which does not come back.
pub fn go_on(args: &RunArgs, setting: &Setting, loaded: &Loaded) -> Result<Standing, Failure> {
    let Some(folder) = folder(args) else {
        return Ok(Standing::New);
    };
    let Some(mut journal) = Journal::read(folder)? else {
        return Ok(Standing::New);
    };
    let difference = journal.difference(args, loaded);
    match (journal.is_done, difference) {
        (true, None) => {
            if let Some(path) = args.save.as_ref().filter(|path| !path.exists()) {
                let what = format!(
                    "the run of {} is done, and {} is not there",
                    folder.join(NAME).display(),
                    path.display()
                );
                let help = "`meshwright checkpoint convert` makes weights of its training state";
                return Err(Failure::new(Exit::RunFailed, what).help(help));
            }
            crate::say(format_args!(
                "the run of {} is done, and nothing is left to do: remove that file to begin it anew",
                folder.join(NAME).display()
            ));
            return Ok(Standing::Done);
        }
        (true, Some(_)) => return Ok(Standing::New),
        (false, Some(why)) => {
            return Err(journal.refusal(folder, &format!("is another one: {why}")));
        }
        (false, None) => {}
    }
    if let Some(who) = files::others_who_write(folder, false) {
        crate::say(format_args!(
            "warning: {}: {who}, and so decide what this run goes on from",
            folder.display()
        ));
    }
    journal.catch_up(elastic::went_on_with(args, &journal.run));
    let before = journal.planned.clone();
    let processes = match args.after_loss {
        0 => setting.counts(journal.began.ranks).0,
        lost => journal.processes.saturating_sub(lost),
    };
    if processes == 0 {
        return Err(Failure::new(
            Exit::RunFailed,
            "no process of the run is left",
        ));
    }
    if processes < journal.processes {
        journal.losses += 1;
    }
    // Before anything that takes long: who is killed meanwhile is lost, too. Where it cannot be
    // written, what is left to be written later may have the room.
    journal.processes = processes;
    let _ = journal.write(folder);
    // Ranks may have left what they had in memory, of a later step than the newest checkpoint is.
    let kept = usize::from(args.checkpoints_kept);
    let salvaged = runtime::checkpoint::salvage(folder, kept, &journal.run);
    if let Some(Err(Unrescued::Unwritten(e))) = &salvaged
        && runtime::checkpoint::is_left(folder)
    {
        return Err(journal.unsalvaged(folder, e));
    }
    // A run that was asked to end, and did, has lost nothing.
    let lost_at_ms =
        last_seen(args).filter(|_| processes < before.processes || args.after_loss > 0);
    let found = journal.newest(folder, salvaged.as_ref());
    let (newest, damaged) = (found.whole, found.damaged);
    if newest.is_none() && !damaged.is_empty() {
        let run = format!("the run of {} is not done", folder.join(NAME).display());
        return Err(elastic::none_whole(&run, &damaged));
    }
    let step = newest.as_ref().map_or(journal.first, |(_, step)| *step);
    let was = before.loaded_unless(loaded);
    let was = was.as_ref().unwrap_or(loaded);
    let is_was = was.hash == before.hash;
    let done = reached(args, was).filter(|_| is_was);
    let has_all = done.is_some_and(|done| newest.is_some() && done <= step);
    let not = match &salvaged {
        // Nothing that was not left is missed where the newest checkpoint has it.
        Some(Err(Unrescued::Missing(_))) if has_all => String::new(),
        Some(Err(Unrescued::Missing(reason))) => {
            format!("The ranks that were left did not leave all states, as {reason}. ")
        }
        Some(Err(Unrescued::Unwritten(e) | Unrescued::Differing(e))) => {
            format!(
                "The ranks that were left had left all states, but no checkpoint can be made of these: {e}. "
            )
        }
        Some(Ok(_)) | None => String::new(),
    };
    let lost = done.map_or_else(String::new, |done| elastic::steps_lost(done, step));
    let source = match (&newest, &args.resume) {
        (Some((path, _)), _) if salvaged.as_ref().is_some_and(|s| s.is_ok()) => format!(
            "The ranks that were left had all states in memory: no step is lost ({}).",
            path.display()
        ),
        (Some((path, _)), _) => {
            let path = path.display();
            format!("The newest checkpoint that is whole is {path}.{lost}")
        }
        (None, Some(path)) => format!(
            "There is no checkpoint of it: the run begins again with {}.{lost}",
            path.display()
        ),
        (None, None) => format!("There is no checkpoint of it: the run begins anew.{lost}"),
    };
    let without_room = |failure: Failure| elastic::without_room(failure, &format!("{not}{source}"));
    let began = Instant::now();
    let (mut planned, mut planned_now) = (String::new(), None);
    journal.planned = if processes == journal.began.processes {
        Part {
            plan: args.plan.clone(),
            ..journal.began.clone()
        }
    } else if processes == before.processes && before.is_there() {
        before.clone()
    } else {
        let ranks = journal.began.ranks * processes / journal.began.processes.max(1);
        let new = left::plan_for(ranks.max(1), loaded)?;
        let ranks = left::ranks_of(&new);
        if ranks < processes && !matches!(setting, Setting::Starts(_)) {
            let what = format!(
                "the best plan that there is for {} has {}, and each process must have one",
                counted(processes as u64, "process"),
                counted(ranks as u64, "rank")
            );
            let help = format!("have the launcher start {ranks} or fewer");
            return Err(Failure::new(Exit::Infeasible, what).help(help));
        }
        let plan = args
            .output
            .with_extension(format!("plan-{}-of-{ranks}-ranks.json", journal.losses));
        again::write(Some(&plan), &new).map_err(without_room)?;
        planned = format!(
            ", planned again in {:.1} s ({})",
            began.elapsed().as_secs_f64(),
            plan.display()
        );
        let part = Part {
            plan,
            hash: new.hash.clone(),
            ranks,
            processes: processes.min(ranks),
        };
        planned_now = Some(new);
        part
    };
    journal.processes = journal.planned.processes;
    warn_unless(journal.write(folder));
    let continued = Continued {
        plan: journal.planned.plan.clone(),
        steps: journal.end - step,
        total_steps: journal.total_steps,
        resume: newest.as_ref().map(|(path, _)| path.clone()),
        processes: journal.planned.processes,
        losses: journal.losses,
        lost_at_ms,
        run: Some(journal.run.clone()),
        records: elastic::unasked(args),
    };
    let damaged: String = (damaged.iter())
        .map(|d| format!(" Passed over {d}."))
        .collect();
    let of = match before.ranks == journal.planned.ranks {
        true => String::new(),
        false => format!(" in place of {}", before.ranks),
    };
    let now = planned_now.or_else(|| journal.planned.loaded_unless(loaded));
    let now = now.as_ref().unwrap_or(loaded);
    let plans = match before.hash == now.hash {
        true => String::new(),
        false => {
            let before = match is_was {
                true => elastic::described(was),
                false => format!("{} has another plan by now", before.plan.display()),
            };
            let now = elastic::described(now);
            format!("\n  Before: {before}\n  Now:    {now}")
        }
    };
    let aside = match processes < before.processes {
        true => elastic::records_aside(args, journal.losses),
        false => String::new(),
    };
    crate::say(format_args!(
        "going on with the run of {}, with {}{of}, from step {step}{planned}.{plans}\n{}{aside}",
        folder.join(NAME).display(),
        counted(journal.planned.ranks as u64, "rank"),
        report::wrapped(&format!("  {not}{source}{damaged}")),
    ));
    let mut again = elastic::again(args, &continued).map_err(without_room)?;
    let e = again.exec();
    let what = format!("the run could not go on: {e}");
    Err(Failure::new(Exit::RunFailed, what))
}

/// When a rank of the run's last part last wrote where it was, in milliseconds since 1970.
fn last_seen(args: &RunArgs) -> Option<u64> {
    let seen = record::read(args.record.as_deref()?).ok()?.seen;
    seen.iter().map(|s| s.at_ms).max()
}

/// How many steps all ranks of the run's last part had made, by the records that they left; none where
/// these do not say.
fn reached(args: &RunArgs, played: &Loaded) -> Option<u64> {
    let mut seen = record::read(args.record.as_deref()?).ok()?.seen;
    seen.retain(|s| s.plan == played.hash);
    let doing = record::diagnose(&played.program, &seen).ok()?.ranks;
    let made = seen.iter().filter(|s| s.training && s.plays > 0);
    made.map(|s| s.step + u64::from(doing.get(&s.rank) == Some(&Doing::Between)))
        .min()
}

/// Whether the run that these arguments ask for is done.
pub fn is_done(args: &RunArgs, loaded: &Loaded) -> Result<bool, Failure> {
    let Some(folder) = folder(args) else {
        return Ok(false);
    };
    let done = Journal::read(folder)?.filter(|j| j.is_done);
    Ok(done.is_some_and(|j| j.difference(args, loaded).is_none()))
}

/// Changes the journal of an elastic run. One that cannot be read or written, as on a disk that spoils
/// what it keeps, ends no run: it is warned of.
pub fn change(args: &RunArgs, change: impl FnOnce(&mut Journal)) {
    let Some(folder) = args.checkpoint.as_deref().filter(|_| args.elastic) else {
        return;
    };
    // Another run may have begun there.
    let is_other = |j: &Journal| args.run.as_ref().is_some_and(|run| *run != j.run);
    let changed = Journal::read(folder).and_then(|found| match found {
        Some(journal) if is_other(&journal) => Ok(()),
        Some(mut journal) => {
            change(&mut journal);
            journal.write(folder)
        }
        None => Ok(()),
    });
    warn_unless(changed);
}

/// Warns of a journal that could not be changed.
fn warn_unless(changed: Result<(), Failure>) {
    if let Err(failure) = changed {
        crate::say(format_args!(
            "warning: the run's journal does not say how it stands: {failure}"
        ));
    }
}

/// Marks the journal of a run as that of one that is done.
pub fn end(args: &RunArgs) {
    change(args, |journal| journal.is_done = true);
}

impl Part {
    /// Whether the plan's file is still the one that was played.
    fn is_there(&self) -> bool {
        self.loaded().is_some()
    }
    fn loaded(&self) -> Option<Loaded> {
        let loaded = plan_file::load(&self.plan).ok();
        loaded.filter(|loaded| loaded.hash == self.hash)
    }
    /// The plan where it is another one than this and still there.
    fn loaded_unless(&self, known: &Loaded) -> Option<Loaded> {
        (self.hash != known.hash).then(|| self.loaded()).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn journal() -> Journal {
        let part = Part {
            plan: "plan.json".into(),
            hash: "0".into(),
            ranks: 2,
            processes: 2,
        };
        Journal {
            is_done: false,
            job: BTreeMap::new(),
            began: part.clone(),
            planned: part,
            processes: 2,
            first: 0,
            end: 7,
            total_steps: None,
            run: "1f".into(),
            losses: 1,
        }
    }

    /// A full disk may have had no room for the journal when the run went on.
    #[test]
    fn counts_are_those_of_the_part_that_went_on_last() {
        let counts = |found| {
            let mut journal = journal();
            journal.catch_up(found);
            (journal.processes, journal.losses)
        };
        assert_eq!(counts(Some((1, 2))), (1, 2));
        // That of an earlier part.
        assert_eq!(counts(Some((4, 1))), (2, 1));
        assert_eq!(counts(None), (2, 1));
    }

    /// Each shard that ranks left was read when it was made a checkpoint; that of an hour's
    /// training takes minutes to read.
    #[test]
    fn what_was_salvaged_is_not_read_again() {
        let journal = journal();
        // Nobody could read this one.
        let path = PathBuf::from("/nowhere/0003-step-9");
        let salvaged = Ok(Rescued {
            step: 9,
            path: path.clone(),
        });
        let folder = Path::new("/nowhere");
        let newest = journal.newest(folder, Some(&salvaged));
        assert_eq!((newest.whole, newest.damaged.len()), (Some((path, 7)), 0));
        let none = Unrescued::Missing("one had not written".into());
        let none = journal.newest(folder, Some(&Err(none)));
        assert_eq!(none, Newest::default());
    }
}
