//! Operations on shared cost tables, each done once per distinct operand.
//!
//! The graphs are repetitive: tens of thousands of edges share a few thousand tables. Results
//! are remembered by the identity of the operands, which are kept alive so that an identity
//! is never reused.

use std::hash::BuildHasherDefault;
use std::sync::Arc;

use rustc_hash::FxHasher;

use super::problem::{Cost, Table};

/// The index of a table over which to select.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Axis {
    Rows,
    Cols,
}

/// A table less its row minima and then less its column minima.
pub(super) struct Normal {
    pub table: Arc<Table>,
    pub row_minima: Vec<u64>,
    pub col_minima: Vec<u64>,
    pub is_zero: bool,
}

type Identity = usize;

/// Tables are hashed whole, so hashing must be fast; nobody gains from making them collide.
type HashMap<K, V> = std::collections::HashMap<K, V, BuildHasherDefault<FxHasher>>;

fn identity(table: &Arc<Table>) -> Identity {
    Arc::as_ptr(table) as usize
}

/// The results that are remembered.
#[derive(Default)]
pub(super) struct Tables {
    alive: HashMap<Identity, Arc<Table>>,
    transposed: HashMap<Identity, Arc<Table>>,
    sums: HashMap<(Identity, Identity), Arc<Table>>,
    selected: HashMap<(Identity, Axis, Vec<u32>), Arc<Table>>,
    normal: HashMap<Identity, Arc<Normal>>,
    cheapest: HashMap<Identity, Arc<[u32]>>,
    by_content: HashMap<Arc<Table>, ()>,
}

impl Tables {
    fn hold(&mut self, table: &Arc<Table>) -> Identity {
        let id = identity(table);
        self.alive.entry(id).or_insert_with(|| Arc::clone(table));
        id
    }

    /// Returns the one table with this content.
    pub fn interned(&mut self, table: Arc<Table>) -> Arc<Table> {
        if let Some((known, ())) = self.by_content.get_key_value(&table) {
            return Arc::clone(known);
        }
        self.by_content.insert(Arc::clone(&table), ());
        table
    }

    pub fn transposed(&mut self, table: &Arc<Table>) -> Arc<Table> {
        let id = self.hold(table);
        if let Some(known) = self.transposed.get(&id) {
            return Arc::clone(known);
        }
        let made = self.interned(Arc::new(table.transposed()));
        self.transposed.insert(id, Arc::clone(&made));
        made
    }

    pub fn sum(&mut self, x: &Arc<Table>, y: &Arc<Table>) -> Arc<Table> {
        let key = (self.hold(x), self.hold(y));
        if let Some(known) = self.sums.get(&key) {
            return Arc::clone(known);
        }
        let cells: Vec<Cost> = x
            .cells()
            .iter()
            .zip(y.cells())
            .map(|(x, y)| x.plus(*y))
            .collect();
        let made = Table::new(x.n_rows(), x.n_cols(), cells).expect("summands have one shape");
        let made = self.interned(Arc::new(made));
        self.sums.insert(key, Arc::clone(&made));
        made
    }

    /// Returns the table whose row (or column) `i` is row (or column) `indices[i]` of `table`.
    pub fn select(&mut self, table: &Arc<Table>, axis: Axis, indices: &[u32]) -> Arc<Table> {
        let key = (self.hold(table), axis, indices.to_vec());
        if let Some(known) = self.selected.get(&key) {
            return Arc::clone(known);
        }
        let at = |i: usize| indices[i] as usize;
        let made = match axis {
            Axis::Rows => Table::from_fn(indices.len(), table.n_cols(), |i, j| table.get(at(i), j)),
            Axis::Cols => Table::from_fn(table.n_rows(), indices.len(), |i, j| table.get(i, at(j))),
        };
        let made = self.interned(Arc::new(made));
        self.selected.insert(key, Arc::clone(&made));
        made
    }

    /// Returns the cheapest column of each row.
    pub fn cheapest(&mut self, table: &Arc<Table>) -> Arc<[u32]> {
        let id = self.hold(table);
        let find = |i: usize| {
            let row = table.row(i);
            let best = (0..row.len()).min_by_key(|&j| (row[j], j));
            best.unwrap_or(0) as u32
        };
        let make = || (0..table.n_rows()).map(find).collect();
        Arc::clone(self.cheapest.entry(id).or_insert_with(make))
    }

    pub fn normalised(&mut self, table: &Arc<Table>) -> Arc<Normal> {
        let id = self.hold(table);
        if let Some(known) = self.normal.get(&id) {
            return Arc::clone(known);
        }
        let mut made = normalise(table);
        made.table = if made.table.cells() == table.cells() {
            Arc::clone(table)
        } else {
            self.interned(made.table)
        };
        let made = Arc::new(made);
        self.normal.insert(id, Arc::clone(&made));
        made
    }
}

fn normalise(table: &Table) -> Normal {
    let (n_rows, n_cols) = (table.n_rows(), table.n_cols());
    let finite_min =
        |costs: &mut dyn Iterator<Item = Cost>| costs.filter_map(Cost::value).min().unwrap_or(0);
    let row_minima: Vec<u64> = (0..n_rows)
        .map(|i| finite_min(&mut table.row(i).iter().copied()))
        .collect();
    let col_minima: Vec<u64> = (0..n_cols)
        .map(|j| finite_min(&mut (0..n_rows).map(|i| table.get(i, j).minus(row_minima[i]))))
        .collect();
    let less = Table::from_fn(n_rows, n_cols, |i, j| {
        table.get(i, j).minus(row_minima[i]).minus(col_minima[j])
    });
    let is_zero = less.cells().iter().all(|c| *c == Cost::ZERO);
    Normal {
        table: Arc::new(less),
        row_minima,
        col_minima,
        is_zero,
    }
}
