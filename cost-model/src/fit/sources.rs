//! The sources of fitted figures in a cluster file.

use super::HALVES;
use ir::DType;
use ir::cluster::MeasuredPoint;
use std::collections::BTreeMap;

/// By key path: how the figure follows from how many points.
pub(super) fn sources(points: &[MeasuredPoint], n_ranks: u32) -> BTreeMap<String, String> {
    let mut sources = BTreeMap::new();
    let mut add = |key: &str, what: &str, how: &str| {
        // A name, or the first word of several.
        let named = |p: &&MeasuredPoint| {
            p.what == what || p.what.split_once(' ').is_some_and(|(w, _)| w == what)
        };
        let used: Vec<&MeasuredPoint> = points.iter().filter(named).collect();
        let n = used.iter().map(|p| p.n).min().unwrap_or(0);
        sources.insert(
            key.to_string(),
            format!(
                "calibrate: {how} {} points of `{what}`, each the median of {n} or more",
                used.len()
            ),
        );
    };
    add("device.peak_flops_per_s", "matmul f32", "best rate of");
    add("device.matmul_efficiency", "matmul f32", "fitted to");
    if points.iter().any(|p| p.what == "write") {
        let key = |k: &str| format!("storage.{k}_bytes_per_s");
        add(&key("device_to_host"), "to host", "rate of the largest of");
        add(&key("host_write"), "write", "rate of the largest of");
    }
    for dtype in HALVES.map(DType::name) {
        let matmuls = format!("matmul {dtype}");
        if points.iter().any(|p| p.what == matmuls) {
            let how = format!("kernels compute {dtype} in f32, so as f32: best rate of");
            add(
                &format!("device.peak_flops_per_s.{dtype}"),
                "matmul f32",
                &how,
            );
            let how = "f32's, times the mean ratio to f32 at the same sizes, conversions apart, of";
            add(&format!("device.matmul_efficiency.{dtype}"), &matmuls, how);
        }
        let converts = format!("convert {dtype}");
        if points.iter().any(|p| p.what == converts) {
            let key = format!("device.conversion_s_per_element.{dtype}");
            let how = "time beyond that of the same work in f32 over elements converted, of";
            add(&key, &converts, how);
        }
    }
    add("device.matmul_half_size", "matmul f32", "fitted to");
    add(
        "device.attention_efficiency",
        "attention f32",
        "rate of the products, over that of matmuls of their shape, fitted to",
    );
    add(
        "device.vector_flops_per_s",
        "vector",
        "total work over total time of those of at least 1/4 FLOP per byte among",
    );
    add(
        "device.memory_bandwidth_bytes_per_s",
        "copy",
        "best rate of",
    );
    add(
        "device.memory_efficiency",
        "copy",
        "mean share of the best rate over memory-bound kernels and",
    );
    add("device.launch_s", "launch", "median of");
    add(
        "device.kernels.time_factor",
        "vector",
        "total time over what the rates give, kernel by kernel, of attention and",
    );
    if n_ranks > 1 {
        add(
            "levels.shared-memory.shared_memory",
            "all_reduce",
            "a rank's own work, fitted to reduce_scatter, all_gather and",
        );
        for key in ["latency_s", "bandwidth_bytes_per_s"] {
            let key = format!("levels.shared-memory.{key}");
            match points.iter().any(|p| p.what == "send") {
                true => add(&key, "send", "a rank's own work, fitted to"),
                false => add(&key, "all_reduce", "as of collectives, from"),
            }
        }
        sources.insert(
            "levels.shared-memory".into(),
            "one machine: efficiency is part of the bandwidth, start-up part of the latency".into(),
        );
    }
    sources.insert(
        "pool.compute_devices".into(),
        "the machine's processors; points were measured with all of them at work".into(),
    );
    sources.insert(
        "devices_per_host".into(),
        "chosen: ranks that were calibrated".into(),
    );
    sources.insert("pool".into(), "all ranks share one machine".into());
    sources.insert(
        "device.memory_bytes".into(),
        "memory that the ranks may use together; each gets its share of the pool".into(),
    );
    sources.insert(
        "device.memory_reserved_bytes".into(),
        "assumption: stacks and bookkeeping of a rank, 1 MiB".into(),
    );
    sources
}
