//! Programs of a few instructions, played as software executes them.

use crate::testing::{COLLECTIVES, KERNELS, buffer, cluster, instr, pipeline, relu, role};
use crate::{Software, execute};
use cost_model::StepWork;
use cost_model::simulate::{SimulateOptions, Simulation, simulate};
use ir::cluster::Cluster;
use ir::program::{BufferClass, InstrKind, Program, Slot, Stream, Template, TemplateKind};
use ir::{BufferId, DType, Flops, TemplateId};

const NS: f64 = 1e-9;

fn options(fold: bool) -> SimulateOptions {
    let work = StepWork {
        model_flops: Flops(1e3),
        hardware_flops: Flops(1.25e3),
        hardware_attention_flops: Flops(0.0),
        tokens: 1000,
        dtype: DType::F32,
    };
    SimulateOptions {
        fold,
        ..SimulateOptions::new(work)
    }
}

/// A step under plain software that is changed.
fn play(
    program: &Program,
    cluster: &Cluster,
    change: impl Fn(&mut Software),
    fold: bool,
) -> Simulation {
    let mut software = crate::testing::software();
    change(&mut software);
    let executed = execute(program, cluster, &software).unwrap();
    executed.simulate(cluster, &options(fold)).unwrap()
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs())
}

#[test]
fn plain_software_takes_what_the_program_does() {
    let program = pipeline(&[300, 300, 300], &[600, 300, 500], 4, 100, 2);
    let own = simulate(&program, &cluster(6), &options(true)).unwrap();
    let played = play(&program, &cluster(6), |_| (), true);
    let (own, played) = (own.step_time.0, played.step_time.0);
    // Both in whole picoseconds, from seconds that are added up in other orders.
    assert!((own / played - 1.0).abs() < 1e-6, "{own} s and {played} s");
}

#[test]
fn kernels_take_what_they_take_on_the_devices_of_their_group() {
    // The second of two stages lies on devices of half the rate.
    let program = pipeline(&[300, 300], &[600, 300], 4, 100, 2);
    let mut slow = cluster(2);
    slow.device.vector_flops_per_s /= 2.0;
    let mixed = cluster(2).beside(slow);
    let step = |s: Simulation| s.step_time.0;
    let own = step(simulate(&program, &mixed, &options(true)).unwrap());
    let played = step(play(&program, &mixed, |_| (), true));
    assert!((own / played - 1.0).abs() < 1e-6, "{own} s and {played} s");
    assert!(played > 1.1 * step(play(&program, &cluster(4), |_| (), true)));
}

