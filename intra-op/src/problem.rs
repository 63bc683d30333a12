//! The intra-op problem as a small plain value, and its evaluation.
//!
//! Choose one strategy per node; pay the node's cost, and for every edge the cost of the
//! pair chosen at its ends; at every time the chosen usages of the nodes that are live
//! must fit the budget. Evaluating knows nothing about solving.
//!
//! Invariants of a valid problem ([`IntraOpProblem::validate`]):
//! * every node has at least one strategy, and as many usages as costs;
//! * every edge joins two nodes that exist, and its table has one cell per pair.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::IntraOpError;

/// A cost in an integer quantum that the caller fixes, or the mark of a choice that is forbidden.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct Cost(u64);

impl Cost {
    /// No cost.
    pub const ZERO: Cost = Cost(0);
    /// The mark of what must not be picked: larger than all costs, and unchanged by adding.
    pub const FORBIDDEN: Cost = Cost(u64::MAX);

    /// Makes a finite cost. `u64::MAX` itself cannot be represented and becomes `u64::MAX - 1`.
    pub const fn finite(value: u64) -> Cost {
        if value == u64::MAX {
            Cost(u64::MAX - 1)
        } else {
            Cost(value)
        }
    }

    /// Returns the number, or `None` when forbidden.
    pub const fn value(self) -> Option<u64> {
        if self.0 == u64::MAX {
            None
        } else {
            Some(self.0)
        }
    }

    /// Says whether this is [`Cost::FORBIDDEN`].
    pub const fn is_forbidden(self) -> bool {
        self.0 == u64::MAX
    }

    /// Returns the sum; forbidden if either is. A finite sum beyond 64 bits also ends at forbidden,
    /// which solvers exclude by checking magnitudes first.
    #[must_use]
    pub const fn plus(self, other: Cost) -> Cost {
        Cost(self.0.saturating_add(other.0))
    }

    /// Subtracts a finite cost that is not larger; forbidden stays forbidden.
    #[must_use]
    pub(crate) const fn minus(self, base: u64) -> Cost {
        if self.0 == u64::MAX {
            self
        } else {
            Cost(self.0.saturating_sub(base))
        }
    }
}

impl std::fmt::Debug for Cost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.value() {
            Some(value) => write!(f, "{value}"),
            None => f.write_str("forbidden"),
        }
    }
}

/// A dense cost table over the strategies of two nodes, rows for the first node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Table {
    n_rows: u32,
    n_cols: u32,
    cells: Arc<[Cost]>,
    has_forbidden: bool,
}

impl Table {
    /// Makes a table from row-major cells; `None` unless there are `n_rows * n_cols` of them.
    pub fn new(n_rows: usize, n_cols: usize, cells: impl Into<Arc<[Cost]>>) -> Option<Table> {
        let cells = cells.into();
        let fits = n_rows.checked_mul(n_cols) == Some(cells.len());
        let (rows, cols) = (u32::try_from(n_rows).ok()?, u32::try_from(n_cols).ok()?);
        let has_forbidden = cells.iter().any(|c| c.is_forbidden());
        fits.then_some(Table {
            n_rows: rows,
            n_cols: cols,
            cells,
            has_forbidden,
        })
    }

    /// Makes a table whose cell (i, j) is `cell(i, j)`.
    pub fn from_fn(n_rows: usize, n_cols: usize, cell: impl Fn(usize, usize) -> Cost) -> Table {
        let mut cells = Vec::with_capacity(n_rows * n_cols);
        for i in 0..n_rows {
            cells.extend((0..n_cols).map(|j| cell(i, j)));
        }
        Table::new(n_rows, n_cols, cells).expect("one cell was made per pair")
    }

    /// Returns the number of strategies of the first node.
    pub fn n_rows(&self) -> usize {
        self.n_rows as usize
    }

    /// Returns the number of strategies of the second node.
    pub fn n_cols(&self) -> usize {
        self.n_cols as usize
    }

    /// Returns all cells, row by row.
    pub fn cells(&self) -> &[Cost] {
        &self.cells
    }

    /// Returns the cost of strategy `row` at the first node with strategy `col` at the second.
    pub fn get(&self, row: usize, col: usize) -> Cost {
        self.cells[row * self.n_cols as usize + col]
    }

    /// Returns one row.
    pub fn row(&self, row: usize) -> &[Cost] {
        let n = self.n_cols as usize;
        &self.cells[row * n..(row + 1) * n]
    }

    /// Says whether some pair is forbidden.
    pub fn has_forbidden(&self) -> bool {
        self.has_forbidden
    }

    /// Returns the same table with its two nodes exchanged.
    #[must_use]
    pub fn transposed(&self) -> Table {
        Table::from_fn(self.n_cols(), self.n_rows(), |i, j| self.get(j, i))
    }
}

/// One decision: what each strategy costs and uses, and when the usage is live.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// The cost of each strategy.
    pub costs: Vec<Cost>,
    /// The memory of each strategy, in bytes, while the node is live.
    pub usages: Vec<u64>,
    /// The half-open live interval `[from, to)`; empty when `from >= to`.
    pub interval: [u64; 2],
}

/// A cost that depends on the strategies of two nodes. Parallel edges add up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edge {
    /// The node at the table's rows.
    pub a: u32,
    /// The node at the table's columns.
    pub b: u32,
    /// The costs; equal tables are best shared.
    pub table: Arc<Table>,
}

