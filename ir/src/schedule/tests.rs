//! Every schedule is drawn, and counted against what it promises.

use super::*;

/// One line per mesh: `F0 F1 B0 ...`; the chunk before the pass where there are several.
fn draw(kind: ScheduleKind, n_meshes: usize, m: u32) -> String {
    let name = |s: &Slot| {
        let chunk = match kind.virtual_stages() {
            1 => String::new(),
            _ => s.of.chunk.to_string(),
        };
        format!("{chunk}{}{}", s.of.pass.letter(), s.microbatch)
    };
    let line = |mesh| {
        let slots = kind.schedule().slots(mesh, n_meshes, m);
        slots.iter().map(name).collect::<Vec<_>>().join(" ")
    };
    (0..n_meshes).map(line).collect::<Vec<_>>().join("\n")
}

fn interleaved(virtual_stages: u32) -> ScheduleKind {
    ScheduleKind::Interleaved { virtual_stages }
}

/// All schedules, those with parameters with some of them.
fn all() -> impl Iterator<Item = ScheduleKind> {
    let named = ScheduleKind::NAMED.iter().copied();
    named.chain((2..5).map(interleaved))
}

#[test]
fn gpipe_runs_all_forwards_first() {
    assert_eq!(
        draw(ScheduleKind::GPipe, 2, 3),
        "F0 F1 F2 B0 B1 B2\nF0 F1 F2 B0 B1 B2"
    );
}

#[test]
fn one_f_one_b_warms_up_by_the_distance_to_the_end() {
    assert_eq!(
        draw(ScheduleKind::OneFOneB, 4, 5),
        "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4\n\
         F0 F1 F2 B0 F3 B1 F4 B2 B3 B4\n\
         F0 F1 B0 F2 B1 F3 B2 F4 B3 B4\n\
         F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"
    );
}

#[test]
fn one_f_one_b_with_fewer_microbatches_than_stages() {
    assert_eq!(
        draw(ScheduleKind::OneFOneB, 3, 2),
        "F0 F1 B0 B1\nF0 F1 B0 B1\nF0 B0 F1 B1"
    );
}

#[test]
fn interleaved_stages_take_turns_by_groups_of_microbatches() {
    assert_eq!(
        draw(interleaved(2), 2, 4),
        "0F0 0F1 1F0 1F1 0F2 1B0 0F3 1B1 1F2 0B0 1F3 0B1 1B2 1B3 0B2 0B3\n\
         0F0 0F1 1F0 1B0 1F1 1B1 0F2 0B0 0F3 0B1 1F2 1B2 1F3 1B3 0B2 0B3"
    );
    // As many microbatches as meshes: mesh 0 has no turn to alternate in.
    assert_eq!(
        draw(interleaved(3), 2, 2),
        "0F0 0F1 1F0 1F1 2F0 2F1 2B0 2B1 1B0 1B1 0B0 0B1\n\
         0F0 0F1 1F0 1F1 2F0 2B0 2F1 2B1 1B0 1B1 0B0 0B1"
    );
}

/// Figure 8 of Narayanan et al. 2019: the slots of 1F1B, after each of whose backwards comes an
/// update. No other schedule updates before the step ends.
#[test]
fn pipedream_alone_updates_in_every_backward() {
    assert_eq!(
        draw(ScheduleKind::PipeDream, 3, 4),
        "F0 F1 F2 B0 F3 B1 B2 B3\n\
         F0 F1 B0 F2 B1 F3 B2 B3\n\
         F0 B0 F1 B1 F2 B2 F3 B3"
    );
    let alone = all().filter(|kind| kind.schedule().is_asynchronous());
    assert_eq!(alone.collect::<Vec<_>>(), [ScheduleKind::PipeDream]);
}

/// Figure 2 of Qi et al. 2023: stage `i` keeps `i` weight gradients back.
#[test]
fn zb_h1_keeps_weight_gradients_for_later() {
    assert_eq!(
        draw(ScheduleKind::ZbH1, 4, 6),
        "F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5\n\
         F0 F1 F2 I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5\n\
         F0 F1 I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5\n\
         F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5"
    );
    assert_eq!(
        draw(ScheduleKind::ZbH1, 3, 2),
        "F0 F1 I0 W0 I1 W1\nF0 F1 I0 I1 W0 W1\nF0 I0 F1 I1 W0 W1"
    );
}

