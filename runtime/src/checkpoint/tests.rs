//! Parts of states through files, without ranks.

use super::*;
use crate::arena::View;
use crate::cpu::testing::random;
use ir::{DType, LocalRange, Rank};

/// The shards of a tensor that `n` ranks split along `dim`; the last ones may have less or
/// nothing, and padding for it.
fn split(lens: &[u64], dim: usize, n: u64) -> Vec<Local> {
    let part = |rank: u64| {
        let mut local = Local::whole(DType::F32, lens);
        let padded = lens[dim].div_ceil(n);
        let start = (rank * padded).min(lens[dim]);
        let valid = padded.min(lens[dim] - start);
        local.ranges[dim] = LocalRange {
            start,
            valid,
            padded,
        };
        local
    };
    (0..n).map(part).collect()
}

fn cut(full: &[f32], part: &Local) -> Vec<f32> {
    let mut values = vec![0.0; part.elements()];
    part.cut(full, &mut values);
    values
}

fn origin(step: u64) -> Origin {
    Origin {
        plan_hash: "fnv1a64:0".into(),
        model: String::new(),
        step,
        seed: 1,
        next_sample: 4 * step,
        global_batch: 4,
        sequence: 8,
        data: None,
        run: None,
    }
}

fn write_parts(
    folder: &Path,
    rank: Rank,
    states: &[(&str, &Local, &[u8])],
) -> Result<Shard, RuntimeError> {
    let part = |(path, local, _): &(&str, &Local, &[u8])| (path.to_string(), (*local).clone());
    let parts: Vec<_> = states.iter().map(part).collect();
    write_shard(folder, rank, &parts, &|i| Ok(View::There(states[i].2)))
}

/// A checkpoint of the states `w`, as `parts` hold it, and `loss_scale`.
fn write(folder: &Path, name: &str, full: &[f32], parts: &[Local]) -> PathBuf {
    let one = folder.join(name);
    std::fs::create_dir_all(&one).unwrap();
    let (scalar, half) = (Local::whole(DType::F32, &[]), 0.5f32);
    let mut shards = Vec::new();
    for (rank, part) in parts.iter().enumerate() {
        let buffer = cut(full, part);
        let mut states = vec![("w", part, bytemuck::cast_slice(&buffer))];
        states.retain(|(_, part, _)| !part.valid().contains(&0));
        if rank == 0 {
            states.push(("loss_scale", &scalar, bytemuck::bytes_of(&half)));
        }
        shards.push(write_parts(&one, Rank(rank as u32), &states).unwrap());
    }
    Manifest::new(origin(5), shards).write(&one).unwrap();
    one
}

fn read(checkpoint: &Checkpoint, name: &str, part: &Local) -> Vec<f32> {
    // The former content is gone, padding included.
    let mut values = vec![f32::NAN; part.elements()];
    let out = bytemuck::cast_slice_mut(&mut values);
    checkpoint.read(name, part, out).unwrap();
    values
}

#[test]
fn what_was_split_one_way_is_read_another_way() {
    let ways = |lens: &[u64]| -> Vec<Vec<Local>> {
        let dims = 0..lens.len();
        let all = dims.flat_map(|d| [1, 2, 3, 5].map(|n| split(lens, d, n)));
        all.collect()
    };
    for lens in [&[7][..], &[6, 10], &[3, 4, 5], &[1, 9, 2]] {
        let full = random(3, lens.iter().product::<u64>() as usize);
        for from in ways(lens) {
            let dir = tempfile::tempdir().unwrap();
            write(dir.path(), "0001-step-5", &full, &from);
            let found = find(dir.path()).unwrap();
            assert!(found.passed_over.is_empty());
            let checkpoint = found.checkpoint;
            assert_eq!(checkpoint.step(), 5);
            assert_eq!(checkpoint.origin(), Some(&origin(5)));
            for part in ways(lens).concat() {
                assert_eq!(read(&checkpoint, "w", &part), cut(&full, &part));
            }
            let scalar = Local::whole(DType::F32, &[]);
            assert_eq!(read(&checkpoint, "loss_scale", &scalar), [0.5]);
            let other = Local::whole(DType::F32, &[2, 2]);
            assert!(checkpoint.read("w", &other, &mut [0; 16]).is_err());
            assert!(checkpoint.read("v", &scalar, &mut [0; 4]).is_err());
        }
    }
}

