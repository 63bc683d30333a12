//! The dynamic program below a threshold: labels for the stages from some layer on, from the last
//! layer backwards, so that the number of stages behind, and with it what is in flight, is known.

use super::{
    Hop, InterOpOptions, PipelineChoice, PipelineCost, StageChoice, StageEntry, StageTable,
    Transfer,
};
use std::collections::BTreeSet;

pub(super) struct Problem<'a> {
    pub(super) table: &'a StageTable,
    pub(super) transfer: Transfer<'a>,
    pub(super) options: InterOpOptions,
    /// The distinct (submesh, boundary_in) with which a stage can begin.
    pub(super) heads: Vec<(usize, u16)>,
    /// The distinct (submesh, boundary_out) with which a stage can end.
    pub(super) tails: Vec<(usize, u16)>,
    /// By last layer and tail: the entries.
    pub(super) ending: Vec<Vec<Vec<Candidate>>>,
    /// By number of stages behind: microbatches in flight.
    pub(super) in_flight: Vec<u64>,
    /// Whether all submeshes are of one size, so that the devices of a label say how many stages it
    /// has.
    is_flat: bool,
}

impl<'a> Problem<'a> {
    pub(super) fn new(
        table: &'a StageTable,
        transfer: Transfer<'a>,
        options: InterOpOptions,
    ) -> Self {
        let (mut heads, mut tails) = (BTreeSet::new(), BTreeSet::new());
        let n_submeshes = table.submeshes.len();
        for (cell, entries) in table.entries.iter().enumerate() {
            for e in entries {
                heads.insert((cell % n_submeshes, e.boundary_in));
                tails.insert((cell % n_submeshes, e.boundary_out));
            }
        }
        let most = table.n_layers.max(1);
        let mut problem = Problem {
            table,
            transfer,
            options,
            heads: heads.into_iter().collect(),
            tails: tails.into_iter().collect(),
            ending: Vec::new(),
            is_flat: table.submeshes.windows(2).all(|two| two[0] == two[1]),
            // Where their number is free, the stages before one do not matter.
            in_flight: (1..=options.n_stages.unwrap_or(usize::MAX).clamp(1, most))
                .map(|n| match options.n_stages {
                    Some(all) => options.in_flight(all.saturating_sub(n), all),
                    None => options.in_flight(0, n),
                })
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

    /// Microbatches in flight at a stage with `after` behind it; of more than there may be, the
    /// last number.
    pub(super) fn in_flight(&self, after: usize) -> u64 {
        self.in_flight[after.min(self.in_flight.len() - 1)]
    }

    /// Whether a label with `a` stages can stand in for one with `b`: the number of stages
    /// matters to the stages before by what is in flight.
    pub(super) fn stands_in(&self, a: u32, b: u32) -> bool {
        let counted = |n: u32| self.in_flight((n as usize).saturating_sub(1));
        match self.options.n_stages {
            Some(_) => a == b,
            None => counted(a) <= counted(b),
        }
    }

    /// The plan with the least sum + step among those with all t below `threshold`, if that
    /// is below `cutoff`; and that least value.
    pub(super) fn best_below(&self, threshold: f64, cutoff: f64) -> Option<(f64, PipelineChoice)> {
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
                    let fits = now <= n_devices && self.table.lies(submesh, n_devices - now);
                    if !fits || candidates.is_empty() {
                        continue;
                    }
                    let reached = self.reached(&states[end], end, used, submesh, boundary);
                    let Some(best) = self.best_parts(&reached) else {
                        continue;
                    };
                    let is_stair = self.is_flat && is_stair(&reached);
                    for c in candidates {
                        let own = c.entry.time_s();
                        let before = rest.at(c.start, n_devices - now);
                        if own >= threshold || !before.is_finite() {
                            continue;
                        }
                        // No label of this entry is better than the best of all parts; rounding
                        // keeps the order.
                        let step = best.step.max(c.entry.step_s);
                        if best.sum + own + step + before >= cutoff || !c.entry.fits(best.in_flight)
                        {
                            continue;
                        }
                        let slot = now * n_heads + c.head;
                        let mut beater = 0;
                        for r in &reached {
                            // The rest costs more.
                            if is_stair && r.sum + own + c.entry.step_s + before >= cutoff {
                                break;
                            }
                            let label = self.extended(end, c, r, threshold);
                            if let Some(label) = label
                                && label.sum + label.step + before < cutoff
                            {
                                self.insert(&mut states[c.start][slot], label, &mut beater);
                            }
                            // The rest costs more, and a step of it is no shorter.
                            if is_stair && r.step <= c.entry.step_s {
                                break;
                            }
                        }
                    }
                }
            }
        }
        self.best_whole(&states, cutoff)
    }

    /// The labels that a stage with this tail finds behind it, sending included; the empty plan at
    /// the end.
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
        let of_heads = &slots[used * self.heads.len()..][..self.heads.len()];
        let is_only = of_heads.iter().filter(|labels| !labels.is_empty()).count() == 1;
        for (head, &(to, boundary_in)) in self.heads.iter().enumerate() {
            let slot = used * self.heads.len() + head;
            if slots[slot].is_empty() {
                continue;
            }
            let hop = Hop {
                from: submesh,
                boundary_out: boundary,
                to,
                boundary_in,
                behind: used,
            };
            let Some(transfer) = (self.transfer)(hop) else {
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
                // Labels of one slot were compared when they were put there, before a transfer's
                // rounding could make two sums equal: both then stay, the first one first.
                if is_only {
                    reached.push(new);
                } else if !reached.iter().any(|old| beats(old, &new)) {
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

    /// The best of what is reached, each part by itself; none of nothing.
    fn best_parts(&self, reached: &[Reached]) -> Option<Parts> {
        let parts = |r: &Reached| Parts {
            sum: r.sum,
            step: r.step,
            in_flight: self.in_flight(r.n_stages as usize),
        };
        reached.iter().map(parts).reduce(|a, b| Parts {
            sum: a.sum.min(b.sum),
            step: a.step.min(b.step),
            in_flight: a.in_flight.min(b.in_flight),
        })
    }

    /// Adds a label unless one stands in for it. `beater` is where the last was that did, which
    /// is often the next one's too.
    fn insert(&self, labels: &mut Vec<Label>, new: Label, beater: &mut usize) {
        if self.is_flat {
            return insert_in_stair(labels, new);
        }
        let beats = |a: &Label, b: &Label| {
            self.stands_in(a.n_stages, b.n_stages) && a.sum <= b.sum && a.step <= b.step
        };
        if labels.get(*beater).is_some_and(|old| beats(old, &new)) {
            return;
        }
        if let Some(at) = labels.iter().position(|old| beats(old, &new)) {
            *beater = at;
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
        let total = sum + self.options.repeats() * max + step;
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
                        let lies = |first| self.table.lies(submesh, first);
                        least.extend(start, end, n, own, lies);
                    }
                }
            }
        }
        least
    }
}

