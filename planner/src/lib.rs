//! The search: strategies, intra-op solver, stage table, inter-op DP.

pub mod inter_op;
pub mod intra_op;
