//! The tokens of the text form. Which token may follow depends on the place (a path may hold
//! `:` and `-`), so the parser asks for the token that it expects.

use super::{HOLE, ParseError};
use crate::{DType, Dim};
use serde_json::{Number, Value};
use std::ops::Range;
use std::str::FromStr;

/// A position in the text; always at a character boundary.
pub(super) struct Scanner<'a> {
    text: &'a str,
    pos: usize,
    /// End of the last token; white space may lie between it and `pos`.
    end: usize,
}

impl<'a> Scanner<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Scanner {
            text,
            pos: 0,
            end: 0,
        }
    }
    fn rest(&self) -> &'a str {
        &self.text[self.pos..]
    }
    /// End of the last token.
    pub(super) fn token_end(&self) -> usize {
        self.end
    }
    fn advance(&mut self, len: usize) {
        self.pos += len;
        self.end = self.pos;
    }
    /// Start of the next token.
    pub(super) fn token_start(&mut self) -> usize {
        self.skip();
        self.pos
    }
    /// Skips white space and comments.
    fn skip(&mut self) {
        loop {
            let rest = self.rest();
            let trimmed = rest.trim_start_matches([' ', '\t', '\r', '\n']);
            self.pos += rest.len() - trimmed.len();
            if !trimmed.starts_with("//") {
                return;
            }
            self.pos += trimmed.find('\n').unwrap_or(trimmed.len());
        }
    }
    /// First character of the next token.
    pub(super) fn peek(&mut self) -> Option<char> {
        self.skip();
        self.rest().chars().next()
    }
    /// Next character if no white space stands before it.
    pub(super) fn touching(&self) -> Option<char> {
        self.rest().chars().next()
    }
    fn take_while(&mut self, mut holds: impl FnMut(char) -> bool) -> &'a str {
        let rest = self.rest();
        let len = rest.find(|c| !holds(c)).unwrap_or(rest.len());
        self.advance(len);
        &rest[..len]
    }

    /// Takes this punctuation if it comes next.
    pub(super) fn eat(&mut self, token: &str) -> bool {
        self.skip();
        let found = self.rest().starts_with(token);
        if found {
            self.advance(token.len());
        }
        found
    }
    /// Takes this punctuation.
    pub(super) fn expect(&mut self, token: &str) -> Result<(), ParseError> {
        if self.eat(token) {
            Ok(())
        } else {
            Err(self.expected(&format!("`{token}`")))
        }
    }
    /// The next word, which stays.
    pub(super) fn peek_word(&mut self) -> &'a str {
        self.skip();
        let rest = self.rest();
        &rest[..rest.find(|c| !is_word(c)).unwrap_or(rest.len())]
    }
    /// Takes this word if it comes next.
    pub(super) fn eat_word(&mut self, word: &str) -> bool {
        let found = self.peek_word() == word;
        if found {
            self.advance(word.len());
        }
        found
    }
    /// Takes this word.
    pub(super) fn expect_word(&mut self, word: &str) -> Result<(), ParseError> {
        if self.eat_word(word) {
            Ok(())
        } else {
            Err(self.expected(&format!("`{word}`")))
        }
    }
    /// A word; `what` names it in the error.
    pub(super) fn word(&mut self, what: &str) -> Result<&'a str, ParseError> {
        let word = self.peek_word();
        if word.is_empty() || word.starts_with(|c: char| c.is_ascii_digit()) {
            return Err(self.expected(what));
        }
        self.advance(word.len());
        Ok(word)
    }
    /// A number without sign.
    pub(super) fn number<T: FromStr>(&mut self, what: &str) -> Result<T, ParseError> {
        let start = self.token_start();
        let digits = self.take_while(|c| c.is_ascii_digit());
        if digits.is_empty() {
            return Err(self.expected(what));
        }
        digits
            .parse()
            .map_err(|_| self.error(start..self.pos, "the number is too large".into()))
    }
    /// A JSON number.
    pub(super) fn json_number(&mut self) -> Result<Value, ParseError> {
        let start = self.token_start();
        let token = self.take_while(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
        let number: Result<Number, _> = serde_json::from_str(token);
        number
            .map(Value::Number)
            .map_err(|_| self.error(start..self.pos, format!("`{token}` is not a number")))
    }
    /// A dim: `B` or a length.
    pub(super) fn dim(&mut self) -> Result<Dim, ParseError> {
        if self.eat_word("B") {
            return Ok(Dim::Batch);
        }
        Ok(Dim::Fixed(self.number("a dim: `B` or a length")?))
    }
    /// An element type.
    pub(super) fn dtype(&mut self) -> Result<DType, ParseError> {
        self.choice("an element type", &DType::ALL.map(|d| (d, d.name())))
    }
    /// One of the words that are known; `what` names it in the error.
    pub(super) fn choice<T: Copy>(
        &mut self,
        what: &str,
        known: &[(T, &str)],
    ) -> Result<T, ParseError> {
        let start = self.token_start();
        let word = self.word(what)?;
        match known.iter().find(|(_, name)| *name == word) {
            Some((value, _)) => Ok(*value),
            None => {
                let names: Vec<&str> = known.iter().map(|(_, name)| *name).collect();
                let mut error = self.error(start..self.end, format!("`{word}` is not {what}"));
                error.help = Some(format!("{what} is one of {}", names.join(", ")));
                Err(error)
            }
        }
    }
    /// A string in quotes with the escapes of JSON.
    pub(super) fn string(&mut self) -> Result<String, ParseError> {
        let start = self.token_start();
        if !self.eat("\"") {
            return Err(self.expected("a string in quotes"));
        }
        let mut escaped = false;
        self.take_while(|c| {
            let inside = escaped || (c != '"' && c != '\n');
            escaped = !escaped && c == '\\';
            inside
        });
        if self.touching() != Some('"') {
            return Err(self.error(start..self.pos, "the string has no end".into()));
        }
        self.advance(1);
        serde_json::from_str(&self.text[start..self.pos])
            .map_err(|e| self.error(start..self.pos, format!("not a string: {e}")))
    }
    /// An op path; with holes inside a `repeat`.
    pub(super) fn path(&mut self, holes: bool) -> Result<&'a str, ParseError> {
        let start = self.token_start();
        loop {
            self.take_while(|c| c.is_ascii_alphanumeric() || "._:-".contains(c));
            if !(holes && self.rest().starts_with(HOLE)) {
                break;
            }
            self.advance(HOLE.len());
        }
        match start == self.pos {
            true => Err(self.expected("the path of the op")),
            false => Ok(&self.text[start..self.pos]),
        }
    }
    /// Items separated by commas up to `close`, which is taken.
    pub(super) fn list<T>(
        &mut self,
        close: &str,
        mut item: impl FnMut(&mut Self) -> Result<T, ParseError>,
    ) -> Result<Vec<T>, ParseError> {
        let mut items = Vec::new();
        if self.eat(close) {
            return Ok(items);
        }
        loop {
            items.push(item(self)?);
            if self.eat(close) {
                return Ok(items);
            }
            if !self.eat(",") {
                return Err(self.expected(&format!("`,` or `{close}`")));
            }
        }
    }
    /// Fails unless only white space is left.
    pub(super) fn end(&mut self) -> Result<(), ParseError> {
        match self.peek() {
            None => Ok(()),
            Some(_) => Err(self.expected("the end of the text")),
        }
    }

    /// An error at a part of the text.
    pub(super) fn error(&self, span: Range<usize>, message: String) -> ParseError {
        let before = &self.text[..span.start];
        let line_start = before.rfind('\n').map_or(0, |i| i + 1);
        ParseError {
            line: 1 + before.matches('\n').count(),
            column: 1 + before[line_start..].chars().count(),
            start: span.start,
            len: span.len(),
            message,
            help: None,
        }
    }
    /// An error at the next token.
    pub(super) fn error_here(&mut self, message: String) -> ParseError {
        let start = self.token_start();
        let mut rest = self.rest().chars();
        let word = self
            .rest()
            .find(|c| !is_word(c))
            .unwrap_or(self.rest().len());
        let end = start + word.max(rest.next().map_or(0, char::len_utf8));
        self.error(start..end, message)
    }
    pub(super) fn expected(&mut self, what: &str) -> ParseError {
        let mut error = self.error_here(String::new());
        let found = &self.text[error.start..error.start + error.len];
        error.message = match found.is_empty() {
            true => format!("expected {what}, found the end of the text"),
            false => format!("expected {what}, found `{found}`"),
        };
        error
    }
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}
