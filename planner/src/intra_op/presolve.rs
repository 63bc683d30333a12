//! Presolve: makes an intra-op problem smaller without losing an optimum.
//!
//! In rounds, until nothing changes: drop strategies that no allowed pair supports (arc
//! consistency) or that cannot fit beside the least that everything else must use; move row
//! and column minima of tables to the nodes and drop tables that are then zero; merge nodes
//! that are tied to another (one allowed partner per strategy); fold nodes without memory
//! that have at most two neighbours; drop strategies that another one dominates (dead-end
//! elimination: better for every choice of the neighbours, and never using more memory);
//! drop times that cannot be the worst.
//!
//! Invariants: every step keeps at least one optimum, and a reduced choice's cost is that of
//! the choice it lifts to. Original indices are kept beside the current ones, ascending, so
//! that the steps can be undone. Everything is deterministic: lower indices win ties.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use super::IntraOpError;
use super::problem::{Cost, Edge, IntraOpProblem, Table};
use super::reduced::{Lift, MemoryTerm, Reduced, ReducedNode, Step, running_sum};
use super::tables::{Axis, Tables};

/// Sums of costs and of usages stay below this, so that 64-bit sums cannot overflow.
const MAGNITUDE_LIMIT: u128 = 1 << 61;
/// Rounds after which presolve stops even if it still finds something.
const MAX_ROUNDS: usize = 30;
/// Cell comparisons that one round of dominance may spend.
const DOMINANCE_BUDGET: u64 = 300_000_000;

/// Which steps to take; all by default. For tests and for measuring what a step is worth.
#[derive(Clone, Copy, Debug)]
pub struct PresolveOptions {
    /// Arc consistency and memory bounds.
    pub propagate: bool,
    /// Minima to nodes, zero tables dropped.
    pub minima: bool,
    /// Tied nodes merged.
    pub ties: bool,
    /// Nodes of degree 0, 1, 2 without memory folded.
    pub fold: bool,
    /// Dominated strategies dropped.
    pub dominance: bool,
    /// Harmless times dropped.
    pub times: bool,
}

impl Default for PresolveOptions {
    fn default() -> Self {
        PresolveOptions {
            propagate: true,
            minima: true,
            ties: true,
            fold: true,
            dominance: true,
            times: true,
        }
    }
}

/// Why a problem has no solution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Infeasibility {
    /// Even the least that must be in use at `time` exceeds the limit by `by_bytes`.
    Memory {
        /// An original time.
        time: u64,
        /// Bytes missing at least.
        by_bytes: u64,
    },
    /// Every strategy of `node` is ruled out by forbidden entries and the memory limit.
    NoStrategy {
        /// Index in the original problem.
        node: u32,
    },
    /// An exhaustive search found nothing.
    Searched,
}

/// What presolve made of a problem.
#[derive(Clone, Debug)]
pub enum Presolved {
    /// A smaller problem, possibly without any node left.
    Reduced(Reduced),
    /// No solution exists.
    Infeasible(Infeasibility),
}

/// Reduces `problem`.
///
/// # Errors
/// [`IntraOpError::Malformed`] when the problem is not valid, [`IntraOpError::Magnitude`]
/// when its costs or usages could add up beyond 2^61.
pub fn presolve(
    problem: &IntraOpProblem,
    options: &PresolveOptions,
) -> Result<Presolved, IntraOpError> {
    problem.validate()?;
    check_magnitudes(problem)?;
    Ok(match reduce(problem, options) {
        Ok(reduced) => Presolved::Reduced(reduced),
        Err(why) => Presolved::Infeasible(why),
    })
}

/// Reduces what was already reduced, after strategies or pairs have been ruled out.
///
/// `keep[v]` lists the strategies of reduced node `v` that are left, ascending.
pub(super) fn presolve_again(
    reduced: Reduced,
    keep: &[Vec<u32>],
    options: &PresolveOptions,
) -> Result<Reduced, Infeasibility> {
    let mut work = Work::from_reduced(reduced);
    for (original, kept) in work.renamed.clone().into_iter().zip(keep) {
        if kept.is_empty() {
            return Err(Infeasibility::NoStrategy { node: original });
        }
        work.keep(original, kept);
    }
    work.reduce(options)
}

