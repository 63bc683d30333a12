//! One file of a checkpoint: safetensors, in f32, of the parts that a rank writes.
//!
//! Writing goes from the rank's arena to the file, reading from the file to the arena, run by
//! run of neighbouring elements: there is no copy of a part in between.

use super::manifest::{self, Part, not_as_written};
use super::problem;
use crate::arena::View;
use crate::cpu::layout;
use crate::error::RuntimeError;
use crate::execute::{Local, widen};
use crate::files::open_regular;
use ir::Rank;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, Write};
use std::path::{Path, PathBuf};

/// Longest header of the format's own library.
const LONGEST_HEADER: u64 = 100_000_000;
/// Bytes read at once where runs are shorter. Longer runs are read by themselves.
const AT_ONCE: usize = 1 << 16;

/// A file that a rank wrote.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Shard {
    /// Its name.
    pub file: String,
    pub bytes: u64,
    pub blake3: String,
    /// Its content.
    pub parts: Vec<Written>,
}

/// A part of a state in a file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Written {
    pub path: String,
    /// Global lengths.
    pub lens: Vec<u64>,
    pub start: Vec<u64>,
    pub shape: Vec<u64>,
}

/// Writes a rank's parts, given by path, to its file in `folder`, through to the disk. A part is
/// what its buffer, which `read` gives, has without padding.
///
/// Fails when the file cannot be written or the disk does not give it back, and at the first element
/// that is not finite: what it stands in is no state to go on from.
pub(crate) fn write<'a>(
    folder: &Path,
    rank: Rank,
    parts: &[(String, Local)],
    read: &dyn Fn(usize) -> Result<View<'a>, RuntimeError>,
) -> Result<Shard, RuntimeError> {
    let name = name_of(rank.0);
    let path = folder.join(&name);
    let error = |e: io::Error| problem(&path, format!("cannot write: {e}"));
    let mut out = Hashing::create(&path).map_err(error)?;
    let shapes = parts.iter().map(|(path, local)| (path, local.valid()));
    out.write_all(&header(shapes).map_err(error)?)
        .map_err(error)?;
    for (i, (path, local)) in parts.iter().enumerate() {
        let mut written = Ok(());
        let buffer = read(i)?;
        let values = widen(local.dtype, &buffer);
        let (dims, valid, none) = (local.dims(), local.valid(), vec![0; local.lens.len()]);
        layout::for_each_block_run([&dims, &none], [&valid, &none], &valid, |from, _, n| {
            let run = &values[from..from + n];
            if written.is_ok() {
                written = match run.iter().find(|v| !v.is_finite()) {
                    None => out.write_all(bytemuck::cast_slice(run)).map_err(error),
                    Some(value) => Err(RuntimeError::NotFinite {
                        path: path.to_string(),
                        value: *value,
                    }),
                };
            }
        });
        written?;
    }
    let (bytes, blake3) = out.finish().map_err(error)?;
    let as_u64 = |n: Vec<usize>| n.into_iter().map(|n| n as u64).collect();
    let written = |(path, local): &(String, Local)| Written {
        path: path.clone(),
        lens: local.lens.clone(),
        start: as_u64(local.start()),
        shape: as_u64(local.valid()),
    };
    Ok(Shard {
        file: name,
        bytes,
        blake3,
        parts: parts.iter().map(written).collect(),
    })
}

/// Writes parts whose bytes, which `open` gives, lie in other files: the `number`th file of a
/// checkpoint.
///
/// Fails as [`write`] does, and when bytes are missing.
pub(super) fn copy<R: Read>(
    folder: &Path,
    number: usize,
    parts: Vec<Written>,
    open: &dyn Fn(usize) -> Result<R, RuntimeError>,
) -> Result<Shard, RuntimeError> {
    let name = name_of(number);
    let path = folder.join(&name);
    let error = |e: io::Error| problem(&path, format!("cannot write: {e}"));
    let mut out = Hashing::create(&path).map_err(error)?;
    let as_usize = |n: &u64| usize::try_from(*n).unwrap_or(usize::MAX);
    let shapes = parts
        .iter()
        .map(|p| (&p.path, p.shape.iter().map(as_usize).collect()));
    out.write_all(&header(shapes).map_err(error)?)
        .map_err(error)?;
    let mut block = vec![0f32; AT_ONCE / 4];
    for (i, part) in parts.iter().enumerate() {
        let mut from = open(i)?;
        let mut left = part.shape.iter().product::<u64>();
        while left > 0 {
            let n = block.len().min(as_usize(&left));
            let values = &mut block[..n];
            let read = from.read_exact(bytemuck::cast_slice_mut(values));
            read.map_err(|e| RuntimeError::State {
                path: part.path.clone(),
                problem: format!("cannot be read: {e}"),
            })?;
            if let Some(&value) = values.iter().find(|v| !v.is_finite()) {
                let path = part.path.clone();
                return Err(RuntimeError::NotFinite { path, value });
            }
            out.write_all(bytemuck::cast_slice(values)).map_err(error)?;
            left -= n as u64;
        }
    }
    let (bytes, blake3) = out.finish().map_err(error)?;
    Ok(Shard {
        file: name,
        bytes,
        blake3,
        parts,
    })
}

