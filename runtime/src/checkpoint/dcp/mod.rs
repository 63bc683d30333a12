//! PyTorch's distributed checkpoints (`torch.distributed.checkpoint`, format 1.0.0), written and
//! read.
//!
//! ```text
//! folder/.metadata      a pickle: tensors, their chunks, and where the archive of each chunk begins
//!        __0_0.distcp   archives of `torch.save`, one after another
//!        __1_0.distcp   ..
//! ```
//!
//! A part of a state in a file of ours is a chunk of a tensor in theirs, under the state's own path,
//! so both ways are copies from file to file, a block at a time. The number of steps is a
//! tensor of one integer, [`STEP`]. Nothing of a pickle is executed: see [`pickle`].

mod archive;
mod metadata;
mod pickle;

use super::manifest::Origin;
use super::shard::{self, Written};
use super::{Checkpoint, Whole, commit, problem};
use crate::error::RuntimeError;
use crate::files::{self, Unfinished, open_regular};
use archive::Stretch;
use metadata::{Chunk, Metadata, Tensor, listed};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// The name of the file that makes a folder such a checkpoint.
pub const METADATA: &str = ".metadata";
/// The tensor that has the number of steps done, an int64 without dims.
pub const STEP: &str = "meshwright.step";
/// The type of all states, and what PyTorch calls its storage.
const F32: (&str, &str) = ("float32", "FloatStorage");
/// Bytes that are copied at a time.
const AT_ONCE: usize = 1 << 20;
/// Longest metadata that are read.
const LONGEST: u64 = 1 << 28;

/// Writes the states of a checkpoint as PyTorch's in `folder`, which appears whole or not at all and
/// must not be there, or be empty. Their names, but for that of [`STEP`], begin with `prefix`.
///
/// Fails when a file cannot be read or written.
pub fn export(from: &Checkpoint, prefix: &str, folder: &Path) -> Result<(), RuntimeError> {
    let error = |e: io::Error| problem(folder, format!("cannot write: {e}"));
    let unfinished = Unfinished::folder(files::parent(folder)).map_err(error)?;
    let mut by_file: BTreeMap<&Path, Vec<(&str, &shard::Piece)>> = BTreeMap::new();
    for (path, stored) in &from.states {
        for piece in &stored.pieces {
            by_file.entry(&piece.file).or_default().push((path, piece));
        }
    }
    let mut all = Metadata::default();
    let mut add = |path: &str, dtype, lens: &[u64], chunk: Chunk| {
        let tensor = all.tensors.entry(path.to_string());
        let tensor = tensor.or_insert_with(|| Tensor {
            dtype,
            lens: lens.to_vec(),
            chunks: Vec::new(),
        });
        tensor.chunks.push(chunk);
    };
    for (i, (source, pieces)) in by_file.into_iter().enumerate() {
        let name = format!("__{i}_0.distcp");
        let place = unfinished.path().join(&name);
        let mut out = BufWriter::with_capacity(1 << 20, File::create_new(place).map_err(error)?);
        let unread = |e: io::Error| problem(source, format!("cannot copy: {e}"));
        let mut file = open_regular(source).map_err(unread)?;
        let chunk = |start: &[u64], shape: &[u64], at, bytes| Chunk {
            start: start.to_vec(),
            shape: shape.to_vec(),
            file: name.clone(),
            at,
            bytes,
        };
        for (path, piece) in pieces {
            let at = out.stream_position().map_err(error)?;
            let (start, shape) = piece.place();
            file.seek(SeekFrom::Start(piece.at)).map_err(unread)?;
            let n = 4 * shape.iter().product::<u64>();
            let mut is_source = false;
            let bytes = archive::write(&mut out, F32, &shape, |out| {
                copy(&file, n, out, &mut is_source)
            });
            // Who is at fault is named: the file that is read, or where it is copied to.
            let bytes = bytes.map_err(|e| if is_source { unread(e) } else { error(e) });
            let chunk = chunk(&start, &shape, at, bytes?);
            add(
                &format!("{prefix}{path}"),
                F32.0,
                &from.states[path].lens,
                chunk,
            );
        }
        if i == 0 {
            let at = out.stream_position().map_err(error)?;
            let step = from.step().to_le_bytes();
            let of = ("int64", "LongStorage");
            let bytes = archive::write(&mut out, of, &[], |out| out.write_all(&step));
            add(STEP, of.0, &[], chunk(&[], &[], at, bytes.map_err(error)?));
        }
        let file = out.into_inner().map_err(|e| error(e.into_error()))?;
        file.sync_all().map_err(error)?;
    }
    // As PyTorch has it, the metadata come last.
    let mut file = Unfinished::file(unfinished.path()).map_err(error)?;
    file.write_all(&all.write()).map_err(error)?;
    file.finish(&unfinished.path().join(METADATA))
        .map_err(error)?;
    drop(file);
    unfinished.finish(folder).map_err(error)
}

