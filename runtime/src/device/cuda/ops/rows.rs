//! Ops along rows: norms, losses, and reductions over dims.

use super::super::args::{Call, LOSS, NORM, REDUCE, Span, Step};
use super::{Op, Steps};
use crate::error::RuntimeError;
use ir::{OpKind, ReduceKind};

/// Threads of a warp.
pub(super) const WARP: usize = 32;
/// Threads that share a row.
const PER_ROW: u32 = 128;
/// Most blocks; they go on to further rows.
const MOST_ROWS: usize = 1 << 16;
/// From so many terms on a block makes each sum.
const MANY: usize = 64;
/// Columns of a block that adds up rows.
const COLUMNS: usize = 32;
/// Threads of these blocks: eight for each column.
pub(super) const SUM_THREADS: u32 = 256;
/// Most warps of a block that adds up parts.
const MOST_WARPS: usize = 16;
/// Rows that are worth a block of their own.
const LEAST_ROWS: usize = 128;
/// Blocks that add up rows: some for each multiprocessor of a large GPU.
const MOST_SUMS: usize = 1024;
/// Eights of a thread that has a part of a row in registers: the kernels'.
const MOST_EIGHTS: usize = 4;
/// Most blocks along y and z.
pub(super) const MOST: usize = 65535;
/// Most threads of a block.
pub(super) const MOST_THREADS: usize = 1024;
/// Most threads that have a row in registers: a thread of so many may have 128 of the 65,536 of a
/// multiprocessor, which is what the gradients in f32 need.
const MOST_THREADS_OF_A_ROW: usize = 512;

/// As a kernel's grid; its blocks go on to what is left.
pub(super) fn extents(grid: [usize; 3]) -> [u32; 3] {
    let most = [MOST_ROWS, MOST, MOST];
    std::array::from_fn(|d| grid[d].min(most[d]) as u32)
}

/// Threads that share a row of so many pieces: as few as can be have nothing to do in the end.
pub(super) fn threads_of_row(pieces: usize) -> usize {
    let all = [256, 128, 64, WARP];
    let taken = |t: &usize| pieces.div_ceil(*t).max(1) * t;
    all.into_iter().min_by_key(taken).unwrap_or(WARP)
}

/// Matrices that follow each other, of which each column is added up.
#[derive(Clone, Copy, Debug)]
struct Matrices {
    count: usize,
    rows: usize,
    width: usize,
}

impl Matrices {
    fn one(rows: usize, width: usize) -> Self {
        let count = 1;
        Matrices { count, rows, width }
    }
    /// Parts into which the rows are cut whose sums are added afterwards, by blocks of so many
    /// columns.
    fn parts(&self, columns: usize) -> usize {
        let columns = (self.count * self.width.div_ceil(columns)).max(1);
        let parts = self.rows.div_ceil(LEAST_ROWS);
        parts.clamp(1, (MOST_SUMS / columns).max(1))
    }
    /// Bytes of one result's sums of parts, whether or not columns are taken by eights.
    fn sums_bytes(&self) -> usize {
        let parts = [COLUMNS, 8 * COLUMNS].map(|c| self.parts(c));
        8 * parts[0].max(parts[1]) * self.count * self.width
    }
}

