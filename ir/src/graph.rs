//! The graph: ops in topological order, values in SSA form.
//!
//! Invariants (checked at construction by [`Graph::add`], re-checked by `verify`):
//! * an op's operands are results of earlier ops;
//! * result types are what `OpKind::infer` gives;
//! * op paths are unique and name the op for pins, plans, random keys and messages. A path
//!   is a scope (`h.3.attn`) and a leaf (`qkv`), dot-separated; the ops of other passes carry
//!   their forward op's path behind a prefix (`grad.`, `update.`, ...), for readers alone: what
//!   an op is says its [`Origin`];
//! * names of values are unique too: where `h.split` has three results, no op has the path
//!   `h.split:1` or `h.split:2`.

use crate::op::{Init, OpError, OpKind};
use crate::{LayerId, OpId, Origin, TensorType, ValueId};
use hashbrown::HashTable;
use rustc_hash::FxBuildHasher;
use serde::{Deserialize, Serialize};
use std::hash::BuildHasher;

/// The purpose of an op; schedules and reports speak of passes.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// Forward.
    F,
    /// Gradient for an input.
    BI,
    /// Gradient for a weight.
    BW,
    /// Forward work repeated in the backward pass.
    Recompute,
    /// Optimizer, clipping, loss scale, and preparation of parameters.
    Update,
}

/// How often an op runs in one training step.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Region {
    /// Once, before the microbatches.
    StepBegin,
    /// Once for every microbatch.
    Microbatch,
    /// Once, after the microbatches.
    StepEnd,
}

/// An op of a graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Op {
    /// Kind with attributes.
    pub kind: OpKind,
    /// Operands.
    pub inputs: Vec<ValueId>,
    /// Results.
    pub outputs: Vec<ValueId>,
    /// Unique dotted path: a label.
    pub path: String,
    /// Its kind.
    pub origin: Origin,
    /// Its purpose.
    pub pass: Pass,
    /// How often it runs.
    pub region: Region,
    /// The forward layer it belongs to; `None` for world ops, which every stage runs.
    pub layer: Option<LayerId>,
}

/// A value: one result of one op.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// Its type.
    pub ty: TensorType,
    /// The op that defines it.
    pub producer: OpId,
    /// Which result of that op.
    pub result: u32,
}

/// The ops by their paths, which stand in the ops alone.
#[derive(Clone, Debug, Default)]
struct Paths(HashTable<OpId>);

impl Paths {
    /// Enters an op, the last one of the graph.
    fn insert(&mut self, id: OpId, ops: &[Op]) {
        let hash = |id: &OpId| FxBuildHasher.hash_one(&ops[id.index()].path);
        self.0.insert_unique(hash(&id), id, hash);
    }
    fn find(&self, path: &str, ops: &[Op]) -> Option<OpId> {
        let is_it = |id: &OpId| ops[id.index()].path == path;
        let hash = FxBuildHasher.hash_one(path);
        self.0.find(hash, is_it).copied()
    }
}

/// They follow from the ops: graphs of equal ops are equal.
impl PartialEq for Paths {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

/// A graph; see the module header for its invariants.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Graph {
    /// Name of the model.
    pub name: String,
    ops: Vec<Op>,
    values: Vec<Value>,
    paths: Paths,
    /// Names of the layers, by `LayerId`: their common scope.
    pub layers: Vec<String>,
    /// Results of the graph (the loss of a forward graph).
    pub outputs: Vec<ValueId>,
}

/// Why an op cannot be added.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GraphError {
    /// A shape or dtype rule is broken.
    #[error("op `{path}`: {source}")]
    Type {
        /// The op.
        path: String,
        /// The broken rule.
        #[source]
        source: OpError,
    },
    /// An operand does not exist (yet).
    #[error("op `{path}`: operand {operand} does not exist")]
    NoSuchValue {
        /// The op.
        path: String,
        /// The operand.
        operand: ValueId,
    },
    /// The path is taken or malformed.
    #[error("op path `{path}` {problem}")]
    Path {
        /// The path.
        path: String,
        /// The problem with it.
        problem: &'static str,
    },
    /// The results of an op cannot be recomputed.
    #[error("op `{path}` cannot be recomputed: it {problem}")]
    Recompute {
        /// The op.
        path: String,
        /// Why.
        problem: &'static str,
    },
    /// The loss to differentiate is not a scalar of the graph.
    #[error("{0}")]
    Differentiate(String),
}

