//! Submeshes, and the logical meshes that each of them may be.

use super::Search;
use crate::pins::{AxisRole, Pins};
use ir::cluster::Cluster;
use ir::{Axis, DeviceMesh, LogicalMesh, Rank};

/// Devices of a stage: how many, where they may lie, and what they are there.
#[derive(Clone, Debug)]
pub(super) struct Submesh {
    pub(super) n_devices: u32,
    /// The first ranks at which devices and links are these, ascending; none where that is any.
    pub(super) starts: Vec<u32>,
    /// The cluster as the ranks see it.
    pub(super) seen: Cluster,
}

/// One logical shape of a submesh.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    /// Index into `Search::submeshes`.
    pub(super) submesh: usize,
    pub(super) mesh: LogicalMesh,
    pub(super) roles: Vec<AxisRole>,
    /// Whether its second axis joins several hosts.
    pub(super) is_wide: bool,
}

impl Search<'_> {
    /// Logical shapes of every submesh that suit a microbatch of `batch` samples, with the wide ones of
    /// the whole cluster behind those that every pipeline may have.
    pub(super) fn shapes(&self, batch: u64) -> Vec<Shape> {
        let mut shapes = self.narrow_shapes(batch);
        shapes.extend(self.wide_shapes());
        shapes
    }

    /// Those of them that every pipeline may have.
    pub(super) fn narrow_shapes(&self, batch: u64) -> Vec<Shape> {
        let mut shapes = Vec::new();
        for (submesh, at) in self.submeshes.iter().enumerate() {
            let n = at.n_devices;
            let devices = DeviceMesh {
                first_rank: Rank(at.starts.first().copied().unwrap_or(0)),
                n_devices: n,
            };
            let per_host = self.cluster.devices_per_host_at(devices.first_rank);
            let axis = |name: &str, size: u32| Axis {
                name: name.into(),
                size,
            };
            if self.pins.fixes_mesh() {
                let degrees = self.tensor_degrees(n, per_host);
                let of = |&tensor: &u32| self.pinned_shape(submesh, devices, batch, tensor);
                shapes.extend(degrees.iter().filter_map(of));
                continue;
            }
            for y in (1..=per_host.min(n))
                .filter(|y| n.is_multiple_of(*y) && per_host.is_multiple_of(*y))
            {
                // One axis over all devices is one shape, whichever axis has it.
                if y == 1 && n > 1 && per_host.is_multiple_of(n) {
                    continue;
                }
                let mesh = LogicalMesh::new(devices, vec![axis("x", n / y), axis("y", y)]);
                shapes.extend(mesh.map(|mesh| Shape {
                    submesh,
                    mesh,
                    roles: vec![AxisRole::Free, AxisRole::Free],
                    is_wide: false,
                }));
            }
        }
        shapes
    }

    /// Shapes of the whole cluster whose second axis joins a power of two of hosts: states split over
    /// some of the hosts, with copies over the others, are of these.
    fn wide_shapes(&self) -> Vec<Shape> {
        let n = self.cluster.n_devices();
        let whole = self.submeshes.iter().position(|s| s.n_devices == n);
        let Some(submesh) = whole.filter(|_| !self.pins.fixes_mesh() && self.cluster.is_equal())
        else {
            return Vec::new();
        };
        let devices = DeviceMesh {
            first_rank: Rank(0),
            n_devices: n,
        };
        let per_host = self.cluster.devices_per_host_at(devices.first_rank);
        let shape = |y: u32| {
            let axis = |name: &str, size: u32| Axis {
                name: name.into(),
                size,
            };
            let mesh = LogicalMesh::new(devices, vec![axis("x", n / y), axis("y", y)])?;
            Some(Shape {
                submesh,
                mesh,
                roles: vec![AxisRole::Free, AxisRole::Free],
                is_wide: true,
            })
        };
        wide_sizes(per_host, n).filter_map(shape).collect()
    }

    /// Tensor-parallel degrees that the pins leave to a submesh: of a part of a host where neither
    /// they nor the data-parallel degree are pinned.
    fn tensor_degrees(&self, n_devices: u32, per_host: u32) -> Vec<u32> {
        let pins = self.pins;
        let n = n_devices / pins.context.unwrap_or(1).max(1);
        match (pins.data, pins.tensor) {
            (_, Some(tensor)) => vec![tensor],
            (Some(data), None) => vec![n / data.max(1)],
            (None, None) => (1..=per_host.min(n))
                .filter(|t| n.is_multiple_of(*t) && per_host.is_multiple_of(*t))
                .collect(),
        }
    }

    /// The shape that the degree pins and a tensor-parallel degree give a submesh; `None` where they
    /// do not fit it, or no sample would be left for some rank of the data axis.
    fn pinned_shape(
        &self,
        submesh: usize,
        devices: DeviceMesh,
        batch: u64,
        tensor: u32,
    ) -> Option<Shape> {
        let pins = self.pins;
        let n = devices.n_devices / pins.context.unwrap_or(1).max(1);
        let data = pins.data.unwrap_or_else(|| n / tensor.max(1));
        // Experts are split by a part of the ranks that split samples, and copies lie over one.
        let replicas = pins.replicas.unwrap_or(1).max(1);
        let inside = pins.expert.unwrap_or(1).max(1).checked_mul(replicas)?;
        let rest = data.is_multiple_of(inside).then_some(data / inside)?;
        // In this order as in Megatron-LM: tensor ranks are neighbours, context ranks next; copies
        // are farthest apart.
        let mut sizes: Vec<(AxisRole, u32)> = Vec::new();
        sizes.extend(pins.replicas.map(|n| (AxisRole::Replica, n)));
        sizes.push((AxisRole::Data, rest));
        sizes.extend(pins.expert.map(|e| (AxisRole::Expert, e)));
        sizes.extend(pins.context.map(|c| (AxisRole::Context, c)));
        sizes.push((AxisRole::Tensor, tensor));
        let names = pins.axis_names();
        let axes = names.iter().zip(&sizes);
        let axes = axes.map(|(name, &(_, size))| Axis {
            name: name.to_string(),
            size,
        });
        let mesh = LogicalMesh::new(devices, axes.collect())?;
        (u64::from(data) <= batch).then(|| Shape {
            submesh,
            mesh,
            roles: sizes.into_iter().map(|(role, _)| role).collect(),
            is_wide: false,
        })
    }
}

