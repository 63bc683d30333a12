//! What a plan's layouts decide, worked out once for all that is asked of a plan while it is
//! completed: transfers, then edges, then the program.

use crate::bucket::BucketSizes;
use crate::error::LowerError;
use crate::resolve::{Homes, resolve};
use crate::uses::{CrossEdge, Edge, Uses};
use crate::{coalesce, emit, in_place, order, place};
use ir::plan::Plan;
use ir::program::Program;
use ir::training::TrainingGraph;

/// Where every op of a plan runs, how its values lie there, and who uses them.
///
/// They follow from the plan's stages, strategies and microbatch. Methods take the plan and the
/// training graph that they were made of; the plan may record transfers and edges meanwhile.
pub struct Layouts {
    homes: Homes,
    uses: Uses,
}

impl Layouts {
    /// Joins a plan with its training graph; fails where the plan does not cover it.
    pub fn new(plan: &Plan, training: &TrainingGraph) -> Result<Self, LowerError> {
        let homes = resolve(plan, training)?;
        let uses = Uses::new(&homes.of(plan, training));
        Ok(Layouts { homes, uses })
    }

    /// All layout changes between meshes, by value in order of first use, then receiving mesh.
    /// Neither the plan's `edges` nor its `transfers` are read.
    pub fn cross_edges(&self) -> &[CrossEdge] {
        &self.uses.cross
    }

    /// All layout changes within meshes that the program needs, in graph order, each once.
    /// Values of other meshes arrive as the plan's transfers say; where none is recorded, in
    /// the first of [`CrossEdge::wanted`]. The plan's `edges` are not read.
    ///
    /// Fails where a transfer does not fit.
    pub fn edges(&self, plan: &Plan, training: &TrainingGraph) -> Result<Vec<Edge>, LowerError> {
        self.uses.edges(&self.homes.of(plan, training))
    }

    /// The program, with collectives in buckets of these sizes.
    ///
    /// Fails when a path or transfer is missing or does not fit, or when the stages cannot be
    /// ordered; the error names the place.
    pub fn lower(
        &self,
        plan: &Plan,
        training: &TrainingGraph,
        sizes: &BucketSizes,
    ) -> Result<Program, LowerError> {
        let resolved = self.homes.of(plan, training);
        let mut draft = emit::emit(&resolved, &self.uses)?;
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
}
