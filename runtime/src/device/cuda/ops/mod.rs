//! From ops to calls of kernels: plain functions of shapes and addresses.

mod attention;
mod chain;
mod elements;
mod elementwise;
mod embedding;
mod experts;
mod images;
mod matmul;
mod movement;
mod rows;
mod update;

pub(super) use chain::fused;
pub(super) use elements::one_kernel;
pub(super) use movement::{fill, lay, lift, pack, pad, slice, unpack, words};
pub(super) use update::now;

use super::args::{Span, Step, type_name};
use crate::error::RuntimeError;
use crate::execute::{Context, Local, is_computed};
use crate::rng::{Key, philox4x32_10};
use ir::op::SequenceOrder;
use ir::{DType, OpKind};

/// An operand or result on the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part<'a> {
    pub local: &'a Local,
    pub span: Span,
}

impl Part<'_> {
    /// Where it lies, and its type.
    fn typed(&self) -> (Span, &'static str) {
        (self.span, type_name(self.local.dtype))
    }
    fn elements(&self) -> usize {
        self.local.elements()
    }
    fn dims(&self) -> Vec<usize> {
        self.local.dims()
    }
    /// Length of the last dim; 1 of a scalar.
    fn width(&self) -> usize {
        self.local.ranges.last().map_or(1, |r| r.padded as usize)
    }
}

/// One op on its operands.
pub(super) struct Op<'a> {
    pub kind: &'a OpKind,
    pub path: &'a str,
    pub x: &'a [Part<'a>],
    pub y: &'a [Part<'a>],
    pub context: &'a Context,
    /// Memory of the stream's for sums on the way: [`Op::scratch_bytes`].
    pub scratch: u64,
    /// Whether cuBLASLt is there, and wanted.
    pub has_library: bool,
    /// Most bytes of shared memory that a launch may ask for.
    pub shared: u32,
}

/// Bytes of shared memory that a block may have on GPUs of compute capability 9.0 and 10.0.
pub(super) const MUCH_SHARED: u32 = 227 << 10;

/// Bytes of the memory for sums on the way that every op may take.
pub(super) const SCRATCH: usize = 8 << 10;

type Steps = Result<Vec<Step>, RuntimeError>;

