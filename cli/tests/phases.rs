//! Kills and interrupts in every phase of a run of several processes: before they have met, in the
//! first step and a later one, while a checkpoint is written, and at the end.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod support;

use runtime::record::Seen;
use rustix::process::{Pid, Signal, kill_process};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use support::{Begin, CONFIG, Place, Running, faults, processes_of, said};

const RUN: [&str; 4] = ["run", "plan.json", "--data", "text.txt"];
const LONG: [&str; 5] = ["--steps", "100000000", "--processes=2", "-o", "run.json"];
/// Longest that something is waited for.
const PATIENCE: Duration = Duration::from_secs(300);

fn command(place: &Place, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_meshwright"));
    command
        .args([&RUN[..], args].concat())
        .current_dir(place.path("."))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Waits until there is something.
fn wait_for<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let since = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(since.elapsed() < PATIENCE, "{what} never is");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn send(name: &str, id: u32) {
    // It may have ended by now.
    let _ = Command::new("kill")
        .args([name, &id.to_string()])
        .stderr(Stdio::null())
        .status();
}

/// The process that a run has started, as soon as it is there. Before it is a program of its own it
/// is none yet: who stops it then holds up the one that starts it for good.
fn second_of(place: &Place, run: &Running) -> u32 {
    let is_one = |id: &u32| {
        let line = std::fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains("--as-process")
    };
    wait_for("a second process", || {
        let mut all = processes_of(place, "run.json").into_iter();
        all.find(|id| *id != run.id() && is_one(id))
    })
}

fn nobody_is_left(place: &Place) {
    wait_for("nobody", || {
        processes_of(place, "run.json").is_empty().then_some(())
    });
}

/// Where a rank is by its record.
fn at(place: &Place, rank: u32) -> Option<Seen> {
    let path = place.path(&format!("run.records/rank-{rank}.record"));
    runtime::record::at(&path).ok()?
}

/// Asserts that a run ended as one that lost its second process, and names it with the signal.
fn is_lost(place: &Place, output: &Output, second: u32) -> String {
    let words = support::flat(&said(output));
    assert_eq!(output.status.code(), Some(6), "{words}");
    let is_named = words.contains(&format!("process 1 (pid {second} on "))
        || words.contains("process 1 was killed by signal 9 before it joined");
    assert!(is_named && words.contains("killed by signal 9"), "{words}");
    nobody_is_left(place);
    words
}

/// A place with a plan for two ranks with states of their own each, of a model whose steps take
/// some tenths of a second.
fn long_steps() -> Place {
    let place = Place::new();
    let larger = CONFIG
        .replace("\"n_embd\": 16", "\"n_embd\": 128")
        .replace("\"n_positions\": 16", "\"n_positions\": 128");
    place.write("config.json", larger);
    compile(&place, "16");
    place
}

fn short_steps() -> Place {
    let place = Place::new();
    compile(&place, "2");
    place
}

fn compile(place: &Place, batch: &str) {
    let compile = ["compile", "config.json", "--cluster", "cpu-default"];
    let pins = ["--ranks", "2", "--pin", "data=2", "--pin", "zero=1"];
    let batch = ["--global-batch", batch];
    place.run(&[&compile[..], &pins, &batch].concat()).expect(0);
}

/// Before the processes have met, where the one that is killed is held up until then.
#[test]
fn a_kill_before_all_have_met_is_named() {
    let place = short_steps();
    let run = command(&place, &LONG).begin().unwrap();
    let second = second_of(&place, &run);
    send("-STOP", second);
    send("-KILL", second);
    let output = run.wait_with_output().unwrap();
    is_lost(&place, &output, second);
    assert!(!place.exists("run.json"));
}

/// In the first step and in a later one, wherever in it the rank is.
#[test]
fn a_kill_in_the_first_step_or_a_later_one_is_named_with_the_step() {
    let place = long_steps();
    for step in [0, 2] {
        let run = command(&place, &LONG).begin().unwrap();
        // Records of the round before go when the run begins.
        let second = second_of(&place, &run);
        let seen = wait_for("that step", || {
            at(&place, 1).filter(|s| s.pid == second && s.plays > 0 && s.step >= step)
        });
        // Now at its beginning, now in the middle.
        std::thread::sleep(Duration::from_millis(40 * step));
        send("-KILL", second);
        let output = run.wait_with_output().unwrap();
        let words = is_lost(&place, &output, second);
        let (_, told) = words.split_once(". rank1, in step ").expect(&words);
        let told: String = told.chars().take_while(char::is_ascii_digit).collect();
        let told: u64 = told.parse().unwrap();
        let last = at(&place, 1).unwrap().step;
        assert!(
            (seen.step..=last).contains(&told),
            "{seen:?}, {last}: {words}"
        );
    }
}

/// Parts into which the sweep cuts a step of a rank by its instructions.
const PARTS: u64 = 20;

/// Every rank of two stages of two, in every part of its step: those that are left name it, with the
/// step and the place, all end, and nobody is left.
#[test]
fn a_kill_of_any_rank_in_any_part_of_a_step_is_named() {
    if std::env::var("RUN_SLOW_TESTS").is_err() {
        eprintln!("skipped: RUN_SLOW_TESTS is not set");
        return;
    }
    let place = Place::new();
    let larger = CONFIG
        .replace("\"n_embd\": 16", "\"n_embd\": 64")
        .replace("\"n_positions\": 16", "\"n_positions\": 64");
    place.write("config.json", larger);
    let compile = ["compile", "config.json", "--cluster", "cpu-default"];
    let pins = ["--ranks", "4", "--pin", "data=2", "--pin", "pipeline=2"];
    let more = ["--pin", "zero=1", "--global-batch", "8"];
    place.run(&[&compile[..], &pins, &more].concat()).expect(0);
    let args = ["--steps", "100000000", "--processes=4", "-o", "run.json"];
    for rank in 0..4 {
        // The instructions of its step, as far as they have been seen.
        let mut most = 1;
        let mut parts = std::collections::BTreeSet::new();
        for part in 0..PARTS {
            let run = command(&place, &args).begin().unwrap();
            let first = run.id();
            let since = Instant::now();
            let seen = loop {
                let found = at(&place, rank).filter(|s| s.plays > 0);
                // Records of the round before are there until the run begins.
                let found = found.filter(|s| processes_of(&place, "run.json").contains(&s.pid));
                let Some(seen) = found else {
                    assert!(since.elapsed() < PATIENCE, "no record of rank {rank}");
                    std::thread::sleep(Duration::from_millis(2));
                    continue;
                };
                break seen;
            };
            let victim = seen.pid;
            let since = Instant::now();
            while let Some(seen) = at(&place, rank) {
                most = most.max(seen.begun);
                // In a part of few instructions it may never be seen.
                let is_there = seen.step > 2 && PARTS * seen.begun / most == part;
                if is_there || since.elapsed() > Duration::from_secs(2) {
                    break;
                }
            }
            // At once: a program that sends it takes longer than an instruction.
            let of = Pid::from_raw(victim.cast_signed()).unwrap();
            kill_process(of, Signal::KILL).unwrap();
            let since = Instant::now();
            let output = run.wait_with_output().unwrap();
            nobody_is_left(&place);
            let took = since.elapsed();
            let words = support::flat(&said(&output));
            assert!(took < Duration::from_secs(10), "{took:?}: {words}");
            match victim == first {
                true => assert_eq!(output.status.code(), None, "{words}"),
                false => assert_eq!(output.status.code(), Some(6), "{words}"),
            }
            let lost = format!("rank{rank} is lost: process {rank} (pid {victim} on ");
            assert!(words.contains(&lost), "{rank} in part {part}: {words}");
            let last = at(&place, rank).unwrap();
            let step = format!("rank{rank}, in step {}, ", last.step);
            assert!(words.contains(&step), "{rank} in part {part}: {words}");
            parts.insert(PARTS * last.begun / most.max(last.begun));
        }
        // Some parts are over before they are seen.
        assert!(parts.len() > 8, "rank {rank} was killed in {parts:?}");
    }
}

/// Says whether a rank is writing its states below `state`.
fn is_writing(place: &Place) -> Option<()> {
    let all = std::fs::read_dir(place.path("state")).into_iter().flatten();
    let unfinished = all.flatten().filter(|f| {
        let name = f.file_name();
        name.to_string_lossy().starts_with(".meshwright-tmp-")
    });
    let mut files = unfinished.flat_map(|f| std::fs::read_dir(f.path()).into_iter().flatten());
    files.next().map(|_| ())
}

/// While a checkpoint is written, beside the steps or while these wait, and while the last one is.
#[test]
fn a_kill_while_states_are_written_is_named_and_spoils_no_checkpoint() {
    let place = short_steps();
    let library = faults(&place);
    let first = ["--steps", "3", "--checkpoint", "state", "-o", "first.json"];
    command(&place, &first).output().unwrap();
    let resume = ["--resume", "state", "--checkpoint", "state"];
    for (steps, every) in [
        ("100000000", &["--checkpoint-every", "2"][..]),
        (
            "100000000",
            &["--checkpoint-every", "2", "--checkpoint-mode", "wait"],
        ),
        ("2", &[]),
    ] {
        let of = ["--steps", steps, "--processes=2", "-o", "run.json"];
        let run = command(&place, &[&of[..], &resume, every].concat())
            .env("LD_PRELOAD", &library)
            .env("FAULT_IN", "state")
            .env("FAULT_DELAY", "500")
            .begin()
            .unwrap();
        let second = second_of(&place, &run);
        wait_for("a part of a checkpoint", || is_writing(&place));
        send("-KILL", second);
        let output = run.wait_with_output().unwrap();
        is_lost(&place, &output, second);
        // What is there is whole, and the run goes on from it.
        place.run(&["checkpoint", "verify", "state"]).expect(0);
        let more = ["--steps", "1", "-o", "more.json"];
        let more = [&RUN[..], &more, &resume[..2]].concat();
        place.run(&more).expect(0);
    }
}

/// Killed at any moment while it starts and goes on from a checkpoint, now one process and now the
/// other: nothing is lost or spoilt, and the run comes to the states of one that nobody disturbed.
#[test]
fn kills_while_a_run_goes_on_again_lose_nothing() {
    let place = short_steps();
    let state = ["--checkpoint", "state", "--resume", "state"];
    let begin = ["--steps", "2", "-o", "run.json", "--processes=2"];
    place
        .run(&[&RUN[..], &begin, &state[..2]].concat())
        .expect(0);
    let before = place.names_in("state");
    for round in 0..10u32 {
        // No further checkpoint is due.
        let run = command(&place, &[&LONG[..], &state].concat())
            .begin()
            .unwrap();
        std::thread::sleep(Duration::from_millis(30) * (round / 2));
        let victim = match round % 2 {
            0 => run.id(),
            _ => second_of(&place, &run),
        };
        send("-KILL", victim);
        let output = run.wait_with_output().unwrap();
        let words = said(&output);
        match round % 2 {
            0 => assert_eq!(output.status.code(), None, "{words}"),
            _ => drop(is_lost(&place, &output, victim)),
        }
        nobody_is_left(&place);
        let mut after = place.names_in("state");
        // The lock of one that was killed keeps nobody out.
        after.retain(|name| name != "writer.lock");
        assert_eq!(after, before, "{words}");
    }
    let rest = ["--steps", "4", "-o", "run.json", "--processes=2"];
    place.run(&[&RUN[..], &rest, &state].concat()).expect(0);
    let whole = ["--steps", "6", "--checkpoint", "whole", "-o", "whole.json"];
    place.run(&[&RUN[..], &whole].concat()).expect(0);
    for rank in [0, 1] {
        let [one, other] = ["state/0002-step-6", "whole/0001-step-6"]
            .map(|folder| place.read(&format!("{folder}/rank-{rank}.safetensors")));
        assert!(one == other, "the states differ");
    }
}

/// An interrupt before the processes have met ends them with the code of an interrupt, and nothing
/// of the run is left: no folder, no secret, no process.
#[test]
fn an_interrupt_before_all_have_met_leaves_nothing() {
    let place = short_steps();
    // Of several folders each goes that the run has made.
    let more = ["--checkpoint", "a/b/state", "--metrics", "m.csv"];
    let args = [&["--steps", "100000000", "-o", "run.json"][..], &more].concat();
    let before = place.names();
    let nothing_is_left = |output: &Output, what: &str| {
        let words = said(output);
        assert_eq!(output.status.code(), Some(130), "{what}: {words}");
        assert!(words.contains("nothing was written"), "{what}: {words}");
        nobody_is_left(&place);
        let mut left = place.names();
        left.retain(|name| !name.starts_with("meshwright-"));
        assert_eq!(left, before, "{what}: {words}");
        for folder in place
            .names()
            .iter()
            .filter(|n| n.starts_with("meshwright-"))
        {
            assert_eq!(place.names_in(folder), [""; 0], "{what}: {words}");
        }
    };
    for signal in ["-TERM", "-INT", "-USR1"] {
        // One process of a launcher, which waits for the other one.
        for rank in ["0", "1"] {
            let run = command(&place, &args)
                .env("TMPDIR", place.path("."))
                .env_remove("XDG_RUNTIME_DIR")
                .envs([("RANK", rank), ("WORLD_SIZE", "2")])
                .env("LOCAL_WORLD_SIZE", "2")
                .begin()
                .unwrap();
            // Process 0 has posted its secret, or both have made the folder of their records.
            wait_for("the meeting", || place.exists("run.records").then_some(()));
            send(signal, run.id());
            let output = run.wait_with_output().unwrap();
            nothing_is_left(&output, &format!("{signal} to rank {rank}"));
        }
        // One that has started the other, which is held up before it can join; not every time.
        let mut tries = 0..20;
        let was_caught = tries.any(|_| {
            let run = command(&place, &[&args[..], &["--processes=2"]].concat())
                .begin()
                .unwrap();
            let second = second_of(&place, &run);
            send("-STOP", second);
            let fds = std::fs::read_dir(format!("/proc/{second}/fd"));
            let mut fds = fds.into_iter().flatten().flatten();
            let has_joined = fds.any(|fd| {
                let target = std::fs::read_link(fd.path()).unwrap_or_default();
                target.to_string_lossy().starts_with("socket:")
            });
            send(signal, run.id());
            let output = run.wait_with_output().unwrap();
            assert_eq!(output.status.code(), Some(130), "{}", said(&output));
            if !has_joined {
                nothing_is_left(&output, signal);
                return true;
            }
            nobody_is_left(&place);
            for name in place.names().iter().filter(|name| !before.contains(name)) {
                let path = place.path(name);
                let _ = std::fs::remove_dir_all(&path).or_else(|_| std::fs::remove_file(&path));
            }
            false
        });
        if !was_caught {
            eprintln!("skipped: {signal} before all have met: the other process had always joined");
        }
    }
}

/// A terminal sends an interrupt to all processes of a run at once: whoever hears of it first, the
/// run ends with the code of an interrupt, whatever phase it is in.
#[test]
fn an_interrupt_of_all_in_any_phase_has_its_code() {
    let place = short_steps();
    for round in 0..8u32 {
        let run = command(&place, &LONG).begin().unwrap();
        second_of(&place, &run);
        std::thread::sleep(Duration::from_millis(5 * u64::from(round)));
        let group = format!("-{}", run.id());
        let sent = Command::new("kill").args(["-TERM", "--", &group]).status();
        assert!(sent.unwrap().success());
        let output = run.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(130), "{}", said(&output));
        nobody_is_left(&place);
        assert!(!place.exists("run.records"), "{}", said(&output));
    }
}

