//! Windows over images: convolutions and pooling, and their gradients.
//!
//! Images are `[N, H, W, channels..]`. Samples and channels can be split: input channels sum, so
//! a split of them leaves partial sums, as a matmul's inner dim does. Of channels in groups the
//! groups are split: a norm keeps them whole, and every further dim to split would multiply what a
//! search has to price. Height and width are whole, because windows at a shard's edge cover pixels
//! of its neighbours.

use super::family::*;

pub(super) static FAMILY: Family = Family {
    infer,
    rule,
    work,
    gradient,
    groups: singly,
};

/// Dims of an image before its channels.
const SPACE: usize = 3;
/// Dims of a weight before its channels.
const KERNEL: usize = 2;

/// How windows move over an image.
#[derive(Clone, Copy)]
struct Windows {
    stride: u64,
    padding: u64,
}

fn infer(cx: &Operands<'_>) -> Result<Vec<TensorType>, OpError> {
    let x = cx.x;
    match *cx.kind {
        OpKind::Conv2d { stride, padding } => {
            cx.image(0)?;
            cx.one_type()?;
            let inputs = &x[0].shape.0[SPACE..];
            let outputs = cx.weight(1, inputs, None)?;
            let kernel = [cx.fixed(1, 0)?, cx.fixed(1, 1)?];
            let windows = Windows { stride, padding };
            let size = cx.windows([cx.fixed(0, 1)?, cx.fixed(0, 2)?], kernel, windows)?;
            one(image(&x[0], size, outputs))
        }
        OpKind::Conv2dGradInput {
            stride,
            padding,
            size,
        } => {
            cx.image(1)?;
            cx.one_type()?;
            let n_outputs = x[1].shape.rank() - SPACE;
            let rank = x[0].shape.rank();
            cx.ensure(rank > KERNEL + n_outputs, || {
                format!("operand 0 is {}, expected [KH, KW, in.., out..]", x[0])
            })?;
            let inputs = &x[0].shape.0[KERNEL..rank - n_outputs];
            cx.weight(0, inputs, Some(&x[1].shape.0[SPACE..]))?;
            let kernel = [cx.fixed(0, 0)?, cx.fixed(0, 1)?];
            cx.results(1, size, kernel, Windows { stride, padding })?;
            one(image(&x[1], size, inputs))
        }
        OpKind::Conv2dGradWeight {
            stride,
            padding,
            kernel,
        } => {
            cx.image(0)?;
            cx.image(1)?;
            cx.one_type()?;
            cx.ensure(x[0].shape.0[0] == x[1].shape.0[0], || {
                format!("{} and {} have other samples", x[0], x[1])
            })?;
            let size = [cx.fixed(0, 1)?, cx.fixed(0, 2)?];
            cx.results(1, size, kernel, Windows { stride, padding })?;
            let channels = [&x[0].shape.0[SPACE..], &x[1].shape.0[SPACE..]].concat();
            let dims = [&kernel.map(Dim::Fixed)[..], &channels].concat();
            one(TensorType::new(x[0].dtype, Shape(dims)))
        }
        OpKind::MaxPool2d {
            kernel,
            stride,
            padding,
        } => one(cx.pooled(kernel, Windows { stride, padding })?),
        OpKind::MaxPool2dGrad {
            kernel,
            stride,
            padding,
        } => {
            let pooled = cx.pooled(kernel, Windows { stride, padding })?;
            cx.ensure(x[1] == pooled, || {
                format!("operand 1 is {}, expected {pooled}", x[1])
            })?;
            one(x[0].clone())
        }
        _ => cx.stranger(),
    }
}

/// An image with the samples and element type of `like`.
fn image(like: &TensorType, size: [u64; 2], channels: &[Dim]) -> TensorType {
    let space = [like.shape.0[0], Dim::Fixed(size[0]), Dim::Fixed(size[1])];
    TensorType::new(like.dtype, Shape([&space[..], channels].concat()))
}

