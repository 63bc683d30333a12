//! A chosen pipeline's plan. Stages of one shape, price and sequence of layer kinds are solved
//! once, however many there are.
//!
//! The models of a shape are those of the candidates where these were kept: of shapes that a found
//! pipeline is made of, and of shapes of the whole cluster, which are looked at again
//! ([`super::hiding`]). A free search has too many of them to keep all.

use super::candidates::{Models, Weighted};
use super::mixes::Rungs;
use super::simple::Likeness;
use super::{Pipeline, Search, Shape, no_strategy, refer, scale, weigh_all};
use crate::PlanError;
use crate::assemble::{ChosenLayer, ChosenStage, add_stage};
use crate::groups::{Phases, Setting};
use crate::inter_op::{PipelineChoice, PipelineCost, StageChoice};
use crate::interleave::{Meshes, cost_of_times};
use crate::layer_model::{Assumed, LayerCost, LayerModel, ModelError, Weights};
use crate::refine::{Refined, Stage, proved, refine};
use crate::stage::{LayerChoice, PricedMesh, StagePath};
use intra_op::problem::IntraOpProblem;
use ir::plan::{PASSES_VERSION, PLAN_VERSION, Plan, Prediction, Proof};
use ir::{DeviceMesh, Graph, LogicalMesh, Rank};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock, PoisonError};

/// Everything that the choices of a stage of one shape depend on: prices, kinds of its layers,
/// and, where memory has a price, microbatches in flight and bytes for parameters and saved
/// tensors.
type Question = (Rungs, Vec<usize>, Option<(u64, u64)>);

/// The layer models of a shape for one microbatch size.
pub(super) struct ShapeModels {
    /// See [`Assumed::gradients`].
    gradients: bool,
    /// With as little recomputed as may be.
    pub(super) first: Vec<LayerModel>,
    /// Under the other choices of what is recomputed, once asked for.
    pub(super) others: OnceLock<Result<Models, ModelError>>,
}

/// The models of what is looked at again, by microbatch size, number of the shape and
/// [`Assumed::gradients`].
pub(super) type Kept = BTreeMap<(u64, usize, bool), Arc<OnceLock<MadeModels>>>;

/// Models, or why there are none.
type MadeModels = Result<Arc<ShapeModels>, ModelError>;

/// A shape with the models that a pipeline looks at.
#[derive(Clone, Copy)]
struct OfShape<'m> {
    shape: &'m Shape,
    first: &'m [LayerModel],
    /// Empty where no memory was priced.
    others: &'m Models,
}

impl<'m> OfShape<'m> {
    /// The models under some weights of time, by the choice of what is recomputed.
    fn weighted(&self, weights: Weights) -> Result<Weighted<'m>, ModelError> {
        let first = self.first.iter().map(|m| m.weighted(weights).map(Some));
        let mut weighted = vec![first.collect::<Result<Vec<_>, _>>()?];
        weighted.extend(weigh_all(self.others, weights)?);
        Ok(weighted)
    }

    /// The model of a layer kind under a choice of what is recomputed.
    fn of(&self, kind: usize, variant: usize) -> &'m LayerModel {
        let others = variant.checked_sub(1).map(|v| &self.others[v][kind]);
        others.and_then(Option::as_ref).unwrap_or(&self.first[kind])
    }
}

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

/// Shape and prices of a stage's entry in the stage table.
fn tag(stage: &StageChoice) -> (usize, Rungs) {
    Rungs::of_tag(stage.tag)
}

/// Numbers of the shapes that a pipeline is made of.
pub(super) fn shapes_of(choice: &PipelineChoice) -> impl Iterator<Item = usize> {
    choice.stages.iter().map(|stage| tag(stage).0)
}

/// Whether a cost that no choices of one stage can beat is one for another, which has the same
/// layers and no more room.
fn holds_for(one: &Question, other: &Question) -> bool {
    let room = |(one, other): ((u64, u64), (u64, u64))| one.0 <= other.0 && one.1 >= other.1;
    one.1 == other.1 && one.2.zip(other.2).is_some_and(room)
}

