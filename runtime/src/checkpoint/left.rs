//! The states that the ranks of other processes leave when process 0 is lost, which would else have asked
//! them for these: each rank writes its share to a folder beside the checkpoints, with a note of the step
//! and of all who write. Whoever goes on makes a checkpoint of it, if all have written and of one step.
//! A process that has ended without such a note counts as lost with process 0.

use super::shard::name_of;
use super::{Origin, Rescued, Shard, Unrescued, Whole};
use super::{commit_verified, make_room, problem, shares_of};
use crate::error::RuntimeError;
use crate::files::{self, Unfinished};
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
        place_of_left(&self.folder)
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
    pub(crate) fn make_room(&self, whole: &Whole, why: &RuntimeError) {
        make_room(&self.folder, self.kept, whole, why);
    }

    /// Bytes that the disk has left; zero where it does not say.
    pub(crate) fn room(&self) -> u64 {
        let disk = rustix::fs::statvfs(&self.folder);
        disk.map_or(0, |d| d.f_bavail.saturating_mul(d.f_frsize))
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
        written(&path, &text).map_err(error)
    }
}

/// The folder in which ranks leave their states, beside these checkpoints.
pub fn place_of_left(folder: &Path) -> PathBuf {
    folder.join(NAME)
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
/// Fails with the reason where it is not the whole state of a step, and is gone then, too; and
/// where no checkpoint can be made of it, which [stays](is_left) for another try unless it is
/// spoilt.
pub fn salvage(folder: &Path, kept: usize, run: &str) -> Option<Result<Rescued, Unrescued>> {
    let place = folder.join(NAME);
    if !place.is_dir() {
        return None;
    }
    let made = made_of(folder, &place, kept, run);
    // States that are complete wait for room.
    if !matches!(made, Err(Unrescued::Unwritten(_))) {
        let _ = std::fs::remove_dir_all(&place);
    }
    Some(made)
}

fn made_of(folder: &Path, place: &Path, kept: usize, run: &str) -> Result<Rescued, Unrescued> {
    let missing = |what: String| Unrescued::Missing(what);
    let read = |e: std::io::Error| missing(format!("{}: {e}", place.display()));
    let mut notes: BTreeMap<Rank, Note> = BTreeMap::new();
    for entry in std::fs::read_dir(place).map_err(read)? {
        let path = entry.map_err(read)?.path();
        if is_note(&path) {
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
    let names: Vec<PathBuf> = (notes.keys())
        .map(|rank| format!("rank-{}.json", rank.0).into())
        .collect();
    let shards: Vec<Shard> = notes.into_values().map(|note| note.shard).collect();
    let of_shards = shards.iter().map(|shard| Path::new(&shard.file));
    let needed: BTreeSet<_> = (names.iter().map(|name| &**name).chain(of_shards))
        .filter_map(Path::file_name)
        .collect();
    files::sweep(place);
    for entry in std::fs::read_dir(place).into_iter().flatten().flatten() {
        if !needed.contains(&*entry.file_name()) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
    let error = |e: std::io::Error| {
        Unrescued::Unwritten(problem(folder, format!("cannot write a checkpoint: {e}")))
    };
    // A full disk may have no room for another folder, or for more names in one.
    let unfinished = Unfinished::there(place).map_err(error)?;
    let run = Some(run.into());
    let origin = Origin { run, ..origin };
    let whole = Whole::default();
    let once = || {
        let (origin, shards) = (origin.clone(), shards.clone());
        commit_verified(folder, (kept, &whole), &unfinished, origin, shards)
    };
    let made = once().or_else(|e| match place.is_dir() {
        true => without_notes(place, &names, once).unwrap_or(Err(e)),
        false => Err(e),
    });
    let made = made.map_err(Unrescued::Unwritten)?;
    for name in &names {
        let _ = std::fs::remove_file(made.path.join(name));
    }
    Ok(made)
}

/// Whether a file is a rank's note: a manifest is none.
fn is_note(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| name.starts_with("rank-") && name.ends_with(".json"))
}

/// Does something once more in the room of the notes, which a manifest may need. They are written
/// again where it fails. Nothing where they cannot be read.
fn without_notes<T, E>(
    place: &Path,
    names: &[PathBuf],
    once: impl Fn() -> Result<T, E>,
) -> Option<Result<T, E>> {
    let texts: Result<Vec<_>, _> = (names.iter())
        .map(|name| std::fs::read(place.join(name)))
        .collect();
    let texts = texts.ok()?;
    for name in names {
        let _ = std::fs::remove_file(place.join(name));
    }
    let done = once();
    if done.is_err() {
        // A manifest without a name for its folder is in the way.
        let _ = std::fs::remove_file(place.join(super::manifest::NAME));
        for (name, text) in names.iter().zip(texts) {
            let _ = written(&place.join(name), &text);
        }
    }
    Some(done)
}

/// Writes a new file through to the disk.
fn written(path: &Path, text: &[u8]) -> std::io::Result<()> {
    let mut file = std::fs::File::create_new(path)?;
    file.write_all(text)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::View;
    use crate::checkpoint::{numbered, verify, write_shard};
    use crate::execute::Local;
    use ir::DType;

    fn nothing_is_said(_: &[Rank], _: &RuntimeError) {}

    /// Has two ranks leave half of the states each, of step 5.
    fn leave(folder: &Path) -> Leaving {
        let leaving = Leaving {
            folder: folder.to_path_buf(),
            plan_hash: "0".into(),
            model: String::new(),
            kept: 2,
            without: nothing_is_said,
        };
        leaving.make_place().unwrap();
        let origin = Origin {
            plan_hash: "0".into(),
            model: String::new(),
            step: 5,
            seed: 1,
            next_sample: 20,
            global_batch: 4,
            sequence: 8,
            data: None,
            run: None,
        };
        let writers: BTreeSet<Rank> = [Rank(0), Rank(1)].into();
        for &rank in &writers {
            let part = Local::whole(DType::F32, &[3]);
            let parts = [(format!("w{}", rank.0), part)];
            let values = [1f32, 2.0, 3.0];
            let shard = write_shard(&leaving.place(), rank, &parts, &|_| {
                Ok(View::There(bytemuck::cast_slice(&values)))
            });
            let shard = shard.unwrap();
            let note = leaving.note(origin.clone(), writers.clone(), (rank, shard));
            note.unwrap();
        }
        leaving
    }

    fn names(folder: &Path) -> BTreeSet<String> {
        let entries = std::fs::read_dir(folder).unwrap();
        let name = |e: std::fs::DirEntry| e.file_name().into_string().unwrap();
        entries.map(|e| name(e.unwrap())).collect()
    }

    /// A disk that has no room for the manifest may have some when the same command is given again.
    #[test]
    fn complete_states_stay_until_they_are_a_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path();
        let left = leave(folder);
        let place = left.place();
        // One that had ended while it wrote, and one who was not asked to.
        std::fs::write(place.join(".meshwright-tmp-7-0"), "half").unwrap();
        std::fs::write(place.join("rank-2.safetensors"), "half").unwrap();
        let all: Vec<_> = (names(&place).into_iter())
            .filter(|name| name.starts_with("rank-") && !name.starts_with("rank-2"))
            .collect();
        // No file takes the name of a folder.
        let in_the_way = place.join("manifest.json");
        std::fs::create_dir(&in_the_way).unwrap();
        for _ in 0..2 {
            let made = salvage(folder, 2, "1f").unwrap();
            assert!(matches!(made, Err(Unrescued::Unwritten(_))), "{made:?}");
            assert!(is_left(folder) && numbered(folder).is_empty());
            let now = names(&place);
            assert!(all.iter().all(|name| now.contains(name)), "{now:?}");
        }
        std::fs::remove_dir(&in_the_way).unwrap();
        let made = salvage(folder, 2, "1f").unwrap().unwrap();
        assert_eq!(made.step, 5);
        let found = verify(&made.path).unwrap();
        assert_eq!(found.origin().unwrap().run.as_deref(), Some("1f"));
        let files = ["manifest.json", "rank-0.safetensors", "rank-1.safetensors"];
        assert_eq!(names(&made.path), BTreeSet::from(files.map(String::from)));
        assert_eq!(numbered(folder).len(), 1);
        assert!(salvage(folder, 2, "1f").is_none(), "nothing is left");
    }

    #[test]
    fn states_that_are_not_complete_go() {
        let dir = tempfile::tempdir().unwrap();
        let left = leave(dir.path());
        left.take_back(Rank(1));
        let made = salvage(dir.path(), 2, "1f").unwrap();
        assert!(matches!(made, Err(Unrescued::Missing(_))), "{made:?}");
        assert!(!is_left(dir.path()) && numbered(dir.path()).is_empty());
    }
}
