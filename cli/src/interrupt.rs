//! Ctrl-C: the first one asks to end with what there is, the second ends at once, and takes what
//! is not finished with it. One that comes right behind another is the same one: who ends a run may ask
//! all of its processes, and these each other.

use crate::failure::{Exit, Failure};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// How far apart two interrupts are at least.
pub const SAME: Duration = Duration::from_millis(500);

/// Has SIGUSR1, by which Slurm and others say that the time is nearly over, set the flag too.
pub fn sets_at_usr1(flag: &Arc<AtomicBool>) -> Result<(), Failure> {
    let registered = signal_hook::flag::register(signal_hook::consts::SIGUSR1, Arc::clone(flag));
    registered.map(|_| ()).map_err(no_handler)
}

/// Has a file that reaches its limit of length be an error of its write, as a full disk is; by itself
/// that kills the process.
pub fn outlive_limits_of_files() -> Result<(), Failure> {
    let ignored = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    ignored.map(|_| ()).map_err(no_handler)
}

/// Has the first interrupt (or request to terminate) do nothing: it is another process' to heed. The
/// second one ends this one.
pub fn leave_to_others() -> Result<(), Failure> {
    let first = OnceLock::new();
    sets_at_usr1(&Arc::default())?;
    let handler = move || {
        let now = Instant::now();
        if now - *first.get_or_init(|| now) >= SAME {
            std::process::exit(Exit::Interrupted as i32);
        }
    };
    ctrlc::set_handler(handler).map_err(no_handler)
}

fn no_handler(e: impl std::fmt::Display) -> Failure {
    Failure::new(Exit::Internal, format!("cannot wait for interrupts: {e}"))
}

/// Returns a flag that the first interrupt (or request to terminate) sets, printing `doing`; the
/// second one ends the process. A process can call this once.
pub fn flag(doing: &'static str) -> Result<Arc<AtomicBool>, Failure> {
    let flag = Arc::new(AtomicBool::new(false));
    let set = Arc::clone(&flag);
    // Others set the flag, too, and are no first interrupt ([`sets_at_usr1`]).
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
        crate::say(format_args!(
            "interrupted: {doing}; interrupt again to end at once"
        ));
    };
    ctrlc::set_handler(handler).map_err(no_handler)?;
    Ok(flag)
}
