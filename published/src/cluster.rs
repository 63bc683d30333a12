//! The cluster of a row: hosts of a built-in cluster, joined by the row's link.

use crate::Unmodelled;
use crate::facts::Facts;
use crate::row::Row;
use ir::Bytes;
use ir::cluster::{Cluster, Level};

/// A run that was measured fitted its devices, so their capacity must not shape its plan.
const UNBOUNDED_MEMORY: Bytes = Bytes(1 << 60);

/// The cluster that a row ran on, with as much memory as asked for.
///
/// Fails where the device or the link is not in the data files, or the GPUs do not make whole
/// hosts.
pub fn cluster(row: &Row, facts: &Facts) -> Result<Cluster, Unmodelled> {
    let name = &facts.device(row)?.cluster;
    let total = count(row, "gpus_total")?;
    let per_host = count(row, "gpus_per_node")?.min(total);
    if !total.is_multiple_of(per_host) {
        return Err(Unmodelled::Feature(format!(
            "{total} GPUs in hosts of {per_host}"
        )));
    }
    let (generation, facts_of) = facts.generation(row)?;
    let mut cluster =
        cost_model::presets::load(name, 1).map_err(|e| Unmodelled::Cluster(e.to_string()))?;
    cluster.n_hosts = total / per_host;
    cluster.devices_per_host = per_host;
    cluster.device.memory_bytes = UNBOUNDED_MEMORY;
    cluster.software = Some(facts_of.software(generation));
    let device = facts.device(row)?;
    cluster.device.multiprocessors = device.multiprocessors;
    cluster.device.sustained_share = device.sustained_share;
    cluster.levels.truncate(1);
    cluster.levels[0].devices = per_host;
    if cluster.n_hosts > 1 {
        let link = facts.host_link(row)?;
        cluster.levels.push(Level {
            name: link.name.into(),
            devices: total,
            latency_s: link.class.latency_s,
            bandwidth_bytes_per_s: link.host_bytes_per_s / f64::from(per_host),
            efficiency: link.class.efficiency,
            half_bytes: link.class.half_bytes,
        });
    }
    match cluster.problems().first() {
        None => Ok(cluster),
        Some(problem) => Err(Unmodelled::Cluster(problem.clone())),
    }
}

fn count(row: &Row, column: &str) -> Result<u32, Unmodelled> {
    let n = row.required_count(column)?;
    u32::try_from(n).map_err(|_| Unmodelled::Cluster(format!("`{column}` is {n}")))
}
