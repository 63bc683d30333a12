//! Whether a plan keeps the ZeRO level that its pins state: the list of pins may have been edited.
//!
//! A level says how parameters lie over the axes that do not split their uses, and leaves open which
//! of them can lie so: those with a dim shorter than the ranks cannot be split, and ZeRO-1 may have
//! to split sums of gradients too. So a plan is refused where something lies as no such plan has it,
//! or too little as the level says.

use crate::report::parallelism::levels;
use ir::plan::{Plan, ScheduleKind};
use ir::training::{StateRole, TrainingGraph};
use std::collections::BTreeMap;

/// The level that is found instead, where the plan does not keep `level`: of what contradicts it, or
/// else that of most parameter bytes.
pub fn unkept(plan: &Plan, training: &TrainingGraph, level: u8) -> Option<u8> {
    let states = &training.states;
    let has_moments = states.iter().any(|s| s.role == StateRole::Moment1);
    if !plan.train.task.is_training() || plan.schedule == ScheduleKind::PipeDream {
        return None;
    }
    let mut by_level: BTreeMap<u8, u64> = BTreeMap::new();
    let (mut contradicts, mut asked, mut kept) = (None, 0u64, 0u64);
    for (i, stage) in plan.stages.iter().enumerate() {
        let ranks: u64 = stage.mesh.axes.iter().map(|a| u64::from(a.size)).product();
        for run in &stage.runs {
            let of_axes = levels(plan, training, i, run.strategy as usize, run.first);
            let axes = stage.mesh.axes.iter().zip(of_axes);
            // Ranks with copies have them at any level.
            let splits = |name: &str| name != "replica";
            for (axis, parameters) in axes.filter(|(axis, _)| axis.size > 1 && splits(&axis.name)) {
                for p in parameters {
                    let Some(own) = p.zero else { continue };
                    let is_other = match level {
                        0 => own > 0,
                        1 | 2 => own > 2,
                        _ => own == 1 || own == 2,
                    };
                    contradicts = contradicts.or(is_other.then_some(own));
                    // Tensor ranks keep copies at any level.
                    if axis.name == "tensor" || p.longest < ranks {
                        continue;
                    }
                    *by_level.entry(own).or_default() += p.bytes;
                    asked += p.bytes;
                    let is_kept = own == level || level == 2 && own == 1 && !p.has_sums;
                    kept += if is_kept { p.bytes } else { 0 };
                }
            }
        }
    }
    // At the first level some may be split as at the second.
    let is_missing = match level {
        0 => false,
        2 => kept < asked - kept,
        _ => kept == 0,
    };
    let is_unkept = has_moments && asked > 0 && is_missing;
    let most = by_level.into_iter().max_by_key(|(_, bytes)| *bytes);
    contradicts.or(most.filter(|_| is_unkept).map(|(own, _)| own))
}
