//! Drops times that cannot be over budget, and times no worse than their neighbour. Undo:
//! none, no choice changes.

use super::super::reduced::running_sum;
use super::memory::merge_terms;
use super::work::Work;
use super::{Infeasibility, Reduction};

/// The reduction of this module.
pub(super) struct DropTimes;

impl Reduction for DropTimes {
    fn name(&self) -> &'static str {
        "times"
    }

    fn apply(&mut self, work: &mut Work) -> Result<(), Infeasibility> {
        work.settle_all()?;
        let kept = times_that_matter(work);
        if kept.len() == work.limits.len() {
            return Ok(());
        }
        let mut place = vec![0u32; work.limits.len() + 1];
        for &k in &kept {
            place[k + 1] = 1;
        }
        for t in 0..work.limits.len() {
            place[t + 1] += place[t];
        }
        for v in 0..work.nodes.len() {
            let memory = &mut work.nodes[v].memory;
            let n_terms = memory.len();
            for term in &mut *memory {
                term.from = place[term.from as usize];
                term.to = place[term.to as usize];
            }
            merge_terms(memory);
            if memory.len() < n_terms {
                work.touch(v as u32);
            }
        }
        work.limits = kept.iter().map(|&t| work.limits[t]).collect();
        work.times = kept.iter().map(|&t| work.times[t]).collect();
        Ok(())
    }
}

fn times_that_matter(work: &Work) -> Vec<usize> {
    let n = work.limits.len();
    let (mut delta, mut starts, mut ends) =
        (vec![0i128; n + 1], vec![false; n + 1], vec![false; n + 1]);
    for term in work.nodes.iter().flat_map(|n| &n.memory) {
        let most = i128::from(term.usage.iter().copied().max().unwrap_or(0));
        delta[term.from as usize] += most;
        delta[term.to as usize] -= most;
        starts[term.from as usize] = true;
        ends[term.to as usize] = true;
    }
    let most = running_sum(&delta);
    let mut kept: Vec<usize> = Vec::new();
    // Whether something started or ended since the last time that was kept.
    let (mut started, mut ended) = (false, false);
    for t in 0..n {
        started |= starts[t];
        ended |= ends[t];
        if most[t] <= work.limits[t] {
            continue;
        }
        match kept.last() {
            // Nothing is live here that was not live then, and the budget is no tighter.
            Some(&last) if !started && work.limits[t] >= work.limits[last] => continue,
            // Everything live then is live here too, under a tighter budget.
            Some(&last) if !ended && work.limits[t] <= work.limits[last] => {
                kept.pop();
            }
            _ => {}
        }
        kept.push(t);
        (started, ended) = (false, false);
    }
    kept
}