fn reduce(problem: &IntraOpProblem, options: &PresolveOptions) -> Result<Reduced, Infeasibility> {
    Work::new(problem).reduce(options)
}
fn check_magnitudes(problem: &IntraOpProblem) -> Result<(), IntraOpError> {
    let largest = |cells: &[Cost]| {
        let finite = cells.iter().filter_map(|c| c.value());
        u128::from(finite.max().unwrap_or(0))
    };
    let nodes: u128 = problem.nodes.iter().map(|n| largest(&n.costs)).sum();
    let mut known: HashMap<*const Table, u128> = HashMap::new();
    let mut edge_max = |e: &Edge| {
        let key = Arc::as_ptr(&e.table);
        *known.entry(key).or_insert_with(|| largest(e.table.cells()))
    };
    let edges: u128 = problem.edges.iter().map(&mut edge_max).sum();
    if nodes + edges >= MAGNITUDE_LIMIT {
        let total = nodes + edges;
        return Err(IntraOpError::Magnitude {
            what: "costs",
            total,
        });
    }
    if let Some(limit) = problem.usage_limit {
        let clamped = |n: &super::problem::Node| {
            let most = n.usages.iter().copied().max().unwrap_or(0);
            u128::from(most.min(limit.saturating_add(1)))
        };
        let total: u128 = problem.nodes.iter().map(clamped).sum();
        if total > u128::from(limit) && total >= MAGNITUDE_LIMIT {
            return Err(IntraOpError::Magnitude {
                what: "usages",
                total,
            });
        }
    }
    Ok(())
}

struct WorkNode {
    gone: bool,
    costs: Vec<Cost>,
    /// Original strategies, ascending.
    strategies: Vec<u32>,
    memory: Vec<MemoryTerm>,
    /// Neighbour to edge.
    links: BTreeMap<u32, u32>,
    /// Changed since the last propagation.
    dirty: bool,
}

struct Work {
    nodes: Vec<WorkNode>,
    edges: Vec<Option<Edge>>,
    limits: Vec<u64>,
    times: Vec<u64>,
    offset: u64,
    steps: Vec<Step>,
    tables: Tables,
    /// The original nodes of the reduced problem that this started from, if it did.
    renamed: Vec<u32>,
}

impl WorkNode {
    fn gone() -> WorkNode {
        WorkNode {
            gone: true,
            costs: Vec::new(),
            strategies: Vec::new(),
            memory: Vec::new(),
            links: BTreeMap::new(),
            dirty: false,
        }
    }
}

impl Work {
    fn new(problem: &IntraOpProblem) -> Work {
        let (times, spans) = compress_times(problem);
        let limit = problem.usage_limit.unwrap_or(0);
        let nodes = problem.nodes.iter().zip(&spans).map(|(node, &(from, to))| {
            let usage = node.usages.iter().map(|&u| u.min(limit.saturating_add(1)));
            let term = MemoryTerm {
                from,
                to,
                usage: usage.collect(),
            };
            WorkNode {
                gone: false,
                costs: node.costs.clone(),
                strategies: (0..node.costs.len() as u32).collect(),
                memory: if from < to { vec![term] } else { Vec::new() },
                links: BTreeMap::new(),
                dirty: true,
            }
        });
        let mut work = Work {
            nodes: nodes.collect(),
            edges: Vec::new(),
            limits: vec![limit; times.len()],
            times,
            offset: 0,
            steps: Vec::new(),
            tables: Tables::default(),
            renamed: Vec::new(),
        };
        for edge in &problem.edges {
            work.add_edge(edge.a, edge.b, Arc::clone(&edge.table));
        }
        work
    }

    fn from_reduced(reduced: Reduced) -> Work {
        let Lift {
            n_original,
            original,
            steps,
        } = reduced.lift;
        let mut work = Work {
            nodes: (0..n_original).map(|_| WorkNode::gone()).collect(),
            edges: Vec::new(),
            limits: reduced.limits,
            times: reduced.times,
            offset: reduced.offset,
            steps,
            tables: Tables::default(),
            renamed: original.iter().map(|(v, _)| *v).collect(),
        };
        for ((v, strategies), node) in original.into_iter().zip(reduced.nodes) {
            work.nodes[v as usize] = WorkNode {
                gone: false,
                costs: node.costs,
                strategies,
                memory: node.memory,
                links: BTreeMap::new(),
                dirty: true,
            };
        }
        for edge in reduced.edges {
            let (a, b) = (work.renamed[edge.a as usize], work.renamed[edge.b as usize]);
            work.add_edge(a, b, edge.table);
        }
        work
    }

    fn reduce(mut self, options: &PresolveOptions) -> Result<Reduced, Infeasibility> {
        self.settle_all()?;
        for _ in 0..MAX_ROUNDS {
            let before = self.measure();
            if options.propagate {
                self.propagate()?;
            }
            if options.minima {
                self.move_minima();
            }
            if options.ties {
                self.merge_ties()?;
            }
            if options.fold {
                self.fold()?;
            }
            if options.dominance {
                self.drop_dominated();
            }
            self.settle_all()?;
            if options.times {
                self.drop_times();
            }
            if self.measure() == before {
                break;
            }
        }
        Ok(self.finish())
    }

