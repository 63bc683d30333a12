//! Streams: any two instructions of which one writes what the other reads or writes are
//! ordered by streams, deps and events, in the order of the trace.
//!
//! **In a slot** (`races`). Streams are FIFO, so what an instruction waits for is one position
//! per stream: everything up to it is complete. Two accesses conflict when their buffers are the
//! same or share bytes. It suffices to compare with the last write of a buffer and the reads
//! since, one per stream, because earlier ones are ordered before those.
//!
//! **Between slots** (`slots`). The same over the whole trace, with what a template's
//! instructions know of earlier slots found once per template.

mod slots;

use crate::memory::{has_own_copies, overlapping};
use crate::report::{Report, instr_place};
use crate::side_by_side::each;
use ir::collective::CollectiveKind;
use ir::program::{InstrKind, Instruction, Program, RoleProgram, Template};
use ir::{BufferId, InstrId, TemplateId};
use smallvec::{SmallVec, smallvec};
use std::collections::BTreeSet;

/// For each stream, how many instructions of a slot's template are complete.
type Clock = SmallVec<[u32; 6]>;

/// Checks every role.
pub(crate) fn check(program: &Program, report: &mut Report) {
    each(program.roles.len(), report, |i, report| {
        let n_templates = program.roles[i].templates.len();
        let clocks = each(n_templates, report, |t, report| {
            in_slot(program, i, TemplateId::new(t), report)
        });
        slots::check(program, i, &clocks, report);
    });
}

/// Checks a template's instructions among each other. Returns, for each of them, what of its slot
/// is complete when it ends.
fn in_slot(program: &Program, i: usize, t: TemplateId, report: &mut Report) -> Vec<Clock> {
    let role = &program.roles[i];
    let template = &role.templates[t.index()];
    let neighbours = Neighbours::new(role, template);
    for (j, a, b) in self_overlaps(role, template, &neighbours) {
        let name = |b: BufferId| format!("buffer {} ({})", b.0, role.buffer(b).name);
        report.add(
            instr_place(program, i, t, j),
            "hazard",
            format!("bytes of its own for result {}", name(a)),
            format!("bytes of {} too", name(b)),
        );
    }
    let clocks = complete(role.streams.len(), template);
    for (first, second, b) in races(role, template, &clocks, &neighbours) {
        let first = instr_place(program, i, t, first);
        unordered(program, i, (t, second), &first, b, report);
    }
    clocks
}

/// Reports that no stream, dep or event orders an instruction behind `first`.
fn unordered(
    program: &Program,
    role: usize,
    (template, instr): (TemplateId, InstrId),
    first: &str,
    b: BufferId,
    report: &mut Report,
) {
    let name = &program.roles[role].buffer(b).name;
    report.add(
        instr_place(program, role, template, instr),
        "hazard",
        format!("an order between it and {first}"),
        format!("none, though both use the bytes of buffer {} ({name})", b.0),
    );
}

/// Returns, for each instruction of a template, which of its slot's instructions are complete when
/// it ends, itself included.
fn complete(n_streams: usize, template: &Template) -> Vec<Clock> {
    let mut clocks: Vec<Clock> = Vec::with_capacity(template.instructions.len());
    let mut previous: Vec<Option<usize>> = vec![None; n_streams];
    for (j, instr) in template.instructions.iter().enumerate() {
        let stream = instr.stream.index();
        let mut clock: Clock = smallvec![0; n_streams];
        for i in (instr.deps.iter().map(|d| d.index())).chain(previous[stream]) {
            for (c, &known) in clock.iter_mut().zip(&clocks[i]) {
                *c = (*c).max(known);
            }
        }
        clock[stream] = InstrId::new(j).0 + 1;
        previous[stream] = Some(j);
        clocks.push(clock);
    }
    clocks
}

/// The buffers that a template touches, and among them those that share bytes with each. Two of a
/// row of copies do not where each has its own for every microbatch.
pub(crate) struct Neighbours {
    /// Ascending; a buffer's place here is its place in other lists of the template, too.
    touched: Vec<BufferId>,
    /// By place, the places of those that share bytes with it.
    of: Vec<Vec<usize>>,
}

