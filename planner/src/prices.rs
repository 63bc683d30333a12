//! Prices of layout changes, remembered: the same few hundred questions recur in every layer,
//! and the possible paths between two specs do not depend on the tensor at all.

use cost_model::collectives::Group;
use cost_model::compute;
use ir::cluster::Cluster;
use ir::reshard::{self, LayoutStep};
use ir::{AxisId, DType, LogicalMesh, ShardingSpec};
use std::collections::HashMap;

/// From, to, lengths, element type.
type Question = (ShardingSpec, ShardingSpec, Vec<u64>, DType);

/// Prices layout changes on one mesh.
pub(crate) struct Prices<'a> {
    cluster: &'a Cluster,
    mesh: &'a LogicalMesh,
    groups: HashMap<Vec<AxisId>, Group<'a>>,
    known: HashMap<Question, Option<f64>>,
}

impl<'a> Prices<'a> {
    pub(crate) fn new(cluster: &'a Cluster, mesh: &'a LogicalMesh) -> Self {
        Prices {
            cluster,
            mesh,
            groups: HashMap::new(),
            known: HashMap::new(),
        }
    }

    /// Seconds of the cheapest path; `None` when there is none. Lengths and dtype matter.
    pub(crate) fn price(
        &mut self,
        from: &ShardingSpec,
        to: &ShardingSpec,
        lens: &[u64],
        dtype: DType,
    ) -> Option<f64> {
        if from == to {
            return Some(0.0);
        }
        let key = (from.clone(), to.clone(), lens.to_vec(), dtype);
        if let Some(&known) = self.known.get(&key) {
            return known;
        }
        let price = self
            .best_path(from, to, lens, dtype)
            .map(|(_, seconds)| seconds);
        self.known.insert(key, price);
        price
    }

    /// The cheapest path and its seconds; ties go to the earlier path of `reshard::paths`.
    pub(crate) fn best_path(
        &mut self,
        from: &ShardingSpec,
        to: &ShardingSpec,
        lens: &[u64],
        dtype: DType,
    ) -> Option<(Vec<LayoutStep>, f64)> {
        let mut best: Option<(Vec<LayoutStep>, f64)> = None;
        for path in reshard::paths(from, to) {
            let seconds = self.path_time(from, &path, lens, dtype);
            if best.as_ref().is_none_or(|(_, b)| seconds < *b) {
                best = Some((path, seconds));
            }
        }
        best
    }

    /// Seconds of a path: its collectives, and the copies of slices.
    pub(crate) fn path_time(
        &mut self,
        from: &ShardingSpec,
        path: &[LayoutStep],
        lens: &[u64],
        dtype: DType,
    ) -> f64 {
        let mut spec = from.clone();
        let mut seconds = 0.0;
        for step in path {
            let Some(after) = step.apply(&spec) else {
                return f64::INFINITY;
            };
            let bytes = |s: &ShardingSpec| {
                s.local_elements(lens, self.mesh)
                    .saturating_mul(dtype.bytes())
            };
            let size = bytes(&spec).max(bytes(&after));
            seconds += match step.collective(&spec) {
                Some(kind) => {
                    let (cluster, mesh) = (self.cluster, self.mesh);
                    let axes = step.axes();
                    let group = self
                        .groups
                        .entry(axes)
                        .or_insert_with_key(|axes| Group::new(cluster, mesh, axes));
                    group.time(kind, size).0 + group.conversions(cluster, kind, dtype, size).0
                }
                None => compute::copy_time(self.cluster, bytes(&after)).0,
            };
            spec = after;
        }
        seconds
    }
}
