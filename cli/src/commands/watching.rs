//! A long search shows what it has so far, and Ctrl-C or a time limit takes that. A verb that makes
//! several searches says which of them it is at.

use super::spinner;
use crate::failure::Failure;
use crate::{interrupt, report};
use indicatif::ProgressBar;
use planner::{Progress, Watch};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Where nobody looks at a terminal, a line tells of the search so often.
const EVERY: Duration = Duration::from_secs(10);

/// Shows the search that it watches, and ends it when it is interrupted or its time is over.
pub struct Watching {
    bar: Mutex<ProgressBar>,
    interrupted: Arc<AtomicBool>,
    until: Option<Instant>,
    /// When a line was last written, or the search began.
    told: Mutex<Instant>,
    /// Which search of several it is; empty where there is one.
    label: Mutex<String>,
}

impl Watching {
    /// Watches from now on. `bar` shows it, on a terminal; `limit` is the time that the search has;
    /// `doing` is what an interrupt does. A process can call this once.
    pub fn new(
        bar: &ProgressBar,
        limit: Option<Duration>,
        doing: &'static str,
    ) -> Result<Watching, Failure> {
        let now = Instant::now();
        Ok(Watching {
            bar: Mutex::new(bar.clone()),
            interrupted: interrupt::flag(doing)?,
            until: limit.and_then(|limit| now.checked_add(limit)),
            told: Mutex::new(now),
            label: Mutex::default(),
        })
    }

    /// Says which search comes next.
    pub fn begin(&self, label: String) {
        let bar = self.bar();
        if !bar.is_hidden() {
            bar.set_message(label.clone());
        }
        // A poisoned lock holds words all the same.
        *self.label.lock().unwrap_or_else(|e| e.into_inner()) = label;
    }

    /// Says in a log that the search goes on, where it has said nothing for long: who waits for it
    /// calls this now and then.
    pub fn remind(&self, since: Instant) {
        if !self.bar().is_hidden() {
            return;
        }
        // A poisoned lock holds a time all the same.
        let mut told = self.told.lock().unwrap_or_else(|e| e.into_inner());
        if told.elapsed() >= EVERY {
            let label = self.label.lock().unwrap_or_else(|e| e.into_inner()).clone();
            crate::say(format_args!(
                "{label}: searching for {} s",
                since.elapsed().as_secs()
            ));
            *told = Instant::now();
        }
    }

    /// Shows further searches, on a new bar.
    pub fn again(&self, message: &'static str) -> ProgressBar {
        let bar = spinner(message);
        *self.bar.lock().unwrap_or_else(|e| e.into_inner()) = bar.clone();
        bar
    }

    fn bar(&self) -> ProgressBar {
        self.bar.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }

    /// Whether searches are to end: it was interrupted, or its time is over.
    pub fn is_over(&self) -> bool {
        let is_late = self.until.is_some_and(|until| Instant::now() >= until);
        is_late || self.interrupted.load(Ordering::Relaxed)
    }
}

impl Watch for Watching {
    fn see(&self, progress: &Progress) {
        let label = self.label.lock().unwrap_or_else(|e| e.into_inner()).clone();
        let words = match label.is_empty() {
            true => words(progress),
            false => format!("{label}: {}", words(progress)),
        };
        let bar = self.bar();
        if !bar.is_hidden() {
            bar.set_message(words);
            return;
        }
        // A poisoned lock holds a time all the same.
        let mut told = self.told.lock().unwrap_or_else(|e| e.into_inner());
        if told.elapsed() >= EVERY {
            crate::say(format_args!("{words}"));
            *told = Instant::now();
        }
    }

    fn ends(&self) -> bool {
        self.is_over()
    }
}

/// One line of how far a search is.
fn words(p: &Progress) -> String {
    let mut words = match p.search.is_empty() {
        true => String::new(),
        false => format!("with {}: ", p.search),
    };
    let _ = write!(words, "{} of {} microbatch sizes", p.done, p.of);
    if let Some(best) = &p.best {
        let _ = write!(
            words,
            "; best objective {}, {}, gap {}",
            best.objective_s,
            ir::counted(best.n_stages as u64, "stage"),
            report::percent(best.gap)
        );
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::Seconds;
    use planner::BestSoFar;

    #[test]
    fn a_line_says_how_far_it_is_and_what_it_has() {
        let mut p = Progress {
            search: String::new(),
            done: 2,
            of: 13,
            best: None,
        };
        assert_eq!(words(&p), "2 of 13 microbatch sizes");
        p.search = "16 context ranks".into();
        p.best = Some(BestSoFar {
            objective_s: Seconds(0.725_25),
            n_stages: 128,
            microbatch: 64,
            gap: 0.125,
        });
        let line = words(&p);
        assert_eq!(
            line,
            "with 16 context ranks: 2 of 13 microbatch sizes; best objective 725.250 ms, 128 stages, gap 12.5%"
        );
        assert!(line.len() <= 100, "{}", line.len());
    }
}
