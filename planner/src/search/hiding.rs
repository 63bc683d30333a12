//! Pipelines of one stage over all devices whose parameters' traffic is assumed to hide.
//!
//! The additive objective charges every gather of a parameter in full, so where memory binds it
//! prefers to recompute, or pipelines that move no parameters. A program gathers the next layer
//! while this one computes, which may hide nearly all of it: ZeRO-3 over one mesh is then the
//! fastest plan there is, and by the objective a tenth behind. So stages over all devices are
//! chosen once more under weights that charge hardly any of such traffic, and compared as programs
//! run them: a pass takes as long as its kernels or its traffic, whichever is longer, and a part of
//! the other that shows. Where traffic takes nearly as long as kernels, stages are also chosen
//! under weights that charge half of it. The best of them are simulated beside the rest. Of one or
//! two microbatches so are those whose parameters are whole: what they reduce at the step's end
//! hides there too, and is charged in full.

use super::mixes::Rungs;
use super::pipelines::{NEAR, Pipeline};
use super::simple::Likeness;
use super::{Candidate, Search, Shape};
use crate::groups::Phases;
use crate::layer_model::{Assumed, MOST_HIDDEN};
use ir::plan::ScheduleKind;
use rayon::prelude::*;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Most such pipelines that are simulated.
const SIMULATED: usize = 4;
/// Most of them whose second axis joins several hosts, beside those.
const SIMULATED_WIDE: usize = 2;
/// Microbatch sizes that are looked at together, from the largest down.
const AT_ONCE: usize = 2;
/// The share of the traffic that is assumed to hide where it takes nearly as long as what it hides
/// behind, or longer.
const HALF_HIDDEN: f64 = 0.5;
/// Traffic that takes so many times as long as kernels, or more, is too much to think little of it.
const MUCH: f64 = 0.6;
/// The share that shows of traffic that takes as long as kernels; of less it is less, by the
/// square. ZeRO-3 of Llama 70B on 512 H100s by the simulator: 1% at 0.37 times the kernels, 6% at
/// 0.59 times, 17% at 0.92 times.
const SHOWN: f64 = 0.2;
/// The least that a pipeline takes beside its traffic, of what it is charged where most or half of
/// that is assumed to hide: just below the least of `(1 + SHOWN r^3) / (1 + (1 - hidden) r)`, where
/// traffic takes r times as long as kernels. What is charged more than it may then cost is not
/// priced.
const LEAST_OF_MOST: f64 = 0.99;
const LEAST_OF_HALF: f64 = 0.78;
/// The ZeRO levels at which the fastest is simulated once more: below them nothing moves in the
/// microbatches.
pub(super) const LEVELS: [u8; 2] = [2, 3];
/// The ZeRO levels that those of few microbatches are also chosen at: parameters whole everywhere,
/// and gradients split as they are made.
const LEVELS_OF_FEW: [u8; 2] = [0, 2];
/// Microbatches up to which what is reduced once a step hides as well: behind the backward pass of
/// the last one, which is most of the work then.
const FEW: u32 = 2;

