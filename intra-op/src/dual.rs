//! A lower bound for any reduced problem: prices on memory, messages on costs.
//!
//! A price per time point turns memory into cost, and what is left is a sum of node and pair
//! costs; messages move cost between nodes and edges without changing any choice's total, so
//! that the sum of the nodes' minima rises towards the least total.
//!
//! [`Smooth`] finds prices and messages in floating point, stage by stage at falling
//! temperatures; after each stage they are taken over here, in integers.
//!
//! Invariants: the bound is rigorous. Costs, messages and prices are integers; costs carry
//! [`Dual::shift`] extra bits; priced usage is rounded down and the budget's value up; edges
//! keep non-negative costs after every message, so leaving them out only lowers the bound.
//! Messages towards lower indices are computed from those towards higher ones when messages
//! are taken over, so any floating-point numbers will do for those.
//!
//! Method: sequential tree-reweighted message passing, Kolmogorov 2006.

use std::collections::HashMap;
use std::sync::Arc;

use super::eliminate::with_widest_vectors;
use super::problem::Cost;
use super::reduced::Reduced;
use super::smooth::Smooth;
use super::warm::WarmStart;

/// Stands for a forbidden cost; well above what finite sums can reach.
pub(super) const INFINITE: i64 = 1 << 58;
/// Finite sums with their extra bits stay below this.
const MOST: u128 = 1 << 54;
/// Fractional bits of a price.
const PRICE_BITS: u32 = 32;
/// Messages from floating point are cut off at this size, so that sums of them stay in range.
const LONGEST: f64 = (1u64 << 52) as f64;
/// The rounds at one temperature, and the factor from one temperature to the next. (On instance N,
/// 50 rounds and 0.5, or 100 and 0.4, end at the same bound but take longer.)
const STAGE_ROUNDS: usize = 30;
const COOLING: f64 = 0.6;
/// The passes without smoothing after which the state is looked at.
const SETTLING: usize = 3;
/// The stages without a better bound before giving up; better means by one part in this many.
const MAX_STALLED: usize = 2;
const STALLED: i128 = 1_000_000;
/// The temperature at which a warm start begins, relative to a cold one.
const WARM: f64 = 0.001;
/// The stages after which a warm start should have become better than where it began.
const WARMING_UP: usize = 6;
/// The most passes in integers at the end.
const LAST_PASSES: usize = 50;

/// An edge as one of its ends sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    pub edge: u32,
    pub other: u32,
    /// True when this end is the table's rows (and has the lower index).
    pub rows: bool,
}

/// Prices, messages and the bound that they give.
#[derive(Clone)]
pub(super) struct Dual<'r> {
    reduced: &'r Reduced,
    /// Costs are multiplied by `2^shift`.
    pub shift: u32,
    pub links: Vec<Vec<Link>>,
    /// The scaled cells of each edge's table.
    pub tables: Vec<Arc<[i64]>>,
    /// The scaled node costs without prices.
    pub costs: Vec<Vec<i64>>,
    /// The scaled node costs with prices.
    pub priced: Vec<Vec<i64>>,
    /// The messages of each edge to its first (rows) and second end.
    pub messages: Vec<[Vec<i64>; 2]>,
    /// The scaled cost per byte at each time, with [`PRICE_BITS`] fractional bits.
    prices: Vec<u64>,
    /// The worth of the budgets at these prices, scaled and rounded up.
    budget: u128,
    /// The temperature at which the first ascent began, in cost units, if there was one.
    temperature: Option<f64>,
}

