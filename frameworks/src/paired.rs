//! Collectives of the backward pass that run beside a matmul of their own op.
//!
//! The gradient of a matmul `y = x w` is two matmuls: of the operand, `dx = dy w`, and of the
//! weight, `dw = x dy`. Where `w` is split by columns, `dx` has to be summed over the ranks, and
//! nothing needs the sum before `dw` is made: a framework that starts the sum first and then
//! `dw` hides one behind the other. Where `x` was kept split along the sequence, it is gathered
//! again for `dw` while `dx` is made. (Megatron-LM since September 2021,
//! `LinearWithGradAccumulationAndAsyncCommunication`; Korthikanti et al. 2022, section 6.)
//!
//! Hidden is the shorter of both, but for the share of the multiprocessors that the
//! collective takes from the matmul; that it takes memory bandwidth too is not counted.

use crate::Software;
use cost_model::costs::{CostClass, InstrCost};
use ir::op::OpKind;
use ir::program::{InstrKind, RoleProgram, Template};
use ir::{BufferId, collective::CollectiveKind};
use std::collections::HashMap;

/// Ends of the paths of both gradients.
const OPERAND: &str = ".lhs";
const WEIGHT: &str = ".rhs";

/// Takes from collectives over [`Software::paired_axes`] what the matmul beside them hides, of
/// which they take `share` from it.
/// `costs` is by template and instruction.
pub(super) fn hide(
    role: &RoleProgram,
    software: &Software,
    share: f64,
    costs: &mut [Vec<InstrCost>],
) {
    if software.paired_axes.is_empty() {
        return;
    }
    for (template, costs) in role.templates.iter().zip(costs) {
        if template.kind.is_backward() {
            hide_in(role, software, share, template, costs);
        }
    }
}

fn hide_in(
    role: &RoleProgram,
    software: &Software,
    share: f64,
    template: &Template,
    costs: &mut [InstrCost],
) {
    let mut seconds: HashMap<&str, f64> = HashMap::new();
    let mut made_by: HashMap<BufferId, &str> = HashMap::new();
    let mut read_by: HashMap<BufferId, Vec<&str>> = HashMap::new();
    for (instruction, cost) in template.instructions.iter().zip(costs.iter()) {
        if let InstrKind::Compute {
            kind: OpKind::DotGeneral { .. },
            path,
            ..
        } = &instruction.kind
        {
            *seconds.entry(path.as_str()).or_default() += cost.seconds;
            for b in instruction.writes() {
                made_by.insert(b, path.as_str());
            }
            for b in instruction.reads() {
                read_by.entry(b).or_default().push(path.as_str());
            }
        }
    }
    let other = |path: &str, own: &str, others: &str| -> f64 {
        let stem = path.strip_suffix(own);
        let pair = stem.and_then(|stem| seconds.get(format!("{stem}{others}").as_str()));
        pair.copied().unwrap_or(0.0)
    };
    for (instruction, cost) in template.instructions.iter().zip(costs.iter_mut()) {
        let InstrKind::Collective {
            kind, axes, items, ..
        } = &instruction.kind
        else {
            continue;
        };
        let is_paired = |axis: &ir::AxisId| {
            let name = role.mesh.name(*axis);
            software.paired_axes.iter().any(|a| a == name)
        };
        if cost.class != CostClass::Collective || !axes.iter().all(is_paired) {
            continue;
        }
        let beside: f64 = match kind {
            CollectiveKind::AllReduce(_) | CollectiveKind::ReduceScatter(_) => {
                let makers = items.iter().filter_map(|i| made_by.get(&i.input));
                makers.map(|path| other(path, OPERAND, WEIGHT)).sum()
            }
            CollectiveKind::AllGather => {
                let readers = items.iter().filter_map(|i| read_by.get(&i.output));
                let of = |paths: &Vec<&str>| match paths.as_slice() {
                    [path] => other(path, WEIGHT, OPERAND),
                    _ => 0.0,
                };
                readers.map(of).sum()
            }
            CollectiveKind::AllToAll | CollectiveKind::Shift => 0.0,
        };
        // A longer collective hides all of the matmul; a shorter one costs it a share.
        cost.seconds -= beside.min(cost.seconds * (1.0 - share));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use ir::Reduction;
    use ir::collective::CollectiveKind;
    use ir::program::TemplateKind;
    use ir::program::{CollectiveItem, Instruction};

    fn dot(path: &str, reads: u32, makes: u32) -> Instruction {
        let einsum = ir::op::Einsum::parse("mk,kn->mn").unwrap();
        let kind = InstrKind::Compute {
            path: path.into(),
            kind: OpKind::DotGeneral { einsum },
            inputs: vec![BufferId(reads)],
            outputs: vec![BufferId(makes)],
        };
        testing::instr(kind, crate::testing::KERNELS, &[])
    }

    fn collective(kind: CollectiveKind, input: u32, output: u32) -> Instruction {
        // Prices look at the instruction's kind alone.
        let item = CollectiveItem {
            step: ir::reshard::LayoutStep::AllReduce {
                axes: vec![ir::AxisId(0)],
            },
            input: BufferId(input),
            output: BufferId(output),
        };
        let kind = InstrKind::Collective {
            contract: ir::Contract::new(kind, ir::DType::F32, ir::Order::Fixed),
            kind,
            axes: vec![ir::AxisId(0)],
            items: vec![item],
        };
        testing::instr(kind, crate::testing::COLLECTIVES, &[])
    }

    #[test]
    fn sums_of_operands_gradients_run_beside_weights() {
        let sum = CollectiveKind::AllReduce(Reduction::Sum);
        let mut role = testing::role(0, 0, 2);
        role.templates = vec![Template {
            kind: TemplateKind::Backward,
            chunk: 0,
            instructions: vec![
                // 1 is gathered for the weight's gradient alone, 3 for both.
                collective(CollectiveKind::AllGather, 0, 1),
                collective(CollectiveKind::AllGather, 2, 3),
                dot("grad.up.lhs", 3, 4),
                collective(sum, 4, 5),
                dot("grad.up.rhs", 1, 6),
                dot("grad.down.rhs", 3, 7),
            ],
        }];
        let cost = |(seconds, class)| InstrCost { seconds, class };
        let (comm, comp) = (CostClass::Collective, CostClass::Compute);
        let before = [
            (4.0, comm),
            (4.0, comm),
            (3.0, comp),
            (9.0, comm),
            (5.0, comp),
            (5.0, comp),
        ];
        let mut costs = vec![before.map(cost).to_vec()];
        let mut taking = costs.clone();
        let mut software = crate::testing::software();
        hide(&role, &software, 0.0, &mut costs);
        assert_eq!(costs[0][0].seconds, 4.0);
        software.paired_axes = vec!["x".into()];
        hide(&role, &software, 0.0, &mut costs);
        let seconds = |costs: &[InstrCost]| costs.iter().map(|c| c.seconds).collect::<Vec<f64>>();
        // 4 - 3 beside `lhs`, nothing for what both read, 9 - 5 beside `rhs`.
        assert_eq!(seconds(&costs[0]), [1.0, 4.0, 3.0, 4.0, 5.0, 5.0]);
        // In 4 s the matmul of 3 s gets no further than 2.4; in 9 s one of 5 s ends.
        hide(&role, &software, 0.4, &mut taking);
        assert_eq!(seconds(&taking[0]), [1.6, 4.0, 3.0, 4.0, 5.0, 5.0]);
    }
}
