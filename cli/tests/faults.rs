//! Faults of disks and processes, on purpose: what must hold after each of them. `docs/faults.md`
//! says which test is of which fault.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod support;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::io::{BufRead, BufReader, ErrorKind};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use support::{Begin, Done, Place, Running, faults, said};

const RUN: [&str; 4] = ["run", "plan.json", "--data", "text.txt"];
/// How long something may take that is awaited.
const PATIENCE: Duration = Duration::from_secs(60);

/// A place with a plan for two ranks.
fn two_ranks() -> Place {
    let place = Place::new();
    let compile = [
        "compile",
        "config.json",
        "--cluster",
        "cpu-default",
        "--ranks",
        "2",
    ];
    let pins = ["--global-batch", "2", "--pin", "data=2", "--pin", "zero=1"];
    place.run(&[&compile[..], &pins].concat()).expect(0);
    place
}

fn run(place: &Place, more: &[&str]) -> Done {
    place.run(&[&RUN[..], more].concat())
}

/// A run whose `at`th operation on files below `state` goes wrong.
fn faulty(place: &Place, library: &Path, at: usize, error: Option<i32>, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_meshwright"));
    command
        .args([&RUN[..], args].concat())
        .current_dir(place.path("."))
        .env("LD_PRELOAD", library)
        .env("FAULT_IN", "state")
        .env("FAULT_LOG", place.path("operations"))
        .env("FAULT_AT", at.to_string());
    if let Some(error) = error {
        command.env("FAULT_ERRNO", error.to_string());
    }
    command.output().unwrap()
}

/// The step of the newest checkpoint in `state`, all of which must be whole.
fn newest_step(place: &Place) -> u64 {
    let seen = place
        .run(&["checkpoint", "verify", "state", "--json"])
        .expect(0);
    seen.json()["checkpoints"][0]["step"].as_u64().unwrap()
}

/// The shards of the newest checkpoint in a folder.
fn shards(place: &Place, folder: &str) -> Vec<Vec<u8>> {
    let names = |path: PathBuf| {
        let entries = std::fs::read_dir(path).unwrap();
        let mut all: Vec<PathBuf> = entries.map(|e| e.unwrap().path()).collect();
        all.sort();
        all
    };
    let newest = names(place.path(folder)).pop().unwrap();
    let files = names(newest).into_iter();
    let shards = files.filter(|f| f.extension().is_some_and(|e| e == "safetensors"));
    shards.map(|f| std::fs::read(f).unwrap()).collect()
}

/// Names of what is unfinished in `state`, which is gone where the run that made it left it empty.
fn leftovers(place: &Place) -> Vec<String> {
    let entries = std::fs::read_dir(place.path("state")).into_iter().flatten();
    let names = entries.map(|e| e.unwrap().file_name().into_string().unwrap());
    names.filter(|n| n.starts_with('.')).collect()
}

/// Every how many operations one goes wrong: every one in the slow tests.
fn stride() -> usize {
    match std::env::var_os("RUN_SLOW_TESTS").is_some() {
        true => 1,
        false => 9,
    }
}

/// Killed at any write, sync, rename or removal of the writing of checkpoints, in the middle of a
/// write too: all checkpoints that have their names are whole, the newest is no older than before,
/// and the run goes on from it to the bits of a run that nobody killed.
#[test]
fn kills_at_any_operation_of_a_checkpoint_lose_no_whole_one() {
    let place = two_ranks();
    let library = faults(&place);
    run(&place, &["--steps", "1", "--checkpoint", "state"]).expect(0);
    let (mut at, mut kills, mut step) = (1, 0, 1);
    for mode in ["background", "wait"] {
        loop {
            let args = ["--steps", "3", "--resume", "state", "--checkpoint", "state"];
            let every = ["--checkpoint-every", "1", "--checkpoint-mode", mode];
            let output = faulty(&place, &library, at, None, &[&args[..], &every].concat());
            let now = newest_step(&place);
            assert!(now >= step, "step {now} after {step}, operation {at}");
            step = now;
            if output.status.signal() != Some(9) {
                assert_eq!(output.status.code(), Some(0), "{}", said(&output));
                break;
            }
            kills += 1;
            at += stride();
        }
        at = 1;
    }
    assert!(kills >= 10, "{kills} kills");
    assert_eq!(leftovers(&place), [""; 0]);
    // All kinds of operation were there.
    let letters = place.read("operations");
    for letter in *b"wsrmou" {
        assert!(letters.contains(&letter), "no {}", letter as char);
    }
    let whole = ["--steps", &step.to_string(), "--checkpoint", "whole"];
    run(&place, &whole).expect(0);
    assert!(shards(&place, "state") == shards(&place, "whole"));
}

/// The same of an elastic run, its journal and what its ranks leave behind included: whatever a
/// process was doing when it was killed, the run goes on by itself or by the same command, and is
/// done.
#[test]
fn kills_at_any_operation_of_an_elastic_run_end_in_a_run_that_is_done() {
    let place = Place::new();
    let compile = ["compile", "config.json", "--cluster", "cpu-default"];
    let pins = ["--ranks", "2", "--global-batch", "2", "--pin", "data=2"];
    let zero = ["--pin", "zero=0"];
    place.run(&[&compile[..], &pins, &zero].concat()).expect(0);
    let library = faults(&place);
    let more = ["--steps", "6", "--processes", "--elastic"];
    let state = ["--checkpoint", "state", "--checkpoint-every", "2"];
    let args = [&more[..], &state].concat();
    let (mut at, mut kills) = (1, 0);
    loop {
        let output = faulty(&place, &library, at, None, &args);
        let words = support::flat(&said(&output));
        let is_killed = output.status.signal() == Some(9);
        let code = output.status.code();
        assert!(is_killed || matches!(code, Some(0 | 6)), "{at}: {words}");
        let is_undisturbed = code == Some(0) && !words.contains("lost: ");
        let again = run(&place, &args).expect(0);
        assert_eq!(newest_step(&place), 6, "{at}: {words}");
        assert_eq!(leftovers(&place), [""; 0], "{at}: {words}");
        assert!(!place.exists("state/left-by-ranks"), "{at}: {words}");
        assert!(!place.exists("run.records"), "{at}: {words}");
        run(&place, &args)
            .expect(0)
            .says(&["nothing is left to do"]);
        if is_undisturbed {
            again.says(&["nothing is left to do"]);
            break;
        }
        kills += 1;
        at += stride();
        std::fs::remove_dir_all(place.path("state")).unwrap();
    }
    assert!(kills >= 5, "{kills} kills");
}

