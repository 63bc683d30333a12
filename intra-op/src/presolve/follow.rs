//! Merges nodes that follow a neighbour though their pairs are priced, not forbidden: for each
//! strategy of the neighbour one strategy of the node is as good as any other, whatever its
//! other neighbours do, and never uses more memory. Undo: the node takes that strategy.
//!
//! This is [`dominance`](super::dominance) with one neighbour's choice known.

use std::sync::Arc;

use super::super::problem::Table;
use super::ties::Tie;
use super::work::{Work, WorkNode};
use super::{Infeasibility, Reduction};

/// Nodes with more neighbours are not looked at, because one neighbour then decides less.
const MAX_DEGREE: usize = 4;
/// The cells that one node may look at.
const BUDGET: usize = 1 << 16;

/// The reduction of this module.
#[derive(Default)]
pub(super) struct MergeFollowers {
    /// The clock at the last round; nodes that have not changed since were looked at.
    seen: u64,
}

impl Reduction for MergeFollowers {
    fn name(&self) -> &'static str {
        "follow"
    }

    fn apply(&mut self, work: &mut Work) -> Result<(), Infeasibility> {
        let seen = std::mem::replace(&mut self.seen, work.clock);
        for v in 0..work.nodes.len() as u32 {
            let node = &work.nodes[v as usize];
            let looked_at = node.changed.max(node.beside) <= seen;
            let degree = node.links.len();
            if node.gone || looked_at || degree == 0 || degree > MAX_DEGREE {
                continue;
            }
            let links: Vec<(u32, u32)> = node.links.iter().map(|(&u, &e)| (u, e)).collect();
            let tables: Vec<Arc<Table>> =
                links.iter().map(|&(_, e)| work.table_from(e, v)).collect();
            let found = links.iter().enumerate().find_map(|(k, &(on, e))| {
                let fits = work.growth(v, on) <= 0;
                let map = fits.then(|| answers(&work.nodes[v as usize], &tables, k))?;
                Some((
                    e,
                    Tie {
                        node: v,
                        on,
                        map: map?,
                    },
                ))
            });
            if let Some((e, tie)) = found {
                work.merge(e, &tie);
            }
        }
        Ok(())
    }
}

/// Returns the node's best answer to each strategy of neighbour `k`, if there always is one.
fn answers(node: &WorkNode, tables: &[Arc<Table>], k: usize) -> Option<Vec<u32>> {
    let n = node.costs.len();
    let mut left = BUDGET;
    let mut map = Vec::with_capacity(tables[k].n_cols());
    for i in 0..tables[k].n_cols() {
        let cost = |s: usize| node.costs[s].plus(tables[k].get(s, i)).value();
        let used = |s: usize| node.memory.iter().map(|m| m.usage[s]).sum::<u64>();
        let allowed = (0..n).filter_map(|s| Some((cost(s)?, used(s), s)));
        let (least, _, best) = allowed.min()?;
        for s in (0..n).filter(|&s| s != best) {
            let Some(cost) = cost(s) else {
                continue;
            };
            if node.memory.iter().any(|m| m.usage[best] > m.usage[s])
                || !never_worse(tables, k, best, s, cost - least, &mut left)
            {
                return None;
            }
        }
        map.push(best as u32);
    }
    Some(map)
}

/// Says whether taking `best` for `s`, which saves `gain` at neighbour `k`, never costs more.
fn never_worse(
    tables: &[Arc<Table>],
    k: usize,
    best: usize,
    s: usize,
    gain: u64,
    left: &mut usize,
) -> bool {
    // Costs are below 2^61, as are their sums.
    let mut worse = -(gain as i64);
    for (_, table) in tables.iter().enumerate().filter(|(e, _)| *e != k) {
        if *left < table.n_cols() {
            *left = 0;
            return false;
        }
        *left -= table.n_cols();
        let mut most = None;
        for (to, from) in table.row(best).iter().zip(table.row(s)) {
            match (to.value(), from.value()) {
                (_, None) => {}
                (None, Some(_)) => return false,
                (Some(to), Some(from)) => most = most.max(Some(to as i64 - from as i64)),
            }
        }
        match most {
            Some(most) => worse += most,
            None => return true,
        }
    }
    worse <= 0
}
