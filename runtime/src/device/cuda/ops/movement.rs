//! Elements in other places, zeros, and one number everywhere.

use super::super::args::{Call, ELEMENTWISE, MOVEMENT, NUMBERS, Span, Step, THREADS};
use super::{Op, Part, Steps};
use crate::execute::Local;
use ir::OpKind;
use ir::reshard::Pieces;

/// One dim of a box of elements.
#[derive(Clone, Copy, Debug)]
struct Dim {
    /// Elements.
    extent: usize,
    /// Stride of the source.
    from: usize,
    /// Added to the index for that of the source, which is zero outside of `0..bound`.
    shift: i64,
    bound: usize,
    /// Stride of the target.
    to: usize,
}

fn strides(dims: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; dims.len()];
    for d in (1..dims.len()).rev() {
        strides[d - 1] = strides[d] * dims[d];
    }
    strides
}

/// All elements of `to` from the same places of `from`, both with their strides.
fn boxes(extents: &[usize], from: &[usize], to: &[usize]) -> Vec<Dim> {
    let dim = |d: usize| Dim {
        extent: extents[d],
        from: from[d],
        shift: 0,
        bound: extents[d],
        to: to[d],
    };
    (0..extents.len()).map(dim).collect()
}

impl Dim {
    /// Whether no index is outside of the source.
    fn is_whole(&self) -> bool {
        self.shift == 0 && self.bound == self.extent
    }
    fn follows(&self) -> bool {
        self.from == 1 && self.to == 1
    }
}

/// A box of elements of so many bytes, with its first elements in source and target.
#[derive(Clone, Debug)]
struct Moved {
    bytes: u64,
    dims: Vec<Dim>,
    first: [usize; 2],
}

impl Moved {
    fn elements(&self) -> usize {
        self.dims.iter().map(|d| d.extent).product()
    }

    /// The same box with as few dims as can be: a shift that stays inside is a beginning, dims of
    /// one element are none, and those that follow each other in source and target are one.
    fn merged(mut self) -> Self {
        let mut out: Vec<Dim> = Vec::new();
        for mut dim in self.dims {
            let inside = usize::try_from(dim.shift).ok();
            if let Some(shift) = inside.filter(|s| s + dim.extent <= dim.bound) {
                self.first[0] += shift * dim.from;
                (dim.shift, dim.bound) = (0, dim.extent);
            }
            if dim.extent == 1 && dim.is_whole() {
                continue;
            }
            match out.last_mut() {
                Some(outer)
                    if outer.is_whole()
                        && dim.is_whole()
                        && outer.from == dim.extent * dim.from
                        && outer.to == dim.extent * dim.to =>
                {
                    let extent = outer.extent * dim.extent;
                    *outer = Dim {
                        extent,
                        bound: extent,
                        ..dim
                    };
                }
                _ => out.push(dim),
            }
        }
        Moved { dims: out, ..self }
    }

    /// The same box of larger elements, of 16, 8 or 4 bytes, where the innermost ones follow each
    /// other and all begins are aligned: each is a load and a store.
    fn widened(self, (from, to): (Span, Span)) -> Self {
        let Some((inner, outer)) = self.dims.split_last().filter(|(d, _)| d.follows()) else {
            return self;
        };
        let fits = |wide: &u64| {
            let (n, size) = ((*wide / self.bytes) as usize, *wide as usize);
            let lengths = [inner.extent, inner.bound, self.first[0], self.first[1]];
            let strides = outer.iter().flat_map(|d| [d.from, d.to]);
            lengths
                .into_iter()
                .chain(strides)
                .all(|l| l.is_multiple_of(n))
                && inner.shift % n as i64 == 0
                && [from, to].iter().all(|s| s.at.is_multiple_of(size as u64))
        };
        let mut wider = [16, 8, 4].into_iter().filter(|w| *w > self.bytes);
        let Some(bytes) = wider.find(fits) else {
            return self;
        };
        let n = (bytes / self.bytes) as usize;
        let mut dims = self.dims;
        let last = dims.len() - 1;
        for (d, dim) in dims.iter_mut().enumerate() {
            if d < last {
                (dim.from, dim.to) = (dim.from / n, dim.to / n);
            } else {
                (dim.extent, dim.bound) = (dim.extent / n, dim.bound / n);
                dim.shift /= n as i64;
            }
        }
        Moved {
            bytes,
            dims,
            first: self.first.map(|f| f / n),
        }
    }

