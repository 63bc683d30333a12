//! The origins of ops. An op's path is a label, for users, reports and random keys; that an op is a
//! layer's entrance, or which op's gradient it computes, is its origin and is read from nowhere
//! else. So an author may call an op `grad.x` or `boundary.h.1.0`.
//!
//! Every pass that adds ops says what they are; every pass that copies a graph moves the
//! references to other ops along ([`Origin::moved`]). An op that an origin names stands before the
//! op that has the origin.

use crate::OpId;

/// The origin of an op: its role, and the op that it was made for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// An op of the model, as its author wrote it.
    #[default]
    Forward,
    /// The entrance of an activation into a layer.
    Boundary,
    /// A conversion of an activation to the dtype that its reader wants.
    Cast,
    /// A layout change that several ops share.
    Layout,
    /// The loss of the step: normalised, added up over microbatches, or the seed of its gradient.
    Loss,
    /// The gradient of an op for an operand, or a step on the way to it. Where the gradients of
    /// several operands come out together, `operand` is the first of them.
    Gradient {
        /// The op that is differentiated.
        of: OpId,
        /// Which of its operands.
        operand: u32,
    },
    /// A sum of the gradients of the uses of a result.
    Sum {
        /// The op whose result is used several times.
        of: OpId,
        /// Which of its results.
        result: u32,
    },
    /// An op of the forward pass run again in the backward pass.
    Twin {
        /// The op that is repeated.
        of: OpId,
    },
    /// The gradient of one use of a parameter, added up over microbatches.
    Accumulator {
        /// The op that uses the parameter.
        of: OpId,
        /// As which of its operands.
        operand: u32,
    },
    /// The copy of a parameter that ops read: cast to the compute dtype, or laid out for them.
    Prepared {
        /// The `State` op of the parameter.
        of: OpId,
    },
    /// A parameter at the entrance of another layer than its own.
    Shared {
        /// The `State` op of the parameter.
        of: OpId,
    },
    /// A state that training adds: a moment of the optimizer, a world scalar.
    State,
    /// Work of the step on states: norms, clipping, loss scale, update.
    Update,
}

impl Origin {
    /// The op that it was made for.
    pub fn of(mut self) -> Option<OpId> {
        self.reference().copied()
    }

    /// The same origin in a copy of the graph, in which `to` says where ops are.
    pub(crate) fn moved(mut self, to: impl FnOnce(OpId) -> OpId) -> Self {
        if let Some(of) = self.reference() {
            *of = to(*of);
        }
        self
    }

    fn reference(&mut self) -> Option<&mut OpId> {
        match self {
            Origin::Gradient { of, .. }
            | Origin::Sum { of, .. }
            | Origin::Twin { of }
            | Origin::Accumulator { of, .. }
            | Origin::Prepared { of }
            | Origin::Shared { of } => Some(of),
            Origin::Forward
            | Origin::Boundary
            | Origin::Cast
            | Origin::Layout
            | Origin::Loss
            | Origin::State
            | Origin::Update => None,
        }
    }

    /// The origins there are, with this reference and number where they have any.
    pub(crate) fn all(of: OpId, number: u32) -> [Origin; 13] {
        [
            Origin::Forward,
            Origin::Boundary,
            Origin::Cast,
            Origin::Layout,
            Origin::Loss,
            Origin::Gradient {
                of,
                operand: number,
            },
            Origin::Sum { of, result: number },
            Origin::Twin { of },
            Origin::Accumulator {
                of,
                operand: number,
            },
            Origin::Prepared { of },
            Origin::Shared { of },
            Origin::State,
            Origin::Update,
        ]
    }

    /// Its name in text forms, and its number where it has one.
    pub(crate) fn name(self) -> (&'static str, Option<u32>) {
        match self {
            Origin::Forward => ("forward", None),
            Origin::Boundary => ("boundary", None),
            Origin::Cast => ("cast", None),
            Origin::Layout => ("layout", None),
            Origin::Loss => ("loss", None),
            Origin::Gradient { operand, .. } => ("gradient", Some(operand)),
            Origin::Sum { result, .. } => ("sum", Some(result)),
            Origin::Twin { .. } => ("twin", None),
            Origin::Accumulator { operand, .. } => ("accumulator", Some(operand)),
            Origin::Prepared { .. } => ("prepared", None),
            Origin::Shared { .. } => ("shared", None),
            Origin::State => ("state", None),
            Origin::Update => ("update", None),
        }
    }
}
