//! The process that keeps an elastic run: process 0 is a child of it, and where that is killed, or
//! stopped for good, another one goes on with the processes that are left.

use super::among::Setting;
use super::journal::Journal;
use crate::args::RunArgs;
use crate::failure::{Exit, Failure};
use crate::interrupt::{self, SAME};
use runtime::record::{self, Fate, Verdict};
use rustix::process::{Pid, Signal, WaitOptions, waitpgid};
use signal_hook::consts::{SIGTSTP, SIGUSR1};
use std::collections::BTreeMap;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const LOOK: Duration = Duration::from_millis(20);
/// How long those that process 0 started have to end after it, before they are killed.
const GRACE: Duration = Duration::from_secs(3);

/// Keeps the run where it is an elastic one that starts its processes, which does not come back but
/// with a failure. Process 0 itself sees to it that it ends with its keeper.
pub fn keep(args: &RunArgs, setting: &Setting) -> Result<(), Failure> {
    if let Some(keeper) = args.kept {
        return end_with(keeper);
    }
    let folder = match (setting, &args.checkpoint) {
        (Setting::Starts(_), Some(folder)) if args.elastic => folder,
        _ => return Ok(()),
    };
    let requests = Requests::watch()?;
    // The others become children of this one when process 0 is lost, by which it learns how they end.
    // Without that it takes process 0 for the only one.
    let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
    let longest = Duration::from_secs(args.time_out);
    let mut n_lost = 0;
    loop {
        let mut child = start(n_lost)?;
        let (how, was_asked) = wait(&mut child, &requests, longest)?;
        if let Some(code) = how.code() {
            std::process::exit(code);
        }
        let ended = end_group(Pid::from_child(&child), folder, longest);
        let lost = lost(how);
        if was_asked {
            let what = match how.signal() == Some(SIGUSR1) {
                true => "interrupted before the first step".to_string(),
                false => lost,
            };
            let help = "to go on, give the same command again";
            return Err(Failure::new(Exit::Interrupted, what).help(help));
        }
        let others = lost_with(child.id(), args, folder, &ended);
        let lost = match names(&others) {
            None => lost,
            Some(names) => format!("{lost}, and with it {names}"),
        };
        n_lost = 1 + others.len();
        may_go_on(folder, &lost, n_lost)?;
        crate::say(format_args!("lost: {lost}"));
    }
}

/// Requests to this process, which are process 0's to heed.
struct Requests {
    end: Arc<AtomicBool>,
    pause: Arc<AtomicBool>,
}

impl Requests {
    fn watch() -> Result<Self, Failure> {
        let requests = Requests {
            end: Arc::default(),
            pause: Arc::default(),
        };
        let end = interrupt::heeded().map(|s| (s, &requests.end));
        for (signal, flag) in end.chain([(SIGTSTP, &requests.pause)]) {
            let registered = signal_hook::flag::register(signal, Arc::clone(flag));
            registered.map_err(|e| failed("waits for no interrupt", &e))?;
        }
        Ok(requests)
    }
}

fn lost(how: ExitStatus) -> String {
    match how.signal() {
        Some(signal) => format!("process 0 was killed by signal {signal}"),
        None => "process 0 ended".into(),
    }
}

fn failed(what: &str, e: &dyn std::fmt::Display) -> Failure {
    Failure::new(
        Exit::RunFailed,
        format!("the keeper of the run {what}: {e}"),
    )
    .help("leave --elastic out, and --resume when a process is lost")
}

/// A process that was lost with process 0.
#[derive(Debug, PartialEq, Eq)]
struct Lost {
    /// Its number in the run, where that is known, and else the system's.
    index: Result<usize, u32>,
    /// How, in words.
    how: String,
}

