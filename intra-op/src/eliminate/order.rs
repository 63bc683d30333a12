//! The order in which nodes are eliminated.
//!
//! The greedy order eliminates the node whose elimination touches the fewest cells. Three branches
//! between the same few nodes (the queries, keys and values of attention) mislead it: it joins the
//! ends of a branch early, and all that come later carry one more node. So where elimination takes
//! long, greedy orders under noise are tried too, and the one with the fewest sums is taken (as
//! contraction orders of tensor networks are found: Gray and Kourtis 2021, section 3.2).
//!
//! The noise is drawn from a fixed seed: an order depends on sizes and edges alone.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use super::TooWide;
use crate::improve::Random;
use crate::problem::Edge;

/// Sums from which on other orders are tried. Fewer take a tenth of a millisecond.
const WORTH_TRIALS: u64 = 500_000;
/// Orders that are tried.
const TRIALS: u64 = 32;
/// The noise of the logarithm (base 2) of a node's cells, at most, in each direction.
const NOISE: f64 = 3.0;

/// A node with its neighbours when it is eliminated, ascending.
pub(super) type Elimination = (u32, Vec<u32>);

/// An order with what it takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Order {
    pub(super) eliminations: Vec<Elimination>,
    /// Cells of all messages, and of the table over the nodes that are kept.
    pub(super) cells: u64,
    /// Costs that are added up and compared.
    pub(super) sums: u64,
}

/// Finds an order.
///
/// # Errors
/// [`TooWide`] when all messages together would exceed `max_cells` cells in the greedy order.
pub(super) fn order(
    sizes: &[usize],
    edges: &[Edge],
    keep: &[u32],
    max_cells: u64,
) -> Result<Order, TooWide> {
    let scene = Scene::new(sizes, edges, keep);
    let too_wide = |cells: u64| TooWide { cells, max_cells };
    let mut best = scene.order(None, max_cells, u64::MAX).map_err(too_wide)?;
    if best.sums >= WORTH_TRIALS {
        for seed in 0..TRIALS {
            let new = scene.order(Some(Random(seed)), max_cells, best.sums);
            best = new.unwrap_or(best);
        }
    }
    Ok(best)
}

/// The graph whose nodes are eliminated.
struct Scene<'s> {
    sizes: &'s [usize],
    adjacent: Vec<BTreeSet<u32>>,
    keep: &'s [u32],
}

impl<'s> Scene<'s> {
    fn new(sizes: &'s [usize], edges: &[Edge], keep: &'s [u32]) -> Self {
        let mut adjacent: Vec<BTreeSet<u32>> = vec![BTreeSet::new(); sizes.len()];
        for e in edges.iter().filter(|e| e.a != e.b) {
            adjacent[e.a as usize].insert(e.b);
            adjacent[e.b as usize].insert(e.a);
        }
        Scene {
            sizes,
            adjacent,
            keep,
        }
    }

    fn size(&self, v: u32) -> u64 {
        self.sizes[v as usize] as u64
    }

    fn message(&self, scope: &BTreeSet<u32>) -> u64 {
        let sizes = scope.iter().map(|v| self.size(*v));
        sizes.fold(1, u64::saturating_mul)
    }

