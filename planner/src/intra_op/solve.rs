//! The whole way from a problem to a choice with a proof.
//!
//! Presolve; then, in rounds: prices and messages give a bound and, on the way, choices that
//! fit; the best is improved forest by forest; what its cost rules out is dropped and presolve
//! runs again. Once what is left is small enough, an integer program finishes with a proof;
//! while it is not, large parts are improved as integer programs of their own. Every result
//! is checked against the original problem before it is returned.
//!
//! What is proved: bounds from prices and elimination hold exactly, in integers. `Optimal`
//! and bounds from the integer program hold within the library's floating-point tolerances.
//!
//! Determinism: without a time limit the result depends on the problem and the options
//! alone. With one, it may depend on the machine, and the status says so by not being
//! `Optimal`.

use std::time::{Duration, Instant};

use super::IntraOpError;
use super::dive::dive;
use super::dual::Dual;
use super::eliminate::Eliminator;
use super::ilp::{self, IlpOptions};
use super::improve::{Random, Search};
use super::neighbourhood::{Part, ball};
use super::presolve::{Infeasibility, PresolveOptions, Presolved, presolve, presolve_again};
use super::problem::{IntraOpProblem, evaluate};
use super::reduced::Reduced;
use super::tighten::tighten;

/// Rounds of prices, choices and tightening.
const MAX_ROUNDS: u64 = 30;
/// Price steps per round.
const PRICE_ROUNDS: usize = 300;
/// Elimination is tried up to this many message cells: 32 MiB.
const MAX_MESSAGE_CELLS: u64 = 1 << 22;
/// Factors on the prices that elimination is run with.
const EXACT_STEPS: usize = 8;
/// Search after the dives and between two parts, in work per strategy and table cell.
const WORK_PER_SIZE: u64 = 1000;
/// Parts per round, unless the work limit says otherwise.
const SEARCH_ROUNDS: u64 = 50;
/// Times that search is taken up again for the same problem, without a clock.
const MAX_REPEATS: u64 = 4;
/// Table cells of the first part; its most columns, branch-and-bound nodes and seconds.
const FIRST_PART_CELLS: usize = 4000;
const MAX_PART_COLUMNS: usize = 50_000;
const PART_NODES: u64 = 500;
const PART_TIME: Duration = Duration::from_secs(4);

/// Which integer-programming library to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IlpBackend {
    /// HiGHS.
    #[cfg(feature = "highs")]
    Highs,
    /// microlp: pure Rust, for small problems.
    Microlp,
    /// None: bounds and search only.
    None,
}

impl Default for IlpBackend {
    #[cfg(feature = "highs")]
    fn default() -> Self {
        IlpBackend::Highs
    }
    #[cfg(not(feature = "highs"))]
    fn default() -> Self {
        IlpBackend::Microlp
    }
}

/// What to spend, and on what.
#[derive(Clone, Debug)]
pub struct SolveOptions {
    /// Wall-clock limit. A result that was cut short by it may differ between machines.
    pub time_limit: Option<Duration>,
    /// Threads for searching; reserved, one is used.
    pub threads: usize,
    /// Seed of everything random.
    pub seed: u64,
    /// Stop when the cost is proved within this fraction of the bound; 0 for a full proof.
    pub gap: f64,
    /// Deterministic limit: branch-and-bound nodes per integer program, and rounds of search.
    pub work_limit: Option<u64>,
    /// Integer programs are only built up to this many columns.
    pub max_ilp_columns: usize,
    /// Try the integer program right after presolve, without prices and search: an
    /// independent way to the same result.
    pub integer_program_first: bool,
    /// The integer-programming library.
    pub backend: IlpBackend,
    /// Which presolve steps to take.
    pub presolve: PresolveOptions,
}

impl Default for SolveOptions {
    fn default() -> Self {
        SolveOptions {
            time_limit: None,
            threads: 1,
            seed: 0,
            gap: 0.0,
            work_limit: None,
            // Measured on the public instances: below this every model was proved in a minute
            // (M, 75,570 columns left: 21 s).
            max_ilp_columns: 100_000,
            integer_program_first: false,
            backend: IlpBackend::default(),
            presolve: PresolveOptions::default(),
        }
    }
}

