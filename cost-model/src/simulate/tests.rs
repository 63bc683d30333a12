use super::*;
use crate::testing::{
    COLLECTIVES, KERNELS, buffer, cluster, instr, pipeline, relu, role, strict_pipeline,
};
use ir::plan::ScheduleKind;
use ir::program::{BufferClass, Slot, Template};
use ir::{BufferId, DType, Flops, TemplateId};

const NS: f64 = 1e-9;

fn options() -> SimulateOptions {
    SimulateOptions::new(StepWork {
        model_flops: Flops(1e3),
        hardware_flops: Flops(1.25e3),
        hardware_attention_flops: Flops(0.0),
        tokens: 1000,
        dtype: DType::F32,
    })
}

fn play(program: &Program, cluster: &Cluster, change: impl Fn(&mut SimulateOptions)) -> Simulation {
    let mut o = options();
    change(&mut o);
    simulate(program, cluster, &o).unwrap()
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs())
}

fn one_template(instructions: Vec<ir::program::Instruction>, sizes: &[u64]) -> Program {
    let mut r = role(0, 0, 1);
    r.buffers = sizes
        .iter()
        .map(|&n| buffer("b", BufferClass::Transient, &[n]))
        .collect();
    r.templates = vec![Template {
        kind: TemplateKind::Forward,
        chunk: 0,
        instructions,
    }];
    r.trace = vec![
        Slot {
            template: TemplateId(0),
            microbatch: Some(0)
        };
        2
    ];
    lowering::set_events(&mut r);
    Program {
        roles: vec![r],
        transfers: vec![],
        n_microbatches: 2,
        microbatch: 1,
        route: ir::schedule::Route::Ring,
    }
}

#[test]
fn streams_overlap_and_dependencies_wait() {
    // Compute: a (100) b (30). Collective stream: c (70, after a), d (20). Then e (10) after d.
    let program = one_template(
        vec![
            instr(relu("a", 0, 0), KERNELS, &[]),
            instr(relu("c", 1, 1), COLLECTIVES, &[0]),
            instr(relu("b", 2, 2), KERNELS, &[]),
            instr(relu("d", 3, 3), COLLECTIVES, &[]),
            instr(relu("e", 4, 4), KERNELS, &[3]),
        ],
        &[100, 70, 30, 20, 10],
    );
    // 100 + 70 + 20 + 10 = 200 for a template; the second starts when the first is over.
    assert!(close(
        play(&program, &cluster(1), |_| ()).step_time.0,
        400.0 * NS
    ));
    // One thread: 100 + 70 + 30 + 20 + 10 = 230.
    let serial = play(&program, &cluster(1), |o| {
        o.execution = Some(Execution::Serial)
    });
    assert!(close(serial.step_time.0, 460.0 * NS));
    let stage = &serial.prediction.stages[0];
    assert!(close(stage.forward_s.0, 230.0 * NS) && close(stage.compute_s.0, 460.0 * NS));
    // 1000 tokens in 460 ns; 1000 FLOPs in 460 ns on 1e12 FLOP/s.
    assert!(close(serial.prediction.tokens_per_s, 1000.0 / (460.0 * NS)));
    assert!(close(serial.prediction.mfu, 1e3 / (460.0 * NS) / 1e12));
    assert!(close(serial.prediction.hfu, 1.25 * serial.prediction.mfu));
    assert!(serial.prediction.bubble.abs() < 1e-9);
}

/// Copies of the test pipeline take no time to speak of: 4 B at 1e15 B/s.
fn stage_times(forward: &[u64], backward: &[u64]) -> Vec<f64> {
    let stage = |(&f, &b): (&u64, &u64)| (f + b) as f64 * NS;
    forward.iter().zip(backward).map(stage).collect()
}

/// The planner's objective for stages of these times.
fn latency(times: &[f64], m: u32) -> f64 {
    let slowest = times.iter().copied().fold(0.0, f64::max);
    let latency = ScheduleKind::OneFOneB.schedule().latency(times.len(), m);
    latency.total_s(times.iter().sum(), slowest, slowest, 0.0)
}

