//! Ops that are one call with those before them: which may follow which.
//!
//! A library does some before it writes a product of matrices:
//!
//! ```text
//! product ─┬─► sums: biases, a residual, another product ─┬─► GELU by tanh, whose argument may be kept
//!          ├───────────────────────────────────────────────┘
//!          ├─► GELU's gradient, of the product
//!          └─► the sum in an f32 accumulator
//! ```
//! Others move more bytes than they compute, so that one kernel of several is faster:
//!
//! ```text
//! functions of elements, of tensors of one shape: each takes any value before it, or an operand that
//! the chain reads already
//! sum of elements ──► a norm of it
//! gradient of a norm's argument ──► sum with another gradient
//! ```
//! `lowering` marks neighbours of a program so ([`Call::Chained`](crate::program::Call)), the planner
//! expects it of ops of a graph, and the checker has the same rules of its own.

use crate::op::{Binary, Unary};
use crate::program::{Call, InstrKind, Instruction};
use crate::{BufferId, DType, OpKind};

/// Most ops of a chain that a product begins.
const LONGEST: usize = 3;
/// Most ops of a chain of elements: their kernel has addresses for five operands and four results.
const LONGEST_OF_ELEMENTS: usize = 4;

/// The place of an op in a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// The product that it begins with.
    Product,
    /// A sum of what is before it and something else.
    Sum,
    /// The gradient of a norm's argument, which it begins with.
    Gradient,
    /// A sum of two tensors, element by element, which it begins with.
    Total,
    /// A function of elements.
    Elements,
    /// An op that nothing follows.
    End,
}

impl Link {
    /// The place of an op that a chain can begin with.
    pub fn first(kind: &OpKind) -> Option<Link> {
        match kind {
            OpKind::DotGeneral { .. } => Some(Link::Product),
            OpKind::LayerNormGradInput | OpKind::RmsNormGradInput => Some(Link::Gradient),
            OpKind::Binary { f: Binary::Add } => Some(Link::Total),
            _ if is_of_elements(kind) => Some(Link::Elements),
            _ => None,
        }
    }
    /// The place of an op that takes the value of this one as that operand. In a chain of elements it
    /// may take an earlier one instead.
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
            Link::Total if is_norm(kind) && operand == 0 => Some(Link::End),
            Link::Total | Link::Elements if is_of_elements(kind) => Some(Link::Elements),
            Link::Gradient if *kind == binary(Binary::Add) => Some(Link::End),
            _ => None,
        }
    }
    /// Whether all ops of the chain so far are functions of elements, each of which may take any value
    /// before it.
    pub fn is_of_elements(self) -> bool {
        matches!(self, Link::Total | Link::Elements)
    }
    /// Whether another op may follow so many.
    pub fn has_room(self, n: usize) -> bool {
        match self {
            Link::End => false,
            Link::Total | Link::Elements => n < LONGEST_OF_ELEMENTS,
            Link::Product | Link::Sum | Link::Gradient => n < LONGEST,
        }
    }
    /// Whether the value of this one may be written though that op goes on with it.
    pub fn may_be_kept(self, next: &OpKind) -> bool {
        self.is_of_elements() || self != Link::Gradient && may_keep(next)
    }
}

/// Whether the value that an op takes from a product may be written all the same.
fn may_keep(kind: &OpKind) -> bool {
    *kind == OpKind::Unary { f: Unary::GeluTanh }
}

/// Whether an op is a function of elements that chains are made of, where all its tensors have one
/// shape.
pub fn is_of_elements(kind: &OpKind) -> bool {
    matches!(kind, OpKind::Unary { .. } | OpKind::Binary { .. })
}

fn is_norm(kind: &OpKind) -> bool {
    matches!(kind, OpKind::LayerNorm { .. } | OpKind::RmsNorm { .. })
}

/// How often the bytes of an operand, by place, move less in a call than where the op is alone: once if
/// the call has read or made them, twice if they are not written either.
pub type Spared = [u8; 4];

/// Returns what is spared for the last of some instructions, a chain or the beginning of one.
pub fn spared(chain: &[Instruction]) -> Spared {
    let mut spared = Spared::default();
    let Some((last, before)) = chain.split_last() else {
        return spared;
    };
    let first = before.first().and_then(kind_of).and_then(Link::first);
    let is_of_elements = first.is_some_and(Link::is_of_elements);
    for (spared, b) in spared.iter_mut().zip(operands(last)) {
        let maker = before.iter().rposition(|i| i.writes().contains(b));
        let since = maker.map_or(0, |m| m + 1);
        let is_taken = before[since..].iter().any(|i| operands(i).contains(b));
        let is_hidden =
            maker.is_some_and(|m| chain[m + 1].call == Call::Chained { is_kept: false });
        *spared = match (maker, is_hidden && !is_taken) {
            (Some(_), true) => 2,
            (Some(_), false) => 1,
            (None, _) => u8::from(is_of_elements && is_taken),
        };
    }
    spared
}

fn kind_of(instruction: &Instruction) -> Option<&OpKind> {
    match &instruction.kind {
        InstrKind::Compute { kind, .. } => Some(kind),
        _ => None,
    }
}

fn operands(instruction: &Instruction) -> &[BufferId] {
    match &instruction.kind {
        InstrKind::Compute { inputs, .. } => inputs,
        _ => &[],
    }
}
