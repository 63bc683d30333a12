//! Conversions between `f32` and the 16-bit float formats.
//!
//! Narrowing rounds to nearest, ties to even (IEEE 754), as accelerators do; what exceeds the
//! range becomes infinite and NaN stays NaN. Widening is exact.
//!
//! bfloat16 is the upper half of an `f32`, so its conversions are integer arithmetic. They have
//! no branches: rounding real data one way or the other at random costs several times as much
//! when it is mispredicted, and a time per element that depends on the values could not be
//! calibrated.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Rounds to bfloat16.
///
/// # Panics
/// If the lengths differ.
pub fn to_bf16(x: &[f32], out: &mut [bf16]) {
    assert_eq!(x.len(), out.len(), "as many elements out as in");
    for (out, x) in out.iter_mut().zip(x) {
        *out = bf16::from_bits(rounded(x.to_bits()));
    }
}

/// The upper half of an `f32`'s bits, rounded by the lower.
fn rounded(bits: u32) -> u16 {
    // Just below a half, and one more where the kept part is odd: ties go to even.
    let nearest = bits.wrapping_add(0x7fff).wrapping_add(bits >> 16 & 1);
    let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
    // A NaN whose kept bits are all zero would turn infinite.
    let quiet = bits | 0x0040_0000;
    (if is_nan { quiet } else { nearest } >> 16) as u16
}

/// Widens bfloat16.
///
/// # Panics
/// If the lengths differ.
pub fn from_bf16(x: &[bf16], out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "as many elements out as in");
    for (out, x) in out.iter_mut().zip(x) {
        *out = f32::from_bits(u32::from(x.to_bits()) << 16);
    }
}

/// Rounds to IEEE half precision.
///
/// # Panics
/// If the lengths differ.
pub fn to_f16(x: &[f32], out: &mut [f16]) {
    out.convert_from_f32_slice(x);
}

/// Widens IEEE half precision.
///
/// # Panics
/// If the lengths differ.
pub fn from_f16(x: &[f16], out: &mut [f32]) {
    x.convert_to_f32_slice(out);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Through bfloat16 and back.
    fn via_bf16<const N: usize>(x: [f32; N]) -> [f32; N] {
        let (mut half, mut out) = ([bf16::ZERO; N], [0.0; N]);
        to_bf16(&x, &mut half);
        from_bf16(&half, &mut out);
        out
    }

    /// Through half precision and back.
    fn via_f16<const N: usize>(x: [f32; N]) -> [f32; N] {
        let (mut half, mut out) = ([f16::ZERO; N], [0.0; N]);
        to_f16(&x, &mut half);
        from_f16(&half, &mut out);
        out
    }

    #[test]
    fn ties_go_to_even() {
        // bfloat16 has 8 significant bits, half precision 11.
        let ulp = 1.0 / 128.0;
        let x = [
            1.0,
            1.0 + ulp / 2.0,
            1.0 + 1.5 * ulp,
            1.0 + 0.51 * ulp,
            -1.0 - ulp / 2.0,
        ];
        assert_eq!(via_bf16(x), [1.0, 1.0, 1.0 + 2.0 * ulp, 1.0 + ulp, -1.0]);
        let ulp = 1.0 / 1024.0;
        let x = [
            1.0,
            1.0 + ulp / 2.0,
            1.0 + 1.5 * ulp,
            1.0 + 0.51 * ulp,
            -1.0 - ulp / 2.0,
        ];
        assert_eq!(via_f16(x), [1.0, 1.0, 1.0 + 2.0 * ulp, 1.0 + ulp, -1.0]);
    }

    #[test]
    fn ends_of_the_range() {
        assert_eq!(
            via_bf16([f32::MAX, f32::MIN, 0.0]),
            [f32::INFINITY, f32::NEG_INFINITY, 0.0]
        );
        // 65504 is the largest half; 65520 is the tie that rounds beyond it. 2^-24 is the
        // smallest; half of it is the tie that rounds to zero.
        let smallest = 2f32.powi(-24);
        let x = [
            65504.0,
            65519.0,
            65520.0,
            smallest,
            smallest / 2.0,
            smallest * 0.51,
        ];
        assert_eq!(
            via_f16(x),
            [65504.0, 65504.0, f32::INFINITY, smallest, 0.0, smallest]
        );
        assert!(via_bf16([f32::NAN])[0].is_nan() && via_f16([f32::NAN])[0].is_nan());
    }

    #[test]
    fn rounding_is_that_of_the_library() {
        // Every upper half with the lower halves around the tie, and some between.
        for low in [0u32, 1, 0x1234, 0x7fff, 0x8000, 0x8001, 0xffff] {
            let x: Vec<f32> = (0..=u16::MAX)
                .map(|high| f32::from_bits(u32::from(high) << 16 | low))
                .collect();
            let mut out = vec![bf16::ZERO; x.len()];
            to_bf16(&x, &mut out);
            for (x, out) in x.iter().zip(out) {
                let expected = bf16::from_f32(*x);
                assert_eq!(out.to_bits(), expected.to_bits(), "{:#010x}", x.to_bits());
            }
        }
    }

    #[test]
    fn every_half_survives_widening() {
        let every: Vec<u16> = (0..=u16::MAX).collect();
        let (brain, ieee): (Vec<_>, Vec<_>) = every
            .iter()
            .map(|&b| (bf16::from_bits(b), f16::from_bits(b)))
            .unzip();
        let mut wide = vec![0.0; every.len()];
        let (mut brain_back, mut ieee_back) = (brain.clone(), ieee.clone());
        from_bf16(&brain, &mut wide);
        to_bf16(&wide, &mut brain_back);
        from_f16(&ieee, &mut wide);
        to_f16(&wide, &mut ieee_back);
        for i in 0..every.len() {
            let same = brain_back[i].to_bits() == every[i] || brain[i].is_nan();
            assert!(
                same && brain_back[i].is_nan() == brain[i].is_nan(),
                "bfloat16 {i:#06x}"
            );
            let same = ieee_back[i].to_bits() == every[i] || ieee[i].is_nan();
            assert!(
                same && ieee_back[i].is_nan() == ieee[i].is_nan(),
                "half {i:#06x}"
            );
        }
    }
}
