//! The ways of doing each collective, as lines `fixed + bytes * slope`.
//!
//! Letters, for the equations of this file only. A group has tiers `i`, innermost first: `n_i`
//! members at that level for each one below, `inside_i = n_0 * .. * n_(i-1)`, `n` in all. `B_i`
//! is the rate of one member's port: bandwidth times efficiency, over the devices that share
//! the port, and at most `n_i - 1` wires where wires join pairs. `S` is the collective's bytes.
//!
//! **Levels with protocols** (NCCL). A protocol `p` has a start, steps and shares of the
//! bandwidth; those of the outermost tier count for start, share and largest rate.
//!
//! * Ring, over all members in the order of ranks. All pieces move at the same time, and one
//!   in `inside_i` of a member's neighbours lies across level `i`:
//!   `bus = share * min_i(inside_i * B_i)`. All-gather and reduce-scatter:
//!   `start + sum_i steps_i * ring_step_i + (n-1)/n * S / bus`, where
//!   `steps_i = n_i * n_(i+1) * .. - n_(i+1) * ..` of the `n - 1` steps cross level `i`;
//!   all-reduce: twice the steps and bytes.
//! * Tree (all-reduce), a chain inside a host, two complementary binary trees between:
//!   `start + 2 sum_i depth_i * tree_step_i + max_i(f_i / (inside_i B_i)) * S / share`, `depth`
//!   `n_0 - 1` inside and `ceil(log2 n_i)` between. A member sends `S` up and down, so
//!   `f = 2`; of two members each only sends one way, `f = 1`. Between hosts every channel, one
//!   for a card or two for a fast one, sums and passes on a limited rate, and moves each byte
//!   twice. Four cards of 25 GB/s on two hosts of A100s: a tree's `S / 100 GB/s` would beat the
//!   ring's `15/8 S / 100 GB/s`, but four channels of 23.6 GB/s take `2 S / 94 GB/s`.
//! * In the switch (all-reduce): a port carries `S` to be added and its `1/n_0` of the sum,
//!   `(n_0 + 1)/n_0 * S` over bandwidth times the switch's efficiency. Between hosts trees as
//!   above, or switches that add again.
//! * All-to-all: `start + sum_i peers_i * ring_step_i`, and the slowest level's
//!   `peers_i / n * S`.
//! * Broadcast: the ring's steps, and `S / bus`.
//!
//! Levels move bytes at the same time, so that the slowest counts. On four nodes of eight B200
//! a 4 GiB all-reduce takes 22.05 ms; the ring's bound is 20.8 ms over NICs without loss, and
//! adding up what each level takes would give 26.2 ms.
//!
//! **Levels without protocols** (CPU ranks, other communicators): alpha-beta with latency `a`
//! (Thakur, Rabenseifner & Gropp 2005), level by level, each after the other: scatter and
//! gather `(n_i - 1) a + (n_i - 1)/n_i (S_i + half)/B_i` with `S_i = S / inside_i`; all-reduce
//! twice that, or trees `2 ceil(log2 n_i) a + 2 (S + half)/B_i`.
//!
//! **Shared memory** (ranks that are threads). Every member copies its operand, meets the others
//! and makes its result from what they brought; with `c` seconds per byte copied, `r` per byte
//! of operands reduced, `m` per meeting: all-gather `m + (1 + 1/n) S c`, reduce-scatter
//! `m + S c + S r`, all-to-all `m + 2 S c`, broadcast `m + 2 S c`; all-reduce in one phase
//! `m + S c + n S r`, or in two, of which the first reduces a part on every member,
//! `2 m + 2 S c + S r`.
//!
//! **Shifts** are one step of a ring: `start + step` and `S / (share * min B_i)`, as every member
//! sends to its neighbour by its own port alone; without protocols `a + (S + half)/B`, in shared
//! memory `m + 2 S c`.
//!
//! Sources: NCCL `src/graph/tuning.cc` for what the terms are; Sanders, Speck & Traff 2009 for
//! two trees; the comparison with measurements is `benchmarks/results/comm.md`.

