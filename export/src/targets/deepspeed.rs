//! DeepSpeed: its JSON configuration.
//!
//! Keys are those of `deepspeed/runtime/config.py` and `deepspeed/runtime/zero/config.py`, at
//! 0.19; its config class accepts what is written (docs/export.md). Learning rates belong to runs,
//! so no optimizer is named; degrees of pipelines and experts are arguments of the code that builds
//! the model, and are listed.

use super::{Choices, Missing, Target, Written, block_name, degrees};
use crate::recompute::Recomputed;
use crate::summary::{ContextAttention, Degrees, Summary};
use crate::{ExportError, File, Read};
use ir::Precision;
use ir::offload::TensorClass;
use ir::program::Space;
use serde_json::{Map, Value, json};

const TARGET: Target = Target::DeepSpeed;

pub(super) fn write(read: &Read<'_>) -> Result<Written, ExportError> {
    let summary = &read.summary;
    let d = degrees(summary, TARGET)?;
    let mut missing = Missing::default();
    let mut choices = Choices::of(summary);
    // How tensor ranks split the model is not DeepSpeed's to say.
    missing.add_deviations(summary, super::placed_elsewhere(d));
    let config = config(summary, d, &mut choices, &mut missing);
    in_code(summary, d, &mut choices, &mut missing);
    missing.add_optimizer(summary, "hands it to deepspeed.initialize");
    let text = serde_json::to_string_pretty(&config).map_err(ExportError::plan)? + "\n";
    Ok(Written {
        files: vec![File {
            name: "ds_config.json",
            text,
        }],
        not_expressed: missing.list(),
        choices,
    })
}

/// The keys that DeepSpeed's own configuration and accelerate's share.
pub(super) fn zero_level(d: &Degrees, choices: &mut Choices, missing: &mut Missing) -> u8 {
    let vocabulary = TARGET.framework().vocabulary();
    let level = vocabulary.nearest_zero(d.zero, d.pipeline, d.context);
    if level != d.zero {
        missing.add(
            "parameters and gradients",
            format!("ZeRO level {}", d.zero),
            format!("ZeRO level {level}, the highest that goes with a pipeline"),
        );
    }
    choices.zero = level;
    // ZeRO splits over the ranks of sequence_parallel_size too (`seq_data_parallel_group`).
    if level > 0 && d.has_copies() {
        let all = match d.context {
            1 => "data ranks",
            _ => "data and context ranks",
        };
        missing.add(
            "states",
            format!(
                "split over {} of the {} {all}, with copies",
                d.shards(),
                d.data * d.context
            ),
            format!("split over all {all}"),
        );
    }
    level
}

fn config(s: &Summary, d: &Degrees, choices: &mut Choices, missing: &mut Missing) -> Value {
    let level = zero_level(d, choices, missing);
    let mut zero = json!({ "stage": level });
    if level > 0 {
        zero["overlap_comm"] = json!(true);
        zero["contiguous_gradients"] = json!(true);
    }
    offload(s, level, &mut zero, missing);
    let mut config = Map::new();
    let mut set = |key: &str, value: Value| {
        config.insert(key.to_string(), value);
    };
    set("train_batch_size", json!(s.global_batch));
    set("train_micro_batch_size_per_gpu", json!(d.micro_batch));
    set("gradient_accumulation_steps", json!(s.accumulation));
    set("gradient_clipping", json!(s.clip_norm.unwrap_or(0.0)));
    set("zero_optimization", zero);
    match s.precision {
        Precision::F32 => {}
        Precision::Bf16 => {
            set("bf16", json!({ "enabled": true }));
            set("data_types", json!({ "grad_accum_dtype": "fp32" }));
        }
        Precision::F16 => set(
            "fp16",
            json!({
                "enabled": true,
                "loss_scale": 0,
                "initial_scale_power": ir::training::LOSS_SCALE_UNIT.log2() as u64,
                "min_loss_scale": ir::training::LOWEST_LOSS_SCALE as u64,
            }),
        ),
    }
    if choices.recompute.iter().any(|r| *r != Recomputed::None) {
        let to_host = s.offload.contains_key(&TensorClass::Activations);
        set(
            "activation_checkpointing",
            json!({
                "partition_activations": d.sequence_parallel && d.tensor > 1,
                "cpu_checkpointing": to_host,
            }),
        );
    }
    if d.pipeline > 1 {
        let full = choices.uniform() == Some(&Recomputed::Full);
        set(
            "pipeline",
            json!({
                "stages": d.pipeline,
                "partition": "uniform",
                "activation_checkpoint_interval": u8::from(full),
            }),
        );
    }
    if d.tensor > 1 && d.pipeline == 1 && level < 3 {
        set("tensor_parallel", json!({ "autotp_size": d.tensor }));
    }
    if d.context > 1 {
        set("sequence_parallel_size", json!(d.context));
    }
    Value::Object(config)
}

