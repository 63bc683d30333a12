//! The waits of instructions.
//!
//! **In their own slot** (`deps`): the last write of what an instruction reads, and the last
//! write of and the reads since from what it writes; buffers count as one where their bytes
//! overlap. Stream order already orders instructions of one stream. A vector clock (per
//! instruction, the last instruction of every stream that is known to be complete when it
//! starts) leaves out what follows from other waits.
//!
//! **In earlier slots** (`events`): slots other than exchanges follow each other, so the first
//! instruction of a slot on a stream waits until the others are drained. Exchanges run beside
//! them and wait by buffer:
//!
//! ```text
//! kernels    F0 writes a ──┐          F1 ...          F2 writes a, whose copy F0 had
//! transfers                └─ send a of microbatch 0 ──────┘
//! ```
//! A send waits for the writes of what it sends, a receive for the last uses of the copy that
//! it fills; uses of what was received wait for the receive, and writes over what was sent for
//! the send. With `n` copies, the copy of microbatch `m` was that of `m - n` before.

use ir::program::{
    Buffer, BufferClass, BufferIds, Event, InstrKind, Instruction, RoleProgram, Space, Stream,
    Template, TemplateKind, Which,
};
use ir::{BufferId, InstrId, StreamId, TemplateId};
use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};
use std::collections::{BTreeMap, VecDeque};

/// By stream, one past the position of an instruction; 0 for none.
type Clock = SmallVec<[u32; 6]>;
/// A byte of an arena.
type InSpace = (Space, u64);

fn join(a: &mut Clock, b: &Clock) {
    a.iter_mut().zip(b).for_each(|(a, b)| *a = (*a).max(*b));
}

/// Fills in what the instructions of a role wait for; its buffers have their places and its
/// trace is complete.
pub fn set_waits(role: &mut RoleProgram) {
    let mut accesses = Accesses::new(&role.buffers, role.streams.len());
    for template in &mut role.templates {
        set_deps(&mut template.instructions, &mut accesses);
        accesses.clear();
    }
    set_events(role);
}

/// When the instructions of a template meet its kernels, whatever bytes buffers lie at.
pub(crate) struct Meetings {
    /// By instruction, how many of the template's come before its operands are made by kernels: it
    /// could start behind these.
    pub ready: Vec<usize>,
    /// By instruction of another stream, the first kernel behind it that waits for it, as that
    /// reads what this one makes or what is made behind it; the number of instructions where there
    /// is none.
    pub awaited: Vec<usize>,
}

/// The meetings of a template. Its `deps` are to be set again afterwards.
pub(crate) fn meetings(role: &mut RoleProgram, template: usize) -> Meetings {
    let is_kernels = |s: &Stream| matches!(s, Stream::Kernels);
    let kernels: Vec<bool> = role.streams.iter().map(is_kernels).collect();
    let mut accesses = Accesses::new(&role.buffers, kernels.len());
    accesses.bytes_matter = false;
    let instructions = &mut role.templates[template].instructions;
    let clocks = set_deps(instructions, &mut accesses);
    let mut awaited = vec![instructions.len(); instructions.len()];
    // By stream, its instructions that no kernel has waited for so far, the earliest first.
    let mut open: Vec<VecDeque<usize>> = vec![VecDeque::new(); kernels.len()];
    for (i, instruction) in instructions.iter().enumerate() {
        let own = instruction.stream.index();
        if !kernels[own] {
            open[own].push_back(i);
            continue;
        }
        for (open, &known) in open.iter_mut().zip(&clocks[i]) {
            while let Some(first) = open.front().copied().filter(|&i| i < known as usize) {
                open.pop_front();
                awaited[first] = i;
            }
        }
    }
    let of_kernels = |clock: &Clock| {
        let known = clock.iter().zip(&kernels).filter(|(_, is)| **is);
        known.map(|(known, _)| *known as usize).max().unwrap_or(0)
    };
    Meetings {
        ready: clocks.iter().map(of_kernels).collect(),
        awaited,
    }
}

