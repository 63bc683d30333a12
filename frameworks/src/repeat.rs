//! Checkpoints that run a layer's forward to its end.
//!
//! A plan recomputes what a gradient needs, so of a layer all but its last matmul and what
//! follows. A framework that calls the layer's forward once more (`CheckpointFunction` of
//! Megatron-LM and DeepSpeed, PyTorch's checkpoint before 2.1) also does these, and their
//! collectives. They are priced as in the forward pass, at the layer's last recomputed kernel.
//!
//! Where parameters are sharded, such a framework may also release what it gathered for the
//! repeated forward, and gather it again for the gradients ([`gather_again`]).
//!
//! A layer counts as recomputed where one of its matmuls is: choices that make only norms,
//! activations or attention again are kernels' own.

use cost_model::costs::InstrCost;
use ir::collective::CollectiveKind;
use ir::op::OpKind;
use ir::program::{
    BufferClass, CollectiveItem, InstrKind, Instruction, RoleProgram, Template, TemplateKind,
};
use ir::{BufferId, LayerId, Pass};
use std::collections::{HashMap, HashSet};

/// Adds what is run in vain to `costs` and to `host_s`, the times in which the host issues it,
/// both by template and instruction.
pub(super) fn add(role: &RoleProgram, costs: &mut [Vec<InstrCost>], host_s: &mut [Vec<f64>]) {
    for (b, backward) in role.templates.iter().enumerate() {
        if !backward.kind.is_backward() {
            continue;
        }
        let forward = role
            .templates
            .iter()
            .position(|t| t.kind == TemplateKind::Forward && t.chunk == backward.chunk);
        let Some(f) = forward else { continue };
        let instructions = backward.instructions.iter();
        let again: HashSet<&str> = instructions.filter_map(|x| Some(twin(x)?.0)).collect();
        let layers = recomputed_layers(backward);
        let mut made: HashMap<BufferId, usize> = HashMap::new();
        for (i, instruction) in role.templates[f].instructions.iter().enumerate() {
            let place = match &instruction.kind {
                InstrKind::Compute { path, .. } if !again.contains(path.as_str()) => {
                    instruction.layer.and_then(|l| layers.get(&l)).copied()
                }
                InstrKind::Collective { items, .. } => {
                    items.iter().find_map(|item| made.get(&item.input)).copied()
                }
                _ => None,
            };
            if let Some(place) = place {
                made.extend(instruction.writes().into_iter().map(|b| (b, place)));
                let (seconds, host) = (costs[f][i].seconds, host_s[f][i]);
                costs[b][place].seconds += seconds;
                host_s[b][place] += host;
            }
        }
    }
}

/// The path of the forward op that an instruction recomputes, with its kind.
fn twin(instruction: &Instruction) -> Option<(&str, &OpKind)> {
    let (path, kind) = op(instruction).filter(|_| instruction.pass == Pass::Recompute)?;
    // A program says no more of a twin than its label.
    Some((path.strip_prefix("recompute.").unwrap_or(path), kind))
}

/// The layers that a backward template recomputes, with the last of their recomputed matmuls.
fn recomputed_layers(backward: &Template) -> HashMap<LayerId, usize> {
    let instructions = backward.instructions.iter().enumerate();
    let matmuls = instructions.filter_map(|(i, x)| match twin(x)?.1 {
        OpKind::DotGeneral { .. } => Some((x.layer?, i)),
        _ => None,
    });
    matmuls.collect()
}

