//! Elastic runs: they go on with the processes that are left, whoever starts these.

use super::*;

/// A run that loses a rank plans again for those that are left, and comes to its end.
#[test]
fn an_elastic_run_goes_on_with_the_ranks_that_are_left() {
    let place = Place::with_plan();
    let more = ["--steps", "200", "--processes", "--elastic", "-o", "e.json"];
    let state = ["--checkpoint", "state", "--checkpoint-every", "20"];
    let metrics = ["--metrics", "e.jsonl", "--record", "records"];
    let child = command(&place, &[&RUN[..], &more, &state, &metrics].concat()).begin();
    let child = child.unwrap();
    let victim = process_of(&place, 2);
    wait_for_checkpoint(&place, "state", 1);
    signal("-9", victim);
    let output = child.wait_with_output().unwrap();
    let (words, flat) = (String::from_utf8_lossy(&output.stderr), said(&output));
    assert_eq!(output.status.code(), Some(0), "{words}");
    assert!(flat.contains("lost: rank2 is lost"), "{words}");
    let goes_on = "going on with 3 ranks in place of 4";
    assert!(flat.contains(goes_on), "{words}");
    let line = |start: &str| words.lines().find(|l| l.trim_start().starts_with(start));
    assert!(line("Before: data=2").is_some(), "{words}");
    assert!(line("Now:").is_some_and(|l| l.contains("data=")), "{words}");
    // What the lost ranks were doing stays.
    let aside = place.names_in("records/before-loss-1");
    let records = aside.iter().filter(|name| name.ends_with(".record"));
    assert_eq!(records.count(), 4, "a record of each rank");
    assert!(aside.contains(&"verdict.json".to_string()), "{aside:?}");
    // What it went on with is a plan like any other, and every step was made and noted once.
    place.run(&["check", "e.plan-1-of-3-ranks.json"]).expect(0);
    assert!(newest(&place, "state").0.ends_with("-step-200"));
    let rest = steps(&run_json(&place, "e.json"));
    assert_eq!(rest.last().unwrap()[0], "199");
    noted_once(&place, "e.jsonl", 200);
    wait_for_none(&place, "e.json");
}

fn signal(name: &str, to: u32) {
    let sent = Command::new("kill").args([name, &to.to_string()]).status();
    assert!(sent.unwrap().success());
}

