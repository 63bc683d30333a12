//! The device suite, and every kernel against the CPU's.

// Operands and results are lists of parts that cases own.
#![allow(clippy::cloned_ref_to_slice_refs, clippy::useless_vec)]

use super::*;
use crate::device::Cpu;
use crate::execute::{Context, Local, narrow, widen};
use emulator::harness::is_emulated;
use ir::op::{Binary, Einsum, Keys, RopeScaling, SequenceOrder, Unary};
use ir::{DType, LocalRange, ReduceKind};

const STREAM: StreamId = StreamId(1);

#[test]
fn gpus_conform() {
    if is_emulated("device::cuda::tests::gpus_conform") {
        crate::device::conformance::passes(&|device, host| {
            Cuda::new(0, device, host).expect("the emulated GPU opens")
        });
    }
}

/// A part of a tensor: of each dim the first element, the valid and the padded length, of a whole
/// twice as long.
fn part(dtype: DType, dims: &[(u64, u64, u64)]) -> Local {
    let range = |&(start, valid, padded): &(u64, u64, u64)| LocalRange {
        start,
        valid,
        padded,
    };
    Local {
        dtype,
        lens: dims.iter().map(|d| 2 * d.2).collect(),
        ranges: dims.iter().map(range).collect(),
    }
}

fn whole(dtype: DType, lens: &[u64]) -> Local {
    Local::whole(dtype, lens)
}

/// A case: an op, its operands and its results.
struct Case(OpKind, Vec<Local>, Vec<Local>);

/// The bytes of an operand: numbers of both signs, or ids; padding is zero.
fn content(local: &Local, seed: usize) -> Vec<u8> {
    let n = local.elements();
    let mut words = vec![0u64; local.bytes().div_ceil(8)];
    let bytes = &mut bytemuck::cast_slice_mut(&mut words)[..local.bytes()];
    match local.dtype {
        DType::I32 => {
            let ids: Vec<i32> = (0..n).map(|i| ((i * 7 + seed) % 13) as i32 - 1).collect();
            bytes.copy_from_slice(bytemuck::cast_slice(&ids));
        }
        dtype => {
            let number = |i: usize| ((i * 37 + seed * 11) % 101) as f32 / 50.0 - 1.0;
            let values: Vec<f32> = (0..n).map(number).collect();
            narrow(dtype, &values, bytes);
        }
    }
    local.zero_padding(bytes);
    bytes.to_vec()
}

fn numbers(local: &Local, bytes: &[u8]) -> Vec<f32> {
    let mut words = vec![0u64; bytes.len().div_ceil(8)];
    let aligned: &mut [u8] = &mut bytemuck::cast_slice_mut(&mut words)[..bytes.len()];
    aligned.copy_from_slice(bytes);
    match local.dtype {
        DType::I32 => bytemuck::cast_slice::<u8, i32>(aligned)
            .iter()
            .map(|i| *i as f32)
            .collect(),
        dtype => widen(dtype, aligned).into_owned(),
    }
}

/// The results of an op on a device.
fn results<D: Device>(device: &mut D, case: &Case, context: &Context) -> Vec<Vec<f32>> {
    let Case(op, inputs, outputs) = case;
    let mut start = 0;
    let mut place = |local: &Local| {
        let at = Place {
            space: Space::Device,
            start,
            len: local.bytes(),
        };
        start = (start + local.bytes()).next_multiple_of(64);
        at
    };
    let xs: Vec<Place> = inputs.iter().map(&mut place).collect();
    let mut ys: Vec<Place> = outputs.iter().map(&mut place).collect();
    for (i, o) in op.in_place() {
        ys[*o] = xs[*i];
    }
    for (i, (&at, local)) in xs.iter().zip(inputs).enumerate() {
        let bytes = content(local, i + 1);
        let set = &mut |to: &mut [u8]| {
            to.copy_from_slice(&bytes);
            Ok(())
        };
        device.update(STREAM, at, set).expect("it is written");
    }
    let tensors = |places: &[Place], locals: &'static [Local]| -> Vec<Tensor<'static>> {
        let both = places.iter().zip(locals);
        both.map(|(&at, local)| Tensor { local, at }).collect()
    };
    let (ins, outs) = (
        tensors(&xs, inputs.clone().leak()),
        tensors(&ys, outputs.clone().leak()),
    );
    let work = Work::Compute {
        path: "a.test",
        op,
        inputs: &ins,
        outputs: &outs,
        context,
    };
    device
        .launch(STREAM, &work)
        .unwrap_or_else(|e| panic!("{op:?}: {e}"));
    let read = |(&at, local): (&Place, &Local)| {
        let bytes = device.read(STREAM, at);
        numbers(local, &bytes.unwrap_or_else(|e| panic!("{op:?}: {e}")))
    };
    ys.iter().zip(outputs).map(read).collect()
}

