//! The meaning of records of ranks, for every place at which a rank of a program can stop.

use super::naive::lower;
use super::script::Scripts;
use crate::record::{Doing, Seen, diagnose};
use ir::program::{InstrKind, Program};
use ir::testing::{GraphOptions, random_graph, sequence_of};
use ir::training::training_graph;
use ir::{Axis, DeviceMesh, LogicalMesh, Rank, TrainSpec};
use std::collections::BTreeSet;

/// Two stages of two ranks.
fn program() -> Program {
    let graph = random_graph(5, &GraphOptions::default());
    let spec = TrainSpec {
        global_batch: 4,
        sequence: sequence_of(&graph).unwrap(),
        ..TrainSpec::default()
    };
    let mesh = |first| {
        let devices = DeviceMesh {
            first_rank: Rank(first),
            n_devices: 2,
        };
        let axis = Axis {
            name: "x".into(),
            size: 2,
        };
        LogicalMesh::new(devices, vec![axis]).unwrap()
    };
    let training = training_graph(&graph, &spec).unwrap();
    lower(&training, &[mesh(0), mesh(2)], 2, 2, 1)
}

fn seen(rank: u32, plays: u64, begun: u64, done: u64) -> Seen {
    Seen {
        rank: Rank(rank),
        pid: 1,
        host: "a".into(),
        plan: "p".into(),
        plays,
        training: true,
        step: 0,
        begun,
        done,
        at_ms: 0,
    }
}

/// Lets all ranks play on until none can, rank 3 no further than `stop`: what a run is like in which
/// it hangs there. What a rank can do is found here by rendezvous alone.
fn play_on(program: &Program, all: &mut [Seen], lens: [u64; 4], stop: u64) {
    loop {
        let doing = diagnose(program, all).unwrap().ranks;
        let mut moved = false;
        for (rank, seen) in all.iter_mut().enumerate() {
            let most = if rank == 3 { stop } else { lens[rank] };
            let works = matches!(doing[&Rank(rank as u32)], Doing::Working(_));
            if seen.begun == seen.done && seen.begun < most {
                seen.begun += 1;
                moved = true;
            } else if seen.begun > seen.done && works && !(rank == 3 && seen.begun == stop) {
                seen.done += 1;
                moved = true;
            }
        }
        if !moved {
            return;
        }
    }
}

#[test]
fn whoever_stops_is_found_wherever_it_stops() {
    let program = program();
    let len = |role: usize| {
        let script = Scripts::new(&program, role).unwrap().of(true);
        script.slots.iter().map(Vec::len).sum::<usize>() as u64
    };
    let (lens, len) = ([len(0), len(0), len(1), len(1)], len(1));
    let mut all: Vec<Seen> = (0..4).map(|rank| seen(rank, 1, 0, 0)).collect();
    let mut n_found = 0;
    for stop in 1..=len {
        play_on(&program, &mut all, lens, stop);
        let diagnosis = diagnose(&program, &all).unwrap();
        let waiting = |rank: u32| matches!(diagnosis.ranks[&Rank(rank)], Doing::Waiting { .. });
        // Of the others nobody is to blame.
        assert!(
            diagnosis.culprits.is_subset(&BTreeSet::from([Rank(3)])),
            "at {stop}: {diagnosis:?}"
        );
        if (0..3).any(waiting) {
            // It may itself have come to a call whose others are all there.
            let works = matches!(diagnosis.ranks[&Rank(3)], Doing::Working(_));
            assert!(works, "at {stop}: {diagnosis:?}");
            assert_eq!(diagnosis.culprits, BTreeSet::from([Rank(3)]), "at {stop}");
            // The call that it owes is the next one of those that others are in, and they are those
            // who wait for it.
            let owed = &diagnosis.owed[&Rank(3)];
            assert_eq!(
                (owed.step, owed.of, owed.begun),
                (0, len, stop),
                "at {stop}"
            );
            assert!((stop + 1..=len).contains(&owed.instruction), "{owed:?}");
            let call = calls_before(&program, owed.instruction);
            assert_eq!(owed.call, call + 1, "at {stop}: {owed:?}");
            let mut on = all.clone();
            play_on(&program, &mut on, lens, owed.instruction);
            let moved = (0..3).any(|r| on[r].done > all[r].done);
            assert!(moved, "at {stop}: {owed:?} lets nobody go on");
            let mut short = all.clone();
            play_on(&program, &mut short, lens, owed.instruction - 1);
            let moved = (0..3).any(|r| waiting(r as u32) && short[r].done > all[r].done);
            assert!(!moved, "at {stop}: somebody goes on before {owed:?}");
            n_found += 1;
        }
    }
    assert!(n_found > len / 2, "{n_found} of {len}");
}