/// Waits until the folder has a checkpoint with this number or a later one.
fn wait_for_checkpoint(place: &Place, folder: &str, number: u64) {
    let since = Instant::now();
    let is_there = || {
        let all = std::fs::read_dir(place.path(folder)).map(|d| d.flatten());
        let names = all.into_iter().flatten().map(|e| e.file_name());
        let numbers = names.filter_map(|n| n.to_str()?.split_once("-step-")?.0.parse().ok());
        numbers.max().is_some_and(|newest: u64| newest >= number)
    };
    while !is_there() {
        assert!(since.elapsed() < Duration::from_secs(60), "no checkpoint");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A process of an elastic run, by the words of its command.
fn process_by_words(place: &Place, output: &str, index: usize) -> u32 {
    let is_it = |id: &u32| {
        let line = std::fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).into_owned();
        line.contains("--kept=")
            && match index {
                0 => !line.contains("--as-process="),
                _ => line.contains(&format!("--as-process={index}/")),
            }
    };
    let found = processes_of(place, output).into_iter().find(is_it);
    found.unwrap_or_else(|| panic!("process {index} is not there"))
}

/// A plan of two replicas, each of which has all states.
fn two_replicas(place: &Place) {
    let compile = ["compile", "config.json", "--cluster", "cpu-default"];
    let pins = ["--ranks", "2", "--global-batch", "2", "--pin", "data=2"];
    let zero = ["--pin", "zero=0"];
    place.run(&[&compile[..], &pins, &zero].concat()).expect(0);
}

const ELASTIC: [&str; 6] = [
    "--steps",
    "600",
    "--elastic",
    "--checkpoint-every",
    "20",
    "--checkpoint",
];

/// The death of process 0 ends no elastic run: another one takes its place, and goes on from what the
/// ranks of other processes had in memory.
#[test]
fn an_elastic_run_outlives_process_0() {
    let place = Place::new();
    two_replicas(&place);
    let more = [
        "state",
        "--processes",
        "--metrics",
        "e.jsonl",
        "-o",
        "e.json",
    ];
    let args = [&RUN[..], &ELASTIC, &more, &["--record", "records"]].concat();
    let child = command(&place, &args).begin().unwrap();
    wait_for_checkpoint(&place, "state", 2);
    signal("-9", process_by_words(&place, "e.json", 0));
    let output = child.wait_with_output().unwrap();
    let words = said(&output);
    assert_eq!(output.status.code(), Some(0), "{words}");
    assert!(
        words.contains("lost: process 0 was killed by signal 9"),
        "{words}"
    );
    assert!(
        words.contains("with 1 rank in place of 2, from step "),
        "{words}"
    );
    assert!(
        words.contains("The ranks that were left had all states in memory: no step is lost"),
        "{words}"
    );
    let held_up = "note: the loss has held the run up for ";
    assert_eq!(words.matches(held_up).count(), 1, "{words}");
    let plans = ["Before: data=2 tensor=1 ", "Now: data=1 tensor=1 "];
    for plan in plans {
        assert!(words.contains(plan), "{words}");
    }
    // Given again, the same command has nothing left to do, and leaves all as it is.
    let kept = newest(&place, "state");
    let again = place.run(&args).expect(0);
    assert!(
        again.err.contains("is done, and nothing is left to do"),
        "{}",
        again.err
    );
    assert_eq!(newest(&place, "state"), kept);
    assert!(newest(&place, "state").0.ends_with("-step-600"));
    noted_once(&place, "e.jsonl", 600);
    // With what it went on is of no more use.
    assert!(!place.exists("e.continued.json"));
    wait_for_none(&place, "e.json");
}

/// Several are killed at the same time, process 0 among them or not: all are named, and the run goes on
/// with those that are left.
#[test]
fn all_that_are_killed_at_once_are_counted() {
    let end = |signal: &str, victims: &[u32], words: &[&str], left: &str| {
        let place = Place::new();
        let compile = ["compile", "config.json", "--cluster", "cpu-default"];
        let pins = ["--ranks", "4", "--global-batch", "12", "--pin", "data=4"];
        let zero = ["--pin", "zero=0"];
        place.run(&[&compile[..], &pins, &zero].concat()).expect(0);
        let more = ["--steps", "300", "--processes", "--elastic", "-o", "e.json"];
        let state = ["--checkpoint", "state", "--checkpoint-every", "20"];
        let args = [&RUN[..], &more, &state, &["--time-out", "3"]].concat();
        let child = command(&place, &args).begin().unwrap();
        wait_for_checkpoint(&place, "state", 1);
        let of_rank = |rank: &u32| process_in(&place, "e.records", *rank, 20).to_string();
        let pids: Vec<String> = victims.iter().map(of_rank).collect();
        let sent = Command::new("kill").arg(signal).args(&pids).status();
        assert!(sent.unwrap().success());
        let output = child.wait_with_output().unwrap();
        let said = said(&output);
        let code = output.status.code();
        assert_eq!(code, Some(if left.is_empty() { 6 } else { 0 }), "{said}");
        for w in words.iter().chain([&left]) {
            assert!(said.contains(w), "`{w}` is not in: {said}");
        }
        // Each replica that is left has all states, whoever else was killed.
        assert!(!said.contains("had not written its part"), "{said}");
        wait_for_none(&place, "e.json");
    };
    let kill = |victims: &[u32], words: &[&str], left: &str| end("-9", victims, words, left);
    // What those have in memory that no signal has stopped is not lost either.
    let none = "had all states in memory: no step is lost";
    end("-STOP", &[0, 2], &[none], "in place of 4, from step ");
    end("-STOP", &[1, 2], &[none], "with 2 ranks in place of 4");
    let first =
        "lost: process 0 was killed by signal 9, and with it process 1 (it was killed by signal 9)";
    kill(&[0, 1], &[first], "with 2 ranks in place of 4, from step ");
    let first = "lost: process 0 was killed by signal 9, and with it process 1 (it was killed by signal 9) and process 3 (it";
    kill(
        &[1, 3, 0],
        &[first],
        "with 1 rank in place of 4, from step ",
    );
    let others = "lost in all: processes 2 and 3 of 4, which were killed";
    kill(&[2, 3], &[others], "going on with 2 ranks in place of 4");
    kill(&[0, 1, 2, 3], &["and no other process is left"], "");
}

/// Processes that are lost before all have met are lost as any others, and process 0 is none of them.
/// Whoever asks one of them to end asks the run.
#[test]
fn a_process_that_is_lost_before_all_have_met_is_counted_once() {
    for (signal, code) in [("-9", 0), ("-TERM", 130)] {
        let place = Place::new();
        let compile = ["compile", "config.json", "--cluster", "cpu-default"];
        let pins = ["--ranks", "4", "--global-batch", "12", "--pin", "data=4"];
        place.run(&[&compile[..], &pins].concat()).expect(0);
        let more = ["--steps", "60", "--processes", "--elastic", "-o", "e.json"];
        let state = ["--checkpoint", "state", "--checkpoint-every", "20"];
        let args = [&RUN[..], &more, &state].concat();
        let child = command(&place, &args).begin().unwrap();
        let since = Instant::now();
        let second = |id: &u32| {
            let line = std::fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).contains("--as-process=1/4")
        };
        let victim = loop {
            if let Some(found) = processes_of(&place, "e.json").into_iter().find(second) {
                break found;
            }
            assert!(since.elapsed() < Duration::from_secs(60), "no process 1");
        };
        self::signal(signal, victim);
        let output = child.wait_with_output().unwrap();
        let words = said(&output);
        assert_eq!(output.status.code(), Some(code), "{words}");
        assert!(!words.contains("process 0 was killed"), "{words}");
        if code == 0 {
            assert!(words.contains("with 3 ranks in place of 4"), "{words}");
            assert_eq!(
                run_json(&place, "e.json")["steps"]
                    .as_array()
                    .unwrap()
                    .len(),
                60
            );
        } else {
            assert!(words.contains("interrupted"), "{words}");
            let has_begun = words.contains("interrupted after ");
            let of_it = ["state", "e.json", "e.records"];
            assert!(
                has_begun || !of_it.iter().any(|n| place.exists(n)),
                "{words}"
            );
        }
        wait_for_none(&place, "e.json");
    }
}

