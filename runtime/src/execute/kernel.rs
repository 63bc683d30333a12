//! One op on local shards: the only bridge from `OpKind` to the CPU kernels.
//!
//! Kernels compute in f32. An f32 operand or result is used where it lies; other floats are
//! widened before and rounded once after. Ops that only move elements keep the storage type.
//! After every op the padding of the results is zero again.
//!
//! Where elements stand in the whole tensor matters to few ops (embeddings, rotary positions,
//! causal masks, split vocabularies, dropout); they find it in [`Local`].

mod attend;
mod experts;
mod float;
pub(crate) mod images;
mod ring;
mod state_space;

pub(crate) use experts::lengths as expert_lengths;
pub(crate) use float::rope_scaling;

use super::local::{Local, is_computed, narrow, widen};
use crate::cpu::layout;
use crate::error::RuntimeError;
use ir::{DType, OpKind};

/// The facts of the run that an op needs besides its operands.
#[derive(Clone, Copy, Debug)]
pub struct Context {
    /// Seed of the run: key of dropout masks.
    pub seed: u64,
    /// Training step, from 0.
    pub step: u64,
    /// Updates of the parameters that were made before this one, by which AdamW corrects its bias:
    /// those of earlier steps and, where every microbatch makes one, of earlier microbatches.
    pub updates: u64,
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
    /// Its buffer; nothing where it lies in that of the result.
    pub data: &'a [u8],
    /// Whether it lies in the buffer of the result of an op of which [`finds_in_result`] says so.
    pub is_in_result: bool,
}

/// A result.
#[derive(Debug)]
pub struct Output<'a> {
    /// The part of the tensor.
    pub local: &'a Local,
    /// Its buffer.
    pub data: &'a mut [u8],
}

/// Runs one op. `path` is the op's path, for messages and as key of forward attention's mask
/// (recomputed attention has its source's).
///
/// `Accumulate` adds to what its result's buffer holds; updates find the old value where the new
/// one goes (`OpKind::in_place`), and so do ops of an operand that is in the result. `GlobalNorm`
/// takes scalars, or one vector of them. Returns the bytes of scratch memory that conversions took.
/// Fails when numbers of operands or element types are not the op's; shapes that do not fit panic,
/// as they do in the kernels.
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
    let scratch = match call.moves(outputs) || call.routes(outputs) {
        true => 0,
        false => call.compute(outputs)?,
    };
    for out in outputs {
        out.local.zero_padding(out.data);
    }
    Ok(scratch)
}

/// Whether the op can find this operand in its result's buffer, which it writes over: `f32`
/// elements of ops for which `OpKind::may_overwrite` holds and that work on a few elements at a
/// time.
pub(crate) fn finds_in_result(op: &OpKind, operand: usize, dtype: DType) -> bool {
    let in_blocks = matches!(
        op,
        OpKind::Unary { .. } | OpKind::Binary { .. } | OpKind::CrossEntropyGrad
    );
    in_blocks && op.may_overwrite(operand) && dtype == DType::F32
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
        let (n, m) = (self.inputs.len(), outputs.len());
        let n_results = self.op.n_results().unwrap_or(m);
        if !self.op.arity().contains(&n) || m != n_results || m == 0 {
            return Err(self.error(format!(
                "{n} operands and {m} results; it takes {:?} and has {n_results}",
                self.op.arity()
            )));
        }
        let unread = |i: usize| {
            self.op.in_place().iter().any(|&(operand, _)| operand == i) || self.is_in_result(i)
        };
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

    /// Whether the operand lies in the result's buffer.
    fn is_in_result(&self, i: usize) -> bool {
        let operand = &self.inputs[i];
        operand.is_in_result && finds_in_result(self.op, i, operand.local.dtype)
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
            OpKind::Join => {
                let y: &[T] = bytemuck::cast_slice(self.inputs[1].data);
                let width = |dims: &[usize]| dims.last().copied().unwrap_or(1);
                let widths = (width(&dims), width(&self.inputs[1].local.dims()));
                layout::join(x, y, widths, out);
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
            matches!(self.op, OpKind::Accumulate { .. }) || !self.op.in_place().is_empty();
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
}
