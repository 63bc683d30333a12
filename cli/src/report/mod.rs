//! Plans and what comes of them, in words and tables.
//!
//! * `account`: where the time of a step goes.
//! * `degrees`: a plan in the words of pins.
//! * `parallelism`: what each mesh axis does, in the field's terms, read off the strategies.
//! * `against`: one plan beside another.
//! * `collectives`: what a program communicates in one step.
//! * `plan`: a plan in words.
//! * `roofline`: what the instructions of a step take at least, kind by kind.
//! * `software`: a plan in the words of the software that it is made for.
//! * `strategies`: the strategy of every op.

pub mod account;
pub mod against;
pub mod collectives;
pub mod degrees;
pub mod parallelism;
pub mod place;
pub mod plan;
pub mod roofline;
pub mod software;
pub mod strategies;

use crate::failure::{Exit, Failure};
use comfy_table::{CellAlignment, ColumnConstraint, ContentArrangement, Table, Width, presets};
use serde::Serialize;
use std::borrow::Cow;
use std::os::fd::AsFd;
use std::sync::OnceLock;

/// Draws a table with a header; columns from `numbers_from` on are right-aligned. Where it would be
/// wider than [`width`], texts and heads of columns are broken between words. Numbers never are: if
/// their columns do not fit side by side, they are drawn in several tables, one below the other,
/// each with the columns before `numbers_from`.
pub fn table(header: &[&str], rows: Vec<Vec<String>>, numbers_from: usize) -> String {
    table_within(width(), header, &rows, numbers_from)
}

fn table_within(
    width: usize,
    header: &[&str],
    rows: &[Vec<String>],
    numbers_from: usize,
) -> String {
    let least = least_widths(width, header, rows, numbers_from);
    let parts = side_by_side(width, &least, numbers_from);
    let drawn = parts.iter().map(|columns| {
        let mut table = Table::new();
        let of = |row: &[String]| -> Vec<String> {
            let cells = columns
                .iter()
                .map(|&c| row.get(c).cloned().unwrap_or_default());
            cells.collect()
        };
        table
            .load_preset(presets::UTF8_BORDERS_ONLY)
            .set_content_arrangement(ContentArrangement::Dynamic)
            .set_width(u16::try_from(width).unwrap_or(u16::MAX))
            .set_header(columns.iter().map(|&c| header[c]));
        table.add_rows(rows.iter().map(|row| of(row)));
        for (column, &c) in table.column_iter_mut().zip(columns) {
            if c >= numbers_from {
                column.set_cell_alignment(CellAlignment::Right);
            }
            // With a blank on both sides.
            let least = u16::try_from(least[c] + 2).unwrap_or(u16::MAX);
            column.set_constraint(ColumnConstraint::LowerBoundary(Width::Fixed(least)));
        }
        table.to_string()
    });
    drawn.collect::<Vec<_>>().join("\n")
}

/// The fewest characters in which each column can be drawn: its longest word, or its longest number
/// with the unit. A word that leaves too little beside it is broken, as a long path.
fn least_widths(
    width: usize,
    header: &[&str],
    rows: &[Vec<String>],
    numbers_from: usize,
) -> Vec<usize> {
    let longest = |parts: &mut dyn Iterator<Item = &str>| parts.map(|p| p.chars().count()).max();
    // A number with its unit; names of meshes begin with digits, too, and have more words.
    let is_number = |cell: &str| {
        let mut chars = cell.chars();
        let first = chars.find(|c| !matches!(c, '+' | '-' | '<' | '~'));
        first.is_some_and(|c| c.is_ascii_digit()) && cell.split_whitespace().count() <= 2
    };
    let word = |text: &str| longest(&mut text.split_whitespace()).unwrap_or(0);
    let of_column = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        let of_cell = |cell: &String| match is_number(cell) {
            true => longest(&mut cell.lines()).unwrap_or(0),
            false => word(cell),
        };
        cells
            .map(of_cell)
            .max()
            .unwrap_or(0)
            .max(word(header[column]))
    };
    let mut least: Vec<usize> = (0..header.len()).map(of_column).collect();
    // Texts give way to each other, the longest words first, until two thirds are enough for them.
    let texts = numbers_from.min(least.len());
    let most = match texts == least.len() {
        true => width,
        false => width * 2 / 3,
    };
    while drawn_width(&least[..texts]) > most {
        let Some(longest) = least[..texts].iter_mut().max().filter(|w| **w > SHORT) else {
            break;
        };
        *longest -= 1;
    }
    least
}