/// Numbers of devices on a power of two of hosts that divide `n` devices and are fewer.
fn wide_sizes(per_host: u32, n: u32) -> impl Iterator<Item = u32> {
    let powers = (1..31).map(move |k| per_host.max(1).saturating_mul(1 << k));
    let fewer = powers.take_while(move |y| *y < n);
    fewer.filter(move |y| n.is_multiple_of(*y))
}

/// The submeshes that stages may have.
///
/// A submesh of equal devices is a size. Of others it is a size and where devices and links are the
/// same: parts of a host, runs of whole hosts of a group that divide it, and whole groups together.
/// Pinned sizes lie one behind the other; where stages share meshes, each counts as slow and small
/// as the slowest and smallest device of all.
pub(super) fn submeshes(cluster: &Cluster, pins: &Pins) -> Vec<Submesh> {
    let ranks = |first: u32, n_devices: u32| DeviceMesh {
        first_rank: Rank(first),
        n_devices,
    };
    let n = cluster.n_devices();
    let shares_meshes = pins.schedule_kind().virtual_stages() > 1;
    if cluster.is_equal() || shares_meshes {
        let anywhere = |n_devices| Submesh {
            n_devices,
            starts: Vec::new(),
            seen: cluster.seen_by(ranks(0, n)).into_owned(),
        };
        return sizes(cluster, pins).into_iter().map(anywhere).collect();
    }
    let places = match pins.data.is_some() && pins.tensor.is_some() {
        true => {
            let size = sizes(cluster, pins)[0];
            (0..n / size).map(|i| ranks(i * size, size)).collect()
        }
        false => places(cluster),
    };
    // What the cost of a mesh depends on: the cluster as it sees it, and the level between each of
    // its ranks and the next.
    let mut known: Vec<(Vec<Option<usize>>, Submesh)> = Vec::new();
    for place in places {
        let first = place.first_rank.0;
        let seen = cluster.seen_by(place).into_owned();
        let level = |r: u32| (0..seen.levels.len()).find(|&i| seen.joins(i, r, r + 1));
        let joined: Vec<_> = (first..first + place.n_devices - 1).map(level).collect();
        let per_host = cluster.devices_per_host_at(place.first_rank);
        let same = known.iter_mut().find(|(j, s)| {
            let other = Rank(s.starts[0]);
            let alike = (&s.seen.device, s.n_devices) == (&seen.device, place.n_devices);
            let figures = s.seen.levels_at(other) == seen.levels_at(place.first_rank);
            let hosts = cluster.devices_per_host_at(other) == per_host;
            alike && figures && hosts && *j == joined
        });
        match same {
            Some((_, same)) => same.starts.push(first),
            None => {
                let new = Submesh {
                    n_devices: place.n_devices,
                    starts: vec![first],
                    seen,
                };
                known.push((joined, new));
            }
        }
    }
    known.into_iter().map(|(_, submesh)| submesh).collect()
}

