//! PyTorch's own parallelism: a device mesh, the DTensor placements of every parameter in use,
//! `fully_shard`, and checkpointed blocks, as a Python module that the training script imports.
//!
//! Parameters have their names in `transformers`. ZeRO level 1 is `fully_shard` whose gradients are
//! reduced once a step, level 2 one whose parameters stay gathered, level 3 one that releases
//! them. What DTensor has no public placement for (parts of a fused matrix, experts in modules of
//! their own) is listed.

use super::python::{layers, list, numbers, string};
use super::{Choices, Missing, Target, Written, degrees, origin};
use crate::layout::{Parameter, Run};
use crate::names;
use crate::recompute::Recomputed;
use crate::summary::{ContextAttention, Degrees, Role, Summary, role, run_name};
use crate::{ExportError, File, Read};
use ir::offload::TensorClass;
use ir::plan::ScheduleKind;
use ir::{AxisId, Optimizer, Precision, ShardingSpec};
use std::fmt::Write;

const TARGET: Target = Target::Fsdp2;

/// The text behind the data.
const CODE: &str = include_str!("fsdp2_code.py");

const HEADER: &str =
    "\"\"\"How a training script lays out a model of transformers and makes a step of this plan:

    torch.distributed.init_process_group()
    mesh = device_mesh()
    parallelize(model, mesh)        # placements, checkpointed blocks, fully_shard
    step = optimizer(model, lr)
    for batch in ...:
        for i in range(ACCUMULATION):     # microbatches of MICRO_BATCH samples on each data rank
            begin(model, i)
            loss = model(.., use_cache=False).loss    # a block that runs again must not fill a cache
            (loss / ACCUMULATION).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)    # unless that is None
        step.step()
        step.zero_grad()

In PARAMETERS, `h.3` is the block BLOCKS.3 of the model, and `{}` in a name stands for such a block.
\"\"\"

";

pub(super) fn write(read: &Read<'_>) -> Result<Written, ExportError> {
    let summary = &read.summary;
    if names::block_class(&summary.family).is_none() {
        let reason = format!(
            "the names of the family {} in transformers are not known here",
            summary.family
        );
        return Err(super::unknown(TARGET, reason));
    }
    let d = degrees(summary, TARGET)?;
    let mut missing = Missing::default();
    let mut choices = Choices::of(summary);
    missing.add_deviations(summary, super::placed_elsewhere(d));
    let mut w = format!("# {}\n", origin(summary, TARGET));
    w += HEADER;
    w += IMPORTS;
    mesh(summary, d, &mut w);
    let _ = writeln!(w, "ZERO = {}  # level of splitting over \"shard\"", d.zero);
    super::split_over_context(d, &mut missing);
    let _ = writeln!(
        w,
        "MICRO_BATCH, ACCUMULATION, SEQUENCE = {}, {}, {}",
        d.micro_batch, summary.accumulation, summary.sequence
    );
    let dtype = match summary.precision {
        Precision::F32 => "float32",
        Precision::Bf16 => "bfloat16",
        Precision::F16 => "float16",
    };
    let _ = writeln!(w, "COMPUTE_DTYPE = torch.{dtype}");
    optimizer(summary, &mut w);
    stages(read, d, &mut choices, &mut w, &mut missing);
    placements(read, &mut w, &mut missing);
    checkpoints(summary, &mut choices, &mut w, &mut missing);
    let offloads = offload(summary, &mut missing);
    let _ = writeln!(w, "OFFLOAD = {}\n", if offloads { "True" } else { "False" });
    activations(d, &mut missing);
    w += CODE;
    Ok(Written {
        files: vec![File {
            name: "fsdp2_plan.py",
            text: w,
        }],
        not_expressed: missing.list(),
        choices,
    })
}

const IMPORTS: &str = "import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

";

fn mesh(s: &Summary, d: &Degrees, w: &mut String) {
    let device = if s.on_cpu { "cpu" } else { "cuda" };
    let _ = writeln!(w, "DEVICE = \"{device}\"");
    *w += "# Slow links first; states are split over \"shard\", copied over \"replicate\".\n";
    if d.context > 1 {
        *w += "# Both hold the data ranks and, inside of them, the ranks that share a sequence.\n";
    }
    *w += "MESH = [\n";
    // Gradients are summed over context ranks as over data ranks, so they are among the same dims.
    let (copies, shards) = match d.zero {
        0 => (d.data * d.context, 1),
        _ => (d.data / d.sharded.max(1), d.sharded * d.context),
    };
    let dims = [
        ("pipeline", d.pipeline),
        ("replicate", copies),
        ("shard", shards),
        ("tensor", d.tensor),
    ];
    for (name, size) in dims {
        let _ = writeln!(w, "    (\"{name}\", {size}),");
    }
    let _ = writeln!(
        w,
        "]\nCONTEXT = {}  # ranks that share a sequence",
        d.context
    );
}

