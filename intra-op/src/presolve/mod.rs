//! Presolve: makes an intra-op problem smaller without losing an optimum.
//!
//! Equal tables are kept once and parallel edges summed from the start. Then, in rounds until
//! nothing changes, the reductions, a module each:
//! * [`propagate`]: strategies that no allowed pair supports (arc consistency), or that cannot
//!   fit beside the least that everything else must use, are dropped;
//! * [`minima`]: row and column minima of tables move to the nodes; zero tables go;
//! * [`ties`]: a node with one allowed partner per strategy of another is merged into it;
//! * [`fold`]: nodes without memory and at most two neighbours are minimised out;
//! * [`follow`]: a node with one best answer to each strategy of a neighbour, whatever its
//!   other neighbours do, is merged into that neighbour (priced ties);
//! * [`dominance`]: strategies that another one dominates are dropped (dead-end elimination:
//!   better for every choice of the neighbours, and never using more memory);
//! * [`times`]: times that cannot be the worst are dropped.
//!
//! Invariants: every reduction keeps at least one optimum, and a reduced choice's cost is that
//! of the choice it lifts to. Original indices are kept beside the current ones, ascending;
//! what takes a node out leaves an [`undo`]. Everything is deterministic: lower indices win
//! ties.

mod dominance;
mod fold;
mod follow;
mod memory;
mod minima;
mod propagate;
mod ties;
mod times;
mod undo;
mod work;

use std::collections::HashMap;
use std::sync::Arc;

use super::IntraOpError;
use super::problem::{Cost, Edge, IntraOpProblem, Table};
use super::reduced::Reduced;
pub(super) use undo::Undo;
use work::{Size, Work};

/// Sums of costs and of usages stay below this, so that 64-bit sums cannot overflow.
const MAGNITUDE_LIMIT: u128 = 1 << 61;
/// Rounds after which presolve stops even if it still finds something.
const MAX_ROUNDS: usize = 30;

/// Selects the reductions; all by default. For tests, and for measuring what each is worth.
#[derive(Clone, Copy, Debug)]
pub struct PresolveOptions {
    /// Arc consistency and memory bounds.
    pub propagate: bool,
    /// Minima move to nodes, and zero tables are dropped.
    pub minima: bool,
    /// Tied nodes are merged.
    pub ties: bool,
    /// Nodes of degree 0, 1 and 2 without memory are folded.
    pub fold: bool,
    /// Nodes that follow a neighbour are merged.
    pub follow: bool,
    /// Dominated strategies are dropped.
    pub dominance: bool,
    /// Times that cannot be the worst are dropped.
    pub times: bool,
}

impl Default for PresolveOptions {
    fn default() -> Self {
        PresolveOptions {
            propagate: true,
            minima: true,
            ties: true,
            fold: true,
            follow: true,
            dominance: true,
            times: true,
        }
    }
}

impl PresolveOptions {
    /// Makes no reduction at all.
    pub fn none() -> Self {
        PresolveOptions {
            propagate: false,
            minima: false,
            ties: false,
            fold: false,
            follow: false,
            dominance: false,
            times: false,
        }
    }
}

/// The reasons why a problem has no solution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Infeasibility {
    /// Even the least that must be in use at `time` exceeds the limit by `by_bytes`.
    Memory {
        /// The time, as in the original problem.
        time: u64,
        /// The least number of missing bytes.
        by_bytes: u64,
    },
    /// Every strategy of `node` is ruled out by forbidden entries and the memory limit.
    NoStrategy {
        /// The node's index in the original problem.
        node: u32,
    },
    /// An exhaustive search found nothing.
    Searched,
}

/// The result of presolve.
#[derive(Clone, Debug)]
pub enum Presolved {
    /// A smaller problem, possibly without any node left.
    Reduced(Reduced),
    /// No solution exists.
    Infeasible(Infeasibility),
}

/// The amounts by which one reduction shrank the problem, over all rounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Effect {
    /// The reduction.
    pub name: &'static str,
    /// Nodes.
    pub nodes: i64,
    /// Strategies of nodes that were left.
    pub strategies: i64,
    /// Edges.
    pub edges: i64,
    /// Table cells; negative where tables grew.
    pub cells: i64,
}

/// A way to make a problem smaller.
///
/// Applying it keeps at least one optimum. What it does to choices is undone from what it
/// leaves in the work: an [`Undo`] per node that it takes out, the original index beside every
/// strategy that it keeps.
trait Reduction {
    /// The name in reports.
    fn name(&self) -> &'static str;
    /// Makes the reductions that are possible now; called again after the others' turns.
    fn apply(&mut self, work: &mut Work) -> Result<(), Infeasibility>;
}

/// Reduces `problem`.
///
/// # Errors
/// [`IntraOpError::Malformed`] when the problem is not valid, [`IntraOpError::Magnitude`]
/// when its costs or usages could add up beyond 2^61.
pub fn presolve(
    problem: &IntraOpProblem,
    options: &PresolveOptions,
) -> Result<Presolved, IntraOpError> {
    presolve_reported(problem, options, &|| false).map(|(presolved, _)| presolved)
}

