//! The manifest of a checkpoint: what it is of, where its states lie, and hashes of all files,
//! its own text included.

use super::problem;
use super::shard::Shard;
use crate::data::Seen;
use crate::error::RuntimeError;
use crate::execute::Session;
use crate::files::{Unfinished, open_regular};
use ir::TrainSpec;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::path::Path;

/// Name of the file.
pub(super) const NAME: &str = "manifest.json";
/// The one version that is read.
const VERSION: u32 = 1;
/// Longest manifest that is read, bytes: 10,000 parts on 100 ranks take 100 MB.
const LONGEST: u64 = 1 << 30;

/// The plan and model of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Origin {
    /// Fingerprint of the plan that it was trained by.
    pub plan_hash: String,
    /// The model: its forward graph in text form.
    pub model: String,
    /// Optimizer steps done.
    pub step: u64,
    /// Seed of the order of the data and of all randomness.
    pub seed: u64,
    /// Where in that order the next step begins: steps times the global batch.
    pub next_sample: u64,
    /// Samples of a step.
    pub global_batch: u64,
    /// Tokens of a sample.
    pub sequence: u64,
    /// The data that the samples were read from; none where nobody named a file, and of earlier builds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<Seen>,
    /// The run that wrote it, where that is one which may go on in parts: all of these have one name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<String>,
}

impl Origin {
    pub(super) fn of(session: &Session, plan: &str, model: &str) -> Self {
        let data = session.data().and_then(|d| d.dataset().seen());
        let run = session.run().map(Into::into);
        let of = (plan, model);
        Origin {
            run,
            ..Self::of_member(session.step_number(), session.spec(), data, of)
        }
    }

    /// The same without a session: of a process that does not coordinate.
    pub(crate) fn of_member(
        step: u64,
        spec: &TrainSpec,
        data: Option<&Seen>,
        (plan, model): (&str, &str),
    ) -> Self {
        Origin {
            plan_hash: plan.into(),
            model: model.into(),
            step,
            seed: spec.seed,
            next_sample: step.saturating_mul(spec.global_batch),
            global_batch: spec.global_batch,
            sequence: spec.sequence,
            data: data.cloned(),
            run: None,
        }
    }
}

/// The document.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    version: u32,
    pub origin: Origin,
    /// Files beside it, by name.
    pub files: BTreeMap<String, Facts>,
    pub states: BTreeMap<String, State>,
    /// Hash of the document in compact form with nothing here.
    blake3: String,
}

/// The facts that a file has to match.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Facts {
    pub bytes: u64,
    blake3: String,
}

/// A state: its global shape, and its parts, which do not overlap.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct State {
    pub shape: Vec<u64>,
    pub parts: Vec<Part>,
}

/// The tensor of the state's path in a file: which indices it has, per dim.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Part {
    pub file: String,
    pub start: Vec<u64>,
    pub shape: Vec<u64>,
}

impl Manifest {
    pub fn new(origin: Origin, shards: Vec<Shard>) -> Self {
        let mut manifest = Manifest {
            version: VERSION,
            origin,
            files: BTreeMap::new(),
            states: BTreeMap::new(),
            blake3: String::new(),
        };
        for Shard {
            file,
            bytes,
            blake3,
            parts,
        } in shards
        {
            for p in parts {
                let state = manifest.states.entry(p.path).or_default();
                state.shape = p.lens;
                state.parts.push(Part {
                    file: file.clone(),
                    start: p.start,
                    shape: p.shape,
                });
            }
            manifest.files.insert(file, Facts { bytes, blake3 });
        }
        manifest.stamped()
    }

    fn hash(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        let bare = Manifest {
            blake3: String::new(),
            ..self.clone()
        };
        // A hasher takes all that is written, and maps have names for keys.
        let _ = serde_json::to_writer(&mut hasher, &bare);
        hasher.finalize().to_string()
    }

