//! Attention on a rank's part of the queries: where they stand, which mask they draw, and the
//! pieces that a sequence stored in another order falls into.
//!
//! The kernel knows queries and keys by position. Queries that are stored by position are one
//! piece; in zigzag order a rank has an early and a late chunk, each a piece, and keys and
//! values are put in order before. Masks are named by position, so they are those of the
//! natural order.

use super::Call;
use crate::cpu::attention::{self, AttentionDims, Gradients, Upstream};
use crate::rng::{self, Key};
use ir::op::{Bounds, Run, SequenceOrder, alibi_slope};
use std::borrow::Cow;

/// The arguments of both passes.
#[derive(Clone, Copy)]
pub(super) struct Attend<'a> {
    /// Multiplies the scores.
    pub scale: f64,
    /// Dropout probability.
    pub dropout: f64,
    /// Path of the forward op.
    pub key: &'a str,
    /// How the sequence is stored.
    pub order: SequenceOrder,
    /// The bounds of scores.
    pub bounds: Bounds,
}

impl Call<'_> {
    /// Writes `o` and `lse`.
    pub(super) fn attend(&self, attend: Attend<'_>, outs: &mut [&mut [f32]]) {
        let [o, lse] = outs else { return };
        let threads = self.cx.threads;
        let parts = Parts::new(self, attend);
        let Some(pieces) = &parts.pieces else {
            return parts.call(&parts.q, parts.dims, |a| {
                attention::forward(a, o, lse, threads)
            });
        };
        o.fill(0.0);
        lse.fill(0.0);
        for run in pieces {
            let (q, dims) = parts.queries(*run);
            let (mut o_piece, mut lse_piece) =
                (vec![0.0; dims.o_elements()], vec![0.0; dims.lse_elements()]);
            parts.call(&q, dims, |a| {
                attention::forward(a, &mut o_piece, &mut lse_piece, threads);
            });
            parts.put(*run, &o_piece, o);
            parts.put(*run, &lse_piece, lse);
        }
    }

    /// Writes the gradients of q, k and v.
    pub(super) fn attend_grad(&self, attend: Attend<'_>, outs: &mut [&mut [f32]]) {
        let [dq, dk, dv] = outs else { return };
        let threads = self.cx.threads;
        let parts = Parts::new(self, attend);
        let (o, lse, d_o) = (self.x(3), self.x(4), self.x(5));
        let d_lse = (self.inputs.len() > 6).then(|| self.x(6));
        let Some(pieces) = &parts.pieces else {
            let upstream = Upstream {
                o: &o,
                lse: &lse,
                d_o: &d_o,
                d_lse: d_lse.as_deref(),
            };
            return parts.call(&parts.q, parts.dims, |a| {
                attention::backward(a, upstream, Gradients { dq, dk, dv }, threads);
            });
        };
        dq.fill(0.0);
        let (mut dk_sum, mut dv_sum) = (vec![0.0f32; dk.len()], vec![0.0f32; dv.len()]);
        for run in pieces {
            let (q, dims) = parts.queries(*run);
            let [o, lse, d_o] = [&o, &lse, &d_o].map(|x| parts.take(*run, x));
            let d_lse = d_lse.as_ref().map(|x| parts.take(*run, x));
            let upstream = Upstream {
                o: &o,
                lse: &lse,
                d_o: &d_o,
                d_lse: d_lse.as_deref(),
            };
            let mut dq_piece = vec![0.0; dims.q_elements()];
            let (mut dk_piece, mut dv_piece) = (vec![0.0; dk.len()], vec![0.0; dv.len()]);
            parts.call(&q, dims, |a| {
                let gradients = Gradients {
                    dq: &mut dq_piece,
                    dk: &mut dk_piece,
                    dv: &mut dv_piece,
                };
                attention::backward(a, upstream, gradients, threads);
            });
            parts.put(*run, &dq_piece, dq);
            for (sum, piece) in [(&mut dk_sum, &dk_piece), (&mut dv_sum, &dv_piece)] {
                sum.iter_mut().zip(piece).for_each(|(s, x)| *s += x);
            }
        }
        for (sum, out) in [(&dk_sum, dk), (&dv_sum, dv)] {
            parts.reordered(sum, out, |run| (run.position, run.stored));
        }
    }
}

