//! The end of a step: squares, norm, clipping, loss scale and updates.

use super::super::args::{Call, Now, REDUCE, Span, Step, UPDATE};
use super::{Op, SCRATCH, Steps};
use crate::execute::Context;
use ir::OpKind;

/// Operands of a call that adds up scalars.
const AT_ONCE: usize = 8;
/// Blocks that share a sum of squares.
const MOST_PARTS: usize = SCRATCH / 8;
const THREADS: u32 = 256;

/// The facts of a step that updates need.
pub(crate) fn now(context: &Context) -> Now {
    Now {
        lr: context.lr,
        updates: context.updates as i64,
    }
}

impl Op<'_> {
    pub(super) fn updates(&self) -> Steps {
        let one = |kernel| Call::blocks(UPDATE, kernel, 1, 32);
        let call = match self.kind {
            OpKind::SumSquares => return Ok(self.sum_squares()),
            OpKind::GlobalNorm => return Ok(self.global_norm()),
            OpKind::ClipCoefficient { max_norm } => {
                let call = one("clip_coefficient").n(0, &[i64::from(max_norm.is_some())]);
                self.all(call).f(&[max_norm.unwrap_or(0.0)])
            }
            OpKind::UpdateLossScale { growth_interval } => {
                let lowest = ir::training::LOWEST_LOSS_SCALE;
                self.all(one("update_loss_scale"))
                    .f(&[*growth_interval as f64, lowest])
            }
            OpKind::AdamW {
                beta1,
                beta2,
                eps,
                weight_decay,
            } => {
                let n = self.y[0].elements();
                let is_given = i64::from(self.x.len() > 5);
                let call = self.all(Call::each(UPDATE, "adam_w", n));
                let call = call.n(0, &[n as i64, is_given]).now(now(self.context));
                call.f(&[*beta1, *beta2, *eps, *weight_decay])
                    .by_eights(n, n)
            }
            OpKind::Sgd {
                momentum,
                weight_decay,
            } => {
                let n = self.y[0].elements();
                let call = self.all(Call::each(UPDATE, "sgd", n)).n(0, &[n as i64]);
                call.f(&[*momentum, *weight_decay]).now(now(self.context))
            }
            _ => return Err(self.error("the CUDA backend has no kernel for it")),
        };
        Ok(vec![Step::Call(call)])
    }

    fn all(&self, mut call: Call) -> Call {
        for (i, x) in self.x.iter().enumerate() {
            call = call.x(i, x.typed());
        }
        for (i, y) in self.y.iter().enumerate() {
            call = call.y(i, y.typed());
        }
        call
    }

    fn sum_squares(&self) -> Vec<Step> {
        let n = self.x[0].elements();
        let x = self.x[0];
        let call = |parts| Call::blocks(REDUCE, "squares", parts, THREADS).x(0, x.typed());
        let can = call(1).can_take_eights(n);
        let per_thread = if can { 8 } else { 1 };
        let parts = n.div_ceil(per_thread * THREADS as usize);
        let parts = parts.clamp(1, MOST_PARTS);
        let scratch = Span {
            at: self.scratch,
            bytes: 8 * parts as u64,
        };
        let squares = call(parts).y(0, (scratch, "f32")).n(0, &[n as i64]);
        let squares = if can { squares.with_eights() } else { squares };
        let sum = Call::blocks(REDUCE, "sum_parts", 1, THREADS).x(0, (scratch, "f32"));
        let sum = sum.y(0, self.y[0].typed()).n(0, &[parts as i64]);
        vec![Step::Call(squares), Step::Call(sum)]
    }

    fn global_norm(&self) -> Vec<Step> {
        let scratch = Span {
            at: self.scratch,
            bytes: 8,
        };
        let calls = self.x.chunks(AT_ONCE);
        let n = calls.len();
        let call = |(i, x): (usize, &[super::Part<'_>])| {
            let is_last = i64::from(i + 1 == n);
            let mut call = Call::blocks(UPDATE, "global_norm", 1, 32)
                .y(0, (scratch, "f32"))
                .y(1, self.y[0].typed())
                .n(0, &[x.len() as i64, 0, i64::from(i == 0), is_last]);
            for (k, x) in x.iter().enumerate() {
                call = call.x(k, x.typed()).n(4 + k, &[x.elements() as i64]);
            }
            Step::Call(call)
        };
        calls.enumerate().map(call).collect()
    }
}
