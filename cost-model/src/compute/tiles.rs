//! The share of the device's rate that a matmul's shape leaves: tiles, waves, and the fill along
//! `k`.
//!
//! A library cuts the `m x n` result into tiles, one for each multiprocessor at a time. What is
//! lost: padding of the last tiles, processors that idle in the last wave, and the start of the
//! pipeline along `k`. Smaller tiles lose less of these but more of the rate, because they load
//! more operands for each product; splitting `k` makes more tiles of shorter length. The best of
//! a few choices counts, as a library's heuristic would choose.
//!
//! ```text
//! 2048 x 1536 in tiles of 128 x 128: 192 tiles on 108 processors, 2 waves: 192 / 216 = 0.89
//! ```

use ir::DType;
use ir::cluster::Device;
use ir::op::MatmulShape;

/// Tiles with the share of the device's rate that they reach alone: a tile of `a x b` loads
/// `a + b` operands for `a * b` products.
const TILES: [(u64, u64, f64); 6] = [
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.96),
    (128, 64, 0.86),
    (64, 128, 0.86),
    (64, 64, 0.72),
];
/// Ways of cutting `k`.
const SPLITS: [u64; 4] = [1, 2, 4, 8];
/// Elements that rows of half-precision operands come in: 16 bytes.
const ALIGNED: u64 = 8;

/// Share of the best rate that a matmul of this shape reaches on a device that says its
/// multiprocessors.
pub(super) fn share(device: &Device, dtype: DType, shape: MatmulShape) -> f64 {
    let (m, n, k) = (shape.m.max(1), shape.n.max(1), shape.k.max(1));
    let (processors, half_k) = (f64::from(device.multiprocessors), device.matmul_half_size.k);
    let one = |&(tm, tn, rate): &(u64, u64, f64), split: u64| {
        let tiles = m.div_ceil(tm) as f64 * n.div_ceil(tn) as f64 * shape.batch.max(1) as f64;
        let padding = m as f64 * n as f64
            / (m.div_ceil(tm) as f64 * tm as f64 * n.div_ceil(tn) as f64 * tn as f64);
        let waves = tiles * split as f64 / processors;
        let length = k as f64 / split as f64;
        rate * padding * (waves / waves.ceil()) * (length / (length + half_k))
    };
    let best = TILES
        .iter()
        .flat_map(|tile| SPLITS.iter().map(move |&split| one(tile, split)))
        .fold(0.0, f64::max);
    let is_half = matches!(dtype, DType::F16 | DType::Bf16);
    if is_half && !(n.is_multiple_of(ALIGNED) && k.is_multiple_of(ALIGNED)) {
        best * device.unaligned_matmul_share
    } else {
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(half_k: f64, dtype: DType, shape: MatmulShape) -> f64 {
        let mut device = crate::testing::cluster(1).device;
        (device.multiprocessors, device.unaligned_matmul_share) = (108, 0.2);
        device.matmul_half_size.k = half_k;
        share(&device, dtype, shape)
    }

    fn at(batch: u64, m: u64, n: u64, k: u64) -> f64 {
        on(0.0, DType::Bf16, MatmulShape { batch, m, n, k })
    }

    #[test]
    fn waves_and_padding_are_lost() {
        // 9 x 12 tiles of 256 x 128 fill 108 processors exactly; one row more begins a wave.
        assert_eq!(at(1, 9 * 256, 12 * 128, 4096), 1.0);
        assert!(at(1, 9 * 256 + 1, 12 * 128, 4096) < 0.96);
        // Eight tiles of 64 x 64, k cut in eight: 64 processors of 108 work at 0.72.
        assert!((at(1, 256, 128, 4096) - 0.72 * 64.0 / 108.0).abs() < 1e-12);
        // The same with the fill of pieces of 512: 512 / (512 + 128).
        let filled = on(
            128.0,
            DType::Bf16,
            MatmulShape {
                batch: 1,
                m: 256,
                n: 128,
                k: 4096,
            },
        );
        assert!((filled - 0.72 * 64.0 / 108.0 * 0.8).abs() < 1e-12);
    }

    #[test]
    fn rows_that_are_not_whole_cost_rate() {
        assert!(at(1, 4096, 4096, 4100) < 0.25);
        let f32 = on(
            0.0,
            DType::F32,
            MatmulShape {
                batch: 1,
                m: 4096,
                n: 4096,
                k: 4100,
            },
        );
        assert!(f32 > 0.8);
    }
}
