//! The part of a proposed change that fits and pays.
//!
//! Two choices differ in connected groups of nodes. Groups are not adjacent, so their costs
//! and their memory add up, and any set of them may be taken over: some save memory at a cost,
//! others spend it. Greedily: all are taken; while a budget is broken, the group is left out
//! that loses least, memory valued at the given prices, per byte at the worst time; then
//! whatever still pays and fits is flipped.
//!
//! Invariant: a [`State`] fits before and after, and its cost is that of its choice.

use super::forest::{End, Graph};
use super::problem::Cost;
use super::profile::Profile;

/// A choice that fits, with its cost and its memory.
pub(super) struct State {
    pub choice: Vec<u32>,
    /// The cost, decided parts included.
    pub cost: i64,
    profile: Profile,
}

impl State {
    /// Returns `None` when the choice is forbidden or does not fit.
    pub fn new(graph: &Graph<'_>, choice: Vec<u32>) -> Option<State> {
        let reduced = graph.reduced;
        let mut profile = Profile::new(&reduced.limits);
        for (node, &s) in reduced.nodes.iter().zip(&choice) {
            for term in &node.memory {
                profile.change(term.from, term.to, term.usage[s as usize] as i64);
            }
        }
        let cost = reduced.cost(&choice)? as i64;
        profile.fits().then_some(State {
            choice,
            cost,
            profile,
        })
    }
}

/// The rule by which parts of a proposal are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// Takes the parts that lower the cost, or leave it as it is.
    Pays,
    /// Takes as much as fits.
    Fits,
}

/// A group of nodes that change together, and the effect of the change.
#[derive(Clone, Debug)]
struct Group {
    /// The end of its nodes in `Exchange::nodes`; they begin where those of the group before end.
    nodes: usize,
    /// The range of its memory changes in `Exchange::changes`.
    changes: (usize, usize),
    cost: i64,
    /// The change of cost with memory at its prices.
    priced: f64,
    forbidden: bool,
    taken: bool,
}

/// Scratch space for exchanges.
#[derive(Default)]
pub(super) struct Exchange {
    seen: Vec<bool>,
    stack: Vec<u32>,
    nodes: Vec<u32>,
    /// The changes of memory: from, to, bytes.
    changes: Vec<(u32, u32, i64)>,
    groups: Vec<Group>,
    order: Vec<usize>,
}

impl Exchange {
    /// Takes over from `proposed` the parts that `rule` accepts; both choices are equal afterwards.
    /// They may only differ at `nodes`. `until[t]` is the sum of prices before time `t`.
    pub fn take(
        &mut self,
        graph: &Graph<'_>,
        until: &[f64],
        state: &mut State,
        (proposed, nodes): (&mut [u32], &[u32]),
        rule: Rule,
    ) {
        self.find_groups(graph, until, (&state.choice, proposed), nodes);
        for g in 0..self.groups.len() {
            let group = &self.groups[g];
            // A group that costs more even with its memory valued improves nothing.
            let helps = group.cost <= 0 || group.priced <= 0.0;
            if !group.forbidden && (helps || rule == Rule::Fits) {
                self.flip(g, &mut state.profile);
            }
        }
        self.make_fit(&mut state.profile);
        if rule == Rule::Pays {
            self.fill(&mut state.profile);
        }
        let taken = self.groups.iter().filter(|g| g.taken);
        let change: i64 = taken.map(|g| g.cost).sum();
        if rule == Rule::Pays && change > 0 {
            for g in 0..self.groups.len() {
                if self.groups[g].taken {
                    self.flip(g, &mut state.profile);
                }
            }
        } else {
            state.cost += change;
        }
        let mut begin = 0;
        for group in &self.groups {
            for &v in &self.nodes[begin..group.nodes] {
                let v = v as usize;
                self.seen[v] = false;
                if group.taken {
                    state.choice[v] = proposed[v];
                } else {
                    proposed[v] = state.choice[v];
                }
            }
            begin = group.nodes;
        }
    }

    fn find_groups(
        &mut self,
        graph: &Graph<'_>,
        until: &[f64],
        (choice, proposed): (&[u32], &[u32]),
        nodes: &[u32],
    ) {
        self.seen.resize(choice.len(), false);
        self.nodes.clear();
        self.changes.clear();
        self.groups.clear();
        for &root in nodes {
            let r = root as usize;
            if choice[r] != proposed[r] && !self.seen[r] {
                self.seen[r] = true;
                self.stack.push(root);
                let group = self.follow(graph, until, (choice, proposed));
                self.groups.push(group);
            }
        }
    }

    /// Collects the group of the node on the stack.
    fn follow(
        &mut self,
        graph: &Graph<'_>,
        until: &[f64],
        (choice, proposed): (&[u32], &[u32]),
    ) -> Group {
        let begin = self.changes.len();
        let (mut cost, mut memory, mut forbidden) = (0i64, 0.0, false);
        let mut add = |old: Cost, new: Cost| match (old.value(), new.value()) {
            (Some(old), Some(new)) => cost += new as i64 - old as i64,
            _ => forbidden = true,
        };
        while let Some(v) = self.stack.pop() {
            self.nodes.push(v);
            let node = &graph.reduced.nodes[v as usize];
            let (old, new) = (choice[v as usize], proposed[v as usize]);
            add(node.costs[old as usize], node.costs[new as usize]);
            for term in &node.memory {
                let bytes = term.usage[new as usize] as i64 - term.usage[old as usize] as i64;
                if bytes != 0 {
                    self.changes.push((term.from, term.to, bytes));
                    memory += (until[term.to as usize] - until[term.from as usize]) * bytes as f64;
                }
            }
            for end in graph.ends(v) {
                let u = end.other as usize;
                let moves = choice[u] != proposed[u];
                if moves && !self.seen[u] {
                    self.seen[u] = true;
                    self.stack.push(end.other);
                }
                // An edge within the group counts once.
                if !moves || v < end.other {
                    let pair = |end: &End, s, u| graph.pair(end, s, u);
                    add(pair(end, old, choice[u]), pair(end, new, proposed[u]));
                }
            }
        }
        Group {
            nodes: self.nodes.len(),
            changes: (begin, self.changes.len()),
            cost,
            priced: cost as f64 + memory,
            forbidden,
            taken: false,
        }
    }

