//! The inter-op dynamic program: slices the layers into pipeline stages on submeshes.
//!
//! A pure function of the [`StageTable`]. With t_i the forward, backward and sending time of
//! stage i for one microbatch, s_i its time once per step, and m microbatches, it minimises
//!
//! ```text
//!   sum_i t_i + (m - 1) * max_i t_i + max_i s_i
//! ```
//!
//! (Alpa, Zheng et al. 2022, equation 2, with the step term added) such that every stage fits:
//! static + in_flight * saved + transient <= capacity, where stage i of p keeps m microbatches
//! in flight under GPipe and min(m, p - i) under 1F1B.
//!
//! With v > 1 stages on each of p meshes, interleaved, a mesh starts v stages for every
//! microbatch and the pipeline fills with p - 1 of them, so the largest counts
//! (m - p) v + p - 1 times instead of m - 1 times; in flight is what the schedule says. Here
//! every stage has a submesh of its own; that several share one, and its memory, is
//! `interleave`'s business, which judges plans by what each mesh has to do; the count above only
//! finds cuts.
//!
//! How: for a threshold T, f(T) is the least sum with all t_i below T, found by a dynamic
//! program from the last stage backwards, so that p - i is the number of stages so far. The
//! thresholds are searched by branch and bound: nothing with max t in (low, high) is better
//! than f(high) + (m - 1) * low.
//!
//! Invariants: exact for this objective up to the requested gap; ties go to the earlier
//! candidate, in the order of layers, submeshes and entries, so results are deterministic.
//! Labels that fewer stages, less time and a shorter step all dominate are dropped; those
//! that cannot beat the best plan even if the rest were free of transfers and memory too.

use std::collections::BTreeSet;
use std::ops::Range;

/// One way to run a range of layers on a submesh, for one microbatch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageEntry {
    /// Forward time.
    pub forward_s: f64,
    /// Backward time, recomputation included.
    pub backward_s: f64,
    /// Time once per step: gradient synchronisation, optimizer.
    pub step_s: f64,
    /// Bytes per device that are always in use.
    pub static_bytes: u64,
    /// Bytes per device for every microbatch in flight.
    pub saved_bytes_per_microbatch: u64,
    /// Bytes per device for a moment.
    pub transient_bytes: u64,
    /// Bytes that a device has.
    pub capacity_bytes: u64,
    /// Sharding spec of what comes in; an index of the caller's.
    pub boundary_in: u16,
    /// Sharding spec of what goes out.
    pub boundary_out: u16,
    /// The caller's name for this entry.
    pub tag: u64,
}

impl StageEntry {
    /// Forward and backward.
    pub fn time_s(&self) -> f64 {
        self.forward_s + self.backward_s
    }

    /// Bytes per device with this many microbatches in flight.
    pub fn bytes(&self, in_flight: u64) -> u128 {
        let fixed = u128::from(self.static_bytes) + u128::from(self.transient_bytes);
        fixed + u128::from(in_flight) * u128::from(self.saved_bytes_per_microbatch)
    }

    fn fits(&self, in_flight: u64) -> bool {
        self.bytes(in_flight) <= u128::from(self.capacity_bytes)
    }
}

/// What every range of layers costs on every submesh: for each, a small Pareto list.
#[derive(Clone, Debug, PartialEq)]
pub struct StageTable {
    n_layers: usize,
    n_devices: usize,
    submeshes: Vec<usize>,
    entries: Vec<Vec<StageEntry>>,
}

impl StageTable {
    /// An empty table; `submeshes[s]` is the number of devices of submesh shape `s`.
    pub fn new(n_layers: usize, n_devices: usize, submeshes: Vec<usize>) -> StageTable {
        let cells = (n_layers + 1) * (n_layers + 1) * submeshes.len();
        StageTable {
            n_layers,
            n_devices,
            submeshes,
            entries: vec![Vec::new(); cells],
        }
    }

    /// Layers of the model.
    pub fn n_layers(&self) -> usize {
        self.n_layers
    }

    /// Devices of the cluster.
    pub fn n_devices(&self) -> usize {
        self.n_devices
    }

