//! Rows to predictions: distinct questions are asked once, in parallel. A row that leaves a knob
//! open asks one question for each ordinary value of it.

use crate::breakdown::{Breakdown, breakdown};
use crate::choices::{Choice, choices};
use crate::cluster::{self, Machine};
use crate::facts::Facts;
use crate::model::FURTHER;
use crate::row::Row;
use crate::{Unmodelled, assume, model, setup, software};
use cost_model::StepWork;
use cost_model::simulate::SimulateOptions;
use frameworks::{Executed, MemoryUse, Software, memory_use};
use import::{BuildOptions, ModelConfig, model_graph};
use ir::cluster::Cluster;
use ir::plan::MadeFor;
use ir::program::Program;
use ir::{Bytes, TrainSpec};
use planner::{Pins, PlanOptions, Planned};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The prediction of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Predicted {
    /// Seconds of a step.
    pub step_time_s: f64,
    /// The parts of the peak of the fullest device.
    pub memory: MemoryUse,
    /// The memory of the device, as the catalogue says.
    pub device_memory: Bytes,
    /// That peak as the framework reports it, in 10^9 bytes or what it calls a GB.
    pub reported_memory_gb: f64,
    /// Model FLOPs (attention over all keys, or those of its window) over the peak of the compute type.
    pub mfu: f64,
    /// Where the time goes.
    pub breakdown: Breakdown,
    /// The pins of the plan.
    pub pins: Vec<String>,
    /// Assumptions on what the row does not say.
    pub assumed: Vec<String>,
}

impl Predicted {
    /// Whether the device has the memory of the peak.
    pub fn fits(&self) -> bool {
        self.memory.total() <= self.device_memory
    }
}

/// A prediction, or why there is none.
pub type Outcome = Result<Predicted, Unmodelled>;

/// Columns of what was measured: not read here, but refused where they hold no measurement.
const MEASURED_COLUMNS: [&str; 3] = ["derived_step_time_s", "peak_mem_gb", "derived_mfu_bf16peak"];

/// Everything that a prediction depends on.
#[derive(Clone)]
pub struct Question {
    /// The model.
    pub config: ModelConfig,
    /// How it is trained.
    pub train: TrainSpec,
    /// The cluster that it runs on.
    pub cluster: Cluster,
    /// The software that executes it.
    pub software: Software,
    /// Its name and version, by which a plan is made for it.
    pub made_for: MadeFor,
    /// The memory of a device, as the catalogue has it.
    pub(crate) memory: Bytes,
    /// The pins of the plan.
    pub pins: Vec<String>,
    pub(crate) assumed: Vec<String>,
    /// Name of the framework's generation.
    pub(crate) generation: String,
}

/// Predictions of all rows, in their order.
///
/// Rows that ask the same share an answer; distinct questions are answered on all threads of
/// the current rayon pool. Deterministic.
pub fn predict(rows: &[Row], facts: &Facts) -> Vec<Outcome> {
    let answers = ask(rows, facts, answer).into_iter().zip(rows);
    answers
        .map(|((question, outcome), row)| {
            let q = question.map(|q| (q.assumed, q.generation));
            let (assumed, generation) = q.unwrap_or_default();
            outcome.map(|p| Predicted {
                assumed,
                reported_memory_gb: facts.memory.reported(&generation, row, &p.memory),
                ..p
            })
        })
        .collect()
}

/// An answer, and what it is chosen by among those to a row's questions.
#[derive(Clone)]
struct Answer<T> {
    step_time_s: f64,
    /// Whether the devices have the memory.
    fits: bool,
    value: T,
}

