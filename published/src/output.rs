//! Predictions as a table: one row for each run, in their order.

use crate::csv;
use crate::predict::Outcome;
use crate::row::Row;
use ir::Bytes;

/// Columns of [`output`].
pub const OUTPUT_COLUMNS: [&str; 26] = [
    "row_id",
    "predicted_step_time_s",
    "predicted_peak_mem_gb",
    "predicted_mfu",
    "compute_s",
    "tensor_communication_s",
    "context_communication_s",
    "pipeline_communication_s",
    "data_communication_s",
    "expert_communication_s",
    "bubble_s",
    "optimizer_s",
    "launch_s",
    "exposed_input_s",
    "mem_parameters_gb",
    "mem_gradients_gb",
    "mem_optimizer_gb",
    "mem_activations_gb",
    "mem_buffers_gb",
    "mem_slack_gb",
    "mem_context_gb",
    "device_mem_gb",
    "fits",
    "plan",
    "assumed",
    "reason",
];

/// The predictions as comma-separated values with [`OUTPUT_COLUMNS`].
pub fn output(rows: &[Row], outcomes: &[Outcome]) -> String {
    let mut text = OUTPUT_COLUMNS.join(",") + "\n";
    for (row, outcome) in rows.iter().zip(outcomes) {
        let mut fields = vec![row.id().to_string()];
        match outcome {
            Ok(p) => {
                let b = &p.breakdown;
                fields.push(format!("{:.6}", p.step_time_s));
                fields.push(format!("{:.3}", p.reported_memory_gb));
                fields.push(format!("{:.5}", p.mfu));
                let seconds = [
                    b.compute_s,
                    b.tensor_s,
                    b.context_s,
                    b.pipeline_s,
                    b.data_s,
                    b.expert_s,
                    b.bubble_s,
                    b.optimizer_s,
                    b.launch_s,
                    b.exposed_input_s,
                ];
                fields.extend(seconds.iter().map(|s| format!("{s:.6}")));
                fields.extend(p.memory.parts().into_iter().map(gb));
                fields.push(gb(p.device_memory));
                fields.push(if p.fits() { "yes" } else { "no" }.into());
                fields.push(p.pins.join(" "));
                fields.push(p.assumed.join(" "));
                fields.push(String::new());
            }
            Err(e) => {
                fields.resize(OUTPUT_COLUMNS.len() - 1, String::new());
                fields.push(e.to_string());
            }
        }
        text += &csv::line(&fields);
    }
    text
}

/// 10^9 bytes.
fn gb(bytes: Bytes) -> String {
    format!("{:.3}", bytes.0 as f64 / 1e9)
}
