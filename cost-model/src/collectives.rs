//! Time of collectives and transfers: alpha-beta models over the cluster's link levels.
//!
//! A group of `n` members whose neighbours lie at several levels is treated hierarchically:
//! it splits into factors, one per level, the innermost first (`g` members inside a node,
//! `n/g` nodes). With `S` the collective's bytes (`ir::collective`), `a` the latency and `b`
//! the effective bandwidth of a level, `n` its number of members (Thakur, Rabenseifner &
//! Gropp 2005; NCCL's ring and double binary tree):
//!
//! * ring all-gather or reduce-scatter: `(n-1) a + (n-1)/n S/b`;
//! * ring all-reduce: twice that; tree all-reduce: `2 log2(n) a + 2 S/b`; the faster counts;
//! * hierarchical all-reduce: reduce-scatter inside, all-reduce of the piece outside,
//!   all-gather inside; all-gather and reduce-scatter likewise with pieces that grow outward in;
//! * all-to-all: `(n-1) a` and the bytes that cross each level over its bandwidth.
//!
//! The effective bandwidth of a message of `s` bytes is `bandwidth * efficiency *
//! s / (s + half_bytes)`. Several groups of the same mesh that cross a level at the same
//! time do not share a device's own link: `bandwidth_bytes_per_s` is per device.

use ir::cluster::{Cluster, Level};
use ir::collective::CollectiveKind;
use ir::{AxisId, LogicalMesh, Seconds};

/// One level's share in a group.
struct Tier<'a> {
    level: &'a Level,
    n: f64,
}

/// Time of a collective over `axes` of `mesh`, `bytes` as defined in `ir::collective`.
/// Zero for a group of one. Slices cost nothing here.
pub fn collective_time(cluster: &Cluster, mesh: &LogicalMesh, axes: &[AxisId], kind: CollectiveKind, bytes: u64) -> Seconds {
    let tiers = tiers(cluster, mesh, axes);
    let s = bytes as f64;
    let seconds = match kind {
        CollectiveKind::AllReduce(_) => all_reduce(&tiers, s),
        CollectiveKind::ReduceScatter(_) | CollectiveKind::AllGather => gather(&tiers, s),
        CollectiveKind::AllToAll => all_to_all(&tiers, s),
    };
    Seconds(seconds)
}

/// Time to move `bytes` from one rank to another (0 for the same rank).
pub fn send_time(cluster: &Cluster, from: u32, to: u32, bytes: u64) -> Seconds {
    match cluster.level_between(from, to) {
        Some(level) if from != to => Seconds(level.latency_s + bytes as f64 / effective(level, bytes as f64)),
        _ => Seconds(0.0),
    }
}

/// Factors of a group by level, innermost first; a group of one has none.
///
/// Members along the axes form a lattice; the number of members inside a block of `devices`
/// consecutive ranks is counted exactly from the first member's block, which is what every
/// block holds when sizes divide, and the fullest block otherwise.
fn tiers<'a>(cluster: &'a Cluster, mesh: &LogicalMesh, axes: &[AxisId]) -> Vec<Tier<'a>> {
    let first = mesh.devices.first_rank;
    let Some(group) = mesh.group(first, axes) else { return Vec::new() };
    let mut tiers = Vec::new();
    let mut inside = 1usize;
    for level in &cluster.levels {
        let block = |r: u32| r / level.devices.max(1);
        let mut counts = std::collections::BTreeMap::new();
        for r in &group {
            *counts.entry(block(r.0)).or_insert(0usize) += 1;
        }
        let members = counts.values().copied().max().unwrap_or(1);
        if members > inside {
            tiers.push(Tier { level, n: members as f64 / inside as f64 });
            inside = members;
        }
    }
    tiers
}

fn effective(level: &Level, message: f64) -> f64 {
    let share = if message > 0.0 { message / (message + level.half_bytes) } else { 1.0 };
    level.bandwidth_bytes_per_s * level.efficiency * share.max(1e-9)
}

fn ring_gather(tier: &Tier<'_>, s: f64) -> f64 {
    let moved = (tier.n - 1.0) / tier.n * s;
    (tier.n - 1.0) * tier.level.latency_s + moved / effective(tier.level, s)
}

fn ring_or_tree(tier: &Tier<'_>, s: f64) -> f64 {
    let ring = 2.0 * ring_gather(tier, s);
    let tree = 2.0 * tier.n.log2().ceil() * tier.level.latency_s + 2.0 * s / effective(tier.level, s);
    ring.min(tree)
}

fn all_reduce(tiers: &[Tier<'_>], s: f64) -> f64 {
    match tiers {
        [] => 0.0,
        [only] => ring_or_tree(only, s),
        [inner, outer @ ..] => 2.0 * ring_gather(inner, s) + all_reduce(outer, s / inner.n),
    }
}

/// Gathering (or scattering): the innermost level moves the whole result, each outer level
/// the part that one inner member is responsible for.
fn gather(tiers: &[Tier<'_>], s: f64) -> f64 {
    match tiers {
        [] => 0.0,
        [only] => ring_gather(only, s),
        [inner, outer @ ..] => ring_gather(inner, s) + gather(outer, s / inner.n),
    }
}

fn all_to_all(tiers: &[Tier<'_>], s: f64) -> f64 {
    let n: f64 = tiers.iter().map(|t| t.n).product();
    let mut inside = 1.0;
    tiers
        .iter()
        .map(|t| {
            let peers = inside * (t.n - 1.0);
            inside *= t.n;
            peers * t.level.latency_s + s * peers / n / effective(t.level, s)
        })
        .sum()
}