/// A disk that is full, or fails, from any operation on: the run goes on to its end, says which
/// checkpoints it could not write, and leaves nothing half-written.
#[test]
fn disks_that_fail_end_no_run_and_spoil_no_checkpoint() {
    const NO_SPACE: i32 = 28;
    const FAILED: i32 = 5;
    let place = two_ranks();
    let library = faults(&place);
    run(&place, &["--steps", "1", "--checkpoint", "state"]).expect(0);
    let args = ["--steps", "3", "--resume", "state", "--checkpoint", "state"];
    let args = [&args[..], &["--checkpoint-every", "1"]].concat();
    // Behind the lock of the folder, and a look whether that is there.
    let mut at = 3;
    for (i, error) in [NO_SPACE, FAILED].iter().cycle().enumerate() {
        let before = newest_step(&place);
        let _ = std::fs::remove_file(place.path("run.json"));
        let output = faulty(&place, &library, at, Some(*error), &args);
        let words = said(&output);
        assert!(newest_step(&place) >= before, "{words}");
        assert_eq!(leftovers(&place), [""; 0], "{words}");
        if output.status.code() == Some(0) {
            assert!(i > 3, "{words}");
            break;
        }
        assert_eq!(output.status.code(), Some(3), "{words}");
        let why = ["No space left on device", "Input/output error"][i % 2];
        assert!(words.contains(why), "operation {at}: {words}");
        let measured: Value = match place.exists("run.json") {
            true => serde_json::from_slice(&place.read("run.json")).unwrap(),
            // Nothing can be written there from the first operation on, which is said at once.
            false => {
                assert!(words.contains("write into the folder"), "{words}");
                at += 1;
                continue;
            }
        };
        assert_eq!(measured["steps"].as_array().unwrap().len(), 3);
        at += stride();
    }
}

/// A run whose operations on files below `state` of these kinds fail, each so-many-th of them.
fn failing(place: &Place, (kinds, every, error): (&str, &str, &str), args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_meshwright"))
        .args([&RUN[..], args].concat())
        .current_dir(place.path("."))
        .env("LD_PRELOAD", faults(place))
        .env("FAULT_IN", "state")
        .env("FAULT_KINDS", kinds)
        .env("FAULT_EVERY", every)
        .env("FAULT_ERRNO", error)
        .env("FAULT_LOG", place.path("operations"))
        .output()
        .unwrap()
}

/// Operations that a signal interrupts are made again, and nobody notices.
#[test]
fn operations_that_are_interrupted_are_made_again() {
    const INTERRUPTED: &str = "4";
    let place = two_ranks();
    let state = ["--checkpoint", "state", "--checkpoint-every", "1"];
    let args = [&["--steps", "4"][..], &state].concat();
    let output = failing(&place, ("wso", "2", INTERRUPTED), &args);
    let words = support::flat(&said(&output));
    assert_eq!(output.status.code(), Some(0), "{words}");
    assert!(!words.contains("warning"), "{words}");
    let letters = place.read("operations");
    for letter in *b"wso" {
        let n = letters.iter().filter(|l| **l == letter).count();
        assert!(n > 1, "{n} of {}", letter as char);
    }
    assert_eq!(newest_step(&place), 4);
    assert_eq!(leftovers(&place), [""; 0]);
    run(&place, &["--steps", "4", "--checkpoint", "whole"]).expect(0);
    assert!(shards(&place, "state") == shards(&place, "whole"));
}

/// Old checkpoints that cannot be removed are in nobody's way: the run is done, the new ones are
/// whole, and what is left of the old ones goes as soon as it can.
#[test]
fn removals_that_fail_end_no_run() {
    const NOT_PERMITTED: &str = "1";
    let place = two_ranks();
    let state = ["--checkpoint", "state", "--checkpoint-every", "1"];
    let args = [&["--steps", "6"][..], &state].concat();
    let output = failing(&place, ("u", "1", NOT_PERMITTED), &args);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert!(place.read("operations").contains(&b'u'));
    assert_eq!(newest_step(&place), 6);
    let go_on = ["--steps", "1", "--resume", "state", "--checkpoint", "state"];
    run(&place, &go_on).expect(0);
    assert_eq!(newest_step(&place), 7);
    assert_eq!(leftovers(&place), [""; 0]);
}

/// A disk that is slower than checkpoints are due: steps go on beside one that is written, the next
/// one waits for it, and so does the end of the run.
#[test]
fn slow_disks_hold_up_the_next_checkpoint_and_not_the_steps() {
    let place = two_ranks();
    let library = faults(&place);
    let output = Command::new(env!("CARGO_BIN_EXE_meshwright"))
        .args([&RUN[..], &["--steps", "20", "--checkpoint", "state"]].concat())
        .args(["--checkpoint-every", "9", "--metrics", "m.jsonl"])
        .current_dir(place.path("."))
        .env("LD_PRELOAD", &library)
        .env("FAULT_IN", "state")
        .env("FAULT_DELAY", "100")
        .output()
        .unwrap();
    let words = said(&output);
    assert_eq!(output.status.code(), Some(0), "{words}");
    assert!(
        words.contains("the checkpoint after 18 steps waited"),
        "{words}"
    );
    let names = place.names_in("state");
    assert_eq!(names, ["0002-step-18", "0003-step-20"]);
    assert_eq!(newest_step(&place), 20);
    // Their bits are those of a run that waits.
    let waits = ["--checkpoint-every", "9", "--checkpoint-mode", "wait"];
    let args = ["--steps", "20", "--checkpoint", "other"];
    run(&place, &[&args[..], &waits].concat()).expect(0);
    for name in &names {
        let [a, b] = ["state", "other"].map(|f| place.read(&format!("{f}/{name}/manifest.json")));
        assert!(a == b, "{name}");
    }
}

