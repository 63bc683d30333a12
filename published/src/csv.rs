//! Comma-separated values with quotes (RFC 4180), read by column name.
//!
//! Invariant: every record has a field for every column of the header.

use std::collections::BTreeSet;

/// A parsed file: the header and its records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// Column names.
    pub header: Vec<String>,
    /// Records, each as long as the header.
    pub records: Vec<Vec<String>>,
}

/// Why a text is not a table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct CsvError {
    /// Line on which the record begins, from 1.
    pub line: usize,
    /// What is wrong there.
    pub problem: String,
}

/// Reads a table. Fails on a column that is named twice, on a record with more or fewer fields than the header, and on a quote
/// that is not closed.
pub fn parse(text: &str) -> Result<Table, CsvError> {
    let mut rows = records(text)?.into_iter();
    let Some((_, header)) = rows.next() else {
        return Err(CsvError {
            line: 1,
            problem: "the file is empty; its first line names the columns".into(),
        });
    };
    let mut named = BTreeSet::new();
    for name in &header {
        if !name.is_empty() && !named.insert(name) {
            return Err(CsvError {
                line: 1,
                problem: format!("the column `{name}` is named twice"),
            });
        }
    }
    let mut table = Table {
        header,
        records: Vec::new(),
    };
    for (line, record) in rows {
        if record.len() != table.header.len() {
            return Err(CsvError {
                line,
                problem: format!(
                    "{} fields, but the header has {}",
                    record.len(),
                    table.header.len()
                ),
            });
        }
        table.records.push(record);
    }
    Ok(table)
}

/// A field as it is written: quoted where it has to be.
pub fn quoted(field: &str) -> String {
    if field.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", field.replace('"', "\"\""))
    } else {
        field.to_string()
    }
}

/// Records with the lines on which they begin; blank lines are none.
fn records(text: &str) -> Result<Vec<(usize, Vec<String>)>, CsvError> {
    let mut all = Vec::new();
    let (mut record, mut field) = (Vec::new(), String::new());
    let (mut line, mut first_line) = (1, 1);
    let mut in_quotes = false;
    let mut chars = text
        .strip_prefix('\u{feff}')
        .unwrap_or(text)
        .chars()
        .peekable();
    while let Some(c) = chars.next() {
        if c == '\n' {
            line += 1;
        }
        match c {
            '"' if in_quotes && chars.peek() == Some(&'"') => {
                chars.next();
                field.push('"');
            }
            '"' => in_quotes = !in_quotes,
            ',' if !in_quotes => record.push(std::mem::take(&mut field)),
            '\r' if !in_quotes && chars.peek() == Some(&'\n') => {}
            '\n' if !in_quotes => {
                end_record(&mut all, first_line, &mut record, &mut field);
                first_line = line;
            }
            _ => field.push(c),
        }
    }
    if in_quotes {
        return Err(CsvError {
            line: first_line,
            problem: "a quote is not closed".into(),
        });
    }
    end_record(&mut all, first_line, &mut record, &mut field);
    Ok(all)
}

fn end_record(
    all: &mut Vec<(usize, Vec<String>)>,
    line: usize,
    record: &mut Vec<String>,
    field: &mut String,
) {
    if record.is_empty() && field.is_empty() {
        return;
    }
    record.push(std::mem::take(field));
    all.push((line, std::mem::take(record)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_hold_commas_lines_and_quotes() {
        let table = parse("a,b\r\n1,\"x, \"\"y\"\"\nz\"\n\n,\n").unwrap();
        assert_eq!(table.header, ["a", "b"]);
        assert_eq!(table.records[0], ["1", "x, \"y\"\nz"]);
        assert_eq!(table.records[1], ["", ""]);
        assert_eq!(table.records.len(), 2);
        assert_eq!(quoted(&table.records[0][1]), "\"x, \"\"y\"\"\nz\"");
        assert_eq!(quoted("plain"), "plain");
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        let error = |text: &str| parse(text).unwrap_err().to_string();
        assert_eq!(
            error("a,b\n1,2\n3\n"),
            "line 3: 1 fields, but the header has 2"
        );
        assert_eq!(error("a\n\"x\n"), "line 2: a quote is not closed");
        assert!(error("").starts_with("line 1: the file is empty"));
    }
}
