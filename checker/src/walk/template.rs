//! The transfer functions: one template on what its lasting buffers hold on entry.

use super::Variants;
use super::held::Held;
use super::trace::Shape;
use crate::consistency::consistent;
use crate::facts::Facts;
use crate::report::{Report, instr_place};
use ir::collective::CollectiveKind;
use ir::program::{BufferClass, CollectiveItem, InstrKind, Program, RoleProgram};
use ir::reshard::LayoutStep;
use ir::{AxisId, BufferId, DType, InstrId, Op, OpKind, Region, ShardingSpec, TemplateId, TransferId, ValueId};

/// Where a template is interpreted.
pub(super) struct Site<'a> {
    pub(super) facts: &'a Facts<'a>,
    pub(super) program: &'a Program,
    pub(super) i: usize,
    pub(super) role: &'a RoleProgram,
    pub(super) variants: &'a Variants,
    pub(super) shape: &'a Shape,
    pub(super) template: TemplateId,
    pub(super) in_microbatch: bool,
}

/// What a template does to lasting buffers.
pub(super) struct Outcome {
    /// What the shape's `externals` hold afterwards.
    pub(super) held: Vec<Held>,
    /// Accumulators that the microbatch was added to, in order; true for the first addition
    /// after zeros.
    pub(super) accumulated: Vec<(BufferId, bool)>,
    /// Entries given to each world sum.
    pub(super) world_sums: Vec<Vec<u32>>,
}

pub(super) fn interpret(site: &Site<'_>, entry: &[Held], report: &mut Report) -> Outcome {
    let mut held = vec![Held::Undefined; site.role.buffers.len()];
    for (b, &h) in site.shape.externals.iter().zip(entry) {
        held[b.index()] = h;
    }
    let mut run = Run { site, held, accumulated: Vec::new(), world_sums: Vec::new(), instr: InstrId(0), report };
    let template = site.role.template(site.template);
    for (j, instr) in template.instructions.iter().enumerate() {
        run.instr = InstrId::new(j);
        run.instruction(&instr.kind);
    }
    let held = site.shape.externals.iter().map(|b| run.held[b.index()]).collect();
    Outcome { held, accumulated: run.accumulated, world_sums: run.world_sums }
}

/// Results of an update stand where these operands stood: (result, operand).
fn in_place(kind: &OpKind) -> &'static [(usize, usize)] {
    match kind {
        OpKind::AdamW { .. } => &[(0, 0), (1, 2), (2, 3)],
        OpKind::Sgd { .. } => &[(0, 0), (1, 2)],
        _ => &[],
    }
}

/// An operand that was found good: the variant of its spec. `None` when it is poisoned or
/// what is wrong has been reported.
type Found = Option<u8>;

struct Run<'a, 'r> {
    site: &'a Site<'a>,
    held: Vec<Held>,
    accumulated: Vec<(BufferId, bool)>,
    world_sums: Vec<Vec<u32>>,
    instr: InstrId,
    report: &'r mut Report,
}

impl Run<'_, '_> {
    fn instruction(&mut self, kind: &InstrKind) {
        match kind {
            InstrKind::Compute { path, kind, inputs, outputs } => self.compute(path, kind, inputs, outputs),
            InstrKind::Collective { kind, axes, items } => self.collective(*kind, axes, items),
            InstrKind::Slice { step, input, output } => {
                let held = match (step, input == output) {
                    (LayoutStep::Slice { .. }, false) => self.stepped(step, *input, *output),
                    _ => self.wrong("slice", "a slice step to another buffer", format!("{step:?}")),
                };
                self.write(&[(*output, held)]);
            }
            InstrKind::Exchange { sends, recvs } => self.exchange(sends, recvs),
            InstrKind::WorldSum { inputs, output } => self.world_sum(inputs, *output),
            InstrKind::Load { kind, output } => {
                let held = match self.site.facts.input(*kind) {
                    Some(v) if self.site.in_microbatch => self.produced(*output, v),
                    _ => self.wrong("load", "an input of the graph, in a microbatch", format!("{kind:?}")),
                };
                self.write(&[(*output, held)]);
            }
            InstrKind::Fill { value, output } => self.write(&[(*output, Held::Filled(value.to_bits()))]),
            InstrKind::Copy { input, output } => {
                let held = self.copied(*input, *output);
                self.write(&[(*output, held)]);
            }
        }
    }

    // Reporting and writing.

    fn wrong(&mut self, rule: &'static str, expected: impl Into<String>, actual: impl Into<String>) -> Held {
        let place = instr_place(self.site.program, self.site.i, self.site.template, self.instr);
        self.report.add(place, rule, expected, actual);
        Held::Poison
    }

