//! ZB-V: two stages on every mesh, placed as a V, with input and weight gradients apart (Qi et
//! al. 2023, "Zero Bubble Pipeline Parallelism", section 6; Qi et al. 2024, "Pipeline Parallelism
//! with Controllable Memory", section 3).
//!
//! Mesh `i` has, of `2 p` stages, stages `i` and `2 p - 1 - i`. Mesh 0 begins and ends the
//! pipeline, so what a microbatch keeps lives long in the one chunk of a mesh where it lives short
//! in the other, and together they hold as much everywhere as the first stage of 1F1B. After its
//! warmup a mesh repeats forward, both gradients of chunk 0, and the same of chunk 1; at its end,
//! where it waits for gradients, the weight gradients are kept for last.
//!
//! ```text
//! mesh 0  0F0 0F1 0F2 1F0 1I0 1W0 1F1 1I1 1W1 0F3 0I0 0W0 1F2 1I2 1W2 0I1 0W1 1F3 1I3 ..
//! mesh 1   .. 0F0 1F0 0F1 1F1 1I0 1W0 0F2 0I0 0W0 1F2 1I1 1W1 0F3 0I1 0W1 1F3 1I2 1W2 ..
//! ```
//!
//! A mesh that has begun does not wait where the three passes take as long and there are `2 p - 1`
//! microbatches or more: the last one begins `p - 1` forwards of a chunk after the first, a sixth
//! of what 1F1B waits for.
//!
//! The order is that of `ScheduleZBVZeroBubble` in PyTorch's `torch.distributed.pipelining`. With
//! fewer microbatches it is that of `2 p - 1` without those that are not there.

use super::{Latency, PassKind, Route, Schedule, Slot, Travel};

pub(super) struct ZbV;

/// Stages of a mesh.
const CHUNKS: u32 = 2;

/// Lists the slots of a mesh, counting microbatches for each pass.
struct Turns {
    /// Microbatches there are; slots of others are left out.
    m: u32,
    slots: Vec<Slot>,
    /// By chunk and pass: the next microbatch.
    next: [[u32; 3]; CHUNKS as usize],
}

impl Turns {
    fn play(&mut self, chunk: u32, passes: &[PassKind]) {
        for &pass in passes {
            let microbatch = &mut self.next[chunk as usize][place(pass)];
            if *microbatch < self.m {
                self.slots.push(Slot::new(pass, chunk, *microbatch));
            }
            *microbatch += 1;
        }
    }

    /// Microbatches that a pass has been played for.
    fn played(&self, chunk: u32, pass: PassKind) -> u32 {
        self.next[chunk as usize][place(pass)]
    }
}

