//! Rules out what cannot be part of a better choice.
//!
//! With the nodes' and edges' costs after messages, taking strategy s at a node costs at
//! least the bound plus what s has above its node's minimum; a pair adds what it has left at
//! its edge to what its two ends have above theirs. What exceeds the cost of a known choice
//! is dropped or forbidden; the known choice itself always stays.
//!
//! This is tested during passes, at each node before it shares what it has: there the
//! messages of all that come before meet those of all that come after, so that the
//! differences are largest. What is dropped is left out of the passes that follow, which
//! raises the bound and lets more be dropped.
//!
//! Invariant: a pass never lowers the bound, neither as a whole nor after any node, because
//! it only takes shares above a node's minimum, and sends on the least of what edges have. So
//! the bound at the start of a pass holds at every test in it.

use std::sync::Arc;

use super::dual::{Dual, INFINITE, Link};
use super::problem::{Cost, Edge, Table};
use super::reduced::Reduced;

/// The most passes, each in one direction.
const MAX_SWEEPS: usize = 8;
/// Passes go on as long as they rule out one part in this many of what is left.
const WORTH_IT: usize = 200;

/// A tightened problem: strategies of each node, ascending, and edges with more forbidden.
pub(super) struct Tightened {
    pub keep: Vec<Vec<u32>>,
    pub edges: Vec<Edge>,
}

/// Keeps everything that choices of at most `cost` may use, by the prices and messages of `dual`. A
/// node may be left without strategies: then there is no such choice.
pub(super) fn tighten(reduced: &Reduced, dual: &Dual<'_>, cost: u64) -> Tightened {
    let mut narrow = Narrow {
        reduced,
        dual: dual.clone(),
        alive: alive(reduced),
        n_barred: 0,
    };
    for sweep in 0..MAX_SWEEPS {
        let room = narrow.dual.room(cost);
        let before = narrow.n_barred;
        if room < 0 || !narrow.sweep(sweep % 2 == 0, room) {
            narrow.alive.iter_mut().for_each(|a| a.fill(false));
            break;
        }
        if (narrow.n_barred - before) * WORTH_IT < reduced.size() - before {
            break;
        }
    }
    narrow.finish()
}

fn alive(reduced: &Reduced) -> Vec<Vec<bool>> {
    let nodes = reduced.nodes.iter();
    nodes
        .map(|n| n.costs.iter().map(|c| !c.is_forbidden()).collect())
        .collect()
}

struct Narrow<'a> {
    reduced: &'a Reduced,
    /// The dual, with what is ruled out forbidden.
    dual: Dual<'a>,
    alive: Vec<Vec<bool>>,
    /// The number of strategies and pairs that were ruled out.
    n_barred: usize,
}