fn einsum(text: &str) -> OpKind {
    OpKind::DotGeneral {
        einsum: Einsum::parse(text).expect("an einsum"),
    }
}

/// Cases of a float type; statistics and losses are f32.
fn cases(t: DType) -> Vec<Case> {
    use DType::{F32, I32};
    let s = |dims: &[u64]| whole(t, dims);
    let f = |dims: &[u64]| whole(F32, dims);
    let i = |dims: &[u64]| whole(I32, dims);
    let p = |dims: &[(u64, u64, u64)]| part(t, dims);
    let padded = [(0, 3, 4), (5, 40, 40), (0, 6, 6)];
    let mut all = Vec::new();
    let mut add = |op, x: &[Local], y: &[Local]| all.push(Case(op, x.to_vec(), y.to_vec()));
    for g in [
        Unary::Neg,
        Unary::Scale { by: 0.3 },
        Unary::GeluErf,
        Unary::GeluTanh,
        Unary::Silu,
        Unary::Relu,
        Unary::Exp,
        Unary::Tanh,
        Unary::Square,
        Unary::Sigmoid,
    ] {
        add(OpKind::Unary { f: g }, &[p(&padded)], &[p(&padded)]);
    }
    for g in [
        Binary::Add,
        Binary::Sub,
        Binary::Mul,
        Binary::GeluErfGrad,
        Binary::GeluTanhGrad,
        Binary::SiluGrad,
        Binary::ReluGrad,
    ] {
        let x = p(&padded);
        add(OpKind::Binary { f: g }, &[x.clone(), x.clone()], &[x]);
    }
    let add_rows = OpKind::Binary { f: Binary::Add };
    add(add_rows, &[s(&[4, 40, 6]), s(&[6])], &[s(&[4, 40, 6])]);
    add(OpKind::ScaleRows, &[s(&[4, 6]), f(&[4])], &[s(&[4, 6])]);
    add(OpKind::Cast { dtype: F32 }, &[s(&[300])], &[f(&[300])]);
    add(OpKind::Cast { dtype: t }, &[f(&[300])], &[s(&[300])]);
    let dropout = |order| OpKind::Dropout {
        p: 0.4,
        key: "x.drop".into(),
        order,
    };
    let zigzag = SequenceOrder::Zigzag { ranks: 2 };
    let sharded = [(4, 4, 4), (8, 8, 8), (0, 6, 6)];
    add(
        dropout(SequenceOrder::Natural),
        &[p(&sharded)],
        &[p(&sharded)],
    );
    add(dropout(zigzag), &[p(&sharded)], &[p(&sharded)]);
    // Movement.
    let leading = vec![ir::Dim::Fixed(2), ir::Dim::Fixed(3)];
    add(OpKind::Broadcast { leading }, &[s(&[5])], &[s(&[2, 3, 5])]);
    let perm = vec![2, 0, 1];
    add(
        OpKind::Transpose { perm },
        &[s(&[2, 3, 5])],
        &[s(&[5, 2, 3])],
    );
    let (dim, start, len) = (1, 2, 3);
    add(
        OpKind::Slice { dim, start, len },
        &[s(&[4, 7, 3])],
        &[s(&[4, 3, 3])],
    );
    add(
        OpKind::Pad { dim, start, len: 7 },
        &[s(&[4, 3, 3])],
        &[s(&[4, 7, 3])],
    );
    let parts = [s(&[4, 5]), s(&[4, 5]), s(&[4, 5])];
    add(OpKind::Unstack { dim }, &[s(&[4, 3, 5])], &parts);
    add(OpKind::Stack { dim }, &parts, &[s(&[4, 3, 5])]);
    add(OpKind::Layout, &[p(&padded)], &[p(&padded)]);
    for (kind, dims) in [
        (ReduceKind::Sum, vec![0, 1]),
        (ReduceKind::Sum, vec![2]),
        (ReduceKind::Max, vec![0, 1]),
        (ReduceKind::Max, vec![0]),
    ] {
        let kept: Vec<_> = (0..3)
            .filter(|d| !dims.contains(d))
            .map(|d| padded[d])
            .collect();
        add(OpKind::Reduce { kind, dims }, &[p(&padded)], &[p(&kept)]);
    }
    // Products.
    for (text, l, r, y) in [
        (
            "bsh,hf->bsf",
            vec![2, 40, 24],
            vec![24, 70],
            vec![2, 40, 70],
        ),
        (
            "bsf,hf->bsh",
            vec![2, 40, 70],
            vec![24, 70],
            vec![2, 40, 24],
        ),
        (
            "bsh,bsf->hf",
            vec![2, 40, 24],
            vec![2, 40, 70],
            vec![24, 70],
        ),
        (
            "bsh,hcnd->bscnd",
            vec![2, 5, 12],
            vec![12, 3, 2, 4],
            vec![2, 5, 3, 2, 4],
        ),
        (
            "bsnd,ndh->bsh",
            vec![2, 5, 3, 4],
            vec![3, 4, 12],
            vec![2, 5, 12],
        ),
        (
            "bsh,bsnd->hnd",
            vec![2, 5, 12],
            vec![2, 5, 3, 4],
            vec![12, 3, 4],
        ),
        (
            "bsh,bsnd->nhd",
            vec![2, 5, 12],
            vec![2, 5, 3, 4],
            vec![3, 12, 4],
        ),
        (
            "ebch,ehf->ebcf",
            vec![3, 2, 5, 8],
            vec![3, 8, 6],
            vec![3, 2, 5, 6],
        ),
        ("ij,kj->ki", vec![1, 33], vec![66, 33], vec![66, 1]),
    ] {
        add(einsum(text), &[s(&l), s(&r)], &[s(&y)]);
    }
    // Rows.
    let (x, w, r) = (s(&[2, 5, 70]), s(&[70]), f(&[2, 5]));
    let eps = 1e-5;
    let norm = OpKind::LayerNorm { eps };
    add(
        norm,
        &[x.clone(), w.clone(), w.clone()],
        &[x.clone(), r.clone(), r.clone()],
    );
    let grad = [&x, &x, &w, &r, &r].map(Local::clone);
    add(OpKind::LayerNormGradInput, &grad, &[x.clone()]);
    let grad = [&x, &x, &r, &r].map(Local::clone);
    add(OpKind::LayerNormGradWeight, &grad, &[w.clone(), w.clone()]);
    add(
        OpKind::RmsNorm { eps },
        &[x.clone(), w.clone()],
        &[x.clone(), r.clone()],
    );
    add(
        OpKind::RmsNormGradInput,
        &[&x, &x, &w, &r].map(Local::clone),
        &[x.clone()],
    );
    add(
        OpKind::RmsNormGradWeight,
        &[&x, &x, &r].map(Local::clone),
        &[w],
    );
    let table = p(&[(3, 5, 6), (0, 7, 7)]);
    add(
        OpKind::Embedding,
        &[table.clone(), i(&[2, 30])],
        &[s(&[2, 30, 7])],
    );
    let vocab = 12;
    add(
        OpKind::EmbeddingGrad { vocab },
        &[i(&[2, 30]), s(&[2, 30, 7])],
        &[table],
    );
    let logits = p(&[(0, 30, 30), (3, 5, 6)]);
    let (n, ids) = (part(F32, &[(0, 30, 30)]), part(I32, &[(0, 30, 30)]));
    add(OpKind::LogSumExp, &[logits.clone()], &[n.clone()]);
    add(
        OpKind::CrossEntropy,
        &[logits.clone(), n.clone(), ids.clone()],
        &[n.clone()],
    );
    add(
        OpKind::CrossEntropyGrad,
        &[logits.clone(), n.clone(), ids, n],
        &[logits],
    );
    let natural = SequenceOrder::Natural;
    for (inverse, part, order) in [
        (false, None, natural),
        (true, None, zigzag),
        (false, Some(4), natural),
        (true, Some(2), zigzag),
    ] {
        let x = p(&[(0, 2, 2), (8, 8, 8), (0, 3, 3), (0, 8, 8)]);
        let rotary = OpKind::Rotary {
            theta: 10000.0,
            scaling: RopeScaling::Linear { factor: 2.0 },
            inverse,
            part,
            order,
        };
        add(rotary, &[x.clone()], &[x]);
    }
    // Attention: all keys by position and in zigzag order, with dropout, and parts of a ring.
    for (order, keys, dropout) in [
        (SequenceOrder::Natural, Keys::All, 0.0),
        (SequenceOrder::Natural, Keys::All, 0.3),
        (zigzag, Keys::All, 0.3),
        (
            SequenceOrder::Natural,
            Keys::Ring { step: 0, ranks: 2 },
            0.0,
        ),
        (zigzag, Keys::Ring { step: 1, ranks: 2 }, 0.0),
    ] {
        let is_ring = keys != Keys::All;
        let (n_q, n_k, first) = (
            40,
            if is_ring { 40 } else { 80 },
            if is_ring { 0 } else { 40 },
        );
        let range = |start, n| LocalRange {
            start,
            valid: n,
            padded: n,
        };
        let of = |dtype, seq: LocalRange, rest: &[u64]| {
            let mut local = whole(dtype, &[&[2, 80], rest].concat());
            local.ranges[1] = seq;
            local
        };
        let q = of(t, range(40, n_q), &[2, 3, 36]);
        let k = of(t, range(if is_ring { first } else { 0 }, n_k), &[2, 36]);
        let lse = of(F32, range(40, n_q), &[2, 3]);
        let (o, sum) = match is_ring {
            true => (of(F32, range(40, n_q), &[2, 3, 36]), F32),
            false => (q.clone(), t),
        };
        let (scale, key) = (0.4, String::from("x.attn"));
        let mut x = vec![q.clone(), k.clone(), k.clone()];
        if keys.continues() {
            x.extend([o.clone(), lse.clone()]);
        }
        let kind = OpKind::Attention {
            scale,
            dropout,
            key: key.clone(),
            order,
            keys,
        };
        add(kind, &x, &[o.clone(), lse.clone()]);
        let mut x = vec![q.clone(), k.clone(), k.clone(), q.clone(), lse, q.clone()];
        let dq = Local { dtype: sum, ..q };
        let dk = Local { dtype: sum, ..k };
        if keys.continues() {
            x.push(dq.clone());
        }
        let kind = OpKind::AttentionGrad {
            scale,
            dropout,
            key,
            order,
            keys,
        };
        add(kind, &x, &[dq, dk.clone(), dk]);
    }
    // The end of a step, in f32.
    let (one, w) = (f(&[]), f(&[300]));
    add(
        OpKind::Accumulate { dtype: F32 },
        &[s(&[300])],
        &[w.clone()],
    );
    add(OpKind::SumSquares, &[s(&[3000])], &[one.clone()]);
    add(OpKind::GlobalNorm, &vec![f(&[11]); 11], &[one.clone()]);
    for max_norm in [None, Some(0.1)] {
        let scalars = [f(&[1]), f(&[1])];
        add(
            OpKind::ClipCoefficient { max_norm },
            &scalars,
            &[one.clone()],
        );
    }
    let scale = OpKind::UpdateLossScale { growth_interval: 2 };
    add(scale, &vec![one.clone(); 4], &vec![one.clone(); 3]);
    let adam = OpKind::AdamW {
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
    };
    let sgd = OpKind::Sgd {
        momentum: 0.9,
        weight_decay: 0.01,
    };
    let x = [&w, &w, &w, &w, &one].map(Local::clone);
    add(adam, &x, &[w.clone(), w.clone(), w.clone()]);
    add(sgd, &[&w, &w, &w, &one].map(Local::clone), &[w.clone(), w]);
    all
}

