//! Physical quantities. A number that carries a unit is one of these or ends in its unit.

use serde::{Deserialize, Serialize};
use std::ops::{Add, AddAssign, Div, Mul, Sub};

macro_rules! quantity {
    ($(#[$doc:meta])* $name:ident, $repr:ty) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, Serialize, Deserialize, schemars::JsonSchema)]
        #[serde(transparent)]
        pub struct $name(pub $repr);

        impl Add for $name {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self(self.0 + other.0)
            }
        }
        impl Sub for $name {
            type Output = Self;
            fn sub(self, other: Self) -> Self {
                Self(self.0 - other.0)
            }
        }
        impl AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                self.0 += other.0;
            }
        }
        impl Mul<$repr> for $name {
            type Output = Self;
            fn mul(self, by: $repr) -> Self {
                Self(self.0 * by)
            }
        }
        impl std::iter::Sum for $name {
            fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
                iter.fold(Self::default(), |a, b| a + b)
            }
        }
    };
}

quantity!(
    /// A duration in seconds.
    Seconds, f64
);
quantity!(
    /// A size in bytes.
    Bytes, u64
);
quantity!(
    /// Floating-point operations; a multiply-add counts two.
    Flops, f64
);
quantity!(
    /// A rate in bytes per second.
    BytesPerSecond, f64
);
quantity!(
    /// A rate in floating-point operations per second.
    FlopsPerSecond, f64
);

impl Eq for Bytes {}
impl PartialOrd<u64> for Bytes {
    fn partial_cmp(&self, other: &u64) -> Option<std::cmp::Ordering> {
        self.0.partial_cmp(other)
    }
}
impl PartialEq<u64> for Bytes {
    fn eq(&self, other: &u64) -> bool {
        self.0 == *other
    }
}

impl Div<BytesPerSecond> for Bytes {
    type Output = Seconds;
    fn div(self, rate: BytesPerSecond) -> Seconds {
        Seconds(self.0 as f64 / rate.0)
    }
}
impl Div<FlopsPerSecond> for Flops {
    type Output = Seconds;
    fn div(self, rate: FlopsPerSecond) -> Seconds {
        Seconds(self.0 / rate.0)
    }
}
impl Seconds {
    /// The later of two durations.
    pub fn max(self, other: Self) -> Self {
        Self(self.0.max(other.0))
    }
}

/// Durations from here on are written with an exponent: a third of a year, and digits that nobody
/// counts.
const LONG: f64 = 1e7;

impl std::fmt::Display for Seconds {
    /// Three decimals with a fitting prefix: `1.230 ms`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // A value that rounds to zero has no sign: sums of nothing may be a negative zero.
        let s = match self.0.abs() < 5e-13 {
            true => 0.0,
            false => self.0,
        };
        let (value, unit) = match s.abs() {
            a if a >= LONG => return write!(f, "{s:.2e} s"),
            a if a >= 1.0 || a == 0.0 => (s, "s"),
            a if a >= 1e-3 => (s * 1e3, "ms"),
            a if a >= 1e-6 => (s * 1e6, "us"),
            _ => (s * 1e9, "ns"),
        };
        write!(f, "{value:.3} {unit}")
    }
}
impl std::fmt::Display for Bytes {
    /// Binary prefixes: `1.50 GiB`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let b = self.0 as f64;
        match self.0 {
            0..=1023 => write!(f, "{} B", self.0),
            1024..=1_048_575 => write!(f, "{:.2} KiB", b / 1024.0),
            1_048_576..=1_073_741_823 => write!(f, "{:.2} MiB", b / 1_048_576.0),
            _ => write!(f, "{:.2} GiB", b / 1_073_741_824.0),
        }
    }
}

/// A figure in a message, as short as it reads back the same: `0.5`, `2`, `1e300` where plain
/// digits would fill the line.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figure(pub f64);

impl std::fmt::Display for Figure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let size = self.0.abs();
        match size == 0.0 || !size.is_finite() || (1e-6..1e15).contains(&size) {
            true => write!(f, "{}", self.0),
            false => write!(f, "{:e}", self.0),
        }
    }
}

/// A number of things in words: `1 stage`, `2 stages`, `2 microbatches`.
pub fn counted(n: impl Into<u64>, thing: &str) -> String {
    let hisses = ["ch", "sh", "ss"].iter().any(|end| thing.ends_with(end));
    let ending = match hisses {
        true => "es",
        false => "s",
    };
    match n.into() {
        1 => format!("1 {thing}"),
        n => format!("{n} {thing}{ending}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_that_would_fill_a_line_have_an_exponent() {
        let shown = |x: f64| Figure(x).to_string();
        for (x, said) in [
            (0.0, "0"),
            (-2.0, "-2"),
            (0.25, "0.25"),
            (3e14, "300000000000000"),
            (1e300, "1e300"),
            (-1.5e-9, "-1.5e-9"),
            (f64::INFINITY, "inf"),
            (f64::NAN, "NaN"),
        ] {
            assert_eq!(shown(x), said);
        }
        assert_eq!(Seconds(1e300).to_string(), "1.00e300 s");
        assert_eq!(Seconds(1234.5).to_string(), "1234.500 s");
    }

    #[test]
    fn one_thing_is_no_plural() {
        assert_eq!(counted(1u32, "stage"), "1 stage");
        assert_eq!(counted(0u32, "candidate"), "0 candidates");
        assert_eq!(counted(2u64, "microbatch"), "2 microbatches");
        assert_eq!(counted(2u64, "mesh"), "2 meshes");
    }
}
