//! Causal attention with grouped queries, computed in blocks of query rows.
//!
//! ```text
//!   q [B, S, K, G, D]   query row i is at global position q_offset + i
//!   k [B, T, K, D]      key j is at position k_offset + j; v [B, T, K, V] likewise
//!   s_ij = scale * <q_i, k_j>                 for k_offset + j <= q_offset + i and j < valid_k,
//!                                             q_offset + i - (k_offset + j) < window,
//!                                             and where blocks are seen, in one of them
//!   s_ij = cap * tanh(s_ij / cap)             where there is a cap
//!   s_ij = s_ij - slope * (q_offset + i - (k_offset + j))   where heads have slopes (ALiBi)
//!   lse_i = ln sum_j exp(s_ij)                -inf when no key is visible
//!   o_i = sum_j drop_ij exp(s_ij - lse_i) v_j       0 when no key is visible
//! ```
//!
//! Only the scores of [`BLOCK`] rows of one head exist at a time, up to the last key the block
//! sees, and where there is a window or a pattern of blocks, those with tiles of [`TILE`] keys of
//! which some row sees one: the others are not computed. The backward pass recomputes the
//! probabilities from `lse`, as in FlashAttention (Dao et al. 2022); with `delta_i = <do_i, o_i> -
//! dlse_i`, as `p_ij` is the derivative of `lse_i` by `s_ij`,
//!
//! ```text
//!   p_ij = exp(s_ij - lse_i)          ds_ij = p_ij * (drop_ij * <do_i, v_j> - delta_i)
//!   (ds_ij times 1 - tanh^2 where there is a cap)
//!   dq_i = scale * sum_j ds_ij k_j    dk_j = scale * sum_gi ds_ij q_i
//!                                     dv_j = sum_gi drop_ij p_ij do_i
//! ```
//!
//! A row's maximum and sum run over its own visible keys and the products sum keys from 0 on, with
//! exact zeros after the last visible one, so `o`, `lse` and `dq` of a row depend neither on the
//! block that it is in nor on how S is split. With tiles each tile is a sum of its own, and the
//! sums are added in order, so that one that is left out was a zero. `dk` and `dv` are summed over
//! groups and rows: splits of B and K leave their bits alone, splits of S and G make partial sums
//! of them. Keys and values must be finite up to the last key a block sees, as zero times infinity
//! is no zero.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::gemm::{Store, View, gemm};
use super::special::exp_f32;
use super::summation::{dot, sum};
use super::wide::widest;
use ir::op::{Blocks, Bounds};
use std::ops::Range;

/// Query rows in a block: one row block of the product kernels.
pub const BLOCK: usize = 64;

/// Keys of a tile, which is computed whole or not at all: few, so that blocks of 64 tokens, which
/// are common, are computed exactly.
const TILE: usize = 64;

/// Extents of an attention, and where its queries stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionDims {
    /// Sequences, B.
    pub batch: usize,
    /// Query rows per sequence, S.
    pub q_len: usize,
    /// Key rows per sequence, T.
    pub k_len: usize,
    /// Key-value heads, K.
    pub kv_heads: usize,
    /// Query heads per key-value head, G.
    pub groups: usize,
    /// Elements per head of queries and keys, D.
    pub head_dim: usize,
    /// Elements per head of values and results, V.
    pub value_dim: usize,
    /// Global position of query row 0.
    pub q_offset: usize,
    /// Global position of key 0.
    pub k_offset: usize,
    /// Keys from here on are ignored; at most `k_len`.
    pub valid_k: usize,
    /// The positions that a query looks back over, its own among them; none where it is all.
    pub window: Option<usize>,
    /// The blocks of positions that a query sees; all where there are none.
    pub blocks: Option<Blocks>,
}

impl AttentionDims {
    /// Elements of a tensor `[B, S, K, G, D]`.
    pub fn q_elements(&self) -> usize {
        self.lse_elements() * self.head_dim
    }

