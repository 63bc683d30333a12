//! A shape of a submesh priced for one microbatch size: what sequences of layers cost on it under
//! prices on memory, and times that they cannot beat.
//!
//! Prices are of a fixed scale ([`super::scale`]), and few of them are looked at: between two whose
//! choices differ, the one at which both would cost the same. What lies between the choices of two
//! prices are stages whose first layers take the one and whose others take the other
//! ([`super::mixes`]).
//!
//! What holds on a mesh for every microbatch size is kept for the next one.

use super::bounds::{Bounds, Priced};
use super::chosen::ShapeModels;
use super::mixes::{Rungs, mixed};
use super::scale::{self, MEMORY_PRICES};
use super::{Search, Shape};
use crate::PlanError;
use crate::groups::Setting;
use crate::layer_model::{
    Assumed, LayerCost, LayerModel, MeshFacts, ModelError, WeightedLayer, Weights,
};
use crate::pins::AxisRole;
use crate::prices::Prices;
use crate::stage::{PricedMesh, StagePath};
use intra_op::eliminate::Eliminator;
use ir::LogicalMesh;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, PoisonError};

/// Prices of the bound where only what lives for the step has a price, seconds per byte.
const STATIC_PRICES: [f64; 3] = [0.0, 1e-11, 1e-9];
/// Most prices that are looked at for one number of microbatches in flight.
const PRICES: usize = 4;

/// Per sequence of kinds: distinct stage costs with the prices that lead to them.
pub(super) type Stages = Vec<Vec<(Rungs, LayerCost)>>;

/// The models of a shape's layer kinds, by the number of the choice of what is recomputed; `None`
/// where a kind is what it is under the first.
pub(super) type Models = Vec<Vec<Option<LayerModel>>>;

/// The same with the weights of time fixed.
pub(super) type Weighted<'m> = Vec<Vec<Option<WeightedLayer<'m>>>>;

/// A shape with its prices for one microbatch size.
pub(super) struct Candidate {
    /// Index into `shapes`.
    pub(super) shape: usize,
    pub(super) submesh: usize,
    /// Microbatches.
    pub(super) m: f64,
    /// Bytes that a device has.
    pub(super) capacity: f64,
    /// Per sequence: a time of one microbatch that no stage of it can beat.
    pub(super) relaxed: Vec<Option<f64>>,
    /// Bounds on that and the work once per step together.
    pub(super) bounds: Bounds,
    /// Costs of stages where memory has no price.
    free: Stages,
    /// The inputs for pricing them where it has one, if anything is left to price.
    unpriced: Option<Unpriced>,
    /// Their costs under all prices, once asked for, and the bounds that these give.
    stages: OnceLock<Known>,
}

/// The results of pricing a candidate's stages.
#[derive(Default)]
pub(super) struct Known {
    stages: Stages,
    /// Bounds under the prices that were looked at.
    pub(super) bounds: Vec<Priced>,
    /// By sequence, bytes that a stage needs for a moment at least.
    pub(super) transient: Vec<f64>,
}

/// A shape with its models for one microbatch size.
struct Unpriced {
    shape: Shape,
    batch: u64,
    /// Weights of time, with what is assumed of the traffic of parameters.
    base: Weights,
    m: u32,
    /// Bytes per device that stay free.
    reserve: u64,
    models: Arc<ShapeModels>,
    eliminators: Vec<Eliminator>,
    /// Paths where memory has no price.
    paths: Vec<Option<StagePath>>,
}

impl Candidate {
    /// The costs of its stages, where somebody asked for them.
    pub(super) fn known_stages(&self) -> Option<&Stages> {
        match self.unpriced {
            None => Some(&self.free),
            Some(_) => self.stages.get().map(|known| &known.stages),
        }
    }

    /// See [`Bounds::priced_s`].
    pub(super) fn priced_s(&self, sequence: usize, price: f64, n: u64) -> Option<f64> {
        self.bounds.priced_s(self.known(), sequence, price, n)
    }