/// Whether of labels each costs no less than the one before it and takes no more time once a step, and
/// all are sent to in the same time.
fn is_stair(reached: &[Reached]) -> bool {
    let mut pairs = reached.iter().zip(reached.iter().skip(1));
    pairs.all(|(a, b)| a.sum <= b.sum && a.step >= b.step && a.transfer == b.transfer)
}

/// Adds a label to those with as many stages unless one of them stands in for it; those are kept in
/// the order of their sums, in which their times once a step descend.
fn insert_in_stair(labels: &mut Vec<Label>, new: Label) {
    let at = labels.partition_point(|old| old.sum <= new.sum);
    let before = at.checked_sub(1).map(|i| labels[i]);
    if before.is_some_and(|old| old.step <= new.step) {
        return;
    }
    let from = match before {
        Some(old) if old.sum == new.sum => at - 1,
        _ => at,
    };
    let beaten = labels[at..].iter().take_while(|old| old.step >= new.step);
    let to = at + beaten.count();
    labels.splice(from..to, [new]);
}

/// An entry with what the search asks of it.
#[derive(Clone, Copy)]
pub(super) struct Candidate {
    pub(super) start: usize,
    pub(super) index: u32,
    pub(super) head: usize,
    pub(super) entry: StageEntry,
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

/// The least of what a stage may find behind it.
struct Parts {
    sum: f64,
    step: f64,
    in_flight: u64,
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

    fn extend(
        &mut self,
        start: usize,
        end: usize,
        devices: usize,
        own: f64,
        lies: impl Fn(usize) -> bool,
    ) {
        let (before, after) = self.values.split_at_mut(end * self.width);
        let from = &before[start * self.width..(start + 1) * self.width];
        let to = &mut after[..self.width];
        for (first, (old, new)) in to.iter_mut().skip(devices).zip(from).enumerate() {
            if lies(first) {
                *old = old.min(new + own);
            }
        }
    }
}
