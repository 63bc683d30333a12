//! Strategies of a node that tables tell apart.
//!
//! Two strategies with equal rows in every table that an elimination looks at cost the same
//! beside everything, so one of them is enough.

use rustc_hash::FxHashMap;
use std::hash::Hash;

/// A partition of a node's strategies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Classes {
    /// The class of each strategy; classes are numbered by their first strategies.
    pub of: Vec<u32>,
    /// The first strategy of each class.
    pub first: Vec<u32>,
}

impl Classes {
    /// Puts each of `n` strategies into a class of its own.
    pub fn apart(n: usize) -> Classes {
        let all: Vec<u32> = (0..n as u32).collect();
        Classes {
            of: all.clone(),
            first: all,
        }
    }

    /// Puts strategies with equal keys together.
    fn by<K: Hash + Eq>(keys: impl Iterator<Item = K>) -> Classes {
        let mut known = FxHashMap::default();
        let (mut of, mut first) = (Vec::new(), Vec::new());
        for (strategy, key) in keys.enumerate() {
            let class = *known.entry(key).or_insert_with(|| {
                first.push(strategy as u32);
                first.len() as u32 - 1
            });
            of.push(class);
        }
        Classes { of, first }
    }

    /// Puts equal rows of a table together.
    pub fn of_rows(table: &[u64], n_cols: usize) -> Classes {
        Classes::by(table.chunks_exact(n_cols.max(1)))
    }

    /// Puts equal columns of a table together.
    pub fn of_columns(table: &[u64], n_cols: usize) -> Classes {
        let column = |j: usize| table.iter().skip(j).step_by(n_cols.max(1)).copied();
        Classes::by((0..n_cols).map(|j| column(j).collect::<Vec<u64>>()))
    }

    /// Puts strategies together that no part tells apart.
    pub fn joint(parts: &[&Classes], n: usize) -> Classes {
        match parts {
            [one] => (*one).clone(),
            _ => {
                let key = |s: usize| parts.iter().map(|p| p.of[s]).collect::<Vec<u32>>();
                Classes::by((0..n).map(key))
            }
        }
    }

    /// Number of classes.
    pub fn len(&self) -> usize {
        self.first.len()
    }
}
