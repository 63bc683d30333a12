//! Ops: the graph's op, on its operands, in specs that belong together.

use super::{Found, Run};
use crate::consistency::consistent;
use crate::walk::held::Held;
use ir::program::BufferClass;
use ir::{BufferId, Op, OpKind, Region, ShardingSpec, ValueId};

/// Returns the pairs (result, operand) of an update whose result stands where the operand stood.
fn in_place(kind: &OpKind) -> &'static [(usize, usize)] {
    match kind {
        OpKind::AdamW { .. } => &[(0, 0), (1, 2), (2, 3)],
        OpKind::Sgd { .. } => &[(0, 0), (1, 2)],
        _ => &[],
    }
}

/// Says whether an op works element for element on an operand, so that a result may take its bytes.
fn overwrites(kind: &OpKind, operand: usize) -> bool {
    match kind {
        OpKind::Unary { .. }
        | OpKind::Binary { .. }
        | OpKind::ClampedSwiglu { .. }
        | OpKind::ClampedSwigluGrad { .. }
        | OpKind::Dropout { .. } => true,
        OpKind::ScaleRows | OpKind::ExpertBias | OpKind::CrossEntropyGrad => operand == 0,
        _ => false,
    }
}

impl Run<'_, '_> {
    pub(super) fn compute(
        &mut self,
        path: &str,
        kind: &OpKind,
        inputs: &[BufferId],
        outputs: &[BufferId],
    ) {
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
            self.wrong(
                "op",
                "inputs loaded and states in place",
                format!("{} computed", kind.name()),
            );
            return self.poison(outputs);
        }
        if (op.region == Region::Microbatch) != self.site.in_microbatch {
            self.wrong(
                "region",
                format!("an op of region {:?} where that is played", op.region),
                "another region's template",
            );
            return self.poison(outputs);
        }
        let n_inputs = if matches!(kind, OpKind::GlobalNorm) {
            1
        } else {
            op.inputs.len()
        };
        if inputs.len() != n_inputs || outputs.len() != op.outputs.len() {
            let expected = format!("{n_inputs} operands, {} results", op.outputs.len());
            self.wrong(
                "arity",
                expected,
                format!("{} and {}", inputs.len(), outputs.len()),
            );
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

    /// Updates work in place, and what is done to each element alone may, in the one buffer of an
    /// operand; nothing else does. An accumulator's old value is read where the result stands, but
    /// it is no operand.
    fn places(&mut self, kind: &OpKind, inputs: &[BufferId], outputs: &[BufferId]) -> bool {
        let pairs = in_place(kind);
        for (r, &b) in outputs.iter().enumerate() {
            let own = pairs.iter().find(|p| p.0 == r).map(|p| p.1);
            let mut operands = (0..inputs.len()).filter(|&o| inputs[o] == b);
            let (first, more) = (operands.next(), operands.next());
            let good = match (own, first) {
                (Some(o), _) => first == Some(o) && more.is_none(),
                (None, Some(o)) => overwrites(kind, o) && more.is_none(),
                (None, None) => true,
            };
            if !good {
                let expected = own.map_or("a buffer that is no operand's".into(), |o| {
                    format!("operand {o}'s buffer")
                });
                self.wrong(
                    "in_place",
                    format!("result {r} in {expected}"),
                    self.name(b),
                );
                return false;
            }
        }
        true
    }

    fn plain(&mut self, op: &Op, inputs: &[BufferId], outputs: &[BufferId]) {
        let found: Vec<Found> = inputs
            .iter()
            .zip(&op.inputs)
            .map(|(&b, &v)| self.operand(b, v))
            .collect();
        let typed = self.types(op, outputs);
        let Some(variants) = found
            .into_iter()
            .collect::<Option<Vec<u8>>>()
            .filter(|_| typed)
        else {
            return self.poison(outputs);
        };
        if !self.specs(op, inputs, &variants, outputs) {
            return self.poison(outputs);
        }
        let held = |&v: &ValueId| Held::Value {
            root: self.site.facts.root(v),
            variant: 0,
        };
        let results: Vec<(BufferId, Held)> = outputs
            .iter()
            .copied()
            .zip(op.outputs.iter().map(held))
            .collect();
        self.write(&results);
    }

    fn types(&mut self, op: &Op, outputs: &[BufferId]) -> bool {
        let mut good = true;
        for (&b, &v) in outputs.iter().zip(&op.outputs) {
            if let Some((expected, actual)) =
                self.site.facts.type_problem(self.site.role.buffer(b), v)
            {
                self.wrong("type", expected, format!("{actual} in {}", self.name(b)));
                good = false;
            }
        }
        good
    }

    /// Checks that some strategy of the op gives the specs of its operands and result buffers.
    fn specs(
        &mut self,
        op: &Op,
        inputs: &[BufferId],
        variants: &[u8],
        outputs: &[BufferId],
    ) -> bool {
        let rule = self.site.facts.graph.rule(op);
        let operands: Vec<&ShardingSpec> = inputs
            .iter()
            .zip(variants)
            .map(|(&b, &v)| self.spec(b, v))
            .collect();
        let results: Vec<&ShardingSpec> = outputs.iter().map(|&b| self.spec(b, 0)).collect();
        if consistent(&rule, self.site.role.mesh.axes.len(), &operands, &results) {
            return true;
        }
        let list = |specs: &[&ShardingSpec]| {
            specs
                .iter()
                .map(|s| self.show(s))
                .collect::<Vec<_>>()
                .join(", ")
        };
        let actual = format!("({}) -> ({})", list(&operands), list(&results));
        self.wrong("spec", "specs that one strategy of the op gives", actual);
        false
    }

    fn accumulate(&mut self, op: &Op, input: BufferId, output: BufferId) {
        let found = self.operand(input, op.inputs[0]);
        let typed = self.types(op, &[output]);
        let root = op.outputs[0];
        let lasts = matches!(
            self.site.role.buffer(output).class,
            BufferClass::Step | BufferClass::Persistent
        );
        if !lasts {
            self.wrong(
                "accumulate",
                "an accumulator that lives through the step",
                self.name(output),
            );
        }
        let held = self.held(output);
        let from_zero = match held {
            Held::Filled(0) => true,
            Held::Sum { root: r } if r == root => false,
            Held::Poison => return,
            _ => {
                let found = format!(
                    "{} in {}",
                    held.describe(self.site.facts),
                    self.name(output)
                );
                self.wrong(
                    "accumulate",
                    format!("zeros or `{}`", self.site.facts.name(root)),
                    found,
                );
                return self.poison(&[output]);
            }
        };
        let Some(variant) = found.filter(|_| typed && lasts) else {
            return self.poison(&[output]);
        };
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
        debug_assert!(
            held == Held::Poison || replicated,
            "scalars without partial axes are replicated"
        );
        self.write(&[(output, held)]);
    }
}
