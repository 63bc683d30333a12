//! Convolutions and pooling of images, channels last, with gradients.
//!
//! A convolution is a matrix product for each sample, with a row for each window of the image:
//!
//! ```text
//!   rows[windows, KH KW in]  x  w[KH KW in, out]  =  y[windows, out]
//!   dy[windows, out]         x  w transposed      =  drows, added where their pixels came from
//!   rows transposed          x  dy                =  one sample's part of dw
//! ```
//!
//! A convolution of single pixels, one at every pixel, reads the image itself as its rows.
//! Samples are taken one after the other, so only one sample's rows are in memory, and the bits of
//! a sample's results do not depend on other samples. Sums of overlapping windows are taken in
//! `f64` and rounded once.

use super::gemm::{Store, View, gemm};
use super::matmul::{ROW_QUANTUM, WORK_PER_THREAD};
use std::borrow::Cow;
use std::ops::Range;

/// The lengths of a convolution.
#[derive(Clone, Copy, Debug)]
pub struct Conv {
    /// Samples.
    pub samples: usize,
    /// How windows lie on an image.
    pub windows: Windows,
    /// Channels of the image.
    pub inputs: usize,
    /// Channels of the result.
    pub outputs: usize,
}

/// Windows on an image.
#[derive(Clone, Copy, Debug)]
pub struct Windows {
    /// Height and width of the image.
    pub size: [usize; 2],
    /// Height and width of a window.
    pub kernel: [usize; 2],
    /// Pixels from one window to the next.
    pub stride: usize,
    /// Pixels around the image that windows may cover.
    pub padding: usize,
}

impl Windows {
    /// Numbers of windows along height and width.
    ///
    /// # Panics
    /// If no window fits, or the stride is zero.
    pub fn counts(&self) -> [usize; 2] {
        [0, 1].map(|d| (self.size[d] + 2 * self.padding - self.kernel[d]) / self.stride + 1)
    }
    fn count(&self) -> usize {
        self.counts().iter().product()
    }
    fn pixels(&self) -> usize {
        self.size.iter().product()
    }
    /// The rows or columns of window `i` that lie on the image: first of the image's, and which
    /// of the window's.
    fn on_image(&self, dim: usize, i: usize) -> (usize, Range<usize>) {
        let start = i * self.stride;
        let first = self.padding.saturating_sub(start).min(self.kernel[dim]);
        let end = (self.size[dim] + self.padding).saturating_sub(start);
        let range = first..end.clamp(first, self.kernel[dim]);
        ((start + first).saturating_sub(self.padding), range)
    }
    /// Calls `f(window, pixel, place, count)` for each run of pixels that a window covers side by
    /// side: the window, the first pixel of the image and of the window, and how many they are.
    fn each(&self, mut f: impl FnMut(usize, usize, usize, usize)) {
        let [rows, columns] = self.counts();
        for (row, column) in (0..rows).flat_map(|r| (0..columns).map(move |c| (r, c))) {
            let (top, ys) = self.on_image(0, row);
            let (left, xs) = self.on_image(1, column);
            let count = xs.len();
            for (i, y) in ys.enumerate().filter(|_| count > 0) {
                let pixel = (top + i) * self.size[1] + left;
                f(
                    row * columns + column,
                    pixel,
                    y * self.kernel[1] + xs.start,
                    count,
                );
            }
        }
    }
    /// Whether each pixel is a window, in order.
    fn are_pixels(&self) -> bool {
        self.kernel == [1, 1] && self.stride == 1 && self.padding == 0
    }
}

impl Conv {
    fn row(&self) -> usize {
        self.windows.kernel.iter().product::<usize>() * self.inputs
    }
    fn check(&self, x: &[f32], w: &[f32], y: &[f32]) {
        let w_len = self.row() * self.outputs;
        let x_len = self.samples * self.windows.pixels() * self.inputs;
        let y_len = self.samples * self.windows.count() * self.outputs;
        assert_eq!(x.len(), x_len, "elements of the image");
        assert_eq!(w.len(), w_len, "elements of the weight");
        assert_eq!(y.len(), y_len, "elements of the result");
    }
    /// Part of the images, or of their gradient, of one sample.
    fn image(&self, sample: usize) -> Range<usize> {
        let n = self.windows.pixels() * self.inputs;
        sample * n..(sample + 1) * n
    }
    /// Part of the results, or of their gradient, of one sample.
    fn result(&self, sample: usize) -> Range<usize> {
        let n = self.windows.count() * self.outputs;
        sample * n..(sample + 1) * n
    }
    /// One row of inputs for each window.
    fn rows<'a>(&self, image: &'a [f32]) -> Cow<'a, [f32]> {
        if self.windows.are_pixels() {
            return Cow::Borrowed(image);
        }
        let (c, row) = (self.inputs, self.row());
        let mut rows = vec![0.0; self.windows.count() * row];
        self.windows.each(|window, pixel, place, count| {
            let from = &image[pixel * c..(pixel + count) * c];
            rows[window * row + place * c..][..count * c].copy_from_slice(from);
        });
        Cow::Owned(rows)
    }
}

