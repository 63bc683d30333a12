//! Execution: devices, fabrics, CPU kernels, ranks, data, measuring.

pub mod arena;
pub mod calibrate;
pub mod checkpoint;
pub mod clock;
pub mod cpu;
pub mod data;
pub mod device;
mod error;
pub mod execute;
pub mod fabric;
pub mod files;
pub mod init;
pub mod measure;
pub mod processes;
pub mod record;
pub mod reference;
pub mod rng;
pub mod schedule;
pub mod stragglers;
pub mod train;

pub use error::RuntimeError;
