//! Prices of layout changes, remembered: the same few hundred questions recur in every layer.

use cost_model::{collectives, compute};
use ir::cluster::Cluster;
use ir::reshard::{self, LayoutStep};
use ir::{DType, LogicalMesh, ShardingSpec};
use std::collections::HashMap;

/// From, to, lengths, element type.
type Question = (ShardingSpec, ShardingSpec, Vec<u64>, DType);

/// Prices layout changes on one mesh.
pub(crate) struct Prices<'a> {
    cluster: &'a Cluster,
    mesh: &'a LogicalMesh,
    known: HashMap<Question, Option<f64>>,
}

impl<'a> Prices<'a> {
    pub(crate) fn new(cluster: &'a Cluster, mesh: &'a LogicalMesh) -> Self {
        Prices { cluster, mesh, known: HashMap::new() }
    }

    /// Seconds of the cheapest path; `None` when there is none. Lengths and dtype matter.
    pub(crate) fn price(&mut self, from: &ShardingSpec, to: &ShardingSpec, lens: &[u64], dtype: DType) -> Option<f64> {
        if from == to {
            return Some(0.0);
        }
        let key = (from.clone(), to.clone(), lens.to_vec(), dtype);
        if let Some(&known) = self.known.get(&key) {
            return known;
        }
        let price = best_path(self.cluster, self.mesh, from, to, lens, dtype).map(|(_, seconds)| seconds);
        self.known.insert(key, price);
        price
    }
}

/// The cheapest path and its seconds; ties go to the earlier path of `reshard::paths`.
pub(crate) fn best_path(
    cluster: &Cluster,
    mesh: &LogicalMesh,
    from: &ShardingSpec,
    to: &ShardingSpec,
    lens: &[u64],
    dtype: DType,
) -> Option<(Vec<LayoutStep>, f64)> {
    let mut best: Option<(Vec<LayoutStep>, f64)> = None;
    for path in reshard::paths(from, to) {
        let seconds = path_time(cluster, mesh, from, &path, lens, dtype);
        if best.as_ref().is_none_or(|(_, b)| seconds < *b) {
            best = Some((path, seconds));
        }
    }
    best
}

/// Seconds of a path: its collectives, and the copies of slices.
pub(crate) fn path_time(cluster: &Cluster, mesh: &LogicalMesh, from: &ShardingSpec, path: &[LayoutStep], lens: &[u64], dtype: DType) -> f64 {
    let mut spec = from.clone();
    let mut seconds = 0.0;
    for step in path {
        let Some(after) = step.apply(&spec) else { return f64::INFINITY };
        let bytes = |s: &ShardingSpec| s.local_elements(lens, mesh).saturating_mul(dtype.bytes());
        seconds += match step.collective(&spec) {
            Some(kind) => collectives::collective_time(cluster, mesh, &step.axes(), kind, bytes(&spec).max(bytes(&after))).0,
            None => compute::copy_time(cluster, bytes(&after)).0,
        };
        spec = after;
    }
    seconds
}
