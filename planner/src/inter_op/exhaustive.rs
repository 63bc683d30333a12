//! The definition of the objective, plan by plan: what the search is tested against.

use super::{Hop, InterOpOptions, PipelineCost, StageTable, Transfer};
use std::ops::Range;

/// Every plan in turn; the best. For tests: exponential.
pub fn brute_force(
    table: &StageTable,
    transfer: Transfer<'_>,
    options: &InterOpOptions,
) -> Option<PipelineCost> {
    let mut best: Option<PipelineCost> = None;
    let mut stages = Vec::new();
    every_plan(table, 0, 0, &mut stages, &mut |stages| {
        if let Some(cost) = cost_of(table, transfer, options, stages)
            && best.is_none_or(|b| cost.total_s < b.total_s)
        {
            best = Some(cost);
        }
    });
    best
}

/// A stage as (layers, submesh, entry).
type Stage = (Range<usize>, usize, usize);

fn every_plan(
    table: &StageTable,
    layer: usize,
    devices: usize,
    stages: &mut Vec<Stage>,
    visit: &mut dyn FnMut(&[Stage]),
) {
    if layer == table.n_layers {
        visit(stages);
        return;
    }
    for end in layer + 1..=table.n_layers {
        for (submesh, n) in table.submeshes.iter().enumerate() {
            if devices + n > table.n_devices || !table.lies(submesh, devices) {
                continue;
            }
            for entry in 0..table.get(layer..end, submesh).len() {
                stages.push((layer..end, submesh, entry));
                every_plan(table, end, devices + n, stages, visit);
                stages.pop();
            }
        }
    }
}

/// The cost of a whole plan by the definition; `None` when it breaks a rule.
pub fn cost_of(
    table: &StageTable,
    transfer: Transfer<'_>,
    options: &InterOpOptions,
    stages: &[(Range<usize>, usize, usize)],
) -> Option<PipelineCost> {
    let used: usize = stages.iter().map(|(_, s, _)| table.submeshes[*s]).sum();
    let devices_ok = used == table.n_devices || (options.allow_unused && used < table.n_devices);
    let stages_ok = options.n_stages.is_none_or(|n| n == stages.len());
    if !devices_ok || !stages_ok {
        return None;
    }
    let entry = |stage: &Stage| table.get(stage.0.clone(), stage.1)[stage.2];
    let (mut sum, mut max, mut step) = (0.0, 0.0f64, 0.0f64);
    for (i, stage) in stages.iter().enumerate() {
        let e = entry(stage);
        if !e.fits(options.in_flight(i, stages.len())) {
            return None;
        }
        let sent = match stages.get(i + 1) {
            Some(next) => transfer(Hop {
                from: stage.1,
                boundary_out: e.boundary_out,
                to: next.1,
                boundary_in: entry(next).boundary_in,
                behind: stages[i + 1..].iter().map(|s| table.submeshes[s.1]).sum(),
            })?,
            None => 0.0,
        };
        let time = e.time_s() + sent;
        sum += time;
        max = max.max(time);
        step = step.max(e.step_s);
    }
    let total = sum + options.repeats() * max + step;
    Some(PipelineCost {
        sum_s: sum,
        max_s: max,
        step_s: step,
        total_s: total,
    })
}
