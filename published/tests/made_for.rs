//! `compile --for` and `predict` say the same of the same run: a row's plan is asked for by its
//! pins, for the software that the row ran on, and takes as long and holds as much as predicted;
//! also when the plan is read again from its document and priced by what that says.
//!
//! The built-in rows are one for each kind of software; with `RUN_SLOW_TESTS` and `MESHWRIGHT_DATA`
//! it is every published row that both can express.

#![allow(clippy::unwrap_used)] // A test may stop at what it does not expect.

use cost_model::StepWork;
use cost_model::simulate::SimulateOptions;
use frameworks::{Framework, Recomputation};
use import::{BuildOptions, model_graph};
use ir::plan::{MadeFor, Plan, ScheduleKind};
use ir::{Graph, Seconds};
use planner::software::{Model, Point, priced};
use planner::{OtherSoftware, Pins, PlanOptions};
use published::{Facts, Question, Row, csv, predicted, question, row, software};
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// The difference that `predict` and `compile --for` may have: they do the same sums.
const TOLERANCE: f64 = 1e-9;

const HEADER: &str = "gpu,gpus_total,gpus_per_node,interconnect,framework,date,layers,hidden,heads,kv_heads,ffn_hidden,vocab,seq_len,global_batch,micro_batch,tp,pp,dp,cp,ep,vpp,sequence_parallel,zero_stage,recompute,precision,mlp_type,notes";

/// Runs of small models, by the software that their rows name.
const ROWS: [&str; 9] = [
    "A100-80GB,16,8,NVLink3+NVSwitch; 8x HDR,Megatron-LM,2021-04,4,1024,16,,4096,51200,1024,32,2,2,2,4,1,,1,no,0,full,fp16,gelu,",
    "A100-80GB,16,8,NVLink3+NVSwitch; 8x HDR,Megatron-LM,2022-05,8,1024,16,,4096,51200,1024,32,1,4,4,1,1,,2,yes,0,selective,fp16,gelu,",
    "A100-80GB,16,8,NVLink3+NVSwitch; 8x HDR,Megatron-DeepSpeed,2023-04,4,1024,16,,4096,51200,1024,32,2,2,1,8,1,,1,no,1,full,fp16,gelu,",
    "H100-80GB,8,8,NVLink4+NVSwitch,Megatron-Core,2025-04,4,1024,16,8,2816,51200,4096,16,1,2,1,2,2,,1,yes,1,none,bf16,swiglu,",
    "H100-80GB,8,8,NVLink4+NVSwitch,Megatron-Bridge/Megatron-Core,2025-11,4,1024,16,8,2816,51200,1024,16,1,2,2,2,1,,1,yes,1,none,fp8-cs,swiglu,",
    "H100-80GB,8,8,NVLink4+NVSwitch,Megatron-Core,2025-04,2,512,8,4,512,32768,512,16,1,1,1,8,1,8,1,no,1,none,bf16,moe16top2,",
    "H100-80GB,8,8,NVLink4+NVSwitch,torchtitan FSDP2,2025-07,4,1024,16,8,2816,51200,1024,16,1,2,1,4,1,,1,yes,3,full,bf16,swiglu,async TP",
    "H100-80GB,8,8,NVLink4+NVSwitch,torchtitan FSDP2,2024-11,4,1024,16,8,2816,51200,1024,16,2,1,1,8,1,,1,no,3,none,fp8,swiglu,",
    "V100-32GB,8,8,NVLink2,DeepSpeed ZeRO-3,2021-04,2,1024,16,,4096,51200,1024,16,2,1,1,8,1,,1,no,3,full,fp16,gelu,",
];

#[test]
fn plans_for_software_take_what_its_runs_are_predicted_to() {
    let rows = rows_of(&format!("{HEADER}\n{}\n", ROWS.join("\n")));
    let (compared, failures, skipped) = held(&rows);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert_eq!(compared, ROWS.len(), "{skipped:?}");
}

