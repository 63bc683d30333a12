//! Rows to predictions: distinct questions are asked once, in parallel.

use crate::breakdown::{Breakdown, breakdown};
use crate::facts::Facts;
use crate::row::Row;
use crate::{Unmodelled, cluster, csv, model, setup};
use import::{BuildOptions, ModelConfig, model_graph};
use ir::TrainSpec;
use ir::cluster::Cluster;
use planner::{Pins, PlanOptions};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// What is predicted of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Predicted {
    /// Seconds of a step.
    pub step_time_s: f64,
    /// Bytes on the fullest device, context and communicator included.
    pub peak_memory_bytes: u64,
    /// Model FLOPs (full attention) over the peak of the compute type.
    pub mfu: f64,
    /// Where the time goes.
    pub breakdown: Breakdown,
    /// The pins of the plan.
    pub pins: Vec<String>,
    /// What the row does not say and was assumed.
    pub assumed: Vec<String>,
}

/// A prediction, or why there is none.
pub type Outcome = Result<Predicted, Unmodelled>;

/// Columns of [`output`].
pub const OUTPUT_COLUMNS: [&str; 16] = [
    "row_id",
    "predicted_step_time_s",
    "predicted_peak_mem_gb",
    "predicted_mfu",
    "compute_s",
    "tensor_communication_s",
    "pipeline_communication_s",
    "data_communication_s",
    "expert_communication_s",
    "bubble_s",
    "optimizer_s",
    "launch_s",
    "exposed_input_s",
    "plan",
    "assumed",
    "reason",
];

/// Columns without which no row can be modelled.
pub const REQUIRED_COLUMNS: [&str; 14] = [
    "gpu",
    "gpus_total",
    "gpus_per_node",
    "interconnect",
    "framework",
    "layers",
    "hidden",
    "heads",
    "ffn_hidden",
    "vocab",
    "seq_len",
    "global_batch",
    "precision",
    "mlp_type",
];

/// Everything that a prediction depends on.
struct Question {
    config: ModelConfig,
    train: TrainSpec,
    cluster: Cluster,
    pins: Vec<String>,
    assumed: Vec<String>,
}

/// Predictions of all rows, in their order.
///
/// Rows that ask the same share an answer; distinct questions are answered on all threads of
/// the current rayon pool. Deterministic.
pub fn predict(rows: &[Row], facts: &Facts) -> Vec<Outcome> {
    let questions: Vec<Result<Question, Unmodelled>> =
        rows.iter().map(|row| question(row, facts)).collect();
    let mut distinct: BTreeMap<String, &Question> = BTreeMap::new();
    let keys: Vec<Option<String>> = questions
        .iter()
        .map(|q| {
            let q = q.as_ref().ok()?;
            let key = format!("{:?}{:?}{:?}{:?}", q.config, q.train, q.cluster, q.pins);
            distinct.entry(key.clone()).or_insert(q);
            Some(key)
        })
        .collect();
    let distinct: Vec<(String, &Question)> = distinct.into_iter().collect();
    let answers: BTreeMap<String, Outcome> = distinct
        .into_par_iter()
        .map(|(key, question)| (key, answer(question)))
        .collect();
    questions
        .iter()
        .zip(keys)
        .map(|(question, key)| match (question, key) {
            (Err(e), _) => Err(e.clone()),
            (Ok(q), Some(key)) => answers[&key].clone().map(|p| Predicted {
                assumed: q.assumed.clone(),
                ..p
            }),
            (Ok(_), None) => Err(Unmodelled::Plan("the question was lost".into())),
        })
        .collect()
}

fn question(row: &Row, facts: &Facts) -> Result<Question, Unmodelled> {
    let (_, generation) = facts.generation(row)?;
    let (pins, assumed) = setup::pins(row, facts)?;
    Ok(Question {
        config: model::config(row, generation)?,
        train: setup::train_spec(row, generation.dropout)?,
        cluster: cluster::cluster(row, facts)?,
        pins,
        assumed,
    })
}

fn answer(q: &Question) -> Outcome {
    // A pin that cannot be read is a part of the plan that the planner does not have.
    let pins =
        Pins::parse(&q.pins).map_err(|e| Unmodelled::Feature(format!("the pin {}", e.pin)))?;
    let options = BuildOptions {
        sequence: q.train.sequence,
        dropout: q.train.dropout,
    };
    let forward = model_graph(&q.config, &options).map_err(|e| Unmodelled::Model(e.to_string()))?;
    let planned = planner::plan(
        &forward,
        &q.train,
        &q.cluster,
        &PlanOptions {
            pins,
            ..PlanOptions::default()
        },
    )
    .map_err(|e| Unmodelled::Plan(e.to_string()))?;
    let prediction = &planned.simulation.prediction;
    let breakdown = breakdown(&planned.program, &q.cluster, prediction)
        .map_err(|e| Unmodelled::Plan(e.to_string()))?;
    Ok(Predicted {
        step_time_s: prediction.step_time_s.0,
        peak_memory_bytes: prediction
            .stages
            .iter()
            .map(|s| s.peak_bytes.0)
            .max()
            .unwrap_or(0),
        mfu: prediction.mfu,
        breakdown,
        pins: q.pins.clone(),
        assumed: Vec::new(),
    })
}

