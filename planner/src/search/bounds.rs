//! Bounds: times that no stage of a sequence of layers can beat, whatever its layers choose.
//!
//! The objective of a pipeline of p stages with times t for a microbatch and s once per step is
//! `sum t + r max t + max s`. With R = r + p and y = t + s / R that is at least
//! `sum y + r max y`, because the work once per step then counts `(sum s + r max s) / R` times, no
//! more than `max s`. So a table of such y bounds time and work once per step together, by the
//! same dynamic program.
//!
//! For each stage a Lagrangian bounds `m t + s`: with a price on each byte, what costs least less
//! the price of all bytes that a device has is no more than what the fastest costs that fits. What
//! is saved for the backward pass counts as often as microbatches are in flight. The price of both
//! together is a concave function of the price of bytes that live for the step and that of bytes
//! saved, so what was found for many microbatches in flight also bounds stages that have few.
//!
//! Source of the bound: Everett 1963, Generalized Lagrange multiplier method; Fisher 1981.

use super::busiest::{busiest, fullest};
use super::candidates::Known;
use super::interleaved::Ring;
use super::larger::LeastTimes;
use super::{Candidate, Search};
use crate::layer_model::QUANTUM_S;
use std::collections::BTreeMap;

/// The least of `m t + s` and the price of bytes, by sequence of layers.
pub(super) struct Priced {
    /// Seconds per byte that lives for the step.
    pub(super) price: f64,
    /// A byte saved for the backward pass costs so many times as much; 0 for nothing.
    pub(super) in_flight: u64,
    /// Seconds, by sequence; `None` where it cannot be run.
    pub(super) least: Vec<Option<f64>>,
}

impl Priced {
    /// Objectives in quanta are sums of so many rounded costs a layer.
    pub(super) fn new(
        price: f64,
        in_flight: u64,
        objectives: &[Option<u64>],
        n_layers: usize,
    ) -> Priced {
        let rounding = QUANTUM_S * 100.0 * n_layers as f64;
        let seconds = |o: &Option<u64>| o.map(|o| o as f64 * QUANTUM_S - rounding);
        Priced {
            price,
            in_flight,
            least: objectives.iter().map(seconds).collect(),
        }
    }
}

/// The bounds of a candidate.
#[derive(Default)]
pub(super) struct Bounds {
    /// Under prices on what lives for the step, ascending and from 0, and with nothing saved; or,
    /// where nothing can be recomputed, with what is saved of one microbatch.
    pub(super) fixed: Vec<Priced>,
    /// Under prices on all memory.
    pub(super) of_all: Vec<Priced>,
}

impl Bounds {
    /// Seconds of `m` microbatches and once per step that no stage of a sequence takes less than
    /// with `n` microbatches in flight and `capacity` bytes.
    pub(super) fn least_s(
        &self,
        known: Option<&Known>,
        sequence: usize,
        n: u64,
        capacity: f64,
    ) -> Option<f64> {
        let mut best = None::<f64>;
        let transient = known.and_then(|k| k.transient.get(sequence));
        let capacity = capacity - transient.unwrap_or(&0.0);
        for b in self.fixed.iter().chain(self.of_memory(known)) {
            let least = self.priced_s(known, sequence, b.price, n)? - b.price * capacity;
            best = Some(best.map_or(least, |s| s.max(least)));
        }
        best.map(|s| s.max(0.0))
    }

