//! Megatron-LM's arguments, from a command line or from the block that its logs begin with, as a job.
//!
//! * `flags`: names that are not read, by what they do.
//! * `shape`: the model's sizes.
//! * `stages`: how a pipeline divides the layers.

mod flags;
mod shape;
mod stages;

use crate::arguments::{Argument, Arguments, assumed};
use crate::launch::World;
use crate::{Given, Job, JobError, Model, Note, NoteKind, Reading, Recompute, error, measured};
use frameworks::{Framework, Recomputation};
use ir::plan::ScheduleKind;
use ir::{Optimizer, Precision};

/// What a DeepSpeed JSON says beside the arguments of Megatron-DeepSpeed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Beside {
    /// Whether the job is one of Megatron-DeepSpeed.
    pub deepspeed: bool,
    /// The ZeRO level of its file.
    pub zero: Option<u8>,
}

/// Reads a log: the arguments that it begins with, and the iterations behind them.
pub(crate) fn log(file: &str, text: &str, given: &Given) -> Result<Reading, JobError> {
    let found = measured::megatron_arguments(text);
    let args = Arguments::of_values(file, found, true);
    let count = |name: &str| args.count(name);
    let devices = count("world-size")?;
    let world = World {
        devices: devices.map(|n| u32::try_from(n).unwrap_or(u32::MAX)),
        ..World::default()
    };
    let deepspeed = args.switch("deepspeed");
    let beside = Beside {
        deepspeed,
        zero: None,
    };
    let (job, notes) = job(&args, world, given, &beside)?;
    Ok(Reading {
        form: "the log of a run of Megatron-LM".into(),
        files: Vec::new(),
        job,
        settings: args.settings(),
        notes,
        measured: measured::of_log(text),
    })
}

/// The request of the arguments.
pub(crate) fn job(
    args: &Arguments,
    world: World,
    given: &Given,
    beside: &Beside,
) -> Result<(Job, Vec<Note>), JobError> {
    let mut notes = Vec::new();
    let tensor = degree(args, &["tensor-model-parallel-size", "model-parallel-size"])?;
    let pipeline = args.degree("pipeline-model-parallel-size")?;
    let context = args.degree("context-parallel-size")?;
    let data = data_ranks(args, &world, [tensor, pipeline, context])?;
    let layers = args.count("num-layers")?;
    let (model, mut of_model) = shape::model(args, given)?;
    notes.append(&mut of_model);
    let stages = stages::stages(args, pipeline, layers)?;
    let micro_batch = args.count("micro-batch-size")?.ok_or_else(|| {
        args.missing(
            "`--micro-batch-size` is missing, which Megatron-LM needs",
            "add it to the arguments, with the samples that a data rank works on at a time",
        )
    })?;
    let global_batch = args.count("global-batch-size")?;
    if global_batch.is_none() {
        notes.push(assumed(
            "--global-batch-size",
            "micro-batch size x data ranks",
            "the arguments do not say it, and Megatron-LM then takes one microbatch a step",
        ));
    }
    if let (Some(all), Some(data)) = (global_batch, data) {
        let at_once = micro_batch * u64::from(data);
        if !all.is_multiple_of(at_once) {
            return Err(args.wrong(
                "global-batch-size",
                format!(
                    "a global batch of {all} is no multiple of {micro_batch} samples x {data} data ranks"
                ),
                "Megatron-LM refuses it, too: change the batch or the degrees",
            ));
        }
    }
    let precision = match (args.switch("bf16"), args.switch("fp16")) {
        (true, _) => Precision::Bf16,
        (_, true) => Precision::F16,
        _ => Precision::F32,
    };
    let sequence = args
        .count("seq-length")?
        .or(args.count("encoder-seq-length")?);
    let expert = experts(args, tensor)?;
    let sequence_parallel = args.switch("sequence-parallel") && tensor > 1;
    let zero = zero(args, beside, &mut notes)?;
    let recompute = recompute(args, beside, &mut notes)?;
    let mut options = options(args, beside, &mut notes)?;
    // Gradients are summed over context ranks, too.
    let reducing = data.unwrap_or(2).saturating_mul(context);
    let ranks = [tensor, zero.into(), reducing];
    options.extend(left_out(args, beside, ranks, precision));
    let dropout = dropout(args, &model, &mut notes)?;
    let how = args.list("cp-comm-type")?;
    let how = how.first().map_or("p2p", String::as_str);
    if context > 1 && how != "all_gather" {
        notes.push(Note {
            kind: NoteKind::NotModelled,
            name: args.spelled("cp-comm-type"),
            value: Some(how.to_string()),
            line: None,
            words: "context ranks meet so; figures are of keys and values that are gathered".into(),
        });
    }
    let implementation = args.text("transformer-impl")?.map(String::from);
    if let Some(other) = implementation.filter(|of| of != "transformer_engine") {
        notes.push(Note {
            kind: NoteKind::NotModelled,
            name: args.spelled("transformer-impl"),
            value: Some(other),
            line: None,
            words: "another implementation of blocks than Transformer Engine's".into(),
        });
    }
    let instances = args.count("num-distributed-optimizer-instances")?;
    if instances.is_some_and(|n| n > 1) {
        notes.push(Note {
            kind: NoteKind::NotModelled,
            name: args.spelled("num-distributed-optimizer-instances"),
            value: instances.map(|n| n.to_string()),
            line: None,
            words: "states are split over a part of the data ranks: more memory than predicted"
                .into(),
        });
    }
    let job = Job {
        framework: match beside.deepspeed {
            true => Framework::MegatronDeepSpeed,
            false => Framework::MegatronCore,
        },
        version: None,
        options,
        usual: Vec::new(),
        model,
        vocab_multiple: vocab_multiple(args, tensor)?,
        world,
        sequence,
        global_batch,
        accumulation: None,
        micro_batch,
        tensor,
        context,
        expert,
        pipeline,
        virtual_stages: stages.chunks,
        schedule: ScheduleKind::OneFOneB,
        split: stages.split,
        data,
        zero,
        sequence_parallel,
        recompute,
        precision,
        optimizer: optimizer(args)?,
        clip_norm: match args.number("clip-grad")? {
            Some(norm) if norm <= 0.0 => None,
            norm => Some(norm.unwrap_or(1.0)),
        },
        dropout,
    };
    for name in [
        "data-parallel-size",
        "world-size",
        "padded-vocab-size",
        "params-dtype",
    ] {
        args.text(name).ok();
    }
    notes.extend(args.rest(flags::NOT_MODELLED, flags::NO_EFFECT));
    Ok((job, notes))
}

