//! Attention by kernel family.
//!
//! Fused (flash): the device's own figures at a rate of the family's. Unfused: each product is a
//! batched matmul over all scores, causal or not, and softmax, mask and dropout pass over the
//! scores in memory in between.

use crate::{AttentionKernel, Software};
use cost_model::compute::{attention_time, matmul_rate, memory_time};
use ir::DType;
use ir::cluster::Cluster;
use ir::op::{MatmulShape, Work};

/// Seconds on the device, without the launch, of one attention or its gradient. `scores` is the
/// product of queries and keys, `work` the op's.
pub(super) fn busy_time(
    cluster: &Cluster,
    software: &Software,
    dtype: DType,
    scores: MatmulShape,
    is_gradient: bool,
    work: &Work,
) -> f64 {
    match software.attention {
        AttentionKernel::Fused {
            rate,
            backward_share,
        } => {
            let share = if is_gradient { backward_share } else { 1.0 };
            attention_time(cluster, dtype, is_gradient, rate * share, work)
        }
        AttentionKernel::Unfused {
            forward_passes,
            backward_passes,
        } => {
            // Scores from head-wide rows, and rows of heads from scores.
            let (wide, narrow) = (
                scores,
                MatmulShape {
                    n: scores.k,
                    k: scores.n,
                    ..scores
                },
            );
            let (pairs, passes) = if is_gradient {
                (2.0, backward_passes)
            } else {
                (1.0, forward_passes)
            };
            let elements = scores.batch as f64 * scores.m as f64 * scores.n as f64;
            let bytes = elements * dtype.bytes() as f64;
            let products =
                product_time(cluster, dtype, wide) + product_time(cluster, dtype, narrow);
            pairs * products + memory_time(cluster, passes * bytes)
        }
    }
}

/// Kernels of one attention or its gradient: the products, softmax and dropout between them,
/// and the transposes before and after where they are apart.
pub(super) fn kernels(software: &Software, is_gradient: bool) -> f64 {
    match (software.attention, is_gradient) {
        (AttentionKernel::Fused { .. }, false) => 1.0,
        (AttentionKernel::Fused { .. }, true) => 2.0,
        (AttentionKernel::Unfused { .. }, false) => 2.0 + 2.0 + 2.0,
        (AttentionKernel::Unfused { .. }, true) => 4.0 + 2.0 + 3.0,
    }
}

/// A batched matmul that reads its operands and writes its result.
fn product_time(cluster: &Cluster, dtype: DType, shape: MatmulShape) -> f64 {
    let (b, m, n, k) = (
        shape.batch as f64,
        shape.m as f64,
        shape.n as f64,
        shape.k as f64,
    );
    let bytes = b * (m * k + k * n + m * n) * dtype.bytes() as f64;
    let rate = matmul_rate(cluster, dtype, shape);
    if rate > 0.0 {
        (2.0 * b * m * n * k / rate).max(memory_time(cluster, bytes))
    } else {
        memory_time(cluster, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_backward_direction_has_a_rate_of_its_own() {
        let mut c = crate::testing::cluster(1);
        c.device.memory_bandwidth_bytes_per_s = 1e15;
        c.device.vector_flops_per_s = 1e18;
        let shape = MatmulShape {
            batch: 2,
            m: 128,
            n: 128,
            k: 64,
        };
        let work = Work {
            attention_flops: 1e9,
            causal_share: 0.5,
            ..Work::default()
        };
        let busy = |backward_share: f64, is_gradient: bool| {
            let mut software = Software::plain("fused");
            software.attention = AttentionKernel::Fused {
                rate: 0.5,
                backward_share,
            };
            busy_time(&c, &software, DType::F32, shape, is_gradient, &work)
        };
        // Half of the products, at half of the device's best rate; five for four backward.
        let rate =
            cost_model::compute::peak_rate(&c, DType::F32) * c.device.attention_efficiency * 0.5;
        let close = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-12, "{a} is not {b}");
        close(busy(0.8, false), 0.5e9 / rate);
        close(busy(0.8, true), 0.5e9 * 1.25 / (0.8 * rate));
        close(busy(1.0, true), 0.5e9 * 1.25 / rate);
    }
}
