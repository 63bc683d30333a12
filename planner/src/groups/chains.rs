//! Ops that will be one call with the product before them, as lowering marks it ([`ir::chain`]).
//!
//! What such an op is priced at is what it adds to that call. Where its operand is laid out anew on
//! the way it is a call of its own: the rest of its price is then on that layout change, so that all
//! prices stay above zero.

use super::{Setting, local_types};
use cost_model::compute::{self, Chained};
use ir::chain::{LONGEST, Link, may_keep};
use ir::op::Assignment;
use ir::training::TrainingGraph;
use ir::{Op, OpId, Pass, ValueId};
use rustc_hash::FxHashMap;

/// By op that follows in a chain, the operand that it takes from it.
#[derive(Debug, Default)]
pub(crate) struct Chains(FxHashMap<OpId, Chained>);

impl Chains {
    pub(crate) fn new(training: &TrainingGraph) -> Chains {
        let graph = &training.graph;
        let mut n_uses = vec![0u32; graph.values().len()];
        let states = training.states.iter().map(|s| s.write);
        let ends = states.chain([training.loss]).chain(training.grad_norm);
        let inputs = graph.ops().iter().flat_map(|op| op.inputs.iter().copied());
        inputs.chain(ends).for_each(|v| n_uses[v.index()] += 1);
        // By op, its place in a chain and how many are in it so far. Several may want to go on with
        // one product; the first gets it.
        let mut places: FxHashMap<OpId, (Link, usize)> = FxHashMap::default();
        let mut chains = Chains::default();
        for (id, op) in graph.iter() {
            let before = |&(_, v): &(usize, &ValueId)| graph.value(*v).producer;
            let goes_on = |&(operand, v): &(usize, &ValueId)| {
                let producer = graph.value(*v).producer;
                let &(link, n) = places.get(&producer).filter(|(_, n)| *n < LONGEST)?;
                let is_once = op.inputs.iter().filter(|w| *w == v).count() == 1;
                let is_seen = n_uses[v.index()] > 1;
                let can = is_once && (!is_seen || may_keep(&op.kind));
                let of = graph.op(producer);
                let to = link.then(&op.kind, operand)?;
                (can && are_together(of, op)).then_some((producer, to, n, operand, is_seen))
            };
            // The product that is made last stands right before the op.
            let operands = op.inputs.iter().enumerate();
            let last = operands.filter(|x| goes_on(x).is_some()).max_by_key(before);
            let place = match last.and_then(|x| goes_on(&x)) {
                Some((producer, to, n, operand, is_kept)) => {
                    places.remove(&producer);
                    chains.0.insert(id, Chained { operand, is_kept });
                    Some((to, n + 1))
                }
                None => Link::first(&op.kind).map(|link| (link, 1)),
            };
            if let Some(place) = place.filter(|p| p.0 != Link::End) {
                places.insert(id, place);
            }
        }
        chains
    }
}

impl Chains {
    /// Those of a graph that recomputes more than the first one: what both have is priced as in the
    /// first, which keeps more for the backward pass. So recomputing never costs less by these prices,
    /// and the first graph bounds the others.
    pub(crate) fn of_variant(
        training: &TrainingGraph,
        (first, of_first): (&TrainingGraph, &Chains),
    ) -> Chains {
        let own = Chains::new(training);
        let known = of_first.0.iter();
        let known: FxHashMap<&str, Chained> = known
            .map(|(id, chained)| (first.graph.op(*id).path.as_str(), *chained))
            .collect();
        let chained = training.graph.iter().filter_map(|(id, op)| {
            let of = match op.pass {
                Pass::Recompute => own.0.get(&id),
                _ => known.get(op.path.as_str()),
            };
            Some((id, *of?))
        });
        Chains(chained.collect())
    }
}

/// Whether two ops are played in one slot, for one layer.
fn are_together(a: &Op, b: &Op) -> bool {
    let is_forward = |op: &Op| op.pass == Pass::F;
    (a.region, a.layer, is_forward(a)) == (b.region, b.layer, is_forward(b))
}

/// Seconds of an op on one rank under an assignment, and how much more it takes where the operand
/// that it follows is laid out anew.
pub(super) fn op_seconds(
    s: &Setting<'_>,
    (id, op): (OpId, &Op),
    a: &Assignment,
) -> (f64, Option<(usize, f64)>) {
    let operands = local_types(s, &op.inputs, &a.operands);
    let results = local_types(s, &op.outputs, &a.results);
    let alone = compute::op_time(s.cluster, &op.kind, &operands, &results).0;
    let Some(&chained) = s.chains.and_then(|chains| chains.0.get(&id)) else {
        return (alone, None);
    };
    let within = compute::chained_time(s.cluster, &op.kind, &operands, &results, chained).0;
    let within = within.min(alone);
    (within, Some((chained.operand, alone - within)))
}
