//! Hand-made programs of a tiny model: what is proved, and under which rule what is not.
#![allow(clippy::unwrap_used)]

use crate::{Violation, check_program};
use ir::cluster::{CLUSTER_VERSION, Cluster, Device, HalfSize, Pool};
use ir::collective::CollectiveKind;
use ir::op::InputKind;
use ir::plan::{PASSES_VERSION, PLAN_VERSION, Plan, Prediction, Proof, ScheduleKind, StagePlan};
use ir::program::{
    Buffer, BufferClass, InstrKind, Instruction, Program, RoleProgram, Slot, StateBuffer, Stream,
    Template, TemplateKind,
};
use ir::training::{TrainingGraph, training_graph};
use ir::{
    BufferId, Bytes, Contract, DType, DeviceMesh, Graph, InstrId, LogicalMesh, Op, OpKind, Order,
    Pass, Place, Rank, ReduceKind, Reduction, Region, Shape, ShardingSpec, StageId, StreamId, Sum,
    TemplateId, TensorType, TrainSpec, ValueId,
};
use std::collections::BTreeMap;

const SEQUENCE: u64 = 3;

/// The sum of the embeddings of all tokens.
fn forward() -> Graph {
    let mut g = Graph::new("tiny");
    let layer = g.add_layer("only");
    let at = |path: &str, region, pass| Place {
        path: path.into(),
        pass,
        region,
        layer: Some(layer),
    };
    let table = OpKind::State {
        init: ir::op::Init::Ones,
        decay: true,
    };
    let table = g
        .add_source(
            table,
            TensorType::new(DType::F32, Shape::fixed(&[5, 2])),
            at("table", Region::StepBegin, Pass::Update),
        )
        .unwrap();
    let tokens = OpKind::Input {
        kind: InputKind::Tokens,
    };
    let tokens = g
        .add_source(
            tokens,
            TensorType::new(DType::I32, Shape::batched(&[SEQUENCE])),
            at("tokens", Region::Microbatch, Pass::F),
        )
        .unwrap();
    let x = g
        .add1(
            OpKind::Embedding,
            &[table, tokens],
            at("lookup", Region::Microbatch, Pass::F),
        )
        .unwrap();
    let sum = OpKind::Reduce {
        kind: ReduceKind::Sum,
        dims: vec![0, 1, 2],
    };
    g.outputs = vec![
        g.add1(sum, &[x], at("total", Region::Microbatch, Pass::F))
            .unwrap(),
    ];
    g
}

fn plan(m: u32) -> (Plan, TrainingGraph) {
    let forward = forward();
    let device = Device {
        name: "any".into(),
        peak_flops_per_s: BTreeMap::from([(DType::F32, 1.0)]),
        matmul_efficiency: BTreeMap::from([(DType::F32, 1.0)]),
        matmul_half_size: HalfSize {
            m: 0.0,
            n: 0.0,
            k: 0.0,
        },
        attention_efficiency: 1.0,
        vector_flops_per_s: 1.0,
        memory_bytes: Bytes(1 << 20),
        memory_reserved_bytes: Bytes(0),
        memory_headroom: 0.0,
        memory_bandwidth_bytes_per_s: 1.0,
        memory_efficiency: 1.0,
        launch_s: 0.0,
        conversion_s_per_element: BTreeMap::new(),
        kernels: None,
        multiprocessors: 0,
        unaligned_matmul_share: 1.0,
        sustained_share: 1.0,
        sustained_share_of: Default::default(),
        power_limit_w: None,
        boost_clock_hz: None,
    };
    let cluster = Cluster {
        version: CLUSTER_VERSION,
        name: "any".into(),
        n_hosts: 1,
        devices_per_host: 1,
        device,
        levels: vec![],
        groups: Vec::new(),
        missing: Vec::new(),
        degraded: Vec::new(),
        pool: None,
        storage: None,
        sources: BTreeMap::new(),
        measured: vec![],
    };
    let mesh = LogicalMesh::new(
        DeviceMesh {
            first_rank: Rank(0),
            n_devices: 1,
        },
        vec![],
    )
    .unwrap();
    let train = TrainSpec {
        global_batch: 2 * u64::from(m),
        sequence: SEQUENCE,
        ..TrainSpec::default()
    };
    let training = training_graph(&forward, &train).unwrap();
    let plan = Plan {
        version: PLAN_VERSION,
        passes: PASSES_VERSION,
        name: "tiny".into(),
        graph: ir::text::print(&forward),
        train,
        cluster,
        microbatch: 2,
        n_microbatches: m,
        schedule: ScheduleKind::GPipe,
        stages: vec![StagePlan { mesh, runs: vec![] }],
        layer_strategies: vec![],
        transfers: BTreeMap::new(),
        edges: BTreeMap::new(),
        pins: vec![],
        headroom: None,
        made_for: None,
        predicted: Prediction::default(),
        proof: Proof::default(),
    };
    (plan, training)
}