fn optimizer(s: &Summary, w: &mut String) {
    let _ = match s.optimizer {
        Optimizer::AdamW {
            beta1,
            beta2,
            eps,
            weight_decay,
        } => writeln!(
            w,
            "OPTIMIZER = (torch.optim.AdamW, {{\"betas\": ({beta1:?}, {beta2:?}), \"eps\": {eps:?}}})\nWEIGHT_DECAY = {weight_decay:?}  # of parameters with two or more dims"
        ),
        Optimizer::Sgd {
            momentum,
            weight_decay,
        } => writeln!(
            w,
            "OPTIMIZER = (torch.optim.SGD, {{\"momentum\": {momentum:?}}})\nWEIGHT_DECAY = {weight_decay:?}  # of parameters with two or more dims"
        ),
    };
    let norm = s.clip_norm.map_or("None".to_string(), |n| format!("{n:?}"));
    let _ = writeln!(w, "CLIP_NORM = {norm}\n");
}

fn stages(
    read: &Read<'_>,
    d: &Degrees,
    choices: &mut Choices,
    w: &mut String,
    missing: &mut Missing,
) {
    let summary = &read.summary;
    if d.pipeline == 1 {
        *w += "SCHEDULE, STAGES = None, None\n";
        return;
    }
    let has = choices.nearest_schedule(summary, &TARGET.framework().vocabulary());
    let schedule = match summary.schedule {
        other if !has => {
            missing.add("the schedule", other.name(), "1f1b");
            "1F1B"
        }
        ScheduleKind::GPipe => "GPipe",
        ScheduleKind::Interleaved { .. } => "Interleaved1F1B",
        ScheduleKind::ZbV => "ZBVZeroBubble",
        _ => "1F1B",
    };
    *w += "# For torch.distributed.pipelining: the schedule, and the layers of each stage.\n";
    let _ = writeln!(w, "SCHEDULE = \"{schedule}\"\nSTAGES = [");
    for stage in 0..read.plan.stages.len() {
        let names = read.runs.iter().filter(|r| r.stage == stage);
        let names: Vec<String> = names.map(|r| format!("*{}", layers(&r.names))).collect();
        let _ = writeln!(w, "    {},", list(&names));
    }
    *w += "]\n";
    missing.add(
        "the pipeline",
        format!("{} stages", read.plan.stages.len()),
        "the layers of each stage; the script cuts the model, makes its PipelineStage and the schedule of this name",
    );
}

fn placements(read: &Read<'_>, w: &mut String, missing: &mut Missing) {
    *w += "\n# How parameters lie over tensor ranks while they are used, and along which dim they are split\n# over \"shard\" at rest: layers, name -> (tensor placement, dim at rest).\nPARAMETERS = [\n";
    let family = &read.summary.family;
    for run in &read.runs {
        let roles: Vec<Role> = run
            .axes
            .iter()
            .map(|a| role(a).unwrap_or(Role::Idle))
            .collect();
        let _ = writeln!(w, "    ({}, {{", layers(&run.names));
        for p in &run.parameters {
            let Some(stored) = names::stored(family, p) else {
                missing.add(
                    place(p, run),
                    "a spec of its own",
                    "nothing: its name in transformers is not known",
                );
                continue;
            };
            let (tensor, rest) = one(p, run, &roles, &stored, missing);
            let _ = writeln!(w, "        {}: ({tensor}, {rest}),", string(&stored.name));
        }
        *w += "    }),\n";
    }
    *w += "]\n";
    let _ = writeln!(w, "BLOCKS = \"{}\"", names::block_prefix(family));
}

fn place(p: &Parameter, run: &Run) -> String {
    // Blocks alone have equals.
    match run.count == 1 && !run.name.starts_with("h.") {
        true => p.path.clone(),
        false => format!("{} of {}", p.relative.replace("{}.", ""), run_name(run)),
    }
}

