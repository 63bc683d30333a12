//! `fits`: the smallest number of devices on which a model has a plan, and how larger ones do.
//!
//! Numbers that the states alone exceed are ruled out by arithmetic; of the others, parts of a host
//! are tried from below, then hosts in doubled numbers until there is a plan, and then the middle of
//! what is left between the largest number without and the smallest with one. Nothing is said of a
//! number that was neither ruled out nor tried.

use super::point::{Point, Wanted};
use super::spinner;
use crate::args::FitsArgs;
use crate::cluster;
use crate::failure::{Exit, Failure};
use crate::report::degrees::Degrees;
use crate::report::{self, count, percent, table, wrapped};
use cost_model::presets;
use ir::cluster::Cluster;
use ir::training::training_graph;
use ir::{Bytes, Seconds, counted};
use serde::Serialize;
use serde_json::json;
use std::collections::BTreeMap;

/// The outcome for one number of devices.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Tried {
    /// The devices.
    devices: u32,
    /// The plan, where there is one.
    plan: Option<Point>,
    /// Why there is none.
    reason: Option<String>,
}

/// The arithmetic that rules numbers of devices out.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct States {
    /// Bytes of parameters and optimizer states, each once.
    bytes: u64,
    /// Bytes of a device that the tensors of plans may take.
    of_device: u64,
    /// Devices that hold the states at least.
    least_devices: u64,
}

pub fn run(args: &FitsArgs) -> Result<(), Failure> {
    let base = base(&args.device)?;
    let wanted = Wanted::of(
        &args.model,
        args.expert_capacity,
        &args.train,
        &args.pins,
        &args.search,
        args.made_for.as_deref(),
    )?;
    let states = states(&wanted, &base)?;
    let most = args.most_devices;
    let mut search = Search {
        wanted: &wanted,
        base: &base,
        tried: BTreeMap::new(),
        steps: 0,
    };
    let bar = spinner("looking for the smallest number of devices");
    let smallest = search.smallest(states.least_devices, most)?;
    if let Some(smallest) = smallest {
        for more in 1..=args.next {
            let devices = smallest.checked_mul(1 << more).filter(|n| *n <= most);
            if let Some(devices) = devices.filter(|n| search.cluster(*n).is_some()) {
                search.fits(devices)?;
            }
        }
    }
    bar.finish_and_clear();
    let rows: Vec<&Tried> = search.tried.values().collect();
    let Some(smallest) = smallest.and_then(|n| search.tried.get(&n)) else {
        return Err(none(args, &states, &rows));
    };
    let verdict = verdict(args, &search, smallest, &states);
    if args.json {
        return report::print_json(&json!({
            "device": args.device,
            "verdict": verdict,
            "smallest": smallest,
            "states": states,
            "tried": rows,
            "searches": search.steps,
        }));
    }
    report::out(&verdict)?;
    report::out(&states.words())?;
    let unit = report::plan::unit_of(&search.wanted.forward);
    report::out(&words(&rows, unit))
}

/// The cluster whose devices are counted.
fn base(name: &str) -> Result<Cluster, Failure> {
    let cluster = cluster::load(name, None, None)?;
    let usage = |what: &str, help: &str| {
        let what = format!("--device {name}: {what}");
        Err(Failure::new(Exit::Usage, what).help(help))
    };
    if cluster::is_of_cpu_ranks(&cluster) {
        return usage(
            "its devices are ranks that share one machine, whose memory does not grow with them",
            "name a cluster of GPUs; `meshwright presets` lists them",
        );
    }
    if !cluster.is_equal() {
        return usage(
            "its devices are not all equal",
            "name a cluster of equal hosts",
        );
    }
    Ok(cluster)
}

fn states(wanted: &Wanted, base: &Cluster) -> Result<States, Failure> {
    let training = training_graph(&wanted.forward, &wanted.train);
    let training = training.map_err(|e| Failure::new(Exit::BadInput, e))?;
    let bytes = training
        .states
        .iter()
        .map(|s| training.graph.ty(s.read).bytes(1));
    let bytes = bytes.fold(0, u64::saturating_add);
    let of_device = base.planned_bytes(wanted.options.headroom).max(1);
    Ok(States {
        bytes,
        of_device,
        least_devices: bytes.div_ceil(of_device).max(1),
    })
}

impl States {
    fn words(&self) -> String {
        let ruled_out = match self.least_devices {
            1 => "one may hold them".to_string(),
            n => format!("fewer than {n} devices cannot hold them, and were not searched"),
        };
        format!(
            "Parameters and optimizer states are {} if nothing is held twice, and tensors may take {} of a device: {ruled_out}.",
            Bytes(self.bytes),
            Bytes(self.of_device),
        )
    }
}

/// The numbers of devices that were tried.
struct Search<'a> {
    wanted: &'a Wanted,
    base: &'a Cluster,
    tried: BTreeMap<u32, Tried>,
    steps: u32,
}

