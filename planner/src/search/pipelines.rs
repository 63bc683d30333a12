//! The best pipelines by the additive objective: of every microbatch size, and of all.
//!
//! Microbatch sizes are solved side by side; where submeshes are equal, those found hold back the
//! next. What is found and its bound do not depend on which is ready first.

use super::bounds::rounds;
use super::chosen::shapes_of;
use super::larger::{Larger, LeastTimes};
use super::mixes::Rungs;
use super::simple::Likeness;
use super::{Candidate, Search, Shape, Submesh, no_strategy};
use crate::inter_op::{self, Hop, InterOpOptions, NoPlan, PipelineChoice, StageTable, Transfer};
use crate::layer_model::{Assumed, ModelError};
use crate::{BestSoFar, PlanError, PlanStats, Progress};
use ir::Seconds;
use ir::plan::ScheduleKind;
use rayon::prelude::*;
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

/// Pipelines that are lowered and simulated.
const SIMULATED: usize = 6;
/// The same where devices share processors, which only the simulator knows.
const SIMULATED_SHARED: usize = 24;
/// Pipelines of interleaved stages that are simulated beside them.
const SIMULATED_INTERLEAVED: usize = 12;
/// Most of them for one microbatch size, each of another shape or with another number of stages on
/// a mesh: sends, of which there are as many more, hide behind computing as only the simulator
/// knows.
pub(super) const INTERLEAVED_OF_A_SIZE: usize = 4;
/// A pipeline that costs so many times as much as the best of its kind is not simulated. Mostly the
/// two differ by less, but nothing makes them.
pub(super) const NEAR: f64 = 1.06;
/// Layers times devices up to which the best pipeline of every power of two of stages is simulated,
/// what is near there, and how many are: simulating such programs takes milliseconds.
const SMALL: usize = 128;
const NEAR_IN_A_SMALL_ONE: f64 = 1.15;
const SIMULATED_IN_A_SMALL_ONE: usize = 12;
/// Microbatch sizes that are solved at once, before what they give holds back the next ones.
const BATCHES_AT_ONCE: usize = 2;
/// Bytes of all devices for each parameter and each sample of a likely microbatch. The best plans
/// of the cases that planning is timed on have 1 to 50, most of them 5 to 11.
const LIKELY_BYTES: f64 = 4.0;
/// The same where submeshes of several sizes are mixed, which nothing holds back.
const MIXED_AT_ONCE: usize = 8;
/// Layers times devices up to which stages may have submeshes of different sizes; above,
/// all stages of a pipeline have equal submeshes.
pub(super) const MIXED_SUBMESHES: usize = 512;

/// A pipeline for one microbatch size.
#[derive(Clone)]
pub(super) struct Pipeline {
    pub(super) batch: u64,
    pub(super) m: u32,
    pub(super) schedule: ScheduleKind,
    pub(super) choice: PipelineChoice,
    /// The assumption under which its strategies were chosen: a ZeRO level as if it were pinned.
    pub(super) assumed: Assumed,
    /// How alike its layers are made.
    pub(super) likeness: Likeness,
}

/// The results of the search for one microbatch size.
pub(super) struct Solved {
    pub(super) candidates: u64,
    /// The best pipeline; where devices share processors, of every number of stages.
    pub(super) found: Vec<PipelineChoice>,
    /// The best of interleaved stages, best first, where the search chooses among them.
    pub(super) interleaved: Vec<(ScheduleKind, PipelineChoice)>,
    pub(super) error: Option<PlanError>,
    /// No pipeline of this microbatch size costs less, found or not.
    pub(super) lower: f64,
    /// Bounds on smaller microbatches, from the shapes that were priced.
    pub(super) least: Vec<(Shape, LeastTimes)>,
}

impl Solved {
    /// Before anything was looked at.
    pub(super) fn nothing() -> Solved {
        Solved {
            candidates: 0,
            found: Vec::new(),
            interleaved: Vec::new(),
            error: None,
            lower: f64::INFINITY,
            least: Vec::new(),
        }
    }

