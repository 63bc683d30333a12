//! Elementwise functions, their gradients, and dropout.
//!
//! An element of the result is a function of the operands' elements at its place (and, for
//! dropout, of its name), never of its neighbours. Anything but `+ - *` is evaluated in `f64`
//! and rounded once. A NaN operand gives NaN, so that bad values reach the norm check.

use super::special::{exp, logistic, normal, tanh};
use super::wide::widest;

/// Elements that are copied at a time where a result takes the place of an operand: few enough to
/// stay in the first cache.
const BLOCK: usize = 1024;

/// Functions of one operand.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Unary {
    /// `-x`.
    Neg,
    /// `c * x`, the factor rounded to `f32` first, as PyTorch does.
    Scale(f64),
    /// GELU, `x * P(X <= x)` for a standard normal `X` (Hendrycks & Gimpel 2016).
    GeluErf,
    /// GELU, tanh approximation: `x * (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2`.
    GeluTanh,
    /// `x * logistic(x)`.
    Silu,
    /// `max(x, 0)`.
    Relu,
    /// `exp(x)`.
    Exp,
    /// `tanh(x)`.
    Tanh,
    /// `x * x`.
    Square,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
}

/// Functions of two operands. Those named `..Grad` take `(x, dy)` and give `dy * f'(x)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binary {
    /// `a + b`.
    Add,
    /// `a - b`.
    Sub,
    /// `a * b`.
    Mul,
    /// Gradient of [`Unary::GeluErf`].
    GeluErfGrad,
    /// Gradient of [`Unary::GeluTanh`].
    GeluTanhGrad,
    /// Gradient of [`Unary::Silu`].
    SiluGrad,
    /// Gradient of [`Unary::Relu`]; zero at zero.
    ReluGrad,
}

/// `out[i] = f(x[i])`.
///
/// # Panics
/// If the lengths differ.
pub fn unary(f: Unary, x: &[f32], out: &mut [f32]) {
    widest(
        #[inline(always)]
        || unary_loops(f, x, out),
    );
}

/// `x[i] = f(x[i])`, in place.
pub fn unary_over(f: Unary, x: &mut [f32]) {
    let mut block = [0.0; BLOCK];
    for out in x.chunks_mut(BLOCK) {
        let x = &mut block[..out.len()];
        x.copy_from_slice(out);
        unary(f, x, out);
    }
}

#[inline(always)]
fn unary_loops(f: Unary, x: &[f32], out: &mut [f32]) {
    match f {
        Unary::Neg => map(x, out, |x| -x),
        Unary::Scale(by) => {
            let by = by as f32;
            map(x, out, |x| by * x);
        }
        Unary::GeluErf => map_f64(x, out, |x| x * normal(x).0),
        Unary::GeluTanh => map_f64(x, out, |x| x * logistic(gelu_tanh_argument(x).0).0),
        Unary::Silu => map_f64(x, out, |x| x * logistic(x).0),
        // Not `f32::max`, which would turn NaN into zero.
        Unary::Relu => map(x, out, |x| if x < 0.0 { 0.0 } else { x }),
        Unary::Exp => map_f64(x, out, exp),
        Unary::Tanh => map_f64(x, out, tanh),
        Unary::Square => map(x, out, |x| x * x),
        Unary::Sigmoid => map_f64(x, out, |x| logistic(x).0),
    }
}

/// `out[i] = f(a[i], b[i % b.len()])`: `b` has the trailing dims of `a` and repeats over the
/// leading ones.
///
/// # Panics
/// If `out` is not as long as `a`, or `a` not a multiple of `b`.
pub fn binary(f: Binary, a: &[f32], b: &[f32], out: &mut [f32]) {
    widest(
        #[inline(always)]
        || binary_loops(f, a, b, out),
    );
}

