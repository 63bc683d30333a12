//! Layer and root-mean-square normalisation over the last dim, with gradients.
//!
//! A row is the last dim, `width = gamma.len()` elements. Row statistics and sums are taken in
//! `f64` and rounded once; a row's result depends on that row alone. The statistics handed to
//! the backward kernels are `f32`, one per row.
//!
//! With `xhat = (x - mean) * rstd` and `g = dy * gamma`, the gradients are
//!
//! ```text
//!   layer norm  dx = rstd * (g - avg(g) - xhat * avg(g * xhat))
//!   RMS norm    dx = rstd * (g          - xhat * avg(g * xhat))    with xhat = x * rstd
//!   both        dgamma = sum over rows of dy * xhat,  dbeta = sum over rows of dy
//! ```

use super::summation;
use super::wide::widest;

/// Layer normalisation (Ba, Kiros & Hinton 2016):
/// `(x[rows, width], gamma[width], beta[width]) -> (y[rows, width], mean[rows], rstd[rows])`
/// with `y = (x - mean) * rstd * gamma + beta` and `rstd = 1 / sqrt(variance + eps)`, the
/// variance being the mean square deviation (PyTorch's "biased" one).
///
/// # Panics
/// If the slices do not have these shapes or `width` is zero.
pub fn layer_norm(
    x: &[f32],
    gamma: &[f32],
    beta: &[f32],
    eps: f64,
    y: &mut [f32],
    mean: &mut [f32],
    rstd: &mut [f32],
) {
    let width = check_width(gamma, [x.len(), y.len()], [mean.len(), rstd.len()]);
    assert_eq!(beta.len(), width, "beta is like gamma");
    let rows = x.chunks_exact(width).zip(y.chunks_exact_mut(width));
    widest(
        #[inline(always)]
        || {
            for ((x, y), (mean, rstd)) in rows.zip(mean.iter_mut().zip(rstd)) {
                let m = summation::sum(x) / width as f64;
                let variance = summation::sum_by(x, |x| (x - m) * (x - m)) / width as f64;
                let r = 1.0 / (variance + eps).sqrt();
                for (((y, &x), &gamma), &beta) in y.iter_mut().zip(x).zip(gamma).zip(beta) {
                    *y = ((f64::from(x) - m) * r * f64::from(gamma) + f64::from(beta)) as f32;
                }
                (*mean, *rstd) = (m as f32, r as f32);
            }
        },
    );
}

/// Input gradient of [`layer_norm`]:
/// `(dy[rows, width], x[rows, width], gamma[width], mean[rows], rstd[rows]) -> dx[rows, width]`.
///
/// # Panics
/// As [`layer_norm`].
pub fn layer_norm_grad_input(
    dy: &[f32],
    x: &[f32],
    gamma: &[f32],
    mean: &[f32],
    rstd: &[f32],
    dx: &mut [f32],
) {
    let width = check_width(gamma, [x.len(), dy.len()], [mean.len(), rstd.len()]);
    assert_eq!(dx.len(), x.len(), "gradient is like the operand");
    let rows = dy
        .chunks_exact(width)
        .zip(x.chunks_exact(width))
        .zip(dx.chunks_exact_mut(width));
    widest(
        #[inline(always)]
        || {
            for (((dy, x), dx), (&mean, &rstd)) in rows.zip(mean.iter().zip(rstd)) {
                let (mean, rstd) = (f64::from(mean), f64::from(rstd));
                let avg_g = summation::dot(dy, gamma) / width as f64;
                grad_input_row(dy, x, gamma, mean, rstd, avg_g, dx);
            }
        },
    );
}

/// Weight gradients of [`layer_norm`]:
/// `(dy[rows, width], x[rows, width], mean[rows], rstd[rows]) -> (dgamma[width], dbeta[width])`.
///
/// # Panics
/// As [`layer_norm`].
pub fn layer_norm_grad_weight(
    dy: &[f32],
    x: &[f32],
    mean: &[f32],
    rstd: &[f32],
    dgamma: &mut [f32],
    dbeta: &mut [f32],
) {
    let width = check_width(dgamma, [x.len(), dy.len()], [mean.len(), rstd.len()]);
    assert_eq!(dbeta.len(), width, "beta is like gamma");
    let mut sums = vec![0.0; width];
    for (row, dy) in dy.chunks_exact(width).enumerate() {
        let x = &x[row * width..][..width];
        add_weight_row(dy, x, f64::from(mean[row]), f64::from(rstd[row]), &mut sums);
    }
    summation::round_to(&sums, dgamma);
    sums.fill(0.0);
    widest(
        #[inline(always)]
        || {
            dy.chunks_exact(width)
                .for_each(|dy| summation::add_to(&mut sums, dy));
        },
    );
    summation::round_to(&sums, dbeta);
}

