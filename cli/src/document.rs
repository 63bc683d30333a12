//! JSON and TOML documents to values, with line, column and key of what is wrong.

use crate::failure::{Exit, Failure};
use serde::de::DeserializeOwned;

/// Parses a JSON document of the kind `what`.
///
/// Fails with the place of malformed text, unknown and missing fields, wrong types.
pub fn json<T: DeserializeOwned>(file: &str, text: &str, what: &str) -> Result<T, Failure> {
    let mut parser = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut parser).map_err(|e| {
        let key = e.path().to_string();
        json_failure(file, text, what, &key, e.inner())
    })?;
    parser
        .end()
        .map_err(|e| json_failure(file, text, what, ".", &e))?;
    Ok(value)
}

fn json_failure(file: &str, text: &str, what: &str, key: &str, e: &serde_json::Error) -> Failure {
    let full = e.to_string();
    let problem = full
        .rsplit_once(" at line ")
        .map_or(full.as_str(), |(p, _)| p);
    let at = if matches!(key, "." | "" | "?") {
        String::new()
    } else {
        format!("`{key}`: ")
    };
    let (line, column) = (e.line(), e.column());
    let failure = Failure::new(
        Exit::BadInput,
        format!("{file}:{line}:{column}: {at}{problem}"),
    )
    .place(file, text, offset(text, line, column), 1, "here");
    match e.classify() {
        serde_json::error::Category::Eof => failure.help(format!(
            "the file ends too early: it was cut off, or is no {what}"
        )),
        serde_json::error::Category::Syntax => failure.help(format!("expected a {what} in JSON")),
        _ => failure.help(expected(what)),
    }
}

/// What belongs into a document of this kind, and where its form is told.
fn expected(what: &str) -> String {
    match what {
        "plan" | "run" | "cluster" => {
            format!("expected a {what}; `meshwright schema {what}` prints its form")
        }
        _ => format!("expected a {what}; docs/cli.md shows one"),
    }
}

/// Byte offset of serde_json's line and column: the byte before the column count, as it
/// counts what it has read.
fn offset(text: &str, line: usize, column: usize) -> usize {
    let start: usize = text
        .split_inclusive('\n')
        .take(line.saturating_sub(1))
        .map(str::len)
        .sum();
    start + column.saturating_sub(1)
}

/// Parses a TOML document of the kind `what`; fails as [`json`] does.
pub fn toml<T: DeserializeOwned>(file: &str, text: &str, what: &str) -> Result<T, Failure> {
    toml::from_str(text).map_err(|e| {
        let span = e.span().unwrap_or(0..0);
        let (line, column) = line_column(text, span.start);
        Failure::new(
            Exit::BadInput,
            format!("{file}:{line}:{column}: {}", e.message()),
        )
        .place(file, text, span.start, span.len(), "here")
        .help(expected(what))
    })
}

/// Line and column, from 1, of a byte.
pub fn line_column(text: &str, at: usize) -> (usize, usize) {
    let before = &text.as_bytes()[..at.min(text.len())];
    let line = before.iter().filter(|b| **b == b'\n').count() + 1;
    let column = before.iter().rev().take_while(|b| **b != b'\n').count() + 1;
    (line, column)
}

/// The place of a key path (`device.launch_s`), when its last part occurs once as a key.
pub fn find_key(text: &str, path: &str) -> Option<(usize, usize)> {
    let last = path.rsplit('.').next().filter(|k| !k.is_empty())?;
    let is_key = |at: usize| {
        let before = text[..at].chars().next_back();
        let after = text[at + last.len()..]
            .trim_start_matches('"')
            .trim_start()
            .chars()
            .next();
        before.is_none_or(|c| !c.is_alphanumeric() && c != '_' && c != '.')
            && matches!(after, Some('=' | ':'))
    };
    let mut found = text
        .match_indices(last)
        .map(|(at, _)| at)
        .filter(|at| is_key(*at));
    match (found.next(), found.next()) {
        (Some(at), None) => Some((at, last.len())),
        _ => None,
    }
}
