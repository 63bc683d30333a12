//! The vocabulary of gradient rules; each rule stands in its family's file.
//!
//! Notation there: `dy` is the gradient of result 0 `y`, `dx` that of the operand `x`. Sums
//! over broadcast dims are `Reduce`.

use crate::{Graph, GraphError, Op, OpId, OpKind, Origin, Pass, Place, Region, Shape, ValueId};

/// One forward op whose gradient is being written, and for which pass.
pub(crate) struct Arm<'a> {
    pub graph: &'a mut Graph,
    id: OpId,
    /// The forward op.
    pub op: &'a Op,
    /// Gradients of its results, where there are any.
    pub results: &'a [Option<ValueId>],
    pass: Pass,
    /// The first operand of the group whose gradients are being written.
    operand: u32,
}

/// Gradients with the operands that they are of.
pub(crate) type Gradients = Vec<(usize, ValueId)>;

impl<'a> Arm<'a> {
    /// `results` are the gradients of the op's results, where there are any.
    pub(super) fn new(
        graph: &'a mut Graph,
        id: OpId,
        op: &'a Op,
        results: &'a [Option<ValueId>],
        pass: Pass,
    ) -> Self {
        Arm {
            graph,
            id,
            op,
            results,
            pass,
            operand: 0,
        }
    }

    /// Adds the ops that compute the gradients of the operands of one group (see
    /// [`Family::groups`](crate::op::Family)) and returns them with the operands' places.
    pub(super) fn gradients(&mut self, group: &[usize]) -> Result<Gradients, GraphError> {
        self.operand = group[0] as u32;
        (self.op.kind.family().gradient)(self, group[0])
    }

    /// One operand.
    pub fn x(&self, i: usize) -> ValueId {
        self.op.inputs[i]
    }
    /// One result.
    pub fn y(&self, i: usize) -> ValueId {
        self.op.outputs[i]
    }
    /// The gradient of result 0. Statistics (means, log-sum-exps), the other results of ops
    /// other than `Unstack`, are not differentiated, but for the log-sum-exp of an attention.
    pub fn only_gradient(&self) -> Result<ValueId, GraphError> {
        match self.results {
            [Some(dy), rest @ ..] if rest.iter().all(Option::is_none) => Ok(*dy),
            _ => self.undefined("the loss depends on its statistics, which are not differentiated"),
        }
    }
    pub fn shape(&self, v: ValueId) -> Shape {
        self.graph.ty(v).shape.clone()
    }
    /// Length of a dim that inference has found to be fixed.
    pub fn len(&self, v: ValueId, dim: usize) -> u64 {
        self.graph.ty(v).shape.0[dim].bind(1)
    }
    pub fn undefined<T>(&self, why: &str) -> Result<T, GraphError> {
        Err(GraphError::Differentiate(format!(
            "op `{}` ({}) cannot be differentiated: {why}",
            self.op.path,
            self.op.kind.name()
        )))
    }
    pub fn emit(
        &mut self,
        what: &str,
        kind: OpKind,
        inputs: &[ValueId],
    ) -> Result<ValueId, GraphError> {
        Ok(self.emit_all(what, kind, inputs)?[0])
    }
    pub fn emit_all(
        &mut self,
        what: &str,
        kind: OpKind,
        inputs: &[ValueId],
    ) -> Result<Vec<ValueId>, GraphError> {
        let place = Place {
            path: format!("grad.{}.{what}", self.op.path),
            pass: self.pass,
            region: Region::Microbatch,
            layer: self.op.layer,
        };
        let origin = Origin::Gradient {
            of: self.id,
            operand: self.operand,
        };
        self.graph.add_made(&[], kind, inputs, place, origin)
    }
}
