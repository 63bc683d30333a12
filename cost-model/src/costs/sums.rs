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
