//! JSON and TOML documents to values, with line, column and key of what is wrong.

use crate::failure::{Exit, Failure};
use crate::files;
use serde::Serialize;
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
    let Said { problem, help } = said(
        full.rsplit_once(" at line ")
            .map_or(full.as_str(), |(p, _)| p),
        "",
        what,
    );
    let at = named(key);
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
        _ => failure.help(match other_kind(text, what) {
            Some(other) => format!("this is a {other}; {}", expected(what)),
            None => help,
        }),
    }
}

/// Writes a document as JSON.
pub fn to_json(value: &impl Serialize) -> Result<String, Failure> {
    let text = serde_json::to_string_pretty(value);
    let text = text.map_err(|e| Failure::new(Exit::Internal, format!("cannot write JSON: {e}")))?;
    Ok(text + "\n")
}

/// Recognises a document that is of another kind than `what`: plans, runs and clusters are easily
/// mistaken for each other.
fn other_kind(text: &str, what: &str) -> Option<&'static str> {
    let kinds = [
        ("plan", "layer_strategies"),
        ("run", "plan_hash"),
        ("cluster", "devices_per_host"),
    ];
    let document: serde_json::Value = serde_json::from_str(text).ok()?;
    let of_kind = kinds
        .into_iter()
        .find(|(_, key)| document.get(key).is_some());
    of_kind.map(|(kind, _)| kind).filter(|kind| *kind != what)
}

/// Says what a document of this kind is, and where its form is described.
fn expected(what: &str) -> String {
    match what {
        "plan" | "run" | "cluster" => {
            format!("expected a {what}; `meshwright schema {what}` prints its form")
        }
        _ => format!("expected a {what}; docs/cli.md shows one"),
    }
}

/// Returns the byte offset of serde_json's line and column: the byte before the column count, as it
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
    let failure = |e: &toml::de::Error, key: &str| {
        let span = e.span().unwrap_or(0..0);
        let (line, column) = line_column(text, span.start);
        let here = text.get(span.clone()).unwrap_or_default();
        let Said { problem, help } = said(e.message(), here, what);
        let at = named(key);
        Failure::new(
            Exit::BadInput,
            format!("{file}:{line}:{column}: {at}{problem}"),
        )
        .place(file, text, span.start, span.len(), "here")
        .help(help)
    };
    let parser = toml::Deserializer::parse(text).map_err(|e| failure(&e, ""))?;
    serde_path_to_error::deserialize(parser).map_err(|e| failure(e.inner(), &e.path().to_string()))
}

/// Returns the key path of a problem, to stand before it; empty where the whole document is meant.
fn named(key: &str) -> String {
    match key {
        "." | "" | "?" => String::new(),
        key => format!("`{key}`: "),
    }
}

/// A parser's message in words for users.
struct Said {
    problem: String,
    help: String,
}

/// The most names that a message lists; of more, it names the nearest, or the help lists them.
const NAMES_LISTED: usize = 8;

/// Rewords a parser's message: an unknown name comes with the nearest known one, and a wrong type
/// with what belongs there. `here` is the text at the place, where it is known.
fn said(message: &str, here: &str, what: &str) -> Said {
    let help = expected(what);
    if let Some((kind, name, known)) = unknown_name(message) {
        let near = files::closest(name, known.iter().copied());
        let all = listed(&known);
        let many = known.len() > NAMES_LISTED;
        let problem = match known.is_empty() || many {
            true => format!("unknown {kind} `{name}`"),
            false => format!("unknown {kind} `{name}`, expected {all}"),
        };
        let help = match near {
            Some(near) => format!("did you mean `{near}`? {}", capitalised(&help)),
            None if many => format!("known are {all}; {help}"),
            None => help,
        };
        return Said { problem, help };
    }
    let problem = match message {
        "invalid type: unit variant, expected struct variant" => {
            let name = here.trim().trim_matches(['"', '\'']);
            match name.is_empty() {
                true => "a name alone, expected a table with its figures".into(),
                false => {
                    format!("`{name}` alone, expected it with its figures: {{ {name} = {{ .. }} }}")
                }
            }
        }
        "wanted exactly 1 element, more than 1 element" => {
            "several keys, expected one of them".into()
        }
        "wanted string or table" => "expected a name or a table".into(),
        other => plain_type(other, what),
    };
    Said { problem, help }
}

