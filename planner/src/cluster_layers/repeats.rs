//! Repeated blocks: runs of equal periods in the row of pieces.
//!
//! Two pieces are equal when their ops correspond one to one in kind, types and operands.
//! Paths do not count, nor do random keys, which are paths. A source that only its piece uses
//! is part of the piece; one that several use (a tied table) is known by its path.

use super::places::Piece;
use ir::{Graph, OpId, OpKind, ValueId};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::Range;

/// A run counts when it holds at least this share of all FLOPs: 1 in so many.
const SHARE: u64 = 256;
/// Pieces times periods that are compared; more pieces have shorter periods.
const COMPARED: usize = 1 << 24;

/// `copies` equal neighbours of `period` pieces each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub start: usize,
    pub period: usize,
    pub copies: usize,
}

impl Run {
    pub(super) fn end(&self) -> usize {
        self.start + self.period * self.copies
    }
}

/// The class of every piece; equal pieces have equal classes.
pub(super) fn classes(graph: &Graph, pieces: &[Piece]) -> Vec<usize> {
    let mut piece_of = vec![0; graph.ops().len()];
    for (p, piece) in pieces.iter().enumerate() {
        piece.ops.iter().for_each(|id| piece_of[id.index()] = p);
    }
    let mut shared = vec![false; graph.ops().len()];
    for (id, op) in graph.iter() {
        for &v in &op.inputs {
            let producer = graph.value(v).producer;
            shared[producer.index()] |= piece_of[producer.index()] != piece_of[id.index()];
        }
    }
    let mut known: BTreeMap<String, usize> = BTreeMap::new();
    let mut before: Option<ValueId> = None;
    let mut classes = Vec::with_capacity(pieces.len());
    for piece in pieces {
        let text = signature(graph, piece, before, &shared);
        let next = known.len();
        classes.push(*known.entry(text).or_insert(next));
        before = piece.crossing;
    }
    classes
}

fn signature(graph: &Graph, piece: &Piece, before: Option<ValueId>, shared: &[bool]) -> String {
    let mut out = String::new();
    let mut local: BTreeMap<OpId, usize> = BTreeMap::new();
    let is_shared = |id: OpId| shared[id.index()] && graph.op(id).kind.is_source();
    for &id in piece.ops.iter().filter(|&&id| !is_shared(id)) {
        let op = graph.op(id);
        let _ = write!(out, "{:?}", without_key(&op.kind));
        for &v in &op.inputs {
            let value = graph.value(v);
            let producer = value.producer;
            let _ = match local.get(&producer) {
                Some(k) => write!(out, "<{k}:{}", value.result),
                None if Some(v) == before => write!(out, "<before:{}", value.ty),
                None => write!(out, "<@{producer}:{}", value.result),
            };
        }
        for &v in &op.outputs {
            let _ = write!(out, ">{}", graph.ty(v));
            if piece.crossing == Some(v) {
                out.push('!');
            }
        }
        out.push('\n');
        let position = local.len();
        local.insert(id, position);
    }
    out
}

/// The kind with its random key, a path, left out.
pub(crate) fn without_key(kind: &OpKind) -> Cow<'_, OpKind> {
    let mut own = Cow::Borrowed(kind);
    let has_key = matches!(
        kind,
        OpKind::Dropout { .. } | OpKind::Attention { .. } | OpKind::AttentionGrad { .. }
    );
    if has_key
        && let OpKind::Dropout { key, .. }
        | OpKind::Attention { key, .. }
        | OpKind::AttentionGrad { key, .. } = own.to_mut()
    {
        key.clear();
    }
    own
}

/// The runs worth a layer per copy, first to last: the one that holds the most FLOPs, then
/// those before and behind it.
pub(super) fn runs(classes: &[usize], flops: &[u64]) -> Vec<Run> {
    let mut sums = vec![0u128];
    for f in flops {
        sums.push(sums[sums.len() - 1] + u128::from(*f));
    }
    let mut found = Vec::new();
    let mut ranges: Vec<Range<usize>> = std::iter::once(0..classes.len()).collect();
    while let Some(range) = ranges.pop() {
        if let Some(run) = best_run(classes, &sums, range.clone()) {
            ranges.extend([range.start..run.start, run.end()..range.end]);
            found.push(run);
        }
    }
    found.sort_by_key(|run| run.start);
    found
}

/// The run with the most FLOPs in a range; of equal ones that of the shortest period, then
/// the first.
fn best_run(classes: &[usize], sums: &[u128], range: Range<usize>) -> Option<Run> {
    let n = range.len();
    let whole = sums[sums.len() - 1];
    let mut best: Option<(u128, Run)> = None;
    for period in 1..=(n / 2).min(COMPARED / n.max(1)) {
        let mut at = range.start;
        while at + period < range.end {
            let rest = at..range.end - period;
            let equal = rest.take_while(|&i| classes[i] == classes[i + period]);
            let equal = equal.count();
            // `equal` pieces from `at` on equal those a period later.
            for turn in 0..=equal % period {
                let run = Run {
                    start: at + turn,
                    period,
                    copies: (equal - turn) / period + 1,
                };
                let flops = sums[run.end()] - sums[run.start];
                let enough = flops * u128::from(SHARE) >= whole && flops > 0;
                if run.copies > 1 && enough && best.is_none_or(|(most, _)| flops > most) {
                    best = Some((flops, run));
                }
                if equal < period {
                    break;
                }
            }
            at += equal + 1;
        }
    }
    best.map(|(_, run)| run)
}

#[cfg(test)]
#[path = "repeats_tests.rs"]
mod tests;
