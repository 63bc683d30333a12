//! microlp, through good_lp, as a backend of the integer program: for builds without a C++
//! compiler, and as a cross-check of HiGHS on small problems. It knows no node limit,
//! cannot be interrupted but by its time limit, and reports no bound when that stops it. What
//! would take more iterations than allowed is not begun.

use good_lp::solvers::microlp::microlp;
use good_lp::{
    Expression, ProblemVariables, ResolutionError, Solution, SolutionStatus, SolverModel, Variable,
    WithTimeLimit, constraint, variable,
};

use super::{Answer, Limits, Model};

pub(in super::super) fn run(
    model: Model,
    _start: Option<Vec<f64>>,
    limits: Limits,
    _stop: &dyn Fn() -> bool,
) -> Answer {
    let iterations = expected_iterations(&model);
    if limits.iterations.is_some_and(|most| iterations > most) {
        return Answer::Stopped {
            columns: None,
            bound: None,
        };
    }
    let mut variables = ProblemVariables::new();
    let columns: Vec<Variable> = model
        .integer
        .iter()
        .map(|&integer| {
            let v = variable().min(0.0).max(1.0);
            variables.add(if integer && !limits.relax {
                v.integer()
            } else {
                v
            })
        })
        .collect();
    let weighted = |terms: &mut dyn Iterator<Item = (usize, f64)>| -> Expression {
        terms.map(|(c, factor)| factor * columns[c]).sum()
    };
    let objective = weighted(&mut model.costs.iter().copied().enumerate());
    let mut problem = variables.minimise(objective).using(microlp);
    for row in &model.rows {
        let sum = weighted(&mut row.terms.iter().map(|&(c, factor)| (c as usize, factor)));
        if row.low == row.high {
            problem.add_constraint(constraint!(sum == row.high));
            continue;
        }
        if row.low > f64::NEG_INFINITY {
            problem.add_constraint(constraint!(sum.clone() >= row.low));
        }
        problem.add_constraint(constraint!(sum <= row.high));
    }
    let problem = match limits.time {
        Some(time) => problem.with_time_limit(time.as_secs_f64()),
        None => problem,
    };
    match problem.solve() {
        Ok(solution) => {
            let values: Vec<f64> = columns.iter().map(|&c| solution.value(c)).collect();
            let bound = values.iter().zip(&model.costs).map(|(x, c)| x * c).sum();
            match solution.status() {
                SolutionStatus::Optimal => Answer::Optimal {
                    columns: values,
                    bound,
                    iterations,
                },
                _ => Answer::Stopped {
                    columns: Some(values),
                    bound: None,
                },
            }
        }
        Err(ResolutionError::Infeasible) => Answer::Infeasible,
        Err(_) => Answer::Stopped {
            columns: None,
            bound: None,
        },
    }
}

/// microlp does not count. The simplex method takes two to three iterations per row in
/// practice (Dantzig 1963).
fn expected_iterations(model: &Model) -> u64 {
    3 * model.rows.len() as u64
}
