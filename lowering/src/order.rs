//! One total order of everything that happens in the microbatches of a step.
//!
//! Compute slots come from the schedule of each mesh; exchanges are added between them.
//! A greedy simulation with unit times (a backward costs two forwards, an exchange next to
//! nothing) plays whatever can start first and appends it to one global list. The trace of a
//! role is the projection of that list to the events in which it takes part.
//!
//! **When values travel** ([`Travel`]) the schedule says. Between slots of both sides, roles that
//! play serially do not wait in an exchange; roles whose streams overlap lose nothing by that
//! where neighbours come to the ends of their slots at the same times. Where they do not, values
//! travel as soon as they are made.
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
use ir::StageId;
use ir::schedule::{ChunkPass, Schedule, Slot, Travel};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};

/// The values that a pass of one mesh sends to another mesh; one exchange per microbatch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flow {
    /// Sender.
    pub from: StageId,
    /// Receiver.
    pub to: StageId,
    /// The sender's pass that makes the values.
    pub made_by: ChunkPass,
    /// The receiver's passes that use them.
    pub used_by: BTreeSet<ChunkPass>,
}

/// One event of the total order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A mesh computes a pass of a microbatch.
    Compute(StageId, Slot),
    /// A flow (by its index) carries a microbatch.
    Exchange(usize, u32),
}

const FORWARD_TIME: u64 = 1000;
/// Small against a pass, not zero: an exchange takes both sides' attention when roles play
/// serially, and of two equal candidates the one that waited for it should come later.
const EXCHANGE_TIME: u64 = 1;

