//! Ops that treat every element alike: conversions, functions, dropout, sums over microbatches.

use super::family::*;

pub(super) static FAMILY: Family = Family {
    infer,
    rule,
    work,
    gradient,
    groups: |op| match op.kind {
        OpKind::ClampedSwiglu { .. } => together(op),
        _ => singly(op),
    },
};

fn infer(cx: &Operands<'_>) -> Result<Vec<TensorType>, OpError> {
    let x = cx.x;
    match cx.kind {
        OpKind::Layout => one(x[0].clone()),
        OpKind::Cast { dtype } => {
            cx.float(0)?;
            cx.ensure(dtype.is_float(), || "casts to an integer".into())?;
            one(TensorType::new(*dtype, x[0].shape.clone()))
        }
        OpKind::Unary { f } => {
            cx.float(0)?;
            if let Unary::Scale { by } = f {
                cx.ensure(by.is_finite(), || format!("factor {by} is not finite"))?;
            }
            one(x[0].clone())
        }
        OpKind::Binary { f } => {
            cx.float(0)?;
            cx.ensure(x[0].dtype == x[1].dtype, || {
                format!("dtypes differ: {} and {}", x[0], x[1])
            })?;
            let (a, b) = (&x[0].shape.0, &x[1].shape.0);
            let broadcasts = matches!(f, Binary::Add | Binary::Sub | Binary::Mul);
            let aligned = b.len() <= a.len() && a[a.len() - b.len()..] == b[..];
            cx.ensure(aligned && (broadcasts || a.len() == b.len()), || {
                format!("shapes do not align: {} and {}", x[0], x[1])
            })?;
            one(x[0].clone())
        }
        OpKind::ScaleRows => {
            cx.float(0)?;
            let (a, b) = (&x[0].shape.0, &x[1].shape.0);
            let rows = !a.is_empty() && a[..a.len() - 1] == b[..];
            let typed = x[1].dtype == x[0].dtype || x[1].dtype == DType::F32;
            cx.ensure(typed && rows, || {
                format!("{} does not have a number for each row of {}", x[1], x[0])
            })?;
            one(x[0].clone())
        }
        OpKind::ClampedSwiglu { alpha, limit } => {
            cx.clamps(*alpha, *limit)?;
            one(x[0].clone())
        }
        OpKind::ClampedSwigluGrad { alpha, limit } => {
            cx.clamps(*alpha, *limit)?;
            Ok(vec![x[0].clone(), x[1].clone()])
        }
        OpKind::Dropout { p, order, .. } => {
            cx.float(0)?;
            cx.ensure((0.0..1.0).contains(p), || {
                format!("probability {p} is outside [0, 1)")
            })?;
            // The mask's elements are named by the sample, which is dim 0. What has no samples
            // would have a mask for each microbatch.
            cx.ensure(x[0].shape.0.first() == Some(&Dim::Batch), || {
                format!("the batch of {} is not its first dim", x[0])
            })?;
            if !order.is_natural() {
                cx.stored(0, *order)?;
            }
            one(x[0].clone())
        }
        OpKind::Accumulate { dtype } => {
            cx.float(0)?;
            cx.ensure(!x[0].shape.has_batch(), || {
                format!("{} has a batch dim", x[0])
            })?;
            one(TensorType::new(*dtype, x[0].shape.clone()))
        }
        _ => cx.stranger(),
    }
}

fn rule(b: &mut Builder, kind: &OpKind, x: &[TensorType], _: &[TensorType]) {
    match kind {
        OpKind::Layout | OpKind::Accumulate { .. } | OpKind::Dropout { .. } => {
            let f = b.free(&dims(&x[0]));
            b.operand(&f).result(&f).linear(&[&[0]]);
        }
        OpKind::Cast { .. } => {
            let f = b.free(&dims(&x[0]));
            b.operand(&f).result(&f);
        }
        OpKind::Unary { f: fun } => {
            let f = b.free(&dims(&x[0]));
            b.operand(&f).result(&f);
            if matches!(fun, Unary::Neg | Unary::Scale { .. }) {
                b.linear(&[&[0]]);
            }
        }
        OpKind::ScaleRows => {
            let f = b.free(&dims(&x[0]));
            let rows = &f[..f.len() - 1];
            b.operand(&f).operand(rows).result(&f).linear(&[&[0], &[1]]);
        }
        OpKind::ClampedSwiglu { .. } => {
            let f = b.free(&dims(&x[0]));
            b.operand(&f).operand(&f).result(&f);
        }
        OpKind::ClampedSwigluGrad { .. } => {
            let f = b.free(&dims(&x[0]));
            b.operand(&f).operand(&f).operand(&f);
            b.result(&f).result(&f).linear(&[&[2]]);
        }
        OpKind::Binary { f: fun } => {
            let f = b.free(&dims(&x[0]));
            let tail = &f[f.len() - x[1].shape.rank()..];
            b.operand(&f).operand(tail).result(&f);
            match fun {
                Binary::Add | Binary::Sub => b.linear(&[&[0, 1]]),
                Binary::Mul => b.linear(&[&[0], &[1]]),
                _ => b.linear(&[&[1]]),
            };
        }
        _ => {}
    }
}

