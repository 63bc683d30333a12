//! A lower bound for any reduced problem: prices on memory, messages on costs.
//!
//! A price per time point turns memory into cost, and what is left is a sum of node and pair
//! costs; messages move cost between nodes and edges without changing any choice's total, so
//! that the sum of the nodes' minima rises towards the least total. Prices and messages are
//! improved in turn, each starting where it was.
//!
//! Invariants: the bound is rigorous. Costs, messages and prices are integers; costs carry
//! [`Dual::shift`] extra bits; priced usage is rounded down and the budget's value up; edges
//! keep non-negative costs after every message, so leaving them out only lowers the bound.
//!
//! Methods: sequential tree-reweighted message passing, Kolmogorov 2006; prices by averaged
//! subgradients with Polyak's step, going back to the best prices when steps fail.

use std::collections::HashMap;
use std::sync::Arc;

use super::problem::Cost;
use super::reduced::Reduced;

/// Forbidden, well above what finite sums can reach.
pub(super) const INFINITE: i64 = 1 << 58;
/// Finite sums with their extra bits stay below this.
const MOST: u128 = 1 << 54;
/// Fractional bits of a price.
const PRICE_BITS: u32 = 32;
/// Price steps without a better bound before the step is made smaller.
const PATIENCE: usize = 3;
/// The first step aims for this fraction of the distance to the target.
const FIRST_STEP: f64 = 0.1;
/// Times that get a price at once.
const TIMES_PER_STAGE: usize = 2;
/// Stages without a better bound before giving up.
const MAX_STALLED: usize = 5;
/// Rounds between two looks at the state.
const VISIT_EVERY: usize = 8;

/// An edge as its end sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    pub edge: u32,
    pub other: u32,
    /// This end is the table's rows (and the lower index).
    pub rows: bool,
}

/// Prices, messages and the bound they give.
#[derive(Clone)]
pub(super) struct Dual<'r> {
    reduced: &'r Reduced,
    /// Costs are multiplied by `2^shift`.
    pub shift: u32,
    pub links: Vec<Vec<Link>>,
    /// Scaled cells of each edge's table.
    pub tables: Vec<Arc<[i64]>>,
    /// Scaled node costs without prices.
    pub costs: Vec<Vec<i64>>,
    /// Scaled node costs with prices.
    pub priced: Vec<Vec<i64>>,
    /// What each edge gives its first (rows) and second end.
    pub messages: Vec<[Vec<i64>; 2]>,
    /// Scaled cost per byte at each time, with [`PRICE_BITS`] fractional bits.
    prices: Vec<u64>,
    /// What the budgets are worth at these prices, scaled, rounded up.
    budget: u128,
}

impl<'r> Dual<'r> {
    pub fn new(reduced: &'r Reduced) -> Dual<'r> {
        let shift = extra_bits(reduced);
        let scaled = |c: &Cost| c.value().map_or(INFINITE, |c| (c as i64) << shift);
        let mut links = vec![Vec::new(); reduced.nodes.len()];
        let mut known: HashMap<usize, Arc<[i64]>> = HashMap::new();
        let (mut tables, mut messages) = (Vec::new(), Vec::new());
        for (e, edge) in reduced.edges.iter().enumerate() {
            for (v, other, rows) in [(edge.a, edge.b, true), (edge.b, edge.a, false)] {
                let edge = e as u32;
                links[v as usize].push(Link { edge, other, rows });
            }
            let key = Arc::as_ptr(&edge.table) as usize;
            let make = || edge.table.cells().iter().map(scaled).collect();
            tables.push(Arc::clone(known.entry(key).or_insert_with(make)));
            messages.push([vec![0; edge.table.n_rows()], vec![0; edge.table.n_cols()]]);
        }
        let costs: Vec<Vec<i64>> = reduced
            .nodes
            .iter()
            .map(|n| n.costs.iter().map(scaled).collect())
            .collect();
        Dual {
            reduced,
            shift,
            links,
            tables,
            priced: costs.clone(),
            costs,
            messages,
            prices: vec![0; reduced.limits.len()],
            budget: 0,
        }
    }

    /// The problem.
    pub fn reduced(&self) -> &'r Reduced {
        self.reduced
    }

