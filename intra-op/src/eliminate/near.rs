//! Elimination of what costs little more than the least.
//!
//! Messages of two variables each ([`Dual`]) bound the cost of every strategy from below, in a time
//! that grows with the tables of pairs alone. On layers of a network a few passes of them come
//! within a thousandth of the least cost, so that what costs a few percent more than that rules out
//! most strategies; the sums of an elimination, which multiply the numbers of several nodes, become
//! tens to thousands of times fewer. Nothing that costs no more than the limit is lost, so up to
//! there the table is exact; beyond it is a bound.
//!
//! The order of elimination is that of all strategies, so that of equal choices the same one is
//! decoded.

use super::{Eliminated, Eliminator, WORTH_CLASSES};
use crate::dual::Dual;
use crate::problem::{Cost, Edge, Table};
use crate::reduced::{Reduced, ReducedNode};
use crate::tighten::tighten;
use std::borrow::Cow;
use std::sync::Arc;

/// Sums from which on messages come first: they take about as long as so many.
pub const WORTH_MESSAGES: u64 = 1_000_000;
/// Passes of messages in both directions. On layers, later ones raise the bound by a thousandth.
const PASSES: usize = 10;

/// The strategies that were looked at, and up to which cost nothing else matters.
#[derive(Clone, Debug)]
pub(super) struct Near {
    /// By node, ascending.
    keep: Vec<Vec<u32>>,
    /// By kept node, the number of all its strategies.
    pub(super) sizes: Vec<usize>,
    /// From this cost on the table is a bound.
    pub(super) from: u64,
}

impl Near {
    /// The numbers of kept strategies among those that were looked at; `None` where one was not.
    pub(super) fn numbers(&self, nodes: &[u32], strategies: &[u32]) -> Option<Vec<u32>> {
        let pairs = nodes.iter().zip(strategies);
        let number = pairs.map(|(&v, s)| self.keep[v as usize].binary_search(s).ok());
        number.map(|at| at.map(|at| at as u32)).collect()
    }

    /// The strategies that numbers among those that were looked at stand for.
    pub(super) fn strategies(&self, numbers: &[u32]) -> Vec<u32> {
        let pairs = self.keep.iter().zip(numbers);
        // A node is left without strategies only where nothing is near.
        pairs
            .map(|(keep, &at)| keep.get(at as usize).copied().unwrap_or(0))
            .collect()
    }
}

impl Eliminator {
    /// As [`run`](Self::run), but where that takes `worth` sums or more ([`WORTH_MESSAGES`]) only of
    /// choices that cost at most `1 + slack` times as much as a bound on the least;
    /// [`Eliminated::exact_below`] says up to where the table holds.
    ///
    /// # Panics
    /// If the costs do not have the sizes that the eliminator was made for.
    pub fn run_near(&self, costs: &[Vec<Cost>], slack: f64, worth: u64) -> Eliminated<'_> {
        match self.order.sums < worth {
            true => self.run(costs),
            false => self
                .narrowed(costs, slack)
                .unwrap_or_else(|| self.run(costs)),
        }
    }

    /// The same however long it takes; `None` where pairs are not those of a simple graph, or sums
    /// of costs leave the range of messages.
    pub(super) fn narrowed(&self, costs: &[Vec<Cost>], slack: f64) -> Option<Eliminated<'_>> {
        if !self.is_simple {
            return None;
        }
        let node = |costs: &Vec<Cost>| ReducedNode {
            costs: costs.clone(),
            memory: Vec::new(),
        };
        let reduced = Reduced {
            nodes: costs.iter().map(node).collect(),
            edges: self.edges.clone(),
            ..Reduced::default()
        };
        let mut dual = Dual::new(&reduced);
        if !dual.is_in_range() {
            return None;
        }
        (0..PASSES).for_each(|_| dual.pass_messages());
        let (bound, _) = dual.bound();
        let limit = bound.saturating_add((bound as f64 * slack) as u64);
        let keep = tighten(&reduced, &dual, limit).keep;
        let sizes = self.keep.iter().map(|v| self.sizes[*v as usize]);
        let near = Near {
            keep,
            sizes: sizes.collect(),
            from: limit.saturating_add(1),
        };
        let n_cells: usize = near.sizes.iter().product();
        let mut table = vec![Cost::finite(near.from); n_cells];
        if near.keep.iter().any(Vec::is_empty) {
            return Some(Eliminated {
                near: Some(near),
                table,
                ..self.nothing(costs)
            });
        }
        let fewer = self.of(&near.keep);
        let own = near.keep.iter().zip(costs);
        let own = own.map(|(keep, costs)| keep.iter().map(|s| costs[*s as usize]).collect());
        let found = fewer.run(&own.collect::<Vec<_>>());
        let of_kept = self.keep.iter().map(|v| &near.keep[*v as usize]);
        let of_kept: Vec<&Vec<u32>> = of_kept.collect();
        let places = of_kept
            .iter()
            .zip(&self.keep)
            .fold(vec![0], |at, (keep, v)| {
                let size = self.sizes[*v as usize];
                let places = at
                    .iter()
                    .flat_map(|at| keep.iter().map(move |s| at * size + *s as usize));
                places.collect::<Vec<usize>>()
            });
        for (at, cost) in places.into_iter().zip(&found.table) {
            table[at] = (*cost).min(table[at]);
        }
        let (costs, messages) = (found.costs, found.messages);
        Some(Eliminated {
            eliminator: Cow::Owned(fewer),
            costs,
            messages,
            table,
            near: Some(near),
        })
    }

    /// The elimination, in the same order, of some strategies of each node.
    fn of(&self, keep: &[Vec<u32>]) -> Eliminator {
        let sizes: Vec<usize> = keep.iter().map(Vec::len).collect();
        let edge = |e: &Edge| {
            let (a, b) = (&keep[e.a as usize], &keep[e.b as usize]);
            let cell = |i: usize, j: usize| e.table.get(a[i] as usize, b[j] as usize);
            Edge {
                table: Arc::new(Table::from_fn(a.len(), b.len(), cell)),
                ..*e
            }
        };
        let edges: Vec<Edge> = self.edges.iter().map(edge).collect();
        Eliminator::along(&sizes, &edges, &self.keep, &self.order, WORTH_CLASSES)
    }
}
