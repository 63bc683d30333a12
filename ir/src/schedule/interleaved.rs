//! Interleaved 1F1B: every mesh has several stages, and its passes alternate between them
//! (Narayanan et al. 2021, section 2.2, figure 4).
//!
//! Stage `c p + i` of `p v` is chunk `c` of mesh `i` of `p`. Forwards go in rounds: `p`
//! microbatches through chunk 0, the same through chunk 1, and so on; backwards in the same
//! rounds from the last chunk to the first. After its warmup a mesh alternates forward and
//! backward. The pipeline fills with passes that are `v` times shorter, so that of `m`
//! microbatches it waits for `(p - 1) / v` instead of `p - 1`.
//!
//! ```text
//! mesh 0  0F0 0F1 1F0 1F1 0F2 1B0 0F3 1B1 1F2 0B0 1F3 0B1 1B2 1B3 0B2 0B3      warmup 4
//! mesh 1   .. 0F0 0F1 1F0 1B0 1F1 1B1 0F2 0B0 0F3 0B1 1F2 1B2 1F3 1B3 0B2 0B3  warmup 2
//! ```

use super::{Latency, PassKind, Schedule, Slot, Travel};

pub(super) struct Interleaved {
    pub virtual_stages: u32,
}

impl Interleaved {
    fn v(&self) -> u64 {
        u64::from(self.virtual_stages.max(1))
    }

    /// Forwards that mesh `mesh` plays before its first backward but one:
    /// `2 (n_meshes - 1 - mesh) + (v - 1) n_meshes`; at most all there are.
    fn warmup(&self, mesh: usize, n_meshes: usize, m: u32) -> u64 {
        let after = n_meshes.saturating_sub(mesh + 1) as u64;
        let rounds = (self.v() - 1).saturating_mul(n_meshes as u64);
        (2 * after + rounds).min(self.v().saturating_mul(u64::from(m)))
    }
}

