//! The lock by which a run has its folder of checkpoints to itself: two that write to one would each
//! remove what the other one needs.

use super::among::Setting;
use super::journal::{self, Journal};
use crate::args::RunArgs;
use crate::failure::{Exit, Failure};
use crate::interrupt::{Interrupts, Made, is_at};
use runtime::RuntimeError;
use runtime::files::open_regular;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// The file that process 0 of the run holds as long as it lives.
const NAME: &str = "writer.lock";
/// How long one waits for another process 0 to end, and how often it looks.
const TO_END: Duration = Duration::from_secs(3);
/// The same under a launcher: on other hosts a lock stays for a while when the host is gone that had it.
const TO_VANISH: Duration = Duration::from_secs(120);
const LOOK: Duration = Duration::from_millis(50);
/// How often process 0 gives a sign of life until all have met.
const SIGN: Duration = Duration::from_millis(500);
/// How long others that only look whether it is taken may have it.
const TO_BE_LOOKED_AT: Duration = Duration::from_secs(1);

/// Takes the folder of checkpoints for this process 0, for as long as the run lasts: of a run that is
/// started twice, or before its former process 0 has ended, one goes on. Who only reads there needs no
/// lock. A folder that is not there yet is made where `makes` says so, and else nobody's: whether it
/// was there is returned.
pub fn held(
    args: &RunArgs,
    (setting, interrupts): (&Setting, &Interrupts),
    makes: bool,
) -> Result<bool, Failure> {
    let Some(folder) = args.checkpoint.as_deref() else {
        return Ok(true);
    };
    let path = folder.join(NAME);
    let failed = |e: io::Error| {
        let what = format!("{}: {e}", path.display());
        Failure::new(Exit::RunFailed, what)
            .help("name a folder for --checkpoint that can be written to")
    };
    if !makes && !folder.is_dir() {
        return Ok(false);
    }
    let began = Instant::now();
    let longest = match setting {
        Setting::Launched(_) => TO_VANISH,
        _ => TO_END,
    };
    let mut is_said = false;
    loop {
        if makes {
            // Again, as who had the lock may have removed what it had made.
            let made = interrupts.makes(folder, || std::fs::create_dir_all(folder));
            made.map_err(failed)?;
        }
        let tried = interrupts.making(|made| tried(&path, made));
        match tried {
            // What keeps a run from writing there is said where its outputs are looked at.
            Err(_) if !makes && !args.elastic => return Ok(false),
            Err(e) if e.kind() == ErrorKind::NotFound && !makes => return Ok(false),
            Err(e) if e.kind() == ErrorKind::NotFound && began.elapsed() < longest => {
                std::thread::sleep(LOOK);
            }
            Err(e) => return Err(failed(e)),
            Ok(Tried::Held) => return Ok(true),
            Ok(Tried::Taken) if began.elapsed() < longest => {
                // Others of a launcher may give up before.
                if began.elapsed() > TO_END && !is_said {
                    crate::say(format_args!(
                        "note: {}, and is waited for",
                        taken(args, folder)
                    ));
                    is_said = true;
                }
                std::thread::sleep(LOOK);
            }
            Ok(Tried::Taken) => {
                let help = match args.elastic {
                    true => "end that one, or name another folder".to_string(),
                    false => format!(
                        "give this run a folder of its own; with --resume {} it may go on from what is there by now",
                        folder.display()
                    ),
                };
                return Err(Failure::new(Exit::Usage, taken(args, folder)).help(help));
            }
            Ok(Tried::WithoutLocks(e)) => {
                crate::say(format_args!(
                    "warning: {}: {e}: that no two runs write there is yours to see to",
                    path.display()
                ));
                return Ok(true);
            }
        }
    }
}

/// The folder of checkpoints of this process 0 while the run goes on. Somebody may remove it, and the
/// lock with it.
pub struct Keeping<'a> {
    folder: &'a Path,
    interrupts: &'a Interrupts,
    /// The journal of an elastic run.
    journal: Option<Journal>,
    /// The run of the journal that it has found there.
    run: Option<String>,
    /// The checkpoints there that this run has found or written.
    known: RefCell<BTreeMap<PathBuf, Option<Facts>>>,
    /// Whether another run has begun in a folder of the same name.
    is_lost: Cell<bool>,
}

