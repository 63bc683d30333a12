//! Exact min-sum variable elimination over a graph of pairwise costs.
//!
//! Eliminating a node replaces it by a *message*: for every choice of its remaining
//! neighbours, the least cost of the node beside them. In a good order the messages of
//! near-chains (treewidth 2 or 3) stay small. Some nodes may be kept: the result is then a
//! table over the kept nodes (a layer's cost between its two boundary specs, whose min-plus
//! powers price a stack of equal layers), with the best choice of all other nodes for each.
//!
//! Strategies of a node that no table of an elimination tells apart (equal layouts, as a
//! neighbour sees them) have one row in its message.
//!
//! Invariants: exact in integers, up to [`Eliminated::exact_below`] where strategies were left out
//! ([`near`]); ties go to the lowest index; the order depends only on
//! sizes and edges, so one [`Eliminator`] serves many prices. Message scopes are laid out
//! with the node that is eliminated next innermost, so that inner loops run along memory.
//! Method: bucket elimination, Dechter 1999; greedy orders ([`order`]).

mod classes;
mod kernel;
mod near;
mod order;

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use thiserror::Error;

use super::problem::{Cost, Edge, Table};
use classes::Classes;
pub(crate) use kernel::with_widest_vectors;
use kernel::{Cell, INFINITE};
use near::Near;
pub use near::WORTH_MESSAGES;
use order::Order;

/// Eliminations with more sums than this look for strategies with equal rows; with fewer, the
/// search for them takes longer than it saves.
const WORTH_CLASSES: u64 = 20_000;

/// Elimination would need tables beyond the caller's bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("elimination needs {cells} table cells, more than {max_cells}")]
pub struct TooWide {
    /// The cells of all messages in the order that was found.
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
    /// The factors over kept nodes alone.
    rest: Vec<Factor>,
    tables: Tables,
    order: Order,
    edges: Vec<Edge>,
    /// Whether no two edges join the same nodes, and none a node with itself.
    is_simple: bool,
}

/// The tables of edges.
#[derive(Clone, Debug, Default)]
struct Tables {
    costs: Vec<Arc<[u64]>>,
    /// The same tables in floating point.
    floats: Vec<Arc<[f64]>>,
    /// The largest cost of each table that is not forbidden.
    largest: Vec<u64>,
}

/// One elimination: all factors that contain `var`, to be minimised over it.
#[derive(Clone, Debug)]
struct Bucket {
    var: u32,
    /// The nodes of the message; the one to be eliminated next is the last.
    scope: Vec<Dim>,
    /// The strategies of `var` that the factors with the scope's last node tell apart.
    fold: Classes,
    factors: Vec<Factor>,
    /// Where all factors with the scope's last node are edges: the table that is their sum, with
    /// the classes of that node innermost, padded to whole vectors.
    turned: Option<usize>,
}

/// A node in the scope of a table, with one row of the table for each of its classes.
#[derive(Clone, Debug)]
struct Dim {
    node: u32,
    classes: Classes,
}

/// A table over some nodes of a bucket's scope, with `var` innermost.
#[derive(Clone, Debug)]
struct Factor {
    source: Source,
    /// For each node of the scope, the row of each of its classes (rows of several nodes add up);
    /// empty where the table does not have that node.
    rows: Vec<Vec<usize>>,
    /// The number of cells in a row.
    width: usize,
    /// For each strategy of `var`, the place of its cost in a row.
    along: Vec<u32>,
    /// The places in a row of the cells that are added up; `None` for the whole row in order.
    spread: Option<Vec<u32>>,
    /// Whether the table has the last node of the scope.
    moves: bool,
}

#[derive(Clone, Copy, Debug)]
enum Source {
    /// Index into the tables.
    Edge(usize),
    /// The message of an earlier bucket.
    Message(usize),
}

/// The messages of all buckets.
#[derive(Clone, Debug)]
enum Messages {
    Floats(Vec<Vec<f64>>),
    Integers(Vec<Vec<u64>>),
}

