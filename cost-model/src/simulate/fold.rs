//! Templates as max-plus maps.
//!
//! Inside a template only durations, dependencies and stream order count; from outside come
//! the template's start and, for instructions that touch buffers which are sent or received,
//! the end of an exchange. Every end inside is therefore `max over inputs of (input + longest
//! path from it)`, with paths that are the same for every microbatch: played once, then a few
//! additions per slot. Times are integer picoseconds, so this is exact, not close.

use crate::costs::{InstrCost, QUEUES};
use ir::program::{
    BufferClass, BufferIds, InstrKind, Instruction, RoleProgram, Template, TemplateKind,
};
use std::collections::BTreeMap;

/// Picoseconds: a step of 200 days still fits. Sums saturate there, as figures of a cluster may
/// be absurd.
pub(super) type Pico = u64;

pub(super) fn pico(seconds: f64) -> Pico {
    (seconds * 1e12).round() as Pico
}

pub(super) fn seconds(time: Pico) -> f64 {
    time as f64 * 1e-12
}

/// The buffers of a role that take part in exchanges, with a number for each copy.
pub(super) struct Exchanged {
    /// First copy and number of copies, by buffer; `None` for buffers that stay in the stage.
    by_buffer: Vec<Option<(u32, u32)>>,
    /// Copies in all.
    pub n_copies: usize,
}

impl Exchanged {
    pub(super) fn new(role: &RoleProgram) -> Self {
        let mut by_buffer = vec![None; role.buffers.len()];
        let mut n_copies = 0u32;
        let exchanges = role
            .templates
            .iter()
            .filter(|t| t.kind == TemplateKind::Exchange)
            .flat_map(|t| &t.instructions);
        for buffer in exchanges.flat_map(|i| [i.reads(), i.writes()].concat()) {
            if by_buffer[buffer.index()].is_none() {
                let slots = match role.buffer(buffer).class {
                    BufferClass::PerMicrobatch { slots } => slots.max(1),
                    _ => 1,
                };
                by_buffer[buffer.index()] = Some((n_copies, slots));
                n_copies += slots;
            }
        }
        Exchanged {
            by_buffer,
            n_copies: n_copies as usize,
        }
    }
    /// The reference to a buffer, if it is exchanged.
    pub(super) fn copies(&self, buffer: ir::BufferId) -> Option<Copies> {
        self.by_buffer[buffer.index()].map(|(first, slots)| Copies { first, slots })
    }
}

/// The copies of an exchanged buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Copies {
    first: u32,
    slots: u32,
}

impl Copies {
    /// The copy that a microbatch uses.
    pub(super) fn of(self, microbatch: Option<u32>) -> usize {
        (self.first + microbatch.map_or(0, |m| m % self.slots)) as usize
    }
}

/// A touch of an exchanged buffer: every touch waits for a pending receive into it, a write
/// also for a pending send from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Touch {
    pub copies: Copies,
    pub writes: bool,
}