/// Operands 0 to 2 of an attention, with keys and values by position.
pub(super) struct Parts<'a> {
    pub(super) q: Cow<'a, [f32]>,
    pub(super) k: Cow<'a, [f32]>,
    pub(super) v: Cow<'a, [f32]>,
    pub(super) dims: AttentionDims,
    attend: Attend<'a>,
    /// The pieces of the queries; none where they are one.
    pieces: Option<Vec<Run>>,
    /// All keys.
    keys: Vec<Run>,
    /// First stored query.
    first: u64,
    mask: Option<Mask>,
    /// The loss of scores with the distance, for each of this rank's heads.
    slopes: Option<Vec<f32>>,
}

impl<'a> Parts<'a> {
    pub(super) fn new(call: &'a Call<'_>, attend: Attend<'a>) -> Self {
        let (ql, kl) = (&call.local(0).ranges, &call.local(1).ranges);
        let (q_lens, n_keys) = (&call.local(0).lens, call.local(1).lens[1]);
        let grouped = ql.len() == 5;
        let order = attend.order;
        let is_natural = order.is_natural();
        let dims = AttentionDims {
            batch: ql[0].padded as usize,
            q_len: ql[1].padded as usize,
            k_len: kl[1].padded as usize,
            kv_heads: kl[2].padded as usize,
            groups: if grouped { ql[3].padded as usize } else { 1 },
            head_dim: call.width(0),
            value_dim: call.width(2),
            q_offset: ql[1].start as usize,
            k_offset: 0,
            valid_k: kl[1].valid as usize,
            window: attend.bounds.window.map(|w| w as usize),
            blocks: attend.bounds.blocks,
        };
        let mask = Mask {
            key: Key::new(call.cx.seed, call.cx.step, attend.key),
            p: attend.dropout,
            first: [
                call.cx.first_sample + ql[0].start,
                ql[2].start,
                if grouped { ql[3].start } else { 0 },
            ],
            lens: [
                q_lens[1],
                q_lens[2],
                if grouped { q_lens[3] } else { 1 },
                n_keys,
            ],
        };
        // By the head's place among all heads, of which a rank may have some.
        let slopes = attend.bounds.alibi.then(|| {
            let ([_, first_kv, first_group], [_, heads, groups, _]) = (mask.first, mask.lens);
            let (kvs, own) = (dims.kv_heads as u64, dims.groups as u64);
            let of_kv = |kv| (first_group..first_group + own).map(move |g| kv * groups + g);
            (first_kv..first_kv + kvs)
                .flat_map(of_kv)
                .map(|head| alibi_slope(head, heads * groups) as f32)
                .collect()
        });
        let mut parts = Parts {
            q: call.x(0),
            k: call.x(1),
            v: call.x(2),
            dims,
            attend,
            pieces: (!is_natural).then(|| order.runs(ql[1].start, ql[1].valid, q_lens[1])),
            keys: order.runs(0, n_keys, n_keys),
            first: ql[1].start,
            mask: (call.cx.training && attend.dropout > 0.0).then_some(mask),
            slopes,
        };
        if !is_natural && call.op.keys().are_all() {
            let by_position = |stored: &[f32]| {
                let mut out = vec![0.0; stored.len()];
                parts.reordered(stored, &mut out, |run| (run.stored, run.position));
                Cow::Owned(out)
            };
            (parts.k, parts.v) = (by_position(&parts.k), by_position(&parts.v));
        }
        parts
    }

