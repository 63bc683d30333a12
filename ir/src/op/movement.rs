//! Ops that move elements or add them up: broadcasts, sums, other shapes and orders, parts.

use super::family::*;

pub(super) static FAMILY: Family = Family {
    infer,
    rule,
    work,
    gradient,
    groups: |op| match op.kind {
        OpKind::Stack { .. } => together(op),
        _ => singly(op),
    },
};

fn infer(cx: &Operands<'_>) -> Result<Vec<TensorType>, OpError> {
    let x = cx.x;
    match cx.kind {
        OpKind::Broadcast { leading } => {
            cx.ensure(
                !x[0].shape.has_batch() || !leading.contains(&Dim::Batch),
                || "two batch dims".into(),
            )?;
            let dims = leading.iter().chain(&x[0].shape.0).copied().collect();
            one(TensorType::new(x[0].dtype, Shape(dims)))
        }
        OpKind::Reduce { kind, dims } => {
            cx.float(0)?;
            cx.ensure(matches!(kind, ReduceKind::Sum | ReduceKind::Max), || {
                "reduces by sum or max only".into()
            })?;
            cx.ensure(
                dims.windows(2).all(|w| w[0] < w[1]) && dims.iter().all(|&d| d < x[0].shape.rank()),
                || format!("dims {dims:?} are not ascending dims of {}", x[0]),
            )?;
            let kept = x[0]
                .shape
                .0
                .iter()
                .enumerate()
                .filter(|(i, _)| !dims.contains(i))
                .map(|(_, d)| *d)
                .collect();
            one(TensorType::new(x[0].dtype, Shape(kept)))
        }
        OpKind::Reshape { shape } => {
            let (from, to) = (&x[0].shape.0, shape);
            let first = |s: &[Dim]| s.first() == Some(&Dim::Batch);
            let fixed = |s: &[Dim]| {
                s.iter()
                    .filter_map(|d| {
                        if let Dim::Fixed(n) = d {
                            Some(*n)
                        } else {
                            None
                        }
                    })
                    .try_fold(1u64, u64::checked_mul)
            };
            let batches = |s: &[Dim]| s.iter().filter(|d| **d == Dim::Batch).count();
            cx.ensure(
                fixed(from).is_some()
                    && fixed(from) == fixed(to)
                    && first(from) == first(to)
                    && batches(from) == batches(to),
                || format!("{} does not reshape to {}", x[0], Shape(shape.clone())),
            )?;
            one(TensorType::new(x[0].dtype, Shape(shape.clone())))
        }
        OpKind::Transpose { perm } => {
            let mut sorted = perm.clone();
            sorted.sort_unstable();
            cx.ensure(sorted.iter().copied().eq(0..x[0].shape.rank()), || {
                format!("{perm:?} is not a permutation of the dims of {}", x[0])
            })?;
            one(TensorType::new(
                x[0].dtype,
                Shape(perm.iter().map(|&i| x[0].shape.0[i]).collect()),
            ))
        }
        OpKind::Slice { dim, start, len } => {
            let n = cx.fixed(0, *dim)?;
            cx.ensure(start.checked_add(*len).is_some_and(|end| end <= n), || {
                format!("{start}..+{len} exceeds dim {dim} of {}", x[0])
            })?;
            one(cx.with_dim(0, *dim, *len))
        }
        OpKind::Pad { dim, start, len } => {
            let n = cx.fixed(0, *dim)?;
            cx.ensure(start.checked_add(n).is_some_and(|end| end <= *len), || {
                format!("{} at {start} exceeds {len}", x[0])
            })?;
            one(cx.with_dim(0, *dim, *len))
        }
        OpKind::Unstack { dim } => {
            let n = cx.fixed(0, *dim)?;
            cx.ensure((1..=64).contains(&n), || format!("{n} results; at most 64"))?;
            let mut dims = x[0].shape.0.clone();
            dims.remove(*dim);
            Ok(vec![TensorType::new(x[0].dtype, Shape(dims)); n as usize])
        }
        OpKind::Stack { dim } => {
            cx.ensure(!x.is_empty() && x.iter().all(|t| *t == x[0]), || {
                "operands differ in type".into()
            })?;
            cx.ensure(
                *dim <= x[0].shape.rank() && !(*dim == 0 && x[0].shape.has_batch()),
                || format!("dim {dim} of {}", x[0]),
            )?;
            let mut dims = x[0].shape.0.clone();
            dims.insert(*dim, Dim::Fixed(x.len() as u64));
            one(TensorType::new(x[0].dtype, Shape(dims)))
        }
        OpKind::Join => {
            let (a, b) = (&x[0].shape.0, &x[1].shape.0);
            let fits = !a.is_empty()
                && a.len() <= b.len()
                && a[..a.len() - 1] == b[..a.len() - 1]
                && x[0].dtype == x[1].dtype;
            cx.ensure(fits, || {
                format!("{} does not stand in front of the rows of {}", x[0], x[1])
            })?;
            let (n, m) = (cx.fixed(0, a.len() - 1)?, cx.fixed(1, b.len() - 1)?);
            let sum = n.checked_add(m);
            cx.ensure(sum.is_some(), || format!("{n} and {m} elements of a row"))?;
            one(cx.with_dim(1, b.len() - 1, sum.unwrap_or(n)))
        }
        _ => cx.stranger(),
    }
}

