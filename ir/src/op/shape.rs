//! Shape and dtype inference. Every rule that operands can break is an `OpError` here, so a
//! graph that was built is well-typed.

use super::{Binary, OpError, OpKind, SequenceOrder, Unary};
use crate::sharding::ReduceKind;
use crate::{DType, Dim, Shape, TensorType};

pub(super) fn infer(
    kind: &OpKind,
    x: &[TensorType],
    declared: Option<&TensorType>,
) -> Result<Vec<TensorType>, OpError> {
    let cx = Cx { kind, x };
    let one = |t: TensorType| Ok(vec![t]);
    match kind {
        OpKind::Input { .. } => {
            cx.arity(0)?;
            let t = declared.ok_or_else(|| cx.err("needs a declared type".into()))?;
            cx.ensure(
                t.dtype == DType::I32 && t.shape.rank() == 2 && t.shape.0[0] == Dim::Batch,
                || format!("type is {t}, expected i32[B, sequence]"),
            )?;
            one(t.clone())
        }
        OpKind::State { .. } => {
            cx.arity(0)?;
            let t = declared.ok_or_else(|| cx.err("needs a declared type".into()))?;
            cx.ensure(t.dtype.is_float() && !t.shape.has_batch(), || {
                format!("type is {t}, expected floats without a batch dim")
            })?;
            one(t.clone())
        }
        OpKind::Constant { value } => {
            cx.arity(0)?;
            cx.ensure(value.is_finite(), || format!("value {value} is not finite"))?;
            one(TensorType::new(DType::F32, Shape::default()))
        }
        OpKind::Layout => {
            cx.arity(1)?;
            one(x[0].clone())
        }
        OpKind::Cast { dtype } => {
            cx.arity(1)?;
            cx.float(0)?;
            cx.ensure(dtype.is_float(), || "casts to an integer".into())?;
            one(TensorType::new(*dtype, x[0].shape.clone()))
        }
        OpKind::Unary { f } => {
            cx.arity(1)?;
            cx.float(0)?;
            if let Unary::Scale { by } = f {
                cx.ensure(by.is_finite(), || format!("factor {by} is not finite"))?;
            }
            one(x[0].clone())
        }
        OpKind::Binary { f } => {
            cx.arity(2)?;
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
        OpKind::Broadcast { leading } => {
            cx.arity(1)?;
            cx.ensure(
                !x[0].shape.has_batch() || !leading.contains(&Dim::Batch),
                || "two batch dims".into(),
            )?;
            let dims = leading.iter().chain(&x[0].shape.0).copied().collect();
            one(TensorType::new(x[0].dtype, Shape(dims)))
        }
        OpKind::Reduce { kind, dims } => {
            cx.arity(1)?;
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
            cx.arity(1)?;
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
            cx.arity(1)?;
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
            cx.arity(1)?;
            let n = cx.fixed(0, *dim)?;
            cx.ensure(start.checked_add(*len).is_some_and(|end| end <= n), || {
                format!("{start}..+{len} exceeds dim {dim} of {}", x[0])
            })?;
            one(cx.with_dim(0, *dim, *len))
        }
        OpKind::Pad { dim, start, len } => {
            cx.arity(1)?;
            let n = cx.fixed(0, *dim)?;
            cx.ensure(start.checked_add(n).is_some_and(|end| end <= *len), || {
                format!("{} at {start} exceeds {len}", x[0])
            })?;
            one(cx.with_dim(0, *dim, *len))
        }
        OpKind::Unstack { dim } => {
            cx.arity(1)?;
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
        OpKind::DotGeneral { einsum } => {
            cx.arity(2)?;
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
                let find = |i: usize, ls: &[u8]| {
                    ls.iter().position(|&l| l == label).map(|p| x[i].shape.0[p])
                };
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
        OpKind::Embedding => {
            cx.arity(2)?;
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
            cx.arity(2)?;
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
        OpKind::LayerNorm { .. } => {
            cx.arity(3)?;
            cx.row_vector(0, 1)?;
            cx.row_vector(0, 2)?;
            let stat = cx.rows(0)?;
            Ok(vec![x[0].clone(), stat.clone(), stat])
        }
        OpKind::LayerNormGradInput => {
            cx.arity(5)?;
            cx.same(0, 1)?;
            cx.row_vector(0, 2)?;
            cx.stat(0, 3)?;
            cx.stat(0, 4)?;
            one(x[0].clone())
        }
        OpKind::LayerNormGradWeight => {
            cx.arity(4)?;
            cx.same(0, 1)?;
            cx.stat(0, 2)?;
            cx.stat(0, 3)?;
            let t = cx.last(0)?;
            Ok(vec![t.clone(), t])
        }
        OpKind::RmsNorm { .. } => {
            cx.arity(2)?;
            cx.row_vector(0, 1)?;
            Ok(vec![x[0].clone(), cx.rows(0)?])
        }
        OpKind::RmsNormGradInput => {
            cx.arity(4)?;
            cx.same(0, 1)?;
            cx.row_vector(0, 2)?;
            cx.stat(0, 3)?;
            one(x[0].clone())
        }
        OpKind::RmsNormGradWeight => {
            cx.arity(3)?;
            cx.same(0, 1)?;
            cx.stat(0, 2)?;
            one(cx.last(0)?)
        }
        OpKind::Rotary { theta, order, .. } => {
            cx.arity(1)?;
            cx.float(0)?;
            cx.ensure(x[0].shape.rank() >= 3, || {
                format!("{} has no [batch, sequence, .., head_dim]", x[0])
            })?;
            let d = cx.fixed(0, x[0].shape.rank() - 1)?;
            cx.ensure(d % 2 == 0, || format!("head dim {d} is odd"))?;
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
            ..
        } => {
            cx.arity(3)?;
            cx.attention_figures(*scale, *dropout)?;
            cx.attention_operands()?;
            cx.stored(1, *order)?;
            let lse = x[0].shape.0[..x[0].shape.rank() - 1].to_vec();
            Ok(vec![x[0].clone(), TensorType::new(DType::F32, Shape(lse))])
        }
        OpKind::AttentionGrad {
            scale,
            dropout,
            order,
            ..
        } => {
            cx.arity(6)?;
            cx.attention_figures(*scale, *dropout)?;
            cx.attention_operands()?;
            cx.stored(1, *order)?;
            cx.same(0, 3)?;
            cx.same(0, 5)?;
            cx.stat(0, 4)?;
            Ok(vec![x[0].clone(), x[1].clone(), x[2].clone()])
        }
        OpKind::Dropout { p, order, .. } => {
            cx.arity(1)?;
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
        OpKind::LogSumExp => {
            cx.arity(1)?;
            one(cx.rows(0)?)
        }
        OpKind::CrossEntropy => {
            cx.arity(3)?;
            cx.stat(0, 1)?;
            cx.labels(0, 2)?;
            one(cx.rows(0)?)
        }
        OpKind::CrossEntropyGrad => {
            cx.arity(4)?;
            cx.stat(0, 1)?;
            cx.labels(0, 2)?;
            cx.stat(0, 3)?;
            one(x[0].clone())
        }
        OpKind::Route {
            top_k, capacity, ..
        } => {
            cx.arity(1)?;
            cx.tokens(0)?;
            let experts = cx.fixed(0, 2)?;
            cx.ensure((1..=experts).contains(top_k), || {
                format!("{top_k} experts for a token; there are {experts}")
            })?;
            cx.slots_fit(experts, *capacity)?;
            let dims = [&x[0].shape.0[..2], &[Dim::Fixed(*top_k)]].concat();
            let of = |dtype| TensorType::new(dtype, Shape(dims.clone()));
            Ok(vec![of(DType::F32), of(DType::I32)])
        }
        OpKind::RouteGrad { capacity, .. } => {
            cx.arity(3)?;
            cx.tokens(0)?;
            cx.slots_fit(cx.fixed(0, 2)?, *capacity)?;
            cx.slots(0, 1)?;
            cx.gates(1, 2)?;
            one(x[0].clone())
        }
        OpKind::Dispatch { experts, capacity } => {
            cx.two_or_three()?;
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
            cx.two_or_three()?;
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
        OpKind::GateGrad => {
            cx.arity(3)?;
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
        OpKind::Accumulate { dtype } => {
            cx.arity(1)?;
            cx.float(0)?;
            cx.ensure(!x[0].shape.has_batch(), || {
                format!("{} has a batch dim", x[0])
            })?;
            one(TensorType::new(*dtype, x[0].shape.clone()))
        }
        OpKind::SumSquares => {
            cx.arity(1)?;
            cx.float(0)?;
            one(TensorType::new(DType::F32, Shape::default()))
        }
        OpKind::GlobalNorm => {
            cx.ensure(!x.is_empty(), || "no operands".into())?;
            cx.scalars(0)?;
            one(x[0].clone())
        }
        OpKind::ClipCoefficient { max_norm } => {
            cx.arity(2)?;
            cx.scalars(0)?;
            cx.ensure(max_norm.is_none_or(|m| m.is_finite() && m > 0.0), || {
                "the largest norm is not positive".into()
            })?;
            one(x[0].clone())
        }
        OpKind::UpdateLossScale { .. } => {
            cx.arity(4)?;
            cx.scalars(0)?;
            Ok(vec![x[0].clone(), x[0].clone(), x[0].clone()])
        }
        OpKind::AdamW { .. } => {
            cx.arity(x.len().clamp(5, 6))?;
            for i in 1..4 {
                cx.ensure(x[i].shape == x[0].shape, || {
                    format!("operand {i} is {}, the parameter {}", x[i], x[0])
                })?;
            }
            cx.scalars(4)?;
            Ok(vec![x[0].clone(), x[2].clone(), x[3].clone()])
        }
        OpKind::Sgd { .. } => {
            cx.arity(4)?;
            for i in 1..3 {
                cx.ensure(x[i].shape == x[0].shape, || {
                    format!("operand {i} is {}, the parameter {}", x[i], x[0])
                })?;
            }
            cx.scalars(3)?;
            Ok(vec![x[0].clone(), x[2].clone()])
        }
    }
}

/// The op under inference, for error messages and common conditions.
struct Cx<'a> {
    kind: &'a OpKind,
    x: &'a [TensorType],
}

impl Cx<'_> {
    fn err(&self, problem: String) -> OpError {
        OpError {
            op: self.kind.name(),
            problem,
        }
    }
    fn ensure(&self, holds: bool, problem: impl FnOnce() -> String) -> Result<(), OpError> {
        if holds {
            Ok(())
        } else {
            Err(self.err(problem()))
        }
    }
    fn arity(&self, n: usize) -> Result<(), OpError> {
        self.ensure(self.x.len() == n, || {
            format!("{} operands, expected {n}", self.x.len())
        })
    }
    fn float(&self, i: usize) -> Result<(), OpError> {
        self.ensure(self.x[i].dtype.is_float(), || {
            format!("operand {i} is {}, expected floats", self.x[i])
        })
    }
    fn rank(&self, i: usize, n: usize) -> Result<(), OpError> {
        self.ensure(self.x[i].shape.rank() == n, || {
            format!("operand {i} is {}, expected {n} dims", self.x[i])
        })
    }
    fn fixed(&self, i: usize, dim: usize) -> Result<u64, OpError> {
        match self.x[i].shape.0.get(dim) {
            Some(Dim::Fixed(n)) => Ok(*n),
            _ => Err(self.err(format!("dim {dim} of {} is not a fixed length", self.x[i]))),
        }
    }
    fn with_dim(&self, i: usize, dim: usize, len: u64) -> TensorType {
        let mut t = self.x[i].clone();
        t.shape.0[dim] = Dim::Fixed(len);
        t
    }
    fn same(&self, i: usize, j: usize) -> Result<(), OpError> {
        self.ensure(self.x[i] == self.x[j], || {
            format!(
                "operands {i} and {j} differ: {} and {}",
                self.x[i], self.x[j]
            )
        })
    }
    /// Operand `j` is a vector along the last dim of operand `i`.
    fn row_vector(&self, i: usize, j: usize) -> Result<(), OpError> {
        self.float(i)?;
        let ok = self.x[j].shape.rank() == 1
            && self.x[i].shape.0.last() == self.x[j].shape.0.last()
            && self.x[i].dtype == self.x[j].dtype;
        self.ensure(ok, || {
            format!(
                "operand {j} is {}, expected one row of {}",
                self.x[j], self.x[i]
            )
        })
    }
    /// f32 with the dims of operand `i` but the last.
    fn rows(&self, i: usize) -> Result<TensorType, OpError> {
        self.float(i)?;
        self.ensure(self.x[i].shape.rank() >= 1, || {
            format!("operand {i} is a scalar")
        })?;
        let dims = &self.x[i].shape.0;
        Ok(TensorType::new(
            DType::F32,
            Shape(dims[..dims.len() - 1].to_vec()),
        ))
    }
    fn last(&self, i: usize) -> Result<TensorType, OpError> {
        let d = self.x[i]
            .shape
            .0
            .last()
            .ok_or_else(|| self.err(format!("operand {i} is a scalar")))?;
        Ok(TensorType::new(self.x[i].dtype, Shape(vec![*d])))
    }
    fn stat(&self, i: usize, j: usize) -> Result<(), OpError> {
        let expected = self.rows(i)?;
        self.ensure(self.x[j] == expected, || {
            format!("operand {j} is {}, expected {expected}", self.x[j])
        })
    }
    fn labels(&self, i: usize, j: usize) -> Result<(), OpError> {
        let expected = TensorType::new(DType::I32, self.rows(i)?.shape);
        self.ensure(self.x[j] == expected, || {
            format!("operand {j} is {}, expected {expected}", self.x[j])
        })
    }
    fn scalars(&self, from: usize) -> Result<(), OpError> {
        let scalar = TensorType::new(DType::F32, Shape::default());
        for (i, t) in self.x.iter().enumerate().skip(from) {
            self.ensure(*t == scalar, || {
                format!("operand {i} is {t}, expected f32[]")
            })?;
        }
        Ok(())
    }
    fn two_or_three(&self) -> Result<(), OpError> {
        self.ensure(matches!(self.x.len(), 2 | 3), || {
            format!("{} operands, expected 2 or 3", self.x.len())
        })
    }
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
    /// Whether the sequence of operand `i` divides into the chunks of an order.
    fn stored(&self, i: usize, order: SequenceOrder) -> Result<(), OpError> {
        let len = self.fixed(i, 1)?;
        self.ensure(order.fits(len), || {
            let n = order.n_chunks();
            format!(
                "the sequence of {} does not divide into the {n} chunks of zigzag order ({} ranks, expected 1 or more)",
                self.x[i],
                n / 2
            )
        })
    }
    fn attention_figures(&self, scale: f64, dropout: f64) -> Result<(), OpError> {
        self.ensure(scale.is_finite(), || format!("scale {scale} is not finite"))?;
        self.ensure((0.0..1.0).contains(&dropout), || {
            format!("dropout {dropout} is outside [0, 1)")
        })
    }
    fn attention_operands(&self) -> Result<(), OpError> {
        self.float(0)?;
        self.same(1, 2)?;
        self.rank(1, 4)?;
        let (q, k) = (&self.x[0].shape.0, &self.x[1].shape.0);
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
        })
    }
}
