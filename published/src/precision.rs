//! The meaning of a `precision` cell: the type of activations, and the type and scaling that
//! matmuls with parameters run in where it is another.
//!
//! Recipes, as frameworks run them for their published performance (Transformer Engine's
//! `common/recipe`; Megatron-Bridge, `scripts/performance`, where no layer is left in sixteen
//! bits; torchao's float8): embedding, norms, attention, the output layer and the loss stay in
//! bf16; every other matmul has both operands cast before it, forward and backward.

use crate::row::Row;
use crate::{Unmodelled, names};
use frameworks::Scaling;
use ir::{DType, Precision};

/// The element types of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Types {
    /// The type of activations, and of matmuls that `matmul` does not speak of.
    pub activations: Precision,
    /// The type of the operands of matmuls with parameters, and how they are scaled into it, where
    /// the cell says that.
    pub matmul: Option<(DType, Option<Scaling>)>,
}

/// Words of a cell and what they mean; the first whose word is there counts.
const SCALINGS: [(&str, Scaling); 11] = [
    ("mx", Scaling::Block32),
    ("mxfp8", Scaling::Block32),
    ("cs", Scaling::Tensor),
    ("current", Scaling::Tensor),
    ("tensorwise", Scaling::Tensor),
    ("row", Scaling::Row),
    ("rowwise", Scaling::Row),
    ("sc", Scaling::Block128),
    ("blockwise", Scaling::Block128),
    ("ds", Scaling::Delayed),
    ("delayed", Scaling::Delayed),
];

/// The types of a row; fails where the cell is not stated or names none that is known.
pub fn types(row: &Row) -> Result<Types, Unmodelled> {
    let text = row.required("precision")?;
    let lower = text.to_lowercase();
    let words: Vec<&str> = lower
        .split(|c: char| !c.is_alphanumeric())
        .filter(|w| !w.is_empty())
        .collect();
    let unknown = || unknown(text, words.first().copied().unwrap_or_default());
    let plain = |activations| Types {
        activations,
        matmul: None,
    };
    let narrow = |dtype, scaling| Types {
        activations: Precision::Bf16,
        matmul: Some((dtype, scaling)),
    };
    Ok(match *words.first().ok_or_else(unknown)? {
        "fp32" => plain(Precision::F32),
        "fp16" => plain(Precision::F16),
        "bf16" => plain(Precision::Bf16),
        "nvfp4" | "fp4" => narrow(DType::F4e2m1, Some(Scaling::Block16)),
        "fp8" | "mxfp8" => {
            let known = SCALINGS.iter().find(|(word, _)| words.contains(word));
            match (known, words.as_slice()) {
                (Some((_, scaling)), _) => narrow(DType::F8e4m3, Some(*scaling)),
                (None, ["fp8"]) => narrow(DType::F8e4m3, None),
                _ => return Err(unknown()),
            }
        }
        _ => return Err(unknown()),
    })
}

/// Words that a cell begins with.
const WORDS: [&str; 6] = ["fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"];

/// Types that there are, and that are not supported.
const NOT_SUPPORTED: [&str; 8] = [
    "fp64", "f64", "double", "tf32", "fp6", "mxfp4", "mxfp6", "nf4",
];

/// Other names of these types.
const OTHER_WORDS: [(&str, &str); 12] = [
    ("f32", "fp32"),
    ("float", "fp32"),
    ("float32", "fp32"),
    ("f16", "fp16"),
    ("half", "fp16"),
    ("float16", "fp16"),
    ("bfloat16", "bf16"),
    ("f8", "fp8"),
    ("float8", "fp8"),
    ("e4m3", "fp8"),
    ("f8e4m3", "fp8"),
    ("f4", "nvfp4"),
];

/// The answer to a cell that begins with `word`, which is no type, or is `fp8` with a recipe that is
/// none.
fn unknown(text: &str, word: &str) -> Unmodelled {
    if word == "fp8" {
        let scalings: Vec<&str> = SCALINGS.iter().map(|(word, _)| *word).collect();
        return Unmodelled::Feature(format!(
            "the precision {text}; scalings of fp8 are {}, or none where the framework's own is meant",
            scalings.join(", ")
        ));
    }
    let other = OTHER_WORDS.iter().find(|(other, _)| *other == word);
    // Other types are no slip: `int8` is like `fp8` in its end only.
    let is_type =
        word.starts_with("int") || word.starts_with("uint") || NOT_SUPPORTED.contains(&word);
    let near = match other {
        Some((_, known)) => Some(*known),
        None if is_type => None,
        None => names::closest(word, WORDS.into_iter()),
    };
    Unmodelled::Feature(format!(
        "the precision {text}{}; known are {}",
        names::meant(near),
        WORDS.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_name_types_and_recipes() {
        let of = |cell: &str| {
            let table = crate::csv::parse(&format!("precision\n{cell}\n")).unwrap();
            types(&crate::row::rows(&table)[0])
        };
        let eight = |scaling| Some((DType::F8e4m3, Some(scaling)));
        for (cell, activations, matmul) in [
            ("fp32", Precision::F32, None),
            ("bf16 (fp32 grad accum)", Precision::Bf16, None),
            ("fp8", Precision::Bf16, Some((DType::F8e4m3, None))),
            ("fp8-cs", Precision::Bf16, eight(Scaling::Tensor)),
            ("fp8 tensorwise", Precision::Bf16, eight(Scaling::Tensor)),
            ("fp8 rowwise", Precision::Bf16, eight(Scaling::Row)),
            ("fp8-mx/blockwise", Precision::Bf16, eight(Scaling::Block32)),
            ("MXFP8", Precision::Bf16, eight(Scaling::Block32)),
        ] {
            let types = of(cell).unwrap();
            assert_eq!((types.activations, types.matmul), (activations, matmul));
        }
        let four = of("nvfp4").unwrap().matmul;
        assert_eq!(four, Some((DType::F4e2m1, Some(Scaling::Block16))));
        let said = |cell: &str| of(cell).unwrap_err().to_string();
        let all = "known are fp32, fp16, bf16, fp8, mxfp8, nvfp4";
        for cell in ["int8", "tf32", "fp64", "mxfp4"] {
            assert_eq!(
                said(cell),
                format!("not supported: the precision {cell}; {all}")
            );
        }
        for (cell, near) in [
            ("f16", "fp16"),
            ("bf61", "bf16"),
            ("float32", "fp32"),
            ("mxpf8", "mxfp8"),
        ] {
            assert_eq!(
                said(cell),
                format!("not supported: the precision {cell} (did you mean `{near}`?); {all}")
            );
        }
        let scaling = said("fp8 quickly");
        assert!(
            scaling.contains("scalings of fp8 are mx, mxfp8, cs, "),
            "{scaling}"
        );
        assert_eq!(
            of("?").unwrap_err().to_string(),
            "`precision` is not stated"
        );
    }
}
