//! The scale of prices on memory: seconds that a byte may cost, from nothing to where every byte is
//! worth any communication.
//!
//! A byte that lives for the step counts once, one that is saved for the backward pass as often as
//! microbatches are in flight. How many are, differs from stage to stage; so there is a family of
//! prices for each of a few numbers. A *rung* is a price of a family, or none; its number names it
//! in the stage table, so that the choices that it led to can be made again.

use crate::layer_model::{LayerCost, Weights};
use std::collections::BTreeSet;

/// Prices of a bound on memory, seconds per byte.
pub(crate) const MEMORY_PRICES: [f64; 6] = [0.0, 1e-12, 1e-11, 1e-10, 1e-9, 1e-7];
/// The least price of the scale, seconds per byte.
const LEAST: f64 = 1e-13;
/// Prices of the scale to a factor of ten.
const STEPS_OF_TEN: f64 = 16.0;
/// Prices of the scale: up to 1e-7 seconds per byte.
pub(super) const STEPS: usize = 97;
/// Numbers of microbatches in flight that a family may have.
const MAX_IN_FLIGHT: usize = 512;

/// The prices for one number of microbatches in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Family {
    /// Microbatches in flight.
    pub(super) in_flight: usize,
}

/// The families for stages that have these numbers of microbatches in flight, ascending: the most,
/// and its geometric mean with the least where that is far.
///
/// The most of plain 1F1B on p equal meshes is p, and that is what nearly every one of several
/// interleaved stages on each of them has; the first ones, which have more, are bounded by it too.
pub(super) fn families(in_flight: &[u64]) -> Vec<Family> {
    let (Some(&least), Some(&most)) = (in_flight.first(), in_flight.last()) else {
        return Vec::new();
    };
    let mean = ((least as f64) * (most as f64)).sqrt().round() as u64;
    let some = [Some(most), Some(mean).filter(|n| 2 * n <= most)];
    let numbers: BTreeSet<usize> = some
        .into_iter()
        .flatten()
        .map(|n| usize::try_from(n).unwrap_or(MAX_IN_FLIGHT))
        .map(|n| n.clamp(1, MAX_IN_FLIGHT))
        .collect();
    let families = numbers.into_iter().rev();
    families.map(|in_flight| Family { in_flight }).collect()
}

impl Family {
    /// The number of a price of the family.
    pub(super) fn rung(self, step: usize) -> usize {
        1 + (self.in_flight - 1) * STEPS + step
    }

    /// The weights under a price.
    pub(super) fn weights(self, m: u32, step: usize) -> Weights {
        weights_at(m, self.rung(step))
    }

    /// Bytes per device of a stage.
    pub(super) fn bytes(self, cost: &LayerCost) -> f64 {
        cost.static_bytes as f64 + self.in_flight as f64 * cost.saved_bytes as f64
    }
}

/// The price of the scale that is nearest to so many seconds per byte.
pub(super) fn step_of(price: f64) -> usize {
    let step = (price / LEAST).log10() * STEPS_OF_TEN;
    step.round().clamp(0.0, (STEPS - 1) as f64) as usize
}

/// The weights of a rung for `m` microbatches; memory has no price at rung 0.
pub(super) fn weights_at(m: u32, rung: usize) -> Weights {
    let Some(i) = rung.checked_sub(1) else {
        return Weights::free(m);
    };
    let (in_flight, step) = (i / STEPS + 1, i % STEPS);
    let price = LEAST * 10f64.powf(step as f64 / STEPS_OF_TEN);
    Weights {
        static_price: price,
        saved_price: price * in_flight as f64,
        ..Weights::free(m)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rungs_name_prices() {
        for in_flight in [1, 2, 17, 512] {
            let family = Family { in_flight };
            for step in [0, 16, 48, STEPS - 1] {
                let weights = family.weights(4, step);
                assert_eq!(weights.saved_price, weights.static_price * in_flight as f64);
                assert_eq!(step_of(weights.static_price), step);
            }
        }
        assert!((weights_at(4, STEPS).static_price / 1e-7 - 1.0).abs() < 1e-12);
        assert_eq!(weights_at(4, 0), Weights::free(4));
        assert!(Family { in_flight: 512 }.rung(STEPS - 1) < 1 << 16);
    }

    #[test]
    fn families_are_of_the_ends_and_the_middle() {
        let of = |in_flight: &[u64]| -> Vec<usize> {
            families(in_flight).iter().map(|f| f.in_flight).collect()
        };
        assert_eq!(of(&[1]), [1]);
        assert_eq!(of(&[1, 2]), [2, 1]);
        assert_eq!(of(&(1..=16).collect::<Vec<_>>()), [16, 4]);
        assert_eq!(of(&[4096]), [512]);
    }
}
