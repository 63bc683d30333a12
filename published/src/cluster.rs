//! The cluster of a row: hosts of the catalogue's device, joined by the row's links, with the
//! software of its framework's generation.

use crate::facts::Facts;
use crate::row::Row;
use crate::{Unmodelled, precision};
use cost_model::presets::{self, System};
use ir::cluster::Cluster;
use ir::software::Scaling;
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
        between: Some(links.between.clone()),
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
    cluster.device.sustained_share = facts.sustained_share(device).map_err(Unmodelled::Cluster)?;
    cluster.device.sustained_share_of = facts.sustained_share_of(device);
    let (name, generation) = facts.generation(row)?;
    let mut software = facts.software(name).map_err(Unmodelled::Cluster)?;
    software.attention = facts
        .attention_of(row, generation, device)
        .map_err(Unmodelled::Cluster)?;
    for (level, link) in cluster
        .levels
        .iter_mut()
        .zip([&links.inside, &links.between])
    {
        // An assumption: what collectives lose in training, waiting for the slowest rank and for
        // each other, single messages do not.
        level.message_efficiency = Some(level.efficiency);
        level.efficiency = (level.efficiency * facts.link_share(link)).min(1.0);
    }
    software.memory = facts.memory.process(name, row)?;
    software.unaligned_matmul_share = facts.unaligned_share(device);
    let types = precision::types(row)?;
    if generation.sums_in_f16 && types.activations.compute() == DType::F16 {
        software.sum_dtype = Some(DType::F16);
    }
    if let Some((dtype, scaling)) = types.matmul {
        let scaling = scaling.unwrap_or(generation.fp8_scaling);
        if generation.whole_gathers_of.contains(&dtype) {
            software.piecewise_axes.retain(|axis| axis != "tensor");
        }
        if scaling == Scaling::Row {
            software.narrow_matmul_share = generation.rowwise_share.unwrap_or(1.0);
        }
        if scaling == Scaling::Block32 {
            software.narrow_matmul_share = facts.block_scaled_share(device);
        }
        // One scale for a row of a matrix does not survive a gather of its pieces (torchao).
        software.narrow_gathers &= scaling != Scaling::Row;
        let one_scale = matches!(scaling, Scaling::Delayed | Scaling::Tensor);
        software.single_copies = device.any_layout && dtype == DType::F8e4m3 && one_scale;
        (software.matmul_dtype, software.matmul_scaling) = (Some(dtype), scaling);
    }
    facts.recipes.apply(row, &mut software);
    // The column does not have it: torchtitan's notes say which runs overlap them.
    let notes = row.text("notes").unwrap_or("").to_lowercase();
    if notes.contains("async tp") || notes.contains("asynctp") {
        software.blocking_axes.clear();
        software.piecewise_axes = vec!["tensor".into()];
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

/// Memory of the row's device, as the catalogue has it.
pub fn memory(row: &Row, facts: &Facts) -> Result<Bytes, Unmodelled> {
    let name = &facts.device(row)?.device;
    let catalogue = presets::catalogue().map_err(|e| Unmodelled::Cluster(e.to_string()))?;
    let system = catalogue.systems().iter().find(|s| s.device == *name);
    let cluster = system.and_then(|s| catalogue.cluster(s).ok());
    let memory = cluster.map(|c| c.device.memory_bytes);
    memory.ok_or_else(|| Unmodelled::Cluster(format!("no system has the device {name}")))
}

fn count(row: &Row, column: &str) -> Result<u32, Unmodelled> {
    let n = row.required_count(column)?;
    u32::try_from(n).map_err(|_| Unmodelled::Cluster(format!("`{column}` is {n}")))
}
