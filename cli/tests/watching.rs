//! Watching a run: metrics in files of all forms, for Prometheus, and as lines.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use support::{Begin, Done, Place};

fn run(place: &Place, more: &[&str]) -> Done {
    place.run(&[&["run", "plan.json", "--data", "text.txt"], more].concat())
}

fn lines(place: &Place, name: &str) -> Vec<String> {
    let text = String::from_utf8(place.read(name)).unwrap();
    text.lines().map(String::from).collect()
}

fn rows(place: &Place, name: &str) -> Vec<Value> {
    let parse = |line: &String| serde_json::from_str(line).unwrap();
    lines(place, name).iter().map(parse).collect()
}

#[test]
fn metrics_go_on_where_a_run_goes_on() {
    let place = Place::with_plan();
    let metrics = [
        "--metrics",
        "m.jsonl",
        "--metrics",
        "m.csv",
        "--metrics",
        "tb/",
    ];
    let first = [
        "--steps",
        "4",
        "--checkpoint",
        "state",
        "--validate-every",
        "4",
    ];
    run(&place, &[&metrics[..], &first].concat()).expect(0);
    // Steps after the checkpoint, which a kill has lost, and a line that it has cut off.
    let append = |name: &str, text: &str| {
        let mut all = place.read(name);
        all.extend_from_slice(text.as_bytes());
        place.write(name, all);
    };
    let lost = lines(&place, "m.jsonl")[1].replace("\"step\":0", "\"step\":4");
    append("m.jsonl", &format!("{lost}\n{{\"step\":5,\"lo"));
    append("m.csv", "4,1,1,1,1,1,,1,0\n5,1");
    let more = ["--steps", "3", "--resume", "state"];
    run(&place, &[&metrics[..], &more].concat()).expect(0);
    let measured: Value = serde_json::from_slice(&place.read("run.json")).unwrap();
    let all = rows(&place, "m.jsonl");
    let steps: Vec<&Value> = all.iter().filter(|r| r["loss"].is_number()).collect();
    let numbers: Vec<u64> = steps.iter().map(|r| r["step"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (0..7).collect::<Vec<_>>());
    for (row, step) in steps[4..].iter().zip(measured["steps"].as_array().unwrap()) {
        for name in ["step", "loss", "grad_norm", "lr"] {
            assert_eq!(row[name], step[name], "{name}");
        }
        assert_eq!(row["step_time_s"], step["seconds"]);
        let tokens = row["tokens_per_s"].as_f64().unwrap() * row["step_time_s"].as_f64().unwrap();
        assert!((tokens - 64.0).abs() < 1e-6, "{row}");
        assert!(row["peak_bytes"].as_u64().unwrap() > 1000, "{row}");
        assert_eq!(row["skipped_steps"], 0);
    }
    // The one before the first step, and that after the last one of the checkpoint.
    let validations = all.iter().filter(|r| r["validation_loss"].is_number());
    let after: Vec<u64> = validations.map(|r| r["step"].as_u64().unwrap()).collect();
    assert_eq!(after, [0, 4]);
    let table = lines(&place, "m.csv");
    assert!(table[0].starts_with("step,loss,grad_norm,lr,"), "{table:?}");
    let numbers: Vec<&str> = table[1..]
        .iter()
        .map(|l| l.split(',').next().unwrap())
        .collect();
    assert_eq!(numbers, ["0", "1", "2", "3", "4", "5", "6"]);
    // A file of events for each run, with the names of the figures.
    let files: Vec<_> = std::fs::read_dir(place.path("tb"))
        .unwrap()
        .flatten()
        .collect();
    assert_eq!(files.len(), 2);
    for file in files {
        let bytes = std::fs::read(file.path()).unwrap();
        let has = |word: &[u8]| bytes.windows(word.len()).filter(|w| *w == word).count();
        assert_eq!(has(b"brain.Event:2"), 1);
        assert!(has(b"train/loss") >= 3 && has(b"train/tokens_per_s") >= 3);
    }
    // Another run loses nothing of the first one.
    let done = run(&place, &["--steps", "1", "--metrics", "m.csv"]).expect(0);
    done.says(&["it is called m.1.csv now"]);
    assert_eq!(lines(&place, "m.1.csv"), table);
    assert_eq!(lines(&place, "m.csv").len(), 2);
    // What is no file of metrics stays as it is, and what has no form is asked for.
    place.write("m.csv", "name,value\nx,1\n");
    run(&place, &["--steps", "1", "--metrics", "m.csv"])
        .expect(3)
        .says(&["line 1 is no row of metrics"]);
    assert_eq!(place.read("m.csv"), b"name,value\nx,1\n");
    run(&place, &["--metrics", "m.xls"])
        .expect(2)
        .says(&[".jsonl", ".csv", "TensorBoard"]);
    place.write("plan.jsonl", place.read("plan.json"));
    let as_data = ["run", "plan.json", "--data", "plan.jsonl"];
    place
        .run(&[&as_data[..], &["--metrics", "plan.jsonl"]].concat())
        .expect(2)
        .says(&["is an input of this command"]);
    run(&place, &["--record", "text.txt"])
        .expect(3)
        .says(&["text.txt: is a file, expected a folder"]);
}

/// A disk that is full from the first byte on.
#[test]
fn metrics_that_cannot_be_written_end_no_run() {
    let place = Place::with_plan();
    std::os::unix::fs::symlink("/dev/full", place.path("full.csv")).unwrap();
    let done = run(
        &place,
        &["--steps", "3", "--metrics", "full.csv", "--log-every", "0"],
    );
    let done = done.expect(0);
    let said = support::flat(&done.err);
    let said = said.matches("metrics cannot be written to full.csv, the run goes on");
    assert_eq!(said.count(), 1, "{}", done.err);
    let done = done.says(&["lacks the metrics"]);
    for step in 0..3 {
        let line = done
            .err
            .lines()
            .find(|l| l.starts_with(&format!("step {step}: loss ")));
        let line = line.unwrap_or_else(|| panic!("{}", done.err));
        assert!(
            line.contains("tokens/s") && line.chars().count() <= 100,
            "{line}"
        );
    }
}

/// Nor does a pipe hold a run up: one that nobody reads is refused, and so is one for what is
/// written at the end alone; a reader that stands still loses rows.
#[test]
fn pipes_hold_no_run_up() {
    let place = Place::with_plan();
    let pipe = place.path("rows.csv");
    let made = Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());
    run(&place, &["--steps", "3", "--metrics", "rows.csv"])
        .expect(3)
        .says(&["rows.csv: it is a pipe from which nobody reads"]);
    run(&place, &["--steps", "3", "-o", "rows.csv"])
        .expect(2)
        .says(&["rows.csv: is a pipe, expected the name of a file"]);
    // Open for both, and so for somebody who does not read.
    let mut reader = std::fs::File::options();
    let mut reader = reader.read(true).write(true).open(&pipe).unwrap();
    let begun = std::time::Instant::now();
    let more = [
        "--steps",
        "2000",
        "--log-every",
        "0",
        "--metrics",
        "rows.csv",
    ];
    run(&place, &more).expect(0).says(&[
        "metrics cannot be written to rows.csv, the run goes on: whoever reads it stands still",
        "rows.csv lacks the metrics of the last steps",
    ]);
    assert!(begun.elapsed() < std::time::Duration::from_secs(60));
    // What it took is there from the first row on.
    let mut first = [0; 4096];
    let n = std::io::Read::read(&mut reader, &mut first).unwrap();
    let text = String::from_utf8_lossy(&first[..n]);
    let mut rows = text.lines();
    assert!(rows.next().unwrap().starts_with("step,"), "{text}");
    assert!(rows.next().unwrap().starts_with("0,"), "{text}");
}

