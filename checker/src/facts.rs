//! The facts of the training graph, in the form in which the other modules ask.

use crate::report::Report;
use ir::op::InputKind;
use ir::program::Buffer;
use ir::training::TrainingGraph;
use ir::{Graph, Op, OpId, OpKind, Region, TensorType, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// Facts about a training graph whose batch is bound.
pub(crate) struct Facts<'a> {
    pub(crate) training: &'a TrainingGraph,
    pub(crate) graph: &'a Graph,
    microbatch: u64,
    roots: Vec<ValueId>,
    needed: Vec<bool>,
    inputs: BTreeMap<InputKind, ValueId>,
    /// The op whose operands come from every stage.
    pub(crate) norm: Option<OpId>,
}

impl<'a> Facts<'a> {
    /// `None`, with the reason reported, when the training graph contradicts itself.
    pub(crate) fn new(
        training: &'a TrainingGraph,
        microbatch: u64,
        report: &mut Report,
    ) -> Option<Self> {
        let graph = &training.graph;
        let n = graph.values().len();
        let named = training
            .states
            .iter()
            .flat_map(|s| [s.read, s.write])
            .chain([training.loss, training.grad_norm]);
        for v in named {
            if v.index() >= n {
                report.add(
                    "training graph",
                    "training_graph",
                    format!("one of {n} values"),
                    format!("value {v}"),
                );
                return None;
            }
        }
        let norms: Vec<OpId> = graph
            .iter()
            .filter(|(_, op)| matches!(op.kind, OpKind::GlobalNorm))
            .map(|(id, _)| id)
            .collect();
        if norms.len() > 1 {
            report.add(
                "training graph",
                "training_graph",
                "one global norm",
                format!("{}", norms.len()),
            );
            return None;
        }
        let mut facts = Facts {
            training,
            graph,
            microbatch,
            roots: Vec::with_capacity(n),
            needed: Vec::new(),
            inputs: BTreeMap::new(),
            norm: norms.first().copied(),
        };
        facts.find_roots();
        facts.find_needed();
        Some(facts)
    }

    fn find_roots(&mut self) {
        for (i, value) in self.graph.values().iter().enumerate() {
            let op = self.graph.op(value.producer);
            let own = ValueId::new(i);
            let root = match (&op.kind, op.inputs.first()) {
                (OpKind::Layout, Some(v)) => self.roots.get(v.index()).copied().unwrap_or(own),
                (OpKind::Input { kind }, _) => *self.inputs.entry(*kind).or_insert(own),
                _ => own,
            };
            self.roots.push(root);
        }
    }

    fn find_needed(&mut self) {
        let t = self.training;
        let mut live: BTreeSet<ValueId> = t
            .states
            .iter()
            .map(|s| s.write)
            .chain([t.loss, t.grad_norm])
            .collect();
        let mut needed = vec![false; self.graph.ops().len()];
        for (i, op) in self.graph.ops().iter().enumerate().rev() {
            if op.outputs.iter().any(|v| live.contains(v)) {
                needed[i] = true;
                live.extend(&op.inputs);
            }
        }
        self.needed = needed;
    }

    /// The value that stands for `v` and everything that is equal to it.
    pub(crate) fn root(&self, v: ValueId) -> ValueId {
        self.roots.get(v.index()).copied().unwrap_or(v)
    }
    /// The op that defines a value.
    pub(crate) fn producer(&self, v: ValueId) -> &'a Op {
        self.graph.op(self.graph.value(v).producer)
    }
    /// True when some state, the loss or the norm depends on the op.
    pub(crate) fn needed(&self, op: OpId) -> bool {
        self.needed.get(op.index()).copied().unwrap_or(false)
    }
    /// True for values that every microbatch has its own of. Sums over microbatches are not.
    pub(crate) fn per_microbatch(&self, v: ValueId) -> bool {
        let op = self.producer(v);
        op.region == Region::Microbatch && !matches!(op.kind, OpKind::Accumulate { .. })
    }
    /// The input of a kind.
    pub(crate) fn input(&self, kind: InputKind) -> Option<ValueId> {
        self.inputs.get(&kind).copied()
    }
    /// The value with this name.
    pub(crate) fn find(&self, name: &str) -> Option<ValueId> {
        self.graph.find_value(name)
    }
    pub(crate) fn name(&self, v: ValueId) -> String {
        self.graph.value_name(v)
    }
    /// Global lengths of a type.
    pub(crate) fn lens(&self, ty: &TensorType) -> Vec<u64> {
        ty.shape.bind(self.microbatch)
    }
    /// Why a buffer cannot hold a value, by its type; `None` when it can.
    pub(crate) fn type_problem(&self, buffer: &Buffer, v: ValueId) -> Option<(String, String)> {
        let ty = self.graph.ty(v);
        let lens = self.lens(ty);
        let same = buffer.dtype == ty.dtype && buffer.lens == lens;
        (!same).then(|| {
            (
                format!("{}{lens:?}", ty.dtype.name()),
                format!("{}{:?}", buffer.dtype.name(), buffer.lens),
            )
        })
    }
}
