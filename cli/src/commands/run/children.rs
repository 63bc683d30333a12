//! Processes that a run starts on its own host.

use super::rendezvous::Appointment;
use crate::failure::{Exit, Failure};
use crate::interrupt::{INTERRUPTS, Interrupts};
use runtime::processes::Processes;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Longest that processes have to end by themselves.
const GRACE: Duration = Duration::from_secs(10);
/// The same where the run has failed.
const GRACE_OF_FAILURE: Duration = Duration::from_secs(2);
/// Longest that one that is killed has to be gone.
const TO_DIE: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(20);

/// The processes, killed where they do not end when this one does.
pub struct Children(Arc<Mutex<Vec<Started>>>);

struct Started {
    index: usize,
    child: Child,
    ended: Option<ExitStatus>,
    /// Whether the run has been told.
    is_told: bool,
    /// Whether it was this process that killed it, as it did not end in time.
    is_put_down: bool,
}

/// Kills the processes of a run on this host that a signal has stopped, as it has ended: they cannot
/// end by themselves.
pub fn put_down_stopped(of: &Processes) {
    for (_, pid) in of.stopped_here() {
        put_down_of_others(pid);
    }
}

/// Kills a process of this program that somebody else has started and a signal has stopped: it
/// cannot end by itself. Whoever is only not heard can. Says whether it did.
pub fn put_down_of_others(id: u32) -> bool {
    let program = |id: &str| std::fs::read_link(format!("/proc/{id}/exe")).ok();
    let is_ours = program("self").is_some_and(|own| program(&id.to_string()) == Some(own));
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    // The state follows the name, which is in brackets and may have any.
    let is_stopped = stat
        .rsplit_once(") ")
        .is_some_and(|(_, rest)| rest.starts_with('T'));
    let id = i32::try_from(id).ok().and_then(Pid::from_raw);
    let stopped = id.filter(|_| is_ours && is_stopped);
    stopped.is_some_and(|id| kill_process(id, Signal::KILL).is_ok())
}

impl Children {
    /// Starts all processes but the first, with this one's arguments. They get the appointment on
    /// their standard input, where nobody else can read it.
    pub fn start(of: usize, appointment: &Appointment) -> Result<Self, Failure> {
        let children = Children(Arc::default());
        let failed = |e: &dyn std::fmt::Display| {
            Failure::new(Exit::RunFailed, format!("a process cannot be started: {e}"))
                .help("leave --processes out: ranks are threads of this process then")
        };
        let program = std::env::current_exe().map_err(|e| failed(&e))?;
        let words = serde_json::to_string(appointment).map_err(|e| failed(&e))?;
        for index in 1..of {
            // The words are in the pipe before there is a process: should this one be stopped right
            // behind its start, it knows whom to miss.
            let (from, mut to) = std::io::pipe().map_err(|e| failed(&e))?;
            writeln!(to, "{words}").map_err(|e| failed(&e))?;
            drop(to);
            let child = Command::new(&program)
                // After the verb: what follows `--` are no flags.
                .args(std::env::args_os().skip(1).take(1))
                .arg(format!("--as-process={index}/{of}"))
                .args(std::env::args_os().skip(2))
                .stdin(from)
                .stdout(Stdio::null())
                .spawn();
            children.lock().push(Started {
                index,
                child: child.map_err(|e| failed(&e))?,
                ended: None,
                is_told: false,
                is_put_down: false,
            });
        }
        Ok(children)
    }
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Started>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// One that has ended, and how.
    pub fn ended(&self) -> Option<String> {
        let mut all = self.lock();
        let found = all.iter_mut().find_map(|s| Some((s.index, s.look()?)));
        found.map(|(index, how)| format!("process {index} {}before it joined", words(how)))
    }
    /// Whether one has ended as an interrupt of it would have it end.
    pub fn were_interrupted(&self) -> bool {
        self.lock()
            .iter()
            .any(|s| s.ended.is_some_and(is_by_interrupt))
    }
    /// Whether some have ended, and all of these as an interrupt of them would have them end.
    pub fn were_only_interrupted(&self) -> bool {
        let mut all = self.lock();
        let ended: Vec<ExitStatus> = all.iter_mut().filter_map(|s| s.look()).collect();
        !ended.is_empty() && ended.into_iter().all(is_by_interrupt)
    }
    /// Those that were killed here by now, as they did not answer.
    pub fn given_up(&self) -> Vec<usize> {
        let all = self.lock();
        let given_up = all.iter().filter(|s| s.is_put_down);
        given_up.map(|s| s.index).collect()
    }
    /// Kills one that does not answer any more: it would not end by itself.
    pub fn put_down(&self, index: usize) {
        let mut all = self.lock();
        put_down(all.iter_mut().filter(|s| s.index == index));
    }
    /// Kills all that are there.
    pub fn put_all_down(&self) {
        put_down(self.lock().iter_mut());
    }
    /// Tells a run how processes end, as long as there is one. When the run is asked to end, those
    /// that a signal has stopped are let go on, as the last step needs all of them.
    pub fn report_to(&self, processes: &Arc<Processes>, interrupts: &Interrupts) {
        let (all, to): (_, Weak<Processes>) = (Arc::downgrade(&self.0), Arc::downgrade(processes));
        let (interrupts, mut may_stand) = (interrupts.clone(), true);
        std::thread::spawn(move || {
            while let Some(all) = all.upgrade() {
                let mut ended = Vec::new();
                let goes_on = may_stand && interrupts.is_asked();
                may_stand &= !goes_on;
                for s in all
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .iter_mut()
                {
                    let how = s.look().filter(|_| !s.is_told);
                    if goes_on && s.ended.is_none() {
                        let _ = kill_process(Pid::from_child(&s.child), Signal::CONT);
                    }
                    s.is_told |= how.is_some();
                    ended.extend(how.map(|how| (s.index, how)));
                }
                drop(all);
                // Held for no longer than it takes to say so: its end is that of the connections.
                let Some(processes) = to.upgrade() else {
                    return;
                };
                for (index, how) in ended {
                    processes.ended(index, format!("it {}", words(how).trim_end()));
                }
                drop(processes);
                std::thread::sleep(LOOK);
            }
        });
    }
    /// Waits for all to end by themselves; those that do not in time are killed. Says which did
    /// not end well.
    pub fn finish(&self) -> Vec<String> {
        self.end(GRACE)
    }
    /// Waits for all to end after a failure. Returns those that others have killed: those that are
    /// only slow to end, and are killed here, are not lost.
    pub fn killed(&self) -> Vec<usize> {
        self.end(GRACE_OF_FAILURE);
        let all = self.lock();
        let by_signal = |s: &&Started| s.ended.is_some_and(|how| how.signal().is_some());
        let killed = all.iter().filter(by_signal).filter(|s| !s.is_put_down);
        killed.map(|s| s.index).collect()
    }
    /// Those that others have killed by now, and how, without waiting for any.
    pub fn killed_so_far(&self) -> BTreeMap<usize, String> {
        let mut all = self.lock();
        let killed = all.iter_mut().filter_map(|s| {
            let how = s.look().filter(|how| how.signal().is_some())?;
            let is_lost = !s.is_put_down;
            is_lost.then(|| (s.index, format!("it {}", words(how).trim_end())))
        });
        killed.collect()
    }
    fn end(&self, grace: Duration) -> Vec<String> {
        let until = Instant::now() + grace;
        let mut problems = Vec::new();
        for s in self.lock().iter_mut() {
            while s.look().is_none() && Instant::now() < until {
                std::thread::sleep(LOOK);
            }
            match s.look() {
                // All processes of an interrupted run say so.
                Some(how) if how.success() || how.code() == Some(Exit::Interrupted as i32) => {}
                Some(how) => {
                    problems.push(format!("process {} {}", s.index, words(how).trim_end()))
                }
                None => {
                    put_down([&mut *s]);
                    problems.push(format!("process {} did not end and was killed", s.index));
                }
            }
            s.take_leave();
        }
        problems
    }
}

