//! The search: microbatch sizes, submeshes and their logical shapes, stages, pipelines.
//!
//! For every microbatch size and every shape of every submesh, layers are modelled once per
//! kind and priced under a ladder of memory prices; ranges of layers become stage-table
//! entries; the inter-op DP finds the best pipeline of each microbatch size. The best few by
//! the additive objective are lowered and simulated, and the fastest of those that fit wins.

use crate::groups::Setting;
use crate::inter_op::{self, InterOpOptions, NoPlan, PipelineChoice, StageEntry, StageTable};
use crate::layer_model::{LayerCost, LayerModel, ModelError, QUANTUM_S, WeightedLayer, Weights};
use crate::layers::{Layers, find_layers};
use crate::pins::{self, AxisRole, Pins, check::listed};
use crate::prices::{Buckets, Prices};
use crate::stage::{PricedMesh, Sequences};
use crate::{PlanError, PlanOptions, PlanStats, Planned};
use ir::cluster::Cluster;
use ir::plan::ScheduleKind;
use ir::training::{Recompute, TrainingGraph, can_recompute, choose, recompute, training_graph};
use ir::{Axis, DeviceMesh, Dim, Graph, LogicalMesh, OpId, Pass, Rank, Region, TrainSpec, ValueId};
use ranking::{Known, Made};
use rayon::prelude::*;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

mod chosen;
mod equal;
mod even;
mod interleaved;
mod ranking;

/// No dim of a tensor is longer.
const MAX_LENGTH: u64 = 1 << 40;
/// Seconds per byte: how much time a byte of memory may cost. From nothing (memory is
/// plentiful) to where every byte is worth any communication.
pub(crate) const MEMORY_PRICES: [f64; 6] = [0.0, 1e-12, 1e-11, 1e-10, 1e-9, 1e-7];
/// Microbatches in flight that saved bytes are weighed with; exact counts enter in the DP.
const IN_FLIGHT: [f64; 3] = [1.0, 8.0, 64.0];
/// Pipelines that are lowered and simulated.
const SIMULATED: usize = 6;
/// The same where devices share processors, which only the simulator knows.
const SIMULATED_SHARED: usize = 24;
/// Pipelines of interleaved stages that are simulated beside them.
const SIMULATED_INTERLEAVED: usize = 8;
/// Most of them for one microbatch size, each with another number of stages on a mesh: sends,
/// of which there are as many more, hide behind computing as only the simulator knows.
const INTERLEAVED_OF_A_SIZE: usize = 2;
/// Microbatch sizes that are solved at once, before what they give holds back the next ones.
const BATCHES_AT_ONCE: usize = 4;
/// Times that a plan is made again because its buffers overran the budget.
const RETRIES: usize = 4;
/// Layers times devices up to which stages may have submeshes of different sizes; above,
/// all stages of a pipeline have equal submeshes.
const MIXED_SUBMESHES: usize = 512;
/// Largest microbatch that is tried unless one is pinned.
const MAX_MICROBATCH: u64 = 1 << 16;
/// Most microbatches of a step: a program has a slot for each.
const MAX_MICROBATCHES: u64 = 1 << 16;
/// Largest number of layers that the DP slices one by one.
pub(crate) const MAX_LAYERS: usize = 400;

/// One logical shape of a submesh.
#[derive(Clone, Debug)]
struct Shape {
    mesh: LogicalMesh,
    roles: Vec<AxisRole>,
}

/// A shape with its models and prices for one microbatch size.
struct Candidate {
    /// Index into `shapes`.
    shape: usize,
    submesh: usize,
    /// Per sequence of kinds: distinct stage costs with the index of their weights.
    stages: Vec<Vec<(usize, LayerCost)>>,
    /// Per sequence: a time of one microbatch that no stage of it can beat.
    relaxed: Vec<Option<f64>>,
}

/// A pipeline for one microbatch size.
#[derive(Clone)]
struct Pipeline {
    batch: u64,
    m: u32,
    schedule: ScheduleKind,
    choice: PipelineChoice,
    /// The ZeRO level that its parameters keep to, as if it were pinned.
    level: Option<u8>,
}

/// What the search made of one microbatch size.
struct Solved {
    candidates: u64,
    /// The best pipeline; where devices share processors, of every number of stages.
    found: Vec<PipelineChoice>,
    /// The best of interleaved stages, best first, where the search chooses among them; with the
    /// number of stages on each mesh.
    interleaved: Vec<(u32, PipelineChoice)>,
    error: Option<PlanError>,
    /// No pipeline of this microbatch size costs less, found or not.
    lower: f64,
}

/// Costs at which pipelines are not among those that are simulated.
#[derive(Clone, Copy)]
struct ToBeat {
    /// One stage on each mesh: what costs more.
    plain: f64,
    /// Several, interleaved: what costs as much.
    interleaved: f64,
}

