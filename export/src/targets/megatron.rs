//! Megatron-LM on Megatron-Core: a launch script, and the same arguments as a map in YAML.
//!
//! Names of arguments are those of `megatron/training/arguments.py` and of the config classes that
//! it takes arguments from, at `core_v0.19.0`; that version's own parser and validation accept what
//! is written (docs/export.md).

use super::{
    Choices, Missing, Target, Written, block_name, degrees, inexpressible, origin, unknown,
};
use crate::model::{Activation, Experts, ModelShape, Norm};
use crate::recompute::Recomputed;
use crate::summary::{ContextAttention, Degrees, Stage, Summary};
use crate::{ExportError, File, Read};
use ir::offload::TensorClass;
use ir::op::RopeScaling;
use ir::plan::ScheduleKind;
use ir::{Optimizer, Precision};
use std::collections::BTreeSet;
use std::fmt::Write;

const TARGET: Target = Target::MegatronCore;

/// An argument: its name without dashes, and its value; none of a flag.
type Argument = (&'static str, Option<String>);

/// The file of the launch script, and of the arguments.
const SCRIPT: &str = "launch.sh";
const ARGUMENTS: &str = "args.yaml";

pub(super) fn write(read: &Read<'_>) -> Result<Written, ExportError> {
    let summary = &read.summary;
    let d = degrees(summary, TARGET)?;
    let model = summary.model.as_ref();
    let model = model.ok_or_else(|| unknown(TARGET, summary.why_no_model))?;
    let mut missing = Missing::default();
    missing.add_deviations(summary, &[]);
    let mut choices = Choices::of(summary);
    if summary.on_cpu {
        missing.add(
            "the devices",
            "ranks on processors",
            "GPUs, which Megatron-LM needs",
        );
    }
    let mut args = model_arguments(model, summary, d, &mut missing)?;
    args.extend(parallel(d, summary, &mut missing));
    args.extend(pipeline(d, model, summary, &mut choices, &mut missing)?);
    let overlaps = Overlaps::of(read.plan);
    args.extend(zero(d, overlaps, &mut choices, &mut missing));
    args.extend(recompute(d, model, summary, &mut choices, &mut missing));
    args.extend(training(d, summary));
    if overlaps.tensor && d.tensor > 1 && has(&args, "sequence-parallel") {
        args.push(flag("tp-comm-overlap"));
    }
    let fsdp = has(&args, "use-megatron-fsdp");
    if summary.precision == Precision::Bf16 {
        args.extend(gradients(overlaps.gradient_types, fsdp));
    }
    args.extend(offload(summary, &mut missing));
    Ok(Written {
        files: vec![
            File {
                name: SCRIPT,
                text: script(summary, &args, fsdp),
            },
            File {
                name: ARGUMENTS,
                text: yaml(summary, &args),
            },
        ],
        not_expressed: missing.list(),
        choices,
    })
}

fn has(args: &[Argument], name: &str) -> bool {
    args.iter().any(|(n, _)| *n == name)
}

/// Overlaps of traffic and computing: where the plan's figures are of Megatron-Core, what its runs
/// have on which they rest, unless the plan's options say that the job has not. Of other plans what Megatron-LM does
/// well by itself.
#[derive(Clone, Copy)]
struct Overlaps {
    tensor: bool,
    gradients: bool,
    parameters: bool,
    gradient_types: GradientTypes,
}

/// The types in which gradients of bf16 activations are summed over microbatches, and travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GradientTypes {
    /// Both in f32, as Megatron-LM does unless it is asked not to.
    Wide,
    /// Summed in f32, sent in bf16.
    Sent,
    /// Both in bf16.
    Narrow,
}

impl Overlaps {
    fn of(plan: &ir::plan::Plan) -> Overlaps {
        let made_for = plan.made_for.as_ref();
        let own = made_for.filter(|m| m.name == TARGET.name());
        let has = |option: &str| own.is_some_and(|m| m.options.iter().any(|o| o == option));
        // Versions before 2024 had neither.
        let is_new = own.is_some_and(|m| m.version.as_str() >= "2024");
        Overlaps {
            tensor: is_new && !has("no-tensor-overlap"),
            gradients: !has("no-gradient-overlap"),
            parameters: !has("no-parameter-overlap"),
            gradient_types: match (has("grads-bf16"), has("grads-sent-bf16")) {
                (true, _) => GradientTypes::Narrow,
                (_, true) => GradientTypes::Sent,
                _ => GradientTypes::Wide,
            },
        }
    }
}

