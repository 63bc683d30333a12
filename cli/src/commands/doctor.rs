//! `doctor`: why a run hangs or died, by what its ranks wrote of what they were doing, and by what
//! the run itself found when it failed.
//!
//! The run's own finding comes first: it saw who died of what while the others were there. The
//! processes come second, while some are alive. Records alone accuse nobody once all are gone: a
//! rank that dies in a call may have come to it before the others, who then seem to be late.

use crate::args::DoctorArgs;
use crate::failure::{Exit, Failure};
use crate::plan_file::{self, Loaded};
use crate::report::{self, place::in_words};
use ir::Rank;
use runtime::record::{self, Damaged, Diagnosis, Doing, Fate, Records, Seen, Verdict};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};

pub fn run(args: &DoctorArgs) -> Result<(), Failure> {
    let loaded = plan_file::load(&args.plan)?;
    let Records { seen, damaged } = record::read(&args.folder)?;
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
    let verdict = Verdict::read(&args.folder);
    let tells = match &verdict {
        Some(verdict) if !verdict.found.is_empty() => {
            diagnosis.culprits = verdict.found.keys().copied().collect();
            Tells::Run
        }
        _ if is_over(&processes) => Tells::Nobody,
        _ => {
            narrow(&mut diagnosis, &processes);
            Tells::Records
        }
    };
    let case = Case {
        loaded: &loaded,
        of: &diagnosis,
        seen: &seen,
        damaged: &damaged,
        processes: &processes,
        verdict: verdict.as_ref(),
        tells,
    };
    match args.json {
        true => print_json(&case),
        false => report::out(&words(&case)),
    }
}

/// Who tells which ranks ended or hold up the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tells {
    /// The run itself, in its finding.
    Run,
    /// The records, with the processes that are there.
    Records,
    /// Nobody: all processes are gone.
    Nobody,
}

/// All that is known of a run.
struct Case<'a> {
    loaded: &'a Loaded,
    of: &'a Diagnosis,
    seen: &'a [Seen],
    damaged: &'a BTreeMap<Rank, Damaged>,
    processes: &'a BTreeMap<Rank, Process>,
    verdict: Option<&'a Verdict>,
    tells: Tells,
}

/// Says whether no process of a run is left that is known of, and some were here.
fn is_over(processes: &BTreeMap<Rank, Process>) -> bool {
    let mut here = processes.values().filter(|p| p.state != ELSEWHERE);
    let is_gone = |p: &Process| [GONE, DEAD].contains(&p.state);
    here.next().is_some_and(is_gone) && here.all(is_gone)
}

/// Takes those whose processes do nothing any more for the culprits, where there are some and
/// others are alive: among ranks that are in a call together the records do not say who holds it
/// up, and one that has been stopped may have come to a later call before others heard so.
fn narrow(of: &mut Diagnosis, processes: &BTreeMap<Rank, Process>) {
    let here = processes.iter().filter(|(_, p)| p.state != ELSEWHERE);
    let (still, alive): (Vec<_>, Vec<_>) = here.partition(|(_, p)| p.is_still);
    let still: BTreeSet<Rank> = still.into_iter().map(|(rank, _)| *rank).collect();
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

/// Ranks in words.
pub fn names(ranks: impl IntoIterator<Item = Rank>) -> String {
    let names: Vec<String> = ranks.into_iter().map(|r| r.to_string()).collect();
    match names.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} and {last}", rest.join(", ")),
        _ => names.join(""),
    }
}

/// The step of a rank's record, in words behind its name.
pub fn when(seen: &Seen) -> String {
    match (seen.plays, seen.training) {
        (0, _) => String::new(),
        (_, true) => format!(", in step {},", seen.step),
        (_, false) => format!(", in a validation at step {},", seen.step),
    }
}

/// The activity of a rank, in words behind its name.
pub fn activity(loaded: &Loaded, rank: Rank, of: &Doing) -> String {
    match of {
        Doing::Nothing => "left no record".into(),
        Doing::Between => "was between two steps".into(),
        Doing::Working(what) => format!("was at work in {}", in_words(loaded, rank, what)),
        Doing::Waiting { what, missing } => {
            let missing = names(missing.iter().copied());
            format!("waited for {missing} in {}", in_words(loaded, rank, what))
        }
    }
}

/// The finding of a run, in a sentence.
fn finding(of: &Verdict) -> String {
    let mut by_fate: BTreeMap<&Fate, Vec<Rank>> = BTreeMap::new();
    for (rank, fate) in &of.found {
        by_fate.entry(fate).or_default().push(*rank);
    }
    let fates = by_fate.into_iter().map(|(fate, ranks)| {
        let are = if ranks.len() == 1 { "is" } else { "are" };
        let ranks = names(ranks);
        match fate {
            Fate::Lost(how) => format!("{ranks} {are} lost ({how})"),
            Fate::Missed { by, seconds } => {
                format!("{by} waited for {ranks} for {seconds} s, in vain")
            }
            Fate::Failed => format!("{ranks} failed"),
        }
    });
    match of.found.is_empty() {
        true => format!("The run itself ended with this error: {}", of.error),
        false => format!(
            "The run itself found: {}.",
            fates.collect::<Vec<_>>().join("; ")
        ),
    }
}

