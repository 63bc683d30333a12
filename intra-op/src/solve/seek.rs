//! The ways to better choices: dives, then search by forests; where that gets stuck, fresh
//! starts, and parts as integer programs.

use std::time::{Duration, Instant};

use super::super::dive::dive;
use super::super::dual::Dual;
use super::super::ilp::{Effort, IlpOptions};
use super::super::improve::{Random, Search};
use super::super::neighbourhood::{Part, ball};
use super::live::Found;
use super::prove::Finder;
use super::stage::{Latest, Round};

/// The weights of the prices in the first dives.
pub(super) const DIVE_WEIGHTS: [f64; 5] = [1.0, 0.8, 1.3, 2.0, 5.0];
/// The search before the first look at the others, and in a slice without a clock, in work per
/// strategy and table cell.
const FIRST_WORK: u64 = 1000;
const SLICE_WORK: u64 = 200;
/// A slice helps if it closes this part of the gap. When one does not, the search makes this many
/// fresh starts for each integer program on a part.
const HELPFUL: f64 = 0.005;
const STARTS_PER_PART: u64 = 3;
/// A fresh start: prices vary by up to `exp(+-x)` overall and each for itself, then so many
/// passes of messages, a dive, and this much search.
const START_SPREAD: f64 = 0.7;
const PRICE_SPREAD: f64 = 2.0;
const START_PASSES: usize = 60;
const START_WORK: u64 = 100;
/// The table cells of the first part; the most columns, nodes of the tree and seconds of a part.
const FIRST_PART_CELLS: usize = 4000;
const MAX_PART_COLUMNS: usize = 50_000;
const PART_NODES: u64 = 500;
/// Without a clock a node may take long, so there are fewer.
const PART_NODES_UNTIMED: u64 = 30;
const PART_TIME: Duration = Duration::from_secs(2);

/// A test whether it is time to end.
pub(super) type Stop<'a> = &'a (dyn Fn() -> bool + Sync);

/// The effort that a searcher may spend in a round.
pub(super) struct Turn<'a> {
    /// True for the first search, which takes a choice fresh from the dives and work in proportion
    /// to the problem.
    pub first: bool,
    /// The slices of search; a fresh start or a part comes after each slice that helped little.
    pub n_slices: u64,
    /// True when another task makes choices beside this one.
    pub beside: bool,
    pub stop: Stop<'a>,
}

/// One searching thread: the state that it keeps from round to round.
pub(super) struct Seeker {
    random: Random,
    /// The table cells of the next part.
    max_cells: usize,
}

impl Seeker {
    pub fn new(seed: u64, i: u64) -> Seeker {
        Seeker {
            // Neighbouring seeds and threads get states that are far apart.
            random: Random(seed ^ i.wrapping_mul(0xd1b5_4a32_d192_ed03)),
            max_cells: FIRST_PART_CELLS,
        }
    }
}

