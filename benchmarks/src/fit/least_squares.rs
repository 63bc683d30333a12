//! Robust least squares within bounds: Levenberg-Marquardt on the logarithms of the values.
//!
//! With `u` the logarithms, `r_i` the logarithm of predicted over measured, `w_i` the weight of
//! a row, `u0_j` the default and `s_j` a quarter of the distance between the bounds,
//!
//! ```text
//! F(u) = sum_i w_i 2 (sqrt(1 + (r_i / d)^2) - 1) + sum_j ((u_j - u0_j) / s_j)^2
//! ```
//!
//! so that small residuals count squared, and large ones by their size (soft L1). Each step
//! solves the normal equations with the weights `w_i / (d^2 sqrt(1 + (r_i / d)^2))`.

/// The residual from which on size counts in place of the square.
pub const SCALE: f64 = 0.05;
/// The most steps.
const MAX_STEPS: usize = 12;
/// A step that improves by less than this share is the last.
const TOLERANCE: f64 = 2e-4;

/// The parameters that are fitted.
pub struct Bounds {
    /// The logarithms of the defaults.
    pub default: Vec<f64>,
    /// The logarithms of the lower bounds.
    pub low: Vec<f64>,
    /// The logarithms of the upper bounds.
    pub high: Vec<f64>,
}

/// A point with its residuals and, by parameter, their derivatives.
#[derive(Clone)]
pub struct Point {
    /// The logarithms of the values.
    pub at: Vec<f64>,
    /// The residual of each row.
    pub residuals: Vec<f64>,
    /// The derivatives, by parameter and row.
    pub slopes: Vec<Vec<f64>>,
}

impl Bounds {
    fn spread(&self, j: usize) -> f64 {
        (self.high[j] - self.low[j]).max(1e-6) / 4.0
    }

    /// Computes the objective.
    pub fn objective(&self, weights: &[f64], at: &[f64], residuals: &[f64]) -> f64 {
        let data: f64 = weights
            .iter()
            .zip(residuals)
            .map(|(w, r)| w * 2.0 * ((1.0 + (r / SCALE).powi(2)).sqrt() - 1.0))
            .sum();
        let prior: f64 = (0..at.len())
            .map(|j| ((at[j] - self.default[j]) / self.spread(j)).powi(2))
            .sum();
        data + prior
    }

    /// Returns the next point: a step damped by `damping`, kept within the bounds.
    fn step(&self, weights: &[f64], point: &Point, damping: f64) -> Vec<f64> {
        let n = point.at.len();
        let scaled: Vec<f64> = weights
            .iter()
            .zip(&point.residuals)
            .map(|(w, r)| w / (SCALE * SCALE * (1.0 + (r / SCALE).powi(2)).sqrt()))
            .collect();
        let dot = |a: &[f64], b: &[f64]| -> f64 {
            scaled
                .iter()
                .zip(a)
                .zip(b)
                .map(|((w, a), b)| w * a * b)
                .sum()
        };
        let mut gradient: Vec<f64> = (0..n)
            .map(|j| {
                dot(&point.slopes[j], &point.residuals)
                    + (point.at[j] - self.default[j]) / self.spread(j).powi(2)
            })
            .collect();
        // A value at a bound that the step would leave stays.
        let fixed: Vec<bool> = (0..n)
            .map(|j| {
                (point.at[j] <= self.low[j] + 1e-12 && gradient[j] > 0.0)
                    || (point.at[j] >= self.high[j] - 1e-12 && gradient[j] < 0.0)
            })
            .collect();
        let mut matrix = vec![vec![0.0; n]; n];
        for i in 0..n {
            for j in 0..n {
                if !fixed[i] && !fixed[j] {
                    matrix[i][j] = dot(&point.slopes[i], &point.slopes[j]);
                }
            }
            matrix[i][i] += 1.0 / self.spread(i).powi(2);
            matrix[i][i] *= 1.0 + damping;
            if fixed[i] {
                gradient[i] = 0.0;
            }
        }
        let change = solve(matrix, gradient);
        (0..n)
            .map(|j| (point.at[j] - change[j]).clamp(self.low[j], self.high[j]))
            .collect()
    }
}

