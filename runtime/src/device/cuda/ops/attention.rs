//! Attention and its gradient, of all keys or of a shard that has gone around a ring.
//!
//! Tensor cores take what is in half precision, stored by position and without dropout, of heads up
//! to 128, and up to 192 whose values are at most 128 wide (DeepSeek-V2 and V3); kernels with a warp
//! for each row take the rest. Windows, caps, slopes and the like are switches of both, patterns of
//! blocks one of the kernels with a warp for each row.

use super::super::args::{ATTENTION, ATTENTION_TILES, ATTENTION_TILES_GRAD, Call};
use super::super::args::{Scores, Source, Span, Step, THREADS};
use super::{Op, Part, Steps, chunks};
use crate::error::RuntimeError;
use ir::op::Blocks;
use ir::{DType, OpKind};

/// Warps of a block, each with a row.
const WARPS: usize = 4;
/// Longest head.
const MOST_DIM: usize = 256;
/// Longest keys and values of each of the kernels for tensor cores.
const MOST_TILED: [[usize; 2]; 3] = [[64, 64], [128, 128], [192, 128]];
/// A number of tokens that no sequence is longer than.
const MOST_TOKENS: u64 = 1 << 40;
/// A window that no sequence of those kernels is longer than.
const MOST_WINDOW: u64 = 1 << 30;
/// Most blocks along y and z.
const MOST_BLOCKS: i64 = 65535;
/// Rows of a tile of the side that a kernel for tensor cores goes over: `TILE` of the kernels.
const TILE: u64 = 64;
/// Longest sequences, and positions of their first rows, that these kernels count, and most
/// elements from row to row.
const MOST_ROWS: i64 = 1 << 29;
const MOST_STEP: i64 = 1 << 25;

/// A kernel for tensor cores.
struct Tiled {
    name: &'static str,
    /// Rows of a block, of the side that has blocks.
    rows: u64,
    threads: u32,
    /// Bytes of shared memory of a block.
    shared: u32,
}

/// The kernels for heads of these lengths: [`MOST_TILED`]. What they have in shared memory is in the
/// headers of the files: rows of so many bytes, and of gradients of keys also two numbers for each
/// row of a tile.
struct Lengths {
    source: Source,
    /// Whether each head of the queries has blocks, or each head of keys.
    is_of_queries: bool,
    kernels: [Tiled; 3],
}

const fn tiled(name: &'static str, rows: u64, threads: u32, shared: u32) -> Tiled {
    Tiled {
        name,
        rows,
        threads,
        shared,
    }
}

const FORWARD: Lengths = Lengths {
    source: ATTENTION_TILES,
    is_of_queries: true,
    kernels: [
        tiled("attention_tiles_64", 128, 128, 4 * 64 * 128),
        tiled("attention_tiles_128", 128, 128, (128 + 3 * 64) * 256),
        tiled("attention_tiles_192", 128, 128, (128 + 2 * 64) * 384),
    ],
};
const GRAD_Q: Lengths = Lengths {
    source: ATTENTION_TILES_GRAD,
    is_of_queries: true,
    kernels: [
        tiled("attention_tiles_grad_q_64", 128, 128, 4 * 64 * 128),
        tiled("attention_tiles_grad_q_128", 128, 256, 4 * 64 * 256),
        tiled("attention_tiles_grad_q_192", 128, 256, 2 * 64 * (384 + 256)),
    ],
};
const GRAD_KV: Lengths = Lengths {
    source: ATTENTION_TILES_GRAD,
    is_of_queries: false,
    kernels: [
        tiled(
            "attention_tiles_grad_kv_64",
            128,
            128,
            4 * 64 * 128 + 2 * 64 * 8,
        ),
        tiled(
            "attention_tiles_grad_kv_128",
            128,
            256,
            4 * 64 * 256 + 2 * 64 * 8,
        ),
        tiled(
            "attention_tiles_grad_kv_192",
            128,
            256,
            (128 + 2 * 64) * (384 + 256) + 2 * 64 * 8,
        ),
    ],
};

