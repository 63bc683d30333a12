//! Checkpoints: the training state in a folder, a file for each rank that keeps a part of it.
//!
//! ```text
//! state/0001-step-60/rank-0.safetensors    parts of the states, by path
//!                    rank-1.safetensors
//!                    manifest.json         what the states are, which file has which part,
//!                                          the length and hash of every file, its own hash
//!       0002-step-120/..
//! ```
//!
//! Nothing in the states depends on the plan, so a run can go on under any other: a rank then
//! reads the byte ranges that make its part. Neither writing nor reading holds more than what a
//! rank's arena has anyway.
//!
//! What is written replaces nothing. Files are written through to the disk in a folder beside,
//! then the manifest, then the folder gets its name, one number above the newest; only then old
//! checkpoints go, all but the [newest two](KEPT). A run goes on from the newest that is what its
//! manifest says; nothing else points at it.

mod manifest;
mod shard;
mod share;

pub use manifest::{Origin, restamped};
pub(crate) use shard::Shard;
pub(crate) use shard::write as write_shard;
pub(crate) use share::shares;

use crate::error::RuntimeError;
use crate::execute::{Local, Session};
use crate::files::{self, Unfinished};
use ir::text::ParseError;
use manifest::Manifest;
use serde::{Deserialize, Serialize};
use shard::Piece;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Checkpoints that stay in a folder: should the newest be damaged, there is one more.
pub const KEPT: usize = 2;
/// The file of a folder from before checkpoints: all states in one file, without hashes.
const SINGLE: &str = "state.safetensors";

/// A checkpoint whose files are what its manifest says.
#[derive(Debug, Serialize, Deserialize)]
pub struct Checkpoint {
    path: PathBuf,
    step: u64,
    origin: Option<Origin>,
    states: BTreeMap<String, Stored>,
}

/// Where the parts of a state lie.
#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    lens: Vec<u64>,
    pieces: Vec<Piece>,
}

/// The result of [`find`].
#[derive(Debug)]
pub struct Found {
    /// The newest checkpoint that is whole.
    pub checkpoint: Checkpoint,
    /// The errors of newer ones.
    pub passed_over: Vec<RuntimeError>,
}

/// Writes a session's states as the newest checkpoint in `folder`, of which [`KEPT`] stay, and
/// returns its path. `plan` is the fingerprint of the plan, `model` the text of its forward graph.
///
/// Fails when files cannot be written, or a state is not finite: then everything is as before,
/// and the session can go on.
pub fn save(
    folder: &Path,
    session: &mut Session,
    plan: &str,
    model: &str,
) -> Result<PathBuf, RuntimeError> {
    save_keeping(KEPT, folder, session, plan, model)
}

/// The same, of which the newest `kept` stay, at least one.
pub fn save_keeping(
    kept: usize,
    folder: &Path,
    session: &mut Session,
    plan: &str,
    model: &str,
) -> Result<PathBuf, RuntimeError> {
    let error = |e: std::io::Error| problem(folder, format!("cannot write a checkpoint: {e}"));
    let unfinished = Unfinished::folder(folder).map_err(error)?;
    let shards = session.write_shards(unfinished.path())?;
    let origin = Origin::of(session, plan, model);
    let step = origin.step;
    let manifest = Manifest::new(origin, shards);
    manifest.write(unfinished.path()).map_err(error)?;
    let newest = numbered(folder).into_iter().map(|(n, _)| n).max();
    let mut number = newest.unwrap_or(0);
    let path = loop {
        number += 1;
        let path = folder.join(format!("{number:04}-step-{step}"));
        match unfinished.finish(&path) {
            // Another run was faster.
            Err(e) if is_there(&e) => continue,
            finished => break finished.map(|()| path).map_err(error)?,
        }
    };
    for (_, old) in numbered(folder).into_iter().rev().skip(kept.max(1)) {
        // One that cannot be removed is in nobody's way. It goes under another name, so that
        // there never is a part of it under its own.
        let _ = Unfinished::folder(folder)
            .and_then(|grave| std::fs::rename(&old, grave.path().join("old")));
    }
    Ok(path)
}

/// The newest checkpoint at `path` that is whole: a folder of checkpoints, one of them, or the
/// single file that earlier builds wrote. Reads all files once, to see that they are what was
/// written.
///
/// Fails when there is none.
pub fn find(path: &Path) -> Result<Found, RuntimeError> {
    let is_one = path.join(manifest::NAME).exists();
    let candidates: Vec<PathBuf> = match path.is_dir() && !is_one {
        true => {
            let newest_first = numbered(path).into_iter().rev().map(|(_, p)| p);
            let single = Some(path.join(SINGLE)).filter(|p| p.exists());
            newest_first.chain(single).collect()
        }
        false => vec![path.to_path_buf()],
    };
    let mut passed_over = Vec::new();
    for candidate in candidates {
        match Checkpoint::open(&candidate) {
            Ok(checkpoint) => {
                return Ok(Found {
                    checkpoint,
                    passed_over,
                });
            }
            Err(e) => passed_over.push(e),
        }
    }
    // The newest of several is the one that was meant.
    let none = || problem(path, "the folder has no checkpoint".into());
    Err(passed_over.into_iter().next().unwrap_or_else(none))
}

