//! Mixtures of experts: routes, tokens to their experts and back.

use super::family::*;

pub(super) static FAMILY: Family = Family {
    infer,
    rule,
    work,
    gradient,
    groups: |op| match op.kind {
        OpKind::Route { .. } => together(op),
        _ => singly(op),
    },
};

fn infer(cx: &Operands<'_>) -> Result<Vec<TensorType>, OpError> {
    let x = cx.x;
    match cx.kind {
        OpKind::Route {
            top_k,
            capacity,
            groups,
            ..
        } => {
            cx.tokens(0)?;
            let experts = cx.fixed(0, 2)?;
            if let Some(bias) = x.get(1) {
                cx.float(1)?;
                cx.ensure(bias.shape.0 == [Dim::Fixed(experts)], || {
                    format!("bias {bias} does not have a number for each of {experts} experts")
                })?;
            }
            if let Some(groups) = groups {
                cx.groups_fit(*groups, experts, *top_k)?;
            }
            cx.ensure((1..=experts).contains(top_k), || {
                format!("{top_k} experts for a token; there are {experts}")
            })?;
            cx.slots_fit(experts, *capacity)?;
            let dims = [&x[0].shape.0[..2], &[Dim::Fixed(*top_k)]].concat();
            let of = |dtype| TensorType::new(dtype, Shape(dims.clone()));
            Ok(vec![of(DType::F32), of(DType::I32)])
        }
        OpKind::RouteGrad { capacity, .. } => {
            cx.tokens(0)?;
            cx.slots_fit(cx.fixed(0, 2)?, *capacity)?;
            cx.slots(0, 1)?;
            cx.gates(1, 2)?;
            one(x[0].clone())
        }
        OpKind::Dispatch { experts, capacity } => {
            cx.tokens(0)?;
            cx.slots_fit(*experts, *capacity)?;
            cx.slots(0, 1)?;
            if x.len() == 3 {
                cx.gates(1, 2)?;
            }
            let (t, n) = (&x[0].shape.0, Dim::Fixed);
            let dims = vec![n(*experts), t[0], n(*capacity), t[2]];
            one(TensorType::new(x[0].dtype, Shape(dims)))
        }
        OpKind::Combine => {
            cx.of_experts(0)?;
            if x.len() == 3 {
                cx.gates(1, 2)?;
            }
            cx.rank(1, 3)?;
            let (y, s) = (&x[0].shape.0, &x[1].shape.0);
            let out = TensorType::new(x[0].dtype, Shape(vec![y[1], s[1], y[3]]));
            cx.is_slots_of(&out, 1)?;
            one(out)
        }
        OpKind::ExpertBias => {
            cx.of_experts(0)?;
            let (y, dtype) = (&x[0].shape.0, x[0].dtype);
            let expected = TensorType::new(dtype, Shape(vec![y[0], y[3]]));
            cx.ensure(x[1] == expected, || {
                format!("bias {} is not {expected}, a row for each expert", x[1])
            })?;
            one(x[0].clone())
        }
        OpKind::GateGrad => {
            cx.of_experts(0)?;
            cx.tokens(1)?;
            cx.slots(1, 2)?;
            let (y, t) = (&x[0].shape.0, &x[1].shape.0);
            cx.ensure(
                y[1] == t[0] && y[3] == t[2] && x[0].dtype == x[1].dtype,
                || format!("slots {} and tokens {} do not match", x[0], x[1]),
            )?;
            one(TensorType::new(DType::F32, x[2].shape.clone()))
        }
        _ => cx.stranger(),
    }
}

