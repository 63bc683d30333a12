//! What larger microbatches say of smaller ones.
//!
//! With c times as many samples the same strategies take at most c times as long: no rank has more
//! than c times as many samples, and a kernel or a collective of c times the size takes no longer
//! than c of them, one after the other. So the least time of all layers, divided by the samples of
//! a microbatch, does not rise with these. The search goes from large microbatches to small ones,
//! and a submesh on which a multiple already takes too long per sample is not priced again.
//!
//! Kernels lose a little where sizes divide badly (tiles, alignment), which a multiple may do and
//! the smaller size not. [`SLACK`] allows for that. Beside it every cut of the search is exact.

use std::collections::BTreeMap;

/// The share by which a smaller microbatch may take less time per sample than a multiple of it.
/// Over the random models and clusters of the tests of `equal` none does.
pub(super) const SLACK: f64 = 0.01;

/// The least times that are known.
#[derive(Clone, Debug, Default)]
pub(super) struct Larger {
    /// By submesh and samples of a microbatch: seconds of all layers, one microbatch, without
    /// sending and without the work once per step.
    least_s: BTreeMap<(usize, u64), f64>,
}

impl Larger {
    pub(super) fn add(&mut self, submesh: usize, batch: u64, least_s: f64) {
        self.least_s.insert((submesh, batch), least_s);
    }

    /// Seconds that all layers take at least on a submesh, one microbatch of `batch` samples; 0
    /// where nothing is known of a multiple.
    pub(super) fn least_s(&self, submesh: usize, batch: u64) -> f64 {
        let multiples = self.least_s.range((submesh, batch)..=(submesh, u64::MAX));
        let multiples = multiples.filter(|((_, larger), _)| larger.is_multiple_of(batch));
        let of =
            |(&(_, larger), least): (&(usize, u64), &f64)| least * batch as f64 / larger as f64;
        multiples.map(of).fold(0.0, f64::max) * (1.0 - SLACK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn multiples_bound_what_divides_them() {
        let mut known = Larger::default();
        known.add(1, 8, 8.0);
        known.add(1, 12, 18.0);
        known.add(2, 4, 100.0);
        let kept = 1.0 - SLACK;
        assert_eq!(known.least_s(1, 8), 8.0 * kept);
        assert_eq!(known.least_s(1, 4), 6.0 * kept);
        assert_eq!(known.least_s(1, 2), 3.0 * kept);
        assert_eq!(known.least_s(1, 16), 0.0);
        assert_eq!(known.least_s(1, 5), 0.0);
        assert_eq!(known.least_s(0, 2), 0.0);
    }
}