    /// One pass over the nodes in order and one back. The messages towards lower indices are
    /// fresh afterwards.
    pub fn pass_messages(&mut self) {
        let n = self.links.len();
        let mut share = Vec::new();
        for v in 0..n {
            self.push(v, true, &mut share);
        }
        for v in (0..n).rev() {
            self.push(v, false, &mut share);
        }
    }

    /// Spreads what node `v` has above its minimum over its edges to later (earlier) nodes,
    /// and passes on what these then have in every column.
    fn push(&mut self, v: usize, forward: bool, share: &mut Vec<i64>) {
        let links = &self.links[v];
        let n_forward = links.iter().filter(|l| l.rows).count();
        let n_sharing = n_forward.max(links.len() - n_forward);
        if links.is_empty() {
            return;
        }
        self.gather(v, share);
        let least = share.iter().copied().min().unwrap_or(0);
        for x in share.iter_mut() {
            // A forbidden strategy has nothing to share: it stays forbidden at the node.
            let above = *x - least;
            *x = if *x >= INFINITE / 2 {
                0
            } else {
                above / n_sharing as i64
            };
        }
        for link in links.iter().filter(|l| l.rows == forward) {
            let [to_rows, to_cols] = &mut self.messages[link.edge as usize];
            let (mine, theirs) = if link.rows {
                (to_rows, to_cols)
            } else {
                (to_cols, to_rows)
            };
            for (m, s) in mine.iter_mut().zip(share.iter()) {
                *m -= s;
            }
            let table = &self.tables[link.edge as usize];
            if link.rows {
                column_minima(table, mine, theirs);
            } else {
                row_minima(table, mine, theirs);
            }
        }
    }

    /// The priced cost of each strategy of `v` with all messages to it.
    pub fn gather(&self, v: usize, sum: &mut Vec<i64>) {
        sum.clear();
        sum.extend_from_slice(&self.priced[v]);
        for link in &self.links[v] {
            let message = &self.messages[link.edge as usize][usize::from(!link.rows)];
            for (x, m) in sum.iter_mut().zip(message) {
                *x += m;
            }
        }
    }

    /// The bound in the problem's units, what is decided included; and the strategy that
    /// each node would take.
    pub fn bound(&self) -> (u64, Vec<u32>) {
        let (mut total, mut picks, mut sum) = (0i128, Vec::new(), Vec::new());
        for v in 0..self.links.len() {
            self.gather(v, &mut sum);
            let best = (0..sum.len()).min_by_key(|&s| (sum[s], s)).unwrap_or(0);
            total += i128::from(sum[best]);
            picks.push(best as u32);
        }
        total -= i128::try_from(self.budget).unwrap_or(i128::MAX / 2);
        // Integer costs: the bound rounds up.
        let units = (total.max(0) as u128).div_ceil(1 << self.shift);
        let bound = u64::try_from(units).unwrap_or(u64::MAX);
        (self.reduced.offset.saturating_add(bound), picks)
    }

    /// How far (scaled) a choice of at most `cost` may be above the bound.
    pub fn room(&self, cost: u64) -> i128 {
        let (mut total, mut sum) = (0i128, Vec::new());
        for v in 0..self.links.len() {
            self.gather(v, &mut sum);
            total += i128::from(sum.iter().copied().min().unwrap_or(0));
        }
        let budget = i128::try_from(self.budget).unwrap_or(i128::MAX / 2);
        let cost = i128::from(cost) - i128::from(self.reduced.offset);
        (cost << self.shift) - (total - budget)
    }

