//! Time of one op on one device: a roofline with a size-dependent matmul efficiency.
//!
//! `time = launch + max(flops / rate, bytes / bandwidth)`. The rate of a matmul is
//! `peak * best * sustained` times what its shape leaves of it (see [`matmul_rate`]), where
//! `best` is the best measured rate over the peak, so no prediction exceeds a rate that somebody
//! measured. Attention runs at a share of the matmul rate ([`attention_time`]).
//!
//! Where a device computes in f32 only (CPU ranks), operands and results of other float types
//! are converted before and after: a time per element of them is added. Where its kernels were
//! measured one by one, each has a factor of its own (see `kernels`).

pub(crate) mod kernels;
mod tiles;

use ir::chain::Spared;
use ir::cluster::Cluster;
use ir::op::{MatmulShape, OpKind, Work};
use ir::{DType, Seconds};

/// Products that a fused backward executes over those that count (dV, dP, dQ, dK): it makes the
/// scores again. Dao 2023, section 3.1.
pub(crate) const ATTENTION_GRADIENT: f64 = 5.0 / 4.0;

/// Time of one execution of `kind` with operands and results of these local (padded) lengths.
///
/// Views and sources take no time. The dtype of the first float operand chooses the peak;
/// a type the device has no peak for runs at the slowest peak it has.
pub fn op_time(
    cluster: &Cluster,
    kind: &OpKind,
    operands: &[(DType, Vec<u64>)],
    results: &[(DType, Vec<u64>)],
) -> Seconds {
    if kind.is_source() || kind.is_view() {
        return Seconds(0.0);
    }
    let dtype = operands
        .iter()
        .chain(results)
        .map(|t| t.0)
        .find(|t| t.is_float())
        .unwrap_or(DType::F32);
    let converted = match moves(kind, operands, results) {
        true => 0.0,
        false => operands
            .iter()
            .chain(results)
            .map(|(t, lens)| conversion_s(cluster, *t, lens.iter().map(|&n| n as f64).product()))
            .sum(),
    };
    let work = kind.work(operands, results);
    let launch_s = cluster.device.launch_s;
    let seconds = match &cluster.device.kernels {
        Some(k) => launch_s + kernels::busy_time(cluster, k, kind, dtype, &work),
        None if work.attention_flops > 0.0 => {
            let is_gradient = matches!(kind, OpKind::AttentionGrad { .. });
            launch_s + attention_time(cluster, dtype, is_gradient, 1.0, &work)
        }
        None => work_time(cluster, dtype, &work).0,
    };
    Seconds(seconds + converted)
}

/// Whether these devices make one call of instructions that a program marks so: GPUs do, whose
/// multiprocessors are known.
pub fn makes_calls(cluster: &Cluster) -> bool {
    let d = &cluster.device;
    d.multiprocessors > 0 && d.kernels.is_none() && cluster.pool.is_none()
}

/// Time that an op adds to the call of the ones before it: no launch, and of the bytes that it moves
/// alone not those that are spared. (Products of 8,192 x 768 x 2,304 in bf16 take 47 us on an H100, and
/// 60 us with a residual: 37.7 MB more at 2.9 TB/s.)
pub fn chained_time(
    cluster: &Cluster,
    kind: &OpKind,
    operands: &[(DType, Vec<u64>)],
    results: &[(DType, Vec<u64>)],
    spared: Spared,
) -> Seconds {
    let work = kind.work(operands, results);
    let bytes_of = |(dtype, lens): &(DType, Vec<u64>)| {
        lens.iter().fold(dtype.bytes(), |a, &n| a.saturating_mul(n))
    };
    let unmoved = operands.iter().zip(spared);
    let unmoved = unmoved.map(|(x, times)| bytes_of(x).saturating_mul(u64::from(times)));
    let bytes = work
        .bytes
        .saturating_sub(unmoved.fold(0, u64::saturating_add));
    let arithmetic = work.vector_flops / cluster.device.vector_flops_per_s;
    Seconds(arithmetic.max(memory_time(cluster, bytes as f64)))
}