/// One device, one buffer for each value, everything in graph order.
struct Naive<'a> {
    training: &'a TrainingGraph,
    role: RoleProgram,
    at: BTreeMap<ValueId, BufferId>,
}

impl Naive<'_> {
    fn buffer(
        &mut self,
        name: String,
        dtype: DType,
        lens: Vec<u64>,
        class: BufferClass,
    ) -> BufferId {
        let bytes = lens.iter().product::<u64>() * dtype.bytes();
        let offset = self.role.arena_bytes;
        self.role.arena_bytes += bytes.next_multiple_of(256);
        let spec = ShardingSpec::replicated(lens.len());
        self.role.buffers.push(Buffer {
            name,
            dtype,
            lens,
            spec,
            pieces: None,
            turns: None,
            space: Default::default(),
            class,
            offset,
            bytes,
        });
        BufferId::new(self.role.buffers.len() - 1)
    }
    fn value(&mut self, v: ValueId) -> BufferId {
        let op = self
            .training
            .graph
            .op(self.training.graph.value(v).producer);
        let class = match (&op.kind, op.region) {
            (OpKind::State { .. }, _) => BufferClass::Persistent,
            (OpKind::Accumulate { .. }, _) | (_, Region::StepBegin | Region::StepEnd) => {
                BufferClass::Step
            }
            _ => BufferClass::PerMicrobatch { slots: 1 },
        };
        let ty = self.training.graph.ty(v).clone();
        let b = self.buffer(
            self.training.graph.value_name(v),
            ty.dtype,
            ty.shape.bind(2),
            class,
        );
        self.at.insert(v, b);
        b
    }
    fn push(&mut self, template: usize, kind: InstrKind) {
        let is_sum = |k: &InstrKind| matches!(k, InstrKind::WorldSum { .. });
        let before = self.role.templates[template].instructions.last();
        let meets = is_sum(&kind) || before.is_some_and(|i| is_sum(&i.kind));
        let n = self.role.templates[template].instructions.len();
        let instr = Instruction {
            stream: StreamId(u32::from(is_sum(&kind))),
            kind,
            deps: (n.checked_sub(1).filter(|_| meets))
                .map(InstrId::new)
                .into_iter()
                .collect(),
            events: vec![],
            pass: Pass::F,
            layer: None,
            call: ir::program::Call::Own,
        };
        self.role.templates[template].instructions.push(instr);
    }
    fn op(&mut self, op: &Op) {
        let template = match op.region {
            Region::StepBegin => 0,
            Region::Microbatch if op.pass == Pass::F => 1,
            Region::Microbatch => 3,
            Region::StepEnd => 2,
        };
        let inputs: Vec<BufferId> = op.inputs.iter().map(|v| self.at[v]).collect();
        let compute = |inputs, outputs| InstrKind::Compute {
            path: op.path.clone(),
            kind: op.kind.clone(),
            inputs,
            outputs,
        };
        match &op.kind {
            OpKind::Layout => drop(self.at.insert(op.outputs[0], inputs[0])),
            OpKind::State { .. } => drop(self.value(op.outputs[0])),
            OpKind::Input { kind } => {
                let output = self.value(op.outputs[0]);
                self.push(
                    template,
                    InstrKind::Load {
                        kind: *kind,
                        output,
                    },
                );
            }
            OpKind::Constant { value } => {
                let output = self.value(op.outputs[0]);
                self.push(
                    template,
                    InstrKind::Fill {
                        value: *value,
                        output,
                    },
                );
            }
            OpKind::Accumulate { .. } => {
                let output = self.value(op.outputs[0]);
                self.push(0, InstrKind::Fill { value: 0.0, output });
                self.push(template, compute(inputs, vec![output]));
            }
            OpKind::GlobalNorm => {
                let terms = self.buffer(
                    "terms".into(),
                    DType::F32,
                    vec![inputs.len() as u64],
                    BufferClass::Transient,
                );
                let entries = inputs
                    .iter()
                    .enumerate()
                    .map(|(i, &b)| (i as u32, b))
                    .collect();
                self.push(
                    template,
                    InstrKind::WorldSum {
                        inputs: entries,
                        output: terms,
                    },
                );
                let norm = self.value(op.outputs[0]);
                self.push(template, compute(vec![terms], vec![norm]));
            }
            OpKind::AdamW { .. } => {
                let outputs = vec![inputs[0], inputs[2], inputs[3]];
                self.push(template, compute(inputs, outputs));
            }
            _ => {
                let outputs = op.outputs.iter().map(|&v| self.value(v)).collect();
                self.push(template, compute(inputs, outputs));
            }
        }
    }
}

