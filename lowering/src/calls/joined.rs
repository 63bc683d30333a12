//! Neighbours that do the same to many tensors.
//!
//! A step goes through hundreds of small tensors with the same few ops: gradients are cleared,
//! parameters cast, squares added up, states updated. Each alone is over before a launch is made.
//! So neighbours of one kind on one stream are *joined* where nothing orders them, and a device that
//! knows how makes one launch of them. What others wait for is over when all of them are.

use super::bytes;
use ir::OpKind;
use ir::program::{Call, FEWEST_JOINED, InstrKind, Instruction, RoleProgram, Space};
use std::collections::BTreeMap;
use std::ops::Range;

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
struct Taken(BTreeMap<(Space, u64), u64>);

impl Taken {
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

/// Marks the instructions of a template that are joined, but for those of chains.
pub(super) fn join(role: &RoleProgram, instructions: &[Instruction], calls: &mut [Call]) {
    let is_chained = |call: Option<&Call>| matches!(call, Some(Call::Chained { .. }));
    let sorts: Vec<Option<&str>> = (0..instructions.len())
        .map(|i| {
            let is_alone = !is_chained(calls.get(i)) && !is_chained(calls.get(i + 1));
            sort(&instructions[i].kind).filter(|_| is_alone)
        })
        .collect();
    let mut first = 0;
    while first < instructions.len() {
        let (kind, stream) = (sorts[first], instructions[first].stream);
        let (mut read, mut written) = (Taken::default(), Taken::default());
        let mut end = first;
        while end < instructions.len() {
            let next = &instructions[end];
            let waits = end > first && !(next.deps.is_empty() && next.events.is_empty());
            if kind.is_none() || sorts[end] != kind || next.stream != stream || waits {
                break;
            }
            let bytes = |b: &ir::BufferId| bytes(role, *b);
            let (reads, writes) = (next.reads(), next.writes());
            let is_ordered = reads.iter().any(|b| written.has_some_of(&bytes(b)))
                || writes
                    .iter()
                    .map(bytes)
                    .any(|b| written.has_some_of(&b) || read.has_some_of(&b));
            if is_ordered {
                break;
            }
            reads.iter().for_each(|b| read.add(bytes(b)));
            writes.iter().for_each(|b| written.add(bytes(b)));
            end += 1;
        }
        if end - first >= FEWEST_JOINED {
            calls[first + 1..end].fill(Call::Joined);
        }
        first = end.max(first + 1);
    }
}