/// [`binary`] whose result takes the place of an operand: of the one that is absent, or of both.
///
/// # Panics
/// As [`binary`], and if `b` is absent and `a` not as long as `out`.
pub fn binary_over(f: Binary, a: Option<&[f32]>, b: Option<&[f32]>, out: &mut [f32]) {
    if let Some(a) = a {
        assert_eq!(a.len(), out.len(), "operand and result have one length");
    }
    // Where `b` repeats, every block begins where it does.
    let total = out.len();
    let repeated = b.filter(|b| b.len() != total);
    let n = BLOCK.next_multiple_of(repeated.map_or(1, |b| b.len().max(1)));
    let mut block = vec![0.0; n.min(total)];
    for (i, out) in out.chunks_mut(n).enumerate() {
        let old = &mut block[..out.len()];
        old.copy_from_slice(out);
        let (old, at) = (&*old, i * n..i * n + out.len());
        let a = a.map_or(old, |a| &a[at.clone()]);
        let b = repeated.unwrap_or_else(|| b.map_or(old, |b| &b[at]));
        binary(f, a, b, out);
    }
}

#[inline(always)]
fn binary_loops(f: Binary, a: &[f32], b: &[f32], out: &mut [f32]) {
    match f {
        Binary::Add => zip(a, b, out, |a, b| a + b),
        Binary::Sub => zip(a, b, out, |a, b| a - b),
        Binary::Mul => zip(a, b, out, |a, b| a * b),
        Binary::GeluErfGrad => zip_f64(a, b, out, |x, dy| {
            let (cdf, density) = normal(x);
            dy * (cdf + x * density)
        }),
        Binary::GeluTanhGrad => zip_f64(a, b, out, |x, dy| {
            let (u, slope) = gelu_tanh_argument(x);
            let (s, rest) = logistic(u);
            dy * (s + x * slope * s * rest)
        }),
        Binary::SiluGrad => zip_f64(a, b, out, |x, dy| {
            let (s, rest) = logistic(x);
            dy * (s + x * s * rest)
        }),
        Binary::ReluGrad => zip(a, b, out, |x, dy| if x <= 0.0 { 0.0 } else { dy }),
    }
}

/// `out[r, i] = x[r, i] * scales[r]`, for as many rows as there are scales.
///
/// # Panics
/// If `out` is not as long as `x`, or `x` not a multiple of `scales`.
pub fn scale_rows(x: &[f32], scales: &[f32], out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "operand and result have one length");
    if x.is_empty() {
        return;
    }
    let width = x.len() / scales.len();
    assert_eq!(width * scales.len(), x.len(), "rows have one length");
    let rows = x.chunks_exact(width).zip(out.chunks_exact_mut(width));
    for ((x, out), &by) in rows.zip(scales) {
        map(x, out, |x| x * by);
    }
}

/// `acc[i] += x[i]`.
///
/// # Panics
/// If the lengths differ.
pub fn accumulate(acc: &mut [f32], x: &[f32]) {
    assert_eq!(acc.len(), x.len(), "accumulator and addend have one length");
    widest(
        #[inline(always)]
        || acc.iter_mut().zip(x).for_each(|(acc, &x)| *acc += x),
    );
}

/// Dropout: `out[i]` is zero with probability `p` and `x[i] / (1 - p)` otherwise.
///
/// `index(i)` is the index of element `i` of this shard in the whole tensor, and
/// `uniform(index)` its number in `[0, 1)`; the element is dropped when that is below `p`. So
/// the mask belongs to the tensor, not to its layout. The gradient is the same function of `dy`.
///
/// # Panics
/// If the lengths differ or `p` is outside `[0, 1]`.
pub fn dropout(
    x: &[f32],
    p: f64,
    index: impl Fn(usize) -> u64,
    uniform: impl Fn(u64) -> f32,
    out: &mut [f32],
) {
    assert_eq!(x.len(), out.len(), "operand and result have one length");
    assert!((0.0..=1.0).contains(&p), "{p} is a probability");
    let scale = (1.0 / (1.0 - p)) as f32;
    for (i, (&x, out)) in x.iter().zip(out).enumerate() {
        let dropped = f64::from(uniform(index(i))) < p;
        *out = if dropped { 0.0 } else { x * scale };
    }
}