    /// Devices per submesh shape.
    pub fn submeshes(&self) -> &[usize] {
        &self.submeshes
    }

    /// Adds a way to run `layers` on `submesh`.
    ///
    /// # Panics
    /// If the range is empty or out of bounds, the submesh does not exist, or a time is not a
    /// non-negative number.
    pub fn push(&mut self, layers: Range<usize>, submesh: usize, entry: StageEntry) {
        assert!(
            layers.start < layers.end && layers.end <= self.n_layers,
            "a range of layers"
        );
        assert!(submesh < self.submeshes.len(), "a submesh of this table");
        let times = [entry.forward_s, entry.backward_s, entry.step_s];
        assert!(
            times.iter().all(|t| t.is_finite() && *t >= 0.0),
            "times are not negative"
        );
        let cell = self.cell(layers.start, layers.end, submesh);
        self.entries[cell].push(entry);
    }

    /// The ways to run `layers` on `submesh`.
    pub fn get(&self, layers: Range<usize>, submesh: usize) -> &[StageEntry] {
        &self.entries[self.cell(layers.start, layers.end, submesh)]
    }

    fn cell(&self, start: usize, end: usize, submesh: usize) -> usize {
        (start * (self.n_layers + 1) + end) * self.submeshes.len() + submesh
    }
}

/// Which schedule runs the pipeline: it decides how many microbatches are in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScheduleKind {
    /// All forward, then all backward: m in flight everywhere.
    GPipe,
    /// One forward, one backward: min(m, p - i) in flight at stage i of p.
    OneFOneB,
    /// 1F1B with several stages on every mesh. The number of stages has to be fixed.
    Interleaved {
        /// Meshes; the number of microbatches is a multiple of it.
        n_meshes: usize,
        /// Stages of each.
        virtual_stages: u32,
    },
}

impl ScheduleKind {
    /// Microbatches in flight at a stage that `after` stages follow.
    pub fn in_flight(self, microbatches: u64, after: usize) -> u64 {
        match self {
            ScheduleKind::GPipe => microbatches,
            ScheduleKind::OneFOneB => microbatches.min(after as u64 + 1),
            ScheduleKind::Interleaved {
                n_meshes,
                virtual_stages,
            } => {
                let n_stages = n_meshes * virtual_stages as usize;
                let stage = n_stages.saturating_sub(after + 1);
                let kind = ir::plan::ScheduleKind::Interleaved { virtual_stages };
                let m = u32::try_from(microbatches).unwrap_or(u32::MAX);
                u64::from(kind.in_flight(stage, n_stages, m))
            }
        }
    }

    /// How often the largest t counts beside the sum over all stages.
    pub fn repeats(self, microbatches: u64) -> f64 {
        match self {
            ScheduleKind::GPipe | ScheduleKind::OneFOneB => microbatches.saturating_sub(1) as f64,
            ScheduleKind::Interleaved {
                n_meshes,
                virtual_stages,
            } => {
                let p = n_meshes.max(1) as u64;
                let rounds = microbatches.saturating_sub(p) as f64;
                rounds * f64::from(virtual_stages) + (p - 1) as f64
            }
        }
    }
}

/// What to search for.
#[derive(Clone, Copy, Debug)]
pub struct InterOpOptions {
    /// Microbatches per step, at least 1.
    pub microbatches: u64,
    /// The schedule.
    pub schedule: ScheduleKind,
    /// Plans may leave devices unused.
    pub allow_unused: bool,
    /// Exactly this many stages, if given.
    pub n_stages: Option<usize>,
    /// Stop when the plan is within this fraction of the bound; 0 for exact.
    pub relative_gap: f64,
    /// Only what takes less than so many seconds is wanted. Where there is nothing, and this is
    /// finite, nobody looks for the reason: the answer is [`NoPlan::NoTiling`].
    pub cutoff_s: f64,
}

impl InterOpOptions {
    /// Exact, all devices used, any number of stages.
    pub fn new(microbatches: u64, schedule: ScheduleKind) -> Self {
        InterOpOptions {
            microbatches,
            schedule,
            allow_unused: false,
            n_stages: None,
            relative_gap: 0.0,
            cutoff_s: f64::INFINITY,
        }
    }
}