impl Schedule for Interleaved {
    fn name(&self) -> &'static str {
        "interleaved_1f1b"
    }

    fn virtual_stages(&self) -> u32 {
        self.virtual_stages
    }

    fn group(&self, n_meshes: usize) -> u32 {
        u32::try_from(n_meshes).unwrap_or(u32::MAX)
    }

    fn problem(&self, n_stages: usize, m: u32) -> Option<String> {
        let v = self.virtual_stages;
        if v < 2 || n_stages == 0 || !n_stages.is_multiple_of(v as usize) {
            return Some(format!(
                "{n_stages} stages, {v} of them on every mesh: interleaving needs 2 or more, as many on each mesh"
            ));
        }
        let p = n_stages / v as usize;
        (!m.is_multiple_of(self.group(p))).then(|| {
            format!("{m} microbatches on {p} meshes: interleaved stages need a multiple of {p}")
        })
    }

    fn slots(&self, mesh: usize, n_meshes: usize, m: u32) -> Vec<Slot> {
        let (v, group) = (self.v(), n_meshes as u64);
        let total = v * u64::from(m);
        let warmup = self.warmup(mesh, n_meshes, m);
        let nth = |k: u64, pass| {
            let round = group * v;
            let nth_chunk = (k % round / group) as u32;
            let chunk = match pass {
                PassKind::Forward => nth_chunk,
                _ => v as u32 - 1 - nth_chunk,
            };
            Slot::new(pass, chunk, (k / round * group + k % group) as u32)
        };
        let forward = |k| nth(k, PassKind::Forward);
        let backward = |k| nth(k, PassKind::Backward);
        let steady = (warmup..total).flat_map(|k| [forward(k), backward(k - warmup)]);
        (0..warmup)
            .map(forward)
            .chain(steady)
            .chain((total - warmup..total).map(backward))
            .collect()
    }

    /// Most microbatches of a chunk that have gone forward and not back, when a mesh plays its
    /// warmup and then forwards and backwards in turn. Forwards come in rounds of `p`
    /// microbatches of every chunk in ascending order, backwards in descending order; so from
    /// round to round the difference repeats, and one round shows the most.
    fn in_flight(&self, _: PassKind, _: PassKind, stage: usize, n_stages: usize, m: u32) -> u32 {
        let (v, m) = (self.v(), u64::from(m));
        let p = (n_stages as u64 / v).max(1);
        let (chunk, mesh) = (stage as u64 / p, stage as u64 % p);
        let warmup = self.warmup(mesh as usize, p as usize, m as u32);
        let round = p.saturating_mul(v);
        let of_chunk = |nth: u64, slots: u64| of_chunk(nth, slots, p, v).min(m);
        let steady = m.saturating_mul(v).saturating_sub(warmup).min(round);
        let most = (0..steady)
            .map(|done| of_chunk(chunk, warmup + done + 1) - of_chunk(v - 1 - chunk, done))
            .max();
        let all = most.unwrap_or(m).min(m);
        u32::try_from(all).unwrap_or(u32::MAX)
    }

    /// When the warmup is over and the first microbatch in the steady state has gone forward, and
    /// nothing has come back, a mesh has as many as it ever has.
    fn at_peak(&self, stage: usize, n_stages: usize, m: u32) -> u32 {
        let v = self.v();
        let p = (n_stages as u64 / v).max(1);
        let (chunk, mesh) = (stage as u64 / p, stage as u64 % p);
        let all = v.saturating_mul(u64::from(m));
        let forwards = (self.warmup(mesh as usize, p as usize, m) + 1).min(all);
        u32::try_from(of_chunk(chunk, forwards, p, v)).unwrap_or(u32::MAX)
    }

    /// In the steady state a forward of one chunk comes in for a backward of another, so a mesh has
    /// as many in all as at its peak, but more and more of them are of early chunks. The counts
    /// change evenly until forwards or backwards go on to the next chunk, so what decides lies
    /// there.
    fn moments(&self, mesh: usize, n_meshes: usize, m: u32) -> Vec<Vec<u32>> {
        let (v, p) = (self.v(), (n_meshes as u64).max(1));
        let all = v.saturating_mul(u64::from(m));
        let warmup = self.warmup(mesh, n_meshes, m);
        // From round to round they repeat.
        let steady = all.saturating_sub(warmup).min(p.saturating_mul(v));
        let turns = (0..v).flat_map(|round| {
            let backward = round * p;
            [backward, backward + (p - 1 - warmup % p)]
        });
        let mut ends: Vec<u64> = turns.filter(|&done| done < steady).collect();
        ends.extend([0, steady.saturating_sub(1)]);
        ends.sort_unstable();
        ends.dedup();
        let at = |done: u64| -> Vec<u32> {
            let forwards = (warmup + done + 1).min(all);
            let in_flight = (0..v).map(|chunk| {
                let n = of_chunk(chunk, forwards, p, v) - of_chunk(v - 1 - chunk, done, p, v);
                u32::try_from(n).unwrap_or(u32::MAX)
            });
            in_flight.collect()
        };
        super::undominated(ends.into_iter().map(at))
    }

    /// Meshes come to the ends of their slots at different times: a value that waited for both
    /// would travel slots too late, and on eight meshes of four stages the pipeline would wait
    /// more than twice as long.
    fn travel(&self) -> Travel {
        Travel::AtOnce
    }

    /// The first round of `p` microbatches fills the pipeline with `p - 1` stages, and each of
    /// the others takes what the busiest mesh does.
    fn latency(&self, n_meshes: usize, m: u32) -> Latency {
        let p = n_meshes as f64;
        Latency {
            busiest: (f64::from(m) - p).max(0.0),
            slowest: (p - 1.0).max(0.0),
        }
    }
}

/// How many of the first `slots` forwards of one of `p` meshes are of the `nth` of its `v` chunks
/// in a round.
fn of_chunk(nth: u64, slots: u64, p: u64, v: u64) -> u64 {
    let round = p.saturating_mul(v).max(1);
    slots / round * p + (slots % round).saturating_sub(nth * p).min(p)
}
