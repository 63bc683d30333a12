//! Tests of `dot_general`: against a sum in `f64`, shards against the whole, and threads.

use super::*;
use crate::cpu::testing::{assert_close, bits, random};
use proptest::prelude::*;

/// A tensor of random numbers under labels, with the extents that `extent` gives.
struct Tensor {
    data: Vec<f32>,
    dims: Vec<usize>,
    labels: Vec<u8>,
}

impl Tensor {
    fn random(seed: u64, labels: &str, extent: &dyn Fn(u8) -> usize) -> Self {
        let labels = labels.as_bytes().to_vec();
        let dims: Vec<usize> = labels.iter().map(|&l| extent(l)).collect();
        Tensor {
            data: random(seed, dims.iter().product()),
            dims,
            labels,
        }
    }

    fn operand(&self) -> Operand<'_> {
        Operand {
            data: &self.data,
            dims: &self.dims,
            labels: &self.labels,
        }
    }

    /// Flat index of the element at the given coordinates (by label).
    fn index(&self, at: &dyn Fn(u8) -> usize) -> usize {
        self.labels
            .iter()
            .zip(&self.dims)
            .fold(0, |sum, (&l, d)| sum * d + at(l))
    }

    /// The part with `label` in `range`.
    fn slice(&self, label: u8, range: Range<usize>) -> Self {
        let dim = position(&self.labels, label);
        let inner: usize = self.dims[dim + 1..].iter().product();
        let rows = self.data.chunks(self.dims[dim] * inner);
        let data = rows
            .flat_map(|c| c[range.start * inner..range.end * inner].to_vec())
            .collect();
        let mut dims = self.dims.clone();
        dims[dim] = range.len();
        Tensor {
            data,
            dims,
            labels: self.labels.clone(),
        }
    }
}

fn run(l: &Tensor, r: &Tensor, out: &str, threads: usize) -> Tensor {
    let labels = out.as_bytes().to_vec();
    let find = |t: &Tensor, l: &u8| t.labels.iter().position(|x| x == l).map(|i| t.dims[i]);
    let dims: Vec<usize> = labels
        .iter()
        .map(|x| find(l, x).or(find(r, x)).unwrap())
        .collect();
    let mut data = vec![f32::NAN; dims.iter().product()];
    dot_general(l.operand(), r.operand(), &labels, &mut data, threads);
    Tensor { data, dims, labels }
}

/// The same product as a sum over all labels in `f64`.
fn naive(l: &Tensor, r: &Tensor, out: &Tensor) -> Vec<f64> {
    let mut labels = [&l.labels[..], &r.labels].concat();
    labels.sort_unstable();
    labels.dedup();
    let find = |t: &Tensor, l: u8| t.labels.iter().position(|&x| x == l).map(|i| t.dims[i]);
    let extents: Vec<usize> = labels
        .iter()
        .map(|&x| find(l, x).or(find(r, x)).unwrap())
        .collect();
    let mut sum = vec![0.0; out.data.len()];
    for mut flat in 0..extents.iter().product() {
        let mut at = vec![0; labels.len()];
        for (coordinate, extent) in at.iter_mut().zip(&extents).rev() {
            *coordinate = flat % extent;
            flat /= extent;
        }
        let at = |label: u8| at[position(&labels, label)];
        sum[out.index(&at)] += f64::from(l.data[l.index(&at)]) * f64::from(r.data[r.index(&at)]);
    }
    sum
}

/// (lhs, rhs, out): the model's einsums, their gradients, and layouts that need packing.
const EINSUMS: [(&str, &str, &str); 20] = [
    ("bsh", "hf", "bsf"),
    ("bsf", "hf", "bsh"),
    ("bsh", "bsf", "hf"),
    ("bsh", "hcnd", "bscnd"),
    ("bscnd", "hcnd", "bsh"),
    ("bsh", "bscnd", "hcnd"),
    ("bsnd", "ndh", "bsh"),
    ("bsh", "vh", "bsv"),
    ("ech", "ehf", "ecf"),
    ("ech", "ecf", "ehf"),
    ("bsnd", "btnd", "bnst"),
    ("bnst", "btnd", "bsnd"),
    ("hf", "bsh", "bsf"),
    ("hf", "bsh", "bfs"),
    ("hbs", "dhn", "sdbn"),
    ("ndb", "dnf", "bf"),
    ("h", "h", ""),
    ("b", "f", "bf"),
    ("bs", "bs", "bs"),
    ("bs", "", "sb"),
];