/// Fills in the `events` of a role that has its `deps`; those that it has are forgotten.
pub fn set_events(role: &mut RoleProgram) {
    let all = role.templates.iter_mut().flat_map(|t| &mut t.instructions);
    all.for_each(|i| i.events.clear());
    follow_slots(role);
    meet_exchanges(role);
}

/// The bytes of a buffer, from and to.
fn bytes_of(buffer: &Buffer) -> (InSpace, InSpace) {
    let end = buffer.offset + buffer.stride();
    ((buffer.space, buffer.offset), (buffer.space, end))
}

/// Ranges of bytes without overlap, by their first: the end, and who took them last.
type Taken = BTreeMap<InSpace, (InSpace, BufferId)>;

/// The owners of what lies between `from` and `to`.
fn overlapping(taken: &Taken, from: InSpace, to: InSpace) -> impl Iterator<Item = BufferId> {
    let before = taken.range(..from).next_back();
    let before = before.filter(|(_, (end, _))| from < to && *end > from);
    let inside = taken.range(from..to.max(from));
    before.into_iter().chain(inside).map(|(_, (_, b))| *b)
}

/// Gives the bytes between `from` and `to` to `b`.
fn take(taken: &mut Taken, from: InSpace, to: InSpace, b: BufferId) {
    if from >= to {
        return;
    }
    let before = taken.range_mut(..from).next_back();
    if let Some((_, own)) = before.filter(|(_, (end, _))| *end > from) {
        let (end, owner) = *own;
        own.0 = from;
        if end > to {
            taken.insert(to, (end, owner));
        }
    }
    while let Some((&start, &(end, owner))) = taken.range(from..to).next() {
        taken.remove(&start);
        if end > to {
            taken.insert(to, (end, owner));
        }
    }
    taken.insert(from, (to, b));
}

/// The accesses that a buffer's next access may have to wait for.
#[derive(Clone)]
struct Access {
    written: Clock,
    read: Clock,
}

/// The last accesses to the buffers of a role, in the template at hand.
struct Accesses<'b> {
    buffers: &'b [Buffer],
    n_streams: usize,
    /// Whether a buffer that takes the bytes of another one waits for it.
    bytes_matter: bool,
    /// By buffer; `None` for those that the template has not touched so far.
    by_buffer: Vec<Option<Access>>,
    /// By first byte, the end of a range of bytes and the transient buffer that took it last.
    taken: Taken,
    /// All that it has touched.
    touched: Vec<BufferId>,
}

impl<'b> Accesses<'b> {
    fn new(buffers: &'b [Buffer], n_streams: usize) -> Self {
        Accesses {
            buffers,
            n_streams,
            bytes_matter: true,
            by_buffer: vec![None; buffers.len()],
            taken: BTreeMap::new(),
            touched: Vec::new(),
        }
    }

    /// Forgets the template.
    fn clear(&mut self) {
        self.taken.clear();
        for b in self.touched.drain(..) {
            self.by_buffer[b.index()] = None;
        }
    }

    fn none(&self) -> Clock {
        smallvec![0; self.n_streams]
    }

    fn of(&mut self, b: BufferId) -> &mut Access {
        let none = self.none();
        let access = &mut self.by_buffer[b.index()];
        if access.is_none() {
            self.touched.push(b);
            let buffer = &self.buffers[b.index()];
            if self.bytes_matter && buffer.class == BufferClass::Transient {
                let (from, to) = bytes_of(buffer);
                take(&mut self.taken, from, to, b);
            }
        }
        access.get_or_insert_with(|| Access {
            written: none.clone(),
            read: none,
        })
    }

    /// A transient buffer's first access waits for all accesses of those whose bytes it takes. For
    /// those that had the same bytes before, their next owner has waited.
    fn reused_bytes(&self, b: BufferId, wait: &mut Clock) {
        let own = &self.buffers[b.index()];
        if self.by_buffer[b.index()].is_some() || own.class != BufferClass::Transient {
            return;
        }
        let (from, to) = bytes_of(own);
        let others = overlapping(&self.taken, from, to);
        for access in others.filter_map(|b| self.by_buffer[b.index()].as_ref()) {
            join(wait, &access.written);
            join(wait, &access.read);
        }
    }
}

