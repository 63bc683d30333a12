//! Large induced forests of the problem graph, and the best choice on one at given prices.
//!
//! With all nodes outside an induced forest held, the pair costs to them are node costs, and
//! with prices on memory what is left is a sum over trees: a dynamic program from the leaves
//! to the roots finds its least in time linear in the tables' cells. Half of all nodes fit in
//! such a forest.
//!
//! Sums are single precision less their least, so that the errors stay relative to what
//! decides between strategies. What a forest proposes is priced exactly by its user.

use std::collections::HashMap;
use std::sync::Arc;

use super::improve::Random;
use super::problem::Cost;
use super::reduced::Reduced;

/// Stands for a forbidden cost: above all costs, and sums of it stay finite.
const FORBIDDEN: f32 = 1e30;

/// An edge as one of its ends sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct End {
    pub other: u32,
    pub edge: u32,
    /// True when this end is the rows of the edge's table.
    pub rows: bool,
    /// The place at which the cells start: rows for the other end, columns for this one.
    at: u32,
}

/// A reduced problem laid out for fast passes.
pub(super) struct Graph<'a> {
    pub reduced: &'a Reduced,
    /// The index of each node's first strategy in flat arrays.
    first: Vec<u32>,
    costs: Vec<f32>,
    first_end: Vec<u32>,
    ends: Vec<End>,
    cells: Vec<f32>,
    /// The index of each node's first memory term, and of its usages in a flat array.
    first_term: Vec<u32>,
    terms: Vec<(u32, u32, u32)>,
    usages: Vec<f32>,
}

impl<'a> Graph<'a> {
    pub fn new(reduced: &'a Reduced) -> Graph<'a> {
        let n = reduced.nodes.len();
        let mut graph = Graph {
            reduced,
            first: vec![0],
            costs: Vec::new(),
            first_end: vec![0],
            ends: Vec::new(),
            cells: Vec::new(),
            first_term: vec![0],
            terms: Vec::new(),
            usages: Vec::new(),
        };
        let cost = |c: &Cost| c.value().map_or(FORBIDDEN, |c| c as f32);
        let mut known: HashMap<(usize, bool), u32> = HashMap::new();
        let mut ends: Vec<Vec<End>> = vec![Vec::new(); n];
        for (e, edge) in reduced.edges.iter().enumerate() {
            for (v, other, rows) in [(edge.a, edge.b, true), (edge.b, edge.a, false)] {
                let at = *known
                    .entry((Arc::as_ptr(&edge.table) as usize, rows))
                    .or_insert_with(|| {
                        let turned = rows.then(|| edge.table.transposed());
                        let table = turned.as_ref().unwrap_or(&edge.table);
                        graph.cells.extend(table.cells().iter().map(cost));
                        (graph.cells.len() - table.cells().len()) as u32
                    });
                let edge = e as u32;
                ends[v as usize].push(End {
                    other,
                    edge,
                    rows,
                    at,
                });
            }
        }
        for (node, ends) in reduced.nodes.iter().zip(ends) {
            graph.costs.extend(node.costs.iter().map(cost));
            graph.first.push(graph.costs.len() as u32);
            graph.ends.extend(ends);
            graph.first_end.push(graph.ends.len() as u32);
            for term in &node.memory {
                let at = graph.usages.len() as u32;
                graph.terms.push((term.from, term.to, at));
                graph.usages.extend(term.usage.iter().map(|u| *u as f32));
            }
            graph.first_term.push(graph.terms.len() as u32);
        }
        graph
    }

    pub fn n_nodes(&self) -> usize {
        self.first.len() - 1
    }

    pub fn size(&self, v: u32) -> usize {
        (self.first[v as usize + 1] - self.first[v as usize]) as usize
    }

    /// Returns the edges of a node.
    pub fn ends(&self, v: u32) -> &[End] {
        &self.ends[self.first_end[v as usize] as usize..self.first_end[v as usize + 1] as usize]
    }

    /// Returns the exact pair cost with `mine` here and `theirs` at the other end.
    pub fn pair(&self, end: &End, mine: u32, theirs: u32) -> Cost {
        let table = &self.reduced.edges[end.edge as usize].table;
        let (mine, theirs) = (mine as usize, theirs as usize);
        if end.rows {
            table.get(mine, theirs)
        } else {
            table.get(theirs, mine)
        }
    }

    /// Adds the pair costs of each strategy here with strategy `theirs` at the other end.
    fn add_held(&self, end: &End, theirs: u32, sums: &mut [f32]) {
        let at = end.at as usize + theirs as usize * sums.len();
        for (x, cell) in sums.iter_mut().zip(&self.cells[at..]) {
            *x += cell;
        }
    }

    /// Computes `least[j] = min_i (child[i] + cell[i, j])`; `end` is the parent's.
    fn message(&self, end: &End, child: &[f32], least: &mut [f32]) {
        least.fill(2.0 * FORBIDDEN);
        let rows = self.cells[end.at as usize..].chunks_exact(least.len());
        for (&x, row) in child.iter().zip(rows) {
            for (l, &cell) in least.iter_mut().zip(row) {
                let sum = x + cell;
                *l = if sum < *l { sum } else { *l };
            }
        }
    }

    /// Adds the price of each strategy's memory; `until[t]` is the sum of prices before time `t`.
    fn add_priced(&self, v: u32, until: &[f64], sums: &mut [f32]) {
        let range = self.first_term[v as usize] as usize..self.first_term[v as usize + 1] as usize;
        for &(from, to, at) in &self.terms[range] {
            let price = (until[to as usize] - until[from as usize]) as f32;
            if price > 0.0 {
                for (x, u) in sums.iter_mut().zip(&self.usages[at as usize..]) {
                    *x += price * u;
                }
            }
        }
    }
}

/// One node of a forest.
#[derive(Clone, Copy, Debug)]
struct Member {
    node: u32,
    /// `None` at a root.
    parent: Option<Parent>,
    /// The place of the node's sums.
    at: usize,
}

/// The way from a member to its parent.
#[derive(Clone, Copy, Debug)]
struct Parent {
    /// The parent's place among the members.
    place: u32,
    /// The edge as the child sees it.
    up: End,
    /// The edge as the parent sees it.
    down: End,
}

/// An induced forest, parents before children. One forest is reused for the next.
#[derive(Default)]
pub(super) struct Forest {
    members: Vec<Member>,
    /// The place of each node, `OUT` or `REJECTED`.
    place: Vec<u32>,
    touched: Vec<u32>,
    frontier: Vec<u32>,
    base: Vec<f32>,
    sums: Vec<f32>,
    least: Vec<f32>,
    /// The work done so far, in table cells.
    pub work: u64,
}

/// Marks a node that was not seen yet.
const OUT: u32 = u32::MAX;
/// Marks a node that would close a loop or join two trees.
const REJECTED: u32 = u32::MAX - 1;
/// The most trees of a forest.
const MAX_TREES: usize = 20;

impl Forest {
    /// Grows a tree from `root`, and then trees from random nodes, up to `size` nodes.
    pub fn grow(&mut self, graph: &Graph<'_>, root: u32, size: usize, random: &mut Random) {
        for &v in &self.touched {
            self.place[v as usize] = OUT;
        }
        self.touched.clear();
        self.members.clear();
        self.place.resize(graph.n_nodes(), OUT);
        self.base.clear();
        let mut next = root;
        for _ in 0..MAX_TREES {
            self.grow_tree(graph, next, size, random);
            if self.members.len() >= size {
                break;
            }
            next = random.below(graph.n_nodes()) as u32;
        }
    }

