//! Pieces around collectives.
//!
//! A collective library moves contiguous bytes, member after member. A tensor that is cut or
//! put together along an inner dim, with many rows outside, is not laid out so: a kernel copies
//! its pieces to a buffer of their own before the collective, or to their places behind it.
//!
//! ```text
//! kernels      pack x ┐                      ... ┌ unpack y   y's first use
//! collectives         └ all_to_all x' -> y' ─────┘
//! ```
//! Operands are packed right before the collective. In microbatches results are unpacked where they
//! are used first, so that kernels in between do not wait for the collective; or at the template's
//! end. In the step phases, where hardly a kernel would wait, they are unpacked behind the next
//! collective with such results: copies run beside it, and never more than two collectives have
//! results in pieces, whatever a stage's parameters take together.

use crate::calls;
use crate::draft::{DraftBuffer, Lifetime, RoleDraft, Serves, buffers_mut};
use crate::error::LowerError;
use crate::overwrite::write_apart;
use crate::place::{Room, place_again};
use crate::turns::separate_copies;
use ir::program::{InstrKind, Instruction, Program, RoleProgram, Space, TemplateKind};
use ir::reshard::Pieces;
use ir::{AxisId, BufferId};
use std::collections::BTreeMap;

/// Collectives of a step phase that have results in pieces at once.
const IN_PIECES: usize = 2;

/// Gives the collectives of a role buffers in pieces wherever they need them.
pub(crate) fn pack(role: &mut RoleDraft) {
    let mut reduced = Reduced::new();
    for t in 0..role.templates.len() {
        let instructions = std::mem::take(&mut role.templates[t].instructions);
        let kind = role.templates[t].kind;
        let at_once = match kind {
            TemplateKind::StepBegin | TemplateKind::StepEnd => IN_PIECES,
            _ => usize::MAX,
        };
        role.templates[t].instructions = packed(role, instructions, &mut reduced, at_once);
    }
}

/// Axes over which a buffer has been reduced in place, here or in an earlier template: its value
/// is no longer partial there.
type Reduced = BTreeMap<BufferId, Vec<AxisId>>;

/// The instructions of a template with the copies around its collectives, of which `at_once` may have
/// results in pieces.
fn packed(
    role: &mut RoleDraft,
    instructions: Vec<Instruction>,
    reduced: &mut Reduced,
    at_once: usize,
) -> Vec<Instruction> {
    let mut done: Vec<Instruction> = Vec::with_capacity(instructions.len());
    // Results that are still in pieces: of which collective with such results, and the copies that
    // put them together.
    let mut waiting: Vec<(BufferId, usize, Instruction)> = Vec::new();
    let mut n_collectives = 0;
    for mut instruction in instructions {
        if !waiting.is_empty() {
            let touched = [instruction.reads(), instruction.writes()].concat();
            let used = waiting.extract_if(.., |(b, ..)| touched.contains(b));
            done.extend(used.map(|w| w.2));
        }
        let n_before = waiting.len();
        let serves = Serves {
            pass: instruction.pass,
            layer: instruction.layer,
        };
        if let InstrKind::Collective { items, .. } = &mut instruction.kind {
            for item in items {
                let Some(&axis) = item.step.axes().first() else {
                    continue;
                };
                let part = |b: BufferId| {
                    let b = &role.buffers[b.index()];
                    b.spec.local_shape(&b.lens, &role.mesh)
                };
                let (before, after) = (part(item.input), part(item.output));
                let n = role.mesh.size(axis) as u32;
                let [operand, result] = item.step.pieces(n, &before, &after);
                if let Some(pieces) = operand {
                    let over = reduced.get(&item.input).map_or(&[][..], Vec::as_slice);
                    let (input, output) = (item.input, in_pieces(role, item.input, pieces, over));
                    done.push(role.instruction(InstrKind::Copy { input, output }, serves));
                    item.input = output;
                }
                if let Some(pieces) = result {
                    let (input, output) = (in_pieces(role, item.output, pieces, &[]), item.output);
                    let copy = role.instruction(InstrKind::Copy { input, output }, serves);
                    waiting.push((output, n_collectives, copy));
                    item.output = input;
                }
            }
        }
        if waiting.len() > n_before {
            n_collectives += 1;
            let old = waiting.extract_if(.., |(_, of, _)| n_collectives - *of > at_once);
            done.extend(old.map(|w| w.2));
        }
        match &instruction.kind {
            InstrKind::Collective { axes, items, .. } => {
                for item in items.iter().filter(|i| i.input == i.output) {
                    reduced.entry(item.input).or_default().extend(axes);
                }
            }
            _ => instruction.writes().iter().for_each(|b| {
                reduced.remove(b);
            }),
        }
        done.push(instruction);
    }
    done.extend(waiting.into_iter().map(|w| w.2));
    done
}

/// A buffer for a tensor in pieces, which has been reduced over some axes.
fn in_pieces(
    role: &mut RoleDraft,
    whole: BufferId,
    pieces: Pieces,
    reduced: &[AxisId],
) -> BufferId {
    let b = &role.buffers[whole.index()];
    let mut spec = b.spec.clone();
    spec.partial.retain(|axis, _| !reduced.contains(axis));
    role.add_buffer(DraftBuffer {
        name: format!("{}.pieces", b.name),
        dtype: b.dtype,
        lens: b.lens.clone(),
        spec,
        pieces: Some(pieces),
        lifetime: Lifetime::ByUse,
        value: None,
        space: Space::Device,
    })
}

