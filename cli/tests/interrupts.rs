//! Ctrl-C while training: the steps done are kept.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod support;

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use support::{Begin, Place, Running, Two, processes_of, said};

/// Where a run has the records of its ranks.
const RECORDS: &str = "seen";

/// A run of very many steps of `plan.json`, once it makes them, or validates before.
fn start(place: &Place, more: &[&str]) -> Running {
    let child = Command::new(env!("CARGO_BIN_EXE_meshwright"))
        .args(["run", "plan.json", "--data", "text.txt"])
        .args(["--steps", "100000000", "-o", "run.json"])
        .args(["--record", RECORDS])
        .args(more)
        .current_dir(place.path("."))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .begin()
        .unwrap();
    let begun = Instant::now();
    // Scripts that a rank has begun by its record.
    let plays = || {
        let path = place.path(&format!("{RECORDS}/rank-0.record"));
        let seen = runtime::record::at(&path).ok()??;
        // Of this run, and not of one before it.
        (seen.pid == child.id()).then_some(seen.plays)
    };
    while plays().is_none_or(|n| n < 4) {
        assert!(begun.elapsed() < Duration::from_secs(60), "no step is made");
        std::thread::sleep(Duration::from_millis(10));
    }
    child
}

/// Returns once a search waits for interrupts.
fn wait_until_it_waits(child: &Running) {
    let status = format!("/proc/{}/status", child.id());
    let begun = Instant::now();
    let caught = || {
        let status = std::fs::read_to_string(&status).unwrap();
        let line = status.lines().find(|l| l.starts_with("SigCgt:")).unwrap();
        let mask = u64::from_str_radix(line["SigCgt:".len()..].trim(), 16).unwrap();
        // Signal 2, SIGINT, is bit 1.
        mask & 2 != 0
    };
    while !caught() {
        assert!(begun.elapsed() < Duration::from_secs(60), "it never waits");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn interrupt(child: &Running) {
    let id = child.id().to_string();
    let sent = Command::new("kill").args(["-INT", &id]).status();
    assert!(sent.unwrap().success());
}

#[test]
fn an_interrupted_run_keeps_the_steps_done() {
    let place = Place::with_plan();
    let child = start(&place, &["--checkpoint", "state"]);
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    let said = said(&output);
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(
        said.contains("interrupted: ending after this step"),
        "{said}"
    );
    assert!(said.contains("--resume state --steps"), "{said}");
    let run: serde_json::Value = serde_json::from_slice(&place.read("run.json")).unwrap();
    let steps = run["steps"].as_array().unwrap().len();
    assert!(steps > 0);
    let counted = format!("interrupted after {steps} of 100000000 steps");
    assert!(said.contains(&counted), "{said}");
    // The checkpoint is of the same step as the measurement.
    let resume = ["--steps", "1", "--resume", "state", "-o", "next.json"];
    let args = [&["run", "plan.json", "--data", "text.txt"][..], &resume];
    place.run(&args.concat()).expect(0);
    let next: serde_json::Value = serde_json::from_slice(&place.read("next.json")).unwrap();
    assert_eq!(next["steps"][0]["step"], steps);
    // Both documents are measurements that other verbs read.
    place.run(&["compare", "plan.json", "run.json"]).expect(0);
}

/// Slurm says by SIGUSR1 that the time is nearly over, and by SIGTERM that it is: the second is no
/// second interrupt, and the run still writes what there is.
#[test]
fn a_signal_after_a_warning_is_a_first_interrupt() {
    let place = Place::with_plan();
    let child = start(&place, &["--checkpoint", "state"]);
    let both = format!("kill -USR1 {0}; kill -TERM {0}", child.id());
    let sent = Command::new("sh").args(["-c", &both]).status();
    assert!(sent.unwrap().success());
    let output = child.wait_with_output().unwrap();
    let said = said(&output);
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(said.contains("--resume state --steps"), "{said}");
    assert!(place.exists("run.json"), "{said}");
}

/// A launcher may ask all processes to end, and its agent its own once more: that is one request.
#[test]
fn a_signal_right_behind_another_is_the_same_interrupt() {
    let place = Place::with_plan();
    let child = start(&place, &["--checkpoint", "state"]);
    let both = format!("kill -TERM {0}; sleep 0.01; kill -TERM {0}", child.id());
    let sent = Command::new("sh").args(["-c", &both]).status();
    assert!(sent.unwrap().success());
    let output = child.wait_with_output().unwrap();
    let said = said(&output);
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(said.contains("--resume state --steps"), "{said}");
    assert!(place.exists("run.json"), "{said}");
}

/// As batch systems do, and as a terminal does: process 0 heeds a signal that all are sent, and the
/// run ends in order.
#[test]
fn a_signal_to_all_processes_of_a_run_is_one_interrupt() {
    for name in ["-TERM", "-INT", "-USR1"] {
        let place = Place::with_plan();
        let run = Two::start(&place, &["--checkpoint", "state"]);
        run.signal(name, &[run.second, run.first.id()]);
        let output = run.ended(&place);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(130), "{name}: {said}");
        assert!(!said.contains("lost"), "{name}: {said}");
        assert!(place.exists("two.json"), "{name}: {said}");
        let resume = ["--steps", "1", "--resume", "state", "-o", "next.json"];
        let args = [&["run", "plan.json", "--data", "text.txt"][..], &resume].concat();
        place.run(&args).expect(0);
    }
}

/// A process that does not heed SIGTERM, as it is stopped, is let go on for the last step: the run
/// ends in order, long before `--time-out`, and writes what there is.
#[test]
fn a_stopped_process_is_let_go_on_to_the_end() {
    let place = Place::with_plan();
    let state = ["--checkpoint", "state", "--checkpoint-every", "2"];
    let run = Two::start(&place, &[&state[..], &["--time-out", "1000"]].concat());
    run.signal("-STOP", &[run.second]);
    run.signal("-TERM", &[run.first.id(), run.second]);
    let output = run.ended(&place);
    let said = said(&output);
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(said.contains("interrupted after "), "{said}");
    assert!(!said.contains("lost"), "{said}");
    let run: serde_json::Value = serde_json::from_slice(&place.read("two.json")).unwrap();
    let steps = run["steps"].as_array().unwrap().len();
    let newest = place.names_in("state").pop().unwrap();
    assert!(newest.ends_with(&format!("-step-{steps}")), "{newest}");
    place.run(&["checkpoint", "verify", "state"]).expect(0);
}

/// When a process was started, by the system's clock; nothing where there is none of this number.
fn started(pid: u32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Behind the name, which may have any characters, stand 19 fields before this one.
    let (_, rest) = stat.rsplit_once(") ")?;
    rest.split(' ').nth(19).map(String::from)
}

/// A process that hangs all the same: after `--time-out` it is given up and killed. The run was
/// asked to end, and its exit code says so; the words say whom it lost. The checkpoints that were
/// there stay whole.
#[test]
fn a_process_that_hangs_does_not_keep_a_run_from_its_end() {
    let place = Place::with_plan();
    let state = ["--checkpoint", "state", "--checkpoint-every", "2"];
    let run = Two::start(&place, &[&state[..], &["--time-out", "2"]].concat());
    let begun = Instant::now();
    while place
        .names_in("state")
        .iter()
        .all(|n| !n.contains("-step-"))
    {
        assert!(begun.elapsed() < Duration::from_secs(60), "no checkpoint");
        std::thread::sleep(Duration::from_millis(10));
    }
    let (second, is_over) = (run.second, Arc::new(AtomicBool::new(false)));
    let started = started(second);
    assert!(started.is_some(), "the second process has ended");
    // Whoever lets it go on, it stops again at once.
    let hangs = std::thread::spawn({
        let is_over = Arc::clone(&is_over);
        let pid = rustix::process::Pid::from_raw(second.cast_signed()).unwrap();
        move || {
            // Its number may be another process' once it has ended.
            while !is_over.load(Ordering::Relaxed) && self::started(second) == started {
                // It may have been killed by now.
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::STOP);
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    });
    std::thread::sleep(Duration::from_millis(50));
    run.signal("-TERM", &[run.first.id()]);
    let output = run.ended(&place);
    is_over.store(true, Ordering::Relaxed);
    hangs.join().unwrap();
    let said = said(&output);
    assert_eq!(output.status.code(), Some(130), "{said}");
    // Now and then it does its part of the step before it is stopped again.
    let is_in_order = said.contains("interrupted after ");
    let is_named = said.contains(&format!("(pid {second} on "));
    let is_told = said.contains("interrupted, and the run did not end in order: ");
    assert!(is_in_order || is_told && is_named, "{said}");
    place.run(&["checkpoint", "verify", "state"]).expect(0);
}

/// A process that ends by itself, by a failed check of a library or a wrong address, is told from
/// one that somebody killed.
#[test]
fn a_process_that_aborts_or_breaks_is_named_with_its_signal() {
    for (name, number) in [("-ABRT", 6), ("-SEGV", 11)] {
        let place = Place::with_plan();
        let run = Two::start(&place, &[]);
        let (second, begun) = (run.second, Instant::now());
        // Rust's handler for stacks that are full takes the first SIGSEGV, and lets the next ones
        // be.
        while processes_of(&place, "two.json").contains(&second) {
            assert!(begun.elapsed() < Duration::from_secs(30), "it goes on");
            // It may have ended by now.
            let _ = Command::new("kill")
                .args([name, &second.to_string()])
                .status();
            std::thread::sleep(Duration::from_millis(50));
        }
        let output = run.ended(&place);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(6), "{name}: {said}");
        assert!(
            said.contains(&format!("(pid {second} on ")),
            "{name}: {said}"
        );
        let how = format!("it was killed by signal {number}");
        assert!(said.contains(&how), "{name}: {said}");
        assert!(!place.exists("two.json"), "{name}");
    }
}

/// The validation before the first step goes on for ever.
#[test]
fn a_second_interrupt_ends_a_run_at_once() {
    let place = Place::with_plan();
    let endless = ["--validate-every", "1", "--validation-batches", "100000000"];
    let before = place.names();
    let checkpoint = ["--checkpoint", "state"];
    let save = ["--save", "weights.safetensors", "--config", "config.json"];
    for outputs in [&checkpoint[..], &save] {
        let child = start(&place, &[&endless[..], outputs].concat());
        let mut child = child;
        interrupt(&child);
        let begun = Instant::now();
        // On a busy machine the first may be heard of late, and the next be the same one then.
        while child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(700));
            let id = child.id().to_string();
            let _ = Command::new("kill").args(["-INT", &id]).output();
            assert!(begun.elapsed() < Duration::from_secs(20));
        }
        let output = child.wait_with_output().unwrap();
        assert!(begun.elapsed() < Duration::from_secs(20));
        assert_eq!(output.status.code(), Some(130), "{}", said(&output));
        assert!(!place.exists("run.json"));
        if place.exists("state") {
            let kept = std::fs::read_dir(place.path("state")).unwrap().count();
            assert_eq!(kept, 0);
        }
        // Nothing is left of what was there for a while: `state` is the folder asked for.
        let mut after = place.names();
        after.retain(|name| name != "state" && name != RECORDS);
        assert_eq!(after, before);
    }
}

