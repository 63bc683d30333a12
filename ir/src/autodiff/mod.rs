//! Reverse-mode differentiation of a graph: gradient ops are appended to the same graph.
//!
//! The ops are visited last to first. When an op is visited, every consumer of its results
//! has been visited, so the gradients of its results are complete; its gradient rule
//! (in its family's file under `op`) gives the gradients of its operands.
//!
//! Invariants:
//! * A gradient has exactly the type of its value.
//! * The gradient of a value that depends on some `Input` is computed in pass `BI`, that of
//!   a value made of parameters alone in `BW`. So no `BI` op ever reads a `BW` value, and
//!   weight gradients can be delayed. Of one forward op, `BI` comes before `BW`.
//! * A value used several times gets the sum of its uses' gradients, added in reverse order
//!   of the uses by `Binary::Add`. Each addition belongs to the layer of the use that it
//!   adds, so one gradient, not several, crosses from a stage to the one before.
//! * Leaves (compute copies of parameters) are not summed: each use is handed to the caller
//!   on its own as soon as it is known, because uses may lie on different stages.
//!
//! Paths: `grad.<forward path>.<what>`, `what` being one word without dots (`x`, `lhs`,
//! `rhs`, `weight`, `qkv`, `logits`, `gates`; intermediate steps `x_broadcast`, `rhs_neg`, ...;
//! sums over uses `sum1`, `sum2`, ... or `r1-sum1`, ... for result 1). Which op's gradient an op
//! computes, and for which operand, is its origin.

pub(crate) mod gradient;

use crate::op::Binary;
use crate::{Graph, GraphError, Op, OpId, OpKind, Origin, Pass, Place, Region, ValueId};
use gradient::Arm;
use std::collections::{BTreeMap, BTreeSet};

/// The gradient of one use of a leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeafUse {
    /// The leaf.
    pub leaf: ValueId,
    /// The op that uses it.
    pub consumer: OpId,
    /// As which of its operands.
    pub operand: usize,
    /// Gradient of the output for the leaf as this operand; it has the leaf's type.
    pub gradient: ValueId,
}

/// A callback that takes the gradient of a use and may add ops to the graph.
pub type OnUse<'a> = dyn FnMut(&mut Graph, LeafUse) -> Result<(), GraphError> + 'a;

/// Appends the ops that compute the gradient of `output` for every use of every leaf.
///
/// `seed` is the gradient of `output` itself (of the same type). `on_use` is called once for
/// each use on a path to `output`, right after the ops that compute its gradient were added.
/// Fails with [`GraphError::Differentiate`] when such a path crosses an op without gradient.
pub fn differentiate(
    graph: &mut Graph,
    output: ValueId,
    seed: ValueId,
    leaves: &BTreeSet<ValueId>,
    on_use: &mut OnUse<'_>,
) -> Result<(), GraphError> {
    if graph.ty(seed) != graph.ty(output) {
        return Err(GraphError::Differentiate(format!(
            "the seed is {}, the output {}",
            graph.ty(seed),
            graph.ty(output)
        )));
    }
    let reaches = reachability(graph, leaves);
    if !reaches.leaf[output.index()] {
        return Err(GraphError::Differentiate(format!(
            "`{}` does not depend on any parameter",
            graph.value_name(output)
        )));
    }
    let n_forward = graph.ops().len();
    let mut engine = Engine {
        graph,
        leaves,
        reaches,
        gradients: BTreeMap::from([(output, seed)]),
        n_sums: BTreeMap::new(),
    };
    for op in (0..n_forward).rev() {
        engine.visit(OpId::new(op), on_use)?;
    }
    Ok(())
}

/// Which values depend on a leaf, and which on an `Input`.
struct Reaches {
    leaf: Vec<bool>,
    input: Vec<bool>,
}