fn rule(b: &mut Builder, kind: &OpKind, x: &[TensorType], y: &[TensorType]) {
    match kind {
        // Which places are left depends on all tokens of the sample.
        OpKind::Route { .. } => {
            let [f, k] = routed(b, &x[0], &y[0]);
            b.operand(&f);
            if x.len() == 2 {
                b.operand(&[f[2]]);
            }
            b.result(&[f[0], f[1], k[2]]).result(&k);
        }
        OpKind::RouteGrad { .. } => {
            let [f, k] = routed(b, &x[0], &x[1]);
            b.operand(&f).operand(&k).operand(&k).result(&f);
            b.linear(&[&[2]]);
        }
        // Each part of split tokens fills its own slots, so the parts of the result add up;
        // split experts pick their tokens.
        OpKind::Dispatch { .. } => {
            let e = b.expert_factors(&y[0], &x[1]);
            b.operand(&e.tokens).operand(&e.slots);
            if x.len() == 3 {
                b.operand(&e.slots);
            }
            b.result(&e.experts);
            let sets: &[&[usize]] = &[&[0], &[2]];
            b.linear(&sets[..x.len() - 1]);
        }
        OpKind::Combine => {
            let e = b.expert_factors(&x[0], &x[1]);
            b.operand(&e.experts).operand(&e.slots);
            if x.len() == 3 {
                b.operand(&e.slots);
            }
            b.result(&e.tokens);
            let sets: &[&[usize]] = &[&[0], &[2]];
            b.linear(&sets[..x.len() - 1]);
        }
        OpKind::ExpertBias => {
            let f = b.free(&dims(&x[0]));
            let rows = [f[0], f[3]];
            b.operand(&f).operand(&rows).result(&f).linear(&[&[0, 1]]);
        }
        OpKind::GateGrad => {
            let e = b.expert_factors(&x[0], &x[2]);
            b.operand(&e.experts).operand(&e.tokens).operand(&e.slots);
            b.result(&e.slots).linear(&[&[0], &[1]]);
        }
        _ => {}
    }
}

fn work(op: &Lengths<'_>) -> Work {
    let (x, y) = (op.x, op.y);
    match op.kind {
        // An exponential for each logit, and a pass over the logits for each choice.
        OpKind::Route { top_k, .. } => op.vector(40.0 + 2.0 * *top_k as f64, &x[0]),
        OpKind::RouteGrad { .. } => op.vector(44.0, &x[0]),
        OpKind::Dispatch { .. } => op.vector(1.0, &y[0]),
        OpKind::Combine => op.vector(2.0, &x[0]),
        OpKind::ExpertBias => op.vector(1.0, &x[0]),
        OpKind::GateGrad => op.vector(2.0, &x[0]),
        _ => Work::default(),
    }
}

fn gradient(arm: &mut Arm<'_>, i: usize) -> Result<Gradients, GraphError> {
    let dy = arm.only_gradient()?;
    let gradient = match &arm.op.kind {
        OpKind::Route {
            capacity,
            normalize,
            scores,
            ..
        } => {
            let kind = OpKind::RouteGrad {
                capacity: *capacity,
                normalize: *normalize,
                scores: *scores,
            };
            let logits = arm.emit("logits", kind, &[arm.x(0), arm.y(1), dy])?;
            if arm.op.inputs.len() == 1 {
                return Ok(vec![(0, logits)]);
            }
            // The bias says who is chosen, and no gate depends on it: zero, and split as the gradient
            // of any bias is.
            let f = Unary::Scale { by: 0.0 };
            let zeros = arm.emit("bias_rows", OpKind::Unary { f }, &[logits])?;
            let mut bias = arm.emit("bias", sum(vec![0, 1]), &[zeros])?;
            // Logits and bias may have types of their own.
            let dtype = arm.graph.ty(arm.x(1)).dtype;
            if arm.graph.ty(bias).dtype != dtype {
                bias = arm.emit("bias_cast", OpKind::Cast { dtype }, &[bias])?;
            }
            return Ok(vec![(0, logits), (1, bias)]);
        }
        // Each the transpose of the other, with the same gates.
        OpKind::Dispatch { .. } if i == 0 => {
            let operands = [&[dy], &arm.op.inputs[1..]].concat();
            arm.emit("x", OpKind::Combine, &operands)?
        }
        OpKind::Dispatch { .. } => {
            arm.emit("gates", OpKind::GateGrad, &[dy, arm.x(0), arm.x(1)])?
        }
        OpKind::Combine if i == 0 => {
            let kind = OpKind::Dispatch {
                experts: arm.len(arm.x(0), 0),
                capacity: arm.len(arm.x(0), 2),
            };
            let operands = [&[dy], &arm.op.inputs[1..]].concat();
            arm.emit("x", kind, &operands)?
        }
        OpKind::ExpertBias if i == 0 => dy,
        OpKind::ExpertBias => arm.emit("bias", sum(vec![1, 2]), &[dy])?,
        OpKind::Combine => arm.emit("gates", OpKind::GateGrad, &[arm.x(0), dy, arm.x(1)])?,
        _ => return not_forward(arm),
    };
    Ok(vec![(i, gradient)])
}