    /// Whether every index, and every step over a source that is left, has 31 bits.
    fn is_small(&self) -> bool {
        let limit = i64::from(i32::MAX);
        let reach = |of: fn(&Dim) -> usize, first: usize| {
            let steps = self
                .dims
                .iter()
                .map(|d| (d.extent.max(d.bound) + 1) * of(d));
            steps.fold(first, usize::saturating_add) as i64
        };
        reach(|d| d.from, self.first[0]) <= limit
            && reach(|d| d.to, self.first[1]) <= limit
            && self.elements() as i64 <= limit
            && self.dims.iter().all(|d| d.shift.abs() <= limit)
    }
}

/// The step that moves a box: a copy of bytes where they follow each other, else a kernel.
fn call(bytes: u64, dims: &[Dim], first: [usize; 2], (from, to): (Span, Span)) -> Step {
    let dims = dims.to_vec();
    let all = Moved { bytes, dims, first }.merged();
    let is_copy = match &all.dims[..] {
        [] => true,
        [dim] => dim.follows() && dim.is_whole(),
        _ => false,
    };
    if is_copy && all.elements() > 0 {
        let at = |span: Span, first: usize| span.at + first as u64 * bytes;
        return Step::Copy {
            from: at(from, all.first[0]),
            to: at(to, all.first[1]),
            bytes: all.elements() * bytes as usize,
        };
    }
    let all = all.widened((from, to));
    let n = all.elements();
    let mut numbers = vec![n as i64, all.dims.len() as i64];
    numbers.extend(all.first.map(|f| f as i64));
    numbers.push(i64::from(all.is_small()));
    for d in &all.dims {
        let extents = [d.extent, d.from].map(|n| n as i64);
        numbers.extend(extents);
        numbers.extend([d.shift, d.bound as i64, d.to as i64]);
    }
    let word = match all.bytes {
        16 => "Quad",
        8 => "u64",
        4 => "u32",
        _ => "u16",
    };
    // A thread has several elements under way once there are enough for all multiprocessors.
    let per_thread = if n >= MANY { AT_ONCE } else { 1 };
    let blocks = n.div_ceil(per_thread * THREADS as usize).min(MOST_BLOCKS);
    let call = Call::blocks(MOVEMENT, "move", blocks, THREADS).x(0, (from, word));
    Step::Call(call.y(0, (to, "f32")).n(0, &numbers))
}

/// Elements of a thread at a time: the kernel's.
const AT_ONCE: usize = 4;
/// Elements from which on threads have several: four for each thread of a large GPU.
const MANY: usize = 1 << 20;
/// Most blocks; their threads go on to further elements.
const MOST_BLOCKS: usize = 1 << 16;

/// Most dims of a box.
const MOST_DIMS: usize = (NUMBERS - 5) / 5;

/// Zeros past the valid lengths; none where there is no padding.
pub(crate) fn pad(part: Part<'_>) -> Option<Step> {
    let local = part.local;
    if !local.is_short() {
        return None;
    }
    let word = match local.dtype.bytes() {
        4 => "u32",
        _ => "u16",
    };
    let mut numbers = vec![local.elements() as i64, local.ranges.len() as i64];
    for r in &local.ranges {
        numbers.extend([r.padded as i64, r.valid as i64]);
    }
    let call = Call::each(MOVEMENT, "pad", local.elements());
    let mut call = call.y(0, (part.span, "f32")).n(0, &numbers);
    call.types.x[0] = word;
    Some(Step::Call(call))
}

/// One number everywhere, padding included.
pub(crate) fn fill(value: f32, part: Part<'_>) -> Step {
    let call = Call::each(ELEMENTWISE, "fill", part.elements());
    let n = part.elements();
    let call = call.y(0, part.typed()).n(0, &[n as i64]);
    Step::Call(call.f(&[value.into()]).by_eights(n, n))
}

/// Bytes to others that they do not overlap, by words of four; none where they are no such words.
pub(crate) fn words(from: Span, to: Span) -> Option<Step> {
    let is_words = |n: u64| n.is_multiple_of(4);
    if ![from.at, to.at, from.bytes].into_iter().all(is_words) {
        return None;
    }
    let n = (from.bytes / 4) as usize;
    let call = Call::each(MOVEMENT, "words", n).n(0, &[n as i64]);
    Some(Step::Call(call.x(0, (from, "u32")).y(0, (to, "u32"))))
}

