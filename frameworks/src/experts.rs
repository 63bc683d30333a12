//! Experts, where software does more for them than kernel after kernel: tokens on their way
//! there and back travel beside computing, and what is between their matmuls is part of these.

use crate::fused::Fused;
use cost_model::compute::is_elementwise;
use cost_model::costs::{CostClass, InstrCost};
use ir::BufferId;
use ir::collective::CollectiveKind;
use ir::op::{Einsum, OpKind};
use ir::program::{InstrKind, Instruction, RoleProgram, Template};
use std::collections::{HashMap, HashSet};

/// Experts of a token in a role's layers; none where it has no routers.
pub(super) fn copies(role: &RoleProgram) -> Option<u64> {
    let instructions = role.templates.iter().flat_map(|t| &t.instructions);
    let of = |i: &Instruction| match &i.kind {
        InstrKind::Compute {
            kind: OpKind::Route { top_k, .. },
            ..
        } => Some(*top_k),
        _ => None,
    };
    instructions.filter_map(of).max()
}

/// Takes from the all-to-alls of one pass what hides behind the pass of another microbatch in
/// the other direction, which is as long as its own kernels at least. `plays` counts the passes
/// in a step: the first has nothing to hide behind.
pub(super) fn overlap(
    role: &RoleProgram,
    template: &Template,
    plays: usize,
    costs: &mut [InstrCost],
) {
    if template.kind.pass().is_none() || plays < 2 {
        return;
    }
    let is_dispatch = |i: &Instruction| match &i.kind {
        InstrKind::Collective {
            kind: CollectiveKind::AllToAll,
            axes,
            ..
        } => axes.iter().all(|a| role.mesh.name(*a) != "context"),
        _ => false,
    };
    let (mut moving, mut kernels) = (0.0, 0.0);
    for (instruction, cost) in template.instructions.iter().zip(costs.iter()) {
        if is_dispatch(instruction) {
            moving += cost.seconds;
        } else if cost.class == CostClass::Compute {
            kernels += cost.seconds;
        }
    }
    if moving <= 0.0 {
        return;
    }
    let hidden = (kernels / moving).min(1.0) * (1.0 - 1.0 / plays as f64);
    for (instruction, cost) in template.instructions.iter().zip(costs) {
        if is_dispatch(instruction) {
            cost.seconds *= 1.0 - hidden;
        }
    }
}

/// Marks, in `fused`, the elementwise operations between matmuls of experts as part of these:
/// those that read what such a matmul or another of them made, and those that only they read.
///
/// Transformer Engine's grouped MLP for MXFP8 (`ForwardGroupedMLP_CuTeGEMMSwiGLU_MXFP8` and its
/// backward counterpart) does activation, product and casts as it writes; gate and up are one
/// matmul there, so that the gradients of their operand are one too.
pub(super) fn fuse(template: &Template, fused: &mut [Fused]) {
    let mut readers: HashMap<BufferId, Vec<usize>> = HashMap::new();
    let mut inside: HashSet<usize> = HashSet::new();
    let mut made: HashSet<BufferId> = HashSet::new();
    for (i, instruction) in template.instructions.iter().enumerate() {
        for b in instruction.reads() {
            readers.entry(b).or_default().push(i);
        }
        if is_of_experts(instruction) {
            inside.insert(i);
            made.extend(instruction.writes());
        }
    }
    // An operation may join because of one that comes later, so until none does.
    loop {
        let joins = |i: &usize| {
            let instruction = &template.instructions[*i];
            let all_inside = |b: &BufferId| {
                let readers = readers.get(b);
                readers.is_some_and(|all| all.iter().all(|r| inside.contains(r)))
            };
            !inside.contains(i)
                && matches!(&instruction.kind, InstrKind::Compute { kind, .. } if is_elementwise(kind))
                && (instruction.reads().iter().any(|b| made.contains(b))
                    || instruction.writes().iter().all(all_inside))
        };
        let joined: Vec<usize> = (0..template.instructions.len()).filter(joins).collect();
        if joined.is_empty() {
            return;
        }
        for i in joined {
            inside.insert(i);
            made.extend(template.instructions[i].writes());
            fused[i].into_previous = true;
        }
    }
}