    /// The bounds under prices on all memory.
    pub(super) fn of_memory<'b>(
        &'b self,
        known: Option<&'b Known>,
    ) -> impl Iterator<Item = &'b Priced> {
        let known = known.map_or(&[][..], |known| &known.bounds);
        self.of_all.iter().chain(known)
    }

    /// Seconds of all microbatches and once per step, with this price on bytes, that no stage of a
    /// sequence takes less than with `n` microbatches in flight. By `n` that is concave, so what
    /// lies between two numbers that were priced is no less than the line between them.
    pub(super) fn priced_s(
        &self,
        known: Option<&Known>,
        sequence: usize,
        price: f64,
        n: u64,
    ) -> Option<f64> {
        let (mut below, mut above) = ((0, self.fixed_s(sequence, price)?), None);
        for b in self.of_memory(known).filter(|b| b.price == price) {
            let point = (b.in_flight, b.least[sequence]?);
            match point.0 <= n {
                true if point.0 >= below.0 => below = (point.0, point.1.max(below.1)),
                false if above.is_none_or(|(most, _)| point.0 < most) => above = Some(point),
                _ => {}
            }
        }
        let Some(above) = above else {
            return Some(below.1);
        };
        let part = (n - below.0) as f64 / (above.0 - below.0) as f64;
        Some(part * above.1 + (1.0 - part) * below.1)
    }

    /// The least that a price on bytes that live for the step leads to, with nothing saved.
    fn fixed_s(&self, sequence: usize, price: f64) -> Option<f64> {
        let lower = self
            .fixed
            .iter()
            .filter(|b| b.price <= price && b.in_flight == 0);
        let seconds = lower.filter_map(|b| b.least[sequence]);
        Some(seconds.fold(0.0, f64::max))
    }
}

impl Search<'_> {
    /// Numbers of stages whose pipelines over some of the submeshes (indices) are bounded together:
    /// the number, where it is one, and the most. What is done once per step counts the more, the
    /// fewer stages share it ([`rounds`]), so each number has a bound of its own where layers times
    /// devices are few; for many that would take minutes.
    pub(super) fn counts(&self, submeshes: &[usize]) -> Vec<(Option<usize>, usize)> {
        let sizes = submeshes.iter().map(|&i| self.submeshes[i].n_devices);
        let most = self.cluster.n_devices() / sizes.min().unwrap_or(1).max(1);
        let most = (most as usize).clamp(1, self.layers().kind.len().max(1));
        match self.mixes_few() {
            true => (1..=most).map(|n| (Some(n), n)).collect(),
            false => vec![(None, most)],
        }
    }

    /// Seconds for one microbatch, with its part of the work once per step, that no stage of a
    /// sequence takes less than: y of the module header for this R.
    pub(super) fn least_stage_s(
        &self,
        candidate: &Candidate,
        sequence: usize,
        n: u64,
        rounds: f64,
    ) -> Option<f64> {
        let time = candidate.relaxed[sequence]?;
        let m = candidate.m;
        let (known, capacity) = (candidate.known(), candidate.capacity);
        let whole = candidate.bounds.least_s(known, sequence, n, capacity)?;
        // t + s / R lies between t and t + s / m.
        let part = (m / rounds).min(1.0);
        Some(time.max(part * (whole / m) + (1.0 - part) * time))
    }
}

/// How often a stage's time counts in pipelines of so many stages where all are alike, so that work
/// once per step is worth its part of it: R of the module header. The largest time counts `repeats`
/// times beside the sum.
pub(super) fn rounds(n_stages: usize, m: u32, repeats: f64) -> f64 {
    (repeats + n_stages as f64).max(f64::from(m))
}

/// The least that all layers of a candidate take, however they are cut into stages.
pub(super) struct LeastSums {
    /// Seconds of a microbatch.
    pub(super) time_s: f64,
    /// The same, and of each layer by itself.
    pub(super) times: LeastTimes,
    /// By the candidate's bounds under prices on what lives for the step: seconds of all
    /// microbatches and once per step, with these prices.
    whole: Vec<f64>,
}

/// A ring of a candidate with what its bounds need.
#[derive(Clone, Copy)]
pub(super) struct RingOf<'c> {
    pub(super) ring: Ring,
    pub(super) candidate: &'c Candidate,
    pub(super) m: u32,
    /// Seconds of sending a microbatch through all stages.
    pub(super) sent_s: f64,
}

/// The least sum of `rounds t + s` over all layers, by rounds.
type SumOf<'f> = dyn Fn(f64) -> f64 + 'f;
/// The same of a sequence of one layer, where it can be run.
type SingleOf<'f> = dyn Fn(usize, f64) -> Option<f64> + 'f;