/// Copies `n` bytes. Where that fails, `is_source` says whether it was for what is read.
fn copy(mut from: impl Read, n: u64, to: &mut dyn Write, is_source: &mut bool) -> io::Result<()> {
    let mut block = vec![0; AT_ONCE];
    let mut left = n;
    while left > 0 {
        let piece = usize::try_from(left).unwrap_or(AT_ONCE).min(AT_ONCE);
        let piece = &mut block[..piece];
        from.read_exact(piece).inspect_err(|_| *is_source = true)?;
        to.write_all(piece)?;
        left -= piece.len() as u64;
    }
    Ok(())
}

/// A checkpoint of PyTorch.
#[derive(Debug)]
pub struct Source {
    folder: PathBuf,
    metadata: Metadata,
}

/// A checkpoint that was made of PyTorch's.
#[derive(Debug)]
pub struct Imported {
    /// Its folder.
    pub path: PathBuf,
    /// Tensors and objects that no state is made of.
    pub left_out: Vec<String>,
}

impl Source {
    /// Whether there is one at a path.
    pub fn is_at(path: &Path) -> bool {
        path.join(METADATA).is_file()
    }

    /// Reads the metadata of the checkpoint in `folder`.
    ///
    /// Fails where they are damaged, or name what no checkpoint of tensors needs.
    pub fn open(folder: &Path) -> Result<Self, RuntimeError> {
        let path = folder.join(METADATA);
        let unread = |e: io::Error| problem(&path, format!("cannot read: {e}"));
        let mut bytes = Vec::new();
        let file = open_regular(&path).map_err(unread)?;
        let most = LONGEST + 1;
        file.take(most).read_to_end(&mut bytes).map_err(unread)?;
        if bytes.len() as u64 == most {
            let what = format!("is longer than the {LONGEST} bytes that are read");
            return Err(problem(&path, what));
        }
        let metadata = Metadata::parse(&bytes).map_err(|what| problem(&path, what))?;
        Ok(Source {
            folder: folder.to_path_buf(),
            metadata,
        })
    }

    /// The number of steps done, where a tensor [`STEP`] says it.
    ///
    /// Fails where that cannot be read.
    pub fn step(&self) -> Result<Option<u64>, RuntimeError> {
        let Some(tensor) = self.metadata.tensors.get(STEP) else {
            return Ok(None);
        };
        let bad = |what: &str| problem(&self.folder, format!("tensor `{STEP}` {what}"));
        let [chunk] = &tensor.chunks[..] else {
            return Err(bad("is in several chunks"));
        };
        if !tensor.lens.iter().all(|n| *n == 1) || tensor.dtype != "int64" {
            return Err(bad("is not one int64"));
        }
        let mut file = self.open_chunk(STEP, "int64", chunk)?;
        let mut bytes = [0; 8];
        let read = file.read_exact(&mut bytes);
        read.map_err(|e| bad(&format!("cannot be read: {e}")))?;
        let step = u64::try_from(i64::from_le_bytes(bytes));
        step.map(Some).map_err(|_| bad("is less than 0"))
    }

