//! Normalisation over the last dim, and its gradients.

use super::family::*;

pub(super) static FAMILY: Family = Family {
    infer,
    rule,
    work,
    gradient,
    groups: |op| match op.kind {
        OpKind::LayerNorm { .. } => vec![vec![0], vec![1, 2]],
        _ => singly(op),
    },
};

fn infer(cx: &Operands<'_>) -> Result<Vec<TensorType>, OpError> {
    let x = cx.x;
    match cx.kind {
        OpKind::LayerNorm { .. } => {
            cx.row_vector(0, 1)?;
            cx.row_vector(0, 2)?;
            let stat = cx.rows(0)?;
            Ok(vec![x[0].clone(), stat.clone(), stat])
        }
        OpKind::LayerNormGradInput => {
            cx.same(0, 1)?;
            cx.row_vector(0, 2)?;
            cx.stat(0, 3)?;
            cx.stat(0, 4)?;
            one(x[0].clone())
        }
        OpKind::LayerNormGradWeight => {
            cx.same(0, 1)?;
            cx.stat(0, 2)?;
            cx.stat(0, 3)?;
            let t = cx.last(0)?;
            Ok(vec![t.clone(), t])
        }
        OpKind::RmsNorm { .. } => {
            cx.row_vector(0, 1)?;
            Ok(vec![x[0].clone(), cx.rows(0)?])
        }
        OpKind::RmsNormGradInput => {
            cx.same(0, 1)?;
            cx.row_vector(0, 2)?;
            cx.stat(0, 3)?;
            one(x[0].clone())
        }
        OpKind::RmsNormGradWeight => {
            cx.same(0, 1)?;
            cx.stat(0, 2)?;
            one(cx.last(0)?)
        }
        _ => cx.stranger(),
    }
}

fn rule(b: &mut Builder, kind: &OpKind, x: &[TensorType], y: &[TensorType]) {
    match kind {
        OpKind::LayerNorm { .. } | OpKind::RmsNorm { .. } => {
            let (all, rows, h) = rows_and_last(b, &x[0], false);
            b.operand(&all);
            for _ in 1..x.len() {
                b.operand(&[h]);
            }
            b.result(&all);
            for _ in 1..y.len() {
                b.result(&rows);
            }
        }
        OpKind::LayerNormGradInput | OpKind::RmsNormGradInput => {
            let (all, rows, h) = rows_and_last(b, &x[0], false);
            b.operand(&all).operand(&all).operand(&[h]);
            for _ in 3..x.len() {
                b.operand(&rows);
            }
            b.result(&all).linear(&[&[0]]);
        }
        OpKind::LayerNormGradWeight | OpKind::RmsNormGradWeight => {
            let (all, rows, h) = rows_and_last(b, &x[0], true);
            b.operand(&all).operand(&all);
            for _ in 2..x.len() {
                b.operand(&rows);
            }
            for _ in y {
                b.result(&[h]);
            }
            b.linear(&[&[0]]);
        }
        _ => {}
    }
}

fn work(op: &Lengths<'_>) -> Work {
    let x = op.x;
    match op.kind {
        OpKind::LayerNorm { .. } | OpKind::RmsNorm { .. } => op.vector(8.0, &x[0]),
        OpKind::LayerNormGradInput
        | OpKind::LayerNormGradWeight
        | OpKind::RmsNormGradInput
        | OpKind::RmsNormGradWeight => op.vector(8.0, &x[0]),
        _ => Work::default(),
    }
}

fn gradient(arm: &mut Arm<'_>, i: usize) -> Result<Gradients, GraphError> {
    let dy = arm.only_gradient()?;
    let gradient = match &arm.op.kind {
        OpKind::LayerNorm { .. } if i == 0 => arm.emit(
            "x",
            OpKind::LayerNormGradInput,
            &[dy, arm.x(0), arm.x(1), arm.y(1), arm.y(2)],
        )?,
        OpKind::LayerNorm { .. } => {
            let d = arm.emit_all(
                "weight",
                OpKind::LayerNormGradWeight,
                &[dy, arm.x(0), arm.y(1), arm.y(2)],
            )?;
            return Ok(vec![(1, d[0]), (2, d[1])]);
        }
        OpKind::RmsNorm { .. } if i == 0 => arm.emit(
            "x",
            OpKind::RmsNormGradInput,
            &[dy, arm.x(0), arm.x(1), arm.y(1)],
        )?,
        OpKind::RmsNorm { .. } => arm.emit(
            "weight",
            OpKind::RmsNormGradWeight,
            &[dy, arm.x(0), arm.y(1)],
        )?,
        _ => return not_forward(arm),
    };
    Ok(vec![(i, gradient)])
}
