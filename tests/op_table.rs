//! The op table: what every op kind must have, one row or more for each.
//!
//! * a shape rule: the result types of the row, and an error without its operands;
//! * a sharding rule: the number of shardable factors and linear sets of the row, each of
//!   which can be assigned to a mesh axis alone, with specs of the right form;
//! * work: arithmetic of the kind that the row says, and bytes;
//! * a gradient for the operands that the row says, or the reason why there is none;
//! * a CPU kernel that runs on the row's shapes, unless the op is a source;
//! * a text form and a JSON form that are read back.
//!
//! A new variant of `OpKind` fails to compile here in [`variant`], and then fails
//! [`every_kind_has_a_row`] until it has a row.
#![allow(clippy::unwrap_used)]

use ir::autodiff::differentiate;
use ir::op::{
    AxisUse, Binary, Blocks, Einsum, ExpertGroups, Init, InputKind, OpStrategy, RopeScaling,
    Scores, SequenceOrder, Unary,
};
use ir::{
    Axis, DType, DeviceMesh, Dim, Graph, LayerId, LogicalMesh, OpKind, Pass, Place, Rank,
    ReduceKind, Region, Shape, TensorType, ValueId,
};
use runtime::arena::Bytes;
use runtime::execute::{Context, Local, Operand, Output, kernel};
use std::collections::BTreeSet;

/// Samples for which work and kernels are tried.
const BATCH: u64 = 2;

/// The arithmetic of an op.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Work {
    /// None, and nothing is moved: sources and views.
    Nothing,
    /// Bytes are moved.
    Bytes,
    /// Arithmetic per element.
    Vector,
    /// This many FLOPs of matrix multiplications.
    Matmul(f64),
    /// This many FLOPs of attention products, and arithmetic per score.
    Attention(f64),
    /// This many FLOPs of the products of a scan, and arithmetic per score.
    Scan(f64),
}

/// Which operands have gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Gradient {
    /// These, and no others.
    Of(&'static [usize]),
    /// None: the op has no operands.
    Source,
    /// None: the op comes after differentiation, in gradients or in the optimizer.
    Later,
    /// None, as its documentation says.
    Undefined,
}

/// One row.
struct Row {
    kind: OpKind,
    /// `f32[B,3]`, `bf16[4]`, `i32[B,2]`, `f32[]`, separated by spaces.
    operands: &'static str,
    results: &'static str,
    shardable: usize,
    linear: usize,
    work: Work,
    gradient: Gradient,
}

/// The number of a kind, and the number of kinds. The match is what a new op has to join.
fn variant(kind: &OpKind) -> (usize, usize) {
    let i = match kind {
        OpKind::Input { .. } => 0,
        OpKind::State { .. } => 1,
        OpKind::Constant { .. } => 2,
        OpKind::Layout => 3,
        OpKind::Cast { .. } => 4,
        OpKind::Unary { .. } => 5,
        OpKind::Binary { .. } => 6,
        OpKind::Broadcast { .. } => 7,
        OpKind::Reduce { .. } => 8,
        OpKind::Reshape { .. } => 9,
        OpKind::Transpose { .. } => 10,
        OpKind::Slice { .. } => 11,
        OpKind::Pad { .. } => 12,
        OpKind::Unstack { .. } => 13,
        OpKind::Stack { .. } => 14,
        OpKind::DotGeneral { .. } => 15,
        OpKind::Embedding => 16,
        OpKind::EmbeddingGrad { .. } => 17,
        OpKind::LayerNorm { .. } => 18,
        OpKind::LayerNormGradInput => 19,
        OpKind::LayerNormGradWeight => 20,
        OpKind::RmsNorm { .. } => 21,
        OpKind::RmsNormGradInput => 22,
        OpKind::RmsNormGradWeight => 23,
        OpKind::Rotary { .. } => 24,
        OpKind::Attention { .. } => 25,
        OpKind::AttentionGrad { .. } => 26,
        OpKind::Dropout { .. } => 27,
        OpKind::LogSumExp => 28,
        OpKind::CrossEntropy => 29,
        OpKind::CrossEntropyGrad => 30,
        OpKind::Accumulate { .. } => 31,
        OpKind::SumSquares => 32,
        OpKind::GlobalNorm => 33,
        OpKind::ClipCoefficient { .. } => 34,
        OpKind::UpdateLossScale { .. } => 35,
        OpKind::AdamW { .. } => 36,
        OpKind::Sgd { .. } => 37,
        OpKind::Route { .. } => 38,
        OpKind::RouteGrad { .. } => 39,
        OpKind::Dispatch { .. } => 40,
        OpKind::Combine => 41,
        OpKind::GateGrad => 42,
        OpKind::Conv2d { .. } => 43,
        OpKind::Conv2dGradInput { .. } => 44,
        OpKind::Conv2dGradWeight { .. } => 45,
        OpKind::MaxPool2d { .. } => 46,
        OpKind::MaxPool2dGrad { .. } => 47,
        OpKind::GroupNorm { .. } => 48,
        OpKind::GroupNormGradInput => 49,
        OpKind::GroupNormGradWeight => 50,
        OpKind::ScaleRows => 51,
        OpKind::Join => 52,
        OpKind::ClampedSwiglu { .. } => 53,
        OpKind::ClampedSwigluGrad { .. } => 54,
        OpKind::ExpertBias => 55,
        OpKind::CausalConv => 56,
        OpKind::CausalConvGradInput => 57,
        OpKind::CausalConvGradWeight { .. } => 58,
        OpKind::StateSpace { .. } => 59,
        OpKind::StateSpaceGrad { .. } => 60,
    };
    (i, 61)
}

fn unary(f: Unary) -> OpKind {
    OpKind::Unary { f }
}

fn binary(f: Binary) -> OpKind {
    OpKind::Binary { f }
}

