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
//! Nothing is replaced by a write. Files are written through to the disk in a folder beside and
//! read again, then the manifest, then the folder gets its name, one number above the newest; only
//! then old checkpoints go, all but the [newest two](KEPT) that are whole. That can be done [in the
//! background](Background), from copies of the states. A run goes on from the newest that is what
//! its manifest says; nothing else points at it.

mod background;
pub mod dcp;
mod left;
mod manifest;
mod reading;
mod retention;
mod shard;
mod share;

pub use background::{Background, Ended};
pub use left::{Leaving, forget, is_left, place_of_left, salvage};
pub use manifest::{Origin, restamped};
pub(crate) use retention::Whole;
pub use retention::step_of;
use retention::{make_room, prune, remove};
pub(crate) use shard::Shard;
pub(crate) use shard::write as write_shard;
pub(crate) use share::{Lost, shares, shares_of};

use crate::error::RuntimeError;
use crate::execute::{Local, Session};
use crate::files::{self, Unfinished};
use ir::Task;
use ir::text::ParseError;
use manifest::{Facts, Manifest};
use serde::{Deserialize, Serialize};
use shard::{Piece, Stream};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Checkpoints that stay in a folder: should the newest be damaged, there is one more.
pub const KEPT: usize = 2;
/// The file of a folder from before checkpoints: all states in one file, without hashes.
const SINGLE: &str = "state.safetensors";
/// How often a folder is looked at again from which a run that goes on has taken a checkpoint meanwhile.
const TIMES: usize = 100;

/// A checkpoint whose files are what its manifest says.
#[derive(Debug, Serialize, Deserialize)]
pub struct Checkpoint {
    path: PathBuf,
    step: u64,
    origin: Option<Origin>,
    states: BTreeMap<String, Stored>,
    /// Files with hashes.
    files: BTreeMap<PathBuf, Sealed>,
    /// Keeps it from going while it is read.
    #[serde(skip)]
    held: Mutex<Option<File>>,
}

/// A file of a checkpoint, and whether this process has seen that it is what was written: another
/// process may be on another host, and read other bytes.
#[derive(Debug, Serialize, Deserialize)]
struct Sealed {
    facts: Facts,
    #[serde(skip)]
    verdict: OnceLock<Result<(), String>>,
    /// Whether a rank of this process has begun to find out.
    #[serde(skip)]
    is_taken: AtomicBool,
}

/// A checkpoint by what its manifest says. Nothing else of it was read.
#[derive(Clone, Debug)]
pub struct Summary {
    /// Its folder.
    pub path: PathBuf,
    /// Its plan and model.
    pub origin: Origin,
    /// Files beside the manifest, and their bytes.
    pub files: BTreeMap<String, u64>,
    /// Global lengths of each state, and the number of its parts.
    pub states: BTreeMap<String, (Vec<u64>, usize)>,
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
    let of = Saving {
        folder,
        kept: KEPT,
        plan,
        model,
        compares: false,
        guard: None,
    };
    of.save(session)
}

/// Saves states of plan 0 to a folder.
#[cfg(test)]
pub(crate) fn saving(folder: &Path, compares: bool) -> Saving<'_> {
    Saving {
        folder,
        kept: KEPT,
        plan: "0",
        model: "",
        compares,
        guard: None,
    }
}

/// Looks whether a folder of checkpoints is its run's own still, right before something is written
/// there. Fails where it is not.
#[derive(Clone, Copy)]
pub struct Guard<'a>(pub &'a dyn Fn() -> Result<(), RuntimeError>);

impl std::fmt::Debug for Guard<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Guard")
    }
}

/// How a session's states are saved, and where.
#[derive(Clone, Copy, Debug)]
pub struct Saving<'a> {
    /// The folder of checkpoints.
    pub folder: &'a Path,
    /// How many of the newest ones stay there, at least one.
    pub kept: usize,
    /// The fingerprint of the plan.
    pub plan: &'a str,
    /// The text of the plan's forward graph.
    pub model: &'a str,
    /// Whether ranks that keep the same states have to have the same bits of them. They are
    /// compared between writing, or copying, and the checkpoint's getting its name: none has a bit
    /// that turned in a memory before and that a comparison finds.
    pub compares: bool,
    /// Who says whether the folder may be written to; nobody where it is nobody else's.
    pub guard: Option<Guard<'a>>,
}

