//! The lock by which a run has its folder of checkpoints to itself: two that write to one would each
//! remove what the other one needs.

use super::among::Setting;
use crate::args::RunArgs;
use crate::failure::{Exit, Failure};
use crate::interrupt::{Interrupts, Made, is_at};
use runtime::files::open_regular;
use std::fs::{File, TryLockError};
use std::io::{self, ErrorKind};
use std::path::Path;
use std::time::{Duration, Instant};

/// The file that process 0 of the run holds as long as it lives.
const NAME: &str = "writer.lock";
/// How long one waits for another process 0 to end, and how often it looks.
const TO_END: Duration = Duration::from_secs(3);
/// The same under a launcher: on other hosts a lock stays for a while when the host is gone that had it.
const TO_VANISH: Duration = Duration::from_secs(120);
const LOOK: Duration = Duration::from_millis(50);

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

/// Takes the lock of a folder that was emptied or removed, with the file of the one that this process
/// had. Says whether no other one has it.
pub fn again(folder: &Path, made: &mut Vec<Made>) -> bool {
    let tried = tried(&folder.join(NAME), made);
    matches!(tried, Ok(Tried::Held | Tried::WithoutLocks(_)))
}

/// Whether a process 0 has the folder now; none where that cannot be seen, as where file systems
/// have no locks.
pub fn is_held(folder: &Path) -> Option<bool> {
    let file = match open_regular(&folder.join(NAME)) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Some(false),
        opened => opened.ok()?,
    };
    match file.try_lock_shared() {
        Ok(()) => Some(false),
        Err(TryLockError::WouldBlock) => Some(true),
        Err(TryLockError::Error(_)) => None,
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
