//! Every preset is sound, every figure has a source, and what is cited is what is measured.

use super::*;
use crate::compute::{matmul_rate, peak_rate};
use ir::DType;
use ir::cluster::Cluster;
use ir::op::MatmulShape;

/// Paths of all numbers, levels by their name.
fn numbers(value: &toml::Value, path: &str, found: &mut Vec<String>) {
    let under = |key: &str| {
        if path.is_empty() {
            key.to_string()
        } else {
            format!("{path}.{key}")
        }
    };
    match value {
        toml::Value::Integer(_) | toml::Value::Float(_) => found.push(path.to_string()),
        toml::Value::Table(t) => t
            .iter()
            .filter(|(k, _)| *k != "sources")
            .for_each(|(k, v)| numbers(v, &under(k), found)),
        toml::Value::Array(items) => {
            for item in items {
                numbers(item, &under(item["name"].as_str().unwrap()), found);
            }
        }
        _ => {}
    }
}

#[test]
fn shares_are_more_than_nothing_and_of_rates_that_there_are() {
    let problem = |change: fn(&mut ir::cluster::Device)| {
        let mut cluster = load("dgx-a100-80gb", 1).unwrap();
        change(&mut cluster.device);
        cluster.problems().join("; ")
    };
    assert_eq!(
        problem(|d| d.memory_efficiency = 0.0),
        "device.memory_efficiency is 0, expected more than 0, at most 1"
    );
    assert_eq!(problem(|d| d.sustained_share = 1.0), "");
    let held = |d: &mut ir::cluster::Device| {
        d.sustained_share_of.insert(ir::DType::Bf16, 0.5);
    };
    assert_eq!(problem(held), "");
    assert_eq!(
        problem(|d| {
            d.sustained_share_of.insert(ir::DType::F8e4m3, 0.5);
        }),
        "device.sustained_share_of.f8e4m3 is a share of no rate: device.peak_flops_per_s has f32, bf16, f16"
    );
}

#[test]
fn every_preset_is_sound_and_every_number_has_a_source() {
    for name in names() {
        let cluster = load(name, 1).unwrap();
        assert_eq!(cluster.problems(), Vec::<String>::new(), "{name}");
        let mut keys = Vec::new();
        numbers(&toml::Value::try_from(&cluster).unwrap(), "", &mut keys);
        assert!(keys.len() > 20);
        for key in keys.iter().filter(|k| *k != "version" && *k != "n_hosts") {
            let mut prefixes = key
                .match_indices('.')
                .map(|(i, _)| &key[..i])
                .chain([key.as_str()]);
            assert!(
                prefixes.any(|p| cluster.sources.contains_key(p)),
                "{name}: {key} has no source"
            );
        }
        for source in cluster.sources.keys() {
            let covers = |k: &String| k == source || k.starts_with(&format!("{source}."));
            assert!(
                keys.iter().any(covers),
                "{name}: source of `{source}`, which does not exist"
            );
        }
        assert_eq!(parse(&print(&cluster).unwrap()).unwrap(), cluster);
    }
}

#[test]
fn hosts_are_joined_by_the_last_level() {
    let cluster = load("dgx-h100", 2048).unwrap();
    assert_eq!(cluster.n_devices(), 16384);
    assert_eq!(cluster.level_between(0, 16383).unwrap().name, "infiniband");
    assert_eq!(cluster.level_between(8, 15).unwrap().name, "nvlink");
    assert!(matches!(
        load("cpu-default", 2),
        Err(PresetError::Hosts { .. })
    ));
    assert!(matches!(
        load("dgx-h100", 0),
        Err(PresetError::Hosts { .. })
    ));
    assert!(matches!(
        load("dgx-h100", u32::MAX),
        Err(PresetError::Hosts { .. })
    ));
    assert!(
        load("abacus", 1)
            .unwrap_err()
            .to_string()
            .contains("dgx-a100-80gb")
    );
    // A machine that was measured with four ranks is not called after them when it has three.
    let mut measured = load("cpu-default", 1).unwrap();
    measured.name = calibrated_name(measured.devices_per_host);
    let three = with_ranks(measured, 3).unwrap();
    assert_eq!(three.name, "this machine, 3 ranks");
    let eight = with_ranks(load("cpu-default", 1).unwrap(), 8).unwrap();
    assert_eq!(
        (
            eight.n_devices(),
            eight.pool.unwrap().devices,
            eight.levels[0].devices
        ),
        (8, 8, 8)
    );
}

