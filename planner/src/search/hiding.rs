//! Pipelines of one stage over all devices whose parameters' traffic is assumed to hide.
//!
//! The additive objective charges every gather of a parameter in full, so where memory binds it
//! prefers to recompute, or pipelines that move no parameters. A program gathers the next layer
//! while this one computes, which may hide nearly all of it: ZeRO-3 over one mesh is then the
//! fastest plan there is, and by the objective a tenth behind. So stages over all devices are
//! chosen once more under weights that charge such traffic only in part, and what is found that
//! way is simulated beside the rest. Of one or two microbatches so are those whose parameters are
//! whole: what they reduce at the step's end hides there too, and is charged in full.

use super::pipelines::{NEAR, Pipeline};
use super::simple::Likeness;
use super::{Search, Shape};
use crate::layer_model::Assumed;
use ir::plan::ScheduleKind;
use rayon::prelude::*;

/// Most such pipelines that are simulated.
const SIMULATED: usize = 3;
/// Microbatch sizes that are looked at together, from the largest down.
const AT_ONCE: usize = 2;
/// The ZeRO levels at which the fastest is simulated once more: below them nothing moves in the
/// microbatches.
pub(super) const LEVELS: [u8; 2] = [2, 3];
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
        let may_be = !self.without_hiding
            && self.pins.pipeline.is_none_or(|p| p == 1)
            && schedule.virtual_stages() == 1
            && !schedule.schedule().is_asynchronous()
            && self.cluster.pool.is_none()
            && self.cluster.n_devices() > 1;
        let n = self.cluster.n_devices();
        let whole = self.submeshes.iter().position(|s| s.n_devices == n);
        let Some(whole) = whole.filter(|_| may_be) else {
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
            let solved =
                solved.flat_map(|&b| self.hiding_of((whole, to_beat), b, schedule, reserve, None));
            let solved: Vec<Pipeline> = solved.collect();
            let is_dearer = !found.is_empty() && solved.iter().all(|p| cost(p) >= least);
            found.extend(solved.into_iter().filter(|p| cost(p) <= to_beat));
            if is_dearer {
                break;
            }
        }
        let mut found = self.nearest(found);
        found.extend(self.whole_beside(&found, whole, schedule, reserve));
        found
    }

    /// Pipelines of few microbatches whose parameters are whole everywhere, if those of `found` may
    /// be split: the objective charges all of what is reduced at the step's end, assumed to hide or
    /// not, so by it splitting is always better.
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
        let any = (whole, f64::INFINITY);
        let all = self.hiding_of(any, best.batch, schedule, reserve, Some(0));
        self.nearest(all)
    }

    /// Those near the best, as many as are simulated. Of equal ones that of the larger microbatch and
    /// of the earlier shape comes first, where they were found in this order.
    fn nearest(&self, mut found: Vec<Pipeline>) -> Vec<Pipeline> {
        let cost = |p: &Pipeline| p.choice.cost.total_s;
        found.sort_by(|a, b| cost(a).total_cmp(&cost(b)));
        let least = found.first().map_or(0.0, cost);
        found.retain(|p| cost(p) <= NEAR * least);
        found.truncate(self.effort.times(SIMULATED));
        found
    }

    /// Those of a microbatch size, one for each shape, without those that cost more than `to_beat`;
    /// at a ZeRO level, or any.
    fn hiding_of(
        &self,
        (whole, to_beat): (usize, f64),
        batch: u64,
        schedule: ScheduleKind,
        reserve: u64,
        level: Option<u8>,
    ) -> Vec<Pipeline> {
        let m = (self.train.global_batch / batch) as u32;
        let assumed = Assumed {
            level,
            hides: true,
            fill: 0,
        };
        let shapes = self.shapes(batch).into_iter().enumerate();
        let own: Vec<(usize, Shape)> = shapes.filter(|(_, s)| s.submesh == whole).collect();
        let made = own.par_iter().filter_map(|(index, shape)| {
            let models = self.made_models(shape, batch).ok()?;
            let made = self.candidate_of(models, (*index, shape), batch, m, reserve, assumed);
            let (of, one) = ([made.ok()?], Some(1));
            let bounded = self.solve_over(&[whole], &of, batch, m, schedule, reserve, one, to_beat);
            Some(Pipeline {
                batch,
                m,
                schedule,
                choice: bounded.found.ok()?,
                assumed,
                likeness: Likeness::default(),
            })
        });
        made.collect()
    }
}
