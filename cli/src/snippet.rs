//! The lines around the place of an error, as they are shown: no wider than a report, and without
//! characters that a terminal would obey.

use crate::report::{visible, visible_char};
use miette::{MietteError, MietteSpanContents, SourceCode, SourceSpan, SpanContents};
use std::ops::Range;

/// Stands for what was cut off a line.
const CUT: char = '…';
/// Columns of a line's number and frame, beside its text.
const FRAME: usize = 10;

/// A line of a file with its neighbours, cut around a place.
#[derive(Debug)]
pub struct Snippet {
    file: String,
    text: String,
    /// Lines of the file before the first one shown.
    lines_before: usize,
    /// Bytes of the line before the first one shown, less what stands in their place.
    cut: isize,
    /// The place, in the text.
    span: Range<usize>,
}

impl Snippet {
    /// Cuts what is shown of `text` to `width` columns: the line of the bytes `place`, which are moved
    /// to characters, and the lines beside it.
    pub fn of(file: &str, text: &str, place: Range<usize>, width: usize) -> Snippet {
        let width = width.saturating_sub(FRAME).max(FRAME);
        let start = floor_char(text, place.start.min(text.len()));
        let line_start = text[..start].rfind('\n').map_or(0, |i| i + 1);
        let rest = &text[line_start..];
        let line = rest.split('\n').next().unwrap_or_default();
        let end = floor_char(text, place.end.min(line_start + line.len())).max(start);
        let before = text[..line_start]
            .strip_suffix('\n')
            .map(|b| b.rsplit('\n').next().unwrap_or_default());
        let after = rest
            .split_once('\n')
            .map(|(_, a)| a.split('\n').next().unwrap_or_default());
        let mut shown = String::new();
        if let Some(before) = before {
            shown += &window(before, 0, width).0;
            shown.push('\n');
        }
        let at = start - line_start;
        let (own, dropped) = window(line, at, width);
        let of_line = shown.len();
        let map = |at: usize| of_line + shown_len(&line[dropped.min(at)..at], dropped > 0);
        let span = map(at)..map(end - line_start).min(of_line + own.len());
        let span = span.start.min(of_line + own.len())..span.end.max(span.start);
        let cut = (at as isize) - (span.start as isize - of_line as isize);
        shown += &own;
        if let Some(after) = after.filter(|a| !a.is_empty()) {
            shown.push('\n');
            shown += &window(after, 0, width).0;
        }
        let all_before = text[..line_start].matches('\n').count();
        Snippet {
            file: visible(file).into_owned(),
            text: shown,
            lines_before: all_before - usize::from(before.is_some()),
            cut,
            span,
        }
    }

    /// The place in what is shown.
    pub fn span(&self) -> Range<usize> {
        self.span.clone()
    }
}

/// A line as it is shown, cut to `width` columns around the byte `at`, and how many of its bytes were
/// dropped before.
fn window(line: &str, at: usize, width: usize) -> (String, usize) {
    let n = line.chars().map(columns).sum::<usize>();
    if n <= width {
        return (line.chars().map(visible_char).collect(), 0);
    }
    // The place comes to stand in the middle, with what is right of it, unless the line begins there.
    let own: usize = line[..at].chars().map(columns).sum();
    let mut dropped = 0;
    if own > width / 2 {
        let mut too_many = own - width / 2;
        for c in line.chars() {
            if too_many == 0 {
                break;
            }
            too_many = too_many.saturating_sub(columns(c));
            dropped += c.len_utf8();
        }
    }
    let mut shown = String::new();
    if dropped > 0 {
        shown.push(CUT);
    }
    let mut left = width.saturating_sub(2);
    for c in line[dropped..].chars() {
        match left.checked_sub(columns(c)) {
            Some(rest) => left = rest,
            None => {
                shown.push(CUT);
                break;
            }
        }
        shown += &visible_char(c);
    }
    (shown, dropped)
}

/// Bytes that a part of a line takes as it is shown; `is_cut` says whether the sign of a cut is before.
fn shown_len(part: &str, is_cut: bool) -> usize {
    let sign = if is_cut { CUT.len_utf8() } else { 0 };
    sign + part.chars().map(|c| visible_char(c).len()).sum::<usize>()
}

/// Columns of a character as it is shown.
fn columns(c: char) -> usize {
    visible_char(c).chars().count()
}

fn floor_char(text: &str, mut at: usize) -> usize {
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

impl SourceCode for Snippet {
    fn read_span<'a>(
        &'a self,
        span: &SourceSpan,
        before: usize,
        after: usize,
    ) -> Result<Box<dyn SpanContents<'a> + 'a>, MietteError> {
        let inner = self.text.read_span(span, before, after)?;
        // With lines before it, the text begins with a line.
        let column = match before {
            0 => inner.column().saturating_add_signed(self.cut),
            _ => inner.column(),
        };
        Ok(Box::new(MietteSpanContents::new_named(
            self.file.clone(),
            inner.data(),
            *inner.span(),
            self.lines_before + inner.line(),
            column,
            inner.line_count(),
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str, place: Range<usize>) -> (String, String) {
        let s = Snippet::of("f", text, place, 50);
        (s.text[s.span()].to_string(), s.text)
    }

    #[test]
    fn short_lines_are_shown_as_they_are() {
        let text = "one\ntwo three\nfour\nfive";
        let (place, all) = shown(text, 8..13);
        assert_eq!(
            (place.as_str(), all.as_str()),
            ("three", "one\ntwo three\nfour")
        );
        let s = Snippet::of("f", text, 8..13, 50);
        let contents = s.read_span(&s.span().into(), 0, 0).unwrap();
        assert_eq!((contents.line(), contents.column()), (1, 4));
    }

    #[test]
    fn long_lines_are_cut_around_the_place() {
        let long = format!("{}WRONG{}", "a".repeat(300), "b".repeat(300));
        let text = format!("{}\n{long}\n{}", "x".repeat(90), "y".repeat(90));
        let (place, all) = shown(&text, 391..396);
        assert_eq!(place, "WRONG");
        let lines: Vec<&str> = all.lines().collect();
        assert!(lines.iter().all(|l| l.chars().count() <= 40), "{all}");
        assert!(
            lines[1].starts_with("…a") && lines[1].ends_with("b…"),
            "{all}"
        );
        assert!(
            lines[0].ends_with("x…") && lines[2].ends_with("y…"),
            "{all}"
        );
        // The header has the column in the file.
        let s = Snippet::of("f", &text, 391..396, 50);
        let contents = s.read_span(&s.span().into(), 0, 0).unwrap();
        assert_eq!((contents.line(), contents.column()), (1, 300));
    }

    #[test]
    fn a_terminal_obeys_nothing_of_a_file() {
        let (place, all) = shown("a \u{1b}[31m b\tc\r", 8..9);
        assert_eq!(place, "b");
        assert_eq!(all, "a \\u{1b}[31m b c\\r");
    }

    #[test]
    fn any_place_of_any_text_is_shown() {
        let text = "ä€\u{7f}\n\n\u{202e}long lines of many words: €€€€€€€€€€€€€€€€€€€€€€€€€€€€€€€€€€\u{0}\n";
        for start in 0..text.len() + 3 {
            for len in [0, 1, 5, 1000] {
                let (_, all) = shown(text, start..start.saturating_add(len));
                assert!(!all.contains(['\u{0}', '\u{7f}', '\u{202e}']), "{all:?}");
            }
        }
        shown("", 0..0);
    }
}
