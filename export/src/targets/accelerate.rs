//! Hugging Face's accelerate: the YAML file that `accelerate launch --config_file` reads.
//!
//! Plain data parallelism is `MULTI_GPU`, ZeRO-1 is DeepSpeed's, the levels above are FSDP2's.
//! Keys are those of accelerate 1.15's `ClusterConfig` and of its launcher, which reads what is
//! written (docs/export.md).

use super::{Choices, Missing, Target, Written, block_name, deepspeed, degrees, inexpressible};
use super::{origin, recompute_runs};
use crate::names;
use crate::recompute::Recomputed;
use crate::summary::{ContextAttention, Degrees, Summary};
use crate::{ExportError, File, Read};
use ir::Precision;
use ir::offload::TensorClass;
use ir::program::Space;
use std::fmt::Write;

const TARGET: Target = Target::Accelerate;

pub(super) fn write(read: &Read<'_>) -> Result<Written, ExportError> {
    let summary = &read.summary;
    let d = degrees(summary, TARGET)?;
    if d.pipeline > 1 {
        let reason = format!(
            "it trains without pipelines, and the plan has {} stages in a row; `--to megatron-core`, `torchtitan` and `deepspeed` have them",
            d.pipeline
        );
        return Err(inexpressible(TARGET, reason));
    }
    let mut missing = Missing::default();
    let mut choices = Choices::of(summary);
    missing.add_deviations(summary, super::placed_elsewhere(d));
    let is_plain = d.tensor == 1 && d.context == 1;
    let mut w = format!("# {}\n", origin(summary, TARGET));
    let _ = writeln!(
        w,
        "# accelerate launch --config_file accelerate.yaml train.py, on every host with its --machine_rank.\n# The script says the rest: batches of {} samples in its DataLoader, sequences of {} tokens,\n# Accelerator(gradient_accumulation_steps={}), clip_grad_norm_.",
        d.micro_batch, summary.sequence, summary.accumulation
    );
    let _ = writeln!(
        w,
        "compute_environment: LOCAL_MACHINE\ndebug: false\nmachine_rank: 0\nmain_training_function: main\nmixed_precision: {}\nnum_machines: {}\nnum_processes: {}\nrdzv_backend: static\nsame_network: true\nuse_cpu: {}",
        match summary.precision {
            Precision::F32 => "\"no\"",
            Precision::Bf16 => "bf16",
            Precision::F16 => "fp16",
        },
        summary.hosts.0,
        summary.devices,
        summary.on_cpu
    );
    match d.zero {
        0 if is_plain => {
            let kind = match (summary.devices, summary.on_cpu) {
                (1, _) => "\"NO\"",
                (_, true) => "MULTI_CPU",
                (_, false) => "MULTI_GPU",
            };
            let _ = writeln!(w, "distributed_type: {kind}");
            in_script(summary, &mut missing);
            rest_on_device(summary, &mut missing);
        }
        1 if is_plain => deepspeed(summary, d, &mut choices, &mut w, &mut missing),
        _ => fsdp(summary, d, &mut choices, &mut w, &mut missing)?,
    }
    if d.expert > 1 {
        missing.add(
            "experts",
            format!("split over {} ranks", d.expert),
            "whole on every rank, as far as FSDP does not split all parameters",
        );
    }
    missing.add_optimizer(summary, "hands it to accelerator.prepare");
    Ok(Written {
        files: vec![File {
            name: "accelerate.yaml",
            text: w,
        }],
        not_expressed: missing.list(),
        choices,
    })
}

/// Recomputation that the script turns on.
fn in_script(s: &Summary, missing: &mut Missing) {
    for (first, n, what) in recompute_runs(&s.recompute) {
        if *what != Recomputed::None {
            missing.add(
                format!("recomputation of {}", block_name(first, n)),
                what.words(),
                "nothing: the script calls model.gradient_checkpointing_enable(), which recomputes all blocks in full",
            );
        }
    }
}

fn rest_on_device(s: &Summary, missing: &mut Missing) {
    for (class, space) in &s.offload {
        missing.add(
            class.words(),
            format!("rest in another memory ({})", space.name()),
            "rest on the device, which takes more of its memory",
        );
    }
}

