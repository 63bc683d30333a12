//! How right the model is on rows that its parameters were not fitted to.

use crate::least_squares::{Bounds, Point, minimise};
use crate::problem::{Item, Problem};
use std::collections::{BTreeMap, BTreeSet};

/// Folds of groups.
const FOLDS: usize = 5;

/// Relative errors of all rows, each predicted by a fit that had not seen its group.
///
/// Groups are dealt out to the folds within their stratum, so that every fold has some of each.
pub fn by_group(problem: &Problem, full: &Point, bounds: &Bounds, weights: &[f64]) -> Vec<f64> {
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
    held_out(problem, full, bounds, weights, &|item| {
        fold(item).to_string()
    })
}

/// The same, each row predicted by a fit that had seen nothing of its source.
pub fn by_source(problem: &Problem, full: &Point, bounds: &Bounds, weights: &[f64]) -> Vec<f64> {
    held_out(problem, full, bounds, weights, &|item| item.source.clone())
}

/// Fits from the full fit's values with its derivatives, for each part without the part.
fn held_out(
    problem: &Problem,
    full: &Point,
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
        let point = minimise(
            bounds,
            &seen,
            full.clone(),
            |at| problem.residuals(at),
            |_, _| None,
        );
        for (i, part) in parts.iter().enumerate() {
            if part == left_out {
                errors[i] = point.residuals[i].exp() - 1.0;
            }
        }
    }
    errors
}
