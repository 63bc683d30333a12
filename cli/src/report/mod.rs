//! Plans and what comes of them, in words and tables.
//!
//! * `account`: where the time of a step goes.
//! * `degrees`: a plan in the words of pins.
//! * `parallelism`: what each mesh axis does, in the field's terms, read off the strategies.
//! * `against`: one plan beside another.
//! * `collectives`: what a program communicates in one step.
//! * `plan`: a plan in words.
//! * `strategies`: the strategy of every op.

pub mod account;
pub mod against;
pub mod collectives;
pub mod degrees;
pub mod parallelism;
pub mod plan;
pub mod strategies;

use crate::document;
use crate::failure::{Exit, Failure};
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

/// Draws a table with a header; columns from `numbers_from` on are right-aligned.
pub fn table(header: &[&str], rows: Vec<Vec<String>>, numbers_from: usize) -> String {
    let mut table = Table::new();
    table
        .load_preset(presets::UTF8_BORDERS_ONLY)
        .set_header(header.iter().copied());
    table.add_rows(rows);
    for column in table.column_iter_mut().skip(numbers_from) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

/// The widest line of prose, in columns.
const WIDTH: usize = 100;

/// Wraps prose to lines of at most [`WIDTH`] columns, broken between words; continued lines are
/// indented by two more columns.
pub fn wrapped(text: &str) -> String {
    let mut out = String::new();
    for line in text.lines() {
        let margin = line.len() - line.trim_start().len();
        let mut column = 0;
        for word in line.split(' ') {
            let width = word.chars().count();
            if column > margin && column + 1 + width > WIDTH {
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
