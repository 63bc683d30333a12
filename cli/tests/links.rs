//! Hosts and the links between them. Four network namespaces stand in for hosts, joined by a bridge
//! or by a network that loses packets, hands them on twice, late or with a bit turned. Between two
//! processes stands a go-between, who hands on what each says to the other, or does so late,
//! slowly, in pieces, in one direction alone, or with a bit turned.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};
use support::{Begin, Place, Running, faults, repository, said};

const RUN: [&str; 4] = ["run", "plan.json", "--data", "text.txt"];

/// The go-between hands on all that it hears.
const WHOLE: u8 = 0;
/// It does so after two milliseconds, in pieces of some bytes.
const SLOW: u8 = 1;
/// It does so as late as a link across a continent.
const LATE: u8 = 5;
/// It does so at a thousandth of the rate of a usual link.
const NARROW: u8 = 6;
/// It keeps all to itself.
const DOWN: u8 = 2;
/// It keeps to itself what process 1 says.
const ONE_WAY: u8 = 3;
/// It turns one bit of what process 1 says next, and hands on all.
const SPOILT: u8 = 4;

/// It does so a little late, as a link that others use too.
const SHARED: u8 = 7;
/// The time by which a late link is late.
const LATENESS: Duration = Duration::from_millis(20);
/// Bytes that a narrow link takes in a second.
const RATE: f64 = 1e6;

/// A place with a plan for so many ranks, and the secret of a run of several hosts.
fn hosts(ranks: &str, pins: &[&str]) -> Place {
    let place = Place::new();
    let compile = ["compile", "config.json", "--cluster", "cpu-default"];
    let batch = ["--ranks", ranks, "--global-batch", "4"];
    let pins: Vec<&str> = pins.iter().flat_map(|pin| ["--pin", pin]).collect();
    place.run(&[&compile[..], &batch, &pins].concat()).expect(0);
    place.write("token", "8f".repeat(32));
    let chmod = Command::new("chmod")
        .arg("600")
        .arg(place.path("token"))
        .status();
    assert!(chmod.unwrap().success());
    place
}

