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
    let mut widen = |buffer: BufferId, dtype: DType| {
        let known = types.entry(buffer).or_insert(dtype);
        if known.bits() < dtype.bits() {
            *known = dtype;
        }
    };
    for instruction in all() {
        if let InstrKind::Compute {
            path,
            kind: OpKind::DotGeneral { .. },
            inputs,
            ..
        } = &instruction.kind
        {
            let narrow = software.narrow_of(path).map(|n| n.dtype);
            for b in inputs {
                widen(*b, narrow.unwrap_or(role.buffer(*b).dtype));
            }
        }
    }
    // A gather over two axes is two, the later of which is known first.
    let mut gathers: Vec<(BufferId, BufferId)> = all().flat_map(gathered).collect();
    gathers.reverse();
    for (input, output) in gathers {
        if let Some(dtype) = types.get(&output).copied() {
            types.entry(input).or_insert(dtype);
        }
    }
    types
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
