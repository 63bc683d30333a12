//! Kernels that were measured one by one (CPU ranks): what they take over what the device's
//! rates say.

use super::{matmul_rate, memory_time};
use ir::DType;
use ir::cluster::{Cluster, Kernels};
use ir::op::{Bounds, Keys, MatmulShape, OpKind, Work};

/// Seconds of a kernel without the launch.
pub(super) fn busy_time(
    cluster: &Cluster,
    kernels: &Kernels,
    kind: &OpKind,
    dtype: DType,
    work: &Work,
) -> f64 {
    let name = kind.kernel_name();
    let rate = work.matmul.map_or(0.0, |s| matmul_rate(cluster, dtype, s));
    let memory = memory_time(cluster, work.bytes as f64);
    let vector = kernels.factor(name) * work.vector_flops / cluster.device.vector_flops_per_s;
    match work.matmul {
        Some(scores) if work.attention_flops > 0.0 && rate > 0.0 => {
            // Of rows of queries that are computed at once, keys that none sees are left out.
            let rows = u64::from(kernels.attention_block_rows);
            let seen = kind
                .bounds()
                .map_or(1.0, |b| seen_share(b, kind, rows, scores));
            let executed = seen * executed_share(kernels.attention_block_rows, scores.m);
            let products = executed * work.attention_flops
                / (rate * cluster.device.attention_efficiency)
                * kernels.factor(products_of(name));
            (products + seen * vector).max(memory)
        }
        Some(_) if rate > 0.0 => {
            let products = work.matmul_flops + work.recomputed_flops;
            kernels.factor(name) * (products / rate).max(memory)
        }
        _ => vector.max(kernels.factor(name) * memory),
    }
}

/// Share of the scores of a causal attention, in blocks of this many rows, that bounds leave. On a ring
/// it is that of all parts together, each of which counts as much.
fn seen_share(bounds: Bounds, kind: &OpKind, rows: u64, scores: MatmulShape) -> f64 {
    let (queries, keys) = match kind.keys() {
        Keys::All => (scores.m, scores.n),
        Keys::Ring { ranks, .. } => {
            let all = scores.n.saturating_mul(u64::from(ranks));
            (all, all)
        }
    };
    bounds.computed_share(rows, queries, keys)
}

/// Share of causal attention's scores that are computed, in blocks of this many rows.
pub(crate) fn executed_share(block_rows: u32, rows: u64) -> f64 {
    let block = f64::from(block_rows).min(rows as f64);
    0.5 * (1.0 + block / (rows as f64).max(1.0))
}

/// Name of the factor of an attention's products.
pub(crate) fn products_of(name: &str) -> &'static str {
    match name {
        "attention_grad" => "attention_grad products",
        _ => "attention products",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::op_time;
    use ir::op::Binary;

    fn f32s(lens: &[u64]) -> (DType, Vec<u64>) {
        (DType::F32, lens.to_vec())
    }

    #[test]
    fn a_kernel_takes_its_own_time() {
        let mut c = crate::testing::cluster(1);
        let factor = |name: &str, f: f64| (name.to_string(), f);
        c.device.kernels = Some(Kernels {
            attention_block_rows: 64,
            time_factor: [
                factor("add", 3.0),
                factor("attention", 2.0),
                factor("attention products", 1.5),
            ]
            .into(),
        });
        let x = f32s(&[1000]);
        let time = |f| {
            op_time(
                &c,
                &OpKind::Binary { f },
                &[x.clone(), x.clone()],
                std::slice::from_ref(&x),
            )
            .0
        };
        // 1000 FLOPs at 1e9.
        assert!((time(Binary::Add) - 3e-6).abs() < 1e-15);
        assert!((time(Binary::Sub) - 1e-6).abs() < 1e-15);
        // Two blocks of 64 rows see 64 and 128 of 128 keys.
        assert_eq!(
            (executed_share(64, 128), executed_share(64, 32)),
            (0.75, 1.0)
        );
        let (q, lse) = (f32s(&[1, 128, 2, 64]), f32s(&[1, 128, 2]));
        let kind = OpKind::Attention {
            scale: 1.0,
            dropout: 0.0,
            key: String::new(),
            order: Default::default(),
            keys: Default::default(),
            bounds: Default::default(),
        };
        let t = op_time(&c, &kind, &[q.clone(), q.clone(), q.clone()], &[q, lse]).0;
        // 4 * 2 heads * 128 * 128 * 64 FLOPs at 5e11 * 0.5; 4 per score at 1e9.
        let products = 0.75 * 4.0 * 2.0 * 128.0 * 128.0 * 64.0 / (0.5e12 * 0.5) * 1.5;
        let vector = 2.0 * 4.0 * 2.0 * 128.0 * 128.0 / 1e9;
        assert!((t - products - vector).abs() < 1e-12, "{t}");
        // Two rows of blocks of 64 keys that see one each, of three in all.
        let mut kind = kind;
        if let OpKind::Attention { bounds, .. } = &mut kind {
            bounds.blocks = Some(ir::op::Blocks {
                size: 64,
                local: 1,
                aligned: false,
                first: 0,
                last: 0,
            });
        }
        let (q, lse) = (f32s(&[1, 128, 2, 64]), f32s(&[1, 128, 2]));
        let t = op_time(&c, &kind, &[q.clone(), q.clone(), q.clone()], &[q, lse]).0;
        let bounded = (products + vector) * 2.0 / 3.0;
        assert!((t - bounded).abs() < 1e-12, "{t}");
    }
}
