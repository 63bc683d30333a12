//! A lowering for tests alone: random strategies for every op, every value in a buffer of its
//! own, nothing coalesced or reused, all forwards before all backwards. What it makes is slow
//! and right, so ranks can be compared with the reference whatever the real lowering does.

use ir::op::{AxisUse, OpStrategy};
use ir::program::*;
use ir::reshard::{Pieces, paths};
use ir::testing::Rng;
use ir::training::TrainingGraph;
use ir::{
    AxisId, BufferId, DType, InstrId, LogicalMesh, Op, OpKind, Pass, Region, ShardingSpec, StageId,
    StreamId, TemplateId, TransferId, ValueId,
};
use ir::{Contract, Order};
use std::collections::{BTreeMap, BTreeSet};

const BEGIN: usize = 0;
const BEGIN_EXCHANGE: usize = 1;
/// Ops before the microbatches that need what was exchanged.
const BEGIN_AFTER: usize = 2;
const FORWARD_RECV: usize = 3;
const FORWARD: usize = 4;
const FORWARD_SEND: usize = 5;
const BACKWARD_RECV: usize = 6;
const BACKWARD: usize = 7;
const BACKWARD_SEND: usize = 8;
/// Prepares accumulators for other stages.
const END_BEFORE: usize = 9;
const END_EXCHANGE: usize = 10;
const END: usize = 11;

const KINDS: [TemplateKind; 12] = [
    TemplateKind::StepBegin,
    TemplateKind::Exchange,
    TemplateKind::StepBegin,
    TemplateKind::Exchange,
    TemplateKind::Forward,
    TemplateKind::Exchange,
    TemplateKind::Exchange,
    TemplateKind::Backward,
    TemplateKind::Exchange,
    TemplateKind::StepEnd,
    TemplateKind::Exchange,
    TemplateKind::StepEnd,
];

/// Lowers onto one mesh per stage, equally many layers each, with strategies drawn from `seed`.
pub(crate) fn lower(
    training: &TrainingGraph,
    meshes: &[LogicalMesh],
    microbatch: u64,
    n_microbatches: u32,
    seed: u64,
) -> Program {
    let stage = |mesh: &LogicalMesh| Stage {
        mesh: mesh.clone(),
        streams: vec![Stream::Kernels],
        buffers: Vec::new(),
        end: 0,
        placed: BTreeMap::new(),
        late: BTreeSet::new(),
        templates: KINDS.map(|kind| Template {
            kind,
            chunk: 0,
            instructions: Vec::new(),
        }),
        states: Vec::new(),
    };
    let mut l = Lowering {
        training,
        microbatch,
        n_microbatches,
        rng: Rng::new(seed),
        stages: meshes.iter().map(stage).collect(),
        transfers: Vec::new(),
    };
    training.graph.ops().iter().for_each(|op| l.op(op));
    let loss_stage = l.stages_of(
        training
            .graph
            .op(training.graph.value(training.loss).producer),
    )[0];
    let scalar = ShardingSpec::replicated(0);
    let loss = l.reshard(
        loss_stage,
        l.stages[loss_stage].placed[&training.loss],
        &scalar,
        END,
    );
    l.write_states();
    let mut roles = Vec::new();
    for (s, stage) in l.stages.into_iter().enumerate() {
        let slot = |t: usize, microbatch| Slot {
            template: TemplateId::new(t),
            microbatch,
        };
        let mut trace: Vec<Slot> = [BEGIN, BEGIN_EXCHANGE, BEGIN_AFTER]
            .map(|t| slot(t, None))
            .into();
        for templates in [
            [FORWARD_RECV, FORWARD, FORWARD_SEND],
            [BACKWARD_RECV, BACKWARD, BACKWARD_SEND],
        ] {
            trace.extend((0..n_microbatches).flat_map(|m| templates.map(|t| slot(t, Some(m)))));
        }
        trace.extend([END_BEFORE, END_EXCHANGE, END].map(|t| slot(t, None)));
        let mut role = RoleProgram {
            stage: StageId::new(s),
            mesh: stage.mesh,
            streams: stage.streams,
            buffers: stage.buffers,
            templates: stage.templates.into(),
            trace,
            arena_bytes: stage.end,
            other_arenas: Default::default(),
            states: stage.states,
            loss: (s == loss_stage).then_some(loss),
            grad_norm: training
                .grad_norm
                .and_then(|v| stage.placed.get(&v).copied()),
        };
        lowering::set_events(&mut role);
        roles.push(role);
    }
    Program {
        roles,
        transfers: l.transfers,
        n_microbatches,
        microbatch,
        route: ir::schedule::Route::Ring,
    }
}

