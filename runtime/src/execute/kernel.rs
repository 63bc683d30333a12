//! One op on local shards: the only bridge from `OpKind` to the CPU kernels.
//!
//! Kernels compute in f32. An f32 operand or result is used where it lies; other floats are
//! widened before and rounded once after. Ops that only move elements keep the storage type.
//! After every op the padding of the results is zero again.
//!
//! Where elements stand in the whole tensor matters to few ops (embeddings, rotary positions,
//! causal masks, split vocabularies, dropout); they find it in [`Local`].

use super::local::{Local, is_computed, narrow, widen};
use crate::cpu::attention::{self, AttentionDims};
use crate::cpu::{elementwise, embedding, layout, loss, matmul, norm, optimizer, rotary};
use crate::error::RuntimeError;
use crate::rng::{self, Key};
use ir::op::{Binary, RopeScaling, Unary};
use ir::{DType, OpKind, ReduceKind};
use std::borrow::Cow;

/// What an op needs to know of the run besides its operands.
#[derive(Clone, Copy, Debug)]
pub struct Context {
    /// Seed of the run: key of dropout masks.
    pub seed: u64,
    /// Training step, from 0.
    pub step: u64,
    /// Learning rate of the step.
    pub lr: f64,
    /// Index in the global batch of the microbatch's first sample.
    pub first_sample: u64,
    /// False in validation, where dropout keeps everything.
    pub training: bool,
    /// Threads for the large kernels.
    pub threads: usize,
}

/// An operand.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a> {
    /// The part of the tensor.
    pub local: &'a Local,
    /// Its buffer.
    pub data: &'a [u8],
}

/// A result.
#[derive(Debug)]
pub struct Output<'a> {
    /// The part of the tensor.
    pub local: &'a Local,
    /// Its buffer.
    pub data: &'a mut [u8],
}

/// True when the op has a kernel. Sources have none: their values are given.
pub fn supports(op: &OpKind) -> bool {
    match op {
        OpKind::Input { .. } | OpKind::State { .. } | OpKind::Constant { .. } => false,
        OpKind::Layout
        | OpKind::Cast { .. }
        | OpKind::Unary { .. }
        | OpKind::Binary { .. }
        | OpKind::Broadcast { .. }
        | OpKind::Reduce { .. }
        | OpKind::Reshape { .. }
        | OpKind::Transpose { .. }
        | OpKind::Slice { .. }
        | OpKind::Pad { .. }
        | OpKind::Unstack { .. }
        | OpKind::Stack { .. }
        | OpKind::DotGeneral { .. }
        | OpKind::Embedding
        | OpKind::EmbeddingGrad { .. }
        | OpKind::LayerNorm { .. }
        | OpKind::LayerNormGradInput
        | OpKind::LayerNormGradWeight
        | OpKind::RmsNorm { .. }
        | OpKind::RmsNormGradInput
        | OpKind::RmsNormGradWeight
        | OpKind::Rotary { .. }
        | OpKind::Attention { .. }
        | OpKind::AttentionGrad { .. }
        | OpKind::Dropout { .. }
        | OpKind::LogSumExp
        | OpKind::CrossEntropy
        | OpKind::CrossEntropyGrad
        | OpKind::Accumulate { .. }
        | OpKind::SumSquares
        | OpKind::GlobalNorm
        | OpKind::ClipCoefficient { .. }
        | OpKind::UpdateLossScale { .. }
        | OpKind::AdamW { .. }
        | OpKind::Sgd { .. } => true,
    }
}

/// Results that are written over an operand's old value: pairs (operand, result). The
/// operand's value stands in the result's buffer when [`kernel`] is called, and the operand
/// itself is not read.
pub fn in_place(op: &OpKind) -> &'static [(usize, usize)] {
    match op {
        OpKind::AdamW { .. } => &[(0, 0), (2, 1), (3, 2)],
        OpKind::Sgd { .. } => &[(0, 0), (2, 1)],
        _ => &[],
    }
}

