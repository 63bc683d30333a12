//! Where a rank is in its script, and which calls it has come to by then: with a static program
//! that follows from a number.

use super::local::Local;
use super::rank::{
    calls::{Calls, calls},
    what,
};
use super::script::{Scripts, Step};
use crate::error::RuntimeError;
use crate::fabric::{Call, CallKind};
use crate::record::{Doing, Owed, Seen};
use ir::Rank;
use ir::program::{Program, RoleProgram};
use std::collections::{BTreeMap, BTreeSet};

/// A place where ranks can meet: a communicator, or a way from one rank to another for one
/// transfer.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Meeting {
    Group(Vec<Rank>, u32),
    Way { transfer: u32, from: Rank, to: Rank },
}

/// Where a rank is.
#[derive(Debug)]
pub(crate) struct Position<'a> {
    rank: Rank,
    seen: &'a Seen,
    role: &'a RoleProgram,
    calls: Calls,
    scripts: Scripts,
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
pub(crate) fn of<'a>(program: &'a Program, seen: &'a Seen) -> Result<Position<'a>, RuntimeError> {
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
    let mut position = Position {
        rank,
        seen,
        role,
        calls: calls(program, role, rank, &locals)?,
        scripts: Scripts::new(program, index)?,
        come: BTreeMap::new(),
        now: Now::Between,
    };
    let script = position.scripts.of(seen.training);
    let steps = script.slots.iter().flatten();
    let n = steps.clone().count() as u64;
    if seen.begun > n || seen.done > seen.begun {
        return Err(other(format!("{rank} has {n} instructions there")));
    }
    let mut last = None;
    for step in steps.take(seen.begun as usize) {
        for (meeting, _) in position.meetings(step) {
            *position.come.entry(meeting).or_insert(0) += 1;
        }
        last = Some(step);
    }
    if let (Some(step), true) = (last, seen.done < seen.begun) {
        let words = position.words(step);
        position.now = match position.call(step) {
            None => Now::Working(words),
            Some(_) => Now::Calling(words, position.meetings(step)),
        };
    }
    Ok(position)
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

impl Position<'_> {
    fn call(&self, step: &Step) -> Option<&Call> {
        self.calls[step.template.index()][step.instruction].as_deref()
    }
    fn meetings(&self, step: &Step) -> Vec<(Meeting, Vec<Rank>)> {
        let call = self.call(step);
        call.map_or_else(Vec::new, |c| meetings(&c.kind, self.rank))
    }
    /// The name of an instruction, with its call where it is one.
    fn words(&self, step: &Step) -> String {
        let template = self.role.template(step.template);
        let microbatch = step.microbatch;
        let microbatch = microbatch.map_or(String::new(), |m| format!(" of microbatch {m}"));
        let call = self.call(step);
        format!(
            "{:?} template {}, instruction {}{microbatch}, {}{}",
            template.kind,
            step.template.0,
            step.instruction,
            what(self.role, &template.instructions[step.instruction]),
            call.map_or(String::new(), |c| format!(" ({})", c.what)),
        )
    }
    /// The first call of a rank that holds others up, in its order, in which one of them waits for
    /// it; none where nobody does, or the records are not of the same step or the one before.
    pub fn owed(&self, all: &BTreeMap<Rank, Position<'_>>) -> Option<Owed> {
        let first = |waits: &Position<'_>| {
            let Now::Calling(_, meetings) = &waits.now else {
                return None;
            };
            // In the step that it was in, or from the beginning of the next one.
            let begun = match waits.seen.plays.checked_sub(self.seen.plays)? {
                0 => self.seen.begun,
                1 => 0,
                _ => return None,
            };
            let shared = meetings.iter().filter(|(_, who)| who.contains(&self.rank));
            let nth = |meeting: &Meeting| waits.come.get(meeting).copied().unwrap_or(0);
            let find = |(meeting, _): &(Meeting, Vec<Rank>)| {
                self.nth(waits.seen.training, meeting, nth(meeting))
            };
            let found = shared.filter_map(find).filter(|o| o.instruction > begun);
            found.min_by_key(|o| o.instruction).map(|o| Owed {
                step: waits.seen.step,
                begun,
                ..o
            })
        };
        let owed = all.values().filter_map(first);
        owed.min_by_key(|o| (o.step, o.instruction))
    }
    /// The instruction of a script by which the rank comes to a meeting for the `nth` time, from 1.
    fn nth(&self, training: bool, meeting: &Meeting, nth: u64) -> Option<Owed> {
        let script = self.scripts.of(training);
        let steps = script.slots.iter().flatten();
        let (mut call, mut come, mut found) = (0, 0, None);
        let mut of = 0;
        for step in steps {
            of += 1;
            let Some(kind) = self.call(step).map(|c| &c.kind) else {
                continue;
            };
            call += u64::from(found.is_none());
            let is_here = meetings(kind, self.rank).iter().any(|(m, _)| m == meeting);
            come += u64::from(is_here);
            if is_here && come == nth && found.is_none() {
                found = Some((self.words(step), of));
            }
        }
        found.map(|(what, instruction)| Owed {
            what,
            step: self.seen.step,
            call,
            instruction,
            of,
            begun: self.seen.begun,
        })
    }
    /// The activity of the rank, given where the others were. Whoever is not among them may have
    /// come to its call, or not.
    pub fn doing(&self, all: &BTreeMap<Rank, Position<'_>>) -> Doing {
        let (what, meetings) = match &self.now {
            Now::Between => return Doing::Between,
            Now::Working(what) => return Doing::Working(what.clone()),
            Now::Calling(what, meetings) => (what.clone(), meetings),
        };
        let (mut missing, mut unknown) = (BTreeSet::new(), BTreeSet::new());
        for (meeting, others) in meetings {
            let come = |p: &Position<'_>| {
                let here = p.come.get(meeting).copied().unwrap_or(0);
                (p.seen.plays, here)
            };
            let mine = come(self);
            for &other in others {
                match all.get(&other) {
                    None => unknown.insert(other),
                    Some(p) => come(p) < mine && missing.insert(other),
                };
            }
        }
        debug_assert!(!missing.contains(&self.rank));
        let ranks = |of: BTreeSet<Rank>| of.into_iter().collect();
        match (missing.is_empty(), unknown.is_empty()) {
            (true, true) => Doing::Working(what),
            (true, false) => Doing::Unclear {
                what,
                unknown: ranks(unknown),
            },
            (false, _) => Doing::Waiting {
                what,
                missing: ranks(missing),
            },
        }
    }
}
