//! Rows of the GPT-3 175B class beside the plan that a search without their pins finds.

use benchmarks::score::Scored;
use published::{Facts, Row, free};

/// The layers and the hidden size of the class.
const CLASS: (&str, &str) = ("96", "12288");

/// Says whether a row is of the class.
pub fn is_of_class(row: &Row) -> bool {
    (row.text("layers"), row.text("hidden")) == (Some(CLASS.0), Some(CLASS.1))
}

/// Writes a table: each row's measured and predicted step time, and that of the free plan.
pub fn text(scored: &[Scored<'_>], facts: &Facts) -> String {
    let scored: Vec<&Scored<'_>> = scored.iter().filter(|s| is_of_class(s.row)).collect();
    let rows: Vec<Row> = scored.iter().map(|s| s.row.clone()).collect();
    let mut out = String::from(
        "\n## The free plan beside the pinned ones\n\nRows of 96 layers and hidden size 12288: predicted as they ran, and the plan that a search with no pin but the kind of recomputation finds for the same model, cluster and batch within the device's memory.\n\n| row | source | GPUs | measured, s | predicted, s | error | free plan, s | free over pinned | its memory, GB | free plan |\n|---|---|---:|---:|---:|---:|---:|---:|---:|---|\n",
    );
    let mut slower = Vec::new();
    for (s, found) in scored.iter().zip(free(&rows, facts)) {
        let (seconds, ratio, memory, plan) = match found {
            Ok(f) => {
                let ratio = f.step_time_s / s.predicted_s;
                if ratio > 1.0 {
                    slower.push(s.row.id());
                }
                (
                    format!("{:.2}", f.step_time_s),
                    format!("{ratio:.3}"),
                    format!("{:.1}", f.peak_memory_bytes as f64 / 1e9),
                    f.plan,
                )
            }
            Err(e) => {
                slower.push(s.row.id());
                let none = || "–".to_string();
                (none(), none(), none(), e.to_string())
            }
        };
        out += &format!(
            "| {} | {} | {} | {:.2} | {:.2} | {:+.1}% | {seconds} | {ratio} | {memory} | {plan} |\n",
            s.row.id(),
            s.row.text("source").unwrap_or(""),
            s.row.text("gpus_total").unwrap_or(""),
            s.measured_s,
            s.predicted_s,
            100.0 * s.error(),
        );
    }
    out += &match slower.is_empty() {
        true => format!(
            "\nNo free plan is slower than the pinned one ({} rows).\n",
            rows.len()
        ),
        false => format!(
            "\nThe free plan is slower, or there is none, on {} of {} rows: {}.\n",
            slower.len(),
            rows.len(),
            slower.join(", ")
        ),
    };
    out
}
