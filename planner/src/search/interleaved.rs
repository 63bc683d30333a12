//! Pipelines of interleaved stages: as the pins ask for them, or as a choice of the search.
//!
//! Meshes are equal and of one shape. For each shape and each number of stages on a mesh the
//! layers are cut [evenly](super::even), then the entries are `interleave`'s, which knows that
//! stages share a mesh. Where the number is pinned, cuts of the inter-op DP are tried too, as if
//! every stage had a mesh of its own: it knows memory, but takes a hundred times as long.
//!
//! There are many such rings of meshes for every microbatch size, and most of them lose. One is
//! solved only if the work alone leaves hope: its stages share S seconds of a microbatch, sending
//! included, the busiest of p meshes has no less than S / p of them and the largest of p v stages
//! no less than S / (p v), so by the objective of `interleave` it costs at least
//!
//! ```text
//!   S + (m - p) S / p + (p - 1) S / (p v)
//! ```
//!
//! That is also the bound that a proof has on interleaved stages, solved or not.

use super::bounds::RingOf;
use super::even::even_cuts;
use super::mixes::Rungs;
use super::pipelines::INTERLEAVED_OF_A_SIZE;
use super::{Bounded, Candidate, Pipeline, Search, Solved, nearer};
use crate::PlanError;
use crate::inter_op::{
    self, Hop, InterOpOptions, PipelineChoice, StageChoice, StageEntry, StageTable,
};
use crate::interleave::{Meshes, SharedStage, TooLarge, share};
use ir::plan::ScheduleKind;
use ir::schedule::Latency;
use rayon::prelude::*;
use std::collections::BTreeSet;
use std::ops::Range;

/// Stages on a mesh that the search chooses among: what divides common numbers of layers, up to
/// where the part of the pipeline's bubble that is left is worth less than the sending.
const VIRTUAL: [u32; 9] = [2, 3, 4, 5, 6, 8, 10, 12, 16];

/// [`VIRTUAL`] in words.
pub(super) fn counts() -> String {
    let counts: Vec<String> = VIRTUAL.iter().map(u32::to_string).collect();
    let (last, others) = counts.split_last().expect("there are some");
    format!("{} or {last}", others.join(", "))
}

/// Meshes of one submesh, each with several stages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ring {
    pub(super) submesh: usize,
    pub(super) n_meshes: usize,
    pub(super) schedule: ScheduleKind,
}

impl Ring {
    pub(super) fn n_stages(self) -> usize {
        self.n_meshes * self.schedule.virtual_stages() as usize
    }

    /// Which stages share which mesh.
    pub(super) fn meshes(self) -> Meshes {
        Meshes {
            n: self.n_meshes,
            route: self.schedule.route(),
        }
    }

    pub(super) fn options(self, m: u32) -> InterOpOptions {
        InterOpOptions {
            n_stages: Some(self.n_stages()),
            ..InterOpOptions::new(u64::from(m), self.schedule)
        }
    }

    /// By stage, the microbatches in flight at each of its mesh's moments.
    fn in_flight(self, m: u32) -> Vec<Vec<u64>> {
        let schedule = self.schedule.schedule();
        let of_mesh = |mesh: usize| schedule.moments(mesh, self.n_meshes, m);
        let moments: Vec<Vec<Vec<u32>>> = (0..self.n_meshes).map(of_mesh).collect();
        let of_stage = |stage: usize| {
            let chunk = stage / self.n_meshes.max(1);
            let own = moments[self.mesh_of(stage)].iter();
            own.map(|counts| counts[chunk].into()).collect()
        };
        (0..self.n_stages()).map(of_stage).collect()
    }

    /// The stage before one on the mesh that has both.
    fn before_on_its_mesh(self, stage: usize) -> Option<usize> {
        let (route, p) = (self.schedule.route(), self.n_meshes.max(1));
        let before = (stage / p).checked_sub(1)?;
        Some(route.stage_of(self.mesh_of(stage), before, p))
    }

    fn mesh_of(self, stage: usize) -> usize {
        self.schedule.route().mesh_of(stage, self.n_meshes)
    }