/// Names and contents of all files of a folder, and `None` for folders in it.
fn contents(place: &Place, folder: &str) -> Vec<(String, Option<Vec<u8>>)> {
    let names = place.names_in(folder).into_iter();
    let content = |name: &str| std::fs::read(place.path(&format!("{folder}/{name}"))).ok();
    names.map(|name| (name.clone(), content(&name))).collect()
}

/// An elastic run has a journal and a lock in its folder before its processes have met. Where it is
/// interrupted until then these go, and those of a run before it come back.
#[test]
fn an_elastic_run_that_comes_to_nothing_leaves_nothing() {
    let place = short_steps();
    let every = ["--checkpoint-every", "1000"];
    let run = ["--elastic", "--checkpoint", "a/state", "-o", "run.json"];
    let run = [&run[..], &every].concat();
    let journal = || std::fs::read(place.path("a/state/elastic.json")).ok();
    let is_interrupted = |output: &Output| {
        let words = said(output);
        assert_eq!(output.status.code(), Some(130), "{words}");
        assert!(words.contains("nothing was written"), "{words}");
        nobody_is_left(&place);
        words
    };
    // Process 0 of a launcher waits for the other one.
    let launched = |steps: &str, signal: &str| {
        let journal_before = journal();
        let child = command(&place, &[&run[..], &["--steps", steps]].concat())
            .env("TMPDIR", place.path("."))
            .env_remove("XDG_RUNTIME_DIR")
            .envs([("RANK", "0"), ("WORLD_SIZE", "2")])
            .env("LOCAL_WORLD_SIZE", "2")
            .begin()
            .unwrap();
        wait_for("the journal", || {
            (journal().is_some() && journal() != journal_before).then_some(())
        });
        send(signal, child.id());
        is_interrupted(&child.wait_with_output().unwrap())
    };
    let mut before = place.names();
    let left = || {
        let mut left = place.names();
        left.retain(|name| !name.starts_with("meshwright-"));
        left
    };
    for signal in ["-TERM", "-INT", "-USR1"] {
        let words = launched("100000000", signal);
        assert_eq!(left(), before, "{signal}: {words}");
    }
    // A kept run that starts its processes, at whatever moment before its first step.
    let mut n_early = 0;
    for round in 0..6 {
        let args = [&run[..], &["--steps", "100000000", "--processes=2"]].concat();
        let child = command(&place, &args).begin().unwrap();
        wait_for("the journal", || journal().map(|_| ()));
        std::thread::sleep(Duration::from_millis(3 * round));
        send("-TERM", child.id());
        let output = child.wait_with_output().unwrap();
        let words = said(&output);
        assert_eq!(output.status.code(), Some(130), "{words}");
        nobody_is_left(&place);
        if !place.exists("run.json") {
            n_early += 1;
            assert_eq!(left(), before, "{words}");
        }
        for name in left().iter().filter(|name| !before.contains(name)) {
            let path = place.path(name);
            let _ = std::fs::remove_dir_all(&path).or_else(|_| std::fs::remove_file(&path));
        }
    }
    assert!(
        n_early > 0,
        "none of 6 was interrupted before its first step"
    );
    // Over a run that is done, with a lock that stays.
    let done = [&RUN[..], &run, &["--steps", "2", "--processes=2"]].concat();
    place.run(&done).expect(0);
    before = left();
    let of_run = contents(&place, "a/state");
    for signal in ["-TERM", "-USR1"] {
        let words = launched("3", signal);
        assert_eq!(left(), before, "{signal}: {words}");
        assert!(contents(&place, "a/state") == of_run, "{signal}: {words}");
    }
    // It is still the run that it was.
    let words = place.run(&done).expect(0).err;
    assert!(words.contains("is done"), "{words}");
}
