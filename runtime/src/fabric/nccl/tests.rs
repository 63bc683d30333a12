//! NCCL on the emulated GPU: the suite of fabrics, with a GPU for each rank and with one for all, and
//! what goes wrong in the library itself.

use super::*;
use crate::device::{Cuda, Place};
use crate::execute::Local;
use crate::fabric::conformance;
use crate::fabric::threads::World;
use crate::fabric::{Exchange, Moved};
use emulator::harness::is_emulated_with;
use ir::reshard::Tile;
use ir::{DType, LocalRange};
use library::Entry;
use std::time::Instant;

/// Opens worlds whose ranks go round so many GPUs.
fn conforms(n_gpus: u32) {
    conformance::passes(&|n, bytes, timeout| {
        let world = World::new(n, timeout);
        let club = Club::new(&world, None, n > n_gpus).expect("NCCL is there");
        let open = |rank: u32| {
            let gpu = (rank % n_gpus) as usize;
            let device = Cuda::new(gpu, bytes, 0).expect("the emulated GPU opens");
            (device, club.member(Rank(rank)).expect("it takes its place"))
        };
        (0..n).map(open).collect()
    });
}

#[test]
fn ranks_with_a_gpu_each_conform() {
    let test = "fabric::nccl::tests::ranks_with_a_gpu_each_conform";
    if is_emulated_with(test, &[("MESHWRIGHT_EMULATOR_GPUS", "5")]) {
        conforms(5);
    }
}

#[test]
fn ranks_on_one_gpu_conform() {
    let test = "fabric::nccl::tests::ranks_on_one_gpu_conform";
    // Ranks without a program cannot know beforehand what they will load and allocate.
    let [enabled, connected, connections] = SHARING;
    let anytime = ("MESHWRIGHT_EMULATOR_LOADS", "anytime");
    let variables = [enabled, connected, connections, anytime];
    if is_emulated_with(test, &variables) {
        conforms(1);
    }
}

/// A rank that panics while the others' streams wait for it.
#[test]
fn a_rank_that_panics_is_named_and_streams_go_on() {
    let test = "fabric::nccl::tests::a_rank_that_panics_is_named_and_streams_go_on";
    if !is_emulated_with(test, &[("MESHWRIGHT_EMULATOR_GPUS", "3")]) {
        return;
    }
    let world = World::new(3, Duration::from_secs(60));
    let club = Club::new(&world, None, false).expect("NCCL is there");
    let group: Vec<Rank> = (0..3).map(Rank).collect();
    let began = Instant::now();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..3)
            .map(|rank| {
                let (club, group) = (&club, group.clone());
                let mut fabric = club.member(Rank(rank)).expect("it takes its place");
                scope.spawn(move || {
                    let mut device = Cuda::new(rank as usize, 64, 0).expect("it opens");
                    let at = vec![Place {
                        space: crate::device::Space::Device,
                        start: 0,
                        len: 64,
                    }];
                    let sum = Arc::new(Call::world_sum(group, 16));
                    for round in 0..10 {
                        assert!(rank != 1 || round < 5, "rank 1 has an accident");
                        let places = Places {
                            inputs: at.clone(),
                            outputs: at.clone(),
                        };
                        let ticket = fabric.begin(&mut device, StreamId(1), &sum, places)?;
                        fabric.pass(&mut device, ticket)?;
                    }
                    let settled = fabric.settle(&mut device);
                    // Nothing holds up the stream any more.
                    crate::device::Device::finish(&mut device)?;
                    settled
                })
            })
            .collect();
        for (rank, thread) in ranks.into_iter().enumerate() {
            match (rank, thread.join()) {
                (1, done) => assert!(done.is_err(), "it panicked"),
                (_, done) => {
                    let error = done
                        .expect("it does not panic")
                        .expect_err("rank 1 is gone");
                    assert!(
                        matches!(error, RuntimeError::Aborted { by: Rank(1), .. }),
                        "{error}"
                    );
                }
            }
        }
    });
    assert!(
        began.elapsed() < Duration::from_secs(20),
        "a clock ended it"
    );
}

/// A world of two ranks with a GPU each: their devices and their communicators of the library itself.
fn joined() -> Vec<(Cuda, Comms, Key)> {
    let library = library::open().expect("NCCL is there");
    let id = library.id().expect("an identifier").0;
    let key: Key = (vec![Rank(0), Rank(1)], 0);
    let open = |rank| {
        let device = Cuda::new(rank, 64, 0).expect("the emulated GPU opens");
        let comms = Comms::new(library);
        device.enter().expect("its GPU");
        comms.join(&key, id, rank).expect("it joins");
        (device, comms, key.clone())
    };
    let all: Vec<_> = (0..2).map(open).collect();
    for (_, comms, key) in &all {
        while !comms.poll(key).expect("it forms") {}
    }
    all
}

/// Puts the library's calls of two ranks on their streams, and gives what each is told.
fn launched(entries: [Entry; 2]) -> Vec<Result<bool, String>> {
    let mut all = joined();
    let begun: Vec<_> = (all.iter_mut().zip(entries))
        .map(|((device, comms, key), entry)| {
            let stream = device.handle(StreamId(0)).expect("a stream");
            comms.launch(key, stream, &[entry])
        })
        .collect();
    let told = (all.iter().zip(begun)).map(|((_, comms, key), begun)| {
        let polled = begun.and_then(|()| {
            let mut is_there = comms.poll(key)?;
            for _ in 0..20 {
                is_there = comms.poll(key)?;
                comms.sound()?;
            }
            Ok(is_there)
        });
        polled.map_err(|e| e.to_string())
    });
    let told = told.collect();
    all.iter().for_each(|(_, comms, _)| comms.abort());
    told
}