/// Seconds to move one microbatch's activations and their gradients from a stage to the next,
/// charged to the sender: (submesh, boundary_out, next submesh, next boundary_in). `None` where
/// the two cannot follow each other.
pub type Transfer<'a> = &'a dyn Fn(usize, u16, usize, u16) -> Option<f64>;

/// One stage of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct StageChoice {
    /// Its layers.
    pub layers: Range<usize>,
    /// Its submesh shape.
    pub submesh: usize,
    /// Index into `table.get(layers, submesh)`.
    pub entry: usize,
    /// The entry's tag.
    pub tag: u64,
    /// Microbatches in flight.
    pub in_flight: u64,
    /// Sending time to the next stage; 0 for the last.
    pub transfer_s: f64,
    /// t_i: forward, backward and sending.
    pub time_s: f64,
    /// Bytes per device, beside transient ones, that it may take of a mesh that it shares.
    pub share_bytes: Option<u64>,
}

/// The parts of the objective.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PipelineCost {
    /// sum_i t_i
    pub sum_s: f64,
    /// max_i t_i
    pub max_s: f64,
    /// max_i s_i
    pub step_s: f64,
    /// sum + (m - 1) * max + step; see the module header for interleaved stages.
    pub total_s: f64,
}

/// The best plan.
#[derive(Clone, Debug, PartialEq)]
pub struct PipelineChoice {
    /// First stage first.
    pub stages: Vec<StageChoice>,
    /// What it costs.
    pub cost: PipelineCost,
    /// No plan costs less than this for the additive objective; equals the cost when exact.
    pub lower_bound_s: f64,
    /// Thresholds that were tried.
    pub n_thresholds: usize,
}

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq)]
pub enum NoPlan {
    /// Even without regard to memory, no sequence of stages covers layers and devices.
    NoTiling,
    /// The plan that comes nearest to fitting still lacks memory in this stage.
    Memory {
        /// Stages of that plan.
        n_stages: usize,
        /// The stage's layers.
        layers: Range<usize>,
        /// The stage's submesh shape.
        submesh: usize,
        /// Its microbatches in flight.
        in_flight: u64,
        /// Bytes per device that it needs.
        needed_bytes: u128,
        /// Bytes per device that there are.
        capacity_bytes: u64,
    },
}

/// Finds the best plan for `table`.
///
/// # Errors
/// [`NoPlan`] with the nearest reason.
///
/// # Panics
/// If there are no microbatches.
pub fn plan(
    table: &StageTable,
    transfer: Transfer<'_>,
    options: &InterOpOptions,
) -> Result<PipelineChoice, NoPlan> {
    assert!(
        options.microbatches > 0,
        "a step has at least one microbatch"
    );
    let problem = Problem::new(table, transfer, *options);
    search_thresholds(&problem).ok_or_else(|| match options.cutoff_s.is_finite() {
        true => NoPlan::NoTiling,
        false => problem.why_not(),
    })
}

/// Every plan in turn; the best. For tests: exponential.
pub fn brute_force(
    table: &StageTable,
    transfer: Transfer<'_>,
    options: &InterOpOptions,
) -> Option<PipelineCost> {
    let mut best: Option<PipelineCost> = None;
    let mut stages = Vec::new();
    every_plan(table, 0, 0, &mut stages, &mut |stages| {
        if let Some(cost) = cost_of(table, transfer, options, stages)
            && best.is_none_or(|b| cost.total_s < b.total_s)
        {
            best = Some(cost);
        }
    });
    best
}

/// A stage as (layers, submesh, entry).
type Stage = (Range<usize>, usize, usize);

