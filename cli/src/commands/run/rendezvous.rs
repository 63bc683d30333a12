//! How the processes of a run of one host learn where process 0 listens and the run's token: from
//! a file that only their user can read, which process 0 writes and removes.

use crate::failure::{Exit, Failure};
use crate::outputs;
use runtime::processes::Token;
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, Metadata};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Where process 0 listens, and the secret of its run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Appointment {
    /// Host and port.
    pub address: String,
    token: String,
}

impl Appointment {
    /// Puts both together.
    pub fn new(address: impl ToString, token: &Token) -> Self {
        Appointment {
            address: address.to_string(),
            token: token.reveal(),
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
    let checked = made.and_then(|()| fs::symlink_metadata(&folder));
    let metadata = checked.map_err(|e| failed(format!("{}: {e}", folder.display())))?;
    if !metadata.is_dir() || !is_private(&metadata) {
        return Err(failed(format!(
            "{} can be read by others, or is theirs: no secret is written there",
            folder.display()
        )));
    }
    let path = file(&folder, key);
    let text = serde_json::to_string(appointment)
        .map_err(|e| Failure::new(Exit::Internal, format!("an appointment: {e}")))?;
    // A file that replaces another one as a whole has the rights of temporary files, 0600.
    outputs::write_atomic(&path, text.as_bytes())?;
    let private = fs::set_permissions(&path, fs::Permissions::from_mode(0o600));
    private.map_err(|e| failed(format!("{}: {e}", path.display())))?;
    Ok(Posted(path))
}

/// Reads the appointment of the run with this key; what is in the way where there is none.
pub fn read(key: &str) -> Result<Appointment, String> {
    let path = file(&folder(), key);
    let said = |e: io::Error| match e.kind() {
        io::ErrorKind::NotFound => "it has not begun to listen".to_string(),
        _ => format!("{}: {e}", path.display()),
    };
    let metadata = fs::symlink_metadata(&path).map_err(said)?;
    if !metadata.is_file() || !is_private(&metadata) {
        return Err(format!("{} is not private", path.display()));
    }
    let text = fs::read_to_string(&path).map_err(said)?;
    serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))
}

/// Reads the token in a file that only its owner can read.
pub fn token(path: &Path) -> Result<Token, Failure> {
    let failed = |what: String| {
        Failure::new(Exit::BadInput, format!("--token-file {}: {what}", path.display())).help(
            "make one with `(umask 077; openssl rand -hex 32 > token)`, and give every process a copy",
        )
    };
    let metadata = fs::metadata(path).map_err(|e| failed(e.to_string()))?;
    if !metadata.is_file() || !is_private(&metadata) {
        return Err(failed("others can read it, or it is theirs".into()));
    }
    let text = fs::read_to_string(path).map_err(|e| failed(e.to_string()))?;
    Token::parse(&text).map_err(|e| failed(e.to_string()))
}

fn folder() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|d| !d.is_empty()) {
        Some(own) => Path::new(&own).join("meshwright"),
        None => std::env::temp_dir().join(format!(
            "meshwright-{}",
            rustix::process::geteuid().as_raw()
        )),
    }
}

fn file(folder: &Path, key: &str) -> PathBuf {
    let hash = blake3::hash(key.as_bytes()).to_hex();
    folder.join(format!("run-{}.json", &hash[..16]))
}

/// Only this user can read it, or, for a folder, look into it.
fn is_private(metadata: &Metadata) -> bool {
    metadata.uid() == rustix::process::geteuid().as_raw() && metadata.mode() & 0o077 == 0
}
