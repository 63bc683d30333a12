//! 1F1B: after a warmup each stage alternates one forward with one backward
//! (PipeDream-Flush, Narayanan et al. 2021, figure 4).
//!
//! ```text
//! stage 0  F0 F1 F2 .. .. B0 F3 .. B1 .. .. B2 .. B3      warmup 2, at most 3 in flight
//! stage 1  .. F0 F1 .. B0 F2 .. B1 F3 .. B2 .. B3         warmup 1, at most 2
//! stage 2  .. .. F0 B0 F1 .. B1 F2 .. B2 F3 B3            warmup 0, at most 1
//! ```

use super::{ComputeSlot, backward, forward};

pub(super) fn schedule(stage: usize, n_stages: usize, m: u32) -> Vec<ComputeSlot> {
    let warmup = u32::try_from(n_stages - 1 - stage)
        .unwrap_or(u32::MAX)
        .min(m);
    let steady = (warmup..m).flat_map(|i| [forward(i), backward(i - warmup)]);
    (0..warmup)
        .map(forward)
        .chain(steady)
        .chain((m - warmup..m).map(backward))
        .collect()
}
