//! Stages and rounds: which task works on which problem, and what follows from the results.
//!
//! ```text
//! stage: reduced ── prices, messages ──┐
//!   round:   prove │ search │ search   │  from one state of prices and one choice
//!            └─────┴─ exchange ┘       │
//!            rule out, presolve again ─┴─ smaller by a twentieth: next stage
//! ```
//!
//! The prover first raises the bound by prices. When that no longer lets the problem shrink,
//! it is given the integer program if this is small enough, and else searches like the others;
//! with time left, prices get another turn now and then.
//!
//! Invariants: tasks of a round see the state at its beginning and nothing of each other
//! (unless a clock runs); what they found is taken over in the order of the tasks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::super::dual::Dual;
use super::super::ilp;
use super::super::presolve::{Infeasibility, presolve_again};
use super::super::reduced::Reduced;
use super::super::tighten::tighten;
use super::super::warm::WarmStart;
use super::SolveOptions;
use super::clock::Clock;
use super::live::{Found, Live};
use super::prove::Proof;
use super::seek::{Seeker, Turn};

/// The stages after which the integer program is tried as it is.
const MAX_STAGES: usize = 40;
/// A stage ends when the problem has become smaller by one part in this many.
const SHRINK: usize = 20;
/// It also ends when a round of prices brought the gap below this part of it.
const CLOSING: f64 = 0.9;
/// The slices of search per thread, unless the work limit says otherwise, and per round.
const SLICES: u64 = 250;
const SLICES_PER_ROUND: u64 = 10;
/// The rounds of search without success after which the solve gives up, if no clock runs.
const MAX_IDLE: u32 = 3;
/// The part of the time limit that search gets after prices on one thread, or in a round alone.
const FIRST_TIME: f64 = 0.1;
const SEARCH_TIME: f64 = 0.15;
/// The rounds of search between two turns of the prices.
const SEARCHES_PER_PRICES: u64 = 4;

/// The first task of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Job {
    Prices,
    IntegerProgram,
    Search,
}

/// The beginning of a stage.
struct Begin {
    reduced: Reduced,
    job: Job,
    /// The prices and messages of the previous stage.
    warm: WarmStart,
    /// The number of stages before.
    n_before: usize,
}

/// The state between rounds.
struct State {
    best: Option<Found>,
    bound: u64,
    round: u64,
    /// The slices of search that are left, per thread.
    slices: u64,
    seekers: Vec<Seeker>,
}

/// Solves a reduced problem, and gives its results to `live`.
pub(super) struct Solver {
    pub options: SolveOptions,
    pub clock: Clock,
    pub live: Arc<Live>,
}

impl Solver {
    /// Runs until the best choice is proved or there is nothing left to spend.
    pub fn run(&self, reduced: Reduced) {
        let n_seekers = self.options.threads.saturating_sub(1).max(1) as u64;
        let mut state = State {
            best: None,
            bound: reduced.offset,
            round: 0,
            slices: self.options.work_limit.unwrap_or(SLICES),
            // The last seeker serves the first task when that searches.
            seekers: (0..=n_seekers)
                .map(|i| Seeker::new(self.options.seed, i))
                .collect(),
        };
        let first = self.options.integer_program_first && self.can_program(&reduced);
        let begin = Begin {
            reduced,
            job: if first {
                Job::IntegerProgram
            } else {
                Job::Prices
            },
            warm: WarmStart::default(),
            n_before: 0,
        };
        self.stages(&mut state, begin);
    }

    /// Runs stage after stage, each with the prices and messages of the one before.
    fn stages(&self, state: &mut State, mut begin: Begin) {
        while let Some(next) = self.stage(state, begin) {
            begin = next;
        }
    }