/// A disk that keeps other bits than it was given makes no checkpoint, and takes none that is
/// whole.
#[test]
fn disks_that_lie_take_no_whole_checkpoint() {
    let place = two_ranks();
    let library = faults(&place);
    let state = ["--checkpoint", "state", "--checkpoint-every", "10"];
    run(&place, &[&["--steps", "20"][..], &state].concat()).expect(0);
    let before = place.names_in("state");
    assert_eq!(before, ["0001-step-10", "0002-step-20"]);
    place.write("lies", "");
    let more = ["--steps", "50", "--resume", "state", "-o", "lies.json"];
    let output = Command::new(env!("CARGO_BIN_EXE_meshwright"))
        .args([&RUN[..], &more, &state].concat())
        .current_dir(place.path("."))
        .env("LD_PRELOAD", &library)
        .env("FAULT_IN", "state")
        .env("FAULT_WHILE", place.path("lies"))
        .output()
        .unwrap();
    let words = support::flat(&said(&output));
    assert_eq!(output.status.code(), Some(3), "{words}");
    let spoilt = "the disk does not give back what was written to it";
    assert!(words.contains(spoilt), "{words}");
    // The steps are made, and measured.
    assert!(place.exists("lies.json"), "{words}");
    assert_eq!(place.names_in("state"), before, "{words}");
    assert_eq!(newest_step(&place), 20);
}

/// A damaged checkpoint is none of those that stay, or else it would take the place of a whole one.
#[test]
fn damaged_checkpoints_do_not_count_among_those_that_stay() {
    let place = two_ranks();
    let state = ["--checkpoint", "state", "--checkpoint-every", "10"];
    run(&place, &[&["--steps", "20"][..], &state].concat()).expect(0);
    let spoil = |checkpoint: &str| {
        let path = format!("state/{checkpoint}/rank-0.safetensors");
        let mut bytes = place.read(&path);
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        place.write(&path, bytes);
    };
    spoil("0002-step-20");
    let go_on = ["--steps", "10", "--resume", "state"];
    run(&place, &[&go_on[..], &state[..2]].concat()).expect(0);
    let names = ["0001-step-10", "0002-step-20", "0003-step-20"];
    assert_eq!(place.names_in("state"), names);
    // Behind two that are whole it goes, with what is older.
    run(&place, &[&go_on[..], &state[..2]].concat()).expect(0);
    assert_eq!(place.names_in("state"), ["0003-step-20", "0004-step-30"]);
    assert_eq!(newest_step(&place), 30);
}

/// Runs a script in a namespace in which it may mount file systems.
fn with_mounts(place: &Place, script: &str, more: &[&str]) -> Output {
    let output = Command::new("unshare")
        .args(["-Urm", "bash", "-c", script, "mounts"])
        .arg(env!("CARGO_BIN_EXE_meshwright"))
        .args(more)
        .current_dir(place.path("."))
        .output()
        .unwrap();
    assert_ne!(
        output.status.code(),
        Some(99),
        "no mounts: {}",
        said(&output)
    );
    output
}

/// Whether this machine lets us mount in a namespace of our own.
fn may_mount() -> bool {
    let may = Command::new("unshare")
        .args(["-Urm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"])
        .output();
    let may = may.is_ok_and(|o| o.status.success());
    if !may {
        eprintln!("skipped: no user namespaces here, so no file systems of our own");
    }
    may
}

/// A real file system without space, and one that becomes read-only.
#[test]
fn full_and_read_only_file_systems_end_no_run() {
    if !may_mount() {
        return;
    }
    let place = two_ranks();
    let full = r#"
        mkdir state && mount -t tmpfs -o size=700k tmpfs state || exit 99
        "$1" run plan.json --data text.txt --steps 9 --checkpoint state \
            --checkpoint-every 1 --checkpoints-kept 100
        echo "code $?"
        ls -a state
        "$1" checkpoint verify state
    "#;
    let output = with_mounts(&place, full, &[]);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), said(&output));
    assert!(out.contains("code 3"), "{out}{err}");
    assert!(err.contains("No space left on device"), "{err}");
    assert!(err.contains("the run goes on"), "{err}");
    // At the end it says what there is, and what is lost.
    assert!(err.contains("not all was written (exit code 3)"), "{err}");
    let whole = out.matches(": whole, step ").count();
    let newest = format!(
        "the newest whole checkpoint is state/000{whole}-step-{whole}, of step {whole}: the "
    );
    assert!(err.contains(&newest), "{out}{err}");
    let lost = format!("{} steps after it are lost", 9 - whole);
    assert!(err.contains(&lost), "{err}");
    assert!(!out.contains(".meshwright"), "{out}");
    assert!(out.matches(": whole, step ").count() >= 2, "{out}");
    assert!(output.status.success(), "{out}{err}");
    let read_only = r#"
        mkdir -p state && mount -t tmpfs tmpfs state || exit 99
        "$1" run plan.json --data text.txt --steps 100000000 --checkpoint state \
            --checkpoint-every 1 -o run.json 2>errors &
        while ! ls state | grep -q step; do sleep 0.01; done
        # Busy as long as a file is open for writing.
        until mount -o remount,ro state 2>/dev/null; do sleep 0.01; done
        sleep 0.1
        kill -USR1 $!
        wait $!
        echo "code $?"
        "$1" checkpoint verify state
        "$1" run plan.json --data text.txt --steps 1 --checkpoint state
        echo "refused $?"
    "#;
    let output = with_mounts(&place, read_only, &[]);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), said(&output));
    let errors = String::from_utf8(place.read("errors")).unwrap();
    assert!(
        out.contains("code 3") && out.contains("refused 3"),
        "{out}{err}{errors}"
    );
    assert!(errors.contains("Read-only file system"), "{errors}");
    assert!(errors.contains("the run goes on"), "{errors}");
    assert!(out.contains(": whole, step "), "{out}{err}");
}