    /// Elements of a tensor `[B, T, K, D]`.
    pub fn k_elements(&self) -> usize {
        self.batch * self.k_len * self.kv_heads * self.head_dim
    }

    /// Elements of the result, `[B, S, K, G, V]`.
    pub fn o_elements(&self) -> usize {
        self.lse_elements() * self.value_dim
    }

    /// Elements of the values, `[B, T, K, V]`.
    pub fn v_elements(&self) -> usize {
        self.batch * self.k_len * self.kv_heads * self.value_dim
    }

    /// Elements of a tensor `[B, S, K, G]`.
    pub fn lse_elements(&self) -> usize {
        self.batch * self.q_len * self.kv_heads * self.groups
    }

    /// The key behind the last that query row `i` sees.
    fn end(&self, i: usize) -> usize {
        let before = self.q_offset.saturating_add(i + 1);
        before.saturating_sub(self.k_offset).min(self.valid_k)
    }

    /// The positions from key `j` to query row `i`, which sees it.
    fn distance(&self, i: usize, j: usize) -> f32 {
        ((self.q_offset + i).saturating_sub(self.k_offset + j)) as f32
    }

    /// The runs of keys that some of these query rows see, in order.
    fn visible(&self, rows: Range<usize>) -> Vec<Range<usize>> {
        if rows.is_empty() {
            return Vec::new();
        }
        let Some(bounds) = self.bounds() else {
            let all = 0..self.end(rows.end - 1);
            return Vec::from_iter((!all.is_empty()).then_some(all));
        };
        let at = |offset: usize, i: usize| offset.saturating_add(i) as u64;
        let queries = at(self.q_offset, rows.start)..at(self.q_offset, rows.end);
        let keys = at(self.k_offset, 0)..at(self.k_offset, self.valid_k);
        let by_key = |position: u64| position as usize - self.k_offset;
        let runs = bounds.seen(queries, keys).into_iter();
        runs.map(|run| by_key(run.start)..by_key(run.end)).collect()
    }

    /// The bounds on which keys are seen, where there are any.
    fn bounds(&self) -> Option<Bounds> {
        (self.window.is_some() || self.blocks.is_some()).then(|| Bounds {
            window: self.window.map(|w| w as u64),
            blocks: self.blocks,
            ..Bounds::default()
        })
    }

    /// The runs of keys whose products some of these query rows need, in order and apart from each
    /// other: whole tiles, where not all keys up to the last are seen.
    fn computed(&self, rows: Range<usize>) -> Vec<Range<usize>> {
        let end = self.end(rows.end.max(1) - 1);
        let seen = self.visible(rows);
        if self.bounds().is_none() {
            return seen;
        }
        let mut runs: Vec<Range<usize>> = Vec::new();
        for run in seen {
            let start = run.start / TILE * TILE;
            let stop = run.end.next_multiple_of(TILE).min(end);
            match runs.last_mut() {
                Some(last) if start <= last.end => last.end = stop,
                _ => runs.push(start..stop),
            }
        }
        runs
    }
}

/// Dropout on probabilities: for (b, k, g, i, j), indices within the call, 0 or 1 / (1 - p).
pub type Dropout<'a> = dyn Fn(usize, usize, usize, usize, usize) -> f32 + Sync + 'a;

/// The inputs of both passes.
#[derive(Clone, Copy)]
pub struct Attention<'a> {
    /// Queries `[B, S, K, G, D]`.
    pub q: &'a [f32],
    /// Keys `[B, T, K, D]`.
    pub k: &'a [f32],
    /// Values `[B, T, K, V]`.
    pub v: &'a [f32],
    /// The extents.
    pub dims: AttentionDims,
    /// Factor of the scores, usually `1 / sqrt(D)`.
    pub scale: f32,
    /// The bound that scores stay below, where there is such a bound.
    pub cap: Option<f32>,
    /// The loss of a score for each position between key and query, by head, `[K, G]`, where heads
    /// have slopes.
    pub slopes: Option<&'a [f32]>,
    /// Factor of each probability; the same in both passes.
    pub dropout: Option<&'a Dropout<'a>>,
}