/// The bound on a ring that follows from how many layers its longest stage has.
#[derive(Clone, Copy, Default)]
struct Longest {
    /// Layers that no stage has more of; 0 where nothing is known.
    n_layers: usize,
    /// Seconds of a microbatch that the stage which has as many takes at least.
    stage_s: f64,
    /// The same of all stages of its mesh, which have a layer each at least.
    mesh_s: f64,
}

/// A price on bytes and what follows from it.
#[derive(Clone, Copy)]
struct OfPrice {
    /// Seconds per byte.
    price: f64,
    /// The least cost of the busiest mesh with this price, as [`busiest`] says; 0 where nothing is
    /// known.
    busiest: f64,
}

impl RingOf<'_> {
    /// Seconds that no pipeline of the ring can beat whose stages take `sum_s` together, those of
    /// one mesh `busiest_s` and one of them `largest_s`, with sending.
    fn total_s(&self, sum_s: f64, busiest_s: f64, largest_s: f64) -> f64 {
        let busiest_s = busiest_s.max(sum_s / self.ring.n_meshes as f64);
        let largest_s = largest_s.max(sum_s / self.ring.n_stages() as f64);
        let latency = self.ring.latency(self.m);
        latency.total_s(sum_s, busiest_s, largest_s, 0.0)
    }

    /// How often a stage's time counts at least, beside its work once per step, where meshes
    /// differ: the work of a mesh then counts no more than once.
    fn rounds(&self) -> f64 {
        let latency = self.ring.latency(self.m);
        self.ring.n_meshes as f64 + latency.busiest + latency.slowest
    }
}

