//! Schedules: in which order a stage computes its passes.
//!
//! A schedule orders work; it neither executes it nor knows of communication, which
//! `order` adds. Invariants of every schedule: each pass of each microbatch stands once,
//! the forward of a microbatch before its backward, microbatches ascending per pass.

mod gpipe;
mod one_f_one_b;

use ir::plan::ScheduleKind;

/// What a compute slot computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SlotPass {
    /// Forward.
    Forward,
    /// Gradients for inputs and weights together, and what is recomputed for them.
    Backward,
}

/// One pass of one microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ComputeSlot {
    /// The pass.
    pub pass: SlotPass,
    /// The microbatch.
    pub microbatch: u32,
}

/// The slots of stage `stage` of `n_stages` (`stage < n_stages`) with `m` microbatches.
pub fn schedule(kind: ScheduleKind, stage: usize, n_stages: usize, m: u32) -> Vec<ComputeSlot> {
    match kind {
        ScheduleKind::GPipe => gpipe::schedule(m),
        ScheduleKind::OneFOneB => one_f_one_b::schedule(stage, n_stages, m),
    }
}

fn forward(microbatch: u32) -> ComputeSlot {
    ComputeSlot {
        pass: SlotPass::Forward,
        microbatch,
    }
}

fn backward(microbatch: u32) -> ComputeSlot {
    ComputeSlot {
        pass: SlotPass::Backward,
        microbatch,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One line per stage: `F0 F1 B0 ...`.
    fn draw(kind: ScheduleKind, n_stages: usize, m: u32) -> String {
        let name = |s: &ComputeSlot| {
            format!(
                "{}{}",
                if s.pass == SlotPass::Forward {
                    "F"
                } else {
                    "B"
                },
                s.microbatch
            )
        };
        let line = |i| {
            schedule(kind, i, n_stages, m)
                .iter()
                .map(name)
                .collect::<Vec<_>>()
                .join(" ")
        };
        (0..n_stages).map(line).collect::<Vec<_>>().join("\n")
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
    fn microbatches_in_flight_are_what_the_plan_promises() {
        for kind in [ScheduleKind::GPipe, ScheduleKind::OneFOneB] {
            for n_stages in 1..6 {
                for m in 1..9 {
                    for stage in 0..n_stages {
                        let slots = schedule(kind, stage, n_stages, m);
                        assert_eq!(slots.len(), 2 * m as usize);
                        let (mut alive, mut most) = (0u32, 0);
                        for s in slots {
                            match s.pass {
                                SlotPass::Forward => alive += 1,
                                SlotPass::Backward => alive -= 1,
                            }
                            most = most.max(alive);
                        }
                        assert_eq!(
                            most,
                            kind.in_flight(stage, n_stages, m),
                            "{kind:?} {stage}/{n_stages} m={m}"
                        );
                    }
                }
            }
        }
    }
}
