//! Ranks by what they split: samples, experts, rows of the table of tokens, states.

use super::{Beside, shape};
use crate::arguments::{Arguments, assumed};
use crate::launch::World;
use crate::{JobError, Note};

/// A degree under one of several names.
pub(super) fn degree(args: &Arguments, names: &[&str]) -> Result<u32, JobError> {
    let mut most = 1;
    for name in names {
        most = most.max(args.degree(name)?);
    }
    Ok(most)
}

/// The ranks that split samples: what the other degrees leave of the devices.
pub(super) fn data_ranks(
    args: &Arguments,
    world: &World,
    degrees: [u32; 3],
) -> Result<Option<u32>, JobError> {
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
pub(super) fn vocab_multiple(args: &Arguments, tensor: u32) -> Result<u64, JobError> {
    if args.count("padded-vocab-size")?.is_some() {
        return Ok(1);
    }
    let own = args.count("make-vocab-size-divisible-by")?.unwrap_or(128);
    Ok(own.saturating_mul(u64::from(tensor)).clamp(1, crate::MOST))
}

/// The ranks that split experts.
pub(super) fn experts(args: &Arguments, tensor: u32) -> Result<u32, JobError> {
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

pub(super) fn zero(
    args: &Arguments,
    beside: &Beside,
    notes: &mut Vec<Note>,
) -> Result<u8, JobError> {
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
