//! Rows of lines that differ in numbers only are written once.
//!
//! ```text
//! repeat 3 {
//!   i{12+9} rms_norm {eps: 1e-5} buf{30+2}, buf4 -> buf{31+14} @ h.{1+1}.norm
//! }
//! ```
//!
//! A `repeat` stands for so many copies of its lines. `{30+2}` is 30 in the first copy and grows
//! by 2 from copy to copy, `{9-3}` falls by 3, and other numbers stay.
//!
//! The fold knows lines, words and numbers, and nothing of what they say, so a new kind of line
//! needs nothing here. It is exact: [`expand`] gives back the lines that [`fold`] was given.
//! Lines with a `{` before a digit are never folded, so that no name can look like such a number.

use super::ParseError;
use super::scan::Scanner;
use rustc_hash::FxHashMap;
use std::ops::Range;

/// Most bytes of lines that a text stands for, repeats expanded. Programs of models with hundreds
/// of layers have a tenth of it.
const MAX_EXPANDED_BYTES: usize = 1 << 26;
/// Bytes of a line besides its text.
const LINE_BYTES: usize = 16;
/// Longest body that is looked for; layers have some hundred lines.
const MAX_BODY: usize = 4096;
/// Lines that may be compared per line, on average; a row of layers takes some tens.
const WORK_PER_LINE: usize = 512;
/// Numbers with more digits are words.
const MAX_DIGITS: usize = 18;
/// Growing numbers that are as much to read as a line.
const NUMBERS_PER_LINE: usize = 4;

/// A line as words with numbers between them.
struct Line<'a> {
    text: &'a str,
    numbers: Vec<(Range<usize>, i64)>,
    /// Equal for lines with equal words; none for those that are not folded.
    words: Option<usize>,
}

/// Appends `lines`, each after `indent`, with repeats.
pub(super) fn fold(lines: &[String], indent: &str, out: &mut String) {
    let mut known = FxHashMap::default();
    let lines: Vec<Line> = lines.iter().map(|l| Line::new(l, &mut known)).collect();
    let mut work = lines.len().saturating_mul(WORK_PER_LINE);
    let mut rest = &lines[..];
    while !rest.is_empty() {
        let (body, n) = best(rest, &mut work);
        match n {
            1 => out.extend([indent, rest[0].text, "\n"]),
            _ => print(rest, body, n, indent, out),
        }
        rest = &rest[body * n..];
    }
}

impl<'a> Line<'a> {
    fn new(text: &'a str, known: &mut FxHashMap<String, usize>) -> Self {
        let numbers: Vec<_> = numbers(text).collect();
        let (mut words, mut at) = (String::with_capacity(text.len()), 0);
        for (span, _) in &numbers {
            // No line has a line break, so equal words have their numbers at equal places.
            words.extend([&text[at..span.start], "\n"]);
            at = span.end;
        }
        words.push_str(&text[at..]);
        let fresh = known.len();
        let words = *known.entry(words).or_insert(fresh);
        Line {
            text,
            numbers,
            words: holes(text).next().is_none().then_some(words),
        }
    }

    fn same_words(&self, other: &Line) -> bool {
        self.words.is_some() && self.words == other.words
    }
}

/// Plain numbers of a line: no leading zeros, not too long.
fn numbers(text: &str) -> impl Iterator<Item = (Range<usize>, i64)> {
    let digit = |c: char| c.is_ascii_digit();
    let mut at = 0;
    std::iter::from_fn(move || {
        loop {
            let start = at + text[at..].find(digit)?;
            let digits = text[start..].find(|c| !digit(c));
            at = digits.map_or(text.len(), |len| start + len);
            let plain =
                at - start <= MAX_DIGITS && (at - start == 1 || text.as_bytes()[start] != b'0');
            if let (true, Ok(n)) = (plain, text[start..at].parse()) {
                return Some((start..at, n));
            }
        }
    })
}

/// Places where a `{` stands before a digit.
fn holes(text: &str) -> impl Iterator<Item = usize> {
    let starts = text.match_indices('{').map(|(i, _)| i);
    starts.filter(|i| text.as_bytes().get(i + 1).is_some_and(u8::is_ascii_digit))
}