/// A degree under one of several names.
fn degree(args: &Arguments, names: &[&str]) -> Result<u32, JobError> {
    let mut most = 1;
    for name in names {
        most = most.max(args.degree(name)?);
    }
    Ok(most)
}

/// The ranks that split samples: what the other degrees leave of the devices.
fn data_ranks(args: &Arguments, world: &World, degrees: [u32; 3]) -> Result<Option<u32>, JobError> {
    let inside = degrees.iter().try_fold(1u32, |all, n| all.checked_mul(*n));
    let [tensor, pipeline, context] = degrees;
    let words = format!("{tensor} tensor x {pipeline} pipeline x {context} context ranks");
    let wrong = |problem: String| {
        args.wrong(
            "tensor-model-parallel-size",
            problem,
            "Megatron-LM refuses it, too: change the degrees, or the number of devices",
        )
    };
    let Some(inside) = inside else {
        return Err(wrong(format!("{words} are more ranks than there are")));
    };
    match world.devices() {
        None => Ok(None),
        Some(n) if n.is_multiple_of(inside) && n >= inside => Ok(Some(n / inside)),
        Some(n) => Err(wrong(format!("{words} do not divide {n} devices"))),
    }
}

/// The number of which the rows of the table of tokens are a multiple.
fn vocab_multiple(args: &Arguments, tensor: u32) -> Result<u64, JobError> {
    if args.count("padded-vocab-size")?.is_some() {
        return Ok(1);
    }
    let own = args.count("make-vocab-size-divisible-by")?.unwrap_or(128);
    Ok(own.saturating_mul(u64::from(tensor)).clamp(1, crate::MOST))
}

/// The ranks that split experts.
fn experts(args: &Arguments, tensor: u32) -> Result<u32, JobError> {
    let expert = degree(
        args,
        &["expert-model-parallel-size", "moe-expert-parallel-size"],
    )?;
    let inside = args.count("expert-tensor-parallel-size")?;
    if shape::n_experts(args)?.is_none() {
        return Ok(1);
    }
    let inside = inside.unwrap_or(tensor.into());
    if inside > 1 {
        return Err(args.wrong(
            "expert-tensor-parallel-size",
            format!("each expert is split over {inside} tensor ranks, which is not modelled"),
            "Meshwright's figures are of whole experts on a rank: --expert-tensor-parallel-size 1, with as many more ranks that split experts",
        ));
    }
    match expert {
        1 => Ok(1),
        n if n.is_multiple_of(tensor) => Ok(n),
        n => Err(args.wrong(
            "expert-model-parallel-size",
            format!("{n} ranks that split experts are no multiple of {tensor} tensor ranks, which is not modelled"),
            "Meshwright's figures are of experts over the tensor ranks first, and then over data ranks",
        )),
    }
}