use super::{Algorithm, Candidate, Tier};
use ir::cluster::{Protocol, SharedMemory};

/// Rate of a card up to which NCCL gives it one channel (`src/graph/search.cc` of v2.10.3: those
/// of more than 25 GB/s are doubled).
const ONE_CHANNEL_BYTES_PER_S: f64 = 25e9;

/// Ways of an all-reduce.
pub(super) fn all_reduce<'a>(tiers: &[Tier<'a>]) -> Vec<Candidate<'a>> {
    let Some(outer) = tiers.last() else {
        return Vec::new();
    };
    if let Some(s) = shared(tiers) {
        return vec![s.way(1.0, 1.0, s.n), s.way(2.0, 2.0, 1.0)];
    }
    if outer.level.protocols.is_empty() {
        return plain_all_reduce(tiers);
    }
    let mut all = Vec::new();
    for way in ways(tiers) {
        all.push(way.ring(2.0));
        all.push(way.tree());
    }
    all.extend(in_switch(tiers));
    all
}

/// Ways of a reduce-scatter.
pub(super) fn scatter<'a>(tiers: &[Tier<'a>]) -> Vec<Candidate<'a>> {
    match shared(tiers) {
        Some(s) => vec![s.way(1.0, 1.0, 1.0)],
        None => gather(tiers),
    }
}

/// Ways of an all-gather.
pub(super) fn gather<'a>(tiers: &[Tier<'a>]) -> Vec<Candidate<'a>> {
    if let Some(s) = shared(tiers) {
        return vec![s.way(1.0, 1.0 + 1.0 / s.n, 0.0)];
    }
    match tiers.last() {
        None => Vec::new(),
        Some(outer) if outer.level.protocols.is_empty() => vec![plain_rings(tiers, 1.0)],
        Some(_) => ways(tiers).map(|w| w.ring(1.0)).collect(),
    }
}

/// Ways of an all-to-all.
pub(super) fn all_to_all<'a>(tiers: &[Tier<'a>]) -> Vec<Candidate<'a>> {
    if let Some(s) = shared(tiers) {
        return vec![s.way(1.0, 2.0, 0.0)];
    }
    match tiers.last() {
        None => Vec::new(),
        Some(outer) if outer.level.protocols.is_empty() => vec![plain_pairs(tiers)],
        Some(_) => ways(tiers).map(|w| w.pairs()).collect(),
    }
}

/// Ways of an all-to-all of tokens with so many copies each, of which one crosses to every host
/// that has some of them and is copied there.
pub(super) fn dispatch<'a>(tiers: &[Tier<'a>], copies: f64) -> Vec<Candidate<'a>> {
    match tiers {
        [inner, outer] if !outer.level.protocols.is_empty() => {
            let hosts = outer.n;
            let reached = 1.0 - (1.0 - 1.0 / hosts).powf(copies);
            let shares = [1.0 - 1.0 / inner.n, (hosts - 1.0) * reached / copies];
            ways(tiers).map(|w| w.pairs_of(&shares)).collect()
        }
        _ => all_to_all(tiers),
    }
}

/// Ways of a shift: one step of a ring, in which every member sends all of its bytes by its own port.
/// Neighbours meet at all levels at once, and the slowest counts.
pub(super) fn shift<'a>(tiers: &[Tier<'a>]) -> Vec<Candidate<'a>> {
    if let Some(s) = shared(tiers) {
        return vec![s.way(1.0, 2.0, 0.0)];
    }
    match tiers.last() {
        None => Vec::new(),
        Some(outer) if outer.level.protocols.is_empty() => vec![plain_shift(tiers)],
        Some(_) => ways(tiers).map(|w| w.shift()).collect(),
    }
}

