//! Cross-validation: the errors on rows to which the parameters were not fitted.

use crate::least_squares::{Bounds, Point, minimise};
use crate::problem::{Item, Problem};
use std::collections::{BTreeMap, BTreeSet};

/// The number of folds.
const FOLDS: usize = 5;
/// The times that a fold goes to the minimum of the problem that is linear around the point before;
/// residuals are computed anew there, derivatives stay those at the defaults.
const STEPS: usize = 2;

/// Returns the relative errors of all rows, each predicted by a fit that had not seen its group.
/// Groups are dealt out to the folds within their stratum, so that every fold has some of each.
pub fn by_group(problem: &Problem, defaults: &Point, bounds: &Bounds, weights: &[f64]) -> Vec<f64> {
    let mut groups: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for item in &problem.items {
        groups.entry(&item.stratum).or_default().insert(&item.group);
    }
    let fold = |item: &Item| {
        let place = groups[item.stratum.as_str()]
            .iter()
            .position(|g| *g == item.group);
        place.unwrap_or(0) % FOLDS
    };
    held_out(problem, defaults, bounds, weights, &|item| {
        fold(item).to_string()
    })
}

/// Returns the relative errors, each row predicted by a fit that had seen nothing of its source.
pub fn by_source(
    problem: &Problem,
    defaults: &Point,
    bounds: &Bounds,
    weights: &[f64],
) -> Vec<f64> {
    held_out(problem, defaults, bounds, weights, &|item| {
        item.source.clone()
    })
}

/// Returns the minimum of the objective with residuals that are linear around `point`.
fn linear_minimum(bounds: &Bounds, weights: &[f64], point: &Point) -> Point {
    let linear = |at: &[f64]| -> Vec<f64> {
        let mut residuals = point.residuals.clone();
        for (j, slopes) in point.slopes.iter().enumerate() {
            let moved = at[j] - point.at[j];
            for (r, slope) in residuals.iter_mut().zip(slopes) {
                *r += moved * slope;
            }
        }
        residuals
    };
    minimise(bounds, weights, point.clone(), linear, |_, _| None)
}

/// Fits from the defaults, once without each part: neither values nor derivatives come from a fit
/// that saw the part.
fn held_out(
    problem: &Problem,
    defaults: &Point,
    bounds: &Bounds,
    weights: &[f64],
    part: &dyn Fn(&Item) -> String,
) -> Vec<f64> {
    let parts: Vec<String> = problem.items.iter().map(part).collect();
    let distinct: BTreeSet<&String> = parts.iter().collect();
    let mut errors = vec![0.0; parts.len()];
    for left_out in distinct {
        let seen: Vec<f64> = weights
            .iter()
            .zip(&parts)
            .map(|(w, p)| if p == left_out { 0.0 } else { *w })
            .collect();
        let mut point = defaults.clone();
        for _ in 0..STEPS {
            point.at = linear_minimum(bounds, &seen, &point).at;
            point.residuals = problem.residuals(&point.at);
        }
        eprintln!(
            "without {left_out}: {:.1}",
            bounds.objective(&seen, &point.at, &point.residuals)
        );
        for (i, part) in parts.iter().enumerate() {
            if part == left_out {
                errors[i] = point.residuals[i].exp() - 1.0;
            }
        }
    }
    errors
}