fn dot(einsum: &str) -> OpKind {
    OpKind::DotGeneral {
        einsum: Einsum::parse(einsum).unwrap(),
    }
}

fn dims(text: &str) -> Vec<Dim> {
    ty(text).shape.0
}

fn row(
    kind: OpKind,
    operands: &'static str,
    results: &'static str,
    (shardable, linear): (usize, usize),
    work: Work,
    gradient: Gradient,
) -> Row {
    Row {
        kind,
        operands,
        results,
        shardable,
        linear,
        work,
        gradient,
    }
}

#[rustfmt::skip]
fn table() -> Vec<Row> {
    use Gradient::{Later, Of, Undefined};
    use Work::{Attention, Bytes, Matmul, Nothing, Vector};
    let mut rows = sources();
    rows.extend([
        row(OpKind::Layout, "f32[B,3]", "f32[B,3]", (2, 1), Nothing, Of(&[0])),
        row(OpKind::Cast { dtype: DType::Bf16 }, "f32[B,3]", "bf16[B,3]", (2, 0), Vector, Of(&[0])),
        row(unary(Unary::Neg), "f32[B,3]", "f32[B,3]", (2, 1), Vector, Of(&[0])),
        row(unary(Unary::Scale { by: 0.5 }), "f32[B,3]", "f32[B,3]", (2, 1), Vector, Of(&[0])),
        row(unary(Unary::GeluErf), "f32[B,3]", "f32[B,3]", (2, 0), Vector, Of(&[0])),
        row(unary(Unary::GeluTanh), "f32[B,3]", "f32[B,3]", (2, 0), Vector, Of(&[0])),
        row(unary(Unary::Silu), "f32[B,3]", "f32[B,3]", (2, 0), Vector, Of(&[0])),
        row(unary(Unary::Relu), "f32[B,3]", "f32[B,3]", (2, 0), Vector, Of(&[0])),
        row(unary(Unary::Exp), "f32[B,3]", "f32[B,3]", (2, 0), Vector, Of(&[0])),
        row(unary(Unary::Tanh), "f32[B,3]", "f32[B,3]", (2, 0), Vector, Of(&[0])),
        row(unary(Unary::Square), "f32[B,3]", "f32[B,3]", (2, 0), Vector, Of(&[0])),
        row(unary(Unary::Sigmoid), "f32[B,3]", "f32[B,3]", (2, 0), Vector, Of(&[0])),
        row(OpKind::ScaleRows, "f32[B,3,4] f32[B,3]", "f32[B,3,4]", (3, 2), Vector, Of(&[0, 1])),
        row(OpKind::ScaleRows, "bf16[B,3,4] f32[B,3]", "bf16[B,3,4]", (3, 2), Vector, Of(&[0, 1])),
        row(OpKind::ClampedSwiglu { alpha: 1.7, limit: 0.5 }, "f32[B,3] f32[B,3]", "f32[B,3]", (2, 0), Vector, Of(&[0, 1])),
        row(OpKind::ClampedSwigluGrad { alpha: 1.7, limit: 0.5 }, "f32[B,3] f32[B,3] f32[B,3]", "f32[B,3] f32[B,3]", (2, 1), Vector, Later),
        row(binary(Binary::Add), "f32[B,3] f32[3]", "f32[B,3]", (2, 1), Vector, Of(&[0, 1])),
        row(binary(Binary::Sub), "f32[B,3] f32[B,3]", "f32[B,3]", (2, 1), Vector, Of(&[0, 1])),
        row(binary(Binary::Mul), "f32[B,3] f32[3]", "f32[B,3]", (2, 2), Vector, Of(&[0, 1])),
        row(binary(Binary::GeluErfGrad), "f32[B,3] f32[B,3]", "f32[B,3]", (2, 1), Vector, Later),
        row(binary(Binary::GeluTanhGrad), "f32[B,3] f32[B,3]", "f32[B,3]", (2, 1), Vector, Later),
        row(binary(Binary::SiluGrad), "f32[B,3] f32[B,3]", "f32[B,3]", (2, 1), Vector, Later),
        row(binary(Binary::ReluGrad), "f32[B,3] f32[B,3]", "f32[B,3]", (2, 1), Vector, Later),
        row(OpKind::Broadcast { leading: dims("f32[B,4]") }, "f32[3]", "f32[B,4,3]", (3, 1), Vector, Of(&[0])),
        row(OpKind::Reduce { kind: ReduceKind::Sum, dims: vec![0, 2] }, "f32[B,3,4]", "f32[3]", (3, 1), Vector, Of(&[0])),
        row(OpKind::Reduce { kind: ReduceKind::Max, dims: vec![2] }, "f32[B,3,4]", "f32[B,3]", (3, 0), Vector, Undefined),
        row(OpKind::Reshape { shape: dims("f32[B,2,6]") }, "f32[B,4,3]", "f32[B,2,6]", (2, 1), Vector, Of(&[0])),
        row(OpKind::Transpose { perm: vec![0, 2, 1] }, "f32[B,3,4]", "f32[B,4,3]", (3, 1), Vector, Of(&[0])),
        row(OpKind::Slice { dim: 1, start: 1, len: 2 }, "f32[B,4]", "f32[B,2]", (1, 1), Vector, Of(&[0])),
        row(OpKind::Pad { dim: 1, start: 1, len: 4 }, "f32[B,2]", "f32[B,4]", (1, 1), Vector, Of(&[0])),
        row(OpKind::Unstack { dim: 1 }, "f32[B,2,3]", "f32[B,3] f32[B,3]", (2, 1), Vector, Of(&[0])),
        row(OpKind::Stack { dim: 1 }, "f32[B,3] f32[B,3]", "f32[B,2,3]", (2, 1), Vector, Of(&[0, 1])),
        row(OpKind::Join, "f32[B,3,2] f32[B,3,5,4]", "f32[B,3,5,6]", (3, 1), Vector, Of(&[0, 1])),
        row(OpKind::Join, "bf16[B,3,2] bf16[B,3,4]", "bf16[B,3,6]", (2, 1), Vector, Of(&[0, 1])),
        // 2 samples x 3 x 5 results of 4 products each, 2 FLOPs per product.
        row(dot("bsh,hf->bsf"), "f32[B,3,4] f32[4,5]", "f32[B,3,5]", (4, 2), Matmul(2.0 * 2.0 * 3.0 * 5.0 * 4.0), Of(&[0, 1])),
        row(OpKind::Embedding, "f32[7,4] i32[B,3]", "f32[B,3,4]", (4, 1), Bytes, Of(&[0])),
        row(OpKind::LogSumExp, "f32[B,3,7]", "f32[B,3]", (3, 0), Vector, Undefined),
        row(OpKind::CrossEntropy, "f32[B,3,7] f32[B,3] i32[B,3]", "f32[B,3]", (3, 0), Vector, Of(&[0])),
        row(OpKind::CrossEntropyGrad, "f32[B,3,7] f32[B,3] i32[B,3] f32[B,3]", "f32[B,3,7]", (3, 1), Vector, Later),
        row(OpKind::EmbeddingGrad { vocab: 7 }, "i32[B,3] f32[B,3,4]", "f32[7,4]", (4, 1), Vector, Later),
        row(OpKind::Dropout { p: 0.25, key: "h.0.drop".into(), order: SequenceOrder::Natural }, "f32[B,3]", "f32[B,3]", (2, 1), Vector, Of(&[0])),
        row(OpKind::Rotary { theta: 1e4, scaling: RopeScaling::None, inverse: false, part: None, order: SequenceOrder::Natural }, "f32[B,3,2,4]", "f32[B,3,2,4]", (3, 1), Vector, Of(&[0])),
        row(OpKind::Rotary { theta: 1e4, scaling: RopeScaling::None, inverse: false, part: Some(2), order: SequenceOrder::Natural }, "f32[B,3,2,4]", "f32[B,3,2,4]", (3, 1), Vector, Of(&[0])),
        // Two products of 3 x 3 scores of 4 elements, for 2 samples and 2 heads.
        row(attention(), "f32[B,3,2,4] f32[B,3,2,4] f32[B,3,2,4]", "f32[B,3,2,4] f32[B,3,2]", (3, 0), Attention(2.0 * 2.0 * 4.0 * 9.0 * 4.0), Of(&[0, 1, 2])),
        row(attention(), "f32[B,3,2,5,4] f32[B,3,2,4] f32[B,3,2,4]", "f32[B,3,2,5,4] f32[B,3,2,5]", (4, 0), Attention(2.0 * 2.0 * 20.0 * 9.0 * 4.0), Of(&[0, 1, 2])),
        // A window of two tokens, and scores below a bound.
        row(bounded(attention()), "f32[B,3,2,4] f32[B,3,2,4] f32[B,3,2,4]", "f32[B,3,2,4] f32[B,3,2]", (3, 0), Attention(2.0 * 2.0 * 4.0 * 9.0 * 4.0), Of(&[0, 1, 2])),
        // Blocks of one token, the last two and the first: those of a query that sees most are all.
        row(in_blocks(attention()), "f32[B,3,2,4] f32[B,3,2,4] f32[B,3,2,4]", "f32[B,3,2,4] f32[B,3,2]", (3, 0), Attention(2.0 * 2.0 * 4.0 * 9.0 * 4.0), Of(&[0, 1, 2])),
        // Scores that fall with the distance.
        row(sloped(attention()), "f32[B,3,2,5,4] f32[B,3,2,4] f32[B,3,2,4]", "f32[B,3,2,5,4] f32[B,3,2,5]", (4, 0), Attention(2.0 * 2.0 * 20.0 * 9.0 * 4.0), Of(&[0, 1, 2])),
        // Values narrower than keys.
        row(attention(), "f32[B,3,2,5,4] f32[B,3,2,4] f32[B,3,2,3]", "f32[B,3,2,5,3] f32[B,3,2,5]", (4, 0), Attention(2.0 * 20.0 * 9.0 * (4.0 + 3.0)), Of(&[0, 1, 2])),
        // In zigzag order: four tokens for two ranks.
        row(zigzag(OpKind::Dropout { p: 0.25, key: "h.0.drop".into(), order: SequenceOrder::Natural }), "f32[B,4,3]", "f32[B,4,3]", (3, 1), Vector, Of(&[0])),
        row(zigzag(attention()), "f32[B,4,2,4] f32[B,4,2,4] f32[B,4,2,4]", "f32[B,4,2,4] f32[B,4,2]", (3, 0), Attention(2.0 * 2.0 * 4.0 * 16.0 * 4.0), Of(&[0, 1, 2])),
        row(zigzag(OpKind::Rotary { theta: 1e4, scaling: RopeScaling::None, inverse: false, part: None, order: SequenceOrder::Natural }), "f32[B,4,2,4]", "f32[B,4,2,4]", (3, 1), Vector, Of(&[0])),
        row(OpKind::AttentionGrad { scale: 0.5, dropout: 0.0, key: "h.0.attn".into(), order: SequenceOrder::Natural, keys: Default::default(), bounds: Default::default() }, "f32[B,3,2,4] f32[B,3,2,4] f32[B,3,2,4] f32[B,3,2,4] f32[B,3,2] f32[B,3,2,4]", "f32[B,3,2,4] f32[B,3,2,4] f32[B,3,2,4]", (3, 1), Attention(4.0 * 2.0 * 4.0 * 9.0 * 4.0), Later),
        row(OpKind::AttentionGrad { scale: 0.5, dropout: 0.0, key: "h.0.attn".into(), order: SequenceOrder::Natural, keys: Default::default(), bounds: Default::default() }, "f32[B,3,2,4] f32[B,3,2,4] f32[B,3,2,3] f32[B,3,2,3] f32[B,3,2] f32[B,3,2,3]", "f32[B,3,2,4] f32[B,3,2,4] f32[B,3,2,3]", (3, 1), Attention(2.0 * 2.0 * 4.0 * 9.0 * (4.0 + 3.0)), Later),
        // The loss depends on the log-sum-exp too.
        row(OpKind::AttentionGrad { scale: 0.5, dropout: 0.0, key: "h.0.attn".into(), order: SequenceOrder::Natural, keys: Default::default(), bounds: Default::default() }, "f32[B,3,2,4] f32[B,3,2,4] f32[B,3,2,4] f32[B,3,2,4] f32[B,3,2] f32[B,3,2,4] f32[B,3,2]", "f32[B,3,2,4] f32[B,3,2,4] f32[B,3,2,4]", (3, 1), Attention(4.0 * 2.0 * 4.0 * 9.0 * 4.0), Later),
    ]);
    rows.extend(norms());
    rows.extend(state_spaces());
    rows.extend(experts());
    rows.extend(images());
    rows.extend(optimizer());
    rows
}