/// The other processes that are lost when process 0 is: those that somebody has killed as well, and
/// those that process 0 itself had found lost and not yet gone on without. The records of the ranks say
/// which they are.
fn lost_with(first: u32, args: &RunArgs, folder: &Path, ended: &Ended) -> Vec<Lost> {
    let journal = Journal::read(folder).ok().flatten();
    let records = args.record.as_deref();
    let mut seen = records.map_or_else(Vec::new, |folder| {
        record::read(folder).unwrap_or_default().seen
    });
    let host = record::host();
    // Those of an earlier part of the run name whom it has gone on without.
    seen.retain(|s| s.host == host && journal.as_ref().is_some_and(|j| j.planned.hash == s.plan));
    if !seen.iter().any(|s| s.pid == first) {
        seen.clear();
    }
    let verdict = records.and_then(Verdict::read);
    let found = verdict.map(|v| v.found).unwrap_or_default();
    let mut all: BTreeMap<u32, String> = BTreeMap::new();
    for s in &seen {
        if let Some(Fate::Lost(how)) = found.get(&s.rank)
            && !ended.contains_key(&s.pid)
        {
            all.insert(s.pid, how.clone());
        }
    }
    for (pid, signal) in ended {
        if let Some(signal) = signal {
            all.insert(*pid, format!("it was killed by signal {signal}"));
        }
    }
    all.remove(&first);
    // Consecutive ranks are of one process, and the records are in the order of ranks.
    let mut of_run: Vec<u32> = seen.iter().map(|s| s.pid).collect();
    of_run.dedup();
    let is_whole = journal.is_some_and(|j| j.processes == of_run.len());
    let index = |pid: u32| of_run.iter().position(|p| *p == pid).filter(|_| is_whole);
    let lost = all.into_iter().map(|(pid, how)| Lost {
        index: index(pid).ok_or(pid),
        how,
    });
    let mut lost: Vec<Lost> = lost.collect();
    lost.sort_by_key(|l| {
        l.index
            .map_or_else(|pid| (true, pid as usize), |i| (false, i))
    });
    lost
}

/// Processes in words, with how they were lost; none where there are none.
fn names(all: &[Lost]) -> Option<String> {
    let name = |lost: &Lost| match lost.index {
        Ok(index) => format!("process {index} ({})", lost.how),
        Err(pid) => format!("another one, which had the number {pid} ({})", lost.how),
    };
    let names: Vec<String> = all.iter().map(name).collect();
    match names.split_last()? {
        (last, []) => Some(last.clone()),
        (last, rest) => Some(format!("{} and {last}", rest.join(", "))),
    }
}

/// Fails where nothing is left that could go on.
pub fn may_go_on(folder: &Path, lost: &str, n_lost: usize) -> Result<(), Failure> {
    let (why, help) = match Journal::read(folder)? {
        Some(journal) if journal.processes > n_lost => return Ok(()),
        Some(_) => (
            "no other process is left",
            "the same command goes on from the newest checkpoint, where there is one".to_string(),
        ),
        None => (
            "the run has no journal: it had not begun, or somebody has removed its folder or what is there",
            format!(
                "the same command begins it anew; with --resume {} it goes on from the newest checkpoint that is there",
                folder.display()
            ),
        ),
    };
    let what = format!("{lost}, and {why}");
    Err(Failure::new(Exit::RunFailed, what).help(help))
}

/// Starts process 0 with this one's arguments. It is in a group of its own, so that what a terminal
/// sends to all comes to it once, from here.
fn start(n_lost: usize) -> Result<Child, Failure> {
    let program = std::env::current_exe().map_err(|e| failed("does not find itself", &e))?;
    let given = std::env::args_os();
    let child = Command::new(program)
        // After the verb: what follows `--` are no flags.
        .args(given.skip(1).take(1))
        .arg(format!("--kept={}", std::process::id()))
        .args((n_lost > 0).then(|| format!("--after-loss={n_lost}")))
        .args(std::env::args_os().skip(2))
        .process_group(0)
        .spawn();
    child.map_err(|e| failed("cannot start it", &e))
}