/// The name of the file of a rank, or of the one of this number.
pub(super) fn name_of(number: impl std::fmt::Display) -> String {
    format!("rank-{number}.safetensors")
}

/// Length and JSON of a safetensors header, padded with spaces to 8 bytes.
fn header<'a>(parts: impl Iterator<Item = (&'a String, Vec<usize>)>) -> io::Result<Vec<u8>> {
    let (mut tensors, mut at) = (Vec::new(), 0);
    for (path, shape) in parts {
        let end = at + 4 * shape.iter().product::<usize>();
        let info = TensorInfo {
            dtype: Dtype::F32,
            shape,
            data_offsets: (at, end),
        };
        tensors.push((path.to_string(), info));
        at = end;
    }
    let metadata = Metadata::new(None, tensors).map_err(io::Error::other)?;
    let mut text = serde_json::to_vec(&metadata)?;
    text.resize(text.len().next_multiple_of(8), b' ');
    Ok([&(text.len() as u64).to_le_bytes()[..], &text].concat())
}

/// A file whose hash is taken as it is written.
struct Hashing {
    path: PathBuf,
    file: BufWriter<File>,
    hasher: blake3::Hasher,
    bytes: u64,
}

impl Hashing {
    fn create(path: &Path) -> io::Result<Self> {
        Ok(Hashing {
            path: path.to_path_buf(),
            file: BufWriter::with_capacity(1 << 20, File::create_new(path)?),
            hasher: blake3::Hasher::new(),
            bytes: 0,
        })
    }
    /// Has all of it on the disk, and reads it again from there. Says its length and its hash.
    fn finish(self) -> io::Result<(u64, String)> {
        let file = self.file.into_inner().map_err(|e| e.into_error())?;
        file.sync_all()?;
        // Where the system keeps the file in memory all the same, that is read.
        #[cfg(target_os = "linux")]
        let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
        let hash = self.hasher.finalize().to_string();
        match manifest::hash(&self.path, self.bytes)? == hash {
            true => Ok((self.bytes, hash)),
            false => Err(not_as_written()),
        }
    }
}

impl Write for Hashing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.file.write(bytes)?;
        self.hasher.update(&bytes[..n]);
        self.bytes += n as u64;
        Ok(n)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// The header of a file.
pub(super) struct Header {
    path: PathBuf,
    /// Where data begin.
    data: u64,
    metadata: Metadata,
    /// Steps done, in the single files of earlier builds.
    pub step: Option<u64>,
}

impl Header {
    /// Fails when the file is no safetensors file of its own length.
    pub fn read(path: &Path) -> Result<Self, RuntimeError> {
        let error = |what: String| problem(path, what);
        let unread = |e: io::Error| error(format!("cannot read: {e}"));
        let no = |what: String| error(format!("no checkpoint, or a damaged one: {what}"));
        let mut file = open_regular(path).map_err(unread)?;
        let bytes = file.metadata().map_err(unread)?.len();
        let mut length = [0; 8];
        file.read_exact(&mut length)
            .map_err(|_| no(format!("it has {bytes} bytes")))?;
        let length = u64::from_le_bytes(length);
        if length > LONGEST_HEADER || length > bytes - 8 {
            return Err(no(format!("its header would have {length} bytes")));
        }
        let mut text = vec![0; length as usize];
        file.read_exact(&mut text).map_err(unread)?;
        let metadata: Metadata = serde_json::from_slice(&text).map_err(|e| no(e.to_string()))?;
        let data = 8 + length;
        if metadata.data_len() as u64 != bytes - data {
            return Err(no(format!(
                "its tensors have {} bytes, the file {}",
                metadata.data_len(),
                bytes - data
            )));
        }
        let step = metadata.metadata().as_ref().and_then(|m| m.get("step"));
        Ok(Header {
            path: path.to_path_buf(),
            data,
            step: step.and_then(|s| s.parse().ok()),
            metadata,
        })
    }