/// A place for two hosts with a rank each.
fn two_hosts() -> Place {
    hosts("2", &["data=2"])
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
            LATE => {
                std::thread::sleep(LATENESS);
                to.write_all(said)
            }
            SHARED => {
                std::thread::sleep(LATENESS / 4);
                to.write_all(said)
            }
            NARROW => {
                std::thread::sleep(Duration::from_secs_f64(n as f64 / RATE));
                to.write_all(said)
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
        .map(|(rank, at)| process(&place, rank, &at, &more).begin().unwrap());
    for child in started {
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    }
    assert_eq!(steps(&place, "alone.json"), steps(&place, "apart.json"));
}

/// The instructions in which ranks waited longest, by `compare`, and for how many seconds of a
/// step.
fn waits(place: &Place, run: &str) -> Vec<(String, f64)> {
    let done = place
        .run(&["compare", "plan.json", run, "--json"])
        .expect(0);
    let said = done.json();
    let waits = said["comparison"]["waits"].as_array().unwrap().iter();
    waits
        .map(|w| {
            (
                w["what"].as_str().unwrap().into(),
                w["waited_s"].as_f64().unwrap(),
            )
        })
        .collect()
}

/// By how many seconds ranks waited longer in which instruction than in another run, most first.
fn longer(waits: &[(String, f64)], before: &[(String, f64)]) -> Vec<(String, f64)> {
    let had = |what: &str| {
        before
            .iter()
            .find(|(w, _)| w == what)
            .map_or(0.0, |(_, s)| *s)
    };
    let grown = waits.iter().map(|(what, s)| (what.clone(), s - had(what)));
    let mut grown: Vec<(String, f64)> = grown.collect();
    grown.sort_by(|a, b| b.1.total_cmp(&a.1));
    grown
}

/// Two hosts of two tensor ranks each: gradients, their norm and the loss cross the link.
#[test]
fn a_late_and_a_narrow_link_show_in_what_crosses_them() {
    let place = hosts("4", &["data=2", "tensor=2", "pipeline=1"]);
    let through = |mode: u8| {
        let first = free_port();
        let (second, _) = go_between(first.clone(), mode);
        let more = ["--steps", "4", "-o", "run.json"];
        let started = [("0", first), ("1", second)]
            .map(|(rank, at)| process(&place, rank, &at, &more).begin().unwrap());
        for child in started {
            let output = child.wait_with_output().unwrap();
            assert_eq!(output.status.code(), Some(0), "{}", said(&output));
        }
        waits(&place, "run.json")
    };
    // Each of them is late, whatever its size.
    let late = through(LATE);
    let crosses = |what: &str| {
        [
            "all_reduce grad.",
            "all_reduce accumulate.",
            "world_sum global_norm",
            "all_reduce nll_sum",
        ]
        .iter()
        .any(|call| what.starts_with(call))
    };
    assert!(
        late[..3]
            .iter()
            .all(|(what, s)| crosses(what) && *s > LATENESS.as_secs_f64()),
        "{late:?}"
    );
    // The most bytes take longest.
    let narrow = through(NARROW);
    let gradients = ["all_reduce grad.", "all_reduce accumulate."];
    let is_of_gradients = gradients.iter().any(|g| narrow[0].0.starts_with(g));
    assert!(is_of_gradients, "{narrow:?}");
    assert!(narrow[0].1 > 0.01, "{narrow:?}");
    let words = place
        .run(&["compare", "plan.json", "run.json", "--verbose"])
        .expect(0);
    assert!(words.out.contains("ranks waited longest"), "{}", words.out);
}

/// Runs a script of four hosts.
fn on_four_hosts(
    place: &Place,
    args: &[&str],
    variables: &[(&str, &str)],
) -> std::io::Result<Output> {
    let mut command = Command::new("timeout");
    command
        .args(["--kill-after=1", "120", "unshare", "-Urmn", "bash"])
        .arg(repository().join("cli/tests/support/hosts.sh"))
        .args(args)
        .envs(variables.iter().copied())
        .current_dir(place.path("."));
    command.output()
}

/// A place for four hosts with two ranks each, and the steps of one process; none where there can
/// be none.
fn four_hosts() -> Option<(Place, Vec<String>)> {
    let place = hosts("8", &["data=2", "pipeline=2", "tensor=2"]);
    match on_four_hosts(&place, &[], &[]) {
        Ok(output) if output.status.success() => {}
        other => {
            println!("skipped: this machine gives no network namespaces: {other:?}");
            return None;
        }
    }
    let alone = [&RUN[..], &["--steps", "4", "-o", "alone.json"]].concat();
    place.run(&alone).expect(0);
    let expected = steps(&place, "alone.json");
    Some((place, expected))
}

/// Runs the plan on four hosts: tensor ranks within, pipeline and data across.
fn run_on_four(place: &Place, more: &[&str], variables: &[(&str, &str)]) {
    let each = ["each", env!("CARGO_BIN_EXE_meshwright")];
    let network = ["--bind", "10.9.0.1", "--token-file", "token"];
    let args = ["--steps", "4", "-o", "apart.json"];
    let args = [&each[..], &RUN, &args, &network, more].concat();
    let output = on_four_hosts(place, &args, variables).unwrap();
    assert!(output.status.success(), "{}", said(&output));
}

#[test]
fn hosts_with_addresses_of_their_own_train_as_one() {
    let Some((place, alone)) = four_hosts() else {
        return;
    };
    run_on_four(&place, &[], &[]);
    assert_eq!(steps(&place, "apart.json"), alone);
    let before = waits(&place, "apart.json");
    // What one host sends takes two megabits a second: that changes no bit, and shows in what
    // crosses from its stage to the other one.
    let slow = [("SLOW", "3"), ("RATE", "2mbit")];
    run_on_four(&place, &[], &slow);
    assert_eq!(steps(&place, "apart.json"), alone);
    let longer = longer(&waits(&place, "apart.json"), &before);
    assert!(longer[0].0.starts_with("send  recv "), "{longer:?}");
    assert!(longer[0].1 > 0.02, "{longer:?}");
}

/// Whether something crosses from one of the four hosts to another: from stage to stage, or over
/// the data ranks. Tensor ranks are within.
fn crosses_hosts(what: &str) -> bool {
    let calls = [
        "send ",
        "all_reduce grad.",
        "all_reduce accumulate.",
        "all_reduce nll_sum",
        "world_sum ",
    ];
    calls.iter().any(|call| what.starts_with(call))
}

/// The binary built with MPI, whose path `MESHWRIGHT_MPI` is; none where there is none.
fn with_mpi() -> Option<String> {
    let binary = std::env::var("MESHWRIGHT_MPI").ok();
    if binary.is_none() {
        println!("skipped: MESHWRIGHT_MPI names no binary built with MPI");
    }
    binary
}

/// The same by MPI, with the binary built for it, whose path `MESHWRIGHT_MPI` is: the library
/// chooses how messages go, and a late link and a slow one show all the same.
#[test]
fn late_and_slow_links_show_by_mpi() {
    let Some(binary) = with_mpi() else {
        return;
    };
    let Some((place, alone)) = four_hosts() else {
        return;
    };
    let run = |variables: &[(&str, &str)]| {
        let mpi = ["mpirun", &binary];
        let args = ["--steps", "2", "--mpi", "-o", "apart.json"];
        let args = [&mpi[..], &RUN, &args].concat();
        let output = on_four_hosts(&place, &args, variables).unwrap();
        if output.status.code() == Some(NO_DEVICE) {
            println!("skipped: /dev/net/tun cannot be used here");
            return None;
        }
        assert!(output.status.success(), "{}", said(&output));
        assert_eq!(steps(&place, "apart.json"), alone[..2]);
        Some(waits(&place, "apart.json"))
    };
    let before = run(&[]).unwrap();
    let slow = run(&[("SLOW", "3"), ("RATE", "2mbit")]).unwrap();
    let longer_when_slow = longer(&slow, &before);
    let (what, seconds) = &longer_when_slow[0];
    assert!(crosses_hosts(what), "{longer_when_slow:?}");
    assert!(*seconds > 0.02, "{longer_when_slow:?}");
    let netem = support::built(&place, "netem.c", "netem", &[]);
    let late = [
        ("NETEM", netem.to_str().unwrap()),
        ("FAULTS", "delay_ms=50"),
    ];
    let Some(late) = run(&late) else {
        return;
    };
    let longer_when_late = longer(&late, &before);
    let (what, seconds) = &longer_when_late[0];
    assert!(crosses_hosts(what), "{longer_when_late:?}");
    assert!(*seconds > 0.045, "{longer_when_late:?}");
}

/// Processes that something else than MPI's launcher has started would each train by themselves,
/// into the same files.
#[test]
fn processes_that_mpi_does_not_join_are_refused() {
    let Some(binary) = with_mpi() else {
        return;
    };
    let place = two_hosts();
    let run = |variables: &[(&str, &str)]| {
        let output = Command::new(&binary)
            .args(RUN)
            .args(["--mpi", "--steps", "2", "-o", "run.json"])
            .envs(variables.iter().copied())
            .current_dir(place.path("."))
            .output()
            .unwrap();
        (output.status.code(), said(&output))
    };
    for rank in ["0", "1"] {
        let (code, words) = run(&[("RANK", rank), ("WORLD_SIZE", "2")]);
        assert_eq!(code, Some(2), "{words}");
        let of = "the MPI library knows this process alone, and it is one of 2";
        assert!(words.contains(of) && words.contains("mpirun"), "{words}");
        assert!(!place.exists("run.json"));
    }
    let (code, words) = run(&[]);
    assert_eq!(code, Some(0), "{words}");
}

/// Open MPI kills processes one second after it has passed SIGTERM on, which may be too soon on a busy
/// machine; SIGUSR1 leaves them the time that they need. Both leave the training state, and the words
/// of how to go on.
#[test]
fn interrupted_mpirun_leaves_a_checkpoint_and_words() {
    let Some(binary) = with_mpi() else {
        return;
    };
    let place = two_hosts();
    let mut tries = vec![("TERM", 1); 4];
    tries.push(("USR1", 130));
    let mut seen = Vec::new();
    for (signal, code) in tries {
        if seen.contains(&signal) {
            continue;
        }
        let run = Command::new("mpirun")
            .args(["--oversubscribe", "--allow-run-as-root", "-np", "2"])
            .arg(&binary)
            .args(RUN)
            .args(["--mpi", "--steps", "100000", "--log-every", "60"])
            .args(["--checkpoint", signal, "-o", "run.json"])
            .args(["--metrics", &format!("{signal}.csv")])
            .current_dir(place.path("."))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .begin()
            .unwrap();
        let has_begun = || {
            let rows = std::fs::read_to_string(place.path(&format!("{signal}.csv")));
            rows.is_ok_and(|rows| rows.lines().count() > 2)
        };
        let until = Instant::now() + Duration::from_secs(60);
        while !has_begun() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
        let id = run.id().to_string();
        let signalled = Command::new("kill").args(["-s", signal, &id]).status();
        assert!(signalled.unwrap().success());
        let output = run.wait_with_output().unwrap();
        let words = said(&output);
        assert_eq!(output.status.code(), Some(code), "{signal}: {words}");
        let names = place.names_in(signal);
        let has_state = names.iter().any(|name| name.contains("-step-"));
        let way_on = format!("--resume {signal} --steps");
        match has_state && words.contains("has the training state") && words.contains(&way_on) {
            true => seen.push(signal),
            false => assert_eq!(signal, "TERM", "{words}"),
        }
    }
    assert_eq!(seen, ["TERM", "USR1"]);
}

/// The process of a rank, once that has played some slots.
fn process_of(place: &Place, rank: u32) -> u32 {
    let path = place.path(&format!("run.records/rank-{rank}.record"));
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let seen = runtime::record::at(&path).ok().flatten();
        if let Some(seen) = seen.filter(|s| s.plays > 20) {
            return seen.pid;
        }
        assert!(Instant::now() < until, "no record appears");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A run of four ranks that mpirun starts, of which process 3 gets a signal: what it says.
fn hurt_under_mpirun(binary: &str, more: &[&str], signal: &str) -> Option<(Place, String)> {
    let mpirun = Command::new("mpirun").arg("--version").output();
    if !mpirun.is_ok_and(|found| found.status.success()) {
        println!("skipped: there is no mpirun here");
        return None;
    }
    let place = hosts("4", &["data=2", "tensor=2"]);
    let run = Command::new("mpirun")
        .args(["--oversubscribe", "--allow-run-as-root", "-np", "4", binary])
        .args(RUN)
        .args(["--steps", "100000", "--log-every", "60", "-o", "run.json"])
        .args(more)
        .current_dir(place.path("."))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .begin()
        .unwrap();
    let victim = process_of(&place, 3).to_string();
    let sent = Command::new("kill").args(["-s", signal, &victim]).status();
    assert!(sent.unwrap().success());
    let output = run.wait_with_output().unwrap();
    Some((place, said(&output)))
}

/// mpirun ends all processes a moment after the first of them has ended: process 0 has said by then
/// where the rank was that was lost, and written it down.
#[test]
fn process_0_names_who_is_lost_before_mpirun_ends_it() {
    for _ in 0..3 {
        let binary = env!("CARGO_BIN_EXE_meshwright");
        let Some((place, words)) = hurt_under_mpirun(binary, &[], "KILL") else {
            return;
        };
        let named = words.contains("rank3 is lost: process 3") && words.contains("rank3, in step ");
        assert!(named, "{words}");
        let verdict = String::from_utf8(place.read("run.records/verdict.json")).unwrap();
        assert!(verdict.contains("rank3 is lost"), "{verdict}");
    }
}

/// A process that hangs is given up as one that does not answer, and ended: not the other way round.
#[test]
fn a_process_that_hangs_by_mpi_has_not_ended() {
    let Some(binary) = with_mpi() else {
        return;
    };
    let args = ["--mpi", "--time-out", "3"];
    let Some((_, words)) = hurt_under_mpirun(&binary, &args, "STOP") else {
        return;
    };
    assert!(words.contains("does not answer"), "{words}");
    assert!(!words.contains("its process has ended"), "{words}");
}

/// A host whose link is cut is the one that is lost: the others are many, and it is alone, whatever
/// it finds itself.
#[test]
fn a_host_that_is_cut_off_is_the_one_that_is_lost() {
    let Some((place, _)) = four_hosts() else {
        return;
    };
    let each = ["each", env!("CARGO_BIN_EXE_meshwright")];
    let network = ["--bind", "10.9.0.1", "--token-file", "token"];
    let more = ["--steps", "100000", "--log-every", "60", "--time-out", "3"];
    let to = ["-o", "apart.json", "--metrics", "m.csv"];
    let args = [&each[..], &RUN, &more, &to, &network].concat();
    let output = on_four_hosts(&place, &args, &[("FLAP", "3"), ("CUT", "1")]).unwrap();
    let words = said(&output);
    assert_eq!(output.status.code(), Some(6), "{words}");
    assert!(!words.contains("process 0 stood still"), "{words}");
    let verdict: Value = serde_json::from_slice(&place.read("apart.records/verdict.json")).unwrap();
    let found: Vec<&String> = verdict["found"].as_object().unwrap().keys().collect();
    assert!(
        found.iter().all(|rank| ["6", "7"].contains(&rank.as_str())),
        "{verdict}"
    );
    assert!(!found.is_empty(), "{verdict}");
}

/// The link of a host is down for two seconds, as where somebody takes its plug out: TCP sends
/// again what was on its way, and the run goes on to the same bits.
#[test]
fn a_link_that_is_down_for_a_while_changes_no_bit() {
    let Some((place, _)) = four_hosts() else {
        return;
    };
    let steps_of = ["--steps", "150"];
    let alone = [&RUN[..], &steps_of, &["-o", "alone.json"]].concat();
    place.run(&alone).expect(0);
    let each = ["each", env!("CARGO_BIN_EXE_meshwright")];
    let network = ["--bind", "10.9.0.1", "--token-file", "token"];
    let more = ["-o", "apart.json", "--metrics", "m.csv"];
    let args = [&each[..], &RUN, &steps_of, &more, &network].concat();
    let output = on_four_hosts(&place, &args, &[("FLAP", "3")]).unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(steps(&place, "apart.json"), steps(&place, "alone.json"));
    let rows = String::from_utf8(place.read("flapped")).unwrap();
    let rows: Vec<usize> = rows.lines().map(|n| n.trim().parse().unwrap()).collect();
    let [before, after] = rows[..] else {
        panic!("{rows:?}");
    };
    // The one in progress may end, and one that was done may have no row yet.
    let waited = after <= before + 2 && after < 151;
    assert!(waited, "steps went on without the link: {rows:?}");
}

/// The seconds that each step took.
fn seconds(place: &Place, name: &str) -> Vec<f64> {
    let run: Value = serde_json::from_slice(&place.read(name)).unwrap();
    let steps = run["steps"].as_array().unwrap().iter();
    steps.map(|s| s["seconds"].as_f64().unwrap()).collect()
}

/// Four hosts behind a network with these faults, in the words of `netem.c`: what became of the
/// run, and how many packets that network had, lost, handed on twice, held back, had others
/// overtake, and spoilt. None where this machine lets nobody make one.
fn behind(place: &Place, faults: &str, more: &[&str]) -> Option<(Output, [u64; 6])> {
    let netem = support::built(place, "netem.c", "netem", &[]);
    let variables = [("NETEM", netem.to_str().unwrap()), ("FAULTS", faults)];
    let each = ["each", env!("CARGO_BIN_EXE_meshwright")];
    let network = ["--bind", "10.9.0.1", "--token-file", "token"];
    let args = [&each[..], &RUN, &["-o", "apart.json"], &network, more].concat();
    let began = Instant::now();
    let output = on_four_hosts(place, &args, &variables).unwrap();
    let words = said(&output);
    if output.status.code() == Some(NO_DEVICE) {
        println!("skipped: /dev/net/tun cannot be used here: {words}");
        return None;
    }
    let took = began.elapsed();
    assert!(took < Duration::from_secs(100), "it hung: {words}");
    let did = words.split("netem: ").nth(1).expect("it says what it did");
    let did = did.split(", ").map(|what| what.split(' ').next().unwrap());
    let did: Vec<u64> = did.map(|n| n.parse().unwrap()).collect();
    println!("{faults}: {did:?} in {took:.1?}, {}", output.status);
    Some((output, did.try_into().unwrap()))
}

/// The exit code of `hosts.sh` where there is no `/dev/net/tun` for this user.
const NO_DEVICE: i32 = 77;

/// TCP sends again what is lost, and puts in order what comes twice, late or spoilt.
#[test]
fn a_network_that_loses_repeats_and_reorders_packets_changes_no_bit() {
    let Some((place, alone)) = four_hosts() else {
        return;
    };
    let faults = "loss=5 twice=5 late=10 spoil=3 seed=31";
    let Some((output, did)) = behind(&place, faults, &["--steps", "4"]) else {
        return;
    };
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(steps(&place, "apart.json"), alone);
    assert!(did.iter().all(|n| *n > 0), "nothing went wrong: {did:?}");
}

/// As if to the other side of the earth. All but the steps took 55 round trips, one for each part
/// of each state most of all.
#[test]
fn hosts_that_are_far_away_meet_in_a_few_round_trips() {
    let Some((place, alone)) = four_hosts() else {
        return;
    };
    run_on_four(&place, &[], &[]);
    let before = waits(&place, "apart.json");
    let began = Instant::now();
    let Some((output, did)) = behind(&place, "delay_ms=200", &["--steps", "2"]) else {
        return;
    };
    let took = began.elapsed().as_secs_f64();
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(steps(&place, "apart.json"), alone[..2]);
    assert!(did[3] > 0, "no packet was late");
    // Ten of 0.4 s where the machine does nothing else.
    let others = took - seconds(&place, "apart.json").iter().sum::<f64>();
    println!("but for its steps the run took {others:.1} s");
    assert!(others < 12.0, "{others} s");
    // What grows most is what crosses: from stage to stage, or over the data ranks.
    let longer = longer(&waits(&place, "apart.json"), &before);
    let (what, seconds) = &longer[0];
    assert!(crosses_hosts(what), "{longer:?}");
    assert!(*seconds > 0.19, "{longer:?}");
}

/// Where almost nothing comes through a run comes to its end late, or ends and says whom it lost.
#[test]
fn a_network_that_loses_a_third_of_all_packets_hangs_nobody() {
    let Some((place, alone)) = four_hosts() else {
        return;
    };
    // TCP waits twice as long before each further try, so that now and then nothing comes for a
    // minute.
    for time_out in ["5", "1"] {
        let more = ["--steps", "2", "--time-out", time_out];
        let Some((output, did)) = behind(&place, "loss=30 after=550 seed=30", &more) else {
            return;
        };
        assert!(did[1] > 0, "none was lost: {did:?}");
        let words = said(&output);
        match output.status.code() {
            Some(0) => assert_eq!(steps(&place, "apart.json"), alone[..2]),
            Some(6) => assert!(words.contains("rank"), "{words}"),
            _ => panic!("{words}"),
        }
        if place.exists("apart.json") {
            std::fs::remove_file(place.path("apart.json")).unwrap();
        }
    }
}

/// Four hosts with two emulated GPUs each, whose ranks meet by NCCL within and across.
#[test]
fn hosts_with_gpus_meet_by_nccl() {
    let Some(folder) = support::emulator() else {
        return;
    };
    let Some((place, alone)) = four_hosts() else {
        return;
    };
    let gpus = [
        ("LD_LIBRARY_PATH", &*folder.to_string_lossy()),
        ("MESHWRIGHT_EMULATOR_GPUS", "2"),
    ];
    run_on_four(&place, &["--backend", "cuda", "--fabric", "nccl"], &gpus);
    near(&steps(&place, "apart.json"), &alone);
}

/// The instructions that took longest beside their prediction, by `compare`, and by how many seconds
/// of a step.
fn over(place: &Place, run: &str) -> Vec<(String, f64)> {
    let done = place
        .run(&["compare", "plan.json", run, "--json"])
        .expect(0);
    let said = done.json();
    let worst = said["comparison"]["worst"].as_array().unwrap().iter();
    worst
        .map(|w| {
            let over_s = -w["error_s"].as_f64().unwrap();
            (w["what"].as_str().unwrap().into(), over_s)
        })
        .collect()
}

/// A late and a slow network between hosts whose GPUs meet by NCCL: `compare` names what crosses it
/// among the first.
#[test]
fn late_and_slow_links_show_by_nccl() {
    let Some(folder) = support::emulator() else {
        return;
    };
    let Some((place, _)) = four_hosts() else {
        return;
    };
    let compile = ["compile", "config.json", "--cluster"];
    let cluster = ["h100-sxm*2+nvlink4+infiniband-ndr", "--hosts", "4"];
    let batch = ["--global-batch", "4", "--precision", "f32"];
    let pins = [
        "--pin",
        "data=2",
        "--pin",
        "pipeline=2",
        "--pin",
        "tensor=2",
    ];
    place
        .run(&[&compile[..], &cluster, &batch, &pins].concat())
        .expect(0);
    // The emulator's libraries are no GPUs to `compare`; these ones are to be.
    let as_gpus = |link: &str| {
        let gpus = [
            ("LD_LIBRARY_PATH", &*folder.to_string_lossy()),
            ("MESHWRIGHT_EMULATOR_GPUS", "2"),
            ("MESHWRIGHT_EMULATOR_LINK", link),
        ];
        let backend = ["--backend", "cuda", "--fabric", "nccl", "--on-other-gpus"];
        run_on_four(&place, &backend, &gpus);
        let text = String::from_utf8(place.read("apart.json")).unwrap();
        assert!(text.contains("\"cuda-emulated\""), "{text}");
        place.write("gpus.json", text.replace("\"cuda-emulated\"", "\"cuda\""));
        (steps(&place, "gpus.json"), over(&place, "gpus.json"))
    };
    let (undisturbed, before) = as_gpus("");
    for link in ["late=300000us", "rate=0.2Mbit"] {
        let (figures, disturbed) = as_gpus(link);
        near(&figures, &undisturbed);
        let longer = longer(&disturbed, &before);
        // What waits behind such a call is late as well.
        let mut first = longer.iter().take(3);
        let is_it = |(what, seconds): &&(String, f64)| crosses_hosts(what) && *seconds > 0.25;
        assert!(first.any(|f| is_it(&f)), "{link}: {longer:?}");
        // Without a run to compare with, too.
        let mut first = disturbed.iter().take(3);
        assert!(first.any(|f| is_it(&f)), "{link}: {disturbed:?}");
    }
}

/// Figures of steps within 1e-5.
fn near(apart: &[String], alone: &[String]) {
    let numbers = |step: &String| -> Vec<f64> {
        step.split(' ')
            .map(|figure| figure.parse().unwrap())
            .collect()
    };
    assert_eq!(apart.len(), alone.len());
    for (a, b) in apart.iter().zip(alone) {
        let pairs = numbers(a).into_iter().zip(numbers(b));
        for (a, b) in pairs {
            assert!((a - b).abs() < 1e-5 * b.abs(), "{a} against {b}");
        }
    }
}

/// Processes that a launcher deals out to two hosts one by one, as by `srun -m cyclic`: ranks 0 and
/// 2 are on one host, and each has a GPU, whether the launcher says which process of its host it is
/// or not.
#[test]
fn ranks_that_are_dealt_out_have_a_gpu_each() {
    let Some(folder) = support::emulator() else {
        return;
    };
    if four_hosts().is_none() {
        return;
    }
    let place = hosts("4", &["data=2", "tensor=2"]);
    let alone = [&RUN[..], &["--steps", "3", "-o", "alone.json"]].concat();
    place.run(&alone).expect(0);
    for local in ["yes", ""] {
        let variables = [
            ("LD_LIBRARY_PATH", &*folder.to_string_lossy()),
            ("MESHWRIGHT_EMULATOR_GPUS", "2"),
            ("LOCAL", local),
        ];
        let each = ["cyclic", env!("CARGO_BIN_EXE_meshwright")];
        let network = ["--bind", "10.9.0.1", "--token-file", "token"];
        let gpus = ["--backend", "cuda", "--fabric", "nccl"];
        let args = ["--steps", "3", "-o", "apart.json"];
        let args = [&each[..], &RUN, &args, &network, &gpus].concat();
        let output = on_four_hosts(&place, &args, &variables).unwrap();
        assert!(output.status.success(), "{}", said(&output));
        near(&steps(&place, "apart.json"), &steps(&place, "alone.json"));
    }
}

/// A link that becomes slow in the training is told from a slow processor and from a busy host.
#[test]
fn a_link_that_becomes_slow_is_said() {
    if std::env::var("RUN_SLOW_TESTS").is_err() {
        eprintln!("skipped: RUN_SLOW_TESTS is not set");
        return;
    }
    let place = two_hosts();
    let first = free_port();
    let (second, does) = go_between(first.clone(), WHOLE);
    // Nobody reads its words at first, so they are to be few.
    let more = [
        "--steps",
        "100000000",
        "--log-every",
        "60",
        "-o",
        "run.json",
    ];
    let metrics = [&more[..], &["--metrics", "m.csv"]].concat();
    let mut started: [Running; 2] = [
        process(&place, "0", &first, &metrics).begin().unwrap(),
        process(&place, "1", &second, &more).begin().unwrap(),
    ];
    // A window to become warm, and one to compare with.
    wait_for_steps(&place, 45);
    std::thread::sleep(Duration::from_secs(2));
    does.store(SHARED, Ordering::Relaxed);
    let n_before = rows(&place).len();
    let words = started[0].stderr.take().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(words));
    let mut told = lines.find(|line| {
        let line = line.as_ref().unwrap();
        line.contains("all ranks wait") || line.contains("works")
    });
    for child in &mut started {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let told = told.take().unwrap().unwrap();
    // Whatever else the machine does: steps went on over the slow link, to the bits of one process.
    let slow = rows(&place);
    assert!(
        slow.len() > n_before + 1,
        "no step over the slow link: {told}"
    );
    // The last row may be a part of one.
    let slow = &slow[..slow.len() - 1];
    let n = slow.len().to_string();
    let alone = ["--steps", &n, "--metrics", "m.csv", "-o", "alone.json"];
    std::fs::remove_file(place.path("m.csv")).unwrap();
    let run = ["run", "plan.json", "--data", "text.txt"];
    place.run(&[&run[..], &alone].concat()).expect(0);
    assert_eq!(slow, rows(&place));
    // On a machine with other work nothing can be told of the link.
    let is_told = told.contains("all ranks wait") || told.contains("keeps the host busy");
    assert!(is_told, "{told}");
}

/// Step, loss and norm of the steps in the metrics.
fn rows(place: &Place) -> Vec<String> {
    let text = std::fs::read_to_string(place.path("m.csv")).unwrap_or_default();
    let figures = |row: &str| row.split(',').take(3).collect::<Vec<_>>().join(",");
    text.lines().skip(1).map(figures).collect()
}

/// Returns once so many rows are written: some steps are done.
fn wait_for_steps(place: &Place, n: usize) {
    let began = Instant::now();
    let rows = || std::fs::read_to_string(place.path("m.csv")).unwrap_or_default();
    while rows().lines().count() < n {
        assert!(began.elapsed() < Duration::from_secs(60), "no step is done");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The words of both processes about a link that goes wrong in the training, and how long they
/// took.
fn broken(mode: u8) -> ([String; 2], Duration) {
    let place = two_hosts();
    let first = free_port();
    let (second, does) = go_between(first.clone(), WHOLE);
    let more = ["--steps", "100000000", "-o", "run.json", "--time-out", "1"];
    let metrics = [&more[..], &["--metrics", "m.csv"]].concat();
    let started: [Running; 2] = [
        process(&place, "0", &first, &metrics).begin().unwrap(),
        process(&place, "1", &second, &more).begin().unwrap(),
    ];
    wait_for_steps(&place, 4);
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

/// A gradient with another bit would go into the state of all ranks, and the hashes of all replicas
/// would agree.
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
    let first_one = process(&place, "0", &first, &every).begin().unwrap();
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
