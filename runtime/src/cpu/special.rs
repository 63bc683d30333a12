//! Exponential, hyperbolic tangent, logistic function and normal distribution.
//!
//! All are evaluated in `f64` without branches or table look-ups, so that loops over them
//! vectorise, and to relative errors far below the 6e-8 of an `f32` rounding: a kernel that
//! rounds the result once gives the correctly rounded value almost always. Only `+ - * /` on
//! `f64` are used, so every machine gets the same bits, which a platform's `libm` does not
//! promise. NaN in, NaN out.

use std::f64::consts::{LN_2, LOG2_E};

/// Arguments beyond this are cut: `exp(708)` and `exp(-708)` are the last safely normal
/// numbers, and in `f32` already infinite and zero.
const EXP_LIMIT: f64 = 708.0;

/// 1.5 * 2^52: adding it rounds an `f64` below 2^51 to an integer, in the low mantissa bits.
const ROUNDING: f64 = 6_755_399_441_055_744.0;

/// `1/1!, 1/2!, ..` up to `1/12!`: Taylor coefficients of `(exp(r) - 1) / r`. At
/// `|r| <= ln(2)/2` the first one left out weighs 5e-16.
const EXPM1_TAYLOR: [f64; 12] = [
    1.0,
    1.0 / 2.0,
    1.0 / 6.0,
    1.0 / 24.0,
    1.0 / 120.0,
    1.0 / 720.0,
    1.0 / 5040.0,
    1.0 / 40320.0,
    1.0 / 362_880.0,
    1.0 / 3_628_800.0,
    1.0 / 39_916_800.0,
    1.0 / 479_001_600.0,
];

/// The scale of `t` in [`normal_tail_ratio`].
const TAIL_SCALE: f64 = 0.25;

/// Chebyshev fit, in powers of `2t - 1`, of `exp(x^2/2) * P(X > x) / t` for a standard normal
/// `X`, with `t = 1 / (1 + x/4)`, on `x` in `[0, inf)`. Relative error at most 1.4e-10.
/// The form is Schonfelder's (Math. Comp. 32, 1978); the coefficients are our own, fitted at
/// 40 digits by Chebyshev interpolation with 14 nodes.
const TAIL_FIT: [f64; 14] = [
    0.188_821_282_600_437_31,
    0.151_974_160_475_004_55,
    0.096_784_350_531_278_17,
    0.046_630_466_253_973_31,
    0.015_099_137_971_170_3,
    0.001_885_018_758_160_644_3,
    -0.000_869_885_866_772_544_1,
    -0.000_407_530_587_018_104_24,
    3.321_514_343_325_370_5e-5,
    5.726_042_029_259_146_7e-5,
    -2.566_174_415_785_807_5e-7,
    -7.988_921_216_966_755e-6,
    -5.871_028_070_869_277e-8,
    8.285_658_647_935_513e-7,
];

/// `c[0] + c[1] x + ...`, Horner's rule.
#[inline(always)]
fn polynomial(coefficients: &[f64], x: f64) -> f64 {
    coefficients.iter().rev().fold(0.0, |sum, &c| sum * x + c)
}

/// `(2^n, exp(r) - 1)` with `x = n ln 2 + r` and `|r| <= ln(2)/2`, for `|x| <= EXP_LIMIT`.
#[inline(always)]
fn exp_parts(x: f64) -> (f64, f64) {
    let x = x.clamp(-EXP_LIMIT, EXP_LIMIT);
    let rounded = x * LOG2_E + ROUNDING;
    let n = rounded - ROUNDING;
    let r = x - n * LN_2;
    let power = f64::from_bits(rounded.to_bits().wrapping_add(1023) << 52);
    (power, r * polynomial(&EXPM1_TAYLOR, r))
}

/// `exp(x)`, relative error below 1e-12 for `|x| <= 708`; beyond, `exp(708)` or `exp(-708)`,
/// which `f32` rounds to infinity and zero.
#[inline(always)]
pub fn exp(x: f64) -> f64 {
    let (power, m1) = exp_parts(x);
    power + power * m1
}

/// `exp(x)` in `f32` arithmetic, twice as many at a time: relative error below 2e-7. Results below
/// 2^-125 are zero, and infinite from 2^128 on.
#[inline(always)]
pub fn exp_f32(x: f32) -> f32 {
    /// 1.5 * 2^23, as [`ROUNDING`].
    const ROUNDING: f32 = 12_582_912.0;
    /// `ln 2` in two parts. The first one has few bits, so that its multiples are exact.
    const LN_2_PARTS: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    const TAYLOR: [f32; 7] = [
        1.0,
        1.0 / 2.0,
        1.0 / 6.0,
        1.0 / 24.0,
        1.0 / 120.0,
        1.0 / 720.0,
        1.0 / 5040.0,
    ];
    const LEAST: f32 = -125.0 * std::f32::consts::LN_2;
    let cut = x.clamp(LEAST, 89.0);
    let rounded = cut * std::f32::consts::LOG2_E + ROUNDING;
    let n = rounded - ROUNDING;
    let r = (cut - n * LN_2_PARTS[0]) - n * LN_2_PARTS[1];
    let m1 = r * TAYLOR.iter().rev().fold(0.0, |sum, &c| sum * r + c);
    // Half the power, as 2^128 is no number.
    let half = f32::from_bits(rounded.to_bits().wrapping_add(126) << 23);
    let result = 2.0 * (half + half * m1);
    if x < LEAST { 0.0 } else { result }
}

