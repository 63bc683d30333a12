//! The fit: least robust logarithmic error over all cases, by pattern search.
//!
//! Every parameter has physical bounds and a weak prior around a value from elsewhere, which
//! decides where no case does: a link whose table is left out falls back to its neighbours'.

use super::{Case, predict};
use cost_model::presets::{Catalogue, Fitted};

/// One fitted figure.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// The table and the key in `clusters/links.toml`.
    pub name: (&'static str, &'static str),
    /// The smallest and the largest physical value.
    pub bounds: (f64, f64),
    /// The centre of the prior.
    pub prior: f64,
    /// The width of the prior, as the logarithm of a factor.
    pub width: f64,
}

/// The error from which on a row weighs linearly: 2%.
const ROBUST: f64 = 0.02;
/// The weight of the prior of one parameter against the error of one row.
const PRIOR_WEIGHT: f64 = 0.02;

/// The parameters that are fitted. Everything else in `clusters/links.toml` is a fact with a
/// source.
pub fn parameters() -> Vec<Parameter> {
    let p = |table, key, bounds, prior, width| Parameter {
        name: (table, key),
        bounds,
        prior,
        width,
    };
    let mut all = vec![
        p("", "collective_start_s", (5e-6, 4e-5), 2.5e-5, 0.5),
        p("", "simple_step_factor", (1.0, 6.0), 2.0, 0.5),
        p("", "in_switch_latency_s", (2e-5, 1.2e-4), 6e-5, 0.5),
    ];
    for key in ["nvlink2", "nvlink3", "nvlink4", "nvlink5"] {
        all.push(p("efficiency", key, (0.6, 0.95), 0.79, 0.05));
    }
    all.push(p("efficiency", "pcie", (0.5, 0.95), 0.79, 0.1));
    all.push(p("efficiency", "rdma", (0.85, 0.99), 0.95, 0.03));
    all.push(p("efficiency", "efa", (0.8, 0.99), 0.95, 0.03));
    for key in ["nvlink4", "nvlink5"] {
        all.push(p("in_switch_efficiency", key, (0.4, 0.9), 0.62, 0.1));
    }
    all.push(p("network_step_factor", "rdma", (1.0, 5.0), 1.5, 0.5));
    all.push(p("network_step_factor", "efa", (1.0, 12.0), 4.0, 0.7));
    all
}

/// Returns the figure that a parameter stands for.
pub(super) fn figure<'a>(fitted: &'a mut Fitted, p: &Parameter) -> Result<&'a mut f64, String> {
    let (table, key) = p.name;
    let table = match table {
        "efficiency" => &mut fitted.efficiency,
        "in_switch_efficiency" => &mut fitted.in_switch_efficiency,
        "network_step_factor" => &mut fitted.network_step_factor,
        _ => {
            return match key {
                "collective_start_s" => Ok(&mut fitted.collective_start_s),
                "simple_step_factor" => Ok(&mut fitted.simple_step_factor),
                _ => Ok(&mut fitted.in_switch_latency_s),
            };
        }
    };
    table
        .get_mut(key)
        .ok_or_else(|| format!("clusters/links.toml has no fitted.{}.{key}", p.name.0))
}

/// Computes the objective of the fit: the mean over cases of `sqrt(e^2 + 0.02^2) - 0.02`, `e` the
/// logarithm of predicted over measured, plus the priors.
pub fn loss(catalogue: &Catalogue, fitted: &Fitted, cases: &[&Case]) -> Result<f64, String> {
    let predicted = predict(catalogue, fitted, cases)?;
    let errors = predicted.iter().zip(cases).map(|(p, c)| {
        let e = (p / c.seconds).ln();
        (e * e + ROBUST * ROBUST).sqrt() - ROBUST
    });
    let mut total: f64 = errors.sum();
    let mut fitted = fitted.clone();
    for p in parameters() {
        let away = (*figure(&mut fitted, &p)? / p.prior).ln() / p.width;
        total += PRIOR_WEIGHT * away * away;
    }
    Ok(total / cases.len().max(1) as f64)
}

/// Finds the fitted figures that explain the cases best. The same cases give the same figures.
pub fn fit(catalogue: &Catalogue, cases: &[&Case]) -> Result<Fitted, String> {
    const SMALLEST_STEP: f64 = 1e-3;
    let all = parameters();
    let mut best = catalogue.fitted.clone();
    for p in &all {
        *figure(&mut best, p)? = p.prior;
    }
    let mut least = loss(catalogue, &best, cases)?;
    let mut step = 0.2f64;
    while step > SMALLEST_STEP {
        let before = least;
        for p in &all {
            for factor in [1.0 + step, 1.0 / (1.0 + step)] {
                let mut next = best.clone();
                let x = figure(&mut next, p)?;
                *x = (*x * factor).clamp(p.bounds.0, p.bounds.1);
                let there = loss(catalogue, &next, cases)?;
                if there < least {
                    (best, least) = (next, there);
                    break;
                }
            }
        }
        if before - least < 1e-6 {
            step /= 2.0;
        }
    }
    Ok(best)
}
