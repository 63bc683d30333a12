//! Convolutions, pooling and group norms: small cases for every kernel.

use super::{Case, whole};
use ir::{DType, OpKind};

/// Windows of several sizes, strides and paddings, single pixels, channels of several dims, by eights
/// and not; groups of one channel and of several, pixels in several parts.
pub(super) fn small(t: DType) -> Vec<Case> {
    let s = |dims: &[u64]| whole(t, dims);
    let f = |dims: &[u64]| whole(DType::F32, dims);
    let mut all = Vec::new();
    for ([height, width, kernel, stride, padding], inputs, outputs) in [
        ([7, 6, 3, 1, 1], &[16][..], &[2, 4][..]),
        ([9, 8, 3, 2, 1], &[2, 5], &[6]),
        ([8, 8, 1, 1, 0], &[8], &[16]),
        ([8, 7, 1, 2, 0], &[8], &[5]),
        ([11, 10, 7, 2, 3], &[3], &[8]),
    ] {
        let count = |size: u64| (size + 2 * padding - kernel) / stride + 1;
        let of = |size: [u64; 2], channels: &[u64]| s(&[&[3, size[0], size[1]], channels].concat());
        let x = of([height, width], inputs);
        let y = of([count(height), count(width)], outputs);
        let w = s(&[&[kernel, kernel], inputs, outputs].concat());
        let forward = OpKind::Conv2d { stride, padding };
        let of_input = OpKind::Conv2dGradInput {
            stride,
            padding,
            size: [height, width],
        };
        let of_weight = OpKind::Conv2dGradWeight {
            stride,
            padding,
            kernel: [kernel; 2],
        };
        for (kind, a, b, to) in [
            (forward, &x, &w, &y),
            (of_input, &w, &y, &x),
            (of_weight, &x, &y, &w),
        ] {
            all.push(Case(kind, vec![a.clone(), b.clone()], vec![to.clone()]));
        }
    }
    for ([size, kernel, stride, padding], channels) in [
        ([9, 3, 2, 1], &[16][..]),
        ([8, 2, 2, 0], &[3, 2]),
        ([7, 3, 1, 1], &[5]),
    ] {
        let count = (size + 2 * padding - kernel) / stride + 1;
        let of = |size: u64| s(&[&[2, size, size], channels].concat());
        let (x, y) = (of(size), of(count));
        let forward = OpKind::MaxPool2d {
            kernel,
            stride,
            padding,
        };
        let gradient = OpKind::MaxPool2dGrad {
            kernel,
            stride,
            padding,
        };
        all.push(Case(forward, vec![x.clone()], vec![y.clone()]));
        all.push(Case(gradient, vec![x.clone(), y], vec![x]));
    }
    for ([height, width], [groups, channels]) in [
        ([5, 4], [4, 6]),
        ([5, 4], [3, 5]),
        ([20, 19], [8, 1]),
        ([3, 3], [40, 8]),
    ] {
        let x = s(&[3, height, width, groups, channels]);
        let w = s(&[groups, channels]);
        let r = f(&[3, groups]);
        let norm = OpKind::GroupNorm { eps: 1e-5 };
        let y = [&x, &r, &r].map(Clone::clone);
        all.push(Case(norm, [&x, &w, &w].map(Clone::clone).into(), y.into()));
        let operands = [&x, &x, &w, &r, &r].map(Clone::clone);
        all.push(Case(
            OpKind::GroupNormGradInput,
            operands.into(),
            vec![x.clone()],
        ));
        let operands = [&x, &x, &r, &r].map(Clone::clone);
        all.push(Case(
            OpKind::GroupNormGradWeight,
            operands.into(),
            vec![w.clone(), w],
        ));
    }
    all
}