impl Saving<'_> {
    /// Writes a checkpoint and returns its path.
    ///
    /// Fails as [`save`] does, and where states differ that should not.
    pub fn save(&self, session: &mut Session) -> Result<PathBuf, RuntimeError> {
        match self.save_once(session) {
            // Its files are gone again, and so may be those of older ones that nobody needs.
            Err(e) if make_room(self.folder, self.kept, &session.whole(), &e) => {
                self.save_once(session)
            }
            saved => saved,
        }
    }

    fn save_once(&self, session: &mut Session) -> Result<PathBuf, RuntimeError> {
        let unfinished = self.unfinished()?;
        let shards = session.write_shards(unfinished.path())?;
        if self.compares {
            session.check_replicas()?;
        }
        let origin = Origin::of(session, self.plan, self.model);
        let keeping = (self.kept, &session.whole());
        commit(self.folder, keeping, &unfinished, origin, shards)
    }

    /// Writes a checkpoint of a run that has failed as ranks were lost, where those that are left
    /// have all states, of one step. As with any checkpoint each rank reads again what it has
    /// written, and the older ones go first where the disk has no room for it.
    ///
    /// Fails with the reason: then everything is as before, but for those.
    pub fn rescue(&self, session: &mut Session) -> Result<Rescued, Unrescued> {
        match self.rescue_once(session) {
            Err(Unrescued::Unwritten(e))
                if make_room(self.folder, self.kept, &session.whole(), &e) =>
            {
                self.rescue_once(session)
            }
            rescued => rescued,
        }
    }

    fn rescue_once(&self, session: &mut Session) -> Result<Rescued, Unrescued> {
        let left = session.left().map_err(Unrescued::Missing)?;
        let unfinished = self.unfinished().map_err(Unrescued::Unwritten)?;
        let shards = session.write_left(&left, unfinished.path())?;
        if self.compares {
            session.compare_left(&left)?;
        }
        session.set_step_number(left.step);
        let origin = Origin::of(session, self.plan, self.model);
        let keeping = (self.kept, &session.whole());
        let path = commit(self.folder, keeping, &unfinished, origin, shards);
        let path = path.map_err(Unrescued::Unwritten)?;
        Ok(Rescued {
            step: left.step,
            path,
        })
    }

    /// A folder for its files until they are all there.
    fn unfinished(&self) -> Result<Unfinished, RuntimeError> {
        if let Some(Guard(look)) = self.guard {
            look()?;
        }
        let unfinished = Unfinished::folder(self.folder);
        let what = |e: std::io::Error| format!("cannot write a checkpoint: {e}");
        unfinished.map_err(|e| problem(self.folder, what(e)))
    }
}

/// A checkpoint of a run that has lost ranks, of what those that are left hold in memory.
#[derive(Debug)]
pub struct Rescued {
    /// Optimizer steps done.
    pub step: u64,
    /// Its folder.
    pub path: PathBuf,
}

/// The reason why there is no checkpoint of what the ranks that are left hold in memory.
#[derive(Debug)]
pub enum Unrescued {
    /// They do not have all states, of one step: why, in words.
    Missing(String),
    /// They have, and those that keep the same ones have other bits of them.
    Differing(RuntimeError),
    /// They have, and these could not be written.
    Unwritten(RuntimeError),
}

/// Makes a checkpoint of files as [`commit`] does, and reads it again to see that it is whole: no
/// older one goes before that is known, unless the disk has no room for the manifest.
///
/// Fails with the first problem: then everything is as before, but for these.
fn commit_verified(
    folder: &Path,
    (kept, whole): (usize, &Whole),
    unfinished: &Unfinished,
    origin: Origin,
    shards: Vec<Shard>,
) -> Result<Rescued, RuntimeError> {
    let step = origin.step;
    let once = || {
        let all = (usize::MAX, &Whole::default());
        commit(folder, all, unfinished, origin.clone(), shards.clone())
    };
    let path = match once() {
        Err(e) if make_room(folder, kept, whole, &e) => once()?,
        committed => committed?,
    };
    match verify(&path) {
        Ok(_) => {
            whole.add(&path);
            prune(folder, kept, whole);
            Ok(Rescued { step, path })
        }
        Err(problems) => {
            remove(folder, &path);
            let first = problems.into_iter().next();
            Err(first.unwrap_or_else(|| problem(&path, "it is not as it was written".into())))
        }
    }
}