    fn flip(&mut self, g: usize, profile: &mut Profile) {
        let group = &mut self.groups[g];
        let sign = if group.taken { -1 } else { 1 };
        group.taken = !group.taken;
        for &(from, to, bytes) in &self.changes[group.changes.0..group.changes.1] {
            profile.change(from, to, sign * bytes);
        }
    }

    fn bytes_at(&self, group: &Group, t: u32) -> i64 {
        let changes = self.changes[group.changes.0..group.changes.1].iter();
        let live = changes.filter(|(from, to, _)| (*from..*to).contains(&t));
        live.map(|(_, _, bytes)| bytes).sum()
    }

    fn make_fit(&mut self, profile: &mut Profile) {
        while !profile.fits() {
            let (t, over) = (profile.worst_time(), profile.worst());
            let mut best: Option<(f64, usize)> = None;
            for (g, group) in self.groups.iter().enumerate().filter(|(_, g)| g.taken) {
                let bytes = self.bytes_at(group, t);
                if bytes > 0 {
                    // The loss per byte that helps; noise may have proposed what gains nothing.
                    let score = (-group.priced).max(1e-3) / bytes.min(over) as f64;
                    if best.is_none_or(|(least, _)| score < least) {
                        best = Some((score, g));
                    }
                }
            }
            let (_, g) = best.expect("without any group it fits");
            self.flip(g, profile);
        }
    }

    /// Takes over the groups that pay and fit, the dearest first.
    fn fill(&mut self, profile: &mut Profile) {
        for _ in 0..2 {
            let pays = |g: &Group| !g.forbidden && if g.taken { g.cost > 0 } else { g.cost < 0 };
            let groups = &self.groups;
            self.order.clear();
            self.order
                .extend((0..groups.len()).filter(|&g| pays(&groups[g])));
            self.order.sort_by_key(|&g| (-groups[g].cost.abs(), g));
            let mut helped = false;
            for k in 0..self.order.len() {
                let g = self.order[k];
                self.flip(g, profile);
                if profile.fits() {
                    helped = true;
                } else {
                    self.flip(g, profile);
                }
            }
            if !helped {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Exchange, Rule, State};
    use crate::forest::Graph;
    use crate::problem::Cost;
    use crate::reduced::{MemoryTerm, Reduced, ReducedNode};

    fn node(costs: [u64; 2], usage: [u64; 2]) -> ReducedNode {
        ReducedNode {
            costs: costs.map(Cost::finite).to_vec(),
            memory: vec![MemoryTerm {
                from: 0,
                to: 1,
                usage: usage.to_vec(),
            }],
        }
    }

    /// Returns choice and cost after an exchange from all zeros to all ones with `limit` bytes.
    fn exchanged(nodes: Vec<ReducedNode>, limit: u64, rule: Rule) -> (Vec<u32>, i64) {
        let n = nodes.len();
        let reduced = Reduced {
            nodes,
            limits: vec![limit],
            times: vec![0],
            ..Reduced::default()
        };
        let graph = Graph::new(&reduced);
        let mut state = State::new(&graph, vec![0; n]).expect("zeros fit");
        let mut proposed = vec![1; n];
        let all: Vec<u32> = (0..n as u32).collect();
        let what = (proposed.as_mut_slice(), all.as_slice());
        Exchange::default().take(&graph, &[0.0, 2.0], &mut state, what, rule);
        assert_eq!(proposed, state.choice);
        assert_eq!(reduced.cost(&state.choice), Some(state.cost as u64));
        assert!(reduced.fits(&state.choice));
        (state.choice, state.cost)
    }

    #[test]
    fn one_saves_what_another_spends() {
        // The first saves 10 bytes at 5, the second spends 10 bytes and gains 30, the third
        // spends 10 and gains 20: there is room for one of them.
        let nodes = || {
            vec![
                node([0, 5], [10, 0]),
                node([30, 0], [0, 10]),
                node([20, 0], [0, 10]),
            ]
        };
        assert_eq!(exchanged(nodes(), 10, Rule::Pays), (vec![1, 1, 0], 25));
        assert_eq!(exchanged(nodes(), 20, Rule::Pays), (vec![1, 1, 1], 5));
        // With room for all, saving at a cost is undone.
        assert_eq!(exchanged(nodes(), 30, Rule::Pays), (vec![0, 1, 1], 0));
        assert_eq!(exchanged(nodes(), 30, Rule::Fits), (vec![1, 1, 1], 5));
    }

    #[test]
    fn what_only_costs_is_not_taken() {
        let nodes = vec![node([1, 50], [5, 4]), node([7, 9], [0, 0])];
        assert_eq!(exchanged(nodes, 5, Rule::Pays), (vec![0, 0], 8));
    }
}
