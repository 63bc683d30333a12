//! Attention in blocks: a sequence is cut into blocks of tokens, and the queries of a block see some
//! blocks of keys and no others (Sparse Transformers, Child et al. 2019; Longformer, Beltagy et al.
//! 2020; BigBird, Zaheer et al. 2020). What is seen follows from positions alone, so shards, orders
//! and rings see what one device sees.
//!
//! ```text
//! local 2, first 1           local 2, aligned           local 2, aligned, last 1
//! x                          x                          x
//! x x                        x x                        x x
//! x x x                          x                        x x
//! x   x x                        x x                      x x x
//! x     x x                          x                    x   x x
//! x       x x                        x x                  x   x x x
//! ```
//!
//! A row is a block of queries, a column one of keys. The causal mask holds within blocks too.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;

/// The blocks of keys that queries see; those behind a query are never among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Blocks {
    /// The tokens of a block. The last block of a sequence may have fewer.
    pub size: u64,
    /// The blocks near a query that it sees: the last so many, its own among them.
    pub local: u64,
    /// Whether the local blocks are those of a stretch in place of the last ones: the sequence is cut
    /// into stretches of `local` blocks, and a query sees those of its own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub aligned: bool,
    /// The first blocks of the sequence that all queries behind them see.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub first: u64,
    /// The last blocks of each stretch of `local` blocks that all queries behind them see.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub last: u64,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

impl fmt::Display for Blocks {
    /// In words, such as `blocks of 64 tokens: the last 8, and the first 1`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Blocks {
            size, local, last, ..
        } = self;
        write!(f, "blocks of {}: ", crate::counted(*size, "token"))?;
        match self.aligned {
            true => write!(f, "those of its own stretch of {local}")?,
            false => write!(f, "the last {local}")?,
        }
        let first = (self.first > 0).then(|| format!("the first {}", self.first));
        let last = (*last > 0).then(|| format!("the last {last} of each {local} before"));
        for more in [first, last].into_iter().flatten() {
            write!(f, ", and {more}")?;
        }
        Ok(())
    }
}

impl Blocks {
    /// The reason why there is no such pattern, if there is none.
    pub fn problem(&self) -> Option<String> {
        let Blocks {
            size, local, last, ..
        } = *self;
        if size == 0 {
            Some("blocks of no tokens".into())
        } else if local == 0 {
            Some("no local blocks, so that a token would not see itself".into())
        } else if last > local {
            Some(format!("the last {last} blocks of each {local}"))
        } else {
            None
        }
    }

    /// Whether a query sees a key, neither of which stands behind the other's end of the sequence.
    pub fn sees(&self, query: u64, key: u64) -> bool {
        key <= query && (key >= self.near(query) || self.is_global(key))
    }

    /// The tokens of `n` blocks; never none, so that it may divide.
    fn tokens(&self, n: u64) -> u64 {
        self.size.saturating_mul(n).max(1)
    }

    /// The tokens of a stretch of `local` blocks.
    fn stretch(&self) -> u64 {
        self.tokens(self.local)
    }

    /// The tokens of a stretch before its last blocks.
    fn before_last(&self) -> u64 {
        self.size
            .saturating_mul(self.local.saturating_sub(self.last))
    }

    /// The first key of a query's local blocks.
    pub(super) fn near(&self, query: u64) -> u64 {
        match self.aligned {
            true => query / self.stretch() * self.stretch(),
            false => {
                let own = query / self.tokens(1) * self.size;
                own.saturating_sub(self.size.saturating_mul(self.local.saturating_sub(1)))
            }
        }
    }

    /// Whether all queries behind a key see it.
    fn is_global(&self, key: u64) -> bool {
        key < self.size.saturating_mul(self.first) || key % self.stretch() >= self.before_last()
    }

    /// How many keys before `end` all queries behind them see.
    pub(super) fn globals_before(&self, end: u64) -> u64 {
        // Of the last blocks of stretches.
        let of_stretches = |end: u64| {
            let (whole, rest) = (end / self.stretch(), end % self.stretch());
            let each = self.stretch().saturating_sub(self.before_last());
            whole * each + rest.saturating_sub(self.before_last())
        };
        let first = end.min(self.size.saturating_mul(self.first));
        first + of_stretches(end) - of_stretches(first)
    }

