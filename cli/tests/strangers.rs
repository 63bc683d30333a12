//! Who is none of a run: other binaries, and those who look at what a system shows of processes.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod support;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use support::{Place, Two, processes_of, said};

/// All that could be a token in bytes: 64 hexadecimal digits or more in a row.
fn secrets(bytes: &[u8]) -> BTreeSet<String> {
    let words = bytes.split(|b| !b.is_ascii_hexdigit());
    let words = words.filter(|w| w.len() >= 64);
    words.map(|w| String::from_utf8_lossy(w).into()).collect()
}

/// The secret goes to processes through a pipe, which nobody else can read. Everybody can read command
/// lines, and the same user can read environments.
#[test]
fn the_secret_of_a_run_stands_in_no_command_line_and_no_environment() {
    let own = secrets(&std::fs::read("/proc/self/environ").unwrap());
    assert_eq!(secrets("8f".repeat(32).as_bytes()).len(), 1);
    for more in [
        &[][..],
        &[
            "--elastic",
            "--checkpoint",
            "state",
            "--checkpoint-every",
            "50",
        ],
    ] {
        let place = Place::with_plan();
        let run = Two::start(&place, more);
        let mut started = 0;
        for id in processes_of(&place, "two.json") {
            let read = |what: &str| std::fs::read(format!("/proc/{id}/{what}")).unwrap();
            let line = read("cmdline");
            let is_started = |word: &[u8]| word.starts_with(b"--as-process=");
            started += usize::from(line.split(|b| *b == 0).any(is_started));
            let found = secrets(&[line, read("environ")].join(&0));
            let new: Vec<&String> = found.difference(&own).collect();
            assert!(new.is_empty(), "{more:?}: {new:?}");
        }
        assert_eq!(started, 1, "{more:?}");
        run.signal("-TERM", &[run.first.id()]);
        let output = run.ended(&place);
        assert_eq!(output.status.code(), Some(130), "{}", said(&output));
    }
}

/// Whoever builds one host's binary anew and forgets another one: both processes say so and end.
#[test]
fn another_binary_is_refused_and_said() {
    let place = Place::with_plan();
    let own = PathBuf::from(env!("CARGO_BIN_EXE_meshwright"));
    let other = place.path("other");
    // It does the same, and a byte behind its end says that it is not. Another process writes it, as
    // one that is started from here meanwhile would have the file open.
    let made = Command::new("sh")
        .args(["-c", "cp \"$0\" \"$1\" && printf x >> \"$1\""])
        .args([&own, &other])
        .status();
    assert!(made.unwrap().success());
    let start = |binary: &Path, rank: &str| {
        Command::new(binary)
            .args(["run", "plan.json", "--data", "text.txt", "-o", "run.json"])
            .args(["--steps", "2", "--time-out", "20"])
            .current_dir(place.path("."))
            .env("TMPDIR", place.path("."))
            .env_remove("XDG_RUNTIME_DIR")
            .envs([
                ("RANK", rank),
                ("WORLD_SIZE", "2"),
                ("LOCAL_WORLD_SIZE", "2"),
            ])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let both = [start(&own, "0"), start(&other, "1")];
    for output in both.map(|c| c.wait_with_output().unwrap()) {
        let words = said(&output);
        assert_eq!(output.status.code(), Some(6), "{words}");
        assert!(words.contains("the binary of process 1 is "), "{words}");
        assert!(words.contains(", that of process 0 "), "{words}");
    }
    assert!(!place.exists("run.json"));
}
