//! The slots that a rank plays: the whole trace, or the part that a validation loss needs.
//!
//! Validation plays `StepBegin`, the forward templates, and the exchanges between them that
//! serve the forward pass; then, of the instructions after the microbatches, those
//! that the loss depends on. The filter depends on the program alone, so all ranks agree on
//! it, and nothing that it plays writes a persistent buffer.
//!
//! A script resolves what its instructions wait for: of every other stream, how many instructions
//! must be done. What is not played is not waited for. It also says what is one of the program's
//! [`Calls`].

use super::calls::Calls;
use crate::error::RuntimeError;
use ir::program::{
    BufferClass, Event, InstrKind, Instruction, Program, RoleProgram, TemplateKind, Which,
};
use ir::{BufferId, InstrId, OpKind, Pass, StreamId, TemplateId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A slot and the instructions of its template that are played.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ScriptSlot {
    pub template: TemplateId,
    pub microbatch: Option<u32>,
    pub instructions: Vec<usize>,
}

/// An instruction that is played.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Step {
    pub template: TemplateId,
    pub instruction: usize,
    pub microbatch: Option<u32>,
    pub stream: StreamId,
    /// Other streams, and how many of their instructions it waits for.
    pub waits: Vec<(StreamId, usize)>,
    /// Whether another stream waits for it.
    pub is_awaited: bool,
    /// Whether it writes to where a state lies.
    pub writes_states: bool,
    /// How many steps of its slot, this one first, a device may begin at once; 0 where it is one of
    /// those of an earlier step.
    pub n_joined: usize,
    /// How many steps of its slot, this one first, are a chain; 0 where it is one of those of an
    /// earlier step.
    pub n_chained: usize,
    /// Whether its result is written though the next one of its chain takes it.
    pub is_kept: bool,
    /// Whether the chain that it begins ends in an accumulator that holds nothing yet.
    pub is_cleared: bool,
    /// Whether it clears an accumulator that such a chain comes to next.
    pub is_spared: bool,
}

/// The script of a role.
#[derive(Debug)]
pub(crate) struct Script {
    /// Slot by slot, in list order.
    pub slots: Vec<Vec<Step>>,
    /// By stream, its instructions in that order: slot and place in it.
    pub streams: Vec<Vec<(usize, usize)>>,
    /// How many of them write to states.
    pub n_writers: usize,
}

/// The two scripts of a role.
#[derive(Clone, Debug)]
pub(crate) struct Scripts {
    training: Arc<Script>,
    validation: Arc<Script>,
}

impl Scripts {
    /// Fails when the loss needs more than the role's own instructions after the microbatches.
    pub fn new(program: &Program, role: usize) -> Result<Self, RuntimeError> {
        let role = &program.roles[role];
        let all = |t: TemplateId| (0..role.template(t).instructions.len()).collect();
        let training = role
            .trace
            .iter()
            .map(|s| ScriptSlot {
                template: s.template,
                microbatch: s.microbatch,
                instructions: all(s.template),
            })
            .collect();
        Ok(Scripts {
            training: Arc::new(Script::new(role, training)),
            validation: Arc::new(Script::new(role, validation(role)?)),
        })
    }
    /// One training step, or the loss alone.
    pub fn of(&self, training: bool) -> Arc<Script> {
        Arc::clone(match training {
            true => &self.training,
            false => &self.validation,
        })
    }
}