    /// Sets the price of each time, in cost units per byte.
    pub fn set_prices(&mut self, prices: &[f64]) {
        let unit = (1u64 << self.shift) as f64 * (1u64 << PRICE_BITS) as f64;
        // Casting saturates; no sensible price is near 2^62.
        self.prices = prices
            .iter()
            .map(|p| ((p * unit) as u64).min(1 << 62))
            .collect();
        let value = |(&p, &limit): (&u64, &u64)| u128::from(p).saturating_mul(u128::from(limit));
        let total = self.prices.iter().zip(&self.reduced.limits).map(value);
        let total = total.fold(0u128, u128::saturating_add);
        self.budget = total.div_ceil(1 << PRICE_BITS);
        let mut until = vec![0u128; self.prices.len() + 1];
        for (t, &p) in self.prices.iter().enumerate() {
            until[t + 1] = until[t] + u128::from(p);
        }
        for (v, node) in self.reduced.nodes.iter().enumerate() {
            let priced = &mut self.priced[v];
            priced.clone_from(&self.costs[v]);
            for term in &node.memory {
                let price = until[term.to as usize] - until[term.from as usize];
                for (x, &usage) in priced.iter_mut().zip(&term.usage) {
                    let cost = price.saturating_mul(u128::from(usage)) >> PRICE_BITS;
                    // Rounding down and capping only lower the bound.
                    *x = (*x + cost.min(1 << 56) as i64).min(INFINITE);
                }
            }
        }
    }

    /// Node costs with prices, without the extra bits, rounded down.
    pub fn priced_units(&self) -> Vec<Vec<Cost>> {
        let unit = |&x: &i64| {
            let cost = Cost::finite((x >> self.shift) as u64);
            if x >= INFINITE { Cost::FORBIDDEN } else { cost }
        };
        self.priced
            .iter()
            .map(|row| row.iter().map(unit).collect())
            .collect()
    }

    /// What the budgets are worth at these prices, without the extra bits, rounded up.
    pub fn budget_units(&self) -> u64 {
        u64::try_from(self.budget.div_ceil(1 << self.shift)).unwrap_or(u64::MAX)
    }

    /// The prices in cost units per byte.
    pub fn prices(&self) -> Vec<f64> {
        let unit = (1u64 << self.shift) as f64 * (1u64 << PRICE_BITS) as f64;
        self.prices.iter().map(|&p| p as f64 / unit).collect()
    }

    /// Raises the bound in up to `n_rounds` rounds; prices and messages are left where it was
    /// best. Every few rounds `visit` sees the state and says what the least cost may be: the
    /// bound is steered towards that.
    pub fn ascend(&mut self, n_rounds: usize, visit: &mut dyn FnMut(&Self) -> Option<f64>) -> u64 {
        let mut ascent = Ascent {
            best: (self.bound().0, self.prices()),
            step: FIRST_STEP,
            least_step: 0.05 * FIRST_STEP,
            n_failed: 0,
            active: Vec::new(),
            over: Vec::new(),
            stage_best: 0,
            n_stalled: 0,
        };
        let mut target = 0.0;
        for round in 0..n_rounds {
            self.pass_messages();
            self.pass_messages();
            if round % VISIT_EVERY == 0 {
                match visit(self) {
                    Some(aim) => target = aim,
                    None => break,
                }
            }
            if !ascent.round(self, target) {
                break;
            }
        }
        self.set_prices(&ascent.best.1);
        self.pass_messages();
        self.pass_messages();
        ascent.best.0.max(self.bound().0)
    }
}

/// The search for prices. Few times matter in the end, and in few dimensions subgradients
/// converge: prices are only given to `active` times, and the times with the highest peaks
/// are added when the steps have become small. (Prices on all 17,388 times of instance S
/// ended at a bound of 1.06e9, a few on peaks at 1.42e9, in the same time.)
struct Ascent {
    best: (u64, Vec<f64>),
    /// Fraction of the distance to the target that a step aims for.
    step: f64,
    /// Below this, times are added.
    least_step: f64,
    n_failed: usize,
    active: Vec<usize>,
    /// How far each time is over budget, averaged over rounds, in bytes.
    over: Vec<f64>,
    stage_best: u64,
    n_stalled: usize,
}

