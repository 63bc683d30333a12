use super::{Fate, PLACES, Record, VERSION, Verdict, WORDS, at, mapped, read};
use ir::Rank;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

fn begun(folder: &Path) -> (Record, PathBuf) {
    let record = Record::create(folder, "a plan", Rank(3)).unwrap();
    (record, folder.join("rank-3.record"))
}

/// The figures of where a rank is: steps begun, the step, instructions begun and done.
fn place(path: &Path) -> (u64, u64, u64, u64) {
    let seen = at(path).unwrap().expect("it is a record");
    assert_eq!((seen.rank, &*seen.plan), (Rank(3), "a plan"));
    (seen.plays, seen.step, seen.begun, seen.done)
}

#[test]
fn a_record_says_where_the_rank_is() {
    let folder = tempfile::tempdir().unwrap();
    let (mut record, path) = begun(folder.path());
    assert_eq!(place(&path), (0, 0, 0, 0));
    record.play(true, 7);
    assert_eq!(place(&path), (1, 7, 0, 0));
    record.begin();
    record.begin();
    assert_eq!(place(&path), (1, 7, 2, 1));
    record.with(2);
    record.rests();
    assert_eq!(place(&path), (1, 7, 4, 4));
    drop(record);
    assert_eq!(place(&path), (1, 7, 4, 4));
    assert_eq!(std::fs::read(&path).unwrap().len(), mapped::LEN);
}

/// Whichever stores a process came to before it was killed: the rank is where it was before them,
/// or after.
#[test]
fn a_kill_between_two_stores_leaves_a_place() {
    let folder = tempfile::tempdir().unwrap();
    let (mut record, path) = begun(folder.path());
    let mut before = std::fs::read(&path).unwrap();
    for n in 0..4 {
        let was = place(&path);
        match n {
            0 => record.play(true, 9),
            _ => record.begin(),
        }
        let (is, after) = (place(&path), std::fs::read(&path).unwrap());
        assert_ne!(was, is);
        let killed = folder.path().join("killed.record");
        let words = before.chunks_exact(8).zip(after.chunks_exact(8));
        let changed = words.enumerate().filter(|(_, (a, b))| a != b);
        let changed: Vec<usize> = changed.map(|(i, _)| 8 * i).collect();
        for some in 0..=changed.len() {
            let mut bytes = before.clone();
            for &word in &changed[..some] {
                bytes[word..word + 8].copy_from_slice(&after[word..word + 8]);
            }
            std::fs::write(&killed, bytes).unwrap();
            let expected = if some == changed.len() { is } else { was };
            assert_eq!(place(&killed), expected, "{some} of {changed:?}");
        }
        before = after;
    }
}

#[test]
fn the_record_of_a_rank_that_works_can_be_read_at_any_time() {
    let folder = tempfile::tempdir().unwrap();
    let (mut record, path) = begun(folder.path());
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for step in 0.. {
                record.play(true, step);
                (0..5).for_each(|_| record.begin());
                record.rests();
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        // The other thread ends with this one, also where an assertion fails.
        let _end = End(&is_over);
        let mut last = 0;
        for _ in 0..20_000 {
            let (plays, step, begun, done) = place(&path);
            assert!(plays >= last && (plays == 0 || plays == step + 1));
            assert!(begun <= 5 && (begun == done || begun == done + 1));
            last = plays;
        }
    });
}

/// Stores at its end that something is over.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Nor does one that is removed, or of another run that has begun its own meanwhile.
#[test]
fn a_file_that_is_shortened_ends_no_rank() {
    let folder = tempfile::tempdir().unwrap();
    let (mut record, path) = begun(folder.path());
    record.play(true, 0);
    std::fs::write(&path, "").unwrap();
    for _ in 0..3 {
        record.begin();
    }
    // The signals of other files are taken as well.
    let (mut second, path) = begun(folder.path());
    second.play(true, 4);
    assert_eq!(place(&path), (1, 4, 0, 0));
    record.begin();
    std::fs::write(&path, "short").unwrap();
    second.begin();
    drop(second);
    let (mut third, path) = begun(folder.path());
    third.play(false, 5);
    record.rests();
    assert_eq!(place(&path), (1, 5, 0, 0));
    std::fs::remove_file(&path).unwrap();
    third.begin();
}

