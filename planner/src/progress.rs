//! The words of a search about itself while it goes on, and how it is ended early.
//!
//! Invariant: who watches changes nothing, and only who ends a search early gets another plan.

use ir::Seconds;
use std::fmt;
use std::sync::Arc;

/// How far a search is.
#[derive(Clone, Debug, PartialEq)]
pub struct Progress {
    /// Which of the searches for a plan it is, in words; empty for the first one.
    pub search: String,
    /// Microbatch sizes that were searched.
    pub done: usize,
    /// Microbatch sizes that there are.
    pub of: usize,
    /// The best pipeline of this search so far.
    pub best: Option<BestSoFar>,
}

/// The best pipeline that a search has found so far, by the additive objective.
#[derive(Clone, Debug, PartialEq)]
pub struct BestSoFar {
    /// Its objective.
    pub objective_s: Seconds,
    /// Number of its stages.
    pub n_stages: usize,
    /// Samples of its microbatches.
    pub microbatch: u64,
    /// No pipeline of this search has an objective that is less by a larger share.
    pub gap: f64,
}

/// Somebody who follows a search, and may end it. Called from the threads of the search.
pub trait Watch: Send + Sync {
    /// Told after every few microbatch sizes.
    fn see(&self, progress: &Progress);
    /// Whether the search is to end with the best plan that it has, or the first that it finds.
    /// Once true it stays so.
    fn ends(&self) -> bool;
}

/// Who watches a search; nobody by default.
#[derive(Clone, Default)]
pub struct Watcher(Option<Arc<dyn Watch>>);

impl Watcher {
    /// Has `watch` follow the search.
    pub fn new(watch: Arc<dyn Watch>) -> Watcher {
        Watcher(Some(watch))
    }

    pub(crate) fn see(&self, progress: impl FnOnce() -> Progress) {
        if let Some(watch) = &self.0 {
            watch.see(&progress());
        }
    }

    /// Whether the search is to end with the best plan that it has.
    pub fn ends(&self) -> bool {
        self.0.as_ref().is_some_and(|watch| watch.ends())
    }

    /// One that sees nothing, and ends what this one ends: for searches that are parts of another.
    #[must_use]
    pub fn unseeing(&self) -> Watcher {
        let own = self.0.clone();
        Watcher(own.map(|watch| Arc::new(Unseeing(watch)) as Arc<dyn Watch>))
    }
}

struct Unseeing(Arc<dyn Watch>);

impl Watch for Unseeing {
    fn see(&self, _: &Progress) {}
    fn ends(&self) -> bool {
        self.0.ends()
    }
}

impl fmt::Debug for Watcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Some(_) => "Watcher(somebody)",
            None => "Watcher(nobody)",
        })
    }
}