/// The question of every row with its answer, each distinct question answered once. Of a row
/// that leaves something open it is the choice that is fastest of those that fit.
fn ask<T: Clone + Send + Sync>(
    rows: &[Row],
    facts: &Facts,
    answer: impl Fn(&Question) -> Result<Answer<T>, Unmodelled> + Sync,
) -> Vec<(Option<Question>, Result<T, Unmodelled>)> {
    let questions: Vec<Result<Vec<Question>, Unmodelled>> =
        rows.iter().map(|row| questions(row, facts)).collect();
    let mut distinct: BTreeMap<String, &Question> = BTreeMap::new();
    for q in questions.iter().flatten().flatten() {
        distinct.entry(q.key()).or_insert(q);
    }
    let distinct: Vec<(String, &Question)> = distinct.into_iter().collect();
    let answers: BTreeMap<String, Result<Answer<T>, Unmodelled>> = distinct
        .into_par_iter()
        .map(|(key, question)| (key, answer(question)))
        .collect();
    let best = |questions: Vec<Question>| {
        let mut found: Option<(Question, Result<Answer<T>, Unmodelled>)> = None;
        for q in questions {
            let Some(answer) = answers.get(&q.key()) else {
                continue;
            };
            let is_better = match (&found, answer) {
                (None, _) | (Some((_, Err(_))), Ok(_)) => true,
                (Some((_, Ok(best))), Ok(a)) if a.fits == best.fits => {
                    a.step_time_s < best.step_time_s
                }
                (Some((_, Ok(_))), Ok(a)) => a.fits,
                _ => false,
            };
            if is_better {
                found = Some((q, answer.clone()));
            }
        }
        match found {
            Some((q, answer)) => (Some(q), answer.map(|a| a.value)),
            None => (None, Err(Unmodelled::Plan("nothing was asked".into()))),
        }
    };
    questions
        .into_iter()
        .map(|asked| asked.map_or_else(|e| (None, Err(e)), &best))
        .collect()
}

/// The questions of a row, one for each choice of what it leaves open.
fn questions(row: &Row, facts: &Facts) -> Result<Vec<Question>, Unmodelled> {
    let (row, filled) = assume::completed(row, facts)?;
    let choices = choices(&row, facts)?;
    let all = choices.iter().map(|c| question_of(&row, &filled, facts, c));
    all.collect()
}

/// The first of a row's questions.
///
/// Fails where the row cannot be modelled.
pub fn question(row: &Row, facts: &Facts) -> Result<Question, Unmodelled> {
    let (row, filled) = assume::completed(row, facts)?;
    let first = choices(&row, facts)?.remove(0);
    question_of(&row, &filled, facts, &first)
}

/// The question of a complete row under one choice; `filled` is what completed it.
fn question_of(
    row: &Row,
    filled: &[String],
    facts: &Facts,
    choice: &Choice,
) -> Result<Question, Unmodelled> {
    row.check_measured(&MEASURED_COLUMNS)?;
    let (name, generation) = facts.generation(row)?;
    // The importer bounds the layers, of which pins name each.
    let mut whole = row.clone();
    if let further @ 1.. = setup::further(row, facts, choice)? {
        whole.set(FURTHER, further.to_string());
    }
    let config = model::config(&whole, generation)?;
    let (pins, more) = setup::pins(row, facts, choice)?;
    let mut assumed = [filled, &more].concat();
    let train = setup::train_spec(row, generation.dropout)?;
    let Machine { cluster, software } = cluster::machine(row, facts)?;
    assumed.extend(cluster::assumed(row, facts, &cluster)?);
    assumed.extend(software::assumed(row));
    Ok(Question {
        config,
        train,
        cluster,
        software,
        made_for: software::of_row(row, facts)?,
        memory: cluster::memory(row, facts)?,
        pins,
        assumed,
        generation: name.to_string(),
    })
}

impl Question {
    /// The cluster that it runs on, and the software that executes it.
    pub fn machine(&self) -> Machine {
        Machine {
            cluster: self.cluster.clone(),
            software: self.software.clone(),
        }
    }

    /// Equal where an answer is.
    fn key(&self) -> String {
        format!(
            "{:?}{:?}{:?}{:?}{:?}",
            self.config, self.train, self.cluster, self.software, self.pins
        )
    }
}

/// A row's program: what other figures of the cost model price again without a search.
#[derive(Clone, Debug)]
pub struct Lowered {
    pub(crate) program: Program,
    work: StepWork,
}

impl Lowered {
    /// The program as a machine's software executes it, on a cluster of the same shape.
    pub(crate) fn executed(&self, machine: &Machine) -> Result<Executed, Unmodelled> {
        frameworks::execute(&self.program, &machine.cluster, &machine.software)
            .map_err(|e| Unmodelled::Plan(e.to_string()))
    }

