//! Recomputation: activations that the backward pass makes again instead of keeping them
//! (Chen et al. 2016; Korthikanti et al. 2022).
//!
//! Whether an activation is kept is chosen op by op: results of a *recomputed* forward op are
//! not kept; gradients of its layer read a **twin**, the op cloned as `recompute.<path>` in
//! pass [`Pass::Recompute`], whose operands are twins where they are recomputed too and
//! kept values where they are not. A twin stands right before the first gradient op that
//! needs it, so the twins of a layer run just before (and in) the layer's backward, and they
//! live no longer than that. Twins of what no gradient needs are not made.
//!
//! Invariants:
//! * a twin has its source's kind and attributes, random keys included, so it has the same
//!   bits; which op it repeats says its origin;
//! * a layer's boundary, data and constants, parameters and accumulators are never
//!   recomputed, so twins read nothing of another layer;
//! * only gradient ops of the op's own layer read a twin.
//!
//! [`choose`] has the two usual choices, as presets of such a set of ops.

use super::{State, TrainingGraph};
use crate::{Graph, GraphError, Op, OpId, OpKind, Origin, Pass, Place, Region, ValueId};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Named choices of recomputed ops.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Every activation that a gradient needs is kept.
    #[default]
    None,
    /// Every layer keeps its boundary alone and recomputes all else; but nothing of the
    /// layer that ends in the loss, whose backward follows its forward at once.
    Full,
    /// Recomputed is what is cheap ([`OpKind::is_cheap`]) and made from nothing but what is
    /// kept or recomputed anyway: bytes of activations fall, no tensor is kept in exchange.
    /// These are the results of norms and of activation functions and their products, which
    /// the gradient needs beside their operands. Results of matmuls and of fused attention
    /// are kept.
    Selective,
}

impl Recompute {
    /// Name in pins and reports.
    pub fn name(self) -> &'static str {
        match self {
            Recompute::None => "none",
            Recompute::Full => "full",
            Recompute::Selective => "selective",
        }
    }
}

/// Whether the results of an op of a training graph may be recomputed: an op of the forward
/// pass that is neither data, constant, accumulator, a layer's boundary nor a microbatch's copy of a
/// parameter, which may have another value by then.
pub fn can_recompute(op: &Op) -> bool {
    op.pass == Pass::F
        && op.region == Region::Microbatch
        && !op.kind.is_source()
        && !matches!(op.kind, OpKind::Accumulate { .. } | OpKind::Constant { .. })
        && op.origin != Origin::Boundary
        && !matches!(op.origin, Origin::Prepared { .. })
}

/// The ops that a named choice recomputes, as far as some gradient needs them. `fixed` has
/// the last word on single ops: `Some(true)` recomputes, `Some(false)` keeps.
///
/// `training` is a graph in which nothing is recomputed yet.
pub fn choose(
    training: &TrainingGraph,
    policy: Recompute,
    fixed: &dyn Fn(&Op) -> Option<bool>,
) -> BTreeSet<OpId> {
    let graph = &training.graph;
    let needed = needed_by_gradients(graph);
    let loss = graph.op(graph.value(training.loss).producer).layer;
    let mut chosen = BTreeSet::new();
    for (id, op) in graph.iter().filter(|(_, op)| can_recompute(op)) {
        let at_hand = |v: &ValueId| {
            let producer = graph.value(*v).producer;
            let from = graph.op(producer);
            from.region != Region::Microbatch
                || from.kind.is_source()
                || matches!(from.origin, Origin::Prepared { .. })
                || needed[v.index()]
                || chosen.contains(&producer)
        };
        let by_policy = match policy {
            Recompute::None => false,
            Recompute::Full => op.layer != loss,
            Recompute::Selective => {
                op.layer != loss && op.kind.is_cheap() && op.inputs.iter().all(at_hand)
            }
        };
        // Its path is its first user's; who pins the op that made its operand means it too.
        let of_operand = || {
            let shared = op.kind == OpKind::Layout;
            let made = op.inputs.first().filter(|_| shared)?;
            fixed(graph.op(graph.value(*made).producer))
        };
        if fixed(op).or_else(of_operand).unwrap_or(by_policy) {
            chosen.insert(id);
        }
    }
    twins(graph, &chosen).into_values().flatten().collect()
}

/// Which values a gradient op uses.
fn needed_by_gradients(graph: &Graph) -> Vec<bool> {
    let mut needed = vec![false; graph.values().len()];
    for op in graph.ops().iter().filter(|op| is_gradient(op)) {
        op.inputs.iter().for_each(|v| needed[v.index()] = true);
    }
    needed
}

fn is_gradient(op: &Op) -> bool {
    op.region == Region::Microbatch && matches!(op.pass, Pass::BI | Pass::BW)
}

