//! Clusters that come with Meshwright: the files of `clusters/`, embedded.

use ir::cluster::Cluster;

/// File name without its ending, and content.
const FILES: [(&str, &str); 5] = [
    (
        "cpu-default",
        include_str!("../../clusters/cpu-default.toml"),
    ),
    (
        "dgx-a100-40gb",
        include_str!("../../clusters/dgx-a100-40gb.toml"),
    ),
    (
        "dgx-a100-80gb",
        include_str!("../../clusters/dgx-a100-80gb.toml"),
    ),
    ("dgx-h100", include_str!("../../clusters/dgx-h100.toml")),
    ("dgx-h200", include_str!("../../clusters/dgx-h200.toml")),
];

/// Why a preset cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PresetError {
    /// There is no preset of this name.
    #[error("there is no cluster `{name}`; presets are {}", names().join(", "))]
    Unknown {
        /// The name asked for.
        name: String,
    },
    /// The embedded file does not parse.
    #[error("cluster `{name}`: {problem}")]
    Malformed {
        /// Name of the preset.
        name: String,
        /// What the parser says.
        problem: String,
    },
    /// The cluster cannot have that many hosts or ranks.
    #[error("cluster `{name}` with {n_hosts} hosts: {problem}")]
    Hosts {
        /// Name of the preset.
        name: String,
        /// Hosts asked for.
        n_hosts: u32,
        /// Why not.
        problem: String,
    },
}

/// Names of the presets, sorted.
pub fn names() -> Vec<&'static str> {
    FILES.iter().map(|f| f.0).collect()
}

/// The text of a preset, a TOML document.
pub fn text(name: &str) -> Option<&'static str> {
    FILES.iter().find(|f| f.0 == name).map(|f| f.1)
}

/// The preset `name` with `n_hosts` hosts.
///
/// Fails for an unknown name, and where the hosts are not joined by a link or too many.
pub fn load(name: &str, n_hosts: u32) -> Result<Cluster, PresetError> {
    let text = text(name).ok_or_else(|| PresetError::Unknown { name: name.into() })?;
    let cluster = parse(text).map_err(|problem| PresetError::Malformed {
        name: name.into(),
        problem,
    })?;
    with_hosts(cluster, n_hosts).map_err(|problem| PresetError::Hosts {
        name: name.into(),
        n_hosts,
        problem,
    })
}

/// A cluster from a TOML document; the error is the parser's message.
pub fn parse(text: &str) -> Result<Cluster, String> {
    toml::from_str(text).map_err(|e| e.to_string())
}

/// A cluster as a TOML document.
pub fn print(cluster: &Cluster) -> Result<String, String> {
    toml::to_string_pretty(cluster).map_err(|e| e.to_string())
}

/// The cluster with another number of hosts: its outermost level joins them all. Says why not
/// when its outermost level is made for one host, or the result has [`Cluster::problems`].
pub fn with_hosts(mut cluster: Cluster, n_hosts: u32) -> Result<Cluster, String> {
    let inside = cluster
        .levels
        .iter()
        .filter(|l| l.devices <= cluster.devices_per_host)
        .count();
    if n_hosts > 1 && inside < 2 && inside == cluster.levels.len() {
        return Err("no link joins its hosts".into());
    }
    cluster.n_hosts = n_hosts;
    let devices = cluster.n_devices();
    if let Some(last) = cluster.levels.last_mut() {
        last.devices = devices;
    }
    let problems = cluster.problems();
    if problems.is_empty() {
        Ok(cluster)
    } else {
        Err(problems.join("; "))
    }
}

/// The cluster with another number of devices in its one host, all in one pool: CPU ranks.
/// Says why not when it has several hosts or levels, or the result has problems.
pub fn with_ranks(mut cluster: Cluster, n_ranks: u32) -> Result<Cluster, String> {
    if cluster.n_hosts != 1 || cluster.levels.len() > 1 {
        return Err("only the ranks of a single host can be chosen".into());
    }
    cluster.devices_per_host = n_ranks;
    if let Some(level) = cluster.levels.last_mut() {
        level.devices = n_ranks;
    }
    if let Some(pool) = &mut cluster.pool {
        pool.devices = n_ranks;
    }
    let problems = cluster.problems();
    if problems.is_empty() {
        Ok(cluster)
    } else {
        Err(problems.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::{matmul_rate, peak_rate};
    use ir::DType;
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
    fn every_preset_is_sound_and_every_number_has_a_source() {
        for name in names() {
            let cluster = load(name, 1).unwrap();
            assert_eq!(cluster.problems(), Vec::<String>::new(), "{name}");
            let mut keys = Vec::new();
            numbers(&toml::from_str(text(name).unwrap()).unwrap(), "", &mut keys);
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
        assert!((peak_rate(&a100, DType::Bf16) / 271.2e12 - 1.0).abs() < 1e-3);
        let h100 = load("dgx-h100", 1).unwrap();
        assert!((peak_rate(&h100, DType::Bf16) / 794.5e12 - 1.0).abs() < 1e-3);
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
}
