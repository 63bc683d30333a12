//! Decides when to stop: at a time limit, at a request from outside, or never.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The part of the time limit that is kept for ending work in progress, checking and writing the
/// result, and the most that is kept.
const RESERVE: f64 = 0.04;
const MOST_RESERVE: Duration = Duration::from_millis(1200);

/// The clock of one solve.
#[derive(Clone, Debug)]
pub(super) struct Clock {
    pub start: Instant,
    limit: Option<Duration>,
    /// Work ends here; half of the reserve later it is left behind.
    end: Option<Instant>,
    last: Option<Instant>,
    cancel: Option<Arc<AtomicBool>>,
}

impl Clock {
    pub fn new(
        start: Option<Instant>,
        limit: Option<Duration>,
        cancel: Option<Arc<AtomicBool>>,
    ) -> Clock {
        let start = start.unwrap_or_else(Instant::now);
        let reserve = |limit: Duration| limit.mul_f64(RESERVE).min(MOST_RESERVE);
        // A limit beyond what an instant can represent is no limit.
        let at = |limit: Duration, less: Duration| start.checked_add(limit.saturating_sub(less));
        Clock {
            start,
            limit,
            end: limit.and_then(|limit| at(limit, reserve(limit))),
            last: limit.and_then(|limit| at(limit, reserve(limit) / 2)),
            cancel,
        }
    }

    /// Says whether results may depend on the machine.
    pub fn is_timed(&self) -> bool {
        self.limit.is_some()
    }

    /// Says whether somebody may want the result before the work has ended.
    pub fn may_stop_early(&self) -> bool {
        self.is_timed() || self.cancel.is_some()
    }

    /// Says whether the caller asked to stop.
    pub fn cancelled(&self) -> bool {
        self.cancel
            .as_ref()
            .is_some_and(|c| c.load(Ordering::Relaxed))
    }

    /// Says whether it is time to end.
    pub fn over(&self) -> bool {
        self.cancelled() || self.end.is_some_and(|end| Instant::now() >= end)
    }

    /// Says whether unfinished work must be left behind.
    pub fn past(&self) -> bool {
        self.last.is_some_and(|last| Instant::now() >= last)
    }

    /// Returns the time left for work; `None` without a limit.
    pub fn left(&self) -> Option<Duration> {
        if self.cancelled() {
            return Some(Duration::ZERO);
        }
        Some(self.end?.saturating_duration_since(Instant::now()))
    }

    /// Returns a test whether, from now on, this fraction of the time limit has passed or the end
    /// has come.
    pub fn used(&self, fraction: f64) -> impl Fn() -> bool + Sync + use<'_> {
        let until = self
            .limit
            .and_then(|limit| Instant::now().checked_add(limit.mul_f64(fraction)));
        move || self.over() || until.is_some_and(|until| Instant::now() >= until)
    }
}