/// The results of the forward pass and the gradient that came in.
#[derive(Clone, Copy)]
pub struct Upstream<'a> {
    /// Output of [`forward`], `[B, S, K, G, V]`.
    pub o: &'a [f32],
    /// Its log-sum-exp, `[B, S, K, G]`.
    pub lse: &'a [f32],
    /// Gradient with respect to `o`.
    pub d_o: &'a [f32],
    /// Gradient with respect to `lse`, `[B, S, K, G]`, where it has one.
    pub d_lse: Option<&'a [f32]>,
}

/// Where the gradients go; overwritten. Keys that no row sees get zero.
pub struct Gradients<'a> {
    /// `[B, S, K, G, D]`.
    pub dq: &'a mut [f32],
    /// `[B, T, K, D]`.
    pub dk: &'a mut [f32],
    /// `[B, T, K, V]`.
    pub dv: &'a mut [f32],
}

/// Writes the output `o` `[B, S, K, G, V]` and `lse` `[B, S, K, G]`.
///
/// Key-value heads are shared among up to `threads` threads; 0 counts as 1.
///
/// # Panics
/// When a slice does not have the elements of its shape, or `valid_k > k_len`.
pub fn forward(attention: &Attention<'_>, o: &mut [f32], lse: &mut [f32], threads: usize) {
    let dims = attention.check();
    assert_eq!(o.len(), dims.o_elements(), "elements of o");
    assert_eq!(lse.len(), dims.lse_elements(), "elements of lse");
    let out = Mutex::new((o, lse));
    each_head(&dims, threads, |head| {
        let (o_head, lse_head) = head.forward(attention);
        let mut out = out.lock().expect("scattering does not panic");
        head.scatter(&o_head, dims.q_len, out.0);
        head.scatter(&lse_head, dims.q_len, out.1);
    });
}

/// Writes the gradients with respect to `q`, `k` and `v`. Threads as in [`forward`].
///
/// # Panics
/// When a slice does not have the elements of its shape, or `valid_k > k_len`.
pub fn backward(
    attention: &Attention<'_>,
    upstream: Upstream<'_>,
    gradients: Gradients<'_>,
    threads: usize,
) {
    let dims = attention.check();
    assert_eq!(upstream.o.len(), dims.o_elements(), "elements of o");
    assert_eq!(upstream.lse.len(), dims.lse_elements(), "elements of lse");
    let d_lse = upstream.d_lse.map_or(dims.lse_elements(), <[f32]>::len);
    assert_eq!(d_lse, dims.lse_elements(), "elements of d_lse");
    assert_eq!(upstream.d_o.len(), dims.o_elements(), "elements of d_o");
    assert_eq!(gradients.dq.len(), dims.q_elements(), "elements of dq");
    assert_eq!(gradients.dk.len(), dims.k_elements(), "elements of dk");
    assert_eq!(gradients.dv.len(), dims.v_elements(), "elements of dv");
    let out = Mutex::new(gradients);
    each_head(&dims, threads, |head| {
        let (dq, dk, dv) = head.backward(attention, upstream);
        let mut out = out.lock().expect("scattering does not panic");
        head.scatter(&dq, dims.q_len, out.dq);
        head.scatter(&dk, dims.k_len, out.dk);
        head.scatter(&dv, dims.k_len, out.dv);
    });
}