/// The best pipeline of a part of the space, or why there is none, and a bound on the part.
struct Bounded {
    found: Result<PipelineChoice, PlanError>,
    lower: f64,
}

struct Search<'a> {
    training: &'a TrainingGraph,
    train: &'a TrainSpec,
    cluster: &'a Cluster,
    pins: &'a Pins,
    layers: Layers,
    sequences: Sequences,
    saved: Vec<bool>,
    buckets: Buckets,
    submeshes: Vec<u32>,
    /// A tensor that crosses layer boundaries, if one does.
    boundary: Option<ValueId>,
    /// What was worked out about layout changes on meshes that nobody prices at the moment; most
    /// of it holds for every microbatch size.
    prices: Mutex<Vec<Prices<'a>>>,
    /// Microbatch size and mesh of the models that are kept, see [`Search::models`].
    kept: OnceLock<(u64, LogicalMesh, Arc<Vec<LayerModel>>)>,
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
    pins::check::degrees(cluster.n_devices().into(), pins)?;
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
    let layers = find_layers(&training, &|path| match pins.tensor(path) {
        Some(pin) => format!("{pin:?}"),
        None => String::new(),
    });
    if layers.kind.len() > MAX_LAYERS {
        return Err(PlanError::Input(format!(
            "{} layers; the search slices at most {MAX_LAYERS}",
            layers.kind.len()
        )));
    }
    let search = Search {
        training: &training,
        train,
        cluster,
        pins,
        saved: saved_values(&training),
        buckets: Buckets::new(&training),
        sequences: sequences(&layers, pins)?,
        layers,
        submeshes: submeshes(cluster, pins),
        boundary: boundary(&training.graph),
        prices: Mutex::new(Vec::new()),
        kept: OnceLock::new(),
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
    /// Microbatch sizes to try.
    fn batches(&self) -> Result<Vec<u64>, PlanError> {
        let b = self.train.global_batch;
        let all = self.dividing_batches()?;
        let ScheduleKind::Interleaved { virtual_stages } = self.pins.schedule_kind() else {
            return Ok(all);
        };
        // Interleaved stages take microbatches in groups of one for each mesh.
        let p = u64::from(self.pins.pipeline.unwrap_or(1));
        let fits = |size: &u64| (b / size).is_multiple_of(p);
        if all.iter().any(fits) {
            return Ok(all.into_iter().filter(fits).collect());
        }
        let fitting: Vec<u64> = (1..=b.min(MAX_MICROBATCH))
            .filter(|d| b.is_multiple_of(*d) && fits(d))
            .collect();
        let way = match fitting.is_empty() {
            true => format!("train with a --global-batch that is a multiple of {p}"),
            false => format!("what fits: microbatch={}", listed(&fitting)),
        };
        Err(PlanError::Pins(format!(
            "pinned virtual={virtual_stages} x pipeline={p} wants a multiple of {p} microbatches of the global batch {b}; {way}"
        )))
    }

    fn dividing_batches(&self) -> Result<Vec<u64>, PlanError> {
        let b = self.train.global_batch;
        if let Some(pinned) = self.pins.microbatch {
            if !b.is_multiple_of(pinned) {
                let fitting: Vec<u64> = (1..=b.min(MAX_MICROBATCH))
                    .filter(|d| b.is_multiple_of(*d) && b / d <= MAX_MICROBATCHES)
                    .collect();
                return Err(PlanError::Pins(format!(
                    "pinned microbatch={pinned} does not divide the global batch {b}; what does: {}",
                    listed(&fitting)
                )));
            }
            if b / pinned > MAX_MICROBATCHES {
                return Err(PlanError::Pins(format!(
                    "pinned microbatch={pinned} makes {} microbatches of the global batch {b}; at most {MAX_MICROBATCHES} are possible",
                    b / pinned,
                )));
            }
            return Ok(vec![pinned]);
        }
        let divisors: Vec<u64> = (1..=b.min(MAX_MICROBATCH))
            .filter(|d| b.is_multiple_of(*d) && b / d <= MAX_MICROBATCHES)
            .collect();
        Ok(divisors)
    }

    fn setting<'s>(&'s self, shape: &'s Shape, batch: u64) -> Setting<'s> {
        Setting {
            training: self.training,
            train: self.train,
            cluster: self.cluster,
            mesh: &shape.mesh,
            roles: &shape.roles,
            pins: self.pins,
            batch,
            saved: &self.saved,
            buckets: &self.buckets,
        }
    }

    /// The pipelines to simulate, those without interleaved stages first, each kind best first;
    /// and a bound on all that there are.
    fn pipelines(
        &self,
        batches: &[u64],
        schedule: ScheduleKind,
        reserve: u64,
        stats: &mut PlanStats,
    ) -> Result<(Vec<Pipeline>, f64), PlanError> {
        let (mut plain, mut interleaved) = (Vec::new(), Vec::new());
        let mut bound = f64::INFINITY;
        let mut nearest: Option<PlanError> = None;
        // In parallel; collected in the order of the batches, so the outcome does not depend
        // on which is ready first. A few at a time where those found can hold back the next.
        let at_once = match self.mixes_submeshes() {
            true => batches.len(),
            false => BATCHES_AT_ONCE,
        };
        let mut solved: Vec<Solved> = Vec::with_capacity(batches.len());
        for some in batches.chunks(at_once.max(1)) {
            let to_beat = self.to_beat(&solved);
            let more = some.par_iter();
            let more = more.map(|&batch| self.solve_batch(batch, schedule, reserve, to_beat));
            solved.extend(more.collect::<Vec<_>>());
        }
        for (&batch, solved) in batches.iter().zip(solved) {
            stats.candidates += solved.candidates;
            if let Some(e) = solved.error {
                nearest = Some(nearer(nearest, e));
            }
            bound = bound.min(solved.lower);
            let m = (self.train.global_batch / batch) as u32;
            let pipeline = |schedule, choice| Pipeline {
                batch,
                m,
                schedule,
                choice,
                level: None,
            };
            plain.extend(solved.found.into_iter().map(|c| pipeline(schedule, c)));
            let rings = solved.interleaved.into_iter();
            interleaved.extend(rings.map(|(virtual_stages, choice)| {
                pipeline(ScheduleKind::Interleaved { virtual_stages }, choice)
            }));
        }
        let cost = |p: &Pipeline| p.choice.cost.total_s;
        for found in [&mut plain, &mut interleaved] {
            found.sort_by(|a, b| cost(a).total_cmp(&cost(b)).then(a.batch.cmp(&b.batch)));
        }
        plain.truncate(match self.cluster.pool.is_some() {
            true => SIMULATED_SHARED,
            false => SIMULATED,
        });
        let to_beat = plain.first().map_or(f64::INFINITY, cost);
        interleaved.retain(|p| cost(p) < to_beat);
        interleaved.truncate(SIMULATED_INTERLEAVED);
        plain.extend(interleaved);
        if plain.is_empty() {
            return Err(nearest.unwrap_or(PlanError::Input("no microbatch size to try".into())));
        }
        Ok((plain, bound))
    }

    /// The costs at which pipelines are not among those that are simulated.
    fn to_beat(&self, solved: &[Solved]) -> ToBeat {
        let worst = |mut costs: Vec<f64>, of: usize| {
            costs.sort_by(f64::total_cmp);
            costs.get(of - 1).copied().unwrap_or(f64::INFINITY)
        };
        let found = solved.iter().flat_map(|s| &s.found);
        let plain: Vec<f64> = found.map(|c| c.cost.total_s).collect();
        let found = solved.iter().flat_map(|s| &s.interleaved);
        let interleaved = found.map(|(_, c)| c.cost.total_s).collect();
        let least = plain.iter().copied().fold(f64::INFINITY, f64::min);
        ToBeat {
            plain: match self.cluster.pool.is_some() {
                true => f64::INFINITY,
                false => worst(plain, SIMULATED),
            },
            interleaved: worst(interleaved, SIMULATED_INTERLEAVED).min(least),
        }
    }

    /// The best pipeline of a microbatch size; where submeshes are equal, only if it costs at
    /// most `to_beat`.
    fn solve_batch(
        &self,
        batch: u64,
        schedule: ScheduleKind,
        reserve: u64,
        to_beat: ToBeat,
    ) -> Solved {
        let m = (self.train.global_batch / batch) as u32;
        if !self.mixes_submeshes() && schedule.virtual_stages() == 1 {
            return self.solve_equal(batch, m, schedule, reserve, to_beat);
        }
        let shapes = self.shapes(batch);
        let candidates: Vec<Result<Candidate, ModelError>> = shapes
            .par_iter()
            .enumerate()
            .map(|(i, (submesh, shape))| self.candidate((i, *submesh), shape, batch, m))
            .collect();
        let mut solved = Solved {
            candidates: 0,
            found: Vec::new(),
            interleaved: Vec::new(),
            error: None,
            lower: f64::INFINITY,
        };
        let mut usable = Vec::new();
        let mut unpriced = false;
        for c in candidates {
            match c {
                Ok(c) => usable.push(c),
                Err(e) => {
                    unpriced |= matches!(e, ModelError::TooWide(_));
                    solved.error = solved.error.or(Some(no_strategy(e)));
                }
            }
        }
        solved.candidates = usable.len() as u64;
        let Bounded { found, lower } = self.solve_pipeline(&usable, batch, m, schedule, reserve);
        // A shape that could not be priced might be better than all that were.
        solved.lower = if unpriced { 0.0 } else { lower };
        match found {
            Ok(choice) => solved.found.push(choice),
            Err(e) => solved.error = Some(nearer(solved.error, e)),
        }
        let plain = solved.found.iter().map(|c| c.cost.total_s);
        let to_beat = plain.fold(to_beat.interleaved, f64::min);
        for submesh in 0..self.submeshes.len() {
            self.interleave(&mut solved, submesh, &usable, batch, m, reserve, to_beat);
        }
        // The additive objective does not know that devices share processors, so it ranks
        // numbers of stages badly there: let the simulator see the best of each.
        if self.cluster.pool.is_some() && self.pins.pipeline.is_none() && self.mixes_submeshes() {
            let all: Vec<usize> = (0..self.submeshes.len()).collect();
            let most = self
                .layers
                .kind
                .len()
                .min(self.cluster.n_devices() as usize);
            for p in 1..=most {
                let one = self.solve_over(
                    &all,
                    &usable,
                    batch,
                    m,
                    schedule,
                    reserve,
                    Some(p),
                    f64::INFINITY,
                );
                if let Some(choice) = one.found.ok().filter(|c| !solved.found.contains(c)) {
                    solved.found.push(choice);
                }
            }
        }
        solved
    }

    /// Logical shapes of every submesh that suit a microbatch of `batch` samples.
    fn shapes(&self, batch: u64) -> Vec<(usize, Shape)> {
        let mut shapes = Vec::new();
        for (submesh, &n) in self.submeshes.iter().enumerate() {
            let devices = DeviceMesh {
                first_rank: Rank(0),
                n_devices: n,
            };
            let axis = |name: &str, size: u32| Axis {
                name: name.into(),
                size,
            };
            if self.pins.fixes_mesh() {
                shapes.extend(
                    self.pinned_shape(devices, batch)
                        .map(|shape| (submesh, shape)),
                );
                continue;
            }
            let inner_most = self.cluster.devices_per_host.min(n);
            for y in (1..=inner_most).filter(|y| {
                n.is_multiple_of(*y) && self.cluster.devices_per_host.is_multiple_of(*y)
            }) {
                // One axis over all devices is one shape, whichever axis has it.
                if y == 1 && n > 1 && self.cluster.devices_per_host.is_multiple_of(n) {
                    continue;
                }
                if let Some(mesh) = LogicalMesh::new(devices, vec![axis("x", n / y), axis("y", y)])
                {
                    shapes.push((
                        submesh,
                        Shape {
                            mesh,
                            roles: vec![AxisRole::Free, AxisRole::Free],
                        },
                    ));
                }
            }
        }
        shapes
    }

    /// The shape that the degree pins give a submesh; `None` where they do not fit it, or no
    /// sample would be left for some rank of the data axis.
    fn pinned_shape(&self, devices: DeviceMesh, batch: u64) -> Option<Shape> {
        let pins = self.pins;
        let n = devices.n_devices / pins.context.unwrap_or(1).max(1);
        let data = pins
            .data
            .unwrap_or_else(|| n / pins.tensor.unwrap_or(1).max(1));
        let tensor = pins.tensor.unwrap_or_else(|| n / data.max(1));
        // Experts are split by a part of the ranks that split samples.
        let expert = pins.expert.unwrap_or(1).max(1);
        let replicas = data.is_multiple_of(expert).then_some(data / expert)?;
        // In this order as in Megatron-LM: tensor ranks are neighbours, context ranks next.
        let mut sizes = vec![(AxisRole::Data, replicas)];
        sizes.extend(pins.expert.map(|e| (AxisRole::Expert, e)));
        sizes.extend(pins.context.map(|c| (AxisRole::Context, c)));
        sizes.push((AxisRole::Tensor, tensor));
        let names = pins.axis_names();
        let axes = names.iter().zip(&sizes);
        let axes = axes.map(|(name, &(_, size))| Axis {
            name: name.to_string(),
            size,
        });
        let mesh = LogicalMesh::new(devices, axes.collect())?;
        (u64::from(data) <= batch).then(|| Shape {
            mesh,
            roles: sizes.into_iter().map(|(role, _)| role).collect(),
        })
    }

    fn candidate(
        &self,
        (index, submesh): (usize, usize),
        shape: &Shape,
        batch: u64,
        m: u32,
    ) -> Result<Candidate, ModelError> {
        let s = self.setting(shape, batch);
        let base = Weights::free(m);
        let models = self.models(&s)?;
        let weighted = weigh(&models, base)?;
        let mut weights = vec![base];
        for &price in &MEMORY_PRICES[1..] {
            for &f in IN_FLIGHT.iter().filter(|&&f| f == 1.0 || f <= f64::from(m)) {
                weights.push(Weights {
                    static_price: price,
                    saved_price: price * f,
                    ..base
                });
            }
        }
        let mut stages: Vec<Vec<(usize, LayerCost)>> = vec![Vec::new(); self.sequences.len()];
        let mut is_memory_plentiful = false;
        for (w, &weight) in weights.iter().enumerate() {
            // Where the fastest choices fit by far, memory has no price.
            let plenty = |(_, cost): &(usize, LayerCost)| self.fits_twice(cost, m);
            is_memory_plentiful = w == 1 && stages.iter().flatten().all(plenty);
            if is_memory_plentiful {
                break;
            }
            let paths = PricedMesh::new(&weighted, weight).paths(&s, &self.sequences);
            for (costs, path) in stages.iter_mut().zip(paths) {
                let Some(path) = path else { continue };
                // Many prices lead to the same choice.
                if !costs.iter().any(|(_, c)| *c == path.cost) {
                    costs.push((w, path.cost));
                }
            }
        }
        let prices = if is_memory_plentiful {
            &MEMORY_PRICES[..1]
        } else {
            &MEMORY_PRICES[..]
        };
        let relaxed = self.relaxed(&models, base, prices)?;
        Ok(Candidate {
            shape: index,
            submesh,
            stages,
            relaxed,
        })
    }

    /// Whether a stage of this cost fits with all `m` microbatches in flight, and as much again
    /// for what placing its buffers may add.
    fn fits_twice(&self, cost: &LayerCost, m: u32) -> bool {
        let bytes = cost
            .saved_bytes
            .saturating_mul(u64::from(m))
            .saturating_add(cost.static_bytes)
            .saturating_add(cost.transient_bytes);
        let stages_of_a_mesh = u64::from(self.pins.schedule_kind().virtual_stages());
        bytes.saturating_mul(stages_of_a_mesh) <= self.cluster.usable_bytes() / 2
    }

    /// For each sequence of layers a time of one microbatch that no stage of it can beat: the
    /// Lagrangian bound over a ladder of memory prices, with one microbatch in flight and
    /// without the time of the step. `min (time + price * bytes) - price * capacity` is at
    /// most the time of whatever fits the capacity. Where everything fits, no price but zero
    /// can give more.
    fn relaxed(
        &self,
        models: &[LayerModel],
        base: Weights,
        prices: &[f64],
    ) -> Result<Vec<Option<f64>>, ModelError> {
        let free = Weights { step: 0.0, ..base };
        let weighted = weigh(models, free)?;
        let capacity = self.cluster.usable_bytes() as f64;
        let mut best: Vec<Option<f64>> = vec![None; self.sequences.len()];
        for &price in prices {
            let priced = Weights {
                static_price: price,
                saved_price: price,
                ..free
            };
            let objectives = PricedMesh::new(&weighted, priced).objectives(&self.sequences);
            for (known, objective) in best.iter_mut().zip(objectives) {
                let Some(objective) = objective else { continue };
                // Each of the summed costs is rounded to within half a quantum.
                let rounding = QUANTUM_S * 100.0 * self.layers.kind.len() as f64;
                let seconds = (objective as f64 * QUANTUM_S - rounding - price * capacity) / base.m;
                *known = Some(known.unwrap_or(0.0).max(seconds));
            }
        }
        Ok(best)
    }

    /// The models of all kinds of layers. Where the pins leave one mesh and one microbatch size
    /// they are made once for pricing and for the plan.
    fn models(&self, s: &Setting<'_>) -> Result<Arc<Vec<LayerModel>>, ModelError> {
        let kept = self.kept.get();
        if let Some((_, _, known)) = kept.filter(|k| (k.0, &k.1) == (s.batch, s.mesh)) {
            return Ok(Arc::clone(known));
        }
        let mut prices = self.prices_of(s.mesh);
        let kinds = self.layers.first.iter();
        let models = kinds.map(|&l| LayerModel::new(s, &self.layers, l, &mut prices));
        let models = models.collect::<Result<Vec<_>, _>>();
        self.known_prices().push(prices);
        let models = Arc::new(models?);
        if self.pins.fixes_mesh() && self.pins.microbatch.is_some() {
            let _ = self
                .kept
                .set((s.batch, s.mesh.clone(), Arc::clone(&models)));
        }
        Ok(models)
    }

    fn known_prices(&self) -> std::sync::MutexGuard<'_, Vec<Prices<'a>>> {
        // They are put back whole or not at all, so a panic elsewhere does not spoil them.
        self.prices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The prices of a mesh that were worked out last, or new ones.
    fn prices_of(&self, mesh: &LogicalMesh) -> Prices<'a> {
        let mut known = self.known_prices();
        match known.iter().position(|p| p.mesh() == mesh) {
            Some(i) => known.swap_remove(i),
            None => Prices::new(self.cluster, mesh, &self.buckets),
        }
    }

    fn solve_pipeline(
        &self,
        candidates: &[Candidate],
        batch: u64,
        m: u32,
        schedule: ScheduleKind,
        reserve: u64,
    ) -> Bounded {
        if let ScheduleKind::Interleaved { virtual_stages } = schedule {
            return self.solve_pinned_ring(candidates, batch, m, virtual_stages, reserve);
        }
        let stages = self.pins.pipeline.map(|p| p as usize);
        let all: Vec<usize> = (0..self.submeshes.len()).collect();
        self.solve_over(
            &all,
            candidates,
            batch,
            m,
            schedule,
            reserve,
            stages,
            f64::INFINITY,
        )
    }

    /// Whether stages of one pipeline may have submeshes of different sizes.
    fn mixes_submeshes(&self) -> bool {
        self.layers.kind.len() * self.cluster.n_devices() as usize <= MIXED_SUBMESHES
    }

    /// The best pipeline over some of the submeshes (indices), and a bound on all of them. It is
    /// not found, and no reason given, where it costs more than a finite `to_beat`.
    #[allow(clippy::too_many_arguments)] // Each is a loop variable of the search.
    fn solve_over(
        &self,
        submeshes: &[usize],
        candidates: &[Candidate],
        batch: u64,
        m: u32,
        schedule: ScheduleKind,
        reserve: u64,
        n_stages: Option<usize>,
        to_beat: f64,
    ) -> Bounded {
        // Sizes in units of their common divisor keep the table of devices small.
        let unit = submeshes
            .iter()
            .map(|&i| self.submeshes[i])
            .fold(0, gcd)
            .max(1);
        let sizes: Vec<usize> = submeshes
            .iter()
            .map(|&i| (self.submeshes[i] / unit) as usize)
            .collect();
        let devices = (self.cluster.n_devices() / unit) as usize;
        let capacity = self.cluster.usable_bytes().saturating_sub(reserve);
        let all: Vec<&Candidate> = candidates.iter().collect();
        let (table, relaxed) = self.tables(&all, submeshes, devices, sizes, capacity);
        let transfer = |a: usize, _: u16, b: usize, _: u16| {
            Some(self.transfer_s(submeshes[a], submeshes[b], batch))
        };
        let kind = match schedule {
            ScheduleKind::GPipe => inter_op::ScheduleKind::GPipe,
            ScheduleKind::OneFOneB | ScheduleKind::Interleaved { .. } => {
                inter_op::ScheduleKind::OneFOneB
            }
        };
        let options = InterOpOptions {
            n_stages,
            ..InterOpOptions::new(u64::from(m), kind)
        };
        // Equal ones are looked at too: ties have an order.
        let options = InterOpOptions {
            cutoff_s: to_beat.next_up(),
            ..options
        };
        let lower = match inter_op::plan(&relaxed, &transfer, &options) {
            Ok(found) => found.lower_bound_s,
            // Where even the relaxation has no pipeline there is none to bound.
            Err(_) => to_beat,
        };
        let found = match lower < options.cutoff_s || to_beat.is_infinite() {
            true => inter_op::plan(&table, &transfer, &options),
            false => Err(NoPlan::NoTiling),
        };
        Bounded {
            found: found.map_err(|e| self.infeasible(e, submeshes)),
            lower,
        }
    }

    /// What ranges of layers cost on some of the submeshes (indices), which have these sizes in
    /// a cluster of `devices` of the same unit; and times that they cannot beat.
    fn tables(
        &self,
        candidates: &[&Candidate],
        submeshes: &[usize],
        devices: usize,
        sizes: Vec<usize>,
        capacity: u64,
    ) -> (StageTable, StageTable) {
        let n_layers = self.layers.kind.len();
        let mut table = StageTable::new(n_layers, devices, sizes.clone());
        let mut relaxed = StageTable::new(n_layers, devices, sizes);
        let mut best_relaxed = std::collections::BTreeMap::new();
        let blank = StageEntry {
            forward_s: 0.0,
            backward_s: 0.0,
            step_s: 0.0,
            static_bytes: 0,
            saved_bytes_per_microbatch: 0,
            transient_bytes: 0,
            capacity_bytes: capacity,
            boundary_in: 0,
            boundary_out: 0,
            tag: 0,
        };
        let none = vec![Vec::new(); self.sequences.len()];
        let mut entries: Vec<Vec<Vec<StageEntry>>> = vec![none; submeshes.len()];
        for candidate in candidates {
            let Some(submesh) = submeshes.iter().position(|&i| i == candidate.submesh) else {
                continue;
            };
            for (sequence, costs) in candidate.stages.iter().enumerate() {
                entries[submesh][sequence].extend(costs.iter().map(|(w, cost)| StageEntry {
                    forward_s: cost.time.forward,
                    backward_s: cost.time.backward,
                    step_s: cost.time.step,
                    static_bytes: cost.static_bytes,
                    saved_bytes_per_microbatch: cost.saved_bytes,
                    transient_bytes: cost.transient_bytes,
                    tag: (candidate.shape as u64) << 16 | *w as u64,
                    ..blank
                }));
            }
            for &((i, j), sequence) in &self.sequences.ranges {
                if let Some(seconds) = candidate.relaxed[sequence] {
                    let known = best_relaxed.entry((i, j, submesh)).or_insert(seconds);
                    *known = known.min(seconds);
                }
            }
        }
        for (submesh, mut entries) in entries.into_iter().enumerate() {
            entries.iter_mut().for_each(useful);
            for &((i, j), sequence) in &self.sequences.ranges {
                for entry in &entries[sequence] {
                    table.push(i..j, submesh, *entry);
                }
            }
        }
        for ((i, j, submesh), seconds) in best_relaxed {
            relaxed.push(
                i..j,
                submesh,
                StageEntry {
                    forward_s: seconds,
                    capacity_bytes: u64::MAX,
                    ..blank
                },
            );
        }
        (table, relaxed)
    }

    /// Forward and gradient of the boundary tensor, one microbatch, between two submeshes.
    fn transfer_s(&self, from: usize, to: usize, batch: u64) -> f64 {
        let graph = &self.training.graph;
        let bytes = self.boundary.map_or(0, |v| graph.ty(v).bytes(batch));
        let (a, b) = (self.submeshes[from], self.submeshes[to]);
        let share = bytes / u64::from(a.min(b).max(1));
        let neighbour = a.min(self.cluster.n_devices().saturating_sub(1));
        2.0 * cost_model::collectives::send_time(self.cluster, 0, neighbour, share).0
    }

    fn infeasible(&self, why: NoPlan, submeshes: &[usize]) -> PlanError {
        match why {
            NoPlan::NoTiling => PlanError::NoTiling {
                devices: self.cluster.n_devices(),
                layers: self.layers.kind.len(),
            },
            NoPlan::Memory {
                n_stages,
                layers,
                submesh,
                in_flight,
                needed_bytes,
                capacity_bytes,
            } => PlanError::Memory {
                n_stages,
                layers: format!(
                    "{} to {}",
                    self.training.graph.layers[layers.start],
                    self.training.graph.layers[layers.end - 1]
                ),
                devices: self.submeshes[submeshes[submesh]],
                in_flight,
                needed: u64::try_from(needed_bytes).unwrap_or(u64::MAX),
                capacity: capacity_bytes,
            },
        }
    }
}

