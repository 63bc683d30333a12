//! A reduced problem in flat arrays of 32-bit floating point, for fast passes over it.
//!
//! Equal tables are stored once, by rows and by columns, so that inner loops always run
//! along memory.

use std::collections::HashMap;
use std::sync::Arc;

use super::problem::Cost;
use super::reduced::Reduced;

/// Stands for a forbidden strategy or pair; sums and differences with costs stay recognisable.
pub(super) const FORBIDDEN: f32 = 1e30;
/// Everything from this value on is forbidden.
pub(super) const BARRED: f32 = 1e29;

/// The problem as flat arrays.
pub(super) struct Layout {
    /// For each node the index of its first strategy; at the end, the number of all strategies.
    pub first: Vec<usize>,
    pub costs: Vec<f32>,
    /// Per node and memory term, usage per strategy in multiples of `unit`.
    pub usages: Vec<Vec<Vec<f32>>>,
    pub links: Vec<Vec<FlatLink>>,
    /// The number of chains that cross each node, among which its cost is shared.
    pub n_chains: Vec<f32>,
    pub edges: Vec<EdgeLayout>,
    /// The cells of every distinct table, by rows and by columns.
    pub cells: Vec<f32>,
    /// The memory limit at each time, in multiples of `unit`.
    pub limits: Vec<f64>,
    /// The number of bytes of which usages and limits are multiples.
    pub unit: f64,
}

/// An edge as one of its ends sees it; `rows` is true at the first end.
#[derive(Clone, Copy)]
pub(super) struct FlatLink {
    pub edge: u32,
    pub rows: bool,
}

/// The places of an edge's parts in the flat arrays.
#[derive(Clone, Copy)]
pub(super) struct EdgeLayout {
    /// The numbers of strategies of the first and the second end.
    pub sizes: [usize; 2],
    /// The places at which the messages to the first and to the second end begin.
    pub messages: [usize; 2],
    /// The places at which the table with the first (or second) end at the rows begins.
    pub cells: [usize; 2],
}

impl Layout {
    pub fn new(reduced: &Reduced) -> Layout {
        let scaled = |c: &Cost| c.value().map_or(FORBIDDEN, |c| c as f32);
        let unit = reduced.limits.iter().copied().max().unwrap_or(1).max(1) as f64;
        let mut layout = Layout {
            first: vec![0],
            costs: Vec::new(),
            usages: Vec::new(),
            links: vec![Vec::new(); reduced.nodes.len()],
            n_chains: Vec::new(),
            edges: Vec::new(),
            cells: Vec::new(),
            limits: reduced.limits.iter().map(|&l| l as f64 / unit).collect(),
            unit,
        };
        for node in &reduced.nodes {
            layout.costs.extend(node.costs.iter().map(scaled));
            layout.first.push(layout.costs.len());
            let usage = |u: &Vec<u64>| u.iter().map(|&u| (u as f64 / unit) as f32).collect();
            let terms = node.memory.iter().map(|term| usage(&term.usage));
            layout.usages.push(terms.collect());
        }
        let mut known: HashMap<usize, [usize; 2]> = HashMap::new();
        let mut n_messages = 0;
        for (e, edge) in (0..).zip(&reduced.edges) {
            let table = &edge.table;
            let sizes = [table.n_rows(), table.n_cols()];
            let cells = *known
                .entry(Arc::as_ptr(table) as usize)
                .or_insert_with(|| layout.add_cells(table.cells().iter().map(scaled), sizes));
            layout.edges.push(EdgeLayout {
                sizes,
                messages: [n_messages, n_messages + sizes[0]],
                cells,
            });
            n_messages += sizes[0] + sizes[1];
            let link = |rows| FlatLink { edge: e, rows };
            layout.links[edge.a as usize].push(link(true));
            layout.links[edge.b as usize].push(link(false));
        }
        for links in &layout.links {
            let n_later = links.iter().filter(|l| l.rows).count();
            let n_chains = n_later.max(links.len() - n_later).max(1);
            layout.n_chains.push(n_chains as f32);
        }
        layout
    }

    fn add_cells(&mut self, cells: impl Iterator<Item = f32>, sizes: [usize; 2]) -> [usize; 2] {
        let by_rows = self.cells.len();
        self.cells.extend(cells);
        let by_cols = self.cells.len();
        for j in 0..sizes[1] {
            for i in 0..sizes[0] {
                self.cells.push(self.cells[by_rows + i * sizes[1] + j]);
            }
        }
        [by_rows, by_cols]
    }

    /// Returns the range of the strategies of node `v`.
    pub fn strategies(&self, v: usize) -> std::ops::Range<usize> {
        self.first[v]..self.first[v + 1]
    }

    /// Returns the mean allowed cost of nodes and edges, per node.
    pub fn mean_cost(&self) -> f64 {
        let mean = |costs: &[f32]| {
            let allowed = || costs.iter().filter(|c| **c < BARRED);
            let sum: f64 = allowed().map(|&c| f64::from(c)).sum();
            sum / allowed().count().max(1) as f64
        };
        let n = self.links.len();
        let nodes: f64 = (0..n).map(|v| mean(&self.costs[self.strategies(v)])).sum();
        let mut known: HashMap<usize, f64> = HashMap::new();
        let mut edge = |e: &EdgeLayout| {
            let cells = &self.cells[e.cells[0]..][..e.sizes[0] * e.sizes[1]];
            *known.entry(e.cells[0]).or_insert_with(|| mean(cells))
        };
        let edges: f64 = self.edges.iter().map(&mut edge).sum();
        (nodes + edges) / n.max(1) as f64
    }
}
