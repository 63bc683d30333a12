//! DeepSpeed's configuration in JSON. It says how states and batches lie; the model, its sequences and
//! what it recomputes are in the script that is started with it.

mod keys;

use crate::arguments::{Arguments, assumed};
use crate::launch::World;
use crate::megatron::given_count;
use crate::{
    Given, Job, JobError, Model, Note, NoteKind, Offload, Reading, Recompute, Split, error,
};
use frameworks::{Framework, Recomputation};
use ir::plan::ScheduleKind;
use ir::program::Space;
use ir::{Optimizer, Precision};
use keys::Keys;
use serde_json::{Map, Value};

/// Files and settings beside this one.
#[derive(Default)]
pub(crate) struct Beside {
    /// Hosts and devices of the launcher.
    pub world: World,
    /// Arguments of the script that is started, as Hugging Face's Trainer has them.
    pub trainer: Option<Arguments>,
}

/// The attention kernel that models have today: PyTorch's scaled_dot_product_attention.
const ATTENTION: &str = "attention=flash-2";

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
            if s == "auto" && given.variables.get("train_batch_size").is_none() =>
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
    let enabled = |key: &str| -> Result<bool, JobError> {
        let name = key.split('.').next().unwrap_or(key);
        match (keys.at(key), trainer) {
            (Some(Value::Bool(on)), _) => Ok(*on),
            (Some(Value::String(s)), Some(trainer)) if s == "auto" => Ok(trainer.switch(name)),
            (Some(Value::String(s)), None) if s == "auto" => match given.variables.get(name) {
                Some("true" | "True" | "1") => Ok(true),
                Some("false" | "False" | "0") => Ok(false),
                _ => Err(keys.wrong(
                    key,
                    format!("`{key}` is auto, which only the trainer's arguments decide"),
                    format!("give it as --set {name}=true or --set {name}=false"),
                )),
            },
            _ => Ok(false),
        }
    };
    let (bf16, bfloat16) = (enabled("bf16.enabled")?, enabled("bfloat16.enabled")?);
    // Where one type is on, what the other is left to decides nothing.
    let fp16 = !bf16 && !bfloat16 && enabled("fp16.enabled")?;
    let precision = match (bf16 || bfloat16, fp16) {
        (true, _) => Precision::Bf16,
        (_, true) => Precision::F16,
        _ => Precision::F32,
    };
    let zero = stage(&keys)?;
    let checkpoints = trainer.is_some_and(|t| t.switch("gradient-checkpointing"));
    let set = given.variables.get("gradient_checkpointing");
    let recompute = match (set.map(str::to_lowercase).as_deref(), checkpoints) {
        (Some("true" | "full" | "1"), _) | (None, true) => Recomputation::Full,
        (Some("false" | "none" | "0"), _) | (None, false) => Recomputation::None,
        (Some(other), _) => {
            return Err(error(
                "--set",
                None,
                format!("gradient_checkpointing is `{other}`, expected true or false"),
                "true says that all blocks are recomputed, false that none are",
            ));
        }
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
            model: model(trainer)?,
            vocab_multiple: 1,
            world: beside.world,
            sequence,
            global_batch: all,
            accumulation: steps,
            micro_batch,
            tensor: 1,
            context: 1,
            expert: 1,
            capacity: None,
            pipeline: 1,
            virtual_stages: 1,
            schedule: ScheduleKind::OneFOneB,
            split: Split::Own,
            data: beside.world.devices(),
            zero,
            copies: 1,
            sequence_parallel: false,
            recompute: Recompute::All(recompute),
            offload: offload(&keys, zero),
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

/// Arguments by which scripts of Hugging Face's Trainer name their model.
const MODEL_NAMES: [&str; 5] = [
    "model-name-or-path",
    "model-name",
    "model-id",
    "base-model",
    "pretrained-model-name-or-path",
];

/// The model that the script's arguments name.
fn model(trainer: Option<&Arguments>) -> Result<Model, JobError> {
    for argument in MODEL_NAMES {
        if let Some(name) = trainer.map_or(Ok(None), |t| t.text(argument))? {
            return Ok(Model::Named {
                name: name.to_string(),
                argument: trainer.map_or(String::new(), |t| t.spelled(argument)),
            });
        }
    }
    Ok(Model::NotStated(
        "a DeepSpeed file does not say its model".into(),
    ))
}

/// The tensors that the file moves to hosts or disks. Gradients go with the states that they update
/// from level 2 on, where a rank has its part of them alone (`runtime/zero/stage_1_and_2.py`, `stage3.py`).
fn offload(keys: &Keys<'_>, zero: u8) -> Offload {
    let device = |key: &str| {
        let settings = keys.peek(&format!("zero_optimization.{key}"))?;
        match settings.get("device")?.as_str()? {
            "cpu" => Some(Space::Host),
            "nvme" => Some(Space::File),
            _ => None,
        }
    };
    let is_on =
        |key: &str| keys.peek(&format!("zero_optimization.{key}")) == Some(&Value::Bool(true));
    let old = |key: &str| is_on(key).then_some(Space::Host);
    let optimizer = device("offload_optimizer").or(old("cpu_offload"));
    let optimizer = optimizer.filter(|_| zero > 0);
    let parameters = device("offload_param").or(old("cpu_offload_params"));
    Offload {
        optimizer,
        // Of states on disks they wait in the host's memory.
        gradients: optimizer.filter(|_| zero > 1).map(|_| Space::Host),
        parameters: parameters.filter(|_| zero == 3),
    }
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