/// Ways of a broadcast.
pub(super) fn broadcast<'a>(tiers: &[Tier<'a>]) -> Vec<Candidate<'a>> {
    if let Some(s) = shared(tiers) {
        return vec![s.way(1.0, 2.0, 0.0)];
    }
    match tiers.last() {
        None => Vec::new(),
        Some(outer) if outer.level.protocols.is_empty() => {
            let ring = plain_rings(tiers, 1.0);
            let n = members(tiers);
            vec![Candidate {
                s_per_byte: ring.s_per_byte * n / (n - 1.0),
                ..ring
            }]
        }
        Some(_) => ways(tiers)
            .map(|w| Candidate {
                s_per_byte: 1.0 / w.bus(),
                ..w.ring(1.0)
            })
            .collect(),
    }
}

impl Tier<'_> {
    /// Bandwidth of one member's share of its port.
    fn port(&self) -> f64 {
        let wires = match self.level.pair_bandwidth_bytes_per_s {
            Some(pair) => pair * (self.n - 1.0).max(1.0),
            None => f64::INFINITY,
        };
        self.level.bandwidth_bytes_per_s.min(wires) / self.sharing
    }

    /// The rate that large collectives reach.
    fn rate(&self) -> f64 {
        self.port() * self.level.efficiency
    }

    /// The rate that a large all-to-all reaches.
    fn pairs_rate(&self) -> f64 {
        let level = self.level;
        self.port() * level.all_to_all_efficiency.unwrap_or(level.efficiency)
    }

    /// Steps from the leaves of a tree to its root.
    fn depth(&self) -> f64 {
        if self.in_host {
            self.n - 1.0
        } else {
            self.n.log2().ceil()
        }
    }

    /// Times that a member sends the whole in a tree, up and down together.
    fn tree_sends(&self) -> f64 {
        if self.n > 2.0 { 2.0 } else { 1.0 }
    }

    /// Peers of a rank in an all-to-all that lie across this level.
    fn peers(&self) -> f64 {
        self.inside * (self.n - 1.0)
    }
}

fn members(tiers: &[Tier<'_>]) -> f64 {
    tiers.iter().map(|t| t.n).product()
}

/// A protocol that all tiers have.
struct Way<'a, 't> {
    tiers: &'t [Tier<'a>],
    /// Its figures, tier by tier.
    figures: Vec<&'a Protocol>,
    outer: &'a Protocol,
}

/// The protocols that all tiers have, in the outermost level's order.
fn ways<'a, 't>(tiers: &'t [Tier<'a>]) -> impl Iterator<Item = Way<'a, 't>> {
    let outer = tiers.last().map_or(&[][..], |t| &t.level.protocols);
    outer.iter().filter_map(move |outer| {
        let same = |t: &Tier<'a>| t.level.protocols.iter().find(|p| p.name == outer.name);
        let figures = tiers.iter().map(same).collect::<Option<Vec<_>>>()?;
        Some(Way {
            tiers,
            figures,
            outer,
        })
    })
}

