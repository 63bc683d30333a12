//! The lock by which an elastic run has its folder of checkpoints to itself.

use super::among::Setting;
use crate::args::RunArgs;
use crate::failure::{Exit, Failure};
use std::fs::{File, TryLockError};
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
pub fn held(args: &RunArgs, setting: &Setting, makes: bool) -> Result<Option<File>, Failure> {
    let Some(folder) = args.checkpoint.as_deref().filter(|_| args.elastic) else {
        return Ok(None);
    };
    let path = folder.join(NAME);
    let failed = |e: std::io::Error| {
        let what = format!("{}: {e}", path.display());
        Failure::new(Exit::RunFailed, what)
            .help("name a folder for --checkpoint that can be written to")
    };
    if makes {
        std::fs::create_dir_all(folder).map_err(failed)?;
    } else if !folder.is_dir() {
        return Ok(None);
    }
    let file = File::options()
        .create(true)
        .append(true)
        .open(&path)
        .map_err(failed)?;
    let until = Instant::now()
        + match setting {
            Setting::Launched(_) => TO_VANISH,
            _ => TO_END,
        };
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(Some(file)),
            Err(TryLockError::WouldBlock) if Instant::now() < until => std::thread::sleep(LOOK),
            Err(TryLockError::WouldBlock) => {
                let what = format!(
                    "--checkpoint {}: the folder's elastic run goes on in another process",
                    folder.display()
                );
                let help = "end that one, or name another folder";
                return Err(Failure::new(Exit::Usage, what).help(help));
            }
            // File systems without locks.
            Err(TryLockError::Error(e)) => {
                crate::say(format_args!(
                    "warning: {}: {e}: that the run is not started twice is yours to see to",
                    path.display()
                ));
                return Ok(None);
            }
        }
    }
}
