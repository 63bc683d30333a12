//! Large neighbourhoods: a connected part of the problem as an integer program of its own.
//!
//! Everything outside the part is held; the part's budgets are what the rest leaves. It is
//! presolved and solved like a whole problem, so its best choice is found exactly.

use super::dual::Dual;
use super::ilp::{IlpOptions, n_columns, solve_ilp};
use super::improve::Random;
use super::presolve::{PresolveOptions, presolve_again};
use super::problem::{Cost, Edge};
use super::reduced::{Lift, MemoryTerm, Reduced, ReducedNode};
use std::time::Duration;

/// Returns a random connected set of nodes whose tables have up to `max_cells` cells.
pub(super) fn ball(
    reduced: &Reduced,
    dual: &Dual<'_>,
    max_cells: usize,
    random: &mut Random,
) -> Vec<u32> {
    let n = reduced.nodes.len();
    let mut inside = vec![false; n];
    let mut members = Vec::new();
    let mut n_cells = 0;
    while n_cells < max_cells && members.len() < n {
        // When a component is smaller than the part, another seed joins.
        let mut queue = std::collections::VecDeque::from([random.below(n) as u32]);
        while let Some(v) = queue.pop_front() {
            if inside[v as usize] {
                continue;
            }
            inside[v as usize] = true;
            members.push(v);
            n_cells += reduced.nodes[v as usize].costs.len();
            let links = &dual.links[v as usize];
            for link in links.iter().filter(|l| inside[l.other as usize]) {
                n_cells += reduced.edges[link.edge as usize].table.cells().len();
            }
            if n_cells >= max_cells {
                break;
            }
            let mut next: Vec<u32> = links
                .iter()
                .map(|l| l.other)
                .filter(|u| !inside[*u as usize])
                .collect();
            while !next.is_empty() {
                queue.push_back(next.swap_remove(random.below(next.len())));
            }
        }
    }
    members.sort_unstable();
    members
}

/// A part of a problem, to be solved with the rest held.
pub(super) struct Part<'a> {
    pub reduced: &'a Reduced,
    pub dual: &'a Dual<'a>,
    /// The nodes of the part, ascending.
    pub members: &'a [u32],
    /// The most columns of an integer program that is tried.
    pub max_columns: usize,
}

impl Part<'_> {
    /// Returns the whole choice with the part improved, if it can be, and whether the part was
    /// solved to the end.
    pub fn solve(
        &self,
        choice: &[u32],
        options: &IlpOptions,
        time_left: &dyn Fn() -> Option<Duration>,
    ) -> (Option<Vec<u32>>, bool) {
        let part = part(self.reduced, self.dual, choice, self.members);
        let all = |n: &ReducedNode| (0..n.costs.len() as u32).collect();
        let keep: Vec<Vec<u32>> = part.nodes.iter().map(all).collect();
        let held: Vec<u32> = self.members.iter().map(|&v| choice[v as usize]).collect();
        let Some(before) = part.cost(&held) else {
            return (None, true);
        };
        let Ok(small) = presolve_again(part, &keep, &PresolveOptions::default()) else {
            return (None, true);
        };
        if n_columns(&small) > self.max_columns {
            return (None, false);
        }
        let start = small.project(choice);
        let outcome = solve_ilp(&small, start.as_ref(), &[], options, time_left);
        let better = outcome.choice.filter(|(cost, _)| *cost < before);
        let found = better.map(|(_, picks)| {
            let lifted = small.lift(&picks);
            let mut whole = choice.to_vec();
            self.members
                .iter()
                .for_each(|&v| whole[v as usize] = lifted[v as usize]);
            whole
        });
        (found, outcome.proved)
    }
}

fn part(reduced: &Reduced, dual: &Dual<'_>, choice: &[u32], members: &[u32]) -> Reduced {
    let mut place = vec![u32::MAX; reduced.nodes.len()];
    for (i, &v) in members.iter().enumerate() {
        place[v as usize] = i as u32;
    }
    let mut held = choice.to_vec();
    let levels = {
        let outside = Reduced {
            nodes: outside(reduced, &place),
            limits: reduced.limits.clone(),
            ..Reduced::default()
        };
        // Members have no memory in `outside`, so their strategies do not matter there.
        held.iter_mut()
            .zip(&place)
            .filter(|(_, p)| **p != u32::MAX)
            .for_each(|(s, _)| *s = 0);
        outside.levels(&held)
    };
    let node = |&v: &u32| {
        let node = &reduced.nodes[v as usize];
        let mut costs = node.costs.clone();
        for link in dual.links[v as usize]
            .iter()
            .filter(|l| place[l.other as usize] == u32::MAX)
        {
            let table = &reduced.edges[link.edge as usize].table;
            let other = choice[link.other as usize] as usize;
            for (s, cost) in costs.iter_mut().enumerate() {
                *cost = cost.plus(if link.rows {
                    table.get(s, other)
                } else {
                    table.get(other, s)
                });
            }
        }
        ReducedNode {
            costs,
            memory: node.memory.clone(),
        }
    };
    let inside = |e: &&Edge| place[e.a as usize] != u32::MAX && place[e.b as usize] != u32::MAX;
    let moved = |e: &Edge| Edge {
        a: place[e.a as usize],
        b: place[e.b as usize],
        table: std::sync::Arc::clone(&e.table),
    };
    let strategies = |&v: &u32| {
        (
            v,
            (0..reduced.nodes[v as usize].costs.len() as u32).collect(),
        )
    };
    Reduced {
        nodes: members.iter().map(node).collect(),
        edges: reduced.edges.iter().filter(inside).map(moved).collect(),
        limits: reduced
            .limits
            .iter()
            .zip(&levels)
            .map(|(m, l)| m.saturating_sub(*l))
            .collect(),
        times: reduced.times.clone(),
        offset: 0,
        lift: Lift {
            n_original: reduced.nodes.len(),
            original: members.iter().map(strategies).collect(),
            steps: Vec::new(),
        },
    }
}

/// Returns all nodes, with the members' memory taken out.
fn outside(reduced: &Reduced, place: &[u32]) -> Vec<ReducedNode> {
    let node = |(node, &p): (&ReducedNode, &u32)| ReducedNode {
        costs: vec![Cost::ZERO],
        memory: if p == u32::MAX {
            node.memory.clone()
        } else {
            Vec::<MemoryTerm>::new()
        },
    };
    reduced.nodes.iter().zip(place).map(node).collect()
}