/// A run that `nohup` starts outlives the terminal; all others end with it, in order.
#[test]
fn a_hangup_is_an_interrupt_unless_it_is_ignored() {
    let place = Place::with_plan();
    let child = start(&place, &["--checkpoint", "state"]);
    let id = child.id().to_string();
    let sent = Command::new("kill").args(["-HUP", &id]).status();
    assert!(sent.unwrap().success());
    let output = child.wait_with_output().unwrap();
    let words = said(&output);
    assert_eq!(output.status.code(), Some(130), "{words}");
    assert!(words.contains("interrupted after "), "{words}");
    for more in [&[][..], &["--processes=2"], &["--processes=2", "--elastic"]] {
        let args = ["run", "plan.json", "--data", "text.txt", "--steps", "3000"];
        let out = [
            "-o",
            "kept.json",
            "--checkpoint",
            "kept",
            "--checkpoint-every",
            "5000",
        ];
        let _ = std::fs::remove_dir_all(place.path("kept"));
        let _ = std::fs::remove_file(place.path("kept.csv"));
        let _ = std::fs::remove_file(place.path("kept.json"));
        let child = Command::new("sh")
            .args(["-c", "trap '' HUP; exec \"$0\" \"$@\""])
            .arg(env!("CARGO_BIN_EXE_meshwright"))
            .args([&args[..], &out, &["--metrics", "kept.csv"], more].concat())
            .current_dir(place.path("."))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .begin()
            .unwrap();
        let begun = Instant::now();
        let rows =
            || std::fs::read_to_string(place.path("kept.csv")).map_or(0, |t| t.lines().count());
        while rows() < 3 {
            assert!(begun.elapsed() < Duration::from_secs(60), "no step is done");
            std::thread::sleep(Duration::from_millis(10));
        }
        for id in processes_of(&place, "kept.json") {
            let _ = Command::new("kill")
                .args(["-HUP", &id.to_string()])
                .status();
        }
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    }
}

