//! Which points of a space are planned: every set of degrees once, and from the best of them on
//! what is a step away in another knob, until no step is faster.
//!
//! The least recomputation that fits counts: more makes no step faster. What does not fit
//! is split further, level by level.
//!
//! Deterministic: points of a round are planned in parallel, and compared in a fixed order.

use super::point::Space;
use super::{Outcome, Point, Trial};
use crate::{PlanError, Planned};
use ir::plan::Plan;
use rayon::prelude::*;
use std::collections::BTreeSet;

/// Sets of degrees from which is climbed.
const CLIMBS: usize = 4;
/// Those that take so many times as long as the best, with the first values of their knobs, are not
/// climbed from: larger microbatches and interleaved stages are worth that much at most.
const NEAR: f64 = 1.5;
/// Steps from one set of degrees.
const MOST_STEPS: usize = 12;

/// The point that was found.
pub(super) struct Climbed {
    pub point: Point,
    pub planned: Planned,
    /// All plans that fit, by their points.
    pub plans: Vec<(Point, Plan)>,
    /// Points that were planned.
    pub n_planned: u64,
}

/// The outcomes that are known of points.
#[derive(Default)]
struct Seen {
    /// Those that were looked at.
    points: BTreeSet<Point>,
    /// How many of them were planned.
    n_planned: u64,
    plans: Vec<(Point, Plan)>,
    best: Option<(f64, Point, Box<Planned>)>,
    /// The error that says most of why nothing fits.
    error: Option<PlanError>,
}

/// The outcomes of a point and of those that hold less than it does, up to the one that fits.
type Ladder = Vec<(Point, Option<Outcome>)>;

/// Finds the fastest point.
///
/// # Errors
/// When no point fits: then with the error of the one that lacks the least memory, or the first.
pub(super) fn climb(space: &Space<'_>, trial: &Trial<'_>) -> Result<Climbed, PlanError> {
    let shapes = space.shapes();
    if shapes.is_empty() {
        return Err(space.none(trial.train, trial.cluster));
    }
    let mut seen = Seen::default();
    let surveyed = |shape: &Point| survey(space, trial, shape);
    let ladders: Vec<Ladder> = shapes.par_iter().map(surveyed).collect();
    let mut starts: Vec<(f64, Point)> = Vec::new();
    for ladder in ladders {
        starts.extend(seen.add(ladder));
    }
    starts.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let limit = starts.first().map_or(0.0, |s| s.0 * NEAR);
    starts.retain(|s| s.0 <= limit);
    starts.truncate(trial.options.effort.times(CLIMBS));
    for (mut own_s, mut point) in starts {
        for _ in 0..MOST_STEPS {
            if trial.options.watcher.ends() {
                break;
            }
            let next = space.neighbours(&point);
            let next = next.into_iter().filter(|p| !seen.knows(space, p));
            let next: Vec<Point> = next.collect();
            let tried = |p: &Point| ladder(space, trial, p, own_s);
            let ladders: Vec<Ladder> = next.par_iter().map(tried).collect();
            let found = ladders.into_iter().filter_map(|l| seen.add(l));
            let found: Vec<(f64, Point)> = found.collect();
            let best = found
                .into_iter()
                .reduce(|a, b| if b.0 < a.0 { b } else { a });
            match best {
                Some((step_s, next)) if step_s < own_s => (own_s, point) = (step_s, next),
                _ => break,
            }
        }
    }
    let Seen {
        best,
        plans,
        error,
        n_planned,
        ..
    } = seen;
    match best {
        Some((_, point, planned)) => Ok(Climbed {
            point,
            planned: *planned,
            plans,
            n_planned,
        }),
        None => Err(error.unwrap_or_else(|| too_large(space, trial, &shapes))),
    }
}

/// Why no point fits where the states of each exceed the memory: of the last shape, with states
/// split as far as they can be.
fn too_large(space: &Space<'_>, trial: &Trial<'_>, shapes: &[Point]) -> PlanError {
    let last = shapes.last().map(|shape| Point {
        zero: space.zeros(shape).last().copied().unwrap_or(shape.zero),
        recompute: *space.recomputations().last().unwrap_or(&shape.recompute),
        ..*shape
    });
    let pins = last.map(|point| trial.pins(&point));
    match pins.map(|pins| pins.map(|pins| trial.planned(pins))) {
        Some(Err(e) | Ok(Outcome::Exceeds(e) | Outcome::Failed(e))) => e,
        _ => space.none(trial.train, trial.cluster),
    }
}