/// `tanh(x)`, relative error below 1e-13 also near zero.
#[inline(always)]
pub fn tanh(x: f64) -> f64 {
    // tanh(x) = expm1(2x) / (expm1(2x) + 2). Both terms of expm1 have one sign, or the first
    // is zero, or it is at most three fifths of the other: nothing cancels.
    let (power, m1) = exp_parts((2.0 * x).clamp(-80.0, 80.0));
    let expm1 = power * m1 + (power - 1.0);
    expm1 / (expm1 + 2.0)
}

/// Logistic function `s = 1 / (1 + exp(-x))` and its complement `1 - s`, both to a relative
/// error below 1e-12: the complement is not a difference.
#[inline(always)]
pub fn logistic(x: f64) -> (f64, f64) {
    let e = exp(-x);
    let s = 1.0 / (1.0 + e);
    (s, e * s)
}

/// Standard normal distribution function `P(X <= x)` and density at `x`, relative errors below
/// 1e-9, in the lower tail too (until `f64` is exhausted near -37).
///
/// `erf(z) = 2 P(X <= z sqrt(2)) - 1`; what GELU needs is this function.
#[inline(always)]
pub fn normal(x: f64) -> (f64, f64) {
    const FRAC_1_SQRT_TAU: f64 = 0.398_942_280_401_432_7;
    let bell = exp(-0.5 * x * x);
    let tail = bell * normal_tail_ratio(x.abs());
    let cdf = if x < 0.0 { tail } else { 1.0 - tail };
    (cdf, bell * FRAC_1_SQRT_TAU)
}

/// `exp(x^2/2) * P(X > x)` for `x >= 0` (Mills' ratio but for a constant factor).
#[inline(always)]
fn normal_tail_ratio(x: f64) -> f64 {
    let t = 1.0 / (1.0 + TAIL_SCALE * x);
    t * polynomial(&TAIL_FIT, 2.0 * t - 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn relative_error(actual: f64, expected: f64) -> f64 {
        ((actual - expected) / expected).abs()
    }

    /// Arguments from `-to` to `to`, unevenly spaced, and small ones.
    fn arguments(to: f64) -> impl Iterator<Item = f64> {
        (-20_000..=20_000)
            .map(move |i| to * (f64::from(i) / 20_000.0).powi(3))
            .filter(|x| *x != 0.0)
    }

    #[test]
    fn exp_of_f32_is_accurate_and_ends_in_zero_and_infinity() {
        for i in -86_000..88_700 {
            let x = i as f32 * 1e-3 + 3e-4;
            let expected = f64::from(x).exp();
            assert!(
                relative_error(f64::from(exp_f32(x)), expected) < 2e-7,
                "{x}"
            );
        }
        assert_eq!(exp_f32(0.0), 1.0);
        assert_eq!([-87.0, -1e30, f32::NEG_INFINITY].map(exp_f32), [0.0; 3]);
        assert_eq!([89.0, 1e30, f32::INFINITY].map(exp_f32), [f32::INFINITY; 3]);
        assert!(exp_f32(f32::NAN).is_nan());
    }

    #[test]
    fn exponential_and_hyperbolic_tangent_equal_the_library_s() {
        for x in arguments(707.9) {
            assert!(relative_error(exp(x), x.exp()) < 1e-12, "exp({x})");
            assert!(relative_error(tanh(x), x.tanh()) < 1e-13, "tanh({x})");
        }
        assert_eq!((exp(0.0), tanh(0.0)), (1.0, 0.0));
        assert_eq!((exp(1e9) as f32, exp(-1e9) as f32), (f32::INFINITY, 0.0));
        assert_eq!((tanh(f64::INFINITY), tanh(f64::NEG_INFINITY)), (1.0, -1.0));
        assert!(exp(f64::NAN).is_nan() && tanh(f64::NAN).is_nan());
    }

    #[test]
    fn logistic_and_complement() {
        for x in arguments(600.0) {
            let (s, rest) = logistic(x);
            assert!(
                relative_error(s, 1.0 / (1.0 + (-x).exp())) < 1e-12,
                "logistic({x})"
            );
            assert!(
                relative_error(rest, 1.0 / (1.0 + x.exp())) < 1e-12,
                "1 - logistic({x})"
            );
        }
    }

    #[test]
    fn normal_distribution_function_equals_its_series() {
        // Abramowitz & Stegun 26.2.11: P(X <= x) = 1/2 + density(x) * (x + x^3/3 + x^5/15 + ..).
        let series = |x: f64| {
            let (mut term, mut sum) = (x, x);
            for k in 1..400 {
                term *= x * x / f64::from(2 * k + 1);
                sum += term;
            }
            0.5 + (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt() * sum
        };
        for x in arguments(12.0).filter(|&x| x > -3.0) {
            assert!(relative_error(normal(x).0, series(x)) < 1e-9, "P(X <= {x})");
        }
    }

    #[test]
    fn normal_tails_keep_their_relative_precision() {
        // 20 digits from mpmath, rounded.
        for (x, expected) in [
            (-13.0, 6.117_164_399_549_88e-39),
            (-8.5, 9.479_534_822_203_318e-18),
            (-3.25, 0.000_577_025_042_390_767),
            (-1.0, 0.158_655_253_931_457_05),
            (-0.0001, 0.499_960_105_772_026_3),
            (0.25, 0.598_706_325_682_923_7),
        ] {
            assert!(relative_error(normal(x).0, expected) < 1e-9, "P(X <= {x})");
        }
        assert_eq!((normal(50.0).0, normal(-50.0).0 as f32), (1.0, 0.0));
        assert!(normal(f64::NAN).0.is_nan());
    }
}
