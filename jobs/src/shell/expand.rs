//! Variables put into the words of a command: `$A`, `${A:-..}`, `${A[@]}`, `$((..))`, and gaps for what
//! only a shell could know.

use super::{CLOSE, Gap, OPEN, State, Value, WORDS, Wrong, assignment, gap};
use crate::arithmetic;

/// The most characters that variables may grow to.
const LARGEST: usize = 1 << 20;
/// How deep defaults of variables may stand in each other.
const DEEPEST: usize = 32;

impl State<'_> {
    /// The words of a text, with variables put in.
    pub(super) fn words(&mut self, line: usize, text: &str) -> Result<Vec<String>, Wrong> {
        let text = self.expanded(line, text, 0)?;
        shlex::split(&text).ok_or_else(|| Wrong {
            line,
            problem: "the quotes of this command do not match".into(),
        })
    }

    /// The text with variables put in, quoted as they stand.
    fn expanded(&mut self, line: usize, text: &str, depth: usize) -> Result<String, Wrong> {
        let wrong = |problem: &str| Wrong {
            line,
            problem: problem.into(),
        };
        if depth > DEEPEST {
            return Err(wrong("variables stand too deep in each other"));
        }
        let chars: Vec<char> = text.chars().collect();
        let mut out = String::new();
        let (mut single, mut double) = (false, false);
        let mut i = 0;
        while i < chars.len() {
            let c = chars[i];
            match c {
                '\'' if !double => {
                    single = !single;
                    out.push(c);
                    i += 1;
                }
                '\\' if !single => {
                    out.push(c);
                    out.extend(chars.get(i + 1));
                    i += 2;
                }
                '"' if !single => {
                    double = !double;
                    out.push(c);
                    i += 1;
                }
                '`' if !single => {
                    let end = chars[i + 1..].iter().position(|c| *c == '`');
                    let end = i + 1 + end.ok_or_else(|| wrong("a backquote is not closed"))?;
                    let inner: String = chars[i + 1..end].iter().collect();
                    out += &self.output(line, &inner);
                    i = end + 1;
                }
                '$' if !single => {
                    let (piece, next) = self.variable(line, &chars, i, double, depth)?;
                    if piece == NOTHING {
                        // A list without words leaves no word, though it is quoted.
                        let quoted = double && out.ends_with('"') && chars.get(next) == Some(&'"');
                        if quoted {
                            out.pop();
                            double = false;
                            i = next + 1;
                            continue;
                        }
                    } else if double && piece.starts_with(WORDS) {
                        // Words of a list stand for themselves, and have quotes of their own.
                        out.push('"');
                        out += &piece[WORDS.len_utf8()..];
                        out.push('"');
                    } else if !double && !piece.starts_with(WORDS) && assigns(&out) {
                        // The value of an assignment is one word, however it is put together.
                        out.push('"');
                        out += &quoted(&piece);
                        out.push('"');
                    } else {
                        out += piece.strip_prefix(WORDS).unwrap_or(&piece);
                    }
                    i = next;
                }
                _ => {
                    out.push(c);
                    i += 1;
                }
            }
            if out.len() > LARGEST {
                return Err(wrong("variables put into each other make more than 1 MiB"));
            }
        }
        self.size += out.len();
        match self.size > 16 * LARGEST {
            true => Err(wrong("variables put into each other make more than 16 MiB")),
            false => Ok(out),
        }
    }

    /// The output of a command, which is not known.
    fn output(&mut self, line: usize, command: &str) -> String {
        let words: String = command.split_whitespace().collect::<Vec<_>>().join(" ");
        let short: String = words.chars().take(40).collect();
        let name = format!("$({short})").replace([OPEN, CLOSE], "");
        let why = format!("line {line} takes the output of a command, and none is executed");
        self.leave(&name, Gap::Beyond(why))
    }

    fn leave(&mut self, name: &str, why: Gap) -> String {
        let safe: String = name
            .chars()
            .map(|c| {
                if c.is_whitespace() || "\"'\\".contains(c) {
                    '_'
                } else {
                    c
                }
            })
            .collect();
        self.script.gaps.insert(safe.clone(), why);
        format!("{OPEN}{safe}{CLOSE}")
    }

    /// Returns what stands for the variable whose `$` is at `at`, and the place behind it.
    fn variable(
        &mut self,
        line: usize,
        chars: &[char],
        at: usize,
        double: bool,
        depth: usize,
    ) -> Result<(String, usize), Wrong> {
        let quote = |value: &str| match double {
            true => quoted(value),
            false => value.to_string(),
        };
        let wrong = |problem: &str| Wrong {
            line,
            problem: problem.into(),
        };
        match chars.get(at + 1) {
            Some('(') => {
                let end = closing(chars, at + 1, '(', ')');
                let end = end.ok_or_else(|| wrong("a `$(` is not closed"))?;
                let inner: String = chars[at + 2..end].iter().collect();
                let arithmetic = inner.strip_prefix('(').and_then(|s| s.strip_suffix(')'));
                let Some(sum) = arithmetic else {
                    return Ok((self.output(line, &inner), end + 1));
                };
                let named = with_dollars(sum);
                let value = self.expanded(line, &named, depth + 1)?;
                match (gap(&value).map(String::from), arithmetic::value(&value)) {
                    (Some(name), _) => {
                        let why = self.script.gaps.get(&name).cloned();
                        let why = why.unwrap_or(Gap::Unset);
                        Ok((self.leave(&name, why), end + 1))
                    }
                    (None, Some(n)) => Ok((n.to_string(), end + 1)),
                    (None, None) => {
                        let why = format!(
                            "line {line} computes `{sum}`, which is more than sums and products of whole numbers"
                        );
                        Ok((self.leave(&format!("(({sum}))"), Gap::Beyond(why)), end + 1))
                    }
                }
            }
            Some('{') => {
                let end = closing(chars, at + 1, '{', '}');
                let end = end.ok_or_else(|| wrong("a `${` is not closed"))?;
                let inner: String = chars[at + 2..end].iter().collect();
                Ok((self.braced(line, &inner, double, depth)?, end + 1))
            }
            Some('@' | '*') => Ok((NOTHING.into(), at + 2)),
            Some(c) if c.is_ascii_alphabetic() || *c == '_' => {
                let is_name = |c: &&char| c.is_ascii_alphanumeric() || **c == '_';
                let name: String = chars[at + 1..].iter().take_while(is_name).collect();
                let next = at + 1 + name.len();
                let value = match self.value(&name) {
                    Value::Text(text) => quote(&text),
                    // Without brackets a list is its first word.
                    Value::Words(words) => {
                        let first = shlex::split(&words).and_then(|w| w.into_iter().next());
                        quote(&first.unwrap_or_default())
                    }
                    Value::Gap(why) => self.leave(&name, why),
                };
                Ok((value, next))
            }
            Some(c) if c.is_ascii_digit() || "#?$!-".contains(*c) => {
                let name = format!("{c}");
                let why = Gap::Beyond(format!("line {line} asks the shell for it"));
                Ok((self.leave(&name, why), at + 2))
            }
            _ => Ok(("\\$".into(), at + 1)),
        }
    }

    /// Returns what stands for `${inner}`.
    fn braced(
        &mut self,
        line: usize,
        inner: &str,
        double: bool,
        depth: usize,
    ) -> Result<String, Wrong> {
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let name: String = inner.chars().take_while(|c| is_name(*c)).collect();
        let rest = &inner[name.len()..];
        let quote = |value: &str| match double {
            true => quoted(value),
            false => value.to_string(),
        };
        let value = self.value(&name);
        if matches!(rest, "[@]" | "[*]") {
            return Ok(match value {
                Value::Words(words) | Value::Text(words) if words.trim().is_empty() => {
                    NOTHING.into()
                }
                Value::Words(words) => format!("{WORDS}{words}"),
                // A list that the user gives is written as its words.
                Value::Text(text) if self.given.get(&name).is_some() => format!("{WORDS}{text}"),
                Value::Text(text) => quote(&text),
                Value::Gap(why) => self.leave(&name, why),
            });
        }
        if name.is_empty() {
            let first = inner.chars().next().unwrap_or(' ');
            if matches!(first, '@' | '*') {
                return Ok(NOTHING.into());
            }
            return Ok(self.beyond(line, inner));
        }
        let known = match &value {
            Value::Text(text) => Some(text.clone()),
            Value::Words(words) => shlex::split(words).and_then(|w| w.into_iter().next()),
            Value::Gap(_) => None,
        };
        let unset = matches!(value, Value::Gap(Gap::Unset));
        let operators = [":-", ":=", "-", "=", ":?", "?", ":+", "+"];
        let operator = operators.iter().find(|o| rest.starts_with(**o));
        match (rest, operator, value) {
            ("", _, Value::Gap(why)) => Ok(self.leave(&name, why)),
            ("", _, _) => Ok(quote(&known.unwrap_or_default())),
            (_, Some(operator), value) => {
                let word = &rest[operator.len()..];
                let has = known.filter(|k| !(operator.starts_with(':') && k.is_empty()));
                match (operator.trim_start_matches(':'), has) {
                    ("+", Some(_)) => self.expanded(line, word, depth + 1),
                    ("+", None) => Ok(String::new()),
                    (_, Some(value)) => Ok(quote(&value)),
                    ("-" | "=", None) if unset || matches!(value, Value::Text(_)) => {
                        let word = self.expanded(line, word, depth + 1)?;
                        let word = shlex::split(&word)
                            .filter(|_| double)
                            .map_or(word, |w| quote(&w.join(" ")));
                        if operator.ends_with('=') {
                            self.variables.insert(name, Value::Text(word.clone()));
                        }
                        Ok(word)
                    }
                    (_, None) => match value {
                        Value::Gap(why) => Ok(self.leave(&name, why)),
                        _ => Ok(self.leave(&name, Gap::Unset)),
                    },
                }
            }
            _ => Ok(self.beyond(line, inner)),
        }
    }

    fn beyond(&mut self, line: usize, inner: &str) -> String {
        let why = format!("line {line} has `${{{inner}}}`, which is more than is understood here");
        self.leave(inner, Gap::Beyond(why))
    }

    /// The value of a variable: the user's, or the script's.
    fn value(&self, name: &str) -> Value {
        if let Some(given) = self.given.get(name) {
            return Value::Text(given.to_string());
        }
        let own = self.variables.get(name).cloned();
        own.unwrap_or(Value::Gap(Gap::Unset))
    }
}