impl<'a> Way<'a, '_> {
    fn steps(&self) -> impl Iterator<Item = (&Tier<'a>, &'a Protocol)> {
        self.tiers.iter().zip(self.figures.iter().copied())
    }

    fn largest(&self) -> f64 {
        let largest = self.outer.max_bandwidth_bytes_per_s;
        largest.unwrap_or(f64::INFINITY)
    }

    /// Rate at which each rank's ring turns.
    fn bus(&self) -> f64 {
        let slowest = |r: f64, t: &Tier<'_>| r.min(t.inside * t.rate());
        let rate = self.tiers.iter().fold(f64::INFINITY, slowest);
        (rate * self.outer.ring_share).min(self.largest())
    }

    fn candidate(&self, algorithm: Algorithm, fixed_s: f64, s_per_byte: f64) -> Candidate<'a> {
        Candidate {
            algorithm,
            protocol: Some(&self.outer.name),
            fixed_s: self.outer.start_s + fixed_s,
            s_per_byte,
        }
    }

    fn ring(&self, rounds: f64) -> Candidate<'a> {
        let n = members(self.tiers);
        let crossing = |t: &Tier<'_>| n / t.inside - n / (t.inside * t.n);
        let steps: f64 = self.steps().map(|(t, p)| crossing(t) * p.ring_step_s).sum();
        let bytes = (n - 1.0) / n / self.bus();
        self.candidate(Algorithm::Ring, rounds * steps, rounds * bytes)
    }

    fn shift(&self) -> Candidate<'a> {
        let step = self.steps().map(|(_, p)| p.ring_step_s).fold(0.0, f64::max);
        let rate = self
            .tiers
            .iter()
            .map(Tier::rate)
            .fold(f64::INFINITY, f64::min);
        let rate = (rate * self.outer.ring_share).min(self.largest());
        self.candidate(Algorithm::Ring, step, 1.0 / rate)
    }

    fn tree(&self) -> Candidate<'a> {
        let steps: f64 = self.steps().map(|(t, p)| t.depth() * p.tree_step_s).sum();
        let slowest = |s: f64, t: &Tier<'_>| s.max(t.tree_sends() / (t.inside * t.rate()));
        let bytes = self.tiers.iter().fold(0.0, slowest) / self.outer.tree_share;
        let largest = self.largest().min(self.tree_channels());
        self.candidate(Algorithm::Tree, 2.0 * steps, bytes.max(2.0 / largest))
    }

    /// Bytes per second of all channels of a tree over hosts; no limit inside one, or where a
    /// host has one member.
    fn tree_channels(&self) -> f64 {
        let [inner, between, ..] = self.tiers else {
            return f64::INFINITY;
        };
        let Some(channel) = inner.level.tree_channel.filter(|_| inner.in_host) else {
            return f64::INFINITY;
        };
        let cards = (between.inside / between.sharing).max(1.0);
        let of_card = match between.level.bandwidth_bytes_per_s > ONE_CHANNEL_BYTES_PER_S {
            true => 2.0,
            false => 1.0,
        };
        let hosts = members(&self.tiers[1..]);
        let rate = match hosts > 2.0 {
            true => channel.more_hosts_bytes_per_s,
            false => channel.two_hosts_bytes_per_s,
        };
        cards * of_card * rate
    }

    fn pairs(&self) -> Candidate<'a> {
        let n = members(self.tiers);
        let shares: Vec<f64> = self.tiers.iter().map(|t| t.peers() / n).collect();
        self.pairs_of(&shares)
    }

    /// An all-to-all of which these shares of the bytes cross each tier.
    fn pairs_of(&self, shares: &[f64]) -> Candidate<'a> {
        let steps: f64 = self.steps().map(|(t, p)| t.peers() * p.ring_step_s).sum();
        let tiers = self.tiers.iter().zip(shares);
        let slowest = |s: f64, (t, share): (&Tier<'_>, &f64)| s.max(share / t.pairs_rate());
        let bytes = tiers.fold(0.0, slowest) / self.outer.ring_share;
        self.candidate(Algorithm::Pairwise, steps, bytes)
    }
}

/// All-reduce with the innermost tier's switch adding up, where it can.
fn in_switch<'a>(tiers: &[Tier<'a>]) -> Option<Candidate<'a>> {
    let (inner, outer) = tiers.split_first()?;
    let switch = inner.level.in_switch?;
    let way = ways(tiers).last()?;
    let (mut fixed_s, mut s_per_byte) = (
        switch.latency_s,
        (inner.n + 1.0) / inner.n / (inner.port() * switch.efficiency),
    );
    for (tier, protocol) in outer.iter().zip(way.figures.iter().skip(1)) {
        let (steps, bytes) = match tier.level.in_switch {
            Some(s) => (s.latency_s, 1.0 / (tier.port() * s.efficiency)),
            None => (
                2.0 * tier.depth() * protocol.tree_step_s,
                tier.tree_sends() / tier.rate(),
            ),
        };
        fixed_s += steps;
        s_per_byte = s_per_byte.max(bytes / tier.inside);
    }
    Some(Candidate {
        algorithm: Algorithm::InSwitch,
        protocol: Some(&way.outer.name),
        fixed_s,
        s_per_byte,
    })
}

