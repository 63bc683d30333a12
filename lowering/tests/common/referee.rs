//! Plays programs symbolically, serially and with rendezvous, and checks what instructions see.
//!
//! Memory is a map from bytes to what they hold: which value of the graph, for which
//! microbatch, in which spec. Writing bytes destroys everything they overlap, so a buffer
//! placed over another that is still needed shows as a read of nothing. An op must find its
//! operands in the specs that its strategy wants.

use ir::op::OpStrategy;
use ir::plan::{Plan, relative_path};
use ir::program::{InstrKind, Instruction, Program, RoleProgram, Slot, Template};
use ir::training::TrainingGraph;
use ir::{BufferId, InstrId, Op, OpId, OpKind, ReduceKind, Region, ShardingSpec, ValueId};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug, PartialEq)]
enum What {
    /// A value; where it is made for each microbatch, which one.
    Value(ValueId, Option<u32>),
    /// An accumulator after some microbatches.
    Sum(ValueId, u32),
    Filled(f64),
    NormTerms,
    /// The parts of a value that all members have.
    Members(ValueId, Option<u32>),
}

#[derive(Clone, Debug)]
struct Held {
    end: u64,
    what: What,
    spec: ShardingSpec,
}

struct Role<'a> {
    program: &'a RoleProgram,
    memory: BTreeMap<u64, Held>,
    slot: usize,
    instruction: usize,
}

pub struct Referee<'a> {
    plan: &'a Plan,
    training: &'a TrainingGraph,
    program: &'a Program,
    roles: Vec<Role<'a>>,
    norm_terms: BTreeSet<u32>,
}

/// Plays two steps; panics with the place of the first violation.
pub fn check(plan: &Plan, training: &TrainingGraph, program: &Program) {
    for role in &program.roles {
        static_checks(role);
    }
    let roles = program
        .roles
        .iter()
        .map(|program| Role {
            program,
            memory: BTreeMap::new(),
            slot: 0,
            instruction: 0,
        })
        .collect();
    let mut referee = Referee {
        plan,
        training,
        program,
        roles,
        norm_terms: BTreeSet::new(),
    };
    for role in &mut referee.roles {
        for s in &role.program.states {
            let read = training
                .states
                .iter()
                .find(|t| t.path == s.path)
                .unwrap()
                .read;
            let b = role.program.buffer(s.buffer);
            role.memory.insert(
                b.offset,
                Held {
                    end: b.offset + b.bytes,
                    what: What::Value(read, None),
                    spec: b.spec.clone(),
                },
            );
        }
    }
    for _ in 0..2 {
        referee.step();
    }
}

impl<'a> Referee<'a> {
    fn step(&mut self) {
        self.norm_terms.clear();
        self.roles
            .iter_mut()
            .for_each(|r| (r.slot, r.instruction) = (0, 0));
        while self.roles.iter().any(|r| r.slot < r.program.trace.len()) {
            let moved: Vec<bool> = (0..self.roles.len()).map(|r| self.advance(r)).collect();
            let progress = moved.contains(&true);
            let at: Vec<_> = self.roles.iter().map(|r| (r.slot, r.instruction)).collect();
            assert!(progress || self.world_sum(), "deadlock at {at:?}");
        }
        self.finish();
    }

    /// Plays what the role can play alone or with a partner that waits for it.
    fn advance(&mut self, role: usize) -> bool {
        let mut moved = false;
        while let Some((instruction, slot)) = self.next(role) {
            match &instruction.kind {
                InstrKind::Exchange { .. } => {
                    if !self.exchange(role, instruction, slot) {
                        return moved;
                    }
                }
                InstrKind::WorldSum { .. } => return moved,
                _ => {
                    self.play(role, instruction, slot);
                    self.roles[role].instruction += 1;
                }
            }
            moved = true;
        }
        moved
    }

