//! Recomputation: does each twin repeat its forward op, and does the backward pass read twins
//! where the plan says that results are not kept?
//!
//! Derived from the training graph's ops alone. A twin repeats its source when it has the
//! source's kind and attributes (random keys among them) in the same layer, and each of its
//! operands is the source's operand or that operand's twin. By induction over the order of ops
//! it then has the source's bits.

use super::Home;
use crate::report::Report;
use ir::plan::{Plan, absolute_path};
use ir::training::TrainingGraph;
use ir::{Graph, LayerId, Op, Pass, Region, ValueId};
use std::collections::BTreeSet;

/// How a twin's path begins.
const PREFIX: &str = "recompute.";

pub(super) fn check(plan: &Plan, training: &TrainingGraph, layers: &[Home], report: &mut Report) {
    let graph = &training.graph;
    for op in graph.ops().iter().filter(|op| op.pass == Pass::Recompute) {
        if let Some((expected, actual)) = twin_problem(graph, op) {
            report.add(op.path.clone(), "recompute", expected, actual);
        }
    }
    for (i, home) in layers.iter().enumerate() {
        not_kept(plan, graph, LayerId::new(i), *home, report);
    }
}

fn source<'a>(graph: &'a Graph, twin: &Op) -> Option<&'a Op> {
    let path = twin.path.strip_prefix(PREFIX)?;
    graph.find(path).map(|id| graph.op(id))
}

fn twin_problem(graph: &Graph, twin: &Op) -> Option<(String, String)> {
    let Some(source) = source(graph, twin).filter(|s| s.pass == Pass::F) else {
        return Some(("the twin of a forward op".into(), "of none".into()));
    };
    let (a, b) = ((&twin.kind, twin.layer), (&source.kind, source.layer));
    if a != b || twin.region != Region::Microbatch || twin.inputs.len() != source.inputs.len() {
        return Some((
            format!("{:?} of {:?}, as `{}`", b.0, b.1, source.path),
            format!("{:?} of {:?} in {:?}", a.0, a.1, twin.region),
        ));
    }
    let mut pairs = twin.inputs.iter().zip(&source.inputs);
    let (&got, &wanted) = pairs.find(|(got, wanted)| !repeats(graph, **got, **wanted))?;
    Some((
        format!("`{}` or its twin", graph.value_name(wanted)),
        format!("`{}`", graph.value_name(got)),
    ))
}

/// True when `got` is `wanted` or the same result of its twin.
fn repeats(graph: &Graph, got: ValueId, wanted: ValueId) -> bool {
    let (a, b) = (graph.value(got), graph.value(wanted));
    let twin = graph.op(a.producer);
    let of_twin = || {
        twin.pass == Pass::Recompute
            && a.result == b.result
            && source(graph, twin).is_some_and(|s| s.path == graph.op(b.producer).path)
    };
    got == wanted || of_twin()
}

/// No later pass of the layer reads what the plan says is not kept.
fn not_kept(plan: &Plan, graph: &Graph, layer: LayerId, home: Home, report: &mut Report) {
    let name = graph.layers.get(layer.index()).map_or("", String::as_str);
    let listed = &plan.layer_strategies[home.strategy].recompute;
    let dropped: BTreeSet<ValueId> = listed
        .iter()
        .filter_map(|relative| graph.find(&absolute_path(relative, name)))
        .flat_map(|id| graph.op(id).outputs.iter().copied())
        .collect();
    if dropped.is_empty() {
        return;
    }
    let later = graph.ops().iter().filter(|op| {
        op.layer == Some(layer) && op.region == Region::Microbatch && op.pass != Pass::F
    });
    for op in later {
        if let Some(&v) = op.inputs.iter().find(|v| dropped.contains(v)) {
            let expected = format!("the twin of `{}`, which is not kept", graph.value_name(v));
            report.add(op.path.clone(), "recompute", expected, "the value itself");
        }
    }
}
