//! Ops that a library does before it writes a product of matrices: which may follow which.
//!
//! ```text
//! product ─┬─► sums: biases, a residual, another product ─┬─► GELU by tanh, whose argument may be kept
//!          ├───────────────────────────────────────────────┘
//!          ├─► GELU's gradient, of the product
//!          └─► the sum in an f32 accumulator
//! ```
//! `lowering` marks neighbours of a program so ([`Call::Chained`](crate::program::Call)), the planner
//! expects it of ops of a graph, and the checker has the same rules of its own.

use crate::op::{Binary, Unary};
use crate::{DType, OpKind};

/// Most ops of a chain.
pub const LONGEST: usize = 3;

/// The place of an op in a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// The product that it begins with.
    Product,
    /// A sum of what is before it and something else.
    Sum,
    /// An op that nothing follows.
    End,
}

impl Link {
    /// The place of an op that a chain can begin with.
    pub fn first(kind: &OpKind) -> Option<Link> {
        matches!(kind, OpKind::DotGeneral { .. }).then_some(Link::Product)
    }
    /// The place of an op that takes the value of this one as that operand.
    pub fn then(self, kind: &OpKind, operand: usize) -> Option<Link> {
        let binary = |f| OpKind::Binary { f };
        match self {
            Link::Product | Link::Sum if *kind == binary(Binary::Add) => Some(Link::Sum),
            Link::Product | Link::Sum if may_keep(kind) => Some(Link::End),
            Link::Product if *kind == binary(Binary::GeluTanhGrad) && operand == 1 => {
                Some(Link::End)
            }
            Link::Product if matches!(kind, OpKind::Accumulate { dtype: DType::F32 }) => {
                Some(Link::End)
            }
            _ => None,
        }
    }
}

/// Whether the value that an op takes may be written all the same.
pub fn may_keep(kind: &OpKind) -> bool {
    *kind == OpKind::Unary { f: Unary::GeluTanh }
}
