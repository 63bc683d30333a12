//! The reduced problem as an integer program, with memory rows added as they are violated.
//!
//! Linearised by marginals: x[v,s] says that node v takes strategy s; for every edge,
//! y[i,j] >= 0 with sum_j y[i,j] = x[a,i] and sum_i y[i,j] = x[b,j]. Equal rows (columns) of a
//! table share their y, which loses nothing. Only the y of allowed pairs exist.
//!
//! Memory rows are lazy: solve, look at the profile, add the rows of the violated peaks,
//! repeat; first on the linear relaxation, where it is cheap. A solution that only breaks a
//! row within the solver's tolerance is cut off exactly, by the set of strategies that does
//! not fit together.
//!
//! Invariants: costs are divided by a power of two and memory by another, so that both are
//! near what the solver's absolute tolerances are meant for; an answer is rounded and then
//! evaluated in integers by the caller of the backend, never trusted.

mod aside;
mod effort;
mod grid;
#[cfg(feature = "highs")]
mod highs;
mod microlp;
mod program;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::problem::Edge;
use super::reduced::Reduced;
pub(super) use effort::Effort;
use grid::EdgeGrid;
#[cfg(feature = "highs")]
pub(super) use highs::run as highs;
pub(super) use microlp::run as microlp;
use program::Program;

/// The part of a bound that may be lost to floating point.
const FLOAT_LOSS: f64 = 1e-9;

/// A mixed-integer program: minimise costs over columns in [0, 1] subject to rows.
#[derive(Clone, Debug, Default)]
pub(super) struct Model {
    pub costs: Vec<f64>,
    pub integer: Vec<bool>,
    pub rows: Vec<ModelRow>,
}

/// A row of the model: `low <= sum of terms <= high`.
#[derive(Clone, Debug)]
pub(super) struct ModelRow {
    pub low: f64,
    pub high: f64,
    pub terms: Vec<(u32, f64)>,
}

/// The limits at which a backend must stop.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub time: Option<Duration>,
    pub nodes: Option<u64>,
    /// The most simplex iterations of a linear program.
    pub iterations: Option<u64>,
    /// The gap within which a solution counts as optimal, in the model's cost units.
    pub absolute_gap: f64,
    #[cfg_attr(
        not(feature = "highs"),
        allow(dead_code, reason = "microlp draws nothing")
    )]
    pub seed: u64,
    /// True to forget that columns are integer.
    pub relax: bool,
}

/// The answer of a backend.
#[derive(Clone, Debug)]
pub(super) enum Answer {
    /// Solved within the gap.
    Optimal {
        columns: Vec<f64>,
        bound: f64,
        /// Iterations of the simplex method.
        iterations: u64,
    },
    /// Stopped before that, with what was found.
    Stopped {
        columns: Option<Vec<f64>>,
        bound: Option<f64>,
    },
    Infeasible,
}

/// A backend: it solves `model`, from a complete point if one is given, and asks the function now
/// and then whether to give up at once.
pub(super) type Backend = fn(Model, Option<Vec<f64>>, Limits, &dyn Fn() -> bool) -> Answer;

/// The result of the integer program for a reduced problem. Costs include decided parts.
#[derive(Clone, Debug, Default)]
pub(super) struct IlpOutcome {
    /// The best choice found that fits, better than the start if one was given.
    pub choice: Option<(u64, Vec<u32>)>,
    /// A bound: no choice costs less.
    pub bound: Option<u64>,
    /// True when `choice` (or the start) is proved best, or nothing fits if there is none.
    pub proved: bool,
    /// True when the effort was used up.
    pub exhausted: bool,
    /// The number of memory rows that were needed.
    pub n_rows: usize,
}

