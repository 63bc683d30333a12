//! Ops along rows: norms, embeddings, losses, and reductions over dims.

use super::super::args::{Call, EMBEDDING, LOSS, NORM, REDUCE, Step};
use super::{Op, Steps};
use crate::error::RuntimeError;
use ir::{OpKind, ReduceKind};

/// Threads that share a row.
const PER_ROW: u32 = 128;
/// Most blocks; they go on to further rows.
const MOST_ROWS: usize = 1 << 16;
/// From so many terms on a block makes each sum.
const MANY: usize = 64;

impl Op<'_> {
    /// A call with a block per row.
    fn each_row(&self, source: super::super::args::Source, kernel: &'static str) -> Call {
        let (rows, width) = self.matrix();
        let call = Call::blocks(source, kernel, rows.min(MOST_ROWS), PER_ROW);
        self.operands(call).n(0, &[rows as i64, width as i64])
    }
    /// Rows and width of the first operand.
    fn matrix(&self) -> (usize, usize) {
        let width = self.x[0].width();
        (self.x[0].elements() / width.max(1), width)
    }
    /// With all operands and results.
    fn operands(&self, mut call: Call) -> Call {
        for (i, x) in self.x.iter().enumerate() {
            call = call.x(i, x.typed());
        }
        for (i, y) in self.y.iter().enumerate() {
            call = call.y(i, y.typed());
        }
        call
    }

    pub(super) fn rows(&self) -> Steps {
        let call = match self.kind {
            OpKind::LayerNorm { eps } => self.each_row(NORM, "layer_norm").f(&[*eps]),
            OpKind::RmsNorm { eps } => self.each_row(NORM, "rms_norm").f(&[*eps]),
            OpKind::LayerNormGradInput => self.each_row(NORM, "layer_norm_grad_input"),
            OpKind::RmsNormGradInput => self.each_row(NORM, "rms_norm_grad_input"),
            OpKind::LayerNormGradWeight => self.columns("layer_norm_grad_weight"),
            OpKind::RmsNormGradWeight => self.columns("rms_norm_grad_weight"),
            OpKind::Embedding => self.embedding()?,
            OpKind::EmbeddingGrad { .. } => self.embedding_grad()?,
            OpKind::LogSumExp | OpKind::CrossEntropy | OpKind::CrossEntropyGrad => self.losses()?,
            OpKind::Reduce { kind, dims } => self.reduce(*kind, dims)?,
            _ => return Err(self.error("the CUDA backend has no kernel for it")),
        };
        Ok(vec![Step::Call(call)])
    }

    /// Sums over rows, 32 columns a block.
    fn columns(&self, kernel: &'static str) -> Call {
        let (rows, width) = self.matrix();
        let call = Call::blocks(NORM, kernel, width.div_ceil(32), 256);
        self.operands(call).n(0, &[rows as i64, width as i64])
    }

    fn embedding(&self) -> Result<Call, RuntimeError> {
        self.integers(1)?;
        let (vocab, n) = (self.x[0].local.ranges[0], self.y[0].elements());
        let width = self.x[0].width();
        let numbers = [
            n as i64,
            width as i64,
            vocab.start as i64,
            vocab.valid as i64,
        ];
        let call = Call::each(EMBEDDING, "embedding", n);
        Ok(self.operands(call).n(0, &numbers))
    }

    fn embedding_grad(&self) -> Result<Call, RuntimeError> {
        self.integers(0)?;
        let (vocab, n) = (self.y[0].local.ranges[0], self.y[0].elements());
        let (width, ids) = (self.x[1].width(), self.x[0].elements());
        let numbers = [
            n as i64,
            width as i64,
            vocab.start as i64,
            vocab.valid as i64,
        ];
        let call = Call::each(EMBEDDING, "embedding_grad", n);
        Ok(self.operands(call).n(0, &numbers).n(4, &[ids as i64]))
    }

    fn losses(&self) -> Result<Call, RuntimeError> {
        let last = self.x[0].local.ranges.last();
        let (offset, valid) = last.map_or((0, 1), |r| (r.start as i64, r.valid as i64));
        let (rows, width) = self.matrix();
        let numbers = [rows as i64, width as i64, valid, offset];
        if matches!(self.kind, OpKind::LogSumExp) {
            return Ok(self.each_row(LOSS, "log_sum_exp").n(0, &numbers));
        }
        self.integers(2)?;
        let call = match self.kind {
            OpKind::CrossEntropy => Call::each(LOSS, "cross_entropy", rows),
            _ => Call::each(LOSS, "cross_entropy_grad", rows * width),
        };
        Ok(self.operands(call).n(0, &numbers))
    }

    fn reduce(&self, kind: ReduceKind, reduced: &[usize]) -> Result<Call, RuntimeError> {
        let is_max = match kind {
            ReduceKind::Sum => false,
            ReduceKind::Max => true,
            other => {
                return Err(self.error(format!("no kernel for a reduction by {other:?}")));
            }
        };
        let (x, y) = (self.x[0], self.y[0]);
        let dims = x.dims();
        let stride = |d: usize| dims[d + 1..].iter().product::<usize>() as i64;
        let kept = (0..dims.len()).filter(|d| !reduced.contains(d));
        let mut numbers: Vec<i64> = kept
            .clone()
            .flat_map(|d| [dims[d] as i64, stride(d)])
            .collect();
        // Padding is no element of a maximum; of a sum it is a zero.
        let valid = |d: usize| x.local.ranges[d].valid as i64;
        numbers.extend(reduced.iter().flat_map(|&d| [valid(d), stride(d)]));
        let terms: i64 = reduced.iter().map(|&d| valid(d)).product();
        let (n, n_kept) = (y.elements(), kept.count());
        let call = match terms as usize >= MANY {
            true => Call::blocks(REDUCE, "reduce", n.min(MOST_ROWS), PER_ROW),
            false => Call::each(REDUCE, "reduce_few", n),
        };
        let head = [
            n as i64,
            n_kept as i64,
            reduced.len() as i64,
            terms,
            i64::from(is_max),
        ];
        Ok(self.operands(call).n(0, &head).n(5, &numbers))
    }
}
