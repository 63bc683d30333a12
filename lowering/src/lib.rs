//! Plans to role programs: schedules, communication, buffers. No search.
//!
//! The phases, each a module with one idea:
//!
//! ```text
//! Plan + TrainingGraph
//!   │ resolve    which stage and spec every value has; checks the plan
//!   │ uses       every use of a value, the layout changes between them   edges, cross_edges
//!   │ emit       instructions of every role, template by template
//!   │ order      one global order of compute slots and exchanges; traces
//!   │ in_place   all-reduces that need no second buffer
//!   │ coalesce   collectives that can share a launch
//!   │ place      lifetime and arena offset of every buffer
//!   │ hazards    dependencies between streams
//!   ▼
//! Program
//! ```
//!
//! Every layout change replays a path that the plan recorded. [`edges`] and [`cross_edges`]
//! enumerate, for a plan without them, the changes to be priced; [`lower`] meets exactly
//! these. Only world scalars (the loss, the squares of the norm) are reduced by the first of
//! `reshard::paths` without asking.
//!
//! What readers of the programs may rely on beyond `ir::program`:
//! * `Layout` is a view: its result is its operand's buffer, and no instruction plays it.
//! * `Input` is loaded and `Constant` filled in every template and spec that uses it.
//! * A collective's output may be its operand's buffer (all-reduce only). The buffer's spec is
//!   the one its value was made with: from the all-reduce on, the axes reduced are no longer
//!   partial.
//! * `deps` name instructions of *other* streams only, and only the last of each that matters:
//!   earlier ones are implied by stream order.

mod bucket;
mod coalesce;
mod draft;
mod emit;
mod error;
mod hazards;
mod in_place;
mod memory;
pub mod order;
mod place;
mod resolve;
pub mod schedule;
mod uses;

pub use bucket::BucketSizes;
pub use error::LowerError;
pub use memory::{RoleMemory, memory_report};
pub use uses::{CrossEdge, Edge, cross_edges, edges};

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
    let resolved = resolve::resolve(plan, training)?;
    let mut draft = emit::emit(&resolved)?;
    let microbatches = order::microbatch_events(&resolved, &draft)?;
    let mut roles = Vec::with_capacity(draft.roles.len());
    for mut role in std::mem::take(&mut draft.roles) {
        role.assemble_trace(&microbatches);
        in_place::merge_all_reduces(&mut role);
        coalesce::coalesce(&mut role, sizes);
        roles.push(place::place(role)?);
    }
    Ok(Program {
        roles,
        transfers: draft.transfers,
        n_microbatches: plan.n_microbatches,
        microbatch: plan.microbatch,
    })
}