impl Ascent {
    /// One step. False when nothing more is to be expected.
    fn round(&mut self, dual: &mut Dual<'_>, target: f64) -> bool {
        let (bound, picks) = dual.bound();
        if bound > self.best.0 {
            self.best = (bound, dual.prices());
            self.step *= 1.1;
            self.n_failed = 0;
        } else {
            self.n_failed += 1;
        }
        self.average(dual, &picks);
        if bound as f64 >= target || self.over.is_empty() {
            return bound as f64 + 0.5 < target && self.n_failed < 20;
        }
        if self.active.is_empty() || self.step < self.least_step {
            return self.next_stage(dual);
        }
        if self.n_failed > PATIENCE {
            dual.set_prices(&self.best.1);
            self.step *= 0.6;
            self.n_failed = 0;
            return true;
        }
        let mut prices = dual.prices();
        let moving = |t: &&usize| prices[**t] > 0.0 || self.over[**t] > 0.0;
        let norm: f64 = self
            .active
            .iter()
            .filter(moving)
            .map(|&t| self.over[t] * self.over[t])
            .sum();
        if norm > 0.0 {
            let length = self.step * (target - bound as f64).max(1.0) / norm;
            for &t in &self.active {
                prices[t] = (prices[t] + length * self.over[t]).max(0.0);
            }
            dual.set_prices(&prices);
        }
        true
    }

    fn average(&mut self, dual: &Dual<'_>, picks: &[u32]) {
        let levels = dual.reduced.levels(picks);
        let over = levels
            .iter()
            .zip(&dual.reduced.limits)
            .map(|(&l, &m)| l as f64 - m as f64);
        if self.over.is_empty() {
            self.over = over.collect();
        } else {
            self.over
                .iter_mut()
                .zip(over)
                .for_each(|(mean, o)| *mean += 0.2 * (o - *mean));
        }
    }

    /// Adds the highest peaks that have no price yet and starts again with larger steps.
    fn next_stage(&mut self, dual: &mut Dual<'_>) -> bool {
        for _ in 0..TIMES_PER_STAGE {
            let over = &self.over;
            let is_peak = |t: usize| {
                over[t] > 0.0
                    && (t == 0 || over[t] >= over[t - 1])
                    && (t + 1 == over.len() || over[t] >= over[t + 1])
            };
            let new = (0..over.len()).filter(|&t| is_peak(t) && !self.active.contains(&t));
            let highest = new.max_by(|&s, &t| over[s].total_cmp(&over[t]).then(t.cmp(&s)));
            self.active.extend(highest);
        }
        let stalled = self.best.0 as f64 <= self.stage_best as f64 * (1.0 + 1e-5);
        self.n_stalled = if stalled { self.n_stalled + 1 } else { 0 };
        self.stage_best = self.best.0;
        dual.set_prices(&self.best.1);
        self.step = (5.0 * self.least_step).min(FIRST_STEP);
        self.least_step *= 0.8;
        self.n_failed = 0;
        self.n_stalled < MAX_STALLED
    }
}

/// How many bits costs can be shifted by without leaving the safe range.
fn extra_bits(reduced: &Reduced) -> u32 {
    let largest =
        |cells: &[Cost]| u128::from(cells.iter().filter_map(|c| c.value()).max().unwrap_or(0));
    let nodes: u128 = reduced.nodes.iter().map(|n| largest(&n.costs)).sum();
    let edges: u128 = reduced.edges.iter().map(|e| largest(e.table.cells())).sum();
    let total = (nodes + edges).max(1);
    (0..=16)
        .rev()
        .find(|bits| total << bits < MOST)
        .unwrap_or(0)
}

/// `to[j] = min_i (table[i, j] - from[i])`.
fn column_minima(table: &[i64], from: &[i64], to: &mut [i64]) {
    to.fill(i64::MAX);
    for (row, &f) in table.chunks_exact(to.len()).zip(from) {
        for (t, &cell) in to.iter_mut().zip(row) {
            *t = (*t).min(cell.wrapping_sub(f));
        }
    }
}

/// `to[i] = min_j (table[i, j] - from[j])`.
fn row_minima(table: &[i64], from: &[i64], to: &mut [i64]) {
    for (row, t) in table.chunks_exact(from.len()).zip(to) {
        let differences = row.iter().zip(from).map(|(&cell, &f)| cell.wrapping_sub(f));
        *t = differences.min().unwrap_or(0);
    }
}
