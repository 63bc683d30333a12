//! Questions that do not depend on each other, asked on several threads. What is found is listed in the
//! order of the questions, so it does not depend on threads.
//!
//! A question may ask several of its own. Helpers are counted in the whole process, and are one less
//! than there are processors: whoever asks works, too, and takes a helper on before each question where
//! one is free. One that cannot be had is done without.

use crate::report::Report;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::{Builder, Scope};

/// The answers to `n` questions, each with a report of its own, which are added to `report` in turn.
pub(crate) fn each<T: Send>(
    n: usize,
    report: &mut Report,
    ask: impl Fn(usize, &mut Report) -> T + Sync,
) -> Vec<T> {
    let round = Round {
        ask: &ask,
        next: AtomicUsize::new(0),
        answers: (0..n).map(|_| Mutex::default()).collect(),
    };
    std::thread::scope(|scope| round.work(scope));
    let answers = round.answers.into_iter().filter_map(|answer| {
        let (value, own) = answer
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)?;
        report.append(own);
        Some(value)
    });
    answers.collect()
}

/// Questions that are asked side by side.
struct Round<'a, T> {
    ask: &'a (dyn Fn(usize, &mut Report) -> T + Sync),
    /// The first question that nobody has taken.
    next: AtomicUsize,
    answers: Vec<Mutex<Option<(T, Report)>>>,
}

impl<T: Send> Round<'_, T> {
    /// Asks until there are no more questions.
    fn work<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        loop {
            // One question is for this thread.
            if self.next.load(Ordering::Relaxed) + 1 < self.answers.len()
                && let Some(helper) = Helper::free()
            {
                let help = move || {
                    let _helper = helper;
                    self.work(scope);
                };
                // Where the system has no thread to give, the helper is free again.
                drop(Builder::new().spawn_scoped(scope, help));
            }
            let i = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(answer) = self.answers.get(i) else {
                return;
            };
            let mut own = Report::default();
            let value = (self.ask)(i, &mut own);
            *answer.lock().unwrap_or_else(PoisonError::into_inner) = Some((value, own));
        }
    }
}

/// Helpers at work.
static HELPERS: AtomicUsize = AtomicUsize::new(0);

/// The right to have one more thread, until it is dropped.
struct Helper;

impl Helper {
    /// One that is free, if any.
    fn free() -> Option<Self> {
        static MOST: OnceLock<usize> = OnceLock::new();
        let most = *MOST.get_or_init(|| {
            let processors = std::thread::available_parallelism().map_or(1, usize::from);
            processors - 1
        });
        let one_more = |n: usize| (n < most).then_some(n + 1);
        let taken = HELPERS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
        taken.ok().map(|_| Helper)
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        HELPERS.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Questions that ask some of their own, three deep: no more threads work than one for the caller
    /// and the helpers, and the answers are in order.
    #[test]
    fn questions_in_questions_have_no_threads_of_their_own() {
        static AT_WORK: AtomicUsize = AtomicUsize::new(0);
        static MOST: AtomicUsize = AtomicUsize::new(0);
        let question = |_: usize, _: &mut Report| {
            let now = AT_WORK.fetch_add(1, Ordering::Relaxed) + 1;
            MOST.fetch_max(now, Ordering::Relaxed);
            std::thread::sleep(std::time::Duration::from_micros(100));
            AT_WORK.fetch_sub(1, Ordering::Relaxed);
        };
        let of_three = |_: usize, report: &mut Report| each(6, report, question).len();
        let of_two = |i: usize, report: &mut Report| (i, each(6, report, of_three));
        let found = each(6, &mut Report::default(), of_two);
        let expected: Vec<(usize, Vec<usize>)> = (0..6).map(|i| (i, vec![6; 6])).collect();
        assert_eq!(found, expected);
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        assert!(MOST.load(Ordering::Relaxed) <= processors);
    }
}
