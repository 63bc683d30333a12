//! Recomputation: each twin repeats its forward op, and the backward pass reads twins where the
//! plan says that results are not kept.
//!
//! Derived from the training graph's ops alone. What runs again in the backward pass has to be
//! the twin of an op of the forward pass, by its origin. It repeats that op when it has its kind
//! and attributes (random keys among them) in the same layer, and each of its operands is the
//! source's operand or that operand's twin. By induction over the order of ops it then has the
//! source's bits.

use super::Home;
use crate::report::Report;
use ir::plan::{Plan, absolute_path};
use ir::training::TrainingGraph;
use ir::{Graph, LayerId, Op, OpId, Origin, Pass, Region, ValueId};
use std::collections::BTreeSet;

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

fn source(twin: &Op) -> Option<OpId> {
    twin.origin
        .of()
        .filter(|&of| twin.origin == Origin::Twin { of })
}

fn twin_problem(graph: &Graph, twin: &Op) -> Option<(String, String)> {
    let of = source(twin).map(|id| graph.op(id));
    let Some(source) = of.filter(|s| s.pass == Pass::F) else {
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

/// Says whether `got` is `wanted` or the same result of its twin.
fn repeats(graph: &Graph, got: ValueId, wanted: ValueId) -> bool {
    let (a, b) = (graph.value(got), graph.value(wanted));
    let twin = graph.op(a.producer);
    let of_twin =
        || twin.pass == Pass::Recompute && a.result == b.result && source(twin) == Some(b.producer);
    got == wanted || of_twin()
}

/// Reports later passes of the layer that read a result which the plan says is not kept.
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// The problems of the twins of a layer `a -> b -> c` that ends in these lines.
    fn problems(twins: &str) -> Vec<String> {
        let text = format!(
            r#"graph "test" {{
  layers "l", "m"
  %x = constant {{value: 1}} : f32[] @ x F microbatch layer 0
  %a = unary {{f: relu}} %x : f32[] @ l.a F microbatch layer 0
  %b = unary {{f: silu}} %a : f32[] @ l.b F microbatch layer 0
  %c = binary {{f: mul}} %a, %b : f32[] @ l.c F microbatch layer 0
{twins}
  return %c
}}
"#
        );
        let graph = ir::text::parse(&text).unwrap();
        let twins = graph.ops().iter().filter(|op| op.pass == Pass::Recompute);
        twins
            .filter_map(|op| twin_problem(&graph, op))
            .map(|(expected, actual)| format!("expected {expected}, found {actual}"))
            .collect()
    }

    #[test]
    fn twins_repeat_their_sources_or_are_found() {
        let fine =
            "  %ra = unary {f: relu} %x : f32[] @ again.a Recompute microbatch twin of %a layer 0
  %rc = binary {f: mul} %ra, %b : f32[] @ again.c Recompute microbatch twin of %c layer 0";
        assert_eq!(problems(fine), Vec::<String>::new());
        for (wrong, expected) in [
            (
                "  %ra = unary {f: silu} %x : f32[] @ recompute.l.a Recompute microbatch twin of %a layer 0",
                "expected Unary { f: Relu } of Some(layer0), as `l.a`, found Unary { f: Silu } of Some(layer0) in Microbatch",
            ),
            (
                "  %ra = unary {f: relu} %x : f32[] @ recompute.l.a Recompute microbatch twin of %a layer 1",
                "expected Unary { f: Relu } of Some(layer0), as `l.a`, found Unary { f: Relu } of Some(layer1) in Microbatch",
            ),
            (
                "  %rb = unary {f: silu} %x : f32[] @ recompute.l.b Recompute microbatch twin of %b layer 0",
                "expected `l.a` or its twin, found `x`",
            ),
            (
                "  %rc = binary {f: mul} %b, %b : f32[] @ recompute.l.c Recompute microbatch twin of %c layer 0",
                "expected `l.a` or its twin, found `l.b`",
            ),
            (
                "  %rd = unary {f: relu} %x : f32[] @ recompute.l.a Recompute microbatch layer 0",
                "expected the twin of a forward op, found of none",
            ),
        ] {
            assert_eq!(problems(wrong), [expected]);
        }
    }
}
