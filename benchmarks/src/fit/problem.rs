//! The rows that are fitted, with their programs: planned and lowered once, priced for every
//! set of values. Pins fix the plan, so a program hardly depends on what is fitted; the report
//! of `published`, which plans again, is the check.

use crate::least_squares::{Bounds, Point};
use benchmarks::score::{COUNTED_ROWS, is_diagnostic, stratum};
use cost_model::presets::{Parameter, Parameters};
use published::{Facts, Lowered, Machine, Row, Unmodelled, cluster, is_held_out, lower, price};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The rows that a stratum counts as, whatever its number of rows; this weighs the measurements
/// against the defaults.
const EFFECTIVE_ROWS: f64 = 6.0;
/// The weight of strata for which something had to be assumed.
const ASSUMED: f64 = 0.3;
/// The step of a derivative, as a logarithm.
const STEP: f64 = 0.02;

/// A row with its program.
pub struct Item {
    pub row: Row,
    pub stratum: String,
    /// The source of the measurement, whatever the GPU.
    pub source: String,
    /// The plan that the row is of; rows of one plan are held out together.
    pub group: String,
    pub tier: char,
    measured_s: f64,
    lowered: Arc<Lowered>,
}

/// All rows, and the parameters that are fitted to them.
pub struct Problem {
    pub items: Vec<Item>,
    facts: Facts,
}

impl Problem {
    /// Collects the rows that are fitted and can be predicted.
    pub fn new(rows: &[Row], facts: &Facts) -> Problem {
        let chosen: Vec<Row> = rows.iter().filter(|r| is_fitted(r)).cloned().collect();
        let items = chosen
            .iter()
            .zip(lower(&chosen, facts))
            .filter_map(|(row, lowered)| {
                let stratum = stratum(row);
                Some(Item {
                    source: source(&stratum),
                    group: row.text("group").unwrap_or("").to_string(),
                    tier: tier(row)?,
                    measured_s: row.measured("derived_step_time_s")?,
                    lowered: lowered.ok()?,
                    row: row.clone(),
                    stratum,
                })
            })
            .collect();
        Problem {
            items,
            facts: facts.clone(),
        }
    }

    /// Returns the parameters as the facts have them.
    pub fn parameters(&self) -> &Parameters {
        self.facts.parameters()
    }

    /// Returns bounds and defaults of the parameters.
    pub fn bounds(&self) -> Bounds {
        let of = |f: fn(&Parameter) -> f64| -> Vec<f64> {
            self.parameters().list().iter().map(|p| f(p).ln()).collect()
        };
        Bounds {
            default: of(|p| p.default),
            low: of(|p| p.low),
            high: of(|p| p.high),
        }
    }

    /// Returns the weight of every row: all strata weigh the same.
    pub fn weights(&self) -> Vec<f64> {
        let mut n_rows: BTreeMap<(&str, char), usize> = BTreeMap::new();
        for item in &self.items {
            *n_rows.entry((&item.stratum, item.tier)).or_default() += 1;
        }
        let weight = |item: &Item| {
            let n = n_rows[&(item.stratum.as_str(), item.tier)].max(COUNTED_ROWS);
            let kind = match item.tier {
                'A' => 1.0,
                _ => ASSUMED,
            };
            kind * EFFECTIVE_ROWS / n as f64
        };
        self.items.iter().map(weight).collect()
    }

    /// Returns the logarithms of predicted over measured seconds.
    pub fn residuals(&self, at: &[f64]) -> Vec<f64> {
        let machines = self.machines(at);
        let asked: Vec<(&Lowered, Machine)> = self
            .items
            .iter()
            .zip(machines)
            .map(|(item, machine)| (&*item.lowered, machine))
            .collect();
        self.items
            .iter()
            .zip(price(&asked))
            .map(|(item, seconds)| residual(item, seconds))
            .collect()
    }

