//! The reduced problem as an integer program, with memory rows added as they are violated.
//!
//! Linearised by marginals: x[v,s] says that node v takes strategy s; for every edge,
//! y[i,j] >= 0 with sum_j y[i,j] = x[a,i] and sum_i y[i,j] = x[b,j]. Equal rows (columns) of a
//! table share their y, which loses nothing. Only the y of allowed pairs exist.
//!
//! Memory rows are lazy: solve, look at the profile, add the rows of the violated peaks,
//! repeat; first on the linear relaxation, where it is cheap. A solution that only breaks a
//! row within the solver's tolerance is cut off exactly, by the set of strategies that does
//! not fit together.
//!
//! Invariants: costs are divided by a power of two and memory by another, so that both are
//! near what the solver's absolute tolerances are meant for; an answer is rounded and then
//! evaluated in integers by the caller of the backend, never trusted.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use super::problem::{Cost, Edge};
use super::reduced::Reduced;

/// Where the largest cost coefficient is brought to.
const COST_MAGNITUDE: u64 = 1 << 16;
/// Where the memory limit is brought to.
const MEMORY_MAGNITUDE: u64 = 1 << 16;
/// Memory rows added per round at most.
const ROWS_PER_ROUND: usize = 12;

/// A mixed-integer program: minimise costs over columns in [0, 1] subject to rows.
#[derive(Clone, Debug, Default)]
pub(super) struct Model {
    pub costs: Vec<f64>,
    pub integer: Vec<bool>,
    pub rows: Vec<ModelRow>,
}

/// `low <= sum of terms <= high`.
#[derive(Clone, Debug)]
pub(super) struct ModelRow {
    pub low: f64,
    pub high: f64,
    pub terms: Vec<(u32, f64)>,
}

/// When a backend must stop.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub time: Option<Duration>,
    pub nodes: Option<u64>,
    /// In the model's cost units.
    pub absolute_gap: f64,
    pub seed: u64,
    /// Forget that columns are integer.
    pub relax: bool,
}

/// What a backend found.
#[derive(Clone, Debug)]
pub(super) enum Answer {
    /// Solved within the gap.
    Optimal {
        columns: Vec<f64>,
        bound: f64,
    },
    /// Stopped before; what there is.
    Stopped {
        columns: Option<Vec<f64>>,
        bound: Option<f64>,
    },
    Infeasible,
}

/// A backend: solves `model`, from a complete point if one is given.
pub(super) type Backend = fn(Model, Option<Vec<f64>>, Limits) -> Answer;

/// What the integer program says about a reduced problem. Costs include what is decided.
#[derive(Clone, Debug, Default)]
pub(super) struct IlpOutcome {
    /// The best choice found that fits, better than the start if one was given.
    pub choice: Option<(u64, Vec<u32>)>,
    /// No choice costs less.
    pub bound: Option<u64>,
    /// Proved: `choice` (or the start) is best within the gap, or nothing fits if there is none.
    pub proved: bool,
    /// Memory rows that were needed.
    pub n_rows: usize,
}

/// What to spend on it.
#[derive(Clone, Debug)]
pub(super) struct IlpOptions {
    /// Branch-and-bound nodes per call of the backend.
    pub nodes: Option<u64>,
    pub relative_gap: f64,
    pub seed: u64,
    pub backend: Backend,
}

/// Columns that [`solve_ilp`] would make.
pub(super) fn n_columns(reduced: &Reduced) -> usize {
    let mut known: HashMap<usize, usize> = HashMap::new();
    let mut columns = |e: &Edge| {
        let key = std::sync::Arc::as_ptr(&e.table) as usize;
        *known.entry(key).or_insert_with(|| {
            let grid = EdgeGrid::new(e);
            grid.cells.len()
        })
    };
    let pairs: usize = reduced.edges.iter().map(&mut columns).sum();
    pairs + reduced.nodes.iter().map(|n| n.costs.len()).sum::<usize>()
}