/// What is proved about a result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SolveStatus {
    /// No choice is better (within the requested gap).
    Optimal,
    /// A choice that fits; the best may be cheaper, but not below `lower_bound`.
    Feasible {
        /// No choice costs less.
        lower_bound: u128,
        /// `(objective - lower_bound) / objective`.
        gap: f64,
    },
    /// No choice fits.
    Infeasible(Infeasibility),
    /// Stopped before any choice that fits was found.
    Timeout,
}

/// One line of how the result came about.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceEntry {
    /// The phase that ended.
    pub phase: &'static str,
    /// Seconds since the start.
    pub seconds: f64,
    /// The best cost so far.
    pub objective: Option<u128>,
    /// The best bound so far.
    pub lower_bound: Option<u128>,
    /// What the phase did, in words.
    pub note: String,
}

/// A choice with its proof, or why there is none.
#[derive(Clone, Debug)]
pub struct SolveResult {
    /// What is proved.
    pub status: SolveStatus,
    /// One strategy per node.
    pub choice: Option<Vec<u32>>,
    /// Its total cost.
    pub objective: Option<u128>,
    /// No choice costs less.
    pub lower_bound: u128,
    /// `(objective - lower_bound) / objective`; `None` without an objective.
    pub gap: Option<f64>,
    /// Wall-clock time spent.
    pub seconds: f64,
    /// The most bytes in use at any time under the choice.
    pub peak_usage: Option<u128>,
    /// What happened, in order.
    pub trace: Vec<TraceEntry>,
}

/// Solves `problem`.
///
/// # Errors
/// [`IntraOpError::Malformed`] or [`IntraOpError::Magnitude`] when the problem cannot be
/// taken on. Infeasible is an answer, not an error.
pub fn solve(
    problem: &IntraOpProblem,
    options: &SolveOptions,
) -> Result<SolveResult, IntraOpError> {
    let mut run = Run::new(options);
    match presolve(problem, &options.presolve)? {
        Presolved::Infeasible(why) => {
            run.infeasible = Some(why);
            run.note("presolve", format!("infeasible: {why:?}"));
        }
        Presolved::Reduced(reduced) => run.solve_reduced(reduced),
    }
    run.finish(problem)
}

struct Run<'a> {
    options: &'a SolveOptions,
    start: Instant,
    /// Cost and original choice of the best found.
    best: Option<(u64, Vec<u32>)>,
    bound: u64,
    proved: bool,
    infeasible: Option<Infeasibility>,
    trace: Vec<TraceEntry>,
}

impl<'a> Run<'a> {
    fn new(options: &'a SolveOptions) -> Self {
        Run {
            options,
            start: Instant::now(),
            best: None,
            bound: 0,
            proved: false,
            infeasible: None,
            trace: Vec::new(),
        }
    }

    /// Nearly all of the time limit: what is begun still has to end, and the result to be
    /// checked.
    fn time_limit(&self) -> Option<Duration> {
        self.options.time_limit.map(|limit| limit.mul_f64(0.98))
    }

    fn time_left(&self) -> Option<Duration> {
        Some(self.time_limit()?.saturating_sub(self.start.elapsed()))
    }

    fn note(&mut self, phase: &'static str, note: String) {
        self.trace.push(TraceEntry {
            phase,
            seconds: self.start.elapsed().as_secs_f64(),
            objective: self.best.as_ref().map(|(cost, _)| u128::from(*cost)),
            lower_bound: (self.bound > 0).then_some(u128::from(self.bound)),
            note,
        });
    }

    /// Takes over a choice that fits, if it is better.
    fn offer(&mut self, reduced: &Reduced, choice: &[u32]) -> bool {
        let Some(cost) = reduced.cost(choice) else {
            return false;
        };
        let better = self.best.as_ref().is_none_or(|(best, _)| cost < *best);
        if better {
            self.best = Some((cost, reduced.lift(choice)));
        }
        better
    }

    /// Whether the best choice is proved within the gap.
    fn close_enough(&self) -> bool {
        let close = |(cost, _): &(u64, Vec<u32>)| {
            let gap = cost.saturating_sub(self.bound) as f64;
            gap <= self.options.gap * *cost as f64
        };
        self.proved || self.best.as_ref().is_some_and(close)
    }

