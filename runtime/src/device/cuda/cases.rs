//! Ops to try a device with: small ones of every kind, which the CPU computes too, and ones of real
//! sizes, which are timed.

mod attention;
pub(super) mod chains;
mod experts;
mod images;

use super::library::{Gpu, count};
use super::{Cuda, Matmuls, Multiplier};
use crate::device::{Cpu, Device, Place, Tensor, Work};
use crate::error::RuntimeError;
use crate::execute::{Context, Local, narrow, widen};
use ir::op::{Binary, Einsum, RopeScaling, SequenceOrder, Unary};
use ir::program::Space;
use ir::{DType, LocalRange, OpKind, ReduceKind, StreamId};

const STREAM: StreamId = StreamId(1);

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
pub(super) struct Case(pub OpKind, pub Vec<Local>, pub Vec<Local>);

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

/// Lays operands and results of a case one after the other; updates write in place.
fn places(case: &Case) -> (Vec<Place>, Vec<Place>, usize) {
    let Case(op, inputs, outputs) = case;
    let mut start = 0;
    let mut place = |local: &Local| {
        let at = Place {
            space: Space::Device,
            start,
            len: local.bytes(),
        };
        start = (start + local.bytes()).next_multiple_of(256);
        at
    };
    let xs: Vec<Place> = inputs.iter().map(&mut place).collect();
    let mut ys: Vec<Place> = outputs.iter().map(&mut place).collect();
    for (i, o) in op.in_place() {
        ys[*o] = xs[*i];
    }
    (xs, ys, start)
}

/// The bytes of a case's operands.
fn contents(case: &Case) -> Vec<Vec<u8>> {
    let Case(op, inputs, _) = case;
    let slots = |local: &Local| match local.dtype {
        DType::I32 => experts::slots(case, local),
        _ => None,
    };
    let of = |(i, local): (usize, &Local)| match op {
        OpKind::EmbeddingGrad { vocab } if local.dtype == DType::I32 && *vocab > MANY_ROWS => {
            bytemuck::cast_slice(&ids_of_text(local.elements(), *vocab)).to_vec()
        }
        _ => match slots(local) {
            Some(slots) => {
                let mut bytes = bytemuck::cast_slice(&slots).to_vec();
                local.zero_padding(&mut bytes);
                bytes
            }
            None => content(local, i + 1),
        },
    };
    inputs.iter().enumerate().map(of).collect()
}

/// Tables of so many rows have the gradients of a text's ids.
const MANY_ROWS: u64 = 1000;

/// Ids of which, as in a text, the one of rank k comes about once in k * ln(vocab) times.
fn ids_of_text(n: usize, vocab: u64) -> Vec<i32> {
    let mut random = 1u64;
    let mut next = || {
        random = random
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (random >> 40) as f64 / (1u64 << 24) as f64
    };
    let id = |u: f64| ((vocab as f64 + 1.0).powf(u) - 1.0) as i32;
    (0..n).map(|_| id(next())).collect()
}

/// Writes a case's operands to a device.
fn write<D: Device>(device: &mut D, xs: &[Place], bytes: &[Vec<u8>]) -> Result<(), RuntimeError> {
    for (&at, bytes) in xs.iter().zip(bytes) {
        device.update(STREAM, at, &mut |to: &mut [u8]| {
            to.copy_from_slice(bytes);
            Ok(())
        })?;
    }
    Ok(())
}

/// Puts the op of a case on the stream.
fn play<D: Device>(
    device: &mut D,
    case: &Case,
    (xs, ys): (&[Place], &[Place]),
    context: &Context,
) -> Result<(), RuntimeError> {
    let Case(op, inputs, outputs) = case;
    let tensor = |(&at, local)| Tensor { local, at };
    let ins: Vec<Tensor<'_>> = xs.iter().zip(inputs).map(tensor).collect();
    let outs: Vec<Tensor<'_>> = ys.iter().zip(outputs).map(tensor).collect();
    let work = Work::Compute {
        path: "a.test",
        op,
        inputs: &ins,
        outputs: &outs,
        context,
    };
    device.launch(STREAM, &work).map(|_| ())
}

/// The results of an op on a device.
pub(super) fn results<D: Device>(
    device: &mut D,
    case: &Case,
    context: &Context,
) -> Result<Vec<Vec<f32>>, RuntimeError> {
    results_of(device, case, &contents(case), context)
}

/// The same for operands of these bytes.
pub(super) fn results_of<D: Device>(
    device: &mut D,
    case: &Case,
    bytes: &[Vec<u8>],
    context: &Context,
) -> Result<Vec<Vec<f32>>, RuntimeError> {
    let (xs, ys, _) = places(case);
    results_at(device, case, (&xs, &ys), bytes, context)
}