/// Adds the attention of some queries to other keys to one that is there: `o` and `lse` become
/// those of both sets of keys. Rows of `o` have `width` elements.
///
/// With `lse = ln(exp lse_a + exp lse_b)`, `o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b`; where
/// no key is visible `lse` is -inf, and `o` zero.
pub fn merge(width: usize, (o, lse): (&mut [f32], &mut [f32]), (o_b, lse_b): (&[f32], &[f32])) {
    let rows = o.chunks_exact_mut(width).zip(o_b.chunks_exact(width));
    for ((row, row_b), (a, &b)) in rows.zip(lse.iter_mut().zip(lse_b)) {
        let max = a.max(b);
        if max == f32::NEG_INFINITY {
            continue;
        }
        let sum = max + ((*a - max).exp() + (b - max).exp()).ln();
        let (of_a, of_b) = ((*a - sum).exp(), (b - sum).exp());
        for (x, y) in row.iter_mut().zip(row_b) {
            *x = of_a * *x + of_b * y;
        }
        *a = sum;
    }
}

/// Runs `work` on every (sequence, key-value head), on up to `threads` threads.
fn each_head(dims: &AttentionDims, threads: usize, work: impl Fn(Head) + Sync) {
    let total = dims.batch * dims.kv_heads;
    let next = AtomicUsize::new(0);
    let worker = || {
        loop {
            let idx = next.fetch_add(1, Ordering::Relaxed);
            if idx >= total {
                return;
            }
            work(Head {
                b: idx / dims.kv_heads,
                kv: idx % dims.kv_heads,
                dims: *dims,
            });
        }
    };
    let threads = threads.min(total);
    if threads <= 1 {
        return worker();
    }
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(worker);
        }
    });
}

/// One key-value head of one sequence, with its group of query heads.
#[derive(Clone, Copy)]
struct Head {
    b: usize,
    kv: usize,
    dims: AttentionDims,
}

/// Rows `first..first + rows` of the queries of one group, and the keys whose scores the block has.
struct Block {
    g: usize,
    first: usize,
    rows: usize,
    /// In order, apart from each other and not empty.
    runs: Vec<Range<usize>>,
    /// How many keys that are: the columns of the block's scores.
    keys: usize,
}

impl Block {
    /// The runs with the columns that they are.
    fn columns(&self) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let mut at = 0;
        self.runs.iter().map(move |run| {
            let columns = at..at + run.len();
            at = columns.end;
            (run.clone(), columns)
        })
    }

    /// The parts in which sums over keys are made, with their columns: one where all keys are seen
    /// up to the last, else tiles.
    fn parts(&self, is_bounded: bool) -> Vec<(Range<usize>, Range<usize>)> {
        if !is_bounded {
            return self.columns().collect();
        }
        let tiles = |(run, columns): (Range<usize>, Range<usize>)| {
            let (end, ahead) = (run.end, run.start - columns.start);
            run.step_by(TILE).map(move |start| {
                let tile = start..(start + TILE).min(end);
                (tile.clone(), tile.start - ahead..tile.end - ahead)
            })
        };
        self.columns().flat_map(tiles).collect()
    }

    /// The columns of some of the block's keys.
    fn columns_of(&self, seen: &[Range<usize>]) -> Vec<Range<usize>> {
        // Both are in order.
        let mut all = self.columns().peekable();
        let mut column = |keys: &Range<usize>| {
            while all.next_if(|(run, _)| run.end < keys.end).is_some() {}
            let (run, columns) = all
                .peek()
                .filter(|(run, _)| run.start <= keys.start && keys.end <= run.end)
                .expect("a block has the keys that its rows see");
            let at = keys.start - run.start + columns.start;
            at..at + keys.len()
        };
        seen.iter().map(&mut column).collect()
    }

    /// Calls `f` with what `rows` of scores and the like have of the keys that one row sees,
    /// `seen`, and makes the rest of them zero.
    fn each_seen<const N: usize>(
        &self,
        seen: &[Range<usize>],
        rows: [&mut [f32]; N],
        f: impl FnOnce([&mut [f32]; N]),
    ) {
        match &self.columns_of(seen)[..] {
            [] => {
                rows.into_iter().for_each(|row| row.fill(0.0));
            }
            [one] => f(rows.map(|row| {
                row[..one.start].fill(0.0);
                row[one.end..].fill(0.0);
                &mut row[one.clone()]
            })),
            several => {
                let gather = |row: &[f32]| -> Vec<f32> {
                    let parts = several.iter().map(|columns| &row[columns.clone()]);
                    parts.collect::<Vec<_>>().concat()
                };
                let mut gathered = rows.each_ref().map(|row| gather(row));
                f(gathered.each_mut().map(|row| &mut row[..]));
                for (row, mut from) in rows.into_iter().zip(gathered.each_ref().map(|g| &g[..])) {
                    row.fill(0.0);
                    for columns in several {
                        let (now, rest) = from.split_at(columns.len());
                        row[columns.clone()].copy_from_slice(now);
                        from = rest;
                    }
                }
            }
        }
    }
}

