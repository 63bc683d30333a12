//! A part of an attention whose keys and values go around a ring ([`ir::op::Keys`]): the queries of
//! a rank, and the shard of keys that it has by now.
//!
//! Both are cut into runs that follow each other by position, and each pair of runs of which some
//! query sees some key is a call of the kernel. What the calls give is summed up in f32.

use super::Call;
use super::attend::{Attend, Parts};
use crate::cpu::attention::{self, AttentionDims, Gradients, Upstream};
use ir::op::{Keys, Run};

impl Call<'_> {
    /// Writes `o` and `lse` of all keys up to these.
    pub(super) fn attend_part(&self, attend: Attend<'_>, keys: Keys, outs: &mut [&mut [f32]]) {
        let [o, lse] = outs else { return };
        match keys.continues() {
            true => {
                o.copy_from_slice(&self.x(3));
                lse.copy_from_slice(&self.x(4));
            }
            false => {
                o.fill(0.0);
                lse.fill(f32::NEG_INFINITY);
            }
        }
        let parts = Parts::new(self, attend);
        let threads = self.cx.threads;
        for pair in pairs(self, &parts, attend) {
            let (mut o_sum, mut lse_sum) =
                (parts.take(pair.queries, o), parts.take(pair.queries, lse));
            let (mut o_part, mut lse_part) = (vec![0.0; o_sum.len()], vec![0.0; lse_sum.len()]);
            pair.call(&parts, |a| {
                attention::forward(a, &mut o_part, &mut lse_part, threads);
            });
            let sum = (&mut o_sum[..], &mut lse_sum[..]);
            attention::merge(pair.dims.value_dim, sum, (&o_part, &lse_part));
            parts.put(pair.queries, &o_sum, o);
            parts.put(pair.queries, &lse_sum, lse);
        }
    }

    /// Writes the gradient of q summed up over all keys up to these, and the addends to the
    /// gradients of these keys and values.
    pub(super) fn attend_grad_part(&self, attend: Attend<'_>, keys: Keys, outs: &mut [&mut [f32]]) {
        let [dq, dk, dv] = outs else { return };
        // What the parts before have summed up comes last.
        let own = self.inputs.len() - usize::from(keys.continues());
        match keys.continues() {
            true => dq.copy_from_slice(&self.x(own)),
            false => dq.fill(0.0),
        }
        dk.fill(0.0);
        dv.fill(0.0);
        let parts = Parts::new(self, attend);
        let (o, lse, d_o) = (self.x(3), self.x(4), self.x(5));
        let d_lse = (own > 6).then(|| self.x(6));
        let threads = self.cx.threads;
        for pair in pairs(self, &parts, attend) {
            let [o, lse, d_o] = [&o, &lse, &d_o].map(|x| parts.take(pair.queries, x));
            let d_lse = d_lse.as_ref().map(|x| parts.take(pair.queries, x));
            let upstream = Upstream {
                o: &o,
                lse: &lse,
                d_o: &d_o,
                d_lse: d_lse.as_deref(),
            };
            let mut dq_part = vec![0.0; pair.dims.q_elements()];
            let mut dk_part = vec![0.0; pair.dims.k_elements()];
            let mut dv_part = vec![0.0; pair.dims.v_elements()];
            pair.call(&parts, |a| {
                let gradients = Gradients {
                    dq: &mut dq_part,
                    dk: &mut dk_part,
                    dv: &mut dv_part,
                };
                attention::backward(a, upstream, gradients, threads);
            });
            let mut dq_sum = parts.take(pair.queries, dq);
            add(&mut dq_sum, &dq_part);
            parts.put(pair.queries, &dq_sum, dq);
            for (out, part) in [(&mut *dk, &dk_part), (&mut *dv, &dv_part)] {
                let mut sum = pair.take_keys(&parts, out);
                add(&mut sum, part);
                pair.put_keys(&parts, &sum, out);
            }
        }
    }
}

fn add(sum: &mut [f32], addend: &[f32]) {
    sum.iter_mut().zip(addend).for_each(|(s, x)| *s += x);
}

/// A run of queries and a run of keys, both of this rank's.
struct Pair {
    queries: Run,
    keys: Run,
    /// First stored key of the shard, and how many rows of keys it has.
    first: u64,
    rows: usize,
    dims: AttentionDims,
}

/// The pairs of which the last query sees the first key.
fn pairs(call: &Call<'_>, parts: &Parts<'_>, attend: Attend<'_>) -> Vec<Pair> {
    let runs = |operand: usize| {
        let (range, len) = (call.local(operand).ranges[1], call.local(operand).lens[1]);
        attend.order.runs(range.start, range.valid, len)
    };
    let shard = call.local(1).ranges[1];
    let (queries, keys) = (runs(0), runs(1));
    let all = queries
        .iter()
        .flat_map(|q| keys.iter().map(move |k| (*q, *k)));
    let seen = all.filter(|(q, k)| q.count > 0 && k.count > 0 && k.position < q.position + q.count);
    let pair = |(queries, keys): (Run, Run)| Pair {
        queries,
        keys,
        first: shard.start,
        rows: shard.padded as usize,
        dims: AttentionDims {
            q_len: queries.count as usize,
            q_offset: queries.position as usize,
            k_len: keys.count as usize,
            k_offset: keys.position as usize,
            valid_k: keys.count as usize,
            ..parts.dims
        },
    };
    seen.map(pair).collect()
}

impl Pair {
    fn call(&self, parts: &Parts<'_>, f: impl FnOnce(&attention::Attention<'_>)) {
        let q = parts.take(self.queries, &parts.q);
        let [k, v] = [&parts.k, &parts.v].map(|x| self.take_keys(parts, x));
        parts.call_on(&q, (&k, &v), self.dims, f);
    }

    /// The rows of the run of keys of a tensor like these, sample after sample.
    fn take_keys(&self, parts: &Parts<'_>, x: &[f32]) -> Vec<f32> {
        let mut run = Vec::new();
        self.each_sample(parts, x.len(), |rows| run.extend_from_slice(&x[rows]));
        run
    }

    /// Writes the rows of the run to their places.
    fn put_keys(&self, parts: &Parts<'_>, mut run: &[f32], out: &mut [f32]) {
        self.each_sample(parts, out.len(), |rows| {
            let (now, rest) = run.split_at(rows.len());
            out[rows].copy_from_slice(now);
            run = rest;
        });
    }

    fn each_sample(
        &self,
        parts: &Parts<'_>,
        elements: usize,
        mut f: impl FnMut(std::ops::Range<usize>),
    ) {
        let width = elements / (parts.dims.batch * self.rows).max(1);
        let from = (self.keys.stored - self.first) as usize;
        for sample in 0..parts.dims.batch {
            let start = (sample * self.rows + from) * width;
            f(start..start + self.keys.count as usize * width);
        }
    }
}
