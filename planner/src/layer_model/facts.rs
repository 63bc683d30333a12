//! Things that hold on a mesh whatever the samples of a microbatch and whatever is recomputed:
//! prices of layout changes, and the groups of parameters with the choices that are of use.
//!
//! A search models every kind of layer for each microbatch size and each choice of what is
//! recomputed, and the group of a parameter is the same in all of these models but for the numbers
//! of its ops.

use super::Link;
use crate::groups::{Choice, Setting};
use crate::pins::AxisRole;
use crate::prices::Prices;
use ir::{LogicalMesh, OpId};
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// The facts of a mesh, for the settings of one search: those that differ in the samples
/// of a microbatch and in what is recomputed alone.
pub(crate) struct MeshFacts<'a> {
    pub prices: Prices<'a>,
    roles: Vec<AxisRole>,
    /// By the path of the first op.
    parameters: FxHashMap<String, Vec<(Question, Arc<Answer>)>>,
}

/// Everything else that the choices of a parameter depend on.
#[derive(PartialEq)]
pub(super) struct Question {
    /// Paths of the ops behind the first one.
    others: Vec<String>,
    /// By op, whether later passes use its results.
    saved: Vec<bool>,
    /// The operands and results that other groups see, ascending.
    seen: Vec<Seen>,
    /// Samples of a microbatch, where a tensor of the group has them.
    batch: Option<u64>,
}

/// An op's place in the group, and its result or operand: results first.
pub(super) type Seen = (usize, bool, usize);

/// The choices of a parameter that are of use.
pub(super) struct Answer {
    pub choices: Vec<Choice>,
    /// Choices before those that others make useless were dropped.
    pub n_made: usize,
}

impl<'a> MeshFacts<'a> {
    /// Nothing but how to price layout changes.
    pub(crate) fn new(prices: Prices<'a>, roles: &[AxisRole]) -> MeshFacts<'a> {
        MeshFacts {
            prices,
            roles: roles.to_vec(),
            parameters: FxHashMap::default(),
        }
    }

    /// Whether it is of this mesh, with axes in these roles.
    pub(crate) fn is_of(&self, mesh: &LogicalMesh, roles: &[AxisRole]) -> bool {
        self.prices.mesh() == mesh && self.roles == roles
    }

    /// The choices of a parameter that was asked for before.
    pub(super) fn parameter(&self, first: &str, question: &Question) -> Option<Arc<Answer>> {
        let same = self.parameters.get(first)?.iter();
        let mut same = same.filter(|(of, _)| of == question);
        same.next().map(|(_, answer)| Arc::clone(answer))
    }

    /// Number of different parameters' groups that were made.
    #[cfg(test)]
    pub(crate) fn n_parameters(&self) -> usize {
        self.parameters.values().map(Vec::len).sum()
    }

    /// Keeps the choices of a parameter.
    pub(super) fn keep(&mut self, first: &str, question: Question, answer: Arc<Answer>) {
        let of_first = self.parameters.entry(first.into()).or_default();
        of_first.push((question, answer));
    }
}

impl Question {
    /// The question of the group at `index`, of these ops.
    pub(super) fn of(s: &Setting<'_>, links: &[Link], index: usize, ops: &[OpId]) -> Question {
        let graph = &s.training.graph;
        let uses = links.iter().filter(|l| l.a != l.b);
        let uses = uses.flat_map(|l| &l.uses);
        let seen = uses.filter_map(|u| match (u.from == index, u.to == index) {
            (true, _) => Some((u.producer.0, false, u.producer.1)),
            (_, true) => Some(match u.consumer {
                (op, Some(operand)) => (op, true, operand),
                (op, None) => (op, false, 0),
            }),
            _ => None,
        });
        let mut seen: Vec<Seen> = seen.collect();
        seen.sort_unstable();
        seen.dedup();
        let of = |id: &OpId| graph.op(*id);
        let values = ops.iter().flat_map(|id| {
            let op = of(id);
            op.inputs.iter().chain(&op.outputs)
        });
        let mut shapes = values.map(|v| &graph.ty(*v).shape);
        let has_samples = shapes.any(|shape| shape.bind(1) != shape.bind(2));
        let results = ops.iter().flat_map(|id| &of(id).outputs);
        Question {
            others: ops.iter().skip(1).map(|id| of(id).path.clone()).collect(),
            saved: results.map(|v| s.saved[v.index()]).collect(),
            seen,
            batch: has_samples.then_some(s.batch),
        }
    }
}
