//! Which checkpoints of a folder stay when a newer one is there.

use super::{numbered, reading};
use crate::error::RuntimeError;
use crate::files::Unfinished;
use std::collections::BTreeMap;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// The checkpoints of which this process knows whether they are whole: those that it wrote are, as
/// they were read again, and others are verified once.
#[derive(Clone, Debug, Default)]
pub struct Whole(Arc<Mutex<BTreeMap<PathBuf, bool>>>);

impl Whole {
    /// Notes one that is whole.
    pub(crate) fn add(&self, path: &Path) {
        self.note(path, true);
    }
    /// Looks whether a checkpoint is whole: one of which that is not known is read.
    fn has(&self, path: &Path) -> bool {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(is_whole) = known.get(path) {
            return *is_whole;
        }
        // Reading takes long.
        drop(known);
        let is_whole = super::verify(path).is_ok();
        self.note(path, is_whole);
        is_whole
    }
    fn note(&self, path: &Path, is_whole: bool) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.insert(path.to_path_buf(), is_whole);
    }
}

/// Has all checkpoints go that are older than the newest `kept` whole ones, at least one. Damaged
/// ones do not count. So the newest one that is whole never goes. Nor do those of a step that the
/// newest has not reached, while the disk has [room](make_room): a run that was begun again, and
/// does not go on from them, would be all that is left of what they have.
pub(super) fn prune(folder: &Path, kept: usize, whole: &Whole) {
    if kept == usize::MAX {
        return;
    }
    let mut n = 0;
    let all = numbered(folder);
    let reached = all.last().and_then(|(_, path)| step_of(path));
    for (_, path) in all.into_iter().rev() {
        if step_of(&path) > reached {
            continue;
        }
        if n >= kept.max(1) {
            remove(folder, &path);
        } else if whole.has(&path) {
            n += 1;
        }
    }
}

/// The step of a checkpoint, as its name has it.
pub fn step_of(path: &Path) -> Option<u64> {
    let name = path.file_name()?.to_str()?;
    name.rsplit_once("-step-")?.1.parse().ok()
}

/// Where the disk has no room for another checkpoint as large as the newest, and that was the reason
/// why one could not be written, has those go already that would go once it is there. Where that is
/// not enough, those of later steps go, too, the furthest last. The newest whole one stays. Whether
/// any did go.
pub(super) fn make_room(folder: &Path, kept: usize, whole: &Whole, error: &RuntimeError) -> bool {
    if !error.is_of_files() || kept == usize::MAX {
        return false;
    }
    let before = numbered(folder);
    let Some((_, newest)) = before.iter().rev().find(|(_, path)| whole.has(path)) else {
        return false;
    };
    let needed = bytes_of(newest);
    let is_short = || {
        let disk = rustix::fs::statvfs(folder);
        disk.is_ok_and(|d| d.f_bavail.saturating_mul(d.f_frsize) < needed)
    };
    if !is_short() {
        return false;
    }
    prune(folder, kept.saturating_sub(1), whole);
    let reached = step_of(newest);
    let mut further = before.clone();
    further.retain(|(_, path)| step_of(path) > reached);
    further.sort_by_key(|(_, path)| step_of(path));
    for (_, path) in further {
        if is_short() {
            remove(folder, &path);
        }
    }
    numbered(folder).len() < before.len()
}

/// Bytes that the files of a checkpoint take on the disk, which gives them whole blocks.
fn bytes_of(path: &Path) -> u64 {
    let files = std::fs::read_dir(path).into_iter().flatten().flatten();
    let taken = |m: Metadata| m.len().max(BLOCK.saturating_mul(m.blocks()));
    let sizes = files.filter_map(|file| file.metadata().ok().map(taken));
    sizes.sum()
}

/// The unit of the system's count of blocks, whatever those of the file system are.
const BLOCK: u64 = 512;

/// Has a checkpoint go. One that cannot be removed is in nobody's way. It goes under another name,
/// so that there never is a part of it under its own.
pub(super) fn remove(folder: &Path, old: &Path) {
    // One that somebody reads goes when the next ones do.
    let Ok(nobody_reads) = reading::end(old) else {
        return;
    };
    let taken = Unfinished::taken(folder, old);
    // Servers keep a file that is open, and its folder.
    drop(nobody_reads);
    drop(taken);
}
