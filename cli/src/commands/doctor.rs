//! `doctor`: why a run hangs or died, by what its ranks wrote of what they were doing.

use crate::args::DoctorArgs;
use crate::failure::{Exit, Failure};
use crate::{plan_file, report};
use ir::Rank;
use runtime::record::{self, Diagnosis, Doing, Seen};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};

pub fn run(args: &DoctorArgs) -> Result<(), Failure> {
    let loaded = plan_file::load(&args.plan)?;
    let seen = record::read(&args.folder)?;
    if let Some(other) = seen.iter().find(|s| s.plan != loaded.hash) {
        let what = format!(
            "{}: {} ran another plan than {}",
            args.folder.display(),
            other.rank,
            args.plan.display()
        );
        return Err(Failure::new(Exit::BadInput, what).help("name the plan that was run"));
    }
    let mut diagnosis = record::diagnose(&loaded.program, &seen)?;
    let processes: BTreeMap<Rank, Process> =
        seen.iter().map(|s| (s.rank, Process::of(s))).collect();
    narrow(&mut diagnosis, &processes);
    match args.json {
        true => print_json(&diagnosis, &processes),
        false => report::out(&words(&diagnosis, &processes)),
    }
}

/// Names no one among ranks that are in a call together: the records do not say who holds it up,
/// and one that has been stopped may have come to a later call before others heard so. Where the processes of some do
/// nothing any more, it is they.
fn narrow(of: &mut Diagnosis, processes: &BTreeMap<Rank, Process>) {
    let here = processes.iter().filter(|(_, p)| p.state != ELSEWHERE);
    let (still, alive): (Vec<_>, Vec<_>) = here.partition(|(_, p)| p.is_still);
    let still: BTreeSet<Rank> = still.into_iter().map(|(rank, _)| *rank).collect();
    // Once the run is over all are gone, and that says nothing.
    if !still.is_empty() && !alive.is_empty() {
        of.culprits = still;
    }
}

const ELSEWHERE: &str = "on another host";
const GONE: &str = "gone";
const STOPPED: &str = "stopped by a signal";
const DEAD: &str = "dead";

/// The fate of a rank's process.
struct Process {
    pid: u32,
    host: String,
    state: &'static str,
    /// Whether it can do nothing any more, or not until somebody lets it.
    is_still: bool,
}

impl Process {
    /// Looks, where it is a process of this host.
    fn of(seen: &Seen) -> Self {
        let here = record::host();
        let status = format!("/proc/{}/status", seen.pid);
        let state = match std::fs::read_to_string(status) {
            _ if here != seen.host => ELSEWHERE,
            Err(_) => GONE,
            Ok(status) => match status.lines().find_map(|l| l.strip_prefix("State:")) {
                Some(state) => state_word(state.trim()),
                None => "there",
            },
        };
        Process {
            pid: seen.pid,
            host: seen.host.clone(),
            state,
            is_still: [GONE, STOPPED, DEAD].contains(&state),
        }
    }
    fn words(&self) -> String {
        format!(
            "process {} on {}, which is {}",
            self.pid, self.host, self.state
        )
    }
}

fn state_word(state: &str) -> &'static str {
    match state.as_bytes().first() {
        Some(b'T' | b't') => STOPPED,
        Some(b'Z' | b'X') => DEAD,
        Some(b'D') => "waiting for a disk or the like",
        Some(b'R') => "running",
        _ => "there",
    }
}

fn names(ranks: impl IntoIterator<Item = Rank>) -> String {
    let names: Vec<String> = ranks.into_iter().map(|r| r.to_string()).collect();
    match names.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} and {last}", rest.join(", ")),
        _ => names.join(""),
    }
}

fn words(of: &Diagnosis, processes: &BTreeMap<Rank, Process>) -> String {
    let waiting = of
        .ranks
        .values()
        .filter(|d| matches!(d, Doing::Waiting { .. }));
    let n_waiting = waiting.count();
    // Whoever ended within a step did not end by itself.
    let is_within = |rank: &Rank| {
        let ended = processes
            .get(rank)
            .is_some_and(|p| [GONE, DEAD].contains(&p.state));
        let doing = of.ranks.get(rank);
        ended && matches!(doing, Some(Doing::Working(_) | Doing::Waiting { .. }))
    };
    let ended: Vec<Rank> = of.ranks.keys().copied().filter(is_within).collect();
    let mut lines = Vec::new();
    match &ended[..] {
        [] => {}
        [one] => lines.push(format!(
            "{one} ended within a step: its process was killed or failed."
        )),
        all => lines.push(format!(
            "{} ended within a step: their processes were killed or failed.",
            names(all.iter().copied())
        )),
    }
    lines.extend((ended.is_empty() || n_waiting > 0).then(|| {
        match (of.culprits.len(), n_waiting) {
            (0, 0) => "No rank waited for another one.".to_string(),
            (0, _) => "Ranks wait for each other in a circle, which `meshwright check` would have \
                   refused: their programs are not those of one plan."
                .to_string(),
            _ => format!(
                "{} kept the others waiting.",
                names(of.culprits.iter().copied())
            ),
        }
    }));
    for (&rank, doing) in &of.ranks {
        let process = processes.get(&rank);
        let process = process.map_or(String::new(), |p| format!(" ({})", p.words()));
        let what = match doing {
            Doing::Nothing => "left no record".to_string(),
            Doing::Between => "was between two steps".into(),
            Doing::Working(what) => format!("was at work: {what}"),
            Doing::Waiting { what, missing } => {
                let missing = names(missing.iter().copied());
                format!("waited for {missing} in {what}")
            }
        };
        lines.push(format!("  {rank} {what}{process}."));
    }
    lines
        .iter()
        .map(|l| report::wrapped(l))
        .collect::<Vec<_>>()
        .join("\n")
}

fn print_json(of: &Diagnosis, processes: &BTreeMap<Rank, Process>) -> Result<(), Failure> {
    let rank = |(rank, doing): (&Rank, &Doing)| {
        let (state, what, missing) = match doing {
            Doing::Nothing => ("no record", None, vec![]),
            Doing::Between => ("between steps", None, vec![]),
            Doing::Working(what) => ("working", Some(what), vec![]),
            Doing::Waiting { what, missing } => {
                ("waiting", Some(what), missing.iter().map(|r| r.0).collect())
            }
        };
        let process = processes.get(rank);
        json!({
            "rank": rank.0,
            "state": state,
            "what": what,
            "waits_for": missing,
            "pid": process.map(|p| p.pid),
            "host": process.map(|p| &p.host),
            "process": process.map(|p| p.state),
        })
    };
    report::print_json(&json!({
        "culprits": of.culprits.iter().map(|r| r.0).collect::<Vec<_>>(),
        "ranks": of.ranks.iter().map(rank).collect::<Vec<_>>(),
    }))
}
