//! Model files to graphs and weights.
//!
//! * [`config`]: a `config.json` of GPT-2, Llama or a wide ResNet becomes a [`ModelConfig`].
//! * [`build`]: a `ModelConfig` becomes the forward graph of the loss.
//! * [`params`]: the one table that says how each parameter is called, shaped, initialised
//!   and stored; graph and weights both follow it.
//! * [`weights`]: safetensors files become parameters in our layout, and back.
//!
//! Invariants:
//! * a `ModelConfig` that exists is valid: every field is in range and none contradicts
//!   another, so `model_graph` fails only for its options;
//! * nothing that could change the mathematics is ignored: a field, tensor or value that we
//!   do not understand is an error that names it;
//! * no input, however malformed, panics or allocates more than the file's own size.

pub mod build;
pub mod builtin;
pub mod config;
mod error;
mod input;
mod likeness;
pub mod params;
pub mod weights;

pub use build::{BuildOptions, model_graph};
pub use config::{DEFAULT_EXPERT_CAPACITY, MODEL_TYPES, ModelConfig};
pub use error::ImportError;
pub use likeness::config_field;
pub use params::Param;
pub use weights::{HfTensor, Weights, export, export_order, map_param_to_hf, to_hf};
