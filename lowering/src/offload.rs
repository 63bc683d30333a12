//! Tensors that rest in other memories than the device's, and the copies that bring them.
//!
//! A layer's strategy says in which memory each class of its tensors rests (`ir::offload`). Such
//! a tensor's buffer moves there, and in every template that uses it a *staged* copy in device
//! memory takes its place: copied in before the first use, copied out behind the last write.
//! Each direction between two memories is a stream of its own, so copies run beside kernels.
//!
//! ```text
//! copies in    m1 v1 │ m2 v2 │     m3 v3 │         two tensors staged at a time: m3 takes
//! kernels            │ update 1    │ update 2      the bytes of m1 when that is out
//! copies out                 │ m1 v1       │ m2 v2
//! ```
//!
//! A template is cut into *units*: layers in a microbatch, single instructions in a step phase. A
//! tensor is copied in one unit ahead of its use, so that at most the tensors of two units are
//! staged at once. Units are list order; waits follow from the buffers, as everywhere.
//!
//! The optimizer updates on the device: its states stream in and out. ZeRO-Offload (Ren et al.
//! 2021) sends gradients to the host and updates there, on the CPU, which moves fewer bytes and
//! needs a host that computes. Parameters are copied in for each use and never written back from
//! microbatches, as in ZeRO-Infinity (Rajbhandari et al. 2021).
//!
//! A buffer that an exchange sends or fills stays on the device, and so does what lives in one
//! template only.

