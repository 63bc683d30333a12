//! The least that the busiest of several meshes has to do: layers are not divided.

use std::collections::{BTreeMap, BTreeSet};

/// The least cost of the mesh of a ring that costs most, where each of its stages has a layer and
/// at most `longest`, which are not divided. `kinds` are those of the layers in their order; of each
/// mesh `meshes` has its stages, by their place in the pipeline and the microbatches in flight, and
/// `cost` says what a layer of a kind costs with so many. `None` where it does not.
///
/// Layers of the commonest kind may lie on any mesh, but those of a stage cost what its number in
/// flight makes them cost: of each mesh's stages the cheap ones are filled first. One by one they go
/// where the costs are then least, which makes the largest as small as it can be. Of the other
/// layers the first and the last count, whose meshes are known; where there are more, a stage may be
/// of these alone.
pub(super) fn busiest(
    kinds: &[usize],
    meshes: &[Vec<(usize, u64)>],
    longest: usize,
    cost: &dyn Fn(usize, u64) -> Option<f64>,
) -> Option<f64> {
    let mut counts: BTreeMap<usize, usize> = BTreeMap::new();
    for &kind in kinds {
        *counts.entry(kind).or_default() += 1;
    }
    let (&common, &n_common) = counts.iter().rev().max_by_key(|(_, n)| **n)?;
    let numbers: BTreeSet<u64> = meshes.iter().flatten().map(|(_, n)| *n).collect();
    let of_common = |n: u64| Some((n, cost(common, n)?));
    let of_common: BTreeMap<u64, f64> =
        numbers.into_iter().map(of_common).collect::<Option<_>>()?;
    let last = meshes.iter().flatten().map(|(stage, _)| *stage).max()?;
    let ends = [(0, *kinds.first()?), (last, *kinds.last()?)];
    let is_other = |(_, kind): &&(usize, usize)| *kind != common;
    let all_have_one = ends.iter().filter(is_other).count() + n_common == kinds.len();
    let mut left = n_common;
    let mut all: Vec<Filled> = Vec::with_capacity(meshes.len());
    for stages in meshes {
        let mut filled = Filled::default();
        for &(stage, n) in stages {
            let mut room = longest;
            let others = ends.iter().filter(is_other);
            for (_, kind) in others.filter(|(at, _)| *at == stage) {
                filled.cost += cost(*kind, n)?;
                room = room.saturating_sub(1);
            }
            if all_have_one && room == longest {
                filled.cost += of_common[&n];
                (left, room) = (left.checked_sub(1)?, room.saturating_sub(1));
            }
            filled.room.push((of_common[&n], room));
        }
        filled.room.sort_by(|a, b| b.0.total_cmp(&a.0));
        all.push(filled);
    }
    for _ in 0..left {
        let next = all.iter_mut().filter(|m| m.next().is_some());
        let next = next.min_by(|a, b| a.with_next().total_cmp(&b.with_next()));
        // Where nothing has room, so many layers make no such stages.
        let Some(mesh) = next else {
            return Some(f64::INFINITY);
        };
        mesh.fill();
    }
    all.iter().map(|m| m.cost).reduce(f64::max)
}

/// A mesh of a ring with the layers that it has so far.
#[derive(Default)]
struct Filled {
    cost: f64,
    /// By stage, the dearest first: the cost of another layer and how many more it may have.
    room: Vec<(f64, usize)>,
}

impl Filled {
    /// The cost of another layer.
    fn next(&self) -> Option<f64> {
        let mut free = self.room.iter().rev().filter(|(_, room)| *room > 0);
        free.next().map(|(cost, _)| *cost)
    }

    /// The cost of the mesh with another layer.
    fn with_next(&self) -> f64 {
        self.cost + self.next().unwrap_or(f64::INFINITY)
    }

    /// Adds another layer.
    fn fill(&mut self) {
        while self.room.last().is_some_and(|(_, room)| *room == 0) {
            self.room.pop();
        }
        if let Some((cost, room)) = self.room.last_mut() {
            self.cost += *cost;
            *room -= 1;
        }
    }
}