    fn next(&mut self, role: usize) -> Option<(&'a Instruction, Slot)> {
        let r = &mut self.roles[role];
        loop {
            let slot = *r.program.trace.get(r.slot)?;
            let template: &'a Template = &r.program.templates[slot.template.index()];
            if let Some(i) = template.instructions.get(r.instruction) {
                return Some((i, slot));
            }
            r.slot += 1;
            r.instruction = 0;
        }
    }

    fn exchange(&mut self, role: usize, instruction: &Instruction, slot: Slot) -> bool {
        let InstrKind::Exchange { sends, recvs } = &instruction.kind else {
            unreachable!()
        };
        let transfer = &self.program.transfers[sends.iter().chain(recvs).next().unwrap().0.index()];
        let own = self.roles[role].program.stage;
        let peer = if transfer.from == own {
            transfer.to
        } else {
            transfer.from
        }
        .index();
        let Some((other, other_slot)) = self.next(peer) else {
            return false;
        };
        let InstrKind::Exchange {
            sends: other_sends,
            recvs: other_recvs,
        } = &other.kind
        else {
            return false;
        };
        let ids = |x: &[(ir::TransferId, BufferId)]| x.iter().map(|t| t.0).collect::<Vec<_>>();
        if ids(sends) != ids(other_recvs)
            || ids(recvs) != ids(other_sends)
            || slot.microbatch != other_slot.microbatch
        {
            return false;
        }
        for (from, from_parts, to, to_parts) in [
            (role, sends, peer, other_recvs),
            (peer, other_sends, role, recvs),
        ] {
            for ((id, source), (_, target)) in from_parts.iter().zip(to_parts) {
                let t = &self.program.transfers[id.index()];
                let held = self.read(from, *source, slot.microbatch);
                assert_eq!(held.spec, t.from_spec, "{} leaves in another spec", t.value);
                let name = match held.what {
                    What::Value(v, m) => {
                        assert!(m.is_none() || m == slot.microbatch);
                        self.training.graph.value_name(v)
                    }
                    What::Sum(v, n) => {
                        assert_eq!(
                            n, self.program.n_microbatches,
                            "{} is not complete",
                            t.value
                        );
                        self.training.graph.value_name(v)
                    }
                    other => panic!("{} sends {other:?}", t.value),
                };
                let value = self.find_value(&t.value);
                assert_eq!(
                    name,
                    self.training.graph.value_name(self.root(value)),
                    "another value is sent"
                );
                assert_eq!(
                    self.roles[to].program.buffer(*target).spec,
                    t.to_spec,
                    "{} lands in another spec",
                    t.value
                );
                self.write(to, *target, slot.microbatch, held.what, t.to_spec.clone());
            }
        }
        self.roles[role].instruction += 1;
        self.roles[peer].instruction += 1;
        true
    }

    /// The world's sum, when every role stands before it.
    fn world_sum(&mut self) -> bool {
        for role in 0..self.roles.len() {
            match self.next(role) {
                Some((i, _)) if matches!(i.kind, InstrKind::WorldSum { .. }) => {}
                _ => return false,
            }
        }
        for role in 0..self.roles.len() {
            let (instruction, slot) = self.next(role).unwrap();
            let InstrKind::WorldSum { inputs, output } = &instruction.kind else {
                unreachable!()
            };
            let norm = self.training.grad_norm.expect("what is summed is the norm");
            let norm = self.training.graph.value(norm).producer;
            for (entry, b) in inputs {
                let held = self.read(role, *b, slot.microbatch);
                let v = self.training.graph.op(norm).inputs[*entry as usize];
                assert_eq!(held.what, What::Value(v, None), "entry {entry} of the norm");
                assert!(
                    held.spec.is_replicated(),
                    "entry {entry} of the norm is {:?}",
                    held.spec
                );
                assert!(
                    self.norm_terms.insert(*entry),
                    "entry {entry} of the norm counts twice"
                );
            }
            self.write(
                role,
                *output,
                None,
                What::NormTerms,
                ShardingSpec::replicated(1),
            );
            self.roles[role].instruction += 1;
        }
        true
    }

