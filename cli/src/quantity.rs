//! Quantities with units, as people write them: `400Gb/s`, `96GiB`, `1.5PFLOP/s`, `1T`, `2x`.

use crate::failure::{Exit, Failure};

/// The unit that a quantity is measured in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes per second; bits per second are written with a small b.
    BytesPerSecond,
    /// Bytes.
    Bytes,
    /// FLOP/s.
    FlopsPerSecond,
    /// Seconds.
    Seconds,
    /// A number of things.
    Count,
}

/// A value that is given, or a change of what there is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Amount {
    /// The value, in the unit of its quantity.
    To(f64),
    /// The factor by which the old value is multiplied.
    Times(f64),
}

impl Amount {
    /// The value, where the old one is this.
    pub fn of(self, old: f64) -> f64 {
        match self {
            Amount::To(value) => value,
            Amount::Times(factor) => old * factor,
        }
    }
}

/// Decimal and binary prefixes; the longer ones first, so that `Mi` is not an `M`.
const PREFIXES: [(&str, f64); 12] = [
    ("Ki", 1024.0),
    ("Mi", 1_048_576.0),
    ("Gi", 1_073_741_824.0),
    ("Ti", 1_099_511_627_776.0),
    ("k", 1e3),
    ("K", 1e3),
    ("M", 1e6),
    ("G", 1e9),
    ("B", 1e9),
    ("T", 1e12),
    ("P", 1e15),
    ("E", 1e18),
];

impl Unit {
    /// The names of the unit, each with what one of it is.
    fn names(self) -> &'static [(&'static str, f64)] {
        match self {
            Unit::BytesPerSecond => &[("B/s", 1.0), ("b/s", 0.125), ("bit/s", 0.125)],
            Unit::Bytes => &[("B", 1.0)],
            Unit::FlopsPerSecond => &[("FLOP/s", 1.0), ("FLOPS", 1.0)],
            Unit::Seconds => &[("us", 1e-6), ("ms", 1e-3), ("ns", 1e-9), ("s", 1.0)],
            Unit::Count => &[("", 1.0)],
        }
    }

    /// Examples, for messages.
    pub fn examples(self) -> &'static str {
        match self {
            Unit::BytesPerSecond => "400Gb/s, 50GB/s or 2x",
            Unit::Bytes => "96GiB, 80GB or 2x",
            Unit::FlopsPerSecond => "989TFLOP/s or 2x",
            Unit::Seconds => "7.3s, 5us or 0.5x",
            Unit::Count => "16, 300B, 1T or 2x",
        }
    }

    /// Shows a value of the unit.
    pub fn show(self, value: f64) -> String {
        match self {
            Unit::BytesPerSecond => format!("{}B/s", super::report::count(value)),
            Unit::Bytes => ir::Bytes(value as u64).to_string(),
            Unit::FlopsPerSecond => format!("{}FLOP/s", super::report::count(value)),
            Unit::Seconds => ir::Seconds(value).to_string(),
            Unit::Count => ir::Figure(value).to_string(),
        }
    }

    /// Reads an amount; `what` names the flag or key in the error.
    pub fn parse(self, what: &str, text: &str) -> Result<Amount, Failure> {
        let amount = self.read(text.trim());
        amount.ok_or_else(|| {
            let words = format!("{what}: `{text}` is no amount above zero that this can be");
            Failure::new(Exit::Usage, words).help(format!("give it as {}", self.examples()))
        })
    }

    fn read(self, text: &str) -> Option<Amount> {
        let is_part = |c: char| c.is_ascii_digit() || c == '.';
        let end = text.find(|c| !is_part(c)).unwrap_or(text.len());
        // An exponent has digits behind it, and is no exa.
        let exponent = text[end..].strip_prefix(['e', 'E']).map_or(0, |rest| {
            let signed = rest.trim_start_matches(['+', '-']);
            let digits = signed.bytes().take_while(u8::is_ascii_digit).count();
            if digits > 0 {
                1 + rest.len() - signed.len() + digits
            } else {
                0
            }
        });
        let (number, unit) = text.split_at(end + exponent);
        let number = number.parse::<f64>().ok()?;
        let unit = unit.trim();
        let number = Some(number).filter(|x| x.is_finite() && *x > 0.0)?;
        if unit == "x" {
            return Some(Amount::Times(number));
        }
        for (name, one) in self.names() {
            let Some(prefix) = unit.strip_suffix(name) else {
                continue;
            };
            let factor = PREFIXES.iter().find(|(p, _)| *p == prefix).map(|(_, f)| *f);
            let is_plain = prefix.is_empty();
            // Seconds are written with their own small prefixes.
            if let Some(factor) = factor
                .filter(|_| self != Unit::Seconds)
                .or(is_plain.then_some(1.0))
            {
                return Some(Amount::To(number * factor * one));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read_with_their_units() {
        for (unit, text, amount) in [
            (Unit::BytesPerSecond, "400Gb/s", Amount::To(5e10)),
            (Unit::BytesPerSecond, "50 GB/s", Amount::To(5e10)),
            (Unit::Bytes, "96GiB", Amount::To(96.0 * 1_073_741_824.0)),
            (Unit::Bytes, "80GB", Amount::To(8e10)),
            (Unit::FlopsPerSecond, "1.5PFLOP/s", Amount::To(1.5e15)),
            (Unit::Seconds, "5us", Amount::To(5e-6)),
            (Unit::Count, "1T", Amount::To(1e12)),
            (Unit::Count, "15e12", Amount::To(15e12)),
            (Unit::Count, "300B", Amount::To(3e11)),
            (Unit::Bytes, "2x", Amount::Times(2.0)),
            (Unit::Count, "0.5x", Amount::Times(0.5)),
        ] {
            let (read, one) = (unit.read(text), 1.0);
            let read = read.unwrap_or_else(|| panic!("{text} is not read"));
            let [x, y] = [read.of(one), amount.of(one)];
            assert!((x / y - 1.0).abs() < 1e-12, "{text}: {x}");
            let is_factor = |a: Amount| matches!(a, Amount::Times(_));
            assert_eq!(is_factor(read), is_factor(amount), "{text}");
        }
    }

    #[test]
    fn what_is_no_amount_is_refused() {
        for (unit, text) in [
            (Unit::BytesPerSecond, "400GB"),
            (Unit::Bytes, "96Gb"),
            (Unit::Count, "-1"),
            (Unit::Count, "0"),
            (Unit::Count, ""),
            (Unit::Count, "x"),
            (Unit::Count, "1e999"),
            (Unit::Seconds, "5ks"),
            (Unit::Count, "äx"),
        ] {
            assert_eq!(unit.read(text), None, "{text}");
        }
    }
}