    /// A number that changes whenever a step has changed something.
    fn measure(&self) -> (usize, usize, usize, u64, usize) {
        let alive = || self.nodes.iter().filter(|n| !n.gone);
        let edges = || self.edges.iter().flatten();
        (
            alive().count(),
            alive().map(|n| n.costs.len()).sum(),
            edges().count(),
            self.offset,
            edges().map(|e| e.table.cells().len()).sum::<usize>() + self.limits.len(),
        )
    }

    fn add_edge(&mut self, a: u32, b: u32, table: Arc<Table>) {
        if a == b {
            for (i, cost) in self.nodes[a as usize].costs.iter_mut().enumerate() {
                *cost = cost.plus(table.get(i, i));
            }
            return;
        }
        if let Some(&e) = self.nodes[a as usize].links.get(&b) {
            let edge = self.edges[e as usize].as_mut().expect("linked edges exist");
            let table = if edge.a == a {
                table
            } else {
                self.tables.transposed(&table)
            };
            edge.table = self.tables.sum(&edge.table, &table);
        } else {
            let e = self.edges.len() as u32;
            self.edges.push(Some(Edge { a, b, table }));
            self.nodes[a as usize].links.insert(b, e);
            self.nodes[b as usize].links.insert(a, e);
        }
        self.nodes[a as usize].dirty = true;
        self.nodes[b as usize].dirty = true;
    }

    fn take_edge(&mut self, e: u32) -> Edge {
        let edge = self.edges[e as usize].take().expect("linked edges exist");
        self.nodes[edge.a as usize].links.remove(&edge.b);
        self.nodes[edge.b as usize].links.remove(&edge.a);
        edge
    }

    fn edge(&self, e: u32) -> &Edge {
        self.edges[e as usize].as_ref().expect("linked edges exist")
    }

    /// The table of edge `e` with `v` at its rows.
    fn table_from(&mut self, e: u32, v: u32) -> Arc<Table> {
        let edge = self.edges[e as usize].as_ref().expect("linked edges exist");
        if edge.a == v {
            Arc::clone(&edge.table)
        } else {
            let table = Arc::clone(&edge.table);
            self.tables.transposed(&table)
        }
    }

    // --- strategies that cannot be part of a solution -------------------------------------

    fn propagate(&mut self) -> Result<(), Infeasibility> {
        let mut alive: Vec<Vec<bool>> = Vec::with_capacity(self.nodes.len());
        let mut queue = VecDeque::new();
        for (v, node) in self.nodes.iter().enumerate() {
            alive.push(node.costs.iter().map(|c| !c.is_forbidden()).collect());
            if node.dirty && !node.gone {
                queue.push_back(v as u32);
            }
        }
        loop {
            self.arc_consistency(&mut alive, &mut queue)?;
            self.memory_bounds(&mut alive, &mut queue)?;
            if queue.is_empty() {
                break;
            }
        }
        for v in 0..self.nodes.len() as u32 {
            self.nodes[v as usize].dirty = false;
            let kept: Vec<u32> = (0..)
                .zip(&alive[v as usize])
                .filter(|(_, a)| **a)
                .map(|(i, _)| i)
                .collect();
            self.keep(v, &kept);
        }
        Ok(())
    }

    fn arc_consistency(
        &self,
        alive: &mut [Vec<bool>],
        queue: &mut VecDeque<u32>,
    ) -> Result<(), Infeasibility> {
        let mut queued = vec![false; self.nodes.len()];
        for &v in queue.iter() {
            queued[v as usize] = true;
        }
        while let Some(u) = queue.pop_front() {
            queued[u as usize] = false;
            if !alive[u as usize].contains(&true) {
                return Err(Infeasibility::NoStrategy { node: u });
            }
            for (&v, &e) in &self.nodes[u as usize].links {
                let edge = self.edge(e);
                if !edge.table.has_forbidden() {
                    continue;
                }
                let supported = supported(&edge.table, edge.a == u, &alive[u as usize]);
                let mut lost = false;
                for (alive, supported) in alive[v as usize].iter_mut().zip(supported) {
                    lost |= *alive && !supported;
                    *alive &= supported;
                }
                if lost && !queued[v as usize] {
                    queued[v as usize] = true;
                    queue.push_back(v);
                }
            }
        }
        Ok(())
    }