    fn play(&mut self, role: usize, instruction: &Instruction, slot: Slot) {
        let m = slot.microbatch;
        match &instruction.kind {
            InstrKind::Compute {
                path,
                kind,
                inputs,
                outputs,
            } => {
                let id = self.training.graph.find(path).unwrap();
                if let OpKind::Reduce {
                    kind: ReduceKind::LogSumExp,
                    dims,
                } = kind
                {
                    let mut held = self.read(role, inputs[0], m);
                    let What::Members(v, m) = held.what else {
                        panic!("`{path}` combines {:?}", held.what);
                    };
                    assert_eq!(
                        (&dims[..], v),
                        (&[0][..], self.training.graph.op(id).outputs[0])
                    );
                    held.spec.dims.remove(0);
                    return self.write(role, outputs[0], m, What::Value(v, m), held.spec);
                }
                assert_eq!(*kind, self.training.graph.op(id).kind, "{path}");
                self.compute(role, id, inputs, outputs, m);
            }
            InstrKind::Collective {
                kind, axes, items, ..
            } => {
                for item in items {
                    let held = self.read(role, item.input, m);
                    assert_eq!(item.step.collective(&held.spec), Some(*kind));
                    assert_eq!(item.step.axes(), *axes);
                    let to = self.roles[role].program.buffer(item.output);
                    let from = self.roles[role].program.buffer(item.input);
                    let mesh = &self.roles[role].program.mesh;
                    if let Some(all) = item.step.members(&held.spec, &from.lens, mesh) {
                        assert_eq!((&all.lens, &all.spec), (&to.lens, &to.spec));
                        let What::Value(v, of) = held.what else {
                            panic!("members have {:?}", held.what);
                        };
                        self.write(role, item.output, m, What::Members(v, of), all.spec);
                        continue;
                    }
                    self.change(role, item.input, item.output, &item.step, m, held);
                }
            }
            InstrKind::Slice {
                step,
                input,
                output,
            } => {
                let held = self.read(role, *input, m);
                self.change(role, *input, *output, step, m, held);
            }
            InstrKind::Load { kind, output } => {
                let is_it = |op: &&Op| op.kind == OpKind::Input { kind: *kind };
                let v = self
                    .training
                    .graph
                    .ops()
                    .iter()
                    .find(is_it)
                    .unwrap()
                    .outputs[0];
                let spec = self.roles[role].program.buffer(*output).spec.clone();
                self.write(role, *output, m, What::Value(v, m), spec);
            }
            InstrKind::Fill { value, output } => {
                let spec = self.roles[role].program.buffer(*output).spec.clone();
                self.write(role, *output, m, What::Filled(*value), spec);
            }
            InstrKind::Copy { input, output } => {
                let held = self.read(role, *input, m);
                assert_eq!(held.spec, self.roles[role].program.buffer(*output).spec);
                self.write(role, *output, m, held.what, held.spec);
            }
            InstrKind::Exchange { .. } | InstrKind::WorldSum { .. } => {
                unreachable!("played with others")
            }
        }
    }

    fn change(
        &mut self,
        role: usize,
        input: BufferId,
        output: BufferId,
        step: &ir::reshard::LayoutStep,
        m: Option<u32>,
        held: Held,
    ) {
        let spec = step
            .apply(&held.spec)
            .unwrap_or_else(|| panic!("{step:?} does not apply to {:?}", held.spec));
        if input != output {
            assert_eq!(
                spec,
                self.roles[role].program.buffer(output).spec,
                "the result of {step:?}"
            );
        }
        self.write(role, output, m, held.what, spec);
    }

