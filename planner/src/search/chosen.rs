//! A chosen pipeline's plan. Stages of one shape, price and sequence of layer kinds are solved
//! once, however many there are.
//!
//! The models of a shape are made anew: those of the candidates were dropped with their
//! microbatch size, because a free search has too many of them to keep. Where the pins leave one
//! shape for one microbatch size, they were kept ([`Search::models`]).

use super::{Pipeline, Search, no_strategy, weigh, weight_at};
use crate::PlanError;
use crate::assemble::{ChosenStage, add_stage};
use crate::groups::Phases;
use crate::inter_op::{PipelineCost, StageChoice};
use crate::interleave::cost_of_times;
use crate::layer_model::{LayerModel, Weights};
use crate::refine::{Refined, refine};
use crate::stage::PricedMesh;
use intra_op::problem::IntraOpProblem;
use ir::plan::{PASSES_VERSION, PLAN_VERSION, Plan, Prediction, Proof};
use ir::{DeviceMesh, Graph, LogicalMesh, Rank};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Everything that the choices of a stage of one shape depend on: weights, kinds of its layers,
/// and, where memory has a price, microbatches in flight and bytes for parameters and saved
/// tensors.
type Question = (usize, Vec<usize>, Option<(u64, u64)>);

/// The layer models of shapes of one microbatch size, by their numbers.
pub(super) type ShapeModels = BTreeMap<usize, Arc<Vec<LayerModel>>>;

/// The plan of a pipeline without its paths.
pub(super) struct Assembled {
    pub plan: Plan,
    /// The intra-op problems that were solved.
    pub problems: Vec<IntraOpProblem>,
    /// Times of the stages for one microbatch and once per step, without sending and before
    /// they were refined.
    pub times: Vec<Phases>,
}

/// A stage with its choices.
#[derive(Clone)]
struct Solved {
    refined: Refined,
    /// Before it was refined.
    time: Phases,
}

/// Shape and weights of a stage's entry in the stage table.
fn tag(stage: &StageChoice) -> (usize, usize) {
    ((stage.tag >> 16) as usize, (stage.tag & 0xffff) as usize)
}

impl Search<'_> {
    /// The plan of a pipeline, with `reserve` bytes left for placing its buffers; none where no
    /// strategies of a stage keep to the pipeline's ZeRO level. `models` keeps the models of its
    /// shapes for other pipelines of the same microbatch size.
    pub(super) fn assemble(
        &self,
        forward: &Graph,
        p: &Pipeline,
        reserve: u64,
        models: &mut ShapeModels,
    ) -> Result<Option<Assembled>, PlanError> {
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
        let mut solved: Vec<Option<Solved>> = vec![None; p.choice.stages.len()];
        let chosen: BTreeSet<usize> = p.choice.stages.iter().map(|s| tag(s).0).collect();
        for c in chosen {
            let shape = shapes
                .get(c)
                .ok_or_else(|| PlanError::Defect("a chosen shape is gone".into()))?;
            if let Entry::Vacant(vacant) = models.entry(c) {
                let s = self.setting(shape, p.batch);
                vacant.insert(self.models(&s).map_err(no_strategy)?);
            }
            if !self.solve_stages(forward, p, reserve, c, &models[&c], &mut solved)? {
                return Ok(None);
            }
        }
        let mut times = Vec::with_capacity(p.choice.stages.len());
        let n_meshes = p.choice.stages.len() / p.schedule.virtual_stages() as usize;
        let mut first_rank = 0;
        for (i, (stage, solved)) in p.choice.stages.iter().zip(solved).enumerate() {
            let (c, _) = tag(stage);
            let shape = &shapes[c];
            let Solved { refined, time } = solved.expect("the stages of every shape were solved");
            times.push(time);
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
        Ok(Some(Assembled {
            plan,
            problems,
            times,
        }))
    }

    /// The cost of a pipeline whose stages take these times instead of those that it was chosen
    /// for.
    pub(super) fn cost(&self, p: &Pipeline, times: &[Phases]) -> PipelineCost {
        let stages = p.choice.stages.iter().zip(times);
        let sent = stages.map(|(s, t)| t.forward + t.backward + s.transfer_s);
        let (sent, steps): (Vec<f64>, Vec<f64>) = sent.zip(times.iter().map(|t| t.step)).unzip();
        let schedule = p.schedule.schedule();
        let n_meshes = sent.len() / schedule.virtual_stages().max(1) as usize;
        cost_of_times(&sent, &steps, n_meshes, schedule.latency(n_meshes, p.m))
    }

    /// Solves the stages of shape `shape`, whose layer models are `models`, each different one
    /// once; false where no strategies of one of them keep to the pipeline's ZeRO level.
    fn solve_stages(
        &self,
        forward: &Graph,
        p: &Pipeline,
        reserve: u64,
        shape: usize,
        models: &[LayerModel],
        solved: &mut [Option<Solved>],
    ) -> Result<bool, PlanError> {
        let shapes = self.shapes(p.batch);
        let s = self.setting(&shapes[shape], p.batch);
        let base = Weights {
            level: p.level,
            ..Weights::free(p.m)
        };
        let weighted = weigh(models, base).map_err(no_strategy)?;
        let mut priced: BTreeMap<usize, PricedMesh<'_>> = BTreeMap::new();
        let mut known: BTreeMap<Question, Solved> = BTreeMap::new();
        let whole = s.cluster.usable_bytes().saturating_sub(reserve);
        for (stage, solved) in p.choice.stages.iter().zip(solved) {
            let (c, w) = tag(stage);
            if c != shape {
                continue;
            }
            let priced = priced.entry(w).or_insert_with(|| {
                let level = p.level;
                PricedMesh::new(
                    &weighted,
                    Weights {
                        level,
                        ..weight_at(p.m, w)
                    },
                )
            });
            let kinds: Vec<usize> = stage.layers.clone().map(|l| self.layers.kind[l]).collect();
            let path = match (priced.path(&s, &kinds), p.level) {
                (Some(path), _) => path,
                (None, Some(_)) => return Ok(false),
                // It was chosen for the cost of one.
                (None, None) => {
                    return Err(PlanError::Defect("a chosen stage has no path".into()));
                }
            };
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
                let mut same = known.clone();
                let problem = same.refined.problem;
                same.refined.problem = problem.map(|problem| IntraOpProblem { name, ..problem });
                *solved = Some(same);
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
            let time = path.cost.time;
            let new = Solved { refined, time };
            known.insert(question, new.clone());
            *solved = Some(new);
        }
        Ok(true)
    }
}