/// A process to which a checkpoint is told may be on another host, and see other bytes there.
#[test]
fn who_is_told_of_a_checkpoint_verifies_what_it_reads() {
    let dir = tempfile::tempdir().unwrap();
    let lens = [4, 6];
    let full = random(6, 24);
    let parts = split(&lens, 0, 2);
    let one = write(dir.path(), "0001-step-5", &full, &parts);
    let told = rmp_serde::to_vec_named(&find(dir.path()).unwrap().checkpoint).unwrap();
    let mut shard = std::fs::read(one.join("rank-1.safetensors")).unwrap();
    *shard.last_mut().unwrap() ^= 1;
    std::fs::write(one.join("rank-1.safetensors"), shard).unwrap();
    let there: Checkpoint = rmp_serde::from_slice(&told).unwrap();
    assert_eq!(read(&there, "w", &parts[0]), cut(&full, &parts[0]));
    let mut out = vec![0; parts[1].bytes()];
    let error = there.read("w", &parts[1], &mut out).unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("rank-1") && error.contains("another hash"),
        "{error}"
    );
}

/// The bytes that this thread has read.
#[cfg(target_os = "linux")]
fn bytes_read() -> u64 {
    let io = std::fs::read_to_string("/proc/thread-self/io").unwrap();
    let line = io.lines().find_map(|l| l.strip_prefix("rchar: "));
    line.unwrap().parse().unwrap()
}

/// It was read once to see that it is what was written, and once more for what is in it.
#[test]
#[cfg(target_os = "linux")]
fn who_is_told_of_a_checkpoint_reads_each_file_once() {
    let dir = tempfile::tempdir().unwrap();
    let lens = [64, 65536];
    let full = random(4, 64 * 65536);
    let folder = write(dir.path(), "0001-step-5", &full, &split(&lens, 0, 4));
    let told = rmp_serde::to_vec_named(&find(dir.path()).unwrap().checkpoint).unwrap();
    let told = || rmp_serde::from_slice::<Checkpoint>(&told).unwrap();
    let files = std::fs::read_dir(&folder).unwrap();
    let bytes: u64 = files.map(|f| f.unwrap().metadata().unwrap().len()).sum();
    // All of it, some of each file, and in an order in which the files do not have it.
    for (dim, n) in [(0, 1), (1, 2)] {
        let part = &split(&lens, dim, n)[0];
        let scalar = Local::whole(DType::F32, &[]);
        let (there, mut half) = (told(), 0f32);
        let mut values = vec![f32::NAN; part.elements()];
        let before = bytes_read();
        let mut reader = there.reader();
        let out = bytemuck::bytes_of_mut(&mut half);
        reader.read("loss_scale", &scalar, out).unwrap();
        let out = bytemuck::cast_slice_mut(&mut values);
        reader.read("w", part, out).unwrap();
        reader.finish().unwrap();
        let n_read = bytes_read() - before;
        assert_eq!((values, half), (cut(&full, part), 0.5));
        // What lies before what was read already is read by itself, of the first file.
        let allowed = bytes + bytes / 4 + 4096;
        assert!(n_read < allowed, "{n_read} of {bytes} bytes");
        // Another rank of the process reads its own part alone.
        let before = bytes_read();
        assert_eq!(read(&there, "w", part), cut(&full, part));
        let needed = part.bytes() as u64;
        assert!(bytes_read() - before < needed + needed / 100 + 4096);
    }
}

/// Ranks of one process read at the same time, and each of them is told of damage anywhere in what
/// it read, also of what another one verifies, or fails to.
#[test]
fn ranks_of_a_process_verify_for_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let lens = [64, 512];
    let full = random(4, 64 * 512);
    let parts = split(&lens, 0, 4);
    let folder = write(dir.path(), "0001-step-5", &full, &parts);
    let told = rmp_serde::to_vec_named(&find(dir.path()).unwrap().checkpoint).unwrap();
    let told = || rmp_serde::from_slice::<Checkpoint>(&told).unwrap();
    let halves = split(&lens, 1, 2);
    let read_part = |there: &Checkpoint, part: &Local| -> Result<(), String> {
        let mut values = vec![0.0; part.elements()];
        let out = bytemuck::cast_slice_mut(&mut values);
        there.read("w", part, out).map_err(|e| e.to_string())?;
        assert_eq!(values, cut(&full, part));
        Ok(())
    };
    let all_read = |there: &Checkpoint| -> Vec<Result<(), String>> {
        std::thread::scope(|scope| {
            let begin = |part| scope.spawn(move || read_part(there, part));
            let ranks: Vec<_> = halves.iter().map(begin).collect();
            ranks.into_iter().map(|r| r.join().unwrap()).collect()
        })
    };
    assert_eq!(all_read(&told()), [Ok(()), Ok(())]);
    // One begins with a file and gives up: the other one is told what is true all the same.
    let there = told();
    let mut gives_up = there.reader();
    let mut out = vec![0; parts[3].bytes()];
    gives_up.read("w", &parts[3], &mut out).unwrap();
    drop(gives_up);
    assert_eq!(all_read(&there), [Ok(()), Ok(())]);
    // The last byte is of the right half alone.
    let path = folder.join("rank-3.safetensors");
    let mut shard = std::fs::read(&path).unwrap();
    *shard.last_mut().unwrap() ^= 1;
    std::fs::write(&path, shard).unwrap();
    for read in all_read(&told()) {
        let error = read.unwrap_err();
        assert!(
            error.contains("rank-3") && error.contains("hash"),
            "{error}"
        );
    }
    // A file that is cut off.
    std::fs::write(&path, std::fs::read(&path).unwrap().split_at(5000).0).unwrap();
    for read in all_read(&told()) {
        let error = read.unwrap_err();
        assert!(error.contains("rank-3"), "{error}");
    }
}