/// Whether a process has ended as an interrupt would have it end.
fn is_by_interrupt(how: ExitStatus) -> bool {
    how.code() == Some(Exit::Interrupted as i32)
        || how.signal().is_some_and(|s| INTERRUPTS.contains(&s))
}

impl Started {
    /// Looks how it has ended, and leaves it to be waited for: where this process is killed before it
    /// goes on without that one, its keeper is to learn that, too.
    fn look(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            let only_look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
            let found = waitid(WaitId::Pid(Pid::from_child(&self.child)), only_look);
            self.ended = found.ok().flatten().and_then(|how| {
                let code = how.exit_status().map(|code| code << 8);
                code.or(how.terminating_signal()).map(ExitStatus::from_raw)
            });
        }
        self.ended
    }
    /// Waits for one that has ended, which nobody does any more after that.
    fn take_leave(&mut self) {
        if self.ended.is_some() {
            let _ = self.child.try_wait();
        }
    }
}

/// Kills processes that are still there, and waits for their end: not for long, as one that waits
/// for a disk or a driver ends when that comes back, or never.
fn put_down<'a>(all: impl IntoIterator<Item = &'a mut Started>) {
    let mut killed: Vec<_> = all
        .into_iter()
        .filter_map(|s| match s.look() {
            Some(_) => None,
            None => {
                s.is_put_down = true;
                let _ = s.child.kill();
                Some(s)
            }
        })
        .collect();
    let until = Instant::now() + TO_DIE;
    loop {
        killed.retain_mut(|s| s.look().is_none());
        if killed.is_empty() || Instant::now() >= until {
            return;
        }
        std::thread::sleep(LOOK);
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        // They end when process 0 has closed its connections.
        self.end(GRACE_OF_FAILURE);
    }
}

fn words(how: ExitStatus) -> String {
    match (how.code(), how.signal()) {
        (Some(code), _) => format!("ended with exit code {code} "),
        (None, Some(signal)) => format!("was killed by signal {signal} "),
        (None, None) => "ended ".into(),
    }
}
