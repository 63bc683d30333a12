//! Ops of mixture-of-experts layers, from `OpKind` to the calls of the CPU kernels.

use super::{Call, Output};
use crate::cpu::experts::{self, Choice, Slots};
use crate::error::RuntimeError;
use crate::execute::local::Local;
use ir::{DType, OpKind};

impl Call<'_> {
    /// `Route`, whose slots are integers; false when the op is another.
    pub(super) fn routes(&self, outputs: &mut [Output<'_>]) -> bool {
        let &OpKind::Route {
            capacity,
            normalize,
            scores,
            groups,
            ..
        } = self.op
        else {
            return false;
        };
        let [gates, slots] = outputs else {
            return false;
        };
        if (gates.local.dtype, slots.local.dtype) != (DType::F32, DType::I32) {
            return false;
        }
        let (logits, choices) = (self.local(0).dims(), gates.local.dims());
        let bias = (self.inputs.len() == 2).then(|| self.x(1));
        let choice = Choice {
            scores,
            normalize,
            groups,
            bias: bias.as_deref(),
        };
        experts::route(
            &self.x(0),
            (logits[1], logits[2], choices[2]),
            capacity as usize,
            choice,
            bytemuck::cast_slice_mut(gates.data),
            bytemuck::cast_slice_mut(slots.data),
        );
        true
    }

    /// The gradient of `Route`, and what moves tokens.
    pub(super) fn experts(
        &self,
        outs: &mut [&mut [f32]],
        locals: &[&Local],
    ) -> Result<(), RuntimeError> {
        let x = |i: usize| self.x(i);
        let gates = (self.inputs.len() == 3).then(|| self.x(2));
        match self.op {
            OpKind::RouteGrad {
                capacity,
                normalize,
                scores,
            } => experts::route_grad(
                &x(0),
                self.ids(1)?,
                &x(2),
                (self.local(0).dims()[2], self.local(1).dims()[2]),
                *capacity as usize,
                (*scores, *normalize),
                outs[0],
            ),
            OpKind::Dispatch { .. } => {
                let s = lengths(locals[0], self.local(0), self.local(1));
                experts::dispatch(&x(0), self.ids(1)?, gates.as_deref(), s, outs[0])
            }
            OpKind::Combine => {
                let s = lengths(self.local(0), locals[0], self.local(1));
                experts::combine(&x(0), self.ids(1)?, gates.as_deref(), s, outs[0])
            }
            OpKind::ExpertBias => experts::add_bias(&x(0), &x(1), outs[0], self.width(0)),
            OpKind::GateGrad => {
                let s = lengths(self.local(0), self.local(1), self.local(2));
                experts::gate_grad(&x(0), &x(1), self.ids(2)?, s, outs[0])
            }
            _ => return Err(self.error("is no op of experts")),
        }
        Ok(())
    }
}

/// Lengths of shards `[E, B, C, H]`, `[B, S, H]` and `[B, S, k]`; slots and width are whole or
/// split alike.
pub(crate) fn lengths(experts: &Local, tokens: &Local, slots: &Local) -> Slots {
    let (e, t) = (&experts.ranges, &tokens.ranges);
    Slots {
        first: e[0].start as usize,
        experts: e[0].valid as usize,
        capacity: e[2].padded as usize,
        samples: t[0].padded as usize,
        valid_samples: t[0].valid as usize,
        tokens: t[1].padded as usize,
        valid_tokens: t[1].valid as usize,
        choices: slots.ranges[2].padded as usize,
        width: t[2].padded as usize,
    }
}