/// Sets the `deps` of a template; by instruction, what of it is complete when it ends.
fn set_deps(instructions: &mut [Instruction], accesses: &mut Accesses<'_>) -> Vec<Clock> {
    let n_streams = accesses.n_streams;
    let mut clocks: Vec<Clock> = Vec::with_capacity(instructions.len());
    let mut stream_clock = vec![accesses.none(); n_streams];
    for (i, instruction) in instructions.iter_mut().enumerate() {
        let (reads, writes) = (instruction.reads(), instruction.writes());
        let mut wait = accesses.none();
        for b in reads.iter().chain(&writes) {
            accesses.reused_bytes(*b, &mut wait);
        }
        for b in &reads {
            join(&mut wait, &accesses.of(*b).written);
        }
        for b in &writes {
            let access = accesses.of(*b);
            join(&mut wait, &access.written);
            join(&mut wait, &access.read);
        }
        let own = instruction.stream.index();
        let mut known = stream_clock[own].clone();
        // Later instructions first: they may imply the earlier ones.
        let mut candidates: SmallVec<[usize; 6]> = (0..n_streams)
            .filter(|&s| s != own && wait[s] > known[s])
            .collect();
        candidates.sort_by_key(|&s| std::cmp::Reverse(wait[s]));
        instruction.deps.clear();
        for s in candidates {
            if wait[s] > known[s] {
                let dep = InstrId(wait[s] - 1);
                instruction.deps.push(dep);
                join(&mut known, &clocks[dep.index()]);
            }
        }
        instruction.deps.sort_unstable();
        let end = InstrId::new(i).0 + 1;
        known[own] = end;
        stream_clock[own].clone_from(&known);
        clocks.push(known);
        for b in &reads {
            let read = &mut accesses.of(*b).read[own];
            *read = end.max(*read);
        }
        for b in &writes {
            let mut written = accesses.none();
            written[own] = end;
            let read = accesses.none();
            *accesses.of(*b) = Access { written, read };
        }
    }
    clocks
}

/// By instruction of a template, what of its slot is complete when it ends.
fn complete(n_streams: usize, instructions: &[Instruction]) -> Vec<Clock> {
    let mut clocks: Vec<Clock> = Vec::with_capacity(instructions.len());
    let mut stream_clock: Vec<Clock> = vec![smallvec![0; n_streams]; n_streams];
    for (i, instruction) in instructions.iter().enumerate() {
        let own = instruction.stream.index();
        let mut known = stream_clock[own].clone();
        let deps = instruction.deps.iter();
        deps.for_each(|d| join(&mut known, &clocks[d.index()]));
        known[own] = InstrId::new(i).0 + 1;
        stream_clock[own].clone_from(&known);
        clocks.push(known);
    }
    clocks
}

/// Makes slots other than exchanges follow each other on all streams but that of transfers.
fn follow_slots(role: &mut RoleProgram) {
    let mut used = vec![false; role.streams.len()];
    for template in role.templates.iter().filter(|t| !is_exchange(t.kind)) {
        template
            .instructions
            .iter()
            .for_each(|i| used[i.stream.index()] = true);
    }
    let streams: Vec<StreamId> = (0..used.len())
        .filter(|&s| used[s])
        .map(StreamId::new)
        .collect();
    for template in role.templates.iter_mut().filter(|t| !is_exchange(t.kind)) {
        let mut begun = vec![false; used.len()];
        for instruction in &mut template.instructions {
            // An instruction that waits in its slot inherits the waits of the other.
            let own = instruction.stream;
            if !begun[own.index()] && instruction.deps.is_empty() {
                let others = streams.iter().filter(|s| **s != own);
                instruction.events = others.map(|&s| Event::Drained(s)).collect();
            }
            begun[own.index()] = true;
        }
    }
}

fn is_exchange(kind: TemplateKind) -> bool {
    kind == TemplateKind::Exchange
}

