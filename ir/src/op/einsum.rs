//! Labels of a dot-general.

use serde::{Deserialize, Serialize};

/// An einsum over two operands without diagonals: every label is one dim.
///
/// A label in both operands and the result is a batch dim, in one operand and the result a
/// free dim, in both operands only a contracting dim. No label appears twice in one operand
/// or in one operand alone. Text form `bsh,hf->bsf`.
#[derive(
    Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String")]
pub struct Einsum {
    /// Labels of the left operand's dims.
    pub lhs: Vec<u8>,
    /// Labels of the right operand's dims.
    pub rhs: Vec<u8>,
    /// Labels of the result's dims.
    pub out: Vec<u8>,
}

impl Einsum {
    /// Parses `bsh,hf->bsf`; the error says which rule is broken.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (ins, out) = text
            .split_once("->")
            .ok_or_else(|| format!("`{text}` has no `->`"))?;
        let (lhs, rhs) = ins
            .split_once(',')
            .ok_or_else(|| format!("`{text}` has no `,`"))?;
        let e = Einsum {
            lhs: lhs.into(),
            rhs: rhs.into(),
            out: out.into(),
        };
        e.check().map_err(|why| format!("`{text}`: {why}"))?;
        Ok(e)
    }
    fn check(&self) -> Result<(), String> {
        for labels in [&self.lhs, &self.rhs, &self.out] {
            for (i, l) in labels.iter().enumerate() {
                if !l.is_ascii_lowercase() {
                    return Err("labels are lower-case letters".into());
                }
                if labels[..i].contains(l) {
                    return Err(format!("label {} is repeated", *l as char));
                }
            }
        }
        for l in self.lhs.iter().chain(&self.rhs).chain(&self.out) {
            let n = [&self.lhs, &self.rhs, &self.out]
                .iter()
                .filter(|ls| ls.contains(l))
                .count();
            if n < 2 {
                return Err(format!("label {} appears once only", *l as char));
            }
        }
        Ok(())
    }
    /// The einsum of the gradient for the left operand: `(dout, rhs) -> dlhs`.
    pub fn grad_lhs(&self) -> Einsum {
        Einsum {
            lhs: self.out.clone(),
            rhs: self.rhs.clone(),
            out: self.lhs.clone(),
        }
    }
    /// The einsum of the gradient for the right operand: `(lhs, dout) -> drhs`.
    pub fn grad_rhs(&self) -> Einsum {
        Einsum {
            lhs: self.lhs.clone(),
            rhs: self.out.clone(),
            out: self.rhs.clone(),
        }
    }
}

impl std::fmt::Display for Einsum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let s = |l: &[u8]| String::from_utf8_lossy(l).into_owned();
        write!(f, "{},{}->{}", s(&self.lhs), s(&self.rhs), s(&self.out))
    }
}
impl TryFrom<String> for Einsum {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        Einsum::parse(&text)
    }
}
impl From<Einsum> for String {
    fn from(e: Einsum) -> String {
        e.to_string()
    }
}