/// Where an op stands: everything but its kind, operands and origin.
#[derive(Clone, Debug)]
pub struct Place {
    /// Unique dotted path.
    pub path: String,
    /// Its purpose.
    pub pass: Pass,
    /// How often it runs.
    pub region: Region,
    /// Its layer.
    pub layer: Option<LayerId>,
}

impl Place {
    /// A forward op of a layer, once per microbatch.
    pub fn forward(path: impl Into<String>, layer: LayerId) -> Self {
        Place {
            path: path.into(),
            pass: Pass::F,
            region: Region::Microbatch,
            layer: Some(layer),
        }
    }
}

impl Graph {
    /// Returns how many tokens a sample has behind its last label
    /// ([`InputKind::further`](crate::op::InputKind::further)).
    pub fn further(&self) -> u64 {
        let ops = self.ops().iter();
        crate::op::InputKind::further(ops.filter_map(|op| match op.kind {
            OpKind::Input { kind } => Some(kind),
            _ => None,
        }))
    }
    /// An empty graph.
    pub fn new(name: impl Into<String>) -> Self {
        Graph {
            name: name.into(),
            ..Graph::default()
        }
    }
    /// A graph of the same name and layers without ops, with room for those of this one and
    /// a quarter more: about what layout changes and recomputation add.
    pub(crate) fn without_ops(&self) -> Graph {
        let more = |n: usize| n + n / 4;
        Graph {
            name: self.name.clone(),
            ops: Vec::with_capacity(more(self.ops.len())),
            values: Vec::with_capacity(more(self.values.len())),
            paths: Paths(HashTable::with_capacity(more(self.ops.len()))),
            layers: self.layers.clone(),
            outputs: Vec::new(),
        }
    }
    /// Declares the next layer.
    pub fn add_layer(&mut self, name: impl Into<String>) -> LayerId {
        self.layers.push(name.into());
        LayerId::new(self.layers.len() - 1)
    }
    /// Adds an op and returns its results.
    pub fn add(
        &mut self,
        kind: OpKind,
        inputs: &[ValueId],
        place: Place,
    ) -> Result<Vec<ValueId>, GraphError> {
        self.add_declared(kind, inputs, place, None)
    }
    /// Adds an op with one result and returns it.
    pub fn add1(
        &mut self,
        kind: OpKind,
        inputs: &[ValueId],
        place: Place,
    ) -> Result<ValueId, GraphError> {
        Ok(self.add(kind, inputs, place)?[0])
    }
    /// Adds a source op (`Input`, `State`) of a declared type.
    pub fn add_source(
        &mut self,
        kind: OpKind,
        ty: TensorType,
        place: Place,
    ) -> Result<ValueId, GraphError> {
        Ok(self.add_declared(kind, &[], place, Some(ty))?[0])
    }
    fn add_declared(
        &mut self,
        kind: OpKind,
        inputs: &[ValueId],
        place: Place,
        declared: Option<TensorType>,
    ) -> Result<Vec<ValueId>, GraphError> {
        let results = self.results_of(&kind, inputs, &place.path, declared.as_ref())?;
        if !self.is_free(&place.path, results.len()) {
            return Err(self.taken(place.path));
        }
        Ok(self.push(kind, inputs.to_vec(), place, Origin::Forward, results))
    }

    /// Adds an op that a pass makes. Where its path is a name here or in a graph whose ops are
    /// `to_come`, it gets the first of `-2`, `-3`, .. behind it that makes it free.
    pub(crate) fn add_made(
        &mut self,
        to_come: &[&Graph],
        kind: OpKind,
        inputs: &[ValueId],
        place: Place,
        origin: Origin,
    ) -> Result<Vec<ValueId>, GraphError> {
        let results = self.results_of(&kind, inputs, &place.path, None)?;
        let place = self.with_free_path(to_come, place, results.len());
        Ok(self.push(kind, inputs.to_vec(), place, origin, results))
    }
    /// As [`Graph::add_made`], an op with one result, which it returns.
    pub(crate) fn add_made1(
        &mut self,
        to_come: &[&Graph],
        kind: OpKind,
        inputs: &[ValueId],
        place: Place,
        origin: Origin,
    ) -> Result<ValueId, GraphError> {
        Ok(self.add_made(to_come, kind, inputs, place, origin)?[0])
    }
    /// As [`Graph::add_made`], a state of a declared type.
    pub(crate) fn add_made_state(
        &mut self,
        to_come: &[&Graph],
        init: Init,
        ty: TensorType,
        place: Place,
    ) -> Result<ValueId, GraphError> {
        let decay = false;
        let kind = OpKind::State { init, decay };
        let results = self.results_of(&kind, &[], &place.path, Some(&ty))?;
        let place = self.with_free_path(to_come, place, results.len());
        Ok(self.push(kind, Vec::new(), place, Origin::State, results)[0])
    }
    /// Says what the last op is.
    pub(crate) fn mark_last(&mut self, origin: Origin) {
        if let Some(op) = self.ops.last_mut() {
            op.origin = origin;
        }
    }