/// Six tokens in one chunk; two groups of two heads of four elements, with states of two rows.
#[rustfmt::skip]
fn state_spaces() -> Vec<Row> {
    use Gradient::{Later, Of};
    use Work::{Scan, Vector};
    let scan = OpKind::StateSpace { chunk: 6, dt_min: 0.001 };
    let scan_grad = OpKind::StateSpaceGrad { chunk: 6, dt_min: 0.001 };
    // For 2 samples: scores of 2 groups, their products with inputs, and states made and read.
    let tokens = 2.0 * 6.0;
    let flops = 2.0 * tokens * (2.0 * 6.0 * 2.0 + 4.0 * 6.0 * 4.0 + 2.0 * 4.0 * 2.0 * 4.0);
    vec![
        row(OpKind::CausalConv, "f32[B,3,5] f32[5,4]", "f32[B,3,5]", (2, 2), Vector, Of(&[0, 1])),
        row(OpKind::CausalConv, "bf16[B,3,2,3,5] bf16[2,3,5,4]", "bf16[B,3,2,3,5]", (3, 2), Vector, Of(&[0, 1])),
        row(OpKind::CausalConvGradInput, "f32[2,5,4] f32[B,3,2,5]", "f32[B,3,2,5]", (2, 2), Vector, Later),
        row(OpKind::CausalConvGradWeight { kernel: 4 }, "f32[B,3,2,5] f32[B,3,2,5]", "f32[2,5,4]", (2, 2), Vector, Later),
        row(scan, "f32[B,6,2,2,4] f32[B,6,2,2] f32[B,6,2,2] f32[B,6,2,2] f32[2,2] f32[2,2] f32[2,2]", "f32[B,6,2,2,4]", (3, 0), Scan(flops), Of(&[0, 1, 2, 3, 4, 5, 6])),
        row(scan_grad, "f32[B,6,2,2,4] f32[B,6,2,2] f32[B,6,2,2] f32[B,6,2,2] f32[2,2] f32[2,2] f32[2,2] f32[B,6,2,2,4]", "f32[B,6,2,2,4] f32[B,6,2,2] f32[B,6,2,2] f32[B,6,2,2] f32[2,2] f32[2,2] f32[2,2]", (3, 1), Scan(2.0 * flops), Later),
    ]
}