fn zero(args: &Arguments, beside: &Beside, notes: &mut Vec<Note>) -> Result<u8, JobError> {
    if let Some(stage) = args.number("zero-stage")? {
        return match stage {
            s if [0.0, 1.0, 2.0, 3.0].contains(&s) => Ok(s as u8),
            s => Err(args.wrong(
                "zero-stage",
                format!("there is no ZeRO stage {s}"),
                "0, 1, 2 and 3 are",
            )),
        };
    }
    if beside.deepspeed {
        return Ok(beside.zero.unwrap_or(0));
    }
    let distributed = args.switch("use-distributed-optimizer");
    let strategy = args
        .text("data-parallel-sharding-strategy")?
        .map(String::from);
    if args.switch("use-torch-fsdp2") {
        return Ok(3);
    }
    if args.switch("use-megatron-fsdp") || args.switch("use-custom-fsdp") {
        return match strategy.as_deref() {
            Some("optim_grads_params") => Ok(3),
            Some("optim_grads") => Ok(2),
            Some("optim") => Ok(1),
            None | Some("no_shard") => {
                if strategy.is_none() {
                    notes.push(assumed(
                        "--data-parallel-sharding-strategy",
                        "no_shard",
                        "its default: Megatron-FSDP then splits nothing",
                    ));
                }
                Ok(0)
            }
            Some(other) => Err(args.wrong(
                "data-parallel-sharding-strategy",
                format!("`{other}` is no strategy that is known"),
                "known are no_shard, optim, optim_grads and optim_grads_params",
            )),
        };
    }
    Ok(u8::from(distributed))
}

/// Names of modules that Megatron recomputes, and the ops that they are.
const MODULES: [(&str, &[&str]); 5] = [
    ("core_attn", &["attn.attend"]),
    ("layernorm", &["ln_1", "ln_2", "norm_1", "norm_2"]),
    ("moe_act", &["moe.act", "moe.mul"]),
    ("mlp", &["mlp.*"]),
    ("moe", &["moe.*"]),
];

fn recompute(
    args: &Arguments,
    beside: &Beside,
    notes: &mut Vec<Note>,
) -> Result<Recompute, JobError> {
    let old = args.switch("checkpoint-activations");
    let selective = args.switch("recompute-activations");
    let granularity = args.text("recompute-granularity")?.map(String::from);
    let method = args.text("recompute-method")?.map(String::from);
    let number = args.count("recompute-num-layers")?;
    let modules = args.list("recompute-modules")?;
    if beside.deepspeed && args.switch("deepspeed-activation-checkpointing") || old {
        return Ok(Recompute::All(Recomputation::Full));
    }
    match granularity.as_deref() {
        None if selective => Ok(Recompute::All(Recomputation::Attention)),
        None => Ok(Recompute::All(Recomputation::None)),
        Some("full") => {
            match method.as_deref() {
                Some("block") => Ok(Recompute::First(number.unwrap_or(1))),
                _ => {
                    if let Some(n) = number.filter(|n| *n > 1) {
                        notes.push(Note {
                        kind: NoteKind::NotModelled,
                        name: args.spelled("recompute-num-layers"),
                        value: Some(n.to_string()),
                        line: None,
                        words: "blocks are recomputed so many at a time: less is kept than predicted".into(),
                    });
                    }
                    Ok(Recompute::All(Recomputation::Full))
                }
            }
        }
        Some("selective") => {
            let modules = match modules.is_empty() {
                true => vec!["core_attn".to_string()],
                false => modules,
            };
            let mut ops = Vec::new();
            for module in &modules {
                match MODULES.iter().find(|(name, _)| name == module) {
                    Some((_, own)) => ops.extend(own.iter().map(|o| o.to_string())),
                    None => notes.push(Note {
                        kind: NoteKind::NotModelled,
                        name: args.spelled("recompute-modules"),
                        value: Some(module.clone()),
                        line: None,
                        words: "what this module recomputes is not modelled: less memory and more time than predicted".into(),
                    }),
                }
            }
            Ok(match &modules[..] {
                [one] if one == "core_attn" => Recompute::All(Recomputation::Attention),
                [one] if one == "layernorm" => Recompute::All(Recomputation::Norms),
                _ if ops.is_empty() => Recompute::All(Recomputation::None),
                _ => Recompute::Ops(ops),
            })
        }
        Some(other) => Err(args.wrong(
            "recompute-granularity",
            format!("`{other}` is no granularity"),
            "Megatron-LM knows full and selective",
        )),
    }
}