/// Root-mean-square normalisation (Zhang & Sennrich 2019):
/// `(x[rows, width], gamma[width]) -> (y[rows, width], rstd[rows])` with
/// `y = x * rstd * gamma` and `rstd = 1 / sqrt(avg(x^2) + eps)`.
///
/// # Panics
/// If the slices do not have these shapes or `width` is zero.
pub fn rms_norm(x: &[f32], gamma: &[f32], eps: f64, y: &mut [f32], rstd: &mut [f32]) {
    let width = check_width(gamma, [x.len(), y.len()], [rstd.len(); 2]);
    widest(
        #[inline(always)]
        || {
            for ((x, y), rstd) in x
                .chunks_exact(width)
                .zip(y.chunks_exact_mut(width))
                .zip(rstd)
            {
                let r = 1.0 / (summation::dot(x, x) / width as f64 + eps).sqrt();
                for ((y, &x), &gamma) in y.iter_mut().zip(x).zip(gamma) {
                    *y = (f64::from(x) * r * f64::from(gamma)) as f32;
                }
                *rstd = r as f32;
            }
        },
    );
}

/// Input gradient of [`rms_norm`]:
/// `(dy[rows, width], x[rows, width], gamma[width], rstd[rows]) -> dx[rows, width]`.
///
/// # Panics
/// As [`rms_norm`].
pub fn rms_norm_grad_input(dy: &[f32], x: &[f32], gamma: &[f32], rstd: &[f32], dx: &mut [f32]) {
    let width = check_width(gamma, [x.len(), dy.len()], [rstd.len(); 2]);
    assert_eq!(dx.len(), x.len(), "gradient is like the operand");
    let rows = dy
        .chunks_exact(width)
        .zip(x.chunks_exact(width))
        .zip(dx.chunks_exact_mut(width));
    widest(
        #[inline(always)]
        || {
            for (((dy, x), dx), &rstd) in rows.zip(rstd) {
                grad_input_row(dy, x, gamma, 0.0, f64::from(rstd), 0.0, dx);
            }
        },
    );
}

/// Weight gradient of [`rms_norm`]:
/// `(dy[rows, width], x[rows, width], rstd[rows]) -> dgamma[width]`.
///
/// # Panics
/// As [`rms_norm`].
pub fn rms_norm_grad_weight(dy: &[f32], x: &[f32], rstd: &[f32], dgamma: &mut [f32]) {
    let width = check_width(dgamma, [x.len(), dy.len()], [rstd.len(); 2]);
    let mut sums = vec![0.0; width];
    let rows = dy.chunks_exact(width).zip(x.chunks_exact(width));
    for ((dy, x), &rstd) in rows.zip(rstd) {
        add_weight_row(dy, x, 0.0, f64::from(rstd), &mut sums);
    }
    summation::round_to(&sums, dgamma);
}

/// One row of `dx = rstd * (g - avg_g - xhat * avg(g * xhat))`.
#[inline(always)]
fn grad_input_row(
    dy: &[f32],
    x: &[f32],
    gamma: &[f32],
    mean: f64,
    rstd: f64,
    avg_g: f64,
    dx: &mut [f32],
) {
    let avg = rstd * summation::dot_centred(dy, gamma, x, mean) / dx.len() as f64;
    for (((dx, &dy), &x), &gamma) in dx.iter_mut().zip(dy).zip(x).zip(gamma) {
        let (g, xhat) = (
            f64::from(dy) * f64::from(gamma),
            (f64::from(x) - mean) * rstd,
        );
        *dx = (rstd * (g - avg_g - xhat * avg)) as f32;
    }
}

/// Adds one row's `dy * xhat` to the sums.
fn add_weight_row(dy: &[f32], x: &[f32], mean: f64, rstd: f64, sums: &mut [f64]) {
    widest(
        #[inline(always)]
        || {
            for ((sum, &dy), &x) in sums.iter_mut().zip(dy).zip(x) {
                *sum += f64::from(dy) * (f64::from(x) - mean) * rstd;
            }
        },
    );
}

