//! Plans for other software: the search restricted to what a framework can express, priced as the
//! framework executes, within the memory that its processes take.
//!
//! A framework is a space of points (`point`), each a value for every knob that its users turn. A
//! point fixes the whole plan: degrees, microbatch, stages, what is recomputed, and how the tensors
//! of blocks lie (`layout`). So points are planned as pins are, without a limit on memory, and then
//! priced (`price`): played as the software executes, and counted as its processes hold. Whoever
//! predicts a run of that software from a table of its degrees asks for the same, and gets the same
//! figures.
//!
//! `climb` decides which points are planned: every set of degrees with the first value of the other
//! knobs, and from the best of them what is a step away, until no step is faster.
//!
//! The plan's proof of its speed is no more than arithmetic: no software does the FLOPs of the
//! step in less time than the devices do at their best rate.

mod climb;
mod layout;
mod point;
mod price;

pub use layout::{Model, table_pin};
pub use point::Point;
pub use price::{Priced, price, priced};

use crate::recipes::{Facts, bounds::Sizes};
use crate::{Pins, PlanError, PlanOptions, Planned, layered, search};
use frameworks::{ContextRanks, Profile};
use ir::cluster::Cluster;
use ir::op::SequenceOrder;
use ir::plan::{MadeFor, Proof};
use ir::training::training_graph;
use ir::{Bytes, Graph, OpKind, Seconds, Task, TrainSpec, counted};
use std::sync::atomic::{AtomicBool, Ordering};

/// Other software to plan for.
#[derive(Clone, Debug)]
pub struct OtherSoftware {
    /// The software that the plan says it is for.
    pub made_for: MadeFor,
    /// How it executes what is trained on a cluster; the error says what is not known.
    pub profile: fn(&MadeFor, &Cluster, &TrainSpec) -> Result<Profile, String>,
}

/// No limit on memory: what a process holds is counted after a point is planned.
const UNBOUNDED: Bytes = Bytes(1 << 60);

/// Plans `forward` for other software.
///
/// Deterministic, unless a watcher ends the search early.
///
/// # Errors
/// When the software is not known or cannot train this model here, a pin is none that it has words
/// for, or no point fits.
pub(crate) fn plan(
    forward: &Graph,
    train: &TrainSpec,
    cluster: &Cluster,
    options: &PlanOptions,
    other: &OtherSoftware,
) -> Result<Planned, PlanError> {
    let problems = train.problems().into_iter().chain(cluster.problems());
    if let Some(first) = problems.into_iter().next() {
        return Err(PlanError::Input(first));
    }
    let profile = (other.profile)(&other.made_for, cluster, train).map_err(PlanError::Input)?;
    let title = profile.framework.title();
    if train.task == Task::Inference {
        return Err(PlanError::Input(format!(
            "plans for {title} are of training, this is inference; leave out --inference, or --for"
        )));
    }
    let layered = layered(forward, options.layering)?;
    let forward = layered.graph.as_ref().unwrap_or(forward);
    let model = Model::of(forward).ok_or_else(|| {
        PlanError::Input(format!(
            "plans for {title} are of decoders with blocks between an embedding and an output layer, and this model is none; leave out --for"
        ))
    })?;
    named(forward, &profile)?;
    let training = training_graph(forward, train).map_err(|e| PlanError::Input(e.to_string()))?;
    let facts = Facts::of(forward, train, cluster);
    let own = (profile.framework, profile.split);
    let space = point::Space::new(own, &model, &facts, &options.pins)?;
    let trial = Trial {
        forward,
        train,
        cluster,
        options,
        profile: &profile,
        model: &model,
        sizes: Sizes::of(&training, train, cluster),
        has_found: AtomicBool::new(false),
    };
    let climbed = climb::climb(&space, &trial)?;
    let floor_s = trial.sizes.work_s();
    let n_points = space.n_points();
    let climb::Climbed {
        point,
        mut planned,
        plans,
        n_planned,
    } = climbed;
    let step_s = planned.simulation.step_time.0;
    let say = |made: &mut ir::plan::Plan| {
        made.made_for = Some(other.made_for.clone());
        made.pins = options.pins.describe();
    };
    say(&mut planned.plan);
    planned.plan.proof = Proof {
        objective_s: Seconds(step_s),
        lower_bound_s: Seconds(floor_s.min(step_s)),
        gap: match step_s > 0.0 {
            true => 1.0 - floor_s.min(step_s) / step_s,
            false => 0.0,
        },
        space: format!(
            "{n_points} points of what {title} can express (degrees, microbatch, ZeRO level, stages on each mesh, sequence parallelism, recomputation), of which {n_planned} were planned; the bound is the step's FLOPs at the best rate of the devices"
        ),
        candidates: n_planned,
        stopped: options.watcher.ends(),
        ..Proof::default()
    };
    planned.stats.simulated = n_planned;
    planned.stats.candidates = n_planned;
    planned.stats.alternatives = plans
        .iter()
        .map(|(point, plan)| (point.words(), plan.predicted.step_time_s))
        .collect();
    planned.stats.simulated_plans = plans.into_iter().map(|(_, plan)| plan).collect();
    planned.stats.simulated_plans.iter_mut().for_each(say);
    planned.stats.notes.extend(layered.note);
    planned.stats.notes.push(format!(
        "{} of the {} that {title} can express were planned; the fastest that fits is {}",
        n_planned,
        counted(n_points, "point"),
        point.words()
    ));
    Ok(planned)
}

