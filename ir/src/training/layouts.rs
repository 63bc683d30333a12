//! Makes shared layout changes explicit: where several matrix multiplications of one layer
//! use one value, a `Layout` op between them gives the changed value a name, so that it is
//! gathered once and they share it (Q, K and V in the forward pass; the gradients for an
//! input and for a weight in the backward passes).
//!
//! One op per value, layer and direction (forward; both backward passes together). It stands
//! right before the first of its consumers and has their layer; its pass is F or, backward,
//! BI when one of them is BI (so that BI never waits for a BW op), else BW.
//!
//! A layout that is changed for the forward pass is not kept for the backward one, where it is
//! changed again: Korthikanti et al. 2022, section 4.2.2, gather a layer's input twice, which keeps
//! a share of it on each rank. Tokens of experts are as many in either layout, so nothing is saved
//! by sending them twice: they have one op for both directions, on their way to the experts (for
//! the weights' gradients) and on their way back (for the gates').
//!
//! Parameters have none: their copies are made before the microbatches, where their layout is a
//! choice of its own.
//!
//! Path: `layout.<first consumer>.<operand>`, so that equal layers have equal relative paths.

use crate::{Graph, GraphError, LayerId, Op, OpId, OpKind, Origin, Pass, Place, Region, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// A rewritten copy of `graph`, and for each of its values the value in the copy.
pub(super) fn share_layouts(graph: &Graph) -> Result<(Graph, Vec<ValueId>), GraphError> {
    let shared = plan(graph);
    let mut first: BTreeMap<OpId, Vec<usize>> = BTreeMap::new();
    let mut through: BTreeMap<(OpId, ValueId), usize> = BTreeMap::new();
    for (i, s) in shared.iter().enumerate() {
        first.entry(s.consumers[0]).or_default().push(i);
        through.extend(s.consumers.iter().map(|&c| ((c, s.value), i)));
    }
    let mut out = graph.without_ops();
    let mut moved: Vec<ValueId> = Vec::with_capacity(graph.values().len());
    let mut layouts: BTreeMap<usize, ValueId> = BTreeMap::new();
    for (id, op) in graph.iter() {
        for &i in first.get(&id).into_iter().flatten() {
            let s = &shared[i];
            let (kind, of) = (OpKind::Layout, [moved[s.value.index()]]);
            let place = s.place.clone();
            let changed = out.add_made1(&[graph], kind, &of, place, Origin::Layout)?;
            layouts.insert(i, changed);
        }
        let operand = |&v: &ValueId| {
            through
                .get(&(id, v))
                .map_or(moved[v.index()], |i| layouts[i])
        };
        let inputs: Vec<ValueId> = op.inputs.iter().map(operand).collect();
        out.copy(graph, op, inputs, &mut moved)?;
    }
    Ok((out, moved))
}

/// A layout op to insert.
struct Shared {
    value: ValueId,
    /// The ops that use it, at least two, ascending.
    consumers: Vec<OpId>,
    place: Place,
}

fn plan(graph: &Graph) -> Vec<Shared> {
    // Key: value, backward, layer. In order of the values, so that paths are stable.
    let mut groups: BTreeMap<(ValueId, bool, Option<LayerId>), BTreeSet<OpId>> = BTreeMap::new();
    for (id, op) in graph.iter() {
        if op.region != Region::Microbatch {
            continue;
        }
        let is_made_here =
            |v: &&ValueId| graph.op(graph.value(**v).producer).region == Region::Microbatch;
        for &v in uses(op).iter().filter(is_made_here) {
            let sent = matches!(op.kind, OpKind::Combine | OpKind::GateGrad)
                || matches!(
                    graph.op(graph.value(v).producer).kind,
                    OpKind::Dispatch { .. }
                );
            let again = op.pass != Pass::F && !sent;
            groups.entry((v, again, op.layer)).or_default().insert(id);
        }
    }
    let mut shared = Vec::new();
    for ((value, _, layer), consumers) in groups {
        if consumers.len() < 2 {
            continue;
        }
        // Named after its first use, which is in its own layer, so that equal layers have
        // equal relative paths.
        let Some(&first) = consumers.first() else {
            continue;
        };
        let user = graph.op(first);
        let operand = user.inputs.iter().position(|&v| v == value).unwrap_or(0);
        let path = format!("layout.{}.{operand}", user.path);
        let pass = consumers
            .iter()
            .map(|&c| graph.op(c).pass)
            .min()
            .unwrap_or(Pass::F);
        let place = Place {
            path,
            pass,
            region: Region::Microbatch,
            layer,
        };
        shared.push(Shared {
            value,
            consumers: consumers.into_iter().collect(),
            place,
        });
    }
    shared
}

/// Operands whose layout an op may share with others.
fn uses(op: &Op) -> &[ValueId] {
    match op.kind {
        OpKind::DotGeneral { .. }
        | OpKind::Conv2d { .. }
        | OpKind::Conv2dGradInput { .. }
        | OpKind::Conv2dGradWeight { .. } => &op.inputs,
        // The results of experts.
        OpKind::Combine | OpKind::GateGrad => op.inputs.get(..1).unwrap_or_default(),
        _ => &[],
    }
}
