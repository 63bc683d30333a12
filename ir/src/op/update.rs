//! The end of a step: gradient norm, clipping, loss scale and updates.

use super::family::*;

pub(super) static FAMILY: Family = Family {
    infer,
    rule,
    work,
    gradient: no_gradient,
    groups: singly,
};

fn infer(cx: &Operands<'_>) -> Result<Vec<TensorType>, OpError> {
    let x = cx.x;
    match cx.kind {
        OpKind::SumSquares => {
            cx.float(0)?;
            one(TensorType::new(DType::F32, Shape::default()))
        }
        OpKind::GlobalNorm => {
            cx.ensure(!x.is_empty(), || "no operands".into())?;
            cx.scalars(0)?;
            one(x[0].clone())
        }
        OpKind::ClipCoefficient { max_norm } => {
            cx.scalars(0)?;
            cx.ensure(max_norm.is_none_or(|m| m.is_finite() && m > 0.0), || {
                "the largest norm is not positive".into()
            })?;
            one(x[0].clone())
        }
        OpKind::UpdateLossScale { .. } => {
            cx.scalars(0)?;
            Ok(vec![x[0].clone(), x[0].clone(), x[0].clone()])
        }
        OpKind::AdamW { .. } => {
            for i in 1..4 {
                cx.ensure(x[i].shape == x[0].shape, || {
                    format!("operand {i} is {}, the parameter {}", x[i], x[0])
                })?;
            }
            cx.scalars(4)?;
            Ok(vec![x[0].clone(), x[2].clone(), x[3].clone()])
        }
        OpKind::Sgd { .. } => {
            for i in 1..3 {
                cx.ensure(x[i].shape == x[0].shape, || {
                    format!("operand {i} is {}, the parameter {}", x[i], x[0])
                })?;
            }
            cx.scalars(3)?;
            Ok(vec![x[0].clone(), x[2].clone()])
        }
        _ => cx.stranger(),
    }
}

fn rule(b: &mut Builder, kind: &OpKind, x: &[TensorType], y: &[TensorType]) {
    match kind {
        OpKind::SumSquares => {
            let f = b.free(&dims(&x[0]));
            b.operand(&f).result(&[]);
        }
        OpKind::GlobalNorm | OpKind::ClipCoefficient { .. } | OpKind::UpdateLossScale { .. } => {
            for _ in x {
                b.operand(&[]);
            }
            for _ in y {
                b.result(&[]);
            }
        }
        OpKind::AdamW { .. } | OpKind::Sgd { .. } => {
            let f = b.free(&dims(&x[0]));
            // Parameter, gradient and moments; then scalars.
            for i in 0..x.len() {
                b.operand(if i <= y.len() { &f } else { &[] });
            }
            for _ in y {
                b.result(&f);
            }
        }
        _ => {}
    }
}

fn work(op: &Lengths<'_>) -> Work {
    let x = op.x;
    match op.kind {
        OpKind::AdamW { .. } => op.vector(12.0, &x[0]),
        OpKind::Sgd { .. } => op.vector(4.0, &x[0]),
        OpKind::SumSquares => op.vector(2.0, &x[0]),
        OpKind::GlobalNorm | OpKind::ClipCoefficient { .. } | OpKind::UpdateLossScale { .. } => {
            Work {
                bytes: op.all_bytes(),
                ..Work::default()
            }
        }
        _ => Work::default(),
    }
}

impl Operands<'_> {
    fn scalars(&self, from: usize) -> Result<(), OpError> {
        let scalar = TensorType::new(DType::F32, Shape::default());
        for (i, t) in self.x.iter().enumerate().skip(from) {
            self.ensure(*t == scalar, || {
                format!("operand {i} is {t}, expected f32[]")
            })?;
        }
        Ok(())
    }
}