#[test]
fn large_matmuls_come_close_to_what_was_measured_and_never_exceed_it() {
    let a100 = load("dgx-a100-80gb", 1).unwrap();
    let measured = |c: &Cluster| peak_rate(c, DType::Bf16) / c.device.sustained_share;
    assert!((measured(&a100) / 271.2e12 - 1.0).abs() < 1e-3);
    let h100 = load("dgx-h100", 1).unwrap();
    assert!((measured(&h100) / 794.5e12 - 1.0).abs() < 1e-3);
    for cluster in [&a100, &h100] {
        let rate = |m, n, k| {
            matmul_rate(cluster, DType::Bf16, MatmulShape { batch: 1, m, n, k })
                / peak_rate(cluster, DType::Bf16)
        };
        assert!((rate(2048, 12288, 12288) - 0.95).abs() < 0.01);
        assert!(rate(1 << 30, 1 << 30, 1 << 30) <= 1.0);
        assert!(rate(16, 4096, 4096) < 0.25);
    }
}

#[test]
fn the_catalogue_holds_what_it_promises() {
    let names = names();
    for old in [
        "cpu-default",
        "dgx-a100-40gb",
        "dgx-a100-80gb",
        "dgx-h100",
        "dgx-h200",
    ] {
        assert!(names.contains(&old), "{old}");
    }
    let mut sorted = names.clone();
    sorted.sort_unstable();
    sorted.dedup();
    assert_eq!(sorted.len(), names.len(), "names of presets are distinct");
    let catalogue = catalogue().unwrap();
    for device in catalogue.devices() {
        let used = |s: &System| s.device == device;
        assert!(
            catalogue.systems().iter().any(used),
            "no system has {device}"
        );
    }
}

#[test]
fn every_device_goes_with_its_links_and_every_network() {
    let catalogue = catalogue().unwrap();
    let is_network = |link: &&str| !link.starts_with("nvlink") && !link.starts_with("pcie");
    let (networks, local): (Vec<&str>, Vec<&str>) = catalogue.links().partition(is_network);
    for device in catalogue.devices() {
        let systems = catalogue.systems().iter().filter(|s| s.device == device);
        let own: Vec<&str> = systems.map(|s| s.inside.as_str()).collect();
        let pcie = local.iter().copied().filter(|l| l.starts_with("pcie"));
        for inside in pcie.chain(own) {
            let alone = find(&format!("{device}*4+{inside}")).unwrap().unwrap();
            assert_eq!(alone.problems(), Vec::<String>::new(), "{device} {inside}");
            assert_eq!((alone.n_devices(), alone.levels.len()), (4, 1));
            assert!(with_hosts(alone, 2).unwrap_err().contains("no link joins"));
            for between in &networks {
                let name = format!("{device}*4+{inside}+{between}*2");
                let cluster = find(&name).unwrap().unwrap();
                assert_eq!(cluster.problems(), Vec::<String>::new(), "{name}");
                assert_eq!(cluster.levels[1].devices_per_port, 2, "{name}");
            }
            for between in &local {
                assert!(find(&format!("{device}+{inside}+{between}")).is_err());
            }
        }
    }
}

