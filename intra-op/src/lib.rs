//! The intra-op problem and its solvers.
//!
//! Plain values in, plain values out: nodes with strategies, pairwise costs, memory over live
//! intervals and a budget go in; a choice with a proof (`Optimal`, or a bound and a gap) comes
//! out. What the nodes mean is the caller's business.
//!
//! The phases, in [`solve()`](solve::solve), which runs them on several threads:
//! * [`presolve`](presolve::presolve()) shrinks the problem without losing an optimum;
//! * `dual` prices memory over time and passes messages: a rigorous bound for any graph, with
//!   prices and messages that `smooth` finds in floating point;
//! * [`eliminate`] solves near-chains exactly at given prices, and gives layer tables;
//! * `dive` makes choices that fit, `improve` betters them: `forest` and `block` propose at
//!   prices, `exchange` takes what fits;
//! * `tighten` drops what the bound rules out beside the best choice, and presolve runs again;
//!   `warm` keeps prices and messages for what is left;
//! * `ilp` finishes with HiGHS (or microlp), memory rows added as they are violated;
//!   `neighbourhood` uses it on parts of what is too large.

mod block;
mod dive;
mod dual;
pub mod eliminate;
mod exchange;
mod flat;
mod forest;
mod ilp;
mod improve;
pub mod iopddl;
mod neighbourhood;
pub mod presolve;
mod price_step;
pub mod problem;
mod profile;
pub mod reduced;
mod smooth;
pub mod solve;
mod tables;
mod tighten;
mod warm;

pub use iopddl::{read_problem, read_solution, write_problem, write_solution};
pub use problem::{Cost, Edge, Evaluation, IntraOpProblem, Node, Table, evaluate};
pub use solve::{IlpBackend, Phases, SolveOptions, SolveResult, SolveStatus, TraceEntry, solve};

use thiserror::Error;

/// The reasons why an intra-op problem cannot be read, written or taken on.
#[derive(Debug, Error)]
pub enum IntraOpError {
    /// The parts of a problem do not agree.
    #[error("{place} {detail}")]
    Malformed {
        /// The place, in the words of the file form: `problem.nodes.costs[17]`.
        place: String,
        /// The fault there.
        detail: String,
    },
    /// A choice does not belong to the problem.
    #[error("the choice {detail}")]
    Choice {
        /// Its fault.
        detail: String,
    },
    /// Numbers too large for exact 64-bit sums.
    #[error("the {what} may add up to {total}, more than the solver's 2^61; use a coarser unit")]
    Magnitude {
        /// The kind of the numbers: "costs" or "usages".
        what: &'static str,
        /// The largest conceivable sum.
        total: u128,
    },
    /// The input could not be read, or is not of the right form.
    #[error("cannot read: {detail}")]
    Read {
        /// The reason, with line and column where known.
        detail: String,
    },
    /// The output could not be written.
    #[error("cannot write: {detail}")]
    Write {
        /// The reason.
        detail: String,
    },
}

impl IntraOpError {
    pub(crate) fn malformed(place: String, detail: impl Into<String>) -> Self {
        let detail = detail.into();
        IntraOpError::Malformed { place, detail }
    }

    pub(crate) fn read(why: impl std::fmt::Display) -> Self {
        let detail = why.to_string();
        IntraOpError::Read { detail }
    }

    pub(crate) fn write(why: impl std::fmt::Display) -> Self {
        let detail = why.to_string();
        IntraOpError::Write { detail }
    }
}
