//! Stages whose layers differ under one price on memory: the first take what a high price makes
//! them take, the others what a lower one does.
//!
//! Under one price all equal layers choose alike, so stages come in leaps: either all layers
//! recompute, or none. What fits best is in between. With `k` the number of first layers that save
//! memory, the stage takes the memory and the time of `k` layers of the one and the rest of the
//! other, so the smallest `k` that fits is the fastest. For a stack of equal layers whose choices
//! are the corners of the convex hull of (time, bytes) that is within one layer of the best of all
//! assignments, because the best relaxed one mixes two neighbouring corners (Everett 1963; tested
//! against all assignments).

use crate::layer_model::{LayerCost, Weights};
use crate::stage::StagePath;

/// The prices that a stage's layers were chosen under, as rungs of [`super::scale`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rungs {
    /// That of the first layers.
    pub(super) first: u16,
    /// That of the others.
    pub(super) rest: u16,
    /// Number of first layers.
    pub(super) n_first: u16,
}

impl Rungs {
    /// Not looked at yet.
    pub(super) const UNKNOWN: Rungs = Rungs {
        first: u16::MAX,
        rest: u16::MAX,
        n_first: 0,
    };

    /// All layers under one price.
    pub(super) fn one(rung: usize) -> Rungs {
        Rungs {
            first: rung as u16,
            rest: rung as u16,
            n_first: 0,
        }
    }

    /// Whether no price on memory had a say.
    pub(super) fn are_free(self) -> bool {
        self.rest == 0 && self.n_first == 0
    }

    /// All layers alike.
    pub(super) fn is_one(self) -> bool {
        self.n_first == 0
    }

    /// The number of a stage-table entry: a shape and its rungs.
    pub(super) fn tag(self, shape: usize) -> u64 {
        let of = |part: u16, place: u32| u64::from(part) << (16 * place);
        (shape as u64) << 48 | of(self.first, 2) | of(self.rest, 1) | of(self.n_first, 0)
    }

    /// Shape and rungs of an entry.
    pub(super) fn of_tag(tag: u64) -> (usize, Rungs) {
        let part = |place: u32| (tag >> (16 * place)) as u16;
        let rungs = Rungs {
            first: part(2),
            rest: part(1),
            n_first: part(0),
        };
        ((tag >> 48) as usize, rungs)
    }
}

/// Boundaries and layers of two paths joined behind the first `n` layers of the first; none where
/// they do not meet in one layout there.
pub(super) fn joined(first: &StagePath, rest: &StagePath, n: usize) -> Option<LayerCost> {
    let meet = first.boundaries.get(n)? == rest.boundaries.get(n)?;
    let layers = first.layers[..n].iter().chain(&rest.layers[n..]);
    meet.then(|| layers.fold(LayerCost::default(), LayerCost::then))
}

/// The stages of one sequence of layers that are of use: those under one price, each once, and for
/// each of these numbers of microbatches in flight the fastest mix that fits, where it is faster
/// than what fits of them. `paths` are by rung; `weights` say how time counts.
pub(super) fn mixed(
    paths: &[(usize, &StagePath)],
    weights: Weights,
    in_flight: &[u64],
    capacity: u64,
) -> Vec<(Rungs, LayerCost)> {
    // Many prices lead to the same choice.
    let mut distinct: Vec<(usize, &StagePath)> = Vec::new();
    for &(rung, path) in paths {
        if !distinct.iter().any(|(_, known)| known.cost == path.cost) {
            distinct.push((rung, path));
        }
    }
    let seconds = |c: &LayerCost| weights.seconds_of_layers(c);
    let bytes = |c: &LayerCost, n: u64| {
        let saved = u128::from(c.saved_bytes) * u128::from(n);
        u128::from(c.static_bytes) + u128::from(c.transient_bytes) + saved
    };
    let mut found: Vec<(Rungs, LayerCost)> = distinct
        .iter()
        .map(|(rung, path)| (Rungs::one(*rung), path.cost))
        .collect();
    let sums: Vec<Sums> = distinct.iter().map(|(_, path)| Sums::of(path)).collect();
    for &n in in_flight {
        let fits = |c: &LayerCost| bytes(c, n) <= u128::from(capacity);
        let fitting = found
            .iter()
            .filter(|(_, c)| fits(c))
            .map(|(_, c)| seconds(c));
        let mut least = fitting.fold(f64::INFINITY, f64::min);
        let mut best = None;
        for (i, (fast, path)) in distinct.iter().enumerate() {
            if fits(&path.cost) || seconds(&path.cost) >= least {
                continue;
            }
            for (k, (small, other)) in distinct.iter().enumerate() {
                if !fits(&other.cost) {
                    continue;
                }
                let joins = (1..path.layers.len())
                    .filter(|&at| other.boundaries[at] == path.boundaries[at])
                    .map(|at| (at, sums[k].first[at].then(&sums[i].last[at])));
                let Some((at, cost)) = joins.into_iter().find(|(_, cost)| fits(cost)) else {
                    continue;
                };
                if seconds(&cost) < least {
                    least = seconds(&cost);
                    let rungs = Rungs {
                        first: *small as u16,
                        rest: *fast as u16,
                        n_first: at as u16,
                    };
                    best = Some((rungs, cost));
                }
            }
        }
        found.extend(best);
    }
    found
}

