//! Ops that will be one call with those before them, as lowering marks it ([`ir::chain`]).
//!
//! What such an op is priced at is what it adds to that call. Where its operand is laid out anew on
//! the way it is a call of its own: the rest of its price is then on that layout change, so that all
//! prices stay above zero.

use super::{Setting, local_types};
use cost_model::compute;
use ir::chain::{Link, Spared, is_of_elements};
use ir::op::Assignment;
use ir::training::TrainingGraph;
use ir::{Graph, Op, OpId, Pass, ValueId};
use rustc_hash::FxHashMap;

/// The bytes that an op of a chain is spared, and the value that it takes from it, by operand: none
/// where both read an operand in common.
#[derive(Clone, Copy, Debug)]
struct Chained {
    spared: Spared,
    operand: Option<usize>,
}

/// By op that follows in a chain, what it is spared.
#[derive(Debug, Default)]
pub(crate) struct Chains(FxHashMap<OpId, Chained>);

/// A chain while it grows.
struct Chain {
    link: Link,
    ops: Vec<OpId>,
}

/// Chains of a graph, in the order of their first ops.
struct Growing<'a> {
    graph: &'a Graph,
    n_uses: Vec<u32>,
    chains: Vec<Chain>,
    /// By op, its chain.
    of: FxHashMap<OpId, usize>,
}

impl Growing<'_> {
    /// The chain that an op goes on with, the place of the op in it and what it is spared.
    fn found(&self, id: OpId, op: &Op) -> Option<(usize, Link, Chained)> {
        // The value that is made last stands right before the op.
        let mut operands: Vec<usize> = (0..op.inputs.len()).collect();
        operands.sort_by_key(|&o| std::cmp::Reverse(self.graph.value(op.inputs[o]).producer));
        let takes = |&o: &usize| self.takes(id, op, o);
        let taken = operands.iter().find_map(takes);
        taken.or_else(|| self.reads_along(id, op))
    }

    /// Finds the chain of which an op takes that operand.
    fn takes(&self, id: OpId, op: &Op, operand: usize) -> Option<(usize, Link, Chained)> {
        let v = op.inputs[operand];
        let producer = self.graph.value(v).producer;
        let c = *self.of.get(&producer)?;
        let chain = &self.chains[c];
        let last = *chain.ops.last()?;
        let to = chain.link.then(&op.kind, operand)?;
        let is_once = op.inputs.iter().filter(|w| **w == v).count() == 1;
        let is_seen = self.n_uses[v.index()] > 1;
        let fits = match chain.link {
            Link::Product | Link::Sum => producer == last,
            Link::Total | Link::Elements if is_of_elements(&op.kind) => {
                self.is_alike(op) && self.meets(chain, (id, op), v)
            }
            _ => producer == last && self.is_alike(op),
        };
        let may = is_once && (!is_seen || chain.link.may_be_kept(&op.kind));
        if !may || !fits || !self.may_join(chain, op) {
            return None;
        }
        let operand = Some(operand);
        let spared = self.spared(chain, op);
        Some((c, to, Chained { spared, operand }))
    }

    /// Finds the chain with whose last function of elements an op shares an operand.
    fn reads_along(&self, id: OpId, op: &Op) -> Option<(usize, Link, Chained)> {
        let before = OpId::new(id.index().checked_sub(1)?);
        let c = *self.of.get(&before)?;
        let chain = &self.chains[c];
        let in_common = (self.graph.op(before).inputs.iter())
            .find_map(|v| op.inputs.iter().position(|w| w == v))?;
        let is_of_elements = chain.link.is_of_elements() && is_of_elements(&op.kind);
        let fits = is_of_elements && self.is_alike(op) && self.may_join(chain, op);
        let to = chain.link.then(&op.kind, in_common).filter(|_| fits)?;
        let spared = self.spared(chain, op);
        let operand = None;
        Some((c, to, Chained { spared, operand }))
    }

    fn may_join(&self, chain: &Chain, op: &Op) -> bool {
        let of = |id: &OpId| self.graph.op(*id);
        let is_together = chain.ops.last().is_some_and(|id| are_together(of(id), op));
        is_together && chain.link.has_room(chain.ops.len())
    }

    /// Whether functions of elements will be neighbours, of which the later one takes a value: they
    /// are, or the later one moves up, or the earlier one down.
    fn meets(&self, chain: &Chain, (id, op): (OpId, &Op), v: ValueId) -> bool {
        let Some(&last) = chain.ops.last() else {
            return false;
        };
        let is_ready = |w: &ValueId| *w == v || self.graph.value(*w).producer < last;
        let moves_up = self.n_uses[v.index()] == 1 && op.inputs.iter().all(is_ready);
        let feeder = self.graph.op(last);
        let is_read_before = |other: &OpId| self.graph.op(*other).inputs.contains(&v);
        let moves_down = chain.ops.len() == 1
            && feeder.inputs.len() == 1
            && !(last.index() + 1..id.index()).any(|i| is_read_before(&OpId::new(i)));
        last.index() + 1 == id.index() || moves_up || moves_down
    }

    /// Says whether the tensors that an op goes through element by element have one shape.
    fn is_alike(&self, op: &Op) -> bool {
        let shape = |v: &ValueId| &self.graph.ty(*v).shape;
        let operands = match is_of_elements(&op.kind) {
            true => op.inputs.as_slice(),
            false => op.inputs.get(..1).unwrap_or_default(),
        };
        let value = op.outputs.first().map(shape);
        value.is_some_and(|y| operands.iter().all(|x| shape(x) == y))
    }

    /// Returns what the chain has made or read already, and so spares an op.
    fn spared(&self, chain: &Chain, op: &Op) -> Spared {
        let mut spared = Spared::default();
        let reads = |id: &OpId, v| self.graph.op(*id).inputs.contains(v);
        for (spared, v) in spared.iter_mut().zip(&op.inputs) {
            let is_made = chain.ops.contains(&self.graph.value(*v).producer);
            let is_read = chain.ops.iter().any(|id| reads(id, v));
            *spared = match is_made {
                true if self.n_uses[v.index()] == 1 => 2,
                true => 1,
                false => u8::from(chain.link.is_of_elements() && is_read),
            };
        }
        spared
    }
}

