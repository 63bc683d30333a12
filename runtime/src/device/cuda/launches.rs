//! How much a GPU is given to do by an instruction: counted from the very calls that compute it,
//! without a GPU.

use super::args::{Span, Step};
use super::ops::{self, Op, Part};
use crate::execute::{Context, Local};
use ir::BufferId;
use ir::program::{InstrKind, RoleProgram};

/// Bytes between the addresses that operands would have; they are aligned as those of an arena.
const APART: u64 = 1 << 44;

/// Kernels, products by the library and copies that one execution of an instruction of a role puts
/// on its stream, on the first rank of the role; what ranks send each other is not counted. None
/// where there is no kernel for an op.
pub fn launches(role: &RoleProgram, kind: &InstrKind) -> Option<u64> {
    let rank = role.mesh.devices.first_rank;
    let local = |id: &BufferId| {
        let b = role.buffers.get(id.index())?;
        Local::of_rank(b.dtype, &b.lens, &b.spec, &role.mesh, rank)
    };
    let locals = |ids: &[BufferId]| ids.iter().map(local).collect::<Option<Vec<Local>>>();
    match kind {
        InstrKind::Compute {
            path,
            kind,
            inputs,
            outputs,
        } => {
            if !ops::has_kernel(kind) {
                return None;
            }
            if kind.is_source() {
                return Some(0);
            }
            let (x, y) = (locals(inputs)?, locals(outputs)?);
            let part = |(i, local): (usize, &'_ Local)| Span {
                at: (i as u64 + 1) * APART,
                bytes: local.bytes() as u64,
            };
            let spans: Vec<Span> = x.iter().chain(&y).enumerate().map(part).collect();
            let parts = x.iter().chain(&y).zip(&spans);
            let mut parts: Vec<Part<'_>> =
                parts.map(|(local, &span)| Part { local, span }).collect();
            let mut y = parts.split_off(x.len());
            // Updates write where they read, and so does what is a view.
            for &(i, o) in kind.in_place() {
                y.get_mut(o)?.span = parts.get(i)?.span;
            }
            if kind.is_view() {
                for y in &mut y {
                    y.span.at = parts.first()?.span.at;
                }
            }
            let op = Op {
                kind,
                path,
                x: &parts,
                y: &y,
                context: &Context {
                    seed: 0,
                    step: 0,
                    updates: 0,
                    lr: 0.0,
                    first_sample: 0,
                    training: true,
                    threads: 1,
                },
                scratch: APART / 2,
                has_library: true,
            };
            op.check().ok()?;
            let steps = op.steps().ok()?;
            let pads = y.iter().filter_map(|y| ops::pad(*y)).count();
            Some((steps.iter().filter(|s| !is_nothing(s)).count() + pads) as u64)
        }
        InstrKind::Copy { input, output } => {
            let (from, to) = (
                role.buffers.get(input.index())?,
                role.buffers.get(output.index())?,
            );
            let (x, y) = (local(input)?, local(output)?);
            let span = |at: u64, bytes: u64| Span { at, bytes };
            let (read, written) = (span(APART, from.bytes), span(2 * APART, to.bytes));
            let part = |local, span| Part { local, span };
            let steps = match (from.pieces, to.pieces) {
                (None, Some(pieces)) => ops::pack(pieces, part(&x, read), written),
                (Some(pieces), None) => {
                    let output = part(&y, written);
                    let mut steps = ops::unpack(pieces, read, output);
                    steps.extend(ops::pad(output));
                    steps
                }
                _ => return Some(1),
            };
            Some(steps.iter().filter(|s| !is_nothing(s)).count() as u64)
        }
        InstrKind::Slice { output, .. } | InstrKind::Fill { output, .. } => {
            let y = local(output)?;
            let bytes = role.buffers.get(output.index())?.bytes;
            let span = Span { at: APART, bytes };
            let pads = ops::pad(Part { local: &y, span });
            Some(1 + pads.iter().filter(|s| !is_nothing(s)).count() as u64)
        }
        InstrKind::Load { .. } => Some(1),
        InstrKind::Collective { .. } | InstrKind::WorldSum { .. } | InstrKind::Exchange { .. } => {
            Some(0)
        }
    }
}

fn is_nothing(step: &Step) -> bool {
    match step {
        Step::Call(call) => call.is_empty(),
        Step::Product(_) => false,
        Step::Copy { bytes, .. } => *bytes == 0,
    }
}