#[test]
fn equals_the_naive_sum() {
    for (which, &(l, r, out)) in EINSUMS.iter().enumerate() {
        for seed in 0..6u64 {
            let extent = |label: u8| 1 + (usize::from(label) * 7 + seed as usize * 5) % 7;
            let l = Tensor::random(seed, l, &extent);
            let r = Tensor::random(50 + seed, r, &extent);
            let out = run(&l, &r, out, 1);
            assert_close(
                &out.data,
                &naive(&l, &r, &out),
                1e-5,
                &format!("einsum {which}"),
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn any_order_of_labels_equals_the_naive_sum(
        which in 0..EINSUMS.len(),
        keys in prop::collection::vec(any::<u32>(), 15),
        extents in prop::collection::vec(0usize..6, 26),
        threads in 0usize..4,
    ) {
        let shuffled = |labels: &str, from: usize| -> String {
            let mut order: Vec<(u32, char)> = keys[from..].iter().copied().zip(labels.chars()).collect();
            order.sort_unstable();
            order.into_iter().map(|(_, label)| label).collect()
        };
        let (l, r, out) = EINSUMS[which];
        let extent = |label: u8| extents[usize::from(label - b'a')];
        let l = Tensor::random(1, &shuffled(l, 0), &extent);
        let r = Tensor::random(2, &shuffled(r, 5), &extent);
        let out = run(&l, &r, &shuffled(out, 10), threads);
        assert_close(&out.data, &naive(&l, &r, &out), 1e-5, "einsum");
    }
}

/// The einsums of tensors with free dims, with every free and batch label sharded in turn.
#[test]
fn shards_equal_the_whole_bit_for_bit() {
    let extent = |label: u8| match label {
        b'h' => 300,
        b'f' | b'v' => 37,
        b's' | b'c' => 19,
        b'b' | b'e' => 3,
        _ => 5,
    };
    for &(l, r, out) in &EINSUMS[..15] {
        let (l, r) = (Tensor::random(1, l, &extent), Tensor::random(2, r, &extent));
        let whole = run(&l, &r, out, 1);
        for &label in out.as_bytes() {
            let shard = |t: &Tensor, range: Range<usize>| {
                if t.labels.contains(&label) {
                    t.slice(label, range)
                } else {
                    t.slice(t.labels[0], 0..t.dims[0])
                }
            };
            let cut = extent(label) / 2;
            for range in [0..1, 0..cut, cut..extent(label)] {
                let part = run(&shard(&l, range.clone()), &shard(&r, range.clone()), out, 1);
                let expected = whole.slice(label, range.clone());
                let label = char::from(label);
                assert_eq!(
                    bits(&part.data),
                    bits(&expected.data),
                    "{out}, {label} in {range:?}"
                );
            }
        }
    }
}

#[test]
fn the_number_of_threads_changes_nothing() {
    let extent = |label: u8| match label {
        b'h' => 260,
        b'f' => 150,
        b'e' => 5,
        _ => 77,
    };
    for (l, r, out) in [
        ("bsh", "hf", "bsf"),
        ("bsh", "bsf", "hf"),
        ("esh", "ehf", "esf"),
        ("hf", "bsh", "bfs"),
    ] {
        let (l, r) = (Tensor::random(1, l, &extent), Tensor::random(2, r, &extent));
        let one = run(&l, &r, out, 1);
        for threads in [2, 3, 5, 16] {
            assert_eq!(
                bits(&run(&l, &r, out, threads).data),
                bits(&one.data),
                "{threads} threads"
            );
        }
    }
}

#[test]
fn empty_dims() {
    let extent = |label: u8| if label == b'h' { 0 } else { 3 };
    for (l, r, out) in [
        ("bsh", "hf", "bsf"),
        ("bsh", "bsf", "hf"),
        ("hs", "fsh", "fs"),
    ] {
        let out = run(
            &Tensor::random(1, l, &extent),
            &Tensor::random(2, r, &extent),
            out,
            2,
        );
        assert!(out.data.iter().all(|&v| v == 0.0));
    }
}

#[test]
fn permutes() {
    let dims = [2, 3, 4, 5];
    let src: Vec<f32> = (0..120u8).map(f32::from).collect();
    for perm in [[0, 1, 2, 3], [3, 2, 1, 0], [0, 2, 1, 3], [2, 0, 3, 1]] {
        let mut out = vec![0.0; 120];
        permute(&src, &dims, &perm, &mut out);
        let strides = [60, 20, 5, 1];
        let to = perm.map(|d| dims[d]);
        for (flat, &value) in out.iter().enumerate() {
            let at = [
                flat / (to[1] * to[2] * to[3]),
                flat / (to[2] * to[3]) % to[1],
                flat / to[3] % to[2],
                flat % to[3],
            ];
            let from: usize = at.iter().zip(perm).map(|(i, d)| i * strides[d]).sum();
            assert_eq!(value, src[from]);
        }
    }
}

#[test]
#[should_panic(expected = "extents of label 'h' differ")]
fn a_contracting_extent_that_differs_panics() {
    let (a, b) = (
        Operand {
            data: &[1.0; 2],
            dims: &[2],
            labels: b"h",
        },
        Operand {
            data: &[1.0; 3],
            dims: &[3],
            labels: b"h",
        },
    );
    dot_general(a, b, b"", &mut [0.0], 1);
}

#[test]
#[should_panic(expected = "label 's' is in one tensor")]
fn a_label_in_one_tensor_panics() {
    let a = Operand {
        data: &[1.0; 2],
        dims: &[2],
        labels: b"s",
    };
    dot_general(
        a,
        Operand {
            data: &[1.0],
            dims: &[],
            labels: b"",
        },
        b"",
        &mut [0.0],
        1,
    );
}

/// `cargo test --release -p runtime throughput -- --ignored --nocapture`
#[test]
#[ignore = "prints throughput"]
fn throughput() {
    use std::hint::black_box;
    use std::time::Instant;
    let (batch_seq, hidden, ffn) = (1024, 768, 3072);
    let extent = |label: u8| match label {
        b'b' => 4,
        b's' => batch_seq / 4,
        b'h' => hidden,
        b'c' => 3,
        b'n' => 12,
        b'd' => 64,
        _ => ffn,
    };
    let gflops = |flops: usize, f: &mut dyn FnMut()| {
        f();
        let start = Instant::now();
        for _ in 0..5 {
            f();
        }
        5.0 * flops as f64 / start.elapsed().as_secs_f64() / 1e9
    };
    let (a, b) = (random(1, batch_seq * hidden), random(2, hidden * ffn));
    let mut c = vec![0.0; batch_seq * ffn];
    let size = (batch_seq, hidden, ffn);
    let raw = gflops(2 * batch_seq * hidden * ffn, &mut || {
        let (a, b) = (
            View {
                data: &a,
                row: hidden,
                col: 1,
            },
            View {
                data: &b,
                row: ffn,
                col: 1,
            },
        );
        gemm(size, a, b, Store::Overwrite, black_box(&mut c), ffn);
    });
    println!("raw gemm {size:?}: {raw:.1} GFLOP/s");
    for (l, r, out) in [
        ("bsh", "hf", "bsf"),
        ("bsf", "hf", "bsh"),
        ("bsh", "bsf", "hf"),
        ("bsh", "hcnd", "bscnd"),
        ("bscnd", "hcnd", "bsh"),
        ("bsh", "bscnd", "hcnd"),
        ("bsnd", "ndh", "bsh"),
    ] {
        let (lhs, rhs) = (Tensor::random(1, l, &extent), Tensor::random(2, r, &extent));
        let mut labels = [lhs.labels.clone(), rhs.labels.clone()].concat();
        labels.sort_unstable();
        labels.dedup();
        let flops = 2 * labels.iter().map(|&x| extent(x)).product::<usize>();
        let mut made = run(&lhs, &rhs, out, 1).data;
        let mut with = |threads| {
            gflops(flops, &mut || {
                dot_general(
                    lhs.operand(),
                    rhs.operand(),
                    out.as_bytes(),
                    black_box(&mut made),
                    threads,
                )
            })
        };
        let (one, two) = (with(1), with(2));
        println!("{l},{r}->{out}: {one:.1} GFLOP/s, two threads {two:.1}");
    }
}
