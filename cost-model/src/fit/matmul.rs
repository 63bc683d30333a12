//! Rate and half sizes of matrix products.

use super::{FitError, MAX_HALF_SIZE, minimise, missing, named, positive};
use ir::cluster::{HalfSize, MeasuredPoint};

/// The rate of very large matmuls is at least this share of the best one measured.
const MIN_SHARE: f64 = 0.25;

/// A figure within this share of an end lies at it: the search may end short of its bounds, where
/// little is gained on the way there.
const NEAR: f64 = 0.01;

/// The time of matmuls of any shape.
pub(super) struct Matmul {
    /// The best rate measured.
    pub best: f64,
    /// The rate that very large matmuls would reach; not above `best`.
    pub rate: f64,
    pub half: HalfSize,
}

impl Matmul {
    /// Figures at an end of what is looked for that no machine has: the lowest rate, where the
    /// points have no one rate, and half sizes beyond all that is measured. The name behind the
    /// key's and how it lies.
    pub fn at_bound(&self) -> Vec<&'static str> {
        let halves = [
            (self.half.m, "`m` to the largest half size"),
            (self.half.n, "`n` to the largest half size"),
            (self.half.k, "`k` to the largest half size"),
        ];
        let low = self.rate <= self.best * MIN_SHARE * (1.0 + NEAR);
        let rate = low.then_some("the rate to the lowest");
        let large = halves
            .iter()
            .filter(|(h, _)| *h >= MAX_HALF_SIZE / (1.0 + NEAR));
        rate.into_iter()
            .chain(large.map(|(_, words)| *words))
            .collect()
    }

    /// Figures at an end of their range that machines may well have, by the last parts of their
    /// keys: the best rate measured for all large matmuls, and sizes along which nothing is lost.
    pub fn at_natural_end(&self) -> Vec<(&'static str, &'static str)> {
        const NONE_LOST: &str =
            "0, or next to it: the runs and the calibration lose nothing along this dim";
        let mut ends = Vec::new();
        if self.rate >= self.best / (1.0 + 1e-6) {
            ends.push((
                "matmul_efficiency.f32",
                "1: large matmuls reach the best rate that was measured, and no more is looked for",
            ));
        }
        let halves = [
            (self.half.m, "matmul_half_size.m"),
            (self.half.n, "matmul_half_size.n"),
            (self.half.k, "matmul_half_size.k"),
        ];
        let none = halves.into_iter().filter(|(h, _)| *h < 0.1);
        ends.extend(none.map(|(_, key)| (key, NONE_LOST)));
        ends
    }
    /// Seconds of a point, without the launch.
    pub fn time(&self, p: &MeasuredPoint) -> f64 {
        let share = |x: u64, half: f64| x as f64 / (x as f64 + half);
        flops(p)
            / (self.rate
                * share(p.size[0], self.half.m)
                * share(p.size[1], self.half.n)
                * share(p.size[2], self.half.k))
    }
}

pub(super) fn flops(p: &MeasuredPoint) -> f64 {
    p.size[..3].iter().fold(2.0, |f, &x| f * x as f64)
}

/// Fits rate and half sizes to the points in f32.
pub(super) fn matmul(
    points: &[MeasuredPoint],
    busy: &dyn Fn(&MeasuredPoint) -> f64,
) -> Result<Matmul, FitError> {
    let measured: Vec<(&MeasuredPoint, f64)> =
        named(points, "matmul f32").map(|p| (p, busy(p))).collect();
    let best = measured
        .iter()
        .map(|(p, t)| flops(p) / t)
        .fold(0.0, f64::max);
    positive(best).ok_or_else(|| missing("matmul f32"))?;
    let of = |x: &[f64]| Matmul {
        best,
        rate: best * x[0].exp(),
        half: HalfSize {
            m: x[1].exp_m1(),
            n: x[2].exp_m1(),
            k: x[3].exp_m1(),
        },
    };
    let error = |x: &[f64]| {
        let model = of(x);
        measured
            .iter()
            .map(|(p, t)| (model.time(p) / t).ln().powi(2))
            .sum()
    };
    let largest = MAX_HALF_SIZE.ln_1p();
    let bounds = [
        (MIN_SHARE.ln(), 0.0),
        (0.0, largest),
        (0.0, largest),
        (0.0, largest),
    ];
    Ok(of(&minimise(
        vec![0.9f64.ln(), 2.0, 2.0, 2.0],
        &bounds,
        &error,
    )))
}