/// Fails where matmuls are said to run in a type of their own and the model has no such op.
fn named(forward: &Graph, profile: &Profile) -> Result<(), PlanError> {
    let is_matmul = |op: &&ir::Op| matches!(op.kind, OpKind::DotGeneral { .. });
    for exception in &profile.software.exceptions {
        let mut matmuls = forward.ops().iter().filter(is_matmul);
        if !matmuls.any(|op| exception.names(&op.path)) {
            let ops: Vec<&str> = exception.ops.iter().map(String::as_str).collect();
            let ops = match ops.as_slice() {
                [first, .., last] => format!("`{first}` to `{last}`"),
                ops => format!("`{}`", ops.concat()),
            };
            return Err(PlanError::Input(format!(
                "no matrix product of the model is {ops}, which --for gives a type of its own; ops have the names that the plan's graph has"
            )));
        }
    }
    Ok(())
}

/// The request that points are tried on.
struct Trial<'a> {
    forward: &'a Graph,
    train: &'a TrainSpec,
    cluster: &'a Cluster,
    options: &'a PlanOptions,
    profile: &'a Profile,
    model: &'a Model,
    sizes: Sizes,
    /// Whether a point fits, so that the search may end.
    has_found: AtomicBool,
}

/// The outcome for a point.
#[derive(Clone, Debug)]
enum Outcome {
    /// A plan that fits.
    Fits(Box<Planned>),
    /// Its states alone exceed the memory of every device.
    TooLarge,
    /// A plan whose fullest process holds more than the device has: what it lacks.
    Exceeds(PlanError),
    /// No plan.
    Failed(PlanError),
}

