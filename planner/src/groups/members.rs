//! Which ops of a layer are decided together: members of a parameter, and ops that follow a
//! forward op.

use super::index::Index;
use ir::{Graph, Op, OpId, OpKind, Origin, Pass, Region, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// Members of each parameter that this layer owns, in the order of the parameters: states,
/// preparation, sum of gradients, update, and the accumulators that lie in this layer.
pub(super) fn parameter_members(graph: &Graph, index: &Index, ops: &[OpId]) -> Vec<Vec<OpId>> {
    let here: BTreeSet<OpId> = ops.iter().copied().collect();
    let mut members: BTreeMap<ValueId, BTreeSet<OpId>> = BTreeMap::new();
    for &id in ops {
        let op = graph.op(id);
        match &op.kind {
            OpKind::State { .. } => {
                if let Some(p) = index.parameter(op.outputs[0]) {
                    members.entry(p).or_default().insert(id);
                }
            }
            OpKind::AdamW { .. } | OpKind::Sgd { .. } => {
                if let Some(p) = index.parameter(op.inputs[0]) {
                    let set = members.entry(p).or_default();
                    set.insert(id);
                    gradient_chain(graph, op.inputs[1], &here, set);
                }
            }
            OpKind::SumSquares => {}
            OpKind::Cast { .. } | OpKind::Layout if prepares(op) => {
                if let Some(p) = parameter_source(graph, op.inputs[0], index)
                    .filter(|_| local_source(graph, op, &here))
                {
                    members.entry(p).or_default().insert(id);
                }
            }
            _ => {}
        }
    }
    // The norm of a parameter reads the gradient that its update reads.
    for &id in ops
        .iter()
        .filter(|&&id| matches!(graph.op(id).kind, OpKind::SumSquares))
    {
        let gradient = graph.op(id).inputs[0];
        let update = ops.iter().map(|&u| graph.op(u)).find(|u| {
            matches!(u.kind, OpKind::AdamW { .. } | OpKind::Sgd { .. }) && u.inputs[1] == gradient
        });
        if let Some(p) = update.and_then(|u| index.parameter(u.inputs[0])) {
            members.entry(p).or_default().insert(id);
        }
    }
    members
        .into_values()
        .map(|set| set.into_iter().collect())
        .collect()
}

/// Whether an op makes the copy of a parameter that others read: once a step or, where microbatches
/// update, for each of them.
pub(super) fn prepares(op: &Op) -> bool {
    op.region == Region::StepBegin || matches!(op.origin, Origin::Prepared { .. })
}

fn gradient_chain(graph: &Graph, v: ValueId, here: &BTreeSet<OpId>, set: &mut BTreeSet<OpId>) {
    let id = graph.value(v).producer;
    let op = graph.op(id);
    if here.contains(&id) {
        match op.kind {
            OpKind::Accumulate { .. } => {
                set.insert(id);
            }
            OpKind::Cast { .. } if op.pass == Pass::Update => {
                set.insert(id);
            }
            OpKind::Binary { .. } if op.pass == Pass::Update => {
                set.insert(id);
                op.inputs
                    .iter()
                    .for_each(|&v| gradient_chain(graph, v, here, set));
            }
            _ => {}
        }
    }
}

fn parameter_source(graph: &Graph, v: ValueId, index: &Index) -> Option<ValueId> {
    let op = graph.op(graph.value(v).producer);
    match op.kind {
        OpKind::State { .. } => index.parameter(v),
        OpKind::Cast { .. } | OpKind::Layout if prepares(op) => {
            parameter_source(graph, op.inputs[0], index)
        }
        _ => None,
    }
}

fn local_source(graph: &Graph, op: &Op, here: &BTreeSet<OpId>) -> bool {
    here.contains(&graph.value(op.inputs[0]).producer)
}

/// The forward op whose group a gradient op or a twin joins; `None` when it stands alone.
pub(crate) fn forward_of(graph: &Graph, id: &OpId) -> Option<OpId> {
    let op = graph.op(*id);
    match op.origin {
        Origin::Twin { of } => Some(of),
        // Sums over uses choose for themselves whether addends stay partial.
        Origin::Gradient { of, .. } => (graph.op(of).layer == op.layer).then_some(of),
        _ => None,
    }
}
