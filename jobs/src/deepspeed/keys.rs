//! The keys of a DeepSpeed file: which of them were looked at, and what the others do.

use crate::arguments::unknown;
use crate::{JobError, Note, NoteKind, closest, error};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};

/// Keys that change time or memory, and what they do.
const NOT_MODELLED: &[(&str, &str)] = &[
    (
        "zero_optimization.offload_optimizer",
        "optimizer states rest on the host or on disks: from stage 1 on their memory is counted there; the longer update is not",
    ),
    (
        "zero_optimization.offload_param",
        "parameters rest on the host or on disks: at stage 3 their memory is counted there; the traffic is not",
    ),
    (
        "zero_optimization.cpu_offload",
        "optimizer states rest on the host: from stage 1 on their memory is counted there; the longer update is not",
    ),
    (
        "zero_optimization.cpu_offload_params",
        "parameters rest on the host: at stage 3 their memory is counted there; the traffic is not",
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
    /// The line of each key, by its path.
    lines: BTreeMap<String, usize>,
    leaves: BTreeMap<String, &'a Value>,
    seen: std::cell::RefCell<BTreeSet<String>>,
    /// Paths that were asked for, whether they are there or not: those that are known.
    asked: std::cell::RefCell<BTreeSet<String>>,
}

impl<'a> Keys<'a> {
    pub fn new(file: &'a str, text: &'a str, root: &'a Map<String, Value>) -> Keys<'a> {
        let mut leaves = BTreeMap::new();
        collect("", root, &mut leaves);
        Keys {
            file,
            lines: lines(text),
            leaves,
            seen: Default::default(),
            asked: Default::default(),
        }
    }

    pub fn at(&self, path: &str) -> Option<&'a Value> {
        self.asked.borrow_mut().insert(path.to_string());
        let found = self.leaves.get(path)?;
        self.seen.borrow_mut().insert(path.to_string());
        Some(found)
    }

    /// The value at a path, which does not count as looked at.
    pub fn peek(&self, path: &str) -> Option<&'a Value> {
        self.leaves.get(path).copied()
    }

    pub fn line(&self, path: &str) -> Option<usize> {
        self.lines.get(path).copied()
    }

    /// A known key that one may have been meant for.
    fn meant(&self, path: &str) -> Option<String> {
        let asked = self.asked.borrow();
        let listed = NOT_MODELLED.iter().map(|(n, _)| *n);
        let listed = listed.chain(NO_EFFECT.iter().copied());
        let known = asked.iter().map(String::as_str).chain(listed);
        let known = known.filter(|n| !n.ends_with('.') && !self.leaves.contains_key(*n));
        closest(path, known).map(String::from)
    }

    pub fn wrong(
        &self,
        path: &str,
        problem: impl Into<String>,
        help: impl Into<String>,
    ) -> JobError {
        error(self.file, self.line(path), problem, help)
    }

    /// The settings that were read, with those of what rests elsewhere.
    pub fn settings(&self) -> BTreeMap<String, String> {
        let seen = self.seen.borrow();
        let rests = [
            "zero_optimization.offload_",
            "zero_optimization.cpu_offload",
        ];
        let is_read = |k: &String| seen.contains(k) || rests.iter().any(|r| k.starts_with(r));
        let leaves = self.leaves.iter();
        let said = leaves.filter(|(k, v)| is_read(k) && !v.is_object());
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
            let above = ancestors(path).any(|p| listed(p) || seen.contains(p));
            let inside = parent.is_some() && (above || listed(top));
            // One that is known for keys in it, or has some that are named themselves.
            let has_keys = value.as_object().is_some_and(|keys| !keys.is_empty());
            let is_known = self.asked.borrow().iter().any(|a| is_inside(a, path));
            let is_known = is_known || NO_EFFECT.iter().any(|n| is_inside(n, path));
            let of_keys = value.is_object() && !listed(path) && (has_keys || is_known);
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
                let words = unknown(self.meant(path).as_deref());
                notes.push(note(NoteKind::Unknown, &words));
            }
        }
        notes
    }
}

/// Whether a path leads into what another names.
fn is_inside(path: &str, outer: &str) -> bool {
    path.strip_prefix(outer)
        .is_some_and(|rest| rest.starts_with('.'))
}

/// The paths around a path, the nearest first.
fn ancestors(path: &str) -> impl Iterator<Item = &str> {
    let places = path.rmatch_indices('.');
    places.map(|(at, _)| &path[..at])
}

/// Values by their paths, those of objects too.
fn collect<'a>(path: &str, of: &'a Map<String, Value>, leaves: &mut BTreeMap<String, &'a Value>) {
    for (key, value) in of {
        let path = match path {
            "" => key.clone(),
            path => format!("{path}.{key}"),
        };
        if let Value::Object(inner) = value {
            collect(&path, inner, leaves);
        }
        leaves.insert(path, value);
    }
}

/// The lines of the keys of a text that is JSON, by their paths. A text in quotes is a key where a
/// colon stands behind it.
fn lines(text: &str) -> BTreeMap<String, usize> {
    let mut found = BTreeMap::new();
    // The keys around the place; none of an array's, or before an object's first key.
    let mut around: Vec<Option<String>> = Vec::new();
    let mut chars = text.char_indices().peekable();
    let mut line = 1;
    while let Some((at, c)) = chars.next() {
        match c {
            '\n' => line += 1,
            '{' | '[' => around.push(None),
            '}' | ']' => drop(around.pop()),
            '"' => {
                let mut end = at + 1;
                while let Some((i, c)) = chars.next() {
                    end = i;
                    match c {
                        '\\' => drop(chars.next()),
                        '"' => break,
                        _ => {}
                    }
                }
                let behind = text.get(end + 1..).unwrap_or_default();
                let Some(name) = text
                    .get(at + 1..end)
                    .filter(|_| behind.trim_start().starts_with(':'))
                else {
                    continue;
                };
                if let Some(own) = around.last_mut() {
                    *own = Some(name.to_string());
                }
                let path: Vec<&str> = around.iter().flatten().map(String::as_str).collect();
                found.entry(path.join(".")).or_insert(line);
            }
            _ => {}
        }
    }
    found
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
