//! Files and folders that appear under their names when they are complete, or never.
//!
//! A file that is being written has a name of its own beside its place, and is locked by its writer
//! for as long as that lives. It is removed if it is not finished: by the writer when it fails, by
//! [`remove_unfinished`] when the process ends at once, and by [`sweep`] of a later process when
//! the writer died, whose lock the system then took back.
//!
//! To finish is to write through to the disk, then to rename, then to write the folder through:
//! after a power cut there is what was there before, or all of the new.

use rustix::fs::OFlags;
use std::collections::BTreeSet;
use std::fs::{File, TryLockError};
use std::io::{self, Cursor, ErrorKind, Read, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How names begin that belong to us; behind it stand the writer's process and a number.
const PREFIX: &str = ".meshwright-tmp-";

/// Longest that a pipe waits for somebody to open it for writing, and how often is looked.
const TO_BE_WRITTEN: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(20);

/// The files that this process is writing.
static UNFINISHED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// A file or folder that is being written.
#[derive(Debug)]
pub struct Unfinished {
    path: PathBuf,
    /// The file itself; of a folder, what holds its lock.
    file: File,
    /// Whether it stays where it is when it is not finished.
    stays: bool,
}

impl Unfinished {
    /// An empty file in `folder`, with the mode of any new file.
    pub fn file(folder: &Path) -> io::Result<Self> {
        Self::make(folder, |path| File::create_new(path))
    }

    /// An empty folder in `folder`.
    pub fn folder(folder: &Path) -> io::Result<Self> {
        // Somebody may have removed it while the run that writes to it went on.
        std::fs::create_dir_all(folder)?;
        Self::make(folder, |path| {
            std::fs::create_dir(path)?;
            // Gone already: a sweep has taken it for a dead writer's.
            File::open(path).map_err(|e| match e.kind() {
                ErrorKind::NotFound => ErrorKind::AlreadyExists.into(),
                _ => e,
            })
        })
    }

    /// A folder in `folder` that is to go, under another name: a new one to put it in may be more
    /// than a full disk has room for.
    pub fn taken(folder: &Path, old: &Path) -> io::Result<Self> {
        Self::make(folder, |path| {
            if path.exists() {
                return Err(ErrorKind::AlreadyExists.into());
            }
            std::fs::rename(old, path)?;
            File::open(path)
        })
    }

    /// A folder that is there already and keeps its name, and all that is in it, unless it is
    /// finished: it may have more than can be made again.
    pub fn there(path: &Path) -> io::Result<Self> {
        Ok(Unfinished {
            file: File::open(path)?,
            path: path.to_path_buf(),
            stays: true,
        })
    }

    fn make(folder: &Path, make: impl Fn(&Path) -> io::Result<File>) -> io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = folder.join(format!("{PREFIX}{}-{number}", std::process::id()));
            let file = match make(&path) {
                // A writer of another machine or container may have the same process number.
                Err(e) if e.kind() == ErrorKind::AlreadyExists => continue,
                made => made?,
            };
            // Before it is locked, a sweep may take it for a dead writer's. Where there are no
            // locks, nobody can.
            let taken = matches!(file.try_lock(), Err(TryLockError::WouldBlock));
            if !taken && path.exists() {
                unfinished(|all| all.insert(path.clone()));
                return Ok(Unfinished {
                    path,
                    file,
                    stays: false,
                });
            }
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives it the name `target`: files in place of what was there; folders fail where there is
    /// a folder that is not empty.
    pub fn finish(&self, target: &Path) -> io::Result<()> {
        self.file.sync_all()?;
        std::fs::rename(&self.path, target)?;
        sync_folder(parent(target))
    }
}

impl Write for Unfinished {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if self.stays {
            return;
        }
        unfinished(|all| all.remove(&self.path));
        // Not there any more if it was finished; else what fails here is left to a sweep.
        let _ = remove(&self.path);
    }
}

