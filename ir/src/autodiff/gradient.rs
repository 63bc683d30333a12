//! The gradient rule of every op kind, one arm each.
//!
//! Notation: `dy` is the gradient of result 0 `y`, `dx` that of the operand `x`. Sums over
//! broadcast dims are `Reduce`.

use crate::op::{Binary, Einsum, Unary};
use crate::sharding::ReduceKind;
use crate::{
    Dim, Graph, GraphError, Op, OpId, OpKind, Origin, Pass, Place, Region, Shape, ValueId,
};

/// Operands whose gradients come out of the same ops; operands without gradient (ids,
/// labels, the log-sum-exp of a cross entropy) are in no group.
pub(super) fn groups(op: &Op) -> Vec<Vec<usize>> {
    match op.kind {
        OpKind::LayerNorm { .. } => vec![vec![0], vec![1, 2]],
        OpKind::Attention { .. } | OpKind::Stack { .. } => vec![(0..op.inputs.len()).collect()],
        OpKind::Embedding | OpKind::CrossEntropy => vec![vec![0]],
        _ => (0..op.inputs.len()).map(|i| vec![i]).collect(),
    }
}

/// One forward op whose gradient is being written, and for which pass.
pub(super) struct Arm<'a> {
    graph: &'a mut Graph,
    id: OpId,
    op: &'a Op,
    results: &'a [Option<ValueId>],
    pass: Pass,
    /// The first operand of the group whose gradients are being written.
    operand: u32,
}

type Gradients = Vec<(usize, ValueId)>;

impl<'a> Arm<'a> {
    /// `results` are the gradients of the op's results, where there are any.
    pub(super) fn new(
        graph: &'a mut Graph,
        id: OpId,
        op: &'a Op,
        results: &'a [Option<ValueId>],
        pass: Pass,
    ) -> Self {
        Arm {
            graph,
            id,
            op,
            results,
            pass,
            operand: 0,
        }
    }

