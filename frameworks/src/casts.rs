//! Which operands of narrow matmuls an instruction casts, where software keeps the copies.
//!
//! Transformer Engine casts an operand once: one pass reads it and writes the copy for the
//! forward matmul and the one for the matmul of the weights' gradient, and all matmuls that
//! read it share them (q, k and v, gate and up are one matmul each there). What the forward
//! pass cast is kept for the backward pass in the narrow type only, parameters are kept in it
//! for the step, and what is gathered travels in it, so that a rank casts its own part.
//! A tensor that is cast once in a step is left out.

use crate::Software;
use ir::collective::CollectiveKind;
use ir::op::OpKind;
use ir::program::{BufferClass, InstrKind, Instruction, RoleProgram, TemplateKind};
use ir::{BufferId, DType};
use std::collections::{HashMap, HashSet};

/// The values of one template that have been made and cast so far.
pub(super) struct Casts<'a> {
    role: &'a RoleProgram,
    kind: TemplateKind,
    software: &'a Software,
    made: HashSet<BufferId>,
    cast: HashSet<(BufferId, DType)>,
    /// By buffer that was gathered: this rank's part of it.
    parts: HashMap<BufferId, BufferId>,
}

impl<'a> Casts<'a> {
    pub(super) fn new(role: &'a RoleProgram, kind: TemplateKind, software: &'a Software) -> Self {
        Casts {
            role,
            kind,
            software,
            made: HashSet::new(),
            cast: HashSet::new(),
            parts: HashMap::new(),
        }
    }

    /// The buffers that a matmul casts before it begins. Instructions are given in their order.
    pub(super) fn of(&mut self, instruction: &Instruction) -> Vec<BufferId> {
        let mut first = Vec::new();
        match &instruction.kind {
            InstrKind::Collective {
                kind: CollectiveKind::AllGather,
                items,
                ..
            } if self.software.narrow_gathers => {
                for item in items {
                    self.parts.insert(item.output, self.part(item.input));
                }
            }
            InstrKind::Compute {
                path,
                kind: OpKind::DotGeneral { .. },
                inputs,
                ..
            } if inputs.iter().all(|b| self.is_half(*b)) => {
                if let Some(narrow) = self.software.narrow_of(path) {
                    let part = |b: &BufferId| match narrow.is_gathered() {
                        true => self.part(*b),
                        false => *b,
                    };
                    let parts = inputs.iter().map(part);
                    first = parts.filter(|b| self.is_cast_here(*b)).collect();
                    first.retain(|b| self.cast.insert((*b, narrow.dtype)));
                }
            }
            _ => {}
        }
        let gathered = &self.parts;
        let written = instruction.writes().into_iter();
        self.made
            .extend(written.filter(|b| !gathered.contains_key(b)));
        first
    }

    fn part(&self, buffer: BufferId) -> BufferId {
        self.parts.get(&buffer).copied().unwrap_or(buffer)
    }

    /// Matmuls of another type, those of the loss, cast nothing.
    fn is_half(&self, buffer: BufferId) -> bool {
        matches!(self.role.buffer(buffer).dtype, DType::Bf16 | DType::F16)
    }

    /// Parameters are cast once in a step, what a forward pass keeps in that pass.
    fn is_cast_here(&self, buffer: BufferId) -> bool {
        match self.role.buffer(buffer).class {
            BufferClass::Persistent | BufferClass::Step => false,
            _ => self.kind == TemplateKind::Forward || self.made.contains(&buffer),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{buffer, instr, role};
    use crate::{Exception, Narrow, Scaling};
    use ir::op::Einsum;
    use ir::program::{Buffer, CollectiveItem};
    use ir::reshard::LayoutStep;

    #[test]
    fn operands_are_cast_once_and_kept() {
        let mut role = role(0, 0, 2);
        let microbatch = BufferClass::PerMicrobatch { slots: 1 };
        let classes = [
            ("w", BufferClass::Persistent),
            ("x part", microbatch),
            ("x", BufferClass::Transient),
            ("y", microbatch),
            ("loss x", BufferClass::Transient),
        ];
        let half = |(name, class): &(&str, BufferClass)| Buffer {
            dtype: DType::Bf16,
            ..buffer(name, *class, &[8])
        };
        role.buffers = classes.iter().map(half).collect();
        role.buffers[4].dtype = DType::F32;
        let ids = |all: &[u32]| all.iter().map(|&b| BufferId(b)).collect::<Vec<_>>();
        let named = |path: &str, inputs: &[u32], output: u32| {
            let kind = InstrKind::Compute {
                path: path.into(),
                kind: OpKind::DotGeneral {
                    einsum: Einsum::parse("mk,kn->mn").unwrap(),
                },
                inputs: ids(inputs),
                outputs: ids(&[output]),
            };
            instr(kind, crate::testing::KERNELS, &[])
        };
        let dot = |inputs: &[u32], output: u32| named("dot", inputs, output);
        let gather = instr(
            InstrKind::Collective {
                contract: ir::Contract::new(
                    CollectiveKind::AllGather,
                    ir::DType::F32,
                    ir::Order::Fixed,
                ),
                kind: CollectiveKind::AllGather,
                axes: Vec::new(),
                items: vec![CollectiveItem {
                    step: LayoutStep::AllReduce { axes: Vec::new() },
                    input: BufferId(1),
                    output: BufferId(2),
                }],
            },
            crate::testing::COLLECTIVES,
            &[],
        );
        let software = |narrow_gathers| Software {
            narrow: Some(Narrow {
                dtype: DType::F8e4m3,
                scaling: Scaling::Delayed,
                share: 1.0,
            }),
            exceptions: vec![Exception {
                ops: vec!["wide".into()],
                narrow: None,
            }],
            narrow_gathers,
            ..Software::plain("a framework")
        };
        let (narrow, plain) = (software(true), software(false));
        let mut forward = Casts::new(&role, TemplateKind::Forward, &narrow);
        assert_eq!(forward.of(&gather), []);
        // What runs in the activations' type casts nothing.
        assert_eq!(forward.of(&named("wide", &[2, 0], 3)), []);
        // This rank's part of x, for two matmuls; parameters and the loss never.
        assert_eq!(forward.of(&dot(&[2, 0], 3)), [BufferId(1)]);
        assert_eq!(forward.of(&dot(&[2, 0], 3)), []);
        assert_eq!(forward.of(&dot(&[4, 0], 4)), []);
        // Gathered before it is cast, where gathers move what they are given.
        let mut wide = Casts::new(&role, TemplateKind::Forward, &plain);
        wide.of(&gather);
        assert_eq!(wide.of(&dot(&[2, 0], 3)), [BufferId(2)]);
        // Kept from the forward pass; what is made again is cast again.
        let mut backward = Casts::new(&role, TemplateKind::Backward, &narrow);
        assert_eq!(backward.of(&gather), []);
        assert_eq!(backward.of(&dot(&[2, 3], 2)), []);
        let relu = crate::testing::relu("relu", 4, 3);
        backward.of(&instr(relu, crate::testing::KERNELS, &[]));
        assert_eq!(backward.of(&dot(&[2, 3], 2)), [BufferId(3)]);
    }
}