    fn held(&self, b: BufferId) -> Held {
        self.held[b.index()]
    }

    /// All results at once: first everything on their bytes is lost, then they are there.
    fn write(&mut self, results: &[(BufferId, Held)]) {
        for (b, _) in results {
            for other in self.site.shape.neighbours.get(b).into_iter().flatten() {
                self.held[other.index()] = Held::Undefined;
            }
        }
        for (k, &(b, held)) in results.iter().enumerate() {
            if results[..k].iter().any(|r| r.0 == b) {
                self.wrong("results", "a buffer for each result", format!("{b} twice"));
            }
            self.held[b.index()] = held;
        }
    }

    fn poison(&mut self, outputs: &[BufferId]) {
        let results: Vec<(BufferId, Held)> = outputs.iter().map(|&b| (b, Held::Poison)).collect();
        self.write(&results);
    }

    fn name(&self, b: BufferId) -> String {
        format!("buffer {} ({})", b.0, self.site.role.buffer(b).name)
    }

    // Specs.

    fn spec(&self, b: BufferId, variant: u8) -> &ShardingSpec {
        let own = &self.site.role.buffer(b).spec;
        self.site.variants.get(&b).and_then(|v| v.get(usize::from(variant))).unwrap_or(own)
    }

    fn n_variants(&self, b: BufferId) -> u8 {
        let n = self.site.variants.get(&b).map_or(1, Vec::len);
        u8::try_from(n).unwrap_or(u8::MAX)
    }

    /// The variant of a buffer's spec that equals `spec`.
    fn variant(&self, b: BufferId, spec: &ShardingSpec) -> Option<u8> {
        (0..self.n_variants(b)).find(|&v| self.spec(b, v) == spec)
    }

    fn show(&self, spec: &ShardingSpec) -> String {
        spec.display(&self.site.role.mesh)
    }

    // Operands and results.

    /// The buffer holds `v`, or a number that is this constant.
    fn operand(&mut self, b: BufferId, v: ValueId) -> Found {
        let facts = self.site.facts;
        let root = facts.root(v);
        let held = self.held(b);
        match held {
            Held::Poison => return None,
            Held::Value { root: r, variant } if r == root => return Some(variant),
            Held::Filled(bits) => {
                let constant = matches!(facts.producer(root).kind, OpKind::Constant { value } if value.to_bits() == bits);
                let buffer = self.site.role.buffer(b);
                if constant && buffer.spec.is_replicated() && facts.type_problem(buffer, v).is_none() {
                    return Some(0);
                }
            }
            _ => {}
        }
        let found = format!("{} in {}", held.describe(facts), self.name(b));
        self.wrong("operand", format!("`{}`", facts.name(root)), found);
        None
    }

    /// A buffer into which `v` is put whole, nothing partial.
    fn produced(&mut self, b: BufferId, v: ValueId) -> Held {
        let buffer = self.site.role.buffer(b);
        if let Some((expected, actual)) = self.site.facts.type_problem(buffer, v) {
            return self.wrong("type", expected, format!("{actual} in {}", self.name(b)));
        }
        if !buffer.spec.partial.is_empty() {
            let found = self.show(&buffer.spec);
            return self.wrong("spec", "nothing partial", format!("{found} in {}", self.name(b)));
        }
        Held::Value { root: self.site.facts.root(v), variant: 0 }
    }

    // Compute.

    fn compute(&mut self, path: &str, kind: &OpKind, inputs: &[BufferId], outputs: &[BufferId]) {
        let graph = self.site.facts.graph;
        let Some(id) = graph.find(path) else {
            self.wrong("op", "an op of the training graph", format!("`{path}`"));
            return self.poison(outputs);
        };
        let op = graph.op(id);
        if op.kind != *kind {
            self.wrong("op", format!("{:?}", op.kind), format!("{kind:?}"));
            return self.poison(outputs);
        }
        if matches!(kind, OpKind::Input { .. } | OpKind::State { .. }) {
            self.wrong("op", "inputs loaded and states in place", format!("{} computed", kind.name()));
            return self.poison(outputs);
        }
        if (op.region == Region::Microbatch) != self.site.in_microbatch {
            self.wrong("region", format!("an op of region {:?} where that is played", op.region), "another region's template");
            return self.poison(outputs);
        }
        let n_inputs = if matches!(kind, OpKind::GlobalNorm) { 1 } else { op.inputs.len() };
        if inputs.len() != n_inputs || outputs.len() != op.outputs.len() {
            let expected = format!("{n_inputs} operands, {} results", op.outputs.len());
            self.wrong("arity", expected, format!("{} and {}", inputs.len(), outputs.len()));
            return self.poison(outputs);
        }
        if !self.places(kind, inputs, outputs) {
            return self.poison(outputs);
        }
        match kind {
            OpKind::GlobalNorm => self.global_norm(op, inputs[0], outputs[0]),
            OpKind::Accumulate { .. } => self.accumulate(op, inputs[0], outputs[0]),
            _ => self.plain(op, inputs, outputs),
        }
    }