/// Makes a checkpoint of files that are on the disk: writes the manifest beside them, gives their
/// folder its name, and then has old ones go.
fn commit(
    folder: &Path,
    (kept, whole): (usize, &Whole),
    unfinished: &Unfinished,
    origin: Origin,
    shards: Vec<Shard>,
) -> Result<PathBuf, RuntimeError> {
    let error = |e: std::io::Error| problem(folder, format!("cannot write a checkpoint: {e}"));
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
    whole.add(&path);
    prune(folder, kept, whole);
    Ok(path)
}

/// The newest checkpoint at `path` that is whole: a folder of checkpoints, one of them, or the
/// single file that earlier builds wrote. Reads all files once, to see that they are what was
/// written.
///
/// Fails when there is none.
pub fn find(path: &Path) -> Result<Found, RuntimeError> {
    let mut passed_over = Vec::new();
    for _ in 0..TIMES {
        passed_over.clear();
        let mut has_gone = false;
        for candidate in all(path) {
            match Checkpoint::open(&candidate) {
                Ok(checkpoint) => {
                    return Ok(Found {
                        checkpoint,
                        passed_over,
                    });
                }
                Err(_) if !candidate.exists() => has_gone = true,
                // The first says enough of one that there is an older one for.
                Err(problems) => passed_over.extend(problems.into_iter().next()),
            }
        }
        if !has_gone {
            break;
        }
    }
    let none = || problem(path, "the folder has no checkpoint".into());
    Err(match passed_over.len() {
        0 | 1 => passed_over.pop().unwrap_or_else(none),
        _ => RuntimeError::NoneWhole {
            path: path.to_path_buf(),
            problems: passed_over,
        },
    })
}

/// All checkpoints at `path`, newest first: those of a folder, or the one that it is.
pub fn all(path: &Path) -> Vec<PathBuf> {
    // One that has lost its manifest is one all the same.
    let is_one = path.join(manifest::NAME).exists() || has_shards(path);
    match path.is_dir() && !is_one {
        true => {
            let newest_first = numbered(path).into_iter().rev().map(|(_, p)| p);
            let single = Some(path.join(SINGLE)).filter(|p| p.exists());
            newest_first.chain(single).collect()
        }
        false => vec![path.to_path_buf()],
    }
}

/// Whether a folder is one checkpoint.
pub fn is_one(folder: &Path) -> bool {
    folder.join(manifest::NAME).is_file()
}

/// Reads the manifest of the checkpoint at `path`.
///
/// Fails when there is none, or it is damaged.
pub fn summary(path: &Path) -> Result<Summary, RuntimeError> {
    let is_manifest = path.file_name().is_some_and(|n| n == manifest::NAME);
    let folder = match is_manifest {
        true => files::parent(path),
        false => path,
    };
    let manifest = Manifest::read(folder)?;
    let files = manifest.files.into_iter();
    let states = manifest.states.into_iter();
    Ok(Summary {
        path: folder.to_path_buf(),
        origin: manifest.origin,
        files: files.map(|(name, facts)| (name, facts.bytes)).collect(),
        states: states
            .map(|(name, s)| (name, (s.shape, s.parts.len())))
            .collect(),
    })
}

/// All checkpoints at `path`, newest first, but those that a run that goes on has had go meanwhile:
/// each opened as by [`verify`].
pub fn verify_all(path: &Path) -> Vec<(PathBuf, Result<Checkpoint, Vec<RuntimeError>>)> {
    let mut found = Vec::new();
    for _ in 0..TIMES {
        // Nothing more is read of it.
        let verified = |path: PathBuf| {
            let verified = verify(&path).inspect(Checkpoint::let_go);
            (path, verified)
        };
        found = all(path).into_iter().map(verified).collect();
        let is_there =
            |(path, verified): &(PathBuf, Result<_, _>)| verified.is_ok() || path.exists();
        if found.is_empty() || found.iter().any(is_there) {
            found.retain(is_there);
            break;
        }
    }
    found
}

/// Opens the checkpoint at `path`, with all of its files read once to see that they are what was
/// written.
///
/// Fails with all that is wrong.
pub fn verify(path: &Path) -> Result<Checkpoint, Vec<RuntimeError>> {
    Checkpoint::open(path)
}