/// Prices, messages and the bound that they prove, kept to go back to.
struct Best {
    value: i128,
    prices: Vec<u64>,
    messages: Vec<[Vec<i64>; 2]>,
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
            temperature: None,
        }
    }

    /// Begins where an ascent on a larger version of the problem ended.
    pub fn warm(reduced: &'r Reduced, start: &WarmStart) -> Dual<'r> {
        let mut dual = Dual::new(reduced);
        dual.set_prices(&start.prices_for(reduced));
        dual.temperature = start.temperature;
        let unit = (1u64 << dual.shift) as f64;
        for (e, edge) in reduced.edges.iter().enumerate() {
            if let Some(message) = start.message_for(reduced, edge) {
                let [to_rows, to_cols] = &mut dual.messages[e];
                for (m, x) in to_cols.iter_mut().zip(message) {
                    *m = (x * unit).clamp(-LONGEST, LONGEST) as i64;
                }
                row_minima(&dual.tables[e], to_cols, to_rows);
            }
        }
        dual
    }

    /// Returns the state from which [`Self::warm`] goes on once this problem has been made smaller.
    pub fn warm_start(&self) -> WarmStart {
        WarmStart::new(self.reduced, self.prices(), self.temperature, |e| {
            let unit = (1u64 << self.shift) as f64;
            let to_cols = &self.messages[e][1];
            to_cols.iter().map(|&m| m as f64 / unit).collect()
        })
    }

    /// Whether sums of all costs stay in the range of messages.
    pub fn is_in_range(&self) -> bool {
        largest_sum(self.reduced) < MOST
    }

    /// Passes over the nodes in order and back. Then messages towards lower indices are up to date.
    pub fn pass_messages(&mut self) {
        with_widest_vectors(
            #[inline(always)]
            || {
                let n = self.links.len();
                let mut share = Vec::new();
                for v in 0..n {
                    self.push(v, true, &mut share);
                }
                for v in (0..n).rev() {
                    self.push(v, false, &mut share);
                }
            },
        )
    }

    /// Spreads the cost of node `v` above its minimum over its edges to later (or earlier) nodes,
    /// and passes on the least that these edges then have in every column.
    #[inline(always)]
    pub fn push(&mut self, v: usize, forward: bool, share: &mut Vec<i64>) {
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

    /// Returns the priced cost of each strategy of `v` with all messages to it.
    #[inline(always)]
    pub fn gather(&self, v: usize, sum: &mut Vec<i64>) {
        sum.clear();
        sum.extend_from_slice(&self.priced[v]);
        for link in &self.links[v] {
            let message = &self.messages[link.edge as usize][usize::from(!link.rows)];
            for (x, m) in sum.iter_mut().zip(message) {
                *x = (*x + m).min(INFINITE);
            }
        }
    }

    /// Returns the bound in the problem's units, decided parts included, and the strategy that each
    /// node would take.
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

    /// Returns how far above the bound (scaled) a choice of at most `cost` may be.
    pub fn room(&self, cost: u64) -> i128 {
        self.worth(cost) - self.value()
    }

    /// Returns the bound, scaled and without decided parts; it may be negative.
    fn value(&self) -> i128 {
        let (mut total, mut sum) = (0i128, Vec::new());
        for v in 0..self.links.len() {
            self.gather(v, &mut sum);
            total += i128::from(sum.iter().copied().min().unwrap_or(0));
        }
        total - i128::try_from(self.budget).unwrap_or(i128::MAX / 2)
    }

    /// Returns a cost, scaled and without decided parts.
    fn worth(&self, cost: u64) -> i128 {
        (i128::from(cost) - i128::from(self.reduced.offset)) << self.shift
    }

    /// Sets the price of each time, in cost units per byte.
    pub fn set_prices(&mut self, prices: &[f64]) {
        let unit = (1u64 << self.shift) as f64 * (1u64 << PRICE_BITS) as f64;
        // Casting saturates; no sensible price is near 2^62.
        let fixed = |p: &f64| ((p * unit) as u64).min(1 << 62);
        self.set_fixed_prices(prices.iter().map(fixed).collect());
    }

    fn set_fixed_prices(&mut self, prices: Vec<u64>) {
        self.prices = prices;
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

    /// Returns the node costs with prices, without the extra bits and rounded down.
    pub fn priced_units(&self) -> Vec<Vec<Cost>> {
        // Strategies are forbidden without prices: they are capped, and never forbid.
        let unit = |(&x, &unpriced): (&i64, &i64)| {
            let cost = Cost::finite((x >> self.shift) as u64);
            if unpriced >= INFINITE {
                Cost::FORBIDDEN
            } else {
                cost
            }
        };
        let rows = self.priced.iter().zip(&self.costs);
        rows.map(|(priced, costs)| priced.iter().zip(costs).map(unit).collect())
            .collect()
    }

    /// Returns the worth of the budgets at these prices, without the extra bits and rounded up.
    pub fn budget_units(&self) -> u64 {
        u64::try_from(self.budget.div_ceil(1 << self.shift)).unwrap_or(u64::MAX)
    }

    /// Returns the prices in cost units per byte.
    pub fn prices(&self) -> Vec<f64> {
        let unit = (1u64 << self.shift) as f64 * (1u64 << PRICE_BITS) as f64;
        self.prices.iter().map(|&p| p as f64 / unit).collect()
    }

    /// Raises the bound in up to `n_rounds` rounds of two passes and a step of prices; prices and
    /// messages are left where it was best. After every stage `visit` sees the state and returns
    /// the most that the least cost may be (a bound that high ends the ascent), or `None` to end
    /// it. `stop` is asked after every round.
    pub fn ascend(
        &mut self,
        n_rounds: usize,
        stop: &dyn Fn() -> bool,
        visit: &mut dyn FnMut(&Self) -> Option<f64>,
    ) -> u64 {
        let is_warm = self.temperature.is_some();
        let mut smooth = self.smooth();
        let mut best = self.best();
        let (mut until, mut last) = (STAGE_ROUNDS, i128::MIN);
        // The stages in a row that were no better; counted once there has been a better one.
        let (mut n_stages, mut n_stalled) = (0, None);
        for round in 1..=n_rounds {
            smooth.round();
            let stopped = stop();
            let stage_ends = round >= until || round == n_rounds || stopped;
            if stage_ends {
                self.take_over(&smooth);
            }
            smooth.add_momentum();
            if !stage_ends {
                continue;
            }
            let value = self.value();
            let better = value > best.value + best.value.abs() / STALLED;
            n_stalled = if better {
                Some(0)
            } else {
                n_stalled.map(|n| n + 1)
            };
            n_stages += 1;
            if is_warm && n_stages == WARMING_UP {
                n_stalled = n_stalled.or(Some(0));
            }
            let failed = value < last && value < best.value;
            if value > best.value {
                best = self.best();
            }
            if stopped || n_stalled == Some(MAX_STALLED) {
                break;
            }
            let aim = visit(self);
            if aim.is_none_or(|aim| self.bound().0 as f64 >= aim) {
                break;
            }
            if failed && n_stalled.is_some() {
                // Floating point is no longer precise enough, or steps were too long.
                self.go_back(&best);
                self.hand_over(&mut smooth);
            }
            // Far above the temperatures that matter, a stage may be short.
            let hot = value <= 0 || value.saturating_sub(last) > value / 10;
            until = round + if hot { STAGE_ROUNDS / 2 } else { STAGE_ROUNDS };
            last = value;
            smooth.cool(COOLING);
        }
        self.go_back(&best);
        for _ in 0..LAST_PASSES {
            if stop() {
                break;
            }
            let before = self.value();
            self.pass_messages();
            if self.value() - before <= before / STALLED {
                break;
            }
        }
        if self.value() < best.value {
            self.go_back(&best);
        }
        self.bound().0
    }

    fn smooth(&mut self) -> Smooth<'r> {
        let mut smooth = Smooth::new(self.reduced);
        match self.temperature {
            Some(first) => smooth.temperature = WARM * first,
            None => self.temperature = Some(smooth.temperature),
        }
        self.hand_over(&mut smooth);
        smooth
    }

    /// Gives the prices and messages to `smooth`.
    fn hand_over(&self, smooth: &mut Smooth<'_>) {
        smooth.set_prices(&self.prices());
        let unit = 1.0 / (1u64 << self.shift) as f64;
        for (e, messages) in self.messages.iter().enumerate() {
            let real = |x: &i64| (*x as f64).clamp(-LONGEST, LONGEST) * unit;
            let [a, b] = messages;
            let both = [a, b].map(|m| m.iter().map(|x| real(x) as f32));
            smooth.set_messages(e, both);
        }
    }

    /// Takes over the prices and messages of `smooth`, and makes some passes without smoothing.
    fn take_over(&mut self, smooth: &Smooth<'_>) {
        self.set_prices(&smooth.prices());
        let unit = (1u64 << self.shift) as f64;
        for (e, [to_rows, to_cols]) in self.messages.iter_mut().enumerate() {
            for (m, &x) in to_cols.iter_mut().zip(smooth.message_to_cols(e)) {
                *m = (f64::from(x) * unit).clamp(-LONGEST, LONGEST) as i64;
            }
            row_minima(&self.tables[e], to_cols, to_rows);
        }
        (0..SETTLING).for_each(|_| self.pass_messages());
    }

    fn best(&self) -> Best {
        Best {
            value: self.value(),
            prices: self.prices.clone(),
            messages: self.messages.clone(),
        }
    }

    fn go_back(&mut self, best: &Best) {
        self.set_fixed_prices(best.prices.clone());
        self.messages.clone_from(&best.messages);
    }
}

/// Returns the number of bits by which costs can be shifted without leaving the safe range.
fn extra_bits(reduced: &Reduced) -> u32 {
    let total = largest_sum(reduced).max(1);
    (0..=16)
        .rev()
        .find(|bits| total << bits < MOST)
        .unwrap_or(0)
}

/// Returns the largest cost of every node and edge together.
fn largest_sum(reduced: &Reduced) -> u128 {
    let largest =
        |cells: &[Cost]| u128::from(cells.iter().filter_map(|c| c.value()).max().unwrap_or(0));
    let nodes: u128 = reduced.nodes.iter().map(|n| largest(&n.costs)).sum();
    let edges: u128 = reduced.edges.iter().map(|e| largest(e.table.cells())).sum();
    nodes + edges
}

/// Computes `to[j] = min_i (table[i, j] - from[i])`.
#[inline(always)]
fn column_minima(table: &[i64], from: &[i64], to: &mut [i64]) {
    to.fill(i64::MAX);
    for (row, &f) in table.chunks_exact(to.len()).zip(from) {
        for (t, &cell) in to.iter_mut().zip(row) {
            *t = (*t).min(cell.wrapping_sub(f));
        }
    }
}

/// Computes `to[i] = min_j (table[i, j] - from[j])`.
#[inline(always)]
fn row_minima(table: &[i64], from: &[i64], to: &mut [i64]) {
    for (row, t) in table.chunks_exact(from.len()).zip(to) {
        let differences = row.iter().zip(from).map(|(&cell, &f)| cell.wrapping_sub(f));
        *t = differences.min().unwrap_or(0);
    }
}
