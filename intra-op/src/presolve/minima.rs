//! Moves the minima of every table's rows and columns to the nodes, drops tables that are then
//! zero, and counts the least cost of every node as decided. Undo: none, no choice changes.

use std::sync::Arc;

use super::super::problem::Cost;
use super::work::Work;
use super::{Infeasibility, Reduction};

/// The reduction of this module.
pub(super) struct MoveMinima;

impl Reduction for MoveMinima {
    fn name(&self) -> &'static str {
        "minima"
    }

    fn apply(&mut self, work: &mut Work) -> Result<(), Infeasibility> {
        for e in 0..work.edges.len() as u32 {
            move_table_minima(work, e);
        }
        for node in work.nodes.iter_mut().filter(|n| !n.gone) {
            let finite = node.costs.iter().filter_map(|c| c.value());
            let least = finite.min().unwrap_or(0);
            if least > 0 {
                node.costs.iter_mut().for_each(|c| *c = c.minus(least));
                work.offset += least;
            }
        }
        Ok(())
    }
}

fn move_table_minima(work: &mut Work, e: u32) {
    let Some(edge) = &work.edges[e as usize] else {
        return;
    };
    let (a, b) = (edge.a as usize, edge.b as usize);
    let normal = work.tables.normalised(&edge.table);
    for (v, minima) in [(a, &normal.row_minima), (b, &normal.col_minima)] {
        for (cost, &least) in work.nodes[v].costs.iter_mut().zip(minima) {
            *cost = cost.plus(Cost::finite(least));
        }
    }
    if normal.is_zero {
        work.take_edge(e);
    } else {
        let edge = work.edges[e as usize].as_mut().expect("seen above");
        edge.table = Arc::clone(&normal.table);
    }
}
