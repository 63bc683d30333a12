//! The plan for what is left of a cluster.

use crate::args::{SearchArgs, Share};
use crate::cluster;
use crate::commands::again::Again;
use crate::failure::{Exit, Failure};
use crate::plan_file::Loaded;
use cost_model::presets;
use ir::cluster::{Cluster, Missing};

/// Pins of degrees, which other ranks cannot keep.
const OF_DEGREES: [&str; 9] = [
    "data",
    "replicas",
    "expert",
    "context",
    "tensor",
    "pipeline",
    "virtual",
    "split",
    "microbatch",
];

/// How many ranks a plan has.
pub fn ranks_of(loaded: &Loaded) -> usize {
    let meshes = loaded.program.roles.iter().map(|r| &r.mesh);
    meshes.map(|m| m.n_devices() as usize).sum()
}

/// So many devices of a cluster: of CPU ranks as many, of others as many hosts as they fill, and a
/// part of one more.
///
/// Says why not for hosts that are not all equal.
pub fn cluster_of(mut cluster: Cluster, ranks: u32) -> Result<Cluster, String> {
    if cluster::is_of_cpu_ranks(&cluster) {
        return presets::with_ranks(cluster, ranks);
    }
    // Devices that are not there are counted by no rank.
    let gone = std::mem::take(&mut cluster.missing);
    let each = cluster.devices_per_host;
    let all = (0..cluster.n_hosts).flat_map(|host| (0..each).map(move |d| (host, d)));
    let is_there =
        |(host, device): &(u32, u32)| !gone.iter().any(|m| (m.host, m.device) == (*host, *device));
    let kept: Vec<(u32, u32)> = all.filter(is_there).take(ranks as usize).collect();
    let hosts = kept.last().map_or(1, |(host, _)| host + 1);
    let mut left = presets::with_hosts(cluster, hosts)?;
    let all = (0..hosts).flat_map(|host| (0..each).map(move |d| (host, d)));
    let gone = all.filter(|d| !kept.contains(d));
    left.missing = gone
        .map(|(host, device)| Missing { host, device })
        .collect();
    match left.problems() {
        problems if problems.is_empty() => Ok(left),
        problems => Err(problems.join("; ")),
    }
}

/// The best plan for so many ranks, or the most below for which there is one.
pub fn plan_for(ranks: usize, loaded: &Loaded) -> Result<Loaded, Failure> {
    let mut plan = loaded.plan.clone();
    let is_of_degrees = |pin: &String| {
        let key = pin.split('=').next().unwrap_or(pin);
        OF_DEGREES.contains(&key.trim()) || key.starts_with("spec:")
    };
    plan.pins.retain(|pin| !is_of_degrees(pin));
    let search = SearchArgs {
        tolerance: Share(0.01),
        headroom: None,
    };
    let mut again = Again::of(&plan, &[], &search)?;
    let mut reason = None;
    for n in (1..=ranks).rev() {
        let n = u32::try_from(n).unwrap_or(u32::MAX);
        let changed = cluster_of(plan.cluster.clone(), n);
        again.cluster = changed.map_err(|e| Failure::new(Exit::Infeasible, e))?;
        match again.plan()? {
            Ok(found) => return Ok(found),
            Err(e) => reason = reason.or(Some(e)),
        }
    }
    let none = || Failure::new(Exit::Infeasible, "no rank is left");
    Err(reason.map_or_else(none, Failure::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_go_before_their_devices() {
        let cluster = crate::cluster::load("dgx-h100", Some(4), None).unwrap();
        let of = |ranks: u32| {
            let left = cluster_of(cluster.clone(), ranks).unwrap();
            let missing: Vec<u32> = left.missing.iter().map(|m| m.device).collect();
            assert!(left.missing.iter().all(|m| m.host + 1 == left.n_hosts));
            (left.n_hosts, missing)
        };
        assert_eq!(of(24), (3, vec![]));
        assert_eq!(of(30), (4, vec![6, 7]));
        assert_eq!(of(7), (1, vec![7]));
        // What is left may lose more.
        let seven = cluster_of(cluster.clone(), 7).unwrap();
        let missing = cluster_of(seven, 5).unwrap().missing;
        assert_eq!(
            missing.iter().map(|m| m.device).collect::<Vec<_>>(),
            [5, 6, 7]
        );
        let two = crate::cluster::load("dgx-h100:2,dgx-a100-80gb:2", None, None).unwrap();
        assert!(cluster_of(two, 8).unwrap_err().contains("not all equal"));
    }
}