/// The folder of checkpoints may be removed while a run writes there: the same command goes on with
/// the run all the same.
#[test]
fn an_elastic_run_outlives_the_loss_of_its_folder() {
    let place = Place::new();
    two_replicas(&place);
    let more = [
        "--steps",
        "100000000",
        "--processes",
        "--elastic",
        "-o",
        "e.json",
    ];
    let state = ["--checkpoint", "state", "--checkpoint-every", "20"];
    let args = [&RUN[..], &more, &state].concat();
    let child = command(&place, &args).begin().unwrap();
    wait_for_checkpoint(&place, "state", 2);
    let since = Instant::now();
    while let Err(e) = std::fs::remove_dir_all(place.path("state")) {
        assert!(since.elapsed() < Duration::from_secs(30), "{e}");
    }
    wait_for_checkpoint(&place, "state", 1);
    signal("-TERM", child.id());
    let output = child.wait_with_output().unwrap();
    let words = said(&output);
    assert_eq!(output.status.code(), Some(130), "{words}");
    assert!(words.contains("was emptied or removed"), "{words}");
    assert!(place.exists("state/elastic.json"), "{words}");
    let name = newest(&place, "state").0;
    let name = name.rsplit_once('/').map_or(&*name, |(_, name)| name);
    let (number, step) = name.split_once("-step-").unwrap();
    let child = command(&place, &args).begin().unwrap();
    wait_for_checkpoint(&place, "state", number.parse::<u64>().unwrap() + 1);
    signal("-TERM", child.id());
    let words = said(&child.wait_with_output().unwrap());
    assert!(words.contains(&format!("from step {step}")), "{words}");
    wait_for_none(&place, "e.json");
}

/// An elastic run that was killed goes on from no damaged checkpoint, and where all are, it does not
/// begin anew: that would have them go, with what is still good in them.
#[test]
fn an_elastic_run_whose_checkpoints_are_all_damaged_is_refused() {
    let place = Place::new();
    two_replicas(&place);
    let more = ["state", "--processes", "-o", "e.json"];
    let args = [&RUN[..], &ELASTIC, &more].concat();
    let child = command(&place, &args).begin().unwrap();
    wait_for_checkpoint(&place, "state", 2);
    let all: Vec<String> = processes_of(&place, "e.json")
        .iter()
        .map(u32::to_string)
        .collect();
    let sent = Command::new("kill").arg("-9").args(&all).status();
    assert!(sent.unwrap().success());
    let _ = child.wait_with_output().unwrap();
    wait_for_none(&place, "e.json");
    let checkpoints = || {
        let names = place.names_in("state").into_iter();
        let mut names: Vec<String> = names.filter(|n| n.contains("-step-")).collect();
        names.sort();
        names
    };
    let before = checkpoints();
    assert!(before.len() >= 2, "{before:?}");
    // Of one the manifest is gone, of the others a bit was turned.
    for (i, name) in before.iter().enumerate() {
        let folder = format!("state/{name}");
        let names = place.names_in(&folder);
        let shard = names.iter().find(|n| *n != "manifest.json").unwrap();
        match i {
            0 => std::fs::remove_file(place.path(&format!("{folder}/manifest.json"))).unwrap(),
            _ => {
                let shard = format!("{folder}/{shard}");
                let mut bytes = place.read(&shard);
                let middle = bytes.len() / 2;
                bytes[middle] ^= 1;
                std::fs::write(place.path(&shard), bytes).unwrap();
            }
        }
    }
    let refused = place.run(&args).expect(3);
    let words = support::flat(&refused.err);
    assert!(
        words.contains("none of the run's checkpoints is whole"),
        "{words}"
    );
    for name in &before {
        assert!(words.contains(name), "{name}: {words}");
    }
    assert_eq!(checkpoints(), before);
    // Nor does it where no manifest says whose they are.
    for name in &before {
        let manifest = place.path(&format!("state/{name}/manifest.json"));
        let _ = std::fs::remove_file(manifest);
    }
    let refused = place.run(&args).expect(3);
    let words = support::flat(&refused.err);
    assert!(words.contains("whole: state/"), "{words}");
    assert_eq!(checkpoints(), before);
    let one = format!("state/{}", before[0]);
    let verified = place.run(&["checkpoint", "verify", &one]).expect(5);
    assert!(verified.out.contains("manifest.json"), "{}", verified.out);
    // Without them it begins anew.
    for name in &before {
        std::fs::remove_dir_all(place.path(&format!("state/{name}"))).unwrap();
    }
    let anew = place.run(&args).expect(0);
    assert!(anew.err.contains("from step 0"), "{}", anew.err);
}

/// Where the ranks that are left have not all states in memory, what the loss of process 0 has cost is
/// said, by the records.
#[test]
fn the_loss_of_process_0_is_counted_in_steps() {
    let place = Place::new();
    let compile = ["compile", "config.json", "--cluster", "cpu-default"];
    let pins = ["--ranks", "2", "--global-batch", "2", "--pin", "data=2"];
    let zero = ["--pin", "zero=1"];
    place.run(&[&compile[..], &pins, &zero].concat()).expect(0);
    let more = ["--steps", "600", "--elastic", "--checkpoint-every", "150"];
    let state = ["--checkpoint", "state", "--processes", "-o", "e.json"];
    let args = [&RUN[..], &more, &state, &["--record", "records"]].concat();
    let child = command(&place, &args).begin().unwrap();
    wait_for_checkpoint(&place, "state", 1);
    process_after(&place, 0, 165);
    process_after(&place, 1, 165);
    signal("-9", process_by_words(&place, "e.json", 0));
    let output = child.wait_with_output().unwrap();
    let words = said(&output);
    assert_eq!(output.status.code(), Some(0), "{words}");
    let number = |before: &str| -> u64 {
        let (_, rest) = words.split_once(before).expect(before);
        let digits = rest.split(|c: char| !c.is_ascii_digit()).next();
        digits.unwrap().parse().unwrap()
    };
    let step = number("with 1 rank in place of 2, from step ");
    let reached = number("which the run makes again: it had come to step ");
    assert_eq!(step % 150, 0, "{words}");
    assert!(reached > step && reached < step + 150, "{words}");
    let lost = match reached - step {
        1 => "1 step is lost".to_string(),
        n => format!("{n} steps are lost"),
    };
    assert!(words.contains(&lost), "{words}");
    assert!(words.contains("Before: data=2 tensor=1 "), "{words}");
    wait_for_none(&place, "e.json");
}

