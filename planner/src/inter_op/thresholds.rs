//! Branch and bound over thresholds on the slowest stage: nothing with max t in (low, high) is
//! better than (least sum below high) + (m - 1) * low.

use super::PipelineChoice;
use super::labels::Problem;

/// Thresholds still to be looked at: max t in (low, high), where no sum is below `least`.
struct Interval {
    low: f64,
    high: f64,
    least: f64,
}

pub(super) fn search_thresholds(problem: &Problem) -> Option<PipelineChoice> {
    let options = &problem.options;
    let others = options.repeats();
    let mut best: Option<PipelineChoice> = None;
    let mut n_thresholds = 0;
    // The least cost that was dropped because of the gap alone.
    let mut lower_bound = f64::INFINITY;
    let mut open = vec![Interval {
        low: 0.0,
        high: f64::INFINITY,
        least: 0.0,
    }];
    while let Some(interval) = open.pop() {
        let cutoff = best.as_ref().map_or(options.cutoff_s, |b| b.cost.total_s);
        let bound = interval.least + others * interval.low;
        if bound >= cutoff * (1.0 - options.relative_gap) {
            lower_bound = lower_bound.min(bound);
            continue;
        }
        n_thresholds += 1;
        let Some((sum, found)) = problem.best_below(interval.high, cutoff - others * interval.low)
        else {
            continue;
        };
        let max = found.cost.max_s;
        if found.cost.total_s < cutoff {
            best = Some(found);
        }
        // At max t in [max, high) nothing beats what was just found.
        if max <= interval.low {
            continue;
        }
        let middle = 0.5 * (interval.low + max);
        let split = middle > interval.low && middle < max;
        let upper_low = if split { middle } else { interval.low };
        open.push(Interval {
            low: upper_low,
            high: max,
            least: sum,
        });
        if split {
            open.push(Interval {
                low: interval.low,
                high: middle.next_up(),
                least: sum,
            });
        }
    }
    let mut best = best?;
    best.lower_bound_s = best.cost.total_s.min(lower_bound);
    best.n_thresholds = n_thresholds;
    Some(best)
}