fn program(plan: &Plan, training: &TrainingGraph) -> Program {
    let template = |kind| Template {
        kind,
        chunk: 0,
        instructions: vec![],
    };
    let slot = |template, microbatch| Slot {
        template: TemplateId(template),
        microbatch,
    };
    let middle = (0..plan.n_microbatches).flat_map(|m| [1, 3].map(|t| slot(t, Some(m))));
    let role = RoleProgram {
        stage: StageId(0),
        mesh: plan.stages[0].mesh.clone(),
        streams: vec![Stream::Kernels, Stream::World],
        buffers: vec![],
        templates: vec![
            template(TemplateKind::StepBegin),
            template(TemplateKind::Forward),
            template(TemplateKind::StepEnd),
            template(TemplateKind::Backward),
        ],
        trace: std::iter::once(slot(0, None))
            .chain(middle)
            .chain([slot(2, None)])
            .collect(),
        arena_bytes: 0,
        other_arenas: Default::default(),
        states: vec![],
        loss: None,
        grad_norm: None,
    };
    let mut naive = Naive {
        training,
        role,
        at: BTreeMap::new(),
    };
    training.graph.ops().iter().for_each(|op| naive.op(op));
    for s in &training.states {
        naive.role.states.push(StateBuffer {
            path: s.path.clone(),
            param: s.param.clone(),
            role: s.role,
            buffer: naive.at[&s.read],
        });
    }
    naive.role.loss = Some(naive.at[&training.loss]);
    naive.role.grad_norm = training.grad_norm.map(|v| naive.at[&v]);
    Program {
        roles: vec![naive.role],
        transfers: vec![],
        n_microbatches: plan.n_microbatches,
        microbatch: plan.microbatch,
        route: ir::schedule::Route::Ring,
    }
}

/// The report on the tiny program after a change.
fn after(m: u32, change: impl Fn(&mut RoleProgram)) -> Vec<Violation> {
    let (plan, training) = plan(m);
    let mut program = program(&plan, &training);
    change(&mut program.roles[0]);
    check_program(&plan, &training, &program)
}

#[track_caller]
fn refused(rule: &str, found: &[Violation]) {
    assert!(
        found.iter().any(|v| v.rule == rule),
        "no `{rule}` in {found:#?}"
    );
}

fn find(role: &RoleProgram, path: &str) -> (usize, usize) {
    let has = |i: &Instruction| matches!(&i.kind, InstrKind::Compute { path: p, .. } if p == path);
    let mut all = role
        .templates
        .iter()
        .enumerate()
        .filter_map(|(t, x)| Some((t, x.instructions.iter().position(has)?)));
    all.next().unwrap()
}

fn named(role: &RoleProgram, name: &str) -> BufferId {
    BufferId::new(role.buffers.iter().position(|b| b.name == name).unwrap())
}

#[test]
fn the_naive_program_is_proved() {
    for m in [1, 2, 7, 100] {
        let found = after(m, |_| {});
        assert!(found.is_empty(), "{m}: {found:#?}");
    }
}

#[test]
fn a_reused_template_is_not_a_skipped_one() {
    let twice = |role: &mut RoleProgram| {
        role.trace[49..51]
            .iter_mut()
            .for_each(|slot| slot.microbatch = Some(3));
    };
    refused("coverage", &after(100, twice));
    refused("accumulate", &after(100, twice));
    refused("result", &after(100, |role| drop(role.trace.drain(49..51))));
}