/// A disk with room for the two checkpoints that stay, and not for the one that is written beside
/// them: the older one goes, as it is in the way.
#[test]
fn old_checkpoints_make_room_for_new_ones() {
    if !may_mount() {
        return;
    }
    let place = two_ranks();
    let script = r#"
        "$1" run plan.json --data text.txt --steps 1 --checkpoint one -o run.json || exit 98
        mkdir state
        size=$(du -sk one/0001-step-1 | cut -f1)
        mount -t tmpfs -o size=$((size * 27 / 10))k tmpfs state || exit 99
        "$1" run plan.json --data text.txt --steps 20 --checkpoint state --checkpoint-every 5 \
            -o run.json
        echo "code $?"
        ls state
        "$1" run plan.json --data text.txt --steps 1 --checkpoint state --resume state \
            -o run.json
        echo "code $?"
        ls state
        # Begun again beside these.
        "$1" run plan.json --data text.txt --steps 18 --checkpoint state --checkpoint-every 5 \
            -o run.json
        echo "code $?"
        ls state
    "#;
    let output = with_mounts(&place, script, &[]);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), said(&output));
    assert_eq!(out.matches("code 0").count(), 3, "{out}{err}");
    assert!(err.contains("No space left on device"), "{err}");
    let left: Vec<&str> = out.split("code 0").skip(1).collect();
    let ends = ["-step-20\n", "-step-21\n", "-step-18\n"];
    for (left, end) in left.into_iter().zip(ends) {
        assert!(left.contains(end), "{out}{err}");
    }
    let err = support::flat(&err);
    let further = "state has a checkpoint of step 21, and this run begins at step 0.";
    assert!(err.contains(further), "{err}");
    assert_eq!(
        err.matches("Checkpoints of later steps").count(),
        1,
        "{err}"
    );
}

