//! The gated activation of gpt-oss, whose operands are kept within bounds, and its gradient.
//!
//! ```text
//! g = min(gate, limit)      u = min(max(up, -limit), limit)      s = logistic(alpha g)
//! y = (u + 1) g s
//! dgate = dy (u + 1) (s + alpha g s (1 - s))  up to the limit, 0 above
//! dup   = dy g s                              within the limits, 0 outside
//! ```
//!
//! Evaluated in `f64` and rounded once. A NaN operand gives NaN in the result.

use super::special::logistic;

/// The figures of the activation.
#[derive(Clone, Copy, Debug)]
pub struct Clamped {
    /// Factor within the sigmoid.
    pub alpha: f64,
    /// The bound, above zero.
    pub limit: f64,
}

impl Clamped {
    /// Both operands within their bounds. Comparisons, as `f64::min` would turn NaN into the bound.
    fn within(self, gate: f32, up: f32) -> (f64, f64) {
        let (g, u, limit) = (f64::from(gate), f64::from(up), self.limit);
        let g = if g > limit { limit } else { g };
        let u = if u > limit { limit } else { u };
        (g, if u < -limit { -limit } else { u })
    }

    /// `out[i] = y(gate[i], up[i])`.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn swiglu(self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        assert_eq!((gate.len(), up.len()), (out.len(), out.len()), "lengths");
        for ((&gate, &up), y) in gate.iter().zip(up).zip(out) {
            let (g, u) = self.within(gate, up);
            *y = ((u + 1.0) * g * logistic(self.alpha * g).0) as f32;
        }
    }

    /// Writes the gradients for gate and up.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn swiglu_grad(self, [gate, up, dy]: [&[f32]; 3], [dgate, dup]: [&mut [f32]; 2]) {
        let n = gate.len();
        assert_eq!((up.len(), dy.len()), (n, n), "lengths of operands");
        assert_eq!((dgate.len(), dup.len()), (n, n), "lengths of results");
        for i in 0..n {
            let (g, u) = self.within(gate[i], up[i]);
            let (s, rest) = logistic(self.alpha * g);
            let dy = f64::from(dy[i]);
            let slope = s + self.alpha * g * s * rest;
            let is_above = f64::from(gate[i]) > self.limit;
            let is_outside = f64::from(up[i]).abs() > self.limit;
            dgate[i] = if is_above {
                0.0
            } else {
                dy * (u + 1.0) * slope
            } as f32;
            dup[i] = if is_outside { 0.0 } else { dy * g * s } as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::differences::numeric_gradient;
    use super::super::testing::{assert_close, random};
    use super::*;

    const GPT_OSS: Clamped = Clamped {
        alpha: 1.702,
        limit: 7.0,
    };

    fn swiglu(gate: &[f32], up: &[f32]) -> Vec<f32> {
        let mut out = vec![f32::NAN; gate.len()];
        GPT_OSS.swiglu(gate, up, &mut out);
        out
    }

    fn gradients(gate: &[f32], up: &[f32], dy: &[f32]) -> [Vec<f32>; 2] {
        let mut both = [vec![f32::NAN; gate.len()], vec![f32::NAN; gate.len()]];
        let [dgate, dup] = &mut both;
        GPT_OSS.swiglu_grad([gate, up, dy], [dgate, dup]);
        both
    }

    /// Values on both sides of the bounds, none within a difference of them.
    fn operands() -> (Vec<f32>, Vec<f32>) {
        let up = (-20..20).map(|i| i as f32 / 2.0 + 0.125);
        let gate = (-20..20).map(|i| (i * 7 % 40) as f32 / 4.0 - 0.125);
        (gate.collect(), up.collect())
    }

    #[test]
    fn equals_the_definition() {
        let (gate, up) = operands();
        let both = gate.iter().zip(&up);
        let naive: Vec<f64> = both
            .map(|(&g, &u)| {
                let (g, u) = (f64::from(g).min(7.0), f64::from(u).clamp(-7.0, 7.0));
                (u + 1.0) * g / (1.0 + (-1.702 * g).exp())
            })
            .collect();
        assert_close(&swiglu(&gate, &up), &naive, 6e-8, "y");
        assert!(gate.iter().any(|&g| g > 7.0) && up.iter().any(|&u| u < -7.0));
        GPT_OSS.swiglu(&[], &[], &mut []);
    }

    #[test]
    fn gradients_equal_differences() {
        let (gate, up) = operands();
        let dy = random(3, gate.len());
        let [dgate, dup] = gradients(&gate, &up, &dy);
        let by_gate = numeric_gradient(&gate, &dy, |gate| swiglu(gate, &up));
        let by_up = numeric_gradient(&up, &dy, |up| swiglu(&gate, up));
        assert_close(&dgate, &by_gate, 2e-4, "dgate");
        assert_close(&dup, &by_up, 2e-4, "dup");
        // On the bounds themselves there is a gradient, as in PyTorch.
        let [dgate, dup] = gradients(&[7.0, 1.0], &[1.0, -7.0], &[1.0, 1.0]);
        assert!(dgate[0] > 1.9 && dup[1] > 0.8, "{dgate:?} {dup:?}");
    }

    #[test]
    fn bad_values_are_not_hidden() {
        for [gate, up] in [[f32::NAN, 1.0], [1.0, f32::NAN]] {
            assert!(swiglu(&[gate], &[up])[0].is_nan());
            let [dgate, dup] = gradients(&[gate], &[up], &[1.0]);
            assert!(dgate[0].is_nan() || dup[0].is_nan());
        }
    }
}