impl Script {
    fn new(role: &RoleProgram, slots: Vec<ScriptSlot>) -> Self {
        let mut made = Script {
            slots: Vec::with_capacity(slots.len()),
            streams: vec![Vec::new(); role.streams.len()],
            n_writers: 0,
        };
        // Slots that play a template, the latest last, and where their instructions stand: stream,
        // and how many of it are done when the instruction is.
        let mut played: BTreeMap<TemplateId, Vec<(Option<u32>, Places)>> = BTreeMap::new();
        for (k, slot) in slots.iter().enumerate() {
            let before: Vec<usize> = made.streams.iter().map(Vec::len).collect();
            let mut here = Places::new();
            let mut steps = Vec::with_capacity(slot.instructions.len());
            let all = &role.template(slot.template).instructions;
            let calls = Calls::of(all, &slot.instructions);
            for (at, &i) in slot.instructions.iter().enumerate() {
                let instruction = &role.template(slot.template).instructions[i];
                let stream = instruction.stream;
                let mut waits: BTreeMap<StreamId, usize> = BTreeMap::new();
                let mut wait = |(stream, n): (StreamId, usize)| {
                    let most = waits.entry(stream).or_default();
                    *most = n.max(*most);
                };
                for event in &instruction.events {
                    match *event {
                        Event::Drained(stream) => wait((stream, before[stream.index()])),
                        Event::Done {
                            template,
                            instruction,
                            which,
                        } => {
                            let wanted = match (which, slot.microbatch) {
                                (Which::Latest, _) => None,
                                (Which::Back(n), m) => match m.and_then(|m| m.checked_sub(n)) {
                                    Some(m) => Some(m),
                                    None => continue,
                                },
                            };
                            let mut earlier = played.get(&template).into_iter().flatten().rev();
                            let found = earlier.find(|s| wanted.is_none() || s.0 == wanted);
                            if let Some(&place) = found.and_then(|s| s.1.get(&instruction)) {
                                wait(place);
                            }
                        }
                    }
                }
                for &place in instruction.deps.iter().filter_map(|d| here.get(d)) {
                    wait(place);
                }
                // A stream is in order by itself.
                waits.retain(|s, n| *s != stream && *n > 0);
                let queue = &mut made.streams[stream.index()];
                queue.push((k, at));
                here.insert(InstrId::new(i), (stream, queue.len()));
                steps.push(Step {
                    template: slot.template,
                    instruction: i,
                    microbatch: slot.microbatch,
                    stream,
                    waits: waits.into_iter().collect(),
                    is_awaited: false,
                    writes_states: writes_states(role, instruction),
                    n_joined: calls.n_joined[at],
                    n_chained: calls.n_chained[at],
                    is_kept: calls.is_kept[at],
                    is_cleared: false,
                    is_spared: false,
                });
            }
            made.slots.push(steps);
            let slots = played.entry(slot.template).or_default();
            slots.push((slot.microbatch, here));
        }
        let steps = made.slots.iter().flatten();
        let awaited: BTreeSet<_> = steps.flat_map(|s| s.waits.iter().copied()).collect();
        for (stream, n) in awaited {
            let (slot, at) = made.streams[stream.index()][n - 1];
            made.slots[slot][at].is_awaited = true;
        }
        spare_zeros(role, &mut made.slots);
        let steps = made.slots.iter().flatten();
        made.n_writers = steps.filter(|s| s.writes_states).count();
        made
    }
}

/// Notes which chains come to an accumulator right after it was cleared. Where chains are played, they
/// can write there what they would add, and it need not be cleared.
fn spare_zeros(role: &RoleProgram, slots: &mut [Vec<Step>]) {
    // By accumulator, the step that cleared it, since when nobody was there.
    let mut zeros: BTreeMap<BufferId, (usize, usize)> = BTreeMap::new();
    let (mut cleared, mut spared) = (Vec::new(), Vec::new());
    for (k, slot) in slots.iter().enumerate() {
        let mut first = 0;
        for (at, step) in slot.iter().enumerate() {
            let instruction = &role.template(step.template).instructions[step.instruction];
            if step.n_chained > 0 {
                first = at;
            }
            match &instruction.kind {
                InstrKind::Fill { value: 0.0, output }
                    if role.buffer(*output).class == BufferClass::Step =>
                {
                    zeros.insert(*output, (k, at));
                }
                InstrKind::Compute { kind, outputs, .. }
                    if step.n_chained == 0 && matches!(kind, OpKind::Accumulate { .. }) =>
                {
                    for b in outputs {
                        if let Some(fill) = zeros.remove(b) {
                            cleared.push((k, first));
                            spared.push(fill);
                        }
                    }
                }
                _ => {
                    for b in instruction.reads().iter().chain(&instruction.writes()) {
                        zeros.remove(b);
                    }
                }
            }
        }
    }
    for (k, at) in cleared {
        slots[k][at].is_cleared = true;
    }
    for (k, at) in spared {
        slots[k][at].is_spared = true;
    }
}

