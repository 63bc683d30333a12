//! Ranks that keep the same states have the same bits of them, or `--check-replicas` says so.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::Output;
use support::{Place, Two, said};

const RUN: [&str; 4] = ["run", "plan.json", "--data", "text.txt"];

/// A place with a plan of two replicas, each of which has all states.
fn two_replicas() -> Place {
    let place = Place::new();
    let compile = ["compile", "config.json", "--cluster", "cpu-default"];
    let pins = ["--ranks", "2", "--global-batch", "2", "--pin", "data=2"];
    let more = ["--pin", "zero=0", "--precision", "f32"];
    place.run(&[&compile[..], &pins, &more].concat()).expect(0);
    place
}

/// Looking changes nothing, and says nothing where there is nothing to say.
#[test]
fn a_run_that_checks_its_replicas_makes_the_same_steps() {
    let place = two_replicas();
    let losses = |flags: &[&str], output: &str| {
        let args = ["--steps", "6", "--validate-every", "3", "-o", output];
        let done = place.run(&[&RUN[..], &args, flags].concat()).expect(0);
        assert!(!done.err.contains("is not that of"), "{}", done.err);
        let run: Value = serde_json::from_slice(&place.read(output)).unwrap();
        let steps = run["steps"].as_array().unwrap().iter();
        let figures = |s: &Value| ["step", "loss", "grad_norm"].map(|f| s[f].to_string());
        steps.map(figures).collect::<Vec<_>>()
    };
    let plain = losses(&[], "plain.json");
    assert_eq!(plain.len(), 6);
    let looks = ["--check-replicas", "1"];
    assert_eq!(plain, losses(&looks, "threads.json"));
    let among = [&looks[..], &["--processes=2"]].concat();
    assert_eq!(plain, losses(&among, "processes.json"));
    let never = ["--check-replicas", "0"];
    place.run(&[&RUN[..], &never].concat()).expect(2);
}

/// Bytes of a memory that are read at once.
const BLOCK: u64 = 1 << 20;

/// Some bytes of a parameter in a shard, which stand nowhere else by chance.
fn needle(shard: &[u8]) -> Vec<u8> {
    let len = u64::from_le_bytes(*shard.first_chunk().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&shard[8..8 + len]).unwrap();
    let tensors = header.as_object().unwrap().iter();
    let parameters =
        tensors.filter(|(name, _)| !name.contains("moment") && *name != "__metadata__");
    let mut found = parameters.filter_map(|(_, about)| {
        let start = 8 + len + about["data_offsets"][0].as_u64()? as usize;
        let end = 8 + len + about["data_offsets"][1].as_u64()? as usize;
        let bytes = shard.get(start..end.min(start + 64))?;
        let mut elements: Vec<&[u8]> = bytes.chunks(4).collect();
        elements.sort_unstable();
        elements.dedup();
        // Biases of zeros and gains of ones are everywhere.
        (elements.len() == 16).then(|| bytes.to_vec())
    });
    found.next().unwrap()
}

/// Turns a bit of the needle wherever a process has it in its own memory. Says in how many places, or
/// why it may not.
fn turn(process: u32, needle: &[u8]) -> std::io::Result<usize> {
    let memory = File::options()
        .read(true)
        .write(true)
        .open(format!("/proc/{process}/mem"))?;
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps"))?;
    let mut turned = 0;
    for line in maps.lines() {
        let mut words = line.split(' ');
        let (Some(range), Some(mode)) = (words.next(), words.next()) else {
            continue;
        };
        let ends = range.split('-').map(|end| u64::from_str_radix(end, 16));
        let ends: Vec<u64> = ends.map_while(Result::ok).collect();
        let &[start, end] = &ends[..] else { continue };
        if !mode.starts_with("rw-p") {
            continue;
        }
        for at in (start..end).step_by(BLOCK as usize) {
            let mut block = vec![0; (end - at).min(BLOCK + needle.len() as u64 - 1) as usize];
            let n = memory.read_at(&mut block, at).unwrap_or(0);
            // What cannot be read has no states. Elements are aligned.
            for place in (0..n).step_by(4) {
                if !block[place..n].starts_with(needle) {
                    continue;
                }
                memory.write_all_at(&[needle[0] ^ 1], at + place as u64)?;
                turned += 1;
            }
        }
    }
    Ok(turned)
}