impl Op<'_> {
    pub fn error(&self, problem: impl Into<String>) -> RuntimeError {
        RuntimeError::Kernel {
            op: format!("{} ({})", self.path, self.kind.name()),
            problem: problem.into(),
        }
    }

    /// Fails where the numbers of operands and results, their types or bytes are not the op's.
    pub fn check(&self) -> Result<(), RuntimeError> {
        let (n, m) = (self.x.len(), self.y.len());
        let n_results = self.kind.n_results().unwrap_or(m);
        if !self.kind.arity().contains(&n) || m != n_results || m == 0 {
            return Err(self.error(format!(
                "{n} operands and {m} results; it takes {:?} and has {n_results}",
                self.kind.arity()
            )));
        }
        for part in self.x.iter().chain(self.y) {
            let dtype = part.local.dtype;
            if !is_computed(dtype) {
                return Err(self.error(format!("no kernels for {}", dtype.name())));
            }
            if part.local.bytes() as u64 != part.span.bytes {
                return Err(self.error(format!(
                    "a buffer of {} bytes for {:?} {}",
                    part.span.bytes,
                    part.dims(),
                    dtype.name()
                )));
            }
        }
        Ok(())
    }

    /// Bytes of scratch memory that the calls take.
    pub fn scratch_bytes(&self) -> usize {
        let bytes = match self.kind {
            OpKind::AttentionGrad { .. } => self.attention_scratch(),
            OpKind::Rotary { .. } => self.elements_scratch(),
            OpKind::Route { .. } | OpKind::Dispatch { .. } => self.experts_scratch(),
            OpKind::Conv2d { .. }
            | OpKind::Conv2dGradInput { .. }
            | OpKind::Conv2dGradWeight { .. }
            | OpKind::MaxPool2dGrad { .. }
            | OpKind::GroupNorm { .. }
            | OpKind::GroupNormGradInput
            | OpKind::GroupNormGradWeight => self.images_scratch(),
            _ => self.rows_scratch(),
        };
        bytes.next_multiple_of(256).max(SCRATCH)
    }

    /// The operands that are copied first, and whether that is to the place of their result: updates
    /// write where the old value is, and others that overlap a result are read when it is written.
    pub fn copied(&self) -> Vec<(usize, bool)> {
        let mut copied = Vec::new();
        for (i, part) in self.x.iter().enumerate() {
            if let Some(&(_, o)) = self.kind.in_place().iter().find(|p| p.0 == i) {
                if part.span != self.y[o].span {
                    copied.push((i, true));
                }
                continue;
            }
            let overlaps = |y: &Part<'_>| {
                part.span.at < y.span.at + y.span.bytes
                    && y.span.at < part.span.at + part.span.bytes
            };
            let shares = |y: &Part<'_>| {
                let same_lengths = part.local.elements() == y.local.elements();
                part.span == y.span
                    && part.local.dtype == y.local.dtype
                    && may_share(self.kind, i, same_lengths)
            };
            if self.y.iter().any(|y| overlaps(y) && !shares(y)) {
                copied.push((i, false));
            }
        }
        copied
    }

    /// The calls that compute it. Padding of the results may become anything.
    pub fn steps(&self) -> Steps {
        match self.kind {
            OpKind::Layout
            | OpKind::Reshape { .. }
            | OpKind::Broadcast { .. }
            | OpKind::Transpose { .. }
            | OpKind::Slice { .. }
            | OpKind::Pad { .. }
            | OpKind::Unstack { .. }
            | OpKind::Stack { .. }
            | OpKind::Join => self.moves(),
            OpKind::Cast { .. }
            | OpKind::Unary { .. }
            | OpKind::Binary { .. }
            | OpKind::ScaleRows
            | OpKind::Accumulate { .. }
            | OpKind::Dropout { .. }
            | OpKind::Rotary { .. } => self.elements_alone(),
            OpKind::DotGeneral { einsum } => self.matmul(einsum),
            OpKind::Attention { .. } => self.attention(),
            OpKind::AttentionGrad { .. } => self.attention_grad(),
            OpKind::Route { .. }
            | OpKind::RouteGrad { .. }
            | OpKind::Dispatch { .. }
            | OpKind::Combine
            | OpKind::ExpertBias
            | OpKind::ClampedSwiglu { .. }
            | OpKind::ClampedSwigluGrad { .. }
            | OpKind::GateGrad => self.experts(),
            OpKind::Conv2d { .. }
            | OpKind::Conv2dGradInput { .. }
            | OpKind::Conv2dGradWeight { .. }
            | OpKind::MaxPool2d { .. }
            | OpKind::MaxPool2dGrad { .. }
            | OpKind::GroupNorm { .. }
            | OpKind::GroupNormGradInput
            | OpKind::GroupNormGradWeight => self.images(),
            OpKind::CausalConv
            | OpKind::CausalConvGradInput
            | OpKind::CausalConvGradWeight { .. }
            | OpKind::StateSpace { .. }
            | OpKind::StateSpaceGrad { .. } => {
                Err(self.error("state spaces have no kernels for GPUs yet; CPU ranks train them"))
            }
            OpKind::SumSquares
            | OpKind::GlobalNorm
            | OpKind::ClipCoefficient { .. }
            | OpKind::UpdateLossScale { .. }
            | OpKind::AdamW { .. }
            | OpKind::Sgd { .. } => self.updates(),
            _ => self.rows(),
        }
    }

    /// Fails where an operand is not of floats.
    fn floats(&self, operands: &[usize]) -> Result<(), RuntimeError> {
        let is_float = |i: &usize| self.x[*i].local.dtype != DType::I32;
        match operands.iter().find(|i| !is_float(i)) {
            None => Ok(()),
            Some(i) => Err(self.error(format!("operand {i} is i32, expected a float"))),
        }
    }
    /// Fails where an operand is not of integers.
    fn integers(&self, operand: usize) -> Result<(), RuntimeError> {
        match self.x[operand].local.dtype {
            DType::I32 => Ok(()),
            other => Err(self.error(format!(
                "operand {operand} is {}, expected i32",
                other.name()
            ))),
        }
    }
    /// Four words of the key of the op's mask.
    fn key(&self, path: &str) -> [i64; 4] {
        let Key { seed, step, path } = Key::new(self.context.seed, self.context.step, path);
        let words = |v: u64| [v as u32, (v >> 32) as u32];
        let ([s0, s1], [p0, p1]) = (words(step), words(path));
        philox4x32_10([s0, s1, p0, p1], words(seed)).map(i64::from)
    }
}

/// Elements of a chunk and ranks of an order, for sequences of `len`; zeros where rows are stored
/// by position.
fn chunks(order: SequenceOrder, len: u64) -> [i64; 2] {
    match order {
        SequenceOrder::Natural => [0, 0],
        SequenceOrder::Zigzag { ranks } => {
            let chunk = (len / (2 * ranks).max(1)).max(1);
            [chunk as i64, ranks as i64]
        }
    }
}

/// Whether an operand may lie exactly where the result will: each thread reads the elements that
/// it writes, and no others.
fn may_share(kind: &OpKind, operand: usize, same_lengths: bool) -> bool {
    kind.is_view() || (same_lengths && kind.may_overwrite(operand))
}
