//! A plan in the words of the software that it is made for: what its users turn, with its values
//! and its names there; and what its processes hold.

use super::table;
use export::{Degrees, Recomputed, Summary};
use frameworks::{Framework, MemoryUse};
use ir::plan::Plan;
use serde::Serialize;

/// A knob of some software.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Knob {
    /// Its meaning.
    pub what: &'static str,
    /// Its value.
    pub value: String,
    /// Its name there; empty where it follows from others.
    pub name: &'static str,
}

/// The knobs of a plan; none where it has no degrees that are the same everywhere.
pub fn knobs(plan: &Plan, summary: &Summary) -> Option<Vec<Knob>> {
    let made_for = plan.made_for.as_ref()?;
    let framework = Framework::named(&made_for.name)?;
    let d = summary.degrees.as_ref()?;
    let names = Names::of(framework);
    let v = framework.vocabulary();
    let mut all = Vec::new();
    let mut knob = |what, value: String, name| all.push(Knob { what, value, name });
    knob(
        "micro-batch size",
        d.micro_batch.to_string(),
        names.micro_batch,
    );
    let steps = summary.accumulation.to_string();
    knob("gradient accumulation", steps, names.accumulation);
    knob(
        "global batch size",
        summary.global_batch.to_string(),
        names.global_batch,
    );
    knob("data parallel", d.data.to_string(), names.data);
    let degrees = [
        (v.tensor, "tensor parallel", d.tensor, names.tensor),
        (v.pipeline, "pipeline parallel", d.pipeline, names.pipeline),
        (
            v.interleaved,
            "virtual stages",
            d.virtual_stages,
            names.chunks,
        ),
        (
            v.context.is_some(),
            "context parallel",
            d.context,
            names.context,
        ),
        (v.expert, "expert parallel", d.expert, names.expert),
    ];
    for (has, what, degree, name) in degrees {
        if has {
            knob(what, degree.to_string(), name);
        }
    }
    let (sharding, name) = sharding(framework, d);
    knob("sharding of states", sharding, name);
    if d.tensor > 1 {
        let is = if d.sequence_parallel { "yes" } else { "no" };
        knob("sequence parallel", is.into(), names.sequence_parallel);
    }
    if d.pipeline > 1 {
        knob("schedule", plan.schedule.name().into(), names.schedule);
    }
    knob(
        "recomputation",
        recomputed(&summary.recompute),
        names.recompute,
    );
    Some(all)
}

/// Names of knobs in some software.
struct Names {
    micro_batch: &'static str,
    accumulation: &'static str,
    global_batch: &'static str,
    data: &'static str,
    tensor: &'static str,
    pipeline: &'static str,
    chunks: &'static str,
    context: &'static str,
    expert: &'static str,
    sequence_parallel: &'static str,
    schedule: &'static str,
    recompute: &'static str,
}

const NONE: Names = Names {
    micro_batch: "",
    accumulation: "",
    global_batch: "",
    data: "",
    tensor: "",
    pipeline: "",
    chunks: "",
    context: "",
    expert: "",
    sequence_parallel: "",
    schedule: "",
    recompute: "",
};

impl Names {
    fn of(framework: Framework) -> Names {
        match framework {
            Framework::MegatronCore => Names {
                micro_batch: "--micro-batch-size",
                global_batch: "--global-batch-size",
                tensor: "--tensor-model-parallel-size",
                pipeline: "--pipeline-model-parallel-size",
                chunks: "--num-virtual-stages-per-pipeline-rank",
                context: "--context-parallel-size",
                expert: "--expert-model-parallel-size",
                sequence_parallel: "--sequence-parallel",
                recompute: "--recompute-granularity, --recompute-modules",
                ..NONE
            },
            Framework::MegatronDeepSpeed => Names {
                micro_batch: "--micro-batch-size",
                accumulation: "gradient_accumulation_steps",
                global_batch: "--global-batch-size",
                tensor: "--tensor-model-parallel-size",
                pipeline: "--pipeline-model-parallel-size",
                recompute: "--checkpoint-activations",
                ..NONE
            },
            Framework::Nemo => Names {
                micro_batch: "micro_batch_size",
                global_batch: "global_batch_size",
                tensor: "tensor_model_parallel_size",
                pipeline: "pipeline_model_parallel_size",
                chunks: "virtual_pipeline_model_parallel_size",
                context: "context_parallel_size",
                expert: "expert_model_parallel_size",
                sequence_parallel: "sequence_parallel",
                recompute: "recompute_granularity, recompute_modules",
                ..NONE
            },
            Framework::TorchTitan => Names {
                micro_batch: "training.local_batch_size, parallelism.pipeline_parallel_microbatch_size",
                global_batch: "training.global_batch_size",
                data: "parallelism.data_parallel_shard_degree, ..replicate_degree",
                tensor: "parallelism.tensor_parallel_degree",
                pipeline: "parallelism.pipeline_parallel_degree",
                context: "parallelism.context_parallel_degree",
                expert: "parallelism.expert_parallel_degree",
                schedule: "parallelism.pipeline_parallel_schedule",
                recompute: "activation_checkpoint.mode",
                ..NONE
            },
            Framework::DeepSpeed => Names {
                micro_batch: "train_micro_batch_size_per_gpu",
                accumulation: "gradient_accumulation_steps",
                global_batch: "train_batch_size",
                context: "sequence_parallel_size",
                recompute: "deepspeed.checkpointing.checkpoint",
                ..NONE
            },
            Framework::Fsdp2 | Framework::Fsdp1 => Names {
                data: "the mesh of fully_shard",
                tensor: "the mesh of parallelize_module",
                recompute: "torch.utils.checkpoint",
                ..NONE
            },
            Framework::Jax => Names {
                data: "Mesh axis data",
                tensor: "Mesh axis tensor",
                context: "Mesh axis context",
                expert: "Mesh axis expert",
                recompute: "jax.checkpoint",
                ..NONE
            },
            Framework::InternEvo | Framework::OneFlow | Framework::Llama3 => NONE,
        }
    }
}