/// Steps that are too small to change a bit themselves.
const SMALL: [&str; 2] = ["--lr", "1e-30"];

/// The folder of the newest checkpoint in another one.
fn newest(place: &Place, folder: &str) -> String {
    let mut all = place.names_in(folder).into_iter();
    let newest = all.rfind(|n| n.contains("-step-")).unwrap();
    format!("{folder}/{newest}")
}

/// The output of a run in two processes with these flags, in the memory of one of which a bit of a
/// parameter turns, as memories do; with some bytes of this parameter as they were. Nothing where the
/// system does not allow it.
fn with_a_turned_bit(place: &Place, flags: &[&str]) -> Option<(Output, Vec<u8>)> {
    let begin = ["--steps", "1", "--checkpoint", "state", "-o", "begun.json"];
    place.run(&[&RUN[..], &begin, &SMALL].concat()).expect(0);
    // A part that the rank writes in whose memory it turns.
    let shard = format!("{}/rank-1.safetensors", newest(place, "state"));
    let needle = needle(&place.read(&shard));
    let run = Two::start(place, &[&SMALL[..], &["--resume", "state"], flags].concat());
    let second = run.second;
    run.signal("-STOP", &[second]);
    // It goes on until it has heard of it.
    let state = || std::fs::read_to_string(format!("/proc/{second}/status")).unwrap();
    while !state().lines().any(|l| l.starts_with("State:\tT")) {
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    let turned = turn(second, &needle);
    run.signal("-CONT", &[second]);
    match turned {
        Ok(n) => assert!(n > 0, "the parameter is not in the memory"),
        Err(e) => {
            eprintln!("skipped: this user may not write to the memory of another process: {e}");
            run.signal("-KILL", &[run.first.id()]);
            run.ended(place);
            return None;
        }
    }
    Some((run.ended(place), needle))
}

/// The next look ends the run, and the state is named.
#[test]
fn a_bit_that_turns_in_the_memory_of_a_process_ends_the_run() {
    let place = two_replicas();
    let Some((output, _)) = with_a_turned_bit(&place, &["--check-replicas", "2"]) else {
        return;
    };
    let words = said(&output);
    assert_eq!(output.status.code(), Some(6), "{words}");
    assert!(words.contains(" is not that of rank"), "{words}");
    let two = "which of them is wrong cannot be told";
    assert!(words.contains(two), "{words}");
    assert!(!place.exists("two.json"), "{words}");
}

/// No checkpoint gets its name before its states were compared, however seldom a run compares otherwise,
/// and whatever it does between: it goes on from a checkpoint without that bit.
#[test]
fn no_checkpoint_has_a_bit_that_a_comparison_finds() {
    let seldom = ["--check-replicas", "100000000"];
    // Where it turns, it most likely does within a validation.
    let often = ["--check-replicas", "5", "--validate-every", "5"];
    let validates = [&often[..], &["--validation-batches", "100"]].concat();
    for compares in [&seldom[..], &validates] {
        let place = two_replicas();
        let state = ["--checkpoint", "kept", "--checkpoint-every", "5"];
        // A copy of the states for a checkpoint in the background would be found in the memory as well.
        let kept = ["--checkpoints-kept", "1000", "--checkpoint-mode", "wait"];
        let all = [&state[..], &kept, compares].concat();
        let Some((output, needle)) = with_a_turned_bit(&place, &all) else {
            return;
        };
        let words = said(&output);
        assert_eq!(output.status.code(), Some(6), "{words}");
        assert!(words.contains(" is not that of rank"), "{words}");
        let none = "no checkpoint of this run has that bit";
        assert!(words.contains(none), "{words}");
        assert!(words.contains("--resume kept --steps 9"), "{words}");
        let has = |bytes: &[u8]| bytes.windows(needle.len()).any(|w| w == needle);
        let mut all = place.names_in("kept");
        all.retain(|n| n.contains("-step-"));
        assert!(!all.is_empty(), "{words}");
        for name in &all {
            let shard = place.read(&format!("kept/{name}/rank-1.safetensors"));
            assert!(has(&shard), "{name}: {words}");
        }
    }
}
