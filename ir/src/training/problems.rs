//! The invariants of a training graph, as a check of a finished one.

use super::{StateRole, TrainingGraph};
use crate::{Op, OpKind, Pass, Region};
use std::collections::{BTreeMap, BTreeSet};

/// Every broken invariant of a training graph, each with the op it concerns; empty when it
/// is well-formed.
///
/// Checked: topological order; unique paths; ops in the order of their regions; layers that
/// exist; what may read what across regions and passes; states read at the begin and written
/// at the end of the step, or of every microbatch, with one type; the loss is accumulated, the norm a scalar.
pub fn problems(training: &TrainingGraph) -> Vec<String> {
    let mut found = Vec::new();
    order(training, &mut found);
    reads(training, &mut found);
    placement(training, &mut found);
    states(training, &mut found);
    results(training, &mut found);
    found
}

fn order(training: &TrainingGraph, found: &mut Vec<String>) {
    let graph = &training.graph;
    let mut paths = BTreeSet::new();
    let mut last_region = Region::StepBegin;
    for (id, op) in graph.iter() {
        if !paths.insert(&op.path) {
            found.push(format!("path `{}` is used twice", op.path));
        }
        if op.region < last_region {
            found.push(format!(
                "`{}` of {:?} stands behind ops of {last_region:?}",
                op.path, op.region
            ));
        }
        last_region = last_region.max(op.region);
        for &v in op.inputs.iter().filter(|v| graph.value(**v).producer >= id) {
            found.push(format!(
                "`{}` reads `{}`, which comes later",
                op.path,
                graph.value_name(v)
            ));
        }
    }
}

fn reads(training: &TrainingGraph, found: &mut Vec<String>) {
    let graph = &training.graph;
    for (id, op) in graph.iter() {
        for &v in &op.inputs {
            let from = graph.op(graph.value(v).producer);
            // The order check has reported those already.
            if graph.value(v).producer < id
                && let Some(why) = forbidden(from, op)
            {
                found.push(format!(
                    "`{}` reads `{}`: {why}",
                    op.path,
                    graph.value_name(v)
                ));
            }
        }
    }
}

/// Why `reader` may not read a result of `from`, if so.
fn forbidden(from: &Op, reader: &Op) -> Option<&'static str> {
    let accumulated = matches!(from.kind, OpKind::Accumulate { .. });
    match (from.region, reader.region) {
        (a, b) if a > b => Some("a region reads none that comes after it"),
        (Region::Microbatch, Region::StepEnd) if !accumulated => {
            Some("only accumulated values outlive their microbatch")
        }
        (_, Region::Microbatch) if accumulated => {
            Some("an accumulated value is complete at the end of the step only")
        }
        (Region::Microbatch, Region::Microbatch) => match (from.pass, reader.pass) {
            (Pass::BI | Pass::BW, Pass::F) => Some("the forward pass reads no gradients"),
            (Pass::BI | Pass::BW, Pass::Recompute) => Some("recomputation reads no gradients"),
            (Pass::Recompute, Pass::F) => Some("the forward pass reads nothing recomputed"),
            (Pass::Recompute, _) if from.layer != reader.layer => {
                Some("what is recomputed is for its own layer")
            }
            (Pass::BW, Pass::BI) => Some("gradients for inputs wait for no gradient for weights"),
            (Pass::Update, pass) if pass != Pass::Update => {
                Some("an update comes after the passes of its microbatch")
            }
            _ => None,
        },
        _ => None,
    }
}

fn placement(training: &TrainingGraph, found: &mut Vec<String>) {
    let is_asynchronous = training.is_asynchronous();
    let updates_in = match is_asynchronous {
        true => Region::Microbatch,
        false => Region::StepEnd,
    };
    for op in training.graph.ops() {
        if let Some(layer) = op
            .layer
            .filter(|l| l.index() >= training.graph.layers.len())
        {
            found.push(format!("`{}` is of {layer}, which does not exist", op.path));
        }
        if op.layer.is_none() && op.region == Region::Microbatch {
            found.push(format!(
                "`{}` runs in microbatches and has no layer",
                op.path
            ));
        }
        let updates_early = is_asynchronous && op.pass == Pass::Update;
        if (op.region == Region::Microbatch) == (op.pass == Pass::Update) && !updates_early {
            found.push(format!(
                "`{}` is of {:?} in {:?}",
                op.path, op.pass, op.region
            ));
        }
        let expected = match op.kind {
            OpKind::State { .. } => Region::StepBegin,
            OpKind::Input { .. } | OpKind::Accumulate { .. } => Region::Microbatch,
            OpKind::AdamW { .. } | OpKind::Sgd { .. } => updates_in,
            OpKind::GlobalNorm => Region::StepEnd,
            _ => op.region,
        };
        if op.region != expected {
            found.push(format!(
                "`{}` is in {:?}, expected {expected:?}",
                op.path, op.region
            ));
        }
    }
}

fn states(training: &TrainingGraph, found: &mut Vec<String>) {
    let graph = &training.graph;
    let written_in = match training.is_asynchronous() {
        true => Region::Microbatch,
        false => Region::StepEnd,
    };
    let mut by_path = BTreeMap::new();
    for s in &training.states {
        if by_path.insert(s.path.as_str(), s).is_some() {
            found.push(format!("state `{}` is listed twice", s.path));
        }
        if graph.value_name(s.read) != s.path
            || !matches!(
                graph.op(graph.value(s.read).producer).kind,
                OpKind::State { .. }
            )
        {
            found.push(format!(
                "state `{}` is read from `{}`",
                s.path,
                graph.value_name(s.read)
            ));
        }
        // Without gradients nothing is updated.
        let is_kept = training.grad_norm.is_none() && s.write == s.read;
        let region = graph.op(graph.value(s.write).producer).region;
        if !is_kept && region != written_in {
            found.push(format!(
                "state `{}` is written by `{}` in {region:?}, expected {written_in:?}",
                s.path,
                graph.value_name(s.write)
            ));
        }
        if graph.ty(s.read) != graph.ty(s.write) {
            found.push(format!(
                "state `{}` is {} and becomes {}",
                s.path,
                graph.ty(s.read),
                graph.ty(s.write)
            ));
        }
    }
    for s in training
        .states
        .iter()
        .filter(|s| s.role != StateRole::Scalar)
    {
        if by_path
            .get(s.param.as_str())
            .is_none_or(|p| p.role != StateRole::Parameter)
        {
            found.push(format!(
                "state `{}` belongs to `{}`, which is no parameter",
                s.path, s.param
            ));
        }
    }
    for op in graph
        .ops()
        .iter()
        .filter(|op| matches!(op.kind, OpKind::State { .. }))
    {
        if !by_path.contains_key(op.path.as_str()) {
            found.push(format!("state op `{}` is not listed", op.path));
        }
    }
}

fn results(training: &TrainingGraph, found: &mut Vec<String>) {
    let graph = &training.graph;
    let kind_of = |v| &graph.op(graph.value(v).producer).kind;
    if !matches!(kind_of(training.loss), OpKind::Accumulate { .. })
        || graph.ty(training.loss).shape.rank() != 0
    {
        found.push(format!(
            "the loss is `{}`, {}, expected an accumulated scalar",
            graph.value_name(training.loss),
            graph.ty(training.loss)
        ));
    }
    if let Some(norm) = training
        .grad_norm
        .filter(|&v| *kind_of(v) != OpKind::GlobalNorm)
    {
        found.push(format!(
            "the gradient norm is `{}`, expected a global norm",
            graph.value_name(norm)
        ));
    }
}