/// The width, after checking `matrices` of `rows * width` and `columns` of `rows` elements.
fn check_width(weight: &[f32], matrices: [usize; 2], columns: [usize; 2]) -> usize {
    let (width, rows) = (weight.len(), columns[0]);
    assert!(width > 0, "rows have elements");
    assert_eq!(columns, [rows; 2], "statistics have one element per row");
    assert_eq!(
        matrices,
        [rows * width; 2],
        "{rows} rows of {width} elements"
    );
    width
}

#[cfg(test)]
mod tests {
    use super::super::differences::numeric_gradient;
    use super::super::testing::{assert_close, bits, elements, random, reference, tensor};
    use super::*;

    /// `y`, mean, rstd.
    fn layer(x: &[f32], gamma: &[f32], beta: &[f32], eps: f64) -> [Vec<f32>; 3] {
        let rows = x.len() / gamma.len();
        let mut y = vec![f32::NAN; x.len()];
        let (mut mean, mut rstd) = (vec![f32::NAN; rows], vec![f32::NAN; rows]);
        layer_norm(x, gamma, beta, eps, &mut y, &mut mean, &mut rstd);
        [y, mean, rstd]
    }

    /// `dx`, dgamma, dbeta.
    fn layer_grad(dy: &[f32], x: &[f32], gamma: &[f32], eps: f64) -> [Vec<f32>; 3] {
        let [_, mean, rstd] = layer(x, gamma, gamma, eps);
        let mut dx = vec![f32::NAN; x.len()];
        let (mut dgamma, mut dbeta) = (gamma.to_vec(), gamma.to_vec());
        layer_norm_grad_input(dy, x, gamma, &mean, &rstd, &mut dx);
        layer_norm_grad_weight(dy, x, &mean, &rstd, &mut dgamma, &mut dbeta);
        [dx, dgamma, dbeta]
    }

    /// `y`, rstd.
    fn rms(x: &[f32], gamma: &[f32], eps: f64) -> [Vec<f32>; 2] {
        let (mut y, mut rstd) = (
            vec![f32::NAN; x.len()],
            vec![f32::NAN; x.len() / gamma.len()],
        );
        rms_norm(x, gamma, eps, &mut y, &mut rstd);
        [y, rstd]
    }

    /// `dx`, dgamma.
    fn rms_grad(dy: &[f32], x: &[f32], gamma: &[f32], eps: f64) -> [Vec<f32>; 2] {
        let [_, rstd] = rms(x, gamma, eps);
        let (mut dx, mut dgamma) = (vec![f32::NAN; x.len()], gamma.to_vec());
        rms_norm_grad_input(dy, x, gamma, &rstd, &mut dx);
        rms_norm_grad_weight(dy, x, &rstd, &mut dgamma);
        [dx, dgamma]
    }

    #[test]
    fn layer_norm_equals_pytorch_s() {
        for entry in reference("layer_norm") {
            let input = |name: &str| elements(&entry["inputs"][name]);
            let (x, gamma, beta) = (input("x"), input("weight"), input("bias"));
            let eps = entry["attrs"]["eps"].as_f64().expect("a number");
            let [y, ..] = layer(&x, &gamma, &beta, eps);
            // The inputs are rounded to f32: at mean 30 that alone moves results by 1e-5.
            let name = entry["name"].as_str().expect("a name");
            let tolerance = if name == "shifted" { 2e-5 } else { 1e-6 };
            assert_close(&y, &tensor(&entry["outputs"]["y"]).1, tolerance, name);
            let dy = elements(&entry["upstream"]["y"]);
            let grads = layer_grad(&dy, &x, &gamma, eps);
            for (actual, of) in grads.iter().zip(["x", "weight", "bias"]) {
                assert_close(actual, &tensor(&entry["grads"][of]).1, tolerance, of);
            }
        }
    }

    #[test]
    fn rms_norm_equals_pytorch_s() {
        for entry in reference("rms_norm") {
            let input = |name: &str| elements(&entry["inputs"][name]);
            let (x, gamma) = (input("x"), input("weight"));
            let eps = entry["attrs"]["eps"].as_f64().expect("a number");
            let [y, _] = rms(&x, &gamma, eps);
            assert_close(&y, &tensor(&entry["outputs"]["y"]).1, 1e-6, "y");
            let dy = elements(&entry["upstream"]["y"]);
            let grads = rms_grad(&dy, &x, &gamma, eps);
            for (actual, of) in grads.iter().zip(["x", "weight"]) {
                assert_close(actual, &tensor(&entry["grads"][of]).1, 1e-6, of);
            }
        }
    }

