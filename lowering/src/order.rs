//! One total order of everything that happens in the microbatches of a step.
//!
//! Compute slots come from the schedule of each stage; exchanges are added between them.
//! A greedy simulation with unit times (a backward costs two forwards, an exchange next to
//! nothing) plays whatever can start first and appends it to one global list. The trace of a
//! role is the projection of that list to the events in which it takes part.
//!
//! **No deadlock.** An exchange enters the list after the slot that makes its values, a slot
//! after the exchanges that bring its values. So whatever a role waits for (an earlier event
//! of its own streams, a dependency, the other side of a rendezvous) is, or belongs to, an
//! earlier event of one total order that all roles share; of the events that are not complete
//! the first one can therefore always go on. That holds when roles play their traces serially
//! and when they play them with streams, because stream order is a part of the trace's order.

use crate::draft::Draft;
use crate::error::LowerError;
use crate::resolve::Resolved;
use crate::schedule::{ComputeSlot, SlotPass, schedule};
use ir::StageId;
use std::collections::{BTreeMap, BTreeSet};

/// The values that a pass of one stage sends to another stage; one exchange per microbatch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flow {
    /// Sender.
    pub from: StageId,
    /// Receiver.
    pub to: StageId,
    /// The sender's pass that makes the values.
    pub made_by: SlotPass,
    /// The receiver's passes that use them.
    pub used_by: BTreeSet<SlotPass>,
}

/// One event of the total order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A stage computes a pass of a microbatch.
    Compute(StageId, ComputeSlot),
    /// A flow (by its index) carries a microbatch.
    Exchange(usize, u32),
}

const FORWARD_TIME: u64 = 1000;
const BACKWARD_TIME: u64 = 2 * FORWARD_TIME;
/// Small against a pass, not zero: an exchange takes both sides' attention when roles play
/// serially, and of two equal candidates the one that waited for it should come later.
const EXCHANGE_TIME: u64 = 1;

/// The total order; `schedules` holds one list per stage.
///
/// Candidates are the exchanges whose values are made and the next slot of each stage whose
/// values have arrived. The one that can start first is next; at equal times exchanges come
/// before slots, then the lower stage (of an exchange: the lower flow, then microbatch).
/// Fails when slots remain and none can start: a stage needs what comes after it.
pub fn total_order(
    schedules: &[Vec<ComputeSlot>],
    flows: &[Flow],
) -> Result<Vec<Event>, LowerError> {
    let mut clock = vec![0u64; schedules.len()];
    let mut next = vec![0usize; schedules.len()];
    // Exchanges whose values are made, with the time of that; arrivals.
    let mut made: BTreeMap<(usize, u32), u64> = BTreeMap::new();
    let mut arrived: BTreeSet<(usize, u32)> = BTreeSet::new();
    let mut order = Vec::new();
    loop {
        let exchange = made
            .iter()
            .map(|(&(flow, m), &at)| {
                (
                    clock[flows[flow].from.index()]
                        .max(clock[flows[flow].to.index()])
                        .max(at),
                    flow,
                    m,
                )
            })
            .min();
        let ready = |&s: &usize| {
            schedules[s]
                .get(next[s])
                .is_some_and(|&slot| missing(flows, &arrived, s, slot).is_none())
        };
        let compute = (0..schedules.len())
            .filter(ready)
            .map(|s| (clock[s], s))
            .min();
        match (exchange, compute) {
            (Some((start, flow, m)), c) if c.is_none_or(|c| start <= c.0) => {
                made.remove(&(flow, m));
                arrived.insert((flow, m));
                for side in [flows[flow].from, flows[flow].to] {
                    clock[side.index()] = start + EXCHANGE_TIME;
                }
                order.push(Event::Exchange(flow, m));
            }
            (_, Some((start, s))) => {
                let slot = schedules[s][next[s]];
                next[s] += 1;
                clock[s] = start
                    + if slot.pass == SlotPass::Forward {
                        FORWARD_TIME
                    } else {
                        BACKWARD_TIME
                    };
                for (i, f) in flows.iter().enumerate() {
                    if f.from.index() == s && f.made_by == slot.pass {
                        made.insert((i, slot.microbatch), clock[s]);
                    }
                }
                order.push(Event::Compute(StageId::new(s), slot));
            }
            _ => break,
        }
    }
    let stuck = (0..schedules.len()).find_map(|s| schedules[s].get(next[s]).map(|&slot| (s, slot)));
    match stuck {
        None => Ok(order),
        Some((s, slot)) => {
            let from = missing(flows, &arrived, s, slot).map_or(StageId::new(s), |f| f.from);
            let waiting = format!(
                "{:?} of microbatch {} on {} waits for {from}",
                slot.pass,
                slot.microbatch,
                StageId::new(s)
            );
            Err(LowerError::Stuck {
                played: order.len(),
                waiting,
            })
        }
    }
}