    /// Updates work in place, nothing else does. An accumulator's old value is read where the
    /// result stands, but it is no operand.
    fn places(&mut self, kind: &OpKind, inputs: &[BufferId], outputs: &[BufferId]) -> bool {
        let pairs = in_place(kind);
        for (r, &b) in outputs.iter().enumerate() {
            let own = pairs.iter().find(|p| p.0 == r).map(|p| p.1);
            let good = match own {
                Some(o) => inputs.get(o) == Some(&b) && inputs.iter().filter(|i| **i == b).count() == 1,
                None => !inputs.contains(&b),
            };
            if !good {
                let expected = own.map_or("a buffer that is no operand's".into(), |o| format!("operand {o}'s buffer"));
                self.wrong("in_place", format!("result {r} in {expected}"), self.name(b));
                return false;
            }
        }
        true
    }

    fn plain(&mut self, op: &Op, inputs: &[BufferId], outputs: &[BufferId]) {
        let found: Vec<Found> = inputs.iter().zip(&op.inputs).map(|(&b, &v)| self.operand(b, v)).collect();
        let typed = self.types(op, outputs);
        let Some(variants) = found.into_iter().collect::<Option<Vec<u8>>>().filter(|_| typed) else {
            return self.poison(outputs);
        };
        if !self.specs(op, inputs, &variants, outputs) {
            return self.poison(outputs);
        }
        let held = |&v: &ValueId| Held::Value { root: self.site.facts.root(v), variant: 0 };
        let results: Vec<(BufferId, Held)> = outputs.iter().copied().zip(op.outputs.iter().map(held)).collect();
        self.write(&results);
    }

    fn types(&mut self, op: &Op, outputs: &[BufferId]) -> bool {
        let mut good = true;
        for (&b, &v) in outputs.iter().zip(&op.outputs) {
            if let Some((expected, actual)) = self.site.facts.type_problem(self.site.role.buffer(b), v) {
                self.wrong("type", expected, format!("{actual} in {}", self.name(b)));
                good = false;
            }
        }
        good
    }

    /// Some strategy of the op gives the operands' specs and the results' buffers' own.
    fn specs(&mut self, op: &Op, inputs: &[BufferId], variants: &[u8], outputs: &[BufferId]) -> bool {
        let rule = self.site.facts.graph.rule(op);
        let operands: Vec<&ShardingSpec> = inputs.iter().zip(variants).map(|(&b, &v)| self.spec(b, v)).collect();
        let results: Vec<&ShardingSpec> = outputs.iter().map(|&b| self.spec(b, 0)).collect();
        if consistent(&rule, self.site.role.mesh.axes.len(), &operands, &results) {
            return true;
        }
        let list = |specs: &[&ShardingSpec]| specs.iter().map(|s| self.show(s)).collect::<Vec<_>>().join(", ");
        let actual = format!("({}) -> ({})", list(&operands), list(&results));
        self.wrong("spec", "specs that one strategy of the op gives", actual);
        false
    }

    fn accumulate(&mut self, op: &Op, input: BufferId, output: BufferId) {
        let found = self.operand(input, op.inputs[0]);
        let typed = self.types(op, &[output]);
        let root = op.outputs[0];
        let lasts = matches!(self.site.role.buffer(output).class, BufferClass::Step | BufferClass::Persistent);
        if !lasts {
            self.wrong("accumulate", "an accumulator that lives through the step", self.name(output));
        }
        let held = self.held(output);
        let from_zero = match held {
            Held::Filled(0) => true,
            Held::Sum { root: r } if r == root => false,
            Held::Poison => return,
            _ => {
                let found = format!("{} in {}", held.describe(self.site.facts), self.name(output));
                self.wrong("accumulate", format!("zeros or `{}`", self.site.facts.name(root)), found);
                return self.poison(&[output]);
            }
        };
        let Some(variant) = found.filter(|_| typed && lasts) else { return self.poison(&[output]) };
        if !self.specs(op, &[input], &[variant], &[output]) {
            return self.poison(&[output]);
        }
        self.accumulated.push((output, from_zero));
        self.write(&[(output, Held::Sum { root })]);
    }

