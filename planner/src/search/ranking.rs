//! The last choice, by simulation.
//!
//! The additive objective knows no overlap: it charges every reduction of a gradient and every
//! gather of a parameter in full, whenever it runs. The simulator plays the lowered program and
//! hides them where they can be hidden. So the best pipelines by the objective are simulated,
//! and the fastest few of them once more under each ZeRO level, as if it were pinned: what is
//! gathered or reduced in the microbatches instead of once per step costs more by the objective
//! and often less in the program. The fastest of all that fit is the plan, or one that is simpler
//! and takes hardly longer ([`super::simple`]).
//!
//! The proof stays about the objective: a pipeline that was made at a level has its
//! objective as it is, beside the same bound.

mod further;

use super::batches::MAX_MICROBATCH;
use super::chosen::Assembled;
use super::hiding;
use super::interleaved;
use super::mixes::Rungs;
use super::outlook::{Shares, Shortfalls};
use super::simple::{Complexity, Frontier, Likeness};
use super::{Pipeline, Search, Shape};
use crate::assemble::record_paths;
use crate::groups::Phases;
use crate::layer_model::Assumed;
use crate::prices::Buckets;
use crate::{PlanError, PlanStats};
use cost_model::simulate::{SimulateOptions, Simulation, simulate};
use cost_model::work::StepWork;
use intra_op::problem::IntraOpProblem;
use ir::plan::{LayerStrategy, Plan, Proof, ScheduleKind, StagePlan, StageProof};
use ir::program::Program;
use ir::training::TrainingGraph;
use ir::{Bytes, Graph, Seconds, counted};
use lowering::{BucketSizes, Layouts, LowerError};
use rayon::prelude::*;
use std::collections::{BTreeSet, VecDeque};

/// Number of simulated pipelines that are tried at ZeRO levels: the fastest at all of
/// them, the next at that at which the first is fastest. To lower and simulate a pipeline takes
/// about a hundredth of the search, so that all of them at all levels would add a quarter.
const AT_LEVELS: usize = 2;
/// The same where that takes milliseconds, all at all levels.
const AT_LEVELS_IN_A_SMALL_ONE: usize = 6;
/// Number of simulated pipelines of which those of the other shapes of their mesh are tried.
const AT_SHAPES: usize = 2;
/// Number of simulated pipelines that are made once more as if part of what moves gradients of
/// activations were hidden.
const WITH_GRADIENTS: usize = 3;
/// A plan that takes so many times as long as the fastest is not looked at further.
const CLOSE: f64 = 1.02;
/// A pipeline whose traffic is assumed to hide is not simulated where its objective, under that
/// assumption, is so many times as long as the fastest step. Its program hides more than is
/// assumed: up to a third more, of what was seen.
const HIDES_MORE: f64 = 1.5;
/// A pipeline of one stage may take so many times as long as the fastest and still be as fast at
/// another ZeRO level: all of its devices share states. The most that was seen is 1.17 times.
const GAIN_OF_ONE_STAGE: f64 = 1.25;
/// Pipelines that are lowered and simulated at once: each keeps its program until it is compared.
const AT_ONCE: usize = 4;
/// Times that a pipeline is made, with more bytes left for placing its buffers, until it fits.
const TIMES: usize = 3;
/// Times that more bytes are left, four times as many each, until it is made differently.
const GROWTHS: usize = 4;
/// Filling a pipeline is let be where it is less than this part of the microbatches.
const FEW: u32 = 10;
/// The levels that can be pinned.
const LEVELS: [u8; 4] = [0, 1, 2, 3];

/// The outcome for the pipelines.
pub(super) enum Made {
    Fits(Box<Best>),
    /// The nearest plan's arena exceeds the budget by this many bytes.
    Overrun(u64),
}

/// The plan, with what was made of it.
pub(super) struct Best {
    pub plan: Plan,
    /// The training graph, with what its layers recompute.
    pub training: TrainingGraph,
    pub program: Program,
    pub simulation: Simulation,
}

/// The facts about all pipelines of a search.
pub(super) struct Known {
    /// No pipeline costs less.
    pub lower_bound: f64,
    /// The schedule that was asked for.
    pub schedule: ScheduleKind,
    /// Bytes that are left for placing buffers.
    pub reserve: u64,
    /// How much longer a step may take for a simpler plan, relatively.
    pub tolerance: f64,
}

/// A plan, lowered and simulated.
struct Played {
    plan: Box<Plan>,
    /// None where nothing is recomputed that need not be.
    training: Option<Box<TrainingGraph>>,
    problems: Vec<IntraOpProblem>,
    program: Program,
    simulation: Simulation,
    /// Seconds of each stage, as for [`Assembled`].
    times: Vec<Phases>,
}

