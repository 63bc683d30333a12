//! Pipelines whose stages have equal submeshes, for one microbatch size.
//!
//! Pricing a shape of a submesh takes a tenth of a second for a large model, and there are tens
//! of shapes for each of tens of microbatch sizes. So submeshes are gone through in the order of
//! what they cost at least, by their matmuls, what larger microbatches took there
//! ([`super::larger`]) and the pipeline's bubble; one that cannot beat what was found is not
//! priced. What is found is the same as with all of them, as far as `larger` is exact.

use super::interleaved::Ring;
use super::larger::{Larger, LeastTimes};
use super::pipelines::NEAR;
use super::{Candidate, Search, Shape, Solved, ToBeat, nearer, no_strategy};
use crate::PlanError;
use crate::inter_op::{InterOpOptions, PipelineChoice};
use crate::layer_model::ModelError;
use cost_model::compute::peak_rate;
use ir::Region;
use ir::plan::ScheduleKind;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

/// The slack of a bound: a pipeline of nothing but matmuls costs what the bound says, summed in
/// another order, layer by layer and stage by stage. Sums of 10^5 terms lose no more than 10^-11.
const ROUNDING: f64 = 1e-9;

/// Seconds that no pipeline over meshes of one shape can beat, with one stage on each mesh and
/// with several; infinite where there are none.
#[derive(Clone, Copy)]
struct Least {
    plain: f64,
    interleaved: f64,
}

impl Least {
    const NONE: Least = Least {
        plain: f64::INFINITY,
        interleaved: f64::INFINITY,
    };

    /// That of pipelines over the one or the other.
    fn or(self, other: &Least) -> Least {
        Least {
            plain: self.plain.min(other.plain),
            interleaved: self.interleaved.min(other.interleaved),
        }
    }

    fn of_both(&self) -> f64 {
        self.plain.min(self.interleaved)
    }
}

/// A shape with its number among all shapes, and what it costs at least.
struct Way<'s> {
    number: usize,
    shape: &'s Shape,
    least: Least,
}

