//! How much a GPU is given to do by an instruction: counted from the very calls that compute it,
//! without a GPU.

use super::args::{Source, Span, Step, Types};
use super::chained::{has_product, ways, with_pads};
use super::joined::{Part as Joint, parts};
use super::ops::{self, Op, Part};
use crate::RuntimeError;
use crate::execute::calls::Calls;
use crate::execute::{Context, Local};
use ir::program::{FEWEST_JOINED, InstrKind, Instruction, RoleProgram};
use ir::{BufferId, OpKind};
use std::collections::BTreeSet;

/// Bytes between the addresses that operands would have; they are aligned as those of an arena.
const APART: u64 = 1 << 44;

/// By template and instruction of a role, the kernels, products by the library and copies that one
/// execution of it puts on its stream, on the first rank of the role, where cuBLASLt is there. Of
/// instructions that are joined, or a chain that is one call, the first has the launches of all. What
/// ranks send each other is not counted. Accumulators count as cleared, though a chain may spare
/// that. None where there is no kernel for an op.
pub fn launches(role: &RoleProgram) -> Vec<Vec<Option<u64>>> {
    let templates = role.templates.iter();
    templates
        .map(|template| {
            let all = &template.instructions;
            let calls = Calls::of_all(all);
            let count = |(i, n): (usize, &usize)| match n {
                0 => Some(0),
                1 => count_of(role, &all[i].kind),
                n => {
                    let works = all[i..i + n].iter().map(|i| steps_of(role, &i.kind));
                    let works = works.collect::<Option<Vec<Vec<Step>>>>()?;
                    let is_one = |part: &Joint| match part {
                        Joint::All(..) => true,
                        Joint::One(step) => !is_nothing(step),
                    };
                    Some(parts(works).iter().filter(|p| is_one(p)).count() as u64)
                }
            };
            let mut counts: Vec<Option<u64>> =
                calls.n_joined.iter().enumerate().map(count).collect();
            let chains = calls.n_chained.iter().enumerate();
            for (i, &n) in chains.filter(|(_, n)| **n > 1) {
                let (of, kept) = (&all[i..i + n], &calls.is_kept[i..i + n]);
                if let Some((n, steps)) = fused(role, of, kept) {
                    counts[i] = Some(steps.len() as u64);
                    counts[i + 1..i + n].fill(Some(0));
                }
            }
            counts
        })
        .collect()
}

/// The files and types of the kernels that a role's program calls, each once.
pub(super) fn files(role: &RoleProgram) -> Vec<(Source, Types)> {
    let all = role.templates.iter().flat_map(|t| &t.instructions);
    let alone = all.filter_map(|i| steps_of(role, &i.kind)).flatten();
    let chains = role
        .templates
        .iter()
        .flat_map(|t| chains(role, &t.instructions));
    let steps = alone.chain(chains);
    let mut files = Vec::new();
    let mut seen = BTreeSet::new();
    for step in steps {
        if let Step::Call(call) = step
            && !call.is_empty()
            && seen.insert((call.source.name, call.types))
        {
            files.push((call.source, call.types));
        }
    }
    files
}

/// How many of a chain's instructions are one call, and what is launched for that; none where none are.
fn fused(role: &RoleProgram, of: &[Instruction], kept: &[bool]) -> Option<(usize, Vec<Step>)> {
    // Every buffer has an address of its own.
    let mut buffers: Vec<BufferId> = of
        .iter()
        .flat_map(|i| [i.reads(), i.writes()])
        .flatten()
        .collect();
    buffers.sort_unstable();
    buffers.dedup();
    let locals = buffers.iter().map(|id| local_of(role, id));
    let locals = locals.collect::<Option<Vec<Local>>>()?;
    let parts = |ids: &[BufferId]| {
        let part = |id: &BufferId| {
            let i = buffers.binary_search(id).ok()?;
            let local = locals.get(i)?;
            let (at, bytes) = ((i as u64 + 1) * APART, local.bytes() as u64);
            let span = Span { at, bytes };
            Some(Part { local, span })
        };
        ids.iter().map(part).collect::<Option<Vec<Part<'_>>>>()
    };
    let mut of_parts = Vec::with_capacity(of.len());
    for instruction in of {
        let InstrKind::Compute {
            path,
            kind,
            inputs,
            outputs,
        } = &instruction.kind
        else {
            return None;
        };
        of_parts.push((path, kind, parts(inputs)?, parts(outputs)?));
    }
    let ops: Vec<Op<'_>> = of_parts
        .iter()
        .map(|(path, kind, x, y)| op((path, kind), x, y))
        .collect();
    ops.iter().try_for_each(Op::check).ok()?;
    let (n, steps) = match has_product(&ops) {
        true => {
            let (n, products) = ways(&ops, kept).next()?;
            (n, products.into_iter().map(Step::Product).collect())
        }
        false => (ops.len(), vec![ops::one_kernel(&ops, kept)?]),
    };
    let steps = with_pads(steps, &ops[..n], kept).into_iter();
    Some((n, steps.filter(|s| !is_nothing(s)).collect()))
}

