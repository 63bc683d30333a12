//! Ops along rows: norms, embeddings, losses, and reductions over dims.

use super::super::args::{Call, EMBEDDING, LOSS, NORM, REDUCE, Span, Step};
use super::{Op, Steps};
use crate::error::RuntimeError;
use ir::{OpKind, ReduceKind};

/// Threads that share a row.
const PER_ROW: u32 = 128;
/// Most blocks; they go on to further rows.
const MOST_ROWS: usize = 1 << 16;
/// From so many terms on a block makes each sum.
const MANY: usize = 64;
/// Columns of a block that adds up rows.
const COLUMNS: usize = 32;
/// Threads of these blocks: eight for each column.
const SUM_THREADS: u32 = 256;
/// Rows that are worth a block of their own.
const LEAST_ROWS: usize = 128;
/// Blocks that add up rows: some for each multiprocessor of a large GPU.
const MOST_SUMS: usize = 1024;

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
            OpKind::LayerNormGradWeight | OpKind::RmsNormGradWeight => {
                return Ok(self.norm_grad_weight());
            }
            OpKind::Embedding => self.embedding()?,
            OpKind::EmbeddingGrad { .. } => return self.embedding_grad(),
            OpKind::LogSumExp | OpKind::CrossEntropy | OpKind::CrossEntropyGrad => self.losses()?,
            OpKind::Reduce { kind, dims } => match self.columns() {
                Some((rows, width)) if *kind == ReduceKind::Sum => {
                    return Ok(self.column_sums(rows, width));
                }
                _ => self.reduce(*kind, dims)?,
            },
            _ => return Err(self.error("the CUDA backend has no kernel for it")),
        };
        Ok(vec![Step::Call(call)])
    }

    /// Rows and width of a reduction over all leading dims, from so many rows on that blocks share
    /// a column.
    fn columns(&self) -> Option<(usize, usize)> {
        let OpKind::Reduce { dims, .. } = self.kind else {
            return None;
        };
        let x = self.x[0].dims();
        let is_leading = (0..dims.len()).all(|d| dims.contains(&d)) && dims.len() < x.len();
        let rows: usize = x.iter().take(dims.len()).product();
        (is_leading && rows >= MANY).then(|| (rows, x[dims.len()..].iter().product()))
    }

    /// Parts into which the rows are cut whose sums are added afterwards.
    fn parts(rows: usize, width: usize) -> usize {
        let columns = width.div_ceil(COLUMNS).max(1);
        rows.div_ceil(LEAST_ROWS)
            .clamp(1, (MOST_SUMS / columns).max(1))
    }

    /// Bytes of scratch memory for the sums of parts, or for the chains of equal ids.
    pub(super) fn rows_scratch(&self) -> usize {
        let (rows, width) = self.matrix();
        match self.kind {
            OpKind::LayerNormGradWeight => 16 * Self::parts(rows, width) * width,
            OpKind::RmsNormGradWeight => 8 * Self::parts(rows, width) * width,
            OpKind::Reduce { .. } => self
                .columns()
                .map_or(0, |(rows, width)| 8 * Self::parts(rows, width) * width),
            OpKind::EmbeddingGrad { .. } => 4 * self.x[0].elements(),
            _ => 0,
        }
    }

    /// A call whose blocks have 32 columns of a part of the rows, and the calls that add its sums
    /// up, one for each of so many results.
    fn summed(&self, mut call: Call, rows: usize, width: usize) -> Vec<Step> {
        let (parts, results) = (Self::parts(rows, width), self.y.len());
        let bytes = (8 * parts * width) as u64;
        let scratch = |i: usize| Span {
            at: self.scratch + i as u64 * bytes,
            bytes,
        };
        for i in 0..results {
            call = call.y(i, (scratch(i), "f32"));
        }
        let per_part = rows.div_ceil(parts);
        call = call.n(0, &[rows as i64, width as i64, per_part as i64]);
        call.grid = [width.div_ceil(COLUMNS) as u32, parts as u32, 1];
        let mut steps = vec![Step::Call(call)];
        for (i, y) in self.y.iter().enumerate() {
            let add = Call::each(REDUCE, "add_parts", width).x(0, (scratch(i), "f32"));
            let add = add.y(0, y.typed()).n(0, &[width as i64, parts as i64]);
            steps.push(Step::Call(add));
        }
        steps
    }

    fn norm_grad_weight(&self) -> Vec<Step> {
        let kernel = match self.kind {
            OpKind::LayerNormGradWeight => "layer_norm_grad_weight",
            _ => "rms_norm_grad_weight",
        };
        let (rows, width) = self.matrix();
        let mut call = Call::blocks(NORM, kernel, 1, SUM_THREADS);
        for (i, x) in self.x.iter().enumerate() {
            call = call.x(i, x.typed());
        }
        self.summed(call, rows, width)
    }

    fn column_sums(&self, rows: usize, width: usize) -> Vec<Step> {
        let call = Call::blocks(REDUCE, "column_sums", 1, SUM_THREADS).x(0, self.x[0].typed());
        self.summed(call, rows, width)
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

    /// Zeros, then a block for each first appearance of an id, which follows the chain of its
    /// others.
    fn embedding_grad(&self) -> Steps {
        self.integers(0)?;
        let vocab = self.y[0].local.ranges[0];
        let (width, ids) = (self.x[1].width(), self.x[0].elements());
        let chains = Span {
            at: self.scratch,
            bytes: 4 * ids as u64,
        };
        let chain = Call::each(EMBEDDING, "embedding_chains", ids)
            .x(0, self.x[0].typed())
            .y(0, (chains, "f32"))
            .n(0, &[ids as i64]);
        let call = Call::blocks(EMBEDDING, "embedding_grad", ids.min(MOST_ROWS), PER_ROW);
        let call = self.operands(call).x(2, (chains, "f32"));
        let numbers = [
            ids as i64,
            width as i64,
            vocab.start as i64,
            vocab.valid as i64,
        ];
        let steps = [Step::Call(chain), Step::Call(call.n(0, &numbers))];
        Ok([super::fill(0.0, self.y[0])]
            .into_iter()
            .chain(steps)
            .collect())
    }

    fn losses(&self) -> Result<Call, RuntimeError> {
        let last = self.x[0].local.ranges.last();
        let (offset, valid) = last.map_or((0, 1), |r| (r.start as i64, r.valid as i64));
        let (rows, width) = self.matrix();
        let numbers = [rows as i64, width as i64, valid, offset];
        if matches!(self.kind, OpKind::LogSumExp) {
            let call = self.each_row(LOSS, "log_sum_exp").n(0, &numbers);
            // A block per row whatever the width.
            return Ok(call.by_eights(width, usize::MAX));
        }
        self.integers(2)?;
        let call = match self.kind {
            OpKind::CrossEntropy => Call::each(LOSS, "cross_entropy", rows),
            _ => Call::each(LOSS, "cross_entropy_grad", rows * width),
        };
        let call = self.operands(call).n(0, &numbers);
        match self.kind {
            OpKind::CrossEntropyGrad => Ok(call.by_eights(width, rows * width)),
            _ => Ok(call),
        }
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
