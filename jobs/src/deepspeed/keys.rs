//! The keys of a DeepSpeed file: which of them were looked at, and what the others do.

use crate::{JobError, Note, NoteKind, error};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};

/// Keys that change time or memory, and what they do.
const NOT_MODELLED: &[(&str, &str)] = &[
    (
        "zero_optimization.offload_optimizer",
        "optimizer states rest on the host or on disks: less memory, and a longer update",
    ),
    (
        "zero_optimization.offload_param",
        "parameters rest on the host or on disks: less memory, and traffic",
    ),
    (
        "zero_optimization.cpu_offload",
        "optimizer states rest on the host: less memory, and a longer update",
    ),
    (
        "zero_optimization.overlap_comm",
        "whether traffic runs beside computing; figures are of runs in which it is waited for",
    ),
    (
        "zero_optimization.zero_quantized_weights",
        "parameters travel in eight bits",
    ),
    (
        "zero_optimization.zero_quantized_gradients",
        "gradients travel in narrow types",
    ),
    (
        "zero_optimization.zero_hpz_partition_size",
        "a second copy of parameters in each host: less traffic, more memory",
    ),
    (
        "zero_optimization.mics_shard_size",
        "states are split over a part of the ranks: more memory, less traffic",
    ),
    (
        "zero_optimization.mics_hierarchical_params_gather",
        "parameters are gathered in two levels",
    ),
    (
        "zero_optimization.stage3_param_persistence_threshold",
        "small parameters stay whole",
    ),
    (
        "zero_optimization.stage3_max_live_parameters",
        "how much of the parameters is gathered at a time",
    ),
    (
        "zero_optimization.stage3_max_reuse_distance",
        "how long gathered parameters are kept",
    ),
    (
        "zero_optimization.stage3_prefetch_bucket_size",
        "how far ahead parameters are gathered",
    ),
    (
        "zero_optimization.sub_group_size",
        "in what parts the update is made",
    ),
    (
        "zero_optimization.reduce_bucket_size",
        "how large the pieces are in which gradients are reduced",
    ),
    (
        "zero_optimization.allgather_bucket_size",
        "how large the pieces are in which parameters are gathered",
    ),
    (
        "zero_optimization.contiguous_gradients",
        "gradients are copied to one buffer",
    ),
    (
        "zero_optimization.reduce_scatter",
        "whether gradients are scattered or summed everywhere",
    ),
    (
        "zero_optimization.round_robin_gradients",
        "how gradients lie",
    ),
    (
        "zero_optimization.allgather_partitions",
        "how parameters are collected",
    ),
    (
        "activation_checkpointing",
        "how checkpoints lie; what is recomputed says the model's code",
    ),
    (
        "communication_data_type",
        "the type in which gradients travel",
    ),
    ("data_types", "the type in which gradients are summed"),
    ("prescale_gradients", "where gradients are scaled"),
    ("sparse_gradients", "gradients of tables travel as rows"),
    ("pipeline", "stages; the model's code says how many"),
    (
        "tensor_parallel",
        "tensor ranks, of which no run of this software was published",
    ),
    (
        "autotp_size",
        "tensor ranks, of which no run of this software was published",
    ),
    (
        "sequence_parallel_size",
        "Ulysses, of which no run of this software was published",
    ),
    ("compile", "the model is compiled"),
    ("flops_profiler", "a profiler, whose step is slower"),
    ("sparse_attention", "attention that leaves parts out"),
    ("progressive_layer_drop", "steps that leave layers out"),
    (
        "data_efficiency",
        "steps with shorter sequences or fewer tokens",
    ),
    ("curriculum_learning", "early steps have shorter sequences"),
    ("compression_training", "narrow weights"),
    ("torch_autocast", "types that PyTorch chooses"),
    ("amp", "types that apex chooses"),
    ("hybrid_engine", "training and inference in turns"),
    (
        "zero_allow_untested_optimizer",
        "an optimizer of the user's own, whose states are not known",
    ),
    ("aio", "how disks are read"),
];

/// Keys that change nothing of a step.
const NO_EFFECT: &[&str] = &[
    "steps_per_print",
    "wall_clock_breakdown",
    "dump_state",
    "memory_breakdown",
    "scheduler",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "comms_logger",
    "checkpoint",
    "eigenvalue",
    "elasticity",
    "autotuning",
    "zero_force_ds_cpu_optimizer",
    "gradient_predivide_factor",
    "disable_allgather",
    "dataloader_drop_last",
    "seed",
    "nebula",
    "use_data_before_expert_parallel_",
    "timers",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save",
    "zero_optimization.load_from_fp32_weights",
    "zero_optimization.ignore_unused_parameters",
    "zero_optimization.elastic_checkpoint",
    "zero_optimization.log_trace_cache_warnings",
    "fp16.",
    "bf16.",
    "optimizer.",
];