impl Neighbours {
    pub(crate) fn new(role: &RoleProgram, template: &Template) -> Self {
        let instructions = template.instructions.iter();
        let mut touched: Vec<BufferId> = instructions
            .flat_map(|i| i.reads().into_iter().chain(i.writes()))
            .collect();
        touched.sort_unstable();
        touched.dedup();
        let mut of = vec![Vec::new(); touched.len()];
        let is_pass = template.kind.pass().is_some();
        for (a, b) in overlapping(role, touched.iter().copied()) {
            if is_pass && has_own_copies(role.buffer(a), role.buffer(b)) {
                continue;
            }
            if let (Ok(at_a), Ok(at_b)) = (touched.binary_search(&a), touched.binary_search(&b)) {
                of[at_a].push(at_b);
                of[at_b].push(at_a);
            }
        }
        Neighbours { touched, of }
    }
    /// The buffers that the template touches, ascending.
    pub(crate) fn touched(&self) -> &[BufferId] {
        &self.touched
    }
    /// Those that share bytes with a buffer; none where the template does not touch it.
    pub(crate) fn of(&self, b: BufferId) -> impl Iterator<Item = BufferId> {
        let places = self.place(b).map_or(&[][..], |place| &self.of[place]);
        places.iter().map(|&place| self.touched[place])
    }
    fn place(&self, b: BufferId) -> Option<usize> {
        self.touched.binary_search(&b).ok()
    }
}

/// Reports results whose bytes another operand or result of the same instruction uses under another
/// id. Only an all-reduce may work on two buffers that are the same bytes.
fn self_overlaps(
    role: &RoleProgram,
    template: &Template,
    neighbours: &Neighbours,
) -> Vec<(InstrId, BufferId, BufferId)> {
    let mut found = Vec::new();
    for (j, instr) in template.instructions.iter().enumerate() {
        let writes = instr.writes();
        if writes.iter().all(|&b| neighbours.of(b).next().is_none()) {
            continue;
        }
        let used: BTreeSet<BufferId> = instr
            .reads()
            .into_iter()
            .chain(writes.iter().copied())
            .collect();
        for &a in &writes {
            let shared = neighbours.of(a).filter(|b| used.contains(b));
            found.extend(
                shared
                    .filter(|&b| !same_bytes(role, instr, a, b))
                    .map(|b| (InstrId::new(j), a, b)),
            );
        }
    }
    found
}

/// Says whether `output` is the all-reduced `input` on the very same bytes.
fn same_bytes(role: &RoleProgram, instr: &Instruction, output: BufferId, input: BufferId) -> bool {
    let InstrKind::Collective {
        kind: CollectiveKind::AllReduce(_),
        items,
        ..
    } = &instr.kind
    else {
        return false;
    };
    let (a, b) = (role.buffer(output), role.buffer(input));
    items.iter().any(|i| i.input == input && i.output == output)
        && (a.space, a.offset) == (b.space, b.offset)
        && a.bytes == b.bytes
        && a.slots() == b.slots()
}

/// The last accesses of the buffers of a slot, by their places.
struct Last {
    writes: Vec<Option<InstrId>>,
    /// For each stream, the last read since that write: a row of streams for each buffer.
    reads: Vec<Option<InstrId>>,
    n_streams: usize,
}

impl Last {
    fn row(&self, place: usize) -> std::ops::Range<usize> {
        place * self.n_streams..(place + 1) * self.n_streams
    }
    fn reads(&self, place: usize) -> &[Option<InstrId>] {
        &self.reads[self.row(place)]
    }
    fn read(&mut self, place: usize, stream: usize, by: InstrId) {
        let row = self.row(place);
        self.reads[row][stream] = Some(by);
    }
    fn write(&mut self, place: usize, by: InstrId) {
        let row = self.row(place);
        self.reads[row].fill(None);
        self.writes[place] = Some(by);
    }
}

fn races(
    role: &RoleProgram,
    template: &Template,
    clocks: &[Clock],
    neighbours: &Neighbours,
) -> Vec<(InstrId, InstrId, BufferId)> {
    let (n, n_streams) = (neighbours.touched.len(), role.streams.len());
    let mut last = Last {
        writes: vec![None; n],
        reads: vec![None; n * n_streams],
        n_streams,
    };
    let instructions = &template.instructions;
    let streams: Vec<usize> = instructions.iter().map(|i| i.stream.index()).collect();
    let mut found = Vec::new();
    for (j, instr) in instructions.iter().enumerate() {
        let second = InstrId::new(j);
        let ordered = |first: InstrId| clocks[j][streams[first.index()]] > first.0;
        let places = |buffers: &[BufferId]| -> SmallVec<[usize; 4]> {
            buffers
                .iter()
                .filter_map(|&b| neighbours.place(b))
                .collect()
        };
        let (reads, writes) = (places(&instr.reads()), places(&instr.writes()));
        let mut conflicts = |place: usize, with_reads: bool| {
            for &other in std::iter::once(&place).chain(&neighbours.of[place]) {
                let since = if with_reads { last.reads(other) } else { &[] };
                let accesses = std::iter::once(&last.writes[other]).chain(since);
                for &first in accesses.flatten().filter(|&&i| !ordered(i)) {
                    found.push((first, second, neighbours.touched[other]));
                }
            }
        };
        reads.iter().for_each(|&place| conflicts(place, false));
        writes.iter().for_each(|&place| conflicts(place, true));
        for place in reads {
            last.read(place, streams[j], second);
        }
        for place in writes {
            last.write(place, second);
        }
    }
    found
}
