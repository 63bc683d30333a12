//! Matmuls that add to the sum of a parameter's gradient as they write.
//!
//! `C += A B` reads and writes the sum once, inside the matmul's kernel, in place of writing
//! the product and a kernel that reads both and writes the sum (`gradient_accumulation_fusion`
//! of Megatron-Core, `fuse_wgrad_accumulation` of Transformer Engine). It needs product and
//! sum to be of one shape on a rank: what is reduced between them is added afterwards.

use crate::fused::Fused;
use ir::BufferId;
use ir::op::OpKind;
use ir::program::{InstrKind, Template};
use std::collections::HashMap;

/// Marks, in `fused`, the matmuls of a template that add to a sum and the accumulations that
/// are part of them; `bytes` is the size of a rank's part of a buffer, `sum_bytes` that of a sum.
pub(super) fn into_matmuls(
    template: &Template,
    fused: &mut [Fused],
    bytes: impl Fn(BufferId) -> u64,
    sum_bytes: impl Fn(BufferId) -> u64,
) {
    let mut matmuls: HashMap<BufferId, usize> = HashMap::new();
    let mut readers: HashMap<BufferId, usize> = HashMap::new();
    for (i, instruction) in template.instructions.iter().enumerate() {
        for b in instruction.reads() {
            *readers.entry(b).or_default() += 1;
        }
        if let InstrKind::Compute {
            kind: OpKind::DotGeneral { .. },
            outputs,
            ..
        } = &instruction.kind
        {
            matmuls.extend(outputs.iter().map(|b| (*b, i)));
        }
    }
    for (i, instruction) in template.instructions.iter().enumerate() {
        let InstrKind::Compute {
            kind: OpKind::Accumulate { .. },
            inputs,
            outputs,
            ..
        } = &instruction.kind
        else {
            continue;
        };
        let product = inputs.iter().find(|b| matmuls.contains_key(b));
        let (Some(product), [sum]) = (product, outputs.as_slice()) else {
            continue;
        };
        if readers[product] > 1 {
            continue;
        }
        let matmul = matmuls[product];
        fused[i].into_previous = true;
        fused[matmul].unmoved_bytes += bytes(*product);
        fused[matmul].more_bytes += 2 * sum_bytes(*sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{instr, relu};
    use ir::DType;
    use ir::op::Einsum;
    use ir::program::{InstrKind, TemplateKind};

    fn compute(path: &str, kind: OpKind, inputs: &[u32], output: u32) -> InstrKind {
        InstrKind::Compute {
            path: path.into(),
            kind,
            inputs: inputs.iter().map(|&b| BufferId(b)).collect(),
            outputs: vec![BufferId(output)],
        }
    }

    /// A matmul makes 2 of 0 and 1; `between` works on it; 3 is added up in 4.
    fn marked(between: Vec<InstrKind>, added: u32) -> Vec<Fused> {
        let einsum = Einsum::parse("mk,kn->mn").unwrap();
        let dot = compute("dot", OpKind::DotGeneral { einsum }, &[0, 1], 2);
        let sum = OpKind::Accumulate { dtype: DType::F32 };
        let sum = compute("sum", sum, &[4, added], 4);
        let all = [vec![dot], between, vec![sum]].concat();
        let instructions = all
            .into_iter()
            .map(|k| instr(k, crate::testing::KERNELS, &[]));
        let template = Template {
            kind: TemplateKind::Backward,
            chunk: 0,
            instructions: instructions.collect(),
        };
        let mut fused = vec![Fused::default(); template.instructions.len()];
        into_matmuls(&template, &mut fused, |_| 100, |_| 200);
        fused
    }

    #[test]
    fn a_matmul_adds_what_nothing_else_reads() {
        let fused = marked(Vec::new(), 2);
        // The product is not written; the sum is read and written.
        assert_eq!((fused[0].unmoved_bytes, fused[0].more_bytes), (100, 400));
        assert!(fused[1].into_previous && !fused[0].into_previous);
        // Scaled, or reduced, before it is added.
        let plain = vec![Fused::default(); 3];
        assert_eq!(marked(vec![relu("relu", 2, 3)], 3), plain);
        // Somebody else wants the product.
        assert_eq!(marked(vec![relu("relu", 2, 3)], 2), plain);
    }
}
