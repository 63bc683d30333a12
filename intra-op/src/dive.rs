//! A first choice that fits: decides node after node, cheapest strategy first, and follows
//! what each decision rules out.
//!
//! A strategy's score is its priced cost, the pair costs to the nodes already decided, and
//! the messages from those still open. After a decision, arc consistency on the forbidden
//! pairs shrinks the open nodes' strategies, and the least usage of what is left must fit;
//! a decision that breaks this is taken back and its strategy dropped. When a node has no
//! strategy left the dive fails: there is no deeper backtracking.

use super::dual::{Dual, INFINITE, Link};
use super::profile::Profile;
use super::reduced::Reduced;

struct Dive<'a> {
    reduced: &'a Reduced,
    dual: &'a Dual<'a>,
    alive: Vec<Vec<bool>>,
    profile: Profile,
    /// Per node and memory term, the alive strategies' least usage, which the profile includes.
    least: Vec<Vec<u64>>,
    /// The strategies that were dropped, in order.
    dropped: Vec<(u32, u32)>,
    /// The least usages that were replaced, in order: node, term, the value before.
    raised: Vec<(u32, u32, u64)>,
}

/// Finds a choice that fits, or `None`. Prices count `weight` times; where `prefer` names a
/// strategy, that one is tried first.
pub(super) fn dive(
    reduced: &Reduced,
    dual: &Dual<'_>,
    weight: f64,
    prefer: Option<&[Option<u32>]>,
) -> Option<Vec<u32>> {
    let mut dive = Dive::new(reduced, dual);
    let n = reduced.nodes.len();
    let mut choice = vec![u32::MAX; n];
    let all: Vec<u32> = (0..n as u32).collect();
    if !dive.follow(&all) {
        return None;
    }
    for v in all {
        let first = prefer.and_then(|p| p[v as usize]);
        choice[v as usize] = dive.decide(v, weight, first, &choice)?;
    }
    Some(choice)
}

impl<'a> Dive<'a> {
    fn new(reduced: &'a Reduced, dual: &'a Dual<'a>) -> Self {
        let usage = |u: &Vec<u64>| u.iter().copied().min().unwrap_or(0);
        let mut dive = Dive {
            reduced,
            dual,
            alive: reduced
                .nodes
                .iter()
                .map(|n| n.costs.iter().map(|c| !c.is_forbidden()).collect())
                .collect(),
            profile: Profile::new(&reduced.limits),
            least: reduced
                .nodes
                .iter()
                .map(|n| n.memory.iter().map(|t| usage(&t.usage)).collect())
                .collect(),
            dropped: Vec::new(),
            raised: Vec::new(),
        };
        for (node, least) in reduced.nodes.iter().zip(&dive.least) {
            for (term, &bytes) in node.memory.iter().zip(least) {
                dive.profile.change(term.from, term.to, bytes as i64);
            }
        }
        dive
    }

    /// Decides node `v`, or returns `None` when every strategy leads to a contradiction.
    fn decide(&mut self, v: u32, weight: f64, first: Option<u32>, choice: &[u32]) -> Option<u32> {
        let scores = self.scores(v, weight, choice);
        let mut order: Vec<u32> = (0..scores.len() as u32).collect();
        order.sort_by_key(|&s| (Some(s) != first, scores[s as usize], s));
        for s in order {
            if !self.alive[v as usize][s as usize] {
                continue;
            }
            let mark = (self.dropped.len(), self.raised.len());
            for other in 0..scores.len() as u32 {
                if other != s && self.alive[v as usize][other as usize] {
                    self.drop(v, other);
                }
            }
            if self.raise(v) && self.follow(&[v]) {
                return Some(s);
            }
            self.take_back(mark);
            self.drop(v, s);
            if !self.alive[v as usize].contains(&true) || !self.raise(v) || !self.follow(&[v]) {
                return None;
            }
        }
        None
    }

