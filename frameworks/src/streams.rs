//! A program on the streams that software has, with the waits that it has: a program again, which
//! the simulator plays as any other.
//!
//! Meshwright's own programs wait for bytes as well as for values, and have a stream for every
//! communicator. Software places values as it runs, so its collectives wait for values alone. It
//! has streams of its own:
//!
//! ```text
//! kernels      kernels, and the collectives that they wait for: over `blocking_axes`, and
//!              reductions of gradients that do not overlap the backward pass
//! reductions   collectives over the first axis, and the world's sums
//! transfers    exchanges between stages
//! other axes   collectives over any other axis
//! prefetches   gathers of parameters ahead of the layer that needs them
//! ```
//!
//! Software has its own kernels for what Meshwright calls together, so each instruction is a call of its
//! own here; `fused` says which kernels are one.
//!
//! Gradients that are reduced beside the backward pass are also added up there, and what the end
//! of the step reduces begins as soon as the last backward has made it.

use crate::Software;
use ir::collective::CollectiveKind;
use ir::op::OpKind;
use ir::program::{
    BufferClass, Call, CollectiveItem, Event, InstrKind, Instruction, Program, RoleProgram, Stream,
    Template, TemplateKind, Which,
};
use ir::{AxisId, BufferId, InstrId, Pass, StreamId, TemplateId};
use std::collections::HashMap;

/// The stream of kernels.
pub(crate) const KERNELS: StreamId = StreamId(0);
const REDUCTIONS: StreamId = StreamId(1);
const TRANSFERS: StreamId = StreamId(2);
const OTHER_AXES: StreamId = StreamId(3);
const PREFETCHES: StreamId = StreamId(4);

/// A set of streams, a bit each.
type Set = u128;

/// The program on the software's streams.
pub(crate) fn arranged(program: &Program, software: &Software) -> Program {
    let mut program = program.clone();
    for role in &mut program.roles {
        arrange(role, software);
        if software.overlapped_gradients {
            for t in 0..role.templates.len() {
                if role.templates[t].kind == TemplateKind::StepEnd {
                    reduce_early(role, t);
                }
            }
        }
    }
    program
}

/// Whether an axis is one of those named.
pub(crate) fn is_of(role: &RoleProgram, names: &[String], axis: AxisId) -> bool {
    // Copies lie over some of the ranks that split samples.
    let name = match role.mesh.name(axis) {
        "replica" => "data",
        name => name,
    };
    names.iter().any(|n| n == name)
}

fn arrange(role: &mut RoleProgram, software: &Software) {
    let streams: Vec<Vec<StreamId>> = (role.templates.iter())
        .map(|t| streams_of(role, software, t))
        .collect();
    // By stream of the program, the new ones that its instructions are on.
    let mut of_stream: Vec<Set> = vec![0; role.streams.len()];
    for (template, streams) in role.templates.iter().zip(&streams) {
        for (instruction, new) in template.instructions.iter().zip(streams) {
            of_stream[instruction.stream.index()] |= 1 << new.index();
        }
    }
    let waits: Vec<Vec<(Vec<InstrId>, Vec<Event>)>> = (role.templates.iter().zip(&streams))
        .map(|(t, streams)| waits_of(t, streams, &of_stream))
        .collect();
    let axes = |n: usize| Stream::Communicator {
        axes: role.mesh.axis_ids().skip(n).take(1).collect(),
    };
    role.streams = vec![
        Stream::Kernels,
        axes(0),
        Stream::Transfers,
        axes(1),
        axes(0),
    ];
    for ((template, streams), waits) in role.templates.iter_mut().zip(streams).zip(waits) {
        let of = template.instructions.iter_mut().zip(streams).zip(waits);
        for ((instruction, stream), (deps, events)) in of {
            instruction.stream = stream;
            instruction.deps = deps.into_iter().collect();
            instruction.events = events;
            instruction.call = Call::Own;
        }
    }
}