    /// Prices, choices and tightening in turn; an integer program once it is small enough,
    /// search in parts as long as it is not.
    fn solve_reduced(&mut self, mut reduced: Reduced) {
        self.bound = reduced.offset;
        self.note("presolve", size(&reduced));
        if self.options.integer_program_first && self.integer_program(&reduced) {
            return;
        }
        for round in 0..MAX_ROUNDS {
            if reduced.nodes.is_empty() {
                self.offer(&reduced, &[]);
                self.proved = true;
                return;
            }
            let before = (reduced.size(), self.open_gap());
            let mut dual = Dual::new(&reduced);
            self.raise_bound(&reduced, &mut dual);
            if self.infeasible.is_some() {
                return;
            }
            let choice = self.find_choice(&reduced, &dual, round);
            if self.done() {
                return;
            }
            let Some(next) = self.tightened(&reduced, &dual) else {
                self.proved = true;
                return;
            };
            // As long as rounds shrink it, they are cheaper than an integer program.
            let stuck = next.size() >= before.0 - before.0 / 20;
            if self.done() || (stuck && self.integer_program(&next)) {
                return;
            }
            let stuck = stuck && self.open_gap() > 0.9 * before.1;
            reduced = match choice {
                Some(choice) if stuck => match self.search_on(&reduced, &dual, choice, round) {
                    Some(next) => next,
                    None => return,
                },
                _ => next,
            };
        }
        self.integer_program(&reduced);
    }

    /// Searches until what is found lets the problem shrink; `None` when that is the end.
    fn search_on(
        &mut self,
        reduced: &Reduced,
        dual: &Dual<'_>,
        mut choice: Vec<u32>,
        round: u64,
    ) -> Option<Reduced> {
        for repeat in 0.. {
            let before = self.open_gap();
            choice = self.search(reduced, dual, choice, round + (repeat << 16));
            // With a clock there is nothing better to do than to go on with other seeds.
            let helped = self.open_gap() < before;
            let clock = self.options.time_limit.is_some();
            if self.done() || !(clock || (helped && repeat < MAX_REPEATS)) {
                return None;
            }
            if helped {
                let Some(next) = self.tightened(reduced, dual) else {
                    self.proved = true;
                    return None;
                };
                if next.size() < reduced.size() - reduced.size() / 20 {
                    return Some(next);
                }
            }
        }
        None
    }

    fn done(&self) -> bool {
        self.close_enough() || self.time_left().is_some_and(|left| left.is_zero())
    }

    /// How far the best choice is from the bound, relatively; 1 without a choice.
    fn open_gap(&self) -> f64 {
        let gap = |(cost, _): &(u64, Vec<u32>)| {
            cost.saturating_sub(self.bound) as f64 / (*cost).max(1) as f64
        };
        self.best.as_ref().map_or(1.0, gap)
    }

    /// A test whether this fraction of the time limit has passed from now on.
    fn used(&self, fraction: f64) -> impl Fn() -> bool + use<> {
        let until = self.time_limit().map(|limit| {
            let end = self.start + limit;
            end.min(Instant::now() + limit.mul_f64(fraction))
        });
        move || until.is_some_and(|until| Instant::now() >= until)
    }

    /// Prices and messages; on the way, choices that fit are made from them.
    fn raise_bound(&mut self, reduced: &Reduced, dual: &mut Dual<'_>) {
        (0..20).for_each(|_| dual.pass_messages());
        let used = self.used(0.2);
        let bound = dual.ascend(PRICE_ROUNDS, &mut |dual| {
            if let Some(choice) = dive(reduced, dual, 1.0, None) {
                self.offer(reduced, &choice);
            }
            let known = self.best.as_ref().map(|(cost, _)| *cost as f64);
            let aim = known.unwrap_or_else(|| 2.0 * dual.bound().0 as f64);
            (!used()).then_some(aim)
        });
        self.bound = self.bound.max(bound);
        self.exact_at_prices(reduced, dual);
        self.note("prices", size(reduced));
    }