fn every_plan(
    table: &StageTable,
    layer: usize,
    devices: usize,
    stages: &mut Vec<Stage>,
    visit: &mut dyn FnMut(&[Stage]),
) {
    if layer == table.n_layers {
        visit(stages);
        return;
    }
    for end in layer + 1..=table.n_layers {
        for (submesh, n) in table.submeshes.iter().enumerate() {
            if devices + n > table.n_devices {
                continue;
            }
            for entry in 0..table.get(layer..end, submesh).len() {
                stages.push((layer..end, submesh, entry));
                every_plan(table, end, devices + n, stages, visit);
                stages.pop();
            }
        }
    }
}

/// The cost of a whole plan by the definition; `None` when it breaks a rule.
pub fn cost_of(
    table: &StageTable,
    transfer: Transfer<'_>,
    options: &InterOpOptions,
    stages: &[(Range<usize>, usize, usize)],
) -> Option<PipelineCost> {
    let used: usize = stages.iter().map(|(_, s, _)| table.submeshes[*s]).sum();
    let devices_ok = used == table.n_devices || (options.allow_unused && used < table.n_devices);
    let stages_ok = options.n_stages.is_none_or(|n| n == stages.len());
    if !devices_ok || !stages_ok {
        return None;
    }
    let entry = |stage: &Stage| table.get(stage.0.clone(), stage.1)[stage.2];
    let (mut sum, mut max, mut step) = (0.0, 0.0f64, 0.0f64);
    for (i, stage) in stages.iter().enumerate() {
        let e = entry(stage);
        let after = stages.len() - 1 - i;
        if !e.fits(options.schedule.in_flight(options.microbatches, after)) {
            return None;
        }
        let sent = match stages.get(i + 1) {
            Some(next) => transfer(stage.1, e.boundary_out, next.1, entry(next).boundary_in)?,
            None => 0.0,
        };
        let time = e.time_s() + sent;
        sum += time;
        max = max.max(time);
        step = step.max(e.step_s);
    }
    let total = sum + options.schedule.repeats(options.microbatches) * max + step;
    Some(PipelineCost {
        sum_s: sum,
        max_s: max,
        step_s: step,
        total_s: total,
    })
}

/// Thresholds still to be looked at: max t in (low, high), where no sum is below `least`.
struct Interval {
    low: f64,
    high: f64,
    least: f64,
}

fn search_thresholds(problem: &Problem) -> Option<PipelineChoice> {
    let options = &problem.options;
    let others = options.schedule.repeats(options.microbatches);
    let mut best: Option<PipelineChoice> = None;
    let mut n_thresholds = 0;
    // What was dropped because of the gap alone.
    let mut lower_bound = f64::INFINITY;
    let mut open = vec![Interval {
        low: 0.0,
        high: f64::INFINITY,
        least: 0.0,
    }];
    while let Some(interval) = open.pop() {
        let cutoff = best.as_ref().map_or(options.cutoff_s, |b| b.cost.total_s);
        let bound = interval.least + others * interval.low;
        if bound >= cutoff * (1.0 - options.relative_gap) {
            lower_bound = lower_bound.min(bound);
            continue;
        }
        n_thresholds += 1;
        let Some((sum, found)) = problem.best_below(interval.high, cutoff - others * interval.low)
        else {
            continue;
        };
        let max = found.cost.max_s;
        if found.cost.total_s < cutoff {
            best = Some(found);
        }
        // At max t in [max, high) nothing beats what was just found.
        if max <= interval.low {
            continue;
        }
        let middle = 0.5 * (interval.low + max);
        let split = middle > interval.low && middle < max;
        let upper_low = if split { middle } else { interval.low };
        open.push(Interval {
            low: upper_low,
            high: max,
            least: sum,
        });
        if split {
            open.push(Interval {
                low: interval.low,
                high: middle.next_up(),
                least: sum,
            });
        }
    }
    let mut best = best?;
    best.lower_bound_s = best.cost.total_s.min(lower_bound);
    best.n_thresholds = n_thresholds;
    Some(best)
}

/// A plan of the stages from some layer on, the way a stage before it sees it.
#[derive(Clone, Copy, Debug)]
struct Label {
    sum: f64,
    step: f64,
    max: f64,
    n_stages: u32,
    /// Its first stage.
    end: u32,
    entry: u32,
    transfer: f64,
    /// The label of the stages after that.
    next: Option<Place>,
}

