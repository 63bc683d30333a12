//! ZB-H1: 1F1B with input and weight gradients apart (Qi et al. 2023, "Zero Bubble Pipeline
//! Parallelism", section 2.2, figure 2).
//!
//! Only input gradients are waited for by other stages. So a stage plays them as early as 1F1B
//! does its backwards, and the weight gradients where it would wait. Stage `i` of `p` begins with
//! `p - i` forwards, and then stays `i` weight gradients behind: every stage has `p` microbatches
//! between forward and weight gradient, as many as the first one in 1F1B.
//!
//! ```text
//! stage 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3
//! stage 1  .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
//! stage 2  .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
//! ```
//!
//! The pipeline waits for `p - 1` times forward and input gradient less weight gradient, where
//! 1F1B waits for their sum: a third of it where all three take as long.

use super::one_f_one_b::flush;
use super::{Latency, PassKind, Schedule, Slot, Travel};

pub(super) struct ZbH1;

impl Schedule for ZbH1 {
    fn name(&self) -> &'static str {
        "zb_h1"
    }

    fn passes(&self) -> &'static [PassKind] {
        &[
            PassKind::Forward,
            PassKind::InputGradient,
            PassKind::WeightGradient,
        ]
    }

    fn slots(&self, mesh: usize, n_meshes: usize, m: u32) -> Vec<Slot> {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX).min(m);
        let (ahead, behind) = (count(n_meshes - mesh), count(mesh));
        let of = |pass| move |i| Slot::new(pass, 0, i);
        let forward = of(PassKind::Forward);
        let weight = of(PassKind::WeightGradient);
        let turns = (0..m).flat_map(|j| {
            let input = Slot::new(PassKind::InputGradient, 0, j);
            let next = j.checked_add(ahead).filter(|&i| i < m);
            [
                Some(input),
                j.checked_sub(behind).map(weight),
                next.map(forward),
            ]
        });
        (0..ahead)
            .map(forward)
            .chain(turns.flatten())
            .chain((m - behind..m).map(weight))
            .collect()
    }

    /// From forward to input gradient `min(m, n_stages - stage)` as in 1F1B, to weight gradient
    /// `min(m, n_stages)`; from the one gradient to the other `min(m, stage + 1)`.
    fn in_flight(
        &self,
        from: PassKind,
        to: PassKind,
        stage: usize,
        n_stages: usize,
        m: u32,
    ) -> u32 {
        let most = match (from, to) {
            (PassKind::Forward, PassKind::InputGradient) => n_stages.saturating_sub(stage),
            (PassKind::Forward, _) => n_stages,
            _ => stage.saturating_add(1),
        };
        m.min(u32::try_from(most.max(1)).unwrap_or(u32::MAX))
    }

    /// Neighbours come to the ends of their slots at different times.
    fn travel(&self) -> Travel {
        Travel::AtOnce
    }

    /// That of 1F1B, from above: stages do not say how much of their time weight gradients take,
    /// of which `2 (p - 1)` hide in what others wait for.
    fn latency(&self, _n_meshes: usize, m: u32) -> Latency {
        flush(m)
    }
}