/// Whether an instruction is a matmul of several experts: a label is in all three of its tensors.
fn is_of_experts(instruction: &Instruction) -> bool {
    let batched = |e: &Einsum| {
        let shared = |l: &&u8| e.rhs.contains(*l) && e.out.contains(*l);
        e.lhs.iter().any(|l| shared(&l))
    };
    matches!(
        &instruction.kind,
        InstrKind::Compute { kind: OpKind::DotGeneral { einsum }, .. } if batched(einsum)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{instr, relu, role};
    use ir::AxisId;
    use ir::program::TemplateKind;

    #[test]
    fn what_is_between_matmuls_of_experts_is_part_of_them() {
        let dot = |einsum: &str, reads: [u32; 2], output: u32| {
            let kind = InstrKind::Compute {
                path: "dot".into(),
                kind: OpKind::DotGeneral {
                    einsum: Einsum::parse(einsum).unwrap(),
                },
                inputs: reads.map(BufferId).to_vec(),
                outputs: vec![BufferId(output)],
            };
            instr(kind, crate::testing::KERNELS, &[])
        };
        let (experts, dense) = ("ech,ehf->ecf", "sh,hf->sf");
        let relu = |x, y| instr(relu("op", x, y), crate::testing::KERNELS, &[]);
        let template = Template {
            kind: TemplateKind::Forward,
            chunk: 0,
            instructions: vec![
                relu(9, 0),               // read by others too: a kernel
                relu(10, 11),             // read by the matmul alone
                dot(experts, [11, 1], 2), // up
                relu(2, 3),               // reads what it made
                relu(3, 4),               // and what that made
                dot(experts, [4, 5], 6),  // down
                dot(dense, [0, 7], 8),
                relu(8, 12), // between dense matmuls: a kernel
                dot(dense, [12, 7], 13),
            ],
        };
        let mut fused = vec![Fused::default(); template.instructions.len()];
        fuse(&template, &mut fused);
        let parts: Vec<usize> = (0..fused.len())
            .filter(|&i| fused[i].into_previous)
            .collect();
        assert_eq!(parts, [1, 3, 4]);
        // Their result is written in the type of the matmul that reads it.
        let made = crate::fused::made(&template, &fused);
        assert_eq!(made, [11, 3, 4].map(BufferId).into());
    }

    #[test]
    fn what_moves_hides_behind_as_much_that_computes() {
        let role = role(0, 0, 2);
        let all_to_all = InstrKind::Collective {
            contract: ir::Contract::new(CollectiveKind::AllToAll, ir::DType::F32, ir::Order::Fixed),
            kind: CollectiveKind::AllToAll,
            axes: vec![AxisId(0)],
            items: Vec::new(),
        };
        let template = Template {
            kind: TemplateKind::Forward,
            chunk: 0,
            instructions: vec![
                instr(all_to_all, crate::testing::COLLECTIVES, &[]),
                instr(relu("relu", 0, 0), crate::testing::KERNELS, &[]),
            ],
        };
        let left = |moving: f64, kernels: f64, plays: usize| {
            let cost = |seconds, class| InstrCost { seconds, class };
            let mut costs = [
                cost(moving, CostClass::Collective),
                cost(kernels, CostClass::Compute),
            ];
            overlap(&role, &template, plays, &mut costs);
            assert_eq!(costs[1].seconds, kernels);
            costs[0].seconds
        };
        // Four passes: the first is alone.
        assert_eq!(left(2.0, 5.0, 4), 0.5);
        // Half of it has something to hide behind.
        assert_eq!(left(2.0, 1.0, 4), 2.0 - 2.0 * 0.5 * 0.75);
        assert_eq!(left(2.0, 5.0, 1), 2.0);
        assert_eq!(copies(&role), None);
    }
}