/// Runs of an elastic training of two replicas, of which one is killed on a disk that is full: the
/// arguments are the process, and the number of checkpoints that are there then. The same command
/// is given again once there is room, where the run says that it needs some.
const LOSS_ON_A_FULL_DISK: &str = r#"
    "$1" run plan.json --data text.txt --steps 1 --checkpoint one -o one.json || exit 98
    size=$(du -sk one/0001-step-1 | cut -f1)
    mkdir disk && mount -t tmpfs -o size=$((size * 5 / 2))k tmpfs disk || exit 99
    go_on() {
        "$1" run plan.json --data text.txt --steps 500 --processes --elastic \
            --checkpoint disk/state --checkpoint-every 200 -o run.json 2>>errors
    }
    go_on "$1" &
    run=$!
    # Arguments are lines to grep, whose own do not match.
    until_end=$(($(date +%s) + 120))
    goes_on() {
        [ $(date +%s) -lt $until_end ] && return
        echo "no $1" >&2
        cat errors >&2
        kill $(cat /proc/$run/task/$run/children)
        exit 97
    }
    while [ -z "$victim" ]; do
        goes_on victim
        case $2 in
            0) all=$(grep -lz '^-[-]kept=' /proc/[0-9]*/cmdline 2>/dev/null | xargs -r \
                grep -Lz '^-[-]as-process=' 2>/dev/null);;
            *) all=$(grep -lz "^-[-]as-process=$2/" /proc/[0-9]*/cmdline 2>/dev/null);;
        esac
        for process in $all; do
            process=${process%/cmdline}
            [ "$(readlink $process/cwd)" = "$PWD" ] && victim=${process#/proc/}
        done
    done
    while ! ls disk/state | grep -q "^000$3-step"; do
        goes_on checkpoint
        sleep 0.005
    done
    dd if=/dev/zero of=disk/filler bs=1k 2>/dev/null
    kill -9 $victim
    wait $run
    code=$?
    echo "code $code"
    ls disk/state
    "$1" checkpoint verify disk/state
    if [ $code != 0 ]; then
        rm disk/filler
        go_on "$1"
        echo "again $?"
        ls disk/state
    fi
    grep -v "^step " errors >&2
"#;

/// Two replicas, each of which has all states.
fn two_replicas() -> Place {
    let place = Place::new();
    let compile = ["compile", "config.json", "--cluster", "cpu-default"];
    let pins = ["--ranks", "2", "--global-batch", "2", "--pin", "data=2"];
    let zero = ["--pin", "zero=0"];
    place.run(&[&compile[..], &pins, &zero].concat()).expect(0);
    place
}

/// The states that ranks have in memory are worth more than the older one of two checkpoints.
#[test]
fn what_ranks_have_in_memory_has_room_on_a_full_disk() {
    if !may_mount() {
        return;
    }
    for lost in ["0", "1"] {
        let place = two_replicas();
        let output = with_mounts(&place, LOSS_ON_A_FULL_DISK, &[lost, "2"]);
        let out = String::from_utf8_lossy(&output.stdout);
        let err = support::flat(&said(&output));
        assert!(out.contains("code 0"), "{out}{err}");
        assert!(
            err.contains("had all states in memory: no step is lost"),
            "{out}{err}"
        );
        assert!(out.contains("-step-500: whole"), "{out}{err}");
        assert!(!out.contains("0001-step-200"), "{out}{err}");
        assert!(!out.contains("left-by-ranks"), "{out}{err}");
    }
}

/// Where the newest checkpoint alone is in the way, the run goes on from it, and says what is lost.
#[test]
fn an_elastic_run_without_room_says_what_is_lost() {
    if !may_mount() {
        return;
    }
    let whys = [
        "warning: the states of rank1 are not left for the next process 0: ",
        "The ranks that are left have all states in memory, but these cannot be written: ",
    ];
    for (lost, why) in ["0", "1"].into_iter().zip(whys) {
        let place = two_replicas();
        let output = with_mounts(&place, LOSS_ON_A_FULL_DISK, &[lost, "1"]);
        let out = String::from_utf8_lossy(&output.stdout);
        let err = support::flat(&said(&output));
        assert!(out.contains("code 3"), "{out}{err}");
        assert!(err.contains(why), "{out}{err}");
        let newest = "disk/state/0001-step-200";
        let end = format!(
            "the newest whole checkpoint is {newest}, of step 200: the 300 steps after it are lost"
        );
        assert!(err.contains(&end), "{out}{err}");
        assert!(
            err.contains(&format!("going on from {newest}")),
            "{out}{err}"
        );
        assert!(
            err.contains("the same command then goes on with the run"),
            "{err}"
        );
        assert!(out.contains(&format!("{newest}: whole")), "{out}{err}");
        let (before, after) = out.split_once("again ").unwrap();
        assert!(!before.contains("left-by-ranks"), "{out}{err}");
        assert!(
            after.starts_with('0') && after.contains("-step-500"),
            "{out}{err}"
        );
    }
}

/// Runs may go on from the folder that another one writes to. They may not write to it themselves:
/// each would remove what the other one needs. It is free as soon as that one is gone.
#[test]
fn runs_share_a_folder_of_checkpoints() {
    let place = two_ranks();
    let state = ["--checkpoint", "state"];
    let first = ["--steps", "100000000", "-o", "a.json"];
    for processes in [&[][..], &["--processes"]] {
        let every = ["--checkpoint-every", "5"];
        let mut child = Command::new(env!("CARGO_BIN_EXE_meshwright"))
            .args([&RUN[..], &first, &state, &every, processes].concat())
            .current_dir(place.path("."))
            .stderr(std::process::Stdio::null())
            .stdout(std::process::Stdio::null())
            .begin()
            .unwrap();
        let began = std::time::Instant::now();
        let names = || std::fs::read_dir(place.path("state")).into_iter().flatten();
        let is_step = |name: &std::ffi::OsStr| name.to_string_lossy().contains("-step-");
        while !names().flatten().any(|e| is_step(&e.file_name())) {
            assert!(began.elapsed().as_secs() < 60, "no checkpoint");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        // What is read does not go meanwhile, though newer ones come.
        for to in [&[][..], &["--processes"], &["--checkpoint", "other"]] {
            for _ in 0..5 {
                let resume = ["--steps", "1", "--resume", "state", "-o", "b.json"];
                run(&place, &[&resume[..], to].concat()).expect(0);
                place.run(&["checkpoint", "verify", "state"]).expect(0);
            }
        }
        let elastic = ["--elastic", "--checkpoint-every", "1"];
        for (resume, elastic) in [(&[][..], &[][..]), (&["--resume", "state"], &elastic)] {
            let second = ["--steps", "1", "-o", "b.json"];
            let refused = run(&place, &[&second[..], resume, elastic, &state].concat()).expect(2);
            refused.says(&["--checkpoint state: ", "folder"]);
        }
        let second = ["--steps", "1", "-o", "b.json"];
        let done = run(&place, &[&second[..], &state].concat()).expect(2);
        done.says(&[
            "--checkpoint state: another run that goes on writes its checkpoints there",
            "give this run a folder of its own; with --resume state it may go on from",
        ]);
        assert!(child.try_wait().unwrap().is_none(), "the first goes on");
        child.kill().unwrap();
        child.wait().unwrap();
        newest_step(&place);
        let third = ["--steps", "1", "--resume", "state", "-o", "c.json"];
        run(&place, &[&third[..], &state].concat()).expect(0);
        assert!(!place.exists("state/writer.lock"), "it goes with its run");
        std::fs::remove_dir_all(place.path("other")).unwrap();
        std::fs::remove_dir_all(place.path("state")).unwrap();
    }
}

/// Somebody removes the folder of a run that goes on, with its lock: then the run makes both again, and
/// writes nothing there as long as another run has the folder.
#[test]
fn a_removed_folder_is_made_again_unless_another_run_has_it() {
    let place = two_ranks();
    let begin = |flags: &[&str]| {
        let all = [&RUN[..], &["--steps", "100000000"], flags].concat();
        let mut command = Command::new(env!("CARGO_BIN_EXE_meshwright"));
        let command = command.args(all).current_dir(place.path("."));
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.begin().unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|l| tell.send(l)));
        (child, told)
    };
    let hears = |told: &std::sync::mpsc::Receiver<String>, part: &str| {
        let mut words = String::new();
        let since = Instant::now();
        while !words.contains(part) {
            assert!(since.elapsed() < PATIENCE, "`{part}` is not in: {words}");
            let heard = told.recv_timeout(PATIENCE);
            words += &format!("{} ", heard.unwrap().trim());
        }
    };
    let every = ["--checkpoint", "state", "--checkpoint-every", "20"];
    let (mut first, heard) = begin(&[&every[..], &["-o", "a.json"]].concat());
    hears(&heard, "has the training state");
    // It writes nothing meanwhile.
    let send = |child: &Running, signal| kill_process(Pid::from_child(child), signal).unwrap();
    let remove = || {
        send(&first, Signal::STOP);
        let status = format!("/proc/{}/status", first.id());
        while !std::fs::read_to_string(&status)
            .unwrap()
            .contains("T (stopped)")
        {
            std::thread::sleep(Duration::from_millis(2));
        }
        std::fs::remove_dir_all(place.path("state")).unwrap();
    };
    remove();
    send(&first, Signal::CONT);
    hears(&heard, "checkpoints are written there again");
    hears(&heard, "has the training state");
    newest_step(&place);
    // Another run begins there, and ends.
    remove();
    let short = ["--steps", "2", "--checkpoint", "state", "-o", "b.json"];
    run(&place, &short).expect(0);
    let there = || place.names_in("state");
    let of_second = there();
    send(&first, Signal::CONT);
    let lost = "another run writes its checkpoints there since";
    (0..3).for_each(|_| hears(&heard, lost));
    assert_eq!(there(), of_second);
    send(&first, Signal::INT);
    hears(&heard, "these were written: ");
    assert_eq!(first.wait().unwrap().code(), Some(6));
    assert_eq!(there(), of_second);
    assert!(place.exists("a.json"));
}