impl Search<'_> {
    /// The best of them, for microbatch sizes that descend; those that cost more than `to_beat`
    /// even so are left out.
    ///
    /// Smaller microbatches gather more often. So once none is better than the best of the larger
    /// ones, smaller ones are not looked at.
    pub(super) fn hiding(
        &self,
        batches: &[u64],
        schedule: ScheduleKind,
        reserve: u64,
        to_beat: f64,
    ) -> Vec<Pipeline> {
        let Some(whole) = self.hiding_submesh() else {
            return Vec::new();
        };
        let cost = |p: &Pipeline| p.choice.cost.total_s;
        let mut found: Vec<Pipeline> = Vec::new();
        for some in batches.chunks(AT_ONCE) {
            if self.ends() {
                break;
            }
            let least = found.iter().map(cost).fold(f64::INFINITY, f64::min);
            let to_beat = to_beat.min(least * NEAR);
            let solved = some.par_iter();
            let narrow = Over {
                submesh: whole,
                is_wide: false,
            };
            let solved =
                solved.flat_map(|&b| self.hiding_of((narrow, to_beat), b, schedule, reserve, None));
            let solved: Vec<Pipeline> = solved.collect();
            let is_dearer = !found.is_empty() && solved.iter().all(|p| cost(p) >= least);
            found.extend(solved.into_iter().filter(|p| cost(p) <= to_beat));
            if is_dearer {
                break;
            }
        }
        let mut found = self.nearest(found);
        if let Some(best) = found.first().filter(|_| !self.ends()) {
            let wide = Over {
                submesh: whole,
                is_wide: true,
            };
            let to_beat = cost(best) * NEAR;
            let wide = self.hiding_of((wide, to_beat), best.batch, schedule, reserve, None);
            let wide = self.nearest(wide).into_iter();
            found.extend(wide.take(self.effort.times(SIMULATED_WIDE)));
            found.sort_by(|a, b| cost(a).total_cmp(&cost(b)));
        }
        found.extend(self.whole_beside(&found, whole, schedule, reserve));
        found
    }

    /// The submesh of all devices, where pipelines of one stage over it are looked for.
    pub(super) fn hiding_submesh(&self) -> Option<usize> {
        let schedule = self.pins.schedule_kind().schedule();
        let n = self.cluster.n_devices();
        let may_be = !self.without_hiding
            && self.pins.pipeline.is_none_or(|p| p == 1)
            && schedule.virtual_stages() == 1
            && !schedule.is_asynchronous()
            && self.cluster.pool.is_none()
            && n > 1;
        let whole = self.submeshes.iter().position(|s| s.n_devices == n);
        whole.filter(|_| may_be)
    }

    /// Pipelines of few microbatches whose parameters are whole in them, if those of `found` may be
    /// split: the objective charges all of what moves at the step's ends, assumed to hide or not,
    /// so by it splitting is better for the microbatches as well.
    fn whole_beside(
        &self,
        found: &[Pipeline],
        whole: usize,
        schedule: ScheduleKind,
        reserve: u64,
    ) -> Vec<Pipeline> {
        let best = found.first().filter(|p| p.m <= FEW);
        let Some(best) = best.filter(|_| self.pins.zero.is_none() && !self.ends()) else {
            return Vec::new();
        };
        let narrow = Over {
            submesh: whole,
            is_wide: false,
        };
        let any = (narrow, f64::INFINITY);
        let of_level = |level: u8| {
            let all = self.hiding_of(any, best.batch, schedule, reserve, Some(level));
            self.nearest(all)
        };
        LEVELS_OF_FEW.into_iter().flat_map(of_level).collect()
    }

    /// Those near the best, as many as are simulated: of each microbatch size the best before any
    /// other, for it is between these that the simulator differs most. Of equal ones that of the
    /// larger microbatch and of the earlier shape comes first, where they were found in this order.
    fn nearest(&self, mut found: Vec<Pipeline>) -> Vec<Pipeline> {
        let cost = |p: &Pipeline| p.choice.cost.total_s;
        found.sort_by(|a, b| cost(a).total_cmp(&cost(b)));
        let least = found.first().map_or(0.0, cost);
        found.retain(|p| cost(p) <= NEAR * least);
        let mut sizes = BTreeSet::new();
        let (best, others): (Vec<_>, Vec<_>) =
            found.into_iter().partition(|p| sizes.insert(p.batch));
        let some = best.into_iter().chain(others);
        let mut some: Vec<Pipeline> = some.take(self.effort.times(SIMULATED)).collect();
        some.sort_by(|a, b| cost(a).total_cmp(&cost(b)));
        some
    }

    /// Those of a microbatch size, one or two for each shape, without those that cost more than
    /// `to_beat`; at a ZeRO level, or any.
    fn hiding_of(
        &self,
        (over, to_beat): (Over, f64),
        batch: u64,
        schedule: ScheduleKind,
        reserve: u64,
        level: Option<u8>,
    ) -> Vec<Pipeline> {
        let m = (self.train.global_batch / batch) as u32;
        let shapes = self.shapes(batch).into_iter().enumerate();
        let whole = over.submesh;
        let own = shapes.filter(|(_, s)| s.submesh == whole && s.is_wide == over.is_wide);
        let own: Vec<(usize, Shape)> = own.collect();
        let made = own.par_iter().flat_map_iter(|(index, shape)| {
            let Ok(models) = self.kept_models(*index, shape, batch, false) else {
                return Vec::new();
            };
            let at = |(hidden, least): (f64, f64)| -> Option<(Pipeline, Beside)> {
                let (models, assumed) = (
                    Arc::clone(&models),
                    Assumed {
                        level,
                        hidden,
                        gradients: false,
                        fill: 0,
                    },
                );
                let made = self.candidate_of(models, (*index, shape), batch, m, reserve, assumed);
                let (of, one) = ([made.ok()?], Some(1));
                let charged_s = to_beat / least;
                let bounded =
                    self.solve_over(&[whole], &of, batch, m, schedule, reserve, one, charged_s);
                let mut pipeline = Pipeline {
                    batch,
                    m,
                    schedule,
                    choice: bounded.found.ok()?,
                    assumed,
                    likeness: Likeness::default(),
                };
                let beside = self.beside(&pipeline, &of[0]);
                pipeline.choice.cost.total_s = beside.total_s;
                Some((pipeline, beside))
            };
            let first = at((MOST_HIDDEN, LEAST_OF_MOST));
            let is_much = first.as_ref().is_some_and(|(_, beside)| beside.is_much);
            let half = (HALF_HIDDEN, LEAST_OF_HALF);
            let second = is_much.then(|| at(half)).flatten();
            let same = |a: &Pipeline, b: &Pipeline| {
                let tag = |p: &Pipeline| p.choice.stages.first().map(|s| s.tag);
                tag(a) == tag(b) && a.choice.cost == b.choice.cost
            };
            let second = second.filter(|(p, _)| first.as_ref().is_none_or(|(q, _)| !same(p, q)));
            let found = first.into_iter().chain(second).map(|(p, _)| p);
            found.filter(|p| p.choice.cost.total_s <= to_beat).collect()
        });
        made.collect()
    }

    /// A pipeline of one stage where its traffic runs beside its kernels; as it is charged, where
    /// the stage's costs are not known.
    fn beside(&self, p: &Pipeline, candidate: &Candidate) -> Beside {
        let charged_s = p.choice.cost.total_s;
        let rungs = p.choice.stages.first().map(|s| Rungs::of_tag(s.tag).1);
        let of_all = candidate.known_stages();
        let of_all = of_all.and_then(|costs| costs.get(self.sequences.longest()));
        let own = of_all
            .into_iter()
            .flatten()
            .find(|(own, _)| Some(*own) == rungs);
        let Some((_, cost)) = own else {
            return Beside {
                total_s: charged_s,
                is_much: false,
            };
        };
        let seconds = |t: Phases| t.forward + t.backward;
        let (seen_s, traffic_s) = (seconds(cost.time), seconds(cost.hideable));
        let kernels_s = seen_s - (1.0 - p.assumed.hidden) * traffic_s;
        let (less_s, more_s) = (kernels_s.min(traffic_s), kernels_s.max(traffic_s));
        let beside_s = more_s + SHOWN * less_s * (less_s / more_s.max(f64::MIN_POSITIVE)).powi(2);
        Beside {
            total_s: charged_s + f64::from(p.m) * (beside_s - seen_s),
            is_much: traffic_s > MUCH * kernels_s,
        }
    }
}

/// The shapes that are looked at.
#[derive(Clone, Copy)]
struct Over {
    submesh: usize,
    is_wide: bool,
}

/// The time of a pipeline whose traffic runs beside its kernels.
struct Beside {
    /// Seconds of a step: of each pass the longer of the two, and what shows of the shorter.
    total_s: f64,
    /// Whether the traffic takes nearly as long as the kernels, or longer.
    is_much: bool,
}
