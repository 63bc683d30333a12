//! Time of one op on one device: a roofline with a size-dependent matmul efficiency.
//!
//! `time = launch + max(flops / rate, bytes / bandwidth)`; the rate of a matmul `m x k x n`
//! is `peak * best * m/(m+m_half) * n/(n+n_half) * k/(k+k_half)`, where `best` is the best
//! measured rate over the peak (so no prediction exceeds a rate that somebody measured) and
//! the half sizes come from a fit. Fused attention runs at a share of the matmul rate and
//! executes half of the full score products, because of the causal mask.

use ir::cluster::Cluster;
use ir::op::{MatmulShape, OpKind, Work};
use ir::{DType, Seconds};

/// Share of the full score products that a causal kernel executes.
const CAUSAL_SHARE: f64 = 0.5;

/// Time of one execution of `kind` with operands and results of these local (padded) lengths.
///
/// Views and sources take no time. The dtype of the first float operand chooses the peak;
/// a type the device has no peak for runs at the slowest peak it has.
pub fn op_time(cluster: &Cluster, kind: &OpKind, operands: &[(DType, Vec<u64>)], results: &[(DType, Vec<u64>)]) -> Seconds {
    if kind.is_source() || kind.is_view() {
        return Seconds(0.0);
    }
    let dtype = operands.iter().chain(results).map(|t| t.0).find(|t| t.is_float()).unwrap_or(DType::F32);
    work_time(cluster, dtype, &kind.work(operands, results))
}

/// Time of a given amount of work.
pub fn work_time(cluster: &Cluster, dtype: DType, work: &Work) -> Seconds {
    let d = &cluster.device;
    let mut arithmetic = work.vector_flops / d.vector_flops_per_s;
    if let Some(shape) = work.matmul {
        let rate = matmul_rate(cluster, dtype, shape);
        if rate > 0.0 {
            arithmetic += work.matmul_flops / rate;
            arithmetic += CAUSAL_SHARE * work.attention_flops / (peak_rate(cluster, dtype) * d.attention_efficiency);
        }
    }
    let memory = work.bytes as f64 / (d.memory_bandwidth_bytes_per_s * d.memory_efficiency);
    Seconds(d.launch_s + arithmetic.max(memory))
}

/// FLOP/s that a matmul of this shape reaches.
pub fn matmul_rate(cluster: &Cluster, dtype: DType, shape: MatmulShape) -> f64 {
    let half = cluster.device.matmul_half_size;
    let share = |x: u64, h: f64| x as f64 / (x as f64 + h);
    peak_rate(cluster, dtype) * share(shape.m, half.m) * share(shape.n, half.n) * share(shape.k, half.k)
}

/// The best matmul rate of the device in FLOP/s: peak times best measured efficiency.
pub fn peak_rate(cluster: &Cluster, dtype: DType) -> f64 {
    let d = &cluster.device;
    let rate = |t: DType| Some(d.peak_flops_per_s.get(&t)? * d.matmul_efficiency.get(&t)?);
    rate(dtype).unwrap_or_else(|| {
        let slowest = d.peak_flops_per_s.keys().filter_map(|&t| rate(t)).fold(f64::INFINITY, f64::min);
        if slowest.is_finite() { slowest } else { 0.0 }
    })
}

/// Time of copying `bytes` within a device (each byte read and written once).
pub fn copy_time(cluster: &Cluster, bytes: u64) -> Seconds {
    let d = &cluster.device;
    Seconds(d.launch_s + 2.0 * bytes as f64 / (d.memory_bandwidth_bytes_per_s * d.memory_efficiency))
}

/// Time of writing `bytes` within a device (fills, loaded data).
pub fn write_time(cluster: &Cluster, bytes: u64) -> Seconds {
    let d = &cluster.device;
    Seconds(d.launch_s + bytes as f64 / (d.memory_bandwidth_bytes_per_s * d.memory_efficiency))
}