    /// Where in the file the tensor of this name and shape begins.
    pub fn find(&self, name: &str, shape: &[u64]) -> Result<u64, RuntimeError> {
        let is_same = |t: &&TensorInfo| t.shape.iter().map(|&n| n as u64).eq(shape.iter().copied());
        let found = self.metadata.info(name).filter(is_same);
        match found.filter(|t| t.dtype == Dtype::F32) {
            Some(t) => Ok(self.data + t.data_offsets.0 as u64),
            None => Err(problem(
                &self.path,
                format!("it has no f32 tensor `{name}` of {shape:?}"),
            )),
        }
    }

    /// Name, shape and place of every tensor.
    pub fn tensors(&self) -> Result<Vec<(String, Vec<u64>, u64)>, RuntimeError> {
        let of = |name: String| {
            let info = self.metadata.info(&name);
            let shape = info.map_or(Vec::new(), |i| i.shape.iter().map(|&n| n as u64).collect());
            let at = self.find(&name, &shape)?;
            Ok((name, shape, at))
        };
        self.metadata.offset_keys().into_iter().map(of).collect()
    }
}

/// A part of a state, in a file.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Piece {
    pub file: PathBuf,
    /// Byte of its first element.
    pub at: u64,
    start: Vec<usize>,
    shape: Vec<usize>,
}

impl Piece {
    /// Fails when the part reaches beyond the state's lengths.
    pub fn new(file: PathBuf, at: u64, lens: &[u64], part: &Part) -> Result<Self, String> {
        let ends = part.start.iter().zip(&part.shape);
        let mut ends = ends.map(|(start, n)| start.checked_add(*n)).zip(lens);
        let dims = [part.start.len(), part.shape.len()];
        if dims != [lens.len(); 2] || !ends.all(|(end, len)| end.is_some_and(|e| e <= *len)) {
            let Part { start, shape, .. } = part;
            return Err(format!("{shape:?} at {start:?} is no part of {lens:?}"));
        }
        let as_usize = |n: &[u64]| n.iter().map(|&n| n as usize).collect();
        Ok(Piece {
            file,
            at,
            start: as_usize(&part.start),
            shape: as_usize(&part.shape),
        })
    }

    /// All of a state.
    pub fn whole(file: PathBuf, at: u64, lens: &[u64]) -> Self {
        Piece {
            file,
            at,
            start: vec![0; lens.len()],
            shape: lens.iter().map(|&n| n as usize).collect(),
        }
    }

    /// First indices and lengths.
    pub fn place(&self) -> (Vec<u64>, Vec<u64>) {
        let as_u64 = |n: &[usize]| n.iter().map(|&n| n as u64).collect();
        (as_u64(&self.start), as_u64(&self.shape))
    }

    /// Where it and `part` meet: first indices and lengths, of which one is 0 where they do not.
    fn meets(&self, part: &Local) -> (Vec<usize>, Vec<usize>) {
        let (start, valid) = (part.start(), part.valid());
        let dims = 0..start.len();
        let first: Vec<usize> = dims.clone().map(|d| start[d].max(self.start[d])).collect();
        let end = |d: usize| (start[d] + valid[d]).min(self.start[d] + self.shape[d]);
        let extent = dims.map(|d| end(d).saturating_sub(first[d])).collect();
        (first, extent)
    }

    /// Whether it has something of `part`.
    pub fn has_some(&self, part: &Local) -> bool {
        !self.meets(part).1.contains(&0)
    }

    /// Reads what it has of `part` into the part's buffer, from its file alone.
    pub fn read(&self, part: &Local, out: &mut [u8]) -> io::Result<()> {
        let mut file = BufReader::with_capacity(AT_ONCE, open_regular(&self.file)?);
        file.seek(io::SeekFrom::Start(self.at))?;
        self.take(&mut file, part, out)
    }

