//! Conditions that shape and dtype rules are made of. Each that operands break is an `OpError`,
//! so a graph that was built is well-typed.

use super::{OpError, OpKind, SequenceOrder};
use crate::{DType, Dim, Shape, TensorType};

/// The op under inference, for error messages and common conditions.
pub(super) struct Operands<'a> {
    /// The op.
    pub kind: &'a OpKind,
    /// Types of its operands, as many as it takes.
    pub x: &'a [TensorType],
    /// The declared type of `Input` and `State`.
    pub declared: Option<&'a TensorType>,
}

/// One result.
pub(super) fn one(t: TensorType) -> Result<Vec<TensorType>, OpError> {
    Ok(vec![t])
}

impl Operands<'_> {
    /// Fails where the op takes another number of operands.
    pub fn check_arity(&self) -> Result<(), OpError> {
        let (n, arity) = (self.x.len(), self.kind.arity());
        self.ensure(arity.contains(&n), || {
            let expected = match (*arity.start(), *arity.end()) {
                (from, usize::MAX) => format!("{from} or more"),
                (from, to) if from == to => from.to_string(),
                (from, to) => format!("{from} to {to}"),
            };
            format!("{n} operands, expected {expected}")
        })
    }
    /// The op is of another family.
    pub fn stranger<T>(&self) -> Result<T, OpError> {
        Err(self.err("has no shape rule".into()))
    }
    pub fn err(&self, problem: String) -> OpError {
        OpError {
            op: self.kind.name(),
            problem,
        }
    }
    pub fn ensure(&self, holds: bool, problem: impl FnOnce() -> String) -> Result<(), OpError> {
        if holds {
            Ok(())
        } else {
            Err(self.err(problem()))
        }
    }
    pub fn float(&self, i: usize) -> Result<(), OpError> {
        self.ensure(self.x[i].dtype.is_float(), || {
            format!("operand {i} is {}, expected floats", self.x[i])
        })
    }
    pub fn rank(&self, i: usize, n: usize) -> Result<(), OpError> {
        self.ensure(self.x[i].shape.rank() == n, || {
            format!("operand {i} is {}, expected {n} dims", self.x[i])
        })
    }
    pub fn fixed(&self, i: usize, dim: usize) -> Result<u64, OpError> {
        match self.x[i].shape.0.get(dim) {
            Some(Dim::Fixed(n)) => Ok(*n),
            _ => Err(self.err(format!("dim {dim} of {} is not a fixed length", self.x[i]))),
        }
    }
    pub fn with_dim(&self, i: usize, dim: usize, len: u64) -> TensorType {
        let mut t = self.x[i].clone();
        t.shape.0[dim] = Dim::Fixed(len);
        t
    }
    pub fn same(&self, i: usize, j: usize) -> Result<(), OpError> {
        self.ensure(self.x[i] == self.x[j], || {
            format!(
                "operands {i} and {j} differ: {} and {}",
                self.x[i], self.x[j]
            )
        })
    }
    /// Operand `j` is a vector along the last dim of operand `i`.
    pub fn row_vector(&self, i: usize, j: usize) -> Result<(), OpError> {
        self.float(i)?;
        let ok = self.x[j].shape.rank() == 1
            && self.x[i].shape.0.last() == self.x[j].shape.0.last()
            && self.x[i].dtype == self.x[j].dtype;
        self.ensure(ok, || {
            format!(
                "operand {j} is {}, expected one row of {}",
                self.x[j], self.x[i]
            )
        })
    }
    /// f32 with the dims of operand `i` but the last.
    pub fn rows(&self, i: usize) -> Result<TensorType, OpError> {
        self.float(i)?;
        self.ensure(self.x[i].shape.rank() >= 1, || {
            format!("operand {i} is a scalar")
        })?;
        let dims = &self.x[i].shape.0;
        Ok(TensorType::new(
            DType::F32,
            Shape(dims[..dims.len() - 1].to_vec()),
        ))
    }
    pub fn last(&self, i: usize) -> Result<TensorType, OpError> {
        let d = self.x[i]
            .shape
            .0
            .last()
            .ok_or_else(|| self.err(format!("operand {i} is a scalar")))?;
        Ok(TensorType::new(self.x[i].dtype, Shape(vec![*d])))
    }
    pub fn stat(&self, i: usize, j: usize) -> Result<(), OpError> {
        let expected = self.rows(i)?;
        self.ensure(self.x[j] == expected, || {
            format!("operand {j} is {}, expected {expected}", self.x[j])
        })
    }
    /// Whether the sequence of operand `i` divides into the chunks of an order.
    pub fn stored(&self, i: usize, order: SequenceOrder) -> Result<(), OpError> {
        let len = self.fixed(i, 1)?;
        self.ensure(order.fits(len), || {
            let n = order.n_chunks();
            format!(
                "the sequence of {} does not divide into the {n} chunks of zigzag order ({} ranks, expected 1 or more)",
                self.x[i],
                n / 2
            )
        })
    }
}
