//! Which bytes of a member's contribution to a collective another member reads, and how the buffers
//! of a contribution lie.

use super::{Collective, Item};
use crate::execute::collective;
use ir::collective::CollectiveKind;
use std::ops::Range;

/// All-reduces of at least this many bytes are done in two phases.
const TWO_PHASE_BYTES: usize = 1 << 16;
/// The most parts that a contribution is sent in; of one with more, all between the first and the
/// last is sent.
const MOST_PARTS: usize = 4096;

/// Whether an all-reduce is one of parts, which are then shared: the same for all its members.
pub(super) fn in_two_phases(of: &Collective) -> bool {
    let bytes = |i: &Item| i.elements * i.dtype.bytes() as usize;
    of.group.len() > 1 && of.items.iter().map(bytes).sum::<usize>() >= TWO_PHASE_BYTES
}

/// The bytes of the contribution of member `from` that member `to` reads.
pub(super) fn needed(
    of: &Collective,
    (from, to): (usize, usize),
    shares_parts: bool,
    len: usize,
) -> Vec<Range<usize>> {
    let whole = || Vec::from_iter(Some(0..len));
    let places = || {
        lie(of
            .items
            .iter()
            .map(|i| i.elements * i.dtype.bytes() as usize))
    };
    let n = of.group.len();
    match of.kind {
        _ if shares_parts => whole(),
        CollectiveKind::AllReduce(_) if in_two_phases(of) => {
            let chunks = chunks(of, to).into_iter().zip(places());
            chunks
                .map(|(chunk, at)| at.start + chunk.start..at.start + chunk.end)
                .collect()
        }
        CollectiveKind::AllReduce(_) | CollectiveKind::AllGather => whole(),
        CollectiveKind::ReduceScatter(_) | CollectiveKind::AllToAll => {
            let pieces = of.items.iter().zip(places()).flat_map(|(item, at)| {
                let pieces = item.operand.of(at.len(), to);
                pieces.map(move |piece| at.start + piece.start..at.start + piece.end)
            });
            pieces.collect()
        }
        CollectiveKind::Shift if to == (from + 1) % n.max(1) => whole(),
        CollectiveKind::Shift => Vec::new(),
    }
}

/// Ranges, ascending and apart, that cover all of these.
pub(super) fn united(mut ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    ranges.retain(|r| !r.is_empty());
    ranges.sort_unstable_by_key(|r| (r.start, r.end));
    let mut out: Vec<Range<usize>> = Vec::new();
    for r in ranges {
        match out.last_mut() {
            Some(last) if r.start <= last.end => last.end = last.end.max(r.end),
            _ => out.push(r),
        }
    }
    match (out.first(), out.last()) {
        (Some(first), Some(last)) if out.len() > MOST_PARTS => {
            Vec::from_iter(Some(first.start..last.end))
        }
        _ => out,
    }
}

/// The bytes of every item that a member of a two-phase all-reduce reduces.
pub(super) fn chunks(of: &Collective, member: usize) -> Vec<Range<usize>> {
    let chunk = |item: &Item| {
        let size = item.dtype.bytes() as usize;
        let chunk = collective::chunk(item.elements, member, of.group.len());
        chunk.start * size..chunk.end * size
    };
    of.items.iter().map(chunk).collect()
}

/// Where blocks of these lengths lie one after the other, each aligned to 8.
pub(super) fn lie(lens: impl Iterator<Item = usize>) -> Vec<Range<usize>> {
    let mut at: usize = 0;
    lens.map(|len| {
        let start = at.next_multiple_of(8);
        at = start + len;
        start..at
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::execute::collective::Rows;
    use ir::{Contract, DType, Order, Rank, Reduction};

    fn of(kind: CollectiveKind, elements: usize, operand: Rows) -> Collective {
        let item = Item {
            dtype: DType::F32,
            elements,
            operand,
            result: Rows::ONE,
        };
        Collective {
            kind,
            group: (0..3).map(Rank).collect(),
            number: 0,
            contract: Contract::new(kind, DType::F32, Order::Fixed),
            items: vec![item],
        }
    }

    #[test]
    fn only_what_is_read_is_needed() {
        let sum = Reduction::Sum;
        let rows = Rows { rows: 2, n: 3 };
        let scattered = of(CollectiveKind::ReduceScatter(sum), 12, rows);
        let pieces = needed(&scattered, (0, 1), false, 48);
        assert_eq!(pieces, [8..16, 32..40]);
        let shifted = of(CollectiveKind::Shift, 12, Rows::ONE);
        assert!(needed(&shifted, (0, 2), false, 48).is_empty());
        assert_eq!(needed(&shifted, (2, 0), false, 48).len(), 1);
        let reduced = of(CollectiveKind::AllReduce(sum), 30_000, Rows::ONE);
        assert!(in_two_phases(&reduced));
        let chunk = needed(&reduced, (0, 1), false, 120_000);
        assert_eq!((chunk.len(), &chunk[0]), (1, &(40_000..80_000)));
        // The parts themselves all need.
        let part = needed(&reduced, (0, 1), true, 40_000);
        assert_eq!((part.len(), &part[0]), (1, &(0..40_000)));
    }

    #[test]
    fn ranges_are_united() {
        let ranges = |list: &[(usize, usize)]| list.iter().map(|&(a, b)| a..b).collect();
        let all = united(ranges(&[(8, 10), (0, 2), (2, 4), (9, 12), (5, 5)]));
        assert_eq!(all, ranges(&[(0, 4), (8, 12)]) as Vec<Range<usize>>);
        let many = (0..2 * MOST_PARTS).map(|i| 2 * i..2 * i + 1).collect();
        assert_eq!(united(many).len(), 1);
    }
}