/// Arguments for the types of gradients. Megatron-FSDP has its own, and sums gradients in the
/// parameters' type where it is not asked (`_resolve_group_grad_dtype` of its
/// `param_and_grad_buffer.py`).
fn gradients(types: GradientTypes, fsdp: bool) -> Vec<Argument> {
    let (summed, sent) = (
        "megatron-fsdp-main-grads-dtype",
        "megatron-fsdp-grad-comm-dtype",
    );
    match (types, fsdp) {
        (GradientTypes::Wide, false) => Vec::new(),
        (GradientTypes::Sent, false) => vec![
            flag("grad-reduce-in-bf16"),
            with("ddp-param-name-patterns-for-fp32-local-accumulation", "all"),
        ],
        (GradientTypes::Narrow, false) => vec![flag("grad-reduce-in-bf16")],
        (GradientTypes::Wide, true) => vec![with(summed, "fp32")],
        (GradientTypes::Sent, true) => vec![with(summed, "fp32"), with(sent, "bf16")],
        (GradientTypes::Narrow, true) => vec![with(summed, "bf16")],
    }
}

fn flag(name: &'static str) -> Argument {
    (name, None)
}

fn with(name: &'static str, value: impl ToString) -> Argument {
    (name, Some(value.to_string()))
}

fn model_arguments(
    m: &ModelShape,
    s: &Summary,
    d: &Degrees,
    missing: &mut Missing,
) -> Result<Vec<Argument>, ExportError> {
    let ffn = m
        .ffn
        .or(m.experts.as_ref().map(|e| e.ffn))
        .unwrap_or(4 * m.hidden);
    let mut args = vec![
        with("num-layers", m.layers),
        with("hidden-size", m.hidden),
        with("ffn-hidden-size", ffn),
        with("num-attention-heads", m.heads),
        with("kv-channels", m.head_dim),
        with("seq-length", s.sequence),
        with("max-position-embeddings", m.positions.unwrap_or(s.sequence)),
    ];
    if m.kv_heads != m.heads {
        args.push(flag("group-query-attention"));
        args.push(with("num-query-groups", m.kv_heads));
    }
    match m.rotary {
        None => args.push(with("position-embedding-type", "learned_absolute")),
        Some(rotary) => {
            args.push(with("position-embedding-type", "rope"));
            args.push(with("rotary-base", rotary.theta.round()));
            if rotary.share < 1.0 {
                args.push(with("rotary-percent", rotary.share));
            }
            match rotary.scaling {
                RopeScaling::None => {}
                RopeScaling::Linear { factor } => {
                    args.push(with("rotary-seq-len-interpolation-factor", factor.round()));
                }
                RopeScaling::Llama3 { factor, .. } => {
                    args.push(flag("use-rope-scaling"));
                    args.push(with("rope-scaling-factor", factor));
                }
                RopeScaling::Yarn { .. } => missing.add(
                    "rotary positions",
                    "scaled as YaRN has it",
                    "not scaled, which takes as long",
                ),
            }
        }
    }
    match m.norm {
        Norm::Layer => args.push(with("normalization", "LayerNorm")),
        Norm::Rms => args.push(with("normalization", "RMSNorm")),
    }
    args.push(with("norm-epsilon", m.norm_eps));
    if m.centred {
        args.push(flag("apply-layernorm-1p"));
    }
    // Tokens to the left of a query's own, and to the right.
    if let Some(window) = m.window {
        args.push(with(
            "window-size",
            format!("{},0", window.saturating_sub(1)),
        ));
    }
    args.push(mlp(m).map_err(|reason| unknown(TARGET, reason))?);
    if !m.bias {
        args.push(flag("disable-bias-linear"));
        if m.qkv_bias {
            args.push(flag("add-qkv-bias"));
        }
    }
    if m.qk_norm {
        args.push(flag("qk-layernorm"));
    }
    if !m.tied {
        args.push(flag("untie-embeddings-and-output-weights"));
    }
    args.push(with("tokenizer-type", "NullTokenizer"));
    args.push(with("vocab-size", m.vocab));
    let multiple = u64::from(d.tensor) * VOCAB_MULTIPLE;
    if !m.vocab.is_multiple_of(multiple) {
        missing.add(
            "the table of tokens",
            format!("{} rows", m.vocab),
            format!("rows up to the next multiple of {multiple}"),
        );
    }
    if let Some(e) = &m.experts {
        args.push(with("num-experts", e.count));
        args.push(with("moe-router-topk", e.top_k));
        args.push(with("moe-ffn-hidden-size", e.ffn));
        args.push(with("moe-router-load-balancing-type", "none"));
        args.push(with("moe-token-dispatcher-type", "alltoall"));
        args.push(with(
            "moe-expert-capacity-factor",
            capacity_factor(e, s.sequence),
        ));
        args.push(with("moe-token-drop-policy", "position"));
        args.push(flag("moe-pad-expert-input-to-capacity"));
        args.push(flag("moe-grouped-gemm"));
        if !e.normalized {
            args.push(flag("moe-router-pre-softmax"));
        }
        if let Some(shared) = e.shared_ffn {
            args.push(with("moe-shared-expert-intermediate-size", shared));
            args.push(flag("moe-shared-expert-gate"));
        }
        if !e.in_layer.iter().all(|has| *has) {
            let pattern: Vec<&str> = e
                .in_layer
                .iter()
                .map(|h| if *h { "1" } else { "0" })
                .collect();
            args.push(with("moe-layer-freq", format!("[{}]", pattern.join(","))));
        }
        missing.add(
            "the slots of experts",
            "counted sample by sample, and tokens beyond them are dropped",
            "counted over the tokens of a rank's microbatch, with the same factor, and tokens beyond them are dropped",
        );
    }
    Ok(args)
}

