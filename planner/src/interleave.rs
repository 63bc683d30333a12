//! Several stages on one mesh: which entry of the stage table each of them takes when they
//! share its memory.
//!
//! The cuts are given (see `search::interleaved`). With t_k the time of stage k, s_k its time
//! once per step, m microbatches and p meshes, a choice costs
//!
//! ```text
//!   sum_k t_k + (m - p) max over meshes of (sum of t_k over its stages)
//!             + (p - 1) max_k t_k + max over meshes of (sum of s_k over its stages)
//! ```
//!
//! with the [`Latency`] of interleaved 1F1B, which gives the two factors; the other schedules'
//! latencies give theirs. A choice fits when on every mesh the sum of static + in_flight * saved
//! over its stages and the largest transient are at most the capacity, with the microbatches in
//! flight of each of the [moments](ir::schedule::Schedule::moments) that decide: stages have most
//! of them at different times. Where all hold as many bytes the first moment decides; the others
//! are looked at where what was chosen overruns them. Where stages run alike those with earlier
//! layers hold no more than the later ones, since of these most are in flight while the others have
//! most.
//!
//! How: below a threshold on t the stages of a mesh are combined one by one. Under a bound on
//! the mesh's sum of s the least sum of t is best for the rest of the objective, on every mesh by
//! itself; so all bounds are gone through, smallest first. Thresholds go up until the largest t,
//! with the least that the rest can take, costs more than the best choice.
//!
//! Exact where the stages of a mesh have few ways to run together ([`MAX_COMBINATIONS`]), which
//! are all kept. Where they have more, t and s are one number, m t + s, and only what nothing
//! dominates in that, bytes and transient is kept. It is what they weigh where all meshes have
//! the same stages: each then takes the same, and t counts p times in the sum and once in each of
//! the m - p rounds. Ties go to the earlier entry.

use crate::inter_op::{PipelineCost, StageEntry};
use ir::schedule::{Latency, Route};
use rayon::prelude::*;
use smallvec::SmallVec;

/// Ways of the stages of a mesh to run together, up to which t and s are kept apart. With 16
/// entries for each of six stages, as large models have them under memory pressure, so little
/// dominates in both that planning took three times as long.
const MAX_COMBINATIONS: usize = 64;

/// Meshes that share the stages of a pipeline.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meshes {
    /// How many.
    pub n: usize,
    /// Which of them has which stage.
    pub route: Route,
}

impl Meshes {
    /// The values of the stages of mesh `mesh`, of values by stage.
    pub(crate) fn of_mesh<T>(self, mesh: usize, of_stages: &[T]) -> impl Iterator<Item = &T> {
        let stages = self.route.stages_of(mesh, self.n, of_stages.len());
        stages.map(|stage| &of_stages[stage])
    }

    /// The largest sum that the stages of one mesh have, of values by stage.
    fn most(self, of_stages: &[f64]) -> f64 {
        let of_mesh = |i: usize| self.of_mesh(i, of_stages).sum::<f64>();
        (0..self.n).map(of_mesh).fold(0.0, f64::max)
    }
}

/// The cost of stages that take these times for one microbatch, sending included, and once per
/// step, in the order of the pipeline.
pub(crate) fn cost_of_times(
    times: &[f64],
    steps: &[f64],
    meshes: Meshes,
    latency: Latency,
) -> PipelineCost {
    let (sum_s, step_s) = (times.iter().sum(), meshes.most(steps));
    let max_s = times.iter().copied().fold(0.0, f64::max);
    let busiest_s = meshes.most(times);
    PipelineCost {
        sum_s,
        max_s,
        step_s,
        total_s: latency.total_s(sum_s, busiest_s, max_s, step_s),
    }
}

/// A stage with its ways to run.
pub(crate) struct SharedStage<'a> {
    pub entries: &'a [StageEntry],
    /// Microbatches in flight at each moment that decides on its mesh's memory.
    pub in_flight: &'a [u64],
    /// Time to send to the next stage, part of t.
    pub transfer_s: f64,
    /// Whether the stage before it on its mesh has the same entries and sends as long. It then
    /// never has fewer microbatches in flight than this one, so of two picks it takes the one that
    /// saves less: the other order costs as much and needs no fewer bytes at any moment.
    pub is_alike: bool,
}

/// Bytes beside transient ones, by moment; more than 64 bits hold are as many as they hold.
type Lasting = SmallVec<[u64; 2]>;

/// The choice.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Shared {
    /// By stage: the index of its entry.
    pub entries: Vec<usize>,
    /// By stage: bytes beside transient ones that it may take at the first moment, its own and as
    /// much of what its mesh has left as an equal part leaves for saved bytes at every moment. A
    /// stage that gives static bytes for saved ones within them may still overrun another moment.
    pub share_bytes: Vec<u64>,
    pub sum_s: f64,
    pub max_s: f64,
    /// The largest sum of a mesh.
    pub step_s: f64,
    /// Its cost.
    pub total_s: f64,
}