    /// Drops strategies that do not fit beside the least usage of all other nodes.
    fn memory_bounds(
        &self,
        alive: &mut [Vec<bool>],
        queue: &mut VecDeque<u32>,
    ) -> Result<(), Infeasibility> {
        if self.limits.is_empty() {
            return Ok(());
        }
        let least = |v: usize, term: &MemoryTerm, alive: &[Vec<bool>]| {
            let left = term.usage.iter().zip(&alive[v]).filter(|(_, a)| **a);
            left.map(|(u, _)| *u).min().unwrap_or(0)
        };
        let mut delta = vec![0i128; self.limits.len() + 1];
        for (v, node) in self.nodes.iter().enumerate() {
            for term in &node.memory {
                let usage = i128::from(least(v, term, alive));
                delta[term.from as usize] += usage;
                delta[term.to as usize] -= usage;
            }
        }
        let slack = self.slack(&running_sum(&delta))?;
        let slack = RangeMin::new(&slack);
        for (v, node) in self.nodes.iter().enumerate() {
            let mut lost = false;
            for term in &node.memory {
                let most = least(v, term, alive) + slack.min(term.from as usize, term.to as usize);
                for (s, &usage) in term.usage.iter().enumerate() {
                    lost |= alive[v][s] && usage > most;
                    alive[v][s] &= usage <= most;
                }
            }
            if lost {
                queue.push_back(v as u32);
            }
        }
        Ok(())
    }

    fn slack(&self, levels: &[u64]) -> Result<Vec<u64>, Infeasibility> {
        let over = |t: &usize| levels[*t].saturating_sub(self.limits[*t]);
        let worst = (0..levels.len()).max_by_key(|t| (over(t), std::cmp::Reverse(*t)));
        match worst {
            Some(t) if over(&t) > 0 => Err(Infeasibility::Memory {
                time: self.times[t],
                by_bytes: over(&t),
            }),
            _ => Ok(levels
                .iter()
                .zip(&self.limits)
                .map(|(l, m)| m - l)
                .collect()),
        }
    }

    /// Keeps only the strategies `kept` (current indices, ascending) of node `v`.
    fn keep(&mut self, v: u32, kept: &[u32]) {
        let node = &mut self.nodes[v as usize];
        if node.gone || kept.len() == node.costs.len() {
            return;
        }
        node.costs = kept.iter().map(|&i| node.costs[i as usize]).collect();
        node.strategies = kept.iter().map(|&i| node.strategies[i as usize]).collect();
        for term in &mut node.memory {
            term.usage = kept.iter().map(|&i| term.usage[i as usize]).collect();
        }
        for &e in self.nodes[v as usize].links.values() {
            let edge = self.edges[e as usize].as_mut().expect("linked edges exist");
            let axis = if edge.a == v { Axis::Rows } else { Axis::Cols };
            edge.table = self.tables.select(&edge.table, axis, kept);
        }
    }

    // --- memory that is decided -----------------------------------------------------------

    /// Subtracts the least usage of every term from the budgets.
    fn settle_all(&mut self) -> Result<(), Infeasibility> {
        let mut delta = vec![0i128; self.limits.len() + 1];
        for node in &self.nodes {
            for term in &node.memory {
                let least = i128::from(term.usage.iter().copied().min().unwrap_or(0));
                delta[term.from as usize] += least;
                delta[term.to as usize] -= least;
            }
        }
        self.limits = self.slack(&running_sum(&delta))?;
        for node in &mut self.nodes {
            for term in &mut node.memory {
                let least = term.usage.iter().copied().min().unwrap_or(0);
                term.usage.iter_mut().for_each(|u| *u -= least);
            }
            node.memory.retain(|term| term.usage.iter().any(|&u| u > 0));
        }
        Ok(())
    }

    /// The same for one node.
    fn settle(&mut self, v: u32) -> Result<(), Infeasibility> {
        for term in &mut self.nodes[v as usize].memory {
            let least = term.usage.iter().copied().min().unwrap_or(0);
            if least == 0 {
                continue;
            }
            for t in term.from as usize..term.to as usize {
                if self.limits[t] < least {
                    return Err(Infeasibility::Memory {
                        time: self.times[t],
                        by_bytes: least - self.limits[t],
                    });
                }
                self.limits[t] -= least;
            }
            term.usage.iter_mut().for_each(|u| *u -= least);
        }
        let node = &mut self.nodes[v as usize];
        node.memory.retain(|term| term.usage.iter().any(|&u| u > 0));
        Ok(())
    }