/// Three tokens, four experts with two slots each, two experts a token.
#[rustfmt::skip]
fn experts() -> Vec<Row> {
    use Gradient::{Later, Of};
    use Work::Vector;
    let route = |normalize| OpKind::Route { top_k: 2, capacity: 2, normalize, scores: Scores::Softmax, groups: None };
    let groups = Some(ExpertGroups { count: 2, kept: 1, best: 2 });
    let of_groups = OpKind::Route { top_k: 2, capacity: 2, normalize: true, scores: Scores::Sigmoid, groups };
    let dispatch = OpKind::Dispatch { experts: 4, capacity: 2 };
    vec![
        row(route(true), "f32[B,3,4]", "f32[B,3,2] i32[B,3,2]", (1, 0), Vector, Of(&[0])),
        row(route(false), "bf16[B,3,4]", "f32[B,3,2] i32[B,3,2]", (1, 0), Vector, Of(&[0])),
        row(of_groups, "bf16[B,3,4] bf16[4]", "f32[B,3,2] i32[B,3,2]", (1, 0), Vector, Of(&[0, 1])),
        row(OpKind::RouteGrad { capacity: 2, normalize: true, scores: Scores::Softmax }, "f32[B,3,4] i32[B,3,2] f32[B,3,2]", "f32[B,3,4]", (1, 1), Vector, Later),
        row(dispatch.clone(), "f32[B,3,5] i32[B,3,2]", "f32[4,B,2,5]", (4, 1), Vector, Of(&[0])),
        row(dispatch, "f32[B,3,5] i32[B,3,2] f32[B,3,2]", "f32[4,B,2,5]", (4, 2), Vector, Of(&[0, 2])),
        row(OpKind::Combine, "f32[4,B,2,5] i32[B,3,2]", "f32[B,3,5]", (4, 1), Vector, Of(&[0])),
        row(OpKind::Combine, "f32[4,B,2,5] i32[B,3,2] f32[B,3,2]", "f32[B,3,5]", (4, 2), Vector, Of(&[0, 2])),
        row(OpKind::ExpertBias, "f32[4,B,2,5] f32[4,5]", "f32[4,B,2,5]", (4, 1), Vector, Of(&[0, 1])),
        row(OpKind::GateGrad, "f32[4,B,2,5] f32[B,3,5] i32[B,3,2]", "f32[B,3,2]", (4, 2), Vector, Later),
    ]
}

