//! The cost of an attention whose keys and values go around a ring (`ir::op::Keys`): each part
//! takes as long as its kernel, or as what travels meanwhile.

use super::{Setting, local_types};
use cost_model::collectives::collective_time;
use cost_model::compute;
use ir::collective::CollectiveKind;
use ir::op::{Assignment, AxisUse, Binary, Keys, OpStrategy};
use ir::{AxisId, DType, Op, OpKind};

/// An attention, or the gradient of one, on one rank of a ring.
pub(super) struct Around {
    /// Seconds of all parts.
    pub seconds: f64,
    /// The most bytes at a time, beside operands and results.
    pub bytes: u64,
}

/// The cost of an op under a strategy by which something goes around; `None` where nothing does.
pub(super) fn around(
    s: &Setting<'_>,
    op: &Op,
    strategy: &OpStrategy,
    specs: &Assignment,
) -> Option<Around> {
    let (queries, _) = s.training.graph.rule(op).ring.filter(|_| strategy.ring)?;
    let axis = (strategy.uses.iter()).position(|u| *u == AxisUse::Factor(queries))?;
    let axis = AxisId::new(axis);
    let ranks = u32::try_from(s.mesh.size(axis)).ok()?;
    let is_gradient = matches!(op.kind, OpKind::AttentionGrad { .. });
    let operands = local_types(s, &op.inputs, &specs.operands);
    let results = local_types(s, &op.outputs, &specs.results);
    let elements = |lens: &[u64]| lens.iter().fold(1, |n: u64, &l| n.saturating_mul(l));
    let size = |(t, lens): &(DType, Vec<u64>)| elements(lens).saturating_mul(t.bytes());
    let shards: u64 = operands[1..3].iter().map(size).sum();
    // Addends and sums are f32: of results that stay with the queries, and of those that go around.
    let (staying, passing) = match is_gradient {
        true => results.split_at(1),
        false => results.split_at(results.len()),
    };
    let in_f32 = |all: &[(DType, Vec<u64>)]| -> u64 {
        all.iter()
            .map(|(_, lens)| elements(lens).saturating_mul(4))
            .sum()
    };
    let (staying, sums) = (in_f32(staying), in_f32(passing));
    let part = |step: u32| {
        let kind = op.kind.with_keys(Keys::Ring { step, ranks });
        compute::op_time(s.cluster, &kind, &operands, &results).0
    };
    let add = |lens: &Vec<u64>| {
        let of = (DType::F32, lens.clone());
        let add = OpKind::Binary { f: Binary::Add };
        compute::op_time(s.cluster, &add, &[of.clone(), of.clone()], &[of]).0
    };
    let adding: f64 = passing.iter().map(|(_, lens)| add(lens)).sum();
    let travel = |bytes: u64| match bytes {
        0 => 0.0,
        _ => collective_time(s.cluster, s.mesh, &[axis], CollectiveKind::Shift, bytes).0,
    };
    let (first, next) = (part(0), part(1) + adding);
    let (keys, gradients) = (travel(shards), travel(sums));
    let between = f64::from(ranks.saturating_sub(2)) * next.max(keys + gradients);
    let home = travel(passing.iter().map(size).sum());
    Some(Around {
        seconds: first.max(keys) + between + next.max(gradients) + home,
        // The next keys and values; two sums with the queries, and of what goes around an addend and
        // a sum, each with what is about to take its place.
        bytes: [shards, 2 * staying, 4 * sums]
            .into_iter()
            .fold(0, u64::saturating_add),
    })
}
