//! The lattice: what a copy of a buffer holds.

use crate::facts::Facts;
use ir::sharding::reduce_name;
use ir::{BufferId, ReduceKind, ValueId};

/// The content of one copy of a buffer, seen from the microbatch that is played.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) enum Held {
    /// Nothing that may be read.
    #[default]
    Undefined,
    /// A value of another microbatch: nothing that may be read, with a better message.
    Stale,
    /// Anything: something wrong has been reported.
    Poison,
    /// A value (the root of its equals), under this variant of the buffer's spec.
    Value { root: ValueId, variant: u8 },
    /// A number, by its bits.
    Filled(u64),
    /// An accumulator over some microbatches, which `Trace` keeps.
    Sum { root: ValueId },
    /// The share of a value that the parts `from..to` of a ring's chain give.
    Part { root: ValueId, from: u32, to: u32 },
    /// The partial values of a group's members, one after the other, which so combine to a value.
    Members { root: ValueId, kind: ReduceKind },
    /// The vector of a world sum.
    World,
}

impl Held {
    pub(super) fn describe(self, facts: &Facts<'_>) -> String {
        match self {
            Held::Undefined => "nothing".into(),
            Held::Stale => "another microbatch's value".into(),
            Held::Poison => "something wrong".into(),
            Held::Value { root, .. } => format!("`{}`", facts.name(root)),
            Held::Filled(bits) => format!("the number {}", f64::from_bits(bits)),
            Held::Sum { root } => format!("an incomplete sum `{}`", facts.name(root)),
            Held::Part { root, from, to } => {
                format!("parts {from} to {to} of `{}`", facts.name(root))
            }
            Held::Members { root, kind } => {
                let (name, kind) = (facts.name(root), reduce_name(kind));
                format!("the members' parts of `{name}`, a {kind}")
            }
            Held::World => "the vector of a world sum".into(),
        }
    }
}

/// A copy of a buffer between templates: what it holds, of which microbatch when the value belongs
/// to one, and for which of the buffers that have this copy by turns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cell {
    pub(super) held: Held,
    pub(super) microbatch: Option<u32>,
    pub(super) buffer: Option<BufferId>,
}

/// A set of microbatches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Microbatches {
    words: Vec<u64>,
    count: u32,
}

impl Microbatches {
    /// Adds a microbatch; false when it is there already.
    pub(super) fn insert(&mut self, m: u32) -> bool {
        let (word, bit) = (m as usize / 64, 1u64 << (m % 64));
        if self.words.len() <= word {
            self.words.resize(word + 1, 0);
        }
        let new = self.words[word] & bit == 0;
        self.words[word] |= bit;
        self.count += u32::from(new);
        new
    }
    pub(super) fn len(&self) -> u32 {
        self.count
    }
}
