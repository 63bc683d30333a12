//! DeepSpeed's configuration in JSON. It says how states and batches lie; the model, its sequences and
//! what it recomputes are in the script that is started with it.

use crate::arguments::{Arguments, assumed};
use crate::launch::World;
use crate::megatron::given_count;
use crate::{Given, Job, JobError, Model, Note, NoteKind, Reading, Recompute, Split, error};
use frameworks::{Framework, Recomputation};
use ir::plan::ScheduleKind;
use ir::{Optimizer, Precision};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};

/// What stands beside the file.
#[derive(Default)]
pub(crate) struct Beside {
    /// Hosts and devices of the launcher.
    pub world: World,
    /// Arguments of the script that is started, as Hugging Face's Trainer has them.
    pub trainer: Option<Arguments>,
}

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

/// The attention kernel that models have today: PyTorch's scaled_dot_product_attention.
const ATTENTION: &str = "attention=flash-2";

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

/// The ZeRO level that a file asks for.
pub(crate) fn zero_stage(file: &str, text: &str) -> Result<u8, JobError> {
    let root = parsed(file, text)?;
    let keys = Keys::new(file, text, &root);
    stage(&keys)
}

fn stage(keys: &Keys<'_>) -> Result<u8, JobError> {
    match keys.at("zero_optimization.stage") {
        None => Ok(0),
        Some(value) => match value.as_u64() {
            Some(n @ 0..=3) => Ok(n as u8),
            _ => Err(keys.wrong(
                "zero_optimization.stage",
                format!("the ZeRO stage is {value}, expected 0 to 3"),
                "correct it in the file",
            )),
        },
    }
}