/// Two ranks that split samples in some ops and features in others are no four.
#[test]
fn ranks_that_do_both_in_turn_are_said_to() {
    let place = Place::new();
    let compile = ["compile", "config.json", "--cluster", "cpu-default"];
    let pins = ["--ranks", "2", "--global-batch", "4", "--pin", "pipeline=1"];
    let features = ["--pin", "spec:h.*.mlp.fc=[_,_,y]", "--pin", "zero=0"];
    let args = [&compile[..], &pins, &features].concat();
    place.run(&args).expect(0);
    let done = place.run(&["explain", "plan.json"]).expect(0);
    let degrees = "Degrees: data=2 tensor=2 (the same 2 in turn) pipeline=1 ";
    assert!(done.out.contains(degrees), "{}", done.out);
}

/// A run of GPUs goes on with those that are left, under a plan for a part of their cluster.
#[test]
fn an_elastic_run_of_gpus_goes_on_with_those_that_are_left() {
    let Some(folder) = support::emulator() else {
        return;
    };
    let place = Place::new();
    let compile = ["compile", "config.json", "--precision", "f32"];
    let of = ["--cluster", "h100-sxm*2+nvlink4", "--global-batch", "2"];
    let pins = ["--pin", "data=2", "--pin", "zero=1"];
    place.run(&[&compile[..], &of, &pins].concat()).expect(0);
    let more = ["--steps", "40", "--processes", "--elastic", "-o", "e.json"];
    let state = ["--checkpoint", "state", "--checkpoint-every", "2"];
    let gpus = ["--backend", "cuda", "--on-other-gpus"];
    let child = command(&place, &[&RUN[..], &more, &state, &gpus].concat())
        .env("LD_LIBRARY_PATH", folder)
        .env("MESHWRIGHT_EMULATOR_GPUS", "2")
        .begin()
        .unwrap();
    wait_for_checkpoint(&place, "state", 1);
    signal("-9", process_by_words(&place, "e.json", 1));
    let output = child.wait_with_output().unwrap();
    let words = said(&output);
    assert_eq!(output.status.code(), Some(0), "{words}");
    assert!(
        words.contains("going on with 1 rank in place of 2"),
        "{words}"
    );
    let plan = run_json(&place, "e.plan-1-of-1-ranks.json");
    assert_eq!(plan["cluster"]["missing"][0]["device"], 1, "{words}");
    assert!(newest(&place, "state").0.ends_with("-step-40"));
    wait_for_none(&place, "e.json");
}

/// The same command goes on with an elastic run whose keeper was killed, and with one that was asked to
/// end, and comes to the states of a run that nobody disturbed. Other arguments are not mixed with it.
#[test]
fn the_same_command_goes_on_with_an_elastic_run() {
    let place = Place::new();
    two_replicas(&place);
    let args = [
        &RUN[..],
        &ELASTIC,
        &["state", "--processes", "-o", "e.json"],
    ]
    .concat();
    let keeper = command(&place, &args).begin().unwrap();
    wait_for_checkpoint(&place, "state", 1);
    signal("-9", keeper.id());
    let _ = keeper.wait_with_output();
    // Nobody of the run outlives it.
    wait_for_none(&place, "e.json");
    // Another run is not mixed with it, be it elastic or not.
    let other = [&args[..], &["--lr", "0.5"]].concat();
    let refused = place.run(&other).expect(2);
    refused.says(&[
        "an elastic run that is not done",
        "--lr was none, and is 0.5",
    ]);
    let plain = [&RUN[..], &["--steps", "2", "--checkpoint", "state"]].concat();
    let refused = place.run(&plain).expect(2);
    refused.says(&[
        "an elastic run that is not done",
        "this run is not --elastic",
    ]);
    // A checkpoint that another run has put there meanwhile is not one of this run's.
    let foreign = ["--steps", "3", "--lr", "0.5", "--checkpoint", "other"];
    place.run(&[&RUN[..], &foreign].concat()).expect(0);
    let there = place.path("state/0900-step-3");
    std::fs::rename(place.path("other/0001-step-3"), there).unwrap();
    let asked = command(&place, &args).begin().unwrap();
    wait_for_checkpoint(&place, "state", 903);
    // Some who end a run ask all of its processes, which loses no more than asking one.
    let all = processes_of(&place, "e.json");
    all.into_iter().for_each(|id| signal("-TERM", id));
    let output = asked.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", said(&output));
    assert!(
        said(&output).contains("going on with the run of state/elastic.json, with 2 ranks, from")
    );
    assert!(!said(&output).contains("0900-step-3"), "{}", said(&output));
    assert!(
        said(&output).contains("give the same command again"),
        "{}",
        said(&output)
    );
    // It has lost nobody of whom records could tell.
    assert!(!place.exists("e.records"));
    let done = place.run(&args).expect(0);
    assert_no_panic(&done);
    let whole = [
        "--steps",
        "600",
        "-o",
        "whole.json",
        "--checkpoint",
        "whole",
    ];
    place.run(&[&RUN[..], &whole].concat()).expect(0);
    let [one, other] = ["state", "whole"].map(|folder| newest(&place, folder).1);
    assert!(one == other, "the states differ");
    wait_for_none(&place, "e.json");
}

