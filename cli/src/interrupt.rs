//! Ctrl-C: the first one asks to end with what there is, the second ends at once, and takes what
//! is not finished with it. One that comes right behind another is the same one: who ends a run may
//! ask all of its processes, and these each other.

use crate::failure::{Exit, Failure};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How far apart two interrupts are at least.
pub const SAME: Duration = Duration::from_millis(500);

/// Longest that an end waits until its reason is said: who is to hear it may not listen, as where a
/// terminal's output is held.
const TO_SAY: Duration = Duration::from_secs(1);

/// Says words and waits until they are said, but no longer than [`TO_SAY`].
pub fn say_last(words: String) {
    let (tell, told) = channel();
    // What cannot be said as there are no more threads stays unsaid.
    let _ = std::thread::Builder::new().spawn(move || {
        crate::say(format_args!("{words}"));
        let _ = tell.send(());
    });
    let _ = told.recv_timeout(TO_SAY);
}

/// The words for the first interrupt of what then ends with what there is.
fn ending(doing: &str) -> String {
    format!("interrupted: {doing}; interrupt again to end at once")
}

/// Has a file that reaches its limit of length be an error of its write, as a full disk is; by itself
/// that kills the process.
pub fn outlive_limits_of_files() -> Result<(), Failure> {
    let ignored = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    ignored.map(|_| ()).map_err(no_handler)
}

fn no_handler(e: impl std::fmt::Display) -> Failure {
    Failure::new(Exit::Internal, format!("cannot wait for interrupts: {e}"))
}

/// Returns a flag that the first interrupt (or request to terminate) sets, printing `doing`; the
/// second one ends the process. A process can call this once.
pub fn flag(doing: &'static str) -> Result<Arc<AtomicBool>, Failure> {
    let flag = Arc::new(AtomicBool::new(false));
    let set = Arc::clone(&flag);
    let first = OnceLock::new();
    let handler = move || {
        set.store(true, Ordering::Relaxed);
        let now = Instant::now();
        let since = now - *first.get_or_init(|| now);
        if !since.is_zero() {
            if since < SAME {
                return;
            }
            runtime::files::remove_unfinished();
            std::process::exit(Exit::Interrupted as i32);
        }
        crate::say(format_args!("{}", ending(doing)));
    };
    ctrlc::set_handler(handler).map_err(no_handler)?;
    Ok(flag)
}

/// The signals that are interrupts of a run.
pub const INTERRUPTS: [i32; 4] = [SIGINT, SIGTERM, SIGHUP, SIGUSR1];

/// Those of them that this process heeds.
pub fn heeded() -> impl Iterator<Item = i32> {
    let ignores_hangups = ignores_hangups();
    let is_heeded = move |signal: &i32| *signal != SIGHUP || !ignores_hangups;
    INTERRUPTS.into_iter().filter(is_heeded)
}

/// How often a run that waits for an interrupt looks for it.
const LOOK: Duration = Duration::from_millis(10);

/// Whether this process was started with hangups ignored, as by `nohup`: then they are no
/// interrupts.
fn ignores_hangups() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("SigIgn:"));
    let mask = line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    // Signal 1 is bit 0.
    mask.is_some_and(|mask| mask >> (SIGHUP - 1) & 1 == 1)
}

/// The words for an interrupt of a run that is about to go on after a loss.
pub const BEFORE_IT_WENT_ON: &str = "interrupted before it went on; what was written stays";

/// The words for an interrupt before the run has begun.
#[derive(Clone, Copy, Debug)]
pub struct Early {
    /// The words.
    pub words: &'static str,
    /// Whether another process has said so already where a warning comes.
    pub is_kept: bool,
}

/// The interrupts of a run. What the first one does depends on how far the run has come. SIGUSR1,
/// by which Slurm and others say that the time is nearly over, is an interrupt that is never the
/// second.
#[derive(Clone)]
pub struct Interrupts(Arc<Heeded>);

struct Heeded {
    phase: Mutex<Phase>,
    is_asked: Arc<AtomicBool>,
    /// Folders that the run has made, which go with it while they are empty.
    made: Mutex<Vec<PathBuf>>,
}

