//! The search: microbatch sizes, submeshes and their logical shapes, stages, pipelines.
//!
//! For every microbatch size and every shape of every submesh, layers are modelled once per kind
//! and per choice of what is recomputed, and priced where memory binds; ranges of layers become
//! stage-table entries; the inter-op DP finds the best pipeline of each microbatch size. The best
//! few by the additive objective are lowered and simulated, and the fastest of those that fit wins.

use crate::groups::Setting;
use crate::layer_model::MeshFacts;
use crate::layers::Layers;
use crate::pins::{self, Pins};
use crate::stage::Sequences;
use crate::{Effort, PlanError, PlanOptions, PlanStats, Planned, Watcher};
use candidates::{Candidate, no_strategy, refer, weigh_all};
use chosen::Kept;
use ir::cluster::Cluster;
use ir::training::{Recompute, TrainingGraph, training_graph};
use ir::{Graph, LogicalMesh, Task, TrainSpec, ValueId};
use pipelines::{Bounded, Pipeline, Solved, ToBeat, nearer};
use ranking::{Best, Known, Made};
use request::{boundary, in_zigzag_order, odd_length, sequences, with_updates};
use reserves::Reserves;
pub(crate) use scale::MEMORY_PRICES;
use shapes::{Shape, Submesh, submeshes};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use variants::Variant;

mod batches;
mod bounds;
mod busiest;
mod candidates;
mod chosen;
mod equal;
mod even;
mod hiding;
mod interleaved;
mod larger;
mod mixes;
mod orders;
mod outlook;
mod pipelines;
mod ranking;
mod request;
mod reserves;
mod scale;
mod shapes;
mod shared;
mod simple;
mod tables;
mod variants;

/// Times that a plan is made because the buffers of the one before overran the budget, or because
/// too many bytes were reserved for them.
const RETRIES: usize = 7;
/// Largest number of layers that the DP slices one by one.
pub(crate) const MAX_LAYERS: usize = 400;

/// The share by which an objective has to be less than that of the plan that is taken to be told.
const LESS: f64 = 1e-3;

struct Search<'a> {
    /// The choices of what is recomputed; that which recomputes least first.
    variants: &'a [Variant],
    train: &'a TrainSpec,
    cluster: &'a Cluster,
    pins: &'a Pins,
    /// The pins of the request; `pins` may have a number of context ranks beside them.
    asked: &'a Pins,
    /// Pipelines that cost as much by the objective are of no use.
    to_beat: f64,
    /// See [`PlanOptions::headroom`].
    headroom: Option<f64>,
    sequences: Sequences,
    submeshes: &'a [Submesh],
    /// A tensor that crosses layer boundaries, if one does.
    boundary: Option<ValueId>,
    /// The facts of meshes that nobody prices at the moment.
    known: Mutex<Vec<MeshFacts<'a>>>,
    /// Models of shapes that more than one pipeline is made of.
    kept: Mutex<Kept>,
    /// See [`PlanStats::choices`].
    choices: [AtomicU64; 2],
    effort: Effort,
    /// See [`PlanOptions::without_hiding`].
    without_hiding: bool,
    /// See [`PlanOptions::one_by_one`].
    one_by_one: bool,
    watcher: &'a Watcher,
    /// The search's name where there are several.
    name: &'a str,
    /// Whether there is a pipeline, so that the search may end.
    has_found: AtomicBool,
}

