//! Classes of equal ranks: which ranks of a role may stand for one another in the simulator.
//!
//! All ranks of a role carry out the same instructions on shards padded to the same size, so
//! kernels take the same time on all of them, and their arenas are the same. A transfer is
//! priced once, for its most loaded rank or port ([`crate::costs::Wire`]). What is left are
//! collectives: a rank's take the time of the group that it is in, which depends on the links
//! that the group crosses. Ranks of a role whose groups cross the same links, whichever axes a
//! collective is over, are a **class**.
//!
//! ```text
//! hosts of 4:       | 0 1 2 3 | 4 5 6 7 | 8 ..        mesh of 6 ranks, 2 x 3
//! groups of axis 1:   0 1 2 | 3 | 4 5                 0-2 within a host, 3-5 across two
//! groups of axis 0:   0-3 1-4 2-5                     0-3 within a host, the others not
//! classes:            {0} {1 2} {3} {4 5}
//! ```
//!
//! A mesh that begins with a host and whose inner axes divide one, as those that the planner
//! makes of hosts of 2^k devices, is one class: then one rank per role gives exactly what all
//! would. Where a role has several classes the simulator lets each collective take what it
//! takes the slowest of them, so its step time is an upper bound. Both are said of devices
//! whose streams run side by side; ranks that share processors are taken to keep in step
//! within a role, whatever their class.

use crate::collectives::{ascending_group, crossings};
use ir::cluster::Cluster;
use ir::program::{InstrKind, RoleProgram};
use ir::{AxisId, LogicalMesh, Rank};
use std::collections::{BTreeMap, BTreeSet};

/// Ranks of a role that take the same time for everything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankClass {
    /// The first one, which stands for them.
    pub first: Rank,
    /// How many there are.
    pub n_ranks: u32,
}

/// The classes of a role's ranks, in the order of their first ranks.
pub fn classes(role: &RoleProgram, cluster: &Cluster) -> Vec<RankClass> {
    let first = role.mesh.devices.first_rank.0;
    let mut kinds: Vec<Vec<usize>> = vec![Vec::new(); role.mesh.n_devices() as usize];
    for axes in groupings(role) {
        let groups = groups(&role.mesh, &axes);
        let mut known = BTreeMap::new();
        for group in groups {
            let next = known.len();
            let kind = *known.entry(crossings(cluster, &group)).or_insert(next);
            for rank in group {
                kinds[(rank - first) as usize].push(kind);
            }
        }
    }
    let mut found: BTreeMap<Vec<usize>, RankClass> = BTreeMap::new();
    for (kind, rank) in kinds.into_iter().zip(role.mesh.ranks()) {
        let class = found.entry(kind).or_insert(RankClass {
            first: rank,
            n_ranks: 0,
        });
        class.n_ranks += 1;
    }
    let mut classes: Vec<RankClass> = found.into_values().collect();
    classes.sort_by_key(|c| c.first);
    classes
}

/// A rank of every kind of group over `axes` of `mesh`.
pub fn kinds_of_group(cluster: &Cluster, mesh: &LogicalMesh, axes: &[AxisId]) -> Vec<Rank> {
    let mut known = BTreeMap::new();
    for group in groups(mesh, axes) {
        known
            .entry(crossings(cluster, &group))
            .or_insert(Rank(group[0]));
    }
    known.into_values().collect()
}

/// The lists of axes that the role's collectives are over.
fn groupings(role: &RoleProgram) -> BTreeSet<Vec<AxisId>> {
    let instructions = role.templates.iter().flat_map(|t| &t.instructions);
    let axes = instructions.filter_map(|i| match &i.kind {
        InstrKind::Collective { axes, .. } => {
            let mut axes = axes.clone();
            axes.sort_unstable();
            axes.dedup();
            axes.iter()
                .all(|a| a.index() < role.mesh.axes.len())
                .then_some(axes)
        }
        _ => None,
    });
    axes.collect()
}

/// All groups over `axes`, each ascending, in the order of their first ranks.
fn groups(mesh: &LogicalMesh, axes: &[AxisId]) -> Vec<Vec<u32>> {
    let is_first = |rank: &Rank| {
        let coords = mesh.coords(*rank).unwrap_or_default();
        axes.iter().all(|a| coords.get(a.index()) == Some(&0))
    };
    let firsts = mesh.ranks().filter(is_first);
    firsts
        .map(|rank| ascending_group(mesh, axes, rank))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::role;
    use ir::StreamId;
    use ir::collective::CollectiveKind;
    use ir::mesh::{Axis, DeviceMesh};
    use ir::program::{Instruction, Template, TemplateKind};
    use ir::{Pass, Reduction};

    /// Hosts of four.
    fn cluster() -> Cluster {
        crate::presets::load("h100-sxm*4+nvlink4+roce-400*4", 4).unwrap()
    }

    /// A role with an all-reduce over each of its axes.
    fn with_axes(first: u32, sizes: &[u32]) -> RoleProgram {
        let mut role = role(0, first, sizes.iter().product());
        let axis = |&size: &u32| Axis {
            name: format!("a{size}"),
            size,
        };
        role.mesh = LogicalMesh {
            devices: DeviceMesh {
                first_rank: Rank(first),
                n_devices: sizes.iter().product(),
            },
            axes: sizes.iter().map(axis).collect(),
        };
        let sum = |a| Instruction {
            kind: InstrKind::Collective {
                contract: ir::Contract::new(
                    CollectiveKind::AllReduce(Reduction::Sum),
                    ir::DType::F32,
                    ir::Order::Fixed,
                ),
                kind: CollectiveKind::AllReduce(Reduction::Sum),
                axes: vec![AxisId(a)],
                items: Vec::new(),
            },
            stream: StreamId(0),
            deps: Vec::new(),
            events: Vec::new(),
            pass: Pass::F,
            layer: None,
            call: ir::program::Call::Own,
        };
        role.templates = vec![Template {
            kind: TemplateKind::Forward,
            chunk: 0,
            instructions: (0..sizes.len() as u32).map(sum).collect(),
        }];
        role
    }

    fn found(first: u32, sizes: &[u32]) -> Vec<(u32, u32)> {
        let classes = classes(&with_axes(first, sizes), &cluster());
        classes.iter().map(|c| (c.first.0, c.n_ranks)).collect()
    }

    #[test]
    fn whole_hosts_are_one_class() {
        assert_eq!(found(0, &[4, 4]), [(0, 16)]);
        assert_eq!(found(4, &[2, 2]), [(4, 4)]);
        assert_eq!(found(8, &[4, 2]), [(8, 8)]);
    }

    #[test]
    fn groups_across_hosts_are_told_apart() {
        // The picture of the module: {0} {1 2} {3} {4 5}.
        assert_eq!(found(0, &[2, 3]), [(0, 1), (1, 2), (3, 1), (4, 2)]);
        // A mesh in the middle of hosts: 2-3 in one, 4-5 in the next.
        assert_eq!(found(2, &[4]), [(2, 4)]);
        assert_eq!(found(3, &[2, 2]), [(3, 1), (4, 1), (5, 1), (6, 1)]);
    }
}
