//! Time of one op on one device, as software executes it: the op's work with what the software
//! moves more or less, what it casts first, and which kernels of attention it has.

use crate::attention;
use crate::{Narrow, Software};
use cost_model::compute::{is_elementwise, memory_time, work_time};
use ir::DType;
use ir::cluster::Cluster;
use ir::op::OpKind;

/// A dtype with the local lengths of a tensor.
pub(crate) type Local = (DType, Vec<u64>);

/// Copies that a kept cast writes: one for each of the two matmuls that read an activation or its
/// gradient, along another dim.
const COPIES: f64 = 2.0;

/// Kernels of an op that normalises, reduces or the like in the backward direction: one pass
/// along each of two dims.
const KERNELS_OF_NORM_GRADIENT: f64 = 2.0;

/// The work of an op that ops around it do.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Around<'a> {
    /// Bytes of its operands and results that stay on the chip, because their other side is
    /// part of the same kernel.
    pub unmoved_bytes: u64,
    /// Bytes that its kernel moves beside them.
    pub more_bytes: u64,
    /// The operands that a matmul in a narrower type casts into the copies that are kept, where
    /// they are; else it casts its own operands, as if no other matmul read them.
    pub kept_casts: Option<&'a [Local]>,
    /// The type that it runs in as a matmul with a parameter, where it is narrower than the
    /// activations'.
    pub narrow: Option<Narrow>,
}

/// Seconds of an op on the device.
pub(crate) fn device_time(
    cluster: &Cluster,
    software: &Software,
    kind: &OpKind,
    operands: &[Local],
    results: &[Local],
    around: Around<'_>,
) -> f64 {
    if kind.is_source() || kind.is_view() {
        return 0.0;
    }
    let types = operands.iter().chain(results).map(|t| t.0);
    let dtype = types.into_iter().find(|t| t.is_float());
    let dtype = dtype.unwrap_or(DType::F32);
    let mut work = kind.work(operands, results);
    work.bytes =
        (work.bytes.saturating_sub(around.unmoved_bytes)).saturating_add(around.more_bytes);
    work.bytes = (work.bytes as f64 * traffic(kind, software)) as u64;
    if let (OpKind::DotGeneral { .. }, Some(shape)) = (kind, work.matmul)
        && shape.batch > 1
    {
        work.matmul_flops /= software.grouped_matmul_share;
    }
    if let (OpKind::Accumulate { dtype }, Some(sum)) = (kind, software.sum_dtype) {
        // The sum is read and written once.
        let elements: u64 = results.iter().flat_map(|r| &r.1).product();
        let saved = dtype.bytes().saturating_sub(sum.bytes());
        work.bytes -= work.bytes.min(elements.saturating_mul(2 * saved));
    }
    if matches!(kind, OpKind::LogSumExp | OpKind::CrossEntropyGrad) {
        // Both read all logits; each stands for half of the loss.
        let logits: f64 = operands[0].1.iter().map(|&n| n as f64).product();
        work.bytes = work
            .bytes
            .max((0.5 * software.loss_bytes_per_logit * logits) as u64);
    }
    if let (Some(scores), true) = (work.matmul, work.attention_flops > 0.0) {
        let is_gradient = matches!(kind, OpKind::AttentionGrad { .. });
        let busy = attention::busy_time(cluster, software, dtype, scores, is_gradient, &work);
        return cluster.device.launch_s + busy;
    }
    let is_cast = is_cast_matmul(kind, operands);
    let Some(narrow) = around.narrow.filter(|_| is_cast) else {
        return work_time(cluster, dtype, &work).0;
    };
    work.matmul_flops /= narrow.share;
    let (cast, copies) = match around.kept_casts {
        None => (operands, 1.0),
        Some(first) => (first, COPIES),
    };
    let casts: f64 = cast.iter().map(|o| cast_bytes(o, copies, narrow)).sum();
    let traffic = match software.fuses_casts(narrow.scaling) {
        true => software.elementwise_traffic,
        false => 1.0,
    };
    work_time(cluster, narrow.dtype, &work).0 + memory_time(cluster, casts * traffic)
}

/// Seconds in which the host issues the kernels of an op.
pub(crate) fn host_time(software: &Software, kind: &OpKind) -> f64 {
    match kind.is_source() || kind.is_view() {
        true => 0.0,
        false => software.host_s_per_kernel * kernels(kind, software),
    }
}

/// Kernels that the host issues for an op; updates of parameters go in a few for all.
fn kernels(kind: &OpKind, software: &Software) -> f64 {
    match kind {
        OpKind::Attention { .. } => attention::kernels(software, false),
        OpKind::AttentionGrad { .. } => attention::kernels(software, true),
        OpKind::LayerNormGradWeight | OpKind::RmsNormGradWeight => KERNELS_OF_NORM_GRADIENT,
        OpKind::AdamW { .. } | OpKind::Sgd { .. } | OpKind::SumSquares | OpKind::Cast { .. } => 0.0,
        _ => 1.0,
    }
}

/// Matmuls between two matrices of half precision; those of the loss stay as they are.
fn is_cast_matmul(kind: &OpKind, operands: &[(DType, Vec<u64>)]) -> bool {
    matches!(kind, OpKind::DotGeneral { .. })
        && operands
            .iter()
            .all(|o| matches!(o.0, DType::Bf16 | DType::F16))
}

/// Bytes of casting an operand: read once, its copies written in the narrow type, and what its
/// scales take.
fn cast_bytes(operand: &(DType, Vec<u64>), copies: f64, narrow: Narrow) -> f64 {
    let elements: f64 = operand.1.iter().map(|&n| n as f64).product();
    let source = operand.0.bytes() as f64;
    let scales = narrow.scaling.extra_bytes(source);
    elements * (source + copies * narrow.dtype.bits() as f64 / 8.0 + scales)
}

/// Bytes that an op moves over what one kernel would.
fn traffic(kind: &OpKind, software: &Software) -> f64 {
    match kind {
        OpKind::LayerNorm { .. }
        | OpKind::LayerNormGradInput
        | OpKind::LayerNormGradWeight
        | OpKind::RmsNorm { .. }
        | OpKind::RmsNormGradInput
        | OpKind::RmsNormGradWeight => software.norm_traffic,
        OpKind::Rotary { .. } => software
            .rotary_traffic
            .unwrap_or(software.elementwise_traffic),
        kind if is_elementwise(kind) => software.elementwise_traffic,
        _ => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Scaling;

    #[test]
    fn narrow_operands_are_cast_as_their_recipe_does() {
        let operand = (DType::Bf16, vec![100, 320]);
        let bytes = |dtype, scaling| {
            let narrow = Narrow {
                dtype,
                scaling,
                share: 1.0,
            };
            cast_bytes(&operand, 1.0, narrow) / 32_000.0
        };
        assert_eq!(bytes(DType::F8e4m3, Scaling::Delayed), 2.0 + 1.0);
        assert_eq!(bytes(DType::F8e4m3, Scaling::Tensor), 2.0 + 2.0 + 1.0);
        assert_eq!(
            bytes(DType::F8e4m3, Scaling::Block32),
            2.0 + 1.0 + 1.0 / 32.0
        );
        let four = 2.0 + 2.0 + 0.5 + 1.0 / 16.0;
        assert!((bytes(DType::F4e2m1, Scaling::Block16) - four).abs() < 1e-12);
    }
}