#[test]
fn equal_stages_take_the_closed_form_time() {
    for (p, m) in [(1, 1), (1, 5), (2, 1), (2, 4), (4, 4), (4, 16), (8, 3)] {
        let (f, b) = (vec![3_000_000; p], vec![6_000_000; p]);
        let program = strict_pipeline(&f, &b, m);
        let simulated = play(&program, &cluster(p as u32), |_| ()).step_time.0;
        let formula = latency(&stage_times(&f, &b), m);
        assert!(
            (simulated / formula - 1.0).abs() < 1e-4,
            "{p} stages, {m} microbatches: {simulated} against {formula}"
        );
    }
}

#[test]
fn the_closed_form_bounds_uneven_stages() {
    // The formula misses that a slow first stage works while the pipeline fills (too long by up
    // to that fill), and that 1F1B makes uneven neighbours wait (too short). No step is shorter
    // than its busiest stage, nor than one microbatch's way through all stages.
    for (f, b) in [
        (vec![1, 2, 3], vec![2, 4, 6]),
        (vec![3, 2, 1], vec![6, 4, 2]),
        (vec![1, 4, 1, 2], vec![5, 3, 2, 2]),
    ] {
        let scale = |v: &[u64]| v.iter().map(|x| x * 1_000_000).collect::<Vec<_>>();
        let (f, b) = (scale(&f), scale(&b));
        for m in [1, 4, 32] {
            let simulated = play(
                &strict_pipeline(&f, &b, m),
                &cluster(f.len() as u32),
                |_| (),
            )
            .step_time
            .0;
            let times = stage_times(&f, &b);
            let formula = latency(&times, m);
            let each = times.iter().copied();
            let bound = each
                .clone()
                .sum::<f64>()
                .max(f64::from(m) * each.fold(0.0, f64::max));
            assert!(
                simulated >= 0.9999 * bound,
                "{f:?} {b:?} x {m}: {simulated} against {bound}"
            );
            assert!(
                (0.85..1.35).contains(&(simulated / formula)),
                "{f:?} {b:?} x {m}: {simulated} against {formula}"
            );
        }
    }
}

#[test]
fn folded_templates_give_what_instructions_give() {
    // Activations of 100 kB: 100 us on the wire, as long as the work.
    for n in [1, 2] {
        let program = pipeline(
            &[100_000, 130_000, 90_000],
            &[170_000, 210_000, 260_000],
            9,
            25_000,
            n,
        );
        let folded = play(&program, &cluster(3 * n), |_| ());
        let unfolded = play(&program, &cluster(3 * n), |o| o.fold = false);
        assert_eq!(folded.step_time, unfolded.step_time);
        assert_eq!(folded.prediction, unfolded.prediction);
        let detailed = play(&program, &cluster(3 * n), |o| {
            o.timeline = TimelineDetail::Instructions
        });
        assert_eq!(detailed.step_time, folded.step_time);
        let events = detailed.timeline.unwrap();
        let end = events
            .iter()
            .map(|e| e.start_s + e.duration_s)
            .fold(0.0, f64::max);
        assert!(close(end, folded.step_time.0));
        let serial = |fold| {
            play(&program, &cluster(3 * n), |o| {
                (o.execution, o.fold) = (Some(Execution::Serial), fold)
            })
            .step_time
            .0
        };
        assert!(close(serial(true), serial(false)));
        assert!(serial(true) >= folded.step_time.0);
    }
}

#[test]
fn transfers_are_hidden_behind_work_that_does_not_need_them() {
    let quiet = pipeline(&[3_000_000; 2], &[6_000_000; 2], 8, 1, 1);
    let loud = pipeline(&[3_000_000; 2], &[6_000_000; 2], 8, 100_000, 1);
    let wire = 400_000.0 / 1e9;
    let (q, l) = (
        play(&quiet, &cluster(2), |_| ()),
        play(&loud, &cluster(2), |_| ()),
    );
    // 8 microbatches: 14 or more crossings of 400 us; the fill sees one each way, and work that
    // does not depend on a transfer hides a third of every other.
    assert!(l.step_time.0 > q.step_time.0 + 2.0 * wire);
    assert!(l.step_time.0 < q.step_time.0 + 16.0 * wire);
    assert!(close(l.prediction.stages[0].transfer_s.0, 16.0 * wire));
    let serial = play(&loud, &cluster(2), |o| {
        o.execution = Some(Execution::Serial)
    });
    assert!(serial.step_time.0 > l.step_time.0);
}

