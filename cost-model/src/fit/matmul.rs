//! Rate and half sizes of matrix products.

use super::{FitError, MAX_HALF_SIZE, minimise, missing, named, positive};
use ir::cluster::{HalfSize, MeasuredPoint};

/// The rate of very large matmuls is at least this share of the best one measured.
const MIN_SHARE: f64 = 0.25;

/// What matmuls of any shape take.
pub(super) struct Matmul {
    /// The best rate measured.
    pub best: f64,
    /// The rate that very large matmuls would reach; not above `best`.
    pub rate: f64,
    pub half: HalfSize,
}

impl Matmul {
    /// Whether the rate is the lowest that is looked for: the points have no one rate.
    pub fn at_bound(&self) -> bool {
        self.rate <= self.best * MIN_SHARE * (1.0 + 1e-6)
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
