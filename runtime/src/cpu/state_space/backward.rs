//! The gradient of the scan; the formulas are in the header of the module above.

use super::{Operands, Piece, Scan, Steps, add, dot, each_group, scatter};

/// Gradients of the operands, each like its operand.
#[derive(Debug)]
pub struct Gradients<'a> {
    /// Gradient of the inputs.
    pub x: &'a mut [f32],
    /// Gradient of the time steps.
    pub dt: &'a mut [f32],
    /// Gradient of the directions of writing.
    pub b: &'a mut [f32],
    /// Gradient of the directions of reading.
    pub c: &'a mut [f32],
    /// Gradient of the logarithms of the decays.
    pub a_log: &'a mut [f32],
    /// Gradient of the shares that pass by.
    pub d: &'a mut [f32],
    /// Gradient of the biases of the time steps.
    pub dt_bias: &'a mut [f32],
}

/// Gradients of the scan for `dy` like `x`, up to `threads` threads sharing samples and groups.
///
/// # Panics
/// If the slices do not have the lengths of `s`.
pub fn backward(o: Operands<'_>, dy: &[f32], s: Scan, threads: usize, to: Gradients<'_>) {
    s.check(&o);
    s.check(&Operands {
        x: to.x,
        dt: to.dt,
        b: to.b,
        c: to.c,
        a_log: to.a_log,
        d: to.d,
        dt_bias: to.dt_bias,
    });
    assert_eq!(dy.len(), o.x.len(), "the gradient is like the result");
    let parts = each_group(s, threads, |piece| piece.backward(&o, dy));
    let mut sums = vec![[0.0; 3]; s.groups * s.heads];
    for (i, part) in parts.iter().enumerate() {
        scatter(&part.x, s, i, s.heads * s.width, to.x);
        scatter(&part.dt, s, i, s.heads, to.dt);
        scatter(&part.b, s, i, s.state, to.b);
        scatter(&part.c, s, i, s.state, to.c);
        let own = &mut sums[i % s.groups * s.heads..][..s.heads];
        for (sum, part) in own.iter_mut().zip(&part.own) {
            sum.iter_mut().zip(part).for_each(|(sum, v)| *sum += v);
        }
    }
    for (i, &[a_log, d, dt_bias]) in sums.iter().enumerate() {
        (to.a_log[i], to.d[i], to.dt_bias[i]) = (a_log as f32, d as f32, dt_bias as f32);
    }
}

/// Gradients of one piece: of tokens in order, and of each head's decay, share and bias.
struct Part {
    x: Vec<f32>,
    dt: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
    own: Vec<[f64; 3]>,
}

/// Sums of the heads of a group in a chunk.
struct Shared {
    /// Gradients of the scores.
    scores: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
}

/// A head in a chunk.
struct Head<'a> {
    head: usize,
    steps: &'a Steps,
    chunk: (usize, usize),
    /// The states before and behind the chunk.
    states: [&'a [f32]; 2],
}

impl Piece {
    /// The states before each chunk and behind the last, of all heads.
    fn states(&self, o: &Operands<'_>, steps: &[Steps]) -> Vec<Vec<f32>> {
        let size = self.s.state * self.s.width;
        let mut all = vec![vec![0.0; self.s.heads * size]];
        for chunk in self.s.chunks() {
            let mut next = all.last().cloned().unwrap_or_default();
            for (head, steps) in steps.iter().enumerate() {
                self.hand_on(o, chunk, (head, steps), &mut next[head * size..][..size]);
            }
            all.push(next);
        }
        all
    }

    fn backward(&self, o: &Operands<'_>, dy: &[f32]) -> Part {
        let (s, n) = (self.s, self.s.state);
        let size = n * s.width;
        let steps: Vec<Steps> = (0..s.heads).map(|head| self.steps(o, head)).collect();
        let states = self.states(o, &steps);
        let mut part = Part {
            x: vec![0.0; s.tokens * s.heads * s.width],
            dt: vec![0.0; s.tokens * s.heads],
            b: vec![0.0; s.tokens * n],
            c: vec![0.0; s.tokens * n],
            own: vec![[0.0; 3]; s.heads],
        };
        // The gradients of the states behind the chunk.
        let mut behind = vec![0.0; s.heads * size];
        for (i, chunk) in s.chunks().enumerate().rev() {
            let (first, count) = chunk;
            let scores = self.scores(o, chunk);
            let mut shared = Shared {
                scores: vec![0.0; count * count],
                b: vec![0.0; count * n],
                c: vec![0.0; count * n],
            };
            for (head, steps) in steps.iter().enumerate() {
                let at = head * size..(head + 1) * size;
                let head = Head {
                    head,
                    steps,
                    chunk,
                    states: [&states[i][at.clone()], &states[i + 1][at.clone()]],
                };
                let behind = &mut behind[at];
                self.head_backward(o, dy, &head, &scores, behind, &mut shared, &mut part);
            }
            for i in 0..count {
                for j in 0..=i {
                    let share = shared.scores[i * count + j];
                    add(
                        &mut shared.c[i * n..][..n],
                        share,
                        self.of(o.b, first + j, n),
                    );
                    add(
                        &mut shared.b[j * n..][..n],
                        share,
                        self.of(o.c, first + i, n),
                    );
                }
            }
            part.b[first * n..][..count * n].copy_from_slice(&shared.b);
            part.c[first * n..][..count * n].copy_from_slice(&shared.c);
        }
        part
    }

