//! Causal convolution of each channel over the sequence (Gu & Dao 2023), with gradients.
//!
//! With `K` taps `y[s] = sum over i of w[i] x[s - (K - 1) + i]`, where tokens before the first are
//! zeros: the last tap is the token's own. The gradient of the input is the convolution the other way
//! round. Sums are taken in `f64` and rounded once.

/// The lengths of a convolution.
#[derive(Clone, Copy, Debug)]
pub struct CausalConv {
    /// Samples.
    pub samples: usize,
    /// Tokens of a sample.
    pub tokens: usize,
    /// Channels of a token.
    pub channels: usize,
    /// Weights of a channel.
    pub taps: usize,
}

impl CausalConv {
    fn check(&self, activations: &[&[f32]], w: &[f32]) {
        let n = self.samples * self.tokens * self.channels;
        assert!(activations.iter().all(|x| x.len() == n), "{self:?}");
        assert_eq!(w.len(), self.channels * self.taps, "weights of {self:?}");
    }
    /// Calls `f(later, earlier, tap)` for each pair of tokens and the tap between them, with their rows.
    fn each(&self, mut f: impl FnMut(usize, usize, usize)) {
        for sample in 0..self.samples {
            let first = sample * self.tokens;
            for s in 0..self.tokens {
                for tap in (self.taps - 1).saturating_sub(s)..self.taps {
                    f(first + s, first + s + tap + 1 - self.taps, tap);
                }
            }
        }
    }
}

/// Convolution: `(x[samples, tokens, channels], w[channels, taps]) -> y` like `x`.
///
/// # Panics
/// If the slices do not have the lengths of `s`.
pub fn causal_conv(x: &[f32], w: &[f32], s: CausalConv, y: &mut [f32]) {
    s.check(&[x, y], w);
    let n = s.channels;
    let mut sums = vec![0.0; n];
    for (row, y) in y.chunks_exact_mut(n.max(1)).enumerate() {
        let token = row % s.tokens;
        sums.fill(0.0);
        for tap in (s.taps - 1).saturating_sub(token)..s.taps {
            let x = &x[(row + tap + 1 - s.taps) * n..][..n];
            for (c, sum) in sums.iter_mut().enumerate() {
                *sum += f64::from(w[c * s.taps + tap]) * f64::from(x[c]);
            }
        }
        round(&sums, y);
    }
}

/// Input gradient: `(w, dy) -> dx`.
///
/// # Panics
/// As [`causal_conv`].
pub fn causal_conv_grad_input(w: &[f32], dy: &[f32], s: CausalConv, dx: &mut [f32]) {
    s.check(&[dy, dx], w);
    let n = s.channels;
    let mut sums = vec![0.0; n];
    for (row, dx) in dx.chunks_exact_mut(n.max(1)).enumerate() {
        let left = s.tokens - row % s.tokens;
        sums.fill(0.0);
        for ahead in 0..s.taps.min(left) {
            let dy = &dy[(row + ahead) * n..][..n];
            for (c, sum) in sums.iter_mut().enumerate() {
                *sum += f64::from(w[(c + 1) * s.taps - 1 - ahead]) * f64::from(dy[c]);
            }
        }
        round(&sums, dx);
    }
}

/// Weight gradient: `(x, dy) -> dw`.
///
/// # Panics
/// As [`causal_conv`].
pub fn causal_conv_grad_weight(x: &[f32], dy: &[f32], s: CausalConv, dw: &mut [f32]) {
    s.check(&[x, dy], dw);
    let n = s.channels;
    let mut sums = vec![0.0; n * s.taps];
    s.each(|later, earlier, tap| {
        let (x, dy) = (&x[earlier * n..][..n], &dy[later * n..][..n]);
        for c in 0..n {
            sums[c * s.taps + tap] += f64::from(x[c]) * f64::from(dy[c]);
        }
    });
    round(&sums, dw);
}

fn round(sums: &[f64], to: &mut [f32]) {
    to.iter_mut()
        .zip(sums)
        .for_each(|(to, &sum)| *to = sum as f32);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::differences::numeric_gradient;
    use crate::cpu::testing::{assert_close, random};

    const S: CausalConv = CausalConv {
        samples: 2,
        tokens: 5,
        channels: 3,
        taps: 4,
    };

    #[test]
    fn a_token_is_the_sum_of_the_ones_before() {
        let (x, w) = (random(1, 30), random(2, 12));
        let mut y = vec![f32::NAN; 30];
        causal_conv(&x, &w, S, &mut y);
        let expected: Vec<f64> = (0..30)
            .map(|i| {
                let (sample, token, c) = (i / 15, i / 3 % 5, i % 3);
                let of = |tap: usize| {
                    let at = (token + tap).checked_sub(3)?;
                    Some(f64::from(x[sample * 15 + at * 3 + c]) * f64::from(w[c * 4 + tap]))
                };
                (0..4).filter_map(of).sum()
            })
            .collect();
        assert_close(&y, &expected, 1e-6, "convolution");
    }

    #[test]
    fn gradients_are_differences() {
        let (x, w, dy) = (random(1, 30), random(2, 12), random(3, 30));
        let run = |x: &[f32], w: &[f32]| {
            let mut y = vec![0.0; 30];
            causal_conv(x, w, S, &mut y);
            y
        };
        let (mut dx, mut dw) = (vec![f32::NAN; 30], vec![f32::NAN; 12]);
        causal_conv_grad_input(&w, &dy, S, &mut dx);
        causal_conv_grad_weight(&x, &dy, S, &mut dw);
        let expected = numeric_gradient(&x, &dy, |x| run(x, &w));
        assert_close(&dx, &expected, 1e-4, "dx");
        let expected = numeric_gradient(&w, &dy, |w| run(&x, w));
        assert_close(&dw, &expected, 1e-4, "dw");
    }

    #[test]
    fn taps_may_outnumber_tokens() {
        let s = CausalConv {
            samples: 1,
            tokens: 2,
            channels: 1,
            taps: 4,
        };
        let (mut y, mut dx, mut dw) = ([0.0; 2], [0.0; 2], [f32::NAN; 4]);
        let w = [1.0, 2.0, 3.0, 4.0];
        causal_conv(&[1.0, 10.0], &w, s, &mut y);
        assert_eq!(y, [4.0, 43.0]);
        causal_conv_grad_input(&w, &[1.0, 10.0], s, &mut dx);
        assert_eq!(dx, [34.0, 40.0]);
        causal_conv_grad_weight(&[1.0, 10.0], &[1.0, 1.0], s, &mut dw);
        assert_eq!(dw, [0.0, 0.0, 1.0, 11.0]);
    }
}