/// Reduces `problem` and reports what each reduction took away, in the order in which they are
/// applied. Stops between reductions once `stop` says so.
///
/// # Errors
/// Those of [`presolve`].
pub fn presolve_reported(
    problem: &IntraOpProblem,
    options: &PresolveOptions,
    stop: &dyn Fn() -> bool,
) -> Result<(Presolved, Vec<Effect>), IntraOpError> {
    problem.validate()?;
    check_magnitudes(problem)?;
    let (mut work, mut effects) = (Work::new(problem), Vec::new());
    let presolved = match reduce(&mut work, options, &mut effects, stop) {
        Ok(()) => Presolved::Reduced(work.finish()),
        Err(why) => Presolved::Infeasible(unclamped(problem, why)?),
    };
    Ok((presolved, effects))
}

/// Computes the missing bytes from the usages as they were given, because reductions see each usage
/// capped just above the limit.
fn unclamped(problem: &IntraOpProblem, why: Infeasibility) -> Result<Infeasibility, IntraOpError> {
    let (Infeasibility::Memory { .. }, Some(limit)) = (&why, problem.usage_limit) else {
        return Ok(why);
    };
    let least = |node: &super::problem::Node| {
        let usages = node.usages.iter().zip(0..);
        usages.min().map_or(0, |(_, strategy)| strategy)
    };
    let choice: Vec<u32> = problem.nodes.iter().map(least).collect();
    let value = super::problem::evaluate(problem, &choice)?;
    Ok(match value.peak_time {
        Some(time) if value.peak_usage > u128::from(limit) => Infeasibility::Memory {
            time,
            by_bytes: u64::try_from(value.peak_usage - u128::from(limit)).unwrap_or(u64::MAX),
        },
        _ => why,
    })
}

/// Reduces a reduced problem again, after strategies or pairs have been ruled out.
///
/// `keep[v]` lists the strategies of reduced node `v` that are left, ascending.
pub(super) fn presolve_again(
    reduced: Reduced,
    keep: &[Vec<u32>],
    options: &PresolveOptions,
) -> Result<Reduced, Infeasibility> {
    let mut work = Work::from_reduced(reduced);
    for (original, kept) in work.renamed.clone().into_iter().zip(keep) {
        if kept.is_empty() {
            return Err(Infeasibility::NoStrategy { node: original });
        }
        work.keep(original, kept);
    }
    reduce(&mut work, options, &mut Vec::new(), &|| false)?;
    Ok(work.finish())
}

fn reductions(options: &PresolveOptions) -> Vec<Box<dyn Reduction>> {
    let all: [(bool, Box<dyn Reduction>); 7] = [
        (options.propagate, Box::new(propagate::Propagate::default())),
        (options.minima, Box::new(minima::MoveMinima)),
        (options.ties, Box::new(ties::MergeTies::default())),
        (options.fold, Box::new(fold::Fold)),
        (options.follow, Box::new(follow::MergeFollowers::default())),
        (
            options.dominance,
            Box::new(dominance::DropDominated::default()),
        ),
        (options.times, Box::new(times::DropTimes)),
    ];
    let wanted = all.into_iter().filter(|(wanted, _)| *wanted);
    wanted.map(|(_, reduction)| reduction).collect()
}

fn reduce(
    work: &mut Work,
    options: &PresolveOptions,
    effects: &mut Vec<Effect>,
    stop: &dyn Fn() -> bool,
) -> Result<(), Infeasibility> {
    let mut reductions = reductions(options);
    effects.extend(reductions.iter().map(|r| Effect {
        name: r.name(),
        ..Effect::default()
    }));
    work.settle_all()?;
    let mut size = work.size();
    for _ in 0..MAX_ROUNDS {
        let before = size;
        for (reduction, effect) in reductions.iter_mut().zip(&mut *effects) {
            if stop() {
                return work.settle_all();
            }
            reduction.apply(work)?;
            let now = work.size();
            effect.add(&size, &now);
            size = now;
        }
        work.settle_all()?;
        if size == before {
            break;
        }
    }
    Ok(())
}

impl Effect {
    fn add(&mut self, before: &Size, after: &Size) {
        let less = |x: usize, y: usize| x as i64 - y as i64;
        self.nodes += less(before.nodes, after.nodes);
        self.strategies += less(before.strategies, after.strategies);
        self.edges += less(before.edges, after.edges);
        self.cells += less(before.cells, after.cells);
    }
}

fn check_magnitudes(problem: &IntraOpProblem) -> Result<(), IntraOpError> {
    let largest = |cells: &[Cost]| {
        let finite = cells.iter().filter_map(|c| c.value());
        u128::from(finite.max().unwrap_or(0))
    };
    let nodes: u128 = problem.nodes.iter().map(|n| largest(&n.costs)).sum();
    let mut known: HashMap<*const Table, u128> = HashMap::new();
    let mut edge_max = |e: &Edge| {
        let key = Arc::as_ptr(&e.table);
        *known.entry(key).or_insert_with(|| largest(e.table.cells()))
    };
    let edges: u128 = problem.edges.iter().map(&mut edge_max).sum();
    if nodes + edges >= MAGNITUDE_LIMIT {
        let total = nodes + edges;
        return Err(IntraOpError::Magnitude {
            what: "costs",
            total,
        });
    }
    if let Some(limit) = problem.usage_limit {
        let clamped = |n: &super::problem::Node| {
            let most = n.usages.iter().copied().max().unwrap_or(0);
            u128::from(most.min(limit.saturating_add(1)))
        };
        let total: u128 = problem.nodes.iter().map(clamped).sum();
        if total > u128::from(limit) && total >= MAGNITUDE_LIMIT {
            return Err(IntraOpError::Magnitude {
                what: "usages",
                total,
            });
        }
    }
    Ok(())
}
