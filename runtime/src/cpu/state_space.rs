//! The scan of a state space (Mamba-2, Dao & Gu 2024), chunk by chunk, with its gradient.
//!
//! With `t` a token's time step, `L` the running sum of `a t` within a chunk (`a = -exp(a_log)`), `S` the
//! state before the chunk (`N x P`) and sums over the tokens `j <= i` of the chunk, a head's result is
//!
//! ```text
//!   y_i = sum e^(L_i - L_j) (c_i . b_j) t_j x_j  +  e^(L_i) S^T c_i  +  d x_i
//!   S'  = e^(L_end) S + sum over the chunk of e^(L_end - L_j) t_j b_j x_j^T
//! ```
//!
//! The gradient makes the states before all chunks again, then goes back from the last chunk with the
//! gradient `G` of the state behind it. `L_i` enters as a reader (with `y_i`) and as a writer (with
//! `x_i`), so its gradient is the difference of two products that are there anyway, plus `G . S'` at the
//! chunk's end; that of `a t` is the sum of those from `i` on.
//!
//! Heads of a group in a sample are one piece of work; every head's state is f32, as its sums within a
//! chunk. Sums over chunks and samples are taken in `f64`.

mod backward;
#[cfg(test)]
mod tests;

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

pub use backward::{Gradients, backward};

/// The lengths of a scan, and what it does to time steps.
#[derive(Clone, Copy, Debug)]
pub struct Scan {
    /// Samples.
    pub samples: usize,
    /// Tokens of a sample.
    pub tokens: usize,
    /// Groups of heads, each with a `b` and a `c` of its own.
    pub groups: usize,
    /// Heads of a group.
    pub heads: usize,
    /// Elements of a head.
    pub width: usize,
    /// Rows of a head's state.
    pub state: usize,
    /// Tokens of a chunk.
    pub chunk: usize,
    /// The least time step.
    pub dt_min: f64,
}

/// Operands: `x[B,S,G,R,P], dt[B,S,G,R], b[B,S,G,N], c[B,S,G,N], a_log[G,R], d[G,R], dt_bias[G,R]`.
#[derive(Clone, Copy, Debug)]
pub struct Operands<'a> {
    /// Inputs of the heads.
    pub x: &'a [f32],
    /// Time steps before their bias and softplus.
    pub dt: &'a [f32],
    /// Directions in which inputs are written to states.
    pub b: &'a [f32],
    /// Directions in which states are read.
    pub c: &'a [f32],
    /// Logarithms of the decays.
    pub a_log: &'a [f32],
    /// Shares of the inputs that pass by.
    pub d: &'a [f32],
    /// Biases of the time steps.
    pub dt_bias: &'a [f32],
}

impl Scan {
    fn rows(&self) -> usize {
        self.samples * self.tokens
    }
    fn check(&self, o: &Operands<'_>) {
        let heads = self.groups * self.heads;
        let (rows, shared) = (self.rows(), self.rows() * self.groups * self.state);
        assert_eq!(o.x.len(), rows * heads * self.width, "inputs of {self:?}");
        assert_eq!(o.dt.len(), rows * heads, "time steps of {self:?}");
        assert_eq!([o.b.len(), o.c.len()], [shared; 2], "b and c of {self:?}");
        let own = [o.a_log.len(), o.d.len(), o.dt_bias.len()];
        assert_eq!(own, [heads; 3], "parameters of {self:?}");
        assert!(self.chunk > 0, "a chunk has tokens");
    }
    /// The chunks of a sample: first token and number of tokens.
    fn chunks(
        &self,
    ) -> impl DoubleEndedIterator<Item = (usize, usize)> + ExactSizeIterator + use<> {
        let Scan { tokens, chunk, .. } = *self;
        let n = tokens.div_ceil(chunk);
        (0..n).map(move |i| (i * chunk, chunk.min(tokens - i * chunk)))
    }
}

/// The scan: `y` like `x`, up to `threads` threads sharing samples and groups.
///
/// # Panics
/// If the slices do not have the lengths of `s`.
pub fn forward(o: Operands<'_>, s: Scan, threads: usize, y: &mut [f32]) {
    s.check(&o);
    assert_eq!(y.len(), o.x.len(), "the result is like the inputs");
    let parts = each_group(s, threads, |piece| piece.forward(&o));
    for (i, part) in parts.iter().enumerate() {
        scatter(part, s, i, s.heads * s.width, y);
    }
}

/// Calls `work` for each sample and group, on up to `threads` threads; results in order.
fn each_group<T: Send>(s: Scan, threads: usize, work: impl Fn(Piece) -> T + Sync) -> Vec<T> {
    let total = s.samples * s.groups;
    let piece = |i| Piece {
        s,
        sample: i / s.groups,
        group: i % s.groups,
    };
    if threads.min(total) <= 1 {
        return (0..total).map(|i| work(piece(i))).collect();
    }
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let worker = || loop {
        let i = next.fetch_add(1, Ordering::Relaxed);
        if i >= total {
            return;
        }
        let result = work(piece(i));
        let mut done = done.lock().unwrap_or_else(|e| e.into_inner());
        done.push((i, result));
    };
    std::thread::scope(|scope| {
        for _ in 0..threads.min(total) {
            scope.spawn(worker);
        }
    });
    let mut done = done.into_inner().unwrap_or_else(|e| e.into_inner());
    done.sort_by_key(|(i, _)| *i);
    done.into_iter().map(|(_, result)| result).collect()
}

