//! The search: microbatch sizes, submeshes and their logical shapes, stages, pipelines.
//!
//! For every microbatch size and every shape of every submesh, layers are modelled once per
//! kind and priced under a ladder of memory prices; ranges of layers become stage-table
//! entries; the inter-op DP finds the best pipeline of each microbatch size. The best few by
//! the additive objective are lowered and simulated, and the fastest of those that fit wins.

use crate::groups::Setting;
use crate::layer_model::LayerModel;
use crate::layers::{Layers, find_layers};
use crate::pins::whole::made_of_parameters;
use crate::pins::{self, Pins};
use crate::prices::{Buckets, Prices};
use crate::stage::Sequences;
use crate::{PlanError, PlanOptions, PlanStats, Planned};
pub(crate) use candidates::MEMORY_PRICES;
use candidates::{Candidate, no_strategy, weigh, weight_at};
use ir::cluster::Cluster;
use ir::training::{Recompute, TrainingGraph, recompute, training_graph};
use ir::{Graph, LogicalMesh, TrainSpec, ValueId};
use pipelines::{Bounded, Pipeline, Solved, ToBeat, nearer};
use ranking::{Known, Made};
use request::{boundary, in_zigzag_order, odd_length, recomputed, saved_values, sequences};
use shapes::{Shape, Submesh, submeshes};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

mod batches;
mod candidates;
mod chosen;
mod equal;
mod even;
mod interleaved;
mod pipelines;
mod ranking;
mod request;
mod shapes;
mod shared;
mod tables;

/// Times that a plan is made again because its buffers overran the budget.
const RETRIES: usize = 4;
/// Largest number of layers that the DP slices one by one.
pub(crate) const MAX_LAYERS: usize = 400;

struct Search<'a> {
    training: &'a TrainingGraph,
    train: &'a TrainSpec,
    cluster: &'a Cluster,
    pins: &'a Pins,
    layers: Layers,
    sequences: Sequences,
    saved: Vec<bool>,
    buckets: Buckets,
    of_parameters: Vec<bool>,
    submeshes: &'a [Submesh],
    /// A tensor that crosses layer boundaries, if one does.
    boundary: Option<ValueId>,
    /// Prices of layout changes on meshes that nobody prices at the moment; most
    /// of it holds for every microbatch size.
    prices: Mutex<Vec<Prices<'a>>>,
    /// Microbatch size and mesh of the models that are kept, see [`Search::models`].
    kept: OnceLock<(u64, LogicalMesh, Arc<Vec<LayerModel>>)>,
    /// See [`PlanStats::choices`].
    choices: [AtomicU64; 2],
}

/// Plans `forward` for `cluster`; see the crate header.
pub(crate) fn plan(
    forward: &Graph,
    train: &TrainSpec,
    cluster: &Cluster,
    options: &PlanOptions,
) -> Result<Planned, PlanError> {
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
    let pins = &options.pins;
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
    let chosen = recomputed(&kept, pins)?;
    let training = match chosen.is_empty() {
        true => kept,
        false => recompute(&kept, &chosen).map_err(input)?,
    };
    pins::check::check(pins, &training, cluster, train)?;
    let n_layers = training.graph.layers.len();
    if n_layers > MAX_LAYERS {
        return Err(PlanError::Input(format!(
            "{n_layers} layers; the search slices at most {MAX_LAYERS}"
        )));
    }
    let pin = |v| match pins.tensors.is_empty() {
        true => None,
        false => pins.tensor(&training.graph.value_name(v)),
    };
    let layers = find_layers(&training, &pin);
    let submeshes = submeshes(cluster, pins);
    let search = Search {
        training: &training,
        train,
        cluster,
        pins,
        saved: saved_values(&training),
        buckets: Buckets::new(&training),
        of_parameters: made_of_parameters(&training.graph),
        sequences: sequences(&layers, pins)?,
        layers,
        submeshes: &submeshes,
        boundary: boundary(&training.graph),
        prices: Mutex::new(Vec::new()),
        kept: OnceLock::new(),
        choices: Default::default(),
    };
    let batches = search.batches()?;
    let schedule = pins.schedule_kind();
    let mut stats = PlanStats {
        n_layer_kinds: search.layers.first.len(),
        notes: layered.note.into_iter().collect(),
        ..PlanStats::default()
    };
    let mut reserve = 0u64;
    let mut found = None;
    for _ in 0..RETRIES {
        // Only the last attempt counts.
        (stats.candidates, stats.simulated) = (0, 0);
        stats.alternatives.clear();
        let (pipelines, lower_bound) = search.pipelines(&batches, schedule, reserve, &mut stats)?;
        let known = Known {
            lower_bound,
            schedule,
            reserve,
        };
        let made = search.simulate_best(forward, pipelines, &known, &mut stats)?;
        match made {
            Made::Fits(plan, program, simulation) => {
                found = Some((plan, program, simulation));
                break;
            }
            Made::Overrun(bytes) => {
                // At least twice as much as before: other choices fill other buckets.
                let more = bytes.saturating_add(bytes / 16).max(reserve);
                reserve = reserve.saturating_add(more)
            }
        }
    }
    stats.choices = search.choices.each_ref().map(|n| n.load(Ordering::Relaxed));
    drop(search);
    let (plan, program, simulation) = found.ok_or(PlanError::Overrun { bytes: reserve })?;
    let mut axes = plan.stages.iter().flat_map(|s| &s.mesh.axes);
    if pins.zero.is_some_and(|z| z > 0)
        && pins.fixes_mesh()
        && axes.all(|a| a.name == "tensor" || a.size == 1)
    {
        stats
            .notes
            .push("the zero pin does nothing: no axis splits samples (data=1)".into());
    }
    if chosen.is_empty() && pins.recompute.is_some_and(|r| r != Recompute::None) {
        stats.notes.push(
            "the recompute pin does nothing: no layer before the loss keeps an activation that it names".into(),
        );
    }
    Ok(Planned {
        plan: *plan,
        training,
        program,
        simulation: *simulation,
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

    fn setting<'s>(&'s self, shape: &'s Shape, batch: u64) -> Setting<'s> {
        Setting {
            training: self.training,
            train: self.train,
            cluster: self.seen_by(&shape.mesh),
            mesh: &shape.mesh,
            roles: &shape.roles,
            pins: self.pins,
            batch,
            saved: &self.saved,
            buckets: &self.buckets,
            of_parameters: &self.of_parameters,
        }
    }
}
