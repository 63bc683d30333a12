//! One module per verb.

pub mod calibrate;
pub mod check;
pub mod compare;
pub mod compile;
pub mod inspect;
pub mod lower;
pub mod predict;
pub mod presets;
pub mod run;
pub mod schema;
pub mod simulate;
pub mod solve;

use indicatif::{ProgressBar, ProgressStyle};
use std::time::Duration;

/// A spinner on standard error, shown only on a terminal.
pub fn spinner(message: &'static str) -> ProgressBar {
    let bar = ProgressBar::new_spinner().with_message(message);
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

/// Bytes of memory that new work may use, as Linux estimates them.
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
