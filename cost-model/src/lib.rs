//! The physics: seconds and bytes of compute, collectives, memory, and the simulator that
//! plays role programs on a described cluster.

pub mod collectives;
pub mod compute;
