//! Ctrl-C: the first one asks to end with what there is, the second ends at once, and takes what
//! is only there for a while with it.

use crate::failure::{Exit, Failure};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Files and folders that nobody would remove when the process ends at once.
static TEMPORARY: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Times that removing a folder is tried: somebody may be writing into it.
const TRIES: usize = 5;

/// Has the second interrupt remove a file or folder of a name that is used once. Who made it
/// removes or renames it otherwise; it may be gone by then.
pub fn is_temporary(path: &Path) {
    // Two threads at most add names; one that panics has added its own or not.
    let mut all = TEMPORARY.lock().unwrap_or_else(PoisonError::into_inner);
    all.push(path.to_path_buf());
}

/// A flag that the first interrupt (or request to terminate) sets, saying `doing` what; the
/// second one ends the process. A process can ask once.
pub fn flag(doing: &'static str) -> Result<Arc<AtomicBool>, Failure> {
    let flag = Arc::new(AtomicBool::new(false));
    let set = Arc::clone(&flag);
    let handler = move || {
        if set.swap(true, Ordering::Relaxed) {
            remove_temporary();
            std::process::exit(Exit::Interrupted as i32);
        }
        crate::say(format_args!(
            "interrupted: {doing}; interrupt again to end at once"
        ));
    };
    ctrlc::set_handler(handler)
        .map_err(|e| Failure::new(Exit::Internal, format!("cannot wait for interrupts: {e}")))?;
    Ok(flag)
}

fn remove_temporary() {
    let all = TEMPORARY.lock().unwrap_or_else(PoisonError::into_inner);
    for path in all.iter() {
        for _ in 0..TRIES {
            let removed = match path.is_dir() {
                true => std::fs::remove_dir_all(path),
                false => std::fs::remove_file(path),
            };
            if removed.is_ok() || !path.exists() {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
