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
    /// By state whose value microbatches lay out, the version that each of them has of it.
    versions: BTreeMap<ValueId, ValueId>,
    needed: Vec<bool>,
    inputs: BTreeMap<InputKind, ValueId>,
    /// The op that computes the global norm; its operands come from every stage.
    pub(crate) norm: Option<OpId>,
}

impl<'a> Facts<'a> {
    /// Collects the facts; `None`, with the reason reported, when the graph contradicts itself.
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
            .chain([training.loss])
            .chain(training.grad_norm);
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
            versions: BTreeMap::new(),
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
                (OpKind::Layout, Some(&v)) if self.is_version(op, v) => {
                    *self.versions.entry(v).or_insert(own)
                }
                (OpKind::Layout, Some(v)) => self.roots.get(v.index()).copied().unwrap_or(own),
                (OpKind::Input { kind }, _) => *self.inputs.entry(*kind).or_insert(own),
                _ => own,
            };
            self.roots.push(root);
        }
    }

    /// Whether a layout change makes a version of a state for its microbatch, which is another value
    /// than the state's: that goes on.
    fn is_version(&self, op: &Op, v: ValueId) -> bool {
        let is_state = self.goes_on(v);
        is_state && op.region == Region::Microbatch
    }

    fn find_needed(&mut self) {
        let t = self.training;
        let mut live: BTreeSet<ValueId> = t
            .states
            .iter()
            .map(|s| s.write)
            .chain([t.loss])
            .chain(t.grad_norm)
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

    /// Returns the value that represents `v` and all values equal to it.
    pub(crate) fn root(&self, v: ValueId) -> ValueId {
        self.roots.get(v.index()).copied().unwrap_or(v)
    }
    /// Returns what a forward pass makes of a value by moving it: of a state that microbatches
    /// update, the version of its microbatch.
    pub(crate) fn moved_forward(&self, root: ValueId) -> ValueId {
        self.versions.get(&root).copied().unwrap_or(root)
    }
    /// Says whether this is a state's value before the update that a microbatch makes of it.
    pub(crate) fn goes_on(&self, root: ValueId) -> bool {
        self.training.is_asynchronous() && matches!(self.producer(root).kind, OpKind::State { .. })
    }
    /// Returns the op that defines a value.
    pub(crate) fn producer(&self, v: ValueId) -> &'a Op {
        self.graph.op(self.graph.value(v).producer)
    }
    /// Says whether some state, the loss or the norm depends on the op.
    pub(crate) fn needed(&self, op: OpId) -> bool {
        self.needed.get(op.index()).copied().unwrap_or(false)
    }
    /// Says whether each microbatch has its own of this value; a sum over microbatches is shared.
    pub(crate) fn per_microbatch(&self, v: ValueId) -> bool {
        let op = self.producer(v);
        op.region == Region::Microbatch && !matches!(op.kind, OpKind::Accumulate { .. })
    }
    /// Finds the input of this kind.
    pub(crate) fn input(&self, kind: InputKind) -> Option<ValueId> {
        self.inputs.get(&kind).copied()
    }
    /// Finds the value with this name.
    pub(crate) fn find(&self, name: &str) -> Option<ValueId> {
        self.graph.find_value(name)
    }
    pub(crate) fn name(&self, v: ValueId) -> String {
        self.graph.value_name(v)
    }
    /// Returns the lengths of the whole tensor, dim by dim.
    pub(crate) fn lens(&self, ty: &TensorType) -> Vec<u64> {
        ty.shape.bind(self.microbatch)
    }
    /// Says why the type of a buffer does not suit a value; `None` when it does.
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