    /// The results of pricing its stages, where somebody asked for them.
    pub(super) fn known(&self) -> Option<&Known> {
        self.stages.get()
    }
}

impl<'a> Search<'a> {
    /// A shape priced for `m` microbatches of `batch` samples, with `reserve` bytes of each device
    /// left free. What its stages cost under prices on memory is worked out when somebody asks:
    /// most shapes lose by their bound alone.
    pub(super) fn candidate(
        &self,
        index: usize,
        shape: &Shape,
        batch: u64,
        m: u32,
        reserve: u64,
    ) -> Result<Candidate, ModelError> {
        let models = self.kept_models(index, shape, batch, false)?;
        let assumed = Assumed::default();
        self.candidate_of(models, (index, shape), batch, m, reserve, assumed)
    }

    /// The same for a pipeline that is made again, as the traffic of its parameters is assumed to
    /// be. Its models are kept.
    pub(super) fn candidate_at(
        &self,
        index: usize,
        shape: &Shape,
        batch: u64,
        m: u32,
        reserve: u64,
        assumed: Assumed,
    ) -> Result<Candidate, ModelError> {
        let models = self.kept_models(index, shape, batch, assumed.gradients)?;
        self.candidate_of(models, (index, shape), batch, m, reserve, assumed)
    }

    pub(super) fn candidate_of(
        &self,
        models: Arc<ShapeModels>,
        (index, shape): (usize, &Shape),
        batch: u64,
        m: u32,
        reserve: u64,
        assumed: Assumed,
    ) -> Result<Candidate, ModelError> {
        let s = self.setting(shape, batch);
        let base = Weights::free(m).assuming(assumed);
        let weighted = weigh(&models.first, base)?;
        let mut priced = PricedMesh::new(&weighted, base);
        let paths = priced.paths(&[s], &self.sequences);
        let one = |path: &Option<StagePath>| {
            let path = path.iter();
            path.map(|path| (Rungs::one(0), assumed.seen_cost(&path.cost)))
                .collect()
        };
        let free: Stages = paths.iter().map(one).collect();
        // Where the fastest choices fit by far, memory has no price.
        let mut costs = free.iter().flatten();
        let capacity = self.bytes_of(self.seen_by(&shape.mesh));
        let is_memory_plentiful = costs.all(|(_, cost)| self.fits_twice(cost, m, capacity));
        let prices = match (is_memory_plentiful, self.variants.len()) {
            (true, _) => &MEMORY_PRICES[..1],
            (false, 1) => &MEMORY_PRICES[..],
            (false, _) => &STATIC_PRICES[..],
        };
        let free_s = priced.objectives(&self.sequences);
        drop(priced);
        let bounds = self.bounds(&weighted, base, prices, &free_s);
        // Of all microbatches and what they share of a step, one takes no less time.
        let relaxed = self.relaxed(&models.first, base)?;
        let eliminators = weighted
            .into_iter()
            .map(|w| w.eliminator.into_owned())
            .collect();
        let unpriced = (!is_memory_plentiful).then_some(Unpriced {
            shape: shape.clone(),
            batch,
            base,
            m,
            reserve,
            models,
            eliminators,
            paths,
        });
        Ok(Candidate {
            shape: index,
            submesh: shape.submesh,
            m: base.m,
            capacity: capacity as f64,
            relaxed,
            bounds,
            free,
            unpriced,
            stages: OnceLock::new(),
        })
    }

