//! A JSON object with the position of its keys, and typed access that remembers which keys
//! were understood.
//!
//! Invariants: no key of the two outer levels occurs twice; `Fields::finish` fails unless
//! every key was read or is on the list of harmless ones.

use super::Numbers;
use crate::ImportError;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

/// The size, in bytes, above which a file is no model config (published ones have a few kilobytes).
pub(super) const MAX_BYTES: usize = 1 << 20;

/// A key of the outermost object, or of an object directly in it.
type KeyPath = (String, Option<String>);

/// A parsed file.
pub(super) struct Document {
    file: String,
    root: Map<String, Value>,
    positions: BTreeMap<KeyPath, (usize, usize)>,
}

impl Document {
    /// Parses `bytes`; `file` is the name in messages.
    pub(super) fn parse(file: &str, bytes: &[u8]) -> Result<Self, ImportError> {
        let json = |line, column, problem: String| ImportError::Json {
            file: file.into(),
            line,
            column,
            problem,
        };
        if bytes.len() > MAX_BYTES {
            return Err(json(
                1,
                1,
                format!("{} bytes; a config has at most {MAX_BYTES}", bytes.len()),
            ));
        }
        let text = std::str::from_utf8(bytes).map_err(|e| {
            let (line, column) = position(bytes, e.valid_up_to());
            json(line, column, "is not UTF-8".into())
        })?;
        let value: Value = serde_json::from_str(text)
            .map_err(|e| json(e.line(), e.column(), without_position(&e)))?;
        let Value::Object(root) = value else {
            return Err(json(
                1,
                1,
                format!("is {}, expected an object", kind(&value)),
            ));
        };
        let mut positions = BTreeMap::new();
        for (path, offset) in outer_keys(text) {
            let (line, column) = position(bytes, offset);
            let name = dotted(&path);
            if positions.insert(path, (line, column)).is_some() {
                return Err(ImportError::Field {
                    file: file.into(),
                    line,
                    column,
                    field: name,
                    problem: "occurs twice".into(),
                });
            }
        }
        Ok(Document {
            file: file.into(),
            root,
            positions,
        })
    }
    /// Returns the outermost object.
    pub(super) fn fields(&self) -> Fields<'_> {
        Fields {
            document: self,
            scope: None,
            object: &self.root,
            known: BTreeSet::new(),
        }
    }
    /// Returns the name of the file in messages.
    pub(super) fn file(&self) -> &str {
        &self.file
    }
}

/// An object of the document under inspection.
pub(super) struct Fields<'a> {
    document: &'a Document,
    scope: Option<&'static str>,
    object: &'a Map<String, Value>,
    known: BTreeSet<&'static str>,
}

