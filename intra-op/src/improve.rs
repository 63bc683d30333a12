//! Search among choices that fit: parts propose at varying prices, exchange takes what fits.
//!
//! A step grows a forest (from 30 nodes to all that there is room for) or a block around a
//! random node, holds the rest, and finds the best for it with memory at prices. The prices
//! are disturbed at random over time, so that one proposal saves memory here and spends it
//! there; [`Exchange`] takes over the groups of nodes that fit and together cost no more.
//! After proposals for the whole graph the prices follow what these used beyond the budgets.
//!
//! When nothing has helped for a while, the best choice is disturbed: some small regions, or
//! everything, with noise on the costs that cools down. What is found from there replaces the
//! best if it is better; in any case its groups that pay are taken over.
//!
//! Invariants: after every step the choice fits and `cost` is its cost; the best never gets
//! worse. What happens depends on the problem, the start, the seed and the work done only.

use super::block::Block;
use super::dual::Dual;
use super::exchange::{Exchange, Rule, State};
use super::forest::{Forest, Graph};
use super::reduced::Reduced;

/// The sizes, in nodes, of the forests that are tried in turn; a block comes between two turns.
const FOREST_SIZES: [usize; 5] = [30, 100, 300, 1000, usize::MAX];
/// The strategies per node in blocks.
const BLOCK_STRATEGIES: [usize; 5] = [2, 3, 4, 8, usize::MAX];
const BLOCK_SIZES: std::ops::RangeInclusive<usize> = 5..=400;
/// The prices that are tried for each forest and each block.
const FOREST_TRIES: usize = 4;
const BLOCK_TRIES: usize = 2;
/// Prices vary by up to `exp(+-SPREAD)` overall, and again in each of about this many pieces.
const SPREAD: f64 = 0.3;
const PIECES: f64 = 20.0;
/// The speed with which prices follow the levels.
const LEARNING: f64 = 0.1;
/// The steps without a better choice before the best is disturbed.
const PATIENCE: usize = 60;
/// The noise on costs, in parts of the mean cost per node.
const NOISE: (f64, f64) = (0.01, 1.0);
/// The small regions that are disturbed at once, and the most nodes of each.
const REGIONS: usize = 3;
const REGION_NODES: usize = 100;
/// The steps of cooling, and the part of the noise that is left at the end.
const COOLING_STEPS: usize = 100;
const COOLED: f64 = 0.001;

/// A random generator: SplitMix64 (Steele, Lea & Flood 2014).
#[derive(Clone, Debug)]
pub(super) struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        // The bias is below n / 2^64.
        (self.next() % n.max(1) as u64) as usize
    }

    /// Returns a number in `0.0..1.0`.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// A search from a choice that fits.
pub(super) struct Search<'a> {
    graph: Graph<'a>,
    state: State,
    /// The proposal; equal to the state's choice between steps.
    proposed: Vec<u32>,
    /// The nodes at which the proposal may differ.
    nodes: Vec<u32>,
    best: (i64, Vec<u32>),
    /// The best choice, and the prices, when the present attempt began.
    base: (Vec<u32>, Vec<f64>),
    /// The cost per byte at each time.
    prices: Vec<f64>,
    /// The sum of the disturbed prices before each time.
    until: Vec<f64>,
    /// The fraction by which each time is over its budget.
    over: Vec<f64>,
    random: Random,
    forest: Forest,
    block: Block,
    block_sizes: [usize; BLOCK_STRATEGIES.len()],
    exchange: Exchange,
    n_steps: usize,
    n_failed: usize,
    /// The noise at first, and the steps of cooling that are left.
    cooling: Option<(f64, usize)>,
    extra_work: u64,
}