    /// Drops times that cannot be over budget, and times no worse than their neighbour.
    fn drop_times(&mut self) {
        let n = self.limits.len();
        let (mut delta, mut starts, mut ends) =
            (vec![0i128; n + 1], vec![false; n + 1], vec![false; n + 1]);
        for term in self.nodes.iter().flat_map(|n| &n.memory) {
            let most = i128::from(term.usage.iter().copied().max().unwrap_or(0));
            delta[term.from as usize] += most;
            delta[term.to as usize] -= most;
            starts[term.from as usize] = true;
            ends[term.to as usize] = true;
        }
        let most = running_sum(&delta);
        let mut kept: Vec<usize> = Vec::new();
        // Whether something started or ended since the last time that was kept.
        let (mut started, mut ended) = (false, false);
        for t in 0..n {
            started |= starts[t];
            ended |= ends[t];
            if most[t] <= self.limits[t] {
                continue;
            }
            match kept.last() {
                Some(&last) if !started && self.limits[t] >= self.limits[last] => continue,
                Some(&last) if !ended && self.limits[t] <= self.limits[last] => {
                    // Everything live at `last` is live here too, under a tighter budget.
                    kept.pop();
                    kept.push(t);
                    started = false;
                    ended = false;
                }
                _ => {
                    kept.push(t);
                    started = false;
                    ended = false;
                }
            }
        }
        if kept.len() == n {
            return;
        }
        let place = |t: u32| kept.partition_point(|&k| k < t as usize) as u32;
        for node in &mut self.nodes {
            for term in &mut node.memory {
                (term.from, term.to) = (place(term.from), place(term.to));
            }
            merge_terms(&mut node.memory);
        }
        self.limits = kept.iter().map(|&t| self.limits[t]).collect();
        self.times = kept.iter().map(|&t| self.times[t]).collect();
    }

    // --- costs that can be moved ----------------------------------------------------------

    fn move_minima(&mut self) {
        for e in 0..self.edges.len() as u32 {
            let Some(edge) = &self.edges[e as usize] else {
                continue;
            };
            let (a, b) = (edge.a as usize, edge.b as usize);
            let normal = self.tables.normalised(&edge.table);
            for (i, &least) in normal.row_minima.iter().enumerate() {
                let cost = &mut self.nodes[a].costs[i];
                *cost = cost.plus(Cost::finite(least));
            }
            for (j, &least) in normal.col_minima.iter().enumerate() {
                let cost = &mut self.nodes[b].costs[j];
                *cost = cost.plus(Cost::finite(least));
            }
            if normal.is_zero {
                self.take_edge(e);
            } else {
                let edge = self.edges[e as usize].as_mut().expect("seen above");
                edge.table = Arc::clone(&normal.table);
            }
        }
        for node in self.nodes.iter_mut().filter(|n| !n.gone) {
            let least = node
                .costs
                .iter()
                .filter_map(|c| c.value())
                .min()
                .unwrap_or(0);
            node.costs.iter_mut().for_each(|c| *c = c.minus(least));
            self.offset += least;
        }
    }

    // --- nodes that follow others ---------------------------------------------------------

    fn merge_ties(&mut self) -> Result<(), Infeasibility> {
        let mut e = 0;
        while e < self.edges.len() {
            if let Some(edge) = &self.edges[e]
                && edge.table.has_forbidden()
                && let Some((node, on, map)) = self.tie(edge)
            {
                self.merge(e as u32, node, on, &map)?;
            }
            e += 1;
        }
        Ok(())
    }

    /// Which end of an edge follows the other, if merging it does not make tables grow.
    fn tie(&self, edge: &Edge) -> Option<(u32, u32, Vec<u32>)> {
        let table = &edge.table;
        let by_row = only_partner(table, false);
        let by_col = only_partner(table, true);
        let degree = |v: u32| self.nodes[v as usize].links.len();
        let b_follows =
            |map: Vec<u32>| (self.growth(edge.b, edge.a) <= 0).then_some((edge.b, edge.a, map));
        let a_follows =
            |map: Vec<u32>| (self.growth(edge.a, edge.b) <= 0).then_some((edge.a, edge.b, map));
        match (by_row, by_col) {
            (Some(map), Some(_)) if degree(edge.b) <= degree(edge.a) => b_follows(map),
            (Some(_), Some(map)) => a_follows(map),
            (Some(map), None) => b_follows(map),
            (None, Some(map)) => a_follows(map),
            (None, None) => None,
        }
    }

    /// By how many cells the tables grow when `node` is replaced by `on`.
    fn growth(&self, node: u32, on: u32) -> i64 {
        let size = |v: u32| self.nodes[v as usize].costs.len() as i64;
        let mut growth = -size(node) * size(on);
        for &u in self.nodes[node as usize].links.keys() {
            if u != on {
                growth -= size(node) * size(u);
                if !self.nodes[on as usize].links.contains_key(&u) {
                    growth += size(on) * size(u);
                }
            }
        }
        growth
    }