/// Folders in `folder` that have the name of a checkpoint, oldest first, with their numbers.
pub fn numbered(folder: &Path) -> Vec<(u64, PathBuf)> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut all: Vec<(u64, u64, PathBuf)> = entries
        .filter_map(|e| {
            let name = e.file_name();
            let (number, step) = name.to_str()?.split_once("-step-")?;
            let is_one = e.path().join(manifest::NAME).exists();
            is_one.then_some((number.parse().ok()?, step.parse().ok()?, e.path()))
        })
        .collect();
    all.sort();
    all.into_iter().map(|(n, _, path)| (n, path)).collect()
}

impl Checkpoint {
    /// Opens the checkpoint at `path` and verifies it.
    fn open(path: &Path) -> Result<Self, RuntimeError> {
        match path.is_dir() {
            true => Self::open_folder(path),
            false if path.file_name().is_some_and(|n| n == manifest::NAME) => {
                Self::open_folder(files::parent(path))
            }
            false => Self::open_single(path),
        }
    }

    fn open_folder(path: &Path) -> Result<Self, RuntimeError> {
        let Manifest {
            origin,
            files,
            states,
            ..
        } = Manifest::read(path)?;
        manifest::verify(path, &files)?;
        let mut headers = BTreeMap::new();
        for name in files.keys() {
            headers.insert(name.clone(), shard::Header::read(&path.join(name))?);
        }
        let manifest = path.join(manifest::NAME);
        let mut all = BTreeMap::new();
        for (name, state) in states {
            let bad = |what: String| problem(&manifest, format!("state `{name}`: {what}"));
            let mut pieces = Vec::with_capacity(state.parts.len());
            for part in &state.parts {
                let header = headers.get(&part.file);
                let header = header.ok_or_else(|| bad(format!("no file {}", part.file)))?;
                let at = header.find(&name, &part.shape)?;
                let piece = Piece::new(path.join(&part.file), at, &state.shape, part);
                pieces.push(piece.map_err(bad)?);
            }
            shard::check_cover(&state.shape, &pieces).map_err(bad)?;
            let lens = state.shape;
            all.insert(name, Stored { lens, pieces });
        }
        Ok(Checkpoint {
            path: path.to_path_buf(),
            step: origin.step,
            origin: Some(origin),
            states: all,
        })
    }

    fn open_single(path: &Path) -> Result<Self, RuntimeError> {
        let header = shard::Header::read(path)?;
        let step = header.step.ok_or_else(|| {
            problem(
                path,
                "its metadata have no `step`: not a checkpoint of a training state".into(),
            )
        })?;
        let whole = |(name, lens, at): (String, Vec<u64>, u64)| {
            let pieces = vec![Piece::whole(path.to_path_buf(), at, &lens)];
            (name, Stored { lens, pieces })
        };
        Ok(Checkpoint {
            path: path.to_path_buf(),
            step,
            origin: None,
            states: header.tensors()?.into_iter().map(whole).collect(),
        })
    }

    /// The folder, or the single file of an earlier build.
    pub fn path(&self) -> &Path {
        &self.path
    }
    /// Optimizer steps done.
    pub fn step(&self) -> u64 {
        self.step
    }
    /// Its plan and model; none for the single files of earlier builds, which have no hashes
    /// either.
    pub fn origin(&self) -> Option<&Origin> {
        self.origin.as_ref()
    }
    /// Every state and its global lengths.
    pub fn states(&self) -> impl Iterator<Item = (&str, &[u64])> {
        let states = self.states.iter();
        states.map(|(path, s)| (path.as_str(), &s.lens[..]))
    }
    /// Global lengths of a state.
    pub fn lens(&self, path: &str) -> Option<&[u64]> {
        self.states.get(path).map(|s| &s.lens[..])
    }

    /// Reads one part of a state into its buffer, and nothing else of the files. Padding becomes
    /// zero.
    ///
    /// Fails when there is no such state of these lengths, or a file cannot be read.
    pub fn read(&self, path: &str, part: &Local, out: &mut [u8]) -> Result<(), RuntimeError> {
        let stored = self.states.get(path).filter(|s| s.lens == part.lens);
        let stored = stored.ok_or_else(|| {
            let lens = &part.lens;
            problem(&self.path, format!("it has no state `{path}` of {lens:?}"))
        })?;
        out.fill(0);
        for piece in &stored.pieces {
            piece
                .read(part, out)
                .map_err(|e| problem(&piece.file, format!("cannot read: {e}")))?;
        }
        Ok(())
    }

    /// Whether it is of this model (the text of a forward graph), where it says so.
    ///
    /// Fails with the first difference.
    pub fn check_model(&self, model: &str) -> Result<(), RuntimeError> {
        let Some(origin) = self.origin.as_ref().filter(|o| o.model != model) else {
            return Ok(());
        };
        let parse = |text: &str| {
            let broken = |e: ParseError| problem(&self.path, format!("its model: {e}"));
            ir::text::parse(text).map_err(broken)
        };
        match ir::likeness::difference(&parse(&origin.model)?, &parse(model)?) {
            None => Ok(()),
            Some(difference) => Err(RuntimeError::OtherModel {
                path: self.path.clone(),
                difference,
            }),
        }
    }
}

fn problem(path: &Path, problem: String) -> RuntimeError {
    RuntimeError::Checkpoint {
        path: path.to_path_buf(),
        problem,
    }
}

fn is_there(e: &std::io::Error) -> bool {
    matches!(
        e.kind(),
        ErrorKind::AlreadyExists | ErrorKind::DirectoryNotEmpty
    )
}

#[cfg(test)]
mod tests;
