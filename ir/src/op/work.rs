//! Floating-point operations and memory traffic of an op at concrete (local) lengths.

use super::OpKind;
use crate::DType;

/// The dimensions of a (batched) matrix multiplication `[b] m x k x n`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MatmulShape {
    /// Independent products.
    pub batch: u64,
    /// Rows of the result.
    pub m: u64,
    /// Columns of the result.
    pub n: u64,
    /// Contracted length.
    pub k: u64,
}

/// Work of one execution of an op.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// FLOPs of matrix multiplications outside attention (2 per multiply-add).
    pub matmul_flops: f64,
    /// FLOPs of matrix multiplications that a gradient does again in place of keeping their results:
    /// they take time at the matmul's rate, and are no part of MFU.
    pub recomputed_flops: f64,
    /// FLOPs of attention products counted in full, without the causal half.
    pub attention_flops: f64,
    /// Share of them that a causal kernel executes on the rank that has most to do: a half, or
    /// up to all where the queries are the last of more keys.
    pub causal_share: f64,
    /// Share of attention's FLOPs that MFU counts: all of them, or with a window those of as many keys
    /// as it has, for each query.
    pub counted_share: f64,
    /// All other arithmetic, a rough count per element.
    pub vector_flops: f64,
    /// Bytes read and written once each by an ideal kernel.
    pub bytes: u64,
    /// The matmul, for size-dependent efficiency; attention gives its score product.
    pub matmul: Option<MatmulShape>,
}

impl Work {
    /// FLOPs that MFU counts (PaLM, Chowdhery et al. 2022, appendix B): attention over all keys, or
    /// over those of its window.
    pub fn model_flops(&self) -> f64 {
        self.matmul_flops + self.counted_attention_flops()
    }

    /// Attention's part of [`model_flops`](Work::model_flops).
    pub fn counted_attention_flops(&self) -> f64 {
        self.counted_share * self.attention_flops
    }
}

/// An element type with lengths.
pub(super) type Local = (DType, Vec<u64>);

/// An op at concrete lengths.
pub(super) struct Lengths<'a> {
    /// The op.
    pub kind: &'a OpKind,
    /// Operands.
    pub x: &'a [Local],
    /// Results.
    pub y: &'a [Local],
}

impl Lengths<'_> {
    /// Bytes of all operands and results.
    pub fn all_bytes(&self) -> u64 {
        let all = self.x.iter().chain(self.y);
        all.map(bytes_of).fold(0, u64::saturating_add)
    }
    /// A pass over everything with so many operations for each element of `t`.
    pub fn vector(&self, per_element: f64, t: &Local) -> Work {
        Work {
            vector_flops: per_element * numel(t),
            bytes: self.all_bytes(),
            ..Work::default()
        }
    }
}

pub(super) fn numel(t: &Local) -> f64 {
    t.1.iter().map(|&n| n as f64).product()
}

pub(super) fn bytes_of(t: &Local) -> u64 {
    t.1.iter().fold(t.0.bytes(), |a, &b| a.saturating_mul(b))
}

/// Sum of bytes that are moved so many times each.
pub(super) fn sum_of(terms: &[(u64, u64)]) -> u64 {
    let add =
        |sum: u64, &(times, bytes): &(u64, u64)| sum.saturating_add(bytes.saturating_mul(times));
    terms.iter().fold(0, add)
}