/// By instruction of a template: what it waits for in its slot, and in earlier ones.
fn waits_of(
    template: &Template,
    streams: &[StreamId],
    of_stream: &[Set],
) -> Vec<(Vec<InstrId>, Vec<Event>)> {
    // What has to be drained before an instruction, as the program says, and what the
    // instructions before it on its new stream have waited for.
    let mut drained: Vec<Set> = Vec::with_capacity(streams.len());
    let mut before: Vec<Set> = vec![0; of_stream.len()];
    let mut waited: [Set; 5] = [0; 5];
    let mut all = Vec::with_capacity(streams.len());
    for (instruction, stream) in template.instructions.iter().zip(streams) {
        let own = &mut before[instruction.stream.index()];
        let mut events: Vec<Event> = Vec::new();
        for event in &instruction.events {
            match event {
                Event::Drained(stream) => *own |= of_stream[stream.index()],
                done => events.push(*done),
            }
        }
        let deps = instruction.deps.iter();
        *own |= deps.fold(0, |all, d| all | drained[d.index()]);
        let kept: Vec<InstrId> = match *stream {
            PREFETCHES => Vec::new(),
            _ => (instruction.deps.iter())
                .filter(|d| !is_for_memory(template, instruction, **d))
                .copied()
                .collect(),
        };
        let known = kept.iter().fold(0, |all, d| all | drained[d.index()]);
        let missing = *own & !(known | waited[stream.index()]);
        let bits = (0..waited.len()).filter(|s| missing >> s & 1 == 1);
        events.extend(bits.map(|s| Event::Drained(StreamId::new(s))));
        waited[stream.index()] |= *own;
        drained.push(*own);
        all.push((kept, events));
    }
    all
}

/// Whether a collective waits for another of which it reads nothing.
fn is_for_memory(template: &Template, instruction: &Instruction, dep: InstrId) -> bool {
    let other = &template.instructions[dep.index()];
    let collective = |i: &Instruction| matches!(i.kind, InstrKind::Collective { .. });
    let reads = instruction.reads();
    collective(instruction)
        && collective(other)
        && !other.writes().iter().any(|b| reads.contains(b))
}

/// By instruction of a template: its stream.
fn streams_of(role: &RoleProgram, software: &Software, template: &Template) -> Vec<StreamId> {
    let mut streams: Vec<StreamId> = Vec::with_capacity(template.instructions.len());
    let mut reduced: HashMap<BufferId, StreamId> = HashMap::new();
    for instruction in &template.instructions {
        let mut stream = stream_of(role, software, template, instruction);
        match &instruction.kind {
            InstrKind::Collective {
                kind: CollectiveKind::AllReduce(_),
                items,
                ..
            } if software.overlapped_gradients && stream != KERNELS => {
                reduced.extend(items.iter().map(|i| (i.output, stream)));
            }
            // FSDP adds what it scatters in the reductions' stream too; but what a reduction
            // takes from the kernels beside it is not modelled whole, and with neither wait
            // predictions of FSDP were further off.
            InstrKind::Compute {
                kind: OpKind::Accumulate { .. },
                inputs,
                ..
            } => {
                let beside = inputs.iter().find_map(|b| reduced.get(b));
                stream = beside.copied().unwrap_or(stream);
            }
            _ => {}
        }
        streams.push(stream);
    }
    streams
}

fn stream_of(
    role: &RoleProgram,
    software: &Software,
    template: &Template,
    instruction: &Instruction,
) -> StreamId {
    let (kind, axes) = match &instruction.kind {
        InstrKind::Collective { kind, axes, .. } => (kind, axes),
        InstrKind::WorldSum { .. } => return REDUCTIONS,
        InstrKind::Exchange { .. } => return TRANSFERS,
        _ => return KERNELS,
    };
    let reduces = !matches!(
        kind,
        CollectiveKind::AllGather | CollectiveKind::AllToAll | CollectiveKind::Shift
    );
    let waited_for = reduces && instruction.pass == Pass::BW && !software.overlapped_gradients;
    let blocks = |a: &AxisId| is_of(role, &software.blocking_axes, *a);
    if waited_for || axes.iter().any(blocks) {
        KERNELS
    } else if software.prefetched_parameters && is_ahead(role, template, instruction) {
        PREFETCHES
    } else if axes.first().is_some_and(|a| a.index() > 0) {
        OTHER_AXES
    } else {
        REDUCTIONS
    }
}