/// The effort to spend on the integer program.
#[derive(Clone)]
pub(super) struct IlpOptions<'a> {
    /// The branch-and-bound nodes per call of the backend.
    pub nodes: Option<u64>,
    /// The effort of all calls together, without a clock.
    pub effort: Option<Effort>,
    pub relative_gap: f64,
    pub seed: u64,
    pub backend: Backend,
    /// Says whether to give up at once.
    pub stop: &'a (dyn Fn() -> bool + Sync),
    /// Receives every bound as it is found, in case the work is left behind.
    pub on_bound: &'a (dyn Fn(u64) + Sync),
}

/// Returns the number of columns that [`solve_ilp`] would make.
pub(super) fn n_columns(reduced: &Reduced) -> usize {
    let mut known: HashMap<usize, usize> = HashMap::new();
    let mut columns = |e: &Edge| {
        let key = Arc::as_ptr(&e.table) as usize;
        *known.entry(key).or_insert_with(|| {
            let grid = EdgeGrid::new(e);
            grid.cells.len()
        })
    };
    let pairs: usize = reduced.edges.iter().map(&mut columns).sum();
    pairs + reduced.nodes.iter().map(|n| n.costs.len()).sum::<usize>()
}

/// Solves the reduced problem from `start` (a choice that fits), with memory rows at `times`
/// to begin with. `time_left` is asked before every call of the backend.
pub(super) fn solve_ilp(
    reduced: &Reduced,
    start: Option<&(u64, Vec<u32>)>,
    times: &[usize],
    options: &IlpOptions<'_>,
    time_left: &dyn Fn() -> Option<Duration>,
) -> IlpOutcome {
    if reduced.nodes.is_empty() {
        return IlpOutcome {
            choice: Some((reduced.offset, Vec::new())),
            bound: Some(reduced.offset),
            proved: true,
            ..IlpOutcome::default()
        };
    }
    let mut program = Program::new(reduced);
    let mut state = IlpOutcome {
        choice: start.cloned(),
        ..IlpOutcome::default()
    };
    for &t in times {
        program.add_memory_row(t);
    }
    let mut effort = options.effort;
    let relaxed = program.relax_until_it_fits(options, time_left, &mut effort, &mut state);
    let mut goes_on = relaxed.is_some();
    while goes_on && !out_of_time(time_left) && !(options.stop)() {
        let affordable = |effort: &mut Effort| effort.afford_root(relaxed.unwrap_or(0));
        if !effort.as_mut().is_none_or(affordable) {
            state.exhausted = true;
            break;
        }
        goes_on = !program.round(options, time_left, &mut state);
    }
    state.n_rows = program.memory_rows.len();
    state
}

impl IlpOutcome {
    fn raise(&mut self, bound: u64, options: &IlpOptions<'_>) {
        self.bound = self.bound.max(Some(bound));
        (options.on_bound)(bound);
    }
}

fn out_of_time(time_left: &dyn Fn() -> Option<Duration>) -> bool {
    time_left().is_some_and(|left| left.is_zero())
}

