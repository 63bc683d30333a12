//! Exact min-sum variable elimination over a graph of pairwise costs.
//!
//! Eliminating a node replaces it by a *message*: for every choice of its remaining
//! neighbours, the least cost of the node beside them. In a good order the messages of
//! near-chains (treewidth 2 or 3) stay small. Some nodes may be kept: the result is then a
//! table over the kept nodes (a layer's cost between its two boundary specs, whose min-plus
//! powers price a stack of equal layers), with the best choice of all other nodes for each.
//!
//! Invariants: exact in integers; ties go to the lowest index; the order depends only on
//! sizes and edges, so one [`Eliminator`] serves many prices. Message scopes are laid out
//! with the node that is eliminated next innermost, so that inner loops run along memory.
//! Method: bucket elimination, Dechter 1999; greedy order by the least message.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap};
use std::sync::Arc;

use thiserror::Error;

use super::problem::{Cost, Edge, Table};

/// Forbidden in the inner loops: sums of two stay in 64 bits.
const INFINITE: u64 = 1 << 61;

/// Elimination would need tables beyond the caller's bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("elimination needs {cells} table cells, more than {max_cells}")]
pub struct TooWide {
    /// Cells of all messages in the order that was found.
    pub cells: u64,
    /// The bound.
    pub max_cells: u64,
}

/// An order of elimination with its tables, ready for any node costs.
#[derive(Clone, Debug)]
pub struct Eliminator {
    sizes: Vec<usize>,
    keep: Vec<u32>,
    buckets: Vec<Bucket>,
    /// Factors over kept nodes alone.
    rest: Vec<Factor>,
    tables: Vec<Arc<[u64]>>,
    cells: u64,
}

/// One elimination: all factors that contain `var`, minimised over it.
#[derive(Clone, Debug)]
struct Bucket {
    var: u32,
    /// The nodes that the message is about, the next to be eliminated last.
    scope: Vec<u32>,
    factors: Vec<Factor>,
}

/// A table over some of a bucket's scope, and over `var` innermost.
#[derive(Clone, Debug)]
struct Factor {
    source: Source,
    /// Step in the factor's table per step of each scope node; 0 where it does not matter.
    strides: Vec<usize>,
}

#[derive(Clone, Copy, Debug)]
enum Source {
    /// Index into `tables`.
    Edge(usize),
    /// The message of an earlier bucket.
    Message(usize),
}

/// What elimination found for one set of node costs.
#[derive(Clone, Debug)]
pub struct Eliminated<'a> {
    eliminator: &'a Eliminator,
    costs: Vec<Vec<u64>>,
    messages: Vec<Vec<u64>>,
    table: Vec<Cost>,
}

/// Eliminates all nodes but `keep` from a graph with these node costs and edges.
///
/// Convenience for a single use; see [`Eliminator`].
///
/// # Errors
/// [`TooWide`] when messages would exceed `max_cells` cells in total.
pub fn eliminator_for(
    costs: &[Vec<Cost>],
    edges: &[Edge],
    keep: &[u32],
    max_cells: u64,
) -> Result<Eliminator, TooWide> {
    let sizes: Vec<usize> = costs.iter().map(Vec::len).collect();
    Eliminator::new(&sizes, edges, keep, max_cells)
}

impl Eliminator {
    /// Finds an order for nodes with `sizes[v]` strategies. Parallel edges and loops are fine.
    ///
    /// # Errors
    /// [`TooWide`] when all messages together would exceed `max_cells` cells.
    ///
    /// # Panics
    /// If an edge or `keep` names a node that does not exist, a table does not fit its nodes,
    /// or `keep` names a node twice.
    pub fn new(
        sizes: &[usize],
        edges: &[Edge],
        keep: &[u32],
        max_cells: u64,
    ) -> Result<Eliminator, TooWide> {
        let distinct: BTreeSet<u32> = keep.iter().copied().collect();
        assert_eq!(distinct.len(), keep.len(), "each kept node is named once");
        for e in edges {
            let shape = (sizes[e.a as usize], sizes[e.b as usize]);
            assert_eq!(
                shape,
                (e.table.n_rows(), e.table.n_cols()),
                "a table fits its nodes"
            );
        }
        let (order, cells) = greedy_order(sizes, edges, keep, max_cells)?;
        Ok(Eliminator::along(sizes, edges, keep, &order, cells))
    }