impl<'a> Search<'a> {
    /// Starts from a choice with the dual's prices; `None` if it is forbidden or does not fit.
    pub fn new(
        reduced: &'a Reduced,
        dual: &Dual<'_>,
        choice: Vec<u32>,
        seed: u64,
    ) -> Option<Search<'a>> {
        let graph = Graph::new(reduced);
        let prices = dual.prices();
        let state = State::new(&graph, choice.clone())?;
        Some(Search {
            proposed: choice.clone(),
            nodes: Vec::new(),
            best: (state.cost, choice.clone()),
            base: (choice, prices.clone()),
            until: vec![0.0; prices.len() + 1],
            over: vec![0.0; prices.len()],
            prices,
            random: Random(seed),
            forest: Forest::default(),
            block: Block::default(),
            block_sizes: [30; BLOCK_STRATEGIES.len()],
            exchange: Exchange::default(),
            n_steps: 0,
            n_failed: 0,
            cooling: None,
            extra_work: 0,
            graph,
            state,
        })
    }

    /// Returns cost (decided parts included) and choice of the best found so far.
    pub fn best(&self) -> (u64, &[u32]) {
        (self.best.0 as u64, &self.best.1)
    }

    /// Returns the work done so far: about the table cells looked at, 10^9 a second.
    pub fn work(&self) -> u64 {
        self.forest.work + self.block.work + self.extra_work
    }

    /// Searches for this much work, or until `stop`, which is asked before every step, says so.
    pub fn run(&mut self, work: u64, stop: &dyn Fn() -> bool) {
        let end = self.work().saturating_add(work);
        while self.graph.n_nodes() > 0 && self.work() < end && !stop() {
            self.step();
        }
    }

    /// Uses a choice found elsewhere: goes on from it if it is better than the best, and takes over
    /// the groups of it that pay if not. Does nothing if it does not fit.
    pub fn adopt(&mut self, choice: &[u32]) {
        let Some(state) = State::new(&self.graph, choice.to_vec()) else {
            return;
        };
        let held = std::mem::replace(&mut self.state, state);
        if self.state.cost < self.best.0 {
            self.cooling = None;
            self.proposed.copy_from_slice(choice);
            self.record();
            self.base.0.copy_from_slice(choice);
        } else {
            // The best takes over what pays of the newcomer; then back to what was tried.
            self.meet(choice.to_vec());
            let better = self.state.cost < self.best.0;
            self.record();
            if !better {
                self.state = held;
                self.proposed.copy_from_slice(&self.state.choice);
            }
        }
    }

    fn step(&mut self) {
        self.extra_work += self.graph.n_nodes() as u64;
        let before = self.state.cost;
        if let Some((first, left)) = self.cooling {
            let passed = (COOLING_STEPS - left) as f64 / COOLING_STEPS as f64;
            self.disturb(usize::MAX, first * COOLED.powf(passed));
            self.cooling = (left > 1).then_some((first, left - 1));
        } else {
            let kind = self.n_steps % (FOREST_SIZES.len() + 1);
            self.n_steps += 1;
            match FOREST_SIZES.get(kind) {
                Some(&size) => self.forest_step(size),
                None => self.block_step(),
            }
            let better = self.state.cost < before;
            self.n_failed = if better { 0 } else { self.n_failed + 1 };
        }
        self.record();
        if self.n_failed > PATIENCE {
            self.n_failed = 0;
            self.settle();
            self.leave();
        }
    }

    fn record(&mut self) {
        if self.state.cost < self.best.0 {
            self.best.0 = self.state.cost;
            self.best.1.copy_from_slice(&self.state.choice);
        }
    }

    fn forest_step(&mut self, size: usize) {
        self.grow(size);
        for _ in 0..FOREST_TRIES {
            self.vary_prices();
            self.propose(0.0);
            if size >= self.graph.n_nodes() {
                self.learn();
            }
            self.take(Rule::Pays);
        }
    }

    fn block_step(&mut self) {
        let kind = self.random.below(BLOCK_STRATEGIES.len());
        let root = self.random.below(self.graph.n_nodes()) as u32;
        let (size, most) = (self.block_sizes[kind], BLOCK_STRATEGIES[kind]);
        let (graph, choice) = (&self.graph, &self.state.choice);
        let random = &mut self.random;
        if !self
            .block
            .prepare(graph, choice, root, (size, most), random)
        {
            return;
        }
        let fits = self.block.nodes().len() >= size;
        let next = if fits {
            size + 1 + size / 16
        } else {
            size - size / 16
        };
        self.block_sizes[kind] = next.clamp(*BLOCK_SIZES.start(), *BLOCK_SIZES.end());
        self.nodes.clear();
        self.nodes.extend_from_slice(self.block.nodes());
        for _ in 0..BLOCK_TRIES {
            self.vary_prices();
            self.block
                .solve(&self.graph, &self.until, &mut self.proposed);
            self.take(Rule::Pays);
        }
    }

    /// Grows a forest of up to `size` nodes, with the rest held.
    fn grow(&mut self, size: usize) {
        let n = self.graph.n_nodes();
        let root = self.random.below(n) as u32;
        let size = size.min(n);
        self.forest.grow(&self.graph, root, size, &mut self.random);
        self.nodes.clear();
        self.nodes.extend(self.forest.nodes());
        self.forest.hold(&self.graph, &self.state.choice);
    }

    fn propose(&mut self, noise: f64) {
        let noise = noise * self.state.cost as f64 / self.graph.n_nodes() as f64;
        self.forest.solve(
            &self.graph,
            &self.until,
            noise as f32,
            &mut self.random,
            &mut self.proposed,
        );
    }

    fn take(&mut self, rule: Rule) {
        let proposal = (self.proposed.as_mut_slice(), self.nodes.as_slice());
        self.exchange
            .take(&self.graph, &self.until, &mut self.state, proposal, rule);
    }

    /// Disturbs the prices and sums them up over time.
    fn vary_prices(&mut self) {
        let n = self.prices.len();
        self.extra_work += n as u64 / 2;
        let overall = self.factor();
        let (mut sum, mut factor, mut left) = (0.0, 1.0, 0.0);
        for t in 0..n {
            if left <= 0.0 {
                factor = overall * self.factor();
                left = 1.0 + 2.0 * self.random.unit() * n as f64 / PIECES;
            }
            left -= 1.0;
            self.until[t] = sum;
            sum += self.prices[t] * factor;
        }
        self.until[n] = sum;
    }

    fn factor(&mut self) -> f64 {
        (SPREAD * (2.0 * self.random.unit() - 1.0)).exp()
    }

    /// Moves prices by the proposal's use beyond the budgets: in proportion where there is a price,
    /// and with a new one at peaks.
    fn learn(&mut self) {
        let n = self.prices.len();
        let reduced = self.graph.reduced;
        let levels = reduced.levels(&self.proposed);
        let fraction = |(&level, &limit): (&u64, &u64)| {
            let limit = limit.max(1) as f64;
            (level as f64 - limit) / limit
        };
        self.over.clear();
        self.over
            .extend(levels.iter().zip(&reduced.limits).map(fraction));
        self.extra_work += 2 * n as u64;
        let n_priced = self.prices.iter().filter(|p| **p > 0.0).count();
        let mean = self.prices.iter().sum::<f64>() / n_priced.max(1) as f64;
        for t in 0..n {
            let over = self.over[t];
            let peak = over > 0.0
                && (t == 0 || over > self.over[t - 1])
                && (t + 1 == n || over >= self.over[t + 1]);
            // A budget is worth less than many times the whole cost, and a price that matters is
            // worth more than a millionth of it.
            let unit = self.best.0 as f64 / reduced.limits[t].max(1) as f64;
            let new = if peak { mean.max(1e-6 * unit) } else { 0.0 };
            let step = LEARNING * over.clamp(-0.5, 0.5);
            self.prices[t] = (self.prices[t] + step * (self.prices[t] + new)).min(100.0 * unit);
        }
    }

    /// Goes back to the best with the groups of the present choice that pay, or, if that is the
    /// best, of the one that was best before.
    fn settle(&mut self) {
        let met = if self.state.cost <= self.best.0 {
            self.base.1.clone_from(&self.prices);
            std::mem::take(&mut self.base.0)
        } else {
            self.prices.clone_from(&self.base.1);
            self.state.choice.clone()
        };
        self.meet(met);
        self.record();
        self.base.0.clone_from(&self.best.1);
    }

    /// Goes to the best with the groups of `other` that pay.
    fn meet(&mut self, other: Vec<u32>) {
        let best = State::new(&self.graph, self.best.1.clone());
        self.state = best.expect("the best fits");
        self.proposed = other;
        self.nodes.clear();
        self.nodes.extend(0..self.graph.n_nodes() as u32);
        self.vary_prices();
        self.take(Rule::Pays);
    }

    /// Begins another attempt from the best.
    fn leave(&mut self) {
        let (low, high) = NOISE;
        let noise = low * (high / low).powf(self.random.unit());
        if self.random.below(2) == 0 {
            self.cooling = Some((noise, COOLING_STEPS));
            return;
        }
        for _ in 0..1 + self.random.below(REGIONS) {
            let size = 1 + self.random.below(REGION_NODES);
            self.disturb(size, noise);
        }
    }

    /// Follows disturbed costs in a forest, whatever it costs.
    fn disturb(&mut self, size: usize, noise: f64) {
        self.grow(size);
        self.vary_prices();
        self.propose(noise);
        self.take(Rule::Fits);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::{Random, Search};
    use crate::dual::Dual;
    use crate::problem::{Cost, Edge, Table};
    use crate::reduced::{MemoryTerm, Reduced, ReducedNode};
    use std::sync::Arc;

    /// Makes a random tree of `n` nodes and up to `n_more` more edges, over 4 times; the budgets
    /// are between the least and the most usage.
    pub fn random_problem(n: usize, n_more: usize, random: &mut Random) -> Reduced {
        let node = |random: &mut Random| {
            let n_strategies = 1 + random.below(4);
            let from = random.below(4) as u32;
            let to = from + 1 + random.below(4 - from as usize) as u32;
            let mut numbers = |most| {
                let some = (0..n_strategies).map(|_| random.below(most) as u64);
                some.collect::<Vec<u64>>()
            };
            ReducedNode {
                costs: numbers(40).into_iter().map(Cost::finite).collect(),
                memory: vec![MemoryTerm {
                    from,
                    to,
                    usage: numbers(10),
                }],
            }
        };
        let nodes: Vec<ReducedNode> = (0..n).map(|_| node(random)).collect();
        let mut edges: Vec<Edge> = Vec::new();
        let mut add = |a: usize, b: usize, random: &mut Random| {
            let (a, b) = (a.min(b), a.max(b));
            let known = |e: &Edge| (e.a as usize, e.b as usize) == (a, b);
            if a != b && !edges.iter().any(known) {
                let sizes = (nodes[a].costs.len(), nodes[b].costs.len());
                let cell = |i: usize, j: usize| {
                    // The first strategies always go together.
                    let cost = Cost::finite(random.below(30) as u64);
                    let bar = i + j > 0 && random.below(6) == 0;
                    if bar { Cost::FORBIDDEN } else { cost }
                };
                let mut cell = cell;
                let cells: Vec<Cost> = (0..sizes.0 * sizes.1)
                    .map(|k| cell(k / sizes.1, k % sizes.1))
                    .collect();
                let table = Table::new(sizes.0, sizes.1, cells).unwrap();
                let (a, b) = (a as u32, b as u32);
                let table = Arc::new(table);
                edges.push(Edge { a, b, table });
            }
        };
        for v in 1..n {
            add(random.below(v), v, random);
        }
        for _ in 0..n_more {
            add(random.below(n), random.below(n), random);
        }
        let mut reduced = Reduced {
            nodes,
            edges,
            limits: vec![0; 4],
            times: (0..4).collect(),
            offset: 5,
            ..Reduced::default()
        };
        // All first strategies fit.
        let least = reduced.levels(&vec![0; n]);
        reduced.limits = least.iter().map(|l| l + random.below(8) as u64).collect();
        reduced
    }

    #[test]
    fn finds_the_best_of_small_problems() {
        let mut random = Random(11);
        let mut n_best = 0;
        for seed in 0..60 {
            let reduced = random_problem(7, 5, &mut random);
            let mut dual = Dual::new(&reduced);
            let prices: Vec<f64> = (0..4).map(|_| random.unit()).collect();
            dual.set_prices(&prices);
            let mut search = Search::new(&reduced, &dual, vec![0; 7], seed).unwrap();
            let start = search.best().0;
            for _ in 0..40 {
                search.run(2000, &|| false);
                let state = &search.state;
                assert_eq!(reduced.cost(&state.choice), Some(state.cost as u64));
                assert!(reduced.fits(&state.choice));
            }
            let (cost, choice) = search.best();
            assert_eq!(reduced.cost(choice), Some(cost));
            assert!(reduced.fits(choice) && cost <= start);
            let (least, _) = reduced.brute_force().unwrap();
            assert!(cost >= least);
            n_best += usize::from(cost == least);
        }
        assert!(n_best >= 57, "{n_best} of 60");
    }

    #[test]
    fn depends_on_seed_and_work_alone_and_stops_when_told() {
        let mut random = Random(5);
        let reduced = random_problem(40, 30, &mut random);
        let dual = Dual::new(&reduced);
        let begin = || Search::new(&reduced, &dual, vec![0; 40], 3).unwrap();
        let (mut one, mut two) = (begin(), begin());
        one.run(300_000, &|| false);
        for _ in 0..3 {
            two.run(100_000, &|| false);
        }
        assert!(one.best().0 < begin().best().0);
        // Parts of the work may end a step later than the whole.
        let rest = two.work() - one.work();
        one.run(rest, &|| false);
        assert_eq!((one.work(), one.best()), (two.work(), two.best()));
        one.run(u64::MAX, &|| true);
        assert_eq!(one.work(), two.work());
    }

    #[test]
    fn adopts_what_is_better_and_refuses_what_does_not_fit() {
        let mut random = Random(23);
        for seed in 0..20 {
            let reduced = random_problem(7, 4, &mut random);
            let dual = Dual::new(&reduced);
            let (least, best) = reduced.brute_force().unwrap();
            let mut search = Search::new(&reduced, &dual, vec![0; 7], seed).unwrap();
            search.adopt(&best);
            assert_eq!(search.best().0, least);
            // A worse one changes nothing; one that does not fit is refused.
            search.adopt(&[0; 7]);
            assert_eq!(search.best().0, least);
            let most: Vec<u32> = reduced
                .nodes
                .iter()
                .map(|n| n.costs.len() as u32 - 1)
                .collect();
            if !reduced.fits(&most) {
                assert!(Search::new(&reduced, &dual, most.clone(), 0).is_none());
            }
            search.adopt(&most);
            search.run(5000, &|| false);
            assert_eq!(search.best().0, least);
        }
    }

    #[test]
    fn can_move_to_a_thread_of_its_own() {
        fn sends<T: Send>() {}
        sends::<Search<'static>>();
    }
}
