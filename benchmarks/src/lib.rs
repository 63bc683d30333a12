//! Benchmarks of Meshwright.
