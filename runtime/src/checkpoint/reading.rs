//! Checkpoints that somebody reads stay until that is done: a run that writes to their folder has
//! older ones go, whoever reads them.
//!
//! A reader has a shared lock of the manifest, which needs no right to write. Who has a checkpoint go
//! has the only one. File systems without locks have neither.

use super::manifest;
use crate::files::open_regular;
use std::fs::{File, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a checkpoint that is going may still have its name.
const TO_GO: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(2);

/// Keeps the checkpoint in a folder from going until the result is dropped; nothing where there is
/// none any more, or there are no locks.
pub(super) fn hold(folder: &Path) -> Option<File> {
    let path = folder.join(manifest::NAME);
    let began = Instant::now();
    while began.elapsed() < TO_GO {
        let file = open_regular(&path).ok()?;
        match file.try_lock_shared() {
            Ok(()) if is_at(&file, &path) => return Some(file),
            // It has gone, and there may be another one of its name.
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOOK),
            Err(TryLockError::Error(_)) => return None,
        }
    }
    None
}

/// Keeps others from beginning to read a checkpoint that is about to go, until the result is dropped.
/// Fails where somebody reads it.
pub(super) fn end(folder: &Path) -> Result<Option<File>, IsRead> {
    let path = folder.join(manifest::NAME);
    let Ok(file) = open_regular(&path) else {
        return Ok(None);
    };
    let file = match file.try_lock() {
        // Servers may want a file that is open for writing.
        Err(TryLockError::Error(_)) => match File::options().append(true).open(&path) {
            Ok(file) => file,
            Err(_) => return Ok(None),
        },
        _ => file,
    };
    // A lock that it has already is taken once more.
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Err(IsRead),
        Err(TryLockError::Error(_)) => Ok(None),
    }
}

/// Somebody reads it.
pub(super) struct IsRead;

fn is_at(file: &File, path: &Path) -> bool {
    let of = |m: std::fs::Metadata| (m.dev(), m.ino());
    let [open, named] = [file.metadata(), std::fs::metadata(path)].map(|m| m.map(of).ok());
    open.is_some() && open == named
}