    /// The greedy order, under noise if there is any; given up, with the cells so far, as soon as
    /// these are more than `max_cells` or its sums no fewer than `to_beat`: fill-in makes what is
    /// left of a wide graph ever denser.
    fn order(&self, mut noise: Option<Random>, max_cells: u64, to_beat: u64) -> Result<Order, u64> {
        let mut adjacent = self.adjacent.clone();
        let mut done = vec![false; self.sizes.len()];
        self.keep.iter().for_each(|v| done[*v as usize] = true);
        let mut waiting: BinaryHeap<Reverse<Waiting>> = (0..self.sizes.len() as u32)
            .filter(|v| !done[*v as usize])
            .map(|v| Reverse(self.waiting(v, &adjacent, &mut noise)))
            .collect();
        let mut found = Order {
            eliminations: Vec::with_capacity(waiting.len()),
            cells: self.message(&self.keep.iter().copied().collect()),
            sums: 0,
        };
        while let Some(Reverse(Waiting { sums, node: v, .. })) = waiting.pop() {
            let scope = &adjacent[v as usize];
            if done[v as usize] || sums != self.message(scope).saturating_mul(self.size(v)) {
                continue;
            }
            done[v as usize] = true;
            let scope = std::mem::take(&mut adjacent[v as usize]);
            found.cells = found.cells.saturating_add(self.message(&scope));
            found.sums = found.sums.saturating_add(sums);
            if found.cells > max_cells || found.sums >= to_beat {
                return Err(found.cells);
            }
            for &u in &scope {
                let others = &mut adjacent[u as usize];
                others.remove(&v);
                others.extend(scope.iter().filter(|w| **w != u));
            }
            for &u in scope.iter().filter(|u| !done[**u as usize]) {
                waiting.push(Reverse(self.waiting(u, &adjacent, &mut noise)));
            }
            found.eliminations.push((v, scope.into_iter().collect()));
        }
        match found.cells > max_cells {
            true => Err(found.cells),
            false => Ok(found),
        }
    }

    fn waiting(
        &self,
        node: u32,
        adjacent: &[BTreeSet<u32>],
        noise: &mut Option<Random>,
    ) -> Waiting {
        let message = self.message(&adjacent[node as usize]);
        let sums = message.saturating_mul(self.size(node));
        let rank = match noise {
            None => sums,
            Some(random) => {
                let factor = (NOISE * (2.0 * random.unit() - 1.0)).exp2();
                (sums as f64 * factor) as u64
            }
        };
        Waiting { rank, node, sums }
    }
}

/// A node with the sums of its elimination at some time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Waiting {
    rank: u64,
    node: u32,
    sums: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::{Cost, Table};

    fn edges(sizes: &[usize], pairs: &[(u32, u32)]) -> Vec<Edge> {
        let table = |a: u32, b: u32| {
            Table::from_fn(sizes[a as usize], sizes[b as usize], |_, _| Cost::ZERO)
        };
        let edge = |&(a, b): &(u32, u32)| Edge {
            a,
            b,
            table: table(a, b).into(),
        };
        pairs.iter().map(edge).collect()
    }

    /// The sums of an order by its definition.
    fn sums_of(sizes: &[usize], order: &Order) -> u64 {
        let of = |(v, scope): &Elimination| -> u64 {
            let nodes = scope.iter().chain([v]);
            nodes.map(|u| sizes[*u as usize] as u64).product()
        };
        order.eliminations.iter().map(of).sum()
    }

    /// Queries, keys and values between one layout before them, one of their gradients and the
    /// attention; the gradients of all three are added up along a chain.
    #[test]
    fn branches_between_the_same_nodes_are_joined_late() {
        let sizes = [16, 16, 20, 42, 32, 32, 25, 24, 9];
        let mut pairs = vec![(6, 4), (6, 5), (7, 6), (7, 3), (7, 8), (0, 8), (1, 8)];
        pairs.extend([3, 4, 5].iter().flat_map(|&v| [(0, v), (1, v), (2, v)]));
        let edges = edges(&sizes, &pairs);
        let scene = Scene::new(&sizes, &edges, &[8]);
        let greedy = scene.order(None, u64::MAX, u64::MAX).unwrap();
        let found = order(&sizes, &edges, &[8], u64::MAX).unwrap();
        assert!(
            4 * found.sums < 3 * greedy.sums,
            "{found:?} against {greedy:?}"
        );
        assert_eq!(found.sums, sums_of(&sizes, &found));
        assert_eq!(greedy.sums, sums_of(&sizes, &greedy));
        assert_eq!(found.eliminations.len(), sizes.len() - 1);
        assert_eq!(order(&sizes, &edges, &[8], u64::MAX).unwrap(), found);
        let least = greedy.cells - 1;
        let too_wide = order(&sizes, &edges, &[8], least).unwrap_err();
        assert_eq!((too_wide.cells, too_wide.max_cells), (greedy.cells, least));
    }
}