/// With 4 microbatches on 2 meshes, and with fewer than fill the pipeline.
#[test]
fn zb_v_goes_there_and_back() {
    assert_eq!(
        draw(ScheduleKind::ZbV, 2, 4),
        "0F0 0F1 0F2 1F0 1I0 1W0 1F1 1I1 1W1 0F3 0I0 0W0 1F2 1I2 1W2 0I1 0W1 1F3 1I3 1W3 0I2 0W2 0I3 0W3\n\
         0F0 1F0 0F1 1F1 1I0 1W0 0F2 0I0 0W0 1F2 1I1 1W1 0F3 0I1 0W1 1F3 1I2 1W2 0I2 1I3 0I3 0W2 1W3 0W3"
    );
    assert_eq!(
        draw(ScheduleKind::ZbV, 2, 1),
        "0F0 1F0 1I0 1W0 0I0 0W0\n0F0 1F0 1I0 1W0 0I0 0W0"
    );
    let said = ScheduleKind::ZbV.schedule().problem(5, 4);
    assert_eq!(
        said.expect("a problem"),
        "5 stages: zb_v has two on every mesh, so it needs an even number"
    );
}

/// Qi et al. 2024: a mesh holds as many forwards of stages as the first stage of 1F1B, each of
/// which is half as large, from forward to weight gradient.
#[test]
fn a_v_holds_as_much_as_1f1b() {
    for (p, m) in [(1, 3), (2, 4), (4, 7), (4, 16), (7, 30)] {
        for mesh in 0..p {
            let (mut alive, mut most) = (0i64, 0);
            for s in ScheduleKind::ZbV.schedule().slots(mesh, p, m) {
                alive += match s.of.pass {
                    PassKind::Forward => 1,
                    PassKind::WeightGradient => -1,
                    _ => 0,
                };
                most = most.max(alive);
            }
            let n = i64::from(m).min(2 * p as i64);
            assert!(
                (n..=2 * p as i64).contains(&most),
                "{mesh} of {p}, {m}: {most}"
            );
        }
    }
}

/// Inference fills the pipeline once, and holds a microbatch at a time: 3 stages of 2 s and 4
/// microbatches take 3 x 2 + 3 x 2 s.
#[test]
fn inference_has_forwards_alone() {
    let schedule = ScheduleKind::Forward.schedule();
    assert_eq!(draw(ScheduleKind::Forward, 2, 3), "F0 F1 F2\nF0 F1 F2");
    assert_eq!(schedule.activations(0, 3, 4), 1);
    assert_eq!(schedule.latency(3, 4).total_s(6.0, 2.0, 2.0, 0.0), 12.0);
    assert_eq!(schedule.task(), Task::Inference);
    assert!(all().all(|kind| kind.schedule().task() == Task::Training));
    // It is that of every plan for inference, so nobody asks for it.
    assert_eq!(ScheduleKind::named(schedule.name()), None);
}

#[test]
fn what_interleaved_stages_want_is_said() {
    let said = |v, stages, m| interleaved(v).schedule().problem(stages, m);
    assert_eq!(said(2, 4, 6), None);
    for (v, stages) in [(0, 4), (1, 4), (3, 4), (2, 0)] {
        let said = said(v, stages, 4).expect("a problem");
        assert!(said.contains("interleaving needs 2 or more"), "{said}");
    }
    assert_eq!(
        said(2, 8, 6).expect("a problem"),
        "6 microbatches on 4 meshes: interleaved stages need a multiple of 4"
    );
}

/// The passes of the training graph have a slot each, in an order in which they can be played.
#[test]
fn every_pass_has_a_slot() {
    for kind in all() {
        let schedule = kind.schedule();
        let at = |pass| {
            let slot = schedule.slot_of(pass);
            let mut passes = schedule.passes().iter();
            passes.position(|&p| p == slot).expect("a slot of its own")
        };
        let order = [Pass::F, Pass::Recompute, Pass::BI, Pass::BW].map(at);
        assert!(order.is_sorted(), "{kind:?}: {order:?}");
        assert!(order[0] < order[1], "{kind:?}: {order:?}");
        assert_eq!(ScheduleKind::named(kind.name()).unwrap_or(kind), kind);
    }
}

