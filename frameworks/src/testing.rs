//! Small programs for tests.

use crate::Software;
use ir::cluster::Cluster;
use ir::mesh::{Axis, DeviceMesh};
use ir::op::Unary;
use ir::program::{
    Buffer, BufferClass, InstrKind, Instruction, Program, RoleProgram, Slot, Stream, Template,
    TemplateKind, Transfer,
};
use ir::{
    BufferId, DType, InstrId, LogicalMesh, OpKind, Pass, Rank, ShardingSpec, StageId, StreamId,
    TemplateId, TransferId,
};

/// A cluster whose times are easy to write down: vector work at `1e9` FLOP/s (memory never
/// limits), links of `1e9` B/s without latency, no launch time.
pub(crate) fn cluster(n: u32) -> Cluster {
    let text = format!(
        "version = 1\nname = \"test\"\nn_hosts = 1\ndevices_per_host = {n}\n\
         [device]\nname = \"d\"\nattention_efficiency = 0.5\nvector_flops_per_s = 1e9\nmemory_bytes = 1000000\nmemory_reserved_bytes = 1000\n\
         memory_bandwidth_bytes_per_s = 1e15\nmemory_efficiency = 1.0\nlaunch_s = 0.0\n\
         [device.peak_flops_per_s]\nf32 = 1e12\n[device.matmul_efficiency]\nf32 = 0.5\n[device.matmul_half_size]\nm = 0\nn = 0\nk = 0\n\
         [[levels]]\nname = \"wire\"\ndevices = {n}\nlatency_s = 0.0\nbandwidth_bytes_per_s = 1e9\nefficiency = 1.0\nhalf_bytes = 0.0\n[sources]\n"
    );
    cost_model::presets::parse(&text).expect("the test cluster parses")
}

/// Software that adds nothing to what the program says.
pub(crate) fn software() -> Software {
    Software::plain("test")
}

pub(crate) fn mesh(first: u32, n: u32) -> LogicalMesh {
    LogicalMesh::new(
        DeviceMesh {
            first_rank: Rank(first),
            n_devices: n,
        },
        vec![Axis {
            name: "x".into(),
            size: n,
        }],
    )
    .expect("one axis covers the mesh")
}

pub(crate) fn buffer(name: &str, class: BufferClass, lens: &[u64]) -> Buffer {
    let bytes = 4 * lens.iter().product::<u64>();
    Buffer {
        name: name.into(),
        dtype: DType::F32,
        lens: lens.to_vec(),
        spec: ShardingSpec::replicated(lens.len()),
        pieces: None,
        turns: None,
        space: Default::default(),
        class,
        offset: 0,
        bytes,
    }
}

pub(crate) fn role(stage: u32, first: u32, n: u32) -> RoleProgram {
    RoleProgram {
        stage: StageId(stage),
        mesh: mesh(first, n),
        streams: vec![
            Stream::Kernels,
            Stream::Communicator { axes: Vec::new() },
            Stream::Transfers,
        ],
        buffers: Vec::new(),
        templates: Vec::new(),
        trace: Vec::new(),
        arena_bytes: 0,
        other_arenas: Default::default(),
        states: Vec::new(),
        loss: None,
        grad_norm: None,
    }
}

/// The streams of a test's role: kernels, collectives, transfers.
pub(crate) const KERNELS: StreamId = StreamId(0);
pub(crate) const COLLECTIVES: StreamId = StreamId(1);
pub(crate) const TRANSFERS: StreamId = StreamId(2);

pub(crate) fn instr(kind: InstrKind, stream: StreamId, deps: &[u32]) -> Instruction {
    Instruction {
        kind,
        stream,
        deps: deps.iter().map(|&d| InstrId(d)).collect(),
        events: Vec::new(),
        pass: Pass::F,
        layer: None,
        call: ir::program::Call::Own,
    }
}

/// `relu` on `input`: as many nanoseconds as it has elements, on the test cluster.
pub(crate) fn relu(path: &str, input: u32, output: u32) -> InstrKind {
    let kind = OpKind::Unary { f: Unary::Relu };
    InstrKind::Compute {
        path: path.into(),
        kind,
        inputs: vec![BufferId(input)],
        outputs: vec![BufferId(output)],
    }
}

/// A pipeline with activations of `elements` and 1F1B order. Stage `s` takes `forward[s]` and
/// `backward[s]` nanoseconds, each in two instructions of which only one, with two thirds of
/// the time, waits for the neighbour; `n` ranks per stage.
pub(crate) fn pipeline(
    forward: &[u64],
    backward: &[u64],
    m: u32,
    elements: u64,
    n: u32,
) -> Program {
    pipeline_with((forward, backward), m, elements, n, |ns| ns / 3)
}

