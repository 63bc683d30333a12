//! GPipe: all forwards, then all backwards (Huang et al. 2019). Backwards run in the order
//! of the forwards, so that saved activations are freed first in, first out.
//!
//! ```text
//! stage 0  F0 F1 F2 F3 .. .. .. B0 B1 B2 B3
//! stage 1  .. F0 F1 F2 F3 .. B0 B1 B2 B3
//! stage 2  .. .. F0 F1 F2 F3 B0 B1 B2 B3      m microbatches in flight everywhere
//! ```

use super::one_f_one_b::flush;
use super::{Latency, PassKind, Schedule, Slot, Travel};

pub(super) struct GPipe;

impl Schedule for GPipe {
    fn name(&self) -> &'static str {
        "gpipe"
    }

    fn slots(&self, _mesh: usize, _n_meshes: usize, m: u32) -> Vec<Slot> {
        let all = |pass| (0..m).map(move |i| Slot::new(pass, 0, i));
        all(PassKind::Forward)
            .chain(all(PassKind::Backward))
            .collect()
    }

    fn in_flight(&self, _: PassKind, _: PassKind, _stage: usize, _n_stages: usize, m: u32) -> u32 {
        m
    }

    /// A stage has the next microbatch's forward to go on with, so what it sends, and what its
    /// neighbour is about, need not hold it up.
    fn travel(&self) -> Travel {
        Travel::AtOnce
    }

    fn latency(&self, _n_meshes: usize, m: u32) -> Latency {
        flush(m)
    }
}