    fn global_norm(&mut self, op: &Op, input: BufferId, output: BufferId) {
        let held = match self.held(input) {
            Held::World => self.produced(output, op.outputs[0]),
            Held::Poison => Held::Poison,
            held => {
                let found = format!("{} in {}", held.describe(self.site.facts), self.name(input));
                self.wrong("operand", "the vector of a world sum", found)
            }
        };
        let replicated = self.site.role.buffer(output).spec.is_replicated();
        debug_assert!(held == Held::Poison || replicated, "scalars without partial axes are replicated");
        self.write(&[(output, held)]);
    }

    // Layout changes and copies.

    fn collective(&mut self, kind: CollectiveKind, axes: &[AxisId], items: &[CollectiveItem]) {
        let ascending = axes.windows(2).all(|w| w[0] < w[1]);
        let mut results = Vec::with_capacity(items.len());
        for (k, item) in items.iter().enumerate() {
            let held = if item.step.axes() != axes || !ascending {
                self.wrong("collective", format!("the step's group {:?}, ascending", item.step.axes()), format!("{axes:?}"))
            } else if item.input == item.output && !matches!(kind, CollectiveKind::AllReduce(_)) {
                self.wrong("in_place", "another buffer for the result", self.name(item.output))
            } else if items.iter().enumerate().any(|(j, other)| j != k && other.input == item.output) {
                self.wrong("in_place", "a result that is no other item's operand", self.name(item.output))
            } else {
                self.reduced(kind, item)
            };
            results.push((item.output, held));
        }
        self.write(&results);
    }

    fn reduced(&mut self, kind: CollectiveKind, item: &CollectiveItem) -> Held {
        if let Held::Value { variant, .. } = self.held(item.input) {
            let before = self.spec(item.input, variant).clone();
            let expected = item.step.collective(&before);
            if expected != Some(kind) {
                return self.wrong("collective", format!("{expected:?}"), format!("{kind:?}"));
            }
        }
        self.stepped(&item.step, item.input, item.output)
    }

    /// What a layout step leaves in its output.
    fn stepped(&mut self, step: &LayoutStep, input: BufferId, output: BufferId) -> Held {
        let (root, variant) = match self.held(input) {
            Held::Value { root, variant } => (root, variant),
            Held::Poison => return Held::Poison,
            held => {
                let found = format!("{} in {}", held.describe(self.site.facts), self.name(input));
                return self.wrong("operand", "a value", found);
            }
        };
        let before = self.spec(input, variant).clone();
        let Some(after) = step.apply(&before) else {
            let shown = self.show(&before);
            return self.wrong("step", format!("a step that applies to {shown}"), format!("{step:?}"));
        };
        self.lands(root, &after, input, output)
    }

    /// A value of `input`'s type that now lies as `spec` in `output`.
    fn lands(&mut self, root: ValueId, spec: &ShardingSpec, input: BufferId, output: BufferId) -> Held {
        let (from, to) = (self.site.role.buffer(input), self.site.role.buffer(output));
        if from.dtype != to.dtype || from.lens != to.lens {
            let expected = format!("{}{:?}", from.dtype.name(), from.lens);
            return self.wrong("type", expected, format!("{}{:?} in {}", to.dtype.name(), to.lens, self.name(output)));
        }
        let variant = if input == output { self.variant(output, spec) } else { (to.spec == *spec).then_some(0) };
        match variant {
            Some(variant) => Held::Value { root, variant },
            None => {
                let (expected, found) = (self.show(spec), self.show(&to.spec));
                self.wrong("spec", expected, format!("{found} in {}", self.name(output)))
            }
        }
    }

    fn copied(&mut self, input: BufferId, output: BufferId) -> Held {
        if input == output {
            return self.wrong("in_place", "another buffer for the copy", self.name(output));
        }
        match self.held(input) {
            Held::Value { root, variant } => {
                let spec = self.spec(input, variant).clone();
                self.lands(root, &spec, input, output)
            }
            Held::Filled(bits) => {
                let (from, to) = (self.site.role.buffer(input), self.site.role.buffer(output));
                match from.dtype == to.dtype && from.lens == to.lens && from.spec == to.spec {
                    true => Held::Filled(bits),
                    false => self.wrong("type", "a buffer of the same type and spec", self.name(output)),
                }
            }
            Held::Poison => Held::Poison,
            held => {
                let found = format!("{} in {}", held.describe(self.site.facts), self.name(input));
                self.wrong("operand", "a value", found)
            }
        }
    }

    // Between roles.