impl<'a> Fields<'a> {
    /// Returns the value of a field, null included.
    fn value(&mut self, name: &'static str) -> Option<&'a Value> {
        self.known.insert(name);
        self.object.get(name)
    }
    /// Says whether the field is there and not null.
    pub(super) fn has(&mut self, name: &'static str) -> bool {
        self.value(name).is_some_and(|v| !v.is_null())
    }
    /// Says whether the field is there and null.
    pub(super) fn is_null(&mut self, name: &'static str) -> bool {
        self.value(name).is_some_and(Value::is_null)
    }
    /// Reads a whole number in `range`; `None` where the field is absent.
    pub(super) fn integer(
        &mut self,
        name: &'static str,
        range: RangeInclusive<u64>,
    ) -> Result<Option<u64>, ImportError> {
        let Some(value) = self.value(name) else {
            return Ok(None);
        };
        let expected = || {
            format!(
                "expected a whole number from {} to {}",
                range.start(),
                range.end()
            )
        };
        match value.as_u64() {
            Some(n) if range.contains(&n) => Ok(Some(n)),
            _ => Err(self.wrong(name, value, &expected())),
        }
    }
    /// Reads a whole number as `integer` does; null counts as absent.
    pub(super) fn nullable_integer(
        &mut self,
        name: &'static str,
        range: RangeInclusive<u64>,
    ) -> Result<Option<u64>, ImportError> {
        if self.has(name) {
            self.integer(name, range)
        } else {
            Ok(None)
        }
    }
    /// Reads a whole number in `range`; the field must be there.
    pub(super) fn required(
        &mut self,
        name: &'static str,
        range: RangeInclusive<u64>,
    ) -> Result<u64, ImportError> {
        let expected = format!("a whole number from {} to {}", range.start(), range.end());
        self.integer(name, range)?
            .ok_or_else(|| self.missing(name, &expected))
    }
    /// Reads a list of whole numbers in `range`; null counts as absent.
    pub(super) fn integers(
        &mut self,
        name: &'static str,
        range: RangeInclusive<u64>,
    ) -> Result<Option<Vec<u64>>, ImportError> {
        let Some(value) = self.value(name).filter(|v| !v.is_null()) else {
            return Ok(None);
        };
        let number = |v: &Value| v.as_u64().filter(|n| range.contains(n));
        let numbers = value
            .as_array()
            .and_then(|list| list.iter().map(number).collect());
        let (least, most) = (range.start(), range.end());
        let expected = format!("expected a list of whole numbers from {least} to {most}");
        match numbers {
            Some(numbers) => Ok(Some(numbers)),
            None => Err(self.wrong(name, value, &expected)),
        }
    }
    /// Reads a list of words out of these; null counts as absent.
    pub(super) fn words(
        &mut self,
        name: &'static str,
        accepted: &[&'static str],
    ) -> Result<Option<Vec<&'static str>>, ImportError> {
        let Some(value) = self.value(name).filter(|v| !v.is_null()) else {
            return Ok(None);
        };
        let word = |v: &Value| accepted.iter().copied().find(|w| v == w);
        let words = value
            .as_array()
            .and_then(|list| list.iter().map(word).collect());
        match words {
            Some(words) => Ok(Some(words)),
            None => {
                let quoted: Vec<String> = accepted.iter().map(|w| format!("{w:?}")).collect();
                let expected = format!("expected a list of {}", quoted.join(" and "));
                Err(self.wrong(name, value, &expected))
            }
        }
    }
    /// Reads a finite number that `accept` holds for; `None` where the field is absent.
    pub(super) fn number(
        &mut self,
        name: &'static str,
        (accept, expected): Numbers,
    ) -> Result<Option<f64>, ImportError> {
        let Some(value) = self.value(name) else {
            return Ok(None);
        };
        match value.as_f64() {
            Some(x) if x.is_finite() && accept(x) => Ok(Some(x)),
            _ => Err(self.wrong(name, value, expected)),
        }
    }
    /// Reads a truth value.
    pub(super) fn boolean(&mut self, name: &'static str) -> Result<Option<bool>, ImportError> {
        let Some(value) = self.value(name) else {
            return Ok(None);
        };
        value
            .as_bool()
            .map(Some)
            .ok_or_else(|| self.wrong(name, value, "expected true or false"))
    }
    /// Reads a string.
    pub(super) fn string(&mut self, name: &'static str) -> Result<Option<&'a str>, ImportError> {
        let Some(value) = self.value(name) else {
            return Ok(None);
        };
        value
            .as_str()
            .map(Some)
            .ok_or_else(|| self.wrong(name, value, "expected a string"))
    }
    /// Reads an object within this one; null counts as absent.
    pub(super) fn object(&mut self, name: &'static str) -> Result<Option<Fields<'a>>, ImportError> {
        match self.value(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Object(object)) => Ok(Some(Fields {
                document: self.document,
                scope: Some(name),
                object,
                known: BTreeSet::new(),
            })),
            Some(value) => Err(self.wrong(name, value, "expected an object or null")),
        }
    }
    /// Checks that the field, where present, has one of these values.
    pub(super) fn only(
        &mut self,
        name: &'static str,
        accepted: &[Value],
        why: &str,
    ) -> Result<(), ImportError> {
        match self.value(name) {
            Some(value) if !accepted.contains(value) => {
                let list = accepted
                    .iter()
                    .map(Value::to_string)
                    .collect::<Vec<_>>()
                    .join(" or ");
                Err(self.wrong(name, value, &format!("accepted: {list} ({why})")))
            }
            _ => Ok(()),
        }
    }
    /// Checks that the field, where present and not null, is a list of nothing but this word.
    pub(super) fn only_in_list(
        &mut self,
        name: &'static str,
        word: &str,
        why: &str,
    ) -> Result<(), ImportError> {
        let Some(value) = self.value(name).filter(|v| !v.is_null()) else {
            return Ok(());
        };
        match value.as_array() {
            Some(list) if list.iter().all(|v| v == word) => Ok(()),
            Some(list) => {
                let other = list
                    .iter()
                    .find(|v| *v != word)
                    .map_or_else(String::new, shown);
                Err(self.error(name, format!("has {other}; accepted: {word:?} ({why})")))
            }
            None => Err(self.wrong(name, value, &format!("expected a list of {word:?}"))),
        }
    }
    /// Checks that every field that was not read is harmless.
    pub(super) fn finish(self, harmless: &[&str]) -> Result<(), ImportError> {
        for name in self.object.keys() {
            if !self.known.contains(name.as_str()) && !harmless.contains(&name.as_str()) {
                let (line, column) = self.position(name);
                return Err(ImportError::UnknownField {
                    file: self.document.file.clone(),
                    line,
                    column,
                    field: self.full_name(name),
                    accepted: self.known.into_iter().collect::<Vec<_>>().join(", "),
                });
            }
        }
        Ok(())
    }

    /// Makes the error of a field whose value is not accepted.
    pub(super) fn wrong(&self, name: &str, value: &Value, expected: &str) -> ImportError {
        self.error(name, format!("is {}; {expected}", shown(value)))
    }
    /// Makes an error at a field.
    pub(super) fn error(&self, name: &str, problem: String) -> ImportError {
        let (line, column) = self.position(name);
        ImportError::Field {
            file: self.document.file.clone(),
            line,
            column,
            field: self.full_name(name),
            problem,
        }
    }
    /// Makes the error of an absent field.
    pub(super) fn missing(&self, name: &str, expected: &str) -> ImportError {
        ImportError::MissingField {
            file: self.document.file.clone(),
            field: self.full_name(name),
            expected: expected.into(),
        }
    }
    /// Makes the error of two fields that disagree.
    pub(super) fn contradiction(&self, first: &str, second: &str, problem: String) -> ImportError {
        ImportError::Contradiction {
            file: self.document.file.clone(),
            first: self.full_name(first),
            second: self.full_name(second),
            problem,
        }
    }
    fn position(&self, name: &str) -> (usize, usize) {
        let path = match self.scope {
            Some(outer) => (outer.to_string(), Some(name.to_string())),
            None => (name.to_string(), None),
        };
        self.document
            .positions
            .get(&path)
            .copied()
            .unwrap_or((1, 1))
    }
    fn full_name(&self, name: &str) -> String {
        self.scope
            .map_or_else(|| name.to_string(), |outer| format!("{outer}.{name}"))
    }
}

/// Returns serde_json's message without the position at its end, which the error carries anyway.
pub(crate) fn without_position(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.rfind(" at line ")
        .map_or(text.clone(), |cut| text[..cut].to_string())
}

fn dotted((outer, inner): &KeyPath) -> String {
    inner
        .as_ref()
        .map_or_else(|| outer.clone(), |i| format!("{outer}.{i}"))
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// Shows a value in a message: scalars as they are, cut to a readable length, the rest by kind.
fn shown(value: &Value) -> String {
    match value {
        Value::Array(_) | Value::Object(_) => kind(value).into(),
        _ => {
            let text = value.to_string();
            match text.char_indices().nth(60) {
                Some((cut, _)) => format!("{}…", &text[..cut]),
                None => text,
            }
        }
    }
}

/// Returns line and column of a byte, from 1; columns count bytes, as serde_json's do.
fn position(bytes: &[u8], offset: usize) -> (usize, usize) {
    let before = &bytes[..offset.min(bytes.len())];
    let line = before.iter().filter(|&&b| b == b'\n').count() + 1;
    let column = before.iter().rev().take_while(|&&b| b != b'\n').count() + 1;
    (line, column)
}

/// Finds the keys of the outer two levels of objects with their byte offsets, in order. `text` is
/// valid JSON.
fn outer_keys(text: &str) -> Vec<(KeyPath, usize)> {
    let bytes = text.as_bytes();
    let mut keys = Vec::new();
    let mut open: Vec<u8> = Vec::new();
    let mut outer = String::new();
    let mut at_key = false;
    let mut i = 0;
    while i < bytes.len() {
        match bytes[i] {
            b'"' => {
                let end = string_end(bytes, i);
                if at_key && open.len() <= 2 && open.iter().all(|&b| b == b'{') {
                    let key: String = serde_json::from_str(&text[i..end]).unwrap_or_default();
                    if open.len() == 1 {
                        outer.clone_from(&key);
                        keys.push(((key, None), i));
                    } else {
                        keys.push(((outer.clone(), Some(key)), i));
                    }
                }
                at_key = false;
                i = end;
                continue;
            }
            b @ (b'{' | b'[') => {
                open.push(b);
                at_key = b == b'{';
            }
            b'}' | b']' => {
                open.pop();
                at_key = false;
            }
            b',' => at_key = open.last() == Some(&b'{'),
            _ => {}
        }
        i += 1;
    }
    keys
}

/// Returns the byte after the string that starts at `start`.
fn string_end(bytes: &[u8], start: usize) -> usize {
    let mut i = start + 1;
    while i < bytes.len() && bytes[i] != b'"' {
        i += if bytes[i] == b'\\' { 2 } else { 1 };
    }
    (i + 1).min(bytes.len())
}
