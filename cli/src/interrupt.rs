//! Ctrl-C: the first one asks to end with what there is, the second ends at once, and takes what
//! is not finished with it. One that comes right behind another is the same one: who ends a run may
//! ask all of its processes, and these each other.

use crate::failure::{Exit, Failure};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
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

/// Held while the words of a first interrupt are said.
static SPEAKS: Mutex<()> = Mutex::new(());

/// Waits until the words of an interrupt are said, as the process is about to end.
pub fn wait_for_words() {
    drop(lock(&SPEAKS));
}

/// The words for the first interrupt of what then ends with what there is.
fn ending(doing: &str) -> String {
    format!("interrupted: {doing}; interrupt again to end at once")
}

/// Has a file that reaches its limit of length be an error of its write, as a full disk is; by
/// itself that kills the process.
pub fn outlive_limits_of_files() -> Result<(), Failure> {
    let ignored = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    ignored.map(|_| ()).map_err(no_handler)
}

fn no_handler(e: impl std::fmt::Display) -> Failure {
    Failure::new(Exit::Internal, format!("cannot wait for interrupts: {e}"))
}

/// Returns a flag that the first interrupt sets, printing `doing`; the second one ends the process.
/// A process can call this once.
pub fn flag(doing: &'static str) -> Result<Arc<AtomicBool>, Failure> {
    Interrupts::watch_in(Phase::Ends(doing)).map(|interrupts| Arc::clone(&interrupts.0.is_asked))
}

/// The signals that are interrupts.
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
    /// How whoever ends the run is told, where that is another process.
    tells: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// In the order in which it was made.
    made: Mutex<Vec<Made>>,
}

/// Whether a file is the one that has this name.
pub fn is_at(file: &File, path: &Path) -> bool {
    let of = |m: Metadata| (m.dev(), m.ino());
    let [open, named] = [file.metadata(), std::fs::metadata(path)].map(|m| m.map(of).ok());
    open.is_some() && open == named
}

/// Something that a run has made, and is to leave no trace of where it comes to nothing.
pub enum Made {
    /// A folder, which goes with the run while it is empty.
    Folder(PathBuf),
    /// The file of a lock, which this process holds as long as this is kept. It goes with the run,
    /// however that ends.
    Lock(PathBuf, File),
    /// A file that was not there. It goes where the run is interrupted before it has begun.
    File(PathBuf),
    /// A file that was there, and what was in it, which comes back then.
    Replaced(PathBuf, Vec<u8>),
}

impl Made {
    fn undo(self) {
        // What cannot be undone stays.
        let _ = match self {
            Made::Folder(path) => std::fs::remove_dir(path),
            // Somebody may have put another folder in the place of that one.
            Made::Lock(path, file) if !is_at(&file, &path) => Ok(()),
            Made::Lock(path, _held) => std::fs::remove_file(path),
            Made::File(path) => std::fs::remove_file(path),
            Made::Replaced(path, before) => {
                crate::outputs::write_atomic(&path, &before).map_err(std::io::Error::other)
            }
        };
    }
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
        Self::watch_in(Phase::Begins(says))
    }

    fn watch_in(phase: Phase) -> Result<Self, Failure> {
        let mut signals = Signals::new(heeded()).map_err(no_handler)?;
        let interrupts = Interrupts(Arc::new(Heeded {
            phase: Mutex::new(phase),
            is_asked: Arc::default(),
            tells: OnceLock::new(),
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
        let locked = lock(&self.0.phase);
        let phase = *locked;
        // A run that ends at once comes no further meanwhile.
        if !matches!(phase, Phase::Begins(_)) {
            drop(locked);
        }
        match (phase, since) {
            (Phase::Begins(says), _) => {
                if let Some(early) = says.filter(|early| !(early.is_kept && is_warning)) {
                    say_last(early.words.into());
                }
                self.end_at_once()
            }
            (_, Some(since)) if now - since >= SAME => self.end_at_once(),
            (Phase::IsLooked | Phase::Ends(_), None) => {
                // Who hears the words may count on what they say; this process ends after them.
                let _said_first = lock(&SPEAKS);
                self.0.is_asked.store(true, Ordering::Relaxed);
                if let Phase::Ends(doing) = phase
                    && !is_warning
                {
                    // The next interrupt is heard soon, whoever listens to this.
                    say_last(ending(doing));
                }
            }
            (Phase::IsOthers, None) => {
                self.0.is_asked.store(true, Ordering::Relaxed);
                if let Some(tell) = self.0.tells.get() {
                    tell();
                }
            }
            (_, Some(_)) => {}
        }
    }

    fn end_at_once(&self) -> ! {
        // Something may be on its way to be made, but not for ever, as on a disk that hangs; and
        // nothing is made any more after that.
        let until = Instant::now() + TO_SAY;
        let mut made = loop {
            match self.0.made.try_lock() {
                Ok(made) => break Some(made),
                Err(TryLockError::Poisoned(e)) => break Some(e.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() >= until => break None,
                Err(TryLockError::WouldBlock) => std::thread::sleep(LOOK),
            }
        };
        runtime::files::remove_unfinished();
        if let Some(made) = &mut made {
            made.drain(..).rev().for_each(Made::undo);
        }
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
    /// Leaves the first interrupt to another process, which `tell` tells of it: only this one may
    /// have been interrupted, as where its host is to be emptied. The second one ends this one.
    pub fn leave_to_others(&self, tell: impl Fn() + Send + Sync + 'static) {
        let _ = self.0.tells.set(Box::new(tell));
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
    /// Makes a folder by `make` where it is not there yet, and those above it that are not: they go
    /// with the run if nothing comes into them. No interrupt ends this process meanwhile.
    pub fn makes<T>(&self, folder: &Path, make: impl FnOnce() -> T) -> T {
        self.making(|made| {
            let is_missing = |f: &&Path| !f.as_os_str().is_empty() && !f.exists();
            let missing: Vec<_> = folder.ancestors().take_while(is_missing).collect();
            let outer_first = missing.into_iter().rev().map(Path::to_path_buf);
            made.extend(outer_first.map(Made::Folder));
            make()
        })
    }
    /// Makes something that goes again where the run is interrupted before it has begun. No
    /// interrupt ends this process between what is made and its note.
    pub fn making<T>(&self, make: impl FnOnce(&mut Vec<Made>) -> T) -> T {
        make(&mut lock(&self.0.made))
    }
    /// Keeps the files that the run has made, as it has begun. Returns what
    /// [`Interrupts::take_back`] takes where it comes to nothing all the same.
    pub fn keep_files(&self) -> Vec<Made> {
        let mut made = lock(&self.0.made);
        let is_file = |m: &mut Made| matches!(m, Made::File(_) | Made::Replaced(..));
        made.extract_if(.., is_file).collect()
    }
    /// Takes back what the run has made, as it has come to nothing.
    pub fn take_back(&self, files: Vec<Made>) {
        files.into_iter().rev().for_each(Made::undo);
        lock(&self.0.made).drain(..).rev().for_each(Made::undo);
    }
    /// Has the folders that the run has made and left empty go when the result does, and its locks
    /// before them.
    pub fn clear_at_end(&self) -> Clearing {
        Clearing(self.clone())
    }
}

/// Gives the locks of a run back, and removes the folders that it has made and left empty.
pub struct Clearing(Interrupts);

impl Drop for Clearing {
    fn drop(&mut self) {
        let made = std::mem::take(&mut *lock(&self.0.0.made)).into_iter().rev();
        let folders = made.filter(|m| matches!(m, Made::Folder(_) | Made::Lock(..)));
        folders.for_each(Made::undo);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
