//! NCCL's element types and reductions: their numbers, names and arithmetic.

use half::{bf16, f16};
use serde::{Deserialize, Serialize};
use std::ffi::c_int;

/// An element type, an `ncclDataType_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Type {
    U8,
    I32,
    I64,
    F16,
    F32,
    F64,
    Bf16,
}

/// A reduction, an `ncclRedOp_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reduction {
    Sum,
    Max,
    Min,
}

impl Type {
    /// The type of this number, if the emulator knows it.
    pub fn of(number: c_int) -> Option<Self> {
        Some(match number {
            1 => Type::U8,
            2 => Type::I32,
            4 => Type::I64,
            6 => Type::F16,
            7 => Type::F32,
            8 => Type::F64,
            9 => Type::Bf16,
            _ => return None,
        })
    }
    pub fn name(self) -> &'static str {
        match self {
            Type::U8 => "uint8",
            Type::I32 => "int32",
            Type::I64 => "int64",
            Type::F16 => "float16",
            Type::F32 => "float32",
            Type::F64 => "float64",
            Type::Bf16 => "bfloat16",
        }
    }
    pub fn bytes(self) -> usize {
        match self {
            Type::U8 => 1,
            Type::F16 | Type::Bf16 => 2,
            Type::I32 | Type::F32 => 4,
            Type::I64 | Type::F64 => 8,
        }
    }
}

impl Reduction {
    /// The reduction of this number, if the emulator knows it.
    pub fn of(number: c_int) -> Option<Self> {
        Some(match number {
            0 => Reduction::Sum,
            2 => Reduction::Max,
            3 => Reduction::Min,
            _ => return None,
        })
    }
    pub fn name(self) -> &'static str {
        match self {
            Reduction::Sum => "sum",
            Reduction::Max => "max",
            Reduction::Min => "min",
        }
    }
    fn floats(self, a: f64, b: f64) -> f64 {
        match self {
            Reduction::Sum => a + b,
            // As on the device, the one that is a number.
            Reduction::Max => a.max(b),
            Reduction::Min => a.min(b),
        }
    }
    fn integers(self, a: i64, b: i64) -> i64 {
        match self {
            Reduction::Sum => a.wrapping_add(b),
            Reduction::Max => a.max(b),
            Reduction::Min => a.min(b),
        }
    }
}

/// Reduces operands of equal size element by element, beginning with operand `first` and rounding
/// after each one, as a ring does.
pub fn reduce(kind: Reduction, of: Type, operands: &[Vec<u8>], first: usize) -> Vec<u8> {
    let n = operands.len();
    let mut total = operands[first % n].clone();
    for step in 1..n {
        let operand = &operands[(first + step) % n];
        let size = of.bytes();
        for (a, b) in total.chunks_exact_mut(size).zip(operand.chunks_exact(size)) {
            one(kind, of, a, b);
        }
    }
    total
}

fn one(kind: Reduction, of: Type, a: &mut [u8], b: &[u8]) {
    macro_rules! combine {
        ($t:ty, $read:expr, $with:ident, $write:expr) => {{
            const N: usize = size_of::<$t>();
            let (mut x, mut y) = ([0u8; N], [0u8; N]);
            x.copy_from_slice(a);
            y.copy_from_slice(b);
            let (x, y) = (<$t>::from_le_bytes(x), <$t>::from_le_bytes(y));
            let sum: $t = $write(kind.$with($read(x), $read(y)));
            a.copy_from_slice(&sum.to_le_bytes());
        }};
    }
    match of {
        Type::U8 => combine!(u8, i64::from, integers, |v| v as u8),
        Type::I32 => combine!(i32, i64::from, integers, |v| v as i32),
        Type::I64 => combine!(i64, |v| v, integers, |v| v),
        Type::F16 => combine!(f16, f64::from, floats, f16::from_f64),
        Type::Bf16 => combine!(bf16, f64::from, floats, bf16::from_f64),
        Type::F32 => combine!(f32, f64::from, floats, |v| v as f32),
        Type::F64 => combine!(f64, |v| v, floats, |v| v),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_round_after_every_operand_and_begin_anywhere() {
        let stored = |v: f32| bf16::from_f32(v).to_le_bytes().to_vec();
        let operands = [256.0, 1.0, 1.0].map(stored);
        let sum = |first| reduce(Reduction::Sum, Type::Bf16, &operands, first);
        // 257 is no bfloat16, 258 is.
        assert_eq!(sum(0), stored(256.0));
        assert_eq!(sum(1), stored(258.0));
        let most = reduce(Reduction::Max, Type::Bf16, &operands, 2);
        assert_eq!(most, stored(256.0));
        let whole = [3i32, -5].map(|v| v.to_le_bytes().to_vec());
        let least = reduce(Reduction::Min, Type::I32, &whole, 0);
        assert_eq!(least, whole[1]);
    }
}