/// A run that is started twice goes on once.
#[test]
fn an_elastic_run_is_made_once_at_a_time() {
    let place = Place::new();
    two_replicas(&place);
    let more = ["--steps", "100000000", "--processes", "--elastic"];
    let state = ["--checkpoint", "state", "--checkpoint-every", "20"];
    let args = [&RUN[..], &more, &state, &["-o", "e.json"]].concat();
    let first = command(&place, &args).begin().unwrap();
    wait_for_checkpoint(&place, "state", 1);
    let second = place.run(&args).expect(2);
    second.says(&["the folder's run goes on in another process"]);
    // One that is asked twice ends at once.
    signal("-INT", first.id());
    std::thread::sleep(Duration::from_millis(700));
    let _ = Command::new("kill")
        .args(["-INT", &first.id().to_string()])
        .status();
    let output = first.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", said(&output));
    wait_for_none(&place, "e.json");
}

/// All steps are made, and the weights cannot be written: the same command writes them and makes no
/// step, and only then is the run done.
#[test]
fn an_elastic_run_is_done_when_all_is_written() {
    let place = Place::new();
    two_replicas(&place);
    std::fs::create_dir(place.path("out")).unwrap();
    let weights = [
        "--save",
        "out/weights.safetensors",
        "--config",
        "config.json",
    ];
    let more = ["state", "--processes", "-o", "out/e.json"];
    let args = [&RUN[..], &ELASTIC, &more, &weights].concat();
    let child = command(&place, &args).begin().unwrap();
    wait_for_checkpoint(&place, "state", 1);
    std::fs::remove_dir_all(place.path("out")).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", said(&output));
    let last = newest(&place, "state");
    assert!(last.0.ends_with("-step-600"));
    std::fs::create_dir(place.path("out")).unwrap();
    let again = place.run(&args).expect(0);
    assert!(
        again.err.contains("all steps of the run were made before"),
        "{}",
        again.err
    );
    assert!(place.exists("out/weights.safetensors"));
    assert_eq!(newest(&place, "state"), last);
    // The measurement is that of the process that made the steps.
    let measured = run_json(&place, "out/e.json");
    let n_steps = measured["steps"].as_array().unwrap().len();
    assert_eq!(n_steps, 600, "{measured}");
    let left = place.names_in("state");
    assert!(!left.iter().any(|n| n.starts_with("measured")), "{left:?}");
    // Of one that was killed as it was done.
    place.write("state/measured-0f.json", "{}");
    let done = place.run(&args).expect(0);
    assert!(!place.exists("state/measured-0f.json"));
    assert!(
        done.err.contains("is done, and nothing is left to do"),
        "{}",
        done.err
    );
    std::fs::remove_file(place.path("out/weights.safetensors")).unwrap();
    let missing = place.run(&args).expect(6);
    missing.says(&["is done, and out/weights.safetensors is not there"]);
}

/// Process 0 of an elastic run is stopped before it says with what it goes on, and another process as
/// it waits for that: the one that is left does not wait for good, and ends them.
#[test]
fn processes_of_a_launcher_that_are_stopped_early_are_ended() {
    let place = Place::new();
    two_replicas(&place);
    std::fs::create_dir(place.path("state")).unwrap();
    let more = ["state", "--time-out", "2", "-o", "e.json"];
    let args = [&RUN[..], &ELASTIC, &more].concat();
    let by_hand = |rank: &str| launched_one(&place, &args, (rank, "3"), "29531");
    let since = Instant::now();
    let stop = |child: Running, is_ready: &dyn Fn(u32) -> bool| {
        while !is_ready(child.id()) {
            assert!(
                since.elapsed() < Duration::from_secs(60),
                "it does not begin"
            );
        }
        signal("-STOP", child.id());
        child
    };
    let first = stop(by_hand("0"), &|_| place.exists("state/writer.lock"));
    let threads = |id| std::fs::read_dir(format!("/proc/{id}/task")).map_or(0, Iterator::count);
    let second = stop(by_hand("1"), &|id| threads(id) > 1);
    let third = by_hand("2").wait_within(Duration::from_secs(90)).unwrap();
    let words = said(&third);
    assert_eq!(third.status.code(), Some(6), "{words}");
    for (rank, child) in [first, second].into_iter().enumerate() {
        let ended = format!(
            "a signal has stopped process {rank} of the run (pid {})",
            child.id()
        );
        assert!(words.contains(&ended), "{ended}: {words}");
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.signal(), Some(9), "{words}");
    }
    wait_for_none(&place, "e.json");
}