/// The total order; `schedules` holds one list per mesh, and flows are between those meshes.
///
/// Candidates are the exchanges whose values are made and the next slot of each mesh whose
/// values have arrived. The one that can start first is next; at equal times exchanges come
/// before slots, then the lower mesh (of an exchange: the lower flow, then microbatch).
/// Fails when slots remain and none can start: a mesh needs what comes after it.
pub fn total_order(
    schedules: &[Vec<Slot>],
    flows: &[Flow],
    schedule: &dyn Schedule,
) -> Result<Vec<Event>, LowerError> {
    let travel = schedule.travel();
    let mut clock = vec![0u64; schedules.len()];
    let mut next = vec![0usize; schedules.len()];
    // Exchanges whose values are made, with the time of that; arrivals.
    let mut made: BTreeMap<(usize, u32), u64> = BTreeMap::new();
    let mut arrived: FxHashMap<(usize, u32), u64> = FxHashMap::default();
    let needs = by_pass(flows, |f| {
        f.used_by.iter().map(|&pass| (f.to.index(), pass))
    });
    let makes = by_pass(flows, |f| [(f.from.index(), f.made_by)]);
    // When each mesh's next slot can start, if its values have arrived; brought up to date for
    // the meshes that an event concerns.
    let mut ready: Vec<Option<u64>> = vec![None; schedules.len()];
    let mut changed: Vec<usize> = (0..schedules.len()).collect();
    let mut order = Vec::new();
    loop {
        for s in changed.drain(..) {
            ready[s] = schedules[s].get(next[s]).and_then(|slot| {
                let mut arrivals = needed(flows, &needs, s, *slot)
                    .map(|(i, _)| arrived.get(&(i, slot.microbatch)));
                arrivals.try_fold(clock[s], |start, at| Some(start.max(*at?)))
            });
        }
        let exchange = made
            .iter()
            .map(|(&(flow, m), &at)| {
                let f = &flows[flow];
                let start = match travel {
                    Travel::BetweenSlots => clock[f.from.index()].max(clock[f.to.index()]).max(at),
                    Travel::AtOnce => at,
                };
                (start, flow, m)
            })
            .min();
        let compute = (ready.iter().enumerate())
            .filter_map(|(s, &start)| Some((start?, s)))
            .min();
        match (exchange, compute) {
            (Some((start, flow, m)), c) if c.is_none_or(|c| start <= c.0) => {
                made.remove(&(flow, m));
                arrived.insert((flow, m), start + EXCHANGE_TIME);
                if travel == Travel::BetweenSlots {
                    for side in [flows[flow].from, flows[flow].to] {
                        clock[side.index()] = start + EXCHANGE_TIME;
                    }
                }
                changed.extend([flows[flow].from.index(), flows[flow].to.index()]);
                order.push(Event::Exchange(flow, m));
            }
            (_, Some((start, s))) => {
                let slot = schedules[s][next[s]];
                next[s] += 1;
                clock[s] = start + slot.of.pass.forwards() * FORWARD_TIME;
                changed.push(s);
                for &i in makes.get(&(s, slot.of)).into_iter().flatten() {
                    made.insert((i, slot.microbatch), clock[s]);
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
            let missing = needed(flows, &needs, s, slot)
                .find(|(i, _)| !arrived.contains_key(&(*i, slot.microbatch)));
            let from = missing.map_or(StageId::new(s), |(_, f)| f.from);
            let chunk = slot.of.chunk as usize;
            let stage = StageId::new(schedule.route().stage_of(s, chunk, schedules.len()));
            let waiting = format!(
                "{:?} of microbatch {} on {stage} waits for {from}",
                slot.of.pass, slot.microbatch,
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
    let (n, schedule) = (draft.roles.len(), r.schedule);
    let slots = |mesh| schedule.slots(mesh, n, r.plan.n_microbatches);
    let schedules: Vec<_> = (0..n).map(slots).collect();
    total_order(&schedules, &draft.flows, schedule)
}

/// By mesh and pass: flows (their indices), ascending.
type ByPass = FxHashMap<(usize, ChunkPass), Vec<usize>>;

/// The flows that each pass of a mesh has to do with, as `of` says.
fn by_pass<'a, P>(flows: &'a [Flow], of: impl Fn(&'a Flow) -> P) -> ByPass
where
    P: IntoIterator<Item = (usize, ChunkPass)>,
{
    let mut found = ByPass::default();
    for (i, f) in flows.iter().enumerate() {
        for pass in of(f) {
            found.entry(pass).or_default().push(i);
        }
    }
    found
}

/// The flows that a slot needs.
fn needed<'a>(
    flows: &'a [Flow],
    needs: &'a ByPass,
    mesh: usize,
    slot: Slot,
) -> impl Iterator<Item = (usize, &'a Flow)> {
    let own = needs.get(&(mesh, slot.of)).map_or(&[][..], Vec::as_slice);
    own.iter().map(|&i| (i, &flows[i]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::Pass;
    use ir::plan::ScheduleKind;
    use ir::schedule::PassKind;

    /// Activations to the next stage, and in training gradients to the one before.
    fn chain(kind: ScheduleKind, n_meshes: usize) -> Vec<Flow> {
        let n_stages = n_meshes * kind.virtual_stages() as usize;
        let gradient = kind.schedule().slot_of(Pass::BI);
        let of = |stage: usize, pass| ChunkPass {
            pass,
            chunk: (stage / n_meshes) as u32,
        };
        let flow = |from: usize, to: usize, pass| Flow {
            from: StageId::new(kind.route().mesh_of(from, n_meshes)),
            to: StageId::new(kind.route().mesh_of(to, n_meshes)),
            made_by: of(from, pass),
            used_by: BTreeSet::from([of(to, pass)]),
        };
        let trains = kind.schedule().task().is_training();
        (1..n_stages)
            .flat_map(|s| {
                let back = trains.then(|| flow(s, s - 1, gradient));
                std::iter::once(flow(s - 1, s, PassKind::Forward)).chain(back)
            })
            .filter(|f| f.from != f.to)
            .collect()
    }

    fn slots(kind: ScheduleKind, n_meshes: usize, m: u32) -> Vec<Vec<Slot>> {
        let schedule = kind.schedule();
        let of = |mesh| schedule.slots(mesh, n_meshes, m);
        (0..n_meshes).map(of).collect()
    }

    fn order(kind: ScheduleKind, n_meshes: usize, m: u32) -> Vec<Event> {
        let (slots, flows) = (slots(kind, n_meshes, m), chain(kind, n_meshes));
        total_order(&slots, &flows, &*kind.schedule()).expect("a chain of stages has an order")
    }

    /// Each role's projection: `F0 send-F0`, the chunk before the pass from chunk 1 on.
    fn trace(events: &[Event], flows: &[Flow], mesh: usize) -> String {
        let pass = |of: ChunkPass| {
            let pass = of.pass.letter();
            match of.chunk {
                0 => pass.to_string(),
                c => format!("{c}{pass}"),
            }
        };
        let show = |e: &Event| match *e {
            Event::Compute(s, slot) => {
                (s.index() == mesh).then(|| format!("{}{}", pass(slot.of), slot.microbatch))
            }
            Event::Exchange(f, m) => {
                let f = &flows[f];
                let side = if f.from.index() == mesh {
                    "send"
                } else {
                    "recv"
                };
                [f.from, f.to]
                    .contains(&StageId::new(mesh))
                    .then(|| format!("{side}-{}{m}", pass(f.made_by)))
            }
        };
        events.iter().filter_map(show).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn two_stages_of_1f1b() {
        let kind = ScheduleKind::OneFOneB;
        let events = order(kind, 2, 3);
        assert_eq!(
            trace(&events, &chain(kind, 2), 0),
            "F0 send-F0 F1 send-F1 recv-B0 B0 F2 send-F2 recv-B1 B1 recv-B2 B2"
        );
        assert_eq!(
            trace(&events, &chain(kind, 2), 1),
            "recv-F0 F0 recv-F1 B0 send-B0 F1 B1 recv-F2 send-B1 F2 B2 send-B2"
        );
    }

    #[test]
    fn two_stages_of_gpipe() {
        let kind = ScheduleKind::GPipe;
        let events = order(kind, 2, 2);
        assert_eq!(
            trace(&events, &chain(kind, 2), 0),
            "F0 send-F0 F1 send-F1 recv-B0 B0 recv-B1 B1"
        );
        assert_eq!(
            trace(&events, &chain(kind, 2), 1),
            "recv-F0 F0 recv-F1 F1 B0 send-B0 B1 send-B1"
        );
    }

    #[test]
    fn two_stages_of_inference() {
        let kind = ScheduleKind::Forward;
        let events = order(kind, 2, 3);
        assert_eq!(
            trace(&events, &chain(kind, 2), 0),
            "F0 send-F0 F1 send-F1 F2 send-F2"
        );
        assert_eq!(
            trace(&events, &chain(kind, 2), 1),
            "recv-F0 F0 recv-F1 F1 recv-F2 F2"
        );
        // As the schedule's latency has it: 3 stages once, and one of them 3 times more.
        assert_eq!(played(kind, 3, 4), 6);
    }

    #[test]
    fn interleaved_stages_send_around() {
        let kind = ScheduleKind::Interleaved { virtual_stages: 2 };
        let events = order(kind, 2, 2);
        assert_eq!(
            trace(&events, &chain(kind, 2), 0),
            "F0 send-F0 F1 send-F1 recv-F0 1F0 recv-F1 send-1F0 1F1 send-1F1 recv-1B0 1B0 send-1B0 \
             recv-1B1 1B1 recv-B0 send-1B1 B0 recv-B1 B1"
        );
    }

    #[test]
    fn every_event_stands_once() {
        for &kind in ScheduleKind::NAMED {
            let n_passes = kind.schedule().passes().len();
            for (p, m) in [(1, 1), (1, 4), (2, 1), (3, 2), (4, 8), (8, 3), (5, 20)] {
                let events = order(kind, p, m);
                let slots = n_passes * p * kind.virtual_stages() as usize;
                assert_eq!(
                    events.len(),
                    (slots + chain(kind, p).len()) * m as usize,
                    "{kind:?} p={p} m={m}"
                );
            }
        }
    }

    #[test]
    fn interleaved_stages_never_wait_for_each_other_in_a_circle() {
        for v in 2..6u32 {
            let kind = ScheduleKind::Interleaved { virtual_stages: v };
            for p in 1..8usize {
                for m in (1..5).map(|k| k * p as u32) {
                    let events = order(kind, p, m);
                    let slots = 2 * (m * v) as usize * p;
                    let flows = chain(kind, p).len() * m as usize;
                    assert_eq!(events.len(), slots + flows, "p={p} v={v} m={m}");
                }
            }
        }
    }

    /// When everything is done if a slot waits for its values and an exchange, whose time is
    /// nothing, for the exchanges before it on both sides.
    fn played(kind: ScheduleKind, p: usize, m: u32) -> u64 {
        let flows = chain(kind, p);
        let (mut compute, mut transfer) = (vec![0u64; p], vec![0u64; p]);
        let mut made: BTreeMap<(StageId, ChunkPass, u32), u64> = BTreeMap::new();
        let mut moved: BTreeMap<(usize, u32), u64> = BTreeMap::new();
        for event in order(kind, p, m) {
            match event {
                Event::Exchange(flow, m) => {
                    let f = &flows[flow];
                    let sides = [f.from.index(), f.to.index()];
                    let before = sides.map(|s| transfer[s]);
                    let at = before
                        .into_iter()
                        .fold(made[&(f.from, f.made_by, m)], u64::max);
                    sides.into_iter().for_each(|s| transfer[s] = at);
                    moved.insert((flow, m), at);
                }
                Event::Compute(mesh, slot) => {
                    let needed = flows
                        .iter()
                        .enumerate()
                        .filter(|(_, f)| f.to == mesh && f.used_by.contains(&slot.of));
                    let arrivals = needed.map(|(i, _)| moved[&(i, slot.microbatch)]);
                    let start = arrivals.fold(compute[mesh.index()], u64::max);
                    let time = slot.of.pass.forwards();
                    compute[mesh.index()] = start + time;
                    made.insert((mesh, slot.of, slot.microbatch), start + time);
                }
            }
        }
        compute.into_iter().max().unwrap_or(0)
    }

    /// With equal stages and a backward of two forwards the pipeline waits for `p - 1` passes
    /// of one stage, whatever the number of microbatches; so the order of the exchanges on
    /// their streams holds nothing up.
    #[test]
    fn the_pipeline_fills_and_drains_by_passes_of_one_stage() {
        for (p, v, m) in [
            (4, 1, 8),
            (2, 2, 8),
            (4, 2, 8),
            (4, 4, 16),
            (3, 3, 12),
            (8, 4, 32),
        ] {
            let kind = match v {
                1 => ScheduleKind::OneFOneB,
                v => ScheduleKind::Interleaved { virtual_stages: v },
            };
            let passes = u64::from(m * v) + p as u64 - 1;
            assert_eq!(played(kind, p, m), 3 * passes, "p={p} v={v} m={m}");
        }
    }

    /// Qi et al. 2023, table 2: ZB-H1 waits for `p - 1` times forward and input gradient less
    /// weight gradient, which is one forward where all take as long.
    #[test]
    fn apart_from_their_weights_gradients_wait_for_a_third() {
        for (p, m) in [(2, 2), (2, 8), (3, 3), (4, 8), (4, 5), (8, 8), (8, 32)] {
            let (fill, work) = (p as u64 - 1, 3 * u64::from(m));
            assert_eq!(played(ScheduleKind::OneFOneB, p, m), work + 3 * fill);
            assert_eq!(played(ScheduleKind::ZbH1, p, m), work + fill, "{p} {m}");
        }
    }

    /// Qi et al. 2023, section 6: of passes that take as long, a mesh of ZB-V waits for none once
    /// it has begun, and the last one begins `p - 1` of them after the first. The same by the
    /// schedule's own latency, of few microbatches too, where it says no less.
    #[test]
    fn in_a_v_nobody_waits() {
        for p in 1..9usize {
            for m in (1..20).chain([64]) {
                let found = played(ScheduleKind::ZbV, p, m);
                let latency = ScheduleKind::ZbV.schedule().latency(p, m);
                // A stage takes three passes.
                let said = latency.total_s(6.0 * p as f64, 6.0, 3.0, 0.0);
                if m as usize >= 2 * p - 1 {
                    assert_eq!(found, 6 * u64::from(m) + p as u64 - 1, "{p} {m}");
                }
                match 2 * m as usize > p {
                    true => assert!(
                        (said - found as f64).abs() < 1e-9,
                        "{p} {m}: {said} {found}"
                    ),
                    false => assert!(said >= found as f64, "{p} {m}: {said} {found}"),
                }
            }
        }
    }

    #[test]
    fn a_value_from_the_future_is_an_error() {
        let kind = ScheduleKind::GPipe;
        let schedules = slots(kind, 2, 2);
        let mut flows = chain(kind, 2);
        let forward = flows[0].made_by;
        flows.push(Flow {
            from: StageId::new(1),
            to: StageId::new(0),
            made_by: forward,
            used_by: BTreeSet::from([forward]),
        });
        let error = total_order(&schedules, &flows, &*kind.schedule())
            .expect_err("stage 0 waits for stage 1, which waits for stage 0");
        assert_eq!(
            error.to_string(),
            "the schedule cannot go on after 0 slots: Forward of microbatch 0 on stage0 waits for stage1"
        );
    }
}
