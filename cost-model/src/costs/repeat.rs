//! Checkpoints that run a layer's forward to its end.
//!
//! A plan recomputes what a gradient needs, so of a layer all but its last matmul and what
//! follows. A framework that calls the layer's forward once more (`CheckpointFunction` of
//! Megatron-LM and DeepSpeed, PyTorch's checkpoint before 2.1) also does these, and their
//! collectives. They are priced as in the forward pass, at the layer's last recomputed kernel.
//!
//! A layer counts as recomputed where one of its matmuls is: choices that make only norms,
//! activations or attention again are kernels' own.

use super::InstrCost;
use ir::op::OpKind;
use ir::program::{InstrKind, Instruction, RoleProgram, TemplateKind};
use ir::training::source_path;
use ir::{BufferId, LayerId};
use std::collections::{HashMap, HashSet};

/// Adds what is run in vain to `costs` and to `host_s`, the times in which the host issues it,
/// both by template and instruction.
pub(super) fn add(role: &RoleProgram, costs: &mut [Vec<InstrCost>], host_s: &mut [Vec<f64>]) {
    for (b, backward) in role.templates.iter().enumerate() {
        if backward.kind != TemplateKind::Backward {
            continue;
        }
        let forward = role
            .templates
            .iter()
            .position(|t| t.kind == TemplateKind::Forward && t.chunk == backward.chunk);
        let Some(f) = forward else { continue };
        let twins = backward
            .instructions
            .iter()
            .enumerate()
            .filter_map(|(i, x)| {
                let (path, kind) = op(x)?;
                let source = source_path(path);
                (source != path).then_some((i, source, kind))
            });
        let twins: Vec<(usize, &str, &OpKind)> = twins.collect();
        let again: HashSet<&str> = twins.iter().map(|t| t.1).collect();
        let matmuls = twins.iter().filter_map(|(i, _, kind)| {
            let is_matmul = matches!(kind, OpKind::DotGeneral { .. });
            let layer = backward.instructions[*i].layer.filter(|_| is_matmul)?;
            Some((layer, *i))
        });
        // The last one of each layer counts.
        let layers: HashMap<LayerId, usize> = matmuls.collect();
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

fn op(instruction: &Instruction) -> Option<(&str, &OpKind)> {
    match &instruction.kind {
        InstrKind::Compute { path, kind, .. } => Some((path, kind)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::costs::CostClass;
    use crate::testing;
    use ir::program::{Stream, Template};

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
                ..testing::instr(kind, Stream::Compute, &[])
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
            queue: 0,
            ahead: false,
        };
        let forward = [1.0, 10.0, 20.0, 2.0].map(cost).to_vec();
        let mut costs = vec![forward, vec![cost(0.0); again.len()]];
        let mut host_s = vec![vec![0.5; 4], vec![0.0; again.len()]];
        add(&role, &mut costs, &mut host_s);
        let hosts: f64 = host_s[1].iter().sum();
        let seconds = costs[1].iter().map(|c| c.seconds);
        seconds.chain([hosts]).collect()
    }

    #[test]
    fn a_layer_that_is_recomputed_runs_to_its_end() {
        // The last matmul and the sum behind it, at the last matmul that is made again.
        assert_eq!(added(&["norm", "first.dot"]), [0.0, 22.0, 1.0]);
        // Norms alone are no checkpoint.
        assert_eq!(added(&["norm"]), [0.0, 0.0]);
        assert_eq!(added(&["norm", "first.dot", "last.dot", "add"])[4], 0.0);
    }
}
