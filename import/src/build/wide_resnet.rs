//! Wide ResNet: convolutions in bottleneck blocks around a residual stream (Zagoruyko & Komodakis
//! 2016, on He et al. 2016), as in Alpa's benchmark. The 3 x 3 convolution of a block is
//! `width_factor` times as wide as the one before it.
//!
//! Group norms stand where the papers have batch norms. A batch norm's statistics are those of the
//! samples that are computed together, so microbatches would be different models; a group norm's
//! are a sample's own, and a run is the same under every plan.

use super::Builder;
use crate::ImportError;
use crate::config::{Bottleneck, WideResnetConfig};
use ir::ValueId;
use ir::op::{InputKind, OpKind, Unary};
use ir::sharding::ReduceKind;
use ir::{DType, Dim, Shape, TensorType};

pub(super) fn build(b: &mut Builder, c: &WideResnetConfig) -> Result<(), ImportError> {
    b.start_layer("embed");
    let shape = Shape::batched(&[c.image_size, c.image_size, c.image_channels]);
    let images = TensorType::new(DType::F32, shape);
    let x = b.input_of("images", InputKind::Images, images)?;
    let x = normed(b, c, "embed", "", x, (2, 3))?;
    let x = relu(b, "embed.act", x)?;
    let pool = OpKind::MaxPool2d {
        kernel: 3,
        stride: 2,
        padding: 1,
    };
    let mut x = b.op("embed.pool", pool, &[x])?;
    for (i, block) in c.blocks().into_iter().enumerate() {
        b.start_layer(format!("h.{i}"));
        x = bottleneck(b, c, &block, &format!("h.{i}"), x)?;
    }
    b.start_layer("head");
    let x = average(b, x)?;
    let logits = b.linear("head.fc", "bsgc,gcv->bsv", x)?;
    b.nll(logits)
}

fn bottleneck(
    b: &mut Builder,
    c: &WideResnetConfig,
    block: &Bottleneck,
    h: &str,
    x: ValueId,
) -> Result<ValueId, ImportError> {
    let y = normed(b, c, h, "_1", x, (1, 0))?;
    let y = relu(b, &format!("{h}.act_1"), y)?;
    let y = normed(b, c, h, "_2", y, (block.stride, 1))?;
    let y = relu(b, &format!("{h}.act_2"), y)?;
    let y = normed(b, c, h, "_3", y, (1, 0))?;
    let x = match block.projects() {
        true => normed(b, c, h, "_proj", x, (block.stride, 0))?,
        false => x,
    };
    let x = b.add(format!("{h}.residual"), x, y)?;
    relu(b, &format!("{h}.act"), x)
}

/// A convolution with this stride and padding, and its norm.
fn normed(
    b: &mut Builder,
    c: &WideResnetConfig,
    scope: &str,
    name: &str,
    x: ValueId,
    (stride, padding): (u64, u64),
) -> Result<ValueId, ImportError> {
    let conv = format!("{scope}.conv{name}");
    let weight = b.param(&format!("{conv}.weight"))?;
    let y = b.op(conv, OpKind::Conv2d { stride, padding }, &[x, weight])?;
    let norm = format!("{scope}.norm{name}");
    let gain = b.param(&format!("{norm}.weight"))?;
    let bias = b.param(&format!("{norm}.bias"))?;
    b.op(norm, OpKind::GroupNorm { eps: c.epsilon }, &[y, gain, bias])
}

fn relu(b: &mut Builder, path: &str, x: ValueId) -> Result<ValueId, ImportError> {
    b.op(path, OpKind::Unary { f: Unary::Relu }, &[x])
}

/// The mean of all pixels, as a sequence of one position: `[B, H, W, G, C] -> [B, 1, G, C]`.
fn average(b: &mut Builder, x: ValueId) -> Result<ValueId, ImportError> {
    let dims = b.graph.ty(x).shape.bind(1);
    let (pixels, one) = (Dim::Fixed(dims[1] * dims[2]), Dim::Fixed(1));
    let (groups, width) = (Dim::Fixed(dims[3]), Dim::Fixed(dims[4]));
    let shape = vec![Dim::Batch, one, pixels, groups, width];
    let x = b.op("head.pixels", OpKind::Reshape { shape }, &[x])?;
    let (kind, over) = (ReduceKind::Sum, vec![2]);
    let x = b.op("head.sum", OpKind::Reduce { kind, dims: over }, &[x])?;
    let by = 1.0 / (dims[1] * dims[2]) as f64;
    b.op(
        "head.average",
        OpKind::Unary {
            f: Unary::Scale { by },
        },
        &[x],
    )
}