fn rule(b: &mut Builder, kind: &OpKind, x: &[TensorType], y: &[TensorType]) {
    match kind {
        OpKind::Broadcast { leading } => {
            let lead = b.free(leading);
            let f = b.free(&dims(&x[0]));
            b.operand(&f).result(&[lead, f].concat()).linear(&[&[0]]);
        }
        OpKind::Reduce { kind, dims: gone } => {
            let f = b.free(&dims(&x[0]));
            let kept: Vec<FactorId> = (0..f.len())
                .filter(|i| !gone.contains(i))
                .map(|i| f[i])
                .collect();
            for &i in gone {
                b.rule.factors[f[i].index()].reduce = *kind;
            }
            b.operand(&f).result(&kept);
            if *kind == ReduceKind::Sum {
                b.linear(&[&[0]]);
            }
        }
        OpKind::Reshape { .. } => reshape_rule(b, &dims(&x[0]), &dims(&y[0])),
        OpKind::Transpose { perm } => {
            let f = b.free(&dims(&x[0]));
            let out: Vec<FactorId> = perm.iter().map(|&i| f[i]).collect();
            b.operand(&f).result(&out).linear(&[&[0]]);
        }
        OpKind::Slice { dim, .. } | OpKind::Pad { dim, .. } => {
            let f: Vec<FactorId> = dims(&x[0])
                .iter()
                .enumerate()
                .map(|(i, &d)| b.factor(d, i != *dim))
                .collect();
            b.operand(&f).result(&f).linear(&[&[0]]);
        }
        OpKind::Unstack { dim } => {
            let f: Vec<FactorId> = dims(&x[0])
                .iter()
                .enumerate()
                .map(|(i, &d)| b.factor(d, i != *dim))
                .collect();
            let mut out = f.clone();
            out.remove(*dim);
            b.operand(&f).linear(&[&[0]]);
            for _ in y {
                b.result(&out);
            }
        }
        OpKind::Stack { dim } => {
            let f = b.free(&dims(&x[0]));
            let new = b.whole(y[0].shape.0[*dim]);
            for _ in x {
                b.operand(&f);
            }
            let mut out = f;
            out.insert(*dim, new);
            let all: Vec<usize> = (0..x.len()).collect();
            b.result(&out).linear(&[&all]);
        }
        OpKind::Join => {
            let (shared, own) = (dims(&x[0]), dims(&x[1]));
            let rows = b.free(&own[..own.len() - 1]);
            let n = b.whole(shared[shared.len() - 1]);
            let m = b.whole(own[own.len() - 1]);
            let both = b.whole(y[0].shape.0[own.len() - 1]);
            b.operand(&[&rows[..shared.len() - 1], &[n]].concat());
            b.operand(&[&rows[..], &[m]].concat());
            b.result(&[rows, vec![both]].concat()).linear(&[&[0, 1]]);
        }
        _ => {}
    }
}