/// The instructions of a template on one stream that touch a buffer.
#[derive(Clone, Copy)]
struct Touch {
    template: TemplateId,
    first: InstrId,
    last: InstrId,
    first_write: Option<InstrId>,
    last_write: Option<InstrId>,
}

/// Makes exchanges wait for those who touch their buffers, and those for them.
fn meet_exchanges(role: &mut RoleProgram) {
    let touches = touches_of_exchanged(role);
    if touches.is_empty() {
        return;
    }
    let n_streams = role.streams.len();
    let known = |t: &Template| complete(n_streams, &t.instructions);
    let known: Vec<Vec<Clock>> = role.templates.iter().map(known).collect();
    let plays = Plays::of(role);
    let mut waits: Vec<(TemplateId, InstrId, Event)> = Vec::new();
    for (x, template) in role.templates.iter().enumerate() {
        let x = TemplateId::new(x);
        for (i, instruction) in template.instructions.iter().enumerate() {
            let InstrKind::Exchange { sends, recvs } = &instruction.kind else {
                continue;
            };
            let exchange = (x, InstrId::new(i));
            let sent = sends.iter().map(|s| (s.1, false));
            for (b, received) in sent.chain(recvs.iter().map(|r| (r.1, true))) {
                let (earlier, later) = plays.copies(role.buffer(b), received);
                for touch in touches.get(&b).into_iter().flatten() {
                    let (first, last) = match received {
                        true => (Some(touch.first), Some(touch.last)),
                        false => (touch.first_write, touch.last_write),
                    };
                    let Some((first, last)) = first.zip(last) else {
                        continue;
                    };
                    let toucher = |i| (touch.template, i);
                    waits.extend(plays.wait(exchange, toucher(last), earlier));
                    waits.extend(plays.wait(toucher(first), exchange, later));
                }
            }
        }
    }
    let implied: Vec<bool> = waits
        .iter()
        .map(|w| waits.iter().any(|other| implies(role, &known, other, w)))
        .collect();
    for ((template, instruction, event), _) in waits.into_iter().zip(implied).filter(|w| !w.1) {
        let events = &mut role.templates[template.index()].instructions[instruction.index()].events;
        if !events.contains(&event) {
            events.push(event);
        }
    }
    let all = role.templates.iter_mut().flat_map(|t| &mut t.instructions);
    all.for_each(|i| i.events.sort_unstable());
}

/// Whether the wait `a` makes the wait `b` useless.
fn implies(
    role: &RoleProgram,
    known: &[Vec<Clock>],
    a: &(TemplateId, InstrId, Event),
    b: &(TemplateId, InstrId, Event),
) -> bool {
    let before = |t: TemplateId, first: InstrId, second: InstrId| {
        let stream = role.template(t).instructions[first.index()].stream;
        known[t.index()][second.index()][stream.index()] > first.0
    };
    let (
        Event::Done {
            template: ta,
            instruction: ia,
            which: wa,
        },
        Event::Done {
            template: tb,
            instruction: ib,
            which: wb,
        },
    ) = (a.2, b.2)
    else {
        return false;
    };
    let differ = (a.1, ia) != (b.1, ib);
    // The waiter of `a` comes first, and what it waits for ends last.
    differ && (a.0, ta, wa) == (b.0, tb, wb) && before(a.0, a.1, b.1) && before(ta, ib, ia)
}