/// No choice fits this mesh.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TooLarge {
    pub mesh: usize,
    /// The fewest bytes per device that it needs.
    pub needed_bytes: u128,
}

/// Chooses an entry for each stage.
pub(crate) fn share(
    stages: &[SharedStage<'_>],
    on: Meshes,
    latency: Latency,
    capacity_bytes: u64,
) -> Result<Shared, TooLarge> {
    share_among(stages, on, latency, capacity_bytes, MAX_COMBINATIONS)
}

/// [`share`], exact for meshes whose stages have `combinations` ways or fewer to run together.
fn share_among(
    stages: &[SharedStage<'_>],
    on: Meshes,
    latency: Latency,
    capacity_bytes: u64,
    combinations: usize,
) -> Result<Shared, TooLarge> {
    let meshes: Vec<Vec<&SharedStage<'_>>> =
        (0..on.n).map(|i| on.of_mesh(i, stages).collect()).collect();
    let mut nearest = TooLarge {
        mesh: 0,
        needed_bytes: 0,
    };
    for (mesh, own) in meshes.iter().enumerate() {
        let needed_bytes = least_bytes(own);
        if needed_bytes > u128::from(capacity_bytes) {
            return Err(TooLarge { mesh, needed_bytes });
        }
        if needed_bytes > nearest.needed_bytes {
            nearest = TooLarge { mesh, needed_bytes };
        }
    }
    // The moments that are looked at, by mesh: further ones are added until all are kept to.
    let mut moments: Vec<Moments> = meshes.iter().map(|_| Moments::from_slice(&[0])).collect();
    loop {
        let known: Vec<Mesh<'_, '_>> = meshes.iter().zip(&moments).map(Mesh::of).collect();
        let found = share_at(stages, &known, on, latency, capacity_bytes, combinations);
        // What the least bytes of each moment leave room for may still not fit at all of them.
        let Some(shared) = found else {
            nearest.needed_bytes = nearest.needed_bytes.max(u128::from(capacity_bytes) + 1);
            return Err(nearest);
        };
        let mut holds = true;
        for (own, (mesh, moments)) in meshes.iter().zip(moments.iter_mut().enumerate()) {
            let picks = on.of_mesh(mesh, &shared.entries);
            let picks: Vec<&StageEntry> =
                own.iter().zip(picks).map(|(s, &e)| &s.entries[e]).collect();
            let transient = picks.iter().map(|e| e.transient_bytes).max().unwrap_or(0);
            let (worst, bytes) = fullest(own, &picks);
            if bytes + u128::from(transient) > u128::from(capacity_bytes) {
                moments.push(worst);
                holds = false;
            }
        }
        if holds {
            return Ok(shared);
        }
    }
}

/// Numbers of moments.
type Moments = SmallVec<[usize; 2]>;

/// A mesh's stages, and the moments at which they have to fit.
#[derive(Clone, Copy)]
struct Mesh<'m, 'a> {
    stages: &'m [&'m SharedStage<'a>],
    moments: &'m [usize],
}

impl<'m, 'a> Mesh<'m, 'a> {
    fn of((stages, moments): (&'m Vec<&'m SharedStage<'a>>, &'m Moments)) -> Mesh<'m, 'a> {
        Mesh { stages, moments }
    }

    /// Bytes beside transient ones of a stage's entry, by moment.
    fn lasting(self, stage: &SharedStage<'_>, e: &StageEntry) -> Lasting {
        let of_moment = |&moment: &usize| {
            let bytes = lasting(e, stage.in_flight[moment]);
            u64::try_from(bytes).unwrap_or(u64::MAX)
        };
        self.moments.iter().map(of_moment).collect()
    }
}

/// The moment at which a mesh's stages hold most beside transient bytes, and how many; of equal
/// ones the first.
fn fullest(stages: &[&SharedStage<'_>], picks: &[&StageEntry]) -> (usize, u128) {
    let n = stages.first().map_or(0, |s| s.in_flight.len());
    let bytes = |moment: usize| -> u128 {
        let own = stages.iter().zip(picks);
        own.map(|(s, e)| lasting(e, s.in_flight[moment])).sum()
    };
    let all = (0..n).map(|moment| (moment, bytes(moment)));
    let more = |a: (usize, u128), b: (usize, u128)| if b.1 > a.1 { b } else { a };
    all.reduce(more).unwrap_or((0, 0))
}

/// The same, of meshes that have to fit at some moments alone. `None` where nothing does.
fn share_at(
    stages: &[SharedStage<'_>],
    meshes: &[Mesh<'_, '_>],
    on: Meshes,
    latency: Latency,
    capacity_bytes: u64,
    combinations: usize,
) -> Option<Shared> {
    let times = |s: &SharedStage<'_>| {
        let sent = s.transfer_s;
        s.entries
            .iter()
            .map(move |e| e.time_s() + sent)
            .collect::<Vec<_>>()
    };
    let mut thresholds: Vec<f64> = stages.iter().flat_map(times).collect();
    // Every stage needs an entry below the threshold, and no choice beats the least of each part.
    let least = |of: fn(&StageEntry) -> f64| {
        let of_stage = |s: &SharedStage<'_>| s.entries.iter().map(of).fold(f64::INFINITY, f64::min);
        stages.iter().map(of_stage).collect::<Vec<f64>>()
    };
    let least_times: Vec<f64> = least(StageEntry::time_s)
        .into_iter()
        .zip(stages)
        .map(|(t, s)| t + s.transfer_s)
        .collect();
    let slowest = least_times.iter().copied().fold(0.0, f64::max);
    let least_steps = least(|e| e.step_s);
    let (sum_s, busiest_s) = (least_times.iter().sum(), on.most(&least_times));
    let step_s = on.most(&least_steps);
    thresholds.retain(|t| *t >= slowest);
    thresholds.sort_by(f64::total_cmp);
    thresholds.dedup();
    let microbatches = latency.busiest + on.n as f64;
    let mut best: Option<Shared> = None;
    let mut frontiers: Vec<Option<(usize, Frontier)>> = meshes.iter().map(|_| None).collect();
    for threshold in thresholds {
        let least_s = latency.total_s(sum_s, busiest_s, threshold, step_s);
        if best.as_ref().is_some_and(|b| least_s >= b.total_s) {
            break;
        }
        let meshes = meshes.par_iter().zip(&mut frontiers);
        meshes.for_each(|(own, known)| {
            // Most thresholds let one more entry of some mesh in.
            let allowed = n_allowed(own.stages, threshold);
            if known.as_ref().is_none_or(|(n, _)| *n != allowed) {
                let (capacity, least) = (capacity_bytes, combinations);
                let parts = Frontier::new(*own, threshold, capacity, microbatches, least);
                *known = Some((allowed, parts));
            }
        });
        let known: Vec<&Frontier> = frontiers.iter().flatten().map(|(_, f)| f).collect();
        let Some(picks) = cheapest(&known, latency) else {
            continue;
        };
        let shared = joined(stages, on, &picks, latency, capacity_bytes);
        if best.as_ref().is_none_or(|b| shared.total_s < b.total_s) {
            best = Some(shared);
        }
    }
    best
}

/// Entries for the stages of a mesh.
#[derive(Clone, Debug, Default)]
struct Part {
    transient: u64,
    entries: Vec<usize>,
}

/// Entries for the first stages of a mesh: those for the stages before, and one more.
#[derive(Clone, Debug, Default)]
struct Step {
    /// Sum of t.
    time_s: f64,
    /// Sum of s.
    step_s: f64,
    /// Seconds of all microbatches and once per step.
    weight_s: f64,
    /// By moment, beside transient ones.
    bytes: Lasting,
    transient: u64,
    /// Number of the step for the stages before.
    before: u32,
    entry: u32,
}

impl Step {
    /// No larger in anything.
    fn is_within(&self, other: &Step) -> bool {
        let mut bytes = self.bytes.iter().zip(&other.bytes);
        self.transient <= other.transient && bytes.all(|(a, b)| a <= b)
    }
}

/// The number of entries of a mesh's stages that take no longer than a threshold.
fn n_allowed(stages: &[&SharedStage<'_>], threshold: f64) -> usize {
    let of_stage = |s: &&SharedStage<'_>| {
        let allowed = s.entries.iter();
        allowed
            .filter(|e| e.time_s() + s.transfer_s <= threshold)
            .count()
    };
    stages.iter().map(of_stage).sum()
}

/// Bytes beside transient ones.
fn lasting(e: &StageEntry, in_flight: u64) -> u128 {
    u128::from(e.static_bytes) + u128::from(in_flight) * u128::from(e.saved_bytes_per_microbatch)
}

/// The entries below a threshold that fit and that nothing beats, cheapest first.
struct Frontier {
    /// By number of stages from 1, the entries for the first of them.
    steps: Vec<Vec<Step>>,
}

impl Frontier {
    fn new(
        of: Mesh<'_, '_>,
        threshold: f64,
        capacity: u64,
        microbatches: f64,
        combinations: usize,
    ) -> Frontier {
        let stages = of.stages;
        let ways = stages.iter().map(|s| s.entries.len());
        let is_few = ways.fold(1, usize::saturating_mul) <= combinations;
        let hope = match is_few {
            true => None,
            false => Hope::of(of, threshold, capacity, microbatches),
        };
        let mut steps: Vec<Vec<Step>> = Vec::with_capacity(stages.len());
        let nothing = [Step {
            bytes: of.moments.iter().map(|_| 0).collect(),
            ..Step::default()
        }];
        for (number_of, stage) in stages.iter().enumerate() {
            let before = steps.last().map_or(&nothing[..], |s| s);
            let alike = number_of.checked_sub(1).filter(|_| stage.is_alike);
            let all: Vec<Lasting> = stage.entries.iter().map(|e| of.lasting(stage, e)).collect();
            let with = |before_it: u32, entry: u32| {
                let part = &before[before_it as usize];
                let (e, own) = (&stage.entries[entry as usize], &all[entry as usize]);
                let time_s = part.time_s + e.time_s() + stage.transfer_s;
                let step_s = part.step_s + e.step_s;
                Step {
                    time_s,
                    step_s,
                    weight_s: microbatches * time_s + step_s,
                    bytes: part.bytes.iter().zip(own).map(|(a, b)| a + b).collect(),
                    transient: part.transient.max(e.transient_bytes),
                    before: before_it,
                    entry,
                }
            };
            // Most of them are beaten: until that is known, their weights and numbers are enough.
            let mut new: Vec<(f64, u32, u32)> = Vec::new();
            for (number, part) in (0..).zip(before) {
                let least = alike.map_or(0, |b| {
                    stages[b].entries[part.entry as usize].saved_bytes_per_microbatch
                });
                for (entry, (e, lasting)) in (0..).zip(stage.entries.iter().zip(&all)) {
                    let is_early = e.saved_bytes_per_microbatch < least;
                    if is_early || e.time_s() + stage.transfer_s > threshold {
                        continue;
                    }
                    let transient = part.transient.max(e.transient_bytes);
                    let Some(left) = capacity.checked_sub(transient) else {
                        continue;
                    };
                    let mut own = part.bytes.iter().zip(lasting);
                    if !own.all(|(a, b)| a.checked_add(*b).is_some_and(|n| n <= left)) {
                        continue;
                    }
                    let step = with(number, entry);
                    let hope = hope.as_ref();
                    if hope.is_none_or(|hope| hope.is_left(number_of + 1, &step)) {
                        new.push((step.weight_s, number, entry));
                    }
                }
            }
            // Of equal ones the earlier stages' cheaper ways first, then the earlier entry.
            new.sort_unstable_by(|a, b| {
                let by_weight = a.0.total_cmp(&b.0);
                by_weight.then_with(|| {
                    let (a, b) = (with(a.1, a.2), with(b.1, b.2));
                    let size = a.bytes.cmp(&b.bytes).then(a.transient.cmp(&b.transient));
                    size.then((a.before, a.entry).cmp(&(b.before, b.entry)))
                })
            });
            let new = new
                .into_iter()
                .map(|(_, before, entry)| with(before, entry));
            let new = match is_few {
                true => new.collect(),
                false => unbeaten(new),
            };
            steps.push(new);
        }
        Frontier { steps }
    }

    /// The entries for all stages.
    fn parts(&self) -> &[Step] {
        self.steps.last().map_or(&[], |s| s)
    }

    /// One of them in full.
    fn part(&self, index: usize) -> Part {
        let last = &self.parts()[index];
        let mut entries = Vec::with_capacity(self.steps.len());
        let mut at = index;
        for steps in self.steps.iter().rev() {
            entries.push(steps[at].entry as usize);
            at = steps[at].before as usize;
        }
        entries.reverse();
        Part {
            transient: last.transient,
            entries,
        }
    }
}

/// The weight that the first stages of a mesh may have so that the mesh can still be as good as one
/// that is known to fit: Lagrange's bound. With a price on memory the rest weighs no less than the
/// least of each stage's seconds and priced bytes, less the price of what there is.
struct Hope {
    /// Seconds per byte.
    price: f64,
    /// By number of stages that are chosen: the least of seconds and priced bytes of the others.
    rest: Vec<f64>,
    /// The most that seconds and priced bytes of all stages may come to.
    limit: f64,
}

impl Hope {
    /// How much more than the known way a mesh may weigh: meshes that weigh nearly the same
    /// differ in what they take once per step.
    const SLACK: f64 = 0.005;

    /// None where no price on memory makes the stages fit, each on its own.
    fn of(of: Mesh<'_, '_>, threshold: f64, capacity: u64, microbatches: f64) -> Option<Hope> {
        let (stages, n_moments) = (of.stages, of.moments.len());
        // Seconds, bytes at the mean of the moments, transient bytes and bytes at each moment of
        // every entry that is allowed.
        let of_stage = |s: &&SharedStage<'_>| {
            let times = s.entries.iter().map(|e| (e, e.time_s() + s.transfer_s));
            let allowed = times.filter(|(_, time_s)| *time_s <= threshold);
            let figures = allowed.map(|(e, time_s)| {
                let weight_s = microbatches * time_s + e.step_s;
                let bytes = of.lasting(s, e);
                let mean = mean(&bytes);
                (weight_s, mean, e.transient_bytes, bytes)
            });
            figures.collect::<Vec<Way>>()
        };
        let ways: Vec<Vec<Way>> = stages.iter().map(of_stage).collect();
        let least_at = |price: f64, ways: &[Way]| -> Option<usize> {
            let priced = |w: &Way| w.0 + price * w.1;
            let least = ways.iter().enumerate();
            let least = least
                .min_by(|(_, a), (_, b)| priced(a).total_cmp(&priced(b)).then(a.1.total_cmp(&b.1)));
            least.map(|(i, _)| i)
        };
        // Seconds of all stages under a price, if they fit.
        let fitting = |price: f64| {
            let (mut weight_s, mut transient) = (0.0, 0u64);
            let mut bytes = vec![0u64; n_moments];
            for ways in &ways {
                let least = &ways[least_at(price, ways)?];
                weight_s += least.0;
                transient = transient.max(least.2);
                bytes
                    .iter_mut()
                    .zip(&least.3)
                    .for_each(|(sum, b)| *sum = sum.saturating_add(*b));
            }
            let fits = bytes
                .iter()
                .all(|b| b.saturating_add(transient) <= capacity);
            fits.then_some(weight_s)
        };
        let mut known_s = fitting(0.0);
        let mut price = 0.0;
        if known_s.is_none() {
            // Powers of two, then the smallest price between two of them that fits.
            let prices = (-60..0).map(|e| 2.0f64.powi(e));
            let mut high = prices.into_iter().find(|&p| fitting(p).is_some())?;
            let mut low = high / 2.0;
            for _ in 0..12 {
                let middle = (low + high) / 2.0;
                match fitting(middle) {
                    Some(_) => high = middle,
                    None => low = middle,
                }
            }
            (known_s, price) = (fitting(high), high);
        }
        let mut rest = vec![0.0; ways.len() + 1];
        for (k, ways) in ways.iter().enumerate().rev() {
            let least = &ways[least_at(price, ways)?];
            rest[k] = rest[k + 1] + least.0 + price * least.1;
        }
        Some(Hope {
            price,
            rest,
            limit: known_s? * (1.0 + Hope::SLACK) + price * capacity as f64,
        })
    }

    /// Whether a way for the first `n` stages may be part of one that is as good.
    fn is_left(&self, n: usize, step: &Step) -> bool {
        step.weight_s + self.price * mean(&step.bytes) + self.rest[n] <= self.limit
    }
}

/// A way of a stage to run: seconds of all microbatches and once per step, bytes at the mean of the
/// moments, transient bytes, and bytes at each moment.
type Way = (f64, f64, u64, Lasting);

/// The mean over the moments.
fn mean(bytes: &[u64]) -> f64 {
    let sum: f64 = bytes.iter().map(|b| *b as f64).sum();
    sum / bytes.len().max(1) as f64
}

/// Those that nothing before them is within: nothing is beaten by what costs more.
fn unbeaten(steps: impl Iterator<Item = Step>) -> Vec<Step> {
    // And of these the numbers of those that nothing is within.
    let mut kept: Vec<Step> = Vec::new();
    let mut smallest: Vec<usize> = Vec::new();
    for step in steps {
        if smallest.iter().any(|&s| kept[s].is_within(&step)) {
            continue;
        }
        smallest.retain(|&s| !step.is_within(&kept[s]));
        smallest.push(kept.len());
        kept.push(step);
    }
    kept
}

/// One part of each mesh: those that cost least together, whatever the largest t below the
/// threshold is. `None` where a mesh has none.
fn cheapest(meshes: &[&Frontier], latency: Latency) -> Option<Vec<Part>> {
    let mut by_step: Vec<(f64, usize, usize)> = Vec::new();
    for (mesh, frontier) in meshes.iter().enumerate() {
        let parts = frontier.parts().iter().enumerate();
        by_step.extend(parts.map(|(i, p)| (p.step_s, mesh, i)));
    }
    by_step.sort_by(|a, b| a.0.total_cmp(&b.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    let time = |(mesh, i): (usize, usize)| meshes[mesh].parts()[i].time_s;
    let mut picks: Vec<Option<usize>> = vec![None; meshes.len()];
    let mut n_without = meshes.len();
    let mut best: Option<(f64, Vec<usize>)> = None;
    for (step_s, mesh, i) in by_step {
        if picks[mesh].is_some_and(|old| time((mesh, old)) <= time((mesh, i))) {
            continue;
        }
        n_without -= usize::from(picks[mesh].is_none());
        picks[mesh] = Some(i);
        if n_without > 0 {
            continue;
        }
        let times = || picks.iter().enumerate();
        let times = || times().filter_map(|(mesh, i)| Some(time((mesh, (*i)?))));
        let (sum_s, busiest_s) = (times().sum(), times().fold(0.0, f64::max));
        let total_s = latency.total_s(sum_s, busiest_s, 0.0, step_s);
        if best.as_ref().is_none_or(|(least, _)| total_s < *least) {
            best = Some((total_s, picks.iter().flatten().copied().collect()));
        }
    }
    let (_, picks) = best?;
    let chosen = meshes.iter().zip(picks);
    Some(chosen.map(|(frontier, i)| frontier.part(i)).collect())
}

/// The fewest bytes that stages of a mesh need at any moment: under each bound on transient bytes
/// the entries that last with the fewest.
fn least_bytes(stages: &[&SharedStage<'_>]) -> u128 {
    let at = |moment: usize| {
        let of_stage = |s: &&SharedStage<'_>, bound: u64| {
            let allowed = s.entries.iter().filter(|e| e.transient_bytes <= bound);
            allowed.map(|e| lasting(e, s.in_flight[moment])).min()
        };
        let bounds = stages.iter().flat_map(|s| s.entries);
        let under = bounds.filter_map(|e| {
            let bound = e.transient_bytes;
            let sum: Option<u128> = stages.iter().map(|s| of_stage(s, bound)).sum();
            Some(sum? + u128::from(bound))
        });
        under.min().unwrap_or(u128::MAX)
    };
    let n = stages.first().map_or(0, |s| s.in_flight.len());
    (0..n).map(at).max().unwrap_or(u128::MAX)
}

fn joined(
    stages: &[SharedStage<'_>],
    on: Meshes,
    picks: &[Part],
    latency: Latency,
    capacity_bytes: u64,
) -> Shared {
    let (mut times, mut steps) = (Vec::new(), Vec::new());
    let mut shared = Shared {
        entries: Vec::with_capacity(stages.len()),
        share_bytes: Vec::with_capacity(stages.len()),
        sum_s: 0.0,
        max_s: 0.0,
        step_s: 0.0,
        total_s: 0.0,
    };
    // What each mesh has left when it holds most.
    let left = (0..on.n).map(|mesh| {
        let own: Vec<&SharedStage<'_>> = on.of_mesh(mesh, stages).collect();
        let pick = &picks[mesh];
        let entries = own.iter().zip(&pick.entries);
        let entries: Vec<&StageEntry> = entries.map(|(s, &e)| &s.entries[e]).collect();
        let (_, bytes) = fullest(&own, &entries);
        u128::from(capacity_bytes).saturating_sub(bytes + u128::from(pick.transient))
    });
    let left: Vec<u128> = left.collect();
    for (k, stage) in stages.iter().enumerate() {
        let (mesh, chunk) = (on.route.mesh_of(k, on.n), k / on.n.max(1));
        let pick = &picks[mesh];
        let e = &stage.entries[pick.entries[chunk]];
        let time = e.time_s() + stage.transfer_s;
        shared.sum_s += time;
        shared.max_s = shared.max_s.max(time);
        times.push(time);
        steps.push(e.step_s);
        // Of what it holds more, it may have more copies at another moment than at the first.
        let at_first = stage.in_flight.first().copied().unwrap_or(1);
        let most = stage.in_flight.iter().copied().max().unwrap_or(1).max(1);
        let part = left[mesh] / pick.entries.len() as u128;
        let own = lasting(e, at_first) + part * u128::from(at_first) / u128::from(most);
        shared.entries.push(pick.entries[chunk]);
        shared
            .share_bytes
            .push(u64::try_from(own).unwrap_or(u64::MAX));
    }
    shared.step_s = on.most(&steps);
    let busiest_s = on.most(&times);
    shared.total_s = latency.total_s(shared.sum_s, busiest_s, shared.max_s, shared.step_s);
    shared
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::plan::ScheduleKind;
    use ir::testing::Rng;

    fn ring(n: usize) -> Meshes {
        let route = Route::Ring;
        Meshes { n, route }
    }

    fn latency(n_meshes: usize, m: u32) -> Latency {
        let kind = ScheduleKind::Interleaved { virtual_stages: 2 };
        kind.schedule().latency(n_meshes, m)
    }

    fn entry(time_s: f64, step_s: f64, bytes: u64, saved: u64, transient: u64) -> StageEntry {
        StageEntry {
            forward_s: time_s / 2.0,
            backward_s: time_s / 2.0,
            step_s,
            static_bytes: bytes,
            saved_bytes_per_microbatch: saved,
            transient_bytes: transient,
            capacity_bytes: u64::MAX,
            boundary_in: 0,
            boundary_out: 0,
            tag: 0,
        }
    }

    fn stage<'a>(entries: &'a [StageEntry], in_flight: &'a [u64]) -> SharedStage<'a> {
        SharedStage {
            entries,
            in_flight,
            transfer_s: 0.5,
            is_alike: false,
        }
    }

    #[test]
    fn stages_of_one_mesh_share_its_memory() {
        // Fast and large, or slow and small: 10 + 3 * 2 = 16 against 4 + 3 * 1 = 7 bytes.
        let entries = [entry(2.0, 0.0, 10, 2, 3), entry(3.0, 0.0, 4, 1, 1)];
        let stages: Vec<_> = (0..4).map(|_| stage(&entries, &[3])).collect();
        let share = |capacity| share(&stages, ring(2), latency(2, 6), capacity);
        // Everything fits: 16 + 16 + 3. A mesh takes 5 for each of the 4 microbatches after the
        // first two, and the second waits for a stage of the first.
        let all = share(35).unwrap();
        assert_eq!(all.entries, [0, 0, 0, 0]);
        assert_eq!((all.sum_s, all.max_s), (4.0 * 2.5, 2.5));
        assert_eq!(all.total_s, 10.0 + 4.0 * 5.0 + 2.5);
        // One byte less: a stage of each mesh is small: 16 + 7 + 3 = 26, 9 bytes to share.
        let one = share(34).unwrap();
        let mut mesh = [one.entries[0], one.entries[2]];
        mesh.sort_unstable();
        assert_eq!(mesh, [0, 1]);
        assert_eq!((one.sum_s, one.max_s), (2.0 * 2.5 + 2.0 * 3.5, 3.5));
        assert_eq!(one.total_s, 12.0 + 4.0 * 6.0 + 3.5);
        let shares: u64 = one.share_bytes[0] + one.share_bytes[2];
        assert_eq!(shares, 16 + 7 + 2 * ((34 - 26) / 2));
        // 7 + 7 + 1 is the least.
        assert_eq!(share(15).unwrap().entries, [1, 1, 1, 1]);
        assert_eq!(
            share(14),
            Err(TooLarge {
                mesh: 0,
                needed_bytes: 15
            })
        );
    }

    /// Every combination in turn. Where not all ways of a mesh are kept, as if it had too many,
    /// what is chosen is as good if nothing is paid once per step, and no better otherwise.
    #[test]
    fn as_good_as_every_combination() {
        let mut rng = Rng::new(1);
        let mut below = |n: u64| rng.below(n);
        for _ in 0..300 {
            let (p, v) = (1 + below(2) as usize, 1 + below(3) as usize);
            let route = Route::ALL[below(2) as usize];
            let on = Meshes { n: p, route };
            let steps = 1 + 11 * below(2);
            let tables: Vec<Vec<StageEntry>> = (0..p * v)
                .map(|_| {
                    (0..1 + below(3))
                        .map(|_| {
                            let time = 1.0 + below(8) as f64;
                            let step = below(steps) as f64;
                            entry(time, step, below(20), below(5), below(9))
                        })
                        .collect()
                })
                .collect();
            // Two moments that differ, or one.
            let n_moments = 1 + below(2) as usize;
            let mut flights: Vec<Vec<u64>> = tables
                .iter()
                .map(|_| (0..n_moments).map(|_| below(4)).collect())
                .collect();
            // In a third of the cases the stages of a mesh are alike, with ever fewer in flight.
            let is_alike = below(3) == 0;
            let mut tables = tables;
            for mesh in (0..p).filter(|_| is_alike) {
                let own: Vec<usize> = route.stages_of(mesh, p, p * v).collect();
                for (&before, &k) in own.iter().zip(&own[1..]) {
                    tables[k] = tables[before].clone();
                    let most = flights[before].clone();
                    let counts = flights[k].iter_mut().zip(most);
                    counts.for_each(|(n, most)| *n = most.min(*n));
                }
            }
            let is_first = |k: usize| k < p;
            let stages = tables.iter().zip(&flights).enumerate();
            let stages = stages.map(|(k, (t, n))| SharedStage {
                is_alike: is_alike && !is_first(k),
                ..stage(t, n)
            });
            let stages: Vec<_> = stages.collect();
            let (m, capacity) = (p as u32 * (1 + below(4) as u32), 20 + below(60));
            let mut best: Option<f64> = None;
            let n: usize = tables.iter().map(Vec::len).product();
            for mut code in 0..n {
                let pick: Vec<&StageEntry> = tables
                    .iter()
                    .map(|t| {
                        let e = &t[code % t.len()];
                        code /= t.len();
                        e
                    })
                    .collect();
                let fits = (0..p).all(|i| {
                    let own = || route.stages_of(i, p, p * v);
                    let transient = own().map(|k| pick[k].transient_bytes).max().unwrap();
                    (0..n_moments).all(|at| {
                        let of = |k: usize| lasting(pick[k], flights[k][at]);
                        let bytes: u128 = own().map(of).sum();
                        bytes + u128::from(transient) <= u128::from(capacity)
                    })
                });
                if fits {
                    let time = |e: &&StageEntry| e.time_s() + 0.5;
                    let sum: f64 = pick.iter().map(time).sum();
                    let largest = pick.iter().map(time).fold(0.0, f64::max);
                    let own = |i: usize| on.of_mesh(i, &pick);
                    let busy = |i: usize| own(i).map(time).sum::<f64>();
                    let busiest = (0..p).map(busy).fold(0.0, f64::max);
                    let step = |i: usize| own(i).map(|e| e.step_s).sum::<f64>();
                    let step = (0..p).map(step).fold(0.0, f64::max);
                    let (rounds, fill) = (f64::from(m) - p as f64, p as f64 - 1.0);
                    let total = sum + rounds * busiest + fill * largest + step;
                    best = Some(best.map_or(total, |b| b.min(total)));
                }
            }
            let found = share(&stages, on, latency(p, m), capacity);
            let total = found.map(|s| s.total_s).ok();
            match (total, best) {
                (Some(a), Some(b)) => assert!((a - b).abs() < 1e-9, "{a} against {b}"),
                (a, b) => assert_eq!(a.is_some(), b.is_some()),
            }
            let found = share_among(&stages, on, latency(p, m), capacity, 0);
            match (found.map(|s| s.total_s).ok(), best) {
                (Some(a), Some(b)) if steps == 1 => assert!((a - b).abs() < 1e-9, "{a}, {b}"),
                (Some(a), Some(b)) => assert!(a > b - 1e-9, "{a} against {b}"),
                (a, b) => assert_eq!(a.is_some(), b.is_some()),
            }
        }
    }

    /// Two stages of a mesh, of which the first has 4 microbatches in flight while the second has
    /// none, else both 2: where one may hold more than the other it is the second, and alike stages
    /// are not looked at in the other order.
    #[test]
    fn what_holds_more_comes_behind() {
        let entries = [entry(2.0, 0.0, 0, 10, 0), entry(3.0, 0.0, 0, 5, 0)];
        let first = [2, 4];
        let second = [2, 0];
        for is_alike in [false, true] {
            let stages = [
                stage(&entries, &first),
                SharedStage {
                    is_alike,
                    ..stage(&entries, &second)
                },
            ];
            let share = |capacity| share(&stages, ring(1), latency(1, 4), capacity);
            assert_eq!(share(40).unwrap().entries, [0, 0]);
            // 2 (5 + 10) = 30 and 4 * 5 = 20 bytes, where the first alone would take 40.
            let mixed = share(30).unwrap();
            assert_eq!(mixed.entries, [1, 0]);
            assert_eq!(mixed.share_bytes, [10, 20]);
            // Of 9 bytes that are left the first may hold but half in more at its first moment.
            assert_eq!(share(39).unwrap().share_bytes, [10 + 2, 20 + 4]);
            assert_eq!(share(29).unwrap().entries, [1, 1]);
            assert_eq!(share(19).unwrap_err().needed_bytes, 20);
        }
    }

    /// With 9 microbatches 0.1 s of each are worth more than 0.8 s once per step; with one they
    /// are not.
    #[test]
    fn what_is_paid_once_counts_once() {
        let entries = [entry(2.0, 0.0, 0, 0, 0), entry(1.9, 0.8, 0, 0, 0)];
        let stages: Vec<_> = (0..2).map(|_| stage(&entries, &[1])).collect();
        let share = |m| share(&stages, ring(1), latency(1, m), 1).unwrap();
        assert_eq!(share(9).entries, [1, 1]);
        assert!((share(9).total_s - (9.0 * 2.0 * 2.4 + 1.6)).abs() < 1e-9);
        assert_eq!(share(1).entries, [0, 0]);
        assert_eq!(share(1).total_s, 5.0);
    }

    /// More combinations than are kept apart: equal meshes still get the best of m t + s.
    #[test]
    fn many_combinations_are_weighed() {
        let entries: Vec<StageEntry> = (0..12)
            .map(|i| {
                let i = i as f64;
                entry(1.0 + 0.01 * i, 3.0 / (1.0 + i), 0, 0, 0)
            })
            .collect();
        let stages: Vec<_> = (0..12).map(|_| stage(&entries, &[1])).collect();
        let (p, m) = (2, 8);
        let found = share(&stages, ring(p), latency(p, m), 1).unwrap();
        let alike = |e: &StageEntry| {
            let t = e.time_s() + 0.5;
            12.0 * t + f64::from(m - 2) * 6.0 * t + t + 6.0 * e.step_s
        };
        let least = entries.iter().map(alike).fold(f64::INFINITY, f64::min);
        assert!(found.total_s <= least + 1e-9, "{} {least}", found.total_s);
        assert!(found.total_s > 0.99 * least, "{} {least}", found.total_s);
    }
}
