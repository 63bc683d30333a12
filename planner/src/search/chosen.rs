//! A chosen pipeline's plan. Stages of one shape, price and sequence of layer kinds are solved
//! once, however many there are.
//!
//! The models of a shape are made anew: those of the candidates were dropped with their
//! microbatch size, because a free search has too many of them to keep. Where the pins leave one
//! shape for one microbatch size, they were kept ([`Search::models`]).

use super::{Pipeline, Search, no_strategy, weigh, weight_at};
use crate::PlanError;
use crate::assemble::{ChosenStage, add_stage};
use crate::inter_op::StageChoice;
use crate::intra_op::problem::IntraOpProblem;
use crate::layer_model::{LayerModel, Weights};
use crate::refine::{Refined, refine};
use crate::stage::PricedMesh;
use ir::plan::{PASSES_VERSION, PLAN_VERSION, Plan, Prediction, Proof};
use ir::{DeviceMesh, Graph, LogicalMesh, Rank};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Everything that the choices of a stage of one shape depend on: weights, kinds of its layers,
/// and, where memory has a price, microbatches in flight and bytes for parameters and saved
/// tensors.
type Question = (usize, Vec<usize>, Option<(u64, u64)>);

/// Shape and weights of a stage's entry in the stage table.
fn tag(stage: &StageChoice) -> (usize, usize) {
    ((stage.tag >> 16) as usize, (stage.tag & 0xffff) as usize)
}

impl Search<'_> {
    /// The plan of a pipeline without its paths, and the intra-op problems that were solved.
    pub(super) fn assemble(
        &self,
        forward: &Graph,
        p: &Pipeline,
        reserve: u64,
    ) -> Result<(Plan, Vec<IntraOpProblem>), PlanError> {
        let mut problems = Vec::new();
        let mut plan = Plan {
            version: PLAN_VERSION,
            passes: PASSES_VERSION,
            name: forward.name.clone(),
            graph: ir::text::print(forward),
            train: self.train.clone(),
            cluster: self.cluster.clone(),
            microbatch: p.batch,
            n_microbatches: p.m,
            schedule: p.schedule,
            stages: Vec::new(),
            layer_strategies: Vec::new(),
            transfers: Default::default(),
            edges: Default::default(),
            pins: self.pins.describe(),
            predicted: Prediction::default(),
            proof: Proof::default(),
        };
        let shapes = self.shapes(p.batch);
        let mut models: BTreeMap<usize, Arc<Vec<LayerModel>>> = BTreeMap::new();
        let mut solved: Vec<Option<Refined>> = vec![None; p.choice.stages.len()];
        for stage in &p.choice.stages {
            let (c, _) = tag(stage);
            if models.contains_key(&c) {
                continue;
            }
            let (_, shape) = shapes
                .get(c)
                .ok_or_else(|| PlanError::Strategies("a chosen shape is gone".into()))?;
            let s = self.setting(shape, p.batch);
            let of_shape = self.models(&s).map_err(no_strategy)?;
            self.solve_stages(forward, p, reserve, c, &of_shape, &mut solved)?;
            models.insert(c, of_shape);
        }
        let n_meshes = p.choice.stages.len() / p.schedule.virtual_stages() as usize;
        let mut first_rank = 0;
        for (i, (stage, refined)) in p.choice.stages.iter().zip(solved).enumerate() {
            let (c, _) = tag(stage);
            let (_, shape) = &shapes[c];
            let refined = refined.expect("the stages of every shape were solved");
            if i % n_meshes == 0 {
                first_rank = 0;
            }
            let mesh = LogicalMesh {
                devices: DeviceMesh {
                    first_rank: Rank(first_rank),
                    n_devices: shape.mesh.n_devices(),
                },
                axes: shape.mesh.axes.clone(),
            };
            first_rank += shape.mesh.n_devices();
            add_stage(
                &mut plan,
                &self.setting(shape, p.batch),
                &self.layers,
                &ChosenStage {
                    layers: stage.layers.clone(),
                    mesh,
                    models: &models[&c],
                    choices: &refined.choices,
                },
            );
            plan.proof.stages.push(refined.proof);
            problems.extend(refined.problem);
        }
        Ok((plan, problems))
    }

    /// Solves the stages of shape `shape`, whose layer models are `models`, each different one
    /// once.
    fn solve_stages(
        &self,
        forward: &Graph,
        p: &Pipeline,
        reserve: u64,
        shape: usize,
        models: &[LayerModel],
        solved: &mut [Option<Refined>],
    ) -> Result<(), PlanError> {
        let shapes = self.shapes(p.batch);
        let s = self.setting(&shapes[shape].1, p.batch);
        let base = Weights {
            m: f64::from(p.m),
            step: 1.0,
            static_price: 0.0,
            saved_price: 0.0,
        };
        let weighted = weigh(models, base).map_err(no_strategy)?;
        let mut priced: BTreeMap<usize, PricedMesh<'_>> = BTreeMap::new();
        let mut known: BTreeMap<Question, Refined> = BTreeMap::new();
        let whole = self.cluster.usable_bytes().saturating_sub(reserve);
        for (stage, solved) in p.choice.stages.iter().zip(solved) {
            let (c, w) = tag(stage);
            if c != shape {
                continue;
            }
            let priced = priced
                .entry(w)
                .or_insert_with(|| PricedMesh::new(&weighted, weight_at(p.m, w)));
            let kinds: Vec<usize> = stage.layers.clone().map(|l| self.layers.kind[l]).collect();
            let path = priced
                .path(&s, &kinds)
                .ok_or_else(|| PlanError::Strategies("a chosen stage has no path".into()))?;
            let budget = stage
                .share_bytes
                .unwrap_or(whole.saturating_sub(path.cost.transient_bytes));
            let is_pressed = w != 0;
            let question = (w, kinds, is_pressed.then_some((stage.in_flight, budget)));
            let name = format!(
                "{} layers {}..{}",
                forward.name, stage.layers.start, stage.layers.end
            );
            if let Some(known) = known.get(&question) {
                let problem = known.problem.clone();
                *solved = Some(Refined {
                    problem: problem.map(|problem| IntraOpProblem { name, ..problem }),
                    ..known.clone()
                });
                continue;
            }
            let kinds = &question.1;
            let choices = kinds
                .iter()
                .enumerate()
                .map(|(i, &k)| priced.decode(k, path.boundaries[i], path.boundaries[i + 1]))
                .collect();
            let refined = refine(
                &name,
                models,
                &weighted,
                kinds,
                choices,
                base,
                stage.in_flight,
                budget,
                is_pressed,
            )?;
            known.insert(question, refined.clone());
            *solved = Some(refined);
        }
        Ok(())
    }
}