fn pipeline_with(
    (forward, backward): (&[u64], &[u64]),
    m: u32,
    elements: u64,
    n: u32,
    own: fn(u64) -> u64,
) -> Program {
    let p = forward.len();
    let spec = ShardingSpec::replicated(1);
    let transfer = |value: &str, from: usize, to: usize| Transfer {
        value: value.into(),
        from: StageId::new(from),
        to: StageId::new(to),
        lens: vec![elements],
        dtype: DType::F32,
        from_spec: spec.clone(),
        to_spec: spec.clone(),
    };
    // Transfer 2s goes down from stage s, 2s + 1 comes back.
    let transfers = (1..p)
        .flat_map(|s| [transfer("a", s - 1, s), transfer("g", s, s - 1)])
        .collect();
    let roles = (0..p)
        .map(|s| {
            pipeline_role(
                (s, p),
                [
                    own(forward[s]),
                    forward[s] - own(forward[s]),
                    own(backward[s]),
                    backward[s] - own(backward[s]),
                ],
                m,
                elements,
                n,
            )
        })
        .collect();
    Program {
        roles,
        transfers,
        n_microbatches: m,
        microbatch: 1,
        route: ir::schedule::Route::Ring,
    }
}

fn pipeline_role(
    (s, p): (usize, usize),
    work_ns: [u64; 4],
    m: u32,
    elements: u64,
    n: u32,
) -> RoleProgram {
    let in_flight = (p - s) as u32;
    let slots = BufferClass::PerMicrobatch {
        slots: in_flight.min(m).max(1) + 1,
    };
    let mut r = role(s as u32, s as u32 * n, n);
    // 0 received activation, 1 sent activation, 2 received gradient, 3 sent gradient, then one
    // scratch buffer for each duration.
    r.buffers = ["a_in", "a_out", "g_in", "g_out"]
        .iter()
        .map(|b| buffer(b, slots, &[elements]))
        .collect();
    for ns in work_ns {
        r.buffers
            .push(buffer("work", BufferClass::Transient, &[ns]));
    }
    let fill = |b: u32| InstrKind::Fill {
        value: 0.0,
        output: BufferId(b),
    };
    let copy = |a: u32, b: u32| InstrKind::Copy {
        input: BufferId(a),
        output: BufferId(b),
    };
    let pass = |kind, own: u32, main: u32, from: u32, to: u32| Template {
        kind,
        chunk: 0,
        instructions: vec![
            instr(relu("own", own, own), KERNELS, &[]),
            instr(copy(from, main), KERNELS, &[]),
            instr(relu("main", main, main), KERNELS, &[]),
            instr(copy(main, to), KERNELS, &[]),
            instr(fill(own), COLLECTIVES, &[0]),
        ],
    };
    let exchange = |sends: Vec<(u32, u32)>, recvs: Vec<(u32, u32)>| {
        let ids = |v: Vec<(u32, u32)>| {
            v.into_iter()
                .map(|(x, b)| (TransferId(x), BufferId(b)))
                .collect()
        };
        Template {
            kind: TemplateKind::Exchange,
            chunk: 0,
            instructions: vec![instr(
                InstrKind::Exchange {
                    sends: ids(sends),
                    recvs: ids(recvs),
                },
                TRANSFERS,
                &[],
            )],
        }
    };
    let (up, down) = (2 * s as u32, 2 * s as u32 + 1);
    let (first, last) = (s == 0, s + 1 == p);
    r.templates = vec![
        pass(TemplateKind::Forward, 4, 5, 0, 1),
        pass(TemplateKind::Backward, 6, 7, 2, 3),
        exchange(
            vec![],
            if first {
                vec![]
            } else {
                vec![(up.wrapping_sub(2), 0)]
            },
        ),
        exchange(if last { vec![] } else { vec![(up, 1)] }, vec![]),
        exchange(vec![], if last { vec![] } else { vec![(down, 2)] }),
        exchange(
            if first {
                vec![]
            } else {
                vec![(down.wrapping_sub(2), 3)]
            },
            vec![],
        ),
    ];
    r.trace = one_f_one_b(s, p, m);
    lowering::set_events(&mut r);
    r
}

/// 1F1B; a gradient is received before the next activation is sent, because the neighbour
/// sends the one before it receives the other.
fn one_f_one_b(s: usize, p: usize, m: u32) -> Vec<Slot> {
    let (first, last) = (s == 0, s + 1 == p);
    let warmup = ((p - 1 - s) as u32).min(m);
    let mut trace = Vec::new();
    let mut play = |t: u32, i: u32| {
        trace.push(Slot {
            template: TemplateId(t),
            microbatch: Some(i),
        })
    };
    let (f, b, recv_f, send_f, recv_b, send_b) = (0, 1, 2, 3, 4, 5);
    for i in 0..warmup {
        if !first {
            play(recv_f, i);
        }
        play(f, i);
        if !last {
            play(send_f, i);
        }
    }
    for i in warmup..m {
        if !first {
            play(recv_f, i);
        }
        play(f, i);
        if !last {
            play(recv_b, i - warmup);
            play(send_f, i);
        }
        play(b, i - warmup);
        if !first {
            play(send_b, i - warmup);
        }
    }
    for i in m - warmup..m {
        if !last {
            play(recv_b, i);
        }
        play(b, i);
        if !first {
            play(send_b, i);
        }
    }
    trace
}
