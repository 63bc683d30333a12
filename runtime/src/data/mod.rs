//! Training data: files of tokens as a list of fixed-length windows in a fixed random order.
//!
//! ```text
//!   path ──> TokenSource ──> Dataset ──> sample(split, index, seq): seq + 1 tokens or more
//!            (format)        (splits,         ▲
//!                             windows)        │ index
//!                            Order ───────────┘ (seed; step, position in the global batch)
//!
//!   Batches = Dataset + Order; a rank reads from it the samples and tokens of its own part
//! ```
//!
//! Formats ([`DataFormat`]): nanoGPT's and llm.c's `.bin` files, and plain UTF-8 text, as bytes
//! or through a Hugging Face `tokenizer.json`.
//!
//! Invariants:
//!
//! - What a training step sees is a function of the file, the options, the seed, the step and
//!   the position in the global batch; never of the plan, the ranks or earlier steps. A resumed
//!   run reads on where the first one stopped.
//! - Files are read in pieces where they are needed. Only the tokens of tokenised text are
//!   held in memory, 4 bytes each.
//! - No input makes this module panic, and every error names the file and the place in it.
//! - Every token given out is below the vocabulary size.

mod batches;
mod dataset;
mod error;
mod format;
mod order;
mod seen;
mod source;
mod text;

pub use batches::{Batch, Batches};
pub use dataset::{DataOptions, Dataset, Split};
pub use error::DataError;
pub use format::DataFormat;
pub use order::Order;
pub use seen::Seen;

#[cfg(test)]
mod tests;
