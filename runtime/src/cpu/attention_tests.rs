//! Tests of attention: against PyTorch, against `f64`, by finite differences, and bit for bit
//! between shards and the whole.

use super::*;
use crate::cpu::testing::{assert_close, bits, elements, random, reference, tensor};

/// Inputs of an attention, owned.
struct Case {
    dims: AttentionDims,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    d_o: Vec<f32>,
    /// The gradient of the log-sum-exp; none where it is empty.
    d_lse: Vec<f32>,
    /// The loss of scores with the distance, by head; none where it is empty.
    slopes: Vec<f32>,
}

/// Everything that both passes give.
struct Results {
    o: Vec<f32>,
    lse: Vec<f32>,
    dq: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
}

/// [B, S, T, K, G, D], q_offset, valid_k; values are as wide as keys.
fn dims(extents: [usize; 6], q_offset: usize, valid_k: usize) -> AttentionDims {
    let [batch, q_len, k_len, kv_heads, groups, head_dim] = extents;
    AttentionDims {
        batch,
        q_len,
        k_len,
        kv_heads,
        groups,
        head_dim,
        value_dim: head_dim,
        q_offset,
        k_offset: 0,
        valid_k,
        window: None,
        blocks: None,
    }
}

/// The same where queries look back over a few positions.
fn windowed(dims: AttentionDims, window: usize) -> AttentionDims {
    AttentionDims {
        window: Some(window),
        ..dims
    }
}

/// The same where queries see blocks of `size` positions: the last `local`, or those of their stretch,
/// the first of all, and where stretches have an end, that.
fn blocked(dims: AttentionDims, size: u64, local: u64, aligned: bool) -> AttentionDims {
    let blocks = Blocks {
        size,
        local,
        aligned,
        first: u64::from(local != 2),
        last: u64::from(local > 2),
    };
    AttentionDims {
        blocks: Some(blocks),
        ..dims
    }
}

/// Whether a query at one position sees a key at another, by the definition.
fn sees(dims: AttentionDims, query: usize, key: usize) -> bool {
    let in_window = dims.window.is_none_or(|w| key + w > query);
    let in_blocks = dims.blocks.is_none_or(|b| {
        let (i, j) = (query as u64 / b.size, key as u64 / b.size);
        let near = match b.aligned {
            true => i / b.local == j / b.local,
            false => i < j + b.local,
        };
        near || j < b.first || j % b.local >= b.local - b.last
    });
    key <= query && in_window && in_blocks
}

/// The cap of cases with a window, so that both are tried, with each other and without.
fn cap_of(dims: AttentionDims) -> Option<f32> {
    dims.window.filter(|w| w % 2 == 1).map(|_| 1.5)
}

/// The same with values of another width.
fn with_values(dims: AttentionDims, value_dim: usize) -> AttentionDims {
    AttentionDims { value_dim, ..dims }
}

impl Case {
    fn random(seed: u64, dims: AttentionDims) -> Self {
        let numbers = |i, n| random(4 * seed + i, n);
        Case {
            dims,
            q: numbers(0, dims.q_elements()),
            k: numbers(1, dims.k_elements()),
            v: numbers(2, dims.v_elements()),
            d_o: numbers(3, dims.o_elements()),
            d_lse: Vec::new(),
            slopes: Vec::new(),
        }
    }

    /// The same with a gradient of the log-sum-exp.
    fn with_d_lse(mut self) -> Self {
        self.d_lse = random(99, self.dims.lse_elements());
        self
    }

    /// The same with another slope for each head.
    fn sloped(mut self) -> Self {
        let heads = self.dims.kv_heads * self.dims.groups;
        self.slopes = (1..=heads).map(|h| 0.8 / h as f32).collect();
        self
    }

