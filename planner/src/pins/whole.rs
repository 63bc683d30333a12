//! Parameters that their uses find where they lie, which is what ZeRO below level 3 means.
//!
//! A parameter that is split at rest and gathered at every use is ZeRO-3, whatever the axis is
//! called that splits it. On an axis that the pins leave to the search (or to features) an op's
//! strategy and its parameter's layout are chosen apart, and meet in a layout change: there it
//! is decided whether the change keeps to a level. What an op computes with as it lies, as the
//! parts of a tensor-parallel matmul, stays allowed, and so does cutting a part out.
//!
//! Invariant: where no pin says how a parameter's copy lies, one that is whole on every chosen axis
//! is never moved, and every level leaves such a copy, so a level never leaves an op without a
//! strategy. A pinned layout may; the error then names the parameter.

use super::{AxisRole, ZeroLevels};
use ir::{Graph, LogicalMesh, OpKind, Region, ShardingSpec};

/// By value, whether it is made of parameters alone: what is made before the microbatches, and
/// in them what moves, casts or combines that element by element. To move the latter is to move
/// the parameter.
pub(crate) fn made_of_parameters(graph: &Graph) -> Vec<bool> {
    let mut made = vec![false; graph.values().len()];
    for op in graph.ops() {
        let parts = || op.inputs.iter().map(|v| made[v.index()]);
        let is_made = match op.region {
            Region::StepBegin => true,
            Region::Microbatch => follows(&op.kind) && parts().all(|p| p),
            _ => false,
        };
        for v in op.outputs.iter().filter(|_| is_made) {
            made[v.index()] = true;
        }
    }
    made
}

/// ZeRO levels that a change of the layout of what is made of parameters keeps to, in the
/// microbatches: all of them where each rank finds what it wants in what it has.
pub(crate) fn levels(
    mesh: &LogicalMesh,
    roles: &[AxisRole],
    from: &ShardingSpec,
    to: &ShardingSpec,
) -> ZeroLevels {
    // On the other axes the pins say what a parameter does, and a level leaves no more of it.
    let is_chosen = |a: &ir::AxisId| {
        mesh.size(*a) > 1 && matches!(roles[a.index()], AxisRole::Free | AxisRole::Tensor)
    };
    let stays = from.dims.iter().zip(&to.dims).all(|(from, to)| {
        let mut kept = from.axes.iter().enumerate();
        kept.all(|(i, a)| {
            !is_chosen(a) || (to.axes.get(..=i) == from.axes.get(..=i) && to.unit == from.unit)
        })
    });
    if stays {
        ZeroLevels::ALL
    } else {
        ZeroLevels::MOVING
    }
}

/// Whether the results of an op are as large as its operands and hold the same: what is said of
/// the operands then holds for them. A copy for every sample is an activation.
fn follows(kind: &OpKind) -> bool {
    matches!(
        kind,
        OpKind::Constant { .. }
            | OpKind::Layout
            | OpKind::Cast { .. }
            | OpKind::Unary { .. }
            | OpKind::Binary { .. }
            | OpKind::Reshape { .. }
            | OpKind::Transpose { .. }
            | OpKind::Slice { .. }
            | OpKind::Pad { .. }
            | OpKind::Unstack { .. }
            | OpKind::Stack { .. }
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::{Axis, AxisId, DeviceMesh, Rank};

    fn mesh(sizes: [u32; 2]) -> LogicalMesh {
        let devices = DeviceMesh {
            first_rank: Rank(0),
            n_devices: sizes.iter().product(),
        };
        let axes = sizes.into_iter().zip(["x", "y"]).map(|(size, name)| Axis {
            name: name.into(),
            size,
        });
        LogicalMesh::new(devices, axes.collect()).expect("sizes multiply to the devices")
    }

    /// A matrix whose dims are split over these axes.
    fn spec(dims: [&[usize]; 2]) -> ShardingSpec {
        let mut spec = ShardingSpec::replicated(2);
        for (dim, axes) in spec.dims.iter_mut().zip(dims) {
            dim.axes = axes.iter().map(|&a| AxisId::new(a)).collect();
        }
        spec
    }

    #[test]
    fn what_a_rank_has_is_not_moved() {
        use AxisRole::{Data, Expert, Free, Tensor};
        let both = mesh([2, 4]);
        let moves = |roles: [AxisRole; 2], from: [&[usize]; 2], to: [&[usize]; 2]| {
            !levels(&both, &roles, &spec(from), &spec(to)).has(0)
        };
        for role in [Free, Tensor] {
            let roles = [role, role];
            // Gathered, to another dim, behind another axis.
            assert!(moves(roles, [&[0], &[]], [&[], &[]]));
            assert!(moves(roles, [&[0], &[]], [&[], &[0]]));
            assert!(moves(roles, [&[0], &[]], [&[1, 0], &[]]));
            assert!(moves(roles, [&[0], &[1]], [&[0], &[]]));
            // As it lies, and a part of it.
            assert!(!moves(roles, [&[0], &[1]], [&[0], &[1]]));
            assert!(!moves(roles, [&[0], &[]], [&[0, 1], &[]]));
            assert!(!moves(roles, [&[], &[]], [&[0], &[1]]));
        }
        // These split the dims that the pins split.
        assert!(!moves([Data, Expert], [&[0], &[1]], [&[], &[]]));
        assert!(moves([Data, Free], [&[0], &[1]], [&[], &[]]));
        // One rank has it all.
        let single = mesh([1, 4]);
        let at = levels(
            &single,
            &[Free, Free],
            &spec([&[0], &[]]),
            &spec([&[], &[]]),
        );
        assert_eq!(at, ZeroLevels::ALL);
        // ZeRO-3 may move what it likes.
        let gathers = levels(&both, &[Free, Free], &spec([&[0], &[]]), &spec([&[], &[]]));
        assert_eq!(
            [0, 1, 2, 3].map(|z| gathers.has(z)),
            [false, false, false, true]
        );
    }
}