/// Puts what piece `i` has for its tokens, `width` numbers each, to their places.
fn scatter(part: &[f32], s: Scan, i: usize, width: usize, all: &mut [f32]) {
    let (sample, group) = (i / s.groups, i % s.groups);
    for (t, part) in part.chunks_exact(width.max(1)).enumerate() {
        let row = (sample * s.tokens + t) * s.groups + group;
        all[row * width..][..width].copy_from_slice(part);
    }
}

/// The heads of a group in a sample.
#[derive(Clone, Copy)]
struct Piece {
    s: Scan,
    sample: usize,
    group: usize,
}

/// A head's time steps: before softplus, after it, and their sums times the decay within each chunk.
struct Steps {
    raw: Vec<f32>,
    time: Vec<f32>,
    sums: Vec<f64>,
    decay: f64,
}

impl Piece {
    /// Numbers of a token in this group, `width` of them, out of `[B, S, G, width]`.
    fn of<'a>(&self, all: &'a [f32], token: usize, width: usize) -> &'a [f32] {
        let row = (self.sample * self.s.tokens + token) * self.s.groups + self.group;
        &all[row * width..][..width]
    }
    fn head<'a>(&self, all: &'a [f32], token: usize, head: usize) -> &'a [f32] {
        let p = self.s.width;
        &self.of(all, token, self.s.heads * p)[head * p..][..p]
    }
    /// One of a head's own numbers, out of `[G, R]`.
    fn own(&self, all: &[f32], head: usize) -> f32 {
        all[self.group * self.s.heads + head]
    }

    fn steps(&self, o: &Operands<'_>, head: usize) -> Steps {
        let s = self.s;
        let (bias, decay) = (
            self.own(o.dt_bias, head),
            -f64::from(self.own(o.a_log, head)).exp(),
        );
        let raw: Vec<f32> = (0..s.tokens)
            .map(|t| self.of(o.dt, t, s.heads)[head] + bias)
            .collect();
        let time: Vec<f32> = raw
            .iter()
            .map(|&raw| softplus(f64::from(raw)).max(s.dt_min) as f32)
            .collect();
        let mut sums = Vec::with_capacity(s.tokens);
        let mut sum = 0.0;
        for (t, &time) in time.iter().enumerate() {
            if t % s.chunk == 0 {
                sum = 0.0;
            }
            sum += decay * f64::from(time);
            sums.push(sum);
        }
        Steps {
            raw,
            time,
            sums,
            decay,
        }
    }

    /// The scores `c_i . b_j` of a chunk for `j <= i`, the others zero.
    fn scores(&self, o: &Operands<'_>, (first, count): (usize, usize)) -> Vec<f32> {
        let n = self.s.state;
        let mut scores = vec![0.0; count * count];
        for i in 0..count {
            let c = self.of(o.c, first + i, n);
            for j in 0..=i {
                scores[i * count + j] = dot(c, self.of(o.b, first + j, n));
            }
        }
        scores
    }

    /// The state behind a chunk in place of the one before.
    fn hand_on(
        &self,
        o: &Operands<'_>,
        (first, count): (usize, usize),
        (head, steps): (usize, &Steps),
        state: &mut [f32],
    ) {
        let (n, p, end) = (self.s.state, self.s.width, first + count - 1);
        let kept = steps.sums[end].exp() as f32;
        state.iter_mut().for_each(|v| *v *= kept);
        for j in first..=end {
            let share = (steps.sums[end] - steps.sums[j]).exp() as f32 * steps.time[j];
            let (b, x) = (self.of(o.b, j, n), self.head(o.x, j, head));
            for (row, &b) in state.chunks_exact_mut(p).zip(b) {
                add(row, share * b, x);
            }
        }
    }

    /// `y` of the group's heads: `[S, R, P]`.
    fn forward(&self, o: &Operands<'_>) -> Vec<f32> {
        let (s, heads, p) = (self.s, self.s.heads, self.s.width);
        let mut y = vec![0.0; s.tokens * heads * p];
        let steps: Vec<Steps> = (0..heads).map(|head| self.steps(o, head)).collect();
        let mut states = vec![0.0; heads * s.state * p];
        for chunk in s.chunks() {
            let scores = self.scores(o, chunk);
            let (first, count) = chunk;
            for (head, steps) in steps.iter().enumerate() {
                let state = &mut states[head * s.state * p..][..s.state * p];
                for i in 0..count {
                    let at = first + i;
                    let y = &mut y[(at * heads + head) * p..][..p];
                    add(y, self.own(o.d, head), self.head(o.x, at, head));
                    let decay = steps.sums[at].exp() as f32;
                    for (row, &c) in state.chunks_exact(p).zip(self.of(o.c, at, s.state)) {
                        add(y, decay * c, row);
                    }
                    for j in 0..=i {
                        let from = first + j;
                        let decay = (steps.sums[at] - steps.sums[from]).exp() as f32;
                        let share = scores[i * count + j] * decay * steps.time[from];
                        add(y, share, self.head(o.x, from, head));
                    }
                }
                self.hand_on(o, chunk, (head, steps), state);
            }
        }
        y
    }
}

fn softplus(x: f64) -> f64 {
    match x > 30.0 {
        true => x,
        false => x.exp().ln_1p(),
    }
}

fn add(to: &mut [f32], by: f32, from: &[f32]) {
    to.iter_mut().zip(from).for_each(|(to, &v)| *to += by * v);
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    super::summation::dot(a, b) as f32
}
