//! Which checkpoints of a folder stay when a newer one is there.

use super::numbered;
use crate::files::Unfinished;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// The checkpoints that this process has seen to be whole: those that it wrote, as they were read
/// again, and those that it has verified.
#[derive(Clone, Debug, Default)]
pub struct Whole(Arc<Mutex<BTreeSet<PathBuf>>>);

impl Whole {
    /// Notes one that is whole.
    pub(crate) fn add(&self, path: &Path) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.insert(path.to_path_buf());
    }
    /// Whether a checkpoint is whole: one that is not known to be is read.
    fn has(&self, path: &Path) -> bool {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.contains(path) {
            return true;
        }
        // Reading takes long.
        drop(known);
        let is_whole = super::verify(path).is_ok();
        if is_whole {
            self.add(path);
        }
        is_whole
    }
}

/// Has all checkpoints go that are older than the newest `kept` whole ones, at least one. Damaged
/// ones do not count. So the newest one that is whole never goes.
pub(super) fn prune(folder: &Path, kept: usize, whole: &Whole) {
    if kept == usize::MAX {
        return;
    }
    let mut n = 0;
    for (_, path) in numbered(folder).into_iter().rev() {
        if n >= kept.max(1) {
            remove(folder, &path);
        } else if whole.has(&path) {
            n += 1;
        }
    }
}

/// Has a checkpoint go. One that cannot be removed is in nobody's way. It goes under another name, so
/// that there never is a part of it under its own.
pub(super) fn remove(folder: &Path, old: &Path) {
    let _ =
        Unfinished::folder(folder).and_then(|grave| std::fs::rename(old, grave.path().join("old")));
}