/// Images of 5 x 4 pixels, with channels in one dim and in groups.
#[rustfmt::skip]
fn images() -> Vec<Row> {
    use Gradient::{Later, Of};
    use Work::{Matmul, Vector};
    // 2 samples x 3 x 2 windows of 3 x 3 pixels of 3 channels, to 2 groups of 4 channels.
    let flops = 2.0 * 2.0 * 6.0 * 27.0 * 8.0;
    let (stride, padding) = (2, 1);
    let (kernel, size) = (3, [5, 4]);
    let by_weight = OpKind::Conv2dGradWeight { stride, padding, kernel: [3, 3] };
    vec![
        row(OpKind::Conv2d { stride, padding }, "f32[B,5,4,3] f32[3,3,3,2,4]", "f32[B,3,2,2,4]", (3, 2), Matmul(flops), Of(&[0, 1])),
        row(OpKind::Conv2d { stride: 1, padding: 0 }, "f32[B,5,4,2,4] f32[1,1,2,4,3]", "f32[B,5,4,3]", (3, 2), Matmul(2.0 * 2.0 * 20.0 * 8.0 * 3.0), Of(&[0, 1])),
        row(OpKind::Conv2dGradInput { stride, padding, size }, "f32[3,3,3,2,4] f32[B,3,2,2,4]", "f32[B,5,4,3]", (3, 2), Matmul(flops), Later),
        row(by_weight, "f32[B,5,4,3] f32[B,3,2,2,4]", "f32[3,3,3,2,4]", (3, 2), Matmul(flops), Later),
        row(OpKind::MaxPool2d { kernel, stride, padding }, "f32[B,5,4,2,4]", "f32[B,3,2,2,4]", (2, 0), Vector, Of(&[0])),
        row(OpKind::MaxPool2dGrad { kernel, stride, padding }, "f32[B,5,4,2,4] f32[B,3,2,2,4]", "f32[B,5,4,2,4]", (2, 1), Vector, Later),
        row(OpKind::GroupNorm { eps: 1e-5 }, "f32[B,5,4,2,3] f32[2,3] f32[2,3]", "f32[B,5,4,2,3] f32[B,2] f32[B,2]", (2, 0), Vector, Of(&[0, 1, 2])),
        row(OpKind::GroupNormGradInput, "f32[B,5,4,2,3] f32[B,5,4,2,3] f32[2,3] f32[B,2] f32[B,2]", "f32[B,5,4,2,3]", (2, 1), Vector, Later),
        row(OpKind::GroupNormGradWeight, "f32[B,5,4,2,3] f32[B,5,4,2,3] f32[B,2] f32[B,2]", "f32[2,3] f32[2,3]", (5, 1), Vector, Later),
    ]
}

fn attention() -> OpKind {
    OpKind::Attention {
        scale: 0.5,
        dropout: 0.0,
        key: String::new(),
        order: SequenceOrder::Natural,
        keys: Default::default(),
        bounds: Default::default(),
    }
}

/// The same op with few scores.
fn bounded(mut kind: OpKind) -> OpKind {
    if let OpKind::Attention { bounds, .. } = &mut kind {
        (bounds.window, bounds.cap) = (Some(2), Some(5.0));
    }
    kind
}

/// The same op whose queries see blocks.
fn in_blocks(mut kind: OpKind) -> OpKind {
    if let OpKind::Attention { bounds, .. } = &mut kind {
        bounds.blocks = Some(Blocks {
            size: 1,
            local: 2,
            aligned: false,
            first: 1,
            last: 0,
        });
    }
    kind
}

/// The same op with scores that fall with the distance.
fn sloped(mut kind: OpKind) -> OpKind {
    if let OpKind::Attention { bounds, .. } = &mut kind {
        bounds.alibi = true;
    }
    kind
}

/// The same op on a sequence that is stored for two ranks.
fn zigzag(mut kind: OpKind) -> OpKind {
    if let OpKind::Attention { order, .. }
    | OpKind::Rotary { order, .. }
    | OpKind::Dropout { order, .. } = &mut kind
    {
        *order = SequenceOrder::Zigzag { ranks: 2 };
    }
    kind
}

#[rustfmt::skip]
fn sources() -> Vec<Row> {
    let state = OpKind::State {
        init: Init::Normal { std: 0.02 },
        decay: true,
    };
    vec![
        row(OpKind::Input { kind: InputKind::Tokens }, "", "i32[B,3]", (2, 0), Work::Nothing, Gradient::Source),
        row(OpKind::Input { kind: InputKind::Labels }, "", "i32[B,3]", (2, 0), Work::Nothing, Gradient::Source),
        row(OpKind::Input { kind: InputKind::FurtherTokens { by: 1 } }, "", "i32[B,3]", (2, 0), Work::Nothing, Gradient::Source),
        row(OpKind::Input { kind: InputKind::FurtherLabels { by: 2 } }, "", "i32[B,3]", (2, 0), Work::Nothing, Gradient::Source),
        row(OpKind::Input { kind: InputKind::Images }, "", "f32[B,5,4,3]", (4, 0), Work::Nothing, Gradient::Source),
        row(state, "", "f32[3,4]", (2, 0), Work::Nothing, Gradient::Source),
        row(OpKind::Constant { value: 0.5 }, "", "f32[]", (0, 0), Work::Nothing, Gradient::Source),
    ]
}

#[rustfmt::skip]
fn norms() -> Vec<Row> {
    use Gradient::{Later, Of};
    use Work::Vector;
    vec![
        row(OpKind::LayerNorm { eps: 1e-5 }, "f32[B,3,4] f32[4] f32[4]", "f32[B,3,4] f32[B,3] f32[B,3]", (2, 0), Vector, Of(&[0, 1, 2])),
        row(OpKind::LayerNormGradInput, "f32[B,3,4] f32[B,3,4] f32[4] f32[B,3] f32[B,3]", "f32[B,3,4]", (2, 1), Vector, Later),
        row(OpKind::LayerNormGradWeight, "f32[B,3,4] f32[B,3,4] f32[B,3] f32[B,3]", "f32[4] f32[4]", (3, 1), Vector, Later),
        row(OpKind::RmsNorm { eps: 1e-5 }, "f32[B,3,4] f32[4]", "f32[B,3,4] f32[B,3]", (2, 0), Vector, Of(&[0, 1])),
        row(OpKind::RmsNormGradInput, "f32[B,3,4] f32[B,3,4] f32[4] f32[B,3]", "f32[B,3,4]", (2, 1), Vector, Later),
        row(OpKind::RmsNormGradWeight, "f32[B,3,4] f32[B,3,4] f32[B,3]", "f32[4]", (3, 1), Vector, Later),
    ]
}