/// A rank reads the bytes of its part, and what lies between them where that is little.
#[test]
#[cfg(target_os = "linux")]
fn only_the_bytes_of_a_part_are_read() {
    // Rows of 256 KiB; their halves are longer than what is read at once.
    let lens = [64, 65536];
    let full = random(4, 64 * 65536);
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "0001-step-5", &full, &split(&lens, 0, 4));
    let checkpoint = find(dir.path()).unwrap().checkpoint;
    for (dim, n) in [(0, 8), (1, 2), (0, 1)] {
        let part = &split(&lens, dim, n)[0];
        let mut values = cut(&full, part);
        let out = bytemuck::cast_slice_mut(&mut values);
        let before = bytes_read();
        checkpoint.read("w", part, out).unwrap();
        let (read, needed) = (bytes_read() - before, part.bytes() as u64);
        let allowed = needed + needed / 100 + 4096;
        assert!(
            (needed..allowed).contains(&read),
            "{read} of {needed} bytes"
        );
    }
}

#[test]
fn the_newest_that_is_whole_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let lens = [4, 3];
    let full = random(5, 12);
    let none = find(dir.path()).unwrap_err().to_string();
    assert!(none.contains("the folder has no checkpoint"), "{none}");
    // By number, not by name or step; what has other names is nobody's.
    for name in [
        "0009-step-50",
        "0010-step-5",
        "11-step",
        "latest",
        "x-step-9",
    ] {
        write(dir.path(), name, &full, &split(&lens, 0, 2));
    }
    std::fs::create_dir(dir.path().join("0012-step-60")).unwrap();
    let name = |found: &Found| {
        let path = found.checkpoint.path();
        path.file_name().unwrap().to_str().unwrap().to_string()
    };
    assert_eq!(name(&find(dir.path()).unwrap()), "0010-step-5");
    // Files that took each other's place.
    let newest = dir.path().join("0010-step-5");
    let at = |n: u32| newest.join(format!("rank-{n}.safetensors"));
    let files = [0, 1].map(|n| std::fs::read(at(n)).unwrap());
    std::fs::write(at(0), &files[1]).unwrap();
    let found = find(dir.path()).unwrap();
    assert_eq!(name(&found), "0009-step-50");
    let why = found.passed_over[0].to_string();
    assert!(why.contains("0010-step-5/rank-0.safetensors"), "{why}");
    // One that is named is that one or none.
    assert!(find(&newest).is_err());
    std::fs::write(at(0), &files[0]).unwrap();
    assert!(find(&newest).unwrap().passed_over.is_empty());
    assert!(find(&newest.join("manifest.json")).is_ok());
}

/// A run has no checkpoint go that somebody reads; once nobody does, it goes with the next ones.
#[test]
fn a_checkpoint_that_is_read_stays() {
    let dir = tempfile::tempdir().unwrap();
    let full = random(5, 12);
    let make = |name: &str| write(dir.path(), name, &full, &split(&[4, 3], 0, 2));
    let left = || numbered(dir.path()).into_iter().map(|(n, _)| n);
    let first = make("0001-step-10");
    let read = verify(&first).unwrap();
    make("0002-step-20");
    make("0003-step-30");
    prune(dir.path(), 1, &Whole::default());
    assert_eq!(left().collect::<Vec<_>>(), [1, 3]);
    read.let_go();
    prune(dir.path(), 1, &Whole::default());
    assert_eq!(left().collect::<Vec<_>>(), [3]);
    assert!(verify(&first).is_err());
    // Of a folder those are verified that are there.
    assert_eq!(verify_all(dir.path()).len(), 1);
}

/// A run that was begun again in the folder of one that came further.
#[test]
fn what_came_further_stays_until_it_is_reached() {
    let dir = tempfile::tempdir().unwrap();
    let full = random(5, 12);
    let make = |name: &str| write(dir.path(), name, &full, &split(&[4, 3], 0, 2));
    let left = || -> Vec<String> {
        let all = numbered(dir.path()).into_iter();
        all.map(|(_, p)| p.file_name().unwrap().to_str().unwrap().to_string())
            .collect()
    };
    let before = ["0004-step-40", "0005-step-50"];
    for name in before
        .into_iter()
        .chain(["0006-step-10", "0007-step-20", "0008-step-30"])
    {
        make(name);
    }
    prune(dir.path(), 2, &Whole::default());
    assert_eq!(
        left(),
        [before[0], before[1], "0007-step-20", "0008-step-30"]
    );
    make("0009-step-40");
    prune(dir.path(), 2, &Whole::default());
    assert_eq!(left(), [before[1], "0008-step-30", "0009-step-40"]);
    make("0010-step-50");
    prune(dir.path(), 2, &Whole::default());
    assert_eq!(left(), ["0009-step-40", "0010-step-50"]);
}