struct Lowering<'a> {
    training: &'a TrainingGraph,
    microbatch: u64,
    n_microbatches: u32,
    rng: Rng,
    stages: Vec<Stage>,
    transfers: Vec<Transfer>,
}

type Moves = Vec<(TransferId, BufferId)>;

struct Stage {
    mesh: LogicalMesh,
    streams: Vec<Stream>,
    buffers: Vec<Buffer>,
    end: u64,
    placed: BTreeMap<ValueId, BufferId>,
    /// Values that exist from `BEGIN_AFTER` on.
    late: BTreeSet<ValueId>,
    templates: [Template; 12],
    states: Vec<StateBuffer>,
}

impl Lowering<'_> {
    fn stages_of(&self, op: &Op) -> Vec<usize> {
        let (n_layers, n_stages) = (self.training.graph.layers.len(), self.stages.len());
        op.layer.map_or((0..n_stages).collect(), |l| {
            vec![l.index() * n_stages / n_layers]
        })
    }

    fn op(&mut self, op: &Op) {
        for stage in self.stages_of(op) {
            self.op_on(stage, op);
        }
    }

    fn op_on(&mut self, stage: usize, op: &Op) {
        let graph = &self.training.graph;
        if op.kind == OpKind::GlobalNorm {
            return self.global_norm(stage, op);
        }
        for &v in &op.inputs {
            if !self.stages[stage].placed.contains_key(&v) {
                self.transfer(v, stage);
            }
        }
        let late = op
            .inputs
            .iter()
            .any(|v| self.stages[stage].late.contains(v));
        let template = match (op.region, op.pass) {
            (Region::StepBegin, _) if late => BEGIN_AFTER,
            (Region::StepBegin, _) => BEGIN,
            (Region::Microbatch, Pass::F) => FORWARD,
            (Region::Microbatch, _) => BACKWARD,
            (Region::StepEnd, _) => END,
        };
        let (wanted, results) = self.strategy(stage, op);
        let inputs: Vec<BufferId> = op
            .inputs
            .iter()
            .zip(&wanted)
            .map(|(v, spec)| self.reshard(stage, self.stages[stage].placed[v], spec, template))
            .collect();
        let class = match (op.region, &op.kind) {
            (_, OpKind::State { .. }) => BufferClass::Persistent,
            (_, OpKind::Accumulate { .. }) => BufferClass::Step,
            _ => self.class(template),
        };
        let mut outputs = Vec::new();
        for (i, (&v, spec)) in op.outputs.iter().zip(results).enumerate() {
            let (name, ty) = (graph.value_name(v), graph.ty(v));
            let lens = ty.shape.bind(self.microbatch);
            // An update goes over the state itself where the state's layout is the update's.
            let old = op
                .kind
                .in_place()
                .iter()
                .find(|p| p.1 == i)
                .map(|p| inputs[p.0]);
            let state = old
                .filter(|b| self.stages[stage].buffers[b.index()].class == BufferClass::Persistent);
            let buffer = state
                .unwrap_or_else(|| self.stages[stage].buffer(name, ty.dtype, lens, spec, class));
            self.stages[stage].placed.insert(v, buffer);
            if template == BEGIN_AFTER {
                self.stages[stage].late.insert(v);
            }
            outputs.push(buffer);
        }
        let kind = match &op.kind {
            OpKind::State { .. } => {
                let state = self
                    .training
                    .states
                    .iter()
                    .find(|s| s.path == op.path)
                    .unwrap();
                let state = StateBuffer {
                    path: state.path.clone(),
                    param: state.param.clone(),
                    role: state.role,
                    buffer: outputs[0],
                };
                return self.stages[stage].states.push(state);
            }
            OpKind::Input { kind } => InstrKind::Load {
                kind: *kind,
                output: outputs[0],
            },
            OpKind::Constant { value } => InstrKind::Fill {
                value: *value,
                output: outputs[0],
            },
            kind => InstrKind::Compute {
                path: op.path.clone(),
                kind: kind.clone(),
                inputs,
                outputs: outputs.clone(),
            },
        };
        if matches!(op.kind, OpKind::Accumulate { .. }) {
            self.stages[stage].push(
                BEGIN,
                InstrKind::Fill {
                    value: 0.0,
                    output: outputs[0],
                },
            );
        }
        self.stages[stage].push(template, kind);
    }

    /// A sum over the world makes one vector of the squares, of which every stage takes the norm.
    fn global_norm(&mut self, stage: usize, op: &Op) {
        let scalar = ShardingSpec::replicated(0);
        let mut entries = Vec::new();
        for (i, v) in op.inputs.iter().enumerate() {
            if let Some(&b) = self.stages[stage].placed.get(v) {
                entries.push((i as u32, self.reshard(stage, b, &scalar, END)));
            }
        }
        let this = &mut self.stages[stage];
        let vector = this.buffer(
            "squares".into(),
            DType::F32,
            vec![op.inputs.len() as u64],
            ShardingSpec::replicated(1),
            BufferClass::Step,
        );
        this.push(
            END,
            InstrKind::WorldSum {
                inputs: entries,
                output: vector,
            },
        );
        let norm = this.buffer("norm".into(), DType::F32, vec![], scalar, BufferClass::Step);
        this.placed.insert(op.outputs[0], norm);
        this.push(
            END,
            InstrKind::Compute {
                path: op.path.clone(),
                kind: op.kind.clone(),
                inputs: vec![vector],
                outputs: vec![norm],
            },
        );
    }

    /// Brings a value of another stage to this one, in random specs.
    fn transfer(&mut self, v: ValueId, to: usize) {
        let graph = &self.training.graph;
        let producer = graph.op(graph.value(v).producer);
        let from = self.stages_of(producer)[0];
        let (prepare, send, recv) = match (producer.region, producer.pass, &producer.kind) {
            (Region::StepBegin, ..) => (BEGIN, BEGIN_EXCHANGE, BEGIN_EXCHANGE),
            (_, _, OpKind::Accumulate { .. }) => (END_BEFORE, END_EXCHANGE, END_EXCHANGE),
            (Region::Microbatch, Pass::F, _) => (FORWARD, FORWARD_SEND, FORWARD_RECV),
            (Region::Microbatch, ..) => (BACKWARD, BACKWARD_SEND, BACKWARD_RECV),
            (Region::StepEnd, ..) => panic!(
                "`{}` crosses stages after the microbatches",
                graph.value_name(v)
            ),
        };
        let n_dims = graph.ty(v).shape.rank();
        let from_spec = self.random_spec(from, n_dims);
        let to_spec = self.random_spec(to, n_dims);
        let source = self.reshard(from, self.stages[from].placed[&v], &from_spec, prepare);
        let Buffer {
            name, dtype, lens, ..
        } = self.stages[from].buffers[source.index()].clone();
        let class = self.class(recv);
        let target =
            self.stages[to].buffer(name.clone(), dtype, lens.clone(), to_spec.clone(), class);
        let id = TransferId::new(self.transfers.len());
        self.transfers.push(Transfer {
            value: name,
            from: StageId::new(from),
            to: StageId::new(to),
            lens,
            dtype,
            from_spec,
            to_spec,
        });
        self.stages[from].exchange(send).0.push((id, source));
        self.stages[to].exchange(recv).1.push((id, target));
        self.stages[to].placed.insert(v, target);
        if recv == BEGIN_EXCHANGE {
            self.stages[to].late.insert(v);
        }
    }

    fn random_spec(&mut self, stage: usize, n_dims: usize) -> ShardingSpec {
        let mut spec = ShardingSpec::replicated(n_dims);
        for axis in self.stages[stage].mesh.axis_ids() {
            if n_dims > 0 && self.rng.one_in(2) {
                spec.dims[self.rng.below(n_dims as u64) as usize]
                    .axes
                    .push(axis);
            }
        }
        spec
    }

    fn class(&self, template: usize) -> BufferClass {
        match (FORWARD_RECV..=BACKWARD_SEND).contains(&template) {
            true => BufferClass::PerMicrobatch {
                slots: self.n_microbatches,
            },
            false => BufferClass::Step,
        }
    }

    /// Specs of operands and results for a random strategy that operands can be brought to.
    fn strategy(&mut self, stage: usize, op: &Op) -> (Vec<ShardingSpec>, Vec<ShardingSpec>) {
        let rule = self.training.graph.rule(op);
        let n_axes = self.stages[stage].mesh.axes.len();
        let shardable: Vec<_> = rule.shardable().collect();
        for attempt in 0..20 {
            let mut strategy = OpStrategy::replicate(n_axes);
            for u in strategy.uses.iter_mut().filter(|_| attempt < 19) {
                match self.rng.below(4) {
                    0 => {}
                    1 if !rule.linear.is_empty() => {
                        *u = AxisUse::Partial(self.rng.below(rule.linear.len() as u64) as u32)
                    }
                    _ if !shardable.is_empty() => *u = AxisUse::Factor(self.rng.pick(&shardable)),
                    _ => {}
                }
            }
            strategy.reverse = self.rng.one_in(3);
            let Ok(assigned) = rule.assign(&strategy) else {
                continue;
            };
            let this = &self.stages[stage];
            let reachable = op
                .inputs
                .iter()
                .zip(&assigned.operands)
                .all(|(v, spec)| !paths(this.spec(this.placed[v]), spec).is_empty());
            if reachable {
                return (assigned.operands, assigned.results);
            }
        }
        panic!("op `{}` cannot even be replicated", op.path)
    }

    /// Brings a buffer to a spec by a random path.
    fn reshard(
        &mut self,
        stage: usize,
        mut from: BufferId,
        to: &ShardingSpec,
        template: usize,
    ) -> BufferId {
        let class = self.class(template);
        let this = &mut self.stages[stage];
        let path = self.rng.pick(&paths(this.spec(from), to));
        for step in path {
            let before = this.buffers[from.index()].clone();
            let after = step.apply(&before.spec).unwrap();
            let output = this.buffer(
                format!("{}'", before.name),
                before.dtype,
                before.lens.clone(),
                after,
                class,
            );
            let kind = match step.collective(&before.spec) {
                None => InstrKind::Slice {
                    step: step.clone(),
                    input: from,
                    output,
                },
                Some(kind) => {
                    let axes: Vec<AxisId> = step.axes();
                    let part = |b: BufferId| {
                        let b = &this.buffers[b.index()];
                        b.spec.local_shape(&b.lens, &this.mesh)
                    };
                    if let Some(members) = step.members(&before.spec, &before.lens, &this.mesh) {
                        let (name, op) = (format!("{}.members", before.name), members.op());
                        let (lens, spec) = (members.lens, members.spec);
                        let gathered = this.buffer(name, before.dtype, lens, spec, class);
                        let items = vec![CollectiveItem {
                            step: step.clone(),
                            input: from,
                            output: gathered,
                        }];
                        let contract = Contract::new(kind, before.dtype, Order::Fixed);
                        this.push(
                            template,
                            InstrKind::Collective {
                                kind,
                                axes,
                                contract,
                                items,
                            },
                        );
                        this.push(
                            template,
                            InstrKind::Compute {
                                path: before.name,
                                kind: op,
                                inputs: vec![gathered],
                                outputs: vec![output],
                            },
                        );
                        from = output;
                        continue;
                    }
                    let n = this.mesh.size(axes[0]) as u32;
                    let pieces = step.pieces(n, &part(from), &part(output));
                    let [input, result] = [(pieces[0], from), (pieces[1], output)]
                        .map(|(p, b)| p.map_or(b, |p| this.in_pieces(b, p)));
                    if input != from {
                        let output = input;
                        this.push(
                            template,
                            InstrKind::Copy {
                                input: from,
                                output,
                            },
                        );
                    }
                    let items = vec![CollectiveItem {
                        step: step.clone(),
                        input,
                        output: result,
                    }];
                    let contract = Contract::new(kind, before.dtype, Order::Fixed);
                    this.push(
                        template,
                        InstrKind::Collective {
                            kind,
                            axes,
                            contract,
                            items,
                        },
                    );
                    from = output;
                    if result != output {
                        let input = result;
                        this.push(template, InstrKind::Copy { input, output });
                    }
                    continue;
                }
            };
            this.push(template, kind);
            from = output;
        }
        from
    }

    fn write_states(&mut self) {
        for state in self.training.states.clone() {
            for stage in 0..self.stages.len() {
                let Some(&to) = self.stages[stage]
                    .placed
                    .get(&state.read)
                    .filter(|b| self.stages[stage].states.iter().any(|s| s.buffer == **b))
                else {
                    continue;
                };
                let spec = self.stages[stage].spec(to).clone();
                let input =
                    self.reshard(stage, self.stages[stage].placed[&state.write], &spec, END);
                self.stages[stage].push(END, InstrKind::Copy { input, output: to });
            }
        }
    }
}