/// Waits for process 0 to end, and hands on what this one is asked. One that stays stopped for longer
/// than ranks wait for each other is killed. Says whether it was asked to end.
fn wait(
    child: &mut Child,
    requests: &Requests,
    longest: Duration,
) -> Result<(ExitStatus, bool), Failure> {
    let pid = Pid::from_child(child);
    // It is stopped for as long as this one sees it so: both may have been.
    let (mut asked, mut stopped): (Option<Instant>, _) = (None, Duration::ZERO);
    loop {
        if let Some(how) = child
            .try_wait()
            .map_err(|e| failed("lost sight of it", &e))?
        {
            return Ok((how, asked.is_some()));
        }
        if requests.end.swap(false, Ordering::Relaxed) {
            // What process 0 may have been sent as well asks it no second time.
            match asked {
                None => {
                    crate::say(format_args!(
                        "interrupted: ending after this step and writing what there is; interrupt again to end at once"
                    ));
                    asked = Some(Instant::now());
                    let _ = rustix::process::kill_process(pid, Signal::USR1);
                    // The last step needs all of them, and one may be stopped.
                    let _ = rustix::process::kill_process_group(pid, Signal::CONT);
                }
                Some(first) if first.elapsed() > SAME => {
                    crate::say(format_args!(
                        "ended at once; the same command goes on from the newest checkpoint"
                    ));
                    let _ = rustix::process::kill_process_group(pid, Signal::KILL);
                }
                Some(_) => {}
            }
        }
        if requests.pause.swap(false, Ordering::Relaxed) {
            let _ = rustix::process::kill_process_group(pid, Signal::STOP);
            let _ = rustix::process::kill_process(rustix::process::getpid(), Signal::STOP);
            // It goes on when this one is told to.
            let _ = rustix::process::kill_process_group(pid, Signal::CONT);
        }
        stopped = match is_stopped(pid) {
            true => stopped + LOOK,
            false => Duration::ZERO,
        };
        if stopped > longest {
            crate::say(format_args!(
                "process 0 is stopped for longer than --time-out: it is killed"
            ));
            let _ = rustix::process::kill_process(pid, Signal::KILL);
            stopped = Duration::ZERO;
        }
        std::thread::sleep(LOOK);
    }
}

/// Whether a process is stopped by a signal, where the system says so.
fn is_stopped(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    // The state follows the name, which is in brackets and may have any.
    let stat = stat.unwrap_or_default();
    stat.rsplit_once(") ")
        .is_some_and(|(_, rest)| rest.starts_with('T'))
}

/// The signal that ended a process, by its number; none where it ended by itself, or was killed here.
type Ended = BTreeMap<u32, Option<i32>>;

/// Waits for those that process 0 started, which are in its group, to end, and kills who does not: they
/// have the memory that is needed next. Who writes down what it has in memory may take longer. Says how
/// they ended.
fn end_group(group: Pid, folder: &Path, longest: Duration) -> Ended {
    let began = Instant::now();
    let mut ended = Ended::new();
    let (mut is_killed, mut until) = (false, began + GRACE);
    loop {
        while let Ok(Some((pid, how))) = waitpgid(group, WaitOptions::NOHANG) {
            let pid = pid.as_raw_nonzero().get().cast_unsigned();
            ended.insert(pid, how.terminating_signal().filter(|_| !is_killed));
        }
        if rustix::process::test_kill_process_group(group).is_err() {
            return ended;
        }
        let writes = !is_killed && began.elapsed() < longest;
        let writes = writes && runtime::checkpoint::is_left(folder);
        if Instant::now() > until && !writes {
            if is_killed {
                return ended;
            }
            let _ = rustix::process::kill_process_group(group, Signal::KILL);
            (is_killed, until) = (true, Instant::now() + GRACE);
        }
        std::thread::sleep(LOOK);
    }
}

/// Has this process be killed when its keeper is.
fn end_with(keeper: u32) -> Result<(), Failure> {
    let set = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    set.map_err(|e| failed("cannot be watched", &e))?;
    // It may have ended before it was asked for.
    let parent = rustix::process::getppid().map(|p| p.as_raw_nonzero().get().cast_unsigned());
    match parent == Some(keeper) {
        true => Ok(()),
        false => Err(Failure::new(
            Exit::RunFailed,
            "the keeper of the run has ended",
        )),
    }
}
