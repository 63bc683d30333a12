//! Accesses of different slots of the trace.
//!
//! An instruction's knowledge of earlier slots follows from its own events, from those of what
//! it waits for in its slot, and from its streams, which are FIFO. Instructions of a template
//! that know the same form a **group**; so a slot is a few joins of clocks, and a look at the
//! last accesses of what it touches:
//!
//! * of every copy of a buffer that keeps its bytes: the last write, and by stream the last
//!   read since;
//! * of the bytes that transient buffers share: the latest play of every template. What may be
//!   read and written there is not told apart, as nothing lives there from slot to slot.

use super::unordered;
use crate::memory::{extent, first_of_row, shared_bytes};
use crate::report::{Report, instr_place};
use ir::program::{BufferClass, Event, Instruction, Program, RoleProgram, Template, Which};
use ir::{BufferId, InstrId, StreamId, TemplateId};
use smallvec::{SmallVec, smallvec};
use std::collections::{BTreeMap, BTreeSet};

/// A place in the trace: slot and instruction in one number, both counted from 1. 0 is before all.
type Position = u64;

fn position(slot: usize, one_past: u32) -> Position {
    (slot as u64 + 1) << 32 | u64::from(one_past)
}

/// For each stream, the last instruction that is complete.
type Clock = SmallVec<[Position; 6]>;

fn join(a: &mut Clock, b: &Clock) {
    a.iter_mut().zip(b).for_each(|(a, b)| *a = (*a).max(*b));
}

/// Reports accesses in the trace of a role that nothing orders. `complete` says, by template and
/// instruction, what of a slot is complete when the instruction ends.
pub(super) fn check(
    program: &Program,
    i: usize,
    complete: &[Vec<super::Clock>],
    report: &mut Report,
) {
    let role = &program.roles[i];
    let shared = shared_bytes(role);
    let waited_for = waited_for(role);
    let profiles: Vec<Profile> = (role.templates.iter().enumerate())
        .map(|(t, template)| Profile::new(role, TemplateId::new(t), template, &shared, &waited_for))
        .collect();
    let mut play = Play::new(role);
    for (k, slot) in role.trace.iter().enumerate() {
        let (t, profile) = (slot.template.index(), &profiles[slot.template.index()]);
        let known = play.known(profile, slot.microbatch);
        for (instr, first, buffer) in play.conflicts(&profiles, t, slot.microbatch, &known) {
            let (of, j) = first;
            let first = instr_place(program, i, of, j);
            let first = format!("{first} of an earlier slot");
            unordered(program, i, (slot.template, instr), &first, buffer, report);
        }
        play.note(profile, &complete[t], k, slot.microbatch, &known);
        play.played[t] = Some(k);
    }
}

/// Finds, for each template, the instructions that instructions of later slots wait for.
fn waited_for(role: &RoleProgram) -> Vec<BTreeSet<InstrId>> {
    let mut found = vec![BTreeSet::new(); role.templates.len()];
    let all = role.templates.iter().flat_map(|t| &t.instructions);
    for event in all.flat_map(|i| &i.events) {
        if let Event::Done {
            template,
            instruction,
            ..
        } = event
        {
            found[template.index()].insert(*instruction);
        }
    }
    found
}

/// A use of a buffer that keeps its bytes.
struct Use {
    group: usize,
    instr: InstrId,
    buffer: BufferId,
    writes: bool,
}

/// A use of bytes that transient buffers share.
struct Span {
    group: usize,
    instr: InstrId,
    buffer: BufferId,
    stream: usize,
    from: u64,
    to: u64,
}

/// The last write of a buffer in a template, and the reads after it.
struct LastUse {
    buffer: BufferId,
    write: Option<InstrId>,
    /// The reads after the write.
    reads: Vec<InstrId>,
}

/// The facts about a template that other slots need.
struct Profile {
    template: TemplateId,
    /// The events of earlier slots that the instructions know, each once. Beside these, each knows
    /// that its own stream has completed its earlier slots.
    sources: Vec<Event>,
    /// For each group, the places of its events in `sources`.
    groups: Vec<Vec<usize>>,
    /// The stream and the group of each instruction.
    instructions: Vec<(StreamId, usize)>,
    /// The first use of each buffer by each group.
    uses: Vec<Use>,
    last: Vec<LastUse>,
    spans: Vec<Span>,
    /// For each stream, the last instruction that uses shared bytes.
    last_span: BTreeMap<usize, InstrId>,
    waited_for: BTreeSet<InstrId>,
}

