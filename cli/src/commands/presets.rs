//! `presets`: the clusters that are built in.

use crate::args::PresetsArgs;
use crate::cluster;
use crate::failure::{Exit, Failure};
use crate::report;
use cost_model::presets;
use serde_json::json;

pub fn run(args: &PresetsArgs) -> Result<(), Failure> {
    if let Some(name) = &args.name {
        return one(name, args.json);
    }
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
            .map(|l| {
                let shared = match l.devices_per_port {
                    1 => String::new(),
                    n => format!(" for {n}"),
                };
                let rate = report::count(l.bandwidth_bytes_per_s);
                format!("{} {rate}B/s{shared}", l.name)
            })
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
    if let Ok(catalogue) = presets::catalogue() {
        let list = |names: Vec<&str>| names.join(", ");
        report::out(&format!("Devices: {}", list(catalogue.devices().collect())))?;
        report::out(&format!("Links: {}", list(catalogue.links().collect())))?;
    }
    report::out(
        "A cluster may be composed: --cluster DEVICE*COUNT+LINK+LINK*CARDS, such as h100-sxm*8+nvlink4+roce-400*4, or DEVICE*COUNT+LINK for one host.\n\
         `meshwright presets NAME` prints one as a file with the source of every figure; --hosts changes the number of hosts.",
    )
}

/// Prints one cluster as a file.
fn one(name: &str, json: bool) -> Result<(), Failure> {
    let cluster = cluster::load(name, None, None)?;
    if json {
        return report::print_json(&cluster);
    }
    let text = presets::print(&cluster)
        .map_err(|e| Failure::new(Exit::Internal, format!("printing `{name}`: {e}")))?;
    report::document(text.trim_end())
}