    /// Writes it into a checkpoint's folder, through to the disk. Fails, too, where the disk does not
    /// give it back.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        let mut file = Unfinished::file(folder)?;
        let text = serde_json::to_string_pretty(self).map_err(io::Error::other)?;
        file.write_all(text.as_bytes())?;
        file.write_all(b"\n")?;
        file.finish(&folder.join(NAME))?;
        match Self::read(folder) {
            Ok(found) if found.blake3 == self.blake3 => Ok(()),
            _ => Err(not_as_written()),
        }
    }

    /// The same with the hash that its text has to have.
    fn stamped(mut self) -> Self {
        self.blake3 = self.hash();
        self
    }

    /// Reads it from a checkpoint's folder. Fails when it is not as it was written.
    pub fn read(folder: &Path) -> Result<Self, RuntimeError> {
        let path = folder.join(NAME);
        let error = |what: String| problem(&path, what);
        let unread = |e: io::Error| error(format!("cannot read: {e}"));
        let mut bytes = Vec::new();
        let file = open_regular(&path).map_err(unread)?;
        file.take(LONGEST).read_to_end(&mut bytes).map_err(unread)?;
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        let damaged = |e| error(format!("damaged, or no manifest of a checkpoint: {e}"));
        let Version { version } = serde_json::from_slice(&bytes).map_err(damaged)?;
        if version != VERSION {
            return Err(error(format!(
                "its version is {version}, this build reads {VERSION}"
            )));
        }
        let manifest: Manifest = serde_json::from_slice(&bytes).map_err(damaged)?;
        match manifest.hash() == manifest.blake3 {
            true => Ok(manifest),
            false => Err(error("damaged: its text has another hash".into())),
        }
    }
}

/// A manifest's text with the hash that it has to have, for tests of what stands behind the hash.
#[doc(hidden)]
pub fn restamped(text: &[u8]) -> Option<Vec<u8>> {
    let manifest: Manifest = serde_json::from_slice(text).ok()?;
    serde_json::to_vec(&manifest.stamped()).ok()
}

/// Finds what is wrong with files that are not what they have to be. Reads each once.
pub(super) fn verify(folder: &Path, files: &BTreeMap<String, Facts>) -> Vec<RuntimeError> {
    let wrong = files.par_iter().filter_map(|(name, facts)| {
        let path = folder.join(name);
        if Path::new(name).file_name() != Some(name.as_ref()) {
            return Some(problem(&path, "is not the name of a file beside it".into()));
        }
        let wrong = facts.hold(&path).err()?;
        Some(problem(&path, wrong))
    });
    wrong.collect()
}

impl Facts {
    /// Reads a file, and says what is wrong with it.
    pub fn hold(&self, path: &Path) -> Result<(), String> {
        self.hold_of(hash(path, self.bytes).map(|hash| (hash, self.bytes)))
    }

    /// Says what is wrong with a file that was read, of which the hash and the length are given.
    pub fn hold_of(&self, read: io::Result<(String, u64)>) -> Result<(), String> {
        match read {
            Ok((_, bytes)) if bytes != self.bytes => {
                Err(format!("damaged: {}", other_length(bytes, self.bytes)))
            }
            Ok((hash, _)) if hash == self.blake3 => Ok(()),
            Ok(_) => Err("damaged: it has another hash than the manifest says".into()),
            Err(e) => Err(format!("cannot read: {e}")),
        }
    }
}

fn other_length(found: u64, bytes: u64) -> String {
    format!("it has {found} bytes, the manifest says {bytes}")
}

/// The error of a file that is not what was written to it.
pub(super) fn not_as_written() -> io::Error {
    io::Error::other("the disk does not give back what was written to it")
}

/// The hash of a file of so many bytes.
pub(super) fn hash(path: &Path, bytes: u64) -> io::Result<String> {
    let file = open_regular(path)?;
    let found = file.metadata()?.len();
    if found != bytes {
        return Err(io::Error::other(other_length(found, bytes)));
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(file)?;
    Ok(hasher.finalize().to_string())
}
