//! Device meshes and logical meshes.
//!
//! A **device mesh** is the contiguous part of the cluster that a stage runs on. A
//! **logical mesh** names axes over it. Ranks are enumerated row-major, so the last axis
//! joins neighbouring devices (the fast links) and axis 0 the most distant ones.

use crate::{AxisId, Rank};
use serde::{Deserialize, Serialize};

/// A contiguous run of ranks: `first_rank .. first_rank + n_devices`.
///
/// Ranks are numbered host-major, so a run that starts at a host boundary and covers whole
/// hosts, or lies inside one host, is a submesh in Alpa's sense (Zheng et al. 2022, section 5.2).
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    schemars::JsonSchema,
)]
#[serde(deny_unknown_fields)]
pub struct DeviceMesh {
    /// First rank of the run.
    pub first_rank: Rank,
    /// Number of devices.
    pub n_devices: u32,
}

/// One named axis of a logical mesh.
#[derive(
    Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(deny_unknown_fields)]
pub struct Axis {
    /// Name, unique in its mesh (`x`, `y` from the search; `data`, `tensor` from pins).
    pub name: String,
    /// Number of devices along the axis, at least 1.
    pub size: u32,
}

/// Named axes over a device mesh; the product of their sizes is the number of devices.
#[derive(
    Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(deny_unknown_fields)]
pub struct LogicalMesh {
    /// The devices.
    pub devices: DeviceMesh,
    /// Axes, major (slow links) first.
    pub axes: Vec<Axis>,
}

impl LogicalMesh {
    /// A mesh over `devices` with the given axes; `None` when the sizes do not multiply to
    /// the number of devices or an axis is empty.
    pub fn new(devices: DeviceMesh, axes: Vec<Axis>) -> Option<Self> {
        let product = axes.iter().try_fold(1u32, |p, a| p.checked_mul(a.size))?;
        (product == devices.n_devices && product > 0).then_some(LogicalMesh { devices, axes })
    }
    /// Number of devices.
    pub fn n_devices(&self) -> u32 {
        self.devices.n_devices
    }
    /// Axis ids, major first.
    pub fn axis_ids(&self) -> impl Iterator<Item = AxisId> + use<> {
        (0..self.axes.len()).map(AxisId::new)
    }
    /// Size of an axis.
    pub fn size(&self, axis: AxisId) -> u64 {
        u64::from(self.axes[axis.index()].size)
    }
    /// Name of an axis.
    pub fn name(&self, axis: AxisId) -> &str {
        &self.axes[axis.index()].name
    }
    /// Distance in ranks between neighbours along `axis`.
    pub fn stride(&self, axis: AxisId) -> u32 {
        self.axes[axis.index() + 1..]
            .iter()
            .map(|a| a.size)
            .product()
    }
    /// Coordinates of a rank, major axis first; `None` when the rank is not in the mesh.
    pub fn coords(&self, rank: Rank) -> Option<Vec<u32>> {
        let mut rest = rank.0.checked_sub(self.devices.first_rank.0)?;
        if rest >= self.devices.n_devices {
            return None;
        }
        let mut coords = vec![0; self.axes.len()];
        for (i, axis) in self.axes.iter().enumerate().rev() {
            coords[i] = rest % axis.size;
            rest /= axis.size;
        }
        Some(coords)
    }
    /// The rank at `coords` (one coordinate per axis, each below the axis size).
    pub fn rank_at(&self, coords: &[u32]) -> Rank {
        let offset = self
            .axes
            .iter()
            .zip(coords)
            .fold(0, |r, (a, &c)| r * a.size + c);
        Rank(self.devices.first_rank.0 + offset)
    }
    /// All ranks in mesh order.
    pub fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        let first = self.devices.first_rank.0;
        (first..first + self.devices.n_devices).map(Rank)
    }
    /// The group of `rank` over a set of axes: all ranks that differ from it only there, in
    /// row-major order of the axes **as listed** (first listed varies slowest).
    pub fn group(&self, rank: Rank, axes: &[AxisId]) -> Option<Vec<Rank>> {
        let base = self.coords(rank)?;
        let mut groups = vec![base];
        for &axis in axes {
            groups = groups
                .into_iter()
                .flat_map(|c| {
                    (0..self.axes[axis.index()].size).map(move |k| {
                        let mut c = c.clone();
                        c[axis.index()] = k;
                        c
                    })
                })
                .collect();
        }
        Some(groups.iter().map(|c| self.rank_at(c)).collect())
    }
}
