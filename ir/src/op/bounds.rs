//! Which scores of an attention there are beside the causal ones, how large they may be, and what is
//! taken off them with the distance.

use super::Blocks;
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::ops::Range;

/// Fewest and most rows of queries that a kernel for blocks computes at once: those of one product of
/// tensor cores, and those of a tile of the usual kernels.
const KERNEL_ROWS: [u64; 2] = [16, 128];

/// Rows that are counted faster than they are looked up, and the most results that a thread keeps.
const FEW_ROWS: u64 = 32;
const MOST_KNOWN: usize = 1 << 12;

/// All that [`Bounds::computed`] depends on: window, blocks, rows, the first query, queries, and keys.
type Asked = (Option<u64>, Option<Blocks>, [u64; 5]);

thread_local! {
    static COMPUTED: RefCell<FxHashMap<Asked, f64>> = RefCell::default();
}

/// Bounds of the scores of an attention; none by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Bounds {
    /// The tokens that a query looks back over, its own among them; all where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<u64>,
    /// The blocks of keys that a query sees, of which a window leaves those that it has; all where
    /// there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocks: Option<Blocks>,
    /// A score `s`, scaled, becomes `cap * tanh(s / cap)` (Gemma 2, Gemma team 2024).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cap: Option<f64>,
    /// Whether a score is lower the further its key stands before the query, by the slope of the head
    /// for each token ([`alibi_slope`]; ALiBi, Press et al. 2022). Taken off behind scale and cap.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub alibi: bool,
}

/// The slope of a head of `heads`, both counted over the whole model, not over a shard: with a power
/// of two `n` of them, `2^(-8 (head + 1) / n)`. Of another number of heads the first `n` have the
/// slopes of the largest power of two below, and those behind them every other slope of `2 n` heads,
/// from the first on (Press et al. 2022; BLOOM).
pub fn alibi_slope(head: u64, heads: u64) -> f64 {
    // The largest power of two that is no larger.
    let n = 1u64 << heads.max(1).ilog2();
    let exponent = match head < n {
        true => 8.0 * (head + 1) as f64 / n as f64,
        false => 4.0 * (2 * (head - n) + 1) as f64 / n as f64,
    };
    (-exponent).exp2()
}

impl Bounds {
    /// Whether every key that is no later than a query has a score, of any size, wherever it stands.
    pub fn are_none(&self) -> bool {
        *self == Bounds::default()
    }

    /// Whether a query has a score with a key, both by position.
    pub fn sees(&self, query: u64, key: u64) -> bool {
        key <= query
            && self.window.is_none_or(|w| query - key < w)
            && self.blocks.is_none_or(|b| b.sees(query, key))
    }

    /// The runs of keys, out of these, that some of these queries see, in order and apart from each
    /// other. Queries and keys are named by position.
    pub fn seen(&self, queries: Range<u64>, keys: Range<u64>) -> Vec<Range<u64>> {
        let (floor, near) = self.begin(queries.start, keys.start);
        let end = queries.end.min(keys.end);
        let mut runs: Vec<Range<u64>> = Vec::new();
        if queries.is_empty() || floor >= end {
            return runs;
        }
        let far = self.blocks.map(|b| b.globals(floor..near.min(end)));
        for run in far.into_iter().flatten().chain(std::iter::once(near..end)) {
            match runs.last_mut() {
                Some(last) if last.end == run.start => last.end = run.end.max(last.end),
                _ if run.is_empty() => {}
                _ => runs.push(run),
            }
        }
        runs
    }

    /// How many keys [`Bounds::seen`] has.
    fn n_seen(&self, queries: Range<u64>, keys: Range<u64>) -> u64 {
        let (floor, near) = self.begin(queries.start, keys.start);
        let end = queries.end.min(keys.end);
        if queries.is_empty() || floor >= end {
            return 0;
        }
        let near = near.min(end);
        let before = |end| self.blocks.map_or(0, |b| b.globals_before(end));
        end - near + before(near) - before(floor)
    }

    /// The first key of those from `first` on that a query's window has, and the first from which on
    /// the query sees all up to its own place.
    fn begin(&self, query: u64, first: u64) -> (u64, u64) {
        let of_window = |w: u64| query.saturating_add(1).saturating_sub(w);
        let floor = self.window.map_or(0, of_window).max(first);
        let near = self.blocks.map_or(0, |b| b.near(query));
        (floor, near.max(floor))
    }