/// Where tensors rest, as ZeRO has it.
fn offload(s: &Summary, level: u8, zero: &mut Value, missing: &mut Missing) {
    for (class, space) in &s.offload {
        let key = match class {
            TensorClass::Optimizer if level >= 1 => "offload_optimizer",
            TensorClass::Parameters if level == 3 => "offload_param",
            TensorClass::Activations => continue,
            _ => {
                missing.add(
                    class.words(),
                    format!(
                        "rest in another memory ({}) at ZeRO level {level}",
                        space.name()
                    ),
                    "rest on the device, which takes more of its memory",
                );
                continue;
            }
        };
        zero[key] = match space {
            Space::File => json!({ "device": "nvme", "nvme_path": "/local_nvme" }),
            _ => json!({ "device": "cpu", "pin_memory": true }),
        };
    }
}

/// Lists what the code that builds the model says, not the configuration.
fn in_code(s: &Summary, d: &Degrees, choices: &mut Choices, missing: &mut Missing) {
    if d.pipeline > 1 {
        pipeline(s, d, choices, missing);
    }
    if d.tensor > 1 && (d.pipeline > 1 || choices.zero == 3) {
        missing.add(
            "the model",
            format!("{} tensor ranks", d.tensor),
            "nothing: the model's code splits it, and hands its groups over as mpu (Megatron-DeepSpeed)",
        );
    }
    if d.sequence_parallel && d.tensor > 1 {
        missing.add(
            "norms and residuals",
            "split along the sequence over the tensor ranks",
            "whole on each, unless the model's code splits them: tensor_parallel has no such option",
        );
    }
    if d.context > 1 {
        let words = match d.context_attention {
            Some(ContextAttention::Ulysses) => None,
            Some(ContextAttention::Ring) => Some("keys and values go around"),
            _ => Some("keys and values are gathered"),
        };
        if let Some(words) = words {
            missing.add(
                "attention over context ranks",
                words,
                "tokens are exchanged for heads (Ulysses), with sequence_parallel_size",
            );
        }
    }
    if d.expert > 1 {
        missing.add(
            "experts",
            format!("split over {} ranks", d.expert),
            format!(
                "nothing: it is ep_size={} of each deepspeed.moe.layer.MoE",
                d.expert
            ),
        );
    }
    let full = choices.uniform() == Some(&Recomputed::Full) && d.pipeline > 1;
    if !full {
        for (first, n, what) in super::recompute_runs(&s.recompute) {
            if *what != Recomputed::None {
                missing.add(
                    format!("recomputation of {}", block_name(first, n)),
                    what.words(),
                    "nothing: the model's code calls deepspeed.checkpointing.checkpoint there",
                );
            }
        }
    }
}

fn pipeline(s: &Summary, d: &Degrees, choices: &mut Choices, missing: &mut Missing) {
    let has = choices.nearest_schedule(s, &TARGET.framework().vocabulary());
    match s.schedule {
        _ if has => {}
        other => {
            choices.keeps_stages &= d.virtual_stages == 1;
            missing.add(
                "the schedule",
                match d.virtual_stages {
                    1 => other.name().to_string(),
                    v => format!("{}, {v} stages on each mesh", other.name()),
                },
                "1f1b with one stage on each, DeepSpeed's only schedule",
            );
        }
    }
    let stages = s.stages.as_deref().unwrap_or_default();
    let counts: Vec<String> = stages.iter().map(|s| s.blocks.1.to_string()).collect();
    missing.add(
        "the pipeline",
        format!("{} stages of {} blocks", stages.len(), counts.join("/")),
        format!(
            "`stages`, which the engine only reports: the model's code says PipelineModule(num_stages={})",
            d.pipeline
        ),
    );
}
