//! The parts of an attention whose keys and values go around a ring.
//!
//! Part i of n may look at the shard of keys that has gone i places, and goes on with what the parts
//! before it gave. So when part n - 1 is done, the queries of each rank have met the keys of all
//! ranks, each once, and what it leaves is the op's result. Gradients of keys and values follow
//! their shards: what part i adds to them is added to what parts 0 to i - 1 gave for the same shard,
//! which is the one that has gone as many places.

use super::Run;
use crate::consistency::consistent_in_ring;
use crate::walk::held::Held;
use ir::op::{Binary, Keys};
use ir::{AxisId, BufferId, DType, Op, OpKind, Region, ShardingSpec, ValueId};

/// The dim that goes around.
const DIM: usize = 1;

/// A part that is interpreted.
#[derive(Clone, Copy)]
struct Part {
    step: u32,
    ranks: u32,
}

impl Part {
    fn is_last(self) -> bool {
        self.step + 1 == self.ranks
    }
}

impl<'a> Run<'a, '_> {
    /// Whether an instruction is a part of an attention, or adds up what parts give.
    pub(super) fn is_of_ring(&self, path: &str, kind: &OpKind) -> bool {
        let is_gradient = |op: &Op| matches!(op.kind, OpKind::AttentionGrad { .. });
        let adds = matches!(kind, OpKind::Binary { f: Binary::Add });
        !kind.keys().are_all() || (adds && self.op_at(path).is_some_and(is_gradient))
    }

    fn op_at(&self, path: &str) -> Option<&'a Op> {
        let graph = self.site.facts.graph;
        graph.find(path).map(|id| graph.op(id))
    }

    pub(super) fn ring(
        &mut self,
        path: &str,
        kind: &OpKind,
        inputs: &[BufferId],
        outputs: &[BufferId],
    ) {
        let done = match (self.op_at(path), kind.keys()) {
            (Some(op), Keys::All) => self.ring_sum(op, inputs, outputs),
            (Some(op), Keys::Ring { step, ranks }) if op.kind.with_keys(kind.keys()) == *kind => {
                self.ring_part(op, Part { step, ranks }, inputs, outputs)
            }
            _ => {
                self.wrong(
                    "op",
                    "an attention of the training graph",
                    format!("{kind:?} of `{path}`"),
                );
                None
            }
        };
        match done {
            Some(held) => self.write(&outputs.iter().copied().zip(held).collect::<Vec<_>>()),
            None => self.poison(outputs),
        }
    }

    /// The contents of the results of a part; `None` where something wrong has been reported.
    fn ring_part(
        &mut self,
        op: &Op,
        part: Part,
        inputs: &[BufferId],
        outputs: &[BufferId],
    ) -> Option<Vec<Held>> {
        // The results that stay with the queries are summed up from part to part.
        let n_sums = match op.kind {
            OpKind::Attention { .. } => op.outputs.len(),
            _ => 1,
        };
        let n_carried = if part.step == 0 { 0 } else { n_sums };
        let n_inputs = op.inputs.len() + n_carried;
        let in_place = outputs.iter().any(|b| inputs.contains(b));
        let fits = inputs.len() == n_inputs && outputs.len() == op.outputs.len() && !in_place;
        if !fits || op.region != Region::Microbatch || !self.site.in_microbatch {
            let expected = format!(
                "{n_inputs} operands, {} results in other buffers, in a microbatch",
                op.outputs.len()
            );
            let actual = format!("{} and {}", inputs.len(), outputs.len());
            self.wrong("arity", expected, actual);
            return None;
        }
        let (own, carried) = inputs.split_at(op.inputs.len());
        let mut specs = Vec::with_capacity(own.len());
        for (&b, &v) in own.iter().zip(&op.inputs) {
            let variant = self.operand(b, v)?;
            specs.push(self.spec(b, variant).clone());
        }
        for (j, &b) in carried.iter().enumerate() {
            let root = self.site.facts.root(op.outputs[j]);
            self.holds_part(b, (root, 0, part.step))?;
            self.same_spec(b, outputs[j])?;
        }
        self.ring_specs(op, part, &specs, outputs)?;
        let mut held = Vec::with_capacity(outputs.len());
        for (j, (&b, &v)) in outputs.iter().zip(&op.outputs).enumerate() {
            held.push(match j < n_sums {
                true => self.summed(b, v, part)?,
                false => {
                    self.typed(b, v, false)?;
                    let root = self.site.facts.root(v);
                    let (from, to) = (part.step, part.step + 1);
                    Held::Part { root, from, to }
                }
            });
        }
        Some(held)
    }

    /// Adds what one part gives of a gradient to what all parts before it gave; the sum may stand where
    /// either stood, as a sum of any two tensors may.
    fn ring_sum(
        &mut self,
        op: &Op,
        inputs: &[BufferId],
        outputs: &[BufferId],
    ) -> Option<Vec<Held>> {
        let (&[before, addend], &[sum]) = (inputs, outputs) else {
            self.wrong(
                "arity",
                "two operands, one result",
                format!("{}", inputs.len()),
            );
            return None;
        };
        let v = match self.held(before) {
            Held::Poison => return None,
            Held::Part { root, .. } => op.outputs[1..]
                .iter()
                .copied()
                .find(|&v| self.site.facts.root(v) == root),
            _ => None,
        };
        let (Some(v), Held::Part { from: 0, to, .. }) = (v, self.held(before)) else {
            let held = self.held(before).describe(self.site.facts);
            let found = format!("{held} in {}", self.name(before));
            self.wrong("operand", "the first parts of a gradient of the op", found);
            return None;
        };
        self.holds_part(addend, (self.site.facts.root(v), to, to + 1))?;
        self.same_spec(before, sum)?;
        self.same_spec(addend, sum)?;
        let ranks = self.ring_axis(&self.site.role.buffer(sum).spec.clone())?.1;
        Some(vec![self.summed(sum, v, Part { step: to, ranks })?])
    }

    /// The content of a sum behind a part: the value, if that is the last.
    fn summed(&mut self, b: BufferId, v: ValueId, part: Part) -> Option<Held> {
        self.typed(b, v, part.is_last())?;
        let root = self.site.facts.root(v);
        Some(match part.is_last() {
            true => Held::Value { root, variant: 0 },
            false => Held::Part {
                root,
                from: 0,
                to: part.step + 1,
            },
        })
    }

    fn holds_part(&mut self, b: BufferId, (root, from, to): (ValueId, u32, u32)) -> Option<()> {
        let expected = Held::Part { root, from, to };
        match self.held(b) {
            held if held == expected => Some(()),
            Held::Poison => None,
            held => {
                let found = format!("{} in {}", held.describe(self.site.facts), self.name(b));
                self.wrong("operand", expected.describe(self.site.facts), found);
                None
            }
        }
    }

    fn same_spec(&mut self, b: BufferId, as_in: BufferId) -> Option<()> {
        let [found, expected] = [b, as_in].map(|b| &self.site.role.buffer(b).spec);
        if found == expected {
            return Some(());
        }
        let (expected, found) = (self.show(expected), self.show(found));
        self.wrong("spec", expected, format!("{found} in {}", self.name(b)));
        None
    }

    /// Checks a result's type: the value's own where it is complete, f32 before.
    fn typed(&mut self, b: BufferId, v: ValueId, complete: bool) -> Option<()> {
        let (facts, buffer) = (self.site.facts, self.site.role.buffer(b));
        let ty = facts.graph.ty(v);
        let dtype = if complete { ty.dtype } else { DType::F32 };
        let lens = facts.lens(ty);
        if buffer.dtype == dtype && buffer.lens == lens {
            return Some(());
        }
        let expected = format!("{}{lens:?}", dtype.name());
        let actual = format!(
            "{}{:?} in {}",
            buffer.dtype.name(),
            buffer.lens,
            self.name(b)
        );
        self.wrong("type", expected, actual);
        None
    }

    /// The axis that the shards of a tensor go around, and its ranks.
    fn ring_axis(&mut self, spec: &ShardingSpec) -> Option<(AxisId, u32)> {
        if let Some([axis]) = spec.dims.get(DIM).map(|d| &d.axes[..]) {
            return Some((*axis, self.site.role.mesh.axes[axis.index()].size));
        }
        let shown = self.show(spec);
        self.wrong("spec", "keys that one axis shards", shown);
        None
    }

    /// Checks that the keys have gone as many places as parts were before, around a ring of as many
    /// ranks as there are parts, and that specs are those of a strategy of the op.
    fn ring_specs(
        &mut self,
        op: &Op,
        part: Part,
        operands: &[ShardingSpec],
        outputs: &[BufferId],
    ) -> Option<()> {
        let (axis, ranks) = self.ring_axis(&operands[1])?;
        let queries = &operands[0].dims[DIM];
        if ranks != part.ranks || part.step >= ranks || queries.axes[..] != [axis] {
            let expected = format!("a part of the {ranks} of its ring, over the queries' axis");
            self.wrong(
                "ring",
                expected,
                format!("part {} of {}", part.step, part.ranks),
            );
            return None;
        }
        let mut results: Vec<ShardingSpec> = Vec::with_capacity(outputs.len());
        for &b in outputs {
            results.push(self.site.role.buffer(b).spec.clone());
        }
        let is_gradient = matches!(op.kind, OpKind::AttentionGrad { .. });
        let wanted = |goes_around: bool| if goes_around { part.step } else { 0 };
        let all = operands
            .iter()
            .enumerate()
            .map(|(i, s)| (s, matches!(i, 1 | 2)));
        let made = results
            .iter()
            .enumerate()
            .map(|(j, s)| (s, is_gradient && j > 0));
        let turned = |(spec, goes_around): (&ShardingSpec, bool)| {
            let turns = spec.dims.iter().map(|d| d.turns).enumerate();
            let mut turns = turns.map(|(d, turns)| (turns, wanted(goes_around && d == DIM)));
            turns.all(|(found, expected)| found == expected)
        };
        let still = |spec: &ShardingSpec| {
            let mut spec = spec.clone();
            spec.dims.iter_mut().for_each(|d| d.turns = 0);
            spec
        };
        let good = all.chain(made).all(turned);
        let operands: Vec<ShardingSpec> = operands.iter().map(still).collect();
        let results: Vec<ShardingSpec> = results.iter().map(still).collect();
        let rule = self.site.facts.graph.rule(op);
        if good && consistent_in_ring(&rule, self.site.role.mesh.axes.len(), &operands, &results) {
            return Some(());
        }
        let expected = format!(
            "specs of a strategy of the op, with keys and values {} places on",
            part.step
        );
        let shown: Vec<String> = operands
            .iter()
            .chain(&results)
            .map(|s| self.show(s))
            .collect();
        self.wrong("spec", expected, shown.join(", "));
        None
    }
}