#[test]
fn compositions_count_devices_and_cards() {
    let card = find("h100-sxm+nvlink4+efa-100*32").unwrap().unwrap();
    assert_eq!(card.devices_per_host, 8);
    // Four cards of 12.5 GB/s for each device.
    assert_eq!(card.levels[1].bandwidth_bytes_per_s, 4.0 * 12.5e9);
    assert_eq!(card.levels[1].devices_per_port, 1);
    let few = find("h100-sxm*8+nvlink4+roce-400*4").unwrap().unwrap();
    assert_eq!(few.levels[1].bandwidth_bytes_per_s, 50e9);
    assert_eq!(few.levels[1].devices_per_port, 2);
    // One card of 1.25 GB/s, unless more are asked for.
    for (cards, devices_per_port) in [("", 7), ("*1", 7), ("*7", 1)] {
        let name = format!("rtx-4090*7+pcie4+ethernet-10{cards}");
        let level = &find(&name).unwrap().unwrap().levels[1];
        assert_eq!(level.devices_per_port, devices_per_port, "{name}");
        assert_eq!(level.bandwidth_bytes_per_s, 1.25e9);
    }
    assert_eq!(find("dgx-h1000"), Ok(None));
    for (name, says) in [
        ("h100+nvlink4+roce-400", "devices are a100-pcie-40gb"),
        ("h100-sxm+nvlink9+roce-400", "there is no link `nvlink9`"),
        (
            "h100-sxm+nvlink4+roce-400+pcie5",
            "4 parts: expected DEVICE",
        ),
        ("h100-sxm+roce-400+nvlink4", "`roce-400` joins hosts"),
        (
            "h100-sxm+nvlink4+pcie5",
            "`pcie5` does not reach beyond a host",
        ),
        (
            "h100-sxm+nvlink5+roce-400",
            "no `nvlink5`: inside a host it has nvlink4",
        ),
        ("a100-pcie-40gb+nvlink3", "no NVLink or PCIe"),
        ("h100-sxm+nvlink4*2+roce-400", "takes no count"),
        ("h100-sxm*0+nvlink4+roce-400", "`0` is not a count"),
        ("h100-sxm*x+nvlink4+roce-400", "`x` is not a count"),
        ("+++", "expected DEVICE"),
        ("h100-sxm++roce-400", "a part is empty"),
        ("h100-sxm*4294967295+nvlink4+roce-400", ""),
    ] {
        match find(name) {
            Err(e) => assert!(e.to_string().contains(says) && !says.is_empty(), "{e}"),
            Ok(c) => assert!(!c.unwrap().problems().is_empty(), "{name}"),
        }
    }
}

#[test]
fn a_rack_joins_more_than_a_host() {
    let one = load("gb200-nvl72", 18).unwrap();
    assert_eq!(one.level_between(0, 71).unwrap().name, "nvlink");
    // Two racks and a half, and a rack that is not full.
    for (hosts, far) in [(45, "infiniband"), (5, "nvlink")] {
        let c = load("gb200-nvl72", hosts).unwrap();
        assert_eq!(c.n_devices(), 4 * hosts);
        assert_eq!(c.level_between(0, 4 * hosts - 1).unwrap().name, far);
        assert_eq!(with_hosts(c, 18).unwrap().levels[0].devices, 72);
    }
}

/// Efficiency of a row of the published table, by accelerator and precision.
fn measured_matmul(wanted: &str) -> Option<f64> {
    let text = include_str!("../../../benchmarks/published/matmul.csv");
    text.lines().skip(1).find_map(|line| {
        // No field before the rates has a comma.
        let f: Vec<&str> = line.split(',').collect();
        let rate = |i: usize| f[i].parse::<f64>().unwrap();
        (format!("{} {}", f[1], f[2]) == wanted).then(|| rate(3) / rate(4))
    })
}

#[test]
fn matmul_efficiencies_are_the_rows_that_they_cite() {
    let mut cited = 0;
    for name in names() {
        let cluster = load(name, 1).unwrap();
        for (dtype, &efficiency) in &cluster.device.matmul_efficiency {
            assert!(efficiency <= 1.0);
            let key = format!("device.matmul_efficiency.{}", dtype.name());
            let Some(source) = cluster.sources.get(&key) else {
                continue;
            };
            let Some(row) = source.strip_prefix("benchmarks/published/matmul.csv: ") else {
                assert!(
                    source.contains("assumption") || name == "cpu-default",
                    "{name}: {source}"
                );
                continue;
            };
            let measured = measured_matmul(row).unwrap_or_else(|| panic!("no row {row}"));
            assert!(
                (efficiency - measured).abs() < 6e-4,
                "{name} {key}: {measured}"
            );
            cited += 1;
        }
    }
    assert!(cited > 20);
}
