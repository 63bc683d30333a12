//! Every parser of user files answers every input: with a value or an error, never a panic,
//! and in bounded time and memory.
//!
//! Each test spoils good inputs for `FUZZ_SECONDS` (2 by default) from `FUZZ_SEED`. A panic's
//! input is written to a file; `FUZZ_INPUT=FILE` runs only that input, with the panic shown.

use std::path::Path;
use std::time::Duration;
use tests::fuzz::campaign::{fuzz, save};
use tests::fuzz::target;

/// No input of the sizes tried here may take longer, whatever the machine's load.
const SLOWEST: Duration = Duration::from_secs(20);
/// Most memory of the process at its peak.
const MAX_MEMORY: u64 = 2 << 30;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |v| {
        v.parse()
            .unwrap_or_else(|_| panic!("{name} is `{v}`, expected a number"))
    })
}

/// Peak memory of this process; none where the system does not tell.
fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|l| l.starts_with("VmHWM:"))?;
    line.split_whitespace()
        .nth(1)?
        .parse::<u64>()
        .ok()
        .map(|kb| kb * 1024)
}

fn check(name: &str) {
    let target = target(name);
    if let Ok(file) = std::env::var("FUZZ_INPUT") {
        let input = std::fs::read(&file).unwrap_or_else(|e| panic!("{file}: {e}"));
        println!("{name}: depth {} of {}", (target.run)(&input), target.full);
        return;
    }
    if let Ok(folder) = std::env::var("FUZZ_CORPUS") {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("..")
            .join(folder)
            .join(name);
        std::fs::create_dir_all(&folder).expect("the folder can be made");
        for (i, good) in (target.corpus)().iter().enumerate() {
            std::fs::write(folder.join(format!("good{i}")), good)
                .expect("the input can be written");
        }
        return;
    }
    let (seed, seconds) = (number("FUZZ_SEED", 1), number("FUZZ_SECONDS", 2));
    let found = fuzz(&target, seed, Duration::from_secs(seconds));
    println!(
        "{name}: {} inputs in {seconds} s from seed {seed}; by depth {:?}; slowest {:.3} s; {} panics; peak {:?} MiB",
        found.execs,
        found.depths,
        found.slowest.as_secs_f64(),
        found.panics.len(),
        peak_memory().map(|b| b >> 20),
    );
    let list: Vec<String> = found
        .panics
        .iter()
        .map(|(message, input)| format!("{message}\n    input: {}", save(name, input).display()))
        .collect();
    assert!(list.is_empty(), "{name} panics:\n  {}", list.join("\n  "));
    assert!(
        found.slowest < SLOWEST,
        "{name} takes {:?} on {}",
        found.slowest,
        save(name, &found.slowest_input).display()
    );
    assert!(
        found.execs > 10,
        "{name}: only {} inputs were tried",
        found.execs
    );
    let refused: u64 = found.depths[..target.full].iter().sum();
    assert!(
        refused > 0 && found.depths[target.full] > 0,
        "{name}: mutations are too weak or too strong: {:?}",
        found.depths
    );
    assert!(
        peak_memory().is_none_or(|b| b < MAX_MEMORY),
        "{name} took {:?} bytes",
        peak_memory()
    );
}

macro_rules! parsers {
    ($($name:ident),* $(,)?) => {
        $(
            #[test]
            fn $name() {
                check(stringify!($name));
            }
        )*
        #[test]
        fn every_target_is_fuzzed() {
            let here = [$(stringify!($name)),*];
            assert_eq!(here.to_vec(), tests::fuzz::TARGETS.map(|t| t.name).to_vec());
        }
    };
}

parsers!(
    config,
    weights,
    weights_index,
    graph,
    graph_to_plan,
    program,
    plan,
    cluster_toml,
    cluster_json,
    pins,
    data_bin,
    data_text,
    tokenizer,
    iopddl,
    measurement,
    checkpoint,
    manifest,
    spoken,
    dcp_metadata,
    dcp_chunks,
    train_spec,
    job,
);