    pub(super) fn latency(self, m: u32) -> Latency {
        self.schedule.schedule().latency(self.n_meshes, m)
    }

    /// How often the stages of a mesh count where all are alike: m + (p - 1) / v.
    pub(super) fn rounds(self, m: u32) -> f64 {
        let latency = self.latency(m);
        let p = self.n_meshes as f64;
        let v = f64::from(self.schedule.virtual_stages().max(1));
        p + latency.busiest + latency.slowest / v
    }

    /// Seconds that no pipeline can beat whose stages take `sum_s` together and the longest
    /// `longest_s`.
    pub(super) fn least_s(self, sum_s: f64, longest_s: f64, m: u32) -> f64 {
        let busiest_s = longest_s.max(sum_s / self.n_meshes as f64);
        let largest_s = longest_s.max(sum_s / self.n_stages() as f64);
        self.latency(m).total_s(sum_s, busiest_s, largest_s, 0.0)
    }
}

impl Search<'_> {
    /// Whether interleaved stages are the search's to choose: where neither the schedule nor
    /// the number of stages is pinned, and all meshes of a size are equal.
    pub(super) fn chooses_interleaving(&self) -> bool {
        let pins = self.pins;
        let order = pins.schedule.is_none() && pins.virtual_stages.is_none();
        order && pins.pipeline.is_none() && pins.split.is_none() && self.cluster.is_equal()
    }

    /// The rings of a submesh that the search chooses among for `m` microbatches.
    pub(super) fn rings(&self, submesh: usize, m: u32) -> Vec<Ring> {
        let n_meshes =
            (self.cluster.n_devices() / self.submeshes[submesh].n_devices.max(1)) as usize;
        if n_meshes < 2 || !self.chooses_interleaving() {
            return Vec::new();
        }
        let plain = ScheduleKind::default().schedule();
        let all = VIRTUAL.into_iter().filter_map(|v| plain.interleaved(v));
        let rings = all.map(|schedule| Ring {
            submesh,
            n_meshes,
            schedule,
        });
        let fits = |r: &Ring| {
            let n_stages = r.n_stages();
            n_stages <= self.layers().kind.len()
                && r.schedule.schedule().problem(n_stages, m).is_none()
        };
        rings.filter(fits).collect()
    }

    /// Looks for interleaved stages on meshes of `submesh` that cost less than `to_beat` and those
    /// known, and bounds all that there are.
    #[allow(clippy::too_many_arguments)] // Each is a loop variable of the search.
    pub(super) fn interleave(
        &self,
        solved: &mut Solved,
        submesh: usize,
        candidates: &[Candidate],
        batch: u64,
        m: u32,
        reserve: u64,
        to_beat: f64,
    ) {
        let rings = self.rings(submesh, m);
        if rings.is_empty() {
            return;
        }
        let mut ways: Vec<(f64, &Candidate, Ring)> = Vec::new();
        for candidate in candidates.iter().filter(|c| c.submesh == submesh) {
            let Some(sums) = self.least_sums(candidate) else {
                continue;
            };
            ways.extend(rings.iter().map(|&ring| {
                let sent_s = self.sent_s(ring, batch).iter().sum::<f64>();
                let of = RingOf {
                    ring,
                    candidate,
                    m,
                    sent_s,
                };
                let least = self.ring_least_s(of, &sums);
                let sum_s = sums.time_s + sent_s;
                let work = self.least_ring_work_s(self.submeshes[submesh].n_devices, sum_s, m);
                (least.max(work), candidate, ring)
            }));
        }
        let rank = |w: &(f64, &Candidate, Ring)| (w.1.shape, w.2.schedule);
        ways.sort_by(|a, b| a.0.total_cmp(&b.0).then(rank(a).cmp(&rank(b))));
        let cost = |c: &PipelineChoice| c.cost.total_s;
        let mut looked_at = 0;
        let most = self.effort.times(INTERLEAVED_OF_A_SIZE);
        for &(least, candidate, ring) in &ways {
            let known = solved.interleaved.get(most - 1);
            let known = known.map_or(f64::INFINITY, |(_, c)| cost(c));
            let near = self.held_back_s(solved.least_ring_s());
            let to_beat = to_beat.min(known).min(near);
            if least >= to_beat || self.ends() {
                break;
            }
            looked_at += 1;
            let found = self.solve_ring(ring, candidate, batch, m, reserve);
            if let Some(choice) = found.ok().filter(|c| cost(c) < to_beat) {
                let found = &mut solved.interleaved;
                found.push((ring.schedule, choice));
                found.sort_by(|a, b| cost(&a.1).total_cmp(&cost(&b.1)));
                // The best for each shape and number of stages.
                let mut kinds = BTreeSet::new();
                let shape = |c: &PipelineChoice| c.stages.first().map(|s| Rungs::of_tag(s.tag).0);
                found.retain(|(v, c)| kinds.insert((*v, shape(c))));
                found.truncate(most);
            }
        }
        // Prices say more of the rings that were looked at. The first of the others costs least.
        let others = ways.get(looked_at).map(|(least, ..)| *least);
        solved.lower = others.into_iter().fold(solved.lower, f64::min);
        let of_others = solved.lower;
        let bounds = ways[..looked_at]
            .par_iter()
            .map(|&(least, candidate, ring)| {
                let sent_s = self.sent_s(ring, batch).iter().sum::<f64>();
                let of = RingOf {
                    ring,
                    candidate,
                    m,
                    sent_s,
                };
                // Beyond the bound of all others nobody asks for that of one.
                match least < of_others {
                    true => least.max(self.priced_ring_least_s(of, of_others)),
                    false => of_others,
                }
            });
        solved.lower = bounds.reduce(|| of_others, f64::min);
    }

    /// A ring that the search chose, made again with so many bytes reserved and at the ZeRO level
    /// that it keeps to.
    pub(super) fn ring_again(&self, p: &Pipeline, reserve: u64) -> Option<PipelineChoice> {
        let (index, _) = Rungs::of_tag(p.choice.stages.first()?.tag);
        let shapes = self.shapes(p.batch);
        let shape = shapes.get(index)?;
        let mut rings = self.rings(shape.submesh, p.m).into_iter();
        let ring = rings.find(|r| r.schedule == p.schedule)?;
        let candidate = self.candidate_at(index, shape, p.batch, p.m, reserve, p.assumed);
        let choice = self.solve_ring(ring, &candidate.ok()?, p.batch, p.m, reserve);
        choice.ok()
    }

    /// The best pipeline of interleaved stages as pinned.
    pub(super) fn solve_pinned_ring(
        &self,
        candidates: &[Candidate],
        batch: u64,
        m: u32,
        schedule: ScheduleKind,
        reserve: u64,
    ) -> Bounded {
        let mut bounded = Bounded {
            found: Err(PlanError::NoTiling {
                devices: self.cluster.n_devices(),
                layers: self.layers().kind.len(),
            }),
            lower: f64::INFINITY,
        };
        for candidate in candidates {
            let Some(ring) = self.pinned_ring(candidate.submesh, m, schedule) else {
                continue;
            };
            let even = self.solve_ring(ring, candidate, batch, m, reserve);
            let apart = self.solve_ring_apart(ring, candidate, batch, m, reserve);
            for found in [even, apart] {
                bounded.found = match (bounded.found, found) {
                    (Ok(a), Ok(b)) if b.cost.total_s < a.cost.total_s => Ok(b),
                    (Ok(a), _) => Ok(a),
                    (Err(_), Ok(b)) => Ok(b),
                    (Err(a), Err(b)) => Err(nearer(Some(a), b)),
                };
            }
            if let Some(sums) = self.least_sums(candidate) {
                let sent_s = self.sent_s(ring, batch).iter().sum::<f64>();
                let sum_s = sums.time_s + sent_s;
                let of = RingOf {
                    ring,
                    candidate,
                    m,
                    sent_s,
                };
                let least = [
                    self.ring_least_s(of, &sums),
                    self.priced_ring_least_s(of, f64::INFINITY),
                    self.least_ring_work_s(self.submeshes[ring.submesh].n_devices, sum_s, m),
                ];
                let least = least.into_iter().fold(0.0, f64::max);
                bounded.lower = bounded.lower.min(least);
            }
        }
        bounded
    }

    /// The meshes of a size as pinned; none where their stages are more than the layers, or are
    /// not those of the pinned split.
    fn pinned_ring(&self, submesh: usize, m: u32, schedule: ScheduleKind) -> Option<Ring> {
        let fitting = self.cluster.n_devices() / self.submeshes[submesh].n_devices.max(1);
        let ring = Ring {
            submesh,
            n_meshes: self.pins.pipeline.unwrap_or(fitting) as usize,
            schedule,
        };
        let n_stages = ring.n_stages();
        let split = self.pins.split.as_ref();
        let is_split = split.is_none_or(|counts| counts.len() == n_stages);
        let is_deep = n_stages <= self.layers().kind.len();
        let problem = schedule.schedule().problem(n_stages, m);
        (is_split && is_deep && problem.is_none()).then_some(ring)
    }

    /// The best entries for even cuts of one shape.
    pub(super) fn solve_ring(
        &self,
        ring: Ring,
        candidate: &Candidate,
        batch: u64,
        m: u32,
        reserve: u64,
    ) -> Result<PipelineChoice, PlanError> {
        let (table, capacity) = self.ring_table(ring, candidate, reserve);
        let n_layers = table.n_layers();
        let sent = self.sent_s(ring, batch);
        let mean_s = sent.iter().sum::<f64>() / sent.len().max(1) as f64;
        let time = |layers: Range<usize>| {
            let sent_s = if layers.end == n_layers { 0.0 } else { mean_s };
            let ways = table.get(layers, 0).iter().map(StageEntry::time_s);
            ways.min_by(f64::total_cmp).map(|t| t + sent_s)
        };
        let cuts = even_cuts(n_layers, ring.n_stages(), time).ok_or(PlanError::NoTiling {
            devices: self.cluster.n_devices(),
            layers: n_layers,
        })?;
        self.ring_of_cuts(ring, cuts, &table, (batch, m), capacity)
    }

    /// The best entries for stages of these layers.
    pub(super) fn ring_of_cuts(
        &self,
        ring: Ring,
        cuts: Vec<Range<usize>>,
        table: &StageTable,
        (batch, m): (u64, u32),
        capacity: u64,
    ) -> Result<PipelineChoice, PlanError> {
        let (options, sent) = (ring.options(m), self.sent_s(ring, batch));
        let stages = cuts.into_iter().enumerate().map(|(stage, layers)| {
            StageChoice {
                transfer_s: sent.get(stage).copied().unwrap_or(0.0),
                layers,
                submesh: 0,
                in_flight: options.in_flight(stage, ring.n_stages()),
                // `shared` chooses the rest.
                entry: 0,
                tag: 0,
                time_s: 0.0,
                share_bytes: None,
            }
        });
        self.shared(stages.collect(), table, ring, m, capacity)
    }

    /// The best entries for the cuts that are best where every stage has a mesh, and its memory,
    /// of its own.
    fn solve_ring_apart(
        &self,
        ring: Ring,
        candidate: &Candidate,
        batch: u64,
        m: u32,
        reserve: u64,
    ) -> Result<PipelineChoice, PlanError> {
        let options = ring.options(m);
        let sent = self.sent_s(ring, batch);
        let transfer = |hop: Hop| {
            let stage = ring.n_stages().checked_sub(hop.behind + 1)?;
            sent.get(stage).copied()
        };
        let (table, capacity) = self.ring_table(ring, candidate, reserve);
        inter_op::plan(&table, &transfer, &options)
            .map_err(|e| self.infeasible(e, &[ring.submesh]))
            .and_then(|cuts| self.shared(cuts.stages, &table, ring, m, capacity))
    }

    /// The costs of ranges of layers on a mesh of a ring, and the bytes that one has.
    pub(super) fn ring_table(
        &self,
        ring: Ring,
        candidate: &Candidate,
        reserve: u64,
    ) -> (StageTable, u64) {
        let capacity = self.capacity(ring.submesh, reserve);
        let own = [ring.submesh];
        self.stages(candidate);
        // Stages of a mesh differ already, each of a few layers.
        let table = self.table(&[candidate], &own, ring.n_stages(), vec![1], reserve, false);
        (table, capacity)
    }

    /// Stages with entries that fit together on the meshes that they share.
    fn shared(
        &self,
        mut cuts: Vec<StageChoice>,
        table: &StageTable,
        ring: Ring,
        m: u32,
        capacity: u64,
    ) -> Result<PipelineChoice, PlanError> {
        let in_flight = ring.in_flight(m);
        // The fewest and the most that a stage of each mesh has in flight.
        let of_mesh = |mesh: usize| {
            let counts = || ring.meshes().of_mesh(mesh, &in_flight).flatten().copied();
            let fewest = counts().filter(|n| *n > 0).min().unwrap_or(1);
            [fewest, counts().max().unwrap_or(1)]
        };
        let counts: Vec<[u64; 2]> = (0..ring.n_meshes).map(of_mesh).collect();
        let entries = cuts.iter().enumerate().map(|(k, s)| {
            let entries = table.get(s.layers.clone(), s.submesh);
            on_hulls(entries, m, &counts[ring.mesh_of(k)])
        });
        let entries: Vec<Vec<StageEntry>> = entries.collect();
        let is_alike = |k: usize| {
            let is_so =
                |b: usize| entries[b] == entries[k] && cuts[b].transfer_s == cuts[k].transfer_s;
            ring.before_on_its_mesh(k).is_some_and(is_so)
        };
        let stages = cuts.iter().zip(&entries).enumerate();
        let stages = stages.map(|(k, (s, entries))| SharedStage {
            entries,
            in_flight: &in_flight[k],
            transfer_s: s.transfer_s,
            is_alike: is_alike(k),
        });
        let stages: Vec<SharedStage<'_>> = stages.collect();
        let shared = share(&stages, ring.meshes(), ring.latency(m), capacity)
            .map_err(|e| self.too_large(&e, &cuts, ring, capacity))?;
        for (k, stage) in cuts.iter_mut().enumerate() {
            let entry = &stages[k].entries[shared.entries[k]];
            (stage.entry, stage.tag) = (shared.entries[k], entry.tag);
            stage.time_s = entry.time_s() + stage.transfer_s;
            stage.share_bytes = Some(shared.share_bytes[k]);
        }
        let cost = inter_op::PipelineCost {
            sum_s: shared.sum_s,
            max_s: shared.max_s,
            step_s: shared.step_s,
            total_s: shared.total_s,
        };
        Ok(PipelineChoice {
            stages: cuts,
            cost,
            // Nothing is known here; `Ring::least_s` bounds rings.
            lower_bound_s: 0.0,
            n_thresholds: 0,
        })
    }

    fn too_large(
        &self,
        e: &TooLarge,
        cuts: &[StageChoice],
        ring: Ring,
        capacity: u64,
    ) -> PlanError {
        let own = || ring.meshes().of_mesh(e.mesh, cuts);
        let names = &self.training().graph.layers;
        let layers =
            own().map(|s| format!("{} to {}", names[s.layers.start], names[s.layers.end - 1]));
        PlanError::Memory {
            n_stages: cuts.len(),
            layers: layers.collect::<Vec<_>>().join(" and "),
            devices: self.submeshes[ring.submesh].n_devices,
            in_flight: own().map(|s| s.in_flight).max().unwrap_or(1),
            needed: u64::try_from(e.needed_bytes).unwrap_or(u64::MAX),
            capacity,
        }
    }

    /// Seconds of sending from each stage of a ring to the next, one microbatch.
    pub(super) fn sent_s(&self, ring: Ring, batch: u64) -> Vec<f64> {
        let bytes = self.boundary_bytes(batch);
        let n = self.submeshes[ring.submesh].n_devices;
        let on = ring.meshes();
        let mesh = |stage: usize| on.route.mesh_of(stage, on.n);
        let hops = 1..ring.n_stages();
        let sent = hops.map(|next| {
            match (mesh(next - 1), mesh(next)) {
                // At hand.
                (from, to) if from == to => 0.0,
                (from, to) => {
                    let place = |mesh: usize| (ring.submesh, mesh as u32 * n);
                    self.transfer_s(bytes, place(from), place(to))
                }
            }
        });
        sent.collect()
    }
}

