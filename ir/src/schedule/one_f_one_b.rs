//! 1F1B: after a warmup each stage alternates one forward with one backward
//! (PipeDream-Flush, Narayanan et al. 2021, figure 4).
//!
//! ```text
//! stage 0  F0 F1 F2 .. .. B0 F3 .. B1 .. .. B2 .. B3      warmup 2, at most 3 in flight
//! stage 1  .. F0 F1 .. B0 F2 .. B1 F3 .. B2 .. B3         warmup 1, at most 2
//! stage 2  .. .. F0 B0 F1 .. B1 F2 .. B2 F3 B3            warmup 0, at most 1
//! ```

use super::{Latency, PassKind, Schedule, ScheduleKind, Slot};

pub(super) struct OneFOneB;

impl Schedule for OneFOneB {
    fn name(&self) -> &'static str {
        "1f1b"
    }

    fn slots(&self, mesh: usize, n_meshes: usize, m: u32) -> Vec<Slot> {
        let warmup = u32::try_from(n_meshes - 1 - mesh)
            .unwrap_or(u32::MAX)
            .min(m);
        let forward = |i| Slot::new(PassKind::Forward, 0, i);
        let backward = |i| Slot::new(PassKind::Backward, 0, i);
        let steady = (warmup..m).flat_map(|i| [forward(i), backward(i - warmup)]);
        (0..warmup)
            .map(forward)
            .chain(steady)
            .chain((m - warmup..m).map(backward))
            .collect()
    }

    /// `min(m, n_stages - stage)`.
    fn in_flight(&self, _: PassKind, _: PassKind, stage: usize, n_stages: usize, m: u32) -> u32 {
        m.min(n_stages.saturating_sub(stage).max(1) as u32)
    }

    fn latency(&self, _n_meshes: usize, m: u32) -> Latency {
        flush(m)
    }

    fn interleaved(&self, virtual_stages: u32) -> Option<ScheduleKind> {
        Some(ScheduleKind::Interleaved { virtual_stages })
    }
}

/// The latency of a pipeline that one microbatch fills, through all stages, and in which each of
/// the others takes what the slowest stage does (Zheng et al. 2022, equation 2).
pub(super) fn flush(m: u32) -> Latency {
    Latency {
        busiest: f64::from(m.saturating_sub(1)),
        slowest: 0.0,
    }
}
