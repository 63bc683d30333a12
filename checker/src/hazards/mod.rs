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
use std::collections::{BTreeMap, BTreeSet};

/// For each stream, how many instructions of a slot's template are complete.
type Clock = SmallVec<[u32; 6]>;

/// Checks every role.
pub(crate) fn check(program: &Program, report: &mut Report) {
    each(program.roles.len(), report, |i, report| {
        let role = &program.roles[i];
        let mut clocks = Vec::with_capacity(role.templates.len());
        for (t, template) in role.templates.iter().enumerate() {
            let neighbours = neighbours(role, template);
            for (j, a, b) in self_overlaps(role, template, &neighbours) {
                let name = |b: BufferId| format!("buffer {} ({})", b.0, role.buffer(b).name);
                let place = instr_place(program, i, TemplateId::new(t), j);
                report.add(
                    place,
                    "hazard",
                    format!("bytes of its own for result {}", name(a)),
                    format!("bytes of {} too", name(b)),
                );
            }
            clocks.push(complete(role.streams.len(), template));
            for (first, second, b) in races(role, template, &clocks[t], &neighbours) {
                let first = instr_place(program, i, TemplateId::new(t), first);
                unordered(program, i, (TemplateId::new(t), second), &first, b, report);
            }
        }
        slots::check(program, i, &clocks, report);
    });
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

/// The last accesses of one buffer.
#[derive(Clone)]
struct Last {
    write: Option<usize>,
    /// For each stream, the last read since that write.
    reads: SmallVec<[Option<usize>; 6]>,
}

/// Finds, among the buffers that a template touches, those that share bytes with each of them. Two
/// of a row of copies do not where each has its own for every microbatch.
pub(crate) fn neighbours(
    role: &RoleProgram,
    template: &Template,
) -> BTreeMap<BufferId, Vec<BufferId>> {
    let mut touched: Vec<BufferId> = template
        .instructions
        .iter()
        .flat_map(|i| i.reads().into_iter().chain(i.writes()))
        .collect();
    touched.sort_unstable();
    touched.dedup();
    let mut map: BTreeMap<BufferId, Vec<BufferId>> = touched.iter().map(|&b| (b, vec![])).collect();
    let is_pass = template.kind.pass().is_some();
    for (a, b) in overlapping(role, touched.into_iter()) {
        if is_pass && has_own_copies(role.buffer(a), role.buffer(b)) {
            continue;
        }
        map.entry(a).or_default().push(b);
        map.entry(b).or_default().push(a);
    }
    map
}

type Neighbours = BTreeMap<BufferId, Vec<BufferId>>;

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
        if writes
            .iter()
            .all(|b| neighbours.get(b).is_none_or(Vec::is_empty))
        {
            continue;
        }
        let used: BTreeSet<BufferId> = instr
            .reads()
            .into_iter()
            .chain(writes.iter().copied())
            .collect();
        for &a in &writes {
            let shared = neighbours
                .get(&a)
                .into_iter()
                .flatten()
                .filter(|b| used.contains(b));
            found.extend(
                shared
                    .filter(|&&b| !same_bytes(role, instr, a, b))
                    .map(|&b| (InstrId::new(j), a, b)),
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

fn races(
    role: &RoleProgram,
    template: &Template,
    clocks: &[Clock],
    neighbours: &Neighbours,
) -> Vec<(InstrId, InstrId, BufferId)> {
    let none = Last {
        write: None,
        reads: smallvec![None; role.streams.len()],
    };
    let mut last: BTreeMap<BufferId, Last> = BTreeMap::new();
    let mut found = Vec::new();
    for (j, instr) in template.instructions.iter().enumerate() {
        let stream = |i: usize| template.instructions[i].stream.index();
        let ordered = |i: usize| clocks[j][stream(i)] as usize > i;
        let (reads, writes) = (instr.reads(), instr.writes());
        let mut conflicts = |b: BufferId, with_reads: bool| {
            for other in std::iter::once(&b).chain(neighbours.get(&b).into_iter().flatten()) {
                let Some(l) = last.get(other) else { continue };
                let reads = l.reads.iter().flatten().filter(|_| with_reads);
                for &i in l
                    .write
                    .iter()
                    .chain(reads)
                    .filter(|&&i| i != j && !ordered(i))
                {
                    found.push((InstrId::new(i), InstrId::new(j), *other));
                }
            }
        };
        reads.iter().for_each(|&b| conflicts(b, false));
        writes.iter().for_each(|&b| conflicts(b, true));
        for b in reads {
            last.entry(b).or_insert_with(|| none.clone()).reads[stream(j)] = Some(j);
        }
        for b in writes {
            let write = Some(j);
            last.insert(
                b,
                Last {
                    write,
                    ..none.clone()
                },
            );
        }
    }
    found
}
