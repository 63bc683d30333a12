//! The effect of rounding on a step: Monte Carlo arithmetic (Stott Parker, "Monte Carlo
//! arithmetic: exploiting randomness in floating-point arithmetic", UCLA 1997).
//!
//! Every element that an op computes is moved by one unit in its last place, up or down at
//! random. How far the results of such steps lie from each other says how many digits the step
//! determines at all, cancellations and thresholds included. Two right executions that round
//! differently (other orders of sums, partial sums in storage precision) differ about as much;
//! a wrong one differs by more, unless its step determines nothing.

use crate::rng::{Key, fill_uniform};
use ir::{DType, Op, OpKind};

/// Moves every element that `op` computed by one unit in the last place of its type. Zeros
/// stay (masked and empty elements), and so do integers and what is not finite. `start` names
/// the elements' microbatch.
pub(super) fn nudge(op: &Op, dtype: DType, key: Key, start: u64, data: &mut [u8]) {
    let (dtype_bytes, infinity) = match dtype {
        DType::F32 => (4, 0x7f80_0000),
        DType::Bf16 => (2, 0x7f80),
        DType::F16 => (2, 0x7c00),
        _ => return,
    };
    if !rounds(&op.kind) {
        return;
    }
    let mut draws = vec![0.0; data.len() / dtype_bytes];
    fill_uniform(key, start, &mut draws);
    for (element, draw) in data.chunks_exact_mut(dtype_bytes).zip(draws) {
        let mut bits = [0; 4];
        bits[..dtype_bytes].copy_from_slice(element);
        let moved = neighbour(u32::from_le_bytes(bits), infinity, draw < 0.5);
        element.copy_from_slice(&moved.to_le_bytes()[..dtype_bytes]);
    }
}

/// The number next to the one of these bits, away from zero or towards it; `infinity` has the
/// bits of the type's exponent set.
fn neighbour(bits: u32, infinity: u32, away: bool) -> u32 {
    // The sign stands above the exponent.
    let sign = bits & (infinity + (infinity & infinity.wrapping_neg()));
    let magnitude = bits - sign;
    let moved = match magnitude {
        0 => 0,
        m if m >= infinity => m,
        m if away && m + 1 < infinity => m + 1,
        m if away => m,
        m => m - 1,
    };
    sign | moved
}

/// Whether the op computes numbers; the others hand them on, or count.
fn rounds(kind: &OpKind) -> bool {
    !kind.is_view() && !kind.only_moves() && !matches!(kind, OpKind::UpdateLossScale { .. })
}

#[cfg(test)]
mod tests {
    use super::neighbour;

    #[test]
    fn neighbours_are_one_unit_away() {
        for x in [1.0f32, -1.0, 3.5, -1e-20, f32::MAX] {
            let down = f32::from_bits(neighbour(x.to_bits(), 0x7f80_0000, false));
            assert_eq!(down.abs(), x.abs().next_down());
            assert_eq!(down.signum(), x.signum());
        }
        let up = f32::from_bits(neighbour((-2.0f32).to_bits(), 0x7f80_0000, true));
        assert_eq!(up, (-2.0f32).next_down());
        for x in [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY] {
            let same = |away| neighbour(f32::to_bits(x), 0x7f80_0000, away);
            assert_eq!((same(true), same(false)), (x.to_bits(), x.to_bits()));
        }
        // The largest number has no finite neighbour above.
        assert_eq!(
            neighbour(f32::MAX.to_bits(), 0x7f80_0000, true),
            f32::MAX.to_bits()
        );
        let bf16 = |bits| neighbour(bits, 0x7f80, true);
        assert_eq!((bf16(0x3f80), bf16(0xbf80)), (0x3f81, 0xbf81));
        let f16 = |bits| neighbour(bits, 0x7c00, false);
        assert_eq!((f16(0x3c00), f16(0xbc00)), (0x3bff, 0xbbff));
    }
}
