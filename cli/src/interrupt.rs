//! Ctrl-C: the first one asks to end with what there is, the second ends at once, and takes what
//! is not finished with it.

use crate::failure::{Exit, Failure};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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
    let ignored = Arc::new(AtomicBool::new(false));
    sets_at_usr1(&Arc::default())?;
    let handler = move || {
        if ignored.swap(true, Ordering::Relaxed) {
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
    let was_interrupted = AtomicBool::new(false);
    let handler = move || {
        set.store(true, Ordering::Relaxed);
        if was_interrupted.swap(true, Ordering::Relaxed) {
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