    fn scores(&self, v: u32, weight: f64, choice: &[u32]) -> Vec<i64> {
        let (costs, priced) = (&self.dual.costs[v as usize], &self.dual.priced[v as usize]);
        let weighted = |(c, p): (&i64, &i64)| c + ((p - c) as f64 * weight) as i64;
        let mut scores: Vec<i64> = costs.iter().zip(priced).map(weighted).collect();
        for link in &self.dual.links[v as usize] {
            let u = choice[link.other as usize];
            if u == u32::MAX {
                let message = &self.dual.messages[link.edge as usize][usize::from(!link.rows)];
                scores.iter_mut().zip(message).for_each(|(x, m)| *x += m);
            } else {
                for (s, x) in scores.iter_mut().enumerate() {
                    *x = (*x + self.pair(link, s, u as usize)).min(INFINITE);
                }
            }
        }
        scores
    }

    fn pair(&self, link: &Link, mine: usize, theirs: usize) -> i64 {
        let n_cols = self.reduced.edges[link.edge as usize].table.n_cols();
        let (row, col) = if link.rows {
            (mine, theirs)
        } else {
            (theirs, mine)
        };
        self.dual.tables[link.edge as usize][row * n_cols + col]
    }

    fn drop(&mut self, v: u32, s: u32) {
        self.alive[v as usize][s as usize] = false;
        self.dropped.push((v, s));
    }

    /// Raises the least usages of `v` to those of its alive strategies; returns false if that does
    /// not fit.
    fn raise(&mut self, v: u32) -> bool {
        let alive = &self.alive[v as usize];
        for (k, term) in self.reduced.nodes[v as usize].memory.iter().enumerate() {
            let left = term.usage.iter().zip(alive).filter(|(_, a)| **a);
            let least = left.map(|(u, _)| *u).min().unwrap_or(0);
            let before = self.least[v as usize][k];
            if least > before {
                self.profile
                    .change(term.from, term.to, (least - before) as i64);
                self.least[v as usize][k] = least;
                self.raised.push((v, k as u32, before));
            }
        }
        self.profile.fits()
    }

    /// Restores arc consistency from the nodes `changed`; returns false on a contradiction.
    fn follow(&mut self, changed: &[u32]) -> bool {
        let mut queue: Vec<u32> = changed.to_vec();
        while let Some(v) = queue.pop() {
            for k in 0..self.dual.links[v as usize].len() {
                let link = self.dual.links[v as usize][k];
                let table = &self.reduced.edges[link.edge as usize].table;
                if !table.has_forbidden() {
                    continue;
                }
                let lost = self.unsupported(v, &link);
                if lost.is_empty() {
                    continue;
                }
                lost.iter().for_each(|&s| self.drop(link.other, s));
                if !self.alive[link.other as usize].contains(&true) || !self.raise(link.other) {
                    return false;
                }
                queue.push(link.other);
            }
        }
        true
    }

    /// Returns the alive strategies of the link's other end that no alive strategy of `v` allows.
    fn unsupported(&self, v: u32, link: &Link) -> Vec<u32> {
        let mine: Vec<usize> = (0..self.alive[v as usize].len())
            .filter(|&s| self.alive[v as usize][s])
            .collect();
        let theirs = self.alive[link.other as usize]
            .iter()
            .enumerate()
            .filter(|(_, a)| **a);
        let lost = theirs.filter(|&(s, _)| {
            let allows = |&m: &usize| self.pair(link, m, s) < INFINITE;
            !mine.iter().any(allows)
        });
        lost.map(|(s, _)| s as u32).collect()
    }

    fn take_back(&mut self, (dropped, raised): (usize, usize)) {
        for (v, s) in self.dropped.drain(dropped..) {
            self.alive[v as usize][s as usize] = true;
        }
        for (v, k, before) in self.raised.drain(raised..).rev() {
            let term = &self.reduced.nodes[v as usize].memory[k as usize];
            let now = self.least[v as usize][k as usize];
            self.profile
                .change(term.from, term.to, before as i64 - now as i64);
            self.least[v as usize][k as usize] = before;
        }
    }
}