/// The least that the fullest of so many bins has, of layers of these kinds that are not divided;
/// `costs` are by kind. A relaxation: of the layers that are not of the commonest kind each is
/// looked at as if it were the only one.
pub(super) fn fullest(kinds: &[usize], costs: &[f64], n_bins: usize) -> f64 {
    let mut counts = vec![0usize; costs.len()];
    for &kind in kinds {
        counts[kind] += 1;
    }
    let most = counts.iter().copied().max().unwrap_or(0);
    let Some(common) = counts.iter().position(|&n| n == most) else {
        return 0.0;
    };
    let (size, n_bins_f) = (costs[common], n_bins as f64);
    let all = counts
        .iter()
        .zip(costs)
        .map(|(&n, c)| n as f64 * c)
        .sum::<f64>();
    let others: Vec<f64> = (0..costs.len())
        .filter(|&kind| kind != common && counts[kind] > 0)
        .map(|kind| costs[kind])
        .collect();
    let least = others
        .iter()
        .copied()
        .fold(all / n_bins_f, f64::max)
        .max(size);
    if size <= 0.0 {
        return least;
    }
    // A little more fits than does, so that rounding makes no bound too high.
    let whole = |room: f64| (room.max(0.0) / size * (1.0 + 1e-9)).floor();
    let holds = |fullest: f64| {
        let lost = others.iter().map(|o| whole(fullest) - whole(fullest - o));
        n_bins_f * whole(fullest) - lost.fold(0.0, f64::max) >= counts[common] as f64
    };
    // Whether it holds changes where another layer of the common kind fits, beside another or not.
    let mut tried: Vec<f64> = others
        .iter()
        .chain(&[0.0])
        .flat_map(|o| {
            let first = ((least - o) / size).floor();
            (0..4).map(move |k| (first + f64::from(k)) * size + o)
        })
        .filter(|t| *t >= least)
        .collect();
    tried.sort_by(f64::total_cmp);
    if holds(least) {
        return least;
    }
    tried.into_iter().find(|t| holds(*t)).unwrap_or(least)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::testing::Rng;

    /// The same by trying every way to put the layers into bins.
    fn brute_force(kinds: &[usize], costs: &[f64], bins: &mut [f64]) -> f64 {
        let Some((&kind, rest)) = kinds.split_first() else {
            return bins.iter().copied().fold(0.0, f64::max);
        };
        let mut least = f64::INFINITY;
        for i in 0..bins.len() {
            let before = bins[i];
            bins[i] += costs[kind];
            least = least.min(brute_force(rest, costs, bins));
            bins[i] = before;
        }
        least
    }

    /// The cost of the busiest mesh with the best of all cuts into stages.
    fn best_cut(
        kinds: &[usize],
        meshes: &[Vec<(usize, u64)>],
        longest: usize,
        cost: &dyn Fn(usize, u64) -> f64,
    ) -> f64 {
        let n_stages: usize = meshes.iter().map(Vec::len).sum();
        let mut least = f64::INFINITY;
        // A bit for each place between two layers, set where a stage ends.
        for cuts in 0..1u32 << (kinds.len() - 1) {
            if cuts.count_ones() as usize + 1 != n_stages {
                continue;
            }
            let mut stages: Vec<Vec<usize>> = vec![vec![kinds[0]]];
            for (i, &kind) in kinds.iter().enumerate().skip(1) {
                match (cuts >> (i - 1) & 1 == 1, stages.last_mut()) {
                    (false, Some(stage)) => stage.push(kind),
                    _ => stages.push(vec![kind]),
                }
            }
            if stages.iter().any(|s| s.len() > longest) {
                continue;
            }
            let of_stage = |(stage, n): &(usize, u64)| -> f64 {
                stages[*stage].iter().map(|&kind| cost(kind, *n)).sum()
            };
            let of_mesh = |mesh: &Vec<(usize, u64)>| mesh.iter().map(of_stage).sum::<f64>();
            let most = meshes.iter().map(of_mesh).fold(0.0, f64::max);
            least = least.min(most);
        }
        least
    }

    #[test]
    fn no_cut_has_a_less_busy_mesh() {
        let (mut n_exact, mut n_cuts) = (0, 0);
        for seed in 0..400 {
            let mut rng = Rng::new(seed);
            let (p, v) = (rng.between(1, 3) as usize, rng.between(1, 3) as usize);
            let n_common = rng.between(p as u64 * v as u64, 9) as usize;
            let mut kinds = vec![0; n_common];
            // First and last layers of their own, and sometimes one between.
            if rng.between(0, 1) == 1 {
                kinds.insert(0, 1);
            }
            if rng.between(0, 3) == 0 {
                kinds.insert(kinds.len() / 2, 3);
            }
            if rng.between(0, 1) == 1 {
                kinds.push(2);
            }
            let longest = rng.between(1, 4) as usize;
            let own: Vec<f64> = (0..4).map(|_| rng.between(1, 12) as f64 / 4.0).collect();
            let of_memory = rng.between(0, 4) as f64 / 8.0;
            let cost = |kind: usize, n: u64| own[kind] + of_memory * n as f64;
            // Around, or there and back as in ZB-V.
            let back = rng.between(0, 2) == 0;
            let stage = |mesh: usize, level: usize| match back && level % 2 == 1 {
                true => (level * p + p - 1 - mesh, in_flight(mesh, level)),
                false => (level * p + mesh, in_flight(mesh, level)),
            };
            let mesh = |mesh: usize| (0..v).map(|level| stage(mesh, level)).collect();
            let meshes: Vec<Vec<(usize, u64)>> = (0..p).map(mesh).collect();
            let least = busiest(&kinds, &meshes, longest, &|kind, n| Some(cost(kind, n)));
            let exact = best_cut(&kinds, &meshes, longest, &cost);
            let least = least.unwrap_or(0.0);
            assert!(least <= exact + 1e-9, "seed {seed}: {least}, not {exact}");
            n_cuts += u32::from(exact.is_finite());
            n_exact += u32::from(exact.is_finite() && exact - least < 1e-9);
        }
        assert!(n_cuts > 150 && n_exact > 100, "{n_exact} of {n_cuts}");
    }

    /// Fewer on later meshes and levels, as interleaved stages have them.
    fn in_flight(mesh: usize, level: usize) -> u64 {
        (9 - 2 * mesh - 2 * level.min(2)) as u64
    }

    /// Six equal layers as two stages on each of two meshes, one of which costs more: four on the
    /// other are its most.
    #[test]
    fn cheap_stages_are_filled_first() {
        let meshes = [vec![(0, 2), (2, 2)], vec![(1, 1), (3, 1)]];
        let cost = |_: usize, n: u64| Some(n as f64);
        assert_eq!(busiest(&[0; 6], &meshes, 2, &cost), Some(4.0));
        assert_eq!(busiest(&[0; 7], &meshes, 2, &cost), Some(6.0));
        assert_eq!(busiest(&[0; 9], &meshes, 2, &cost), Some(f64::INFINITY));
        assert_eq!(busiest(&[0; 6], &meshes, 2, &|_, _| None), None);
    }

    #[test]
    fn the_fullest_bin_has_no_less() {
        let (mut n_exact, mut n_above_mean) = (0, 0);
        for seed in 0..200 {
            let mut rng = Rng::new(seed);
            let n_bins = rng.between(1, 3) as usize;
            let common = rng.between(1, 5) as usize;
            let mut kinds = vec![0; common];
            kinds.extend(1..=rng.between(0, 2) as usize);
            let costs: Vec<f64> = (0..3).map(|_| rng.between(0, 12) as f64 / 4.0).collect();
            let least = fullest(&kinds, &costs, n_bins);
            let exact = brute_force(&kinds, &costs, &mut vec![0.0; n_bins]);
            assert!(least <= exact + 1e-9, "seed {seed}: {least}, not {exact}");
            let mean = kinds.iter().map(|&k| costs[k]).sum::<f64>() / n_bins as f64;
            assert!(least >= mean - 1e-9, "seed {seed}");
            n_exact += u32::from(exact - least < 1e-9);
            n_above_mean += u32::from(least > mean * 1.01);
        }
        assert!(
            n_exact > 150 && n_above_mean > 80,
            "{n_exact}, {n_above_mean}"
        );
    }

    /// Ten equal layers on four meshes: one has three of them.
    #[test]
    fn layers_are_not_divided() {
        assert_eq!(fullest(&[0; 10], &[2.0], 4), 6.0);
        assert_eq!(fullest(&[], &[], 4), 0.0);
    }
}
