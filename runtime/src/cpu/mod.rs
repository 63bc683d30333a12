//! CPU kernels: pure functions over `f32` slices.
//!
//! Every tensor is row-major and contiguous, its shape is an argument, and a kernel knows nothing
//! of the IR. The invariants that the rest of the runtime rests on:
//!
//! - **Deterministic.** The same inputs give the same bits, whatever the number of threads.
//! - **Indifferent to company.** The bits of an output element depend only on the inputs that it
//!   is a function of, never on how many other rows or heads the call holds. A run sharded by
//!   batch or by heads therefore equals the unsharded run bit for bit, but for the sums that a
//!   collective makes in place of a kernel.
//! - Shapes that do not fit are the caller's mistake and panic; no data makes a kernel panic.
//!
//! The only `unsafe` code is the call in [`gemm`].

pub mod attention;
pub mod causal_conv;
pub mod clamped;
pub mod conv;
pub mod elementwise;
pub mod embedding;
pub mod experts;
pub mod gemm;
pub mod group_norm;
pub mod halves;
pub mod layout;
pub mod loss;
pub mod matmul;
pub mod norm;
pub mod optimizer;
pub mod rotary;
pub mod state_space;

mod special;
mod summation;
mod wide;

#[cfg(test)]
mod differences;
#[cfg(test)]
pub(crate) mod testing;
