//! `doctor`: why a run hangs or died, by what its ranks wrote of what they were doing, and by what
//! the run itself found when it failed.
//!
//! The run's own finding comes first: it saw who died of what while the others were there. The
//! processes come second, while some are alive. Records alone accuse nobody once all are gone: a
//! rank that dies in a call may have come to it before the others, who then seem to be late.
//!
//! Of a rank without a record that can be read nothing follows: neither whether others waited for
//! it, nor whether whoever is in a call with it waited at all.

mod finding;
mod process;

use crate::args::DoctorArgs;
use crate::failure::{Exit, Failure};
use crate::plan_file::{self, Loaded};
use crate::report::{self, place::in_words};
use finding::Finding;
use ir::Rank;
use process::{DEAD, ELSEWHERE, GONE, Process};
use runtime::record::{self, Damaged, Diagnosis, Doing, Records, Seen};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Ranks that are named together: more make no sentence that anybody reads.
const MOST_NAMED: usize = 8;

pub fn run(args: &DoctorArgs) -> Result<(), Failure> {
    let loaded = plan_file::load(&args.plan)?;
    let all = record::read_any(&args.folder)?;
    let finding = Finding::of(&args.folder, (&loaded.program, &loaded.hash));
    // A finding says something without any records, too.
    let Records { seen, damaged } = match finding.verdict() {
        Some(_) => all,
        None => all.some_of(&args.folder).map_err(|e| finding.beside(e))?,
    };
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
    let tells = match finding.verdict() {
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
        folder: &args.folder,
        loaded: &loaded,
        of: &diagnosis,
        seen: &seen,
        damaged: &damaged,
        processes: &processes,
        finding: &finding,
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
    folder: &'a Path,
    loaded: &'a Loaded,
    of: &'a Diagnosis,
    seen: &'a [Seen],
    damaged: &'a BTreeMap<Rank, Damaged>,
    processes: &'a BTreeMap<Rank, Process>,
    finding: &'a Finding,
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

/// Ranks in words.
pub fn names(ranks: impl IntoIterator<Item = Rank>) -> String {
    let names: Vec<String> = ranks.into_iter().map(|r| r.to_string()).collect();
    match names.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} and {last}", rest.join(", ")),
        _ => names.join(""),
    }
}

/// Ranks in words, of many only the first.
pub fn few(ranks: &[Rank]) -> String {
    match ranks {
        [first, ..] if ranks.len() > MOST_NAMED => {
            format!("{} ranks (the first is {first})", ranks.len())
        }
        _ => names(ranks.iter().copied()),
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
        Doing::Unclear { what, unknown } => format!(
            "was in {}, and it cannot be told whether it waited there for {}",
            in_words(loaded, rank, what),
            few(unknown)
        ),
    }
}

fn words(case: &Case<'_>) -> String {
    let (of, processes) = (case.of, case.processes);
    let mut lines: Vec<String> = case.finding.words().into_iter().collect();
    match case.tells {
        _ if case.seen.is_empty() => lines.push(format!(
            "There are no records of ranks that can be read in {}, so it cannot be told where the ranks \
             were and who waited for whom.",
            case.folder.display()
        )),
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
            let is_told = case.finding.verdict().is_some();
            lines.extend(of_ended(&ended).filter(|_| !is_told));
            lines.push(undecided(of, !ended.is_empty()));
        }
    }
    lines.extend(untold(of).filter(|_| !case.seen.is_empty()));
    for (&rank, doing) in &of.ranks {
        if let Some(Damaged { path, problem }) = case.damaged.get(&rank) {
            let path = path.display();
            lines.push(format!(
                "  {rank} left a record that is damaged ({path}: {problem}), so that nothing is known of it."
            ));
            continue;
        }
        if case.seen.is_empty() {
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

/// Those of whom nothing is known.
fn unknown(of: &Diagnosis) -> Vec<Rank> {
    let all = of.ranks.iter();
    let unknown = all.filter(|(_, doing)| **doing == Doing::Nothing);
    unknown.map(|(rank, _)| *rank).collect()
}

/// Says whether a rank is in a call of which it is not known whether others are late there.
fn is_unclear(of: &Diagnosis) -> bool {
    let mut all = of.ranks.values();
    all.any(|doing| matches!(doing, Doing::Unclear { .. }))
}

/// All that cannot be told for want of records, in a sentence.
fn untold(of: &Diagnosis) -> Option<String> {
    match &unknown(of)[..] {
        [] => None,
        [one] => Some(format!(
            "{one} left no record that can be read: whether others waited for it cannot be told."
        )),
        all => Some(format!(
            "{} left no records that can be read: whether others waited for them cannot be told.",
            few(all)
        )),
    }
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
        ended
            && matches!(
                doing,
                Some(Doing::Working(_) | Doing::Waiting { .. } | Doing::Unclear { .. })
            )
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
        (0, _) if is_unclear(of) => "The records do not tell who holds the run up.".to_string(),
        (0, 0) => none_waited(of),
        (0, _) => "Ranks wait for each other in a circle, which `meshwright check` would have \
                   refused: their programs are not those of one plan."
            .to_string(),
        // By the state of their processes alone: one without a record may be to blame as well.
        _ if is_unclear(of) && !is_awaited(of) => format!(
            "{} may have kept the others waiting, by the state of processes: the records do not tell.",
            names(of.culprits.iter().copied())
        ),
        _ => format!(
            "{} kept the others waiting.",
            names(of.culprits.iter().copied())
        ),
    }
}

fn none_waited(of: &Diagnosis) -> String {
    match unknown(of).is_empty() {
        true => "No rank waited for another one.".into(),
        false => "No rank waited for another one that left a record.".into(),
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
    let untold = "the records do not tell who held it up";
    let are_all_known = unknown(of).is_empty();
    let whose = match are_all_known {
        true => "of the run",
        false => "of the run that left a record",
    };
    match (of.culprits.is_empty(), is_within) {
        (false, _) => format!(
            "Others waited for {}, but all processes {whose} are gone, and {untold}: one that dies in a \
             call may have been ahead of those who had still to come.",
            names(of.culprits.iter().copied())
        ),
        (true, true) if are_all_known => format!(
            "All processes {whose} are gone, and no rank alone was behind the others: {untold}."
        ),
        (true, true) => format!("All processes {whose} are gone, and {untold}."),
        (true, false) => none_waited(of),
    }
}

fn print_json(case: &Case<'_>) -> Result<(), Failure> {
    let (of, processes) = (case.of, case.processes);
    let rank = |(rank, doing): (&Rank, &Doing)| {
        let none: &[Rank] = &[];
        let (state, what, missing, unknown) = match doing {
            Doing::Nothing => ("no record", None, none, none),
            Doing::Between => ("between steps", None, none, none),
            Doing::Working(what) => ("working", Some(what), none, none),
            Doing::Waiting { what, missing } => ("waiting", Some(what), &missing[..], none),
            Doing::Unclear { what, unknown } => ("in a call", Some(what), none, &unknown[..]),
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
            "may_wait_for": unknown,
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
        "verdict": case.finding.verdict(),
        "verdict_problem": case.finding.problem(),
        "ranks": of.ranks.iter().map(rank).collect::<Vec<_>>(),
    }))
}
