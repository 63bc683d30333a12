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
pub mod plan;
pub mod roofline;
pub mod software;
pub mod strategies;

use crate::document;
use crate::failure::{Exit, Failure};
use comfy_table::{CellAlignment, ColumnConstraint, ContentArrangement, Table, Width, presets};
use serde::Serialize;

/// Draws a table with a header; columns from `numbers_from` on are right-aligned. Where it would be
/// wider than [`WIDTH`], texts and heads of columns are broken between words; numbers never are.
pub fn table(header: &[&str], rows: Vec<Vec<String>>, numbers_from: usize) -> String {
    let longest_word = |text: &str| text.split_whitespace().map(|w| w.chars().count()).max();
    let least = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        let of_cell = |cell: &String| match column < numbers_from {
            true => longest_word(cell).unwrap_or(0),
            false => cell.lines().map(|l| l.chars().count()).max().unwrap_or(0),
        };
        let head = longest_word(header[column]).unwrap_or(0);
        let cell = cells.map(of_cell).max().unwrap_or(0);
        // With a blank on both sides.
        u16::try_from(cell.max(head) + 2).unwrap_or(WIDTH)
    };
    let least: Vec<u16> = (0..header.len()).map(least).collect();
    let mut table = Table::new();
    table
        .load_preset(presets::UTF8_BORDERS_ONLY)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_width(WIDTH)
        .set_header(header.iter().copied());
    table.add_rows(rows);
    for (i, (column, least)) in table.column_iter_mut().zip(least).enumerate() {
        if i >= numbers_from {
            column.set_cell_alignment(CellAlignment::Right);
        }
        column.set_constraint(ColumnConstraint::LowerBoundary(Width::Fixed(least)));
    }
    table.to_string()
}

/// The widest line of prose, and of a table where its words allow it, in columns.
const WIDTH: u16 = 100;

/// Wraps prose to lines of at most [`WIDTH`] columns, broken between words; continued lines are
/// indented by two more columns. Lines of tables stay as they are.
pub fn wrapped(text: &str) -> String {
    let mut out = String::new();
    for line in text.lines() {
        if line.trim().is_empty() || line.starts_with(['│', '┌', '╞', '└']) {
            out += line.trim_end();
            out.push('\n');
            continue;
        }
        let margin = line.len() - line.trim_start().len();
        let mut column = 0;
        for word in line.split(' ') {
            let width = word.chars().count();
            if column > margin && column + 1 + width > usize::from(WIDTH) {
                out.push('\n');
                out.extend(std::iter::repeat_n(' ', margin + 2));
                column = margin + 2;
            } else if column > 0 || word.is_empty() {
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

/// Prints sentences, [`wrapped`].
pub fn prose(text: &str) -> Result<(), Failure> {
    out(&wrapped(text))
}

/// Prints a value as JSON.
pub fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    out(document::to_json(value)?.trim_end())
}

/// Prints to standard output; a reader that has gone away (`| head`) is no error.
pub fn out(text: &str) -> Result<(), Failure> {
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
