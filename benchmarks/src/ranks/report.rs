//! The result as a page.

use crate::Line;
use cost_model::compare::Cause;
use ir::Seconds;
use ir::cluster::Cluster;
use std::collections::BTreeMap;
use std::fmt::Write;

/// The aim: ratios between this and its inverse.
const AIM: f64 = 0.85;
/// Plans whose measured times differ by a smaller share have no order.
const EQUAL: f64 = 0.05;

/// Writes the page.
pub fn report(lines: &[Line], clusters: &BTreeMap<u32, Cluster>, rounds: usize) -> String {
    let mut w = String::from("# Predicted and measured steps of CPU ranks\n\n");
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let _ = writeln!(
        w,
        "`cargo run --release -p benchmarks --bin ranks`: {rounds} rounds of calibration and steps in turn on {cores} processors,\n16 samples of 128 tokens in f32. Steps while other programs took more than 4% of the processors are not counted.\n"
    );
    w += "| plan | ranks | predicted | measured, median | middle half | ratio | steps | left out |\n|---|---|---|---|---|---|---|---|\n";
    for l in lines {
        let at = |share: f64| quantile(&l.measured_s, share);
        let _ = writeln!(
            w,
            "| {} | {} | {} | {} | {} to {} | {:.2} | {} | {} |",
            l.name,
            l.n_ranks,
            Seconds(l.predicted_s),
            Seconds(at(0.5)),
            Seconds(at(0.25)),
            Seconds(at(0.75)),
            ratio(l),
            l.measured_s.len(),
            l.disturbed
        );
    }
    let ratios: Vec<f64> = lines.iter().map(ratio).filter(|r| r.is_finite()).collect();
    let within = ratios.iter().filter(|r| (AIM..=1.0 / AIM).contains(*r));
    let (pairs, concordant, apart, wrong) = order(lines);
    let _ = writeln!(
        w,
        "\nRatios are predicted over measured: {} of {} within 15%, {:.2} to {:.2}. Kendall's tau of the order is {:.2}; of {apart} pairs of plans whose medians differ by more than 5%, {wrong} are predicted in the wrong order.\n",
        within.count(),
        lines.len(),
        ratios.iter().copied().fold(f64::INFINITY, f64::min),
        ratios.iter().copied().fold(0.0, f64::max),
        2.0 * concordant as f64 / (pairs.max(1)) as f64 - 1.0,
    );
    w += "Where predicted and measured part, measured less predicted, in percent of the measured step\n(`meshwright compare` shows the same of any run):\n\n| plan | compute | collectives | transfers | waiting | other than profiled steps |\n|---|---|---|---|---|---|\n";
    for l in lines {
        let Some(fall) = &l.waterfall else { continue };
        let of = |cause: Cause| {
            let parts = fall.parts.iter().filter(|p| p.cause == cause);
            let sum: f64 = parts.map(|p| p.difference_s).sum();
            format!("{:+.1}%", 100.0 * sum / fall.measured_s)
        };
        let _ = writeln!(
            w,
            "| {} | {} | {} | {} | {} | {} |",
            l.name,
            of(Cause::Compute),
            of(Cause::Collectives),
            of(Cause::Transfers),
            of(Cause::Waiting),
            of(Cause::Profiling)
        );
    }
    w += &kinds(lines);
    w += "\nFitted: ";
    for (n, c) in clusters {
        let d = &c.device;
        let _ = write!(
            w,
            "{n} ranks: matmuls at best {:.0} GFLOP/s, on {:.2} processors; ",
            d.peak_flops_per_s.values().copied().fold(0.0, f64::max) / 1e9,
            c.pool.map_or(1.0, |p| p.compute_devices),
        );
    }
    w.truncate(w.trim_end_matches("; ").len());
    w += ".\n";
    w
}

/// Writes the kinds of instructions that are most off, over all plans.
fn kinds(lines: &[Line]) -> String {
    let mut sums: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
    for p in lines
        .iter()
        .filter_map(|l| l.waterfall.as_ref())
        .flat_map(|f| &f.kinds)
    {
        if let Some(kind) = &p.kind {
            let sum = sums.entry(kind).or_default();
            *sum = (sum.0 + p.predicted_s, sum.1 + p.measured_s);
        }
    }
    let mut all: Vec<(&str, (f64, f64))> = sums.into_iter().collect();
    all.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
    let mut w = String::from(
        "\nWork by kind of instruction, summed over the plans:\n\n| kind | predicted | measured | ratio |\n|---|---|---|---|\n",
    );
    for (kind, (predicted, measured)) in all.into_iter().take(16) {
        let _ = writeln!(
            w,
            "| {kind} | {} | {} | {:.2} |",
            Seconds(predicted),
            Seconds(measured),
            predicted / measured
        );
    }
    w
}

/// Returns the middle of ascending values.
pub fn median(ascending: &[f64]) -> f64 {
    quantile(ascending, 0.5)
}

fn quantile(ascending: &[f64], share: f64) -> f64 {
    let Some(last) = ascending.len().checked_sub(1) else {
        return f64::NAN;
    };
    let at = share * last as f64;
    let (low, high) = (
        ascending[at.floor() as usize],
        ascending[at.ceil() as usize],
    );
    low + (high - low) * at.fract()
}

fn ratio(l: &Line) -> f64 {
    l.predicted_s / median(&l.measured_s)
}

/// Counts pairs, those in the measured order, those whose times differ, and of these the ones in
/// the wrong order.
fn order(lines: &[Line]) -> (usize, usize, usize, usize) {
    let (mut pairs, mut concordant, mut apart, mut wrong) = (0, 0, 0, 0);
    for (i, a) in lines.iter().enumerate() {
        for b in &lines[..i] {
            let (x, y) = (median(&a.measured_s), median(&b.measured_s));
            let same = (a.predicted_s < b.predicted_s) == (x < y);
            pairs += 1;
            concordant += usize::from(same);
            let differ = (x - y).abs() > EQUAL * x.min(y);
            apart += usize::from(differ);
            wrong += usize::from(differ && !same);
        }
    }
    (pairs, concordant, apart, wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(predicted_s: f64, measured_s: &[f64]) -> Line {
        Line {
            name: "a".into(),
            n_ranks: 2,
            predicted_s,
            measured_s: measured_s.to_vec(),
            disturbed: 0,
            waterfall: None,
        }
    }

    #[test]
    fn orders_are_compared_pair_by_pair() {
        // 1 < 2 < 3 measured, predicted 1 < 3 < 2: one of three pairs is wrong.
        let lines = [line(1.0, &[1.0]), line(3.0, &[2.0]), line(2.0, &[3.0])];
        assert_eq!(order(&lines), (3, 2, 3, 1));
        // Nearly equal times have no order.
        assert_eq!(
            order(&[line(1.0, &[1.02]), line(2.0, &[1.0])]),
            (1, 0, 0, 0)
        );
        assert_eq!(quantile(&[1.0, 2.0, 4.0, 8.0], 0.5), 3.0);
        let page = report(&lines, &BTreeMap::new(), 1);
        assert!(page.contains("1 of 3 within 15%, 0.67 to 1.50"), "{page}");
    }
}