/// The predictions as comma-separated values with [`OUTPUT_COLUMNS`].
pub fn output(rows: &[Row], outcomes: &[Outcome]) -> String {
    let mut text = OUTPUT_COLUMNS.join(",") + "\n";
    for (row, outcome) in rows.iter().zip(outcomes) {
        let mut fields = vec![row.id().to_string()];
        match outcome {
            Ok(p) => {
                let b = &p.breakdown;
                fields.push(format!("{:.6}", p.step_time_s));
                fields.push(format!("{:.3}", p.peak_memory_bytes as f64 / 1e9));
                fields.push(format!("{:.5}", p.mfu));
                let seconds = [
                    b.compute_s,
                    b.tensor_s,
                    b.pipeline_s,
                    b.data_s,
                    b.expert_s,
                    b.bubble_s,
                    b.optimizer_s,
                    b.launch_s,
                    b.exposed_input_s,
                ];
                fields.extend(seconds.iter().map(|s| format!("{s:.6}")));
                fields.push(p.pins.join(" "));
                fields.push(p.assumed.join(" "));
                fields.push(String::new());
            }
            Err(e) => {
                fields.resize(OUTPUT_COLUMNS.len() - 1, String::new());
                fields.push(e.to_string());
            }
        }
        let fields: Vec<String> = fields.iter().map(|f| csv::quoted(f)).collect();
        text += &fields.join(",");
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small model on two GPUs of one host, and rows that cannot be modelled.
    const ROWS: &str = "row_id,gpu,gpus_total,gpus_per_node,interconnect,framework,layers,hidden,heads,ffn_hidden,vocab,seq_len,global_batch,micro_batch,tp,pp,dp,cp,zero_stage,recompute,precision,mlp_type
R1,A100-80GB-SXM4,2,8,NVLink3+NVSwitch,Megatron-LM,2,1024,16,4096,51200,1024,8,2,2,1,1,1,0,full,fp16,gelu
R2,A100-80GB-SXM4,2,8,NVLink3+NVSwitch,Megatron-LM,2,1024,16,4096,51200,1024,8,2,2,1,1,1,0,full,fp16,gelu
R3,A100-80GB-SXM4,2,8,NVLink3+NVSwitch,Megatron-LM,2,1024,16,4096,51200,1024,8,2,2,1,1,1,0,none,fp16,gelu
R4,A100-80GB-SXM4,2,8,NVLink3+NVSwitch,Megatron-LM,2,1024,16,4096,51200,1024,8,2,1,1,1,2,0,none,fp16,gelu
R5,A100-80GB-SXM4,2,8,NVLink3+NVSwitch,Megatron-LM,2,1024,,4096,51200,1024,8,2,2,1,1,1,0,none,fp16,gelu
";

    #[test]
    fn rows_go_through_the_planner_and_say_what_is_missing() {
        let rows = crate::row::rows(&csv::parse(ROWS).unwrap());
        let outcomes = predict(&rows, &Facts::built_in());
        let time = |i: usize| outcomes[i].as_ref().unwrap().step_time_s;
        assert_eq!(time(0), time(1));
        // Recomputation makes the forward pass again, which is a third of forward and backward.
        assert!(time(0) > 1.1 * time(2) && time(0) < 1.34 * time(2));
        let p = outcomes[0].as_ref().unwrap();
        assert!(p.breakdown.tensor_s > 0.0 && p.breakdown.expert_s == 0.0);
        // 16 bytes a parameter, of 80 million on two ranks, at least.
        assert!(p.peak_memory_bytes > 600_000_000 && p.mfu > 0.05 && p.mfu < 0.8);
        let reason = |i: usize| outcomes[i].as_ref().unwrap_err().to_string();
        assert_eq!(reason(3), "not supported: context parallelism");
        assert_eq!(reason(4), "`heads` is not stated");
        let text = output(&rows, &outcomes);
        let table = csv::parse(&text).unwrap();
        assert_eq!(table.header, OUTPUT_COLUMNS);
        assert_eq!(
            (table.records.len(), table.records[4][0].as_str()),
            (5, "R5")
        );
    }
}
