//! Where in a document the value of a key path is: `levels[1].protocols[2].ring_step_s`.

use std::ops::Range;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Returns byte and length of the key, or of the list's element, that `path` names in a TOML or
/// JSON document; `None` where the document has none.
pub fn find(text: &str, path: &str) -> Option<(usize, usize)> {
    let steps = steps(path)?;
    let span = match text.trim_start().starts_with('{') {
        true => in_json(text, &steps)?,
        false => in_toml(text, &steps)?,
    };
    text.get(span.clone())?;
    Some((span.start, span.len()))
}

/// A part of a path.
enum Step<'a> {
    Key(&'a str),
    Index(usize),
}

/// Splits a path into its parts; a key that contains a dot counts as several.
fn steps(path: &str) -> Option<Vec<Step<'_>>> {
    let mut steps = Vec::new();
    for part in path.split('.') {
        let mut rest = part.split('[');
        steps.push(Step::Key(rest.next().filter(|key| !key.is_empty())?));
        for index in rest {
            steps.push(Step::Index(index.strip_suffix(']')?.parse().ok()?));
        }
    }
    Some(steps)
}

fn in_toml(text: &str, steps: &[Step<'_>]) -> Option<Range<usize>> {
    let document = DeTable::parse(text).ok()?;
    let (first, rest) = steps.split_first()?;
    let Step::Key(key) = first else {
        return None;
    };
    let mut at = entry(document.get_ref(), key)?;
    for step in rest {
        at = match (step, at.1.get_ref()) {
            (Step::Key(key), DeValue::Table(table)) => entry(table, key)?,
            (Step::Index(i), DeValue::Array(list)) => {
                let element = list.get(*i)?;
                (element.span(), element)
            }
            _ => return None,
        };
    }
    Some(at.0)
}

/// Returns the place of a key in a table, and its value.
fn entry<'t, 'd>(
    table: &'t DeTable<'d>,
    key: &str,
) -> Option<(Range<usize>, &'t Spanned<DeValue<'d>>)> {
    let (found, value) = table.iter().find(|(k, _)| k.get_ref() == key)?;
    Some((found.span(), value))
}

fn in_json(text: &str, steps: &[Step<'_>]) -> Option<Range<usize>> {
    let bytes = text.as_bytes();
    let mut value = blank(bytes, 0);
    let mut place = value..value;
    for step in steps {
        let mut at = value + 1;
        let mut index = 0;
        loop {
            at = blank(bytes, at);
            let (key, start) = match (step, bytes.get(value)?) {
                (Step::Key(_), b'{') => {
                    let end = over(bytes, at)?;
                    let colon = blank(bytes, end);
                    (at..end, blank(bytes, colon + 1))
                }
                (Step::Index(_), b'[') => (at..at, at),
                _ => return None,
            };
            let end = over(bytes, start)?;
            let is_it = match step {
                Step::Key(name) => text.get(key.start + 1..key.end.checked_sub(1)?) == Some(*name),
                Step::Index(i) => index == *i,
            };
            if is_it {
                place = if key.is_empty() { start..end } else { key };
                value = start;
                break;
            }
            at = blank(bytes, end);
            if bytes.get(at) != Some(&b',') {
                return None;
            }
            (at, index) = (at + 1, index + 1);
        }
    }
    Some(place)
}

/// Returns the place of the next byte that is no blank.
fn blank(bytes: &[u8], at: usize) -> usize {
    let blanks = bytes
        .iter()
        .skip(at)
        .take_while(|b| b.is_ascii_whitespace());
    at + blanks.count()
}

/// Returns the end of the value at `at`, in a text that was parsed.
fn over(bytes: &[u8], at: usize) -> Option<usize> {
    let mut depth = 0_usize;
    let mut i = at;
    loop {
        match bytes.get(i)? {
            b'"' => {
                i += 1;
                while *bytes.get(i)? != b'"' {
                    i += if bytes[i] == b'\\' { 2 } else { 1 };
                }
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' | b',' | b':' if depth == 0 => {
                let blanks = bytes[at..i].iter().rev();
                let blanks = blanks.take_while(|b| b.is_ascii_whitespace()).count();
                return (i - blanks > at).then_some(i - blanks);
            }
            b'}' | b']' => depth -= 1,
            _ => {}
        }
        i += 1;
        let is_closed = matches!(bytes[i - 1], b'"' | b'}' | b']');
        if depth == 0 && is_closed {
            return Some(i);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at<'a>(text: &'a str, path: &str) -> Option<&'a str> {
        let (start, len) = find(text, path)?;
        text.get(start..start + len)
    }

    #[test]
    fn paths_lead_into_lists_and_tables() {
        let toml =
            "a = 1\n[[levels]]\nx = [1, \"two\"]\n[[levels]]\nx = [3, 4.5]\n[levels.deep]\nx = 7\n";
        assert_eq!(at(toml, "a"), Some("a"));
        assert_eq!(at(toml, "levels[0].x[1]"), Some("\"two\""));
        assert_eq!(at(toml, "levels[1].x[1]"), Some("4.5"));
        assert_eq!(
            find(toml, "levels[1].deep.x"),
            Some((toml.rfind('x').unwrap(), 1))
        );
        for path in [
            "b",
            "levels[2].x",
            "levels.x",
            "a.b",
            "levels[x]",
            "",
            "[0]",
        ] {
            assert_eq!(find(toml, path), None, "{path}");
        }
        let json = r#" {"a": 1, "levels": [ {"x": [1, "t,\"]wo"], "n": {}}, {"x":[3,4.5], "deep": {"x": 7} } ]}"#;
        assert_eq!(at(json, "a"), Some("\"a\""));
        assert_eq!(at(json, "levels[0].x[1]"), Some(r#""t,\"]wo""#));
        assert_eq!(at(json, "levels[0].n"), Some("\"n\""));
        assert_eq!(at(json, "levels[1].x[1]"), Some("4.5"));
        assert_eq!(
            find(json, "levels[1].deep.x"),
            Some((json.rfind("\"x").unwrap(), 3))
        );
        for path in ["b", "levels[2].x", "levels.x", "a.b", "levels[0].n.x"] {
            assert_eq!(find(json, path), None, "{path}");
        }
        // A text that is no document has no places, and ends.
        for text in [
            "{",
            "{\"a\"",
            "{\"a\":",
            "{\"a\": [",
            "= = =",
            "{\"a\": \"",
            "{]",
        ] {
            assert_eq!(find(text, "a[0].b"), None, "{text}");
        }
    }
}