/// A plan that may be taken, with the pipeline that it is of and the bytes that were left for
/// placing its buffers.
struct Taken {
    played: Box<Played>,
    pipeline: Pipeline,
    reserve: u64,
}

/// The outcome of playing a plan.
enum Outcome {
    Fits(Box<Played>),
    /// Its arena exceeds the budget by so many bytes.
    Overrun(u64),
}

/// A pipeline that fits, with the bytes that were left for placing its buffers.
struct Ranked {
    step_s: f64,
    /// The step by the objective, without anything assumed to hide.
    objective_s: f64,
    pipeline: Pipeline,
    reserve: u64,
    /// Its strategies, and what is proved about the stages.
    plan: Plan,
}

/// The pipelines that were simulated.
struct Simulated {
    best: Frontier<Taken>,
    /// Those that fit, the fastest first.
    ranked: Vec<Ranked>,
    /// Those that others are not held against for a while.
    aside: Vec<Ranked>,
    /// The fewest bytes by which one of the others exceeds the budget.
    overrun: u64,
    /// The fastest before layers were made alike: its seconds, the pipeline, and the bytes that
    /// were left for placing its buffers.
    champion: Option<(f64, Pipeline, u64)>,
}

impl Simulated {
    /// Keeps a pipeline that fits if it is faster than all before.
    fn see(&mut self, step_s: f64, p: &Pipeline, reserve: u64) {
        if self.champion.as_ref().is_none_or(|(s, ..)| step_s < *s) {
            self.champion = Some((step_s, p.clone(), reserve));
        }
    }

    /// The fastest pipelines with one stage on each mesh, if they are among the best of all.
    fn leading(&self, n: usize) -> impl Iterator<Item = &Ranked> {
        let plain = |r: &&Ranked| r.pipeline.schedule.virtual_stages() == 1;
        self.fastest(usize::MAX).filter(plain).take(n)
    }

    /// The fastest of those that nothing is assumed about, as far as they are close.
    fn fastest(&self, n: usize) -> impl Iterator<Item = &Ranked> {
        let known = || self.ranked.iter().filter(|r| !r.pipeline.assumed.hides());
        let limit = known().next().map_or(0.0, |r| r.step_s * CLOSE);
        known().filter(move |r| r.step_s <= limit).take(n)
    }
}

/// The decisions about the layers of a plan, without the layout changes that follow from them.
fn decisions(plan: &Plan) -> Vec<LayerStrategy> {
    let strategies = plan.layer_strategies.iter();
    let decided = |s: &LayerStrategy| LayerStrategy {
        edges: Default::default(),
        ..s.clone()
    };
    strategies.map(decided).collect()
}

/// The times that a pipeline's latency counts the time of a microbatch on each of its meshes,
/// beyond the number of microbatches; 0 where that is few of them. A stage's strategies are chosen
/// for `m t + s` of its seconds a microbatch and once per step, but of p equal stages each t counts
/// `m + p - 1` times: with few microbatches those that take less time for each are worth more.
fn filling(p: &Pipeline) -> u32 {
    let per_mesh = p.schedule.virtual_stages().max(1) as usize;
    let n_meshes = p.choice.stages.len() / per_mesh;
    let fill = n_meshes.saturating_sub(1).div_ceil(per_mesh);
    let fill = u32::try_from(fill).unwrap_or(0);
    match FEW.saturating_mul(fill) >= p.m {
        true => fill,
        false => 0,
    }
}

/// The proofs of a plan's stages as far as they were made with it. A stage that was chosen under
/// assumptions has a bound of zero, since a bound under these assumptions would say nothing about
/// what it costs.
fn unproved(taken: &Taken) -> Vec<StageProof> {
    let mut proofs = taken.played.plan.proof.stages.clone();
    if taken.pipeline.assumed != Assumed::default() {
        for stage in &mut proofs {
            stage.method = "assumed costs".into();
            stage.lower_bound_s = Seconds(0.0);
            stage.gap = f64::from(u8::from(stage.objective_s.0 > 0.0));
        }
    }
    proofs
}

/// The decisions that a plan is told from another by.
fn decided(plan: &Plan) -> (u64, ScheduleKind, &[LayerStrategy], &[StagePlan]) {
    let (strategies, stages) = (&plan.layer_strategies, &plan.stages);
    (plan.microbatch, plan.schedule, strategies, stages)
}

