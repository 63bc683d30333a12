//! Why there is no plan: the one that comes nearest to fitting, and the stage where it does not.

use super::labels::Problem;
use super::{NoPlan, StageEntry};
use std::ops::Range;

impl Problem<'_> {
    /// The plan that comes nearest to fitting, and where it does not.
    pub(super) fn why_not(&self) -> NoPlan {
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
                    if now <= n_devices && self.table.lies(submesh, n_devices - now) {
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
