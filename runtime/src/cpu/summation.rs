//! Sums of many `f32` terms, as every reduction of this backend takes them.
//!
//! Terms are added in `f64` and the caller rounds once, so that a sum's error does not grow with
//! its length and splitting it over ranks or microbatches changes at most the last bit. The
//! order of the additions is a function of the number of terms alone. All are inlined, so that
//! they have the vectors of the loop that they are in.

/// Independent partial sums: hides the latency of the additions, and fills vector registers.
const LANES: usize = 8;

/// Sum of `term(x[i])` over all elements; zero when there are none.
#[inline(always)]
pub fn sum_by(x: &[f32], term: impl Fn(f64) -> f64) -> f64 {
    let mut lanes = [0.0; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &v) in lanes.iter_mut().zip(chunk) {
            *lane += term(f64::from(v));
        }
    }
    for (lane, &v) in lanes.iter_mut().zip(rest) {
        *lane += term(f64::from(v));
    }
    lanes.iter().sum()
}

/// Sum of all elements; zero when there are none.
#[inline(always)]
pub fn sum(x: &[f32]) -> f64 {
    sum_by(x, |v| v)
}

/// Sum of `x[i] * y[i]`; zero when there are none.
///
/// # Panics
/// If the lengths differ.
#[inline(always)]
pub fn dot(x: &[f32], y: &[f32]) -> f64 {
    assert_eq!(
        x.len(),
        y.len(),
        "operands of a dot product have one length"
    );
    let mut lanes = [0.0; LANES];
    let ((xs, x_rest), (ys, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    for (x, y) in xs.iter().zip(ys) {
        for (lane, (&x, &y)) in lanes.iter_mut().zip(x.iter().zip(y)) {
            *lane += f64::from(x) * f64::from(y);
        }
    }
    for (lane, (&x, &y)) in lanes.iter_mut().zip(x_rest.iter().zip(y_rest)) {
        *lane += f64::from(x) * f64::from(y);
    }
    lanes.iter().sum()
}

/// Sum of `x[i] * y[i] * (z[i] - centre)`; zero when there are none.
///
/// # Panics
/// If the lengths differ.
#[inline(always)]
pub fn dot_centred(x: &[f32], y: &[f32], z: &[f32], centre: f64) -> f64 {
    assert_eq!(
        [x.len(), y.len()],
        [z.len(); 2],
        "operands of a dot product have one length"
    );
    let mut lanes = [0.0; LANES];
    for ((x, y), z) in x.chunks(LANES).zip(y.chunks(LANES)).zip(z.chunks(LANES)) {
        for (((lane, &x), &y), &z) in lanes.iter_mut().zip(x).zip(y).zip(z) {
            *lane += f64::from(x) * f64::from(y) * (f64::from(z) - centre);
        }
    }
    lanes.iter().sum()
}

/// Adds each element of `x` to the `f64` accumulator at its place.
///
/// # Panics
/// If the lengths differ.
#[inline(always)]
pub fn add_to(acc: &mut [f64], x: &[f32]) {
    assert_eq!(acc.len(), x.len(), "accumulator and terms have one length");
    for (acc, &v) in acc.iter_mut().zip(x) {
        *acc += f64::from(v);
    }
}

/// Rounds accumulated sums to `f32`.
///
/// # Panics
/// If the lengths differ.
#[inline(always)]
pub fn round_to(acc: &[f64], out: &mut [f32]) {
    assert_eq!(
        acc.len(),
        out.len(),
        "accumulator and result have one length"
    );
    for (out, &sum) in out.iter_mut().zip(acc) {
        *out = sum as f32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_integers_are_exact_at_every_length() {
        for n in 0..40usize {
            let x: Vec<f32> = (0..n).map(|i| i as f32).collect();
            let expected: usize = (0..n).sum();
            let squares: usize = (0..n).map(|i| i * i).sum();
            assert_eq!(sum(&x), expected as f64);
            assert_eq!(dot(&x, &x), squares as f64);
            assert_eq!(sum_by(&x, |v| v * v), squares as f64);
            let centred: f64 = x.iter().map(|&x| f64::from(x * x * (x - 3.0))).sum();
            assert_eq!(dot_centred(&x, &x, &x, 3.0), centred);
        }
    }

    #[test]
    fn a_long_sum_keeps_terms_that_f32_would_lose() {
        // In f32, 2^24 + 1 = 2^24.
        let mut x = vec![1.0f32; 1 << 16];
        x[0] = (1 << 24) as f32;
        assert_eq!(sum(&x), f64::from((1 << 24) + (1 << 16) - 1));
        let mut acc = vec![0.0; 2];
        add_to(&mut acc, &[16_777_216.0, 1.0]);
        add_to(&mut acc, &[1.0, 2.0]);
        add_to(&mut acc, &[1.0, 3.0]);
        let mut out = [0.0; 2];
        round_to(&acc, &mut out);
        assert_eq!(out, [16_777_218.0, 6.0]);
    }
}