/// Convolution: `(x[samples, height, width, inputs], w[kernel, inputs, outputs]) ->
/// y[samples, windows, outputs]`, up to `threads` threads sharing the windows.
///
/// # Panics
/// If the slices do not have the lengths of `s`.
pub fn conv2d(x: &[f32], w: &[f32], s: Conv, threads: usize, y: &mut [f32]) {
    s.check(x, w, y);
    let lens = (s.windows.count(), s.row(), s.outputs);
    for sample in 0..s.samples {
        let rows = s.rows(&x[s.image(sample)]);
        let (a, b) = (row_major(&rows, s.row()), row_major(w, s.outputs));
        product(
            lens,
            a,
            b,
            Store::Overwrite,
            &mut y[s.result(sample)],
            threads,
        );
    }
}

/// Gradient of [`conv2d`] for the image: `(w, dy) -> dx`.
///
/// # Panics
/// As [`conv2d`].
pub fn conv2d_grad_input(w: &[f32], dy: &[f32], s: Conv, threads: usize, dx: &mut [f32]) {
    s.check(dx, w, dy);
    let (c, row) = (s.inputs, s.row());
    let lens = (s.windows.count(), s.outputs, row);
    let transposed = View {
        data: w,
        row: 1,
        col: s.outputs,
    };
    let mut rows = vec![0.0; s.windows.count() * row];
    let mut sums = vec![0.0; s.windows.pixels() * c];
    for sample in 0..s.samples {
        let dy = row_major(&dy[s.result(sample)], s.outputs);
        let dx = &mut dx[s.image(sample)];
        if s.windows.are_pixels() {
            product(lens, dy, transposed, Store::Overwrite, dx, threads);
            continue;
        }
        product(lens, dy, transposed, Store::Overwrite, &mut rows, threads);
        sums.fill(0.0);
        s.windows.each(|window, pixel, place, count| {
            let from = &rows[window * row + place * c..][..count * c];
            super::summation::add_to(&mut sums[pixel * c..(pixel + count) * c], from);
        });
        super::summation::round_to(&sums, dx);
    }
}

/// Gradient of [`conv2d`] for the weight: `(x, dy) -> dw`.
///
/// # Panics
/// As [`conv2d`].
pub fn conv2d_grad_weight(x: &[f32], dy: &[f32], s: Conv, threads: usize, dw: &mut [f32]) {
    s.check(x, dw, dy);
    dw.fill(0.0);
    let lens = (s.row(), s.windows.count(), s.outputs);
    for sample in 0..s.samples {
        let rows = s.rows(&x[s.image(sample)]);
        let transposed = View {
            data: &rows,
            row: 1,
            col: s.row(),
        };
        let dy = row_major(&dy[s.result(sample)], s.outputs);
        product(lens, transposed, dy, Store::Add, dw, threads);
    }
}

fn row_major(data: &[f32], row: usize) -> View<'_> {
    View { data, row, col: 1 }
}

/// A matrix product whose rows threads share: `a[m, k]`, `b[k, n]`, `c[m, n]`.
fn product(
    (m, k, n): (usize, usize, usize),
    a: View<'_>,
    b: View<'_>,
    store: Store,
    c: &mut [f32],
    threads: usize,
) {
    let useful = (m * k * n / WORK_PER_THREAD).max(1);
    let share = m
        .div_ceil(threads.clamp(1, useful))
        .next_multiple_of(ROW_QUANTUM);
    if share >= m {
        return gemm((m, k, n), a, b, store, c, n);
    }
    std::thread::scope(|scope| {
        for (i, c) in c.chunks_mut(share * n).enumerate() {
            let a = View {
                data: &a.data[i * share * a.row..],
                ..a
            };
            scope.spawn(move || gemm((c.len() / n, k, n), a, b, store, c, n));
        }
    });
}

