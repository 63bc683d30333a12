//! An edge table as the integer program sees it: equal rows and equal columns share their
//! pair columns, which loses nothing.

use std::collections::BTreeMap;

use super::super::problem::{Cost, Edge};

/// An edge table whose equal rows and equal columns are put together.
pub(super) struct EdgeGrid {
    pub row_class: Vec<u32>,
    pub col_class: Vec<u32>,
    pub n_rows: usize,
    pub n_cols: usize,
    /// The allowed pairs of classes with their cost, ascending.
    pub cells: Vec<((u32, u32), u64)>,
}

impl EdgeGrid {
    pub fn new(e: &Edge) -> EdgeGrid {
        let (n_rows, n_cols) = (e.table.n_rows(), e.table.n_cols());
        let (row_class, rows) = classes((0..n_rows).map(|i| e.table.row(i).to_vec()));
        let column = |j: usize| {
            (0..n_rows)
                .map(|i| e.table.get(i, j))
                .collect::<Vec<Cost>>()
        };
        let (col_class, cols) = classes((0..n_cols).map(column));
        let mut cells = Vec::new();
        for (r, &i) in rows.iter().enumerate() {
            for (c, &j) in cols.iter().enumerate() {
                if let Some(cost) = e.table.get(i, j).value() {
                    cells.push(((r as u32, c as u32), cost));
                }
            }
        }
        EdgeGrid {
            row_class,
            col_class,
            n_rows: rows.len(),
            n_cols: cols.len(),
            cells,
        }
    }
}

/// Returns the class of each item, where equal items share one, and the first item of each class.
fn classes(items: impl Iterator<Item = Vec<Cost>>) -> (Vec<u32>, Vec<usize>) {
    let mut known: BTreeMap<Vec<Cost>, u32> = BTreeMap::new();
    let (mut class_of, mut first) = (Vec::new(), Vec::new());
    for (i, item) in items.enumerate() {
        let next = first.len() as u32;
        let class = *known.entry(item).or_insert(next);
        if class == next {
            first.push(i);
        }
        class_of.push(class);
    }
    (class_of, first)
}