fn no_strategy(e: ModelError) -> PlanError {
    PlanError::Strategies(e.to_string())
}

fn weigh(models: &[LayerModel], weights: Weights) -> Result<Vec<WeightedLayer<'_>>, ModelError> {
    models.iter().map(|m| m.weighted(weights)).collect()
}

/// The `w`-th weights that a candidate with `m` microbatches is priced under.
fn weight_at(m: u32, w: usize) -> Weights {
    let base = Weights::free(m);
    let prices = MEMORY_PRICES[1..].iter().flat_map(|&price| {
        IN_FLIGHT
            .iter()
            .filter(move |&&f| f == 1.0 || f <= f64::from(m))
            .map(move |&f| (price, price * f))
    });
    std::iter::once((0.0, 0.0))
        .chain(prices)
        .nth(w)
        .map_or(base, |(a, b)| Weights {
            static_price: a,
            saved_price: b,
            ..base
        })
}

/// The error that tells the user more: too little memory before anything else.
fn nearer(old: Option<PlanError>, new: PlanError) -> PlanError {
    match (old, new) {
        (
            Some(PlanError::Memory {
                needed,
                capacity,
                n_stages,
                layers,
                devices,
                in_flight,
            }),
            PlanError::Memory { needed: n2, .. },
        ) if needed <= n2 => PlanError::Memory {
            needed,
            capacity,
            n_stages,
            layers,
            devices,
            in_flight,
        },
        (Some(old @ PlanError::Memory { .. }), new) if !matches!(new, PlanError::Memory { .. }) => {
            old
        }
        // Where ops are left without a strategy nothing can be tiled: say the cause.
        (Some(old @ PlanError::Strategies(_)), PlanError::NoTiling { .. }) => old,
        (_, new) => new,
    }
}

