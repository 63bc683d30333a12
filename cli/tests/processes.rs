//! Runs whose ranks are in several processes, and what becomes of them when one is killed.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

#[path = "processes/elastic.rs"]
mod elastic;
#[path = "processes/launchers.rs"]
mod launchers;
mod support;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use support::{Begin, CONFIG, Place, Running, assert_no_panic, processes_of, said};

const RUN: [&str; 4] = ["run", "plan.json", "--data", "text.txt"];

fn command(place: &Place, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_meshwright"));
    command
        .args(args)
        .current_dir(place.path("."))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// A process as a launcher starts it on this host: its number of so many, and the port of its run.
fn launched_one(place: &Place, args: &[&str], (rank, of): (&str, &str), port: &str) -> Running {
    command(place, args)
        .envs([("RANK", rank), ("WORLD_SIZE", of), ("LOCAL_WORLD_SIZE", of)])
        .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)])
        .env("TMPDIR", place.path("."))
        .env_remove("XDG_RUNTIME_DIR")
        .begin()
        .unwrap()
}

fn run_json(place: &Place, name: &str) -> Value {
    serde_json::from_slice(&place.read(name)).unwrap()
}

/// Step, loss and gradient norm of every step, which JSON gives back to the bit.
fn steps(run: &Value) -> Vec<[String; 3]> {
    let figure = |s: &Value, name: &str| s[name].to_string();
    let steps = run["steps"].as_array().unwrap().iter();
    steps
        .map(|s| ["step", "loss", "grad_norm"].map(|name| figure(s, name)))
        .collect()
}

/// The files of the newest checkpoint in a folder, their manifest apart.
fn newest(place: &Place, folder: &str) -> (String, Vec<(String, Vec<u8>)>) {
    let list = |path| std::fs::read_dir(path).unwrap().map(|e| e.unwrap());
    let mut names: Vec<String> = list(place.path(folder))
        .map(|e| e.file_name().into_string().unwrap())
        .filter(|name| name.contains("-step-"))
        .collect();
    names.sort();
    let name = names.pop().unwrap();
    let mut files: Vec<(String, Vec<u8>)> = list(place.path(folder).join(&name))
        .map(|e| {
            (
                e.file_name().into_string().unwrap(),
                std::fs::read(e.path()).unwrap(),
            )
        })
        .filter(|(name, _)| name != "manifest.json")
        .collect();
    files.sort();
    (name, files)
}

