//! The stage tables of `inter_op`: what ranges of layers cost on submeshes, from the costs of
//! sequences on priced shapes.

use super::mixes::Rungs;
use super::{Candidate, Search};
use crate::inter_op::{StageEntry, StageTable};
use cost_model::collectives::send_time;
use std::collections::BTreeSet;

/// Most numbers of microbatches in flight for which stages are fitted into memory.
const MAX_IN_FLIGHT: usize = 16;

/// Bounds that differ by less are one.
const SAME: f64 = 1e-4;

/// An entry that takes nothing.
const BLANK: StageEntry = StageEntry {
    forward_s: 0.0,
    backward_s: 0.0,
    step_s: 0.0,
    static_bytes: 0,
    saved_bytes_per_microbatch: 0,
    transient_bytes: 0,
    capacity_bytes: 0,
    boundary_in: 0,
    boundary_out: 0,
    tag: 0,
};

impl Search<'_> {
    /// The costs of ranges of layers on some of the submeshes (indices), which have these sizes in
    /// a cluster of `devices` of the same unit; `reserve` bytes of each device stay free. Of a
    /// candidate whose stages nobody asked for yet, a time that they cannot beat and no bytes, as
    /// [`Rungs::UNKNOWN`]. With `mixes`, layers of a stage may differ in what memory costs them.
    #[allow(clippy::too_many_arguments)] // Each is a loop variable of the search.
    pub(super) fn table(
        &self,
        candidates: &[&Candidate],
        submeshes: &[usize],
        devices: usize,
        sizes: Vec<usize>,
        reserve: u64,
        mixes: bool,
    ) -> StageTable {
        let mut table = StageTable::new(self.layers().kind.len(), devices, sizes);
        let none = vec![Vec::new(); self.sequences.len()];
        let mut entries: Vec<Vec<Vec<StageEntry>>> = vec![none; submeshes.len()];
        for candidate in candidates {
            let Some(submesh) = submeshes.iter().position(|&i| i == candidate.submesh) else {
                continue;
            };
            let of_submesh = &mut entries[submesh];
            let Some(stages) = candidate.known_stages() else {
                for (entries, seconds) in of_submesh.iter_mut().zip(&candidate.relaxed) {
                    entries.extend(seconds.map(|forward_s| StageEntry {
                        forward_s,
                        capacity_bytes: u64::MAX,
                        tag: Rungs::UNKNOWN.tag(candidate.shape),
                        ..BLANK
                    }));
                }
                continue;
            };
            for (entries, costs) in of_submesh.iter_mut().zip(stages) {
                let costs = costs.iter().filter(|(rungs, _)| mixes || rungs.is_one());
                entries.extend(costs.map(|(rungs, cost)| StageEntry {
                    forward_s: cost.time.forward,
                    backward_s: cost.time.backward,
                    step_s: cost.time.step,
                    static_bytes: cost.static_bytes,
                    saved_bytes_per_microbatch: cost.saved_bytes,
                    transient_bytes: cost.transient_bytes,
                    capacity_bytes: self.capacity(candidate.submesh, reserve),
                    tag: rungs.tag(candidate.shape),
                    ..BLANK
                }));
            }
        }
        for (submesh, mut entries) in entries.into_iter().enumerate() {
            entries.iter_mut().for_each(useful);
            for &((i, j), sequence) in &self.sequences.ranges {
                for entry in &entries[sequence] {
                    table.push(i..j, submesh, *entry);
                }
            }
        }
        table
    }

    /// Times that ranges of layers cannot beat there, their parts of the work once per step
    /// included ([`super::bounds`]), in pipelines where a stage's time counts `rounds` times; they
    /// depend on the microbatches in flight.
    pub(super) fn relaxed_table(
        &self,
        candidates: &[&Candidate],
        submeshes: &[usize],
        devices: usize,
        sizes: Vec<usize>,
        (m, rounds): (u32, f64),
    ) -> StageTable {
        let mut table = StageTable::new(self.layers().kind.len(), devices, sizes);
        for (place, &submesh) in submeshes.iter().enumerate() {
            let own = candidates.iter().filter(|c| c.submesh == submesh);
            let own: Vec<&&Candidate> = own.collect();
            let levels = self.levels(submesh, m);
            let of_sequence = |sequence: usize| -> Vec<StageEntry> {
                let mut entries: Vec<StageEntry> = Vec::new();
                for (i, &n) in levels.iter().enumerate() {
                    let least = own
                        .iter()
                        .filter_map(|c| self.least_stage_s(c, sequence, n, rounds));
                    let least = least.fold(f64::INFINITY, f64::min);
                    if least.is_infinite() {
                        continue;
                    }
                    // It holds up to where more in flight take longer.
                    if let Some(last) = entries.last_mut() {
                        if least <= last.forward_s * (1.0 + SAME) {
                            continue;
                        }
                        last.capacity_bytes = levels[i] - 1;
                    }
                    entries.push(StageEntry {
                        forward_s: least,
                        saved_bytes_per_microbatch: 1,
                        capacity_bytes: u64::MAX,
                        ..BLANK
                    });
                }
                entries
            };
            let by_sequence: Vec<Vec<StageEntry>> =
                (0..self.sequences.len()).map(of_sequence).collect();
            for &((i, j), sequence) in &self.sequences.ranges {
                for entry in &by_sequence[sequence] {
                    table.push(i..j, place, *entry);
                }
            }
        }
        table
    }

    /// Numbers of microbatches in flight at which bounds are looked at: 1 and its doubles.
    fn levels(&self, submesh: usize, m: u32) -> Vec<u64> {
        let most = self.in_flight(submesh, m).last().copied().unwrap_or(1);
        let doubles = std::iter::successors(Some(1u64), |n| n.checked_mul(2));
        doubles.take_while(|n| *n <= most.max(1)).collect()
    }

    /// Bytes of the tensor that crosses a boundary, one microbatch.
    pub(super) fn boundary_bytes(&self, batch: u64) -> u64 {
        let graph = &self.training().graph;
        self.boundary.map_or(0, |v| graph.ty(v).bytes(batch))
    }

    /// Seconds to send a boundary tensor of so many bytes forward and its gradient back, between two
    /// submeshes at their first ranks. All ranks send at once, so those that share a port share its
    /// rate.
    pub(super) fn transfer_s(
        &self,
        bytes: u64,
        (from, first): (usize, u32),
        (to, next): (usize, u32),
    ) -> f64 {
        let n = self.submeshes[from].n_devices;
        let n = n.min(self.submeshes[to].n_devices).max(1);
        let level = self.cluster.level_between(first, next);
        let users = level.map_or(1, |l| l.devices_per_port).clamp(1, n);
        let share = (bytes / u64::from(n)).saturating_mul(users.into());
        2.0 * send_time(self.cluster, first, next, share).0
    }

    /// The numbers of microbatches in flight that a stage on a submesh may have, ascending: those of
    /// the stages of equal submeshes, else of as many stages as there may be.
    pub(super) fn in_flight(&self, submesh: usize, m: u32) -> Vec<u64> {
        let schedule = self.pins.schedule_kind().schedule();
        let (n_layers, devices) = (self.layers().kind.len(), self.cluster.n_devices());
        let of_mesh = self.submeshes[submesh].n_devices.max(1);
        let v = schedule.virtual_stages().max(1) as usize;
        let most = match self.mixes_submeshes() && v == 1 {
            true => devices as usize,
            false => (devices / of_mesh) as usize,
        };
        let most = self.pins.pipeline.map_or(most, |p| p as usize);
        let counts = match (self.mixes_submeshes(), v) {
            (true, 1) => 1..=most.clamp(1, n_layers.max(1)),
            (false, 1) => {
                let n = most.clamp(1, n_layers.max(1));
                n..=n
            }
            // Of equal meshes.
            _ => most.saturating_mul(v)..=most.saturating_mul(v),
        };
        let mut numbers: BTreeSet<u64> = BTreeSet::new();
        for n in counts {
            numbers.extend((0..n).map(|i| u64::from(schedule.at_peak(i, n, m))));
        }
        // Of many, some: what fits with more in flight fits with fewer.
        let numbers: Vec<u64> = numbers.into_iter().collect();
        let step = numbers.len().div_ceil(MAX_IN_FLIGHT).max(1);
        let mut some: Vec<u64> = numbers.iter().rev().step_by(step).copied().collect();
        some.reverse();
        some
    }

    /// Stages of a pipeline of equal submeshes.
    pub(super) fn n_stages(&self, submesh: usize) -> f64 {
        let of_mesh = f64::from(self.submeshes[submesh].n_devices.max(1));
        (f64::from(self.cluster.n_devices()) / of_mesh).max(1.0)
    }

    /// Bytes per device of a submesh, `reserve` of them left free.
    pub(super) fn capacity(&self, submesh: usize, reserve: u64) -> u64 {
        let usable = self.bytes_of(&self.submeshes[submesh].seen);
        usable.saturating_sub(reserve)
    }
}

/// Drops entries that are no use beside another of the same layers on the same submesh: one that
/// takes less time, or as long and stands before, and is no worse in all else.
fn useful(entries: &mut Vec<StageEntry>) {
    let no_worse = |a: &StageEntry, b: &StageEntry| {
        a.step_s <= b.step_s
            && a.saved_bytes_per_microbatch <= b.saved_bytes_per_microbatch
            && a.bytes(0) <= b.bytes(0)
    };
    let is_useful = |(i, e): (usize, &StageEntry)| {
        !entries.iter().enumerate().any(|(k, other)| {
            let (time, than) = (other.time_s(), e.time_s());
            (time < than || time == than && k < i) && no_worse(other, e)
        })
    };
    let kept: Vec<bool> = entries.iter().enumerate().map(is_useful).collect();
    let mut kept = kept.into_iter();
    entries.retain(|_| kept.next() == Some(true));
}