/// Splits a message about an unknown name into the kind, the name and the known names.
fn unknown_name(message: &str) -> Option<(&'static str, &str, Vec<&str>)> {
    if let Some(rest) = message.strip_prefix("unexpected keys in table: ") {
        let (names, known) = rest.split_once(", available keys: ")?;
        let name = names.split(", ").next()?;
        return Some(("field", name, known.split(", ").collect()));
    }
    let kinds = [("unknown field `", "field"), ("unknown variant `", "name")];
    let found = kinds
        .into_iter()
        .find_map(|(start, kind)| Some((kind, message.strip_prefix(start)?)));
    let (kind, rest) = found?;
    // A name from a file may hold anything, so the last possible place is taken as its end.
    let ends = ["`, expected ", "`, there are no "];
    let end = ends.into_iter().find_map(|e| rest.rfind(e))?;
    let known = rest[end + 1..].split('`').skip(1).step_by(2).collect();
    Some((kind, &rest[..end], known))
}

/// Puts what a parser says of a value of another type into words: `is a list, expected a number`.
fn plain_type(message: &str, what: &str) -> String {
    if message == "expected value" {
        return "is no value that may stand here".into();
    }
    if let Some(rest) = message.strip_prefix("invalid length ")
        && let Some((n, wanted)) = rest.split_once(", expected ")
    {
        return format!("is a list of {n}, expected {}", wanted_type(wanted, what));
    }
    let kinds = ["invalid type: ", "invalid value: "];
    let rest = kinds.into_iter().find_map(|k| message.strip_prefix(k));
    match rest.and_then(|rest| rest.rsplit_once(", expected ")) {
        Some((found, wanted)) => format!(
            "is {}, expected {}",
            found_type(found),
            wanted_type(wanted, what)
        ),
        None => message.to_string(),
    }
}

/// A value that a parser found, in words.
fn found_type(found: &str) -> &str {
    let types = [
        ("map", "an object"),
        ("sequence", "a list"),
        ("unit value", "null"),
        ("unit variant", "a name alone"),
        ("Option value", "a value that may be left out"),
    ];
    if let Some((_, words)) = types.into_iter().find(|(ty, _)| *ty == found) {
        return words;
    }
    let named = [
        "boolean ",
        "integer ",
        "floating point ",
        "string ",
        "character ",
    ];
    named
        .into_iter()
        .find_map(|kind| found.strip_prefix(kind))
        .unwrap_or(found)
}

/// The type that a parser wanted, in words.
fn wanted_type(wanted: &str, what: &str) -> String {
    let types = [
        ("f64", "a number"),
        ("u8", "a whole number from 0 to 255"),
        ("u32", "a whole number from 0 to 4294967295"),
        ("u64", "a whole number from 0"),
        ("usize", "a whole number from 0"),
        ("a boolean", "true or false"),
        ("a sequence", "a list"),
        ("a map", "an object"),
        ("unit", "null"),
        ("string or map", "a name or an object"),
        ("wanted string or table", "a name or a table"),
    ];
    if let Some((_, words)) = types.into_iter().find(|(ty, _)| *ty == wanted) {
        return words.to_string();
    }
    let structs = [
        "struct ",
        "internally tagged enum ",
        "adjacently tagged enum ",
    ];
    let name = structs.into_iter().find_map(|s| wanted.strip_prefix(s));
    match name.map(|name| name.split(' ').next().unwrap_or(name)) {
        // The document itself.
        Some(name) if name.eq_ignore_ascii_case(what) => format!("a {what}"),
        Some(_) => "an object".into(),
        None => match ["a tuple of size ", "an array of length ", "tuple struct "]
            .into_iter()
            .find_map(|t| wanted.strip_prefix(t))
        {
            Some(n) if n.parse::<u64>().is_ok() => format!("a list of {n}"),
            Some(_) => "a list".into(),
            None => wanted
                .strip_prefix("enum ")
                .map_or(wanted, |_| "a name")
                .to_string(),
        },
    }
}