    fn attention<'a>(&'a self, scale: f32, dropout: Option<&'a Dropout<'a>>) -> Attention<'a> {
        Attention {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            dims: self.dims,
            scale,
            cap: cap_of(self.dims),
            slopes: (!self.slopes.is_empty()).then_some(&self.slopes),
            dropout,
        }
    }

    fn run(&self, scale: f32, dropout: Option<&Dropout<'_>>, threads: usize) -> Results {
        let attention = self.attention(scale, dropout);
        let blank = |n| vec![f32::NAN; n];
        let (q, k) = (self.dims.q_elements(), self.dims.k_elements());
        let (o, v) = (self.dims.o_elements(), self.dims.v_elements());
        let (mut o, mut lse) = (blank(o), blank(self.dims.lse_elements()));
        forward(&attention, &mut o, &mut lse, threads);
        let (mut dq, mut dk, mut dv) = (blank(q), blank(k), blank(v));
        let upstream = Upstream {
            o: &o,
            lse: &lse,
            d_o: &self.d_o,
            d_lse: (!self.d_lse.is_empty()).then_some(&self.d_lse),
        };
        let gradients = Gradients {
            dq: &mut dq,
            dk: &mut dk,
            dv: &mut dv,
        };
        backward(&attention, upstream, gradients, threads);
        Results { o, lse, dq, dk, dv }
    }

    /// The same case on part of the batch, queries and key-value heads.
    fn part(&self, [b, s, k]: [std::ops::Range<usize>; 3]) -> Self {
        let d = self.dims;
        let q = |x: &[f32]| part(x, d.q_len, d.kv_heads, [b.clone(), s.clone(), k.clone()]);
        let kv = |x: &[f32]| part(x, d.k_len, d.kv_heads, [b.clone(), 0..d.k_len, k.clone()]);
        let dims = AttentionDims {
            batch: b.len(),
            q_len: s.len(),
            kv_heads: k.len(),
            q_offset: d.q_offset + s.start,
            ..d
        };
        Case {
            dims,
            q: q(&self.q),
            k: kv(&self.k),
            v: kv(&self.v),
            d_o: q(&self.d_o),
            d_lse: q(&self.d_lse),
            slopes: (self.slopes.chunks(d.groups))
                .skip(k.start)
                .take(k.len())
                .flatten()
                .copied()
                .collect(),
        }
    }
}

/// Part of a tensor `[B, len, K, ..]`.
fn part(x: &[f32], len: usize, heads: usize, [b, s, k]: [std::ops::Range<usize>; 3]) -> Vec<f32> {
    // All tests slice tensors of two sequences.
    let width = x.len() / (2 * len * heads);
    let mut out = Vec::new();
    for b in b {
        for s in s.clone() {
            let row = (b * len + s) * heads;
            out.extend_from_slice(&x[(row + k.start) * width..(row + k.end) * width]);
        }
    }
    out
}

/// A dropout of probability one half, by a hash of the indices.
fn coin(b: usize, k: usize, g: usize, i: usize, j: usize) -> f32 {
    let name = (((b * 31 + k) * 31 + g) * 1009 + i) * 1009 + j;
    if random(name as u64, 1)[0] < 0.0 {
        0.0
    } else {
        2.0
    }
}

/// Output and log-sum-exp by the definition, in `f64`.
fn naive(
    dims: AttentionDims,
    [q, k, v]: [&[f64]; 3],
    slopes: &[f32],
    scale: f64,
    drop: bool,
) -> (Vec<f64>, Vec<f64>) {
    let AttentionDims {
        batch,
        q_len,
        k_len,
        kv_heads,
        groups,
        head_dim,
        value_dim,
        ..
    } = dims;
    let (mut o, mut lse) = (vec![0.0; dims.o_elements()], Vec::new());
    for b in 0..batch {
        for i in 0..q_len {
            for kv in 0..kv_heads {
                for g in 0..groups {
                    let row = ((b * q_len + i) * kv_heads + kv) * groups + g;
                    let key = |j: usize| (b * k_len + j) * kv_heads + kv;
                    let is_seen = |&j: &usize| j < dims.valid_k && sees(dims, dims.q_offset + i, j);
                    let keys = (0..k_len).filter(is_seen);
                    let score = |j: usize| -> f64 {
                        let pairs = q[row * head_dim..].iter().zip(&k[key(j) * head_dim..]);
                        let pairs = pairs.take(head_dim);
                        let score = scale * pairs.map(|(a, b)| a * b).sum::<f64>();
                        let cap = cap_of(dims).map(f64::from);
                        let score = cap.map_or(score, |c| c * (score / c).tanh());
                        let slope = slopes.get(kv * groups + g).copied().unwrap_or(0.0);
                        score - f64::from(slope) * (dims.q_offset + i - j) as f64
                    };
                    let sum: f64 = keys.clone().map(|j| score(j).exp()).sum();
                    lse.push(sum.ln());
                    for j in keys {
                        let dropped = if drop {
                            f64::from(coin(b, kv, g, i, j))
                        } else {
                            1.0
                        };
                        let weight = score(j).exp() / sum * dropped;
                        for d in 0..value_dim {
                            o[row * value_dim + d] += weight * v[key(j) * value_dim + d];
                        }
                    }
                }
            }
        }
    }
    (o, lse)
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&v| f64::from(v)).collect()
}

