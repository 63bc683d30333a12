//! Prices and messages that raise the bound, in floating point, by smoothing.
//!
//! The bound is concave in prices and messages but has kinks: coordinate-wise steps stop
//! before its top. At a temperature T > 0 every minimum becomes
//! `softmin(x) = -T ln sum_i exp(-x_i / T)`, which makes it smooth and at most `T ln n` lower
//! per minimum. Message passing then cannot get stuck, and its derivative by the price of a
//! time is the *expected* level less the limit, expectations taken at each node with
//! `p(s) ~ exp(-cost(s) / (n_v T))`. Three things happen per round:
//!
//! * a pass over the nodes and one back (TRW-S with softmin);
//! * a Newton step of the prices, `max g d - d H d / 2` over `prices + d >= 0`, where H sums
//!   the nodes' covariances of usage: times with nearly the same live nodes are told apart,
//!   and a few prices suffice. Only times that have a price, and the highest peaks, take part;
//! * momentum: prices and messages go on in the direction of the last change, the longer the
//!   farther, and stop doing so when the bound falls (Nesterov's scheme with restarts).
//!
//! The temperature falls by stages. Nothing here is trusted: [`super::dual`] takes the
//! prices and messages over and computes the bound in integers.
//!
//! Invariants: messages and prices are finite; forbidden strategies and pairs hold
//! [`FORBIDDEN`] and never send anything.
//!
//! Sources: TRW-S, Kolmogorov 2006; smoothing it with falling temperature, Savchynskyy,
//! Schmidt, Kappes, Schnoerr 2012; restarts, O'Donoghue and Candes 2015.

use super::flat::{BARRED, EdgeLayout, FORBIDDEN, Layout};
use super::price_step::{Square, newton_step};
use super::reduced::Reduced;

/// The factor by which a price changes a node more than the node's own covariance says, because its
/// neighbours follow: at first, and at most.
const FOLLOWERS: f64 = 2.0;
const MOST_FOLLOWERS: f64 = 64.0;
/// The new times that may get a price in one round, and the times with a price that may move.
const MAX_NEW_TIMES: usize = 50;
const MAX_TIMES: usize = 400;
/// The temperature at the start, as a share of the mean cost of a node.
const FIRST_TEMPERATURE: f64 = 0.02;
/// A lower end of temperatures that keeps reciprocals finite; costs are integers.
const COLDEST: f64 = 1e-20;

/// Messages, prices and temperature, over a problem laid out for speed.
pub(super) struct Smooth<'r> {
    reduced: &'r Reduced,
    layout: Layout,
    state: State,
    /// The state after the previous round, before momentum was added.
    before: Option<State>,
    /// The rounds since momentum was last set back.
    n_moving: u32,
    last_value: f64,
    followers: f64,
    /// The temperature, in cost units.
    pub temperature: f64,
    /// The node costs with prices.
    priced: Vec<f32>,
    /// The probability of each strategy.
    likely: Vec<f32>,
    scratch: Scratch,
}

#[derive(Clone)]
struct State {
    /// The messages of all edges, see [`EdgeLayout::messages`].
    messages: Vec<f32>,
    /// The cost per [`Layout::unit`] bytes at each time.
    prices: Vec<f64>,
}

#[derive(Default)]
struct Scratch {
    sum: Vec<f32>,
    given: Vec<f32>,
    least: Vec<f32>,
    weight: Vec<f32>,
}