/// Members that are threads of one process.
struct Shared {
    figures: SharedMemory,
    n: f64,
}

/// The figures of a group that one level of shared memory joins.
fn shared(tiers: &[Tier<'_>]) -> Option<Shared> {
    let [only] = tiers else { return None };
    let figures = only.level.shared_memory?;
    Some(Shared { figures, n: only.n })
}

impl Shared {
    /// So many meetings, and bytes copied and reduced over those of the collective.
    fn way<'a>(&self, meetings: f64, copied: f64, reduced: f64) -> Candidate<'a> {
        let f = &self.figures;
        Candidate {
            algorithm: Algorithm::SharedMemory,
            protocol: None,
            fixed_s: meetings * f.meeting_s,
            s_per_byte: copied / f.copy_bytes_per_s + reduced / f.reduce_bytes_per_s,
        }
    }
}

/// Rings level by level: a scatter or gather, or `rounds` of them.
fn plain_rings<'a>(tiers: &[Tier<'a>], rounds: f64) -> Candidate<'a> {
    let mut all = Candidate {
        algorithm: plain(tiers, Algorithm::Ring),
        protocol: None,
        fixed_s: 0.0,
        s_per_byte: 0.0,
    };
    for t in tiers {
        let moved = (t.n - 1.0) / t.n / t.rate();
        all.fixed_s += rounds * ((t.n - 1.0) * t.level.latency_s + moved * t.level.half_bytes);
        all.s_per_byte += rounds * moved / t.inside;
    }
    all
}

/// One message to the next member, as slow as the slowest level makes it.
fn plain_shift<'a>(tiers: &[Tier<'a>]) -> Candidate<'a> {
    let slowest = |of: fn(&Tier<'_>) -> f64| tiers.iter().map(of).fold(0.0, f64::max);
    Candidate {
        algorithm: Algorithm::Ring,
        protocol: None,
        fixed_s: slowest(|t| t.level.latency_s + t.level.half_bytes / t.rate()),
        s_per_byte: slowest(|t| 1.0 / t.rate()),
    }
}

fn plain(tiers: &[Tier<'_>], alone: Algorithm) -> Algorithm {
    if tiers.len() > 1 {
        Algorithm::Hierarchical
    } else {
        alone
    }
}

fn plain_all_reduce<'a>(tiers: &[Tier<'a>]) -> Vec<Candidate<'a>> {
    let mut tree = Candidate {
        algorithm: plain(tiers, Algorithm::Tree),
        protocol: None,
        fixed_s: 0.0,
        s_per_byte: 0.0,
    };
    for t in tiers {
        let moved = 2.0 / t.rate();
        let steps = 2.0 * t.n.log2().ceil();
        tree.fixed_s += steps * t.level.latency_s + moved * t.level.half_bytes;
        tree.s_per_byte += moved;
    }
    vec![plain_rings(tiers, 2.0), tree]
}

fn plain_pairs<'a>(tiers: &[Tier<'a>]) -> Candidate<'a> {
    let n = members(tiers);
    let mut all = Candidate {
        algorithm: Algorithm::Pairwise,
        protocol: None,
        fixed_s: 0.0,
        s_per_byte: 0.0,
    };
    for t in tiers {
        let moved = t.peers() / n / t.pairs_rate();
        all.fixed_s += t.peers() * t.level.latency_s + moved * t.level.half_bytes;
        all.s_per_byte += moved;
    }
    all
}