/// Minimises the objective from `point`. `residuals` prices values; `slopes` gives the
/// derivatives there, or `None` where those of the start are good enough.
pub fn minimise(
    bounds: &Bounds,
    weights: &[f64],
    mut point: Point,
    residuals: impl Fn(&[f64]) -> Vec<f64>,
    slopes: impl Fn(&[f64], &[f64]) -> Option<Vec<Vec<f64>>>,
) -> Point {
    let mut damping = 1e-2;
    let mut objective = bounds.objective(weights, &point.at, &point.residuals);
    for _ in 0..MAX_STEPS {
        let at = bounds.step(weights, &point, damping);
        let next = residuals(&at);
        let there = bounds.objective(weights, &at, &next);
        let gained = (objective - there) / objective.max(1e-12);
        if gained <= 0.0 {
            damping *= 8.0;
            if damping > 1e3 {
                break;
            }
            continue;
        }
        damping = (damping / 4.0).max(1e-4);
        objective = there;
        (point.at, point.residuals) = (at, next);
        if gained < TOLERANCE {
            break;
        }
        if let Some(slopes) = slopes(&point.at, &point.residuals) {
            point.slopes = slopes;
        }
    }
    point
}

/// Solves a symmetric positive definite system by elimination with pivots.
fn solve(mut matrix: Vec<Vec<f64>>, mut right: Vec<f64>) -> Vec<f64> {
    let n = right.len();
    for column in 0..n {
        let pivot = (column..n)
            .max_by(|&a, &b| matrix[a][column].abs().total_cmp(&matrix[b][column].abs()))
            .unwrap_or(column);
        matrix.swap(column, pivot);
        right.swap(column, pivot);
        let (top, below) = matrix.split_at_mut(column + 1);
        let row = &top[column];
        for (k, other) in below.iter_mut().enumerate() {
            let factor = other[column] / row[column];
            for (x, y) in other.iter_mut().zip(row).skip(column) {
                *x -= factor * y;
            }
            right[column + 1 + k] -= factor * right[column];
        }
    }
    for i in (0..n).rev() {
        let known: f64 = (i + 1..n).map(|j| matrix[i][j] * right[j]).sum();
        right[i] = (right[i] - known) / matrix[i][i];
    }
    right
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows `u0 + x u1 - y`, one of them far off: the line through the others is found, and
    /// bounds hold.
    #[test]
    fn a_line_is_found_in_spite_of_an_outlier() {
        let xs = [0.0, 1.0, 2.0, 3.0, 4.0];
        let ys = [0.1, 0.3, 0.5, 0.7, 5.0];
        let line = |u: &[f64]| -> Vec<f64> {
            xs.iter()
                .zip(ys)
                .map(|(x, y)| u[0] + x * u[1] - y)
                .collect()
        };
        let run = |high: f64| {
            let bounds = Bounds {
                default: vec![0.0, 0.0],
                low: vec![-50.0, -50.0],
                high: vec![50.0, high],
            };
            let start = Point {
                at: vec![0.0, 0.0],
                residuals: line(&[0.0, 0.0]),
                slopes: vec![vec![1.0; 5], xs.to_vec()],
            };
            minimise(&bounds, &[1.0; 5], start, line, |_, _| None).at
        };
        // Least squares would give a slope of 0.2 + 2 * 4.1 / 10 = 1.02.
        let free = run(50.0);
        let near = |x: f64, y: f64| (x - y).abs() < SCALE;
        assert!(near(free[0], 0.1) && near(free[1], 0.2), "{free:?}");
        assert!((run(0.15)[1] - 0.15).abs() < 1e-9);
    }
}
