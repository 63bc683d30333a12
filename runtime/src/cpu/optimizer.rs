//! Parameter updates, in place: AdamW and SGD as PyTorch computes them.
//!
//! Scalars such as bias corrections are computed in `f64` and rounded to `f32` once, elements in
//! `f32` in PyTorch's order of operations. Every gradient is multiplied by a coefficient first
//! (clipping, loss scale). A coefficient that is NaN or infinite says that the gradients are
//! unusable: the step then changes nothing, here as on every other rank that got the coefficient.

use super::wide::widest;

/// One step of AdamW.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWStep {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Which update this is, counted from 1.
    pub step: u64,
    /// Multiplies the gradient.
    pub coefficient: f32,
}

/// One step of SGD.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdStep {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the momentum buffer; zero for plain SGD.
    pub momentum: f64,
    /// L2 penalty: this multiple of the parameter is added to the scaled gradient.
    pub weight_decay: f64,
    /// Multiplies the gradient.
    pub coefficient: f32,
}

/// Updates the parameter `p` and its moments `m` and `v` from the gradient `g`; all four have one
/// shape, and the moments of the first step are zero.
///
/// `torch.optim.AdamW` (Loshchilov & Hutter 2019), with `g' = coefficient * g`:
///
/// ```text
///   p *= 1 - lr * weight_decay
///   m += (1 - beta1) * (g' - m)
///   v  = beta2 * v + (1 - beta2) * g'^2
///   p -= lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
/// ```
///
/// # Panics
/// If the lengths differ or `step.step` is zero.
pub fn adamw(p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], step: AdamWStep) {
    assert_eq!(
        [g.len(), m.len(), v.len()],
        [p.len(); 3],
        "moments are like the parameter"
    );
    assert!(step.step > 0, "steps count from 1");
    if !step.coefficient.is_finite() {
        return;
    }
    let bias = |beta: f64| 1.0 - beta.powf(step.step as f64);
    let decay = (1.0 - step.lr * step.weight_decay) as f32;
    let (weight1, beta1) = ((1.0 - step.beta1) as f32, step.beta1 as f32);
    let (weight2, beta2) = ((1.0 - step.beta2) as f32, step.beta2 as f32);
    let root_bias2 = bias(step.beta2).sqrt() as f32;
    let step_size = (step.lr / bias(step.beta1)) as f32;
    let eps = step.eps as f32;
    widest(
        #[inline(always)]
        || {
            for (((p, &g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
                let g = step.coefficient * g;
                // `torch.lerp` starts from the nearer end.
                *m = if weight1 < 0.5 {
                    *m + weight1 * (g - *m)
                } else {
                    g - (g - *m) * beta1
                };
                *v = *v * beta2 + weight2 * g * g;
                *p = *p * decay - step_size * *m / (v.sqrt() / root_bias2 + eps);
            }
        },
    );
}

/// Updates the parameter `p` and its momentum buffer from the gradient `g`; all three have one
/// shape, and the buffer of the first step is zero.
///
/// `torch.optim.SGD` without dampening or Nesterov's variant:
///
/// ```text
///   buffer = momentum * buffer + (coefficient * g + weight_decay * p)
///   p     -= lr * buffer
/// ```
///
/// # Panics
/// If the lengths differ.
pub fn sgd(p: &mut [f32], g: &[f32], buffer: &mut [f32], step: SgdStep) {
    assert_eq!(
        [g.len(), buffer.len()],
        [p.len(); 2],
        "gradient and buffer are like the parameter"
    );
    if !step.coefficient.is_finite() {
        return;
    }
    let (lr, momentum) = (step.lr as f32, step.momentum as f32);
    let weight_decay = step.weight_decay as f32;
    widest(
        #[inline(always)]
        || {
            for ((p, &g), buffer) in p.iter_mut().zip(g).zip(buffer) {
                *buffer = momentum * *buffer + (step.coefficient * g + weight_decay * *p);
                *p -= lr * *buffer;
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::super::loss::sum_squares;
    use super::super::testing::{assert_close, bits, elements, random, reference, tensor};
    use super::*;

    const STEP: AdamWStep = AdamWStep {
        lr: 0.01,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        step: 1,
        coefficient: 1.0,
    };

    const SGD: SgdStep = SgdStep {
        lr: 0.1,
        momentum: 0.9,
        weight_decay: 0.01,
        coefficient: 0.5,
    };

    #[test]
    fn adamw_with_clipping_equals_pytorch_s() {
        for entry in reference("adamw") {
            let attr = |pointer: &str| {
                entry["attrs"]
                    .pointer(pointer)
                    .expect("an attribute")
                    .as_f64()
                    .expect("a number")
            };
            let input = |name: &str| elements(&entry["inputs"][name]);
            let output = |name: &str| tensor(&entry["outputs"][name]).1;
            let norms = output("norms");
            let mut tensors = [("w", "grad_w", attr("/weight_decay")), ("b", "grad_b", 0.0)].map(
                |(name, grad, decay)| (name, input(name), input(grad), decay, [vec![], vec![]]),
            );
            for (at, &norm) in norms.iter().enumerate() {
                let of_step = |all: &[f32]| {
                    let n = all.len() / norms.len();
                    all[at * n..][..n].to_vec()
                };
                let squares = tensors.each_ref().map(|t| sum_squares(&of_step(&t.2)));
                let actual_norm = (squares[0] + squares[1]).sqrt();
                assert!(
                    (actual_norm - norm).abs() < 1e-6 * norm,
                    "norm {actual_norm}, not {norm}"
                );
                let coefficient = (attr("/clip_norm") / (actual_norm + 1e-6)).min(1.0) as f32;
                for (name, p, grads, weight_decay, [m, v]) in &mut tensors {
                    m.resize(p.len(), 0.0);
                    v.resize(p.len(), 0.0);
                    let step = AdamWStep {
                        lr: attr("/lr"),
                        beta1: attr("/betas/0"),
                        beta2: attr("/betas/1"),
                        eps: attr("/eps"),
                        weight_decay: *weight_decay,
                        step: at as u64 + 1,
                        coefficient,
                    };
                    adamw(p, &of_step(grads), m, v, step);
                    let expected = &output(name)[at * p.len()..][..p.len()];
                    assert_close(p, expected, 2e-7, &format!("{name} after step {at}"));
                }
            }
        }
    }

    #[test]
    fn adamw_equals_its_formula_in_f64() {
        // beta1 < 1/2 as well: the other branch of the interpolation.
        for beta1 in [0.9, 0.3, 0.0] {
            let n = 17;
            let mut p = random(1, n);
            let (mut m, mut v) = (vec![0.0; n], vec![0.0; n]);
            let mut wide: Vec<[f64; 3]> = p.iter().map(|&p| [f64::from(p), 0.0, 0.0]).collect();
            for step in 1..=5 {
                let g = random(10 + step, n);
                let s = AdamWStep {
                    beta1,
                    step,
                    coefficient: 0.25,
                    ..STEP
                };
                adamw(&mut p, &g, &mut m, &mut v, s);
                for ([p, m, v], &g) in wide.iter_mut().zip(&g) {
                    let g = 0.25 * f64::from(g);
                    let bias = |beta: f64| 1.0 - beta.powi(step as i32);
                    *m = s.beta1 * *m + (1.0 - s.beta1) * g;
                    *v = s.beta2 * *v + (1.0 - s.beta2) * g * g;
                    let root = (*v / bias(s.beta2)).sqrt() + s.eps;
                    *p = *p * (1.0 - s.lr * s.weight_decay) - s.lr * (*m / bias(s.beta1)) / root;
                }
                let expected: Vec<f64> = wide.iter().map(|w| w[0]).collect();
                assert_close(&p, &expected, 1e-6, "p");
            }
        }
    }

    #[test]
    fn sgd_equals_its_definition() {
        let mut p = [1.0, -2.0];
        let mut buffer = [0.0, 0.0];
        sgd(&mut p, &[2.0, 4.0], &mut buffer, SGD);
        // 0.5 * g + 0.01 * p, then p - 0.1 * buffer.
        assert_close(&buffer, &[1.01, 1.98], 1e-7, "buffer");
        assert_close(&p, &[0.899, -2.198], 1e-7, "p");
        sgd(&mut p, &[2.0, 4.0], &mut buffer, SGD);
        let expected = [0.9 * 1.01 + 1.0 + 0.00899, 0.9 * 1.98 + 2.0 - 0.02198];
        assert_close(&buffer, &expected, 1e-7, "buffer");
        assert_close(
            &p,
            &[0.899 - 0.1 * expected[0], -2.198 - 0.1 * expected[1]],
            1e-7,
            "p",
        );
    }

    #[test]
    fn unusable_gradients_change_nothing() {
        for coefficient in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut tensors = [random(1, 4), random(2, 4), random(3, 4)];
            let before = tensors.each_ref().map(|t| bits(t));
            let g = [f32::INFINITY, f32::NAN, 1.0, 0.0];
            let [p, m, v] = &mut tensors;
            adamw(
                p,
                &g,
                m,
                v,
                AdamWStep {
                    coefficient,
                    ..STEP
                },
            );
            sgd(p, &g, m, SgdStep { coefficient, ..SGD });
            assert_eq!(tensors.each_ref().map(|t| bits(t)), before);
        }
    }

    #[test]
    fn an_element_does_not_depend_on_its_neighbours() {
        let [p, g, m] = [1, 2, 3].map(|seed| random(seed, 21));
        let v: Vec<f32> = random(4, 21).iter().map(|v| v * v).collect();
        let (mut all_p, mut all_m, mut all_v) = (p.clone(), m.clone(), v.clone());
        adamw(&mut all_p, &g, &mut all_m, &mut all_v, STEP);
        for i in 0..21 {
            let (mut p, mut m, mut v) = ([p[i]], [m[i]], [v[i]]);
            adamw(&mut p, &g[i..=i], &mut m, &mut v, STEP);
            assert_eq!(
                bits(&[p[0], m[0], v[0]]),
                bits(&[all_p[i], all_m[i], all_v[i]])
            );
        }
        adamw(&mut [], &[], &mut [], &mut [], STEP);
        sgd(&mut [], &[], &mut [], SGD);
    }
}