    /// Seconds of a step on a machine of the same shape.
    pub fn step_time_s(&self, machine: &Machine) -> Result<f64, Unmodelled> {
        let options = SimulateOptions::new(self.work);
        let played = self.executed(machine)?.simulate(&machine.cluster, &options);
        played
            .map(|s| s.step_time.0)
            .map_err(|e| Unmodelled::Plan(e.to_string()))
    }
}

/// Seconds of a step of each program on its machine, on all threads of the current rayon pool.
pub fn price(asked: &[(&Lowered, Machine)]) -> Vec<Result<f64, Unmodelled>> {
    asked
        .par_iter()
        .map(|(lowered, machine)| lowered.step_time_s(machine))
        .collect()
}

/// The programs of rows, planned under `facts`; those of equal questions are shared.
pub fn lower(rows: &[Row], facts: &Facts) -> Vec<Result<Arc<Lowered>, Unmodelled>> {
    ask(rows, facts, |q| {
        let p = planned(q)?;
        let lowered = lowered(q, &p);
        Ok(Answer {
            step_time_s: lowered.step_time_s(&q.machine())?,
            fits: fullest(&p.program, q).total() <= q.memory,
            value: Arc::new(lowered),
        })
    })
    .into_iter()
    .map(|(_, answer)| answer)
    .collect()
}

pub(crate) fn lowered(q: &Question, planned: &Planned) -> Lowered {
    Lowered {
        program: planned.program.clone(),
        work: StepWork::of(&planned.training, &q.train),
    }
}

/// The plan of a question with its program, and what Meshwright's own runtime would take.
///
/// Fails where the model cannot be built or no plan has the pins.
pub fn planned(q: &Question) -> Result<Planned, Unmodelled> {
    // A pin that cannot be read is a part of the plan that the planner does not have.
    let pins =
        Pins::parse(&q.pins).map_err(|e| Unmodelled::Feature(format!("the pin {}", e.pin)))?;
    let options = BuildOptions {
        sequence: q.train.sequence,
        dropout: q.train.dropout,
    };
    let forward = model_graph(&q.config, &options).map_err(|e| Unmodelled::Model(e.to_string()))?;
    // What was published has run, whatever it left free, and reduces what it reduces once a step then,
    // whatever our own runtime would hide or do in one call.
    let options = PlanOptions {
        pins,
        headroom: Some(0.0),
        without_hiding: true,
        one_by_one: true,
        ..PlanOptions::default()
    };
    let plan_error = |e: &dyn std::fmt::Display| Unmodelled::Plan(e.to_string());
    let mut planned =
        planner::plan(&forward, &q.train, &q.cluster, &options).map_err(|e| plan_error(&e))?;
    // Frameworks lay tensors out so that collectives move them as they stand.
    planned.program = lowering::without_pieces(&planned.program).map_err(|e| plan_error(&e))?;
    Ok(planned)
}

/// The prediction of a question, but for the figures that only its row has: what is assumed, and
/// the memory as its framework reports it.
///
/// Fails where there is no such plan.
pub fn predicted(q: &Question) -> Result<Predicted, Unmodelled> {
    answer(q).map(|answer| answer.value)
}

fn answer(q: &Question) -> Result<Answer<Predicted>, Unmodelled> {
    let planned = planned(q)?;
    let lowered = lowered(q, &planned);
    let executed = lowered.executed(&q.machine())?;
    let simulation = executed
        .simulate(&q.cluster, &SimulateOptions::new(lowered.work))
        .map_err(|e| Unmodelled::Plan(e.to_string()))?;
    let prediction = &simulation.prediction;
    let breakdown = breakdown(&executed.program, &q.cluster, &simulation);
    let memory = fullest(&planned.program, q);
    Ok(Answer {
        step_time_s: prediction.step_time_s.0,
        fits: memory.total() <= q.memory,
        value: Predicted {
            step_time_s: prediction.step_time_s.0,
            memory,
            device_memory: q.memory,
            reported_memory_gb: 0.0,
            mfu: prediction.mfu,
            breakdown,
            pins: q.pins.clone(),
            assumed: Vec::new(),
        },
    })
}