    /// Adds a head's gradients of a chunk; `behind` becomes the gradient of the state before it.
    #[expect(
        clippy::too_many_arguments,
        reason = "two inputs, a head's values, and three sums"
    )]
    fn head_backward(
        &self,
        o: &Operands<'_>,
        dy: &[f32],
        h: &Head<'_>,
        scores: &[f32],
        behind: &mut [f32],
        shared: &mut Shared,
        part: &mut Part,
    ) {
        let (s, (first, count)) = (self.s, h.chunk);
        let (n, p, steps) = (s.state, s.width, h.steps);
        let end = steps.sums[first + count - 1];
        let [before, after] = h.states;
        // Of the running sums; of inputs times time steps.
        let (mut of_sums, mut du) = (vec![0.0; count], vec![0.0; count * p]);
        for i in 0..count {
            let at = first + i;
            let dy = self.head(dy, at, h.head);
            for j in 0..=i {
                let from = first + j;
                let decay = (steps.sums[at] - steps.sums[from]).exp() as f32;
                let product = dot(dy, self.head(o.x, from, h.head)) * steps.time[from];
                let score = scores[i * count + j];
                shared.scores[i * count + j] += decay * product;
                add(&mut du[j * p..][..p], score * decay, dy);
                let both = f64::from(score * decay * product);
                of_sums[i] += both;
                of_sums[j] -= both;
            }
            // What the state before the chunk gives to this token.
            let decay = steps.sums[at].exp() as f32;
            let c = self.of(o.c, at, n);
            for (k, row) in before.chunks_exact(p).enumerate() {
                let read = decay * dot(row, dy);
                shared.c[i * n + k] += read;
                of_sums[i] += f64::from(c[k] * read);
            }
            // What this token gives to the state behind it.
            let decay = (end - steps.sums[at]).exp() as f32;
            let (b, x) = (self.of(o.b, at, n), self.head(o.x, at, h.head));
            for (k, row) in behind.chunks_exact(p).enumerate() {
                let written = decay * dot(row, x) * steps.time[at];
                shared.b[i * n + k] += written;
                of_sums[i] -= f64::from(b[k] * written);
                add(&mut du[i * p..][..p], decay * b[k], row);
            }
        }
        let mut rest = super::super::summation::dot(behind, after);
        let (share, own) = (self.own(o.d, h.head), &mut part.own[h.head]);
        for i in (0..count).rev() {
            let at = first + i;
            rest += of_sums[i];
            let (x, dy) = (self.head(o.x, at, h.head), self.head(dy, at, h.head));
            let du = &du[i * p..][..p];
            let time = f64::from(steps.time[at]);
            let of_time = steps.decay * rest + f64::from(dot(du, x));
            own[0] += steps.decay * time * rest;
            own[1] += f64::from(dot(x, dy));
            let raw = f64::from(steps.raw[at]);
            let slope = match super::softplus(raw) < s.dt_min {
                true => 0.0,
                false => 1.0 / (1.0 + (-raw).exp()),
            };
            own[2] += of_time * slope;
            part.dt[at * s.heads + h.head] = (of_time * slope) as f32;
            let dx = &mut part.x[(at * s.heads + h.head) * p..][..p];
            add(dx, steps.time[at], du);
            add(dx, share, dy);
        }
        behind.iter_mut().for_each(|v| *v *= end.exp() as f32);
        for i in 0..count {
            let at = first + i;
            let decay = steps.sums[at].exp() as f32;
            let dy = self.head(dy, at, h.head);
            for (row, &c) in behind.chunks_exact_mut(p).zip(self.of(o.c, at, n)) {
                add(row, decay * c, dy);
            }
        }
    }
}