fn wait_for_none(place: &Place, output: &str) {
    let began = Instant::now();
    while !processes_of(place, output).is_empty() {
        assert!(
            began.elapsed() < Duration::from_secs(30),
            "processes are left"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The process of a rank that has played some steps, by its record.
fn process_of(place: &Place, rank: u32) -> u32 {
    process_after(place, rank, 20)
}

/// The same of one that has played more than so many.
fn process_after(place: &Place, rank: u32, steps: u32) -> u32 {
    process_in(place, "records", rank, steps)
}

/// The same by the records in a folder.
fn process_in(place: &Place, folder: &str, rank: u32, steps: u32) -> u32 {
    let began = Instant::now();
    loop {
        assert!(
            began.elapsed() < Duration::from_secs(300),
            "no record appears"
        );
        let path = place.path(&format!("{folder}/rank-{rank}.record"));
        let seen = runtime::record::at(&path).ok().flatten();
        if let Some(seen) = seen.filter(|s| s.plays > u64::from(steps)) {
            return seen.pid;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Writes `other.json`, a plan of the same ranks for a larger batch.
fn compile_another(place: &Place) {
    let other = ["compile", "config.json", "--cluster", "cpu-default"];
    let batch = ["--global-batch", "8", "-o", "other.json"];
    let pins = ["--pin", "pipeline=2", "--pin", "data=2"];
    place.run(&[&other[..], &batch, &pins].concat()).expect(0);
}

#[test]
fn where_ranks_are_changes_no_bit() {
    let place = Place::with_plan();
    let more = ["--steps", "6", "--validate-every", "2"];
    let run = |output: &str, flags: &[&str]| {
        let args = [&RUN[..], &more, &["-o", output], flags].concat();
        place.run(&args).expect(0);
        run_json(&place, output)
    };
    let threads = run("threads.json", &["--checkpoint", "a"]);
    let one_each = run("each.json", &["--checkpoint", "b", "--processes"]);
    let of_three = run("three.json", &["--processes=3"]);
    assert_eq!(steps(&threads).len(), 6);
    for other in [&one_each, &of_three] {
        assert_eq!(steps(&threads), steps(other));
        assert_eq!(threads["validation"], other["validation"]);
        assert_eq!(
            threads["instructions"].as_array().unwrap().len(),
            other["instructions"].as_array().unwrap().len()
        );
    }
    assert_eq!(newest(&place, "a"), newest(&place, "b"));
    let where_ = one_each["executed_on"].as_str().unwrap();
    assert!(
        where_.starts_with("4 ranks in 4 processes on 1 host"),
        "{where_}"
    );
    // What one wrote, the other goes on from.
    let resume = |output: &str, flags: &[&str]| run(output, &[&["--resume", "a"], flags].concat());
    let rest = steps(&resume("rest.json", &[]));
    assert_eq!(rest[0][0], "6");
    assert_eq!(rest, steps(&resume("more.json", &["--processes=2"])));
    // Measurements are those of any run.
    place.run(&["compare", "plan.json", "each.json"]).expect(0);
}

/// Starts processes as launchers do, each with its own variables.
fn launch(place: &Place, variables: &[&[(&str, &str)]], args: &[&str]) -> Vec<Output> {
    let start = |variables: &&[(&str, &str)]| {
        let mut command = command(place, &[&RUN[..], args].concat());
        command
            .env("TMPDIR", place.path("."))
            .env_remove("XDG_RUNTIME_DIR");
        command.envs(variables.iter().copied()).begin().unwrap()
    };
    let started: Vec<Running> = variables.iter().map(start).collect();
    let ended = started.into_iter().map(|c| c.wait_with_output().unwrap());
    ended.collect()
}

#[test]
fn processes_of_launchers_find_each_other() {
    let place = Place::with_plan();
    let alone = [&RUN[..], &["--steps", "3", "-o", "alone.json"]].concat();
    place.run(&alone).expect(0);
    let torchrun: Vec<_> = ["0", "1"]
        .map(|rank| {
            [
                ("RANK", rank),
                ("WORLD_SIZE", "2"),
                ("LOCAL_WORLD_SIZE", "2"),
                ("MASTER_ADDR", "127.0.0.1"),
                ("MASTER_PORT", "29511"),
            ]
        })
        .to_vec();
    let mpirun: Vec<_> = ["0", "1", "2", "3"]
        .map(|rank| {
            [
                ("OMPI_COMM_WORLD_RANK", rank),
                ("OMPI_COMM_WORLD_SIZE", "4"),
                ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
                ("PMIX_NAMESPACE", "prterun-host-17@1"),
                ("PMIX_RANK", rank),
            ]
        })
        .to_vec();
    let srun: Vec<_> = ["0", "1"]
        .map(|rank| {
            [
                ("SLURM_PROCID", rank),
                ("SLURM_STEP_NUM_TASKS", "2"),
                ("SLURM_STEP_NUM_NODES", "1"),
                ("SLURM_JOB_ID", "42"),
                ("SLURM_STEP_ID", "0"),
            ]
        })
        .to_vec();
    let expected = steps(&run_json(&place, "alone.json"));
    for (name, variables) in [("t.json", torchrun), ("m.json", mpirun), ("s.json", srun)] {
        let variables: Vec<&[(&str, &str)]> = variables.iter().map(|v| &v[..]).collect();
        for output in launch(&place, &variables, &["--steps", "3", "-o", name]) {
            assert_eq!(output.status.code(), Some(0), "{}", said(&output));
        }
        assert_eq!(steps(&run_json(&place, name)), expected, "{name}");
    }
    // The secret does not stay.
    assert_eq!(posted(&place), [""; 0]);
}

/// The numbers of the processors that this process may use.
fn allowed_processors() -> Vec<usize> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mut lines = status.lines();
    let list = lines.find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let ranges = list.unwrap().trim().split(',').map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        first.parse::<usize>().unwrap()..=last.parse().unwrap()
    });
    ranges.flatten().collect()
}

/// A launcher may bind each process to processors of its own: the run has all of these.
#[test]
fn processors_that_each_process_has_alone_are_counted_together() {
    let &[first, second, ..] = &allowed_processors()[..] else {
        eprintln!("skipped: this process may not use two processors");
        return;
    };
    let place = Place::with_plan();
    let started = [("0", first), ("1", second)].map(|(rank, processor)| {
        let processor = processor.to_string();
        Command::new("taskset")
            .args(["-c", &processor, env!("CARGO_BIN_EXE_meshwright")])
            .args([&RUN[..], &["--steps", "3", "-o", "bound.json"]].concat())
            .envs([("RANK", rank), ("WORLD_SIZE", "2")])
            .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29523")])
            .env("TMPDIR", place.path("."))
            .env_remove("XDG_RUNTIME_DIR")
            .current_dir(place.path("."))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .begin()
            .unwrap()
    });
    for child in started {
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    }
    let run = run_json(&place, "bound.json");
    let on = run["executed_on"].as_str().unwrap();
    assert!(
        on.ends_with(" in 2 processes on 1 host of 2 CPU processors"),
        "{on}"
    );
}

/// The files by which processes of launchers find each other, with the secrets of their runs.
fn posted(place: &Place) -> Vec<String> {
    let names = place.names();
    let folder = names.iter().find(|n| n.starts_with("meshwright-"));
    folder.map_or_else(Vec::new, |folder| place.names_in(folder))
}

/// A process 0 that is killed before all have met leaves its secret, which goes when the next run
/// begins.
#[test]
fn the_secret_of_a_killed_run_goes_with_the_next_one() {
    let place = Place::with_plan();
    let start = |rank: &str, port: &str, steps: &str| {
        let mut command = command(&place, &[&RUN[..], &["--steps", steps]].concat());
        command
            .env("TMPDIR", place.path("."))
            .env_remove("XDG_RUNTIME_DIR")
            .envs([("RANK", rank), ("WORLD_SIZE", "2")])
            .envs([("LOCAL_WORLD_SIZE", "2"), ("MASTER_PORT", port)])
            .env("MASTER_ADDR", "127.0.0.1");
        command.begin().unwrap()
    };
    let mut killed = start("0", "29513", "100000000");
    let since = Instant::now();
    while posted(&place).is_empty() {
        assert!(
            since.elapsed() < Duration::from_secs(60),
            "nothing is posted"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    killed.kill().unwrap();
    killed.wait().unwrap();
    // One that was killed while it wrote has left this, and a file of somebody else's stays.
    let folder = place.names();
    let folder = folder
        .iter()
        .find(|n| n.starts_with("meshwright-"))
        .unwrap();
    place.write(&format!("{folder}/.new-{}-Xy3", killed.id()), "a part");
    place.write(&format!("{folder}/notes.txt"), "mine");
    assert_eq!(posted(&place).len(), 3);
    for child in ["0", "1"].map(|rank| start(rank, "29514", "2")) {
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    }
    assert_eq!(posted(&place), ["notes.txt"]);
}

/// Processes that somebody starts by hand may each have a parent of its own, as a script that waits
/// for it: by a port of their run they find each other, elastic ones on several hosts, too. Whoever
/// loses process 0 says with which steps the run is to go on.
#[test]
fn processes_with_parents_of_their_own_find_each_other() {
    let place = Place::with_plan();
    place.write("token", "8f".repeat(32));
    make_private(&place, "token");
    let start = |rank: &str, variables: &[(&str, &str)], more: &[&str]| {
        let binary = env!("CARGO_BIN_EXE_meshwright");
        let mut command = Command::new("sh");
        command
            .args(["-c", "\"$0\" \"$@\"; exit $?", binary])
            .args(RUN)
            .args(["-o", "run.json"])
            .args(more)
            .envs([("RANK", rank), ("WORLD_SIZE", "2")])
            .envs(variables.iter().copied())
            .env("TMPDIR", place.path("."))
            .env_remove("XDG_RUNTIME_DIR")
            .current_dir(place.path("."))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command.begin().unwrap()
    };
    let ended = |variables: &[(&str, &str)], more: &[&str], code: i32| -> Vec<String> {
        let both = ["1", "0"].map(|rank| start(rank, variables, more));
        let outputs = both.map(|child| child.wait_with_output().unwrap());
        let words = outputs.iter().map(|output| {
            let words = said(output);
            assert_eq!(output.status.code(), Some(code), "{words}");
            words
        });
        words.collect()
    };
    let local = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29519")];
    ended(&local, &["--steps", "3"], 0);
    // A port that nobody has for the moment.
    let free = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let at = free.local_addr().unwrap().to_string();
    drop(free);
    let abroad = ["--token-file", "token", "--rendezvous", &at, "--bind"];
    let elastic = ["127.0.0.1", "--elastic", "--checkpoint", "elastic"];
    let elastic = [&abroad[..], &elastic, &["--checkpoint-every", "2"]].concat();
    let elastic = [&elastic[..], &["--steps", "3"]].concat();
    ended(&[("LOCAL_WORLD_SIZE", "1")], &elastic, 0);
    // A process 0 that never comes, or was refused, is not waited for much longer than others are.
    let lonely = [&elastic[..elastic.len() - 1], &["5", "--time-out", "1"]].concat();
    let began = Instant::now();
    let waits = start("1", &[("LOCAL_WORLD_SIZE", "1")], &lonely);
    let output = waits.wait_with_output().unwrap();
    let words = said(&output);
    assert_eq!(output.status.code(), Some(6), "{words}");
    let not = "process 0 did not say what it goes on with";
    assert!(words.contains(not), "{words}");
    assert!(began.elapsed() < Duration::from_secs(60), "{words}");
    // Nothing tells their run from others: each of them says how that is done.
    let nameless = [("LOCAL_WORLD_SIZE", "2")];
    for words in ended(&nameless, &["--steps", "3", "--time-out", "1"], 6) {
        assert!(words.contains("must have one parent"), "{words}");
    }
    let state = ["--steps", "100000", "--checkpoint", "state"];
    let more = ["--checkpoint-every", "10", "--record", "records"];
    let more = [&state[..], &more].concat();
    let [other, first] = ["1", "0"].map(|rank| start(rank, &local, &more));
    let victim = process_after(&place, 0, 40).to_string();
    let killed = Command::new("kill").args(["-9", &victim]).status();
    assert!(killed.unwrap().success());
    let _ = first.wait_with_output().unwrap();
    let output = other.wait_with_output().unwrap();
    let words = said(&output);
    assert_eq!(output.status.code(), Some(6), "{words}");
    let newest = newest(&place, "state").0;
    let step: u64 = newest.split_once("-step-").unwrap().1.parse().unwrap();
    assert!(words.contains("process 1: run failed"), "{words}");
    let way_on = format!("--resume state --steps {}", 100_000 - step);
    assert!(words.contains(&way_on), "{way_on}: {words}");
}

/// Has nobody else read a file.
fn make_private(place: &Place, name: &str) {
    let mode = Command::new("chmod")
        .arg("600")
        .arg(place.path(name))
        .status();
    assert!(mode.unwrap().success());
}

/// `--time-out` is for steps: on a busy machine a process starts late and is no lost one.
#[test]
fn processes_that_come_late_are_waited_for() {
    let place = Place::with_plan();
    let start = |rank: &str| {
        let args = ["--steps", "2", "-o", "run.json", "--time-out", "1"];
        let mut command = command(&place, &[&RUN[..], &args].concat());
        command
            .env("TMPDIR", place.path("."))
            .env_remove("XDG_RUNTIME_DIR");
        let variables = [
            ("RANK", rank),
            ("WORLD_SIZE", "2"),
            ("LOCAL_WORLD_SIZE", "2"),
        ];
        command.envs(variables).begin().unwrap()
    };
    let first = start("0");
    std::thread::sleep(Duration::from_millis(1600));
    for child in [first, start("1")] {
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    }
}

#[test]
fn processes_of_other_runs_are_refused() {
    let place = Place::with_plan();
    compile_another(&place);
    let start = |rank: &str, plan: &str| {
        let args = [
            "run",
            plan,
            "--data",
            "text.txt",
            "-o",
            "run.json",
            "--time-out",
            "20",
        ];
        let mut command = command(&place, &args);
        command
            .env("TMPDIR", place.path("."))
            .env_remove("XDG_RUNTIME_DIR");
        let variables = [
            ("RANK", rank),
            ("WORLD_SIZE", "2"),
            ("LOCAL_WORLD_SIZE", "2"),
        ];
        command.envs(variables).begin().unwrap()
    };
    let both = [start("0", "plan.json"), start("1", "other.json")];
    for output in both.map(|c| c.wait_with_output().unwrap()) {
        let words = said(&output);
        assert_eq!(output.status.code(), Some(6), "{words}");
        assert!(words.contains("the plan of process 1 is"), "{words}");
    }
    assert!(!place.exists("run.json"));
}

#[test]
fn what_cannot_be_a_run_of_processes_is_said() {
    let place = Place::with_plan();
    let refused = |flags: &[&str], variables: &[(&str, &str)], words: &[&str]| {
        let mut command = command(&place, &[&RUN[..], flags].concat());
        let output = command.envs(variables.iter().copied()).output().unwrap();
        let err = said(&output);
        assert_eq!(output.status.code(), Some(2), "{err}");
        for w in words {
            assert!(err.contains(w), "`{w}` is not in:\n{err}");
        }
        assert!(!place.exists("run.json"));
    };
    refused(
        &["--processes=5"],
        &[],
        &["5 processes for the plan's 4 ranks"],
    );
    refused(
        &["--as-process=1/2"],
        &[],
        &["a run starts itself", "--processes"],
    );
    refused(&["--as-process=2/2"], &[], &["as 1/4"]);
    refused(&["--processes=0"], &[], &["a whole number from 1"]);
    if !cfg!(feature = "mpi") {
        refused(
            &["--mpi"],
            &[],
            &["this build knows no MPI", "--features cli/mpi"],
        );
    }
    refused(
        &["--bind", "127.0.0.1"],
        &[],
        &["--bind is for runs of several hosts"],
    );
    refused(
        &["--checkpoint-every", "2"],
        &[],
        &["--checkpoint <CHECKPOINT>"],
    );
    refused(&[], &[("RANK", "0")], &["WORLD_SIZE is not", "--alone"]);
    let spread = [
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_WORLD_SIZE", "1"),
    ];
    refused(
        &[],
        &spread,
        &["1 of them on this host", "--token-file", "openssl rand"],
    );
    let rendezvous = ["--token-file", "token", "--rendezvous", "node0:0"];
    place.write("token", "8f".repeat(32));
    assert!(
        Command::new("chmod")
            .arg("600")
            .arg(place.path("token"))
            .status()
            .unwrap()
            .success()
    );
    refused(
        &rendezvous,
        &spread,
        &["`node0:0` has no port from 1 to 65535"],
    );
    let by_hand = &[
        "nothing says that all are on this host",
        "set MASTER_ADDR=127.0.0.1",
    ];
    refused(&[], &spread[..2], by_hand);
    let by_torchrun = [&spread[..], &[("TORCHELASTIC_RUN_ID", "7")]].concat();
    refused(&[], &by_torchrun, &["torchrun started 2 processes"]);
    let secret = "8f".repeat(32);
    place.write("token", &secret);
    let file = ["--token-file", "token"];
    let open = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29512")];
    let abroad = [&spread[..], &open].concat();
    let mode = |mode: &str| {
        let path = place.path("token");
        assert!(
            Command::new("chmod")
                .arg(mode)
                .arg(path)
                .status()
                .unwrap()
                .success()
        );
    };
    mode("644");
    let output = command(&place, &[&RUN[..], &file].concat())
        .envs(abroad.clone())
        .output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(3));
    assert!(
        said(&output).contains("others can read it"),
        "{}",
        said(&output)
    );
    mode("600");
    refused(&file, &spread, &["--rendezvous HOST:PORT"]);
    refused(
        &file,
        &abroad,
        &["may not listen for other hosts", "--bind 127.0.0.1"],
    );
    refused(
        &[&file[..], &["--bind", "0.0.0.0"]].concat(),
        &abroad,
        &["all networks"],
    );
}

/// As on several hosts: a known address, and a secret that all have.
#[test]
fn hosts_meet_at_an_address_with_a_secret() {
    let place = Place::with_plan();
    place.write("token", "8f".repeat(32));
    place.write("wrong", "7f".repeat(32));
    for name in ["token", "wrong"] {
        let path = place.path(name);
        assert!(
            Command::new("chmod")
                .arg("600")
                .arg(path)
                .status()
                .unwrap()
                .success()
        );
    }
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = port.local_addr().unwrap().to_string();
    drop(port);
    let start = |rank: &str, token: &str, patience: &str| {
        let flags = ["--steps", "2", "-o", "run.json", "--token-file", token];
        let flags = [
            &flags[..],
            &["--rendezvous", &address, "--bind", "127.0.0.1"],
        ]
        .concat();
        let args = [&RUN[..], &flags, &["--time-out", patience]].concat();
        let variables = [
            ("RANK", rank),
            ("WORLD_SIZE", "2"),
            ("LOCAL_WORLD_SIZE", "1"),
        ];
        command(&place, &args).envs(variables).begin().unwrap()
    };
    // It waits for process 0 longer than its steps may take, and no longer once it is refused.
    let stranger = start("1", "wrong", "1");
    std::thread::sleep(Duration::from_millis(1600));
    let first = start("0", "token", "60");
    let stranger = stranger.wait_with_output().unwrap();
    assert_eq!(stranger.status.code(), Some(6));
    let words = said(&stranger);
    assert!(words.contains("its token is another one"), "{words}");
    let second = start("1", "token", "60");
    for child in [first, second] {
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    }
    assert_eq!(steps(&run_json(&place, "run.json")).len(), 2);
}

/// The secret of a run comes by a descriptor that a process inherits, of a file or of a pipe.
#[test]
fn a_secret_is_inherited() {
    let place = Place::with_plan();
    place.write("token", "8f".repeat(32));
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = port.local_addr().unwrap().to_string();
    drop(port);
    let start = |rank: &str, how: &str| {
        let flags = ["--steps", "2", "-o", "run.json", "--bind", "127.0.0.1"];
        let mut command = Command::new("bash");
        command
            .args(["-c", &format!("exec \"$0\" \"$@\" --token-file {how}")])
            .arg(env!("CARGO_BIN_EXE_meshwright"))
            .args([&RUN[..], &flags, &["--rendezvous", &address]].concat())
            .envs([("RANK", rank), ("WORLD_SIZE", "2")])
            .env("LOCAL_WORLD_SIZE", "1")
            .current_dir(place.path("."))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command.begin().unwrap()
    };
    for ways in [
        ["/dev/fd/9 9<token", "<(cat token)"],
        [
            "/proc/self/fd/7 7<<<$(cat token)",
            "/dev/fd/0 < <(cat token)",
        ],
    ] {
        let both = [start("0", ways[0]), start("1", ways[1])];
        for output in both.map(|c| c.wait_with_output().unwrap()) {
            assert_eq!(output.status.code(), Some(0), "{ways:?}: {}", said(&output));
        }
    }
    // Others than the process' own are files as any other.
    for (how, words) in [
        ("/dev/fd/77", "No such file or directory"),
        ("/dev/fd/9 9<text.txt", "a token"),
        ("token", "others can read it"),
    ] {
        let output = start("1", how).wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(3), "{how}: {}", said(&output));
        assert!(said(&output).contains(words), "{how}: {}", said(&output));
    }
}

#[test]
fn a_killed_process_is_named_and_nobody_is_left() {
    let place = Place::with_plan();
    let start = |flags: &[&str]| {
        let args = ["--steps", "100000000", "--record", "records"];
        let args = [&RUN[..], &args, flags].concat();
        command(&place, &args).begin().unwrap()
    };
    let child = start(&["--processes", "-o", "killed.json"]);
    let victim = process_of(&place, 2).to_string();
    assert_ne!(victim, child.id().to_string());
    let killed = Command::new("kill").args(["-9", &victim]).status();
    assert!(killed.unwrap().success());
    let killed = Instant::now();
    let output = child.wait_with_output().unwrap();
    assert!(
        killed.elapsed() < Duration::from_secs(10),
        "{:?}",
        killed.elapsed()
    );
    let words = said(&output);
    assert_eq!(output.status.code(), Some(6), "{words}");
    assert!(words.contains(&format!("(pid {victim} on ")), "{words}");
    assert!(words.contains("it was killed by signal 9"), "{words}");
    wait_for_none(&place, "killed.json");
    assert!(!place.exists("killed.json"));
    // Without process 0 the others end as well.
    let mut child = start(&["--processes=2", "-o", "first.json"]);
    process_of(&place, 3);
    child.kill().unwrap();
    child.wait().unwrap();
    wait_for_none(&place, "first.json");
}

/// A process of ranks whose GPUs meet by NCCL: the others' streams wait for it, and are let go.
#[test]
fn a_killed_process_of_gpus_is_named_and_nobody_is_left() {
    let Some(folder) = support::emulator() else {
        return;
    };
    let place = Place::with_plan();
    let args = ["--steps", "100000000", "--processes", "-o", "gpus.json"];
    let gpus = ["--backend", "cuda", "--record", "records"];
    let child = command(&place, &[&RUN[..], &args, &gpus].concat())
        .env("LD_LIBRARY_PATH", folder)
        .env("MESHWRIGHT_EMULATOR_GPUS", "4")
        .begin()
        .unwrap();
    let victim = process_of(&place, 2).to_string();
    let killed = Command::new("kill").args(["-9", &victim]).status();
    assert!(killed.unwrap().success());
    let killed = Instant::now();
    let output = child.wait_with_output().unwrap();
    let words = said(&output);
    assert!(killed.elapsed() < Duration::from_secs(10), "{words}");
    assert_eq!(output.status.code(), Some(6), "{words}");
    assert!(words.contains(&format!("(pid {victim} on ")), "{words}");
    wait_for_none(&place, "gpus.json");
}

/// A GPU's driver that does not come back: the rank is named, its process ends by itself where
/// nobody else is there to end it, and the others end as well.
#[test]
fn a_process_whose_driver_does_not_come_back_ends() {
    let Some(folder) = support::emulator() else {
        return;
    };
    // In any kernel, and in the first one of a step: a rank has not met others by then.
    for (processes, kernel) in [
        (&[][..], ""),
        (&[], "embedding"),
        (&["--processes=2"], ""),
        (&["--processes=2"], "embedding"),
    ] {
        let place = Place::with_plan();
        let args = ["--steps", "100000000", "--time-out", "1", "-o", "held.json"];
        let gpus = ["--backend", "cuda", "--fabric", "nccl"];
        let record = ["--record", "records"];
        let args = [&RUN[..], &args, &gpus, &record, processes].concat();
        let child = command(&place, &args)
            .env("LD_LIBRARY_PATH", &folder)
            .env("MESHWRIGHT_EMULATOR_GPUS", "4")
            .env("MESHWRIGHT_EMULATOR_HANGS", place.path("hangs"))
            .begin()
            .unwrap();
        process_after(&place, 2, 1);
        place.write("named", kernel);
        std::fs::rename(place.path("named"), place.path("hangs")).unwrap();
        let since = Instant::now();
        let output = child.wait_with_output().unwrap();
        let words = said(&output);
        assert!(since.elapsed() < Duration::from_secs(20), "{words}");
        assert_eq!(output.status.code(), Some(6), "{words}");
        assert!(!place.exists("hangs"), "nothing was held back: {words}");
        if processes.is_empty() {
            let why = "did not come back from the GPU's driver";
            assert!(words.contains("error: the host of rank"), "{words}");
            assert!(words.contains(why), "{words}");
        } else {
            assert!(words.contains("rank"), "{words}");
        }
        wait_for_none(&place, "held.json");
    }
}

#[test]
fn two_processes_that_are_killed_at_once_end_the_run() {
    let place = Place::with_plan();
    let args = ["--steps", "100000000", "--processes", "-o", "two.json"];
    let records = ["--record", "records"];
    let child = command(&place, &[&RUN[..], &args, &records].concat()).begin();
    let child = child.unwrap();
    let victims = [1, 2].map(|rank| process_of(&place, rank).to_string());
    let killed = Command::new("kill").arg("-9").args(&victims).status();
    assert!(killed.unwrap().success());
    let output = child.wait_with_output().unwrap();
    let words = said(&output);
    assert_eq!(output.status.code(), Some(6), "{words}");
    let is_named = |pid: &String| words.contains(&format!("(pid {pid} on "));
    assert!(victims.iter().any(is_named), "{words}");
    let other = "is lost, too: it was killed by signal 9. ";
    let [first, second] = ["rank1", "rank2"].map(|rank| words.contains(&format!("{rank} {other}")));
    assert!(first != second, "{words}");
    wait_for_none(&place, "two.json");
}

/// Nobody here is told how processes end that a launcher started: their connections end. Those that end
/// as they miss process 0 say so, and are not taken for lost.
#[test]
fn launched_processes_that_are_killed_at_once_are_all_named() {
    for victims in [&[1, 3, 4][..], &[0, 2], &[0, 1, 4]] {
        let place = Place::new();
        let compile = ["compile", "config.json", "--cluster", "cpu-default"];
        let pins = ["--ranks", "5", "--global-batch", "10", "--pin", "data=5"];
        place.run(&[&compile[..], &pins].concat()).expect(0);
        let long = ["--steps", "100000000", "--record", "records"];
        let args = [&RUN[..], &long, &["-o", "launched.json"]].concat();
        let mut started =
            ["0", "1", "2", "3", "4"].map(|rank| launched_one(&place, &args, (rank, "5"), "29527"));
        let ids = victims.iter().map(|rank| process_of(&place, *rank));
        let ids: Vec<String> = ids.map(|id| id.to_string()).collect();
        let killed = Command::new("kill").arg("-9").args(&ids).status();
        assert!(killed.unwrap().success());
        for victim in victims {
            started[*victim as usize].wait().unwrap();
        }
        let name = |rank: &u32| rank.to_string();
        let lost: Vec<String> = victims.iter().map(name).collect();
        for (rank, process) in (0..).zip(started) {
            if victims.contains(&rank) {
                continue;
            }
            let words = said(&process.wait_with_output().unwrap());
            if !victims.contains(&0) && rank != 0 {
                // It has lost nobody's process: process 0 has ended the run.
                let ended = "process 0 has ended the run";
                assert!(words.contains(ended), "{words}");
                continue;
            }
            let is_named = |rank: &u32| words.contains(&format!("rank{rank} is lost: process "));
            let named: Vec<u32> = (0..5).filter(is_named).collect();
            assert_eq!(named.len(), 1, "{words}");
            let too = words.split(". ").filter_map(|s| s.split_once(" lost, too"));
            let too = too.flat_map(|(who, _)| who.split([' ', ',']));
            let too = too.filter_map(|word| word.strip_prefix("rank")?.parse().ok());
            let mut accused: Vec<u32> = named.into_iter().chain(too).collect();
            accused.sort_unstable();
            assert_eq!(accused, victims, "{words}");
            let found: Value = serde_json::from_slice(&place.read("records/verdict.json")).unwrap();
            let found = found["found"].as_object().unwrap();
            assert_eq!(found.keys().cloned().collect::<Vec<_>>(), lost, "{words}");
        }
        wait_for_none(&place, "launched.json");
    }
}

/// Processes that a signal has stopped cannot end by themselves: those that are left name them and see
/// to that, whoever started them, and whether or not process 0 is one of them.
#[test]
fn stopped_processes_are_named_and_nobody_is_left() {
    for (launched, stopped) in [
        (true, [2, 3]),
        (true, [0, 2]),
        (false, [2, 3]),
        (false, [0, 2]),
    ] {
        let place = Place::new();
        let compile = ["compile", "config.json", "--cluster", "cpu-default"];
        let pins = ["--ranks", "4", "--global-batch", "8", "--pin", "data=4"];
        place.run(&[&compile[..], &pins].concat()).expect(0);
        let long = [
            "--steps",
            "100000000",
            "--time-out",
            "2",
            "--record",
            "records",
        ];
        let args = [&RUN[..], &long, &["-o", "stopped.json"]].concat();
        let by_hand = |rank: &str| launched_one(&place, &args, (rank, "4"), "29528");
        let started: Vec<Running> = match launched {
            true => ["0", "1", "2", "3"].map(by_hand).into(),
            false => {
                let args = [&args[..], &["--processes"]].concat();
                vec![command(&place, &args).begin().unwrap()]
            }
        };
        for rank in stopped {
            send("-STOP", process_of(&place, rank));
        }
        let said: Vec<String> = started
            .into_iter()
            .map(|child| said(&child.wait_with_output().unwrap()))
            .collect();
        wait_for_none(&place, "stopped.json");
        let words = said.join("\n");
        assert!(
            words.contains(&format!("rank{} is lost", stopped[0])),
            "{words}"
        );
        let found = serde_json::from_slice::<Value>(&place.read("records/verdict.json"));
        let found = found.unwrap()["found"].as_object().unwrap().clone();
        let ranks: Vec<&str> = found.keys().map(String::as_str).collect();
        assert_eq!(ranks, stopped.map(|rank| rank.to_string()), "{words}");
    }
}

/// The promise: whichever process is killed and whenever, the run goes on from the newest
/// checkpoint and ends with the bits of one that nobody disturbed.
#[test]
fn killed_runs_go_on_to_the_same_bits() {
    let place = Place::with_plan();
    let total = 700u64;
    let whole = [
        "--steps",
        &total.to_string(),
        "-o",
        "whole.json",
        "--checkpoint",
        "whole",
    ];
    place.run(&[&RUN[..], &whole].concat()).expect(0);
    let done = || -> u64 {
        let found = std::fs::read_dir(place.path("state"))
            .into_iter()
            .flatten()
            .flatten();
        let names = found.filter_map(|e| e.file_name().into_string().ok());
        let steps = names.filter_map(|n| n.split_once("-step-")?.1.parse().ok());
        steps.max().unwrap_or(0)
    };
    let (mut rounds, mut kills, mut moment) = (0u64, 0u64, 17u64);
    while rounds < 12 && done() < total {
        let before = done();
        let left = (total - before).to_string();
        let mut args = vec!["--steps", &left, "-o", "part.json", "--processes=2"];
        args.extend(["--checkpoint", "state", "--checkpoint-every", "7"]);
        if before > 0 {
            args.extend(["--resume", "state"]);
        }
        let mut child = command(&place, &[&RUN[..], &args].concat())
            .begin()
            .unwrap();
        // After some more checkpoints, at a moment between two that no step determines.
        moment = (moment * 7919 + 104_729) % 1000;
        let goes_on = |child: &mut Running| child.try_wait().unwrap().is_none();
        while goes_on(&mut child) && done() < before + 7 * (1 + moment % 4) {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(moment * 40));
        let was_at_work = goes_on(&mut child);
        // Now one process, now the other.
        let all = processes_of(&place, "part.json");
        let victim = match rounds % 2 {
            0 => Some(child.id()),
            _ => all.into_iter().find(|&id| id != child.id()),
        };
        if let Some(victim) = victim {
            let victim = victim.to_string();
            let _ = Command::new("kill")
                .args(["-9", &victim])
                .stderr(Stdio::null())
                .status();
        }
        let output = child.wait_with_output().unwrap();
        assert!(
            matches!(output.status.code(), None | Some(0 | 6)),
            "{}",
            said(&output)
        );
        wait_for_none(&place, "part.json");
        assert!(
            done() > before,
            "nothing was done between two kills: {}",
            said(&output)
        );
        if was_at_work && victim.is_some() && output.status.code() != Some(0) {
            kills += 1;
            let of_member = rounds % 2 == 1 && output.status.code() == Some(6);
            let said = said(&output);
            assert!(!of_member || said.contains("signal 9"), "{said}");
            // Process 0 says with which steps it is to go on.
            let way_on = format!("--resume state --steps {}", total - done());
            assert!(!of_member || said.contains(&way_on), "{way_on}: {said}");
        }
        rounds += 1;
    }
    assert!(kills >= 3, "it was never disturbed");
    if done() < total {
        let left = (total - done()).to_string();
        let mut args = vec!["--steps", &left, "-o", "part.json", "--checkpoint", "state"];
        if done() > 0 {
            args.extend(["--resume", "state"]);
        }
        let ended = place.run(&[&RUN[..], &args].concat()).expect(0);
        assert_no_panic(&ended);
    }
    let ([whole, parts], undisturbed) = (["whole", "state"].map(|f| newest(&place, f).1), total);
    assert_eq!(done(), undisturbed);
    assert!(whole == parts, "the states differ");
}

/// Processes that stop for less than the time they have are nobody's fault, one alone or all at
/// once.
#[test]
fn processes_that_go_on_in_time_end_no_run() {
    let place = Place::with_plan();
    let args = [
        "--steps",
        "100000000",
        "--processes=2",
        "-o",
        "stopped.json",
    ];
    let more = ["--time-out", "20", "--record", "records"];
    let child = command(&place, &[&RUN[..], &args, &more].concat()).begin();
    let child = child.unwrap();
    let other = process_of(&place, 3).to_string();
    let own = child.id().to_string();
    let signal = |name: &str, to: &[&str]| {
        let sent = Command::new("kill").arg(name).args(to).status();
        assert!(sent.unwrap().success());
    };
    let all = [own.as_str(), other.as_str()];
    for stopped in [&all[1..], &all] {
        signal("-STOP", stopped);
        std::thread::sleep(Duration::from_millis(400));
        signal("-CONT", stopped);
        std::thread::sleep(Duration::from_millis(100));
    }
    signal("-TERM", &[&own]);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", said(&output));
    assert!(!said(&output).contains("lost"), "{}", said(&output));
    wait_for_none(&place, "stopped.json");
}

/// All processes of a run are stopped for longer than `--time-out`, as where a container is frozen.
/// No process has waited for another one meanwhile.
#[test]
fn a_run_that_sleeps_longer_than_its_time_out_goes_on() {
    let place = Place::with_plan();
    let steps = ["--steps", "100000000", "--processes=2", "-o", "slept.json"];
    let more = ["--time-out", "4", "--metrics", "m.csv"];
    let child = command(&place, &[&RUN[..], &steps, &more].concat()).begin();
    let child = child.unwrap();
    let rows =
        || std::fs::read_to_string(place.path("m.csv")).map_or(0, |text| text.lines().count());
    let wait_for_rows = |n: usize| {
        let since = Instant::now();
        while rows() < n {
            assert!(since.elapsed() < Duration::from_secs(60), "no step is made");
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    wait_for_rows(3);
    let all: Vec<String> = processes_of(&place, "slept.json")
        .iter()
        .map(u32::to_string)
        .collect();
    let signal = |name: &str| {
        let sent = Command::new("kill").arg(name).args(&all).status();
        assert!(sent.unwrap().success());
    };
    // A rank is most likely to wait for another one.
    for _ in 0..2 {
        signal("-STOP");
        std::thread::sleep(Duration::from_secs(6));
        let before = rows();
        signal("-CONT");
        wait_for_rows(before + 5);
    }
    let own = child.id().to_string();
    assert!(
        Command::new("kill")
            .args(["-TERM", &own])
            .status()
            .unwrap()
            .success()
    );
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", said(&output));
    assert!(!said(&output).contains("lost"), "{}", said(&output));
    wait_for_none(&place, "slept.json");
}

/// Process 0 is killed while another one that it started has not joined yet, and so has no
/// connection to it that could end: that one ends all the same, and does not wait for as long as it
/// has to join.
#[test]
fn an_orphan_that_has_not_joined_ends() {
    // One that has joined already, which ends by its connection, says nothing: then another run is
    // tried.
    let caught = (0..TRIES).any(|_| orphan_is_caught());
    assert!(
        caught,
        "of {TRIES} runs all processes had joined before they could be stopped"
    );
}

/// Runs that are tried until a process is caught before it has joined.
const TRIES: usize = 20;

/// Kills process 0 of a run whose other process is stopped as soon as it is there, and waits until
/// that has ended, too. Whether it was stopped before it had joined: before it had a socket.
fn orphan_is_caught() -> bool {
    let place = Place::with_plan();
    let args = [
        &RUN[..],
        &["--processes=2", "--steps", "100000000", "-o", "o.json"],
    ]
    .concat();
    let mut child = command(&place, &args).begin().unwrap();
    let own = child.id();
    let since = Instant::now();
    // The other one, as soon as it is there, is held up before it can join.
    let orphan = loop {
        let mut others = processes_of(&place, "o.json").into_iter();
        if let Some(other) = others.find(|id| *id != own) {
            break other.to_string();
        }
        assert!(
            since.elapsed() < Duration::from_secs(60),
            "nothing was started"
        );
    };
    let signal = |name: &str, id: &str| {
        let sent = Command::new("kill").args([name, id]).status();
        assert!(sent.unwrap().success());
    };
    signal("-STOP", &orphan);
    let open = std::fs::read_dir(format!("/proc/{orphan}/fd"))
        .unwrap()
        .flatten();
    let mut targets = open.filter_map(|file| std::fs::read_link(file.path()).ok());
    let has_joined = targets.any(|target| target.to_string_lossy().starts_with("socket:"));
    // What it is to be told is on its standard input by then.
    std::thread::sleep(Duration::from_millis(100));
    child.kill().unwrap();
    child.wait().unwrap();
    signal("-CONT", &orphan);
    wait_for_none(&place, "o.json");
    !has_joined
}

/// Processes that a signal has stopped see the end of their process 0 all the same, before they have
/// joined and in a step, and end as well.
#[test]
fn stopped_processes_end_when_process_0_is_killed() {
    for is_in_step in [false, true] {
        let place = Place::with_plan();
        let long = [
            "--steps",
            "100000000",
            "--record",
            "records",
            "-o",
            "o.json",
        ];
        let args = [&RUN[..], &["--processes"], &long].concat();
        let child = command(&place, &args).begin().unwrap();
        if is_in_step {
            for rank in 0..4 {
                process_of(&place, rank);
            }
        }
        let since = Instant::now();
        // Those that have more than one thread have begun.
        let has_begun = |id: &u32| {
            let threads = std::fs::read_dir(format!("/proc/{id}/task"));
            *id != child.id() && threads.is_ok_and(|all| all.count() > 1)
        };
        let others = loop {
            let others = processes_of(&place, "o.json").into_iter().filter(has_begun);
            let others: Vec<u32> = others.collect();
            if others.len() > usize::from(is_in_step) * 2 {
                break others;
            }
            assert!(
                since.elapsed() < Duration::from_secs(60),
                "nothing was started"
            );
        };
        others.iter().for_each(|id| send("-STOP", *id));
        send("-KILL", child.id());
        child.wait_with_output().unwrap();
        wait_for_none(&place, "o.json");
    }
}

/// A control group for memory of this test; none where this machine or user may not have one.
struct Group(std::path::PathBuf);

impl Group {
    fn new() -> Option<Self> {
        let name = format!("meshwright-test-{}", std::process::id());
        // Of the first version of control groups, and of the second.
        let places = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"];
        let groups = places.map(|place| std::path::Path::new(place).join(&name));
        let made = groups.into_iter().find(|g| std::fs::create_dir(g).is_ok());
        let group = Group(made?);
        group.limit().is_some().then_some(group)
    }
    fn limit(&self) -> Option<std::path::PathBuf> {
        let files = ["memory.limit_in_bytes", "memory.max"].map(|f| self.0.join(f));
        files.into_iter().find(|f| f.exists())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// The system kills a process that has no memory left: the others name it and end, as with any
/// other kill.
#[test]
fn a_process_that_is_killed_for_memory_is_named() {
    let Some(group) = Group::new() else {
        eprintln!("skipped: no control group for memory can be made here");
        return;
    };
    let place = Place::with_plan();
    let more = ["--steps", "100000000", "--processes", "-o", "m.json"];
    let state = ["--checkpoint", "state", "--checkpoint-every", "10"];
    let record = ["--record", "records"];
    let args = [&RUN[..], &more, &state, &record].concat();
    let child = command(&place, &args).begin().unwrap();
    let victim = process_of(&place, 2).to_string();
    std::fs::write(group.0.join("cgroup.procs"), &victim).unwrap();
    // It has what it had; the next page is one too many.
    std::fs::write(group.limit().unwrap(), "4096").unwrap();
    let output = child.wait_with_output().unwrap();
    let words = said(&output);
    assert_eq!(output.status.code(), Some(6), "{words}");
    let named = format!("rank2 is lost: process 2 (pid {victim}");
    assert!(words.contains(&named), "{words}");
    assert!(words.contains("killed by signal 9"), "{words}");
    wait_for_none(&place, "m.json");
}

/// A disk that cannot take a checkpoint: the run goes on, says so, and keeps the earlier ones.
#[test]
fn a_checkpoint_that_cannot_be_written_ends_no_run() {
    let place = Place::with_plan();
    std::fs::create_dir(place.path("state")).unwrap();
    let args = [
        "--steps",
        "100000000",
        "-o",
        "run.json",
        "--checkpoint",
        "state",
    ];
    let every = ["--checkpoint-every", "1", "--checkpoints-kept", "3"];
    let child = command(&place, &[&RUN[..], &args, &every].concat())
        .begin()
        .unwrap();
    let kept = || std::fs::read_dir(place.path("state")).map_or(0, Iterator::count);
    let began = Instant::now();
    while kept() < 3 {
        assert!(began.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(5));
    }
    // The folder is gone: no checkpoint can be begun in it.
    std::fs::rename(place.path("state"), place.path("elsewhere")).unwrap();
    std::fs::write(place.path("state"), "a file").unwrap();
    std::thread::sleep(Duration::from_millis(500));
    // Slurm's way to say that the time is nearly over.
    let id = child.id().to_string();
    assert!(
        Command::new("kill")
            .args(["-USR1", &id])
            .status()
            .unwrap()
            .success()
    );
    let output = child.wait_with_output().unwrap();
    let words = said(&output);
    assert!(words.contains("the run goes on"), "{words}");
    assert_eq!(output.status.code(), Some(3), "{words}");
    let lost = "state has no whole checkpoint of this run: its ";
    assert!(words.contains(lost), "{words}");
    assert!(words.contains(" steps are lost"), "{words}");
    // The measurement was written, and so were the earlier checkpoints.
    assert!(steps(&run_json(&place, "run.json")).len() > 3);
    let again = ["--steps", "1", "--resume", "elsewhere", "-o", "again.json"];
    place.run(&[&RUN[..], &again].concat()).expect(0);
}

/// A rank that hangs: the watchdog ends the run, and the records say who it was and where.
#[test]
fn a_rank_that_hangs_is_found_by_its_record() {
    let place = Place::with_plan();
    let args = ["--steps", "100000000", "--processes", "-o", "hung.json"];
    let patience = ["--time-out", "10", "--record", "records"];
    let child = command(&place, &[&RUN[..], &args, &patience].concat())
        .begin()
        .unwrap();
    let victim = process_of(&place, 3).to_string();
    let signal = |name: &str| {
        let sent = Command::new("kill").args([name, &victim]).status();
        assert!(sent.unwrap().success());
    };
    let doctor = || {
        let done = place
            .run(&["doctor", "plan.json", "records", "--json"])
            .expect(0);
        done.json()
    };
    let state = |said: &Value, rank: usize, what: &str| said["ranks"][rank][what].to_string();
    let stopped = || {
        signal("-STOP");
        std::thread::sleep(Duration::from_millis(500));
        doctor()
    };
    let mut hung = stopped();
    // One that is stopped where it has ended its step lets the others end theirs.
    let since = Instant::now();
    while (0..4).all(|rank| state(&hung, rank, "what") == "null") {
        assert!(since.elapsed() < Duration::from_secs(60), "{hung}");
        signal("-CONT");
        std::thread::sleep(Duration::from_millis(3));
        hung = stopped();
    }
    assert_eq!(hung["culprits"], serde_json::json!([3]), "{hung}");
    assert_eq!(state(&hung, 3, "process"), "\"stopped by a signal\"");
    let words = place.run(&["doctor", "plan.json", "records"]).expect(0);
    // Places are said in words, and in JSON by their names in the program.
    // Ranks that are all in one call wait for nobody.
    let mut places = (0..4).map(|rank| state(&hung, rank, "what"));
    let place_of = places.find(|place| place != "null").unwrap();
    assert!(place_of.contains(" template "), "{place_of}");
    let lines = support::flat(&words.out);
    for part in [" in ", "(template ", ", instruction "] {
        assert!(lines.contains(part), "`{part}` is not in: {lines}");
    }
    for jargon in [" template 0,", "send  ", "sends []", "receives []", "@["] {
        assert!(!lines.contains(jargon), "`{jargon}` is in: {lines}");
    }
    assert!(
        words.out.starts_with("rank3 kept the others waiting"),
        "{}",
        words.out
    );
    assert!(
        words.out.lines().all(|l| l.chars().count() <= 100),
        "{}",
        words.out
    );
    // The call that the others wait in is named by its number, unless it hangs in one itself.
    let owes = &hung["ranks"][3]["owes"];
    let owed = format!(
        "rank3 never came to call {} of step {}, which is instruction {} of its {}: ",
        owes["call"], owes["step"], owes["instruction"], owes["of"]
    );
    assert!(owes.is_null() || lines.contains(&owed), "{owes}: {lines}");
    // The run ends by itself and names the rank, though it cannot end its process by asking.
    let output = child.wait_with_output().unwrap();
    let words = said(&output);
    assert_eq!(output.status.code(), Some(6), "{words}");
    let flat: Vec<&str> = words.split_whitespace().collect();
    let flat = flat.join(" ").replace(" │ ", " ");
    assert!(
        flat.contains(&format!("rank3 is lost: process 3 (pid {victim} on ")),
        "{words}"
    );
    assert!(flat.contains("it does not answer"), "{words}");
    wait_for_none(&place, "hung.json");
    assert_eq!(state(&doctor(), 3, "process"), "\"gone\"");
    // A plan of another run, what is no record, beside which the others still say who it was, and a
    // folder without records.
    compile_another(&place);
    place
        .run(&["doctor", "other.json", "records"])
        .expect(3)
        .says(&["ran another plan than other.json"]);
    place.write("records/rank-1.record", "nonsense");
    let others = place.run(&["doctor", "plan.json", "records"]).expect(0);
    let lines = support::flat(&others.out);
    for part in [
        "The run itself found: rank3 is lost",
        "rank1 left a record that is damaged",
    ] {
        assert!(lines.contains(part), "`{part}` is not in: {lines}");
    }
    place
        .run(&["doctor", "plan.json", "."])
        .expect(3)
        .says(&["no records of ranks"]);
}

/// The findings of `doctor` about the last run of `plan.json`, by the folder beside `run.json`: its
/// words, and whom it names.
fn examined(place: &Place) -> (String, Value) {
    let args = ["doctor", "plan.json", "run.records"];
    let words = support::flat(&place.run(&args).expect(0).out);
    let json = place.run(&[&args[..], &["--json"]].concat()).expect(0);
    (words, json.json()["culprits"].clone())
}

fn send(name: &str, id: u32) {
    let sent = Command::new("kill").args([name, &id.to_string()]).status();
    assert!(sent.unwrap().success());
}

const UNASKED: [&str; 5] = ["--steps", "100000000", "--processes", "-o", "run.json"];

/// Records that nobody asked for, and what the run found itself, name the rank that was killed,
/// whichever it is and wherever it was, though all processes are gone by then.
#[test]
fn a_killed_rank_is_found_by_records_that_nobody_asked_for() {
    let place = Place::with_plan();
    let mut n_in_calls = 0;
    for (round, rank) in [1, 2, 3, 3, 2, 1].into_iter().enumerate() {
        let args = [&RUN[..], &UNASKED].concat();
        let child = command(&place, &args).begin().unwrap();
        // The folder is that of the round before until the run begins.
        let since = Instant::now();
        let victim = loop {
            let found = match place.exists("run.records") {
                true => process_in(&place, "run.records", rank, 20 + 3 * round as u32),
                false => 0,
            };
            if processes_of(&place, "run.json").contains(&found) {
                break found;
            }
            assert!(since.elapsed() < Duration::from_secs(60), "no new record");
            std::thread::sleep(Duration::from_millis(5));
        };
        send("-9", victim);
        let output = child.wait_with_output().unwrap();
        let words = said(&output);
        assert_eq!(output.status.code(), Some(6), "{words}");
        let lost = format!("rank{rank} is lost: process {rank} (pid {victim} on ");
        assert!(words.contains(&lost), "{words}");
        let place_of = format!("rank{rank}, in step ");
        assert!(words.contains(&place_of), "{words}");
        let is_in_call = words.contains(", instruction ");
        let is_between = words.contains("was between two steps");
        assert!(is_in_call || is_between, "{words}");
        n_in_calls += usize::from(is_in_call);
        let doctor = "`meshwright doctor plan.json run.records`";
        assert!(words.contains(doctor), "{words}");
        wait_for_none(&place, "run.json");
        let (words, culprits) = examined(&place);
        let found =
            format!("The run itself found: rank{rank} is lost (it was killed by signal 9).");
        assert!(words.starts_with(&found), "{words}");
        assert!(words.contains(", in step "), "{words}");
        assert_eq!(culprits, serde_json::json!([rank]), "{words}");
        // Without that, nobody is accused.
        std::fs::remove_file(place.path("run.records/verdict.json")).unwrap();
        let (words, culprits) = examined(&place);
        assert!(!words.contains("kept the others waiting"), "{words}");
        assert_eq!(culprits, serde_json::json!([]), "{words}");
    }
    assert!(n_in_calls > 0, "no rank was ever in an instruction");
}

/// Where process 0 is killed, those that are left write down that they lost it.
#[test]
fn the_loss_of_process_0_is_in_the_records() {
    let place = Place::with_plan();
    let mut child = command(&place, &[&RUN[..], &UNASKED].concat())
        .begin()
        .unwrap();
    process_in(&place, "run.records", 3, 20);
    child.kill().unwrap();
    // The words of those that are left, as they go to the same place.
    let output = child.wait_with_output().unwrap();
    let words = said(&output);
    wait_for_none(&place, "run.json");
    assert!(words.contains("rank0 is lost: process 0 (pid "), "{words}");
    assert!(words.contains(". rank0, in step "), "{words}");
    let doctor = "`meshwright doctor plan.json run.records` says where each rank was";
    assert!(words.contains(doctor), "{words}");
    assert!(!words.contains("PLAN RECORDS"), "{words}");
    let (words, culprits) = examined(&place);
    let found = "The run itself found: rank0 is lost (";
    assert!(words.starts_with(found), "{words}");
    assert_eq!(culprits, serde_json::json!([0]), "{words}");
}

/// A rank that hangs is named by the run and, after its end, by `doctor`, and both say where it
/// was.
#[test]
fn a_rank_that_hangs_is_found_after_the_end() {
    let place = Place::with_plan();
    let args = [&RUN[..], &UNASKED, &["--time-out", "2"]].concat();
    let child = command(&place, &args).begin().unwrap();
    let victim = process_in(&place, "run.records", 2, 20);
    send("-STOP", victim);
    let since = Instant::now();
    let output = child.wait_with_output().unwrap();
    let (words, took) = (said(&output), since.elapsed());
    assert!(took < Duration::from_secs(15), "{took:?}: {words}");
    assert_eq!(output.status.code(), Some(6), "{words}");
    let lost = format!("rank2 is lost: process 2 (pid {victim} on ");
    assert!(words.contains(&lost), "{words}");
    assert!(
        words.contains("it does not answer. rank2, in step "),
        "{words}"
    );
    wait_for_none(&place, "run.json");
    let (words, culprits) = examined(&place);
    let found = "The run itself found: rank2 is lost (it does not answer).";
    assert!(words.starts_with(found), "{words}");
    assert_eq!(culprits, serde_json::json!([2]), "{words}");
}

/// A process 0 that a signal has stopped is named by the others, which end it with the run: whoever
/// waits for the command would wait for good. `doctor` says where it was.
#[test]
fn a_process_0_that_hangs_is_ended_with_the_run() {
    let place = Place::with_plan();
    let args = [&RUN[..], &UNASKED, &["--time-out", "2"]].concat();
    let child = command(&place, &args).begin().unwrap();
    process_in(&place, "run.records", 2, 20);
    send("-STOP", child.id());
    let since = Instant::now();
    let output = child.wait_with_output().unwrap();
    let (words, took) = (said(&output), since.elapsed());
    assert!(took < Duration::from_secs(30), "{took:?}: {words}");
    assert_eq!(output.status.signal(), Some(9), "{words}");
    wait_for_none(&place, "run.json");
    assert!(words.contains("rank0 is lost: process 0 (pid "), "{words}");
    assert!(
        words.contains("it does not answer. rank0, in step "),
        "{words}"
    );
    let (words, culprits) = examined(&place);
    let found = "The run itself found: rank0 is lost (it does not answer).";
    assert!(words.starts_with(found), "{words}");
    assert_eq!(culprits, serde_json::json!([0]), "{words}");
}

/// The same while they meet: those that it has started give up after 20 seconds, and end it.
#[test]
fn a_process_0_that_is_stopped_while_all_meet_is_ended() {
    let place = Place::with_plan();
    let args = [&RUN[..], &UNASKED, &["--time-out", "2"]].concat();
    let child = command(&place, &args).begin().unwrap();
    let since = Instant::now();
    // This one and the first that it starts.
    while processes_of(&place, "run.json").len() < 2 {
        assert!(since.elapsed() < Duration::from_secs(60), "it starts none");
        std::thread::sleep(Duration::from_millis(1));
    }
    send("-STOP", child.id());
    let output = child.wait_within(Duration::from_secs(90)).unwrap();
    let (words, took) = (said(&output), since.elapsed());
    assert_eq!(output.status.signal(), Some(9), "{took:?}: {words}");
    assert!(took < Duration::from_secs(60), "{took:?}: {words}");
    assert!(words.contains("process 0"), "{words}");
    wait_for_none(&place, "run.json");
}

/// The folder that nobody asked for goes with a run that ends well, after losses too, and takes
/// nothing with it that is not of a run. Where there can be none, the run does without.
#[test]
fn a_run_that_ends_well_leaves_no_records() {
    let place = Place::with_plan();
    fn run<'a>(flags: &[&'a str]) -> Vec<&'a str> {
        [&RUN[..], &["-o", "run.json"], flags].concat()
    }
    let few = ["--steps", "3"];
    place.run(&run(&few)).expect(0);
    place
        .run(&run(&[&few[..], &["--processes"]].concat()))
        .expect(0);
    assert!(!place.exists("run.records"));
    // Nor does one whose processes do not come together.
    place.run(&run(&["--processes=5"])).expect(2);
    assert!(!place.exists("run.records"));
    // Those of an earlier run, and somebody else's files, one of them of TensorFlow's.
    std::fs::create_dir(place.path("run.records")).unwrap();
    place.write(
        "run.records/rank-9.record",
        b"mshrec\0\x01 of a build before",
    );
    place.write("run.records/rank-8.record", "nonsense");
    place.write("run.records/train.record", "mine");
    place
        .run(&run(&[&few[..], &["--processes=2"]].concat()))
        .expect(0);
    assert_eq!(
        place.names_in("run.records"),
        ["rank-8.record", "train.record"]
    );
    std::fs::remove_dir_all(place.path("run.records")).unwrap();
    // No folder can be made where a file is.
    place.write("run.records", "a file");
    let done = place
        .run(&run(&[&few[..], &["--processes=2"]].concat()))
        .expect(0);
    let words = support::flat(&done.err);
    assert!(words.contains("warning: no records of ranks"), "{words}");
    assert_eq!(place.read("run.records"), b"a file");
    std::fs::remove_file(place.path("run.records")).unwrap();
    // A loss does not end an elastic run.
    let state = ["--checkpoint", "state", "--checkpoint-every", "20"];
    let more = ["--steps", "400", "--processes", "--elastic"];
    let child = command(&place, &run(&[&more[..], &state].concat())).begin();
    let child = child.unwrap();
    send("-9", process_in(&place, "run.records", 2, 20));
    let output = child.wait_with_output().unwrap();
    let words = said(&output);
    assert_eq!(output.status.code(), Some(0), "{words}");
    assert!(words.contains("lost: rank2 is lost"), "{words}");
    assert!(words.contains("rank2, in step "), "{words}");
    let held_up = "note: the loss has held the run up for ";
    assert_eq!(words.matches(held_up).count(), 1, "{words}");
    let aside = "run.records/before-loss-1, until the run is done (--record DIR keeps them)";
    assert!(words.contains(aside), "{words}");
    assert!(!place.exists("run.records"), "{words}");
    wait_for_none(&place, "run.json");
}

/// Records that were asked for and cannot be begun end the run before its first step, by the name
/// of the file; without those that nobody asked for it goes on.
#[test]
fn records_that_were_asked_for_are_written_or_said() {
    let place = Place::with_plan();
    // Of process 0, and of another one.
    for (rank, file) in [(0, "mine/rank-0.record"), (3, "mine/rank-3.record")] {
        std::fs::create_dir_all(place.path(file)).unwrap();
        for (processes, code) in [
            (&[][..], 3),
            (&["--processes=2"], if rank == 0 { 3 } else { 6 }),
        ] {
            let few = ["--steps", "2", "-o", "run.json", "--record", "mine"];
            let done = place
                .run(&[&RUN[..], &few, processes].concat())
                .expect(code);
            done.says(&[file]);
            assert!(!place.exists("run.json"));
        }
        std::fs::remove_dir_all(place.path("mine")).unwrap();
    }
    std::fs::create_dir_all(place.path("run.records/rank-3.record")).unwrap();
    let few = ["--steps", "2", "-o", "run.json", "--processes=2"];
    place.run(&[&RUN[..], &few].concat()).expect(0);
}

/// Lets processes go on for three of seven milliseconds, which is about half of their speed, from
/// when it is made until it is dropped.
struct Slowed(Arc<AtomicBool>, Option<JoinHandle<()>>);

impl Slowed {
    fn these(ids: &[u32]) -> Self {
        let ids: Vec<Pid> = ids
            .iter()
            .map(|id| Pid::from_raw(id.cast_signed()).unwrap())
            .collect();
        let is_over = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&is_over);
        let thread = std::thread::spawn(move || {
            let all = |signal, milliseconds| {
                for id in &ids {
                    kill_process(*id, signal).unwrap();
                }
                std::thread::sleep(Duration::from_millis(milliseconds));
            };
            while !seen.load(Ordering::Relaxed) {
                all(Signal::STOP, 4);
                all(Signal::CONT, 3);
            }
        });
        Slowed(is_over, Some(thread))
    }
}

impl Drop for Slowed {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        let _ = self.1.take().map(JoinHandle::join);
    }
}

/// The words of a run, line by line, and how many steps its metrics have.
struct Watched<'a> {
    place: &'a Place,
    lines: Receiver<String>,
    said: Vec<String>,
}

impl Watched<'_> {
    fn steps(&self) -> usize {
        let rows = std::fs::read_to_string(self.place.path("slow.csv"));
        rows.unwrap_or_default().lines().count().saturating_sub(1)
    }
    /// Waits until so many more steps are done and four seconds are over, in which there are four
    /// windows of them, or something is said with one of these words: which one, and after how many
    /// steps.
    fn hears(&mut self, steps: usize, words: &[&str]) -> (Option<usize>, usize) {
        let (before, since) = (self.steps(), Instant::now());
        loop {
            let n = self.steps() - before;
            while let Ok(line) = self.lines.try_recv() {
                self.said.push(line.clone());
                if let Some(found) = words.iter().position(|w| line.contains(w)) {
                    return (Some(found), n);
                }
            }
            if n >= steps && since.elapsed() > Duration::from_secs(4) {
                return (None, n);
            }
            let is_slow = since.elapsed() > Duration::from_secs(60);
            assert!(!is_slow, "{n} of {steps} steps: {:#?}", self.said);
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Seconds of processors that have been in use on this machine, and those of these processes.
fn in_use(ids: &[u32]) -> [f64; 2] {
    // The unit of both: clock ticks of a hundredth of a second.
    let numbers = |path: String, from: usize, n: usize| -> f64 {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let line = text.lines().next().unwrap_or_default();
        let line = line.rsplit_once(") ").map_or(line, |l| l.1);
        let ticks = line.split_whitespace().skip(from).take(n);
        ticks.filter_map(|t| t.parse::<f64>().ok()).sum::<f64>() / 100.0
    };
    // Of the machine: user, nice and system; steal.
    let all = numbers("/proc/stat".into(), 1, 3) + numbers("/proc/stat".into(), 8, 1);
    let of = |id: &u32| numbers(format!("/proc/{id}/stat"), 11, 2);
    [all, ids.iter().map(of).sum()]
}

/// Processors that other work of this machine may take, on the average of a test: this one's own
/// thread takes some hundredths of one.
const MOST_OF_OTHERS: f64 = 0.15;

/// A processor that becomes slow is named within three windows of steps, and when it is slow no
/// more that is said within two; where all are slow alike nobody is named.
#[test]
fn a_process_at_half_its_speed_is_named_until_it_has_all_again() {
    if std::env::var("RUN_SLOW_TESTS").is_err() {
        eprintln!("skipped: RUN_SLOW_TESTS is not set");
        return;
    }
    let place = Place::new();
    // Steps are longer than a process is stopped at a time.
    let larger = CONFIG
        .replace("\"n_embd\": 16", "\"n_embd\": 64")
        .replace("\"n_positions\": 16", "\"n_positions\": 64");
    place.write("config.json", larger);
    let compile = ["compile", "config.json", "--cluster", "cpu-default"];
    let pins = ["--ranks", "2", "--global-batch", "8", "--pin", "data=2"];
    place.run(&[&compile[..], &pins].concat()).expect(0);
    let more = ["--steps", "100000000", "--processes", "-o", "slow.json"];
    let watched = ["--metrics", "slow.csv", "--record", "records"];
    let args = [&RUN[..], &more, &watched].concat();
    let mut child = command(&place, &args).begin().unwrap();
    let ids = [child.id(), process_of(&place, 1)];
    let (tell, lines) = channel();
    let words = BufReader::new(child.stderr.take().unwrap());
    std::thread::spawn(move || {
        words
            .lines()
            .map_while(Result::ok)
            .try_for_each(|line| tell.send(line))
    });
    let mut run = Watched {
        place: &place,
        lines,
        said: Vec::new(),
    };
    let findings = ["rank1 works", "rank0 works", "all ranks wait"];
    let (before, since) = (in_use(&ids), Instant::now());
    // A window to become warm, and one to compare with.
    let quiet = run.hears(45, &findings);
    let alike = {
        let _all = Slowed::these(&ids);
        run.hears(60, &findings)
    };
    let between = run.hears(40, &findings);
    let named = {
        let _one = Slowed::these(&ids[1..]);
        run.hears(80, &findings)
    };
    let over = run.hears(60, &["rank1 is as fast as the others again"]);
    let ([all, own], seconds) = (in_use(&ids), since.elapsed().as_secs_f64());
    let others = ((all - before[0]) - (own - before[1])) / seconds;
    child.kill().unwrap();
    child.wait().unwrap();
    wait_for_none(&place, "slow.json");
    let all = format!(
        "quiet {quiet:?} alike {alike:?} between {between:?} named {named:?} over {over:?}, others' work: {others:.2} processors, {:#?}",
        run.said
    );
    println!("{all}");
    // Whatever else the machine does: the run has gone on all the while to the same bits, and
    // nobody is as fast again who was not said to be slow.
    let losses = |name: &str| -> Vec<String> {
        let text = String::from_utf8(place.read(name)).unwrap();
        let loss = |row: &str| row.split(',').take(3).collect::<Vec<_>>().join(",");
        text.lines().skip(1).map(loss).collect()
    };
    let slow = losses("slow.csv");
    let n_seen = quiet.1 + alike.1 + between.1 + named.1 + over.1;
    assert!(
        slow.len() >= n_seen && n_seen > 0,
        "{} rows: {all}",
        slow.len()
    );
    // The last row may be a part of one.
    let slow = &slow[..slow.len() - 1];
    let n = slow.len().to_string();
    let undisturbed = ["--steps", &n, "--metrics", "alone.csv", "-o", "alone.json"];
    place.run(&[&RUN[..], &undisturbed].concat()).expect(0);
    assert_eq!(slow, losses("alone.csv"));
    for rank in ["rank0", "rank1"] {
        let at = |words: &str| {
            let words = format!("{rank} {words}");
            run.said.iter().position(|line| line.contains(&words))
        };
        if let Some(again) = at("is as fast as the others again") {
            assert!(at("works ").is_some_and(|slow| slow < again), "{all}");
        }
    }
    // On a machine with other work no processor can be told from another one.
    let is_busy = run.said.iter().any(|line| line.contains("the host busy"));
    if is_busy || others > MOST_OF_OTHERS {
        println!("not told: this machine has other work");
    } else {
        assert_eq!((quiet.0, alike.0, between.0), (None, None, None), "{all}");
        assert_eq!((named.0, over.0), (Some(0), Some(0)), "{all}");
    }
}