/// A model with latent attention, a shared expert and a dense layer, its experts over tensor and
/// data ranks, in a pipeline.
const LATENT: &str = "gpu,gpus_total,gpus_per_node,interconnect,framework,date,layers,hidden,heads,ffn_hidden,vocab,seq_len,global_batch,micro_batch,tp,pp,dp,ep,sequence_parallel,zero_stage,recompute,precision,mlp_type,q_lora_rank,kv_lora_rank,qk_nope_head_dim,qk_rope_head_dim,v_head_dim,dense_layers,dense_ffn_hidden
H100-80GB,8,8,NVLink4+NVSwitch,Megatron-Core,2025-04,4,256,4,256,4096,256,8,1,2,2,2,4,yes,1,none,bf16,moe8top2+1shared MLA,96,64,32,16,32,1,512
";

#[test]
fn latent_attention_is_planned_as_it_is_predicted() {
    let (compared, failures, skipped) = held(&rows_of(LATENT));
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert_eq!(compared, 1, "{skipped:?}");
}

#[test]
fn plans_for_software_take_what_published_runs_are_predicted_to() {
    let data = std::env::var_os("MESHWRIGHT_DATA").map(std::path::PathBuf::from);
    let (Some(data), Some(_)) = (data, std::env::var_os("RUN_SLOW_TESTS")) else {
        return;
    };
    let text = std::fs::read_to_string(data.join("published/calibration.csv")).unwrap();
    let (compared, failures, skipped) = held(&rows_of(&text));
    println!("{compared} runs compared");
    skipped.iter().for_each(|(why, n)| println!("{n}: {why}"));
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(compared > 400, "{compared}");
}

fn rows_of(text: &str) -> Vec<Row> {
    row::rows(&csv::parse(text).unwrap())
}

/// Compares every distinct run: how many were, where the two differ, and why others were not.
fn held(rows: &[Row]) -> (usize, Vec<String>, BTreeMap<String, usize>) {
    let facts = Facts::built_in();
    let mut distinct: BTreeMap<String, (&Row, Question)> = BTreeMap::new();
    let mut skipped: BTreeMap<String, usize> = BTreeMap::new();
    for row in rows {
        match question(row, &facts) {
            Ok(q) => {
                let key = format!(
                    "{:?}{:?}{:?}{:?}{:?}",
                    q.config, q.train, q.cluster, q.software, q.pins
                );
                distinct.entry(key).or_insert((row, q));
            }
            Err(e) => *skipped.entry(e.to_string()).or_default() += 1,
        }
    }
    let all: Vec<(&Row, Question)> = distinct.into_values().collect();
    let compared = all.par_iter().map(|(row, q)| compared(row, q));
    let outcomes: Vec<Outcome> = compared.collect();
    let (mut n, mut failures) = (0, Vec::new());
    for ((row, _), outcome) in all.iter().zip(outcomes) {
        match outcome {
            Outcome::Same => n += 1,
            Outcome::Differs(how) => failures.push(format!("{}: {how}", row.id())),
            Outcome::Skipped(why) => *skipped.entry(why).or_default() += 1,
        }
    }
    (n, failures, skipped)
}

enum Outcome {
    Same,
    Differs(String),
    Skipped(String),
}

fn compared(row: &Row, q: &Question) -> Outcome {
    let expected = match predicted(q) {
        Ok(p) => p,
        Err(e) => return Outcome::Skipped(e.to_string()),
    };
    let made_for = &q.made_for;
    // What the row says of its software goes over the command line, too.
    assert_eq!(
        software::parse(&made_for.to_string()).as_ref(),
        Ok(made_for)
    );
    let build = BuildOptions {
        sequence: q.train.sequence,
        dropout: q.train.dropout,
    };
    let forward = model_graph(&q.config, &build).unwrap();
    let mut pins = q.pins.clone();
    let has_experts = forward
        .ops()
        .iter()
        .any(|op| op.path.ends_with(".moe.dispatch"));
    if has_experts && !pins.iter().any(|p| p.starts_with("expert=")) {
        pins.push("expert=1".into());
    }
    let options = PlanOptions {
        pins: Pins::parse(&pins).unwrap(),
        headroom: Some(0.0),
        made_for: Some(OtherSoftware {
            made_for: made_for.clone(),
            profile: software::profile,
        }),
        ..PlanOptions::default()
    };
    let planned = match planner::plan(&forward, &q.train, &q.cluster, &options) {
        Ok(planned) => planned,
        Err(e) => return Outcome::Skipped(format!("{}: {e}", made_for.name)),
    };
    let peak = |p: &ir::plan::Prediction| p.stages.iter().map(|s| s.peak_bytes.0).max().unwrap();
    let wanted = (expected.step_time_s, expected.memory.total().0);
    let found = &planned.plan.predicted;
    let again = reread(&planned.plan);
    for (what, p) in [("planned", found), ("read again", &again)] {
        let off = (p.step_time_s.0 / wanted.0 - 1.0).abs();
        if off.is_nan() || off > TOLERANCE || peak(p) != wanted.1 {
            return Outcome::Differs(format!(
                "{what} for {made_for}: {} and {} bytes, predicted {} and {}",
                p.step_time_s,
                peak(p),
                Seconds(wanted.0),
                wanted.1
            ));
        }
    }
    match other_layout(&forward, row, q, made_for) {
        None => Outcome::Same,
        Some(words) => Outcome::Differs(words),
    }
}

