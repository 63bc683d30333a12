//! The place of every rank, in a file that outlives its process, and what the files of a run that
//! hangs or died say when they are held against its program.
//!
//! Beside them the run writes its own finding, where it failed: the system tells it who died of
//! what, which no record does, and after its end all processes are gone alike.
//!
//! A rank stores where it is in its script before each instruction and after the last, in a file
//! that is [mapped] into its memory: the system keeps what was stored when the process is killed.
//! There is no history, because there need be none: the program is static, so where a rank is says
//! all that it did, and which calls each of the others must have come to.
//!
//! ```text
//!   0  head: form and version, rank, process, host
//!  64  place: scripts, step, begun, done, time, number, check
//! 120  place
//! 176  the plan's fingerprint
//! 224  check of all that stands outside of the places
//! ```
//!
//! Head and fingerprint are written once, with their check, before the file is mapped: a bit that
//! turns there later names no wrong process, host, rank or plan.
//!
//! A process may be killed between two stores, so there are two places, which are written in turn.
//! The newer one of those whose check is that of its words is where the rank was.

#[cfg(unix)]
mod mapped;
#[cfg(test)]
mod tests;
mod verdict;

use crate::error::RuntimeError;
use crate::execute::position::{self, Position};
use crate::files;
use ir::Rank;
use ir::program::Program;
use mapped::Mapped;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use verdict::VERDICT;
pub use verdict::{Fate, Finder, SILENT, Verdict};

/// The first bytes of a record; the last one is the version of the form.
const MAGIC: [u8; 8] = *b"mshrec\0\x04";
/// Where the version stands.
const VERSION: usize = 7;
/// Where the two places stand.
const PLACES: [usize; 2] = [64, 120];
/// Words of a place: five that say where the rank is, which place it is, and the check of these.
const WORDS: usize = 7;
/// Where the plan's fingerprint stands, and its end.
const PLAN: usize = 176;
const PLAN_END: usize = 224;
/// Where the check of all that stands outside of the places is.
const HEAD_CHECK: usize = 224;
/// How often is looked at the record of a rank that is alive and between two stores each time; how
/// often of these without a pause, and how long one is.
const LOOKS: usize = 100;
const LOOKS_AT_ONCE: usize = 20;
const BETWEEN_LOOKS: Duration = Duration::from_micros(100);
const ENDING: &str = "record";
/// The beginning of the name of a folder with the records of an earlier run.
const BEFORE: &str = "before-run-";
/// Characters of a host's name that have a place.
const LONGEST_HOST: usize = 47;

/// Where the ranks of a run write what they are doing.
#[derive(Clone, Debug)]
pub struct Recording {
    /// The folder that has a record of every rank.
    pub folder: PathBuf,
    /// The fingerprint of the plan.
    pub plan: String,
    /// Whether somebody has asked for them: then a rank that cannot begin its record fails, and
    /// else it goes on without.
    pub is_asked_for: bool,
    /// Told once of the ranks of this process that go on without, and why the first of them does.
    pub without: fn(&[Rank], &RuntimeError),
}

/// Systems without such files have no records.
#[cfg(not(unix))]
mod mapped {
    pub(super) const LEN: usize = 512;
    #[derive(Debug)]
    pub(super) struct Mapped;
    impl Mapped {
        pub fn of(_: &std::fs::File) -> std::io::Result<Self> {
            Err(std::io::ErrorKind::Unsupported.into())
        }
        pub fn store(&self, _: usize, _: &[u64]) {}
    }
}

/// A rank's file.
#[derive(Debug)]
pub struct Record {
    mapped: Mapped,
    /// Places written so far.
    number: u64,
    plays: u64,
    training: bool,
    step: u64,
    begun: u64,
}