/// Removes what this process has not finished, to be called when it is about to end at once.
/// Other threads may be writing into it.
pub fn remove_unfinished() {
    const TRIES: usize = 5;
    for path in unfinished(std::mem::take) {
        for _ in 0..TRIES {
            if remove(&path).is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Removes what dead writers left in a folder. What cannot be read or removed stays.
pub fn sweep(folder: &Path) {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    for entry in entries.filter(|e| is_ours(&e.file_name().to_string_lossy())) {
        // We make no links and pipes; the latter would be waited for.
        let may_be = entry.file_type().is_ok_and(|t| t.is_file() || t.is_dir());
        let lock = may_be.then(|| File::open(entry.path()));
        if lock.is_some_and(|l| l.is_ok_and(|lock| lock.try_lock().is_ok())) {
            let _ = remove(&entry.path());
        }
    }
}

/// Opens a file for reading that must be a regular one: a pipe would be waited for until somebody
/// writes to it, and a device may have no end. Fails for these; a folder fails where it is read.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let kind = std::fs::metadata(path)?.file_type();
    match kind.is_file() || kind.is_dir() {
        true => File::open(path),
        false => Err(io::Error::new(
            ErrorKind::InvalidInput,
            "it is a pipe or a device, and no regular file",
        )),
    }
}

/// An [input](open_input) that is read from its beginning to its end.
pub type Input = io::Chain<Cursor<Vec<u8>>, File>;

/// Opens a file that is read once: a regular one, or a pipe that somebody writes to, as
/// `<(command)` and `/dev/stdin` may be. A pipe that nobody has opened for writing after
/// [two seconds](TO_BE_WRITTEN) is refused, which would else be waited for without end, and so is a
/// device. A folder fails where it is read.
pub fn open_input(path: &Path) -> io::Result<Input> {
    if !std::fs::metadata(path)?.file_type().is_fifo() {
        let file = open_regular(path)?;
        return Ok(Cursor::new(Vec::new()).chain(file));
    }
    let at_once = OFlags::NONBLOCK.bits().cast_signed();
    let mut pipe = File::options()
        .read(true)
        .custom_flags(at_once)
        .open(path)?;
    let until = Instant::now() + TO_BE_WRITTEN;
    let mut first = vec![0; 1 << 12];
    let n = loop {
        match pipe.read(&mut first) {
            // It has no writer.
            Ok(0) if Instant::now() < until => std::thread::sleep(LOOK),
            Ok(0) => {
                let what = "it is a pipe, and nobody writes to it";
                return Err(io::Error::new(ErrorKind::InvalidInput, what));
            }
            Ok(n) => break n,
            // It has one that takes its time.
            Err(e) if e.kind() == ErrorKind::WouldBlock => break 0,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    };
    first.truncate(n);
    let flags = rustix::fs::fcntl_getfl(&pipe)? - OFlags::NONBLOCK;
    rustix::fs::fcntl_setfl(&pipe, flags)?;
    Ok(Cursor::new(first).chain(pipe))
}

/// Writes what a folder lists through to the disk.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    match cfg!(unix) {
        true => File::open(folder)?.sync_all(),
        false => Ok(()),
    }
}

/// The folder of a file.
pub fn parent(path: &Path) -> &Path {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
    folder.unwrap_or(Path::new("."))
}

fn is_ours(name: &str) -> bool {
    let number = |n: &str| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit());
    let numbers = name.strip_prefix(PREFIX).and_then(|n| n.split_once('-'));
    numbers.is_some_and(|(process, n)| number(process) && number(n))
}

fn remove(path: &Path) -> io::Result<()> {
    let removed = match std::fs::symlink_metadata(path) {
        Ok(m) if m.is_dir() => std::fs::remove_dir_all(path),
        Ok(_) => std::fs::remove_file(path),
        Err(e) => Err(e),
    };
    match removed {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Every change of the set is whole, so a thread that panicked left it well.
fn unfinished<T>(f: impl FnOnce(&mut BTreeSet<PathBuf>) -> T) -> T {
    f(&mut UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).unwrap();
        let mut names: Vec<String> = entries
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn what_is_finished_appears_whole_and_what_is_not_goes() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        std::fs::write(&target, b"old").unwrap();
        let mut dropped = Unfinished::file(dir.path()).unwrap();
        dropped.write_all(b"half").unwrap();
        drop(dropped);
        assert_eq!(std::fs::read(&target).unwrap(), b"old");
        let mut file = Unfinished::file(dir.path()).unwrap();
        file.write_all(b"new").unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), b"old");
        file.finish(&target).unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), b"new");
        let folder = Unfinished::folder(dir.path()).unwrap();
        std::fs::write(folder.path().join("a"), b"1").unwrap();
        folder.finish(&dir.path().join("folder")).unwrap();
        // A folder replaces none that has something in it.
        let again = Unfinished::folder(dir.path()).unwrap();
        assert!(again.finish(&dir.path().join("folder")).is_err());
        drop(again);
        assert_eq!(names(dir.path()), ["folder", "out"]);
    }

    #[test]
    fn only_what_dead_writers_left_is_swept() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let live = [Unfinished::file(dir.path()), Unfinished::folder(dir.path())];
        std::fs::write(at(".meshwright-tmp-7-0"), b"left").unwrap();
        std::fs::create_dir(at(".meshwright-tmp-7-1")).unwrap();
        std::fs::write(at(".meshwright-tmp-7-1").join("shard"), b"left").unwrap();
        // Names that are not of our making, and links whoever made them.
        let others = [
            ".meshwright-tmp-",
            ".meshwright-tmp-7-x",
            ".meshwright-notes",
        ];
        for name in others {
            std::fs::write(at(name), b"kept").unwrap();
        }
        #[cfg(unix)]
        std::os::unix::fs::symlink(at(others[2]), at(".meshwright-tmp-7-2")).unwrap();
        sweep(dir.path());
        let mut expected: Vec<String> = others.map(String::from).to_vec();
        for l in &live {
            let path = l.as_ref().unwrap().path();
            expected.push(path.file_name().unwrap().to_str().unwrap().into());
        }
        #[cfg(unix)]
        expected.push(".meshwright-tmp-7-2".into());
        expected.sort();
        assert_eq!(names(dir.path()), expected);
        assert_eq!(std::fs::read(at(others[2])).unwrap(), b"kept");
    }
}
