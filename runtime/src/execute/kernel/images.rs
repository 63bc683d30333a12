//! Ops on images: which lengths convolutions, pooling and group norms have in a shard.
//!
//! Channels of several dims are one dim in memory, padding included: padded channels are zeros in
//! images and weights, and add nothing.

use super::Call;
use crate::cpu::conv::{self, Conv, Windows};
use crate::cpu::group_norm::{self, Grouped};
use crate::error::RuntimeError;
use crate::execute::local::Local;
use ir::OpKind;

impl Call<'_> {
    /// Runs an op on images; `locals` say which parts of the results the buffers are.
    pub(super) fn images(
        &self,
        outs: &mut [&mut [f32]],
        locals: &[&Local],
    ) -> Result<(), RuntimeError> {
        let (threads, x) = (self.cx.threads, |i| self.x(i));
        match (self.op, outs) {
            (&OpKind::Conv2d { stride, padding }, [y]) => {
                let s = lengths(self.local(0), self.local(1), locals[0], stride, padding);
                conv::conv2d(&x(0), &x(1), s, threads, y);
            }
            (
                &OpKind::Conv2dGradInput {
                    stride, padding, ..
                },
                [dx],
            ) => {
                let s = lengths(locals[0], self.local(0), self.local(1), stride, padding);
                conv::conv2d_grad_input(&x(0), &x(1), s, threads, dx);
            }
            (
                &OpKind::Conv2dGradWeight {
                    stride, padding, ..
                },
                [dw],
            ) => {
                let s = lengths(self.local(0), locals[0], self.local(1), stride, padding);
                conv::conv2d_grad_weight(&x(0), &x(1), s, threads, dw);
            }
            (
                &OpKind::MaxPool2d {
                    kernel,
                    stride,
                    padding,
                },
                [y],
            ) => {
                let (windows, channels) = pool(self.local(0), kernel, stride, padding);
                conv::max_pool2d(&x(0), windows, channels, y);
            }
            (
                &OpKind::MaxPool2dGrad {
                    kernel,
                    stride,
                    padding,
                },
                [dx],
            ) => {
                let (windows, channels) = pool(self.local(0), kernel, stride, padding);
                conv::max_pool2d_grad(&x(0), &x(1), windows, channels, dx);
            }
            (OpKind::GroupNorm { eps }, [y, mean, rstd]) => {
                let s = grouped(self.local(0));
                group_norm::group_norm((&x(0), &x(1), &x(2)), s, *eps, (y, mean, rstd));
            }
            (OpKind::GroupNormGradInput, [dx]) => {
                let s = grouped(self.local(0));
                let (images, statistics) = ((&*x(0), &*x(1), &*x(2)), (&*x(3), &*x(4)));
                group_norm::group_norm_grad_input(images, statistics, s, dx);
            }
            (OpKind::GroupNormGradWeight, [dgamma, dbeta]) => {
                let s = grouped(self.local(0));
                let (images, statistics) = ((&*x(0), &*x(1)), (&*x(2), &*x(3)));
                group_norm::group_norm_grad_weight(images, statistics, s, (dgamma, dbeta));
            }
            _ => return Err(self.error("is no op on images")),
        }
        Ok(())
    }
}

/// Lengths of a convolution by those of its image, weight and result.
pub(crate) fn lengths(x: &Local, w: &Local, y: &Local, stride: u64, padding: u64) -> Conv {
    let (x, w, y) = (x.dims(), w.dims(), y.dims());
    Conv {
        samples: x[0],
        windows: Windows {
            size: [x[1], x[2]],
            kernel: [w[0], w[1]],
            stride: stride as usize,
            padding: padding as usize,
        },
        inputs: x[3..].iter().product(),
        outputs: y[3..].iter().product(),
    }
}

/// Windows of a pooling, and channels.
pub(crate) fn pool(x: &Local, kernel: u64, stride: u64, padding: u64) -> (Windows, usize) {
    let x = x.dims();
    let windows = Windows {
        size: [x[1], x[2]],
        kernel: [kernel as usize; 2],
        stride: stride as usize,
        padding: padding as usize,
    };
    (windows, x[3..].iter().product())
}

pub(crate) fn grouped(x: &Local) -> Grouped {
    let x = x.dims();
    let (space, channels) = x.split_at(x.len() - 2);
    Grouped {
        samples: space[0],
        pixels: space[1..].iter().product(),
        groups: channels[0],
        width: channels[1],
    }
}
