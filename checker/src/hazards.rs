//! Streams: within a template, any two instructions of which one writes what the other reads
//! or writes are ordered by streams and deps, and in list order.
//!
//! Streams are FIFO, so what an instruction waits for is one position per stream: everything
//! up to it is complete. Two accesses conflict when their buffers are the same or share
//! bytes. It suffices to compare with the last write of a buffer and the reads since, one per
//! stream, because earlier ones are ordered before those.

use crate::memory::overlapping;
use crate::report::{Report, instr_place};
use ir::collective::CollectiveKind;
use ir::program::{InstrKind, Instruction, Program, RoleProgram, Stream, Template};
use ir::{BufferId, InstrId, TemplateId};
use std::collections::{BTreeMap, BTreeSet};

const N_STREAMS: usize = 3;

fn index(s: Stream) -> usize {
    match s {
        Stream::Compute => 0,
        Stream::Collective => 1,
        Stream::Transfer => 2,
    }
}

/// Per stream, how many of its instructions are complete.
type Clock = [u32; N_STREAMS];

pub(crate) fn check(program: &Program, report: &mut Report) {
    for (i, role) in program.roles.iter().enumerate() {
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
            for (first, second, b) in races(template, &neighbours) {
                let what = |j: InstrId| instr_place(program, i, TemplateId::new(t), j);
                let expected = format!("an order between it and {}", what(first));
                let actual = format!(
                    "none, though both use the bytes of buffer {} ({})",
                    b.0,
                    role.buffer(b).name
                );
                report.add(what(second), "hazard", expected, actual);
            }
        }
    }
}

/// Last accesses of one buffer.
#[derive(Clone, Default)]
struct Last {
    write: Option<usize>,
    reads: [Option<usize>; N_STREAMS],
}

/// Buffers that share bytes, among those a template touches.
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
    for (a, b) in overlapping(role, touched.into_iter()) {
        map.entry(a).or_default().push(b);
        map.entry(b).or_default().push(a);
    }
    map
}

type Neighbours = BTreeMap<BufferId, Vec<BufferId>>;

/// Results whose bytes another operand or result of the same instruction uses, under another
/// id. An all-reduce may work on two buffers that are the same bytes.
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

/// True when `output` is the all-reduced `input` on the very same bytes.
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
        && a.offset == b.offset
        && a.bytes == b.bytes
        && a.slots() == b.slots()
}

fn races(template: &Template, neighbours: &Neighbours) -> Vec<(InstrId, InstrId, BufferId)> {
    let n = template.instructions.len();
    let mut last: BTreeMap<BufferId, Last> = BTreeMap::new();
    let mut clocks: Vec<Clock> = Vec::with_capacity(n);
    let mut positions: Vec<(usize, u32)> = Vec::with_capacity(n);
    let mut previous: [Option<usize>; N_STREAMS] = [None; N_STREAMS];
    let mut found = Vec::new();
    for (j, instr) in template.instructions.iter().enumerate() {
        let stream = index(instr.stream);
        let mut clock: Clock = [0; N_STREAMS];
        for i in instr.deps.iter().map(|d| d.index()).chain(previous[stream]) {
            for (c, &known) in clock.iter_mut().zip(&clocks[i]) {
                *c = (*c).max(known);
            }
            let (s, at) = positions[i];
            clock[s] = clock[s].max(at);
        }
        let at = previous[stream].map_or(0, |p| positions[p].1) + 1;
        clocks.push(clock);
        positions.push((stream, at));
        previous[stream] = Some(j);

        let ordered = |i: usize| clock[positions[i].0] >= positions[i].1;
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
            last.entry(b).or_default().reads[stream] = Some(j);
        }
        for b in writes {
            last.insert(
                b,
                Last {
                    write: Some(j),
                    reads: [None; N_STREAMS],
                },
            );
        }
    }
    found
}