/// The model with its sequences stored for the context ranks, where the pins ask for it.
fn in_zigzag_order(forward: &Graph, pins: &Pins) -> Result<Option<Graph>, PlanError> {
    match (pins.zigzag, pins.context) {
        (false, _) | (true, Some(1)) => Ok(None),
        (true, None) => Err(PlanError::Pins(
            "pinned context_order=zigzag is about the ranks of a context axis; pin context=N too"
                .into(),
        )),
        (true, Some(n)) => ir::zigzag::zigzag(forward, n.into())
            .map(Some)
            .map_err(|e| {
                PlanError::Pins(format!(
                    "pinned context_order=zigzag: {e}; leave it out for the natural order"
                ))
            }),
    }
}

/// What is wrong with the first tensor that nobody could hold, if there is one.
fn odd_length(forward: &Graph) -> Option<String> {
    let odd = |dim: &Dim| matches!(dim, Dim::Fixed(n) if !(1..=MAX_LENGTH).contains(n));
    let mut ids = (0..forward.values().len()).map(ValueId::new);
    let value = ids.find(|&v| forward.ty(v).shape.0.iter().any(odd))?;
    let (name, ty) = (forward.value_name(value), forward.ty(value));
    Some(format!(
        "the graph's {name} is {ty}; dims from 1 to {MAX_LENGTH} can be planned for"
    ))
}