/// Whatever is said without the record of a rank is what would be said with it, wherever all are.
#[test]
fn nothing_follows_from_a_record_that_is_missing() {
    const PLACES: u64 = 40;
    let program = program();
    let len = |role: usize| {
        let script = Scripts::new(&program, role).unwrap().of(true);
        script.slots.iter().map(Vec::len).sum::<usize>() as u64
    };
    let lens = [len(0), len(0), len(1), len(1)];
    let mut n_unclear = 0;
    for stop in 0..PLACES {
        // Some further than others, in an instruction each.
        let at = |rank: u32| 1 + (stop * 17 + u64::from(rank) * 5) % (lens[rank as usize] - 1);
        let all: Vec<Seen> = (0..4).map(|r| seen(r, 1, at(r), at(r) - 1)).collect();
        let full = diagnose(&program, &all).unwrap();
        for lost in (0..4).map(Rank) {
            let some: Vec<Seen> = all.iter().filter(|s| s.rank != lost).cloned().collect();
            let said = diagnose(&program, &some).unwrap();
            assert_eq!(said.ranks[&lost], Doing::Nothing);
            assert!(said.culprits.is_subset(&full.culprits), "at {stop}");
            for (rank, doing) in said.ranks.iter().filter(|(rank, _)| **rank != lost) {
                let with = &full.ranks[rank];
                match (doing, with) {
                    (Doing::Unclear { what, unknown }, Doing::Working(other)) => {
                        assert_eq!((what, &unknown[..]), (other, &[lost][..]));
                        n_unclear += 1;
                    }
                    (
                        Doing::Unclear { what, unknown },
                        Doing::Waiting {
                            what: other,
                            missing,
                        },
                    ) => {
                        assert_eq!((what, unknown, &[lost][..]), (other, missing, &missing[..]));
                        n_unclear += 1;
                    }
                    (Doing::Waiting { missing, .. }, Doing::Waiting { missing: all, .. }) => {
                        let others = all.iter().filter(|r| **r != lost).copied();
                        assert_eq!(*missing, others.collect::<Vec<_>>(), "at {stop}");
                    }
                    (doing, with) => assert_eq!(doing, with, "{rank} at {stop} without {lost}"),
                }
            }
        }
    }
    assert!(n_unclear > 0);
}

/// Calls of rank 3 before an instruction of its script, counted by the kinds of instructions.
fn calls_before(program: &Program, instruction: u64) -> u64 {
    let role = &program.roles[1];
    let script = Scripts::new(program, 1).unwrap().of(true);
    let steps = script.slots.iter().flatten();
    let before = steps.take(instruction as usize - 1);
    let is_call = |s: &&super::script::Step| {
        let kind = &role.template(s.template).instructions[s.instruction].kind;
        matches!(
            kind,
            InstrKind::Collective { .. } | InstrKind::Exchange { .. } | InstrKind::WorldSum { .. }
        )
    };
    before.filter(is_call).count() as u64
}

#[test]
fn ranks_that_are_steps_apart_are_told_apart() {
    let program = program();
    // Rank 0 is at a collective of its second step, the others have ended their first.
    let role = &program.roles[0];
    let script = Scripts::new(&program, 0).unwrap().of(true);
    let steps = script.slots.iter().flatten();
    let kind =
        |s: &super::script::Step| &role.template(s.template).instructions[s.instruction].kind;
    let at = steps
        .clone()
        .position(|s| matches!(kind(s), InstrKind::Collective { .. }));
    let at = at.unwrap() as u64;
    let n = steps.count() as u64;
    let all = [seen(0, 2, at + 1, at), seen(1, 1, n, n)];
    let diagnosis = diagnose(&program, &all).unwrap();
    assert!(
        matches!(&diagnosis.ranks[&Rank(0)], Doing::Waiting { missing, .. } if *missing == [Rank(1)]),
        "{diagnosis:?}"
    );
    assert_eq!(diagnosis.ranks[&Rank(1)], Doing::Between);
    assert_eq!(diagnosis.ranks[&Rank(2)], Doing::Nothing);
    assert_eq!(diagnosis.culprits, BTreeSet::from([Rank(1)]));
    // It has not begun the step in which it is awaited.
    let owed = &diagnosis.owed[&Rank(1)];
    assert_eq!((owed.begun, owed.instruction, owed.of), (0, at + 1, n));
    // Of another plan.
    assert!(diagnose(&program, &[seen(9, 1, 0, 0)]).is_err());
    assert!(diagnose(&program, &[seen(0, 1, n + 1, 0)]).is_err());
}
