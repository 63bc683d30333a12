//! Collectives that move piece by piece beside a matmul.
//!
//! The first of `n` pieces has to arrive before the matmul begins, or the last one to leave
//! after it has ended; the others move while it computes. So of a collective of `c` and its
//! matmuls of `m` seconds, `min(c, m) (1 - 1/n)` is hidden. Pieces that are scattered arrive
//! side by side, and a kernel adds them up (PyTorch's `_fused_matmul_reduce_scatter`, the ring
//! exchange of Transformer Engine).

use crate::Software;
use crate::streams::is_of;
use cost_model::compute::copy_time;
use cost_model::costs::InstrCost;
use ir::BufferId;
use ir::cluster::Cluster;
use ir::collective::CollectiveKind;
use ir::op::OpKind;
use ir::program::{CollectiveItem, InstrKind, RoleProgram, Template};
use std::collections::HashMap;

/// Takes from collectives over [`Software::piecewise_axes`] what the matmul hides.
pub(crate) fn hide(
    cluster: &Cluster,
    software: &Software,
    role: &RoleProgram,
    template: &Template,
    costs: &mut [InstrCost],
) {
    if software.piecewise_axes.is_empty() || template.kind.pass().is_none() {
        return;
    }
    let mut reads: HashMap<BufferId, f64> = HashMap::new();
    let mut writes: HashMap<BufferId, f64> = HashMap::new();
    for (instruction, cost) in template.instructions.iter().zip(costs.iter()) {
        // Attention on a part of the keys hides it as a matmul does (Liu et al. 2023).
        let InstrKind::Compute {
            kind:
                OpKind::DotGeneral { .. } | OpKind::Attention { .. } | OpKind::AttentionGrad { .. },
            ..
        } = &instruction.kind
        else {
            continue;
        };
        for (buffers, of) in [
            (instruction.reads(), &mut reads),
            (instruction.writes(), &mut writes),
        ] {
            for b in buffers {
                *of.entry(b).or_default() += cost.seconds;
            }
        }
    }
    for (instruction, cost) in template.instructions.iter().zip(costs) {
        let InstrKind::Collective {
            kind, axes, items, ..
        } = &instruction.kind
        else {
            continue;
        };
        let is_piecewise = |a: &ir::AxisId| is_of(role, &software.piecewise_axes, *a);
        let matmuls: f64 = match kind {
            _ if !axes.iter().all(is_piecewise) => continue,
            CollectiveKind::AllGather => items.iter().filter_map(|i| reads.get(&i.output)).sum(),
            CollectiveKind::ReduceScatter(_) => {
                items.iter().filter_map(|i| writes.get(&i.input)).sum()
            }
            _ => continue,
        };
        let n: u64 = axes.iter().map(|a| role.mesh.size(*a)).product();
        let hidden = cost.seconds.min(matmuls) * (1.0 - 1.0 / n.max(1) as f64);
        cost.seconds -= hidden;
        if matches!(kind, CollectiveKind::ReduceScatter(_)) && matmuls > 0.0 {
            let bytes = |b: BufferId| role.buffer(b).bytes;
            let moved = |i: &CollectiveItem| bytes(i.input) + bytes(i.output);
            let bytes: u64 = items.iter().map(moved).sum();
            // A copy moves its bytes twice.
            cost.seconds += copy_time(cluster, bytes / 2).0;
        }
    }
}