    /// Adds the ops that compute the gradients of the operands of one group (see
    /// [`groups`]) and returns them with the operands' indices.
    pub(super) fn gradients(&mut self, group: &[usize]) -> Result<Gradients, GraphError> {
        let op = self.op;
        let x = |i: usize| op.inputs[i];
        let y = |i: usize| op.outputs[i];
        let i = group[0];
        self.operand = i as u32;
        if let OpKind::Unstack { dim } = op.kind {
            return Ok(vec![(0, self.unstack(dim)?)]);
        }
        let dy = self.only_gradient()?;
        let gradient = match &op.kind {
            // dx = dy, as one value of its own: the gradient's layout is a decision too
            // (above all at layer boundaries).
            OpKind::Layout => self.emit("x", OpKind::Layout, &[dy])?,
            // The rounding is taken as the identity; dx has x's dtype.
            OpKind::Cast { .. } => {
                let dtype = self.graph.ty(x(0)).dtype;
                self.emit("x", OpKind::Cast { dtype }, &[dy])?
            }
            OpKind::Unary { f } => self.unary(*f, dy)?,
            OpKind::Binary { f } => self.binary(*f, i, dy)?,
            // dx = dy summed over the new dims.
            OpKind::Broadcast { leading } => {
                self.emit("x", sum((0..leading.len()).collect()), &[dy])?
            }
            OpKind::Reduce {
                kind: ReduceKind::Sum,
                dims,
            } => self.reduce_sum(dims, dy)?,
            OpKind::Reduce { .. } => {
                return self.undefined("a maximum has no gradient here; only sums do");
            }
            OpKind::Reshape { .. } => {
                let shape = self.shape(x(0)).0;
                self.emit("x", OpKind::Reshape { shape }, &[dy])?
            }
            OpKind::Transpose { perm } => {
                let mut inverse = vec![0; perm.len()];
                perm.iter()
                    .enumerate()
                    .for_each(|(to, &from)| inverse[from] = to);
                self.emit("x", OpKind::Transpose { perm: inverse }, &[dy])?
            }
            OpKind::Slice { dim, start, .. } => {
                let kind = OpKind::Pad {
                    dim: *dim,
                    start: *start,
                    len: self.len(x(0), *dim),
                };
                self.emit("x", kind, &[dy])?
            }
            OpKind::Pad { dim, start, .. } => {
                let kind = OpKind::Slice {
                    dim: *dim,
                    start: *start,
                    len: self.len(x(0), *dim),
                };
                self.emit("x", kind, &[dy])?
            }
            OpKind::Stack { dim } => {
                let parts = self.emit_all("x", OpKind::Unstack { dim: *dim }, &[dy])?;
                return Ok(parts.into_iter().enumerate().collect());
            }
            OpKind::DotGeneral { einsum } => self.dot_general(einsum, i, dy)?,
            // Rows of dy are added up by id.
            OpKind::Embedding => {
                let kind = OpKind::EmbeddingGrad {
                    vocab: self.len(x(0), 0),
                };
                self.emit("weight", kind, &[x(1), dy])?
            }
            OpKind::LayerNorm { .. } if i == 0 => self.emit(
                "x",
                OpKind::LayerNormGradInput,
                &[dy, x(0), x(1), y(1), y(2)],
            )?,
            OpKind::LayerNorm { .. } => {
                let d = self.emit_all(
                    "weight",
                    OpKind::LayerNormGradWeight,
                    &[dy, x(0), y(1), y(2)],
                )?;
                return Ok(vec![(1, d[0]), (2, d[1])]);
            }
            OpKind::RmsNorm { .. } if i == 0 => {
                self.emit("x", OpKind::RmsNormGradInput, &[dy, x(0), x(1), y(1)])?
            }
            OpKind::RmsNorm { .. } => {
                self.emit("weight", OpKind::RmsNormGradWeight, &[dy, x(0), y(1)])?
            }
            // A rotation's transpose is its inverse.
            OpKind::Rotary {
                theta,
                scaling,
                inverse,
                order,
            } => {
                let kind = OpKind::Rotary {
                    theta: *theta,
                    scaling: *scaling,
                    inverse: !inverse,
                    order: *order,
                };
                self.emit("x", kind, &[dy])?
            }
            // The scores are computed again from q, k and lse.
            OpKind::Attention {
                scale,
                dropout,
                order,
                ..
            } => {
                let kind = OpKind::AttentionGrad {
                    scale: *scale,
                    dropout: *dropout,
                    key: op.path.clone(),
                    order: *order,
                };
                let d = self.emit_all("qkv", kind, &[x(0), x(1), x(2), y(0), y(1), dy])?;
                return Ok(d.into_iter().enumerate().collect());
            }
            // Linear with a fixed mask: the same op with the same key.
            OpKind::Dropout { .. } => self.emit("x", op.kind.clone(), &[dy])?,
            OpKind::LogSumExp => {
                return self.undefined(
                    "a log-sum-exp is differentiated through the cross entropy that uses it only",
                );
            }
            OpKind::CrossEntropy => self.cross_entropy(dy)?,
            OpKind::Route {
                capacity,
                normalize,
                ..
            } => {
                let kind = OpKind::RouteGrad {
                    capacity: *capacity,
                    normalize: *normalize,
                };
                self.emit("logits", kind, &[x(0), y(1), dy])?
            }
            // Each the transpose of the other, with the same gates.
            OpKind::Dispatch { .. } if i == 0 => {
                let operands = [&[dy], &op.inputs[1..]].concat();
                self.emit("x", OpKind::Combine, &operands)?
            }
            OpKind::Dispatch { .. } => self.emit("gates", OpKind::GateGrad, &[dy, x(0), x(1)])?,
            OpKind::Combine if i == 0 => {
                let kind = OpKind::Dispatch {
                    experts: self.len(x(0), 0),
                    capacity: self.len(x(0), 2),
                };
                let operands = [&[dy], &op.inputs[1..]].concat();
                self.emit("x", kind, &operands)?
            }
            OpKind::Combine => self.emit("gates", OpKind::GateGrad, &[x(0), dy, x(1)])?,
            OpKind::Input { .. }
            | OpKind::State { .. }
            | OpKind::Constant { .. }
            | OpKind::Unstack { .. }
            | OpKind::EmbeddingGrad { .. }
            | OpKind::LayerNormGradInput
            | OpKind::LayerNormGradWeight
            | OpKind::RmsNormGradInput
            | OpKind::RmsNormGradWeight
            | OpKind::AttentionGrad { .. }
            | OpKind::CrossEntropyGrad
            | OpKind::RouteGrad { .. }
            | OpKind::GateGrad
            | OpKind::Accumulate { .. }
            | OpKind::SumSquares
            | OpKind::GlobalNorm
            | OpKind::ClipCoefficient { .. }
            | OpKind::UpdateLossScale { .. }
            | OpKind::AdamW { .. }
            | OpKind::Sgd { .. } => return self.undefined("it is no op of a forward pass"),
        };
        Ok(vec![(i, gradient)])
    }

