//! Collectives, defined once for the planner, the simulator, the checker and the runtime.
//!
//! **Ranks and order.** The group of a collective is the set of ranks that differ along its
//! axes, in row-major order of the axes as listed. Reductions combine the members' values in
//! that order, pairwise from the left, in f32 whatever the element type, and round once at
//! the end; so every member gets the same bits.
//!
//! **Bytes.** `bytes` of a collective is nccl-tests' S: the size of the larger of one rank's
//! operand and result buffers (padded): the buffer of an all-reduce, the result of an
//! all-gather, the operand of a reduce-scatter, either side of an all-to-all or a shift.

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