/// Characters of a word that is not broken, whatever the width.
const SHORT: usize = 8;

/// The characters of a line of a table: columns with a blank on both sides and one between them,
/// and the frame.
fn drawn_width(columns: &[usize]) -> usize {
    columns.iter().map(|w| w + 3).sum::<usize>() + 1
}

/// The columns of the tables that are drawn one below the other: those of texts in each, and as
/// many of numbers as fit.
fn side_by_side(width: usize, least: &[usize], numbers_from: usize) -> Vec<Vec<usize>> {
    let texts = 0..numbers_from.min(least.len());
    let mut parts = vec![texts.clone().collect::<Vec<usize>>()];
    for column in texts.end..least.len() {
        let Some(part) = parts.last_mut() else { break };
        let with: Vec<usize> = part.iter().chain([&column]).map(|&c| least[c]).collect();
        match drawn_width(&with) > width && part.len() > texts.len() {
            true => parts.push(texts.clone().chain([column]).collect()),
            false => part.push(column),
        }
    }
    parts
}

/// The widest line of prose and of tables, in columns.
const WIDTH: usize = 100;
/// The narrowest terminal that output is fitted to; in one below lines break where they may.
const NARROWEST: usize = 40;

/// The columns that standard output has: those of the terminal, but no more than [`WIDTH`].
pub fn width() -> usize {
    static OF_OUTPUT: OnceLock<usize> = OnceLock::new();
    *OF_OUTPUT.get_or_init(|| width_of(std::io::stdout()))
}

/// The same of standard error, which may be a terminal where standard output is a file.
pub fn error_width() -> usize {
    static OF_ERRORS: OnceLock<usize> = OnceLock::new();
    *OF_ERRORS.get_or_init(|| width_of(std::io::stderr()))
}

fn width_of(stream: impl AsFd) -> usize {
    let size = rustix::termios::tcgetwinsize(stream);
    let columns = size.map_or(0, |size| usize::from(size.ws_col));
    match columns {
        0 => WIDTH,
        columns => columns.clamp(NARROWEST, WIDTH),
    }
}

/// Wraps prose to lines of at most [`width`] columns, broken between words; continued lines are
/// indented by two more columns. Lines of tables stay as they are.
pub fn wrapped(text: &str) -> String {
    wrapped_within(width(), text)
}

/// The same for lines of at most so many columns.
pub fn wrapped_within(most: usize, text: &str) -> String {
    let mut out = String::new();
    for line in text.lines() {
        if line.trim().is_empty() || line.starts_with(['│', '┌', '╞', '└']) {
            out += line.trim_end();
            out.push('\n');
            continue;
        }
        let margin = line.len() - line.trim_start().len();
        out.extend(std::iter::repeat_n(' ', margin));
        let mut column = margin;
        for (i, word) in line.trim_start().split(' ').enumerate() {
            let width = word.chars().count();
            if i > 0 && column + 1 + width > most {
                out.push('\n');
                out.extend(std::iter::repeat_n(' ', margin + 2));
                column = margin + 2;
            } else if i > 0 {
                out.push(' ');
                column += 1;
            }
            out.push_str(word);
            column += width;
        }
        out.push('\n');
    }
    out.truncate(out.trim_end().len());
    out
}

/// Prints a value as JSON, in which all that a terminal would obey is escaped.
pub fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    let text = crate::document::to_json(value)?;
    let is_harmless = |c: char| c == '\n' || !is_obeyed(c);
    write(&match text.trim_end() {
        text if text.chars().all(is_harmless) => text.to_string(),
        text => text
            .chars()
            .map(|c| match is_harmless(c) {
                true => c.to_string(),
                false => format!("\\u{:04x}", u32::from(c)),
            })
            .collect(),
    })
}

/// Whether a terminal obeys a character in place of showing it: control characters, and those that
/// turn the direction of text.
fn is_obeyed(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Shows a character of a line of some document: a tab as a blank, what a terminal would obey as
/// its number.
pub fn visible_char(c: char) -> String {
    match c {
        '\t' => " ".into(),
        c if is_obeyed(c) => c.escape_default().to_string(),
        c => c.to_string(),
    }
}

/// Shows text that may hold words of a document, a file's name or a variable: lines as they are,
/// and what a terminal would obey as its number.
pub fn visible(text: &str) -> Cow<'_, str> {
    let is_shown = |c: char| matches!(c, '\n' | '\t') || !is_obeyed(c);
    match text.chars().all(is_shown) {
        true => Cow::Borrowed(text),
        false => {
            let of = |c| match is_shown(c) {
                true => String::from(c),
                false => visible_char(c),
            };
            Cow::Owned(text.chars().map(of).collect())
        }
    }
}