    /// Makes a checkpoint in `folder` of the tensors that are called as the states that are wanted,
    /// with their global lengths. No other one goes.
    ///
    /// Fails when a state has no tensor in f32 of its lengths, has an element that is not finite, or
    /// files cannot be read or written.
    pub fn import(
        &self,
        wanted: &BTreeMap<String, Vec<u64>>,
        origin: Origin,
        folder: &Path,
    ) -> Result<Imported, RuntimeError> {
        let (metadata, problem_here) = (&self.metadata, |what| problem(&self.folder, what));
        let prefix = self.prefix(wanted);
        let theirs = |path: &str| format!("{prefix}{path}");
        let missing: Vec<String> = wanted.keys().map(|path| theirs(path)).collect();
        let missing = missing.iter().map(String::as_str);
        let is_missing = |path: &&str| !metadata.tensors.contains_key(*path);
        let missing: BTreeSet<&str> = missing.filter(is_missing).collect();
        if !missing.is_empty() {
            let there: BTreeSet<&str> = metadata.tensors.keys().map(String::as_str).collect();
            return Err(problem_here(format!(
                "it has no tensor {}; it has {}",
                listed(&missing),
                listed(&there)
            )));
        }
        // A file of ours has a state once: of two chunks in one file of theirs, the second is in
        // another.
        let mut files: BTreeMap<(&str, usize), Vec<(&str, &Chunk)>> = BTreeMap::new();
        for (path, lens) in wanted {
            let tensor = &metadata.tensors[&theirs(path)];
            if tensor.lens != *lens {
                let theirs = &tensor.lens;
                return Err(problem_here(format!(
                    "tensor `{path}` is {theirs:?}, and has to be {lens:?}"
                )));
            }
            let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
            for chunk in tensor.chunks.iter().filter(|c| !c.shape.contains(&0)) {
                let nth = seen.entry(&chunk.file).or_default();
                let file = files.entry((&chunk.file, *nth)).or_default();
                file.push((path, chunk));
                *nth += 1;
            }
        }
        let error = |e: io::Error| problem(folder, format!("cannot write a checkpoint: {e}"));
        let unfinished = Unfinished::folder(folder).map_err(error)?;
        let mut shards = Vec::with_capacity(files.len());
        for (i, parts) in files.values().enumerate() {
            let written = parts
                .iter()
                .map(|(path, chunk)| Written {
                    path: path.to_string(),
                    lens: wanted[*path].clone(),
                    start: chunk.start.clone(),
                    shape: chunk.shape.clone(),
                })
                .collect();
            let open = |n: usize| self.open_chunk(&theirs(parts[n].0), F32.0, parts[n].1);
            shards.push(shard::copy(unfinished.path(), i, written, &open)?);
        }
        let path = commit(
            folder,
            (usize::MAX, &Whole::default()),
            &unfinished,
            origin,
            shards,
        )?;
        let others = metadata.tensors.keys().filter(|name| *name != STEP);
        let is_wanted = |name: &str| {
            name.strip_prefix(&prefix)
                .is_some_and(|n| wanted.contains_key(n))
        };
        let others = others.filter(|name| !is_wanted(name));
        Ok(Imported {
            path,
            left_out: others.chain(&metadata.objects).cloned().collect(),
        })
    }

    /// The prefix of the names of all states that are wanted, as when a module was wrapped
    /// (`module.`, `_orig_mod.`) or saved under a key (`model.`); empty where they stand as they are, or
    /// where there is no one such prefix.
    fn prefix(&self, wanted: &BTreeMap<String, Vec<u64>>) -> String {
        let has_all = |prefix: &str| {
            let mut names = wanted.keys().map(|path| format!("{prefix}{path}"));
            names.all(|name| self.metadata.tensors.contains_key(&name))
        };
        let Some(first) = wanted.keys().next().filter(|_| !has_all("")) else {
            return String::new();
        };
        let names = self.metadata.tensors.keys();
        let prefixes = names.filter_map(|name| name.strip_suffix(first.as_str()));
        let mut prefixes = prefixes.filter(|prefix| prefix.ends_with('.') && has_all(prefix));
        match (prefixes.next(), prefixes.next()) {
            (Some(one), None) => one.to_string(),
            _ => String::new(),
        }
    }

    /// A chunk's file, where its elements begin.
    fn open_chunk(
        &self,
        name: &str,
        dtype: &str,
        chunk: &Chunk,
    ) -> Result<BufReader<File>, RuntimeError> {
        let path = self.folder.join(&chunk.file);
        let bad = |what: String| {
            problem(
                &path,
                format!("chunk {:?} of `{name}`: {what}", chunk.start),
            )
        };
        let open = || Stretch::new(BufReader::new(open_regular(&path)?), chunk.at, chunk.bytes);
        let opened = open().map_err(|e| bad(format!("cannot read: {e}")))?;
        let stored = archive::read(opened).map_err(bad)?;
        if stored.dtype != dtype {
            let theirs = stored.dtype;
            return Err(bad(format!("it is {theirs}, states are {dtype}")));
        }
        if stored.shape != chunk.shape {
            return Err(bad(format!(
                "it is {:?}, the metadata say {:?}",
                stored.shape, chunk.shape
            )));
        }
        let place = chunk.at.checked_add(stored.at);
        let place = place.ok_or_else(|| bad("it lies beyond all files".into()))?;
        let open = || {
            let mut file = open_regular(&path)?;
            file.seek(SeekFrom::Start(place))?;
            Ok(BufReader::with_capacity(1 << 20, file))
        };
        open().map_err(|e: io::Error| bad(format!("cannot read: {e}")))
    }
}

/// Whether metadata are understood; what is, is said again in the same way. For fuzzing.
#[doc(hidden)]
pub fn understands(metadata: &[u8]) -> bool {
    let found = Metadata::parse(metadata);
    if let Ok(found) = &found
        && found.objects.is_empty()
    {
        assert_eq!(Metadata::parse(&found.write()).as_ref(), Ok(found));
    }
    found.is_ok()
}

#[cfg(test)]
mod tests;
