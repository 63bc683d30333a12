//! The outputs that are written, and the files that are never replaced.

#![allow(clippy::unwrap_used)]
#![cfg(unix)] // Links and pipes.

mod support;

use std::io::Read;
use std::os::unix::fs::symlink;
use support::Place;

/// `compile` of the model at hand, with `more` words.
fn compile(place: &Place, more: &[&str]) -> support::Done {
    let words = ["compile", "config.json", "--global-batch", "4"];
    place.run(&[&words, more].concat())
}

const ON_CPU: [&str; 4] = ["--cluster", "cpu-default", "--pin", "data=2"];

/// Nothing in the folder changes, and the command says why.
fn refused(place: &Place, args: &[&str], words: &[&str]) {
    let contents = |place: &Place| -> Vec<(String, Vec<u8>)> {
        let files = place.names().into_iter();
        let files = files.filter(|n| place.path(n).is_file());
        files.map(|n| (n.clone(), place.read(&n))).collect()
    };
    let before = contents(place);
    place.run(args).expect(2).says(words);
    assert!(contents(place) == before, "{args:?} changed a file");
}

#[test]
fn links_stay_and_lead_to_what_is_written() {
    let place = Place::new();
    place.write("old.json", b"old");
    symlink(place.path("old.json"), place.path("link.json")).unwrap();
    compile(&place, &[&ON_CPU[..], &["-o", "link.json"]].concat()).expect(0);
    assert!(place.path("link.json").is_symlink());
    assert!(place.read("old.json").starts_with(b"{"));
    place.run(&["check", "old.json"]).expect(0);
    // The target of a link need not be there yet, but its folder.
    symlink("new.json", place.path("dangling.json")).unwrap();
    compile(&place, &[&ON_CPU[..], &["-o", "dangling.json"]].concat()).expect(0);
    assert!(place.path("dangling.json").is_symlink());
    place.run(&["check", "new.json"]).expect(0);
    symlink("no/folder.json", place.path("lost.json")).unwrap();
    symlink("loop.json", place.path("loop.json")).unwrap();
    for name in ["lost.json", "loop.json"] {
        compile(&place, &[&ON_CPU[..], &["-o", name]].concat())
            .expect(3)
            .says(&["is a link that leads nowhere"]);
        assert!(place.path(name).is_symlink());
    }
    compile(&place, &[&ON_CPU[..], &["-o", "folder/"]].concat())
        .expect(3)
        .says(&["is a folder, expected"]);
}