/// Where a label is: its first layer, its slot (devices and head), its index there.
#[derive(Clone, Copy, Debug)]
struct Place {
    layer: u32,
    slot: u32,
    index: u32,
}

/// A label with the cost of sending to it.
#[derive(Clone, Copy)]
struct Reached {
    sum: f64,
    step: f64,
    max: f64,
    n_stages: u32,
    transfer: f64,
    place: Option<Place>,
}

/// An entry with what the search asks of it.
#[derive(Clone, Copy)]
struct Candidate {
    start: usize,
    index: u32,
    head: usize,
    entry: StageEntry,
}

struct Problem<'a> {
    table: &'a StageTable,
    transfer: Transfer<'a>,
    options: InterOpOptions,
    /// The distinct (submesh, boundary_in) with which a stage can begin.
    heads: Vec<(usize, u16)>,
    /// The distinct (submesh, boundary_out) with which a stage can end.
    tails: Vec<(usize, u16)>,
    /// By last layer and tail: the entries.
    ending: Vec<Vec<Vec<Candidate>>>,
    /// By number of stages behind: microbatches in flight.
    in_flight: Vec<u64>,
}

impl<'a> Problem<'a> {
    fn new(table: &'a StageTable, transfer: Transfer<'a>, options: InterOpOptions) -> Self {
        let (mut heads, mut tails) = (BTreeSet::new(), BTreeSet::new());
        let n_submeshes = table.submeshes.len();
        for (cell, entries) in table.entries.iter().enumerate() {
            for e in entries {
                heads.insert((cell % n_submeshes, e.boundary_in));
                tails.insert((cell % n_submeshes, e.boundary_out));
            }
        }
        let mut problem = Problem {
            table,
            transfer,
            options,
            heads: heads.into_iter().collect(),
            tails: tails.into_iter().collect(),
            ending: Vec::new(),
            in_flight: (0..=table.n_layers)
                .map(|after| options.schedule.in_flight(options.microbatches, after))
                .collect(),
        };
        problem.ending = (0..=table.n_layers)
            .map(|end| problem.candidates(end))
            .collect();
        problem
    }

    fn candidates(&self, end: usize) -> Vec<Vec<Candidate>> {
        let mut by_tail = vec![Vec::new(); self.tails.len()];
        for start in 0..end {
            for submesh in 0..self.table.submeshes.len() {
                for (index, &entry) in self.table.get(start..end, submesh).iter().enumerate() {
                    let place = |of: &[(usize, u16)], boundary: u16| {
                        of.binary_search(&(submesh, boundary))
                            .expect("every boundary was listed")
                    };
                    by_tail[place(&self.tails, entry.boundary_out)].push(Candidate {
                        start,
                        index: index as u32,
                        head: place(&self.heads, entry.boundary_in),
                        entry,
                    });
                }
            }
        }
        by_tail
    }

    fn in_flight(&self, after: usize) -> u64 {
        self.in_flight[after]
    }

    /// The number of stages as far as it matters to the stages before.
    fn counted(&self, n_stages: u32) -> u64 {
        match (self.options.n_stages, self.options.schedule) {
            (Some(_), _) => u64::from(n_stages),
            (None, ScheduleKind::GPipe) => 0,
            (None, ScheduleKind::OneFOneB) => self.options.microbatches.min(u64::from(n_stages)),
            (None, ScheduleKind::Interleaved { .. }) => u64::from(n_stages),
        }
    }

    /// Whether a label with `a` stages can stand in for one with `b`.
    fn stands_in(&self, a: u32, b: u32) -> bool {
        if self.options.n_stages.is_some() {
            a == b
        } else {
            self.counted(a) <= self.counted(b)
        }
    }

