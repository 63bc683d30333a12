//! A lowering for tests alone: one stage, random strategies for every op, every value in a
//! buffer of its own, nothing coalesced or reused. What it makes is slow and right, so ranks
//! can be compared with the reference whatever the real lowering does.

use ir::program::*;
use ir::reshard::{LayoutStep, paths};
use ir::testing::Rng;
use ir::training::TrainingGraph;
use ir::op::{AxisUse, OpStrategy};
use ir::{AxisId, BufferId, DType, InstrId, LogicalMesh, Op, OpKind, Pass, Region, ShardingSpec, StageId, TemplateId, ValueId};
use std::collections::BTreeMap;

/// Lowers with strategies drawn from `seed`.
pub(crate) fn lower(training: &TrainingGraph, mesh: &LogicalMesh, microbatch: u64, n_microbatches: u32, seed: u64) -> Program {
    let mut l = Lowering {
        training,
        mesh,
        microbatch,
        n_microbatches,
        rng: Rng::new(seed),
        buffers: Vec::new(),
        end: 0,
        placed: BTreeMap::new(),
        templates: [TemplateKind::StepBegin, TemplateKind::Forward, TemplateKind::Backward, TemplateKind::StepEnd].map(|kind| Template { kind, instructions: Vec::new() }),
        states: Vec::new(),
    };
    training.graph.ops().iter().for_each(|op| l.op(op));
    let loss = l.scalar(training.loss);
    let grad_norm = l.scalar(training.grad_norm);
    l.write_states();
    let slot = |t: u32, microbatch| Slot { template: TemplateId(t), microbatch };
    let mut trace = vec![slot(0, None)];
    trace.extend((0..n_microbatches).map(|m| slot(1, Some(m))));
    trace.extend((0..n_microbatches).map(|m| slot(2, Some(m))));
    trace.push(slot(3, None));
    let role = RoleProgram {
        stage: StageId(0),
        mesh: mesh.clone(),
        buffers: l.buffers,
        templates: l.templates.into(),
        trace,
        arena_bytes: l.end,
        states: l.states,
        loss: Some(loss),
        grad_norm: Some(grad_norm),
    };
    Program { roles: vec![role], transfers: vec![], n_microbatches, microbatch }
}

struct Lowering<'a> {
    training: &'a TrainingGraph,
    mesh: &'a LogicalMesh,
    microbatch: u64,
    n_microbatches: u32,
    rng: Rng,
    buffers: Vec<Buffer>,
    end: u64,
    placed: BTreeMap<ValueId, BufferId>,
    templates: [Template; 4],
    states: Vec<StateBuffer>,
}

