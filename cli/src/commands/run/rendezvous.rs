//! How the processes of a run of one host learn where process 0 listens and the run's token: from
//! a file that only their user can read, which process 0 writes and removes. That of a process 0 that was
//! killed meanwhile goes when the next one writes its own.

use crate::failure::{Exit, Failure};
use runtime::processes::Token;
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// How names of appointments begin, and of those that are being written, before the writer's number.
const POSTED: &str = "run-";
const UNFINISHED: &str = ".new-";

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
pub struct Posted(PathBuf);

impl Drop for Posted {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
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
    forget_dead(&folder);
    let path = file(&folder, key);
    let text = serde_json::to_string(appointment)
        .map_err(|e| Failure::new(Exit::Internal, format!("an appointment: {e}")))?;
    let written = || -> io::Result<()> {
        // Temporary files are their owner's alone, and this one replaces another one as a whole.
        let prefix = format!("{UNFINISHED}{}-", std::process::id());
        let mut new = tempfile::Builder::new()
            .prefix(&prefix)
            .tempfile_in(&folder)?;
        new.write_all(text.as_bytes())?;
        new.persist(&path)?;
        Ok(())
    };
    written().map_err(|e| failed(format!("{}: {e}", path.display())))?;
    Ok(Posted(path))
}

/// Removes what process 0 of other runs has left that was killed before all had met: their secrets. Who
/// has its number now may be another process, and then it stays for longer.
fn forget_dead(folder: &Path) {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    for path in entries.map(|e| e.path()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let writer = match name.strip_prefix(UNFINISHED) {
            Some(rest) => rest.split('-').next().and_then(|pid| pid.parse().ok()),
            None if name.starts_with(POSTED) => {
                let text = private_text(&path).unwrap_or_default();
                serde_json::from_str(&text).ok().map(|a: Appointment| a.pid)
            }
            None => None,
        };
        if writer.is_some_and(|pid| !is_alive(pid)) {
            let _ = fs::remove_file(&path);
        }
    }
}

fn is_alive(pid: u32) -> bool {
    let pid = i32::try_from(pid)
        .ok()
        .and_then(rustix::process::Pid::from_raw);
    // One of another user, which may not be asked, is alive, too.
    pid.is_some_and(|pid| rustix::process::test_kill_process(pid) != Err(rustix::io::Errno::SRCH))
}

/// Reads the appointment of the run with this key; what is in the way where there is none.
pub fn read(key: &str) -> Result<Appointment, String> {
    let folder = folder();
    if !folder.exists() {
        return Err("it has not begun to listen".into());
    }
    check_folder(&folder)?;
    let path = file(&folder, key);
    let text = private_text(&path).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => "it has not begun to listen".to_string(),
        _ => format!("{}: {e}", path.display()),
    })?;
    serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))
}

/// Reads the token in a file that only its owner can read.
pub fn token(path: &Path) -> Result<Token, Failure> {
    let failed = |what: String| {
        Failure::new(Exit::BadInput, format!("--token-file {}: {what}", path.display())).help(
            "make one with `(umask 077; openssl rand -hex 32 > token)`, and give every process a copy",
        )
    };
    let text = private_text(path).map_err(|e| failed(e.to_string()))?;
    Token::parse(&text).map_err(|e| failed(e.to_string()))
}

/// The text of a small file that is no link and that nobody else can read: what is opened is what
/// is looked at.
fn private_text(path: &Path) -> io::Result<String> {
    const LONGEST: u64 = 1 << 16;
    let no_link = rustix::fs::OFlags::NOFOLLOW.bits() as i32;
    let file = File::options()
        .read(true)
        .custom_flags(no_link)
        .open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() || !is_private(&metadata) {
        let what = "others can read it, or it is theirs";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
    }
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
