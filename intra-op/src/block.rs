//! Small blocks solved exactly at given prices, loops and all, by elimination.
//!
//! A forest leaves out a node of every loop; a block is grown so that loops close. With the
//! outside held, strategies that have become forbidden go, and of the rest each node keeps
//! those that look best, and the present one, so that elimination stays small.

use std::sync::Arc;

use super::eliminate::Eliminator;
use super::forest::Graph;
use super::improve::Random;
use super::problem::{Cost, Edge, Table};

/// The most message cells of a block.
const MAX_CELLS: u64 = 1 << 16;
/// The most that the memory of one node may be worth, so that sums over a block stay below 2^61.
const MOST_PRICED: u64 = 1 << 50;
/// The number of passes that drop strategies without an allowed partner.
const PASSES: usize = 3;
/// Marks nodes that are not in the block.
const OUT: u32 = u32::MAX;
/// A score above all real scores.
const HOPELESS: u64 = 1 << 62;

/// A set of nodes and the strategies that they may take. One block is reused for the next.
#[derive(Default)]
pub(super) struct Block {
    nodes: Vec<u32>,
    /// Place of each node of the problem among `nodes`, or [`OUT`].
    place: Vec<u32>,
    /// Strategies that each node may take, ascending.
    domains: Vec<Vec<u32>>,
    /// The costs of these strategies beside the held nodes.
    costs: Vec<Vec<u64>>,
    eliminator: Option<Eliminator>,
    /// The work done so far, in table cells.
    pub work: u64,
}

impl Block {
    /// The nodes of the block.
    pub fn nodes(&self) -> &[u32] {
        &self.nodes
    }

    /// Grows a block of up to `size` nodes with up to `most` strategies each around `root`; it has
    /// fewer nodes if elimination would be too wide. Returns false when nothing is left.
    pub fn prepare(
        &mut self,
        graph: &Graph<'_>,
        choice: &[u32],
        root: u32,
        (size, most): (usize, usize),
        random: &mut Random,
    ) -> bool {
        self.grow(graph, root, size, random);
        while self.nodes.len() > 1 {
            self.hold(graph, choice);
            self.restrict(graph, choice, most, random);
            let edges = self.edges(graph);
            let sizes: Vec<usize> = self.domains.iter().map(Vec::len).collect();
            self.eliminator = Eliminator::new(&sizes, &edges, &[], MAX_CELLS).ok();
            if self.eliminator.is_some() {
                return true;
            }
            let n = self.nodes.len() * 3 / 4;
            for v in self.nodes.drain(n..) {
                self.place[v as usize] = OUT;
            }
        }
        false
    }

    fn grow(&mut self, graph: &Graph<'_>, root: u32, size: usize, random: &mut Random) {
        self.place.resize(graph.n_nodes(), OUT);
        for v in self.nodes.drain(..) {
            self.place[v as usize] = OUT;
        }
        let mut frontier = vec![root];
        while self.nodes.len() < size && !frontier.is_empty() {
            // The one of a few with most edges inside: loops close.
            let inside = |k: &usize| {
                let ends = graph.ends(frontier[*k]).iter();
                ends.filter(|e| self.place[e.other as usize] != OUT).count()
            };
            let few = (0..4).map(|_| random.below(frontier.len()));
            let k = few.max_by_key(inside).unwrap_or(0);
            let v = frontier.swap_remove(k);
            if self.place[v as usize] == OUT {
                self.place[v as usize] = self.nodes.len() as u32;
                self.nodes.push(v);
                let others = graph.ends(v).iter().map(|e| e.other);
                frontier.extend(others.filter(|u| self.place[*u as usize] == OUT));
            }
        }
    }

    /// Sets the strategies that each node may take beside the held nodes, and their costs.
    fn hold(&mut self, graph: &Graph<'_>, choice: &[u32]) {
        self.domains.clear();
        self.costs.clear();
        for &v in &self.nodes {
            let mut costs: Vec<Cost> = graph.reduced.nodes[v as usize].costs.clone();
            for end in graph.ends(v) {
                let u = end.other as usize;
                if self.place[u] == OUT {
                    let pairs = (0..).map(|s| graph.pair(end, s, choice[u]));
                    costs
                        .iter_mut()
                        .zip(pairs)
                        .for_each(|(x, pair)| *x = x.plus(pair));
                    self.work += costs.len() as u64;
                }
            }
            let allowed = (0..).zip(&costs).filter(|(_, c)| !c.is_forbidden());
            self.domains.push(allowed.map(|(s, _)| s).collect());
            self.costs
                .push(costs.iter().filter_map(|c| c.value()).collect());
        }
    }

    /// Drops strategies without an allowed partner across some edge, then all but the `most` best.
    fn restrict(&mut self, graph: &Graph<'_>, choice: &[u32], most: usize, random: &mut Random) {
        for pass in 1..=PASSES {
            for i in 0..self.nodes.len() {
                let mut scores = self.scores(graph, i);
                let mut bar = HOPELESS - 1;
                if pass == PASSES && scores.len() > most {
                    disturb(&mut scores, random);
                    let mut sorted = scores.clone();
                    sorted.sort_unstable();
                    bar = bar.min(sorted[most - 1]);
                }
                let chosen = choice[self.nodes[i] as usize];
                let domain = std::mem::take(&mut self.domains[i]);
                let costs = std::mem::take(&mut self.costs[i]);
                for ((s, cost), score) in domain.into_iter().zip(costs).zip(scores) {
                    if score <= bar || s == chosen {
                        self.domains[i].push(s);
                        self.costs[i].push(cost);
                    }
                }
            }
        }
    }