    /// The costs of a candidate's stages.
    pub(super) fn stages<'c>(&self, candidate: &'c Candidate) -> &'c Stages {
        match &candidate.unpriced {
            None => &candidate.free,
            Some(rest) => {
                let nothing = || Known {
                    stages: candidate.free.clone(),
                    ..Known::default()
                };
                let priced = || self.priced(rest).unwrap_or_else(nothing);
                &candidate.stages.get_or_init(priced).stages
            }
        }
    }

    /// The costs of stages under all prices, and of mixes of them; `None` where the layers of some
    /// choice of what is recomputed cannot be modelled.
    fn priced(&self, rest: &Unpriced) -> Option<Known> {
        let settings = self.settings(&rest.shape, rest.batch);
        let others = self.others_of(&rest.models, &rest.shape, rest.batch).ok()?;
        let base = rest.base;
        let first = rest.models.first.iter().zip(&rest.eliminators);
        let first = first.map(|(model, eliminator)| {
            Some(WeightedLayer {
                model,
                eliminator: Cow::Borrowed(eliminator),
            })
        });
        let mut weighted: Weighted<'_> = vec![first.collect()];
        weighted.extend(weigh_all(others, base).ok()?);
        let mut rungs: BTreeMap<usize, Vec<Option<StagePath>>> = BTreeMap::new();
        rungs.insert(0, rest.paths.clone());
        let in_flight = self.in_flight(rest.shape.submesh, rest.m);
        let capacity = self.capacity(rest.shape.submesh, rest.reserve);
        let mut bounds = Vec::new();
        for family in scale::families(&in_flight) {
            let of_all = capacity as f64 * self.n_stages(rest.shape.submesh);
            let budget = (family, of_all);
            self.climb(&settings, &weighted, rest, budget, &mut rungs, &mut bounds);
        }
        if self.effort.is_more() {
            self.fill_in(&weighted, rest, in_flight.first().copied(), &mut bounds);
        }
        let sequences = 0..self.sequences.len();
        let assumed = base.assumed;
        let of_sequence = |i: usize| {
            let paths = rungs.iter();
            let paths = paths.filter_map(|(&w, paths)| Some((w, paths[i].as_ref()?)));
            let mixed = mixed(&paths.collect::<Vec<_>>(), base, &in_flight, capacity);
            let seen = mixed.into_iter();
            seen.map(|(rungs, cost)| (rungs, assumed.seen_cost(&cost)))
                .collect()
        };
        let models = rest.models.first.iter();
        let transient = models.map(|m| m.least_transient_bytes(&settings[0]) as f64);
        Some(Known {
            stages: sequences.map(of_sequence).collect(),
            bounds,
            transient: self.sequences.largest(&transient.collect::<Vec<_>>()),
        })
    }

    /// Adds the paths under prices for one number of microbatches in flight: that of the dearest
    /// memory, then always the price at which what just fits and what just does not would cost the
    /// same, of all layers within `budget` bytes per device.
    fn climb(
        &self,
        settings: &[Setting<'_>],
        weighted: &Weighted<'_>,
        rest: &Unpriced,
        (family, budget): (scale::Family, f64),
        rungs: &mut BTreeMap<usize, Vec<Option<StagePath>>>,
        bounds: &mut Vec<Priced>,
    ) {
        let m = rest.m;
        // What all layers take together stands for the stages.
        let main = self.sequences.longest();
        let figures = |paths: &[Option<StagePath>]| -> Option<(f64, f64)> {
            let cost = &paths[main].as_ref()?.cost;
            Some((rest.base.seconds_of_layers(cost), family.bytes(cost)))
        };
        let Some(mut fast) = figures(&rungs[&0]) else {
            return;
        };
        let mut price = |step: usize| {
            let refs = refer(weighted);
            let weights = family.weights(m, step).assuming(rest.base.assumed);
            let mut priced = PricedMesh::of_variants(&refs, weights);
            let objectives = priced.objectives(&self.sequences);
            let in_flight = family.in_flight as u64;
            bounds.push(self.priced_bound(weights.static_price, in_flight, &objectives));
            priced.paths(settings, &self.sequences)
        };
        let top = scale::STEPS - 1;
        let paths = price(top);
        let small = figures(&paths);
        rungs.insert(family.rung(top), paths);
        let Some(mut small) = small else { return };
        let (mut above, mut below) = (0, top);
        for _ in 1..self.effort.times(PRICES) {
            let (time, bytes) = (small.0 - fast.0, fast.1 - small.1);
            if time <= 0.0 || bytes <= 0.0 || above >= below {
                break;
            }
            let step = scale::step_of(time / bytes).clamp(above, below - 1);
            let paths = price(step);
            let found = figures(&paths);
            rungs.insert(family.rung(step), paths);
            let Some(found) = found else { break };
            // One of the two again: nothing lies below the line between them.
            if found == fast || found == small {
                break;
            }
            match found.1 <= budget {
                true => (small, below) = (found, step),
                false => (fast, above) = (found, step + 1),
            }
        }
    }

    /// Adds bounds between those that there are: at the last prices of each number of microbatches
    /// in flight those for the other numbers, for the fewest and for nothing saved.
    fn fill_in(
        &self,
        weighted: &Weighted<'_>,
        rest: &Unpriced,
        fewest: Option<u64>,
        bounds: &mut Vec<Priced>,
    ) {
        let numbers = bounds.iter().map(|b| b.in_flight);
        let numbers: BTreeSet<u64> = numbers.chain([0]).chain(fewest).collect();
        let mut prices: Vec<f64> = Vec::new();
        for n in &numbers {
            let own = bounds.iter().rev().filter(|b| b.in_flight == *n);
            prices.extend(own.take(self.effort.times(1)).map(|b| b.price));
        }
        prices.sort_by(f64::total_cmp);
        prices.dedup();
        let refs = refer(weighted);
        for price in prices {
            for &n in &numbers {
                if bounds.iter().any(|b| b.price == price && b.in_flight == n) {
                    continue;
                }
                let weights = Weights {
                    static_price: price,
                    saved_price: price * n as f64,
                    ..rest.base
                };
                let mut priced = PricedMesh::of_variants(&refs, weights);
                let objectives = priced.objectives(&self.sequences);
                bounds.push(self.priced_bound(price, n, &objectives));
            }
        }
    }

    /// Whether a stage of this cost fits with all `m` microbatches in flight, and as much again
    /// for what placing its buffers may add.
    fn fits_twice(&self, cost: &LayerCost, m: u32, capacity: u64) -> bool {
        let bytes = cost
            .saved_bytes
            .saturating_mul(u64::from(m))
            .saturating_add(cost.static_bytes)
            .saturating_add(cost.transient_bytes);
        let stages_of_a_mesh = u64::from(self.pins.schedule_kind().virtual_stages());
        bytes.saturating_mul(stages_of_a_mesh) <= capacity / 2
    }

    /// For each sequence of layers a time of one microbatch that no stage of it can beat, without
    /// the work once per step and whatever it needs of memory.
    fn relaxed(
        &self,
        models: &[LayerModel],
        base: Weights,
    ) -> Result<Vec<Option<f64>>, ModelError> {
        let free = Weights { step: 0.0, ..base };
        let weighted = weigh(models, free)?;
        let objectives = PricedMesh::new(&weighted, free).objectives(&self.sequences);
        let bound = self.priced_bound(0.0, 0, &objectives);
        let seconds = bound.least.into_iter();
        Ok(seconds.map(|s| Some(s?.max(0.0) / base.m)).collect())
    }

    /// Bounds on the time of all microbatches and once per step under some prices, of which the
    /// first is 0 and its objectives are known.
    fn bounds(
        &self,
        weighted: &[WeightedLayer<'_>],
        base: Weights,
        prices: &[f64],
        free: &[Option<u64>],
    ) -> Bounds {
        // Recomputing takes time and saves what is kept for the backward pass, so where the search
        // may recompute, only what lives for the step has a price.
        let recomputes = self.variants.len() > 1;
        let mut bounds = Bounds::default();
        bounds.fixed.push(self.priced_bound(0.0, 0, free));
        for &price in prices.iter().filter(|p| **p > 0.0) {
            let priced = Weights {
                static_price: price,
                saved_price: if recomputes { 0.0 } else { price },
                ..base
            };
            let objectives = PricedMesh::new(weighted, priced).objectives(&self.sequences);
            let in_flight = u64::from(!recomputes);
            let of = if recomputes {
                &mut bounds.fixed
            } else {
                &mut bounds.of_all
            };
            of.push(self.priced_bound(price, in_flight, &objectives));
        }
        bounds
    }

    fn priced_bound(&self, price: f64, in_flight: u64, objectives: &[Option<u64>]) -> Priced {
        Priced::new(price, in_flight, objectives, self.layers().kind.len())
    }

    /// The models of all kinds of layers.
    pub(super) fn models(&self, s: &Setting<'_>) -> Result<Vec<LayerModel>, ModelError> {
        let mut known = self.known_of(s.mesh, s.roles);
        let kinds = self.variants[0].layers.first.iter();
        let layers = &self.variants[0].layers;
        let models = kinds.map(|&l| LayerModel::new(s, layers, l, &mut known));
        let models = models.collect::<Result<Vec<_>, _>>();
        self.all_known().push(known);
        let models = models?;
        for model in models.iter() {
            for (sum, n) in self.choices.iter().zip(model.n_choices()) {
                sum.fetch_add(n as u64, Ordering::Relaxed);
            }
        }
        Ok(models)
    }

    /// The models of the layer kinds that other choices of what is recomputed make different.
    pub(super) fn other_models(&self, settings: &[Setting<'_>]) -> Result<Models, ModelError> {
        let Some(first) = settings.first() else {
            return Ok(Vec::new());
        };
        let mut known = self.known_of(first.mesh, first.roles);
        let others = self.variants.iter().zip(settings).skip(1);
        let models = others.map(|(variant, s)| {
            let kinds = variant.layers.first.iter().enumerate();
            let models = kinds.map(|(kind, &l)| match variant.differs[kind] {
                true => LayerModel::new(s, &variant.layers, l, &mut known).map(Some),
                false => Ok(None),
            });
            models.collect::<Result<Vec<_>, _>>()
        });
        let models = models.collect::<Result<Vec<_>, _>>();
        self.all_known().push(known);
        models
    }

    fn all_known(&self) -> std::sync::MutexGuard<'_, Vec<MeshFacts<'a>>> {
        // They are put back whole or not at all, so a panic elsewhere does not spoil them.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The facts of a mesh that were found last, or none.
    fn known_of(&self, mesh: &LogicalMesh, roles: &[AxisRole]) -> MeshFacts<'a> {
        let mut all = self.all_known();
        match all.iter().position(|known| known.is_of(mesh, roles)) {
            Some(i) => all.swap_remove(i),
            None => {
                let buckets = &self.variants[0].buckets;
                MeshFacts::new(Prices::new(self.seen_by(mesh), mesh, buckets), roles)
            }
        }
    }
}

pub(super) fn no_strategy(e: ModelError) -> PlanError {
    PlanError::Strategies(e.to_string())
}

pub(super) fn weigh(
    models: &[LayerModel],
    weights: Weights,
) -> Result<Vec<WeightedLayer<'_>>, ModelError> {
    models.iter().map(|m| m.weighted(weights)).collect()
}

pub(super) fn weigh_all(models: &Models, weights: Weights) -> Result<Weighted<'_>, ModelError> {
    let mut weighted = Vec::with_capacity(models.len());
    for kinds in models {
        let kinds = kinds.iter();
        let kinds = kinds.map(|m| m.as_ref().map(|m| m.weighted(weights)).transpose());
        weighted.push(kinds.collect::<Result<Vec<_>, _>>()?);
    }
    Ok(weighted)
}

/// The parts that a priced mesh is made of.
pub(super) fn refer<'m>(weighted: &'m Weighted<'m>) -> Vec<Vec<Option<&'m WeightedLayer<'m>>>> {
    let of_variant = |kinds: &'m Vec<Option<WeightedLayer<'m>>>| kinds.iter().map(Option::as_ref);
    weighted
        .iter()
        .map(|kinds| of_variant(kinds).collect())
        .collect()
}
