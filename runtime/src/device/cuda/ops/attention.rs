//! Attention and its gradient, of all keys or of a shard that has gone around a ring.
//!
//! Tensor cores take what is in half precision, stored by position and without dropout, of heads up
//! to 128; kernels with a warp for each row take the rest.

use super::super::args::{ATTENTION, ATTENTION_TILES, Call, Span, Step};
use super::{Op, Part, Steps, chunks};
use crate::error::RuntimeError;
use ir::{DType, OpKind};

/// Warps of a block, each with a row.
const WARPS: usize = 4;
/// Longest head.
const MOST_DIM: usize = 256;
/// The same of the kernels for tensor cores, of which there are two: up to half of it, and to it.
const MOST_TILED: usize = 128;
/// Rows and threads of their blocks.
const TILED_ROWS: u64 = 64;
const TILED_THREADS: u32 = 128;
/// Most blocks along y and z.
const MOST_BLOCKS: i64 = 65535;

impl Op<'_> {
    /// A call with a warp per row.
    fn each_warp(&self, kernel: &'static str, rows: usize) -> Result<Call, RuntimeError> {
        let (OpKind::Attention {
            scale,
            dropout,
            key,
            order,
            keys,
            ..
        }
        | OpKind::AttentionGrad {
            scale,
            dropout,
            key,
            order,
            keys,
            ..
        }) = self.kind
        else {
            return Err(self.error("is no attention"));
        };
        self.floats(&(0..self.x.len()).collect::<Vec<_>>())?;
        let (q, k) = (self.x[0].local, self.x[1].local);
        let (ql, kl) = (&q.ranges, &k.ranges);
        let dim = self.x[0].width();
        if !matches!(ql.len(), 4 | 5) || kl.len() != 4 || dim > MOST_DIM {
            return Err(self.error(format!(
                "queries of {:?} and keys of {:?}: heads have at most {MOST_DIM} elements",
                q.dims(),
                k.dims()
            )));
        }
        if self.x[2].width() != dim {
            return Err(self.error(format!(
                "values of {:?} are not as wide as keys of {:?}: there are no CUDA kernels for \
                 latent attention; run it on CPU ranks (--backend cpu)",
                self.x[2].local.dims(),
                k.dims()
            )));
        }
        let grouped = ql.len() == 5;
        let groups = if grouped { ql[3].padded } else { 1 };
        let [chunk, ranks] = chunks(*order, q.lens[1]);
        let sizes = [
            ql[0].padded,
            ql[1].padded,
            kl[2].padded,
            groups,
            dim as u64,
            kl[1].padded,
            ql[1].valid,
            kl[1].valid,
            ql[1].start,
            kl[1].start,
        ];
        let has_mask = self.context.training && *dropout > 0.0;
        let mask = [
            u64::from(has_mask),
            self.context.first_sample + ql[0].start,
            ql[2].start,
            if grouped { ql[3].start } else { 0 },
            q.lens[1],
            q.lens[2],
            if grouped { q.lens[3] } else { 1 },
            k.lens[1],
        ];
        // A model's op that nothing trains has no key.
        let path = if key.is_empty() { self.path } else { key };
        let mut call = Call::blocks(ATTENTION, kernel, rows.div_ceil(WARPS), 32 * WARPS as u32)
            .n(0, &sizes.map(|n| n as i64))
            .n(10, &[chunk, ranks, i64::from(keys.continues())])
            .n(13, &mask.map(|n| n as i64))
            .n(21, &self.key(path))
            .f(&[*scale, *dropout, 1.0 / (1.0 - *dropout)]);
        for (i, x) in self.x.iter().enumerate() {
            call = call.x(i, x.typed());
        }
        for (i, y) in self.y.iter().enumerate() {
            call = call.y(i, y.typed());
        }
        Ok(call)
    }

    /// The call of a kernel for tensor cores on these operands, with blocks for so many rows; none
    /// where the kernels do not take the op. `heads` says whether each head of the queries has
    /// blocks, or each head of keys.
    fn tiled(
        &self,
        kernels: [&'static str; 2],
        (rows, is_of_queries): (u64, bool),
    ) -> Result<Option<Call>, RuntimeError> {
        let plain = self.each_warp(kernels[0], 1)?;
        let numbers = &plain.args.n;
        let (order, is_continued, has_mask) = (numbers[10], numbers[12], numbers[13]);
        let half = |part: &&Part<'_>| matches!(part.local.dtype, DType::Bf16 | DType::F16);
        let dtype = self.x[0].local.dtype;
        let halves: Vec<&Part<'_>> = self.x.iter().chain(self.y).filter(half).collect();
        // All but the log-sum-exp.
        let n = self.x.len() + self.y.len() - 1;
        let dim = self.x[0].width();
        let fits = halves.len() == n
            && halves
                .iter()
                .all(|p| p.local.dtype == dtype && p.span.at.is_multiple_of(16))
            && (order, is_continued, has_mask) == (0, 0, 0)
            && dim.is_multiple_of(8)
            && dim <= MOST_TILED;
        let (batch, kv, groups) = (numbers[0], numbers[2], numbers[3]);
        let heads = if is_of_queries { kv * groups } else { kv };
        if !fits || heads > MOST_BLOCKS || batch > MOST_BLOCKS {
            return Ok(None);
        }
        let mut call = Call {
            source: ATTENTION_TILES,
            kernel: kernels[usize::from(dim > MOST_TILED / 2)],
            threads: TILED_THREADS,
            ..plain
        };
        let blocks = [rows.div_ceil(TILED_ROWS), heads as u64, batch as u64];
        call.grid = blocks.map(|n| u32::try_from(n).unwrap_or(u32::MAX));
        Ok(Some(call))
    }

    /// Bytes of scratch memory that the gradient takes for a number for each row.
    pub(super) fn attention_scratch(&self) -> usize {
        self.x.get(4).map_or(0, |lse| 4 * lse.elements())
    }

    pub(super) fn attention(&self) -> Steps {
        let queries = self.x[0].local.ranges.get(1).map_or(0, |r| r.padded);
        let kernels = ["attention_tiles_64", "attention_tiles_128"];
        if let Some(call) = self.tiled(kernels, (queries, true))? {
            return Ok(vec![Step::Call(call)]);
        }
        let rows = self.y[1].elements();
        Ok(vec![Step::Call(self.each_warp("attention", rows)?)])
    }

    pub(super) fn attention_grad(&self) -> Steps {
        let length = |x: &Part<'_>| x.local.ranges.get(1).map_or(0, |r| r.padded);
        let (queries, keys) = (length(&self.x[0]), length(&self.x[1]));
        let of_q = ["attention_tiles_grad_q_64", "attention_tiles_grad_q_128"];
        let of_kv = ["attention_tiles_grad_kv_64", "attention_tiles_grad_kv_128"];
        let tiled = (
            self.tiled(of_q, (queries, true))?,
            self.tiled(of_kv, (keys, false))?,
        );
        if let (Some(of_q), Some(of_kv)) = tiled {
            let (rows, dim) = (self.x[4].elements(), self.x[0].width());
            let delta = Span {
                at: self.scratch,
                bytes: 4 * rows as u64,
            };
            let blocks = rows.div_ceil(WARPS);
            let first = Call::blocks(
                ATTENTION_TILES,
                "attention_delta",
                blocks,
                32 * WARPS as u32,
            )
            .x(0, self.x[3].typed())
            .x(1, self.x[5].typed())
            .y(0, (delta, "f32"))
            .n(0, &[rows as i64, dim as i64]);
            // The file is compiled for one set of types.
            let first = Call {
                types: of_q.types,
                ..first
            };
            let with = |call: Call| Step::Call(call.x(3, (delta, self.x[3].typed().1)));
            return Ok(vec![Step::Call(first), with(of_q), with(of_kv)]);
        }
        let keys = self.x[1].elements() / self.x[0].width().max(1);
        Ok(vec![
            Step::Call(self.each_warp("attention_grad_q", self.x[4].elements())?),
            Step::Call(self.each_warp("attention_grad_kv", keys)?),
        ])
    }
}
