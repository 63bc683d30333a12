//! Time of collectives and transfers over the cluster's link levels.
//!
//! A group of `n` members whose neighbours lie at several levels splits into factors, one per
//! level, the innermost first (`g` members inside a node, `n/g` nodes). Every way of doing a
//! collective, an algorithm with a protocol, costs `fixed + bytes * slope`; the fastest
//! counts. [`candidates`] works the ways out once per group, so that a price is the least of a
//! few products.
//!
//! Invariants: time never falls as bytes grow, since every way is a rising line; an all-reduce
//! takes at least as long as a reduce-scatter or all-gather of the same tensor, since those
//! may also be done as an all-reduce of which a part is kept.
//!
//! Several groups of one mesh work at the same time, so devices of the mesh that share a port
//! share its bandwidth ([`ir::cluster::Level::devices_per_port`]).

mod candidates;
#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;

use crate::compute::conversion_s;
use ir::cluster::{Cluster, Level};
use ir::collective::CollectiveKind;
use ir::{AxisId, DType, LogicalMesh, Rank, Seconds};

/// How the ranks of a group cooperate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Algorithm {
    /// Every rank passes pieces to the next one.
    Ring,
    /// Two complementary binary trees, chains inside a node.
    Tree,
    /// The switch adds up what the ranks send (NVLink SHARP), trees or switches between nodes.
    InSwitch,
    /// Level by level: scatter inside, reduce outside, gather inside.
    Hierarchical,
    /// Every rank sends to every other one.
    Pairwise,
    /// Ranks are threads: each reads what the others have put where all can see it.
    SharedMemory,
}

/// One way of doing a collective: `fixed_s + bytes * s_per_byte` seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate<'a> {
    /// How ranks cooperate.
    pub algorithm: Algorithm,
    /// How they send; `None` for levels without protocols.
    pub protocol: Option<&'a str>,
    /// Seconds of an empty message.
    pub fixed_s: f64,
    /// Seconds that each byte adds.
    pub s_per_byte: f64,
}

impl Candidate<'_> {
    /// Seconds for `bytes`.
    pub fn seconds(&self, bytes: f64) -> f64 {
        self.fixed_s + bytes * self.s_per_byte
    }
}

/// One level's share in a group.
#[derive(Clone, Copy, Debug)]
struct Tier<'a> {
    level: &'a Level,
    /// Members at this level for each one below.
    n: f64,
    /// Members in a block of the level below.
    inside: f64,
    /// Devices of the mesh that use one port at the same time.
    sharing: f64,
    /// The level joins the devices of a host, of which there are several.
    in_host: bool,
}

/// A group of ranks with the ways of its collectives, worked out once for many prices.
#[derive(Clone, Debug)]
pub struct Group<'a> {
    n_members: f64,
    tiers: Vec<Tier<'a>>,
    all_reduce: Vec<Candidate<'a>>,
    scatter: Vec<Candidate<'a>>,
    gather: Vec<Candidate<'a>>,
    all_to_all: Vec<Candidate<'a>>,
    shift: Vec<Candidate<'a>>,
    broadcast: Vec<Candidate<'a>>,
}

impl<'a> Group<'a> {
    /// The group over `axes` of `mesh` that the first rank is in.
    pub fn new(cluster: &'a Cluster, mesh: &LogicalMesh, axes: &[AxisId]) -> Self {
        Group::of_rank(cluster, mesh, axes, mesh.devices.first_rank)
    }

    /// The group over `axes` of `mesh` that `rank` is in.
    pub fn of_rank(cluster: &'a Cluster, mesh: &LogicalMesh, axes: &[AxisId], rank: Rank) -> Self {
        let crossings = crossings(cluster, &ascending_group(mesh, axes, rank));
        let tiers = tiers(cluster, mesh, &crossings);
        let all_reduce = candidates::all_reduce(&tiers);
        let (mut scatter, mut gather) = (candidates::scatter(&tiers), candidates::gather(&tiers));
        // Scattering and gathering move a part of what an all-reduce moves.
        scatter.extend(all_reduce.iter().copied());
        gather.extend(all_reduce.iter().copied());
        Group {
            n_members: tiers.iter().map(|t| t.n).product(),
            all_reduce,
            scatter,
            gather,
            all_to_all: candidates::all_to_all(&tiers),
            shift: candidates::shift(&tiers),
            broadcast: candidates::broadcast(&tiers),
            tiers,
        }
    }

    /// Time of a collective of `bytes` (as defined in `ir::collective`) over the group.
    pub fn time(&self, kind: CollectiveKind, bytes: u64) -> Seconds {
        least(self.candidates(kind), bytes)
    }

    /// Time of an all-to-all of `bytes` of tokens, `copies` of each, that crosses the network once
    /// for every host that a token goes to.
    pub fn dispatch_time(&self, bytes: u64, copies: u64) -> Seconds {
        least(&candidates::dispatch(&self.tiers, copies as f64), bytes)
    }