    /// `dx = f'(x) * dy`.
    fn unary(&mut self, f: Unary, dy: ValueId) -> Result<ValueId, GraphError> {
        let (x, y) = (self.op.inputs[0], self.op.outputs[0]);
        match f {
            Unary::Neg | Unary::Scale { .. } => self.emit("x", OpKind::Unary { f }, &[dy]),
            Unary::GeluErf => self.emit("x", binary(Binary::GeluErfGrad), &[x, dy]),
            Unary::GeluTanh => self.emit("x", binary(Binary::GeluTanhGrad), &[x, dy]),
            Unary::Silu => self.emit("x", binary(Binary::SiluGrad), &[x, dy]),
            Unary::Relu => self.emit("x", binary(Binary::ReluGrad), &[x, dy]),
            Unary::Exp => self.emit("x", binary(Binary::Mul), &[dy, y]),
            // tanh' = 1 - tanh^2, so dx = dy - dy * y^2.
            Unary::Tanh => {
                let square = self.emit("x_square", OpKind::Unary { f: Unary::Square }, &[y])?;
                let product = self.emit("x_mul", binary(Binary::Mul), &[dy, square])?;
                self.emit("x", binary(Binary::Sub), &[dy, product])
            }
            Unary::Square => {
                let twice = self.emit(
                    "x_twice",
                    OpKind::Unary {
                        f: Unary::Scale { by: 2.0 },
                    },
                    &[x],
                )?;
                self.emit("x", binary(Binary::Mul), &[dy, twice])
            }
        }
    }

    /// Add: `da = dy`, `db = dy`; Sub: `db = -dy`; Mul: `da = dy * b`, `db = dy * a`; `db`
    /// summed over the dims that `b` was broadcast over.
    fn binary(&mut self, f: Binary, operand: usize, dy: ValueId) -> Result<ValueId, GraphError> {
        let (a, b) = (self.op.inputs[0], self.op.inputs[1]);
        let n_leading = self.shape(a).rank() - self.shape(b).rank();
        match (f, operand) {
            (Binary::Add | Binary::Sub, 0) => Ok(dy),
            (Binary::Mul, 0) => self.emit("lhs", binary(Binary::Mul), &[dy, b]),
            (Binary::Add, _) => self.sum_leading("rhs", n_leading, dy),
            (Binary::Sub, _) => {
                let summed = self.sum_leading("rhs_sum", n_leading, dy)?;
                self.emit("rhs", OpKind::Unary { f: Unary::Neg }, &[summed])
            }
            (Binary::Mul, _) => {
                let product = self.emit(
                    if n_leading == 0 { "rhs" } else { "rhs_mul" },
                    binary(Binary::Mul),
                    &[dy, a],
                )?;
                self.sum_leading("rhs", n_leading, product)
            }
            (
                Binary::GeluErfGrad | Binary::GeluTanhGrad | Binary::SiluGrad | Binary::ReluGrad,
                _,
            ) => self.undefined("second derivatives are not defined"),
        }
    }

