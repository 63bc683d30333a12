//! Drops strategies that cannot be part of a solution: arc consistency on forbidden pairs and
//! bounds on memory, in turn, to a fixpoint. Undo: the kept strategies' original indices.

use std::collections::VecDeque;

use super::super::problem::Table;
use super::super::reduced::{MemoryTerm, running_sum};
use super::memory::RangeMin;
use super::work::Work;
use super::{Infeasibility, Reduction};

/// The reduction of this module.
#[derive(Default)]
pub(super) struct Propagate {
    /// The clock at the last round; nodes that have changed since were not looked at.
    seen: u64,
}

/// For each node, which strategies are left.
type Alive = Vec<Vec<bool>>;

impl Reduction for Propagate {
    fn name(&self) -> &'static str {
        "propagate"
    }

    fn apply(&mut self, work: &mut Work) -> Result<(), Infeasibility> {
        let mut alive: Alive = Vec::with_capacity(work.nodes.len());
        let mut queue = VecDeque::new();
        for (v, node) in work.nodes.iter().enumerate() {
            alive.push(node.costs.iter().map(|c| !c.is_forbidden()).collect());
            if node.changed > self.seen && !node.gone {
                queue.push_back(v as u32);
            }
        }
        loop {
            arc_consistency(work, &mut alive, &mut queue)?;
            memory_bounds(work, &mut alive, &mut queue)?;
            if queue.is_empty() {
                break;
            }
        }
        for (v, alive) in alive.iter().enumerate() {
            if alive.contains(&false) {
                let kept = (0..).zip(alive).filter(|(_, a)| **a).map(|(i, _)| i);
                work.keep(v as u32, &kept.collect::<Vec<u32>>());
            }
        }
        // The consequences of the drops above have been followed already.
        self.seen = work.clock;
        Ok(())
    }
}

fn arc_consistency(
    work: &Work,
    alive: &mut Alive,
    queue: &mut VecDeque<u32>,
) -> Result<(), Infeasibility> {
    let mut queued = vec![false; work.nodes.len()];
    for &v in queue.iter() {
        queued[v as usize] = true;
    }
    let mut supported = Vec::new();
    while let Some(u) = queue.pop_front() {
        queued[u as usize] = false;
        if !alive[u as usize].contains(&true) {
            return Err(Infeasibility::NoStrategy { node: u });
        }
        for (&v, &e) in &work.nodes[u as usize].links {
            let edge = work.edge(e);
            if !edge.table.has_forbidden() {
                continue;
            }
            find_supported(&edge.table, edge.a == u, &alive[u as usize], &mut supported);
            let mut lost = false;
            for (alive, supported) in alive[v as usize].iter_mut().zip(&supported) {
                lost |= *alive && !supported;
                *alive &= supported;
            }
            if lost && !queued[v as usize] {
                queued[v as usize] = true;
                queue.push_back(v);
            }
        }
    }
    Ok(())
}

/// Drops strategies that do not fit beside the least usage of all other nodes.
fn memory_bounds(
    work: &Work,
    alive: &mut Alive,
    queue: &mut VecDeque<u32>,
) -> Result<(), Infeasibility> {
    if work.limits.is_empty() {
        return Ok(());
    }
    let least = |v: usize, term: &MemoryTerm, alive: &Alive| {
        let left = term.usage.iter().zip(&alive[v]).filter(|(_, a)| **a);
        left.map(|(u, _)| *u).min().unwrap_or(0)
    };
    let mut delta = vec![0i128; work.limits.len() + 1];
    for (v, node) in work.nodes.iter().enumerate() {
        for term in &node.memory {
            let usage = i128::from(least(v, term, alive));
            delta[term.from as usize] += usage;
            delta[term.to as usize] -= usage;
        }
    }
    let slack = work.slack(&running_sum(&delta))?;
    let slack = RangeMin::new(&slack);
    for (v, node) in work.nodes.iter().enumerate() {
        let mut lost = false;
        for term in &node.memory {
            let most = least(v, term, alive) + slack.min(term.from as usize, term.to as usize);
            for (s, &usage) in term.usage.iter().enumerate() {
                lost |= alive[v][s] && usage > most;
                alive[v][s] &= usage <= most;
            }
        }
        if lost {
            queue.push_back(v as u32);
        }
    }
    Ok(())
}

/// Finds the strategies of the other end that some alive strategy of this end allows.
fn find_supported(table: &Table, from_rows: bool, alive: &[bool], supported: &mut Vec<bool>) {
    supported.clear();
    if from_rows {
        supported.resize(table.n_cols(), false);
        for (i, _) in alive.iter().enumerate().filter(|(_, a)| **a) {
            for (s, c) in supported.iter_mut().zip(table.row(i)) {
                *s |= !c.is_forbidden();
            }
        }
    } else {
        supported.extend((0..table.n_rows()).map(|i| {
            let mut pairs = table.row(i).iter().zip(alive);
            pairs.any(|(c, a)| *a && !c.is_forbidden())
        }));
    }
}
