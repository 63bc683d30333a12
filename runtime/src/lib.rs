//! Execution: CPU kernels, ranks, communicators, data, measuring.