/// Piece `index` of `len` elements along a dim, zeros past the operand's end.
fn cut(local: &Local, dim: usize, index: usize, len: usize) -> Vec<Dim> {
    let dims = local.dims();
    let mut piece = dims.clone();
    piece[dim] = len;
    let mut all = boxes(&piece, &strides(&dims), &strides(&piece));
    (all[dim].shift, all[dim].bound) = ((index * len) as i64, dims[dim]);
    all
}

/// A piece of a tensor along one dim.
pub(crate) fn slice(dim: usize, index: usize, input: Part<'_>, output: Part<'_>) -> Step {
    let len = output.dims()[dim];
    let bytes = input.local.dtype.bytes();
    let dims = cut(input.local, dim, index, len);
    call(bytes, &dims, [0, 0], (input.span, output.span))
}

/// A part cut into pieces that follow each other.
pub(crate) fn pack(pieces: Pieces, input: Part<'_>, output: Span) -> Vec<Step> {
    let (dim, len, bytes) = (pieces.dim, pieces.len as usize, input.local.dtype.bytes());
    let one = |index: usize| {
        let dims = cut(input.local, dim, index, len);
        let n: usize = dims.iter().map(|d| d.extent).product();
        call(bytes, &dims, [0, index * n], (input.span, output))
    };
    (0..pieces.n as usize).map(one).collect()
}

/// A part put together from pieces; what lies past its end is left out.
pub(crate) fn unpack(pieces: Pieces, input: Span, output: Part<'_>) -> Vec<Step> {
    let (dim, len, bytes) = (pieces.dim, pieces.len as usize, output.local.dtype.bytes());
    let dims = output.dims();
    let mut piece = dims.clone();
    piece[dim] = len;
    let n: usize = piece.iter().product();
    let one = |index: usize| {
        let start = (index * len).min(dims[dim]);
        let mut extents = piece.clone();
        extents[dim] = len.min(dims[dim] - start);
        let to = strides(&dims);
        let first = [index * n, start * to[dim]];
        let all = boxes(&extents, &strides(&piece), &to);
        call(bytes, &all, first, (input, output.span))
    };
    (0..pieces.n as usize).map(one).collect()
}

/// Where a box begins in a tensor of these dims.
fn begins(dims: &[usize], start: &[usize]) -> usize {
    let strides = strides(dims);
    start.iter().zip(&strides).map(|(s, by)| s * by).sum()
}

/// A box of a tensor of these dims to elements that follow each other.
pub(crate) fn lift(
    bytes: u64,
    (dims, start, len): (&[usize], &[usize], &[usize]),
    from: Span,
    to: Span,
) -> Step {
    let all = boxes(len, &strides(dims), &strides(len));
    call(bytes, &all, [begins(dims, start), 0], (from, to))
}

/// And back to its place.
pub(crate) fn lay(
    bytes: u64,
    (dims, start, len): (&[usize], &[usize], &[usize]),
    from: Span,
    to: Span,
) -> Step {
    let all = boxes(len, &strides(len), &strides(dims));
    call(bytes, &all, [0, begins(dims, start)], (from, to))
}

