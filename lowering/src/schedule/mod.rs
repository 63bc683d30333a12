//! Schedules: in which order the ranks of a mesh compute their passes.
//!
//! A schedule orders work; it neither executes it nor knows of communication, which
//! `order` adds. A mesh has one stage, or several whose passes are interleaved: its chunks.
//! Invariants of every schedule: each pass of each microbatch and chunk stands once, the
//! forward of a microbatch before its backward, microbatches ascending per pass and chunk.

mod gpipe;
mod interleaved;
mod one_f_one_b;

use ir::plan::ScheduleKind;

/// What a compute slot computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SlotPass {
    /// Forward.
    Forward,
    /// Gradients for inputs and weights together, and what is recomputed for them.
    Backward,
}

/// A pass of one of a mesh's stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkPass {
    /// The pass.
    pub pass: SlotPass,
    /// Which of the mesh's stages, from 0.
    pub chunk: u32,
}

/// One pass of one stage for one microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ComputeSlot {
    /// The pass and the stage.
    pub of: ChunkPass,
    /// The microbatch.
    pub microbatch: u32,
}

/// The slots of mesh `mesh` of `n_meshes` (`mesh < n_meshes`) with `m` microbatches. Interleaved
/// schedules want `m` to be a multiple of `n_meshes`.
pub fn schedule(kind: ScheduleKind, mesh: usize, n_meshes: usize, m: u32) -> Vec<ComputeSlot> {
    match kind {
        ScheduleKind::GPipe => gpipe::schedule(m),
        ScheduleKind::OneFOneB => one_f_one_b::schedule(mesh, n_meshes, m),
        ScheduleKind::Interleaved { .. } => interleaved::schedule(kind, mesh, n_meshes, m),
    }
}

fn slot(pass: SlotPass, chunk: u32, microbatch: u32) -> ComputeSlot {
    ComputeSlot {
        of: ChunkPass { pass, chunk },
        microbatch,
    }
}

fn forward(microbatch: u32) -> ComputeSlot {
    slot(SlotPass::Forward, 0, microbatch)
}

