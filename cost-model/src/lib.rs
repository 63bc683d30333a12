//! The physics: seconds and bytes of compute, collectives, memory, and the simulator that
//! plays role programs on a described cluster.
//!
//! No I/O, no clocks: everything is a function of a cluster and a program. Durations come from
//! two places only, [`compute`] and [`collectives`]; [`simulate`] adds what waits for what.

pub mod account;
pub mod checkpoint;
pub mod classes;
pub mod collectives;
pub mod compare;
pub mod compute;
pub mod costs;
mod error;
pub mod fit;
pub mod memory;
pub mod presets;
pub mod roofline;
pub mod routing;
pub mod simulate;
pub mod trace;
pub mod utilisation;
pub mod work;

pub use compare::{Comparison, compare, expected_instructions};
pub use error::SimError;
pub use routing::Routing;
pub use simulate::{
    Execution, SimulateOptions, Simulation, TimelineDetail, TimelineEvent, simulate,
};
pub use work::{StepWork, model_flops};

#[cfg(test)]
mod testing;