    /// The plan with the least sum + step among those with all t below `threshold`, if that
    /// is below `cutoff`; and that least value.
    fn best_below(&self, threshold: f64, cutoff: f64) -> Option<(f64, PipelineChoice)> {
        let rest = self.least_before(threshold);
        let least = rest.at(self.table.n_layers, self.table.n_devices);
        if !least.is_finite() {
            return None;
        }
        // Without a plan to beat, most labels can be dropped by guessing how good it will be.
        for slack in [1.02, 1.2, 2.0, f64::INFINITY] {
            let guess = if least > 0.0 {
                least * slack
            } else {
                f64::INFINITY
            };
            if let Some(found) = self.labels(threshold, guess.min(cutoff), &rest) {
                return Some(found);
            }
            if guess >= cutoff {
                return None;
            }
        }
        None
    }

    fn labels(&self, threshold: f64, cutoff: f64, rest: &Least) -> Option<(f64, PipelineChoice)> {
        let (n_layers, n_devices) = (self.table.n_layers, self.table.n_devices);
        let n_heads = self.heads.len();
        let mut states: Vec<Vec<Vec<Label>>> = vec![Vec::new(); n_layers + 1];
        states[..n_layers].fill(vec![Vec::new(); (n_devices + 1) * n_heads]);
        for end in (1..=n_layers).rev() {
            let last_devices = if end == n_layers { 0 } else { n_devices };
            for used in 0..=last_devices {
                let slots = used * n_heads..(used + 1) * n_heads;
                if end < n_layers && states[end][slots].iter().all(Vec::is_empty) {
                    continue;
                }
                for (tail, &(submesh, boundary)) in self.tails.iter().enumerate() {
                    let candidates = &self.ending[end][tail];
                    let now = used + self.table.submeshes[submesh];
                    if now > n_devices || candidates.is_empty() {
                        continue;
                    }
                    let reached = self.reached(&states[end], end, used, submesh, boundary);
                    for c in candidates {
                        let own = c.entry.time_s();
                        let before = rest.at(c.start, n_devices - now);
                        if own >= threshold || !before.is_finite() {
                            continue;
                        }
                        let slot = now * n_heads + c.head;
                        for r in &reached {
                            let label = self.extended(end, c, r, threshold);
                            if let Some(label) = label
                                && label.sum + label.step + before < cutoff
                            {
                                self.insert(&mut states[c.start][slot], label);
                            }
                        }
                    }
                }
            }
        }
        self.best_whole(&states, cutoff)
    }

    /// What a stage with this tail finds behind it, sending included; the empty plan at the end.
    fn reached(
        &self,
        slots: &[Vec<Label>],
        layer: usize,
        used: usize,
        submesh: usize,
        boundary: u16,
    ) -> Vec<Reached> {
        if layer == self.table.n_layers {
            return vec![Reached {
                sum: 0.0,
                step: 0.0,
                max: 0.0,
                n_stages: 0,
                transfer: 0.0,
                place: None,
            }];
        }
        let mut reached: Vec<Reached> = Vec::new();
        for (head, &(to, boundary_in)) in self.heads.iter().enumerate() {
            let slot = used * self.heads.len() + head;
            if slots[slot].is_empty() {
                continue;
            }
            let Some(transfer) = (self.transfer)(submesh, boundary, to, boundary_in) else {
                continue;
            };
            for (index, label) in slots[slot].iter().enumerate() {
                let new = Reached {
                    sum: label.sum + transfer,
                    step: label.step,
                    max: label.max,
                    n_stages: label.n_stages,
                    transfer,
                    place: Some(Place {
                        layer: layer as u32,
                        slot: slot as u32,
                        index: index as u32,
                    }),
                };
                let beats = |a: &Reached, b: &Reached| {
                    self.stands_in(a.n_stages, b.n_stages)
                        && a.sum <= b.sum
                        && a.step <= b.step
                        && a.transfer <= b.transfer
                };
                if !reached.iter().any(|old| beats(old, &new)) {
                    reached.retain(|old| !beats(&new, old));
                    reached.push(new);
                }
            }
        }
        reached
    }