/// What the job switches on, by the names of options.
fn options(
    args: &Arguments,
    beside: &Beside,
    notes: &mut Vec<Note>,
) -> Result<Vec<String>, JobError> {
    let mut options = Vec::new();
    let fp8 = match args.text("fp8-format")? {
        None => args.text("fp8")?,
        some => some,
    };
    if fp8.is_some_and(|f| f != "False") {
        let recipe = args.text("fp8-recipe")?.unwrap_or("delayed");
        options.push(match recipe {
            "delayed" => "fp8-ds",
            "tensorwise" => "fp8-cs",
            "blockwise" => "fp8-sc",
            "mxfp8" => "mxfp8",
            other => {
                return Err(args.wrong(
                    "fp8-recipe",
                    format!("`{other}` is no recipe that is modelled"),
                    "modelled are delayed, tensorwise, blockwise and mxfp8",
                ));
            }
        });
    } else {
        args.text("fp8-recipe")?;
    }
    let fp4 = args.text("fp4-format")?.or(args.text("fp4")?);
    if fp4.is_some_and(|f| f != "False") {
        options.push("nvfp4");
    }
    args.text("fp4-recipe")?;
    if args.switch("overlap-moe-expert-parallel-comm") {
        options.push("overlapped-dispatch");
    }
    let flex = args
        .text("moe-flex-dispatcher-backend")?
        .is_some_and(|b| b.ends_with("ep"));
    let is_flex = args.text("moe-token-dispatcher-type")? == Some("flex");
    if args.switch("moe-enable-deepep") || flex && is_flex {
        options.push("dispatch-once-per-host");
    }
    if args.switch("grad-reduce-in-bf16") {
        notes.push(Note {
            kind: NoteKind::NotModelled,
            name: args.spelled("grad-reduce-in-bf16"),
            value: None,
            line: args.line("grad-reduce-in-bf16"),
            words: "gradients travel in bf16, which figures have, and are summed over microbatches in bf16, which they have not: less memory than predicted".into(),
        });
    }
    let mut options: Vec<String> = options.into_iter().map(String::from).collect();
    let backend = args.text("attention-backend")?.unwrap_or("auto");
    match backend.trim_start_matches("AttnBackend.") {
        "auto" | "fused" => {}
        "flash" => options.push("attention=flash-2".into()),
        "unfused" | "local" if !beside.deepspeed => options.push("attention=unfused".into()),
        other => notes.push(Note {
            kind: NoteKind::NotModelled,
            name: args.spelled("attention-backend"),
            value: Some(other.into()),
            line: None,
            words: "figures are of the version's usual attention kernel".into(),
        }),
    }
    Ok(options)
}

/// What the job leaves out of what runs of Megatron-Core have, as options: overlaps that flags ask
/// for, and the type in which gradients travel.
fn left_out(
    args: &Arguments,
    beside: &Beside,
    [tensor, zero, data]: [u32; 3],
    precision: Precision,
) -> Vec<String> {
    let asked = [
        "tp-comm-overlap",
        "overlap-grad-reduce",
        "overlap-param-gather",
    ];
    let [overlaps_tensor, overlaps_grads, overlaps_params] = asked.map(|name| args.switch(name));
    let full = args.is_off("accumulate-allreduce-grads-in-fp32");
    let narrow = args.switch("grad-reduce-in-bf16") || full;
    args.switch("accumulate-allreduce-grads-in-fp32");
    if beside.deepspeed {
        return Vec::new();
    }
    let wide = precision == Precision::Bf16 && !narrow;
    let all = [
        (tensor > 1 && !overlaps_tensor, "no-tensor-overlap"),
        (data > 1 && !overlaps_grads, "no-gradient-overlap"),
        (
            data > 1 && zero > 0 && !overlaps_params,
            "no-parameter-overlap",
        ),
        (data > 1 && wide, "grads-f32"),
    ];
    let some = all.into_iter().filter(|(is, _)| *is);
    some.map(|(_, option)| option.to_string()).collect()
}