#[test]
fn a_folder_that_is_not_there_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let none = folder.path().join("none");
    let error = Record::create(&none, "a plan", Rank(3)).unwrap_err();
    assert!(error.to_string().contains("none/rank-3.record"), "{error}");
}

/// Process, host, rank and plan are never other ones than were written.
#[test]
fn a_bit_of_a_record_that_turns_outside_of_its_places_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let (mut record, path) = begun(folder.path());
    record.play(true, 7);
    let whole = std::fs::read(&path).unwrap();
    let places = PLACES[0]..PLACES[1] + 8 * WORDS;
    for byte in (0..mapped::LEN).filter(|byte| !places.contains(byte)) {
        for bit in 0..8 {
            let mut bytes = whole.clone();
            bytes[byte] ^= 1 << bit;
            std::fs::write(&path, bytes).unwrap();
            let said = match at(&path) {
                Ok(found) => {
                    assert_eq!(found, None, "bit {bit} of byte {byte}");
                    "it is no record".to_string()
                }
                Err(e) => e.to_string(),
            };
            let expected = match byte {
                0..VERSION => "it is no record",
                VERSION => "it is a record of version ",
                _ => "its head is not as it was written",
            };
            assert!(said.starts_with(expected), "byte {byte}: {said}");
        }
    }
    // The other ranks' are read all the same.
    let mut bytes = whole;
    bytes[185] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    drop(Record::create(folder.path(), "a plan", Rank(1)).unwrap());
    let all = read(folder.path()).unwrap();
    assert_eq!(all.seen.len(), 1);
    let problem = &all.damaged[&Rank(3)].problem;
    assert_eq!(problem, "its head is not as it was written");
}

#[test]
fn a_record_of_another_version_or_without_a_place_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let (record, path) = begun(folder.path());
    drop(record);
    let whole = std::fs::read(&path).unwrap();
    let mut before = whole.clone();
    before[VERSION] = 3;
    std::fs::write(&path, before).unwrap();
    let error = at(&path).unwrap_err().to_string();
    let expected = "it is a record of version 3, and this build reads version 4";
    assert_eq!(error, expected);
    let mut without = whole;
    PLACES.iter().for_each(|at| without[*at] = 1);
    std::fs::write(&path, without).unwrap();
    let error = at(&path).unwrap_err().to_string();
    assert_eq!(error, "neither of its two places is as it was written");
}

#[test]
fn the_length_of_a_file_that_is_no_record_is_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rank-3.record");
    let file = std::fs::File::create(&path).unwrap();
    for n in [1, 511, 513, 514, 1 << 20, 100 << 30] {
        file.set_len(n).unwrap();
        let error = at(&path).unwrap_err().to_string();
        let expected = format!("it has {n} bytes, and a record has 512");
        assert_eq!(error, expected);
    }
}

#[test]
fn a_finding_beside_records_is_read_whole_or_refused_in_words() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(Verdict::find(folder.path()).unwrap(), None);
    let missed = Fate::Missed {
        by: Rank(7),
        seconds: 2,
    };
    let verdict = Verdict {
        error: "rank2 is lost".into(),
        found: BTreeMap::from([(Rank(2), Fate::Lost("gone".into())), (Rank(3), missed)]),
        by: None,
        plan: Some("f00d".into()),
    };
    verdict.write(folder.path()).unwrap();
    let read = Verdict::find(folder.path()).unwrap();
    assert_eq!(read.as_ref(), Some(&verdict));
    let ranks: Vec<Rank> = verdict.ranks().into_iter().collect();
    assert_eq!(ranks, [Rank(2), Rank(3), Rank(7)]);
    let path = folder.path().join("verdict.json");
    let text = std::fs::read(&path).unwrap();
    let refused = || Verdict::find(folder.path()).unwrap_err().to_string();
    for n in 0..text.len() {
        std::fs::write(&path, &text[..n]).unwrap();
        let said = refused();
        assert!(said.contains("verdict.json: it is "), "{said}");
        assert_eq!(Verdict::read(folder.path()), None);
    }
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(100 << 30).unwrap();
    let said = refused();
    assert!(said.contains("it has 107374182400 bytes"), "{said}");
}
