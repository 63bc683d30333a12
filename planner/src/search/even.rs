//! Cuts of the layers into a number of stages that take times as equal as can be: the least sum
//! of squares. Where many stages share few meshes that evens out the meshes too, their work and
//! their memory, which the largest time alone does not: with 26 layers in 8 stages none can be
//! below 4, and cuts into 4, 4, 4, 4, 4, 4, 1 and 1 are as good for it as 4, 4, 3, 3, 3, 3, 3, 3.

use std::ops::Range;

/// The relative difference of sums that are equal but for the order of their terms.
const ROUNDING: f64 = 1e-12;

/// The cuts of `n_layers` layers into `n_stages` stages, where `time` gives the seconds of a
/// stage, and none where it cannot be. Of equal ones those that cut the last stages longer,
/// which have less in flight; the long ones then lie on all meshes in turn.
/// `None` where there are none.
pub(super) fn even_cuts(
    n_layers: usize,
    n_stages: usize,
    time: impl Fn(Range<usize>) -> Option<f64>,
) -> Option<Vec<Range<usize>>> {
    let mut stages: Vec<(usize, usize, f64)> = Vec::new();
    for end in 1..=n_layers {
        for start in 0..end {
            stages.extend(time(start..end).map(|t| (start, end, t * t)));
        }
    }
    // By number of stages and layers: the least sum, and where the last of the stages begins.
    let mut least = vec![vec![(f64::INFINITY, 0); n_layers + 1]; n_stages + 1];
    least[0][0].0 = 0.0;
    for k in 0..n_stages {
        let (before, after) = least.split_at_mut(k + 1);
        let (before, after) = (&before[k], &mut after[0]);
        for &(start, end, square) in &stages {
            let sum = before[start].0 + square;
            // Shorter starts come first, and equal sums are rounded differently.
            if sum < after[end].0 * (1.0 - ROUNDING) {
                after[end] = (sum, start);
            }
        }
    }
    if !least[n_stages][n_layers].0.is_finite() {
        return None;
    }
    let mut cuts = Vec::with_capacity(n_stages);
    let mut end = n_layers;
    for k in (1..=n_stages).rev() {
        let start = least[k][end].1;
        cuts.push(start..end);
        end = start;
    }
    cuts.reverse();
    Some(cuts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::testing::Rng;

    /// Sums of squares of all cuts, in turn.
    fn every(n_layers: usize, n_stages: usize, time: &dyn Fn(Range<usize>) -> Option<f64>) -> f64 {
        if n_stages == 0 {
            return if n_layers == 0 { 0.0 } else { f64::INFINITY };
        }
        let of_last = |start: usize| {
            let last = time(start..n_layers).map_or(f64::INFINITY, |t| t * t);
            every(start, n_stages - 1, time) + last
        };
        (0..n_layers).map(of_last).fold(f64::INFINITY, f64::min)
    }

    #[test]
    fn no_cuts_are_more_even() {
        let mut rng = Rng::new(1);
        let mut below = |n: u64| rng.below(n);
        let mut impossible = 0;
        for _ in 0..300 {
            let (n_layers, n_stages) = (1 + below(8) as usize, 1 + below(5) as usize);
            let layers: Vec<f64> = (0..n_layers).map(|_| 1.0 + below(9) as f64).collect();
            let longest = 1 + below(4) as usize;
            let time =
                |r: Range<usize>| (r.len() <= longest).then(|| layers[r].iter().sum::<f64>() + 0.5);
            let least = every(n_layers, n_stages, &time);
            let Some(cuts) = even_cuts(n_layers, n_stages, time) else {
                assert!(least.is_infinite());
                impossible += 1;
                continue;
            };
            assert_eq!((cuts.len(), cuts[0].start), (n_stages, 0));
            assert_eq!(cuts[n_stages - 1].end, n_layers);
            assert!(cuts.windows(2).all(|w| w[0].end == w[1].start));
            let squares = cuts.into_iter().map(|r| time(r).unwrap().powi(2));
            let sum = squares.sum::<f64>();
            assert!((sum - least).abs() <= 1e-9 * least, "{sum}, not {least}");
        }
        assert!((10..290).contains(&impossible), "{impossible}");
    }

    /// As Megatron-LM lays out 24 blocks: the embedding beside a whole stage of them, the output
    /// layer, which takes as long as a block, in the place of one.
    #[test]
    fn light_layers_join_full_stages() {
        let seconds = |l: usize| if l == 0 { 0.1 } else { 1.0 };
        let time = |r: Range<usize>| Some(r.map(seconds).sum());
        let cuts = even_cuts(25, 8, time).unwrap();
        let lengths: Vec<usize> = cuts.iter().map(Range::len).collect();
        assert_eq!(lengths, [4, 3, 3, 3, 3, 3, 3, 3]);
    }

    /// Layers whose times are no short binary fractions: sums of their squares differ by rounding.
    #[test]
    fn of_equal_cuts_the_last_stages_are_the_longer_ones() {
        for (n_layers, n_meshes, virtual_stages) in [(56, 8, 2), (80, 4, 16), (30, 4, 3)] {
            let n_stages = n_meshes * virtual_stages;
            let time = |r: Range<usize>| Some(r.map(|_| 0.1).sum::<f64>() + 0.003);
            let cuts = even_cuts(n_layers, n_stages, time).unwrap();
            let lengths: Vec<usize> = cuts.iter().map(Range::len).collect();
            assert!(lengths.is_sorted(), "{lengths:?}");
            let own = |i: usize| lengths.iter().skip(i).step_by(n_meshes).sum::<usize>();
            let meshes: Vec<usize> = (0..n_meshes).map(own).collect();
            let range = n_layers / n_meshes..=n_layers.div_ceil(n_meshes);
            assert!(meshes.iter().all(|n| range.contains(n)), "{meshes:?}");
        }
    }
}
