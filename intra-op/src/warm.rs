//! Prices and messages for a problem that has become smaller.
//!
//! After strategies have been ruled out, presolve drops times, merges nodes and moves costs
//! between nodes and edges. Prices are kept by original time. A message is kept by the
//! original nodes and strategies of its edge; what presolve has moved from the edge's table
//! to its second end is found by comparing the tables, and taken off the message.
//!
//! Invariant: nothing here need be exact; any prices and messages give a bound that holds.

use std::collections::HashMap;
use std::sync::Arc;

use super::problem::{Edge, Table};
use super::reduced::Reduced;

/// The sweeps in comparing two tables. One is enough where all pairs are allowed in both.
const SWEEPS: usize = 3;

/// The end of an ascent; it outlives its problem.
#[derive(Clone, Debug, Default)]
pub(super) struct WarmStart {
    /// The original times with a price, ascending, and the cost per byte at each.
    prices: Vec<(u64, f64)>,
    /// The messages, by the original nodes of an edge's ends.
    edges: HashMap<[u32; 2], Kept>,
    /// The original strategies of each original node that was left.
    strategies: HashMap<u32, Vec<u32>>,
    /// The temperature at which the first ascent began, in cost units, if there was one.
    pub temperature: Option<f64>,
}

#[derive(Clone, Debug)]
struct Kept {
    table: Arc<Table>,
    /// The message to the second end, in cost units.
    message: Vec<f64>,
}

impl WarmStart {
    /// Keeps the state; `message(e)` is what edge `e` gives its second end, in cost units.
    pub fn new(
        reduced: &Reduced,
        prices: Vec<f64>,
        temperature: Option<f64>,
        message: impl Fn(usize) -> Vec<f64>,
    ) -> WarmStart {
        let priced = reduced.times.iter().copied().zip(prices);
        let kept = |(e, edge): (usize, &Edge)| {
            let kept = Kept {
                table: Arc::clone(&edge.table),
                message: message(e),
            };
            (originals(reduced, edge), kept)
        };
        WarmStart {
            prices: priced.filter(|(_, price)| *price > 0.0).collect(),
            edges: reduced.edges.iter().enumerate().map(kept).collect(),
            strategies: reduced.lift.original.iter().cloned().collect(),
            temperature,
        }
    }

    /// Returns the price of each time of `reduced`.
    pub fn prices_for(&self, reduced: &Reduced) -> Vec<f64> {
        let mut prices = vec![0.0; reduced.times.len()];
        for (time, price) in &self.prices {
            // A time that was dropped is no worse than one beside it.
            let place = reduced.times.partition_point(|t| t < time);
            if let Some(p) = prices.get_mut(place.min(reduced.times.len().saturating_sub(1))) {
                *p += price;
            }
        }
        prices
    }

    /// Returns the message to the second end of an edge of `reduced` that was there before.
    pub fn message_for(&self, reduced: &Reduced, edge: &Edge) -> Option<Vec<f64>> {
        let ends = originals(reduced, edge);
        let kept = self.edges.get(&ends)?;
        let [rows, cols] = [edge.a, edge.b].map(|v| self.places(reduced, v));
        let (rows, cols) = (rows?, cols?);
        // Costs were moved so that table before - table now = by_row + by_col.
        let difference = |i: usize, j: usize| {
            let before = kept.table.get(rows[i], cols[j]).value()?;
            let now = edge.table.get(i, j).value()?;
            Some(before as f64 - now as f64)
        };
        let (mut by_row, mut by_col) = (vec![0.0; rows.len()], vec![0.0; cols.len()]);
        for _ in 0..SWEEPS {
            for (i, x) in by_row.iter_mut().enumerate() {
                let left = (0..cols.len()).filter_map(|j| Some(difference(i, j)? - by_col[j]));
                *x = mean(left);
            }
            for (j, x) in by_col.iter_mut().enumerate() {
                let left = (0..rows.len()).filter_map(|i| Some(difference(i, j)? - by_row[i]));
                *x = mean(left);
            }
        }
        let message = cols.iter().zip(&by_col);
        Some(message.map(|(&j, moved)| kept.message[j] - moved).collect())
    }

    /// Returns where the strategies of reduced node `v` were; `None` if it has others now.
    fn places(&self, reduced: &Reduced, v: u32) -> Option<Vec<usize>> {
        let (original, now) = &reduced.lift.original[v as usize];
        let before = self.strategies.get(original)?;
        now.iter().map(|s| before.binary_search(s).ok()).collect()
    }
}

fn originals(reduced: &Reduced, edge: &Edge) -> [u32; 2] {
    [edge.a, edge.b].map(|v| reduced.lift.original[v as usize].0)
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (mut sum, mut n) = (0.0, 0.0f64);
    for x in values {
        sum += x;
        n += 1.0;
    }
    sum / n.max(1.0)
}