#[test]
fn gradients_may_be_reduced_before_the_end_of_the_step() {
    use ir::Reduction;
    use ir::collective::CollectiveKind;
    use ir::program::CollectiveItem;
    use ir::reshard::LayoutStep;
    // Backward writes g0 (100 ns), then g1 (300 ns). The end of the step all-reduces both over
    // two ranks: 4 B x 1000 at 1 B/ns, 2 x 1/2 x 4000 = 4000 ns each.
    let reduce = |b: u32| InstrKind::Collective {
        contract: ir::Contract::new(
            CollectiveKind::AllReduce(Reduction::Sum),
            ir::DType::F32,
            ir::Order::Fixed,
        ),
        kind: CollectiveKind::AllReduce(Reduction::Sum),
        axes: vec![ir::AxisId(0)],
        items: vec![CollectiveItem {
            step: LayoutStep::AllReduce {
                axes: vec![ir::AxisId(0)],
            },
            input: BufferId(b),
            output: BufferId(b),
        }],
    };
    let mut r = role(0, 0, 2);
    r.buffers = vec![
        buffer("g0", BufferClass::Step, &[1000]),
        buffer("g1", BufferClass::Step, &[1000]),
        buffer("w0", BufferClass::Transient, &[100]),
        buffer("w1", BufferClass::Transient, &[300]),
    ];
    r.templates = vec![
        Template {
            kind: TemplateKind::Backward,
            chunk: 0,
            instructions: vec![
                instr(relu("w0", 2, 0), KERNELS, &[]),
                instr(relu("w1", 3, 1), KERNELS, &[]),
            ],
        },
        Template {
            kind: TemplateKind::StepEnd,
            chunk: 0,
            instructions: vec![
                instr(reduce(1), COLLECTIVES, &[]),
                instr(reduce(0), COLLECTIVES, &[]),
            ],
        },
    ];
    let slot = |template: u32, microbatch| Slot {
        template: TemplateId(template),
        microbatch,
    };
    r.trace = vec![slot(0, Some(0)), slot(0, Some(1)), slot(1, None)];
    lowering::set_events(&mut r);
    let program = Program {
        roles: vec![r],
        transfers: vec![],
        n_microbatches: 2,
        microbatch: 1,
        route: ir::schedule::Route::Ring,
    };
    let late = play(&program, &cluster(2), |_| (), true);
    let early = play(
        &program,
        &cluster(2),
        |s| s.overlapped_gradients = true,
        true,
    );
    // Two backward passes of 400, then both sums.
    let sums = 2.0 * 4000.0;
    assert!(
        close(late.step_time.0, (800.0 + sums) * NS),
        "{:?}",
        late.step_time
    );
    // The sum of g0 begins 300 before the end of the last backward, though it is listed last.
    assert!(
        close(early.step_time.0, (500.0 + sums) * NS),
        "{:?}",
        early.step_time
    );
}

/// A role of two ranks whose backward computes 4000 ns, gathers a parameter of 4000 B (2000 ns),
/// which the program makes wait because of memory, and computes 100 ns with it.
fn gathering(changed: impl Fn(&mut Software)) -> f64 {
    use ir::collective::CollectiveKind;
    use ir::program::CollectiveItem;
    use ir::reshard::LayoutStep;
    let gather = InstrKind::Collective {
        contract: ir::Contract::new(CollectiveKind::AllGather, ir::DType::F32, ir::Order::Fixed),
        kind: CollectiveKind::AllGather,
        axes: vec![ir::AxisId(0)],
        items: vec![CollectiveItem {
            step: LayoutStep::AllReduce {
                axes: vec![ir::AxisId(0)],
            },
            input: BufferId(0),
            output: BufferId(1),
        }],
    };
    let mut r = role(0, 0, 2);
    r.buffers = vec![
        buffer("p", BufferClass::Step, &[500]),
        buffer("w", BufferClass::Transient, &[1000]),
        buffer("x", BufferClass::Transient, &[4000]),
        buffer("y", BufferClass::Transient, &[100]),
    ];
    r.templates = vec![Template {
        kind: TemplateKind::Backward,
        chunk: 0,
        instructions: vec![
            instr(relu("x", 2, 2), KERNELS, &[]),
            instr(gather, COLLECTIVES, &[0]),
            instr(relu("y", 3, 3), KERNELS, &[1]),
        ],
    }];
    r.trace = vec![Slot {
        template: TemplateId(0),
        microbatch: Some(0),
    }];
    let program = Program {
        roles: vec![r],
        transfers: vec![],
        n_microbatches: 1,
        microbatch: 1,
        route: ir::schedule::Route::Ring,
    };
    let time = |fold| play(&program, &cluster(2), &changed, fold).step_time.0 / NS;
    assert!((time(true) - time(false)).abs() < 1e-6);
    time(true)
}

#[test]
fn parameters_may_be_gathered_ahead() {
    let at = |x: f64, ns: f64| assert!((x - ns).abs() < 1e-6, "{x} is not {ns}");
    at(gathering(|_| ()), 4000.0 + 2000.0 + 100.0);
    at(
        gathering(|s| s.prefetched_parameters = true),
        4000.0 + 100.0,
    );
    // A gather that kernels wait for is not ahead of them.
    let waiting = gathering(|s| {
        s.prefetched_parameters = true;
        s.blocking_axes = vec!["x".into()];
    });
    at(waiting, 6100.0);
}

