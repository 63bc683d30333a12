//! What makes choices better: dives, then changes of trees and of larger parts.

use std::time::{Duration, Instant};

use super::super::dive::dive;
use super::super::dual::Dual;
use super::super::ilp::IlpOptions;
use super::super::improve::{Random, Search};
use super::super::neighbourhood::{Part, ball};
use super::live::Found;
use super::prove::Finder;
use super::stage::{Latest, Round};

/// Weights of the prices in the first dives.
pub(super) const DIVE_WEIGHTS: [f64; 5] = [1.0, 0.8, 1.3, 2.0, 5.0];
/// Sizes of the trees that are changed at once, in turn.
const TREE_SIZES: [usize; 4] = [3, 10, 30, 100];
/// Trees per node after the dives, and between two parts.
const TREES_PER_NODE: usize = 20;
const TREES_PER_PART: usize = 10_000;
/// Trees between two looks at the clock.
const TREES_PER_LOOK: usize = 256;
/// Table cells of the first part; its most columns, branch-and-bound nodes and seconds.
const FIRST_PART_CELLS: usize = 4000;
const MAX_PART_COLUMNS: usize = 50_000;
const PART_NODES: u64 = 500;
/// Without a clock a node may take long, so there are fewer.
const PART_NODES_UNTIMED: u64 = 30;
const PART_TIME: Duration = Duration::from_secs(4);

/// Whether it is time to end.
pub(super) type Stop<'a> = &'a (dyn Fn() -> bool + Sync);

/// What a searcher may spend in a round.
pub(super) struct Turn<'a> {
    /// Trees first, in proportion to the problem: for a choice that is fresh from the dives.
    pub trees: bool,
    /// Slices of trees and a part each.
    pub n_slices: u64,
    /// Another task makes choices beside this one.
    pub beside: bool,
    pub stop: Stop<'a>,
}

/// One searching thread: what it remembers from round to round.
pub(super) struct Seeker {
    random: Random,
    /// Table cells of the next part.
    max_cells: usize,
}

impl Seeker {
    pub fn new(seed: u64, i: u64) -> Seeker {
        Seeker {
            // Far apart for neighbouring seeds and threads.
            random: Random(seed ^ i.wrapping_mul(0xd1b5_4a32_d192_ed03)),
            max_cells: FIRST_PART_CELLS,
        }
    }
}

impl<'r> Round<'_, 'r> {
    /// Searches for up to `n_slices` slices of trees and a part each, from the best choice
    /// known or from dives.
    pub fn search(&self, seeker: &mut Seeker, dual: &Dual<'_>, turn: &Turn<'_>) -> Option<Found> {
        let mut finder = Finder {
            reduced: self.reduced,
            live: &self.solver.live,
            best: None,
        };
        let mut choice = self.start(dual, &mut finder, turn)?;
        if turn.trees {
            let n_trees = TREES_PER_NODE * self.reduced.nodes.len();
            let stop = || (turn.stop)() || self.newer(0).is_some();
            choice = self.improve(seeker, dual, choice, n_trees, &stop);
            finder.offer(&choice);
        }
        let mut newest: Option<Latest<'r>> = None;
        let (mut n_parts, mut n_better) = (0u64, 0u64);
        while n_parts < turn.n_slices && !(turn.stop)() && !self.is_closed(&finder) {
            if let Some(newer) = self.newer(newest.as_ref().map_or(0, |(n, _)| *n)) {
                choice = self.dive_again(&newer, &mut finder, choice);
                newest = Some(newer);
            }
            let dual = newest.as_ref().map_or(dual, |(_, dual)| dual);
            choice = self.improve(seeker, dual, choice, TREES_PER_PART, turn.stop);
            let better = self.improve_part(seeker, dual, &choice, turn.stop);
            n_parts += 1;
            n_better += u64::from(better.is_some());
            choice = better.unwrap_or(choice);
            finder.offer(&choice);
        }
        if n_parts > 0 {
            let cells = seeker.max_cells;
            let note = format!("{n_better} of {n_parts} parts helped, {cells} cells");
            self.solver.live.note("search", note);
        }
        finder.lifted()
    }

    /// A choice from new prices if it is better, else `choice`.
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

    /// A choice that fits: what is known, or the best of a few dives.
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

    /// Whether what was found meets the bound as it was known before the round.
    fn is_closed(&self, finder: &Finder<'_>) -> bool {
        let cost = finder.cost(self.best);
        cost.is_some_and(|cost| cost <= self.bound)
    }

    fn improve(
        &self,
        seeker: &mut Seeker,
        dual: &Dual<'_>,
        choice: Vec<u32>,
        n_trees: usize,
        stop: Stop<'_>,
    ) -> Vec<u32> {
        let mut search = Search::new(self.reduced, dual, choice, seeker.random.next());
        for i in 0..n_trees {
            if i % TREES_PER_LOOK == 0 && stop() {
                break;
            }
            search.step(TREE_SIZES[i % TREE_SIZES.len()]);
        }
        search.choice
    }

    /// A part as an integer program of its own; the whole choice if that made it better.
    fn improve_part(
        &self,
        seeker: &mut Seeker,
        dual: &Dual<'_>,
        choice: &[u32],
        stop: Stop<'_>,
    ) -> Option<Vec<u32>> {
        let solver = self.solver;
        let options = IlpOptions {
            nodes: Some(if solver.clock.is_timed() {
                PART_NODES
            } else {
                PART_NODES_UNTIMED
            }),
            relative_gap: 0.0,
            seed: solver.options.seed,
            backend: super::backend(solver.options.backend)?,
            stop,
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
        // The size follows what is solved; with a clock, also how fast.
        let slow = solver.clock.is_timed() && begun.elapsed() > PART_TIME / 2;
        seeker.max_cells = if solved && !slow {
            seeker.max_cells + seeker.max_cells / 10
        } else {
            (seeker.max_cells - seeker.max_cells / 5).max(FIRST_PART_CELLS / 8)
        };
        better
    }
}
