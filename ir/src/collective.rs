//! Collectives, defined once for the planner, the simulator, the checker and the runtime.
//!
//! **Ranks and order.** The group of a collective is the set of ranks that differ along its
//! axes, in row-major order of the axes as listed.
//!
//! **Contracts.** A collective states what its members may rely on ([`Contract`]): the type of what
//! it moves and, where it adds, the type in which it adds up and whether the order is fixed. The
//! order follows from what executes the program: ranks that meet through their hosts' memory,
//! threads or processes, over TCP or MPI, add in the order of the group; NCCL adds as it finds
//! fastest. Members of a group get the same bits from either.
//!
//! **Bytes.** `bytes` of a collective is nccl-tests' S: the size of the larger of one rank's
//! operand and result buffers (padded): the buffer of an all-reduce, the result of an
//! all-gather, the operand of a reduce-scatter, either side of an all-to-all or a shift.

use crate::DType;
use serde::{Deserialize, Serialize};

/// The reductions that libraries have. Partial values that combine otherwise are gathered, and an op
/// combines them (`reshard::LayoutStep::members`).
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
pub enum Reduction {
    /// Addition.
    Sum,
    /// Maximum.
    Max,
    /// Minimum.
    Min,
}

impl Reduction {
    /// Name in text forms.
    pub fn name(self) -> &'static str {
        match self {
            Reduction::Sum => "sum",
            Reduction::Max => "max",
            Reduction::Min => "min",
        }
    }
}

/// The kind of a collective, without its group and buffers.
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
pub enum CollectiveKind {
    /// Every member gets the reduction of all members' buffers.
    AllReduce(Reduction),
    /// Every member gets its piece of the reduction.
    ReduceScatter(Reduction),
    /// Every member gets all pieces.
    AllGather,
    /// Every member sends piece `j` to member `j`.
    AllToAll,
    /// Every member sends its buffer to the next one, the last to the first.
    Shift,
}

impl CollectiveKind {
    /// Name in tables and text forms.
    pub fn name(self) -> &'static str {
        match self {
            CollectiveKind::AllReduce(_) => "all_reduce",
            CollectiveKind::ReduceScatter(_) => "reduce_scatter",
            CollectiveKind::AllGather => "all_gather",
            CollectiveKind::AllToAll => "all_to_all",
            CollectiveKind::Shift => "shift",
        }
    }
}

/// The promises that the members of a collective may rely on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Contract {
    /// Type of the elements of operands and results.
    pub operand: DType,
    /// How they are added up; `None` where nothing is: moves, maxima and minima round nothing, so
    /// their results do not depend on an order.
    pub sum: Option<Sum>,
}

/// How a collective adds up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Sum {
    /// Type of the sum before it becomes a result.
    pub dtype: DType,
    /// Whether the order is known.
    pub order: Order,
}

/// The order in which the operands of a sum are added up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// That of the group, pairwise from the left, in f32 and rounded once: the same bits in every
    /// run, and in every group with the same operands.
    Fixed,
    /// Whatever the library finds fastest, rounded as late as it likes but to no narrower a type
    /// than the operands'. Members of a group have the same bits; runs, and other groups that add
    /// up the same operands, may differ by rounding.
    Library,
}

impl Order {
    /// Both orders.
    pub const ALL: [Order; 2] = [Order::Fixed, Order::Library];

    /// Name in text forms.
    pub fn name(self) -> &'static str {
        match self {
            Order::Fixed => "fixed",
            Order::Library => "library",
        }
    }
    /// The sum that is made of operands of a type.
    pub fn sum(self, operand: DType) -> Sum {
        let dtype = match self {
            Order::Fixed => DType::F32,
            Order::Library => operand,
        };
        Sum { dtype, order: self }
    }
    /// Says whether ranks whose sums have this order keep a contract. A fixed order in f32 is more
    /// than a library promises, so it keeps those contracts too.
    pub fn keeps(self, contract: &Contract) -> bool {
        contract.sum.is_none_or(|asked| {
            let is = |order: Order| asked == order.sum(contract.operand);
            is(self) || self == Order::Fixed && is(Order::Library)
        })
    }
}

impl Contract {
    /// The contract of a collective of elements of a type, where sums have this order.
    pub fn new(kind: CollectiveKind, operand: DType, order: Order) -> Self {
        let adds = matches!(
            kind,
            CollectiveKind::AllReduce(Reduction::Sum)
                | CollectiveKind::ReduceScatter(Reduction::Sum)
        );
        Contract {
            operand,
            sum: adds.then(|| order.sum(operand)),
        }
    }
    /// Words for it: `f32`, `bf16 in f32 fixed`.
    pub fn describe(&self) -> String {
        self.operand.name().to_string() + &self.describe_sum()
    }
    /// Words for the sum, nothing where nothing is added: ` in f32 fixed`.
    pub fn describe_sum(&self) -> String {
        let sum = |s: Sum| format!(" in {} {}", s.dtype.name(), s.order.name());
        self.sum.map(sum).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fixed_order_keeps_what_a_library_promises_and_not_the_other_way_around() {
        let of = |operand, order| {
            Contract::new(CollectiveKind::AllReduce(Reduction::Sum), operand, order)
        };
        for dtype in [DType::F32, DType::Bf16] {
            for order in Order::ALL {
                assert!(order.keeps(&of(dtype, order)));
                assert!(Order::Fixed.keeps(&of(dtype, order)));
            }
            assert!(!Order::Library.keeps(&of(dtype, Order::Fixed)));
        }
        // That has other bits than a sum in f32.
        let mut narrow = of(DType::Bf16, Order::Fixed);
        narrow.sum = narrow.sum.map(|s| Sum {
            dtype: DType::Bf16,
            ..s
        });
        assert!(Order::ALL.iter().all(|order| !order.keeps(&narrow)));
        assert_eq!(
            of(DType::Bf16, Order::Fixed).describe(),
            "bf16 in f32 fixed"
        );
        assert_eq!(
            of(DType::Bf16, Order::Library).describe(),
            "bf16 in bf16 library"
        );
        let gather = Contract::new(CollectiveKind::AllGather, DType::Bf16, Order::Fixed);
        assert!(gather.sum.is_none() && Order::Library.keeps(&gather));
    }
}