pub(super) fn touches(instruction: &Instruction, exchanged: &Exchanged) -> Vec<Touch> {
    let of = |buffers: BufferIds, writes| {
        buffers.into_iter().filter_map(move |b| {
            Some(Touch {
                copies: exchanged.copies(b)?,
                writes,
            })
        })
    };
    let mut all: Vec<Touch> = of(instruction.reads(), false)
        .chain(of(instruction.writes(), true))
        .collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// A template as a max-plus map.
pub(super) struct Folded {
    /// Touches whose exchange is an input; input 0 is the template's start and has none.
    pub inputs: Vec<Vec<Touch>>,
    /// From each input to the template's end; `None` where nothing depends on the input.
    pub end: Vec<Option<Pico>>,
    /// From each input to the last end of an instruction that touches the copies.
    pub outputs: Vec<Output>,
    /// Whether it holds a world sum, which it cannot be folded over.
    pub has_world_sum: bool,
}

/// Ends of the instructions that touch a buffer.
pub(super) struct Output {
    pub copies: Copies,
    /// From each input to the last write; `None` throughout where it is only read.
    pub write: Vec<Option<Pico>>,
    /// From each input to the last touch.
    pub touch: Vec<Option<Pico>>,
}

impl Folded {
    /// Folds a template whose instructions take `durations`.
    pub(super) fn new(
        template: &Template,
        durations: &[Pico],
        exchanged: &Exchanged,
        costs: &[InstrCost],
    ) -> Self {
        let touched: Vec<Vec<Touch>> = template
            .instructions
            .iter()
            .map(|i| touches(i, exchanged))
            .collect();
        let mut inputs: Vec<(Option<usize>, Vec<Touch>)> = vec![(None, Vec::new())];
        let mut waited: [Vec<Touch>; QUEUES] = Default::default();
        for (i, cost) in costs.iter().enumerate().take(template.instructions.len()) {
            // What the stream has waited for it need not wait for again.
            let seen = &mut waited[cost.queue];
            let new: Vec<Touch> = touched[i]
                .iter()
                .copied()
                .filter(|t| !seen.contains(t))
                .collect();
            if !new.is_empty() {
                seen.extend(&new);
                inputs.push((Some(i), new));
            }
        }
        let mut outputs: BTreeMap<Copies, Output> = BTreeMap::new();
        let mut end = Vec::with_capacity(inputs.len());
        for (k, (at, _)) in inputs.iter().enumerate() {
            let ends = longest_paths(template, durations, *at, costs);
            end.push(ends.iter().copied().max().flatten());
            for (e, touch) in ends
                .iter()
                .zip(&touched)
                .flat_map(|(e, ts)| ts.iter().map(move |t| (*e, t)))
            {
                let none = || vec![None; inputs.len()];
                let output = outputs.entry(touch.copies).or_insert_with(|| Output {
                    copies: touch.copies,
                    write: none(),
                    touch: none(),
                });
                output.touch[k] = output.touch[k].max(e);
                if touch.writes {
                    output.write[k] = output.write[k].max(e);
                }
            }
        }
        // An empty template ends when it starts.
        end[0] = end[0].or(Some(0));
        Folded {
            inputs: inputs.into_iter().map(|i| i.1).collect(),
            end,
            outputs: outputs.into_values().collect(),
            has_world_sum: template
                .instructions
                .iter()
                .any(|i| matches!(i.kind, InstrKind::WorldSum { .. })),
        }
    }
    /// Duration when nothing outside is waited for.
    pub(super) fn undisturbed(&self) -> Pico {
        self.end[0].unwrap_or(0)
    }
}

/// The latest of `inputs[k] + paths[k]`.
pub(super) fn latest(inputs: &[Pico], paths: &[Option<Pico>]) -> Option<Pico> {
    inputs
        .iter()
        .zip(paths)
        .filter_map(|(&t, p)| Some(t.saturating_add((*p)?)))
        .max()
}

/// Ends of all instructions when instruction `from` may start at 0 (all of them, for `None`)
/// and nothing else is waited for; `None` for those that do not depend on it.
fn longest_paths(
    template: &Template,
    durations: &[Pico],
    from: Option<usize>,
    costs: &[InstrCost],
) -> Vec<Option<Pico>> {
    let mut ends: Vec<Option<Pico>> = Vec::with_capacity(template.instructions.len());
    let mut stream_ends = [None; QUEUES];
    for (i, instruction) in template.instructions.iter().enumerate() {
        let own = from.is_none_or(|f| f == i).then_some(0);
        let stream = &mut stream_ends[costs[i].queue];
        let start = instruction
            .deps
            .iter()
            .filter(|_| !costs[i].ahead)
            .map(|d| ends[d.index()])
            .fold(own.max(*stream), Option::max);
        let end = start.map(|s| s.saturating_add(durations[i]));
        *stream = end.or(*stream);
        ends.push(end);
    }
    ends
}
