//! Rules out what cannot be part of a better choice.
//!
//! With the nodes' and edges' costs after messages, taking strategy s at a node costs at
//! least the bound plus what s has above its node's minimum; a pair adds what it has left at
//! its edge. What exceeds the cost of a known choice is dropped or forbidden; the known
//! choice itself always stays.

use std::sync::Arc;

use super::dual::Dual;
use super::problem::{Cost, Edge, Table};
use super::reduced::Reduced;

/// What is left of a problem: strategies per node, ascending, and edges with more forbidden.
pub(super) struct Tightened {
    pub keep: Vec<Vec<u32>>,
    pub edges: Vec<Edge>,
}

/// Keeps what choices of at most `cost` may use, by the prices and messages of `dual`.
pub(super) fn tighten(reduced: &Reduced, dual: &Dual<'_>, cost: u64) -> Tightened {
    let room = dual.room(cost);
    let (mut keep, mut excess) = (Vec::new(), Vec::new());
    let mut sum = Vec::new();
    for v in 0..reduced.nodes.len() {
        dual.gather(v, &mut sum);
        let least = sum.iter().copied().min().unwrap_or(0);
        let above: Vec<i128> = sum.iter().map(|x| i128::from(*x - least)).collect();
        keep.push(
            (0..)
                .zip(&above)
                .filter(|(_, x)| **x <= room)
                .map(|(s, _)| s)
                .collect(),
        );
        excess.push(above);
    }
    let edge = |(e, edge): (usize, &Edge)| {
        let [to_a, to_b] = &dual.messages[e];
        let (above_a, above_b) = (&excess[edge.a as usize], &excess[edge.b as usize]);
        let n_cols = edge.table.n_cols();
        let cell = |i: usize, j: usize| {
            let left = dual.tables[e][i * n_cols + j] - to_a[i] - to_b[j];
            let fits = i128::from(left) + above_a[i] + above_b[j] <= room;
            if fits {
                edge.table.get(i, j)
            } else {
                Cost::FORBIDDEN
            }
        };
        let table = Table::from_fn(edge.table.n_rows(), n_cols, cell);
        let same = table == *edge.table;
        Edge {
            a: edge.a,
            b: edge.b,
            table: if same {
                Arc::clone(&edge.table)
            } else {
                Arc::new(table)
            },
        }
    };
    let edges = reduced.edges.iter().enumerate().map(edge).collect();
    Tightened { keep, edges }
}
