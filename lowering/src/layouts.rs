//! The consequences of a plan's layouts, worked out once for all that is asked of a plan while it
//! is completed: transfers, then edges, then the program.
//!
//! Contract: methods are given the plan and the training graph that the layouts were made of.
//! The plan may have other paths by now ([`Plan::transfers`], [`Plan::edges`], and the edges of
//! its strategies), names, pins and predictions; nothing else of it. What layouts depend on is
//! kept and compared, since a program of one plan's layouts and another's meshes would be wrong
//! without a word. Of the graph only the sizes are compared: [`lower`](crate::lower), which makes
//! the graph of the plan itself, is for callers who have it from somewhere else.

use crate::bucket::BucketSizes;
use crate::error::LowerError;
use crate::place::Room;
use crate::resolve::{Homes, resolve};
use crate::uses::{CrossEdge, Edge, Uses};
use crate::{calls, coalesce, emit, in_place, neighbours, offload, order, overwrite, pack, place};
use ir::op::OpStrategy;
use ir::plan::{LayerStrategy, Plan, ScheduleKind, StagePlan};
use ir::program::{Program, RoleProgram};
use ir::training::TrainingGraph;
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// Where every op of a plan runs, how its values lie there, and who uses them.
///
/// They follow from the plan's stages, strategies and microbatch. Methods take the plan and the
/// training graph that they were made of, and refuse others; the plan may record transfers and
/// edges meanwhile.
pub struct Layouts {
    homes: Homes,
    uses: Uses,
    made_of: MadeOf,
}

/// The inputs that layouts follow from, beside the ops of the graph.
#[derive(PartialEq)]
struct MadeOf {
    stages: Vec<StagePlan>,
    schedule: ScheduleKind,
    microbatch: u64,
    n_microbatches: u32,
    /// The parts of each layer strategy that are no paths.
    strategies: Vec<(BTreeMap<String, OpStrategy>, BTreeSet<String>)>,
    n_ops: usize,
    n_values: usize,
}

impl MadeOf {
    fn new(plan: &Plan, training: &TrainingGraph) -> MadeOf {
        let of = |s: &LayerStrategy| (s.ops.clone(), s.recompute.clone());
        MadeOf {
            stages: plan.stages.clone(),
            schedule: plan.schedule,
            microbatch: plan.microbatch,
            n_microbatches: plan.n_microbatches,
            strategies: plan.layer_strategies.iter().map(of).collect(),
            n_ops: training.graph.ops().len(),
            n_values: training.graph.values().len(),
        }
    }

    /// Fails with what differs.
    fn check(&self, plan: &Plan, training: &TrainingGraph) -> Result<(), LowerError> {
        let graph = &training.graph;
        let steps = (plan.schedule, plan.microbatch, plan.n_microbatches);
        let same = |(s, of): (&LayerStrategy, &(BTreeMap<_, _>, BTreeSet<_>))| {
            s.ops == of.0 && s.recompute == of.1
        };
        let mut strategies = plan.layer_strategies.iter().zip(&self.strategies);
        let as_many = plan.layer_strategies.len() == self.strategies.len();
        for (what, is_own) in [
            ("stages", plan.stages == self.stages),
            (
                "microbatches",
                steps == (self.schedule, self.microbatch, self.n_microbatches),
            ),
            ("strategies", as_many && strategies.all(same)),
            ("ops", graph.ops().len() == self.n_ops),
            ("values", graph.values().len() == self.n_values),
        ] {
            if !is_own {
                return Err(LowerError::OtherLayouts { what });
            }
        }
        Ok(())
    }
}

impl Layouts {
    /// Joins a plan with its training graph; fails where the plan does not cover it.
    pub fn new(plan: &Plan, training: &TrainingGraph) -> Result<Self, LowerError> {
        let homes = resolve(plan, training)?;
        let uses = Uses::new(&homes.of(plan, training));
        let made_of = MadeOf::new(plan, training);
        Ok(Layouts {
            homes,
            uses,
            made_of,
        })
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
    /// Fails where a transfer does not fit, or these are not the plan's layouts.
    pub fn edges(&self, plan: &Plan, training: &TrainingGraph) -> Result<Vec<Edge>, LowerError> {
        self.made_of.check(plan, training)?;
        self.uses.edges(&self.homes.of(plan, training))
    }

    /// The program, with collectives in buckets of these sizes.
    ///
    /// Fails when a path or transfer is missing or does not fit, when the stages cannot be
    /// ordered, or when these are not the plan's layouts; the error names the place.
    pub fn lower(
        &self,
        plan: &Plan,
        training: &TrainingGraph,
        sizes: &BucketSizes,
    ) -> Result<Program, LowerError> {
        self.lower_with(plan, training, sizes, true)
    }

    /// The program with a call for each instruction, and functions of elements where the graph has
    /// them: as other software executes it, whose prices say what it fuses.
    ///
    /// Fails as [`Layouts::lower`] does.
    pub fn lower_one_by_one(
        &self,
        plan: &Plan,
        training: &TrainingGraph,
    ) -> Result<Program, LowerError> {
        self.lower_with(plan, training, &BucketSizes::default(), false)
    }

    fn lower_with(
        &self,
        plan: &Plan,
        training: &TrainingGraph,
        sizes: &BucketSizes,
        has_calls: bool,
    ) -> Result<Program, LowerError> {
        self.made_of.check(plan, training)?;
        let resolved = self.homes.of(plan, training);
        let mut draft = emit::emit(&resolved, &self.uses)?;
        let microbatches = order::microbatch_events(&resolved, &draft)?;
        // Roles know nothing of each other any more; the error is that of the first.
        let roles = std::mem::take(&mut draft.roles).into_par_iter();
        let roles = roles.map(|mut role| {
            role.assemble_trace(&microbatches);
            neighbours::bring_together(&mut role);
            if has_calls {
                neighbours::gather(&mut role);
            }
            in_place::merge_all_reduces(&mut role);
            coalesce::coalesce(&mut role, sizes);
            pack::pack(&mut role);
            offload::offload(&resolved, &mut role);
            overwrite::overwrite_operands(&mut role);
            let seen = plan.cluster.seen_by(role.mesh.devices);
            let room = Room {
                bytes: seen.planned_bytes(plan.headroom),
                // Where other software gathers is said by what executes its programs.
                gathers_ahead: has_calls && plan.made_for.is_none(),
            };
            let mut role = place::place(role, room)?;
            if has_calls {
                calls::mark(&mut role);
            }
            Ok(role)
        });
        let roles: Vec<Result<RoleProgram, LowerError>> = roles.collect();
        Ok(Program {
            roles: roles.into_iter().collect::<Result<_, _>>()?,
            transfers: draft.transfers,
            n_microbatches: plan.n_microbatches,
            microbatch: plan.microbatch,
            route: plan.schedule.route(),
        })
    }
}
