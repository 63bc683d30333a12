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
        self.read(text.trim()).map_err(|why| {
            let words = format!("{what}: `{text}` {why}");
            Failure::new(Exit::Usage, words).help(format!("give it as {}", self.examples()))
        })
    }

    /// The largest amount of the unit that is taken: more than any machine or training has.
    fn most(self) -> f64 {
        match self {
            Unit::BytesPerSecond | Unit::Bytes | Unit::Count => 1e18,
            Unit::FlopsPerSecond => 1e24,
            Unit::Seconds => 1e9,
        }
    }

    /// The quantity that the unit measures, for messages.
    fn measures(self) -> &'static str {
        match self {
            Unit::BytesPerSecond => "bytes or bits per second",
            Unit::Bytes => "bytes",
            Unit::FlopsPerSecond => "FLOP/s",
            Unit::Seconds => "seconds",
            Unit::Count => "a number",
        }
    }

    /// Reads an amount; the error says why it is none, to stand behind it.
    fn read(self, text: &str) -> Result<Amount, String> {
        let (below, text) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text.strip_prefix('+').unwrap_or(text)),
        };
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
        let no_number = || "has no number in front".to_string();
        let number = number.parse::<f64>().map_err(|_| no_number())?;
        if below {
            return Err("is below zero".into());
        }
        let number = match number {
            x if !x.is_finite() => return Err("is larger than any amount".into()),
            x if x <= 0.0 => return Err("is zero, and has to be above".into()),
            x => x,
        };
        let unit = unit.trim();
        if unit == "x" {
            return Ok(Amount::Times(number));
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
                let amount = number * factor * one;
                return match amount <= self.most() {
                    true => Ok(Amount::To(amount)),
                    false => Err("is larger than any amount".into()),
                };
            }
        }
        Err(match (unit, self) {
            ("", Unit::Count) => no_number(),
            ("", _) => format!("has no unit, and this is in {}", self.measures()),
            (unit, Unit::Count) => format!("ends in `{unit}`, and this is a number alone"),
            (unit, _) => format!("ends in `{unit}`, which is no unit of {}", self.measures()),
        })
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
            let read = read.unwrap_or_else(|e| panic!("{text} is not read: {e}"));
            let [x, y] = [read.of(one), amount.of(one)];
            assert!((x / y - 1.0).abs() < 1e-12, "{text}: {x}");
            let is_factor = |a: Amount| matches!(a, Amount::Times(_));
            assert_eq!(is_factor(read), is_factor(amount), "{text}");
        }
    }

    #[test]
    fn what_is_no_amount_is_refused() {
        for (unit, text, why) in [
            (
                Unit::BytesPerSecond,
                "400GB",
                "`GB`, which is no unit of bytes or bits per second",
            ),
            (Unit::Bytes, "96Gb", "ends in `Gb`"),
            (
                Unit::Bytes,
                "12GBB",
                "ends in `GBB`, which is no unit of bytes",
            ),
            (Unit::Bytes, "1e400", "larger than any amount"),
            (Unit::Bytes, "1e30GiB", "larger than any amount"),
            (Unit::Bytes, "-3GiB", "is below zero"),
            (Unit::Bytes, "96", "has no unit, and this is in bytes"),
            (Unit::Bytes, "5 parsecs", "ends in `parsecs`"),
            (Unit::Count, "-1", "is below zero"),
            (Unit::Count, "0", "is zero"),
            (Unit::Count, "", "has no number in front"),
            (Unit::Count, "x", "has no number in front"),
            (Unit::Count, "1e999", "larger than any amount"),
            (
                Unit::Count,
                "7 hosts",
                "ends in `hosts`, and this is a number alone",
            ),
            (Unit::Seconds, "5ks", "ends in `ks`"),
            (Unit::Seconds, "1.2.3s", "has no number in front"),
            (Unit::Count, "äx", "has no number in front"),
        ] {
            let said = unit.read(text).unwrap_err();
            assert!(said.contains(why), "{text}: {said}");
        }
    }
}