#[test]
fn prometheus_reads_the_newest_step_on_this_host() {
    let place = Place::with_plan();
    let args = ["--steps", "100000000", "--prometheus", "0"];
    let mut child = Command::new(env!("CARGO_BIN_EXE_meshwright"))
        .args(["run", "plan.json", "--data", "text.txt"])
        .args(args)
        .current_dir(place.path("."))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .begin()
        .unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    let rest = line.trim().split_once("127.0.0.1:").map(|(_, rest)| rest);
    let port: u16 = rest
        .unwrap()
        .strip_suffix("/metrics")
        .unwrap()
        .parse()
        .unwrap();
    let ask = |request: &str| {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    // Those who say nothing hold nobody up.
    let idle = || TcpStream::connect(("127.0.0.1", port)).unwrap();
    let _idle: Vec<TcpStream> = (0..30).map(|_| idle()).collect();
    let begun = std::time::Instant::now();
    ask("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(begun.elapsed() < std::time::Duration::from_secs(15));
    let page = loop {
        let page = ask("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        if page.contains("\nmeshwright_loss ") {
            break page;
        }
    };
    assert!(page.starts_with("HTTP/1.1 200 OK\r\n"), "{page}");
    assert!(
        page.contains("meshwright_run{model=\"gpt2\",plan=\""),
        "{page}"
    );
    for name in [
        "loss",
        "grad_norm",
        "lr",
        "tokens_per_s",
        "step_time_s",
        "peak_bytes",
    ] {
        let value = page
            .lines()
            .find_map(|l| l.strip_prefix(&format!("meshwright_{name} ")));
        assert!(value.unwrap().parse::<f64>().unwrap() > 0.0, "{page}");
        assert!(
            page.contains(&format!("# TYPE meshwright_{name} gauge")),
            "{page}"
        );
    }
    for other in ["/other", "/"] {
        let answer = ask(&format!("GET {other} HTTP/1.1\r\n\r\n"));
        assert!(answer.starts_with("HTTP/1.1 404"), "{answer}");
    }
    assert!(ask("POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
    // Nobody else can listen there, and it is the loopback alone.
    run(
        &place,
        &[
            "--steps",
            "1",
            "-o",
            "b.json",
            "--prometheus",
            &port.to_string(),
        ],
    )
    .expect(6)
    .says(&["choose another port"]);
    let listens = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let here = format!(":{port:04X} 00000000:0000 0A");
    let own: Vec<&str> = listens.lines().filter(|l| l.contains(&here)).collect();
    assert!(
        own.iter().all(|l| l.contains("0100007F:")) && !own.is_empty(),
        "{own:?}"
    );
    child.kill().unwrap();
    child.wait().unwrap();
}
