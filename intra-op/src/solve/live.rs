//! The state of knowledge, shared by all threads: the best choice, the bound, and the trace.
//!
//! Invariants: `best` fits the original problem and costs what is said; no choice costs less
//! than `bound`. Both only improve. Nothing here decides how the search goes on unless a clock
//! runs, because the order in which threads arrive is not the same twice.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::super::presolve::Infeasibility;
use super::super::reduced::Reduced;
use super::TraceEntry;

/// Improvements closer together than this share a line of the trace.
const TRACE_EVERY_S: f64 = 0.05;
/// The phase that such lines name.
const IMPROVED: &str = "improved";

/// A choice of the original problem, with its cost first.
pub(super) type Found = (u64, Vec<u32>);

/// The shared state.
pub(super) struct Live {
    start: Instant,
    known: Mutex<Known>,
}

#[derive(Default)]
pub(super) struct Known {
    pub best: Option<Found>,
    pub bound: u64,
    /// True when the best is proved optimal, or when nothing fits and there is none.
    pub proved: bool,
    pub infeasible: Option<Infeasibility>,
    pub trace: Vec<TraceEntry>,
    /// The time at which the trace's last line of improvements was begun.
    line_began: f64,
}

impl Live {
    pub fn new(start: Instant) -> Live {
        Live {
            start,
            known: Mutex::default(),
        }
    }

    /// Locks the state. A thread that panicked leaves it whole, because every change is one step.
    pub fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes over a choice, given in the terms of `reduced`, if it is better.
    pub fn offer(&self, reduced: &Reduced, cost: u64, choice: &[u32]) {
        if self.cost().is_some_and(|best| best <= cost) {
            return;
        }
        let choice = reduced.lift(choice);
        self.offer_found((cost, choice));
    }

    /// Takes over an original choice if it is better.
    pub fn offer_found(&self, found: Found) {
        let mut known = self.known();
        if known.best.as_ref().is_none_or(|(best, _)| found.0 < *best) {
            known.best = Some(found);
            self.improved(&mut known);
        }
    }

    /// Takes over a bound if it is higher.
    pub fn raise(&self, bound: u64) {
        let mut known = self.known();
        if bound > known.bound {
            known.bound = bound;
            self.improved(&mut known);
        }
    }

    /// Returns the cost of the best choice.
    pub fn cost(&self) -> Option<u64> {
        self.known().best.as_ref().map(|(cost, _)| *cost)
    }

    /// Ends a phase, and writes a line about it to the trace.
    pub fn note(&self, phase: &'static str, note: String) {
        let mut known = self.known();
        let entry = self.entry(&known, phase, note);
        known.trace.push(entry);
    }

    fn improved(&self, known: &mut Known) {
        let entry = self.entry(known, IMPROVED, String::new());
        // The first choice always has a line of its own.
        let goes_on = known.trace.last().is_some_and(|last| {
            last.phase == IMPROVED
                && last.objective.is_some() == entry.objective.is_some()
                && entry.seconds - known.line_began < TRACE_EVERY_S
        });
        if goes_on {
            known.trace.pop();
        } else {
            known.line_began = entry.seconds;
        }
        known.trace.push(entry);
    }

    fn entry(&self, known: &Known, phase: &'static str, note: String) -> TraceEntry {
        TraceEntry {
            phase,
            seconds: self.start.elapsed().as_secs_f64(),
            objective: known.best.as_ref().map(|(cost, _)| u128::from(*cost)),
            lower_bound: (known.bound > 0).then_some(u128::from(known.bound)),
            note,
        }
    }
}
