//! `presets`: the clusters that are built in.

use crate::args::PresetsArgs;
use crate::cluster;
use crate::failure::Failure;
use crate::report;
use cost_model::presets;
use serde_json::json;

/// Runs the verb.
pub fn run(args: &PresetsArgs) -> Result<(), Failure> {
    let clusters = presets::names()
        .into_iter()
        .map(|n| Ok((n, cluster::load(n, None, None)?)))
        .collect::<Result<Vec<_>, Failure>>()?;
    if args.json {
        let list: Vec<_> = clusters
            .iter()
            .map(|(name, c)| json!({ "name": name, "cluster": c }))
            .collect();
        return report::print_json(&list);
    }
    let row = |(name, c): &(&str, ir::cluster::Cluster)| {
        let peaks: Vec<String> = c
            .device
            .peak_flops_per_s
            .iter()
            .map(|(t, p)| format!("{} {}", t.name(), report::count(*p)))
            .collect();
        let links: Vec<String> = c
            .levels
            .iter()
            .map(|l| format!("{} {}B/s", l.name, report::count(l.bandwidth_bytes_per_s)))
            .collect();
        vec![
            name.to_string(),
            c.device.name.clone(),
            format!("{} x {}", c.n_hosts, c.devices_per_host),
            c.device.memory_bytes.to_string(),
            peaks.join(", "),
            links.join(", "),
        ]
    };
    report::out(&report::table(
        &[
            "preset",
            "device",
            "hosts x devices",
            "memory",
            "peak FLOP/s",
            "links",
        ],
        clusters.iter().map(row).collect(),
        6,
    ))?;
    report::out(
        "Sources of the figures stand in the files in clusters/; --hosts changes the number of hosts.",
    )
}
