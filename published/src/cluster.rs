//! The cluster of a row: hosts of the catalogue's device, joined by the row's links, with the
//! software of its framework's generation.

use crate::Unmodelled;
use crate::facts::Facts;
use crate::row::Row;
use cost_model::presets::{self, System};
use ir::cluster::Cluster;
use ir::{Bytes, DType};

/// A run that was measured fitted its devices, so their capacity must not shape its plan.
const UNBOUNDED_MEMORY: Bytes = Bytes(1 << 60);

/// The cluster that a row ran on, with as much memory as asked for.
///
/// Fails where the device or the links are not in the data files, the GPUs do not make whole
/// hosts, or the device lacks the row's precision.
pub fn cluster(row: &Row, facts: &Facts) -> Result<Cluster, Unmodelled> {
    let total = count(row, "gpus_total")?;
    let per_host = count(row, "gpus_per_node")?.min(total);
    if !total.is_multiple_of(per_host) {
        return Err(Unmodelled::Feature(format!(
            "{total} GPUs in hosts of {per_host}"
        )));
    }
    let (device, links) = (facts.device(row)?, facts.interconnect(row)?);
    let domain = links.domain_devices.unwrap_or(per_host).min(total);
    let system = System {
        preset: String::new(),
        name: format!("{} x {}", total / per_host, device.gpu),
        n_hosts: total / per_host,
        device: device.device.clone(),
        devices_per_host: per_host,
        inside: links.inside.clone(),
        domain_devices: Some(domain),
        between: links.between.clone(),
        cards: links.cards,
        source: links.source.clone(),
    };
    let described = presets::catalogue()
        .map_err(|e| e.to_string())
        .and_then(|catalogue| catalogue.cluster(&system));
    let mut cluster = described.map_err(Unmodelled::Cluster)?;
    if domain == total {
        cluster.levels.truncate(1);
    }
    cluster.device.memory_bytes = UNBOUNDED_MEMORY;
    cluster.device.multiprocessors = device.multiprocessors;
    cluster.device.sustained_share = device.sustained_share;
    let (name, generation) = facts.generation(row)?;
    let mut software = generation.software(name);
    software.matmul_dtype = matmul_dtype(row)?;
    // The column does not have it: torchtitan's notes say which runs overlap them.
    let notes = row.text("notes").unwrap_or("").to_lowercase();
    if notes.contains("async tp") || notes.contains("asynctp") {
        software.blocking_axes.clear();
    }
    if let Some(dtype) = software.matmul_dtype
        && !cluster.device.peak_flops_per_s.contains_key(&dtype)
    {
        return Err(Unmodelled::Feature(format!(
            "{} on {}",
            dtype.name(),
            device.gpu
        )));
    }
    cluster.software = Some(software);
    match cluster.problems().first() {
        None => Ok(cluster),
        Some(problem) => Err(Unmodelled::Cluster(problem.clone())),
    }
}

/// The type of the matmuls, where it is not that of the activations.
fn matmul_dtype(row: &Row) -> Result<Option<DType>, Unmodelled> {
    Ok(match row.required("precision")? {
        text if text.starts_with("fp8") || text.starts_with("mxfp8") => Some(DType::F8e4m3),
        _ => None,
    })
}

fn count(row: &Row, column: &str) -> Result<u32, Unmodelled> {
    let n = row.required_count(column)?;
    u32::try_from(n).map_err(|_| Unmodelled::Cluster(format!("`{column}` is {n}")))
}
