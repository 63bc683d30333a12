//! The Newton step of the prices: a quadratic program over non-negative prices.
//!
//! Invariant: the curvature is symmetric and positive semi-definite, as covariances are.

/// The work of one price step: multiplications in its quadratic program.
const STEP_WORK: usize = 4_000_000;
/// A square matrix, stored by rows.
pub(super) struct Square {
    n: usize,
    cells: Vec<f64>,
}

impl Square {
    pub fn new(n: usize) -> Square {
        Square {
            n,
            cells: vec![0.0; n * n],
        }
    }

    /// Adds `x` at the corners of a rectangle, so that running sums fill it.
    pub fn add_rectangle(&mut self, rows: [usize; 2], cols: [usize; 2], x: f64) {
        self.cells[rows[0] * self.n + cols[0]] += x;
        self.cells[rows[1] * self.n + cols[0]] -= x;
        self.cells[rows[0] * self.n + cols[1]] -= x;
        self.cells[rows[1] * self.n + cols[1]] += x;
    }

    /// Sums up the rectangles that were added.
    pub fn running_sums(&mut self) {
        let n = self.n;
        for row in self.cells.chunks_exact_mut(n) {
            for j in 1..n {
                row[j] += row[j - 1];
            }
        }
        for i in n..n * n {
            self.cells[i] += self.cells[i - n];
        }
    }
}

/// Maximises `gradient d - d curvature d / 2` over `prices + d >= 0`, one coordinate after
/// the other.
pub(super) fn newton_step(curvature: &Square, gradient: &[f64], prices: &[f64]) -> Vec<f64> {
    let (k, n) = (gradient.len(), curvature.n);
    let diagonal = |i: usize| curvature.cells[i * n + i];
    let largest = (0..k).map(diagonal).fold(0.0, f64::max);
    if largest <= 0.0 {
        return vec![0.0; k];
    }
    // The ridge holds times back that no usage tells apart, and that would run away.
    let ridge = 1e-5 * largest;
    let mut change = vec![0.0; k];
    let mut slope = gradient.to_vec();
    let n_sweeps = (STEP_WORK / (k * k)).clamp(5, 200);
    let mut gained = 0.0f64;
    for _ in 0..n_sweeps {
        let mut gain = 0.0;
        for i in 0..k {
            let bend = diagonal(i) + ridge;
            let wanted = (slope[i] - ridge * change[i]) / bend;
            let step = wanted.max(-prices[i] - change[i]);
            if step == 0.0 {
                continue;
            }
            change[i] += step;
            gain += step * step * bend;
            let row = &curvature.cells[i * n..][..k];
            slope.iter_mut().zip(row).for_each(|(s, h)| *s -= h * step);
        }
        gained += gain;
        if gain <= 1e-9 * gained {
            break;
        }
    }
    change
}

#[cfg(test)]
mod tests {
    use super::{Square, newton_step};

    #[test]
    fn the_step_solves_its_quadratic_program() {
        // Slope at d: 4 - 2 d0 - d1 and -3 - d0 - 2 d1, with d1 >= -1: d1 = -1, d0 = 2.5.
        let curvature = Square {
            n: 2,
            cells: vec![2.0, 1.0, 1.0, 2.0],
        };
        let step = newton_step(&curvature, &[4.0, -3.0], &[0.0, 1.0]);
        assert!((step[0] - 2.5).abs() < 1e-3, "{step:?}");
        assert!((step[1] + 1.0).abs() < 1e-9, "{step:?}");
    }
}