impl<'a> Keeping<'a> {
    /// Begins once the run has its folder.
    pub fn begin(folder: &'a Path, interrupts: &'a Interrupts, journal: Option<Journal>) -> Self {
        let keeping = Keeping {
            folder,
            interrupts,
            journal,
            run: Journal::read(folder).ok().flatten().map(|j| j.run),
            known: RefCell::default(),
            is_lost: Cell::new(false),
        };
        let found = runtime::checkpoint::numbered(folder);
        found.iter().for_each(|(_, path)| keeping.knows(path));
        keeping
    }

    /// Notes a checkpoint as one of this run.
    pub fn knows(&self, path: &Path) {
        let mut known = self.known.borrow_mut();
        known.insert(path.to_path_buf(), facts(path));
    }

    /// Whether a checkpoint is one of this run, and as it was.
    pub fn has(&self, path: &Path) -> bool {
        let now = facts(path);
        let known = self.known.borrow();
        now.is_some() && known.get(path).is_some_and(|of| *of == now)
    }

    /// Whether the folder has something of another run.
    fn has_other(&self) -> bool {
        let journal = Journal::read(self.folder);
        let is_other = match &journal {
            Ok(found) => found
                .as_ref()
                .is_some_and(|j| Some(&j.run) != self.run.as_ref()),
            // One that is there and cannot be read is not this run's.
            Err(_) => journal::is_in(self.folder),
        };
        // Of one that is being removed the manifest may have gone first.
        let is_whole = |path: &Path| facts(path).is_some();
        let found = runtime::checkpoint::numbered(self.folder);
        is_other
            || found
                .iter()
                .any(|(_, path)| is_whole(path) && !self.has(path))
    }

    /// Sees to it that the folder is still this process' own, before something is written there. Where
    /// it was removed, it is made again, with the lock and the journal, which is said.
    ///
    /// Fails where another run has begun there since, and from then on.
    pub fn keep(&self) -> Result<(), RuntimeError> {
        let was_removed = match self.has_lock() {
            true => false,
            false => self.take_again()?,
        };
        let journal = self.journal.as_ref();
        let journal = journal.filter(|_| self.folder.is_dir() && !journal::is_in(self.folder));
        let again = match journal.map(|journal| journal.write(self.folder)) {
            Some(Ok(())) => {
                "what the same command needs to go on with the run is written there again"
            }
            Some(Err(failure)) => {
                crate::say(format_args!("warning: {failure}"));
                return Ok(());
            }
            None if was_removed => "checkpoints are written there again",
            None => return Ok(()),
        };
        crate::say(format_args!(
            "warning: {} was emptied or removed while the run went on; {again}",
            self.folder.display()
        ));
        Ok(())
    }

    /// Whether the lock is this process' own, for all that can be seen.
    fn has_lock(&self) -> bool {
        let path = self.folder.join(NAME);
        let is_it = |m: &Made| match m {
            Made::Lock(at, file) if *at == path => is_at(file, at) || !is_gone(at),
            _ => false,
        };
        !self.is_lost.get() && self.interrupts.making(|made| made.iter().any(is_it))
    }

    /// Takes the lock once more. Says whether it did, as file systems may have none.
    fn take_again(&self) -> Result<bool, RuntimeError> {
        let path = self.folder.join(NAME);
        let began = Instant::now();
        while !self.is_lost.get() {
            // Somebody may be removing it.
            if self.has_other() && {
                std::thread::sleep(LOOK);
                self.has_other()
            } {
                break;
            }
            // Where the folder cannot be made, that is said of the checkpoint itself.
            let make = || std::fs::create_dir_all(self.folder);
            let _ = self.interrupts.makes(self.folder, make);
            match self.interrupts.making(|made| tried(&path, made)) {
                Ok(Tried::Held) => return Ok(true),
                Ok(Tried::WithoutLocks(_)) => return Ok(false),
                // Others look for a moment whether it is held.
                Ok(Tried::Taken) if began.elapsed() > TO_BE_LOOKED_AT => break,
                Err(e) if e.kind() != ErrorKind::NotFound || began.elapsed() > TO_BE_LOOKED_AT => {
                    return Ok(false);
                }
                Ok(Tried::Taken) | Err(_) => std::thread::sleep(LOOK),
            }
        }
        self.is_lost.set(true);
        Err(RuntimeError::Taken {
            path: self.folder.to_path_buf(),
        })
    }
}