/// The memory of the fullest role of a question's program.
pub(crate) fn fullest(program: &Program, q: &Question) -> MemoryUse {
    let memory = q.software.memory.as_ref();
    let roles = program.roles.iter();
    let uses = roles.map(|role| memory_use(program, role, &q.cluster, memory));
    uses.max_by_key(|m| m.total().0).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv;
    use crate::output::{OUTPUT_COLUMNS, output};

    /// A small model on two GPUs of one host, and rows that cannot be modelled.
    const ROWS: &str = "row_id,gpu,gpus_total,gpus_per_node,interconnect,framework,layers,hidden,heads,ffn_hidden,vocab,seq_len,global_batch,micro_batch,tp,pp,dp,cp,zero_stage,recompute,precision,mlp_type
R1,A100-80GB-SXM4,2,8,NVLink3+NVSwitch,Megatron-LM,2,1024,16,4096,51200,1024,8,2,2,1,1,1,0,full,fp16,gelu
R2,A100-80GB-SXM4,2,8,NVLink3+NVSwitch,Megatron-LM,2,1024,16,4096,51200,1024,8,2,2,1,1,1,0,full,fp16,gelu
R3,A100-80GB-SXM4,2,8,NVLink3+NVSwitch,Megatron-LM,2,1024,16,4096,51200,1024,8,2,2,1,1,1,0,none,fp16,gelu
R4,A100-80GB-SXM4,2,8,NVLink3+NVSwitch,Megatron-LM,2,1024,16,4096,51200,1024,8,2,1,1,1,2,0,none,fp16,gelu
R5,A100-80GB-SXM4,2,8,NVLink3+NVSwitch,Megatron-LM,2,1024,,4096,51200,1024,8,2,2,1,1,1,0,none,fp16,gelu
R6,A100-80GB-SXM4,2,8,NVLink3+NVSwitch,Megatron-LM,2,1024,16,4096,51200,1024,8,2,2,1,1,1,0,none,int8,gelu
";

    #[test]
    fn rows_go_through_the_planner_and_say_what_is_missing() {
        let rows = crate::row::rows(&csv::parse(ROWS).unwrap());
        let outcomes = predict(&rows, &Facts::built_in());
        let time = |i: usize| outcomes[i].as_ref().unwrap().step_time_s;
        assert_eq!(time(0), time(1));
        // Recomputation makes the whole forward pass again: a third of forward and backward, or
        // more where neither is bound by matmuls.
        assert!(time(0) > 1.1 * time(2) && time(0) < 1.5 * time(2));
        let p = outcomes[0].as_ref().unwrap();
        assert!(p.breakdown.tensor_s > 0.0 && p.breakdown.expert_s == 0.0);
        // 16 bytes a parameter, of 80 million on two ranks, at least.
        assert!(p.memory.total().0 > 600_000_000 && p.mfu > 0.05 && p.mfu < 0.8);
        let reason = |i: usize| outcomes[i].as_ref().unwrap_err().to_string();
        // A sequence in two parts: keys and values travel, their weights are whole everywhere.
        let context = outcomes[3].as_ref().unwrap();
        assert!(context.breakdown.context_s > 0.0 && context.breakdown.tensor_s == 0.0);
        assert!(context.breakdown.data_s > 0.0);
        assert!(time(3) > 0.5 * time(2) && time(3) < 1.5 * time(2));
        assert_eq!(outcomes[3].as_ref().unwrap().assumed, ["kv_heads=16"]);
        assert_eq!(
            outcomes[2].as_ref().unwrap().assumed,
            ["kv_heads=16", "sequence_parallel=no"]
        );
        assert_eq!(
            outcomes[4].as_ref().unwrap().assumed,
            ["heads=8", "kv_heads=8", "sequence_parallel=no"]
        );
        assert!(
            reason(5).starts_with("not supported: the precision int8; known are fp32, "),
            "{}",
            reason(5)
        );
        let text = output(&rows, &outcomes);
        let table = csv::parse(&text).unwrap();
        assert_eq!(table.header, OUTPUT_COLUMNS);
        assert_eq!(
            (table.records.len(), table.records[4][0].as_str()),
            (6, "R5")
        );
    }
}