/// Seconds on the device, without the launch, of one attention or its gradient, by a fused kernel
/// with this rate over the device's best: scores stay on the chip, a causal kernel skips half of
/// them (less on the rank that holds the last part of the queries), and the backward direction
/// makes them again.
pub fn attention_time(
    cluster: &Cluster,
    dtype: DType,
    is_gradient: bool,
    rate: f64,
    work: &Work,
) -> f64 {
    let d = &cluster.device;
    let again = if is_gradient { ATTENTION_GRADIENT } else { 1.0 };
    let best = peak_rate(cluster, dtype) * d.attention_efficiency;
    // A type without any rate has no time of its own, as a matmul's.
    let products = match best > 0.0 {
        true => again * work.attention_flops / (best * rate),
        false => 0.0,
    };
    let arithmetic = work.causal_share * (products + work.vector_flops / d.vector_flops_per_s);
    arithmetic.max(memory_time(cluster, work.bytes as f64))
}

/// Whether an op only moves elements, whatever they are: nothing is converted then.
fn moves(kind: &OpKind, operands: &[(DType, Vec<u64>)], results: &[(DType, Vec<u64>)]) -> bool {
    let same = matches!((operands, results), ([x, ..], [y, ..]) if x.0 == y.0);
    same && (kind.only_moves() || matches!(kind, OpKind::Cast { .. }))
}

/// Seconds to convert `elements` of a type to f32 or back; 0 where the device computes with
/// the type as it is.
pub fn conversion_s(cluster: &Cluster, dtype: DType, elements: f64) -> f64 {
    let rate = cluster.device.conversion_s_per_element.get(&dtype);
    rate.map_or(0.0, |s| s * elements)
}

/// Time of a given amount of work that is no attention.
pub fn work_time(cluster: &Cluster, dtype: DType, work: &Work) -> Seconds {
    let d = &cluster.device;
    let mut arithmetic = work.vector_flops / d.vector_flops_per_s;
    if let Some(shape) = work.matmul {
        let rate = matmul_rate(cluster, dtype, shape);
        if rate > 0.0 {
            arithmetic += (work.matmul_flops + work.recomputed_flops) / rate;
        }
    }
    Seconds(d.launch_s + arithmetic.max(memory_time(cluster, work.bytes as f64)))
}

/// Seconds of moving `bytes` between a device and its memory.
pub fn memory_time(cluster: &Cluster, bytes: f64) -> f64 {
    bytes / (cluster.device.memory_bandwidth_bytes_per_s * cluster.device.memory_efficiency)
}

/// Ops that a compiler fuses with their neighbours: one result element from each operand's.
pub fn is_elementwise(kind: &OpKind) -> bool {
    matches!(
        kind,
        OpKind::Unary { .. }
            | OpKind::Binary { .. }
            | OpKind::ScaleRows
            | OpKind::ClampedSwiglu { .. }
            | OpKind::ClampedSwigluGrad { .. }
            | OpKind::ExpertBias
            | OpKind::Dropout { .. }
            | OpKind::Rotary { .. }
            | OpKind::Cast { .. }
    )
}

/// FLOP/s that a matmul of this shape reaches.
///
/// With a known number of multiprocessors the result is cut into tiles and these into waves
/// (see `tiles`); without, each of `m`, `n` has its half size. The pipeline along `k` has to
/// be filled either way: `k / (k + half)`.
pub fn matmul_rate(cluster: &Cluster, dtype: DType, shape: MatmulShape) -> f64 {
    let half = cluster.device.matmul_half_size;
    let share = |x: u64, h: f64| x as f64 / (x as f64 + h);
    let shape_share = if cluster.device.multiprocessors > 0 {
        tiles::share(&cluster.device, dtype, shape)
    } else {
        share(shape.m, half.m) * share(shape.n, half.n) * share(shape.k, half.k)
    };
    peak_rate(cluster, dtype) * shape_share
}

/// The best matmul rate of the device in FLOP/s: peak times best measured efficiency, and of
/// that what is sustained.
pub fn peak_rate(cluster: &Cluster, dtype: DType) -> f64 {
    let d = &cluster.device;
    let rate = |t: DType| {
        let sustained = d.sustained_share_of.get(&t).unwrap_or(&d.sustained_share);
        Some(d.peak_flops_per_s.get(&t)? * d.matmul_efficiency.get(&t)? * sustained)
    };
    rate(dtype).unwrap_or_else(|| {
        let slowest = d
            .peak_flops_per_s
            .keys()
            .filter_map(|&t| rate(t))
            .fold(f64::INFINITY, f64::min);
        if slowest.is_finite() { slowest } else { 0.0 }
    })
}