#[test]
fn another_microbatchs_value_is_refused() {
    // The backward of microbatch 0 plays after the forward of microbatch 1.
    let found = after(2, |role| role.trace.swap(2, 3));
    refused("operand", &found);
    assert!(
        found
            .iter()
            .any(|v| v.actual.contains("another microbatch")),
        "{found:#?}"
    );
}

#[test]
fn an_op_must_be_the_graphs() {
    let at = |role: &mut RoleProgram, f: &dyn Fn(&mut InstrKind)| {
        let (t, i) = find(role, "total");
        f(&mut role.templates[t].instructions[i].kind);
    };
    refused(
        "op",
        &after(2, |role| {
            at(role, &|k| {
                if let InstrKind::Compute { path, .. } = k {
                    path.push('x')
                }
            })
        }),
    );
    refused(
        "op",
        &after(2, |role| {
            at(role, &|k| {
                if let InstrKind::Compute { kind, .. } = k {
                    *kind = OpKind::Reduce {
                        kind: ReduceKind::Max,
                        dims: vec![0, 1, 2],
                    }
                }
            });
        }),
    );
    refused(
        "arity",
        &after(2, |role| {
            at(role, &|k| {
                if let InstrKind::Compute { inputs, .. } = k {
                    inputs.clear()
                }
            })
        }),
    );
}

#[test]
fn accumulators_start_at_zero_and_hold_everything() {
    let clear = |role: &mut RoleProgram, value: Option<f64>| {
        let acc = named(role, "accumulate.loss");
        let fills =
            |i: &Instruction| matches!(i.kind, InstrKind::Fill { output, .. } if output == acc);
        let at = role.templates[0]
            .instructions
            .iter()
            .position(fills)
            .unwrap();
        match (value, &mut role.templates[0].instructions[at].kind) {
            (Some(x), InstrKind::Fill { value, .. }) => *value = x,
            _ => drop(role.templates[0].instructions.remove(at)),
        }
    };
    refused("accumulate", &after(2, |role| clear(role, None)));
    refused("accumulate", &after(2, |role| clear(role, Some(1.0))));
}

#[test]
fn states_are_updated_once_and_in_place() {
    refused("coverage", &after(2, |role| role.trace.push(role.trace[5])));
    refused(
        "state",
        &after(2, |role| {
            let (t, i) = find(role, "update.table");
            role.templates[t].instructions.remove(i);
        }),
    );
    refused(
        "in_place",
        &after(2, |role| {
            let (t, i) = find(role, "update.table");
            if let InstrKind::Compute { outputs, .. } = &mut role.templates[t].instructions[i].kind
            {
                outputs.swap(1, 2);
            }
        }),
    );
}

#[test]
fn memory_is_checked() {
    refused(
        "overlap",
        &after(1, |role| role.buffers[1].offset = role.buffers[0].offset),
    );
    refused("arena", &after(1, |role| role.arena_bytes -= 256));
    refused("alignment", &after(1, |role| role.buffers[0].offset += 4));
    refused("bytes", &after(1, |role| role.buffers[0].bytes += 1));
    refused("memory", &after(1, |role| role.arena_bytes = 1 << 30));
}

#[test]
fn streams_need_deps() {
    let split = |deps: &[u32]| {
        after(1, |role| {
            let (t, i) = find(role, "total");
            let instr = &mut role.templates[t].instructions[i];
            instr.stream = StreamId::new(role.streams.len());
            instr.deps = deps.iter().map(|&d| InstrId(d)).collect();
            role.streams.push(Stream::Communicator { axes: vec![] });
        })
    };
    // It reads what its predecessor writes, and its successor reads what it writes.
    let found = split(&[]);
    refused("hazard", &found);
    assert!(found.iter().all(|v| v.rule == "hazard"), "{found:#?}");
    refused("deps", &split(&[40]));
}

#[test]
fn the_world_sum_takes_every_entry_once() {
    let entries = |f: fn(&mut Vec<(u32, BufferId)>)| {
        after(1, |role| {
            for i in &mut role.templates[2].instructions {
                if let InstrKind::WorldSum { inputs, .. } = &mut i.kind {
                    f(inputs);
                }
            }
        })
    };
    refused("world_sum", &entries(|inputs| inputs.clear()));
    refused("world_sum", &entries(|inputs| inputs.push(inputs[0])));
    refused("world_sum", &entries(|inputs| inputs[0].0 = 9));
}