    /// Seconds of the best interleaved stages so far; infinite where there are none.
    pub(super) fn least_ring_s(&self) -> f64 {
        let rings = self.interleaved.iter().map(|(_, c)| c.cost.total_s);
        rings.fold(f64::INFINITY, f64::min)
    }
}

/// Costs at which pipelines are not among those that are simulated.
#[derive(Clone, Copy)]
pub(super) struct ToBeat {
    /// One stage on each mesh: what costs more.
    pub(super) plain: f64,
    /// Several, interleaved: what costs as much.
    pub(super) interleaved: f64,
}

impl ToBeat {
    const NOTHING: ToBeat = ToBeat {
        plain: f64::INFINITY,
        interleaved: f64::INFINITY,
    };
}

/// The best pipeline of a part of the space, or why there is none, and a bound on the part.
pub(super) struct Bounded {
    pub(super) found: Result<PipelineChoice, PlanError>,
    pub(super) lower: f64,
}

impl Search<'_> {
    /// The pipelines to simulate, those without interleaved stages first, each kind best first;
    /// and a bound on all that there are.
    pub(super) fn pipelines(
        &self,
        batches: &[u64],
        schedule: ScheduleKind,
        reserve: u64,
        stats: &mut PlanStats,
    ) -> Result<(Vec<Pipeline>, f64), PlanError> {
        let (mut plain, mut interleaved) = (Vec::new(), Vec::new());
        let mut bound = f64::INFINITY;
        let mut nearest: Option<PlanError> = None;
        // In parallel; collected in the order of the batches, so the outcome does not depend on
        // which is ready first. A few at a time, so that those found can hold back the next: from
        // large ones down, because these bound the smaller ones.
        let at_once = match self.mixes_submeshes() {
            true => MIXED_AT_ONCE,
            false => BATCHES_AT_ONCE,
        };
        let mut descending = batches.to_vec();
        descending.sort_unstable_by(|a, b| b.cmp(a));
        let mut order = descending.clone();
        // Likely ones come before all: what is found there holds back the others.
        if !self.mixes_submeshes() {
            let likely = self.likely_batch();
            let first = order.partition_point(|&b| b > likely);
            let first = first.min(order.len().saturating_sub(at_once));
            let n = at_once.min(order.len());
            order[..first + n].rotate_right(n);
        }
        let mut larger = Larger::default();
        let mut solved: Vec<Solved> = Vec::with_capacity(batches.len());
        for some in order.chunks(at_once) {
            let to_beat = match self.mixes_submeshes() {
                true => ToBeat::NOTHING,
                false => self.to_beat(&solved),
            };
            let more = some
                .par_iter()
                .map(|&batch| self.solve_batch(batch, schedule, reserve, to_beat, &larger));
            let more: Vec<Solved> = more.collect();
            for (&batch, mut more) in some.iter().zip(more) {
                for (shape, least) in std::mem::take(&mut more.least) {
                    larger.add(&shape, batch, least);
                }
                self.has_found
                    .fetch_or(!more.found.is_empty(), Ordering::Relaxed);
                solved.push(more);
            }
            // Nobody reads of a search that is over, and to bound what is left takes a while.
            if !self.ends() {
                self.watcher
                    .see(|| self.progress(&order, &solved, schedule, &larger));
            }
        }
        for (&batch, solved) in order.iter().zip(solved).rev() {
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
                assumed: Assumed::default(),
                likeness: Likeness::default(),
            };
            plain.extend(solved.found.into_iter().map(|c| pipeline(schedule, c)));
            let rings = solved.interleaved.into_iter();
            interleaved.extend(rings.map(|(schedule, choice)| pipeline(schedule, choice)));
        }
        let cost = |p: &Pipeline| p.choice.cost.total_s;
        for found in [&mut plain, &mut interleaved] {
            found.sort_by(|a, b| cost(a).total_cmp(&cost(b)).then(a.batch.cmp(&b.batch)));
        }
        plain.truncate(
            match (self.cluster.pool.is_some(), self.tries_all_counts()) {
                (true, _) => SIMULATED_SHARED,
                (false, true) => SIMULATED_IN_A_SMALL_ONE,
                (false, false) => self.effort.times(SIMULATED),
            },
        );
        let to_beat = plain.first().map_or(f64::INFINITY, cost);
        interleaved.retain(|p| cost(p) < to_beat * NEAR);
        interleaved.truncate(self.effort.times(SIMULATED_INTERLEAVED));
        plain.extend(interleaved);
        let to_beat = to_beat.min(self.to_beat * NEAR);
        plain.extend(self.hiding(&descending, schedule, reserve, to_beat));
        let used = plain
            .iter()
            .flat_map(|p| shapes_of(&p.choice).map(|shape| (p.batch, shape)));
        let used: BTreeSet<(u64, usize)> = used.collect();
        self.forget_models(|batch, shape| used.contains(&(batch, shape)));
        if plain.is_empty() {
            return Err(nearest.unwrap_or(PlanError::Input("no microbatch size to try".into())));
        }
        Ok((plain, bound))
    }

    /// Samples of a microbatch that many a plan has: as many as replicas of the model would fit,
    /// about.
    fn likely_batch(&self) -> u64 {
        let n_devices = f64::from(self.cluster.n_devices());
        let bytes = n_devices * self.bytes_of(self.cluster) as f64;
        let n_parameters = self.variants[0].buckets.n_elements().max(1) as f64;
        (bytes / (LIKELY_BYTES * n_parameters)) as u64
    }

    /// How far the search is, after the first of the microbatch sizes were searched.
    fn progress(
        &self,
        order: &[u64],
        solved: &[Solved],
        schedule: ScheduleKind,
        larger: &Larger,
    ) -> Progress {
        let pairs = order.iter().zip(solved);
        let found = pairs.flat_map(|(&batch, s)| {
            let rings = s.interleaved.iter().map(|(_, c)| c);
            s.found.iter().chain(rings).map(move |c| (batch, c))
        });
        let best = found.min_by(|a, b| a.1.cost.total_s.total_cmp(&b.1.cost.total_s));
        let done = solved.iter().map(|s| s.lower);
        let left = order[solved.len()..].iter();
        let left = left.map(|&batch| self.least_of_batch(batch, schedule, larger));
        let bound = done.chain(left).fold(f64::INFINITY, f64::min);
        Progress {
            search: self.name.into(),
            done: solved.len(),
            of: order.len(),
            best: best.map(|(microbatch, choice)| {
                let objective_s = choice.cost.total_s;
                let gap = (objective_s - bound) / objective_s.max(f64::MIN_POSITIVE);
                BestSoFar {
                    objective_s: Seconds(objective_s),
                    n_stages: choice.stages.len(),
                    microbatch,
                    gap: gap.clamp(0.0, 1.0),
                }
            }),
        }
    }

    /// Seconds that no pipeline of a microbatch size can beat, before any shape is priced for it.
    fn least_of_batch(&self, batch: u64, schedule: ScheduleKind, larger: &Larger) -> f64 {
        let m = (self.train.global_batch / batch) as u32;
        if !self.mixes_submeshes() && schedule.virtual_stages() == 1 {
            return self.least_of_equal(batch, m, schedule, larger);
        }
        // However work is cut and whatever the schedule, the busiest device computes for every
        // microbatch no less than the mean. Groups of unlike devices have no one rate.
        match self.cluster.is_equal() {
            true => self.least_matmul_s(batch) * f64::from(m) / f64::from(self.cluster.n_devices()),
            false => 0.0,
        }
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
        let interleaved: Vec<f64> = found.map(|(_, c)| c.cost.total_s).collect();
        let least = plain.iter().copied().fold(self.to_beat, f64::min);
        let ring = interleaved.iter().copied().fold(f64::INFINITY, f64::min);
        let near = (least * NEAR).min(self.held_back_s(ring));
        ToBeat {
            plain: match self.cluster.pool.is_some() {
                true => f64::INFINITY,
                false => worst(plain, self.effort.times(SIMULATED)).min(near),
            },
            interleaved: worst(interleaved, self.effort.times(SIMULATED_INTERLEAVED)).min(near),
        }
    }

    /// The cost from which pipelines are held back where one of any kind costs `least_s`: 6% more.
    /// It is a rule of thumb, since the simulator hides more of one than of another; so nothing is
    /// held back by it where all of the space can be looked at, nor where devices share processors,
    /// which the objective does not know.
    pub(super) fn held_back_s(&self, least_s: f64) -> f64 {
        match self.mixes_submeshes() || self.cluster.pool.is_some() {
            true => f64::INFINITY,
            false => least_s * NEAR,
        }
    }

    pub(super) fn is_small(&self) -> bool {
        self.layers().kind.len() * self.cluster.n_devices() as usize <= SMALL
    }

    /// A pipeline that costs so many times as much as the best of its kind is not simulated.
    pub(super) fn near(&self) -> f64 {
        match self.is_small() {
            true => NEAR_IN_A_SMALL_ONE,
            false => NEAR,
        }
    }

    /// Whether the best pipelines of several numbers of stages are simulated, not only the best of
    /// all: of every number where devices share processors, else of powers of two.
    fn tries_all_counts(&self) -> bool {
        let is_free =
            self.pins.pipeline.is_none() && self.pins.schedule_kind().virtual_stages() == 1;
        is_free && self.mixes_submeshes() && (self.cluster.pool.is_some() || self.is_small())
    }

    /// The best pipeline of a microbatch size; where submeshes are equal, only if it costs at
    /// most `to_beat`.
    fn solve_batch(
        &self,
        batch: u64,
        schedule: ScheduleKind,
        reserve: u64,
        to_beat: ToBeat,
        larger: &Larger,
    ) -> Solved {
        let m = (self.train.global_batch / batch) as u32;
        if !self.mixes_submeshes() && schedule.virtual_stages() == 1 {
            return self.solve_equal(batch, m, schedule, reserve, to_beat, larger);
        }
        let unsolved = || Solved {
            lower: self.least_of_batch(batch, schedule, larger),
            ..Solved::nothing()
        };
        if self.ends() {
            return unsolved();
        }
        let shapes = self.narrow_shapes(batch);
        let candidates = shapes.par_iter().enumerate().map(|(i, shape)| {
            let candidate = || self.candidate(i, shape, batch, m, reserve);
            (!self.ends()).then(candidate)
        });
        let candidates: Vec<Option<Result<Candidate, ModelError>>> = candidates.collect();
        // Another microbatch size had a pipeline first.
        if self.ends() {
            return unsolved();
        }
        let mut solved = Solved::nothing();
        let mut usable = Vec::new();
        let mut unpriced = false;
        for c in candidates.into_iter().flatten() {
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
            Ok(choice) => {
                solved.found.push(choice);
                self.has_found.store(true, Ordering::Relaxed);
            }
            Err(e) => solved.error = Some(nearer(solved.error, e)),
        }
        let interleaved = to_beat.interleaved;
        let plain = solved.found.iter().map(|c| c.cost.total_s);
        let to_beat = plain.fold(f64::INFINITY, f64::min) * NEAR;
        let to_beat = to_beat.min(interleaved);
        for submesh in 0..self.submeshes.len() {
            self.interleave(&mut solved, submesh, &usable, batch, m, reserve, to_beat);
        }
        // The additive objective does not know that devices share processors, so it ranks
        // numbers of stages badly there, and where steps are short it does not know what of them
        // is hidden: let the simulator see the best of each.
        if self.tries_all_counts() {
            let all: Vec<usize> = (0..self.submeshes.len()).collect();
            let most = self
                .layers()
                .kind
                .len()
                .min(self.cluster.n_devices() as usize);
            let counts = (1..=most).filter(|p| self.cluster.pool.is_some() || p.is_power_of_two());
            for p in counts {
                if self.ends() {
                    break;
                }
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
                let is_new = |c: &PipelineChoice| {
                    let best = solved
                        .found
                        .first()
                        .map_or(f64::INFINITY, |c| c.cost.total_s);
                    let is_near = c.cost.total_s < best * self.near();
                    (self.cluster.pool.is_some() || is_near) && !solved.found.contains(c)
                };
                if let Some(choice) = one.found.ok().filter(is_new) {
                    solved.found.push(choice);
                }
            }
        }
        let rings = solved.interleaved.iter().map(|(_, choice)| choice);
        self.forget_others(batch, &shapes, solved.found.iter().chain(rings));
        solved
    }

    /// A pipeline of plain stages made again, of the shapes that it had, with so many bytes
    /// reserved and at the ZeRO level that it keeps to.
    pub(super) fn plain_again(&self, p: &Pipeline, reserve: u64) -> Option<PipelineChoice> {
        let stages = p.choice.stages.iter();
        let indices: BTreeSet<usize> = stages.map(|s| Rungs::of_tag(s.tag).0).collect();
        let shapes = self.shapes(p.batch);
        let own = indices.into_iter().map(|i| Some((i, shapes.get(i)?)));
        self.plain_of(p, &own.collect::<Option<Vec<_>>>()?, reserve)
    }

    /// The same of other shapes, which have their numbers beside them.
    pub(super) fn plain_of(
        &self,
        p: &Pipeline,
        shapes: &[(usize, &Shape)],
        reserve: u64,
    ) -> Option<PipelineChoice> {
        let candidates = shapes.iter().map(|&(index, shape)| {
            self.candidate_at(index, shape, p.batch, p.m, reserve, p.assumed)
        });
        let candidates = candidates.collect::<Result<Vec<_>, _>>().ok()?;
        let mut submeshes: Vec<usize> = candidates.iter().map(|c| c.submesh).collect();
        submeshes.sort_unstable();
        submeshes.dedup();
        let n_stages = Some(p.choice.stages.len());
        let (schedule, any) = (p.schedule, f64::INFINITY);
        let bounded = self.solve_over(
            &submeshes,
            &candidates,
            p.batch,
            p.m,
            schedule,
            reserve,
            n_stages,
            any,
        );
        bounded.found.ok()
    }

    fn solve_pipeline(
        &self,
        candidates: &[Candidate],
        batch: u64,
        m: u32,
        schedule: ScheduleKind,
        reserve: u64,
    ) -> Bounded {
        if schedule.virtual_stages() > 1 {
            return self.solve_pinned_ring(candidates, batch, m, schedule, reserve);
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
    pub(super) fn mixes_submeshes(&self) -> bool {
        !self.cluster.is_equal() || self.mixes_few()
    }

    /// Whether layers times devices are so few that everything may be looked at.
    pub(super) fn mixes_few(&self) -> bool {
        self.layers().kind.len() * self.cluster.n_devices() as usize <= MIXED_SUBMESHES
    }

    /// The best pipeline over some of the submeshes (indices), and a bound on all of them. It is
    /// not found, and no reason given, where it costs more than a finite `to_beat`.
    #[allow(clippy::too_many_arguments)] // Each is a loop variable of the search.
    pub(super) fn solve_over(
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
        let own: Vec<&Submesh> = submeshes.iter().map(|&i| &self.submeshes[i]).collect();
        let lengths = own
            .iter()
            .flat_map(|s| s.starts.iter().chain([&s.n_devices]));
        let unit = lengths.copied().fold(0, gcd).max(1);
        let units = |n: &u32| (n / unit) as usize;
        let sizes: Vec<usize> = own.iter().map(|s| units(&s.n_devices)).collect();
        let starts = own.iter().map(|s| s.starts.iter().map(units).collect());
        let starts: Vec<Vec<usize>> = starts.collect();
        let devices = (self.cluster.n_devices() / unit) as usize;
        let all: Vec<&Candidate> = candidates.iter().collect();
        let bytes = self.boundary_bytes(batch);
        let transfer = |hop: Hop| {
            let (from, to) = (submeshes[hop.from], submeshes[hop.to]);
            let next = self.cluster.n_devices() - hop.behind as u32 * unit;
            let first = next.saturating_sub(self.submeshes[from].n_devices);
            Some(self.transfer_s(bytes, (from, first), (to, next)))
        };
        // Equal ones are looked at too: ties have an order.
        let options = InterOpOptions {
            n_stages,
            cutoff_s: to_beat.next_up(),
            ..InterOpOptions::new(u64::from(m), schedule)
        };
        let bound_of = |(n_stages, most): (Option<usize>, usize), to_beat: f64| {
            let (sizes, starts) = (sizes.clone(), starts.clone());
            let of_time = (m, rounds(most, m, options.repeats()));
            let relaxed = self.relaxed_table(&all, submeshes, devices, sizes, of_time);
            let relaxed = relaxed.at(starts);
            let options = InterOpOptions {
                n_stages,
                cutoff_s: to_beat.next_up(),
                ..options
            };
            let least = match inter_op::plan(&relaxed, &transfer, &options) {
                Ok(found) => found.lower_bound_s,
                // Where even the relaxation has no pipeline there is none to bound.
                Err(_) => to_beat,
            };
            least.max(self.least_work_s(&relaxed, unit, m))
        };
        let counts = n_stages.map_or_else(|| self.counts(submeshes), |n| vec![(Some(n), n)]);
        let bound = || {
            let least = counts.iter();
            least.fold(to_beat, |least, &n| least.min(bound_of(n, least)))
        };
        let table = || {
            let (sizes, starts) = (sizes.clone(), starts.clone());
            let table = self.table(&all, submeshes, devices, sizes, reserve, true);
            table.at(starts)
        };
        let mut lower = bound();
        let found = match lower < options.cutoff_s || to_beat.is_infinite() {
            true => self.solve_lazily(&all, &table, &transfer, &options),
            false => Err(NoPlan::NoTiling),
        };
        // Prices say more of stages than what was known before.
        if all.iter().any(|c| c.known().is_some()) {
            lower = lower.max(bound());
        }
        Bounded {
            found: found.map_err(|e| self.infeasible(e, submeshes)),
            lower,
        }
    }

    /// The best pipeline over candidates of which as few as possible are priced: first that of
    /// times that those without prices cannot beat, then, with what it was made of priced, again,
    /// until nothing in it lacks its price. No other is better then. `table` is that of what is
    /// known.
    fn solve_lazily(
        &self,
        candidates: &[&Candidate],
        table: &dyn Fn() -> StageTable,
        transfer: Transfer<'_>,
        options: &InterOpOptions,
    ) -> Result<PipelineChoice, NoPlan> {
        loop {
            let found = inter_op::plan(&table(), transfer, options);
            let shapes: BTreeSet<usize> = match &found {
                Ok(choice) => {
                    let tags = choice.stages.iter().map(|s| Rungs::of_tag(s.tag));
                    let unknown = tags.filter(|(_, rungs)| *rungs == Rungs::UNKNOWN);
                    unknown.map(|(shape, _)| shape).collect()
                }
                // The reason is said of what the stages need.
                Err(_) if options.cutoff_s.is_infinite() => {
                    candidates.iter().map(|c| c.shape).collect()
                }
                Err(_) => BTreeSet::new(),
            };
            let unknown = candidates.par_iter();
            let unknown =
                unknown.filter(|c| shapes.contains(&c.shape) && c.known_stages().is_none());
            if unknown.map(|c| self.stages(c)).count() == 0 {
                return found;
            }
        }
    }

    pub(super) fn infeasible(&self, why: NoPlan, submeshes: &[usize]) -> PlanError {
        match why {
            NoPlan::NoTiling => PlanError::NoTiling {
                devices: self.cluster.n_devices(),
                layers: self.layers().kind.len(),
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
                    self.training().graph.layers[layers.start],
                    self.training().graph.layers[layers.end - 1]
                ),
                devices: self.submeshes[submeshes[submesh]].n_devices,
                in_flight,
                needed: u64::try_from(needed_bytes).unwrap_or(u64::MAX),
                capacity: capacity_bytes,
            },
        }
    }
}

/// The error that tells the user more: too little memory before anything else.
pub(super) fn nearer(old: Option<PlanError>, new: PlanError) -> PlanError {
    let needed = |e: &PlanError| match e {
        PlanError::Memory { needed, .. } => Some(*needed),
        _ => None,
    };
    match (old, new) {
        // The one of two that needs less.
        (Some(old), new) if needed(&old).is_some_and(|a| needed(&new).is_none_or(|b| a <= b)) => {
            old
        }
        // Where ops are left without a strategy nothing can be tiled: say the cause.
        (Some(old @ PlanError::Strategies(_)), PlanError::NoTiling { .. }) => old,
        (_, new) => new,
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}
