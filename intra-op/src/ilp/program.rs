//! The model of a reduced problem: its columns and rows, points for choices, and memory rows.

use std::collections::BTreeSet;

use super::super::problem::Edge;
use super::super::reduced::{MemoryTerm, Reduced, ReducedNode};
use super::grid::EdgeGrid;
use super::{Model, ModelRow};

/// The size to which the largest cost coefficient is scaled.
const COST_MAGNITUDE: u64 = 1 << 16;
/// The size to which the memory limit is scaled.
const MEMORY_MAGNITUDE: u64 = 1 << 16;
/// The most memory rows that a round adds.
const ROWS_PER_ROUND: usize = 12;

pub(super) struct Program<'a> {
    pub reduced: &'a Reduced,
    pub model: Model,
    /// The first column of each node.
    first: Vec<u32>,
    grids: Vec<(EdgeGrid, u32)>,
    pub memory_rows: BTreeSet<usize>,
    pub cost_unit: f64,
    memory_unit: f64,
}

impl<'a> Program<'a> {
    pub fn new(reduced: &'a Reduced) -> Program<'a> {
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
    pub fn add_memory_row(&mut self, t: usize) -> bool {
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

    /// Forbids taking, all at once, strategies that use at least as much as `choice` uses at `t`.
    pub fn add_cover_row(&mut self, choice: &[u32], t: usize) {
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

    /// Returns the values of the model's columns for a choice.
    pub fn point(&self, choice: &[u32]) -> Vec<f64> {
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

    pub fn rounded(&self, columns: &[f64]) -> Vec<u32> {
        let nodes = self.reduced.nodes.iter().zip(&self.first);
        let largest = |(node, &first): (&ReducedNode, &u32)| {
            let of = &columns[first as usize..][..node.costs.len()];
            let best = (0..of.len()).max_by(|&i, &j| of[i].total_cmp(&of[j]).then(j.cmp(&i)));
            best.unwrap_or(0) as u32
        };
        nodes.map(largest).collect()
    }

    pub fn fractional_levels(&self, columns: &[f64]) -> Vec<f64> {
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

    /// Returns the excess of each level over its limit, relative to the rounding of sums, or 0.
    pub fn excess(&self, levels: impl Iterator<Item = f64>) -> Vec<f64> {
        let over = |(level, &limit): (f64, &u64)| {
            let over = level - limit as f64;
            if over > 1e-7 * level { over } else { 0.0 }
        };
        levels.zip(&self.reduced.limits).map(over).collect()
    }

    /// Adds the rows of the highest peaks of `excess`, one per stretch over the limit.
    pub fn add_peaks(&mut self, excess: &[f64]) -> usize {
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

fn usages_at(node: &ReducedNode, t: usize) -> Vec<u64> {
    let mut usages = Vec::new();
    let live = |term: &&MemoryTerm| (term.from as usize..term.to as usize).contains(&t);
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
