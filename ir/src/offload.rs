//! Where tensors rest while nothing works on them: the device's memory, its host's, or a file.
//!
//! A layer's strategy says it by class of tensor ([`Spaces`]). Kernels work in the device's memory
//! alone, so a tensor that rests elsewhere is *staged*: copied in before it is used and copied out
//! behind what writes it (ZeRO-Offload, Ren et al. 2021; ZeRO-Infinity, Rajbhandari et al. 2021).

use crate::program::Space;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The memories that a layer's tensors rest in, by class; classes without an entry rest on the
/// device.
pub type Spaces = BTreeMap<TensorClass, Space>;

/// Tensors of a layer that rest together.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum TensorClass {
    /// Tensors that only updates use: moments and, where microbatches compute with copies of
    /// another precision, the master copies of parameters.
    Optimizer,
    /// Parameters as microbatches read them.
    Parameters,
    /// Results of the forward pass that are kept for the backward pass.
    Activations,
}

impl TensorClass {
    /// All of them.
    pub const ALL: [TensorClass; 3] = [
        TensorClass::Optimizer,
        TensorClass::Parameters,
        TensorClass::Activations,
    ];

    /// Name in pins and documents.
    pub fn name(self) -> &'static str {
        match self {
            TensorClass::Optimizer => "optimizer",
            TensorClass::Parameters => "parameters",
            TensorClass::Activations => "activations",
        }
    }

    /// Name in sentences.
    pub fn words(self) -> &'static str {
        match self {
            TensorClass::Optimizer => "optimizer states",
            other => other.name(),
        }
    }
}

/// Reads `optimizer+activations:file`: classes joined by `+`, each in host memory unless a space
/// stands behind it. The error says what is accepted.
pub fn parse_spaces(text: &str) -> Result<Spaces, String> {
    let mut spaces = Spaces::new();
    for part in text.split('+') {
        let (class, space) = part.split_once(':').unwrap_or((part, Space::Host.name()));
        let known = TensorClass::ALL.into_iter().find(|c| c.name() == class);
        let class = known.ok_or_else(|| {
            let names = TensorClass::ALL.map(TensorClass::name).join(", ");
            format!("`{class}` is no class of tensors; {names} are, joined by `+`")
        })?;
        let known = Space::ALL.into_iter().find(|s| s.name() == space);
        let space = known.ok_or_else(|| {
            let names = Space::ALL.map(Space::name).join(", ");
            format!("`{space}` is no memory; {names} are")
        })?;
        if spaces.insert(class, space).is_some() {
            return Err(format!("names {} twice", class.name()));
        }
    }
    spaces.retain(|_, space| *space != Space::Device);
    Ok(spaces)
}

/// The text that [`parse_spaces`] reads.
pub fn describe_spaces(spaces: &Spaces) -> String {
    let part = |(class, space): (&TensorClass, &Space)| match space {
        Space::Host => class.name().to_string(),
        other => format!("{}:{}", class.name(), other.name()),
    };
    let parts: Vec<String> = spaces.iter().map(part).collect();
    parts.join("+")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_and_memories_are_read_back() {
        for text in [
            "optimizer",
            "optimizer:file",
            "optimizer+parameters:file+activations",
        ] {
            let spaces = parse_spaces(text).expect("it is well formed");
            assert_eq!(describe_spaces(&spaces), text);
        }
        assert_eq!(parse_spaces("optimizer:device"), Ok(Spaces::new()));
        for (text, problem) in [
            ("", "`` is no class"),
            ("optimiser", "`optimiser` is no class"),
            ("optimizer:disk", "`disk` is no memory"),
            ("optimizer+optimizer:file", "twice"),
        ] {
            let error = parse_spaces(text).expect_err("it is not well formed");
            assert!(error.contains(problem), "{text}: {error}");
        }
    }
}