    /// Returns the cost of each strategy of the `i`th node with the best partner at every edge.
    fn scores(&mut self, graph: &Graph<'_>, i: usize) -> Vec<u64> {
        let mut scores = self.costs[i].clone();
        for end in graph.ends(self.nodes[i]) {
            let j = self.place[end.other as usize];
            if j == OUT {
                continue;
            }
            let (theirs, costs) = (&self.domains[j as usize], &self.costs[j as usize]);
            let least = costs.iter().copied().min().unwrap_or(0);
            for (x, &s) in scores.iter_mut().zip(&self.domains[i]) {
                let pairs = theirs.iter().zip(costs).filter_map(|(&u, cost)| {
                    let pair = graph.pair(end, s, u).value()?;
                    // A partner's own cost counts in part only, because other edges share it.
                    Some(pair + (cost - least) / 4)
                });
                *x = x
                    .saturating_add(pairs.min().unwrap_or(HOPELESS))
                    .min(HOPELESS);
            }
            self.work += (scores.len() * theirs.len()) as u64;
        }
        scores
    }

    fn edges(&mut self, graph: &Graph<'_>) -> Vec<Edge> {
        let mut edges = Vec::new();
        for (i, &v) in self.nodes.iter().enumerate() {
            for end in graph.ends(v).iter().filter(|e| e.rows) {
                let j = self.place[end.other as usize];
                if j == OUT {
                    continue;
                }
                let (mine, theirs) = (&self.domains[i], &self.domains[j as usize]);
                let cell = |a: usize, b: usize| graph.pair(end, mine[a], theirs[b]);
                let table = Arc::new(Table::from_fn(mine.len(), theirs.len(), cell));
                self.work += table.cells().len() as u64;
                let a = i as u32;
                edges.push(Edge { a, b: j, table });
            }
        }
        edges
    }

    /// Writes the best strategies at these prices to `picks`, by node. `until[t]` is the sum
    /// of prices before time `t`.
    pub fn solve(&mut self, graph: &Graph<'_>, until: &[f64], picks: &mut [u32]) {
        let Some(eliminator) = &self.eliminator else {
            return;
        };
        let priced = |(i, &v): (usize, &u32)| {
            let memory = &graph.reduced.nodes[v as usize].memory;
            let cost = |(&s, &cost): (&u32, &u64)| {
                let terms = memory.iter().map(|term| {
                    let price = until[term.to as usize] - until[term.from as usize];
                    price.max(0.0) * term.usage[s as usize] as f64
                });
                Cost::finite(cost + (terms.sum::<f64>() as u64).min(MOST_PRICED))
            };
            self.domains[i]
                .iter()
                .zip(&self.costs[i])
                .map(cost)
                .collect()
        };
        let costs: Vec<Vec<Cost>> = self.nodes.iter().enumerate().map(priced).collect();
        let found = eliminator.run(&costs);
        self.work += 8 * eliminator.cells();
        for ((&v, domain), s) in self.nodes.iter().zip(&self.domains).zip(found.decode(&[])) {
            picks[v as usize] = domain[s as usize];
        }
    }
}

/// Adds noise so that other strategies have their turn too.
fn disturb(scores: &mut [u64], random: &mut Random) {
    let least = scores.iter().copied().min().unwrap_or(0);
    let real = scores.iter().filter(|s| **s < HOPELESS);
    let (sum, n) = real.fold((0.0, 0), |(sum, n), s| (sum + (s - least) as f64, n + 1));
    let noise = 0.2 * sum / f64::from(n.max(1));
    for x in scores.iter_mut() {
        *x = x
            .saturating_add((noise * random.unit()) as u64)
            .min(HOPELESS);
    }
}

#[cfg(test)]
mod tests {
    use super::Block;
    use crate::forest::Graph;
    use crate::improve::Random;
    use crate::improve::tests::random_problem;

    #[test]
    fn a_block_of_everything_is_the_best_choice() {
        let mut random = Random(19);
        for _ in 0..60 {
            let mut reduced = random_problem(7, 6, &mut random);
            reduced.limits.fill(u64::MAX);
            let graph = Graph::new(&reduced);
            let mut picks = vec![0; 7];
            let mut block = Block::default();
            let root = random.below(7) as u32;
            let most = usize::MAX;
            assert!(block.prepare(&graph, &picks, root, (7, most), &mut random));
            assert_eq!(block.nodes().len(), 7);
            block.solve(&graph, &[0.0; 5], &mut picks);
            let (least, _) = reduced.brute_force().unwrap();
            assert_eq!(reduced.cost(&picks), Some(least));
        }
    }

    #[test]
    fn a_part_with_few_strategies_gets_no_worse() {
        let mut random = Random(29);
        for _ in 0..60 {
            let mut reduced = random_problem(12, 10, &mut random);
            reduced.limits.fill(u64::MAX);
            let graph = Graph::new(&reduced);
            let mut picks = vec![0; 12];
            let mut block = Block::default();
            for step in 0..6 {
                let before = reduced.cost(&picks).unwrap();
                let root = random.below(12) as u32;
                if block.prepare(&graph, &picks, root, (6, 1 + step % 3), &mut random) {
                    block.solve(&graph, &[0.0; 5], &mut picks);
                }
                assert!(reduced.cost(&picks).unwrap() <= before);
            }
        }
    }
}