/// Reads a configuration.
pub(crate) fn read(
    file: &str,
    text: &str,
    given: &Given,
    beside: &Beside,
) -> Result<Reading, JobError> {
    let root = parsed(file, text)?;
    let keys = Keys::new(file, text, &root);
    let known = [
        "zero_optimization",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "bf16",
        "fp16",
        "optimizer",
        "gradient_accumulation_steps",
    ];
    if !known.iter().any(|k| root.contains_key(*k)) {
        return Err(error(
            file,
            None,
            "it is JSON, but no configuration of DeepSpeed: it has neither `zero_optimization` nor `train_batch_size`",
            "a DeepSpeed file is what --deepspeed_config or deepspeed.initialize(config=..) takes",
        ));
    }
    let mut notes = Vec::new();
    let trainer = beside.trainer.as_ref();
    let of_trainer = |names: &[&str]| -> Result<Option<u64>, JobError> {
        for name in names {
            if let Some(n) = trainer.map_or(Ok(None), |t| t.count(name))? {
                return Ok(Some(n));
            }
        }
        Ok(None)
    };
    let count = |key: &str, names: &[&str]| -> Result<Option<u64>, JobError> {
        let set = given_count(given, &[key])?;
        match keys.at(key) {
            _ if set.is_some() => Ok(set),
            None => of_trainer(names),
            Some(Value::String(s)) if s == "auto" => match of_trainer(names)? {
                Some(n) => Ok(Some(n)),
                None => Err(keys.wrong(
                    key,
                    format!("`{key}` is \"auto\", which the training script fills in"),
                    format!("give it as --set {key}=N"),
                )),
            },
            Some(value) => match value.as_u64().filter(|n| (1..=crate::MOST).contains(n)) {
                Some(n) => Ok(Some(n)),
                None => Err(keys.wrong(
                    key,
                    format!("`{key}` is {value}, expected a whole number from 1"),
                    "correct it in the file",
                )),
            },
        }
    };
    let all = match keys.at("train_batch_size") {
        // With two of the three the third follows.
        Some(Value::String(s))
            if s == "auto" && !given.variables.contains_key("train_batch_size") =>
        {
            None
        }
        _ => count("train_batch_size", &[])?,
    };
    let micro = count(
        "train_micro_batch_size_per_gpu",
        &[
            "per-device-train-batch-size",
            "micro-batch-size",
            "batch-size",
        ],
    )?;
    let steps = count(
        "gradient_accumulation_steps",
        &["gradient-accumulation-steps"],
    )?;
    let micro_batch = match (micro, all, steps) {
        (Some(n), _, _) => n,
        (None, Some(all), steps) => {
            let ranks = beside.world.devices().map(u64::from).ok_or_else(|| {
                keys.wrong("train_batch_size", "the samples of a rank follow from the number of ranks, which the file does not say", "give them as --set train_micro_batch_size_per_gpu=N")
            })?;
            let each = ranks.saturating_mul(steps.unwrap_or(1)).max(1);
            match all.is_multiple_of(each) && all >= each {
                true => all / each,
                false => return Err(keys.wrong("train_batch_size", format!("a batch of {all} does not divide over {ranks} ranks and {} accumulation steps", steps.unwrap_or(1)), "correct it in the file")),
            }
        }
        (None, None, _) => {
            return Err(error(
                file,
                None,
                "neither `train_micro_batch_size_per_gpu` nor `train_batch_size` is there",
                "DeepSpeed refuses it, too: add one of them, or give --set train_micro_batch_size_per_gpu=N",
            ));
        }
    };
    let enabled = |key: &str| -> bool {
        match keys.at(key) {
            Some(Value::Bool(on)) => *on,
            Some(Value::String(s)) if s == "auto" => {
                trainer.is_some_and(|t| t.switch(key.split('.').next().unwrap_or(key)))
            }
            _ => false,
        }
    };
    let (bf16, bfloat16, fp16) = (
        enabled("bf16.enabled"),
        enabled("bfloat16.enabled"),
        enabled("fp16.enabled"),
    );
    let precision = match (bf16 || bfloat16, fp16) {
        (true, _) => Precision::Bf16,
        (_, true) => Precision::F16,
        _ => Precision::F32,
    };
    let zero = stage(&keys)?;
    let checkpoints = trainer.is_some_and(|t| t.switch("gradient-checkpointing"));
    let set = given
        .variables
        .get("gradient_checkpointing")
        .map(String::as_str);
    let recompute = match (set, checkpoints) {
        (Some("true" | "full" | "1"), _) | (None, true) => Recomputation::Full,
        _ => Recomputation::None,
    };
    if set.is_none() && !checkpoints {
        let (value, words) = match keys.at("activation_checkpointing") {
            Some(_) => (
                "false",
                "the file says how checkpoints lie, but the model's code whether there are any; --set gradient_checkpointing=true says that all blocks are recomputed",
            ),
            None => (
                "false",
                "the model's code says it; --set gradient_checkpointing=true says that all blocks are recomputed",
            ),
        };
        notes.push(assumed("gradient checkpointing", value, words));
    }
    if precision == Precision::Bf16 && keys.at("data_types").is_none() && zero > 0 {
        notes.push(Note {
            kind: NoteKind::NotModelled,
            name: "data_types.grad_accum_dtype (absent)".into(),
            value: None,
            line: None,
            words: "gradients are then summed in bf16; figures are of sums in f32".into(),
        });
    }
    notes.push(assumed(
        "attention",
        "fused",
        "runs of this version computed it unfused, which models of today do not; --for deepspeed says that the job does",
    ));
    let optimizer = optimizer(&keys, &mut notes)?;
    let clip = match keys.at("gradient_clipping") {
        Some(Value::Number(n)) => n.as_f64().filter(|x| *x > 0.0),
        Some(_) => Some(1.0),
        None => None,
    };
    let mut settings = keys.settings();
    if let Some(trainer) = trainer {
        for name in [
            "model-name-or-path",
            "max-length",
            "model-max-length",
            "max-seq-length",
            "block-size",
            "cutoff-len",
        ] {
            trainer.has_any(&[name]);
        }
        settings.extend(trainer.settings());
    }
    let lengths = [
        "max-seq-length",
        "model-max-length",
        "block-size",
        "cutoff-len",
        "max-length",
        "seq-length",
    ];
    let sequence = match given.sequence {
        Some(n) => Some(n),
        None => of_trainer(&lengths)?,
    };
    notes.extend(keys.rest());
    if let Some(trainer) = trainer {
        // Whatever a script of the user's own takes is not known here.
        notes.extend(trainer.rest(
            &[
                ("deepspeed*", "the file that is read here"),
                ("torch-compile*", "the model is compiled"),
                ("use-flash-attn*", "an attention kernel"),
                ("attn-implementation", "an attention kernel"),
                ("lora*", "adapters in place of all parameters"),
                ("use-lora", "adapters in place of all parameters"),
                ("optim", "another optimizer than AdamW, unless it is that"),
            ],
            TRAINER,
        ));
    }
    Ok(Reading {
        form: "a DeepSpeed configuration".into(),
        files: Vec::new(),
        job: Job {
            framework: Framework::DeepSpeed,
            version: None,
            options: Vec::new(),
            usual: vec![ATTENTION.to_string()],
            model: Model::NotStated("a DeepSpeed file does not say its model".into()),
            vocab_multiple: 1,
            world: beside.world,
            sequence,
            global_batch: all,
            accumulation: steps,
            micro_batch,
            tensor: 1,
            context: 1,
            expert: 1,
            pipeline: 1,
            virtual_stages: 1,
            schedule: ScheduleKind::OneFOneB,
            split: Split::Own,
            data: beside.world.devices(),
            zero,
            sequence_parallel: false,
            recompute: Recompute::All(recompute),
            precision,
            optimizer,
            clip_norm: clip,
            dropout: 0.0,
        },
        settings,
        notes,
        measured: None,
    })
}