impl Profile {
    fn new(
        role: &RoleProgram,
        id: TemplateId,
        template: &Template,
        shared: &BTreeSet<BufferId>,
        waited_for: &[BTreeSet<InstrId>],
    ) -> Profile {
        let mut p = Profile {
            template: id,
            sources: Vec::new(),
            groups: Vec::new(),
            instructions: Vec::new(),
            uses: Vec::new(),
            last: Vec::new(),
            spans: Vec::new(),
            last_span: BTreeMap::new(),
            waited_for: waited_for[id.index()].clone(),
        };
        let mut previous: Vec<Option<usize>> = vec![None; role.streams.len()];
        let mut seen = BTreeSet::new();
        let mut last: BTreeMap<BufferId, LastUse> = BTreeMap::new();
        for (j, instr) in template.instructions.iter().enumerate() {
            let group = p.group_of(instr, previous[instr.stream.index()]);
            previous[instr.stream.index()] = Some(j);
            p.instructions.push((instr.stream, group));
            let j = InstrId::new(j);
            let reads = instr.reads().into_iter().map(|b| (b, false));
            for (b, writes) in reads.chain(instr.writes().into_iter().map(|b| (b, true))) {
                if shared.contains(&b) {
                    p.share(role, instr, j, group, b);
                }
                if role.buffer(b).class == BufferClass::Transient {
                    continue;
                }
                if seen.insert((group, b, writes)) {
                    p.uses.push(Use {
                        group,
                        instr: j,
                        buffer: b,
                        writes,
                    });
                }
                p.use_again(&mut last, j, b, writes);
            }
        }
        p.last = last.into_values().collect();
        p
    }

    fn source(&mut self, event: Event) -> usize {
        let known = self.sources.iter().position(|e| *e == event);
        known.unwrap_or_else(|| {
            self.sources.push(event);
            self.sources.len() - 1
        })
    }

    fn group_of(&mut self, instr: &Instruction, previous: Option<usize>) -> usize {
        let mut sources: BTreeSet<usize> = BTreeSet::new();
        sources.insert(self.source(Event::Drained(instr.stream)));
        for event in &instr.events {
            sources.insert(self.source(*event));
        }
        let before = instr.deps.iter().map(|d| d.index()).chain(previous);
        for i in before {
            sources.extend(&self.groups[self.instructions[i].1]);
        }
        let sources: Vec<usize> = sources.into_iter().collect();
        let known = self.groups.iter().position(|g| *g == sources);
        known.unwrap_or_else(|| {
            self.groups.push(sources);
            self.groups.len() - 1
        })
    }

    fn share(
        &mut self,
        role: &RoleProgram,
        instr: &Instruction,
        j: InstrId,
        group: usize,
        b: BufferId,
    ) {
        let (from, to) = extent(role.buffer(b)).unwrap_or((0, u64::MAX));
        let stream = instr.stream.index();
        self.last_span.insert(stream, j);
        let same = |s: &Span| (s.group, s.stream, s.buffer) == (group, stream, b);
        // Uses of one transient stand close together, so a short look back finds them.
        if !self.spans.iter().rev().take(8).any(same) {
            self.spans.push(Span {
                group,
                instr: j,
                buffer: b,
                stream,
                from,
                to,
            });
        }
    }

    fn use_again(
        &self,
        last: &mut BTreeMap<BufferId, LastUse>,
        j: InstrId,
        b: BufferId,
        writes: bool,
    ) {
        let known = last.entry(b).or_insert(LastUse {
            buffer: b,
            write: None,
            reads: Vec::new(),
        });
        if writes {
            known.write = Some(j);
            known.reads.clear();
            return;
        }
        // One read for each stream is enough, since a stream is in order.
        let stream = |i: &InstrId| self.instructions[i.index()].0;
        known.reads.retain(|i| stream(i) != stream(&j));
        known.reads.push(j);
    }
}

/// The last uses of one copy of a buffer, each with its template.
#[derive(Clone, Default)]
struct Last {
    write: Option<(Position, TemplateId, InstrId, StreamId)>,
    reads: Vec<(Position, TemplateId, InstrId, StreamId)>,
}

/// The state of the walk through the trace.
struct Play<'a> {
    role: &'a RoleProgram,
    /// For each buffer, the place of its first copy in `copies`.
    first_copy: Vec<usize>,
    copies: Vec<Last>,
    /// For each stream, what is complete when its last instruction is.
    drained: Vec<Clock>,
    /// The clocks at the end of instructions that others wait for: the latest one, and one for each
    /// microbatch.
    done: BTreeMap<(TemplateId, InstrId), (Clock, BTreeMap<u32, Clock>)>,
    /// For each template, the latest slot that plays it.
    played: Vec<Option<usize>>,
}

impl<'a> Play<'a> {
    fn new(role: &'a RoleProgram) -> Self {
        let mut n = 0;
        let mut first_copy = Vec::with_capacity(role.buffers.len());
        let rows = first_of_row(role);
        for (i, b) in role.buffers.iter().enumerate() {
            // Buffers that have copies by turns come after the first of them.
            match rows[i].index() {
                first if first < i => first_copy.push(first_copy[first]),
                _ => {
                    first_copy.push(n);
                    n += b.slots().max(1) as usize;
                }
            }
        }
        Play {
            role,
            first_copy,
            copies: vec![Last::default(); n],
            drained: vec![smallvec![0; role.streams.len()]; role.streams.len()],
            done: BTreeMap::new(),
            played: vec![None; role.templates.len()],
        }
    }