    fn grow_tree(&mut self, graph: &Graph<'_>, root: u32, size: usize, random: &mut Random) {
        self.frontier.clear();
        self.frontier.push(root);
        while self.members.len() < size && !self.frontier.is_empty() {
            let k = random.below(self.frontier.len());
            let v = self.frontier.swap_remove(k);
            if self.place[v as usize] != OUT {
                continue;
            }
            self.touched.push(v);
            let inside = |end: &&End| self.place[end.other as usize] < REJECTED;
            let mut parents = graph.ends(v).iter().filter(inside);
            let (parent, second) = (parents.next().copied(), parents.next());
            if second.is_some() || (parent.is_some() && v == root) {
                self.place[v as usize] = REJECTED;
                continue;
            }
            self.add(graph, v, parent);
        }
    }

    fn add(&mut self, graph: &Graph<'_>, v: u32, parent: Option<End>) {
        let parent = parent.map(|up| {
            let mut back = graph.ends(up.other).iter();
            let down = back.find(|end| end.edge == up.edge);
            Parent {
                place: self.place[up.other as usize],
                up,
                down: *down.expect("an edge has two ends"),
            }
        });
        self.place[v as usize] = self.members.len() as u32;
        self.members.push(Member {
            node: v,
            parent,
            at: self.base.len(),
        });
        self.base.resize(self.base.len() + graph.size(v), 0.0);
        let others = graph.ends(v).iter().map(|end| end.other);
        let open = others.filter(|u| self.place[*u as usize] == OUT);
        self.frontier.extend(open);
    }

    /// Returns the nodes, parents first.
    pub fn nodes(&self) -> impl Iterator<Item = u32> {
        self.members.iter().map(|m| m.node)
    }

    /// Computes the node costs with everything outside held at `choice`.
    pub fn hold(&mut self, graph: &Graph<'_>, choice: &[u32]) {
        for m in &self.members {
            let n = graph.size(m.node);
            let sums = &mut self.base[m.at..][..n];
            sums.copy_from_slice(&graph.costs[graph.first[m.node as usize] as usize..][..n]);
            for end in graph.ends(m.node) {
                if self.place[end.other as usize] >= REJECTED {
                    graph.add_held(end, choice[end.other as usize], sums);
                    self.work += n as u64;
                }
            }
        }
    }

