//! Execution: CPU kernels, ranks, communicators, data, measuring.

pub mod cpu;
pub mod data;
pub mod rng;
pub mod schedule;