fn work(op: &Lengths<'_>) -> Work {
    let (x, y) = (op.x, op.y);
    match op.kind {
        OpKind::Reduce {
            kind: ReduceKind::LogSumExp,
            ..
        } => op.vector(42.0, &x[0]),
        OpKind::Broadcast { .. }
        | OpKind::Reduce { .. }
        | OpKind::Reshape { .. }
        | OpKind::Transpose { .. }
        | OpKind::Slice { .. }
        | OpKind::Pad { .. }
        | OpKind::Unstack { .. }
        | OpKind::Stack { .. }
        | OpKind::Join => op.vector(1.0, y.first().unwrap_or(&x[0])),
        _ => Work::default(),
    }
}

fn gradient(arm: &mut Arm<'_>, i: usize) -> Result<Gradients, GraphError> {
    if let OpKind::Unstack { dim } = arm.op.kind {
        return Ok(vec![(0, unstack_gradient(arm, dim)?)]);
    }
    let dy = arm.only_gradient()?;
    let gradient = match &arm.op.kind {
        // dx = dy summed over the new dims.
        OpKind::Broadcast { leading } => arm.emit("x", sum((0..leading.len()).collect()), &[dy])?,
        OpKind::Reduce {
            kind: ReduceKind::Sum,
            dims,
        } => reduce_sum_gradient(arm, dims, dy)?,
        OpKind::Reduce { .. } => {
            return arm.undefined("a maximum has no gradient here; only sums do");
        }
        OpKind::Reshape { .. } => {
            let shape = arm.shape(arm.x(0)).0;
            arm.emit("x", OpKind::Reshape { shape }, &[dy])?
        }
        OpKind::Transpose { perm } => {
            let mut inverse = vec![0; perm.len()];
            perm.iter()
                .enumerate()
                .for_each(|(to, &from)| inverse[from] = to);
            arm.emit("x", OpKind::Transpose { perm: inverse }, &[dy])?
        }
        OpKind::Join => join_gradient(arm, i, dy)?,
        OpKind::Slice { dim, start, .. } => {
            let kind = OpKind::Pad {
                dim: *dim,
                start: *start,
                len: arm.len(arm.x(0), *dim),
            };
            arm.emit("x", kind, &[dy])?
        }
        OpKind::Pad { dim, start, .. } => {
            let kind = OpKind::Slice {
                dim: *dim,
                start: *start,
                len: arm.len(arm.x(0), *dim),
            };
            arm.emit("x", kind, &[dy])?
        }
        OpKind::Stack { dim } => {
            let parts = arm.emit_all("x", OpKind::Unstack { dim: *dim }, &[dy])?;
            return Ok(parts.into_iter().enumerate().collect());
        }
        _ => return not_forward(arm),
    };
    Ok(vec![(i, gradient)])
}

/// `dx = dy` copied over the dims that were summed: as new leading dims, then moved to
/// their places.
fn reduce_sum_gradient(
    arm: &mut Arm<'_>,
    dims: &[usize],
    dy: ValueId,
) -> Result<ValueId, GraphError> {
    let shape = arm.shape(arm.op.inputs[0]);
    if dims.is_empty() {
        return Ok(dy);
    }
    let leading: Vec<Dim> = dims.iter().map(|&d| shape.0[d]).collect();
    let in_place = dims.iter().copied().eq(0..dims.len());
    let wide = arm.emit(
        if in_place { "x" } else { "x_broadcast" },
        OpKind::Broadcast { leading },
        &[dy],
    )?;
    if in_place {
        return Ok(wide);
    }
    let kept: Vec<usize> = (0..shape.rank()).filter(|d| !dims.contains(d)).collect();
    let order = [dims, &kept].concat();
    let mut perm = vec![0; order.len()];
    order
        .iter()
        .enumerate()
        .for_each(|(from, &to)| perm[to] = from);
    arm.emit("x", OpKind::Transpose { perm }, &[wide])
}