/// Runs one op. `path` is the op's path, for messages and as key of forward attention's mask.
///
/// `Accumulate` adds to what its result's buffer holds; for updates see [`in_place`].
/// `GlobalNorm` takes scalars, or one vector of them. Returns the bytes of scratch memory that
/// conversions took. Fails when numbers of operands or element types are not the op's;
/// shapes that do not fit panic, as they do in the kernels.
pub fn kernel(
    op: &OpKind,
    path: &str,
    inputs: &[Operand<'_>],
    outputs: &mut [Output<'_>],
    cx: &Context,
) -> Result<u64, RuntimeError> {
    let call = Call {
        op,
        path,
        inputs,
        cx,
    };
    call.check(outputs)?;
    let scratch = match call.moves(outputs) {
        true => 0,
        false => call.compute(outputs)?,
    };
    for out in outputs {
        out.local.zero_padding(out.data);
    }
    Ok(scratch)
}

struct Call<'a> {
    op: &'a OpKind,
    path: &'a str,
    inputs: &'a [Operand<'a>],
    cx: &'a Context,
}

impl Call<'_> {
    fn error(&self, problem: impl Into<String>) -> RuntimeError {
        RuntimeError::Kernel {
            op: format!("{} ({})", self.path, self.op.name()),
            problem: problem.into(),
        }
    }

    fn check(&self, outputs: &[Output<'_>]) -> Result<(), RuntimeError> {
        let n_operands = match self.op {
            OpKind::Stack { .. } | OpKind::GlobalNorm => self.inputs.len(),
            op => n_operands(op),
        };
        let n_results = match self.op {
            OpKind::Unstack { .. } => outputs.len(),
            op => n_results(op),
        };
        if (self.inputs.len(), outputs.len()) != (n_operands, n_results) || outputs.is_empty() {
            let (n, m) = (self.inputs.len(), outputs.len());
            return Err(self.error(format!(
                "{n} operands and {m} results, expected {n_operands} and {n_results}"
            )));
        }
        let unread = |i: usize| in_place(self.op).iter().any(|&(operand, _)| operand == i);
        let operands = self
            .inputs
            .iter()
            .enumerate()
            .filter(|(i, _)| !unread(*i))
            .map(|(_, x)| (x.local, x.data.len()));
        let sides = operands.chain(outputs.iter().map(|o| (o.local, o.data.len())));
        for (local, bytes) in sides {
            if !is_computed(local.dtype) {
                return Err(self.error(format!("no kernels for {}", local.dtype.name())));
            }
            if local.bytes() != bytes {
                return Err(self.error(format!(
                    "a buffer of {bytes} bytes for {:?} {}",
                    local.dims(),
                    local.dtype.name()
                )));
            }
        }
        Ok(())
    }

    /// Ops that move elements of any type unchanged; false when the op is not one of them.
    fn moves(&self, outputs: &mut [Output<'_>]) -> bool {
        let Some(first) = self.inputs.first() else {
            return false;
        };
        if first.local.dtype != outputs[0].local.dtype {
            return false;
        }
        match first.local.dtype.bytes() {
            4 => self.move_elements::<u32>(outputs),
            _ => self.move_elements::<u16>(outputs),
        }
    }

    fn move_elements<T: bytemuck::Pod + Default>(&self, outputs: &mut [Output<'_>]) -> bool {
        let x: &[T] = bytemuck::cast_slice(self.inputs[0].data);
        let dims = self.inputs[0].local.dims();
        if let OpKind::Unstack { dim } = self.op {
            let mut outs: Vec<&mut [T]> = outputs
                .iter_mut()
                .map(|o| bytemuck::cast_slice_mut(o.data))
                .collect();
            layout::unstack(x, &dims, *dim, &mut outs);
            return true;
        }
        let out_dims = outputs[0].local.dims();
        let out: &mut [T] = bytemuck::cast_slice_mut(outputs[0].data);
        match self.op {
            OpKind::Layout | OpKind::Reshape { .. } | OpKind::Cast { .. } => out.copy_from_slice(x),
            OpKind::Broadcast { leading } => {
                layout::broadcast_leading(x, out_dims[..leading.len()].iter().product(), out)
            }
            OpKind::Transpose { perm } => layout::transpose(x, &dims, perm, out),
            OpKind::Slice { dim, start, len } => {
                layout::slice(x, &dims, *dim, *start as usize, *len as usize, out)
            }
            OpKind::Pad { dim, start, len } => {
                layout::pad(x, &dims, *dim, *start as usize, *len as usize, out)
            }
            OpKind::Stack { dim } => {
                let xs: Vec<&[T]> = self
                    .inputs
                    .iter()
                    .map(|i| bytemuck::cast_slice(i.data))
                    .collect();
                layout::stack(&xs, &dims, *dim, out);
            }
            _ => return false,
        }
        true
    }

    /// Everything else, in f32. Returns the bytes of conversions.
    fn compute(&self, outputs: &mut [Output<'_>]) -> Result<u64, RuntimeError> {
        let reads_result =
            matches!(self.op, OpKind::Accumulate { .. }) || !in_place(self.op).is_empty();
        let mut scratch = 0;
        let mut temporaries: Vec<Option<Vec<f32>>> = Vec::with_capacity(outputs.len());
        for out in outputs.iter() {
            temporaries.push((out.local.dtype != DType::F32).then(|| match reads_result {
                true => widen(out.local.dtype, out.data).into_owned(),
                false => vec![0.0; out.local.elements()],
            }));
            scratch += temporaries
                .last()
                .and_then(Option::as_ref)
                .map_or(0, |t| t.len() as u64 * 4);
        }
        scratch += self
            .inputs
            .iter()
            .filter(|i| matches!(i.local.dtype, DType::Bf16 | DType::F16))
            .map(|i| i.local.elements() as u64 * 4)
            .sum::<u64>();
        {
            let locals: Vec<&Local> = outputs.iter().map(|o| o.local).collect();
            let slots = outputs.iter_mut().zip(&mut temporaries);
            let mut outs: Vec<&mut [f32]> = slots
                .map(|(o, t)| match t {
                    Some(t) => &mut t[..],
                    None => bytemuck::cast_slice_mut(o.data),
                })
                .collect();
            self.run(&mut outs, &locals)?;
        }
        for (out, temporary) in outputs.iter_mut().zip(temporaries) {
            if let Some(values) = temporary {
                narrow(out.local.dtype, &values, out.data);
            }
        }
        Ok(scratch)
    }

    fn x(&self, i: usize) -> Cow<'_, [f32]> {
        widen(self.inputs[i].local.dtype, self.inputs[i].data)
    }
    fn ids(&self, i: usize) -> Result<&[i32], RuntimeError> {
        match self.inputs[i].local.dtype {
            DType::I32 => Ok(bytemuck::cast_slice(self.inputs[i].data)),
            other => Err(self.error(format!("operand {i} is {}, expected i32", other.name()))),
        }
    }
    fn local(&self, i: usize) -> &Local {
        self.inputs[i].local
    }
    /// A scalar operand.
    fn scalar(&self, i: usize) -> Result<f32, RuntimeError> {
        self.x(i)
            .first()
            .copied()
            .ok_or_else(|| self.error(format!("operand {i} has no elements")))
    }
    /// Length of the last dim of operand `i`, as the buffer has it.
    fn width(&self, i: usize) -> usize {
        self.local(i).ranges.last().map_or(1, |r| r.padded as usize)
    }

    fn run(&self, outs: &mut [&mut [f32]], locals: &[&Local]) -> Result<(), RuntimeError> {
        let threads = self.cx.threads;
        match self.op {
            OpKind::Cast { .. } => outs[0].copy_from_slice(&self.x(0)),
            OpKind::Unary { f } => elementwise::unary(unary(*f), &self.x(0), outs[0]),
            OpKind::Binary { f } => {
                elementwise::binary(binary(*f), &self.x(0), &self.x(1), outs[0])
            }
            OpKind::Reduce { kind, dims } => self.reduce(*kind, dims, outs[0])?,
            OpKind::DotGeneral { einsum } => {
                let (lhs, rhs) = (self.x(0), self.x(1));
                let (l, r) = (self.local(0).dims(), self.local(1).dims());
                let lhs = matmul::Operand {
                    data: &lhs,
                    dims: &l,
                    labels: &einsum.lhs,
                };
                let rhs = matmul::Operand {
                    data: &rhs,
                    dims: &r,
                    labels: &einsum.rhs,
                };
                matmul::dot_general(lhs, rhs, &einsum.out, outs[0], threads);
            }
            OpKind::Embedding => {
                let vocab = self.local(0).ranges[0];
                let (rows, width) = (vocab.valid as usize, self.width(0));
                // Rows past the valid ones are padding, though other shards may hold their ids.
                embedding::gather(
                    &self.x(0)[..rows * width],
                    rows,
                    width,
                    vocab.start as usize,
                    self.ids(1)?,
                    outs[0],
                );
            }
            OpKind::EmbeddingGrad { .. } => {
                let vocab = locals[0].ranges[0];
                let (rows, width) = (vocab.valid as usize, self.width(1));
                let (valid, padding) = outs[0].split_at_mut(rows * width);
                embedding::scatter_add(
                    self.ids(0)?,
                    &self.x(1),
                    width,
                    vocab.start as usize,
                    rows,
                    valid,
                );
                padding.fill(0.0);
            }
            OpKind::Rotary {
                theta,
                scaling,
                inverse,
            } => {
                let dims = self.local(0).dims();
                let freq = rotary::inv_freq(*theta, self.width(0), rope_scaling(*scaling));
                rotary::rotate(
                    &self.x(0),
                    &dims,
                    self.local(0).ranges[1].start as usize,
                    &freq,
                    *inverse,
                    outs[0],
                );
            }
            OpKind::Attention { scale, dropout } => {
                self.attention(*scale, *dropout, self.path, |a| {
                    let [o, lse] = outs else { return };
                    attention::forward(a, o, lse, threads);
                })
            }
            OpKind::AttentionGrad {
                scale,
                dropout,
                key,
            } => {
                let (o, lse, d_o) = (self.x(3), self.x(4), self.x(5));
                self.attention(*scale, *dropout, key, |a| {
                    let [dq, dk, dv] = outs else { return };
                    let upstream = attention::Upstream {
                        o: &o,
                        lse: &lse,
                        d_o: &d_o,
                    };
                    attention::backward(a, upstream, attention::Gradients { dq, dk, dv }, threads);
                });
            }
            OpKind::Dropout { p, key } => self.dropout(*p, key, outs[0]),
            OpKind::Accumulate { .. } => elementwise::accumulate(outs[0], &self.x(0)),
            OpKind::SumSquares => outs[0][0] = loss::sum_squares(&self.x(0)) as f32,
            OpKind::GlobalNorm => {
                let squares = (0..self.inputs.len()).flat_map(|i| self.x(i).into_owned());
                outs[0][0] = squares.map(f64::from).sum::<f64>().sqrt() as f32;
            }
            _ => self.run_rows(outs)?,
        }
        Ok(())
    }

    /// Ops along the last dim: norms and losses.
    fn run_rows(&self, outs: &mut [&mut [f32]]) -> Result<(), RuntimeError> {
        // The vocabulary's part, where the last dim is one.
        let last = self.local(0).ranges.last().copied();
        let (offset, valid) = last.map_or((0, 1), |r| (r.start as usize, r.valid as usize));
        let (width, x) = (self.width(0), |i| self.x(i));
        match (self.op, outs) {
            (OpKind::LayerNorm { eps }, [y, mean, rstd]) => {
                norm::layer_norm(&x(0), &x(1), &x(2), *eps, y, mean, rstd)
            }
            (OpKind::LayerNormGradInput, [dx]) => {
                norm::layer_norm_grad_input(&x(0), &x(1), &x(2), &x(3), &x(4), dx)
            }
            (OpKind::LayerNormGradWeight, [dgamma, dbeta]) => {
                norm::layer_norm_grad_weight(&x(0), &x(1), &x(2), &x(3), dgamma, dbeta)
            }
            (OpKind::RmsNorm { eps }, [y, rstd]) => norm::rms_norm(&x(0), &x(1), *eps, y, rstd),
            (OpKind::RmsNormGradInput, [dx]) => {
                norm::rms_norm_grad_input(&x(0), &x(1), &x(2), &x(3), dx)
            }
            (OpKind::RmsNormGradWeight, [dgamma]) => {
                norm::rms_norm_grad_weight(&x(0), &x(1), &x(2), dgamma)
            }
            (OpKind::LogSumExp, [lse]) => {
                let rows = lse.len();
                loss::log_sum_exp(&x(0), rows, width, valid, lse);
            }
            (OpKind::CrossEntropy, [nll]) => {
                loss::cross_entropy(&x(0), &x(1), self.ids(2)?, width, offset, valid, nll)
            }
            (OpKind::CrossEntropyGrad, [dlogits]) => loss::cross_entropy_grad(
                &x(0),
                &x(1),
                self.ids(2)?,
                &x(3),
                width,
                offset,
                valid,
                dlogits,
            ),
            (_, outs) => self.run_step_end(outs)?,
        }
        Ok(())
    }

    /// Clipping, loss scale and updates. Every rank computes the same from the same scalars.
    fn run_step_end(&self, outs: &mut [&mut [f32]]) -> Result<(), RuntimeError> {
        let scalar = |i: usize| self.scalar(i);
        match (self.op, outs) {
            (OpKind::ClipCoefficient { max_norm }, [out]) => {
                let (norm, scale) = (f64::from(scalar(0)?), f64::from(scalar(1)?));
                let clipped = max_norm.map_or(1.0, |m| (m / (norm / scale + 1e-6)).min(1.0));
                out[0] = if norm.is_finite() {
                    (clipped / scale) as f32
                } else {
                    f32::NAN
                };
            }
            (OpKind::UpdateLossScale { growth_interval }, [scale, good_steps]) => {
                let (old, good, norm) = (scalar(0)?, scalar(1)?, scalar(2)?);
                (scale[0], good_steps[0]) = match norm.is_finite() {
                    false => (old * 0.5, 0.0),
                    true if f64::from(good) + 1.0 >= *growth_interval as f64 => (old * 2.0, 0.0),
                    true => (old, good + 1.0),
                };
            }
            (
                &OpKind::AdamW {
                    beta1,
                    beta2,
                    eps,
                    weight_decay,
                },
                [p, m, v],
            ) => {
                let (step, coefficient) = (self.cx.step + 1, scalar(4)?);
                let step = optimizer::AdamWStep {
                    lr: self.cx.lr,
                    beta1,
                    beta2,
                    eps,
                    weight_decay,
                    step,
                    coefficient,
                };
                optimizer::adamw(p, &self.x(1), m, v, step);
            }
            (
                &OpKind::Sgd {
                    momentum,
                    weight_decay,
                },
                [p, m],
            ) => {
                let step = optimizer::SgdStep {
                    lr: self.cx.lr,
                    momentum,
                    weight_decay,
                    coefficient: scalar(3)?,
                };
                optimizer::sgd(p, &self.x(1), m, step);
            }
            _ => return Err(self.error("sources have no kernel")),
        }
        Ok(())
    }

    /// Padding is no element of a maximum; of a sum it is a zero.
    fn reduce(
        &self,
        kind: ReduceKind,
        dims: &[usize],
        out: &mut [f32],
    ) -> Result<(), RuntimeError> {
        let (local, mut x) = (self.local(0), self.x(0));
        let shape = local.dims();
        match kind {
            ReduceKind::Sum => layout::reduce_sum(&x, &shape, dims, out),
            ReduceKind::Max => {
                if dims
                    .iter()
                    .any(|&d| local.ranges[d].valid < local.ranges[d].padded)
                {
                    let mut masked = vec![f32::NEG_INFINITY; x.len()];
                    let (valid, zero) = (local.valid(), vec![0; shape.len()]);
                    layout::copy_region(&x, &shape, &zero, &mut masked, &shape, &zero, &valid);
                    x = Cow::Owned(masked);
                }
                layout::reduce_max(&x, &shape, dims, out);
            }
            other => return Err(self.error(format!("no kernel for a reduction by {other:?}"))),
        }
        Ok(())
    }

    /// Mask bits belong to the element of the whole tensor, whose dim 0 is the sample's index
    /// in the global batch.
    fn dropout(&self, p: f64, key: &str, out: &mut [f32]) {
        let (local, x) = (self.local(0), self.x(0));
        if !self.cx.training || p == 0.0 {
            return out.copy_from_slice(&x);
        }
        let key = Key::new(self.cx.seed, self.cx.step, key);
        let name = ElementName::new(local, self.cx.first_sample);
        elementwise::dropout(&x, p, |i| name.of(i), |i| rng::uniform(key, i), out);
    }

    /// Calls `f` with the attention of operands 0 to 2. Its mask's elements are named
    /// `[sample, query, kv head, group, key]`.
    fn attention(&self, scale: f64, p: f64, key: &str, f: impl FnOnce(&attention::Attention<'_>)) {
        let (q, k, v) = (self.x(0), self.x(1), self.x(2));
        let (ql, kl) = (&self.local(0).ranges, &self.local(1).ranges);
        let grouped = ql.len() == 5;
        let dims = AttentionDims {
            batch: ql[0].padded as usize,
            q_len: ql[1].padded as usize,
            k_len: kl[1].padded as usize,
            kv_heads: kl[2].padded as usize,
            groups: if grouped { ql[3].padded as usize } else { 1 },
            head_dim: self.width(0),
            q_offset: ql[1].start as usize,
            valid_k: kl[1].valid as usize,
        };
        let lens = &self.local(0).lens;
        let key = Key::new(self.cx.seed, self.cx.step, key);
        let kept = (1.0 / (1.0 - p)) as f32;
        let n_groups = if grouped { lens[3] } else { 1 };
        let first = [
            self.cx.first_sample + ql[0].start,
            ql[1].start,
            ql[2].start,
            if grouped { ql[3].start } else { 0 },
        ];
        let n_keys = self.local(1).lens[1];
        let mask = |b: usize, kv: usize, g: usize, i: usize, j: usize| {
            let row = ((first[0] + b as u64) * lens[1] + first[1] + i as u64) * lens[2]
                + first[2]
                + kv as u64;
            let element = (row * n_groups + first[3] + g as u64) * n_keys + j as u64;
            if f64::from(rng::uniform(key, element)) < p {
                0.0
            } else {
                kept
            }
        };
        let dropout = (self.cx.training && p > 0.0).then_some(&mask as &attention::Dropout<'_>);
        f(&attention::Attention {
            q: &q,
            k: &k,
            v: &v,
            dims,
            scale: scale as f32,
            dropout,
        });
    }
}

/// Names elements of a shard by their row-major index in the whole tensor of the step.
struct ElementName {
    dims: Vec<u64>,
    /// Global start, dim 0 counted from the global batch's first sample.
    start: Vec<u64>,
    strides: Vec<u64>,
}

impl ElementName {
    fn new(local: &Local, first_sample: u64) -> Self {
        let mut start: Vec<u64> = local.ranges.iter().map(|r| r.start).collect();
        if let Some(samples) = start.first_mut() {
            *samples += first_sample;
        }
        let mut strides = vec![1; local.lens.len()];
        for d in (1..strides.len()).rev() {
            strides[d - 1] = strides[d] * local.lens[d];
        }
        ElementName {
            dims: local.ranges.iter().map(|r| r.padded).collect(),
            start,
            strides,
        }
    }
    fn of(&self, i: usize) -> u64 {
        let mut rest = i as u64;
        let mut name = 0;
        for d in (0..self.dims.len()).rev() {
            let index = rest % self.dims[d];
            rest /= self.dims[d];
            name += (self.start[d] + index) * self.strides[d];
        }
        name
    }
}

fn unary(f: Unary) -> elementwise::Unary {
    match f {
        Unary::Neg => elementwise::Unary::Neg,
        Unary::Scale { by } => elementwise::Unary::Scale(by),
        Unary::GeluErf => elementwise::Unary::GeluErf,
        Unary::GeluTanh => elementwise::Unary::GeluTanh,
        Unary::Silu => elementwise::Unary::Silu,
        Unary::Relu => elementwise::Unary::Relu,
        Unary::Exp => elementwise::Unary::Exp,
        Unary::Tanh => elementwise::Unary::Tanh,
        Unary::Square => elementwise::Unary::Square,
    }
}

fn binary(f: Binary) -> elementwise::Binary {
    match f {
        Binary::Add => elementwise::Binary::Add,
        Binary::Sub => elementwise::Binary::Sub,
        Binary::Mul => elementwise::Binary::Mul,
        Binary::GeluErfGrad => elementwise::Binary::GeluErfGrad,
        Binary::GeluTanhGrad => elementwise::Binary::GeluTanhGrad,
        Binary::SiluGrad => elementwise::Binary::SiluGrad,
        Binary::ReluGrad => elementwise::Binary::ReluGrad,
    }
}

fn rope_scaling(scaling: RopeScaling) -> rotary::RopeScaling {
    match scaling {
        RopeScaling::None => rotary::RopeScaling::None,
        RopeScaling::Linear { factor } => rotary::RopeScaling::Linear { factor },
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position,
        } => rotary::RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position: original_max_position as f64,
        },
    }
}

fn n_operands(op: &OpKind) -> usize {
    match op {
        OpKind::Binary { .. }
        | OpKind::DotGeneral { .. }
        | OpKind::Embedding
        | OpKind::EmbeddingGrad { .. }
        | OpKind::RmsNorm { .. }
        | OpKind::ClipCoefficient { .. } => 2,
        OpKind::LayerNorm { .. }
        | OpKind::RmsNormGradWeight
        | OpKind::Attention { .. }
        | OpKind::CrossEntropy
        | OpKind::UpdateLossScale { .. } => 3,
        OpKind::LayerNormGradWeight
        | OpKind::RmsNormGradInput
        | OpKind::CrossEntropyGrad
        | OpKind::Sgd { .. } => 4,
        OpKind::LayerNormGradInput | OpKind::AdamW { .. } => 5,
        OpKind::AttentionGrad { .. } => 6,
        _ => 1,
    }
}

fn n_results(op: &OpKind) -> usize {
    match op {
        OpKind::LayerNorm { .. } | OpKind::AttentionGrad { .. } | OpKind::AdamW { .. } => 3,
        OpKind::LayerNormGradWeight
        | OpKind::RmsNorm { .. }
        | OpKind::Attention { .. }
        | OpKind::UpdateLossScale { .. }
        | OpKind::Sgd { .. } => 2,
        _ => 1,
    }
}