#[test]
fn a_send_waits_for_its_buffer_and_the_next_write_for_the_send() {
    // One copy of each buffer: forward i+1 may not overwrite what is still being sent.
    let mut program = pipeline(&[3000; 2], &[6000; 2], 3, 1_000_000, 1);
    let several = play(&program, &cluster(2), |_| ()).step_time.0;
    for r in &mut program.roles {
        for b in &mut r.buffers {
            if let BufferClass::PerMicrobatch { slots } = &mut b.class {
                *slots = 1;
            }
        }
        lowering::set_events(r);
    }
    let single = play(&program, &cluster(2), |_| ()).step_time.0;
    // 4 MB take 4 ms, work takes microseconds: six crossings one after the other at least.
    assert!(single >= several && single > 6.0 * 4e-3);
    assert_eq!(
        play(&program, &cluster(2), |o| o.fold = false).step_time.0,
        single
    );
}

#[test]
fn unmatched_sends_deadlock_with_names() {
    let mut program = pipeline(&[10; 2], &[10; 2], 2, 1, 1);
    program.roles[1]
        .trace
        .retain(|s| s.template != TemplateId(2));
    for execution in [Execution::Streams, Execution::Serial] {
        let error = simulate(
            &program,
            &cluster(2),
            &SimulateOptions {
                execution: Some(execution),
                ..options()
            },
        )
        .unwrap_err();
        assert!(
            matches!(&error, SimError::Deadlock { waiting } if !waiting.is_empty()),
            "{error}"
        );
        assert!(error.to_string().contains("send a_out"), "{error}");
    }
}

fn with_pool(n: u32, compute_devices: f64) -> Cluster {
    let mut c = cluster(n);
    c.pool = Some(ir::cluster::Pool {
        devices: n,
        compute_devices,
        memory_bytes: ir::Bytes(1 << 30),
    });
    c
}

#[test]
fn ranks_that_share_processors_slow_down() {
    let mut program = one_template(vec![instr(relu("a", 0, 0), KERNELS, &[])], &[1000]);
    program.roles[0].mesh = crate::testing::mesh(0, 4);
    let time = |compute| play(&program, &with_pool(4, compute), |_| ()).step_time.0;
    // Two microbatches of 1000 ns on four ranks.
    assert!(close(time(4.0), 2000.0 * NS));
    assert!(close(time(2.0), 4000.0 * NS));
    assert!(close(time(1.0), 8000.0 * NS));
    let s = play(&program, &with_pool(4, 2.0), |_| ());
    assert!(close(s.slowdown[0][0], 2.0) && close(s.prediction.stages[0].compute_s.0, 4000.0 * NS));
    // Four ranks on two cores: the peak counts two devices.
    assert!(close(s.prediction.mfu, 1e3 / (4000.0 * NS) / 2e12));
}

#[test]
fn what_shared_processors_cost_is_waited_for_in_collectives() {
    let cost = |class, seconds| InstrCost { class, seconds };
    let costs = [
        cost(CostClass::Compute, 3.0),
        cost(CostClass::Collective, 1.0),
        cost(CostClass::Collective, 2.0),
    ];
    // 6 s become 12 s: each collective loses 3 s.
    assert_eq!(expected_seconds(&costs, 2.0), [3.0, 4.0, 5.0]);
    assert_eq!(expected_seconds(&costs[..1], 2.0), [6.0]);
    assert_eq!(expected_seconds(&costs, 1.0), [3.0, 1.0, 2.0]);
}

#[test]
fn only_working_ranks_share() {
    // Two independent roles of one rank on 1.5 processors: 1000 ns and 400 ns of work. Both run
    // at 3/4: the short one ends at 400 / 0.75; then the long one, 600 left, runs at full speed.
    let mut program = one_template(vec![instr(relu("a", 0, 0), KERNELS, &[])], &[1000]);
    let mut short = program.roles[0].clone();
    short.stage = StageId(1);
    short.mesh = crate::testing::mesh(1, 1);
    short.buffers[0] = buffer("b", BufferClass::Transient, &[400]);
    program.roles.push(short);
    for r in &mut program.roles {
        r.trace.truncate(1);
    }
    let s = play(&program, &with_pool(2, 1.5), |_| ());
    let expected = 400.0 / 0.75 + 600.0;
    assert!(close(s.step_time.0, expected * NS));
    // The short role waits for the rest of the step: bubble = mean(0, 1 - 533.3 / 1133.3).
    assert!(close(
        s.prediction.bubble,
        (1.0 - (400.0 / 0.75) / expected) / 2.0
    ));
    assert!(matches!(
        simulate(
            &program,
            &with_pool(2, 1.5),
            &SimulateOptions {
                execution: Some(Execution::Streams),
                ..options()
            }
        ),
        Err(SimError::StreamsOnPool)
    ));
}

