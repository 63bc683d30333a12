//! A shape of a submesh priced for one microbatch size: what sequences of layers cost on it under
//! a ladder of memory prices, and times that they cannot beat.
//!
//! What was worked out about a mesh's layout changes is kept for the next microbatch size.

use super::{Search, Shape};
use crate::PlanError;
use crate::groups::Setting;
use crate::layer_model::{LayerCost, LayerModel, ModelError, QUANTUM_S, WeightedLayer, Weights};
use crate::prices::Prices;
use crate::stage::PricedMesh;
use intra_op::eliminate::Eliminator;
use ir::LogicalMesh;
use std::borrow::Cow;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, PoisonError};

/// Seconds per byte: how much time a byte of memory may cost. From nothing (memory is
/// plentiful) to where every byte is worth any communication.
pub(crate) const MEMORY_PRICES: [f64; 6] = [0.0, 1e-12, 1e-11, 1e-10, 1e-9, 1e-7];
/// Microbatches in flight that saved bytes are weighed with; exact counts enter in the DP.
const IN_FLIGHT: [f64; 3] = [1.0, 8.0, 64.0];

/// Per sequence of kinds: distinct stage costs with the index of their weights.
pub(super) type Stages = Vec<Vec<(usize, LayerCost)>>;

/// A shape with its prices for one microbatch size.
pub(super) struct Candidate {
    /// Index into `shapes`.
    pub(super) shape: usize,
    pub(super) submesh: usize,
    /// Per sequence: a time of one microbatch that no stage of it can beat.
    pub(super) relaxed: Vec<Option<f64>>,
    /// Costs of stages where memory has no price.
    free: Stages,
    /// The inputs for pricing them where it has one, if anything is left to price.
    unpriced: Option<Unpriced>,
    /// Their costs under all prices, once asked for.
    stages: OnceLock<Stages>,
}

/// A shape with its models for one microbatch size.
struct Unpriced {
    shape: Shape,
    batch: u64,
    m: u32,
    models: Arc<Vec<LayerModel>>,
    eliminators: Vec<Eliminator>,
}

impl<'a> Search<'a> {
    /// A shape priced for `m` microbatches of `batch` samples. What its stages cost under prices
    /// on memory is worked out when somebody asks: most shapes lose by their bound alone.
    pub(super) fn candidate(
        &self,
        index: usize,
        shape: &Shape,
        batch: u64,
        m: u32,
    ) -> Result<Candidate, ModelError> {
        let s = self.setting(shape, batch);
        let base = Weights::free(m);
        let models = self.models(&s)?;
        let weighted = weigh(&models, base)?;
        let mut free: Stages = vec![Vec::new(); self.sequences.len()];
        self.price(&s, &weighted, (0, base), &mut free);
        // Where the fastest choices fit by far, memory has no price.
        let mut costs = free.iter().flatten();
        let capacity = s.cluster.usable_bytes();
        let is_memory_plentiful = costs.all(|(_, cost)| self.fits_twice(cost, m, capacity));
        let prices = if is_memory_plentiful {
            &MEMORY_PRICES[..1]
        } else {
            &MEMORY_PRICES[..]
        };
        let relaxed = self.relaxed(&models, base, prices, capacity)?;
        let eliminators = weighted
            .into_iter()
            .map(|w| w.eliminator.into_owned())
            .collect();
        let unpriced = (!is_memory_plentiful).then_some(Unpriced {
            shape: shape.clone(),
            batch,
            m,
            models,
            eliminators,
        });
        Ok(Candidate {
            shape: index,
            submesh: shape.submesh,
            relaxed,
            free,
            unpriced,
            stages: OnceLock::new(),
        })
    }

    /// The costs of a candidate's stages.
    pub(super) fn stages<'c>(&self, candidate: &'c Candidate) -> &'c Stages {
        match &candidate.unpriced {
            None => candidate.stages.get().unwrap_or(&candidate.free),
            Some(rest) => candidate
                .stages
                .get_or_init(|| self.priced(rest, candidate.free.clone())),
        }
    }

    /// A candidate whose stages have all their costs, and that keeps no models.
    pub(super) fn whole(&self, mut candidate: Candidate) -> Candidate {
        self.stages(&candidate);
        candidate.unpriced = None;
        candidate
    }

    fn priced(&self, rest: &Unpriced, mut stages: Stages) -> Stages {
        let s = self.setting(&rest.shape, rest.batch);
        let models = rest.models.iter().zip(&rest.eliminators);
        let weighted = models.map(|(model, eliminator)| WeightedLayer {
            model,
            eliminator: Cow::Borrowed(eliminator),
        });
        let weighted: Vec<WeightedLayer<'_>> = weighted.collect();
        for (w, weights) in ladder(rest.m).enumerate().skip(1) {
            self.price(&s, &weighted, (w, weights), &mut stages);
        }
        stages
    }

    /// Adds the stages under some weights.
    fn price(
        &self,
        s: &Setting<'_>,
        weighted: &[WeightedLayer<'_>],
        (w, weights): (usize, Weights),
        stages: &mut Stages,
    ) {
        let paths = PricedMesh::new(weighted, weights).paths(s, &self.sequences);
        for (costs, path) in stages.iter_mut().zip(paths) {
            let Some(path) = path else { continue };
            // Many prices lead to the same choice.
            if !costs.iter().any(|(_, c)| *c == path.cost) {
                costs.push((w, path.cost));
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
        capacity: u64,
    ) -> Result<Vec<Option<f64>>, ModelError> {
        let free = Weights { step: 0.0, ..base };
        let weighted = weigh(models, free)?;
        let capacity = capacity as f64;
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
    pub(super) fn models(&self, s: &Setting<'_>) -> Result<Arc<Vec<LayerModel>>, ModelError> {
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
        for model in models.iter() {
            for (sum, n) in self.choices.iter().zip(model.n_choices()) {
                sum.fetch_add(n as u64, Ordering::Relaxed);
            }
        }
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
            None => Prices::new(self.seen_by(mesh), mesh, &self.buckets),
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

/// All weights that a candidate with `m` microbatches is priced under.
fn ladder(m: u32) -> impl Iterator<Item = Weights> {
    let prices = MEMORY_PRICES[1..].iter().flat_map(move |&price| {
        let in_flight = IN_FLIGHT.iter();
        in_flight
            .filter(move |&&f| f == 1.0 || f <= f64::from(m))
            .map(move |&f| (price, price * f))
    });
    let prices = std::iter::once((0.0, 0.0)).chain(prices);
    prices.map(move |(static_price, saved_price)| Weights {
        static_price,
        saved_price,
        ..Weights::free(m)
    })
}

/// The `w`-th weights that a candidate with `m` microbatches is priced under.
pub(super) fn weight_at(m: u32, w: usize) -> Weights {
    ladder(m).nth(w).unwrap_or(Weights::free(m))
}