impl Program<'_> {
    /// Adds memory rows until the linear relaxation breaks none, as far as time and effort allow.
    /// Returns the effort of the last relaxation, or `None` when the integer program is not to
    /// follow: nothing fits, or the effort is used up.
    fn relax_until_it_fits(
        &mut self,
        options: &IlpOptions<'_>,
        time_left: &dyn Fn() -> Option<Duration>,
        effort: &mut Option<Effort>,
        state: &mut IlpOutcome,
    ) -> Option<u64> {
        let mut took = 0;
        let wanted = !self.reduced.limits.is_empty() || effort.is_some();
        while wanted && !out_of_time(time_left) && !(options.stop)() {
            let n_rows = self.model.rows.len();
            let mut limits = self.limits(options, time_left);
            limits.relax = true;
            limits.iterations = effort.map(|effort| effort.iterations(n_rows));
            match (options.backend)(self.model.clone(), None, limits, options.stop) {
                Answer::Optimal {
                    columns,
                    bound,
                    iterations,
                } => {
                    if let Some(effort) = effort {
                        took = effort.spend(iterations, n_rows);
                    }
                    state.raise(self.bound(bound), options);
                    let levels = self.fractional_levels(&columns);
                    if self.add_peaks(&levels) == 0 {
                        break;
                    }
                }
                Answer::Infeasible => {
                    state.proved = state.choice.is_none();
                    return (!state.proved).then_some(took);
                }
                Answer::Stopped { .. } => {
                    state.exhausted = effort.is_some();
                    return (!state.exhausted).then_some(took);
                }
            }
        }
        Some(took)
    }

    /// Solves once with the present rows. True when done: proved, or nothing more to learn.
    fn round(
        &mut self,
        options: &IlpOptions<'_>,
        time_left: &dyn Fn() -> Option<Duration>,
        state: &mut IlpOutcome,
    ) -> bool {
        let start = state.choice.as_ref().map(|(_, choice)| self.point(choice));
        let limits = self.limits(options, time_left);
        let (columns, bound, solved) =
            match (options.backend)(self.model.clone(), start, limits, options.stop) {
                Answer::Optimal { columns, bound, .. } => (Some(columns), Some(bound), true),
                Answer::Stopped { columns, bound } => (columns, bound, false),
                Answer::Infeasible => {
                    // With a choice that fits this can only be the solver's tolerance.
                    state.proved = state.choice.is_none();
                    return true;
                }
            };
        if let Some(bound) = bound {
            state.raise(self.bound(bound), options);
        }
        let Some(choice) = columns.map(|c| self.rounded(&c)) else {
            return true;
        };
        let Some(cost) = self.reduced.cost(&choice) else {
            return true;
        };
        let levels = self.reduced.levels(&choice);
        let worst =
            (0..levels.len()).max_by_key(|&t| levels[t].saturating_sub(self.reduced.limits[t]));
        match worst {
            Some(t) if levels[t] > self.reduced.limits[t] => {
                let excess: Vec<f64> = self.excess(levels.iter().map(|&l| l as f64));
                if self.add_peaks(&excess) == 0 {
                    self.add_cover_row(&choice, t);
                }
                !solved
            }
            _ => {
                if state.choice.as_ref().is_none_or(|(best, _)| cost < *best) {
                    state.choice = Some((cost, choice));
                }
                state.proved |= solved && self.meets(limits.absolute_gap, bound, cost);
                true
            }
        }
    }

    fn limits(&self, options: &IlpOptions<'_>, time_left: &dyn Fn() -> Option<Duration>) -> Limits {
        // Costs are integers: two that are less than one unit apart are equal.
        let objective = self.reduced.offset as f64 / self.cost_unit;
        // Twice the most that a bound loses to floating point.
        let gap = (options.relative_gap - 2.0 * FLOAT_LOSS).max(0.0);
        Limits {
            time: time_left(),
            nodes: options.nodes,
            iterations: None,
            absolute_gap: (0.5 / self.cost_unit).max(gap * objective),
            seed: options.seed,
            relax: false,
        }
    }

    /// Says whether a solution within `absolute_gap` of `bound` is best, as nothing is cheaper by a
    /// whole unit of the problem.
    fn meets(&self, absolute_gap: f64, bound: Option<f64>, cost: u64) -> bool {
        let above = (cost - self.reduced.offset) as f64 / self.cost_unit;
        let unit = 1.0 / self.cost_unit;
        absolute_gap < unit || bound.is_some_and(|bound| above - bound < unit)
    }

    /// Converts a bound of the model to the problem's units, less floating point's loss.
    fn bound(&self, bound: f64) -> u64 {
        let units = bound * self.cost_unit;
        let safe = (units - units.abs() * FLOAT_LOSS - 0.5).ceil().max(0.0);
        self.reduced.offset.saturating_add(safe as u64)
    }
}

#[cfg(test)]
mod tests;
