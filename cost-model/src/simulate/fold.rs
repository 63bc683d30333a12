//! Templates as max-plus maps.
//!
//! Inside a template only durations, dependencies and the order of streams count; from outside come the
//! ends of the streams in earlier slots, and the ends of single instructions that something
//! waits for. Every end inside is therefore `max over inputs of (input + longest path from
//! it)`, with paths that are the same for every microbatch: played once, then a few additions
//! per slot. Times are integer picoseconds, so this is exact, not close.

use ir::program::{Event, InstrKind, RoleProgram, Template};
use ir::{InstrId, TemplateId};
use std::collections::BTreeSet;

/// Picoseconds: a step of 200 days still fits. Sums saturate there, as figures of a cluster may
/// be absurd.
pub(super) type Pico = u64;

pub(super) fn pico(seconds: f64) -> Pico {
    (seconds * 1e12).round() as Pico
}

pub(super) fn seconds(time: Pico) -> f64 {
    time as f64 * 1e-12
}

/// A set of streams, a bit each; there are at most [`ir::program::MAX_STREAMS`].
pub(super) type StreamSet = u128;

/// By instruction, the streams that are drained before it begins: those that it waits for, or
/// what it waits for in its slot, or the one before it on its stream.
fn drained(template: &Template, n_streams: usize) -> Vec<StreamSet> {
    let mut drained: Vec<StreamSet> = Vec::with_capacity(template.instructions.len());
    let mut of_stream = vec![0; n_streams];
    for instruction in &template.instructions {
        let own = &mut of_stream[instruction.stream.index()];
        for event in &instruction.events {
            if let Event::Drained(stream) = event {
                *own |= 1 << stream.index();
            }
        }
        *own |= (instruction.deps.iter()).fold(0, |all, d| all | drained[d.index()]);
        drained.push(*own);
    }
    drained
}

/// An event outside a template that its instructions wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Input {
    /// The end of some streams in earlier slots.
    Streams(StreamSet),
    /// An instruction of an earlier slot.
    Event(Event),
}

/// A template as a max-plus map.
pub(super) struct Folded {
    /// The events that it depends on.
    pub inputs: Vec<Input>,
    /// From each input to the last end; `None` where nothing depends on it.
    pub end: Vec<Option<Pico>>,
    /// By stream that the template uses: from each input to the end of the last instruction there.
    pub streams: Vec<(usize, Vec<Option<Pico>>)>,
    /// From each input to the ends of the instructions that later slots wait for.
    pub awaited: Vec<(InstrId, Vec<Option<Pico>>)>,
    /// Whether it holds a world sum, which it cannot be folded over.
    pub has_world_sum: bool,
    /// By instruction, the streams that are drained before it begins.
    pub drained: Vec<StreamSet>,
}

impl Folded {
    /// Folds a template whose instructions take `durations`; later slots wait for `awaited`.
    pub(super) fn new(
        template: &Template,
        durations: &[Pico],
        n_streams: usize,
        awaited: &BTreeSet<InstrId>,
    ) -> Self {
        let drained = drained(template, n_streams);
        let used = template.instructions.iter().map(|i| i.stream.index());
        let used: BTreeSet<usize> = used.collect();
        // Streams that every instruction finds drained are one input, whatever stands on them.
        let together = drained.iter().fold(StreamSet::MAX, |all, d| all & d) & mask(0..n_streams);
        let known = used.iter().fold(together, |all, q| all | 1 << q);
        let known = drained.iter().fold(known, |all, d| all | d);
        let alone = (0..n_streams)
            .map(|q| 1 << q)
            .filter(|q| q & known & !together != 0);
        let sets = std::iter::once(together).filter(|q| *q != 0).chain(alone);
        let mut inputs: Vec<Input> = sets.map(Input::Streams).collect();
        for event in template.instructions.iter().flat_map(|i| &i.events) {
            if matches!(event, Event::Done { .. }) && !inputs.contains(&Input::Event(*event)) {
                inputs.push(Input::Event(*event));
            }
        }
        let mut folded = Folded {
            end: Vec::with_capacity(inputs.len()),
            streams: used.into_iter().map(|q| (q, Vec::new())).collect(),
            awaited: awaited.iter().map(|&i| (i, Vec::new())).collect(),
            has_world_sum: template
                .instructions
                .iter()
                .any(|i| matches!(i.kind, InstrKind::WorldSum { .. })),
            drained,
            inputs,
        };
        for input in &folded.inputs {
            let (ends, stream_ends) =
                longest_paths(template, durations, *input, n_streams, &folded.drained);
            folded.end.push(ends.iter().copied().max().flatten());
            for (stream, paths) in &mut folded.streams {
                paths.push(stream_ends[*stream]);
            }
            for (i, paths) in &mut folded.awaited {
                paths.push(ends.get(i.index()).copied().flatten());
            }
        }
        folded
    }
    /// Duration when nothing outside is waited for.
    pub(super) fn undisturbed(&self) -> Pico {
        self.end.iter().copied().max().flatten().unwrap_or(0)
    }
}

fn mask(streams: std::ops::Range<usize>) -> StreamSet {
    streams.fold(0, |all, q| all | 1 << q)
}

/// The latest of `inputs[k] + paths[k]`.
pub(super) fn latest(inputs: &[Pico], paths: &[Option<Pico>]) -> Option<Pico> {
    inputs
        .iter()
        .zip(paths)
        .filter_map(|(&t, p)| Some(t.saturating_add((*p)?)))
        .max()
}

/// Ends of all instructions, and of the streams, when an input comes at 0 and nothing else is
/// waited for; `None` for those that do not depend on it.
fn longest_paths(
    template: &Template,
    durations: &[Pico],
    input: Input,
    n_streams: usize,
    drained: &[StreamSet],
) -> (Vec<Option<Pico>>, Vec<Option<Pico>>) {
    let mut ends: Vec<Option<Pico>> = Vec::with_capacity(template.instructions.len());
    let begun = |q: usize| match input {
        Input::Streams(set) if set >> q & 1 == 1 => Some(0),
        _ => None,
    };
    let mut stream_ends: Vec<Option<Pico>> = (0..n_streams).map(begun).collect();
    for (i, instruction) in template.instructions.iter().enumerate() {
        let own = match input {
            Input::Streams(set) => drained[i] & set != 0,
            Input::Event(e) => instruction.events.contains(&e),
        };
        let stream = &mut stream_ends[instruction.stream.index()];
        let start = (instruction.deps.iter())
            .map(|d| ends[d.index()])
            .fold(own.then_some(0).max(*stream), Option::max);
        let end = start.map(|s| s.saturating_add(durations[i]));
        *stream = end.or(*stream);
        ends.push(end);
    }
    (ends, stream_ends)
}

/// By template, the instructions that later slots wait for.
pub(super) fn awaited(role: &RoleProgram) -> Vec<BTreeSet<InstrId>> {
    let mut found = vec![BTreeSet::new(); role.templates.len()];
    let all = role.templates.iter().flat_map(|t| &t.instructions);
    for event in all.flat_map(|i| &i.events) {
        if let Event::Done {
            template: TemplateId(t),
            instruction,
            ..
        } = event
            && let Some(of) = found.get_mut(*t as usize)
        {
            of.insert(*instruction);
        }
    }
    found
}