/// Whoever can write to the folder of checkpoints decides what a run goes on from.
#[test]
fn checkpoints_that_everybody_can_write_to_are_warned_of() {
    let place = two_ranks();
    run(&place, &["--steps", "1", "--checkpoint", "state"]).expect(0);
    let one = std::fs::read_dir(place.path("state"))
        .unwrap()
        .map(|e| format!("state/{}", e.unwrap().file_name().display()))
        .find(|name| place.path(name).is_dir())
        .unwrap();
    let go_on = |from: &str| {
        let done = run(&place, &["--steps", "1", "--resume", from]);
        support::flat(&done.expect(0).err)
    };
    let mode = |mode: &str, of: &str| {
        let chmod = Command::new("chmod").arg(mode).arg(place.path(of)).status();
        assert!(chmod.unwrap().success());
    };
    let warning = "state: anyone on this machine can write to it, and so decide what this run";
    assert!(!go_on("state").contains("warning"));
    mode("777", "state");
    // The folder of all is looked at, whether it or one in it is named.
    for from in ["state", one.as_str()] {
        let words = go_on(from);
        assert!(words.contains(warning), "{words}");
    }
    // As in /tmp: others can add what is taken for the newest one, and replace none that is named.
    mode("1777", "state");
    assert!(go_on("state").contains(warning));
    assert!(!go_on(&one).contains("warning"));
    mode("755", "state");
    mode("777", &one);
    let words = go_on("state");
    assert!(
        words.contains(&format!("{one}: anyone on this machine")),
        "{words}"
    );
}

/// A user of this machine that is not the administrator, as whom a command is run.
const SOMEBODY: u32 = 65_534;

/// A run as a user who is not the administrator; none where this user can be nobody else and is the
/// administrator, or that one cannot reach the binary.
fn as_somebody(place: &Place, args: &[&str]) -> Option<Output> {
    let binary = env!("CARGO_BIN_EXE_meshwright");
    let mut command = match rustix::process::geteuid().is_root() {
        false => Command::new(binary),
        true => {
            let id = SOMEBODY.to_string();
            let mut command = Command::new("setpriv");
            command
                .args(["--reuid", &id, "--regid", &id, "--clear-groups"])
                .arg(binary);
            command
        }
    };
    let output = command.args(args).current_dir(place.path(".")).output();
    let output = match output {
        Err(e) if e.kind() == ErrorKind::NotFound => {
            eprintln!("skipped: there is no setpriv, by which one is another user");
            return None;
        }
        output => output.unwrap(),
    };
    let words = said(&output);
    let is_there = output.status.code() != Some(127) && !words.contains("setpriv:");
    if !is_there {
        eprintln!("skipped: another user cannot run the binary: {words}");
    }
    is_there.then_some(output)
}

/// A checkpoint that this user may not read is passed over for an older one, and where none can be
/// read that is said, with the file; whose folder another user owns, that one decides what a run
/// goes on from.
#[test]
fn checkpoints_that_are_not_ours_are_said() {
    let place = two_ranks();
    let state = ["--checkpoint", "state", "--checkpoint-every", "1"];
    run(&place, &[&["--steps", "2"][..], &state].concat()).expect(0);
    let names = place.names_in("state");
    assert_eq!(names, ["0001-step-1", "0002-step-2"]);
    let mode = |mode: u32, path: &str| {
        use std::os::unix::fs::PermissionsExt;
        let mode = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(place.path(path), mode).unwrap();
    };
    // All that the run reads and writes is anybody's, but for what is taken away below.
    mode(0o777, ".");
    let resume = [&RUN[..], &["--steps", "1", "--resume", "state", "-o"]].concat();
    let go_on = |output: &str| as_somebody(&place, &[&resume[..], &[output]].concat());
    let shard = |name: &str| format!("state/{name}/rank-1.safetensors");
    mode(0o000, &shard(&names[1]));
    let Some(output) = go_on("a.json") else {
        return;
    };
    let words = support::flat(&said(&output));
    assert_eq!(output.status.code(), Some(0), "{words}");
    let passed = format!(
        "passed over {}: cannot read: Permission denied",
        shard(&names[1])
    );
    assert!(words.contains(&passed), "{words}");
    assert!(words.contains("0001-step-1, after 1 step"), "{words}");
    mode(0o000, &shard(&names[0]));
    let output = go_on("b.json").unwrap();
    let words = support::flat(&said(&output));
    assert_eq!(output.status.code(), Some(3), "{words}");
    assert!(
        words.contains("none of its 2 checkpoints is whole"),
        "{words}"
    );
    assert!(words.contains("Permission denied"), "{words}");
    assert!(!place.exists("b.json"));
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only the administrator can give files away");
        return;
    }
    mode(0o644, &shard(&names[0]));
    let all = std::fs::read_dir(place.path("state")).unwrap().flatten();
    for path in all.map(|e| e.path()).chain([place.path("state")]) {
        std::os::unix::fs::chown(&path, Some(SOMEBODY), None).unwrap();
    }
    let done = run(&place, &["--steps", "1", "--resume", "state"]).expect(0);
    done.says(&["state: user 65534, who owns it, can write to it"]);
}