fn optimizer(args: &Arguments) -> Result<Optimizer, JobError> {
    let decay = args.number("weight-decay")?;
    let adam = Optimizer::default();
    let beta1 = args.number("adam-beta1")?;
    let beta2 = args.number("adam-beta2")?;
    let eps = args.number("adam-eps")?;
    let momentum = args.number("sgd-momentum")?;
    match args.text("optimizer")? {
        None | Some("adam" | "adamw") => Ok(adam.with_adamw(
            beta1.or(Some(0.9)),
            beta2.or(Some(0.999)),
            eps,
            decay.or(Some(0.01)),
        )),
        Some("sgd") => Ok(Optimizer::Sgd {
            momentum: momentum.unwrap_or(0.9),
            weight_decay: decay.unwrap_or(0.01),
        }),
        Some(other) => Err(args.wrong(
            "optimizer",
            format!("the optimizer `{other}` is not modelled"),
            "Meshwright has AdamW and SGD: import a copy of the file with --optimizer adam for figures of that",
        )),
    }
}

/// The dropout of a model that has dropout. Megatron-LM's own default is 0.1.
fn dropout(args: &Arguments, model: &Model, notes: &mut Vec<Note>) -> Result<f64, JobError> {
    let of = |name: &str| -> Result<f64, JobError> {
        match args.number(name)? {
            None => Ok(0.1),
            Some(p) if (0.0..1.0).contains(&p) => Ok(p),
            Some(p) => Err(args.wrong(
                name,
                format!("`--{name}` is {p}, expected a probability below 1"),
                "correct it in the file",
            )),
        }
    };
    let (attention, hidden) = (of("attention-dropout")?, of("hidden-dropout")?);
    let has_dropout = matches!(model, Model::Config(c) if c["model_type"] == "gpt2");
    match has_dropout {
        true => {
            if attention != hidden {
                notes.push(assumed(
                    "--attention-dropout",
                    hidden,
                    "the model here has one probability, which is that of --hidden-dropout",
                ));
            }
            Ok(hidden)
        }
        false => {
            if hidden > 0.0 || attention > 0.0 {
                notes.push(Note {
                    kind: NoteKind::NotModelled,
                    name: "--hidden-dropout, --attention-dropout".into(),
                    value: Some(format!("{hidden}, {attention}")),
                    line: None,
                    words: "Megatron-LM drops values (its default is 0.1), and the model here has no dropout: 0 for both is usual".into(),
                });
            }
            Ok(0.0)
        }
    }
}

/// A value that `--set` gives for something that the file leaves open.
pub(crate) fn given_count(given: &Given, names: &[&str]) -> Result<Option<u64>, JobError> {
    let found = names
        .iter()
        .find_map(|n| Some((n, given.variables.get(*n)?)));
    let Some((name, text)) = found else {
        return Ok(None);
    };
    match text
        .parse::<u64>()
        .ok()
        .filter(|n| (1..=crate::MOST).contains(n))
    {
        Some(n) => Ok(Some(n)),
        None => Err(error(
            "--set",
            None,
            format!("`{name}={text}`: expected a whole number from 1"),
            "correct the value",
        )),
    }
}

/// An argument of a log.
pub(crate) fn logged(name: &str, value: &str, line: usize) -> (String, Argument) {
    let turned = [
        ("add_bias_linear", "disable-bias-linear"),
        ("bias_gelu_fusion", "no-bias-gelu-fusion"),
        ("bias_swiglu_fusion", "no-bias-swiglu-fusion"),
        ("bias_dropout_fusion", "no-bias-dropout-fusion"),
        ("masked_softmax_fusion", "no-masked-softmax-fusion"),
        ("apply_rope_fusion", "no-rope-fusion"),
        (
            "gradient_accumulation_fusion",
            "no-gradient-accumulation-fusion",
        ),
        ("overlap_p2p_comm", "no-overlap-p2p-communication"),
        ("align_grad_reduce", "no-align-grad-reduce"),
        ("align_param_gather", "no-align-param-gather"),
    ];
    let turned = turned.iter().find(|(n, _)| *n == name);
    let (key, value) = match (turned, value) {
        (Some((_, flag)), "False") => (flag.to_string(), "True"),
        (Some((_, flag)), "True") => (flag.to_string(), "False"),
        _ => (name.replace('_', "-"), value),
    };
    let argument = Argument {
        spelled: format!("--{key}"),
        values: vec![value.to_string()],
        line: Some(line),
    };
    (key, argument)
}
