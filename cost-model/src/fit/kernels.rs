//! The ratio of every kernel's time to that of the device's rates.
//!
//! One rate for all arithmetic outside matrix products, and one for memory, are off by up to
//! twice for single kernels: each has its own mix of instructions and passes. Of every kernel
//! that was measured, the factor is its total time over the total that the rates give. Attention
//! is matrix products and exponentials, whose shares change with the shape; each has a factor.

use super::{minimise, named, positive};
use crate::compute::kernels::{executed_share, products_of};
use crate::compute::matmul_rate;
use ir::DType;
use ir::cluster::{Cluster, Kernels, MeasuredPoint};
use ir::op::MatmulShape;
use std::collections::BTreeMap;

/// Largest factor, and its inverse the smallest.
pub(super) const MAX_FACTOR: f64 = 100.0;

/// The factors of all kernels that have points, given a cluster with rates. The first value is
/// the attention efficiency, of which the factors of attention's products are multiples.
pub(super) fn kernels(
    points: &[MeasuredPoint],
    cluster: &Cluster,
    attention_block_rows: u32,
    busy: &dyn Fn(&MeasuredPoint) -> f64,
) -> (f64, Kernels) {
    let clamped = |(name, x): (String, f64)| (name, x.clamp(1.0 / MAX_FACTOR, MAX_FACTOR));
    let factors = vector_factors(points, cluster, busy);
    let mut kernels = Kernels {
        attention_block_rows,
        time_factor: factors.into_iter().map(clamped).collect(),
    };
    let mut efficiency = 1.0;
    for name in ["attention", "attention_grad"] {
        // A calibration has points of several shapes; where they leave something open, the
        // device's rates stand.
        let rates = Known {
            factors: (1.0, 1.0),
            weight: TIE,
        };
        let found = attention(points, cluster, attention_block_rows, name, busy, &rates);
        let Some((products, vector)) = found else {
            continue;
        };
        if name == "attention" {
            efficiency = (1.0 / products).clamp(0.01, 1.0);
        }
        let factors = &mut kernels.time_factor;
        factors.insert(name.into(), vector);
        factors.insert(products_of(name).into(), products * efficiency);
    }
    (efficiency, kernels)
}

/// Whether a factor was not driven to an end of what is looked for.
pub(super) fn in_range(factor: f64) -> bool {
    // The search may end short of its bounds, where little is gained on the way there.
    const NEAR: f64 = 1.01;
    (NEAR / MAX_FACTOR..MAX_FACTOR / NEAR).contains(&factor)
}

/// The time of each kernel outside matrix products over that of the rates, unbounded.
pub(super) fn vector_factors(
    points: &[MeasuredPoint],
    cluster: &Cluster,
    busy: &dyn Fn(&MeasuredPoint) -> f64,
) -> BTreeMap<String, f64> {
    let d = &cluster.device;
    let memory_rate = d.memory_bandwidth_bytes_per_s * d.memory_efficiency;
    let mut totals: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
    for p in points {
        let Some(name) = p.what.strip_prefix("vector ") else {
            continue;
        };
        let roofline =
            (p.size[0] as f64 / d.vector_flops_per_s).max(p.size[1] as f64 / memory_rate);
        let total = totals.entry(name).or_default();
        *total = (total.0 + busy(p), total.1 + roofline);
    }
    let factor = |(name, (time, roofline)): (&str, (f64, f64))| {
        Some((name.to_string(), positive(time / roofline)?))
    };
    totals.into_iter().filter_map(factor).collect()
}

/// The prior knowledge of an attention's factors.
pub(super) struct Known {
    /// Factors of the products, relative to matmuls of their shape, and of the rest.
    pub factors: (f64, f64),
    /// The cost of a change of a factor's logarithm by 1, over that of a point that is off by as
    /// much: 0 where the points alone count.
    pub weight: f64,
}

/// A weight that decides nothing but what points leave open.
const TIE: f64 = 1e-6;

/// Factors of kernels of one machine differ by about this much, as a logarithm.
const FACTORS_DIFFER: f64 = std::f64::consts::LN_2;
/// Points of a run are not better than this, whatever their spread, as a logarithm.
const LEAST_ERROR: f64 = 0.05;

impl Known {
    /// The factors known before `points`, held as firmly as they are uncertain.
    ///
    /// Two factors are asked of points that may be of one shape, which says how long both parts
    /// take together and nothing of either. So the fit is ridge regression (Hoerl & Kennard 1970)
    /// towards the factors that were known: the variance of the points over that of factors is the
    /// weight, so what the points determine is theirs, and what they leave open stays. The points'
    /// error is their relative spread, from 5% to twice.
    pub fn before(factors: (f64, f64), points: &[&MeasuredPoint]) -> Self {
        let mut spreads: Vec<f64> = points.iter().map(|p| p.spread_s / p.median_s).collect();
        spreads.sort_by(f64::total_cmp);
        let spread = spreads.get(spreads.len() / 2).copied().unwrap_or(0.0);
        let error = spread.clamp(LEAST_ERROR, FACTORS_DIFFER);
        Known {
            factors,
            weight: (error / FACTORS_DIFFER).powi(2),
        }
    }
}

/// Factors of an attention's products, relative to matmuls of their shape, and of the rest: what
/// its points determine, and of the rest what is `known`.
pub(super) fn attention(
    points: &[MeasuredPoint],
    cluster: &Cluster,
    attention_block_rows: u32,
    name: &str,
    busy: &dyn Fn(&MeasuredPoint) -> f64,
    known: &Known,
) -> Option<(f64, f64)> {
    let what = format!("{name} f32");
    let parts: Vec<(f64, f64, f64)> = named(points, &what)
        .map(|p| {
            let shape = MatmulShape {
                batch: 1,
                m: p.size[3],
                n: p.size[4],
                k: p.size[5],
            };
            let executed = executed_share(attention_block_rows, shape.m);
            let products = executed * p.size[0] as f64 / matmul_rate(cluster, DType::F32, shape);
            let vector = p.size[1] as f64 / cluster.device.vector_flops_per_s;
            (products, vector, busy(p))
        })
        .collect();
    if parts.is_empty() {
        return None;
    }
    let before = [known.factors.0.ln(), known.factors.1.ln()];
    let error = |x: &[f64]| {
        let off: f64 = parts
            .iter()
            .map(|(p, v, t)| ((p * x[0].exp() + v * x[1].exp()) / t).ln().powi(2))
            .sum();
        let changed: f64 = x.iter().zip(before).map(|(x, b)| (x - b).powi(2)).sum();
        off + known.weight * changed
    };
    let bounds = [(-MAX_FACTOR.ln(), MAX_FACTOR.ln()); 2];
    let best = minimise(before.to_vec(), &bounds, &error);
    Some((best[0].exp(), best[1].exp()))
}