/// A program whose collectives move all tensors as they stand, without copies around them, and
/// whose buffers all have copies of their own and are written by one op, each in a call of its own: that
/// of software which lays its tensors out so, and whose memory is counted stage by stage.
///
/// Fails where the program's arena is larger than any memory.
pub fn without_pieces(program: &Program) -> Result<Program, LowerError> {
    let mut program = program.clone();
    for role in &mut program.roles {
        calls::forget(role);
        separate_copies(role);
        write_apart(role);
        put_together(role)?;
    }
    Ok(program)
}

fn put_together(role: &mut RoleProgram) -> Result<(), LowerError> {
    let in_pieces = |b: BufferId| role.buffer(b).pieces.is_some();
    // By buffer in pieces, the tensor's own.
    let mut wholes: BTreeMap<BufferId, BufferId> = BTreeMap::new();
    for instruction in role.templates.iter().flat_map(|t| &t.instructions) {
        if let InstrKind::Copy { input, output } = instruction.kind {
            match (in_pieces(input), in_pieces(output)) {
                (true, false) => wholes.insert(input, output),
                (false, true) => wholes.insert(output, input),
                _ => None,
            };
        }
    }
    if wholes.is_empty() {
        return place_again(role, Room::NONE);
    }
    let n_buffers = role.buffers.len();
    let kept = (0..n_buffers)
        .map(BufferId::new)
        .filter(|b| !wholes.contains_key(b));
    let mut new = vec![BufferId(0); n_buffers];
    kept.enumerate()
        .for_each(|(i, b)| new[b.index()] = BufferId::new(i));
    let renumbered = |b: BufferId| new[wholes.get(&b).copied().unwrap_or(b).index()];
    for template in &mut role.templates {
        for instruction in &mut template.instructions {
            buffers_mut(&mut instruction.kind, &mut |b| *b = renumbered(*b));
        }
        let stays = |i: &Instruction| match i.kind {
            InstrKind::Copy { input, output } => input != output,
            _ => true,
        };
        template.instructions.retain(stays);
    }
    role.states
        .iter_mut()
        .for_each(|s| s.buffer = renumbered(s.buffer));
    (role.loss, role.grad_norm) = (role.loss.map(renumbered), role.grad_norm.map(renumbered));
    role.buffers.retain(|b| b.pieces.is_none());
    place_again(role, Room::NONE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::collective::CollectiveKind;
    use ir::program::{CollectiveItem, Template};
    use ir::reshard::LayoutStep;
    use ir::{Axis, DType, DeviceMesh, LogicalMesh, Rank, ShardingSpec, StageId};

    /// The most collectives that have results in pieces at once in a template that gathers five
    /// parameters along their inner dim.
    fn most_in_pieces(kind: TemplateKind) -> usize {
        let devices = DeviceMesh {
            first_rank: Rank(0),
            n_devices: 2,
        };
        let axis = Axis {
            name: "x".into(),
            size: 2,
        };
        let mesh = LogicalMesh::new(devices, vec![axis]).expect("2 = 2");
        let mut role = RoleDraft::new(StageId::new(0), mesh);
        let x = AxisId::new(0);
        let whole = ShardingSpec::replicated(2);
        let mut shard = whole.clone();
        shard.dims[1].axes.push(x);
        let mut buffer = |spec: &ShardingSpec, lifetime| {
            role.add_buffer(DraftBuffer {
                name: "w".into(),
                dtype: DType::F32,
                lens: vec![64, 8],
                spec: spec.clone(),
                pieces: None,
                lifetime,
                value: None,
                space: Space::Device,
            })
        };
        let gathers: Vec<InstrKind> = (0..5)
            .map(|_| InstrKind::Collective {
                contract: ir::Contract::new(
                    CollectiveKind::AllGather,
                    ir::DType::F32,
                    ir::Order::Fixed,
                ),
                kind: CollectiveKind::AllGather,
                axes: vec![x],
                items: vec![CollectiveItem {
                    step: LayoutStep::AllGather { axis: x, dim: 1 },
                    input: buffer(&shard, Lifetime::Persistent),
                    output: buffer(&whole, Lifetime::Kept),
                }],
            })
            .collect();
        let serves = Serves {
            pass: ir::Pass::F,
            layer: None,
        };
        let instructions = gathers
            .into_iter()
            .map(|kind| role.instruction(kind, serves));
        let instructions = instructions.collect();
        role.templates.push(Template {
            kind,
            chunk: 0,
            instructions,
        });
        pack(&mut role);
        let (mut now, mut most, mut copies) = (0, 0, 0);
        for instruction in &role.templates[0].instructions {
            match instruction.kind {
                InstrKind::Collective { .. } => now += 1,
                InstrKind::Copy { .. } => (now, copies) = (now - 1, copies + 1),
                ref other => panic!("{other:?} is not made here"),
            }
            most = most.max(now);
        }
        assert_eq!((now, copies), (0, 5), "every result is put together once");
        most
    }

    #[test]
    fn few_collectives_of_a_step_phase_have_results_in_pieces() {
        assert_eq!(most_in_pieces(TemplateKind::StepBegin), IN_PIECES);
        assert_eq!(most_in_pieces(TemplateKind::StepEnd), IN_PIECES);
        // In microbatches they wait for their first use, or the end.
        assert_eq!(most_in_pieces(TemplateKind::Forward), 5);
    }
}
