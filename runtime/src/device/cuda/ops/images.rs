//! Images: convolutions as products of matrices, pooling, and norms of groups of channels.
//!
//! A convolution writes the pixels of each window as a row, to scratch memory and of a few samples at
//! a time, and multiplies as an einsum does. Of single pixels the image itself is the rows.

use super::super::args::{Call, IMAGES, REDUCE, Source, Span, Step, THREADS};
use super::rows::{SUM_THREADS, WARP, extents, threads_of_row};
use super::{Op, Part, Steps};
use crate::cpu::conv::{Conv, Windows};
use crate::execute::Local;
use crate::execute::images::{grouped, lengths, pool};
use ir::op::Einsum;
use ir::{DType, OpKind};

/// Bytes of rows of windows that a convolution has in memory at a time, unless one sample's are more.
const MOST_BYTES: usize = 128 << 20;
/// To what places in scratch memory are aligned.
const ALIGNED: u64 = 256;
/// Pixels of a part whose sums are added afterwards.
const PIXELS_OF_PART: usize = 256;
/// Most blocks along z, which have a sample each.
const MOST_SAMPLES: usize = 65535;

/// A place in scratch memory after another.
fn after(span: Span, bytes: usize) -> Span {
    Span {
        at: (span.at + span.bytes).next_multiple_of(ALIGNED),
        bytes: bytes as u64,
    }
}

/// The part of images of these samples.
fn of_samples(part: &Part<'_>, first: usize, count: usize, samples: usize) -> Span {
    let each = part.span.bytes / samples.max(1) as u64;
    Span {
        at: part.span.at + first as u64 * each,
        bytes: count as u64 * each,
    }
}

/// A convolution in memory.
struct Plan {
    conv: Conv,
    /// Elements of a row, and windows of a sample.
    row: usize,
    windows: usize,
    /// Samples at a time, and how many times that is.
    at_once: usize,
    rounds: usize,
    /// Type of the rows.
    dtype: DType,
}

impl Plan {
    fn rows_bytes(&self) -> usize {
        self.at_once * self.windows * self.row * self.dtype.bytes() as usize
    }
    /// Whether each pixel is a window, in order: then the image is the rows.
    fn is_plain(&self) -> bool {
        let w = &self.conv.windows;
        w.kernel == [1, 1] && w.stride == 1 && w.padding == 0
    }
}

