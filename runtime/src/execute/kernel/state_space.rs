//! Ops of state spaces: which lengths their shards have.

use super::Call;
use crate::cpu::causal_conv::{self, CausalConv};
use crate::cpu::state_space::{self, Gradients, Operands, Scan};
use crate::error::RuntimeError;
use crate::execute::local::Local;
use ir::OpKind;

impl Call<'_> {
    /// Runs an op of a state space; `locals` say which parts of the results the buffers are.
    pub(super) fn state_space(
        &self,
        outs: &mut [&mut [f32]],
        locals: &[&Local],
    ) -> Result<(), RuntimeError> {
        let x = |i: usize| self.x(i);
        match (self.op, outs) {
            (OpKind::CausalConv, [y]) => {
                let s = lengths(self.local(0), self.local(1));
                causal_conv::causal_conv(&x(0), &x(1), s, y);
            }
            (OpKind::CausalConvGradInput, [dx]) => {
                let s = lengths(self.local(1), self.local(0));
                causal_conv::causal_conv_grad_input(&x(0), &x(1), s, dx);
            }
            (OpKind::CausalConvGradWeight { .. }, [dw]) => {
                let s = lengths(self.local(0), locals[0]);
                causal_conv::causal_conv_grad_weight(&x(0), &x(1), s, dw);
            }
            (&OpKind::StateSpace { chunk, dt_min }, [y]) => {
                let s = scan(self.local(0), self.local(2), chunk, dt_min);
                let all: Vec<_> = (0..7).map(x).collect();
                state_space::forward(operands(&all), s, self.cx.threads, y);
            }
            (
                &OpKind::StateSpaceGrad { chunk, dt_min },
                [dx, ddt, db, dc, da_log, dd, ddt_bias],
            ) => {
                let s = scan(self.local(0), self.local(2), chunk, dt_min);
                let all: Vec<_> = (0..8).map(x).collect();
                let to = Gradients {
                    x: dx,
                    dt: ddt,
                    b: db,
                    c: dc,
                    a_log: da_log,
                    d: dd,
                    dt_bias: ddt_bias,
                };
                state_space::backward(operands(&all), &all[7], s, self.cx.threads, to);
            }
            _ => return Err(self.error("is no op of a state space")),
        }
        Ok(())
    }
}

fn operands<'a>(all: &'a [impl std::ops::Deref<Target = [f32]>]) -> Operands<'a> {
    Operands {
        x: &all[0],
        dt: &all[1],
        b: &all[2],
        c: &all[3],
        a_log: &all[4],
        d: &all[5],
        dt_bias: &all[6],
    }
}

/// Lengths of a convolution by those of its input and weight.
pub(crate) fn lengths(x: &Local, w: &Local) -> CausalConv {
    let (x, w) = (x.dims(), w.dims());
    CausalConv {
        samples: x[0],
        tokens: x[1],
        channels: x[2..].iter().product(),
        taps: w.last().copied().unwrap_or(1),
    }
}

/// Lengths of a scan by those of `x` and `b`.
pub(crate) fn scan(x: &Local, b: &Local, chunk: u64, dt_min: f64) -> Scan {
    let (x, b) = (x.dims(), b.dims());
    Scan {
        samples: x[0],
        tokens: x[1],
        groups: x[2],
        heads: x[3],
        width: x[4],
        state: b[3],
        chunk: chunk.clamp(1, x[1].max(1) as u64) as usize,
        dt_min,
    }
}
