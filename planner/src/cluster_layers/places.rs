//! Where a forward graph can be cut: the places that one activation crosses.
//!
//! A cut divides the ops into those before and those after it, such that operands come before
//! their users. The activations that cross it are the values computed before and used after;
//! `Input`, `State` and `Constant` do not count, because data and constants are made where
//! they are used and parameters have a way of their own (`ir::training`, `shared.*`). Cutting
//! is only considered where exactly one activation crosses: the model of a layer has one
//! boundary before it and one behind it, and prices exactly that.
//!
//! One activation crosses behind `v` when every path from an ancestor of `v` to the loss
//! passes through `v`; the ops before the cut are then the ancestors of `v` and its own op. Of
//! all such `v` those are found that lie on the critical path, the path to the loss with the
//! most FLOPs: a depth-first post-order from the loss that enters the operand with the longest
//! path first lists the ancestors of each of them before anything else. Side branches, such as
//! the embedding of positions, thereby stand right before their first use, wherever the author
//! wrote them. Linear in the size of the graph.

use ir::{Graph, Op, OpId, Region, ValueId};
use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::visit::DfsPostOrder;
use std::collections::BTreeSet;

/// The ops between two neighbouring places.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Piece {
    /// Its ops, sources among them, in graph order.
    pub ops: Vec<OpId>,
    /// Its FLOPs as [`flops`] counts them.
    pub flops: u64,
    /// The activation that crosses the place behind it; none behind the last piece.
    pub crossing: Option<ValueId>,
    /// Its bytes for one sample; 0 behind the last piece.
    pub bytes: u64,
}

/// Divides a forward graph at all its places. Every op stands in one piece: a source in that
/// of its first use, an op that the loss does not depend on in that of its last operand.
///
/// `None` where there is nothing to divide: no single loss, or ops without a layer (those of
/// a world do not belong to any stage).
pub(super) fn pieces(graph: &Graph) -> Option<Vec<Piece>> {
    let [loss] = graph.outputs[..] else {
        return None;
    };
    if graph.ops().iter().any(|op| op.layer.is_none()) {
        return None;
    }
    let flops = flops(graph);
    let order = order(graph, &flops, graph.value(loss).producer);
    let places = places(graph, &order);
    let of_op = piece_of_ops(graph, &order, &places);
    let mut pieces: Vec<Piece> = places
        .iter()
        .map(|&(_, v)| Some(v))
        .chain([None])
        .map(|crossing| Piece {
            ops: Vec::new(),
            flops: 0,
            crossing,
            bytes: crossing.map_or(0, |v| graph.ty(v).bytes(1)),
        })
        .collect();
    for (id, _) in graph.iter() {
        let piece = &mut pieces[of_op[id.index()]];
        piece.ops.push(id);
        piece.flops = piece.flops.saturating_add(flops[id.index()]);
    }
    Some(pieces)
}

/// Per op, the FLOPs of its matrix products on one sample, forward; all arithmetic in a graph
/// that has no such product.
pub(super) fn flops(graph: &Graph) -> Vec<u64> {
    let work: Vec<_> = graph.ops().iter().map(|op| graph.work(op, 1)).collect();
    let products = work.iter().any(|w| w.model_flops() > 0.0);
    let of = |w: &ir::op::Work| match products {
        true => w.model_flops() as u64,
        false => w.vector_flops as u64,
    };
    work.iter().map(of).collect()
}

/// The ops that compute the operands of `op`, as far as those are activations.
fn computed<'g>(graph: &'g Graph, op: &'g Op) -> impl Iterator<Item = OpId> + 'g {
    let producers = op.inputs.iter().map(|&v| graph.value(v).producer);
    producers.filter(|&p| !graph.op(p).kind.is_source())
}

/// The ops that the loss depends on, sources left out, in depth-first post-order with the operand
/// on the longest path first.
fn order(graph: &Graph, flops: &[u64], loss: OpId) -> Vec<OpId> {
    // FLOPs, and one for the op itself so that paths of free ops have a length too.
    let mut longest: Vec<u64> = Vec::with_capacity(graph.ops().len());
    for (id, op) in graph.iter() {
        let before = computed(graph, op).map(|p| longest[p.index()]).max();
        let own = flops[id.index()].saturating_add(1);
        longest.push(own.saturating_add(before.unwrap_or(0)));
    }
    let mut uses = DiGraph::<(), ()>::with_capacity(longest.len(), 2 * longest.len());
    for _ in &longest {
        uses.add_node(());
    }
    for (id, op) in graph.iter() {
        let mut producers: Vec<OpId> = computed(graph, op).collect();
        // Stable: of equally long paths the first operand's. Edges are followed as they are added.
        producers.sort_by_key(|p| std::cmp::Reverse(longest[p.index()]));
        for p in producers {
            uses.add_edge(NodeIndex::new(id.index()), NodeIndex::new(p.index()), ());
        }
    }
    let mut order = DfsPostOrder::new(&uses, NodeIndex::new(loss.index()));
    let next = || Some(OpId::new(order.next(&uses)?.index()));
    std::iter::from_fn(next).collect()
}

/// Positions in `order` behind which exactly one activation crosses, with that activation.
fn places(graph: &Graph, order: &[OpId]) -> Vec<(usize, ValueId)> {
    let mut last_use = vec![None; graph.values().len()];
    for (position, &id) in order.iter().enumerate() {
        for &v in &graph.op(id).inputs {
            last_use[v.index()] = Some(position);
        }
    }
    let mut live: BTreeSet<ValueId> = BTreeSet::new();
    let mut places = Vec::new();
    for (position, &id) in order.iter().enumerate() {
        let op = graph.op(id);
        let over = |v: &&ValueId| last_use[v.index()] == Some(position);
        for v in op.inputs.iter().filter(over) {
            live.remove(v);
        }
        let used = |v: &&ValueId| last_use[v.index()].is_some();
        live.extend(op.outputs.iter().filter(used));
        if let (1, Some(&v)) = (live.len(), live.first())
            && is_activation(graph, v)
        {
            places.push((position, v));
        }
    }
    places
}

/// Whether `ir::boundary` marks the value where it enters another layer.
fn is_activation(graph: &Graph, v: ValueId) -> bool {
    graph.op(graph.value(v).producer).region == Region::Microbatch
}

/// Per op, the piece that it stands in.
fn piece_of_ops(graph: &Graph, order: &[OpId], places: &[(usize, ValueId)]) -> Vec<usize> {
    let mut piece: Vec<Option<usize>> = vec![None; graph.ops().len()];
    for (position, &id) in order.iter().enumerate() {
        let before = places.partition_point(|&(p, _)| p < position);
        piece[id.index()] = Some(before);
    }
    for (id, op) in graph.iter().filter(|(_, op)| !op.kind.is_source()) {
        let after = computed(graph, op).filter_map(|p| piece[p.index()]).max();
        let here = piece[id.index()].or(after).unwrap_or(0);
        piece[id.index()] = Some(here);
        for &v in &op.inputs {
            let source = graph.value(v).producer;
            if graph.op(source).kind.is_source() {
                let first = &mut piece[source.index()];
                *first = Some(first.map_or(here, |first| first.min(here)));
            }
        }
    }
    // Ops that nothing uses go to the first.
    piece.into_iter().map(|p| p.unwrap_or(0)).collect()
}
