//! Attributes of ops as text: JSON values with bare words for keys and simple strings, and
//! `<..>` for lists of dims, which serde gives as lists of strings (`["B", "1024"]`).

use super::ParseError;
use super::scan::Scanner;
use crate::OpKind;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Values nest this deep at most; today's ops need three levels.
const MAX_DEPTH: usize = 8;

/// Name and attributes of an op as serde gives them.
pub(super) fn split(kind: &OpKind) -> (String, Option<Value>) {
    match serde_json::to_value(kind).expect("attributes are numbers, strings, lists and maps") {
        Value::Object(map) => match map.into_iter().next() {
            Some((name, attributes)) => (name, Some(attributes)),
            None => (kind.name().to_string(), None),
        },
        _ => (kind.name().to_string(), None),
    }
}

/// The op of this name with these attributes; the error is a message and a help.
pub(super) fn join(name: &str, given: Option<&Value>) -> Result<OpKind, (String, Option<String>)> {
    let tagged = match given {
        Some(v) => Value::Object(Map::from_iter([(name.to_string(), v.clone())])),
        None => Value::String(name.to_string()),
    };
    let kind: OpKind = serde_json::from_value(tagged)
        .map_err(|e| explain(name, given.is_some(), &e.to_string()))?;
    if let (Some(given), (_, Some(known))) = (given, split(&kind))
        && let Some(key) = unknown_key(given, &known)
    {
        return Err((format!("op `{name}` has no attribute `{key}`"), None));
    }
    Ok(kind)
}

fn explain(name: &str, has_attributes: bool, problem: &str) -> (String, Option<String>) {
    if let Some((what, known)) = problem.split_once(", expected one of ")
        && what == format!("unknown variant `{name}`")
    {
        return (
            format!("there is no op `{name}`"),
            Some(format!("the ops are {known}")),
        );
    }
    if problem.contains("unit variant, expected struct variant") {
        if has_attributes {
            return (
                format!("attributes of `{name}`: a name stands alone that needs figures"),
                Some("write its figures behind it, as in order: {zigzag: {ranks: 2}}".into()),
            );
        }
        return (
            format!("op `{name}` needs attributes"),
            Some(format!("write {name} {{..}}")),
        );
    }
    if problem.contains("expected unit variant") || problem.contains("expected unit") {
        return (
            format!("op `{name}` has no attributes"),
            Some(format!("write {name} alone")),
        );
    }
    (format!("attributes of `{name}`: {problem}"), None)
}

/// A key of `given` that `known` lacks, at any depth.
fn unknown_key(given: &Value, known: &Value) -> Option<String> {
    let (Value::Object(given), Value::Object(known)) = (given, known) else {
        return None;
    };
    given.iter().find_map(|(key, value)| match known.get(key) {
        None => Some(key.clone()),
        Some(inner) => unknown_key(value, inner),
    })
}

/// The same value with `f` applied to every string.
pub(super) fn map_strings(value: &Value, f: &impl Fn(&str) -> String) -> Value {
    match value {
        Value::String(s) => Value::String(f(s)),
        Value::Array(a) => Value::Array(a.iter().map(|v| map_strings(v, f)).collect()),
        Value::Object(o) => Value::Object(
            o.iter()
                .map(|(k, v)| (k.clone(), map_strings(v, f)))
                .collect(),
        ),
        other => other.clone(),
    }
}

/// True when `holds` for some string of the value.
pub(super) fn any_string(value: &Value, holds: &impl Fn(&str) -> bool) -> bool {
    match value {
        Value::String(s) => holds(s),
        Value::Array(a) => a.iter().any(|v| any_string(v, holds)),
        Value::Object(o) => o.values().any(|v| any_string(v, holds)),
        _ => false,
    }
}

/// Appends the text of a value. Keys are sorted here, whatever map serde_json was built with.
pub(super) fn write(value: &Value, out: &mut String) {
    match value {
        Value::String(s) => write_string(s, out),
        Value::Array(a) => match dims(a) {
            Some(dims) => {
                let _ = write!(out, "<{}>", dims.join(","));
            }
            None => write_list(out, '[', a.iter(), ']', write_item),
        },
        Value::Object(o) => {
            let sorted: BTreeMap<_, _> = o.iter().collect();
            write_list(out, '{', sorted.iter(), '}', |(key, v), out| {
                write_string(key, out);
                out.push_str(": ");
                write(v, out);
            });
        }
        other => {
            let _ = write!(out, "{other}");
        }
    }
}

fn write_item(value: &Value, out: &mut String) {
    write(value, out);
}

fn write_list<T>(
    out: &mut String,
    open: char,
    items: impl Iterator<Item = T>,
    close: char,
    each: impl Fn(T, &mut String),
) {
    out.push(open);
    for (i, item) in items.enumerate() {
        if i > 0 {
            out.push_str(", ");
        }
        each(item, out);
    }
    out.push(close);
}

fn write_string(s: &str, out: &mut String) {
    let word = s.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && s.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    if word && !matches!(s, "true" | "false" | "null") {
        out.push_str(s);
    } else {
        out.push_str(&quote(s));
    }
}

/// A string in quotes, escaped as in JSON.
pub(super) fn quote(s: &str) -> String {
    Value::String(s.to_string()).to_string()
}

/// The strings of a list that is not empty and holds dims only.
fn dims(list: &[Value]) -> Option<Vec<&str>> {
    let is_dim = |s: &&str| *s == "B" || s.parse::<u64>().is_ok_and(|n| n.to_string() == **s);
    if list.is_empty() {
        return None;
    }
    list.iter().map(|v| v.as_str().filter(is_dim)).collect()
}

/// Reads a value.
pub(super) fn read(s: &mut Scanner) -> Result<Value, ParseError> {
    read_at(s, 0)
}

fn read_at(s: &mut Scanner, depth: usize) -> Result<Value, ParseError> {
    if depth >= MAX_DEPTH {
        return Err(s.error_here(format!("attributes nest deeper than {MAX_DEPTH} levels")));
    }
    match s.peek() {
        Some('{') => {
            s.expect("{")?;
            read_map(s, depth)
        }
        Some('[') => {
            s.expect("[")?;
            Ok(Value::Array(s.list("]", |s| read_at(s, depth + 1))?))
        }
        Some('<') => {
            s.expect("<")?;
            Ok(Value::Array(
                s.list(">", |s| Ok(Value::String(s.dim()?.to_string())))?,
            ))
        }
        Some('"') => Ok(Value::String(s.string()?)),
        Some(c) if c.is_ascii_digit() || c == '-' => s.json_number(),
        _ => Ok(match s.word("a value")? {
            "true" => Value::Bool(true),
            "false" => Value::Bool(false),
            "null" => Value::Null,
            word => Value::String(word.to_string()),
        }),
    }
}

fn read_map(s: &mut Scanner, depth: usize) -> Result<Value, ParseError> {
    let mut map = Map::new();
    s.list("}", |s| {
        let start = s.token_start();
        let key = match s.peek() {
            Some('"') => s.string()?,
            _ => s.word("the name of an attribute")?.to_string(),
        };
        let end = s.token_end();
        s.expect(":")?;
        let value = read_at(s, depth + 1)?;
        match map.insert(key.clone(), value) {
            None => Ok(()),
            Some(_) => Err(s.error(start..end, format!("attribute `{key}` is given twice"))),
        }
    })?;
    Ok(Value::Object(map))
}