fn work(op: &Lengths<'_>) -> Work {
    let (x, y) = (op.x, op.y);
    match op.kind {
        OpKind::Unary {
            f: Unary::Neg | Unary::Scale { .. } | Unary::Relu | Unary::Square,
        } => op.vector(1.0, &x[0]),
        // An exponential or the like counts 40: measured on a CPU, where it costs as much as five
        // layer normalisations; on GPUs such ops are bound by memory.
        OpKind::Unary { .. } => op.vector(40.0, &x[0]),
        OpKind::Binary {
            f: Binary::GeluErfGrad | Binary::GeluTanhGrad | Binary::SiluGrad,
        } => op.vector(48.0, &x[0]),
        OpKind::Binary { .. } | OpKind::Cast { .. } | OpKind::Accumulate { .. } => {
            let mut w = op.vector(1.0, &x[0]);
            if matches!(op.kind, OpKind::Accumulate { .. }) {
                w.bytes = w.bytes.saturating_add(bytes_of(&y[0]));
            }
            w
        }
        OpKind::ScaleRows => op.vector(1.0, &x[0]),
        OpKind::ClampedSwiglu { .. } => op.vector(48.0, &x[0]),
        OpKind::ClampedSwigluGrad { .. } => op.vector(56.0, &x[0]),
        OpKind::Dropout { .. } => op.vector(6.0, &x[0]),
        _ => Work::default(),
    }
}

fn gradient(arm: &mut Arm<'_>, i: usize) -> Result<Gradients, GraphError> {
    let dy = arm.only_gradient()?;
    let gradient = match &arm.op.kind {
        // dx = dy, as one value of its own: the gradient's layout is a decision too
        // (above all at layer boundaries).
        OpKind::Layout => arm.emit("x", OpKind::Layout, &[dy])?,
        // The rounding is taken as the identity; dx has x's dtype.
        OpKind::Cast { .. } => {
            let dtype = arm.graph.ty(arm.x(0)).dtype;
            arm.emit("x", OpKind::Cast { dtype }, &[dy])?
        }
        OpKind::Unary { f } => unary_gradient(arm, *f, dy)?,
        OpKind::Binary { f } => binary_gradient(arm, *f, i, dy)?,
        OpKind::ScaleRows if i == 0 => arm.emit("rows", OpKind::ScaleRows, &[dy, arm.x(1)])?,
        // `dg = sum(dy * x)` over a row.
        OpKind::ScaleRows => {
            let product = arm.emit("scales_mul", binary(Binary::Mul), &[dy, arm.x(0)])?;
            let last = arm.shape(arm.x(0)).rank() - 1;
            let dtype = arm.graph.ty(arm.x(1)).dtype;
            match arm.graph.ty(product).dtype == dtype {
                true => arm.emit("scales", sum(vec![last]), &[product])?,
                // Summed up in the scales' own type, f32.
                false => {
                    let wide = arm.emit("scales_cast", OpKind::Cast { dtype }, &[product])?;
                    arm.emit("scales", sum(vec![last]), &[wide])?
                }
            }
        }
        OpKind::ClampedSwiglu { alpha, limit } => {
            let kind = OpKind::ClampedSwigluGrad {
                alpha: *alpha,
                limit: *limit,
            };
            let both = arm.emit_all("gate_up", kind, &[arm.x(0), arm.x(1), dy])?;
            return Ok(both.into_iter().enumerate().collect());
        }
        // Linear with a fixed mask: the same op with the same key.
        OpKind::Dropout { .. } => arm.emit("x", arm.op.kind.clone(), &[dy])?,
        _ => return not_forward(arm),
    };
    Ok(vec![(i, gradient)])
}

