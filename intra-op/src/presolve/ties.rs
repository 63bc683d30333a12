//! Merges tied nodes: where each strategy of one node allows one strategy of another only, the
//! other follows it. Undo: the node takes the partner of what it follows.

use super::super::problem::{Edge, Table};
use super::super::reduced::MemoryTerm;
use super::super::tables::Axis;
use super::memory::merge_terms;
use super::undo::{Follows, Undo};
use super::work::Work;
use super::{Infeasibility, Reduction};

/// The reduction of this module.
#[derive(Default)]
pub(super) struct MergeTies {
    /// The clock at the last round; edges of nodes that have not changed since were looked at.
    seen: u64,
}

/// `node` takes `map[i]` where `on` takes strategy i.
pub(super) struct Tie {
    pub node: u32,
    pub on: u32,
    pub map: Vec<u32>,
}

impl Reduction for MergeTies {
    fn name(&self) -> &'static str {
        "ties"
    }

    fn apply(&mut self, work: &mut Work) -> Result<(), Infeasibility> {
        let seen = std::mem::replace(&mut self.seen, work.clock);
        let mut e = 0;
        // Merging adds edges at the end of the list, which are looked at too.
        while e < work.edges.len() {
            if let Some(edge) = &work.edges[e]
                && edge.table.has_forbidden()
                && [edge.a, edge.b]
                    .iter()
                    .any(|v| work.nodes[*v as usize].changed > seen)
                && let Some(tie) = tie(work, edge)
            {
                work.merge(e as u32, &tie);
            }
            e += 1;
        }
        Ok(())
    }
}

/// Returns the end of an edge that follows the other, if merging it does not make tables grow.
fn tie(work: &Work, edge: &Edge) -> Option<Tie> {
    let by_row = only_partner(&edge.table, false);
    let by_col = only_partner(&edge.table, true);
    let degree = |v: u32| work.nodes[v as usize].links.len();
    let follows = |node: u32, on: u32, map: Vec<u32>| {
        (work.growth(node, on) <= 0).then_some(Tie { node, on, map })
    };
    match (by_row, by_col) {
        (Some(map), Some(_)) if degree(edge.b) <= degree(edge.a) => follows(edge.b, edge.a, map),
        (_, Some(map)) => follows(edge.a, edge.b, map),
        (Some(map), None) => follows(edge.b, edge.a, map),
        (None, None) => None,
    }
}

/// Returns the only allowed partner of each row (or column); `None` if one has several or none.
fn only_partner(table: &Table, by_col: bool) -> Option<Vec<u32>> {
    let n = if by_col {
        table.n_cols()
    } else {
        table.n_rows()
    };
    let mut partner = vec![u32::MAX; n];
    for i in 0..table.n_rows() {
        let allowed = table.row(i).iter().enumerate();
        for (j, _) in allowed.filter(|(_, c)| !c.is_forbidden()) {
            let (key, value) = if by_col { (j, i) } else { (i, j) };
            if partner[key] != u32::MAX {
                return None;
            }
            partner[key] = value as u32;
        }
    }
    (!partner.contains(&u32::MAX)).then_some(partner)
}

impl Work {
    /// Returns the number of cells by which tables grow when `node` is replaced by `on`.
    pub fn growth(&self, node: u32, on: u32) -> i64 {
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

    /// Replaces a node by the one that it follows along edge `e`.
    pub fn merge(&mut self, e: u32, tie: &Tie) {
        let Tie { node, on, map } = tie;
        let (node, on) = (*node, *on);
        let pairs = self.table_from(e, on);
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
            let cost = gone.costs[s as usize].plus(pairs.get(i, s as usize));
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
        self.undos.push(Undo::Follows(Follows {
            node,
            on,
            keys: on_node.strategies.clone(),
            values: map.iter().map(|&s| gone.strategies[s as usize]).collect(),
        }));
        self.touch(on);
    }
}