/// Odd extents, queries in the middle of the keys, keys cut off, and more than one block.
fn shapes() -> Vec<AttentionDims> {
    vec![
        dims([1, 1, 1, 1, 1, 1], 0, 1),
        dims([2, 5, 5, 2, 2, 4], 0, 5),
        dims([2, 7, 11, 1, 3, 5], 4, 11),
        dims([1, 9, 6, 3, 1, 2], 0, 4),
        dims([3, 4, 9, 2, 1, 3], 20, 7),
        dims([1, 67, 67, 2, 2, 3], 0, 67),
        dims([1, 130, 150, 1, 2, 9], 20, 149),
        with_values(dims([2, 7, 11, 2, 3, 5], 4, 11), 3),
        with_values(dims([1, 67, 67, 2, 1, 4], 0, 67), 9),
        windowed(dims([2, 9, 9, 1, 2, 4], 0, 9), 3),
        windowed(dims([1, 67, 90, 2, 1, 3], 20, 88), 12),
        windowed(dims([1, 130, 130, 1, 2, 5], 0, 130), 65),
        blocked(dims([2, 9, 9, 1, 2, 4], 0, 9), 2, 2, false),
        blocked(dims([1, 67, 90, 2, 1, 3], 20, 88), 5, 3, false),
        blocked(dims([1, 130, 150, 1, 2, 5], 20, 149), 7, 4, true),
        blocked(dims([1, 70, 400, 1, 1, 3], 330, 400), 16, 2, false),
        blocked(
            windowed(dims([1, 70, 200, 2, 1, 3], 110, 180), 90),
            8,
            3,
            true,
        ),
    ]
}

/// Each of them as it is, and with slopes.
fn both() -> impl Iterator<Item = (AttentionDims, bool)> {
    let all = shapes().into_iter();
    all.flat_map(|dims| [(dims, false), (dims, true)])
}

#[test]
fn equals_the_reference() {
    for entry in reference("causal_attention") {
        let name = entry["name"].as_str().unwrap();
        let (q, _) = tensor(&entry["inputs"]["q"]);
        let case = Case {
            dims: dims([q[0], q[1], q[1], q[2], q[3], q[4]], 0, q[1]),
            q: elements(&entry["inputs"]["q"]),
            k: elements(&entry["inputs"]["k"]),
            v: elements(&entry["inputs"]["v"]),
            d_o: elements(&entry["upstream"]["out"]),
            d_lse: Vec::new(),
            slopes: Vec::new(),
        };
        let results = case.run(entry["attrs"]["scale"].as_f64().unwrap() as f32, None, 1);
        // Scores reach 10 in `multi_query_sharp`, so their rounding moves probabilities by 1e-6.
        let check = |values: &[f32], expected: &serde_json::Value, what: &str| {
            assert_close(values, &tensor(expected).1, 1e-5, &format!("{name} {what}"));
        };
        check(&results.o, &entry["outputs"]["out"], "out");
        check(&results.lse, &entry["outputs"]["lse"], "lse");
        check(&results.dq, &entry["grads"]["q"], "dq");
        check(&results.dk, &entry["grads"]["k"], "dk");
        check(&results.dv, &entry["grads"]["v"], "dv");
    }
}