fn place(pass: PassKind) -> usize {
    match pass {
        PassKind::Forward => 0,
        PassKind::InputGradient => 1,
        _ => 2,
    }
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

impl Schedule for ZbV {
    fn name(&self) -> &'static str {
        "zb_v"
    }

    fn virtual_stages(&self) -> u32 {
        CHUNKS
    }

    fn route(&self) -> Route {
        Route::V
    }

    fn passes(&self) -> &'static [PassKind] {
        &[
            PassKind::Forward,
            PassKind::InputGradient,
            PassKind::WeightGradient,
        ]
    }

    fn problem(&self, n_stages: usize, _m: u32) -> Option<String> {
        (n_stages == 0 || !n_stages.is_multiple_of(CHUNKS as usize)).then(|| {
            format!("{n_stages} stages: zb_v has two on every mesh, so it needs an even number")
        })
    }

    fn slots(&self, mesh: usize, n_meshes: usize, m: u32) -> Vec<Slot> {
        use PassKind::{Forward, InputGradient, WeightGradient};
        const ALL: &[PassKind] = &[Forward, InputGradient, WeightGradient];
        const GRADIENTS: &[PassKind] = &[InputGradient, WeightGradient];
        let (before, behind) = (count(mesh), count(n_meshes.saturating_sub(mesh)));
        let all = m.max(full(n_meshes));
        let mut turns = Turns {
            m,
            slots: Vec::new(),
            next: Default::default(),
        };
        // The warmup: forwards until the first microbatch has come back.
        for _ in 1..behind.saturating_mul(2) {
            turns.play(0, &[Forward]);
        }
        for _ in 0..before {
            turns.play(1, &[Forward]);
            turns.play(0, &[Forward]);
        }
        for _ in 0..behind {
            turns.play(1, ALL);
        }
        while turns.played(1, Forward) < all {
            if turns.played(0, Forward) < all {
                turns.play(0, &[Forward]);
            }
            turns.play(0, GRADIENTS);
            turns.play(1, ALL);
        }
        // The end: what others wait for first.
        for _ in 0..before {
            turns.play(0, &[InputGradient]);
            turns.play(1, &[InputGradient]);
        }
        for _ in 0..behind {
            turns.play(0, GRADIENTS);
        }
        for chunk in [1, 0] {
            while turns.played(chunk, WeightGradient) < all {
                turns.play(chunk, &[WeightGradient]);
            }
        }
        turns.slots
    }

    /// On mesh `i` of `p` chunk 0 has `min(m, 2 p - i)` from its forward to either gradient and
    /// chunk 1 `min(m, i + 1)`. Between the gradients it is one microbatch, until at the end
    /// `i` are kept back.
    fn in_flight(
        &self,
        from: PassKind,
        _to: PassKind,
        stage: usize,
        n_stages: usize,
        m: u32,
    ) -> u32 {
        let p = (n_stages / CHUNKS as usize).max(1);
        let (mesh, chunk) = (count(Route::V.mesh_of(stage, p)), stage / p);
        let missing = full(p).saturating_sub(m);
        let most = match (from, chunk) {
            (PassKind::Forward, 0) => count(p).saturating_mul(CHUNKS).saturating_sub(mesh),
            (PassKind::Forward, _) => mesh.saturating_add(1),
            // Those that are not there are the last.
            (_, 0) => {
                let at_the_end = (mesh + 1).min((m + 1).saturating_sub(count(p)));
                at_the_end.max(1)
            }
            _ => mesh.saturating_sub(missing).max(1),
        };
        m.min(most)
    }

    /// Mesh `i` of `p` has `2 p - 1 - i` of chunk 0 and `i + 1` of chunk 1 at once.
    fn at_peak(&self, stage: usize, n_stages: usize, m: u32) -> u32 {
        let p = (n_stages / CHUNKS as usize).max(1);
        let mesh = count(Route::V.mesh_of(stage, p));
        let most = match stage / p {
            0 => full(p).saturating_sub(mesh),
            _ => mesh.saturating_add(1),
        };
        m.min(most)
    }

    /// Chunk 0 has one more and chunk 1 one fewer before a backward of chunk 1 than behind it.
    fn moments(&self, mesh: usize, n_meshes: usize, m: u32) -> Vec<Vec<u32>> {
        let (p, i) = (count(n_meshes), count(mesh));
        let of = |first: u32, second: u32| vec![m.min(first), m.min(second)];
        let peak = of(full(n_meshes).saturating_sub(i), i.saturating_add(1));
        let early = of(p.saturating_mul(CHUNKS).saturating_sub(i), i);
        super::undominated([peak, early].into_iter())
    }

    /// Neighbours come to the ends of their slots at different times.
    fn travel(&self) -> Travel {
        Travel::AtOnce
    }

    /// With stages whose three passes take as long, the last mesh begins `(p - 1) / 3` of a stage's
    /// time after the first and none waits again. With fewer than `2 p - 1` microbatches their
    /// round trip shows, `(4 p - 2 - 2 m) / 3` in all; with fewer than half of `p` the sum of all
    /// stages counts weight gradients that hide in it.
    fn latency(&self, n_meshes: usize, m: u32) -> Latency {
        let (p, m) = (n_meshes as f64, f64::from(m));
        let waits = (p - 1.0).max(4.0 * p - 2.0 - 2.0 * m) / 3.0;
        let rounds = m - p;
        Latency {
            busiest: rounds.max(0.0),
            slowest: (waits + 2.0 * rounds.min(0.0)).max(0.0),
        }
    }
}

/// Microbatches that fill the pipeline.
fn full(n_meshes: usize) -> u32 {
    count(n_meshes).saturating_mul(2).saturating_sub(1)
}