/// Solves the reduced problem from `start` (a choice that fits), with memory rows at `times`
/// to begin with. `time_left` is asked before every call of the backend.
pub(super) fn solve_ilp(
    reduced: &Reduced,
    start: Option<&(u64, Vec<u32>)>,
    times: &[usize],
    options: &IlpOptions,
    time_left: &dyn Fn() -> Option<Duration>,
) -> IlpOutcome {
    if reduced.nodes.is_empty() {
        return IlpOutcome {
            choice: Some((reduced.offset, Vec::new())),
            bound: Some(reduced.offset),
            proved: true,
            n_rows: 0,
        };
    }
    let mut program = Program::new(reduced);
    let mut state = IlpOutcome {
        choice: start.cloned(),
        ..IlpOutcome::default()
    };
    for &t in times {
        program.add_memory_row(t);
    }
    if !program.relax_until_it_fits(options, time_left, &mut state) {
        return state;
    }
    while !out_of_time(time_left) {
        if program.round(options, time_left, &mut state) {
            break;
        }
    }
    state.n_rows = program.memory_rows.len();
    state
}

fn out_of_time(time_left: &dyn Fn() -> Option<Duration>) -> bool {
    time_left().is_some_and(|left| left.is_zero())
}

struct Program<'a> {
    reduced: &'a Reduced,
    model: Model,
    /// First column of each node.
    first: Vec<u32>,
    grids: Vec<(EdgeGrid, u32)>,
    memory_rows: BTreeSet<usize>,
    cost_unit: f64,
    memory_unit: f64,
}