/// The report on a collective between the first two buffers, which have these types, on ranks that
/// share processors or on others, which sum by a library.
fn contract(
    by_library: bool,
    kind: CollectiveKind,
    stated: Contract,
    types: [DType; 2],
) -> Vec<Violation> {
    let (mut plan, training) = plan(1);
    plan.cluster.pool = (!by_library).then_some(Pool {
        devices: 1,
        compute_devices: 1.0,
        memory_bytes: Bytes(1 << 20),
    });
    let mut program = program(&plan, &training);
    let role = &mut program.roles[0];
    role.buffers[0].dtype = types[0];
    role.buffers[1].dtype = types[1];
    role.templates[0].instructions[0].kind = InstrKind::Collective {
        kind,
        axes: vec![],
        contract: stated,
        items: vec![ir::program::CollectiveItem {
            step: ir::reshard::LayoutStep::AllReduce { axes: vec![] },
            input: BufferId(0),
            output: BufferId(1),
        }],
    };
    let mut report = crate::report::Report::default();
    crate::contracts::check(&plan, &program, &mut report);
    report.finish()
}

#[test]
fn a_collective_states_what_the_devices_do() {
    use CollectiveKind::{AllGather, AllReduce, ReduceScatter};
    let (f32, bf16) = (DType::F32, DType::Bf16);
    let stated = |operand, sum: Option<(DType, Order)>| {
        let sum = sum.map(|(dtype, order)| Sum { dtype, order });
        Contract { operand, sum }
    };
    let fixed = |operand| stated(operand, Some((f32, Order::Fixed)));
    let library = |operand| stated(operand, Some((operand, Order::Library)));
    let sums = [AllReduce(Reduction::Sum), ReduceScatter(Reduction::Sum)];
    for dtype in [f32, bf16] {
        let of = |by_library, kind, stated| contract(by_library, kind, stated, [dtype; 2]);
        for kind in sums {
            assert_eq!(of(false, kind, fixed(dtype)), []);
            assert_eq!(of(true, kind, library(dtype)), []);
            refused("contract", &of(true, kind, fixed(dtype)));
            refused("contract", &of(false, kind, library(dtype)));
            refused("contract", &of(false, kind, stated(dtype, None)));
        }
        for kind in [AllGather, AllReduce(Reduction::Max)] {
            assert_eq!(of(false, kind, stated(dtype, None)), []);
            assert_eq!(of(true, kind, stated(dtype, None)), []);
            refused("contract", &of(false, kind, fixed(dtype)));
            refused("contract", &of(true, kind, library(dtype)));
        }
    }
    // The type of the sum, that of the operands, and that of one buffer of several.
    let narrow = stated(bf16, Some((bf16, Order::Fixed)));
    refused("contract", &contract(false, sums[0], narrow, [bf16; 2]));
    let wide = stated(bf16, Some((f32, Order::Library)));
    refused("contract", &contract(true, sums[0], wide, [bf16; 2]));
    refused("contract", &contract(false, sums[0], fixed(f32), [bf16; 2]));
    let found = contract(false, sums[0], fixed(f32), [f32, bf16]);
    refused("contract", &found);
    let said = (found[0].expected.as_str(), found[0].actual.as_str());
    assert!(
        said.0.starts_with("bf16 in f32 fixed for buffer 1 ("),
        "{said:?}"
    );
    assert_eq!(said.1, "f32 in f32 fixed");
}

/// Two stages that exchange transfers 0 (to stage 1) and 1 (back): what each of their
/// exchanges sends and receives.
fn meeting(exchanges: [&[(&[u32], &[u32])]; 2]) -> Vec<Violation> {
    meeting_of(&[(0, 1), (1, 0)], &exchanges)
}