/// The argument that asks for a model's MLP, or the reason why there is none.
pub(super) fn mlp(m: &ModelShape) -> Result<Argument, &'static str> {
    match (m.activation, m.gated) {
        (Some(Activation::Silu), true) => Ok(flag("swiglu")),
        (Some(Activation::Gelu), false) => Ok(flag("no-bias-gelu-fusion")),
        (Some(Activation::GeluTanh), false) => Ok(flag("openai-gelu")),
        (Some(Activation::SquaredRelu), false) => Ok(flag("squared-relu")),
        (_, true) => Err("no flag asks for an MLP with a gate and this activation function"),
        (_, false) => {
            Err("no flag asks for an MLP without a gate and with this activation function")
        }
    }
}

/// Megatron-LM pads the table of tokens to a multiple of this many rows for each tensor rank
/// (`--make-vocab-size-divisible-by`).
const VOCAB_MULTIPLE: u64 = 128;

/// The factor with six digits behind the point at most, from which as many slots of a sample of so many
/// tokens follow as the plan has.
fn capacity_factor(e: &Experts, sequence: u64) -> f64 {
    let on_average = (e.top_k * sequence) as f64 / e.count as f64;
    let slots = (e.capacity_factor * on_average).round();
    let scaled = e.capacity_factor * 1e6;
    let near = scaled.round() / 1e6;
    match (near * on_average).ceil() > slots {
        true => scaled.floor() / 1e6,
        false => near,
    }
}

fn parallel(d: &Degrees, s: &Summary, missing: &mut Missing) -> Vec<Argument> {
    let mut args = vec![
        with("tensor-model-parallel-size", d.tensor),
        with("pipeline-model-parallel-size", d.pipeline),
        with("context-parallel-size", d.context),
    ];
    if d.sequence_parallel && d.tensor > 1 {
        args.push(flag("sequence-parallel"));
    }
    if d.context > 1 {
        let how = match d.context_attention {
            Some(ContextAttention::Ring) => "p2p",
            Some(ContextAttention::Ulysses) => "a2a",
            _ => "all_gather",
        };
        args.push(with("cp-comm-type", how));
        if !d.zigzag {
            missing.add(
                "the order of sequences over context ranks",
                "natural",
                "zigzag, in which Megatron-LM always hands them out",
            );
        }
    }
    if s.model.as_ref().is_some_and(|m| m.experts.is_some()) {
        args.push(with("expert-model-parallel-size", d.expert));
        args.push(with("expert-tensor-parallel-size", d.expert_tensor));
        if d.tensor > 1 && !d.sequence_parallel {
            missing.add(
                "norms and residuals",
                "whole on every tensor rank",
                "sequence parallelism, which Megatron-LM needs for experts over tensor ranks",
            );
            args.push(flag("sequence-parallel"));
        }
    }
    args
}

/// Blocks of even stages.
fn are_even(stages: &[Stage], layers: u64) -> bool {
    let n = stages.len() as u64;
    let last = stages.len() - 1;
    layers.is_multiple_of(n)
        && stages
            .iter()
            .enumerate()
            .all(|(i, s)| s.blocks.1 == layers / n && s.embed == (i == 0) && s.head == (i == last))
}

