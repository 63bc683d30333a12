//! Pipelines whose stages have equal submeshes, for one microbatch size.
//!
//! Pricing a shape of a submesh takes a tenth of a second for a large model, and there are tens
//! of shapes for each of tens of microbatch sizes. So submeshes are gone through in the order of
//! what they cost at least, by their matmuls, what larger microbatches took there
//! ([`super::larger`]) and the pipeline's bubble; one that cannot beat what was found is not
//! priced. What is found is the same as with all of them, as far as `larger` is exact.

use super::larger::Larger;
use super::pipelines::NEAR;
use super::{Candidate, Search, Shape, Solved, ToBeat, nearer, no_strategy};
use crate::PlanError;
use crate::inter_op::{InterOpOptions, PipelineChoice};
use crate::layer_model::ModelError;
use cost_model::compute::peak_rate;
use ir::plan::ScheduleKind;
use ir::{OpKind, Region};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// The slack of a bound: a pipeline of nothing but matmuls costs what the bound says, summed in
/// another order, layer by layer and stage by stage. Sums of 10^5 terms lose no more than 10^-11.
const ROUNDING: f64 = 1e-9;

/// Seconds that no pipeline over a submesh can beat, with one stage on each mesh and with
/// several; infinite where there are none.
struct Least {
    plain: f64,
    interleaved: f64,
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
        let shapes = self.shapes(batch);
        let matmul_s = self.least_matmul_s(batch);
        let mut order: Vec<(Least, usize)> = (0..self.submeshes.len())
            .filter(|&i| (devices / self.submeshes[i].n_devices) as usize <= n_layers)
            .map(|i| {
                let of_matmuls = matmul_s / f64::from(self.submeshes[i].n_devices.max(1));
                let sum_s = of_matmuls.max(larger.least_s(i, batch));
                (self.least_s(sum_s, i, m, schedule), i)
            })
            .collect();
        let first = |l: &Least| l.plain.min(l.interleaved);
        order.sort_by(|a, b| first(&a.0).total_cmp(&first(&b.0)).then(a.1.cmp(&b.1)));
        let stages = self.pins.pipeline.map(|p| p as usize);
        let mut best: Option<(usize, PipelineChoice)> = None;
        let mut solved = Solved::nothing();
        let mut unpriced = false;
        // By shape and by submesh, so that what is said does not depend on the order above.
        let mut without: BTreeMap<usize, ModelError> = BTreeMap::new();
        let mut errors: BTreeMap<usize, PlanError> = BTreeMap::new();
        for (least, submesh) in order {
            let found = best.as_ref().map(|b| b.1.cost.total_s);
            let to_beat = ToBeat {
                plain: found.unwrap_or(to_beat.plain),
                interleaved: to_beat
                    .interleaved
                    .min(found.map_or(f64::INFINITY, |s| s * NEAR)),
            };
            let plain = least.plain <= to_beat.plain;
            if !plain {
                solved.lower = solved.lower.min(least.plain);
            }
            if !plain && to_beat.interleaved <= least.interleaved {
                solved.lower = solved.lower.min(least.interleaved);
                continue;
            }
            let mut usable = Vec::new();
            let mut too_wide = false;
            for (i, candidate) in self.candidates(&shapes, submesh, batch, m, reserve) {
                match candidate {
                    Ok(c) => usable.push(c),
                    Err(e) => {
                        too_wide |= matches!(e, ModelError::TooWide(_));
                        without.insert(i, e);
                    }
                }
            }
            unpriced |= too_wide;
            let sums = usable.iter().filter_map(|c| self.least_time_s(c));
            let least_s = sums.fold(f64::INFINITY, f64::min);
            if !too_wide && least_s.is_finite() {
                solved.least_s.push((submesh, least_s));
            }
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
                        }
                    }
                    Err(e) => {
                        errors.insert(submesh, e);
                    }
                }
            }
            // A pipeline much worse than the best of plain stages is not looked at.
            let plain = best.as_ref().map_or(f64::INFINITY, |b| b.1.cost.total_s);
            let to_beat = to_beat.interleaved.min(plain * NEAR);
            self.interleave(&mut solved, submesh, &usable, batch, m, reserve, to_beat);
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

    /// The shapes of one submesh priced, with their numbers among all shapes.
    fn candidates(
        &self,
        shapes: &[Shape],
        submesh: usize,
        batch: u64,
        m: u32,
        reserve: u64,
    ) -> Vec<(usize, Result<Candidate, ModelError>)> {
        let own = shapes.par_iter().enumerate();
        own.filter(|(_, shape)| shape.submesh == submesh)
            .map(|(i, shape)| (i, self.candidate(i, shape, batch, m, reserve)))
            .collect()
    }

    /// Seconds that no pipeline over a submesh can beat: its stages share `sum_s`, the slowest has
    /// no less than the mean, and the schedule repeats that.
    fn least_s(&self, sum_s: f64, submesh: usize, m: u32, schedule: ScheduleKind) -> Least {
        let n_stages = self.n_stages(submesh);
        let repeats = InterOpOptions::new(u64::from(m), schedule).repeats();
        let rings = self.rings(submesh, m).into_iter();
        Least {
            plain: sum_s * (1.0 + repeats / n_stages),
            interleaved: rings
                .map(|r| r.least_s(sum_s, m))
                .fold(f64::INFINITY, f64::min),
        }
    }

    /// Seconds of the matmuls of a microbatch on one device at the best rate that it has for
    /// any type; 0 where kernels were measured one by one and may be faster than that.
    fn least_matmul_s(&self, batch: u64) -> f64 {
        let device = &self.cluster.device;
        if device.kernels.is_some() {
            return 0.0;
        }
        let rates = device.peak_flops_per_s.keys();
        let rate = rates
            .map(|&t| peak_rate(self.cluster, t))
            .fold(0.0, f64::max);
        let graph = &self.training().graph;
        let matmuls = graph.ops().iter().filter(|op| {
            op.region == Region::Microbatch && matches!(op.kind, OpKind::DotGeneral { .. })
        });
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