    /// Reads what it has of `part` where its first element comes next.
    fn take(&self, from: &mut impl Ahead, part: &Local, out: &mut [u8]) -> io::Result<()> {
        let start = part.start();
        let (first, extent) = self.meets(part);
        if extent.contains(&0) {
            return Ok(());
        }
        let within = |start: &[usize]| first.iter().zip(start).map(|(a, b)| a - b).collect();
        let (here, there): (Vec<usize>, Vec<usize>) = (within(&self.start), within(&start));
        let (mut at, mut read) = (0, Ok(()));
        let places: [[&[usize]; 2]; 2] = [[&self.shape, &here], [&part.dims(), &there]];
        layout::for_each_block_run(places[0], places[1], &extent, |place, to, n| {
            let out = &mut out[4 * to..4 * (to + n)];
            if read.is_ok() {
                // Runs are in ascending order.
                let skipped = 4 * (place - at) as u64;
                read = from.pass(skipped).and_then(|()| from.read_exact(out));
            }
            at = place + n;
        });
        read
    }
}

/// A file that is read forwards.
trait Ahead: Read {
    /// Passes over so many bytes.
    fn pass(&mut self, bytes: u64) -> io::Result<()>;
}

impl Ahead for BufReader<File> {
    fn pass(&mut self, bytes: u64) -> io::Result<()> {
        let bytes = i64::try_from(bytes).map_err(io::Error::other)?;
        self.seek_relative(bytes)
    }
}

/// A file of which pieces are taken while its hash is, so that it is read once, forwards. No more
/// of it is in memory than is read at once.
pub(super) struct Stream {
    path: PathBuf,
    file: BufReader<File>,
    hasher: blake3::Hasher,
    at: u64,
}

impl Stream {
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(Stream {
            path: path.to_path_buf(),
            file: BufReader::with_capacity(AT_ONCE, open_regular(path)?),
            hasher: blake3::Hasher::new(),
            at: 0,
        })
    }
    /// Reads what a piece has of `part` into the part's buffer. One that lies before what was read
    /// already is read by itself.
    pub fn read(&mut self, piece: &Piece, part: &Local, out: &mut [u8]) -> io::Result<()> {
        match piece.at.checked_sub(self.at) {
            Some(ahead) => {
                self.pass(ahead)?;
                piece.take(self, part, out)
            }
            None => piece.read(part, out),
        }
    }
    /// Reads the rest. Returns the hash of the whole file, and its length.
    pub fn finish(mut self) -> io::Result<(String, u64)> {
        while self.pass_some(u64::MAX)? {}
        Ok((self.hasher.finalize().to_string(), self.at))
    }
    /// Passes over some bytes, at most so many; says whether there were any.
    fn pass_some(&mut self, most: u64) -> io::Result<bool> {
        let ready = self.file.fill_buf()?;
        let n = ready.len().min(usize::try_from(most).unwrap_or(usize::MAX));
        self.hasher.update(&ready[..n]);
        self.file.consume(n);
        self.at += n as u64;
        Ok(n > 0)
    }
}

impl Read for Stream {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read(out)?;
        self.hasher.update(&out[..n]);
        self.at += n as u64;
        Ok(n)
    }
}

impl Ahead for Stream {
    fn pass(&mut self, bytes: u64) -> io::Result<()> {
        let end = self.at.saturating_add(bytes);
        while self.at < end {
            if !self.pass_some(end - self.at)? {
                let what = format!("{} ends at byte {}", self.path.display(), self.at);
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, what));
            }
        }
        Ok(())
    }
}

/// Fails unless the pieces have as many elements as a state of these lengths.
pub(super) fn check_cover(lens: &[u64], pieces: &[Piece]) -> Result<(), String> {
    let whole = product(lens.iter().copied());
    let mut parts = pieces
        .iter()
        .map(|p| product(p.shape.iter().map(|&n| n as u64)));
    let sum = parts.try_fold(0u64, |sum, part| sum.checked_add(part?));
    match whole.is_some() && sum == whole {
        true => Ok(()),
        false => Err(format!("its parts do not make {lens:?}")),
    }
}

fn product(mut n: impl Iterator<Item = u64>) -> Option<u64> {
    n.try_fold(1u64, |all, n| all.checked_mul(n))
}
