//! Group normalisation of images (Wu & He 2018), with gradients.
//!
//! Images are `[samples, pixels, groups, width]`. A sample's group has `pixels * width` elements,
//! over which its statistics and the averages of its gradient are taken, in `f64` and rounded once.
//! With `xhat = (x - mean) * rstd` and `g = dy * gamma`, the gradients are
//!
//! ```text
//!   dx     = rstd * (g - avg(g) - xhat * avg(g * xhat))    averages of the sample's group
//!   dgamma = sum over samples and pixels of dy * xhat,     dbeta = that of dy
//! ```

use super::summation;

/// The lengths of an image.
#[derive(Clone, Copy, Debug)]
pub struct Grouped {
    /// Samples.
    pub samples: usize,
    /// Pixels of a sample.
    pub pixels: usize,
    /// Groups of channels.
    pub groups: usize,
    /// Channels of a group.
    pub width: usize,
}

impl Grouped {
    /// Calls `f(statistic, weight, element)` for each pixel's part of each group: its sample's
    /// group, its first channel, and its first element.
    fn each(&self, mut f: impl FnMut(usize, usize, usize)) {
        for sample in 0..self.samples {
            for pixel in 0..self.pixels {
                for group in 0..self.groups {
                    let part = (sample * self.pixels + pixel) * self.groups + group;
                    let statistic = sample * self.groups + group;
                    f(statistic, group * self.width, part * self.width);
                }
            }
        }
    }
    fn check(&self, images: &[&[f32]], weights: &[&[f32]], statistics: &[&[f32]]) {
        let weight = self.groups * self.width;
        let image = self.samples * self.pixels * weight;
        assert!(
            images.iter().all(|x| x.len() == image),
            "images of {self:?}"
        );
        assert!(
            weights.iter().all(|w| w.len() == weight),
            "weights of {self:?}"
        );
        let n = self.statistics();
        assert!(
            statistics.iter().all(|s| s.len() == n),
            "statistics of {self:?}"
        );
    }
    fn statistics(&self) -> usize {
        self.samples * self.groups
    }
    /// Elements of a sample's group.
    fn elements(&self) -> f64 {
        (self.pixels * self.width) as f64
    }
}

/// Group normalisation: `(x, gamma[groups, width], beta[groups, width]) -> (y like x,
/// mean[samples, groups], rstd[samples, groups])`, `rstd = 1 / sqrt(variance + eps)` with the
/// mean square deviation for variance.
///
/// # Panics
/// If the slices do not have the lengths of `s`.
pub fn group_norm(
    (x, gamma, beta): (&[f32], &[f32], &[f32]),
    s: Grouped,
    eps: f64,
    (y, mean, rstd): (&mut [f32], &mut [f32], &mut [f32]),
) {
    s.check(&[x, y], &[gamma, beta], &[mean, rstd]);
    let (n, mut means) = (s.elements(), vec![0.0; s.statistics()]);
    s.each(|i, _, at| means[i] += summation::sum(&x[at..][..s.width]));
    means.iter_mut().for_each(|m| *m /= n);
    let mut rstds = vec![0.0; s.statistics()];
    s.each(|i, _, at| {
        let deviation = |x: f64| (x - means[i]) * (x - means[i]);
        rstds[i] += summation::sum_by(&x[at..][..s.width], deviation);
    });
    rstds
        .iter_mut()
        .for_each(|r| *r = 1.0 / (*r / n + eps).sqrt());
    s.each(|i, channel, at| {
        for c in 0..s.width {
            let xhat = (f64::from(x[at + c]) - means[i]) * rstds[i];
            let (gamma, beta) = (gamma[channel + c], beta[channel + c]);
            y[at + c] = (xhat * f64::from(gamma) + f64::from(beta)) as f32;
        }
    });
    summation::round_to(&means, mean);
    summation::round_to(&rstds, rstd);
}

