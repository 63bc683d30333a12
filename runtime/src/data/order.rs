//! Which window a sample is: a random order of the windows, anew in every epoch.
//!
//! Samples are numbered through the whole run, `step * global_batch + position`. Sample
//! `e * n_windows + i` is the `i`-th of epoch `e`'s permutation of the windows, so every window
//! comes once per epoch; a batch may hold the end of one epoch and the start of the next.
//!
//! No list is kept. The permutation is computed for one index at a time by a Feistel network
//! over the smallest `2h` bits that hold all indices, with Philox as its round function, applied
//! again until the result is an index (cycle walking: Black & Rogaway 2002, "Ciphers with
//! arbitrary finite domains"). The domain is less than four times too large (or has 4 elements),
//! so that takes four applications at most on average.

use super::DataError;
use crate::rng::philox4x32_10;

/// Rounds of the network. Four make a good pseudorandom permutation of a large domain (Luby &
/// Rackoff 1988); the domains of one or two bits a half need more.
const ROUNDS: u32 = 8;

/// The order of samples in a run: a function, shared by all ranks and independent of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    n_windows: u64,
    global_batch: u64,
    seed: u64,
    /// Bits in a half of the network's domain, 1 to 32.
    half_bits: u32,
}

impl Order {
    /// The order of `n_windows` windows in batches of `global_batch`.
    ///
    /// Fails if either is 0.
    pub fn new(n_windows: u64, global_batch: u64, seed: u64) -> Result<Self, DataError> {
        if n_windows == 0 {
            return Err(DataError::Zero("the number of windows"));
        }
        if global_batch == 0 {
            return Err(DataError::Zero("the global batch"));
        }
        let bits = u64::BITS - (n_windows - 1).leading_zeros();
        let half_bits = bits.div_ceil(2).max(1);
        Ok(Order {
            n_windows,
            global_batch,
            seed,
            half_bits,
        })
    }

    /// The window that is sample `position` of the global batch of training step `step`.
    ///
    /// Steps and positions count from 0. The result is below `n_windows`.
    pub fn window(&self, step: u64, position: u64) -> u64 {
        let n_windows = u128::from(self.n_windows);
        let sample = self.sample_number(step, position);
        // An epoch number needs more than 64 bits only in runs that nobody can finish; there,
        // its low bits serve.
        self.permute((sample / n_windows) as u64, (sample % n_windows) as u64)
    }

    /// The epoch, counted from 0, that sample `position` of step `step` belongs to.
    pub fn epoch(&self, step: u64, position: u64) -> u128 {
        self.sample_number(step, position) / u128::from(self.n_windows)
    }

    fn sample_number(&self, step: u64, position: u64) -> u128 {
        // At most (2^64 - 1)^2 + 2^64 - 1, which is below 2^128.
        u128::from(step) * u128::from(self.global_batch) + u128::from(position)
    }

    fn permute(&self, epoch: u64, index: u64) -> u64 {
        // Ends, as `index` is on a cycle of the network that comes back to it.
        let mut value = self.feistel(epoch, index);
        while value >= self.n_windows {
            value = self.feistel(epoch, value);
        }
        value
    }