impl<'r> Round<'_, 'r> {
    /// Searches for up to `n_slices` slices, from the best choice known or from dives.
    pub fn search(&self, seeker: &mut Seeker, dual: &Dual<'_>, turn: &Turn<'_>) -> Option<Found> {
        let mut finder = Finder {
            reduced: self.reduced,
            live: &self.solver.live,
            best: None,
        };
        let choice = self.start(dual, &mut finder, turn)?;
        let mut search = Search::new(self.reduced, dual, choice, seeker.random.next())?;
        let size = self.reduced.size() as u64;
        if turn.first {
            let stop = || (turn.stop)() || self.newer(0).is_some() || self.is_closed(&finder);
            search.run(FIRST_WORK * size, &stop);
            finder.offer(search.best().1);
        }
        let mut newest: Option<Latest<'r>> = None;
        let (mut n_slices, mut n_stuck, mut n_better) = (0, 0u64, 0u64);
        while n_slices < turn.n_slices && !(turn.stop)() && !self.is_closed(&finder) {
            if let Some(newer) = self.newer(newest.as_ref().map_or(0, |(n, _)| *n)) {
                let choice = search.best().1.to_vec();
                let choice = self.dive_again(&newer, &mut finder, choice);
                search = Search::new(self.reduced, &newer.1, choice, seeker.random.next())?;
                newest = Some(newer);
            }
            let dual = newest.as_ref().map_or(dual, |(_, dual)| dual);
            let before = search.best().0;
            search.run(SLICE_WORK * size, turn.stop);
            finder.offer(search.best().1);
            n_slices += 1;
            let cost = search.best().0;
            let gap = cost.saturating_sub(self.bound.max(dual.bound().0)) as f64;
            if (before - cost) as f64 > HELPFUL * gap || (turn.stop)() {
                continue;
            }
            n_stuck += 1;
            let other = if n_stuck.is_multiple_of(STARTS_PER_PART + 1) {
                let choice = search.best().1.to_vec();
                self.improve_part(seeker, dual, &choice, turn.stop)
            } else {
                self.fresh_start(seeker, dual, turn.stop)
            };
            if let Some(other) = other {
                search.adopt(&other);
                n_better += u64::from(search.best().0 < cost);
                finder.offer(search.best().1);
            }
        }
        if n_slices > 0 {
            let note =
                format!("{n_slices} slices, {n_better} of {n_stuck} starts and parts helped");
            self.solver.live.note("search", note);
        }
        finder.lifted()
    }

    /// Finds a choice from a dive at disturbed prices: the end of a search depends on its start,
    /// and one dive in about three starts well.
    fn fresh_start(
        &self,
        seeker: &mut Seeker,
        dual: &Dual<'_>,
        stop: Stop<'_>,
    ) -> Option<Vec<u32>> {
        let mut factor = |spread: f64| (spread * (2.0 * seeker.random.unit() - 1.0)).exp();
        let overall = factor(START_SPREAD);
        let prices: Vec<f64> = dual
            .prices()
            .into_iter()
            .map(|p| {
                if p > 0.0 {
                    p * overall * factor(PRICE_SPREAD)
                } else {
                    p
                }
            })
            .collect();
        let mut dual = dual.clone();
        dual.set_prices(&prices);
        for _ in 0..START_PASSES {
            if stop() {
                return None;
            }
            dual.pass_messages();
        }
        let choice = dive(self.reduced, &dual, 1.0, None)?;
        let mut search = Search::new(self.reduced, &dual, choice, seeker.random.next())?;
        search.run(START_WORK * self.reduced.size() as u64, stop);
        Some(search.best().1.to_vec())
    }

    /// Returns a choice from new prices if it is better, else `choice`.
    fn dive_again(
        &self,
        (n, dual): &Latest<'r>,
        finder: &mut Finder<'_>,
        choice: Vec<u32>,
    ) -> Vec<u32> {
        let before = finder.cost(None);
        // One weight at a time: dives through large problems take long.
        let weight = DIVE_WEIGHTS[(*n as usize) % DIVE_WEIGHTS.len()];
        if let Some(found) = dive(self.reduced, dual, weight, None) {
            finder.offer(&found);
        }
        match &finder.best {
            Some((cost, better)) if before.is_none_or(|before| *cost < before) => better.clone(),
            _ => choice,
        }
    }

    /// Returns a choice that fits: the known one, or the best of a few dives.
    fn start(&self, dual: &Dual<'_>, finder: &mut Finder<'_>, turn: &Turn<'_>) -> Option<Vec<u32>> {
        if let Some((_, known)) = self.best {
            let projected = self.reduced.project(known).map(|(_, choice)| choice);
            let prefer = || self.reduced.project_partly(known);
            let choice = projected.or_else(|| dive(self.reduced, dual, 1.0, Some(&prefer())));
            choice.iter().for_each(|choice| finder.offer(choice));
        }
        if self.best.is_none() || self.number == 1 || finder.best.is_none() {
            for weight in DIVE_WEIGHTS {
                if finder.best.is_some() && (turn.stop)() {
                    break;
                }
                if let Some(choice) = dive(self.reduced, dual, weight, None) {
                    finder.offer(&choice);
                }
            }
        }
        // With a clock, the first task's choice is as good.
        while finder.best.is_none() && turn.beside && self.solver.clock.is_timed() && !(turn.stop)()
        {
            let other = self.solver.live.known().best.clone();
            match other.and_then(|(_, choice)| self.reduced.project(&choice)) {
                Some((_, choice)) => finder.offer(&choice),
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        }
        finder.best.as_ref().map(|(_, choice)| choice.clone())
    }

    /// Says whether the best choice meets the bound as it was known before the round.
    fn is_closed(&self, finder: &Finder<'_>) -> bool {
        let cost = finder.cost(self.best);
        cost.is_some_and(|cost| cost <= self.bound)
    }

    /// Improves a part by an integer program; returns the whole choice if it became better.
    fn improve_part(
        &self,
        seeker: &mut Seeker,
        dual: &Dual<'_>,
        choice: &[u32],
        stop: Stop<'_>,
    ) -> Option<Vec<u32>> {
        let solver = self.solver;
        let most = solver.options.work_limit.unwrap_or(u64::MAX);
        let work = PART_NODES_UNTIMED.min(most);
        let options = IlpOptions {
            nodes: Some(if solver.clock.is_timed() {
                PART_NODES
            } else {
                PART_NODES_UNTIMED
            }),
            effort: (!solver.clock.is_timed()).then(|| Effort::of_work(work)),
            relative_gap: 0.0,
            seed: solver.options.seed,
            backend: super::backend(solver.options.backend)?,
            stop,
            on_bound: &|_| {},
        };
        let members = ball(self.reduced, dual, seeker.max_cells, &mut seeker.random);
        let left = || solver.clock.left().map(|left| left.min(PART_TIME));
        let begun = Instant::now();
        let part = Part {
            reduced: self.reduced,
            dual,
            members: &members,
            max_columns: MAX_PART_COLUMNS,
        };
        let (better, solved) = part.solve(choice, &options, &left);
        // The size of parts follows what is solved; with a clock, also the speed.
        let slow = solver.clock.is_timed() && begun.elapsed() > PART_TIME / 2;
        seeker.max_cells = if solved && !slow {
            seeker.max_cells + seeker.max_cells / 10
        } else {
            (seeker.max_cells - seeker.max_cells / 5).max(FIRST_PART_CELLS / 8)
        };
        better
    }
}