impl Record {
    /// Begins the record of a rank in a folder, in place of one that is there. `plan` is the plan's
    /// fingerprint.
    ///
    /// Fails when it cannot be written, and leaves none then.
    pub fn create(folder: &Path, plan: &str, rank: Rank) -> Result<Self, RuntimeError> {
        let path = file(folder, rank);
        let created = || -> io::Result<Mapped> {
            // A file of its own: the process of an earlier run may have that one mapped still.
            match std::fs::remove_file(&path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
            let mut options = OpenOptions::new();
            let mut file = options
                .read(true)
                .write(true)
                .create_new(true)
                .open(&path)?;
            let mut head = [0; mapped::LEN];
            head[..8].copy_from_slice(&MAGIC);
            head[8..12].copy_from_slice(&rank.0.to_le_bytes());
            head[12..16].copy_from_slice(&std::process::id().to_le_bytes());
            let host = host();
            let n = host.len().min(LONGEST_HOST);
            head[16] = n as u8;
            head[17..17 + n].copy_from_slice(&host.as_bytes()[..n]);
            let n = plan.len().min(PLAN_END - PLAN - 1);
            head[PLAN] = n as u8;
            head[PLAN + 1..PLAN + 1 + n].copy_from_slice(&plan.as_bytes()[..n]);
            let check = head_check(&head);
            head[HEAD_CHECK..HEAD_CHECK + 8].copy_from_slice(&check.to_le_bytes());
            // All of it is written, so that a disk that is full says so here.
            file.write_all(&head)?;
            Mapped::of(&file)
        };
        let mapped = created().map_err(|e| {
            // A part of one would spoil the reading of all others.
            let _ = std::fs::remove_file(&path);
            problem(&path, e.to_string())
        })?;
        Ok(Record {
            mapped,
            number: 0,
            plays: 0,
            training: false,
            step: 0,
            begun: 0,
        })
    }
    /// The script of a step or of a validation begins.
    pub(crate) fn play(&mut self, training: bool, step: u64) {
        (self.plays, self.training, self.begun) = (self.plays + 1, training, 0);
        self.step = step;
        self.write(0);
    }
    /// The next instruction begins, and all before it are done.
    pub(crate) fn begin(&mut self) {
        let done = self.begun;
        self.begun += 1;
        self.write(done);
    }
    /// As many others began with it, and are done with it.
    pub(crate) fn with(&mut self, others: usize) {
        self.begun += others as u64;
    }
    /// All of the script is done.
    pub(crate) fn rests(&mut self) {
        self.write(self.begun);
    }
    fn write(&mut self, done: u64) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0, |t| t.as_millis() as u64);
        let step = (self.step << 1) | u64::from(self.training);
        self.number += 1;
        let place = [self.plays, step, self.begun, done, now, self.number];
        let [plays, step, begun, done, now, number] = place;
        let words = [plays, step, begun, done, now, number, check(&place)].map(u64::to_le);
        let at = PLACES[(self.number % 2) as usize] / 8;
        self.mapped.store(at, &words);
    }
}

/// A hash of words: FNV-1a over words, with a turn by which their high bits count. Each word is
/// taken in by a function that can be undone, so a change of one word always changes the hash.
fn check(words: &[u64]) -> u64 {
    words.iter().fold(0xcbf2_9ce4_8422_2325, |hash, word| {
        (hash ^ word)
            .wrapping_mul(0x0000_0100_0000_01b3)
            .rotate_left(29)
    })
}

/// The check of what is written once: of all words but those of the places, which change, and its
/// own.
fn head_check(bytes: &[u8; mapped::LEN]) -> u64 {
    let places = PLACES[0]..PLACES[1] + 8 * WORDS;
    let fixed = (0..mapped::LEN).step_by(8);
    let fixed = fixed.filter(|at| !places.contains(at) && *at != HEAD_CHECK);
    let words: Vec<u64> = fixed.map(|at| word(bytes, at)).collect();
    check(&words)
}

fn word(bytes: &[u8; mapped::LEN], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

/// Tries to begin a record in a folder, which goes again.
///
/// Fails with the reason why there can be none, as where its file system maps no files into memory.
pub fn can_begin(folder: &Path) -> Result<(), RuntimeError> {
    let begun = Record::create(folder, "", NOBODY).map(drop);
    let _ = std::fs::remove_file(file(folder, NOBODY));
    begun
}

fn file(folder: &Path, rank: Rank) -> PathBuf {
    folder.join(format!("rank-{}.{ENDING}", rank.0))
}

fn problem(path: &Path, problem: String) -> RuntimeError {
    RuntimeError::Record {
        path: path.to_path_buf(),
        problem,
    }
}

/// The name of this host, as records have it.
pub fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "this host".into(),
        name => name
            .chars()
            .filter(char::is_ascii)
            .take(LONGEST_HOST)
            .collect(),
    }
}