/// Folders in `folder` that have the name of a checkpoint and a manifest or a shard, oldest first,
/// with their numbers. They get that name with all of their files, so one without its manifest has
/// lost it since.
pub fn numbered(folder: &Path) -> Vec<(u64, PathBuf)> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut all: Vec<(u64, u64, PathBuf)> = entries
        .filter_map(|e| {
            let name = e.file_name();
            let (number, step) = name.to_str()?.split_once("-step-")?;
            let number: u32 = number.parse().ok()?;
            let is_one = e.path().join(manifest::NAME).exists() || has_shards(&e.path());
            is_one.then_some((number.into(), step.parse().ok()?, e.path()))
        })
        .collect();
    all.sort();
    all.into_iter().map(|(n, _, path)| (n, path)).collect()
}

/// Whether a folder, which is no link, has a shard.
fn has_shards(folder: &Path) -> bool {
    let is_folder = folder.symlink_metadata().is_ok_and(|m| m.is_dir());
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names = files.map(|file| file.file_name());
    let is_shard = |name: &str| name.starts_with("rank-") && name.ends_with(".safetensors");
    is_folder && names.any(|name| name.to_str().is_some_and(is_shard))
}

impl Checkpoint {
    /// Opens the checkpoint at `path` and verifies it.
    fn open(path: &Path) -> Result<Self, Vec<RuntimeError>> {
        match path.is_dir() {
            true => Self::open_folder(path),
            false if path.file_name().is_some_and(|n| n == manifest::NAME) => {
                Self::open_folder(files::parent(path))
            }
            false => Self::open_single(path).map_err(|e| vec![e]),
        }
    }

    fn open_folder(path: &Path) -> Result<Self, Vec<RuntimeError>> {
        let held = reading::hold(path);
        let manifest = Manifest::read(path).map_err(|e| vec![e])?;
        let problems = manifest::verify(path, &manifest.files);
        match problems.is_empty() {
            true => Self::of_verified(path, manifest, held).map_err(|e| vec![e]),
            false => Err(problems),
        }
    }

    /// Puts together what the files of a folder have, which are as the manifest says.
    fn of_verified(
        path: &Path,
        manifest: Manifest,
        held: Option<File>,
    ) -> Result<Self, RuntimeError> {
        let Manifest {
            origin,
            files,
            states,
            ..
        } = manifest;
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
        let sealed = |(name, facts): (String, Facts)| {
            let verdict = OnceLock::from(Ok(()));
            let is_taken = AtomicBool::new(true);
            let sealed = Sealed {
                facts,
                verdict,
                is_taken,
            };
            (path.join(name), sealed)
        };
        Ok(Checkpoint {
            path: path.to_path_buf(),
            step: origin.step,
            origin: Some(origin),
            states: all,
            files: files.into_iter().map(sealed).collect(),
            held: Mutex::new(held),
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
        Self::of_header(path, header, step)
    }

    /// The tensors of a safetensors file, all f32, after so many steps: under their own names,
    /// whatever these are. To write them in another form.
    pub fn of_weights(path: &Path, step: u64) -> Result<Self, RuntimeError> {
        Self::of_header(path, shard::Header::read(path)?, step)
    }

    fn of_header(path: &Path, header: shard::Header, step: u64) -> Result<Self, RuntimeError> {
        let whole = |(name, lens, at): (String, Vec<u64>, u64)| {
            let pieces = vec![Piece::whole(path.to_path_buf(), at, &lens)];
            (name, Stored { lens, pieces })
        };
        Ok(Checkpoint {
            path: path.to_path_buf(),
            step,
            origin: None,
            states: header.tensors()?.into_iter().map(whole).collect(),
            files: BTreeMap::new(),
            held: Mutex::default(),
        })
    }

    /// Lets it go where its run has it go: it is not read any more.
    pub(crate) fn let_go(&self) {
        *self.held.lock().unwrap_or_else(PoisonError::into_inner) = None;
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

    /// Begins to read parts of its states.
    pub(crate) fn reader(&self) -> Reader<'_> {
        Reader {
            checkpoint: self,
            streams: BTreeMap::new(),
            others: BTreeSet::new(),
        }
    }

    /// The first byte of a part of a state in the first of the files that have some of it: who
    /// reads in this order reads each file forwards.
    pub(crate) fn first_byte(&self, path: &str, part: &Local) -> u64 {
        let pieces = self.states.get(path).filter(|s| s.lens == part.lens);
        let mut pieces = pieces.into_iter().flat_map(|s| &s.pieces);
        pieces.find(|p| p.has_some(part)).map_or(0, |p| p.at)
    }

    /// Reads one part of a state into its buffer, as a [`Reader`] of this part alone does.
    pub fn read(&self, path: &str, part: &Local, out: &mut [u8]) -> Result<(), RuntimeError> {
        let mut reader = self.reader();
        reader.read(path, part, out)?;
        reader.finish()
    }

    /// Whether it is of this model (the text of a forward graph), which goes on with that task,
    /// where it says so.
    ///
    /// Fails with the first difference.
    pub fn check_model(&self, model: &str, task: Task) -> Result<(), RuntimeError> {
        let Some(origin) = self.origin.as_ref().filter(|o| o.model != model) else {
            return Ok(());
        };
        let parse = |text: &str| {
            let broken = |e: ParseError| problem(&self.path, format!("its model: {e}"));
            ir::text::parse(text).map_err(broken)
        };
        match ir::likeness::difference(&parse(&origin.model)?, &parse(model)?, task) {
            None => Ok(()),
            Some(difference) => Err(RuntimeError::OtherModel {
                path: self.path.clone(),
                difference,
            }),
        }
    }
}

/// Reads parts of the states of a checkpoint, and nothing else of its files. A process to which the
/// checkpoint was told reads each file that has some of them whole, to see that it is what was
/// written, and takes the parts as they come by. What was read counts once [`Reader::finish`] has
/// ended well.
pub(crate) struct Reader<'a> {
    checkpoint: &'a Checkpoint,
    /// Files that this one verifies.
    streams: BTreeMap<&'a Path, (&'a Sealed, Option<Stream>)>,
    /// Those that another one of this process does.
    others: BTreeSet<&'a Path>,
}