/// How far a run has come, as far as interrupts go.
#[derive(Clone, Copy, Debug)]
enum Phase {
    /// There is nothing to keep: it ends at once, and says this where this process is to.
    Begins(Option<Early>),
    /// Somebody looks for the interrupt, and says what becomes of the run.
    IsLooked,
    /// The run ends with what there is, doing this.
    Ends(&'static str),
    /// It is another process' to heed.
    IsOthers,
}

impl Interrupts {
    /// Waits for interrupts from now on. Until the run has come further, one ends it at once; a
    /// process that `says` so is one that speaks for the run.
    pub fn watch(says: Option<Early>) -> Result<Self, Failure> {
        let mut signals = Signals::new(heeded()).map_err(no_handler)?;
        let interrupts = Interrupts(Arc::new(Heeded {
            phase: Mutex::new(Phase::Begins(says)),
            is_asked: Arc::default(),
            made: Mutex::default(),
        }));
        let heeded = interrupts.clone();
        std::thread::spawn(move || {
            let mut first = None;
            for signal in signals.forever() {
                heeded.heed(signal, &mut first);
            }
        });
        Ok(interrupts)
    }

    fn heed(&self, signal: i32, first: &mut Option<Instant>) {
        // Of a warning nothing is said, and what follows it is a first interrupt.
        let is_warning = signal == SIGUSR1;
        let now = Instant::now();
        let since = match is_warning {
            true => None,
            false => first.replace(first.unwrap_or(now)),
        };
        let phase = *lock(&self.0.phase);
        match (phase, since) {
            (Phase::Begins(says), _) => {
                if let Some(early) = says.filter(|early| !(early.is_kept && is_warning)) {
                    say_last(early.words.into());
                }
                self.end_at_once()
            }
            (_, Some(since)) if now - since >= SAME => self.end_at_once(),
            (Phase::IsLooked | Phase::Ends(_), None) => {
                self.0.is_asked.store(true, Ordering::Relaxed);
                if let Phase::Ends(doing) = phase
                    && !is_warning
                {
                    // The next interrupt is heard soon, whoever listens to this.
                    say_last(ending(doing));
                }
            }
            (_, Some(_)) | (Phase::IsOthers, None) => {}
        }
    }

    fn end_at_once(&self) -> ! {
        runtime::files::remove_unfinished();
        self.remove_empty();
        std::process::exit(Exit::Interrupted as i32)
    }

    /// Has somebody look for the interrupt, with [`Self::is_asked`].
    pub fn begin_to_look(&self) {
        *lock(&self.0.phase) = Phase::IsLooked;
    }
    /// Has the first interrupt set the flag that is returned, and say what the run is `doing` then.
    pub fn end_with(&self, doing: &'static str) -> Arc<AtomicBool> {
        *lock(&self.0.phase) = Phase::Ends(doing);
        Arc::clone(&self.0.is_asked)
    }
    /// Leaves the first interrupt to another process. The second one ends this one.
    pub fn leave_to_others(&self) {
        *lock(&self.0.phase) = Phase::IsOthers;
    }
    /// Whether somebody has asked the run to end.
    pub fn is_asked(&self) -> bool {
        self.0.is_asked.load(Ordering::Relaxed)
    }
    /// The same of a moment in which another process of the run has ended: who asks may ask all of
    /// them, and this one may hear of it last.
    pub fn is_asked_soon(&self) -> bool {
        let until = Instant::now() + SAME;
        while !self.is_asked() && Instant::now() < until {
            std::thread::sleep(LOOK);
        }
        self.is_asked()
    }
    /// Notes a folder that is about to be made where it is not there yet, and those above it that
    /// are not: they go with the run if nothing comes into them.
    pub fn makes(&self, folder: &Path) {
        let is_missing = |f: &&Path| !f.as_os_str().is_empty() && !f.exists();
        let missing: Vec<_> = folder.ancestors().take_while(is_missing).collect();
        let outer_first = missing.into_iter().rev().map(Path::to_path_buf);
        lock(&self.0.made).extend(outer_first);
    }
    /// Has the folders that the run has made and left empty go when the result does.
    pub fn clear_at_end(&self) -> Clearing {
        Clearing(self.clone())
    }
    fn remove_empty(&self) {
        for folder in lock(&self.0.made).drain(..).rev() {
            let _ = std::fs::remove_dir(folder);
        }
    }
}

/// Removes the folders that a run has made and left empty.
pub struct Clearing(Interrupts);

impl Drop for Clearing {
    fn drop(&mut self) {
        self.0.remove_empty();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
