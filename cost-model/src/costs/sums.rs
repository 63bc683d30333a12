//! Sums of reduced gradients, beside the kernels of the backward pass.
//!
//! Where a gradient is all-reduced in every microbatch, what adds it to the step's sum waits for
//! the reduction. A framework that reduces beside the backward pass reduces the sum in place
//! (buckets of gradients), so the next layer's kernels do not wait.
//!
//! Where gradients are scattered, their sums stay among the kernels. FSDP adds them in the
//! reduction's stream too; but what a reduction takes from the kernels beside it is not
//! modelled, and with neither wait predictions of FSDP were further off.

use super::{InstrCost, KERNELS};
use ir::BufferId;
use ir::collective::CollectiveKind;
use ir::op::OpKind;
use ir::program::{InstrKind, Template};
use std::collections::HashMap;

/// Puts accumulations of what an all-reduce beside the kernels made into its queue.
pub(super) fn beside(template: &Template, costs: &mut [InstrCost]) {
    let mut reduced: HashMap<BufferId, usize> = HashMap::new();
    for (instruction, cost) in template.instructions.iter().zip(costs) {
        match &instruction.kind {
            InstrKind::Collective {
                kind: CollectiveKind::AllReduce(_),
                items,
                ..
            } if cost.queue != KERNELS => {
                reduced.extend(items.iter().map(|i| (i.output, cost.queue)));
            }
            InstrKind::Compute {
                kind: OpKind::Accumulate { .. },
                inputs,
                ..
            } => {
                if let Some(queue) = inputs.iter().find_map(|b| reduced.get(b)) {
                    cost.queue = *queue;
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::costs::CostClass;
    use crate::testing::instr;
    use ir::DType;
    use ir::ReduceKind;
    use ir::program::{CollectiveItem, TemplateKind};
    use ir::reshard::LayoutStep;

    const BESIDE: usize = KERNELS + 1;

    /// Queue of what adds buffer 1 to the sum in 2, after a collective that made 1 of 0.
    fn queue_of_sum(kind: CollectiveKind, queue: usize) -> usize {
        let reduction = InstrKind::Collective {
            kind,
            axes: Vec::new(),
            items: vec![CollectiveItem {
                step: LayoutStep::AllReduce { axes: Vec::new() },
                input: BufferId(0),
                output: BufferId(1),
            }],
        };
        let sum = InstrKind::Compute {
            path: "sum".into(),
            kind: OpKind::Accumulate { dtype: DType::F32 },
            inputs: vec![BufferId(2), BufferId(1)],
            outputs: vec![BufferId(2)],
        };
        let template = Template {
            kind: TemplateKind::Backward,
            chunk: 0,
            instructions: vec![
                instr(reduction, crate::testing::COLLECTIVES, &[]),
                instr(sum, crate::testing::KERNELS, &[]),
            ],
        };
        let cost = |queue| InstrCost {
            seconds: 1.0,
            class: CostClass::Compute,
            queue,
            unheeded: 0,
        };
        let mut costs = vec![cost(queue), cost(KERNELS)];
        beside(&template, &mut costs);
        assert_eq!(costs[0].queue, queue);
        costs[1].queue
    }

    #[test]
    fn what_is_reduced_beside_the_kernels_is_added_there() {
        let all = CollectiveKind::AllReduce(ReduceKind::Sum);
        assert_eq!(queue_of_sum(all, BESIDE), BESIDE);
        // A reduction that kernels wait for, and one that leaves a part.
        assert_eq!(queue_of_sum(all, KERNELS), KERNELS);
        let part = CollectiveKind::ReduceScatter(ReduceKind::Sum);
        assert_eq!(queue_of_sum(part, BESIDE), KERNELS);
    }
}