impl Op<'_> {
    pub(super) fn moves(&self) -> Steps {
        let (x, y) = (self.x[0], self.y[0]);
        if x.local.dtype != y.local.dtype {
            return Err(self.error("operand and result have different types"));
        }
        let bytes = x.local.dtype.bytes();
        let (dims, out) = (x.dims(), y.dims());
        if dims.len().max(out.len()) > MOST_DIMS {
            return Err(self.error(format!("more than {MOST_DIMS} dims")));
        }
        let from = strides(&dims);
        let one = |all: &[Dim], first| call(bytes, all, first, (x.span, y.span));
        let steps = match self.kind {
            OpKind::Broadcast { leading } => {
                let n: usize = out[..leading.len()].iter().product();
                let width = x.elements();
                vec![one(&boxes(&[n, width], &[0, 1], &[width, 1]), [0, 0])]
            }
            OpKind::Transpose { perm } => {
                let permuted: Vec<usize> = perm.iter().map(|&d| from[d]).collect();
                vec![one(&boxes(&out, &permuted, &strides(&out)), [0, 0])]
            }
            OpKind::Slice { dim, start, .. } => {
                let mut all = boxes(&out, &from, &strides(&out));
                (all[*dim].shift, all[*dim].bound) = (*start as i64, dims[*dim]);
                vec![one(&all, [0, 0])]
            }
            OpKind::Pad { dim, start, .. } => {
                let mut all = boxes(&out, &from, &strides(&out));
                (all[*dim].shift, all[*dim].bound) = (-(*start as i64), dims[*dim]);
                vec![one(&all, [0, 0])]
            }
            OpKind::Unstack { dim } => {
                let mut rest = from.clone();
                let stride = rest.remove(*dim);
                let all = boxes(&out, &rest, &strides(&out));
                let each = self.y.iter().enumerate();
                each.map(|(i, y)| call(bytes, &all, [i * stride, 0], (x.span, y.span)))
                    .collect()
            }
            OpKind::Stack { dim } => {
                let mut rest = strides(&out);
                let stride = rest.remove(*dim);
                let all = boxes(&dims, &from, &rest);
                let each = self.x.iter().enumerate();
                each.map(|(i, x)| call(bytes, &all, [0, i * stride], (x.span, y.span)))
                    .collect()
            }
            // What all rows share goes to each of them.
            OpKind::Join => {
                let (rows, n) = (self.x[1], x.width());
                let (row_dims, to) = (rows.dims(), strides(&out));
                let mut of_shared = row_dims.clone();
                let last = of_shared.len() - 1;
                of_shared[last] = n;
                let mut shared = vec![0; of_shared.len()];
                shared[..dims.len() - 1].copy_from_slice(&from[..dims.len() - 1]);
                shared[last] = 1;
                let own = boxes(&row_dims, &strides(&row_dims), &to);
                vec![
                    one(&boxes(&of_shared, &shared, &to), [0, 0]),
                    call(bytes, &own, [0, n], (rows.span, y.span)),
                ]
            }
            // The same elements in the same order.
            _ if x.span.at == y.span.at => Vec::new(),
            _ => vec![Step::Copy {
                from: x.span.at,
                to: y.span.at,
                bytes: x.span.bytes as usize,
            }],
        };
        Ok(steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: (Span, Span) = (
        Span {
            at: 1 << 20,
            bytes: 0,
        },
        Span {
            at: 1 << 30,
            bytes: 0,
        },
    );

    /// Rank, bytes of an element, and number of elements of a move.
    fn moved(step: Step) -> (i64, &'static str, i64) {
        match step {
            Step::Call(call) => (call.args.n[1], call.types.x[0], call.args.n[0]),
            other => panic!("{other:?} is no call"),
        }
    }

    #[test]
    fn parts_of_projections_are_rows_of_sixteen_bytes() {
        // Queries of [batch, sequence, 3, heads, 64] in bf16.
        let (all, part) = ([2, 5, 3, 12, 64], [2, 5, 12, 64]);
        let mut from = strides(&all);
        from.remove(2);
        let dims = boxes(&part, &from, &strides(&part));
        let n = (2 * 5 * 12 * 64 / 8) as i64;
        assert_eq!(moved(call(2, &dims, [768, 0], AT)), (2, "Quad", n));
        // From an address that is less aligned, fewer bytes at a time.
        let odd = Span {
            at: (1 << 20) + 4,
            ..AT.0
        };
        let n = (2 * 5 * 12 * 64 / 2) as i64;
        assert_eq!(moved(call(2, &dims, [768, 0], (odd, AT.1))), (2, "u32", n));
        // A beginning that splits words.
        let n = (2 * 5 * 12 * 64) as i64;
        assert_eq!(moved(call(2, &dims, [767, 0], AT)), (2, "u16", n));
    }

    #[test]
    fn what_is_one_piece_is_a_copy() {
        let local = Local::whole(ir::DType::F32, &[6, 3, 4]);
        // The second of three pieces of the first dim: 2 x 3 x 4 elements from 24 on.
        match call(4, &cut(&local, 0, 1, 2), [0, 0], AT) {
            Step::Copy { from, to, bytes } => {
                assert_eq!((from - AT.0.at, to - AT.1.at, bytes), (96, 0, 96));
            }
            other => panic!("{other:?} is no copy"),
        }
        // Of the last dim it is rows of two elements; one that reaches past the end is not whole.
        assert_eq!(
            moved(call(4, &cut(&local, 2, 1, 2), [0, 0], AT)),
            (2, "u64", 18)
        );
        assert_eq!(
            moved(call(4, &cut(&local, 2, 1, 3), [0, 0], AT)),
            (2, "u32", 54)
        );
        assert!(
            matches!(call(4, &cut(&local, 0, 0, 0), [0, 0], AT), Step::Call(c) if c.is_empty())
        );
    }
}