/// Prices the gathers of parameters in a backward template twice, as far as what they gather is
/// read both by a kernel of a recomputed layer that is run again and by one that is not.
pub(super) fn gather_again(role: &RoleProgram, template: &Template, costs: &mut [InstrCost]) {
    if !template.kind.is_backward() {
        return;
    }
    let lasts = |b: BufferId| {
        let class = role.buffer(b).class;
        matches!(class, BufferClass::Persistent | BufferClass::Step)
    };
    let mut gathered: HashSet<BufferId> = HashSet::new();
    for item in template.instructions.iter().flat_map(gathers) {
        if lasts(item.input) || gathered.contains(&item.input) {
            gathered.insert(item.output);
        }
    }
    let layers = recomputed_layers(template);
    // By buffer: read by what recomputes a layer, by other kernels.
    let mut read: HashMap<BufferId, (bool, bool)> = HashMap::new();
    for (instruction, cost) in template.instructions.iter().zip(costs).rev() {
        if op(instruction).is_some() {
            let is_of_layer = instruction.layer.is_some_and(|l| layers.contains_key(&l));
            let again = is_of_layer && twin(instruction).is_some();
            for b in instruction.reads() {
                let by = read.entry(b).or_default();
                *by = (by.0 || again, by.1 || !again);
            }
        }
        let (mut all, mut twice) = (0.0, 0.0);
        for item in gathers(instruction) {
            let after = read.get(&item.output).copied().unwrap_or_default();
            let by = read.entry(item.input).or_default();
            *by = (by.0 || after.0, by.1 || after.1);
            let bytes = role.buffer(item.output).bytes as f64;
            all += bytes;
            if after == (true, true) && gathered.contains(&item.output) {
                twice += bytes;
            }
        }
        if twice > 0.0 {
            cost.seconds *= 1.0 + twice / all;
        }
    }
}

/// The items that an instruction gathers; none for another kind.
fn gathers(instruction: &Instruction) -> &[CollectiveItem] {
    match &instruction.kind {
        InstrKind::Collective {
            kind: CollectiveKind::AllGather,
            items,
            ..
        } => items,
        _ => &[],
    }
}

