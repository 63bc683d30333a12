//! Published models by name: the shape of those whose configuration is public, for cells that a row
//! leaves empty, and why models of some families cannot be predicted.

use crate::Unmodelled;
use crate::mixture;
use crate::row::Row;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::LazyLock;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelFile {
    model: Vec<Shape>,
    family: Vec<Family>,
}

/// A model whose configuration is public.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Parts of the cell, without capitals, blanks, hyphens and underscores.
    names: Vec<String>,
    /// Values by column.
    #[serde(default)]
    columns: BTreeMap<String, u64>,
    /// The built-in model that a row without sizes is.
    #[serde(default)]
    config: Option<String>,
    /// The tokens behind the next one that it is trained to predict as well, by one module.
    #[serde(default)]
    pub further_tokens: u64,
    /// Whether its rows check what was fitted to others, so that no figure is fitted to them.
    #[serde(default)]
    held_out: bool,
    /// The public configuration.
    pub source: String,
}

/// A family of models that has what Meshwright has no op for.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Family {
    names: Vec<String>,
    /// The end of the sentence "not supported: ..".
    because: String,
    source: String,
}

static FILE: LazyLock<ModelFile> = LazyLock::new(|| {
    parse(include_str!("../data/models.toml")).expect("the built-in data files are tested")
});

fn parse(text: &str) -> Result<ModelFile, String> {
    let file: ModelFile = toml::from_str(text).map_err(|e| e.to_string())?;
    let known = |c: &String| mixture::COLUMNS.contains(&c.as_str());
    for shape in &file.model {
        if let Some(column) = shape.columns.keys().find(|c| !known(c)) {
            return Err(format!("{:?}: no column `{column}`", shape.names));
        }
        let config = shape.config.as_deref();
        if let Some(name) = config.filter(|name| import::builtin::find(name).is_none()) {
            return Err(format!("{:?}: no built-in model `{name}`", shape.names));
        }
    }
    let models = file.model.iter().map(|m| (&m.names, &m.source));
    let families = file.family.iter().map(|f| (&f.names, &f.source));
    for (names, source) in models.chain(families) {
        let is_plain = |n: &String| !n.is_empty() && *n == plain(n);
        if source.is_empty() || names.is_empty() || !names.iter().all(is_plain) {
            return Err(format!("{names:?}: no source, or a name that fits no cell"));
        }
    }
    Ok(file)
}

/// A name in small letters and digits alone.
fn plain(name: &str) -> String {
    let letters = name.chars().filter(|c| c.is_alphanumeric());
    letters.flat_map(char::to_lowercase).collect()
}

fn is_one_of(row: &Row, names: &[String]) -> bool {
    let own = plain(row.text("model").unwrap_or(""));
    names.iter().any(|name| own.contains(name))
}

/// The public configuration of the model that a row names, if it is known.
pub fn shape(row: &Row) -> Option<&'static Shape> {
    FILE.model.iter().find(|m| is_one_of(row, &m.names))
}

/// Whether no figure may be fitted to a row: it is of a model that checks what was fitted to others.
pub fn is_held_out(row: &Row) -> bool {
    shape(row).is_some_and(|s| s.held_out)
}

impl Shape {
    /// The value of a column.
    pub fn value(&self, column: &str) -> Option<u64> {
        self.columns.get(column).copied()
    }
    /// The built-in model, and its configuration, that a row without sizes is.
    pub fn built_in(&self) -> Option<(&'static str, serde_json::Value)> {
        let (name, text) = import::builtin::find(self.config.as_deref()?)?;
        Some((name, serde_json::from_str(text).ok()?))
    }
}

/// Why a model that states no shape cannot be predicted, where its name says so.
pub fn unsupported(row: &Row) -> Option<Unmodelled> {
    let family = FILE.family.iter().find(|f| is_one_of(row, &f.names))?;
    Some(Unmodelled::Feature(family.because.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(model: &str) -> Row {
        let table = crate::csv::parse(&format!("model\n{model}\n")).unwrap();
        crate::row::rows(&table).remove(0)
    }

    #[test]
    fn models_are_known_by_any_spelling() {
        for name in ["DeepSeekV3 (w/o MTP)", "DeepSeek V3 671B", "deepseek-v3"] {
            let shape = shape(&row(name)).unwrap();
            assert_eq!(shape.value("q_lora_rank"), Some(1536), "{name}");
            assert_eq!(shape.value("dense_layers"), Some(3));
        }
        assert_eq!(
            shape(&row("Kimi_K2")).unwrap().value("dense_layers"),
            Some(1)
        );
        assert!(shape(&row("DeepSeekV4 Flash")).is_none() && shape(&row("?")).is_none());
        for (name, config) in [
            ("Nemotron_3_Super", "nemotron-3-super-120b-a12b"),
            ("Nemotron V3 Nano 30B (26.02)", "nemotron-3-nano-30b-a3b"),
            ("Nemotron_3_5_Lightning", "nemotron-3-nano-30b-a3b"),
        ] {
            let built_in = shape(&row(name)).unwrap().built_in();
            assert_eq!(built_in.map(|b| b.0), Some(config), "{name}");
            assert!(unsupported(&row(name)).is_none());
            assert!(is_held_out(&row(name)));
        }
        assert!(is_held_out(&row("DeepSeek V3 671B")) && !is_held_out(&row("GPT OSS 120B")));
        assert!(unsupported(&row("DeepSeekV4 Flash")).is_some());
        assert!(unsupported(&row("nemotron-4-340b")).is_none());
    }

    #[test]
    fn a_shape_has_columns_and_a_source() {
        let of = |columns: &str, name: &str| {
            parse(&format!(
                "family=[]\n[[model]]\nnames=['{name}']\nsource='s'\n[model.columns]\n{columns}\n"
            ))
            .map(|_| ())
        };
        assert_eq!(of("q_lora_rank=8", "a1"), Ok(()));
        assert_eq!(
            of("heads=8", "a1").unwrap_err(),
            "[\"a1\"]: no column `heads`"
        );
        assert!(of("", "A 1").unwrap_err().contains("fits no cell"));
    }
}
