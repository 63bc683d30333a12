//! Launchers that are killed.

use super::*;

/// A run that is not over before its test is, of few words: nobody may read them before it ends.
const LONG: [&str; 8] = [
    "--steps",
    "100000000",
    "--log-every",
    "60",
    "--checkpoint",
    "state",
    "-o",
    "run.json",
];
/// Longest that processes may go on without their launcher: a step and a checkpoint, on a machine
/// with other work.
const SECONDS: Duration = Duration::from_secs(15);

/// The variable that torchrun alone sets, in its processes.
const MARK: &str = "TORCHELASTIC_RUN_ID=of-test";

/// A shell that starts the processes of these numbers as torchrun would, of so many, and waits for
/// them.
fn shell(place: &Place, ranks: &str, of: &str, more: &[&str]) -> Command {
    let script = "for r in $RANKS; do env RANK=$r $WITH \"$0\" \"$@\" & done; wait";
    let mut command = Command::new("sh");
    command
        .args(["-c", script, env!("CARGO_BIN_EXE_meshwright")])
        .args([&RUN[..], &LONG, more].concat())
        .current_dir(place.path("."))
        .env("TMPDIR", place.path("."))
        .env_remove("XDG_RUNTIME_DIR")
        .envs([("RANKS", ranks), ("WORLD_SIZE", of)])
        .envs([("LOCAL_WORLD_SIZE", of), ("WITH", MARK)])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn by_shell(place: &Place, ranks: &str, of: &str, more: &[&str]) -> Running {
    shell(place, ranks, of, more).begin().unwrap()
}

/// Kills a shell, and no other process; gives the words of those that it started, which end soon.
fn killed(place: &Place, mut shell: Running) -> String {
    shell.kill().unwrap();
    let since = Instant::now();
    while !processes_of(place, "run.json").is_empty() {
        assert!(since.elapsed() < SECONDS, "processes go on");
        std::thread::sleep(Duration::from_millis(20));
    }
    let words = said(&shell.wait_with_output().unwrap());
    assert!(
        words.contains("has ended: the run ends as by an interrupt"),
        "{words}"
    );
    words
}

/// Whatever the moment, they end in order, and the folder is free for who goes on.
#[test]
fn ranks_end_when_their_launcher_is_killed() {
    for flags in [&[][..], &["--elastic", "--checkpoint-every", "100000"]] {
        let place = Place::with_plan();
        let start = |more: &[&str]| {
            let _ = std::fs::remove_dir_all(place.path("records"));
            let run = by_shell(
                &place,
                "0 1",
                "2",
                &[flags, &["--record", "records"], more].concat(),
            );
            process_of(&place, 3);
            run
        };
        let words = killed(&place, start(&[]));
        assert!(words.contains("interrupted after"), "{words}");
        place.run(&["checkpoint", "verify", "state"]).expect(0);
        let resume = ["--resume", "state"];
        let more = if flags.is_empty() { &resume[..] } else { &[] };
        let words = killed(&place, start(more));
        let goes_on = match flags.is_empty() {
            true => "going on from state",
            false => "going on with the run of state",
        };
        assert!(words.contains(goes_on), "{words}");
        assert!(words.contains("interrupted after"), "{words}");
        place.run(&["checkpoint", "verify", "state"]).expect(0);
        assert_eq!(posted(&place), [""; 0]);
    }
}

#[test]
fn ranks_that_have_not_met_end_when_their_launcher_is_killed() {
    let place = Place::with_plan();
    // Those that wait for another one: process 0 listens, and the other one has called.
    // Each is started by a shell of its own, which is no launcher and stays.
    let mut both = shell(&place, "0 1", "3", &[]);
    place.write("between.sh", "\"$@\"; true\n");
    both.env("WITH", format!("{MARK} sh between.sh"));
    let both = both.begin().unwrap();
    let since = Instant::now();
    while posted(&place).is_empty() {
        assert!(
            since.elapsed() < Duration::from_secs(60),
            "nothing is posted"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    let words = killed(&place, both);
    assert!(
        words.contains("interrupted before all processes had met"),
        "{words}"
    );
    // One that waits for process 0.
    let one = by_shell(&place, "1", "3", &[]);
    while processes_of(&place, "run.json").is_empty() {
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(Duration::from_millis(500));
    killed(&place, one);
    assert_eq!(posted(&place), [""; 0]);
}

/// Who starts processes by hand and with `nohup` means them to outlive the shell.
#[test]
fn nohup_keeps_what_was_started_by_hand() {
    let place = Place::with_plan();
    let mut shell = shell(&place, "0 1", "2", &["--record", "records"]);
    let mut shell = shell.env("WITH", "nohup").begin().unwrap();
    let first = process_of(&place, 0);
    process_of(&place, 3);
    shell.kill().unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(processes_of(&place, "run.json").len(), 2);
    send("-TERM", first);
    wait_for_none(&place, "run.json");
    let words = said(&shell.wait_with_output().unwrap());
    assert!(!words.contains("has ended: the run"), "{words}");
    assert!(words.contains("interrupted after"), "{words}");
}

/// As where each host has a launcher of its own.
#[test]
fn a_run_ends_in_order_when_the_launcher_of_others_is_killed() {
    let place = Place::with_plan();
    let first = by_shell(&place, "0", "2", &["--record", "records"]);
    let second = by_shell(&place, "1", "2", &["--record", "records"]);
    process_of(&place, 3);
    killed(&place, second);
    let words = said(&first.wait_with_output().unwrap());
    let expected = ["the launcher of process 1 has ended", "interrupted after"];
    expected
        .iter()
        .for_each(|e| assert!(words.contains(e), "{words}"));
    place.run(&["checkpoint", "verify", "state"]).expect(0);
}

/// As where one host is to be emptied: its processes alone are interrupted. All say by their exit
/// code that the run was interrupted, so that whoever starts processes again does so for all of
/// them.
#[test]
fn a_run_ends_in_order_when_one_of_its_processes_is_interrupted() {
    for signal in ["-TERM", "-USR1"] {
        let place = Place::with_plan();
        let one = |rank: &str| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_meshwright"));
            command
                .args([&RUN[..], &LONG, &["--record", "records"]].concat())
                .current_dir(place.path("."))
                .env("TMPDIR", place.path("."))
                .env_remove("XDG_RUNTIME_DIR")
                .envs([
                    ("RANK", rank),
                    ("WORLD_SIZE", "2"),
                    ("LOCAL_WORLD_SIZE", "2"),
                ])
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            command.begin().unwrap()
        };
        let both = ["0", "1"].map(one);
        send(signal, process_of(&place, 3));
        let both = both.map(|process| process.wait_with_output().unwrap());
        let codes = [0, 1].map(|i| both[i].status.code());
        let words = said(&both[0]);
        assert_eq!(
            codes,
            [Some(130); 2],
            "{signal}: {words} {}",
            said(&both[1])
        );
        let expected = ["process 1 was interrupted", "interrupted after"];
        for expected in expected {
            assert!(words.contains(expected), "{signal}: {words}");
        }
        place.run(&["checkpoint", "verify", "state"]).expect(0);
    }
}

/// A launcher would ask it to end, and wait until it does.
#[test]
fn a_stopped_process_of_a_launcher_is_killed() {
    let place = Place::with_plan();
    let more = ["--record", "records", "--time-out", "2"];
    let first = by_shell(&place, "0", "2", &more);
    let second = by_shell(&place, "1", "2", &more);
    let stopped = process_of(&place, 3);
    send("-STOP", stopped);
    let words = said(&first.wait_with_output().unwrap());
    assert!(words.contains("does not answer"), "{words}");
    wait_for_none(&place, "run.json");
    drop(second);
}

/// Each task of a launcher would train by itself, into the same files.
#[test]
fn tasks_of_a_launcher_start_no_processes() {
    let place = Place::with_plan();
    let mut command = Command::new(env!("CARGO_BIN_EXE_meshwright"));
    let output = command
        .args(
            [
                &RUN[..],
                &["--steps", "1", "--processes=2", "-o", "run.json"],
            ]
            .concat(),
        )
        .current_dir(place.path("."))
        .envs([
            ("RANK", "0"),
            ("WORLD_SIZE", "2"),
            ("LOCAL_WORLD_SIZE", "2"),
        ])
        .output()
        .unwrap();
    let words = said(&output);
    assert_eq!(output.status.code(), Some(2), "{words}");
    assert!(words.contains("one of 2 that torchrun started"), "{words}");
}
