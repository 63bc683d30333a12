//! Whether some of the hosts would be faster without the others: plans use every device, and where
//! links between hosts are slow, what crosses them may take longer than the other hosts save.

use crate::report::degrees::Degrees;
use cost_model::presets;
use ir::cluster::Cluster;
use ir::plan::Plan;
use ir::{Graph, Seconds, TrainSpec};
use planner::{PlanOptions, Planned};

/// Says how long a step takes on fewer hosts, where that is less. A number of hosts is tried if
/// they would be done with all computing in less than the time of the plan's step, what ranks do
/// alike counted once, so that a plan whose devices compute for most of its step costs no further
/// search.
pub fn note(
    planned: &Planned,
    forward: &Graph,
    spec: &TrainSpec,
    cluster: &Cluster,
    options: &PlanOptions,
) -> Option<String> {
    let options = PlanOptions {
        watcher: options.watcher.unseeing(),
        ..options.clone()
    };
    let on = |hosts: u32| {
        let fewer = presets::with_hosts(cluster.clone(), hosts).ok()?;
        let planned = planner::plan(forward, spec, &fewer, &options).ok()?;
        Some((hosts, planned.plan.predicted.step_time_s))
    };
    let of = planned.plan.predicted.step_time_s;
    let repeated = Degrees::of(&planned.plan, &planned.training).repeated.1;
    let tried = worth_a_try(&planned.plan, cluster, repeated).into_iter();
    let times = tried.filter(|_| !options.watcher.ends());
    let least = times.filter_map(on).min_by(|a, b| a.1.0.total_cmp(&b.1.0));
    let (hosts, seconds) = least.filter(|(_, s)| s.0 < of.0)?;
    Some(words(hosts, cluster.n_hosts, seconds))
}

/// Halves of the hosts, and halves of these, that may be faster: the most and the fewest of them.
///
/// `repeated` of the ranks do the same work.
fn worth_a_try(plan: &Plan, cluster: &Cluster, repeated: u32) -> Vec<u32> {
    let meshes = plan.meshes().zip(&plan.predicted.stages);
    let device_s = meshes.map(|(mesh, p)| f64::from(mesh.n_devices()) * p.compute_s.0);
    let device_s = device_s.sum::<f64>() / f64::from(repeated.max(1));
    let per_host = f64::from(cluster.devices_per_host);
    let may_be_faster =
        |hosts: &u32| device_s < plan.predicted.step_time_s.0 * f64::from(*hosts) * per_host;
    let halves = std::iter::successors(Some(cluster.n_hosts / 2), |n| Some(n / 2));
    let halves = halves.take_while(|n| *n > 0).take_while(may_be_faster);
    let halves: Vec<u32> = halves.collect();
    match halves.as_slice() {
        [most, .., fewest] => vec![*most, *fewest],
        _ => halves,
    }
}

fn words(hosts: u32, of: u32, seconds: Seconds) -> String {
    let (who, is) = match hosts {
        1 => (format!("one of the {of} hosts alone"), "takes"),
        n => (format!("{n} of the {of} hosts"), "take"),
    };
    format!(
        "{who} {is} {seconds} a step (--hosts {hosts}): the others cost more time than they save"
    )
}