#[test]
fn pipes_are_written_to() {
    let place = Place::new();
    let pipe = place.path("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());
    let reader = std::thread::spawn({
        let pipe = pipe.clone();
        move || {
            let mut text = String::new();
            std::fs::File::open(pipe)
                .unwrap()
                .read_to_string(&mut text)
                .unwrap();
            text
        }
    });
    compile(&place, &[&ON_CPU[..], &["-o", "pipe"]].concat()).expect(0);
    assert!(!pipe.is_file(), "the pipe was replaced");
    place.write("plan.json", reader.join().unwrap().as_bytes());
    place.run(&["check", "plan.json"]).expect(0);
}

#[test]
fn what_compile_reads_is_not_replaced() {
    let place = Place::new();
    place.write("t.toml", b"global_batch = 4\n");
    let replaced = ["is an input of this command, and would be replaced"];
    let words = ["compile", "config.json", "--train", "t.toml"];
    let train = [&words, &ON_CPU[..], &["-o", "t.toml"]].concat();
    refused(&place, &train, &replaced);
    // The cluster `cpu` is read from cluster.toml.
    let printed = place.run(&["presets", "cpu-default"]).expect(0);
    place.write("cluster.toml", printed.out.as_bytes());
    let words = ["compile", "config.json", "--global-batch", "4"];
    let cpu = [&words[..], &["--cluster", "cpu", "-o", "cluster.toml"]].concat();
    refused(&place, &cpu, &replaced);
}

#[test]
fn dashes_are_refused_before_any_work() {
    let place = Place::with_plan();
    // So many steps would not end.
    let run = [
        "run",
        "plan.json",
        "--data",
        "text.txt",
        "--steps",
        "1000000000",
    ];
    let saved = ["--config", "config.json", "--save", "-"];
    refused(
        &place,
        &[&run[..], &saved].concat(),
        &["`-` is no file to write"],
    );
    for name in ["-", "/dev/stdout", "/dev/fd/1"] {
        let no_file = format!("`{name}` is no file to write");
        refused(&place, &[&run[..], &["-o", name]].concat(), &[&no_file]);
        refused(&place, &["calibrate", "-o", name], &[&no_file]);
    }
}

#[test]
fn what_a_run_reads_and_writes_is_not_replaced() {
    let place = Place::with_plan();
    let config = ["--config", "config.json"];
    fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
        let run = ["run", "plan.json", "--data", "text.txt", "--steps", "1"];
        [&run[..], more].concat()
    }
    let made = ["--save", "w.safetensors", "--checkpoint", "ck"];
    let made = [&config[..], &made].concat();
    place.run(&with(&made)).expect(0);
    // Weights may be all that is left of a training.
    let again = [&config[..], &["--save", "w.safetensors"]].concat();
    refused(&place, &with(&again), &["is there already", "--force"]);
    let forced = [&again[..], &["--force"]].concat();
    place.run(&with(&forced)).expect(0);
    let model = place.path("model");
    std::fs::create_dir(&model).unwrap();
    std::fs::copy(place.path("config.json"), model.join("config.json")).unwrap();
    std::fs::copy(place.path("w.safetensors"), model.join("model.safetensors")).unwrap();
    let weights = std::fs::read(model.join("model.safetensors")).unwrap();
    let ours = [
        "ck/0001-step-1/manifest.json",
        "ck/0001-step-1/rank-0.safetensors",
    ];
    let state = ours.map(|name| place.read(name));

    let read = ["is an input of this command, and would be replaced"];
    let twice = ["is named for two outputs"];
    let of_model = ["--weights", "model"];
    for output in ["model/model.safetensors", "model/config.json"] {
        let words = [&of_model[..], &["-o", output]].concat();
        refused(&place, &with(&words), &read);
    }
    for save in ["model/model.safetensors", "config.json"] {
        let words = [&of_model[..], &config, &["--save", save]].concat();
        refused(&place, &with(&words), &read);
    }
    let beside = [
        "--weights",
        "model/model.safetensors",
        "-o",
        "model/config.json",
    ];
    refused(&place, &with(&beside), &read);
    let resumed = ["--resume", "ck", "--schedule", "constant"];
    for (flag, name) in [("-o", ours[0]), ("-o", ours[1]), ("--save", ours[1])] {
        for more in [&resumed[..], &["--checkpoint", "ck"]] {
            let words = [more, &config, &[flag, name]].concat();
            refused(&place, &with(&words), &read);
        }
    }
    let both = [&config[..], &["--save", "out.bin", "-o", "./out.bin"]].concat();
    refused(&place, &with(&both), &twice);
    // Folders of links, as Hugging Face's cache has them.
    let links = place.path("links");
    std::fs::create_dir(&links).unwrap();
    for name in ["config.json", "model.safetensors"] {
        symlink(model.join(name), links.join(name)).unwrap();
    }
    let of_links = ["--weights", "links", "--config", "config.json"];
    for output in ["links/model.safetensors", "model/model.safetensors"] {
        for flag in ["-o", "--save"] {
            let words = [&of_links[..], &[flag, output]].concat();
            refused(&place, &with(&words), &read);
        }
    }
    assert!(std::fs::read(model.join("model.safetensors")).unwrap() == weights);
    assert!(ours.map(|name| place.read(name)) == state);

    // A run writes beside the training state that it goes on from; two of them stay.
    let on = [&resumed[..], &["--checkpoint", "ck"]].concat();
    place.run(&with(&on)).expect(0);
    assert!(ours.map(|name| place.read(name)) == state);
    place.run(&with(&on)).expect(0);
    let mut kept: Vec<_> = std::fs::read_dir(place.path("ck")).unwrap().collect();
    kept.sort_by_key(|e| e.as_ref().unwrap().file_name());
    let kept: Vec<_> = kept.into_iter().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(kept, ["0002-step-2", "0003-step-3"]);
}

/// No file that a run writes is a folder of it as well: that is found before the first step.
#[test]
fn folders_and_files_of_a_run_have_names_of_their_own() {
    let place = Place::with_plan();
    let run = ["run", "plan.json", "--data", "text.txt", "--steps", "1"];
    for flag in ["--checkpoint", "--record"] {
        place
            .refuses(
                &[&run[..], &["-o", "x.json", flag, "./x.json"]].concat(),
                &[2],
            )
            .says(&["is the folder of", "give each output a name of its own"]);
        assert!(!place.exists("x.json"));
        place
            .refuses(
                &[&run[..], &["--metrics", "x.csv", flag, "x.csv"]].concat(),
                &[2],
            )
            .says(&["is the folder of", "give each output a name of its own"]);
        assert!(!place.exists("x.csv"));
    }
}