/// A problem: pick a strategy for each node, at the least total cost within the memory budget.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct IntraOpProblem {
    /// The name, for people.
    pub name: String,
    /// The decisions.
    pub nodes: Vec<Node>,
    /// The pairwise costs.
    pub edges: Vec<Edge>,
    /// Bytes that may be in use at any one time; `None` when memory does not matter.
    pub usage_limit: Option<u64>,
}

/// The cost and memory of a choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evaluation {
    /// Total cost; `None` when a forbidden strategy or pair was picked.
    pub objective: Option<u128>,
    /// The most bytes in use at any time.
    pub peak_usage: u128,
    /// The first time at which the peak is reached; `None` when nothing is ever used.
    pub peak_time: Option<u64>,
    /// True when nothing forbidden was picked and the peak is within the limit.
    pub feasible: bool,
}

impl IntraOpProblem {
    /// Checks the invariants in the module header.
    ///
    /// # Errors
    /// [`IntraOpError::Malformed`] with the place, in the words of the file form.
    pub fn validate(&self) -> Result<(), IntraOpError> {
        for (v, node) in self.nodes.iter().enumerate() {
            let place = format!("problem.nodes.costs[{v}]");
            if node.costs.is_empty() {
                return Err(IntraOpError::malformed(place, "has no strategies"));
            }
            if node.costs.len() != node.usages.len() {
                let (n, m) = (node.costs.len(), node.usages.len());
                let detail = format!("has {n} entries but usages[{v}] has {m}");
                return Err(IntraOpError::malformed(place, detail));
            }
        }
        for (e, edge) in self.edges.iter().enumerate() {
            self.validate_edge(e, edge)?;
        }
        Ok(())
    }

    fn validate_edge(&self, e: usize, edge: &Edge) -> Result<(), IntraOpError> {
        let n_strategies = |v: u32| {
            let node = self.nodes.get(v as usize).ok_or_else(|| {
                let n = self.nodes.len();
                let detail = format!("names node {v} but there are {n} nodes");
                IntraOpError::malformed(format!("problem.edges.nodes[{e}]"), detail)
            })?;
            Ok::<usize, IntraOpError>(node.costs.len())
        };
        let (rows, cols) = (n_strategies(edge.a)?, n_strategies(edge.b)?);
        if (rows, cols) != (edge.table.n_rows(), edge.table.n_cols()) {
            let n = edge.table.cells().len();
            let (a, b) = (edge.a, edge.b);
            let detail =
                format!("has {n} entries but nodes {a} and {b} have {rows} x {cols} strategies");
            let place = format!("problem.edges.costs[{e}]");
            return Err(IntraOpError::malformed(place, detail));
        }
        Ok(())
    }
}

/// Computes the exact cost and memory of `choice` (one strategy index per node).
///
/// # Errors
/// [`IntraOpError::Choice`] when the choice has the wrong length or names a strategy that
/// does not exist; [`IntraOpError::Malformed`] when the problem is not valid.
pub fn evaluate(problem: &IntraOpProblem, choice: &[u32]) -> Result<Evaluation, IntraOpError> {
    problem.validate()?;
    check_choice(problem, choice)?;
    let mut objective = Some(0u128);
    let mut add = |cost: Cost| {
        objective = match (objective, cost.value()) {
            (Some(sum), Some(c)) => Some(sum + u128::from(c)),
            _ => None,
        };
    };
    for (node, &s) in problem.nodes.iter().zip(choice) {
        add(node.costs[s as usize]);
    }
    for edge in &problem.edges {
        let (i, j) = (choice[edge.a as usize], choice[edge.b as usize]);
        add(edge.table.get(i as usize, j as usize));
    }
    let (peak_usage, peak_time) = peak(problem, choice);
    let fits = problem
        .usage_limit
        .is_none_or(|limit| peak_usage <= u128::from(limit));
    Ok(Evaluation {
        objective,
        peak_usage,
        peak_time,
        feasible: fits && objective.is_some(),
    })
}

fn check_choice(problem: &IntraOpProblem, choice: &[u32]) -> Result<(), IntraOpError> {
    let (n, got) = (problem.nodes.len(), choice.len());
    if n != got {
        let detail = format!("has {got} entries but there are {n} nodes");
        return Err(IntraOpError::Choice { detail });
    }
    for (v, (node, &s)) in problem.nodes.iter().zip(choice).enumerate() {
        let n = node.costs.len();
        if s as usize >= n {
            let detail = format!("picks strategy {s} for node {v}, which has {n}");
            return Err(IntraOpError::Choice { detail });
        }
    }
    Ok(())
}

/// Finds the highest level of memory and when it is first reached, by a sweep over the ends of the
/// live intervals; ends come before starts at equal times because intervals are half-open.
fn peak(problem: &IntraOpProblem, choice: &[u32]) -> (u128, Option<u64>) {
    let mut events: Vec<(u64, bool, u64)> = Vec::new();
    for (node, &s) in problem.nodes.iter().zip(choice) {
        let [from, to] = node.interval;
        if from < to {
            let usage = node.usages[s as usize];
            events.push((from, true, usage));
            events.push((to, false, usage));
        }
    }
    events.sort_unstable();
    let (mut level, mut peak, mut time) = (0u128, 0u128, None);
    for (at, starts, usage) in events {
        if starts {
            level += u128::from(usage);
        } else {
            level -= u128::from(usage);
        }
        if level > peak {
            (peak, time) = (level, Some(at));
        }
    }
    (peak, time)
}