impl Chains {
    pub(crate) fn new(training: &TrainingGraph) -> Chains {
        let graph = &training.graph;
        let mut n_uses = vec![0u32; graph.values().len()];
        let states = training.states.iter().map(|s| s.write);
        let ends = states.chain([training.loss]).chain(training.grad_norm);
        let inputs = graph.ops().iter().flat_map(|op| op.inputs.iter().copied());
        inputs.chain(ends).for_each(|v| n_uses[v.index()] += 1);
        let mut growing = Growing {
            graph,
            n_uses,
            chains: Vec::new(),
            of: FxHashMap::default(),
        };
        let mut chains = Chains::default();
        for (id, op) in graph.iter() {
            // Several may want to go on with one chain; the first gets it.
            let (chain, link) = match growing.found(id, op) {
                Some((chain, link, chained)) => {
                    chains.0.insert(id, chained);
                    (chain, link)
                }
                None => {
                    let begins = Link::first(&op.kind);
                    let is_alike = |l: &Link| *l == Link::Product || growing.is_alike(op);
                    let Some(link) = begins.filter(is_alike) else {
                        continue;
                    };
                    let ops = Vec::new();
                    growing.chains.push(Chain { link, ops });
                    (growing.chains.len() - 1, link)
                }
            };
            growing.chains[chain].link = link;
            growing.chains[chain].ops.push(id);
            growing.of.insert(id, chain);
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
    let spared = chained.spared;
    let within = compute::chained_time(s.cluster, &op.kind, &operands, &results, spared).0;
    let within = within.min(alone);
    (within, chained.operand.map(|o| (o, alone - within)))
}