/// The sequences of layers that stages may have: all ranges, or those of a pinned split.
fn sequences(layers: &Layers, pins: &Pins) -> Result<Sequences, PlanError> {
    let there_are = layers.kind.len();
    if let Some(stages) = pins.pipeline.filter(|&p| p as usize > there_are) {
        return Err(PlanError::Pins(format!(
            "pinned pipeline={stages} needs as many layers; the model has {there_are}, embedding and output layer included: pin pipeline={there_are} or less, or cut it finer with --layers {stages}"
        )));
    }
    let Some(counts) = &pins.split else {
        return Ok(Sequences::new(layers));
    };
    let n_layers: usize = counts.iter().fold(0, |sum, &n| sum.saturating_add(n));
    if n_layers != there_are {
        return Err(PlanError::Pins(format!(
            "pinned split has {n_layers} layers; the model has {there_are}, embedding and output layer included"
        )));
    }
    Ok(Sequences::of_split(layers, counts))
}

/// Sizes of submeshes: parts of a host that divide it, and whole hosts, that divide the cluster.
/// The pinned degrees fit the cluster ([`pins::check`]).
fn submeshes(cluster: &Cluster, pins: &Pins) -> Vec<u32> {
    let n = cluster.n_devices();
    if let (Some(d), Some(t)) = (pins.data, pins.tensor) {
        return vec![d * t * pins.context.unwrap_or(1)];
    }
    if let Some(p) = pins.pipeline {
        return vec![n / p];
    }
    let host = cluster.devices_per_host;
    (1..=n)
        .filter(|k| {
            n.is_multiple_of(*k)
                && ((*k <= host && host.is_multiple_of(*k)) || k.is_multiple_of(host))
        })
        .collect()
}