#[test]
fn the_library_tells_all_members_who_brought_another_call() {
    let test = "fabric::nccl::tests::the_library_tells_all_members_who_brought_another_call";
    if !is_emulated_with(test, &[("MESHWRIGHT_EMULATOR_GPUS", "2")]) {
        return;
    }
    let sum = |count| Entry::AllReduce {
        from: 0,
        to: 0,
        count,
        dtype: 7,
        by: 0,
    };
    let told = launched([sum(4), sum(3)]);
    for told in &told {
        let error = told.as_ref().expect_err("the calls differ");
        let words = "rank 1 of 2 comes to call 0 with ncclAllReduce of 3 float32 by sum, others (0) \
            with ncclAllReduce of 4 float32 by sum";
        assert!(error.contains(words), "{error}");
    }
    let (send, receive) = (
        Entry::Send {
            from: 0,
            count: 4,
            dtype: 7,
            peer: 1,
        },
        Entry::Receive {
            to: 0,
            count: 4,
            dtype: 9,
            peer: 0,
        },
    );
    let told = launched([send, receive]);
    let words = "rank 0 sends 4 float32, rank 1 receives 4 bfloat16";
    assert!(
        told.iter()
            .all(|t| t.as_ref().is_err_and(|e| e.contains(words))),
        "{told:?}"
    );
}

#[test]
fn a_pulse_is_missed_until_the_step_is_over() {
    let pulse = super::club::Pulse::default();
    let none = Duration::ZERO;
    assert!(!pulse.is_missed(none), "it has begun no step");
    pulse.beats();
    std::thread::sleep(Duration::from_millis(2));
    assert!(pulse.is_missed(none) && !pulse.is_missed(Duration::from_secs(60)));
    pulse.rests();
    assert!(!pulse.is_missed(none));
}

/// A rank whose host is in its step and says nothing is named, and the others stop.
#[test]
fn a_host_that_is_not_seen_ends_the_run() {
    let test = "fabric::nccl::tests::a_host_that_is_not_seen_ends_the_run";
    if !is_emulated_with(test, &[("MESHWRIGHT_EMULATOR_GPUS", "2")]) {
        return;
    }
    let world = World::new(2, Duration::from_millis(100));
    let club = Club::new(&world, None, false).expect("NCCL is there");
    let [lost, waits] = [0, 1].map(|rank| club.member(Rank(rank)).expect("it takes its place"));
    lost.pulse.beats();
    let began = Instant::now();
    while !world.has_failed() {
        assert!(began.elapsed() < Duration::from_secs(60), "nobody noticed");
        std::thread::sleep(Duration::from_millis(50));
    }
    let error = waits
        .table
        .sound()
        .expect_err("the run has failed")
        .to_string();
    assert!(
        error.contains("rank0") && error.contains("has not been seen at work"),
        "{error}"
    );
}

#[test]
fn several_ranks_on_one_gpu_are_asked_for() {
    let test = "fabric::nccl::tests::several_ranks_on_one_gpu_are_asked_for";
    // All but one of the variables are not enough either.
    let mut variables = SHARING;
    variables[2].1 = "8";
    if is_emulated_with(test, &variables) {
        let error = check(true).expect_err("nobody allowed it").to_string();
        assert!(error.contains("several ranks share a GPU"), "{error}");
        check(false).expect("a GPU each is as usual");
    }
}

/// Exchanges of two transfers, sent in one order and received in the other.
#[test]
fn messages_in_another_order_are_told() {
    let test = "fabric::nccl::tests::messages_in_another_order_are_told";
    if !is_emulated_with(test, &[("MESHWRIGHT_EMULATOR_GPUS", "2")]) {
        return;
    }
    let world = World::new(2, Duration::from_secs(60));
    let club = Club::new(&world, None, false).expect("NCCL is there");
    let moved = |transfer| Moved {
        transfer,
        local: Local {
            dtype: DType::F32,
            lens: vec![4],
            ranges: vec![LocalRange {
                start: 0,
                valid: 4,
                padded: 4,
            }],
        },
        tiles: vec![Tile {
            from: Rank(0),
            to: Rank(1),
            start: vec![0],
            len: vec![4],
        }],
    };
    let errors: Vec<String> = std::thread::scope(|scope| {
        let play = |rank: u32, order: [u32; 2]| {
            let mut fabric = club.member(Rank(rank)).expect("it takes its place");
            scope.spawn(move || {
                let mut device = Cuda::new(rank as usize, 64, 0).expect("it opens");
                let at = [Place {
                    space: crate::device::Space::Device,
                    start: 0,
                    len: 16,
                }];
                let mut all = || {
                    for transfer in order {
                        let (sends, receives) = match rank {
                            0 => (vec![moved(transfer)], Vec::new()),
                            _ => (Vec::new(), vec![moved(transfer)]),
                        };
                        let places = Places {
                            inputs: at[..sends.len()].to_vec(),
                            outputs: at[..receives.len()].to_vec(),
                        };
                        let call = Arc::new(Call {
                            what: format!("transfer {transfer}"),
                            kind: CallKind::Exchange(Exchange { sends, receives }),
                        });
                        let ticket = fabric.begin(&mut device, StreamId(1), &call, places)?;
                        fabric.pass(&mut device, ticket)?;
                    }
                    fabric.settle(&mut device)
                };
                let error: RuntimeError = all().expect_err("the orders differ");
                fabric.abort(&error.to_string());
                error.to_string()
            })
        };
        let ranks = [play(0, [4, 5]), play(1, [5, 4])];
        ranks.map(|r| r.join().expect("it does not panic")).into()
    });
    // Whichever of the two it looks at first.
    let words = "rank1 brings the receipt of message";
    assert!(errors.iter().any(|e| e.starts_with(words)), "{errors:?}");
}