/// A prefetched gather of 4000 B (2000 ns) and a sum of 4000 B (4000 ns) of `read`, which the
/// program makes wait for the gather.
fn summing_beside_a_gather(read: u32) -> f64 {
    use ir::collective::CollectiveKind;
    use ir::program::CollectiveItem;
    use ir::reshard::LayoutStep;
    let collective = |kind, input, output| InstrKind::Collective {
        contract: ir::Contract::new(kind, ir::DType::F32, ir::Order::Fixed),
        kind,
        axes: vec![ir::AxisId(0)],
        items: vec![CollectiveItem {
            step: LayoutStep::AllReduce {
                axes: vec![ir::AxisId(0)],
            },
            input: BufferId(input),
            output: BufferId(output),
        }],
    };
    let sum = CollectiveKind::AllReduce(ir::Reduction::Sum);
    let mut r = role(0, 0, 2);
    r.buffers = vec![
        buffer("p", BufferClass::Step, &[500]),
        buffer("w", BufferClass::Transient, &[1000]),
        buffer("x", BufferClass::Transient, &[1000]),
        buffer("y", BufferClass::Transient, &[1000]),
    ];
    r.templates = vec![Template {
        kind: TemplateKind::Backward,
        chunk: 0,
        instructions: vec![
            instr(
                collective(CollectiveKind::AllGather, 0, 1),
                COLLECTIVES,
                &[],
            ),
            instr(collective(sum, read, 3), COLLECTIVES, &[0]),
        ],
    }];
    r.trace = vec![Slot {
        template: TemplateId(0),
        microbatch: Some(0),
    }];
    let program = Program {
        roles: vec![r],
        transfers: vec![],
        n_microbatches: 1,
        microbatch: 1,
        route: ir::schedule::Route::Ring,
    };
    let time = |fold| {
        let ahead = |s: &mut Software| {
            s.prefetched_parameters = true;
            s.overlapped_gradients = true;
        };
        play(&program, &cluster(2), ahead, fold).step_time.0 / NS
    };
    assert!((time(true) - time(false)).abs() < 1e-6);
    time(true)
}

#[test]
fn software_that_places_values_as_it_runs_waits_for_values_alone() {
    let (apart, reading) = (summing_beside_a_gather(2), summing_beside_a_gather(1));
    assert!((apart - 4000.0).abs() < 1e-6, "{apart}");
    assert!((reading - 6000.0).abs() < 1e-6, "{reading}");
}

#[test]
fn gathered_pieces_may_be_copied_into_place() {
    // 2 x 4000 B at 1e15 B/s.
    let copied = gathering(|s| s.copied_axes = vec!["x".into()]);
    assert!((copied - 6100.0 - 8e-3).abs() < 1e-3, "{copied}");
    // Two ranks, each a part of 10 ns.
    let listed = gathering(|s| {
        s.copied_axes = vec!["x".into()];
        s.host_s_per_part = 10e-9;
    });
    assert!((listed - copied - 20.0).abs() < 1e-3, "{listed}");
}