/// The placement of a parameter over tensor ranks, and the dim that it is split along at rest.
///
/// Along which dim states lie split changes no result, so where the plan's is no dim of the stored
/// tensor, or `fully_shard` would need uneven parts of it, it is the first.
fn one(
    p: &Parameter,
    run: &Run,
    roles: &[Role],
    stored: &names::Stored,
    missing: &mut Missing,
) -> (String, usize) {
    let ours = |is: fn(&Role) -> bool, spec: &ShardingSpec| -> Option<usize> {
        let axes = (0..roles.len()).filter(|k| is(&roles[*k]) && run.axes[*k].size > 1);
        axes.filter_map(|k| spec.dim_of(AxisId::new(k))).next()
    };
    let theirs = |dim: Option<usize>| stored.dims.get(dim?).copied().flatten();
    let split = ours(|r| *r == Role::Tensor, &p.in_use);
    let tensor = theirs(split);
    if let (Some(dim), None) = (split, tensor) {
        let why = match stored.name.contains('*') {
            true => "experts, which are modules of their own".to_string(),
            false => format!(
                "dim {dim} of {:?}, whose parts do not lie together in {}",
                p.shape, stored.name
            ),
        };
        missing.add(
            place(p, run),
            format!("split over tensor ranks along {why}"),
            "whole on every tensor rank",
        );
    }
    let is_copied = |r: &Role| matches!(r, Role::Data | Role::Context(_));
    let rest = theirs(ours(is_copied, &p.at_rest)).filter(|dim| {
        let ranks: u32 = run.axes.iter().map(|a| a.size).product();
        let len = stored.len_of(*dim, &p.shape);
        len.is_multiple_of(u64::from(ranks.max(1)))
    });
    let placement = tensor.map_or("Replicate()".into(), |d| format!("Shard({d})"));
    (placement, rest.unwrap_or(0))
}

fn checkpoints(s: &Summary, choices: &mut Choices, w: &mut String, missing: &mut Missing) {
    let of = |what: &dyn Fn(&Recomputed) -> bool| -> Vec<usize> {
        let all = s.recompute.iter().enumerate();
        all.filter(|(_, r)| what(r)).map(|(i, _)| i).collect()
    };
    let full = of(&|r| *r == Recomputed::Full);
    let selective = of(&|r| matches!(r, Recomputed::Selective | Recomputed::Ops(_)));
    for (first, n, what) in super::recompute_runs(&s.recompute) {
        if let Recomputed::Ops(_) = what {
            missing.add(
                format!("recomputation of {}", super::block_name(first, n)),
                format!("the ops {}", what.words()),
                "selective: all but the results of matmuls and attention",
            );
        }
    }
    for r in &mut choices.recompute {
        if matches!(r, Recomputed::Ops(_)) {
            *r = Recomputed::Selective;
        }
    }
    let _ = writeln!(
        w,
        "\n# Blocks that keep their input alone, and blocks that keep results of matmuls and attention.\nFULL = {}\nSELECTIVE = {}",
        numbers(&full),
        numbers(&selective)
    );
}

/// Whether everything at rest lies in host memory.
fn offload(s: &Summary, missing: &mut Missing) -> bool {
    let host = ir::program::Space::Host;
    let on_host = |class| s.offload.get(&class) == Some(&host);
    let all = on_host(TensorClass::Optimizer);
    for (class, space) in &s.offload {
        let is_fine = all && (*class != TensorClass::Activations) && *space == host;
        if !is_fine {
            missing.add(
                class.words(),
                format!("rest in another memory ({})", space.name()),
                "rest on the device, which takes more of its memory",
            );
        }
    }
    all
}

/// Lists what modules do with activations, which placements of parameters do not say.
fn activations(d: &Degrees, missing: &mut Missing) {
    if d.sequence_parallel && d.tensor > 1 {
        missing.add(
            "norms and residuals",
            "split along the sequence over the tensor ranks",
            "as DTensor propagates them; parallelize_module with SequenceParallel() asks for it",
        );
    }
    if d.context > 1 {
        let how = match d.context_attention {
            Some(ContextAttention::Ring) => "go around a ring",
            Some(ContextAttention::Ulysses) => "are exchanged for heads (Ulysses)",
            _ => "are gathered",
        };
        missing.add(
            "attention over context ranks",
            format!("keys and values {how}"),
            "nothing: the script wraps its step in context_parallel(context_mesh())",
        );
    }
    if d.expert > 1 {
        missing.add(
            "experts",
            format!("split over {} ranks", d.expert),
            "whole in use: experts are modules of their own, which DTensor does not split",
        );
    }
}