/// `dx = f'(x) * dy`.
fn unary_gradient(arm: &mut Arm<'_>, f: Unary, dy: ValueId) -> Result<ValueId, GraphError> {
    let (x, y) = (arm.op.inputs[0], arm.op.outputs[0]);
    match f {
        Unary::Neg | Unary::Scale { .. } => arm.emit("x", OpKind::Unary { f }, &[dy]),
        Unary::GeluErf => arm.emit("x", binary(Binary::GeluErfGrad), &[x, dy]),
        Unary::GeluTanh => arm.emit("x", binary(Binary::GeluTanhGrad), &[x, dy]),
        Unary::Silu => arm.emit("x", binary(Binary::SiluGrad), &[x, dy]),
        Unary::Relu => arm.emit("x", binary(Binary::ReluGrad), &[x, dy]),
        Unary::Exp => arm.emit("x", binary(Binary::Mul), &[dy, y]),
        // tanh' = 1 - tanh^2, so dx = dy - dy * y^2.
        Unary::Tanh => {
            let square = arm.emit("x_square", OpKind::Unary { f: Unary::Square }, &[y])?;
            let product = arm.emit("x_mul", binary(Binary::Mul), &[dy, square])?;
            arm.emit("x", binary(Binary::Sub), &[dy, product])
        }
        // sigmoid' = y - y^2, so dx = dy * y - (dy * y) * y.
        Unary::Sigmoid => {
            let product = arm.emit("x_mul", binary(Binary::Mul), &[dy, y])?;
            let square = arm.emit("x_square", binary(Binary::Mul), &[product, y])?;
            arm.emit("x", binary(Binary::Sub), &[product, square])
        }
        Unary::Square => {
            let twice = arm.emit(
                "x_twice",
                OpKind::Unary {
                    f: Unary::Scale { by: 2.0 },
                },
                &[x],
            )?;
            arm.emit("x", binary(Binary::Mul), &[dy, twice])
        }
    }
}

/// Add: `da = dy`, `db = dy`; Sub: `db = -dy`; Mul: `da = dy * b`, `db = dy * a`; `db`
/// summed over the dims that `b` was broadcast over.
fn binary_gradient(
    arm: &mut Arm<'_>,
    f: Binary,
    operand: usize,
    dy: ValueId,
) -> Result<ValueId, GraphError> {
    let (a, b) = (arm.op.inputs[0], arm.op.inputs[1]);
    let n_leading = arm.shape(a).rank() - arm.shape(b).rank();
    match (f, operand) {
        (Binary::Add | Binary::Sub, 0) => Ok(dy),
        (Binary::Mul, 0) => arm.emit("lhs", binary(Binary::Mul), &[dy, b]),
        (Binary::Add, _) => sum_leading(arm, "rhs", n_leading, dy),
        (Binary::Sub, _) => {
            // The sum comes last, so that a parameter's gradient is one that ranks may leave partial.
            let what = if n_leading == 0 { "rhs" } else { "rhs_neg" };
            let negative = arm.emit(what, OpKind::Unary { f: Unary::Neg }, &[dy])?;
            sum_leading(arm, "rhs", n_leading, negative)
        }
        (Binary::Mul, _) => {
            let product = arm.emit(
                if n_leading == 0 { "rhs" } else { "rhs_mul" },
                binary(Binary::Mul),
                &[dy, a],
            )?;
            sum_leading(arm, "rhs", n_leading, product)
        }
        (Binary::GeluErfGrad | Binary::GeluTanhGrad | Binary::SiluGrad | Binary::ReluGrad, _) => {
            arm.undefined("second derivatives are not defined")
        }
    }
}

fn sum_leading(
    arm: &mut Arm<'_>,
    what: &str,
    n_leading: usize,
    x: ValueId,
) -> Result<ValueId, GraphError> {
    match n_leading {
        0 => Ok(x),
        n => arm.emit(what, sum((0..n).collect()), &[x]),
    }
}

impl Operands<'_> {
    /// All operands are floats of one type, and the figures of a clamped activation make sense.
    fn clamps(&self, alpha: f64, limit: f64) -> Result<(), OpError> {
        self.float(0)?;
        self.ensure(self.x.iter().all(|x| *x == self.x[0]), || {
            let types: Vec<String> = self.x.iter().map(TensorType::to_string).collect();
            format!("types differ: {}", types.join(", "))
        })?;
        self.ensure(alpha.is_finite(), || format!("alpha {alpha} is not finite"))?;
        self.ensure(limit.is_finite() && limit > 0.0, || {
            format!("limit {limit} is not positive")
        })
    }
}
