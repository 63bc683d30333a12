//! The finding of a run that failed about itself, in a file beside its records.

use super::{host, problem};
use crate::error::RuntimeError;
use crate::files;
use ir::Rank;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read};
use std::path::Path;

/// The name of the file.
pub(super) const VERDICT: &str = "verdict.json";
/// Bytes that a finding has at most: a hundred for each of some hundred thousand ranks are fewer.
const LONGEST: u64 = 1 << 26;

/// The finding of a run that failed about itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// Its error, in words.
    pub error: String,
    /// The ranks that it names, and perhaps others of theirs; none where no rank is to blame.
    pub found: BTreeMap<Rank, Fate>,
    /// The process whose finding it is.
    #[serde(default)]
    pub by: Option<Finder>,
    /// The fingerprint of the run's plan.
    #[serde(default)]
    pub plan: Option<String>,
}

/// A process that found something about its run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finder {
    /// Its number on its host.
    pub pid: u32,
    /// Its host.
    pub host: String,
}

impl Finder {
    /// This process.
    pub fn me() -> Self {
        Finder {
            pid: std::process::id(),
            host: host(),
        }
    }
}

/// How a process is lost that is there, in words.
pub const SILENT: &str = "it does not answer";

/// The fate of a rank that ended its run.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fate {
    /// Its process is gone, or does not answer: how, in words.
    Lost(String),
    /// Another one waited for it too long.
    Missed {
        /// Who waited.
        by: Rank,
        /// How long.
        seconds: u64,
    },
    /// An instruction failed on it, or it panicked.
    Failed,
}

impl Verdict {
    /// Writes it beside the records, whole or not at all.
    pub fn write(&self, folder: &Path) -> Result<(), RuntimeError> {
        let path = folder.join(VERDICT);
        let fresh = folder.join(format!("verdict-{}.new", std::process::id()));
        let failed = |e: io::Error| problem(&path, e.to_string());
        let text = serde_json::to_vec_pretty(self).map_err(|e| failed(e.into()))?;
        let written = std::fs::write(&fresh, text).and_then(|()| std::fs::rename(&fresh, &path));
        written.map_err(|e| {
            let _ = std::fs::remove_file(&fresh);
            failed(e)
        })
    }
    /// Reads that of a folder; none where there is none, or it cannot be read.
    pub fn read(folder: &Path) -> Option<Self> {
        Self::find(folder).ok()?
    }
    /// Reads that of a folder; none where there is none.
    ///
    /// Fails when it cannot be read, or is not whole.
    pub fn find(folder: &Path) -> Result<Option<Self>, RuntimeError> {
        let path = folder.join(VERDICT);
        match Self::at(&path) {
            Ok(verdict) => Ok(Some(verdict)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(problem(&path, e.to_string())),
        }
    }
    pub(super) fn at(path: &Path) -> io::Result<Self> {
        let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        let file = files::open_regular(path)?;
        match file.metadata()?.len() {
            n if n > LONGEST => {
                let what = format!("it has {n} bytes, and no finding has more than {LONGEST}");
                return Err(invalid(what));
            }
            _ => {}
        }
        let mut text = Vec::new();
        file.take(LONGEST).read_to_end(&mut text)?;
        match text.is_empty() {
            true => Err(invalid("it is empty".into())),
            false => serde_json::from_slice(&text)
                .map_err(|e| invalid(format!("it is no finding of a run, or not all of it: {e}"))),
        }
    }
    /// All ranks that it names.
    pub fn ranks(&self) -> BTreeSet<Rank> {
        let by = self.found.values().filter_map(|fate| match fate {
            Fate::Missed { by, .. } => Some(*by),
            Fate::Lost(_) | Fate::Failed => None,
        });
        self.found.keys().copied().chain(by).collect()
    }
}
