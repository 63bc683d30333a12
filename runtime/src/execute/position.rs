//! Where a rank is in its script, and which calls it has come to by then: with a static program
//! that follows from a number.

use super::local::Local;
use super::rank::{calls::calls, what};
use super::script::{Scripts, Step};
use crate::error::RuntimeError;
use crate::fabric::CallKind;
use crate::record::{Doing, Seen};
use ir::Rank;
use ir::program::Program;
use std::collections::BTreeMap;

/// A place where ranks can meet: a communicator, or a way from one rank to another for one
/// transfer.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Meeting {
    Group(Vec<Rank>, u32),
    Way { transfer: u32, from: Rank, to: Rank },
}

/// Where a rank is.
#[derive(Debug)]
pub(crate) struct Position {
    rank: Rank,
    plays: u64,
    /// How often it has come to each meeting in this script.
    come: BTreeMap<Meeting, u64>,
    now: Now,
}

#[derive(Debug)]
enum Now {
    Between,
    Working(String),
    /// In a call: what it is, its meetings, and who else belongs to each.
    Calling(String, Vec<(Meeting, Vec<Rank>)>),
}

/// The position of a rank of a program.
///
/// Fails when the program has no such rank, or its script is shorter.
pub(crate) fn of(program: &Program, seen: &Seen) -> Result<Position, RuntimeError> {
    let other = |problem: String| {
        RuntimeError::Program(format!("the records are of another plan: {problem}"))
    };
    let rank = seen.rank;
    let mut roles = program.roles.iter().enumerate();
    let found = roles.find_map(|(i, r)| Some((i, r, r.mesh.coords(rank)?)));
    let Some((index, role, coords)) = found else {
        return Err(other(format!("it has no {rank}")));
    };
    let part =
        |b: &ir::program::Buffer| Local::shard(b.dtype, &b.lens, &b.spec, &role.mesh, &coords);
    let locals: Vec<Local> = role.buffers.iter().map(part).collect();
    let calls = calls(program, role, rank, &locals)?;
    let script = Scripts::new(program, index)?.of(seen.training);
    let steps: Vec<&Step> = script.slots.iter().flatten().collect();
    if seen.begun > steps.len() as u64 || seen.done > seen.begun {
        let problem = format!("{rank} has {} instructions there", steps.len());
        return Err(other(problem));
    }
    let begun = &steps[..seen.begun as usize];
    let meetings = |step: &Step| {
        let call = calls[step.template.index()][step.instruction].as_ref();
        call.map_or_else(Vec::new, |c| meetings(&c.kind, rank))
    };
    let mut come = BTreeMap::new();
    for (meeting, _) in begun.iter().flat_map(|s| meetings(s)) {
        *come.entry(meeting).or_insert(0) += 1;
    }
    let now = match begun.last() {
        Some(step) if seen.done < seen.begun => {
            let template = role.template(step.template);
            let mut words = format!(
                "{:?} template {}, instruction {}{}, {}",
                template.kind,
                step.template.0,
                step.instruction,
                step.microbatch
                    .map_or(String::new(), |m| format!(" of microbatch {m}")),
                what(role, &template.instructions[step.instruction])
            );
            match &calls[step.template.index()][step.instruction] {
                None => Now::Working(words),
                Some(call) => {
                    words += &format!(" ({})", call.what);
                    Now::Calling(words, meetings(step))
                }
            }
        }
        _ => Now::Between,
    };
    Ok(Position {
        rank,
        plays: seen.plays,
        come,
        now,
    })
}

/// The meetings of a call, with the others who belong to each.
fn meetings(call: &CallKind, rank: Rank) -> Vec<(Meeting, Vec<Rank>)> {
    match call {
        CallKind::Collective(of) => {
            let others = of.group.iter().copied().filter(|r| *r != rank).collect();
            vec![(Meeting::Group(of.group.clone(), of.number), others)]
        }
        CallKind::Exchange(of) => {
            let moved = of.sends.iter().chain(&of.receives);
            let tiles = moved.flat_map(|m| m.tiles.iter().map(|t| (m.transfer, t.from, t.to)));
            let way = |(transfer, from, to)| {
                let other = if from == rank { to } else { from };
                (Meeting::Way { transfer, from, to }, vec![other])
            };
            tiles.map(way).collect()
        }
    }
}

impl Position {
    /// The activity of the rank, given where the others were.
    pub fn doing(&self, all: &BTreeMap<Rank, Position>) -> Doing {
        let (what, meetings) = match &self.now {
            Now::Between => return Doing::Between,
            Now::Working(what) => return Doing::Working(what.clone()),
            Now::Calling(what, meetings) => (what, meetings),
        };
        let mut missing = Vec::new();
        for (meeting, others) in meetings {
            let mine = (self.plays, self.come.get(meeting).copied().unwrap_or(0));
            for &other in others {
                let theirs = all.get(&other);
                let theirs = theirs.map(|p| (p.plays, p.come.get(meeting).copied().unwrap_or(0)));
                if theirs < Some(mine) && !missing.contains(&other) {
                    missing.push(other);
                }
            }
        }
        debug_assert!(!missing.contains(&self.rank));
        match missing.is_empty() {
            true => Doing::Working(what.clone()),
            false => {
                missing.sort_unstable();
                Doing::Waiting {
                    what: what.clone(),
                    missing,
                }
            }
        }
    }
}
