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
    /// The problem there.
    pub problem: String,
}

/// Reads a table. Fails on a column that is named twice, on a record with more or fewer fields than
/// the header, and on a quote that is not closed.
pub fn parse(text: &str) -> Result<Table, CsvError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut reader = ::csv::ReaderBuilder::new()
        .has_headers(false)
        .flexible(true)
        .from_reader(text.as_bytes());
    let mut records = Vec::new();
    for record in reader.records() {
        let record = record.map_err(|e| CsvError {
            line: e.position().map_or(1, |p| line_at(text, p.byte())),
            problem: e.to_string(),
        })?;
        let line = record.position().map_or(1, |p| line_at(text, p.byte()));
        records.push((line, record.iter().map(str::to_string).collect::<Vec<_>>()));
    }
    // Such a field goes on to the end of the text, so it is in the last record.
    if text.matches('"').count() % 2 == 1 {
        return Err(CsvError {
            line: records.last().map_or(1, |r| r.0),
            problem: "a quote is not closed".into(),
        });
    }
    let mut records = records.into_iter();
    let (_, header) = records.next().ok_or_else(|| CsvError {
        line: 1,
        problem: "the file is empty; its first line names the columns".into(),
    })?;
    let mut named = BTreeSet::new();
    let mut again = header.iter().filter(|n| !n.is_empty() && !named.insert(*n));
    if let Some(name) = again.next() {
        return Err(CsvError {
            line: 1,
            problem: format!("the column `{name}` is named twice"),
        });
    }
    let whole = |(line, record): (usize, Vec<String>)| match record.len() == header.len() {
        true => Ok(record),
        false => Err(CsvError {
            line,
            problem: format!(
                "{} fields, but the header has {}",
                record.len(),
                header.len()
            ),
        }),
    };
    let records = records.map(whole).collect::<Result<_, _>>()?;
    Ok(Table { header, records })
}

/// A record as a line, its fields quoted where they have to be.
pub fn line<F: AsRef<[u8]>>(fields: impl IntoIterator<Item = F>) -> String {
    let mut writer = ::csv::Writer::from_writer(Vec::new());
    let written = writer.write_record(fields);
    let bytes = written.map(|()| writer.into_inner().unwrap_or_default());
    // Memory takes all that is written, and fields are not cut.
    String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned()
}

/// The line, from 1, of what follows the line ends at a byte.
fn line_at(text: &str, byte: u64) -> usize {
    let bytes = text.as_bytes();
    let ends = |b: &&u8| matches!(**b, b'\n' | b'\r');
    let start = (byte as usize).min(bytes.len());
    let start = start + bytes[start..].iter().take_while(ends).count();
    1 + bytes[..start].iter().filter(|b| **b == b'\n').count()
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
        let written = line(&table.records[0]);
        assert_eq!(written, "1,\"x, \"\"y\"\"\nz\"\n");
        let again = parse(&format!("a,b\n{written}")).unwrap();
        assert_eq!(again.records, table.records[..1]);
        assert_eq!(line(["plain", "", "ä"]), "plain,,ä\n");
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        let error = |text: &str| parse(text).unwrap_err().to_string();
        assert_eq!(
            error("a,b\n1,2\n3\n"),
            "line 3: 1 fields, but the header has 2"
        );
        assert_eq!(
            error("a,b\r\n\r\n\r\n\"x\r\ny\",2\r\n\r\n3\r\n"),
            "line 7: 1 fields, but the header has 2"
        );
        assert_eq!(error("a\n\"x\n"), "line 2: a quote is not closed");
        assert_eq!(error("a,b,a\n"), "line 1: the column `a` is named twice");
        assert!(error("").starts_with("line 1: the file is empty"));
    }
}