/// The layout of stages in Megatron's letters: `Et*3|t*4L`.
fn layout(stages: &[Stage]) -> String {
    let one = |s: &Stage| {
        let embed = if s.embed { "E" } else { "" };
        let head = if s.head { "L" } else { "" };
        let blocks = match s.blocks.1 {
            0 => String::new(),
            1 => "t".into(),
            n => format!("t*{n}"),
        };
        format!("{embed}{blocks}{head}")
    };
    stages.iter().map(one).collect::<Vec<_>>().join("|")
}

fn pipeline(
    d: &Degrees,
    model: &ModelShape,
    s: &Summary,
    choices: &mut Choices,
    missing: &mut Missing,
) -> Result<Vec<Argument>, ExportError> {
    if d.pipeline == 1 {
        return Ok(Vec::new());
    }
    let Some(stages) = &s.stages else {
        let reason = "its stages have layers that are no embedding, block or head";
        return Err(inexpressible(TARGET, reason));
    };
    let of = |kind: ScheduleKind| kind.schedule().name();
    let has = choices.nearest_schedule(s, &TARGET.framework().vocabulary());
    match s.schedule {
        _ if has => {}
        ScheduleKind::ZbV => {
            choices.keeps_stages = false;
            missing.add(
                "the schedule",
                format!("{}, two stages on each mesh", of(s.schedule)),
                "1f1b, one stage on each, of as many blocks each as goes",
            );
        }
        other => missing.add("the schedule", of(other), "1f1b"),
    }
    if !choices.keeps_stages {
        if !model.layers.is_multiple_of(u64::from(d.pipeline)) {
            let even = even_layout(model.layers, d.pipeline);
            return Ok(vec![with("pipeline-model-parallel-layout", even)]);
        }
        return Ok(Vec::new());
    }
    let mut args = Vec::new();
    match (are_even(stages, model.layers), d.virtual_stages) {
        (true, 1) => {}
        (true, v) => args.push(with("num-virtual-stages-per-pipeline-rank", v)),
        (false, _) => args.push(with("pipeline-model-parallel-layout", layout(stages))),
    }
    Ok(args)
}

/// Stages of as many blocks each as goes, the larger first.
fn even_layout(layers: u64, pipeline: u32) -> String {
    let n = u64::from(pipeline);
    let stage = |i: u64| Stage {
        embed: i == 0,
        blocks: (0, layers / n + u64::from(i < layers % n)),
        head: i + 1 == n,
    };
    layout(&(0..n).map(stage).collect::<Vec<_>>())
}

fn zero(
    d: &Degrees,
    overlaps: Overlaps,
    choices: &mut Choices,
    missing: &mut Missing,
) -> Vec<Argument> {
    let mut args = Vec::new();
    if overlaps.gradients {
        args.push(flag("overlap-grad-reduce"));
    }
    let distributed = |args: &mut Vec<Argument>| {
        args.push(flag("use-distributed-optimizer"));
        if overlaps.parameters {
            args.push(flag("overlap-param-gather"));
        }
        if d.sharded < d.data {
            args.push(with(
                "num-distributed-optimizer-instances",
                d.data / d.sharded,
            ));
        }
    };
    // The distributed optimizer splits over the group of data and context ranks, and so does each of
    // its instances (`get_data_parallel_group(with_context_parallel=True)`).
    super::split_over_context(d, missing);
    let vocabulary = TARGET.framework().vocabulary();
    choices.zero = vocabulary.nearest_zero(d.zero, d.pipeline, d.context);
    if choices.zero != d.zero {
        missing.add(
            "parameters and gradients",
            format!("ZeRO level {}", d.zero),
            format!(
                "ZeRO level {} (the distributed optimizer), the highest that goes with a pipeline",
                choices.zero
            ),
        );
    }
    match choices.zero {
        0 => {}
        1 => distributed(&mut args),
        level => {
            let strategy = match level {
                2 => "optim_grads",
                _ => "optim_grads_params",
            };
            distributed(&mut args);
            args.push(flag("use-megatron-fsdp"));
            args.push(with("data-parallel-sharding-strategy", strategy));
            args.push(with("ckpt-format", "fsdp_dtensor"));
            args.push(flag("no-gradient-accumulation-fusion"));
        }
    }
    args
}

