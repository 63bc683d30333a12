//! Rows of a table by their ids, and the gradient of the table.

use super::family::*;

pub(super) static FAMILY: Family = Family {
    infer,
    rule,
    work,
    gradient,
    groups: |op| match op.kind {
        OpKind::Embedding => vec![vec![0]],
        _ => singly(op),
    },
};

fn infer(cx: &Operands<'_>) -> Result<Vec<TensorType>, OpError> {
    let x = cx.x;
    match cx.kind {
        OpKind::Embedding => {
            cx.rank(0, 2)?;
            cx.ensure(x[1].dtype == DType::I32, || format!("ids are {}", x[1]))?;
            let dims = x[1]
                .shape
                .0
                .iter()
                .copied()
                .chain([x[0].shape.0[1]])
                .collect();
            one(TensorType::new(x[0].dtype, Shape(dims)))
        }
        OpKind::EmbeddingGrad { vocab } => {
            let (ids, dy) = (&x[0].shape.0, &x[1].shape.0);
            cx.ensure(
                x[0].dtype == DType::I32 && dy.len() == ids.len() + 1 && dy[..ids.len()] == ids[..],
                || format!("ids {} and gradient {} do not match", x[0], x[1]),
            )?;
            one(TensorType::new(
                x[1].dtype,
                Shape(vec![Dim::Fixed(*vocab), dy[ids.len()]]),
            ))
        }
        _ => cx.stranger(),
    }
}

fn rule(b: &mut Builder, kind: &OpKind, x: &[TensorType], y: &[TensorType]) {
    match kind {
        OpKind::Embedding => {
            let table = b.free(&dims(&x[0]));
            let ids = b.free(&dims(&x[1]));
            let out = [ids.clone(), vec![table[1]]].concat();
            b.operand(&table).operand(&ids).result(&out).linear(&[&[0]]);
        }
        OpKind::EmbeddingGrad { .. } => {
            let dy = b.free(&dims(&x[1]));
            let v = b.factor(y[0].shape.0[0], true);
            let (ids, h) = dy.split_at(dy.len() - 1);
            b.operand(ids)
                .operand(&dy)
                .result(&[v, h[0]])
                .linear(&[&[1]]);
        }
        _ => {}
    }
}

fn work(op: &Lengths<'_>) -> Work {
    let (x, y) = (op.x, op.y);
    match op.kind {
        OpKind::Embedding => Work {
            bytes: sum_of(&[(2, bytes_of(&y[0])), (1, bytes_of(&x[1]))]),
            ..Work::default()
        },
        OpKind::EmbeddingGrad { .. } => Work {
            vector_flops: numel(&x[1]),
            bytes: sum_of(&[
                (1, bytes_of(&x[0])),
                (3, bytes_of(&x[1])),
                (1, bytes_of(&y[0])),
            ]),
            ..Work::default()
        },
        _ => Work::default(),
    }
}

fn gradient(arm: &mut Arm<'_>, i: usize) -> Result<Gradients, GraphError> {
    let dy = arm.only_gradient()?;
    let gradient = match &arm.op.kind {
        // Rows of dy are added up by id.
        OpKind::Embedding => {
            let kind = OpKind::EmbeddingGrad {
                vocab: arm.len(arm.x(0), 0),
            };
            arm.emit("weight", kind, &[arm.x(1), dy])?
        }
        _ => return not_forward(arm),
    };
    Ok(vec![(i, gradient)])
}