/// Input gradient of [`group_norm`]: `(dy, x, gamma, mean, rstd) -> dx`.
///
/// # Panics
/// As [`group_norm`].
pub fn group_norm_grad_input(
    (dy, x, gamma): (&[f32], &[f32], &[f32]),
    (mean, rstd): (&[f32], &[f32]),
    s: Grouped,
    dx: &mut [f32],
) {
    s.check(&[dy, x, dx], &[gamma], &[mean, rstd]);
    let (n, mut avg_g) = (s.elements(), vec![0.0; s.statistics()]);
    let mut avg_gx = avg_g.clone();
    s.each(|i, channel, at| {
        let (dy, gamma) = (&dy[at..][..s.width], &gamma[channel..][..s.width]);
        avg_g[i] += summation::dot(dy, gamma);
        let x = &x[at..][..s.width];
        avg_gx[i] += summation::dot_centred(dy, gamma, x, f64::from(mean[i]));
    });
    for (i, rstd) in rstd.iter().enumerate() {
        avg_g[i] /= n;
        avg_gx[i] *= f64::from(*rstd) / n;
    }
    s.each(|i, channel, at| {
        let (mean, rstd) = (f64::from(mean[i]), f64::from(rstd[i]));
        for c in 0..s.width {
            let g = f64::from(dy[at + c]) * f64::from(gamma[channel + c]);
            let xhat = (f64::from(x[at + c]) - mean) * rstd;
            dx[at + c] = (rstd * (g - avg_g[i] - xhat * avg_gx[i])) as f32;
        }
    });
}

/// Weight gradients of [`group_norm`]: `(dy, x, mean, rstd) -> (dgamma, dbeta)`.
///
/// # Panics
/// As [`group_norm`].
pub fn group_norm_grad_weight(
    (dy, x): (&[f32], &[f32]),
    (mean, rstd): (&[f32], &[f32]),
    s: Grouped,
    (dgamma, dbeta): (&mut [f32], &mut [f32]),
) {
    s.check(&[dy, x], &[dgamma, dbeta], &[mean, rstd]);
    let mut sums = [vec![0.0; dgamma.len()], vec![0.0; dbeta.len()]];
    s.each(|i, channel, at| {
        let (mean, rstd) = (f64::from(mean[i]), f64::from(rstd[i]));
        for c in 0..s.width {
            let dy = f64::from(dy[at + c]);
            sums[0][channel + c] += dy * (f64::from(x[at + c]) - mean) * rstd;
            sums[1][channel + c] += dy;
        }
    });
    summation::round_to(&sums[0], dgamma);
    summation::round_to(&sums[1], dbeta);
}

#[cfg(test)]
mod tests {
    use super::super::differences::numeric_gradient;
    use super::super::testing::{assert_close, bits, elements, random, reference, tensor};
    use super::*;

    const SIZES: Grouped = Grouped {
        samples: 2,
        pixels: 6,
        groups: 3,
        width: 2,
    };
    const IMAGE: usize = 2 * 6 * 3 * 2;
    const EPS: f64 = 1e-5;

    fn normed(x: &[f32], gamma: &[f32], beta: &[f32], s: Grouped) -> [Vec<f32>; 3] {
        let n = s.statistics();
        let (mut y, mut mean, mut rstd) = (vec![f32::NAN; x.len()], vec![0.0; n], vec![0.0; n]);
        let out = (&mut y[..], &mut mean[..], &mut rstd[..]);
        group_norm((x, gamma, beta), s, EPS, out);
        [y, mean, rstd]
    }

    /// Values by hand: a group of 1, 2, 3, 6 has mean 3 and variance (4 + 1 + 0 + 9) / 4 = 3.5.
    #[test]
    fn known_values() {
        let s = Grouped {
            samples: 1,
            pixels: 2,
            groups: 2,
            width: 2,
        };
        // The second group, -1 and 1 twice, has mean 0 and variance 1.
        let x = [1.0, 2.0, -1.0, 1.0, 3.0, 6.0, 1.0, -1.0];
        let [y, mean, rstd] = normed(&x, &[1.0, 1.0, 2.0, 1.0], &[0.0, 0.0, 0.0, 5.0], s);
        let d = 3.5f64.sqrt();
        let expected = [-2.0 / d, -1.0 / d, -2.0, 6.0, 0.0, 3.0 / d, 2.0, 4.0];
        assert_close(&y, &expected, 1e-5, "y");
        assert_close(&mean, &[3.0, 0.0], 1e-7, "mean");
        assert_close(&rstd, &[1.0 / d, 1.0], 1e-5, "rstd");
    }

