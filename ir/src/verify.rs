//! Re-derives every invariant of a graph from its ops and values, whoever built it.
//!
//! A graph must satisfy:
//! * `operands`: operands are results of earlier ops, results are numbered in order and point
//!   back to their op;
//! * `types`: result types are what the op infers from its operands' types;
//! * `path`: paths are unique, of letters, digits and `_:-`, in components set apart by dots;
//! * `layer`: layers exist, and forward ops stand in the order of their layers;
//! * `output`: outputs exist;
//! * `region`: `StepBegin` ops read `StepBegin` values, `Microbatch` ops those and
//!   `Microbatch` values, `StepEnd` ops everything but `Microbatch` values other than
//!   accumulators; an `Accumulate` runs in `Microbatch` and only `StepEnd` reads it; `State`
//!   is read at `StepBegin`, `Input` in `Microbatch`;
//! * `log_sum_exp`: the `lse` operand of a cross entropy (and of its gradient) is the
//!   `LogSumExp` of its `logits` operand, up to layout changes;
//! * `dropout_key`: a forward dropout's key is its own path (so keys are unique; attention may
//!   leave it out), any other op's key the path of a forward op with dropout;
//! * `origin`: an op was made for an op before it, a twin for one that it has the kind of;
//! * `finite`: every number in attributes is finite;
//! * `world`: ops without a layer are in the Update pass;
//! * `batch`: a value has at most one batch dim, and outside of gradients it is first (the
//!   gradient of a sum over inner dims broadcasts to new outer dims and then transposes).
//!
//! Ops that nothing uses are not violations; [`dead_ops`] lists them.

use crate::graph::{Op, Value};
use crate::{Dim, Graph, OpId, OpKind, Origin, Pass, Region, TensorType, ValueId};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// An invariant; see the module header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// Operands and results are in order.
    Operands,
    /// Result types are those inferred.
    Types,
    /// Paths are unique and well-formed.
    Path,
    /// Layers exist and are in order.
    Layer,
    /// Outputs exist.
    Output,
    /// Values cross regions as the regions allow.
    Region,
    /// A cross entropy reads the log-sum-exp of its logits.
    LogSumExp,
    /// Dropout keys name forward ops.
    DropoutKey,
    /// Ops were made for earlier ops, twins for ops of their kind.
    Origin,
    /// Attributes are finite.
    Finite,
    /// World ops are updates.
    World,
    /// The batch dim is alone, and first outside of gradients.
    Batch,
}

impl Rule {
    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Rule::Operands => "operands",
            Rule::Types => "types",
            Rule::Path => "path",
            Rule::Layer => "layer",
            Rule::Output => "output",
            Rule::Region => "region",
            Rule::LogSumExp => "log_sum_exp",
            Rule::DropoutKey => "dropout_key",
            Rule::Origin => "origin",
            Rule::Finite => "finite",
            Rule::World => "world",
            Rule::Batch => "batch",
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A broken invariant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {rule}: expected {expected}, found {actual}")]
pub struct Violation {
    /// Path of the op; the graph's name for its outputs.
    pub path: String,
    /// The invariant.
    pub rule: Rule,
    /// The value that the invariant asks for here.
    pub expected: String,
    /// The value that is there.
    pub actual: String,
}

/// All violations, in program order; empty for a sound graph.
pub fn verify(graph: &Graph) -> Vec<Violation> {
    let parts = Parts {
        name: &graph.name,
        ops: graph.ops(),
        values: graph.values(),
        layers: &graph.layers,
        outputs: &graph.outputs,
    };
    check(&parts)
}

/// Ops none of whose results is used or returned, in program order. In a forward graph they
/// are work for nothing; in a training graph the writes of states end here rightly.
pub fn dead_ops(graph: &Graph) -> Vec<OpId> {
    let mut live: BTreeSet<ValueId> = graph.outputs.iter().copied().collect();
    let mut dead = Vec::new();
    for (id, op) in graph.iter().collect::<Vec<_>>().into_iter().rev() {
        if op.outputs.iter().any(|v| live.contains(v)) {
            live.extend(&op.inputs);
        } else {
            dead.push(id);
        }
    }
    dead.reverse();
    dead
}

/// The parts of a graph, so that tests can break what `Graph::add` would not let through.
struct Parts<'a> {
    name: &'a str,
    ops: &'a [Op],
    values: &'a [Value],
    layers: &'a [String],
    outputs: &'a [ValueId],
}

