//! The ways to raise the bound: prices and messages, exact elimination, the integer program.

use std::time::{Duration, Instant};

use super::super::dive::dive;
use super::super::dual::Dual;
use super::super::eliminate::Eliminator;
use super::super::ilp::{self, Effort, IlpOptions};
use super::super::reduced::Reduced;
use super::live::{Found, Live};
use super::seek::DIVE_WEIGHTS;
use super::stage::{Round, Solver};

/// The price steps of a round.
const PRICE_ROUNDS: usize = 900;
/// The part of the time limit that prices get in a round.
const PRICE_TIME: f64 = 0.2;
/// With a clock, the time after which other tasks get the prices on the way.
const PUBLISH_EVERY: Duration = Duration::from_secs(2);
/// Elimination is tried with up to this many message cells: 32 MiB.
const MAX_MESSAGE_CELLS: u64 = 1 << 22;
/// The number of factors on the prices with which elimination is run.
const EXACT_STEPS: usize = 8;

/// The result of a round.
#[derive(Default)]
pub(super) struct Proof<'r> {
    /// The prices and messages to go on with, if they are better.
    pub dual: Option<Dual<'r>>,
    /// Choices that fit, in the order of the tasks that found them.
    pub found: Vec<Found>,
    /// A bound: no choice costs less.
    pub bound: u64,
    /// True when the best choice is proved optimal, or nothing fits.
    pub proved: bool,
    /// True when the search was exhaustive: without a choice, nothing fits.
    pub nothing_fits: bool,
}

/// The best choice that one task has found.
pub(super) struct Finder<'a> {
    pub reduced: &'a Reduced,
    pub live: &'a Live,
    /// The cost and the choice, in the terms of `reduced`.
    pub best: Option<Found>,
}

impl Finder<'_> {
    /// Keeps a choice that fits if it is the task's best.
    pub fn offer(&mut self, choice: &[u32]) {
        let Some(cost) = self.reduced.cost(choice) else {
            return;
        };
        if self.best.as_ref().is_none_or(|(best, _)| cost < *best) {
            self.live.offer(self.reduced, cost, choice);
            self.best = Some((cost, choice.to_vec()));
        }
    }

    /// Returns the cost to beat: that of the task's own best, or of what was known before.
    pub fn cost(&self, known: Option<&Found>) -> Option<u64> {
        let costs = [self.best.as_ref(), known];
        costs.into_iter().flatten().map(|(cost, _)| *cost).min()
    }

    /// Returns the best in original terms.
    pub fn lifted(self) -> Option<Found> {
        let (cost, choice) = self.best?;
        Some((cost, self.reduced.lift(&choice)))
    }
}