fn backward(microbatch: u32) -> ComputeSlot {
    slot(SlotPass::Backward, 0, microbatch)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One line per mesh: `F0 F1 B0 ...`; the chunk before the pass where there are several.
    fn draw(kind: ScheduleKind, n_meshes: usize, m: u32) -> String {
        let name = |s: &ComputeSlot| {
            let chunk = match kind.virtual_stages() {
                1 => String::new(),
                _ => s.of.chunk.to_string(),
            };
            let pass = match s.of.pass {
                SlotPass::Forward => "F",
                SlotPass::Backward => "B",
            };
            format!("{chunk}{pass}{}", s.microbatch)
        };
        let line = |i| {
            schedule(kind, i, n_meshes, m)
                .iter()
                .map(name)
                .collect::<Vec<_>>()
                .join(" ")
        };
        (0..n_meshes).map(line).collect::<Vec<_>>().join("\n")
    }

    fn interleaved(virtual_stages: u32) -> ScheduleKind {
        ScheduleKind::Interleaved { virtual_stages }
    }

    #[test]
    fn gpipe_runs_all_forwards_first() {
        assert_eq!(
            draw(ScheduleKind::GPipe, 2, 3),
            "F0 F1 F2 B0 B1 B2\nF0 F1 F2 B0 B1 B2"
        );
    }

    #[test]
    fn one_f_one_b_warms_up_by_the_distance_to_the_end() {
        assert_eq!(
            draw(ScheduleKind::OneFOneB, 4, 5),
            "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4\n\
             F0 F1 F2 B0 F3 B1 F4 B2 B3 B4\n\
             F0 F1 B0 F2 B1 F3 B2 F4 B3 B4\n\
             F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"
        );
    }

    #[test]
    fn one_f_one_b_with_fewer_microbatches_than_stages() {
        assert_eq!(
            draw(ScheduleKind::OneFOneB, 3, 2),
            "F0 F1 B0 B1\nF0 F1 B0 B1\nF0 B0 F1 B1"
        );
    }

    #[test]
    fn interleaved_stages_take_turns_by_groups_of_microbatches() {
        assert_eq!(
            draw(interleaved(2), 2, 4),
            "0F0 0F1 1F0 1F1 0F2 1B0 0F3 1B1 1F2 0B0 1F3 0B1 1B2 1B3 0B2 0B3\n\
             0F0 0F1 1F0 1B0 1F1 1B1 0F2 0B0 0F3 0B1 1F2 1B2 1F3 1B3 0B2 0B3"
        );
        // As many microbatches as meshes: mesh 0 has no turn to alternate in.
        assert_eq!(
            draw(interleaved(3), 2, 2),
            "0F0 0F1 1F0 1F1 2F0 2F1 2B0 2B1 1B0 1B1 0B0 0B1\n\
             0F0 0F1 1F0 1F1 2F0 2B0 2F1 2B1 1B0 1B1 0B0 0B1"
        );
    }

    #[test]
    fn one_virtual_stage_is_plain_1f1b() {
        for n_meshes in 1..6 {
            for m in 1..13 {
                for mesh in 0..n_meshes {
                    assert_eq!(
                        schedule(interleaved(1), mesh, n_meshes, m),
                        schedule(ScheduleKind::OneFOneB, mesh, n_meshes, m)
                    );
                }
            }
        }
    }

    #[test]
    fn microbatches_in_flight_are_what_the_plan_promises() {
        for v in 1..5u32 {
            let kinds = match v {
                1 => vec![ScheduleKind::GPipe, ScheduleKind::OneFOneB, interleaved(1)],
                _ => vec![interleaved(v)],
            };
            for kind in kinds {
                for n_meshes in 1..6 {
                    let step = if v == 1 { 1 } else { n_meshes as u32 };
                    for m in (1..9).map(|k| k * step) {
                        (0..n_meshes).for_each(|mesh| in_flight(kind, v, mesh, n_meshes, m));
                    }
                }
            }
        }
    }

    /// Every pass once, forward before backward, ascending; in flight as promised.
    fn in_flight(kind: ScheduleKind, v: u32, mesh: usize, n_meshes: usize, m: u32) {
        let slots = schedule(kind, mesh, n_meshes, m);
        assert_eq!(slots.len(), 2 * (m * v) as usize);
        for chunk in 0..v {
            let (mut forwards, mut backwards, mut most) = (0u32, 0u32, 0);
            for s in slots.iter().filter(|s| s.of.chunk == chunk) {
                let next = match s.of.pass {
                    SlotPass::Forward => &mut forwards,
                    SlotPass::Backward => &mut backwards,
                };
                assert_eq!(s.microbatch, *next, "{kind:?} {mesh}/{n_meshes} m={m}");
                *next += 1;
                assert!(backwards <= forwards);
                most = most.max(forwards - backwards);
            }
            assert_eq!((forwards, backwards), (m, m));
            let stage = chunk as usize * n_meshes + mesh;
            assert_eq!(
                most,
                kind.in_flight(stage, v as usize * n_meshes, m),
                "{kind:?} stage {stage} on {n_meshes} meshes, m={m}"
            );
        }
    }

    /// Narayanan et al. 2021, section 2.2: with `v` stages a mesh the first one holds as much
    /// as `1 + (p - 1) / (p v)` times `p` whole microbatches, all chunks together.
    #[test]
    fn interleaving_holds_more_activations_than_1f1b() {
        for (p, v) in [(2usize, 2u32), (4, 2), (4, 4), (8, 3)] {
            let m = 8 * p as u32;
            let slots = schedule(interleaved(v), 0, p, m);
            let (mut alive, mut most) = (0i64, 0);
            for s in &slots {
                alive += if s.of.pass == SlotPass::Forward {
                    1
                } else {
                    -1
                };
                most = most.max(alive);
            }
            let chunks = p as i64 * i64::from(v) + p as i64 - 1;
            assert_eq!(most, chunks, "p={p} v={v}");
        }
    }
}
