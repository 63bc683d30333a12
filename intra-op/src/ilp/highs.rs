//! HiGHS as a backend of the integer program.
//!
//! When it is left behind, what bound it had by then is lost: it tells bounds on the way to
//! callbacks, which the `highs` crate does not offer, and to a log, which is a file; the
//! relaxation's bound is known before. One thread per solve: more would make the result depend
//! on timing, and HiGHS refuses to change the number within a process.

use highs::{HighsModelStatus, HighsSolutionStatus, RowProblem, Sense};

use super::aside::aside;
use super::{Answer, Limits, Model};

/// The simplex iterations of one linear program where no limit is given: minutes at most.
const MAX_ITERATIONS: u64 = 200_000;

pub(in super::super) fn run(
    model: Model,
    start: Option<Vec<f64>>,
    limits: Limits,
    stop: &dyn Fn() -> bool,
) -> Answer {
    aside("highs", limits.time, stop, move |_| {
        solve(&model, start.as_deref(), &limits)
    })
}

/// Solves the model; `None` when HiGHS refuses the model or an option.
fn solve(model: &Model, start: Option<&[f64]>, limits: &Limits) -> Option<Answer> {
    let mut problem = RowProblem::default();
    let mut columns = Vec::with_capacity(model.costs.len());
    for (&cost, &integer) in model.costs.iter().zip(&model.integer) {
        let integer = integer && !limits.relax;
        columns.push(problem.add_column_with_integrality(cost, 0.0..=1.0, integer));
    }
    for row in &model.rows {
        let terms = row
            .terms
            .iter()
            .map(|&(c, factor)| (columns[c as usize], factor));
        problem.add_row(row.low..=row.high, terms.collect::<Vec<_>>());
    }
    let mut highs = problem.try_optimise(Sense::Minimise).ok()?;
    highs.make_quiet();
    highs.try_set_option("threads", 1).ok()?;
    highs.try_set_option("parallel", "off").ok()?;
    highs
        .try_set_option("random_seed", (limits.seed & 0x7fff_ffff) as i32)
        .ok()?;
    highs.try_set_option("mip_rel_gap", 0.0).ok()?;
    highs
        .try_set_option("mip_abs_gap", limits.absolute_gap)
        .ok()?;
    if let Some(time) = limits.time {
        highs
            .try_set_option("time_limit", time.as_secs_f64())
            .ok()?;
    }
    if limits.time.is_none() || limits.iterations.is_some() {
        let iterations = limits.iterations.unwrap_or(MAX_ITERATIONS);
        let iterations = i32::try_from(iterations).unwrap_or(i32::MAX);
        highs
            .try_set_option("simplex_iteration_limit", iterations)
            .ok()?;
    }
    if let Some(nodes) = limits.nodes {
        let nodes = i32::try_from(nodes).unwrap_or(i32::MAX);
        highs.try_set_option("mip_max_nodes", nodes).ok()?;
    }
    if let Some(start) = start {
        highs.try_set_solution(Some(start), None, None, None).ok()?;
    }
    let solved = highs.try_solve().ok()?;
    let has_solution = solved.primal_solution_status() == HighsSolutionStatus::Feasible;
    let columns = has_solution.then(|| solved.get_solution().columns().to_vec());
    let bound = if limits.relax {
        Some(solved.objective_value())
    } else {
        solved.double_info_value(c"mip_dual_bound").ok()
    };
    let bound = bound.filter(|b| b.is_finite());
    let iterations = u64::try_from(solved.simplex_iteration_count()).unwrap_or(0);
    Some(match (solved.status(), columns) {
        (HighsModelStatus::Infeasible, _) => Answer::Infeasible,
        (HighsModelStatus::Optimal, Some(columns)) => Answer::Optimal {
            columns,
            bound: bound?,
            iterations,
        },
        // The relaxation's objective bounds nothing unless it was solved.
        (_, columns) => Answer::Stopped {
            columns,
            bound: bound.filter(|_| !limits.relax),
        },
    })
}