    /// Runs one stage; returns where the next one begins, unless this was the last.
    fn stage(&self, state: &mut State, begin: Begin) -> Option<Begin> {
        let Begin {
            reduced,
            job: first,
            warm,
            n_before,
        } = begin;
        if reduced.nodes.is_empty() {
            self.live.offer(&reduced, reduced.offset, &[]);
            self.live.known().proved = true;
            return None;
        }
        let mut dual = Dual::warm(&reduced, &warm);
        self.raise(state, dual.bound().0);
        let (mut job, mut n_idle) = (first, 0);
        loop {
            state.round += 1;
            let gap = self.open_gap(state);
            let proof = self.round(state, &reduced, &dual, job);
            if let Some(better) = self.take_over(state, proof) {
                dual = better;
            }
            if self.done(state) {
                return None;
            }
            let Ok(following) = self.tightened(state, &reduced, &dual) else {
                // Only choices that cost as much as the best one are left.
                self.live.known().proved = true;
                return None;
            };
            n_idle = if self.open_gap(state) < gap {
                0
            } else {
                n_idle + 1
            };
            let shrunk = following.size() + reduced.size() / SHRINK < reduced.size();
            // A better choice alone may let prices get further.
            let closing = job == Job::Prices && self.open_gap(state) < CLOSING * gap;
            let next = if (shrunk || closing) && n_before < MAX_STAGES {
                Some(Job::Prices)
            } else if first == Job::Prices && job == first && self.can_program(&following) {
                Some(Job::IntegerProgram)
            } else {
                None
            };
            if let Some(job) = next {
                return Some(Begin {
                    reduced: following,
                    job,
                    warm: dual.warm_start(),
                    n_before: n_before + 1,
                });
            }
            let timed = self.clock.is_timed();
            if !self.options.phases.search
                || !(timed || (state.slices > 0 && n_idle < MAX_IDLE))
                || (job == Job::IntegerProgram && !timed)
            {
                return None;
            }
            job = if timed && job == Job::Search && self.prices_are_due(state) {
                Job::Prices
            } else {
                Job::Search
            };
        }
    }

    fn prices_are_due(&self, state: &State) -> bool {
        self.options.phases.prices && state.round.is_multiple_of(SEARCHES_PER_PRICES)
    }

    /// Runs one round: the job and the searches, side by side if there are threads for it.
    fn round<'r>(
        &self,
        state: &mut State,
        reduced: &'r Reduced,
        dual: &Dual<'r>,
        job: Job,
    ) -> Proof<'r> {
        let mut seekers = std::mem::take(&mut state.seekers);
        let best = state.best.clone();
        let round = Round {
            solver: self,
            reduced,
            best: best.as_ref(),
            bound: state.bound,
            number: state.round,
            latest: Mutex::default(),
        };
        let timed = self.clock.is_timed();
        let n_slices = match (timed, job) {
            (true, _) => u64::MAX,
            (false, Job::Prices) => 0,
            (false, _) => state.slices.min(SLICES_PER_ROUND),
        };
        let first = job == Job::Prices;
        let (own, others) = seekers.split_last_mut().expect("there is one at least");
        let mut proof;
        if self.options.threads == 1 {
            proof = round.job(job, dual, own, n_slices);
            if self.options.phases.search && first && !self.clock.over() {
                let dual = proof.dual.as_ref().unwrap_or(dual);
                let turn = Turn {
                    first,
                    n_slices: 0,
                    beside: false,
                    stop: &self.clock.used(FIRST_TIME),
                };
                let found = round.search(&mut others[0], dual, &turn);
                proof.found.extend(found);
            }
        } else {
            let job_done = AtomicBool::new(false);
            let stop = || self.clock.over() || (timed && job_done.load(Ordering::Relaxed));
            let turn = Turn {
                first,
                n_slices,
                beside: true,
                stop: &stop,
            };
            proof = std::thread::scope(|scope| {
                let (round, turn) = (&round, &turn);
                let searching = others.iter_mut().filter(|_| self.options.phases.search);
                let tasks: Vec<_> = searching
                    .map(|seeker| scope.spawn(move || round.search(seeker, dual, turn)))
                    .collect();
                let mut proof = round.job(job, dual, own, n_slices);
                job_done.store(true, Ordering::Relaxed);
                for task in tasks {
                    match task.join() {
                        Ok(found) => proof.found.extend(found),
                        Err(panic) => std::panic::resume_unwind(panic),
                    }
                }
                proof
            });
        }
        state.seekers = seekers;
        if !timed {
            state.slices -= n_slices;
        }
        proof
    }

    /// Takes over the results of a round; returns its prices and messages.
    fn take_over<'r>(&self, state: &mut State, proof: Proof<'r>) -> Option<Dual<'r>> {
        for found in proof.found {
            if state.best.as_ref().is_none_or(|(best, _)| found.0 < *best) {
                self.live.offer_found(found.clone());
                state.best = Some(found);
            }
        }
        // Choices ruled out before cost at least the best one's, which bounds them too.
        let most = state.best.as_ref().map_or(u64::MAX, |(cost, _)| *cost);
        self.raise(state, proof.bound.min(most));
        let mut known = self.live.known();
        known.proved |= proof.proved;
        if proof.nothing_fits && known.best.is_none() {
            known.infeasible = Some(Infeasibility::Searched);
        }
        proof.dual
    }

    fn raise(&self, state: &mut State, bound: u64) {
        state.bound = state.bound.max(bound);
        self.live.raise(state.bound);
    }

    /// Returns the problem without what the best choice's cost rules out.
    fn tightened(
        &self,
        state: &State,
        reduced: &Reduced,
        dual: &Dual<'_>,
    ) -> Result<Reduced, Infeasibility> {
        let Some((cost, _)) = state.best.as_ref().filter(|_| self.options.phases.tighten) else {
            return Ok(reduced.clone());
        };
        let left = tighten(reduced, dual, *cost);
        let mut next = reduced.clone();
        next.edges = left.edges;
        let next = presolve_again(next, &left.keep, &self.options.presolve)?;
        self.live.note("tighten", next.describe());
        Ok(next)
    }

    /// Says whether the integer program of this problem is to be tried.
    fn can_program(&self, reduced: &Reduced) -> bool {
        if super::backend(self.options.backend).is_none() {
            return false;
        }
        let columns = ilp::n_columns(reduced);
        let fits = columns <= self.options.max_ilp_columns;
        if !fits {
            self.live
                .note("ilp", format!("{columns} columns are too many"));
        }
        fits
    }

    fn done(&self, state: &State) -> bool {
        let proved = {
            let known = self.live.known();
            known.proved || known.infeasible.is_some()
        };
        proved || self.close_enough(state) || self.clock.over()
    }

    fn close_enough(&self, state: &State) -> bool {
        let close = |(cost, _): &Found| {
            let gap = cost.saturating_sub(state.bound) as f64;
            gap <= self.options.gap * *cost as f64
        };
        state.best.as_ref().is_some_and(close)
    }

    /// Returns the relative distance of the best choice from the bound; 1 without a choice.
    fn open_gap(&self, state: &State) -> f64 {
        let gap =
            |(cost, _): &Found| cost.saturating_sub(state.bound) as f64 / (*cost).max(1) as f64;
        state.best.as_ref().map_or(1.0, gap)
    }
}