impl Narrow<'_> {
    /// Makes one pass, testing on the way; false when some node has no strategy left.
    fn sweep(&mut self, forward: bool, room: i128) -> bool {
        let n = self.reduced.nodes.len();
        let (mut here, mut there, mut share) = (Vec::new(), Vec::new(), Vec::new());
        for i in 0..n {
            let v = if forward { i } else { n - 1 - i };
            self.above(v, &mut here);
            for (s, &above) in here.iter().enumerate() {
                if i128::from(above) > room {
                    self.drop(v, s);
                }
            }
            if !self.alive[v].contains(&true) {
                return false;
            }
            for k in 0..self.dual.links[v].len() {
                let link = self.dual.links[v][k];
                if link.rows == forward {
                    self.above(link.other as usize, &mut there);
                    self.forbid_pairs(&link, &here, &there, room);
                }
            }
            self.dual.push(v, forward, &mut share);
            for k in 0..self.dual.links[v].len() {
                let link = self.dual.links[v][k];
                if link.rows == forward {
                    self.drop_unsupported(&link);
                }
            }
        }
        true
    }

    /// Computes the cost of each strategy of `v` above the least, messages included.
    fn above(&self, v: usize, above: &mut Vec<i64>) {
        self.dual.gather(v, above);
        let least = above.iter().copied().min().unwrap_or(0);
        above.iter_mut().for_each(|x| *x -= least);
    }

    fn drop(&mut self, v: usize, s: usize) {
        if !std::mem::replace(&mut self.alive[v][s], false) {
            return;
        }
        self.n_barred += 1;
        self.dual.priced[v][s] = INFINITE;
        for link in &self.dual.links[v] {
            let e = link.edge as usize;
            let n_cols = self.reduced.edges[e].table.n_cols();
            let cells = Arc::make_mut(&mut self.dual.tables[e]);
            if link.rows {
                cells[s * n_cols..][..n_cols].fill(INFINITE);
            } else {
                cells
                    .iter_mut()
                    .skip(s)
                    .step_by(n_cols)
                    .for_each(|c| *c = INFINITE);
            }
            // The node gets no message: with one, the forbidden pairs would look allowed.
            self.dual.messages[e][usize::from(!link.rows)][s] = 0;
        }
    }

    /// Forbids the pairs of an edge that cost too much; `here` and `there` are the costs of its
    /// ends above their least.
    fn forbid_pairs(&mut self, link: &Link, here: &[i64], there: &[i64], room: i128) {
        let e = link.edge as usize;
        let (above_rows, above_cols) = if link.rows {
            (here, there)
        } else {
            (there, here)
        };
        let [to_rows, to_cols] = &self.dual.messages[e];
        let room = i64::try_from(room).unwrap_or(i64::MAX);
        let mut barred: Vec<usize> = Vec::new();
        let cells = self.dual.tables[e].chunks_exact(to_cols.len());
        for (i, row) in cells.enumerate() {
            // A pair costs too much if what its edge has left exceeds this.
            let Some(left) = room.checked_sub(above_rows[i]).filter(|l| *l >= 0) else {
                continue;
            };
            for (j, &cell) in row.iter().enumerate() {
                let above = above_cols[j].saturating_sub(to_cols[j]) - to_rows[i];
                if cell < INFINITE && cell.saturating_add(above) > left {
                    barred.push(i * to_cols.len() + j);
                }
            }
        }
        if !barred.is_empty() {
            self.n_barred += barred.len();
            let cells = Arc::make_mut(&mut self.dual.tables[e]);
            barred.into_iter().for_each(|k| cells[k] = INFINITE);
        }
    }

    /// Drops strategies of the link's other end that no pair allows any more.
    fn drop_unsupported(&mut self, link: &Link) {
        let message = &self.dual.messages[link.edge as usize][usize::from(link.rows)];
        let lost: Vec<usize> = (0..message.len())
            .filter(|&s| message[s] >= INFINITE / 2)
            .collect();
        for s in lost {
            self.drop(link.other as usize, s);
            self.dual.messages[link.edge as usize][usize::from(link.rows)][s] = 0;
        }
    }

    fn finish(self) -> Tightened {
        let kept = |alive: &Vec<bool>| {
            let kept = (0..).zip(alive).filter(|(_, a)| **a);
            kept.map(|(s, _)| s).collect()
        };
        let keep: Vec<Vec<u32>> = self.alive.iter().map(kept).collect();
        let edge = |(e, edge): (usize, &Edge)| {
            let (alive_a, alive_b) = (&self.alive[edge.a as usize], &self.alive[edge.b as usize]);
            let n_cols = edge.table.n_cols();
            let cells = &self.dual.tables[e];
            // The pairs of dropped strategies go with them.
            let barred =
                |i: usize, j: usize| alive_a[i] && alive_b[j] && cells[i * n_cols + j] >= INFINITE;
            let changed = |i: usize, j: usize| barred(i, j) && !edge.table.get(i, j).is_forbidden();
            let same = (0..alive_a.len()).all(|i| (0..n_cols).all(|j| !changed(i, j)));
            let table = if same {
                Arc::clone(&edge.table)
            } else {
                let cell = |i: usize, j: usize| {
                    if barred(i, j) {
                        Cost::FORBIDDEN
                    } else {
                        edge.table.get(i, j)
                    }
                };
                Arc::new(Table::from_fn(alive_a.len(), n_cols, cell))
            };
            Edge {
                a: edge.a,
                b: edge.b,
                table,
            }
        };
        Tightened {
            edges: self.reduced.edges.iter().enumerate().map(edge).collect(),
            keep,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::presolve::{PresolveOptions, Presolved, presolve, presolve_again};
    use super::super::problem::{Cost, Edge, IntraOpProblem, Node, Table};
    use super::super::reduced::Reduced;
    use super::{Dual, tighten};
    use std::sync::Arc;

    struct Random(u64);

    impl Random {
        fn below(&mut self, n: u64) -> u64 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005);
            self.0 = self.0.wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) % n
        }
    }

    /// Makes a few nodes with a few strategies on a random graph, with memory that binds.
    fn problem(random: &mut Random) -> IntraOpProblem {
        let n = 2 + random.below(6) as usize;
        let scale = [1, 10, 1000, 1_000_000_000][random.below(4) as usize];
        let nodes: Vec<Node> = (0..n)
            .map(|_| {
                let k = 1 + random.below(3);
                let from = random.below(6);
                Node {
                    costs: (0..k)
                        .map(|_| Cost::finite(random.below(10) * scale))
                        .collect(),
                    usages: (0..k).map(|_| random.below(20)).collect(),
                    interval: [from, from + random.below(5)],
                }
            })
            .collect();
        let mut edges = Vec::new();
        for _ in 0..random.below(3 * n as u64) {
            let (a, b) = (random.below(n as u64), random.below(n as u64));
            let size = |v: u64| nodes[v as usize].costs.len();
            let cells: Vec<Cost> = (0..size(a) * size(b))
                .map(|_| match random.below(6) {
                    0 => Cost::FORBIDDEN,
                    _ => Cost::finite(random.below(15) * scale),
                })
                .collect();
            let table = Table::new(size(a), size(b), cells).unwrap();
            edges.push(Edge {
                a: a as u32,
                b: b as u32,
                table: Arc::new(table),
            });
        }
        IntraOpProblem {
            name: String::new(),
            usage_limit: Some(10 + random.below(10 * n as u64)),
            nodes,
            edges,
        }
    }

    /// Checks random problems, presolved fully or hardly at all, that have a solution.
    fn for_each_problem(check: impl Fn(&Reduced, u64, &[u32])) -> usize {
        let mut n_checked = 0;
        for seed in 0..4000 {
            let problem = problem(&mut Random(seed));
            let all = seed % 2 == 0;
            let options = PresolveOptions {
                minima: all,
                ties: all,
                fold: all,
                dominance: all,
                ..PresolveOptions::default()
            };
            if let Presolved::Reduced(reduced) = presolve(&problem, &options).unwrap()
                && let Some((cost, choice)) = reduced.brute_force()
                && !choice.is_empty()
            {
                check(&reduced, cost, &choice);
                n_checked += 1;
            }
        }
        n_checked
    }

    #[test]
    fn bounds_hold_and_nothing_needed_is_dropped() {
        let n_checked = for_each_problem(|reduced, cost, choice| {
            let mut dual = Dual::new(reduced);
            let mut visits = Vec::new();
            let bound = dual.ascend(200, &|| false, &mut |dual| {
                visits.push(dual.bound().0);
                Some(f64::INFINITY)
            });
            assert!(visits.iter().all(|b| *b <= cost), "{visits:?}, {cost}");
            assert!(bound <= cost, "{bound} bounds {cost}");
            assert!(visits.iter().all(|b| *b <= bound), "{visits:?}, {bound}");
            // With room to spare and without, the best choice stays.
            for known in [cost, cost + 1, cost + cost / 10] {
                let left = tighten(reduced, &dual, known);
                for (keep, s) in left.keep.iter().zip(choice) {
                    assert!(keep.contains(s), "{s} in {keep:?}");
                }
                let mut next = reduced.clone();
                next.edges = left.edges;
                assert_eq!(next.cost(choice), Some(cost));
                let next = presolve_again(next, &left.keep, &PresolveOptions::default()).unwrap();
                let mut warm = Dual::warm(&next, &dual.warm_start());
                let bound = warm.ascend(100, &|| false, &mut |_| Some(f64::INFINITY));
                assert!(bound <= cost, "{bound} bounds {cost} after tightening");
            }
        });
        assert!(n_checked > 1000, "only {n_checked} problems had a solution");
    }

    #[test]
    fn what_must_cost_too_much_is_dropped() {
        let n_dropped = std::cell::Cell::new(0);
        for_each_problem(|reduced, cost, _| {
            let mut dual = Dual::new(reduced);
            dual.ascend(200, &|| false, &mut |_| Some(f64::INFINITY));
            let left = tighten(reduced, &dual, cost);
            let all = reduced.nodes.iter().map(|n| n.costs.len()).sum::<usize>();
            let kept = left.keep.iter().map(Vec::len).sum::<usize>();
            n_dropped.set(n_dropped.get() + all - kept);
        });
        assert!(n_dropped.get() > 1000, "only {}", n_dropped.get());
    }
}