/// How states lie over the ranks that split samples, and the name of the knob.
fn sharding(framework: Framework, d: &Degrees) -> (String, &'static str) {
    let over = match (d.zero > 0, d.context) {
        (true, 1) if d.has_copies() => {
            format!(
                " over {} of the {} data ranks, with copies",
                d.sharded, d.data
            )
        }
        (true, 2..) if d.has_copies() => format!(
            " over {} of the {} data x context ranks, with copies",
            d.shards(),
            d.data * d.context
        ),
        (true, 2..) => format!(" over the {} data x context ranks", d.shards()),
        _ => String::new(),
    };
    let level = format!("ZeRO-{}{over}", d.zero);
    let (words, name) = match (framework, d.zero) {
        (Framework::MegatronCore | Framework::Nemo, 0) => ("whole copies", ""),
        (Framework::MegatronCore, 1) => ("distributed optimizer", "--use-distributed-optimizer"),
        (Framework::MegatronCore, 2) => (
            "Megatron-FSDP, optim_grads",
            "--data-parallel-sharding-strategy",
        ),
        (Framework::MegatronCore, _) => (
            "Megatron-FSDP, optim_grads_params",
            "--data-parallel-sharding-strategy",
        ),
        (Framework::Nemo, 1) => ("distributed optimizer", "ddp.use_distributed_optimizer"),
        (Framework::Nemo, _) => ("Megatron-FSDP", "ddp.data_parallel_sharding_strategy"),
        (Framework::TorchTitan, 0) => ("replicated", "parallelism.data_parallel_replicate_degree"),
        (Framework::TorchTitan, 1 | 2) => (
            "kept after the forward pass",
            "parallelism.fsdp_reshard_after_forward",
        ),
        (Framework::TorchTitan, _) => (
            "resharded after the forward pass",
            "parallelism.fsdp_reshard_after_forward",
        ),
        (Framework::DeepSpeed | Framework::MegatronDeepSpeed, _) => {
            ("stage", "zero_optimization.stage")
        }
        (Framework::Fsdp1, 0) => ("NO_SHARD", "sharding_strategy"),
        (Framework::Fsdp1, 1 | 2) => ("SHARD_GRAD_OP", "sharding_strategy"),
        (Framework::Fsdp1, _) => ("FULL_SHARD", "sharding_strategy"),
        (Framework::Fsdp2, 3) => ("reshard_after_forward=True", "fully_shard"),
        (Framework::Fsdp2, 1 | 2) => ("reshard_after_forward=False", "fully_shard"),
        _ => ("", ""),
    };
    match words {
        "" => (level, name),
        words => (format!("{words} ({level})"), name),
    }
}

/// Says what blocks recompute, where they all do the same.
fn recomputed(blocks: &[Recomputed]) -> String {
    let first = blocks.first().map_or("none".into(), Recomputed::in_words);
    match blocks.iter().all(|b| Some(b) == blocks.first()) {
        true => first,
        false => {
            let full = blocks.iter().filter(|b| **b == Recomputed::Full).count();
            format!("{full} of {} blocks in full", blocks.len())
        }
    }
}

/// The knobs as a table.
pub fn knob_table(knobs: &[Knob]) -> String {
    let rows = knobs
        .iter()
        .map(|k| vec![k.what.to_string(), k.value.clone(), k.name.to_string()]);
    table(&["", "value", "its name there"], rows.collect(), 3)
}

/// The memory of processes, a row for each of some meshes.
pub fn memory_table(memory: &[(String, MemoryUse)]) -> String {
    let rows = memory.iter().map(|(mesh, m)| {
        let bytes = m.parts().into_iter().chain([m.total()]);
        let cells = bytes.map(|b| b.to_string());
        let row: Vec<String> = std::iter::once(mesh.clone()).chain(cells).collect();
        row
    });
    let header = [
        "stage",
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "buffers",
        "allocator",
        "driver",
        "all",
    ];
    table(&header, rows.collect(), 1)
}