impl<'r> Round<'_, 'r> {
    /// Raises the bound by prices and messages; on the way, makes choices that fit from them.
    pub fn raise_bound(&self, mut dual: Dual<'r>) -> Proof<'r> {
        let Solver {
            options,
            clock,
            live,
        } = self.solver;
        let mut finder = Finder {
            reduced: self.reduced,
            live,
            best: None,
        };
        let used = clock.used(PRICE_TIME);
        let n_rounds = if options.phases.prices {
            PRICE_ROUNDS
        } else {
            1
        };
        let before = dual.bound().0;
        let mut published = Instant::now();
        let bound = dual.ascend(n_rounds, &used, &mut |dual| {
            if published.elapsed() > PUBLISH_EVERY {
                self.publish(dual);
                published = Instant::now();
            }
            live.raise(
                dual.bound()
                    .0
                    .min(finder.cost(self.best).unwrap_or(u64::MAX)),
            );
            if let Some(choice) = dive(self.reduced, dual, 1.0, None) {
                finder.offer(&choice);
            }
            let known = finder.cost(self.best).map(|cost| cost as f64);
            let aim = known.unwrap_or_else(|| 2.0 * dual.bound().0 as f64);
            Some(aim)
        });
        let mut proof = Proof {
            bound,
            ..Proof::default()
        };
        if options.phases.elimination {
            self.exact_at_prices(&mut dual, &mut finder, &mut proof);
        }
        self.publish(&dual);
        for weight in DIVE_WEIGHTS {
            if !clock.over()
                && let Some(choice) = dive(self.reduced, &dual, weight, None)
            {
                finder.offer(&choice);
            }
        }
        proof.found = finder.lifted().into_iter().collect();
        proof.dual = (dual.bound().0 >= before).then_some(dual);
        live.note("prices", self.reduced.describe());
        proof
    }

    /// Solves the priced problem exactly by elimination, where the graph is nearly a chain: this
    /// gives a better bound, and choices that fit, with the prices scaled up until they do.
    fn exact_at_prices(&self, dual: &mut Dual<'r>, finder: &mut Finder<'_>, proof: &mut Proof<'r>) {
        let reduced = self.reduced;
        let sizes: Vec<usize> = reduced.nodes.iter().map(|n| n.costs.len()).collect();
        let Ok(eliminator) = Eliminator::new(&sizes, &reduced.edges, &[], MAX_MESSAGE_CELLS) else {
            return;
        };
        let prices = dual.prices();
        let (mut low, mut high) = (0.0, None);
        for i in 0..EXACT_STEPS {
            // First 0, then 1, then towards the least factor at which the choice fits.
            let factor = match (i, high) {
                (0, _) => 0.0,
                (1, _) => 1.0,
                (_, Some(high)) => 0.5 * (low + high),
                (_, None) => 2.0 * low,
            };
            dual.set_prices(&prices.iter().map(|p| p * factor).collect::<Vec<_>>());
            let found = eliminator.run(&dual.priced_units());
            let Some(least) = found.table()[0].value() else {
                // Without prices this means that everything is forbidden; with prices, that sums
                // left the safe range.
                (proof.proved, proof.nothing_fits) = (i == 0, i == 0);
                break;
            };
            let least = least.saturating_sub(dual.budget_units());
            let bound = reduced.offset.saturating_add(least);
            proof.bound = proof.bound.max(bound);
            let choice = found.decode(&[]);
            if reduced.fits(&choice) {
                finder.offer(&choice);
                high = Some(factor);
            } else {
                low = factor;
            }
            let best = finder.cost(self.best);
            let closed = best.is_some_and(|cost| cost <= proof.bound);
            if closed || high == Some(0.0) || prices.is_empty() || self.solver.clock.over() {
                break;
            }
        }
        dual.set_prices(&prices);
        dual.pass_messages();
    }
}

impl Solver {
    /// Solves the whole problem as an integer program.
    pub fn integer_program<'r>(&self, reduced: &'r Reduced, best: Option<&Found>) -> Proof<'r> {
        let Some(backend) = super::backend(self.options.backend) else {
            return Proof::default();
        };
        let most = best.map_or(u64::MAX, |(cost, _)| *cost);
        let options = IlpOptions {
            nodes: self.options.work_limit,
            effort: self.options.work_limit.map(Effort::of_work),
            relative_gap: self.options.gap,
            seed: self.options.seed,
            backend,
            // The program's own time limit comes first; this one is for when it overruns.
            stop: &|| self.clock.cancelled() || self.clock.past(),
            // Choices that were ruled out before cost at least as much as the best choice.
            on_bound: &|bound| self.live.raise(bound.min(most)),
        };
        let known = best.and_then(|(_, choice)| reduced.project(choice));
        let time_left = || self.clock.left();
        let outcome = ilp::solve_ilp(reduced, known.as_ref(), &[], &options, &time_left);
        let lifted = |(cost, choice): Found| (cost, reduced.lift(&choice));
        let (columns, rows) = (ilp::n_columns(reduced), outcome.n_rows);
        let ended = match (outcome.proved, outcome.exhausted) {
            (true, _) => "proved",
            (_, true) => "stopped by the work limit",
            _ => "stopped",
        };
        let proof = Proof {
            dual: None,
            proved: outcome.proved,
            nothing_fits: outcome.proved && outcome.choice.is_none() && best.is_none(),
            bound: outcome.bound.unwrap_or(0),
            found: outcome.choice.map(lifted).into_iter().collect(),
        };
        let library = self.options.backend.name();
        let note = format!("{ended}: {columns} columns, {rows} memory rows ({library})");
        self.live.note("ilp", note);
        proof
    }
}