impl<'a> Reader<'a> {
    /// Reads one part of a state into its buffer. Padding becomes zero.
    ///
    /// Fails when there is no such state of these lengths, or a file cannot be read.
    pub fn read(&mut self, path: &str, part: &Local, out: &mut [u8]) -> Result<(), RuntimeError> {
        let checkpoint = self.checkpoint;
        let stored = checkpoint.states.get(path);
        let stored = stored.filter(|s| s.lens == part.lens).ok_or_else(|| {
            let lens = &part.lens;
            let what = format!("it has no state `{path}` of {lens:?}");
            problem(&checkpoint.path, what)
        })?;
        out.fill(0);
        for piece in stored.pieces.iter().filter(|p| p.has_some(part)) {
            let read = match self.stream(&piece.file) {
                Ok(Some(stream)) => stream.read(piece, part, out),
                Ok(None) => piece.read(part, out),
                Err(e) => Err(e),
            };
            read.map_err(|e| problem(&piece.file, format!("cannot read: {e}")))?;
        }
        Ok(())
    }

    /// The file as this one verifies it; nothing where that is done, or somebody else does.
    fn stream(&mut self, file: &'a Path) -> std::io::Result<Option<&mut Stream>> {
        let Some(sealed) = self.checkpoint.files.get(file) else {
            return Ok(None);
        };
        if !self.streams.contains_key(file) {
            let is_mine = sealed.verdict.get().is_none() && !sealed.is_taken.swap(true, SeqCst);
            if !is_mine {
                self.others.insert(file);
                return Ok(None);
            }
            self.streams.insert(file, (sealed, None));
            let stream = Stream::open(file)?;
            self.streams.insert(file, (sealed, Some(stream)));
        }
        let stream = self.streams.get_mut(file);
        Ok(stream.and_then(|(_, stream)| stream.as_mut()))
    }

    /// Says whether the files that were read are what was written.
    pub fn finish(mut self) -> Result<(), RuntimeError> {
        let files: BTreeSet<&Path> = self.streams.keys().copied().collect();
        for (file, (sealed, stream)) in std::mem::take(&mut self.streams) {
            let verdict = match stream {
                Some(stream) => sealed.facts.hold_of(stream.finish()),
                None => sealed.facts.hold(file),
            };
            let _ = sealed.verdict.set(verdict);
        }
        for file in files.into_iter().chain(std::mem::take(&mut self.others)) {
            let verdict = self.checkpoint.files.get(file).map(|s| s.verdict.wait());
            if let Some(Err(what)) = verdict {
                return Err(problem(file, what.clone()));
            }
        }
        Ok(())
    }
}

impl Drop for Reader<'_> {
    /// Others may wait for what one who has failed was to find out.
    fn drop(&mut self) {
        for (file, (sealed, _)) in std::mem::take(&mut self.streams) {
            let _ = sealed.verdict.set(sealed.facts.hold(file));
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