/// `u` and `du/dx` with `GELU(x) ~ x * logistic(u)` and
/// `u = 2 sqrt(2/pi) (x + 0.044715 x^3)`: the usual `(1 + tanh(u/2)) / 2` is `logistic(u)`,
/// which loses nothing to cancellation.
#[inline(always)]
fn gelu_tanh_argument(x: f64) -> (f64, f64) {
    const SCALE: f64 = std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::SQRT_2;
    const CUBIC: f64 = 0.044_715;
    let x2 = x * x;
    (
        SCALE * x * (1.0 + CUBIC * x2),
        SCALE * (1.0 + 3.0 * CUBIC * x2),
    )
}

#[inline(always)]
fn map(x: &[f32], out: &mut [f32], f: impl Fn(f32) -> f32) {
    assert_eq!(x.len(), out.len(), "operand and result have one length");
    for (&x, out) in x.iter().zip(out) {
        *out = f(x);
    }
}

#[inline(always)]
fn map_f64(x: &[f32], out: &mut [f32], f: impl Fn(f64) -> f64) {
    map(x, out, |x| f(f64::from(x)) as f32);
}

#[inline(always)]
fn zip(a: &[f32], b: &[f32], out: &mut [f32], f: impl Fn(f32, f32) -> f32) {
    assert_eq!(
        a.len(),
        out.len(),
        "first operand and result have one length"
    );
    if a.is_empty() {
        return;
    }
    assert!(
        !b.is_empty() && a.len().is_multiple_of(b.len()),
        "{} repeats to {}",
        b.len(),
        a.len()
    );
    if let [b] = *b {
        // A loop of length one per element would be slow.
        return map(a, out, |a| f(a, b));
    }
    for (a, out) in a.chunks_exact(b.len()).zip(out.chunks_exact_mut(b.len())) {
        for ((&a, &b), out) in a.iter().zip(b).zip(out) {
            *out = f(a, b);
        }
    }
}

#[inline(always)]
fn zip_f64(a: &[f32], b: &[f32], out: &mut [f32], f: impl Fn(f64, f64) -> f64) {
    zip(a, b, out, |a, b| f(f64::from(a), f64::from(b)) as f32);
}

#[cfg(test)]
mod tests {
    use super::super::differences::numeric_gradient;
    use super::super::testing::{assert_close, bits, elements, random, reference, tensor};
    use super::*;

    fn apply(f: Unary, x: &[f32]) -> Vec<f32> {
        let mut out = vec![f32::NAN; x.len()];
        unary(f, x, &mut out);
        out
    }

    fn apply2(f: Binary, a: &[f32], b: &[f32]) -> Vec<f32> {
        let mut out = vec![f32::NAN; a.len()];
        binary(f, a, b, &mut out);
        out
    }

    const GRADIENTS: [(Unary, Binary); 4] = [
        (Unary::GeluErf, Binary::GeluErfGrad),
        (Unary::GeluTanh, Binary::GeluTanhGrad),
        (Unary::Silu, Binary::SiluGrad),
        (Unary::Relu, Binary::ReluGrad),
    ];

    #[test]
    fn activations_equal_pytorch_s() {
        for (op, (f, grad)) in ["gelu_erf", "gelu_tanh", "silu"].into_iter().zip(GRADIENTS) {
            for entry in reference(op) {
                let x = elements(&entry["inputs"]["x"]);
                let dy = elements(&entry["upstream"]["y"]);
                assert_close(&apply(f, &x), &tensor(&entry["outputs"]["y"]).1, 1e-6, op);
                assert_close(
                    &apply2(grad, &x, &dy),
                    &tensor(&entry["grads"]["x"]).1,
                    1e-6,
                    op,
                );
            }
        }
    }