#[test]
fn pieces_of_a_scatter_hide_behind_the_matmul_and_are_added_up() {
    use ir::collective::CollectiveKind;
    use ir::program::CollectiveItem;
    use ir::reshard::LayoutStep;
    // 2 x 50^3 FLOPs at 5e11 a second: 500 ns; half of 10,000 B at 1 B/ns: 5000 ns.
    let scatter = InstrKind::Collective {
        contract: ir::Contract::new(
            CollectiveKind::ReduceScatter(ir::Reduction::Sum),
            ir::DType::F32,
            ir::Order::Fixed,
        ),
        kind: CollectiveKind::ReduceScatter(ir::Reduction::Sum),
        axes: vec![ir::AxisId(0)],
        items: vec![CollectiveItem {
            step: LayoutStep::AllReduce {
                axes: vec![ir::AxisId(0)],
            },
            input: BufferId(2),
            output: BufferId(3),
        }],
    };
    let matmul = InstrKind::Compute {
        path: "y".into(),
        kind: ir::OpKind::DotGeneral {
            einsum: ir::op::Einsum::parse("mk,kn->mn").unwrap(),
        },
        inputs: vec![BufferId(0), BufferId(1)],
        outputs: vec![BufferId(2)],
    };
    let square = |name: &str, rows: u64| buffer(name, BufferClass::Transient, &[rows, 50]);
    let mut r = role(0, 0, 2);
    r.buffers = vec![
        square("x", 50),
        square("w", 50),
        square("y", 50),
        square("part", 25),
    ];
    r.templates = vec![Template {
        kind: TemplateKind::Forward,
        chunk: 0,
        instructions: vec![
            instr(matmul, KERNELS, &[]),
            instr(scatter, COLLECTIVES, &[0]),
        ],
    }];
    r.trace = vec![Slot {
        template: TemplateId(0),
        microbatch: Some(0),
    }];
    let program = Program {
        roles: vec![r],
        transfers: vec![],
        n_microbatches: 1,
        microbatch: 1,
        route: ir::schedule::Route::Ring,
    };
    let time = |piecewise: bool| {
        let mut cluster = cluster(2);
        let in_pieces = |s: &mut Software| {
            s.piecewise_axes = if piecewise { vec!["x".into()] } else { vec![] };
        };
        // 10,000 B read and 5,000 B written in 150 ns.
        cluster.device.memory_bandwidth_bytes_per_s = 1e11;
        play(&program, &cluster, in_pieces, true).step_time.0 / NS
    };
    assert!((time(false) - 5500.0).abs() < 1e-6, "{}", time(false));
    // One of two pieces of the matmul's 500 ns hides.
    assert!(
        (time(true) - 5500.0 + 250.0 - 150.0).abs() < 1e-6,
        "{}",
        time(true)
    );
}

#[test]
fn kernels_wait_for_gradients_that_are_not_reduced_beside_them() {
    use ir::collective::CollectiveKind;
    use ir::program::CollectiveItem;
    use ir::reshard::LayoutStep;
    // g0 is made (100 ns) and reduced over two ranks (400 B at 1 B/ns: 400 ns) in one backward
    // with g1 (300 ns), which does not need it.
    let axes = vec![ir::AxisId(0)];
    let mut reduce = instr(
        InstrKind::Collective {
            contract: ir::Contract::new(
                CollectiveKind::AllReduce(ir::Reduction::Sum),
                ir::DType::F32,
                ir::Order::Fixed,
            ),
            kind: CollectiveKind::AllReduce(ir::Reduction::Sum),
            axes: axes.clone(),
            items: vec![CollectiveItem {
                step: LayoutStep::AllReduce { axes },
                input: BufferId(1),
                output: BufferId(1),
            }],
        },
        COLLECTIVES,
        &[0],
    );
    reduce.pass = ir::Pass::BW;
    let mut r = role(0, 0, 2);
    r.buffers = vec![
        buffer("w0", BufferClass::Transient, &[100]),
        buffer("g0", BufferClass::Transient, &[100]),
        buffer("w1", BufferClass::Transient, &[300]),
        buffer("g1", BufferClass::Transient, &[300]),
    ];
    r.templates = vec![Template {
        kind: TemplateKind::Backward,
        chunk: 0,
        instructions: vec![
            instr(relu("g0", 0, 1), KERNELS, &[]),
            reduce,
            instr(relu("g1", 2, 3), KERNELS, &[]),
        ],
    }];
    r.trace = vec![Slot {
        template: TemplateId(0),
        microbatch: Some(0),
    }];
    let program = Program {
        roles: vec![r],
        transfers: vec![],
        n_microbatches: 1,
        microbatch: 1,
        route: ir::schedule::Route::Ring,
    };
    let seconds = |overlapped| {
        let change = |s: &mut Software| s.overlapped_gradients = overlapped;
        play(&program, &cluster(2), change, true).step_time.0
    };
    assert!(close(seconds(true), (100.0 + 400.0) * NS));
    assert!(close(seconds(false), (100.0 + 400.0 + 300.0) * NS));
}

