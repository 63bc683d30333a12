//! Cross entropy over the vocabulary, by way of its log-sum-exp.

use super::family::*;

pub(super) static FAMILY: Family = Family {
    infer,
    rule,
    work,
    gradient,
    groups: |op| match op.kind {
        OpKind::CrossEntropy => vec![vec![0]],
        _ => singly(op),
    },
};

fn infer(cx: &Operands<'_>) -> Result<Vec<TensorType>, OpError> {
    let x = cx.x;
    match cx.kind {
        OpKind::LogSumExp => one(cx.rows(0)?),
        OpKind::CrossEntropy => {
            cx.stat(0, 1)?;
            cx.labels(0, 2)?;
            one(cx.rows(0)?)
        }
        OpKind::CrossEntropyGrad => {
            cx.stat(0, 1)?;
            cx.labels(0, 2)?;
            cx.stat(0, 3)?;
            one(x[0].clone())
        }
        _ => cx.stranger(),
    }
}

fn rule(b: &mut Builder, kind: &OpKind, x: &[TensorType], _: &[TensorType]) {
    match kind {
        OpKind::LogSumExp => {
            let (all, rows, v) = rows_and_last(b, &x[0], true);
            b.rule.factors[v.index()].reduce = ReduceKind::LogSumExp;
            b.operand(&all).result(&rows);
        }
        OpKind::CrossEntropy => {
            let (all, rows, _) = rows_and_last(b, &x[0], true);
            b.operand(&all).operand(&rows).operand(&rows).result(&rows);
        }
        OpKind::CrossEntropyGrad => {
            let (all, rows, _) = rows_and_last(b, &x[0], true);
            b.operand(&all)
                .operand(&rows)
                .operand(&rows)
                .operand(&rows)
                .result(&all)
                .linear(&[&[3]]);
        }
        _ => {}
    }
}

fn work(op: &Lengths<'_>) -> Work {
    let (x, y) = (op.x, op.y);
    match op.kind {
        OpKind::LogSumExp | OpKind::CrossEntropyGrad => op.vector(42.0, &x[0]),
        // Reads one logit per row, whatever the vocabulary.
        OpKind::CrossEntropy => Work {
            vector_flops: numel(&y[0]),
            bytes: sum_of(&[(4, bytes_of(&y[0]))]),
            ..Work::default()
        },
        _ => Work::default(),
    }
}

fn gradient(arm: &mut Arm<'_>, i: usize) -> Result<Gradients, GraphError> {
    let dy = arm.only_gradient()?;
    let gradient = match &arm.op.kind {
        OpKind::LogSumExp => {
            return arm.undefined(
                "a log-sum-exp is differentiated through the cross entropy that uses it only",
            );
        }
        OpKind::CrossEntropy => cross_entropy_gradient(arm, dy)?,
        _ => return not_forward(arm),
    };
    Ok(vec![(i, gradient)])
}

/// `dlogits = (softmax(logits) - onehot(labels)) * dnll`, which covers the dependence
/// through `lse`; hence `lse` must be the log-sum-exp of these logits.
fn cross_entropy_gradient(arm: &mut Arm<'_>, dnll: ValueId) -> Result<ValueId, GraphError> {
    let [logits, lse, labels] = arm.op.inputs[..] else {
        return arm.undefined("it does not have three operands");
    };
    let norm = arm.graph.op(arm.graph.value(lse).producer);
    if norm.kind != OpKind::LogSumExp || norm.inputs != [logits] {
        return arm.undefined("its second operand is not the log-sum-exp of its logits");
    }
    arm.emit(
        "logits",
        OpKind::CrossEntropyGrad,
        &[logits, lse, labels, dnll],
    )
}

impl Operands<'_> {
    fn labels(&self, i: usize, j: usize) -> Result<(), OpError> {
        let expected = TensorType::new(DType::I32, self.rows(i)?.shape);
        self.ensure(self.x[j] == expected, || {
            format!("operand {j} is {}, expected {expected}", self.x[j])
        })
    }
}