impl Head {
    /// `o` `[S, G, V]` and `lse` `[S, G]` of this head.
    fn forward(&self, attention: &Attention<'_>) -> (Vec<f32>, Vec<f32>) {
        let AttentionDims {
            q_len,
            groups,
            value_dim,
            ..
        } = self.dims;
        let mut o = vec![0.0; q_len * groups * value_dim];
        let mut lse = vec![f32::NEG_INFINITY; q_len * groups];
        let mut scores = Vec::new();
        for block in &self.blocks() {
            let &Block {
                g,
                first,
                rows,
                keys,
                ..
            } = block;
            self.row_products(block, self.scored(attention), &mut scores);
            let mut inverse_sums = [0.0; BLOCK];
            for (r, row) in scores.chunks_exact_mut(keys).enumerate() {
                let i = first + r;
                let seen = self.dims.visible(i..i + 1);
                let mut sum = soften(&mut []);
                block.each_seen(&seen, [row], |[row]| {
                    scale(row, attention.scale, attention.cap);
                    self.tilt(attention, g, i, &seen, row);
                    sum = soften(row);
                    self.drop(attention, g, i, &seen, row);
                });
                lse[i * groups + g] = sum.lse;
                inverse_sums[r] = sum.inverse;
            }
            let o = &mut o[(first * groups + g) * value_dim..];
            let v = (attention.v, value_dim);
            self.sums_of_rows(block, &scores, v, o, groups * value_dim);
            for (row, inverse) in o.chunks_mut(groups * value_dim).zip(&inverse_sums[..rows]) {
                row[..value_dim].iter_mut().for_each(|x| *x *= inverse);
            }
        }
        (o, lse)
    }