/// Plans `forward` for `cluster`; see the crate header.
pub(crate) fn plan(
    forward: &Graph,
    train: &TrainSpec,
    cluster: &Cluster,
    options: &PlanOptions,
) -> Result<Planned, PlanError> {
    let own_train = with_updates(train, &options.pins)?;
    let train = &own_train;
    let problems: Vec<String> = train
        .problems()
        .into_iter()
        .chain(cluster.problems())
        .chain(odd_length(forward))
        .collect();
    if let Some(first) = problems.into_iter().next() {
        return Err(PlanError::Input(first));
    }
    let layered = crate::layered(forward, options.layering)?;
    let forward = layered.graph.as_ref().unwrap_or(forward);
    let of_inference = match train.task {
        Task::Training => None,
        Task::Inference => Some(pins::inference::pins(&options.pins)?),
    };
    let pins = of_inference.as_ref().unwrap_or(&options.pins);
    let mut made = plan_order(forward, train, cluster, options, pins, f64::INFINITY, "");
    let mut space = made.as_ref().ok().map(|p| p.plan.proof.space.clone());
    let mut tried = Vec::new();
    for (further, own) in orders::others(forward, train, cluster, pins) {
        if made.is_ok() && options.watcher.ends() {
            break;
        }
        let to_beat = made
            .as_ref()
            .map_or(f64::INFINITY, |p| p.plan.proof.objective_s.0);
        let name = further.words();
        let second = plan_order(forward, train, cluster, options, &own, to_beat, &name);
        // What is proved covers the spaces of the searches that ended with a bound.
        match (&second, &space) {
            (Ok(_), Some(_)) => tried.push(further),
            (Ok(p), None) => space = Some(p.plan.proof.space.clone()),
            (Err(_), _) => {}
        }
        made = match (made, second) {
            (Ok(a), Ok(b)) => Ok(orders::better(a, b, further, options.tolerance)),
            (Err(_), Ok(b)) => Ok(b),
            // Of reasons that of the search without such an axis says most.
            (a, Err(_)) => a,
        };
    }
    let mut made = made?;
    made.plan.proof.stopped |= options.watcher.ends();
    let objectives = made.stats.simulated_plans.iter();
    let objectives = objectives.map(|p| p.proof.objective_s);
    let least = objectives.min_by(|a, b| a.0.total_cmp(&b.0));
    let own = made.plan.proof.objective_s.0;
    made.plan.proof.least_objective_s = least.filter(|least| least.0 < own * (1.0 - LESS));
    // Not all that is played is of the space that was bounded: wide shapes are not, and a plan that
    // the search counts as too large, made alike in all layers, may fit once it is lowered.
    let proof = &mut made.plan.proof;
    if let Some(least) = least.filter(|least| least.0 < proof.lower_bound_s.0) {
        proof.lower_bound_s = least;
        proof.gap = if own > 0.0 {
            (own - least.0) / own
        } else {
            0.0
        };
    }
    made.stats.notes.extend(layered.note);
    if let Some(space) = space.filter(|_| !tried.is_empty()) {
        made.plan.proof.space = space + &orders::spaces(&tried);
    }
    Ok(made)
}

/// Plans for one order of the sequence: with `pins`, which are those of the options and perhaps a
/// number of context or expert ranks; `name` says which. Only what costs less than `to_beat` by the
/// objective is of use.
fn plan_order(
    forward: &Graph,
    train: &TrainSpec,
    cluster: &Cluster,
    options: &PlanOptions,
    pins: &Pins,
    to_beat: f64,
    name: &str,
) -> Result<Planned, PlanError> {
    // Stages on unequal devices may differ in size, unless they share meshes.
    let are_equal = cluster.is_equal() || pins.schedule_kind().virtual_stages() > 1;
    let dividing = Pins {
        pipeline: pins.pipeline.filter(|_| are_equal),
        ..pins.clone()
    };
    pins::check::degrees(cluster.n_devices().into(), &dividing)?;
    let zigzag = in_zigzag_order(forward, pins)?;
    let forward = zigzag.as_ref().unwrap_or(forward);
    let input = |e: ir::GraphError| PlanError::Input(e.to_string());
    let kept = training_graph(forward, train).map_err(input)?;
    let n_layers = kept.graph.layers.len();
    if n_layers > MAX_LAYERS {
        return Err(PlanError::Input(format!(
            "{n_layers} layers; the search slices at most {MAX_LAYERS}"
        )));
    }
    let variants = variants::variants(kept, pins)?;
    let first = &variants[0];
    pins::check::check(pins, &first.training, cluster, train)?;
    let submeshes = submeshes(cluster, pins);
    let search = Search {
        variants: &variants,
        train,
        cluster,
        pins,
        asked: &options.pins,
        to_beat,
        headroom: options.headroom,
        sequences: sequences(&first.layers, pins)?,
        submeshes: &submeshes,
        boundary: boundary(&first.training.graph),
        known: Mutex::new(Vec::new()),
        kept: Mutex::new(Kept::new()),
        choices: Default::default(),
        effort: options.effort,
        without_hiding: options.without_hiding,
        one_by_one: options.one_by_one,
        watcher: &options.watcher,
        name,
        has_found: AtomicBool::new(to_beat.is_finite()),
    };
    let batches = search.batches()?;
    let schedule = pins.schedule_kind();
    let mut stats = PlanStats {
        n_layer_kinds: first.layers.first.len(),
        ..PlanStats::default()
    };
    if let Some(share) = options.headroom.filter(|h| !(0.0..1.0).contains(h)) {
        let words = "a headroom is a share of the memory from 0 to below 1";
        return Err(PlanError::Input(format!("{share} is no headroom: {words}")));
    }
    if !(0.0..=1.0).contains(&options.tolerance) {
        let words = "a tolerance is a share of the step time from 0 to 1";
        return Err(PlanError::Input(format!(
            "{} is no tolerance: {words}",
            options.tolerance
        )));
    }
    let mut reserves = Reserves::of(search.bytes_of(cluster));
    let mut short = None;
    let mut found = None;
    for _ in 0..RETRIES {
        let reserve = reserves.next;
        // Only the last attempt counts.
        (stats.candidates, stats.simulated) = (0, 0);
        stats.alternatives.clear();
        stats.simulated_plans.clear();
        search
            .has_found
            .store(to_beat.is_finite(), Ordering::Relaxed);
        let solved = search.pipelines(&batches, schedule, reserve, &mut stats);
        let (pipelines, lower_bound) = match solved {
            Ok(solved) => solved,
            Err(e @ PlanError::Memory { .. }) if reserve > 0 => {
                short = Some(e);
                match reserves.left_nothing() {
                    true => continue,
                    false => break,
                }
            }
            Err(e) => return Err(e),
        };
        let known = Known {
            lower_bound,
            schedule,
            reserve,
            tolerance: options.tolerance,
        };
        let made = search.simulate_best(forward, pipelines, &known, &mut stats)?;
        match made {
            Made::Fits(best) => {
                found = Some(*best);
                break;
            }
            Made::Overrun(bytes) => {
                if !reserves.overran(bytes) {
                    break;
                }
            }
        }
    }
    stats.choices = search.choices.each_ref().map(|n| n.load(Ordering::Relaxed));
    drop(search);
    let Best {
        plan,
        training,
        program,
        simulation,
    } = found.ok_or_else(|| {
        // Which stage has too little says more than that buffers overran.
        let bytes = reserves.too_few;
        short.unwrap_or(PlanError::Overrun { bytes })
    })?;
    crate::offload::check_room(pins, cluster, &program)?;
    let mut axes = plan.stages.iter().flat_map(|s| &s.mesh.axes);
    if pins.zero.is_some_and(|z| z > 0)
        && pins.fixes_mesh()
        && axes.all(|a| a.name == "tensor" || a.size == 1)
    {
        stats
            .notes
            .push("the zero pin does nothing: no axis splits samples (data=1)".into());
    }
    let recomputes = plan
        .layer_strategies
        .iter()
        .any(|s| !s.recompute.is_empty());
    if !recomputes && pins.recompute.is_some_and(|r| r != Recompute::None) {
        stats.notes.push(
            "the recompute pin does nothing: no layer before the loss keeps an activation that it names".into(),
        );
    }
    Ok(Planned {
        plan,
        training,
        program,
        simulation,
        stats,
    })
}