/// Largest element of each window: `x[samples, height, width, channels] ->
/// y[samples, windows, channels]`. A window with a NaN has NaN.
///
/// # Panics
/// If the slices do not have the lengths of these windows.
pub fn max_pool2d(x: &[f32], windows: Windows, channels: usize, y: &mut [f32]) {
    pooled(x, windows, channels, y.len(), |sample, window, best| {
        let at = (sample * windows.count() + window) * channels;
        let values = y[at..at + channels].iter_mut();
        values.zip(best).for_each(|(y, b)| *y = b.0);
    });
}

/// Gradient of [`max_pool2d`]: `(x, dy) -> dx`, a window's going to its first largest element.
///
/// # Panics
/// As [`max_pool2d`].
pub fn max_pool2d_grad(x: &[f32], dy: &[f32], windows: Windows, channels: usize, dx: &mut [f32]) {
    let mut sums = vec![0.0; dx.len()];
    pooled(x, windows, channels, dy.len(), |sample, window, best| {
        let from = &dy[(sample * windows.count() + window) * channels..][..channels];
        let image = sample * windows.pixels() * channels;
        for (c, (dy, &(_, pixel))) in from.iter().zip(best).enumerate() {
            sums[image + pixel * channels + c] += f64::from(*dy);
        }
    });
    super::summation::round_to(&sums, dx);
}