impl Search<'_> {
    /// The best pipeline of equal submeshes, ties to the smaller one, and the best of interleaved
    /// stages; each if it costs little enough for `to_beat`.
    pub(super) fn solve_equal(
        &self,
        batch: u64,
        m: u32,
        schedule: ScheduleKind,
        reserve: u64,
        to_beat: ToBeat,
        larger: &Larger,
    ) -> Solved {
        let n_layers = self.layers().kind.len();
        let devices = self.cluster.n_devices();
        let shapes = self.narrow_shapes(batch);
        let of_matmuls = self.least_matmul_s(batch);
        let mut order: Vec<(Least, usize, Vec<Way<'_>>)> = (0..self.submeshes.len())
            .filter(|&i| (devices / self.submeshes[i].n_devices) as usize <= n_layers)
            .map(|i| {
                let ways = self.ways(&shapes, i, (batch, m, of_matmuls), schedule, larger);
                let least = ways.iter().fold(Least::NONE, |l, way| l.or(&way.least));
                (least, i, ways)
            })
            .collect();
        order.sort_by(|a, b| a.0.of_both().total_cmp(&b.0.of_both()).then(a.1.cmp(&b.1)));
        let stages = self.pins.pipeline.map(|p| p as usize);
        let mut best: Option<(usize, PipelineChoice)> = None;
        let mut solved = Solved::nothing();
        let mut unpriced = false;
        // By shape and by submesh, so that what is said does not depend on the order above.
        let mut without: BTreeMap<usize, ModelError> = BTreeMap::new();
        let mut errors: BTreeMap<usize, PlanError> = BTreeMap::new();
        for (least, submesh, ways) in order {
            let found = best.as_ref().map(|b| b.1.cost.total_s);
            let near = found.map_or(f64::INFINITY, |s| s * NEAR);
            let near = near.min(self.held_back_s(solved.least_ring_s()));
            let to_beat = ToBeat {
                plain: found.unwrap_or(to_beat.plain).min(near),
                interleaved: to_beat.interleaved.min(near),
            };
            // Whoever ends the search gets the bound of what was not priced.
            let ends = self.ends();
            let is_plain = |least: &Least| !ends && least.plain <= to_beat.plain;
            let may_win = |least: &Least| {
                !ends && (is_plain(least) || least.interleaved < to_beat.interleaved)
            };
            let (ways, others): (Vec<_>, Vec<_>) = ways.iter().partition(|w| may_win(&w.least));
            for Way { least, .. } in others {
                solved.lower = solved.lower.min(least.of_both());
            }
            let plain = is_plain(&least);
            if !plain {
                solved.lower = solved.lower.min(least.plain);
            }
            if ways.is_empty() {
                continue;
            }
            let mut usable = Vec::new();
            let mut too_wide = false;
            let priced = self.candidates(&ways, batch, m, reserve);
            for (i, candidate) in priced {
                let Some(candidate) = candidate else {
                    continue;
                };
                match candidate {
                    Ok(c) => {
                        let least = self.least_times(&c);
                        solved
                            .least
                            .extend(least.map(|least| (shapes[i].clone(), least)));
                        usable.push(c)
                    }
                    Err(e) => {
                        too_wide |= matches!(e, ModelError::TooWide(_));
                        without.insert(i, e);
                    }
                }
            }
            if self.ends() {
                let left = ways.iter().map(|way| way.least.of_both());
                solved.lower = left.fold(solved.lower, f64::min);
                continue;
            }
            unpriced |= too_wide;
            solved.candidates += usable.len() as u64;
            if plain {
                let one = self.solve_over(
                    &[submesh],
                    &usable,
                    batch,
                    m,
                    schedule,
                    reserve,
                    stages,
                    to_beat.plain,
                );
                solved.lower = solved.lower.min(one.lower);
                match one.found {
                    Ok(choice) => {
                        let rank = |i: usize, c: &PipelineChoice| (c.cost.total_s, i);
                        let new = rank(submesh, &choice);
                        if best.as_ref().is_none_or(|(i, c)| new < rank(*i, c)) {
                            best = Some((submesh, choice));
                            self.has_found.store(true, Ordering::Relaxed);
                        }
                    }
                    Err(e) => {
                        errors.insert(submesh, e);
                    }
                }
            }
            // A pipeline much worse than the best is not looked at.
            let plain = best.as_ref().map_or(f64::INFINITY, |b| b.1.cost.total_s);
            let near = (plain * NEAR).min(self.held_back_s(solved.least_ring_s()));
            let to_beat = to_beat.interleaved.min(near);
            self.interleave(&mut solved, submesh, &usable, batch, m, reserve, to_beat);
            let rings = solved.interleaved.iter().map(|(_, choice)| choice);
            let found = best.iter().map(|(_, choice)| choice).chain(rings);
            drop(usable);
            self.forget_others(batch, &shapes, found);
        }
        if unpriced {
            // A shape that could not be priced might be better than all that were.
            solved.lower = 0.0;
        }
        solved.error = without.into_values().next().map(no_strategy);
        match best {
            Some((_, choice)) => solved.found.push(choice),
            None => {
                let nearest = errors.into_values().fold(None, |a, e| Some(nearer(a, e)));
                let none = PlanError::NoTiling {
                    devices,
                    layers: n_layers,
                };
                solved.error = Some(nearer(solved.error, nearest.unwrap_or(none)));
            }
        }
        solved
    }

    /// Seconds that no pipeline of equal submeshes can beat, by what is known before any is priced.
    pub(super) fn least_of_equal(
        &self,
        batch: u64,
        m: u32,
        schedule: ScheduleKind,
        larger: &Larger,
    ) -> f64 {
        let shapes = self.narrow_shapes(batch);
        let of_matmuls = self.least_matmul_s(batch);
        let ways = (0..self.submeshes.len())
            .filter(|&i| self.n_stages(i) as usize <= self.layers().kind.len())
            .flat_map(|i| self.ways(&shapes, i, (batch, m, of_matmuls), schedule, larger));
        ways.map(|way| way.least.of_both())
            .fold(f64::INFINITY, f64::min)
    }

    /// The shapes of a submesh with what pipelines over it cost at least; the matmuls of all layers take
    /// `of_matmuls` seconds at least on one device.
    fn ways<'s>(
        &self,
        shapes: &'s [Shape],
        submesh: usize,
        (batch, m, of_matmuls): (u64, u32, f64),
        schedule: ScheduleKind,
        larger: &Larger,
    ) -> Vec<Way<'s>> {
        let n_devices = self.submeshes[submesh].n_devices.max(1);
        let of_matmuls = of_matmuls / f64::from(n_devices);
        let own = shapes
            .iter()
            .enumerate()
            .filter(|(_, s)| s.submesh == submesh);
        own.map(|(number, shape)| {
            let mut least = larger.least(shape, batch).unwrap_or_default();
            least.sum_s = least.sum_s.max(of_matmuls);
            Way {
                number,
                shape,
                least: self.least_s(&least, submesh, (batch, m), schedule),
            }
        })
        .collect()
    }

    /// Shapes priced, in their order, with their numbers; none where the search ended before.
    fn candidates(
        &self,
        ways: &[&Way<'_>],
        batch: u64,
        m: u32,
        reserve: u64,
    ) -> Vec<(usize, Option<Result<Candidate, ModelError>>)> {
        let priced = ways.par_iter().map(|w| {
            let candidate = || self.candidate(w.number, w.shape, batch, m, reserve);
            (w.number, (!self.ends()).then(candidate))
        });
        priced.collect()
    }

    /// Seconds that no pipeline over a shape can beat: its stages share the time of all layers and
    /// that of sending, the slowest has no less than the mean and no less than the longest of the
    /// most even cut, and the schedule repeats that.
    fn least_s(
        &self,
        least: &LeastTimes,
        submesh: usize,
        (batch, m): (u64, u32),
        schedule: ScheduleKind,
    ) -> Least {
        let n_stages = self.n_stages(submesh);
        let repeats = InterOpOptions::new(u64::from(m), schedule).repeats();
        let plain = Ring {
            submesh,
            n_meshes: n_stages as usize,
            schedule,
        };
        let sum_s = |ring| least.sum_s + self.sent_s(ring, batch).iter().sum::<f64>();
        let of_plain = sum_s(plain);
        let slowest_s = least.longest_s(plain.n_stages()).max(of_plain / n_stages);
        let rings = self.rings(submesh, m).into_iter();
        Least {
            plain: of_plain + repeats * slowest_s,
            interleaved: rings
                .map(|r| r.least_s(sum_s(r), least.longest_s(r.n_stages()), m))
                .fold(f64::INFINITY, f64::min),
        }
    }

    /// Seconds of the matmuls and convolutions of a microbatch on one device at the best rate that it has for
    /// any type; 0 where kernels were measured one by one and may be faster than that.
    pub(super) fn least_matmul_s(&self, batch: u64) -> f64 {
        let device = &self.cluster.device;
        if device.kernels.is_some() {
            return 0.0;
        }
        let rates = device.peak_flops_per_s.keys();
        let rate = rates
            .map(|&t| peak_rate(self.cluster, t))
            .fold(0.0, f64::max);
        let graph = &self.training().graph;
        let ops = graph.ops().iter();
        let matmuls = ops.filter(|op| op.region == Region::Microbatch);
        let flops: f64 = matmuls.map(|op| graph.work(op, batch).matmul_flops).sum();
        if rate > 0.0 {
            flops / rate * (1.0 - ROUNDING)
        } else {
            0.0
        }
    }
}

#[cfg(test)]
mod tests;