fn reachability(graph: &Graph, leaves: &BTreeSet<ValueId>) -> Reaches {
    let mut r = Reaches {
        leaf: vec![false; graph.values().len()],
        input: vec![false; graph.values().len()],
    };
    for op in graph.ops() {
        let leaf = op.inputs.iter().any(|v| r.leaf[v.index()]);
        let input =
            matches!(op.kind, OpKind::Input { .. }) || op.inputs.iter().any(|v| r.input[v.index()]);
        for &v in &op.outputs {
            r.leaf[v.index()] = leaves.contains(&v) || (leaf && graph.ty(v).dtype.is_float());
            r.input[v.index()] = input;
        }
    }
    r
}

struct Engine<'a> {
    graph: &'a mut Graph,
    leaves: &'a BTreeSet<ValueId>,
    reaches: Reaches,
    /// Gradients so far, by value.
    gradients: BTreeMap<ValueId, ValueId>,
    /// Number of additions so far, by value.
    n_sums: BTreeMap<ValueId, usize>,
}

impl Engine<'_> {
    fn visit(&mut self, id: OpId, on_use: &mut OnUse<'_>) -> Result<(), GraphError> {
        let op = self.graph.op(id).clone();
        let results: Vec<Option<ValueId>> = op
            .outputs
            .iter()
            .map(|v| self.gradients.get(v).copied())
            .collect();
        if results.iter().all(Option::is_none) {
            return Ok(());
        }
        let mut groups = (op.kind.family().groups)(&op);
        groups.retain(|group| {
            group
                .iter()
                .any(|&i| self.reaches.leaf[op.inputs[i].index()])
        });
        groups.sort_by_key(|group| self.pass(&op, group));
        for group in groups {
            let pass = self.pass(&op, &group);
            let gradients = Arm::new(self.graph, id, &op, &results, pass).gradients(&group)?;
            for (operand, gradient) in gradients {
                if self.reaches.leaf[op.inputs[operand].index()] {
                    self.deliver(id, &op, operand, gradient, on_use)?;
                }
            }
        }
        Ok(())
    }

    /// `BI` when some operand of the group that needs a gradient depends on an input.
    fn pass(&self, op: &Op, group: &[usize]) -> Pass {
        let on_input = |&i: &usize| {
            let v = op.inputs[i].index();
            self.reaches.leaf[v] && self.reaches.input[v]
        };
        if group.iter().any(on_input) {
            Pass::BI
        } else {
            Pass::BW
        }
    }

    fn deliver(
        &mut self,
        consumer: OpId,
        op: &Op,
        operand: usize,
        gradient: ValueId,
        on_use: &mut OnUse<'_>,
    ) -> Result<(), GraphError> {
        let value = op.inputs[operand];
        if self.graph.ty(gradient) != self.graph.ty(value) {
            let (got, expected) = (self.graph.ty(gradient), self.graph.ty(value));
            return Err(GraphError::Differentiate(format!(
                "op `{}`: gradient of operand {operand} is {got}, the operand {expected}",
                op.path
            )));
        }
        if self.leaves.contains(&value) {
            return on_use(
                self.graph,
                LeafUse {
                    leaf: value,
                    consumer,
                    operand,
                    gradient,
                },
            );
        }
        let total = match self.gradients.get(&value).copied() {
            None => gradient,
            Some(so_far) => self.add(value, so_far, gradient, op)?,
        };
        self.gradients.insert(value, total);
        Ok(())
    }

    fn add(
        &mut self,
        value: ValueId,
        so_far: ValueId,
        gradient: ValueId,
        consumer: &Op,
    ) -> Result<ValueId, GraphError> {
        let n = self.n_sums.entry(value).or_insert(0);
        *n += 1;
        let (of, result) = (
            self.graph.value(value).producer,
            self.graph.value(value).result,
        );
        let what = match result {
            0 => format!("sum{n}"),
            r => format!("r{r}-sum{n}"),
        };
        let place = Place {
            path: format!("grad.{}.{what}", self.graph.op(of).path),
            pass: if self.reaches.input[value.index()] {
                Pass::BI
            } else {
                Pass::BW
            },
            region: Region::Microbatch,
            layer: consumer.layer,
        };
        self.graph.add_made1(
            &[],
            OpKind::Binary { f: Binary::Add },
            &[so_far, gradient],
            place,
            Origin::Sum { of, result },
        )
    }
}