    fn compute(
        &mut self,
        role: usize,
        id: OpId,
        inputs: &[BufferId],
        outputs: &[BufferId],
        m: Option<u32>,
    ) {
        let op = self.training.graph.op(id).clone();
        let assignment = self
            .training
            .graph
            .rule(&op)
            .assign(&self.strategy(&op))
            .unwrap();
        if matches!(op.kind, OpKind::GlobalNorm) {
            assert_eq!(
                self.norm_terms.len(),
                op.inputs.len(),
                "the norm lacks terms"
            );
            assert_eq!(self.read(role, inputs[0], m).what, What::NormTerms);
        } else {
            assert_eq!(inputs.len(), op.inputs.len(), "{}", op.path);
            for ((&b, &v), wanted) in inputs.iter().zip(&op.inputs).zip(&assignment.operands) {
                let held = self.read(role, b, m);
                assert_eq!(
                    held.spec,
                    *wanted,
                    "spec of `{}` in `{}`",
                    self.training.graph.value_name(v),
                    op.path
                );
                self.expect(&op, v, &held.what, m);
            }
        }
        let lasting = op.region != Region::Microbatch;
        for ((&b, &v), spec) in outputs.iter().zip(&op.outputs).zip(assignment.results) {
            let what = match op.kind {
                OpKind::Accumulate { .. } => match self.read(role, b, m).what {
                    What::Filled(0.0) => What::Sum(v, 1),
                    What::Sum(w, n) if w == v => What::Sum(v, n + 1),
                    other => panic!("`{}` adds to {other:?}", op.path),
                },
                _ => What::Value(v, if lasting { None } else { m }),
            };
            self.write(role, b, m, what, spec);
        }
    }

    fn expect(&self, op: &Op, v: ValueId, what: &What, m: Option<u32>) {
        let root = self.root(v);
        let producer = self
            .training
            .graph
            .op(self.training.graph.value(root).producer);
        let expected = match producer.kind {
            OpKind::Constant { value } => What::Filled(value),
            OpKind::Accumulate { .. } => What::Sum(root, self.program.n_microbatches),
            _ if producer.region == Region::Microbatch => What::Value(root, m),
            _ => What::Value(root, None),
        };
        assert_eq!(
            *what,
            expected,
            "`{}` in `{}`",
            self.training.graph.value_name(v),
            op.path
        );
    }

    /// The value that a chain of `Layout` ops names.
    fn root(&self, v: ValueId) -> ValueId {
        let op = self
            .training
            .graph
            .op(self.training.graph.value(v).producer);
        if matches!(op.kind, OpKind::Layout) {
            self.root(op.inputs[0])
        } else {
            v
        }
    }

    fn find_value(&self, name: &str) -> ValueId {
        (0..self.training.graph.values().len())
            .map(ValueId::new)
            .find(|&v| self.training.graph.value_name(v) == name)
            .unwrap()
    }

    fn strategy(&self, op: &Op) -> OpStrategy {
        let Some(layer) = op.layer else {
            return OpStrategy::replicate(0);
        };
        let run = self
            .plan
            .stages
            .iter()
            .flat_map(|s| &s.runs)
            .find(|r| (r.first.0..r.first.0 + r.count).contains(&layer.0))
            .unwrap();
        let relative = relative_path(&op.path, &self.training.graph.layers[layer.index()]);
        self.plan.layer_strategies[run.strategy as usize].ops[&relative].clone()
    }

    fn read(&self, role: usize, b: BufferId, m: Option<u32>) -> Held {
        let r = &self.roles[role];
        let buffer = r.program.buffer(b);
        let held = r
            .memory
            .get(&buffer.offset_for(m))
            .unwrap_or_else(|| panic!("`{}` holds nothing", buffer.name));
        assert_eq!(
            held.end - buffer.offset_for(m),
            buffer.bytes,
            "`{}` is half overwritten",
            buffer.name
        );
        held.clone()
    }

    fn write(&mut self, role: usize, b: BufferId, m: Option<u32>, what: What, spec: ShardingSpec) {
        let r = &mut self.roles[role];
        let buffer = r.program.buffer(b);
        let (start, end) = (buffer.offset_for(m), buffer.offset_for(m) + buffer.bytes);
        assert!(
            end <= r.program.arena_bytes,
            "`{}` leaves the arena",
            buffer.name
        );
        r.memory.retain(|&s, held| held.end <= start || end <= s);
        r.memory.insert(start, Held { end, what, spec });
    }