    /// `dx = dy` copied over the dims that were summed: as new leading dims, then moved to
    /// their places.
    fn reduce_sum(&mut self, dims: &[usize], dy: ValueId) -> Result<ValueId, GraphError> {
        let shape = self.shape(self.op.inputs[0]);
        if dims.is_empty() {
            return Ok(dy);
        }
        let leading: Vec<Dim> = dims.iter().map(|&d| shape.0[d]).collect();
        let in_place = dims.iter().copied().eq(0..dims.len());
        let wide = self.emit(
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
        self.emit("x", OpKind::Transpose { perm }, &[wide])
    }

    /// `dx` is the stack of the results' gradients. A result without gradient gets zeros,
    /// as another's gradient times 0: no layout or partial sum changes for them.
    fn unstack(&mut self, dim: usize) -> Result<ValueId, GraphError> {
        let some = self.results.iter().flatten().next().copied();
        let some = some.expect("a visited op has a result with a gradient");
        let mut parts = Vec::with_capacity(self.results.len());
        for (i, &part) in self.results.iter().enumerate() {
            parts.push(match part {
                Some(gradient) => gradient,
                None => self.emit(
                    &format!("zero{i}"),
                    OpKind::Unary {
                        f: Unary::Scale { by: 0.0 },
                    },
                    &[some],
                )?,
            });
        }
        self.emit("x", OpKind::Stack { dim }, &parts)
    }

    /// Einsums again: `dlhs = dy . rhs`, `drhs = lhs . dy`.
    fn dot_general(
        &mut self,
        einsum: &Einsum,
        operand: usize,
        dy: ValueId,
    ) -> Result<ValueId, GraphError> {
        let (lhs, rhs) = (self.op.inputs[0], self.op.inputs[1]);
        match operand {
            0 => self.emit(
                "lhs",
                OpKind::DotGeneral {
                    einsum: einsum.grad_lhs(),
                },
                &[dy, rhs],
            ),
            _ => self.emit(
                "rhs",
                OpKind::DotGeneral {
                    einsum: einsum.grad_rhs(),
                },
                &[lhs, dy],
            ),
        }
    }

    /// `dlogits = (softmax(logits) - onehot(labels)) * dnll`, which covers the dependence
    /// through `lse`; hence `lse` must be the log-sum-exp of these logits.
    fn cross_entropy(&mut self, dnll: ValueId) -> Result<ValueId, GraphError> {
        let [logits, lse, labels] = self.op.inputs[..] else {
            return self.undefined("it does not have three operands");
        };
        let norm = self.graph.op(self.graph.value(lse).producer);
        if norm.kind != OpKind::LogSumExp || norm.inputs != [logits] {
            return self.undefined("its second operand is not the log-sum-exp of its logits");
        }
        self.emit(
            "logits",
            OpKind::CrossEntropyGrad,
            &[logits, lse, labels, dnll],
        )
    }

    /// The gradient of result 0. Statistics (means, log-sum-exps), the other results of ops
    /// other than `Unstack`, are not differentiated.
    fn only_gradient(&self) -> Result<ValueId, GraphError> {
        match self.results {
            [Some(dy), rest @ ..] if rest.iter().all(Option::is_none) => Ok(*dy),
            _ => self.undefined("the loss depends on its statistics, which are not differentiated"),
        }
    }
    fn sum_leading(
        &mut self,
        what: &str,
        n_leading: usize,
        x: ValueId,
    ) -> Result<ValueId, GraphError> {
        if n_leading == 0 {
            Ok(x)
        } else {
            self.emit(what, sum((0..n_leading).collect()), &[x])
        }
    }
    fn shape(&self, v: ValueId) -> Shape {
        self.graph.ty(v).shape.clone()
    }
    /// Length of a dim that inference has found to be fixed.
    fn len(&self, v: ValueId, dim: usize) -> u64 {
        self.graph.ty(v).shape.0[dim].bind(1)
    }
    fn undefined<T>(&self, why: &str) -> Result<T, GraphError> {
        Err(GraphError::Differentiate(format!(
            "op `{}` ({}) cannot be differentiated: {why}",
            self.op.path,
            self.op.kind.name()
        )))
    }
    fn emit(
        &mut self,
        what: &str,
        kind: OpKind,
        inputs: &[ValueId],
    ) -> Result<ValueId, GraphError> {
        Ok(self.emit_all(what, kind, inputs)?[0])
    }
    fn emit_all(
        &mut self,
        what: &str,
        kind: OpKind,
        inputs: &[ValueId],
    ) -> Result<Vec<ValueId>, GraphError> {
        let place = Place {
            path: format!("grad.{}.{what}", self.op.path),
            pass: self.pass,
            region: Region::Microbatch,
            layer: self.op.layer,
        };
        let origin = Origin::Gradient {
            of: self.id,
            operand: self.operand,
        };
        self.graph.add_made(&[], kind, inputs, place, origin)
    }
}

fn binary(f: Binary) -> OpKind {
    OpKind::Binary { f }
}

fn sum(dims: Vec<usize>) -> OpKind {
    OpKind::Reduce {
        kind: ReduceKind::Sum,
        dims,
    }
}
