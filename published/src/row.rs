//! One published training run: what its columns say, typed, and nothing else.
//!
//! A cell that is empty or `?` is "not stated". What has to be known to build the run and is
//! not stated is an answer ([`RowError`]), not a default; defaults belong to the data files.

use crate::csv::Table;
use std::collections::BTreeMap;

/// No degree or size of a training run is larger.
const MOST: f64 = 2e6;

/// A row of the table.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    cells: BTreeMap<String, String>,
}

/// A reason that keeps a row from being read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RowError {
    /// A cell that is needed says nothing.
    #[error("`{column}` is not stated")]
    NotStated {
        /// Name of the column.
        column: String,
    },
    /// A cell does not hold what its column is for.
    #[error("`{column}` is `{value}`, expected {expected}")]
    Malformed {
        /// Name of the column.
        column: String,
        /// The contents of the cell.
        value: String,
        /// The values that belong there.
        expected: &'static str,
    },
}

/// Rows of a table, in its order.
pub fn rows(table: &Table) -> Vec<Row> {
    table
        .records
        .iter()
        .map(|record| Row {
            cells: table
                .header
                .iter()
                .cloned()
                .zip(record.iter().map(|c| c.trim().to_string()))
                .collect(),
        })
        .collect()
}

impl Row {
    /// Text of a cell; `None` where it is empty, `?`, or the table lacks the column.
    pub fn text(&self, column: &str) -> Option<&str> {
        let cell = self.cells.get(column)?.as_str();
        (!cell.is_empty() && cell != "?").then_some(cell)
    }

    /// Fills in a cell.
    pub(crate) fn set(&mut self, column: &str, value: String) {
        self.cells.insert(column.into(), value);
    }

    /// Text of a cell that has to be there.
    pub fn required(&self, column: &str) -> Result<&str, RowError> {
        self.text(column).ok_or_else(|| RowError::NotStated {
            column: column.into(),
        })
    }

    /// A count of 1 or more; `None` where it is not stated. Products of three counts fit in 64
    /// bits.
    pub fn count(&self, column: &str) -> Result<Option<u64>, RowError> {
        let Some(text) = self.text(column) else {
            return Ok(None);
        };
        match text.parse::<f64>() {
            Ok(x) if x >= 1.0 && x.fract() == 0.0 && x <= MOST => Ok(Some(x as u64)),
            _ => Err(RowError::Malformed {
                column: column.into(),
                value: text.into(),
                expected: "a whole number from 1 to 2,000,000",
            }),
        }
    }

    /// A count that has to be there.
    pub fn required_count(&self, column: &str) -> Result<u64, RowError> {
        self.count(column)?.ok_or_else(|| RowError::NotStated {
            column: column.into(),
        })
    }

    /// The word that a cell begins with, one of those accepted; more may be said after it.
    /// `expected` names them for the message.
    pub fn word<'a>(
        &self,
        column: &str,
        accepted: &[&'a str],
        expected: &'static str,
    ) -> Result<Option<&'a str>, RowError> {
        let Some(text) = self.text(column) else {
            return Ok(None);
        };
        let end = text.find(|c: char| !c.is_alphanumeric());
        let word = &text[..end.unwrap_or(text.len())];
        match accepted.iter().find(|a| **a == word) {
            Some(known) => Ok(Some(known)),
            None => Err(RowError::Malformed {
                column: column.into(),
                value: text.into(),
                expected,
            }),
        }
    }

    /// Refuses measurements that are stated and are not positive numbers.
    pub fn check_measured(&self, columns: &[&str]) -> Result<(), RowError> {
        let bad = |c: &&&str| self.text(c).is_some() && self.measured(c).is_none();
        match columns.iter().find(bad) {
            None => Ok(()),
            Some(column) => Err(RowError::Malformed {
                column: column.to_string(),
                value: self.text(column).unwrap_or("").into(),
                expected: "a positive number",
            }),
        }
    }

    /// A positive measurement; `None` where there is none or it is not a number.
    pub fn measured(&self, column: &str) -> Option<f64> {
        let x: f64 = self.text(column)?.parse().ok()?;
        (x.is_finite() && x > 0.0).then_some(x)
    }

    /// Identifier of the row; empty where the table has none.
    pub fn id(&self) -> &str {
        self.text("row_id").unwrap_or("")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_counts_texts_or_not_stated() {
        let table = crate::csv::parse("row_id,layers,tp,vpp,t\nR1,24,?,,0.5\nR2,x,2,1,\n").unwrap();
        let rows = rows(&table);
        assert_eq!(rows[0].id(), "R1");
        assert_eq!(rows[0].count("layers"), Ok(Some(24)));
        assert_eq!((rows[0].text("tp"), rows[0].text("none")), (None, None));
        assert_eq!(
            (rows[0].measured("t"), rows[1].measured("t")),
            (Some(0.5), None)
        );
        let word = |c| rows[1].word(c, &["x", "y"], "x or y");
        assert_eq!((word("layers"), word("none")), (Ok(Some("x")), Ok(None)));
        let wrong = word("vpp").unwrap_err().to_string();
        assert_eq!(wrong, "`vpp` is `1`, expected x or y");
        assert_eq!(rows[0].check_measured(&["t", "tp"]), Ok(()));
        let wrong = rows[1].check_measured(&["t", "layers"]).unwrap_err();
        assert_eq!(
            wrong.to_string(),
            "`layers` is `x`, expected a positive number"
        );
        let missing = rows[0].required_count("vpp").unwrap_err().to_string();
        assert_eq!(missing, "`vpp` is not stated");
        let wrong = rows[1].count("layers").unwrap_err().to_string();
        assert_eq!(
            wrong,
            "`layers` is `x`, expected a whole number from 1 to 2,000,000"
        );
    }
}