impl Op<'_> {
    /// A call with a block per row.
    fn each_row(&self, source: super::super::args::Source, kernel: &'static str) -> Call {
        let (rows, width) = self.matrix();
        let call = Call::blocks(source, kernel, rows.min(MOST_ROWS), PER_ROW);
        self.operands(call).n(0, &[rows as i64, width as i64])
    }
    /// A norm or its gradient: a row is a warp's or a block's, in registers, if it fits there.
    pub(super) fn norm(&self, kernel: &'static str) -> Call {
        let (rows, width) = self.matrix();
        let mut call = self.each_row(NORM, kernel);
        let of_thread = 8 * MOST_EIGHTS;
        if !call.can_take_eights(width) || width > of_thread * MOST_THREADS_OF_A_ROW {
            return call;
        }
        let threads = width.div_ceil(of_thread).next_power_of_two().max(WARP);
        // Of warps that have a row each there are some in a block.
        let at_once = if threads == WARP {
            PER_ROW as usize / WARP
        } else {
            1
        };
        call.threads = (threads * at_once) as u32;
        call.grid[0] = rows.div_ceil(at_once).min(MOST_ROWS) as u32;
        call.n(2, &[threads as i64]).with_eights()
    }
    /// Rows and width of the first operand.
    fn matrix(&self) -> (usize, usize) {
        let width = self.x[0].width();
        (self.x[0].elements() / width.max(1), width)
    }
    /// With all operands and results.
    pub(super) fn operands(&self, mut call: Call) -> Call {
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
            OpKind::LayerNorm { eps } => self.norm("layer_norm").f(&[*eps]),
            OpKind::RmsNorm { eps } => self.norm("rms_norm").f(&[*eps]),
            OpKind::LayerNormGradInput => self.norm("layer_norm_grad_input"),
            OpKind::RmsNormGradInput => self.norm("rms_norm_grad_input"),
            OpKind::LayerNormGradWeight | OpKind::RmsNormGradWeight => {
                return Ok(self.norm_grad_weight());
            }
            OpKind::Embedding => self.embedding()?,
            OpKind::EmbeddingGrad { .. } => return self.embedding_grad(),
            OpKind::LogSumExp | OpKind::CrossEntropy | OpKind::CrossEntropyGrad => self.losses()?,
            OpKind::Reduce { kind, dims } => match self.columns() {
                Some(matrices) if *kind == ReduceKind::Sum => {
                    return Ok(self.column_sums(matrices));
                }
                _ => self.reduce(*kind, dims)?,
            },
            _ => return Err(self.error("the CUDA backend has no kernel for it")),
        };
        Ok(vec![Step::Call(call)])
    }

    /// A reduction over dims that follow each other and are not the last ones, from so many rows on
    /// that blocks share a column. Of several matrices columns are worth a block.
    fn columns(&self) -> Option<Matrices> {
        let OpKind::Reduce { dims, .. } = self.kind else {
            return None;
        };
        let (x, first) = (self.x[0].dims(), *dims.first()?);
        let last = first + dims.len();
        let follow = dims.iter().copied().eq(first..last) && last < x.len();
        let length = |dims: &[usize]| dims.iter().product::<usize>();
        let found = Matrices {
            count: length(x.get(..first)?),
            rows: length(x.get(first..last)?),
            width: length(x.get(last..)?),
        };
        let fits = found.count == 1 || found.count <= MOST && found.width >= COLUMNS;
        (follow && fits && found.rows >= MANY).then_some(found)
    }

    /// Bytes of scratch memory for the sums of parts, or for what sorts ids.
    pub(super) fn rows_scratch(&self) -> usize {
        let (rows, width) = self.matrix();
        match self.kind {
            OpKind::LayerNormGradWeight => 2 * Matrices::one(rows, width).sums_bytes(),
            OpKind::RmsNormGradWeight => Matrices::one(rows, width).sums_bytes(),
            OpKind::Reduce { .. } => self.columns().map_or(0, |m| m.sums_bytes()),
            OpKind::EmbeddingGrad { .. } => self.sorting().bytes(),
            _ => 0,
        }
    }

    /// A call whose blocks have 32 columns of a part of the rows, or 32 eights of them, and the calls
    /// that add its sums up, one for each of so many results.
    fn summed(&self, mut call: Call, matrices: Matrices) -> Vec<Step> {
        let Matrices { count, rows, width } = matrices;
        let mut columns = COLUMNS;
        // Scratch memory is aligned.
        if call.can_take_eights(width) {
            columns *= 8;
            call = call.with_eights();
        }
        let (parts, results) = (matrices.parts(columns), self.y.len());
        let bytes = (8 * parts * count * width) as u64;
        let scratch = |i: usize| Span {
            at: self.scratch + i as u64 * bytes,
            bytes,
        };
        for i in 0..results {
            call = call.y(i, (scratch(i), "f32"));
        }
        let per_part = rows.div_ceil(parts);
        call = call.n(0, &[rows as i64, width as i64, per_part as i64]);
        call.grid = [width.div_ceil(columns), parts, count].map(|n| n as u32);
        let mut steps = vec![Step::Call(call)];
        for (i, y) in self.y.iter().enumerate() {
            let all = count * width;
            let blocks = all.div_ceil(COLUMNS);
            let warps = parts.next_power_of_two().min(MOST_WARPS);
            let threads = (WARP * warps) as u32;
            let add = Call::blocks(REDUCE, "add_parts", blocks, threads);
            let add = add.x(0, (scratch(i), "f32")).y(0, y.typed());
            steps.push(Step::Call(add.n(0, &[all as i64, parts as i64])));
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
        self.summed(call, Matrices::one(rows, width))
    }

    fn column_sums(&self, matrices: Matrices) -> Vec<Step> {
        let call = Call::blocks(REDUCE, "column_sums", 1, SUM_THREADS).x(0, self.x[0].typed());
        self.summed(call, matrices)
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
            // A block per row.
            OpKind::CrossEntropyGrad if call.can_take_eights(width) => {
                let mut call = call.with_eights();
                call.grid[0] = rows.min(MOST_ROWS) as u32;
                Ok(call)
            }
            _ => Ok(call),
        }
    }

    fn reduce(&self, kind: ReduceKind, reduced: &[usize]) -> Result<Call, RuntimeError> {
        let is_max = match kind {
            ReduceKind::Sum => false,
            ReduceKind::Max => true,
            ReduceKind::LogSumExp if *reduced == [0] => return Ok(self.members_log_sum_exp()),
            other => {
                return Err(self.error(format!("no kernel for a reduction by {other:?}")));
            }
        };
        let (x, y) = (self.x[0], self.y[0]);
        let dims = x.dims();
        let stride = |d: usize| dims[d + 1..].iter().product::<usize>() as i64;
        // Padding is no element of a maximum; of a sum it is a zero.
        let valid = |d: usize| x.local.ranges[d].valid as i64;
        let terms: i64 = reduced.iter().map(|&d| valid(d)).product();
        let kept = (0..dims.len()).filter(|d| !reduced.contains(d));
        let kept = joined(kept.map(|d| [dims[d] as i64, stride(d)]));
        let reduced = joined(reduced.iter().map(|&d| [valid(d), stride(d)]));
        let numbers = [&kept[..], &reduced[..]].concat().concat();
        let n = y.elements();
        let call = match terms as usize {
            few if few < MANY => Call::each(REDUCE, "reduce_few", n),
            // Few long sums have as many threads as a block can.
            many => {
                let threads = if many >= 8 * MOST_THREADS {
                    MOST_THREADS as u32
                } else {
                    PER_ROW
                };
                Call::blocks(REDUCE, "reduce", n.min(MOST_ROWS), threads)
            }
        };
        let head = [
            n as i64,
            kept.len() as i64,
            reduced.len() as i64,
            terms,
            i64::from(is_max),
        ];
        Ok(self.operands(call).n(0, &head).n(5, &numbers))
    }

    /// Over dim 0, along which the values of the members of a group stand.
    fn members_log_sum_exp(&self) -> Call {
        let (members, n) = (self.x[0].dims().first().copied(), self.y[0].elements());
        let call = Call::each(REDUCE, "members_log_sum_exp", n);
        let numbers = [n, members.unwrap_or(0)].map(|n| n as i64);
        self.operands(call).n(0, &numbers)
    }
}

/// Dims, each an extent and a stride, with those that follow each other as one.
fn joined(dims: impl Iterator<Item = [i64; 2]>) -> Vec<[i64; 2]> {
    let mut all: Vec<[i64; 2]> = Vec::new();
    for [extent, stride] in dims {
        match all.last_mut() {
            Some(outer) if outer[1] == extent * stride => *outer = [outer[0] * extent, stride],
            _ => all.push([extent, stride]),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::threads_of_row;

    #[test]
    fn few_threads_of_a_row_are_idle() {
        // Rows of 4096, 2880, 768 and 32 halves, by eights.
        assert_eq!([512, 360, 96, 4].map(threads_of_row), [256, 128, 32, 32]);
    }
}
