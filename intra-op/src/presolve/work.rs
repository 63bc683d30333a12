//! A problem while it is being reduced: nodes and edges under their original indices.
//!
//! Invariants: the graph is simple; a linked edge exists and names both its ends; memory terms
//! of a node have distinct intervals, none empty. `clock` counts changes, and a node's stamps
//! say when it, or what is beside it, last changed in a way that could let a reduction do more.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::problem::{Cost, Edge, IntraOpProblem, Table};
use super::super::reduced::{Lift, MemoryTerm, Reduced, ReducedNode};
use super::super::tables::{Axis, Tables};
use super::Undo;
use super::memory::compress_times;

pub(super) struct WorkNode {
    pub gone: bool,
    pub costs: Vec<Cost>,
    /// The original strategies, ascending.
    pub strategies: Vec<u32>,
    pub memory: Vec<MemoryTerm>,
    /// The edge to each neighbour.
    pub links: BTreeMap<u32, u32>,
    /// The clock when its strategies, costs, memory or edges last changed.
    pub changed: u64,
    /// The clock when a neighbour's strategies last changed.
    pub beside: u64,
}

pub(super) struct Work {
    pub nodes: Vec<WorkNode>,
    pub edges: Vec<Option<Edge>>,
    /// The budgets that are left, and the original time of each.
    pub limits: Vec<u64>,
    pub times: Vec<u64>,
    /// The cost of what is decided.
    pub offset: u64,
    pub undos: Vec<Undo>,
    pub tables: Tables,
    /// The original nodes of the reduced problem from which this one started, if it did.
    pub renamed: Vec<u32>,
    pub clock: u64,
}

/// The size of the problem, which changes whenever a reduction has changed something.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Size {
    pub nodes: usize,
    pub strategies: usize,
    pub edges: usize,
    pub cells: usize,
    times: usize,
    offset: u64,
}

impl WorkNode {
    fn gone() -> WorkNode {
        WorkNode {
            gone: true,
            costs: Vec::new(),
            strategies: Vec::new(),
            memory: Vec::new(),
            links: BTreeMap::new(),
            changed: 0,
            beside: 0,
        }
    }
}

impl Work {
    pub fn new(problem: &IntraOpProblem) -> Work {
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
                ..WorkNode::gone()
            }
        });
        let mut work = Work {
            nodes: nodes.collect(),
            edges: Vec::with_capacity(problem.edges.len()),
            limits: vec![limit; times.len()],
            times,
            offset: 0,
            undos: Vec::new(),
            tables: Tables::default(),
            renamed: Vec::new(),
            clock: 0,
        };
        work.touch_all();
        for edge in &problem.edges {
            work.add_edge(edge.a, edge.b, Arc::clone(&edge.table));
        }
        work
    }

    pub fn from_reduced(reduced: Reduced) -> Work {
        let Lift {
            n_original,
            original,
            steps,
        } = reduced.lift;
        let mut work = Work {
            nodes: (0..n_original).map(|_| WorkNode::gone()).collect(),
            edges: Vec::with_capacity(reduced.edges.len()),
            limits: reduced.limits,
            times: reduced.times,
            offset: reduced.offset,
            undos: steps,
            tables: Tables::default(),
            renamed: original.iter().map(|(v, _)| *v).collect(),
            clock: 0,
        };
        for ((v, strategies), node) in original.into_iter().zip(reduced.nodes) {
            work.nodes[v as usize] = WorkNode {
                gone: false,
                costs: node.costs,
                strategies,
                memory: node.memory,
                ..WorkNode::gone()
            };
        }
        work.touch_all();
        for edge in reduced.edges {
            let (a, b) = (work.renamed[edge.a as usize], work.renamed[edge.b as usize]);
            work.add_edge(a, b, edge.table);
        }
        work
    }

    pub fn size(&self) -> Size {
        let mut size = Size {
            nodes: 0,
            strategies: 0,
            edges: 0,
            cells: 0,
            times: self.limits.len(),
            offset: self.offset,
        };
        for node in self.nodes.iter().filter(|n| !n.gone) {
            size.nodes += 1;
            size.strategies += node.costs.len();
        }
        for edge in self.edges.iter().flatten() {
            size.edges += 1;
            size.cells += edge.table.cells().len();
        }
        size
    }

    /// Notes that a node changed.
    pub fn touch(&mut self, v: u32) {
        self.clock += 1;
        self.nodes[v as usize].changed = self.clock;
    }

    fn touch_all(&mut self) {
        for v in 0..self.nodes.len() as u32 {
            self.touch(v);
        }
    }

    /// Adds a table between two nodes: to their edge if they have one, or to the node itself when
    /// both are the same.
    pub fn add_edge(&mut self, a: u32, b: u32, table: Arc<Table>) {
        self.touch(a);
        self.touch(b);
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
    }

    pub fn take_edge(&mut self, e: u32) -> Edge {
        let edge = self.edges[e as usize].take().expect("linked edges exist");
        self.nodes[edge.a as usize].links.remove(&edge.b);
        self.nodes[edge.b as usize].links.remove(&edge.a);
        edge
    }

    pub fn edge(&self, e: u32) -> &Edge {
        self.edges[e as usize].as_ref().expect("linked edges exist")
    }

    /// Returns the table of edge `e` with `v` at its rows.
    pub fn table_from(&mut self, e: u32, v: u32) -> Arc<Table> {
        let edge = self.edges[e as usize].as_ref().expect("linked edges exist");
        if edge.a == v {
            Arc::clone(&edge.table)
        } else {
            self.tables.transposed(&edge.table)
        }
    }

    /// Keeps only the strategies `kept` (current indices, ascending) of node `v`.
    pub fn keep(&mut self, v: u32, kept: &[u32]) {
        if self.nodes[v as usize].gone || kept.len() == self.nodes[v as usize].costs.len() {
            return;
        }
        self.touch(v);
        let clock = self.clock;
        let node = &mut self.nodes[v as usize];
        node.costs = kept.iter().map(|&i| node.costs[i as usize]).collect();
        node.strategies = kept.iter().map(|&i| node.strategies[i as usize]).collect();
        for term in &mut node.memory {
            term.usage = kept.iter().map(|&i| term.usage[i as usize]).collect();
        }
        let links = std::mem::take(&mut node.links);
        for (&u, &e) in &links {
            let edge = self.edges[e as usize].as_mut().expect("linked edges exist");
            let axis = if edge.a == v { Axis::Rows } else { Axis::Cols };
            edge.table = self.tables.select(&edge.table, axis, kept);
            self.nodes[u as usize].beside = clock;
        }
        self.nodes[v as usize].links = links;
    }

    /// Takes a node out, whose edges must be gone.
    pub fn retire(&mut self, v: u32) -> WorkNode {
        std::mem::replace(&mut self.nodes[v as usize], WorkNode::gone())
    }

    /// Returns the reduced problem, with the way back.
    pub fn finish(mut self) -> Reduced {
        let mut renamed = vec![u32::MAX; self.nodes.len()];
        let mut reduced = Reduced {
            limits: self.limits,
            times: self.times,
            offset: self.offset,
            lift: Lift {
                n_original: self.nodes.len(),
                original: Vec::new(),
                steps: self.undos,
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
