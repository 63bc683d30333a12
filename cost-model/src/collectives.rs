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
//! * where a tree all-reduce beats the ring, a gather or scatter takes no longer than it: it
//!   moves a part of what the all-reduce moves (NCCL's PAT does so for small messages);
//! * hierarchical all-reduce: reduce-scatter inside, all-reduce of the piece outside,
//!   all-gather inside; all-gather and reduce-scatter likewise with pieces that grow outward in;
//! * all-to-all: `(n-1) a` and the bytes that cross each level over its bandwidth.
//!
//! The effective bandwidth of a message of `s` bytes is `bandwidth * efficiency *
//! s / (s + half_bytes)`. Several groups of the same mesh that cross a level at the same
//! time do not share a device's own link: `bandwidth_bytes_per_s` is per device.

use crate::compute::conversion_s;
use ir::cluster::{Cluster, Level};
use ir::collective::CollectiveKind;
use ir::{AxisId, DType, LogicalMesh, Seconds};

/// One level's share in a group.
#[derive(Clone, Copy, Debug)]
struct Tier<'a> {
    level: &'a Level,
    n: f64,
}

/// A group of ranks with the link levels it spans, worked out once for many prices.
#[derive(Clone, Debug)]
pub struct Group<'a> {
    tiers: Vec<Tier<'a>>,
}

impl<'a> Group<'a> {
    /// The group over `axes` of `mesh`.
    pub fn new(cluster: &'a Cluster, mesh: &LogicalMesh, axes: &[AxisId]) -> Self {
        Group {
            tiers: tiers(cluster, mesh, axes),
        }
    }

    /// Time of a collective of `bytes` (as defined in `ir::collective`) over the group.
    pub fn time(&self, kind: CollectiveKind, bytes: u64) -> Seconds {
        let s = bytes as f64;
        Seconds(match kind {
            CollectiveKind::AllReduce(_) => all_reduce(&self.tiers, s),
            CollectiveKind::ReduceScatter(_) | CollectiveKind::AllGather => gather(&self.tiers, s),
            CollectiveKind::AllToAll => all_to_all(&self.tiers, s),
        })
    }

    /// Time of the conversions in a collective of `bytes` elements of `dtype`, on devices that
    /// reduce in f32 (see [`crate::compute::conversion_s`]): of `n` members each reduces the
    /// n-th part of the tensor, converting every member's piece and then the sum. Moving alone
    /// converts nothing.
    pub fn conversions(
        &self,
        cluster: &Cluster,
        kind: CollectiveKind,
        dtype: DType,
        bytes: u64,
    ) -> Seconds {
        let n: f64 = self.tiers.iter().map(|t| t.n).product();
        let reduced = match kind {
            CollectiveKind::AllReduce(_) | CollectiveKind::ReduceScatter(_) if n > 1.0 => {
                bytes as f64 / dtype.bytes() as f64 / n
            }
            _ => 0.0,
        };
        Seconds(conversion_s(cluster, dtype, (n + 1.0) * reduced))
    }
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

/// Time to move `bytes` from one rank to another (0 for the same rank).
pub fn send_time(cluster: &Cluster, from: u32, to: u32, bytes: u64) -> Seconds {
    match cluster.level_between(from, to) {
        Some(level) if from != to => {
            Seconds(level.latency_s + bytes as f64 / effective(level, bytes as f64))
        }
        _ => Seconds(0.0),
    }
}

/// Factors of a group by level, innermost first; a group of one has none.
///
/// Members along the axes form a lattice; the number of members inside a block of `devices`
/// consecutive ranks is counted exactly over the first rank's group, where blocks are equal
/// when sizes divide; otherwise the fullest block counts.
fn tiers<'a>(cluster: &'a Cluster, mesh: &LogicalMesh, axes: &[AxisId]) -> Vec<Tier<'a>> {
    let group = ascending_group(mesh, axes);
    let mut tiers = Vec::new();
    let mut inside = 1usize;
    for level in cluster.levels.iter().filter(|_| group.len() > 1) {
        let block = |r: &u32| r / level.devices.max(1);
        let members = group
            .chunk_by(|a, b| block(a) == block(b))
            .map(<[u32]>::len)
            .max()
            .unwrap_or(1);
        if members > inside {
            tiers.push(Tier {
                level,
                n: members as f64 / inside as f64,
            });
            inside = members;
        }
    }
    tiers
}