fn recompute(
    d: &Degrees,
    model: &ModelShape,
    s: &Summary,
    choices: &mut Choices,
    missing: &mut Missing,
) -> Vec<Argument> {
    let selective = |modules: &[&str]| {
        vec![
            with("recompute-granularity", "selective"),
            with("recompute-modules", modules.join(" ")),
        ]
    };
    match choices.uniform().cloned() {
        None => by_layer(d, s, choices, missing),
        Some(Recomputed::None) => Vec::new(),
        Some(Recomputed::Full) => full("uniform", 1),
        Some(Recomputed::Selective) => {
            let mut modules = vec!["layernorm"];
            if model.experts.is_some() {
                modules.push("moe_act");
            }
            let dense = model
                .experts
                .as_ref()
                .is_none_or(|e| !e.in_layer.iter().all(|h| *h));
            if dense || model.rotary.is_some() {
                missing.add(
                    "recomputation of blocks",
                    "norms, activation functions and other cheap ops",
                    format!(
                        "{}; results of the others are kept, which takes more memory",
                        modules.join(" and ")
                    ),
                );
            }
            choices.recompute.fill(Recomputed::Ops(norms(model).into()));
            selective(&modules)
        }
        Some(what @ Recomputed::Ops(_)) => {
            let parts = [
                ("core_attn", &["attn.attend"][..]),
                ("layernorm", &["ln_1", "ln_2", "norm_1", "norm_2"][..]),
            ];
            let has = parts.iter().filter(|(_, ops)| what.has(ops));
            let modules: Vec<&str> = has.map(|(module, _)| *module).collect();
            let instead = match modules.is_empty() {
                true => "nothing is recomputed, which takes more memory".to_string(),
                false => format!("the modules {}", modules.join(" and ")),
            };
            let exactly = what == Recomputed::Ops(["{}.attn.attend".to_string()].into());
            if !exactly {
                missing.add(
                    "recomputation of blocks",
                    format!("the ops {}", what.words()),
                    instead,
                );
            }
            if modules.is_empty() {
                choices.recompute.fill(Recomputed::None);
                return Vec::new();
            }
            let mut made = BTreeSet::new();
            if modules.contains(&"core_attn") {
                made.insert("{}.attn.attend".to_string());
            }
            if modules.contains(&"layernorm") {
                made.extend(norms(model));
            }
            choices.recompute.fill(Recomputed::Ops(made));
            selective(&modules)
        }
    }
}

/// The norms of a block.
fn norms(model: &ModelShape) -> [String; 2] {
    let norms = match model.family.as_str() {
        "gpt2" => ["{}.ln_1", "{}.ln_2"],
        _ => ["{}.norm_1", "{}.norm_2"],
    };
    norms.map(String::from)
}

fn full(method: &str, layers: usize) -> Vec<Argument> {
    vec![
        with("recompute-granularity", "full"),
        with("recompute-method", method),
        with("recompute-num-layers", layers),
    ]
}

/// Blocks that recompute differently: the first of each stage in full, as many as have anything
/// recomputed in the stage that has most.
fn by_layer(
    d: &Degrees,
    s: &Summary,
    choices: &mut Choices,
    missing: &mut Missing,
) -> Vec<Argument> {
    let chunks = s.stages.as_deref().unwrap_or_default();
    let of_stage = |stage: &Stage| {
        let (first, n) = stage.blocks;
        let blocks = choices.recompute.iter().skip(first as usize);
        let blocks: Vec<&Recomputed> = blocks.take(n as usize).collect();
        let some = blocks.iter().filter(|r| ***r != Recomputed::None).count();
        let exact = blocks[..some].iter().all(|r| **r == Recomputed::Full);
        (some, exact)
    };
    let counts: Vec<(usize, bool)> = chunks.iter().map(of_stage).collect();
    let most = counts.iter().map(|c| c.0).max().unwrap_or(0);
    let exact = counts.iter().all(|c| c.1 && c.0 == most);
    if !exact {
        for (first, n, what) in super::recompute_runs(&s.recompute) {
            missing.add(
                format!("recomputation of {}", block_name(first, n)),
                what.words(),
                format!(
                    "the first {} of each of the {} stages in full, the others not at all",
                    ir::counted(most as u64, "block"),
                    chunks.len().max(d.pipeline as usize)
                ),
            );
        }
        for stage in chunks {
            for i in 0..stage.blocks.1 {
                let Some(block) = choices.recompute.get_mut((stage.blocks.0 + i) as usize) else {
                    continue;
                };
                *block = match (i as usize) < most {
                    true => Recomputed::Full,
                    false => Recomputed::None,
                };
            }
        }
    }
    full("block", most)
}

