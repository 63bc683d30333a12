//! A family of ops: all that is known of each op of it, in one file.

pub(super) use super::rule::{Builder, DimFactor, rows_and_last};
pub(super) use super::shape::{Operands, one};
pub(super) use super::work::{Lengths, MatmulShape, Work, bytes_of, numel, sum_of};
pub(super) use super::{Binary, Bounds, ExpertGroups, Keys, OpError, OpKind, Unary};
pub(super) use crate::autodiff::gradient::{Arm, Gradients};
pub(super) use crate::sharding::ReduceKind;
pub(super) use crate::{DType, Dim, FactorId, GraphError, Op, Shape, TensorType, ValueId};

/// The functions that a family's file defines. They are called for ops of the family alone, with as
/// many operands as they take.
pub(crate) struct Family {
    /// Types of the results, or which rule the operands break.
    pub(super) infer: fn(&Operands<'_>) -> Result<Vec<TensorType>, OpError>,
    /// Describes the factors of operands and results.
    pub(super) rule: fn(&mut Builder, &OpKind, &[TensorType], &[TensorType]),
    /// Arithmetic and memory traffic at concrete lengths.
    pub(super) work: fn(&Lengths<'_>) -> Work,
    /// Adds the ops for the gradients of the group of operands that begins with this one.
    pub gradient: fn(&mut Arm<'_>, usize) -> Result<Gradients, GraphError>,
    /// Operands whose gradients come out of the same ops; operands without gradient (ids,
    /// labels, the log-sum-exp of a cross entropy) are in no group.
    pub groups: fn(&Op) -> Vec<Vec<usize>>,
}

/// Every operand has a gradient of its own.
pub(super) fn singly(op: &Op) -> Vec<Vec<usize>> {
    (0..op.inputs.len()).map(|i| vec![i]).collect()
}

/// All gradients come out of one op.
pub(super) fn together(op: &Op) -> Vec<Vec<usize>> {
    vec![(0..op.inputs.len()).collect()]
}

pub(super) fn no_gradient(arm: &mut Arm<'_>, _: usize) -> Result<Gradients, GraphError> {
    not_forward(arm)
}

pub(super) fn not_forward<T>(arm: &Arm<'_>) -> Result<T, GraphError> {
    arm.undefined("it is no op of a forward pass")
}

pub(super) fn binary(f: Binary) -> OpKind {
    OpKind::Binary { f }
}

pub(super) fn sum(dims: Vec<usize>) -> OpKind {
    OpKind::Reduce {
        kind: ReduceKind::Sum,
        dims,
    }
}

pub(super) fn dims(t: &TensorType) -> Vec<Dim> {
    t.shape.0.clone()
}