/// Prints sentences and tables to standard output, [`visible`] and [`wrapped`]; a reader that has
/// gone away (`| head`) is no error.
pub fn out(text: &str) -> Result<(), Failure> {
    let shown = visible(text);
    let blank = shown.len() - shown.trim_end_matches('\n').len();
    write(&(wrapped(&shown) + &"\n".repeat(blank)))
}

/// Prints a document as it is, but for what a terminal would obey: programs, configurations,
/// schemas.
pub fn document(text: &str) -> Result<(), Failure> {
    write(&visible(text))
}

fn write(text: &str) -> Result<(), Failure> {
    use std::io::Write;
    match writeln!(std::io::stdout().lock(), "{text}") {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(Failure::new(
            Exit::BadInput,
            format!("cannot write to standard output: {e}"),
        )),
        _ => Ok(()),
    }
}

/// Shows a share in percent; one that no utilisation or gap is like, with an exponent.
pub fn percent(share: f64) -> String {
    match share.abs() < 1e6 {
        true => format!("{:.1}%", share * 100.0),
        false => format!("{:.1e}%", share * 100.0),
    }
}

/// Shows a count with a prefix: `12.3 k`.
pub fn count(x: f64) -> String {
    match x.abs() {
        a if a >= 1e18 => format!("{x:.2e} "),
        a if a >= 1e15 => format!("{:.2} P", x / 1e15),
        a if a >= 1e12 => format!("{:.2} T", x / 1e12),
        a if a >= 1e9 => format!("{:.2} G", x / 1e9),
        a if a >= 1e6 => format!("{:.2} M", x / 1e6),
        a if a >= 1e4 => format!("{:.2} k", x / 1e3),
        _ => format!("{x:.1}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn widest(text: &str) -> usize {
        text.lines().map(|l| l.chars().count()).max().unwrap_or(0)
    }

    #[test]
    fn tables_are_no_wider_than_the_terminal() {
        let header = [
            "stage",
            "forward\na microbatch",
            "backward\na microbatch",
            "compute\na step",
            "collectives\na step",
            "transfers\na step",
            "bound by",
        ];
        let row = |name: &str| {
            let mut row = vec![name.to_string()];
            row.extend(vec!["123.456 ms".to_string(); 5]);
            row.push("all-to-alls over infiniband".into());
            row
        };
        let rows = vec![row("0+..(8)"), row("1 to 7")];
        for width in [60, 80, 100] {
            let text = table_within(width, &header, &rows, 1);
            assert!(widest(&text) <= width, "{}\n{text}", widest(&text));
            // No number is broken, and none is lost.
            assert_eq!(text.matches("123.456 ms").count(), 10, "{text}");
        }
        let wide = table_within(100, &header, &rows, 1);
        assert_eq!(
            wide.matches("stage").count(),
            1,
            "one table is enough\n{wide}"
        );
    }

    #[test]
    fn a_word_longer_than_the_terminal_is_broken() {
        let path = "a/very/long/path/".repeat(6);
        let rows = vec![vec!["1.0 s".to_string(), "data=1".into(), path]];
        let text = table_within(80, &["step", "degrees", "file"], &rows, 3);
        assert!(widest(&text) <= 80, "{text}");
        assert!(text.contains("data=1") && text.contains("1.0 s"), "{text}");
    }

    #[test]
    fn prose_keeps_to_the_width() {
        let words = "word ".repeat(40);
        for margin in ["", "  ", "      "] {
            let text = wrapped_within(60, &format!("{margin}{words}"));
            assert!(widest(&text) <= 60, "{text}");
            let indents = text.lines().map(|l| l.len() - l.trim_start().len());
            let mut expected = vec![margin.len() + 2; text.lines().count()];
            expected[0] = margin.len();
            assert_eq!(indents.collect::<Vec<_>>(), expected, "{text}");
            // What is wrapped stays as it is, whoever wraps it again.
            assert_eq!(wrapped_within(60, &text), text);
        }
    }
}
