//! The keys of a torchtitan file: their places, those that are not read, by what they do, and what the
//! command line puts in their place.

use crate::arguments::{Argument, Arguments};
use crate::{Note, NoteKind};
use std::collections::BTreeMap;

/// Keys that change time or memory, and what they do.
const NOT_MODELLED: &[(&str, &str)] = &[
    (
        "training.enable-cpu-offload",
        "parameters, gradients and states rest on the host: their memory is counted there, and the traffic is not",
    ),
    ("training.dtype", "the type of parameters and states"),
    (
        "training.mixed-precision-reduce",
        "the type in which gradients travel; figures are of f32",
    ),
    ("training.gc-*", "how often Python collects garbage"),
    (
        "parallelism.enable-compiled-autograd",
        "the backward pass is compiled as one graph",
    ),
    (
        "parallelism.disable-loss-parallel",
        "logits are gathered over tensor ranks for the loss",
    ),
    (
        "parallelism.pipeline-parallel-expert-parallel-overlap",
        "tokens travel beside another microbatch's passes",
    ),
    (
        "parallelism.expert-parallel-comm-backend",
        "how tokens travel to experts",
    ),
    (
        "parallelism.pipeline-parallel-schedule-csv",
        "an order of passes of the user's own",
    ),
    ("parallelism.fsdp-*", "how parameters are gathered"),
    (
        "activation-checkpoint.per-op-sac-*",
        "which matmuls are kept",
    ),
    (
        "activation-checkpoint.early-stop",
        "recomputation ends with the last value that is needed",
    ),
    (
        "activation-checkpoint.memory-budget",
        "the compiler chooses what is recomputed",
    ),
    (
        "activation-checkpoint.visualize-*",
        "a picture of what the compiler chose",
    ),
    (
        "activation-checkpoint.preserve-rng-state",
        "states of random numbers are kept",
    ),
    (
        "activation-checkpoint.determinism-check",
        "recomputed values are compared",
    ),
    (
        "activation-checkpoint.debug",
        "recomputed values are compared",
    ),
    ("compile.backend", "which compiler"),
    (
        "quantize.*",
        "another number format than those that are read",
    ),
    ("model.converters", "changes of the model"),
    ("float8.*", "how operands are scaled"),
    ("mx.*", "how operands are scaled"),
    (
        "optimizer.implementation",
        "how the update is made; figures are of a fused one",
    ),
    (
        "optimizer.early-step-in-backward",
        "updates begin in the backward pass: less memory",
    ),
    (
        "fault-tolerance.*",
        "replicas that may fail, which send gradients otherwise",
    ),
    ("experimental.*", "features that no published run shows"),
    (
        "memory-estimation.*",
        "no training, but an estimate of its memory",
    ),
    ("comm.*", "limits of time, and a trace of collectives"),
    ("debug.deterministic*", "slower kernels with equal results"),
    (
        "debug.batch-invariant*",
        "slower kernels with equal results",
    ),
];

/// Keys that change nothing of a step.
const NO_EFFECT: &[&str] = &[
    "job.*",
    "profiling.*",
    "metrics.*",
    "checkpoint.*",
    "lr-scheduler.*",
    "validation.*",
    "debug.seed",
    "debug.moe-force-load-balance",
    "training.steps",
    "training.dataset*",
    "training.seed",
    "training.max-norm",
    "training.debug-moe-force-load-balance",
    "optimizer.lr",
    "model.hf-assets-path",
    "model.tokenizer-path",
    "model.print-after-conversion",
    "experimental.custom-import",
    "experimental.custom-args-module",
];

/// Notes on the keys that were not read. `converters` are the parts of `model.converters`: settings of a
/// number format that is none of them change nothing.
pub(super) fn rest(args: &Arguments, converters: &str) -> Vec<Note> {
    let notes = args.rest(NOT_MODELLED, NO_EFFECT).into_iter();
    let settled = notes.map(|mut n| {
        let unused = FORMATS.iter().any(|(section, converter)| {
            n.name.starts_with(section) && !converters.contains(converter)
        });
        let is_off = n
            .value
            .as_deref()
            .is_some_and(|v| matches!(v, "False" | ""));
        if n.kind == NoteKind::NotModelled && (unused || is_off) {
            n.kind = NoteKind::NoEffect;
            n.words = match is_off {
                true => "it is switched off".into(),
                false => "no part of model.converters uses it".into(),
            };
        }
        n.name = toml_name(&n.name);
        n
    });
    settled.collect()
}

/// Sections of number formats, and the converter that reads each.
const FORMATS: [(&str, &str); 4] = [
    ("float8.", "float8"),
    ("mx.", "mx"),
    ("quantize.linear.float8.", "float8"),
    ("quantize.linear.mx.", "mx"),
];

pub(super) fn toml_name(name: &str) -> String {
    name.trim_start_matches("--").replace('-', "_")
}

/// The keys of the file, `section.key`, with what the command line puts in their place.
pub(super) fn arguments(
    file: &str,
    text: &str,
    table: &toml::Table,
    overrides: Option<&Arguments>,
) -> Arguments {
    let mut section = String::new();
    let mut lines: BTreeMap<String, usize> = BTreeMap::new();
    for (i, line) in text.lines().enumerate() {
        let line = line.trim();
        if let Some(name) = line.strip_prefix('[').and_then(|l| l.split(']').next()) {
            let name = name.trim_start_matches('[').trim();
            section = name.replace(['"', ' '], "");
        } else if let Some((key, _)) = line.split_once('=') {
            let key = key.replace(['"', ' '], "");
            let path = match section.as_str() {
                "" => key,
                section => format!("{section}.{key}"),
            };
            lines.entry(path).or_insert(i + 1);
        }
    }
    let mut all = BTreeMap::new();
    flatten("", table, &mut all);
    let mut values: Vec<(String, Argument)> = Vec::new();
    for (key, text) in all {
        let argument = Argument {
            line: lines.get(&key).copied(),
            spelled: key.clone(),
            values: vec![text],
        };
        values.push((key.replace('_', "-"), argument));
    }
    for (key, argument) in overrides.into_iter().flat_map(Arguments::with_dots) {
        if key != "job.config-file" {
            values.push((key, argument));
        }
    }
    Arguments::of_values(file, values, false)
}

/// Values by their paths; lists of lists as `a b|c d`.
fn flatten(path: &str, table: &toml::Table, out: &mut BTreeMap<String, String>) {
    for (key, value) in table {
        let own = match path {
            "" => key.clone(),
            path => format!("{path}.{key}"),
        };
        let text = match value {
            toml::Value::Table(inner) if !inner.is_empty() => {
                flatten(&own, inner, out);
                continue;
            }
            // A section without keys is named where nothing knows it.
            toml::Value::Table(_) => String::new(),
            toml::Value::String(s) => s.clone(),
            toml::Value::Boolean(b) => if *b { "True" } else { "False" }.into(),
            toml::Value::Array(items) => {
                let one = |v: &toml::Value| match v {
                    toml::Value::String(s) => s.clone(),
                    toml::Value::Array(inner) => {
                        let words = inner.iter().filter_map(|v| v.as_str());
                        words.collect::<Vec<_>>().join(" ")
                    }
                    other => other.to_string(),
                };
                items.iter().map(one).collect::<Vec<_>>().join("|")
            }
            other => other.to_string(),
        };
        out.insert(own, text);
    }
}
