//! Which instructions of a slot a device may begin at once.
//!
//! A step goes through hundreds of small tensors with the same few ops: gradients are cleared,
//! parameters cast, squares added up, states updated. Each alone is over before a launch is made.
//! So neighbours of one kind on one stream are *joined* where nothing orders them: the program, its
//! proof and its text stay as they are, list order stays valid, and a device that knows how makes
//! one launch of them. What others wait for is over when all of them are.

use super::chained::Chained;
use ir::program::{InstrKind, Instruction, RoleProgram, Space};
use ir::{BufferId, OpKind};
use std::collections::BTreeMap;
use std::ops::Range;

/// Fewest instructions that are joined: a joined launch reads from memory what others are given.
pub(crate) const FEWEST: usize = 4;

/// The name of what many tensors have done to them alike, each by itself.
fn sort(kind: &InstrKind) -> Option<&'static str> {
    match kind {
        InstrKind::Fill { .. } => Some("fill"),
        InstrKind::Compute { kind, .. } => match kind {
            OpKind::Cast { .. }
            | OpKind::Accumulate { .. }
            | OpKind::SumSquares
            | OpKind::AdamW { .. }
            | OpKind::Sgd { .. } => Some(kind.name()),
            _ => None,
        },
        _ => None,
    }
}

/// Bytes of arenas, as ranges that do not meet each other: by space and begin, the end.
#[derive(Default)]
struct Bytes(BTreeMap<(Space, u64), u64>);

impl Bytes {
    /// The last of its ranges that some of these bytes are in.
    fn last_with(&self, space: Space, bytes: &Range<u64>) -> Option<Range<u64>> {
        let before = self.0.range((space, 0)..(space, bytes.end)).next_back();
        let (&(_, start), &end) = before?;
        (end > bytes.start && !bytes.is_empty()).then_some(start..end)
    }
    fn has_some_of(&self, (space, bytes): &(Space, Range<u64>)) -> bool {
        self.last_with(*space, bytes).is_some()
    }
    fn add(&mut self, (space, mut bytes): (Space, Range<u64>)) {
        while let Some(other) = self.last_with(space, &bytes) {
            self.0.remove(&(space, other.start));
            bytes = bytes.start.min(other.start)..bytes.end.max(other.end);
        }
        if !bytes.is_empty() {
            self.0.insert((space, bytes.start), bytes.end);
        }
    }
}

/// The number of instructions that begin together with each of those that a slot plays, which are
/// given by place in its template: 1 of one that is alone, 0 of one that is joined to an earlier one.
/// Those of chains are not joined.
pub(crate) fn joined(
    role: &RoleProgram,
    instructions: &[Instruction],
    played: &[usize],
    microbatch: Option<u32>,
    chained: &Chained,
) -> Vec<usize> {
    let bytes = |b: BufferId| {
        let b = role.buffer(b);
        let start = b.offset_for(microbatch);
        (b.space, start..start + b.bytes)
    };
    let mut counts = vec![1; played.len()];
    let mut first = 0;
    while first < played.len() {
        let of = |k: usize| &instructions[played[k]];
        let sort = |k: usize| sort(&of(k).kind).filter(|_| !chained.has(k));
        let (kind, stream) = (sort(first), of(first).stream);
        let (mut read, mut written) = (Bytes::default(), Bytes::default());
        let mut end = first;
        while end < played.len() {
            let next = of(end);
            let waits = end > first && !(next.deps.is_empty() && next.events.is_empty());
            if kind.is_none() || sort(end) != kind || next.stream != stream || waits {
                break;
            }
            let (reads, writes) = (next.reads(), next.writes());
            let is_ordered = reads.iter().any(|b| written.has_some_of(&bytes(*b)))
                || writes
                    .iter()
                    .map(|b| bytes(*b))
                    .any(|b| written.has_some_of(&b) || read.has_some_of(&b));
            if is_ordered {
                break;
            }
            reads.iter().for_each(|b| read.add(bytes(*b)));
            writes.iter().for_each(|b| written.add(bytes(*b)));
            end += 1;
        }
        let n = end - first;
        if n >= FEWEST {
            counts[first] = n;
            counts[first + 1..end].fill(0);
        }
        first = end.max(first + 1);
    }
    counts
}

#[cfg(test)]
pub(super) mod tests;