/// The keys of a file by their paths, and which of them were looked at.
pub(super) struct Keys<'a> {
    file: &'a str,
    text: &'a str,
    leaves: BTreeMap<String, &'a Value>,
    seen: std::cell::RefCell<BTreeSet<String>>,
}

impl<'a> Keys<'a> {
    pub fn new(file: &'a str, text: &'a str, root: &'a Map<String, Value>) -> Keys<'a> {
        let mut leaves = BTreeMap::new();
        for (key, value) in root {
            leaves.insert(key.clone(), value);
            if let Value::Object(inner) = value {
                for (name, value) in inner {
                    leaves.insert(format!("{key}.{name}"), value);
                    if let (true, Value::Object(inner)) = (name == "params", value) {
                        for (deep, value) in inner {
                            leaves.insert(format!("{key}.{name}.{deep}"), value);
                        }
                    }
                }
            }
        }
        Keys {
            file,
            text,
            leaves,
            seen: Default::default(),
        }
    }

    pub fn at(&self, path: &str) -> Option<&'a Value> {
        let found = self.leaves.get(path)?;
        self.seen.borrow_mut().insert(path.to_string());
        Some(found)
    }

    pub fn line(&self, path: &str) -> Option<usize> {
        let name = format!("\"{}\"", path.rsplit('.').next().unwrap_or(path));
        self.text
            .lines()
            .position(|l| l.contains(&name))
            .map(|i| i + 1)
    }

    pub fn wrong(
        &self,
        path: &str,
        problem: impl Into<String>,
        help: impl Into<String>,
    ) -> JobError {
        error(self.file, self.line(path), problem, help)
    }

    pub fn settings(&self) -> BTreeMap<String, String> {
        let seen = self.seen.borrow();
        let said = self
            .leaves
            .iter()
            .filter(|(k, v)| seen.contains(*k) && !v.is_object());
        said.map(|(k, v)| (k.clone(), shown(v))).collect()
    }

    pub fn rest(&self) -> Vec<Note> {
        let seen = self.seen.borrow();
        let mut notes = Vec::new();
        for (path, value) in &self.leaves {
            let parent = path.rsplit_once('.').map(|(p, _)| p);
            let listed =
                |p: &str| NOT_MODELLED.iter().any(|(n, _)| *n == p) || NO_EFFECT.contains(&p);
            // What is in a key that is listed whole belongs to it, and a key of keys is these.
            let top = path.split('.').next().unwrap_or(path);
            let inside = parent.is_some_and(|p| listed(p) || listed(top) || seen.contains(p));
            let of_keys = value.is_object() && !listed(path);
            if seen.contains(path) || inside || of_keys {
                continue;
            }
            let note = |kind, words: &str| Note {
                kind,
                name: path.clone(),
                value: Some(shown(value)),
                line: self.line(path),
                words: words.into(),
            };
            let starts = |n: &&&str| n.ends_with('.') && path.starts_with(**n) || **n == path;
            // What is switched off is as if it were not there.
            let off = matches!(value, Value::Bool(false) | Value::Null)
                || value.get("enabled") == Some(&Value::Bool(false))
                || value.get("device").is_some_and(|d| d == "none");
            if let Some((_, words)) = NOT_MODELLED.iter().find(|(n, _)| *n == path) {
                match off && path != "zero_optimization.overlap_comm" {
                    true => notes.push(note(NoteKind::NoEffect, "it is switched off")),
                    false => notes.push(note(NoteKind::NotModelled, words)),
                }
            } else if NO_EFFECT.iter().any(|n| starts(&n)) {
                notes.push(note(
                    NoteKind::NoEffect,
                    "it changes neither time nor memory of a step",
                ));
            } else {
                notes.push(note(
                    NoteKind::Unknown,
                    "it is not known here, and was not looked at",
                ));
            }
        }
        notes
    }
}

fn shown(value: &Value) -> String {
    let text = match value {
        Value::String(s) => s.clone(),
        other => other.to_string(),
    };
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}..", &text[..at]),
        None => text,
    }
}