/// The result of elimination for one set of node costs.
#[derive(Clone, Debug)]
pub struct Eliminated<'a> {
    /// The elimination of the strategies that were looked at.
    eliminator: Cow<'a, Eliminator>,
    costs: Vec<Vec<u64>>,
    messages: Messages,
    table: Vec<Cost>,
    /// The limit up to which that was exact, where not all strategies were looked at.
    near: Option<Near>,
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
        let order = order::order(sizes, edges, keep, max_cells)?;
        Ok(Eliminator::along(sizes, edges, keep, &order, WORTH_CLASSES))
    }

    /// Builds the eliminator along an order, with classes of strategies where an elimination has at
    /// least `worth_classes` sums.
    fn along(
        sizes: &[usize],
        edges: &[Edge],
        keep: &[u32],
        order: &Order,
        worth_classes: u64,
    ) -> Eliminator {
        let pairs = edges.iter().map(|e| (e.a.min(e.b), e.a.max(e.b)));
        let distinct: BTreeSet<(u32, u32)> = pairs.filter(|(a, b)| a != b).collect();
        let whole = order;
        let order = &order.eliminations;
        // The step at which each node is eliminated; kept nodes come after all others, the first
        // kept one last, so that it is outermost in the final table.
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
            tables: Tables::default(),
            order: whole.clone(),
            edges: edges.to_vec(),
            is_simple: distinct.len() == edges.len() && edges.iter().all(|e| e.a < e.b),
        };
        // Factors wait at the step that eliminates their first node.
        let mut waiting: BTreeMap<usize, Vec<Waiting>> = BTreeMap::new();
        made.place_edges(edges, &position, &mut waiting);
        for (i, (v, neighbours)) in order.iter().enumerate() {
            let mut scope = neighbours.clone();
            scope.sort_by_key(|u| Reverse(position[*u as usize]));
            let sums = scope.iter().chain([v]).map(|u| sizes[*u as usize] as u64);
            let classes = sums.fold(1, u64::saturating_mul) >= worth_classes;
            let bucket = made.bucket(*v, &scope, waiting.remove(&i).unwrap_or_default(), classes);
            if let Some(next) = scope.last() {
                let at = position[*next as usize];
                let message = (Source::Message(i), bucket.scope.clone());
                waiting.entry(at).or_default().push(message);
            }
            made.buckets.push(bucket);
        }
        let whole: Vec<Dim> = keep.iter().map(|v| made.apart(*v)).collect();
        let rest = waiting.into_values().flatten();
        made.rest = rest.map(|(source, of)| over(source, &of, &whole)).collect();
        made
    }

    fn place_edges(
        &mut self,
        edges: &[Edge],
        position: &[usize],
        waiting: &mut BTreeMap<usize, Vec<Waiting>>,
    ) {
        let mut known: HashMap<(usize, bool), usize> = HashMap::new();
        for e in edges {
            let (at_a, at_b) = (position[e.a as usize], position[e.b as usize]);
            let key = (Arc::as_ptr(&e.table) as usize, at_a < at_b);
            let loops = e.a == e.b;
            let id = match known.get(&key) {
                Some(&id) if !loops => id,
                _ => {
                    let id = self.tables.push(oriented(&e.table, at_a < at_b, loops));
                    if !loops {
                        known.insert(key, id);
                    }
                    id
                }
            };
            let of = match (loops, at_a < at_b) {
                (true, _) => vec![self.apart(e.a)],
                (_, true) => vec![self.apart(e.b), self.apart(e.a)],
                _ => vec![self.apart(e.a), self.apart(e.b)],
            };
            let entry = waiting.entry(at_a.min(at_b)).or_default();
            entry.push((Source::Edge(id), of));
        }
    }

    /// Returns a node all of whose strategies are told apart.
    fn apart(&self, node: u32) -> Dim {
        let classes = Classes::apart(self.sizes[node as usize]);
        Dim { node, classes }
    }

    /// Builds the elimination of `var`, given all factors that still contain it.
    fn bucket(&mut self, var: u32, scope: &[u32], factors: Vec<Waiting>, classes: bool) -> Bucket {
        let n = self.sizes[var as usize];
        // The dims that each factor tells apart.
        let told: Vec<Vec<Dim>> = factors
            .iter()
            .map(|(source, of)| match (source, &of[..]) {
                (Source::Edge(id), [other, _]) if classes => {
                    let table = &self.tables.costs[*id];
                    let (rows, columns) =
                        (Classes::of_rows(table, n), Classes::of_columns(table, n));
                    let dims = [(other.node, rows), (var, columns)];
                    dims.map(|(node, classes)| Dim { node, classes }).into()
                }
                _ => of.clone(),
            })
            .collect();
        let joint = |node: u32, told: &mut dyn Iterator<Item = &Vec<Dim>>| {
            let of_node = |of: &'_ Vec<Dim>| of.iter().position(|d| d.node == node);
            let parts: Vec<&Classes> = told
                .filter_map(|of| of_node(of).map(|i| &of[i].classes))
                .collect();
            Classes::joint(&parts, self.sizes[node as usize])
        };
        let scope: Vec<Dim> = scope
            .iter()
            .map(|&node| Dim {
                node,
                classes: match classes {
                    true => joint(node, &mut told.iter()),
                    false => Classes::apart(self.sizes[node as usize]),
                },
            })
            .collect();
        let last = scope.last().map(|d| d.node);
        let moves = |of: &Vec<Dim>| of.iter().any(|d| Some(d.node) == last);
        let fold = match classes {
            true => joint(var, &mut told.iter().filter(|of| moves(of))),
            false => Classes::apart(n),
        };
        let factors = factors
            .into_iter()
            .map(|(source, of)| {
                let moves = moves(&of);
                let (along, of) = of.split_last().expect("a factor is about its variable");
                let mut factor = over(source, of, &scope);
                factor.moves = moves;
                factor.along = along.classes.of.clone();
                factor.width = along.classes.len();
                let wanted = match moves {
                    true => fold
                        .first
                        .iter()
                        .map(|s| along.classes.of[*s as usize])
                        .collect(),
                    false => factor.along.clone(),
                };
                let in_order = wanted.iter().copied().eq(0..factor.width as u32);
                if in_order {
                    return factor;
                }
                match source {
                    // Edges never change, so this is done once for all.
                    Source::Edge(id) => {
                        let narrow = spread(&self.tables.costs[id], factor.width, &wanted);
                        factor.source = Source::Edge(self.tables.push(narrow.into()));
                        factor.width = fold.len();
                        factor.along = fold.of.clone();
                    }
                    Source::Message(_) => factor.spread = Some(wanted),
                }
                factor
            })
            .collect();
        let mut bucket = Bucket {
            var,
            scope,
            fold,
            factors,
            turned: None,
        };
        bucket.turned = self
            .turned(&bucket)
            .map(|table| self.tables.push(table.into()));
        bucket
    }

    /// The sum of a bucket's edges with the scope's last node, that node's classes innermost.
    fn turned(&self, bucket: &Bucket) -> Option<Vec<u64>> {
        let (last, outer) = bucket.scope.split_last()?;
        let moving = bucket.factors.iter().filter(|f| f.moves);
        let edge = |f: &Factor| match f.source {
            Source::Edge(id) => Some((id, f.rows[outer.len()].clone())),
            Source::Message(_) => None,
        };
        let edges: Vec<(usize, Vec<usize>)> = moving.map(edge).collect::<Option<_>>()?;
        if edges.is_empty() {
            return None;
        }
        let (n_folded, n_inner) = (bucket.fold.len(), last.classes.len());
        let width = kernel::padded(n_inner);
        let mut turned = vec![INFINITE; n_folded * width];
        for k in 0..n_folded {
            for i in 0..n_inner {
                let of_edge = |(id, rows): &(usize, Vec<usize>)| {
                    self.tables.costs[*id][rows[i] * n_folded + k]
                };
                turned[k * width + i] = edges.iter().map(of_edge).fold(0, Cell::plus);
            }
        }
        Some(turned)
    }

    /// The cells of all messages together if all strategies were told apart.
    pub fn cells(&self) -> u64 {
        self.order.cells
    }

    /// The cells of all messages together.
    pub fn kept_cells(&self) -> u64 {
        let cells = |b: &Bucket| {
            b.scope
                .iter()
                .map(|d| d.classes.len() as u64)
                .product::<u64>()
        };
        self.buckets.iter().map(cells).sum()
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
        let messages = match self.messages(&costs, &self.tables.floats) {
            Some(messages) => Messages::Floats(messages),
            None => Messages::Integers(
                self.messages(&costs, &self.tables.costs)
                    .expect("integers are exact"),
            ),
        };
        let mut found = Eliminated {
            eliminator: Cow::Borrowed(self),
            costs,
            messages,
            table: Vec::new(),
            near: None,
        };
        found.table = found.final_table();
        found
    }

    /// The result where no choice was looked at.
    fn nothing(&self, costs: &[Vec<Cost>]) -> Eliminated<'_> {
        Eliminated {
            eliminator: Cow::Borrowed(self),
            costs: costs.iter().map(|_| Vec::new()).collect(),
            messages: Messages::Integers(Vec::new()),
            table: Vec::new(),
            near: None,
        }
    }

    /// Computes the messages of all buckets; `None` where sums may be too large to be exact.
    fn messages<C: Cell>(&self, costs: &[Vec<u64>], tables: &[Arc<[C]>]) -> Option<Vec<Vec<C>>> {
        let mut messages: Vec<Vec<C>> = Vec::with_capacity(self.buckets.len());
        let mut largest: Vec<u64> = Vec::with_capacity(self.buckets.len());
        for bucket in &self.buckets {
            let unary = &costs[bucket.var as usize];
            let of_factor = |f: &Factor| match f.source {
                Source::Edge(id) => self.tables.largest[id],
                Source::Message(i) => largest[i],
            };
            let most = bucket.factors.iter().map(of_factor);
            let most = most.fold(kernel::largest(unary), u64::saturating_add);
            if C::EXACT_BELOW.is_some_and(|bound| most >= bound) {
                return None;
            }
            let unary: Vec<C> = unary.iter().map(|c| C::new(*c)).collect();
            let sources: Vec<Cow<'_, [C]>> = bucket
                .factors
                .iter()
                .map(|f| {
                    let table = match f.source {
                        Source::Edge(id) => &tables[id],
                        Source::Message(i) => &messages[i][..],
                    };
                    match &f.spread {
                        Some(wanted) => Cow::Owned(spread(table, f.width, wanted)),
                        None => Cow::Borrowed(table),
                    }
                })
                .collect();
            let turned = bucket.turned.map(|id| &tables[id][..]);
            let message = bucket.message(&unary, &sources, turned);
            largest.push(kernel::largest(&message));
            messages.push(message);
        }
        Some(messages)
    }
}