    fn along(
        sizes: &[usize],
        edges: &[Edge],
        keep: &[u32],
        order: &[Elimination],
        cells: u64,
    ) -> Eliminator {
        // When each node is eliminated; kept nodes after all others, the first kept one last,
        // so that it is outermost in the final table.
        let mut position = vec![0usize; sizes.len()];
        for (i, (v, _)) in order.iter().enumerate() {
            position[*v as usize] = i;
        }
        for (i, v) in keep.iter().enumerate() {
            position[*v as usize] = order.len() + keep.len() - 1 - i;
        }
        let mut made = Eliminator {
            sizes: sizes.to_vec(),
            keep: keep.to_vec(),
            buckets: Vec::with_capacity(order.len()),
            rest: Vec::new(),
            tables: Vec::new(),
            cells,
        };
        // Factors wait at the position of the first node to go.
        let mut waiting: BTreeMap<usize, Vec<(Source, Vec<u32>)>> = BTreeMap::new();
        made.place_edges(edges, &position, &mut waiting);
        for (i, (v, neighbours)) in order.iter().enumerate() {
            let mut scope = neighbours.clone();
            scope.sort_by_key(|u| Reverse(position[*u as usize]));
            let factors = waiting.remove(&i).unwrap_or_default();
            let factors = factors
                .iter()
                .map(|(source, of)| made.factor(*source, of, &scope));
            let bucket = Bucket {
                var: *v,
                factors: factors.collect(),
                scope: scope.clone(),
            };
            made.buckets.push(bucket);
            if let Some(next) = scope.last() {
                let at = position[*next as usize];
                let message = (Source::Message(i), scope);
                waiting.entry(at).or_default().push(message);
            }
        }
        let rest: Vec<(Source, Vec<u32>)> = waiting.into_values().flatten().collect();
        made.rest = rest
            .iter()
            .map(|(source, of)| made.factor(*source, of, keep))
            .collect();
        made
    }

    fn place_edges(
        &mut self,
        edges: &[Edge],
        position: &[usize],
        waiting: &mut BTreeMap<usize, Vec<(Source, Vec<u32>)>>,
    ) {
        let mut known: HashMap<(usize, bool), usize> = HashMap::new();
        for e in edges {
            let (at_a, at_b) = (position[e.a as usize], position[e.b as usize]);
            let key = (Arc::as_ptr(&e.table) as usize, at_a < at_b);
            let loops = e.a == e.b;
            let id = match known.get(&key) {
                Some(&id) if !loops => id,
                _ => {
                    self.tables.push(oriented(&e.table, at_a < at_b, loops));
                    let id = self.tables.len() - 1;
                    if !loops {
                        known.insert(key, id);
                    }
                    id
                }
            };
            let of = match (loops, at_a < at_b) {
                (true, _) => vec![e.a],
                (_, true) => vec![e.b, e.a],
                _ => vec![e.a, e.b],
            };
            let entry = waiting.entry(at_a.min(at_b)).or_default();
            entry.push((Source::Edge(id), of));
        }
    }

    /// A factor over the nodes `of` (outermost first), seen from a bucket with this scope.
    fn factor(&self, source: Source, of: &[u32], scope: &[u32]) -> Factor {
        let stride = |u: &u32| match of.iter().position(|w| w == u) {
            Some(i) => of[i + 1..]
                .iter()
                .map(|w| self.sizes[*w as usize])
                .product(),
            None => 0,
        };
        let strides = scope.iter().map(stride).collect();
        Factor { source, strides }
    }

    /// Cells of all messages together.
    pub fn cells(&self) -> u64 {
        self.cells
    }