    /// Lengths on both sides of a block's, with operands that repeat at lengths that do and do not
    /// divide it.
    #[test]
    fn results_over_operands_have_the_bits_of_results_beside_them() {
        for n in [0, 1, 7, BLOCK, 3 * BLOCK + 6] {
            let (a, b) = (random(2, n), random(3, n));
            let mut over = a.clone();
            unary_over(Unary::GeluTanh, &mut over);
            assert_eq!(bits(&over), bits(&apply(Unary::GeluTanh, &a)));
            let f = Binary::SiluGrad;
            let mut over = a.clone();
            binary_over(f, None, Some(&b), &mut over);
            assert_eq!(bits(&over), bits(&apply2(f, &a, &b)));
            let mut over = b.clone();
            binary_over(f, Some(&a), None, &mut over);
            assert_eq!(bits(&over), bits(&apply2(f, &a, &b)));
            let mut over = a.clone();
            binary_over(f, None, None, &mut over);
            assert_eq!(bits(&over), bits(&apply2(f, &a, &a)));
        }
        for (rows, width) in [(5, 1), (700, 3), (3, BLOCK), (2, BLOCK + 9)] {
            let (a, b) = (random(4, rows * width), random(5, width));
            let mut over = a.clone();
            binary_over(Binary::Sub, None, Some(&b), &mut over);
            assert_eq!(bits(&over), bits(&apply2(Binary::Sub, &a, &b)));
        }
    }

    #[test]
    fn gradients_equal_differences() {
        // Multiples of 1/4 and an eighth: no difference straddles the kink of ReLU.
        let x: Vec<f32> = (-24..24).map(|i| i as f32 / 4.0 + 0.125).collect();
        let dy = random(1, x.len());
        for (f, grad) in GRADIENTS {
            let expected = numeric_gradient(&x, &dy, |x| apply(f, x));
            assert_close(&apply2(grad, &x, &dy), &expected, 1e-4, "gradient");
        }
    }

    #[test]
    fn plain_functions() {
        let x = random(2, 33);
        let naive = |f: fn(f64) -> f64| x.iter().map(|&x| f(f64::from(x))).collect::<Vec<_>>();
        assert_close(&apply(Unary::Neg, &x), &naive(|x| -x), 0.0, "neg");
        assert_close(
            &apply(Unary::Scale(0.5), &x),
            &naive(|x| 0.5 * x),
            0.0,
            "scale",
        );
        assert_close(&apply(Unary::Relu, &x), &naive(|x| x.max(0.0)), 0.0, "relu");
        assert_close(&apply(Unary::Exp, &x), &naive(f64::exp), 6e-8, "exp");
        assert_close(&apply(Unary::Tanh, &x), &naive(f64::tanh), 6e-8, "tanh");
        assert_close(&apply(Unary::Square, &x), &naive(|x| x * x), 6e-8, "square");
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        assert_close(&apply(Unary::Sigmoid, &x), &naive(sigmoid), 6e-8, "sigmoid");
        assert!(apply(Unary::Exp, &[]).is_empty());
    }

    #[test]
    fn rows_are_scaled() {
        let (x, scales) = (random(5, 42), random(6, 6));
        let naive: Vec<f64> = (0..42)
            .map(|i| f64::from(x[i]) * f64::from(scales[i / 7]))
            .collect();
        let mut out = vec![f32::NAN; 42];
        scale_rows(&x, &scales, &mut out);
        assert_close(&out, &naive, 6e-8, "rows");
        scale_rows(&[], &[], &mut []);
    }

    #[test]
    fn gelu_keeps_relative_precision_in_its_tail() {
        // x * P(X <= x) from mpmath at x = -8.5 and -13.
        let expected = [
            -8.5 * 9.479_534_822_203_318e-18,
            -13.0 * 6.117_164_399_549_88e-39,
        ];
        for (actual, expected) in apply(Unary::GeluErf, &[-8.5, -13.0]).iter().zip(expected) {
            assert!(
                (f64::from(*actual) / expected - 1.0).abs() < 1e-7,
                "{actual} for {expected}"
            );
        }
    }

