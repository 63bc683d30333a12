//! How the processes of a run of one host learn where process 0 listens and the run's token: from
//! a file that only their user can read, which process 0 writes and removes. It holds a lock on it
//! meanwhile. The file of a process 0 that was killed, whose lock the system took back, goes when
//! the next one writes its own: by no number of a process is known whether it lives, as containers
//! and hosts that share the folder each have their own.

use crate::failure::{Exit, Failure};
use runtime::processes::Token;
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File, Metadata, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How names of appointments begin, and of those that are being written.
const POSTED: &str = "run-";
const UNFINISHED: &str = ".new-";
/// Longest that one waits to have the folder to itself, which takes others no time, and how often
/// it looks.
const TO_BE_ALONE: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(5);

/// Where process 0 listens, and the secret of its run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Appointment {
    /// Host and port.
    pub address: String,
    token: String,
    /// Process 0 on its host.
    pub pid: u32,
}

impl Appointment {
    /// Puts both together.
    pub fn new(address: impl ToString, token: &Token) -> Self {
        Appointment {
            address: address.to_string(),
            token: token.reveal(),
            pid: std::process::id(),
        }
    }
    /// The token.
    pub fn token(&self) -> Result<Token, String> {
        Token::parse(&self.token).map_err(|e| e.to_string())
    }
}

/// The file of a run, while process 0 has it there.
pub struct Posted {
    folder: PathBuf,
    path: PathBuf,
    /// The file, locked.
    file: File,
}

impl Drop for Posted {
    fn drop(&mut self) {
        // Where it cannot have the folder to itself, others have long let it be: its own file goes.
        let _alone = alone(&self.folder);
        if is_at(&self.file, &self.path) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Takes a folder for this process as long as the result is kept, so that between a look at a file
/// and its removal nobody puts another one in its place. None where the file system has no locks of
/// folders, or somebody does not give it back.
fn alone(folder: &Path) -> Option<File> {
    let file = File::open(folder).ok()?;
    let until = Instant::now() + TO_BE_ALONE;
    loop {
        match file.try_lock() {
            Ok(()) => return Some(file),
            Err(TryLockError::WouldBlock) if Instant::now() < until => std::thread::sleep(LOOK),
            Err(_) => return None,
        }
    }
}

/// Whether it is this open file that has this path.
fn is_at(file: &File, path: &Path) -> bool {
    let of = |m: Metadata| (m.dev(), m.ino());
    let own = file.metadata().map(of);
    own.is_ok_and(|own| fs::symlink_metadata(path).map(of).is_ok_and(|at| at == own))
}

/// Writes an appointment for the run with this key.
pub fn post(key: &str, appointment: &Appointment) -> Result<Posted, Failure> {
    let folder = folder();
    let failed = |what: String| {
        Failure::new(Exit::RunFailed, what)
            .help("point TMPDIR, or XDG_RUNTIME_DIR, to a folder of your own")
    };
    let made = DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&folder);
    made.map_err(|e| failed(format!("{}: {e}", folder.display())))?;
    check_folder(&folder).map_err(failed)?;
    let alone = alone(&folder);
    if alone.is_some() {
        forget_dead(&folder);
    }
    let path = file(&folder, key);
    let text = serde_json::to_string(appointment)
        .map_err(|e| Failure::new(Exit::Internal, format!("an appointment: {e}")))?;
    let written = || -> io::Result<File> {
        // Temporary files are their owner's alone, and this one replaces another one as a whole.
        let mut new = tempfile::Builder::new()
            .prefix(UNFINISHED)
            .tempfile_in(&folder)?;
        // Where there are no locks nobody takes it for one that was left.
        let _ = new.as_file().try_lock();
        new.write_all(text.as_bytes())?;
        Ok(new.persist(&path)?)
    };
    let file = written().map_err(|e| failed(format!("{}: {e}", path.display())))?;
    drop(alone);
    Ok(Posted { folder, path, file })
}

/// Removes the secrets that process 0 of other runs has left that was killed before all had met. To
/// be called by who has the folder to itself: nobody else writes or removes any then.
fn forget_dead(folder: &Path) {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    for path in entries.map(|e| e.path()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if !name.starts_with(UNFINISHED) && !name.starts_with(POSTED) {
            continue;
        }
        // A host's file system may want a lock to be of a file that can be written to.
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = File::options()
            .read(true)
            .write(true)
            .custom_flags(flags.bits().cast_signed())
            .open(&path);
        let is_left = |file: &File| {
            let is_file = file.metadata().is_ok_and(|m| m.is_file());
            is_file && file.try_lock().is_ok() && is_at(file, &path)
        };
        if file.as_ref().is_ok_and(is_left) {
            let _ = fs::remove_file(&path);
        }
    }
}

/// The words for a process 0 that cannot be found: once all have joined it is found no more.
const NOBODY_LISTENS: &str = "it has not begun to listen, or the run has begun without this process, as another one with its number has joined";

/// Reads the appointment of the run with this key; what is in the way where there is none.
pub fn read(key: &str) -> Result<Appointment, String> {
    let folder = folder();
    if !folder.exists() {
        return Err(NOBODY_LISTENS.into());
    }
    check_folder(&folder)?;
    let path = file(&folder, key);
    let text = private_text(&path, OFlags::NOFOLLOW).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => NOBODY_LISTENS.to_string(),
        _ => format!("{}: {e}", path.display()),
    })?;
    serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))
}

