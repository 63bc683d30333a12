//! Matrix multiplication in general.

use super::family::*;

pub(super) static FAMILY: Family = Family {
    infer,
    rule,
    work,
    gradient,
    groups: singly,
};

fn infer(cx: &Operands<'_>) -> Result<Vec<TensorType>, OpError> {
    let x = cx.x;
    let OpKind::DotGeneral { einsum } = cx.kind else {
        return cx.stranger();
    };
    cx.float(0)?;
    cx.ensure(x[0].dtype == x[1].dtype, || {
        format!("dtypes differ: {} and {}", x[0], x[1])
    })?;
    for (t, labels) in x.iter().zip([&einsum.lhs, &einsum.rhs]) {
        cx.ensure(t.shape.rank() == labels.len(), || {
            format!("{t} does not have the dims of {einsum}")
        })?;
    }
    let dim = |label: u8| {
        let find =
            |i: usize, ls: &[u8]| ls.iter().position(|&l| l == label).map(|p| x[i].shape.0[p]);
        (find(0, &einsum.lhs), find(1, &einsum.rhs))
    };
    for &l in &einsum.lhs {
        if let (Some(a), Some(b)) = dim(l) {
            cx.ensure(a == b, || {
                format!("label {} is {a} and {b} in {einsum}", l as char)
            })?;
        }
    }
    let dims = einsum
        .out
        .iter()
        .filter_map(|&l| dim(l).0.or(dim(l).1))
        .collect();
    one(TensorType::new(x[0].dtype, Shape(dims)))
}

fn rule(b: &mut Builder, kind: &OpKind, x: &[TensorType], _: &[TensorType]) {
    let OpKind::DotGeneral { einsum } = kind else {
        return;
    };
    let mut labels: Vec<(u8, FactorId)> = Vec::new();
    for (t, ls) in x.iter().zip([&einsum.lhs, &einsum.rhs]) {
        for (&d, &l) in t.shape.0.iter().zip(ls) {
            if !labels.iter().any(|(k, _)| *k == l) {
                labels.push((l, b.factor(d, true)));
            }
        }
    }
    let find = |ls: &[u8]| -> Vec<FactorId> {
        ls.iter()
            .filter_map(|l| labels.iter().find(|(k, _)| k == l).map(|(_, f)| *f))
            .collect()
    };
    b.operand(&find(&einsum.lhs))
        .operand(&find(&einsum.rhs))
        .result(&find(&einsum.out))
        .linear(&[&[0], &[1]]);
}

fn work(op: &Lengths<'_>) -> Work {
    let x = op.x;
    let OpKind::DotGeneral { einsum } = op.kind else {
        return Work::default();
    };
    let len = |l: u8| {
        let at = |ls: &[u8], t: &(DType, Vec<u64>)| {
            ls.iter()
                .position(|&k| k == l)
                .and_then(|i| t.1.get(i).copied())
        };
        at(&einsum.lhs, &x[0])
            .or(at(&einsum.rhs, &x[1]))
            .unwrap_or(1)
    };
    let product = |keep: &dyn Fn(u8) -> bool| {
        let mut labels: Vec<u8> = einsum
            .lhs
            .iter()
            .chain(&einsum.rhs)
            .copied()
            .filter(|&l| keep(l))
            .collect();
        labels.sort_unstable();
        labels.dedup();
        labels.iter().fold(1u64, |a, &l| a.saturating_mul(len(l)))
    };
    let (l, r, o) = (
        |c: u8| einsum.lhs.contains(&c),
        |c: u8| einsum.rhs.contains(&c),
        |c: u8| einsum.out.contains(&c),
    );
    let shape = MatmulShape {
        batch: product(&|c| l(c) && r(c) && o(c)),
        m: product(&|c| l(c) && !r(c)),
        n: product(&|c| r(c) && !l(c)),
        k: product(&|c| l(c) && r(c) && !o(c)),
    };
    let flops = 2.0 * shape.batch as f64 * shape.m as f64 * shape.n as f64 * shape.k as f64;
    Work {
        matmul_flops: flops,
        bytes: op.all_bytes(),
        matmul: Some(shape),
        ..Work::default()
    }
}

/// Einsums again: `dlhs = dy . rhs`, `drhs = lhs . dy`.
fn gradient(arm: &mut Arm<'_>, i: usize) -> Result<Gradients, GraphError> {
    let dy = arm.only_gradient()?;
    let OpKind::DotGeneral { einsum } = &arm.op.kind else {
        return not_forward(arm);
    };
    let (name, einsum, operands) = match i {
        0 => ("lhs", einsum.grad_lhs(), [dy, arm.x(1)]),
        _ => ("rhs", einsum.grad_rhs(), [arm.x(0), dy]),
    };
    let gradient = arm.emit(name, OpKind::DotGeneral { einsum }, &operands)?;
    Ok(vec![(i, gradient)])
}