/// A launcher starts the same command again with the processes that it has left, and later with all of
/// them: an elastic run goes on with these, and takes its first plan again.
#[test]
fn a_launcher_starts_an_elastic_run_with_fewer_processes_and_more() {
    let place = Place::new();
    let compile = ["compile", "config.json", "--cluster", "cpu-default"];
    let pins = ["--ranks", "4", "--global-batch", "4", "--pin", "data=4"];
    place.run(&[&compile[..], &pins].concat()).expect(0);
    let args = [&RUN[..], &ELASTIC, &["state", "-o", "e.json"]].concat();
    let more = ["--metrics", "e.jsonl", "--time-out", "30"];
    let args = [&args[..], &more].concat();
    let start = |of: usize, restarts: &str| -> Vec<Running> {
        let one = |rank: usize| {
            let mut command = command(&place, &args);
            command
                .env("TMPDIR", place.path("."))
                .env_remove("XDG_RUNTIME_DIR")
                .envs([("RANK", rank.to_string()), ("WORLD_SIZE", of.to_string())])
                .envs([
                    ("LOCAL_WORLD_SIZE", of.to_string().as_str()),
                    ("MASTER_ADDR", "127.0.0.1"),
                    ("MASTER_PORT", "29517"),
                    ("TORCHELASTIC_RESTART_COUNT", restarts),
                ]);
            command.begin().unwrap()
        };
        (0..of).map(one).collect()
    };
    // With one that is killed the others end.
    let end = |all: Vec<Running>, killed: usize| -> Vec<Output> {
        signal("-9", all[killed].id());
        let outputs: Vec<Output> = all
            .into_iter()
            .map(|child| child.wait_with_output().unwrap())
            .collect();
        for (rank, output) in outputs.iter().enumerate() {
            let code = (rank != killed).then_some(6);
            assert_eq!(output.status.code(), code, "{rank}: {}", said(output));
        }
        outputs
    };
    let four = start(4, "0");
    wait_for_checkpoint(&place, "state", 1);
    end(four, 3);
    let two = start(2, "1");
    let number = |name: &str| -> u64 { name.split_once('-').unwrap().0.parse().unwrap() };
    let written = number(&newest(&place, "state").0);
    wait_for_checkpoint(&place, "state", written + 1);
    let ended = end(two, 0);
    assert_eq!(ended[0].status.code(), None);
    place.run(&["check", "e.plan-1-of-2-ranks.json"]).expect(0);
    let outputs: Vec<Output> = start(4, "2")
        .into_iter()
        .map(|child| child.wait_with_output().unwrap())
        .collect();
    for output in &outputs {
        assert_eq!(output.status.code(), Some(0), "{}", said(output));
    }
    let words = said(&outputs[0]);
    assert!(
        words.contains("with 4 ranks in place of 2, from step "),
        "{words}"
    );
    let left = place.names_in("state");
    let is_told = |name: &String| name.starts_with("elastic-");
    assert!(!left.iter().any(is_told), "{left:?}");
    // A launcher that starts a run again that is done has it end at once.
    for child in start(4, "3") {
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    }
    assert!(newest(&place, "state").0.ends_with("-step-600"));
    noted_once(&place, "e.jsonl", 600);
    wait_for_none(&place, "e.json");
}

/// Metrics of a run that goes on after a loss have each step once, but for one whose figures nobody
/// gathered: the ranks that were left had made it, and process 0 had not heard of that.
fn noted_once(place: &Place, name: &str, steps: u64) {
    let rows = String::from_utf8(place.read(name)).unwrap();
    let noted: Vec<u64> = rows
        .lines()
        .map(|row| {
            let row: Value = serde_json::from_str(row).unwrap();
            row["step"].as_u64().unwrap()
        })
        .collect();
    assert!(noted.is_sorted_by(|a, b| a < b), "{noted:?}");
    assert_eq!((noted[0], *noted.last().unwrap()), (0, steps - 1));
    assert!(noted.len() as u64 + 1 >= steps, "{noted:?}");
}

/// Runs two processes, a rank each, kills the second one in the middle, and waits for the run to go on
/// with the first. Gives what it said.
fn lose_one_of_two(place: &Place, zero: &str, every: &str) -> String {
    let compile = ["compile", "config.json", "--cluster", "cpu-default"];
    let pins = ["--ranks", "2", "--global-batch", "2", "--pin", "data=2"];
    let zero = ["--pin", zero];
    place.run(&[&compile[..], &pins, &zero].concat()).expect(0);
    let more = ["--steps", "800", "--processes", "--elastic", "-o", "e.json"];
    let state = ["--checkpoint", "state", "--checkpoint-every", every];
    let kept = ["--checkpoints-kept", "100", "--metrics", "e.jsonl"];
    let record = ["--record", "records"];
    let args = [&RUN[..], &more, &state, &kept, &record].concat();
    let child = command(place, &args).begin().unwrap();
    let victim = process_of(place, 1).to_string();
    let killed = Command::new("kill").args(["-9", &victim]).status();
    assert!(killed.unwrap().success());
    let output = child.wait_with_output().unwrap();
    let words = said(&output);
    assert_eq!(output.status.code(), Some(0), "{words}");
    assert!(
        words.contains("going on with 1 rank in place of 2"),
        "{words}"
    );
    assert!(!place.exists("e.continued.json"));
    noted_once(place, "e.jsonl", 800);
    wait_for_none(place, "e.json");
    words
}

