//! Questions that do not depend on each other, asked on as many threads as there are processors. What
//! is found is listed in the order of the questions, so it does not depend on threads.

use crate::report::Report;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// The answers to `n` questions, each with a report of its own, which are added to `report` in turn.
pub(crate) fn each<T: Send>(
    n: usize,
    report: &mut Report,
    ask: impl Fn(usize, &mut Report) -> T + Sync,
) -> Vec<T> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let next = AtomicUsize::new(0);
    let answers: Vec<Mutex<Option<(T, Report)>>> = (0..n).map(|_| Mutex::default()).collect();
    let work = || {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(answer) = answers.get(i) else {
                return;
            };
            let mut own = Report::default();
            let value = ask(i, &mut own);
            *answer.lock().unwrap_or_else(PoisonError::into_inner) = Some((value, own));
        }
    };
    std::thread::scope(|s| {
        for _ in 1..threads.min(n) {
            s.spawn(work);
        }
        work();
    });
    let answers = answers.into_iter().filter_map(|answer| {
        let (value, own) = answer
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)?;
        report.append(own);
        Some(value)
    });
    answers.collect()
}