impl Operands<'_> {
    /// Operand `i` is `f[B, S, _]`.
    fn tokens(&self, i: usize) -> Result<(), OpError> {
        self.float(i)?;
        let d = &self.x[i].shape.0;
        self.ensure(d.len() == 3 && d[0] == Dim::Batch, || {
            format!("operand {i} is {}, expected [B, S, _]", self.x[i])
        })
    }
    /// Operand `i` is `f[E, B, C, _]`, with slots that can be numbered.
    fn of_experts(&self, i: usize) -> Result<(), OpError> {
        self.float(i)?;
        let d = &self.x[i].shape.0;
        self.ensure(d.len() == 4 && d[1] == Dim::Batch, || {
            format!("operand {i} is {}, expected [E, B, C, _]", self.x[i])
        })?;
        self.slots_fit(self.fixed(i, 0)?, self.fixed(i, 2)?)
    }
    /// Groups of equal size, of which those that are kept have experts enough for a token.
    fn groups_fit(
        &self,
        ExpertGroups { count, kept, best }: ExpertGroups,
        experts: u64,
        top_k: u64,
    ) -> Result<(), OpError> {
        self.ensure(count >= 1 && experts.is_multiple_of(count.max(1)), || {
            format!("{experts} experts in {count} groups of equal size")
        })?;
        let each = experts / count;
        let enough = each.checked_mul(kept).is_some_and(|n| n >= top_k);
        self.ensure((1..=count).contains(&kept) && enough, || {
            format!("{top_k} experts of {kept} of {count} groups of {each}")
        })?;
        self.ensure((1..=each).contains(&best), || {
            format!("{best} scores of a group of {each} experts")
        })
    }
    /// Slots are numbered in 32 bits.
    fn slots_fit(&self, experts: u64, capacity: u64) -> Result<(), OpError> {
        let n = experts.checked_mul(capacity);
        self.ensure(n.is_some_and(|n| (1..1 << 31).contains(&n)), || {
            format!("{experts} experts with {capacity} slots each; together 1 to 2^31 - 1")
        })
    }
    /// Operand `j` has slots for the tokens of operand `i`.
    fn slots(&self, i: usize, j: usize) -> Result<(), OpError> {
        self.rank(j, 3)?;
        self.is_slots_of(&self.x[i], j)
    }
    fn is_slots_of(&self, tokens: &TensorType, j: usize) -> Result<(), OpError> {
        let slots = &self.x[j];
        let ok = slots.dtype == DType::I32 && slots.shape.0[..2] == tokens.shape.0[..2];
        self.ensure(ok && matches!(slots.shape.0[2], Dim::Fixed(_)), || {
            format!("operand {j} is {slots}, expected i32 slots of {tokens}")
        })
    }
    /// Operand `j` has a gate for each slot of operand `i`.
    fn gates(&self, i: usize, j: usize) -> Result<(), OpError> {
        let expected = TensorType::new(DType::F32, self.x[i].shape.clone());
        self.ensure(self.x[j] == expected, || {
            format!("operand {j} is {}, expected {expected}", self.x[j])
        })
    }
}

/// Factors of the tensors that `Dispatch` and `Combine` stand between.
struct ExpertFactors {
    /// `[B, S, H]`.
    tokens: [FactorId; 3],
    /// `[E, B, C, H]`.
    experts: [FactorId; 4],
    /// `[B, S, k]`.
    slots: [FactorId; 3],
}

impl Builder {
    fn expert_factors(&mut self, experts: &TensorType, slots: &TensorType) -> ExpertFactors {
        let (d, t) = (&experts.shape.0, &slots.shape.0);
        let (b, s, h) = (
            self.factor(d[1], true),
            self.factor(t[1], true),
            self.factor(d[3], true),
        );
        let (e, c, k) = (self.factor(d[0], true), self.whole(d[2]), self.whole(t[2]));
        ExpertFactors {
            tokens: [b, s, h],
            experts: [e, b, c, h],
            slots: [b, s, k],
        }
    }
}

/// Factors of `[B, S, E]` and of `[B, S, k]`: samples are all that can be split.
fn routed(b: &mut Builder, logits: &TensorType, choices: &TensorType) -> [[FactorId; 3]; 2] {
    let d = &logits.shape.0;
    let (batch, s, e) = (b.factor(d[0], true), b.whole(d[1]), b.whole(d[2]));
    let k = b.whole(choices.shape.0[2]);
    [[batch, s, e], [batch, s, k]]
}