    fn extended(&self, end: usize, c: &Candidate, r: &Reached, threshold: f64) -> Option<Label> {
        let time = c.entry.time_s() + r.transfer;
        let n_stages = r.n_stages + 1;
        let too_many = self.options.n_stages.is_some_and(|n| n_stages as usize > n);
        if time >= threshold || too_many || !c.entry.fits(self.in_flight(r.n_stages as usize)) {
            return None;
        }
        Some(Label {
            sum: r.sum + c.entry.time_s(),
            step: r.step.max(c.entry.step_s),
            max: r.max.max(time),
            n_stages,
            end: end as u32,
            entry: c.index,
            transfer: r.transfer,
            next: r.place,
        })
    }

    fn insert(&self, labels: &mut Vec<Label>, new: Label) {
        let beats = |a: &Label, b: &Label| {
            self.stands_in(a.n_stages, b.n_stages) && a.sum <= b.sum && a.step <= b.step
        };
        if labels.iter().any(|old| beats(old, &new)) {
            return;
        }
        labels.retain(|old| !beats(&new, old));
        labels.push(new);
    }

    fn best_whole(&self, states: &[Vec<Vec<Label>>], cutoff: f64) -> Option<(f64, PipelineChoice)> {
        let n_heads = self.heads.len();
        let n_devices = self.table.n_devices;
        let from = if self.options.allow_unused {
            0
        } else {
            n_devices
        };
        let mut best: Option<(f64, Place)> = None;
        for (slot, labels) in states[0].iter().enumerate().skip(from * n_heads) {
            for (index, label) in labels.iter().enumerate() {
                let right = self
                    .options
                    .n_stages
                    .is_none_or(|n| n == label.n_stages as usize);
                let value = label.sum + label.step;
                if right && value < best.map_or(cutoff, |(v, _)| v) {
                    let place = Place {
                        layer: 0,
                        slot: slot as u32,
                        index: index as u32,
                    };
                    best = Some((value, place));
                }
            }
        }
        let (value, place) = best?;
        Some((value, self.choice(states, place)))
    }

    fn choice(&self, states: &[Vec<Vec<Label>>], first: Place) -> PipelineChoice {
        let mut stages = Vec::new();
        let (mut sum, mut max, mut step) = (0.0, 0.0f64, 0.0f64);
        let mut place = Some(first);
        while let Some(at) = place {
            let label = &states[at.layer as usize][at.slot as usize][at.index as usize];
            let submesh = self.heads[at.slot as usize % self.heads.len()].0;
            let layers = at.layer as usize..label.end as usize;
            let entry = &self.table.get(layers.clone(), submesh)[label.entry as usize];
            let time = entry.time_s() + label.transfer;
            (sum, max, step) = (sum + time, max.max(time), step.max(entry.step_s));
            stages.push(StageChoice {
                layers,
                submesh,
                entry: label.entry as usize,
                tag: entry.tag,
                in_flight: self.in_flight(label.n_stages as usize - 1),
                transfer_s: label.transfer,
                time_s: time,
                share_bytes: None,
            });
            place = label.next;
        }
        let repeats = self.options.schedule.repeats(self.options.microbatches);
        let total = sum + repeats * max + step;
        PipelineChoice {
            stages,
            cost: PipelineCost {
                sum_s: sum,
                max_s: max,
                step_s: step,
                total_s: total,
            },
            lower_bound_s: total,
            n_thresholds: 0,
        }
    }

    /// The least sum of the layers before each layer, with each number of devices, if sending
    /// were free and memory were that of a last stage.
    fn least_before(&self, threshold: f64) -> Least {
        let (n_layers, n_devices) = (self.table.n_layers, self.table.n_devices);
        let mut least = Least {
            width: n_devices + 1,
            values: vec![f64::INFINITY; (n_layers + 1) * (n_devices + 1)],
        };
        least.values[0] = 0.0;
        if self.options.allow_unused {
            least.values[..=n_devices].fill(0.0);
        }
        for end in 1..=n_layers {
            for start in 0..end {
                for (submesh, &n) in self.table.submeshes.iter().enumerate() {
                    let usable = self.table.get(start..end, submesh).iter();
                    let usable =
                        usable.filter(|e| e.time_s() < threshold && e.fits(self.in_flight(0)));
                    let own = usable.map(StageEntry::time_s).fold(f64::INFINITY, f64::min);
                    if own.is_finite() {
                        least.extend(start, end, n, own);
                    }
                }
            }
        }
        least
    }