impl Operands<'_> {
    /// Operand `i` is `f[N, H, W, channels..]`.
    fn image(&self, i: usize) -> Result<(), OpError> {
        self.float(i)?;
        let d = &self.x[i].shape.0;
        let fixed = d.iter().skip(1).all(|d| matches!(d, Dim::Fixed(_)));
        self.ensure(d.len() > SPACE && fixed, || {
            format!(
                "operand {i} is {}, expected [N, H, W, channels..]",
                self.x[i]
            )
        })
    }
    fn one_type(&self) -> Result<(), OpError> {
        self.ensure(self.x[0].dtype == self.x[1].dtype, || {
            format!("dtypes differ: {} and {}", self.x[0], self.x[1])
        })
    }
    /// Operand `i` is a weight `[KH, KW, inputs.., out..]`; its output channels, which are
    /// `outputs` where they are known.
    fn weight(&self, i: usize, inputs: &[Dim], outputs: Option<&[Dim]>) -> Result<&[Dim], OpError> {
        let d = &self.x[i].shape.0;
        let channels = d.get(KERNEL..).unwrap_or_default();
        let found = channels.get(inputs.len()..).unwrap_or_default();
        let fixed = d.iter().all(|d| matches!(d, Dim::Fixed(_)));
        let fits = channels.starts_with(inputs) && outputs.is_none_or(|o| o == found);
        self.ensure(fixed && fits && !found.is_empty(), || {
            let inputs = Shape(inputs.to_vec());
            format!(
                "operand {i} is {}, expected [KH, KW, in.., out..] for the input channels {inputs}",
                self.x[i]
            )
        })?;
        Ok(found)
    }
    /// Windows along height and width of an image of this size.
    fn windows(&self, size: [u64; 2], kernel: [u64; 2], w: Windows) -> Result<[u64; 2], OpError> {
        let Windows { stride, padding } = w;
        let along = |len: u64, kernel: u64| {
            let padded = len.checked_add(padding.checked_mul(2)?)?;
            let rest = padded.checked_sub(kernel)?;
            (kernel > 0 && len > 0 && padding < kernel).then_some(())?;
            Some(rest.checked_div(stride)? + 1)
        };
        match (along(size[0], kernel[0]), along(size[1], kernel[1])) {
            (Some(h), Some(w)) => Ok([h, w]),
            _ => Err(self.err(format!(
                "windows of {} x {} pixels, one every {stride} pixels with a padding of {padding}, do not fit an image of {} x {}; expected a stride of 1 or more, a padding below the window's size, and an image with a window",
                kernel[0], kernel[1], size[0], size[1]
            ))),
        }
    }
    /// Operand `i` has a pixel for each window of an image of this size.
    fn results(
        &self,
        i: usize,
        size: [u64; 2],
        kernel: [u64; 2],
        windows: Windows,
    ) -> Result<(), OpError> {
        let expected = self.windows(size, kernel, windows)?;
        let found = [self.fixed(i, 1)?, self.fixed(i, 2)?];
        self.ensure(expected == found, || {
            format!(
                "operand {i} is {}, expected {} x {} pixels",
                self.x[i], expected[0], expected[1]
            )
        })
    }
    fn pooled(&self, kernel: u64, w: Windows) -> Result<TensorType, OpError> {
        self.image(0)?;
        self.ensure(w.padding <= kernel / 2, || {
            format!(
                "a padding of {} leaves windows of {kernel} without pixels; at most half of one",
                w.padding
            )
        })?;
        let size = [self.fixed(0, 1)?, self.fixed(0, 2)?];
        let size = self.windows(size, [kernel; 2], w)?;
        Ok(image(&self.x[0], size, &self.x[0].shape.0[SPACE..]))
    }
}

fn rule(b: &mut Builder, kind: &OpKind, x: &[TensorType], y: &[TensorType]) {
    match kind {
        OpKind::Conv2d { .. } => {
            let f = b.conv_factors(&x[0], &x[1], &y[0]);
            b.operand(&f.x).operand(&f.w).result(&f.y);
            b.linear(&[&[0], &[1]]);
        }
        OpKind::Conv2dGradInput { .. } => {
            let f = b.conv_factors(&y[0], &x[0], &x[1]);
            b.operand(&f.w).operand(&f.y).result(&f.x);
            b.linear(&[&[0], &[1]]);
        }
        OpKind::Conv2dGradWeight { .. } => {
            let f = b.conv_factors(&x[0], &y[0], &x[1]);
            b.operand(&f.x).operand(&f.y).result(&f.w);
            b.linear(&[&[0], &[1]]);
        }
        OpKind::MaxPool2d { .. } => {
            let [image, pooled] = b.pool_factors(&x[0], &y[0]);
            b.operand(&image).result(&pooled);
        }
        OpKind::MaxPool2dGrad { .. } => {
            let [image, pooled] = b.pool_factors(&x[0], &x[1]);
            b.operand(&image).operand(&pooled).result(&image);
            b.linear(&[&[1]]);
        }
        _ => {}
    }
}

/// Factors of an image, a weight and the convolution's result.
struct ConvFactors {
    x: Vec<FactorId>,
    w: Vec<FactorId>,
    y: Vec<FactorId>,
}

