//! Whether predictions put plans in the right order: what a planner needs of a cost model.

use crate::score::{Scored, mean};
use std::collections::BTreeMap;

/// Rows that a ranking group needs.
const GROUP_ROWS: usize = 5;
/// Measurements closer than this share are not compared.
const TIE: f64 = 0.02;
/// Rows that agree in these columns, and in their stratum, differ in their plan.
const SAME: [&str; 8] = [
    "framework",
    "layers",
    "hidden",
    "heads",
    "gpus_total",
    "global_batch",
    "seq_len",
    "precision",
];

/// Plans of one model on one cluster, ranked.
#[derive(Clone, Debug)]
pub struct Ranked {
    /// Stratum.
    pub stratum: String,
    /// What the plans share.
    pub what: String,
    /// Number of plans.
    pub n: usize,
    /// Kendall's tau over the pairs that differ: 1 for the measured order, 0 for chance.
    pub tau: f64,
    /// How much longer than the fastest plan the predicted fastest takes.
    pub regret: f64,
}

/// The ranking groups of five plans or more, outside the diagnostic rows.
pub fn rankings(rows: &[Scored<'_>]) -> Vec<Ranked> {
    let mut groups: BTreeMap<(&str, Vec<&str>), Vec<&Scored<'_>>> = BTreeMap::new();
    for row in rows.iter().filter(|r| !r.is_diagnostic()) {
        let same = SAME.iter().map(|c| row.row.text(c).unwrap_or("")).collect();
        groups.entry((&row.stratum, same)).or_default().push(row);
    }
    groups
        .into_iter()
        .filter(|(_, rows)| rows.len() >= GROUP_ROWS)
        .map(|((stratum, same), rows)| Ranked {
            stratum: stratum.to_string(),
            what: format!(
                "L{} h{} a{} on {} GPUs, batch {}, sequence {}, {}",
                same[1], same[2], same[3], same[4], same[5], same[6], same[7]
            ),
            n: rows.len(),
            tau: tau(&rows),
            regret: regret(&rows),
        })
        .collect()
}

fn tau(rows: &[&Scored<'_>]) -> f64 {
    let mut signs = Vec::new();
    for (i, a) in rows.iter().enumerate() {
        for b in &rows[i + 1..] {
            let (slow, fast) = if a.measured_s > b.measured_s {
                (a, b)
            } else {
                (b, a)
            };
            if slow.measured_s / fast.measured_s - 1.0 <= TIE {
                continue;
            }
            signs.push(match slow.predicted_s.total_cmp(&fast.predicted_s) {
                std::cmp::Ordering::Greater => 1.0,
                std::cmp::Ordering::Equal => 0.0,
                std::cmp::Ordering::Less => -1.0,
            });
        }
    }
    mean(&signs).unwrap_or(0.0)
}

fn regret(rows: &[&Scored<'_>]) -> f64 {
    let by = |time: &dyn Fn(&Scored<'_>) -> f64| {
        rows.iter()
            .min_by(|a, b| time(a).total_cmp(&time(b)))
            .map_or(0.0, |r| r.measured_s)
    };
    let fastest = by(&|r| r.measured_s);
    by(&|r| r.predicted_s) / fastest - 1.0
}