impl Search<'_> {
    /// Lowers and simulates pipelines, and the fastest at every level; the fastest that fits
    /// wins, the earlier of equals.
    pub(super) fn simulate_best(
        &self,
        forward: &Graph,
        pipelines: Vec<Pipeline>,
        known: &Known,
        stats: &mut PlanStats,
    ) -> Result<Made, PlanError> {
        let mut simulated = Simulated {
            best: Frontier::new(known.tolerance),
            ranked: Vec::new(),
            aside: Vec::new(),
            overrun: u64::MAX,
            champion: None,
        };
        let none_is_pinned = self.pins.zero.is_none();
        // What hides gains most by levels. What is fast then spares most of the others, which the
        // objective knows better; but whoever ends the search wants what it knows.
        let (mut hiding, mut others): (Vec<Pipeline>, Vec<Pipeline>) =
            pipelines.into_iter().partition(|p| p.assumed.hides());
        if self.ends() {
            others.append(&mut hiding);
        }
        self.simulate_all(forward, hiding, known, stats, &mut simulated)?;
        let n_hiding = if self.is_small() { usize::MAX } else { 1 };
        let hiding = std::mem::take(&mut simulated.ranked);
        for r in hiding.iter().take(n_hiding) {
            let levels: &[u8] = match (none_is_pinned, self.is_small()) {
                (false, _) => &[],
                (true, true) => &LEVELS,
                (true, false) => &hiding::LEVELS,
            };
            self.deepen(forward, r, levels, known, stats, &mut simulated)?;
        }
        simulated.ranked = hiding;
        self.simulate_all(forward, others, known, stats, &mut simulated)?;
        // The objective looked at all shapes together and found one mix of them; another may
        // hide more of its sending, or be simpler. Whoever ends the search does without.
        let alone = simulated.leading(match self.ends() {
            true => 0,
            false => self.effort.times(AT_SHAPES),
        });
        let alone = alone.flat_map(|r| self.of_one_shape(&r.pipeline, r.reserve));
        let alone: Vec<Pipeline> = alone.collect();
        self.simulate_all(forward, alone, known, stats, &mut simulated)?;
        if !self.ends() {
            // Of each microbatch size the fastest: what hides differs most between these.
            let mut sizes = BTreeSet::new();
            let fastest = simulated.fastest(usize::MAX);
            let fastest = fastest.filter(|r| sizes.insert(r.pipeline.batch));
            let fastest = fastest.take(self.effort.times(WITH_GRADIENTS));
            let hiding = fastest.filter_map(|r| self.with_gradients(&r.pipeline, r.reserve));
            let hiding: Vec<Pipeline> = hiding.collect();
            self.simulate_all(forward, hiding, known, stats, &mut simulated)?;
            self.look_further(forward, known, stats, &mut simulated)?;
        }
        let n_others = match self.is_small() {
            true => AT_LEVELS_IN_A_SMALL_ONE,
            false => self.effort.times(AT_LEVELS),
        };
        let ranked = std::mem::take(&mut simulated.ranked);
        let others = ranked.iter().filter(|r| {
            let assumed = r.pipeline.assumed;
            assumed.gradients || !assumed.hides()
        });
        let mut levels = match none_is_pinned {
            true => LEVELS.to_vec(),
            false => Vec::new(),
        };
        let others: Vec<&Ranked> = others.collect();
        let fastest_s = simulated.best.fastest_s();
        let may_gain =
            |r: &&Ranked| !self.holds_back() || r.step_s <= self.far(&r.pipeline) * fastest_s;
        for r in others.into_iter().filter(may_gain).take(n_others) {
            let fastest = self.deepen(forward, r, &levels, known, stats, &mut simulated)?;
            if levels.len() > 1 && !self.is_small() {
                levels = fastest.into_iter().collect();
            }
        }
        if let Some((step_s, p, reserve)) = simulated.champion.clone().filter(|_| !self.ends()) {
            let ways = self.uniform(&p, reserve, step_s);
            let mut near = Vec::new();
            for (p, played) in self.different(forward, ways, (reserve, &[]))? {
                let step_s = played.simulation.step_time.0;
                if simulated.best.is_near(step_s) {
                    near.push(p.clone());
                }
                simulated.see(step_s, &p, reserve);
                self.compare(&mut simulated.best, played, &p, reserve, known, stats);
            }
            let alike: Vec<Pipeline> = near.iter().flat_map(Likeness::alike).collect();
            for (p, played) in self.different(forward, alike, (reserve, &[]))? {
                self.compare(&mut simulated.best, played, &p, reserve, known, stats);
            }
        }
        let Simulated {
            mut best,
            overrun,
            champion,
            ..
        } = simulated;
        let mut champion = champion.map(|(_, p, reserve)| (p, reserve));
        // What was fastest at a level may be faster yet if what fills it counts.
        let at_level = champion.as_ref().filter(|(p, _)| {
            let at_level = p.assumed.level.is_some() && p.assumed.fill == 0;
            at_level && filling(p) > 0 && !self.is_small() && !self.ends()
        });
        if let Some((p, reserve)) = at_level.cloned() {
            let way = self.assuming(&p, reserve, p.assumed.level, filling(&p));
            for (p, played) in self.different(forward, vec![way], (reserve, &[]))? {
                if self.compare(&mut best, played, &p, reserve, known, stats) {
                    champion = Some((p, reserve));
                }
            }
        }
        if let Some((p, reserve)) = champion.filter(|_| !self.ends()) {
            let whole = Likeness::whole(&p).into_iter().collect();
            for (p, played) in self.different(forward, whole, (reserve, &[]))? {
                self.compare(&mut best, played, &p, reserve, known, stats);
            }
        }
        Ok(match best.simplest() {
            Some((taken, simpler)) => {
                // Whoever ends the search does without the bounds of stages, whose making takes as
                // long as a good part of it.
                let proofs = match self.ends() {
                    true => unproved(&taken),
                    false => self.stage_proofs(forward, &taken)?,
                };
                let Played {
                    mut plan,
                    training,
                    problems,
                    program,
                    simulation,
                    ..
                } = *taken.played;
                plan.proof.simpler = simpler;
                plan.proof.stages = proofs;
                stats.problems = problems;
                Made::Fits(Box::new(Best {
                    plan: *plan,
                    training: training.map_or_else(|| self.training().clone(), |t| *t),
                    program,
                    simulation,
                }))
            }
            None => Made::Overrun(overrun),
        })
    }

    /// Lowers and simulates a pipeline that fits at ZeRO levels, as if they were pinned, and what
    /// is near with its layers made alike. Returns the level at which it is fastest, where that is
    /// faster than the pipeline as it was.
    fn deepen(
        &self,
        forward: &Graph,
        r: &Ranked,
        levels: &[u8],
        known: &Known,
        stats: &mut PlanStats,
        simulated: &mut Simulated,
    ) -> Result<Option<u8>, PlanError> {
        if self.ends() {
            return Ok(None);
        }
        let (mut fastest, mut own_s) = (None, r.step_s);
        let mut near = vec![r.pipeline.clone()];
        let fill = filling(&r.pipeline);
        let fills: BTreeSet<u32> = match self.is_small() {
            true => [0, fill].into(),
            false => [0].into(),
        };
        let at = |fill: u32| levels.iter().map(move |&level| (Some(level), fill));
        let mut ways: Vec<(Option<u8>, u32)> = fills.into_iter().flat_map(at).collect();
        ways.extend((fill > 0).then_some((None, fill)));
        let ways = ways.into_par_iter();
        let ways: Vec<Pipeline> = ways
            .map(|(level, fill)| self.assuming(&r.pipeline, r.reserve, level, fill))
            .collect();
        let different = self.different(forward, ways, (r.reserve, &[&r.plan]))?;
        for (p, played) in different {
            let step_s = played.simulation.step_time.0;
            if simulated.best.is_near(step_s) {
                near.push(p.clone());
            }
            if step_s < own_s {
                (fastest, own_s) = (p.assumed.level.or(fastest), step_s);
            }
            simulated.see(step_s, &p, r.reserve);
            self.compare(&mut simulated.best, played, &p, r.reserve, known, stats);
        }
        // Layers that are alike are simpler, and faster where what they recompute hides behind
        // traffic that the objective charges. What is slower already is not made so.
        if !simulated.best.is_near(r.step_s) && near.len() == 1 {
            return Ok(fastest);
        }
        let alike: Vec<Pipeline> = near.iter().flat_map(Likeness::alike).collect();
        let different = self.different(forward, alike, (r.reserve, &[&r.plan]))?;
        for (p, played) in different {
            self.compare(&mut simulated.best, played, &p, r.reserve, known, stats);
        }
        Ok(fastest)
    }

    /// Lowers and simulates pipelines; those that overrun the memory once more with more of it left
    /// free.
    fn simulate_all(
        &self,
        forward: &Graph,
        pipelines: Vec<Pipeline>,
        known: &Known,
        stats: &mut PlanStats,
        simulated: &mut Simulated,
    ) -> Result<(), PlanError> {
        let asked = known.reserve;
        let mut pipelines = pipelines;
        // The cheapest first. What is assumed to hide is cheaper by the objective than it is, so it
        // comes last where both are simulated together.
        pipelines.sort_by(|a, b| {
            let hides = a.assumed.hides().cmp(&b.assumed.hides());
            hides.then(a.choice.cost.total_s.total_cmp(&b.choice.cost.total_s))
        });
        // With the bytes that each of them leaves for placing its buffers, and how often it was
        // made.
        let mut waiting: VecDeque<(Pipeline, u64, usize)> =
            pipelines.into_iter().map(|p| (p, asked, 1)).collect();
        let mut shortfalls = Shortfalls::default();
        let mut shares = Shares::default();
        let ordinary = simulated.ranked.iter();
        let ordinary = ordinary.filter(|r| !r.pipeline.assumed.hides());
        ordinary.for_each(|r| shares.add(&r.pipeline, r.step_s));
        loop {
            // Objectives against objectives: what hides has one of its own.
            let fitting = simulated.ranked.iter().map(|r| &r.pipeline);
            let fitting = fitting.filter(|p| !p.assumed.hides());
            let least = fitting.map(|p| p.choice.cost.total_s);
            let limit = self.held_back_s(least.fold(f64::INFINITY, f64::min));
            let fastest_s = simulated.best.fastest_s();
            let is_far = |p: &Pipeline| match p.assumed.hides() {
                true => p.choice.cost.total_s > HIDES_MORE * fastest_s,
                false => shares.least_s(p) > self.far(p) * fastest_s,
            };
            waiting.retain(|(p, ..)| {
                let hides = p.assumed.hides();
                (hides || p.choice.cost.total_s <= limit) && !(self.holds_back() && is_far(p))
            });
            if waiting.is_empty() || (!simulated.ranked.is_empty() && self.ends()) {
                break;
            }
            let some: Vec<_> = waiting.drain(..waiting.len().min(AT_ONCE)).collect();
            // What all like it lack is left free from the start.
            let some = some.into_par_iter().map(|(p, reserve, times)| {
                let lacks = shortfalls.of(&p).filter(|_| times == 1 && reserve == asked);
                match lacks.and_then(|lacks| self.smaller(&p, reserve, lacks)) {
                    Some((p, reserve)) => (p, reserve, times + 1),
                    None => (p, reserve, times),
                }
            });
            let some: Vec<(Pipeline, u64, usize)> = some.collect();
            let outcomes = some.par_iter().enumerate().map(|(i, (p, reserve, times))| {
                // Once the search is to end the first that fits will do; where it does not, the
                // next has its turn.
                if i > 0 && self.ends() {
                    return Ok(None);
                }
                let made = self.assemble(forward, p, *reserve, false)?;
                let defect = || PlanError::Defect("a chosen pipeline has no strategies".into());
                let outcome = self.play(forward, made.ok_or_else(defect)?)?;
                // What fills the memory to the last byte overruns it easily, and others need not
                // make room too.
                let less = match outcome {
                    Outcome::Overrun(over) if *times < TIMES => self.smaller(p, *reserve, over),
                    _ => None,
                };
                Ok(Some((outcome, less)))
            });
            let outcomes = outcomes.collect::<Result<Vec<_>, PlanError>>()?;
            let mut left = Vec::new();
            for ((mut p, reserve, times), outcome) in some.into_iter().zip(outcomes) {
                let Some((outcome, less)) = outcome else {
                    left.push((p, reserve, times));
                    continue;
                };
                if times == 1 && reserve == asked {
                    let over = match outcome {
                        Outcome::Overrun(over) => over,
                        Outcome::Fits(_) => 0,
                    };
                    shortfalls.add(&p, over);
                }
                match outcome {
                    Outcome::Overrun(over) => {
                        let all = over.saturating_add(reserve.saturating_sub(asked));
                        simulated.overrun = simulated.overrun.min(all);
                        waiting.extend(less.map(|(p, reserve)| (p, reserve, times + 1)));
                    }
                    Outcome::Fits(played) => {
                        // Where little moves, assuming that it hides changes nothing. What was
                        // chosen without that has a proof, so it is the one that stays.
                        let is_known = |r: &Ranked| decided(&r.plan) == decided(&played.plan);
                        let mut all = simulated.ranked.iter().chain(&simulated.aside);
                        if p.assumed.hides() && all.any(is_known) {
                            continue;
                        }
                        simulated.ranked.retain(|r| !is_known(r));
                        simulated.aside.retain(|r| !is_known(r));
                        let is_taken = |t: &Taken| decided(&t.played.plan) == decided(&played.plan);
                        simulated.best.drop_any(is_taken);
                        simulated.see(played.simulation.step_time.0, &p, reserve);
                        // It was chosen for less than its strategies cost.
                        let cost = (p.assumed.hides()).then(|| self.cost(&p, &played.times));
                        let full = cost.as_ref().unwrap_or(&p.choice.cost);
                        simulated.ranked.push(Ranked {
                            step_s: played.simulation.step_time.0,
                            objective_s: full.total_s,
                            pipeline: p.clone(),
                            reserve,
                            plan: (*played.plan).clone(),
                        });
                        // What was to hide may have no room to, which matters of what is near.
                        let fastest = simulated.ranked.iter().map(|r| r.step_s);
                        let fastest_s = fastest.fold(f64::INFINITY, f64::min);
                        let is_near = played.simulation.step_time.0 <= self.near() * fastest_s;
                        let lacks = match p.assumed.hides() && is_near && times < TIMES {
                            true => self.lacks_room(&played.program),
                            false => None,
                        };
                        let roomier = lacks.and_then(|lacks| self.smaller(&p, reserve, lacks));
                        waiting.extend(roomier.map(|(p, reserve)| (p, reserve, times + 1)));
                        match cost {
                            Some(cost) => p.choice.cost = cost,
                            None => shares.add(&p, played.simulation.step_time.0),
                        }
                        let best = &mut simulated.best;
                        self.compare(best, played, &p, reserve, known, stats);
                    }
                }
            }
            for one in left.into_iter().rev() {
                waiting.push_front(one);
            }
        }
        let ranked = &mut simulated.ranked;
        ranked.sort_by(|a, b| a.step_s.total_cmp(&b.step_s));
        Ok(())
    }

    /// Whether pipelines far from the fastest are held back by rules of thumb: nothing is where all
    /// of the space can be looked at, nor where devices share processors.
    fn holds_back(&self) -> bool {
        !self.mixes_submeshes() && self.cluster.pool.is_none()
    }

    /// A pipeline that takes so many times as long as the fastest gains too little by ZeRO levels
    /// or by likeness to be as fast.
    fn far(&self, p: &Pipeline) -> f64 {
        match p.choice.stages.len() {
            1 => GAIN_OF_ONE_STAGE.max(self.near()),
            _ => self.near(),
        }
    }

    /// The pipelines over the submesh of one, with as many stages, that are of one shape each and
    /// cost little more by the objective.
    fn of_one_shape(&self, p: &Pipeline, reserve: u64) -> Vec<Pipeline> {
        let shapes = self.narrow_shapes(p.batch);
        let stages = p.choice.stages.iter();
        let own: BTreeSet<usize> = stages.map(|s| Rungs::of_tag(s.tag).0).collect();
        let submeshes = own.iter().filter_map(|&i| shapes.get(i));
        let submeshes: BTreeSet<usize> = submeshes.map(|s| s.submesh).collect();
        let (Some(&submesh), 1) = (submeshes.first(), submeshes.len()) else {
            return Vec::new();
        };
        let others = shapes.iter().enumerate();
        let others =
            others.filter(|(i, s)| s.submesh == submesh && (own.len() > 1 || !own.contains(i)));
        let others: Vec<(usize, &Shape)> = others.collect();
        let made = others.into_par_iter().map(|(index, shape)| {
            let choice = self.plain_of(p, &[(index, shape)], reserve)?;
            let is_near = choice.cost.total_s < self.near() * p.choice.cost.total_s;
            is_near.then(|| Pipeline {
                choice,
                ..p.clone()
            })
        });
        made.flatten().collect()
    }

    /// A pipeline of the same shapes made again with so many bytes reserved and at its ZeRO level.
    /// None where the pins leave nothing else to choose from.
    fn again(&self, p: &Pipeline, reserve: u64) -> Option<Pipeline> {
        let choice = match p.schedule.virtual_stages() {
            1 => self.plain_again(p, reserve),
            _ if self.chooses_interleaving() => self.ring_again(p, reserve),
            _ => None,
        };
        choice.map(|choice| Pipeline {
            choice,
            ..p.clone()
        })
    }

    /// A pipeline that overran the memory by so many bytes, or has so many too few for what is to
    /// hide, made again with more reserved, until other strategies are chosen: what it was chosen
    /// for may have left more free than that.
    fn smaller(&self, p: &Pipeline, reserve: u64, over: u64) -> Option<(Pipeline, u64)> {
        let entries =
            |p: &Pipeline| -> Vec<u64> { p.choice.stages.iter().map(|s| s.tag).collect() };
        let mut more = over.saturating_add(over / 16);
        for _ in 0..GROWTHS {
            let reserve = reserve.saturating_add(more);
            let less = self.again(p, reserve)?;
            if entries(&less) != entries(p) {
                return Some((less, reserve));
            }
            more = more.saturating_mul(4);
        }
        None
    }

    /// A pipeline made again at a ZeRO level, if there is one, for what memory costs there, and for
    /// so many more times that a microbatch counts.
    fn assuming(&self, p: &Pipeline, reserve: u64, level: Option<u8>, fill: u32) -> Pipeline {
        let as_it_is = Pipeline {
            assumed: Assumed {
                level: level.or(p.assumed.level),
                fill,
                ..p.assumed
            },
            ..p.clone()
        };
        self.again(&as_it_is, reserve).unwrap_or(as_it_is)
    }

    /// A pipeline made in several ways with so many bytes reserved, without those in which it does
    /// not fit, has no strategies left or is what it is in another or one of these plans.
    fn different(
        &self,
        forward: &Graph,
        ways: Vec<Pipeline>,
        (reserve, known): (u64, &[&Plan]),
    ) -> Result<Vec<(Pipeline, Box<Played>)>, PlanError> {
        let made = ways.into_par_iter().map(|pipeline| {
            let made = self.assemble(forward, &pipeline, reserve, false)?;
            Ok(made.map(|made| (pipeline, made)))
        });
        let made = made.collect::<Result<Vec<_>, PlanError>>()?;
        let mut different: Vec<(Pipeline, Assembled)> = Vec::new();
        for (mut pipeline, made) in made.into_iter().flatten() {
            let before = different.iter().map(|(_, made)| &made.plan);
            if before
                .chain(known.iter().copied())
                .any(|p| decided(p) == decided(&made.plan))
            {
                continue;
            }
            pipeline.choice.cost = self.cost(&pipeline, &made.times);
            different.push((pipeline, made));
        }
        // In parallel; collected in order.
        let played = different.into_par_iter().map(|(pipeline, made)| {
            Ok(match self.play(forward, made)? {
                Outcome::Fits(played) => Some((pipeline, played)),
                Outcome::Overrun(_) => None,
            })
        });
        let played = played.collect::<Result<Vec<_>, PlanError>>()?;
        Ok(played.into_iter().flatten().collect())
    }

    /// Proofs of the stages of the plan that is taken.
    fn stage_proofs(&self, forward: &Graph, taken: &Taken) -> Result<Vec<StageProof>, PlanError> {
        let p = &taken.pipeline;
        let again = self.assemble(forward, p, taken.reserve, true)?;
        let again = again.filter(|a| decisions(&a.plan) == decisions(&taken.played.plan));
        let defect = || PlanError::Defect("a plan is another when it is made again".into());
        let mut proofs = again.ok_or_else(defect)?.plan.proof.stages;
        // A stage's bound is of the choices at its level, within what that leaves for them.
        if let Some(level) = p.assumed.level {
            for stage in &mut proofs {
                stage.method += &format!(" at ZeRO level {level}");
            }
        }
        Ok(proofs)
    }

    /// Bytes that a program has too few of for its streams to wait for each other's results alone.
    fn lacks_room(&self, program: &Program) -> Option<u64> {
        let lacks = program.roles.par_iter().map(|role| {
            let usable = self.bytes_of(&self.cluster.seen_by(role.mesh.devices));
            lowering::arena_with_room(role).saturating_sub(usable)
        });
        lacks.max().filter(|&lacks| lacks > 0)
    }

    /// Lowers and simulates a plan.
    fn play(&self, forward: &Graph, made: Assembled) -> Result<Outcome, PlanError> {
        let Assembled {
            mut plan,
            problems,
            times,
        } = made;
        let lower = |e: LowerError| PlanError::Lower(e.to_string());
        let own = self.training_of(&plan, forward)?;
        let training = own.as_deref().unwrap_or(self.training());
        let layouts = Layouts::new(&plan, training).map_err(lower)?;
        record_paths(&mut plan, &layouts, training, &Buckets::new(training)).map_err(lower)?;
        let program = match self.one_by_one {
            true => layouts.lower_one_by_one(&plan, training),
            false => layouts.lower(&plan, training, &BucketSizes::default()),
        };
        let program = program.map_err(lower)?;
        let over = program.roles.iter().map(|r| {
            let usable = self.bytes_of(&self.cluster.seen_by(r.mesh.devices));
            r.arena_bytes.saturating_sub(usable)
        });
        if let Some(over) = over.max().filter(|&over| over > 0) {
            return Ok(Outcome::Overrun(over));
        }
        let simulation = simulate(
            &program,
            self.cluster,
            &SimulateOptions::new(StepWork::of(training, self.train)),
        )
        .map_err(|e| PlanError::Lower(e.to_string()))?;
        plan.predicted = simulation.prediction.clone();
        Ok(Outcome::Fits(Box::new(Played {
            plan: Box::new(plan),
            training: own,
            problems,
            program,
            simulation,
            times,
        })))
    }

    /// The training graph of a plan; none where it is that of all layers that recompute no more
    /// than they have to.
    fn training_of(
        &self,
        plan: &Plan,
        forward: &Graph,
    ) -> Result<Option<Box<TrainingGraph>>, PlanError> {
        let keeps_all = self.variants[0].keeps_all;
        let recomputes = plan.layer_strategies.iter();
        let mut recomputes = recomputes.map(|s| !s.recompute.is_empty());
        if self.variants.len() == 1 || keeps_all && !recomputes.any(|r| r) {
            return Ok(None);
        }
        let training = match keeps_all {
            true => plan.recomputing(self.training()),
            false => plan.training_graph(forward),
        };
        let training = training.map_err(|e| PlanError::Lower(e.to_string()))?;
        Ok(Some(Box::new(training)))
    }

    /// Counts what was simulated, and keeps it if it may be the best; whether it is the fastest.
    fn compare(
        &self,
        best: &mut Frontier<Taken>,
        mut new: Box<Played>,
        p: &Pipeline,
        reserve: u64,
        known: &Known,
        stats: &mut PlanStats,
    ) -> bool {
        stats.simulated += 1;
        let step_time = new.simulation.step_time;
        let mut what = counted(new.plan.stages.len() as u64, "stage");
        if p.schedule.virtual_stages() > 1 {
            let meshes = counted(new.program.roles.len() as u64, "mesh");
            what += &format!(" interleaved on {meshes}");
        }
        what += &format!(", microbatch {}", p.batch);
        if let Some(level) = p.assumed.level {
            what += &format!(", ZeRO level {level}");
        }
        what += match (p.assumed.hides(), p.assumed.gradients) {
            (false, _) => "",
            (true, false) => ", parameters on their way while others compute",
            (true, true) => ", gradients on their way while others compute",
        };
        if p.assumed.fill > 0 {
            what += ", chosen for what fills the pipeline too";
        }
        what += p.likeness.words();
        // Ways that are the same in another pipeline are one.
        let alternative = (what, step_time);
        if !stats.alternatives.contains(&alternative) {
            stats.alternatives.push(alternative);
        }
        let ranks = new.plan.stages.iter().map(|s| s.mesh.n_devices());
        let work_s = self.work_s(p, &new.times, &ranks.collect::<Vec<_>>());
        new.plan.proof = Proof {
            stages: std::mem::take(&mut new.plan.proof.stages),
            ..self.proof(p, work_s, known, stats.candidates, reserve)
        };
        stats.simulated_plans.push((*new.plan).clone());
        let complexity = Complexity::of(&new.plan, p);
        let taken = Taken {
            played: new,
            pipeline: p.clone(),
            reserve,
        };
        best.add(step_time.0, complexity, taken)
    }

    fn proof(
        &self,
        p: &Pipeline,
        work_s: f64,
        known: &Known,
        candidates: u64,
        reserve: u64,
    ) -> Proof {
        let schedule = known.schedule;
        let objective = p.choice.cost.total_s.max(work_s);
        let lower = known.lower_bound.min(objective).max(0.0);
        let mixed = self.mixes_submeshes() && schedule.virtual_stages() == 1;
        let meshes = match self.pins.fixes_mesh() {
            true => format!(
                "logical meshes of axes {}",
                self.pins.axis_names().join(", ")
            ),
            false if mixed => "one- and two-axis logical meshes, the second axis inside hosts".into(),
            false => "one- and two-axis logical meshes, the second axis inside hosts (several in one pipeline only where each could alone be as good)".into(),
        };
        let mut sizes: Vec<u32> = self.submeshes.iter().map(|s| s.n_devices).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let places = match mixed && !self.cluster.is_equal() {
            true => {
                " (parts of a host, equal runs of a group's hosts, whole groups, all in the order of ranks)"
            }
            false => "",
        };
        let mut space = format!(
            "{} pipelines of contiguous stages over {} submeshes {:?}{places}, {meshes}, all microbatch sizes up to {MAX_MICROBATCH} that divide the global batch",
            schedule.name(),
            if mixed { "any mix of" } else { "equal" },
            sizes
        );
        if schedule.virtual_stages() > 1 {
            let v = schedule.virtual_stages();
            space += &format!(", {v} stages on each mesh, all meshes of one shape");
        }
        if self.chooses_interleaving() {
            space += &format!(
                ", or {} interleaved stages on each of several equal meshes of one shape",
                interleaved::counts()
            );
        }
        if self.asked.recompute.is_some() || !self.asked.recompute_ops.is_empty() {
            space += ", activations recomputed as pinned";
        }
        let of_devices = self.submeshes.iter().map(|s| s.seen.device.memory_headroom);
        let headroom = self.headroom.unwrap_or(of_devices.fold(0.0, f64::max));
        if headroom > 0.0 {
            space += &format!(", {}% of each device's memory left free", 100.0 * headroom);
        }
        if reserve > 0 {
            space += &format!(", {} reserved for buffer placement", Bytes(reserve));
        }
        Proof {
            objective_s: Seconds(objective),
            lower_bound_s: Seconds(lower),
            gap: if objective > 0.0 {
                (objective - lower) / objective
            } else {
                0.0
            },
            least_objective_s: None,
            space,
            candidates,
            stopped: false,
            stages: Vec::new(),
            simpler: None,
            runners_up: Vec::new(),
        }
    }
}