    /// Scores of so many queries, from the token `first` on, with some keys, in rows of queries that
    /// are computed at once: a score that one of these has is computed for all.
    ///
    /// It takes time in proportion to the rows, and is asked for the same tensors in every layer and
    /// of every candidate of a search: long ones are kept.
    fn computed(&self, rows: u64, first: u64, queries: u64, keys: &Range<u64>) -> f64 {
        if queries / rows.max(1) < FEW_ROWS {
            return self.computed_anew(rows, first, queries, keys);
        }
        let asked = [rows, first, queries, keys.start, keys.end];
        let asked = (self.window, self.blocks, asked);
        COMPUTED.with_borrow_mut(|known| {
            if known.len() >= MOST_KNOWN {
                known.clear();
            }
            let anew = || self.computed_anew(rows, first, queries, keys);
            *known.entry(asked).or_insert_with(anew)
        })
    }

    fn computed_anew(&self, rows: u64, first: u64, queries: u64, keys: &Range<u64>) -> f64 {
        let starts = (0..queries).step_by(rows.max(1) as usize);
        let of_rows = |start: u64| {
            let n = rows.max(1).min(queries - start);
            let at = first.saturating_add(start);
            n as f64 * self.n_seen(at..at.saturating_add(n), keys.clone()) as f64
        };
        starts.map(of_rows).sum()
    }

    /// The share of a causal attention's scores that these bounds leave, where so many rows of queries
    /// are computed at once: for the last `queries` tokens of `keys`.
    pub fn computed_share(&self, rows: u64, queries: u64, keys: u64) -> f64 {
        if self.window.is_none() && self.blocks.is_none() {
            return 1.0;
        }
        let (first, queries) = (keys.saturating_sub(queries), queries.min(keys));
        let of = |bounds: &Bounds| bounds.computed(rows, first, queries, &(0..keys));
        match of(&Bounds::default()) {
            all if all > 0.0 => of(self) / all,
            _ => 1.0,
        }
    }

    /// The keys that a query has, of so many: what MFU counts, which leaves the causal mask out of
    /// account. With a window as many as it has, with blocks the local ones and those that all see.
    pub(super) fn counted_share(&self, keys: u64) -> f64 {
        let seen = self.window.map_or(keys, |w| w.min(keys));
        let of_blocks = |b: Blocks| {
            // The local ones have the last of one stretch among them.
            let local = b.size.saturating_mul(b.local - b.last.min(b.local));
            local.saturating_add(b.globals_before(keys))
        };
        let seen = self.blocks.map_or(seen, |b| of_blocks(b).min(seen));
        match keys {
            0 => 1.0,
            _ => seen as f64 / keys as f64,
        }
    }

    /// Scores of the last `queries` tokens of `keys`, over all pairs of one of each.
    pub(super) fn share(&self, queries: u64, keys: u64) -> f64 {
        let (s, t) = (queries.min(keys) as f64, keys as f64);
        if keys == 0 {
            return 0.0;
        }
        if self.blocks.is_some() {
            return self.share_of_blocks(queries.min(keys), 0, |_| 0..keys, keys);
        }
        // The token at p sees min(p, w) keys, p from t - s to t.
        let w = self.window.map_or(t, |w| (w as f64).min(t));
        let first = t - s;
        let grows = (w - first).clamp(0.0, s);
        let seen = match w > first {
            true => grows * (first + w) / 2.0 + (s - grows) * w,
            false => s * w,
        };
        if s > 0.0 { seen / (s * t) } else { 0.0 }
    }

    /// Scores of a rank's tokens with the keys of a shard as large that has gone so many places around
    /// a ring, over all pairs of one of each: those of the rank that has most. Without blocks some
    /// rank's queries see all.
    pub(super) fn ring_share(&self, tokens: u64, step: u32, ranks: u32) -> f64 {
        let (step, ranks) = (u64::from(step), u64::from(ranks));
        let shard = |i: u64| i.saturating_mul(tokens)..(i + 1).saturating_mul(tokens);
        match self.blocks {
            None if step == 0 => self.share(tokens, tokens),
            None => 1.0,
            Some(_) => {
                let all = ranks.saturating_mul(tokens);
                self.share_of_blocks(tokens, step, |rank| shard(rank - step), all)
            }
        }
    }

