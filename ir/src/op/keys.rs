//! The keys that one instruction of an attention looks at.
//!
//! An op of a graph attends to all keys. Where keys and values go around a ring of ranks (Liu et
//! al. 2023) it is a chain of instructions, one for each shard that comes by:
//!
//! ```text
//! forward    o, lse = part i (q, k>i, v>i, o and lse of part i-1)
//! backward   dq, a, b = part i (q, k>i, v>i, o, lse, do, dq of part i-1)
//!            dk = a + dk of part i-1, one place on       dv likewise with b
//! ```
//!
//! Parts hand on f32; the last one rounds once. `lse` of all keys seen so far weighs the old
//! sum against the new addend, so that softmax takes no second pass (Milakov & Gimelshein 2018).
//! Gradients of keys and values follow them around, a place behind: they travel while the next part
//! computes its addends. After one shift more than there are parts they are home.

use serde::{Deserialize, Serialize};

/// Which keys.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Keys {
    /// All of them: every op of a graph.
    #[default]
    All,
    /// A shard that has gone around a ring.
    Ring {
        /// Places that it has gone.
        step: u32,
        /// Ranks of the ring, and parts of the chain.
        ranks: u32,
    },
}

impl Keys {
    /// Whether it is the op as graphs have it.
    pub fn are_all(&self) -> bool {
        *self == Keys::All
    }
    /// Whether the results of an earlier part are operands.
    pub fn continues(self) -> bool {
        matches!(self, Keys::Ring { step: 1.., .. })
    }
}
