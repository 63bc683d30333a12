//! The order in which the elements of a sequence are stored.
//!
//! A causal token sees all before it, so a part of the sequence has the more to do the later it
//! stands. In **zigzag** order the sequence is cut into `2n` equal chunks, and chunk `i` is
//! stored next to chunk `2n - 1 - i`: a split of the stored sequence into n equal parts gives
//! each an early and a late chunk, and to all the same number of visible keys.
//!
//! ```text
//! positions   0 1 | 2 3 | 4 5 | 6 7        n = 2, chunks of 2
//! stored      0 1   6 7 | 2 3   4 5        rank 0 | rank 1
//! ```
//!
//! Sharding knows nothing of it: shards are contiguous in the stored order. It is an attribute
//! of the ops that ask where a token stands.

use serde::{Deserialize, Serialize};

/// How the stored elements of a sequence follow each other.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum SequenceOrder {
    /// By position.
    #[default]
    Natural,
    /// Chunks from both ends, for this many ranks.
    Zigzag {
        /// Half of the number of chunks.
        ranks: u64,
    },
}

/// Stored elements `stored..stored + count` at positions `position..position + count`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First stored element.
    pub stored: u64,
    /// Its position.
    pub position: u64,
    /// Elements that follow each other in both.
    pub count: u64,
}

impl SequenceOrder {
    /// Whether stored elements follow each other by position.
    pub fn is_natural(&self) -> bool {
        *self == SequenceOrder::Natural
    }

    /// Whether a sequence of `len` elements can be stored so: its chunks are equal.
    pub fn fits(self, len: u64) -> bool {
        match self {
            SequenceOrder::Natural => true,
            SequenceOrder::Zigzag { ranks } => {
                ranks >= 1 && ranks.checked_mul(2).is_some_and(|n| len.is_multiple_of(n))
            }
        }
    }

    /// Equal chunks that the sequence is cut into; 1 where it is stored by position.
    pub fn n_chunks(self) -> u64 {
        match self {
            SequenceOrder::Natural => 1,
            SequenceOrder::Zigzag { ranks } => ranks.saturating_mul(2),
        }
    }

    /// Chunks of the sequence by position, in the order in which they are stored; none where
    /// they are stored by position. One entry for each of [`n_chunks`](SequenceOrder::n_chunks):
    /// for an order that fits a sequence.
    pub fn chunks(self) -> Vec<u64> {
        match self {
            SequenceOrder::Natural => Vec::new(),
            SequenceOrder::Zigzag { ranks } => {
                (0..ranks).flat_map(|r| [r, 2 * ranks - 1 - r]).collect()
            }
        }
    }

    /// The stored elements `start..start + count` of a sequence of `len`, in pieces that follow
    /// each other by position.
    ///
    /// `len` [fits](SequenceOrder::fits).
    pub fn runs(self, start: u64, count: u64, len: u64) -> Vec<Run> {
        let SequenceOrder::Zigzag { ranks } = self else {
            return vec![Run {
                stored: start,
                position: start,
                count,
            }];
        };
        let chunk = (len / (2 * ranks).max(1)).max(1);
        let mut runs: Vec<Run> = Vec::new();
        let (mut at, end) = (start, start.saturating_add(count).min(len));
        while at < end {
            let (i, inside) = (at / chunk, at % chunk);
            let place = match i.is_multiple_of(2) {
                true => i / 2,
                false => 2 * ranks - 1 - i / 2,
            };
            let (position, n) = (place * chunk + inside, (chunk - inside).min(end - at));
            match runs.last_mut() {
                // The two chunks in the middle follow each other.
                Some(last) if last.position + last.count == position => last.count += n,
                _ => runs.push(Run {
                    stored: at,
                    position,
                    count: n,
                }),
            }
            at += n;
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Figures of attention that make no sense are refused in words.
    #[test]
    fn attention_has_a_probability_and_chunks_that_fit() {
        use crate::{DType, Dim, OpKind, Shape, TensorType};
        let dims = [Dim::Batch, Dim::Fixed(16), Dim::Fixed(2), Dim::Fixed(4)];
        let x = TensorType::new(DType::F32, Shape(dims.to_vec()));
        let said = |scale: f64, dropout: f64, ranks: u64| {
            let order = SequenceOrder::Zigzag { ranks };
            let kind = OpKind::Attention {
                scale,
                dropout,
                key: String::new(),
                order,
                keys: Default::default(),
                bounds: Default::default(),
            };
            let made = kind.infer(&[x.clone(), x.clone(), x.clone()], None);
            made.map_or_else(|e| e.to_string(), |_| String::new())
        };
        assert_eq!(said(0.5, 0.1, 4), "");
        assert!(said(0.5, 1.0, 4).ends_with("dropout 1 is outside [0, 1)"));
        assert!(said(0.5, -0.1, 4).ends_with("dropout -0.1 is outside [0, 1)"));
        assert!(said(f64::INFINITY, 0.0, 4).ends_with("scale inf is not finite"));
        for ranks in [0, 3] {
            let words = said(0.5, 0.0, ranks);
            let chunks = format!("into the {} chunks of zigzag order", 2 * ranks);
            assert!(words.contains(&chunks), "{words}");
            assert!(!words.contains("Zigzag"), "{words}");
        }
    }

    #[test]
    fn every_rank_has_an_early_and_a_late_chunk() {
        let order = SequenceOrder::Zigzag { ranks: 2 };
        assert_eq!(order.chunks(), [0, 3, 1, 2]);
        let runs = |start, count| -> Vec<(u64, u64, u64)> {
            let runs = order.runs(start, count, 8);
            runs.iter()
                .map(|r| (r.stored, r.position, r.count))
                .collect()
        };
        assert_eq!(runs(0, 4), [(0, 0, 2), (2, 6, 2)]);
        assert_eq!(runs(4, 4), [(4, 2, 4)]);
        assert_eq!(runs(1, 2), [(1, 1, 1), (2, 6, 1)]);
        assert_eq!(runs(6, 9), [(6, 4, 2)]);
        assert!(order.fits(8) && !order.fits(6));
        assert!(!SequenceOrder::Zigzag { ranks: 0 }.fits(8));
        assert!(!SequenceOrder::Zigzag { ranks: u64::MAX }.fits(8));
    }

    #[test]
    fn stored_elements_are_a_permutation_and_their_keys_are_shared_evenly() {
        for ranks in 1..6u64 {
            let (order, len) = (SequenceOrder::Zigzag { ranks }, 12 * ranks);
            let mut seen = vec![0; len as usize];
            for r in 0..ranks {
                let mut keys = 0;
                for run in order.runs(r * 12, 12, len) {
                    for p in run.position..run.position + run.count {
                        seen[p as usize] += 1;
                        keys += p + 1;
                    }
                }
                assert_eq!(keys, 6 * (len + 1), "rank {r} of {ranks}");
            }
            assert!(seen.iter().all(|&n| n == 1));
        }
    }
}