impl Builder {
    /// Channels, or groups of channels and the channels of a group, which are whole.
    fn channels(&mut self, dims: &[Dim]) -> Vec<FactorId> {
        let factors = dims.iter().enumerate();
        factors.map(|(i, &d)| self.factor(d, i == 0)).collect()
    }
    fn conv_factors(&mut self, x: &TensorType, w: &TensorType, y: &TensorType) -> ConvFactors {
        let samples = self.factor(x.shape.0[0], true);
        let inputs = self.channels(&x.shape.0[SPACE..]);
        let outputs = self.channels(&y.shape.0[SPACE..]);
        let whole = |b: &mut Self, dims: &[Dim]| -> Vec<FactorId> {
            dims.iter().map(|&d| b.whole(d)).collect()
        };
        let (image, result) = (
            whole(self, &x.shape.0[1..SPACE]),
            whole(self, &y.shape.0[1..SPACE]),
        );
        let kernel = whole(self, &w.shape.0[..KERNEL]);
        ConvFactors {
            x: [&[samples][..], &image, &inputs].concat(),
            w: [&kernel[..], &inputs, &outputs].concat(),
            y: [&[samples][..], &result, &outputs].concat(),
        }
    }
    fn pool_factors(&mut self, x: &TensorType, y: &TensorType) -> [Vec<FactorId>; 2] {
        let samples = self.factor(x.shape.0[0], true);
        let channels = self.channels(&x.shape.0[SPACE..]);
        [x, y].map(|t| {
            let space = [self.whole(t.shape.0[1]), self.whole(t.shape.0[2])];
            [&[samples][..], &space, &channels].concat()
        })
    }
}

fn work(op: &Lengths<'_>) -> Work {
    let (x, y) = (op.x, op.y);
    match op.kind {
        OpKind::Conv2d { .. } => product(op, &x[0], &x[1], &y[0], |p| p),
        OpKind::Conv2dGradInput { .. } => product(op, &y[0], &x[0], &x[1], |p| MatmulShape {
            n: p.k,
            k: p.n,
            ..p
        }),
        OpKind::Conv2dGradWeight { .. } => product(op, &x[0], &y[0], &x[1], |p| MatmulShape {
            m: p.k,
            k: p.m,
            ..p
        }),
        // A comparison for each pixel of a window.
        OpKind::MaxPool2d { kernel, .. } => op.vector((*kernel as f64).powi(2), &y[0]),
        OpKind::MaxPool2dGrad { kernel, .. } => op.vector((*kernel as f64).powi(2), &x[1]),
        _ => Work::default(),
    }
}

/// The matmul that a convolution is: a row of inputs for each window, a column of weights for
/// each output channel; `of` turns it to the gradient's.
fn product(
    op: &Lengths<'_>,
    image: &(DType, Vec<u64>),
    weight: &(DType, Vec<u64>),
    result: &(DType, Vec<u64>),
    of: impl Fn(MatmulShape) -> MatmulShape,
) -> Work {
    let volume = |lens: &[u64]| lens.iter().fold(1u64, |a, &n| a.saturating_mul(n));
    let n_inputs = image.1.len() - SPACE;
    let shape = MatmulShape {
        batch: 1,
        m: volume(&result.1[..SPACE]),
        n: volume(&result.1[SPACE..]),
        k: volume(&weight.1[..KERNEL + n_inputs]),
    };
    Work {
        matmul_flops: 2.0 * shape.m as f64 * shape.n as f64 * shape.k as f64,
        bytes: op.all_bytes(),
        matmul: Some(of(shape)),
        ..Work::default()
    }
}

fn gradient(arm: &mut Arm<'_>, i: usize) -> Result<Gradients, GraphError> {
    let dy = arm.only_gradient()?;
    let gradient = match arm.op.kind {
        OpKind::Conv2d { stride, padding } if i == 0 => {
            let kind = OpKind::Conv2dGradInput {
                stride,
                padding,
                size: [arm.len(arm.x(0), 1), arm.len(arm.x(0), 2)],
            };
            arm.emit("x", kind, &[arm.x(1), dy])?
        }
        OpKind::Conv2d { stride, padding } => {
            let kind = OpKind::Conv2dGradWeight {
                stride,
                padding,
                kernel: [arm.len(arm.x(1), 0), arm.len(arm.x(1), 1)],
            };
            arm.emit("weight", kind, &[arm.x(0), dy])?
        }
        OpKind::MaxPool2d {
            kernel,
            stride,
            padding,
        } => {
            let kind = OpKind::MaxPool2dGrad {
                kernel,
                stride,
                padding,
            };
            arm.emit("x", kind, &[arm.x(0), dy])?
        }
        _ => return not_forward(arm),
    };
    Ok(vec![(i, gradient)])
}