fn check(parts: &Parts) -> Vec<Violation> {
    let mut cx = Cx {
        parts,
        violations: Vec::new(),
        forward_keys: BTreeSet::new(),
    };
    cx.forward_keys = parts
        .ops
        .iter()
        .filter(|op| op.pass == Pass::F && drops(&op.kind))
        .map(|op| op.path.as_str())
        .collect();
    let (mut next_value, mut last_layer) = (0, None);
    let mut paths: BTreeMap<&str, usize> = BTreeMap::new();
    for (i, op) in parts.ops.iter().enumerate() {
        cx.operands(i, op, &mut next_value);
        cx.types(op);
        cx.path(i, op, &mut paths);
        cx.layer(op, &mut last_layer);
        cx.region(op);
        cx.log_sum_exp(op);
        cx.dropout_key(op);
        cx.origin(i, op);
        cx.finite(op);
        cx.batch(op);
    }
    cx.outputs(next_value);
    cx.violations
}

fn drops(kind: &OpKind) -> bool {
    match kind {
        OpKind::Dropout { .. } => true,
        OpKind::Attention { dropout, .. } => *dropout > 0.0,
        _ => false,
    }
}

struct Cx<'a> {
    parts: &'a Parts<'a>,
    violations: Vec<Violation>,
    /// Paths of forward ops that draw random numbers.
    forward_keys: BTreeSet<&'a str>,
}

