//! Pipelines that the objective thinks too little of: those whose gradients' traffic hides, and
//! those of other numbers of stages where the fastest step is slow for a reason that it does not
//! know.

use super::super::batches::MAX_MICROBATCH;
use super::super::chosen::shapes_of;
use super::super::simple::Likeness;
use super::super::{Candidate, Pipeline, Search, Shape};
use super::{Known, Ranked, Simulated};
use crate::inter_op::PipelineChoice;
use crate::layer_model::{Assumed, GRADIENTS_HIDDEN};
use crate::pins::AxisRole;
use crate::{PlanError, PlanStats};
use ir::Graph;
use ir::plan::ScheduleKind;
use rayon::prelude::*;
use std::collections::BTreeSet;

/// A step that takes so many times as long as its objective says is slow for a reason that the
/// objective does not know, so that others may be faster which it thinks little of.
const UNFORESEEN: f64 = 1.2;
/// Most pipelines that are simulated for that reason.
const FURTHER: usize = 8;
/// The levels at which experts train what one level below does not hold.
const UNIFORM: [u8; 2] = [2, 3];
/// Most interleaved pipelines that are made as experts would and simulated.
const AS_EXPERTS: usize = 4;
/// An objective that is so many times a step may still be of one that is as fast.
const STILL_NEAR: f64 = 1.35;