/// Moves the records of a run into a folder inside of theirs, where they outlive what follows.
pub fn set_aside(folder: &Path, name: &str) -> Result<PathBuf, RuntimeError> {
    let failed = |path: &Path, e: io::Error| problem(path, e.to_string());
    let aside = folder.join(name);
    std::fs::create_dir_all(&aside).map_err(|e| failed(&aside, e))?;
    // Those of another run that came to the same name.
    clear(&aside)?;
    let entries = std::fs::read_dir(folder).map_err(|e| failed(folder, e))?;
    for path in entries.flatten().map(|e| e.path()) {
        if let (true, Some(name)) = (is_of_run(&path), path.file_name()) {
            std::fs::rename(&path, aside.join(name)).map_err(|e| failed(&path, e))?;
        }
    }
    Ok(aside)
}

/// The rank of which a file has the record, by its name.
fn rank_of(path: &Path) -> Option<Rank> {
    let name = path.file_name()?.to_str()?;
    let number = name
        .strip_prefix("rank-")?
        .strip_suffix(ENDING)?
        .strip_suffix('.')?;
    number.parse().ok().map(Rank)
}

/// No rank of a run: its record only tries whether there can be some.
const NOBODY: Rank = Rank(u32::MAX);

/// Whether a file is a record or the finding of a run, by its content: others may have the same
/// names.
fn is_of_run(path: &Path) -> bool {
    let name = path
        .file_name()
        .and_then(|n| n.to_str())
        .unwrap_or_default();
    if let Some(rank) = rank_of(path) {
        // Whoever tried may have been killed.
        if rank == NOBODY {
            return true;
        }
        let mut head = [0; MAGIC.len()];
        let read = files::open_regular(path).and_then(|mut file| file.read_exact(&mut head));
        // Of any version.
        return read.is_ok() && head[..VERSION] == MAGIC[..VERSION];
    }
    let fresh = name
        .strip_prefix("verdict-")
        .and_then(|n| n.strip_suffix(".new"));
    let is_fresh = fresh.is_some_and(|pid| pid.parse::<u32>().is_ok());
    is_fresh || name == VERDICT && Verdict::at(path).is_ok()
}

/// Whether a folder has the records of a part of a run, or of one before it, by its name.
fn is_aside(name: &str) -> bool {
    let is_number = |n: &str| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit());
    let of_part = name.strip_prefix("before-loss-");
    let of_run = name.strip_prefix(BEFORE);
    let are_numbers = |n: &str| n.split('-').all(is_number);
    of_part.is_some_and(is_number) || of_run.is_some_and(are_numbers)
}

/// Takes the records of an earlier run, and its finding, out of the way: one that has failed is put
/// into a folder inside of theirs, as a launcher may have started the next one at once. All others
/// are removed.
pub fn make_way(folder: &Path) -> Result<(), RuntimeError> {
    if Verdict::read(folder).is_some() {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0, |t| t.as_secs());
        set_aside(folder, &format!("{BEFORE}{now}-{}", std::process::id()))?;
    }
    clear(folder)
}

/// Removes the records of an earlier run, and its finding, from a folder.
pub fn clear(folder: &Path) -> Result<(), RuntimeError> {
    let failed = |path: &Path, e: io::Error| problem(path, e.to_string());
    let entries = std::fs::read_dir(folder).map_err(|e| failed(folder, e))?;
    for path in entries.flatten().map(|e| e.path()) {
        if is_of_run(&path) {
            match std::fs::remove_file(&path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed(&path, e)),
                _ => {}
            }
        }
    }
    Ok(())
}

/// Removes all that a run wrote into a folder, and the folder where nothing else is in it. What
/// cannot be removed stays.
pub fn remove(folder: &Path) {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    for entry in entries {
        let is_aside = is_aside(&entry.file_name().to_string_lossy());
        // Links are not followed.
        if is_aside && entry.file_type().is_ok_and(|t| t.is_dir()) {
            let _ = clear(&entry.path());
            let _ = std::fs::remove_dir(entry.path());
        }
    }
    let _ = clear(folder);
    let _ = std::fs::remove_dir(folder);
}

/// The contents of a rank's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The rank.
    pub rank: Rank,
    /// Its process.
    pub pid: u32,
    /// The host of that.
    pub host: String,
    /// The fingerprint of the plan.
    pub plan: String,
    /// Scripts that it began, of training and validation.
    pub plays: u64,
    /// Whether the last one is of training.
    pub training: bool,
    /// The step that it is of, counted from 0.
    pub step: u64,
    /// Instructions of that which it began.
    pub begun: u64,
    /// And did.
    pub done: u64,
    /// When it wrote that, in milliseconds since 1970.
    pub at_ms: u64,
}