impl Search<'_> {
    /// The cluster of so many devices: a part of a host, or whole hosts.
    fn cluster(&self, devices: u32) -> Option<Cluster> {
        let host = self.base.devices_per_host;
        if devices.is_multiple_of(host) {
            return presets::with_hosts(self.base.clone(), devices / host).ok();
        }
        let mut part = self.base.clone();
        (part.n_hosts, part.devices_per_host) = (1, devices);
        part.levels.truncate(1);
        if let Some(level) = part.levels.first_mut() {
            level.devices = devices;
        }
        (devices < host && part.problems().is_empty()).then_some(part)
    }

    /// Whether there is a plan on so many devices.
    fn fits(&mut self, devices: u32) -> Result<bool, Failure> {
        if let Some(known) = self.tried.get(&devices) {
            return Ok(known.plan.is_some());
        }
        let (plan, reason) = match self.cluster(devices) {
            None => (
                None,
                Some("there is no such cluster of these devices".to_string()),
            ),
            Some(cluster) => {
                self.steps += 1;
                match self.wanted.on(&cluster)? {
                    Ok(point) => (Some(point), None),
                    Err(e) => (None, Some(e.to_string())),
                }
            }
        };
        let fits = plan.is_some();
        let tried = Tried {
            devices,
            plan,
            reason,
        };
        self.tried.insert(devices, tried);
        Ok(fits)
    }

    /// The smallest number of devices with a plan, of those from `least` to `most` that are tried.
    fn smallest(&mut self, least: u64, most: u32) -> Result<Option<u32>, Failure> {
        let host = self.base.devices_per_host;
        let parts = (1..=host).filter(|n| host.is_multiple_of(*n));
        let parts: Vec<u32> = parts
            .filter(|n| u64::from(*n) >= least && *n <= most)
            .collect();
        for devices in parts {
            if self.fits(devices)? {
                return Ok(Some(devices));
            }
        }
        if !presets::joins_hosts(self.base) {
            return Ok(None);
        }
        let least_hosts = least.div_ceil(u64::from(host)).max(2);
        let Ok(mut hosts) = u32::try_from(least_hosts) else {
            return Ok(None);
        };
        // The most hosts that are known to be too few.
        let mut too_few = hosts - 1;
        let most_hosts = most / host;
        loop {
            if hosts > most_hosts {
                return Ok(None);
            }
            if self.fits(hosts * host)? {
                break;
            }
            too_few = hosts;
            hosts = hosts.saturating_mul(2);
        }
        while hosts - too_few > 1 {
            let middle = too_few + (hosts - too_few) / 2;
            match self.fits(middle * host)? {
                true => hosts = middle,
                false => too_few = middle,
            }
        }
        Ok(Some(hosts * host))
    }
}

fn verdict(args: &FitsArgs, search: &Search<'_>, smallest: &Tried, states: &States) -> String {
    let Some(plan) = &smallest.plan else {
        return String::new();
    };
    let below = search.tried.range(..smallest.devices).next_back();
    let below = match below {
        Some((n, tried)) => format!(
            "On {} there is none: {}",
            counted(*n, "device"),
            tried.reason.as_deref().unwrap_or_default()
        ),
        None if states.least_devices > 1 => "Fewer cannot hold the states".into(),
        None => "There are no fewer".into(),
    };
    format!(
        "{}The smallest number of devices of {} with a plan that was found is {}: {}; {} {}/s, MFU {}, {} on the fullest. {below}.",
        search.wanted.whose(),
        args.device,
        smallest.devices,
        plan.degrees,
        count(plan.tokens_per_s).trim_end(),
        report::plan::unit_of(&search.wanted.forward),
        percent(plan.mfu),
        plan.peak_bytes,
    )
}

fn words(rows: &[&Tried], unit: &str) -> String {
    let cells = |r: &&Tried| {
        let of = |show: &dyn Fn(&Point) -> String| r.plan.as_ref().map_or("-".into(), show);
        vec![
            r.devices.to_string(),
            r.plan
                .as_ref()
                .map_or("no plan".into(), |p| Seconds(p.step_time_s).to_string()),
            of(&|p| count(p.tokens_per_s)),
            of(&|p| percent(p.mfu)),
            of(&|p| p.peak_bytes.to_string()),
        ]
    };
    let rate = format!("{unit}/s");
    let header = ["devices", "step", &rate, "MFU", "memory"];
    let mut w = String::from("\nWhat was tried\n");
    w += &table(&header, rows.iter().map(cells).collect(), 0);
    w += "\n\nThe plans\n";
    let plan = |r: &&Tried| {
        let mut cells = vec![r.devices.to_string()];
        cells.extend(r.plan.as_ref()?.degrees.cells());
        Some(cells)
    };
    let mut header = vec!["devices"];
    header.extend(Degrees::HEADER);
    w += &table(&header, rows.iter().filter_map(plan).collect(), 0);
    for r in rows {
        if let Some(reason) = &r.reason {
            w += "\n";
            w += &wrapped(&format!("{}: {reason}.", counted(r.devices, "device")));
        }
    }
    w + "\n"
        + &wrapped(
            "(between the largest number without a plan and the smallest with one, whole hosts were tried by halving; a number that is not listed was not tried)",
        )
}

/// The failure of a search that found no number of devices.
fn none(args: &FitsArgs, states: &States, rows: &[&Tried]) -> Failure {
    let last = rows.last().and_then(|r| {
        let reason = r.reason.as_deref()?;
        Some(format!("; on {}: {reason}", counted(r.devices, "device")))
    });
    let what = format!(
        "no plan was found on up to {} of {}{}. {}",
        counted(args.most_devices, "device"),
        args.device,
        last.unwrap_or_default(),
        states.words()
    );
    Failure::new(Exit::Infeasible, what).help(
        "allow more with --most-devices, name a device with more memory or a link between hosts, or change what is trained",
    )
}