    /// Types of the results of an op that is to be added, whose path is checked.
    fn results_of(
        &self,
        kind: &OpKind,
        inputs: &[ValueId],
        path: &str,
        declared: Option<&TensorType>,
    ) -> Result<Vec<TensorType>, GraphError> {
        let is_good = |c: char| c.is_ascii_alphanumeric() || "._:-".contains(c);
        if path.is_empty() || !path.chars().all(is_good) {
            return Err(GraphError::Path {
                path: path.to_string(),
                problem: "is empty or has characters other than letters, digits and `._:-`",
            });
        }
        let mut types = Vec::with_capacity(inputs.len());
        for &v in inputs {
            let value = self.values.get(v.index());
            let value = value.ok_or_else(|| GraphError::NoSuchValue {
                path: path.to_string(),
                operand: v,
            })?;
            types.push(value.ty.clone());
        }
        kind.infer(&types, declared)
            .map_err(|source| GraphError::Type {
                path: path.to_string(),
                source,
            })
    }

    fn taken(&self, path: String) -> GraphError {
        let problem = match self.find(&path) {
            Some(_) => "is taken",
            None => "and another op's would give two results one name",
        };
        GraphError::Path { path, problem }
    }
    /// Whether an op of this path and number of results has names of its own.
    fn is_free(&self, path: &str, n_results: usize) -> bool {
        let result_is_free = |r| self.find(&format!("{path}:{r}")).is_none();
        self.find_value(path).is_none() && (1..n_results).all(result_is_free)
    }
    fn with_free_path(&self, to_come: &[&Graph], mut place: Place, n_results: usize) -> Place {
        let taken = |path: &str| {
            let mut graphs = to_come.iter().copied().chain([self]);
            graphs.any(|g| !g.is_free(path, n_results))
        };
        if taken(&place.path) {
            let mut others = (2u64..).map(|i| format!("{}-{i}", place.path));
            place.path = others.find(|p| !taken(p)).unwrap_or_default();
        }
        place
    }

    /// Adds an op of another graph, which was checked there, with operands of the types that it
    /// has there. `moved` has the values here of those of the ops before it, and gets its own.
    ///
    /// Fails when the path is taken or an operand does not exist.
    pub(crate) fn copy(
        &mut self,
        from: &Graph,
        op: &Op,
        inputs: Vec<ValueId>,
        moved: &mut Vec<ValueId>,
    ) -> Result<(), GraphError> {
        if self.find(&op.path).is_some() {
            return Err(self.taken(op.path.clone()));
        }
        if let Some(&operand) = inputs.iter().find(|v| v.index() >= self.values.len()) {
            return Err(GraphError::NoSuchValue {
                path: op.path.clone(),
                operand,
            });
        }
        let place = Place {
            path: op.path.clone(),
            pass: op.pass,
            region: op.region,
            layer: op.layer,
        };
        let here = |id: OpId| {
            let v = from
                .op(id)
                .outputs
                .first()
                .and_then(|v| moved.get(v.index()));
            v.map_or(id, |&v| self.value(v).producer)
        };
        let origin = op.origin.moved(here);
        let results = self.push(
            op.kind.clone(),
            inputs,
            place,
            origin,
            from.result_types(op),
        );
        moved.extend(results);
        Ok(())
    }

    fn push(
        &mut self,
        kind: OpKind,
        inputs: Vec<ValueId>,
        place: Place,
        origin: Origin,
        results: Vec<TensorType>,
    ) -> Vec<ValueId> {
        let Place {
            path,
            pass,
            region,
            layer,
        } = place;
        let producer = OpId::new(self.ops.len());
        let outputs: Vec<ValueId> = results
            .into_iter()
            .enumerate()
            .map(|(i, ty)| {
                self.values.push(Value {
                    ty,
                    producer,
                    result: i as u32,
                });
                ValueId::new(self.values.len() - 1)
            })
            .collect();
        self.ops.push(Op {
            kind,
            inputs,
            outputs: outputs.clone(),
            path,
            origin,
            pass,
            region,
            layer,
        });
        self.paths.insert(producer, &self.ops);
        outputs
    }

