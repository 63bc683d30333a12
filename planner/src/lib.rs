//! The search: strategies, intra-op solver, stage table, inter-op DP.
