//! The ops that compute, in f32: from `OpKind` to the calls of the CPU kernels.

use super::Call;
use super::attend::Attend;
use crate::cpu::clamped::Clamped;
use crate::cpu::{elementwise, embedding, layout, loss, matmul, norm, optimizer, rotary};
use crate::error::RuntimeError;
use crate::execute::local::{Local, widen};
use crate::rng::{self, Key};
use ir::op::{Binary, Keys, RopeScaling, SequenceOrder, Unary};
use ir::{DType, OpKind, ReduceKind};
use std::borrow::Cow;

impl Call<'_> {
    pub(super) fn x(&self, i: usize) -> Cow<'_, [f32]> {
        widen(self.inputs[i].local.dtype, self.inputs[i].data)
    }
    pub(super) fn ids(&self, i: usize) -> Result<&[i32], RuntimeError> {
        match self.inputs[i].local.dtype {
            DType::I32 => Ok(bytemuck::cast_slice(self.inputs[i].data)),
            other => Err(self.error(format!("operand {i} is {}, expected i32", other.name()))),
        }
    }
    pub(super) fn local(&self, i: usize) -> &Local {
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
    pub(super) fn width(&self, i: usize) -> usize {
        self.local(i).ranges.last().map_or(1, |r| r.padded as usize)
    }

    /// Computes into f32 buffers; `locals` say which parts of the results they are.
    pub(super) fn run(
        &self,
        outs: &mut [&mut [f32]],
        locals: &[&Local],
    ) -> Result<(), RuntimeError> {
        let threads = self.cx.threads;
        match self.op {
            OpKind::Cast { .. } => outs[0].copy_from_slice(&self.x(0)),
            OpKind::Unary { f } if self.is_in_result(0) => {
                elementwise::unary_over(unary(*f), outs[0]);
            }
            OpKind::Unary { f } => elementwise::unary(unary(*f), &self.x(0), outs[0]),
            OpKind::Binary { f } if self.is_in_result(0) || self.is_in_result(1) => {
                let [a, b] = [0, 1].map(|i| (!self.is_in_result(i)).then(|| self.x(i)));
                elementwise::binary_over(binary(*f), a.as_deref(), b.as_deref(), outs[0]);
            }
            OpKind::Binary { f } => {
                elementwise::binary(binary(*f), &self.x(0), &self.x(1), outs[0]);
            }
            OpKind::ScaleRows => elementwise::scale_rows(&self.x(0), &self.x(1), outs[0]),
            OpKind::ClampedSwiglu { alpha, limit } => {
                let (alpha, limit) = (*alpha, *limit);
                Clamped { alpha, limit }.swiglu(&self.x(0), &self.x(1), outs[0]);
            }
            OpKind::ClampedSwigluGrad { alpha, limit } => {
                let (alpha, limit) = (*alpha, *limit);
                let [dgate, dup] = outs else {
                    return Err(self.error("has two results"));
                };
                let operands = [&self.x(0)[..], &self.x(1), &self.x(2)];
                Clamped { alpha, limit }.swiglu_grad(operands, [dgate, dup]);
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
                part,
                order,
            } => {
                let dims = self.local(0).dims();
                let turned = part.map_or(self.width(0), |n| n as usize);
                let scaling = rope_scaling(*scaling);
                let freq = rotary::inv_freq(*theta, turned, scaling);
                rotary::rotate(
                    &self.x(0),
                    &dims,
                    &self.positions(*order),
                    (&freq, scaling.magnitude()),
                    *inverse,
                    outs[0],
                );
            }
            OpKind::Attention {
                scale,
                dropout,
                key,
                order,
                keys,
                bounds,
            } => {
                let attend = Attend {
                    scale: *scale,
                    dropout: *dropout,
                    // A model's op that nothing trains has no key.
                    key: if key.is_empty() { self.path } else { key },
                    order: *order,
                    bounds: *bounds,
                };
                match keys {
                    Keys::All => self.attend(attend, outs),
                    Keys::Ring { .. } => self.attend_part(attend, *keys, outs),
                }
            }
            OpKind::AttentionGrad {
                scale,
                dropout,
                key,
                order,
                keys,
                bounds,
            } => {
                let attend = Attend {
                    scale: *scale,
                    dropout: *dropout,
                    key,
                    order: *order,
                    bounds: *bounds,
                };
                match keys {
                    Keys::All => self.attend_grad(attend, outs),
                    Keys::Ring { .. } => self.attend_grad_part(attend, *keys, outs),
                }
            }
            OpKind::RouteGrad { .. }
            | OpKind::Dispatch { .. }
            | OpKind::Combine
            | OpKind::ExpertBias
            | OpKind::GateGrad => self.experts(outs, locals)?,
            OpKind::Conv2d { .. }
            | OpKind::Conv2dGradInput { .. }
            | OpKind::Conv2dGradWeight { .. }
            | OpKind::MaxPool2d { .. }
            | OpKind::MaxPool2dGrad { .. }
            | OpKind::GroupNorm { .. }
            | OpKind::GroupNormGradInput
            | OpKind::GroupNormGradWeight => self.images(outs, locals)?,
            OpKind::CausalConv
            | OpKind::CausalConvGradInput
            | OpKind::CausalConvGradWeight { .. }
            | OpKind::StateSpace { .. }
            | OpKind::StateSpaceGrad { .. } => self.state_space(outs, locals)?,
            OpKind::Dropout { p, key, order } => self.dropout(*p, key, *order, outs[0]),
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
            (OpKind::CrossEntropyGrad, [logits]) if self.is_in_result(0) => {
                loss::cross_entropy_grad_over(
                    logits,
                    &x(1),
                    self.ids(2)?,
                    &x(3),
                    width,
                    offset,
                    valid,
                );
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
            (OpKind::UpdateLossScale { growth_interval }, [scale, good_steps, updates]) => {
                let (old, good, norm) = (scalar(0)?, scalar(1)?, scalar(3)?);
                let lowest = ir::training::LOWEST_LOSS_SCALE as f32;
                (scale[0], good_steps[0]) = match norm.is_finite() {
                    false => ((old * 0.5).max(lowest), 0.0),
                    true if f64::from(good) + 1.0 >= *growth_interval as f64 => (old * 2.0, 0.0),
                    true => (old, good + 1.0),
                };
                updates[0] = scalar(2)? + f32::from(norm.is_finite());
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
                let done = match self.inputs.get(5) {
                    Some(_) => scalar(5)? as u64,
                    None => self.cx.updates,
                };
                let step = optimizer::AdamWStep {
                    lr: self.cx.lr,
                    beta1,
                    beta2,
                    eps,
                    weight_decay,
                    step: done + 1,
                    coefficient: scalar(4)?,
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
            // Of what the members of a group have, one after the other.
            ReduceKind::LogSumExp if *dims == [0] => {
                let parts: Vec<&[f32]> = x.chunks_exact(out.len().max(1)).collect();
                loss::combine_log_sum_exp(&parts, out);
            }
            other => return Err(self.error(format!("no kernel for a reduction by {other:?}"))),
        }
        Ok(())
    }

    /// Mask bits belong to the element of the whole tensor, whose dim 0 is the sample's index
    /// in the global batch and whose dim 1 is by position, whatever the order it is stored in.
    fn dropout(&self, p: f64, key: &str, order: SequenceOrder, out: &mut [f32]) {
        let (local, x) = (self.local(0), self.x(0));
        if !self.cx.training || p == 0.0 {
            return out.copy_from_slice(&x);
        }
        let key = Key::new(self.cx.seed, self.cx.step, key);
        let mut name = ElementName::new(local, self.cx.first_sample);
        if !order.is_natural() {
            name.indices[1] = self.positions(order);
        }
        elementwise::dropout(&x, p, |i| name.of(i), |i| rng::uniform(key, i), out);
    }

    /// Where the rows of operand 0's part of a sequence stand; padding goes on from them.
    fn positions(&self, order: SequenceOrder) -> Vec<usize> {
        let local = self.local(0);
        let (range, len) = (&local.ranges[1], local.lens[1]);
        let runs = order.runs(range.start, range.valid, len);
        let positions = runs.iter().flat_map(|r| r.position..r.position + r.count);
        let padding = range.start + range.valid..range.start + range.padded;
        positions.chain(padding).map(|p| p as usize).collect()
    }
}

/// Names elements of a shard by their row-major index in the whole tensor of the step.
struct ElementName {
    /// For each dim, the global indices of the shard's; those of dim 0 count from the global
    /// batch's first sample.
    indices: Vec<Vec<usize>>,
    lens: Vec<u64>,
}

impl ElementName {
    fn new(local: &Local, first_sample: u64) -> Self {
        let first = |d: usize| if d == 0 { first_sample } else { 0 };
        let indices = local.ranges.iter().enumerate().map(|(d, r)| {
            let start = (first(d) + r.start) as usize;
            (start..start + r.padded as usize).collect()
        });
        ElementName {
            indices: indices.collect(),
            lens: local.lens.clone(),
        }
    }
    fn of(&self, i: usize) -> u64 {
        let (mut rest, mut name, mut stride) = (i, 0, 1);
        for (indices, len) in self.indices.iter().zip(&self.lens).rev() {
            name += indices[rest % indices.len()] as u64 * stride;
            rest /= indices.len();
            stride *= len;
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
        Unary::Sigmoid => elementwise::Unary::Sigmoid,
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

/// The scaling of frequencies as the kernels name it.
pub(crate) fn rope_scaling(scaling: RopeScaling) -> rotary::RopeScaling {
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
        RopeScaling::Yarn {
            factor,
            beta_fast,
            beta_slow,
            original_max_position,
            truncate,
            magnitude,
        } => rotary::RopeScaling::Yarn {
            factor,
            beta_fast,
            beta_slow,
            original_max_position: original_max_position as f64,
            truncate,
            magnitude,
        },
    }
}
