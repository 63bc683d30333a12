//! Memory that is decided whatever is chosen, and the times that can matter.

use super::super::problem::{IntraOpProblem, Node};
use super::super::reduced::{MemoryTerm, running_sum};
use super::Infeasibility;
use super::work::Work;

impl Work {
    /// Subtracts the least usage of every term from the budgets.
    pub fn settle_all(&mut self) -> Result<(), Infeasibility> {
        let mut delta = vec![0i128; self.limits.len() + 1];
        for term in self.nodes.iter_mut().flat_map(|n| &mut n.memory) {
            let least = term.usage.iter().copied().min().unwrap_or(0);
            if least == 0 {
                continue;
            }
            term.usage.iter_mut().for_each(|u| *u -= least);
            delta[term.from as usize] += i128::from(least);
            delta[term.to as usize] -= i128::from(least);
        }
        self.limits = self.slack(&running_sum(&delta))?;
        for node in &mut self.nodes {
            node.memory.retain(|term| term.usage.iter().any(|&u| u > 0));
        }
        Ok(())
    }

    /// Returns what these levels leave of the budgets.
    pub fn slack(&self, levels: &[u64]) -> Result<Vec<u64>, Infeasibility> {
        let over = |t: &usize| levels[*t].saturating_sub(self.limits[*t]);
        let worst = (0..levels.len()).max_by_key(|t| (over(t), std::cmp::Reverse(*t)));
        match worst {
            Some(t) if over(&t) > 0 => Err(Infeasibility::Memory {
                time: self.times[t],
                by_bytes: over(&t),
            }),
            _ => Ok(levels
                .iter()
                .zip(&self.limits)
                .map(|(l, m)| m - l)
                .collect()),
        }
    }
}

/// Sums terms with equal intervals and drops empty ones.
pub(super) fn merge_terms(terms: &mut Vec<MemoryTerm>) {
    terms.retain(|t| t.from < t.to);
    terms.sort_by_key(|t| (t.from, t.to));
    terms.dedup_by(|next, kept| {
        let same = (next.from, next.to) == (kept.from, kept.to);
        if same {
            for (sum, u) in kept.usage.iter_mut().zip(&next.usage) {
                *sum += u;
            }
        }
        same
    });
}

/// Returns the times that can be the worst, and each node's span over them.
///
/// A level can only be highest where something starts, and right before something ends.
pub(super) fn compress_times(problem: &IntraOpProblem) -> (Vec<u64>, Vec<(u32, u32)>) {
    let live = |n: &&Node| problem.usage_limit.is_some() && n.interval[0] < n.interval[1];
    let mut events: Vec<(u64, bool)> = Vec::new();
    for node in problem.nodes.iter().filter(live) {
        events.push((node.interval[0], true));
        events.push((node.interval[1], false));
    }
    events.sort_unstable();
    let mut times: Vec<u64> = Vec::new();
    let mut last_start = None;
    for (time, starts) in events {
        if starts {
            last_start = Some(time);
        } else if let Some(start) = last_start.take() {
            times.push(start);
        }
    }
    let place = |t: u64| times.partition_point(|&k| k < t) as u32;
    let span = |n: &Node| {
        if live(&n) {
            (place(n.interval[0]), place(n.interval[1]))
        } else {
            (0, 0)
        }
    };
    let spans = problem.nodes.iter().map(span).collect();
    (times, spans)
}

/// A structure that answers range minima, by doubling.
pub(super) struct RangeMin {
    levels: Vec<Vec<u64>>,
}

impl RangeMin {
    pub fn new(values: &[u64]) -> RangeMin {
        let mut levels = vec![values.to_vec()];
        let mut width = 1;
        while 2 * width <= values.len() {
            let last = &levels[levels.len() - 1];
            let next = (0..=values.len() - 2 * width).map(|i| last[i].min(last[i + width]));
            levels.push(next.collect());
            width *= 2;
        }
        RangeMin { levels }
    }

    /// Returns the least value in `from..to`, which must not be empty.
    pub fn min(&self, from: usize, to: usize) -> u64 {
        let k = (to - from).ilog2() as usize;
        self.levels[k][from].min(self.levels[k][to - (1 << k)])
    }
}