use crate::draft::{DraftBuffer, Lifetime, RoleDraft, Serves, buffers_mut};
use crate::resolve::Resolved;
use ir::offload::TensorClass;
use ir::program::{InstrKind, Instruction, Space, TemplateKind};
use ir::training::StateRole;
use ir::{AxisId, BufferId, OpKind, ShardingSpec, TemplateId, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// Moves the buffers of a role to where its plan lets them rest, and stages them where they are
/// used. Changes nothing where everything rests on the device.
pub(crate) fn offload(r: &Resolved, role: &mut RoleDraft) {
    if r.plan.layer_strategies.iter().all(|s| s.spaces.is_empty()) {
        return;
    }
    let uses = uses(role);
    // What rests elsewhere, with the specs that it is made with.
    let mut moved = Moved::new();
    for (i, used) in uses.iter().enumerate() {
        if let Some(space) = resting_space(r, role, i, used) {
            let buffer = &mut role.buffers[i];
            moved.insert(BufferId::new(i), buffer.spec.clone());
            buffer.space = space;
            let partial = &mut buffer.spec.partial;
            partial.retain(|axis, _| !used.reduced.contains(axis));
        }
    }
    for t in 0..role.templates.len() {
        let instructions = std::mem::take(&mut role.templates[t].instructions);
        let kind = role.templates[t].kind;
        role.templates[t].instructions = staged(role, kind, instructions, &moved);
    }
}

/// By buffer that rests elsewhere, the spec that it is made with; where it is reduced in place, it
/// rests with less that is partial.
type Moved = BTreeMap<BufferId, ShardingSpec>;

/// How the templates of a role use a buffer.
#[derive(Clone, Default)]
struct Uses {
    by: BTreeSet<TemplateId>,
    written_in: BTreeSet<TemplateId>,
    is_exchanged: bool,
    /// Axes over which it is reduced in place.
    reduced: Vec<AxisId>,
}

fn uses(role: &RoleDraft) -> Vec<Uses> {
    let mut uses = vec![Uses::default(); role.buffers.len()];
    for (t, template) in role.templates.iter().enumerate() {
        let t = TemplateId::new(t);
        for instruction in &template.instructions {
            let is_exchange = matches!(instruction.kind, InstrKind::Exchange { .. });
            for b in instruction.reads() {
                uses[b.index()].by.insert(t);
                uses[b.index()].is_exchanged |= is_exchange;
            }
            for b in instruction.writes() {
                uses[b.index()].by.insert(t);
                uses[b.index()].written_in.insert(t);
                uses[b.index()].is_exchanged |= is_exchange;
            }
            if let InstrKind::Collective { axes, items, .. } = &instruction.kind {
                for item in items.iter().filter(|i| i.input == i.output) {
                    uses[item.input.index()].reduced.extend(axes);
                }
            }
        }
    }
    uses
}

/// The memory that a buffer rests in, where that is not the device's.
fn resting_space(r: &Resolved, role: &RoleDraft, i: usize, used: &Uses) -> Option<Space> {
    if used.is_exchanged || used.by.is_empty() {
        return None;
    }
    let buffer = &role.buffers[i];
    let value = buffer.value?;
    let class = match buffer.lifetime {
        Lifetime::Persistent => class_of_state(r, value)?,
        Lifetime::ByUse => class_by_use(role, used)?,
        Lifetime::Accumulator | Lifetime::Kept => return None,
    };
    // A parameter that no microbatch reads is a master copy.
    let is_read = used.by.iter().any(|t| is_pass(role, *t));
    let class = match class {
        TensorClass::Parameters if !is_read => TensorClass::Optimizer,
        other => other,
    };
    space_of(r, value, class).filter(|space| *space != Space::Device)
}

fn space_of(r: &Resolved, value: ValueId, class: TensorClass) -> Option<Space> {
    r.spaces(r.producer(value).layer?).get(&class).copied()
}

/// The class of a state. Sums of gradients stay on the device: the proof follows a sum in the one
/// buffer that it is added up in.
fn class_of_state(r: &Resolved, value: ValueId) -> Option<TensorClass> {
    match r.producer(value).kind {
        OpKind::State { .. } => {
            let state = r.training.states.iter().find(|s| s.read == value)?;
            match state.role {
                StateRole::Parameter => Some(TensorClass::Parameters),
                StateRole::Moment1 | StateRole::Moment2 => Some(TensorClass::Optimizer),
                StateRole::Scalar => None,
            }
        }
        _ => None,
    }
}

/// The class of what is made in a step: prepared parameters, and what the forward pass leaves for
/// the backward pass.
fn class_by_use(role: &RoleDraft, used: &Uses) -> Option<TensorClass> {
    let kind = |t: &TemplateId| role.templates[t.index()].kind;
    let made_in = |wanted| used.written_in.iter().all(|t| kind(t) == wanted);
    let passes = used.by.iter().filter(|t| is_pass(role, **t)).count();
    if made_in(TemplateKind::StepBegin) && passes > 0 {
        return Some(TensorClass::Parameters);
    }
    let is_saved = made_in(TemplateKind::Forward) && passes == used.by.len() && passes > 1;
    is_saved.then_some(TensorClass::Activations)
}

fn is_pass(role: &RoleDraft, t: TemplateId) -> bool {
    role.templates[t.index()].kind.pass().is_some()
}

/// Instructions of a template, close to each other, that a tensor is staged for.
struct Segment {
    buffer: BufferId,
    /// Positions of the first and the last of them.
    first: usize,
    last: usize,
    /// Whether the first needs what rests.
    comes_in: bool,
    /// Position of the last that writes.
    last_write: Option<usize>,
}

/// The instructions of a template with its tensors staged.
fn staged(
    role: &mut RoleDraft,
    kind: TemplateKind,
    mut instructions: Vec<Instruction>,
    moved: &Moved,
) -> Vec<Instruction> {
    let units = units(kind, &instructions);
    let segments = segments(&instructions, &units, moved);
    let ahead = ahead(kind, &units, &segments);
    // Copies by the position of the instruction that they stand before, or behind.
    let mut before: BTreeMap<usize, Vec<Instruction>> = BTreeMap::new();
    let mut behind: BTreeMap<usize, Vec<Instruction>> = BTreeMap::new();
    for (segment, at) in segments.iter().zip(ahead) {
        let mut staged = staged_buffer(&role.buffers[segment.buffer.index()]);
        if segment.last_write.is_some() {
            staged.spec.clone_from(&moved[&segment.buffer]);
        }
        let stage = role.add_buffer(staged);
        let serves = |i: usize| Serves {
            pass: instructions[i].pass,
            layer: instructions[i].layer,
        };
        if segment.comes_in {
            let (input, output) = (segment.buffer, stage);
            let copy = role.instruction(InstrKind::Copy { input, output }, serves(segment.first));
            before.entry(at).or_default().push(copy);
        }
        if let Some(last) = segment.last_write {
            let (input, output) = (stage, segment.buffer);
            let copy = role.instruction(InstrKind::Copy { input, output }, serves(last));
            behind.entry(last).or_default().push(copy);
        }
        for instruction in &mut instructions[segment.first..=segment.last] {
            buffers_mut(&mut instruction.kind, &mut |b| {
                if *b == segment.buffer {
                    *b = stage;
                }
            });
        }
    }
    let mut done = Vec::with_capacity(instructions.len() + 2 * segments.len());
    for (i, instruction) in instructions.into_iter().enumerate() {
        done.extend(before.remove(&i).into_iter().flatten());
        done.push(instruction);
        done.extend(behind.remove(&i).into_iter().flatten());
    }
    done
}

/// A buffer in device memory for a template's use of one that rests elsewhere.
fn staged_buffer(b: &DraftBuffer) -> DraftBuffer {
    DraftBuffer {
        name: format!("{}.staged", b.name),
        dtype: b.dtype,
        lens: b.lens.clone(),
        spec: b.spec.clone(),
        pieces: b.pieces,
        lifetime: Lifetime::ByUse,
        value: None,
        space: Space::Device,
    }
}

/// By instruction, the unit that it belongs to.
fn units(kind: TemplateKind, instructions: &[Instruction]) -> Vec<usize> {
    if kind.pass().is_none() {
        return (0..instructions.len()).collect();
    }
    // Buckets of gradients are reduced among the ops of later layers: a unit begins with the first
    // instruction of a layer, and other layers' stragglers belong to it.
    let mut seen = BTreeSet::new();
    let of = |i: &Instruction| {
        seen.extend(i.layer);
        seen.len().saturating_sub(1)
    };
    instructions.iter().map(of).collect()
}

/// The tensors that are staged in a template, in order of first uses.
fn segments(instructions: &[Instruction], units: &[usize], moved: &Moved) -> Vec<Segment> {
    let mut found: Vec<Segment> = Vec::new();
    let mut open: BTreeMap<BufferId, usize> = BTreeMap::new();
    for (i, instruction) in instructions.iter().enumerate() {
        let (reads, writes) = (instruction.reads(), instruction.writes());
        let touched: BTreeSet<BufferId> = reads.iter().chain(&writes).copied().collect();
        for b in touched.into_iter().filter(|b| moved.contains_key(b)) {
            let known = open.get(&b).copied();
            // A tensor stays staged from one unit to the next, and no longer.
            let near = known.filter(|&s| units[i] <= units[found[s].last] + 1);
            let s = near.unwrap_or_else(|| {
                found.push(Segment {
                    buffer: b,
                    first: i,
                    last: i,
                    comes_in: reads.contains(&b),
                    last_write: None,
                });
                open.insert(b, found.len() - 1);
                found.len() - 1
            });
            found[s].last = i;
            if writes.contains(&b) {
                found[s].last_write = Some(i);
            }
        }
    }
    found
}

/// By segment, the position before which it is copied in: where the unit before its own begins
/// that matters. In a step phase that is the last one for which something was copied in.
fn ahead(kind: TemplateKind, units: &[usize], segments: &[Segment]) -> Vec<usize> {
    let begins = |unit: usize| units.partition_point(|u| *u < unit);
    let mut positions = Vec::with_capacity(segments.len());
    // The unit of the latest copies in, and the one of those before.
    let (mut latest, mut earlier) = (None, None);
    // Not before it has been copied out.
    let mut free: BTreeMap<BufferId, usize> = BTreeMap::new();
    for segment in segments {
        let own = units[segment.first];
        if segment.comes_in && latest != Some(own) {
            (earlier, latest) = (latest, Some(own));
        }
        let unit = match kind.pass() {
            Some(_) => own.saturating_sub(1),
            None => earlier.unwrap_or(own),
        };
        let free = free.insert(segment.buffer, segment.last + 1).unwrap_or(0);
        positions.push(begins(unit).max(free));
    }
    positions
}