#[rustfmt::skip]
fn optimizer() -> Vec<Row> {
    use Gradient::Later;
    use Work::{Bytes, Vector};
    let adam = OpKind::AdamW {
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
    };
    vec![
        row(OpKind::Accumulate { dtype: DType::F32 }, "f32[3,4]", "f32[3,4]", (2, 1), Vector, Later),
        row(OpKind::SumSquares, "f32[3,4]", "f32[]", (2, 0), Vector, Later),
        row(OpKind::GlobalNorm, "f32[] f32[] f32[]", "f32[]", (0, 0), Bytes, Later),
        row(OpKind::ClipCoefficient { max_norm: Some(1.0) }, "f32[] f32[]", "f32[]", (0, 0), Bytes, Later),
        row(OpKind::UpdateLossScale { growth_interval: 2000 }, "f32[] f32[] f32[] f32[]", "f32[] f32[] f32[]", (0, 0), Bytes, Later),
        row(adam.clone(), "f32[3,4] f32[3,4] f32[3,4] f32[3,4] f32[]", "f32[3,4] f32[3,4] f32[3,4]", (2, 0), Vector, Later),
        // With the number of updates.
        row(adam, "f32[3,4] f32[3,4] f32[3,4] f32[3,4] f32[] f32[]", "f32[3,4] f32[3,4] f32[3,4]", (2, 0), Vector, Later),
        row(OpKind::Sgd { momentum: 0.9, weight_decay: 0.0 }, "f32[3,4] f32[3,4] f32[3,4] f32[]", "f32[3,4] f32[3,4]", (2, 0), Vector, Later),
    ]
}

fn ty(text: &str) -> TensorType {
    let (dtype, rest) = text.split_once('[').unwrap();
    let dtype = [DType::F32, DType::Bf16, DType::F16, DType::I32]
        .into_iter()
        .find(|d| d.name() == dtype)
        .unwrap();
    let dim = |d: &str| {
        if d == "B" {
            Dim::Batch
        } else {
            Dim::Fixed(d.parse().unwrap())
        }
    };
    let dims = rest
        .trim_end_matches(']')
        .split(',')
        .filter(|d| !d.is_empty())
        .map(dim)
        .collect();
    TensorType::new(dtype, Shape(dims))
}

fn types(text: &str) -> Vec<TensorType> {
    text.split_whitespace().map(ty).collect()
}

impl Row {
    fn name(&self) -> String {
        format!("{:?} of {}", self.kind, self.operands)
    }
    fn declared(&self) -> Option<TensorType> {
        matches!(self.kind, OpKind::Input { .. } | OpKind::State { .. }).then(|| ty(self.results))
    }
    fn is_source(&self) -> bool {
        self.gradient == Gradient::Source
    }

    /// A graph with the op at path `op`, and the parameter behind each float operand. Operands
    /// with a batch dim are copies of a parameter without.
    fn graph(&self) -> (Graph, Vec<Option<ValueId>>) {
        let mut g = Graph::new("table");
        let layer = g.add_layer("h.0");
        let mut leaves = Vec::new();
        let mut operands: Vec<ValueId> = types(self.operands)
            .iter()
            .enumerate()
            .map(|(i, t)| operand(&mut g, layer, i, t, &mut leaves))
            .collect();
        if self.kind == OpKind::CrossEntropy {
            // Its gradient is defined where its second operand is the log-sum-exp of its first.
            operands[1] = g
                .add1(
                    OpKind::LogSumExp,
                    &[operands[0]],
                    Place::forward("h.0.lse", layer),
                )
                .unwrap();
        }
        let place = Place::forward("h.0.op", layer);
        match self.declared() {
            Some(t) => vec![g.add_source(self.kind.clone(), t, place).unwrap()],
            None => g.add(self.kind.clone(), &operands, place).unwrap(),
        };
        (g, leaves)
    }
}

/// A value of a type that depends on one parameter, or an input.
fn operand(
    g: &mut Graph,
    layer: LayerId,
    i: usize,
    t: &TensorType,
    leaves: &mut Vec<Option<ValueId>>,
) -> ValueId {
    if t.dtype == DType::I32 && t.shape.rank() == 3 {
        leaves.push(None);
        return slots(g, layer, i, t);
    }
    if t.dtype == DType::I32 {
        leaves.push(None);
        return g
            .add_source(
                OpKind::Input {
                    kind: InputKind::Labels,
                },
                t.clone(),
                Place::forward(format!("h.0.ids{i}"), layer),
            )
            .unwrap();
    }
    let batched = t.shape.has_batch();
    let own = Shape(
        t.shape
            .0
            .iter()
            .copied()
            .filter(|d| *d != Dim::Batch)
            .collect(),
    );
    let place = Place {
        path: format!("h.0.p{i}"),
        pass: Pass::Update,
        region: Region::StepBegin,
        layer: Some(layer),
    };
    let leaf = g
        .add_source(
            OpKind::State {
                init: Init::Ones,
                decay: true,
            },
            TensorType::new(t.dtype, own),
            place,
        )
        .unwrap();
    leaves.push(Some(leaf));
    if !batched {
        return leaf;
    }
    let wide = g
        .add1(
            OpKind::Broadcast {
                leading: vec![Dim::Batch],
            },
            &[leaf],
            Place::forward(format!("h.0.x{i}"), layer),
        )
        .unwrap();
    if t.shape.0[0] == Dim::Batch {
        return wide;
    }
    // The batch is the second dim, behind experts.
    let perm = [1, 0].into_iter().chain(2..t.shape.rank()).collect();
    let place = Place::forward(format!("h.0.y{i}"), layer);
    g.add1(OpKind::Transpose { perm }, &[wide], place).unwrap()
}