impl Tables {
    fn push(&mut self, costs: Arc<[u64]>) -> usize {
        self.floats
            .push(costs.iter().map(|c| f64::new(*c)).collect());
        self.largest.push(kernel::largest(&costs));
        self.costs.push(costs);
        self.costs.len() - 1
    }
}

impl Bucket {
    /// Computes the least cost of `var` beside each class of the scope. A factor that moves has
    /// rows over the classes of `fold`, every other one over all strategies.
    fn message<C: Cell>(
        &self,
        unary: &[C],
        tables: &[Cow<'_, [C]>],
        turned: Option<&[C]>,
    ) -> Vec<C> {
        kernel::with_widest_vectors(
            #[inline(always)]
            || self.message_in_vectors(unary, tables, turned),
        )
    }

    /// Plain loops over slices, so that all of it is compiled for the vectors of the caller.
    #[inline(always)]
    fn message_in_vectors<C: Cell>(
        &self,
        unary: &[C],
        tables: &[Cow<'_, [C]>],
        turned: Option<&[C]>,
    ) -> Vec<C> {
        let (n, n_folded) = (unary.len(), self.fold.len());
        let Some((inner, outer)) = self.scope.split_last() else {
            let mut sum = unary.to_vec();
            for t in tables {
                kernel::add(&mut sum, t);
            }
            return vec![kernel::least(&sum)];
        };
        let sizes: Vec<usize> = outer.iter().map(|d| d.classes.len()).collect();
        let n_outer: usize = sizes.iter().product();
        let n_inner = inner.classes.len();
        let mut message = Vec::with_capacity(n_outer * n_inner);
        // Factors without the innermost scope node are summed once per outer choice.
        let (moving, still): (Vec<usize>, Vec<usize>) =
            (0..tables.len()).partition(|&f| self.factors[f].moves);
        let mut counter = Counter::new(&sizes, &self.factors);
        let (mut base, mut sum) = (unary.to_vec(), unary.to_vec());
        let mut folded = vec![C::FORBIDDEN; n_folded];
        let inner_rows = |f: usize| &self.factors[f].rows[outer.len()][..];
        for _ in 0..n_outer {
            let row = |f: usize| &tables[f][counter.rows[f] * n..][..n];
            match still[..] {
                [] => base.copy_from_slice(unary),
                [first, ref others @ ..] => {
                    kernel::set_sum(&mut base, unary, row(first));
                    for &f in others {
                        kernel::add(&mut base, row(f));
                    }
                }
            }
            let folded = match n_folded == n {
                true => &base,
                false => {
                    folded.fill(C::FORBIDDEN);
                    for (cost, class) in base.iter().zip(&self.fold.of) {
                        let least = &mut folded[*class as usize];
                        *least = least.least(*cost);
                    }
                    &folded
                }
            };
            if let Some(turned) = turned {
                kernel::least_sums(folded, turned, n_inner, &mut message);
                counter.step();
                continue;
            }
            let at = |f: usize, i: usize| {
                &tables[f][(counter.rows[f] + inner_rows(f)[i]) * n_folded..][..n_folded]
            };
            match moving[..] {
                [a] => {
                    for i in 0..n_inner {
                        message.push(kernel::least_sum(folded, at(a, i)));
                    }
                }
                [a, b] => {
                    for i in 0..n_inner {
                        message.push(kernel::least_sum_of_three(folded, at(a, i), at(b, i)));
                    }
                }
                _ => {
                    let sum = &mut sum[..n_folded];
                    for i in 0..n_inner {
                        sum.copy_from_slice(folded);
                        for &f in &moving {
                            kernel::add(sum, at(f, i));
                        }
                        message.push(kernel::least(sum));
                    }
                }
            }
            counter.step();
        }
        message
    }
}

/// A factor that waits for its bucket, and its nodes, outermost first.
type Waiting = (Source, Vec<Dim>);

/// Builds the rows of the factor of a table over the nodes `of` (outermost first) in a scope.
fn over(source: Source, of: &[Dim], scope: &[Dim]) -> Factor {
    let rows = |d: &Dim| match of.iter().position(|w| w.node == d.node) {
        Some(i) => {
            let stride: usize = of[i + 1..].iter().map(|w| w.classes.len()).product();
            let class = |s: &u32| of[i].classes.of[*s as usize] as usize;
            d.classes.first.iter().map(|s| stride * class(s)).collect()
        }
        None => Vec::new(),
    };
    Factor {
        source,
        rows: scope.iter().map(rows).collect(),
        width: 1,
        along: Vec::new(),
        spread: None,
        moves: false,
    }
}

/// Picks the cells at `wanted` of each row.
fn spread<C: Cell>(table: &[C], width: usize, wanted: &[u32]) -> Vec<C> {
    let rows = table.chunks_exact(width.max(1));
    rows.flat_map(|row| wanted.iter().map(|i| row[*i as usize]))
        .collect()
}

impl Eliminated<'_> {
    /// Returns the least cost for each choice of the kept nodes, the last kept node innermost; one
    /// entry if none is kept. From [`exact_below`](Self::exact_below) on entries are bounds.
    pub fn table(&self) -> &[Cost] {
        &self.table
    }

    /// The cells of all messages that were made.
    pub fn kept_cells(&self) -> u64 {
        let cells: usize = match &self.messages {
            Messages::Floats(made) => made.iter().map(Vec::len).sum(),
            Messages::Integers(made) => made.iter().map(Vec::len).sum(),
        };
        cells as u64
    }

    /// Returns the cost from which on the table's entries are no more than bounds, and decoded
    /// choices arbitrary; `None` where all are exact.
    pub fn exact_below(&self) -> Option<u64> {
        self.near.as_ref().map(|near| near.from)
    }

    /// Returns the least cost with these strategies at the kept nodes, or a bound on it from
    /// [`exact_below`](Self::exact_below) on.
    ///
    /// # Panics
    /// If `kept` does not have one valid strategy per kept node.
    pub fn cost(&self, kept: &[u32]) -> Cost {
        let of_all = |v: &u32| self.eliminator.sizes[*v as usize];
        let sizes: Vec<usize> = match &self.near {
            Some(near) => near.sizes.clone(),
            None => self.eliminator.keep.iter().map(of_all).collect(),
        };
        let mut cell = 0;
        assert_eq!(
            kept.len(),
            self.eliminator.keep.len(),
            "one strategy per kept node"
        );
        for (size, &s) in sizes.into_iter().zip(kept) {
            assert!((s as usize) < size, "a kept strategy exists");
            cell = cell * size + s as usize;
        }
        self.table[cell]
    }

    /// Returns a best choice of all nodes, given strategies of the kept ones. Where
    /// [`cost`](Self::cost) is forbidden or a bound the choice is arbitrary.
    pub fn decode(&self, kept: &[u32]) -> Vec<u32> {
        match &self.near {
            None => self.decode_all(kept),
            Some(near) => match near.numbers(&self.eliminator.keep, kept) {
                Some(numbers) => near.strategies(&self.decode_all(&numbers)),
                None => vec![0; self.eliminator.sizes.len()],
            },
        }
    }

    /// The same by the numbers of the strategies that were looked at.
    fn decode_all(&self, kept: &[u32]) -> Vec<u32> {
        let e = &*self.eliminator;
        let mut choice = vec![0u32; e.sizes.len()];
        for (&v, &s) in e.keep.iter().zip(kept) {
            choice[v as usize] = s;
        }
        for bucket in e.buckets.iter().rev() {
            let mut sum = self.costs[bucket.var as usize].clone();
            for f in &bucket.factors {
                let steps = f.rows.iter().zip(&bucket.scope);
                let row: usize = steps
                    .filter(|(rows, _)| !rows.is_empty())
                    .map(|(rows, d)| rows[d.classes.of[choice[d.node as usize] as usize] as usize])
                    .sum();
                for (x, at) in sum.iter_mut().zip(&f.along) {
                    *x = x.plus(self.cell(f, row * f.width + *at as usize));
                }
            }
            let best = (0..sum.len()).min_by_key(|&s| (sum[s], s)).unwrap_or(0);
            choice[bucket.var as usize] = best as u32;
        }
        choice
    }

    fn cell(&self, f: &Factor, at: usize) -> u64 {
        match (f.source, &self.messages) {
            (Source::Edge(id), _) => self.eliminator.tables.costs[id][at],
            (Source::Message(i), Messages::Floats(messages)) => messages[i][at].cost(),
            (Source::Message(i), Messages::Integers(messages)) => messages[i][at],
        }
    }

    fn final_table(&self) -> Vec<Cost> {
        let e = &*self.eliminator;
        let sizes: Vec<usize> = e.keep.iter().map(|v| e.sizes[*v as usize]).collect();
        // Messages over no nodes come from components without kept nodes.
        let mut constant: u64 = 0;
        for (i, _) in e
            .buckets
            .iter()
            .enumerate()
            .filter(|(_, b)| b.scope.is_empty())
        {
            constant = constant.plus(match &self.messages {
                Messages::Floats(messages) => messages[i][0].cost(),
                Messages::Integers(messages) => messages[i][0],
            });
        }
        let mut counter = Counter::new(&sizes, &e.rest);
        let n_cells: usize = sizes.iter().product();
        let mut table = Vec::with_capacity(n_cells);
        for _ in 0..n_cells {
            let mut sum = constant;
            for (v, &s) in e.keep.iter().zip(&counter.digits) {
                sum = sum.plus(self.costs[*v as usize][s]);
            }
            for (f, &at) in e.rest.iter().zip(&counter.rows) {
                sum = sum.plus(self.cell(f, at));
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

/// Counts through the classes of a scope, with the row of each in several tables.
struct Counter<'a> {
    sizes: &'a [usize],
    factors: &'a [Factor],
    digits: Vec<usize>,
    rows: Vec<usize>,
}

impl<'a> Counter<'a> {
    fn new(sizes: &'a [usize], factors: &'a [Factor]) -> Self {
        Counter {
            sizes,
            factors,
            digits: vec![0; sizes.len()],
            rows: vec![0; factors.len()],
        }
    }

    fn step(&mut self) {
        for d in (0..self.sizes.len()).rev() {
            let before = self.digits[d];
            let goes_on = before + 1 < self.sizes[d];
            self.digits[d] = if goes_on { before + 1 } else { 0 };
            for (row, f) in self.rows.iter_mut().zip(self.factors) {
                if let Some(old) = f.rows[d].get(before) {
                    *row = *row + f.rows[d][self.digits[d]] - old;
                }
            }
            if goes_on {
                return;
            }
        }
    }
}

/// Lays out the cells of an edge, the node eliminated first innermost; of a loop, the diagonal.
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

#[cfg(test)]
mod tests;
