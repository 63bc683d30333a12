//! Equal layers, found by comparing the training graph, not assumed from names.
//!
//! Two layers are of one kind when their ops correspond one to one: the same relative paths
//! (the layer's name replaced), kinds, types, and operands that come from corresponding
//! places (the same layer, or a neighbour at the same distance, or the same foreign op), and
//! the boundaries that follow them have equal types and pins.

use ir::plan::relative_path;
use ir::training::TrainingGraph;
use ir::{LayerId, OpId};
use std::collections::BTreeMap;

/// The layers of a training graph by kind.
#[derive(Clone, Debug)]
pub struct Layers {
    /// Per layer, its ops in graph order.
    pub ops: Vec<Vec<OpId>>,
    /// Per layer, its kind.
    pub kind: Vec<usize>,
    /// Per kind, the first layer of it.
    pub first: Vec<LayerId>,
}

/// Finds the kinds. `mark` adds text to the signature of a value by its name (pins that fix a
/// tensor).
pub fn find_layers(training: &TrainingGraph, mark: &dyn Fn(&str) -> String) -> Layers {
    let graph = &training.graph;
    let n = graph.layers.len();
    let mut ops = vec![Vec::new(); n];
    for (id, op) in graph.iter() {
        if let Some(layer) = op.layer {
            ops[layer.index()].push(id);
        }
    }
    let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
    let mut kind = Vec::with_capacity(n);
    let mut first = Vec::new();
    for (layer, members) in ops.iter().enumerate() {
        let following = ops.get(layer + 1).map_or(&[][..], Vec::as_slice);
        let signature = signature(training, LayerId::new(layer), members, following, mark);
        let next = kinds.len();
        let k = *kinds.entry(signature).or_insert(next);
        if k == first.len() {
            first.push(LayerId::new(layer));
        }
        kind.push(k);
    }
    Layers { ops, kind, first }
}

fn signature(
    training: &TrainingGraph,
    layer: LayerId,
    ops: &[OpId],
    next: &[OpId],
    mark: &dyn Fn(&str) -> String,
) -> String {
    use std::fmt::Write;
    let graph = &training.graph;
    let name = &graph.layers[layer.index()];
    // Random keys name their op; relative to the layer they are equal.
    let relative = |text: &str| relative_path(text, name);
    let mut out = String::new();
    for &id in ops {
        let op = graph.op(id);
        let kind = format!("{:?}", op.kind);
        let kind = match &op.kind {
            ir::OpKind::Dropout { key, .. } | ir::OpKind::AttentionGrad { key, .. } => {
                kind.replace(key.as_str(), &relative(key))
            }
            _ => kind,
        };
        let _ = write!(
            out,
            "{}|{kind}|{:?}|{:?}|",
            relative(&op.path),
            op.pass,
            op.region,
        );
        for &v in &op.inputs {
            let producer = graph.op(graph.value(v).producer);
            let result = graph.value(v).result;
            let origin = match producer.layer {
                Some(l) if l == layer => relative(&producer.path),
                Some(l) if l.0.abs_diff(layer.0) == 1 => {
                    let step = i64::from(l.0) - i64::from(layer.0);
                    format!("{step}:{}", graph.ty(v))
                }
                _ => format!("@{}", producer.path),
            };
            let _ = write!(out, "<{origin}:{result}");
        }
        for &v in &op.outputs {
            let _ = write!(out, ">{}{}", graph.ty(v), mark(&graph.value_name(v)));
        }
        out.push('\n');
    }
    // A layer's model ends in the layouts of the next boundary: their types and pins count.
    for &id in next {
        let op = graph.op(id);
        if op.path.starts_with(ir::boundary::BOUNDARY) {
            for &v in &op.outputs {
                let _ = write!(out, "next>{}", graph.ty(v));
            }
        }
        let path = op.path.strip_prefix("grad.").unwrap_or(&op.path);
        if path.starts_with(ir::boundary::BOUNDARY) {
            out.extend(op.outputs.iter().map(|&v| mark(&graph.value_name(v))));
        }
    }
    out
}