impl Trial<'_> {
    /// Pins of a point with those of the user.
    fn pins(&self, point: &Point) -> Result<Pins, PlanError> {
        let is_zigzag = is_in_zigzag_order(self.forward);
        let ranks = 2 * u64::from(point.context);
        let zigzag = !is_zigzag && self.train.sequence.is_multiple_of(ranks);
        let ranks = self.profile.framework.vocabulary().context;
        let ranks = (ranks.unwrap_or(ContextRanks::Tokens), zigzag);
        let own = point.pins(self.model, self.profile.split, ranks);
        let own = Pins::parse(&own).map_err(|e| PlanError::Defect(e.to_string()))?;
        let asked = &self.options.pins;
        // What the user says of single tensors and of stages counts before the framework's own.
        let tensors = asked.tensors.iter().chain(&own.tensors).cloned().collect();
        let recomputes = asked.recompute.is_some() || !asked.recompute_ops.is_empty();
        Ok(Pins {
            tensors,
            split: asked.split.clone().or(own.split),
            context_attention: asked.context_attention.or(own.context_attention),
            zigzag: own.zigzag || asked.zigzag && !is_zigzag,
            recompute: if recomputes {
                asked.recompute
            } else {
                own.recompute
            },
            recompute_ops: match recomputes {
                true => asked.recompute_ops.clone(),
                false => own.recompute_ops,
            },
            ..own
        })
    }

    /// Plans and prices a point, unless arithmetic says that it cannot fit. None where it takes no
    /// less than `to_beat`, or whoever watches has ended the search and a plan is there.
    fn outcome(&self, point: &Point, to_beat: f64) -> Option<Outcome> {
        let pins = match self.pins(point) {
            Ok(pins) => pins,
            Err(e) => return Some(Outcome::Failed(e)),
        };
        let has_ended = self.options.watcher.ends() && self.has_found.load(Ordering::Relaxed);
        if has_ended || self.sizes.step_s(&pins) > to_beat {
            return None;
        }
        if self.sizes.exceeds_memory(&pins) {
            return Some(Outcome::TooLarge);
        }
        let outcome = self.planned(pins);
        if matches!(outcome, Outcome::Fits(_)) {
            self.has_found.store(true, Ordering::Relaxed);
        }
        Some(outcome)
    }

    /// Plans and prices what pins describe, without a limit on memory.
    fn planned(&self, pins: Pins) -> Outcome {
        let mut unbounded = self.cluster.clone();
        unbounded.device.memory_bytes = UNBOUNDED;
        let options = PlanOptions {
            pins,
            headroom: Some(0.0),
            tolerance: 0.0,
            // What our own runtime would hide, other software does not.
            without_hiding: true,
            one_by_one: true,
            watcher: self.options.watcher.unseeing(),
            made_for: None,
            ..self.options.clone()
        };
        let planned = search::plan(self.forward, self.train, &unbounded, &options);
        match planned {
            Err(e) => Outcome::Failed(e),
            Ok(planned) => self.priced(planned),
        }
    }

    fn priced(&self, mut planned: Planned) -> Outcome {
        planned.plan.cluster = self.cluster.clone();
        let software = &self.profile.software;
        let played = match price(&planned, self.cluster, software) {
            Ok(played) => played,
            Err(e) => return Outcome::Failed(e),
        };
        let device = &self.cluster.device;
        let share = self.options.headroom.unwrap_or(device.memory_headroom);
        let free = (share * self.cluster.usable_bytes() as f64) as u64;
        let capacity = device.memory_bytes.0.saturating_sub(free);
        // Meshwright checks, simulates and runs the plan too, so its own arena has to fit as well.
        let reserved = device.memory_reserved_bytes.0;
        let roles = planned.program.roles.iter().zip(&played.memory);
        let fullest = roles
            .map(|(role, memory)| (memory.total().0.max(role.arena_bytes + reserved), role))
            .max_by_key(|(bytes, _)| *bytes);
        let Some((needed, role)) = fullest else {
            return Outcome::Failed(PlanError::Defect("a plan has no stage".into()));
        };
        if needed > capacity {
            let stage = planned.plan.stages.get(role.stage.index());
            let runs = stage.map_or(&[][..], |s| &s.runs);
            let name = |i: usize| self.forward.layers.get(i).cloned().unwrap_or_default();
            let ends = runs.first().zip(runs.last()).map(|(first, last)| {
                let end = last.first.index() + last.count as usize;
                format!(
                    "{} to {}",
                    name(first.first.index()),
                    name(end.saturating_sub(1))
                )
            });
            let slots = role.buffers.iter().filter_map(|b| match b.class {
                ir::program::BufferClass::PerMicrobatch { slots } => Some(u64::from(slots)),
                _ => None,
            });
            return Outcome::Exceeds(PlanError::Memory {
                n_stages: planned.plan.stages.len(),
                layers: ends.unwrap_or_default(),
                devices: role.mesh.n_devices(),
                in_flight: slots.max().unwrap_or(1),
                needed,
                capacity,
            });
        }
        planned.plan.predicted = played.simulation.prediction.clone();
        planned.simulation = played.simulation;
        Outcome::Fits(Box::new(planned))
    }
}

/// Whether the sequence of a graph is stored in zigzag order.
fn is_in_zigzag_order(graph: &Graph) -> bool {
    let is_zigzag = |op: &ir::Op| match &op.kind {
        OpKind::Attention { order, .. } => matches!(order, SequenceOrder::Zigzag { .. }),
        _ => false,
    };
    graph.ops().iter().any(is_zigzag)
}

#[cfg(test)]
mod tests;