/// Whether an instruction gathers, in every microbatch, a parameter that nothing in its template
/// makes.
fn is_ahead(role: &RoleProgram, template: &Template, instruction: &Instruction) -> bool {
    let InstrKind::Collective {
        kind: CollectiveKind::AllGather,
        items,
        ..
    } = &instruction.kind
    else {
        return false;
    };
    let lasts = |i: &CollectiveItem| {
        let class = role.buffer(i.input).class;
        matches!(class, BufferClass::Persistent | BufferClass::Step)
    };
    let reads = instruction.reads();
    let mut before = instruction.deps.iter();
    template.kind.pass().is_some()
        && items.iter().all(lasts)
        && !before.any(|d| {
            let writes = template.instructions[d.index()].writes();
            writes.iter().any(|b| reads.contains(b))
        })
}

/// Lets the collectives at the end of a step that need nothing of it begin when the last backward
/// passes have made what they reduce, in that order, behind the reductions of those passes.
fn reduce_early(role: &mut RoleProgram, end: usize) {
    // The last backward pass of each stage: what writes a buffer last.
    let mut made: HashMap<BufferId, (usize, TemplateId, InstrId)> = HashMap::new();
    let mut passes: Vec<(usize, usize)> = (0..role.templates.len())
        .filter(|&t| role.templates[t].kind.is_backward())
        .filter_map(|t| {
            let last = (role.trace.iter()).rposition(|s| s.template.index() == t);
            Some((last?, t))
        })
        .collect();
    passes.sort_unstable();
    for (slot, t) in passes {
        for (i, instruction) in role.templates[t].instructions.iter().enumerate() {
            for b in instruction.writes() {
                made.insert(b, (slot, TemplateId::new(t), InstrId::new(i)));
            }
        }
    }
    let template = &mut role.templates[end];
    let mut early: Vec<(usize, TemplateId, InstrId, usize)> = Vec::new();
    for (n, instruction) in template.instructions.iter_mut().enumerate() {
        if !matches!(instruction.kind, InstrKind::Collective { .. }) || !instruction.deps.is_empty()
        {
            continue;
        }
        let reads = instruction.reads();
        let makers: Option<Vec<_>> = reads.iter().map(|b| made.get(b).copied()).collect();
        let Some(last) = makers.as_ref().and_then(|m| m.iter().max()) else {
            continue;
        };
        early.push((last.0, last.1, last.2, n));
        instruction.stream = REDUCTIONS;
        let done = |&(_, template, instruction): &(usize, TemplateId, InstrId)| Event::Done {
            template,
            instruction,
            which: Which::Latest,
        };
        instruction.events = makers.iter().flatten().map(done).collect();
    }
    early.sort_unstable();
    let first: Vec<usize> = early.into_iter().map(|e| e.3).collect();
    to_the_front(role, end, &first);
}

/// Puts some instructions of a template, which wait for none of it, before all others.
fn to_the_front(role: &mut RoleProgram, t: usize, first: &[usize]) {
    let n = role.templates[t].instructions.len();
    let mut is_first = vec![false; n];
    first.iter().for_each(|&i| is_first[i] = true);
    let order: Vec<usize> = (first.iter().copied())
        .chain((0..n).filter(|&i| !is_first[i]))
        .collect();
    let mut place = vec![InstrId(0); n];
    for (new, &old) in order.iter().enumerate() {
        place[old] = InstrId::new(new);
    }
    let template = &mut role.templates[t];
    let old = template.instructions.clone();
    template.instructions = order.iter().map(|&i| old[i].clone()).collect();
    for instruction in &mut template.instructions {
        let deps = instruction.deps.iter_mut();
        deps.for_each(|d| *d = place[d.index()]);
    }
    let all = role.templates.iter_mut().flat_map(|t| &mut t.instructions);
    for event in all.flat_map(|i| &mut i.events) {
        if let Event::Done {
            template,
            instruction,
            ..
        } = event
            && template.index() == t
        {
            *instruction = place[instruction.index()];
        }
    }
}