impl Lowering<'_> {
    fn op(&mut self, op: &Op) {
        let graph = &self.training.graph;
        let template = match (op.region, op.pass) {
            (Region::StepBegin, _) => 0,
            (Region::Microbatch, Pass::F) => 1,
            (Region::Microbatch, _) => 2,
            (Region::StepEnd, _) => 3,
        };
        let (wanted, results) = self.strategy(op);
        let inputs: Vec<BufferId> = op.inputs.iter().zip(&wanted).map(|(&v, spec)| self.reshard(self.placed[&v], spec, template)).collect();
        let class = match (op.region, &op.kind) {
            (_, OpKind::State { .. }) => BufferClass::Persistent,
            (Region::Microbatch, OpKind::Accumulate { .. }) => BufferClass::Step,
            (Region::Microbatch, _) => BufferClass::PerMicrobatch { slots: self.n_microbatches },
            _ => BufferClass::Step,
        };
        let mut outputs = Vec::new();
        for (&v, spec) in op.outputs.iter().zip(results) {
            let (name, ty) = (graph.value_name(v), graph.ty(v));
            let buffer = self.buffer(name, ty.dtype, ty.shape.bind(self.microbatch), spec, class);
            self.placed.insert(v, buffer);
            outputs.push(buffer);
        }
        let kind = match &op.kind {
            OpKind::State { .. } => {
                let state = self.training.states.iter().find(|s| s.path == op.path).unwrap();
                self.states.push(StateBuffer { path: state.path.clone(), param: state.param.clone(), role: state.role, buffer: outputs[0] });
                return;
            }
            OpKind::Input { kind } => InstrKind::Load { kind: *kind, output: outputs[0] },
            OpKind::Constant { value } => InstrKind::Fill { value: *value, output: outputs[0] },
            kind => InstrKind::Compute { path: op.path.clone(), kind: kind.clone(), inputs, outputs: outputs.clone() },
        };
        if matches!(op.kind, OpKind::Accumulate { .. }) {
            self.push(0, InstrKind::Fill { value: 0.0, output: outputs[0] });
        }
        self.push(template, kind);
    }

    /// Specs of operands and results for a random strategy that operands can be brought to.
    fn strategy(&mut self, op: &Op) -> (Vec<ShardingSpec>, Vec<ShardingSpec>) {
        let rule = self.training.graph.rule(op);
        let n_axes = self.mesh.axes.len();
        let shardable: Vec<_> = rule.shardable().collect();
        for attempt in 0..20 {
            let mut strategy = OpStrategy::replicate(n_axes);
            for u in strategy.uses.iter_mut().filter(|_| attempt < 19) {
                match self.rng.below(4) {
                    0 => {}
                    1 if !rule.linear.is_empty() => *u = AxisUse::Partial(self.rng.below(rule.linear.len() as u64) as u32),
                    _ if !shardable.is_empty() => *u = AxisUse::Factor(self.rng.pick(&shardable)),
                    _ => {}
                }
            }
            strategy.reverse = self.rng.one_in(3);
            let Ok(assigned) = rule.assign(&strategy) else { continue };
            let reachable = op.inputs.iter().zip(&assigned.operands).all(|(v, spec)| !paths(self.spec(self.placed[v]), spec).is_empty());
            if reachable {
                return (assigned.operands, assigned.results);
            }
        }
        panic!("op `{}` cannot even be replicated", op.path)
    }

    fn spec(&self, b: BufferId) -> &ShardingSpec {
        &self.buffers[b.index()].spec
    }

    /// Brings a buffer to a spec by a random path.
    fn reshard(&mut self, mut from: BufferId, to: &ShardingSpec, template: usize) -> BufferId {
        let all = paths(self.spec(from), to);
        let path = self.rng.pick(&all);
        for step in path {
            let before = self.buffers[from.index()].clone();
            let after = step.apply(&before.spec).unwrap();
            let class = if template == 1 || template == 2 { BufferClass::PerMicrobatch { slots: self.n_microbatches } } else { BufferClass::Step };
            let output = self.buffer(format!("{}'", before.name), before.dtype, before.lens.clone(), after, class);
            let kind = match step.collective(&before.spec) {
                None => InstrKind::Slice { step: step.clone(), input: from, output },
                Some(kind) => {
                    let axes: Vec<AxisId> = step.axes();
                    InstrKind::Collective { kind, axes, items: vec![CollectiveItem { step: step.clone(), input: from, output }] }
                }
            };
            debug_assert!(!matches!(kind, InstrKind::Slice { .. }) || matches!(step, LayoutStep::Slice { .. }));
            self.push(template, kind);
            from = output;
        }
        from
    }

    fn scalar(&mut self, v: ValueId) -> BufferId {
        self.reshard(self.placed[&v], &ShardingSpec::replicated(0), 3)
    }

    fn write_states(&mut self) {
        for state in self.training.states.clone() {
            let to = self.placed[&state.read];
            let spec = self.spec(to).clone();
            let input = self.reshard(self.placed[&state.write], &spec, 3);
            self.push(3, InstrKind::Copy { input, output: to });
        }
    }

    fn buffer(&mut self, name: String, dtype: DType, lens: Vec<u64>, spec: ShardingSpec, class: BufferClass) -> BufferId {
        let bytes = spec.local_elements(&lens, self.mesh) * dtype.bytes();
        let buffer = Buffer { name, dtype, lens, spec, class, offset: self.end, bytes };
        self.end += u64::from(buffer.slots()) * buffer.stride();
        self.buffers.push(buffer);
        BufferId::new(self.buffers.len() - 1)
    }

    fn push(&mut self, template: usize, kind: InstrKind) {
        let stream = match kind {
            InstrKind::Collective { .. } => Stream::Collective,
            _ => Stream::Compute,
        };
        let instructions = &mut self.templates[template].instructions;
        let deps = instructions.len().checked_sub(1).map(InstrId::new).into_iter().collect();
        instructions.push(Instruction { kind, stream, deps, pass: Pass::F, layer: None });
    }
}
