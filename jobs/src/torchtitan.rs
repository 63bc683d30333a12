//! torchtitan's TOML, as `torchtitan/config/job_config.py` has it at v0.2.2, the last version that reads
//! TOML files.
//!
//! * `keys`: their places, and those that are not read; `stages`: data ranks, stages and schedules.

mod keys;
mod stages;

use crate::arguments::{Arguments, assumed};
use crate::launch::World;
use crate::{Given, Job, JobError, Model, Note, NoteKind, Offload, Reading, Recompute, error};
use frameworks::{Framework, Recomputation};
use ir::program::Space;
use ir::{Optimizer, Precision};
use keys::toml_name;
use stages::{data_ranks, schedule, stages};

/// Files and settings beside this one.
#[derive(Default)]
pub(crate) struct Beside {
    /// Hosts and devices of the launcher.
    pub world: World,
    /// Arguments of the command line, which count before the file's.
    pub overrides: Option<Arguments>,
}

/// Reads a configuration.
pub(crate) fn read(
    file: &str,
    text: &str,
    _given: &Given,
    beside: &Beside,
) -> Result<Reading, JobError> {
    let table: toml::Table = text.parse().map_err(|e: toml::de::Error| {
        let at = e.span().map_or(0, |s| s.start);
        let line = text.get(..at).map_or(1, |t| t.matches('\n').count() + 1);
        error(
            file,
            Some(line),
            e.message().to_string(),
            "the file is no TOML: correct it there",
        )
    })?;
    let args = keys::arguments(file, text, &table, beside.overrides.as_ref());
    let sections = ["training", "parallelism", "model", "job"];
    if !sections.iter().any(|s| table.contains_key(*s)) {
        return Err(error(
            file,
            None,
            "it is TOML, but none of torchtitan: it has neither [training] nor [parallelism]",
            "a torchtitan file is what --job.config_file takes",
        ));
    }
    let mut notes = Vec::new();
    let degree = |name: &str| -> Result<u32, JobError> {
        let key = format!("parallelism.{name}");
        match args.text(&key)? {
            // All that the others leave.
            Some("-1") | None if name == "data-parallel-shard-degree" => Ok(0),
            _ => args.degree(&key),
        }
    };
    let tensor = degree("tensor-parallel-degree")?;
    let context = degree("context-parallel-degree")?;
    let pipeline = degree("pipeline-parallel-degree")?;
    let copies = degree("data-parallel-replicate-degree")?;
    let shard = degree("data-parallel-shard-degree")?;
    let expert = degree("expert-parallel-degree")?;
    let expert_tensor = degree("expert-tensor-parallel-degree")?;
    let data = data_ranks(
        &args,
        &beside.world,
        [tensor, context, pipeline, copies, shard],
    )?;
    let sharded = data.map_or(shard, |d| d / copies.max(1));
    let reshard = args
        .text("parallelism.fsdp-reshard-after-forward")?
        .unwrap_or("default");
    // States are split over context ranks too.
    let zero = match (sharded.saturating_mul(context), reshard, pipeline) {
        (1, _, _) => 0,
        // Stages of a pipeline gather their parameters once a step.
        (_, "always", 1) | (_, "default", 1) => 3,
        (_, "never", 1) => 2,
        (_, "always" | "default" | "never", _) => 1,
        (_, other, _) => {
            return Err(args.wrong(
                "parallelism.fsdp-reshard-after-forward",
                format!("`{other}` is none of default, always and never"),
                "correct it in the file",
            ));
        }
    };
    if pipeline > 1 && reshard == "always" {
        notes.push(Note {
            kind: NoteKind::NotModelled,
            name: "parallelism.fsdp_reshard_after_forward".into(),
            value: Some("always".into()),
            line: args.line("parallelism.fsdp-reshard-after-forward"),
            words: "stages gather their parameters for each microbatch; figures are of one gather a step".into(),
        });
    }
    let local = match args.count("training.local-batch-size")? {
        Some(n) => n,
        None => args.count("training.batch-size")?.unwrap_or_else(|| {
            notes.push(assumed("training.local_batch_size", 8, "its default"));
            8
        }),
    };
    // Below zero it is what one step of all ranks takes.
    let global_batch = match args.text("training.global-batch-size")? {
        Some("-1") | None => None,
        Some(_) => args.count("training.global-batch-size")?,
    };
    let (micro_batch, accumulation) = match pipeline {
        1 => (local, None),
        _ => {
            let own = args
                .count("parallelism.pipeline-parallel-microbatch-size")?
                .unwrap_or(1);
            if !local.is_multiple_of(own) {
                return Err(args.wrong(
                    "training.local-batch-size",
                    format!("a local batch of {local} is no multiple of microbatches of {own}"),
                    "correct it in the file",
                ));
            }
            (own, global_batch.is_none().then_some(local / own))
        }
    };
    let sequence = args.count("training.seq-len")?.unwrap_or_else(|| {
        notes.push(assumed("training.seq_len", 2048, "its default"));
        2048
    });
    let precision = match args
        .text("training.mixed-precision-param")?
        .unwrap_or("bfloat16")
    {
        "bfloat16" => Precision::Bf16,
        "float32" => Precision::F32,
        other => {
            return Err(args.wrong(
                "training.mixed-precision-param",
                format!("`{other}` is neither bfloat16 nor float32"),
                "correct it in the file",
            ));
        }
    };
    if args.text("training.dtype")?.is_some_and(|d| d != "float32") {
        notes.push(Note {
            kind: NoteKind::NotModelled,
            name: "training.dtype".into(),
            value: Some("bfloat16".into()),
            line: args.line("training.dtype"),
            words: "parameters and states are bf16: less memory and traffic than predicted".into(),
        });
    }
    let stages = stages(&args, pipeline)?;
    let (virtual_stages, split) = stages;
    let (schedule, virtual_stages) = schedule(&args, pipeline, virtual_stages)?;
    let (version, options) = options(&args)?;
    let recompute = recompute(&args)?;
    if args
        .text("parallelism.context-parallel-rotate-method")?
        .unwrap_or("allgather")
        != "allgather"
        && context > 1
    {
        notes.push(Note {
            kind: NoteKind::NotModelled,
            name: "parallelism.context_parallel_rotate_method".into(),
            value: Some("alltoall".into()),
            line: args.line("parallelism.context-parallel-rotate-method"),
            words: "keys and values go around; figures are of keys and values that are gathered"
                .into(),
        });
    }
    let expert = match (expert, expert_tensor) {
        (1, _) => 1,
        (_, t) if t > 1 => return Err(args.wrong("parallelism.expert-tensor-parallel-degree", format!("each expert is split over {t} tensor ranks, which is not modelled"), "Meshwright's figures are of whole experts on a rank")),
        (n, _) if n.is_multiple_of(tensor) => n,
        (n, _) => return Err(args.wrong("parallelism.expert-parallel-degree", format!("{n} ranks that split experts are no multiple of {tensor} tensor ranks, which is not modelled"), "Meshwright's figures are of experts over the tensor ranks first")),
    };
    let model = model(&args)?;
    let adam = |name: &str| args.number(&format!("optimizer.{name}"));
    let optimizer = Optimizer::default().with_adamw(
        adam("beta1")?.or(Some(0.9)),
        adam("beta2")?.or(Some(0.95)),
        adam("eps")?.or(Some(1e-8)),
        adam("weight-decay")?.or(Some(0.1)),
    );
    args.text("optimizer.name")?;
    let clip_norm = args.number("training.max-norm")?.unwrap_or(1.0);
    let job = Job {
        framework: Framework::TorchTitan,
        version,
        options,
        usual: Vec::new(),
        model,
        vocab_multiple: 1,
        world: beside.world,
        sequence: Some(sequence),
        global_batch,
        accumulation,
        micro_batch,
        tensor,
        context,
        expert,
        capacity: None,
        pipeline,
        virtual_stages,
        schedule,
        split,
        data,
        zero,
        copies: if zero > 0 { copies } else { 1 },
        sequence_parallel: tensor > 1,
        recompute,
        offload: offload(&args),
        precision,
        optimizer,
        clip_norm: (clip_norm > 0.0 && clip_norm < 1e29).then_some(clip_norm),
        dropout: 0.0,
    };
    let converters = args.text("model.converters")?.unwrap_or_default();
    notes.extend(keys::rest(&args, converters));
    let settings = args
        .settings()
        .into_iter()
        .map(|(k, v)| (toml_name(&k), v))
        .collect();
    Ok(Reading {
        form: "a torchtitan configuration".into(),
        files: Vec::new(),
        job,
        settings,
        notes,
        measured: None,
    })
}

