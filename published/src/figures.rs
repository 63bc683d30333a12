//! Every figure that predictions of published runs rest on and that no source states: fitted to
//! measurements, or chosen by hand. They are counted here, whatever file they stand in, so that
//! there are never more than [`crate::quantity::MOST`].

use cost_model::presets::{Catalogue, Parameter};
use std::collections::BTreeSet;

/// How a figure was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// By the fit to measured training steps.
    Steps,
    /// By the fit to measured collectives.
    Collectives,
    /// By a person, from measured memory.
    Memory,
    /// By a person, without a measurement of what it says: an assumption.
    Hand,
}

impl Found {
    /// In the words of the table.
    pub fn words(self) -> &'static str {
        match self {
            Found::Steps => "fitted to steps",
            Found::Collectives => "fitted to collectives",
            Found::Memory => "by hand, to measured memory",
            Found::Hand => "assumed",
        }
    }
}

/// One figure.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// Its name, unique.
    pub name: String,
    /// The things that it is of.
    pub of: Vec<String>,
    /// Its unit.
    pub unit: String,
    /// Its value; several where one assumption says another value of older devices.
    pub values: Vec<f64>,
    /// Its physical bounds, where it has them.
    pub bounds: Option<(f64, f64)>,
    /// How it was found.
    pub found: Found,
    /// The measurements or the reasoning that it rests on.
    pub support: String,
}

impl Figure {
    /// Says whether the value lies at one of its bounds, so that the measurements ask for more than
    /// its meaning allows.
    pub fn is_at_a_bound(&self) -> bool {
        let near = |x: f64, bound: f64| (x / bound - 1.0).abs() < 1e-3;
        let Some((low, high)) = self.bounds else {
            return false;
        };
        let at = |x: &f64| near(*x, low) || near(*x, high);
        self.found != Found::Hand && self.values.iter().any(at)
    }

    /// Makes the figure of a parameter.
    pub(crate) fn of_parameter(p: &Parameter) -> Figure {
        let found = if p.is_fitted() {
            Found::Steps
        } else {
            Found::Hand
        };
        let support = match found {
            Found::Hand => &p.meaning,
            _ => &p.support,
        };
        Figure {
            name: p.name.clone(),
            of: p.of.clone(),
            unit: p.unit.clone(),
            values: vec![p.value],
            bounds: Some((p.low, p.high)),
            found,
            support: support.clone(),
        }
    }
}

/// Lists what was fitted to collectives alone and what is assumed of `devices`. Links that no
/// published run has are left out, and figures that are another one's.
pub(crate) fn of_catalogue(catalogue: &Catalogue, devices: &BTreeSet<&str>) -> Vec<Figure> {
    const UNUSED: [&str; 3] = ["pcie", "tcp", "infiniband"];
    let fitted = &catalogue.fitted;
    let collective = |name: String, unit: &str, value: f64, bounds| Figure {
        of: vec!["collectives".into()],
        unit: unit.into(),
        values: vec![value],
        bounds: Some(bounds),
        found: Found::Collectives,
        support: fitted.source.clone(),
        name,
    };
    let mut all = vec![
        collective(
            "start of a collective".into(),
            "seconds beside NCCL's own",
            fitted.collective_start_s,
            (5e-6, 4e-5),
        ),
        collective(
            "steps of the protocol for large messages".into(),
            "times NCCL's",
            fitted.simple_step_factor,
            (1.0, 6.0),
        ),
        collective(
            "start of an all-reduce in the switch".into(),
            "seconds",
            fitted.in_switch_latency_s,
            (2e-5, 1.2e-4),
        ),
    ];
    let tables = [
        (
            "rings over",
            "share of the port",
            &fitted.efficiency,
            (0.6, 0.99),
        ),
        (
            "all-reduce in the switch of",
            "share of the port",
            &fitted.in_switch_efficiency,
            (0.4, 0.9),
        ),
        (
            "steps over",
            "times NCCL's",
            &fitted.network_step_factor,
            (1.0, 12.0),
        ),
    ];
    for (what, unit, table, bounds) in tables {
        let used = table
            .iter()
            .filter(|(key, _)| !UNUSED.contains(&key.as_str()));
        all.extend(used.map(|(key, x)| collective(format!("{what} {key}"), unit, *x, bounds)));
    }
    let known = devices.iter().filter_map(|d| catalogue.device(d).ok());
    let known: Vec<_> = known.collect();
    let assumed = |name: &str, unit: &str, values: Vec<f64>, support: &str| {
        let mut distinct = values;
        distinct.sort_by(f64::total_cmp);
        distinct.dedup();
        Figure {
            name: name.into(),
            of: vec!["devices".into()],
            unit: unit.into(),
            values: distinct,
            bounds: None,
            found: Found::Hand,
            support: support.into(),
        }
    };
    all.push(assumed(
        "fixed time of a kernel",
        "seconds",
        known.iter().map(|d| d.launch_s).collect(),
        "launch gaps included, one for all devices",
    ));
    all.push(assumed(
        "streaming kernels",
        "share of the data sheet's bandwidth",
        known.iter().map(|d| d.memory_efficiency).collect(),
        "Volta, Ampere and what is newer",
    ));
    all.push(assumed(
        "filling a matmul's pipeline",
        "elements along k",
        known.iter().map(|d| d.matmul_half_size.k).collect(),
        "Volta and Ampere, Hopper, Blackwell",
    ));
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Facts;
    use crate::quantity::MOST;

    #[test]
    fn all_figures_are_counted_once_and_say_what_they_rest_on() {
        let all = Facts::built_in().figures();
        assert!(all.len() <= MOST, "{}", all.len());
        let names: BTreeSet<&str> = all.iter().map(|f| f.name.as_str()).collect();
        assert_eq!(names.len(), all.len());
        for f in &all {
            assert!(!f.support.is_empty() && !f.unit.is_empty(), "{}", f.name);
            assert!(!f.of.is_empty() && !f.values.is_empty(), "{}", f.name);
            let inside = |x: &f64| f.bounds.is_none_or(|(low, high)| low <= *x && *x <= high);
            assert!(f.values.iter().all(inside), "{}", f.name);
        }
        // Of each kind there is one that can be named.
        for name in ["A100 clock", "rings over rdma", "slack", "launched alone"] {
            let found = names.iter().any(|n| n.contains(name));
            assert_eq!(found, name != "launched alone", "{name}");
        }
    }

    #[test]
    fn a_figure_at_a_bound_is_known() {
        let mut figure = Facts::built_in().figures().remove(0);
        figure.found = Found::Steps;
        figure.bounds = Some((0.5, 1.0));
        for (value, at) in [(0.7, false), (0.5001, true), (1.0, true)] {
            figure.values = vec![value];
            assert_eq!(figure.is_at_a_bound(), at, "{value}");
        }
        figure.found = Found::Hand;
        assert!(!figure.is_at_a_bound());
    }
}
