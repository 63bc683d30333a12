//! The request, before anything is searched: the model as the pins want it, the sequences of
//! layers that stages may have, which values are saved.

use crate::PlanError;
use crate::layers::Layers;
use crate::pins::Pins;
use crate::stage::Sequences;
use ir::training::{Recompute, TrainingGraph, can_recompute, choose};
use ir::{Dim, Graph, OpId, Pass, Region, TrainSpec, ValueId, counted};
use std::collections::BTreeSet;

/// No dim of a tensor is longer.
const MAX_LENGTH: u64 = 1 << 40;

/// The model with its sequences stored for the context ranks, where the pins ask for it.
pub(super) fn in_zigzag_order(forward: &Graph, pins: &Pins) -> Result<Option<Graph>, PlanError> {
    match (pins.zigzag, pins.context) {
        (false, _) | (true, Some(1)) => Ok(None),
        (true, None) => Err(PlanError::Pins(
            "pinned context_order=zigzag is about the ranks of a context axis; pin context=N too"
                .into(),
        )),
        (true, Some(n)) => ir::zigzag::zigzag(forward, n.into())
            .map(Some)
            .map_err(|e| {
                PlanError::Pins(format!(
                    "pinned context_order=zigzag: {e}; leave it out for the natural order"
                ))
            }),
    }
}

/// The training with the updates that the pinned schedule makes. An asynchronous one makes one
/// for every microbatch, whose size is then a matter of learning and not of speed: it is not
/// searched.
pub(super) fn with_updates(train: &TrainSpec, pins: &Pins) -> Result<TrainSpec, PlanError> {
    let schedule = pins.schedule_kind().schedule();
    let minibatch = match (schedule.is_asynchronous(), pins.microbatch) {
        (false, _) => None,
        (true, Some(n)) => Some(n),
        (true, None) => {
            return Err(PlanError::Pins(format!(
                "pinned schedule={} updates weights after every microbatch, so the size of one changes what is learned and is not searched; pin it too, microbatch=N",
                schedule.name()
            )));
        }
    };
    if minibatch.is_some() && pins.offload.is_some() {
        return Err(PlanError::Pins(format!(
            "pinned schedule={} keeps versions of the weights in the devices' memory, and no tensors elsewhere; leave out the pin offload",
            schedule.name()
        )));
    }
    Ok(TrainSpec {
        minibatch,
        ..train.clone()
    })
}

/// The problem of the first tensor that nobody could hold, if there is one.
pub(super) fn odd_length(forward: &Graph) -> Option<String> {
    let odd = |dim: &Dim| matches!(dim, Dim::Fixed(n) if !(1..=MAX_LENGTH).contains(n));
    let mut ids = (0..forward.values().len()).map(ValueId::new);
    let value = ids.find(|&v| forward.ty(v).shape.0.iter().any(odd))?;
    let (name, ty) = (forward.value_name(value), forward.ty(value));
    Some(format!(
        "the graph's {name} is {ty}; dims from 1 to {MAX_LENGTH} can be planned for"
    ))
}

/// The sequences of layers that stages may have: all ranges, or those of a pinned split.
pub(super) fn sequences(layers: &Layers, pins: &Pins) -> Result<Sequences, PlanError> {
    let there_are = layers.kind.len();
    if let Some(stages) = pins.pipeline.filter(|&p| p as usize > there_are) {
        return Err(PlanError::Pins(format!(
            "pinned pipeline={stages} needs as many layers; the model has {there_are}, embedding and output layer included: pin pipeline={there_are} or less, or cut it finer with --layers {stages}"
        )));
    }
    let Some(counts) = &pins.split else {
        return Ok(Sequences::new(layers));
    };
    let n_layers: usize = counts.iter().fold(0, |sum, &n| sum.saturating_add(n));
    if n_layers != there_are {
        return Err(PlanError::Pins(format!(
            "pinned split has {}; the model has {there_are}, embedding and output layer included",
            counted(n_layers as u64, "layer")
        )));
    }
    Ok(Sequences::of_split(layers, counts))
}

pub(super) fn boundary(graph: &Graph) -> Option<ValueId> {
    let mut ops = graph.ops().iter();
    let op = ops.find(|op| op.origin == ir::Origin::Boundary)?;
    op.outputs.first().copied()
}

/// The ops that a named choice recomputes, but for those that the pins speak of.
pub(super) fn recomputed(
    training: &TrainingGraph,
    pins: &Pins,
    policy: Recompute,
) -> Result<BTreeSet<OpId>, PlanError> {
    let graph = &training.graph;
    for pin in &pins.recompute_ops {
        let mut matched = graph.ops().iter().filter(|op| pin.matches(&op.path));
        if !matched.any(can_recompute) {
            return Err(PlanError::Pins(format!(
                "pin recompute:{} matches no op of the forward pass inside a layer; `inspect --layers` lists their names",
                pin.op
            )));
        }
    }
    let fixed = |op: &ir::Op| pins.recomputes(&op.path);
    Ok(choose(training, policy, &fixed))
}

/// Which forward values a later pass uses, and which recomputed ones a gradient uses.
pub(super) fn saved_values(training: &TrainingGraph) -> Vec<bool> {
    let graph = &training.graph;
    let mut saved = vec![false; graph.values().len()];
    for op in graph
        .ops()
        .iter()
        .filter(|op| op.region == Region::Microbatch && op.pass != Pass::F)
    {
        for &v in &op.inputs {
            let producer = graph.op(graph.value(v).producer);
            let lives = match producer.pass {
                Pass::F => producer.region == Region::Microbatch,
                Pass::Recompute => op.pass != Pass::Recompute,
                _ => false,
            };
            saved[v.index()] |= lives && !producer.kind.is_source();
        }
    }
    saved
}