/// The facts that tell a checkpoint from another one of its name: number and time of its manifest.
type Facts = (u64, SystemTime);

fn facts(path: &Path) -> Option<Facts> {
    let about = std::fs::metadata(path.join("manifest.json")).ok()?;
    Some((about.ino(), about.modified().ok()?))
}

/// Whether there is another file of this name by now, or none. Where that cannot be seen nothing
/// has changed.
fn is_gone(path: &Path) -> bool {
    match std::fs::metadata(path) {
        Err(e) => e.kind() == ErrorKind::NotFound,
        Ok(_) => true,
    }
}

/// The last sign of life of a process 0 that has the folder, or waits for it; none where there was none.
pub fn sign_of_life(folder: &Path) -> Option<SystemTime> {
    std::fs::metadata(folder.join(NAME)).ok()?.modified().ok()
}

/// Gives signs of life in the folder that this process 0 has or waits for, until it is dropped: until all
/// have met, the others do not hear of it otherwise.
pub struct Alive(Arc<AtomicBool>);

impl Alive {
    /// Begins; there are none while there is no lock.
    pub fn begin(folder: &Path) -> Self {
        let (path, is_over) = (folder.join(NAME), Arc::<AtomicBool>::default());
        let ends = Arc::clone(&is_over);
        std::thread::spawn(move || {
            while !ends.load(Ordering::Relaxed) {
                let now = rustix::fs::Timespec {
                    tv_sec: 0,
                    tv_nsec: rustix::fs::UTIME_NOW,
                };
                let times = rustix::fs::Timestamps {
                    last_access: now,
                    last_modification: now,
                };
                let at = (rustix::fs::CWD, &path, &times);
                // Where it cannot be given, the others wait no longer than for one that is not there.
                let _ = rustix::fs::utimensat(at.0, at.1, at.2, rustix::fs::AtFlags::empty());
                std::thread::sleep(SIGN);
            }
        });
        Alive(is_over)
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Says that the folder is another process'.
fn taken(args: &RunArgs, folder: &Path) -> String {
    let what = match args.elastic {
        true => "the folder's run goes on in another process",
        false => "another run that goes on writes its checkpoints there",
    };
    format!("--checkpoint {}: {what}", folder.display())
}

/// How it went to take the lock.
pub enum Tried {
    Held,
    /// By another process, or gone with it.
    Taken,
    /// File systems without locks.
    WithoutLocks(io::Error),
}

/// Takes the lock, if nobody has it, and notes it: it goes with the run. Who was killed has left its
/// file, which is taken as well.
pub fn tried(path: &Path, made: &mut Vec<Made>) -> io::Result<Tried> {
    let is_new = match File::options().create_new(true).write(true).open(path) {
        Err(e) if e.kind() == ErrorKind::AlreadyExists => false,
        new => new.map(|_| true)?,
    };
    // One that is open for writing would keep its file system from becoming read-only. File systems of
    // servers may want it all the same.
    let found = |opened: io::Result<File>| match opened {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some),
    };
    let Some(mut file) = found(open_regular(path))? else {
        return Ok(Tried::Taken);
    };
    let mut locked = file.try_lock();
    if let Err(TryLockError::Error(_)) = locked
        && let Ok(Some(other)) = found(File::options().append(true).open(path))
    {
        locked = other.try_lock();
        file = other;
    }
    let tried = match locked {
        // Who had it may have taken its file away, and then it is no lock of anything.
        Ok(()) if is_at(&file, path) => Tried::Held,
        Ok(()) | Err(TryLockError::WouldBlock) => return Ok(Tried::Taken),
        Err(TryLockError::Error(e)) => Tried::WithoutLocks(e),
    };
    if is_new || matches!(tried, Tried::Held) {
        made.push(Made::Lock(path.to_path_buf(), file));
    }
    Ok(tried)
}