/// FLOP/s of the data sheet for a type; a type that it lacks has the lowest of the others.
pub fn peak_of(cluster: &Cluster, dtype: DType) -> f64 {
    let peaks = &cluster.device.peak_flops_per_s;
    let lowest = || peaks.values().copied().fold(f64::INFINITY, f64::min);
    peaks.get(&dtype).copied().unwrap_or_else(lowest)
}

/// Time of copying `bytes` within a device (each byte read and written once).
pub fn copy_time(cluster: &Cluster, bytes: u64) -> Seconds {
    let d = &cluster.device;
    Seconds(d.launch_s + memory_time(cluster, 2.0 * bytes as f64))
}

/// Time of writing `bytes` within a device (fills, loaded data).
pub fn write_time(cluster: &Cluster, bytes: u64) -> Seconds {
    let d = &cluster.device;
    Seconds(d.launch_s + memory_time(cluster, bytes as f64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::op::{Binary, Einsum};

    fn cluster() -> Cluster {
        let mut c = crate::testing::cluster(1);
        let d = &mut c.device;
        (
            d.memory_bandwidth_bytes_per_s,
            d.memory_efficiency,
            d.launch_s,
        ) = (1e9, 0.5, 1e-6);
        (d.matmul_half_size.m, d.matmul_half_size.k) = (8.0, 16.0);
        c
    }

    fn f32s(lens: &[u64]) -> (DType, Vec<u64>) {
        (DType::F32, lens.to_vec())
    }

    #[test]
    fn a_matmul_runs_at_the_rate_of_its_shape() {
        let einsum = Einsum::parse("mk,kn->mn").unwrap();
        let t = op_time(
            &cluster(),
            &OpKind::DotGeneral { einsum },
            &[f32s(&[8, 4800]), f32s(&[4800, 64])],
            &[f32s(&[8, 64])],
        );
        // 2*8*4800*64 FLOPs at 1e12 * 0.5 * 8/16 * 4800/4816; 4*(8*4800 + 4800*64 + 8*64) bytes
        // at 0.5e9, which take longer.
        let arithmetic = 2.0 * 8.0 * 4800.0 * 64.0 / (0.5e12 * 0.5 * 4800.0 / 4816.0);
        let memory = 4.0 * (8.0 * 4800.0 + 4800.0 * 64.0 + 8.0 * 64.0) / 0.5e9;
        assert!(memory > arithmetic);
        assert!((t.0 - 1e-6 - memory).abs() < 1e-12);
        let mut fast = cluster();
        fast.device.memory_bandwidth_bytes_per_s = 1e15;
        let einsum = Einsum::parse("mk,kn->mn").unwrap();
        let t = op_time(
            &fast,
            &OpKind::DotGeneral { einsum },
            &[f32s(&[8, 4800]), f32s(&[4800, 64])],
            &[f32s(&[8, 64])],
        );
        assert!((t.0 - 1e-6 - arithmetic).abs() < 1e-12);
    }

    #[test]
    fn attention_pays_for_half_the_scores() {
        let mut fast = cluster();
        fast.device.memory_bandwidth_bytes_per_s = 1e15;
        let q = f32s(&[1, 128, 2, 64]);
        let lse = f32s(&[1, 128, 2]);
        let t = op_time(
            &fast,
            &OpKind::Attention {
                scale: 1.0,
                dropout: 0.0,
                key: String::new(),
                order: Default::default(),
                keys: Default::default(),
                bounds: Default::default(),
            },
            &[q.clone(), q.clone(), q.clone()],
            &[q, lse],
        );
        // 2 heads, 128 x 128 scores, 64 wide, two products; at half of 0.5e12 FLOP/s. Plus four
        // operations for each score, of which the kernel skips the same half.
        let scores = 2.0 * 128.0 * 128.0;
        let expected =
            1e-6 + 0.5 * ((2.0 * 2.0 * scores * 64.0) / (0.5e12 * 0.5) + 4.0 * scores / 1e9);
        assert!((t.0 - expected).abs() < 1e-12);
    }

    #[test]
    fn attention_over_a_split_sequence_is_as_slow_as_its_last_queries() {
        let mut fast = cluster();
        fast.device.memory_bandwidth_bytes_per_s = 1e15;
        fast.device.vector_flops_per_s = 1e18;
        let (q, k) = (f32s(&[1, 32, 2, 64]), f32s(&[1, 128, 2, 64]));
        let t = op_time(
            &fast,
            &OpKind::Attention {
                scale: 1.0,
                dropout: 0.0,
                key: String::new(),
                order: Default::default(),
                keys: Default::default(),
                bounds: Default::default(),
            },
            &[q.clone(), k.clone(), k],
            &[q, f32s(&[1, 32, 2])],
        );
        // 32 queries of 128 keys: the last 32 see 97 to 128 of them, 112.5 or about 7/8.
        let full = 2.0 * 2.0 * 2.0 * 32.0 * 128.0 * 64.0 / (0.5e12 * 0.5);
        assert!((t.0 - 1e-6 - 7.0 / 8.0 * full).abs() < 1e-12);
    }

    #[test]
    fn elementwise_is_bound_by_memory_and_views_are_free() {
        let x = f32s(&[1000, 1000]);
        let mut c = cluster();
        c.device.vector_flops_per_s = 1e12;
        let t = op_time(
            &c,
            &OpKind::Binary { f: Binary::Add },
            &[x.clone(), x.clone()],
            std::slice::from_ref(&x),
        );
        assert!((t.0 - 1e-6 - 12e6 / 0.5e9).abs() < 1e-12);
        assert_eq!(
            op_time(
                &c,
                &OpKind::Layout,
                std::slice::from_ref(&x),
                std::slice::from_ref(&x)
            )
            .0,
            0.0
        );
        assert!((copy_time(&c, 1000).0 - 1e-6 - 2000.0 / 0.5e9).abs() < 1e-15);
        assert!((write_time(&c, 1000).0 - 1e-6 - 1000.0 / 0.5e9).abs() < 1e-15);
    }

    #[test]
    fn devices_that_compute_in_f32_pay_for_conversions() {
        let mut c = cluster();
        c.device.conversion_s_per_element.insert(DType::Bf16, 3e-9);
        let time = |c: &Cluster, kind: &OpKind, x: DType, y: DType| {
            op_time(c, kind, &[(x, vec![100, 10])], &[(y, vec![100, 10])]).0
        };
        let gain = |kind: &OpKind, x, y| time(&c, kind, x, y) - time(&cluster(), kind, x, y);
        let square = OpKind::Unary {
            f: ir::op::Unary::Square,
        };
        // 1000 elements in and out; of a cast to or from f32 one side; of a move none.
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} is not {b}");
        close(gain(&square, DType::Bf16, DType::Bf16), 2000.0 * 3e-9);
        close(gain(&square, DType::F32, DType::F32), 0.0);
        close(gain(&square, DType::F16, DType::F16), 0.0);
        let cast = |dtype| OpKind::Cast { dtype };
        close(
            gain(&cast(DType::Bf16), DType::F32, DType::Bf16),
            1000.0 * 3e-9,
        );
        close(
            gain(&cast(DType::F32), DType::Bf16, DType::F32),
            1000.0 * 3e-9,
        );
        close(gain(&cast(DType::Bf16), DType::Bf16, DType::Bf16), 0.0);
        let transpose = OpKind::Transpose { perm: vec![1, 0] };
        close(gain(&transpose, DType::Bf16, DType::Bf16), 0.0);
    }

    #[test]
    fn a_type_may_hold_another_share_of_its_rate() {
        let mut c = cluster();
        c.device.sustained_share = 0.5;
        let whole = peak_rate(&c, DType::F32);
        c.device.sustained_share_of.insert(DType::F32, 0.75);
        assert!((peak_rate(&c, DType::F32) / whole - 1.5).abs() < 1e-12);
        c.device.sustained_share_of.clear();
        c.device.sustained_share_of.insert(DType::F8e4m3, 0.75);
        assert_eq!(peak_rate(&c, DType::F32), whole);
    }

    #[test]
    fn a_type_without_a_peak_runs_at_the_slowest() {
        let mut c = cluster();
        c.device.peak_flops_per_s.insert(DType::Bf16, 4e12);
        c.device.matmul_efficiency.insert(DType::Bf16, 0.25);
        assert_eq!(peak_rate(&c, DType::Bf16), 1e12);
        assert_eq!(peak_rate(&c, DType::F16), 0.5e12);
    }
}