/// Stages with transfers from one to another: what each of their exchanges sends and receives.
fn meeting_of(transfers: &[(u32, u32)], exchanges: &[&[(&[u32], &[u32])]]) -> Vec<Violation> {
    let (plan, training) = plan(1);
    let mut program = program(&plan, &training);
    let transfer = |from, to| ir::program::Transfer {
        value: "lookup".into(),
        from: StageId(from),
        to: StageId(to),
        lens: vec![],
        dtype: DType::F32,
        from_spec: ShardingSpec::replicated(0),
        to_spec: ShardingSpec::replicated(0),
    };
    program.transfers = transfers.iter().map(|&(a, b)| transfer(a, b)).collect();
    program.roles = vec![program.roles[0].clone(); exchanges.len()];
    for (role, exchanges) in program.roles.iter_mut().zip(exchanges) {
        let of = |xs: &[u32]| {
            xs.iter()
                .map(|&x| (ir::TransferId(x), BufferId(0)))
                .collect()
        };
        let kinds = exchanges.iter().map(|(s, r)| InstrKind::Exchange {
            sends: of(s),
            recvs: of(r),
        });
        role.templates = kinds
            .map(|kind| Instruction {
                kind,
                stream: StreamId(0),
                deps: vec![],
                events: vec![],
                pass: Pass::F,
                layer: None,
                call: ir::program::Call::Own,
            })
            .map(|i| Template {
                kind: TemplateKind::Exchange,
                chunk: 0,
                instructions: vec![i],
            })
            .collect();
        role.trace = (0..role.templates.len())
            .map(|t| Slot {
                template: TemplateId::new(t),
                microbatch: Some(0),
            })
            .collect();
    }
    let mut report = crate::report::Report::default();
    let facts = crate::facts::Facts::new(&training, 2, &mut report).unwrap();
    crate::rendezvous::check(&facts, &program, &mut report);
    report.finish()
}

#[test]
fn opposite_sends_hang_unless_they_proceed_together() {
    let found = meeting([&[(&[0], &[]), (&[], &[1])], &[(&[1], &[]), (&[], &[0])]]);
    assert_eq!(
        found.iter().filter(|v| v.rule == "deadlock").count(),
        2,
        "{found:#?}"
    );
    assert_eq!(meeting([&[(&[0], &[1])], &[(&[1], &[0])]]), []);
    assert_eq!(
        meeting([&[(&[0], &[]), (&[], &[1])], &[(&[], &[0]), (&[1], &[])]]),
        []
    );
}

/// Three stages hand a value around, and the last one hands it on to a fourth. With the
/// exchanges of the first one swapped they wait for each other; the fourth waits for them.
#[test]
fn those_that_wait_in_a_circle_are_named() {
    let transfers = [(0, 1), (1, 2), (2, 0), (2, 3)];
    let around: [&[(&[u32], &[u32])]; 4] = [
        &[(&[0], &[]), (&[], &[2])],
        &[(&[], &[0]), (&[1], &[])],
        &[(&[], &[1]), (&[2], &[]), (&[3], &[])],
        &[(&[], &[3])],
    ];
    assert_eq!(meeting_of(&transfers, &around), []);
    let mut swapped = around.map(<[_]>::to_vec);
    swapped[0].swap(0, 1);
    let found = meeting_of(&transfers, &swapped.each_ref().map(Vec::as_slice));
    let said: Vec<&str> = found.iter().map(|v| v.actual.as_str()).collect();
    assert!(found.iter().all(|v| v.rule == "deadlock"), "{found:#?}");
    let at = |stage: u32| format!("stage {stage} slot 0 (exchange of microbatch 0)");
    let [a, b, c] = [0, 2, 1].map(at);
    let circle = format!("; a circle: {a} waits for {b} waits for {c} waits for stage 0");
    let named: Vec<bool> = said.iter().map(|s| s.ends_with(&circle)).collect();
    assert_eq!(named, [true, true, true, false], "{found:#?}");
}

#[test]
fn messages_have_one_sender_and_one_receiver() {
    refused("rendezvous", &meeting([&[(&[0], &[])], &[]]));
    refused(
        "rendezvous",
        &meeting([&[(&[0], &[]), (&[0], &[])], &[(&[], &[0])]]),
    );
}

/// Validation plays what goes forward alone: a gradient there would be run in it.
#[test]
fn ops_are_played_in_the_passes_of_the_schedule() {
    let moved = after(1, |role| {
        let (t, i) = find(role, "grad.loss.x");
        let gradient = role.templates[t].instructions.remove(i);
        role.templates[1].instructions.push(gradient);
    });
    refused("pass", &moved);
    let renamed = after(1, |role| {
        role.templates[3].kind = TemplateKind::WeightGradient;
    });
    refused("pass", &renamed);
}

/// Stages that the plan has around a ring are not those of a program in a V.
#[test]
fn stages_are_on_the_meshes_of_the_schedule() {
    let (plan, training) = plan(2);
    let mut program = program(&plan, &training);
    program.route = ir::schedule::Route::V;
    let found = check_program(&plan, &training, &program);
    assert!(
        found.iter().any(|v| v.expected.contains("route ring")),
        "{found:#?}"
    );
}
