//! Submeshes, and the logical meshes that each of them may be.

use super::Search;
use crate::pins::{AxisRole, Pins};
use ir::cluster::Cluster;
use ir::{Axis, DeviceMesh, LogicalMesh, Rank};

/// One logical shape of a submesh.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    pub(super) mesh: LogicalMesh,
    pub(super) roles: Vec<AxisRole>,
}

impl Search<'_> {
    /// Logical shapes of every submesh that suit a microbatch of `batch` samples.
    pub(super) fn shapes(&self, batch: u64) -> Vec<(usize, Shape)> {
        let mut shapes = Vec::new();
        for (submesh, &n) in self.submeshes.iter().enumerate() {
            let devices = DeviceMesh {
                first_rank: Rank(0),
                n_devices: n,
            };
            let axis = |name: &str, size: u32| Axis {
                name: name.into(),
                size,
            };
            if self.pins.fixes_mesh() {
                shapes.extend(
                    self.pinned_shape(devices, batch)
                        .map(|shape| (submesh, shape)),
                );
                continue;
            }
            let inner_most = self.cluster.devices_per_host.min(n);
            for y in (1..=inner_most).filter(|y| {
                n.is_multiple_of(*y) && self.cluster.devices_per_host.is_multiple_of(*y)
            }) {
                // One axis over all devices is one shape, whichever axis has it.
                if y == 1 && n > 1 && self.cluster.devices_per_host.is_multiple_of(n) {
                    continue;
                }
                if let Some(mesh) = LogicalMesh::new(devices, vec![axis("x", n / y), axis("y", y)])
                {
                    shapes.push((
                        submesh,
                        Shape {
                            mesh,
                            roles: vec![AxisRole::Free, AxisRole::Free],
                        },
                    ));
                }
            }
        }
        shapes
    }

    /// The shape that the degree pins give a submesh; `None` where they do not fit it, or no
    /// sample would be left for some rank of the data axis.
    fn pinned_shape(&self, devices: DeviceMesh, batch: u64) -> Option<Shape> {
        let pins = self.pins;
        let n = devices.n_devices / pins.context.unwrap_or(1).max(1);
        let data = pins
            .data
            .unwrap_or_else(|| n / pins.tensor.unwrap_or(1).max(1));
        let tensor = pins.tensor.unwrap_or_else(|| n / data.max(1));
        // Experts are split by a part of the ranks that split samples.
        let expert = pins.expert.unwrap_or(1).max(1);
        let replicas = data.is_multiple_of(expert).then_some(data / expert)?;
        // In this order as in Megatron-LM: tensor ranks are neighbours, context ranks next.
        let mut sizes = vec![(AxisRole::Data, replicas)];
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
            mesh,
            roles: sizes.into_iter().map(|(role, _)| role).collect(),
        })
    }
}

/// Sizes of submeshes: parts of a host that divide it, and whole hosts, that divide the cluster.
/// The pinned degrees fit the cluster ([`pins::check`]).
pub(super) fn submeshes(cluster: &Cluster, pins: &Pins) -> Vec<u32> {
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