    /// Replaces `node` by `on`: strategy i of `on` stands for `map[i]` of `node` beside it.
    fn merge(&mut self, e: u32, node: u32, on: u32, map: &[u32]) -> Result<(), Infeasibility> {
        let tie = self.table_from(e, on);
        self.take_edge(e);
        let links = std::mem::take(&mut self.nodes[node as usize].links);
        for (u, e) in links {
            let table = self.table_from(e, node);
            self.take_edge(e);
            let table = self.tables.select(&table, Axis::Rows, map);
            self.add_edge(on, u, table);
        }
        let gone = self.retire(node);
        let on_node = &mut self.nodes[on as usize];
        for (i, &s) in map.iter().enumerate() {
            let cost = gone.costs[s as usize].plus(tie.get(i, s as usize));
            on_node.costs[i] = on_node.costs[i].plus(cost);
        }
        for term in gone.memory {
            let usage = map.iter().map(|&s| term.usage[s as usize]);
            on_node.memory.push(MemoryTerm {
                usage: usage.collect(),
                ..term
            });
        }
        merge_terms(&mut on_node.memory);
        on_node.dirty = true;
        self.steps.push(Step::Map {
            node,
            on,
            keys: self.nodes[on as usize].strategies.clone(),
            values: map.iter().map(|&s| gone.strategies[s as usize]).collect(),
        });
        self.settle(on)
    }

    /// Takes a node out; its edges must be gone.
    fn retire(&mut self, v: u32) -> WorkNode {
        std::mem::replace(&mut self.nodes[v as usize], WorkNode::gone())
    }

    fn fold(&mut self) -> Result<(), Infeasibility> {
        let mut queue: VecDeque<u32> = (0..self.nodes.len() as u32).collect();
        while let Some(v) = queue.pop_front() {
            let node = &self.nodes[v as usize];
            if node.gone {
                continue;
            }
            if node.costs.len() == 1 {
                self.settle(v)?;
            }
            let node = &self.nodes[v as usize];
            if !node.memory.is_empty() {
                continue;
            }
            let neighbours: Vec<u32> = node.links.keys().copied().collect();
            let single = node.costs.len() == 1;
            let folded = match neighbours[..] {
                _ if single => self.fix(v)?,
                [] => self.fix(v)?,
                [a] => self.fold_leaf(v, a),
                [a, b] => self.fold_path(v, a, b),
                _ => false,
            };
            if folded {
                queue.extend(neighbours);
            }
        }
        Ok(())
    }

    /// Decides a node with one strategy, or one without neighbours.
    fn fix(&mut self, v: u32) -> Result<bool, Infeasibility> {
        let links: Vec<(u32, u32)> = self.nodes[v as usize]
            .links
            .iter()
            .map(|(&u, &e)| (u, e))
            .collect();
        for (u, e) in links {
            let table = self.table_from(e, v);
            self.take_edge(e);
            let node = &mut self.nodes[u as usize];
            for (cost, &pair) in node.costs.iter_mut().zip(table.row(0)) {
                *cost = cost.plus(pair);
            }
            node.dirty = true;
        }
        let gone = self.retire(v);
        let (cost, s) = least(gone.costs.iter().copied());
        let cost = cost.value().ok_or(Infeasibility::NoStrategy { node: v })?;
        self.offset += cost;
        self.steps.push(Step::Fix {
            node: v,
            strategy: gone.strategies[s],
        });
        Ok(true)
    }

    fn fold_leaf(&mut self, v: u32, a: u32) -> bool {
        let e = self.nodes[v as usize].links[&a];
        let table = self.table_from(e, a);
        self.take_edge(e);
        let gone = self.retire(v);
        let on = &mut self.nodes[a as usize];
        let mut values = Vec::with_capacity(on.costs.len());
        for (i, cost) in on.costs.iter_mut().enumerate() {
            let pairs = table.row(i).iter().zip(&gone.costs);
            let (best, s) = least(pairs.map(|(w, c)| w.plus(*c)));
            *cost = cost.plus(best);
            values.push(gone.strategies[s]);
        }
        on.dirty = true;
        self.steps.push(Step::Map {
            node: v,
            on: a,
            keys: on.strategies.clone(),
            values,
        });
        true
    }

