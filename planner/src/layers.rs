//! Equal layers, found by comparing the training graph, not assumed from names.
//!
//! Two layers are of one kind when their ops correspond one to one, by their position in the
//! layer: the same kinds, passes, regions and types, operands that come from corresponding
//! places (the same position of the layer, a neighbouring layer at the same distance, or the
//! same op elsewhere), the same relation between gradient and forward ops and between states
//! and their updates, and boundaries behind them that have equal types and pins. Paths do not
//! count, so layers are found equal whatever their author called their ops; a choice made for
//! one layer is read for another by position ([`Layers::counterpart`]). Attributes are compared as
//! numbers, so zeros of either sign are equal.

use crate::cluster_layers::without_key;
use crate::groups::forward_of;
use crate::pins::TensorPin;
use ir::boundary::is_boundary;
use ir::training::{StateRole, TrainingGraph};
use ir::{LayerId, OpId, OpKind, Pass, Region, TensorType, ValueId};
use rustc_hash::FxHashMap;
use std::borrow::Cow;

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

/// Finds the kinds. `pin` gives the pin that fixes a value, where there is one.
pub fn find_layers<'a>(
    training: &'a TrainingGraph,
    pin: &'a dyn Fn(ValueId) -> Option<&'a TensorPin>,
) -> Layers {
    let graph = &training.graph;
    let n = graph.layers.len();
    let mut ops = vec![Vec::new(); n];
    for (id, op) in graph.iter() {
        if let Some(layer) = op.layer {
            ops[layer.index()].push(id);
        }
    }
    let states = training.states.iter();
    let reader = Reader {
        training,
        states: states.map(|s| (s.read, (s.role, s.write))).collect(),
        pin,
    };
    let mut kinds: Vec<Vec<Sign>> = Vec::new();
    let mut kind = Vec::with_capacity(n);
    let mut first = Vec::new();
    for (layer, members) in ops.iter().enumerate() {
        let following = ops.get(layer + 1).map_or(&[][..], Vec::as_slice);
        let signature = reader.signature(LayerId::new(layer), members, following);
        let known = kinds.iter().position(|k| *k == signature);
        kind.push(known.unwrap_or_else(|| {
            kinds.push(signature);
            first.push(LayerId::new(layer));
            kinds.len() - 1
        }));
    }
    Layers { ops, kind, first }
}

/// The signs that layers of one kind have in common.
#[derive(Debug, PartialEq)]
enum Sign<'a> {
    /// An op begins, and whether it is at a layer's entrance or brings the gradient back to it.
    Op(Cow<'a, OpKind>, Pass, Region, bool),
    /// It is a gradient of another.
    GradientOf(Origin),
    /// It reads a state, whose next value is this result of that op.
    State(StateRole, Origin, u32),
    /// An operand: a result of an op.
    Reads(Origin, u32, &'a TensorType),
    /// A result.
    Makes(&'a TensorType, Option<&'a TensorPin>),
    /// A result of the next layer's entrance.
    Next(&'a TensorType),
    /// The pin of such a result, or of its gradient.
    NextPin(&'a TensorPin),
}

/// Where an op stands, seen from a layer.
#[derive(Debug, PartialEq)]
enum Origin {
    /// At this position of the layer.
    Here(usize),
    /// In the neighbour before (false) or behind.
    Beside(bool),
    /// It is this very op.
    Op(OpId),
}

/// Reads signatures.
struct Reader<'a> {
    training: &'a TrainingGraph,
    /// By the value that a state has during the step: its role and its next value.
    states: FxHashMap<ValueId, (StateRole, ValueId)>,
    pin: &'a dyn Fn(ValueId) -> Option<&'a TensorPin>,
}

impl<'a> Reader<'a> {
    fn signature(&self, layer: LayerId, ops: &[OpId], next: &[OpId]) -> Vec<Sign<'a>> {
        let graph = &self.training.graph;
        let mut signs = Vec::with_capacity(4 * ops.len());
        for &id in ops {
            let op = graph.op(id);
            let kind = without_key(&op.kind);
            signs.push(Sign::Op(kind, op.pass, op.region, is_boundary(graph, op)));
            if let Some(forward) = forward_of(graph, &id) {
                signs.push(Sign::GradientOf(self.origin(layer, ops, forward)));
            }
            if let Some((role, write)) = op.outputs.first().and_then(|v| self.states.get(v)) {
                let write = graph.value(*write);
                let writer = self.origin(layer, ops, write.producer);
                signs.push(Sign::State(*role, writer, write.result));
            }
            for &v in &op.inputs {
                let value = graph.value(v);
                let origin = self.origin(layer, ops, value.producer);
                signs.push(Sign::Reads(origin, value.result, &value.ty));
            }
            let makes = |&v| Sign::Makes(graph.ty(v), (self.pin)(v));
            signs.extend(op.outputs.iter().map(makes));
        }
        // A layer's model ends in the layouts of the next boundary: their types and pins count.
        for &id in next {
            let op = graph.op(id);
            if op.origin == ir::Origin::Boundary {
                signs.extend(op.outputs.iter().map(|&v| Sign::Next(graph.ty(v))));
            }
            if is_boundary(graph, op) {
                let pins = op.outputs.iter().filter_map(|&v| (self.pin)(v));
                signs.extend(pins.map(Sign::NextPin));
            }
        }
        signs
    }

    /// A value from a neighbour is known by the distance alone when it is an activation or a
    /// gradient; anything else, such as a tied table, is the same only where it is the same op.
    fn origin(&self, layer: LayerId, ops: &[OpId], id: OpId) -> Origin {
        let op = self.training.graph.op(id);
        let flows = op.region == Region::Microbatch && !op.kind.is_source();
        match op.layer {
            Some(l) if l == layer => match ops.binary_search(&id) {
                Ok(position) => Origin::Here(position),
                Err(_) => Origin::Op(id),
            },
            Some(l) if l.0.abs_diff(layer.0) == 1 && flows => Origin::Beside(l > layer),
            _ => Origin::Op(id),
        }
    }
}