    /// The runs of keys within a range that all queries behind them see, in order.
    pub(super) fn globals(&self, within: Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
        let (blocks, first) = (*self, 0..self.size.saturating_mul(self.first));
        let stretch = self.stretch();
        // Where there are none of them, no stretch is looked at.
        let from = match self.last {
            0 => u64::MAX / stretch,
            _ => within.start / stretch,
        };
        let of_stretches = (from..=within.end / stretch).map(move |i| {
            let start = i.saturating_mul(stretch);
            start.saturating_add(blocks.before_last())..start.saturating_add(stretch)
        });
        let behind_first = of_stretches.map({
            let first = first.end;
            move |run| run.start.max(first)..run.end
        });
        std::iter::once(first)
            .chain(behind_first)
            .map(move |run| run.start.max(within.start)..run.end.min(within.end))
            .filter(|run| run.start < run.end)
    }
}

/// Patterns of all kinds, with and without blocks that all see.
#[cfg(test)]
pub(super) fn patterns() -> Vec<Blocks> {
    let mut all = Vec::new();
    for size in [1, 3, 4] {
        for (local, last) in [(1, 0), (2, 0), (3, 1), (4, 2), (3, 3)] {
            for first in [0, 1, 5] {
                all.extend([false, true].map(|aligned| Blocks {
                    size,
                    local,
                    aligned,
                    first,
                    last,
                }));
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a block of queries sees a block of keys, as the pictures have it.
    fn sees_block(b: &Blocks, query: u64, key: u64) -> bool {
        let is_local = match b.aligned {
            true => query / b.local == key / b.local,
            false => query < key + b.local,
        };
        let ends_stretch = key % b.local >= b.local - b.last;
        key <= query && (is_local || key < b.first || ends_stretch)
    }

    #[test]
    fn queries_see_the_blocks_of_the_pictures() {
        for b in patterns() {
            for query in 0..50u64 {
                for key in 0..50u64 {
                    let expected = key <= query && sees_block(&b, query / b.size, key / b.size);
                    assert_eq!(b.sees(query, key), expected, "{b:?} {query} {key}");
                }
            }
        }
    }

    #[test]
    fn global_keys_are_counted_and_listed() {
        for b in patterns() {
            for (from, to) in [(0, 0), (0, 1), (0, 47), (5, 31), (13, 14), (20, 50)] {
                let of = |range: Range<u64>| range.filter(|k| b.is_global(*k)).collect::<Vec<_>>();
                let listed: Vec<u64> = b.globals(from..to).flatten().collect();
                assert_eq!(listed, of(from..to), "{b:?} {from}..{to}");
                assert_eq!(b.globals_before(to), of(0..to).len() as u64, "{b:?} {to}");
            }
        }
    }

    #[test]
    fn patterns_have_words() {
        let of = |local, aligned, first, last| {
            let b = Blocks {
                size: 64,
                local,
                aligned,
                first,
                last,
            };
            b.to_string()
        };
        assert_eq!(of(8, false, 0, 0), "blocks of 64 tokens: the last 8");
        assert_eq!(
            of(8, false, 1, 0),
            "blocks of 64 tokens: the last 8, and the first 1"
        );
        assert_eq!(
            of(4, true, 0, 1),
            "blocks of 64 tokens: those of its own stretch of 4, and the last 1 of each 4 before"
        );
    }

    #[test]
    fn sizes_that_overflow_see_everything() {
        let b = Blocks {
            size: u64::MAX,
            local: u64::MAX,
            aligned: true,
            first: 2,
            last: 1,
        };
        assert!(b.sees(9, 0) && b.problem().is_none());
        assert!(b.globals(0..9).eq(std::iter::once(0..9)));
    }

    #[test]
    fn patterns_that_make_no_sense_are_refused_in_words() {
        let plain = Blocks {
            size: 4,
            local: 2,
            aligned: false,
            first: 0,
            last: 0,
        };
        assert_eq!(plain.problem(), None);
        let said = |b: Blocks| b.problem().unwrap_or_default();
        assert_eq!(said(Blocks { size: 0, ..plain }), "blocks of no tokens");
        assert_eq!(
            said(Blocks { local: 0, ..plain }),
            "no local blocks, so that a token would not see itself"
        );
        assert_eq!(
            said(Blocks { last: 3, ..plain }),
            "the last 3 blocks of each 2"
        );
    }
}