/// The records in a folder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Records {
    /// Those that can be read, by rank.
    pub seen: Vec<Seen>,
    /// Those that cannot: nothing is known of these ranks.
    pub damaged: BTreeMap<Rank, Damaged>,
}

impl Records {
    /// The same records, which were in this folder.
    ///
    /// Fails when there are none that can be read.
    pub fn some_of(self, folder: &Path) -> Result<Self, RuntimeError> {
        match (self.seen.is_empty(), self.damaged.values().next()) {
            (false, _) => Ok(self),
            (true, Some(Damaged { path, problem: why })) => Err(problem(path, why.clone())),
            (true, None) => Err(problem(folder, "it has no records of ranks".into())),
        }
    }
}

/// A file with the name of a record that is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damaged {
    /// The file.
    pub path: PathBuf,
    /// Its fault, in words behind its name.
    pub problem: String,
}

/// Reads the records in a folder. A damaged one is as good as none, and spoils no other.
///
/// Fails when there are none that can be read.
pub fn read(folder: &Path) -> Result<Records, RuntimeError> {
    read_any(folder)?.some_of(folder)
}

/// The same, also where there are none that can be read.
///
/// Fails when the folder cannot be read.
pub fn read_any(folder: &Path) -> Result<Records, RuntimeError> {
    let entries = std::fs::read_dir(folder).map_err(|e| problem(folder, e.to_string()))?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|e| e.path()).collect();
    paths.sort();
    let mut all = Records::default();
    for path in paths {
        let Some(rank) = rank_of(&path).filter(|rank| *rank != NOBODY) else {
            continue;
        };
        let problem = match at(&path) {
            Ok(Some(seen)) if seen.rank == rank => {
                all.seen.push(seen);
                continue;
            }
            Ok(Some(seen)) => format!("it is the record of {}", seen.rank),
            Ok(None) => "it is no record of a rank".into(),
            Err(e) => e.to_string(),
        };
        all.damaged.insert(rank, Damaged { path, problem });
    }
    all.seen.sort_by_key(|s| s.rank);
    Ok(all)
}

/// Reads one record; none where the file is another one.
///
/// Fails when it cannot be read, has another length than records have, is of another version, or
/// not as it was written.
pub fn at(path: &Path) -> io::Result<Option<Seen>> {
    let invalid = |what: String| Err(io::Error::new(io::ErrorKind::InvalidData, what));
    // A rank that is alive may be changing the older place while the newer one is read, and then
    // that. Nobody says in which order the system reads the two: beside one that is not whole the
    // other may have been read long before. Where it is read after that was seen, it is not.
    let mut was_changing = false;
    for look in 0..LOOKS {
        let (bytes, len) = content(path)?;
        let Ok(bytes) = <&[u8; mapped::LEN]>::try_from(&bytes[..]) else {
            return invalid(match len {
                0 => "it is empty".to_string(),
                n => format!("it has {n} bytes, and a record has {}", mapped::LEN),
            });
        };
        if bytes[..VERSION] != MAGIC[..VERSION] {
            return Ok(None);
        }
        if bytes[VERSION] != MAGIC[VERSION] {
            return invalid(format!(
                "it is a record of version {}, and this build reads version {}",
                bytes[VERSION], MAGIC[VERSION]
            ));
        }
        if word(bytes, HEAD_CHECK) != head_check(bytes) {
            return invalid("its head is not as it was written".into());
        }
        let places = Places::of(bytes);
        if (places.are_whole() || was_changing)
            && let Some(words) = places.newest()
        {
            return Ok(Seen::parse(bytes, words));
        }
        was_changing = true;
        if look >= LOOKS_AT_ONCE {
            std::thread::sleep(BETWEEN_LOOKS);
        }
    }
    invalid("neither of its two places is as it was written".into())
}

/// The bytes of a file, of a larger one than a record only one more than that has, and how many
/// there are in all.
fn content(path: &Path) -> io::Result<(Vec<u8>, u64)> {
    let mut bytes = Vec::new();
    let mut file = files::open_regular(path)?;
    let most = mapped::LEN as u64 + 1;
    (&mut file).take(most).read_to_end(&mut bytes)?;
    let n = bytes.len() as u64;
    let len = match n < most {
        true => n,
        false => file.metadata()?.len().max(n),
    };
    Ok((bytes, len))
}