#[test]
fn kernels_give_what_the_cpu_s_give() {
    if !is_emulated("device::cuda::tests::kernels_give_what_the_cpu_s_give") {
        return;
    }
    let context = Context {
        seed: 3,
        step: 2,
        updates: 4,
        lr: 0.1,
        first_sample: 5,
        training: true,
        threads: 1,
    };
    let mut wrong = Vec::new();
    for (dtype, rounding) in [(DType::F32, 2e-5), (DType::Bf16, 2e-2), (DType::F16, 3e-3)] {
        for case in cases(dtype) {
            let bytes = 1 << 20;
            let expected = results(&mut Cpu::new(bytes, 0, 1), &case, &context);
            let mut gpu = Cuda::new(0, bytes, 0).expect("the emulated GPU opens");
            let got = results(&mut gpu, &case, &context);
            for (o, (got, expected)) in got.iter().zip(&expected).enumerate() {
                let largest = expected.iter().filter(|x| x.is_finite());
                let largest = largest.fold(1.0f32, |m, x| m.max(x.abs()));
                let same = |a: f32, b: f32| {
                    a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= rounding * largest
                };
                let off = got.iter().zip(expected).position(|(a, b)| !same(*a, *b));
                if let Some(at) = off {
                    wrong.push(format!(
                        "{:?} of {dtype:?}: result {o}, element {at}: {}, not {}",
                        case.0, got[at], expected[at]
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