    #[test]
    fn bad_values_are_not_hidden() {
        let every = [
            Unary::Neg,
            Unary::Scale(2.0),
            Unary::GeluErf,
            Unary::GeluTanh,
            Unary::Silu,
            Unary::Relu,
            Unary::Exp,
            Unary::Tanh,
            Unary::Square,
            Unary::Sigmoid,
        ];
        for f in every {
            assert!(apply(f, &[f32::NAN])[0].is_nan(), "{f:?} of NaN");
        }
        for (_, grad) in GRADIENTS {
            assert!(
                apply2(grad, &[1.0], &[f32::NAN])[0].is_nan(),
                "{grad:?} of NaN"
            );
        }
    }

    #[test]
    fn second_operand_repeats_over_leading_dims() {
        let (a, b) = (random(3, 42), random(4, 7));
        for n in [1, 2, 7] {
            let b = &b[..n];
            let at = |i: usize| f64::from(b[i % n]);
            let naive = |f: fn(f64, f64) -> f64| {
                a.iter()
                    .enumerate()
                    .map(|(i, &a)| f(f64::from(a), at(i)))
                    .collect::<Vec<_>>()
            };
            assert_close(
                &apply2(Binary::Add, &a, b),
                &naive(|a, b| a + b),
                1e-7,
                "add",
            );
            assert_close(
                &apply2(Binary::Sub, &a, b),
                &naive(|a, b| a - b),
                1e-7,
                "sub",
            );
            assert_close(
                &apply2(Binary::Mul, &a, b),
                &naive(|a, b| a * b),
                1e-7,
                "mul",
            );
        }
        assert!(apply2(Binary::Add, &[], &b).is_empty());
        assert!(apply2(Binary::Add, &[], &[]).is_empty());
    }

    #[test]
    fn an_element_does_not_depend_on_its_neighbours() {
        let x = random(5, 67);
        for f in [
            Unary::GeluErf,
            Unary::GeluTanh,
            Unary::Silu,
            Unary::Exp,
            Unary::Tanh,
        ] {
            let together = apply(f, &x);
            for (i, x) in x.iter().enumerate() {
                assert_eq!(
                    apply(f, &[*x])[0].to_bits(),
                    together[i].to_bits(),
                    "{f:?}({x})"
                );
            }
        }
    }

    #[test]
    fn dropout_follows_the_named_numbers() {
        let key = crate::rng::Key::new(3, 1, "dropout");
        let uniform = |i| crate::rng::uniform(key, i);
        let x = vec![3.0; 1000];
        let mut whole = vec![f32::NAN; 1000];
        dropout(&x, 0.25, |i| i as u64, uniform, &mut whole);
        for (i, &y) in whole.iter().enumerate() {
            assert_eq!(y, if uniform(i as u64) < 0.25 { 0.0 } else { 4.0 });
        }
        let dropped = whole.iter().filter(|&&y| y == 0.0).count();
        assert!(
            (200..300).contains(&dropped),
            "{dropped} of 1000 at p = 0.25"
        );
        let mut shard = vec![f32::NAN; 10];
        dropout(&x[..10], 0.25, |i| 100 * i as u64 + 7, uniform, &mut shard);
        let expected: Vec<f32> = whole.iter().skip(7).step_by(100).copied().collect();
        assert_eq!(shard, expected);
        dropout(&x[..10], 1.0, |i| i as u64, uniform, &mut shard);
        assert_eq!(shard, [0.0; 10]);
    }

    #[test]
    fn accumulation_adds() {
        let mut acc = vec![1.0, 2.0];
        accumulate(&mut acc, &[0.5, -2.0]);
        assert_eq!(acc, [1.5, 0.0]);
    }
}
