//! microlp as a backend of the integer program: pure Rust, for builds without a C++ compiler, and
//! a cross-check of HiGHS on small problems.
//!
//! Branch and bound goes in slices of nodes, so that the gap is looked at between them and the
//! work ends soon after it was left behind. microlp has no limit on the iterations of a linear
//! program: what would take more than are allowed is not begun.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use microlp::{
    ComparisonOp, Error, OptimizationDirection, Problem, ResumeOptions, SolveOptions,
    TerminationReason, Variable,
};

use super::aside::aside;
use super::{Answer, Limits, Model};

/// The branch-and-bound nodes of a slice.
const SLICE: u64 = 32;

pub(in super::super) fn run(
    model: Model,
    start: Option<Vec<f64>>,
    limits: Limits,
    stop: &dyn Fn() -> bool,
) -> Answer {
    aside("microlp", limits.time, stop, move |left| {
        solve(&model, start.as_deref(), &limits, left)
    })
}

/// Solves the model; `None` when microlp refuses it, or loses its way in floating point.
fn solve(
    model: &Model,
    start: Option<&[f64]>,
    limits: &Limits,
    left: &AtomicBool,
) -> Option<Answer> {
    let expected = expected_iterations(model);
    if limits.iterations.is_some_and(|most| expected > most) {
        return None;
    }
    let begun = Instant::now();
    let time_left = || limits.time.map(|time| time.saturating_sub(begun.elapsed()));
    let (problem, columns) = problem(model, limits.relax);
    let mut options = SolveOptions::default();
    options.time_limit = time_left();
    options.node_limit = Some(SLICE.min(limits.nodes.unwrap_or(SLICE)));
    options.warm_start = start.map(|point| columns.iter().copied().zip(point.to_vec()).collect());
    let mut solved = problem.solve_with(options);
    loop {
        let outcome = match solved {
            Ok(outcome) => outcome,
            Err(Error::Infeasible) => return Some(Answer::Infeasible),
            Err(_) => return None,
        };
        let stats = outcome.stats();
        let bound = stats.best_bound.filter(|bound| bound.is_finite());
        let solution = outcome.solution();
        let values = solution.map(|s| columns.iter().map(|&c| s.var_value_raw(c)).collect());
        let gap = solution.zip(bound).map(|(s, bound)| s.objective() - bound);
        let close = gap.is_some_and(|gap| gap <= limits.absolute_gap);
        match (values, bound) {
            (Some(columns), Some(bound)) if close || outcome.is_optimal() => {
                return Some(Answer::Optimal {
                    columns,
                    bound,
                    iterations: stats.lp_iterations,
                });
            }
            (columns, bound) => {
                let nodes_left = limits.nodes.map(|n| n.saturating_sub(stats.nodes_solved));
                let over = outcome.termination_reason() != TerminationReason::NodeLimit
                    || nodes_left == Some(0)
                    || left.load(Ordering::Relaxed);
                if over {
                    return Some(Answer::Stopped { columns, bound });
                }
                let mut next = ResumeOptions::default();
                next.time_limit = time_left();
                next.node_limit = Some(SLICE.min(nodes_left.unwrap_or(SLICE)));
                solved = outcome.resume_with(next);
            }
        }
    }
}

fn problem(model: &Model, relax: bool) -> (Problem, Vec<Variable>) {
    let mut problem = Problem::new(OptimizationDirection::Minimize);
    let of_columns = model.costs.iter().zip(&model.integer);
    let columns: Vec<Variable> = of_columns
        .map(|(&cost, &integer)| match integer && !relax {
            true => problem.add_binary_var(cost),
            false => problem.add_var(cost, (0.0, 1.0)),
        })
        .collect();
    for row in &model.rows {
        let terms = row
            .terms
            .iter()
            .map(|&(c, factor)| (columns[c as usize], factor));
        let terms: Vec<(Variable, f64)> = terms.collect();
        if row.low == row.high {
            problem.add_constraint(&terms[..], ComparisonOp::Eq, row.high);
            continue;
        }
        if row.low > f64::NEG_INFINITY {
            problem.add_constraint(&terms[..], ComparisonOp::Ge, row.low);
        }
        problem.add_constraint(&terms[..], ComparisonOp::Le, row.high);
    }
    (problem, columns)
}

/// Estimates the iterations of the simplex method: two to three per row in practice (Dantzig 1963).
fn expected_iterations(model: &Model) -> u64 {
    3 * model.rows.len() as u64
}