/// A schedule with the passes that it is given, and no order.
struct Of(&'static [PassKind]);

impl Schedule for Of {
    fn name(&self) -> &'static str {
        "of"
    }
    fn passes(&self) -> &'static [PassKind] {
        self.0
    }
    fn slots(&self, _mesh: usize, _n_meshes: usize, _m: u32) -> Vec<Slot> {
        Vec::new()
    }
    fn in_flight(&self, _: PassKind, _: PassKind, _: usize, _: usize, m: u32) -> u32 {
        m
    }
    fn latency(&self, _n_meshes: usize, m: u32) -> Latency {
        one_f_one_b::flush(m)
    }
}

/// Recomputation has a slot of its own, or is played before the first gradients.
#[test]
fn passes_are_played_together_or_apart() {
    use PassKind::*;
    for (passes, expected) in [
        (
            &[Forward, Backward][..],
            [Forward, Backward, Backward, Backward],
        ),
        (
            &[Forward, Recompute, Backward],
            [Forward, Recompute, Backward, Backward],
        ),
        (
            &[Forward, InputGradient, WeightGradient],
            [Forward, InputGradient, InputGradient, WeightGradient],
        ),
        (
            &[Forward, Recompute, InputGradient, WeightGradient],
            [Forward, Recompute, InputGradient, WeightGradient],
        ),
    ] {
        let schedule: &dyn Schedule = &Of(passes);
        let all = [Pass::F, Pass::Recompute, Pass::BI, Pass::BW];
        assert_eq!(all.map(|pass| schedule.slot_of(pass)), expected);
    }
}

#[test]
fn microbatches_in_flight_are_what_is_promised() {
    for kind in all() {
        let v = kind.virtual_stages();
        for n_meshes in 1..6 {
            let group = kind.schedule().group(n_meshes);
            for m in (1..9).map(|k| k * group) {
                assert_eq!(kind.schedule().problem(n_meshes * v as usize, m), None);
                (0..n_meshes).for_each(|mesh| in_flight(kind, mesh, n_meshes, m));
            }
        }
    }
}

/// Every pass once, those of a microbatch in order, microbatches ascending; in flight as
/// promised.
fn in_flight(kind: ScheduleKind, mesh: usize, n_meshes: usize, m: u32) {
    let schedule = kind.schedule();
    let (v, passes) = (schedule.virtual_stages(), schedule.passes());
    let slots = schedule.slots(mesh, n_meshes, m);
    assert_eq!(slots.len(), passes.len() * (m * v) as usize);
    for chunk in 0..v {
        let mut begun = vec![0u32; passes.len()];
        // By passes: most microbatches between them, the slots of both included.
        let mut most = vec![vec![0u32; passes.len()]; passes.len()];
        for s in slots.iter().filter(|s| s.of.chunk == chunk) {
            let at = passes.iter().position(|&p| p == s.of.pass);
            let at = at.expect("a slot of the schedule");
            assert_eq!(s.microbatch, begun[at], "{kind:?} {mesh}/{n_meshes} m={m}");
            let ended = begun.clone();
            begun[at] += 1;
            assert!(begun.is_sorted_by(|a, b| a >= b), "{kind:?}: {begun:?}");
            for from in 0..passes.len() {
                for to in from + 1..passes.len() {
                    most[from][to] = most[from][to].max(begun[from] - ended[to]);
                }
            }
        }
        assert!(begun.iter().all(|&n| n == m));
        let stage = schedule.route().stage_of(mesh, chunk as usize, n_meshes);
        let n_stages = v as usize * n_meshes;
        for (from, to) in (0..passes.len()).flat_map(|f| (f + 1..passes.len()).map(move |t| (f, t)))
        {
            let (n, a, b) = (most[from][to], passes[from], passes[to]);
            assert_eq!(
                n,
                schedule.in_flight(a, b, stage, n_stages, m),
                "{kind:?} {a:?} to {b:?}, stage {stage} on {n_meshes} meshes, m={m}"
            );
            assert!(v > 1 || schedule.in_flight(a, b, 0, n_stages - stage, m) <= n);
        }
        let last = most[0][passes.len() - 1];
        assert_eq!(last, schedule.activations(stage, n_stages, m));
    }
}