    /// Eliminates under these node costs, whose sums with the edge costs must stay below 2^61.
    ///
    /// # Panics
    /// If the costs do not have the sizes that the eliminator was made for.
    pub fn run(&self, costs: &[Vec<Cost>]) -> Eliminated<'_> {
        let sizes = costs.iter().map(Vec::len);
        assert!(
            sizes.eq(self.sizes.iter().copied()),
            "costs fit the eliminator's sizes"
        );
        let raw = |c: &Cost| c.value().map_or(INFINITE, |c| c.min(INFINITE));
        let costs: Vec<Vec<u64>> = costs
            .iter()
            .map(|row| row.iter().map(raw).collect())
            .collect();
        let mut messages: Vec<Vec<u64>> = Vec::with_capacity(self.buckets.len());
        for bucket in &self.buckets {
            let message = self.message(bucket, &costs, &messages);
            messages.push(message);
        }
        let mut found = Eliminated {
            eliminator: self,
            costs,
            messages,
            table: Vec::new(),
        };
        found.table = found.final_table();
        found
    }

    fn source<'b>(&'b self, source: Source, messages: &'b [Vec<u64>]) -> &'b [u64] {
        match source {
            Source::Edge(id) => &self.tables[id],
            Source::Message(i) => &messages[i],
        }
    }

    fn message(&self, bucket: &Bucket, costs: &[Vec<u64>], messages: &[Vec<u64>]) -> Vec<u64> {
        let unary = &costs[bucket.var as usize];
        let tables: Vec<&[u64]> = bucket
            .factors
            .iter()
            .map(|f| self.source(f.source, messages))
            .collect();
        let Some((inner, outer)) = bucket.scope.split_last() else {
            let mut sum = unary.clone();
            tables.iter().for_each(|t| add_into(&mut sum, t));
            return vec![sum.iter().copied().min().unwrap_or(INFINITE)];
        };
        let n_inner = self.sizes[*inner as usize];
        let sizes: Vec<usize> = outer.iter().map(|u| self.sizes[*u as usize]).collect();
        let n_outer: usize = sizes.iter().product();
        let mut message = Vec::with_capacity(n_outer * n_inner);
        // Factors that do not see the innermost scope node are summed once per outer choice.
        let (moving, still): (Vec<usize>, Vec<usize>) =
            (0..tables.len()).partition(|&f| bucket.factors[f].strides[outer.len()] > 0);
        let mut counter = Counter::new(&sizes, &bucket.factors);
        let (mut base, mut sum) = (unary.clone(), unary.clone());
        let n = unary.len();
        for _ in 0..n_outer {
            base.copy_from_slice(unary);
            for &f in &still {
                add_into(&mut base, &tables[f][counter.offsets[f]..]);
            }
            for i in 0..n_inner {
                let at = |f: usize| &tables[f][counter.offsets[f] + i * n..][..n];
                message.push(match moving[..] {
                    [f] => base
                        .iter()
                        .zip(at(f))
                        .map(|(x, y)| x + y)
                        .min()
                        .unwrap_or(INFINITE)
                        .min(INFINITE),
                    _ => {
                        sum.copy_from_slice(&base);
                        moving.iter().for_each(|&f| add_into(&mut sum, at(f)));
                        sum.iter().copied().min().unwrap_or(INFINITE)
                    }
                });
            }
            counter.step();
        }
        message
    }
}

impl Eliminated<'_> {
    /// The least cost for each choice of the kept nodes, the last kept node innermost; one
    /// entry if none is kept.
    pub fn table(&self) -> &[Cost] {
        &self.table
    }

    /// The least cost with these strategies at the kept nodes.
    ///
    /// # Panics
    /// If `kept` does not have one valid strategy per kept node.
    pub fn cost(&self, kept: &[u32]) -> Cost {
        let sizes = self
            .eliminator
            .keep
            .iter()
            .map(|v| self.eliminator.sizes[*v as usize]);
        let mut cell = 0;
        assert_eq!(
            kept.len(),
            self.eliminator.keep.len(),
            "one strategy per kept node"
        );
        for (size, &s) in sizes.zip(kept) {
            assert!((s as usize) < size, "a kept strategy exists");
            cell = cell * size + s as usize;
        }
        self.table[cell]
    }

    /// A best choice of all nodes, given strategies of the kept ones. Where
    /// [`cost`](Self::cost) is forbidden the choice is arbitrary.
    pub fn decode(&self, kept: &[u32]) -> Vec<u32> {
        let e = self.eliminator;
        let mut choice = vec![0u32; e.sizes.len()];
        for (&v, &s) in e.keep.iter().zip(kept) {
            choice[v as usize] = s;
        }
        for bucket in e.buckets.iter().rev() {
            let mut sum = self.costs[bucket.var as usize].clone();
            for f in &bucket.factors {
                let steps = f.strides.iter().zip(&bucket.scope);
                let at: usize = steps
                    .map(|(stride, u)| stride * choice[*u as usize] as usize)
                    .sum();
                add_into(&mut sum, &e.source(f.source, &self.messages)[at..]);
            }
            let best = (0..sum.len()).min_by_key(|&s| (sum[s], s)).unwrap_or(0);
            choice[bucket.var as usize] = best as u32;
        }
        choice
    }

    fn final_table(&self) -> Vec<Cost> {
        let e = self.eliminator;
        let sizes: Vec<usize> = e.keep.iter().map(|v| e.sizes[*v as usize]).collect();
        // Messages about nothing: components without kept nodes.
        let mut constant = 0;
        for (bucket, message) in e.buckets.iter().zip(&self.messages) {
            if bucket.scope.is_empty() {
                constant = (constant + message[0]).min(INFINITE);
            }
        }
        let tables: Vec<&[u64]> = e
            .rest
            .iter()
            .map(|f| e.source(f.source, &self.messages))
            .collect();
        let mut counter = Counter::new(&sizes, &e.rest);
        let n_cells: usize = sizes.iter().product();
        let mut table = Vec::with_capacity(n_cells);
        for _ in 0..n_cells {
            let mut sum = constant;
            for (v, &s) in e.keep.iter().zip(&counter.digits) {
                sum = (sum + self.costs[*v as usize][s]).min(INFINITE);
            }
            for (t, &at) in tables.iter().zip(&counter.offsets) {
                sum = (sum + t[at]).min(INFINITE);
            }
            table.push(if sum >= INFINITE {
                Cost::FORBIDDEN
            } else {
                Cost::finite(sum)
            });
            counter.step();
        }
        table
    }
}