#[test]
fn a_world_sum_waits_for_all() {
    let mut program = one_template(
        vec![
            instr(relu("a", 0, 0), KERNELS, &[]),
            instr(
                InstrKind::WorldSum {
                    inputs: vec![],
                    output: BufferId(1),
                },
                COLLECTIVES,
                &[0],
            ),
            instr(relu("b", 2, 2), KERNELS, &[1]),
        ],
        &[1000, 250, 100],
    );
    let mut late = program.roles[0].clone();
    late.stage = StageId(1);
    late.mesh = crate::testing::mesh(1, 1);
    late.buffers[0] = buffer("a", BufferClass::Transient, &[3000]);
    program.roles.push(late);
    for r in &mut program.roles {
        r.templates[0].kind = TemplateKind::StepEnd;
        r.trace = vec![Slot {
            template: TemplateId(0),
            microbatch: None,
        }];
    }
    // The sum of 1000 B over two ranks, ring: 2 * 1/2 * 1000 B at 1e9 B/s = 1000 ns.
    for execution in [Execution::Streams, Execution::Serial] {
        let s = play(&program, &cluster(2), |o| o.execution = Some(execution));
        assert!(
            close(s.step_time.0, (3000.0 + 1000.0 + 100.0) * NS),
            "{}",
            s.step_time
        );
        // Without waiting: 1000 + 1000 + 100.
        assert!(close(s.prediction.stages[0].step_s.0, 2100.0 * NS));
    }
    program.roles[1].trace.clear();
    assert!(matches!(
        simulate(&program, &cluster(2), &options()),
        Err(SimError::Deadlock { .. })
    ));
}

#[test]
fn malformed_programs_are_refused() {
    let good = || one_template(vec![instr(relu("a", 0, 0), KERNELS, &[])], &[10]);
    let refused = |change: &dyn Fn(&mut Program)| {
        let mut p = good();
        change(&mut p);
        simulate(&p, &cluster(1), &options()).unwrap_err()
    };
    assert!(matches!(
        refused(&|p| p.roles[0].buffers.clear()),
        SimError::Malformed { .. }
    ));
    assert!(matches!(
        refused(&|p| p.roles[0].trace[0].template = TemplateId(9)),
        SimError::Malformed { .. }
    ));
    assert!(matches!(
        refused(&|p| p.roles[0].templates[0].instructions[0].deps = vec![ir::InstrId(0)]),
        SimError::Malformed { .. }
    ));
    assert!(matches!(
        refused(&|p| p.roles[0].mesh = crate::testing::mesh(5, 1)),
        SimError::Ranks {
            rank: 5,
            devices: 1
        }
    ));
    let mut bad = cluster(1);
    bad.device.vector_flops_per_s = 0.0;
    assert!(matches!(
        simulate(&good(), &bad, &options()),
        Err(SimError::Cluster { .. })
    ));
}

#[test]
fn a_thousand_microbatches_on_many_stages_play_quickly() {
    let p = 64;
    let program = pipeline(&vec![3000; p], &vec![6000; p], 1024, 1000, 256);
    let n_slots: usize = program.roles.iter().map(|r| r.trace.len()).sum();
    assert!(n_slots > 380_000);
    let started = std::time::Instant::now();
    let s = play(&program, &cluster(p as u32 * 256), |_| ());
    assert!(s.step_time.0 > 1024.0 * 9000.0 * NS);
    // Generous: the machine may be busy.
    assert!(
        started.elapsed().as_secs_f64() < 10.0,
        "{:?}",
        started.elapsed()
    );
    eprintln!("{n_slots} slots in {:?}", started.elapsed());
}