/// A search of about a minute on two cores.
fn search(place: &Place, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_meshwright"));
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/moe-1t");
    command
        .args(["compile", model, "--cluster", "dgx-h100", "--hosts", "256"])
        .args(["--global-batch", "2048", "--sequence", "4096"])
        .args(["--precision", "bf16", "-o", "plan.json"])
        .args(more)
        .current_dir(place.path("."))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Asserts that a search was ended early and wrote a plan that holds, and says that it was.
fn is_early(place: &Place, output: &Output) {
    assert_eq!(output.status.code(), Some(0), "{}", said(output));
    let plan: serde_json::Value = serde_json::from_slice(&place.read("plan.json")).unwrap();
    assert_eq!(plan["proof"]["stopped"], true);
    let words = String::from_utf8_lossy(&output.stdout);
    let words: Vec<&str> = words.split_whitespace().collect();
    let words = words.join(" ");
    assert!(words.contains("ended early"), "{words}");
    place.run(&["check", "plan.json"]).expect(0);
}

#[test]
fn an_interrupted_search_gives_the_best_plan_so_far() {
    let place = Place::new();
    let child = search(&place, &[]).begin().unwrap();
    wait_until_it_waits(&child);
    std::thread::sleep(Duration::from_secs(2));
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    assert!(said(&output).contains("interrupted: taking the best plan"));
    is_early(&place, &output);
}

/// A search that `nohup` has started goes on when its terminal is closed; any other one takes what
/// it has, as by Ctrl-C.
#[test]
fn a_hangup_ends_a_search_unless_it_is_ignored() {
    let place = Place::new();
    let ignores = |ignores: bool| {
        let found = search(&place, &["--time-limit", "6"]);
        let mut command = Command::new("sh");
        let trap = if ignores { "trap '' HUP; " } else { "" };
        command
            .args(["-c", &format!("{trap}exec \"$0\" \"$@\"")])
            .arg(found.get_program())
            .args(found.get_args())
            .current_dir(place.path("."))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let begun = Instant::now();
        let child = command.begin().unwrap();
        wait_until_it_waits(&child);
        std::thread::sleep(Duration::from_secs(1));
        // A second one would end it at once.
        for _ in 0..2 {
            let id = child.id().to_string();
            let sent = Command::new("kill").args(["-HUP", &id]).status();
            assert!(sent.unwrap().success());
            if !ignores {
                break;
            }
            std::thread::sleep(Duration::from_millis(700));
        }
        let output = child.wait_with_output().unwrap();
        is_early(&place, &output);
        (said(&output), begun.elapsed())
    };
    let (words, took) = ignores(true);
    assert!(!words.contains("interrupted"), "{words}");
    assert!(took >= Duration::from_secs(6), "{took:?}: {words}");
    let (words, _) = ignores(false);
    assert!(
        words.contains("interrupted: taking the best plan"),
        "{words}"
    );
}

#[test]
fn a_search_takes_the_time_that_it_is_given() {
    let place = Place::new();
    let output = search(&place, &["--time-limit", "1"]).output().unwrap();
    is_early(&place, &output);
}

/// A search that was interrupted once it waited.
fn interrupted(place: &Place, words: &[&str]) -> (String, Output) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_meshwright"));
    let command = command.args(words).current_dir(place.path("."));
    let child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .begin()
        .unwrap();
    wait_until_it_waits(&child);
    std::thread::sleep(Duration::from_secs(1));
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let words = String::from_utf8_lossy(&output.stdout);
    (
        words.split_whitespace().collect::<Vec<_>>().join(" "),
        output,
    )
}

