//! Where there is no plan: which of the user's constraints make it so, and which changes were tried
//! and give one.
//!
//! The constraints are those that can be relaxed: pins, the memory that stays free, the element
//! type, batch, sequence and hosts. The conflict is found by a deletion filter (Chinneck &
//! Dravnieks 1991): one after the other is relaxed far, and stays so if there is still no plan.
//! What is left is a set of which every member is needed for the conflict. It is one such set;
//! there may be others. Ways out are single small changes, each of which was planned and proved to
//! fit.
//!
//! Every trial is a search, so no other is begun once the time is used up; the answer says so.

use super::super::again::loaded;
use crate::failure::{Exit, Failure};
use crate::model;
use crate::report::wrapped;
use cost_model::presets;
use ir::cluster::Cluster;
use ir::{Bytes, Graph, Precision, Seconds, TrainSpec, counted};
use planner::{Pins, PlanError, PlanOptions};
use std::path::Path;
use std::time::{Duration, Instant};

/// The request.
pub struct Asked<'a> {
    /// The model's file or folder, to build it for other sequences.
    pub model: &'a Path,
    /// The capacity factor of its experts, where one is asked for.
    pub expert_capacity: Option<f64>,
    /// Its forward graph.
    pub forward: &'a Graph,
    /// The model.
    pub train: &'a TrainSpec,
    /// The cluster.
    pub cluster: &'a Cluster,
    /// How it is planned.
    pub options: &'a PlanOptions,
}

/// A constraint, and a value that it is relaxed to.
#[derive(Clone, Debug, PartialEq)]
enum Relaxed {
    Pin(String),
    Headroom,
    Precision,
    Batch(u64),
    Sequence(u64),
    Hosts(u32),
}

/// By how much batch and sequence are divided, and hosts multiplied, to find a conflict.
const FAR: u32 = 8;
/// The same for ways out, the smallest change first.
const NEAR: [u32; 3] = [2, 4, 8];
/// The most times as many hosts that are tried first.
const MOST_TIMES: u64 = 128;
/// Sequences are not cut below this: nobody would train so.
const SHORTEST: u64 = 128;
/// The most ways out that are named.
const NAMED: usize = 5;

/// Makes the failure of a request that has no plan, in the time that is left for it.
pub fn failure(asked: &Asked<'_>, e: PlanError, limit: Duration) -> Failure {
    use PlanError::{Memory, NoTiling, Overrun, Strategies};
    let is_infeasible = matches!(
        e,
        Memory { .. } | Overrun { .. } | NoTiling { .. } | Strategies(_)
    );
    if !is_infeasible {
        return Failure::from(e);
    }
    let message = e.to_string();
    let lack = lack(&e);
    let mut trials = Trials {
        asked,
        until: Instant::now() + limit,
        known: Vec::new(),
        stopped: false,
    };
    // Ways out come first: who has no plan wants one more than a reason.
    let ways = trials.ways(lack);
    let conflict = trials.conflict();
    let mut words = message;
    if let Some((needed, relaxed)) = &conflict {
        words += "\n";
        words += &wrapped(&conflict_words(asked, needed, relaxed));
    }
    let failure = Failure::new(Exit::Infeasible, words);
    failure.help(trials.help(&ways))
}

/// How many times as many hosts there would have to be, at least, for what does not fit the memory:
/// a power of two, as what a plan splits. Nothing where it is not memory that is short.
fn lack(e: &PlanError) -> Option<u32> {
    match e {
        PlanError::Memory {
            needed, capacity, ..
        } => {
            let times = needed.div_ceil((*capacity).max(1)).min(MOST_TIMES);
            u32::try_from(times)
                .ok()?
                .max(2)
                .checked_next_power_of_two()
        }
        PlanError::Overrun { .. } => Some(2),
        _ => None,
    }
}

/// Searches under relaxed constraints.
struct Trials<'a> {
    asked: &'a Asked<'a>,
    until: Instant,
    /// The step time of each set of relaxed constraints; none where there is no plan.
    known: Vec<(Vec<Relaxed>, Option<f64>)>,
    /// Whether the time was used up before all was tried.
    stopped: bool,
}

