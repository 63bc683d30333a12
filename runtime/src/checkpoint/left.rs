//! The states that the ranks of other processes leave when process 0 is lost, which would else have asked
//! them for these: each rank writes its share to a folder beside the checkpoints, with a note of the step
//! and of all who write. Whoever goes on makes a checkpoint of it, if all have written and of one step.
//! A process that has ended without such a note counts as lost with process 0.

use super::shard::name_of;
use super::{Origin, Rescued, Shard, Unrescued, Whole};
use super::{commit_verified, make_room, problem, shares_of};
use crate::error::RuntimeError;
use crate::files::Unfinished;
use ir::Rank;
use ir::program::{Program, StateBuffer};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};

/// The folder beside the checkpoints.
const NAME: &str = "left-by-ranks";

/// A rank's note of what it wrote.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    origin: Origin,
    /// All ranks that write.
    writers: BTreeSet<Rank>,
    rank: Rank,
    shard: Shard,
}

/// Where the ranks of a process leave their states when process 0 is lost.
#[derive(Clone, Debug)]
pub struct Leaving {
    /// The folder of checkpoints.
    pub folder: PathBuf,
    /// The fingerprint of the plan.
    pub plan_hash: String,
    /// The text of its forward graph.
    pub model: String,
    /// The checkpoints that stay where the disk has no room.
    pub kept: usize,
    /// Says which ranks cannot leave their states, and why.
    pub without: fn(&[Rank], &RuntimeError),
}

impl Note {
    /// Whether it is of the same step and the same writers.
    fn is_with(&self, other: &Note) -> bool {
        self.writers == other.writers && self.origin == other.origin
    }
}

impl Leaving {
    /// The folder in which files are left.
    pub(crate) fn place(&self) -> PathBuf {
        self.folder.join(NAME)
    }

    /// Whether one of these ranks has left its share.
    pub(crate) fn has_some_of(&self, ranks: &[Rank]) -> bool {
        ranks.iter().any(|rank| self.note_of(*rank).exists())
    }

    fn note_of(&self, rank: Rank) -> PathBuf {
        self.place().join(format!("rank-{}.json", rank.0))
    }

    /// The states that each rank writes when these are lost; nothing where some are lost with them.
    pub(crate) fn shares(
        program: &Program,
        lost: &[Rank],
    ) -> Option<BTreeMap<Rank, Vec<StateBuffer>>> {
        shares_of(program, |r| !lost.contains(&r)).ok()
    }

    /// Makes the folder in which files are left.
    pub(crate) fn make_place(&self) -> Result<(), RuntimeError> {
        let made = std::fs::create_dir_all(self.place());
        made.map_err(|e| problem(&self.place(), format!("cannot make the folder: {e}")))
    }

    /// Has the checkpoints go that may where the disk has no room, and that was the reason. Others
    /// may do so at the same time.
    pub(crate) fn make_room(&self, why: &RuntimeError) {
        make_room(&self.folder, self.kept, &Whole::default(), why);
    }

    /// Removes the files of a rank that could not write them whole.
    pub(crate) fn take_back(&self, rank: Rank) {
        let _ = std::fs::remove_file(self.place().join(name_of(rank.0)));
        let _ = std::fs::remove_file(self.note_of(rank));
    }

    /// Says which ranks leave nothing, and why. The folder goes where others have left nothing.
    pub(crate) fn give_up(&self, ranks: &[Rank], why: &RuntimeError) {
        (self.without)(ranks, why);
        let _ = std::fs::remove_dir(self.place());
    }

    /// Notes what a rank wrote, and who else does.
    pub(crate) fn note(
        &self,
        origin: Origin,
        writers: BTreeSet<Rank>,
        (rank, shard): (Rank, Shard),
    ) -> Result<(), RuntimeError> {
        let path = self.note_of(rank);
        let error = |e: std::io::Error| problem(&path, format!("cannot write: {e}"));
        let note = Note {
            origin,
            writers,
            rank,
            shard,
        };
        let text = serde_json::to_vec(&note).map_err(|e| error(e.into()))?;
        let mut file = std::fs::File::create_new(&path).map_err(error)?;
        file.write_all(&text).map_err(error)?;
        file.sync_all().map_err(error)
    }
}

/// Whether ranks leave, or have left, their states in this folder of checkpoints.
pub fn is_left(folder: &Path) -> bool {
    folder.join(NAME).is_dir()
}

/// Removes what ranks of an earlier run left in a folder of checkpoints.
pub fn forget(folder: &Path) {
    let _ = std::fs::remove_dir_all(folder.join(NAME));
}

/// Makes a checkpoint of what ranks of `run` left in a folder of checkpoints, of which the newest `kept`
/// stay. What was left is gone then. Nothing where nothing was left.
///
/// Fails with the reason where it is not the whole state of a step, or cannot be made one.
pub fn salvage(folder: &Path, kept: usize, run: &str) -> Option<Result<Rescued, Unrescued>> {
    let place = folder.join(NAME);
    if !place.is_dir() {
        return None;
    }
    let made = made_of(folder, &place, kept, run);
    let _ = std::fs::remove_dir_all(&place);
    Some(made)
}

fn made_of(folder: &Path, place: &Path, kept: usize, run: &str) -> Result<Rescued, Unrescued> {
    let missing = |what: String| Unrescued::Missing(what);
    let read = |e: std::io::Error| missing(format!("{}: {e}", place.display()));
    let mut notes: BTreeMap<Rank, Note> = BTreeMap::new();
    for entry in std::fs::read_dir(place).map_err(read)? {
        let path = entry.map_err(read)?.path();
        if path.extension().is_some_and(|e| e == "json") {
            let text = std::fs::read(&path).map_err(read)?;
            let note: Note = serde_json::from_slice(&text)
                .map_err(|e| missing(format!("{}: {e}", path.display())))?;
            notes.insert(note.rank, note);
        }
    }
    let Some(first) = notes.values().next() else {
        return Err(missing("no rank had written its part when it ended".into()));
    };
    // Who saw others lost may have had more of them than who saw fewer: one of these sets is enough.
    let has_all = |of: &Note| {
        let note = |rank: &Rank| notes.get(rank).is_some_and(|n| n.is_with(of));
        of.writers.iter().all(note)
    };
    let Some(whole) = notes.values().find(|note| has_all(note)) else {
        let absent = first.writers.iter().find(|r| !notes.contains_key(r));
        return Err(missing(match absent {
            Some(absent) => format!("{absent} had not written its part when it ended"),
            None => "the ranks that were left were not at one step".into(),
        }));
    };
    let (origin, writers) = (whole.origin.clone(), whole.writers.clone());
    notes.retain(|rank, _| writers.contains(rank));
    let error = |e: std::io::Error| {
        Unrescued::Unwritten(problem(folder, format!("cannot write a checkpoint: {e}")))
    };
    let unfinished = Unfinished::folder(folder).map_err(error)?;
    let mut shards = Vec::new();
    for note in notes.into_values() {
        let name = Path::new(&note.shard.file).file_name().unwrap_or_default();
        std::fs::rename(place.join(name), unfinished.path().join(name)).map_err(error)?;
        shards.push(note.shard);
    }
    // The notes are of no more use, and the manifest may need their room.
    let _ = std::fs::remove_dir_all(place);
    let run = Some(run.into());
    let origin = Origin { run, ..origin };
    let keeping = (kept, &Whole::default());
    let made = commit_verified(folder, keeping, &unfinished, origin, shards);
    made.map_err(Unrescued::Unwritten)
}