/// Stands for a list without words.
const NOTHING: &str = "\u{e0f2}";

/// Whether the last word of a text is an assignment, and all before it are.
fn assigns(text: &str) -> bool {
    let begun = !text.ends_with(char::is_whitespace) && !text.is_empty();
    begun && text.split_whitespace().all(|w| assignment(w).is_some())
}

/// Words so that they are split again as they are.
pub(super) fn joined(words: &[String]) -> String {
    let one = |w: &String| shlex::try_quote(w).map_or(String::new(), |q| q.into_owned());
    words.iter().map(one).collect::<Vec<_>>().join(" ")
}

/// A value inside of double quotes.
fn quoted(value: &str) -> String {
    let mut out = String::new();
    for c in value.chars() {
        if matches!(c, '"' | '\\' | '$' | '`') {
            out.push('\\');
        }
        out.push(c);
    }
    out
}

/// An expression whose names have dollars.
fn with_dollars(text: &str) -> String {
    let mut out = String::new();
    let mut before = ' ';
    for c in text.chars() {
        let begins = c.is_ascii_alphabetic() || c == '_';
        let in_word = before.is_ascii_alphanumeric() || matches!(before, '_' | '$' | '{');
        if begins && !in_word {
            out.push('$');
        }
        out.push(c);
        before = c;
    }
    out
}

/// The place of what closes the bracket at `at`.
fn closing(chars: &[char], at: usize, open: char, close: char) -> Option<usize> {
    let mut depth = 0usize;
    for (i, c) in chars.iter().enumerate().skip(at) {
        if *c == open {
            depth += 1;
        } else if *c == close {
            depth = depth.checked_sub(1)?;
            if depth == 0 {
                return Some(i);
            }
        }
    }
    None
}