/// The repeat at the start of `lines` that saves most, as the length of its body and its number of
/// copies; a line on its own where none saves anything.
fn best(lines: &[Line], work: &mut usize) -> (usize, usize) {
    let (mut best, mut most) = ((1, 1), 0);
    for body in 1..=MAX_BODY.min(lines.len() / 2) {
        if *work == 0 || lines.len() - body <= most + 2 {
            break;
        }
        if !lines[0].same_words(&lines[body]) {
            continue;
        }
        let n = copies(lines, body, work);
        let saved = (n - 1) * body;
        if saved > most + 2 {
            let pairs = lines[..body].iter().zip(&lines[body..]);
            let grown = pairs.flat_map(|(a, b)| a.numbers.iter().zip(&b.numbers));
            let grown = grown.filter(|(a, b)| a.1 != b.1).count();
            let gain = saved.saturating_sub(2 + grown / NUMBERS_PER_LINE);
            if gain > most {
                (best, most) = ((body, n), gain);
            }
        }
    }
    best
}

/// Copies of the first `body` lines, the first one included, that stand one after the other.
fn copies(lines: &[Line], body: usize, work: &mut usize) -> usize {
    let mut n = 1;
    for copy in lines.chunks_exact(body).skip(1) {
        for (i, line) in copy.iter().enumerate() {
            if *work == 0 {
                return n;
            }
            *work -= 1;
            let last = &lines[(n - 1) * body + i];
            let before = &lines[n.saturating_sub(2) * body + i];
            let goes_on = || {
                let mut three = before.numbers.iter().zip(&last.numbers).zip(&line.numbers);
                three.all(|((a, b), c)| c.1 - b.1 == b.1 - a.1)
            };
            if !line.same_words(last) || (n > 1 && !goes_on()) {
                return n;
            }
        }
        n += 1;
    }
    n
}

/// Prints `n` copies of the first `body` lines.
fn print(lines: &[Line], body: usize, n: usize, indent: &str, out: &mut String) {
    out.push_str(&format!("{indent}repeat {n} {{\n"));
    for (line, next) in lines[..body].iter().zip(&lines[body..]) {
        out.extend([indent, "  "]);
        let mut at = 0;
        for ((span, number), (_, second)) in line.numbers.iter().zip(&next.numbers) {
            if second != number {
                let grown = format!("{{{number}{:+}}}", second - number);
                out.extend([&line.text[at..span.start], &grown]);
                at = span.end;
            }
        }
        out.extend([&line.text[at..], "\n"]);
    }
    out.extend([indent, "}\n"]);
}

/// A text without repeats, and where its lines come from.
pub(super) struct Expanded<'a> {
    source: &'a str,
    /// The text.
    pub(super) text: String,
    /// Per line of `text`: where it starts, the place of its line in the source, and its copy.
    lines: Vec<(usize, Range<usize>, Option<u64>)>,
}

/// A piece of a line in a repeat's body: text, and then a number that grows.
type Piece<'a> = (&'a str, Option<(i64, i64)>);

/// Writes the copies of all repeats out.
pub(super) fn expand(source: &str) -> Result<Expanded<'_>, ParseError> {
    let mut e = Expanded {
        source,
        text: String::new(),
        lines: vec![],
    };
    let mut start = 0;
    let mut lines = source.split_inclusive('\n').map(|line| {
        start += line.len();
        start - line.len()..start
    });
    while let Some(span) = lines.next() {
        let mut s = Scanner::new(&source[span.clone()]);
        if !s.eat_word("repeat") {
            e.push(&source[span.clone()], span, None)?;
            continue;
        }
        let n = s.number("the number of copies");
        let n: u64 = n
            .and_then(|n| s.expect("{").and_then(|()| s.end()).map(|()| n))
            .map_err(|error| e.moved(error, span.start))?;
        let mut body: Vec<(Vec<Piece>, Range<usize>)> = vec![];
        loop {
            let Some(line) = lines.next() else {
                return Err(e.error(span, "the `repeat` has no end: `}` on a line alone".into()));
            };
            let mut s = Scanner::new(&source[line.clone()]);
            if s.eat("}") && s.peek().is_none() {
                break;
            }
            if s.peek_word() == "repeat" {
                return Err(e.error(line, "a `repeat` stands inside a `repeat`".into()));
            }
            body.push((e.pieces(line.clone())?, line));
        }
        let copies = if body.is_empty() { 0..0 } else { 0..n };
        for k in copies {
            for (pieces, line) in &body {
                e.copy(pieces, line.clone(), k)?;
            }
        }
    }
    Ok(e)
}