    fn fold_path(&mut self, v: u32, a: u32, b: u32) -> bool {
        let size = |v: u32| self.nodes[v as usize].costs.len();
        let (n_a, n_b, n_v) = (size(a), size(b), size(v));
        let made = if self.nodes[a as usize].links.contains_key(&b) {
            0
        } else {
            n_a * n_b
        };
        if made > n_v * (n_a + n_b) {
            return false;
        }
        let links = &self.nodes[v as usize].links;
        let (e_a, e_b) = (links[&a], links[&b]);
        let (from_a, from_b) = (self.table_from(e_a, a), self.table_from(e_b, b));
        self.take_edge(e_a);
        self.take_edge(e_b);
        let gone = self.retire(v);
        let mut values = Vec::with_capacity(n_a * n_b);
        let mut cells = Vec::with_capacity(n_a * n_b);
        for i in 0..n_a {
            let row: Vec<Cost> = from_a
                .row(i)
                .iter()
                .zip(&gone.costs)
                .map(|(w, c)| w.plus(*c))
                .collect();
            for j in 0..n_b {
                let (best, s) = least(row.iter().zip(from_b.row(j)).map(|(r, w)| r.plus(*w)));
                cells.push(best);
                values.push(gone.strategies[s]);
            }
        }
        self.steps.push(Step::Map2 {
            node: v,
            on: [a, b],
            keys: [a, b].map(|u| self.nodes[u as usize].strategies.clone()),
            values,
        });
        let table = Table::new(n_a, n_b, cells).expect("one cell was made per pair");
        self.add_edge(a, b, Arc::new(table));
        true
    }

    // --- strategies that are never better -------------------------------------------------

    fn drop_dominated(&mut self) {
        let mut budget = DOMINANCE_BUDGET;
        for v in 0..self.nodes.len() as u32 {
            let node = &self.nodes[v as usize];
            if node.gone || node.costs.len() < 2 {
                continue;
            }
            let links: Vec<u32> = node.links.values().copied().collect();
            let tables: Vec<Arc<Table>> = links.iter().map(|&e| self.table_from(e, v)).collect();
            let kept = undominated(&self.nodes[v as usize], &tables, &mut budget);
            if kept.len() < self.nodes[v as usize].costs.len() {
                self.keep(v, &kept);
                self.nodes[v as usize].dirty = true;
            }
            if budget == 0 {
                return;
            }
        }
    }

    fn finish(mut self) -> Reduced {
        let mut renamed = vec![u32::MAX; self.nodes.len()];
        let mut reduced = Reduced {
            limits: self.limits,
            times: self.times,
            offset: self.offset,
            lift: Lift {
                n_original: self.nodes.len(),
                original: Vec::new(),
                steps: self.steps,
            },
            ..Reduced::default()
        };
        for (v, node) in self.nodes.into_iter().enumerate() {
            if !node.gone {
                renamed[v] = reduced.nodes.len() as u32;
                reduced.lift.original.push((v as u32, node.strategies));
                reduced.nodes.push(ReducedNode {
                    costs: node.costs,
                    memory: node.memory,
                });
            }
        }
        for edge in self.edges.into_iter().flatten() {
            let (a, b) = (renamed[edge.a as usize], renamed[edge.b as usize]);
            let (a, b, table) = if a < b {
                (a, b, edge.table)
            } else {
                (b, a, self.tables.transposed(&edge.table))
            };
            let table = self.tables.interned(table);
            reduced.edges.push(Edge { a, b, table });
        }
        reduced.edges.sort_by_key(|e| (e.a, e.b));
        reduced
    }
}

/// Strategies of the other end that some alive strategy of this end allows.
fn supported(table: &Table, from_rows: bool, alive: &[bool]) -> Vec<bool> {
    if from_rows {
        let mut supported = vec![false; table.n_cols()];
        for (i, _) in alive.iter().enumerate().filter(|(_, a)| **a) {
            for (s, c) in supported.iter_mut().zip(table.row(i)) {
                *s |= !c.is_forbidden();
            }
        }
        supported
    } else {
        let any = |i| {
            table
                .row(i)
                .iter()
                .zip(alive)
                .any(|(c, a)| *a && !c.is_forbidden())
        };
        (0..table.n_rows()).map(any).collect()
    }
}

/// For each row (or column) the only allowed partner; `None` if one has several or none.
fn only_partner(table: &Table, by_col: bool) -> Option<Vec<u32>> {
    let n = if by_col {
        table.n_cols()
    } else {
        table.n_rows()
    };
    let mut partner = vec![u32::MAX; n];
    for i in 0..table.n_rows() {
        for (j, _) in table
            .row(i)
            .iter()
            .enumerate()
            .filter(|(_, c)| !c.is_forbidden())
        {
            let (key, value) = if by_col { (j, i) } else { (i, j) };
            if partner[key] != u32::MAX {
                return None;
            }
            partner[key] = value as u32;
        }
    }
    (!partner.contains(&u32::MAX)).then_some(partner)
}

