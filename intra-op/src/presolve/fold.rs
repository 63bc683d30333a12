//! Minimises out nodes without memory that have at most two neighbours, and decides nodes with
//! one strategy. Undo: the node takes what was best beside its neighbours' strategies.

use std::collections::VecDeque;
use std::sync::Arc;

use super::super::problem::{Cost, Table};
use super::undo::{Fixed, Follows, FollowsTwo, Undo};
use super::work::Work;
use super::{Infeasibility, Reduction};

/// The reduction of this module.
pub(super) struct Fold;

impl Reduction for Fold {
    fn name(&self) -> &'static str {
        "fold"
    }

    fn apply(&mut self, work: &mut Work) -> Result<(), Infeasibility> {
        // From here on nodes with one strategy have no memory left.
        work.settle_all()?;
        let mut queue: VecDeque<u32> = (0..work.nodes.len() as u32).collect();
        while let Some(v) = queue.pop_front() {
            let node = &work.nodes[v as usize];
            if node.gone {
                continue;
            }
            let single = node.costs.len() == 1;
            if !node.memory.is_empty() || (node.links.len() > 2 && !single) {
                continue;
            }
            let neighbours: Vec<u32> = node.links.keys().copied().collect();
            let folded = match neighbours[..] {
                _ if single => fix(work, v)?,
                [a] => fold_leaf(work, v, a),
                [a, b] => fold_path(work, v, a, b),
                _ => fix(work, v)?,
            };
            if folded {
                queue.extend(neighbours);
            }
        }
        Ok(())
    }
}

/// Decides a node with one strategy, or one without neighbours.
fn fix(work: &mut Work, v: u32) -> Result<bool, Infeasibility> {
    let links = work.nodes[v as usize].links.clone();
    for (u, e) in links {
        let table = work.table_from(e, v);
        work.take_edge(e);
        let node = &mut work.nodes[u as usize];
        for (cost, &pair) in node.costs.iter_mut().zip(table.row(0)) {
            *cost = cost.plus(pair);
        }
        work.touch(u);
    }
    let gone = work.retire(v);
    let (cost, s) = least(gone.costs.iter().copied());
    let cost = cost.value().ok_or(Infeasibility::NoStrategy { node: v })?;
    work.offset += cost;
    work.undos.push(Undo::Fixed(Fixed {
        node: v,
        strategy: gone.strategies[s],
    }));
    Ok(true)
}

fn fold_leaf(work: &mut Work, v: u32, a: u32) -> bool {
    let e = work.nodes[v as usize].links[&a];
    let table = work.table_from(e, a);
    work.take_edge(e);
    let gone = work.retire(v);
    let on = &mut work.nodes[a as usize];
    let mut values = Vec::with_capacity(on.costs.len());
    for (i, cost) in on.costs.iter_mut().enumerate() {
        let pairs = table.row(i).iter().zip(&gone.costs);
        let (best, s) = least(pairs.map(|(w, c)| w.plus(*c)));
        *cost = cost.plus(best);
        values.push(gone.strategies[s]);
    }
    work.undos.push(Undo::Follows(Follows {
        node: v,
        on: a,
        keys: on.strategies.clone(),
        values,
    }));
    work.touch(a);
    true
}

/// Folds a node between two others into a table of these, unless the tables would grow.
fn fold_path(work: &mut Work, v: u32, a: u32, b: u32) -> bool {
    let size = |v: u32| work.nodes[v as usize].costs.len();
    let (n_a, n_b, n_v) = (size(a), size(b), size(v));
    let made = if work.nodes[a as usize].links.contains_key(&b) {
        0
    } else {
        n_a * n_b
    };
    if made > n_v * (n_a + n_b) {
        return false;
    }
    let links = &work.nodes[v as usize].links;
    let (e_a, e_b) = (links[&a], links[&b]);
    let (from_a, from_b) = (work.table_from(e_a, a), work.table_from(e_b, b));
    work.take_edge(e_a);
    work.take_edge(e_b);
    let gone = work.retire(v);
    let mut values = Vec::with_capacity(n_a * n_b);
    let mut cells = Vec::with_capacity(n_a * n_b);
    let mut row: Vec<Cost> = Vec::with_capacity(n_v);
    for i in 0..n_a {
        row.clear();
        let sums = from_a.row(i).iter().zip(&gone.costs);
        row.extend(sums.map(|(w, c)| w.plus(*c)));
        for j in 0..n_b {
            let (best, s) = least(row.iter().zip(from_b.row(j)).map(|(r, w)| r.plus(*w)));
            cells.push(best);
            values.push(gone.strategies[s]);
        }
    }
    work.undos.push(Undo::FollowsTwo(FollowsTwo {
        node: v,
        on: [a, b],
        keys: [a, b].map(|u| work.nodes[u as usize].strategies.clone()),
        values,
    }));
    let table = Table::new(n_a, n_b, cells).expect("one cell was made per pair");
    work.add_edge(a, b, Arc::new(table));
    true
}

/// Returns the least cost and its first index; forbidden and 0 if all are forbidden.
fn least(costs: impl Iterator<Item = Cost>) -> (Cost, usize) {
    let mut best = (Cost::FORBIDDEN, 0);
    for (i, cost) in costs.enumerate() {
        if cost < best.0 {
            best = (cost, i);
        }
    }
    best
}