/// Kills until nothing is left: a run of three goes on with two, then with one. When that is killed, too,
/// its keeper says that nobody is left; what is on the disk is whole, and the run goes on from it.
#[test]
fn an_elastic_run_is_killed_until_nothing_is_left() {
    let place = Place::new();
    let compile = ["compile", "config.json", "--cluster", "cpu-default"];
    let pins = ["--ranks", "3", "--global-batch", "6", "--pin", "data=3"];
    place.run(&[&compile[..], &pins].concat()).expect(0);
    let more = ["--steps", "100000000", "--processes", "--elastic"];
    let state = ["--checkpoint", "state", "--checkpoint-every", "20"];
    let kept = [
        "--metrics",
        "e.jsonl",
        "--record",
        "records",
        "-o",
        "e.json",
    ];
    let args = [&RUN[..], &more, &state, &kept].concat();
    let mut child = command(&place, &args).begin().unwrap();
    let words = BufReader::new(child.stderr.take().unwrap());
    let mut words = words.lines().map(|line| line.unwrap());
    let mut said = String::new();
    let mut until = |said: &mut String, what: &str| {
        let found = words.find(|line| {
            *said += &format!("{line}\n");
            line.contains(what)
        });
        assert!(found.is_some(), "`{what}` is not in:\n{said}");
    };
    let kill = |id: u32| {
        let pid = Pid::from_raw(id.cast_signed()).unwrap();
        kill_process(pid, Signal::KILL).unwrap();
    };
    let lost_steps = |n: usize| {
        let plan = format!("e.plan-{n}-of-{}-ranks.json", 3 - n);
        place.run(&["check", &plan]).expect(0);
        plan
    };
    kill(process_of(&place, 2));
    until(&mut said, "lost: rank2 is lost");
    until(&mut said, "going on with 2 ranks in place of 3");
    kill(process_of(&place, 1));
    until(&mut said, "lost: rank1 is lost");
    until(&mut said, "going on with 1 rank in place of 2");
    lost_steps(1);
    let last_plan = lost_steps(2);
    let last = process_of(&place, 0);
    let mut both = [child.id(), last];
    both.sort_unstable();
    let mut left = processes_of(&place, "e.json");
    left.sort_unstable();
    assert_eq!(left, both, "one process is left, and its keeper");
    kill(last);
    until(
        &mut said,
        "process 0 was killed by signal 9, and no other process is left",
    );
    let ended = child.wait().unwrap();
    assert_eq!(ended.code(), Some(6), "{said}");
    wait_for_none(&place, "e.json");
    assert!(!place.exists("e.json"), "the run is not done");
    let (newest, _) = newest(&place, "state");
    let at: u64 = newest.rsplit('-').next().unwrap().parse().unwrap();
    let resume = ["run", &last_plan, "--data", "text.txt", "--resume", "state"];
    let rest = ["--steps", "3", "--metrics", "e.jsonl", "-o", "rest.json"];
    place.run(&[&resume[..], &rest].concat()).expect(0);
    assert_eq!(
        steps(&run_json(&place, "rest.json"))[0][0],
        at.to_string(),
        "it goes on from {newest}"
    );
    noted_once(&place, "e.jsonl", at + 3);
}

/// Replicas have all states: of a run that lost a rank long before its first checkpoint no step is
/// made again, and what it goes on from is the state of an undisturbed run, to the bit.
#[test]
fn no_step_is_lost_where_replicas_have_the_states() {
    let place = Place::new();
    let words = lose_one_of_two(&place, "zero=0", "100000");
    assert!(
        words.contains("had all states in memory: no step is lost"),
        "{words}"
    );
    let mut names = place.names_in("state");
    names.sort();
    let (_, step) = names[0].split_once("-step-").unwrap();
    assert!(step.parse::<u64>().unwrap() >= 20, "{words}");
    assert!(words.contains(&format!("from step {step}")), "{words}");
    let whole = ["--steps", step, "--total-steps", "800", "-o", "whole.json"];
    let state = ["--checkpoint", "whole"];
    place.run(&[&RUN[..], &whole, &state].concat()).expect(0);
    // The shards are cut otherwise: under a plan of one rank they are the same file.
    let one = [
        "compile",
        "config.json",
        "--cluster",
        "cpu-default",
        "--ranks",
        "1",
    ];
    let batch = ["--global-batch", "2", "-o", "one.json"];
    place.run(&[&one[..], &batch].concat()).expect(0);
    let one_step = |from: &str, to: &str| {
        let one = ["run", "one.json", "--data", "text.txt", "--steps", "1"];
        let places = ["--resume", from, "--checkpoint", to, "-o", "one-run.json"];
        place.run(&[&one[..], &places].concat()).expect(0);
        newest(&place, to)
    };
    let rescued = format!("state/{}", names[0]);
    assert_eq!(one_step(&rescued, "a"), one_step("whole", "b"));
}