impl<'a> Program<'a> {
    fn new(reduced: &'a Reduced) -> Program<'a> {
        let node_costs = reduced.nodes.iter().flat_map(|n| &n.costs);
        let edge_costs = reduced.edges.iter().flat_map(|e| e.table.cells());
        let largest = node_costs.chain(edge_costs).filter_map(|c| c.value()).max();
        let limit = reduced.limits.iter().copied().max();
        let unit = |largest: Option<u64>, magnitude: u64| {
            let over = largest.unwrap_or(0) / magnitude;
            (over.checked_next_power_of_two().unwrap_or(1 << 62)).max(1) as f64
        };
        let mut program = Program {
            reduced,
            model: Model::default(),
            first: Vec::new(),
            grids: Vec::new(),
            memory_rows: BTreeSet::new(),
            cost_unit: unit(largest, COST_MAGNITUDE),
            memory_unit: unit(limit, MEMORY_MAGNITUDE),
        };
        program.add_nodes();
        for e in &reduced.edges {
            program.add_edge(e);
        }
        program
    }

    fn scaled(&self, cost: u64) -> f64 {
        cost as f64 / self.cost_unit
    }

    fn add_nodes(&mut self) {
        for node in &self.reduced.nodes {
            let first = self.model.costs.len() as u32;
            self.first.push(first);
            for cost in &node.costs {
                // A forbidden strategy costs nothing and is held at zero by a row.
                let scaled = self.scaled(cost.value().unwrap_or(0));
                self.model.costs.push(scaled);
                self.model.integer.push(true);
            }
            let columns = first..self.model.costs.len() as u32;
            self.model.rows.push(ModelRow {
                low: 1.0,
                high: 1.0,
                terms: columns.clone().map(|c| (c, 1.0)).collect(),
            });
            let barred = columns.zip(&node.costs).filter(|(_, c)| c.is_forbidden());
            let terms: Vec<(u32, f64)> = barred.map(|(column, _)| (column, 1.0)).collect();
            if !terms.is_empty() {
                self.model.rows.push(ModelRow {
                    low: 0.0,
                    high: 0.0,
                    terms,
                });
            }
        }
    }

    fn add_edge(&mut self, e: &Edge) {
        let grid = EdgeGrid::new(e);
        let first = self.model.costs.len() as u32;
        let rows = self.model.rows.len();
        let end = |of: &[u32], node: u32, class: usize| {
            let members = of.iter().enumerate().filter(|(_, c)| **c as usize == class);
            let columns = members.map(|(s, _)| (self.first[node as usize] + s as u32, -1.0));
            ModelRow {
                low: 0.0,
                high: 0.0,
                terms: columns.collect(),
            }
        };
        let mut made: Vec<ModelRow> = (0..grid.n_rows)
            .map(|c| end(&grid.row_class, e.a, c))
            .collect();
        made.extend((0..grid.n_cols).map(|c| end(&grid.col_class, e.b, c)));
        self.model.rows.extend(made);
        for (k, &((i, j), cost)) in grid.cells.iter().enumerate() {
            let column = first + k as u32;
            let scaled = self.scaled(cost);
            self.model.costs.push(scaled);
            self.model.integer.push(false);
            self.model.rows[rows + i as usize].terms.push((column, 1.0));
            let col_row = rows + grid.n_rows + j as usize;
            self.model.rows[col_row].terms.push((column, 1.0));
        }
        self.grids.push((grid, first));
    }

    /// Adds the budget at time `t`; false if it is there already.
    fn add_memory_row(&mut self, t: usize) -> bool {
        if !self.memory_rows.insert(t) {
            return false;
        }
        let mut terms = Vec::new();
        for (node, &first) in self.reduced.nodes.iter().zip(&self.first) {
            for (s, usage) in usages_at(node, t).into_iter().enumerate() {
                if usage > 0 {
                    terms.push((first + s as u32, usage as f64 / self.memory_unit));
                }
            }
        }
        self.model.rows.push(ModelRow {
            low: f64::NEG_INFINITY,
            high: self.reduced.limits[t] as f64 / self.memory_unit,
            terms,
        });
        true
    }

    /// Forbids taking, all at once, strategies that use at least what `choice` uses at `t`.
    fn add_cover_row(&mut self, choice: &[u32], t: usize) {
        let (mut terms, mut users) = (Vec::new(), 0.0);
        for ((node, &first), &s) in self.reduced.nodes.iter().zip(&self.first).zip(choice) {
            let usages = usages_at(node, t);
            let used = usages.get(s as usize).copied().unwrap_or(0);
            if used == 0 {
                continue;
            }
            users += 1.0;
            let as_much = usages.iter().enumerate().filter(|(_, u)| **u >= used);
            terms.extend(as_much.map(|(s, _)| (first + s as u32, 1.0)));
        }
        self.model.rows.push(ModelRow {
            low: f64::NEG_INFINITY,
            high: users - 1.0,
            terms,
        });
    }

    /// Adds memory rows until the linear relaxation breaks none. False when that already
    /// decides: nothing fits.
    fn relax_until_it_fits(
        &mut self,
        options: &IlpOptions,
        time_left: &dyn Fn() -> Option<Duration>,
        state: &mut IlpOutcome,
    ) -> bool {
        while !self.reduced.limits.is_empty() && !out_of_time(time_left) {
            let mut limits = self.limits(options, time_left);
            limits.relax = true;
            match (options.backend)(self.model.clone(), None, limits) {
                Answer::Optimal { columns, bound } => {
                    state.bound = state.bound.max(Some(self.bound(bound)));
                    let levels = self.fractional_levels(&columns);
                    if self.add_peaks(&levels) == 0 {
                        return true;
                    }
                }
                Answer::Infeasible => {
                    state.proved = state.choice.is_none();
                    return !state.proved;
                }
                Answer::Stopped { .. } => return true,
            }
        }
        true
    }

    /// Solves once with the rows there are. True when done: proved, or nothing more to learn.
    fn round(
        &mut self,
        options: &IlpOptions,
        time_left: &dyn Fn() -> Option<Duration>,
        state: &mut IlpOutcome,
    ) -> bool {
        let start = state.choice.as_ref().map(|(_, choice)| self.point(choice));
        let limits = self.limits(options, time_left);
        let (columns, bound, solved) = match (options.backend)(self.model.clone(), start, limits) {
            Answer::Optimal { columns, bound } => (Some(columns), Some(bound), true),
            Answer::Stopped { columns, bound } => (columns, bound, false),
            Answer::Infeasible => {
                // With a choice that fits this can only be the solver's tolerance.
                state.proved = state.choice.is_none();
                return true;
            }
        };
        if let Some(bound) = bound {
            state.bound = state.bound.max(Some(self.bound(bound)));
        }
        let Some(choice) = columns.map(|c| self.rounded(&c)) else {
            return true;
        };
        let Some(cost) = self.reduced.cost(&choice) else {
            return true;
        };
        let levels = self.reduced.levels(&choice);
        let worst =
            (0..levels.len()).max_by_key(|&t| levels[t].saturating_sub(self.reduced.limits[t]));
        match worst {
            Some(t) if levels[t] > self.reduced.limits[t] => {
                let excess: Vec<f64> = self.excess(levels.iter().map(|&l| l as f64));
                if self.add_peaks(&excess) == 0 {
                    self.add_cover_row(&choice, t);
                }
                !solved
            }
            _ => {
                if state.choice.as_ref().is_none_or(|(best, _)| cost < *best) {
                    state.choice = Some((cost, choice));
                }
                state.proved |= solved;
                true
            }
        }
    }

    fn limits(&self, options: &IlpOptions, time_left: &dyn Fn() -> Option<Duration>) -> Limits {
        // Costs are integers: less than one unit apart is equal.
        let objective = self.reduced.offset as f64 / self.cost_unit;
        Limits {
            time: time_left(),
            nodes: options.nodes,
            absolute_gap: (0.5 / self.cost_unit).max(options.relative_gap * objective),
            seed: options.seed,
            relax: false,
        }
    }

    /// A bound of the model in the problem's units, less what floating point may have lost.
    fn bound(&self, bound: f64) -> u64 {
        let units = bound * self.cost_unit;
        let safe = (units - units.abs() * 1e-9 - 0.5).ceil().max(0.0);
        self.reduced.offset + safe as u64
    }

    /// The model's columns for a choice.
    fn point(&self, choice: &[u32]) -> Vec<f64> {
        let mut columns = vec![0.0; self.model.costs.len()];
        for (&first, &s) in self.first.iter().zip(choice) {
            columns[(first + s) as usize] = 1.0;
        }
        for (e, (grid, first)) in self.reduced.edges.iter().zip(&self.grids) {
            let (i, j) = (choice[e.a as usize], choice[e.b as usize]);
            let cell = (grid.row_class[i as usize], grid.col_class[j as usize]);
            if let Ok(k) = grid.cells.binary_search_by_key(&cell, |(c, _)| *c) {
                columns[*first as usize + k] = 1.0;
            }
        }
        columns
    }

    fn rounded(&self, columns: &[f64]) -> Vec<u32> {
        let nodes = self.reduced.nodes.iter().zip(&self.first);
        let largest = |(node, &first): (&super::reduced::ReducedNode, &u32)| {
            let of = &columns[first as usize..][..node.costs.len()];
            let best = (0..of.len()).max_by(|&i, &j| of[i].total_cmp(&of[j]).then(j.cmp(&i)));
            best.unwrap_or(0) as u32
        };
        nodes.map(largest).collect()
    }

    fn fractional_levels(&self, columns: &[f64]) -> Vec<f64> {
        let mut delta = vec![0.0; self.reduced.limits.len() + 1];
        for (node, &first) in self.reduced.nodes.iter().zip(&self.first) {
            for term in &node.memory {
                let of = &columns[first as usize..][..term.usage.len()];
                let usage: f64 = term.usage.iter().zip(of).map(|(&u, x)| u as f64 * x).sum();
                delta[term.from as usize] += usage;
                delta[term.to as usize] -= usage;
            }
        }
        let mut level = 0.0;
        let levels = delta[..delta.len() - 1].iter().map(|d| {
            level += d;
            level
        });
        self.excess(levels)
    }

    /// How far each level is over its limit, relative to the rounding of sums; 0 if not.
    fn excess(&self, levels: impl Iterator<Item = f64>) -> Vec<f64> {
        let over = |(level, &limit): (f64, &u64)| {
            let over = level - limit as f64;
            if over > 1e-7 * level { over } else { 0.0 }
        };
        levels.zip(&self.reduced.limits).map(over).collect()
    }

    /// Adds the rows of the highest peaks of `excess`, one per stretch over the limit.
    fn add_peaks(&mut self, excess: &[f64]) -> usize {
        let mut peaks: Vec<usize> = Vec::new();
        let mut in_stretch = false;
        for (t, &over) in excess.iter().enumerate() {
            if over <= 0.0 {
                in_stretch = false;
            } else if !in_stretch {
                peaks.push(t);
                in_stretch = true;
            } else if let Some(last) = peaks.last_mut()
                && over > excess[*last]
            {
                *last = t;
            }
        }
        peaks.sort_by(|&s, &t| excess[t].total_cmp(&excess[s]).then(s.cmp(&t)));
        peaks.truncate(ROWS_PER_ROUND);
        peaks
            .into_iter()
            .filter(|&t| self.add_memory_row(t))
            .count()
    }
}

fn usages_at(node: &super::reduced::ReducedNode, t: usize) -> Vec<u64> {
    let mut usages = Vec::new();
    let live =
        |term: &&super::reduced::MemoryTerm| (term.from as usize..term.to as usize).contains(&t);
    for term in node.memory.iter().filter(live) {
        if usages.is_empty() {
            usages.clone_from(&term.usage);
        } else {
            usages
                .iter_mut()
                .zip(&term.usage)
                .for_each(|(sum, u)| *sum += u);
        }
    }
    usages
}

/// An edge table with equal rows and equal columns put together.
struct EdgeGrid {
    row_class: Vec<u32>,
    col_class: Vec<u32>,
    n_rows: usize,
    n_cols: usize,
    /// Allowed pairs of classes with their cost, ascending.
    cells: Vec<((u32, u32), u64)>,
}

impl EdgeGrid {
    fn new(e: &Edge) -> EdgeGrid {
        let (n_rows, n_cols) = (e.table.n_rows(), e.table.n_cols());
        let (row_class, rows) = classes((0..n_rows).map(|i| e.table.row(i).to_vec()));
        let column = |j: usize| {
            (0..n_rows)
                .map(|i| e.table.get(i, j))
                .collect::<Vec<Cost>>()
        };
        let (col_class, cols) = classes((0..n_cols).map(column));
        let mut cells = Vec::new();
        for (r, &i) in rows.iter().enumerate() {
            for (c, &j) in cols.iter().enumerate() {
                if let Some(cost) = e.table.get(i, j).value() {
                    cells.push(((r as u32, c as u32), cost));
                }
            }
        }
        EdgeGrid {
            row_class,
            col_class,
            n_rows: rows.len(),
            n_cols: cols.len(),
            cells,
        }
    }
}

/// The class of each item, equal items sharing one, and the first item of each class.
fn classes(items: impl Iterator<Item = Vec<Cost>>) -> (Vec<u32>, Vec<usize>) {
    let mut known: BTreeMap<Vec<Cost>, u32> = BTreeMap::new();
    let (mut class_of, mut first) = (Vec::new(), Vec::new());
    for (i, item) in items.enumerate() {
        let next = first.len() as u32;
        let class = *known.entry(item).or_insert(next);
        if class == next {
            first.push(i);
        }
        class_of.push(class);
    }
    (class_of, first)
}
