//! `fits`: the smallest number of devices on which a model has a plan, and how larger ones do.
//!
//! Numbers that the states alone exceed are ruled out by arithmetic; of the others, parts of a host
//! are tried from below, then hosts until there is a plan, as many more as the bytes that are short
//! ask for and then in doubled numbers, and then the middle of what is left between the largest
//! number without and the smallest with one. Nothing is said of a number that was neither ruled out
//! nor tried.

use super::point::{Point, Wanted};
use super::spinner;
use super::watching::Watching;
use crate::args::FitsArgs;
use crate::cluster;
use crate::failure::{Exit, Failure};
use crate::report::degrees::Degrees;
use crate::report::{self, count, percent, table, wrapped};
use cost_model::presets;
use ir::cluster::Cluster;
use ir::training::training_graph;
use ir::{Bytes, Seconds, counted};
use planner::{PlanError, Watcher};
use serde::Serialize;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// The outcome for one number of devices.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Tried {
    /// The devices.
    devices: u32,
    /// The plan, where there is one.
    plan: Option<Point>,
    /// Why there is none.
    reason: Option<String>,
    /// How many times as much memory as there is the nearest plan needs, where it is that.
    #[serde(skip)]
    times: Option<f64>,
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

/// How often a search is looked at, whether it has ended or is to end.
const LOOK: Duration = Duration::from_millis(50);

pub fn run(args: &FitsArgs) -> Result<(), Failure> {
    let base = base(&args.device)?;
    let mut wanted = Wanted::of(
        &args.model,
        args.expert_capacity,
        &args.train,
        &args.pins,
        &args.search,
        args.made_for.as_deref(),
    )?;
    let states = states(&wanted, &base)?;
    let bar = spinner("looking for the smallest number of devices");
    let watching = Arc::new(Watching::new(
        &bar,
        None,
        "ending with the numbers of devices that were tried",
    )?);
    wanted.options.watcher = Watcher::new(watching.clone());
    let mut search = Search {
        wanted: Arc::new(wanted),
        base: &base,
        tried: BTreeMap::new(),
        steps: 0,
        watching,
    };
    let smallest = search.smallest(states.least_devices, args.most_devices);
    let (smallest, mut ended) = match smallest {
        Ok(smallest) => (smallest, None),
        Err(Stop::Failed(failure)) => return Err(failure),
        Err(Stop::Interrupted(at)) => {
            bar.finish_and_clear();
            return Err(interrupted(args, &search, &states, at));
        }
    };
    for devices in smallest.iter().flat_map(|n| larger(*n, args)) {
        if ended.is_some() || search.cluster(devices).is_none() {
            continue;
        }
        match search.fits(devices) {
            Ok(_) => {}
            Err(Stop::Failed(failure)) => return Err(failure),
            Err(Stop::Interrupted(at)) => ended = Some(at),
        }
    }
    bar.finish_and_clear();
    let rows: Vec<&Tried> = search.tried.values().collect();
    let Some(smallest) = smallest.and_then(|n| search.tried.get(&n)) else {
        return Err(none(args, &states, &rows));
    };
    let verdict = verdict(args, &search, smallest, &states);
    if args.json {
        report::print_json(&json!({
            "device": args.device,
            "verdict": verdict,
            "smallest": smallest,
            "states": states,
            "tried": rows,
            "searches": search.steps,
        }))?;
    } else {
        report::out(&verdict)?;
        report::out(&states.words())?;
        let unit = report::plan::unit_of(&search.wanted.forward);
        report::out(&words(&rows, unit))?;
    }
    match ended {
        None => Ok(()),
        Some(at) => {
            let what = format!(
                "interrupted while {} were searched: the smallest number is found, and no larger one than those above was tried",
                counted(at, "device")
            );
            Err(Failure::new(Exit::Interrupted, what))
        }
    }
}

/// The numbers of devices that are shown beside the smallest.
fn larger(smallest: u32, args: &FitsArgs) -> impl Iterator<Item = u32> {
    let most = args.most_devices;
    let doubled = (1..=args.next).map(move |more| {
        let times = 1u32.checked_shl(more);
        times.and_then(|times| smallest.checked_mul(times))
    });
    doubled.flatten().filter(move |n| *n <= most)
}

/// Why a search came to no end.
enum Stop {
    Failed(Failure),
    /// It was interrupted while so many devices were searched.
    Interrupted(u32),
}