/// The costs of the first layers of a path, and of the last ones, by the place of the cut.
struct Sums {
    first: Vec<LayerCost>,
    last: Vec<LayerCost>,
}

impl Sums {
    fn of(path: &StagePath) -> Sums {
        let n = path.layers.len();
        let mut sums = Sums {
            first: vec![LayerCost::default(); n + 1],
            last: vec![LayerCost::default(); n + 1],
        };
        for i in 0..n {
            sums.first[i + 1] = sums.first[i].then(&path.layers[i]);
            sums.last[n - i - 1] = path.layers[n - i - 1].then(&sums.last[n - i]);
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::groups::Phases;
    use ir::testing::Rng;

    fn layer(seconds: f64, bytes: u64, saved: u64) -> LayerCost {
        LayerCost {
            time: Phases {
                forward: seconds,
                ..Phases::default()
            },
            static_bytes: bytes,
            saved_bytes: saved,
            ..LayerCost::default()
        }
    }

    fn stack(of: LayerCost, n: usize) -> StagePath {
        let layers = vec![of; n];
        StagePath {
            boundaries: vec![0; n + 1],
            cost: layers.iter().fold(LayerCost::default(), LayerCost::then),
            layers,
            objective: 0,
        }
    }

    #[test]
    fn tags_hold_shape_and_rungs() {
        let rungs = Rungs {
            first: 49_664,
            rest: 7,
            n_first: 399,
        };
        assert_eq!(Rungs::of_tag(rungs.tag(1234)), (1234, rungs));
    }

    /// A stack of equal layers with two or three ways each, that lie on a convex curve: no
    /// assignment of ways to layers that fits is faster than the mix by more than what one layer
    /// gains by one step.
    #[test]
    fn mixes_are_within_a_layer_of_the_best_assignment() {
        let mut rng = Rng::new(7);
        let mut below = |n: u64| rng.below(n);
        let (mut mixes, mut exact) = (0, 0);
        for _ in 0..300 {
            // Every step saves fewer bytes for as much more time.
            let mut ways = vec![layer(1.0 + below(5) as f64, 0, 60 + below(40))];
            let (mut time, mut saved) = (0.5 + below(3) as f64, 10 + below(15));
            for _ in 0..1 + below(2) {
                let last = ways[ways.len() - 1];
                ways.push(layer(last.time.forward + time, 0, last.saved_bytes - saved));
                (time, saved) = (time + 1.0 + below(3) as f64, 1 + saved / 2);
            }
            let (n, in_flight) = (1 + below(5) as usize, 1 + below(3));
            let (m, most) = (2, ways[0].saved_bytes * in_flight * n as u64);
            let capacity = most - below(most / 2);
            let stacks: Vec<StagePath> = ways.iter().map(|w| stack(*w, n)).collect();
            let paths: Vec<(usize, &StagePath)> = stacks.iter().enumerate().collect();
            let found = mixed(&paths, Weights::free(m), &[in_flight], capacity);
            let fits = |c: &LayerCost| c.static_bytes + in_flight * c.saved_bytes <= capacity;
            let least = |all: &mut dyn Iterator<Item = LayerCost>| {
                let fitting = all.filter(fits).map(|c| c.time.forward);
                fitting.fold(f64::INFINITY, f64::min)
            };
            let got = least(&mut found.iter().map(|(_, c)| *c));
            let mut assignments = (0..ways.len().pow(n as u32)).map(|mut code| {
                let layers = (0..n).map(|_| {
                    let way = ways[code % ways.len()];
                    code /= ways.len();
                    way
                });
                layers.fold(LayerCost::default(), |a, b| a.then(&b))
            });
            let best = least(&mut assignments);
            let step = ways
                .windows(2)
                .map(|w| w[1].time.forward - w[0].time.forward);
            let step = step.fold(0.0, f64::max);
            assert_eq!(got.is_finite(), best.is_finite());
            assert!(
                !best.is_finite() || got <= best + step + 1e-9,
                "{got} {best} {step}"
            );
            exact += u32::from(got == best);
            mixes += u32::from(found.iter().any(|(r, c)| !r.is_one() && fits(c)));
            for (rungs, cost) in found.iter().filter(|(r, _)| !r.is_one()) {
                let (a, b) = (&stacks[rungs.first as usize], &stacks[rungs.rest as usize]);
                assert_eq!(joined(a, b, rungs.n_first.into()), Some(*cost));
            }
        }
        assert!(mixes > 80 && exact > 200, "{mixes} mixes, {exact} exact");
    }

    /// Nothing is joined where the layouts of the two paths differ.
    #[test]
    fn paths_join_where_they_meet() {
        let (fast, mut small) = (stack(layer(1.0, 0, 10), 4), stack(layer(2.0, 0, 5), 4));
        small.boundaries = vec![1, 1, 1, 0, 0];
        let paths = [(0, &fast), (5, &small)];
        // 30 bytes: two layers would have to be small; the paths meet behind the third.
        let found = mixed(&paths, Weights::free(1), &[1], 30);
        let mix = found.iter().find(|(r, _)| !r.is_one()).unwrap();
        assert_eq!((mix.0.first, mix.0.rest, mix.0.n_first), (5, 0, 3));
        assert_eq!((mix.1.time.forward, mix.1.saved_bytes), (7.0, 25));
        assert_eq!(joined(&small, &fast, 2), None);
    }
}
