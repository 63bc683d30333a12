//! Numerical differentiation, for the tests of gradient kernels.

/// Gradient of `<upstream, f(x)>` by differences, which a kernel's gradient must match.
///
/// The kernels round to `f32`, hence the large steps; combining two of them (Richardson) leaves
/// an error of fourth order in the step.
pub(crate) fn numeric_gradient(
    x: &[f32],
    upstream: &[f32],
    f: impl Fn(&[f32]) -> Vec<f32>,
) -> Vec<f64> {
    const STEP: f32 = 1.0 / 32.0;
    let value = |x: &[f32]| -> f64 {
        let y = f(x);
        assert_eq!(
            y.len(),
            upstream.len(),
            "upstream gradient is like the result"
        );
        y.iter()
            .zip(upstream)
            .map(|(&y, &u)| f64::from(y) * f64::from(u))
            .sum()
    };
    let slope = |i: usize, step: f32| {
        let (mut above, mut below) = (x.to_vec(), x.to_vec());
        above[i] += step;
        below[i] -= step;
        (value(&above) - value(&below)) / (f64::from(above[i]) - f64::from(below[i]))
    };
    let derivative = |i| (4.0 * slope(i, STEP) - slope(i, 2.0 * STEP)) / 3.0;
    (0..x.len()).map(derivative).collect()
}