impl<'a> Cx<'a> {
    fn report(
        &mut self,
        op: &Op,
        rule: Rule,
        expected: impl Into<String>,
        actual: impl Into<String>,
    ) {
        let path = op.path.clone();
        self.violations.push(Violation {
            path,
            rule,
            expected: expected.into(),
            actual: actual.into(),
        });
    }
    fn value(&self, id: ValueId) -> Option<&'a Value> {
        self.parts.values.get(id.index())
    }
    fn producer(&self, id: ValueId) -> Option<&'a Op> {
        self.parts.ops.get(self.value(id)?.producer.index())
    }
    fn types(&mut self, op: &Op) {
        let all = |ids: &[ValueId]| -> Option<Vec<TensorType>> {
            ids.iter()
                .map(|&v| self.value(v).map(|v| v.ty.clone()))
                .collect()
        };
        let (Some(operands), Some(results)) = (all(&op.inputs), all(&op.outputs)) else {
            return;
        };
        let list = |types: &[TensorType]| {
            types
                .iter()
                .map(|t| t.to_string())
                .collect::<Vec<_>>()
                .join(", ")
        };
        match op.kind.infer(&operands, results.first()) {
            Ok(inferred) if inferred == results => {}
            Ok(inferred) => self.report(op, Rule::Types, list(&inferred), list(&results)),
            Err(e) => self.report(
                op,
                Rule::Types,
                "operands that the op accepts",
                e.to_string(),
            ),
        }
    }
    /// Operands come from earlier ops; results continue the numbering.
    fn operands(&mut self, i: usize, op: &Op, next_value: &mut usize) {
        for &v in &op.inputs {
            if v.index() >= *next_value {
                self.report(
                    op,
                    Rule::Operands,
                    "operands defined before",
                    format!("{v}"),
                );
            }
        }
        for (k, &v) in op.outputs.iter().enumerate() {
            let back = self
                .value(v)
                .map(|v| (v.producer.index(), v.result as usize));
            if v.index() != *next_value || back != Some((i, k)) {
                let expected = format!("%{next_value} as result {k} of op {i}");
                let actual =
                    back.map_or("nothing".into(), |(op, k)| format!("result {k} of op {op}"));
                self.report(op, Rule::Operands, expected, format!("{v}, {actual}"));
            }
            *next_value += 1;
        }
        if op.outputs.is_empty() {
            self.report(op, Rule::Operands, "results", "none");
        }
    }
    fn path(&mut self, i: usize, op: &'a Op, paths: &mut BTreeMap<&'a str, usize>) {
        let good = |part: &str| {
            !part.is_empty()
                && part
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "_:-".contains(c))
        };
        if !op.path.split('.').all(good) {
            self.report(
                op,
                Rule::Path,
                "components of letters, digits and `_:-` set apart by dots",
                format!("`{}`", op.path),
            );
        }
        if let Some(first) = paths.insert(&op.path, i) {
            self.report(
                op,
                Rule::Path,
                "a path of its own",
                format!("the path of op {first}"),
            );
        }
    }
    fn layer(&mut self, op: &Op, last: &mut Option<usize>) {
        let Some(layer) = op.layer.map(|l| l.index()) else {
            if op.pass != Pass::Update {
                self.report(
                    op,
                    Rule::World,
                    "the Update pass for an op without a layer",
                    format!("{:?}", op.pass),
                );
            }
            return;
        };
        let n = self.parts.layers.len();
        if layer >= n {
            self.report(
                op,
                Rule::Layer,
                format!("one of {n} layers"),
                format!("layer {layer}"),
            );
        }
        if op.pass == Pass::F {
            if last.is_some_and(|l| layer < l) {
                let expected = format!(
                    "layer {} or later, as the forward op before",
                    last.unwrap_or(0)
                );
                self.report(op, Rule::Layer, expected, format!("layer {layer}"));
            }
            *last = Some(last.map_or(layer, |l| l.max(layer)));
        }
    }
    fn outputs(&mut self, n_values: usize) {
        for &v in self.parts.outputs {
            if v.index() >= n_values {
                let (path, expected) = (
                    self.parts.name.to_string(),
                    format!("one of {n_values} values"),
                );
                self.violations.push(Violation {
                    path,
                    rule: Rule::Output,
                    expected,
                    actual: v.to_string(),
                });
            }
        }
    }
    fn region(&mut self, op: &Op) {
        let home = match op.kind {
            OpKind::State { .. } => Some(Region::StepBegin),
            OpKind::Input { .. } | OpKind::Accumulate { .. } => Some(Region::Microbatch),
            _ => None,
        };
        if let Some(home) = home.filter(|r| *r != op.region) {
            self.report(
                op,
                Rule::Region,
                format!("{home:?}"),
                format!("{:?}", op.region),
            );
        }
        for &v in &op.inputs {
            let Some(from) = self.producer(v) else {
                continue;
            };
            let accumulator = matches!(from.kind, OpKind::Accumulate { .. });
            let allowed = match (from.region, op.region) {
                (Region::StepBegin, _) => true,
                (Region::Microbatch, Region::Microbatch) => !accumulator,
                (Region::Microbatch, Region::StepEnd) => accumulator,
                (Region::StepEnd, Region::StepEnd) => true,
                _ => false,
            };
            if !allowed {
                let what = if accumulator { "accumulator" } else { "value" };
                let actual = format!("the {:?} {what} of `{}`", from.region, from.path);
                self.report(
                    op,
                    Rule::Region,
                    format!("operands that {:?} may read", op.region),
                    actual,
                );
            }
        }
    }
    fn log_sum_exp(&mut self, op: &Op) {
        if !matches!(op.kind, OpKind::CrossEntropy | OpKind::CrossEntropyGrad) {
            return;
        }
        let [logits, lse, ..] = op.inputs[..] else {
            return;
        };
        let source = self.producer(self.before_layouts(lse));
        let of = source
            .filter(|s| s.kind == OpKind::LogSumExp)
            .and_then(|s| s.inputs.first());
        let (found, wanted) = (
            of.map(|&v| self.before_layouts(v)),
            self.before_layouts(logits),
        );
        if found != Some(wanted) {
            let actual = source.map_or("nothing".into(), |s| format!("`{}`", s.path));
            self.report(
                op,
                Rule::LogSumExp,
                format!("the log-sum-exp of {logits}"),
                actual,
            );
        }
    }
    /// The value that layout changes, if any, made this one from; of a recomputed value the
    /// one that it repeats.
    fn before_layouts(&self, mut v: ValueId) -> ValueId {
        v = self.repeated(v);
        while let Some(op) = self.producer(v)
            && op.kind == OpKind::Layout
            && let Some(&x) = op.inputs.first()
            && x < v
        {
            v = self.repeated(x);
        }
        v
    }
    fn repeated(&self, v: ValueId) -> ValueId {
        let twin = self.producer(v).map(|op| (op.origin, &op.outputs));
        let Some((Origin::Twin { of }, results)) = twin else {
            return v;
        };
        let result = results.iter().position(|&o| o == v).unwrap_or(0);
        let source = self.parts.ops.get(of.index());
        source
            .and_then(|s| s.outputs.get(result).copied())
            .filter(|&s| s < v)
            .unwrap_or(v)
    }
    fn origin(&mut self, i: usize, op: &Op) {
        let Some(of) = op.origin.of() else {
            return;
        };
        let source = self.parts.ops[..i].get(of.index());
        let is_twin = matches!(op.origin, Origin::Twin { .. });
        match source {
            Some(source) if !is_twin || source.kind == op.kind => {}
            Some(source) => {
                let (expected, actual) = (format!("{:?}", source.kind), format!("{:?}", op.kind));
                self.report(op, Rule::Origin, expected, actual);
            }
            None => self.report(
                op,
                Rule::Origin,
                format!("one of {i} ops before"),
                of.to_string(),
            ),
        }
    }
    fn dropout_key(&mut self, op: &Op) {
        let key = match &op.kind {
            OpKind::Dropout { key, .. } => key,
            OpKind::AttentionGrad { key, dropout, .. } if *dropout > 0.0 => key,
            OpKind::Attention { key, dropout, .. }
                if !key.is_empty() && (*dropout > 0.0 || op.pass == Pass::F) =>
            {
                key
            }
            _ => return,
        };
        if op.pass == Pass::F {
            if *key != op.path {
                self.report(
                    op,
                    Rule::DropoutKey,
                    format!("its own path `{}`", op.path),
                    format!("`{key}`"),
                );
            }
        } else if !self.forward_keys.contains(key.as_str()) {
            self.report(
                op,
                Rule::DropoutKey,
                "the path of a forward op with dropout",
                format!("`{key}`"),
            );
        }
    }
    /// JSON has no non-finite numbers: attributes that do not survive it have one.
    fn finite(&mut self, op: &Op) {
        let back = serde_json::to_value(&op.kind).and_then(serde_json::from_value::<OpKind>);
        if back.ok().as_ref() != Some(&op.kind) {
            self.report(
                op,
                Rule::Finite,
                "finite attributes",
                format!("{:?}", op.kind),
            );
        }
    }
    fn batch(&mut self, op: &Op) {
        for &v in &op.outputs {
            let Some(value) = self.value(v) else { continue };
            let batches = value
                .ty
                .shape
                .0
                .iter()
                .filter(|d| **d == Dim::Batch)
                .count();
            // Second where experts stand before it.
            let first = value.ty.shape.0.iter().take(2).any(|d| *d == Dim::Batch);
            let anywhere = matches!(op.pass, Pass::BI | Pass::BW);
            if batches > 1 || (batches == 1 && !first && !anywhere) {
                let expected = if batches > 1 {
                    "one batch dim"
                } else {
                    "the batch dim first, or second behind experts"
                };
                self.report(op, Rule::Batch, expected, value.ty.to_string());
            }
        }
    }
}

#[cfg(test)]
mod tests;