/// Slots of tokens that have four experts with two slots each.
fn slots(g: &mut Graph, layer: LayerId, i: usize, t: &TensorType) -> ValueId {
    let [batch, Dim::Fixed(tokens), Dim::Fixed(top_k)] = t.shape.0[..] else {
        panic!("slots are [B, S, k], not {t}");
    };
    let logits = TensorType::new(
        DType::F32,
        Shape(vec![batch, Dim::Fixed(tokens), Dim::Fixed(4)]),
    );
    let logits = operand(g, layer, 10 + i, &logits, &mut Vec::new());
    let route = OpKind::Route {
        top_k,
        capacity: 2,
        normalize: true,
        scores: Scores::Softmax,
        groups: None,
    };
    let place = Place::forward(format!("h.0.slots{i}"), layer);
    g.add(route, &[logits], place).unwrap()[1]
}

#[test]
fn every_kind_has_a_row() {
    let rows = table();
    let found: BTreeSet<usize> = rows.iter().map(|r| variant(&r.kind).0).collect();
    let n = variant(&OpKind::Layout).1;
    let missing: Vec<usize> = (0..n).filter(|i| !found.contains(i)).collect();
    assert!(
        missing.is_empty(),
        "no row for the kinds {missing:?} of `variant`"
    );
    let names: BTreeSet<&str> = rows.iter().map(|r| r.kind.name()).collect();
    assert_eq!(names.len(), n, "names of kinds are not unique: {names:?}");
}

#[test]
fn shapes() {
    for r in table() {
        let operands = types(r.operands);
        assert_eq!(
            r.kind.infer(&operands, r.declared().as_ref()).as_deref(),
            Ok(&types(r.results)[..]),
            "{}",
            r.name()
        );
        if r.kind != (OpKind::Constant { value: 0.5 }) {
            let error = r.kind.infer(&[], None).expect_err(&r.name());
            assert_eq!(error.op, r.kind.name(), "{error}");
        }
        let mut more = operands.clone();
        more.push(ty("f16[B,9,9,9,9,9]"));
        assert!(
            r.kind.infer(&more, r.declared().as_ref()).is_err(),
            "{} takes one more operand",
            r.name()
        );
    }
}

#[test]
fn sharding_rules() {
    for r in table() {
        let (operands, results) = (types(r.operands), types(r.results));
        let rule = r.kind.rule(&operands, &results);
        let ranks = |types: &[TensorType]| types.iter().map(|t| t.shape.rank()).collect::<Vec<_>>();
        let rule_ranks =
            |dims: &[Vec<ir::op::DimFactor>]| dims.iter().map(Vec::len).collect::<Vec<_>>();
        assert_eq!(rule_ranks(&rule.operands), ranks(&operands), "{}", r.name());
        assert_eq!(rule_ranks(&rule.results), ranks(&results), "{}", r.name());
        assert_eq!(
            (rule.shardable().count(), rule.linear.len()),
            (r.shardable, r.linear),
            "{}: {rule:?}",
            r.name()
        );
        let mut uses: Vec<AxisUse> = rule.shardable().map(AxisUse::Factor).collect();
        uses.extend((0..rule.linear.len()).map(|i| AxisUse::Partial(i as u32)));
        uses.push(AxisUse::Replicate);
        for u in uses {
            let strategy = OpStrategy {
                uses: vec![u],
                reverse: false,
                ring: false,
            };
            let a = rule
                .assign(&strategy)
                .unwrap_or_else(|e| panic!("{}: {u:?}: {e}", r.name()));
            let specs = a
                .operands
                .iter()
                .zip(&operands)
                .chain(a.results.iter().zip(&results));
            for (spec, t) in specs.clone() {
                assert_eq!(
                    spec.problems(&mesh()),
                    Vec::<String>::new(),
                    "{}: {u:?}",
                    r.name()
                );
                assert_eq!(spec.dims.len(), t.shape.rank(), "{}: {u:?}", r.name());
            }
            let used = specs.clone().any(|(s, _)| !s.is_replicated());
            assert_eq!(
                used,
                u != AxisUse::Replicate,
                "{}: {u:?} uses the axis nowhere",
                r.name()
            );
        }
        let n = rule.factors.len();
        let unknown = [
            AxisUse::Factor(ir::FactorId::new(n)),
            AxisUse::Partial(rule.linear.len() as u32),
        ];
        let whole = (0..n)
            .filter(|&i| !rule.factors[i].shardable)
            .map(|i| AxisUse::Factor(ir::FactorId::new(i)));
        for u in whole.chain(unknown) {
            assert!(
                rule.assign(&OpStrategy {
                    uses: vec![u],
                    reverse: false,
                    ring: false
                })
                .is_err(),
                "{}: {u:?} is allowed",
                r.name()
            );
        }
    }
}

fn mesh() -> LogicalMesh {
    let devices = DeviceMesh {
        first_rank: Rank(0),
        n_devices: 2,
    };
    LogicalMesh::new(
        devices,
        vec![Axis {
            name: "x".into(),
            size: 2,
        }],
    )
    .unwrap()
}

fn concrete(types: &[TensorType]) -> Vec<(DType, Vec<u64>)> {
    types
        .iter()
        .map(|t| (t.dtype, t.shape.bind(BATCH)))
        .collect()
}

