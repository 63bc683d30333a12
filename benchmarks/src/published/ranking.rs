//! Checks that predictions put plans in the right order, which is what a planner needs of a cost
//! model.

use crate::score::{Scored, mean};
use std::collections::BTreeMap;

/// The number of rows that a ranking group needs.
const GROUP_ROWS: usize = 5;
/// Measurements that differ by a smaller share are not compared.
const TIE: f64 = 0.02;
/// Rows that agree in these columns and in their stratum form a ranking group; they differ in their
/// plan.
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

/// Rows of a group that agree in these too are one plan that was measured again.
const PLAN: [&str; 10] = [
    "micro_batch",
    "tp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "dp",
    "sequence_parallel",
    "zero_stage",
    "recompute",
];

/// Plans of one model on one cluster, ranked.
#[derive(Clone, Debug)]
pub struct Ranked {
    /// The stratum.
    pub stratum: String,
    /// The settings that the plans share.
    pub what: String,
    /// The number of plans.
    pub n: usize,
    /// Kendall's tau over the pairs that were measured apart: 1 for the measured order, 0 for
    /// chance and for pairs that are predicted equal.
    pub tau: f64,
    /// Kendall's tau over pairs of different plans; `None` where no such pair was measured apart.
    /// The difference between two runs of one plan is noise, or a release, and no order of plans.
    pub tau_of_plans: Option<f64>,
    /// The highest tau over all pairs that predictions can reach which know a plan's columns alone:
    /// the pairs of every two plans count as most of them were measured, those of one plan as
    /// chance.
    pub best_tau_of_columns: f64,
    /// The regret: how much longer than the fastest plan the predicted fastest takes.
    pub regret: f64,
}

/// Returns the ranking groups of five plans or more, outside the diagnostic rows.
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
            tau: tau(&rows, |_, _| true).unwrap_or(0.0),
            tau_of_plans: tau(&rows, differ),
            best_tau_of_columns: best_tau_of_columns(&rows),
            regret: regret(&rows),
        })
        .collect()
}

/// Returns the columns of a row that describe its plan.
fn plan<'a>(row: &Scored<'a>) -> [&'a str; PLAN.len()] {
    PLAN.map(|c| row.row.text(c).unwrap_or(""))
}

/// Says whether two rows of a group describe different plans.
fn differ(a: &Scored<'_>, b: &Scored<'_>) -> bool {
    plan(a) != plan(b)
}

/// Returns the pairs that were measured apart, the faster one first.
fn pairs<'a, 'b>(
    rows: &'b [&'b Scored<'a>],
) -> impl Iterator<Item = (&'b Scored<'a>, &'b Scored<'a>)> {
    let all = rows.iter().enumerate();
    all.flat_map(|(i, a)| rows[i + 1..].iter().map(move |b| (*a, *b)))
        .map(|(a, b)| {
            if a.measured_s > b.measured_s {
                (b, a)
            } else {
                (a, b)
            }
        })
        .filter(|(fast, slow)| slow.measured_s / fast.measured_s - 1.0 > TIE)
}

/// Computes Kendall's tau over the pairs that count and were measured apart, if there are any.
fn tau(rows: &[&Scored<'_>], counts: impl Fn(&Scored<'_>, &Scored<'_>) -> bool) -> Option<f64> {
    let counted = pairs(rows).filter(|(fast, slow)| counts(fast, slow));
    let signs: Vec<f64> = counted
        .map(
            |(fast, slow)| match slow.predicted_s.total_cmp(&fast.predicted_s) {
                std::cmp::Ordering::Greater => 1.0,
                std::cmp::Ordering::Equal => 0.0,
                std::cmp::Ordering::Less => -1.0,
            },
        )
        .collect();
    mean(&signs)
}

/// Bounds tau over all pairs for predictions that are a function of a plan's columns. The bound is
/// reached where no three plans beat each other in a circle.
fn best_tau_of_columns(rows: &[&Scored<'_>]) -> f64 {
    let (mut n_pairs, mut ahead) = (0, BTreeMap::<_, i32>::new());
    for (fast, slow) in pairs(rows) {
        n_pairs += 1;
        let (fast, slow) = (plan(fast), plan(slow));
        match fast.cmp(&slow) {
            std::cmp::Ordering::Less => *ahead.entry((fast, slow)).or_default() += 1,
            std::cmp::Ordering::Greater => *ahead.entry((slow, fast)).or_default() -= 1,
            std::cmp::Ordering::Equal => {}
        }
    }
    let right: u32 = ahead.values().map(|n| n.unsigned_abs()).sum();
    f64::from(right) / f64::from(n_pairs.max(1))
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

#[cfg(test)]
mod tests {
    use super::*;
    use frameworks::MemoryUse;
    use published::row::Row;

    /// Two plans, the first of which was measured twice, 10% apart.
    const ROWS: &str =
        "row_id,framework,layers,hidden,heads,gpus_total,global_batch,seq_len,precision,tp,pp
R1,F,2,8,2,8,8,8,fp16,2,1
R2,F,2,8,2,8,8,8,fp16,2,1
R3,F,2,8,2,8,8,8,fp16,1,2
";

    fn scored<'a>(rows: &'a [Row], measured: &[f64], predicted: &[f64]) -> Vec<Scored<'a>> {
        let times = measured.iter().zip(predicted);
        rows.iter()
            .zip(times)
            .map(|(row, (&measured_s, &predicted_s))| Scored {
                row,
                stratum: "A100/some".into(),
                tier: 'A',
                measured_s,
                predicted_s,
                memory_gb: None,
                memory: MemoryUse::default(),
                measured_mfu: None,
            })
            .collect()
    }

    #[test]
    fn a_plan_measured_again_has_no_order() {
        let rows = published::row::rows(&published::csv::parse(ROWS).unwrap());
        let all = scored(&rows, &[1.0, 1.1, 2.0], &[1.0, 1.0, 3.0]);
        let all: Vec<&Scored<'_>> = all.iter().collect();
        assert_eq!(tau(&all, |_, _| true), Some(2.0 / 3.0));
        assert_eq!(tau(&all, differ), Some(1.0));
        assert_eq!(best_tau_of_columns(&all), 2.0 / 3.0);
        // Even where something else than the plan tells its runs apart, rightly or wrongly.
        let wrong = scored(&rows, &[1.0, 1.1, 2.0], &[1.2, 1.1, 1.0]);
        let wrong: Vec<&Scored<'_>> = wrong.iter().collect();
        assert_eq!(tau(&wrong, differ), Some(-1.0));
        assert_eq!(tau(&wrong[..2], differ), None);
        // A third plan between the two runs of the first cannot be right about both.
        let between = scored(&rows, &[1.0, 3.0, 2.0], &[1.0, 1.0, 2.0]);
        let between: Vec<&Scored<'_>> = between.iter().collect();
        assert_eq!(best_tau_of_columns(&between), 0.0);
        assert_eq!(tau(&between, |_, _| true), Some(0.0));
        // 1.5% apart is not compared.
        let near = scored(&rows[1..], &[1.0, 1.015], &[1.0, 0.5]);
        let near: Vec<&Scored<'_>> = near.iter().collect();
        assert_eq!(tau(&near, differ), None);
    }
}
