//! Layer boundaries made explicit: every activation that crosses from one layer to another
//! passes a `Layout` op at the entrance of the receiving layer.
//!
//! So the layout of a boundary tensor is one decision, its gradient has one too (the gradient
//! of a `Layout` is a `Layout`), and a stage cut between two layers cuts exactly the edges
//! into these ops. Paths: `boundary.<layer>.<i>`, `i` counting the values that enter the layer
//! in order of first use, so that equal layers have equal relative paths. What they are says
//! their origin, [`Origin::Boundary`].

use crate::graph::Place;
use crate::{Graph, GraphError, Op, OpKind, Origin, Region, ValueId};
use std::collections::BTreeMap;

/// A copy of the forward graph with a `Layout` op wherever a microbatch value (not an
/// `Input`) is used by a layer other than its producer's. Value ids change, paths do not; every
/// other op is the model's, whatever `forward` says of it.
pub fn mark_boundaries(forward: &Graph) -> Result<Graph, GraphError> {
    let mut out = forward.without_ops();
    let mut map: Vec<ValueId> = Vec::with_capacity(forward.values().len());
    let mut entered = BTreeMap::new();
    for op in forward.ops() {
        let mut inputs = Vec::with_capacity(op.inputs.len());
        for &v in &op.inputs {
            let producer = forward.op(forward.value(v).producer);
            let crosses = producer.region == Region::Microbatch
                && !producer.kind.is_source()
                && producer.layer != op.layer
                && op.layer.is_some();
            let mapped = map[v.index()];
            match (crosses, op.layer) {
                (true, Some(layer)) => {
                    let inside = match entered.get(&(v, layer)) {
                        Some(&inside) => inside,
                        None => {
                            let name = forward.layers.get(layer.index()).map_or("", String::as_str);
                            let i = entered.keys().filter(|(_, l)| *l == layer).count();
                            let place = Place::forward(format!("boundary.{name}.{i}"), layer);
                            let (kind, origin) = (OpKind::Layout, Origin::Boundary);
                            let inside =
                                out.add_made1(&[forward], kind, &[mapped], place, origin)?;
                            entered.insert((v, layer), inside);
                            inside
                        }
                    };
                    inputs.push(inside);
                }
                _ => inputs.push(mapped),
            }
        }
        out.copy(forward, op, inputs, &mut map)?;
        out.mark_last(Origin::Forward);
    }
    out.outputs = forward.outputs.iter().map(|v| map[v.index()]).collect();
    Ok(out)
}

/// Whether an op is at a layer's entrance, or brings the gradient back to it.
pub fn is_boundary(graph: &Graph, op: &Op) -> bool {
    match op.origin {
        Origin::Gradient { of, .. } | Origin::Sum { of, .. } => {
            graph.op(of).origin == Origin::Boundary
        }
        origin => origin == Origin::Boundary,
    }
}