/// Counts through the choices of a scope, with the place of each in several tables.
struct Counter<'a> {
    sizes: &'a [usize],
    factors: &'a [Factor],
    digits: Vec<usize>,
    offsets: Vec<usize>,
}

impl<'a> Counter<'a> {
    fn new(sizes: &'a [usize], factors: &'a [Factor]) -> Self {
        Counter {
            sizes,
            factors,
            digits: vec![0; sizes.len()],
            offsets: vec![0; factors.len()],
        }
    }

    fn step(&mut self) {
        for d in (0..self.sizes.len()).rev() {
            self.digits[d] += 1;
            if self.digits[d] < self.sizes[d] {
                for (offset, f) in self.offsets.iter_mut().zip(self.factors) {
                    *offset += f.strides[d];
                }
                return;
            }
            self.digits[d] = 0;
            for (offset, f) in self.offsets.iter_mut().zip(self.factors) {
                *offset -= f.strides[d] * (self.sizes[d] - 1);
            }
        }
    }
}

fn add_into(sum: &mut [u64], table: &[u64]) {
    for (x, y) in sum.iter_mut().zip(table) {
        *x = x.wrapping_add(*y).min(INFINITE);
    }
}

/// The cells of an edge with the node that goes first innermost; of a loop, the diagonal.
fn oriented(table: &Table, rows_go_first: bool, is_loop: bool) -> Arc<[u64]> {
    let raw = |c: Cost| c.value().map_or(INFINITE, |c| c.min(INFINITE));
    if is_loop {
        (0..table.n_rows()).map(|i| raw(table.get(i, i))).collect()
    } else if rows_go_first {
        let cells = (0..table.n_cols()).flat_map(|j| (0..table.n_rows()).map(move |i| (i, j)));
        cells.map(|(i, j)| raw(table.get(i, j))).collect()
    } else {
        table.cells().iter().map(|c| raw(*c)).collect()
    }
}

/// A node and its neighbours when it is eliminated.
type Elimination = (u32, Vec<u32>);

/// Repeatedly the node whose elimination touches the fewest cells, and its neighbours then.
fn greedy_order(
    sizes: &[usize],
    edges: &[Edge],
    keep: &[u32],
    max_cells: u64,
) -> Result<(Vec<Elimination>, u64), TooWide> {
    let mut adjacent: Vec<BTreeSet<u32>> = vec![BTreeSet::new(); sizes.len()];
    for e in edges.iter().filter(|e| e.a != e.b) {
        adjacent[e.a as usize].insert(e.b);
        adjacent[e.b as usize].insert(e.a);
    }
    let size = |v: &u32| sizes[*v as usize] as u64;
    let message = |scope: &BTreeSet<u32>| scope.iter().map(size).fold(1, u64::saturating_mul);
    let weight = |v: u32, scope: &BTreeSet<u32>| message(scope).saturating_mul(size(&v));
    let mut done = vec![false; sizes.len()];
    keep.iter().for_each(|v| done[*v as usize] = true);
    let mut heap: BinaryHeap<Reverse<(u64, u32)>> = (0..sizes.len() as u32)
        .filter(|v| !done[*v as usize])
        .map(|v| Reverse((weight(v, &adjacent[v as usize]), v)))
        .collect();
    let mut cells: u64 = keep.iter().map(size).fold(1, u64::saturating_mul);
    let mut order = Vec::with_capacity(heap.len());
    while let Some(Reverse((w, v))) = heap.pop() {
        if done[v as usize] || w != weight(v, &adjacent[v as usize]) {
            continue;
        }
        done[v as usize] = true;
        let scope = std::mem::take(&mut adjacent[v as usize]);
        cells = cells.saturating_add(message(&scope));
        if cells > max_cells {
            return Err(TooWide { cells, max_cells });
        }
        for &u in &scope {
            let others = &mut adjacent[u as usize];
            others.remove(&v);
            others.extend(scope.iter().filter(|w| **w != u));
        }
        for &u in scope.iter().filter(|u| !done[**u as usize]) {
            heap.push(Reverse((weight(u, &adjacent[u as usize]), u)));
        }
        order.push((v, scope.into_iter().collect()));
    }
    if cells > max_cells {
        return Err(TooWide { cells, max_cells });
    }
    Ok((order, cells))
}