/// The least cost and its first index; forbidden and 0 if all are forbidden.
fn least(costs: impl Iterator<Item = Cost>) -> (Cost, usize) {
    let mut best = (Cost::FORBIDDEN, 0);
    for (i, cost) in costs.enumerate() {
        if cost < best.0 {
            best = (cost, i);
        }
    }
    best
}

/// Sums terms with equal intervals and drops empty ones.
fn merge_terms(terms: &mut Vec<MemoryTerm>) {
    terms.retain(|t| t.from < t.to);
    terms.sort_by_key(|t| (t.from, t.to));
    terms.dedup_by(|next, kept| {
        let same = (next.from, next.to) == (kept.from, kept.to);
        if same {
            for (sum, u) in kept.usage.iter_mut().zip(&next.usage) {
                *sum += u;
            }
        }
        same
    });
}

/// Strategies that no other strategy dominates, judged one after the other.
fn undominated(node: &WorkNode, tables: &[Arc<Table>], budget: &mut u64) -> Vec<u32> {
    let n = node.costs.len();
    let mut alive = vec![true; n];
    for s in 0..n {
        let beaten =
            (0..n).any(|by| by != s && alive[by] && dominates(node, tables, by, s, budget));
        alive[s] = !beaten;
    }
    (0..n as u32).filter(|&s| alive[s as usize]).collect()
}

/// Whether changing `s` to `by` never costs or uses more, whatever the neighbours do.
fn dominates(
    node: &WorkNode,
    tables: &[Arc<Table>],
    by: usize,
    s: usize,
    budget: &mut u64,
) -> bool {
    let (Some(cost_by), cost_s) = (node.costs[by].value(), node.costs[s].value()) else {
        return false;
    };
    if node.memory.iter().any(|t| t.usage[by] > t.usage[s]) {
        return false;
    }
    let Some(cost_s) = cost_s else {
        return true;
    };
    let mut worse = i128::from(cost_by) - i128::from(cost_s);
    for table in tables {
        let spent = table.n_cols() as u64;
        if *budget < spent {
            *budget = 0;
            return false;
        }
        *budget -= spent;
        let mut most: Option<i128> = None;
        for (w_by, w_s) in table.row(by).iter().zip(table.row(s)) {
            match (w_by.value(), w_s.value()) {
                (_, None) => {}
                (None, Some(_)) => return false,
                (Some(x), Some(y)) => most = most.max(Some(i128::from(x) - i128::from(y))),
            }
        }
        match most {
            Some(most) => worse += most,
            None => return true,
        }
    }
    worse <= 0
}

/// The times that can be the worst, and each node's span over them.
///
/// A level can only be highest where something starts, and right before something ends.
fn compress_times(problem: &IntraOpProblem) -> (Vec<u64>, Vec<(u32, u32)>) {
    let live =
        |n: &&super::problem::Node| problem.usage_limit.is_some() && n.interval[0] < n.interval[1];
    let mut events: Vec<(u64, bool)> = Vec::new();
    for node in problem.nodes.iter().filter(live) {
        events.push((node.interval[0], true));
        events.push((node.interval[1], false));
    }
    events.sort_unstable();
    let mut times: Vec<u64> = Vec::new();
    let mut last_start = None;
    for (time, starts) in events {
        if starts {
            last_start = Some(time);
        } else if let Some(start) = last_start.take() {
            times.push(start);
        }
    }
    let place = |t: u64| times.partition_point(|&k| k < t) as u32;
    let span = |n: &super::problem::Node| {
        if live(&n) {
            (place(n.interval[0]), place(n.interval[1]))
        } else {
            (0, 0)
        }
    };
    let spans = problem.nodes.iter().map(span).collect();
    (times, spans)
}

/// Range minima by doubling.
struct RangeMin {
    levels: Vec<Vec<u64>>,
}

impl RangeMin {
    fn new(values: &[u64]) -> RangeMin {
        let mut levels = vec![values.to_vec()];
        let mut width = 1;
        while 2 * width <= values.len() {
            let last = &levels[levels.len() - 1];
            let next = (0..=values.len() - 2 * width).map(|i| last[i].min(last[i + width]));
            levels.push(next.collect());
            width *= 2;
        }
        RangeMin { levels }
    }

    /// The least value in `from..to`, which must not be empty.
    fn min(&self, from: usize, to: usize) -> u64 {
        let k = (to - from).ilog2() as usize;
        self.levels[k][from].min(self.levels[k][to - (1 << k)])
    }
}
