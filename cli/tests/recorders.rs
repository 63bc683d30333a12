//! The records that every run has of its ranks, unasked: what they cost, what they survive, and
//! what `doctor` says by them after a kill.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod support;

use runtime::record::Seen;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use support::{Begin, Place, Running, faults, said};

const LONG: [&str; 6] = [
    "--steps",
    "100000000",
    "-o",
    "run.json",
    // Nobody reads what it says.
    "--log-every",
    "60",
];
const PATIENCE: Duration = Duration::from_secs(60);
/// Ranks of the plan.
const RANKS: u32 = 4;

fn begin(place: &Place, args: &[&str]) -> Running {
    Command::new(env!("CARGO_BIN_EXE_meshwright"))
        .args([&["run", "plan.json", "--data", "text.txt"], args].concat())
        .current_dir(place.path("."))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .begin()
        .unwrap()
}

fn seen(place: &Place, rank: u32) -> Option<Seen> {
    let path = place.path(&format!("run.records/rank-{rank}.record"));
    runtime::record::at(&path).ok()?
}

/// Waits until a rank of this process has played more than so many steps.
fn plays(place: &Place, run: &Running, steps: u64) {
    let since = Instant::now();
    let is_there = |s: Seen| s.pid == run.id() && s.plays > steps;
    while !seen(place, 0).is_some_and(is_there) {
        assert!(since.elapsed() < PATIENCE, "it plays no step");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn signal(run: &Running, signal: Signal) {
    let id = Pid::from_raw(run.id().cast_signed()).unwrap();
    kill_process(id, signal).unwrap();
}

/// Ranks that are threads die together, at any instant, between two words of a record as well.
#[test]
fn doctor_says_where_the_ranks_of_a_killed_process_were() {
    let place = Place::with_plan();
    let mut within = 0;
    for round in 0..12 {
        let run = begin(&place, &LONG);
        plays(&place, &run, 5 + 7 * round);
        std::thread::sleep(Duration::from_micros(617 * round));
        signal(&run, Signal::KILL);
        let pid = run.id();
        run.wait_with_output().unwrap();
        let doctor = ["doctor", "plan.json", "run.records"];
        let json = place.run(&[&doctor[..], &["--json"]].concat()).expect(0);
        let json = json.json();
        let ranks = json["ranks"].as_array().unwrap();
        assert_eq!(ranks.len(), RANKS as usize, "{json}");
        for rank in ranks {
            assert_eq!(rank["pid"], pid, "{json}");
            assert_eq!(rank["process"], "gone", "{json}");
            // Rank 0 had begun so many steps; the others may still be in the one before.
            let least = 4 + 7 * round;
            assert!(rank["step"].as_u64().unwrap() >= least, "{json}");
        }
        // Nobody is accused of what befell all.
        assert_eq!(json["culprits"], serde_json::json!([]), "{json}");
        let words = support::flat(&place.run(&doctor).expect(0).out);
        let is_within = words.contains("ended within a step");
        within += usize::from(is_within && words.contains(", instruction "));
    }
    assert!(within > 0, "no rank was ever in an instruction");
}

/// Files that are short, empty, garbage, another rank's or no files at all are as good as none, and
/// say nothing of the other ranks.
#[test]
fn doctor_goes_on_without_a_record_that_is_damaged() {
    let place = Place::with_plan();
    let run = begin(&place, &LONG);
    plays(&place, &run, 5);
    signal(&run, Signal::KILL);
    run.wait_with_output().unwrap();
    let doctor = ["doctor", "plan.json", "run.records"];
    let record = |rank: u32| format!("run.records/rank-{rank}.record");
    let (other, whole) = (place.read(&record(1)), place.read(&record(2)));
    let spoilt: [(&[u8], &str); 5] = [
        (b"", "it is empty"),
        (b"short", "it has 5 bytes, and a record has 512"),
        (&[7; 512], "it is no record of a rank"),
        (&[7; 513], "it has 513 bytes, and a record has 512"),
        (&other, "it is the record of rank1"),
    ];
    let spoils = |why: &str| {
        let words = support::flat(&place.run(&doctor).expect(0).out);
        let damaged = format!(
            "rank2 left a record that is damaged (run.records/rank-2.record: {why}), so that"
        );
        assert!(words.contains(&damaged), "{words}");
        let json = place.run(&[&doctor[..], &["--json"]].concat()).expect(0);
        let ranks = json.json()["ranks"].as_array().unwrap().clone();
        for (rank, said) in (0..).zip(&ranks) {
            let is_known = said["process"] == "gone" && said["damaged"].is_null();
            assert_eq!(is_known, rank != 2, "{said}");
        }
        assert_eq!(ranks[2]["state"], "no record", "{words}");
    };
    for (bytes, why) in spoilt {
        place.write(&record(2), bytes);
        spoils(why);
    }
    std::fs::remove_file(place.path(&record(2))).unwrap();
    let made = Command::new("mkfifo").arg(place.path(&record(2))).status();
    assert!(made.unwrap().success());
    spoils("it is a pipe or a device, and no regular file");
    std::fs::remove_file(place.path(&record(2))).unwrap();
    let sparse = std::fs::File::create(place.path(&record(2))).unwrap();
    sparse.set_len(100 << 30).unwrap();
    spoils("it has 107374182400 bytes, and a record has 512");
    // A bit of its process, its host, its own number and the plan, which are all that it says of
    // whose it is.
    for byte in [12, 20, 8, 176, 185, 200] {
        let mut bytes = whole.clone();
        bytes[byte] ^= 4;
        place.write(&record(2), bytes);
        spoils("its head is not as it was written");
    }
    // Where nothing is left that says anything, that is said.
    for rank in [0, 1, 3] {
        place.write(&record(rank), "");
    }
    let none = place.run(&doctor).expect(3);
    none.says(&["rank-0.record: it is empty"]);
}

/// Who waits for whom is said by the records of both, and else that it cannot be told.
#[test]
fn doctor_says_of_no_rank_without_a_record_that_others_wait_for_it() {
    let place = Place::with_plan();
    let run = begin(&place, &[&LONG[..], &["--processes"]].concat());
    plays(&place, &run, 5);
    let victim = seen(&place, 1).unwrap().pid.cast_signed();
    let victim = Pid::from_raw(victim).unwrap();
    let doctor = ["doctor", "plan.json", "run.records"];
    let ranks_of = |key: &str| {
        let json = place.run(&[&doctor[..], &["--json"]].concat()).expect(0);
        let json = json.json();
        let ranks = json["ranks"].as_array().unwrap().clone();
        let of = ranks.iter().map(|r| r[key].clone());
        let of: Vec<Value> = of.collect();
        (of, json)
    };
    let names_one = |of: &[Value]| {
        let mut all = of.iter().filter_map(Value::as_array).flatten();
        all.any(|rank| *rank == 1)
    };
    // The others come to where they wait for it, unless it has ended its step: then they have, too.
    let since = Instant::now();
    loop {
        kill_process(victim, Signal::STOP).unwrap();
        let stopped = Instant::now();
        let is_awaited = || names_one(&ranks_of("waits_for").0);
        while !is_awaited() && stopped.elapsed() < PATIENCE / 20 {
            std::thread::sleep(Duration::from_millis(20));
        }
        if is_awaited() {
            break;
        }
        assert!(since.elapsed() < PATIENCE, "nobody waits for it");
        kill_process(victim, Signal::CONT).unwrap();
        std::thread::sleep(Duration::from_millis(3));
    }
    let record = place.path("run.records/rank-1.record");
    std::fs::remove_file(&record).unwrap();
    for (left, line) in [
        (None, "rank1 left no record."),
        (Some("short"), "rank1 left a record that is damaged ("),
    ] {
        left.into_iter()
            .for_each(|bytes| std::fs::write(&record, bytes).unwrap());
        let (waits, json) = ranks_of("waits_for");
        assert!(!names_one(&waits), "{json}");
        assert!(names_one(&ranks_of("may_wait_for").0), "{json}");
        assert_eq!(json["culprits"], serde_json::json!([]), "{json}");
        assert_eq!(json["ranks"][1]["state"], "no record", "{json}");
        let words = support::flat(&place.run(&doctor).expect(0).out);
        for part in [
            "The records do not tell who holds the run up.",
            "rank1 left no record that can be read: whether others waited for it cannot be told.",
            "and it cannot be told whether it waited there for rank1 ",
            line,
        ] {
            assert!(words.contains(part), "`{part}` is not in: {words}");
        }
        for claim in [" waited for rank1", "kept the others waiting"] {
            assert!(!words.contains(claim), "`{claim}` is in: {words}");
        }
    }
    kill_process(victim, Signal::KILL).unwrap();
    run.wait_with_output().unwrap();
}

/// The finding of a run is shown without any records, and is said to be none where it is broken or
/// names ranks that the plan does not have.
#[test]
fn doctor_says_how_far_a_finding_is_good() {
    let place = Place::with_plan();
    let run = begin(&place, &LONG);
    plays(&place, &run, 5);
    signal(&run, Signal::KILL);
    run.wait_with_output().unwrap();
    let of = |found: &str| format!("{{\"error\": \"an error\", \"found\": {found}}}");
    let good = of("{\"2\": {\"lost\": \"it was killed by signal 9\"}}");
    let plain = of("{}");
    let strange = [
        of("{\"2\": \"failed\", \"9\": {\"lost\": \"it was killed by signal 9\"}}"),
        of("{\"2\": {\"missed\": {\"by\": 9, \"seconds\": 2}}}"),
    ];
    let none = [
        "",
        "nonsense",
        "[]",
        "{\"found\": {}}",
        &good[..good.len() - 3],
    ];
    let doctor = ["doctor", "plan.json", "run.records"];
    let examined = || {
        let words = support::flat(&place.run(&doctor).expect(0).out);
        let json = place.run(&[&doctor[..], &["--json"]].concat()).expect(0);
        (words, json.json())
    };
    let lost = "The run itself found: rank2 is lost (it was killed by signal 9).";
    let foreign = "The finding in run.records does not belong to this plan, so nothing is taken \
                   from it: it names rank9, and the plan's ranks are rank0 to rank3.";
    let broken = "The file that would have the run's own finding has no whole one, so nothing is \
                  taken from it: run.records/verdict.json: it is ";
    let other =
        "The finding in run.records is of a run of another plan, so nothing is taken from it.";
    let of_another = good.replacen('{', "{\"plan\": \"f00d\", ", 1);
    let verdict = "run.records/verdict.json";
    place.write(verdict, &good);
    let (words, json) = examined();
    assert!(words.starts_with(lost), "{words}");
    assert_eq!(json["culprits"], serde_json::json!([2]), "{json}");
    let unusable = strange.iter().map(|text| (&text[..], foreign));
    let unusable = unusable.chain(none.map(|text| (text, broken)));
    let unusable = unusable.chain([(&of_another[..], other)]);
    let unusable: Vec<(&str, &str)> = unusable.collect();
    for (text, why) in &unusable {
        place.write(verdict, text);
        let (words, json) = examined();
        assert!(words.starts_with(why), "{text}: {words}");
        assert!(!words.contains("The run itself found"), "{words}");
        // What the records say stands there all the same.
        assert!(words.contains("rank2, in step "), "{words}");
        assert_eq!(json["culprits"], serde_json::json!([]), "{json}");
        assert_eq!(json["verdict"], Value::Null, "{json}");
        let problem = json["verdict_problem"].as_str().unwrap();
        assert!(problem.starts_with(why), "{json}");
    }
    // Without records.
    for rank in 0..RANKS {
        let record = place.path(&format!("run.records/rank-{rank}.record"));
        std::fs::remove_file(record).unwrap();
    }
    let without = "There are no records of ranks that can be read in run.records, so it cannot be \
                   told where the ranks were and who waited for whom.";
    for (text, told, culprits) in [
        (&good, lost, serde_json::json!([2])),
        (
            &plain,
            "The run itself ended with this error: an error",
            serde_json::json!([]),
        ),
    ] {
        place.write(verdict, text);
        let (words, json) = examined();
        assert_eq!(words, format!("{told} {without}"));
        assert_eq!(json["culprits"], culprits, "{json}");
        assert_eq!(json["ranks"][2]["state"], "no record", "{json}");
    }
    for (text, why) in &unusable {
        place.write(verdict, text);
        let refused = place.run(&doctor).expect(3);
        refused.says(&["run.records: it has no records of ranks. ", why]);
    }
    std::fs::remove_file(place.path(verdict)).unwrap();
    let refused = place.run(&doctor).expect(3);
    refused.says(&["run.records: it has no records of ranks"]);
}

#[test]
fn a_run_of_threads_leaves_no_record_where_it_ends_well() {
    let place = Place::with_plan();
    let few = ["run", "plan.json", "--data", "text.txt", "--steps", "3"];
    let few = [&few[..], &["-o", "run.json"]].concat();
    place.run(&few).expect(0);
    assert!(!place.exists("run.records"));
    // Interrupted in order, too.
    let run = begin(&place, &LONG);
    plays(&place, &run, 3);
    signal(&run, Signal::INT);
    let output = run.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", said(&output));
    assert!(!place.exists("run.records"));
    // Those of a run that was killed go with the next one.
    let run = begin(&place, &LONG);
    plays(&place, &run, 3);
    signal(&run, Signal::KILL);
    run.wait_with_output().unwrap();
    assert!(place.exists("run.records/rank-3.record"));
    place.run(&few).expect(0);
    assert!(!place.exists("run.records"));
    // Where no folder can be made there are none.
    place.write("run.records", "a file");
    let done = place.run(&few).expect(0);
    let words = support::flat(&done.err);
    assert!(words.contains("warning: no records of ranks"), "{words}");
    assert_eq!(place.read("run.records"), b"a file");
}

/// Two runs that go on at the same time and have the same output leave each other's records alone.
#[test]
fn runs_of_one_output_have_records_of_their_own() {
    let place = Place::with_plan();
    let few = ["run", "plan.json", "--data", "text.txt", "--steps", "3"];
    for more in [&[][..], &["--processes"]] {
        let first = begin(&place, &[&LONG[..], more].concat());
        plays(&place, &first, 5);
        let second = [&few[..], &["-o", "run.json"], more].concat();
        for _ in 0..2 {
            let done = place.run(&second).expect(0);
            done.says(&[
                "note: run.records is of another run that goes on, so the records of this one are in run.1.records",
            ]);
            assert!(!place.exists("run.1.records"), "it ended in order");
            for rank in 0..RANKS {
                let is_there = seen(&place, rank).is_some();
                assert!(is_there, "the record of rank {rank} is gone");
            }
        }
        // It is what the first is doing that stands there.
        let before = seen(&place, 0).unwrap().plays;
        plays(&place, &first, before);
        // All processes of a run keep theirs in the folder of its own.
        let third = begin(&place, &[&LONG[..], more].concat());
        let since = Instant::now();
        let is_there = |rank: u32| {
            let path = place.path(&format!("run.1.records/rank-{rank}.record"));
            let seen = runtime::record::at(&path).ok().flatten();
            seen.is_some_and(|s| s.plays > 5)
        };
        while !(0..RANKS).all(is_there) {
            assert!(since.elapsed() < PATIENCE, "it plays no step");
            std::thread::sleep(Duration::from_millis(5));
        }
        signal(&third, Signal::KILL);
        third.wait_with_output().unwrap();
        // Nor is a folder another one's that was asked for.
        let asked = [&few[..], &["-o", "b.json", "--record", "run.records"]].concat();
        let refused = place.run(&asked).expect(2);
        refused.says(&["--record run.records: another run that goes on keeps its records"]);
        // What nobody has any more is taken again, and goes.
        signal(&first, Signal::KILL);
        first.wait_with_output().unwrap();
        let done = place.run(&second).expect(0);
        assert!(!done.err.contains("note: run.records"), "{}", done.err);
        assert!(!place.exists("run.records"));
        std::fs::remove_dir_all(place.path("run.1.records")).unwrap();
    }
}

/// To say where it is costs a rank no call of the system: nothing that hangs there holds it up.
#[test]
fn records_are_no_writes() {
    let place = Place::with_plan();
    let library = faults(&place);
    let calls = |steps: &str, more: &[&str]| {
        let log = place.path("calls");
        let _ = std::fs::remove_file(&log);
        let args = ["run", "plan.json", "--data", "text.txt", "--steps", steps];
        let variables = [
            ("LD_PRELOAD", library.to_str().unwrap()),
            ("FAULT_IN", "run.records"),
            ("FAULT_LOG", log.to_str().unwrap()),
        ];
        let args = [&args[..], &["-o", "run.json"], more].concat();
        place.run_with(&args, &variables).expect(0);
        std::fs::read_to_string(log).unwrap()
    };
    for more in [&[][..], &["--processes"]] {
        let of_some = calls("2", more);
        assert!(of_some.contains('w'), "{of_some}");
        let sorted = |calls: String| {
            let mut calls: Vec<char> = calls.chars().collect();
            calls.sort_unstable();
            calls
        };
        assert_eq!(sorted(calls("60", more)), sorted(of_some));
    }
}

/// On a full disk a run goes on without, unless somebody has asked for them.
#[test]
fn records_that_cannot_be_written_end_no_run() {
    let place = Place::with_plan();
    let library = faults(&place);
    let full = [
        ("LD_PRELOAD", library.to_str().unwrap()),
        ("FAULT_IN", ".record"),
        ("FAULT_KINDS", "w"),
        ("FAULT_AT", "1"),
        ("FAULT_ERRNO", "28"),
    ];
    let few = ["run", "plan.json", "--data", "text.txt", "--steps", "3"];
    let few = [&few[..], &["-o", "run.json"]].concat();
    let without = "run.records/rank-";
    let done = place.run_with(&few, &full).expect(0);
    assert!(!place.exists("run.records"));
    done.says(&["warning: no records of ranks", "No space left"]);
    // Only that of one rank, behind the file that is tried first.
    let one = full.map(|(name, value)| match name {
        "FAULT_IN" => (name, "rank-2.record"),
        _ => (name, value),
    });
    let done = place.run_with(&few, &one).expect(0);
    assert!(!place.exists("run.records"));
    let words = support::flat(&done.err);
    assert_eq!(words.matches("warning: ").count(), 1, "{words}");
    done.says(&["warning: no record of rank2, by", without, "No space left"]);
    let asked = [&few[..], &["--record", "mine"]].concat();
    place
        .run_with(&asked, &full)
        .expect(3)
        .says(&[".record", "No space left"]);
}

/// A real file system, which has room for the folder and the record of a rank or two.
#[test]
fn records_that_a_full_disk_does_not_take_are_said() {
    let place = Place::with_plan();
    let script = r#"
        mkdir small && mount -t tmpfs -o size=8k tmpfs small || exit 99
        ln -s "$PWD/small" run.records
        "$1" run plan.json --data text.txt --steps 3 -o run.json
        echo "code $?"
    "#;
    let output = Command::new("unshare")
        .args(["-Urm", "bash", "-c", script, "small"])
        .arg(env!("CARGO_BIN_EXE_meshwright"))
        .current_dir(place.path("."))
        .output();
    let output = match output {
        Ok(output) if output.status.success() => output,
        _ => {
            eprintln!("skipped: no user namespaces here, so no file systems of our own");
            return;
        }
    };
    let (out, words) = (String::from_utf8_lossy(&output.stdout), said(&output));
    assert!(out.contains("code 0"), "{out}{words}");
    assert_eq!(
        words.matches("warning: no record of ").count(),
        1,
        "{words}"
    );
    assert!(words.contains("No space left on device"), "{words}");
}

/// A store to a mapped file would end the process then.
#[test]
fn records_that_somebody_shortens_end_no_run() {
    let place = Place::with_plan();
    for more in [&[][..], &["--processes"]] {
        let run = begin(&place, &[&LONG[..], more].concat());
        plays(&place, &run, 3);
        for rank in 0..RANKS {
            place.write(&format!("run.records/rank-{rank}.record"), "");
        }
        std::thread::sleep(Duration::from_millis(300));
        signal(&run, Signal::INT);
        let output = run.wait_with_output().unwrap();
        let words = said(&output);
        assert_eq!(output.status.code(), Some(130), "{words}");
        let json: Value = serde_json::from_slice(&place.read("run.json")).unwrap();
        assert!(json["steps"].as_array().unwrap().len() > 3, "{words}");
        // They are files of nobody's now.
        std::fs::remove_dir_all(place.path("run.records")).unwrap();
    }
}
