//! Plans to role programs: schedules, communication, buffers. No search.
//!
//! The phases, each a module with one idea:
//!
//! ```text
//! Plan + TrainingGraph
//!   │ resolve    which stage and spec every value has; checks the plan
//!   │ uses       every use of a value, the layout changes between them   edges, cross_edges
//!   │            (both kept in `layouts` while the planner asks for paths)
//!   │ emit       instructions of every role, template by template
//!   │ order      one global order of compute slots and exchanges; traces
//!   │ neighbours ops right behind the product that feeds them
//!   │ in_place   all-reduces that need no second buffer
//!   │ coalesce   collectives that can share a launch
//!   │ pack       copies around collectives that want contiguous pieces
//!   │ offload    tensors that rest in hosts or files, and copies around their uses
//!   │ overwrite  results in the buffers of operands that die where they are made
//!   │ place      lifetime and arena offset of every buffer
//!   │ waits      what instructions wait for, in their slot and in earlier ones
//!   │ calls      neighbours that a device may make one call of
//!   ▼
//! Program
//! ```
//!
//! Every layout change replays a path that the plan recorded. [`edges`] and [`cross_edges`]
//! enumerate, for a plan without them, the changes to be priced; [`lower`] meets exactly
//! these. Only world scalars (the loss, the squares of the norm) are reduced by the first of
//! `reshard::paths` without asking.
//!
//! Readers of the programs may rely on this beyond `ir::program`:
//! * `Layout` is a view: its result is its operand's buffer, and no instruction plays it. Where a
//!   microbatch lays out a state, which it may update before others read it, it is a copy.
//! * `Input` is loaded and `Constant` filled in every template and spec that uses it.
//! * A collective's output may be its operand's buffer (all-reduce only). The buffer's spec is
//!   the one its value was made with: from the all-reduce on, the axes reduced are no longer
//!   partial.
//! * A result may have the buffer of an operand that is read for the last time there, where the op
//!   allows it (`OpKind::may_overwrite`).
//! * `deps` name instructions of *other* streams only, and only the last of each that matters:
//!   earlier ones are implied by stream order.
//! * Slots follow each other on all streams but that of transfers: the first instruction of a
//!   slot on a stream waits for all that earlier slots put on the others.

mod ahead;
mod bucket;
mod calls;
mod coalesce;
mod draft;
mod emit;
mod error;
mod in_place;
mod layouts;
mod memory;
mod neighbours;
mod offload;
pub mod order;
mod overwrite;
mod pack;
mod place;
mod resolve;
mod turns;
mod uses;
mod waits;

pub use bucket::BucketSizes;
pub use calls::without_calls;
pub use error::LowerError;
pub use layouts::Layouts;
pub use memory::{RoleMemory, memory_report};
pub use pack::without_pieces;
pub use place::arena_with_room;
pub use uses::{CrossEdge, Edge};
pub use waits::{set_events, set_waits};

use ir::plan::Plan;
use ir::program::Program;
use ir::training::TrainingGraph;

/// The program of a plan: rebuilds the training graph that the plan was made for, then
/// [`lower_training`]. Fails when the plan's graph or versions are not readable, or as there.
pub fn lower(plan: &Plan) -> Result<Program, LowerError> {
    resolve::check_versions(plan)?;
    let forward = ir::text::parse(&plan.graph)?;
    lower_training(plan, &plan.training_graph(&forward)?)
}

/// The program of a plan whose training graph is at hand.
///
/// Fails when the plan does not cover the graph (a layer, strategy, path or transfer is
/// missing or does not fit) or when its stages cannot be ordered; the error names the place.
pub fn lower_training(plan: &Plan, training: &TrainingGraph) -> Result<Program, LowerError> {
    lower_in_buckets(plan, training, &BucketSizes::default())
}

/// [`lower_training`] with buckets of other sizes. What is computed does not depend on them.
pub fn lower_in_buckets(
    plan: &Plan,
    training: &TrainingGraph,
    sizes: &BucketSizes,
) -> Result<Program, LowerError> {
    Layouts::new(plan, training)?.lower(plan, training, sizes)
}

/// [`Layouts::edges`] of a plan.
pub fn edges(plan: &Plan, training: &TrainingGraph) -> Result<Vec<Edge>, LowerError> {
    Layouts::new(plan, training)?.edges(plan, training)
}

/// [`Layouts::cross_edges`] of a plan.
pub fn cross_edges(plan: &Plan, training: &TrainingGraph) -> Result<Vec<CrossEdge>, LowerError> {
    Ok(Layouts::new(plan, training)?.cross_edges().to_vec())
}
