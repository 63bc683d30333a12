//! Megatron-LM's arguments, from a command line or from the block that its logs begin with, as a job.
//!
//! * `flags`: names that are not read, by what they do.
//! * `degrees`: ranks by what they split; `shape`: the model's sizes.
//! * `stages`: how a pipeline divides the layers; `switches`: recomputation, formats, kernels, overlap.

mod degrees;
mod flags;
mod shape;
mod stages;
mod switches;

use crate::arguments::{Argument, Arguments, assumed};
use crate::launch::World;
use crate::{Given, Job, JobError, Model, Note, NoteKind, Offload, Reading, error, measured};
use degrees::{data_ranks, degree, experts, vocab_multiple, zero};
use frameworks::Framework;
use ir::plan::ScheduleKind;
use ir::program::Space;
use ir::{Optimizer, Precision};
use switches::{gradients, left_out, options, recompute};

/// The facts of a DeepSpeed JSON beside the arguments of Megatron-DeepSpeed.
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
        let add = "add it to the arguments, with the samples that a data rank works on at a time";
        let help = match args.misspelt("micro-batch-size") {
            Some(meant) => format!("{meant} may be meant by it; else {add}"),
            None => add.to_string(),
        };
        args.missing(
            "`--micro-batch-size` is missing, which Megatron-LM needs",
            &help,
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
    let capacity = shape::capacity(args)?;
    let has_experts = shape::n_experts(args)?.is_some();
    let sequence_parallel = args.switch("sequence-parallel") && tensor > 1;
    let zero = zero(args, beside, &mut notes)?;
    let recompute = recompute(args, beside, &mut notes)?;
    let mut options = options(args, beside, &mut notes)?;
    // Gradients are summed over context ranks, too.
    let reducing = data.unwrap_or(2).saturating_mul(context);
    let ranks = [tensor, zero.into(), reducing];
    options.extend(left_out(args, beside, ranks));
    let narrow = gradients(args, precision, &mut notes)?;
    options.extend(narrow.filter(|_| !beside.deepspeed).map(String::from));
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
    let instances = u32::try_from(instances.unwrap_or(1).max(1)).unwrap_or(u32::MAX);
    let over = data.map(|d| d.saturating_mul(context));
    if let Some(n) = over.filter(|n| zero > 0 && !n.is_multiple_of(instances)) {
        return Err(args.wrong(
            "num-distributed-optimizer-instances",
            format!(
                "{instances} instances do not divide {n} data ranks (context ranks among them)"
            ),
            "Megatron-LM refuses it, too: change it or the degrees",
        ));
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
        capacity: capacity.filter(|_| has_experts),
        pipeline,
        virtual_stages: stages.chunks,
        schedule: ScheduleKind::OneFOneB,
        split: stages.split,
        data,
        zero,
        copies: if zero > 0 { instances } else { 1 },
        sequence_parallel,
        recompute,
        offload: offload(args)?,
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

/// The tensors that are moved to the hosts: with the optimizer all of its states, unless a smaller
/// fraction is given. Gradients stay in the device's buffers.
fn offload(args: &Arguments) -> Result<Offload, JobError> {
    let fraction = args.number("optimizer-offload-fraction")?;
    let whole = args.is_on("optimizer-cpu-offload") && fraction.is_none_or(|f| f >= 1.0);
    Ok(Offload {
        optimizer: whole.then_some(Space::Host),
        ..Offload::default()
    })
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
        .find_map(|n| Some((n, given.variables.get(n)?)));
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
