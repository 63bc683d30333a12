//! Execution of role programs: a thread per rank, instructions in list order.
//!
//! ```text
//!   Session ── requests ──> Worker ──> RankState ── Device: arenas, streams, kernels
//!   (coordinator) <── answers ──           └─────── Fabric: collectives, exchanges ── other ranks
//! ```
//!
//! * [`kernel`](kernel()) runs one op on local shards; the single-device reference uses it too.
//! * [`collective`] says what a layout change does to local buffers.
//! * [`Session`] is the coordinator of a run: it gives out initial states and gathers results,
//!   by messages that could go to other processes.
//!
//! Invariants: the padding of every buffer is zero after every instruction; the same program,
//! seed, states and data give the same bits.

pub(crate) mod calls;
pub mod collective;
#[cfg(test)]
mod dropout_tests;
mod kernel;
mod load;
mod local;
pub(crate) mod message;
#[cfg(test)]
pub(crate) mod naive;
pub(crate) mod position;
#[cfg(test)]
mod position_tests;
mod rank;
#[cfg(test)]
mod reshard_tests;
mod script;
pub(crate) mod session;
#[cfg(test)]
mod session_tests;
pub(crate) mod worker;

pub use kernel::{Context, Operand, Output, kernel};
pub use local::{Local, is_computed, narrow, widen};
pub(crate) use rank::calls::calls as rank_calls;
pub use rank::{RankTimings, Timing};
pub(crate) use script::validation;
pub use session::{
    InOrder, Session, SessionOptions, StateRequest, StateTensor, States, StepResult,
};

pub(crate) use kernel::{expert_lengths, finds_in_result, images, rope_scaling};
pub(crate) use load::{given, load};
pub(crate) use rank::what;
pub(crate) use session::check_batch;