/// For each gradient op that is the first to need some of them, the ops that are recomputed
/// right before it, in graph order.
fn twins(graph: &Graph, chosen: &BTreeSet<OpId>) -> BTreeMap<OpId, Vec<OpId>> {
    let mut made: BTreeSet<OpId> = BTreeSet::new();
    let mut before = BTreeMap::new();
    for (id, op) in graph.iter().filter(|(_, op)| is_gradient(op)) {
        let mut open = vec![id];
        let mut now = BTreeSet::new();
        while let Some(next) = open.pop() {
            for &v in &graph.op(next).inputs {
                let from = graph.value(v).producer;
                let repeats = chosen.contains(&from) && graph.op(from).layer == op.layer;
                if repeats && made.insert(from) {
                    now.insert(from);
                    open.push(from);
                }
            }
        }
        if !now.is_empty() {
            before.insert(id, now.into_iter().collect());
        }
    }
    before
}

/// The training graph in which the results of `chosen` ops are recomputed. Value ids change,
/// paths do not. `training` is a graph in which nothing is recomputed yet.
///
/// Fails when an op may not be recomputed ([`can_recompute`]).
pub fn recompute(
    training: &TrainingGraph,
    chosen: &BTreeSet<OpId>,
) -> Result<TrainingGraph, GraphError> {
    let graph = &training.graph;
    if let Some(&wrong) = chosen.iter().find(|&&id| !can_recompute(graph.op(id))) {
        return Err(GraphError::Recompute {
            path: graph.op(wrong).path.clone(),
            problem: "is no op of the forward pass between two layer boundaries",
        });
    }
    let before = twins(graph, chosen);
    if before.is_empty() {
        return Ok(training.clone());
    }
    let mut copy = Copied {
        from: graph,
        out: graph.without_ops(),
        moved: Vec::with_capacity(graph.values().len()),
        twin: BTreeMap::new(),
    };
    for (id, op) in graph.iter() {
        for &source in before.get(&id).into_iter().flatten() {
            copy.twin(source)?;
        }
        copy.op(op)?;
    }
    let Copied { mut out, moved, .. } = copy;
    out.outputs = graph.outputs.iter().map(|v| moved[v.index()]).collect();
    let state = |s: &State| State {
        read: moved[s.read.index()],
        write: moved[s.write.index()],
        ..s.clone()
    };
    Ok(TrainingGraph {
        states: training.states.iter().map(state).collect(),
        loss: moved[training.loss.index()],
        grad_norm: training.grad_norm.map(|v| moved[v.index()]),
        graph: out,
    })
}

/// A graph that is being copied with twins between its ops.
struct Copied<'a> {
    from: &'a Graph,
    out: Graph,
    /// By old value, the new one.
    moved: Vec<ValueId>,
    /// By old value, its twin, once it is made.
    twin: BTreeMap<ValueId, ValueId>,
}

impl Copied<'_> {
    /// Gradients and twins read twins of their own layer where there are any.
    fn operands(&self, op: &Op, of_twins: bool) -> Vec<ValueId> {
        let operand = |v: &ValueId| {
            let same_layer = self.from.op(self.from.value(*v).producer).layer == op.layer;
            let twin = self.twin.get(v).filter(|_| of_twins && same_layer);
            twin.copied().unwrap_or(self.moved[v.index()])
        };
        op.inputs.iter().map(operand).collect()
    }

    fn op(&mut self, op: &Op) -> Result<(), GraphError> {
        let operands = self.operands(op, is_gradient(op));
        self.out.copy(self.from, op, operands, &mut self.moved)
    }

    fn twin(&mut self, source: OpId) -> Result<(), GraphError> {
        let source = self.from.op(source);
        let place = Place {
            path: format!("recompute.{}", source.path),
            pass: Pass::Recompute,
            region: Region::Microbatch,
            layer: source.layer,
        };
        let operands = self.operands(source, true);
        let of = self.moved[source.outputs[0].index()];
        let origin = Origin::Twin {
            of: self.out.value(of).producer,
        };
        let kind = source.kind.clone();
        let results = self
            .out
            .add_made(&[self.from], kind, &operands, place, origin)?;
        self.twin
            .extend(source.outputs.iter().copied().zip(results));
        Ok(())
    }
}

/// The value that a twin's result repeats; any other value is its own.
pub fn source_value(graph: &Graph, v: ValueId) -> ValueId {
    let value = graph.value(v);
    match graph.op(value.producer).origin {
        Origin::Twin { of } => {
            let results = &graph.op(of).outputs;
            results.get(value.result as usize).copied().unwrap_or(v)
        }
        _ => v,
    }
}