/// The predicted step of a plan when it is read from its document and priced by what that says.
fn reread(plan: &Plan) -> ir::plan::Prediction {
    let text = serde_json::to_string(plan).unwrap();
    let plan: Plan = serde_json::from_str(&text).unwrap();
    let made_for = plan.made_for.as_ref().unwrap();
    let profile = software::profile(made_for, &plan.cluster, &plan.train).unwrap();
    let forward = ir::text::parse(&plan.graph).unwrap();
    let training = plan.training_graph(&forward).unwrap();
    let program = lowering::lower_training(&plan, &training).unwrap();
    let options = SimulateOptions::new(StepWork::of(&training, &plan.train));
    let priced = priced(&program, &plan.cluster, &profile.software, &options).unwrap();
    priced.simulation.prediction
}

/// Says how the pins of the row differ from those of the point with its degrees, where both have
/// some: layouts of tensors, stages, orders. What is recomputed a row says in more ways, and a recipe
/// may have stages that the software does not make by itself.
fn other_layout(forward: &Graph, row: &Row, q: &Question, made_for: &MadeFor) -> Option<String> {
    let framework = Framework::named(&made_for.name)?;
    let facts = Facts::built_in();
    let profile = facts.profile(made_for, None, q.train.precision).unwrap();
    let model = Model::of(forward)?;
    let value = |key: &str| {
        let key = format!("{key}=");
        let found = q.pins.iter().find_map(|p| p.strip_prefix(&key));
        found.and_then(|v| v.parse::<u64>().ok())
    };
    let n = |key: &str| value(key).unwrap_or(1) as u32;
    let mut pinned: BTreeSet<String> = q.pins.iter().cloned().collect();
    let splits = |p: &String| p.starts_with("spec:h.*.residual_1=") && p.contains("tensor");
    let tensor_experts = |p: &String| p.starts_with("spec:h.*.moe.gate=[tensor");
    let point = Point {
        data: n("data"),
        tensor: n("tensor"),
        context: n("context"),
        expert: match (n("expert"), pinned.iter().any(tensor_experts)) {
            (1, false) => 1,
            (among, _) => among * n("tensor"),
        },
        pipeline: n("pipeline"),
        virtual_stages: n("virtual"),
        zero: value("zero").unwrap_or(0) as u8,
        copies: 1,
        micro_batch: value("microbatch").unwrap_or(1) / value("data").unwrap_or(1),
        sequence_parallel: pinned.iter().any(splits),
        recompute: Recomputation::None,
        schedule: ScheduleKind::OneFOneB,
    };
    let zigzag = pinned.contains("context_order=zigzag");
    let ranks = profile.framework.vocabulary().context;
    let ranks = ranks.unwrap_or(frameworks::ContextRanks::Tokens);
    let mut own: BTreeSet<String> = point
        .pins(&model, profile.split, (ranks, zigzag))
        .into_iter()
        .collect();
    let stages = u64::from(point.pipeline * point.virtual_stages);
    let of_recipe = facts.recipes.layout(row, model.blocks, stages).is_some();
    // A row's layer of experts has no norms between its dense parts to pin, nor heads to cut.
    for pins in [&mut pinned, &mut own] {
        pins.retain(|p| !p.starts_with("recompute"));
        pins.retain(|p| !(of_recipe && p.starts_with("split=")));
    }
    let differs: Vec<&String> = pinned.symmetric_difference(&own).collect();
    (!differs.is_empty()).then(|| format!("{}: pins differ: {differs:?}", framework.title()))
}
