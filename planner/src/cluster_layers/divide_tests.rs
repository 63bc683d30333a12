//! The dynamic program against every division there is.

use super::*;

/// SplitMix64 (Steele, Lea & Flood 2014).
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}

fn weights(row: &[(u64, u64)]) -> Vec<Weight> {
    row.iter()
        .map(|&(flops, bytes)| Weight { flops, bytes })
        .collect()
}

/// Every division into `n` layers, as ends.
fn all(pieces: usize, n: usize) -> Vec<Vec<usize>> {
    let sets = (0u32..1 << (pieces - 1)).filter(|s| s.count_ones() as usize == n - 1);
    sets.map(|s| {
        let mut ends: Vec<usize> = (1..pieces).filter(|i| s >> (i - 1) & 1 == 1).collect();
        ends.push(pieces);
        ends
    })
    .collect()
}

fn layer_flops(pieces: &[Weight], ends: &[usize]) -> Vec<u128> {
    let starts = [0].into_iter().chain(ends.iter().copied());
    starts
        .zip(ends)
        .map(|(a, &b)| pieces[a..b].iter().map(|p| u128::from(p.flops)).sum())
        .collect()
}

/// The definition in the module header, from all divisions.
fn brute_force(pieces: &[Weight], n: usize) -> Vec<usize> {
    let largest = |ends: &Vec<usize>| layer_flops(pieces, ends).into_iter().max().unwrap_or(0);
    let widest = |ends: &Vec<usize>| {
        let cuts = &ends[..ends.len() - 1];
        cuts.iter().map(|&e| pieces[e - 1].bytes).max().unwrap_or(0)
    };
    let squares =
        |ends: &Vec<usize>| -> u128 { layer_flops(pieces, ends).iter().map(|f| f * f).sum() };
    let total: u128 = pieces.iter().map(|p| u128::from(p.flops)).sum();
    let mut left = all(pieces.len(), n);
    let least = left.iter().map(&largest).min().unwrap_or(0);
    // 2 n flops <= 3 total is flops <= 1.5 total / n.
    left.retain(|e| largest(e) <= least || 2 * n as u128 * largest(e) <= 3 * total);
    let narrowest = left.iter().map(&widest).min().unwrap_or(0);
    left.retain(|e| widest(e) <= narrowest);
    let best = left.iter().map(&squares).min().unwrap_or(0);
    left.retain(|e| squares(e) == best);
    left.into_iter()
        .min_by_key(|e| e.iter().rev().copied().collect::<Vec<_>>())
        .expect("there is a division")
}

#[test]
fn equals_brute_force_on_random_rows() {
    let mut random = Random(1);
    let mut compared = 0;
    for _ in 0..400 {
        let n_pieces = 1 + random.below(9) as usize;
        // Few different figures make ties; free pieces and one heavy piece occur.
        let (spread, width) = ([2, 5, 100][random.below(3) as usize], 1 + random.below(4));
        let mut row: Vec<(u64, u64)> = (0..n_pieces)
            .map(|_| (random.below(spread), random.below(width)))
            .collect();
        if random.below(4) == 0 {
            let heavy = random.below(n_pieces as u64) as usize;
            row[heavy].0 += 1000;
        }
        let pieces = weights(&row);
        for n in 1..=n_pieces {
            assert_eq!(
                divide(&pieces, n),
                brute_force(&pieces, n),
                "{row:?} in {n}"
            );
            compared += 1;
        }
    }
    assert!(compared > 1000);
}

#[test]
fn the_largest_balanced_number_is_the_largest() {
    let mut random = Random(2);
    for _ in 0..200 {
        let n_pieces = 1 + random.below(8) as usize;
        let row: Vec<(u64, u64)> = (0..n_pieces).map(|_| (random.below(9), 1)).collect();
        let pieces = weights(&row);
        let total: u128 = row.iter().map(|r| u128::from(r.0)).sum();
        let fits = |n: usize| {
            all(n_pieces, n).iter().any(|ends| {
                let flops = layer_flops(&pieces, ends);
                flops.iter().all(|f| 2 * n as u128 * f <= 3 * total)
            })
        };
        let expected = (1..=n_pieces).rev().find(|&n| fits(n)).unwrap_or(1);
        assert_eq!(most_balanced(&pieces, n_pieces), expected, "{row:?}");
    }
}

/// The example of docs/inter_op.md.
#[test]
fn worked_example() {
    let pieces = weights(&[(4, 8), (2, 2), (2, 8), (4, 8), (3, 2), (1, 0)]);
    // F = max(1.5 * 16 / 2, 8) = 12: the cuts of 2 bytes leave 6 + 10 or 15 + 1 FLOPs.
    assert_eq!(divide(&pieces, 2), [2, 6]);
    // F = max(1.5 * 16 / 3, 6) = 8: with cuts of 2 bytes alone the middle layer has 9 FLOPs, so
    // some cut has 8 bytes; 6 + 6 + 4 is the most even of those.
    assert_eq!(divide(&pieces, 3), [2, 4, 6]);
}

/// A heavy piece makes the others' layers small, it does not make division impossible.
#[test]
fn a_heavy_piece_is_a_layer() {
    let pieces = weights(&[(1, 1), (1, 1), (50, 1), (1, 1)]);
    assert_eq!(divide(&pieces, 3), [2, 3, 4]);
    assert_eq!(most_balanced(&pieces, 4), 1);
}