fn training(d: &Degrees, s: &Summary) -> Vec<Argument> {
    let mut args = vec![
        with("micro-batch-size", d.micro_batch),
        with("global-batch-size", s.global_batch),
    ];
    match s.precision {
        Precision::F32 => {}
        Precision::Bf16 => args.push(flag("bf16")),
        Precision::F16 => {
            args.push(flag("fp16"));
            args.push(with("initial-loss-scale", ir::training::LOSS_SCALE_UNIT));
            args.push(with("min-loss-scale", ir::training::LOWEST_LOSS_SCALE));
        }
    }
    match s.optimizer {
        Optimizer::AdamW {
            beta1,
            beta2,
            eps,
            weight_decay,
        } => args.extend([
            with("optimizer", "adam"),
            with("adam-beta1", beta1),
            with("adam-beta2", beta2),
            with("adam-eps", eps),
            with("weight-decay", weight_decay),
        ]),
        Optimizer::Sgd {
            momentum,
            weight_decay,
        } => args.extend([
            with("optimizer", "sgd"),
            with("sgd-momentum", momentum),
            with("weight-decay", weight_decay),
        ]),
    }
    args.push(with("clip-grad", s.clip_norm.unwrap_or(0.0)));
    args.push(with("attention-dropout", s.dropout));
    args.push(with("hidden-dropout", s.dropout));
    args.push(with("seed", s.seed));
    args
}

fn offload(s: &Summary, missing: &mut Missing) -> Vec<Argument> {
    let mut args = Vec::new();
    for (class, space) in &s.offload {
        match (class, space) {
            (TensorClass::Optimizer, ir::program::Space::Host) => {
                args.push(flag("optimizer-cpu-offload"));
                args.push(flag("use-precision-aware-optimizer"));
            }
            (class, space) => missing.add(
                class.words(),
                format!("rest in another memory ({})", space.name()),
                "rest on the device, which takes more of its memory",
            ),
        }
    }
    args
}

fn script(s: &Summary, args: &[Argument], fsdp: bool) -> String {
    let mut w = String::from("#!/usr/bin/env bash\n");
    let _ = writeln!(w, "# {}", origin(s, TARGET));
    w += "# Run it on every host, in a checkout of Megatron-LM: NODE_RANK and MASTER_ADDR as torchrun\n";
    w += "# wants them. What a plan does not say is taken from the environment; arguments of the\n";
    w += "# script are added, such as --data-path in place of mock data.\n";
    w += "set -euo pipefail\n";
    match fsdp {
        true => w += "unset CUDA_DEVICE_MAX_CONNECTIONS  # Megatron-FSDP needs several.\n",
        false => w += "export CUDA_DEVICE_MAX_CONNECTIONS=1\n",
    }
    let _ = writeln!(
        w,
        "exec torchrun --nnodes {} --nproc-per-node {} --node-rank \"${{NODE_RANK:-0}}\" \\\n  --master-addr \"${{MASTER_ADDR:-localhost}}\" --master-port \"${{MASTER_PORT:-29500}}\" \\\n  \"${{PRETRAIN:-pretrain_gpt.py}}\" \\",
        s.hosts.0, s.hosts.1
    );
    for (name, value) in args {
        match value {
            None => _ = writeln!(w, "  --{name} \\"),
            Some(value) => _ = writeln!(w, "  --{name} {} \\", shell(value)),
        }
    }
    w += "  --train-iters \"${TRAIN_ITERS:-100}\" --lr \"${LR:-1e-4}\" \"${@:---mock-data}\"\n";
    w
}

/// A value as the shell reads it: letters of layouts and patterns are quoted, lists of words not.
fn shell(value: &str) -> String {
    let is_special = |c: char| matches!(c, '|' | '*' | '[' | ']' | '(' | ')');
    match value.contains(is_special) {
        true => format!("'{value}'"),
        false => value.to_string(),
    }
}

fn yaml(s: &Summary, args: &[Argument]) -> String {
    let mut w = format!("# {}\n", origin(s, TARGET));
    w += "# The arguments of launch.sh as a map, in the form of Megatron-LM's functional tests.\n";
    w += "MODEL_ARGS:\n";
    for (name, value) in args {
        let value = match value {
            None => "true".to_string(),
            Some(v) if v.parse::<f64>().is_ok() => v.clone(),
            Some(v) => format!("\"{v}\""),
        };
        let _ = writeln!(w, "  --{name}: {value}");
    }
    w
}