    /// `dq` `[S, G, D]`, `dk` `[T, D]` and `dv` `[T, V]` of this head.
    fn backward(
        &self,
        attention: &Attention<'_>,
        upstream: Upstream<'_>,
    ) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
        let AttentionDims {
            q_len,
            k_len,
            groups,
            head_dim,
            value_dim,
            ..
        } = self.dims;
        let mut dq = vec![0.0; q_len * groups * head_dim];
        let (mut dk, mut dv) = (vec![0.0; k_len * head_dim], vec![0.0; k_len * value_dim]);
        let (mut p, mut ds) = (Vec::new(), Vec::new());
        for block in &self.blocks() {
            let &Block {
                g,
                first,
                rows,
                keys,
                ..
            } = block;
            self.row_products(block, self.scored(attention), &mut p);
            let weighted = (upstream.d_o, attention.v, value_dim);
            self.row_products(block, weighted, &mut ds);
            let both = p.chunks_exact_mut(keys).zip(ds.chunks_exact_mut(keys));
            for (r, (p, ds)) in both.enumerate() {
                self.backward_row(attention, upstream, block, r, p, ds);
            }
            let across = |at: usize| {
                [&p, &ds].map(|data| View {
                    data: &data[at..],
                    row: 1,
                    col: keys,
                })
            };
            for (run, columns) in block.columns() {
                let [p, ds] = across(columns.start);
                gemm(
                    (run.len(), rows, value_dim),
                    p,
                    self.queries(upstream.d_o, value_dim, g, first),
                    Store::Add,
                    &mut dv[run.start * value_dim..],
                    value_dim,
                );
                gemm(
                    (run.len(), rows, head_dim),
                    ds,
                    self.queries(attention.q, head_dim, g, first),
                    Store::Add,
                    &mut dk[run.start * head_dim..],
                    head_dim,
                );
            }
            let dq = &mut dq[(first * groups + g) * head_dim..];
            let k = (attention.k, head_dim);
            self.sums_of_rows(block, &ds, k, dq, groups * head_dim);
        }
        (dq, dk, dv)
    }

    /// Row `r` of a block: from raw products `p = <q, k>` and `ds = <do, v>` to `p * drop` and
    /// `scale * ds`.
    fn backward_row(
        &self,
        attention: &Attention<'_>,
        upstream: Upstream<'_>,
        block: &Block,
        r: usize,
        p: &mut [f32],
        ds: &mut [f32],
    ) {
        let i = block.first + r;
        let seen = self.dims.visible(i..i + 1);
        block.each_seen(&seen, [p, ds], |[p, ds]| {
            self.backward_seen(attention, upstream, (block.g, i, &seen), p, ds);
        });
    }

    /// The same for the keys that row `i` of a group sees.
    fn backward_seen(
        &self,
        attention: &Attention<'_>,
        upstream: Upstream<'_>,
        (g, i, seen): (usize, usize, &[Range<usize>]),
        p: &mut [f32],
        ds: &mut [f32],
    ) {
        let row = self.query_row(g, i);
        let elements = row * self.dims.value_dim..(row + 1) * self.dims.value_dim;
        let product = dot(&upstream.o[elements.clone()], &upstream.d_o[elements]);
        let d_lse = upstream.d_lse.map_or(0.0, |d_lse| f64::from(d_lse[row]));
        let delta = (product - d_lse) as f32;
        let (lse, scale) = (upstream.lse[row], attention.scale);
        let keys = || seen.iter().cloned().flatten();
        if let Some(cap) = attention.cap {
            let slope = self.slope(attention, g);
            for (j, (p, ds)) in keys().zip(p.iter_mut().zip(ds)) {
                let drop = match attention.dropout {
                    Some(dropout) => dropout(self.b, self.kv, g, i, j),
                    None => 1.0,
                };
                let t = (*p * scale / cap).tanh();
                let bias = slope * self.dims.distance(i, j);
                *p = (cap * t - bias - lse).exp();
                *ds = *p * (drop * *ds - delta) * scale * (1.0 - t * t);
                *p *= drop;
            }
            return;
        }
        if attention.slopes.is_none() {
            widest(
                #[inline(always)]
                || (p.iter_mut()).for_each(|p| *p = exp_f32(*p * scale - lse)),
            );
        } else {
            p.iter_mut().for_each(|p| *p *= scale);
            self.tilt(attention, g, i, seen, p);
            widest(
                #[inline(always)]
                || p.iter_mut().for_each(|p| *p = exp_f32(*p - lse)),
            );
        }
        // Apart, so that the common loops without dropout vectorise.
        let Some(dropout) = attention.dropout else {
            widest(
                #[inline(always)]
                || {
                    for (p, ds) in p.iter().zip(ds) {
                        *ds = p * (*ds - delta) * scale;
                    }
                },
            );
            return;
        };
        for (j, (p, ds)) in keys().zip(p.iter_mut().zip(ds)) {
            let drop = dropout(self.b, self.kv, g, i, j);
            *ds = *p * (drop * *ds - delta) * scale;
            *p *= drop;
        }
    }

    /// The loss of a score of a group's head for each position.
    fn slope(&self, attention: &Attention<'_>, g: usize) -> f32 {
        let head = self.kv * self.dims.groups + g;
        attention.slopes.map_or(0.0, |slopes| slopes[head])
    }

    /// Takes off the scores of query row `i` of a group, of the keys that it sees, what the
    /// distance costs.
    fn tilt(
        &self,
        attention: &Attention<'_>,
        g: usize,
        i: usize,
        seen: &[Range<usize>],
        scores: &mut [f32],
    ) {
        if attention.slopes.is_none() {
            return;
        }
        let slope = self.slope(attention, g);
        let mut rest = scores;
        for keys in seen {
            let (run, others) = std::mem::take(&mut rest).split_at_mut(keys.len());
            for (j, score) in keys.clone().zip(run) {
                *score -= slope * self.dims.distance(i, j);
            }
            rest = others;
        }
    }

    /// Multiplies the weights of query row `i` of a group, of the keys that it sees, by the
    /// dropout.
    fn drop(
        &self,
        attention: &Attention<'_>,
        g: usize,
        i: usize,
        seen: &[Range<usize>],
        weights: &mut [f32],
    ) {
        let Some(dropout) = attention.dropout else {
            return;
        };
        for (j, weight) in seen.iter().cloned().flatten().zip(weights) {
            *weight *= dropout(self.b, self.kv, g, i, j);
        }
    }

    /// The blocks of this head that see any key, in order of rows, then groups.
    fn blocks(&self) -> Vec<Block> {
        let dims = self.dims;
        let of_rows = |first: usize| {
            let rows = (dims.q_len - first).min(BLOCK);
            let runs = dims.computed(first..first + rows);
            let keys = runs.iter().map(Range::len).sum();
            (0..dims.groups).map(move |g| Block {
                g,
                first,
                rows,
                runs: runs.clone(),
                keys,
            })
        };
        let all = (0..dims.q_len).step_by(BLOCK).flat_map(of_rows);
        all.filter(|block| block.keys > 0).collect()
    }

    /// Queries and keys, and how wide their rows are.
    fn scored<'a>(&self, attention: &Attention<'a>) -> (&'a [f32], &'a [f32], usize) {
        (attention.q, attention.k, self.dims.head_dim)
    }

    /// `out[rows, keys]`: products of the block's rows of `a` (by query) with its rows of `b` (by
    /// key), both of `width` elements.
    fn row_products(
        &self,
        block: &Block,
        (a, b, width): (&[f32], &[f32], usize),
        out: &mut Vec<f32>,
    ) {
        let (rows, keys) = (block.rows, block.keys);
        out.resize(rows * keys, 0.0);
        let View { data, row, col } = self.keys(b, width);
        for (run, columns) in block.columns() {
            let b = View {
                data: &data[run.start * row..],
                row: col,
                col: row,
            };
            gemm(
                (rows, width, run.len()),
                self.queries(a, width, block.g, block.first),
                b,
                Store::Overwrite,
                &mut out[columns.start..],
                keys,
            );
        }
    }

    /// `out[rows, width]`: sums over the block's keys of `weights` `[rows, keys]` times rows of
    /// `b`, by key, with rows of `out` so many elements apart.
    fn sums_of_rows(
        &self,
        block: &Block,
        weights: &[f32],
        (b, width): (&[f32], usize),
        out: &mut [f32],
        step: usize,
    ) {
        let b = self.keys(b, width);
        let parts = block.parts(self.dims.bounds().is_some());
        for (n, (run, columns)) in parts.into_iter().enumerate() {
            let weights = View {
                data: &weights[columns.start..],
                row: block.keys,
                col: 1,
            };
            let b = View {
                data: &b.data[run.start * b.row..],
                ..b
            };
            let store = match n {
                0 => Store::Overwrite,
                _ => Store::Add,
            };
            gemm((block.rows, run.len(), width), weights, b, store, out, step);
        }
    }

    /// Index of query row `i` of group `g` in `[B, S, K, G]`.
    fn query_row(&self, g: usize, i: usize) -> usize {
        let AttentionDims {
            q_len,
            kv_heads,
            groups,
            ..
        } = self.dims;
        ((self.b * q_len + i) * kv_heads + self.kv) * groups + g
    }

    /// The rows of group `g` from `first` on, as a matrix with `width` columns.
    fn queries<'a>(&self, data: &'a [f32], width: usize, g: usize, first: usize) -> View<'a> {
        let AttentionDims {
            kv_heads, groups, ..
        } = self.dims;
        let data = &data[self.query_row(g, first) * width..];
        View {
            data,
            row: kv_heads * groups * width,
            col: 1,
        }
    }

    /// The keys or values of this head, as a matrix with `width` columns.
    fn keys<'a>(&self, data: &'a [f32], width: usize) -> View<'a> {
        let AttentionDims {
            k_len, kv_heads, ..
        } = self.dims;
        let data = &data[(self.b * k_len * kv_heads + self.kv) * width..];
        View {
            data,
            row: kv_heads * width,
            col: 1,
        }
    }

    /// Copies this head's `[len, width]` to its place in `[B, len, K, width]`.
    fn scatter(&self, head: &[f32], len: usize, out: &mut [f32]) {
        if head.is_empty() {
            return;
        }
        let width = head.len() / len;
        let rows = out.chunks_exact_mut(self.dims.kv_heads * width);
        for (row, part) in rows.skip(self.b * len).zip(head.chunks_exact(width)) {
            row[self.kv * width..][..width].copy_from_slice(part);
        }
    }
}

