//! GPipe: all forwards, then all backwards (Huang et al. 2019). Backwards run in the order
//! of the forwards, so that saved activations are freed first in, first out.
//!
//! ```text
//! stage 0  F0 F1 F2 F3 .. .. .. B0 B1 B2 B3
//! stage 1  .. F0 F1 F2 F3 .. B0 B1 B2 B3
//! stage 2  .. .. F0 F1 F2 F3 B0 B1 B2 B3      m microbatches in flight everywhere
//! ```

use super::{ComputeSlot, backward, forward};

pub(super) fn schedule(m: u32) -> Vec<ComputeSlot> {
    (0..m).map(forward).chain((0..m).map(backward)).collect()
}