/// Ranks of the first rank's group, ascending.
fn ascending_group(mesh: &LogicalMesh, axes: &[AxisId]) -> Vec<u32> {
    let mut axes = axes.to_vec();
    axes.sort_unstable();
    axes.dedup();
    let mut group = vec![mesh.devices.first_rank.0];
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

fn effective(level: &Level, message: f64) -> f64 {
    let share = message / (message + level.half_bytes);
    let share = if share > 0.0 { share } else { 1.0 };
    level.bandwidth_bytes_per_s * level.efficiency * share
}

fn ring_gather(tier: &Tier<'_>, s: f64) -> f64 {
    let moved = (tier.n - 1.0) / tier.n * s;
    (tier.n - 1.0) * tier.level.latency_s + moved / effective(tier.level, s)
}

fn tree_all_reduce(tier: &Tier<'_>, s: f64) -> f64 {
    2.0 * tier.n.log2().ceil() * tier.level.latency_s + 2.0 * s / effective(tier.level, s)
}

fn one_gather(tier: &Tier<'_>, s: f64) -> f64 {
    ring_gather(tier, s).min(tree_all_reduce(tier, s))
}

fn all_reduce(tiers: &[Tier<'_>], s: f64) -> f64 {
    match tiers {
        [] => 0.0,
        [only] => (2.0 * ring_gather(only, s)).min(tree_all_reduce(only, s)),
        [inner, outer @ ..] => 2.0 * one_gather(inner, s) + all_reduce(outer, s / inner.n),
    }
}

/// Gathering (or scattering): the innermost level moves the whole result, each outer level
/// the part that one inner member is responsible for.
fn gather(tiers: &[Tier<'_>], s: f64) -> f64 {
    match tiers {
        [] => 0.0,
        [inner, outer @ ..] => one_gather(inner, s) + gather(outer, s / inner.n),
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

#[cfg(test)]
mod tests {
    use super::*;
    use ir::mesh::{Axis, DeviceMesh};
    use ir::{Rank, ReduceKind};

    const GB: f64 = 1e9;
    const SUM: CollectiveKind = CollectiveKind::AllReduce(ReduceKind::Sum);
    const SCATTER: CollectiveKind = CollectiveKind::ReduceScatter(ReduceKind::Sum);

    /// Hosts of 8 with 100 GB/s and 1 us inside, 10 GB/s and 10 us between, half sizes zero.
    fn cluster(n_hosts: u32) -> Cluster {
        let mut c = crate::presets::load("dgx-a100-80gb", n_hosts).unwrap();
        for (level, latency, bandwidth) in [(0, 1e-6, 100.0 * GB), (1, 10e-6, 10.0 * GB)] {
            let l = &mut c.levels[level];
            (
                l.latency_s,
                l.bandwidth_bytes_per_s,
                l.efficiency,
                l.half_bytes,
            ) = (latency, bandwidth, 1.0, 0.0);
        }
        c
    }

    fn mesh(first: u32, sizes: &[u32]) -> LogicalMesh {
        let axes: Vec<Axis> = sizes
            .iter()
            .enumerate()
            .map(|(i, &size)| Axis {
                name: format!("a{i}"),
                size,
            })
            .collect();
        LogicalMesh::new(
            DeviceMesh {
                first_rank: Rank(first),
                n_devices: sizes.iter().product(),
            },
            axes,
        )
        .unwrap()
    }

    fn time(c: &Cluster, m: &LogicalMesh, axes: &[u32], kind: CollectiveKind, bytes: u64) -> f64 {
        let axes: Vec<AxisId> = axes.iter().map(|&a| AxisId(a)).collect();
        collective_time(c, m, &axes, kind, bytes).0
    }

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-12 * b.abs()
    }

    #[test]
    fn reducing_in_f32_converts_and_moving_does_not() {
        let mut c = cluster(1);
        c.device.conversion_s_per_element.insert(DType::Bf16, 1e-9);
        let m = mesh(0, &[8]);
        let group = Group::new(&c, &m, &[AxisId(0)]);
        let time = |kind, dtype| group.conversions(&c, kind, dtype, 16_000).0;
        // 8000 elements: a rank reduces 1000 of them, from 8 pieces into 1.
        assert!(close(time(SUM, DType::Bf16), 9.0 * 1000.0 * 1e-9));
        assert!(close(time(SCATTER, DType::Bf16), 9.0 * 1000.0 * 1e-9));
        assert_eq!(time(CollectiveKind::AllGather, DType::Bf16), 0.0);
        assert_eq!(time(SUM, DType::F32), 0.0);
        let alone = Group::new(&c, &m, &[]);
        assert_eq!(alone.conversions(&c, SUM, DType::Bf16, 16_000).0, 0.0);
    }

    #[test]
    fn a_ring_of_eight_inside_a_host() {
        let (c, m) = (cluster(1), mesh(0, &[8]));
        let s = 800_000_000;
        // Every rank sends 2 * 7/8 of 800 MB at 100 GB/s in 14 steps of 1 us.
        assert!(close(
            time(&c, &m, &[0], SUM, s),
            14.0 * 1e-6 + 2.0 * 7.0 / 8.0 * 0.8 * GB / (100.0 * GB)
        ));
        let half = 7.0 * 1e-6 + 7.0 / 8.0 * 0.8 * GB / (100.0 * GB);
        assert!(close(time(&c, &m, &[0], SCATTER, s), half));
        assert!(close(
            time(&c, &m, &[0], CollectiveKind::AllGather, s),
            half
        ));
        // Seven peers get an eighth each.
        assert!(close(time(&c, &m, &[0], CollectiveKind::AllToAll, s), half));
        assert_eq!(time(&c, &mesh(0, &[1]), &[0], SUM, s), 0.0);
    }

    #[test]
    fn a_small_all_reduce_takes_the_tree() {
        let (c, m) = (cluster(1), mesh(0, &[8]));
        // 2 log2(8) steps instead of 14.
        assert!(close(
            time(&c, &m, &[0], SUM, 8),
            6.0 * 1e-6 + 2.0 * 8.0 / (100.0 * GB)
        ));
    }

    #[test]
    fn two_hosts_reduce_inside_first() {
        let (c, m) = (cluster(2), mesh(0, &[2, 8]));
        let s = 800_000_000;
        let inside = 7.0 * 1e-6 + 7.0 / 8.0 * 0.8 * GB / (100.0 * GB);
        // Each rank all-reduces its eighth, 100 MB, with one partner at 10 GB/s.
        let between = 2.0 * (10e-6 + 0.5 * 0.1 * GB / (10.0 * GB));
        assert!(close(
            time(&c, &m, &[0, 1], SUM, s),
            inside + between + inside
        ));
        assert!(close(
            time(&c, &m, &[1, 0], SUM, s),
            inside + between + inside
        ));
        assert!(close(
            time(&c, &m, &[0, 1], CollectiveKind::AllGather, s),
            inside + between / 2.0
        ));
        // Across hosts alone: every rank has its own link, and the whole message to move.
        assert!(close(
            time(&c, &m, &[0], SUM, s),
            2.0 * (10e-6 + 0.5 * 0.8 * GB / (10.0 * GB))
        ));
        // All-to-all of 16: 7/16 stay inside, 8/16 go out.
        let out = 7.0 * 1e-6
            + 0.8 * GB * 7.0 / 16.0 / (100.0 * GB)
            + 8.0 * 10e-6
            + 0.8 * GB * 0.5 / (10.0 * GB);
        assert!(close(
            time(&c, &m, &[0, 1], CollectiveKind::AllToAll, s),
            out
        ));
    }

    #[test]
    fn where_the_mesh_lies_decides_the_links() {
        let c = cluster(2);
        // Four ranks around the border of the hosts: two on either side.
        let straddling = time(&c, &mesh(6, &[4]), &[0], SUM, 1 << 20);
        assert!(straddling > time(&c, &mesh(0, &[4]), &[0], SUM, 1 << 20));
        // Axis 0 of [2, 4] in one host has stride 4: still inside.
        assert!(close(
            time(&c, &mesh(0, &[2, 4]), &[0], SUM, 1 << 20),
            time(&c, &mesh(0, &[2]), &[0], SUM, 1 << 20)
        ));
    }

    #[test]
    fn half_sizes_halve_the_bandwidth() {
        let mut c = cluster(1);
        c.levels[0].half_bytes = 1e6;
        let m = mesh(0, &[2]);
        // Of 1 MB half is sent, at half of 100 GB/s.
        assert!(close(
            time(&c, &m, &[0], CollectiveKind::AllGather, 1_000_000),
            1e-6 + 0.5e6 / (50.0 * GB)
        ));
        assert!(close(
            send_time(&c, 0, 1, 1_000_000).0,
            1e-6 + 1e6 / (50.0 * GB)
        ));
        assert_eq!(send_time(&c, 1, 1, 1_000_000).0, 0.0);
    }

    #[test]
    fn more_bytes_take_longer_and_an_all_reduce_takes_longest() {
        for name in ["dgx-a100-80gb", "dgx-h100"] {
            let c = crate::presets::load(name, 8).unwrap();
            for (sizes, axes) in [
                (vec![8], vec![0]),
                (vec![2, 8], vec![0, 1]),
                (vec![8, 8], vec![0]),
                (vec![8, 8], vec![0, 1]),
                (vec![8, 2, 4], vec![0, 2]),
            ] {
                let m = mesh(0, &sizes);
                for kind in [
                    SUM,
                    SCATTER,
                    CollectiveKind::AllGather,
                    CollectiveKind::AllToAll,
                ] {
                    let times: Vec<f64> =
                        (0..36).map(|e| time(&c, &m, &axes, kind, 1 << e)).collect();
                    assert!(
                        times.windows(2).all(|w| w[0] <= w[1]),
                        "{name} {sizes:?} {axes:?} {kind:?}"
                    );
                    for (e, &t) in times
                        .iter()
                        .enumerate()
                        .filter(|_| kind != CollectiveKind::AllToAll)
                    {
                        assert!(t <= time(&c, &m, &axes, SUM, 1 << e));
                    }
                }
            }
        }
    }
}