    /// Writes the best strategies at these prices to `picks`, by node. `until[t]` is the sum
    /// of prices before time `t`. Each strategy's cost is raised by up to `noise`.
    pub fn solve(
        &mut self,
        graph: &Graph<'_>,
        until: &[f64],
        noise: f32,
        random: &mut Random,
        picks: &mut [u32],
    ) {
        self.sums.clone_from(&self.base);
        for m in self.members.iter().rev() {
            let n = graph.size(m.node);
            let (above, below) = self.sums.split_at_mut(m.at);
            let sums = &mut below[..n];
            graph.add_priced(m.node, until, sums);
            if noise > 0.0 {
                sums.iter_mut()
                    .for_each(|x| *x += noise * random.unit() as f32);
            }
            let least = sums.iter().fold(f32::MAX, |a, b| a.min(*b));
            sums.iter_mut().for_each(|x| *x -= least);
            if let Some(Parent { place, down, .. }) = &m.parent {
                let parent = &self.members[*place as usize];
                let n_parent = graph.size(parent.node);
                self.least.resize(n_parent, 0.0);
                graph.message(down, sums, &mut self.least);
                let to = &mut above[parent.at..][..n_parent];
                to.iter_mut().zip(&self.least).for_each(|(x, l)| *x += l);
                self.work += (n * n_parent) as u64;
            }
        }
        for m in &self.members {
            let sums = &mut self.sums[m.at..][..graph.size(m.node)];
            if let Some(Parent { up, .. }) = &m.parent {
                graph.add_held(up, picks[up.other as usize], sums);
            }
            picks[m.node as usize] = least_place(sums);
        }
    }
}

fn least_place(sums: &[f32]) -> u32 {
    let mut best = 0;
    for (s, x) in sums.iter().enumerate() {
        if *x < sums[best] {
            best = s;
        }
    }
    best as u32
}

#[cfg(test)]
mod tests {
    use super::{Forest, Graph};
    use crate::improve::Random;
    use crate::improve::tests::random_problem;

    #[test]
    fn a_tree_is_solved_exactly_at_its_prices() {
        let mut random = Random(7);
        for round in 0..60 {
            // Edges of a tree only; no budget binds, prices do the same as costs.
            let mut reduced = random_problem(6, 0, &mut random);
            let graph = Graph::new(&reduced);
            let until = [0.0, 3.0, 3.0, 8.0, 8.0];
            let mut forest = Forest::default();
            forest.grow(&graph, round % 6, 6, &mut random);
            assert_eq!(forest.nodes().count(), 6);
            let mut picks = vec![0; 6];
            forest.hold(&graph, &picks);
            forest.solve(&graph, &until, 0.0, &mut random, &mut picks);
            let found = reduced.cost(&picks).unwrap() + priced(&reduced, &until, &picks);
            for v in 0..6 {
                let priced: Vec<u64> = (0..reduced.nodes[v].costs.len() as u32)
                    .map(|s| {
                        let terms = reduced.nodes[v].memory.iter();
                        let cost = terms.map(|t| {
                            let price = until[t.to as usize] - until[t.from as usize];
                            price as u64 * t.usage[s as usize]
                        });
                        cost.sum()
                    })
                    .collect();
                let costs = reduced.nodes[v].costs.iter_mut().zip(priced);
                costs.for_each(|(c, p)| *c = c.plus(super::Cost::finite(p)));
            }
            reduced.limits.fill(u64::MAX);
            let (least, _) = reduced.brute_force().unwrap();
            assert_eq!(found, least);
        }
    }

    fn priced(reduced: &super::Reduced, until: &[f64], picks: &[u32]) -> u64 {
        let terms = reduced
            .nodes
            .iter()
            .zip(picks)
            .flat_map(|(n, &s)| n.memory.iter().map(move |t| (t, s)));
        let cost = terms.map(|(t, s)| {
            let price = until[t.to as usize] - until[t.from as usize];
            price as u64 * t.usage[s as usize]
        });
        cost.sum()
    }

    #[test]
    fn a_forest_has_no_loops() {
        let mut random = Random(3);
        for _ in 0..40 {
            let reduced = random_problem(12, 14, &mut random);
            let graph = Graph::new(&reduced);
            let mut forest = Forest::default();
            forest.grow(&graph, random.below(12) as u32, 12, &mut random);
            let inside: Vec<u32> = forest.nodes().collect();
            // Every node but the roots has one edge to those before it.
            let mut n_edges = 0;
            for (i, &v) in inside.iter().enumerate() {
                let before = graph.ends(v).iter();
                let before = before.filter(|e| inside[..i].contains(&e.other)).count();
                assert!(before <= 1);
                n_edges += before;
            }
            assert!(inside.len() >= 3 && n_edges < inside.len());
        }
    }
}
