//! The rest of an intra-op problem after presolve, and the way back.
//!
//! A reduced node may stand for many original nodes, so it may use memory over several
//! intervals; budgets differ per time point because what is already decided was subtracted.
//! Times are compressed: only points that can be the worst are kept.
//!
//! Invariants: the graph is simple (no parallel edges, no loops, `a < b`); terms of one node
//! have distinct intervals, none empty; every optimum of the reduced problem lifts to an
//! optimum of the original one, at the same cost.

use super::presolve::Undo;
use super::problem::{Cost, Edge};

/// Memory that a node uses at the compressed times `from..to`, per strategy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryTerm {
    /// The first time point.
    pub from: u32,
    /// The time point after the last.
    pub to: u32,
    /// The bytes of each strategy.
    pub usage: Vec<u64>,
}

/// A decision that presolve left open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReducedNode {
    /// The cost of each remaining strategy.
    pub costs: Vec<Cost>,
    /// The memory of each remaining strategy, by interval.
    pub memory: Vec<MemoryTerm>,
}

/// The problem that presolve leaves; see the module header.
#[derive(Clone, Debug, Default)]
pub struct Reduced {
    /// The decisions left open.
    pub nodes: Vec<ReducedNode>,
    /// The pairwise costs left.
    pub edges: Vec<Edge>,
    /// The bytes left at each compressed time point.
    pub limits: Vec<u64>,
    /// The original time of each compressed time point.
    pub times: Vec<u64>,
    /// The cost of what is decided.
    pub offset: u64,
    pub(super) lift: Lift,
}

/// The way back: the steps of presolve, to be undone last first.
#[derive(Clone, Debug, Default)]
pub(super) struct Lift {
    pub n_original: usize,
    /// For each reduced node, the original node and its original strategies.
    pub original: Vec<(u32, Vec<u32>)>,
    pub steps: Vec<Undo>,
}

impl Reduced {
    /// Returns the total cost of a choice, decided parts included; `None` when forbidden.
    pub fn cost(&self, choice: &[u32]) -> Option<u64> {
        let mut sum = Cost::finite(self.offset);
        for (node, &s) in self.nodes.iter().zip(choice) {
            sum = sum.plus(node.costs[s as usize]);
        }
        for e in &self.edges {
            let (i, j) = (choice[e.a as usize], choice[e.b as usize]);
            sum = sum.plus(e.table.get(i as usize, j as usize));
        }
        sum.value()
    }

    /// Returns the bytes in use at each compressed time point, beyond what is already decided.
    pub fn levels(&self, choice: &[u32]) -> Vec<u64> {
        let mut delta = vec![0i128; self.limits.len() + 1];
        for (node, &s) in self.nodes.iter().zip(choice) {
            for term in &node.memory {
                let usage = i128::from(term.usage[s as usize]);
                delta[term.from as usize] += usage;
                delta[term.to as usize] -= usage;
            }
        }
        running_sum(&delta)
    }

    /// Says whether a choice fits the budgets.
    pub fn fits(&self, choice: &[u32]) -> bool {
        let levels = self.levels(choice);
        levels
            .iter()
            .zip(&self.limits)
            .all(|(level, limit)| level <= limit)
    }

    /// Returns the choice for the original problem that this choice stands for.
    pub fn lift(&self, choice: &[u32]) -> Vec<u32> {
        let mut full = vec![0u32; self.lift.n_original];
        for ((node, strategies), &s) in self.lift.original.iter().zip(choice) {
            full[*node as usize] = strategies[s as usize];
        }
        for step in self.lift.steps.iter().rev() {
            step.undo(&mut full);
        }
        full
    }

    /// Translates an original choice into this problem's terms, with its cost here, if it is still
    /// there, allowed, and fits. Nodes that follow other decisions are decided anew.
    pub fn project(&self, original: &[u32]) -> Option<(u64, Vec<u32>)> {
        let left = self.project_partly(original);
        let choice: Vec<u32> = left.into_iter().collect::<Option<_>>()?;
        let cost = self.cost(&choice)?;
        self.fits(&choice).then_some((cost, choice))
    }

    /// Translates node by node; `None` where the strategy was dropped.
    pub(super) fn project_partly(&self, original: &[u32]) -> Vec<Option<u32>> {
        let place = |(v, strategies): &(u32, Vec<u32>)| {
            let s = strategies.binary_search(&original[*v as usize]).ok()?;
            Some(s as u32)
        };
        self.lift.original.iter().map(place).collect()
    }

    /// Returns the number of cells of all edge tables: the size that integer programming meets.
    pub fn n_cells(&self) -> usize {
        self.edges.iter().map(|e| e.table.cells().len()).sum()
    }

    /// Returns the number of strategies and cells, which shrinks as the problem does.
    pub(super) fn size(&self) -> usize {
        let strategies: usize = self.nodes.iter().map(|n| n.costs.len()).sum();
        strategies + self.n_cells()
    }

    /// Describes the sizes in words.
    pub(super) fn describe(&self) -> String {
        let sizes = [
            (self.nodes.len(), "node"),
            (self.edges.len(), "edge"),
            (self.n_cells(), "cell"),
            (self.times.len(), "time"),
        ];
        let counted =
            |(n, what): (usize, &str)| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
        sizes.map(counted).join(", ")
    }

    /// Tries every choice, and returns the best one that fits. For tests: takes exponential time.
    pub fn brute_force(&self) -> Option<(u64, Vec<u32>)> {
        let sizes: Vec<usize> = self.nodes.iter().map(|n| n.costs.len()).collect();
        let mut best: Option<(u64, Vec<u32>)> = None;
        for_each_choice(&sizes, |choice| {
            if let Some(cost) = self.cost(choice)
                && best.as_ref().is_none_or(|(least, _)| cost < *least)
                && self.fits(choice)
            {
                best = Some((cost, choice.to_vec()));
            }
        });
        best
    }
}

/// Returns the levels that a list of changes adds up to; the last change ends the list.
pub(super) fn running_sum(delta: &[i128]) -> Vec<u64> {
    let mut level = 0i128;
    delta[..delta.len() - 1]
        .iter()
        .map(|d| {
            level += d;
            u64::try_from(level).unwrap_or(u64::MAX)
        })
        .collect()
}

/// Calls `visit` with every assignment of `0..sizes[v]`, in lexicographic order.
pub(super) fn for_each_choice(sizes: &[usize], mut visit: impl FnMut(&[u32])) {
    let mut choice = vec![0u32; sizes.len()];
    if sizes.contains(&0) {
        return;
    }
    loop {
        visit(&choice);
        let Some(v) = (0..sizes.len()).rfind(|&v| (choice[v] as usize) + 1 < sizes[v]) else {
            return;
        };
        choice[v] += 1;
        choice[v + 1..].fill(0);
    }
}