/// All steps are made, and a process is lost while the last training state is written: the one that is
/// left writes it, and the weights, and the run is done.
#[test]
fn a_process_that_is_lost_at_the_end_ends_no_elastic_run() {
    let place = Place::new();
    let library = support::faults(&place);
    two_replicas(&place);
    let more = ["--steps", "30", "--processes", "--elastic", "-o", "e.json"];
    let state = ["--checkpoint", "state", "--checkpoint-every", "1000"];
    let save = ["--save", "w.safetensors", "--config", "config.json"];
    let out = [&save[..], &["--record", "records"]].concat();
    let args = [&RUN[..], &more, &state, &out].concat();
    let child = command(&place, &args)
        .env("LD_PRELOAD", library)
        .env("FAULT_IN", "state")
        .env("FAULT_DELAY", "1000")
        .begin()
        .unwrap();
    let victim = process_of(&place, 1).to_string();
    // A file of states, which is not on the disk for another second.
    let since = Instant::now();
    let is_writing = || {
        let all = std::fs::read_dir(place.path("state")).into_iter().flatten();
        let mut files = all.flatten().flat_map(|f| std::fs::read_dir(f.path()));
        files.any(|mut of| of.any(|f| f.is_ok_and(|f| f.path().extension().is_some())))
    };
    while !is_writing() {
        assert!(
            since.elapsed() < Duration::from_secs(60),
            "nothing is written"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    signal("-9", victim.parse().unwrap());
    let output = child.wait_with_output().unwrap();
    let words = said(&output);
    assert_eq!(output.status.code(), Some(0), "{words}");
    let flat = support::flat(&words);
    assert!(flat.contains("no step is lost"), "{words}");
    assert!(
        flat.contains("all steps of the run were made before"),
        "{words}"
    );
    assert!(newest(&place, "state").0.ends_with("-step-30"), "{words}");
    assert!(place.exists("w.safetensors"), "{words}");
    assert_eq!(
        run_json(&place, "e.json")["steps"]
            .as_array()
            .unwrap()
            .len(),
        30
    );
    place.run(&args).expect(0).says(&["nothing is left to do"]);
    wait_for_none(&place, "e.json");
}

/// The disk takes what replicas write and keeps other bits, as it does with the checkpoints before: none
/// of these is one, and the run goes on from the newest that is whole.
#[test]
fn a_rescued_state_that_the_disk_spoils_is_not_gone_on_from() {
    let place = Place::new();
    let library = support::faults(&place);
    let compile = ["compile", "config.json", "--cluster", "cpu-default"];
    let pins = ["--ranks", "2", "--global-batch", "2", "--pin", "data=2"];
    let zero = ["--pin", "zero=0"];
    place.run(&[&compile[..], &pins, &zero].concat()).expect(0);
    let more = ["--steps", "800", "--processes", "--elastic", "-o", "e.json"];
    let state = ["--checkpoint", "state", "--checkpoint-every", "20"];
    let kept = ["--checkpoints-kept", "100", "--record", "records"];
    let lies = place.path("lies");
    let child = command(&place, &[&RUN[..], &more, &state, &kept].concat())
        .env("LD_PRELOAD", library)
        .env("FAULT_IN", "state")
        .env("FAULT_WHILE", &lies)
        .begin()
        .unwrap();
    wait_for_checkpoint(&place, "state", 1);
    std::fs::write(&lies, "").unwrap();
    // Long enough for some checkpoints that do not come to be.
    let victim = process_after(&place, 1, 200).to_string();
    let killed = Command::new("kill").args(["-9", &victim]).status();
    assert!(killed.unwrap().success());
    let output = child.wait_with_output().unwrap();
    let words = support::flat(&said(&output));
    // The last training state cannot be written either.
    assert_eq!(output.status.code(), Some(3), "{words}");
    let not = "The ranks that are left have all states in memory, but these cannot be written: ";
    assert!(words.contains(not), "{words}");
    let spoilt = "the disk does not give back what was written to it";
    assert!(words.contains(spoilt), "{words}");
    let (_, path) = words.split_once("The newest checkpoint is ").expect(&words);
    let path = path.split(". ").next().unwrap();
    place.run(&["checkpoint", "verify", path]).expect(0);
    assert_eq!(steps(&run_json(&place, "e.json")).last().unwrap()[0], "799");
    wait_for_none(&place, "e.json");
}

/// With ZeRO each rank has moments that no other one has: the run goes on from its checkpoint, and says
/// why.
#[test]
fn states_that_one_rank_had_alone_are_taken_from_the_checkpoint() {
    // Killed right behind a checkpoint a run loses no step, and killed while ranks gather what they
    // updated it finds none at a step's states; not every time.
    let mut tries = (0..8).map(|_| states_of_one_rank());
    assert!(
        tries.any(|lost| lost),
        "no run lost a step of states that one rank had alone"
    );
}

/// Whether the run lost a step, for want of states that the lost rank had alone.
fn states_of_one_rank() -> bool {
    let place = Place::new();
    let words = lose_one_of_two(&place, "zero=1", "10");
    let why = "do not have all states in memory, as ";
    assert!(words.contains(why), "{words}");
    let is_alone = words.contains("all states in memory, as of `moment1.")
        && words.contains("there was a part with rank1 and nowhere else");
    assert!(
        is_alone || words.contains("those that are left were between two steps' states"),
        "{words}"
    );
    assert!(
        words.contains("The newest checkpoint is state/00"),
        "{words}"
    );
    // From one step to another, with what is between them.
    let flat = support::flat(&words);
    let number = |before: &str| -> u64 {
        let (_, rest) = flat
            .split_once(before)
            .unwrap_or_else(|| panic!("no `{before}` in {flat}"));
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        digits.parse().unwrap()
    };
    let new = number("in place of 2, from step ");
    let has_lost = flat.contains("it had come to step ");
    if has_lost {
        let old = number("it had come to step ");
        let lost = match old - new {
            1 => "1 step is lost".to_string(),
            n => format!("{n} steps are lost"),
        };
        assert!(old > new && flat.contains(&lost), "{flat}");
        assert!(
            flat.contains(&format!("goes on from step {new}.")),
            "{flat}"
        );
    }
    has_lost && is_alone
}
