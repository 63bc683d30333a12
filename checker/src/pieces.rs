//! Collectives move contiguous bytes: where a tensor is cut or put together otherwise, its buffer
//! is in pieces, and nothing but a copy puts it there or takes it from there.
//!
//! When pieces may stay where they are is stated here apart from `ir::reshard`, so that an error
//! there does not prove itself: the dims outside have few elements together, each a row of
//! contiguous pieces, and the pieces fill the dim.

use crate::ranges::padded;
use crate::report::{Report, instr_place};
use ir::program::{InstrKind, Program, RoleProgram};
use ir::reshard::{LayoutStep, MOST_ROWS, Pieces};
use ir::{BufferId, InstrId, TemplateId};

pub(crate) fn check(program: &Program, report: &mut Report) {
    for (i, role) in program.roles.iter().enumerate() {
        for (t, template) in role.templates.iter().enumerate() {
            for (j, instr) in template.instructions.iter().enumerate() {
                for (b, expected) in expected(role, &instr.kind) {
                    let actual = role.buffer(b).pieces;
                    if actual != expected {
                        let place = instr_place(program, i, TemplateId::new(t), InstrId::new(j));
                        let name = &role.buffer(b).name;
                        let expected = format!("buffer {} ({name}) {}", b.0, shown(expected));
                        report.add(place, "pieces", expected, shown(actual));
                    }
                }
            }
        }
    }
}

fn shown(pieces: Option<Pieces>) -> String {
    pieces.map_or("as it stands".into(), |p| {
        format!("in {} pieces of {} along dim {}", p.n, p.len, p.dim)
    })
}

/// The buffers of an instruction with the form that it wants of them.
fn expected(role: &RoleProgram, kind: &InstrKind) -> Vec<(BufferId, Option<Pieces>)> {
    let whole = |buffers: &[BufferId]| -> Vec<(BufferId, Option<Pieces>)> {
        buffers.iter().map(|&b| (b, None)).collect()
    };
    match kind {
        InstrKind::Collective { items, .. } => {
            let wanted = items.iter().flat_map(|item| {
                let [operand, result] = of_step(role, &item.step, item.input, item.output);
                [(item.input, operand), (item.output, result)]
            });
            wanted.collect()
        }
        // One of the two may be in pieces: it wants nothing of that one.
        InstrKind::Copy { input, output } => match role.buffer(*input).pieces {
            Some(_) => vec![(*output, None)],
            None => vec![],
        },
        InstrKind::Compute {
            inputs, outputs, ..
        } => [whole(inputs), whole(outputs)].concat(),
        InstrKind::Slice { input, output, .. } => whole(&[*input, *output]),
        InstrKind::Exchange { sends, recvs } => {
            sends.iter().chain(recvs).map(|x| (x.1, None)).collect()
        }
        InstrKind::WorldSum { inputs, output } => {
            let inputs = inputs.iter().map(|x| (x.1, None));
            inputs.chain([(*output, None)]).collect()
        }
        InstrKind::Load { output, .. } | InstrKind::Fill { output, .. } => whole(&[*output]),
    }
}

fn of_step(
    role: &RoleProgram,
    step: &LayoutStep,
    input: BufferId,
    output: BufferId,
) -> [Option<Pieces>; 2] {
    let part = |b: BufferId| -> Vec<u64> {
        let b = role.buffer(b);
        let dims = b.lens.iter().zip(&b.spec.dims);
        dims.map(|(&len, d)| padded(len, d, &role.mesh)).collect()
    };
    let n = |axis: ir::AxisId| role.mesh.axes.get(axis.index()).map_or(1, |a| a.size);
    let (before, after) = (part(input), part(output));
    let pieces = |part: &[u64], other: &[u64], dim: usize, n: u32| {
        let (&own, &len) = part.get(dim).zip(other.get(dim))?;
        let outside: u64 = part[..dim].iter().fold(1, |p, &l| p.saturating_mul(l));
        let filled = len.saturating_mul(u64::from(n)) == own;
        (outside > MOST_ROWS || !filled).then_some(Pieces { dim, n, len })
    };
    match *step {
        LayoutStep::AllReduce { .. } | LayoutStep::Slice { .. } | LayoutStep::Shift { .. } => {
            [None, None]
        }
        LayoutStep::ReduceScatter { axis, dim, .. } => {
            [pieces(&before, &after, dim, n(axis)), None]
        }
        LayoutStep::AllGather { axis, dim } => [None, pieces(&after, &before, dim, n(axis))],
        LayoutStep::AllToAll { axis, from, to, .. } => [
            pieces(&before, &after, to, n(axis)),
            pieces(&after, &before, from, n(axis)),
        ],
    }
}