    #[test]
    fn gradients_equal_differences() {
        const EPS: f64 = 0.1;
        for width in [1, 2, 13] {
            let (x, dy) = (random(1, 3 * width), random(2, 3 * width));
            let (gamma, beta) = (random(3, width), random(4, width));
            let numeric = |at: &[f32], f: &dyn Fn(&[f32]) -> Vec<f32>| numeric_gradient(at, &dy, f);
            let close = |actual: &[f32], expected: Vec<f64>, what: &str| {
                assert_close(actual, &expected, 1e-3, what);
            };
            let [dx, dgamma, dbeta] = layer_grad(&dy, &x, &gamma, EPS);
            close(
                &dx,
                numeric(&x, &|x| layer(x, &gamma, &beta, EPS)[0].clone()),
                "layer dx",
            );
            close(
                &dgamma,
                numeric(&gamma, &|g| layer(&x, g, &beta, EPS)[0].clone()),
                "layer dgamma",
            );
            close(
                &dbeta,
                numeric(&beta, &|b| layer(&x, &gamma, b, EPS)[0].clone()),
                "layer dbeta",
            );
            let [dx, dgamma] = rms_grad(&dy, &x, &gamma, EPS);
            close(
                &dx,
                numeric(&x, &|x| rms(x, &gamma, EPS)[0].clone()),
                "rms dx",
            );
            close(
                &dgamma,
                numeric(&gamma, &|g| rms(&x, g, EPS)[0].clone()),
                "rms dgamma",
            );
        }
    }

    #[test]
    fn statistics_are_those_of_the_row() {
        let [y, mean, rstd] = layer(&[1.0, 3.0, -2.0, -2.0], &[1.0, 2.0], &[0.0, 10.0], 0.0625);
        // Variances 1 and 0.
        let r = 1.0 / 1.0625f64.sqrt();
        assert_eq!(mean, [2.0, -2.0]);
        assert_close(&rstd, &[r, 4.0], 1e-7, "rstd");
        assert_close(&y, &[-r, 10.0 + 2.0 * r, 0.0, 10.0], 1e-7, "y");
        let [y, rstd] = rms(&[1.0, 7.0, 0.0, 0.0], &[1.0, 2.0], 0.0625);
        let r = 1.0 / 25.0625f64.sqrt();
        assert_close(&rstd, &[r, 4.0], 1e-7, "rstd");
        assert_close(&y, &[r, 14.0 * r, 0.0, 0.0], 1e-7, "y");
    }

    #[test]
    fn a_row_does_not_depend_on_other_rows() {
        const WIDTH: usize = 19;
        let (x, dy) = (random(5, 7 * WIDTH), random(6, 7 * WIDTH));
        let gamma = random(7, WIDTH);
        let [y, ..] = layer(&x, &gamma, &gamma, 1e-5);
        let [dx, ..] = layer_grad(&dy, &x, &gamma, 1e-5);
        let ([rms_y, _], [rms_dx, _]) = (rms(&x, &gamma, 1e-5), rms_grad(&dy, &x, &gamma, 1e-5));
        for row in (0..7).map(|row| row * WIDTH..(row + 1) * WIDTH) {
            let (x, dy) = (&x[row.clone()], &dy[row.clone()]);
            assert_eq!(
                bits(&layer(x, &gamma, &gamma, 1e-5)[0]),
                bits(&y[row.clone()])
            );
            assert_eq!(
                bits(&layer_grad(dy, x, &gamma, 1e-5)[0]),
                bits(&dx[row.clone()])
            );
            assert_eq!(bits(&rms(x, &gamma, 1e-5)[0]), bits(&rms_y[row.clone()]));
            assert_eq!(bits(&rms_grad(dy, x, &gamma, 1e-5)[0]), bits(&rms_dx[row]));
        }
    }

    #[test]
    fn no_rows() {
        let gamma = [1.0; 3];
        assert_eq!(
            layer(&[], &gamma, &gamma, 1e-5),
            [const { Vec::<f32>::new() }; 3]
        );
        assert_eq!(
            layer_grad(&[], &[], &gamma, 1e-5),
            [vec![], vec![0.0; 3], vec![0.0; 3]]
        );
        assert_eq!(rms(&[], &gamma, 1e-5), [const { Vec::<f32>::new() }; 2]);
        assert_eq!(rms_grad(&[], &[], &gamma, 1e-5), [vec![], vec![0.0; 3]]);
    }
}