impl Search<'_> {
    /// `None` where no stages cover the layers.
    pub(super) fn least_sums(&self, candidate: &Candidate) -> Option<LeastSums> {
        let fixed = candidate.bounds.fixed.iter();
        let whole = fixed.map(|b| self.least_cut(&b.least));
        let times = self.least_times(candidate)?;
        Some(LeastSums {
            time_s: times.sum_s,
            times,
            whole: whole.collect::<Option<_>>()?,
        })
    }

    /// Seconds of a microbatch that all layers take at least, however they are cut, and that each
    /// takes by itself; `None` where no stages cover them.
    pub(super) fn least_times(&self, candidate: &Candidate) -> Option<LeastTimes> {
        let sum_s = self.least_cut(&candidate.relaxed)?;
        let mut layers_s = vec![0.0; self.layers().kind.len()];
        for &((start, end), sequence) in &self.sequences.ranges {
            if end == start + 1 {
                layers_s[start] = candidate.relaxed[sequence].unwrap_or(0.0);
            }
        }
        Some(LeastTimes { sum_s, layers_s })
    }

    /// The least sum over all ways to cut the layers, of figures by sequence.
    fn least_cut(&self, of_sequence: &[Option<f64>]) -> Option<f64> {
        let n_layers = self.layers().kind.len();
        let mut ranges: Vec<(usize, usize, f64)> = Vec::new();
        for &((start, end), sequence) in &self.sequences.ranges {
            ranges.extend(of_sequence[sequence].map(|s| (start, end, s)));
        }
        // Every range begins where shorter sums are complete.
        ranges.sort_by_key(|r| (r.0, r.1));
        let mut least = vec![f64::INFINITY; n_layers + 1];
        least[0] = 0.0;
        for (start, end, seconds) in ranges {
            least[end] = least[end].min(least[start] + seconds);
        }
        Some(least[n_layers]).filter(|s| s.is_finite())
    }

    /// Seconds that no pipeline of a ring can beat. Two bounds of one kind, each with the bytes of
    /// a device for the stages of a mesh together:
    ///
    /// - on the mean of its p meshes. With R = m + (p - 1) / v it costs at least
    ///   `sum (R t + s) / p`;
    /// - with y = t + s / R and R = m + p - 1 as the schedule counts a sum, the busiest mesh and
    ///   the largest stage; the busiest has whole layers.
    pub(super) fn ring_least_s(&self, of: RingOf<'_>, sums: &LeastSums) -> f64 {
        let RingOf {
            ring, candidate, m, ..
        } = of;
        let longest_s = sums.times.longest_s(ring.n_stages());
        let mut most = ring.least_s(sums.time_s + of.sent_s, longest_s, m);
        for (b, whole) in candidate.bounds.fixed.iter().zip(&sums.whole) {
            let sum = |rounds: f64| whole + (rounds - candidate.m) * sums.time_s;
            let cost = |sequence: usize, rounds: f64| {
                let time = candidate.relaxed[sequence]?;
                Some(b.least[sequence]? + (rounds - candidate.m) * time)
            };
            let of_price = OfPrice {
                price: b.price,
                busiest: 0.0,
            };
            let (longest, all) = (Longest::default(), f64::INFINITY);
            most = most.max(self.ring_total_s(of, of_price, longest, (&sum, &cost), all));
        }
        most
    }

    /// The same with what prices on all memory say of stages with their microbatches in flight.
    /// Worth its time only for what was priced.
    ///
    /// Stages with few in flight could have most of the layers, if only their memory counted; then
    /// they take long. So the bound is the least over how many layers the longest stage has. Where
    /// it is `enough` or more, so is what is returned, which then need not be all of it.
    pub(super) fn priced_ring_least_s(&self, of: RingOf<'_>, enough: f64) -> f64 {
        let RingOf {
            ring, candidate, m, ..
        } = of;
        let options = ring.options(m);
        let in_flight: Vec<u64> = (0..ring.n_stages())
            .map(|stage| options.in_flight(stage, ring.n_stages()))
            .collect();
        let fewest = in_flight.iter().copied().min().unwrap_or(0);
        let kinds = &self.layers().kind;
        let stages: Vec<(usize, u64)> = in_flight.iter().copied().enumerate().collect();
        let of_mesh = |mesh: usize| ring.meshes().of_mesh(mesh, &stages).copied().collect();
        let of_meshes: Vec<Vec<(usize, u64)>> = (0..ring.n_meshes).map(of_mesh).collect();
        let cuts = self.cuts(&in_flight);
        let bounds = candidate.bounds.of_memory(candidate.known());
        let of_price = |b: &Priced| {
            let of_number = |&n: &u64| -> Vec<f64> {
                let all = 0..self.sequences.len();
                let own = all.map(|s| candidate.priced_s(s, b.price, n));
                own.map(|s| s.unwrap_or(f64::INFINITY)).collect()
            };
            (b.price, cuts.numbers.iter().map(of_number).collect())
        };
        // By price on bytes, and by number in flight and sequence the seconds of all microbatches
        // and once per step.
        let mut bounds: Vec<(f64, Vec<Vec<f64>>)> = bounds.map(of_price).collect();
        let relaxed = candidate.relaxed.iter();
        let relaxed: Vec<f64> = relaxed.map(|s| s.unwrap_or(f64::INFINITY)).collect();
        let Some(time_s) = self.least_cut(&candidate.relaxed) else {
            return f64::INFINITY;
        };
        let mut least = enough;
        for longest in self.longest(of) {
            let sum_s = time_s + of.sent_s;
            let busiest_s = longest.mesh_s.max(sum_s / ring.n_meshes as f64);
            let largest_s = longest.stage_s.max(sum_s / ring.n_stages() as f64);
            let mut most = ring.latency(m).total_s(sum_s, busiest_s, largest_s, 0.0);
            // With more layers in a stage it takes longer yet.
            if most >= least {
                break;
            }
            let mut best = 0;
            for (i, (price, own)) in bounds.iter().enumerate() {
                let cost = |sequence: usize, n: u64, rounds: f64| {
                    let of_number = &own[cuts.numbers.binary_search(&n).ok()?];
                    let more = (rounds - candidate.m) * relaxed[sequence];
                    Some(of_number[sequence] + more).filter(|s| s.is_finite())
                };
                let sum = |rounds: f64| {
                    let of_number = |own: &Vec<f64>| -> Vec<f64> {
                        let all = own.iter().zip(&relaxed);
                        let sums = all.map(|(s, t)| s + (rounds - candidate.m) * t);
                        // What cannot be run has no number where nothing is added.
                        let known = |s: f64| if s.is_finite() { s } else { f64::INFINITY };
                        sums.map(known).collect()
                    };
                    let figures: Vec<Vec<f64>> = own.iter().map(of_number).collect();
                    cuts.least(longest.n_layers, &figures)
                };
                let single = |sequence: usize, rounds: f64| cost(sequence, fewest, rounds);
                let rounds = of.rounds();
                let busiest = busiest(kinds, &of_meshes, longest.n_layers, &|kind, n| {
                    cost(*self.sequences.single.get(kind)?, n, rounds)
                });
                let of_price = OfPrice {
                    price: *price,
                    busiest: busiest.unwrap_or(0.0),
                };
                let total_s = self.ring_total_s(of, of_price, longest, (&sum, &single), least);
                if total_s > most {
                    (most, best) = (total_s, i);
                }
                if most >= least {
                    break;
                }
            }
            // What says most of one number of layers does of the next, too.
            if best > 0 {
                bounds.swap(0, best);
            }
            least = least.min(most);
        }
        least
    }

    /// The numbers of layers that the longest stage of a ring may have, ascending.
    fn longest(&self, of: RingOf<'_>) -> Vec<Longest> {
        let (n_layers, n_stages) = (self.layers().kind.len(), of.ring.n_stages());
        let v = f64::from(of.ring.schedule.virtual_stages());
        let mut by_length: BTreeMap<usize, f64> = BTreeMap::new();
        for &((start, end), sequence) in &self.sequences.ranges {
            let time_s = of.candidate.relaxed[sequence].unwrap_or(f64::INFINITY);
            let least = by_length.entry(end - start).or_insert(f64::INFINITY);
            *least = least.min(time_s);
        }
        let shortest_s = by_length.get(&1).copied().unwrap_or(0.0);
        let most = (n_layers + 1).saturating_sub(n_stages);
        let lengths = by_length.range(n_layers.div_ceil(n_stages)..=most.max(1));
        let mut stage_s = 0.0f64;
        let longest = lengths.map(|(&n_layers, &least_s)| {
            // A stage takes no less than a part of it.
            stage_s = stage_s.max(least_s);
            Longest {
                n_layers,
                stage_s,
                mesh_s: stage_s + (v - 1.0) * shortest_s,
            }
        });
        longest.filter(|l| l.stage_s.is_finite()).collect()
    }

    /// The two bounds of a ring under a price on bytes, for sums over all layers of
    /// `rounds t + s` with this price, and that of single layers, where the longest stage is so
    /// long. Where they are `enough` or more, what is returned is so too, and need not be all.
    fn ring_total_s(
        &self,
        of: RingOf<'_>,
        OfPrice { price, busiest }: OfPrice,
        longest: Longest,
        (sum, single): (&SumOf<'_>, &SingleOf<'_>),
        enough: f64,
    ) -> f64 {
        let RingOf {
            ring, candidate, m, ..
        } = of;
        let p = ring.n_meshes as f64;
        let transient = candidate.known().into_iter().flat_map(|k| {
            let single = self.sequences.single.iter();
            single.filter_map(|&s| k.transient.get(s).copied())
        });
        // On every mesh that of some layer at least.
        let transient = transient.reduce(f64::min).unwrap_or(0.0);
        let bytes = price * (candidate.capacity - transient);
        let mean_of = |rounds: f64| (sum(rounds) + rounds * of.sent_s) / p - bytes;
        // The longest stage and its mesh take no less than the mean, and no less than it does. Of
        // the sum of all that leaves p rounds of m.
        let (latency, of_all) = (ring.latency(m), mean_of(f64::from(m)));
        let slowest_s = latency.slowest * longest.stage_s;
        let of_sum = of_all * (p / f64::from(m)).min(1.0);
        let of_longest = of_sum + latency.busiest * longest.mesh_s + slowest_s;
        let mut most = of_longest.max(of_all + slowest_s);
        if most < enough {
            most = most.max(mean_of(ring.rounds(m)));
        }
        if most >= enough {
            return most;
        }
        let rounds = of.rounds();
        let v = f64::from(ring.schedule.virtual_stages());
        let sent_of_mesh = of.sent_s * ((v - 1.0) / ring.n_stages() as f64);
        let single = |&s: &usize| single(s, rounds);
        let costs = self.sequences.single.iter().map(single);
        // Where the cuts are pinned, single layers were not priced.
        let costs = costs.collect::<Option<Vec<f64>>>();
        let costs = costs.filter(|costs| !costs.is_empty());
        let busiest = costs.map_or(busiest, |costs| {
            fullest(&self.layers().kind, &costs, ring.n_meshes).max(busiest)
        });
        let sum_s = (sum(rounds) - p * bytes) / rounds + of.sent_s;
        let busiest_s = (busiest - bytes) / rounds + sent_of_mesh;
        let busiest_s = busiest_s.max(longest.mesh_s);
        most.max(of.total_s(sum_s.max(0.0), busiest_s, longest.stage_s))
    }

    /// The ways to cut the layers into stages with so many microbatches in flight each.
    fn cuts(&self, in_flight: &[u64]) -> Cuts {
        let n_layers = self.layers().kind.len();
        let mut numbers = in_flight.to_vec();
        numbers.sort_unstable();
        numbers.dedup();
        let place = |n: &u64| numbers.partition_point(|other| other < n);
        let mut by_start: Vec<Vec<(usize, usize)>> = vec![Vec::new(); n_layers];
        for &((start, end), sequence) in &self.sequences.ranges {
            by_start[start].push((end, sequence));
        }
        by_start.iter_mut().for_each(|ends| ends.sort_unstable());
        Cuts {
            by_stage: in_flight.iter().map(place).collect(),
            by_start,
            numbers,
        }
    }
}