/// The operand's elements of `dy`; what all rows of a token share sums them over these rows.
fn join_gradient(arm: &mut Arm<'_>, i: usize, dy: ValueId) -> Result<ValueId, GraphError> {
    let (shared, own) = (arm.shape(arm.x(0)).rank(), arm.shape(arm.x(1)).rank());
    let (first, last) = (arm.len(arm.x(0), shared - 1), arm.len(arm.x(1), own - 1));
    let slice = |start, len| OpKind::Slice {
        dim: own - 1,
        start,
        len,
    };
    match i {
        0 if shared == own => arm.emit("x", slice(0, first), &[dy]),
        // The sum first: where the rows are split, what is left of it to add up is small.
        0 => {
            let rows = (shared - 1..own - 1).collect();
            let both = arm.emit("x_rows", sum(rows), &[dy])?;
            let dim = shared - 1;
            let kind = OpKind::Slice {
                dim,
                start: 0,
                len: first,
            };
            arm.emit("x", kind, &[both])
        }
        _ => arm.emit("y", slice(first, last), &[dy]),
    }
}

/// `dx` is the stack of the results' gradients. A result without gradient gets zeros,
/// as another's gradient times 0: no layout or partial sum changes for them.
fn unstack_gradient(arm: &mut Arm<'_>, dim: usize) -> Result<ValueId, GraphError> {
    let some = arm.results.iter().flatten().next().copied();
    let some = some.expect("a visited op has a result with a gradient");
    let mut parts = Vec::with_capacity(arm.results.len());
    for (i, &part) in arm.results.iter().enumerate() {
        parts.push(match part {
            Some(gradient) => gradient,
            None => arm.emit(
                &format!("zero{i}"),
                OpKind::Unary {
                    f: Unary::Scale { by: 0.0 },
                },
                &[some],
            )?,
        });
    }
    arm.emit("x", OpKind::Stack { dim }, &parts)
}

/// Dims are grouped where both sides have equal products; of each group the major part that
/// both sides share is one shardable factor, everything else is whole.
fn reshape_rule(b: &mut Builder, from: &[Dim], to: &[Dim]) {
    let (mut operand, mut result) = (Vec::new(), Vec::new());
    let (mut i, mut j) = (0, 0);
    if from.first() == Some(&Dim::Batch) {
        let f = b.factor(Dim::Batch, true);
        operand.push(DimFactor { factor: f, unit: 1 });
        result.push(DimFactor { factor: f, unit: 1 });
        (i, j) = (1, 1);
    }
    let len = |d: Dim| d.bind(1);
    while i < from.len() || j < to.len() {
        let (i0, j0) = (i, j);
        let (mut p, mut q) = (1u64, 1u64);
        // The first dim of each side, then whichever side lags, until the products agree.
        loop {
            if p <= q && i < from.len() && (i == i0 || p != q) {
                p *= len(from[i]);
                i += 1;
            } else if j < to.len() && (j == j0 || p != q) {
                q *= len(to[j]);
                j += 1;
            } else {
                break;
            }
        }
        let major = |dims: &[Dim]| dims.first().map_or(1, |d| len(*d));
        let (a, c) = (major(&from[i0..i]), major(&to[j0..j]));
        let shared = a.min(c);
        let ok = shared > 0 && a % shared == 0 && c % shared == 0;
        let f = b.factor(Dim::Fixed(shared), ok);
        for (dims, out) in [(&from[i0..i], &mut operand), (&to[j0..j], &mut result)] {
            for (k, &d) in dims.iter().enumerate() {
                match k == 0 && ok {
                    true => out.push(DimFactor {
                        factor: f,
                        unit: len(d) / shared,
                    }),
                    false => {
                        let whole = b.whole(d);
                        out.push(DimFactor {
                            factor: whole,
                            unit: 1,
                        });
                    }
                }
            }
        }
    }
    b.rule.operands.push(operand);
    b.rule.results.push(result);
    b.linear(&[&[0]]);
}
