//! Benchmarks of Meshwright.

pub mod comm;
pub mod facts;
pub mod score;