    /// Calls `f` with the attention of some queries to all keys.
    fn call(&self, q: &[f32], dims: AttentionDims, f: impl FnOnce(&attention::Attention<'_>)) {
        self.call_on(q, (&self.k, &self.v), dims, f);
    }

    /// Calls `f` with the attention of some queries to some keys and values.
    pub(super) fn call_on(
        &self,
        q: &[f32],
        (k, v): (&[f32], &[f32]),
        dims: AttentionDims,
        f: impl FnOnce(&attention::Attention<'_>),
    ) {
        let dropout = |b: usize, kv: usize, g: usize, i: usize, j: usize| match &self.mask {
            Some(mask) => mask.of(
                [b, kv, g],
                (dims.q_offset + i) as u64,
                (dims.k_offset + j) as u64,
            ),
            None => 1.0,
        };
        f(&attention::Attention {
            q,
            k,
            v,
            dims,
            scale: self.attend.scale as f32,
            cap: self.attend.bounds.cap.map(|c| c as f32),
            slopes: self.slopes.as_deref(),
            dropout: self
                .mask
                .as_ref()
                .map(|_| &dropout as &attention::Dropout<'_>),
        });
    }

    /// The queries of one piece, and the extents of its attention.
    fn queries(&self, run: Run) -> (Vec<f32>, AttentionDims) {
        let dims = AttentionDims {
            q_len: run.count as usize,
            q_offset: run.position as usize,
            ..self.dims
        };
        (self.take(run, &self.q), dims)
    }

    /// The rows of one piece of a tensor like the queries.
    pub(super) fn take(&self, run: Run, x: &[f32]) -> Vec<f32> {
        let mut piece = Vec::new();
        self.each_sample(run, x.len(), |rows| piece.extend_from_slice(&x[rows]));
        piece
    }

    /// Writes the rows of one piece to their places; inverse of [`Parts::take`].
    pub(super) fn put(&self, run: Run, mut piece: &[f32], out: &mut [f32]) {
        self.each_sample(run, out.len(), |rows| {
            let (now, rest) = piece.split_at(rows.len());
            out[rows].copy_from_slice(now);
            piece = rest;
        });
    }

    /// Calls `f` with the elements of a piece in each sample of a tensor of `elements`.
    fn each_sample(&self, run: Run, elements: usize, mut f: impl FnMut(std::ops::Range<usize>)) {
        let rows = self.dims.batch * self.dims.q_len;
        let width = elements / rows.max(1);
        let from = (run.stored - self.first) as usize;
        for sample in 0..self.dims.batch {
            let start = (sample * self.dims.q_len + from) * width;
            f(start..start + run.count as usize * width);
        }
    }

    /// Copies every run of the keys from one place to the other, in every sample.
    fn reordered(&self, from: &[f32], to: &mut [f32], places: impl Fn(&Run) -> (u64, u64)) {
        let (batch, len) = (self.dims.batch, self.dims.k_len);
        let width = from.len() / (batch * len).max(1);
        for sample in 0..batch {
            for run in &self.keys {
                let (a, b) = places(run);
                let at = |row: u64| (sample * len + row as usize) * width;
                let n = run.count as usize * width;
                to[at(b)..at(b) + n].copy_from_slice(&from[at(a)..at(a) + n]);
            }
        }
    }
}

/// Dropout of probabilities. Its elements are named `[sample, position of the query, kv head,
/// group, position of the key]`.
struct Mask {
    key: Key,
    p: f64,
    /// First sample, kv head and group.
    first: [u64; 3],
    /// Queries, kv heads, groups and keys of the whole tensor.
    lens: [u64; 4],
}

impl Mask {
    /// 0, or what keeps the mean.
    fn of(&self, [b, kv, g]: [usize; 3], query: u64, key: u64) -> f32 {
        let [queries, heads, groups, keys] = self.lens;
        let row =
            ((self.first[0] + b as u64) * queries + query) * heads + self.first[1] + kv as u64;
        let element = (row * groups + self.first[2] + g as u64) * keys + key;
        match f64::from(rng::uniform(self.key, element)) < self.p {
            true => 0.0,
            false => (1.0 / (1.0 - self.p)) as f32,
        }
    }
}
