//! The dynamic program: cuts a row of pieces into a given number of layers.
//!
//! With pieces `1..=K`, `b(i)` the bytes that cross the place behind piece `i` (`b(0) = 0`),
//! `f(i..k)` the FLOPs of pieces `i+1..=k` and L layers,
//!
//! ```text
//!   G(0, 0) = 0
//!   G(k, r) = min over i < k with f(i..k) <= F of max(G(i, r-1), b(i))
//!   F       = max((1 + delta) * f(0..K) / L, least F that L layers can keep)
//! ```
//!
//! `G(K, L)` is the fewest bytes that the widest cut can have (Alpa, Zheng et al. 2022,
//! section 5.2, with delta = 1/2 as in its implementation). Two additions. `F` has a second
//! term, so that a piece that is heavier than a fair share makes uneven layers and not none.
//! And of all divisions whose cuts have at most `G(K, L)` bytes each, the one with the least
//! sum of squared FLOPs is taken, the same recurrence with `+` in place of `max`: that is
//! least variance, Alpa's rule for ties. What is still equal goes to the division whose last
//! layer begins earliest, then the one before it, and so on.

/// Layers may exceed a fair share of the FLOPs by half of it: 1 + delta = 3 / 2.
const SLACK: (u128, u128) = (3, 2);

/// A piece as the dynamic program sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Weight {
    /// FLOPs of the piece.
    pub flops: u64,
    /// Bytes that cross the place behind it; of no meaning behind the last.
    pub bytes: u64,
}

/// The ends of the layers of the best division into `n`, the last being the number of pieces.
///
/// # Panics
/// Unless `1 <= n <= pieces.len()`.
pub(super) fn divide(pieces: &[Weight], n: usize) -> Vec<usize> {
    assert!(0 < n && n <= pieces.len(), "every layer has a piece");
    let limit = fair_share(pieces, n).max(least_limit(pieces, n));
    let bytes = |i: usize| i.checked_sub(1).map_or(0, |i| pieces[i].bytes);
    let (widest, _) = recurrence(pieces, n, limit, &|best: u64, i, _| {
        Some(best.max(bytes(i)))
    });
    let narrow = |best: u128, i, flops: u128| {
        (bytes(i) <= widest).then(|| best.saturating_add(flops.saturating_mul(flops)))
    };
    recurrence(pieces, n, limit, &narrow).1
}

/// The largest number of layers, up to `most`, of which none exceeds a fair share by more
/// than the slack.
pub(super) fn most_balanced(pieces: &[Weight], most: usize) -> usize {
    let balanced = |n: &usize| least_limit(pieces, *n) <= fair_share(pieces, *n);
    (2..=most.min(pieces.len()))
        .rev()
        .find(balanced)
        .unwrap_or(1)
}

/// `(1 + delta) * total / n`.
fn fair_share(pieces: &[Weight], n: usize) -> u128 {
    total(pieces) * SLACK.0 / (SLACK.1 * n as u128)
}

fn total(pieces: &[Weight]) -> u128 {
    pieces.iter().map(|p| u128::from(p.flops)).sum()
}

/// The least FLOPs that the largest of `n` layers can have.
fn least_limit(pieces: &[Weight], n: usize) -> u128 {
    let heaviest = pieces.iter().map(|p| u128::from(p.flops)).max();
    let (mut low, mut high) = (heaviest.unwrap_or(0), total(pieces));
    while low < high {
        let middle = low + (high - low) / 2;
        if n_layers_within(pieces, middle) <= n {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low
}

/// The fewest layers of at most `limit` FLOPs, which no piece exceeds.
fn n_layers_within(pieces: &[Weight], limit: u128) -> usize {
    let (mut n, mut flops) = (1, 0);
    for p in pieces {
        flops += u128::from(p.flops);
        if flops > limit {
            n += 1;
            flops = u128::from(p.flops);
        }
    }
    n
}

/// The least value of a division into `n` layers of at most `limit` FLOPs each, and its ends.
/// `extend(value, i, flops)` is the value with one more layer, which begins behind piece `i`
/// and has these FLOPs; `None` forbids it. It must grow with its first argument.
///
/// The caller sees to it that there is such a division.
fn recurrence<C: Copy + Ord + Default>(
    pieces: &[Weight],
    n: usize,
    limit: u128,
    extend: &dyn Fn(C, usize, u128) -> Option<C>,
) -> (C, Vec<usize>) {
    let mut row: Vec<Option<C>> = vec![None; pieces.len() + 1];
    row[0] = Some(C::default());
    // For each layer and each end, where the layer begins.
    let mut begins: Vec<Vec<u32>> = Vec::with_capacity(n);
    for _ in 0..n {
        let mut next = vec![None; pieces.len() + 1];
        let mut begin = vec![0; pieces.len() + 1];
        for end in 1..=pieces.len() {
            let mut flops = 0u128;
            for i in (0..end).rev() {
                flops += u128::from(pieces[i].flops);
                if flops > limit {
                    break;
                }
                let value = row[i].and_then(|best| extend(best, i, flops));
                if let Some(value) = value
                    && next[end].is_none_or(|best| value <= best)
                {
                    (next[end], begin[end]) = (Some(value), i as u32);
                }
            }
        }
        row = next;
        begins.push(begin);
    }
    let best = row[pieces.len()].expect("the limit is one that n layers can keep");
    let mut ends = vec![pieces.len()];
    for begin in begins[1..].iter().rev() {
        ends.push(begin[ends[ends.len() - 1]] as usize);
    }
    ends.reverse();
    (best, ends)
}

#[cfg(test)]
#[path = "divide_tests.rs"]
mod tests;