impl Search<'_> {
    /// The models of shape `index`, which are made once however often they are asked for.
    pub(super) fn kept_models(
        &self,
        index: usize,
        shape: &Shape,
        batch: u64,
        gradients: bool,
    ) -> MadeModels {
        let slot = {
            let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(kept.entry((batch, index, gradients)).or_default())
        };
        let made = slot.get_or_init(|| self.made_models(shape, batch, gradients));
        made.clone()
    }

    /// Forgets models, but for those of microbatch sizes and shapes that stay.
    pub(super) fn forget_models(&self, stays: impl Fn(u64, usize) -> bool) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|&(batch, index, _), _| stays(batch, index));
    }

    /// Forgets the models of a microbatch size for which these pipelines were found, but for those
    /// of shapes that they are made of and of shapes that [`hiding`](Self::hiding) looks at again.
    pub(super) fn forget_others<'c>(
        &self,
        batch: u64,
        shapes: &[Shape],
        found: impl Iterator<Item = &'c PipelineChoice>,
    ) {
        let used: BTreeSet<usize> = found.flat_map(shapes_of).collect();
        let whole = self.hiding_submesh();
        self.forget_models(|of, index| {
            let is_whole = |shape: &Shape| whole == Some(shape.submesh);
            of != batch || used.contains(&index) || shapes.get(index).is_none_or(is_whole)
        });
    }

    /// The models of a shape, made anew.
    fn made_models(&self, shape: &Shape, batch: u64, gradients: bool) -> MadeModels {
        let setting = Setting {
            gradients_hide: gradients,
            ..self.setting(shape, batch)
        };
        Ok(Arc::new(ShapeModels {
            gradients,
            first: self.models(&setting)?,
            others: OnceLock::new(),
        }))
    }

    /// The models of a shape under the other choices of what is recomputed.
    pub(super) fn others_of<'m>(
        &self,
        models: &'m ShapeModels,
        shape: &Shape,
        batch: u64,
    ) -> Result<&'m Models, ModelError> {
        let made = || {
            let mut settings = self.settings(shape, batch);
            for setting in &mut settings {
                setting.gradients_hide = models.gradients;
            }
            self.other_models(&settings)
        };
        models
            .others
            .get_or_init(made)
            .as_ref()
            .map_err(Clone::clone)
    }

    /// The plan of a pipeline, with `reserve` bytes left for placing its buffers; none where no
    /// strategies of a stage keep to the pipeline's ZeRO level. What is proved about its stages is
    /// worked out where `proves` says so.
    pub(super) fn assemble(
        &self,
        forward: &Graph,
        p: &Pipeline,
        reserve: u64,
        proves: bool,
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
            pins: self.asked.describe(),
            headroom: self.headroom,
            made_for: None,
            predicted: Prediction::default(),
            proof: Proof::default(),
        };
        let shapes = self.shapes(p.batch);
        let mut solved: Vec<Option<Solved>> = vec![None; p.choice.stages.len()];
        let chosen: BTreeSet<usize> = p.choice.stages.iter().map(|s| tag(s).0).collect();
        let none = Models::new();
        let mut models: BTreeMap<usize, Arc<ShapeModels>> = BTreeMap::new();
        for &c in &chosen {
            let shape = shapes
                .get(c)
                .ok_or_else(|| PlanError::Defect("a chosen shape is gone".into()))?;
            let kept = self
                .kept_models(c, shape, p.batch, p.assumed.gradients)
                .map_err(no_strategy)?;
            models.insert(c, kept);
        }
        let mut of_shapes: BTreeMap<usize, OfShape<'_>> = BTreeMap::new();
        for (&c, models) in &models {
            // Where no memory was priced everything is kept.
            let mut of_shape = p.choice.stages.iter().filter(|s| tag(s).0 == c);
            let is_pressed = of_shape.any(|s| !p.likeness.rungs(p, s).are_free());
            let others = match is_pressed {
                true => self.others_of(models, &shapes[c], p.batch),
                false => Ok(&none),
            };
            let of_shape = OfShape {
                shape: &shapes[c],
                first: &models.first,
                others: others.map_err(no_strategy)?,
            };
            if !self.solve_stages(forward, p, reserve, (c, of_shape), &mut solved, proves)? {
                return Ok(None);
            }
            of_shapes.insert(c, of_shape);
        }
        let mut times = Vec::with_capacity(p.choice.stages.len());
        let n_meshes = p.choice.stages.len() / p.schedule.virtual_stages() as usize;
        let route = p.schedule.route();
        let mut next_rank = 0;
        for (i, (stage, solved)) in p.choice.stages.iter().zip(solved).enumerate() {
            let (c, _) = tag(stage);
            let shape = &shapes[c];
            let Solved { refined, time } = solved.expect("the stages of every shape were solved");
            times.push(time);
            let first_rank = match i < n_meshes {
                true => next_rank,
                false => {
                    let shared = &plan.stages[route.mesh_of(i, n_meshes)].mesh;
                    shared.devices.first_rank.0
                }
            };
            next_rank += shape.mesh.n_devices();
            let mesh = LogicalMesh {
                devices: DeviceMesh {
                    first_rank: Rank(first_rank),
                    n_devices: shape.mesh.n_devices(),
                },
                axes: shape.mesh.axes.clone(),
            };
            let models = &of_shapes[&c];
            let kinds = &self.layers().kind[stage.layers.clone()];
            let chosen = kinds.iter().zip(&refined.choices);
            let chosen = chosen.map(|(&kind, choice)| {
                let variant = &self.variants[choice.variant];
                ChosenLayer {
                    training: &variant.training,
                    layers: &variant.layers,
                    model: models.of(kind, choice.variant),
                    groups: &choice.groups,
                }
            });
            let chosen = ChosenStage {
                layers: stage.layers.clone(),
                mesh,
                choices: chosen.collect(),
            };
            add_stage(&mut plan, &chosen, &self.pins.spaces());
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
        let meshes = Meshes {
            n: n_meshes,
            route: schedule.route(),
        };
        cost_of_times(&sent, &steps, meshes, schedule.latency(n_meshes, p.m))
    }

    /// Solves the stages of shape `shape`, whose layer models are `models`, each different one
    /// once; false where no strategies of one of them keep to the pipeline's ZeRO level.
    fn solve_stages(
        &self,
        forward: &Graph,
        p: &Pipeline,
        reserve: u64,
        (shape, models): (usize, OfShape<'_>),
        solved: &mut [Option<Solved>],
        proves: bool,
    ) -> Result<bool, PlanError> {
        let settings = self.settings(models.shape, p.batch);
        let base = Weights::free(p.m).assuming(p.assumed);
        let weighted = models.weighted(base).map_err(no_strategy)?;
        let weighted = refer(&weighted);
        // What hides was charged in part to find the choices, and what fills a pipeline was charged
        // to each stage. What is proved charges every stage what it costs.
        let level = p.assumed.level;
        let charged = Weights::free(p.m).assuming(Assumed {
            level,
            ..Assumed::default()
        });
        let in_full = match proves && base != charged {
            true => Some(models.weighted(charged).map_err(no_strategy)?),
            false => None,
        };
        let in_full = in_full.as_ref().map(refer);
        let mut priced: BTreeMap<u16, PricedMesh<'_>> = BTreeMap::new();
        let mut known: BTreeMap<Question, Solved> = BTreeMap::new();
        let whole = self.bytes_of(settings[0].cluster).saturating_sub(reserve);
        // Later stages have less in flight: what is proved about them holds for those before.
        for (stage, solved) in p.choice.stages.iter().zip(solved).rev() {
            if tag(stage).0 != shape {
                continue;
            }
            let rungs = p.likeness.rungs(p, stage);
            for rung in [rungs.first, rungs.rest] {
                priced.entry(rung).or_insert_with(|| {
                    let weights = scale::weights_at(p.m, rung.into()).assuming(p.assumed);
                    PricedMesh::of_variants(&weighted, weights)
                });
            }
            let kinds = stage.layers.clone().map(|l| self.layers().kind[l]);
            let kinds: Vec<usize> = kinds.collect();
            let mut path = |rung: u16| priced.get_mut(&rung)?.path(&settings, &kinds);
            let (small, fast) = match rungs.is_one() {
                true => (None, path(rungs.rest)),
                false => (path(rungs.first), path(rungs.rest)),
            };
            let made = fast.and_then(|fast| {
                mixed_path(
                    &priced,
                    &kinds,
                    rungs,
                    small.as_ref(),
                    &fast,
                    p.assumed.level.is_some(),
                )
            });
            let (choices, cost) = match (made, p.assumed.level) {
                (Some(made), _) => made,
                (None, Some(_)) => return Ok(false),
                // It was chosen for the cost of one.
                (None, None) => {
                    return Err(PlanError::Defect("a chosen stage has no path".into()));
                }
            };
            let budget = stage
                .share_bytes
                .unwrap_or(whole.saturating_sub(cost.transient_bytes));
            let is_pressed = !rungs.are_free();
            let question = (
                rungs,
                kinds,
                is_pressed.then_some((stage.in_flight, budget)),
            );
            let (layers, assumes) = (&stage.layers, base != charged);
            let name = format!(
                "{} layers {}..{}{}",
                forward.name,
                layers.start,
                layers.end,
                if assumes { ", assumed costs" } else { "" }
            );
            if let Some(known) = known.get(&question) {
                let mut same = known.clone();
                let problem = same.refined.problem;
                same.refined.problem = problem.map(|problem| IntraOpProblem { name, ..problem });
                *solved = Some(same);
                continue;
            }
            let bound = known.iter().filter(|(of, _)| holds_for(of, &question));
            let bound = bound.map(|(_, solved)| solved.refined.bound).max();
            let kinds = &question.1;
            let layers = kinds.iter().zip(&choices);
            let layers: Vec<&LayerModel> = layers
                .map(|(&kind, choice)| models.of(kind, choice.variant))
                .collect();
            let saved = cost.saved_bytes.saturating_mul(stage.in_flight);
            let fits = cost.static_bytes.saturating_add(saved) <= budget;
            let of_base = Stage {
                name: &name,
                layers: &layers,
                kinds,
                weighted: &weighted,
                weights: base,
                in_flight: stage.in_flight,
                budget,
                is_pressed,
                may_mix: p.likeness == Likeness::Whole || p.likeness == Likeness::Priced && !fits,
                price: scale::weights_at(p.m, rungs.first.into()).static_price,
                fits,
                bound: bound.unwrap_or(0),
                proves,
            };
            let mut refined = refine(&of_base, choices)?;
            if let Some(in_full) = &in_full {
                let in_full = Stage {
                    weighted: in_full,
                    weights: charged,
                    ..of_base
                };
                refined.proof = proved(&in_full, &refined.choices)?;
            }
            let time = cost.time;
            let new = Solved { refined, time };
            known.insert(question, new.clone());
            *solved = Some(new);
        }
        Ok(true)
    }
}

