//! The peak that MFU and HFU are relative to, and their highest possible values.
//!
//! A type that a device has no peak for (bf16 on V100) is computed at the slowest rate that it
//! has, so that rate's peak is what utilisation is relative to.
//!
//! No step can do its FLOPs faster than the device's best measured matmul rate. A utilisation
//! above that is a mistake: of the cluster's figures, of the model's FLOPs or of a clock. FLOPs
//! that are counted but need not be executed, those under the causal mask, do not count here.

use crate::StepWork;
use crate::compute::peak_rate;
use ir::cluster::Cluster;
use ir::{DType, DeviceMesh, Rank};

/// Share of attention's counted FLOPs that a causal kernel executes at least.
const CAUSAL_SHARE: f64 = 0.5;

/// The type whose peak utilisation in `dtype` is relative to: itself, or where the device has no
/// peak for it, the one with the slowest rate. `None` when it has no peak at all.
pub fn peak_dtype(cluster: &Cluster, dtype: DType) -> Option<DType> {
    let peaks = &cluster.device.peak_flops_per_s;
    if peaks.contains_key(&dtype) {
        return Some(dtype);
    }
    let rate = |t: &DType| peak_rate(cluster, *t);
    peaks
        .keys()
        .copied()
        .min_by(|a, b| rate(a).total_cmp(&rate(b)))
}

/// Peak FLOP/s of `n` devices that MFU in `dtype` is relative to, a pool's processors once.
pub fn peak_flops_per_s(cluster: &Cluster, dtype: DType, n: u32) -> Option<f64> {
    of_each_group(cluster, n, |seen, n| {
        seen.peak_flops_per_s(peak_dtype(seen, dtype)?, n)
    })
}

/// The sum over the first `n` ranks, group by group, of what one is worth.
fn of_each_group(
    cluster: &Cluster,
    n: u32,
    worth: impl Fn(&Cluster, u32) -> Option<f64>,
) -> Option<f64> {
    let ranks = DeviceMesh {
        first_rank: Rank(0),
        n_devices: n,
    };
    let parts = cluster.by_group(ranks).into_iter();
    let parts = parts.map(|(_, part)| worth(&cluster.seen_by(part), part.n_devices));
    parts.reduce(|a, b| Some(a? + b?))?
}

/// A step that is faster than the devices' best matmuls.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TooFast {
    /// FLOPs per second that the step must have executed.
    pub rate: f64,
    /// FLOPs per second of the devices' best measured matmuls.
    pub best: f64,
}

impl TooFast {
    /// The mistake in words; `what` says whose step it is: `predicted`, `measured`.
    pub fn words(&self, what: &str) -> String {
        format!(
            "mistake: the {what} step executes at least {:.3e} FLOP/s, above the {:.3e} of the best matmuls that were measured on these devices; its utilisation cannot be right",
            self.rate, self.best
        )
    }
}

/// Whether a step of `step_s` seconds on `n` devices is faster than it can be.
pub fn too_fast(cluster: &Cluster, work: &StepWork, n: u32, step_s: f64) -> Option<TooFast> {
    let best = of_each_group(cluster, n, |seen, n| {
        let t = peak_dtype(seen, work.dtype)?;
        let share = seen.device.matmul_efficiency.get(&t)?;
        Some(share * seen.peak_flops_per_s(t, n)?)
    });
    let best = best.unwrap_or(0.0);
    let executed = work.hardware_flops.0 - (1.0 - CAUSAL_SHARE) * work.hardware_attention_flops.0;
    let rate = executed / step_s;
    (step_s > 0.0 && best > 0.0 && rate > best * (1.0 + 1e-9)).then_some(TooFast { rate, best })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::Flops;

    fn work(dtype: DType) -> StepWork {
        StepWork {
            model_flops: Flops(1.2e12),
            hardware_flops: Flops(1.2e12),
            hardware_attention_flops: Flops(0.4e12),
            tokens: 1,
            dtype,
        }
    }

    #[test]
    fn a_step_faster_than_its_matmuls_is_a_mistake() {
        // Two devices of 1e12 FLOP/s at best 0.5; 1e12 FLOPs to execute: one second at least.
        let c = crate::testing::cluster(2);
        assert_eq!(too_fast(&c, &work(DType::F32), 2, 1.01), None);
        let found = too_fast(&c, &work(DType::F32), 2, 0.5).unwrap();
        assert_eq!((found.rate, found.best), (2e12, 1e12));
        assert!(found.words("predicted").contains("2.000e12"));
        assert_eq!(too_fast(&c, &work(DType::F32), 2, 0.0), None);
    }

    #[test]
    fn types_without_a_peak_have_the_slowest() {
        let mut c = crate::testing::cluster(2);
        c.device.peak_flops_per_s.insert(DType::F16, 8e12);
        c.device.matmul_efficiency.insert(DType::F16, 0.5);
        assert_eq!(peak_dtype(&c, DType::Bf16), Some(DType::F32));
        assert_eq!(peak_flops_per_s(&c, DType::Bf16, 2), Some(2e12));
        assert_eq!(peak_flops_per_s(&c, DType::F16, 1), Some(8e12));
        assert!(too_fast(&c, &work(DType::Bf16), 2, 0.5).is_some());
        assert!(too_fast(&c, &work(DType::F16), 2, 0.5).is_none());
    }
}