#[test]
fn forward_equals_the_definition() {
    for (seed, (dims, slopes)) in both().enumerate() {
        let case = Case::random(seed as u64, dims);
        let case = if slopes { case.sloped() } else { case };
        for drop in [false, true] {
            let results = case.run(1.3, drop.then_some(&coin as &Dropout<'_>), 1);
            let (o, lse) = naive(
                dims,
                [&wide(&case.q), &wide(&case.k), &wide(&case.v)],
                &case.slopes,
                f64::from(1.3f32),
                drop,
            );
            assert_close(&results.o, &o, 3e-6, &format!("o of {dims:?}"));
            assert_close(&results.lse, &lse, 3e-6, &format!("lse of {dims:?}"));
        }
    }
}

/// Central differences of `<o, d_o>` in `f64`, for some elements of each input.
#[test]
fn backward_equals_finite_differences() {
    for (seed, (dims, slopes)) in both().enumerate() {
        let case = Case::random(40 + seed as u64, dims);
        let case = match slopes {
            true => case.sloped().with_d_lse(),
            false => case,
        };
        for drop in [false, true] {
            let results = case.run(0.7, drop.then_some(&coin as &Dropout<'_>), 1);
            let inputs = [wide(&case.q), wide(&case.k), wide(&case.v)];
            let loss = |inputs: &[Vec<f64>; 3]| -> f64 {
                let [q, k, v] = inputs;
                let (o, lse) = naive(dims, [q, k, v], &case.slopes, f64::from(0.7f32), drop);
                let seen = lse.iter().zip(&case.d_lse).filter(|(l, _)| l.is_finite());
                let all = o.iter().zip(&case.d_o).chain(seen);
                all.map(|(y, d)| y * f64::from(*d)).sum()
            };
            for (which, gradient) in [&results.dq, &results.dk, &results.dv]
                .into_iter()
                .enumerate()
            {
                for x in (0..gradient.len()).step_by(gradient.len().div_ceil(25)) {
                    let at = |step: f64| {
                        let mut moved = inputs.clone();
                        moved[which][x] += step;
                        loss(&moved)
                    };
                    let slope = (at(1e-5) - at(-1e-5)) / 2e-5;
                    assert_close(
                        &gradient[x..=x],
                        &[slope],
                        1e-5,
                        &format!("{dims:?} {which} {x}"),
                    );
                }
            }
        }
    }
}

#[test]
fn shards_of_batch_and_heads_equal_the_whole_bit_for_bit() {
    for d in [
        dims([2, 70, 70, 3, 2, 17], 0, 70),
        dims([2, 9, 300, 3, 1, 8], 280, 289),
        with_values(dims([2, 70, 70, 3, 2, 12], 0, 70), 7),
        windowed(dims([2, 70, 70, 3, 2, 12], 0, 70), 9),
        blocked(dims([2, 70, 70, 3, 2, 12], 0, 70), 4, 3, true),
    ] {
        let case = Case::random(5, d).sloped().with_d_lse();
        let whole = case.run(0.4, None, 1);
        for (b, k) in [
            (0..1, 0..3),
            (1..2, 0..3),
            (0..2, 0..1),
            (0..2, 1..3),
            (1..2, 2..3),
        ] {
            let ranges = [b.clone(), 0..d.q_len, k.clone()];
            let shard = case.part(ranges.clone()).run(0.4, None, 1);
            let of_q = |x: &[f32]| bits(&part(x, d.q_len, d.kv_heads, ranges.clone()));
            let of_k = |x: &[f32]| {
                bits(&part(
                    x,
                    d.k_len,
                    d.kv_heads,
                    [b.clone(), 0..d.k_len, k.clone()],
                ))
            };
            assert_eq!(bits(&shard.o), of_q(&whole.o));
            assert_eq!(bits(&shard.lse), of_q(&whole.lse));
            assert_eq!(bits(&shard.dq), of_q(&whole.dq));
            assert_eq!(bits(&shard.dk), of_k(&whole.dk));
            assert_eq!(bits(&shard.dv), of_k(&whole.dv));
        }
    }
}

/// Splits of S that do not fall on a block, with keys in several blocks of the product.
#[test]
fn query_rows_alone_equal_the_whole_bit_for_bit() {
    for window in [None, Some(101)] {
        let d = dims([2, 560, 600, 2, 1, 24], 10, 570);
        rows_equal_the_whole(AttentionDims { window, ..d });
        for (size, local, aligned) in [(16, 3, false), (64, 2, false), (5, 9, true)] {
            let d = AttentionDims { window, ..d };
            rows_equal_the_whole(blocked(d, size, local, aligned));
        }
    }
}

fn rows_equal_the_whole(d: AttentionDims) {
    let case = Case::random(6, d).sloped().with_d_lse();
    let whole = case.run(2.0, None, 1);
    for rows in [0..1, 3..70, 100..101, 200..333, 250..560, 559..560] {
        let ranges = [0..2, rows, 0..2];
        let shard = case.part(ranges.clone()).run(2.0, None, 1);
        let of = |x: &[f32]| bits(&part(x, d.q_len, d.kv_heads, ranges.clone()));
        assert_eq!(bits(&shard.o), of(&whole.o));
        assert_eq!(bits(&shard.lse), of(&whole.lse));
        assert_eq!(bits(&shard.dq), of(&whole.dq));
    }
}

#[test]
fn the_number_of_threads_changes_nothing() {
    let case = Case::random(7, dims([2, 80, 80, 3, 2, 8], 0, 80));
    let one = case.run(0.4, Some(&coin), 1);
    for threads in [0, 2, 3, 7, 20] {
        let many = case.run(0.4, Some(&coin), threads);
        assert_eq!(bits(&many.o), bits(&one.o));
        assert_eq!(bits(&many.lse), bits(&one.lse));
        assert_eq!(bits(&many.dq), bits(&one.dq));
        assert_eq!(bits(&many.dk), bits(&one.dk));
        assert_eq!(bits(&many.dv), bits(&one.dv));
    }
}

/// Keys and values that no query of a block has in its tiles are not read, and their gradients are
/// zero.
#[test]
fn blocks_that_nobody_sees_are_left_out() {
    // Rows from 640 on see the first 64 keys and those from 512 on.
    let d = blocked(dims([1, 64, 704, 1, 1, 8], 640, 704), 64, 3, false);
    let blocks = d.blocks.map(|b| Blocks { last: 0, ..b });
    let d = AttentionDims { blocks, ..d };
    let clean = Case::random(12, d);
    let expected = clean.run(0.5, None, 1);
    let mut spoiled = Case::random(12, d);
    for x in [&mut spoiled.k, &mut spoiled.v] {
        x[64 * 8..512 * 8].fill(f32::NAN);
    }
    let found = spoiled.run(0.5, None, 1);
    assert_eq!(bits(&found.o), bits(&expected.o));
    assert_eq!(bits(&found.lse), bits(&expected.lse));
    assert_eq!(bits(&found.dq), bits(&expected.dq));
    assert_eq!(bits(&found.dk), bits(&expected.dk));
    assert_eq!(bits(&found.dv), bits(&expected.dv));
    assert!(found.dk[64 * 8..512 * 8].iter().all(|x| *x == 0.0));
    assert!(found.dk[..64 * 8].iter().any(|x| *x != 0.0));
    // So are those wholly before a window.
    let d = windowed(dims([1, 64, 704, 1, 1, 8], 640, 704), 65);
    let mut spoiled = Case::random(13, d);
    spoiled.k[..576 * 8].fill(f32::NAN);
    assert!(spoiled.run(0.5, None, 1).dq.iter().all(|x| x.is_finite()));
}

#[test]
fn rows_without_keys_give_zero() {
    let d = dims([2, 3, 4, 1, 2, 5], 0, 0);
    let results = Case::random(8, d).run(1.0, None, 1);
    assert!(results.lse.iter().all(|&v| v == f32::NEG_INFINITY));
    for zero in [&results.o, &results.dq, &results.dk, &results.dv] {
        assert!(zero.iter().all(|&v| v == 0.0));
    }
    for empty in [
        dims([0, 3, 4, 1, 2, 5], 0, 4),
        dims([2, 0, 4, 1, 2, 5], 0, 4),
        dims([1, 3, 0, 1, 1, 5], 0, 0),
    ] {
        Case::random(9, empty).run(1.0, None, 2);
    }
}

#[test]
fn large_scores_do_not_overflow() {
    let d = dims([1, 6, 6, 1, 1, 4], 0, 6);
    let case = Case::random(10, d);
    let results = case.run(300.0, None, 1);
    let all = [
        &results.o,
        &results.lse,
        &results.dq,
        &results.dk,
        &results.dv,
    ];
    assert!(all.into_iter().flatten().all(|v| v.is_finite()));
}

/// `cargo test --release -p runtime throughput -- --ignored --nocapture`
#[test]
#[ignore = "prints throughput"]
fn throughput() {
    let d = dims([1, 1024, 1024, 4, 1, 64], 0, 1024);
    let case = Case::random(11, d);
    let attention = case.attention(0.125, None);
    let (mut o, mut lse) = (vec![0.0; d.q_elements()], vec![0.0; d.lse_elements()]);
    let gflops = |products: usize, start: std::time::Instant| {
        let flops = products * d.q_elements() * d.k_len;
        3.0 * flops as f64 / start.elapsed().as_secs_f64() / 1e9
    };
    let start = std::time::Instant::now();
    for _ in 0..3 {
        forward(&attention, &mut o, &mut lse, 1);
    }
    println!("forward: {:.1} GFLOP/s (causal count)", gflops(2, start));
    let mut grads = [vec![0.0; o.len()], vec![0.0; o.len()], vec![0.0; o.len()]];
    let start = std::time::Instant::now();
    for _ in 0..3 {
        let [dq, dk, dv] = &mut grads;
        let upstream = Upstream {
            o: &o,
            lse: &lse,
            d_o: &case.d_o,
            d_lse: None,
        };
        backward(&attention, upstream, Gradients { dq, dk, dv }, 1);
    }
    println!("backward: {:.1} GFLOP/s (causal count)", gflops(5, start));
}

/// Keys cut in two: the merged results are those of all keys, and the gradients add up. Some
/// queries see none of the second half, and some keys are padding.
#[test]
fn parts_of_the_keys_merge_to_the_whole() {
    for window in [None, Some(4), Some(5)] {
        let d = with_values(dims([2, 6, 12, 2, 2, 4], 3, 10), 3);
        parts_merge(AttentionDims { window, ..d });
        for (size, local, aligned) in [(1, 3, false), (2, 2, true), (3, 2, false)] {
            let d = AttentionDims { window, ..d };
            parts_merge(blocked(d, size, local, aligned));
        }
    }
}

fn parts_merge(d: AttentionDims) {
    let (cut, scale) = (5, 0.7);
    let doubled = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let whole = Case::random(11, d).sloped().with_d_lse();
    let all = whole.run(scale, None, 1);
    let half = |keys: std::ops::Range<usize>| {
        let d = whole.dims;
        let kv = |x: &[f32]| part(x, d.k_len, d.kv_heads, [0..2, keys.clone(), 0..d.kv_heads]);
        let dims = AttentionDims {
            k_len: keys.len(),
            k_offset: keys.start,
            valid_k: d.valid_k.saturating_sub(keys.start).min(keys.len()),
            ..d
        };
        Case {
            dims,
            q: whole.q.clone(),
            k: kv(&whole.k),
            v: kv(&whole.v),
            d_o: whole.d_o.clone(),
            d_lse: whole.d_lse.clone(),
            slopes: whole.slopes.clone(),
        }
    };
    let halves = [half(0..cut), half(cut..12)];
    let parts = halves.each_ref().map(|case| case.run(scale, None, 1));
    let (mut o, mut lse) = (parts[0].o.clone(), parts[0].lse.clone());
    merge(3, (&mut o, &mut lse), (&parts[1].o, &parts[1].lse));
    assert_close(&o, &doubled(&all.o), 1e-5, "o");
    assert_close(&lse, &doubled(&all.lse), 1e-5, "lse");
    let mut dq = vec![0.0; whole.dims.q_elements()];
    for (case, keys) in halves.iter().zip([0..cut, cut..12]) {
        let d = case.dims;
        let mut dq_part = vec![0.0; d.q_elements()];
        let (mut dk, mut dv) = (vec![0.0; d.k_elements()], vec![0.0; d.v_elements()]);
        let upstream = Upstream {
            o: &all.o,
            lse: &all.lse,
            d_o: &whole.d_o,
            d_lse: Some(&whole.d_lse),
        };
        let gradients = Gradients {
            dq: &mut dq_part,
            dk: &mut dk,
            dv: &mut dv,
        };
        backward(&case.attention(scale, None), upstream, gradients, 1);
        dq.iter_mut().zip(&dq_part).for_each(|(sum, x)| *sum += x);
        let of = |x: &[f32]| part(x, 12, d.kv_heads, [0..2, keys.clone(), 0..d.kv_heads]);
        assert_close(&dk, &doubled(&of(&all.dk)), 1e-5, "dk");
        assert_close(&dv, &doubled(&of(&all.dv)), 1e-5, "dv");
    }
    assert_close(&dq, &doubled(&all.dq), 1e-5, "dq");
}
