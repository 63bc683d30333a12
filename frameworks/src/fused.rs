//! Elementwise operations that a framework does in one kernel.
//!
//! A chain of elementwise ops, each read by the next and by nothing else of its pass, is one
//! kernel: what is between them is neither written nor read, and it is launched once.
//! (Megatron-LM's `bias_gelu` and `bias_dropout_add` are such kernels.) What the gradient needs
//! of it, the gradient makes again from what the kernel read, which is as many bytes.
//!
//! ```text
//! bias -> dropout -> add      apart: 2 + 2 + 3 tensors moved; as one: 1 + 0 + 2
//! ```

use cost_model::compute::is_elementwise;
use ir::BufferId;
use ir::program::{InstrKind, Template};
use std::collections::{HashMap, HashSet};

/// The part of an instruction's work that a neighbour's kernel does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Fused {
    /// Bytes of operands and results that are not moved.
    pub unmoved_bytes: u64,
    /// Whether the instruction is part of the kernel of the one that reads its result.
    pub into_next: bool,
    /// Bytes that are moved beside operands and results: of a sum that the kernel adds to.
    pub more_bytes: u64,
    /// Whether the instruction is part of the kernel that made its operand, which has all of
    /// its work.
    pub into_previous: bool,
}

/// By instruction of a template; `bytes` is the size of a rank's part of a buffer.
pub(super) fn fused(template: &Template, bytes: impl Fn(BufferId) -> u64) -> Vec<Fused> {
    let mut readers: HashMap<BufferId, Vec<usize>> = HashMap::new();
    for (i, instruction) in template.instructions.iter().enumerate() {
        for b in instruction.reads() {
            readers.entry(b).or_default().push(i);
        }
    }
    let elementwise = |i: usize| {
        let kind = &template.instructions[i].kind;
        matches!(kind, InstrKind::Compute { kind, .. } if is_elementwise(kind))
    };
    let mut all = vec![Fused::default(); template.instructions.len()];
    for (i, instruction) in template.instructions.iter().enumerate() {
        let writes = instruction.writes();
        let [made] = writes.as_slice() else { continue };
        let Some([reader]) = readers.get(made).map(Vec::as_slice) else {
            continue;
        };
        if *reader > i && elementwise(i) && elementwise(*reader) {
            all[i].into_next = true;
            all[i].unmoved_bytes += bytes(*made);
            all[*reader].unmoved_bytes += bytes(*made);
        }
    }
    all
}

/// Buffers that instructions make which are part of the kernel before: it can write them in
/// whatever type is asked for.
pub(super) fn made(template: &Template, fused: &[Fused]) -> HashSet<BufferId> {
    let parts = template.instructions.iter().zip(fused);
    let parts = parts.filter(|(_, f)| f.into_previous);
    parts.flat_map(|(i, _)| i.writes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{instr, relu};
    use ir::program::TemplateKind;

    #[test]
    fn what_one_other_reads_stays_on_the_chip() {
        let pass = |reads: &[(u32, u32)]| {
            let template = Template {
                kind: TemplateKind::Forward,
                chunk: 0,
                instructions: reads
                    .iter()
                    .map(|&(x, y)| instr(relu("op", x, y), crate::testing::KERNELS, &[]))
                    .collect(),
            };
            let all = fused(&template, |b| 100 + u64::from(b.0));
            let of = |f: &Fused| (f.unmoved_bytes, f.into_next);
            all.iter().map(of).collect::<Vec<_>>()
        };
        // 0 -> 1 -> 2 -> 3: of the buffers 1 and 2 nothing is moved.
        let chain = [(101, true), (203, true), (102, false)];
        assert_eq!(pass(&[(0, 1), (1, 2), (2, 3)]), chain);
        // 1 is read twice.
        let apart = [(0, false), (0, false), (0, false)];
        assert_eq!(pass(&[(0, 1), (1, 2), (1, 3)]), apart);
    }
}
