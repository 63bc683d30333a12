//! Floating-point operations and memory traffic of an op at concrete (local) lengths.

use super::{Binary, OpKind, Unary};
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
    /// FLOPs of attention products counted in full, without the causal half.
    pub attention_flops: f64,
    /// Share of them that a causal kernel executes on the rank that has most to do: a half, or
    /// up to all where the queries are the last of more keys.
    pub causal_share: f64,
    /// All other arithmetic, a rough count per element.
    pub vector_flops: f64,
    /// Bytes read and written once each by an ideal kernel.
    pub bytes: u64,
    /// The matmul, for size-dependent efficiency; attention gives its score product.
    pub matmul: Option<MatmulShape>,
}

impl Work {
    /// FLOPs that MFU counts (PaLM, Chowdhery et al. 2022, appendix B, full attention).
    pub fn model_flops(&self) -> f64 {
        self.matmul_flops + self.attention_flops
    }
}

pub(super) fn work(kind: &OpKind, x: &[(DType, Vec<u64>)], y: &[(DType, Vec<u64>)]) -> Work {
    let numel = |t: &(DType, Vec<u64>)| t.1.iter().map(|&n| n as f64).product::<f64>();
    let bytes_of =
        |t: &(DType, Vec<u64>)| t.1.iter().fold(t.0.bytes(), |a, &b| a.saturating_mul(b));
    let sum_of = |terms: &[(u64, u64)]| {
        let add = |sum: u64, &(times, bytes): &(u64, u64)| {
            sum.saturating_add(bytes.saturating_mul(times))
        };
        terms.iter().fold(0, add)
    };
    let all_bytes = x
        .iter()
        .chain(y)
        .map(bytes_of)
        .fold(0u64, u64::saturating_add);
    let vector = |per_element: f64, t: &(DType, Vec<u64>)| Work {
        vector_flops: per_element * numel(t),
        bytes: all_bytes,
        ..Work::default()
    };
    match kind {
        OpKind::Input { .. } | OpKind::State { .. } | OpKind::Constant { .. } | OpKind::Layout => {
            Work::default()
        }
        OpKind::DotGeneral { einsum } => {
            let len = |l: u8| {
                let at = |ls: &[u8], t: &(DType, Vec<u64>)| {
                    ls.iter()
                        .position(|&k| k == l)
                        .and_then(|i| t.1.get(i).copied())
                };
                at(&einsum.lhs, &x[0])
                    .or(at(&einsum.rhs, &x[1]))
                    .unwrap_or(1)
            };
            let product = |keep: &dyn Fn(u8) -> bool| {
                let mut labels: Vec<u8> = einsum
                    .lhs
                    .iter()
                    .chain(&einsum.rhs)
                    .copied()
                    .filter(|&l| keep(l))
                    .collect();
                labels.sort_unstable();
                labels.dedup();
                labels.iter().fold(1u64, |a, &l| a.saturating_mul(len(l)))
            };
            let (l, r, o) = (
                |c: u8| einsum.lhs.contains(&c),
                |c: u8| einsum.rhs.contains(&c),
                |c: u8| einsum.out.contains(&c),
            );
            let shape = MatmulShape {
                batch: product(&|c| l(c) && r(c) && o(c)),
                m: product(&|c| l(c) && !r(c)),
                n: product(&|c| r(c) && !l(c)),
                k: product(&|c| l(c) && r(c) && !o(c)),
            };
            let flops = 2.0 * shape.batch as f64 * shape.m as f64 * shape.n as f64 * shape.k as f64;
            Work {
                matmul_flops: flops,
                bytes: all_bytes,
                matmul: Some(shape),
                ..Work::default()
            }
        }
        OpKind::Attention { .. } | OpKind::AttentionGrad { .. } => {
            // Two products of S x T x D per head forward; backward adds dV, dP, dQ, dK.
            let products = if matches!(kind, OpKind::Attention { .. }) {
                2.0
            } else {
                4.0
            };
            let (q, t) = (&x[0].1, x[1].1[1]);
            let d = q[q.len() - 1];
            let heads: u64 = q[2..q.len() - 1].iter().product();
            let shape = MatmulShape {
                batch: q[0].saturating_mul(heads),
                m: q[1],
                n: t,
                k: d,
            };
            let flops = 2.0 * products * shape.batch as f64 * shape.m as f64 * t as f64 * d as f64;
            // Of T keys the last S queries see T - S/2 each; no other S queries see more. A rank
            // of a zigzag order has early and late ones, and sees half.
            let causal_share = match (kind, t) {
                (_, 0) => 0.0,
                (OpKind::Attention { order, .. } | OpKind::AttentionGrad { order, .. }, t)
                    if order.is_natural() =>
                {
                    1.0 - 0.5 * q[1].min(t) as f64 / t as f64
                }
                _ => 0.5,
            };
            let scores = shape.batch as f64 * shape.m as f64 * t as f64;
            Work {
                attention_flops: flops,
                causal_share,
                vector_flops: 4.0 * scores,
                bytes: all_bytes,
                matmul: Some(shape),
                ..Work::default()
            }
        }
        OpKind::Embedding => Work {
            bytes: sum_of(&[(2, bytes_of(&y[0])), (1, bytes_of(&x[1]))]),
            ..Work::default()
        },
        OpKind::EmbeddingGrad { .. } => Work {
            vector_flops: numel(&x[1]),
            bytes: sum_of(&[
                (1, bytes_of(&x[0])),
                (3, bytes_of(&x[1])),
                (1, bytes_of(&y[0])),
            ]),
            ..Work::default()
        },
        OpKind::Unary {
            f: Unary::Neg | Unary::Scale { .. } | Unary::Relu | Unary::Square,
        } => vector(1.0, &x[0]),
        // An exponential or the like counts 40: measured on a CPU, where it costs as much as five
        // layer normalisations; on GPUs such ops are bound by memory.
        OpKind::Unary { .. } => vector(40.0, &x[0]),
        OpKind::Binary {
            f: Binary::GeluErfGrad | Binary::GeluTanhGrad | Binary::SiluGrad,
        } => vector(48.0, &x[0]),
        OpKind::Binary { .. } | OpKind::Cast { .. } | OpKind::Accumulate { .. } => {
            let mut w = vector(1.0, &x[0]);
            if matches!(kind, OpKind::Accumulate { .. }) {
                w.bytes = w.bytes.saturating_add(bytes_of(&y[0]));
            }
            w
        }
        OpKind::LayerNorm { .. } | OpKind::RmsNorm { .. } => vector(8.0, &x[0]),
        OpKind::LayerNormGradInput
        | OpKind::LayerNormGradWeight
        | OpKind::RmsNormGradInput
        | OpKind::RmsNormGradWeight => vector(8.0, &x[0]),
        OpKind::Rotary { .. } | OpKind::Dropout { .. } => vector(6.0, &x[0]),
        OpKind::LogSumExp | OpKind::CrossEntropyGrad => vector(42.0, &x[0]),
        // Reads one logit per row, whatever the vocabulary.
        OpKind::CrossEntropy => Work {
            vector_flops: numel(&y[0]),
            bytes: sum_of(&[(4, bytes_of(&y[0]))]),
            ..Work::default()
        },
        // An exponential for each logit, and a pass over the logits for each choice.
        OpKind::Route { top_k, .. } => vector(40.0 + 2.0 * *top_k as f64, &x[0]),
        OpKind::RouteGrad { .. } => vector(44.0, &x[0]),
        OpKind::Dispatch { .. } => vector(1.0, &y[0]),
        OpKind::Combine => vector(2.0, &x[0]),
        OpKind::GateGrad => vector(2.0, &x[0]),
        OpKind::AdamW { .. } => vector(12.0, &x[0]),
        OpKind::Sgd { .. } => vector(4.0, &x[0]),
        OpKind::SumSquares => vector(2.0, &x[0]),
        OpKind::Broadcast { .. }
        | OpKind::Reduce { .. }
        | OpKind::Reshape { .. }
        | OpKind::Transpose { .. }
        | OpKind::Slice { .. }
        | OpKind::Pad { .. }
        | OpKind::Unstack { .. }
        | OpKind::Stack { .. } => vector(1.0, y.first().unwrap_or(&x[0])),
        OpKind::GlobalNorm | OpKind::ClipCoefficient { .. } | OpKind::UpdateLossScale { .. } => {
            Work {
                bytes: all_bytes,
                ..Work::default()
            }
        }
    }
}
