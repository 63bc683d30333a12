//! One module per verb.

pub mod again;
pub mod calibrate;
pub mod check;
pub mod checkpoint;
pub mod compare;
pub mod compile;
pub mod doctor;
pub mod explain;
pub mod export;
pub mod fits;
pub mod import_job;
pub mod inspect;
pub mod lower;
pub mod models;
pub mod point;
pub mod predict;
pub mod presets;
pub mod run;
pub mod schema;
pub mod simulate;
pub mod solve;
pub mod sweep;
pub mod watching;
pub mod what_if;

use indicatif::{ProgressBar, ProgressStyle};
use std::time::Duration;

/// Makes a spinner on standard error, which shows on terminals only.
pub fn spinner(message: &'static str) -> ProgressBar {
    let bar = ProgressBar::new_spinner().with_message(message);
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

/// Reads how many bytes of memory new work may use, as Linux estimates it.
pub fn free_memory() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo
        .lines()
        .find_map(|l| l.strip_prefix("MemAvailable:"))?;
    line.trim()
        .strip_suffix(" kB")?
        .trim()
        .parse::<u64>()
        .ok()?
        .checked_mul(1024)
}