impl Trials<'_> {
    /// The step time of the plan under these relaxed constraints, `Some(None)` where there is
    /// none; nothing where the time is used up.
    fn step_s(&mut self, relaxed: &[Relaxed]) -> Option<Option<f64>> {
        if let Some((_, step_s)) = self.known.iter().find(|(r, _)| r == relaxed) {
            return Some(*step_s);
        }
        if Instant::now() >= self.until || self.asked.options.watcher.ends() {
            self.stopped = true;
            return None;
        }
        let step_s = self.asked.plan(relaxed);
        self.known.push((relaxed.to_vec(), step_s));
        Some(step_s)
    }

    /// The constraints that are needed for there to be no plan, and the others as they were
    /// relaxed. Nothing where the time does not suffice, or there is none even with all of them
    /// relaxed.
    fn conflict(&mut self) -> Option<(Vec<Relaxed>, Vec<Relaxed>)> {
        let all = self.asked.far();
        let mut relaxed: Vec<Relaxed> = Vec::new();
        let mut needed = Vec::new();
        for one in all {
            let mut more = relaxed.clone();
            more.push(one.clone());
            match self.step_s(&more)? {
                Some(_) => needed.push(one),
                None => relaxed = more,
            }
        }
        Some((needed, relaxed)).filter(|(needed, _)| !needed.is_empty())
    }

    /// Single changes that give a plan, with its step time, the smallest change of each constraint.
    /// Where the largest gives none, smaller ones are not tried. Where memory is short, so many
    /// times as many hosts as it `lack`s come first: a search may take all of the time, and this
    /// change gives a plan most often.
    fn ways(&mut self, lack: Option<u32>) -> Vec<(Relaxed, f64)> {
        let mut ways = Vec::new();
        if let Some(lack) = lack {
            match self.more_hosts(lack) {
                Some(found) => ways.extend(found),
                None => return ways,
            }
        }
        let is_tried = |change: &Relaxed| lack.is_some() && matches!(change, Relaxed::Hosts(_));
        for changes in self.asked.near() {
            if changes.first().is_some_and(is_tried) {
                continue;
            }
            match changes.last().map(|c| self.step_s(std::slice::from_ref(c))) {
                None | Some(Some(None)) => continue,
                Some(None) => return ways,
                Some(Some(Some(_))) => {}
            }
            for change in changes {
                match self.step_s(std::slice::from_ref(&change)) {
                    Some(Some(step_s)) => {
                        ways.push((change, step_s));
                        break;
                    }
                    Some(None) => {}
                    None => return ways,
                }
            }
        }
        ways
    }

    /// The least number of hosts that was tried and has a plan, if any: first `by` times as many,
    /// then fewer where that has one, and more where it has none. Nothing where the time is used up
    /// before there is one.
    fn more_hosts(&mut self, by: u32) -> Option<Option<(Relaxed, f64)>> {
        let Some(first) = self.asked.hosts(by) else {
            return Some(None);
        };
        let mut try_all = |all: Vec<u32>| {
            for by in all {
                let Some(change) = self.asked.hosts(by) else {
                    continue;
                };
                if let Some(step_s) = self.step_s(std::slice::from_ref(&change))? {
                    return Some(Some((change, step_s)));
                }
            }
            Some(None)
        };
        let powers = |from: u32, below: u32| {
            let all = std::iter::successors(Some(from), |n| n.checked_mul(2));
            all.take_while(move |n| *n < below).collect::<Vec<u32>>()
        };
        match try_all(vec![by])? {
            // That it is found already is no less true where the time is used up for fewer.
            Some((_, step_s)) => {
                let fewer = try_all(powers(2, by)).flatten();
                Some(Some(fewer.unwrap_or((first, step_s))))
            }
            None => try_all(powers(by.saturating_mul(2), by.saturating_mul(FAR))),
        }
    }

    /// Names what was tried and fits.
    fn help(&self, ways: &[(Relaxed, f64)]) -> String {
        let named = ways.iter().take(NAMED).map(|(change, step_s)| {
            format!("{} ({} a step)", self.asked.way(change), Seconds(*step_s))
        });
        let named: Vec<String> = named.collect();
        let singly = self.known.iter().filter_map(|(r, _)| match r.as_slice() {
            [one] => Some(self.asked.way(one)),
            _ => None,
        });
        let tried = singly.collect::<Vec<_>>().join(", ");
        let stopped = match self.stopped {
            true => "; more time finds more, as --ways-out 300 (seconds)",
            false => "",
        };
        match named.is_empty() {
            false => format!(
                "each of these was tried and has a plan: {}{stopped}",
                named.join("; ")
            ),
            true if self.known.is_empty() => {
                "--ways-out 60 tries for so many seconds what would give a plan".into()
            }
            true => format!(
                "tried, each by itself: {tried}; none has a plan{stopped}; `meshwright fits` finds the smallest number of devices that has one"
            ),
        }
    }
}