    fn copy(&self, b: BufferId, microbatch: Option<u32>) -> usize {
        self.first_copy[b.index()] + self.role.buffer(b).copy_for(microbatch) as usize
    }

    /// Returns, for each group, what is complete of earlier slots when its instructions begin.
    fn known(&self, profile: &Profile, microbatch: Option<u32>) -> Vec<Clock> {
        let none: Clock = smallvec![0; self.role.streams.len()];
        let sources: Vec<&Clock> = profile
            .sources
            .iter()
            .map(|event| self.complete(*event, microbatch).unwrap_or(&none))
            .collect();
        let of = |group: &Vec<usize>| {
            let mut clock = none.clone();
            group.iter().for_each(|&s| join(&mut clock, sources[s]));
            clock
        };
        profile.groups.iter().map(of).collect()
    }

    /// Returns the clock at the end of an event; `None` where the event has no slot to wait for.
    fn complete(&self, event: Event, microbatch: Option<u32>) -> Option<&Clock> {
        match event {
            Event::Drained(stream) => self.drained.get(stream.index()),
            Event::Done {
                template,
                instruction,
                which,
            } => {
                let (latest, by_microbatch) = self.done.get(&(template, instruction))?;
                match which {
                    Which::Latest => Some(latest),
                    Which::Back(n) => by_microbatch.get(&microbatch?.checked_sub(n)?),
                }
            }
        }
    }

    /// Finds the instructions of the next slot that nothing orders behind an earlier one, each with
    /// that earlier one and the buffer that both use.
    fn conflicts(
        &self,
        profiles: &[Profile],
        template: usize,
        microbatch: Option<u32>,
        known: &[Clock],
    ) -> Vec<(InstrId, (TemplateId, InstrId), BufferId)> {
        let profile = &profiles[template];
        let mut found = Vec::new();
        for u in &profile.uses {
            let last = &self.copies[self.copy(u.buffer, microbatch)];
            let reads = last.reads.iter().filter(|_| u.writes);
            for &(at, of, j, stream) in last.write.iter().chain(reads) {
                if known[u.group][stream.index()] < at {
                    found.push((u.instr, (of, j), u.buffer));
                }
            }
        }
        for other in profiles {
            let Some(slot) = self.played[other.template.index()] else {
                continue;
            };
            for (&stream, &last) in &other.last_span {
                let at = position(slot, last.0 + 1);
                if known.iter().all(|clock| clock[stream] >= at) {
                    continue;
                }
                let spans = profile.spans.iter().filter(|s| known[s.group][stream] < at);
                for span in spans {
                    let meets =
                        |o: &&Span| o.stream == stream && o.from < span.to && span.from < o.to;
                    if let Some(o) = other.spans.iter().find(meets) {
                        found.push((span.instr, (other.template, o.instr), span.buffer));
                    }
                }
            }
        }
        found
    }

    /// Adds the accesses and events of a slot to the state.
    fn note(
        &mut self,
        profile: &Profile,
        complete: &[super::Clock],
        slot: usize,
        microbatch: Option<u32>,
        known: &[Clock],
    ) {
        let end = |i: InstrId| {
            let mut clock = known[profile.instructions[i.index()].1].clone();
            for (at, &own) in clock.iter_mut().zip(&complete[i.index()]) {
                if own > 0 {
                    *at = position(slot, own);
                }
            }
            clock
        };
        for last in &profile.last {
            let at = |i: InstrId| {
                let stream = profile.instructions[i.index()].0;
                (position(slot, i.0 + 1), profile.template, i, stream)
            };
            let copy = self.copy(last.buffer, microbatch);
            let copy = &mut self.copies[copy];
            if let Some(write) = last.write {
                *copy = Last {
                    write: Some(at(write)),
                    reads: Vec::new(),
                };
            }
            for read in last.reads.iter().map(|&i| at(i)) {
                copy.reads.retain(|r| r.3 != read.3);
                copy.reads.push(read);
            }
        }
        let mut ends: BTreeMap<StreamId, InstrId> = BTreeMap::new();
        for (i, (stream, _)) in profile.instructions.iter().enumerate() {
            ends.insert(*stream, InstrId::new(i));
        }
        for (stream, i) in ends {
            self.drained[stream.index()] = end(i);
        }
        for &i in &profile.waited_for {
            let clock = end(i);
            let done = self.done.entry((profile.template, i)).or_default();
            if let Some(m) = microbatch {
                done.1.insert(m, clock.clone());
            }
            done.0 = clock;
        }
    }
}
