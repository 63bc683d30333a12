//! Faults of the link between two hosts. Between two processes stands a go-between, who hands on what
//! each says to the other, or does so late, in pieces, in one direction alone, or with a bit turned.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};
use support::{Place, faults, said};

const RUN: [&str; 4] = ["run", "plan.json", "--data", "text.txt"];

/// The go-between hands on all that it hears.
const WHOLE: u8 = 0;
/// It does so after two milliseconds, in pieces of some bytes.
const SLOW: u8 = 1;
/// It keeps all to itself.
const DOWN: u8 = 2;
/// It keeps to itself what process 1 says.
const ONE_WAY: u8 = 3;
/// It turns one bit of what process 1 says next, and hands on all.
const SPOILT: u8 = 4;

/// A place with a plan for two ranks, and the secret of a run of two hosts.
fn two_hosts() -> Place {
    let place = Place::new();
    let compile = ["compile", "config.json", "--cluster", "cpu-default"];
    let pins = ["--ranks", "2", "--global-batch", "2", "--pin", "data=2"];
    place.run(&[&compile[..], &pins].concat()).expect(0);
    place.write("token", "8f".repeat(32));
    let chmod = Command::new("chmod")
        .arg("600")
        .arg(place.path("token"))
        .status();
    assert!(chmod.unwrap().success());
    place
}

/// One of the two processes, as a launcher starts it on a host of its own.
fn process(place: &Place, rank: &str, rendezvous: &str, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_meshwright"));
    command
        .args(RUN)
        .args(["--rendezvous", rendezvous, "--bind", "127.0.0.1"])
        .args(["--token-file", "token"])
        .args(more)
        .envs([
            ("RANK", rank),
            ("WORLD_SIZE", "2"),
            ("LOCAL_WORLD_SIZE", "1"),
        ])
        .current_dir(place.path("."))
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command
}

fn free_port() -> String {
    let port = TcpListener::bind("127.0.0.1:0").unwrap();
    port.local_addr().unwrap().to_string()
}

/// Hands on what comes from one end to the other.
fn hand_on(from: &TcpStream, to: &TcpStream, of_first: bool, mode: &AtomicU8) {
    let (mut from, mut to) = (from, to);
    let mut bytes = vec![0; 1 << 16];
    while let Ok(n @ 1..) = from.read(&mut bytes) {
        let said = &mut bytes[..n];
        let done = match mode.load(Ordering::Relaxed) {
            DOWN => Ok(()),
            ONE_WAY if !of_first => Ok(()),
            SLOW => {
                std::thread::sleep(Duration::from_millis(2));
                said.chunks(97).try_for_each(|piece| to.write_all(piece))
            }
            SPOILT if !of_first => {
                said[n / 2] ^= 0x04;
                mode.store(WHOLE, Ordering::Relaxed);
                to.write_all(said)
            }
            _ => to.write_all(said),
        };
        if done.is_err() {
            break;
        }
    }
    let _ = to.shutdown(std::net::Shutdown::Write);
}

/// A go-between before an address: its own, and what it does.
fn go_between(first: String, mode: u8) -> (String, Arc<AtomicU8>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let mode = Arc::new(AtomicU8::new(mode));
    let does = Arc::clone(&mode);
    std::thread::spawn(move || {
        for second in listener.incoming().flatten() {
            // Nobody is there yet: whoever called finds that, and calls again.
            let Ok(first) = TcpStream::connect(&first) else {
                continue;
            };
            for stream in [&first, &second] {
                stream.set_nodelay(true).unwrap();
            }
            for of_first in [true, false] {
                let ends = [&first, &second].map(|s| s.try_clone().unwrap());
                let does = Arc::clone(&does);
                std::thread::spawn(move || {
                    let [first, second] = &ends;
                    match of_first {
                        true => hand_on(first, second, true, &does),
                        false => hand_on(second, first, false, &does),
                    }
                });
            }
        }
    });
    (address, mode)
}

fn steps(place: &Place, name: &str) -> Vec<String> {
    let run: Value = serde_json::from_slice(&place.read(name)).unwrap();
    let steps = run["steps"].as_array().unwrap().iter();
    steps
        .map(|s| format!("{} {}", s["loss"], s["grad_norm"]))
        .collect()
}

