//! Closed-form latency of a pipeline: an estimate that does not know the program.
//!
//! ```text
//!   latency = sum over stages of t  +  (m - 1) * max over stages of t  +  once
//! ```
//!
//! `t` is the forward and backward time of one microbatch in a stage, `m` the number of
//! microbatches (Zheng et al. 2022, equation 2; the same for GPipe and 1F1B, Narayanan et al.
//! 2021, section 2.2). `once` is the slowest stage's work at the begin and end of a step.

use ir::Seconds;

/// Forward and backward of one microbatch in one stage, and its work once per step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StageTime {
    /// Forward of one microbatch.
    pub forward: Seconds,
    /// Backward of one microbatch.
    pub backward: Seconds,
    /// Begin and end of the step.
    pub step: Seconds,
}

/// Latency of one training step; see the module header. Zero without stages.
pub fn latency(stages: &[StageTime], n_microbatches: u32) -> Seconds {
    let slowest =
        |time: fn(&StageTime) -> Seconds| stages.iter().map(time).fold(Seconds(0.0), Seconds::max);
    let microbatch = |s: &StageTime| s.forward + s.backward;
    let first: Seconds = stages.iter().map(microbatch).sum();
    first + slowest(microbatch) * f64::from(n_microbatches.saturating_sub(1)) + slowest(|s| s.step)
}

/// Share of a pipeline of equal stages in which a stage waits: `(p - 1) / (m + p - 1)`.
pub fn bubble(n_stages: u32, n_microbatches: u32) -> f64 {
    let fill = f64::from(n_stages.max(1) - 1);
    fill / (f64::from(n_microbatches.max(1)) + fill)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_stages_have_the_known_bubble() {
        let stage = StageTime {
            forward: Seconds(1.0),
            backward: Seconds(2.0),
            step: Seconds(0.0),
        };
        // 4 stages of 3 s, 8 microbatches: 4 * 3 + 7 * 3 = 33 s, of which 24 s are work.
        let t = latency(&[stage; 4], 8);
        assert_eq!(t, Seconds(33.0));
        assert!((1.0 - 24.0 / t.0 - bubble(4, 8)).abs() < 1e-12);
        assert_eq!(bubble(1, 5), 0.0);
    }

    #[test]
    fn the_slowest_stage_sets_the_pace() {
        let stage = |f, b, s| StageTime {
            forward: Seconds(f),
            backward: Seconds(b),
            step: Seconds(s),
        };
        // (1 + 2) + (2 + 3) + 3 * 5 + 0.5
        assert_eq!(
            latency(&[stage(1.0, 2.0, 0.5), stage(2.0, 3.0, 0.25)], 4),
            Seconds(23.5)
        );
        assert_eq!(latency(&[], 4), Seconds(0.0));
    }
}