    /// Where the graph is nearly a chain, the priced problem is solved exactly by elimination:
    /// a better bound, and choices that fit, with the prices scaled up until they do.
    fn exact_at_prices(&mut self, reduced: &Reduced, dual: &mut Dual<'_>) {
        let sizes: Vec<usize> = reduced.nodes.iter().map(|n| n.costs.len()).collect();
        let Ok(eliminator) = Eliminator::new(&sizes, &reduced.edges, &[], MAX_MESSAGE_CELLS) else {
            return;
        };
        let prices = dual.prices();
        let (mut low, mut high) = (0.0, None);
        for i in 0..EXACT_STEPS {
            // No price, the prices, then towards the least factor at which the choice fits.
            let factor = match (i, high) {
                (0, _) => 0.0,
                (1, _) => 1.0,
                (_, Some(high)) => 0.5 * (low + high),
                (_, None) => 2.0 * low,
            };
            dual.set_prices(&prices.iter().map(|p| p * factor).collect::<Vec<_>>());
            let found = eliminator.run(&dual.priced_units());
            let Some(least) = found.table()[0].value() else {
                self.infeasible = Some(Infeasibility::Searched);
                self.proved = true;
                break;
            };
            self.bound = self
                .bound
                .max(reduced.offset + least.saturating_sub(dual.budget_units()));
            let choice = found.decode(&[]);
            if reduced.fits(&choice) {
                self.offer(reduced, &choice);
                high = Some(factor);
            } else {
                low = factor;
            }
            if self.close_enough() || high == Some(0.0) || prices.is_empty() {
                break;
            }
        }
        dual.set_prices(&prices);
        dual.pass_messages();
    }

    /// The best of a few dives and of what is known, improved.
    fn find_choice(&mut self, reduced: &Reduced, dual: &Dual<'_>, round: u64) -> Option<Vec<u32>> {
        let mut found = Vec::new();
        let mut add = |choice: Option<Vec<u32>>| {
            let valued = choice.and_then(|choice| Some((reduced.cost(&choice)?, choice)));
            found.extend(valued);
        };
        if let Some((_, known)) = &self.best {
            match reduced.project(known) {
                Some((_, choice)) => add(Some(choice)),
                None => add(dive(
                    reduced,
                    dual,
                    1.0,
                    Some(&reduced.project_partly(known)),
                )),
            }
        }
        for weight in [1.0, 0.8, 1.3, 2.0, 5.0] {
            add(dive(reduced, dual, weight, None));
        }
        let n_found = found.len();
        let (_, choice) = found.into_iter().min()?;
        self.offer(reduced, &choice);
        let seed = self.options.seed.wrapping_add(round);
        let mut search = Search::new(reduced, dual, choice, seed)?;
        if !self.close_enough() {
            search.run(WORK_PER_SIZE * reduced.size() as u64, &self.used(0.1));
        }
        let choice = search.best().1.to_vec();
        self.offer(reduced, &choice);
        self.note("forests", format!("from {n_found} choices that fit"));
        Some(choice)
    }

    /// The problem without what the best choice's cost rules out; `None` if nothing is left.
    fn tightened(&mut self, reduced: &Reduced, dual: &Dual<'_>) -> Option<Reduced> {
        let Some((cost, _)) = self.best else {
            return Some(reduced.clone());
        };
        let left = tighten(reduced, dual, cost);
        let mut next = reduced.clone();
        next.edges = left.edges;
        let next = presolve_again(next, &left.keep, &self.options.presolve).ok()?;
        self.note("tighten", size(&next));
        Some(next)
    }

    /// True if the integer program was small enough to be tried.
    fn integer_program(&mut self, reduced: &Reduced) -> bool {
        let Some(backend) = backend(self.options.backend) else {
            return false;
        };
        let columns = ilp::n_columns(reduced);
        if columns > self.options.max_ilp_columns {
            self.note("ilp", format!("{columns} columns are too many"));
            return false;
        }
        let options = self.ilp_options(backend, self.options.work_limit);
        let known = self
            .best
            .as_ref()
            .and_then(|(_, choice)| reduced.project(choice));
        let time_left = || self.time_left();
        let outcome = ilp::solve_ilp(reduced, known.as_ref(), &[], &options, &time_left);
        self.proved = outcome.proved;
        if let Some((_, choice)) = &outcome.choice {
            self.offer(reduced, choice);
        }
        // What was ruled out before costs more than the best choice, which bounds it as well.
        let most = self.best.as_ref().map_or(u64::MAX, |(cost, _)| *cost);
        let bound = outcome.bound.unwrap_or(0).min(most);
        self.bound = self.bound.max(bound);
        if outcome.proved && self.best.is_none() {
            self.infeasible = Some(Infeasibility::Searched);
        }
        let rows = outcome.n_rows;
        self.note("ilp", format!("{columns} columns, {rows} memory rows"));
        true
    }

