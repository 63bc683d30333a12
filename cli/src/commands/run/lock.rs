//! The lock by which an elastic run has its folder of checkpoints to itself.

use super::among::Setting;
use crate::args::RunArgs;
use crate::failure::{Exit, Failure};
use crate::interrupt::{Interrupts, Made};
use std::fs::{File, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// The file that process 0 of the run holds as long as it lives.
const NAME: &str = "elastic.lock";
/// How long one waits for another process 0 of the run to end, and how often it looks.
const TO_END: Duration = Duration::from_secs(3);
/// The same under a launcher: on other hosts a lock stays for a while when the host is gone that had it.
const TO_VANISH: Duration = Duration::from_secs(120);
const LOOK: Duration = Duration::from_millis(50);

/// Takes the folder of checkpoints of an elastic run for this process 0, as long as the result is kept:
/// of a run that is started twice, or before its former process 0 has ended, one goes on. A folder that
/// is not there yet is made where `makes` says so, and else nobody's.
pub fn held(
    args: &RunArgs,
    (setting, interrupts): (&Setting, &Interrupts),
    makes: bool,
) -> Result<Option<File>, Failure> {
    let Some(folder) = args.checkpoint.as_deref().filter(|_| args.elastic) else {
        return Ok(None);
    };
    let path = folder.join(NAME);
    let failed = |e: io::Error| {
        let what = format!("{}: {e}", path.display());
        Failure::new(Exit::RunFailed, what)
            .help("name a folder for --checkpoint that can be written to")
    };
    if makes {
        let made = interrupts.makes(folder, || std::fs::create_dir_all(folder));
        made.map_err(failed)?;
    } else if !folder.is_dir() {
        return Ok(None);
    }
    let until = Instant::now()
        + match setting {
            Setting::Launched(_) => TO_VANISH,
            _ => TO_END,
        };
    loop {
        let tried = interrupts.making(|made| tried(&path, made));
        match tried.map_err(failed)? {
            Tried::Held(file) => return Ok(Some(file)),
            Tried::Taken if Instant::now() < until => std::thread::sleep(LOOK),
            Tried::Taken => {
                let what = format!(
                    "--checkpoint {}: the folder's elastic run goes on in another process",
                    folder.display()
                );
                let help = "end that one, or name another folder";
                return Err(Failure::new(Exit::Usage, what).help(help));
            }
            Tried::WithoutLocks(e) => {
                crate::say(format_args!(
                    "warning: {}: {e}: that the run is not started twice is yours to see to",
                    path.display()
                ));
                return Ok(None);
            }
        }
    }
}

/// How it went to take the lock.
enum Tried {
    Held(File),
    /// By another process, or gone with it.
    Taken,
    /// File systems without locks.
    WithoutLocks(io::Error),
}

/// Takes the lock, if nobody has it, and notes the file where it was not there before.
fn tried(path: &Path, made: &mut Vec<Made>) -> io::Result<Tried> {
    let (file, is_new) = match File::options().create_new(true).append(true).open(path) {
        Err(e) if e.kind() == ErrorKind::AlreadyExists => {
            match File::options().append(true).open(path) {
                Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Tried::Taken),
                found => (found?, false),
            }
        }
        new => (new?, true),
    };
    let tried = match file.try_lock() {
        // Who had it may have taken its file away, and then it is no lock of anything.
        Ok(()) if is_at(&file, path) => Tried::Held(file),
        Ok(()) | Err(TryLockError::WouldBlock) => return Ok(Tried::Taken),
        Err(TryLockError::Error(e)) => Tried::WithoutLocks(e),
    };
    if is_new {
        made.push(Made::File(path.to_path_buf()));
    }
    Ok(tried)
}

/// Whether a file is the one that has this name.
fn is_at(file: &File, path: &Path) -> bool {
    let of = |m: std::fs::Metadata| (m.dev(), m.ino());
    let [open, named] = [file.metadata(), std::fs::metadata(path)].map(|m| m.map(of).ok());
    open.is_some() && open == named
}