impl<'a> Expanded<'a> {
    fn pieces(&self, span: Range<usize>) -> Result<Vec<Piece<'a>>, ParseError> {
        let line = &self.source[span.clone()];
        let (mut pieces, mut at): (Vec<Piece>, usize) = (vec![], 0);
        for open in holes(line) {
            let inside = line[open + 1..].split('}').next().unwrap_or_default();
            let (first, stride) = inside.split_at(inside.find(['+', '-']).unwrap_or(0));
            let (Ok(first), Ok(stride)) = (first.parse(), stride.parse()) else {
                let place = span.start + open..span.start + open + 1 + inside.len();
                let what = "expected a number that grows, as in `{3+2}`";
                return Err(self.error(place, what.into()));
            };
            pieces.push((&line[at..open], Some((first, stride))));
            at = (open + inside.len() + 2).min(line.len());
        }
        pieces.push((&line[at..], None));
        Ok(pieces)
    }

    fn copy(&mut self, pieces: &[Piece], span: Range<usize>, k: u64) -> Result<(), ParseError> {
        let mut line = String::new();
        for (text, number) in pieces {
            line.push_str(text);
            let Some((first, stride)) = number else {
                continue;
            };
            let value = i128::from(*first) + i128::from(*stride) * i128::from(k);
            if value < 0 {
                let what = format!("copy {k}: {first}{stride:+} for each copy is no number");
                return Err(self.error(span, what));
            }
            line.push_str(&value.to_string());
        }
        self.push(&line, span, Some(k))
    }

    fn push(
        &mut self,
        line: &str,
        span: Range<usize>,
        copy: Option<u64>,
    ) -> Result<(), ParseError> {
        let start = self.text.len();
        let bytes = start + line.len() + (self.lines.len() + 1) * LINE_BYTES;
        if bytes > MAX_EXPANDED_BYTES.max(self.source.len()) {
            let what = format!("the text stands for more than {MAX_EXPANDED_BYTES} bytes");
            return Err(self.error(span, what));
        }
        self.lines.push((start, span, copy));
        self.text.push_str(line);
        Ok(())
    }

    fn error(&self, span: Range<usize>, message: String) -> ParseError {
        let text = &self.source[span.clone()];
        let start = span.start + text.len() - text.trim_start().len();
        let end = start + text.trim().len();
        Scanner::new(self.source).error(start..end, message)
    }

    /// An error in a text that starts at `from` of the source.
    fn moved(&self, error: ParseError, from: usize) -> ParseError {
        let start = (from + error.start).min(self.source.len());
        let end = (start + error.len).min(self.source.len());
        let moved = Scanner::new(self.source).error(start..end, error.message);
        ParseError {
            help: error.help,
            ..moved
        }
    }

    /// An error in the expanded text, at its place in the source: in a repeat, the whole line.
    pub(super) fn at_source(&self, mut error: ParseError) -> ParseError {
        let line = self.lines.partition_point(|l| l.0 <= error.start);
        match line.checked_sub(1).map(|l| &self.lines[l]) {
            None => error,
            Some((start, span, None)) => {
                error.start -= start;
                self.moved(error, span.start)
            }
            Some((_, span, Some(k))) => {
                let what = format!("{} in copy {k} of the repeat", error.message);
                let moved = self.error(span.clone(), what);
                ParseError {
                    help: error.help,
                    ..moved
                }
            }
        }
    }
}