/// The choices for a stage's layers under its prices, and what they cost: the first layers as under
/// the dearer, the others as under the cheaper. Where the two do not meet in one layout, as may be
/// at a level that they were not mixed at, all are as under the dearer.
fn mixed_path(
    priced: &BTreeMap<u16, PricedMesh<'_>>,
    kinds: &[usize],
    rungs: Rungs,
    small: Option<&StagePath>,
    fast: &StagePath,
    at_level: bool,
) -> Option<(Vec<LayerChoice>, LayerCost)> {
    let n = usize::from(rungs.n_first);
    let cost = match small {
        None => Some((0, fast.cost)),
        Some(small) => match super::mixes::joined(small, fast, n) {
            Some(cost) => Some((n, cost)),
            None => at_level.then_some((kinds.len(), small.cost)),
        },
    };
    let (n, cost) = cost?;
    let choice = |i: usize| {
        let (rung, path) = match small.filter(|_| i < n) {
            Some(small) => (rungs.first, small),
            None => (rungs.rest, fast),
        };
        let (entry, exit) = (path.boundaries[i], path.boundaries[i + 1]);
        priced.get(&rung)?.decode(kinds[i], entry, exit)
    };
    let choices: Option<Vec<LayerChoice>> = (0..kinds.len()).map(choice).collect();
    Some((choices?, cost))
}