    /// The plan that comes nearest to fitting, and where it does not.
    fn why_not(&self) -> NoPlan {
        let (n_layers, n_devices) = (self.table.n_layers, self.table.n_devices);
        // By layer and devices: (bytes missing, stages, the worst stage).
        let mut states: Vec<Vec<Vec<Shortfall>>> =
            vec![vec![Vec::new(); n_devices + 1]; n_layers + 1];
        states[n_layers][0].push(Shortfall::default());
        for end in (1..=n_layers).rev() {
            for used in 0..=n_devices {
                let behind = std::mem::take(&mut states[end][used]);
                for (start, submesh, entry) in self.all_ending(end) {
                    let now = used + self.table.submeshes[submesh];
                    if now <= n_devices {
                        for b in &behind {
                            let new = self.lengthened(b, start..end, submesh, &entry);
                            self.insert_shortfall(&mut states[start][now], new);
                        }
                    }
                }
            }
        }
        let from = if self.options.allow_unused {
            0
        } else {
            n_devices
        };
        let whole = states[0][from..].iter().flatten();
        let right = whole.filter(|s| self.options.n_stages.is_none_or(|n| n == s.n_stages));
        match right.min_by_key(|s| s.missing) {
            Some(Shortfall {
                n_stages,
                worst: Some(worst),
                ..
            }) => NoPlan::Memory {
                n_stages: *n_stages,
                layers: worst.layers.clone(),
                submesh: worst.submesh,
                in_flight: worst.in_flight,
                needed_bytes: worst.needed,
                capacity_bytes: worst.capacity,
            },
            _ => NoPlan::NoTiling,
        }
    }

    fn all_ending(&self, end: usize) -> impl Iterator<Item = (usize, usize, StageEntry)> {
        let tails = self.ending[end].iter().zip(&self.tails);
        tails.flat_map(|(candidates, tail)| candidates.iter().map(|c| (c.start, tail.0, c.entry)))
    }

    fn lengthened(
        &self,
        b: &Shortfall,
        layers: Range<usize>,
        submesh: usize,
        e: &StageEntry,
    ) -> Shortfall {
        let in_flight = self.in_flight(b.n_stages);
        let needed = e.bytes(in_flight);
        let missing = needed.saturating_sub(u128::from(e.capacity_bytes));
        let mut new = b.clone();
        new.n_stages += 1;
        if missing > new.missing {
            new.missing = missing;
            new.worst = Some(Worst {
                layers,
                submesh,
                in_flight,
                needed,
                capacity: e.capacity_bytes,
            });
        }
        new
    }

    fn insert_shortfall(&self, list: &mut Vec<Shortfall>, new: Shortfall) {
        let beats = |a: &Shortfall, b: &Shortfall| {
            a.missing <= b.missing && self.stands_in(a.n_stages as u32, b.n_stages as u32)
        };
        if !list.iter().any(|old| beats(old, &new)) {
            list.retain(|old| !beats(&new, old));
            list.push(new);
        }
    }
}

/// How far a plan of the last layers is from fitting.
#[derive(Clone, Debug, Default)]
struct Shortfall {
    missing: u128,
    n_stages: usize,
    worst: Option<Worst>,
}

#[derive(Clone, Debug)]
struct Worst {
    layers: Range<usize>,
    submesh: usize,
    in_flight: u64,
    needed: u128,
    capacity: u64,
}

/// Least sums by (layers before, devices for them).
struct Least {
    width: usize,
    values: Vec<f64>,
}

impl Least {
    fn at(&self, layer: usize, devices: usize) -> f64 {
        self.values[layer * self.width + devices]
    }

    fn extend(&mut self, start: usize, end: usize, devices: usize, own: f64) {
        let (before, after) = self.values.split_at_mut(end * self.width);
        let from = &before[start * self.width..(start + 1) * self.width];
        let to = &mut after[..self.width];
        for (old, new) in to.iter_mut().skip(devices).zip(from) {
            *old = old.min(new + own);
        }
    }
}
