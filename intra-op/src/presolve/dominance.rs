//! Drops strategies that another one dominates: changing to the other never costs or uses
//! more, whatever the neighbours do (dead-end elimination, Desmet et al. 1992). Undo: the kept
//! strategies' original indices.
//!
//! Changing s to t beside a neighbour costs at most `max_j (w[t, j] - w[s, j])`, which takes a
//! pass over both rows. Most pairs are refuted by one cell of each table: the one in which s
//! is cheapest.

use std::sync::Arc;

use super::super::problem::{Cost, Table};
use super::work::{Work, WorkNode};
use super::{Infeasibility, Reduction};

/// The cell comparisons that all rounds together may spend.
const BUDGET: u64 = 1_000_000_000;

/// The reduction of this module.
pub(super) struct DropDominated {
    /// The clock at the last round; nodes that have not changed since were looked at.
    seen: u64,
    budget: u64,
}

impl Default for DropDominated {
    fn default() -> Self {
        DropDominated {
            seen: 0,
            budget: BUDGET,
        }
    }
}

impl Reduction for DropDominated {
    fn name(&self) -> &'static str {
        "dominance"
    }

    fn apply(&mut self, work: &mut Work) -> Result<(), Infeasibility> {
        let seen = std::mem::replace(&mut self.seen, work.clock);
        for v in 0..work.nodes.len() as u32 {
            let node = &work.nodes[v as usize];
            let looked_at = node.changed.max(node.beside) <= seen;
            if node.gone || node.costs.len() < 2 || looked_at || self.budget == 0 {
                continue;
            }
            let links: Vec<u32> = node.links.values().copied().collect();
            let sides = links.iter().map(|&e| Side::new(work, e, v)).collect();
            let mut judge = Judge {
                node: &work.nodes[v as usize],
                sides,
                budget: &mut self.budget,
            };
            let kept = judge.undominated();
            work.keep(v, &kept);
        }
        Ok(())
    }
}

/// A table with the node at its rows, and the cheapest column of each row.
struct Side {
    table: Arc<Table>,
    cheapest: Arc<[u32]>,
}

impl Side {
    fn new(work: &mut Work, e: u32, v: u32) -> Side {
        let table = work.table_from(e, v);
        let cheapest = work.tables.cheapest(&table);
        Side { table, cheapest }
    }

    /// Returns the cost of changing `s` to `t` where `s` is cheapest; `None` if forbidden.
    fn at_cheapest(&self, t: usize, s: usize) -> Option<i64> {
        let j = self.cheapest[s] as usize;
        change(self.table.get(t, j), self.table.get(s, j))
    }

    /// Returns the most that changing `s` to `t` costs, or `None` as soon as that is more than
    /// `limit` or forbidden.
    fn most(&self, t: usize, s: usize, limit: i64) -> Option<i64> {
        let mut most = i64::MIN;
        let pairs = self.table.row(t).iter().zip(self.table.row(s));
        for (&to, &from) in pairs {
            most = most.max(change(to, from)?);
            if most > limit {
                return None;
            }
        }
        Some(most)
    }
}

/// Returns the cost of changing; where there is nothing to change from, as good as nothing.
fn change(to: Cost, from: Cost) -> Option<i64> {
    match (to.value(), from.value()) {
        (_, None) => Some(NEVER),
        (None, Some(_)) => None,
        // Costs are below 2^61.
        (Some(to), Some(from)) => Some(to as i64 - from as i64),
    }
}

/// A number below every sum of changes; two of them can still be added.
const NEVER: i64 = i64::MIN / 2;

struct Judge<'a> {
    node: &'a WorkNode,
    sides: Vec<Side>,
    budget: &'a mut u64,
}

impl Judge<'_> {
    /// Returns the strategies that no other one dominates, judged one after the other.
    fn undominated(&mut self) -> Vec<u32> {
        let n = self.node.costs.len();
        let mut alive = vec![true; n];
        for s in 0..n {
            alive[s] = !(0..n).any(|t| t != s && alive[t] && self.dominates(t, s));
        }
        (0..n as u32).filter(|&s| alive[s as usize]).collect()
    }

    /// Says whether changing `s` to `t` never costs or uses more, whatever the neighbours do.
    fn dominates(&mut self, t: usize, s: usize) -> bool {
        let Some(own) = change(self.node.costs[t], self.node.costs[s]) else {
            return false;
        };
        if self.node.costs[t].is_forbidden()
            || self.node.memory.iter().any(|m| m.usage[t] > m.usage[s])
        {
            return false;
        }
        // A lower bound on the change, from one cell of each table.
        let mut least = own;
        for side in &self.sides {
            match side.at_cheapest(t, s) {
                Some(at) => least = least.saturating_add(at),
                None => return false,
            }
        }
        if least > 0 {
            return false;
        }
        for side in &self.sides {
            let spent = side.table.n_cols() as u64;
            if *self.budget < spent {
                *self.budget = 0;
                return false;
            }
            *self.budget -= spent;
            let at = side.at_cheapest(t, s).unwrap_or(NEVER);
            // The amount by which this table may cost more than its cheapest cell does.
            let limit = at.saturating_sub(least);
            let Some(most) = side.most(t, s, limit) else {
                return false;
            };
            least = least.saturating_add(most.saturating_sub(at));
        }
        least <= 0
    }
}
