//! Causal attention and the rotation of its queries and keys.

use super::family::*;

pub(super) static FAMILY: Family = Family {
    infer,
    rule,
    work,
    gradient,
    groups: |op| match op.kind {
        OpKind::Attention { .. } => together(op),
        _ => singly(op),
    },
};

fn infer(cx: &Operands<'_>) -> Result<Vec<TensorType>, OpError> {
    let x = cx.x;
    match cx.kind {
        OpKind::Rotary {
            theta, part, order, ..
        } => {
            cx.float(0)?;
            cx.ensure(x[0].shape.rank() >= 3, || {
                format!("{} has no [batch, sequence, .., head_dim]", x[0])
            })?;
            let d = cx.fixed(0, x[0].shape.rank() - 1)?;
            let turned = part.unwrap_or(d);
            cx.ensure(turned % 2 == 0, || format!("head dim {turned} is odd"))?;
            cx.ensure(turned > 0 && turned <= d, || {
                format!("{turned} elements of a head of {d} turn")
            })?;
            cx.ensure(theta.is_finite() && *theta > 0.0, || {
                format!("theta {theta} is not positive")
            })?;
            cx.stored(0, *order)?;
            one(x[0].clone())
        }
        OpKind::Attention {
            scale,
            dropout,
            order,
            keys,
            bounds,
            ..
        } => {
            cx.attention_figures(*scale, *dropout)?;
            cx.attention_operands()?;
            cx.stored(1, *order)?;
            cx.all_keys(*keys)?;
            cx.bounds(*bounds)?;
            let lse = x[0].shape.0[..x[0].shape.rank() - 1].to_vec();
            Ok(vec![cx.attended(), TensorType::new(DType::F32, Shape(lse))])
        }
        OpKind::AttentionGrad {
            scale,
            dropout,
            order,
            keys,
            bounds,
            ..
        } => {
            cx.attention_figures(*scale, *dropout)?;
            cx.attention_operands()?;
            cx.stored(1, *order)?;
            cx.all_keys(*keys)?;
            cx.bounds(*bounds)?;
            let o = cx.attended();
            for i in [3, 5] {
                cx.ensure(x[i] == o, || {
                    format!("operand {i} is {}, expected {o}", x[i])
                })?;
            }
            cx.stat(0, 4)?;
            if x.len() == 7 {
                cx.stat(0, 6)?;
            }
            Ok(vec![x[0].clone(), x[1].clone(), x[2].clone()])
        }
        _ => cx.stranger(),
    }
}

fn rule(b: &mut Builder, kind: &OpKind, x: &[TensorType], _: &[TensorType]) {
    match kind {
        OpKind::Rotary { .. } => {
            let (all, _, _) = rows_and_last(b, &x[0], false);
            b.operand(&all).result(&all).linear(&[&[0]]);
        }
        OpKind::Attention { .. } | OpKind::AttentionGrad { .. } => {
            // q: B S K (G) D; k: B T K D; v: B T K V; o: B S K (G) V. A split S leaves every key in
            // place; a split S or G makes the gradients of k and v partial. Where T is split as S
            // is, keys and values go around.
            let q = dims(&x[0]);
            let bsz = b.factor(q[0], true);
            let s = b.factor(q[1], true);
            let heads = b.free(&q[2..q.len() - 1]);
            let d = b.whole(q[q.len() - 1]);
            let t = b.whole(x[1].shape.0[1]);
            let v = match x[2] == x[1] {
                true => d,
                false => b.whole(x[2].shape.0[3]),
            };
            let lse = [vec![bsz, s], heads.clone()].concat();
            let qf = [&lse[..], &[d]].concat();
            let of = [&lse[..], &[v]].concat();
            let (kf, vf) = ([bsz, t, heads[0], d], [bsz, t, heads[0], v]);
            b.rule.ring = Some((s, t));
            b.operand(&qf).operand(&kf).operand(&vf);
            if matches!(kind, OpKind::Attention { .. }) {
                b.result(&of).result(&lse);
            } else {
                b.operand(&of).operand(&lse).operand(&of);
                // Both gradients that come in add up to those that go out.
                let incoming: &[usize] = match x.len() {
                    7 => &[5, 6],
                    _ => &[5],
                };
                if x.len() == 7 {
                    b.operand(&lse);
                }
                b.result(&qf).result(&kf).result(&vf).linear(&[incoming]);
            }
        }
        _ => {}
    }
}