impl Search<'_> {
    /// Where the fastest step takes much longer than its objective, simulates the best pipelines of
    /// other numbers of stages that may take less by it. The objective does not know what tied
    /// parameters move between layers, nor that ranks which hold the same send and receive it all.
    pub(super) fn look_further(
        &self,
        forward: &Graph,
        known: &Known,
        stats: &mut PlanStats,
        simulated: &mut Simulated,
    ) -> Result<(), PlanError> {
        let fastest = simulated.ranked.first();
        let is_slow = |r: &&Ranked| {
            let p = &r.pipeline;
            let is_plain = p.schedule.virtual_stages() == 1 && self.pins.pipeline.is_none();
            is_plain && self.holds_back() && r.step_s > UNFORESEEN * r.objective_s
        };
        let Some(r) = fastest.filter(is_slow) else {
            return Ok(());
        };
        let (p, step_s, reserve) = (r.pipeline.clone(), r.step_s, r.reserve);
        let mut further = self.of_other_counts(&p, known.schedule, reserve, step_s);
        let mut batches: Vec<u64> = further.iter().map(|p| p.batch).collect();
        batches.sort_unstable_by(|a, b| b.cmp(a));
        batches.dedup();
        further.extend(self.hiding(&batches, known.schedule, reserve, step_s));
        // None is left out because its objective is far above that of the others, which is wrong.
        simulated.aside = std::mem::take(&mut simulated.ranked);
        self.simulate_all(forward, further, known, stats, simulated)?;
        simulated.ranked.append(&mut simulated.aside);
        (simulated.ranked).sort_by(|a, b| a.step_s.total_cmp(&b.step_s));
        Ok(())
    }

    /// A pipeline made again in the ways that experts think of, in which nothing is assumed to hide:
    /// at each ZeRO level that splits what moves in the microbatches, on its own meshes and on those
    /// of one axis; an interleaved one with other numbers of stages on each mesh. Those whose
    /// objective is far above `step_s` are left out.
    ///
    /// The objective, under the assumptions that the pipeline was chosen for, may rank these wrongly
    /// by a tenth. By the simulator V100s on 12 hosts train an 8B model at ZeRO-3 on one axis 4%
    /// faster than on the two axes that were found, and 24 L40S a 27B model with 4 stages on each mesh
    /// 4% faster than with 3.
    pub(super) fn uniform(&self, p: &Pipeline, reserve: u64, step_s: f64) -> Vec<Pipeline> {
        if self.cluster.pool.is_some() {
            return Vec::new();
        }
        let mut levels: BTreeSet<Option<u8>> = [p.assumed.level].into();
        if self.pins.zero.is_none() {
            levels.extend(UNIFORM.map(Some));
        }
        let plain = |level: Option<u8>| Pipeline {
            assumed: Assumed {
                level,
                ..Assumed::default()
            },
            ..p.clone()
        };
        let of = |p: &Pipeline, choice: Option<PipelineChoice>| {
            let is_near = |c: &PipelineChoice| c.cost.total_s < STILL_NEAR * step_s;
            choice.filter(is_near).map(|choice| Pipeline {
                choice,
                ..p.clone()
            })
        };
        if p.schedule.virtual_stages() > 1 {
            let shapes = self.shapes(p.batch);
            let own = shapes_of(&p.choice).next().and_then(|i| shapes.get(i));
            let rings = own.map_or_else(Vec::new, |shape| self.rings(shape.submesh, p.m));
            let ways = rings.iter().flat_map(|ring| {
                let at = |level: &Option<u8>| Pipeline {
                    schedule: ring.schedule,
                    ..plain(*level)
                };
                levels.iter().map(at).collect::<Vec<_>>()
            });
            let ways: Vec<Pipeline> = ways.collect();
            let made = ways.par_iter();
            let mut made: Vec<Pipeline> = made
                .filter_map(|p| of(p, self.ring_again(p, reserve)))
                .collect();
            made.sort_by(|a, b| a.choice.cost.total_s.total_cmp(&b.choice.cost.total_s));
            made.truncate(self.effort.times(AS_EXPERTS));
            return made;
        }
        // Wide ones have two axes, and stand behind the others.
        let (all, shapes) = (self.shapes(p.batch), self.narrow_shapes(p.batch));
        let own: BTreeSet<usize> = shapes_of(&p.choice).collect();
        let submeshes: BTreeSet<usize> = own
            .iter()
            .filter_map(|&i| Some(all.get(i)?.submesh))
            .collect();
        let is_of_one = |s: &Shape| s.mesh.axes.iter().filter(|a| a.size > 1).count() <= 1;
        let one_axis: Vec<(usize, &Shape)> = (shapes.iter().enumerate())
            .filter(|(_, s)| submeshes.contains(&s.submesh) && is_of_one(s))
            .collect();
        let is_other = !one_axis.iter().all(|(i, _)| own.contains(i)) && !submeshes.is_empty();
        let ways: Vec<(Option<u8>, bool)> = levels
            .iter()
            .flat_map(|&level| [(level, false), (level, true)])
            .filter(|&(_, is_of_one)| match is_of_one {
                true => is_other,
                // Of its own meshes it was made at all levels, but under the same assumptions.
                false => p.assumed.hides(),
            })
            .collect();
        let made = ways.into_par_iter().filter_map(|(level, is_of_one)| {
            let p = plain(level);
            let choice = match is_of_one {
                true => self.plain_of(&p, &one_axis, reserve),
                false => self.plain_again(&p, reserve),
            };
            of(&p, choice)
        });
        made.collect()
    }

    /// The best pipelines of equal meshes with other numbers of stages than one has, for microbatch
    /// sizes from half to twice its own, that cost less than so many seconds.
    fn of_other_counts(
        &self,
        p: &Pipeline,
        schedule: ScheduleKind,
        reserve: u64,
        below_s: f64,
    ) -> Vec<Pipeline> {
        let n = self.cluster.n_devices();
        let counts = self.submeshes.iter().map(|s| s.n_devices.max(1));
        let counts = counts.filter(|of| n.is_multiple_of(*of)).map(|of| n / of);
        let counts: BTreeSet<u32> = counts.collect();
        let own = p.choice.stages.len();
        let others = counts
            .into_iter()
            .filter(|&count| count as usize != own && count as usize <= self.layers().kind.len());
        let near = p.batch.div_ceil(2)..=p.batch.saturating_mul(2).min(MAX_MICROBATCH);
        let fits = |b: &u64| self.train.global_batch.is_multiple_of(*b);
        let batches: Vec<u64> = near.filter(fits).collect();
        let ways = others.flat_map(|count| batches.iter().map(move |&batch| (count, batch)));
        let ways: Vec<(u32, u64)> = ways.collect();
        let found = ways.into_par_iter().filter_map(|(count, batch)| {
            let m = (self.train.global_batch / batch) as u32;
            let shapes = self.narrow_shapes(batch);
            let own = shapes.iter().enumerate();
            let own = own.filter(|(_, s)| self.submeshes[s.submesh].n_devices == n / count);
            let candidates: Vec<Candidate> = own
                .filter_map(|(i, shape)| self.candidate(i, shape, batch, m, reserve).ok())
                .collect();
            let submeshes: BTreeSet<usize> = candidates.iter().map(|c| c.submesh).collect();
            let submeshes: Vec<usize> = submeshes.into_iter().collect();
            let bounded = self.solve_over(
                &submeshes,
                &candidates,
                batch,
                m,
                schedule,
                reserve,
                Some(count as usize),
                below_s,
            );
            let choice = bounded.found.ok()?;
            Some(Pipeline {
                batch,
                m,
                schedule,
                choice,
                assumed: Assumed::default(),
                likeness: Likeness::default(),
            })
        });
        let mut found: Vec<Pipeline> = found.collect();
        found.sort_by(|a, b| a.choice.cost.total_s.total_cmp(&b.choice.cost.total_s));
        found.truncate(self.effort.times(FURTHER));
        found
    }

    /// A pipeline made again as if part of what moves gradients of activations were hidden; none
    /// where nothing but samples is split, so that none moves, or where the search does without.
    pub(super) fn with_gradients(&self, p: &Pipeline, reserve: u64) -> Option<Pipeline> {
        let shapes = self.shapes(p.batch);
        let own: BTreeSet<usize> = shapes_of(&p.choice).collect();
        let mut own = own.into_iter().filter_map(|i| shapes.get(i));
        let splits = |s: &Shape| {
            let mut of_axes = s.roles.iter().zip(&s.mesh.axes);
            of_axes.any(|(role, axis)| {
                axis.size > 1 && !matches!(role, AxisRole::Data | AxisRole::Replica)
            })
        };
        let may_be = own.any(splits) && !self.without_hiding && self.cluster.pool.is_none();
        let hiding = Pipeline {
            assumed: Assumed {
                hidden: GRADIENTS_HIDDEN,
                gradients: true,
                ..p.assumed
            },
            ..p.clone()
        };
        may_be.then(|| self.again(&hiding, reserve)).flatten()
    }
}