impl Seen {
    fn parse(bytes: &[u8; mapped::LEN], place: [u64; WORDS]) -> Option<Self> {
        let small = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| bytes[at + i]));
        let text = |at: usize| {
            let text = bytes.get(at + 1..at + 1 + usize::from(bytes[at]))?;
            Some(String::from_utf8_lossy(text).into_owned())
        };
        let [plays, step, begun, done, at_ms, ..] = place;
        Some(Seen {
            rank: Rank(small(8)),
            pid: small(12),
            host: text(16)?,
            plan: text(PLAN)?,
            plays,
            training: step & 1 == 1,
            step: step >> 1,
            begun,
            done,
            at_ms,
        })
    }
}

/// The two places of a record, as they were read: none where one is not whole.
struct Places([Option<[u64; WORDS]>; 2]);

impl Places {
    fn of(bytes: &[u8; mapped::LEN]) -> Self {
        Places(PLACES.map(|at| {
            let place: [u64; WORDS] = std::array::from_fn(|i| word(bytes, at + 8 * i));
            // Zeros are of before there was one.
            let is_whole = place[WORDS - 1] == check(&place[..WORDS - 1]) || place == [0; WORDS];
            is_whole.then_some(place)
        }))
    }
    fn are_whole(&self) -> bool {
        self.0.iter().all(Option::is_some)
    }
    /// The newer one of those that are whole.
    fn newest(&self) -> Option<[u64; WORDS]> {
        let whole = self.0.iter().flatten();
        whole.max_by_key(|place| place[WORDS - 2]).copied()
    }
}

/// The activity of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Doing {
    /// It left no record that can be read.
    Nothing,
    /// Nothing between two scripts, of which the last was so many instructions long.
    Between,
    /// This instruction, alone or with others who are all there.
    Working(String),
    /// It waited in this call, for those who had not come to it.
    Waiting {
        /// The instruction and the call.
        what: String,
        /// Who had not come, by their records.
        missing: Vec<Rank>,
    },
    /// It was in this call, to which all others with a record had come: nobody knows of the rest.
    Unclear {
        /// The instruction and the call.
        what: String,
        /// Who left no record.
        unknown: Vec<Rank>,
    },
}

/// A call that a rank had not come to and in which others waited for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Owed {
    /// The instruction of the rank and the call.
    pub what: String,
    /// The step that it is of, counted from 0.
    pub step: u64,
    /// Its number among the calls of the rank's step, from 1.
    pub call: u64,
    /// Its number among the instructions of the rank's step, from 1.
    pub instruction: u64,
    /// How many instructions the rank's step has.
    pub of: u64,
    /// How many of them the rank had begun.
    pub begun: u64,
}

/// The result of holding records against their program.
#[derive(Clone, Debug)]
pub struct Diagnosis {
    /// The activity of each rank of the program.
    pub ranks: BTreeMap<Rank, Doing>,
    /// Those for whom others waited, by the records of both, and who waited for nobody themselves.
    pub culprits: BTreeSet<Rank>,
    /// The first call that each of those had not come to, where records say so.
    pub owed: BTreeMap<Rank, Owed>,
}

/// Holds what was seen of the ranks of a run against its program. Who waits for whom rests on the
/// records of both; of a rank without one nothing follows.
///
/// Fails when the records are not of this program.
pub fn diagnose(program: &Program, seen: &[Seen]) -> Result<Diagnosis, RuntimeError> {
    let mut positions: BTreeMap<Rank, Position<'_>> = BTreeMap::new();
    for s in seen {
        positions.insert(s.rank, position::of(program, s)?);
    }
    let mut ranks = BTreeMap::new();
    for rank in program.roles.iter().flat_map(|r| r.mesh.ranks()) {
        let doing = positions
            .get(&rank)
            .map_or(Doing::Nothing, |p| p.doing(&positions));
        ranks.insert(rank, doing);
    }
    let awaited = ranks.values().flat_map(|doing| match doing {
        Doing::Waiting { missing, .. } => &missing[..],
        _ => &[],
    });
    // Of one in a call that is unclear it is not known that it waited for nobody.
    let may_wait = |rank: &&Rank| {
        let doing = ranks.get(rank);
        matches!(doing, Some(Doing::Waiting { .. } | Doing::Unclear { .. }))
    };
    let culprits: BTreeSet<Rank> = awaited.filter(|r| !may_wait(r)).copied().collect();
    let owed = |rank: &Rank| Some((*rank, positions.get(rank)?.owed(&positions)?));
    Ok(Diagnosis {
        owed: culprits.iter().filter_map(owed).collect(),
        ranks,
        culprits,
    })
}
