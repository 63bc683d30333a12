//! Chains that go through the same elements: functions of elements, and norms with sums.

use super::{ChainCase, OpOf, part, whole};
use crate::execute::Local;
use ir::op::{Binary, Unary};
use ir::{DType, OpKind};

const EPS: f64 = 1e-5;

fn binary(f: Binary) -> OpKind {
    OpKind::Binary { f }
}

fn silu() -> OpKind {
    OpKind::Unary { f: Unary::Silu }
}

fn made(name: String, tensors: Vec<Local>, ops: Vec<OpOf>, kept: &[bool]) -> ChainCase {
    ChainCase {
        name,
        tensors,
        ops,
        kept: kept.to_vec(),
        is_cleared: false,
        flops: 0.0,
    }
}

/// SwiGLU: gate, up, activation and product; its gradient over what it is made of.
fn swiglu(x: &Local) -> Vec<ChainCase> {
    let all = |n: usize| vec![x.clone(); n];
    let forward = || {
        vec![
            (silu(), vec![0], vec![2]),
            (binary(Binary::Mul), vec![2, 1], vec![3]),
        ]
    };
    // The gradient of the product, up, the activation and gate.
    let mul = |operands: [usize; 2], y| (binary(Binary::Mul), operands.to_vec(), vec![y]);
    let slope = |operands: [usize; 2], y| (binary(Binary::SiluGrad), operands.to_vec(), vec![y]);
    let apart = vec![mul([0, 1], 4), mul([0, 2], 5), slope([3, 4], 6)];
    let in_place = vec![mul([0, 1], 1), mul([0, 2], 2), slope([3, 1], 3)];
    let case = |name: &str, n, ops, kept: &[bool]| made(name.into(), all(n), ops, kept);
    vec![
        case("swiglu with its activation", 4, forward(), &[true, false]),
        case("swiglu", 4, forward(), &[false, false]),
        case("swiglu's gradient", 7, apart, &[false, true, false]),
        case(
            "swiglu's gradient in place",
            4,
            in_place,
            &[false, true, false],
        ),
    ]
}

/// A norm of a sum, and a sum of the gradient of a norm's argument and another gradient.
fn norms(x: &Local, rows: &Local, width: &Local) -> Vec<ChainCase> {
    let (x, rows, width) = (x.clone(), rows.clone(), width.clone());
    let sum = || (binary(Binary::Add), vec![0, 1], vec![2]);
    let all = |list: &[&Local]| list.iter().map(|l| (*l).clone()).collect::<Vec<_>>();
    let rms = vec![
        sum(),
        (OpKind::RmsNorm { eps: EPS }, vec![2, 3], vec![4, 5]),
    ];
    let layer = (OpKind::LayerNorm { eps: EPS }, vec![2, 3, 4], vec![5, 6, 7]);
    let layer = vec![sum(), layer];
    let of_rms = vec![
        (OpKind::RmsNormGradInput, vec![0, 1, 2, 3], vec![4]),
        (binary(Binary::Add), vec![5, 4], vec![5]),
    ];
    let of_layer = vec![
        (OpKind::LayerNormGradInput, vec![0, 1, 2, 3, 4], vec![5]),
        (binary(Binary::Add), vec![5, 6], vec![7]),
    ];
    let rms_tensors = all(&[&x, &x, &x, &width, &x, &rows]);
    let layer_tensors = all(&[&x, &x, &x, &width, &width, &x, &rows, &rows]);
    vec![
        made(
            "sum, rms norm".into(),
            rms_tensors.clone(),
            rms.clone(),
            &[true, false],
        ),
        made(
            "sum, rms norm, the sum used up".into(),
            rms_tensors,
            rms,
            &[false, false],
        ),
        made(
            "sum, layer norm".into(),
            layer_tensors,
            layer,
            &[true, false],
        ),
        made(
            "rms norm's gradient, sum in place".into(),
            all(&[&x, &x, &width, &rows, &x, &x]),
            of_rms,
            &[false, false],
        ),
        made(
            "layer norm's gradient, sum".into(),
            all(&[&x, &x, &width, &rows, &rows, &x, &x, &x]),
            of_layer,
            &[false, false],
        ),
    ]
}

/// Small chains of a float type, all of which are one kernel.
pub(super) fn cases(t: DType) -> Vec<ChainCase> {
    let s = |lens: &[u64]| whole(t, lens);
    // By eights, one by one, and with padding that a function makes something of.
    let mut all = swiglu(&s(&[2, 3, 16]));
    all.extend(swiglu(&s(&[3, 5])));
    let padded = part(t, &[(0, 3, 4), (0, 13, 16)]);
    let exp = OpKind::Unary { f: Unary::Exp };
    let scale = OpKind::Unary {
        f: Unary::Scale { by: 0.5 },
    };
    let four = vec![
        (scale, vec![0], vec![2]),
        (exp, vec![2], vec![3]),
        (binary(Binary::Mul), vec![3, 1], vec![4]),
        (binary(Binary::Add), vec![4, 0], vec![5]),
    ];
    let tensors = vec![padded; 6];
    all.push(made(
        "four functions, padded".into(),
        tensors,
        four,
        &[false, true, false, false],
    ));
    all.extend(norms(
        &s(&[2, 5, 16]),
        &whole(DType::F32, &[2, 5]),
        &s(&[16]),
    ));
    all
}

/// Chains of which there is no one kernel: rows that are not taken by eights.
#[cfg(test)]
pub(super) fn apart(t: DType) -> Vec<ChainCase> {
    norms(
        &whole(t, &[5, 6]),
        &whole(DType::F32, &[5]),
        &whole(t, &[6]),
    )
}

/// The chains of a training step of Llama 1B with so many samples of so many tokens, and the norms of
/// GPT-2 124M, in bf16.
pub(super) fn real(samples: u64, tokens: u64) -> Vec<ChainCase> {
    let b = |lens: &[u64]| whole(DType::Bf16, lens);
    let rows = whole(DType::F32, &[samples, tokens]);
    let mut all = swiglu(&b(&[samples, tokens, 8192]));
    for width in [2048, 768] {
        let mut these = norms(&b(&[samples, tokens, width]), &rows, &b(&[width]));
        for case in &mut these {
            case.name = format!("{}, {} x {width}", case.name, samples * tokens);
        }
        all.extend(these);
    }
    all
}
