//! Planning the points of a recipe, of which the fastest by the simulator that fits is taken.
//!
//! Invariant: which points are planned at all depends on the threads, because a point is left out
//! once another is known to be faster than it can be. The point that is chosen does not: the
//! fastest is never left out, and of equals the earlier one in the grid counts.

use super::bounds::Sizes;
use super::{Facts, Recipe};
use crate::pins::check::{check, degrees};
use crate::{Pins, PlanError, PlanOptions, Planned, layered};
use ir::cluster::Cluster;
use ir::training::training_graph;
use ir::{Graph, Seconds, Task, TrainSpec, counted};
use rayon::prelude::*;
use std::sync::Mutex;

/// The best point of a recipe.
#[derive(Clone, Debug)]
pub struct Chosen {
    /// Its pins.
    pub pins: Pins,
    /// Points of the recipe that agree with the user's pins.
    pub n_points: usize,
    /// Its plan.
    pub planned: Planned,
}

/// The outcome for one point.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// It was planned, and a step is predicted to take this long.
    Planned(Seconds),
    /// It was not planned: states alone exceed the memory.
    TooLarge,
    /// It was not planned: another point is faster than it can be.
    TooSlow,
    /// It has no plan.
    Failed(PlanError),
    /// It was not planned, because the caller asked to stop before.
    Stopped,
}

/// The outcome for all points.
#[derive(Clone, Debug)]
pub struct PointsPlanned {
    /// Index of the fastest point that fits, with its plan.
    pub best: Option<(usize, Planned)>,
    /// An outcome for each point.
    pub outcomes: Vec<Outcome>,
}

/// The points of a recipe for a model and a cluster that agree with the pins of `options`, with
/// what these pin beyond the recipe.
///
/// # Errors
/// When the layers cannot be made, or no point agrees with the pins.
pub fn points(
    forward: &Graph,
    train: &TrainSpec,
    cluster: &Cluster,
    recipe: Recipe,
    options: &PlanOptions,
) -> Result<Vec<Pins>, PlanError> {
    let layered = layered(forward, options.layering)?;
    let forward = layered.graph.as_ref().unwrap_or(forward);
    let facts = Facts::of(forward, train, cluster);
    let grid = recipe.grid(&facts, options.pins.context);
    let name = recipe.name();
    if grid.is_empty() {
        return Err(PlanError::Pins(format!(
            "preset {name} has no point for {} and a global batch of {}",
            counted(u64::from(facts.n_devices), "device"),
            facts.global_batch
        )));
    }
    let agreeing: Vec<Pins> = grid
        .iter()
        .filter_map(|point| joined(point, &options.pins).ok())
        .collect();
    if agreeing.is_empty() {
        let mut keys: Vec<&str> = grid
            .iter()
            .filter_map(|point| joined(point, &options.pins).err())
            .collect();
        keys.sort_unstable();
        keys.dedup();
        return Err(PlanError::Pins(format!(
            "no point of preset {name} agrees with all pins; those that contradict points of it: {}",
            keys.join(", ")
        )));
    }
    Ok(agreeing)
}