/// The ways to cut layers into stages.
struct Cuts {
    /// The numbers of microbatches that stages have in flight, ascending.
    numbers: Vec<u64>,
    /// By stage, which of them it has.
    by_stage: Vec<usize>,
    /// By the first layer of a stage, what it may be: the layer behind its last, ascending, and its
    /// sequence.
    by_start: Vec<Vec<(usize, usize)>>,
}

impl Cuts {
    /// The least sum over all ways to cut the layers into these stages, of at most `longest` layers
    /// each, of figures by number in flight and sequence; infinite where a stage cannot be so.
    fn least(&self, longest: usize, figures: &[Vec<f64>]) -> f64 {
        let (n_layers, n_stages) = (self.by_start.len(), self.by_stage.len());
        if n_stages > n_layers {
            return f64::INFINITY;
        }
        let mut least = vec![f64::INFINITY; n_layers + 1];
        let mut next = least.clone();
        least[0] = 0.0;
        for (stage, &number) in self.by_stage.iter().enumerate() {
            let figures = &figures[number];
            next.fill(f64::INFINITY);
            // The stages behind have a layer each at least, and `longest` at most.
            let behind = n_stages - stage - 1;
            let most_end = n_layers - behind;
            let least_end = n_layers.saturating_sub(behind.saturating_mul(longest));
            let starts = least.iter().enumerate().take(most_end).skip(stage);
            for (start, &before) in starts {
                if before.is_infinite() {
                    continue;
                }
                let ends = &self.by_start[start];
                let from = ends.partition_point(|(end, _)| *end < least_end);
                let last = most_end.min(start.saturating_add(longest));
                for &(end, sequence) in ends[from..].iter().take_while(|(end, _)| *end <= last) {
                    next[end] = next[end].min(before + figures[sequence]);
                }
            }
            std::mem::swap(&mut least, &mut next);
        }
        least[n_layers]
    }
}
