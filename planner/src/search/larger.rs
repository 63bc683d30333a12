//! Bounds on small microbatches from larger ones.
//!
//! With c times as many samples the same strategies take at most c times as long: no rank has more
//! than c times as many samples, and a kernel or a collective of c times the size takes no longer
//! than c of them, one after the other. So the least time of a layer, and of all layers, divided by
//! the samples of a microbatch, does not rise with these. The search goes from large microbatches
//! to small ones, and a shape on which a multiple already takes too long per sample is not priced
//! again.
//!
//! Kernels lose a little where sizes divide badly (tiles, alignment), which a multiple may do and
//! the smaller size not. [`SLACK`] allows for that. Beside it every cut of the search is exact.

use super::Shape;
use std::collections::BTreeMap;

/// The share by which a smaller microbatch may take less time per sample than a multiple of it.
/// Over the random models and clusters of the tests of `equal` none does.
pub(super) const SLACK: f64 = 0.01;

/// Submesh and sizes of the axes: what a shape is for every microbatch size.
type Key = (usize, Vec<u32>);

/// Seconds that nothing on a shape can beat, one microbatch, without sending and without the work
/// once per step.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct LeastTimes {
    /// Seconds of all layers together.
    pub(super) sum_s: f64,
    /// Seconds of each layer by itself.
    pub(super) layers_s: Vec<f64>,
}

impl LeastTimes {
    /// Seconds that the longest of `n_stages` stages takes at least, however the layers are cut:
    /// the least limit under which as many stages reach the end.
    pub(super) fn longest_s(&self, n_stages: usize) -> f64 {
        let (mut low, mut high) = (0.0, self.layers_s.iter().sum::<f64>());
        let largest = self.layers_s.iter().copied().fold(0.0, f64::max);
        if n_stages <= 1 {
            return high.max(self.sum_s);
        }
        let fits = |limit: f64| {
            let (mut stages, mut filled_s) = (1, 0.0);
            for &layer_s in &self.layers_s {
                if filled_s + layer_s > limit {
                    (stages, filled_s) = (stages + 1, 0.0);
                }
                filled_s += layer_s;
            }
            stages <= n_stages
        };
        // The lower end is a bound all along.
        for _ in 0..20 {
            let middle = (low + high) / 2.0;
            match fits(middle.max(largest)) {
                true => high = middle,
                false => low = middle,
            }
        }
        low.max(largest).max(self.sum_s / n_stages as f64)
    }
}

/// The least times that are known.
#[derive(Clone, Debug, Default)]
pub(super) struct Larger {
    /// By shape and samples of a microbatch.
    known: BTreeMap<(Key, u64), LeastTimes>,
}

fn key(shape: &Shape) -> Key {
    let sizes = shape.mesh.axes.iter().map(|a| a.size);
    (shape.submesh, sizes.collect())
}

impl Larger {
    pub(super) fn add(&mut self, shape: &Shape, batch: u64, least: LeastTimes) {
        self.known.insert((key(shape), batch), least);
    }

    /// Seconds that a microbatch of `batch` samples takes at least on a shape; none where nothing is
    /// known of a multiple.
    pub(super) fn least(&self, shape: &Shape, batch: u64) -> Option<LeastTimes> {
        let key = key(shape);
        let multiples = self.known.range((key.clone(), batch)..=(key, u64::MAX));
        let multiples = multiples.filter(|((_, larger), _)| larger.is_multiple_of(batch));
        let mut best: Option<LeastTimes> = None;
        for ((_, larger), least) in multiples {
            let part = batch as f64 / *larger as f64 * (1.0 - SLACK);
            let best = best.get_or_insert_with(|| LeastTimes {
                sum_s: 0.0,
                layers_s: vec![0.0; least.layers_s.len()],
            });
            best.sum_s = best.sum_s.max(part * least.sum_s);
            for (best_s, least_s) in best.layers_s.iter_mut().zip(&least.layers_s) {
                *best_s = best_s.max(part * least_s);
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pins::AxisRole;
    use ir::testing::Rng;
    use ir::{Axis, DeviceMesh, LogicalMesh, Rank};

    fn shape(submesh: usize, size: u32) -> Shape {
        let devices = DeviceMesh {
            first_rank: Rank(0),
            n_devices: size,
        };
        let axis = Axis {
            name: "x".into(),
            size,
        };
        Shape {
            submesh,
            mesh: LogicalMesh::new(devices, vec![axis]).unwrap(),
            roles: vec![AxisRole::Free],
            is_wide: false,
        }
    }

    fn times(sum_s: f64, layers_s: &[f64]) -> LeastTimes {
        LeastTimes {
            sum_s,
            layers_s: layers_s.to_vec(),
        }
    }

    #[test]
    fn multiples_bound_what_divides_them() {
        let mut known = Larger::default();
        known.add(&shape(1, 4), 8, times(8.0, &[2.0, 5.0]));
        known.add(&shape(1, 4), 12, times(18.0, &[12.0, 3.0]));
        known.add(&shape(1, 2), 4, times(100.0, &[]));
        known.add(&shape(2, 4), 4, times(100.0, &[]));
        let kept = 1.0 - SLACK;
        let sum = |batch| known.least(&shape(1, 4), batch).map(|l| l.sum_s / kept);
        let near = |a: Option<f64>, b: f64| (a.unwrap() - b).abs() < 1e-12;
        assert!(near(sum(8), 8.0) && near(sum(4), 6.0) && near(sum(2), 3.0));
        assert_eq!((sum(16), sum(5)), (None, None));
        assert_eq!(known.least(&shape(0, 4), 2), None);
        let layers = known.least(&shape(1, 4), 4).unwrap().layers_s;
        assert!((layers[0] / kept - 4.0).abs() < 1e-12);
        assert!((layers[1] / kept - 2.5).abs() < 1e-12);
    }

    /// Against all cuts of the layers.
    #[test]
    fn no_cut_has_a_shorter_longest_stage() {
        fn shortest(layers: &[f64], n_stages: usize) -> f64 {
            if n_stages == 1 {
                return layers.iter().sum();
            }
            let cuts = 1..layers.len();
            let longest = cuts.map(|at| {
                let first: f64 = layers[..at].iter().sum();
                first.max(shortest(&layers[at..], n_stages - 1))
            });
            longest.fold(f64::INFINITY, f64::min)
        }
        let mut rng = Rng::new(5);
        for _ in 0..300 {
            let n_layers = 1 + rng.below(7) as usize;
            let layers: Vec<f64> = (0..n_layers).map(|_| 1.0 + rng.below(9) as f64).collect();
            let n_stages = 1 + rng.below(n_layers as u64) as usize;
            let bound = times(layers.iter().sum(), &layers).longest_s(n_stages);
            let exact = shortest(&layers, n_stages);
            assert!(
                bound <= exact + 1e-12,
                "{layers:?} {n_stages}: {bound}, {exact}"
            );
            assert!(
                bound > exact - 1e-4,
                "{layers:?} {n_stages}: {bound}, {exact}"
            );
        }
    }
}
