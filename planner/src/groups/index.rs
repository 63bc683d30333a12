//! Lookups of groups in a training graph, which has thousands of ops and states: made once.

use super::members::prepares;
use ir::training::{State, StateRole, TrainingGraph};
use ir::{OpId, Pass, Region, ValueId};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;

/// The states of a training graph by value, and the uses of parameters.
#[derive(Debug, Default)]
pub(crate) struct Index {
    /// By the value that a state has during the step, its place among the states.
    places: FxHashMap<ValueId, usize>,
    /// By the same value, that of the parameter which the state belongs to.
    parameters: FxHashMap<ValueId, ValueId>,
    /// By value of a prepared copy, the forward ops that use it, in graph order.
    users: FxHashMap<ValueId, Vec<OpId>>,
}

impl Index {
    pub(crate) fn new(training: &TrainingGraph) -> Index {
        let graph = &training.graph;
        let states = || training.states.iter();
        let own = states().filter(|s| s.role == StateRole::Parameter);
        let by_path: BTreeMap<&str, ValueId> = own.map(|s| (s.path.as_str(), s.read)).collect();
        let mut index = Index::default();
        for (place, state) in states().enumerate() {
            index.places.entry(state.read).or_insert(place);
            if let Some(parameter) = by_path.get(state.param.as_str()) {
                index.parameters.insert(state.read, *parameter);
            }
        }
        for (i, op) in graph.ops().iter().enumerate() {
            if op.region != Region::Microbatch || op.pass != Pass::F {
                continue;
            }
            for &v in &op.inputs {
                if prepares(graph.op(graph.value(v).producer)) {
                    let users = index.users.entry(v).or_default();
                    if users.last() != Some(&OpId::new(i)) {
                        users.push(OpId::new(i));
                    }
                }
            }
        }
        index
    }

    /// The place among the states of the one that has this value during the step.
    pub(crate) fn place(&self, v: ValueId) -> Option<usize> {
        self.places.get(&v).copied()
    }

    /// The state that has this value during the step.
    pub(super) fn state<'t>(&self, training: &'t TrainingGraph, v: ValueId) -> Option<&'t State> {
        training.states.get(self.place(v)?)
    }

    /// The parameter that the state with this value belongs to.
    pub(super) fn parameter(&self, v: ValueId) -> Option<ValueId> {
        self.parameters.get(&v).copied()
    }

    /// The forward ops that use a prepared copy of a parameter, in graph order.
    pub(super) fn users(&self, v: ValueId) -> &[OpId] {
        self.users.get(&v).map_or(&[], |users| users)
    }
}