/// Whatever bytes a microbatch of each stage takes, a mesh holds the most at one of the moments of
/// its schedule, and it comes to each of them.
#[test]
fn a_mesh_holds_the_most_at_one_of_its_moments() {
    let mut rng = crate::testing::Rng::new(7);
    for kind in all().chain([interleaved(4), interleaved(8)]) {
        let schedule = kind.schedule();
        let (v, last) = (schedule.virtual_stages() as usize, schedule.passes().last());
        for (p, rounds) in [
            (1usize, 3u32),
            (2, 1),
            (2, 4),
            (3, 1),
            (3, 4),
            (4, 1),
            (4, 5),
            (8, 2),
        ] {
            let m = p as u32 * rounds;
            for mesh in 0..p {
                let mut held = vec![0u32; v];
                let mut seen: Vec<Vec<u32>> = Vec::new();
                for slot in schedule.slots(mesh, p, m) {
                    let of = &mut held[slot.of.chunk as usize];
                    *of += u32::from(slot.of.pass == PassKind::Forward);
                    seen.push(held.clone());
                    held[slot.of.chunk as usize] -= u32::from(Some(&slot.of.pass) == last);
                }
                let said = schedule.moments(mesh, p, m);
                let at = format!("{kind:?} mesh {mesh} of {p}, m={m}: {said:?}");
                assert!(said.iter().all(|s| seen.contains(s)), "{at}");
                let stage = |chunk| schedule.route().stage_of(mesh, chunk, p);
                let peak: Vec<u32> = (0..v)
                    .map(|chunk| schedule.at_peak(stage(chunk), p * v, m))
                    .collect();
                assert_eq!(said.first(), Some(&peak), "{at}");
                // As many of each, of which the first moment has the most, and others.
                let of_all = |n: &Vec<u32>| n.iter().sum::<u32>();
                assert_eq!(seen.iter().map(of_all).max(), Some(of_all(&peak)), "{at}");
                for _ in 0..20 {
                    let bytes: Vec<u64> = (0..v).map(|_| rng.below(9)).collect();
                    let most = |of: &[Vec<u32>]| {
                        let sum = |n: &Vec<u32>| -> u64 {
                            n.iter().zip(&bytes).map(|(&n, b)| u64::from(n) * b).sum()
                        };
                        of.iter().map(sum).max()
                    };
                    assert_eq!(most(&said), most(&seen), "{at} {bytes:?}");
                }
            }
        }
    }
}

/// Narayanan et al. 2021, section 2.2: with `v` stages a mesh the first one holds as much
/// as `1 + (p - 1) / (p v)` times `p` whole microbatches, all chunks together.
#[test]
fn interleaving_holds_more_activations_than_1f1b() {
    for (p, v) in [(2usize, 2u32), (4, 2), (4, 4), (8, 3)] {
        let slots = interleaved(v).schedule().slots(0, p, 8 * p as u32);
        let (mut alive, mut most) = (0i64, 0);
        for s in &slots {
            alive += match s.of.pass {
                PassKind::Forward => 1,
                _ => -1,
            };
            most = most.max(alive);
        }
        let chunks = p as i64 * i64::from(v) + p as i64 - 1;
        assert_eq!(most, chunks, "p={p} v={v}");
    }
}

/// Equal stages of 3 s, 4 of them and 8 microbatches: 4 x 3 + 7 x 3 s, of which 24 s are work;
/// cut in two on the same meshes, the pipeline fills in half the time.
#[test]
fn equal_stages_have_the_known_bubble() {
    let seconds = |kind: ScheduleKind, stage_s: f64| {
        let v = f64::from(kind.virtual_stages());
        let latency = kind.schedule().latency(4, 8);
        latency.total_s(4.0 * v * stage_s, v * stage_s, stage_s, 0.0)
    };
    assert_eq!(seconds(ScheduleKind::GPipe, 3.0), 33.0);
    assert_eq!(seconds(ScheduleKind::OneFOneB, 3.0), 33.0);
    assert_eq!(seconds(interleaved(2), 1.5), 28.5);
}
