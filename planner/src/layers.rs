//! Equal layers, found by comparing the training graph, not assumed from names.
//!
//! Two layers are of one kind when their ops correspond one to one, by their position in the
//! layer: the same kinds, passes, regions and types, operands that come from corresponding
//! places (the same position of the layer, a neighbouring layer at the same distance, or the
//! same op elsewhere), the same relation between gradient and forward ops and between states
//! and their updates, and boundaries behind them that have equal types and pins. Paths do not
//! count, so layers are found equal whatever their author called their ops; a choice made for
//! one layer is read for another by position ([`Layers::counterpart`]).

use crate::cluster_layers::without_key;
use crate::groups::forward_of;
use ir::training::{StateRole, TrainingGraph};
use ir::{LayerId, Op, OpId, Region, ValueId};
use std::collections::BTreeMap;
use std::fmt::Write;

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

impl Layers {
    /// The op of `layer` that corresponds to `op` of the first layer of its kind; none where
    /// `op` is not of that layer.
    pub fn counterpart(&self, op: OpId, layer: usize) -> Option<OpId> {
        let first = self.first[self.kind[layer]];
        let position = self.ops[first.index()].binary_search(&op).ok()?;
        self.ops[layer].get(position).copied()
    }
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
    let reader = Reader {
        training,
        states: training
            .states
            .iter()
            .map(|s| (s.read, (s.role, s.write)))
            .collect(),
        mark,
    };
    let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
    let mut kind = Vec::with_capacity(n);
    let mut first = Vec::new();
    for (layer, members) in ops.iter().enumerate() {
        let following = ops.get(layer + 1).map_or(&[][..], Vec::as_slice);
        let signature = reader.signature(LayerId::new(layer), members, following);
        let next = kinds.len();
        let k = *kinds.entry(signature).or_insert(next);
        if k == first.len() {
            first.push(LayerId::new(layer));
        }
        kind.push(k);
    }
    Layers { ops, kind, first }
}

/// Writes signatures.
struct Reader<'a> {
    training: &'a TrainingGraph,
    /// By the value that a state has during the step: its role and its next value.
    states: BTreeMap<ValueId, (StateRole, ValueId)>,
    mark: &'a dyn Fn(&str) -> String,
}

impl Reader<'_> {
    fn signature(&self, layer: LayerId, ops: &[OpId], next: &[OpId]) -> String {
        let graph = &self.training.graph;
        let mut out = String::new();
        for &id in ops {
            let op = graph.op(id);
            let _ = write!(
                out,
                "{:?}|{:?}|{:?}|",
                without_key(&op.kind),
                op.pass,
                op.region,
            );
            if is_boundary(op) {
                out.push_str("boundary|");
            }
            if let Some(forward) = forward_of(graph, &id) {
                let _ = write!(out, "of {}|", self.origin(layer, ops, forward));
            }
            if let Some((role, write)) = op.outputs.first().and_then(|v| self.states.get(v)) {
                let write = graph.value(*write);
                let writer = self.origin(layer, ops, write.producer);
                let _ = write!(out, "{role:?} from {writer}:{}|", write.result);
            }
            for &v in &op.inputs {
                let value = graph.value(v);
                let origin = self.origin(layer, ops, value.producer);
                let _ = write!(out, "<{origin}:{}:{}", value.result, value.ty);
            }
            for &v in &op.outputs {
                let _ = write!(out, ">{}{}", graph.ty(v), self.mark(v));
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
            if is_boundary(op) {
                out.extend(op.outputs.iter().map(|&v| self.mark(v)));
            }
        }
        out
    }

    fn mark(&self, v: ValueId) -> String {
        (self.mark)(&self.training.graph.value_name(v))
    }

    /// Where an op stands, seen from a layer. What comes from a neighbour is known by the
    /// distance alone when it is an activation or a gradient; anything else, such as a tied
    /// table, is the same only where it is the same op.
    fn origin(&self, layer: LayerId, ops: &[OpId], id: OpId) -> String {
        let op = self.training.graph.op(id);
        let flows = op.region == Region::Microbatch && !op.kind.is_source();
        match op.layer {
            Some(l) if l == layer => match ops.binary_search(&id) {
                Ok(position) => position.to_string(),
                Err(_) => format!("@{}", op.path),
            },
            Some(l) if l.0.abs_diff(layer.0) == 1 && flows => {
                format!("{:+}", i64::from(l.0) - i64::from(layer.0))
            }
            _ => format!("@{}", op.path),
        }
    }
}

/// Whether an op is at a layer's entrance, or brings the gradient back to it.
fn is_boundary(op: &Op) -> bool {
    let path = op.path.strip_prefix("grad.").unwrap_or(&op.path);
    path.starts_with(ir::boundary::BOUNDARY)
}
