//! Where the predicted time of a row goes, kernel by kernel: `published --explain ROW,ROW`.

use published::cluster::machine;
use published::{Facts, lower, row::Row};

/// Writes a table for each of the rows whose ids are named.
pub fn text(rows: &[Row], names: &str, facts: &Facts) -> String {
    let named: Vec<&str> = names.split(',').collect();
    let chosen: Vec<Row> = rows
        .iter()
        .filter(|r| named.contains(&r.id()))
        .cloned()
        .collect();
    let programs = lower(&chosen, facts);
    let one = |(row, program): (&Row, _)| {
        let program: Result<std::sync::Arc<published::Lowered>, published::Unmodelled> = program;
        let text = program.and_then(|p| p.explained(&machine(row, facts)?));
        let measured = row.measured("derived_step_time_s").unwrap_or(f64::NAN);
        let text = text.unwrap_or_else(|e| e.to_string());
        format!("{}, measured {measured:.3} s\n{text}\n", row.id())
    };
    chosen.iter().zip(programs).map(one).collect()
}