impl Attention<'_> {
    fn check(&self) -> AttentionDims {
        let dims = self.dims;
        assert_eq!(self.q.len(), dims.q_elements(), "elements of q");
        assert_eq!(self.k.len(), dims.k_elements(), "elements of k");
        assert_eq!(self.v.len(), dims.v_elements(), "elements of v");
        assert!(dims.valid_k <= dims.k_len, "valid_k within the keys");
        let heads = dims.kv_heads * dims.groups;
        assert!(
            self.slopes.is_none_or(|s| s.len() == heads),
            "a slope for each head"
        );
        assert!(
            dims.head_dim > 0 && dims.value_dim > 0,
            "a head has elements"
        );
        dims
    }
}

/// The divisor of a row's softmax.
struct Sum {
    lse: f32,
    inverse: f32,
}

/// Scales raw scores and bounds them.
fn scale(row: &mut [f32], scale: f32, cap: Option<f32>) {
    match cap {
        None => row.iter_mut().for_each(|s| *s *= scale),
        Some(cap) => (row.iter_mut()).for_each(|s| *s = cap * (*s * scale / cap).tanh()),
    }
}

/// Turns scores into `exp(s - max)`; of no scores the sum is 0 and its inverse taken as 0.
fn soften(row: &mut [f32]) -> Sum {
    let (max, total) = widest(
        #[inline(always)]
        || {
            let max = maximum(row);
            row.iter_mut().for_each(|s| *s = exp_f32(*s - max));
            (max, sum(row))
        },
    );
    if row.is_empty() {
        return Sum {
            lse: f32::NEG_INFINITY,
            inverse: 0.0,
        };
    }
    Sum {
        lse: (f64::from(max) + total.ln()) as f32,
        inverse: (1.0 / total) as f32,
    }
}

/// The largest element, NaN left out; in lanes, as one chain of maxima is slow.
#[inline(always)]
fn maximum(row: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 16];
    for chunk in row.chunks(lanes.len()) {
        for (lane, &s) in lanes.iter_mut().zip(chunk) {
            *lane = if s > *lane { s } else { *lane };
        }
    }
    lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
}

#[cfg(test)]
#[path = "attention_tests.rs"]
mod tests;
