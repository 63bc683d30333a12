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
//! Methods: sequential tree-reweighted message passing, Kolmogorov 2006; prices by
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

/// An edge as its end sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    pub edge: u32,
    pub other: u32,
    /// This end is the table's rows (and the lower index).
    pub rows: bool,
}

/// Prices, messages and the bound they give.
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
        let costs: Vec<Vec<i64>> = reduced.nodes.iter().map(|n| n.costs.iter().map(scaled).collect()).collect();
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
            *x = if *x >= INFINITE / 2 { 0 } else { above / n_sharing as i64 };
        }
        for link in links.iter().filter(|l| l.rows == forward) {
            let [to_rows, to_cols] = &mut self.messages[link.edge as usize];
            let (mine, theirs) = if link.rows { (to_rows, to_cols) } else { (to_cols, to_rows) };
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
        self.prices = prices.iter().map(|p| ((p * unit) as u64).min(1 << 62)).collect();
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
        self.priced.iter().map(|row| row.iter().map(unit).collect()).collect()
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

    /// Raises the prices where the picks' memory is over budget, so far that closing
    /// `distance` (in cost units) would take it, and lets them decay where it is not.
    ///
    /// Steps that lower prices by a difference, as in the plain subgradient method, take
    /// forever to clear the many times that are not tight; decay by a factor does not.
    pub fn step_prices(&mut self, picks: &[u32], distance: f64, decay: f64) {
        let levels = self.reduced.levels(picks);
        let limits = &self.reduced.limits;
        let over: Vec<f64> = levels.iter().zip(limits).map(|(&l, &m)| l as f64 - m as f64).collect();
        let norm: f64 = over.iter().filter(|g| **g > 0.0).map(|g| g * g).sum();
        let mut prices = self.prices();
        for ((p, g), &limit) in prices.iter_mut().zip(&over).zip(limits) {
            if *g > 0.0 {
                *p += distance / norm * g;
            } else {
                *p *= (decay * g / (limit as f64).max(1.0)).max(-2.0).exp();
            }
        }
        self.set_prices(&prices);
    }

    /// Raises the bound towards `target`: one price for all times first, then one per time.
    /// Returns the best bound; prices and messages are left where it was found.
    pub fn ascend(&mut self, target: f64, n_rounds: usize, out_of_time: &dyn Fn() -> bool) -> u64 {
        let mut best = (self.uniform_price(target), self.prices());
        let (mut step, mut n_failed) = (0.1, 0);
        for _ in 0..n_rounds {
            if out_of_time() || best.0 as f64 >= target {
                break;
            }
            self.pass_messages();
            self.pass_messages();
            let (bound, picks) = self.bound();
            if bound > best.0 {
                best = (bound, self.prices());
                (step, n_failed) = (step * 1.1, 0);
            } else {
                n_failed += 1;
            }
            if n_failed > PATIENCE {
                self.set_prices(&best.1);
                (step, n_failed) = (step * 0.7, 0);
                if step < 1e-6 {
                    break;
                }
                continue;
            }
            let distance = step * (target - bound as f64).max(1.0);
            self.step_prices(&picks, distance, 20.0 * step.min(0.2));
        }
        self.set_prices(&best.1);
        self.pass_messages();
        self.pass_messages();
        best.0.max(self.bound().0)
    }

    pub fn ascend_lazy(&mut self, target: f64, n_rounds: usize, out_of_time: &dyn Fn() -> bool) -> u64 {
        let ev = |k: &str, x: f64| std::env::var(k).ok().and_then(|s| s.parse().ok()).unwrap_or(x);
        let n = self.prices.len();
        let mut best = (self.bound().0, self.prices());
        let s0 = ev("ALPHA", 0.1);
        let (mut step, mut n_failed) = (s0, 0usize);
        let mut active: Vec<usize> = Vec::new();
        let mut mean: Vec<f64> = Vec::new();
        let avg = ev("AVG", 0.2);
        let start = std::time::Instant::now();
        let mut stage_best = 0u64;
        let mut stall = 0;
        for it in 0..n_rounds {
            if out_of_time() { break; }
            for _ in 0..ev("PASSES", 2.0) as usize { self.pass_messages(); }
            let (bound, picks) = self.bound();
            if bound > best.0 { best = (bound, self.prices()); step *= ev("UP", 1.1); n_failed = 0; } else { n_failed += 1; }
            if it % (n_rounds / 10) == 0 { println!("   lazy it {it} {:.2}s bound {bound} best {} step {step:.6} active {} ", start.elapsed().as_secs_f64(), best.0, active.len()); }
            let levels = self.reduced.levels(&picks);
            let over: Vec<f64> = levels.iter().zip(&self.reduced.limits).map(|(&l, &m)| l as f64 - m as f64).collect();
            if mean.is_empty() { mean = over.clone(); } else { for (m, o) in mean.iter_mut().zip(&over) { *m += avg * (o - *m); } }
            if active.is_empty() || step < ev("SMIN", 0.1) * s0 {
                let mut k = 0;
                while k < ev("K", 2.0) as usize {
                    let mut add: Option<usize> = None;
                    for t in 0..n { if mean[t] > 0.0 && !active.contains(&t) && (t == 0 || mean[t] >= mean[t-1]) && (t + 1 == n || mean[t] >= mean[t+1]) && add.is_none_or(|a| mean[t] > mean[a]) { add = Some(t); } }
                    let Some(a) = add else { break };
                    active.push(a); k += 1;
                }
                if best.0 as f64 <= stage_best as f64 * (1.0 + ev("TOL", 1e-5)) { stall += 1; } else { stall = 0; }
                stage_best = best.0;
                if stall >= 3 { break; }
                step = s0 * ev("SDEC", 1.0).powi(active.len() as i32);
                self.set_prices(&best.1);
                n_failed = 0;
                if k == 0 { step *= 0.5; }
            }
            if n_failed > ev("PAT", 3.0) as usize { self.set_prices(&best.1); step *= ev("DOWN", 0.6); n_failed = 0; continue; }
            let mut prices = self.prices();
            let dir = if ev("USEMEAN", 1.0) > 0.0 { &mean } else { &over };
            let norm: f64 = active.iter().filter(|&&t| prices[t] > 0.0 || dir[t] > 0.0).map(|&t| dir[t] * dir[t]).sum();
            if norm > 0.0 {
                let d = step * (target - bound as f64).max(1.0) / norm;
                for &t in &active { prices[t] = (prices[t] + d * dir[t]).max(0.0); }
                self.set_prices(&prices);
            }
        }
        self.set_prices(&best.1);
        self.pass_messages();
        println!("   lazy best {} prices {} of {} {:.2}s", best.0, best.1.iter().filter(|p| **p > 0.0).count(), active.len(), start.elapsed().as_secs_f64());
        best.0
    }

    /// Sets the best price that is the same at all times; returns its bound.
    fn uniform_price(&mut self, target: f64) -> u64 {
        let n = self.prices.len();
        let mut best = (self.bound().0, vec![0.0; n]);
        let budget: f64 = self.reduced.limits.iter().map(|&l| l as f64).sum();
        if budget > 0.0 {
            for doubling in -10..10 {
                let price = target / budget * f64::from(doubling).exp2();
                self.set_prices(&vec![price; n]);
                (0..3).for_each(|_| self.pass_messages());
                let bound = self.bound().0;
                if bound > best.0 {
                    best = (bound, self.prices());
                } else if (bound as f64) < 0.9 * best.0 as f64 {
                    break;
                }
            }
        }
        self.set_prices(&best.1);
        (0..3).for_each(|_| self.pass_messages());
        best.0.max(self.bound().0)
    }
}

/// How many bits costs can be shifted by without leaving the safe range.
fn extra_bits(reduced: &Reduced) -> u32 {
    let largest = |cells: &[Cost]| u128::from(cells.iter().filter_map(|c| c.value()).max().unwrap_or(0));
    let nodes: u128 = reduced.nodes.iter().map(|n| largest(&n.costs)).sum();
    let edges: u128 = reduced.edges.iter().map(|e| largest(e.table.cells())).sum();
    let total = (nodes + edges).max(1);
    (0..=16).rev().find(|bits| total << bits < MOST).unwrap_or(0)
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
