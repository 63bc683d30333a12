//! Clusters that come with Meshwright: a CPU machine, and the systems of the catalogue.

mod catalogue;
mod compose;
pub mod parameters;
mod storage;
#[cfg(test)]
mod tests;

pub use catalogue::{Catalogue, Fitted, Sourced, System};
pub use parameters::{Parameter, Parameters};

use ir::cluster::Cluster;
use std::sync::OnceLock;

/// The one preset that is a cluster file of its own.
const CPU: (&str, &str) = (
    "cpu-default",
    include_str!("../../../clusters/cpu-default.toml"),
);

/// Why a preset cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PresetError {
    /// There is no preset of this name.
    #[error("there is no cluster `{name}`; presets are {}", names().join(", "))]
    Unknown {
        /// The name asked for.
        name: String,
    },
    /// The catalogue has no such device or link, or an embedded file does not parse.
    #[error("cluster `{name}`: {problem}")]
    Malformed {
        /// The name asked for.
        name: String,
        /// The problem.
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

/// The embedded catalogue.
///
/// Fails when an embedded file does not parse, which the tests rule out.
pub fn catalogue() -> Result<&'static Catalogue, PresetError> {
    static READ: OnceLock<Result<Catalogue, String>> = OnceLock::new();
    READ.get_or_init(Catalogue::read)
        .as_ref()
        .map_err(|problem| PresetError::Malformed {
            name: "catalogue".into(),
            problem: problem.clone(),
        })
}

/// Names of the presets: the CPU machine, then the systems from the oldest device on.
pub fn names() -> Vec<&'static str> {
    let systems = catalogue().map_or(&[][..], Catalogue::systems);
    let names = systems.iter().map(|s| s.preset.as_str());
    [CPU.0].into_iter().chain(names).collect()
}

/// The preset `name` with its own number of hosts, the cluster that `DEVICE+LINK+LINK` composes, or
/// several of these as groups, `dgx-h100:2,dgx-a100-80gb`, with a number of hosts where it is not
/// their own; `None` when it is none of them.
///
/// Fails when a composition names what the catalogue does not have, or no machine joins.
pub fn find(name: &str) -> Result<Option<Cluster>, PresetError> {
    let malformed = |problem: String| PresetError::Malformed {
        name: name.into(),
        problem,
    };
    if name.contains([',', ':']) {
        let groups = name.split(',').map(|group| {
            let found = match group.split_once(':') {
                _ if group.is_empty() => {
                    let problem = "a comma has no group of hosts on one side; leave it out";
                    return Err(malformed(problem.into()));
                }
                None => find(group)?.ok_or_else(|| PresetError::Unknown { name: group.into() })?,
                Some((preset, n)) => {
                    let n = n
                        .parse::<u32>()
                        .map_err(|_| malformed(format!("`{group}` has no number behind `:`")))?;
                    load(preset, n)?
                }
            };
            match name.contains(',') && !joins_hosts(&found) {
                true => Err(malformed(format!("no link joins `{group}` to other hosts"))),
                false => Ok(found),
            }
        });
        let joined = groups.reduce(|all, next| Ok(all?.beside(next?)));
        return joined.transpose();
    }
    if name == CPU.0 {
        return parse(CPU.1).map(Some).map_err(malformed);
    }
    let catalogue = catalogue()?;
    let composed = match catalogue.systems().iter().find(|s| s.preset == name) {
        Some(system) => system.clone(),
        None if name.contains('+') => catalogue.system(name).map_err(malformed)?,
        None => return Ok(None),
    };
    catalogue.cluster(&composed).map(Some).map_err(malformed)
}

/// The preset `name`, or a composition, with `n_hosts` hosts.
///
/// Fails for an unknown name, and where the hosts are not joined by a link or too many.
pub fn load(name: &str, n_hosts: u32) -> Result<Cluster, PresetError> {
    let cluster = find(name)?.ok_or_else(|| PresetError::Unknown { name: name.into() })?;
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

/// Whether hosts may be joined: some link reaches beyond one host, or there is a second link beside
/// the one inside, which then joins hosts.
pub fn joins_hosts(cluster: &Cluster) -> bool {
    let mut reach = cluster.levels.iter().map(|l| l.devices);
    cluster.levels.len() > 1 || reach.any(|n| n > cluster.devices_per_host)
}

/// The cluster with another number of hosts: its outermost level joins them all. Says why not
/// when its outermost level is made for one host, or the result has [`Cluster::problems`].
pub fn with_hosts(mut cluster: Cluster, n_hosts: u32) -> Result<Cluster, String> {
    if n_hosts > 1 && !joins_hosts(&cluster) {
        return Err("no link joins its hosts".into());
    }
    if !cluster.is_equal() {
        return Err("its hosts are not all equal".into());
    }
    cluster.n_hosts = n_hosts;
    let devices = cluster.n_devices();
    if let Some((last, below)) = cluster.levels.split_last_mut() {
        // A level below may join more devices than there are: a rack that is not full.
        let block = below.last().map_or(1, |l| l.devices.max(1));
        last.devices = devices.checked_next_multiple_of(block).unwrap_or(devices);
    }
    let problems = cluster.problems();
    if problems.is_empty() {
        Ok(cluster)
    } else {
        Err(problems.join("; "))
    }
}

/// The name of this machine with so many CPU ranks.
pub fn calibrated_name(n_ranks: u32) -> String {
    format!("this machine, {}", ir::counted(n_ranks, "rank"))
}

/// The cluster with another number of devices in its one host, all in one pool: CPU ranks.
/// Says why not when it has several hosts or levels, or the result has problems.
pub fn with_ranks(mut cluster: Cluster, n_ranks: u32) -> Result<Cluster, String> {
    if cluster.n_hosts != 1 || cluster.levels.len() > 1 {
        return Err("only the ranks of a single host can be chosen".into());
    }
    // What `calibrate` measured says with how many.
    if cluster.name == calibrated_name(cluster.devices_per_host) {
        cluster.name = calibrated_name(n_ranks);
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