/// Plans the points of a recipe that agree with the pins of `options`, and returns the one with
/// the shortest predicted step; the earlier one of equals. Its plan may be simpler than its fastest,
/// within the tolerance of `options`.
///
/// Deterministic: the same input gives the same plan to the byte.
///
/// # Errors
/// When no point agrees with the pins, or none has a plan that fits: then with the error of the
/// point that lacks the least memory, or of the first point.
pub fn plan_recipe(
    forward: &Graph,
    train: &TrainSpec,
    cluster: &Cluster,
    recipe: Recipe,
    options: &PlanOptions,
) -> Result<Chosen, PlanError> {
    let problems = train.problems().into_iter().chain(cluster.problems());
    if let Some(first) = problems.into_iter().next() {
        return Err(PlanError::Input(first));
    }
    if train.task == Task::Inference {
        return Err(PlanError::Pins(format!(
            "preset {} is a recipe of training, the plan is for inference; leave out the preset, and pin what it should have",
            recipe.name()
        )));
    }
    let points = points(forward, train, cluster, recipe, options)?;
    let tried = plan_points(forward, train, cluster, &points, options, &|| false)?;
    let Some((best, mut planned)) = tried.best else {
        return Err(reason(
            forward,
            train,
            cluster,
            &points,
            options,
            tried.outcomes,
        ));
    };
    let defects = tried.outcomes.iter().zip(&points).filter_map(|(o, pins)| {
        let Outcome::Failed(e @ (PlanError::Lower(_) | PlanError::Defect(_))) = o else {
            return None;
        };
        Some(format!(
            "the point {} was passed over: {e}",
            pins.describe().join(" ")
        ))
    });
    let has_ended = options.watcher.ends();
    planned.plan.proof.stopped |= has_ended;
    if options.tolerance > 0.0 && !has_ended {
        let simpler = PlanOptions {
            pins: points[best].clone(),
            watcher: options.watcher.unseeing(),
            ..options.clone()
        };
        planned = crate::plan(forward, train, cluster, &simpler)?;
    }
    planned.stats.notes.extend(defects);
    Ok(Chosen {
        pins: points[best].clone(),
        n_points: points.len(),
        planned,
    })
}

/// Plans points in parallel, promising ones first, without those that cannot fit or win. `stop` is
/// asked before each point; once it says so, no other is begun. Of `options` the pins are those of
/// each point instead, and the tolerance is nothing.
///
/// # Errors
/// When the training graph of `forward` cannot be made; what is wrong with a point is its outcome.
pub fn plan_points(
    forward: &Graph,
    train: &TrainSpec,
    cluster: &Cluster,
    points: &[Pins],
    options: &PlanOptions,
    stop: &(dyn Fn() -> bool + Sync),
) -> Result<PointsPlanned, PlanError> {
    let layered = layered(forward, options.layering)?;
    let cut = layered.graph.as_ref().unwrap_or(forward);
    let training = training_graph(cut, train).map_err(|e| PlanError::Input(e.to_string()))?;
    let sizes = Sizes::of(&training, train, cluster);
    let mut order: Vec<usize> = (0..points.len()).collect();
    order.sort_by(|a, b| {
        sizes
            .guess(&points[*a])
            .total_cmp(&sizes.guess(&points[*b]))
    });
    let best: Mutex<Option<(usize, Planned)>> = Mutex::new(None);
    let known = |best: &Option<(usize, Planned)>| {
        let best = best.as_ref();
        best.map_or((f64::INFINITY, usize::MAX), |(i, p)| {
            (p.simulation.step_time.0, *i)
        })
    };
    let locked = || {
        best.lock()
            .expect("no thread panics with the best plan in hand")
    };
    let try_point = |i: usize| {
        let pins = &points[i];
        let is_odd = degrees(cluster.n_devices().into(), pins)
            .and_then(|()| check(pins, &training, cluster, train));
        if let Err(e) = is_odd {
            return Outcome::Failed(e);
        }
        if sizes.exceeds_memory(pins) {
            return Outcome::TooLarge;
        }
        if stop() || options.watcher.ends() && locked().is_some() {
            return Outcome::Stopped;
        }
        if sizes.step_s(pins) > known(&locked()).0 {
            return Outcome::TooSlow;
        }
        let options = PlanOptions {
            pins: pins.clone(),
            tolerance: 0.0,
            watcher: options.watcher.unseeing(),
            ..options.clone()
        };
        match crate::plan(forward, train, cluster, &options) {
            Err(e) => Outcome::Failed(e),
            Ok(planned) => {
                let step = planned.simulation.step_time;
                let mut best = locked();
                if (step.0, i) < known(&best) {
                    *best = Some((i, planned));
                }
                Outcome::Planned(step)
            }
        }
    };
    // One after the other as threads become free, so that promising points do come first.
    let mut outcomes: Vec<(usize, Outcome)> = order
        .into_iter()
        .par_bridge()
        .map(|i| (i, try_point(i)))
        .collect();
    outcomes.sort_by_key(|(i, _)| *i);
    Ok(PointsPlanned {
        best: best
            .into_inner()
            .expect("no thread panics with the best plan in hand"),
        outcomes: outcomes.into_iter().map(|(_, outcome)| outcome).collect(),
    })
}

