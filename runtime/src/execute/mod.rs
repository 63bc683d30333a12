//! Execution of role programs: one thread per rank, instructions in list order.
//!
//! ```text
//!   Session ── commands ──> RankState (arena, endpoint) ── kernel / collective ──> arena
//!           <── replies ───            └── Endpoint ── World ── other ranks
//! ```
//!
//! * [`kernel`](kernel()) runs one op on local shards; the single-device reference uses it too.
//! * [`collective`] says what a layout change does to local buffers.
//! * [`Session`] keeps the ranks alive between steps, gives out initial states and gathers
//!   results.
//!
//! Invariants: the padding of every buffer is zero after every instruction; the same program,
//! seed, states and data give the same bits.

pub mod collective;
#[cfg(test)]
mod dropout_tests;
mod kernel;
mod load;
mod local;
#[cfg(test)]
pub(crate) mod naive;
mod rank;
#[cfg(test)]
mod reshard_tests;
mod script;
mod session;
#[cfg(test)]
mod session_tests;

pub use kernel::{Context, Operand, Output, kernel};
pub use local::{Local, is_computed, narrow, widen};
pub use rank::{RankTimings, Timing};
pub use session::{Session, SessionOptions, StateRequest, StateTensor, States, StepResult};

pub(crate) use load::load_tokens;
pub(crate) use rank::what;
pub(crate) use session::check_batch;
