//! Benchmarks of Meshwright.

pub mod comm;
