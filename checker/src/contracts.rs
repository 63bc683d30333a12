//! Collectives state what they do: the type of their buffers, and how what executes them adds up.
//!
//! That is restated here apart from `ir::collective`. Ranks of a machine's processors, which share
//! its memory, add in f32 in the order of the group; others add by a library, in the operands' type
//! and in an order of its own. Maxima, minima and moves add nothing. All members of a group play
//! one list, so they state the same.

use crate::report::{Report, instr_place};
use ir::collective::{CollectiveKind, Contract, Order, Reduction, Sum};
use ir::plan::Plan;
use ir::program::{InstrKind, Program};
use ir::{DType, InstrId, TemplateId};

pub(crate) fn check(plan: &Plan, program: &Program, report: &mut Report) {
    let by_library = plan.cluster.pool.is_none();
    for (i, role) in program.roles.iter().enumerate() {
        for (t, template) in role.templates.iter().enumerate() {
            for (j, instr) in template.instructions.iter().enumerate() {
                let InstrKind::Collective {
                    kind,
                    contract,
                    items,
                    ..
                } = &instr.kind
                else {
                    continue;
                };
                let mut buffers = items.iter().flat_map(|item| [item.input, item.output]);
                let due = |b| due(*kind, role.buffer(b).dtype, by_library);
                if let Some(b) = buffers.find(|b| *contract != due(*b)) {
                    let place = instr_place(program, i, TemplateId::new(t), InstrId::new(j));
                    let (due, name) = (due(b).describe(), &role.buffer(b).name);
                    let expected = format!("{due} for buffer {} ({name})", b.0);
                    report.add(place, "contract", expected, contract.describe());
                }
            }
        }
    }
}

fn due(kind: CollectiveKind, operand: DType, by_library: bool) -> Contract {
    use CollectiveKind::{AllReduce, ReduceScatter};
    let (dtype, order) = match by_library {
        true => (operand, Order::Library),
        false => (DType::F32, Order::Fixed),
    };
    let adds = matches!(
        kind,
        AllReduce(Reduction::Sum) | ReduceScatter(Reduction::Sum)
    );
    let sum = adds.then_some(Sum { dtype, order });
    Contract { operand, sum }
}