impl Asked<'_> {
    /// Every constraint relaxed far, those that people give up last at the end.
    fn far(&self) -> Vec<Relaxed> {
        let mut all = Vec::new();
        all.extend(self.hosts(FAR));
        all.extend(self.batch(FAR));
        all.extend(self.sequence(FAR));
        all.extend(self.precision());
        all.extend(self.headroom());
        all.extend(self.options.pins.describe().into_iter().map(Relaxed::Pin));
        all
    }

    /// For each constraint the changes that are tried, the smallest first.
    fn near(&self) -> Vec<Vec<Relaxed>> {
        let pins = self.options.pins.describe().into_iter();
        let mut all: Vec<Vec<Relaxed>> = pins.map(|p| vec![Relaxed::Pin(p)]).collect();
        all.push(self.headroom().into_iter().collect());
        all.push(self.precision().into_iter().collect());
        let several = |of: &dyn Fn(u32) -> Option<Relaxed>| -> Vec<Relaxed> {
            NEAR.iter().filter_map(|by| of(*by)).collect()
        };
        all.push(several(&|by| self.hosts(by)));
        all.push(several(&|by| self.batch(by)));
        all.push(several(&|by| self.sequence(by)));
        all
    }

    fn hosts(&self, by: u32) -> Option<Relaxed> {
        let hosts = self.cluster.n_hosts.checked_mul(by)?;
        let more = presets::with_hosts(self.cluster.clone(), hosts);
        let is_gpu = self.cluster.pool.is_none();
        more.ok().filter(|_| is_gpu).map(|_| Relaxed::Hosts(hosts))
    }

    fn batch(&self, by: u32) -> Option<Relaxed> {
        let (batch, by) = (self.train.global_batch, u64::from(by));
        // Every rank that splits samples needs one, and a pinned microbatch all of its own.
        let pins = &self.options.pins;
        let least = u64::from(pins.data.unwrap_or(1)).max(pins.microbatch.unwrap_or(1));
        (batch.is_multiple_of(by) && batch / by >= least).then(|| Relaxed::Batch(batch / by))
    }

    fn sequence(&self, by: u32) -> Option<Relaxed> {
        let (sequence, by) = (self.train.sequence, u64::from(by));
        let fits = sequence.is_multiple_of(by) && sequence / by >= SHORTEST;
        fits.then(|| Relaxed::Sequence(sequence / by))
    }

    fn precision(&self) -> Option<Relaxed> {
        let peaks = &self.cluster.device.peak_flops_per_s;
        let has = peaks.contains_key(&Precision::Bf16.compute());
        (self.train.precision == Precision::F32 && has).then_some(Relaxed::Precision)
    }

    fn headroom(&self) -> Option<Relaxed> {
        let own = self.cluster.device.memory_headroom;
        (self.options.headroom.unwrap_or(own) > 0.0).then_some(Relaxed::Headroom)
    }

    /// Plans under relaxed constraints; the step time of the plan, which was proved.
    fn plan(&self, relaxed: &[Relaxed]) -> Option<f64> {
        let (mut train, mut cluster) = (self.train.clone(), self.cluster.clone());
        let mut options = self.options.clone();
        options.watcher = self.options.watcher.unseeing();
        let mut pins = options.pins.describe();
        let mut forward = None;
        for one in relaxed {
            match one {
                Relaxed::Pin(pin) => pins.retain(|p| p != pin),
                Relaxed::Headroom => options.headroom = Some(0.0),
                Relaxed::Precision => train.precision = Precision::Bf16,
                Relaxed::Batch(n) => train.global_batch = *n,
                Relaxed::Hosts(n) => cluster = presets::with_hosts(cluster, *n).ok()?,
                Relaxed::Sequence(n) => {
                    train.sequence = *n;
                    let model = model::load(self.model).ok()?;
                    let model = model.with_expert_capacity(self.expert_capacity).ok()?;
                    forward = Some(model.graph(*n, train.dropout, train.task).ok()?);
                }
            }
        }
        options.pins = Pins::parse(&pins).ok()?;
        let forward = forward.as_ref().unwrap_or(self.forward);
        let planned = planner::plan(forward, &train, &cluster, &options).ok()?;
        let loaded = loaded(planned).ok()?;
        Some(loaded.plan.predicted.step_time_s.0)
    }

    /// Names a constraint as it was asked for.
    fn constraint(&self, relaxed: &Relaxed) -> String {
        match relaxed {
            Relaxed::Pin(pin) => format!("the pin {pin}"),
            Relaxed::Headroom => {
                let own = self.cluster.device.memory_headroom;
                let share = self.options.headroom.unwrap_or(own);
                format!("the {}% of memory that stay free", 100.0 * share)
            }
            Relaxed::Precision => format!("{} in f32", self.train.task.name()),
            Relaxed::Batch(_) => format!("the global batch of {}", self.train.global_batch),
            Relaxed::Sequence(_) => {
                format!("sequences of {}", counted(self.train.sequence, "token"))
            }
            Relaxed::Hosts(_) => format!(
                "{} with {}",
                counted(self.cluster.n_hosts, "host"),
                counted(self.cluster.n_devices(), "device")
            ),
        }
    }

    /// Names a change as it is asked for.
    fn way(&self, relaxed: &Relaxed) -> String {
        match relaxed {
            Relaxed::Pin(pin) => format!("no --pin {pin}"),
            Relaxed::Headroom => "--headroom 0".into(),
            Relaxed::Precision => "--precision bf16".into(),
            Relaxed::Batch(n) => format!("--global-batch {n}"),
            Relaxed::Sequence(n) => format!("--sequence {n}"),
            Relaxed::Hosts(n) => format!("--hosts {n}"),
        }
    }
}