impl Stage {
    fn spec(&self, b: BufferId) -> &ShardingSpec {
        &self.buffers[b.index()].spec
    }

    fn buffer(
        &mut self,
        name: String,
        dtype: DType,
        lens: Vec<u64>,
        spec: ShardingSpec,
        class: BufferClass,
    ) -> BufferId {
        let bytes = spec.local_elements(&lens, &self.mesh) * dtype.bytes();
        self.add(Buffer {
            name,
            dtype,
            lens,
            spec,
            pieces: None,
            turns: None,
            space: Default::default(),
            class,
            offset: 0,
            bytes,
        })
    }

    fn in_pieces(&mut self, whole: BufferId, pieces: Pieces) -> BufferId {
        let b = self.buffers[whole.index()].clone();
        let part = b.spec.local_shape(&b.lens, &self.mesh);
        self.add(Buffer {
            pieces: Some(pieces),
            bytes: pieces.shape(&part).iter().product::<u64>() * b.dtype.bytes(),
            ..b
        })
    }

    fn add(&mut self, buffer: Buffer) -> BufferId {
        let buffer = Buffer {
            offset: self.end,
            ..buffer
        };
        self.end += u64::from(buffer.slots()) * buffer.stride();
        self.buffers.push(buffer);
        BufferId::new(self.buffers.len() - 1)
    }