/// Drops entries that are no use beside another of the same layers on the same submesh: one that
/// takes less time, or as long and stands before, and is no worse in all else.
fn useful(entries: &mut Vec<StageEntry>) {
    let no_worse = |a: &StageEntry, b: &StageEntry| {
        a.step_s <= b.step_s
            && a.saved_bytes_per_microbatch <= b.saved_bytes_per_microbatch
            && a.bytes(0) <= b.bytes(0)
    };
    let is_useful = |(i, e): (usize, &StageEntry)| {
        !entries.iter().enumerate().any(|(k, other)| {
            let (time, than) = (other.time_s(), e.time_s());
            (time < than || time == than && k < i) && no_worse(other, e)
        })
    };
    let kept: Vec<bool> = entries.iter().enumerate().map(is_useful).collect();
    let mut kept = kept.into_iter();
    entries.retain(|_| kept.next() == Some(true));
}

fn boundary(graph: &Graph) -> Option<ValueId> {
    let mut ops = graph.ops().iter();
    let op = ops.find(|op| op.path.starts_with(ir::boundary::BOUNDARY))?;
    op.outputs.first().copied()
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The ops that the pins recompute.
fn recomputed(training: &TrainingGraph, pins: &Pins) -> Result<BTreeSet<OpId>, PlanError> {
    let graph = &training.graph;
    for pin in &pins.recompute_ops {
        let mut matched = graph.ops().iter().filter(|op| pin.matches(&op.path));
        if !matched.any(can_recompute) {
            return Err(PlanError::Pins(format!(
                "pin recompute:{} matches no op of the forward pass inside a layer; `inspect --layers` lists their names",
                pin.op
            )));
        }
    }
    let policy = pins.recompute.unwrap_or_default();
    let fixed = |op: &ir::Op| pins.recomputes(&op.path);
    Ok(choose(training, policy, &fixed))
}

/// Which forward values a later pass uses, and which recomputed ones a gradient uses.
fn saved_values(training: &TrainingGraph) -> Vec<bool> {
    let graph = &training.graph;
    let mut saved = vec![false; graph.values().len()];
    for op in graph
        .ops()
        .iter()
        .filter(|op| op.region == Region::Microbatch && op.pass != Pass::F)
    {
        for &v in &op.inputs {
            let producer = graph.op(graph.value(v).producer);
            let lives = match producer.pass {
                Pass::F => producer.region == Region::Microbatch,
                Pass::Recompute => op.pass != Pass::Recompute,
                _ => false,
            };
            saved[v.index()] |= lives && !producer.kind.is_source();
        }
    }
    saved
}
