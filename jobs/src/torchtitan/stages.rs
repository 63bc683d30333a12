//! Data ranks, stages and schedules of a torchtitan file.

use crate::arguments::Arguments;
use crate::launch::World;
use crate::{JobError, Split};
use ir::plan::ScheduleKind;

/// The ranks that split samples: those that copy states times those that split them; none where neither
/// the file nor the launcher says how many devices there are.
pub(super) fn data_ranks(
    args: &Arguments,
    world: &World,
    [tensor, context, pipeline, copies, shard]: [u32; 5],
) -> Result<Option<u32>, JobError> {
    let product = |all: &[u32]| all.iter().try_fold(1u32, |a, n| a.checked_mul(*n));
    let wrong = |problem: String| {
        args.wrong(
            "parallelism.data-parallel-shard-degree",
            problem,
            "torchtitan refuses it, too: change the degrees, or the number of devices",
        )
    };
    let inside = product(&[tensor, context, pipeline, copies]);
    let inside = inside.ok_or_else(|| wrong("the degrees are more ranks than there are".into()))?;
    match (world.devices(), shard) {
        (None, 0) => Ok(None),
        (None, n) => product(&[copies, n])
            .map(Some)
            .ok_or_else(|| wrong("the degrees are more ranks than there are".into())),
        (Some(n), 0) if n.is_multiple_of(inside) && n >= inside => Ok(Some(n / inside * copies)),
        (Some(n), shard) if shard > 0 && inside.checked_mul(shard) == Some(n) => {
            Ok(Some(copies * shard))
        }
        (Some(n), _) => Err(wrong(format!(
            "{copies} replicate x {} shard x {context} context x {tensor} tensor x {pipeline} pipeline ranks are not {n} devices",
            if shard == 0 {
                "any number of".to_string()
            } else {
                shard.to_string()
            }
        ))),
    }
}

/// Stages on each mesh, where the file says it, and how stages divide the layers.
pub(super) fn stages(args: &Arguments, pipeline: u32) -> Result<(Option<u32>, Split), JobError> {
    let listed = args
        .text("parallelism.module-fqns-per-model-part")?
        .map(String::from);
    let each = args.count("parallelism.pipeline-parallel-layers-per-stage")?;
    let first = args
        .text("parallelism.pipeline-parallel-first-stage-less-layers")?
        .is_some();
    let last = args
        .text("parallelism.pipeline-parallel-last-stage-less-layers")?
        .is_some();
    if pipeline == 1 {
        return Ok((None, Split::Own));
    }
    if let Some(listed) = listed {
        let counts: Vec<u64> = listed
            .split('|')
            .map(|stage| {
                let is_layer =
                    |w: &&str| w.starts_with("layers.") || *w == "tok_embeddings" || *w == "output";
                stage.split(' ').filter(is_layer).count() as u64
            })
            .collect();
        let n = counts.len() as u32;
        if !n.is_multiple_of(pipeline) {
            return Err(args.wrong(
                "parallelism.module-fqns-per-model-part",
                format!("{n} parts are not shared evenly by {pipeline} pipeline ranks"),
                "correct it in the file",
            ));
        }
        return Ok((Some(n / pipeline), Split::Counts(counts)));
    }
    if each.is_some() || first || last {
        return Err(args.wrong(
            "parallelism.pipeline-parallel-layers-per-stage",
            "the layers of stages are given by their number, which is not modelled",
            "write the stages out with module_fqns_per_model_part",
        ));
    }
    Ok((None, Split::Own))
}

pub(super) fn schedule(
    args: &Arguments,
    pipeline: u32,
    chunks: Option<u32>,
) -> Result<(ScheduleKind, u32), JobError> {
    let key = "parallelism.pipeline-parallel-schedule";
    let name = args.text(key)?.unwrap_or("1F1B").to_string();
    if pipeline == 1 {
        return Ok((ScheduleKind::OneFOneB, 1));
    }
    match name.to_lowercase().as_str() {
        "1f1b" => Ok((ScheduleKind::OneFOneB, chunks.unwrap_or(1))),
        "gpipe" => Ok((ScheduleKind::GPipe, 1)),
        // Two stages on each rank are its default.
        "interleaved1f1b" => Ok((ScheduleKind::OneFOneB, chunks.unwrap_or(2))),
        "zbvzerobubble" => Ok((ScheduleKind::ZbV, 1)),
        _ => Err(args.wrong(
            key,
            format!("the schedule `{name}` is not modelled"),
            "modelled are 1F1B, GPipe, Interleaved1F1B and ZBVZeroBubble: import a copy of the file with one of them",
        )),
    }
}