/// Shells give few open files as a habit, and a run takes as many as it may have. Where there are too
/// few all the same, it says so.
#[test]
fn a_run_opens_as_many_files_as_it_may() {
    let place = two_ranks();
    let limited = |limits: &str| {
        let output = Command::new("bash")
            .args(["-c", &format!("{limits}; exec \"$@\""), "limit"])
            .arg(env!("CARGO_BIN_EXE_meshwright"))
            .args([&RUN[..], &["--steps", "2", "--processes"]].concat())
            .current_dir(place.path("."))
            .output()
            .unwrap();
        (output.status.code(), said(&output))
    };
    let (code, words) = limited("ulimit -Sn 10");
    assert_eq!(code, Some(0), "{words}");
    let (code, words) = limited("ulimit -n 10");
    assert!(matches!(code, Some(1..=6)), "{code:?}: {words}");
    assert!(words.contains("ulimit -n"), "{words}");
}

/// The limit of a file's length sends a signal that kills who does not expect it.
#[test]
fn the_limit_of_a_file_ends_no_run() {
    let place = two_ranks();
    let output = Command::new("bash")
        .args(["-c", "ulimit -f 32; exec \"$@\"", "limit"])
        .arg(env!("CARGO_BIN_EXE_meshwright"))
        .args([&RUN[..], &["--steps", "3", "--checkpoint", "state"]].concat())
        .args(["--checkpoint-every", "1"])
        .current_dir(place.path("."))
        .output()
        .unwrap();
    let words = said(&output);
    assert_eq!(output.status.code(), Some(3), "{words}");
    assert!(
        words.contains("File too large") && words.contains("the run goes on"),
        "{words}"
    );
    assert_eq!(leftovers(&place), [""; 0]);
}

/// Values that are no numbers: all ranks stop at the same step, before its update, and the first
/// tensor is named.
#[test]
fn values_that_are_no_numbers_stop_all_ranks_at_the_same_step() {
    let place = two_ranks();
    for processes in [&[][..], &["--processes=2"]] {
        let wild = ["--steps", "9", "--lr", "1e30", "-o", "wild.json"];
        let done = run(&place, &[&wild[..], processes].concat()).expect(6);
        let flat = support::flat(&done.err);
        assert!(flat.contains(" of step 1 is "), "{flat}");
        assert!(
            flat.contains("the first tensor that is no number: `"),
            "{flat}"
        );
        assert!(!place.exists("wild.json"));
    }
}

/// The same where loss scaling can go no lower, where no norm is there to wait for, and in a
/// validation.
#[test]
fn the_first_tensor_is_named_whatever_finds_that_it_is_no_number() {
    let place = Place::new();
    let compile = ["compile", "config.json", "--cluster", "cpu-default"];
    let batch = ["--global-batch", "4"];
    let named = "the first tensor that is no number: ";
    let ends = |more: &[&str], figure: &str| {
        for processes in [&[][..], &["--processes=2"]] {
            let wild = ["--steps", "40", "--lr", "1e30", "-o", "wild.json"];
            let done = run(&place, &[&wild[..], more, processes].concat()).expect(6);
            let flat = support::flat(&done.err);
            let told = flat.split_once(named);
            let (before, tensor) = told.unwrap_or_else(|| panic!("none is named: {flat}"));
            assert!(before.contains(figure), "{flat}");
            assert!(tensor.contains("of rank"), "{flat}");
            assert!(!place.exists("wild.json"));
        }
    };
    let f16 = ["--precision", "f16", "--pin", "data=2"];
    place.run(&[&compile[..], &batch, &f16].concat()).expect(0);
    ends(&[], "at a loss scale of 1");
    let stages = ["--pin", "pipeline=2"];
    place
        .run(&[&compile[..], &batch, &stages].concat())
        .expect(0);
    ends(&["--validate-every", "1"], "the validation loss of step 1");
    // Each microbatch updates the weights that the next one meets.
    place.write(
        "config.json",
        support::CONFIG.replace("\"n_layer\"", "\"tie_word_embeddings\": false, \"n_layer\""),
    );
    let each = ["--clip-norm", "none", "--pin", "schedule=pipedream"];
    let pins = ["--pin", "microbatch=2"];
    place
        .run(&[&compile[..], &batch, &stages, &each, &pins].concat())
        .expect(0);
    ends(&[], "the loss of step");
}

/// A plan for more than this machine has, and one for GPUs where there are none: refused before
/// anything is allocated or made, with what it needs and what there is.
#[test]
fn plans_for_more_than_there_is_are_refused_at_once() {
    let place = Place::new();
    // 128 ranks with 23 GiB each: more than any machine of one host that runs tests.
    let compile = ["compile", "gpt3-175b", "--cluster", "dgx-a100-80gb"];
    let hosts = [
        "--hosts",
        "16",
        "--global-batch",
        "16",
        "--sequence",
        "2048",
    ];
    let stages = ["--pin", "tensor=8", "--pin", "pipeline=16"];
    let plain = ["--pin", "schedule=1f1b", "--pin", "zero=0"];
    let micro = ["--pin", "recompute=full", "--pin", "microbatch=1"];
    let rest = ["--precision", "bf16"];
    let all = [&compile[..], &hosts, &stages, &plain, &micro, &rest].concat();
    place.run(&all).expect(0);
    let before = place.names();
    let state = ["--steps", "1", "--checkpoint", "state"];
    for processes in [&[][..], &["--processes=4"]] {
        run(&place, &[&state[..], processes].concat())
            .expect(6)
            .says(&[
                "the plan is for 128 x NVIDIA A100",
                ", and this machine has no GPU; the plan's 128 ranks need ",
                " GiB together, this machine has ",
                "run the plan where those devices are",
            ]);
        assert_eq!(place.names(), before, "something was made");
    }
    let gpus = [&RUN[..], &state, &["--backend", "cuda"]].concat();
    // Neither NVIDIA's libraries nor the emulator's.
    let done = place.run_with(&gpus, &[("LD_LIBRARY_PATH", "")]).expect(6);
    done.says(&["GPU"]);
    assert_eq!(place.names(), before, "something was made");
}