    /// States hold their next values, in their specs; loss and norm stand where they should.
    fn finish(&mut self) {
        let all: BTreeSet<u32> = (0..self.norm_terms.len() as u32).collect();
        assert_eq!(self.norm_terms, all);
        for role in 0..self.roles.len() {
            let program = self.roles[role].program;
            for s in &program.states {
                let state = self
                    .training
                    .states
                    .iter()
                    .find(|t| t.path == s.path)
                    .unwrap();
                let held = self.read(role, s.buffer, None);
                assert_eq!(
                    held.what,
                    What::Value(state.write, None),
                    "what `{}` keeps",
                    s.path
                );
                assert_eq!(
                    held.spec,
                    program.buffer(s.buffer).spec,
                    "the spec of `{}`",
                    s.path
                );
                self.write(
                    role,
                    s.buffer,
                    None,
                    What::Value(state.read, None),
                    held.spec,
                );
            }
            let norm = self.read(
                role,
                program.grad_norm.expect("every role has the norm"),
                None,
            );
            assert_eq!(
                Some(norm.what),
                self.training.grad_norm.map(|v| What::Value(v, None))
            );
            if let Some(loss) = program.loss {
                let held = self.read(role, loss, None);
                assert_eq!(
                    held.what,
                    What::Sum(self.training.loss, self.program.n_microbatches)
                );
                assert!(held.spec.is_replicated());
            }
        }
        assert_eq!(
            self.roles
                .iter()
                .filter(|r| r.program.loss.is_some())
                .count(),
            1
        );
        let n_states: usize = self
            .roles
            .iter()
            .map(|r| {
                r.program
                    .states
                    .iter()
                    .filter(|s| !s.param.is_empty())
                    .count()
            })
            .sum();
        assert_eq!(
            n_states,
            self.training
                .states
                .iter()
                .filter(|s| !s.param.is_empty())
                .count()
        );
    }
}

/// Streams, and dependencies: every two instructions of a template that touch the same bytes,
/// one writing, are ordered by streams and `deps`.
fn static_checks(role: &RoleProgram) {
    for b in &role.buffers {
        assert_eq!(b.offset % ir::program::ARENA_ALIGN, 0);
        let part = b.spec.local_shape(&b.lens, &role.mesh);
        let shape = b.pieces.map_or(part.clone(), |p| p.shape(&part));
        assert_eq!(b.bytes, shape.iter().product::<u64>() * b.dtype.bytes());
    }
    for template in &role.templates {
        let n = template.instructions.len();
        let mut before: Vec<BTreeSet<usize>> = Vec::with_capacity(n);
        let mut last: BTreeMap<ir::StreamId, usize> = BTreeMap::new();
        for (i, instruction) in template.instructions.iter().enumerate() {
            let direct = instruction
                .deps
                .iter()
                .copied()
                .map(InstrId::index)
                .chain(last.insert(instruction.stream, i));
            let mut all = BTreeSet::new();
            for d in direct {
                assert!(d < i, "instruction {i} waits for {d}");
                all.insert(d);
                all.extend(&before[d]);
            }
            before.push(all);
            for j in 0..i {
                if conflict(role, &template.instructions[j], instruction) {
                    assert!(
                        before[i].contains(&j),
                        "{:?}: {i} does not wait for {j}",
                        template.kind
                    );
                }
            }
        }
    }
}

fn conflict(role: &RoleProgram, a: &Instruction, b: &Instruction) -> bool {
    let overlap = |x: &BufferId, y: &BufferId| {
        let (x, y) = (role.buffer(*x), role.buffer(*y));
        x.offset < y.offset + y.bytes && y.offset < x.offset + x.bytes
    };
    let any =
        |xs: &[BufferId], ys: &[BufferId]| xs.iter().any(|x| ys.iter().any(|y| overlap(x, y)));
    any(&a.writes(), &b.reads()) || any(&a.reads(), &b.writes()) || any(&a.writes(), &b.writes())
}
