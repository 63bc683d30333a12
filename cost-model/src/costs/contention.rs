//! Multiprocessors that collectives take from the kernels beside them.
//!
//! A collective is a kernel itself: each of its channels holds a multiprocessor for as long as
//! it runs, waiting or moving. A kernel beside it has the others. So kernels that run beside
//! collectives on `s` of `n` multiprocessors do `1 - s/n` of their work in that time.
//!
//! So `c` seconds of collectives cost the kernels beside them `c s/n`, where they last longer.
//! What runs beside what is taken from one play of the template in which nothing outside is
//! waited for and nothing slows down; reductions of gradients that begin in the last backward
//! pass but are instructions of the step's end slow nothing down here.

use super::{CostClass, InstrCost, KERNELS};
use ir::program::Template;
use ir::software::Software;

/// The share of a device's multiprocessors that collectives take, 0 to 1; 0 where it is not known.
pub(super) fn share(software: &Software, multiprocessors: u32) -> f64 {
    match multiprocessors {
        0 => 0.0,
        n => (f64::from(software.collective_multiprocessors) / f64::from(n)).min(MOST),
    }
}

/// Kernels still get on where collectives would take everything.
const MOST: f64 = 0.5;

/// Makes the kernels of a template longer that run beside its collectives, which hold `share`
/// of the multiprocessors.
pub(super) fn slow_down(template: &Template, share: f64, costs: &mut [InstrCost]) {
    let is_beside = |c: &InstrCost| c.class == CostClass::Collective && c.queue != KERNELS;
    if share <= 0.0 || !costs.iter().any(is_beside) {
        return;
    }
    let spans = spans(template, costs);
    let busy = union(
        costs
            .iter()
            .zip(&spans)
            .filter(|(c, _)| is_beside(c))
            .map(|(_, s)| *s)
            .collect(),
    );
    // Kernels follow each other, and so do the intervals.
    let mut first = 0;
    for (cost, &(start, end)) in costs.iter_mut().zip(&spans) {
        if cost.class != CostClass::Compute || cost.queue != KERNELS {
            continue;
        }
        while busy.get(first).is_some_and(|b| b.1 <= start) {
            first += 1;
        }
        let over = busy[first..].iter().take_while(|b| b.0 < end);
        let beside: f64 = over.map(|b| b.1.min(end) - b.0.max(start)).sum();
        // In `beside` seconds the collectives take this much; what is left of the kernel is done
        // when they are over.
        cost.seconds += beside * share;
    }
}

/// When every instruction of a template begins and ends, in seconds after the template did.
fn spans(template: &Template, costs: &[InstrCost]) -> Vec<(f64, f64)> {
    let mut spans: Vec<(f64, f64)> = Vec::with_capacity(costs.len());
    let n_queues = costs.iter().map(|c| c.queue + 1).max().unwrap_or(0);
    let mut queues = vec![0.0f64; n_queues];
    for (instruction, cost) in template.instructions.iter().zip(costs) {
        let queue = &mut queues[cost.queue];
        let waited = cost.waits(instruction);
        let start = waited.fold(*queue, |t, d| t.max(spans[d.index()].1));
        let end = start + cost.seconds;
        *queue = end;
        spans.push((start, end));
    }
    spans
}

/// Intervals that cover the same time and do not meet, in order.
fn union(mut intervals: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    intervals.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut union: Vec<(f64, f64)> = Vec::new();
    for (start, end) in intervals {
        match union.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => union.push((start, end)),
        }
    }
    union
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::costs::REDUCTIONS;
    use crate::testing::{instr, relu};
    use ir::program::TemplateKind;

    /// A template of instructions that each wait for those named.
    fn waiting(deps: &[&[u32]]) -> Template {
        let one = |deps: &&[u32]| instr(relu("y", 0, 1), crate::testing::KERNELS, deps);
        Template {
            kind: TemplateKind::Backward,
            chunk: 0,
            instructions: deps.iter().map(one).collect(),
        }
    }

    fn cost(seconds: f64, class: CostClass, queue: usize) -> InstrCost {
        InstrCost {
            seconds,
            class,
            queue,
            unheeded: 0,
        }
    }

    fn slowed(deps: &[&[u32]], mut costs: Vec<InstrCost>) -> Vec<f64> {
        slow_down(&waiting(deps), 0.2, &mut costs);
        costs.iter().map(|c| c.seconds).collect()
    }

    #[test]
    fn kernels_beside_a_collective_have_the_other_multiprocessors() {
        let (k, c) = (CostClass::Compute, CostClass::Collective);
        let costs = vec![
            cost(1.0, k, KERNELS),
            cost(3.0, c, REDUCTIONS),
            cost(2.0, k, KERNELS),
            cost(4.0, k, KERNELS),
            cost(1.0, k, KERNELS),
        ];
        // The collective runs from 1 to 4: all of the second kernel, a second of the third.
        let seconds = slowed(&[&[], &[0], &[], &[], &[]], costs.clone());
        assert_eq!(seconds, [1.0, 3.0, 2.4, 4.2, 1.0]);
        // Kernels wait for one in their own queue, and what waits for the end runs alone.
        let mut blocking = costs.clone();
        blocking[1].queue = KERNELS;
        let alone = [1.0, 3.0, 2.0, 4.0, 1.0];
        assert_eq!(slowed(&[&[], &[0], &[], &[], &[]], blocking), alone);
        assert_eq!(slowed(&[&[], &[0], &[1], &[], &[]], costs), alone);
    }

    #[test]
    fn two_collectives_at_once_take_no_more_than_one() {
        let (k, c) = (CostClass::Compute, CostClass::Collective);
        let costs = vec![
            cost(2.0, c, REDUCTIONS),
            cost(3.0, c, REDUCTIONS + 1),
            cost(10.0, k, KERNELS),
        ];
        assert_eq!(slowed(&[&[], &[], &[]], costs)[2], 10.6);
    }

    #[test]
    fn the_share_is_of_the_devices_multiprocessors() {
        let mut software = Software::plain("x");
        assert_eq!(share(&software, 132), 0.0);
        software.collective_multiprocessors = 33;
        assert_eq!(share(&software, 132), 0.25);
        assert_eq!(share(&software, 0), 0.0);
        software.collective_multiprocessors = 4000;
        assert_eq!(share(&software, 132), 0.5);
    }
}