/// Reads the token in a file that only its owner can read, or by a descriptor that this process was
/// started with.
pub fn token(path: &Path) -> Result<Token, Failure> {
    let failed = |what: String| {
        Failure::new(Exit::BadInput, format!("--token-file {}: {what}", path.display())).help(
            "make one with `(umask 077; openssl rand -hex 32 > token)`, and give every process a copy",
        )
    };
    let text = match is_descriptor(path) {
        // Whoever opened it has chosen what it is: a pipe, or a file that has no name any more.
        true => File::open(path).and_then(|file| text_of(&file)),
        // A link that its user names, as those by which a cluster's manager hands secrets out.
        false => private_text(path, OFlags::empty()),
    };
    let text = text.map_err(|e| failed(e.to_string()))?;
    Token::parse(&text).map_err(|e| failed(e.to_string()))
}

/// Whether a path is that of one of this process' descriptors.
fn is_descriptor(path: &Path) -> bool {
    let number = |folder: &str| path.strip_prefix(folder).ok()?.to_str();
    let number = number("/dev/fd").or_else(|| number("/proc/self/fd"));
    number.is_some_and(|n| n.parse::<u32>().is_ok())
}

/// The text of a small file that nobody else can read, opened with these flags: what is opened is
/// what is looked at, and a pipe holds nobody up.
fn private_text(path: &Path, flags: OFlags) -> io::Result<String> {
    let flags = flags | OFlags::NONBLOCK;
    let file = File::options()
        .read(true)
        .custom_flags(flags.bits().cast_signed())
        .open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() || !is_private(&metadata) {
        let what = "others can read it, or it is theirs";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
    }
    text_of(&file)
}

fn text_of(file: &File) -> io::Result<String> {
    const LONGEST: u64 = 1 << 16;
    let mut text = String::new();
    file.take(LONGEST).read_to_string(&mut text)?;
    Ok(text)
}

fn check_folder(folder: &Path) -> Result<(), String> {
    let metadata = fs::symlink_metadata(folder);
    let metadata = metadata.map_err(|e| format!("{}: {e}", folder.display()))?;
    match metadata.is_dir() && is_private(&metadata) {
        true => Ok(()),
        false => Err(format!(
            "{} can be read by others, or is theirs: no secret is kept there",
            folder.display()
        )),
    }
}

/// The user's folder for what runs, where there is one, or a private one for temporary files.
fn folder() -> PathBuf {
    let own = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    match own.filter(|d| d.is_dir()) {
        Some(own) => own.join("meshwright"),
        None => {
            let user = rustix::process::geteuid().as_raw();
            std::env::temp_dir().join(format!("meshwright-{user}"))
        }
    }
}

fn file(folder: &Path, key: &str) -> PathBuf {
    let hash = blake3::hash(key.as_bytes()).to_hex();
    folder.join(format!("{POSTED}{}.json", &hash[..16]))
}

/// Only this user can read it, or, for a folder, look into it.
fn is_private(metadata: &Metadata) -> bool {
    metadata.uid() == rustix::process::geteuid().as_raw() && metadata.mode() & 0o077 == 0
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// Whatever number the process has that has posted it, as in another container.
    #[test]
    fn what_is_held_stays_and_what_nobody_holds_goes() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path();
        let write = |name: &str| {
            let path = folder.join(name);
            fs::write(&path, "{}").unwrap();
            (File::open(&path).unwrap(), path)
        };
        let held = [write("run-held.json"), write(".new-held")];
        held.iter().for_each(|(file, _)| file.try_lock().unwrap());
        let left = [write("run-left.json"), write(".new-left")];
        let others = write("notes.txt");
        let away = folder.join("run-away.json");
        std::os::unix::fs::symlink(&others.1, &away).unwrap();
        forget_dead(folder);
        assert!(held.iter().all(|(_, path)| path.exists()));
        assert!(left.iter().all(|(_, path)| !path.exists()));
        assert!(others.1.exists() && away.exists());
    }

    /// Nobody can tell the two from outside.
    #[test]
    fn who_comes_too_late_is_told_so() {
        let problem = read("a run that there never was").err().unwrap();
        assert!(
            problem.contains("has not begun to listen, or the run has begun without"),
            "{problem}"
        );
        assert!(problem.contains("another one with its number"), "{problem}");
    }

    /// Those of a cluster's manager are links to files; who can read these is looked at all the same.
    #[test]
    fn a_token_may_be_a_link_to_a_private_file() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("secret"), dir.path().join("token"));
        fs::write(&file, "ab".repeat(32)).unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let may = |mode| fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
        may(0o600);
        assert!(token(&link).is_ok());
        may(0o640);
        let problem = token(&link).unwrap_err().to_string();
        assert!(problem.contains("others can read it"), "{problem}");
    }

    /// A run of the same key that another process 0 has begun meanwhile keeps its file.
    #[test]
    fn only_the_own_file_goes_at_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let post = || {
            let path = dir.path().join("run-same.json");
            let new = tempfile::NamedTempFile::new_in(dir.path()).unwrap();
            let file = new.persist(&path).unwrap();
            let folder = dir.path().to_path_buf();
            Posted { folder, path, file }
        };
        let first = post();
        let path = first.path.clone();
        let second = post();
        drop(first);
        assert!(path.exists());
        drop(second);
        assert!(!path.exists());
    }
}
