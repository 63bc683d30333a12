//! Errors on rows that a fit had not seen, as `fit` leaves them for the report of `published`.

use published::csv;
use std::collections::BTreeMap;
use std::path::Path;

/// The columns of the file.
const HEADER: &str = "row_id,group_error,source_error";

/// The signed relative errors of one row's step time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeldOut {
    /// By a fit that had not seen its group.
    pub group: f64,
    /// By a fit that had seen nothing of its source.
    pub source: f64,
}

/// Writes one line for each row, in this order.
pub fn print(rows: &[(&str, HeldOut)]) -> String {
    let mut out = format!("{HEADER}\n");
    for (id, e) in rows {
        out += &format!("{id},{:.5},{:.5}\n", e.group, e.source);
    }
    out
}

/// Reads the errors by row; the error names the file and what is wrong.
pub fn read(path: &Path) -> Result<BTreeMap<String, HeldOut>, String> {
    let at = |e: String| format!("{}: {e}", path.display());
    let text = std::fs::read_to_string(path).map_err(|e| at(e.to_string()))?;
    parse(&text).map_err(at)
}

fn parse(text: &str) -> Result<BTreeMap<String, HeldOut>, String> {
    let table = csv::parse(text).map_err(|e| e.to_string())?;
    if table.header.join(",") != HEADER {
        return Err(format!("expected the columns {HEADER}"));
    }
    let one = |r: &Vec<String>| {
        let number = |i: usize| r[i].parse().map_err(|_| format!("`{}` is no error", r[i]));
        let (group, source) = (number(1)?, number(2)?);
        Ok((r[0].clone(), HeldOut { group, source }))
    };
    table.records.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let e = HeldOut {
            group: -0.0125,
            source: 0.25,
        };
        let text = print(&[("R1", e), ("R2", e)]);
        let read = parse(&text).unwrap();
        assert_eq!(read["R2"], e);
        assert_eq!(read.len(), 2);
        assert!(parse("row,error\nR1,1\n").unwrap_err().contains(HEADER));
        let wrong = text.replace("0.25000", "much");
        assert_eq!(parse(&wrong).unwrap_err(), "`much` is no error");
    }
}