impl<'r> Smooth<'r> {
    /// Starts without prices, and with zero messages.
    pub fn new(reduced: &'r Reduced) -> Smooth<'r> {
        let layout = Layout::new(reduced);
        let n_messages: usize = layout.edges.iter().map(|e| e.sizes[0] + e.sizes[1]).sum();
        Smooth {
            reduced,
            state: State {
                messages: vec![0.0; n_messages],
                prices: vec![0.0; reduced.limits.len()],
            },
            before: None,
            n_moving: 0,
            last_value: f64::NEG_INFINITY,
            followers: FOLLOWERS,
            temperature: (FIRST_TEMPERATURE * layout.mean_cost()).max(COLDEST),
            priced: layout.costs.clone(),
            likely: vec![0.0; layout.costs.len()],
            layout,
            scratch: Scratch::default(),
        }
    }

    /// Returns the prices in cost units per byte.
    pub fn prices(&self) -> Vec<f64> {
        let prices = self.state.prices.iter();
        prices.map(|p| p / self.layout.unit).collect()
    }

    /// Sets the prices, in cost units per byte.
    pub fn set_prices(&mut self, prices: &[f64]) {
        let unit = self.layout.unit;
        self.state.prices = prices.iter().map(|p| p * unit).collect();
        self.stop_moving();
    }

    /// Returns the message of edge `e` to its second end.
    pub fn message_to_cols(&self, e: usize) -> &[f32] {
        let EdgeLayout {
            sizes, messages, ..
        } = self.layout.edges[e];
        &self.state.messages[messages[1]..][..sizes[1]]
    }

    /// Sets the messages that edge `e` gives to its first and second end.
    pub fn set_messages(&mut self, e: usize, given: [impl Iterator<Item = f32>; 2]) {
        let EdgeLayout { messages, .. } = self.layout.edges[e];
        for (first, given) in messages.into_iter().zip(given) {
            for (m, x) in self.state.messages[first..].iter_mut().zip(given) {
                *m = x;
            }
        }
    }

    /// Makes one round. Returns the smooth bound before the step of prices, without decided parts.
    pub fn round(&mut self) -> f64 {
        self.apply_prices();
        self.pass(true, self.temperature as f32);
        let value = self.pass(false, self.temperature as f32) - self.budget();
        self.move_prices();
        // Sums of 32-bit numbers are not more precise than this.
        let noise = 1e-8 * value.abs();
        if value < self.last_value - noise {
            if self.n_moving <= 2 {
                // Momentum was not the cause, so the price steps are too long.
                self.followers = (1.5 * self.followers).min(MOST_FOLLOWERS);
            }
            self.n_moving = 0;
        }
        self.last_value = value;
        value
    }

    /// Goes on in the direction of the last round's change.
    pub fn add_momentum(&mut self) {
        let now = self.state.clone();
        if let Some(before) = &self.before
            && self.n_moving > 0
        {
            let ahead = f64::from(self.n_moving) / (f64::from(self.n_moving) + 3.0);
            for (m, o) in self.state.messages.iter_mut().zip(&before.messages) {
                *m += ahead as f32 * (*m - o);
            }
            for (p, o) in self.state.prices.iter_mut().zip(&before.prices) {
                *p = (*p + ahead * (*p - o)).max(0.0);
            }
        }
        self.before = Some(now);
        self.n_moving += 1;
    }

    fn stop_moving(&mut self) {
        self.before = None;
        self.n_moving = 0;
        self.last_value = f64::NEG_INFINITY;
    }

    /// Lowers the temperature.
    pub fn cool(&mut self, factor: f64) {
        self.temperature = (factor * self.temperature).max(COLDEST);
        self.followers = (0.8 * self.followers).max(FOLLOWERS);
        // The function is another one now, and its last value says nothing.
        self.last_value = f64::NEG_INFINITY;
    }

    fn budget(&self) -> f64 {
        let prices = self.state.prices.iter().zip(&self.layout.limits);
        prices.map(|(p, l)| p * l).sum()
    }

    fn apply_prices(&mut self) {
        let mut until = vec![0.0; self.state.prices.len() + 1];
        for (t, p) in self.state.prices.iter().enumerate() {
            until[t + 1] = until[t] + p;
        }
        self.priced.copy_from_slice(&self.layout.costs);
        for (v, node) in self.reduced.nodes.iter().enumerate() {
            let costs = &mut self.priced[self.layout.strategies(v)];
            for (term, usage) in node.memory.iter().zip(&self.layout.usages[v]) {
                let price = (until[term.to as usize] - until[term.from as usize]) as f32;
                if price > 0.0 {
                    costs
                        .iter_mut()
                        .zip(usage)
                        .for_each(|(c, u)| *c += price * u);
                }
            }
        }
    }

    /// Passes over the nodes, in order or back; returns the smooth bound without the budget's
    /// value.
    fn pass(&mut self, forward: bool, temperature: f32) -> f64 {
        let n = self.layout.links.len();
        let mut total = 0.0;
        for i in 0..n {
            let v = if forward { i } else { n - 1 - i };
            total += self.share(v, temperature);
            self.send(v, forward, temperature);
        }
        total
    }

    /// Shares out the cost of `v` above its soft minimum among the chains through it, and returns
    /// the sum of these minima.
    fn share(&mut self, v: usize, temperature: f32) -> f64 {
        let sum = &mut self.scratch.sum;
        sum.clear();
        sum.extend_from_slice(&self.priced[self.layout.strategies(v)]);
        for link in &self.layout.links[v] {
            let edge = &self.layout.edges[link.edge as usize];
            let first = edge.messages[usize::from(!link.rows)];
            let message = &self.state.messages[first..][..sum.len()];
            sum.iter_mut().zip(message).for_each(|(x, m)| *x += m);
        }
        let least = sum.iter().copied().fold(f32::MAX, f32::min);
        let n_chains = self.layout.n_chains[v];
        let part = 1.0 / n_chains;
        for x in sum.iter_mut() {
            *x = if *x < BARRED {
                (*x - least) * part
            } else {
                FORBIDDEN
            };
        }
        let of = self.layout.first[v]..self.layout.first[v + 1];
        let below = temperature * probabilities(sum, temperature, &mut self.likely[of]).ln();
        sum.iter_mut().for_each(|x| *x += below);
        f64::from(least) - f64::from(n_chains * below)
    }

    /// Gives the shares of `v` to its edges to later (or earlier) nodes, and passes on the least
    /// that these edges then have in every column.
    fn send(&mut self, v: usize, forward: bool, temperature: f32) {
        let Scratch {
            sum,
            given,
            least,
            weight,
        } = &mut self.scratch;
        for link in self.layout.links[v].iter().filter(|l| l.rows == forward) {
            let edge = &self.layout.edges[link.edge as usize];
            let (mine, theirs) = if link.rows { (0, 1) } else { (1, 0) };
            let (n_rows, n_cols) = (edge.sizes[mine], edge.sizes[theirs]);
            let table = &self.layout.cells[edge.cells[mine]..][..n_rows * n_cols];
            let messages = &mut self.state.messages[edge.messages[mine]..][..n_rows];
            given.clear();
            for (m, x) in messages.iter_mut().zip(sum.iter()) {
                let allowed = *x < BARRED;
                *m = if allowed { *m - x } else { 0.0 };
                given.push(if allowed { -*m } else { FORBIDDEN });
            }
            column_minima(table, given, n_cols, least);
            soften(table, given, temperature, least, weight);
            let messages = &mut self.state.messages[edge.messages[theirs]..][..n_cols];
            for (m, x) in messages.iter_mut().zip(least.iter()) {
                *m = if *x < BARRED { *x } else { 0.0 };
            }
        }
    }

    /// Returns the amount by which the expected level is over the limit at each time.
    fn over(&self) -> Vec<f64> {
        let mut delta = vec![0.0; self.layout.limits.len() + 1];
        for (v, node) in self.reduced.nodes.iter().enumerate() {
            let likely = &self.likely[self.layout.strategies(v)];
            for (term, usage) in node.memory.iter().zip(&self.layout.usages[v]) {
                let mean = expected(usage, likely);
                delta[term.from as usize] += mean;
                delta[term.to as usize] -= mean;
            }
        }
        let mut level = 0.0;
        let limits = self.layout.limits.iter().zip(&delta);
        limits
            .map(|(limit, change)| {
                level += change;
                level - limit
            })
            .collect()
    }

    /// Makes the Newton step of the prices.
    fn move_prices(&mut self) {
        let over = self.over();
        let times = self.moving_times(&over);
        if times.is_empty() {
            return;
        }
        let gradient: Vec<f64> = times.iter().map(|&t| over[t]).collect();
        let prices: Vec<f64> = times.iter().map(|&t| self.state.prices[t]).collect();
        let curvature = self.curvature(&times);
        let change = newton_step(&curvature, &gradient, &prices);
        // A stage at this temperature changes the smooth bound by about this much per node. A step
        // that promises more leaves the region in which the curvature is valid.
        let gain: f64 = change.iter().zip(&gradient).map(|(d, g)| d * g).sum();
        let most = 2.0 * self.temperature * self.layout.links.len() as f64;
        let part = if gain > most { most / gain } else { 1.0 };
        for (&t, d) in times.iter().zip(&change) {
            let price = &mut self.state.prices[t];
            *price = (*price + part * d).max(0.0);
        }
    }

    /// Returns the times with a price, and the highest peaks over the limit without one, ascending.
    fn moving_times(&self, over: &[f64]) -> Vec<usize> {
        let prices = &self.state.prices;
        let is_peak = |t: &usize| {
            over[*t] > 0.0
                && (*t == 0 || over[*t] > over[*t - 1])
                && over.get(*t + 1).is_none_or(|next| over[*t] >= *next)
        };
        let new = (0..over.len()).filter(|&t| prices[t] <= 0.0);
        let mut new: Vec<usize> = new.filter(is_peak).collect();
        new.sort_by(|&s, &t| over[t].total_cmp(&over[s]).then(s.cmp(&t)));
        new.truncate(MAX_NEW_TIMES);
        let mut times: Vec<usize> = (0..over.len()).filter(|&t| prices[t] > 0.0).collect();
        times.sort_by(|&s, &t| over[t].abs().total_cmp(&over[s].abs()).then(s.cmp(&t)));
        times.truncate(MAX_TIMES);
        times.extend(new);
        times.sort_unstable();
        times
    }

    /// Returns the curvature of the smooth bound in the prices of `times`: covariances of usage.
    fn curvature(&self, times: &[usize]) -> Square {
        let place = |t: u32| times.partition_point(|&k| k < t as usize);
        // Rectangles are summed by adding at their corners and taking running sums in the end.
        let mut corners = Square::new(times.len() + 1);
        let mut ranges: Vec<(usize, usize, Vec<f32>)> = Vec::new();
        for (v, node) in self.reduced.nodes.iter().enumerate() {
            let likely = &self.likely[self.layout.strategies(v)];
            if node.memory.is_empty() || likely.iter().any(|&p| p > 0.9999) {
                continue;
            }
            ranges.clear();
            for (term, usage) in node.memory.iter().zip(&self.layout.usages[v]) {
                let (from, to) = (place(term.from), place(term.to));
                match ranges.last_mut() {
                    _ if from == to => {}
                    Some((f, t, sum)) if (*f, *t) == (from, to) => {
                        sum.iter_mut().zip(usage).for_each(|(s, u)| *s += u);
                    }
                    _ => ranges.push((from, to, usage.clone())),
                }
            }
            let part = self.followers / (f64::from(self.layout.n_chains[v]) * self.temperature);
            for (from_a, to_a, a) in &ranges {
                let mean = expected(a, likely) as f32;
                for (from_b, to_b, b) in &ranges {
                    let products = a.iter().zip(b).zip(likely);
                    let covariance: f32 = products.map(|((x, y), p)| (x - mean) * y * p).sum();
                    corners.add_rectangle([*from_a, *to_a], [*from_b, *to_b], {
                        f64::from(covariance) * part
                    });
                }
            }
        }
        corners.running_sums();
        corners
    }
}

fn expected(usage: &[f32], likely: &[f32]) -> f64 {
    let products = usage.iter().zip(likely);
    products.map(|(u, p)| f64::from(u * p)).sum()
}

/// Returns the probabilities of costs above the least one, and the sum by which they were divided.
fn probabilities(above: &[f32], temperature: f32, likely: &mut [f32]) -> f32 {
    let scale = std::f32::consts::LOG2_E / temperature;
    let mut sum = 0.0;
    for (p, x) in likely.iter_mut().zip(above) {
        *p = exp2(-x * scale);
        sum += *p;
    }
    likely.iter_mut().for_each(|p| *p /= sum);
    sum
}

/// Computes `to[j] = min_i (table[i, j] + given[i])`.
fn column_minima(table: &[f32], given: &[f32], n_cols: usize, to: &mut Vec<f32>) {
    to.clear();
    to.resize(n_cols, FORBIDDEN);
    for (row, &g) in table.chunks_exact(n_cols).zip(given) {
        if g < BARRED {
            for (t, &cell) in to.iter_mut().zip(row) {
                let x = cell + g;
                *t = if x < *t { x } else { *t };
            }
        }
    }
}

/// Turns the column minima `to` into soft minima.
fn soften(table: &[f32], given: &[f32], temperature: f32, to: &mut [f32], weight: &mut Vec<f32>) {
    let scale = std::f32::consts::LOG2_E / temperature;
    weight.clear();
    weight.resize(to.len(), 0.0);
    for (row, &g) in table.chunks_exact(to.len()).zip(given) {
        if g < BARRED {
            for ((w, &cell), &t) in weight.iter_mut().zip(row).zip(to.iter()) {
                *w += exp2((t - g - cell) * scale);
            }
        }
    }
    for (t, w) in to.iter_mut().zip(weight.iter()) {
        // At least one term is 1, except in columns without any allowed pair.
        if *w > 1.0 {
            *t -= temperature * w.ln();
        }
    }
}

/// Computes `2^y` for `y <= 0`, to four digits, without branches so that loops over it use vectors;
/// below 2^-120 it stays at that.
#[inline(always)]
fn exp2(y: f32) -> f32 {
    // Adding this leaves the nearest integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let y = if y < -120.0 { -120.0 } else { y };
    let shifted = y + ROUND;
    let rest = y - (shifted - ROUND);
    // The series of e^(rest ln 2).
    const C: f32 = std::f32::consts::LN_2;
    let x = rest * C;
    let power = 1.0 + x * (1.0 + x * (0.5 + x * (1.0 / 6.0 + x * (1.0 / 24.0))));
    f32::from_bits(power.to_bits().wrapping_add(shifted.to_bits() << 23))
}

#[cfg(test)]
mod tests {
    use super::exp2;

    #[test]
    fn powers_of_two_are_close() {
        for k in 0..12_000 {
            let y = -0.01 * k as f32;
            let exact = f64::from(y).exp2();
            assert!((f64::from(exp2(y)) / exact - 1.0).abs() < 1e-4, "2^{y}");
        }
        assert!(exp2(-1e9) < 1e-30);
    }
}