impl Op<'_> {
    /// A call with a warp per row.
    fn each_warp(&self, kernel: &'static str, rows: usize) -> Result<Call, RuntimeError> {
        let (OpKind::Attention {
            scale,
            dropout,
            key,
            order,
            keys,
            bounds,
        }
        | OpKind::AttentionGrad {
            scale,
            dropout,
            key,
            order,
            keys,
            bounds,
        }) = self.kind
        else {
            return Err(self.error("is no attention"));
        };
        self.floats(&(0..self.x.len()).collect::<Vec<_>>())?;
        let (q, k) = (self.x[0].local, self.x[1].local);
        let (ql, kl) = (&q.ranges, &k.ranges);
        let (dim, value) = (self.x[0].width(), self.x[2].width());
        if !matches!(ql.len(), 4 | 5) || kl.len() != 4 || dim.max(value) > MOST_DIM {
            return Err(self.error(format!(
                "queries of {:?}, keys of {:?} and values of {:?}: heads have at most {MOST_DIM} \
                 elements on GPUs; run it on CPU ranks (--backend cpu)",
                q.dims(),
                k.dims(),
                self.x[2].dims()
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
        // A window over the whole sequence is none, nor are local blocks.
        let window = bounds.window.filter(|w| *w < k.lens[1]);
        let is_shorter = |b: &Blocks| b.size.saturating_mul(b.local) < k.lens[1];
        let blocks = bounds.blocks.filter(is_shorter);
        // Gradients have one operand more where the log-sum-exp has one.
        let own = self.x.len() - usize::from(keys.continues());
        let scores = Scores {
            window: window.is_some(),
            blocks: blocks.is_some(),
            cap: bounds.cap.is_some(),
            slopes: bounds.alibi,
            values: value != dim,
            lse_gradient: matches!(self.kind, OpKind::AttentionGrad { .. }) && own > 6,
        };
        let window = window.unwrap_or(0).min(MOST_WINDOW);
        // A model's op that nothing trains has no key.
        let path = if key.is_empty() { self.path } else { key };
        let mut call = Call::blocks(ATTENTION, kernel, rows.div_ceil(WARPS), 32 * WARPS as u32)
            .n(0, &sizes.map(|n| n as i64))
            .n(10, &[chunk, ranks, i64::from(keys.continues())])
            .n(13, &mask.map(|n| n as i64))
            .n(21, &self.key(path))
            .n(25, &[value as i64, window as i64])
            .n(27, &blocks.map_or([0; 5], numbers_of))
            .f(&[
                *scale,
                *dropout,
                1.0 / (1.0 - *dropout),
                bounds.cap.unwrap_or(0.0),
            ]);
        call.types.scores = scores;
        for (i, x) in self.x.iter().enumerate() {
            call = call.x(i, x.typed());
        }
        for (i, y) in self.y.iter().enumerate() {
            call = call.y(i, y.typed());
        }
        Ok(call)
    }

    /// The call of a kernel for tensor cores on these operands; none where the kernels do not take
    /// the op.
    fn tiled(&self, lengths: &Lengths) -> Result<Option<Call>, RuntimeError> {
        let (dim, value) = (self.x[0].width(), self.x[2].width());
        let holds = |most: &[usize; 2]| dim <= most[0] && value <= most[1];
        let Some(which) = MOST_TILED.iter().position(holds) else {
            return Ok(None);
        };
        let kernel = &lengths.kernels[which];
        let plain = self.each_warp(kernel.name, 1)?;
        let numbers = &plain.args.n;
        let (order, is_continued, has_mask) = (numbers[10], numbers[12], numbers[13]);
        let half = |part: &&Part<'_>| matches!(part.local.dtype, DType::Bf16 | DType::F16);
        let dtype = self.x[0].local.dtype;
        let halves: Vec<&Part<'_>> = self.x.iter().chain(self.y).filter(half).collect();
        let scores = plain.types.scores;
        // All but the log-sum-exp and its gradient.
        let n = self.x.len() + self.y.len() - 1 - usize::from(scores.lse_gradient);
        let (batch, queries, kv, groups) = (numbers[0], numbers[1], numbers[2], numbers[3]);
        let (keys, firsts) = (numbers[5], [numbers[8], numbers[9]]);
        let is_counted = [queries, keys, firsts[0], firsts[1]]
            .iter()
            .all(|n| *n <= MOST_ROWS)
            && kv * groups * dim.max(value) as i64 <= MOST_STEP
            && self.threads_of_norms() <= u64::from(u32::MAX);
        let fits = halves.len() == n
            && halves
                .iter()
                .all(|p| p.local.dtype == dtype && p.span.at.is_multiple_of(16))
            && (order, is_continued, has_mask) == (0, 0, 0)
            && !scores.blocks
            && dim.is_multiple_of(8)
            && value.is_multiple_of(8)
            // The longest heads are those whose values are shorter.
            && (which < 2 || scores.values)
            && kernel.shared <= self.shared
            && plain.args.f[0] > 0.0;
        let (heads, rows) = match lengths.is_of_queries {
            true => (kv * groups, queries),
            false => (kv, keys),
        };
        if !fits || !is_counted || heads > MOST_BLOCKS || batch > MOST_BLOCKS {
            return Ok(None);
        }
        let blocks = [
            (rows as u64).div_ceil(kernel.rows),
            heads as u64,
            batch as u64,
        ];
        Ok(Some(Call {
            source: lengths.source,
            threads: kernel.threads,
            shared: kernel.shared,
            grid: blocks.map(|n| u32::try_from(n).unwrap_or(u32::MAX)),
            ..plain
        }))
    }

    /// Rows of a sample for which the gradient has numbers in scratch memory: queries of all heads,
    /// as many of each as whole tiles have.
    fn rows_of_norms(&self) -> u64 {
        let ranges = &self.x[0].local.ranges;
        let heads = ranges.iter().skip(2).rev().skip(1).map(|r| r.padded);
        let queries = ranges.get(1).map_or(0, |r| r.padded);
        queries.next_multiple_of(TILE) * heads.product::<u64>()
    }

    /// Threads that make these numbers of a sample.
    fn threads_of_norms(&self) -> u64 {
        let of_row = if self.x[2].width() > 64 { 16 } else { 8 };
        of_row * self.rows_of_norms()
    }

    /// Bytes of scratch memory that the gradient takes for two numbers for each of these rows.
    pub(super) fn attention_scratch(&self) -> usize {
        let samples = self.x[0].local.ranges.first().map_or(0, |r| r.padded);
        (8 * samples * self.rows_of_norms()) as usize
    }

    pub(super) fn attention(&self) -> Steps {
        if let Some(call) = self.tiled(&FORWARD)? {
            return Ok(vec![Step::Call(call)]);
        }
        let rows = self.y[1].elements();
        Ok(vec![Step::Call(self.each_warp("attention", rows)?)])
    }

    pub(super) fn attention_grad(&self) -> Steps {
        if let (Some(of_q), Some(of_kv)) = (self.tiled(&GRAD_Q)?, self.tiled(&GRAD_KV)?) {
            let norms = Span {
                at: self.scratch,
                bytes: self.attention_scratch() as u64,
            };
            let blocks = self.threads_of_norms().div_ceil(THREADS.into());
            // The file is compiled for one set of types and switches.
            let types = of_q.types;
            let mut first = Call {
                kernel: "attention_delta",
                grid: [u32::try_from(blocks).unwrap_or(u32::MAX), of_q.grid[2], 1],
                threads: THREADS,
                shared: 0,
                ..of_q.clone()
            };
            first.args.y[0] = norms;
            let with = |call: Call| {
                Step::Call(Call {
                    types,
                    ..call.x(3, (norms, "f32"))
                })
            };
            return Ok(vec![Step::Call(first), with(of_q), with(of_kv)]);
        }
        let keys = self.x[1].elements() / self.x[0].width().max(1);
        Ok(vec![
            Step::Call(self.each_warp("attention_grad_q", self.x[4].elements())?),
            Step::Call(self.each_warp("attention_grad_kv", keys)?),
        ])
    }
}

/// A pattern of blocks as numbers 27 to 31 of `scores.cuh`.
fn numbers_of(b: Blocks) -> [i64; 5] {
    let tokens = |n: u64| b.size.saturating_mul(n).min(MOST_TOKENS) as i64;
    [
        tokens(1),
        tokens(b.local),
        i64::from(b.aligned),
        tokens(b.first),
        tokens(b.local.saturating_sub(b.last)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cuda::cases::context;
    use crate::execute::Local;
    use ir::op::{Bounds, Keys, SequenceOrder};

    /// The kernels, with their switches, of attention in bf16 with keys and values of these widths
    /// and this window over 300 tokens, on a GPU with so much shared memory.
    fn kernels(widths: [u64; 2], window: u64, shared: u32) -> Vec<(&'static str, Scores)> {
        let bounds = Bounds {
            window: Some(window),
            ..Bounds::default()
        };
        bounded(widths, bounds, shared)
    }

    /// The same with these bounds.
    fn bounded([dim, value]: [u64; 2], bounds: Bounds, shared: u32) -> Vec<(&'static str, Scores)> {
        let of = |dtype, rest: &[u64]| Local::whole(dtype, &[&[1, 300, 2], rest].concat());
        let [k, v] = [dim, value].map(|width| of(DType::Bf16, &[width]));
        let [q, o] = [dim, value].map(|width| of(DType::Bf16, &[1, width]));
        let lse = of(DType::F32, &[1]);
        let kind = OpKind::AttentionGrad {
            scale: 1.0,
            dropout: 0.0,
            key: "attend".into(),
            order: SequenceOrder::Natural,
            keys: Keys::All,
            bounds,
        };
        let part = |local| Part {
            local,
            span: Span::default(),
        };
        let op = Op {
            kind: &kind,
            path: "attend",
            x: &[&q, &k, &v, &o, &lse, &o].map(part),
            y: &[&q, &k, &v].map(part),
            context: &context(),
            scratch: 0,
            has_library: false,
            shared,
        };
        let steps = op.steps().expect("it has kernels");
        let called = steps.iter().map(|step| match step {
            Step::Call(call) => (call.kernel, call.types.scores),
            other => panic!("{other:?} is no call"),
        });
        called.collect()
    }

    #[test]
    fn heads_take_the_kernel_that_holds_them() {
        let much = super::super::MUCH_SHARED;
        let names = |widths, window, shared| {
            let all = kernels(widths, window, shared).into_iter();
            all.map(|k| k.0).collect::<Vec<_>>()
        };
        let tiles = |of: [&'static str; 2]| [&["attention_delta"][..], &of].concat();
        let by_warps = ["attention_grad_q", "attention_grad_kv"];
        let of_64 = ["attention_tiles_grad_q_64", "attention_tiles_grad_kv_64"];
        let of_192 = ["attention_tiles_grad_q_192", "attention_tiles_grad_kv_192"];
        assert_eq!(names([64, 64], 10, much), tiles(of_64));
        assert_eq!(names([192, 128], 10, much), tiles(of_192));
        // A GPU of compute capability 8.9 has 99 KiB, which the gradient of the keys does not fit.
        assert_eq!(names([192, 128], 10, 99 << 10), by_warps);
        assert_eq!(names([192, 192], 10, much), by_warps);
        assert_eq!(names([14, 10], 10, much), by_warps);
    }

    #[test]
    fn blocks_take_the_kernels_with_a_warp_for_each_row() {
        let of = |size| {
            let blocks = Blocks {
                size,
                local: 3,
                aligned: false,
                first: 1,
                last: 0,
            };
            let bounds = Bounds {
                blocks: Some(blocks),
                ..Bounds::default()
            };
            bounded([64, 64], bounds, 99 << 10)[0]
        };
        assert_eq!(of(99).0, "attention_grad_q");
        assert!(of(99).1.blocks);
        // Where the local ones are the whole sequence, there are none.
        assert_eq!(of(100).0, "attention_delta");
        assert!(!of(100).1.blocks);
    }

    #[test]
    fn a_window_over_the_whole_sequence_is_none() {
        let has_window = |window| kernels([64, 64], window, 99 << 10)[0].1.window;
        assert_eq!([300, 299].map(has_window), [false, true]);
    }
}