/// The tensors that FSDP moves to the hosts: all that it splits (`CPUOffloadPolicy`).
fn offload(args: &Arguments) -> Offload {
    let host = args
        .is_on("training.enable-cpu-offload")
        .then_some(Space::Host);
    Offload {
        optimizer: host,
        gradients: host,
        parameters: host,
    }
}

/// The version, where it is not the usual one, and what is switched on.
fn options(args: &Arguments) -> Result<(Option<String>, Vec<String>), JobError> {
    let compiled = args.switch("compile.enable") || args.switch("training.compile");
    let components = args.text("compile.components")?.unwrap_or("model|loss");
    let compiled = compiled && components.contains("model");
    let mut options = Vec::new();
    if args.switch("parallelism.enable-async-tensor-parallel") {
        options.push("async-tp".to_string());
    }
    let converters = args
        .text("model.converters")?
        .unwrap_or_default()
        .to_string();
    let float8 = converters.contains("float8");
    if float8 {
        let recipe = match args.text("quantize.linear.float8.recipe-name")? {
            Some(name) => Some(name),
            None => args.text("float8.recipe-name")?,
        };
        options.push(match recipe {
            Some("rowwise" | "rowwise_with_gw_hp") => "fp8-row".to_string(),
            _ => "fp8".to_string(),
        });
    }
    if converters.contains("mx") && !float8 {
        options.push("mxfp8".to_string());
    }
    Ok(((!compiled).then(|| EAGER.to_string()), options))
}