fn op(instruction: &Instruction) -> Option<(&str, &OpKind)> {
    match &instruction.kind {
        InstrKind::Compute { path, kind, .. } => Some((path, kind)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use cost_model::costs::CostClass;
    use ir::program::Template;

    /// The pass of the op of a path, as training calls it.
    fn pass(path: &str) -> Pass {
        match path.starts_with("recompute.") {
            true => Pass::Recompute,
            false => Pass::BI,
        }
    }

    /// A layer of `a`, a matmul, and what follows; `again` are the twins in its backward.
    fn added(again: &[&str]) -> Vec<f64> {
        let mut role = testing::role(0, 0, 1);
        let instruction = |path: &str, made: u32| {
            let einsum = ir::op::Einsum::parse("mk,kn->mn").unwrap();
            let kind = match path.ends_with("dot") {
                true => OpKind::DotGeneral { einsum },
                false => OpKind::Unary {
                    f: ir::op::Unary::Relu,
                },
            };
            let kind = InstrKind::Compute {
                path: path.into(),
                kind,
                inputs: vec![],
                outputs: vec![BufferId(made)],
            };
            Instruction {
                layer: Some(LayerId(0)),
                pass: pass(path),
                ..testing::instr(kind, crate::testing::KERNELS, &[])
            }
        };
        let template = |kind, paths: Vec<String>| Template {
            kind,
            chunk: 0,
            instructions: paths
                .iter()
                .zip(0..)
                .map(|(p, i)| instruction(p, i))
                .collect(),
        };
        let forward = ["norm", "first.dot", "last.dot", "add"].map(String::from);
        let twins = again.iter().map(|p| format!("recompute.{p}"));
        role.templates = vec![
            template(TemplateKind::Forward, forward.to_vec()),
            template(TemplateKind::Backward, twins.collect()),
        ];
        let cost = |seconds| InstrCost {
            seconds,
            class: CostClass::Compute,
        };
        let forward = [1.0, 10.0, 20.0, 2.0].map(cost).to_vec();
        let mut costs = vec![forward, vec![cost(0.0); again.len()]];
        let mut host_s = vec![vec![0.5; 4], vec![0.0; again.len()]];
        add(&role, &mut costs, &mut host_s);
        let hosts: f64 = host_s[1].iter().sum();
        let seconds = costs[1].iter().map(|c| c.seconds);
        seconds.chain([hosts]).collect()
    }

    /// Seconds of gathers of a second each, of `[(of, into), ..]` buffers, where ops of these paths
    /// read these buffers. The first three buffers are of `class`.
    fn gathered(class: BufferClass, gathers: &[&[[u32; 2]]], ops: &[(&str, u32)]) -> Vec<f64> {
        let mut role = testing::role(0, 0, 2);
        let class_of = |i| match i < 3 {
            true => class,
            false => BufferClass::Transient,
        };
        role.buffers = (0..10)
            .map(|i| testing::buffer("x", class_of(i), &[4]))
            .collect();
        let gather = |items: &&[[u32; 2]]| InstrKind::Collective {
            contract: ir::Contract::new(
                CollectiveKind::AllGather,
                ir::DType::F32,
                ir::Order::Fixed,
            ),
            kind: CollectiveKind::AllGather,
            axes: vec![ir::AxisId(0)],
            items: items
                .iter()
                .map(|&[input, output]| CollectiveItem {
                    step: ir::reshard::LayoutStep::AllGather {
                        dim: 0,
                        axis: ir::AxisId(0),
                    },
                    input: BufferId(input),
                    output: BufferId(output),
                })
                .collect(),
        };
        let op = |&(path, reads): &(&str, u32)| InstrKind::Compute {
            path: path.to_string(),
            kind: OpKind::DotGeneral {
                einsum: ir::op::Einsum::parse("mk,kn->mn").unwrap(),
            },
            inputs: vec![BufferId(reads)],
            outputs: vec![BufferId(9)],
        };
        let kinds = gathers.iter().map(gather).chain(ops.iter().map(op));
        let instruction = |kind: InstrKind| Instruction {
            pass: match &kind {
                InstrKind::Compute { path, .. } => pass(path),
                _ => Pass::BI,
            },
            layer: Some(LayerId(0)),
            ..testing::instr(kind, crate::testing::KERNELS, &[])
        };
        let template = Template {
            kind: TemplateKind::Backward,
            chunk: 0,
            instructions: kinds.map(instruction).collect(),
        };
        let cost = InstrCost {
            seconds: 1.0,
            class: CostClass::Collective,
        };
        let mut costs = vec![cost; template.instructions.len()];
        gather_again(&role, &template, &mut costs);
        costs.iter().map(|c| c.seconds).collect()
    }

    #[test]
    fn parameters_of_recomputed_layers_are_gathered_twice() {
        let (again, grad) = ("recompute.h.0.y", "grad.h.0.y.lhs");
        let of = |class, paths: &[(&str, u32)]| gathered(class, &[&[[0, 3]]], paths)[0];
        let step = |paths: &[(&str, u32)]| of(BufferClass::Step, paths);
        assert_eq!(step(&[(again, 3), (grad, 3)]), 2.0);
        assert_eq!(step(&[(again, 3), ("recompute.h.0.z", 3)]), 1.0);
        assert_eq!(step(&[(grad, 3)]), 1.0);
        // An activation is kept.
        let kept = BufferClass::PerMicrobatch { slots: 1 };
        assert_eq!(of(kept, &[(again, 3), (grad, 3)]), 1.0);
    }

    #[test]
    fn of_a_bucket_the_share_that_is_read_twice_counts() {
        let (again, grad) = ("recompute.h.0.y", "grad.h.0.y.lhs");
        let bucket: &[[u32; 2]] = &[[0, 3], [1, 4]];
        let seconds = gathered(
            BufferClass::Step,
            &[bucket],
            &[(again, 3), (grad, 3), (grad, 4)],
        );
        assert_eq!(seconds, [1.5, 1.0, 1.0, 1.0]);
        // Over one axis and then another.
        let chain: [&[[u32; 2]]; 2] = [&[[0, 3]], &[[3, 4]]];
        let seconds = gathered(BufferClass::Step, &chain, &[(again, 4), (grad, 4)]);
        assert_eq!(seconds, [2.0, 2.0, 1.0, 1.0]);
    }

    #[test]
    fn a_layer_that_is_recomputed_runs_to_its_end() {
        // The last matmul and the sum behind it, at the last matmul that is made again.
        assert_eq!(added(&["norm", "first.dot"]), [0.0, 22.0, 1.0]);
        // Norms alone are no checkpoint.
        assert_eq!(added(&["norm"]), [0.0, 0.0]);
        assert_eq!(added(&["norm", "first.dot", "last.dot", "add"]), [0.0; 5]);
    }
}