    fn ilp_options(&self, backend: ilp::Backend, nodes: Option<u64>) -> IlpOptions {
        IlpOptions {
            nodes,
            relative_gap: self.options.gap,
            seed: self.options.seed,
            backend,
        }
    }

    /// Improves a choice for a while: forests, then parts as integer programs, in turn.
    fn search(
        &mut self,
        reduced: &Reduced,
        dual: &Dual<'_>,
        mut choice: Vec<u32>,
        round: u64,
    ) -> Vec<u32> {
        let seed = self.options.seed ^ (round << 32);
        let mut random = Random(seed);
        let mut max_cells = FIRST_PART_CELLS;
        let (mut n_parts, mut n_better) = (0, 0);
        // Ends early enough that what was found can tighten the problem.
        let used = self.used(0.5);
        let n_rounds = self.options.work_limit.unwrap_or(SEARCH_ROUNDS);
        let Some(mut search) = Search::new(reduced, dual, choice.clone(), seed) else {
            return choice;
        };
        for _ in 0..n_rounds {
            if used() || self.close_enough() {
                break;
            }
            search.run(WORK_PER_SIZE * reduced.size() as u64, &used);
            choice = search.best().1.to_vec();
            if let Some(backend) = backend(self.options.backend) {
                let options = self.ilp_options(backend, Some(PART_NODES));
                let members = ball(reduced, dual, max_cells, &mut random);
                let left = || self.time_left().map(|left| left.min(PART_TIME));
                let begun = Instant::now();
                let part = Part {
                    reduced,
                    dual,
                    members: &members,
                    max_columns: MAX_PART_COLUMNS,
                };
                let (better, solved) = part.solve(&choice, &options, &left);
                // The size follows what is solved; with a clock, also how fast.
                let slow = self.options.time_limit.is_some() && begun.elapsed() > PART_TIME / 2;
                max_cells = if solved && !slow {
                    max_cells + max_cells / 10
                } else {
                    (max_cells - max_cells / 5).max(FIRST_PART_CELLS / 8)
                };
                n_parts += 1;
                n_better += usize::from(better.is_some());
                if let Some(better) = better {
                    search.adopt(&better);
                    choice = better;
                }
            }
            self.offer(reduced, &choice);
        }
        self.note(
            "search",
            format!("{n_better} of {n_parts} parts helped, {max_cells} cells"),
        );
        choice
    }

    fn finish(mut self, problem: &IntraOpProblem) -> Result<SolveResult, IntraOpError> {
        let mut result = SolveResult {
            status: SolveStatus::Timeout,
            choice: None,
            objective: None,
            lower_bound: u128::from(self.bound),
            gap: None,
            seconds: self.start.elapsed().as_secs_f64(),
            peak_usage: None,
            trace: std::mem::take(&mut self.trace),
        };
        if let Some(why) = self.infeasible {
            result.status = SolveStatus::Infeasible(why);
            return Ok(result);
        }
        let Some((_, choice)) = self.best else {
            return Ok(result);
        };
        let value = evaluate(problem, &choice)?;
        assert!(
            value.feasible,
            "a choice that fits the reduced problem fits the original"
        );
        let objective = value.objective.expect("a feasible choice has a cost");
        if self.proved && self.options.gap == 0.0 {
            result.lower_bound = objective;
        }
        result.lower_bound = result.lower_bound.min(objective);
        let lower_bound = result.lower_bound;
        let gap = if objective == lower_bound {
            0.0
        } else {
            (objective - lower_bound) as f64 / objective as f64
        };
        result.status = if self.proved || gap <= self.options.gap {
            SolveStatus::Optimal
        } else {
            SolveStatus::Feasible { lower_bound, gap }
        };
        result.gap = Some(gap);
        result.objective = Some(objective);
        result.peak_usage = Some(value.peak_usage);
        result.choice = Some(choice);
        Ok(result)
    }
}

fn size(reduced: &Reduced) -> String {
    let (nodes, edges) = (reduced.nodes.len(), reduced.edges.len());
    let (cells, times) = (reduced.n_cells(), reduced.times.len());
    format!("{nodes} nodes, {edges} edges, {cells} cells, {times} times")
}

fn backend(which: IlpBackend) -> Option<ilp::Backend> {
    match which {
        #[cfg(feature = "highs")]
        IlpBackend::Highs => Some(super::highs_backend::run),
        IlpBackend::Microlp => Some(super::microlp_backend::run),
        IlpBackend::None => None,
    }
}
