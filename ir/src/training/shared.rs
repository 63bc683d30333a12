//! Parameters used outside their owner's layer (tied embeddings, shared tables).
//!
//! The owner's prepared value enters each other layer through one `StepBegin` `Layout` op,
//! `shared.<layer>.<param path>`: so its layout in the using layer is one decision, it moves
//! between stages once per step and not once per microbatch, and nothing is copied when
//! owner and user agree.

use super::{State, TrainingGraph};
use crate::graph::Place;
use crate::{Graph, GraphError, LayerId, Op, OpKind, Origin, Pass, Region, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// Inserts the `shared.*` ops. Value ids change, paths do not.
pub(super) fn share_parameters(training: TrainingGraph) -> Result<TrainingGraph, GraphError> {
    let graph = &training.graph;
    let wanted: BTreeSet<(LayerId, ValueId)> = graph
        .ops()
        .iter()
        .filter(|op| op.region == Region::Microbatch)
        .flat_map(|op| op.inputs.iter().filter_map(move |&v| foreign(graph, op, v)))
        .collect();
    if wanted.is_empty() {
        return Ok(training);
    }
    let mut out = graph.without_ops();
    let mut map: Vec<ValueId> = Vec::with_capacity(graph.values().len());
    let mut shared: BTreeMap<(LayerId, ValueId), ValueId> = BTreeMap::new();
    let mut begun = true;
    for op in graph.ops() {
        if begun && op.region != Region::StepBegin {
            begun = false;
            for &(layer, v) in &wanted {
                let producer = graph.value(v).producer;
                let of = graph.op(producer).origin.of().unwrap_or(producer);
                let name = graph.layers.get(layer.index()).map_or("", String::as_str);
                let place = Place {
                    path: format!("shared.{name}.{}", graph.op(of).path),
                    pass: Pass::Update,
                    region: Region::StepBegin,
                    layer: Some(layer),
                };
                let here = |v: ValueId| map[v.index()];
                let of = out.value(here(graph.op(of).outputs[0])).producer;
                let (kind, origin) = (OpKind::Layout, Origin::Shared { of });
                let inside = out.add_made1(&[graph], kind, &[here(v)], place, origin)?;
                shared.insert((layer, v), inside);
            }
        }
        let inputs: Vec<ValueId> = op
            .inputs
            .iter()
            .map(
                |&v| match foreign(graph, op, v).filter(|_| op.region == Region::Microbatch) {
                    Some(key) => shared[&key],
                    None => map[v.index()],
                },
            )
            .collect();
        out.copy(graph, op, inputs, &mut map)?;
    }
    out.outputs = graph.outputs.iter().map(|v| map[v.index()]).collect();
    let moved = |s: &State| State {
        read: map[s.read.index()],
        write: map[s.write.index()],
        ..s.clone()
    };
    Ok(TrainingGraph {
        states: training.states.iter().map(moved).collect(),
        loss: map[training.loss.index()],
        grad_norm: training.grad_norm.map(|v| map[v.index()]),
        graph: out,
    })
}

/// The layer and value when `op` uses a `StepBegin` value of another layer.
fn foreign(graph: &Graph, op: &Op, v: ValueId) -> Option<(LayerId, ValueId)> {
    let producer = graph.op(graph.value(v).producer);
    let here = op.layer?;
    let there = producer.layer?;
    (producer.region == Region::StepBegin && here != there).then_some((here, v))
}