/// Why no point has a plan: the error of the one that lacks the least memory, else the first.
fn reason(
    forward: &Graph,
    train: &TrainSpec,
    cluster: &Cluster,
    points: &[Pins],
    options: &PlanOptions,
    outcomes: Vec<Outcome>,
) -> PlanError {
    let is_too_large = |o: &Outcome| matches!(o, Outcome::TooLarge);
    let large = outcomes.iter().rposition(is_too_large);
    let errors = outcomes.into_iter().filter_map(|outcome| match outcome {
        Outcome::Failed(e) => Some(e),
        _ => None,
    });
    let lacking = |e: &PlanError| match e {
        PlanError::Memory {
            needed, capacity, ..
        } => (0, needed.saturating_sub(*capacity)),
        PlanError::Overrun { bytes } => (0, *bytes),
        PlanError::Lower(_) | PlanError::Defect(_) => (1, 0),
        _ => (3, 0),
    };
    let nearest = errors.min_by_key(lacking);
    match (nearest, large) {
        (Some(e), _) if lacking(&e).0 < 2 => e,
        // The search says by how much it is too large.
        (other, Some(i)) => {
            let options = PlanOptions {
                pins: points[i].clone(),
                tolerance: 0.0,
                ..options.clone()
            };
            let planned = crate::plan(forward, train, cluster, &options);
            let defect = || PlanError::Defect("a point that was too large has a plan".into());
            planned.err().or(other).unwrap_or_else(defect)
        }
        (Some(e), None) => e,
        (None, None) => PlanError::Defect("a recipe has points, and no outcome".into()),
    }
}

/// A point with what else is pinned; the first key that the two contradict each other in.
fn joined(point: &Pins, pins: &Pins) -> Result<Pins, &'static str> {
    fn one<T: Clone + PartialEq>(
        key: &'static str,
        own: &Option<T>,
        pinned: &Option<T>,
    ) -> Result<Option<T>, &'static str> {
        match (own, pinned) {
            (Some(a), Some(b)) if a != b => Err(key),
            _ => Ok(own.clone().or_else(|| pinned.clone())),
        }
    }
    // A recipe that pins degrees has one context rank where it names none.
    let context = match (point.context, point.data) {
        (None, Some(_)) => Some(1),
        (context, _) => context,
    };
    let context = one("context", &context, &pins.context)?;
    Ok(Pins {
        data: one("data", &point.data, &pins.data)?,
        replicas: one("replicas", &point.replicas, &pins.replicas)?,
        expert: one("expert", &point.expert, &pins.expert)?,
        context: context.filter(|&c| c > 1 || pins.context.is_some()),
        zigzag: point.zigzag || pins.zigzag,
        context_attention: pins.context_attention,
        tensor: one("tensor", &point.tensor, &pins.tensor)?,
        pipeline: one("pipeline", &point.pipeline, &pins.pipeline)?,
        zero: one("zero", &point.zero, &pins.zero)?,
        microbatch: one("microbatch", &point.microbatch, &pins.microbatch)?,
        split: one("split", &point.split, &pins.split)?,
        schedule: one("schedule", &point.schedule, &pins.schedule)?,
        virtual_stages: one("virtual", &point.virtual_stages, &pins.virtual_stages)?,
        recompute: one("recompute", &point.recompute, &pins.recompute)?,
        recompute_ops: pins.recompute_ops.clone(),
        offload: pins.offload.clone(),
        tensors: pins.tensors.clone(),
    })
}
