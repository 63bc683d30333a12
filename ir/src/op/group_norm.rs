//! Group normalisation, and its gradients.
//!
//! Groups of channels are a dim of their own, so that sharding them never splits a group. A
//! group's statistics are of one sample and all its pixels: samples and groups can be split,
//! pixels and a group's channels cannot. Weight gradients are sums, so there everything can.

use super::family::*;

pub(super) static FAMILY: Family = Family {
    infer,
    rule,
    work,
    gradient,
    groups: |op| match op.kind {
        OpKind::GroupNorm { .. } => vec![vec![0], vec![1, 2]],
        _ => singly(op),
    },
};

fn infer(cx: &Operands<'_>) -> Result<Vec<TensorType>, OpError> {
    let x = cx.x;
    match cx.kind {
        OpKind::GroupNorm { .. } => {
            let (statistic, weight) = cx.grouped(0)?;
            cx.is(1, &weight)?;
            cx.is(2, &weight)?;
            Ok(vec![x[0].clone(), statistic.clone(), statistic])
        }
        OpKind::GroupNormGradInput => {
            let (statistic, weight) = cx.grouped(0)?;
            cx.same(0, 1)?;
            cx.is(2, &weight)?;
            cx.is(3, &statistic)?;
            cx.is(4, &statistic)?;
            one(x[0].clone())
        }
        OpKind::GroupNormGradWeight => {
            let (statistic, weight) = cx.grouped(0)?;
            cx.same(0, 1)?;
            cx.is(2, &statistic)?;
            cx.is(3, &statistic)?;
            Ok(vec![weight.clone(), weight])
        }
        _ => cx.stranger(),
    }
}

impl Operands<'_> {
    /// The types of statistics and weights of operand `i`, which is `f[N, .., G, C]`.
    fn grouped(&self, i: usize) -> Result<(TensorType, TensorType), OpError> {
        self.float(i)?;
        let d = &self.x[i].shape.0;
        let fixed = d.iter().skip(1).all(|d| matches!(d, Dim::Fixed(1..)));
        self.ensure(d.len() >= 3 && fixed, || {
            format!("operand {i} is {}, expected [N, .., G, C]", self.x[i])
        })?;
        let channels = &d[d.len() - 2..];
        let statistic = TensorType::new(DType::F32, Shape(vec![d[0], channels[0]]));
        let weight = TensorType::new(self.x[i].dtype, Shape(channels.to_vec()));
        Ok((statistic, weight))
    }
    fn is(&self, i: usize, expected: &TensorType) -> Result<(), OpError> {
        self.ensure(self.x[i] == *expected, || {
            format!("operand {i} is {}, expected {expected}", self.x[i])
        })
    }
}

fn rule(b: &mut Builder, kind: &OpKind, x: &[TensorType], y: &[TensorType]) {
    let f = b.group_factors(&x[0], matches!(kind, OpKind::GroupNormGradWeight));
    match kind {
        OpKind::GroupNorm { .. } => {
            b.operand(&f.image).operand(&f.weight).operand(&f.weight);
            b.result(&f.image).result(&f.statistic).result(&f.statistic);
        }
        OpKind::GroupNormGradInput => {
            b.operand(&f.image).operand(&f.image).operand(&f.weight);
            b.operand(&f.statistic).operand(&f.statistic);
            b.result(&f.image).linear(&[&[0]]);
        }
        OpKind::GroupNormGradWeight => {
            b.operand(&f.image).operand(&f.image);
            b.operand(&f.statistic).operand(&f.statistic);
            for _ in y {
                b.result(&f.weight);
            }
            b.linear(&[&[0]]);
        }
        _ => {}
    }
}

/// Factors of `[N, .., G, C]`, of `[N, G]` and of `[G, C]`.
struct GroupFactors {
    image: Vec<FactorId>,
    statistic: [FactorId; 2],
    weight: [FactorId; 2],
}

impl Builder {
    fn group_factors(&mut self, x: &TensorType, pixels: bool) -> GroupFactors {
        let d = &x.shape.0;
        let groups = d.len() - 2;
        let splits = |i: usize| pixels || i == 0 || i == groups;
        let image: Vec<FactorId> = (0..d.len()).map(|i| self.factor(d[i], splits(i))).collect();
        GroupFactors {
            statistic: [image[0], image[groups]],
            weight: [image[groups], image[groups + 1]],
            image,
        }
    }
}

fn work(op: &Lengths<'_>) -> Work {
    op.vector(8.0, &op.x[0])
}

fn gradient(arm: &mut Arm<'_>, i: usize) -> Result<Gradients, GraphError> {
    let dy = arm.only_gradient()?;
    let (OpKind::GroupNorm { .. }, x) = (&arm.op.kind, arm.x(0)) else {
        return not_forward(arm);
    };
    if i == 0 {
        let operands = [dy, x, arm.x(1), arm.y(1), arm.y(2)];
        let dx = arm.emit("x", OpKind::GroupNormGradInput, &operands)?;
        return Ok(vec![(0, dx)]);
    }
    let operands = [dy, x, arm.y(1), arm.y(2)];
    let d = arm.emit_all("weight", OpKind::GroupNormGradWeight, &operands)?;
    Ok(vec![(1, d[0]), (2, d[1])])
}