/// The matmuls of a block that the option `op` recomputes, every second one of those with weights, with
/// all cheap ops.
const EVERY_SECOND_MATMUL: [&str; 3] = ["attn.k", "attn.out", "mlp.up"];

fn recompute(args: &Arguments) -> Result<Recompute, JobError> {
    let mode = args
        .text("activation-checkpoint.mode")?
        .unwrap_or("selective")
        .to_string();
    let option = args
        .text("activation-checkpoint.selective-ac-option")?
        .unwrap_or("op")
        .to_string();
    match mode.as_str() {
        "none" => Ok(Recompute::All(Recomputation::None)),
        "full" => Ok(Recompute::All(Recomputation::Full)),
        "selective" => match option.as_str() {
            "op" => Ok(Recompute::CheapAnd(
                EVERY_SECOND_MATMUL.map(String::from).to_vec(),
            )),
            number => match number
                .parse::<u64>()
                .ok()
                .filter(|n| (1..=100_000).contains(n))
            {
                Some(1) => Ok(Recompute::All(Recomputation::Full)),
                Some(2) => Ok(Recompute::All(Recomputation::EverySecond)),
                Some(n) => Ok(Recompute::Every(n)),
                None => Err(args.wrong(
                    "activation-checkpoint.selective-ac-option",
                    format!("`{number}` is neither op nor a whole number"),
                    "correct it in the file",
                )),
            },
        },
        other => Err(args.wrong(
            "activation-checkpoint.mode",
            format!("the mode `{other}` is not modelled"),
            "modelled are none, selective and full",
        )),
    }
}

/// The version whose models are not compiled.
const EAGER: &str = "2024-eager";

/// Models of torchtitan by name and flavor, and those that are built in.
const FLAVORS: [(&str, &str, &str); 8] = [
    ("llama3", "8B", "llama-3.1-8b"),
    ("llama3", "70B", "llama-3.1-70b"),
    ("llama3", "405B", "llama-3.1-405b"),
    ("qwen3", "8B", "qwen3-8b"),
    ("qwen3", "30B-A3B", "qwen3-30b-a3b"),
    ("qwen3", "235B-A22B", "qwen3-235b-a22b"),
    ("qwen3_moe", "30B-A3B", "qwen3-30b-a3b"),
    ("qwen3_moe", "235B-A22B", "qwen3-235b-a22b"),
];

fn model(args: &Arguments) -> Result<Model, JobError> {
    let name = args.text("model.name")?.unwrap_or("llama3");
    let flavor = args.text("model.flavor")?.unwrap_or("debugmodel");
    let found = FLAVORS
        .iter()
        .find(|(n, f, _)| *n == name && f.eq_ignore_ascii_case(flavor));
    Ok(match found {
        Some((_, _, built_in)) => Model::BuiltIn(built_in.to_string()),
        None => Model::NotStated(format!(
            "the flavor `{flavor}` of torchtitan's `{name}` is none of the models that are built in"
        )),
    })
}