    #[test]
    fn group_norm_equals_pytorch_s() {
        for entry in reference("group_norm") {
            let (dims, _) = tensor(&entry["inputs"]["x"]);
            let groups = entry["attrs"]["groups"].as_u64().unwrap() as usize;
            let s = Grouped {
                samples: dims[0],
                pixels: dims[1] * dims[2],
                groups,
                width: dims[3] / groups,
            };
            let input = |name: &str| elements(&entry["inputs"][name]);
            let (x, gamma, beta) = (input("x"), input("weight"), input("bias"));
            let [y, mean, rstd] = normed(&x, &gamma, &beta, s);
            let dy = elements(&entry["upstream"]["y"]);
            let mut dx = vec![f32::NAN; x.len()];
            let statistics = (&mean[..], &rstd[..]);
            group_norm_grad_input((&dy, &x, &gamma), statistics, s, &mut dx);
            let (mut dgamma, mut dbeta) = (vec![0.0; gamma.len()], vec![0.0; beta.len()]);
            let out = (&mut dgamma[..], &mut dbeta[..]);
            group_norm_grad_weight((&dy, &x), statistics, s, out);
            // As for layer norms, inputs around 30 are rounded to f32.
            let name = entry["name"].as_str().unwrap();
            let tolerance = if name == "shifted" { 2e-5 } else { 1e-6 };
            assert_close(&y, &tensor(&entry["outputs"]["y"]).1, tolerance, name);
            for (actual, of) in [(&dx, "x"), (&dgamma, "weight"), (&dbeta, "bias")] {
                assert_close(actual, &tensor(&entry["grads"][of]).1, tolerance, of);
            }
        }
    }

    #[test]
    fn gradients_are_slopes() {
        let (x, dy) = (random(1, IMAGE), random(2, IMAGE));
        let (gamma, beta) = (random(3, 6), random(4, 6));
        let [_, mean, rstd] = normed(&x, &gamma, &beta, SIZES);
        let statistics = (&mean[..], &rstd[..]);
        let mut dx = vec![f32::NAN; IMAGE];
        group_norm_grad_input((&dy, &x, &gamma), statistics, SIZES, &mut dx);
        let of = |x: &[f32], gamma: &[f32], beta: &[f32]| {
            let [y, ..] = normed(x, gamma, beta, SIZES);
            y
        };
        let slopes = numeric_gradient(&x, &dy, |x| of(x, &gamma, &beta));
        assert_close(&dx, &slopes, 1e-3, "dx");
        let (mut dgamma, mut dbeta) = (vec![f32::NAN; 6], vec![f32::NAN; 6]);
        let out = (&mut dgamma[..], &mut dbeta[..]);
        group_norm_grad_weight((&dy, &x), statistics, SIZES, out);
        let slopes = numeric_gradient(&gamma, &dy, |gamma| of(&x, gamma, &beta));
        assert_close(&dgamma, &slopes, 1e-4, "dgamma");
        let slopes = numeric_gradient(&beta, &dy, |beta| of(&x, &gamma, beta));
        assert_close(&dbeta, &slopes, 1e-4, "dbeta");
    }

    /// A split of samples or groups gives the same bits, as data and tensor parallel ranks need.
    #[test]
    fn bits_depend_on_the_own_group_alone() {
        let (x, gamma, beta) = (random(1, IMAGE), random(3, 6), random(4, 6));
        let [all, ..] = normed(&x, &gamma, &beta, SIZES);
        let one = Grouped {
            samples: 1,
            groups: 1,
            ..SIZES
        };
        for (sample, group) in (0..2).flat_map(|s| (0..3).map(move |g| (s, g))) {
            let part = |v: &[f32]| -> Vec<f32> {
                let pixels = (0..6).map(|p| ((sample * 6 + p) * 3 + group) * 2);
                pixels.flat_map(|at| v[at..at + 2].to_vec()).collect()
            };
            let weights = group * 2..group * 2 + 2;
            let (g, b) = (&gamma[weights.clone()], &beta[weights]);
            let [y, ..] = normed(&part(&x), g, b, one);
            assert_eq!(bits(&y), bits(&part(&all)));
        }
    }
}