/// Says which constraints together leave no plan, whatever the others.
fn conflict_words(asked: &Asked<'_>, needed: &[Relaxed], relaxed: &[Relaxed]) -> String {
    let named: Vec<String> = needed.iter().map(|c| asked.constraint(c)).collect();
    let memory = Bytes(asked.cluster.usable_bytes());
    let (together, any) = match named.len() {
        1 => ("", "Without it there is one"),
        _ => (" together", "Without any one of them there is one"),
    };
    let others: Vec<String> = relaxed.iter().map(|c| asked.way(c)).collect();
    let even = match others.is_empty() {
        true => "".to_string(),
        false => format!(" There is none with {} either.", others.join(", ")),
    };
    format!(
        "What leaves no plan{together}: {}, with {memory} of memory on a device.{even} {any}. All of this was tried.",
        named.join("; ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_that_are_tried_first_follow_from_the_bytes_that_are_short() {
        let short = |needed: u64, capacity: u64| {
            let e = PlanError::Memory {
                n_stages: 1,
                layers: "h.0".into(),
                devices: 8,
                in_flight: 1,
                needed,
                capacity,
            };
            lack(&e)
        };
        // 152.79 GiB of 75.46 GiB are a little more than twice as many.
        assert_eq!(short(15_279, 7_546), Some(4));
        assert_eq!(short(15_000, 7_546), Some(2));
        assert_eq!(short(7_547, 7_546), Some(2));
        assert_eq!(short(u64::MAX, 1), Some(128));
        assert_eq!(short(1, 0), Some(2));
        assert_eq!(lack(&PlanError::Overrun { bytes: 1 }), Some(2));
        assert_eq!(lack(&PlanError::Strategies(String::new())), None);
    }
}
