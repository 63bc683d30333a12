//! Types in which operands of matmuls travel, where matmuls have several: what is gathered for a matmul
//! travels in the type of that matmul, by whatever steps it gets there.

use crate::Software;
use ir::collective::CollectiveKind;
use ir::op::OpKind;
use ir::program::{InstrKind, Instruction, RoleProgram};
use ir::{BufferId, DType};
use std::collections::HashMap;

/// The type by buffer, for those that matmuls in half precision read, and those that these are gathered
/// from; the widest where several matmuls read one. Empty where all matmuls have one type.
pub(super) fn types(software: &Software, role: &RoleProgram) -> HashMap<BufferId, DType> {
    let mut types = HashMap::new();
    if software.exceptions.is_empty() {
        return types;
    }
    let all = || role.templates.iter().flat_map(|t| &t.instructions);
    for instruction in all() {
        if let InstrKind::Compute {
            path,
            kind: OpKind::DotGeneral { .. },
            inputs,
            ..
        } = &instruction.kind
        {
            let narrow = software.narrow_of(path).filter(|n| n.is_gathered());
            let narrow = narrow.map(|n| n.dtype);
            for b in inputs {
                widen(&mut types, *b, narrow.unwrap_or(role.buffer(*b).dtype));
            }
        }
    }
    // A gather over two axes is two, the later of which is known first.
    let mut gathers: Vec<(BufferId, BufferId)> = all().flat_map(gathered).collect();
    gathers.reverse();
    for (input, output) in gathers {
        if let Some(dtype) = types.get(&output).copied() {
            widen(&mut types, input, dtype);
        }
    }
    types
}

fn widen(types: &mut HashMap<BufferId, DType>, buffer: BufferId, dtype: DType) {
    let known = types.entry(buffer).or_insert(dtype);
    if known.bits() < dtype.bits() {
        *known = dtype;
    }
}

/// Buffers that an instruction gathers, each with the one that it gathers into.
fn gathered(instruction: &Instruction) -> Vec<(BufferId, BufferId)> {
    match &instruction.kind {
        InstrKind::Collective {
            kind: CollectiveKind::AllGather,
            items,
            ..
        } => items.iter().map(|i| (i.input, i.output)).collect(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{COLLECTIVES, KERNELS, buffer, instr, role};
    use crate::{Exception, Narrow, Scaling};
    use ir::op::Einsum;
    use ir::program::{BufferClass, CollectiveItem, Template, TemplateKind};
    use ir::reshard::LayoutStep;

    /// A part is gathered twice; a narrow matmul reads the first result, a wide one the second.
    #[test]
    fn a_gather_is_as_wide_as_the_widest_matmul_behind_it() {
        let mut role = role(0, 0, 2);
        role.buffers = vec![buffer("x", BufferClass::Transient, &[4]); 5];
        role.buffers.iter_mut().for_each(|b| b.dtype = DType::Bf16);
        let gather = |input: u32, output: u32| {
            let kind = InstrKind::Collective {
                contract: ir::Contract::new(
                    CollectiveKind::AllGather,
                    ir::DType::F32,
                    ir::Order::Fixed,
                ),
                kind: CollectiveKind::AllGather,
                axes: vec![ir::AxisId(0)],
                items: vec![CollectiveItem {
                    step: LayoutStep::AllGather {
                        axis: ir::AxisId(0),
                        dim: 0,
                    },
                    input: BufferId(input),
                    output: BufferId(output),
                }],
            };
            instr(kind, COLLECTIVES, &[])
        };
        let dot = |path: &str, input: u32| {
            let kind = InstrKind::Compute {
                path: path.into(),
                kind: OpKind::DotGeneral {
                    einsum: Einsum::parse("mk,kn->mn").unwrap(),
                },
                inputs: vec![BufferId(input), BufferId(3)],
                outputs: vec![BufferId(4)],
            };
            instr(kind, KERNELS, &[])
        };
        role.templates = vec![Template {
            kind: TemplateKind::Forward,
            chunk: 0,
            instructions: vec![gather(0, 1), dot("h.0.a", 1), gather(1, 2), dot("h.0.b", 2)],
        }];
        let of = |scaling, wide: &str| {
            let software = Software {
                narrow: Some(Narrow {
                    dtype: DType::F8e4m3,
                    scaling,
                    share: 1.0,
                }),
                exceptions: vec![Exception {
                    ops: vec![wide.into()],
                    narrow: None,
                }],
                ..Software::plain("a framework")
            };
            let types = types(&software, &role);
            [0, 1, 2].map(|b| types[&BufferId(b)])
        };
        let (wide, narrow) = (DType::Bf16, DType::F8e4m3);
        assert_eq!(of(Scaling::Tensor, "h.*.b"), [wide, wide, wide]);
        assert_eq!(of(Scaling::Tensor, "h.*.c"), [narrow, narrow, narrow]);
        // A scale for each row does not survive a gather.
        assert_eq!(of(Scaling::Row, "h.*.c"), [wide, wide, wide]);
    }
}
