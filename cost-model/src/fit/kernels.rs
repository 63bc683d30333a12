//! What every kernel takes over what the device's rates say.
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
        let Some((products, vector)) = attention(points, cluster, attention_block_rows, name, busy)
        else {
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
    // The search ends a step short of its bounds.
    const NEAR: f64 = 1.0 + 1e-6;
    (NEAR / MAX_FACTOR..MAX_FACTOR / NEAR).contains(&factor)
}

/// Of each kernel outside matrix products: its time over what the rates give, unbounded.
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

/// Factors of an attention's products, relative to matmuls of their shape, and of the rest.
pub(super) fn attention(
    points: &[MeasuredPoint],
    cluster: &Cluster,
    attention_block_rows: u32,
    name: &str,
    busy: &dyn Fn(&MeasuredPoint) -> f64,
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
    let error = |x: &[f64]| {
        parts
            .iter()
            .map(|(p, v, t)| ((p * x[0].exp() + v * x[1].exp()) / t).ln().powi(2))
            .sum()
    };
    let bounds = [(-MAX_FACTOR.ln(), MAX_FACTOR.ln()); 2];
    let best = minimise(vec![0.5, 0.5], &bounds, &error);
    Some((best[0].exp(), best[1].exp()))
}