fn words(case: &Case<'_>) -> String {
    let (of, processes) = (case.of, case.processes);
    let mut lines: Vec<String> = case.verdict.map(finding).into_iter().collect();
    match case.tells {
        Tells::Run => {
            let awaited = is_awaited(of).then(|| {
                format!(
                    "{} kept the others waiting.",
                    names(of.culprits.iter().copied())
                )
            });
            lines.extend(awaited);
            lines.extend(owed(case));
        }
        Tells::Records => {
            let ended = ended_within(case);
            let is_waited = n_waiting(of) > 0;
            lines.extend(of_ended(&ended));
            lines.extend((ended.is_empty() || is_waited).then(|| accusation(of)));
            lines.extend(owed(case));
        }
        Tells::Nobody => {
            // Those with a finding of the run ended because of it.
            let ended = ended_within(case);
            lines.extend(of_ended(&ended).filter(|_| case.verdict.is_none()));
            lines.push(undecided(of, !ended.is_empty()));
        }
    }
    for (&rank, doing) in &of.ranks {
        if let Some(Damaged { path, problem }) = case.damaged.get(&rank) {
            let path = path.display();
            lines.push(format!(
                "  {rank} left a record that is damaged ({path}: {problem}), so that nothing is known of it."
            ));
            continue;
        }
        let process = processes.get(&rank);
        let process = process.map_or(String::new(), |p| format!(" ({})", p.words()));
        let when = case.seen.iter().find(|s| s.rank == rank).map(when);
        let (when, what) = (when.unwrap_or_default(), activity(case.loaded, rank, doing));
        lines.push(format!("  {rank}{when} {what}{process}."));
    }
    lines
        .iter()
        .map(|l| report::wrapped(l))
        .collect::<Vec<_>>()
        .join("\n")
}

fn n_waiting(of: &Diagnosis) -> usize {
    let all = of.ranks.values();
    all.filter(|d| matches!(d, Doing::Waiting { .. })).count()
}

/// Says whether a rank waits for one of the culprits.
fn is_awaited(of: &Diagnosis) -> bool {
    of.ranks.values().any(|doing| match doing {
        Doing::Waiting { missing, .. } => missing.iter().any(|r| of.culprits.contains(r)),
        _ => false,
    })
}

/// Those that ended within a step, which none does by itself.
fn ended_within(case: &Case<'_>) -> Vec<Rank> {
    let is_within = |rank: &Rank| {
        let ended = (case.processes)
            .get(rank)
            .is_some_and(|p| [GONE, DEAD].contains(&p.state));
        let doing = case.of.ranks.get(rank);
        ended && matches!(doing, Some(Doing::Working(_) | Doing::Waiting { .. }))
    };
    case.of.ranks.keys().copied().filter(is_within).collect()
}

fn of_ended(ended: &[Rank]) -> Option<String> {
    match ended {
        [] => None,
        [one] => Some(format!(
            "{one} ended within a step: its process was killed or failed."
        )),
        all => Some(format!(
            "{} ended within a step: their processes were killed or failed.",
            names(all.iter().copied())
        )),
    }
}

/// Who holds a run up whose processes are there.
fn accusation(of: &Diagnosis) -> String {
    match (of.culprits.len(), n_waiting(of)) {
        (0, 0) => "No rank waited for another one.".to_string(),
        (0, _) => "Ranks wait for each other in a circle, which `meshwright check` would have \
                   refused: their programs are not those of one plan."
            .to_string(),
        _ => format!(
            "{} kept the others waiting.",
            names(of.culprits.iter().copied())
        ),
    }
}

/// The call that each rank that is to blame had not come to, and how far it was.
fn owed(case: &Case<'_>) -> Vec<String> {
    let of = |rank: &Rank| {
        let owed = case.of.owed.get(rank)?;
        let of = in_words(case.loaded, *rank, &owed.what);
        Some(format!(
            "{rank} never came to call {} of step {}, which is instruction {} of its {}: {of}. It had \
             begun {} of them.",
            owed.call, owed.step, owed.instruction, owed.of, owed.begun
        ))
    };
    case.of.culprits.iter().filter_map(of).collect()
}

/// All that records say of a run that is over, without accusing anybody.
fn undecided(of: &Diagnosis, is_within: bool) -> String {
    let unknown = "the records do not tell who held it up";
    match (of.culprits.is_empty(), is_within) {
        (false, _) => format!(
            "Others waited for {}, but all processes of the run are gone, and {unknown}: one that dies \
             in a call may have been ahead of those who had still to come.",
            names(of.culprits.iter().copied())
        ),
        (true, true) => format!(
            "All processes of the run are gone, and no rank alone was behind the others: {unknown}."
        ),
        (true, false) => "No rank waited for another one.".into(),
    }
}

fn print_json(case: &Case<'_>) -> Result<(), Failure> {
    let (of, processes) = (case.of, case.processes);
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
        let damaged = case.damaged.get(rank);
        let seen = case.seen.iter().find(|s| s.rank == *rank);
        json!({
            "rank": rank.0,
            "state": state,
            "step": seen.filter(|s| s.plays > 0).map(|s| s.step),
            "what": what,
            "waits_for": missing,
            "owes": of.owed.get(rank).filter(|_| case.tells != Tells::Nobody),
            "pid": process.map(|p| p.pid),
            "host": process.map(|p| &p.host),
            "process": process.map(|p| p.state),
            "damaged": damaged.map(|d| format!("{}: {}", d.path.display(), d.problem)),
        })
    };
    // Where nobody can tell, nobody is accused.
    let culprits = of.culprits.iter().filter(|_| case.tells != Tells::Nobody);
    report::print_json(&json!({
        "culprits": culprits.map(|r| r.0).collect::<Vec<_>>(),
        "verdict": case.verdict,
        "ranks": of.ranks.iter().map(rank).collect::<Vec<_>>(),
    }))
}
