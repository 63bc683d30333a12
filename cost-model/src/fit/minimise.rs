//! Least squares without derivatives.

/// Pattern search (Hooke & Jeeves 1961): steps along each coordinate, then along the last
/// gain; the step halves when nothing gains. Stays within `bounds`.
pub(super) fn minimise(
    start: Vec<f64>,
    bounds: &[(f64, f64)],
    f: &dyn Fn(&[f64]) -> f64,
) -> Vec<f64> {
    const SMALLEST_STEP: f64 = 1e-7;
    const MAX_ROUNDS: usize = 10_000;
    let clamp = |x: &mut [f64]| {
        x.iter_mut()
            .zip(bounds)
            .for_each(|(x, b)| *x = x.clamp(b.0, b.1))
    };
    let explore = |from: &[f64], step: f64| {
        let (mut at, mut value) = (from.to_vec(), f(from));
        for i in 0..at.len() {
            for by in [step, -step] {
                let mut next = at.clone();
                next[i] += by;
                clamp(&mut next);
                let there = f(&next);
                if there < value {
                    (at, value) = (next, there);
                    break;
                }
            }
        }
        (at, value)
    };
    let (mut best, mut step) = (start, 1.0);
    clamp(&mut best);
    let mut value = f(&best);
    for _ in 0..MAX_ROUNDS {
        let (at, there) = explore(&best, step);
        if there < value {
            let mut beyond: Vec<f64> = at.iter().zip(&best).map(|(a, b)| 2.0 * a - b).collect();
            clamp(&mut beyond);
            let (further, further_value) = explore(&beyond, step);
            (best, value) = if further_value < there {
                (further, further_value)
            } else {
                (at, there)
            };
        } else if step > SMALLEST_STEP {
            step *= 0.5;
        } else {
            break;
        }
    }
    best
}
