//! Published training runs: a row of a table becomes a model, a cluster and the pins of a
//! plan, and goes through the same importer, planner, lowering and simulator as a user's
//! model. Nothing here knows a formula for time.
//!
//! * `csv`, `row`: the table; `columns`: those that it may have; `output`: that of predictions.
//! * `cells` and `network`: what words of `gpu` and `interconnect` say; `names`: what was meant by
//!   others.
//! * `facts`: what columns do not say, as data files with sources; `quantity`: those of its
//!   figures that are fitted; `figures`: every figure that no source states, counted.
//! * `model`, `mixture`, `cluster`, `precision`, `setup`: a row as the inputs of the planner.
//! * `named`: published models by name.
//! * `software`: software by name and version, of rows and of plans.
//! * `recipes`: what single recipes of a framework's releases do; `layout`: the notation of their
//!   pipelines.
//! * `assume`: cells that have to be filled in; `choices`: what else a row leaves open.
//! * `predict`: rows to predictions, each distinct question once, on all processors.
//! * `terms`: the terms of the model of execution, each of which can be left out.
//! * `free`: what the search finds in a row's place.
//! * `breakdown`, `explain`: where the predicted time goes, by cause and by instruction.
//! * `memory`: what processes hold beside the tensors, and what published figures count.
//!
//! A row that cannot be modelled says why ([`Unmodelled`]).

mod assume;
pub mod breakdown;
mod cells;
mod choices;
pub mod cluster;
pub mod columns;
pub mod csv;
mod exceptions;
mod explain;
mod facts;
pub mod figures;
mod free;
mod hybrid;
mod layout;
pub mod memory;
mod mixture;
mod model;
mod named;
mod names;
mod network;
mod output;
mod precision;
mod predict;
pub mod quantity;
mod recipes;
pub mod row;
mod setup;
pub mod software;
mod terms;

pub use breakdown::Breakdown;
pub use cluster::Machine;
pub use facts::Facts;
pub use figures::Figure;
pub use free::{Free, free};
pub use named::is_held_out;
pub use output::{OUTPUT_COLUMNS, output};
pub use predict::{
    Lowered, Outcome, Predicted, Question, lower, planned, predict, predicted, price, question,
};
pub use row::{Row, RowError};
pub use terms::TERMS;

/// Why there is no prediction for a row.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unmodelled {
    /// The row does not say what has to be known.
    #[error("{0}")]
    Row(#[from] RowError),
    /// The run uses what Meshwright does not have.
    #[error("not supported: {0}")]
    Feature(String),
    /// The model cannot be built.
    #[error("model: {0}")]
    Model(String),
    /// The cluster cannot be described.
    #[error("cluster: {0}")]
    Cluster(String),
    /// There is no such plan.
    #[error("plan: {0}")]
    Plan(String),
}