impl<'a> Search<'a> {
    /// The cluster as the ranks of a submesh see it.
    fn seen_by(&self, mesh: &LogicalMesh) -> &'a Cluster {
        let (first, n) = (mesh.devices.first_rank.0, mesh.n_devices());
        let is_this =
            |s: &&Submesh| s.n_devices == n && s.starts.first().is_none_or(|r| *r == first);
        let known = self.submeshes.iter().find(is_this);
        known.map_or(self.cluster, |s| &s.seen)
    }

    /// Whether the search is to end with what it has.
    fn ends(&self) -> bool {
        self.has_found.load(Ordering::Relaxed) && self.watcher.ends()
    }

    /// Bytes of a device that plans may use, of the cluster as a mesh sees it.
    fn bytes_of(&self, seen: &Cluster) -> u64 {
        seen.planned_bytes(self.headroom)
    }

    /// The layers, by kinds.
    fn layers(&self) -> &'a Layers {
        &self.variants[0].layers
    }

    /// The graph that recomputes least; beside twins all are the same.
    fn training(&self) -> &'a TrainingGraph {
        &self.variants[0].training
    }

    /// The setting of a shape under the choice that recomputes least.
    fn setting<'s>(&'s self, shape: &'s Shape, batch: u64) -> Setting<'s> {
        self.setting_of(&self.variants[0], shape, batch)
    }

    /// The settings of a shape under all choices of what is recomputed.
    fn settings<'s>(&'s self, shape: &'s Shape, batch: u64) -> Vec<Setting<'s>> {
        let variants = self.variants.iter();
        variants
            .map(|variant| self.setting_of(variant, shape, batch))
            .collect()
    }

    fn setting_of<'s>(&'s self, variant: &'s Variant, shape: &'s Shape, batch: u64) -> Setting<'s> {
        let makes_calls = !self.one_by_one && cost_model::compute::makes_calls(self.cluster);
        Setting {
            training: &variant.training,
            train: self.train,
            cluster: self.seen_by(&shape.mesh),
            mesh: &shape.mesh,
            roles: &shape.roles,
            pins: self.pins,
            batch,
            saved: &variant.saved,
            buckets: &variant.buckets,
            of_parameters: &variant.of_parameters,
            index: &variant.index,
            chains: makes_calls.then_some(&variant.chains),
            gradients_hide: false,
        }
    }
}