    /// A permutation of the numbers of `2 * half_bits` bits.
    fn feistel(&self, epoch: u64, value: u64) -> u64 {
        let mask = u32::MAX >> (u32::BITS - self.half_bits);
        let key = [self.seed as u32, (self.seed >> 32) as u32];
        let mut left = (value >> self.half_bits) as u32 & mask;
        let mut right = value as u32 & mask;
        for round in 0..ROUNDS {
            let counter = [right, round, epoch as u32, (epoch >> 32) as u32];
            (left, right) = (right, left ^ (philox4x32_10(counter, key)[0] & mask));
        }
        u64::from(left) << self.half_bits | u64::from(right)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn epoch_order(n_windows: u64, seed: u64, epoch: u64) -> Vec<u64> {
        let order = Order::new(n_windows, 1, seed).unwrap();
        (0..n_windows)
            .map(|i| order.window(epoch * n_windows + i, 0))
            .collect()
    }

    #[test]
    fn an_epoch_holds_every_window_once() {
        for n_windows in (1..=70).chain([255, 256, 257, 1000, 4096, 4097]) {
            for epoch in [0, 1, 12_345] {
                let mut order = epoch_order(n_windows, 42, epoch);
                order.sort_unstable();
                assert_eq!(order, (0..n_windows).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn epochs_and_seeds_differ() {
        let base = epoch_order(1000, 42, 0);
        for other in [epoch_order(1000, 42, 1), epoch_order(1000, 43, 0)] {
            // A random permutation agrees with another in 1 place on average, sd 1.
            let agreeing = base.iter().zip(&other).filter(|(a, b)| a == b).count();
            assert!(agreeing < 10, "{agreeing}");
        }
    }

    /// Every permutation of three and four windows is about as frequent as the others.
    #[test]
    fn small_permutations_are_equally_frequent() {
        for (n_windows, n_permutations) in [(2, 2), (3, 6), (4, 24)] {
            let n_epochs = 24_000;
            let mut counts = std::collections::BTreeMap::new();
            for epoch in 0..n_epochs {
                *counts
                    .entry(epoch_order(n_windows, 7, epoch))
                    .or_insert(0.0) += 1.0;
            }
            let expected = n_epochs as f64 / n_permutations as f64;
            let seen: f64 = counts
                .values()
                .map(|c: &f64| (c - expected).powi(2) / expected)
                .sum();
            let unseen = (n_permutations - counts.len()) as f64 * expected;
            let df = (n_permutations - 1) as f64;
            // Five standard deviations of a chi-square.
            assert!(
                seen + unseen < df + 5.0 * (2.0 * df).sqrt(),
                "{n_windows}: {counts:?}"
            );
        }
    }

    /// Where a window goes in the order, over many epochs: uniform over the places.
    #[test]
    fn a_window_is_anywhere_in_the_order() {
        let (n_windows, n_epochs) = (23, 4600);
        let mut counts = vec![vec![0.0; n_windows]; n_windows];
        for epoch in 0..n_epochs {
            for (place, window) in epoch_order(n_windows as u64, 3, epoch)
                .into_iter()
                .enumerate()
            {
                counts[window as usize][place] += 1.0;
            }
        }
        let expected = n_epochs as f64 / n_windows as f64;
        let df = (n_windows - 1) as f64;
        for places in counts {
            let statistic: f64 = places
                .iter()
                .map(|c: &f64| (c - expected).powi(2) / expected)
                .sum();
            assert!(statistic < df + 5.0 * (2.0 * df).sqrt(), "{statistic}");
        }
    }

    #[test]
    fn batches_run_through_the_epochs() {
        let batches = Order::new(10, 4, 1).unwrap();
        let singles = Order::new(10, 1, 1).unwrap();
        for step in 0..10 {
            for position in 0..4 {
                let sample = step * 4 + position;
                assert_eq!(batches.window(step, position), singles.window(sample, 0));
                assert_eq!(batches.epoch(step, position), u128::from(sample / 10));
            }
        }
    }

    #[test]
    fn zero_counts_are_refused() {
        assert_eq!(
            Order::new(0, 1, 0).unwrap_err().to_string(),
            "the number of windows is 0"
        );
        assert_eq!(
            Order::new(1, 0, 0).unwrap_err().to_string(),
            "the global batch is 0"
        );
    }

    proptest! {
        #[test]
        fn windows_are_in_range(
            n_windows in prop_oneof![1u64..100, 1u64..=u64::MAX],
            global_batch in prop_oneof![1u64..100, 1u64..=u64::MAX],
            seed: u64, step: u64, position: u64,
        ) {
            let order = Order::new(n_windows, global_batch, seed).unwrap();
            prop_assert!(order.window(step, position) < n_windows);
        }
    }
}
