//! Forwards alone, as inference has them: microbatches go through the stages one after the other.
//!
//! ```text
//! stage 0  F0 F1 F2 F3 .. ..
//! stage 1  .. F0 F1 F2 F3 ..
//! stage 2  .. .. F0 F1 F2 F3      1 microbatch in flight everywhere
//! ```
//!
//! Nothing is kept for later: a stage holds what enters and leaves it of the microbatch at hand.

use super::one_f_one_b::flush;
use super::{Latency, PassKind, Schedule, Slot};

pub(super) struct Forward;

impl Schedule for Forward {
    fn name(&self) -> &'static str {
        "forward"
    }

    fn passes(&self) -> &'static [PassKind] {
        &[PassKind::Forward]
    }

    fn slots(&self, _mesh: usize, _n_meshes: usize, m: u32) -> Vec<Slot> {
        (0..m).map(|i| Slot::new(PassKind::Forward, 0, i)).collect()
    }

    fn in_flight(&self, _: PassKind, _: PassKind, _stage: usize, _n_stages: usize, _m: u32) -> u32 {
        1
    }

    fn latency(&self, _n_meshes: usize, m: u32) -> Latency {
        flush(m)
    }
}