/// Looks at checkpoints, and has them damaged in all ways.
#[test]
fn checkpoints_are_inspected_verified_and_converted() {
    let place = two_ranks();
    let saved = ["--save", "w.safetensors", "--config", "config.json"];
    for (steps, more) in [("2", &[][..]), ("3", &["--resume", "state", "--force"])] {
        let args = ["--steps", steps, "--checkpoint", "state"];
        run(&place, &[&args[..], more, &saved].concat()).expect(0);
    }
    let newest = place.names_in("state").pop().unwrap();
    let words = place.run(&["checkpoint", "inspect", "state"]).expect(0).out;
    for w in [
        "2 checkpoints",
        "after 5 steps",
        "sample 10",
        "rank-1.safetensors",
        "2 shards",
    ] {
        assert!(words.contains(w), "`{w}` is not in:\n{words}");
    }
    assert!(words.lines().all(|l| l.chars().count() <= 100), "{words}");
    let seen = place
        .run(&["checkpoint", "inspect", "state", "--json"])
        .expect(0)
        .json();
    let one = &seen["checkpoints"][0];
    assert_eq!((&one["step"], &one["next_sample"]), (&5.into(), &10.into()));
    let shards = one["shards"].as_object().unwrap().values();
    assert_eq!(
        one["bytes"],
        shards.map(|b| b.as_u64().unwrap()).sum::<u64>()
    );
    // Weights in Hugging Face's form are those that the run saved.
    let convert = ["checkpoint", "convert", "state", "-o", "hf", "--config"];
    place
        .run(&[&convert[..], &["config.json"]].concat())
        .expect(0);
    assert!(place.read("hf/model.safetensors") == place.read("w.safetensors"));
    assert_eq!(place.read("hf/config.json"), place.read("config.json"));
    // Weights are replaced only where that is asked for.
    place.write("hf/config.json", b"mine");
    place
        .run(&[&convert[..], &["config.json"]].concat())
        .expect(2)
        .says(&["model.safetensors: is there already", "--force"]);
    assert_eq!(place.read("hf/config.json"), b"mine");
    place
        .run(&[&convert[..], &["config.json", "--force"]].concat())
        .expect(0);
    assert_eq!(place.read("hf/config.json"), place.read("config.json"));
    run(&place, &["--steps", "1", "--weights", "hf"]).expect(0);
    place
        .run(&[&convert[..], &["tiny-gpt2"]].concat())
        .expect(3)
        .says(&["in the checkpoint"]);
    place.run(&["checkpoint", "verify", "state"]).expect(0);
    let shard = |rank: u32| format!("state/{newest}/rank-{rank}.safetensors");
    // A shard alone is no checkpoint, be it whole.
    for verb in ["verify", "inspect"] {
        let folder = format!("give the folder of the checkpoint, state/{newest},");
        place
            .run(&["checkpoint", verb, &shard(0)])
            .expect(3)
            .says(&["is one shard of a checkpoint", &folder]);
    }
    // All that is wrong is named, of every checkpoint.
    let good = [0, 1].map(|rank| place.read(&shard(rank)));
    let mut turned = good[0].clone();
    let middle = turned.len() / 2;
    turned[middle] ^= 1;
    place.write(&shard(0), turned);
    place.write(&shard(1), &good[1][..good[1].len() - 1]);
    let done = place.run(&["checkpoint", "verify", "state"]).expect(5);
    for rank in [0, 1] {
        assert!(
            done.out.contains(&format!("rank-{rank}.safetensors")),
            "{}",
            done.out
        );
    }
    assert!(done.out.contains("0001-step-2: whole"), "{}", done.out);
    done.says(&["1 of 2 checkpoints damaged"]);
    // Two shards that were swapped, one of another step, none at all.
    place.write(&shard(0), &good[1]);
    place.write(&shard(1), &good[0]);
    place.run(&["checkpoint", "verify", "state"]).expect(5);
    place.write(&shard(1), &good[1]);
    std::fs::copy(
        place.path("state/0001-step-2/rank-0.safetensors"),
        place.path(&shard(0)),
    )
    .unwrap();
    place.run(&["checkpoint", "verify", "state"]).expect(5);
    std::fs::remove_file(place.path(&shard(0))).unwrap();
    place.run(&["checkpoint", "verify", "state"]).expect(5);
    // Nor is one without its manifest.
    std::fs::remove_file(place.path(&format!("state/{newest}/manifest.json"))).unwrap();
    let done = place.run(&["checkpoint", "verify", "state"]).expect(5);
    let named = done.out.contains("manifest.json") && done.out.contains(&newest);
    assert!(named, "{}", done.out);
    // The older one serves.
    let done = run(&place, &["--steps", "1", "--resume", "state"]).expect(0);
    done.says(&["passed over"]);
    place
        .run(&["checkpoint", "verify", "nowhere"])
        .expect(3)
        .says(&["there is no such folder or file"]);
    place
        .run(&["checkpoint", "inspect", "."])
        .expect(3)
        .says(&["the folder has no checkpoint"]);
}