    /// Sends and receives of an exchange template.
    fn exchange(&mut self, template: usize) -> (&mut Moves, &mut Moves) {
        if self.templates[template].instructions.is_empty() {
            self.push(
                template,
                InstrKind::Exchange {
                    sends: vec![],
                    recvs: vec![],
                },
            );
        }
        match &mut self.templates[template].instructions[0].kind {
            InstrKind::Exchange { sends, recvs } => (sends, recvs),
            other => panic!("{other:?} in an exchange template"),
        }
    }

    fn push(&mut self, template: usize, kind: InstrKind) {
        let stream = Stream::of(&kind);
        let known = self.streams.iter().position(|s| *s == stream);
        let stream = StreamId::new(known.unwrap_or_else(|| {
            self.streams.push(stream);
            self.streams.len() - 1
        }));
        let instructions = &mut self.templates[template].instructions;
        let deps = instructions
            .len()
            .checked_sub(1)
            .map(InstrId::new)
            .into_iter()
            .collect();
        let backward = [BACKWARD, BACKWARD_SEND, BACKWARD_RECV].contains(&template);
        instructions.push(Instruction {
            kind,
            stream,
            deps,
            events: vec![],
            pass: if backward { Pass::BI } else { Pass::F },
            layer: None,
            call: ir::program::Call::Own,
        });
    }
}