/// Whether an instruction writes to bytes of a state, under whatever name.
fn writes_states(role: &RoleProgram, instruction: &Instruction) -> bool {
    let span = |b: &BufferId| {
        let b = role.buffer(*b);
        let end = b.offset + u64::from(b.slots()) * b.stride();
        (b.space, b.offset, end)
    };
    let states: Vec<_> = role.states.iter().map(|s| span(&s.buffer)).collect();
    instruction
        .writes()
        .iter()
        .map(span)
        .any(|(space, start, end)| {
            let mut states = states.iter();
            states.any(|s| s.0 == space && s.1 < end && start < s.2)
        })
}

/// By instruction of a slot, its stream and how many of that are done when it is.
type Places = BTreeMap<InstrId, (StreamId, usize)>;

/// The slots that a validation plays.
///
/// Fails where the loss needs more than the role's own instructions after the microbatches.
pub(crate) fn validation(role: &RoleProgram) -> Result<Vec<ScriptSlot>, RuntimeError> {
    let kind = |i: usize| role.template(role.trace[i].template).kind;
    let is_microbatch = |i: usize| role.trace[i].microbatch.is_some();
    let first = (0..role.trace.len())
        .find(|&i| is_microbatch(i))
        .unwrap_or(role.trace.len());
    let last = (0..role.trace.len())
        .rev()
        .find(|&i| is_microbatch(i))
        .map_or(first, |i| i + 1);
    let mut slots = Vec::new();
    for (i, s) in role.trace.iter().enumerate().take(last) {
        let template = role.template(s.template);
        let forward = || template.instructions.iter().all(|i| i.pass == Pass::F);
        let played = match kind(i) {
            TemplateKind::StepBegin | TemplateKind::Forward => true,
            TemplateKind::Exchange => i < first || forward(),
            _ => false,
        };
        if played {
            slots.push(ScriptSlot {
                template: s.template,
                microbatch: s.microbatch,
                instructions: (0..template.instructions.len()).collect(),
            });
        }
    }
    let mut tail = Vec::new();
    let mut needed: BTreeSet<BufferId> = role.loss.into_iter().collect();
    for s in role.trace[last..].iter().rev() {
        let template = role.template(s.template);
        let mut instructions = Vec::new();
        for (i, instruction) in template.instructions.iter().enumerate().rev() {
            if !instruction.writes().iter().any(|b| needed.contains(b)) {
                continue;
            }
            let foreign = matches!(
                instruction.kind,
                InstrKind::Exchange { .. } | InstrKind::WorldSum { .. }
            );
            let persistent = instruction
                .writes()
                .iter()
                .any(|&b| role.buffer(b).class == BufferClass::Persistent);
            if foreign || persistent {
                return Err(RuntimeError::Program(format!(
                    "the loss of {} depends on instruction {i} of template {}, which validation cannot play",
                    role.stage, s.template.0
                )));
            }
            needed.extend(instruction.reads());
            instructions.push(i);
        }
        instructions.reverse();
        if !instructions.is_empty() {
            tail.push(ScriptSlot {
                template: s.template,
                microbatch: s.microbatch,
                instructions,
            });
        }
    }
    slots.extend(tail.into_iter().rev());
    Ok(slots)
}

#[cfg(test)]
mod tests;