    /// Time of the conversions in a collective of `bytes` of elements of `dtype`, on devices
    /// that reduce in f32 (see [`crate::compute::conversion_s`]): of `n` members each reduces
    /// the n-th part of the tensor, converting every member's piece and then the sum. Moving
    /// alone converts nothing.
    pub fn conversions(
        &self,
        cluster: &Cluster,
        kind: CollectiveKind,
        dtype: DType,
        bytes: u64,
    ) -> Seconds {
        let n = self.n_members;
        let reduced = match kind {
            CollectiveKind::AllReduce(_) | CollectiveKind::ReduceScatter(_) if n > 1.0 => {
                bytes as f64 / dtype.bytes() as f64 / n
            }
            _ => 0.0,
        };
        Seconds(conversion_s(cluster, dtype, (n + 1.0) * reduced))
    }

    /// Number of members; 1 for a group of one.
    pub fn n_members(&self) -> u64 {
        self.n_members.max(1.0) as u64
    }

    /// Time to bring one member's `bytes` to all others.
    pub fn broadcast_time(&self, bytes: u64) -> Seconds {
        least(&self.broadcast, bytes)
    }

    /// The ways of doing a collective of which [`Group::time`] takes the fastest; empty for a
    /// group of one.
    pub fn candidates(&self, kind: CollectiveKind) -> &[Candidate<'a>] {
        match kind {
            CollectiveKind::AllReduce(_) => &self.all_reduce,
            CollectiveKind::ReduceScatter(_) => &self.scatter,
            CollectiveKind::AllGather => &self.gather,
            CollectiveKind::AllToAll => &self.all_to_all,
            CollectiveKind::Shift => &self.shift,
        }
    }
}

fn least(candidates: &[Candidate<'_>], bytes: u64) -> Seconds {
    let fastest = candidates
        .iter()
        .map(|c| c.seconds(bytes as f64))
        .reduce(f64::min);
    Seconds(fastest.unwrap_or(0.0))
}

/// Time of a collective over `axes` of `mesh`, `bytes` as defined in `ir::collective`.
/// Zero for a group of one. Slices cost nothing here.
pub fn collective_time(
    cluster: &Cluster,
    mesh: &LogicalMesh,
    axes: &[AxisId],
    kind: CollectiveKind,
    bytes: u64,
) -> Seconds {
    Group::new(cluster, mesh, axes).time(kind, bytes)
}

/// Time to move `bytes` from one rank to another (0 for the same rank), alone on its port.
pub fn send_time(cluster: &Cluster, from: u32, to: u32, bytes: u64) -> Seconds {
    match cluster.level_between(from, to) {
        Some(level) if from != to && bytes > 0 => {
            let moved = bytes as f64 + level.half_bytes;
            Seconds(level.latency_s + moved / message_rate(&level))
        }
        Some(level) if from != to => Seconds(level.latency_s),
        _ => Seconds(0.0),
    }
}

/// Bytes per second of a long message from one device to another.
pub(crate) fn message_rate(level: &Level) -> f64 {
    let pair = level.pair_bandwidth_bytes_per_s.unwrap_or(f64::INFINITY);
    let share = level.message_efficiency.unwrap_or(level.efficiency);
    level.bandwidth_bytes_per_s.min(pair) * share
}

/// Members of a group, ascending, that one block of each level joins, levels from the innermost:
/// all that a collective's time depends on beyond the mesh's size. Blocks are counted exactly,
/// and are equal when sizes divide; otherwise the fullest counts.
pub(crate) fn crossings(cluster: &Cluster, group: &[u32]) -> Vec<usize> {
    let members = |level: usize| {
        let blocks = group.chunk_by(|a, b| cluster.joins(level, *a, *b));
        blocks.map(<[u32]>::len).max().unwrap_or(1)
    };
    (0..cluster.levels.len()).map(members).collect()
}

/// Factors of a group by level, innermost first; a group of one has none.
fn tiers<'a>(cluster: &'a Cluster, mesh: &LogicalMesh, crossings: &[usize]) -> Vec<Tier<'a>> {
    let mut tiers = Vec::new();
    let mut inside = 1usize;
    let has_links_inside = cluster.devices_per_host_of(mesh.devices) > 1;
    for (i, (level, &members)) in cluster.levels.iter().zip(crossings).enumerate() {
        if members > inside {
            tiers.push(Tier {
                level,
                n: members as f64 / inside as f64,
                inside: inside as f64,
                sharing: f64::from(level.devices_per_port.clamp(1, mesh.n_devices().max(1))),
                in_host: i == 0 && has_links_inside,
            });
            inside = members;
        }
    }
    tiers
}

/// Ranks of the group that `rank` is in, ascending.
pub(crate) fn ascending_group(mesh: &LogicalMesh, axes: &[AxisId], rank: Rank) -> Vec<u32> {
    let mut axes = axes.to_vec();
    axes.sort_unstable();
    axes.dedup();
    let coords = mesh.coords(rank).unwrap_or_default();
    let along = |axis: &AxisId| {
        coords
            .get(axis.index())
            .map_or(0, |c| c * mesh.stride(*axis))
    };
    let mut group = vec![rank.0 - axes.iter().map(along).sum::<u32>()];
    // Inner axes have smaller strides than all of an outer one, so major-first stays sorted.
    for &axis in &axes {
        let stride = mesh.stride(axis);
        group = group
            .iter()
            .flat_map(|&r| (0..mesh.size(axis) as u32).map(move |i| r + i * stride))
            .collect();
    }
    group
}