/// A role of two copies of states that are split over two ranks: two microbatches whose gradient of 4000
/// elements in two bytes is scattered over the two, and a sum of the 2000 over the copies at the end.
fn with_copies() -> Program {
    use ir::Reduction;
    use ir::collective::CollectiveKind;
    use ir::mesh::{Axis, DeviceMesh};
    use ir::program::CollectiveItem;
    use ir::reshard::LayoutStep;
    let mut r = role(0, 0, 4);
    let axis = |name: &str| Axis {
        name: name.into(),
        size: 2,
    };
    let devices = DeviceMesh {
        first_rank: ir::Rank(0),
        n_devices: 4,
    };
    let axes = vec![axis("replica"), axis("data")];
    r.mesh = ir::LogicalMesh::new(devices, axes).unwrap();
    let [copies, data] = [ir::AxisId(0), ir::AxisId(1)];
    let narrow = |elements: u64| {
        let mut made = buffer("g", BufferClass::Transient, &[elements]);
        (made.dtype, made.bytes) = (DType::Bf16, 2 * elements);
        made
    };
    r.buffers = vec![narrow(4000), narrow(2000)];
    r.buffers[1].class = BufferClass::Step;
    let collective = |kind, axis, step, [input, output]: [u32; 2]| InstrKind::Collective {
        contract: ir::Contract::new(kind, ir::DType::F32, ir::Order::Fixed),
        kind,
        axes: vec![axis],
        items: vec![CollectiveItem {
            step,
            input: BufferId(input),
            output: BufferId(output),
        }],
    };
    let scatter = collective(
        CollectiveKind::ReduceScatter(Reduction::Sum),
        data,
        LayoutStep::ReduceScatter {
            axis: data,
            dim: 0,
            unit: 1,
        },
        [0, 1],
    );
    let meet = collective(
        CollectiveKind::AllReduce(Reduction::Sum),
        copies,
        LayoutStep::AllReduce { axes: vec![copies] },
        [1, 1],
    );
    // Each group has a queue of its own.
    r.streams.push(Stream::Communicator { axes: vec![copies] });
    let of = |kind, instruction, stream| Template {
        kind,
        chunk: 0,
        instructions: vec![instr(instruction, stream, &[])],
    };
    r.templates = vec![
        of(TemplateKind::Backward, scatter, COLLECTIVES),
        of(TemplateKind::StepEnd, meet, ir::StreamId(3)),
    ];
    let slot = |template: u32, microbatch| Slot {
        template: TemplateId(template),
        microbatch,
    };
    r.trace = vec![slot(0, Some(0)), slot(0, Some(1)), slot(1, None)];
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
fn copies_of_states_may_meet_in_every_microbatch() {
    let program = with_copies();
    let step_s = |sent: Option<DType>, at_once: bool| {
        let change = |s: &mut Software| {
            (s.gradient_dtype, s.copies_meet_at_once) = (sent, at_once);
        };
        play(&program, &cluster(4), change, true).step_time.0
    };
    // Over two ranks at 1 B/ns a scatter of n bytes takes n / 2 ns, a sum n ns.
    let once = step_s(None, false);
    assert!(close(once, (2.0 * 4000.0 + 4000.0) * NS), "{once}");
    // Behind each scatter its half meets that of the copies, in the type of gradients.
    let narrow = step_s(Some(DType::Bf16), true);
    assert!(close(narrow, 2.0 * (4000.0 + 4000.0) * NS), "{narrow}");
    let wide = step_s(Some(DType::F32), true);
    assert!(close(wide, 2.0 * (4000.0 + 8000.0) * NS), "{wide}");
}