#[test]
fn a_slow_link_that_breaks_messages_up_changes_no_bit() {
    let place = two_hosts();
    let alone = [&RUN[..], &["--steps", "4", "-o", "alone.json"]].concat();
    place.run(&alone).expect(0);
    let first = free_port();
    let (second, _) = go_between(first.clone(), SLOW);
    let more = ["--steps", "4", "-o", "apart.json"];
    let started = [("0", first), ("1", second)]
        .map(|(rank, at)| process(&place, rank, &at, &more).spawn().unwrap());
    for child in started {
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    }
    assert_eq!(steps(&place, "alone.json"), steps(&place, "apart.json"));
}

/// Returns once some steps are done.
fn wait_for_steps(place: &Place) {
    let began = Instant::now();
    let rows = || std::fs::read_to_string(place.path("m.csv")).unwrap_or_default();
    while rows().lines().count() < 4 {
        assert!(began.elapsed() < Duration::from_secs(60), "no step is done");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The words of both processes about a link that goes wrong in the training, and how long they took.
fn broken(mode: u8) -> ([String; 2], Duration) {
    let place = two_hosts();
    let first = free_port();
    let (second, does) = go_between(first.clone(), WHOLE);
    let more = ["--steps", "100000000", "-o", "run.json", "--time-out", "1"];
    let metrics = [&more[..], &["--metrics", "m.csv"]].concat();
    let started: [Child; 2] = [
        process(&place, "0", &first, &metrics).spawn().unwrap(),
        process(&place, "1", &second, &more).spawn().unwrap(),
    ];
    wait_for_steps(&place);
    let began = Instant::now();
    does.store(mode, Ordering::Relaxed);
    let words = started.map(|child| {
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(6), "{}", said(&output));
        said(&output)
    });
    assert!(!place.exists("run.json"));
    (words, began.elapsed())
}

/// Both ends find it, each by itself.
#[test]
fn a_link_that_goes_silent_ends_the_run_of_both() {
    let ([first, second], took) = broken(DOWN);
    assert!(first.contains("rank1"), "{first}");
    assert!(second.contains("rank0"), "{second}");
    assert!(took < Duration::from_secs(30), "{took:?}");
}

#[test]
fn a_link_that_is_open_in_one_direction_ends_the_run_of_both() {
    let ([first, second], took) = broken(ONE_WAY);
    assert!(first.contains("rank1"), "{first}");
    assert!(second.contains("rank"), "{second}");
    assert!(took < Duration::from_secs(30), "{took:?}");
}

/// A gradient with another bit would go into the state of all ranks, and the hashes of all replicas would agree.
#[test]
fn a_bit_that_is_turned_on_the_way_ends_the_run() {
    let ([first, _], _) = broken(SPOILT);
    assert!(first.contains("rank1 is lost: process 1"), "{first}");
    assert!(
        first.contains("a message") || first.contains("its connection broke"),
        "{first}"
    );
}

#[test]
fn a_port_that_is_taken_is_said() {
    let place = two_hosts();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let output = process(&place, "0", &address, &[]).output().unwrap();
    assert_eq!(output.status.code(), Some(6), "{}", said(&output));
    let words = said(&output);
    assert!(
        words.contains(&format!("cannot listen at {address}")),
        "{words}"
    );
    assert!(words.contains("choose another port"), "{words}");
}

/// A process that ends early and says that all is well, in the middle of a checkpoint.
#[test]
fn a_process_that_ends_with_code_0_is_lost_all_the_same() {
    let place = two_hosts();
    let library = faults(&place);
    let first = free_port();
    let every = [
        "--steps",
        "100000000",
        "--checkpoint",
        "state",
        "--checkpoint-every",
        "2",
    ];
    let first_one = process(&place, "0", &first, &every).spawn().unwrap();
    let second = process(&place, "1", &first, &every)
        .env("LD_PRELOAD", library)
        .env("FAULT_IN", "state")
        .env("FAULT_AT", "9")
        .env("FAULT_EXIT", "0")
        .output()
        .unwrap();
    assert_eq!(second.status.code(), Some(0), "{}", said(&second));
    let output = first_one.wait_with_output().unwrap();
    let words = said(&output);
    assert_eq!(output.status.code(), Some(6), "{words}");
    assert!(words.contains("rank1 is lost: process 1 (pid"), "{words}");
}
