//! Tensors that rest in other memories than the device's (`ir::offload`): their bytes do not count
//! on the device but for what is staged, and their copies take time.
//!
//! Like collectives, copies are charged in full: the additive objective knows no overlap, and the
//! simulator hides behind kernels what can be hidden. Copies to and from another memory are two
//! streams, so a tensor that goes both ways in one phase counts once.

use super::{Choice, Group, Phases, Setting};
use ir::offload::TensorClass;
use ir::program::Space;
use ir::training::StateRole;
use ir::{Op, OpKind, Pass, Region, Task};

/// Bytes of a choice that are staged, by phase.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Staged {
    pub step: u64,
    pub microbatch: u64,
}

/// Takes what rests elsewhere out of the bytes of a group's choices, and adds the copies' time.
pub(super) fn rest(s: &Setting<'_>, group: &mut Group) {
    let ops = group.ops.clone();
    for choice in &mut group.choices {
        for (class, space, bytes) in moved(s, &ops, choice) {
            let counted = match class {
                TensorClass::Activations => &mut choice.saved_bytes,
                _ => &mut choice.static_bytes,
            };
            *counted = counted.saturating_sub(bytes);
            choice.time = choice.time.plus(copies(s, class, space, bytes));
        }
    }
}

/// The bytes that one choice has staged at a time.
pub(crate) fn staged(s: &Setting<'_>, group: &Group, choice: &Choice) -> Staged {
    let mut staged = Staged::default();
    for (class, _, bytes) in moved(s, &group.ops, choice) {
        let of_phase = match class {
            TensorClass::Optimizer => &mut staged.step,
            _ => &mut staged.microbatch,
        };
        *of_phase = of_phase.saturating_add(bytes);
    }
    staged
}

/// The tensors of a choice that rest elsewhere: class, memory and bytes.
fn moved(s: &Setting<'_>, ops: &[ir::OpId], choice: &Choice) -> Vec<(TensorClass, Space, u64)> {
    let spaces = s.pins.spaces();
    if spaces.is_empty() {
        return Vec::new();
    }
    let graph = &s.training.graph;
    let parts = ops.iter().zip(&choice.ops);
    let of = parts.filter_map(|(&id, part)| {
        let op = graph.op(id);
        let class = class_of(s, op)?;
        let bytes = match class {
            TensorClass::Activations => part.kept_bytes,
            _ => part.bytes,
        };
        let space = *spaces.get(&class)?;
        (bytes > 0).then_some((class, space, bytes))
    });
    of.collect()
}

/// The class of an op's result, where that outlives its layer's pass.
fn class_of(s: &Setting<'_>, op: &Op) -> Option<TensorClass> {
    match op.kind {
        OpKind::State { .. } => {
            let state = s.index.state(s.training, op.outputs[0])?;
            match state.role {
                StateRole::Parameter
                    if s.train.parameters_at_rest() == s.train.precision.compute() =>
                {
                    Some(TensorClass::Parameters)
                }
                StateRole::Scalar => None,
                _ => Some(TensorClass::Optimizer),
            }
        }
        OpKind::Cast { .. } if op.region == Region::StepBegin => Some(TensorClass::Parameters),
        ref kind if op.region == Region::Microbatch && op.pass == Pass::F && !kind.is_source() => {
            Some(TensorClass::Activations)
        }
        _ => None,
    }
}

/// The time of the copies of a tensor.
fn copies(s: &Setting<'_>, class: TensorClass, space: Space, bytes: u64) -> Phases {
    let rate = |from, to| s.cluster.copy_bytes_per_s(s.mesh.devices, from, to);
    let seconds = |from, to| rate(from, to).map_or(f64::INFINITY, |rate| bytes as f64 / rate);
    let into = seconds(space, Space::Device);
    let out = seconds(Space::Device, space);
    let both = into.max(out);
    let (forward, backward, step) = match class {
        TensorClass::Optimizer => (0.0, 0.0, both),
        TensorClass::Parameters => match s.train.task {
            Task::Training => (into, into, out),
            Task::Inference => (into, 0.0, 0.0),
        },
        TensorClass::Activations => (out, into, 0.0),
    };
    Phases {
        forward,
        backward,
        step,
    }
}