/// Searches of about a minute each, of which the first is under way.
const LONG: [&str; 8] = [
    "--global-batch",
    "2048",
    "--sequence",
    "4096",
    "--precision",
    "bf16",
    "--cluster",
    "dgx-h100",
];

#[test]
fn an_interrupted_sweep_shows_the_points_that_are_there() {
    let place = Place::new();
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/moe-1t");
    let sweep = ["sweep", model, "--hosts", "256,128,64", "--csv", "s.csv"];
    let (words, output) = interrupted(&place, &[&sweep[..], &LONG].concat());
    assert!(said(&output).contains("interrupted: ending with the points that are there"));
    assert!(
        words.contains("Ended early: 1 of 3 points were searched"),
        "{words}"
    );
    assert_eq!(
        String::from_utf8(place.read("s.csv"))
            .unwrap()
            .lines()
            .count(),
        2
    );
}

/// SIGTERM ends `fits` at once, though a search that has no plan heeds nobody before its end, and
/// says what was tried.
#[test]
fn an_interrupted_search_for_the_smallest_number_of_devices_says_what_was_tried() {
    let place = Place::new();
    let mut command = Command::new(env!("CARGO_BIN_EXE_meshwright"));
    // Longer than a test is on 16 devices, on which there is no plan, and the next numbers.
    let fits = ["fits", "llama-3.1-70b", "--device", "dgx-a100-80gb"];
    let train = ["--global-batch", "256", "--sequence", "4096"];
    let mut child = command
        .args([&fits[..], &train, &["--precision", "bf16"]].concat())
        .current_dir(place.path("."))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .begin()
        .unwrap();
    wait_until_it_waits(&child);
    // A line about the search comes every ten seconds.
    let (tell, lines) = std::sync::mpsc::channel();
    let words = BufReader::new(child.stderr.take().unwrap());
    std::thread::spawn(move || {
        let mut lines = words.lines().map_while(Result::ok);
        lines.try_for_each(|line| tell.send(line))
    });
    let mut said = Vec::new();
    while !said.iter().any(|line: &String| line.contains("trying ")) {
        said.push(lines.recv_timeout(Duration::from_secs(120)).unwrap());
    }
    let asked = Instant::now();
    let id = child.id().to_string();
    let sent = Command::new("kill").args(["-TERM", &id]).status();
    assert!(sent.unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert!(asked.elapsed() < Duration::from_secs(10));
    said.extend(lines);
    let said = support::flat(&said.join("\n"));
    assert_eq!(output.status.code(), Some(130), "{said}");
    for words in [
        "interrupted: ending with the numbers of devices that were tried",
        " were searched",
    ] {
        assert!(said.contains(words), "`{words}` is not in: {said}");
    }
    // As far as the machine has come by then.
    let so_far = match said.contains("interrupted while 16 devices") {
        true => "no number was tried to the end",
        false if said.contains("the smallest number is found") => "",
        false => "tried so far: 16 devices: no plan",
    };
    assert!(said.contains(so_far), "{said}");
}

/// A terminal sends Ctrl-C to all processes of a run, which may be about to meet: no rank is lost by
/// that, and nothing is left.
#[test]
fn an_interrupt_of_all_processes_as_they_meet_is_no_loss() {
    let place = Place::with_plan();
    let before = place.names();
    let mut n_heeded = 0;
    for moment in (0..16).map(|n| 10 * n) {
        let args = [
            "run",
            "plan.json",
            "--data",
            "text.txt",
            "--steps",
            "100000000",
        ];
        let more = ["--processes", "--checkpoint", "state", "-o", "early.json"];
        let child = Command::new(env!("CARGO_BIN_EXE_meshwright"))
            .args([&args[..], &more].concat())
            .current_dir(place.path("."))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .begin()
            .unwrap();
        let began = Instant::now();
        while processes_of(&place, "early.json").len() < 4 {
            assert!(began.elapsed() < Duration::from_secs(60), "no processes");
            std::thread::sleep(Duration::from_millis(2));
        }
        std::thread::sleep(Duration::from_millis(moment));
        let group = rustix::process::Pid::from_raw(child.id().cast_signed()).unwrap();
        rustix::process::kill_process_group(group, rustix::process::Signal::INT).unwrap();
        let output = child.wait_with_output().unwrap();
        let words = said(&output);
        assert_eq!(output.status.code(), Some(130), "{moment}: {words}");
        assert!(!words.contains("is lost"), "{moment}: {words}");
        assert!(!words.contains("run failed"), "{moment}: {words}");
        let has_begun = words.contains("interrupted after ");
        n_heeded += usize::from(!has_begun);
        let is_of_it = |name: &String| has_begun && (name == "early.json" || name == "state");
        let left: Vec<String> = place.names().into_iter().collect();
        let left = left
            .into_iter()
            .filter(|n| !before.contains(n) && !is_of_it(n));
        let left: Vec<String> = left.collect();
        assert!(left.is_empty(), "{moment}: {left:?} {words}");
        for of_it in ["early.json", "state"] {
            let _ = std::fs::remove_file(place.path(of_it));
            let _ = std::fs::remove_dir_all(place.path(of_it));
        }
    }
    assert!(n_heeded > 0, "no run was interrupted before its first step");
}
