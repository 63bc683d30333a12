//! Multiprocessors that collectives take from the kernels beside them.
//!
//! A collective is a kernel itself: each of its channels holds a multiprocessor for as long as
//! it runs, waiting or moving. A kernel beside it has the others. So kernels that run beside
//! collectives on `s` of `n` multiprocessors do `1 - s/n` of their work in that time.
//!
//! So `c` seconds of collectives cost the kernels beside them `c s/n`, where they last longer.
//! The overlap of instructions is taken from one play of the template in which nothing outside is
//! waited for and nothing slows down; reductions of gradients that begin in the last backward
//! pass but are instructions of the step's end slow nothing down here.

use crate::Software;
use crate::streams::KERNELS;
use cost_model::costs::{CostClass, InstrCost};
use ir::StreamId;
use ir::program::Template;
use std::collections::HashMap;

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
    let instructions = &template.instructions;
    let is_beside = |i: usize, c: &InstrCost| {
        c.class == CostClass::Collective && instructions[i].stream != KERNELS
    };
    let all = costs.iter().enumerate();
    let beside: Vec<usize> = all.filter(|(i, c)| is_beside(*i, c)).map(|c| c.0).collect();
    if share <= 0.0 || beside.is_empty() {
        return;
    }
    let spans = spans(template, costs);
    let busy = union(beside.into_iter().map(|i| spans[i]).collect());
    // Kernels follow each other, and so do the intervals.
    let mut first = 0;
    for ((cost, instruction), &(start, end)) in costs.iter_mut().zip(instructions).zip(&spans) {
        if cost.class != CostClass::Compute || instruction.stream != KERNELS {
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
    let mut streams: HashMap<StreamId, f64> = HashMap::new();
    for (instruction, cost) in template.instructions.iter().zip(costs) {
        let stream = streams.entry(instruction.stream).or_default();
        let waited = instruction.deps.iter();
        let start = waited.fold(*stream, |t, d| t.max(spans[d.index()].1));
        let end = start + cost.seconds;
        *stream = end;
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
    use crate::testing::{COLLECTIVES, TRANSFERS, instr, relu};
    use ir::program::TemplateKind;

    const K: CostClass = CostClass::Compute;
    const C: CostClass = CostClass::Collective;

    type One<'a> = (f64, CostClass, StreamId, &'a [u32]);

    /// Seconds of instructions on streams that each wait for those named.
    fn slowed(all: &[One<'_>]) -> Vec<f64> {
        let one = |&(_, _, stream, deps): &One<'_>| instr(relu("y", 0, 1), stream, deps);
        let template = Template {
            kind: TemplateKind::Backward,
            chunk: 0,
            instructions: all.iter().map(one).collect(),
        };
        let cost = |&(seconds, class, ..): &One<'_>| InstrCost { seconds, class };
        let mut costs: Vec<InstrCost> = all.iter().map(cost).collect();
        slow_down(&template, 0.2, &mut costs);
        costs.iter().map(|c| c.seconds).collect()
    }

    #[test]
    fn kernels_beside_a_collective_have_the_other_multiprocessors() {
        let of = |stream, deps: &[u32]| {
            slowed(&[
                (1.0, K, KERNELS, &[]),
                (3.0, C, stream, &[0]),
                (2.0, K, KERNELS, deps),
                (4.0, K, KERNELS, &[]),
                (1.0, K, KERNELS, &[]),
            ])
        };
        // The collective runs from 1 to 4: all of the second kernel, a second of the third.
        assert_eq!(of(COLLECTIVES, &[]), [1.0, 3.0, 2.4, 4.2, 1.0]);
        // Kernels wait for one on their own stream, and what waits for the end runs alone.
        let alone = [1.0, 3.0, 2.0, 4.0, 1.0];
        assert_eq!(of(KERNELS, &[]), alone);
        assert_eq!(of(COLLECTIVES, &[1]), alone);
    }

    #[test]
    fn two_collectives_at_once_take_no_more_than_one() {
        let seconds = slowed(&[
            (2.0, C, COLLECTIVES, &[]),
            (3.0, C, TRANSFERS, &[]),
            (10.0, K, KERNELS, &[]),
        ]);
        assert_eq!(seconds[2], 10.6);
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