fn deepspeed(
    s: &Summary,
    d: &Degrees,
    choices: &mut Choices,
    w: &mut String,
    missing: &mut Missing,
) {
    let level = deepspeed::zero_level(d, choices, missing);
    let device = match s.offload.get(&TensorClass::Optimizer) {
        None => "none",
        Some(Space::File) => "nvme",
        Some(_) => "cpu",
    };
    for (class, space) in s
        .offload
        .iter()
        .filter(|(c, _)| **c != TensorClass::Optimizer)
    {
        missing.add(
            class.words(),
            format!("rest in another memory ({})", space.name()),
            "rest on the device, which takes more of its memory",
        );
    }
    let _ = writeln!(
        w,
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: {level}\n  gradient_accumulation_steps: {}\n  gradient_clipping: {:?}\n  offload_optimizer_device: {device}\n  offload_param_device: none\n  zero3_init_flag: false",
        s.accumulation,
        s.clip_norm.unwrap_or(0.0)
    );
    in_script(s, missing);
}

fn fsdp(
    s: &Summary,
    d: &Degrees,
    choices: &mut Choices,
    w: &mut String,
    missing: &mut Missing,
) -> Result<(), ExportError> {
    let class = names::block_class(&s.family);
    let class = class.ok_or_else(|| {
        let reason = format!(
            "the class of a block of the family {} is not known",
            s.family
        );
        super::unknown(TARGET, reason)
    })?;
    if d.zero == 0 && d.data * d.context > 1 {
        choices.zero = 2;
        let all = match d.context {
            1 => "data rank",
            _ => "data and context rank",
        };
        missing.add(
            "states and gradients",
            format!("whole on every {all} (ZeRO level 0)"),
            "split over them (level 2): accelerate has no copies alone beside tensor or context ranks",
        );
    }
    // FSDP splits over the joint mesh of `dp_shard` and `cp`.
    super::split_over_context(d, missing);
    if d.zero == 1 {
        choices.zero = 2;
        missing.add(
            "gradients",
            "whole on every data rank (ZeRO level 1)",
            "split over them (level 2): FSDP has no level 1, and DeepSpeed no such tensor or context ranks here",
        );
    }
    if choices.zero == 2 && s.accumulation > 1 {
        missing.add(
            "parameters",
            "gathered once a step",
            "gathered again for each microbatch, and released behind its backward pass",
        );
    }
    let full = choices.uniform() == Some(&Recomputed::Full);
    let none = choices.uniform() == Some(&Recomputed::None);
    if !full && !none {
        for (first, n, what) in recompute_runs(&s.recompute) {
            if *what != Recomputed::Full {
                missing.add(
                    format!("recomputation of {}", block_name(first, n)),
                    what.words(),
                    "full: accelerate treats all blocks alike, and this takes the least memory",
                );
            }
        }
        choices.recompute.fill(Recomputed::Full);
    }
    let on_host = |class| s.offload.get(&class) == Some(&Space::Host);
    let offload = on_host(TensorClass::Optimizer) && on_host(TensorClass::Parameters);
    if !offload {
        rest_on_device(s, missing);
    }
    let _ = writeln!(
        w,
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_transformer_layer_cls_to_wrap: {class}\n  fsdp_reshard_after_forward: {}\n  fsdp_offload_params: {offload}\n  fsdp_activation_checkpointing: {}\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n  fsdp_cpu_ram_efficient_loading: true",
        d.zero == 3,
        !none
    );
    parallelism(d, w, missing);
    Ok(())
}

fn parallelism(d: &Degrees, w: &mut String, missing: &mut Missing) {
    let shard = if d.zero == 0 { d.data } else { d.sharded };
    let (mut cp, mut sp) = (1, 1);
    match d.context_attention {
        Some(ContextAttention::Ulysses) => sp = d.context,
        _ => cp = d.context,
    }
    if sp > 1 {
        missing.add(
            "attention over context ranks",
            "tokens are exchanged for heads (Ulysses) beside FSDP",
            "keys and values are gathered: accelerate has the exchange with DeepSpeed alone",
        );
        (cp, sp) = (sp, 1);
    }
    let _ = writeln!(
        w,
        "parallelism_config:\n  parallelism_config_dp_replicate_size: {}\n  parallelism_config_dp_shard_size: {shard}\n  parallelism_config_tp_size: {}\n  parallelism_config_cp_size: {cp}\n  parallelism_config_sp_size: {sp}",
        d.data / shard,
        d.tensor
    );
    if d.context > 1 {
        let how = match d.context_attention {
            Some(ContextAttention::Ring) => "alltoall",
            _ => "allgather",
        };
        let _ = writeln!(w, "  parallelism_config_cp_comm_strategy: {how}");
    }
    if d.tensor > 1 {
        missing.add(
            "tensor ranks",
            "split as the plan has it",
            "split by the tp_plan of the model in transformers",
        );
    }
    if d.sequence_parallel && d.tensor > 1 {
        missing.add(
            "norms and residuals",
            "split along the sequence over the tensor ranks",
            "as the model's tp_plan has it, which keeps them whole in most models",
        );
    }
}