/// The entries of a stage that some price on memory makes best with one of these numbers of
/// microbatches in flight.
fn on_hulls(entries: &[StageEntry], m: u32, in_flight: &[u64]) -> Vec<StageEntry> {
    let mut all: Vec<StageEntry> = Vec::new();
    for &n in in_flight {
        for e in on_hull(entries, m, n) {
            if !all.contains(&e) {
                all.push(e);
            }
        }
    }
    all
}

/// The entries of a stage that some price on memory makes best: the corners of the convex hull of
/// what a step costs and bytes with so many microbatches in flight, the fastest first. Stages of a
/// mesh share its memory, and between two corners other stages of it give and take.
fn on_hull(entries: &[StageEntry], m: u32, in_flight: u64) -> Vec<StageEntry> {
    let seconds = |e: &StageEntry| f64::from(m) * e.time_s() + e.step_s;
    let mut sorted: Vec<&StageEntry> = entries.iter().collect();
    sorted.sort_by(|a, b| {
        let bytes = |e: &StageEntry| e.bytes(in_flight);
        seconds(a)
            .total_cmp(&seconds(b))
            .then(bytes(a).cmp(&bytes(b)))
    });
    let mut hull: Vec<StageEntry> = Vec::new();
    for e in sorted {
        let bytes = |e: &StageEntry| e.bytes(in_flight) as f64;
        if hull.last().is_some_and(|last| bytes(e) >= bytes(last)) {
            continue;
        }
        // The last corner goes if it lies above the line from the one before to this entry.
        while let [.., a, b] = hull.as_slice() {
            let rise = (seconds(b) - seconds(a)) * (bytes(a) - bytes(e));
            match rise < (seconds(e) - seconds(a)) * (bytes(a) - bytes(b)) {
                true => break,
                false => hull.pop(),
            };
        }
        hull.push(*e);
    }
    hull
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::testing::Rng;

    /// The bound of a ring against the objective of stages at random, and met by equal ones.
    #[test]
    fn no_stages_cost_less_than_their_ring() {
        let mut rng = Rng::new(1);
        let mut below = |n: u64| rng.below(n);
        for _ in 0..1000 {
            let ring = Ring {
                submesh: 0,
                n_meshes: 2 + below(4) as usize,
                schedule: ScheduleKind::Interleaved {
                    virtual_stages: 2 + below(4) as u32,
                },
            };
            let p = ring.n_meshes;
            let m = p as u32 * (1 + below(5) as u32);
            let cost = |times: &[f64]| {
                let of_mesh = |i: usize| times.iter().skip(i).step_by(p).sum::<f64>();
                let busiest = (0..p).map(of_mesh).fold(0.0, f64::max);
                let largest = times.iter().copied().fold(0.0, f64::max);
                let (rounds, fill) = (f64::from(m) - p as f64, p as f64 - 1.0);
                times.iter().sum::<f64>() + rounds * busiest + fill * largest
            };
            let n = ring.n_stages();
            let times: Vec<f64> = (0..n).map(|_| 1.0 + below(3) as f64).collect();
            let sum_s: f64 = times.iter().sum();
            let least = ring.least_s(sum_s, 0.0, m);
            assert!(least <= cost(&times) + 1e-9, "{ring:?} {times:?}");
            let equal = vec![sum_s / n as f64; n];
            assert!((least - cost(&equal)).abs() < 1e-9 * least, "{ring:?}");
        }
    }

    #[test]
    fn counts_in_words() {
        assert_eq!(counts(), "2, 3, 4, 5, 6, 8, 10, 12 or 16");
    }
}
