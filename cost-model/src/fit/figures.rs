//! The figures of a cluster file that are fitted, by name, and how two files differ in them.

use ir::cluster::Cluster;
use std::collections::BTreeMap;

/// A figure of a cluster file that a refinement changed.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Change {
    /// Key path in the file.
    pub key: String,
    /// Its value before; none where it was not there.
    pub old: Option<f64>,
    /// Its value now; none where it is gone.
    pub new: Option<f64>,
    /// Unit: `s`, `B/s`, `FLOP/s`; empty for shares and counts.
    pub unit: &'static str,
}

/// The figures in which two cluster files differ, in the order of their keys.
pub fn changes(old: &Cluster, new: &Cluster) -> Vec<Change> {
    let (old, new) = (figures(old), figures(new));
    let keys: std::collections::BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    keys.into_iter()
        .filter_map(|key| {
            let (a, b) = (old.get(key), new.get(key));
            (a.map(|x| x.0) != b.map(|x| x.0)).then(|| Change {
                key: key.clone(),
                old: a.map(|x| x.0),
                new: b.map(|x| x.0),
                unit: a.or(b).map_or("", |x| x.1),
            })
        })
        .collect()
}

/// Fitted figures by key path, with their units.
pub(super) fn figures(c: &Cluster) -> BTreeMap<String, (f64, &'static str)> {
    let mut all = BTreeMap::new();
    let mut add = |key: String, value: f64, unit| {
        all.insert(key, (value, unit));
    };
    let d = &c.device;
    for (t, x) in &d.peak_flops_per_s {
        add(
            format!("device.peak_flops_per_s.{}", t.name()),
            *x,
            "FLOP/s",
        );
    }
    for (t, x) in &d.matmul_efficiency {
        add(format!("device.matmul_efficiency.{}", t.name()), *x, "");
    }
    for (t, x) in &d.conversion_s_per_element {
        add(
            format!("device.conversion_s_per_element.{}", t.name()),
            *x,
            "s",
        );
    }
    for (name, x) in d.kernels.iter().flat_map(|k| &k.time_factor) {
        add(format!("device.kernels.time_factor.{name}"), *x, "");
    }
    for (key, x, unit) in [
        ("matmul_half_size.m", d.matmul_half_size.m, ""),
        ("matmul_half_size.n", d.matmul_half_size.n, ""),
        ("matmul_half_size.k", d.matmul_half_size.k, ""),
        ("attention_efficiency", d.attention_efficiency, ""),
        ("vector_flops_per_s", d.vector_flops_per_s, "FLOP/s"),
        (
            "memory_bandwidth_bytes_per_s",
            d.memory_bandwidth_bytes_per_s,
            "B/s",
        ),
        ("memory_efficiency", d.memory_efficiency, ""),
        ("launch_s", d.launch_s, "s"),
    ] {
        add(format!("device.{key}"), x, unit);
    }
    for l in &c.levels {
        let key = |name: &str| format!("levels.{}.{name}", l.name);
        add(key("latency_s"), l.latency_s, "s");
        add(key("bandwidth_bytes_per_s"), l.bandwidth_bytes_per_s, "B/s");
        if let Some(s) = &l.shared_memory {
            let key = |name: &str| key(&format!("shared_memory.{name}"));
            add(key("meeting_s"), s.meeting_s, "s");
            add(key("copy_bytes_per_s"), s.copy_bytes_per_s, "B/s");
            add(key("reduce_bytes_per_s"), s.reduce_bytes_per_s, "B/s");
        }
    }
    if let Some(pool) = &c.pool {
        add("pool.compute_devices".into(), pool.compute_devices, "");
    }
    all
}