impl Op<'_> {
    fn plan(&self) -> Option<Plan> {
        let (x, y) = (self.x, self.y[0]);
        let (conv, dtype) = match *self.kind {
            OpKind::Conv2d { stride, padding } => {
                let conv = lengths(x[0].local, x[1].local, y.local, stride, padding);
                (conv, x[0].local.dtype)
            }
            OpKind::Conv2dGradInput {
                stride, padding, ..
            } => {
                let conv = lengths(y.local, x[0].local, x[1].local, stride, padding);
                (conv, DType::F32)
            }
            OpKind::Conv2dGradWeight {
                stride, padding, ..
            } => {
                let conv = lengths(x[0].local, y.local, x[1].local, stride, padding);
                (conv, x[0].local.dtype)
            }
            _ => return None,
        };
        let row = conv.windows.kernel.iter().product::<usize>() * conv.inputs;
        let windows = conv.windows.counts().iter().product::<usize>();
        let of_sample = windows * row * dtype.bytes() as usize;
        let at_once = (MOST_BYTES / of_sample.max(1)).clamp(1, conv.samples.max(1));
        Some(Plan {
            conv,
            row,
            windows,
            at_once,
            rounds: conv.samples.div_ceil(at_once),
            dtype,
        })
    }

    /// Pixels of a part that is added up alone: more in the largest images, as a grid has so many
    /// parts at most.
    fn pixels_of_part(&self) -> usize {
        let s = grouped(self.x[0].local);
        PIXELS_OF_PART.max(s.pixels.div_ceil(MOST_SAMPLES))
    }

    /// Parts into which a sample's pixels are cut for sums, and bytes of one of two sums.
    fn group_parts(&self) -> (usize, usize) {
        let s = grouped(self.x[0].local);
        let parts = s.pixels.div_ceil(self.pixels_of_part()).max(1);
        (parts, 8 * s.samples * parts * s.groups * s.width)
    }

    pub(super) fn images_scratch(&self) -> usize {
        let aligned = |bytes: usize| bytes.next_multiple_of(ALIGNED as usize);
        match self.kind {
            OpKind::MaxPool2dGrad { .. } => 4 * self.x[1].elements(),
            OpKind::GroupNorm { .. } | OpKind::GroupNormGradInput | OpKind::GroupNormGradWeight => {
                let s = grouped(self.x[0].local);
                let figures = aligned(4 * s.samples * s.groups);
                2 * (aligned(self.group_parts().1) + figures)
            }
            _ => self.plan().map_or(0, |plan| {
                let rows = if plan.is_plain() {
                    0
                } else {
                    plan.rows_bytes()
                };
                let partial = match self.kind {
                    OpKind::Conv2dGradWeight { .. } if plan.rounds > 1 => {
                        4 * plan.rounds * self.y[0].elements()
                    }
                    _ => 0,
                };
                aligned(rows) + partial
            }),
        }
    }

    pub(super) fn images(&self) -> Steps {
        let floats = (0..self.x.len()).collect::<Vec<_>>();
        self.floats(&floats)?;
        match *self.kind {
            OpKind::MaxPool2d {
                kernel,
                stride,
                padding,
            } => {
                let (windows, channels) = pool(self.x[0].local, kernel, stride, padding);
                let call = self.windows_call("max_pool", (&windows, channels), self.x[0].span);
                let call = call.y(0, (self.y[0].span, "f32"));
                let rows = self.y[0].elements() / channels.max(1);
                Ok(vec![Step::Call(by_rows(call, rows, channels, channels))])
            }
            OpKind::MaxPool2dGrad {
                kernel,
                stride,
                padding,
            } => {
                let (windows, channels) = pool(self.x[0].local, kernel, stride, padding);
                let places = Span {
                    at: self.scratch,
                    bytes: 4 * self.x[1].elements() as u64,
                };
                let shape = (&windows, channels);
                let find = self.windows_call("max_pool_places", shape, self.x[0].span);
                let find = find.y(0, (places, "f32"));
                let rows = self.x[1].elements() / channels.max(1);
                let find = by_rows(find, rows, channels, channels);
                let give = self.windows_call("max_pool_grad", shape, self.x[1].span);
                let give = give.x(1, (places, "f32")).y(0, (self.y[0].span, "f32"));
                let pixels = self.y[0].elements() / channels.max(1);
                let give = by_rows(give, pixels, channels, channels);
                Ok([find, give].map(Step::Call).into())
            }
            OpKind::GroupNorm { .. } | OpKind::GroupNormGradInput | OpKind::GroupNormGradWeight => {
                self.group_norm()
            }
            _ => self.convolution(),
        }
    }

    /// A call with the numbers of windows, whose operand 0 and results have the op's type.
    fn windows_call(
        &self,
        kernel: &'static str,
        (w, channels): (&Windows, usize),
        x: Span,
    ) -> Call {
        let [rows, columns] = w.counts();
        let numbers = [channels, w.size[0], w.size[1], w.kernel[0], w.kernel[1]];
        let mut call = Call::blocks(IMAGES, kernel, 1, THREADS).x(0, (x, "f32"));
        call.types.x[0] = self.x[0].typed().1;
        let call = call.n(1, &numbers.map(|n| n as i64));
        call.n(6, &[rows, columns, w.stride, w.padding].map(|n| n as i64))
    }

    /// A product of matrices in memory, each with its type and lengths.
    fn product(&self, einsum: &str, parts: [(Span, DType, [usize; 2]); 3]) -> Steps {
        let einsum = Einsum::parse(einsum).map_err(|e| self.error(e.to_string()))?;
        let locals = parts.map(|(_, dtype, dims)| Local::whole(dtype, &dims.map(|d| d as u64)));
        let part = |i: usize| Part {
            local: &locals[i],
            span: parts[i].0,
        };
        let (x, y) = ([part(0), part(1)], [part(2)]);
        let op = Op {
            kind: self.kind,
            path: self.path,
            x: &x,
            y: &y,
            context: self.context,
            scratch: self.scratch,
            has_library: self.has_library,
            shared: self.shared,
        };
        op.matmul(&einsum)
    }

    fn convolution(&self) -> Steps {
        let Some(plan) = self.plan() else {
            return Err(self.error("is no op on images"));
        };
        let Plan { conv, row, .. } = plan;
        let (samples, outputs) = (conv.samples, conv.outputs);
        let t = self.x[0].local.dtype;
        let rows = Span {
            at: self.scratch,
            bytes: if plan.is_plain() {
                0
            } else {
                plan.rows_bytes() as u64
            },
        };
        let (weight, n_weights) = ([row, outputs], row * outputs);
        let partial = after(rows, 4 * plan.rounds * n_weights);
        let mut steps = Vec::new();
        for round in 0..plan.rounds {
            let first = round * plan.at_once;
            let count = plan.at_once.min(samples - first);
            let n = count * plan.windows;
            let (matrix, results) = ([n, row], [n, outputs]);
            let span = |part: &Part<'_>| of_samples(part, first, count, samples);
            let call = |kernel, x| self.windows_call(kernel, (&conv.windows, conv.inputs), x);
            // The rows of an image: itself, or written by the first of the steps.
            let mut rows_of = |image: Span| {
                if plan.is_plain() {
                    return image;
                }
                let call = call("windows", image).y(0, (rows, "f32"));
                let of_row = by_rows(call, n, conv.inputs, row);
                steps.push(Step::Call(of_row));
                rows
            };
            match self.kind {
                OpKind::Conv2d { .. } => {
                    let rows = rows_of(span(&self.x[0]));
                    let y = (span(&self.y[0]), t, results);
                    let w = (self.x[1].span, t, weight);
                    steps.extend(self.product("ri,io->ro", [(rows, t, matrix), w, y])?);
                }
                OpKind::Conv2dGradInput { .. } => {
                    let dy = (span(&self.x[1]), t, results);
                    let w = (self.x[0].span, t, weight);
                    let dx = span(&self.y[0]);
                    let to = match plan.is_plain() {
                        true => (dx, t, matrix),
                        false => (rows, DType::F32, matrix),
                    };
                    steps.extend(self.product("ro,io->ri", [dy, w, to])?);
                    if !plan.is_plain() {
                        let call = call("pixels", rows).y(0, (dx, "f32"));
                        let pixels = count * conv.windows.size.iter().product::<usize>();
                        let call = by_rows(call, pixels, conv.inputs, conv.inputs);
                        steps.push(Step::Call(call));
                    }
                }
                _ => {
                    let rows = rows_of(span(&self.x[0]));
                    let dy = (span(&self.x[1]), t, results);
                    let one = Span {
                        at: partial.at + (4 * round * n_weights) as u64,
                        bytes: 4 * n_weights as u64,
                    };
                    let dw = match plan.rounds {
                        1 => (self.y[0].span, t, weight),
                        _ => (one, DType::F32, weight),
                    };
                    steps.extend(self.product("ri,ro->io", [(rows, t, matrix), dy, dw])?);
                }
            }
        }
        if plan.rounds > 1 && matches!(self.kind, OpKind::Conv2dGradWeight { .. }) {
            let (n, terms) = (n_weights as i64, plan.rounds as i64);
            let add = Call::each(REDUCE, "reduce_few", n_weights).x(0, (partial, "f32"));
            // One dim that is kept and one that is added up, each with its stride.
            let numbers = [n, 1, 1, terms, 0, n, 1, terms, n];
            steps.push(Step::Call(add.y(0, self.y[0].typed()).n(0, &numbers)));
        }
        Ok(steps)
    }

    fn group_norm(&self) -> Steps {
        let s = grouped(self.x[0].local);
        let (channels, statistics) = (s.groups * s.width, s.samples * s.groups);
        if s.samples > MOST_SAMPLES {
            return Err(self.error(format!("no kernel for {} samples", s.samples)));
        }
        let (parts, bytes) = self.group_parts();
        let sums = Span {
            at: self.scratch,
            bytes: bytes as u64,
        };
        let more = after(sums, bytes);
        let averages = after(more, 4 * statistics);
        let averages_x = after(averages, 4 * statistics);
        let call = |source: Source, kernel, x: &[Span], y: &[Span]| {
            let mut call = Call::blocks(source, kernel, 1, THREADS);
            for (i, x) in x.iter().enumerate() {
                call = call.x(i, (*x, "f32"));
            }
            for (i, y) in y.iter().enumerate() {
                call = call.y(i, (*y, "f32"));
            }
            call.types.x[0] = self.x[0].typed().1;
            call
        };
        let x: Vec<Span> = self.x.iter().map(|x| x.span).collect();
        let y: Vec<Span> = self.y.iter().map(|y| y.span).collect();
        let mut steps = Vec::new();
        // Sums over parts of the pixels.
        let (kernel, operands) = match self.kind {
            OpKind::GroupNorm { .. } => ("group_sums", vec![x[0]]),
            OpKind::GroupNormGradInput => ("group_sums_grad", vec![x[0], x[1], x[3]]),
            _ => ("group_sums_grad", vec![x[0], x[1], x[2]]),
        };
        let (mut add, pieces) = wide(call(IMAGES, kernel, &operands, &[sums, more]), channels);
        let columns = pieces.next_power_of_two().min(SUM_THREADS as usize);
        add.threads = SUM_THREADS;
        add.grid = [pieces.div_ceil(columns), parts, s.samples].map(|n| n as u32);
        let numbers = [s.pixels, channels, self.pixels_of_part(), columns, s.width];
        steps.push(add.n(0, &numbers.map(|n| n as i64)));
        if let OpKind::GroupNormGradWeight = self.kind {
            let add = call(IMAGES, "group_norm_grad_weight", &[sums, more, x[3]], &y);
            let mut add = add.n(
                0,
                &[channels, s.samples * parts, parts, s.width].map(|n| n as i64),
            );
            add.grid[0] = channels.div_ceil(WARP) as u32;
            add.threads = SUM_THREADS;
            steps.push(add);
            return Ok(steps.into_iter().map(Step::Call).collect());
        }
        // Statistics, or averages of the gradient.
        let (eps, is_gradient) = match self.kind {
            OpKind::GroupNorm { eps } => (*eps, false),
            _ => (0.0, true),
        };
        let figures = match is_gradient {
            false => call(IMAGES, "group_figures", &[sums, more], &y[1..]),
            true => {
                let x = [sums, more, x[2], x[4]];
                call(IMAGES, "group_figures", &x, &[averages, averages_x])
            }
        };
        let numbers = [statistics, s.groups, s.width, parts, s.pixels * s.width];
        let mut figures = figures.n(0, &numbers.map(|n| n as i64)).f(&[eps]);
        figures = figures.n(5, &[i64::from(is_gradient)]);
        figures.grid = extents([statistics.div_ceil(THREADS as usize / WARP), 1, 1]);
        steps.push(figures);
        // And every pixel.
        let scale = match is_gradient {
            false => {
                let x = [x[0], x[1], x[2], y[1], y[2]];
                call(IMAGES, "group_norm", &x, &y[..1])
            }
            true => {
                let x = [x[0], x[1], x[2], x[3], x[4], averages, averages_x];
                call(IMAGES, "group_norm_grad_input", &x, &y)
            }
        };
        let (mut scale, pieces) = wide(scale, channels);
        let threads = threads_of_row(pieces);
        scale.threads = threads as u32;
        scale.grid = extents([pieces.div_ceil(threads), s.pixels.div_ceil(16), s.samples]);
        let numbers = [s.pixels, channels, s.samples, s.width];
        steps.push(scale.n(0, &numbers.map(|n| n as i64)));
        Ok(steps.into_iter().map(Step::Call).collect())
    }
}

/// A call by eights where they can be taken so, and how many pieces a row has.
fn wide(call: Call, width: usize) -> (Call, usize) {
    match call.can_take_eights(width) {
        true => (call.with_eights(), width / 8),
        false => (call, width),
    }
}

/// A call with some threads for each of so many rows, of so many channels, which are written with so
/// many elements.
fn by_rows(call: Call, rows: usize, channels: usize, elements: usize) -> Call {
    let (mut call, pieces) = wide(call, channels);
    let of_row = threads_of_row(pieces * (elements / channels.max(1)));
    call.grid = extents([rows.div_ceil(THREADS as usize / of_row), 1, 1]);
    call.n(0, &[rows as i64]).n(10, &[of_row as i64])
}