#[test]
fn work() {
    for r in table() {
        let (operands, results) = (types(r.operands), types(r.results));
        let w = r.kind.work(&concrete(&operands), &concrete(&results));
        let name = r.name();
        let flops = (w.matmul_flops, w.attention_flops);
        let (expected, vector) = match r.work {
            Work::Nothing | Work::Bytes => ((0.0, 0.0), false),
            Work::Vector => ((0.0, 0.0), true),
            Work::Matmul(n) => ((n, 0.0), false),
            Work::Attention(n) => ((0.0, n), true),
            Work::Scan(n) => ((n, 0.0), true),
        };
        assert_eq!(flops, expected, "{name}");
        assert_eq!(w.vector_flops > 0.0, vector, "{name}: {w:?}");
        assert_eq!(w.bytes > 0, r.work != Work::Nothing, "{name}: {w:?}");
        assert_eq!(
            w.matmul.is_some(),
            matches!(r.work, Work::Matmul(_) | Work::Attention(_) | Work::Scan(_)),
            "{name}: {w:?}"
        );
        // No op reads or writes more than all of its tensors a few times.
        let all: u64 = operands
            .iter()
            .chain(&results)
            .map(|t| t.bytes(BATCH))
            .sum();
        assert!(w.bytes <= 3 * all, "{name}: {} bytes of {all}", w.bytes);
    }
}

#[test]
fn gradients() {
    for r in table().iter().filter(|r| !r.is_source()) {
        let (mut g, leaves) = r.graph();
        let y = g.ops().last().unwrap().outputs[0];
        let layer = LayerId::new(0);
        let t = g.ty(y).clone();
        let all = OpKind::Reduce {
            kind: ReduceKind::Sum,
            dims: (0..t.shape.rank()).collect(),
        };
        let loss = g
            .add1(all, &[y], Place::forward("h.0.loss", layer))
            .unwrap();
        let mut seed = g
            .add1(
                OpKind::Constant { value: 1.0 },
                &[],
                Place::forward("seed", layer),
            )
            .unwrap();
        if t.dtype != DType::F32 {
            seed = g
                .add1(
                    OpKind::Cast { dtype: t.dtype },
                    &[seed],
                    Place::forward("seed_cast", layer),
                )
                .unwrap();
        }
        let wanted: BTreeSet<ValueId> = leaves.iter().flatten().copied().collect();
        let mut found = BTreeSet::new();
        let result = differentiate(&mut g, loss, seed, &wanted, &mut |g, u| {
            assert_eq!(g.ty(u.gradient), g.ty(u.leaf), "{}", r.name());
            found.insert(leaves.iter().position(|l| *l == Some(u.leaf)).unwrap());
            Ok(())
        });
        match r.gradient {
            Gradient::Of(operands) => {
                result.unwrap_or_else(|e| panic!("{}: {e}", r.name()));
                assert_eq!(found, operands.iter().copied().collect(), "{}", r.name());
            }
            _ => assert!(
                matches!(result, Err(ir::GraphError::Differentiate(_))),
                "{}: {result:?}",
                r.name()
            ),
        }
    }
}

#[test]
fn kernels() {
    for r in table() {
        if r.is_source() {
            continue;
        }
        let locals = |text: &str| -> Vec<Local> {
            concrete(&types(text))
                .iter()
                .map(|(d, lens)| Local::whole(*d, lens))
                .collect()
        };
        let (operands, results) = (locals(r.operands), locals(r.results));
        // Ones as ids and labels (the bits of an i32), halves elsewhere.
        let fill = |l: &Local| {
            if l.dtype == DType::I32 {
                f32::from_bits(1)
            } else {
                0.5
            }
        };
        let data: Vec<Bytes> = operands
            .iter()
            .map(|l| Bytes::of_f32(&vec![fill(l); l.elements()]))
            .collect();
        let mut out: Vec<Bytes> = results
            .iter()
            .map(|l| Bytes::of_f32(&vec![f32::NAN; l.elements()]))
            .collect();
        // A result that is updated in place starts as its operand; an accumulator starts as zero.
        for &(from, to) in r.kind.in_place() {
            out[to] = data[from].clone();
        }
        if matches!(r.kind, OpKind::Accumulate { .. }) {
            out[0] = Bytes::zeroed(results[0].bytes());
        }
        let inputs: Vec<Operand<'_>> = operands
            .iter()
            .zip(&data)
            .map(|(local, d)| Operand {
                local,
                data: &d[..local.bytes()],
                is_in_result: false,
            })
            .collect();
        let mut outputs: Vec<Output<'_>> = results
            .iter()
            .zip(&mut out)
            .map(|(local, d)| Output {
                data: &mut d[..local.bytes()],
                local,
            })
            .collect();
        let cx = Context {
            seed: 1,
            step: 1,
            updates: 1,
            lr: 0.1,
            first_sample: 0,
            training: true,
            threads: 1,
        };
        kernel(&r.kind, "h.0.op", &inputs, &mut outputs, &cx)
            .unwrap_or_else(|e| panic!("{}: {e}", r.name()));
        drop(outputs);
        for (local, d) in results
            .iter()
            .zip(&out)
            .filter(|(l, _)| l.dtype == DType::F32)
        {
            assert!(
                d.f32s()[..local.elements()].iter().all(|x| x.is_finite()),
                "{} leaves elements unwritten",
                r.name()
            );
        }
    }
}

#[test]
fn text_and_json() {
    for r in table() {
        let (graph, _) = r.graph();
        let text = ir::text::print(&graph);
        assert!(text.contains(&format!("= {}", r.kind.name())), "{text}");
        let parsed = ir::text::parse(&text).unwrap_or_else(|e| panic!("{}: {e}\n{text}", r.name()));
        assert_eq!(parsed, graph, "{text}");
        let json = serde_json::to_string(&r.kind).unwrap();
        assert_eq!(
            serde_json::from_str::<OpKind>(&json).unwrap(),
            r.kind,
            "{json}"
        );
    }
}