    /// Scores that a kernel computes of those `queries` of all `tokens` that have most of them, in
    /// shards from this one on, with the keys that are there for a shard, over all pairs of one of
    /// each. Blocks are computed whole.
    fn share_of_blocks(
        &self,
        queries: u64,
        from: u64,
        keys: impl Fn(u64) -> Range<u64>,
        tokens: u64,
    ) -> f64 {
        let size = self.blocks.map_or(1, |b| b.size);
        let rows = size.clamp(KERNEL_ROWS[0], KERNEL_ROWS[1]);
        if queries == 0 {
            return 0.0;
        }
        let share = |shard: u64| {
            // The last one may begin before the one before it ends.
            let at = shard
                .saturating_mul(queries)
                .min(tokens.saturating_sub(queries));
            let keys = keys(shard);
            let pairs = queries as f64 * (keys.end - keys.start) as f64;
            self.computed(rows, at, queries, &keys) / pairs.max(1.0)
        };
        (from..tokens.div_ceil(queries))
            .map(share)
            .fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bounds of all kinds on which keys are seen.
    fn all() -> Vec<Bounds> {
        let windows = [None, Some(1), Some(5), Some(14), Some(100)];
        let blocks = super::super::blocks::patterns().into_iter().map(Some);
        let blocks: Vec<_> = std::iter::once(None).chain(blocks).collect();
        let of = |window| blocks.iter().map(move |b| (window, *b));
        let bounds = |(window, blocks)| Bounds {
            window,
            blocks,
            ..Bounds::default()
        };
        windows.into_iter().flat_map(of).map(bounds).collect()
    }

    #[test]
    fn runs_have_what_some_query_sees() {
        for b in all() {
            for queries in [0..1, 0..9, 7..8, 12..20, 31..33, 40..40] {
                for keys in [0..40, 0..17, 5..11, 16..40, 3..3] {
                    let sees = |k: &u64| queries.clone().any(|q| b.sees(q, *k));
                    let expected: Vec<u64> = keys.clone().filter(sees).collect();
                    let runs = b.seen(queries.clone(), keys.clone());
                    assert!(runs.windows(2).all(|w| w[0].end < w[1].start), "{runs:?}");
                    let n = expected.len() as u64;
                    let found: Vec<u64> = runs.into_iter().flatten().collect();
                    assert_eq!(found, expected, "{b:?} {queries:?} {keys:?}");
                    assert_eq!(b.n_seen(queries.clone(), keys), n, "{b:?} {queries:?}");
                }
            }
        }
    }

    /// By every pair of a query and a key.
    #[test]
    fn shares_are_those_of_pairs() {
        for b in all() {
            let n_of = |b: &Bounds, queries: Range<u64>, keys: Range<u64>| {
                let of = |q| keys.clone().filter(move |k| b.sees(q, *k)).count();
                queries.map(of).sum::<usize>() as f64
            };
            let plain = Bounds::default();
            for queries in [40, 10, 1] {
                let first = 40 - queries;
                let all = n_of(&plain, first..40, 0..40);
                let expected = n_of(&b, first..40, 0..40) / all;
                let found = b.computed_share(1, queries, 40);
                assert!((found - expected).abs() < 1e-12, "{b:?} {found} {expected}");
                // Rows that are computed at once have what one of them sees.
                let of_rows = |b: &Bounds| {
                    let each = (first..40).step_by(8).map(|q| {
                        let end = (q + 8).min(40);
                        let seen = |k: &u64| (q..end).any(|q| b.sees(q, *k));
                        (end - q) as usize * (0..40u64).filter(seen).count()
                    });
                    each.sum::<usize>() as f64
                };
                let expected = of_rows(&b) / of_rows(&plain);
                let found = b.computed_share(8, queries, 40);
                assert!((found - expected).abs() < 1e-12, "{b:?} {found} {expected}");
            }
        }
    }

    /// Blocks of 16 tokens as a kernel computes them: all pairs of blocks of which one sees the other.
    #[test]
    fn blocks_are_computed_whole() {
        let of = |local, aligned, first, last| Bounds {
            blocks: Some(Blocks {
                size: 16,
                local,
                aligned,
                first,
                last,
            }),
            ..Bounds::default()
        };
        // Rows of 1, 2, 2, .. of 8 blocks.
        assert_eq!(of(2, false, 0, 0).share(128, 128), 15.0 / 64.0);
        // And the first block in the last six of them.
        assert_eq!(of(2, false, 1, 0).share(128, 128), 21.0 / 64.0);
        assert_eq!(of(2, true, 0, 0).share(128, 128), 12.0 / 64.0);
        // The last block of each stretch: 1 + 2 + 3 of twos.
        assert_eq!(of(2, true, 0, 1).share(128, 128), 24.0 / 64.0);
        // Of two ranks that have all keys, the second has more: 5 and 7 without the first block.
        assert_eq!(of(2, false, 0, 0).share(64, 128), 8.0 / 32.0);
        // As a causal kernel of such rows has it where all is seen.
        assert_eq!(of(8, false, 0, 0).share(128, 128), 36.0 / 64.0);
        // On a ring of two: at home 7 of 16 pairs of blocks; from the other shard one block.
        let ring = |b: Bounds, step| b.ring_share(64, step, 2);
        assert_eq!(ring(of(2, false, 0, 0), 0), 7.0 / 16.0);
        assert_eq!(ring(of(2, false, 0, 0), 1), 1.0 / 16.0);
        assert_eq!(ring(of(2, true, 1, 0), 1), 4.0 / 16.0);
        assert_eq!(ring(of(2, true, 0, 0), 1), 0.0);
        assert_eq!(ring(Bounds::default(), 0), 0.5);
        assert_eq!(ring(Bounds::default(), 1), 1.0);
    }

    #[test]
    fn the_counted_share_of_blocks_is_that_of_local_and_global_ones() {
        let of = |window, local, first, last| {
            let blocks = Blocks {
                size: 10,
                local,
                aligned: false,
                first,
                last,
            };
            let bounds = Bounds {
                window,
                blocks: Some(blocks),
                ..Bounds::default()
            };
            (1000.0 * bounds.counted_share(1000)).round()
        };
        assert_eq!(of(None, 3, 0, 0), 30.0);
        assert_eq!(of(None, 3, 2, 0), 50.0);
        assert_eq!(of(Some(25), 3, 2, 0), 25.0);
        // Of 25 stretches of four blocks, the last one each.
        assert_eq!(of(None, 4, 0, 1), 30.0 + 250.0);
        assert_eq!(of(None, 100, 0, 0), 1000.0);
        assert_eq!(of(None, 2, 0, 2), 1000.0);
    }

    #[test]
    fn the_share_of_scores_is_what_queries_see() {
        let share = |window, queries: u64, keys: u64| {
            let bounds = Bounds {
                window,
                ..Bounds::default()
            };
            // By the sum over the queries, for which many tokens make up.
            let w = window.unwrap_or(keys);
            let seen = (keys - queries..keys).map(|p| (p + 1).min(w));
            let exact = seen.sum::<u64>() as f64 / (queries * keys) as f64;
            let found = bounds.share(queries, keys);
            assert!((found - exact).abs() < 2e-3, "{found} {exact}");
            found
        };
        assert_eq!(share(None, 1000, 1000), 0.5);
        assert_eq!(share(None, 250, 1000), 0.875);
        assert_eq!(share(Some(4000), 1000, 1000), 0.5);
        assert_eq!(share(Some(500), 1000, 1000), 0.375);
        assert_eq!(share(Some(500), 250, 1000), 0.5);
        share(Some(900), 250, 1000);
        assert_eq!(Bounds::default().share(0, 0), 0.0);
    }

    #[test]
    fn the_counted_share_is_that_of_the_window() {
        let of = |window| {
            let bounds = Bounds {
                window,
                ..Bounds::default()
            };
            bounds.counted_share(1000)
        };
        assert_eq!(
            [of(None), of(Some(4000)), of(Some(1000)), of(Some(250))],
            [1.0, 1.0, 1.0, 0.25]
        );
    }

    #[test]
    fn slopes_of_other_heads_stand_between_those_of_a_power_of_two() {
        let of = |heads: u64| (0..heads).map(move |h| alibi_slope(h, heads));
        let powers = |exponents: &[f64]| exponents.iter().map(|e| (-e).exp2()).collect::<Vec<_>>();
        assert_eq!(
            of(8).collect::<Vec<_>>(),
            powers(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
        );
        assert_eq!(of(2).collect::<Vec<_>>(), powers(&[4.0, 8.0]));
        // Those of four heads, then the first and the third of eight.
        assert_eq!(
            of(6).collect::<Vec<_>>(),
            powers(&[2.0, 4.0, 6.0, 8.0, 1.0, 3.0])
        );
        // BLOOM's 112 heads: 64, then 48 of 128.
        let last: f64 = 8.0 * 95.0 / 128.0;
        assert_eq!(alibi_slope(111, 112), (-last).exp2());
        assert_eq!(alibi_slope(0, 1), (-8f64).exp2());
        assert_eq!(alibi_slope(3, 0), alibi_slope(3, 1));
    }
}