/// The results where the first one takes the place of an operand, which has its dims and type.
#[cfg(test)]
pub(super) fn results_over<D: Device>(
    device: &mut D,
    case: &Case,
    operand: usize,
    context: &Context,
) -> Result<Vec<Vec<f32>>, RuntimeError> {
    let (xs, mut ys, _) = places(case);
    ys[0] = xs[operand];
    results_at(device, case, (&xs, &ys), &contents(case), context)
}

fn results_at<D: Device>(
    device: &mut D,
    case: &Case,
    (xs, ys): (&[Place], &[Place]),
    bytes: &[Vec<u8>],
    context: &Context,
) -> Result<Vec<Vec<f32>>, RuntimeError> {
    write(device, xs, bytes)?;
    play(device, case, (xs, ys), context)?;
    let read = |(&at, local): (&Place, &Local)| Ok(numbers(local, &device.read(STREAM, at)?));
    ys.iter().zip(&case.2).map(read).collect()
}

fn einsum(text: &str) -> OpKind {
    OpKind::DotGeneral {
        einsum: Einsum::parse(text).expect("an einsum"),
    }
}

/// Cases of a float type; statistics and losses are f32.
// Operands and results are lists of parts that cases own.
#[allow(clippy::cloned_ref_to_slice_refs, clippy::useless_vec)]
pub(super) fn cases(t: DType) -> Vec<Case> {
    use DType::{F32, I32};
    let s = |dims: &[u64]| whole(t, dims);
    let f = |dims: &[u64]| whole(F32, dims);
    let i = |dims: &[u64]| whole(I32, dims);
    let p = |dims: &[(u64, u64, u64)]| part(t, dims);
    let padded = [(0, 3, 4), (5, 40, 40), (0, 6, 6)];
    let mut all = attention::small(t);
    all.extend(experts::small(t));
    all.extend(images::small(t));
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
    let add_rows = OpKind::Binary { f: Binary::Add };
    add(add_rows, &[s(&[4, 40]), s(&[40])], &[s(&[4, 40])]);
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
    let eights = [(4, 4, 4), (8, 8, 8), (8, 16, 16)];
    add(dropout(zigzag), &[p(&eights)], &[p(&eights)]);
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
    for (shared, own) in [(3, 4), (8, 16)] {
        let both = [s(&[2, 5, shared]), s(&[2, 5, 3, own])];
        add(OpKind::Join, &both, &[s(&[2, 5, 3, shared + own])]);
    }
    // By words of 16, 8 and 4 bytes, as lengths and beginnings allow.
    for width in [16, 12, 8, 4, 2] {
        let parts = [s(&[40, width]), s(&[40, width]), s(&[40, width])];
        add(OpKind::Unstack { dim }, &[s(&[40, 3, width])], &parts);
        add(OpKind::Stack { dim }, &parts, &[s(&[40, 3, width])]);
        let (start, len) = (width, 2 * width);
        let (long, short) = (s(&[5, 4 * width]), s(&[5, len]));
        add(
            OpKind::Slice { dim, start, len },
            &[long.clone()],
            &[short.clone()],
        );
        let len = 4 * width;
        add(OpKind::Pad { dim, start, len }, &[short], &[long]);
    }
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
    // The values of the members of a group.
    let (kind, dims) = (ReduceKind::LogSumExp, vec![0]);
    add(
        OpKind::Reduce { kind, dims },
        &[s(&[3, 2, 5])],
        &[s(&[2, 5])],
    );
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
    // Rows in registers: of a warp, and of a block of two.
    for (rows, width) in [(9, 72), (3, 1096)] {
        let (x, w, r) = (s(&[rows, width]), s(&[width]), f(&[rows]));
        let (y, both) = ([&x, &r].map(Local::clone), [&x, &r, &r].map(Local::clone));
        let layer = [&x, &w, &w].map(Local::clone);
        add(OpKind::LayerNorm { eps }, &layer, &both);
        add(OpKind::RmsNorm { eps }, &layer[..2], &y);
        let grad = [&x, &x, &w, &r, &r].map(Local::clone);
        add(OpKind::LayerNormGradInput, &grad, &[x.clone()]);
        add(OpKind::RmsNormGradInput, &grad[..4], &[x]);
    }
    // Sums over rows in several parts, and several blocks of columns.
    let (x, w, r) = (s(&[300, 264]), s(&[264]), f(&[300]));
    let grad = [&x, &x, &r, &r].map(Local::clone);
    add(OpKind::LayerNormGradWeight, &grad, &[w.clone(), w.clone()]);
    add(OpKind::RmsNormGradWeight, &grad[..3], &[w.clone()]);
    let (kind, dims) = (ReduceKind::Sum, vec![0]);
    add(OpKind::Reduce { kind, dims }, &[x.clone()], &[w]);
    let dims = vec![0, 1];
    add(OpKind::Reduce { kind, dims }, &[x.clone()], &[s(&[])]);
    add(OpKind::ScaleRows, &[x.clone(), r], &[x]);
    let (table, ids) = (s(&[11, 16]), i(&[2, 30]));
    add(OpKind::Embedding, &[table, ids], &[s(&[2, 30, 16])]);
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
    for vocabulary in [(3, 5, 6), (3, 10, 16)] {
        let logits = p(&[(0, 30, 30), vocabulary]);
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
    }
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
    // By eights, with heads that no group of four holds, and elements that stay.
    for (inverse, part) in [(false, None), (true, Some(32))] {
        let x = p(&[(0, 2, 2), (8, 8, 8), (0, 5, 5), (0, 48, 48)]);
        let rotary = OpKind::Rotary {
            theta: 10000.0,
            scaling: RopeScaling::None,
            inverse,
            part,
            order: natural,
        };
        add(rotary, &[x.clone()], &[x]);
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

/// The facts of a run that the tests' ops know.
pub(super) fn context() -> Context {
    Context {
        seed: 3,
        step: 2,
        updates: 4,
        lr: 0.1,
        first_sample: 5,
        training: true,
        threads: 1,
    }
}

/// Memory that every small case fits.
pub(super) const SMALL: usize = 2 << 20;

/// Who is asked for a case.
pub(super) fn multipliers(case: &Case) -> &'static [Multiplier] {
    match case.0 {
        OpKind::DotGeneral { .. }
        | OpKind::Conv2d { .. }
        | OpKind::Conv2dGradInput { .. }
        | OpKind::Conv2dGradWeight { .. } => {
            &[Multiplier::Plain, Multiplier::Library, Multiplier::Tuned]
        }
        _ => &[Multiplier::Plain],
    }
}

/// A result of an op on the GPU beside the CPU's.
#[derive(Clone, Debug)]
pub struct Compared {
    /// The op, as it is printed for debugging.
    pub op: String,
    /// Element type of the operands.
    pub dtype: DType,
    /// Who multiplies, where the op is a product.
    pub by: Multiplier,
    /// Norm of the difference over the norm of the CPU's results; infinite where one side has a
    /// number and the other has none. An error has none.
    pub error: Result<f64, String>,
    /// The most that rounding explains.
    pub limit: f64,
}

/// Norm of the difference of two lists over that of the second.
fn error_by_norm(got: &[f32], expected: &[f32]) -> f64 {
    let (mut difference, mut norm) = (0.0, 0.0);
    for (&a, &b) in got.iter().zip(expected) {
        if a.is_finite() && b.is_finite() {
            difference += (f64::from(a) - f64::from(b)).powi(2);
            norm += f64::from(b).powi(2);
        } else if a != b && !(a.is_nan() && b.is_nan()) {
            return f64::INFINITY;
        }
    }
    match difference == 0.0 {
        true => 0.0,
        false => (difference / norm.max(f64::MIN_POSITIVE)).sqrt(),
    }
}

/// Every kernel on GPU 0 against the CPU's, on small operands in f32, bf16 and f16.
///
/// Fails where there is no GPU; what a kernel does wrong is in its comparison.
pub fn compare(mut on: impl FnMut(Compared)) -> Result<(), RuntimeError> {
    let context = context();
    count()?;
    // Kernels live as long as somebody has the GPU open.
    let _open = Gpu::open(0)?;
    for (dtype, limit) in [(DType::F32, 1e-5), (DType::Bf16, 1e-2), (DType::F16, 2e-3)] {
        for case in cases(dtype) {
            let expected = results(&mut Cpu::new(SMALL, 0, 1), &case, &context)?;
            for &by in multipliers(&case) {
                let mut gpu = Cuda::with(0, SMALL, 0, Matmuls { by, tf32: false })?;
                let error = results(&mut gpu, &case, &context).map(|got| {
                    let both = got.iter().zip(&expected).zip(&case.2);
                    let errors = both.map(|((a, b), local)| match local.dtype {
                        DType::I32 if a != b => f64::INFINITY,
                        _ => error_by_norm(a, b),
                    });
                    errors.fold(0.0, f64::max)
                });
                on(Compared {
                    op: format!("{:?}", case.0),
                    dtype,
                    by,
                    error: error.map_err(|e| e.to_string()),
                    limit,
                });
            }
        }
        chains::compare((dtype, limit), &mut on)?;
    }
    Ok(())
}

/// The time of an op of a real size.
#[derive(Clone, Debug)]
pub struct Timed {
    /// Its name, and its sizes.
    pub op: String,
    /// Who multiplies, where it is a product.
    pub by: Multiplier,
    /// Seconds of each repetition, by the device's events.
    pub times_s: Vec<f64>,
    /// Floating-point operations, where it is a product or attention.
    pub flops: f64,
    /// Bytes of operands and results.
    pub bytes: f64,
    /// The problem, if there was one.
    pub error: Option<String>,
}

/// The ops of a training step of GPT-2 124M with so many samples of so many tokens, and those of
/// mixtures of experts, in bf16, each with its floating-point operations where they bound it.
fn real(samples: u64, tokens: u64) -> Vec<(String, Case, f64)> {
    use DType::{Bf16, F32, I32};
    let (width, vocabulary) = (768u64, 50304u64);
    let (b, f) = (|d: &[u64]| whole(Bf16, d), |d: &[u64]| whole(F32, d));
    let x = [samples, tokens, width];
    let rows = samples * tokens;
    let mut all = Vec::new();
    let mut add = |name: String, op: OpKind, xs: Vec<Local>, ys: Vec<Local>, flops: f64| {
        all.push((name, Case(op, xs, ys), flops));
    };
    for (what, out) in [
        ("qkv", 3 * width),
        ("mlp", 4 * width),
        ("logits", vocabulary),
    ] {
        let (y, w) = ([samples, tokens, out], [width, out]);
        let flops = 2.0 * rows as f64 * width as f64 * out as f64;
        for (kind, text, l, r, to) in [
            ("forward", "bsh,hf->bsf", b(&x), b(&w), b(&y)),
            ("gradient of the input", "bsf,hf->bsh", b(&y), b(&w), b(&x)),
            ("gradient of the weight", "bsh,bsf->hf", b(&x), b(&y), b(&w)),
        ] {
            let name = format!("{what} {kind}, {rows} x {width} x {out}");
            add(name, einsum(text), vec![l, r], vec![to], flops);
        }
    }
    all.extend(attention::timed(samples, tokens));
    all.extend(experts::real([samples, tokens]));
    let mut add = |name: String, op: OpKind, xs: Vec<Local>, ys: Vec<Local>, flops: f64| {
        all.push((name, Case(op, xs, ys), flops));
    };
    let (w, row) = (b(&[width]), f(&[samples, tokens]));
    let mut plain = |name: &str, op: OpKind, xs: &[&Local], ys: &[&Local]| {
        let own = |locals: &[&Local]| locals.iter().map(|l| (*l).clone()).collect::<Vec<_>>();
        add(name.into(), op, own(xs), own(ys), 0.0);
    };
    let (x, hidden) = (b(&x), b(&[samples, tokens, 4 * width]));
    let eps = 1e-5;
    plain(
        "layer norm",
        OpKind::LayerNorm { eps },
        &[&x, &w, &w],
        &[&x, &row, &row],
    );
    let xs = [&x, &x, &w, &row, &row];
    plain(
        "layer norm's gradient",
        OpKind::LayerNormGradInput,
        &xs,
        &[&x],
    );
    let xs = [&x, &x, &row, &row];
    plain(
        "layer norm's weights' gradients",
        OpKind::LayerNormGradWeight,
        &xs,
        &[&w, &w],
    );
    let gelu = OpKind::Unary { f: Unary::GeluTanh };
    plain("gelu", gelu, &[&hidden], &[&hidden]);
    let gelu = OpKind::Binary {
        f: Binary::GeluTanhGrad,
    };
    plain("gelu's gradient", gelu, &[&hidden, &hidden], &[&hidden]);
    let sum = OpKind::Binary { f: Binary::Add };
    plain("residual", sum.clone(), &[&x, &x], &[&x]);
    plain("bias", sum, &[&hidden, &b(&[4 * width])], &[&hidden]);
    let (kind, dims) = (ReduceKind::Sum, vec![0, 1]);
    plain(
        "bias's gradient",
        OpKind::Reduce { kind, dims },
        &[&hidden],
        &[&b(&[4 * width])],
    );
    let (table, ids) = (b(&[vocabulary, width]), whole(I32, &[samples, tokens]));
    plain("embedding", OpKind::Embedding, &[&table, &ids], &[&x]);
    let grad = OpKind::EmbeddingGrad { vocab: vocabulary };
    plain(
        "embedding's gradient, ids as in text",
        grad,
        &[&ids, &x],
        &[&table],
    );
    let logits = b(&[samples, tokens, vocabulary]);
    plain("log-sum-exp", OpKind::LogSumExp, &[&logits], &[&row]);
    let xs = [&logits, &row, &ids, &row];
    plain(
        "cross entropy's gradient",
        OpKind::CrossEntropyGrad,
        &xs,
        &[&logits],
    );
    let p = f(&[vocabulary * width]);
    plain("sum of squares", OpKind::SumSquares, &[&p], &[&f(&[])]);
    let adam = OpKind::AdamW {
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
    };
    plain("AdamW", adam, &[&p, &p, &p, &p, &f(&[])], &[&p, &p, &p]);
    let cast = OpKind::Cast { dtype: Bf16 };
    plain("cast", cast, &[&p], &[&b(&[vocabulary * width])]);
    // Moves between a projection to queries, keys and values, and attention.
    let (heads, of_head, dim) = (12, 64, 2);
    let q = b(&[samples, tokens, heads, of_head]);
    let qkv = b(&[samples, tokens, 3, heads, of_head]);
    plain("unstack", OpKind::Unstack { dim }, &[&qkv], &[&q, &q, &q]);
    plain("stack", OpKind::Stack { dim }, &[&q, &q, &q], &[&qkv]);
    for (name, inverse) in [("rotary", false), ("rotary's gradient", true)] {
        let rotary = OpKind::Rotary {
            theta: 500_000.0,
            scaling: RopeScaling::None,
            inverse,
            part: None,
            order: SequenceOrder::Natural,
        };
        plain(name, rotary, &[&q], &[&q]);
    }
    plain("rms norm", OpKind::RmsNorm { eps }, &[&x, &w], &[&x, &row]);
    let xs = [&x, &x, &w, &row];
    plain("rms norm's gradient", OpKind::RmsNormGradInput, &xs, &[&x]);
    let xs = [&x, &x, &row];
    plain(
        "rms norm's weight's gradient",
        OpKind::RmsNormGradWeight,
        &xs,
        &[&w],
    );
    let gate = OpKind::Unary { f: Unary::Silu };
    plain("silu", gate, &[&hidden], &[&hidden]);
    let gate = OpKind::Binary {
        f: Binary::SiluGrad,
    };
    plain("silu's gradient", gate, &[&hidden, &hidden], &[&hidden]);
    all
}

/// Times the chains and the ops of a training step of GPT-2 124M on GPU 0, until `is_over`.
///
/// Fails where there is no GPU.
pub fn time(
    (samples, tokens, repetitions): (u64, u64, usize),
    is_over: impl Fn() -> bool,
    mut on: impl FnMut(Timed),
) -> Result<(), RuntimeError> {
    count()?;
    let _open = Gpu::open(0)?;
    chains::time((samples, tokens, repetitions), &is_over, &mut on)?;
    for (name, case, flops) in real(samples, tokens) {
        let (xs, ys, bytes) = places(&case);
        for &by in multipliers(&case) {
            if is_over() {
                return Ok(());
            }
            let mut gpu = Cuda::with(0, bytes, 0, Matmuls { by, tf32: false })?;
            let timed = repeat(&mut gpu, &case, (&xs, &ys), repetitions);
            let moved = case
                .1
                .iter()
                .chain(&case.2)
                .map(Local::bytes)
                .sum::<usize>();
            let (times_s, error) = match timed {
                Ok(times_s) => (times_s, None),
                Err(e) => (Vec::new(), Some(e.to_string())),
            };
            on(Timed {
                op: name.clone(),
                by,
                times_s,
                flops,
                bytes: moved as f64,
                error,
            });
        }
    }
    Ok(())
}

fn repeat(
    gpu: &mut Cuda,
    case: &Case,
    at: (&[Place], &[Place]),
    repetitions: usize,
) -> Result<Vec<f64>, RuntimeError> {
    let context = context();
    write(gpu, at.0, &contents(case))?;
    play(gpu, case, at, &context)?;
    let mut ticks = Vec::new();
    for _ in 0..repetitions {
        let began = gpu.tick(STREAM)?;
        play(gpu, case, at, &context)?;
        ticks.push((began, gpu.tick(STREAM)?));
    }
    gpu.finish()?;
    let seconds = |(a, b)| Ok(gpu.elapsed(a, b)?.wall_s);
    ticks.iter().map(|(a, b)| seconds((a, b))).collect()
}