#[test]
fn a_manifest_that_is_another_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let one = write(
        dir.path(),
        "0001-step-5",
        &random(6, 12),
        &split(&[4, 3], 1, 3),
    );
    let path = one.join("manifest.json");
    let good = std::fs::read_to_string(&path).unwrap();
    let refused = |text: String, says: &str| {
        assert!(text != good, "{says}");
        std::fs::write(&path, text).unwrap();
        let error = find(&one).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    };
    refused(
        good.replace("\"step\": 5", "\"step\": 6"),
        "has another hash",
    );
    refused(
        good.replace("\"version\": 1", "\"version\": 2"),
        "its version is 2",
    );
    refused(good.replace("\"seed\"", "\"sead\""), "sead");
    // The content behind the hash is checked too.
    let stamped = |from: &str, to: &str| {
        let text = restamped(good.replacen(from, to, 1).as_bytes()).unwrap();
        String::from_utf8(text).unwrap()
    };
    let (from, to) = ("rank-0.safetensors", "../rank-0.safetensors");
    refused(stamped(from, to), "is not the name of a file");
    let whole: serde_json::Value = serde_json::from_str(&good).unwrap();
    assert_eq!(whole["states"]["w"]["parts"].as_array().unwrap().len(), 3);
    for (change, says) in [
        (serde_json::json!([]), "its parts do not make [4, 3]"),
        (
            serde_json::json!([{ "file": "rank-7.safetensors", "start": [0, 0], "shape": [4, 3] }]),
            "no file rank-7.safetensors",
        ),
        (
            serde_json::json!([{ "file": "rank-0.safetensors", "start": [0, 0], "shape": [4, 3] }]),
            "it has no f32 tensor `w` of [4, 3]",
        ),
        (
            serde_json::json!([{ "file": "rank-0.safetensors", "start": [1, 0], "shape": [4, 1] }]),
            "[4, 1] at [1, 0] is no part of [4, 3]",
        ),
    ] {
        let mut other = whole.clone();
        other["states"]["w"]["parts"] = change;
        let text = restamped(other.to_string().as_bytes()).unwrap();
        refused(String::from_utf8(text).unwrap(), says);
    }
    std::fs::write(&path, &good).unwrap();
    find(&one).unwrap();
}

#[test]
fn states_that_are_no_numbers_are_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let part = Local::whole(DType::F32, &[2]);
    for bad in [f32::NAN, f32::INFINITY] {
        let values = [1.0, bad];
        let states = [("w", &part, bytemuck::cast_slice(&values))];
        let error = write_parts(dir.path(), Rank(0), &states).unwrap_err();
        assert!(error.to_string().contains("state `w` has"), "{error}");
        std::fs::remove_file(dir.path().join("rank-0.safetensors")).unwrap();
    }
}

/// Earlier builds wrote one file.
#[test]
fn single_files_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let full = random(7, 12);
    let view = safetensors::tensor::TensorView::new(
        safetensors::Dtype::F32,
        vec![4, 3],
        bytemuck::cast_slice(&full),
    );
    let tensors = [("w", view.unwrap())];
    let file = |metadata: &[(&str, &str)]| {
        let pairs = metadata.iter().map(|(k, v)| (k.to_string(), v.to_string()));
        safetensors::serialize(tensors.clone(), Some(pairs.collect())).unwrap()
    };
    let path = dir.path().join("state.safetensors");
    let good = file(&[("step", "17"), ("format", "meshwright-states-1")]);
    std::fs::write(&path, &good).unwrap();
    for at in [dir.path(), &path] {
        let checkpoint = find(at).unwrap().checkpoint;
        assert_eq!((checkpoint.step(), checkpoint.origin()), (17, None));
        checkpoint
            .check_model("anything", ir::Task::Training)
            .unwrap();
        for part in split(&[4, 3], 1, 2) {
            assert_eq!(read(&checkpoint, "w", &part), cut(&full, &part));
        }
    }
    for bad in [
        &good[..good.len() - 1],
        &good[..20],
        b"nonsense",
        &file(&[]),
    ] {
        std::fs::write(&path, bad).unwrap();
        let error = find(dir.path()).unwrap_err().to_string();
        assert!(error.contains("state.safetensors"), "{error}");
    }
}