/// A shape with the first values of its knobs, split further until it fits with nothing recomputed
/// that need not be: what is split further may have to recompute less, and be faster.
fn survey(space: &Space<'_>, trial: &Trial<'_>, shape: &Point) -> Ladder {
    let mut all = Ladder::new();
    let least = space.recomputations().first().copied();
    let mut best_s = f64::INFINITY;
    let levels = space.zeros(shape).into_iter().filter(|z| *z >= shape.zero);
    for zero in levels {
        let tried = ladder(space, trial, &Point { zero, ..*shape }, best_s);
        let (mut is_plain, mut failed) = (false, false);
        for (point, outcome) in &tried {
            match outcome {
                Some(Outcome::Fits(planned)) => {
                    best_s = best_s.min(planned.simulation.step_time.0);
                    is_plain |= Some(point.recompute) == least;
                }
                Some(Outcome::Failed(_)) => failed = true,
                _ => {}
            }
        }
        all.extend(tried);
        if is_plain || failed || trial.options.watcher.ends() {
            break;
        }
    }
    all
}

/// A point with the least recomputed that fits: nothing, else everything to see whether anything
/// does, and then what lies between.
fn ladder(space: &Space<'_>, trial: &Trial<'_>, point: &Point, to_beat: f64) -> Ladder {
    let again = space.recomputations();
    let at = |recompute| Point {
        recompute,
        ..*point
    };
    let mut all = Ladder::new();
    let fits = |recompute, all: &mut Ladder| {
        let outcome = trial.outcome(&at(recompute), to_beat);
        let fits = matches!(outcome, Some(Outcome::Fits(_)));
        let exceeds = matches!(outcome, Some(Outcome::Exceeds(_)));
        all.push((at(recompute), outcome));
        (fits, exceeds)
    };
    let (Some(&least), Some(&most)) = (again.first(), again.last()) else {
        return all;
    };
    let (_, exceeds) = fits(least, &mut all);
    if !exceeds || least == most {
        return all;
    }
    let (some, _) = fits(most, &mut all);
    let between = again.iter().filter(|r| **r != least && **r != most);
    for recompute in between.filter(|_| some) {
        if fits(*recompute, &mut all).0 {
            break;
        }
    }
    all
}

impl Seen {
    /// Whether a point was planned, with whatever recomputed.
    fn knows(&self, space: &Space<'_>, point: &Point) -> bool {
        space.recomputations().into_iter().any(|recompute| {
            let point = Point {
                recompute,
                ..*point
            };
            self.points.contains(&point)
        })
    }

    /// Adds what was found; the fastest of it that fits.
    fn add(&mut self, ladder: Ladder) -> Option<(f64, Point)> {
        let mut fastest: Option<(f64, Point)> = None;
        for (point, outcome) in ladder {
            self.points.insert(point);
            match outcome {
                None | Some(Outcome::TooLarge) => continue,
                Some(Outcome::Failed(e) | Outcome::Exceeds(e)) => self.blame(e),
                Some(Outcome::Fits(planned)) => {
                    let step_s = planned.simulation.step_time.0;
                    self.plans.push((point, planned.plan.clone()));
                    if fastest.is_none_or(|(s, _)| step_s < s) {
                        fastest = Some((step_s, point));
                    }
                    if self.best.as_ref().is_none_or(|(s, _, _)| step_s < *s) {
                        self.best = Some((step_s, point, planned));
                    }
                }
            }
            self.n_planned += 1;
        }
        fastest
    }

    /// Keeps the error that lacks the least memory, or the first.
    fn blame(&mut self, e: PlanError) {
        let lacks = |e: &PlanError| match e {
            PlanError::Memory {
                needed, capacity, ..
            } => Some(needed.saturating_sub(*capacity)),
            _ => None,
        };
        let is_nearer = match (&self.error, lacks(&e)) {
            (None, _) => true,
            (Some(old), Some(new)) => lacks(old).is_none_or(|old| new < old),
            (Some(_), None) => false,
        };
        if is_nearer {
            self.error = Some(e);
        }
    }
}