fn work(op: &Lengths<'_>) -> Work {
    let x = op.x;
    match op.kind {
        OpKind::Attention { .. } | OpKind::AttentionGrad { .. } => {
            // Products of S x T x D and S x T x V per head forward; backward dQ and dK, dP and dV.
            let times = if matches!(op.kind, OpKind::Attention { .. }) {
                1.0
            } else {
                2.0
            };
            let (q, t) = (&x[0].1, x[1].1[1]);
            let d = q[q.len() - 1];
            let heads: u64 = q[2..q.len() - 1].iter().product();
            let shape = MatmulShape {
                batch: q[0].saturating_mul(heads),
                m: q[1],
                n: t,
                k: d,
            };
            let scores = shape.batch as f64 * shape.m as f64 * t as f64;
            let widths = d as f64 + x[2].1.last().map_or(0.0, |&v| v as f64);
            let flops = 2.0 * times * scores * widths;
            // The last S queries see T - S/2 of the T keys each, or a window; no other S queries
            // see more, but where blocks are seen, of which a stretch may end before. A rank of a
            // zigzag order has early and late ones, and sees what all see on average. Of a shard
            // that came around, some rank's queries see all where they stand by position.
            let (causal_share, counted_share) = match op.kind {
                OpKind::Attention {
                    order,
                    keys,
                    bounds,
                    ..
                }
                | OpKind::AttentionGrad {
                    order,
                    keys,
                    bounds,
                    ..
                } => {
                    let causal = match (*keys, order.is_natural()) {
                        (Keys::Ring { step, ranks }, true) => bounds.ring_share(q[1], step, ranks),
                        (Keys::All, true) => bounds.share(q[1], t),
                        (Keys::Ring { ranks, .. }, false) if bounds.blocks.is_some() => {
                            let all = t.saturating_mul(u64::from(ranks));
                            bounds.share(all, all)
                        }
                        (_, false) => bounds.share(t, t),
                    };
                    (causal, bounds.counted_share(t))
                }
                _ => (0.0, 0.0),
            };
            Work {
                attention_flops: flops,
                causal_share,
                counted_share,
                vector_flops: 4.0 * scores,
                bytes: op.all_bytes(),
                matmul: Some(shape),
                ..Work::default()
            }
        }
        OpKind::Rotary { .. } => op.vector(6.0, &x[0]),
        _ => Work::default(),
    }
}

fn gradient(arm: &mut Arm<'_>, i: usize) -> Result<Gradients, GraphError> {
    let gradient = match &arm.op.kind {
        // A rotation's transpose is its inverse.
        OpKind::Rotary {
            theta,
            scaling,
            inverse,
            part,
            order,
        } => {
            let kind = OpKind::Rotary {
                theta: *theta,
                scaling: *scaling,
                inverse: !inverse,
                part: *part,
                order: *order,
            };
            let dy = arm.only_gradient()?;
            arm.emit("x", kind, &[dy])?
        }
        // The scores are computed again from q, k and lse. The loss may depend on lse too, as it
        // does where an attention sink takes a share of each row.
        OpKind::Attention {
            scale,
            dropout,
            order,
            bounds,
            ..
        } => {
            let kind = OpKind::AttentionGrad {
                scale: *scale,
                dropout: *dropout,
                key: arm.op.path.clone(),
                order: *order,
                keys: Keys::All,
                bounds: *bounds,
            };
            let [Some(dy), dlse] = *arm.results else {
                return arm.undefined("the loss depends on its log-sum-exp alone");
            };
            let mut operands = vec![arm.x(0), arm.x(1), arm.x(2), arm.y(0), arm.y(1), dy];
            operands.extend(dlse);
            let d = arm.emit_all("qkv", kind, &operands)?;
            return Ok(d.into_iter().enumerate().collect());
        }
        _ => return not_forward(arm),
    };
    Ok(vec![(i, gradient)])
}

impl Operands<'_> {
    fn all_keys(&self, keys: Keys) -> Result<(), OpError> {
        self.ensure(keys.are_all(), || {
            "the keys of a ring are for instructions of a program".into()
        })
    }
    fn bounds(&self, of: Bounds) -> Result<(), OpError> {
        let Bounds {
            window,
            blocks,
            cap,
            ..
        } = of;
        self.ensure(window != Some(0), || "a window of no tokens".into())?;
        let problem = blocks.and_then(|b| b.problem());
        self.ensure(problem.is_none(), || problem.clone().unwrap_or_default())?;
        let fits = cap.is_none_or(|c| c.is_finite() && c > 0.0);
        self.ensure(fits, || format!("cap {cap:?} is not positive"))
    }
    fn attention_figures(&self, scale: f64, dropout: f64) -> Result<(), OpError> {
        self.ensure(scale.is_finite(), || format!("scale {scale} is not finite"))?;
        self.ensure((0.0..1.0).contains(&dropout), || {
            format!("dropout {dropout} is outside [0, 1)")
        })
    }
    fn attention_operands(&self) -> Result<(), OpError> {
        self.float(0)?;
        self.rank(1, 4)?;
        self.rank(2, 4)?;
        let (q, k, v) = (&self.x[0].shape.0, &self.x[1].shape.0, &self.x[2].shape.0);
        let ok = (q.len() == 4 || q.len() == 5)
            && q[0] == Dim::Batch
            && q[..3] == k[..3]
            && q.last() == k.last()
            && self.x[0].dtype == self.x[1].dtype;
        self.ensure(ok, || {
            format!(
                "q {} and k {} do not match [B,S,kv,(groups,)D]",
                self.x[0], self.x[1]
            )
        })?;
        let ok = k[..3] == v[..3] && self.x[1].dtype == self.x[2].dtype;
        self.ensure(ok && matches!(v[3], Dim::Fixed(_)), || {
            format!(
                "k {} and v {} do not match [B,S,kv,_]",
                self.x[1], self.x[2]
            )
        })
    }
    /// Type of the result: rows of queries as wide as values.
    fn attended(&self) -> TensorType {
        let mut o = self.x[0].clone();
        if let (Some(last), Some(&v)) = (o.shape.0.last_mut(), self.x[2].shape.0.last()) {
            *last = v;
        }
        o
    }
}
