//! PipeDream: 1F1B whose stages update their weights after every backward pass (Narayanan et al.
//! 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training", section 3).
//!
//! A microbatch is what the paper calls a minibatch: its gradients make an update of their own, at
//! once, on every stage for itself. So a step has as many updates as microbatches, and nothing is
//! accumulated. The slots are those of 1F1B:
//!
//! ```text
//! stage 0  F0 F1 F2 .. .. B0 F3 .. B1 .. .. B2 .. B3
//! stage 1  .. F0 F1 .. B0 F2 .. B1 F3 .. B2 .. B3         B: backward, then the update
//! stage 2  .. .. F0 B0 F1 .. B1 F2 .. B2 F3 B3
//!
//! updates that the weights of F0 F1 F2 F3 have seen:
//! stage 0  0 0 0 1       stage 1  0 0 1 2       stage 2  0 1 2 3
//! ```
//!
//! **Weight stashing** (section 3.3). A forward pass takes the newest weights of its stage, and
//! the backward pass of that microbatch the same ones, though the stage has updated them since. So
//! stage `i` of `p` keeps as many versions as it has microbatches in flight, `p - i`, beside the
//! weights that it updates. Between stages versions differ: a microbatch meets weights that are
//! `p - 1 - i` updates old on stage `i`. Vertical sync, which the paper leaves out by default,
//! would make that the same on all of them.
//!
//! The pipeline fills and drains once per step, not once per update, as 1F1B's does: after `m`
//! microbatches every stage has made `m` updates, so checkpoints and validation see one version.

use super::one_f_one_b::{OneFOneB, flush};
use super::{Latency, PassKind, Schedule, Slot};

pub(super) struct PipeDream;

impl Schedule for PipeDream {
    fn name(&self) -> &'static str {
        "pipedream"
    }

    fn is_asynchronous(&self) -> bool {
        true
    }

    fn slots(&self, mesh: usize, n_meshes: usize, m: u32) -> Vec<Slot> {
        OneFOneB.slots(mesh, n_meshes, m)
    }

    /// `min(m, n_stages - stage)`.
    fn in_flight(&self, from: PassKind, to: PassKind, stage: usize, n: usize, m: u32) -> u32 {
        OneFOneB.in_flight(from, to, stage, n, m)
    }

    fn latency(&self, _n_meshes: usize, m: u32) -> Latency {
        flush(m)
    }
}