/// Lists what is launched for the chains of a template.
fn chains(role: &RoleProgram, all: &[Instruction]) -> Vec<Step> {
    let calls = Calls::of_all(all);
    let chains = calls.n_chained.iter().enumerate().filter(|(_, n)| **n > 1);
    let steps = chains.filter_map(|(i, &n)| {
        let steps = fused(role, &all[i..i + n], &calls.is_kept[i..i + n])?.1;
        Some(steps)
    });
    steps.flatten().collect()
}

fn local_of(role: &RoleProgram, id: &BufferId) -> Option<Local> {
    let (b, rank) = (role.buffers.get(id.index())?, role.mesh.devices.first_rank);
    Local::of_rank(b.dtype, &b.lens, &b.spec, &role.mesh, rank)
}

/// The steps of an instruction that computes or fills; none where there is no kernel for it.
fn steps_of(role: &RoleProgram, kind: &InstrKind) -> Option<Vec<Step>> {
    match kind {
        InstrKind::Compute {
            path,
            kind,
            inputs,
            outputs,
        } => computed(role, (path, kind), inputs, outputs)?.ok(),
        InstrKind::Fill { value, output } => {
            let y = local_of(role, output)?;
            let bytes = role.buffers.get(output.index())?.bytes;
            let span = Span { at: APART, bytes };
            let part = Part { local: &y, span };
            let mut steps = vec![ops::fill(*value as f32, part)];
            steps.extend(ops::pad(part));
            Some(steps)
        }
        _ => None,
    }
}

/// The steps of an op as a program has it; none where it has not the buffers, an error where there
/// are no kernels for it.
pub(super) fn computed(
    role: &RoleProgram,
    (path, kind): (&str, &OpKind),
    inputs: &[BufferId],
    outputs: &[BufferId],
) -> Option<Result<Vec<Step>, RuntimeError>> {
    if kind.is_source() {
        return Some(Ok(Vec::new()));
    }
    let locals = |ids: &[BufferId]| {
        let all = ids.iter().map(|id| local_of(role, id));
        all.collect::<Option<Vec<Local>>>()
    };
    let (x, y) = (locals(inputs)?, locals(outputs)?);
    let part = |(i, local): (usize, &'_ Local)| Span {
        at: (i as u64 + 1) * APART,
        bytes: local.bytes() as u64,
    };
    let spans: Vec<Span> = x.iter().chain(&y).enumerate().map(part).collect();
    let parts = x.iter().chain(&y).zip(&spans);
    let mut parts: Vec<Part<'_>> = parts.map(|(local, &span)| Part { local, span }).collect();
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
    let op = op((path, kind), &parts, &y);
    let padded = |mut steps: Vec<Step>| {
        steps.extend(y.iter().filter_map(|y| ops::pad(*y)));
        steps
    };
    Some(op.check().and_then(|()| op.steps()).map(padded))
}

/// The facts of a run that hardly matter here.
const CONTEXT: Context = Context {
    seed: 0,
    step: 0,
    updates: 0,
    lr: 0.0,
    first_sample: 0,
    training: true,
    threads: 1,
};

/// An op that is only looked at.
pub(super) fn op<'a>(
    (path, kind): (&'a str, &'a OpKind),
    x: &'a [Part<'a>],
    y: &'a [Part<'a>],
) -> Op<'a> {
    Op {
        kind,
        path,
        x,
        y,
        context: &CONTEXT,
        scratch: APART / 2,
        has_library: true,
        shared: ops::MUCH_SHARED,
    }
}

/// Launches of an instruction that is alone.
fn count_of(role: &RoleProgram, kind: &InstrKind) -> Option<u64> {
    let local = |id: &BufferId| local_of(role, id);
    match kind {
        InstrKind::Compute { .. } | InstrKind::Fill { .. } => {
            let steps = steps_of(role, kind)?;
            Some(steps.iter().filter(|s| !is_nothing(s)).count() as u64)
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
        InstrKind::Slice { output, .. } => {
            let y = local(output)?;
            let bytes = role.buffers.get(output.index())?.bytes;
            let span = Span { at: APART, bytes };
            let pads = ops::pad(Part { local: &y, span });
            Some(1 + pads.iter().filter(|s| !is_nothing(s)).count() as u64)
        }
        InstrKind::Load { .. } => Some(1),
        // Zeros, and a copy of each entry.
        InstrKind::WorldSum { inputs, .. } => Some(match inputs.len() {
            n if n < FEWEST_JOINED => 1 + n as u64,
            _ => 2,
        }),
        InstrKind::Collective { .. } | InstrKind::Exchange { .. } => Some(0),
    }
}

fn is_nothing(step: &Step) -> bool {
    match step {
        Step::Call(call) => call.is_empty(),
        Step::Product(_) => false,
        Step::Copy { bytes, .. } => *bytes == 0,
    }
}
