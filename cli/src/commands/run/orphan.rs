//! A process whose parent has ended. One that a run has started itself ends with it until it has
//! joined, as no connection says so before. One of a launcher's ends its run as an interrupt does:
//! where the launcher was killed, nobody else would, and the ranks would go on unseen and keep
//! others from going on with their run.

use super::among::Setting;
use super::launcher;
use crate::args::RunArgs;
use crate::failure::Exit;
use crate::interrupt::Interrupts;
use crate::interrupt::{heeded, say_last};
use runtime::processes::{Ending, Processes, Reason};
use rustix::process::{Signal, getpid, getsid, kill_process};
use signal_hook::consts::SIGHUP;
use std::os::unix::process::parent_id;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// How often is looked whether the parent is there.
const LOOK: Duration = Duration::from_millis(100);
/// Shells between a launcher and a process that are looked at.
const MOST_BETWEEN: usize = 16;

/// Ends this process when the one that started it has, as long as this is there: until they have
/// met, no connection says so, and the place where they would meet stays empty.
pub struct Orphan(Arc<AtomicBool>);

impl Orphan {
    /// Looks for this parent.
    pub fn watch(parent: u32) -> Self {
        let has_joined = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&has_joined);
        std::thread::spawn(move || {
            while !seen.load(Ordering::Relaxed) {
                if parent_id() != parent {
                    crate::say(format_args!(
                        "process 0 (pid {parent}) ended before this process joined it"
                    ));
                    std::process::exit(Exit::RunFailed as i32);
                }
                std::thread::sleep(LOOK);
            }
        });
        Orphan(has_joined)
    }
}

impl Drop for Orphan {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Has this process go on when the one that started it ends, should a signal have stopped it: it has to
/// see that, and to end as well.
pub fn go_on_without_parent() {
    // Elsewhere it stays until somebody lets it go on.
    #[cfg(target_os = "linux")]
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::CONT));
}

/// The way to process 0, once all have met, of a process that looks for its launcher.
pub struct Launcher(Arc<OnceLock<Ending>>);

impl Launcher {
    /// Looks from now on whether the launcher that started this process is there; `parent` is the
    /// one that this process had when it began. Without a launcher nothing is looked for.
    ///
    /// Interrupts must be heeded by now: its end is one.
    pub fn watch(parent: u32, setting: &Setting, args: &RunArgs) -> Self {
        let known: Arc<OnceLock<Ending>> = Arc::default();
        let env = |name: &str| std::env::var(name).ok();
        let may_be = match setting {
            Setting::Launched(_) => true,
            #[cfg(feature = "mpi")]
            Setting::Mpi(_) => true,
            Setting::Alone => !args.alone && args.processes.is_none(),
            Setting::Starts(_) | Setting::Started(_) => false,
        };
        // Whoever starts processes by hand with `nohup`, in a session of their own or behind a
        // parent that ends at once means them to outlive the shell.
        let is_alone = || parent == 1 || getsid(None).is_ok_and(|session| session == getpid());
        let is_of_shell = || heeded().any(|signal| signal == SIGHUP) && !is_alone();
        let mark = launcher::mark(&env);
        if may_be && launcher::is_there(&env) && (mark.is_some() || is_of_shell()) {
            let (index, known) = (setting.index(), Arc::clone(&known));
            let line = Line::from(parent, mark);
            std::thread::spawn(move || look(&line, index, &known));
        }
        Launcher(known)
    }
    /// Lets it know the processes of the run. Process 0 looks from then on whether another one asks
    /// for the end of the run.
    pub fn knows(&self, processes: &Processes, interrupts: &Interrupts) {
        let _ = self.0.set(processes.ending());
        if processes.place().index == 0 {
            let (known, interrupts) = (Arc::clone(&self.0), interrupts.clone());
            std::thread::spawn(move || hear(&known, &interrupts));
        }
    }
    /// The way to ask process 0 for the end of the run.
    pub fn ending(&self) -> Arc<OnceLock<Ending>> {
        Arc::clone(&self.0)
    }
}