/// By exchanged buffer, who touches it: an entry for each template and stream. Exchanges are
/// left out, as they follow each other anyway.
fn touches_of_exchanged(role: &RoleProgram) -> FxHashMap<BufferId, Vec<Touch>> {
    let mut touches: FxHashMap<BufferId, Vec<Touch>> = FxHashMap::default();
    let exchanges = role.templates.iter().filter(|t| is_exchange(t.kind));
    for instruction in exchanges.flat_map(|t| &t.instructions) {
        let buffers = [instruction.reads(), instruction.writes()].concat();
        for b in buffers {
            touches.entry(b).or_default();
        }
    }
    let others = role.templates.iter().enumerate();
    for (t, template) in others.filter(|(_, t)| !is_exchange(t.kind)) {
        let t = TemplateId::new(t);
        for (i, instruction) in template.instructions.iter().enumerate() {
            let i = InstrId::new(i);
            let stream = |at: InstrId| template.instructions[at.index()].stream;
            let mut note = |buffers: BufferIds, writes: bool| {
                for b in buffers {
                    let Some(of) = touches.get_mut(&b) else {
                        continue;
                    };
                    let write = writes.then_some(i);
                    let same = |known: &&mut Touch| {
                        known.template == t && stream(known.first) == stream(i)
                    };
                    match of.iter_mut().find(same) {
                        Some(known) => {
                            known.last = i;
                            known.first_write = known.first_write.or(write);
                            known.last_write = write.or(known.last_write);
                        }
                        None => of.push(Touch {
                            template: t,
                            first: i,
                            last: i,
                            first_write: write,
                            last_write: write,
                        }),
                    }
                }
            };
            note(instruction.reads(), false);
            note(instruction.writes(), true);
        }
    }
    touches
}

/// When the templates of a role are played.
struct Plays {
    /// By template: whether for microbatches, and first and last slot.
    of: Vec<Option<(bool, usize, usize)>>,
    n_microbatches: u32,
}

impl Plays {
    fn of(role: &RoleProgram) -> Plays {
        let mut of = vec![None; role.templates.len()];
        for (at, slot) in role.trace.iter().enumerate() {
            let known = of[slot.template.index()].get_or_insert((false, at, at));
            *known = (known.0 || slot.microbatch.is_some(), known.1, at);
        }
        let numbers = role.trace.iter().filter_map(|s| s.microbatch);
        Plays {
            of,
            n_microbatches: numbers.max().map_or(0, |m| m + 1),
        }
    }

    /// Which plays of others an exchange of a buffer waits for, and which of its own plays
    /// others wait for.
    fn copies(&self, buffer: &Buffer, received: bool) -> (Which, Which) {
        match (buffer.class, received) {
            (BufferClass::PerMicrobatch { slots }, true) => (Which::Back(slots), Which::Back(0)),
            (BufferClass::PerMicrobatch { slots }, false) => (Which::Back(0), Which::Back(slots)),
            _ => (Which::Latest, Which::Latest),
        }
    }

    /// The wait of one instruction for another, where there is a slot to wait for.
    fn wait(
        &self,
        waiter: (TemplateId, InstrId),
        on: (TemplateId, InstrId),
        which: Which,
    ) -> Option<(TemplateId, InstrId, Event)> {
        let (waiting, made) = (self.of[waiter.0.index()]?, self.of[on.0.index()]?);
        let which = match (waiting.0 && made.0, which) {
            (true, Which::Back(n)) if n >= self.n_microbatches => return None,
            (true, which) => which,
            (false, _) => Which::Latest,
        };
        let event = Event::Done {
            template: on.0,
            instruction: on.1,
            which,
        };
        (made.1 < waiting.2).then_some((waiter.0, waiter.1, event))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every byte is of who took it last, whatever ranges were taken before.
    #[test]
    fn bytes_are_of_who_took_them_last() {
        let mut random = 7u64;
        let mut below = |n: u64| {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1);
            (random >> 33) % n
        };
        let at = |byte: u64| (Space::Device, byte);
        for _ in 0..200 {
            let (mut taken, mut owners) = (Taken::new(), vec![None; 64]);
            for b in 0..12 {
                let from = below(60);
                let to = (from + below(20)).min(64);
                let mut found: Vec<BufferId> = overlapping(&taken, at(from), at(to)).collect();
                found.sort_unstable();
                found.dedup();
                let range = from as usize..to as usize;
                let mut expected: Vec<BufferId> =
                    owners[range.clone()].iter().copied().flatten().collect();
                expected.sort_unstable();
                expected.dedup();
                assert_eq!(found, expected, "{from} to {to} of {taken:?}");
                take(&mut taken, at(from), at(to), BufferId(b));
                owners[range].fill(Some(BufferId(b)));
            }
        }
    }
}