    /// Returns the derivatives of the residuals by parameter. Rows whose machine does not change
    /// are not priced again.
    pub fn slopes(&self, at: &[f64], residuals: &[f64]) -> Vec<Vec<f64>> {
        let base = self.machines(at);
        let bounds = self.bounds();
        let one = |j: usize| {
            let step = if at[j] + STEP <= bounds.high[j] {
                STEP
            } else {
                -STEP
            };
            let mut moved = at.to_vec();
            moved[j] += step;
            let changed: Vec<(usize, Machine)> = self
                .machines(&moved)
                .into_iter()
                .enumerate()
                .filter(|(i, machine)| *machine != base[*i])
                .collect();
            let asked: Vec<(&Lowered, Machine)> = changed
                .iter()
                .map(|(i, machine)| (&*self.items[*i].lowered, machine.clone()))
                .collect();
            let mut slopes = vec![0.0; self.items.len()];
            for ((i, _), seconds) in changed.iter().zip(price(&asked)) {
                slopes[*i] = (residual(&self.items[*i], seconds) - residuals[*i]) / step;
            }
            slopes
        };
        (0..at.len()).map(one).collect()
    }

    /// Returns the point of the parameters' own values.
    pub fn start(&self) -> Point {
        let list = self.parameters().list();
        self.point(list.iter().map(|p| p.value.ln()).collect())
    }

    /// Returns the point of the defaults.
    pub fn defaults(&self) -> Point {
        self.point(self.bounds().default)
    }

    fn point(&self, at: Vec<f64>) -> Point {
        let residuals = self.residuals(&at);
        let slopes = self.slopes(&at, &residuals);
        Point {
            at,
            residuals,
            slopes,
        }
    }

    /// Returns the values at a point.
    pub fn at(&self, at: &[f64]) -> Parameters {
        let values: Vec<f64> = at.iter().map(|u| u.exp()).collect();
        self.parameters().with_values(&values)
    }

    /// Returns the facts with other parameters.
    pub fn with(&self, parameters: &Parameters) -> Facts {
        self.facts.clone().with_parameters(parameters.clone())
    }

    fn machines(&self, at: &[f64]) -> Vec<Machine> {
        let facts = self.facts.clone().with_parameters(self.at(at));
        self.items
            .iter()
            .map(|item| {
                cluster::machine(&item.row, &facts)
                    .expect("rows that have a program have a machine")
            })
            .collect()
    }
}

fn residual(item: &Item, seconds: Result<f64, Unmodelled>) -> f64 {
    let seconds = seconds.expect("a program that was simulated can be simulated again");
    (seconds / item.measured_s).ln()
}

/// Says whether figures are fitted to a row: it is of tier A or B, and neither a diagnostic one nor of a
/// model that is held out.
fn is_fitted(row: &Row) -> bool {
    tier(row).is_some() && !is_diagnostic(&stratum(row)) && !is_held_out(row)
}

fn tier(row: &Row) -> Option<char> {
    let tier = row.text("tier")?.chars().next()?;
    "AB".contains(tier).then_some(tier)
}

/// Returns the second part of a stratum's name.
fn source(stratum: &str) -> String {
    stratum.split('/').nth(1).unwrap_or(stratum).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use benchmarks::held_out;
    use published::{csv, row};
    use std::path::Path;

    fn fitted(cells: &str) -> bool {
        let table = csv::parse(&format!("tier,model,source,gpu\n{cells}\n")).unwrap();
        is_fitted(&row::rows(&table)[0])
    }

    #[test]
    fn no_figure_is_fitted_to_rows_that_check_it() {
        assert!(fitted("B,GPT OSS 120B,a summary,B200"));
        for cells in [
            "B,Nemotron_3_Super,a summary,GB300",
            "A,DeepSeek V3 671B,a summary,H100-80GB",
            "C,GPT OSS 120B,a summary,B200",
            "A,GPT-2,vTrain ground truth (single-node),A100",
        ] {
            assert!(!fitted(cells), "{cells}");
        }
    }

    /// The rows of the last fit, where the table is there, are still those that a fit may have.
    #[test]
    fn the_last_fit_had_no_such_row() {
        let table = std::env::var_os("MESHWRIGHT_DATA").and_then(|data| {
            std::fs::read_to_string(Path::new(&data).join("published/calibration.csv")).ok()
        });
        let Some(text) = table else {
            eprintln!("skipped: MESHWRIGHT_DATA names no published/calibration.csv");
            return;
        };
        let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("results/fit.csv");
        let seen = held_out::read(&results).unwrap();
        let rows = row::rows(&csv::parse(&text).unwrap());
        let wrong = rows
            .iter()
            .filter(|r| !is_fitted(r) && seen.contains_key(r.id()));
        assert_eq!(wrong.map(Row::id).collect::<Vec<_>>(), Vec::<&str>::new());
    }
}