/// Arguments of Hugging Face's Trainer that change nothing of a step.
const TRAINER: &[&str] = &[
    "model-name-or-path",
    "output-dir",
    "do-*",
    "num-train-epochs",
    "max-steps",
    "learning-rate",
    "lr-*",
    "warmup-*",
    "weight-decay",
    "logging-*",
    "save-*",
    "eval-*",
    "evaluation-*",
    "report-to",
    "run-name",
    "dataset*",
    "data-*",
    "train-file",
    "validation-file",
    "seed",
    "overwrite-*",
    "preprocessing-*",
    "dataloader-*",
    "remove-unused-columns",
    "local-rank",
    "tokenizer*",
    "per-device-eval-batch-size",
    "ddp-timeout",
    "adam-*",
    "max-grad-norm",
    "push-to-hub*",
    "template",
    "stage",
    "finetuning-type",
];

fn optimizer(keys: &Keys<'_>, notes: &mut Vec<Note>) -> Result<Optimizer, JobError> {
    let kind = keys
        .at("optimizer.type")
        .and_then(Value::as_str)
        .map(str::to_lowercase);
    let number = |key: &str| {
        keys.at(&format!("optimizer.params.{key}"))
            .and_then(Value::as_f64)
    };
    let betas = keys.at("optimizer.params.betas").and_then(Value::as_array);
    let beta = |i: usize| betas.and_then(|b| b.get(i)).and_then(Value::as_f64);
    let sane = |x: Option<f64>| x.filter(|x| x.is_finite() && (0.0..1.0).contains(x));
    let adam = Optimizer::default().with_adamw(
        sane(beta(0)).or(Some(0.9)),
        sane(beta(1)).or(Some(0.999)),
        sane(number("eps")).filter(|e| *e > 0.0),
        sane(number("weight_decay")).or(Some(0.01)),
    );
    keys.at("optimizer.params");
    match kind.as_deref() {
        None => {
            notes.push(assumed(
                "optimizer",
                "AdamW",
                "the file does not say it, so the script makes one",
            ));
            Ok(adam)
        }
        Some("adam" | "adamw" | "fusedadam" | "deepspeedcpuadam" | "torch_adam") => Ok(adam),
        Some("sgd") => Ok(Optimizer::Sgd {
            momentum: sane(number("momentum")).unwrap_or(0.0),
            weight_decay: sane(number("weight_decay")).unwrap_or(0.0),
        }),
        Some(other) => {
            notes.push(Note {
                kind: NoteKind::NotModelled,
                name: "optimizer.type".into(),
                value: Some(other.into()),
                line: keys.line("optimizer.type"),
                words: "its states and its update are taken for AdamW's".into(),
            });
            Ok(adam)
        }
    }
}

fn parsed(file: &str, text: &str) -> Result<Map<String, Value>, JobError> {
    let value: Value = serde_json::from_str(text).map_err(|e| {
        let said = e.to_string();
        let said = said
            .split(" at line ")
            .next()
            .unwrap_or_default()
            .to_string();
        error(
            file,
            Some(e.line()),
            format!("column {}: {said}", e.column()),
            "the file is no JSON: correct it there",
        )
    })?;
    match value {
        Value::Object(map) => Ok(map),
        _ => Err(error(
            file,
            None,
            "it is JSON, but no object",
            "a DeepSpeed file is an object of keys",
        )),
    }
}

/// The keys of a file by their paths, and which of them were looked at.
struct Keys<'a> {
    file: &'a str,
    text: &'a str,
    leaves: BTreeMap<String, &'a Value>,
    seen: std::cell::RefCell<BTreeSet<String>>,
}

impl<'a> Keys<'a> {
    fn new(file: &'a str, text: &'a str, root: &'a Map<String, Value>) -> Keys<'a> {
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

    fn at(&self, path: &str) -> Option<&'a Value> {
        let found = self.leaves.get(path)?;
        self.seen.borrow_mut().insert(path.to_string());
        Some(found)
    }

    fn line(&self, path: &str) -> Option<usize> {
        let name = format!("\"{}\"", path.rsplit('.').next().unwrap_or(path));
        self.text
            .lines()
            .position(|l| l.contains(&name))
            .map(|i| i + 1)
    }

    fn wrong(&self, path: &str, problem: impl Into<String>, help: impl Into<String>) -> JobError {
        error(self.file, self.line(path), problem, help)
    }

    fn settings(&self) -> BTreeMap<String, String> {
        let seen = self.seen.borrow();
        let said = self
            .leaves
            .iter()
            .filter(|(k, v)| seen.contains(*k) && !v.is_object());
        said.map(|(k, v)| (k.clone(), shown(v))).collect()
    }

    fn rest(&self) -> Vec<Note> {
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