/// The processes between a launcher and this one, as shells of scripts that it was told to start,
/// each with its parent: where the launcher is killed, they stay.
struct Line {
    parent: u32,
    between: Vec<(u32, u32)>,
}

impl Line {
    /// Those are the processes above this one that have the launcher's mark as well.
    fn from(parent: u32, mark: Option<&str>) -> Self {
        let mut between = Vec::new();
        let mut at = parent;
        while between.len() < MOST_BETWEEN
            && let Some(mark) = mark
            && has(at, mark)
            && let Some(above) = parent_of(at)
        {
            between.push((at, above));
            at = above;
        }
        Line { parent, between }
    }
    /// Whether one of them has lost its parent.
    fn is_broken(&self) -> bool {
        // One that has ended itself leaves another parent to the one below it, which is seen there.
        let is_lost =
            |(process, above): &(u32, u32)| parent_of(*process).is_some_and(|now| now != *above);
        parent_id() != self.parent || self.between.iter().any(is_lost)
    }
}

/// Whether a process of this user was started with a variable of this name.
fn has(process: u32, name: &str) -> bool {
    let all = std::fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
    let mut all = all.split(|byte| *byte == 0);
    all.any(|v| {
        v.strip_prefix(name.as_bytes())
            .is_some_and(|v| v.first() == Some(&b'='))
    })
}

/// The parent of a process, where the system shows it.
pub fn parent_of(process: u32) -> Option<u32> {
    behind_name(process, 1)?.try_into().ok()
}

/// How long after the system a process was started, where the system shows it.
pub fn started(process: u32) -> Option<Duration> {
    // The system's ticks, of which Linux shows a hundred a second.
    behind_name(process, 19).map(|ticks| Duration::from_millis(10 * ticks))
}

/// A number that the system shows of a process, by its place behind the state, which follows the name.
fn behind_name(process: u32, place: usize) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name is in brackets and may have any.
    let (_, rest) = stat.rsplit_once(") ")?;
    rest.split(' ').nth(place)?.parse().ok()
}

/// Waits until the launcher has ended, and asks this process to end its run then, and process 0 to
/// do so, which may have another launcher.
fn look(line: &Line, index: usize, known: &OnceLock<Ending>) {
    while !line.is_broken() {
        std::thread::sleep(LOOK);
    }
    say_last(format!(
        "the launcher of process {index} has ended: the run ends as by an interrupt"
    ));
    // Process 0 hears of the launcher first, and then that this process was interrupted.
    let first = known.get().filter(|_| index > 0);
    first.iter().for_each(|ending| ending.ask(Reason::Orphaned));
    interrupt_itself();
    if index == 0 || first.is_some() {
        return;
    }
    loop {
        if let Some(ending) = known.get() {
            return ending.ask(Reason::Orphaned);
        }
        std::thread::sleep(LOOK);
    }
}

/// Waits, in process 0, until another process asks for the end of the run.
fn hear(known: &OnceLock<Ending>, interrupts: &Interrupts) {
    let (process, reason) = loop {
        if let Some(asked) = known.get().and_then(Ending::asked) {
            break asked;
        }
        std::thread::sleep(LOOK);
    };
    // Who interrupts a run may interrupt all of its processes, and this one has said so then.
    if interrupts.is_asked_soon() {
        return;
    }
    let words = match reason {
        Reason::Orphaned => format!("the launcher of process {process} has ended"),
        Reason::Interrupted => format!("process {process} was interrupted"),
    };
    say_last(format!("{words}: the run ends as by an interrupt"));
    interrupt_itself();
}

/// Interrupts this process. It is never the second interrupt, by which all that is not written
/// would be lost.
fn interrupt_itself() {
    let _ = kill_process(getpid(), Signal::USR1);
}