    /// All ops in topological order.
    pub fn ops(&self) -> &[Op] {
        &self.ops
    }
    /// Ops with their ids.
    pub fn iter(&self) -> impl Iterator<Item = (OpId, &Op)> {
        self.ops
            .iter()
            .enumerate()
            .map(|(i, op)| (OpId::new(i), op))
    }
    /// One op.
    pub fn op(&self, id: OpId) -> &Op {
        &self.ops[id.index()]
    }
    /// All values.
    pub fn values(&self) -> &[Value] {
        &self.values
    }
    /// One value.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.index()]
    }
    /// Type of a value.
    pub fn ty(&self, id: ValueId) -> &TensorType {
        &self.values[id.index()].ty
    }
    /// The op with this path.
    pub fn find(&self, path: &str) -> Option<OpId> {
        self.paths.find(path, &self.ops)
    }
    /// Name of a value: its op's path, with `:i` behind for results after the first.
    pub fn value_name(&self, id: ValueId) -> String {
        let v = self.value(id);
        let path = &self.op(v.producer).path;
        if v.result == 0 {
            path.clone()
        } else {
            format!("{path}:{}", v.result)
        }
    }
    /// The value with this name.
    pub fn find_value(&self, name: &str) -> Option<ValueId> {
        if let Some(op) = self.find(name) {
            return self.op(op).outputs.first().copied();
        }
        let (path, result) = name.rsplit_once(':')?;
        let result: usize = result.parse().ok().filter(|&r| r > 0)?;
        self.op(self.find(path)?).outputs.get(result).copied()
    }
    /// For every value, the ops that use it, ascending (an op that uses it twice stands twice).
    pub fn consumers(&self) -> Vec<Vec<OpId>> {
        let mut uses = vec![Vec::new(); self.values.len()];
        for (id, op) in self.iter() {
            for v in &op.inputs {
                uses[v.index()].push(id);
            }
        }
        uses
    }
    /// Types of an op's operands.
    pub fn operand_types(&self, op: &Op) -> Vec<TensorType> {
        op.inputs.iter().map(|&v| self.ty(v).clone()).collect()
    }
    /// Types of an op's results.
    pub fn result_types(&self, op: &Op) -> Vec<TensorType> {
        op.outputs.iter().map(|&v| self.ty(v).clone()).collect()
    }
    /// The sharding rule of an op.
    pub fn rule(&self, op: &Op) -> crate::op::ShardingRule {
        op.kind
            .rule(&self.operand_types(op), &self.result_types(op))
    }
    /// Work of an op on whole tensors with `batch` samples per microbatch.
    pub fn work(&self, op: &Op, batch: u64) -> crate::op::Work {
        let concrete = |vs: &[ValueId]| -> Vec<(crate::DType, Vec<u64>)> {
            vs.iter()
                .map(|&v| (self.ty(v).dtype, self.ty(v).shape.bind(batch)))
                .collect()
        };
        op.kind.work(&concrete(&op.inputs), &concrete(&op.outputs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(graph: &mut Graph, path: &str) -> Result<Vec<ValueId>, GraphError> {
        let place = Place {
            path: path.to_string(),
            pass: Pass::F,
            region: Region::Microbatch,
            layer: None,
        };
        graph.add(OpKind::Constant { value: 1.0 }, &[], place)
    }

    #[test]
    fn ops_are_found_by_path_in_copies_that_go_on_apart() {
        let mut one = Graph::new("m");
        // More than one growth of the table.
        let paths: Vec<String> = (0..100).map(|i| format!("op.{i}")).collect();
        for path in &paths {
            add(&mut one, path).expect("a new path");
        }
        let mut other = one.clone();
        add(&mut one, "a").expect("a new path");
        add(&mut other, "b").expect("a new path");
        for (i, path) in paths.iter().enumerate() {
            assert_eq!(one.find(path), Some(OpId::new(i)));
            assert_eq!(other.find(path), Some(OpId::new(i)));
        }
        let found = |g: &Graph| (g.find("a").is_some(), g.find("b").is_some());
        assert_eq!((found(&one), found(&other)), ((true, false), (false, true)));
        assert!(matches!(
            add(&mut one, "op.7"),
            Err(GraphError::Path { .. })
        ));
        assert_ne!(one, other);
    }
}