/// Lists names as `a`, `b` or `c`.
fn listed(names: &[&str]) -> String {
    let quoted: Vec<String> = names.iter().map(|n| format!("`{n}`")).collect();
    match quoted.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => quoted.concat(),
    }
}

pub fn capitalised(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or(String::new(), |first| {
        first.to_uppercase().chain(chars).collect()
    })
}

/// Returns line and column of a byte, from 1.
pub fn line_column(text: &str, at: usize) -> (usize, usize) {
    let before = &text.as_bytes()[..at.min(text.len())];
    let line = before.iter().filter(|b| **b == b'\n').count() + 1;
    let column = before.iter().rev().take_while(|b| **b != b'\n').count() + 1;
    (line, column)
}

/// Finds a key path (`device.launch_s`) whose last part occurs once as a key.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_not_known_are_told_from_the_parsers_words() {
        let of = |message: &str| said(message, "", "cluster");
        let slip = of("unknown field `rat`, expected `rate` or `backward_share`");
        assert_eq!(
            slip.problem,
            "unknown field `rat`, expected `rate` or `backward_share`"
        );
        assert!(
            slip.help
                .starts_with("did you mean `rate`? Expected a cluster")
        );
        // The same, as the TOML parser says it of a variant's fields.
        let table = of("unexpected keys in table: rat, available keys: rate, backward_share");
        assert_eq!((table.problem, table.help), (slip.problem, slip.help));
        let many = "unknown field `atention`, expected one of `a1`, `b2`, `c3`, `d4`, `e5`, `f6`, `g7`, `h8`, `attention`";
        let said = of(many);
        assert_eq!(said.problem, "unknown field `atention`");
        assert!(
            said.help.starts_with("did you mean `attention`?"),
            "{}",
            said.help
        );
        let far = of(&many.replace("atention", "x`, y"));
        assert_eq!(far.problem, "unknown field `x`, y`");
        assert!(far.help.contains("known are `a1`"), "{}", far.help);
        let far = of(&many.replace("atention", "zzz"));
        assert!(far.help.starts_with("known are `a1`, `b2`"), "{}", far.help);
        let none = of("unknown field `x`, there are no fields");
        assert_eq!(none.problem, "unknown field `x`");
    }

    #[test]
    fn types_are_said_in_words() {
        let problem = |message: &str, here: &str| said(message, here, "cluster").problem;
        assert_eq!(
            problem("invalid type: string \"x\", expected f64", "\"x\""),
            "is \"x\", expected a number"
        );
        assert_eq!(
            problem("invalid value: integer `-1`, expected u32", "-1"),
            "is `-1`, expected a whole number from 0 to 4294967295"
        );
        assert_eq!(
            problem(
                "invalid type: unit variant, expected struct variant",
                "\"fused\""
            ),
            "`fused` alone, expected it with its figures: { fused = { .. } }"
        );
        assert_eq!(problem("missing field `rate`", ""), "missing field `rate`");
        for (message, words) in [
            (
                "invalid type: map, expected a sequence",
                "is an object, expected a list",
            ),
            (
                "invalid type: sequence, expected a string",
                "is a list, expected a string",
            ),
            (
                "invalid type: null, expected struct Cluster",
                "is null, expected a cluster",
            ),
            (
                "invalid type: integer `3`, expected struct Stage",
                "is `3`, expected an object",
            ),
            (
                "invalid length 0, expected struct Cluster with 17 elements",
                "is a list of 0, expected a cluster",
            ),
            (
                "invalid length 3, expected a tuple of size 2",
                "is a list of 3, expected a list of 2",
            ),
            (
                "invalid type: floating point `1.5`, expected u64",
                "is `1.5`, expected a whole number from 0",
            ),
            ("expected value", "is no value that may stand here"),
        ] {
            assert_eq!(problem(message, ""), words);
        }
    }
}