/// Calls `f(sample, window, best)` for each window, with the largest element and its pixel for
/// each channel.
fn pooled(
    x: &[f32],
    windows: Windows,
    channels: usize,
    n_results: usize,
    mut f: impl FnMut(usize, usize, &[(f32, usize)]),
) {
    let sample_len = windows.pixels() * channels;
    if sample_len == 0 {
        return;
    }
    let samples = x.len() / sample_len;
    assert_eq!(x.len(), samples * sample_len, "elements of the image");
    let expected = samples * windows.count() * channels;
    assert_eq!(n_results, expected, "elements of the result");
    let none = (f32::NEG_INFINITY, usize::MAX);
    let mut best = vec![none; windows.count() * channels];
    for (sample, image) in x.chunks_exact(sample_len).enumerate() {
        best.fill(none);
        windows.each(|window, first, _, count| {
            let best = &mut best[window * channels..][..channels];
            for pixel in first..first + count {
                let values = &image[pixel * channels..][..channels];
                for (best, &v) in best.iter_mut().zip(values) {
                    if v > best.0 || v.is_nan() || best.1 == usize::MAX {
                        *best = (v, pixel);
                    }
                }
            }
        });
        for (window, best) in best.chunks_exact(channels).enumerate() {
            f(sample, window, best);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::differences::numeric_gradient;
    use super::super::testing::{assert_close, bits, elements, random, reference, tensor};
    use super::*;
    use serde_json::Value;

    /// Kernels of several sizes, strides and paddings, on images that are not square.
    fn cases() -> Vec<Conv> {
        let case = |samples, size, kernel, stride, padding, inputs, outputs| Conv {
            samples,
            windows: Windows {
                size,
                kernel,
                stride,
                padding,
            },
            inputs,
            outputs,
        };
        vec![
            case(2, [5, 4], [3, 3], 1, 1, 3, 4),
            case(2, [6, 5], [3, 3], 2, 1, 2, 3),
            case(1, [7, 9], [7, 7], 2, 3, 3, 2),
            case(3, [4, 5], [1, 1], 1, 0, 5, 4),
            case(2, [5, 5], [1, 1], 2, 0, 3, 2),
            case(1, [4, 6], [2, 3], 3, 1, 1, 2),
        ]
    }

    fn lens(s: &Conv) -> [usize; 3] {
        let [x, y] = [s.windows.pixels() * s.inputs, s.windows.count() * s.outputs];
        [s.samples * x, s.row() * s.outputs, s.samples * y]
    }

    /// The definition, in `f64`.
    fn naive(x: &[f32], w: &[f32], s: &Conv) -> Vec<f64> {
        let (v, [rows, columns]) = (&s.windows, s.windows.counts());
        let mut y = Vec::new();
        for (n, r, c, o) in product_of([s.samples, rows, columns, s.outputs]) {
            let mut sum = 0.0;
            for (ky, kx, i, _) in product_of([v.kernel[0], v.kernel[1], s.inputs, 1]) {
                let row = (r * v.stride + ky).checked_sub(v.padding);
                let column = (c * v.stride + kx).checked_sub(v.padding);
                let (Some(row), Some(column)) = (row, column) else {
                    continue;
                };
                if row < v.size[0] && column < v.size[1] {
                    let pixel = (n * v.size[0] + row) * v.size[1] + column;
                    let weight = ((ky * v.kernel[1] + kx) * s.inputs + i) * s.outputs + o;
                    sum += f64::from(x[pixel * s.inputs + i]) * f64::from(w[weight]);
                }
            }
            y.push(sum);
        }
        y
    }

    fn product_of(lens: [usize; 4]) -> impl Iterator<Item = (usize, usize, usize, usize)> {
        let [a, b, c, d] = lens;
        (0..a * b * c * d).map(move |i| (i / (b * c * d), i / (c * d) % b, i / d % c, i % d))
    }

    #[test]
    fn a_convolution_is_its_definition() {
        for (seed, s) in cases().iter().enumerate() {
            let [nx, nw, ny] = lens(s);
            let (x, w) = (random(seed as u64, nx), random(50 + seed as u64, nw));
            let mut y = vec![f32::NAN; ny];
            conv2d(&x, &w, *s, 1, &mut y);
            assert_close(&y, &naive(&x, &w, s), 1e-5, &format!("{s:?}"));
        }
    }

    /// The windows and channels of a reference entry.
    fn entry_lengths(entry: &Value, kernel: [usize; 2], outputs: usize) -> Conv {
        let (x, _) = tensor(&entry["inputs"]["x"]);
        let attribute = |name: &str| entry["attrs"][name].as_u64().unwrap() as usize;
        Conv {
            samples: x[0],
            windows: Windows {
                size: [x[1], x[2]],
                kernel,
                stride: attribute("stride"),
                padding: attribute("padding"),
            },
            inputs: x[3],
            outputs,
        }
    }

    #[test]
    fn convolutions_equal_pytorch_s() {
        for entry in reference("conv2d") {
            let (w_dims, _) = tensor(&entry["inputs"]["weight"]);
            let s = entry_lengths(&entry, [w_dims[0], w_dims[1]], w_dims[3]);
            let [nx, nw, ny] = lens(&s);
            let input = |name: &str| elements(&entry["inputs"][name]);
            let (x, w, dy) = (
                input("x"),
                input("weight"),
                elements(&entry["upstream"]["y"]),
            );
            let (mut y, mut dx, mut dw) = (vec![0.0; ny], vec![0.0; nx], vec![0.0; nw]);
            conv2d(&x, &w, s, 1, &mut y);
            conv2d_grad_input(&w, &dy, s, 1, &mut dx);
            conv2d_grad_weight(&x, &dy, s, 1, &mut dw);
            assert_close(&y, &tensor(&entry["outputs"]["y"]).1, 1e-5, "y");
            assert_close(&dx, &tensor(&entry["grads"]["x"]).1, 1e-5, "x");
            assert_close(&dw, &tensor(&entry["grads"]["weight"]).1, 1e-5, "weight");
        }
    }

    #[test]
    fn pooling_equals_pytorch_s() {
        for entry in reference("max_pool2d") {
            let kernel = entry["attrs"]["kernel_size"].as_u64().unwrap() as usize;
            let s = entry_lengths(&entry, [kernel; 2], 0);
            let (x, dy) = (
                elements(&entry["inputs"]["x"]),
                elements(&entry["upstream"]["y"]),
            );
            let (mut y, mut dx) = (vec![0.0; dy.len()], vec![0.0; x.len()]);
            max_pool2d(&x, s.windows, s.inputs, &mut y);
            max_pool2d_grad(&x, &dy, s.windows, s.inputs, &mut dx);
            assert_close(&y, &tensor(&entry["outputs"]["y"]).1, 1e-6, "y");
            assert_close(&dx, &tensor(&entry["grads"]["x"]).1, 1e-6, "x");
        }
    }

    /// Values by hand: a cross of ones over 1..9, with zeros around.
    #[test]
    fn known_values() {
        let x: Vec<f32> = (1..=9u8).map(f32::from).collect();
        let s = Conv {
            samples: 1,
            windows: Windows {
                size: [3, 3],
                kernel: [3, 3],
                stride: 1,
                padding: 1,
            },
            inputs: 1,
            outputs: 1,
        };
        let cross = [0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0];
        let mut y = vec![f32::NAN; 9];
        conv2d(&x, &cross, s, 1, &mut y);
        let expected = [
            1.0 + 2.0 + 4.0,
            1.0 + 2.0 + 3.0 + 5.0,
            2.0 + 3.0 + 6.0,
            1.0 + 4.0 + 5.0 + 7.0,
            2.0 + 4.0 + 5.0 + 6.0 + 8.0,
            3.0 + 5.0 + 6.0 + 9.0,
            4.0 + 7.0 + 8.0,
            5.0 + 7.0 + 8.0 + 9.0,
            6.0 + 8.0 + 9.0,
        ];
        assert_eq!(y, expected);
        let mut pooled = vec![f32::NAN; 4];
        let two = Windows {
            stride: 2,
            ..s.windows
        };
        max_pool2d(&x, two, 1, &mut pooled);
        assert_eq!(pooled, [5.0, 6.0, 8.0, 9.0]);
        // The largest of the four overlapping windows are at 5, 6, 8 and 9.
        let mut dx = vec![f32::NAN; 9];
        max_pool2d_grad(&x, &[1.0, 2.0, 3.0, 4.0], two, 1, &mut dx);
        assert_eq!(dx, [0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 0.0, 3.0, 4.0]);
    }

    #[test]
    fn gradients_are_slopes() {
        for (seed, s) in cases().iter().enumerate() {
            let [nx, nw, ny] = lens(s);
            let seed = 3 * seed as u64;
            let (x, w, dy) = (random(seed, nx), random(seed + 1, nw), random(seed + 2, ny));
            let value = |x: &[f32], w: &[f32]| {
                let mut y = vec![f32::NAN; ny];
                conv2d(x, w, *s, 1, &mut y);
                y
            };
            let (mut dx, mut dw) = (vec![f32::NAN; nx], vec![f32::NAN; nw]);
            conv2d_grad_input(&w, &dy, *s, 1, &mut dx);
            conv2d_grad_weight(&x, &dy, *s, 1, &mut dw);
            let slopes = numeric_gradient(&x, &dy, |x| value(x, &w));
            assert_close(&dx, &slopes, 1e-4, &format!("image of {s:?}"));
            let slopes = numeric_gradient(&w, &dy, |w| value(&x, w));
            assert_close(&dw, &slopes, 1e-4, &format!("weight of {s:?}"));
        }
    }

    #[test]
    fn pooling_takes_the_first_largest_and_passes_gradients_there() {
        let windows = Windows {
            size: [5, 6],
            kernel: [3, 3],
            stride: 2,
            padding: 1,
        };
        let (channels, samples) = (2, 2);
        // All different, so that a small step changes no maximum.
        let n = samples * windows.pixels() * channels;
        let x: Vec<f32> = (0..n).map(|i| (i * 37 % n) as f32).collect();
        let dy = random(1, samples * windows.count() * channels);
        let value = |x: &[f32]| {
            let mut y = vec![f32::NAN; dy.len()];
            max_pool2d(x, windows, channels, &mut y);
            y
        };
        let mut dx = vec![f32::NAN; n];
        max_pool2d_grad(&x, &dy, windows, channels, &mut dx);
        assert_close(&dx, &numeric_gradient(&x, &dy, value), 1e-4, "slopes");
        // Equal elements: the first of each window has all.
        let equal = vec![-1.0; n];
        max_pool2d_grad(&equal, &dy, windows, channels, &mut dx);
        assert_eq!((dx[0], dx[1]), (dy[0], dy[1]));
        assert!(value(&equal).iter().all(|y| *y == -1.0));
        // Whole sums arrive.
        let sum = |v: &[f32]| v.iter().map(|v| f64::from(*v)).sum::<f64>();
        assert!((sum(&dx) - sum(&dy)).abs() < 1e-5);
    }

    #[test]
    fn bits_depend_on_neither_threads_nor_other_samples() {
        let s = Conv {
            samples: 2,
            windows: Windows {
                size: [24, 24],
                kernel: [3, 3],
                stride: 1,
                padding: 1,
            },
            inputs: 32,
            outputs: 48,
        };
        let [nx, nw, ny] = lens(&s);
        let (x, w, dy) = (random(1, nx), random(2, nw), random(3, ny));
        let run = |x: &[f32], dy: &[f32], s: Conv, threads| {
            let (mut y, mut dx) = (vec![f32::NAN; dy.len()], vec![f32::NAN; x.len()]);
            let mut dw = vec![f32::NAN; nw];
            conv2d(x, &w, s, threads, &mut y);
            conv2d_grad_input(&w, dy, s, threads, &mut dx);
            conv2d_grad_weight(x, dy, s, threads, &mut dw);
            [bits(&y), bits(&dx), bits(&dw)]
        };
        let all = run(&x, &dy, s, 1);
        assert_eq!(all, run(&x, &dy, s, 3));
        let one = Conv { samples: 1, ..s };
        let second = run(&x[nx / 2..], &dy[ny / 2..], one, 2);
        assert_eq!(second[0], all[0][ny / 2..]);
        assert_eq!(second[1], all[1][nx / 2..]);
    }
}