    fn exchange(&mut self, sends: &[(TransferId, BufferId)], recvs: &[(TransferId, BufferId)]) {
        for &(x, b) in sends {
            self.send(x, b);
        }
        let mut results = Vec::with_capacity(recvs.len());
        for &(x, b) in recvs {
            let held = match sends.iter().any(|s| s.1 == b) {
                true => self.wrong("in_place", "a buffer that is not sent at the same time", self.name(b)),
                false => self.receive(x, b),
            };
            results.push((b, held));
        }
        self.write(&results);
    }

    /// The value a transfer names, if the exchange is played where the value exists.
    fn moved(&mut self, x: TransferId) -> Option<ValueId> {
        let facts = self.site.facts;
        let transfer = &self.site.program.transfers[x.index()];
        let v = facts.find(&transfer.value)?;
        if facts.per_microbatch(facts.root(v)) != self.site.in_microbatch {
            self.wrong("transfer", format!("`{}` moved in its region", transfer.value), "another region's exchange");
            return None;
        }
        Some(v)
    }

    fn stage(&mut self, x: TransferId, stage: ir::StageId, role: &'static str) -> bool {
        if stage.index() == self.site.i {
            return true;
        }
        self.wrong("transfer", format!("{stage} as {role} of transfer {}", x.0), format!("stage {}", self.site.i));
        false
    }

    /// The buffer's type is the transfer's; reported otherwise.
    fn same_type(&mut self, x: TransferId, b: BufferId) -> bool {
        let (transfer, buffer) = (&self.site.program.transfers[x.index()], self.site.role.buffer(b));
        if buffer.dtype == transfer.dtype && buffer.lens == transfer.lens {
            return true;
        }
        let expected = format!("{}{:?}", transfer.dtype.name(), transfer.lens);
        let actual = format!("{}{:?} in {}", buffer.dtype.name(), buffer.lens, self.name(b));
        self.wrong("type", expected, actual);
        false
    }

    fn send(&mut self, x: TransferId, b: BufferId) {
        let transfer = &self.site.program.transfers[x.index()];
        if !self.stage(x, transfer.from, "sender") || !self.same_type(x, b) {
            return;
        }
        let Some(v) = self.moved(x) else { return };
        let Some(variant) = self.operand(b, v) else { return };
        let spec = self.spec(b, variant).clone();
        if spec != transfer.from_spec {
            let (expected, actual) = (self.show(&transfer.from_spec), self.show(&spec));
            self.wrong("spec", expected, format!("{actual} in {}", self.name(b)));
        }
    }

    fn receive(&mut self, x: TransferId, b: BufferId) -> Held {
        let transfer = &self.site.program.transfers[x.index()];
        if !self.stage(x, transfer.to, "receiver") || !self.same_type(x, b) {
            return Held::Poison;
        }
        let Some(v) = self.moved(x) else { return Held::Poison };
        let own = &self.site.role.buffer(b).spec;
        if *own != transfer.to_spec {
            let (expected, actual) = (self.show(&transfer.to_spec), self.show(own));
            return self.wrong("spec", expected, format!("{actual} in {}", self.name(b)));
        }
        Held::Value { root: self.site.facts.root(v), variant: 0 }
    }

    fn world_sum(&mut self, inputs: &[(u32, BufferId)], output: BufferId) {
        let Some(norm) = self.site.facts.norm else {
            self.wrong("world_sum", "a global norm in the graph", "none");
            return self.poison(&[output]);
        };
        let operands = &self.site.facts.graph.op(norm).inputs;
        for &(entry, b) in inputs {
            let Some(&v) = operands.get(entry as usize) else {
                self.wrong("world_sum", format!("one of {} entries", operands.len()), entry.to_string());
                continue;
            };
            if let Some(variant) = self.operand(b, v)
                && !self.spec(b, variant).is_replicated()
            {
                let found = format!("{} in {}", self.show(self.spec(b, variant)), self.name(b));
                self.wrong("world_sum", "a replicated entry", found);
            }
        }
        self.world_sums.push(inputs.iter().map(|x| x.0).collect());
        let buffer = self.site.role.buffer(output);
        let fits = buffer.dtype == DType::F32 && buffer.lens == [operands.len() as u64] && buffer.spec.is_replicated();
        let held = match fits && !self.site.in_microbatch {
            true => Held::World,
            false => {
                let actual = format!("{}{:?} {}", buffer.dtype.name(), buffer.lens, self.show(&buffer.spec));
                self.wrong("world_sum", format!("f32[{}], replicated, after the microbatches", operands.len()), actual)
            }
        };
        self.write(&[(output, held)]);
    }
}