/// The state that the tasks of a round share.
pub(super) struct Round<'a, 'r> {
    pub solver: &'a Solver,
    pub reduced: &'r Reduced,
    /// The best choice when the round began.
    pub best: Option<&'a Found>,
    /// The bound that was known then: no choice costs less.
    pub bound: u64,
    pub number: u64,
    /// With a clock, the newest prices and messages of the first task, and how many it gave so far.
    latest: Mutex<Option<Latest<'r>>>,
}

/// Prices and messages of an unfinished job, and their number.
pub(super) type Latest<'r> = (u64, Arc<Dual<'r>>);

impl<'r> Round<'_, 'r> {
    /// Gives the other tasks the first task's present state, if they may look at it.
    pub fn publish(&self, dual: &Dual<'r>) {
        if self.solver.clock.is_timed() && self.solver.options.threads > 1 {
            let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
            let n = latest.as_ref().map_or(0, |(n, _)| *n);
            *latest = Some((n + 1, Arc::new(dual.clone())));
        }
    }

    /// Returns the newest published state, if there is one after number `seen`.
    pub fn newer(&self, seen: u64) -> Option<Latest<'r>> {
        let latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        latest.clone().filter(|(n, _)| *n > seen)
    }

    fn job(&self, job: Job, dual: &Dual<'r>, own: &mut Seeker, n_slices: u64) -> Proof<'r> {
        match job {
            Job::Prices => self.raise_bound(dual.clone()),
            Job::IntegerProgram => self.solver.integer_program(self.reduced, self.best),
            Job::Search => {
                let turn = Turn {
                    first: false,
                    n_slices,
                    beside: false,
                    stop: &self.solver.clock.used(SEARCH_TIME),
                };
                Proof {
                    found: self.search(own, dual, &turn).into_iter().collect(),
                    ..Proof::default()
                }
            }
        }
    }
}