/// Where stages may lie in a cluster of unequal devices, small before large, each size by its
/// first ranks.
fn places(cluster: &Cluster) -> Vec<DeviceMesh> {
    let together = |of: &[(usize, DeviceMesh)]| DeviceMesh {
        first_rank: of[0].1.first_rank,
        n_devices: of.iter().map(|(_, m)| m.n_devices).sum(),
    };
    let hosts: Vec<(usize, DeviceMesh)> = cluster.hosts().collect();
    let mut places = Vec::new();
    for (_, host) in &hosts {
        let (first, n) = (host.first_rank.0, host.n_devices);
        let whole = cluster.devices_per_host_at(host.first_rank);
        for k in (1..=n).filter(|k| whole.is_multiple_of(*k) || n.is_multiple_of(*k)) {
            let starts = (0..=n - k).step_by(k as usize);
            places.extend(starts.map(|at| DeviceMesh {
                first_rank: Rank(first + at),
                n_devices: k,
            }));
        }
    }
    for group in hosts.chunk_by(|a, b| a.0 == b.0) {
        let runs = (2..=group.len()).filter(|k| group.len().is_multiple_of(*k));
        places.extend(runs.flat_map(|k| group.chunks(k).map(together)));
    }
    let groups: Vec<&[(usize, DeviceMesh)]> = hosts.chunk_by(|a, b| a.0 == b.0).collect();
    for first in 0..groups.len() {
        for end in first + 2..=groups.len() {
            places.push(together(&groups[first..end].concat()));
        }
    }
    places.sort_by_key(|m| (m.n_devices, m.first_rank));
    places.dedup();
    places
}

/// Sizes of submeshes of equal devices: parts of a host that divide it, and whole hosts, that divide
/// the cluster. The pinned degrees fit the cluster ([`pins::check`]).
fn sizes(cluster: &Cluster, pins: &Pins) -> Vec<u32> {
    let n = cluster.n_devices();
    if let (Some(d), Some(t)) = (pins.data, pins.tensor) {
        return vec![d * t * pins.context.unwrap_or(1)];
    }
    if let Some(p) = pins.pipeline {
        return vec![n / p];
    }
    let host = cluster.devices_per_host;
    (1..=n)
        .filter(|k| {
            n.is_multiple_of(*k)
                && ((*k <= host && host.is_multiple_of(*k)) || k.is_multiple_of(host))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::wide_sizes;

    #[test]
    fn wide_axes_join_some_of_the_hosts() {
        let sizes = |per_host, n| wide_sizes(per_host, n).collect::<Vec<u32>>();
        assert_eq!(sizes(8, 256), [16, 32, 64, 128]);
        assert_eq!(sizes(8, 48), [16]);
        assert!(sizes(8, 16).is_empty());
        assert!(sizes(4, 12).is_empty());
    }
}