/// The total order of a draft's microbatches.
pub(crate) fn microbatch_events(r: &Resolved, draft: &Draft) -> Result<Vec<Event>, LowerError> {
    let (n, plan) = (draft.roles.len(), r.plan);
    let schedules: Vec<_> = (0..n)
        .map(|s| schedule(plan.schedule, s, n, plan.n_microbatches))
        .collect();
    total_order(&schedules, &draft.flows)
}

/// A flow that the slot needs and that has not arrived.
fn missing<'a>(
    flows: &'a [Flow],
    arrived: &BTreeSet<(usize, u32)>,
    stage: usize,
    slot: ComputeSlot,
) -> Option<&'a Flow> {
    let needed = |f: &Flow| f.to.index() == stage && f.used_by.contains(&slot.pass);
    flows
        .iter()
        .enumerate()
        .find(|(i, f)| needed(f) && !arrived.contains(&(*i, slot.microbatch)))
        .map(|(_, f)| f)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::schedule;
    use ir::plan::ScheduleKind;

    /// Activations to the next stage, gradients to the one before.
    fn chain(n_stages: usize) -> Vec<Flow> {
        let flow = |from, to, pass| Flow {
            from: StageId::new(from),
            to: StageId::new(to),
            made_by: pass,
            used_by: BTreeSet::from([pass]),
        };
        (1..n_stages)
            .flat_map(|s| {
                [
                    flow(s - 1, s, SlotPass::Forward),
                    flow(s, s - 1, SlotPass::Backward),
                ]
            })
            .collect()
    }

    fn order(kind: ScheduleKind, n_stages: usize, m: u32) -> Vec<Event> {
        let schedules: Vec<_> = (0..n_stages)
            .map(|s| schedule(kind, s, n_stages, m))
            .collect();
        total_order(&schedules, &chain(n_stages)).expect("a chain of stages has an order")
    }

    /// Each role's projection: `F0 >F0 B0`, `>` sends to the next stage, `<` to the one before.
    fn trace(events: &[Event], flows: &[Flow], stage: usize) -> String {
        let pass = |p| if p == SlotPass::Forward { "F" } else { "B" };
        let show = |e: &Event| match *e {
            Event::Compute(s, slot) => {
                (s.index() == stage).then(|| format!("{}{}", pass(slot.pass), slot.microbatch))
            }
            Event::Exchange(f, m) => {
                let f = &flows[f];
                let side = if f.from.index() == stage {
                    "send"
                } else {
                    "recv"
                };
                [f.from, f.to]
                    .contains(&StageId::new(stage))
                    .then(|| format!("{side}-{}{m}", pass(f.made_by)))
            }
        };
        events.iter().filter_map(show).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn two_stages_of_1f1b() {
        let events = order(ScheduleKind::OneFOneB, 2, 3);
        assert_eq!(
            trace(&events, &chain(2), 0),
            "F0 send-F0 F1 send-F1 recv-B0 B0 F2 send-F2 recv-B1 B1 recv-B2 B2"
        );
        assert_eq!(
            trace(&events, &chain(2), 1),
            "recv-F0 F0 recv-F1 B0 send-B0 F1 B1 recv-F2 send-B1 F2 B2 send-B2"
        );
    }

    #[test]
    fn two_stages_of_gpipe() {
        let events = order(ScheduleKind::GPipe, 2, 2);
        assert_eq!(
            trace(&events, &chain(2), 0),
            "F0 send-F0 F1 send-F1 recv-B0 B0 recv-B1 B1"
        );
        assert_eq!(
            trace(&events, &chain(2), 1),
            "recv-F0 F0 recv-F1 F1 B0 send-B0 B1 send-B1"
        );
    }

    #[test]
    fn every_event_stands_once() {
        for kind in [ScheduleKind::GPipe, ScheduleKind::OneFOneB] {
            for (p, m) in [(1, 1), (1, 4), (2, 1), (3, 2), (4, 8), (8, 3), (5, 20)] {
                let events = order(kind, p, m);
                assert_eq!(
                    events.len(),
                    2 * m as usize * p + 2 * m as usize * (p - 1),
                    "{kind:?} p={p} m={m}"
                );
            }
        }
    }

    #[test]
    fn a_value_from_the_future_is_an_error() {
        let schedules: Vec<_> = (0..2)
            .map(|s| schedule(ScheduleKind::GPipe, s, 2, 2))
            .collect();
        let mut flows = chain(2);
        flows.push(Flow {
            from: StageId::new(1),
            to: StageId::new(0),
            made_by: SlotPass::Forward,
            used_by: BTreeSet::from([SlotPass::Forward]),
        });
        let error = total_order(&schedules, &flows)
            .expect_err("stage 0 waits for stage 1, which waits for stage 0");
        assert_eq!(
            error.to_string(),
            "the schedule cannot go on after 0 slots: Forward of microbatch 0 on stage0 waits for stage1"
        );
    }
}