/// The end of a search that was interrupted before the smallest number was known.
fn interrupted(args: &FitsArgs, search: &Search<'_>, states: &States, at: u32) -> Failure {
    let outcome = |tried: &Tried| {
        let devices = counted(tried.devices, "device");
        match (&tried.plan, &tried.reason) {
            (Some(plan), _) => format!(
                "{devices}: a plan of {} a step, {}",
                Seconds(plan.step_time_s),
                plan.degrees
            ),
            (None, reason) => format!(
                "{devices}: no plan ({})",
                reason.as_deref().unwrap_or_default()
            ),
        }
    };
    let all: Vec<String> = search.tried.values().map(outcome).collect();
    let found = search.tried.values().find(|t| t.plan.is_some());
    let smallest = match found {
        Some(found) => format!(
            "The smallest number with a plan so far is {}; smaller ones may have one.",
            found.devices
        ),
        None => "None of them has a plan; larger ones may have one.".into(),
    };
    let tried = match all.is_empty() {
        true => "no number was tried to the end. ".to_string(),
        false => format!("tried so far:\n  {}\n{smallest} ", all.join("\n  ")),
    };
    let what = format!(
        "interrupted while {} of {} were searched; {tried}{}",
        counted(at, "device"),
        args.device,
        states.words()
    );
    Failure::new(Exit::Interrupted, what)
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
    wanted: Arc<Wanted>,
    base: &'a Cluster,
    tried: BTreeMap<u32, Tried>,
    steps: u32,
    watching: Arc<Watching>,
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

    /// Plans on a cluster, in a thread of its own: a search that finds nothing does not heed an
    /// interrupt before it has looked at everything.
    fn planned(&self, cluster: Cluster) -> Result<Result<Point, PlanError>, Stop> {
        let (devices, began) = (cluster.n_devices(), Instant::now());
        self.watching
            .begin(format!("trying {}", counted(devices, "device")));
        let (tell, told) = channel();
        let wanted = Arc::clone(&self.wanted);
        // Nobody listens any more where it was interrupted.
        let search = move || drop(tell.send(wanted.on(&cluster)));
        let began_it = std::thread::Builder::new().spawn(search);
        began_it.map_err(|e| {
            let what = format!("cannot start a thread to search in: {e}");
            Stop::Failed(Failure::new(Exit::Internal, what))
        })?;
        loop {
            match told.recv_timeout(LOOK) {
                // An end with the best plan so far is a plan.
                Ok(planned) => return planned.map_err(Stop::Failed),
                Err(RecvTimeoutError::Disconnected) => {
                    let what = format!("the search on {} panicked", counted(devices, "device"));
                    return Err(Stop::Failed(Failure::new(Exit::Internal, what)));
                }
                Err(RecvTimeoutError::Timeout) if self.watching.is_over() => {
                    return Err(Stop::Interrupted(devices));
                }
                Err(RecvTimeoutError::Timeout) => self.watching.remind(began),
            }
        }
    }

    /// Whether there is a plan on so many devices.
    fn fits(&mut self, devices: u32) -> Result<bool, Stop> {
        if let Some(known) = self.tried.get(&devices) {
            return Ok(known.plan.is_some());
        }
        let mut tried = Tried {
            devices,
            plan: None,
            reason: None,
            times: None,
        };
        match self.cluster(devices) {
            None => tried.reason = Some("there is no such cluster of these devices".into()),
            Some(cluster) => {
                self.steps += 1;
                match self.planned(cluster)? {
                    Ok(point) => tried.plan = Some(point),
                    Err(e) => {
                        tried.times = times(&e);
                        tried.reason = Some(e.to_string());
                    }
                }
            }
        }
        let fits = tried.plan.is_some();
        self.tried.insert(devices, tried);
        Ok(fits)
    }

    /// The smallest number of devices with a plan, of those from `least` to `most` that are tried.
    fn smallest(&mut self, least: u64, most: u32) -> Result<Option<u32>, Stop> {
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
            // A search costs minutes: the first number behind one that is too small follows from
            // the bytes that are short, if that is less than twice as many, and only further ones
            // are doubled.
            let twice = hosts.saturating_mul(2);
            let times = self.tried.get(&(hosts * host)).and_then(|t| t.times);
            let times = times.filter(|_| too_few + 1 == hosts);
            let near = times.map(|times| (f64::from(hosts) * times).ceil() as u32);
            too_few = hosts;
            hosts = near.map_or(twice, |near| near.clamp(hosts.saturating_add(1), twice));
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

/// How many times as much memory as there is the nearest plan needs.
fn times(e: &PlanError) -> Option<f64> {
    match e {
        PlanError::Memory {
            needed, capacity, ..
        } => Some(*needed as f64 / (*capacity).max(1) as f64),
        _ => None,
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
        None if states.least_devices == u64::from(smallest.devices) && states.least_devices > 1 => {
            "Fewer cannot hold the states".into()
        }
        None if states.least_devices > 1 => format!(
            "Fewer than {} cannot hold the states; of parts of a host those that divide it were tried",
            states.least_devices
        ),
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
